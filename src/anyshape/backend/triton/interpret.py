"""Interpreted device kernels: Triton's interpreter runs a kernel's text on memory of the host, for tests without a GPU.

A process interprets or compiles: the variable TRITON_INTERPRET is set before Triton is imported, or it is not. Where
the interpreter's numbers are not those of a GPU, it is mended here (`repair`; found with Triton 3.6 and 3.7):

- f32 to bf16 truncates; a GPU rounds to nearest even;
- a product of bf16 multiplies their bits as whole numbers;
- the functions of libdevice are missing: they are numpy's, or Python's;
- a scalar as the bound of a loop, an array of one element, is no number (Triton 3.6 with numpy 2.4);
- a comparison of scalars that is spread over lanes has numbers in them;
- a reduction by a function of one's own, or a scan, goes element by element: here it is a tree, as on a GPU, which adds
  up as exactly, and takes a thousandth of the time.
"""
from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from anyshape.backend.cpu.llvm.jit import LoadedKernel
from anyshape.backend.triton import toolchain
from anyshape.backend.triton.kernel import ALIGNED, I32, KernelSource, KernelVersion, number_of
from anyshape.backend.triton.text import read
from anyshape.base.errors import AnyShapeError

BLOCK = ctypes.POINTER(ctypes.c_int64)
RUN = ctypes.CFUNCTYPE(None, BLOCK, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
SIZE = ctypes.CFUNCTYPE(ctypes.c_int64, BLOCK)
ELEMENTS = {"f32": "float32", "f64": "float64", "i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8",
            "u8": "uint8", "bool": "int1", "bf16": "bfloat16", "f16": "float16"}
CONVERSION = "_convert_float"  # of the interpreter: bits of one float format to another
METHODS = "_patch_lang_tensor"  # of the interpreter: gives tensors of triton.language their methods, at each launch
ONE: dict[str, Callable[..., Any]] = {
    "tanh": np.tanh, "expm1": np.expm1, "log1p": np.log1p, "log10": np.log10, "tan": np.tan, "nearbyint": np.rint,
    "trunc": np.trunc, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "erfc": np.vectorize(math.erfc, otypes=[float]),
    "lgamma": np.vectorize(lambda x: math.lgamma(x) if x > 0 or x != math.floor(x) else math.inf, otypes=[float])}
TWO: dict[str, Callable[..., Any]] = {
    "pow": np.power, "atan2": np.arctan2, "fmod": np.fmod, "copysign": np.copysign, "hypot": np.hypot,
    "nextafter": np.nextafter}


class InterpretedKernel:
    """A kernel that the interpreter runs. Not thread-safe: the interpreter has one state for its process.

    Raises:
        AnyShapeError: this process compiles kernels.
    """

    def __init__(self, source: KernelSource) -> None:
        self.name, self.source = source.name, source
        self.language = repair()
        self.functions = toolchain.functions(source.text, source.name)
        self.ran: list[str] = []  # the versions, in words

    def run(self, addresses: Sequence[int], sizes: Sequence[int], status: int = 0) -> None:
        """Runs it as the plan runner would. status: the address of the run's status word; 0: kernels do not ask.

        Raises:
            triton.runtime.errors.InterpreterError: the text cannot be run.
        """
        alignment = math.gcd(ALIGNED, *addresses)
        version = self.source.choose(sizes, alignment, bool(status))
        self.ran.append(version.title)
        self.launch(version, addresses, sizes, status)

    def launch(self, version: KernelVersion, addresses: Sequence[int], sizes: Sequence[int], status: int = 0,
               scratch_address: int = 0) -> None:
        """Runs one of its versions. scratch_address: of the version's scratch; 0: it gets some of its own."""
        values = dict(zip(self.source.sizes, sizes, strict=True))
        grid = number_of(version.grid, values)
        if grid <= 0:
            return
        scratch = np.full(number_of(version.scratch, values) + 64, 0xFF, np.uint8)  # NaN, where anybody reads it
        given = [self._value(address, ELEMENTS[dtype], True) for address, (_, dtype) in
                 zip(addresses, self.source.params, strict=True)]
        given.append(self._value(status, "int64", True))
        index = "int32" if version.index == I32 else "int64"
        given += [self._value(size, index, False) for size in sizes]
        if version.scratch != 0:
            own = (scratch.ctypes.data + 63) // 64 * 64
            given.append(self._value(scratch_address or own, "int8", True))
        self.functions[version.function][(grid,)](
            *given, **dict(version.constants), INDEX=getattr(self.language, index), GUARDED=version.guarded)

    def _value(self, number: int, dtype: str, pointer: bool) -> Any:
        """A parameter of a launch."""
        interpreter = _interpreter()
        kind = getattr(self.language, dtype)
        if pointer:
            kind = self.language.pointer_type(kind)
        data = np.array([number], np.uint64 if pointer else dtype)
        return self.language.tensor(interpreter.TensorHandle(data, kind), kind)


class LoadedInterpreted:
    """Interpreted kernels behind the addresses that the CPU's plan runner calls. errors: what went wrong in a call."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.ran: dict[str, list[str]] = {}  # the versions that ran, by kernel

    def build(self, texts: Sequence[str]) -> list[LoadedKernel]:
        """The kernels of texts of `schedule.emit`."""
        return [self._loaded(InterpretedKernel(read(text))) for text in texts]

    def _loaded(self, kernel: InterpretedKernel) -> LoadedKernel:
        count = len(kernel.source.params)
        self.ran[kernel.name] = kernel.ran

        def run(block: Any, begin: int, end: int, scratch: int) -> None:
            words = block[:count + len(kernel.source.sizes)]
            try:
                kernel.run(words[:count], words[count:])
            except (RuntimeError, ValueError, TypeError, AssertionError, KeyError) as error:
                self.errors.append(f"{kernel.name}: {error!r}"[:600])

        functions: tuple[Any, ...] = (RUN(run), SIZE(lambda block: 1), SIZE(lambda block: 0))
        main, one, zero = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
        return LoadedKernel(kernel.name, main, one, zero, zero, (functions, kernel))


@lru_cache(maxsize=1)
def repair() -> Any:
    """Mends the interpreter of this process; returns triton.language.

    Raises:
        AnyShapeError: this process compiles.
    """
    if not toolchain.module("triton").knobs.runtime.interpret:
        raise AnyShapeError("kernels are interpreted in a process of its own", why="TRITON_INTERPRET is not set",
                            do="set TRITON_INTERPRET=1 before Triton is imported")
    interpreter, language = _interpreter(), toolchain.module("triton.language")
    # whole numbers of lanes that do not exist may overflow
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    plain = getattr(interpreter, CONVERSION)

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (language.float32, language.bfloat16):
            return _to_bf16(data).reshape(data.shape)
        if (source, target) == (language.bfloat16, language.float32):
            return _to_f32(data).reshape(data.shape)
        return plain(data, source, target, rounding)

    setattr(interpreter, CONVERSION, convert)
    multiply = interpreter.interpreter_builder.create_dot

    def dot(a: Any, b: Any, total: Any, *how: Any) -> Any:
        return multiply(_wide(a, interpreter, language), _wide(b, interpreter, language), total, *how)

    interpreter.interpreter_builder.create_dot = dot
    spread = interpreter.interpreter_builder.create_splat

    def splat(kind: Any, value: Any) -> Any:
        is_test = value.data.dtype == np.bool_
        return spread(kind, interpreter.TensorHandle(value.data, language.int1) if is_test else value)

    interpreter.interpreter_builder.create_splat = splat
    methods = getattr(interpreter, METHODS)

    def with_index(tensor: Any, scope: Any) -> None:
        methods(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    setattr(interpreter, METHODS, with_index)
    library = toolchain.module("triton.language.extra.libdevice")
    for name, function in (*ONE.items(), *TWO.items(), ("erfinv", _erfinv)):
        setattr(library, name, _by_numpy(function, interpreter, language))
    for kind, tree in ((interpreter.ReduceOps, _reduced), (interpreter.ScanOps, _scanned)):
        kind.apply_impl = _by_tree(kind.apply_impl, tree)
    return language


def _wide(operand: Any, interpreter: Any, language: Any) -> Any:
    """An operand of a product, one of bf16 as f32."""
    if operand.dtype.scalar != language.bfloat16:
        return operand
    return interpreter.TensorHandle(_to_f32(operand.data), language.float32)


def _by_tree(plain: Callable[..., Any], tree: Callable[..., Any]) -> Callable[..., Any]:
    """Reductions and scans of one tensor along an axis; others as they are."""
    def apply(self: Any, given: Any) -> Any:
        if len(given) != 1 or self.axis is None or getattr(self, "reverse", False):
            return plain(self, given)
        kind = given[0].dtype

        def combine(a: Any, b: Any) -> Any:
            with np.errstate(all="ignore"):
                return self.combine_fn.fn(self.to_tensor(a, kind), self.to_tensor(b, kind)).handle.data
        return [self.to_tensor(tree(self, given[0].handle.data, combine), kind)]
    return apply


def _reduced(self: Any, data: Any, combine: Callable[[Any, Any], Any]) -> Any:
    count = data.shape[self.axis]
    while count > 1:
        count //= 2
        data = combine(*np.split(data, 2, self.axis))
    return data if self.keep_dims else np.squeeze(data, self.axis)


def _scanned(self: Any, data: Any, combine: Callable[[Any, Any], Any]) -> Any:
    step, place = 1, np.arange(data.shape[self.axis]).reshape([-1 if axis == self.axis else 1
                                                               for axis in range(data.ndim)])
    while step < data.shape[self.axis]:
        data = np.where(place >= step, combine(np.roll(data, step, self.axis), data), data)
        step *= 2
    return data


def _by_numpy(function: Callable[..., Any], interpreter: Any, language: Any) -> Callable[..., Any]:
    """A function of libdevice by one of numpy."""
    def call(*args: Any, _semantic: Any = None) -> Any:
        first = next(one for one in args if isinstance(one, language.tensor))
        data = [one.handle.data if isinstance(one, language.tensor) else one for one in args]
        with np.errstate(all="ignore"):
            found = np.asarray(function(*data)).astype(data[0].dtype)
        wide = next((one for one in args if isinstance(one, language.tensor) and one.shape == list(found.shape)), first)
        return language.tensor(interpreter.TensorHandle(found, first.dtype.scalar), wide.type)
    return call


def _erfinv(x: Any) -> Any:
    """The inverse of erf, by Newton's method on float64 from Giles' start (GPU Computing Gems, 2011)."""
    wide = np.asarray(x, np.float64)
    term = np.log(np.maximum((1 - wide) * (1 + wide), 1e-300))
    half = 2 / (math.pi * 0.147) + term / 2
    found = np.copysign(np.sqrt(np.maximum(np.sqrt(half * half - term / 0.147) - half, 0)), wide)
    erf = np.vectorize(math.erf, otypes=[float])
    for _ in range(4):
        found = found - (erf(found) - wide) / (2 / math.sqrt(math.pi) * np.exp(-found * found))
    return np.where(np.abs(wide) == 1, np.copysign(np.inf, wide), np.where(np.abs(wide) > 1, np.nan, found))


def _to_f32(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bf16(x: Any) -> Any:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def _interpreter() -> Any:
    return toolchain.module("triton.runtime.interpreter")
