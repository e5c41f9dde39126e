"""The results of compilation: a graph with its plans and kernels, with its executables, and a forward with its
backward.

    BackwardGraph --reading(plan of the forward)--> Graph --plan_graph--> PlannedGraph --link--> CompiledGraph
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anyshape.backend.interface import Kernel, Target
from anyshape.ir.graph import Graph, Value
from anyshape.ir.pass_manager import History
from anyshape.ir.types import TensorType
from anyshape.kernel.fusion.result import Fusion
from anyshape.kernel.loop_ir.program import LoopProgram
from anyshape.plan.ir.program import Plan, Window
from anyshape.plan.remat.checkpoint_segments import RecomputeSegment
from anyshape.sym.expr import Size, substitute

if TYPE_CHECKING:
    from anyshape.runtime.call.executable import Executable


@dataclass(frozen=True, slots=True)
class PlannedGraph:
    """What the compiler decided on one graph.

    target: that it is compiled for. graph: after the passes; `history` has it before and between. programs: kernel
    name -> loop program; kernels: their code. second: the plan with its steps in another order, for sizes at which that
    needs less. seconds: (stage, time) in order. edited: files whose text stands in place of a computed stage. segments:
    of a forward under a limit, what its backward may compute again; stored: names of values that are stored.
    """

    name: str
    target: Target
    graph: Graph
    history: History
    fusion: Fusion
    programs: Mapping[str, LoopProgram]
    kernels: tuple[Kernel, ...]
    plan: Plan
    second: Plan | None
    seconds: tuple[tuple[str, float], ...]
    edited: tuple[str, ...]
    segments: tuple[RecomputeSegment, ...]
    stored: frozenset[str]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """In each order of steps."""
        return (self.plan,) if self.second is None else (self.plan, self.second)


@dataclass(frozen=True, slots=True)
class CompiledGraph(PlannedGraph):
    """The same with what runs it. other: of the second plan."""

    executable: Executable
    other: Executable | None = None


@dataclass(frozen=True, slots=True)
class CompiledPair:
    """A forward and its backward; or a program that no backward follows, or whose backward is compiled later. note: why
    a memory limit does not count the backward."""

    forward: CompiledGraph
    backward: CompiledGraph | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class BackwardGraph:
    """A backward as it was translated, before there is a plan of its forward.

    graph: its `restored` inputs are dense, where the tape does not hold an input of the forward as it came. renamed:
    symbol -> the size that stands for it in this graph. needed: sizes that must be at least 0 in a call, beside those
    of the graph itself. constants: how many inputs are tensors of the graph's own, the last ones. materialized: all
    gradients that are undefined are made as zeros before it is called.
    """

    graph: Graph
    renamed: Mapping[str, Size]
    needed: tuple[Size, ...] = ()
    constants: int = 0
    materialized: bool = False

    def reading(self, forward: Plan) -> Graph:
        """The graph that reads what a forward of this plan saves, with the strides that it has there."""
        graph = self.graph
        made: dict[Value, Value] = {}
        for value, saved in zip(graph.restored, forward.saved, strict=False):
            if isinstance(value.type, TensorType):
                strides = saved.type.strides if isinstance(saved, Window) else None
                if strides is not None:
                    strides = tuple(substitute(stride, self.renamed) for stride in strides)
                kind = value.type
                made[value] = Value(value.name, TensorType(kind.dtype, kind.shape, strides, kind.device))
        return graph.with_values(made)
