"""The compilation session: what one `anyshape.compile` knows about itself, and what it hands to the program compiler
for each graph."""
from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from anyshape.base import counters
from anyshape.base.config import Config
from anyshape.compiler.compiled import BackwardGraph, CompiledGraph
from anyshape.frontend.attention_fusion.match import AttentionNote
from anyshape.frontend.autograd.partition import TapeLayout
from anyshape.frontend.importer.graph_inputs import Notes
from anyshape.runtime.memory.pools import LiveTapes
from anyshape.torch_compat.versions import api

MOST_REASONS = 32  # for which calls run as PyTorch, that are told apart
Role = Literal["inference", "forward", "backward"]
Boxed = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True, slots=True)
class ProgramRequest:
    """One graph to compile.

    Args:
        gm: ATen graph; functional but for `copy_` nodes at its end. Every node's `meta["val"]` is a fake tensor, a
            symbolic number, or for the tape a stand-in.
        role: "forward" returns the tape as its last output, "backward" takes it as its first input.
        name: such as "0.forward", unique within the compilation.
        config: the settings.
        compilation: where the finished program registers itself (`register`).
        tape: the layout of the tape; None when nothing is saved, or for inference.
        partner: the other half of a forward and backward pair, as it left the partition.
        wrapped: AOTAutograd's wrapper calls the pair, which makes zeros for every gradient that is absent.
        whole: half of a whole train step: its backward takes no gradients.
        static_inputs: indices of inputs whose address does not change from call to call (parameters, buffers).
    """
    gm: GraphModule
    role: Role
    name: str
    config: Config
    compilation: Compilation
    tape: TapeLayout | None = None
    partner: GraphModule | None = None
    wrapped: bool = False
    whole: bool = False
    static_inputs: tuple[int, ...] = ()


ProgramCompiler = Callable[[ProgramRequest], Boxed]


@dataclass(frozen=True, slots=True)
class Fallback:
    """A graph, or a way of tracing, that did not go the compiled road.

    Args:
        name: the program's name, or "trace".
        stage: the part that gave up.
        reason: the error in words.
    """
    name: str
    stage: str
    reason: str


@dataclass(frozen=True, slots=True)
class Capture:
    """One captured graph.

    Args:
        where: the function that was traced: name, file and line; empty when unknown.
        reason: what forced it, in words; empty for the first one.
        way: "all sizes" (or "one graph", for fixed sizes) or "ordinary", the two ways of tracing; "backend" for
            torch.compile's own.
        sizes: (symbol of the trace, its place in words, a name made of input and dim) for each symbolic size.
    """
    where: str
    reason: str
    way: str
    sizes: tuple[tuple[str, str, str], ...]


class NotCovered(Exception):
    """The program for all sizes does not cover this call; an ordinary trace has to serve it."""


class DataSizes(Protocol):
    """Judges the sizes 0 and 1 that are found in the data: frontend/capture/data_size_guard.py. plain: the answer is
    one for all calls in which the same sizes are 0 and 1."""

    plain: bool

    def refusal(self, numbers: Mapping[str, int]) -> str:
        """Why eager PyTorch would go another way than the program; empty where it would not. numbers: of the sizes
        known so far, by their symbols."""


@dataclass(frozen=True, slots=True)
class PreparedBackward:
    """The backward of a forward that is compiled, before torch asks for it.

    Args:
        gm: as the partition left it.
        form: translated; None where that failed, which `refused` then says.
        compiled: with its forward; None: not yet.
    """
    gm: GraphModule
    form: tuple[BackwardGraph, Notes] | None = None
    refused: str = ""
    compiled: CompiledGraph | None = None


def is_copy(gm: GraphModule, other: GraphModule) -> bool:
    """Whether two modules of one trace are the same node for node, as a module and the copy that torch takes of it."""
    if gm is other:
        return True
    nodes, others = list(gm.graph.nodes), list(other.graph.nodes)
    if len(nodes) != len(others):
        return False
    for one, its in zip(nodes, others, strict=True):
        if (one.name, one.op, one.target) != (its.name, its.op, its.target):
            return False
        if _by_name(one) != _by_name(its):
            return False
        if one.op == "get_attr" and not _are_equal(*(api.attribute_of(each, str(one.target)) for each in (gm, other))):
            return False
    return True


def _by_name(node: Node) -> tuple[Any, ...]:
    """The arguments of a node, with nodes by their names."""
    return map_arg((node.args, node.kwargs), lambda operand: operand.name)  # type: ignore[no-any-return]


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and not api.is_fake(one):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one is other


@dataclass(slots=True, weakref_slot=True, eq=False)
class Compilation:
    """The mutable record of one `anyshape.compile`: programs, fallbacks, how graphs were traced.

    Args:
        config: the settings.
        compiler: compiles one graph; another one may be put in for tests.
        attentions: by number of the captured graph, the attention that its program writes out.
        calls: those that were traced, each kind once (capture/traced_calls.py).
        cuts: where programs are in parts because operators of ours part them, which is no fall back.
        data_sizes: by the number of a captured graph, what judges sizes that are found in the data.
        eager: how many calls ran as PyTorch, by the reason.
        prepared: by name, backwards that torch has not asked for yet.
        held: what tapes keep, of all its programs.
        step: what its graphs, which are train steps with the backward inside, do with gradients; None for others.
        fixed: sizes of inputs that a trace took as numbers, such as L['x'].size()[0], each with the line that asked.
        strategy: how a train step is dealt out over ranks, what is sent, and what else was tried, in words.
        warm: what was taken from the disk cache in place of a trace, and why other programs were not, in words.
        left_alone: why the frame that has just been traced runs as PyTorch, and the user's line; None: it does not.
        tracing: where, reason and way of the trace that is going on (see Capture); torch traces one frame at a time.
    """
    config: Config
    compiler: ProgramCompiler
    programs: list[Any] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    cuts: list[Fallback] = field(default_factory=list)
    data_sizes: dict[str, DataSizes] = field(default_factory=dict)
    eager: dict[str, int] = field(default_factory=dict)
    attentions: dict[int, tuple[AttentionNote, ...]] = field(default_factory=dict)
    prepared: dict[str, PreparedBackward] = field(default_factory=dict)
    held: LiveTapes = field(default_factory=LiveTapes)
    step: Any = None
    graphs: int = 0
    fixed: dict[str, str] = field(default_factory=dict)
    strategy: list[str] = field(default_factory=list)
    warm: list[str] = field(default_factory=list)
    left_alone: tuple[str, str] | None = None
    tracing: tuple[str, str, str] = ("", "", "backend")
    lock: Any = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        LIVE.add(self)

    def next_graph(self, sizes: tuple[tuple[str, str, str], ...] = ()) -> int:
        """The number of the next captured graph, whose symbolic sizes are `sizes` (see Capture)."""
        with self.lock:
            self.graphs += 1
            self.captures.append(Capture(*self.tracing, sizes))
            return self.graphs - 1

    def capture_of(self, name: str) -> Capture:
        """The captured graph that the program of this name was made of."""
        number = name.partition(".")[0]
        known = number.isdigit() and int(number) < len(self.captures)
        return self.captures[int(number)] if known else Capture("", "", "", ())

    def names_of(self, name: str) -> dict[str, str]:
        """What the report, `explain`, `memory` and errors call the sizes of a program: symbol of the trace -> name."""
        return {old: said for old, _, said in self.capture_of(name).sizes}

    def next_update(self, number: int, reason: str) -> int:
        """The number of another update behind the captured graph `number`, as of a captured graph of its own."""
        with self.lock:
            self.graphs += 1
            self.captures.append(replace(self.captures[number], reason=reason))
            return self.graphs - 1

    def register(self, program: Any) -> None:
        """Adds a finished program, for `explain`, `memory` and `stats`."""
        with self.lock:
            self.programs.append(program)

    def called(self, call: Any) -> None:
        """Adds a call that was traced."""
        with self.lock:
            if call not in self.calls:
                self.calls.append(call)

    def record(self, name: str, stage: str, reason: str) -> None:
        """Adds a fallback, for `explain`."""
        with self.lock:
            self.fallbacks.append(Fallback(name, stage, reason))

    def cut(self, name: str, reason: str) -> None:
        """Adds a cut, for `explain`."""
        with self.lock:
            self.cuts.append(Fallback(name, "split", reason))

    def ran_eagerly(self, reason: str) -> bool:
        """Counts a call that ran as PyTorch, for `explain` and `stats`. Whether the reason is new."""
        counters.count("eager_calls")
        with self.lock:
            if reason not in self.eager and len(self.eager) >= MOST_REASONS:
                reason = "other reasons"
            before = self.eager.get(reason, 0)
            self.eager[reason] = before + 1
            return before == 0


LIVE: weakref.WeakSet[Compilation] = weakref.WeakSet()
