"""Translations of ATen reductions and of the softmax family.

    aten._softmax(x [b, n], -1)  -->  m = amax(x | 1, keep); e = exp(sub(x, m)); div(e, sum(e | 1, keep))
"""
from __future__ import annotations

import math
from typing import Any

import torch

from anyshape.frontend.aten_table import Decline, Translator, is_float, literal, translates, wide
from anyshape.ir.graph import Value
from anyshape.ir.types import kind_of
from anyshape.sym.expr import Expr, Size, maximum, product
from anyshape.torch_compat import aten

prims = torch.ops.prims


@translates(aten.sum.default)
def sum_all(t: Translator, x: Value, *, dtype: Any = None) -> Value:
    return sum_dims(t, x, None)


@translates(aten.sum.dim_IntList)
def sum_dims(t: Translator, x: Value, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Value:
    return t.reduce("sum", t.cast(x, t.out.dtype), t.dims(x.tensor.rank, dim), keepdim)


@translates(aten.mean.default)
def mean_all(t: Translator, x: Value, *, dtype: Any = None) -> Value:
    return mean_dims(t, x, None)


@translates(aten.mean.dim)
def mean_dims(t: Translator, x: Value, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Value:
    if not is_float(t.out.dtype):
        raise Decline("a mean of complex or whole numbers")
    return t.cast(mean(t, t.cast(x, wide(t.out.dtype)), t.dims(x.tensor.rank, dim), keepdim), t.out.dtype)


def mean(t: Translator, x: Value, dims: tuple[int, ...], keep: bool) -> Value:
    """Sum divided by the number of elements, in the operand's dtype."""
    if not dims:
        return x
    return t.op("div", t.reduce("sum", x, dims, keep), _number(product(x.tensor.shape[d] for d in dims)))


def _number(size: Size) -> Any:
    return float(size) if isinstance(size, int) else size


@translates(aten.prod.default)
def prod_all(t: Translator, x: Value, *, dtype: Any = None) -> Value:
    return t.reduce("prod", t.cast(x, t.out.dtype), t.dims(x.tensor.rank, None))


@translates(aten.prod.dim_int)
def prod_dim(t: Translator, x: Value, dim: int, keepdim: bool = False, *, dtype: Any = None) -> Value:
    return t.reduce("prod", t.cast(x, t.out.dtype), t.dims(x.tensor.rank, dim), keepdim)


def _largest(t: Translator, name: str, x: Value, dim: Any, keep: bool) -> Value:
    dims = t.dims(x.tensor.rank, dim)
    if x.tensor.dtype == "bool":
        return t.reduce("any" if name == "amax" else "all", x, dims, keep)
    return t.reduce(name, x, dims, keep)


@translates(aten.amax.default)
def amax(t: Translator, x: Value, dim: Any = (), keepdim: bool = False) -> Value:
    return _largest(t, "amax", x, dim, keepdim)


@translates(aten.amin.default)
def amin(t: Translator, x: Value, dim: Any = (), keepdim: bool = False) -> Value:
    return _largest(t, "amin", x, dim, keepdim)


translates(aten.max.default)(amax)
translates(aten.min.default)(amin)


def _position(t: Translator, name: str, x: Value, dim: int, keep: bool) -> tuple[Value, Value]:
    """The extreme along a dim and the position of the first element that is it, or of the first NaN."""
    if x.tensor.dtype == "bool":
        raise Decline("the position of an extreme among bools")
    if not x.tensor.rank:
        raise Decline("the position of an extreme in a rank-0 tensor")
    dim = dim % x.tensor.rank
    size = x.tensor.shape[dim]
    extreme = t.reduce(name, x, (dim,), True)
    is_it = t.op("eq", x, extreme)
    if is_float(x.tensor.dtype):
        is_it = t.op("bit_or", is_it, t.op("isnan", x))
    line = t.reshape(t.iota(size), (size,) + (1,) * (x.tensor.rank - 1 - dim))
    position = t.reduce("amin", t.where(is_it, line, size, "i64"), (dim,), keep)
    return (extreme if keep else t.reshape(extreme, position.tensor.shape)), position


def _position_in(t: Translator, name: str, x: Value, dim: int | None, keep: bool) -> Value:
    if dim is not None:
        return _position(t, name, x, dim, keep)[1]
    return t.reshape(_position(t, name, t.reshape(x, (x.tensor.count,)), 0, False)[1], t.out.shape)


@translates(aten.argmax.default)
def argmax(t: Translator, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return _position_in(t, "amax", x, dim, keepdim)


@translates(aten.argmin.default)
def argmin(t: Translator, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return _position_in(t, "amin", x, dim, keepdim)


@translates(aten.max.dim)
def max_dim(t: Translator, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return _position(t, "amax", x, dim, keepdim)


@translates(aten.min.dim)
def min_dim(t: Translator, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return _position(t, "amin", x, dim, keepdim)


def _logical(t: Translator, name: str, x: Value, dim: Any, keep: bool) -> Value:
    return t.cast(t.reduce(name, t.cast(x, "bool"), t.dims(x.tensor.rank, dim), keep), t.out.dtype)


@translates(aten.any.default, aten.any.dim, aten.any.dims)
def any_(t: Translator, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return _logical(t, "any", x, dim, keepdim)


@translates(aten.all.default, aten.all.dim, aten.all.dims)
def all_(t: Translator, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return _logical(t, "all", x, dim, keepdim)


def variance(t: Translator, x: Value, dims: tuple[int, ...], correction: Any, keep: bool,
             squares: str = "") -> tuple[Value, Value]:
    """Variance and mean in two passes, the mean in the operand's dtype, the variance in that or in `squares`."""
    if isinstance(correction, (Value, Expr)) or (isinstance(correction, float) and not correction.is_integer()):
        raise Decline("a correction of the variance that is no whole number")
    middle = mean(t, x, dims, True)
    difference = t.op("sub", x, middle)
    if squares:
        difference = t.cast(difference, squares)
    count = product(x.tensor.shape[d] for d in dims) - int(correction)
    if not t.at_most(0, count):
        count = maximum(count, 0)
    spread = t.op("div", t.reduce("sum", t.op("mul", difference, difference), dims, keep), _number(count))
    if not keep:
        kept = tuple(n for d, n in enumerate(x.tensor.shape) if d not in dims)
        middle = t.reshape(middle, kept)
    return spread, middle


def _spread(t: Translator, x: Value, dim: Any, correction: Any, keep: bool,
            squares: str = "") -> tuple[Value, Value]:
    if not is_float(x.tensor.dtype):
        raise Decline("the variance of complex numbers")
    return variance(t, t.cast(x, wide(x.tensor.dtype)), t.dims(x.tensor.rank, dim),
                    1 if correction is None else correction, keep, squares)


def _deviation(t: Translator, x: Value, dim: Any, correction: Any, keep: bool) -> tuple[Value, Value]:
    """Standard deviation and mean. Of numbers beyond 1e19 or below 1e-19 it is no infinity or 0, though their squares
    are in f32: these are added in f64, as the operator does."""
    spread, middle = _spread(t, x, dim, correction, keep, "" if x.tensor.dtype == "f16" else "f64")
    return t.cast(t.op("sqrt", spread), t.out.dtype), t.cast(middle, t.out.dtype)


@translates(aten.var.correction)
def var(t: Translator, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Value:
    return t.cast(_spread(t, x, dim, correction, keepdim)[0], t.out.dtype)


@translates(aten.std.correction)
def std(t: Translator, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Value:
    return _deviation(t, x, dim, correction, keepdim)[0]


@translates(prims.var.default)
def prims_var(t: Translator, x: Value, dims: Any, correction: Any = 1, **more: Any) -> Value:
    return var(t, x, dims, correction=correction)


@translates(aten.var_mean.correction)
def var_mean(t: Translator, x: Value, dim: Any = None, *, correction: Any = None,
             keepdim: bool = False) -> tuple[Value, ...]:
    return tuple(t.cast(v, t.out.dtype) for v in _spread(t, x, dim, correction, keepdim))


@translates(aten.std_mean.correction)
def std_mean(t: Translator, x: Value, dim: Any = None, *, correction: Any = None,
             keepdim: bool = False) -> tuple[Value, ...]:
    return _deviation(t, x, dim, correction, keepdim)


@translates(aten.linalg_vector_norm.default)
def vector_norm(t: Translator, x: Value, ord: Any = 2, dim: Any = None, keepdim: bool = False, *,
                dtype: Any = None) -> Value:
    if isinstance(ord, Value):
        raise Decline("a norm of computed order")
    kind = wide(t.out.dtype)
    y = t.cast(x, kind)
    dims = t.dims(x.tensor.rank, dim)
    if not dims:
        return t.cast(t.op("abs", y), t.out.dtype) if ord != 0 else _count_nonzero(t, y, dims, keepdim)
    if ord == 2:
        result = t.op("sqrt", t.reduce("sum", t.op("mul", y, y), dims, keepdim))
    elif ord == 1:
        result = t.reduce("sum", t.op("abs", y), dims, keepdim)
    elif ord == 0:
        result = _count_nonzero(t, y, dims, keepdim)
    elif math.isinf(ord):
        result = t.reduce("amax" if ord > 0 else "amin", t.op("abs", y), dims, keepdim)
    else:
        powers = t.op("pow", t.op("abs", y), float(ord))
        result = t.op("pow", t.reduce("sum", powers, dims, keepdim), 1.0 / ord)
    return t.cast(result, t.out.dtype)


def _count_nonzero(t: Translator, x: Value, dims: tuple[int, ...], keep: bool) -> Value:
    return t.cast(t.reduce("sum", t.cast(t.op("ne", x, 0.0), wide(t.out.dtype)), dims, keep), t.out.dtype)


@translates(aten.norm.Scalar)
def norm_all(t: Translator, x: Value, p: Any = 2) -> Value:
    return vector_norm(t, x, p)


@translates(aten.norm.ScalarOpt_dim)
def norm_dims(t: Translator, x: Value, p: Any, dim: Any, keepdim: bool = False) -> Value:
    return vector_norm(t, x, 2 if p is None else p, dim, keepdim)


@translates(aten.logsumexp.default)
def logsumexp(t: Translator, x: Value, dim: Any, keepdim: bool = False) -> Value:
    kind = wide(t.out.dtype)
    y = t.cast(x, kind)
    dims = t.dims(x.tensor.rank, dim)
    top = t.reduce("amax", y, dims, True)
    top = t.where(t.op("isinf", top), 0.0, top, kind)
    total = t.op("log", t.reduce("sum", t.op("exp", t.op("sub", y, top)), dims, True))
    return t.cast(t.reshape(t.op("add", total, top), t.out.shape), t.out.dtype)


@translates(aten._softmax.default, aten.softmax.int)
def softmax(t: Translator, x: Value, dim: int, *arguments: Any, **more: Any) -> Value:
    kind = wide(t.out.dtype)
    y = t.cast(x, kind)
    dims = t.dims(x.tensor.rank, dim)
    top = t.reduce("amax", y, dims, True)
    e = t.op("exp", t.op("sub", y, top))
    result = t.op("div", e, t.reduce("sum", e, dims, True))
    return t.cast(result, t.out.dtype)


@translates(aten._safe_softmax.default)
def safe_softmax(t: Translator, x: Value, dim: int, dtype: Any = None) -> Value:
    """A line of which every element is minus infinity gives zeros."""
    if not x.tensor.rank:
        raise Decline("a softmax of a rank-0 tensor")
    masked = t.reduce("all", t.op("eq", x, -math.inf), t.dims(x.tensor.rank, dim), True)
    return t.where(masked, 0.0, softmax(t, x, dim))


@translates(aten._log_softmax.default, aten.log_softmax.int)
def log_softmax(t: Translator, x: Value, dim: int, *arguments: Any, **more: Any) -> Value:
    y = t.cast(x, wide(t.out.dtype))
    dims = t.dims(x.tensor.rank, dim)
    shifted = t.op("sub", y, t.reduce("amax", y, dims, True))
    total = t.op("log", t.reduce("sum", t.op("exp", shifted), dims, True))
    return t.cast(t.op("sub", shifted, total), t.out.dtype)


@translates(aten._softmax_backward_data.default)
def softmax_backward(t: Translator, grad: Value, output: Value, dim: int, input_dtype: Any) -> Value:
    kind = wide(output.tensor.dtype)
    o = t.cast(output, kind)
    weighted = t.op("mul", t.cast(grad, kind), o)
    total = t.reduce("sum", weighted, t.dims(output.tensor.rank, dim), True)
    return t.cast(t.op("sub", weighted, t.op("mul", o, total)), t.out.dtype)


@translates(aten._log_softmax_backward_data.default)
def log_softmax_backward(t: Translator, grad: Value, output: Value, dim: int, input_dtype: Any) -> Value:
    kind = wide(output.tensor.dtype)
    g = t.cast(grad, kind)
    total = t.reduce("sum", g, t.dims(output.tensor.rank, dim), True)
    return t.cast(t.op("sub", g, t.op("mul", t.op("exp", t.cast(output, kind)), total)), t.out.dtype)


@translates(aten.count_nonzero.dim_IntList, aten.count_nonzero.default)
def count_nonzero(t: Translator, x: Value, dim: Any = None) -> Value:
    dims = t.dims(x.tensor.rank, dim)
    nonzero = t.op("ne", x, literal(0, x.tensor.dtype)) if kind_of(x.tensor.dtype) != "bool" else x
    return t.reduce("sum", t.cast(nonzero, "i64"), dims)


def _scan(t: Translator, name: str, x: Value, dim: int) -> Value:
    if kind_of(t.out.dtype) not in ("float", "int", "uint"):
        raise Decline("a scan of complex numbers or bools")
    x = t.cast(x, t.out.dtype)
    if not x.tensor.rank or x.tensor.shape[dim] == 1:
        return x
    return t.op(name, x, dim=dim % x.tensor.rank)


@translates(aten.cumsum.default)
def cumsum(t: Translator, x: Value, dim: int, *, dtype: Any = None) -> Value:
    return _scan(t, "cumsum", t.op("add", x, 0.0) if is_float(x.tensor.dtype) else x, dim)  # no sum is -0.0


@translates(aten.cumprod.default)
def cumprod(t: Translator, x: Value, dim: int, *, dtype: Any = None) -> Value:
    return _scan(t, "cumprod", x, dim)
