"""ATen graphs to the IR: every translation against PyTorch at two sizes, whole networks forward and backward."""
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn import functional as F

from anyshape.base.config import Config
from anyshape.base.errors import Unsupported
from anyshape.frontend.capture.dynamo_backend import compile_fx
from anyshape.frontend.importer.fx_to_graph import Notes, to_graph
from anyshape.frontend.programs.session import Compilation, ProgramRequest
from anyshape.frontend.symbols.symint import SymIntImporter
from anyshape.ir.graph import Graph
from anyshape.ir.show import show
from anyshape.ops.pointwise import POINTWISE
from anyshape.runtime.memory.tape import Tape
from anyshape.runtime.torch_ops.reference_interpreter import interpret, torch_function
from anyshape.sym.expr import evaluate

A = torch.ops.aten
INFINITY = float("inf")
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 4e-2}


# ---- operands, as functions of two sizes


def x(m: int, n: int) -> torch.Tensor:
    return torch.linspace(-2.3, 2.1, m * n).reshape(m, n).sin() * 2


def y(m: int, n: int) -> torch.Tensor:
    return torch.linspace(0.4, 5.9, m * n).reshape(m, n).cos() * 1.5 + 0.01


def p(m: int, n: int) -> torch.Tensor:
    return x(m, n).sigmoid() * 0.8 + 0.1


def h(m: int, n: int) -> torch.Tensor:
    return x(m, n).bfloat16()


def i(m: int, n: int) -> torch.Tensor:
    return torch.arange(m * n).reshape(m, n) * 7 % 19 - 9


def j(m: int, n: int) -> torch.Tensor:
    return torch.arange(m * n).reshape(m, n) * 5 % 8 + 1


def b(m: int, n: int) -> torch.Tensor:
    return x(m, n) > 0.1


def c(m: int, n: int) -> torch.Tensor:
    return y(m, n) > 0.1


def z(m: int, n: int) -> torch.Tensor:
    return torch.linspace(-3, 3, m * 6 * n).reshape(m, 6, n).sin()


def row(m: int, n: int) -> torch.Tensor:
    return x(m, n)[0].clone()


def scalar(m: int, n: int) -> torch.Tensor:
    return torch.tensor(2.5, dtype=torch.float64)


def places(m: int, n: int) -> torch.Tensor:
    """Positions below 3, of 2 rows and 4 columns."""
    return torch.tensor([[0, 2, 1, 1], [2, 2, 0, 1]])


def one_each(m: int, n: int) -> torch.Tensor:
    """One column for each of m rows."""
    return (torch.arange(m) * 3 % n).reshape(m, 1)


def targets(m: int, n: int) -> torch.Tensor:
    found = torch.arange(m) % n
    found[1] = -100
    return found


def log_p(m: int, n: int) -> torch.Tensor:
    return x(m, n).log_softmax(-1)


def six(m: int, n: int) -> torch.Tensor:
    return torch.linspace(-1, 1.5, 6)


def image(m: int, n: int) -> torch.Tensor:
    return torch.linspace(-9, 9, 6 * m * n).reshape(2, 3, m, n).sin()


def broken(m: int, n: int) -> torch.Tensor:
    """An image with a NaN and infinities."""
    found = image(m, n)
    found[0, 1, 2, 3], found[1, 2, 0, 0], found[1, 2, :, 3:] = math.nan, INFINITY, -INFINITY
    return found


def w(m: int, n: int) -> torch.Tensor:
    return torch.linspace(-1, 1, n * 4).reshape(n, 4)


Case = tuple[str, Callable[..., Any], tuple[Callable[[int, int], torch.Tensor], ...]]
CASES: list[Case] = []


def case(name: str, function: Callable[..., Any], *operands: Callable[[int, int], torch.Tensor]) -> None:
    CASES.append((name, function, operands))


UNARY = ("exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan tanh sigmoid erf erfc asin acos atan "
         "sinh cosh asinh atanh lgamma digamma erfinv floor ceil trunc round neg abs sign isnan isinf isfinite signbit "
         "square frac nan_to_num logical_not relu relu6 silu gelu mish hardsigmoid hardswish softplus elu leaky_relu "
         "hardtanh log_sigmoid_forward")
for _name in UNARY.split():  # noqa: SIM905
    case(_name, getattr(A, _name).default, p)
for _name in ("silu", "gelu", "exp", "softplus", "round"):
    case(f"{_name} bf16", getattr(A, _name).default, h)
for _name in ("exp", "neg", "abs", "sign", "floor", "isnan", "square", "logical_not", "relu", "signbit", "sigmoid",
              "isfinite", "bitwise_not"):
    case(f"{_name} int", getattr(A, _name).default, i)
for _name in ("exp", "logical_not", "sign", "sigmoid", "bitwise_not"):
    case(f"{_name} bool", getattr(A, _name).default, b)
case("acosh", lambda v: A.acosh.default(v + 1), p)

BINARY = {"add": "Tensor", "sub": "Tensor", "mul": "Tensor", "div": "Tensor", "eq": "Tensor", "ne": "Tensor",
          "lt": "Tensor", "le": "Tensor", "gt": "Tensor", "ge": "Tensor", "fmod": "Tensor", "remainder": "Tensor",
          "maximum": "default", "minimum": "default", "atan2": "default", "hypot": "default", "copysign": "Tensor",
          "nextafter": "default", "fmax": "default", "fmin": "default", "logaddexp": "default",
          "floor_divide": "default"}
for _name, _overload in BINARY.items():
    _op = getattr(getattr(A, _name), _overload)
    case(_name, _op, x, y)
    case(f"{_name} row", _op, x, lambda m, n: row(m, n) + 0.3)
    if _name != "nextafter":
        case(f"{_name} bf16 and f32", _op, h, y)
        case(f"{_name} f32 and rank-0 f64", _op, x, scalar)
    if _name in ("add", "sub", "mul", "div", "maximum", "fmod", "remainder", "eq", "lt", "floor_divide", "fmax"):
        case(f"{_name} int", _op, i, j)
        case(f"{_name} int and f32", _op, i, p)
    if _name in ("add", "mul", "maximum", "minimum", "eq"):
        case(f"{_name} bool", _op, b, c)
        case(f"{_name} bool and int", _op, b, i)
for _name, _number in {"add": 2.5, "sub": 3, "mul": 2, "div": 3, "eq": 1, "lt": 0.5, "remainder": 3,
                       "fmod": 2.5}.items():
    for _operand in (x, h, i):
        case(f"{_name} number {_operand.__name__}",
             functools.partial(lambda op, number, v: op(v, number), getattr(A, _name).Scalar, _number), _operand)
for _row in POINTWISE.values():  # those whose operators have no translation of their own
    if {"float", "f32"} & {*_row.kinds} and _row.torch and _row.name not in {name for name, _, _ in CASES}:
        case(f"row {_row.name}", torch_function(_row.torch), *(p, y, x)[:_row.arity])
for _exponent in (0, 1, 2, 3, 4, 0.5, -0.5, -1, -2, 2.7, -3):
    case(f"pow {_exponent}", functools.partial(lambda e, v: A.pow.Tensor_Scalar(v, e), _exponent), p)
for _exponent in (2, 3, 5):
    case(f"pow int {_exponent}", functools.partial(lambda e, v: A.pow.Tensor_Scalar(v, e), _exponent), i)
case("pow int 0.5", lambda v: A.pow.Tensor_Scalar(v, 0.5), j)
case("pow number", lambda v: A.pow.Scalar(2.0, v), x)
case("pow tensors", A.pow.Tensor_Tensor, p, y)
case("add alpha", lambda u, v: A.add.Tensor(u, v, alpha=2.5), x, y)
case("sub alpha int", lambda u, v: A.sub.Tensor(u, v, alpha=2), i, j)
case("rsub", lambda v: A.rsub.Scalar(v, 1, 2), i)
for _mode in ("floor", "trunc", None):
    case(f"div {_mode}", functools.partial(lambda mode, u, v: A.div.Tensor_mode(u, v, rounding_mode=mode), _mode), x, y)
    case(f"div int {_mode}", functools.partial(lambda mode, u, v: A.div.Tensor_mode(u, v, rounding_mode=mode), _mode),
         i, j)
for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    case(_name, getattr(A, _name).Tensor, i, j)
    case(f"{_name} bool", getattr(A, _name).Tensor, b, c)
for _name in ("logical_and", "logical_or", "logical_xor"):
    case(_name, getattr(A, _name).default, x, i)
case("shift left", A.bitwise_left_shift.Tensor, j, j)
case("shift right", A.bitwise_right_shift.Tensor, i, j)
case("where", A.where.self, b, x, y)
case("where promotes", A.where.self, b, i, x)
case("where rank 0", A.where.self, b, x, scalar)
case("where numbers", lambda u: torch.where(u, 1.0, 2), b)
case("masked_fill", lambda u, v: A.masked_fill.Scalar(u, v, -INFINITY), x, b)
case("masked_fill int", lambda u, v: A.masked_fill.Scalar(u, v, 3), i, b)
case("masked_fill tensor", A.masked_fill.Tensor, x, b, scalar)
case("clamp", lambda v: A.clamp.default(v, -0.5, 0.5), x)
case("clamp int by float", lambda v: A.clamp.default(v, -2.5, 3), i)
case("clamp tensors", lambda v, r: A.clamp.Tensor(v, r - 1, r), x, row)
case("clamp_min", lambda v: A.clamp_min.default(v, 0.1), h)
case("addcmul", lambda u, v, q: A.addcmul.default(u, v, q, value=0.3), x, y, p)
case("addcdiv", lambda u, v, q: A.addcdiv.default(u, v, q, value=0.3), x, y, p)
case("lerp low", lambda u, v: A.lerp.Scalar(u, v, 0.3), x, y)
case("lerp high", lambda u, v: A.lerp.Scalar(u, v, 0.7), x, y)
case("lerp tensor", A.lerp.Tensor, x, y, p)
case("xlogy", A.xlogy.Tensor, x, p)
case("xlogy number", lambda v: A.xlogy.Scalar_Self(2.0, v), p)
case("heaviside", A.heaviside.default, x, y)
case("cast to int", lambda v: v.to(torch.int32), x)
case("cast to bool", lambda v: v.to(torch.bool), i)
for _name, _more in {
    "threshold_backward": (0.1,), "leaky_relu_backward": (0.1, False), "hardtanh_backward": (-0.5, 0.5),
    "softplus_backward": (1.0, 20.0), "silu_backward": (), "gelu_backward": (), "sigmoid_backward": (),
    "tanh_backward": (), "native_dropout_backward": (2.0,),
}.items():
    _function = functools.partial(lambda op, more, g, v: op(g, v, *more), getattr(A, _name).default, _more)
    case(_name, _function, x, b if _name == "native_dropout_backward" else y)
    case(f"{_name} bf16", _function, h, b if _name == "native_dropout_backward" else lambda m, n: y(m, n).bfloat16())
case("gelu tanh", lambda v: A.gelu.default(v, approximate="tanh"), x)
case("gelu tanh backward", lambda g, v: A.gelu_backward.default(g, v, approximate="tanh"), x, y)
case("elu scaled", lambda v: A.elu.default(v, 1.5, 2.0, 0.5), x)
case("glu", lambda v: A.glu.default(v, 1), z)

case("zeros", lambda v: A.zeros.default([v.shape[0], 3], dtype=torch.int64), x)
case("full", lambda v: A.full.default([v.shape[0]], 2.5), x)
case("full of a size", lambda v: A.full.default([3], v.shape[0]), x)
case("ones_like", A.ones_like.default, i)
case("full_like bool", lambda v: A.full_like.default(v, 1), b)
case("new_full", lambda v: A.new_full.default(v, [v.shape[1], 2], 3), i)
case("fill", lambda v: A.fill.Scalar(v, 7), h)
case("arange", lambda v: A.arange.start_step(0, v.shape[0] * 3, 3), x)
case("arange from a size", lambda v: A.arange.start(v.shape[0], v.shape[0] + v.shape[1]), x)
case("arange fractions", lambda v: A.arange.start_step(0.5, 4, 0.3) + v.sum(), x)
case("arange f32", lambda v: A.arange.default(v.shape[0], dtype=torch.float32), x)
case("scalar_tensor", lambda v: A.scalar_tensor.default(v.shape[0]), x)
case("copy", A.copy.default, x, lambda m, n: h(m, n)[0])
case("empty_like", lambda v: A.mul.Tensor(A.empty_like.default(v), 0), i)
case("float arithmetic on sizes", lambda v: v * v.shape[1] ** -0.5 + v / (v.shape[0] / 2.0) + 1.0 / v.shape[1], x)
case("item of a float", lambda v: v * v.sum().item(), x)
case("rounded sizes", lambda v: A.zeros.default([torch.sym_int(v.shape[0] * 2.0), torch.sym_int(v.shape[1] / 2)]), x)
case("rounded up sizes", lambda v: A.zeros.default([-(-v.shape[1] // 2), math.ceil(v.shape[0] / 3)]), x)
case("larger size", lambda v: A.zeros.default([torch.sym_max(v.shape[0], v.shape[1])]), x)

case("view", lambda v: A.view.default(v, [v.shape[0] * v.shape[1], -1]), z)
case("view split", lambda v: A.view.default(v, [v.shape[0], 2, 3, -1]), z)
case("unflatten", lambda v: v.unflatten(1, (2, 3)) + 0, z)
case("transpose", lambda v: A.transpose.int(v, 0, -1) * 2, z)
case("permute", lambda v: A.permute.default(v, [2, 0, -2]) * 2, z)
case("movedim", lambda v: A.movedim.int(v, 0, 2) * 2, z)
case("expand", lambda v: A.expand.default(A.unsqueeze.default(v, 1), [-1, 3, -1, -1]) * 2, z)
case("select", lambda v: A.select.int(v, 1, -1) + 1, z)
case("select of symbolic", lambda v: A.select.int(v, -1, -2) + 1, z)
case("slice", lambda v: A.slice.Tensor(v, 1, 1, -1) + 1, z)
case("slice from the end", lambda v: A.slice.Tensor(v, 2, -3, 9223372036854775807) + 1, z)
case("slice by 2", lambda v: A.slice.Tensor(v, 1, 1, None, 2) + 1, z)
case("slice at a size", lambda v, u: A.slice.Tensor(v, 2, u.shape[1] - 2, u.shape[1]) + 1, z, x)
case("split", lambda v: [part + 1 for part in A.split.Tensor(v, 4, 1)], z)
case("split with sizes", lambda v: [part + 1 for part in A.split_with_sizes.default(v, [1, 3, 2], 1)], z)
case("unbind", lambda v: [part + 1 for part in A.unbind.int(v, 1)], z)
case("chunk", lambda v: [part + 1 for part in v.chunk(2, 1)], z)
case("squeeze", lambda v: A.squeeze.default(A.sum.dim_IntList(v, [1], True)), z)
case("diagonal", lambda v: A.diagonal.default(v, 1, 0, 2) + 1, z)
case("diagonal below", lambda v: A.diagonal.default(v, -1, 1, 2) + 1, z)
case("narrow", lambda v: v.narrow(1, 2, 3) + 1, z)
case("as_strided", lambda v: A.as_strided.default(v * 2, [v.shape[0] * v.shape[1], v.shape[2]], [v.shape[2], 1]) + 0, z)

case("cat", lambda u, v: A.cat.default([u, v, u], 1), x, y)
case("cat promotes", lambda u, v: A.cat.default([u, v]), x, i)
case("cat with empty", lambda v: A.cat.default([torch.zeros(0), v]), x)
case("stack", lambda u, v: A.stack.default([u, v], -1), x, y)
case("flip", lambda v: A.flip.default(v, [0, -1]), z)
case("roll", lambda v: A.roll.default(v, [2], [1]), z)
case("roll back", lambda v: A.roll.default(v, [-1, 3], [0, 2]), z)
case("roll flat", lambda v: A.roll.default(v, [3]), z)
case("roll by a size", lambda v, u: A.roll.default(v, [u.shape[0]], [1]), z, x)
case("repeat", lambda v: A.repeat.default(v, [2, 1, 3]), x)
case("pad", lambda v: A.constant_pad_nd.default(v, [1, 2, 0, 3], 0.5), z)
case("crop", lambda v: A.constant_pad_nd.default(v, [-1, 2], 0.5), z)
case("slice_backward", lambda g: A.slice_backward.default(g, [g.shape[0], 9, g.shape[2]], 1, 1, 7, 1), z)
case("slice_backward by 2", lambda g: A.slice_backward.default(g, [g.shape[0], 12, g.shape[2]], 1, 1, 12, 2), z)
case("slice_backward by 2, odd", lambda g: A.slice_backward.default(g, [g.shape[0], 11, g.shape[2]], 1, 0, 11, 2), z)
case("select_backward", lambda g, v: A.select_backward.default(g, v.shape, 1, -2), x, z)
case("slice_scatter", lambda v, u: A.slice_scatter.default(v, u[:, :3], 1, 2, 5), z, lambda m, n: -z(m, n))
case("select_scatter", lambda v, u: A.select_scatter.default(v, u, 1, -1), z, x)
case("diagonal_scatter", lambda v, u: A.diagonal_scatter.default(v, u.diagonal(1, 0, 2) * 2, 1, 0, 2), z,
     lambda m, n: -z(m, n))
case("diagonal_scatter below", lambda v: A.diagonal_scatter.default(v, v.diagonal(-1, 1, 0).long(), -1, 1, 0), x)
case("tril", lambda v: A.tril.default(v, -1), z)
case("triu", lambda v: A.triu.default(v, 2), i)
case("embedding", A.embedding.default, x, places)
case("index_select", lambda v, k: A.index_select.default(v, 1, k.flatten()), z, places)
case("gather", lambda v, k: A.gather.default(v, 0, k[:, :3]), x, places)
case("index", lambda v, k: A.index.Tensor(v, [None, k - 3]), z, places)
case("index apart", lambda v, k: A.index.Tensor(v, [k[0], None, k[1]]), z, places)
case("index together", lambda v, k: A.index.Tensor(v, [k[:, :1], k[0]]), z, places)
case("index in order", lambda v: A.index.Tensor(v, [
    A.arange.default(v.shape[0])[:, None, None], None, A.arange.default(v.shape[2])]) + 1, z)
case("index in order, turned", lambda v: A.index.Tensor(v, [
    None, A.arange.default(v.shape[1]), A.arange.default(v.shape[2])[:, None, None]]) + 1, z)
case("index in order, as int32", lambda v: A.index.Tensor(v, [A.arange.default(v.shape[0]).int().long()]) + 1, z)
for _kind in (torch.bool, torch.bfloat16, torch.int8):
    case(f"index through {_kind}", functools.partial(lambda kind, v: A.index.Tensor(A.cat.default([v] * 58), [
        A.arange.default(v.shape[0] * 58).to(kind).long()]) + 1, _kind), z)
case("index in order of a part", lambda v: A.index.Tensor(v, [A.arange.default(v.shape[0] - 1)[:, None]]) + 1, z)
case("index along one diagonal", lambda v: A.index.Tensor(A.cat.default([v, v], 1)[:, :v.shape[0]], [
    A.arange.default(v.shape[0]), A.arange.default(v.shape[0])]) + 1, x)
case("scatter value", lambda v, k: A.scatter.value(v, 1, k, -1.0), x, one_each)
case("scatter source", lambda v, k: A.scatter.src(v, 1, k, k * 0.5), x, one_each)
for _reduction in (0, 1, 2):
    case(f"nll_loss {_reduction}", functools.partial(
        lambda r, v, k: A.nll_loss_forward.default(v, k, None, r, -100), _reduction), log_p, targets)
    case(f"nll_loss weighted {_reduction}", functools.partial(
        lambda r, v, k, u: A.nll_loss_forward.default(v, k, u, r, -100), _reduction), log_p, targets,
        lambda m, n: p(m, n)[0])
    case(f"nll_loss backward {_reduction}", functools.partial(
        lambda r, v, k, u, g: A.nll_loss_backward.default(g if r else v[:, 0], v, k, u, r, -100, g * 3), _reduction),
        log_p, targets, lambda m, n: p(m, n)[0], lambda m, n: torch.tensor(1.7))

for _operand in (x, h, i, b):
    for _name, _op in {"sum": A.sum.dim_IntList, "amax": A.amax.default, "amin": A.amin.default, "any": A.any.dims,
                       "all": A.all.dims}.items():
        case(f"{_name} {_operand.__name__}", functools.partial(lambda op, v: op(v, [1]), _op), _operand)
        case(f"{_name} keep {_operand.__name__}", functools.partial(lambda op, v: op(v, [0], True), _op), _operand)
    for _name in ("sum", "prod", "any", "all"):
        case(f"{_name} all {_operand.__name__}", getattr(A, _name).default, _operand)
for _operand in (x, h):
    for _name, _op in {"mean": A.mean.dim, "var": A.var.correction, "logsumexp": A.logsumexp.default}.items():
        case(f"{_name} {_operand.__name__}", functools.partial(lambda op, v: op(v, [1]), _op), _operand)
    case(f"std {_operand.__name__}", lambda v: A.std.correction(v, [0], correction=0, keepdim=True), _operand)
    case(f"var_mean {_operand.__name__}", lambda v: A.var_mean.correction(v, [1], correction=1), _operand)
    for _dim in (0, -1):
        for _name in ("_softmax", "_log_softmax"):
            case(f"{_name} {_dim} {_operand.__name__}", functools.partial(
                lambda op, d, v: op(v, d, False), getattr(A, _name).default, _dim), _operand)
        case(f"softmax backward {_dim} {_operand.__name__}", functools.partial(
            lambda d, g: A._softmax_backward_data.default(g, g.softmax(d), d, g.dtype), _dim), _operand)
        case(f"log_softmax backward {_dim} {_operand.__name__}", functools.partial(
            lambda d, g: A._log_softmax_backward_data.default(g, g.log_softmax(d), d, g.dtype), _dim), _operand)
case("prod of a dim", lambda v: A.prod.dim_int(v, 0, True), x)
case("sum to f64", lambda v: A.sum.dim_IntList(v, [0], dtype=torch.float64), x)
case("sum over no dims", lambda v: A.sum.dim_IntList(v, []), x)
case("max", A.max.default, i)
for _operand in (i, broken, lambda m, n: h(m, n).round()):
    for _name in ("argmax", "argmin"):
        for _more in ((), (1,), (-1, True), (0,)):
            case(f"{_name} {_more} {_operand.__name__}", functools.partial(
                lambda op, more, v: op(v, *more), getattr(A, _name).default, _more), _operand)
    for _name in ("max", "min"):
        case(f"{_name} of a dim {_operand.__name__}", functools.partial(
            lambda op, v: op(v, 1, True) + op(v, -1), getattr(A, _name).dim), _operand)
case("safe_softmax", lambda v: A._safe_softmax.default(torch.where(v > 9, v, -INFINITY), 1), x)
for _order in (2, 1, 0, INFINITY, -INFINITY, 3, 0.5):
    case(f"norm {_order}", functools.partial(lambda o, v: A.linalg_vector_norm.default(v, o, [1]), _order), p)
case("layer norm", lambda v, r: A.native_layer_norm.default(v, [v.shape[1]], r, r + 1, 1e-5), x, row)
case("layer norm bf16", lambda v, r: A.native_layer_norm.default(v, [v.shape[1]], r, r + 1, 1e-5), h,
     lambda m, n: row(m, n).bfloat16())
case("layer norm plain", lambda v: A.native_layer_norm.default(v, v.shape[1:], None, None, 1e-5), z)
case("layer norm backward", lambda v, g, r: A.native_layer_norm_backward.default(
    g, v, [v.shape[1]], *A.native_layer_norm.default(v, [v.shape[1]], r, r, 1e-5)[1:], r, r, [True] * 3), x, y, row)
case("group norm", lambda v, u: A.native_group_norm.default(v, u + 2, u, v.shape[0], 6, v.shape[2], 2, 1e-5), z, six)
case("group norm backward", lambda v, u: A.native_group_norm_backward.default(
    v.cos(), v, *A.native_group_norm.default(v, u, None, v.shape[0], 6, v.shape[2], 2, 1e-5)[1:], u,
    v.shape[0], 6, v.shape[2], 2, [True] * 3), z, six)
case("batch norm", lambda v, u: A._native_batch_norm_legit_no_training.default(
    v, u, u + 1, u * 2, u.abs(), 0.1, 1e-5), z, six)
for _more in (([2, 2],), ([3, 3], [2, 2], [1, 1]), ([3, 2], [1, 2], [0, 1], [1, 1], True),
              ([2, 3], [2, 1], [1, 0], [2, 1]), ([1, 1], [3, 2]),
              ([3, 3], [2, 2], [1, 1], [1, 1], True), (3, 3, 1, 2, True)):
    for _operand in (image, broken):
        case(f"max pool {_more} {_operand.__name__}", functools.partial(
            lambda more, v: A.max_pool2d_with_indices.default(v, *more)[0], _more), _operand)
case("max pool int", lambda v: A.max_pool2d_with_indices.default(v, 2, 2, 1)[0], lambda m, n: i(m, n).reshape(1, m, n))
case("max pool bf16", lambda v: A.max_pool2d_with_indices.default(v, 3, 2)[0], lambda m, n: h(m, n).reshape(1, m, n))
case("max pool 1d", lambda v: A.max_pool2d_with_indices.default(v, [1, 3], [1, 2], [0, 1])[0], z)
case("max pool 3d", lambda v: A.max_pool3d_with_indices.default(v, 2, 2, 1)[0], image)
for _more in (([2, 2],), ([3, 3], [2, 2], [1, 1]), ([3, 3], [2, 2], [1, 1], True),
              ([3, 2], [2, 2], [1, 1], True, False), ([3, 3], [1, 2], [1, 0], False, False),
              ([2, 2], [2, 2], [0, 0], True, True, 3)):
    case(f"avg pool {_more}", functools.partial(lambda more, v: A.avg_pool2d.default(v, *more), _more), image)
case("avg pool bf16", lambda v: A.avg_pool2d.default(v, 3, 2), lambda m, n: h(m, n).reshape(1, m, n))
case("avg pool 1d", lambda v: F.avg_pool1d(v, 3, 2, 1), z)
case("avg pool 3d", lambda v: A.avg_pool3d.default(v, 2, 2, 1, False, False), image)
case("adaptive pool to 1", lambda v: A._adaptive_avg_pool2d.default(v, [1, 1]), image)
case("adaptive pool that divides", lambda v: A._adaptive_avg_pool2d.default(A.cat.default([v, v, v], 2), [3, 1]), image)
case("adaptive pool to its size", lambda v: A._adaptive_avg_pool2d.default(v, [v.shape[2], 1]), image)
case("mm", A.mm.default, x, w)
case("mm bf16", A.mm.default, h, lambda m, n: w(m, n).bfloat16())
case("bmm", lambda v: A.bmm.default(v, A.transpose.int(v, 1, 2)), z)
case("addmm", lambda v, u: A.addmm.default(u[0], v, u, beta=0.5, alpha=2), x, w)
case("baddbmm", lambda v: A.baddbmm.default(v[:, :, :1], v, A.transpose.int(v, 1, 2), beta=0), z)
case("mv", A.mv.default, x, row)
case("dot", A.dot.default, row, row)
case("addmv", lambda v, r: A.addmv.default(v[:, 0], v, r), x, row)
case("linear", lambda v, u: A.linear.default(v, A.t.default(u), u[0]), z, w)


def converted(function: Callable[..., Any], operands: tuple[torch.Tensor, ...]) -> tuple[Graph, Notes]:
    """The Graph of a function traced with symbolic sizes, without decompositions."""
    gm = make_fx(function, tracing_mode="symbolic")(*operands)
    return to_graph(gm, "test")


def agree(found: Any, wanted: Any, name: str) -> None:
    if wanted is None:
        assert found is None
        return
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), name
    measured = wanted.numel() and wanted.is_floating_point() and bool(wanted.isfinite().all())
    scale = max(1.0, wanted.abs().max().item()) if measured else 1.0
    allowed = TOLERANCE.get(wanted.dtype, 0)
    torch.testing.assert_close(found, wanted, atol=allowed * scale, rtol=allowed, equal_nan=True)


@pytest.mark.parametrize("one", CASES, ids=[name for name, _, _ in CASES])
def test_translation(one: Case) -> None:
    """No extern call, and the same numbers, dtypes and strides as PyTorch, at the traced size and at another."""
    name, function, makers = one
    graph, notes = converted(function, tuple(make(5, 7) for make in makers))
    assert notes.externs == []
    for m, n in ((5, 7), (4, 9)):
        operands = tuple(make(m, n) for make in makers)
        wanted = function(*operands)
        found, _, _ = interpret(graph, [*operands, *notes.constants])
        for own, right in zip(found, wanted if isinstance(wanted, (tuple, list)) else [wanted], strict=True):
            agree(own, right, name)


@pytest.mark.parametrize("role", ["minimum", "maximum"])
def test_guarded_extremes(role: str) -> None:
    """A guard that says which side a minimum or maximum is, is used: no minimum stays in the shapes."""
    def function(v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        if role == "minimum":
            return v + table[:v.shape[1]]
        return v + A.zeros.default([torch.sym_max(v.shape[1], table.shape[0])])

    operands = (x(5, 7), torch.arange(20.0)) if role == "minimum" else (x(5, 7), torch.arange(4.0))
    graph, _ = converted(function, operands)
    text = show(graph)
    assert ("minimum" if role == "minimum" else "maximum") not in text and "min(" not in text and "max(" not in text
    found, _, _ = interpret(graph, list(operands))
    agree(found[0], function(*operands), role)


# ---- whole networks


class Recorder:
    """A program compiler that converts each graph and runs it with the reference interpreter."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.notes: list[Notes] = []

    def __call__(self, request: ProgramRequest) -> Callable[[list[Any]], list[Any]]:
        graph, notes = to_graph(request.gm, request.name)
        self.graphs.append(graph)
        self.notes.append(notes)

        def program(inputs: list[Any]) -> list[Any]:
            arguments = list(inputs)
            inputs.clear()
            tape = arguments.pop(0) if notes.tape_input else None
            values = [] if tape is None else list(tape.open())
            outputs, saved, _ = interpret(graph, [*values, *arguments, *notes.constants])
            if tape is not None:
                tape.close()
            return [*outputs, Tape(saved)] if notes.tape_output else outputs

        return program

    def externs(self) -> set[str]:
        return {target for notes in self.notes for target, _, _ in notes.externs}


def captured(function: Callable[..., Any]) -> tuple[Callable[..., Any], Recorder]:
    recorder = Recorder()
    compilation = Compilation(Config.make(strict=True), recorder)
    torch._dynamo.reset()
    backend = functools.partial(compile_fx, compilation=compilation)
    return torch.compile(function, backend=backend, dynamic=True, fullgraph=True), recorder


class Block(nn.Module):
    """Masked attention and a perceptron, with names for every shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mix = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, v: torch.Tensor) -> torch.Tensor:
        batch, length, _ = v.shape
        q, k, u = (part.view(batch, length, 2, 8).transpose(1, 2) for part in self.mix(self.norm(v)).split(16, 2))
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(8)
        hidden = ~torch.ones(length, length, dtype=torch.bool).tril()
        mixed = scores.masked_fill(hidden, -INFINITY).softmax(-1) @ u
        return v + F.gelu(self.out(mixed.transpose(1, 2).reshape(batch, length, 16)), approximate="tanh")


class Classifier(nn.Module):
    """Token embedding, a block, and a loss with ignored targets."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.block = Block()
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.block(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=3)


class Image(nn.Module):
    """Convolution, batch norm that keeps statistics, group norm, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, stride=2)
        self.groups = nn.GroupNorm(2, 8)

    def forward(self, v: torch.Tensor) -> torch.Tensor:
        v = F.relu(self.norm(self.first(v)))
        return F.adaptive_avg_pool2d(F.silu(self.groups(self.second(v))), 1).flatten(1)


def train_and_compare(model: nn.Module, inputs: list[torch.Tensor]) -> Recorder:
    """Output, gradients and buffers of the converted model against the model, over several shapes."""
    fast, recorder = captured(model)
    parameters = list(model.parameters())
    for given in inputs:
        start = {name: buffer.clone() for name, buffer in model.named_buffers()}
        wanted = model(given)
        wanted_grads = torch.autograd.grad(wanted.sin().sum(), parameters)
        kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.load_state_dict(start, strict=False)
        found = fast(given)
        found_grads = torch.autograd.grad(found.sin().sum(), parameters)
        agree(found, wanted, "output")
        assert found.stride() == wanted.stride()
        for own, right in zip(found_grads, wanted_grads, strict=True):
            agree(own, right, "gradient")
        for name, buffer in model.named_buffers():
            agree(buffer, kept[name], name)
    assert len(recorder.graphs) == 2
    return recorder


def test_classifier() -> None:
    torch.manual_seed(0)
    recorder = train_and_compare(Classifier(), [torch.randint(0, 20, shape) for shape in ((3, 5), (2, 9), (7, 4))])
    assert recorder.externs() == set()
    forward, backward = recorder.graphs
    assert [node.op for node in backward.nodes if node.op.startswith("put")] == ["put_add"]
    assert forward.saved and len(forward.saved) == len(backward.restored)
    assert any(node.where.startswith("test_fx.py:") and "softmax" in node.where for node in forward.nodes)


def test_image_writes_statistics() -> None:
    torch.manual_seed(0)
    recorder = train_and_compare(Image(), [torch.randn(2, 3, 12, 9), torch.randn(3, 3, 7, 15)])
    assert recorder.externs() == {"aten.convolution.default", "aten.convolution_backward.default"}
    assert {target.type.shape for target, _ in recorder.graphs[0].writes} == {(8,), ()}


def test_none_sizes_and_literals_are_outputs() -> None:
    def function(v: torch.Tensor) -> Any:
        return v + 1, v.shape[0] * 2, v.t()

    gm = make_fx(function, tracing_mode="symbolic")(x(5, 7))
    output = gm.graph.output_node()
    output.args = ((*output.args[0], None, 3),)
    graph, _ = to_graph(gm, "test")
    found, _, _ = interpret(graph, [x(4, 9)])
    assert found[1] == 8 and found[3] is None and found[4] == 3
    assert found[2].stride() == (1, 9)


def test_strided_inputs_and_constants() -> None:
    graph, notes = converted(lambda v: v[:, :4] * torch.tensor([1.0, 2.0, 4.0, 8.0]), (torch.randn(7, 5).t(),))
    assert str(graph.inputs[0].type.strides[0]) == "1"
    assert len(notes.constants) == 1 and len(graph.inputs) == 2


def test_equal_products_of_sizes() -> None:
    """The trace knows a*b == c*d by a guard only."""
    def function(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return u.flatten() + v.flatten()

    u, v = torch.randn(4, 6), torch.randn(3, 8)
    graph, notes = converted(function, (u, v))
    assert len(notes.equalities) == 1 and not notes.externs
    agree(interpret(graph, [u, v])[0][0], function(u, v), "sum")


def test_mutation_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"aten\.add_\.Tensor"):
        converted(lambda v: v.clone().add_(1), (x(5, 7),))


def test_sizes_from_data_are_refused() -> None:
    def function(v: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(v)

    with pytest.raises(Unsupported, match="nonzero"):
        converted(function, (x(5, 7),))


@pytest.mark.parametrize("compute", [
    lambda a, b: round(a / 4), lambda a, b: round((a * b - 40) / 6),
    lambda a, b: round(a / 5), lambda a, b: math.ceil(a / 2.5), lambda a, b: math.floor(a / 2 / 1.5),
    lambda a, b: (a + b) * a - 3, lambda a, b: a // 3 + b % 4, lambda a, b: (a * b) // a, lambda a, b: -(-b // 5),
    lambda a, b: torch.sym_max(a, b) - torch.sym_min(a, 4), lambda a, b: (a * a + a) // 2,
    lambda a, b: torch.sym_int(a / b), lambda a, b: torch.sym_int(a * 0.25), lambda a, b: (a // b) * b + a % b,
])
def test_sizes(compute: Callable[[Any, Any], Any]) -> None:
    seen = []

    def function(v: torch.Tensor) -> torch.Tensor:
        seen.append(v.shape[0])
        seen.append(v.shape[1])
        return v * compute(v.shape[0], v.shape[1])

    gm = make_fx(function, tracing_mode="symbolic")(x(11, 7))
    sizes = SymIntImporter()
    names = [str(sizes.size(size)) for size in seen]
    values = [node.meta["val"] for node in gm.graph.nodes if isinstance(node.meta.get("val"), torch.SymInt)]
    converted_size = sizes.size(values[-1])
    for a in range(1, 14):
        for b in range(1, 9):
            found = evaluate(converted_size, dict(zip(names, (a, b), strict=True)))
            assert found == int(compute(a, b)), (a, b)


def test_divisors_that_guards_show_to_be_no_less_than_0() -> None:
    """Swin v2's windows after a stage that merges tokens, whose least value no interval tells."""
    def windows(size: Any) -> Any:
        return 4 * ((size // 4 + 3 * (size // 8) + 3) // 4) - 4 * (size // 8)

    env = ShapeEnv()
    traced = torch.empty(64, device="meta")
    with FakeTensorMode(shape_env=env) as mode:
        size = mode.from_tensor(traced, symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC])).shape[0]
    sizes = SymIntImporter()
    torch._check(windows(size) >= 1)
    name, found = str(sizes.size(size)), sizes.size((size + 2) % windows(size))
    for number in range(4, 90):
        assert evaluate(found, {name: number}) == (number + 2) % windows(number)
