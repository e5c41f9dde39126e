"""The cost model of steps: operations of products and bytes that are read and written, as formulas.

    matmul 256x512 @ 512x512, f32    134 million operations / 95e9 a second + 2 MB / 24e9 a second = 1.5 ms
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from anyshape.kernel.schedule.hardware_params import Speeds
from anyshape.ops.attention import OPERANDS as ATTENTION
from anyshape.ops.routing import ROUTING
from anyshape.plan.ir.program import ExternStep, LibraryStep, Step, TiledGemmStep, Window, touched
from anyshape.runtime.memory.size_vectors import SizeTable
from anyshape.sym.expr import Size, product

CONVOLUTIONS = ("aten.convolution.default", "anyshape.convolution")
FLOATS = ("f32", "f64", "bf16", "f16")  # dtypes whose products have a speed of their own; others count as the first


def work_of(step: Step) -> tuple[Size, Size]:
    """The operations of a step, of products alone, and the bytes that it reads and writes."""
    traffic: Size = 0
    for window in touched(step):
        traffic = traffic + window.type.bytes
    work: Size = 0
    if isinstance(step, TiledGemmStep):
        work = work_of(step.product)[0]
    if isinstance(step, ExternStep) and step.target in CONVOLUTIONS:
        weights, result = step.inputs[1], step.outputs[0]
        if isinstance(weights, Window) and result is not None:
            work = 2 * result.type.count * product(weights.type.shape[1:])
    if isinstance(step, LibraryStep) and step.op not in ROUTING:
        first, second = step.inputs[:2]
        if step.op == "grouped_conv":
            work = 2 * step.outputs[0].type.count * product(second.type.shape[2:])
        elif step.op == "direct_conv":
            work = 2 * step.outputs[0].type.count * product(second.type.shape[1:])
        elif step.op == "conv_bytes":
            work = 2 * step.outputs[0].type.count * second.type.shape[1] * second.type.shape[3]
        elif step.op == "recurrence":
            work = 2 * first.type.count * second.type.shape[1]
        elif step.op == "recurrence_bytes":
            work = 2 * first.type.count * second.type.shape[1] * second.type.shape[-1]
        elif step.op == "grouped":  # its rows may be gathered
            work = 2 * step.outputs[0].type.count * first.type.shape[-1]
        elif step.op in ATTENTION:  # scores, and what they weigh
            work = 4 * first.type.count * second.type.shape[-2]
        elif "columns" in dict(step.attrs):  # b lies in panels
            work = 2 * first.type.count * step.outputs[0].type.shape[-1]
        else:
            work = 2 * first.type.count * second.type.shape[-1]
    return work, traffic


def product_dtype(step: Step | None) -> str:
    """One of `FLOATS`: the dtype of a step's products, the first where it has none."""
    if isinstance(step, TiledGemmStep):
        return product_dtype(step.product)
    dtypes = [window.type.dtype for window in touched(step)[:1]] if isinstance(step, (LibraryStep, ExternStep)) else []
    return next((dtype for dtype in dtypes if dtype in FLOATS), FLOATS[0])


class Work:
    """What steps cost one after another, at any sizes; None: nothing. `title`: of what they are."""

    def __init__(self, steps: Sequence[Step | None], title: str) -> None:
        works = [(0, 0) if step is None else work_of(step) for step in steps]
        self.sizes = SizeTable([size for both in works for size in both], f"work of {title}")
        self.dtypes = [product_dtype(step) for step in steps]

    def seconds(self, values: Mapping[str, int], speeds: Speeds) -> np.ndarray:
        """Seconds of each, of all threads together, float64."""
        found = self.sizes(values).astype(np.float64).reshape(-1, 2)
        rates = np.array([speeds.products[dtype] for dtype in self.dtypes], np.float64)
        return np.asarray(found[:, 0] / rates + found[:, 1] / speeds.bytes)
