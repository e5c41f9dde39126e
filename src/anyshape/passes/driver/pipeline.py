"""Runs passes in order over a graph, and keeps what happened: times, sizes, texts on request.

A pass is `f(graph, config) -> graph`; its name is the function's. `config.disable` leaves passes out, `config.show`
and `config.dump` give the graph after a pass, `config.edit` puts another in its place, `config.check` verifies it and
names the pass that broke it.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from anyshape.base.config import Config
from anyshape.base.errors import ConfigError
from anyshape.ir.graph import Graph
from anyshape.ir.show import show
from anyshape.ir.verify import verify
from anyshape.passes.cast_into_gemm import cast_into_gemm
from anyshape.passes.causal_mask import causal_mask
from anyshape.passes.channels_last import channels_last
from anyshape.passes.concat_elimination import concat_elimination
from anyshape.passes.constant_folding import constant_folding
from anyshape.passes.cse import cse
from anyshape.passes.dce import dce
from anyshape.passes.driver.graph_override import put_back
from anyshape.passes.driver.ir_dumps import Edits, publish
from anyshape.passes.gemm_accumulate import gemm_accumulate
from anyshape.passes.gemm_chain_split import gemm_chain_split
from anyshape.passes.scatter_accumulate import scatter_accumulate
from anyshape.passes.simplify import simplify
from anyshape.passes.views import views

Pass = Callable[[Graph, Config], Graph]

# constants before arithmetic, so that mul(x, full(1)) is seen; views again open up equal equations; onto, pieces,
# products, addends and strips count readers, so equal equations are one before; dce sweeps
ROAD: tuple[Pass, ...] = (constant_folding, simplify, channels_last, views, cse, scatter_accumulate, concat_elimination,
                          causal_mask, cast_into_gemm, gemm_accumulate, gemm_chain_split,
                         dce)

# what `disable` names beside passes: the fused operator in place of attention that is written out
# (frontend/attention_fusion/match.py), versions of kernels (kernel/schedule/multiversion.py), another order of steps
# (plan/schedule/reorder.py), values in rooms (plan/memory/output_as_scratch.py), kernels that run with the product
# before them (plan/schedule/launch_grouping.py), and calls past torch's wrappers (frontend/capture/fast_dispatch.py,
# frontend/capture/autograd_function.py)
ATTENTION, REGIMES, ORDER, OUTPUT_REUSE, EPILOGUES, FAST_DISPATCH = TECHNIQUES = (
    "attention", "regimes", "order", "output_reuse", "epilogues", "fast_dispatch")


@dataclass(frozen=True, slots=True)
class DumpPoint:
    """One pass that ran: its name, seconds, equations before and after, and the graph it gave."""

    name: str
    seconds: float
    before: int
    after: int
    graph: Graph

    def __str__(self) -> str:
        return f"{self.name:<18} {self.before:>5} -> {self.after:<5} equations  {self.seconds * 1e3:8.2f} ms"


@dataclass(slots=True)
class History:
    """The stages of one compilation, in order. `captured` is the graph before the first pass."""

    captured: Graph | None = None
    stages: list[DumpPoint] = field(default_factory=list)

    def seconds(self) -> dict[str, float]:
        """Time per pass name, in seconds."""
        total: dict[str, float] = {}
        for stage in self.stages:
            total[stage.name] = total.get(stage.name, 0.0) + stage.seconds
        return total

    def __str__(self) -> str:
        return "\n".join(str(stage) for stage in self.stages)


def run(passes: Sequence[Pass], graph: Graph, config: Config, history: History | None = None,
        edits: Edits | None = None) -> Graph:
    """The graph after all `passes`; `history` receives what each did. `edits`: stages that a person has edited.

    Raises:
        ConfigError: `config.disable` names nothing there is. EditError: an edited stage is not valid or does not fit.
        VerifyError: with `config.check` of at least 1, the first pass that left a broken graph, by name.
    """
    left_out = config.disabled()
    names = [step.__name__ for step in passes]
    unknown = sorted(left_out - {*names, *TECHNIQUES})
    if unknown:
        raise ConfigError(f"disable names no pass: {', '.join(unknown)}",
                          why=f"there are {', '.join((*TECHNIQUES, *names))}",
                          do="correct the name")
    if history is not None and history.captured is None:
        history.captured = graph
    number = 0
    if edits and "capture" in edits:
        graph = put_back(graph, edits["capture"], "capture")
    publish(config, graph.name, number, "capture", lambda: show(graph))
    if config.check >= 1:
        verify(graph, "capture")
    for step in passes:
        number += 1
        name = step.__name__
        if name in left_out:
            continue
        before = len(graph.nodes)
        start = time.perf_counter()
        graph = step(graph, config)
        seconds = time.perf_counter() - start
        if edits and name in edits:
            graph = put_back(graph, edits[name], name)
        if history is not None:
            history.stages.append(DumpPoint(name, seconds, before, len(graph.nodes), graph))
        current = graph
        publish(config, graph.name, number, name, lambda: show(current))  # noqa: B023
        if config.check >= 1:
            verify(graph, name)
    return graph


def stages(passes: Sequence[Pass], config: Config) -> list[tuple[int, str]]:
    """Number and name of the stages that `run` computes."""
    left_out = config.disabled()
    names = ["capture", *(step.__name__ for step in passes)]
    return [(number, name) for number, name in enumerate(names) if name not in left_out]
