"""Train steps under a memory limit whose widest chain of equations runs by bands of rows (dist/row_tiling.py).

The halves of a step of one process are joined to one graph, in which the chain is looked for, and cut again behind it;
a rank's graph is one already (frontend/train_step/distributed.py). Weights of the chain are packed for each band, and
the gradient of a large weight exists as a whole, so bands are for those who have asked for less memory.
"""
from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

from torch.fx import GraphModule

from anyshape.base.config import Config
from anyshape.base.errors import Unsupported
from anyshape.compiler.compiled import BackwardGraph
from anyshape.compiler.driver import compile_pair
from anyshape.compiler.shape_preconditions import uncertain_sizes
from anyshape.dist.halves import halves_of
from anyshape.dist.row_tiling import BANDS, tile_rows
from anyshape.frontend.importer.fx_to_graph import to_graph
from anyshape.frontend.programs.compile_program import NativeProgram, size_differences
from anyshape.frontend.programs.graph_device import target_for
from anyshape.frontend.programs.session import Boxed, Compilation
from anyshape.frontend.train_step.partition import HalvesOrder, HalvesProgram, StepHalves, joined
from anyshape.frontend.train_step.update_op import expanded
from anyshape.ir.graph import Graph
from anyshape.passes.constant_folding import constant_folding
from anyshape.passes.cse import cse
from anyshape.passes.dce import dce
from anyshape.passes.driver import pipeline
from anyshape.passes.simplify import simplify
from anyshape.passes.views import views
from anyshape.sym.expr import Size
from anyshape.torch_compat.versions import api

PLAIN = (constant_folding, simplify, views, cse, dce)  # views between the products would hide that rows stay rows
BANDED = f"the loss, and the products around it, run by up to {BANDS} bands of rows (row_tiling)"  # for `explain`


def in_bands(graph: Graph, first: Collection[str], equal: Sequence[tuple[Size, Size]],
             config: Config) -> tuple[Graph, frozenset[str]] | None:
    """The graph with its widest chain in bands, and the names of what the forward computes then (`tile_rows`); None
    where there is no limit, or no chain that is worth it."""
    if not _may_be(config):
        return None
    return tile_rows(pipeline.run(PLAIN, graph, config), first, equal)


def _may_be(config: Config) -> bool:
    """Whether settings ask for bands."""
    return config.limited and pipeline.ROW_TILING not in config.disabled() and config.check < 2


def compile_tiled(compilation: Compilation, number: int, gm: GraphModule, halves: StepHalves) -> Boxed | None:
    """The program of a step with a chain in bands; None where it has none that is worth it.

    Args:
        gm: the traced step with its update; it is left as it is. halves: of it, with no update written out.
    """
    if not _may_be(compilation.config):
        return None
    try:
        return _compiled(compilation, number, gm, halves)
    except Unsupported:  # what the IR does not carry: the halves are compiled in parts, which says why
        return None


def _compiled(compilation: Compilation, number: int, gm: GraphModule, halves: StepHalves) -> Boxed | None:
    config = compilation.config
    whole = joined(gm, copy.deepcopy(halves))
    expanded(whole)
    target = target_for(whole, config)
    graph, notes = to_graph(whole, f"{number}_inference", target)
    if notes.constants or notes.float_inputs or not notes.first or target.streams is not None:
        return None
    with api.outside_tracing():
        tiled = in_bands(graph, notes.first, notes.equalities, config)
        if tiled is None:
            return None
        graph, first = tiled
        cut = halves_of(graph, first, {v.name for v in graph.inputs}, False)
        needed = tuple(dict.fromkeys((*size_differences(notes), *uncertain_sizes(cut.backward))))
        pair = compile_pair(cut.forward, BackwardGraph(cut.backward, {}, needed), config, needed, True,
                            compilation.names_of(f"{number}.forward"), compilation.held, target)
    programs = [NativeProgram(f"{number}.{name}", one, notes)
                for name, one in (("forward", pair.forward), ("backward", pair.backward)) if one is not None]
    for one in programs:
        compilation.register(one)
    compilation.strategy.append(BANDED)
    order = HalvesOrder(bool(cut.forward.saved), cut.forward_inputs, cut.backward_inputs, cut.outputs)
    return HalvesProgram(order, *(one.executable for one in programs))
