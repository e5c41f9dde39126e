"""What a step costs, by estimate: the operations of products and the bytes that are read and written, as formulas."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from anyshape.plan.plan import ExternStep, LibraryStep, Step, Window, touched
from anyshape.run.attention import OPS as ATTENTION
from anyshape.sym.expr import Size, product
from anyshape.sym.formulas import function_of

OPERATIONS, BYTES = 80e9, 10e9  # a second, on one core (docs/performance.md)


def work_of(step: Step) -> tuple[Size, Size]:
    """The operations of a step, of products alone, and the bytes that it reads and writes."""
    traffic: Size = 0
    for window in touched(step):
        traffic = traffic + window.type.bytes
    work: Size = 0
    if isinstance(step, ExternStep) and step.target == "aten.convolution.default":
        weights, result = step.inputs[1], step.outputs[0]
        if isinstance(weights, Window) and result is not None:
            work = 2 * result.type.count * product(weights.type.shape[1:])
    if isinstance(step, LibraryStep):
        first, second = step.inputs[:2]
        if step.op in ATTENTION:  # scores, and what they weigh
            work = 4 * first.type.count * second.type.shape[-2]
        else:
            work = 2 * first.type.count * second.type.shape[-1]
    return work, traffic


class Work:
    """What steps cost one after another, at any sizes; None: nothing. `title`: of what they are."""

    def __init__(self, steps: Sequence[Step | None], title: str) -> None:
        works = [(0, 0) if step is None else work_of(step) for step in steps]
        self.sizes = function_of([size for both in works for size in both], f"work of {title}")

    def seconds(self, values: Mapping[str, int]) -> np.ndarray:
        """Seconds of each on one core, float64."""
        found = np.array(self.sizes(values), np.float64).reshape(-1, 2)
        return np.asarray(found[:, 0] / OPERATIONS + found[:, 1] / BYTES)
