"""The pass pipeline of plans: which passes run, in which order; ir/pass_manager.py runs them.

A pass is `f(plan, context) -> plan`; its name is the function's. One that makes several plans, of which calls choose
one when their sizes are known (`reorder`), gives a tuple: each of them goes on through the passes behind it.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from anyshape.base.config import Config
from anyshape.ir.ir_dumps import Edited, Edits
from anyshape.ir.pass_manager import History, PassManager
from anyshape.plan.driver.plan_override import put_back
from anyshape.plan.ir.context import EPILOGUES, PlanContext
from anyshape.plan.ir.program import Plan
from anyshape.plan.ir.show import show
from anyshape.plan.memory.alloc_free_steps import insert_alloc_free
from anyshape.plan.memory.mutation_copy_elision import elide_mutation_copies, sink_mutations
from anyshape.plan.memory.output_as_scratch import alias_buffers
from anyshape.plan.memory.symbolic_allocator import allocate
from anyshape.plan.remat.insert_recompute import insert_recomputation, mark_spent
from anyshape.plan.schedule.gemm_consumer_tiling import tile_gemm_consumers
from anyshape.plan.schedule.launch_grouping import group_launches
from anyshape.plan.schedule.overlap import overlap_collectives
from anyshape.plan.schedule.reorder import reorder
from anyshape.plan.verify import verify

PlanPass = Callable[[Plan, PlanContext], Plan | tuple[Plan, ...]]
Plans = tuple[Plan, ...]

# collectives move apart in the order that was chosen, whatever it was, and before places are shared by lives;
# what inputs receive is made there before products and updates can be paired; an order is judged by the aliases and the
# groups that it would get, which are made once it is chosen; optional steps stand beside groups; offsets come when all
# buffers are known, memory steps when it is known what has an offset
PLAN_ROAD: tuple[PlanPass, ...] = (sink_mutations, elide_mutation_copies, tile_gemm_consumers, reorder,
                                   overlap_collectives, alias_buffers, group_launches, insert_recomputation, allocate,
                                   insert_alloc_free, mark_spent)
# without these a plan does not run
REQUIRED = frozenset(("insert_recomputation", "allocate", "mark_spent"))

# what `disable` names beside passes, and the passes that it leaves out; `epilogues` is asked by group_launches, too
TECHNIQUES = {"order": "reorder", "output_reuse": "alias_buffers", EPILOGUES: "tile_gemm_consumers"}
ORDER, OUTPUT_REUSE, _ = TECHNIQUES


class PlanPasses(PassManager[Plans, PlanContext]):
    """Passes over the plan of a graph, in each order of steps that calls choose from."""

    first, last = (50, "assemble"), (90, "plan")

    def disabled(self, config: Config) -> frozenset[str]:
        return (config.disabled() | {TECHNIQUES.get(name, name) for name in config.disabled()}) - REQUIRED

    def apply(self, step: PlanPass, ir: Plans, context: PlanContext) -> Plans:
        made = [step(plan, context) for plan in ir]
        return tuple(plan for one in made for plan in (one if isinstance(one, tuple) else (one,)))

    def name(self, ir: Plans) -> str:
        return ir[0].name

    def count(self, ir: Plans) -> int:
        return len(ir[0].steps)

    def text(self, ir: Plans) -> str:
        return "\n".join(map(show, ir))

    def verify(self, ir: Plans, stage: str) -> None:
        for plan in ir:
            verify(plan, stage)

    def put_back(self, computed: Plans, edited: Edited, stage: str) -> Plans:
        return put_back(computed, edited, stage == self.last[1] or any(plan.offsets for plan in computed))


def run(passes: Sequence[PlanPass], plans: Plans, context: PlanContext, history: History | None = None,
        edits: Edits | None = None) -> Plans:
    """The plans after all `passes`; see `PassManager.run`."""
    return PlanPasses(passes, context.config).run(plans, context, history, edits)
