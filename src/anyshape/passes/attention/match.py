"""Attention that is written out: a softmax over a product of queries and keys, and the products that read its weights.

The search goes back from the weights, through the softmax and the steps that scaling and masks are made of, to the
first product. Nothing is asked of the order of dims: their axes are followed (score_axes.py).
"""
from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from anyshape.ir.graph import Graph, Node, Operand, Value, has_effect
from anyshape.ir.op import row, type_of
from anyshape.passes.attention.score_axes import Axes, Axis, Dims, Equations, Unmatched

WIDE = {"f16": "f32", "bf16": "f32", "f32": "f32", "f64": "f64"}  # dtype of products -> of scores and masks
FAR = -1e8  # a number to fill with that no score comes near
DEEP = -1e30  # one beside which a score is nothing, in float32 and in float64
HIDDEN, NAN = "hidden", "nan"  # rows that are 0
_VIEWS = ("reshape", "permute")


class Readers:
    """Who reads a value, of those whose results are needed; None stands for the caller."""

    def __init__(self, graph: Graph) -> None:
        self.of: dict[str, set[str | None]] = {value.name: {None} for value in graph.roots()}
        for node in reversed(graph.nodes):
            if has_effect(node) or any(value.name in self.of for value in node.outputs):
                for value in node.values():
                    self.of.setdefault(value.name, set()).add(node.outputs[0].name if node.outputs else None)


@dataclass(slots=True)
class Match:
    """A softmax over a product: the steps between, and the axes that dims are made of.

    steps: with the place of the scores among their operands. axes: of what is made of the product. lifted: the
    exponentials. inside: equations from the weights back to the product. lead: axes that keys have too; rows: of
    queries alone. turned: keys are the product's left operand. zeroed: rows that are 0, those whose keys are all
    masked or those that would be NaN.
    """

    first: Node
    axes: Axes
    lifted: Value
    steps: list[tuple[Node, int]] = field(default_factory=list)
    inside: list[Node] = field(default_factory=list)
    lead: list[Axis] = field(default_factory=list)
    rows: list[Axis] = field(default_factory=list)
    column: Axis = field(default_factory=lambda: Axis(0))
    turned: bool = False
    zeroed: str = ""


@dataclass(slots=True)
class Product:
    """A product that reads weights or their gradient: which operand they are, and the equations above the match."""

    node: Node
    side: int
    dims: Dims
    inside: list[Node] = field(default_factory=list)

    @property
    def other(self) -> Operand:
        return self.node.inputs[1 - self.side]

    def around(self, depth: Axis) -> Dims:
        """The axes of the other operand's dims, whose own is `depth`."""
        columns = self.dims[-1 if self.side == 0 else -2]
        return (*self.dims[:-2], *turned((columns, (depth,)), self.side == 1))

    def result(self, depth: Axis) -> Dims:
        """The axes of the result's dims."""
        rows = self.dims[-2 if self.side == 0 else -1]
        return (*self.dims[:-2], *turned((rows, (depth,)), self.side == 1))


def turned(pair: tuple[tuple[Axis, ...], tuple[Axis, ...]], on: bool) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """The two exchanged, where `on`."""
    return pair[::-1] if on else pair


class Softmaxes:
    """Those over products in a graph, each looked for once."""

    def __init__(self, graph: Equations) -> None:
        self.graph = graph
        self.found: dict[str, Match | None] = {}

    def below(self, operand: Operand) -> tuple[Match, list[Node]]:
        """The softmax whose weights an operand shows, and the views and casts between.

        Raises:
            Unmatched: there is none.
        """
        above: list[Node] = []
        weights = _back(self.graph, operand, above)
        if not isinstance(weights, Value):
            raise Unmatched
        if weights.name not in self.found:
            self.found[weights.name] = None
            self.found[weights.name] = _softmax_of(self.graph, weights)
        found = self.found[weights.name]
        if found is None:
            raise Unmatched
        return found, above


def _softmax_of(graph: Equations, weights: Value) -> Match | None:
    try:
        return _found(graph, weights)
    except Unmatched:
        return None


def _found(graph: Equations, weights: Value) -> Match:
    inside: list[Node] = []
    guard = total = graph.producer(weights)
    if guard is not None and guard.op == "where":
        place = 2 if guard.inputs[1] == 0 else 1
        if guard.inputs[3 - place] != 0:
            raise Unmatched
        inside.append(guard)
        total = graph.producer(_back(graph, guard.inputs[place], inside))
    else:
        guard = None
    if total is None or total.op != "div":
        raise Unmatched
    inside.append(total)
    lifted = _made(graph, total.inputs[0], "exp", inside)
    less = _made(graph, lifted.inputs[0], "sub", inside)
    first, steps = _scores(graph, less.inputs[0], inside)
    if WIDE.get(first.output.tensor.dtype) is None or first.output.tensor.device != "cpu" or first.attrs:
        raise Unmatched
    axes = Axes(graph, first, {node.output.name: place for node, place in steps})
    found = Match(first, axes, lifted.output, steps, inside)
    _softmax(graph, found, total, less, inside)
    if guard is not None:
        axes.places[guard.output.name] = place
        found.zeroed = _empty_rows(graph, found, guard.inputs[0], place == 2, guard.inputs[place],
                                   less.inputs[0], inside)
    return found


def _back(graph: Equations, operand: Operand, inside: list[Node]) -> Operand:
    """What casts and views show, which are noted."""
    while (node := graph.producer(operand)) is not None and node.op in (*_VIEWS, "cast"):
        inside.append(node)
        operand = node.inputs[0]
    return operand


def _made(graph: Equations, operand: Operand, op: str, inside: list[Node]) -> Node:
    node = graph.producer(_back(graph, operand, inside))
    if node is None or node.op != op:
        raise Unmatched
    inside.append(node)
    return node


def _scores(graph: Equations, operand: Operand, inside: list[Node]) -> tuple[Node, list[tuple[Node, int]]]:
    """The first product, and the steps from it on, in order."""
    node = graph.producer(_back(graph, operand, inside))
    if node is None:
        raise Unmatched
    inside.append(node)
    if node.op == "matmul":
        return node, []
    for place in _STEPS.get(node.op, ()):
        kept = len(inside)
        try:
            first, steps = _scores(graph, node.inputs[place], inside)
        except Unmatched:
            del inside[kept:]
            continue
        return first, [*steps, (node, place)]
    raise Unmatched


# op -> where the scores may stand among its operands
_STEPS: dict[str, tuple[int, ...]] = {"mul": (0, 1), "div": (0,), "add": (0, 1), "sub": (0,), "where": (1, 2)}


def _softmax(graph: Equations, found: Match, total: Node, less: Node, inside: list[Node]) -> None:
    """What is taken off is the largest score of a row, what is divided by the sum of it, along one axis."""
    axes = found.axes
    scores = axes.of(less.inputs[0])
    top = _spread(graph, less.inputs[1], inside)
    if top.op == "maximum":
        place = next((at for at in (0, 1) if top.inputs[at] == -math.inf), None)
        if place is None:
            raise Unmatched
        inside.append(top)
        axes.places[top.output.name] = 1 - place
        top = _spread(graph, top.inputs[1 - place], inside)
    below = _spread(graph, total.inputs[1], inside)
    if top.op != "amax" or below.op != "sum":
        raise Unmatched
    inside += [top, below]
    for one, other in ((top, less), (below, total)):
        if not same(graph, _back(graph, one.inputs[0], inside), _back(graph, other.inputs[0], inside), inside):
            raise Unmatched
    along = {axis for operand in (top, below) for axis in axes.reduced(operand)}
    if len(along) != 1:
        raise Unmatched
    found.column, = along
    row = tuple(() if found.column in dim else dim for dim in scores)
    if (found.column,) not in scores or axes.of(less.inputs[1]) != row:
        raise Unmatched
    weights = axes.of(total.inputs[0])
    if axes.of(total.inputs[1]) != tuple(() if found.column in dim else dim for dim in weights):
        raise Unmatched


def _spread(graph: Equations, operand: Operand, inside: list[Node]) -> Node:
    """What makes a number for each row, below views and casts that spread it out."""
    while (node := graph.producer(operand)) is not None and node.op in (*_VIEWS, "cast", "broadcast"):
        inside.append(node)
        operand = node.inputs[0]
    if node is None:
        raise Unmatched
    return node


def same(graph: Equations, a: Operand, b: Operand, inside: list[Node], depth: int = 12) -> bool:
    """The same value, or equal equations of the same values, as programs have before they are made one; those of `a`
    are noted."""
    if a == b:
        return True
    one, other = graph.producer(a), graph.producer(b)
    if one is None or other is None or not depth or (one.op, one.attrs) != (other.op, other.attrs) \
            or len(one.inputs) != len(other.inputs) or len(one.outputs) != 1 or has_effect(one) or row(one).random:
        return False
    inside.append(one)
    return all(same(graph, x, y, inside, depth - 1) for x, y in zip(one.inputs, other.inputs, strict=True))


def _empty_rows(graph: Equations, found: Match, condition: Operand, holds: bool, weights: Operand, scores: Operand,
                inside: list[Node]) -> str:
    """What a condition says of each row: that its scores, or all that is added to them, are minus infinity; or that its
    weights are NaN.

    Raises:
        Unmatched: it says something else.
    """
    between: list[Node] = []
    equal = most = _spread(graph, condition, between)
    if holds and equal.op == "isnan" and same(graph, equal.inputs[0], weights, between):
        inside += [*between, equal]
        return NAN
    if most.op == "all":
        equal = _spread(graph, most.inputs[0], between)
    elif equal.op == "eq":
        most = _spread(graph, equal.inputs[0], between)
    if not holds or equal.op != "eq" or equal.inputs[1] != -math.inf or most.op not in ("all", "amax"):
        raise Unmatched
    what = most.inputs[0] if most.op == "amax" else equal.inputs[0]
    assert isinstance(what, Value) and isinstance(condition, Value)
    if most.attr("dims") != (what.tensor.rank - 1,) or condition.tensor.shape != (*what.tensor.shape[:-1], 1) \
            or any(node.op == "permute" for node in between) or found.axes.of(scores)[-1] != (found.column,):
        raise Unmatched
    inside += [*between, equal, most]
    terms = [node.inputs[1 - place] for node, place in found.steps if node.op == "add"]
    whole = [scores] if any(node.op != "mul" for node, _ in found.steps) else []
    kept = [node for node, _ in found.steps if node.op not in ("mul", "div")]
    for one in [*whole, *(terms if len(kept) == 1 else [])]:
        noted: list[Node] = []
        if same(graph, _back(graph, what, noted), _back(graph, one, noted), noted):
            inside += noted
            return HIDDEN
    raise Unmatched


def operands_of(found: Match, dims: Dims, node: Node, side: int, summed: bool) -> None:
    """Sees which axes keys have, which queries alone, and that a product of weights, whose dims these are, takes those
    and no others; `summed`: it goes along keys, otherwise along queries.

    Raises:
        Unmatched: it is another product.
    """
    axes, first = found.axes, found.first
    lead, (above, across) = axes.of(first.output)[:-2], axes.of(first.output)[-2:]
    found.turned = found.column in above
    if (above if found.turned else across) != (found.column,):
        raise Unmatched
    found.lead, found.rows = [axis for dim in lead for axis in dim], list(across if found.turned else above)
    shared, pair = dims[:-2], dims[-2:]
    inner, kept = pair if side else pair[::-1]
    columns, rows = (inner, kept) if summed else (kept, inner)
    if columns != (found.column,) or {axis for dim in shared for axis in dim} != set(found.lead) \
            or set(rows) != set(found.rows) or not found.rows:
        raise Unmatched
    depth = type_of(first.inputs[1 if found.turned else 0]).shape[-2 if found.turned else -1]
    if depth != type_of(node.inputs[1 - side]).shape[-2 if side else -1]:
        raise Unmatched


def alone(inside: Iterable[Node], products: Iterable[Node], readers: Readers) -> None:
    """Nobody else reads what would not be there any more.

    Raises:
        Unmatched: somebody does.
    """
    inside = list(inside)
    names: set[str | None] = {node.output.name for node in (*products, *inside)}
    if any(not readers.of.get(node.output.name, set()) <= names for node in inside):
        raise Unmatched


def check_dtypes(kind: str, inside: Iterable[Node]) -> None:
    """Steps are in the dtype of the products, or in a wider one.

    Raises:
        Unmatched: one is not.
    """
    allowed = (kind, WIDE.get(kind), "bool")
    if any(node.output.tensor.dtype not in allowed for node in inside):
        raise Unmatched
