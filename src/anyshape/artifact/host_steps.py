"""Fall backs of a program without PyTorch: the steps that its native code leaves to the host at some sizes (odd
strides, dtypes without a routine), done by numpy: products, copies, attention.

What is done here is right at all sizes, and slow: `anyshape check` names the steps that may come here.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anyshape.base import counters
from anyshape.base.errors import VerifyError
from anyshape.ops.attention import roles
from anyshape.plan.ir.program import CopyStep, LibraryStep, MemoryStep, Window
from anyshape.runtime.call.program import Program
from anyshape.runtime.memory.pools import Block
from anyshape.runtime.specialize.specialization import Specialization, View
from anyshape.sym.expr import Expr, evaluate

Array = np.ndarray[Any, Any]
OPS = ("matmul", "matmul_add", "attention")


class HostSteps:
    """One running call: arrays for the steps that numpy does, and the results."""

    def __init__(self, program: Program, record: Specialization, inputs: list[Any], outputs: list[Any], kept: Block,
                 temporary: Block) -> None:
        self.program, self.record = program, record
        self.inputs, self.outputs = inputs, outputs
        self.kept, self.temporary = kept, temporary
        self.error: BaseException | None = None
        self.buffers = {b.name: b for b in program.plan.buffers}
        self.output_of = {b.name: i for i, b in enumerate(program.specializer.outputs)}

    def array(self, window: Window, view: View) -> Array:
        """The array that a window stands for."""
        sizes, strides, offset = view
        driver, buffer = self.program.driver, self.buffers[window.buffer]
        dtype = driver.dtypes[window.type.dtype]
        if buffer.name in self.record.offsets:
            byte = self.record.offsets[buffer.name] + offset * dtype.itemsize
            if byte >= self.record.kept:
                return _array(self.temporary.window(dtype, byte - self.record.kept, sizes, strides))
            if self.record.reused_output < 0 or self.record.given >= 0:
                return _array(self.kept.window(dtype, byte, sizes, strides))
            memory = _bytes(self.outputs[self.record.reused_output])
            return _array(driver.part(driver.flat(memory, dtype), byte // dtype.itemsize, sizes, strides))
        base = self.outputs[self.output_of[buffer.name]] if buffer.name in self.output_of else self.inputs[buffer.index]
        item = base.itemsize
        return np.lib.stride_tricks.as_strided(
            base if offset == 0 else _from(base, offset), sizes, tuple([step * item for step in strides]))

    def step(self, number: int) -> None:
        """Does a step."""
        step = self.program.plan.steps[number]
        views = self.record.windows[number]
        if isinstance(step, MemoryStep):
            return  # results are there from the start, and inputs are the caller's
        counters.count_extern_call()
        if isinstance(step, CopyStep):
            values = wide(self.array(step.source, views[0]), step.source.type.dtype)
            put(self.array(step.target, views[1]), step.target.type.dtype, values)
            return
        if not isinstance(step, LibraryStep) or step.op not in OPS:
            raise VerifyError(f"step {number} of {self.program.name} is not done without PyTorch",
                              where=getattr(step, "where", ""), why="its operands are laid out oddly at these sizes",
                              do="run it with PyTorch, and report it")
        operands = [wide(self.array(w, v), w.type.dtype) for w, v in zip(step.inputs, views, strict=False)]
        attrs = dict(step.attrs)
        results = attention(attrs, operands) if step.op == "attention" else (product(attrs, operands),)
        for window, view, result in zip(step.outputs, views[len(step.inputs):], results, strict=True):
            put(self.array(window, view), window.type.dtype, result)

    def results(self) -> list[Any]:
        """The outputs of the call."""
        found = []
        for entry, view in zip(self.program.plan.outputs, self.record.outputs, strict=True):
            if not isinstance(entry, Window):
                found.append(evaluate(entry, self.record.values) if isinstance(entry, Expr) else view)
                continue
            array = self.array(entry, view)
            # what lies in the arena, or is another result, is the caller's own
            found.append(array.copy() if entry.buffer in self.record.offsets else array)
        return found


def _array(found: Any) -> Array:
    assert isinstance(found, np.ndarray)
    return found


def _bytes(array: Array) -> Array:
    """The memory from an array's first element on, as far as its elements reach."""
    span = 1 + sum((n - 1) * step for n, step in zip(array.shape, array.strides, strict=True))
    return np.lib.stride_tricks.as_strided(array.reshape(-1)[:1].view(np.uint8), (span + array.itemsize - 1,), (1,))


def _from(array: Array, offset: int) -> Array:
    flat = np.lib.stride_tricks.as_strided(array, (offset + 1,), (array.itemsize,))
    return flat[offset:]


def wide(array: Array, dtype: str) -> Array:
    """The numbers of an array: those of half precision as float32."""
    if dtype == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if dtype == "f16" else array


def put(into: Array, dtype: str, values: Array) -> None:
    """Writes numbers, rounded to the nearest of what the array holds."""
    if dtype != "bf16":
        into[...] = values
        return
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    into[...] = np.where(np.isnan(values), 0x7FC0, rounded)


def product(attrs: dict[str, Any], operands: Sequence[Array]) -> Array:
    """alpha * a @ b + beta * c."""
    a, b, *rest = operands
    if attrs.get("rounded") == "f64":
        a, b = a.astype(np.float64), b.astype(np.float64)
    found = np.matmul(a, b) * attrs.get("alpha", 1)
    return found + rest[0] * attrs.get("beta", 1) if rest else found


def attention(attrs: dict[str, Any], operands: Sequence[Array]) -> tuple[Array, Array]:
    """The results of attention, as ops/attention.py has them."""
    given = dict(zip(roles("attention", len(operands) + 2), operands, strict=False))
    q, k, v = (x if x.dtype == np.float64 else x.astype(np.float32) for x in (given["q"], given["k"], given["v"]))
    if q.shape[1] != k.shape[1]:
        k, v = (np.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q.shape[3] ** -0.5 if attrs["scale"] is None else attrs["scale"]) * (q @ k.swapaxes(2, 3))
    if "mask" in given:
        scores = scores + given["mask"]
    if attrs["causal"]:
        scores = np.where(np.tri(*scores.shape[2:]).astype(np.bool_), scores, -np.inf)
    most = scores.max(3, initial=-np.inf, keepdims=True)
    nothing = most == -np.inf
    weights = np.exp(scores - np.where(nothing, 0, most))
    total = weights.sum(3, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        sums = np.where(nothing, 0, np.log(total) + most)[..., 0]
        weights = np.where(nothing, 0, weights / total)
    return (weights @ v).swapaxes(1, 2), sums
