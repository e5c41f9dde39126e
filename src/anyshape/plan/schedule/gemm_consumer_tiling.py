"""Fusion of GEMMs with their consumers by row tiles: products whose results are read by a flat kernel alone run with
it, a band of rows after the other.

before:
    plan step  arena 0
      in      dy: f32[4096, 64]  1048576 bytes  steps 0-0
      in      x: f32[64, 512]  131072 bytes  steps 0-0
      in      w: f32[4096, 512]  8388608 bytes  steps 0-1
      buffer  g: f32[4096, 512]  8388608 bytes  steps 0-1  arena
      0  matmul(dy, x) -> g
      1  kernel update(&w, g; 2097152)
           {along=[0, 1]}
      out
after tile_gemm_consumers:
    plan step  arena 0
      in      dy: f32[4096, 64]  1048576 bytes  steps 0-0
      in      x: f32[64, 512]  131072 bytes  steps 0-0
      in      w: f32[4096, 512]  8388608 bytes  steps 0-0
      buffer  g: f32[4096, 512]  1081344 bytes  steps 0-0  arena
      0  tiles of 528 rows, param 1
             matmul(dy, x) -> g
             kernel update(&w, g; 2097152)
                  {along=[0, 1]}
      out

So there is never more of a weight's gradient than a band: one that lies in a near cache when the update reads it, and
that takes no memory to speak of, however large the weight is. The update has to come when the gradient is made, which
it cannot where all gradients have to be seen before (their norm is limited).

The kernel may write what it reads along with the result, but nothing that the product reads: that is there to the end.
"""
from __future__ import annotations

import dataclasses

from anyshape.ir.types import size_of
from anyshape.plan.ir.context import DEFAULTS, PlanContext
from anyshape.plan.ir.program import KernelStep, LibraryStep, Plan, Step, TiledGemmStep, step_writes, touched
from anyshape.plan.memory.mutation_copy_elision import permuted, without

LEAST_ROWS, GRAIN = 256, 48  # rows of a band, for a product packs one of its operands again for each


def tile_gemm_consumers(plan: Plan, context: PlanContext = DEFAULTS) -> Plan:
    """`plan` (not allocated, with what inputs receive made there) with such pairs as one step, where the kernel
    stands."""
    steps: list[Step] = [*plan.steps]
    makers = {window.buffer: k for k, step in enumerate(steps) for window in step_writes(step)}
    readers: dict[str, list[int]] = {}
    for k, step in enumerate(steps):
        for name in {window.buffer for window in touched(step)}:
            readers.setdefault(name, []).append(k)
    inside = {b.name for b in plan.buffers if b.is_temp}
    banded: dict[str, TiledGemmStep] = {}
    left_out: set[int] = set()
    for k, kernel in enumerate(plan.steps):
        if not isinstance(kernel, KernelStep):
            continue
        for place in kernel.along:
            name = kernel.params[place].buffer
            first = makers.get(name, k)
            product = plan.steps[first]
            if (name not in inside or readers[name] != [first, k] or place in kernel.outputs
                    or not isinstance(product, LibraryStep) or product.dtype not in context.strided_products
                    or sum(window.buffer == name for window in kernel.params) > 1):
                continue
            count = _rows(product, context.band_bytes)
            operands = {window.buffer for window in product.inputs}
            later = {window.buffer for step in steps[first + 1:k + 1] for window in step_writes(step)}
            if count and not operands & later:
                steps[k] = banded[name] = TiledGemmStep(product, kernel, place, count)
                left_out.add(first)
                break
    if not left_out:
        return plan
    buffers = tuple(dataclasses.replace(b, bytes=banded[b.name].band.type.bytes) if b.name in banded else b
                    for b in plan.buffers)
    plan = without(dataclasses.replace(plan, steps=tuple(steps), buffers=buffers), left_out)
    return permuted(plan, range(len(plan.steps)))


def _rows(product: LibraryStep, band_bytes: int) -> int:
    """The rows of a band of the product's result; 0 where it is no matrix of given size, or not worth it."""
    kind = product.outputs[0].type
    if product.op != "matmul" or product.attrs not in ((), (("rounded", product.dtype),)) or len(kind.shape) != 2:
        return 0
    rows, columns = kind.shape
    if not isinstance(rows, int) or not isinstance(columns, int) or kind.strides is not None \
            or rows * columns == 0 or not band_bytes:
        return 0
    count = rows // max(LEAST_ROWS, -(-band_bytes // (columns * size_of(kind.dtype))))
    return min(-(-rows // count // GRAIN) * GRAIN, rows) if count > 1 else 0
