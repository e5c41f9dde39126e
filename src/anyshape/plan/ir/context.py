"""The context of plan passes: what they go by beside the plan, one immutable value for a whole pipeline."""
from __future__ import annotations

from dataclasses import dataclass, field

from anyshape.base.config import Config
from anyshape.ir.graph import Graph
from anyshape.plan.ir.program import Plan

# what `disable` names beside passes: kernels that run with the product before them
# (plan/schedule/gemm_consumer_tiling.py, plan/schedule/launch_grouping.py)
EPILOGUES = "epilogues"


@dataclass(frozen=True, slots=True)
class ForwardGraph:
    """A forward that a backward follows. stored: names of values that are stored as they are; anchors: of those from
    which others may be computed again."""

    graph: Graph
    stored: frozenset[str] = frozenset()
    anchors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanContext:
    """What plan passes go by beside the plan; the same for a whole pipeline.

    forward: of a backward, the allocated plan whose memory and tape it shares. source: the forward's graph. recomputed:
    graphs that compute values of the forward again, and their plans, not allocated. strided_products: dtypes of which
    the target has products of operands with any strides. band_bytes: of a product's result in a band of rows that its
    consumer still finds in the target's caches; 0: products and consumers stay apart. second_order: whether calls may
    choose between two orders of steps.
    """

    config: Config = field(default_factory=Config)
    forward: Plan | None = None
    source: ForwardGraph | None = None
    recomputed: tuple[tuple[Graph, Plan], ...] = ()
    strided_products: frozenset[str] = frozenset()
    band_bytes: int = 0
    second_order: bool = True

    @property
    def epilogues(self) -> bool:
        """Whether kernels run with the product before them."""
        return EPILOGUES not in self.config.disabled()


DEFAULTS = PlanContext()
