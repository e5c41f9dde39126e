"""Results of the ablation: techniques of the compiler, and the steps of programs with each left out."""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from anyshape.passes.driver.pipeline import ATTENTION, FAST_DISPATCH, REGIMES
from anyshape.plan.driver.pipeline import ORDER, OUTPUT_REUSE
from anyshape.plan.ir.context import EPILOGUES
from anyshape_bench.harness.result_files import StoredRun

ALL, AGAIN, EAGER = "everything", "everything, again", "eager"

# name -> (settings without it, what it is). Passes that only tidy up (fold, dce) are none.
TECHNIQUES: dict[str, tuple[dict[str, Any], str]] = {
    "fuse": ({"fuse": False}, "pointwise work, reductions and views in common kernels"),
    **{name: ({"disable": name}, text) for name, text in (
        (ATTENTION, "attention that the model writes out becomes the fused operator"),
        ("causal_mask", "what a mask of the future hides is not computed"),
        ("gemm_accumulate", "products add residuals and biases themselves"),
        ("gemm_chain_split", "a wide value between two products is made in two halves"),
        ("cast_into_gemm", "weights are rounded, operands read through views, within products"),
        ("scatter_accumulate", "what is scattered and added is added where the rest lies"),
        ("concat_elimination", "concatenations are written part by part"),
        ("channels_last", "convolutions with channels last"),
        ("views", "views of views are one, so that they vanish in kernels"),
        ("simplify", "arithmetic that does nothing is left out"),
        ("cse", "equal equations are one"),
        (REGIMES, "versions of a kernel for short, long, few rows"),
        (ORDER, "steps run in another order where that takes less memory"),
        (OUTPUT_REUSE, "values lie in results and over what dies"),
        (EPILOGUES, "kernels run with the product before them, updates in bands"),
        (FAST_DISPATCH, "calls go past Dynamo's and AOTAutograd's wrappers"),
    )},
}


@dataclass(slots=True)
class Row:
    """A model with a technique left out, with everything, or on eager. Seconds and bytes.

    Attributes:
        times: per shape, the median; empty where the technique has no part.
        part: whether leaving it out changes the programs, or the way to them.
        launches: of a step at the first shape.
        arena: bytes at the last shape, of the greatest program.
        error: why there are no numbers.
    """

    model: str
    name: str
    shapes: list[list[int]]
    times: list[float] = field(default_factory=list)
    part: bool = True
    launches: int | None = None
    arena: int | None = None
    error: str = ""


@dataclass(slots=True)
class Techniques(StoredRun):
    """A run, with its rows in order."""

    FILE = "techniques.json"
    WHAT = "a table of techniques"
    COMMAND = "anyshape bench --techniques"
    rows: list[Row] = field(default_factory=list)

    def of(self, model: str, name: str) -> Row | None:
        """The row of a model with that technique left out."""
        return next((row for row in self.rows if (row.model, row.name) == (model, name)), None)


@dataclass(slots=True)
class Answer:
    """What a worker found: the rows of a model, and the threads that torch has."""

    threads: int
    rows: list[Row] = field(default_factory=list)
    error: str = ""


def slower(row: Row, base: Row) -> float | None:
    """How many times as long a step takes as with everything, over all shapes."""
    return math.fsum(row.times) / math.fsum(base.times) if row.times and base.times else None
