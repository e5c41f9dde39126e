"""Stage assignment: which stage of a pipeline runs each equation of a train step.

    h = take(embed, x); y = f(h, w1) | z = g(y, w2); loss      forward: stage 0 | stage 1, cut by their seconds
    gz = ...; gw2 = gz @ y^T; gy = gz @ w2^T | gw1 = ...        backward: where gradients and saved values meet

The graph is that of one micro-batch: the step, partitioned along the axis of micro-batches (dist/strategies.py), whose
collectives are sums over micro-batches. Equations that depend on weights and on the batch have a stage; all others
(views of weights, tables of positions, masks) are made wherever they are read. The forward is cut where few bytes
cross, by the dynamic programming of dist/pipeline/cut.py. An equation of the backward runs on the last stage that has
all that it reads. Behind the sums over micro-batches, one runs where most of its bytes are.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from anyshape.base.errors import Unsupported
from anyshape.dist.pipeline.cut import cut
from anyshape.dist.strategies import MICRO, Roles
from anyshape.ir.graph import Attr, Graph, Node, Value, has_effect
from anyshape.ir.types import TensorType
from anyshape.ops.collective import COLLECTIVES
from anyshape.sym.expr import Expr, product, symbols_of

INTENSITY = 50.0  # multiply-adds in the time in which a byte is read or written
LINK = 20.0  # bytes that are read or written in the time in which one is sent
ROWS_APART = ("use a loss in which rows meet in sums and means alone, and layers that normalise each row by itself "
              "(LayerNorm, GroupNorm) for BatchNorm; or a strategy without pp")

# forward, backward, behind sums over micro-batches; once a step and everywhere; free: wherever it is read
Phase = Literal["F", "B", "U", "once", "free"]


@dataclass(frozen=True, slots=True)
class Stages:
    """The phase of every value that an equation makes, and its stage, where that has one.

    count: of stages. firsts: the first equation of the forward of each stage, in words. varying: values that differ
    from micro-batch to micro-batch.
    """

    count: int
    phases: Mapping[str, Phase]
    stages: Mapping[str, int]
    firsts: tuple[str, ...]
    varying: frozenset[str]


def assign(graph: Graph, roles: Roles, count: int, varying: Sequence[str]) -> Stages:
    """The stage of each equation of the graph of one micro-batch.

    Args:
        varying: symbols of sizes that differ from micro-batch to micro-batch.

    Raises:
        Unsupported: the graph cannot be run by micro-batches, or has fewer equations than stages.
    """
    found = _Assignment(graph, roles, count, frozenset(varying))
    found.phases_of_all()
    firsts = found.forward()
    for node in graph.nodes:
        found.place(node)
    return Stages(count, found.phases, found.stages, firsts, frozenset(found.varying))


class _Assignment:
    def __init__(self, graph: Graph, roles: Roles, count: int, varying: frozenset[str]) -> None:
        self.graph = graph
        self.count = count
        self.symbols = varying
        self.weights = set(roles.weights)  # and what depends on them
        self.varying = {name for name in roles.data}  # and what depends on them, or on varying sizes
        self.summed: set[str] = set()  # what depends on sums over micro-batches
        self.phases: dict[str, Phase] = {}
        self.stages: dict[str, int] = {}
        self.there: dict[str, frozenset[int]] = {}  # of a forward value or a weight, the stages that have it
        self.of_weights: dict[str, frozenset[str]] = {}  # of a view of weights and the like, which weights
        self.loss = _ancestors(graph, graph.outputs[0])

    # ---- phases

    def phases_of_all(self) -> None:
        for node in self.graph.nodes:
            phase = self.phase(node)
            for value in node.outputs:
                self.phases[value.name] = phase

    def phase(self, node: Node) -> Phase:
        """The phase of an equation whose operands have theirs; dependences of its results are noted."""
        if has_effect(node):
            raise self.refusal(node, "does more than give its results, as where random numbers are drawn",
                               "leave out dropout and the like")
        operands = list(node.values())
        is_sum = node.op in COLLECTIVES and node.attr("axis") == MICRO
        if is_sum and (node.op != "all_reduce" or len(operands) != 1):
            raise self.refusal(node, f"needs {node.op} over micro-batches", ROWS_APART)
        names = [v.name for v in operands]
        outs = [v.name for v in node.outputs]
        heavy = any(name in self.weights for name in names)
        behind = any(self.phases.get(name) == "U" for name in names)
        varies = not is_sum and (any(name in self.varying for name in names) or bool(_symbols(node) & self.symbols))
        late = behind or (is_sum and heavy)
        if (late and (varies or (is_sum and behind))) or (is_sum and any(name in self.summed for name in names)
                                                         and not heavy):
            raise self.refusal(node, "needs all micro-batches before one of them has ended", ROWS_APART)
        self.weights.update(outs if heavy else ())
        self.varying.update(outs if varies else ())
        if late:
            return "U"
        if is_sum or any(name in self.summed for name in names):
            self.summed.update(outs)
            if not varies and not heavy:
                return "once"
        if not (heavy and varies):
            return "free"
        return "F" if any(name in self.loss for name in outs) else "B"

    def refusal(self, node: Node, why: str, do: str) -> Unsupported:
        """The error that says where. What the partitioner has put in is on the line of what reads it."""
        at = node
        while at.op in COLLECTIVES:
            made = {v.name for v in at.outputs}
            reader = next((one for one in self.graph.nodes if any(v.name in made for v in one.values())), None)
            if reader is None:
                break
            at = reader
        where = f"{node.outputs[0].name} = {node.op}(...), {at.where}"
        return Unsupported("this step cannot be a pipeline", where=where, why=f"the equation {why}", do=do)

    # ---- the forward, cut by dynamic programming

    def forward(self) -> tuple[str, ...]:
        """Stages of the forward; the first equation of each in words."""
        nodes = [node for node in self.graph.nodes if self.phases[node.outputs[0].name] == "F"]
        place = {v.name: at for at, node in enumerate(nodes) for v in node.outputs}
        last = dict(place)
        for at, node in enumerate(nodes):
            for value in node.values():
                if value.name in place:
                    last[value.name] = at
        crossing = [0.0] * (len(nodes) + 1)  # bytes that are made before that place, and read there or later
        counts = [0] * (len(nodes) + 1)
        for value in (v for node in nodes for v in node.outputs):
            for at in range(place[value.name] + 1, last[value.name] + 1):
                crossing[at] += self.bytes(value)
                counts[at] += 1
        borders = [at for at in range(1, len(nodes)) if counts[at] == 1]
        if len(borders) < self.count - 1:  # there is no place where one message would do
            borders = list(range(1, len(nodes)))
        starts = [0, *borders]
        seconds = [sum(self.work(node) for node in nodes[a:b]) for a, b in zip(starts, [*borders, len(nodes)],
                                                                               strict=True)]
        send = [crossing[at] * LINK for at in starts]
        firsts = cut(seconds, self.count, borders=send) if nodes else None
        if firsts is None:
            raise Unsupported(f"a pipeline of {self.count} stages", where=self.graph.name,
                              why=f"the forward has {len(starts)} parts that can be stages",
                              do="take fewer ranks or chunks")
        begins = [starts[first] for first in firsts]
        for at, node in enumerate(nodes):
            stage = sum(at >= begin for begin in begins) - 1
            for value in node.outputs:
                self.stages[value.name] = stage
        for node in nodes:
            own = self.stages[node.outputs[0].name]
            for value in node.outputs:
                self.there[value.name] = frozenset((own,))
            for value in node.values():
                if value.name in self.there:
                    self.there[value.name] |= {own}
        self.homes_of_weights(nodes)
        return tuple(f"{nodes[at].outputs[0].name} = {nodes[at].op}(...), {nodes[at].where}" for at in begins)

    def homes_of_weights(self, nodes: Sequence[Node]) -> None:
        """The stages whose forward reads a weight."""
        self.of_weights = {name: frozenset((name,)) for name in self.weights if name not in self.phases}
        for node in self.graph.nodes:
            if self.phases[node.outputs[0].name] == "free":
                found = frozenset[str]().union(*(self.of_weights.get(v.name, ()) for v in node.values()))
                self.of_weights |= {v.name: found for v in node.outputs}
        for node in nodes:
            own = {self.stages[node.outputs[0].name]}
            for value in node.values():
                for name in self.of_weights.get(value.name, ()):
                    self.there[name] = self.there.get(name, frozenset()) | own

    def bytes(self, value: Value) -> float:
        return float(self.graph.facts.hint(value.tensor.bytes)) if isinstance(value.type, TensorType) else 0.0

    def work(self, node: Node) -> float:
        """Of an equation, bytes that are moved in the same time."""
        total = sum(self.bytes(v) for v in (*node.values(), *node.outputs))
        hint = self.graph.facts.hint
        if node.op in ("matmul", "matmul_add"):
            a, b = (v.tensor.shape for v in list(node.values())[:2])
            total += hint(product(a)) * hint(b[-1]) / INTENSITY
        elif node.op == "attention":
            q, k = (v.tensor.shape for v in list(node.values())[:2])
            total += 2 * hint(product(q)) * hint(k[2]) / INTENSITY
        return total

    # ---- the backward and the update

    def place(self, node: Node) -> None:
        """The stage of an equation behind the forward."""
        phase = self.phases[node.outputs[0].name]
        operands = [v for v in node.values() if v.name in self.stages]
        if phase == "B":
            latest = min((self.stages[v.name] for v in operands if self.phases[v.name] == "B"), default=self.count - 1)
            sets = [self.there[v.name] for v in operands if self.phases[v.name] == "F"]
            sets += [self.there[name] for v in node.values() for name in self.of_weights.get(v.name, ())
                     if name in self.there]
            both = frozenset(range(self.count)).intersection(*sets)
            stage = max((one for one in both if one <= latest), default=-1)
            if stage < 0:
                stage = min([latest, *(self.stages[v.name] for v in operands)])
        elif phase == "U":
            held: dict[int, float] = {}
            for value in operands:
                stage = self.stages[value.name]
                held[stage] = held.get(stage, 0.0) + self.bytes(value)
            stage = max(sorted(held), key=lambda one: held[one]) if held else 0
        else:
            return
        for value in node.outputs:
            self.stages[value.name] = stage


def _ancestors(graph: Graph, operand: object) -> set[str]:
    found = {operand.name} if isinstance(operand, Value) else set()
    for node in reversed(graph.nodes):
        if any(v.name in found for v in node.outputs):
            found.update(v.name for v in node.values())
            found.update(v.name for v in node.outputs)
    return found


def _symbols(node: Node) -> set[str]:
    """The symbols that an equation reads, in operands, attributes and shapes of results."""
    def of(one: Attr | object) -> set[str]:
        if isinstance(one, Expr):
            return set(symbols_of(one))
        return {name for part in one for name in of(part)} if isinstance(one, tuple) else set()

    return of(tuple(one for one in node.inputs if isinstance(one, Expr))) | of(tuple(v for _, v in node.attrs)) | {
        name for value in node.outputs if isinstance(value.type, TensorType) for name in of(value.type.shape)}
