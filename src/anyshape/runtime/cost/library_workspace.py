"""Workspace of libraries: what PyTorch's library takes while it does a step, beside operands and results; a limit
counts it.

oneDNN brings the weights of a convolution into an order of its own at every call, after PyTorch has brought them into
channels last; and a gradient of weights back. All that goes with the step:

    anyshape.convolution(x, w)               2 * bytes of w
    aten.convolution_backward(g, x, w)       3 * bytes of w, 2 where only the gradient of x is wanted

Measured with torch 2.13 (2026-11-23) and images of channels last in f32, one to seven of them, 8 to 256 channels: that
and at most an image for each thread where windows step over pixels. Other dtypes and layouts take more at times, up to
the images once more (bf16), which is not counted, nor what other operators take.
"""
from __future__ import annotations

from collections.abc import Mapping

from anyshape.plan.ir.program import ExternStep, Plan, Step, Window
from anyshape.runtime.cost.step_cost import CONVOLUTIONS
from anyshape.runtime.memory.size_vectors import SizeTable
from anyshape.sym.expr import Size

BACKWARD = "aten.convolution_backward.default"


def taken_by(step: Step) -> Size:
    """Bytes; 0: nothing that is known."""
    at = 2 if isinstance(step, ExternStep) and step.target == BACKWARD else 1
    if not isinstance(step, ExternStep) or step.target not in (*CONVOLUTIONS, BACKWARD) or len(step.inputs) <= at:
        return 0
    weights = step.inputs[at]
    if not isinstance(weights, Window):
        return 0
    wanted = at == 2 and any(one is not None and one.type.shape == weights.type.shape for one in step.outputs)
    return (3 if wanted else 2) * weights.type.bytes


class LibraryWorkspace:
    """The same of all steps of a plan."""

    def __init__(self, plan: Plan) -> None:
        found = [(number, taken_by(step)) for number, step in enumerate(plan.steps)]
        self.numbers = [number for number, bytes_ in found if bytes_ != 0]
        self.sizes = SizeTable([bytes_ for _, bytes_ in found if bytes_ != 0], f"taken by the library in {plan.name}")

    def at(self, values: Mapping[str, int]) -> list[tuple[int, int]]:
        """By step, the bytes at the symbols' `values`."""
        return list(zip(self.numbers, self.sizes(values).tolist(), strict=True)) if self.numbers else []
