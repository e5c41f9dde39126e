"""Every row of the op table: its type rule against torch's result, its body, read element by element, against interp.

A sample is one node: operands (tensors by dtype and shape, or scalars), attributes, and values for the symbols. The
interpreter raises when the type rule and torch disagree on dtype or shape.
"""
from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import Any

import numpy
import pytest
import torch

import anyshape.ops.table  # noqa: F401  (fills the op table)
from anyshape.backend.cpu.llvm.scalar_ops import unsupported
from anyshape.base.config import Config
from anyshape.base.errors import InputError, VerifyError
from anyshape.compiler.driver import compile_graph
from anyshape.compiler.shape_preconditions import uncertain_sizes
from anyshape.ir.build import Builder
from anyshape.ir.graph import Graph, Node, Value
from anyshape.ir.op import OPS
from anyshape.ir.panels import from_panels, panels_of
from anyshape.ir.scalar import SCALAR, Ranges
from anyshape.ir.types import SizeType, TensorType, kind_of
from anyshape.ops import pointwise
from anyshape.ops.collective import COLLECTIVES
from anyshape.ops.routing import ROUTING
from anyshape.ops.view import reshape_index
from anyshape.plan.ir.program import ExternStep
from anyshape.runtime.torch_ops.extern_calls import call_extern, compile_extern
from anyshape.runtime.torch_ops.reference_interpreter import interpret, scalar_function, uniform
from anyshape.sym.expr import Size, dense_strides, evaluate, root, symbol
from anyshape.sym.facts import Facts
from anyshape.torch_compat.dtypes import TORCH_DTYPES

n, m = symbol("n"), symbol("m")

# ---- a scalar evaluator: one element of a result, on numpy scalars

NUMPY = {"f32": numpy.float32, "f64": numpy.float64, "bf16": numpy.float32, "f16": numpy.float32, "i8": numpy.int8,
         "i16": numpy.int16, "i32": numpy.int32, "i64": numpy.int64, "u8": numpy.uint8, "bool": numpy.bool_}


def digamma(x: float) -> float:
    """By the recurrence and the asymptotic series (Abramowitz and Stegun 6.3.18); by reflection for x < 0."""
    if x == 0:
        return -math.inf
    if x < 0:
        return math.nan if x == math.floor(x) else digamma(1 - x) - math.pi / math.tan(math.pi * x)
    shift = 0.0
    while x < 40:
        shift -= 1 / x
        x += 1
    return shift + math.log(x) - 1 / (2 * x) - 1 / (12 * x**2) + 1 / (120 * x**4) - 1 / (252 * x**6)


def erfinv(y: float) -> float:
    """By bisection of erf."""
    if abs(y) >= 1:
        return math.nan if abs(y) > 1 else math.copysign(math.inf, y)
    low, high = -6.0, 6.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if math.erf(middle) < y else (low, middle)
    return low


def lgamma(x: float) -> float:
    """Infinite at the poles."""
    return math.inf if x <= 0 and x == math.floor(x) else math.lgamma(x)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": numpy.add, "sub": numpy.subtract, "mul": numpy.multiply, "div": numpy.divide,
    "floor_div": numpy.floor_divide, "trunc_div": lambda x, y: numpy.trunc(numpy.divide(x, y)),
    "remainder": numpy.remainder, "fmod": numpy.fmod, "maximum": numpy.maximum, "minimum": numpy.minimum,
    "pow": numpy.power, "atan2": numpy.arctan2, "copysign": numpy.copysign, "hypot": numpy.hypot,
    "nextafter": numpy.nextafter, "neg": numpy.negative, "abs": numpy.abs, "sign": numpy.sign, "floor": numpy.floor,
    "ceil": numpy.ceil, "round": numpy.rint, "trunc": numpy.trunc, "exp": numpy.exp, "exp2": numpy.exp2,
    "expm1": numpy.expm1, "log": numpy.log, "log2": numpy.log2, "log10": numpy.log10, "log1p": numpy.log1p,
    "sqrt": numpy.sqrt, "rsqrt": lambda x: 1 / numpy.sqrt(x), "reciprocal": lambda x: 1 / x, "sin": numpy.sin,
    "cos": numpy.cos, "tan": numpy.tan, "tanh": numpy.tanh, "sigmoid": lambda x: 1 / (1 + numpy.exp(-x)),
    "erf": math.erf, "erfc": math.erfc, "asin": numpy.arcsin, "acos": numpy.arccos, "atan": numpy.arctan,
    "sinh": numpy.sinh, "cosh": numpy.cosh, "asinh": numpy.arcsinh, "acosh": numpy.arccosh, "atanh": numpy.arctanh,
    "lgamma": lgamma, "digamma": digamma, "erfinv": erfinv, "eq": numpy.equal, "ne": numpy.not_equal,
    "lt": numpy.less, "le": numpy.less_equal, "gt": numpy.greater, "ge": numpy.greater_equal,
    "and": numpy.bitwise_and, "or": numpy.bitwise_or, "xor": numpy.bitwise_xor, "not": numpy.invert,
    "shift_left": numpy.left_shift, "shift_right": numpy.right_shift, "isnan": numpy.isnan, "isinf": numpy.isinf,
    "signbit": numpy.signbit, "where": lambda c, x, y: x if c else y, "cast": lambda x: x, "store": lambda x: x,
    "random": lambda seed, counter: uniform(torch.tensor(int(seed)), torch.tensor(int(counter))).item(),
}  # fmt: skip


class Evaluator:
    """The Body protocol over numpy scalars; a register's dtype is the scalar's."""

    def __init__(self, tensors: dict[str, torch.Tensor], symbols: dict[str, int]) -> None:
        self.tensors = tensors
        self.symbols = dict(symbols)

    def read(self, operand: Value, index: tuple[Size, ...]) -> Any:
        assert isinstance(operand, Value), "scalars are constants or sizes"
        dtype = operand.tensor.dtype
        tensor = self.tensors[operand.name]
        place = tuple(evaluate(size, self.symbols) for size in index)
        assert len(place) == tensor.ndim
        assert all(0 <= i < size for i, size in zip(place, tensor.shape, strict=True)), (place, tensor.shape)
        return NUMPY[dtype](tensor[place].item())

    def read_where(self, mask: Any, operand: Value, index: tuple[Size, ...], other: float | int | bool) -> Any:
        assert isinstance(mask, numpy.bool_)
        return self.read(operand, index) if mask else NUMPY[operand.tensor.dtype](other)

    def apply(self, op: str, *args: Any, dtype: str) -> Any:
        assert len(args) == SCALAR[op].arity, op
        alike = args[1:] if op == "where" else args
        assert len({type(a) for a in alike}) == 1, (op, [type(a) for a in args])
        with numpy.errstate(all="ignore"):
            result = FUNCTIONS[op](*args) if op in FUNCTIONS else scalar_function(op)(
                *map(torch.tensor, args)).numpy()
        return numpy.array(result).astype(NUMPY[dtype])[()]

    def constant(self, value: float | int | bool, dtype: str) -> Any:
        return NUMPY[dtype](value)

    def index(self, size: Size) -> Any:
        return numpy.int64(evaluate(size, self.symbols))

    def as_index(self, register: Any) -> Size:
        assert isinstance(register, numpy.int64)
        name = f"%{len(self.symbols)}"
        self.symbols[name] = int(register)
        return symbol(name)

    def checked_index(self, register: Any, size: Size, wrap: bool) -> Size:
        limit = evaluate(size, self.symbols)
        wrapped = register + limit if register < 0 and wrap else register
        if not 0 <= wrapped < limit:
            raise IndexError(f"{register} is not in {limit}")
        return self.as_index(numpy.int64(wrapped))

    def check(self, holds: Any, code: int) -> None:
        if not holds:
            raise ZeroDivisionError


# ---- samples


@dataclass(frozen=True)
class T:
    """A tensor operand; values are drawn from [low, high)."""

    dtype: str
    shape: tuple[Size, ...]
    low: float = -2
    high: float = 2


@dataclass(frozen=True)
class Sample:
    op: str
    operands: tuple[Any, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[dict[str, int], ...] = ({},)

    def __str__(self) -> str:
        operands = ",".join(f"{o.dtype}{list(o.shape)}" if isinstance(o, T) else str(o) for o in self.operands)
        return f"{self.op}({operands} {self.attrs})".replace("Expr", "")


def draw(spec: T, symbols: dict[str, int], seed: int) -> torch.Tensor:
    shape = [evaluate(size, symbols) for size in spec.shape]
    generator = torch.Generator().manual_seed(seed)
    if spec.dtype == "bool":
        return torch.rand(shape, generator=generator) > 0.5
    values = torch.rand(shape, generator=generator, dtype=torch.float64) * (spec.high - spec.low) + spec.low
    if TORCH_DTYPES[spec.dtype].is_floating_point:
        return values.to(TORCH_DTYPES[spec.dtype])
    return values.floor().to(TORCH_DTYPES[spec.dtype])


def build(sample: Sample) -> tuple[Graph, Node]:
    builder = Builder("sample")
    names = sorted({name for sizes in sample.sizes for name in sizes})
    for name in names:
        builder.input(name, SizeType())
    operands = [builder.input("x", TensorType(o.dtype, o.shape)) if isinstance(o, T) else o for o in sample.operands]
    result = builder.op(sample.op, *operands, **sample.attrs)
    return builder.finish((result,)), builder.nodes[-1]


def run(sample: Sample, symbols: dict[str, int]) -> tuple[Node, torch.Tensor, Evaluator]:
    graph, node = build(sample)
    tensors = {}
    inputs: list[Any] = []
    specs = iter(o for o in sample.operands if isinstance(o, T))
    for value in graph.inputs:
        if isinstance(value.type, SizeType):
            inputs.append(symbols[value.name])
            continue
        inputs.append(draw(next(specs), symbols, seed=len(inputs)))
        tensors[value.name] = inputs[-1]
    outputs, _, _ = interpret(graph, inputs)
    return node, outputs[0], Evaluator(tensors, symbols)


TOLERANCE = {"bf16": 1e-2, "f16": 2e-3, "f32": 3e-6, "f64": 1e-12}


def check(sample: Sample) -> None:
    for symbols in sample.sizes:
        node, expected, evaluator = run(sample, symbols)
        dtype = node.output.tensor.dtype
        loops = [f"i{d}" for d in range(expected.ndim)]
        elements = []
        for place in product(*(range(size) for size in expected.shape)):
            evaluator.symbols.update(zip(loops, place, strict=True))
            body = OPS[node.op].body
            assert body is not None
            elements.append(body(evaluator, node, tuple(symbol(name) for name in loops)))
            assert isinstance(elements[-1], NUMPY[dtype]), (type(elements[-1]), dtype)
        found = torch.tensor(elements, dtype=TORCH_DTYPES[dtype]).reshape(expected.shape)
        bound = TOLERANCE.get(dtype, 0)
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound, equal_nan=True)


KIND_DTYPES = {"float": ("f32", "bf16", "f64"), "int": ("i64", "i8"), "uint": ("u8",), "bool": ("bool",)}
THREE = ({"n": 0}, {"n": 1}, {"n": 5})
AROUND_0: dict[int, Ranges] = {1: ((-2, 3),), 2: ((-3, 4), (-2, 3)), 3: ((-3, 4), (-2, 3), (-2, 3))}


def row_samples(row: pointwise.Pointwise, dtype: str) -> Iterator[Sample]:
    """A row on operands of all shapes that broadcast, on a literal in each place, on a size."""
    ranges = [(max(low, 0) if dtype == "u8" else low, high) for low, high in row.ranges or AROUND_0[row.arity]]
    if row.arity == 1:
        yield Sample(row.name, (T(dtype, (n, 3), *ranges[0]),), {}, THREE)
        yield Sample(row.name, (T(dtype, (), *ranges[0]),))
        return
    first, *others = ranges
    middle = tuple(T(dtype, (3,), *one) for one in others[1:])
    low, high = others[0]
    literal = {"f": 1.1, "b": dtype == "bool" or 1.1}.get(dtype[0], 2)
    left = T(dtype, (n, 3), *first)
    yield Sample(row.name, (left, T(dtype, (3,), low, high), *middle), {}, THREE)
    yield Sample(row.name, (T(dtype, (2, 1, 3), *first), T(dtype, (n, 1), low, high), *middle), {}, THREE)
    yield Sample(row.name, (left, literal, *middle), {}, THREE)
    yield Sample(row.name, (literal, T(dtype, (), low + 1, high), *(T(dtype, (), *one) for one in others[1:])))
    if dtype not in ("bool", "i8", "u8") and row.name not in ("shift_left", "pow"):
        yield Sample(row.name, (left, n + 1, *middle), {}, THREE)


def pointwise_samples() -> Iterator[Sample]:
    for row in pointwise.POINTWISE.values():
        for dtype in (d for kind in row.kinds for d in KIND_DTYPES.get(kind, (kind,))):
            yield from row_samples(row, dtype)
    for name in ("eq", "ge", "lt"):  # the literal is compared as bf16 or f16 holds it
        yield Sample(name, (T("bf16", (n,), 1.1, 1.1), 1.1), {}, THREE)
        yield Sample(name, (1.1, T("f16", (n,), 1.1, 1.1)), {}, THREE)
    for dtype in ("f32", "bf16", "i64", "bool"):
        yield Sample("where", (T("bool", (n, 1)), T(dtype, (3,)), T(dtype, (n, 3))), {}, THREE)
        literal = {"f": -math.inf, "b": True if dtype == "bool" else -math.inf}.get(dtype[0], 2)
        yield Sample("where", (T("bool", (n,)), literal, T(dtype, ())), {}, THREE)
        yield Sample("where", (False, T(dtype, (n,)), literal), {}, THREE)
    for source, target in product(("f32", "bf16", "f16", "f64", "i64", "i32", "u8", "bool"), repeat=2):
        yield Sample("cast", (T(source, (n, 3), 0 if target == "u8" else -3, 3),), {"dtype": target}, THREE)
    yield Sample("store", (T("f32", (n, 3)),), {"dtype": "bf16"}, THREE)
    for dtype, count in product(("i64", "u8"), (n * 3, n * 6)):
        yield Sample("divisor", (T(dtype, (n, 3), 1, 5),), {"count": count}, THREE)
    yield Sample("divisor", (T("i32", (3,), 0, 0),), {"count": n - n}, THREE)


def create_samples() -> Iterator[Sample]:
    for dtype, value in (("f32", 1.5), ("bf16", 0.1), ("i64", 7), ("bool", True), ("u8", 3), ("f32", 2)):
        yield Sample("full", (value,), {"shape": (n, 2), "dtype": dtype}, THREE)
    yield Sample("full", (n * 3,), {"shape": (), "dtype": "f32"}, THREE)
    yield Sample("full", (n * 3,), {"shape": (), "dtype": "i64"}, THREE)
    for start, step, dtype in ((0, 1, "i64"), (n, -2, "i32"), (0.5, 0.1, "f32"), (n, 2, "f32"), (n, 0.25, "f64")):
        yield Sample("iota", (), {"count": n, "start": start, "step": step, "dtype": dtype}, THREE)
    yield Sample("random", (T("i64", (), -(2**40), 2**40),), {"shape": (n, 3)}, THREE)


RESHAPES: tuple[tuple[tuple[Size, ...], tuple[Size, ...]], ...] = (
    ((n, 6), (n, 2, 3)), ((n, 2, 3), (n * 6,)), ((n, 2, 3), (n * 2, 3)), ((6, n), (n, 6)), ((6, n), (2, 3, n)),
    ((n, 4, 6), (n, 8, 3)), ((n, 4, 6), (n, 3, 8)), ((1, n, 1, 4), (n, 2, 1, 2)), ((n * m, 3), (n, m, 3)),
    ((n, m, 3), (n, 1, m * 3)), ((n, m), (m, n)), ((), (1, 1)), ((1,), ()), ((0, 3), (5, 0)),
    ((n + 1, 2), (2 * n + 2,)),
    ((2 * n, 3), (n, 2, 3)), ((2 * n, 3, m), (2, 3 * n, m)), ((4 * n, m), ((4 * n) // 4, 4, m)),
    ((6, 4), (3, 8)), ((6, 4), (4, 6)), ((12,), (2, 1, 6)), ((n, n), (n * n,)),
)  # fmt: skip
NM = tuple({"n": a, "m": b} for a, b in ((0, 2), (1, 1), (3, 2), (2, 5), (4, 0)))


def view_samples() -> Iterator[Sample]:
    for source, result in RESHAPES:
        yield Sample("reshape", (T("f32", source),), {"shape": result}, NM)
    for order in ((0, 1, 2), (2, 0, 1), (1, 0, 2), (2, 1, 0)):
        yield Sample("permute", (T("i64", (n, 2, 3)),), {"dims": order}, THREE)
    yield Sample("permute", (T("f32", ()),), {"dims": ()})
    for source, shape in (((n, 1), (n, 4)), ((1,), (n, 3)), ((), (n,)), ((n, 2), (3, n, 2)), ((1, n), (1, n))):
        yield Sample("broadcast", (T("bf16", source),), {"shape": shape}, THREE)
    for start, count, step in ((0, n, 1), (n, n, 1), (1, n, 2), (n, 0, 1), (2 * n, 1, 3)):
        attrs = {"dim": 1, "start": start, "count": count, "step": step}
        yield Sample("slice", (T("f32", (2, 2 * n + 1, 3)),), attrs, THREE)


def index_samples() -> Iterator[Sample]:
    for dims in ((0,), (1,), (0, 2), ()):
        yield Sample("flip", (T("f32", (n, 3, 2)),), {"dims": dims}, THREE)
    for dim, times in ((0, 1), (0, 3), (1, 2), (2, 4)):
        yield Sample("repeat", (T("f32", (n, 3, 2)),), {"dim": dim, "times": times}, THREE)
    for dtype in ("f32", "bf16", "i64", "bool"):
        yield Sample("concat", (T(dtype, (2, n)), T(dtype, (2, 3)), T(dtype, (2, n + 1))), {"dim": 1}, THREE)
        yield Sample("concat", (T(dtype, (0, 2)), T(dtype, (n, 2)), T(dtype, (n, 2))), {"dim": 0}, THREE)
        value = {"f": -math.inf, "i": 7, "b": dtype == "bool" or 0.5}[dtype[0]]
        for low, high in (((1, 0), (0, 2)), ((n, 0), (n, 0)), ((0, -1), (1, 0)), ((0, -1), (0, -1)), ((0, 2), (0, -5))):
            yield Sample("pad", (T(dtype, (n, 3)),), {"low": low, "high": high, "value": value}, THREE)
    yield Sample("concat", (T("f32", (n, 2)),), {"dim": 0}, THREE)
    positive = tuple({"n": a} for a in (1, 5))
    for shape in ((4,), (n, 2), (), (0,)):
        for dim in (0, 1, 2):
            yield Sample("take", (T("f32", (3, 3 + n, 4)), T("i64", shape, 0, 3)), {"dim": dim}, THREE)
    for dim in (0, 1):
        yield Sample("gather", (T("f32", (n + 2, 4)), T("i64", (n, 2), 0, 2)), {"dim": dim}, THREE)
    for dims in ((0, 1), (1, 2), (0, 1, 2), (1,)):
        shapes = ((n, 1), (3,), (1, 1))
        operands = tuple(T("i64", shapes[d], -2, 2) for d in range(len(dims)))
        yield Sample("index", (T("f32", (n + 2, 3, 2)), *operands), {"dims": dims}, positive)
    yield Sample("index", (T("f32", (2, 3, 4)), T("i64", (), 0, 2), T("i64", (), 0, 2)), {"dims": (1, 2)})


    for wrap, low in ((True, -3), (False, 0)):
        yield Sample("checked", (T("i64", (n, 2), low, 3),), {"size": 3, "wrap": wrap}, THREE)


COMBINED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "_add": torch.add, "_mul": torch.mul, "_amax": torch.maximum, "_amin": torch.minimum}


def scatter_samples() -> Iterator[Sample]:
    """Whole numbers, so that sums are exact in every dtype; some places are outside."""
    ends = ("", *COMBINED)
    for name, dtype in product([f"put{end}" for end in ends], ("f32", "bf16", "i64", "bool")):
        for shape in ((4,), (n, 2), (), (0,)):
            for dim in (0, 1, 2):
                x = [3, n + 3, 4]
                y = (*x[:dim], *shape, *x[dim + 1:])
                whole = (T(dtype, y, 1, 1), T("i64", shape, -1, 4))
                yield Sample(name, (T(dtype, tuple(x), 2, 2), *whole), {"dims": (dim,)}, THREE)
        places = (T("i64", (n, 1), -1, 3), T("i64", (3,), 0, 3))
        for dims, y in (((0, 1), (n, 3, 2)), ((1, 2), (2, n, 3))):
            yield Sample(name, (T(dtype, (2, 2, 2), 2, 2), T(dtype, y, 1, 1), *places), {"dims": dims}, THREE)
    for step, dim in product((1, 3), (0, 1)):
        attrs = {"dim": dim, "start": n, "step": step}
        shape = (2, n + 1) if dim else (n + 1, 2)
        whole = (2, 4 * n + 3) if dim else (4 * n + 3, 2)
        yield Sample("overwrite", (T("bf16", whole, 2, 2), T("bf16", shape, 1, 1)), attrs, THREE)
    for name, dtype in product([f"scatter{end}" for end in ends], ("f32", "bf16", "i64", "bool")):
        for dim in (0, 1):
            at = T("i64", (n, 2), -1, 5)
            yield Sample(name, (T(dtype, (n + 1, 4), 2, 2), T(dtype, (n, 2), 1, 1), at), {"dim": dim}, THREE)


SCATTERS = ["overwrite", *(f"{name}{end}" for name in ("put", "scatter") for end in ("", *COMBINED))]


@pytest.mark.parametrize("op", SCATTERS)
def test_scatter_agrees_with_interpreter(op: str) -> None:
    """Every element of the second operand, in order, at the place that the row says."""
    for sample in scatter_samples():
        for symbols in sample.sizes if sample.op == op else ():
            node, found, evaluator = run(sample, symbols)
            into, meeting = OPS[op].into, OPS[op].meeting
            assert into is not None and meeting is not None
            x, y = evaluator.tensors["x"], evaluator.tensors["x_1"]
            expected = x.clone()
            loops = [f"i{d}" for d in range(y.ndim)]
            met: dict[Any, Any] = {}
            for index in product(*(range(size) for size in y.shape)):
                evaluator.symbols.update(zip(loops, index, strict=True))
                place, inside = into(evaluator, node, tuple(symbol(name) for name in loops))
                if inside is None or inside:
                    at = tuple(evaluate(p, evaluator.symbols) for p in place)
                    combine = COMBINED.get(op.removeprefix("scatter").removeprefix("put"), lambda old, new: new)
                    expected[at] = combine(expected[at], y[index])
                    row = tuple(i for d, i in enumerate(index) if d not in meeting(node))
                    assert met.setdefault(at, row) == row, sample  # rows never meet
            assert torch.equal(found, expected), sample


BODIES = [*pointwise_samples(), *create_samples(), *view_samples(), *index_samples()]
BODY_ROWS = sorted({sample.op for sample in BODIES})


@pytest.mark.parametrize("op", BODY_ROWS)
def test_body_agrees_with_interpreter(op: str) -> None:
    for sample in BODIES:
        if sample.op == op:
            try:
                check(sample)
            except BaseException as error:
                error.add_note(str(sample))
                raise


@pytest.mark.parametrize("dtype", [dtype for dtypes in KIND_DTYPES.values() for dtype in dtypes])
def test_pointwise_rows_in_kernels(dtype: str) -> None:
    """Every row on this dtype in one graph, compiled, against the interpreter; two lengths, whole vectors and rests."""
    rows = [row for row in pointwise.POINTWISE.values() if {dtype, kind_of(dtype)} & {*row.kinds}]
    builder = Builder("rows")
    inputs: list[T] = []
    results = []
    for row in rows:
        ranges = [(max(low, 0) if dtype == "u8" else low, high) for low, high in row.ranges or AROUND_0[row.arity]]
        inputs += [T(dtype, (n,), *one) for one in ranges]
        results.append(builder.op(row.name, *(builder.input(f"{row.name}_{k}", TensorType(dtype, (n,)))
                                              for k in range(row.arity))))
    graph = builder.finish(tuple(results))
    compiled = compile_graph(graph, Config())
    assert {step.target for step in compiled.plan.steps if isinstance(step, ExternStep)} == {
        f"anyshape.{row.name}" for row in rows if OPS[row.name].scalars & unsupported()}
    for count in (1, 67):
        given = [draw(one, {"n": count}, seed) for seed, one in enumerate(inputs)]
        wanted, _, _ = interpret(graph, given)
        for row, found, right in zip(rows, compiled.executable(given), wanted, strict=True):
            # functions of torch may be a little off themselves; units of the last place are test_backend_math.py's
            bound = 1e-10 if dtype == "f64" else TOLERANCE.get(dtype, 0)
            torch.testing.assert_close(found, right, rtol=bound, atol=bound, equal_nan=True,
                                       msg=lambda text, name=row.name: f"{name}: {text}")


def test_every_row_is_sampled() -> None:
    with_body = sorted(name for name, row in OPS.items() if row.body is not None)
    assert with_body == BODY_ROWS
    without = {name for name, row in OPS.items() if row.body is None}
    assert without == {"sum", "prod", "amax", "amin", "any", "all", *RUNNING, *RECURRENCES, "matmul", "matmul_add",
                       "convolution",
                       "direct_conv", "extern", "attention", "attention_backward", "grouped", "grouped_conv",
                       "grouped_inner", "matmul_bytes", "conv_bytes", "recurrence", "recurrence_bytes",
                       *ROUTING, *SCATTERS, *COLLECTIVES}


def test_every_scalar_operation_has_a_row() -> None:
    reached = {name for row in OPS.values() for name in row.scalars} | {"random", "cast"}
    assert SCALAR.keys() - reached == {"to_bf16", "to_f16"}  # which a cast to these is


# ---- reductions and products

RUNNING = {"cumsum": lambda line: list(accumulate(line)), "cumprod": lambda line: list(accumulate(line, operator.mul))}
RECURRENCES = {"linear_scan"}
COMBINE = {"sum": sum, "prod": math.prod, "amax": max, "amin": min, "any": any, "all": all}


@pytest.mark.parametrize("op", sorted(COMBINE))
def test_reduction(op: str) -> None:
    assert OPS[op].combine in ("add", "mul", "maximum", "minimum", "or", "and")
    sizes = THREE[1:] if op in ("amax", "amin") else THREE  # the extreme of nothing is an error in PyTorch too
    for dtype in ("bool",) if op in ("any", "all") else ("f32", "bf16", "i64", "i32", "u8"):
        for dims, keep in product(((0,), (1,), (2,), (0, 2), (0, 1, 2)), (False, True)):
            low = 0 if dtype == "u8" else -2
            sample = Sample(op, (T(dtype, (2, n, 3), low, 3),), {"dims": dims, "keep": keep}, sizes)
            for symbols in sizes:
                _, found, evaluator = run(sample, symbols)
                x = evaluator.tensors["x"]
                expected = x.new_empty([1 if d in dims else size for d, size in enumerate(x.shape)])
                for place in product(*(range(size) for size in expected.shape)):
                    part = x[tuple(slice(None) if d in dims else i for d, i in enumerate(place))]
                    expected[place] = COMBINE[op](part.flatten().tolist())
                if not keep:
                    expected = expected.reshape([size for d, size in enumerate(x.shape) if d not in dims])
                bound = TOLERANCE.get(dtype, 0)
                torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("op", sorted(RUNNING))
def test_scan(op: str) -> None:
    assert OPS[op].combine in ("add", "mul")
    for dtype, dim, symbols in product(("f32", "bf16", "i64", "u8"), (0, 1, 2), THREE):
        sample = Sample(op, (T(dtype, (2, n, 3), 0 if dtype == "u8" else -2, 3),), {"dim": dim}, THREE)
        _, found, evaluator = run(sample, symbols)
        lines = evaluator.tensors["x"].movedim(dim, -1)
        expected = torch.empty(lines.shape, dtype=lines.dtype)
        for place in product(*map(range, lines.shape[:-1])):
            expected[place] = torch.tensor(RUNNING[op](lines[place].tolist()), dtype=lines.dtype)
        bound = TOLERANCE.get(dtype, 0)
        torch.testing.assert_close(found, expected.movedim(-1, dim), rtol=bound, atol=bound)


def test_linear_scan() -> None:
    for dtype, dim, symbols in product(("f32", "bf16", "f64"), (0, 1, 2), THREE):
        sample = Sample("linear_scan", (T(dtype, (2, n, 3)), T(dtype, (2, n, 3))), {"dim": dim}, THREE)
        _, found, evaluator = run(sample, symbols)
        a, b = (evaluator.tensors[name].movedim(dim, -1) for name in ("x", "x_1"))
        expected = torch.empty(b.shape, dtype=b.dtype)
        for place in product(*map(range, b.shape[:-1])):
            steps = zip(a[place].tolist(), b[place].tolist(), strict=True)
            line = accumulate(steps, lambda before, step: (0.0, step[0] * before[1] + step[1]))
            expected[place] = torch.tensor([h for _, h in line], dtype=b.dtype)
        bound = TOLERANCE.get(dtype, 0)
        torch.testing.assert_close(found, expected.movedim(-1, dim), rtol=bound, atol=bound)
    for given, words in (((T("i64", (4,)), T("i64", (4,))), "floats"), ((T("f32", (4,)), T("f32", (5,))), "shape")):
        with pytest.raises(VerifyError, match=words):
            build(Sample("linear_scan", given, {"dim": 0}))


def test_matmul() -> None:
    for dtype, batch, symbols in product(("f32", "bf16", "i64"), ((), (2,), (2, n)), THREE):
        sample = Sample("matmul", (T(dtype, (*batch, n, 4)), T(dtype, (*batch, 4, 3))), {}, THREE)
        _, found, evaluator = run(sample, symbols)
        a, b = evaluator.tensors["x"].double(), evaluator.tensors["x_1"].double()
        expected = (a[..., :, :, None] * b[..., None, :, :]).sum(-2).to(found.dtype)
        bound = TOLERANCE.get(dtype, 0)
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


def test_products_of_bytes_wrap_around_and_take_u8_by_i8() -> None:
    for batch, symbols in product(((), (2,), (2, n)), THREE):
        sample = Sample("matmul_bytes", (T("u8", (*batch, n, 40)), T("i8", (*batch, 40, 3))), {}, THREE)
        _, found, evaluator = run(sample, symbols)
        a, b = evaluator.tensors["x"].long(), evaluator.tensors["x_1"].long()
        assert found.dtype == torch.int32 and torch.equal(found, (a @ b).int())
    for given in (("i8", "i8"), ("u8", "u8"), ("i8", "u8"), ("f32", "f32")):
        with pytest.raises(VerifyError, match="u8"):
            build(Sample("matmul_bytes", tuple(T(dtype, (4, 4)) for dtype in given)))


def test_products_and_convolutions_of_bytes_in_panels() -> None:
    """Panels that do not go with the operand are refused: what they hold is read without further questions."""
    settings = {"kernel": (3, 2), "stride": (2, 1), "dilation": (1, 2)}
    given = T("u8", (n, 7, 9, 5))
    for columns, symbols in product((1, 40), THREE):
        _, found, evaluator = run(Sample("conv_bytes", (given, T("i8", panels_of(30, columns, "i8"))),
                                         {**settings, "columns": columns}, THREE), symbols)
        x, w = (evaluator.tensors[name].numpy() for name in ("x", "x_1"))
        weights = from_panels(w, 30, columns).astype(numpy.int64).reshape(3, 2, 5, columns)
        windows = numpy.lib.stride_tricks.sliding_window_view(x, (3, 3), (1, 2))[:, ::2, :, :, :, ::2]
        wanted = numpy.einsum("nyxckl,klco->nyxo", windows.astype(numpy.int64), weights)
        numpy.testing.assert_array_equal(found.numpy(), wanted)
    for name, a, b, more in (
            ("matmul_bytes", (n, 30), (1, 8, 32, 4), {"columns": 33}),
            ("matmul_bytes", (n, 33), (1, 8, 32, 4), {"columns": 3}),
            ("matmul_bytes", (n, n), (1, 8, 32, 4), {"columns": 3}),
            ("conv_bytes", (1, n, n, 4), (1, 6, 32, 4), {**settings, "columns": 33}),
            ("conv_bytes", (1, n, n, 5), (1, 6, 32, 4), {**settings, "columns": 3})):
        with pytest.raises(VerifyError, match="panels"):
            build(Sample(name, (T("u8", a), T("i8", b)), more))


def test_matmul_with_an_addend_is_rounded_once() -> None:
    x, y, c = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((2, 3, 70), (2, 70, 5), (2, 3, 5)))
    found = one("matmul_add", [x, y, c], alpha=0.3, beta=-2.0)
    assert torch.equal(found, (0.3 * (x.float() @ y.float()) - 2 * c.float()).bfloat16())
    nan = torch.full_like(c, math.nan)
    assert torch.equal(one("matmul_add", [x, y, nan], alpha=1.0, beta=0.0), (x.float() @ y.float()).bfloat16())


# ---- the interpreter against torch, where the two are written differently


def one(op: str, inputs: list[torch.Tensor], *more: Any, **attrs: Any) -> torch.Tensor:
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    builder = Builder("one")
    values = [builder.input("x", TensorType(names[t.dtype], tuple(t.shape))) for t in inputs]
    outputs, _, _ = interpret(builder.finish((builder.op(op, *values, *more, **attrs),)), inputs)
    return outputs[0]


def test_interpreter_is_torch() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 5)
    index = torch.tensor([3, 0, 3])
    pairs = [
        (one("take", [x, index], dim=1), torch.index_select(x, 1, index)),
        (one("take", [x, index[None]], dim=0), torch.nn.functional.embedding(index[None], x)),
        (one("gather", [x, torch.tensor([[1, 2], [0, 4]])], dim=1), torch.gather(x, 1, torch.tensor([[1, 2], [0, 4]]))),
        (one("index", [x, index, index], dims=(0, 1)), x[index, index]),
        (one("put", [x, x[:3], index], dims=(0,)), x.index_put((index,), x[:3])),
        (one("put_add", [x, x[:3], index], dims=(0,)), x.index_add(0, index, x[:3])),
        (one("scatter_add", [x, x, (x > 0).long()], dim=1), x.scatter_add(1, (x > 0).long(), x)),
        (one("pad", [x], low=(1, -2), high=(0, 3), value=9.0), torch.nn.functional.pad(x, (-2, 3, 1, 0), value=9.0)),
        (one("iota", [], count=7, start=1.5, step=0.3, dtype="f32"), torch.arange(1.5, 3.4, 0.3)),
        (one("slice", [x], dim=1, start=1, count=2, step=3), x[:, 1::3]),
        (one("add", [x.bfloat16()], 0.1), x.bfloat16() + 0.1),
        (one("eq", [torch.tensor([0.1]).bfloat16()], 0.1), torch.tensor([0.1]).bfloat16() == 0.1),
        (one("sub", [x], x.bfloat16().float()[0, 0].item()), x - x.bfloat16()[0, 0].item()),
        (one("remainder", [x], -0.7), torch.remainder(x, -0.7)),
        (one("prod", [x], dims=(0, 1), keep=False), x.prod()),
        (one("sum", [x.to(torch.int8)], dims=(1,), keep=True), x.to(torch.int8).sum(1, True, dtype=torch.int8)),
    ]
    for found, expected in pairs:
        torch.testing.assert_close(found, expected)


def test_rounded_literals() -> None:
    for value in (0.1, -3.3, 1e30, 1e39, 65504.0, 65519.9, 65520.0, 1e-7, 6e-8, 0.0, math.inf):
        for dtype in ("bf16", "f16", "f32"):
            expected = value if dtype == "f32" else torch.tensor(value, dtype=torch.float64).to(TORCH_DTYPES[dtype])
            assert pointwise.rounded(value, dtype) == float(expected), (value, dtype)


def test_random_known_answer() -> None:
    # the first numbers of SplitMix64 with state 0, and mix(0) is 0
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert uniform(torch.tensor(0), torch.arange(3)).tolist() == [(k >> 40) * 2.0**-24 for k in known]
    sample = uniform(torch.tensor(1234), torch.arange(100_000))
    assert float(sample.min()) >= 0 and float(sample.max()) < 1
    assert abs(float(sample.mean()) - 0.5) < 5e-3 and abs(float(sample.var()) - 1 / 12) < 2e-3
    assert not torch.equal(sample, uniform(torch.tensor(1235), torch.arange(100_000)))


def test_out_of_range_index_raises() -> None:
    for bad in (3, -4):
        with pytest.raises(IndexError):
            one("take", [torch.randn(3), torch.tensor([bad])], dim=0)


# ---- views as strides


def strided(sample: Sample, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor | None:
    """The result of a view node as a window of a storage that holds 0, 1, 2, ...; None when the row says None."""
    _, node = build(sample)
    window = OPS[sample.op].strided(shape, strides, 5, node)  # type: ignore[misc]
    if window is None:
        return None
    result_shape = [int(str(size)) for size in node.output.tensor.shape]
    return torch.arange(10_000).as_strided(result_shape, [int(str(s)) for s in window[0]], int(str(window[1])))


def test_strided_views_of_numbers() -> None:
    generator = random.Random(0)
    as_window = 0
    for _ in range(300):
        shape = tuple(generator.choice((0, 1, 2, 3, 4, 6)) for _ in range(generator.randint(1, 4)))
        order = list(range(len(shape)))
        generator.shuffle(order)
        dense = dense_strides(tuple(shape[d] for d in order))
        strides = tuple(int(str(dense[order.index(d)])) * generator.choice((1, 1, 2)) for d in range(len(shape)))
        source = torch.arange(10_000).as_strided(shape, strides, 5)
        factors = [f for size in shape for f in ((2, 3) if size == 6 else (2, 2) if size == 4 else (size,))]
        while len(factors) > 1 and generator.random() < 0.6:
            at = generator.randrange(len(factors) - 1)
            factors[at:at + 2] = [factors[at] * factors[at + 1]]
        found = strided(Sample("reshape", (T("i64", shape),), {"shape": tuple(factors)}), shape, strides)
        if found is not None:
            as_window += 1
            assert torch.equal(found, source.reshape(factors)), (shape, strides, factors)
            assert found.stride() == source.reshape(factors).stride() or 1 in factors or 0 in factors
        dims = list(range(len(shape)))
        generator.shuffle(dims)
        assert torch.equal(strided(Sample("permute", (T("i64", shape),), {"dims": tuple(dims)}), shape, strides),
                           source.permute(dims))
        assert torch.equal(strided(Sample("broadcast", (T("i64", shape),), {"shape": (2, *shape)}), shape, strides),
                           source.expand(2, *shape))
        if shape[0] > 1:
            attrs = {"dim": 0, "start": 1, "count": shape[0] // 2, "step": 2}
            if 1 + (shape[0] // 2 - 1) * 2 < shape[0]:
                assert torch.equal(strided(Sample("slice", (T("i64", shape),), attrs), shape, strides), source[1::2])
    assert as_window > 100


def test_strided_reshape_of_symbols() -> None:
    def window(source: tuple[Size, ...], strides: tuple[Size, ...], result: tuple[Size, ...]) -> Any:
        _, node = build(Sample("reshape", (T("f32", source),), {"shape": result}, NM))
        return OPS["reshape"].strided(source, strides, 0, node)  # type: ignore[misc]

    h = symbol("h")
    assert window((n, m, 64), (64 * m, 64, 1), (n * m, 64)) == ((64, 1), 0)
    assert window((n, m, 64), (64, 64 * n, 1), (n * m, 64)) is None
    assert window((n, 64, m), (64 * m, 1, 64), (n, 4, 16, m)) == ((64 * m, 16, 1, 64), 0)
    assert window((n, 1, m), (m, m, 1), (n, m)) == ((m, 1), 0)
    assert window((n, m * h), (m * h, 1), (n, m, h)) == ((m * h, h, 1), 0)


def test_reshape_stays_affine_where_nothing_is_merged() -> None:
    i, j, k = (symbol(name) for name in "ijk")
    assert reshape_index((n, 6, m), (n, 2, 3, m), (i, j, k, symbol("l"))) == (i, 3 * j + k, symbol("l"))
    assert reshape_index((n, m), (n, 1, m), (i, 0, j)) == (i, j)
    index = reshape_index((n, m, 4), (n, 4 * m), (i, j))
    assert index == (i, j // 4, j - 4 * (j // 4))
    # 4 divides n: the outer and the inner dims pass through all the same
    merged = reshape_index((m, 4 * (n // 4), 3), (m, n, 3), (i, j, k))
    assert merged == (i, j, k)


# ---- what does not fit is refused, and the message names the facts

x32, x64, flags = T("f32", (n, 3)), T("f64", (n, 3)), T("bool", (n, 3))
REFUSED = [
    (Sample("add", (x32, x64)), "dtypes f32 and f64"),
    (Sample("add", (x32, T("f32", (m, 3)))), "n is not m in dim 0"),
    (Sample("add", (1, 2)), "no operand is a tensor"),
    (Sample("add", (x32,)), "1 operands were given"),
    (Sample("add", (flags, flags)), "the operands are bool"),
    (Sample("add", (T("i64", (n,)), 0.5)), "literal 0.5 cannot stand for i64"),
    (Sample("add", (x32, 1), {"dim": 0}), "attribute dim is unknown"),
    (Sample("div", (T("i64", (n,)), 2)), "operands are i64"),
    (Sample("nextafter", (T("bf16", (n,)), T("bf16", (n,)))), "defined on f32, f64, and the operands are bf16"),
    (Sample("where", (x32, x32, x32)), "condition is f32"),
    (Sample("where", (flags, 1.0, 2.0)), "dtype is unknown"),
    (Sample("cast", (x32,), {"dtype": "f12"}), "'f12' is no dtype"),
    (Sample("cast", (x32,), {"dtype": "c64"}), "dtype c64 has no kernels"),
    (Sample("full", (0.5,), {"shape": (2,), "dtype": "i64"}), "cannot stand for i64"),
    (Sample("full", (0.5,), {"shape": (-2,), "dtype": "f32"}), "negative size"),
    (Sample("random", (x32,), {"shape": (2,)}), "the seed is"),
    (Sample("reshape", (x32,), {"shape": (n, 4)}), "3\\*n elements, the new shape has 4\\*n"),
    (Sample("permute", (x32,), {"dims": (0,)}), "not all dims"),
    (Sample("permute", (x32,), {"dims": (0, 0)}), "name a dim twice"),
    (Sample("broadcast", (x32,), {"shape": (m, 3)}), "a dim n where the new shape has m"),
    (Sample("slice", (x32,), {"dim": 1, "start": 2, "count": 2, "step": 1}), "the last element, 3"),
    (Sample("slice", (x32,), {"dim": 2, "start": 0, "count": 1, "step": 1}), "no dim 2 in rank 2"),
    (Sample("repeat", (x32,), {"dim": 1, "times": 0}), "not a positive number"),
    (Sample("concat", (x32, T("f32", (n, 4))), {"dim": 0}), "differ outside dim 0"),
    (Sample("pad", (x32,), {"low": (0, -4), "high": (0, 0), "value": 0.0}), "take more than there is"),
    (Sample("take", (x32, T("i32", (2,))), {"dim": 0}), "indices are i64"),
    (Sample("gather", (x32, T("i64", (n, 4))), {"dim": 0}), "larger than .* in dim 1"),
    (Sample("index", (x32, T("i64", (2,))), {"dims": (0, 1)}), "not 1 consecutive"),
    (Sample("sum", (x32,), {"dims": (), "keep": False}), "at least one dim"),
    (Sample("sum", (x32,), {"dims": (1, 0), "keep": False}), "sorted"),
    (Sample("any", (x32,), {"dims": (0,), "keep": False}), "the operand is f32"),
    (Sample("matmul", (x32, T("f32", (4, 2)))), "has 3 columns"),
    (Sample("grouped", (x32, T("f32", (2, 4, 5)), T("i32", (2,)))), "has 4 rows"),
    (Sample("grouped", (x32, T("f32", (2, 3, 5)), T("i32", (m,)))), "m.* for 2 groups"),
    (Sample("grouped_inner", (T("f32", (3, n)), T("f32", (n, 2)), T("f32", (2,)))), "no ends of groups"),
    (Sample("topk", (x32,), {"k": 4}), "less than 4 elements"),
    (Sample("topk", (x32,), {"k": 0}), "not a positive number"),
    (Sample("topk", (flags,), {"k": 1}), "no lines of numbers"),
    (Sample("route_plan", (T("i32", (n, 2)),), {"branches": 3}), "no ids of branches"),
    (Sample("route_plan", (T("i64", (n, 2)),), {"branches": n}), "not a positive number"),
    (Sample("segment_ids", (T("f32", (3,)),), {"size": n}), "no ends of groups"),
    (Sample("extern", (), {"target": "t", "template": (("args", ("operand", 0)), ("kwargs",)), "effect": False}),
     "names operand 0 of 0"),
]


@pytest.mark.parametrize(("sample", "fact"), REFUSED, ids=str)
def test_refused(sample: Sample, fact: str) -> None:
    with pytest.raises(VerifyError, match=fact):
        build(sample)


# ---- extern calls


def test_extern_templates() -> None:
    x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    pair = ("list", ("int", 1), ("operand", 2))
    template = (("args", ("operand", 0), ("operand", 1), ("none",), pair, pair, ("list", ("int", 1), ("int", 1)),
                 ("bool", False), ("list", ("int", 0), ("int", 0)), ("int", 1)), ("kwargs",))
    found = call_extern("aten.convolution.default", template, [x, weight, 1])
    torch.testing.assert_close(found, torch.conv2d(x, weight, None, 1, 1))
    assert compile_extern("aten.convolution.default", template) is compile_extern("aten.convolution.default", template)
    template = (("args", ("list", ("operand", 0), ("int", 3)), ("float", math.inf)),
                ("kwargs", ("dtype", ("dtype", "bf16")), ("device", ("device", "cpu")),
                 ("layout", ("layout", "strided")), ("pin_memory", ("none",))))
    found = call_extern("aten.full.default", template, [2])
    assert found.shape == (2, 3) and found.dtype == torch.bfloat16 and bool(found.isinf().all())
    template = (("args", ("operand", 0)), ("kwargs", ("memory_format", ("memory_format", "channels_last"))))
    found = call_extern("aten.clone.default", template, [x])
    assert found.is_contiguous(memory_format=torch.channels_last)
    template = (("args", ("operand", 0), ("operand", 1)), ("kwargs", ("rounding_mode", ("str", "floor"))))
    assert call_extern("aten.div.Tensor_mode", template, [torch.tensor([-1.0]), torch.tensor([2.0])]).item() == -1
    with pytest.raises(VerifyError, match=r"no operator aten\.nothing"):
        compile_extern("aten.nothing.default", template)


def test_extern_in_a_graph_binds_sizes_and_drops_absent_results() -> None:
    builder = Builder("extern")
    x = builder.input("x", TensorType("f32", (n, 4)))
    found = symbol("u0")
    template = (("args", ("operand", 0)), ("kwargs",))
    (places,) = builder.multi("extern", x, types=(TensorType("i64", (found, 2), (1, found)),),
                              target="aten.nonzero.default", template=template, effect=False)
    total = builder.op("sum", places, dims=(0,), keep=False)
    scaled = builder.op("mul", total, found)
    template = (("args", ("operand", 0), ("operand", 0), ("list", ("int", 4)), ("operand", 1), ("operand", 2),
                 ("none",), ("none",), ("list", ("bool", True), ("bool", False), ("bool", False))), ("kwargs",))
    statistics = TensorType("f32", (n, 1))
    mean, scale = (builder.input(name, statistics) for name in ("mean", "scale"))
    (gradient,) = builder.multi("extern", x, mean, scale, types=(TensorType("f32", (n, 4)),),
                                target="aten.native_layer_norm_backward.default", template=template, effect=False)
    given = torch.tensor([[0.0, 1, 0, 2], [3, 0, 0, 4.0]])
    _, a, b = torch.native_layer_norm(given, [4], None, None, 1e-5)
    outputs, _, env = interpret(builder.finish((scaled, found, gradient)), [given, a, b])
    assert env["u0"] == 4 and outputs[1] == 4
    assert outputs[0].tolist() == [2 * 4, (1 + 3 + 0 + 3) * 4]
    assert outputs[2].shape == (2, 4)


# ---- whole graphs


def test_outputs_writes_and_saved_values() -> None:
    builder = Builder("whole")
    x = builder.input("x", TensorType("f32", (n, 3)))
    counter = builder.input("counter", TensorType("f32", (3,)))
    size = builder.input("k", SizeType())
    turned = builder.op("permute", x, dims=(1, 0))
    row = builder.op("broadcast", counter, shape=(2, 3))
    bigger = builder.op("add", counter, symbol("k"))
    graph = builder.finish((turned, row, counter, None, n * 2, size, turned, turned),
                           output_strides=((1, 3), (0, 1), None, None, None, None, None, (1, 3)),
                           writes=((counter, bigger),), saved=(counter, turned, symbol("k")))
    given, state = torch.randn(4, 3), torch.zeros(3)
    outputs, saved, env = interpret(graph, [given, state, 7])
    assert torch.equal(outputs[0], given.T) and outputs[0].stride() == (1, 3)
    assert outputs[0].untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
    assert outputs[1].stride() == (0, 1) and outputs[1].tolist() == [[0, 0, 0]] * 2  # as before the write
    assert outputs[2] is state and state.tolist() == [7, 7, 7]
    assert outputs[3:6] == [None, 8, 7]
    assert outputs[6].is_contiguous() and outputs[7] is outputs[0]
    assert saved[0].tolist() == [0, 0, 0] and torch.equal(saved[1], given.T) and saved[2] == 7
    assert env["n"] == 4 and torch.equal(env[turned.name], given.T)


def test_restored_values_follow_the_inputs() -> None:
    builder = Builder("backward")
    gradient = builder.input("gradient", TensorType("f32", (n,)))
    kept = Value("kept", TensorType("f32", (n,)))
    graph = builder.finish((builder.op("mul", gradient, kept),), restored=(kept,))
    outputs, _, _ = interpret(graph, [torch.tensor([2.0]), torch.tensor([3.0])])
    assert outputs[0].tolist() == [6]


def test_wrong_inputs_and_wrong_types_are_named() -> None:
    builder = Builder("wrong")
    x = builder.input("x", TensorType("f32", (n, n)))
    graph = builder.finish((builder.op("neg", x),))
    with pytest.raises(InputError, match="1 inputs, 2 were given"):
        interpret(graph, [torch.zeros(2, 2), 3])
    with pytest.raises(InputError, match="it is f64"):
        interpret(graph, [torch.zeros(2, 2, dtype=torch.float64)])
    with pytest.raises(InputError, match="is \\[2, 2\\] here"):
        interpret(graph, [torch.zeros(2, 3)])
    builder.where = "model.py:7"
    template = (("args", ("operand", 0)), ("kwargs",))
    builder.multi("extern", x, types=(TensorType("f32", (n,)),), target="aten.neg.default", template=template,
                  effect=False)
    with pytest.raises(VerifyError, match=r"model\.py:7"):
        interpret(builder.finish(()), [torch.zeros(2, 2)])
    builder = Builder("unbound")
    result = builder.op("full", 0, shape=(m,), dtype="f32")
    with pytest.raises(VerifyError, match="binds the symbol 'm'"):
        interpret(builder.finish((result,)), [])


def test_what_stands_under_a_root_has_to_be_at_least_0() -> None:
    builder = Builder("roots", Facts((("n", 0, None),)))
    n = symbol("n")
    x = builder.input("x", TensorType((n,), "f32"))
    y = builder.op("full", 1.0, shape=(2 * root(n - 1), root(n)), dtype="f32")
    assert uncertain_sizes(builder.finish((x, y))) == (n - 1,)
