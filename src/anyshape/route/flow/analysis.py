"""Static cell flow: which cells of one router the cells of another are computed from, proved on the captured graph.

    flow = route.analyze(model, x)
    flow.between("blocks.0.moe", "blocks.1.moe")     identity, permutation, subset, mixed or none; with the map
    flow.independent("blocks.0.moe.branches.3")      whether each row of a module's result is of its own row alone

The idea is Brainstorm's (OSDI'23, section 5.1: symbolic execution at the granularity of cells), done here by running
the program's own operators on arrays of owners.
"""
from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Node

from anyshape.base.errors import InputError
from anyshape.route.core.router import Router
from anyshape.route.flow.call import TensorValue, values_in
from anyshape.route.flow.capture import CaptureFailed, capture, module_of
from anyshape.route.flow.interpret import (
    InterpretedProgram,
    Unsized,
    interpret,
    is_apart,
    prepare,
    row_seeds,
    sized,
    starts_of,
)
from anyshape.route.flow.owners import NONE, TOP, CellSets, rows
from anyshape.route.flow.regions import RouterCall
from anyshape.route.flow.rowwise import Verdict, branch_independent
from anyshape.route.profile.first_calls import first_calls

INPUT, OUTPUT = "input", "output"


@dataclass(frozen=True)
class Relation:
    """How the cells of one place are computed from those of another.

    kind: "identity" (cell i is of cell i alone), "permutation", "subset" (each cell is of at most one; some are left
        out, or used twice), "mixed", or "none" (no cell is of any). sources: how many cells there are to be of.
    map: int64 [cells], the one cell that each is of, -1 for none; None where mixed, or `inside`.
    sets: per cell the cells that it is of, None for any.
    inside: names of routers of which one of the two places is in a branch and the other is not: which rows are there
        their plans say at run time, and `sets` are as if every cell were sent there, in order.
    assumed: an operator without a rule was probed and believed; nothing may rely on it. reason: why it is no better.
    """

    kind: str
    sources: int
    map: np.ndarray | None = None
    sets: tuple[frozenset[int] | None, ...] = field(default=(), repr=False)
    inside: tuple[str, ...] = ()
    assumed: bool = False
    reason: str = ""

    @property
    def apart(self) -> bool:
        """Whether each cell is of at most one cell, proved."""
        return self.map is not None and not self.assumed


@dataclass(frozen=True, eq=False)
class Flow:
    """The cell flow of a model at the shapes of its example.

    routers: names of the router calls, in the order of the graph; a second call of one router is `name:1`. reason:
    why there is no graph, if there is none; every relation is mixed then.
    """

    model: nn.Module = field(repr=False)
    example: tuple[Any, ...] = field(repr=False)
    shared: InterpretedProgram | None = field(repr=False)
    modules: Mapping[str, tuple[Any, ...]] = field(repr=False)
    reason: str = ""
    _runs: dict[tuple[str, bool, bool], dict[Node, Any]] = field(default_factory=dict, repr=False)
    _verdicts: dict[str, Verdict] = field(default_factory=dict, repr=False)

    @property
    def routers(self) -> tuple[str, ...]:
        return tuple(region.name for region in self.shared.regions) if self.shared else ()

    def region(self, name: str) -> RouterCall:
        """The region of a router call.

        Raises:
            InputError: no router of that name.
        """
        for region in self.shared.regions if self.shared else ():
            if region.name == name:
                return region
        raise InputError(f"{name!r} is no router of the analysed graph", why=f"routers are {', '.join(self.routers)}",
                         do=f"name one of them, {INPUT!r} or {OUTPUT!r}")

    def keeps_rows_apart(self, name: str) -> bool:
        """Whether each row that a router's branches return is computed from its own row alone."""
        return self.shared is not None and self.region(name).plan in self.shared.apart

    def between(self, a: str, b: str, *, decisions: bool = True, probes: bool = False) -> Relation:
        """How the cells that come to b are computed from the results of a.

        Args:
            a: a router, whose combined results are the sources, or, where b stands in a branch of a, its cells;
                "input": dim 0 of the first tensor argument (others count as constants).
            b: a router: its cells; "output": dim 0 of the first tensor that the model returns.
            decisions: a cell of b depends on what decides its route, too. Without, only on its values.
            probes: operators without a rule are probed, and believed (the relation says `assumed`).
        """
        if self.shared is None:
            return Relation("mixed", 0, reason=self.reason)
        for name in (a, b):
            if name not in self.routers and isinstance(dict(self.model.named_modules()).get(name), Router):
                if any(node.op == "get_attr" for node in self.shared.program.nodes):
                    return Relation("mixed", 0, reason=f"{name} is within a higher-order operator")
                return Relation("none", 0, reason=f"{name} is not called, or nothing reads its result")
        targets, around_b = self._targets(b, decisions)
        sources, around_a, found = self._from(a, a in around_b, probes)
        values = [value for value in (self._value(found, node) for node in targets) if value is not None]
        if not values:
            return Relation("none", sources, reason="no tensor is there")
        count = values[0].shape[0] if values[0].rank else 1
        owners = self.shared.sets.join(*(_per_cell(self.shared.sets, value, count) for value in values)).expand(count)
        left, entered = set(around_a) - set(around_b), set(around_b) - set(around_a)
        inside = tuple(name for name in self.routers if name in left | entered)
        data_order = "rows of a branch are in an order that is data"
        if bool((owners != NONE).any()):
            if entered and (b == OUTPUT or not all(self._rows_apart(name, targets) for name in entered)):
                owners = torch.full_like(owners, TOP)
            elif around_a:
                owners = _contained(self.shared.sets, owners, sources)
        return self._relation(owners, sources, inside, probes,
                              data_order if around_a or entered else "")

    def independent(self, what: str | nn.Module) -> Verdict:
        """Whether each row (dim 0) of a module's results is computed from the same row of its arguments, in the same
        way for every row and every number of rows.

        what: a module of the model, by name or itself; its arguments are those of its first call on the example.

        Raises:
            InputError: no such module.
        """
        name = next((own for own, one in self.model.named_modules() if one is what), None) \
            if isinstance(what, nn.Module) else what
        known = dict(self.model.named_modules())
        if name is None or name not in known:
            raise InputError(f"{what!r:.80} is no module of the model", do="give a name of named_modules()")
        if name not in self._verdicts:
            given = self.modules.get(name)
            self._verdicts[name] = branch_independent(known[name], *given) if given else \
                Verdict("unknown", "the example does not call it with tensors only")
        return self._verdicts[name]

    def operators(self) -> list[tuple[str, str, str, bool]]:
        """Per operator its node, name, module, and whether each row (dim 0) of its result is of one row alone."""
        if self.shared is None:
            return []
        return [(node.name, str(node.target), module_of(node), _operator_apart(self.shared, node))
                for node in self.shared.live if node.target is not operator.getitem and _first(node) is not None]

    # ---- parts

    def _context(self, node: Node) -> tuple[str, ...]:
        assert self.shared is not None
        return tuple(region.name for region in self.shared.regions if node in region.body)

    def _from(self, name: str, inner: bool, probes: bool) -> tuple[int, tuple[str, ...], dict[Node, Any]]:
        """How many cells a source has, the routers in whose branches it is, and the values that follow from it.

        inner: what is asked stands in the source's own branches: its cells are the sources then, not its results.
        """
        assert self.shared is not None
        if name == INPUT:
            nodes, each = _tensors(self.shared.program.inputs)[:1], 1
        elif inner:
            nodes = starts_of(self.region(name))
            each = self.shared.choices(self.region(name))
        else:
            nodes, each = list(self.region(name).combines), 1
        if not nodes:
            return 0, (), {}
        seeds = {node: row_seeds(self.shared, node) // each for node in nodes}
        context = tuple(one for one in self._context(nodes[0]) if not (inner and one == name))
        if (name, inner, probes) not in self._runs:
            self._runs[name, inner, probes] = interpret(self.shared, seeds, probes=probes)
        return int(seeds[nodes[0]].max()) + 1, context, self._runs[name, inner, probes]

    def _targets(self, name: str, decisions: bool) -> tuple[list[Node], tuple[str, ...]]:
        assert self.shared is not None
        if name == OUTPUT:
            found = _tensors(one for one in self.shared.program.outputs if isinstance(one, Node))[:1]
        else:
            region = self.region(name)
            found = [one.args[0] for one in region.dispatches if isinstance(one.args[0], Node)]
            found += [region.ids] if decisions else []
        return found, self._context(found[0]) if found else ()

    def _value(self, found: Mapping[Node, Any], node: Node) -> TensorValue | None:
        assert self.shared is not None
        value = found.get(node, self.shared.constants.get(node))
        return value if isinstance(value, TensorValue) else None

    def _rows_apart(self, name: str, targets: list[Node]) -> bool:
        """Whether values in a router's branches are, row by row, of the rows that it sent there."""
        assert self.shared is not None
        region = self.region(name)
        if region.plan not in self.shared.apart:
            return False
        seeds = {node: row_seeds(self.shared, node) for node in starts_of(region)}
        found = interpret(self.shared, seeds, default=TOP, among=region.body)
        values = [self._value(found, node) for node in targets]
        return all(value is not None and is_apart(self.shared.sets, value) for value in values)

    def _relation(self, owners: Tensor, sources: int, inside: tuple[str, ...], probes: bool, why: str) -> Relation:
        assert self.shared is not None
        sets, unknown = self.shared.sets, self.shared.unknown
        reason = "; ".join([*([why] if why else []), *(f"{name}: {text}" for name, text in unknown.items())])
        kind, mapped = _kind(owners, sources, bool(inside))
        found = {owner: sets.cells(owner) for owner in torch.unique(owners).tolist()}
        return Relation(kind, sources, mapped, tuple(found[one] for one in owners.tolist()), inside,
                        probes and bool(unknown), reason if kind == "mixed" else "")


def _contained(sets: CellSets, owners: Tensor, sources: int) -> Tensor:
    """Owners of values around which a router's branch stands: its rows are any, in any order, so that only a relation
    which is the same for each row holds: cell i of its own `each` sources. Anything else may be of any cell."""
    each = sources // max(len(owners), 1)
    for place, owner in enumerate(owners.tolist()):
        found = sets.cells(owner)
        if each < 1 or found is None or not found <= set(range(place * each, (place + 1) * each)):
            return torch.full_like(owners, TOP)
    return torch.arange(len(owners), dtype=torch.int32) if each == 1 else owners


def _per_cell(sets: CellSets, value: TensorValue, count: int) -> Tensor:
    if not value.rank:
        return value.owners.reshape(1)
    owners = sets.reduce(value.owners, range(1, value.rank)).reshape(-1)
    if value.shape[0] != count:
        return torch.tensor([sets.all_of(owners)], dtype=torch.int32)
    return owners


def _kind(owners: Tensor, sources: int, inside: bool) -> tuple[str, np.ndarray | None]:
    if bool((owners == NONE).all()):
        return "none", np.full(owners.numel(), -1, dtype=np.int64)
    if bool((owners <= TOP).any()):
        return "mixed", None
    mapped = owners.numpy().astype(np.int64)
    if inside:
        return "subset", None
    if len(mapped) == sources and bool((mapped == np.arange(sources)).all()):
        return "identity", mapped
    once = len(mapped) == sources and len(set(mapped.tolist())) == sources and bool((mapped >= 0).all())
    return ("permutation" if once else "subset"), mapped


def _tensors(nodes: Any) -> list[Node]:
    return [node for node in nodes if isinstance(node.meta.get("val"), Tensor) and node.meta["val"].dim()]


def _first(node: Node) -> Tensor | None:
    """The first tensor that an operator returns, as the capture describes it."""
    found = node.meta.get("val")
    found = found[0] if isinstance(found, (list, tuple)) and found else found
    return found if isinstance(found, Tensor) and found.dim() else None


def _operator_apart(shared: InterpretedProgram, node: Node) -> bool:
    """One operator by itself: live operands with as many rows as the result are rows, all others may be of any cell."""
    result = _first(node)
    assert result is not None
    count = sized(shared, result.shape[0])
    seeds = {}
    for one in node.all_input_nodes:
        meta = one.meta.get("val")
        if one not in shared.constants and isinstance(meta, Tensor) and meta.dim() \
                and sized(shared, meta.shape[0]) == count:
            seeds[one] = rows(count, meta.dim())
    found = interpret(shared, seeds, default=TOP, among=frozenset({node})).get(node)
    values = values_in(found)
    return bool(values) and is_apart(shared.sets, values[0])


# ---- the front


def analyze(model: nn.Module, *example: Any) -> Flow:
    """The cell flow of a model at the shapes of an example.

    Args:
        model: any module that torch.export takes; it runs once on the example. Values of its buffers, and of its
            parameters that need no gradient, are taken as they are now: analyse again where they have changed.
        example: its positional arguments.

    Returns:
        A flow. Where the model cannot be captured, its `reason` says why, and all is mixed.
    """
    modules = first_calls(model, dict(model.named_modules()), example, _without_rows)
    try:
        shared = prepare(capture(model, example))
    except (CaptureFailed, Unsized) as fault:
        return Flow(model, example, None, modules, str(fault))
    return Flow(model, example, shared, modules)


def _without_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Arguments that are tensors with rows, as tensors of their shapes, without rows."""
    if not args or kwargs or not all(isinstance(one, Tensor) and one.dim() for one in args):
        return None
    return tuple(one.new_empty((0, *one.shape[1:])) for one in args)
