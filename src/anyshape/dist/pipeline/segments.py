"""Pipeline partitioning: the graph of a micro-batch and its stages become programs of each stage, and messages.

    y = g(f(x, w1), w2)   f on stage 0, g on stage 1
    -->  F of stage 0: h = f(x, w1), send h      F of stage 1: receive h, y = g(h, w2)

A segment is what runs without waiting for another stage: forward (F) and backward (B, and W of zero-bubble schedules)
of each stage for each micro-batch; `early` for each micro-batch and `once` a step, which all ranks run, for sums that
the forward reads (a count of tokens); the update (U), in levels where stages wait for each other (a norm of all
gradients). The walk goes from results and writes backwards: a value of another segment of the stage is kept, one of
another stage is a message, and goes to the first segment there that reads it.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from anyshape.base.errors import Unsupported
from anyshape.dist.pipeline.stages import Stages
from anyshape.dist.strategies import MICRO
from anyshape.ir.graph import Graph, Node, Operand, Value
from anyshape.ir.op import row
from anyshape.ir.types import SizeType, TensorType
from anyshape.ops.collective import COLLECTIVES


class Key(NamedTuple):
    """kind: early, once, F, B, W or U. stage: -1 where all ranks run it. level: of an update."""

    kind: str
    stage: int
    level: int = 0


EARLY, ONCE = Key("early", -1), Key("once", -1)
KINDS = ("early", "once", "F", "B", "W", "U")  # in the order in which one micro-batch comes to them


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum over micro-batches. of: what is combined; name: the result, which later segments read."""

    of: str
    name: str
    combine: str


@dataclass(frozen=True, slots=True)
class Segment:
    """One program.

    graph: its inputs are all sizes and `given`, its outputs `made`; it may write inputs.
    receives: (value, the stage that sends it) before it runs. sends: (value, the stage that receives it) after it.
    sums: over micro-batches, of what it makes. copies: (input, value) that are copied when all segments have run.
    """

    key: Key
    graph: Graph
    given: tuple[str, ...]
    made: tuple[str, ...]
    receives: tuple[tuple[str, int], ...]
    sends: tuple[tuple[str, int], ...]
    sums: tuple[Sum, ...]
    copies: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """All programs of a pipeline.

    ranks, stages: stage s is on rank s % ranks. segments: in the order in which one micro-batch comes to them.
    results: per output of the graph its name, or itself where it is no value.
    types: of every value that is sent. inputs: per rank, the names of the graph's tensors that it reads or writes.
    """

    ranks: int
    stages: int
    segments: Mapping[Key, Segment]
    results: tuple[str | Operand | None, ...]
    types: Mapping[str, TensorType]
    inputs: tuple[frozenset[str], ...]


def pipeline(graph: Graph, found: Stages, ranks: int, split: bool, dealt_out: Collection[str]) -> Pipeline:
    """The programs of all stages of a graph of one micro-batch.

    Args:
        ranks: of the pipeline; the stages are a multiple.
        split: gradients of weights are segments of their own (W), as zero-bubble schedules have them.
        dealt_out: inputs that a rank keeps if its stages read them, weights and states; others that are written, such
            as counts of steps, are written on all ranks.

    Raises:
        Unsupported: a result differs from micro-batch to micro-batch.
    """
    return _Builder(graph, found, ranks, split, dealt_out).run()


@dataclass(slots=True)
class _Draft:
    nodes: list[Node] = field(default_factory=list)
    given: dict[str, None] = field(default_factory=dict)
    made: dict[str, None] = field(default_factory=dict)
    receives: dict[tuple[str, int], None] = field(default_factory=dict)
    sends: dict[tuple[str, int], None] = field(default_factory=dict)
    sums: list[Sum] = field(default_factory=list)
    writes: list[tuple[Value, Value]] = field(default_factory=list)


class _Builder:
    def __init__(self, graph: Graph, found: Stages, ranks: int, split: bool, dealt_out: Collection[str]) -> None:
        self.graph = graph
        self.found = found
        self.ranks = ranks
        self.everywhere = {target.name for target, _ in graph.writes} - set(dealt_out)
        self.inputs = {v.name: v for v in graph.inputs}
        self.values = self.inputs | {v.name: v for node in graph.nodes for v in node.outputs}
        self.makers: dict[str, Key] = {}
        self.drafts: dict[Key, _Draft] = {}
        self.wanted: dict[str, dict[Key, None]] = {}
        first = self._before_messages() if split else None
        for node in graph.nodes:
            self._maker(node, first)

    def run(self) -> Pipeline:
        readers: dict[str, frozenset[int]] = {}
        while True:  # whoever reads what is written needs its new value; that may make more readers
            self._walk(readers)
            now = {target.name: frozenset(self.rank(key) for key, draft in self.drafts.items()
                                          if target.name in draft.given and key.stage >= 0)
                   for target, _ in self.graph.writes}
            if now == readers:
                return self._finished()
            readers = now

    def rank(self, key: Key) -> int:
        return key.stage % self.ranks

    # ---- makers: the segment that makes a value

    def _before_messages(self) -> set[str]:
        """Values of the backward that another stage waits for, and what they are made of."""
        found: set[str] = set()
        stages, phases = self.found.stages, self.found.phases
        users = self.graph.users()
        for node in reversed(self.graph.nodes):
            for value in node.outputs:
                if phases[value.name] == "B" and any(
                        out.name in found or stages[out.name] != stages[value.name]
                        for user in users.get(value.name, ()) for out in user.outputs if phases[out.name] == "B"):
                    found.update(v.name for v in node.outputs)
        return found

    def _maker(self, node: Node, first: set[str] | None) -> None:
        """The segment of an equation; none of one that is made wherever it is read."""
        name = node.outputs[0].name
        phase = self.found.phases[name]
        stage = self.found.stages.get(name, -1)
        if phase == "once":
            source = ONCE
        elif phase == "F":
            source = Key("F", stage)
        elif phase == "B":
            source = Key("B" if first is None or name in first else "W", stage)
        elif phase == "U":
            level = 0
            for value in node.values():
                own = self.makers.get(value.name)
                if own is not None and own.kind == "U":
                    level = max(level, own.level + (own.stage != stage))
            source = Key("U", stage, 0 if _is_sum(node) else level)
        else:
            return
        for value in node.outputs:
            self.makers[value.name] = source

    # ---- the walk, from what is wanted to what it is made of

    def _walk(self, readers: Mapping[str, frozenset[int]]) -> None:
        self.drafts, self.wanted = {}, {}
        for target, value in self.graph.writes:
            self._check(value)
            own = frozenset(range(self.ranks)) if target.name in self.everywhere else readers.get(
                target.name, frozenset())
            for key in self._writers(value, own):
                self._want(value, key)
                self._draft(key).given[target.name] = None
                self._draft(key).writes.append((target, value))
        for operand in self.graph.outputs:
            if isinstance(operand, Value) and isinstance(operand.type, TensorType):
                self._check(operand)
                for rank in range(self.ranks):
                    key = self._reader(operand, rank)
                    self._want(operand, key)
                    self._draft(key).made[operand.name] = None
        for node in reversed(self.graph.nodes):
            keys = [key for value in node.outputs for key in self.wanted.get(value.name, ())]
            if keys:
                self._visit(node, list(dict.fromkeys(keys)))

    def _check(self, value: Value) -> None:
        """Raises Unsupported where a result differs from micro-batch to micro-batch."""
        if value.name in self.found.varying or value.name in self.inputs:
            node = self.graph.producers().get(value.name)
            raise Unsupported("a result of the step differs from micro-batch to micro-batch",
                              where=value.name if node is None else f"{value.name} = {node.op}(...), {node.where}",
                              why="a pipeline gives sums over micro-batches",
                              do="return only the loss, or numbers that are sums or means over rows")

    def _writers(self, value: Value, readers: frozenset[int]) -> list[Key]:
        """The segments that write an input: one on each rank that reads it, and the one that makes the value."""
        source = self.makers.get(value.name)
        if source is None or source.kind != "U":
            return [self._reader(value, rank) for rank in range(self.ranks)]
        return [source, *(self._reader(value, rank) for rank in sorted(readers - {self.rank(source)}))]

    def _reader(self, value: Value, rank: int) -> Key:
        """The first segment of an update on that rank that can read a value."""
        source = self.makers.get(value.name)
        if source is None or source.kind != "U":
            return Key("U", rank)
        return source if self.rank(source) == rank else Key("U", rank, source.level + 1)

    def _draft(self, key: Key) -> _Draft:
        return self.drafts.setdefault(key, _Draft())

    def _want(self, value: Value, key: Key) -> None:
        if value.name not in self.inputs:
            self.wanted.setdefault(value.name, {})[key] = None
        elif isinstance(value.type, TensorType):
            self._draft(key).given[value.name] = None

    def _visit(self, node: Node, keys: list[Key]) -> None:
        """An equation whose results are wanted by some segments."""
        source = self.makers.get(node.outputs[0].name)
        if source is None:  # each makes its own
            for key in keys:
                self._include(node, key)
            return
        if source.kind in ("F", "B", "W") and row(node).kind == "view":
            for key in keys:  # a stage that has what it is a view of makes its own
                if key.stage != source.stage:
                    self._include(node, key)
            keys = [key for key in keys if key.stage == source.stage]
            if not keys:
                return
        for value in node.outputs:
            self._carry(value, source, [key for key in keys if key in self.wanted.get(value.name, ())], _is_sum(node))
        if not _is_sum(node):
            self._include(node, source)
            return
        (operand,) = node.values()
        maker = self.makers.get(operand.name, EARLY)
        assert maker.kind in ("early", "F", "B", "W"), node
        self._want(operand, maker)
        self._draft(maker).made[operand.name] = None
        combine = node.attr("combine")
        assert isinstance(combine, str)
        self._draft(maker).sums.append(Sum(operand.name, node.output.name, combine))

    def _include(self, node: Node, key: Key) -> None:
        self._draft(key).nodes.append(node)
        for value in node.values():
            self._want(value, key)

    def _carry(self, value: Value, source: Key, keys: list[Key], is_sum: bool) -> None:
        """Brings a value from the segment that makes it to those that want it."""
        first: dict[int, Key] = {}  # by stage of another rank or of this one
        for key in sorted(keys, key=_turn):
            if key == source and not is_sum:
                continue
            self._draft(key).given[value.name] = None
            if not is_sum:
                self._draft(source).made[value.name] = None
            if source.stage >= 0 and key.stage != source.stage and first.setdefault(key.stage, key) == key:
                self._draft(source).sends[value.name, key.stage] = None
                self._draft(key).receives[value.name, source.stage] = None

    # ---- the result

    def _finished(self) -> Pipeline:
        keys = sorted(self.drafts, key=_turn)
        found = {key: self._segment(key, keys) for key in keys}
        sent = {name: self.values[name].tensor.dense() for one in found.values() for name, _ in one.sends}
        own = [frozenset(name for key, one in found.items() if key.stage < 0 or self.rank(key) == rank
                         for name in (*one.given, *(target for target, _ in one.copies)) if name in self.inputs)
               for rank in range(self.ranks)]
        results = tuple(one.name if isinstance(one, Value) and isinstance(one.type, TensorType) else one
                        for one in self.graph.outputs)
        return Pipeline(self.ranks, self.found.count, found, results, sent, tuple(own))

    def _segment(self, key: Key, keys: list[Key]) -> Segment:
        draft = self.drafts[key]
        later = [one for one in keys if _turn(one) > _turn(key) and self.rank(one) == self.rank(key)]
        writes, copies = [], []
        for target, value in draft.writes:
            if any(target.name in self.drafts[one].given for one in later) or value.name in draft.given:
                copies.append((target.name, value.name))
                if value.name not in draft.given:
                    draft.made[value.name] = None
            else:
                writes.append((target, value))
        sizes = [v for v in self.graph.inputs if isinstance(v.type, SizeType)]
        made = tuple(name for name in draft.made if name not in draft.given)
        dense = {self.values[name]: Value(name, self.values[name].tensor.dense()) for name in draft.given
                 if name not in self.inputs}
        given = [self.values[name] for name in draft.given]
        kind = key.kind if key.stage < 0 else f"{key.kind}{key.stage}" + (f"_{key.level}" if key.level else "")
        graph = self.graph.replace(
            name=f"{self.graph.name}_{kind}", inputs=(*sizes, *given), nodes=tuple(reversed(draft.nodes)),
            outputs=tuple(self.values[name] for name in made), output_strides=(), memory=(), writes=tuple(writes))
        return Segment(key, graph.with_values(dense), tuple(draft.given), made, tuple(draft.receives),
                       tuple(draft.sends), tuple(draft.sums), tuple(copies))


def _turn(key: Key) -> tuple[int, int, int]:
    return KINDS.index(key.kind), key.level, key.stage


def _is_sum(node: Node) -> bool:
    return node.op in COLLECTIVES and node.attr("axis") == MICRO
