"""Translations of ensembles of decision trees (ai.onnx.ml): all trees are walked at once, by lookups, level by level.

    at = roots [batch, trees]
    at = where(le(x[row, feature[at]], split[at]), yes[at], no[at])     once for each level; a leaf leads to itself
    y = sum over trees of weights[at]

(the "tree traversal" strategy of Nakandala et al., A Tensor Compiler for Unified Machine Learning Prediction Serving,
OSDI 2020, section 4). Where the standard is silent, above all on scores of two classes, numbers are onnxruntime's.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anyshape.frontend.aten.table import Decline
from anyshape.frontend.importer_onnx.model import CLASSICAL
from anyshape.frontend.importer_onnx.table import Call, translates
from anyshape.frontend.importer_onnx_ml.classical import chosen, constant, labels, rows, transformed, wrong
from anyshape.ir.graph import Value

MOST_LEVELS = 1_000  # each is some equations
MOST_WEIGHTS = 1 << 24  # of leaves by targets

# how a branch compares: the row, and whether its children change places
TESTS = {"BRANCH_LEQ": ("le", False), "BRANCH_LT": ("lt", False), "BRANCH_GTE": ("lt", True), "BRANCH_GT": ("le", True),
         "BRANCH_EQ": ("eq", False), "BRANCH_NEQ": ("eq", True)}
MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER")
ROWS_OF_TESTS = ("le", "lt", "eq")


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """Trees as arrays over all nodes of all of them. A leaf leads to itself.

    feature, split: what a node compares, [nodes]. test: by which of ROWS_OF_TESTS, u8. yes, no: where it leads.
    nan: whether NaN leads to yes. roots: [trees]. levels: how many branches there are on the longest way.
    leaves, targets, weights: what a leaf adds to a target.
    """

    feature: np.ndarray
    split: np.ndarray
    test: np.ndarray
    yes: np.ndarray
    no: np.ndarray
    nan: np.ndarray
    roots: np.ndarray
    levels: int
    leaves: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


def _ints(c: Call, name: str) -> np.ndarray:
    return np.asarray(c.attr(name) if c.attr(name) is not None else (), np.int64).reshape(-1)


def _numbers(c: Call, name: str) -> np.ndarray:
    """Numbers that older sets give as floats, newer ones as a tensor too."""
    found = c.attr(f"{name}_as_tensor")
    return np.asarray(c.attr(name) or (), np.float32) if found is None or not found.size else found.reshape(-1)


def _levels(c: Call, roots: np.ndarray, yes: np.ndarray, no: np.ndarray, leaf: np.ndarray) -> int:
    """How many branches there are on the longest way from a root. leaf: which nodes are none."""
    count = len(yes)
    if not len(roots) or min(*(one.min() for one in (roots, yes, no))) < 0 or max(
            *(one.max() for one in (roots, yes, no))) >= count:
        raise wrong(c, "a node names one that is not there")
    level, at = 0, np.unique(roots)
    while True:
        at = at[~leaf[at]]
        if not len(at):
            return level
        at = np.unique(np.concatenate((yes[at], no[at])))
        level += 1
        if level > min(count, MOST_LEVELS):
            raise wrong(c, f"its trees have more than {min(count, MOST_LEVELS)} levels")


def _tests(c: Call, modes: Sequence[str], yes: np.ndarray, no: np.ndarray,
           tracks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """test, yes, no and nan of branches whose modes are those."""
    try:
        found = [TESTS[mode] for mode in modes]
    except KeyError as error:
        raise wrong(c, f"a branch has the mode {error}") from error
    turned = np.array([other for _, other in found], bool)
    test = np.array([ROWS_OF_TESTS.index(row) for row, _ in found], np.uint8)
    nan = np.array([mode == "BRANCH_NEQ" for mode in modes], bool) | tracks  # any other comparison of NaN is false
    return test, np.where(turned, no, yes), np.where(turned, yes, no), nan ^ turned


def forest(c: Call, kind: str) -> Forest:
    """The trees of TreeEnsembleRegressor (kind "target") or TreeEnsembleClassifier ("class")."""
    trees, nodes = _ints(c, "nodes_treeids"), _ints(c, "nodes_nodeids")
    count = len(nodes)
    modes = c.attr("nodes_modes") or ()
    names = [_ints(c, f"nodes_{name}") for name in ("featureids", "truenodeids", "falsenodeids")]
    feature, yes, no = names
    split = _numbers(c, "nodes_values")
    tracks = _ints(c, "nodes_missing_value_tracks_true")
    tracks = tracks if len(tracks) else np.zeros(count, np.int64)
    if not count or any(len(one) != count for one in (trees, modes, split, tracks, *names)):
        raise wrong(c, "its lists of nodes differ in length")
    keys = _keys(c, trees, nodes)
    order = np.argsort(keys, kind="stable")
    if (keys[order][1:] == keys[order][:-1]).any():
        raise wrong(c, "two nodes of a tree have one number")
    leaf = np.array([mode == "LEAF" for mode in modes], bool)
    yes, no = (_places(c, keys, order, _keys(c, trees, np.where(leaf, nodes, one))) for one in (yes, no))
    tests = _tests(c, [mode if mode != "LEAF" else "BRANCH_LEQ" for mode in modes], yes, no, tracks.astype(bool))
    first = np.unique(trees, return_index=True)[1]  # a tree's root is its first node
    at = _places(c, keys, order, _keys(c, _ints(c, f"{kind}_treeids"), _ints(c, f"{kind}_nodeids")))
    targets, weights = _ints(c, f"{kind}_ids"), _numbers(c, f"{kind}_weights")
    if not len(at) == len(targets) == len(weights):
        raise wrong(c, "its lists of weights differ in length")
    kept = leaf[at]  # what a branch weighs is never read
    return Forest(np.where(leaf, 0, feature), split, *tests, first, _levels(c, first, *tests[1:3], leaf), at[kept],
                  targets[kept], weights[kept])


def _keys(c: Call, trees: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """A number for each node, of its tree and its number there."""
    if len(trees) != len(nodes):
        raise wrong(c, "its lists of nodes differ in length")
    if any(len(one) and not 0 <= one.min() <= one.max() < 1 << 31 for one in (trees, nodes)):
        raise wrong(c, "the number of a node or tree is below 0, or too large")
    return trees << 31 | nodes


def _places(c: Call, keys: np.ndarray, order: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Where the nodes of these keys stand."""
    found = order[np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)]
    if (keys[found] != wanted).any():
        raise wrong(c, "a node names one that is not there")
    return found  # type: ignore[no-any-return]


def newer_forest(c: Call) -> Forest:
    """The trees of TreeEnsemble: branches and leaves in lists of their own. A branch that looks for a member of a set
    is a chain of branches that compare with one member each."""
    feature, split = _ints(c, "nodes_featureids"), np.asarray(c.attr("nodes_splits")).reshape(-1)
    count = len(feature)
    modes = [MODES[mode] if 0 <= mode < len(MODES) else str(mode) for mode in _ints(c, "nodes_modes").tolist()]
    tracks = _ints(c, "nodes_missing_value_tracks_true")
    tracks = tracks if len(tracks) else np.zeros(count, np.int64)
    ways = [_ints(c, f"nodes_{name}") for name in ("truenodeids", "trueleafs", "falsenodeids", "falseleafs")]
    targets, weights = _ints(c, "leaf_targetids"), np.asarray(c.attr("leaf_weights")).reshape(-1)
    lengths = {len(split), len(modes), len(tracks), *(len(one) for one in ways)}
    if not count or lengths != {count} or len(targets) != len(weights):
        raise wrong(c, "its lists of nodes differ in length")
    yes, no = (np.where(leafs != 0, -1 - place, place) for place, leafs in (ways[:2], ways[2:]))  # -1 - leaf, or branch
    sets = _sets(c, modes)
    feature_, split_, yes_, no_, modes_, tracks_ = ([list(one) for one in (feature, split, yes, no, modes, tracks)])
    for place, members in sets.items():
        modes_[place], split_[place] = "BRANCH_EQ", members[0]
        at = place
        for member in members[1:]:
            no_[at], end = len(modes_), no_[at]
            at = len(modes_)
            for column, item in ((feature_, feature[place]), (split_, member), (yes_, yes[place]), (no_, end),
                                 (modes_, "BRANCH_EQ"), (tracks_, tracks[place])):
                column.append(item)
    branches, leaves = len(modes_), len(targets)
    ends = np.arange(branches, branches + leaves)
    led = [np.asarray(one, np.int64) for one in (yes_, no_)]
    if any((one < -leaves).any() for one in led):
        raise wrong(c, "a node names a leaf that is not there")
    yes, no = (np.concatenate((np.where(one < 0, branches - 1 - one, one), ends)) for one in led)
    padding = np.zeros(leaves, np.int64)
    tests = _tests(c, modes_ + ["BRANCH_LEQ"] * leaves, yes, no, np.concatenate((tracks_, padding)).astype(bool))
    roots, leaf = _ints(c, "tree_roots"), np.arange(branches + leaves) >= branches
    return Forest(np.concatenate((feature_, padding)), np.concatenate((np.asarray(split_, split.dtype),
                                                                       padding.astype(split.dtype))),
                  *tests, roots, _levels(c, roots, *tests[1:3], leaf), ends, targets, weights)


def _sets(c: Call, modes: Sequence[str]) -> dict[int, list[Any]]:
    """The members of each branch that looks for one; NaN ends a set."""
    places = [place for place, mode in enumerate(modes) if mode == "BRANCH_MEMBER"]
    if not places:
        return {}
    given = np.asarray(c.attr("membership_values") if c.attr("membership_values") is not None else ()).reshape(-1)
    ends = np.flatnonzero(np.isnan(given))
    parts = [given[low:high].tolist() for low, high in zip((0, *(ends + 1)), ends, strict=False)]
    if len(parts) < len(places) or not all(parts):
        raise wrong(c, f"there are {len(parts)} sets of members for {len(places)} branches")
    return dict(zip(places, parts, strict=False))


def reached(c: Call, trees: Forest, x: Value) -> Value:
    """[batch, trees]: the leaf of each tree that a sample comes to. x: [batch, features]."""
    batch, have = x.tensor.shape
    kind = x.tensor.dtype
    need = int(trees.feature.max()) + 1
    if trees.feature.min() < 0 or (isinstance(have, int) and have < need):
        raise wrong(c, f"it compares feature {need - 1}, and its operand has {have}")
    c.assume(have - need)
    count = len(trees.roots)
    row = c.t.reshape(c.t.iota(batch), (batch, 1))
    feature, yes, no = (constant(c, one, "i64") for one in (trees.feature, trees.yes, trees.no))
    split = constant(c, trees.split, kind)
    branch = trees.yes != np.arange(len(trees.yes))
    tests = [place for place in range(len(ROWS_OF_TESTS)) if (trees.test[branch] == place).any()]
    by = constant(c, trees.test, "i64") if len(tests) > 1 else None
    nan = constant(c, trees.nan, "bool") if trees.nan[branch].any() else None
    at = c.t.broadcast(c.t.reshape(constant(c, trees.roots, "i64"), (1, count)), (batch, count))
    for _ in range(trees.levels):
        value = c.op("index", x, row, c.op("take", feature, at, dim=0), dims=(0, 1))
        limit = c.op("take", split, at, dim=0)
        holds = c.op(ROWS_OF_TESTS[tests[0]], value, limit)
        for place in tests[1:]:
            assert by is not None
            other = c.op(ROWS_OF_TESTS[place], value, limit)
            holds = c.t.where(c.op("eq", c.op("take", by, at, dim=0), place), other, holds, "bool")
        if nan is not None:
            holds = c.t.where(c.op("isnan", value), c.op("take", nan, at, dim=0), holds, "bool")
        at = c.t.where(holds, c.op("take", yes, at, dim=0), c.op("take", no, at, dim=0), "i64")
    return at


def scores(c: Call, trees: Forest, x: Value, targets: int, how: str = "SUM") -> Value:
    """[batch, targets]: the weights of the leaves that a sample comes to, of all trees together."""
    kind = x.tensor.dtype
    if len(trees.targets) and not 0 <= trees.targets.min() <= trees.targets.max() < targets:
        raise wrong(c, f"a leaf is of target {trees.targets.max()}, and there are {targets}")
    if how not in ("SUM", "AVERAGE", "MIN", "MAX"):
        raise wrong(c, f"it aggregates by {how}")
    if how in ("MIN", "MAX") and not _always(trees, targets).all():
        raise Decline("leaves without a weight")
    combined, neutral, row = {"MIN": (np.minimum, np.inf, "amin"), "MAX": (np.maximum, -np.inf, "amax")}.get(
        how, (np.add, 0.0, "sum"))
    grouped = _by_target(trees, targets)
    if grouped is not None:  # a number for each node, and as many trees for each target
        table = np.full(len(grouped.yes), neutral)
        combined.at(table, grouped.leaves, grouped.weights)
        found = c.op("take", constant(c, table, kind), reached(c, grouped, x), dim=0)
        found = c.t.reshape(found, (x.tensor.shape[0], targets, len(grouped.roots) // targets))
        total = c.t.reduce(row, found, (2,))
    else:
        if targets * len(trees.yes) > MOST_WEIGHTS:
            raise Decline(f"{len(trees.yes)} nodes of {targets} targets")
        table = np.full((len(trees.yes), targets), neutral)
        combined.at(table, (trees.leaves, trees.targets), trees.weights)
        total = c.t.reduce(row, c.op("take", constant(c, table, kind), reached(c, trees, x), dim=0), (1,))
    return c.op("div", total, float(len(trees.roots))) if how == "AVERAGE" else total


def _by_target(trees: Forest, targets: int) -> Forest | None:
    """The trees in the order of their targets, as many for each: a leaf that weighs nothing fills up. None where a tree
    has several targets, or most would be filling."""
    owner = np.zeros(len(trees.yes), np.int64)
    at = trees.roots
    owner[at] = np.arange(len(at))
    for _ in range(trees.levels):
        at = at[trees.yes[at] != at]
        for way in (trees.yes, trees.no):
            owner[way[at]] = owner[at]
        at = np.concatenate((trees.yes[at], trees.no[at]))
    tree = owner[trees.leaves]
    target = np.full(len(trees.roots), -1)
    target[tree] = trees.targets
    if (target[tree] != trees.targets).any():
        return None
    members = [np.flatnonzero(target == one) for one in range(targets)]
    most = max(len(one) for one in members)
    if not most or most * targets > 2 * len(trees.roots):
        return None
    empty = len(trees.yes)
    roots = np.full((targets, most), empty)
    for one, own in enumerate(members):
        roots[one, :len(own)] = trees.roots[own]

    def more(column: np.ndarray, item: int) -> np.ndarray:
        return np.append(column, np.asarray(item, column.dtype))
    return replace(trees, roots=roots.reshape(-1), feature=more(trees.feature, 0), split=more(trees.split, 0),
                   test=more(trees.test, 0), yes=more(trees.yes, empty), no=more(trees.no, empty),
                   nan=more(trees.nan, 0))


def _always(trees: Forest, targets: int) -> np.ndarray:
    """[targets]: whether every sample gets a weight of the target, for all leaves of some tree have one."""
    has = np.zeros((len(trees.yes), targets), bool)
    has[trees.leaves, trees.targets] = True
    at, leaf = trees.roots, trees.yes == np.arange(len(trees.yes))
    found = np.where(leaf[:, None], has, True)
    for _ in range(trees.levels):  # of a node: of all leaves below it
        found = np.where(leaf[:, None], has, found[trees.yes] & found[trees.no])
    return found[at].any(0)  # type: ignore[no-any-return]


def _floats(c: Call) -> str:
    """The dtype that trees compute in: f64 of operands of f64, else f32."""
    return "f64" if c.dtype() == "f64" else "f32"


def _based(c: Call, total: Value, base: np.ndarray) -> Value:
    return c.t.pointwise("add", total, constant(c, base, total.tensor.dtype),  # type: ignore[no-any-return]
                         dtype=total.tensor.dtype)


@translates("TreeEnsembleRegressor", domain=CLASSICAL)
def tree_regressor(c: Call) -> Any:
    count, how = int(c.attr("n_targets", 1)), c.attr("post_transform", "NONE")
    total = scores(c, forest(c, "target"), rows(c, _floats(c)), count, c.attr("aggregate_function", "SUM"))
    base = _numbers(c, "base_values")
    total = _based(c, total, base) if len(base) == count else total
    return c.t.cast(transformed(c, total, how if count > 1 or how == "PROBIT" else "NONE"), "f32")


@translates("TreeEnsemble", domain=CLASSICAL)
def tree_ensemble(c: Call) -> Any:
    count = int(c.attr("n_targets", 1))
    how = ("AVERAGE", "SUM", "MIN", "MAX")[int(c.attr("aggregate_function", 1))]
    after = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")[int(c.attr("post_transform", 0))]
    total = scores(c, newer_forest(c), rows(c, _floats(c)), count, how)
    return c.t.cast(transformed(c, total, after if count > 1 or after == "PROBIT" else "NONE"), c.dtype())


@translates("TreeEnsembleClassifier", domain=CLASSICAL)
def tree_classifier(c: Call) -> Any:
    named, how = labels(c, "classlabels_int64s"), c.attr("post_transform", "NONE")
    trees, base = forest(c, "class"), _numbers(c, "base_values")
    x, count = rows(c, _floats(c)), len(named)
    total = scores(c, trees, x, count)
    if count < 2:
        raise Decline("one class")
    always = _always(trees, count)
    if count > 2:
        if len(base) not in (0, count) or not (always.all() or len(base)):
            raise Decline("classes that only some samples have a score of")
        total = _based(c, total, base) if len(base) else total
        label = chosen(c, total, named)
    else:
        label, total, how = _of_two(c, trees, total, base, bool(always[1]), named, how)
    return label, c.t.cast(transformed(c, total, how), "f32")


def _of_two(c: Call, trees: Forest, total: Value, base: np.ndarray, second: bool, named: np.ndarray,
            how: str) -> tuple[Value, Value, str]:
    """Label, scores and transform of two classes, as onnxruntime has it: where only the first class has weights, its
    score is that of the positive class, and the other one's is made of it."""
    classes = np.unique(trees.targets)
    if 1 in classes and not second:
        raise Decline("classes that only some samples have a score of")
    batch = total.tensor.shape[0]
    first, other = (c.t.window(total, 1, place, 1) for place in (0, 1))
    nothing = c.t.full(0.0, first.tensor.shape, first.tensor.dtype)
    if len(base) == 2 and second:
        other = c.op("add", first, float(base[1]))
        first = c.op("neg", other)
    elif len(base):
        first = c.op("add", first, float(base[0]))
    first = first if 0 in classes else nothing
    positive = other if second else first
    mixed = bool((trees.weights < 0).any())
    holds = c.t.reshape(c.op("gt", positive, 0.5 if len(classes) == 1 and not mixed else 0.0), (batch,))
    negative_label, positive_label = (0, 1) if len(classes) == 2 else (int(one) for one in named)
    label = c.t.where(holds, positive_label, negative_label, "i64")
    if second or len(base) == 2:
        return label, c.op("concat", first, other if second else nothing, dim=1), how
    if how == "PROBIT":
        raise Decline("the transform PROBIT of one score")
    if how == "LOGISTIC" or mixed:
        pair = c.op("neg", first)
    else:
        pair = c.op("sub", c.t.full(1.0, first.tensor.shape, first.tensor.dtype), first)
    return label, c.op("concat", pair, first, dim=1), how if how == "LOGISTIC" else "NONE"
