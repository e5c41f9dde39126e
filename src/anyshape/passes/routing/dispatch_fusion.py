"""Gather and scatter fusion of grouped products: rows that a route sorts are read where they lie, and results are
written where they go.

before:
    graph example(x: f32[n, 2, 9], i: i64[n, 1], w: f32[3, 2, 2, 1])
      order, inverse, e = route_plan(i | branches=3)  i64[n], i64[n], i32[3]
      rows = take(x, order | dim=0)             f32[n, 2, 9]
      y = grouped_conv(rows, w, e | stride=[1], padding=[0], dilation=[1])  f32[n, 2, 9]
      z = take(y, inverse | dim=0)              f32[n, 2, 9]
      return z
after:
    graph example(x: f32[n, 2, 9], i: i64[n, 1], w: f32[3, 2, 2, 1])
      order, inverse, e = route_plan(i | branches=3)  i64[n], i64[n], i32[3]
      rows = take(x, order | dim=0)             f32[n, 2, 9]
      y = grouped_conv(x, w, e, order | stride=[1], padding=[0], dilation=[1], gathered)  f32[n, 2, 9]
      z = grouped_conv(x, w, e, order | stride=[1], padding=[0], dilation=[1], gathered, scattered)  f32[n, 2, 9]
      return z

What nobody reads any more is swept behind it. The routines copy their rows anyway, into panels or between margins, so
the dispatched rows are never in memory (ScatterMoE, Tan et al., 2024, section 3). Dispatch (frontend/aten/routing.py)
makes rows past the last end zero, which no group reads; `grouped` makes such results zero, so a mask of them is needed
behind neither. A gather is absorbed where nobody else reads the rows: else they are in memory in any case. Orders are
those of a `route_plan` in the graph, whose places are within bounds and a permutation.
"""
from __future__ import annotations

from dataclasses import dataclass

from anyshape.base.config import Config
from anyshape.ir.graph import Graph, Node, Operand, Value
from anyshape.ir.op import row
from anyshape.passes.rewriter import Replay, replay, strided_results
from anyshape.sym.expr import Expr

GATHERING, SCATTERING = ("grouped", "grouped_conv"), ("grouped_conv",)
DENSE = ("grouped_conv",)  # these want rows without gaps


def dispatch_fusion(graph: Graph, config: Config) -> Graph:
    """The graph with grouped products that read and write rows where a route has them."""
    if not any(node.op == "route_plan" for node in graph.nodes):
        return graph
    return _scattered(_gathered(graph))


class _Uses:
    """Who makes and who reads the values of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.producers = {value.name: node for node in graph.nodes for value in node.outputs}
        self.readers: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for value in node.values():
                self.readers.setdefault(value.name, []).append(node)
        self.kept = {value.name for value in graph.roots()} | {value.name for _, value in graph.writes}

    def producer(self, operand: Operand) -> Node | None:
        return self.producers.get(operand.name) if isinstance(operand, Value) else None

    def of_op(self, operand: Operand, op: str) -> Node | None:
        node = self.producer(operand)
        return node if node is not None and node.op == op else None

    def only(self, value: Value) -> list[Node]:
        """Its readers, if nobody else has it."""
        return [] if value.name in self.kept else self.readers.get(value.name, [])

    def before_last(self, operand: Operand, places: Operand | None, ends: Operand) -> bool:
        """Is it where `places` (None: 0, 1, 2, ...) are before the last of the ends?"""
        node = self.of_op(self.source(operand, ("reshape", "broadcast")), "lt")
        if node is None:
            return False
        left, right = node.inputs
        counted = self.of_op(left, "iota")
        if places is None and (counted is None or counted.attr("start") != 0 or counted.attr("step") != 1):
            return False
        return (places is None or left == places) and self.is_last(right, ends)

    def is_last(self, operand: Operand, ends: Operand) -> bool:
        assert isinstance(ends, Value)
        found = self.source(operand, ("reshape", "cast"))
        part, count = self.of_op(found, "slice"), ends.tensor.shape[0]
        if part is not None:
            return part.inputs[0] == ends and part.attr("start") == count - 1
        return found == ends and count == 1

    def source(self, operand: Operand, ops: tuple[str, ...]) -> Operand:
        """What it is a view or another dtype of."""
        node = self.producer(operand)
        while node is not None and node.op in ops:
            operand = node.inputs[0]
            node = self.producer(operand)
        return operand

    def dense(self, value: Value) -> bool:
        """Does it lie in memory without gaps?"""
        node = self.producer(value)
        while node is not None and row(node).kind == "view":
            if node.op != "reshape":
                return False
            value = next(node.values())
            node = self.producer(value)
        return value.tensor.layout() == value.tensor.dense().layout()


@dataclass(frozen=True, slots=True)
class _Route:
    """The results of a route plan, and how many choices it has."""

    order: Value
    inverse: Value
    ends: Value
    node: Node


def _route(uses: _Uses, operand: Operand, result: int) -> _Route | None:
    """The route plan that has an operand as that result."""
    node = uses.of_op(operand, "route_plan")
    if node is None or node.outputs[result] != operand:
        return None
    order, inverse, ends = node.outputs
    return _Route(order, inverse, ends, node)


def _has(node: Node, attr: str) -> bool:
    return bool(dict(node.attrs).get(attr))


def _now(rewriting: Replay, value: Value) -> Value:
    """A value as the graph that is written has it."""
    made = rewriting.made.get(value.name)
    return value if made is None else next(one for one in made.outputs if one.name == value.name)


def _zero(operand: Operand) -> bool:
    return not isinstance(operand, Value) and str(operand) in ("0", "0.0")


# ---- dispatch before the product


def _gathered(graph: Graph) -> Graph:
    uses = _Uses(graph)
    found = {node.output.name: absorbed for node in graph.nodes if node.op in GATHERING
             and (absorbed := _dispatched(uses, node)) is not None}

    def rewrite(rewriting: Replay, node: Node) -> Operand | None:
        absorbed = found.get(node.output.name)
        if absorbed is None:
            return None
        cells, order = (_now(rewriting, value) for value in absorbed)
        return rewriting.op(node.op, cells, *node.inputs[1:3], order, *node.inputs[3:],
                            **{**dict(node.attrs), "gathered": True})

    return replay(graph, rewrite) if found else graph


def _dispatched(uses: _Uses, node: Node) -> tuple[Value, Value] | None:
    """The cells and the order of a product's rows, where all that read the rows can have them so."""
    rows, _, ends = node.inputs[:3]
    route = _route(uses, ends, 2)
    if route is None or not isinstance(rows, Value) or {"gathered", "scattered"} & dict(node.attrs).keys():
        return None
    masked = uses.of_op(rows, "where")
    taken = uses.of_op(rows, "take")
    if masked is not None and _zero(masked.inputs[2]) and uses.before_last(masked.inputs[0], None, ends):
        taken = uses.of_op(masked.inputs[1], "take")
        if taken is not None and len(uses.only(taken.output)) != 1:
            return None
    if taken is None or taken.attr("dim") != 0:
        return None
    if not all(other.op in GATHERING and other.inputs[0] == rows and other.inputs[2] == ends
               and rows not in other.inputs[1:] for other in uses.only(rows)) or not uses.only(rows):
        return None
    cells, order = taken.inputs
    assert isinstance(cells, Value) and isinstance(order, Value)
    divided = uses.of_op(order, "floor_div")
    first, choices = (order, 1) if divided is None else divided.inputs
    (count, each), = (value.tensor.shape for value in route.node.values())
    if first != route.order or not isinstance(choices, (int, Expr)) or cells.tensor.shape[0] * choices != count * each:
        return None
    if any(other.op in DENSE for other in uses.only(rows)) and not uses.dense(cells):
        return None
    return cells, order


# ---- combine behind it


def _scattered(graph: Graph) -> Graph:
    uses = _Uses(graph)
    strided = strided_results(graph)
    found: dict[str, tuple[Node, Value]] = {}
    for node in graph.nodes:
        if node.op == "take" and (combined := _combined(uses, node)) is not None:
            found[_unmasked(uses, node, combined[0])] = combined

    def rewrite(rewriting: Replay, node: Node) -> Operand | None:
        if node.output.name not in found or node.output.name in strided:
            return None
        product, order = found[node.output.name]
        made = rewriting.made[product.output.name]
        behind = made.inputs[4:] if _has(made, "gathered") else made.inputs[3:]
        return rewriting.op(made.op, *made.inputs[:3], _now(rewriting, order), *behind,
                            **{**dict(made.attrs), "scattered": True})

    return replay(graph, rewrite) if found else graph


def _combined(uses: _Uses, taken: Node) -> tuple[Node, Value] | None:
    """The product whose rows a `take` brings back, and the order to write them in."""
    rows, inverse = taken.inputs
    route = _route(uses, inverse, 1)
    product = uses.producer(rows)
    if route is None or product is None or product.op not in SCATTERING or taken.attr("dim") != 0:
        return None
    assert isinstance(rows, Value)
    if _has(product, "scattered") or uses.only(rows) != [taken]:
        return None
    if _has(product, "gathered") and product.inputs[3] != route.order:
        return None
    if rows.tensor.shape[:1] != route.order.tensor.shape:
        return None
    return product, route.order


def _unmasked(uses: _Uses, taken: Node, product: Node) -> str:
    """The name of what the product's result stands for: also for that with zeros where it has them already."""
    readers = uses.only(taken.output)
    ends = product.inputs[2]
    if len(readers) == 1 and readers[0].op == "where" and not _has(product, "added"):
        mask, value, other = readers[0].inputs
        if value == taken.output and _zero(other) and uses.before_last(mask, taken.inputs[1], ends):
            return readers[0].output.name
    return taken.output.name
