"""Steps of a program without PyTorch that are done by numpy: operators without a native routine, from a fixed list
(runtime/numpy_ops/), and what native code leaves to the host at some sizes (odd strides, dtypes without a routine):
products, copies, attention. `anyshape check` names the operators.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from anyshape.base import counters
from anyshape.base.errors import VerifyError
from anyshape.ir.panels import from_panels
from anyshape.ops.attention import roles
from anyshape.ops.matmul import GROUPED
from anyshape.ops.routing import ROUTING
from anyshape.plan.ir.program import CopyStep, ExternStep, LibraryStep, MemoryStep, Window
from anyshape.runtime.call.program import Program
from anyshape.runtime.driver.numpy_driver import NumpyDriver, address_of, empty_strided, strides_of
from anyshape.runtime.memory.pools import Block
from anyshape.runtime.numpy_ops import call, draws
from anyshape.runtime.numpy_ops.convolution import byte_conv, direct
from anyshape.runtime.numpy_ops.groups import grouped, grouped_conv, routing
from anyshape.runtime.specialize.specialization import Specialization, View
from anyshape.sym.expr import Expr, evaluate

Array = np.ndarray[Any, Any]


class HostSteps:
    """One running call: arrays for the steps that numpy does, and the results."""

    def __init__(self, program: Program, record: Specialization, inputs: list[Any], outputs: list[Any], kept: Block,
                 temporary: Block, frame: Any) -> None:
        self.program, self.record = program, record
        self.inputs, self.outputs = inputs, outputs
        self.kept, self.temporary = kept, temporary
        self.frame = frame
        self.made: dict[str, Array] = {}  # results of operators, in memory of their own
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
        base = self.made[buffer.name] if buffer.is_external else self.outputs[self.output_of[buffer.name]] \
            if buffer.name in self.output_of else self.inputs[buffer.index]
        item = base.itemsize
        return np.lib.stride_tricks.as_strided(
            base if offset == 0 else _from(base, offset), sizes, tuple([step * item for step in strides]))

    def step(self, number: int) -> None:
        """Does a step."""
        step = self.program.plan.steps[number]
        assert self.record.windows is not None, "a program with steps of the host"
        views = self.record.windows[number]
        if isinstance(step, MemoryStep):
            return  # results are there from the start, and inputs are the caller's
        counters.count_extern_call()
        if isinstance(step, CopyStep):
            values = wide(self.array(step.source, views[0]), step.source.type.dtype)
            put(self.array(step.target, views[1]), step.target.type.dtype, values)
            return
        if isinstance(step, ExternStep):
            self._extern(number, step, views)
            return
        if not isinstance(step, LibraryStep) or step.op not in STEPS:
            raise VerifyError(f"step {number} of {self.program.name} is not done without PyTorch",
                              where=getattr(step, "where", ""), why="its operands are laid out oddly at these sizes",
                              do="run it with PyTorch, and report it")
        operands = [wide(self.array(w, v), w.type.dtype) for w, v in zip(step.inputs, views, strict=False)]
        results = STEPS[step.op](step.op, dict(step.attrs), operands, views[-len(step.outputs)][0])
        for window, view, result in zip(step.outputs, views[len(step.inputs):], results, strict=True):
            put(self.array(window, view), window.type.dtype, result)

    def _extern(self, number: int, step: ExternStep, views: tuple[Any, ...]) -> None:
        """Does an operator; its results get memory of their own, and what nobody reads any more is let go."""
        for name in [name for name in self.made if self.buffers[name].last < number]:
            del self.made[name]
        operands = [wide(self.array(entry, view), entry.type.dtype) if isinstance(entry, Window) else view
                    for entry, view in zip(step.inputs, views, strict=False)]
        found = self._called(step, operands)
        if len(found) != len(step.outputs):
            raise _other(step, f"{len(found)} results", f"{len(step.outputs)}")
        for window, view, result in zip(step.outputs, views[len(step.inputs):], found, strict=True):
            if window is not None:
                self._receive(step, window, view, result() if callable(result) else result, operands)

    def _called(self, step: ExternStep, operands: Sequence[Any]) -> tuple[Any, ...]:
        if not (step.effect and draws(step.target)):
            return call(step.target, step.template, operands, step.where, step.effect)
        driver, window = self.program.driver, step.outputs[0]
        assert isinstance(driver, NumpyDriver)
        with driver.random as generator:
            return call(step.target, step.template, operands, step.where, step.effect,
                        (generator, window.type.dtype if window is not None else "f32"))

    def _receive(self, step: ExternStep, window: Window, view: View, result: Array, operands: Sequence[Any]) -> None:
        sizes, strides, _ = view
        dtype = self.program.driver.dtypes[window.type.dtype]
        if result.shape != sizes:
            raise _other(step, str(result.shape), str(sizes))
        if not self.buffers[window.buffer].is_external:
            put(self.array(window, view), window.type.dtype, result)
            return
        own = result.base is None and result.flags.writeable and not any(result is one for one in operands)
        if not (own and result.dtype == dtype and window.type.dtype != "bf16" and strides_of(result) == strides):
            fresh = empty_strided(sizes, strides, dtype)
            put(fresh, window.type.dtype, result)
            result = fresh
        self.made[window.buffer] = result
        self.program.runner.bind(self.frame, self.program.layout.slots[window.buffer], address_of(result))

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


def _other(step: ExternStep, found: str, wanted: str) -> VerifyError:
    return VerifyError(f"{step.target} returned something else than was declared", where=step.where,
                       why=f"it returned {found}; declared: {wanted}",
                       do="save the program again; if it stays, report it")


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
    b = from_panels(b, a.shape[-1], attrs["columns"]) if "columns" in attrs else b
    if attrs.get("rounded") == "f64":
        a, b = a.astype(np.float64), b.astype(np.float64)
    found = np.matmul(a, b) * attrs.get("alpha", 1)
    return found + rest[0] * attrs.get("beta", 1) if rest else found


def bytes_product(attrs: dict[str, Any], a: Array, b: Array) -> Array:
    """u8 by i8 in i32: f64 holds the sums, which then wrap around."""
    if "columns" in attrs:
        b = from_panels(b, a.shape[-1], attrs["columns"])
    return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.int64).astype(np.int32)


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


# a library step by its op, attributes, operands, and the shape of its first result
STEPS: dict[str, Callable[[str, dict[str, Any], list[Array], tuple[int, ...]], tuple[Array, ...]]] = {
    **dict.fromkeys(("matmul", "matmul_add"), lambda op, attrs, operands, shape: (product(attrs, operands),)),
    "matmul_bytes": lambda op, attrs, operands, shape: (bytes_product(attrs, *operands),),
    "attention": lambda op, attrs, operands, shape: attention(attrs, operands),
    "direct_conv": lambda op, attrs, operands, shape: (direct(attrs, operands),),
    "conv_bytes": lambda op, attrs, operands, shape: (byte_conv(attrs, *operands),),
    "grouped_conv": lambda op, attrs, operands, shape: (grouped_conv(attrs, operands, shape),),
    **dict.fromkeys(GROUPED, lambda op, attrs, operands, shape: (grouped(op, attrs, operands),)),
    **dict.fromkeys(ROUTING, lambda op, attrs, operands, shape: routing(op, attrs, operands[0], shape[0])),
}
