"""The stages of a compilation: numbers and names by which settings show, dump, edit and leave them out."""
from __future__ import annotations

from anyshape.base.config import Config
from anyshape.base.errors import ConfigError
from anyshape.passes.driver import pipeline
from anyshape.passes.driver.pipeline import ROAD, GraphPasses
from anyshape.plan.driver import pipeline as plan_pipeline
from anyshape.plan.driver.pipeline import PLAN_ROAD, REQUIRED, PlanPasses

# between the passes over graphs and those over plans
KERNELS, LLVM = (40, "kernels"), (41, "llvm")


def stages_of(config: Config) -> list[tuple[int, str]]:
    """Number and name of the stages of a graph, in order."""
    return [*GraphPasses(ROAD, config).stages(), KERNELS, LLVM, *PlanPasses(PLAN_ROAD, config).stages()]


def check_names(config: Config) -> None:
    """Raises ConfigError when `config.show` or `config.disable` names what does not exist."""
    passes = [step.__name__ for step in (*ROAD, *PLAN_ROAD) if step.__name__ not in REQUIRED]
    known = {"show": [name for _, name in stages_of(Config())] + ["all"],
             "disable": [*pipeline.TECHNIQUES, *plan_pipeline.TECHNIQUES, *passes]}
    for name, text in (("show", config.show), ("disable", config.disable)):
        unknown = [word for word in map(str.strip, text.split(",")) if word and word not in known[name]]
        if unknown:
            raise ConfigError(f"{name} names no {'stage' if name == 'show' else 'pass'}: {', '.join(unknown)}",
                              why=f"there are {', '.join(known[name])}", do="correct the name")
