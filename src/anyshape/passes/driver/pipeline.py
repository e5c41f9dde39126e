"""The pass pipeline of graphs: which passes run, in which order; ir/pass_manager.py runs them.

A pass is `f(graph, config) -> graph`; its name is the function's.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from anyshape.base.config import Config
from anyshape.ir.graph import Graph
from anyshape.ir.ir_dumps import Edited, Edits
from anyshape.ir.pass_manager import History, PassManager
from anyshape.ir.show import show
from anyshape.ir.verify import verify
from anyshape.passes.attention.attention import attention
from anyshape.passes.causal_mask import causal_mask
from anyshape.passes.channels_last import channels_last
from anyshape.passes.concat_elimination import concat_elimination
from anyshape.passes.constant_folding import constant_folding
from anyshape.passes.conv_epilogue import conv_epilogue
from anyshape.passes.cse import cse
from anyshape.passes.dce import dce
from anyshape.passes.driver.graph_override import put_back
from anyshape.passes.gemm.cast_into_gemm import cast_into_gemm
from anyshape.passes.gemm.gemm_accumulate import gemm_accumulate
from anyshape.passes.gemm.gemm_chain_split import gemm_chain_split
from anyshape.passes.gemm.prepacked_gemm import prepacked_gemm
from anyshape.passes.routing.dispatch_fusion import dispatch_fusion
from anyshape.passes.scatter_accumulate import scatter_accumulate
from anyshape.passes.simplify import simplify
from anyshape.passes.views import views

Pass = Callable[[Graph, Config], Graph]

# constants before arithmetic, so that mul(x, full(1)) is seen; attention before views, which tidy up what it wrote;
# views again open up equal equations; onto, pieces, products, addends and strips count readers, so equal equations are
# one before; panels are read by products in the form that they have at last; dce sweeps
ROAD: tuple[Pass, ...] = (constant_folding, simplify, attention, channels_last, views, cse, scatter_accumulate,
                          concat_elimination, causal_mask, cast_into_gemm, gemm_accumulate, gemm_chain_split,
                          conv_epilogue, dispatch_fusion, prepacked_gemm, dce)

# what `disable` names beside passes: the fused operator in place of attention that is written out
# (frontend/attention_fusion/match.py; the pass `attention` goes with it), versions of kernels
# (kernel/schedule/multiversion.py), calls past torch's wrappers (frontend/capture/fast_dispatch.py,
# frontend/capture/autograd_function.py), and chains of products that a train step runs by bands of rows
# (dist/row_tiling.py)
ATTENTION, REGIMES, FAST_DISPATCH, ROW_TILING = TECHNIQUES = ("attention", "regimes", "fast_dispatch", "row_tiling")


class GraphPasses(PassManager[Graph, Config]):
    """Passes over a graph; their context is the configuration."""

    first = 0, "capture"

    def name(self, ir: Graph) -> str:
        return ir.name

    def count(self, ir: Graph) -> int:
        return len(ir.nodes)

    def text(self, ir: Graph) -> str:
        return show(ir)

    def verify(self, ir: Graph, stage: str) -> None:
        verify(ir, stage)

    def put_back(self, computed: Graph, edited: Edited, stage: str) -> Graph:
        return put_back(computed, edited, stage)


def run(passes: Sequence[Pass], graph: Graph, config: Config, history: History | None = None,
        edits: Edits | None = None) -> Graph:
    """The graph after all `passes`; see `PassManager.run`."""
    if history is not None and history.captured is None:
        history.captured = graph
    return GraphPasses(passes, config).run(graph, config, history, edits)
