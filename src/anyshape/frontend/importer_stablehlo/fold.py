"""Constant folding over sizes: rules, one per StableHLO operation, that apply where every operand is known.

    get_dimension_size -> multiply(2) -> reshape -> concatenate  -->  Known([2*n, ...])

A rule returns None, or raises Unknown, where the program has to compute the tensor.
"""
from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from anyshape.frontend.importer_stablehlo.table import Call, bounds
from anyshape.frontend.symbols import known as k
from anyshape.frontend.symbols.known import Comparison, Known, Unknown, each, known, objects
from anyshape.frontend.symbols.numpy_arrays import numpy_dtype
from anyshape.ir.types import kind_of
from anyshape.sym.expr import Expr
from anyshape.sym.prover import prove_nonnegative

Fold = Callable[[Call], Any]
FOLDS: dict[str, Fold] = {}
MOST = 64  # elements that are folded
WHOLE = ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")


def folds(*names: str, free: bool = False) -> Callable[[Fold], Fold]:
    """Makes the function the rule of these operations of the dialect stablehlo, or of the one named. free: operands
    need not be known."""
    def add(function: Fold) -> Fold:
        def rule(c: Call) -> Any:
            if not free and not all(isinstance(one, Known) and one.array.size <= MOST for one in c.inputs):
                return None
            return function(c)
        for name in names:
            FOLDS[name if "." in name else f"stablehlo.{name}"] = rule
        return function
    return add


def made(array: Any, dtype: str) -> Known:
    """An array as a Known of that dtype."""
    found = known(array, dtype)
    return found if found.array.dtype == object else Known(found.array.astype(numpy_dtype(dtype), copy=False), dtype)


def _elementwise(plain: Callable[..., Any], symbolic: Callable[..., Any] | None = None) -> Fold:
    """By numpy on numbers, which wraps as the dtype does; by `symbolic(c, *elements)` where formulas are among them."""
    def rule(c: Call) -> Any:
        operands: list[Known] = c.inputs
        if any(one.array.dtype == object for one in operands):
            if c.dtype not in WHOLE or symbolic is None or any(
                    isinstance(item, Comparison) for one in operands for item in one.items()):
                raise Unknown
            return each(functools.partial(symbolic, c), *operands, dtype=c.dtype)
        with np.errstate(all="ignore"):
            found = plain(*(one.array for one in operands))
        return made(np.asarray(found).astype(numpy_dtype(c.dtype)), c.dtype)
    return rule


def _divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind not in "iu":
        return a / b
    if not b.all():
        raise Unknown
    return a // b + ((a % b != 0) & ((a < 0) != (b < 0)))  # toward 0


def _power(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind == "i" and (b < 0).any():
        raise Unknown
    return np.power(a, b)


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind in "iu" and not b.all():
        raise Unknown
    return np.fmod(a, b)


def _sign(c: Call, a: Any) -> int:
    if prove_nonnegative(c.walk.facts, a - 1):
        return 1
    if prove_nonnegative(c.walk.facts, -a - 1):
        return -1
    raise Unknown


def _shifted(a: np.ndarray, b: np.ndarray, logical: bool) -> np.ndarray:
    bits = 8 * a.dtype.itemsize
    if logical:
        unsigned = np.dtype(f"u{a.dtype.itemsize}")
        plain, far = a.astype(unsigned), b.astype(unsigned)
        return np.where(far < bits, plain >> np.minimum(far, bits - 1).astype(unsigned), 0).astype(a.dtype)
    signed = a.view(f"i{a.dtype.itemsize}")  # the highest bit is the sign, also of numbers without one
    return (signed >> np.minimum(b.astype(np.uint64), bits - 1).astype(signed.dtype)).view(a.dtype)


def _left(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    bits = 8 * a.dtype.itemsize
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    far = b.astype(unsigned)
    return np.where(far < bits, a.astype(unsigned) << np.minimum(far, bits - 1).astype(unsigned), 0).astype(a.dtype)


for _name, _plain, _symbolic in (
        ("add", np.add, lambda c, a, b: a + b), ("subtract", np.subtract, lambda c, a, b: a - b),
        ("multiply", np.multiply, lambda c, a, b: a * b),
        ("maximum", np.maximum, lambda c, a, b: k.largest(a, b)),
        ("minimum", np.minimum, lambda c, a, b: k.smallest(a, b)),
        ("divide", _divided, lambda c, a, b: k.divided(c.walk.facts, a, b)),
        ("remainder", _remainder, lambda c, a, b: _modulo(c, a, b)),
        ("negate", np.negative, lambda c, a: -a), ("sign", np.sign, _sign),
        ("abs", np.abs, lambda c, a: a if prove_nonnegative(c.walk.facts, a) else a * _sign(c, a)),
        ("and", np.bitwise_and, None), ("or", np.bitwise_or, None), ("xor", np.bitwise_xor, None),
        ("not", np.invert, None), ("power", _power, lambda c, a, b: k.power(a, b)),
        ("shift_left", _left, None), ("shift_right_logical", lambda a, b: _shifted(a, b, True), None),
        ("shift_right_arithmetic", lambda a, b: _shifted(a, b, False), None),
        ("sqrt", np.sqrt, None), ("floor", np.floor, None), ("ceil", np.ceil, None), ("is_finite", np.isfinite, None),
        ("exponential", np.exp, None), ("log_plus_one", np.log1p, None), ("real", np.real, None),
        ("imag", np.imag, None)):
    folds(_name)(_elementwise(_plain, _symbolic))


def _modulo(c: Call, a: Any, b: Any) -> Any:
    if prove_nonnegative(c.walk.facts, a):  # else its sign is that of the dividend
        return k.remainder(c.walk.facts, a, b)
    raise Unknown


_WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "EQ": operator.eq, "NE": operator.ne, "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge}


@folds("compare")
def compare(c: Call) -> Any:
    way = c.attr("comparison_direction")
    a, b = c.inputs
    if a.array.dtype != object and b.array.dtype != object:
        if c.attr("compare_type") == "TOTALORDER":
            return None if kind_of(c.given(0)) != "float" else made(
                _WAYS[way](_total(a.array), _total(b.array)), "bool")
        with np.errstate(all="ignore"):
            return made(_WAYS[way](a.array, b.array), "bool")

    def one(x: Any, y: Any) -> Any:
        try:
            if way == "NE":
                return not k.compared(c.walk.facts, "eq", x, y)
            return k.compared(c.walk.facts, way.lower(), x, y)
        except Unknown:
            return Comparison(way, x, y)

    return each(one, a, b, dtype="bool")


def _total(array: np.ndarray) -> np.ndarray:
    """Whole numbers in the total order of floats (IEEE 754, section 5.10)."""
    bits = array.view(np.dtype(f"i{array.dtype.itemsize}"))
    return np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)


def _of_size(name: str, keeps: Callable[[Call], bool]) -> None:
    """Sizes as f64, of which TensorFlow's converter makes the length of a range, remain sizes."""
    plain = FOLDS[f"stablehlo.{name}"]

    def rule(c: Call) -> Any:
        one = c.inputs[0]
        if isinstance(one, Known) and one.array.dtype == object and c.dtype == "f64" and keeps(c):
            return one
        return plain(c)
    FOLDS[f"stablehlo.{name}"] = rule


for _name in ("ceil", "floor"):
    _of_size(_name, lambda c: True)
_of_size("divide", lambda c: isinstance(c.inputs[1], Known) and c.inputs[1].items() == [1.0])


@folds("select", free=True)
def select(c: Call) -> Any:
    condition = c.inputs[0]
    if not isinstance(condition, Known) or condition.array.dtype == object:
        return None
    if condition.array.size and (condition.array.all() or not condition.array.any()) and condition.shape == ():
        return c.inputs[1 if condition.array.all() else 2]
    if not all(isinstance(one, Known) and one.array.size <= MOST for one in c.inputs):
        return None
    return made(np.where(condition.array, *(one.array for one in c.inputs[1:])), c.dtype)


@folds("clamp")
def clamp(c: Call) -> Any:
    low, value, high = c.inputs
    if any(one.array.dtype == object for one in c.inputs):
        return each(lambda a, x, b: k.smallest(k.largest(a, x), b), low, value, high, dtype=c.dtype)
    return made(np.minimum(np.maximum(value.array, low.array), high.array), c.dtype)


@folds("convert")
def convert(c: Call) -> Any:
    one = c.inputs[0]
    if one.array.dtype == object:
        if any(not isinstance(item, (int, Expr)) for item in one.items()) or c.dtype not in (*WHOLE, "f64"):
            raise Unknown
        return Known(one.array, c.dtype)  # sizes are exact in f64
    if c.dtype in WHOLE and one.array.dtype.kind == "f":
        low, high, largest = bounds(c.dtype, "f64")  # what is outside is moved inside
        wide = np.nan_to_num(one.array.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf)
        inside = np.clip(wide, low, largest).astype(numpy_dtype(c.dtype))
        return made(np.where(wide > largest, numpy_dtype(c.dtype).type(high), inside), c.dtype)
    return made(one.array.astype(numpy_dtype(c.dtype)), c.dtype)


@folds("bitcast_convert")
def bitcast(c: Call) -> Any:
    one, to = c.inputs[0], numpy_dtype(c.dtype)
    if one.array.dtype == object or one.array.dtype.itemsize != to.itemsize or one.array.dtype.kind == "b":
        return None
    return Known(one.array.view(to) if one.array.ndim else one.array.reshape(1).view(to).reshape(()), c.dtype)


# ---- shapes


@folds("constant", free=True)
def constant(c: Call) -> Any:
    return Known(c.attr("value"), c.dtype)


@folds("get_dimension_size", free=True)
def get_dimension_size(c: Call) -> Any:
    size = c.sizes_of(0)[c.attr("dimension")]
    array = np.empty((), object)
    array[()] = size
    return made(array, c.dtype)


@folds("reshape")
def reshape(c: Call) -> Any:
    return Known(c.inputs[0].array.reshape(c.shape), c.inputs[0].dtype)


@folds("dynamic_reshape")
def dynamic_reshape(c: Call) -> Any:
    sizes = c.sizes(1)
    return Known(c.inputs[0].array.reshape(sizes), c.dtype) if all(isinstance(n, int) for n in sizes) else None


@folds("concatenate")
def concatenate(c: Call) -> Any:
    parts = [one.array for one in c.inputs]
    if any(part.dtype == object for part in parts):
        parts = [objects(one) for one in c.inputs]
    found = np.concatenate(parts, c.attr("dimension"))
    return made(found, c.dtype) if found.size <= MOST else None


@folds("slice")
def slice_(c: Call) -> Any:
    index = tuple(slice(*one) for one in zip(c.attr("start_indices"), c.attr("limit_indices"), c.attr("strides"),
                                             strict=True))
    return made(c.inputs[0].array[index], c.dtype)


@folds("dynamic_slice")
def dynamic_slice(c: Call) -> Any:
    array, sizes = c.inputs[0].array, c.attr("slice_sizes")
    starts = [int(numbers_of(one)) for one in c.inputs[1:]]
    starts = [min(max(start, 0), n - size) for start, n, size in zip(starts, array.shape, sizes, strict=True)]
    return made(array[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))], c.dtype)


def numbers_of(one: Known) -> Any:
    """The only element of a Known, a number."""
    item = one.items()[0]
    if isinstance(item, (Expr, Comparison)):
        raise Unknown
    return item


def _broadcast(c: Call, shape: tuple[Any, ...]) -> Any:
    if any(isinstance(n, Expr) for n in shape) or int(np.prod(shape, dtype=np.int64)) > MOST:
        return None
    dims, middle = c.attr("broadcast_dimensions"), [1] * len(shape)
    for at, size in zip(dims, c.inputs[0].shape, strict=True):
        middle[at] = size
    array = np.transpose(c.inputs[0].array, np.argsort(dims)).reshape(middle)
    return made(np.broadcast_to(array, shape).copy(), c.dtype)


@folds("broadcast_in_dim")
def broadcast_in_dim(c: Call) -> Any:
    return _broadcast(c, c.shape)


@folds("dynamic_broadcast_in_dim")
def dynamic_broadcast_in_dim(c: Call) -> Any:
    return _broadcast(c, c.sizes(1))


@folds("transpose")
def transpose(c: Call) -> Any:
    return Known(np.transpose(c.inputs[0].array, c.attr("permutation")), c.dtype)


@folds("iota", free=True)
def iota(c: Call) -> Any:
    dim = c.attr("iota_dimension")
    if int(np.prod(c.shape, dtype=np.int64)) > MOST or c.dtype in ("c64", "c128"):
        return None
    line = np.arange(c.shape[dim]).reshape([n if d == dim else 1 for d, n in enumerate(c.shape)])
    return made(np.broadcast_to(line, c.shape).astype(numpy_dtype(c.dtype)), c.dtype)


@folds("gather")
def gather(c: Call) -> Any:
    """Of a line, as TensorFlow takes sizes of a shape."""
    line, places, how = *c.inputs, c.attr("dimension_numbers")
    if len(line.shape) != 1 or how["offset_dims"] or how["collapsed_slice_dims"] != (0,) or how[
            "start_index_map"] != (0,):
        return None
    index = numbers_in(places).astype(np.int64)
    if how["index_vector_dim"] < index.ndim:
        index = index.squeeze(how["index_vector_dim"])
    return made(line.array[np.clip(index, 0, line.shape[0] - 1)], c.dtype) if line.shape[0] else None


def numbers_in(one: Known) -> np.ndarray:
    """The array of a Known without formulas."""
    if one.array.dtype == object:
        raise Unknown
    return one.array


def _absorbing(name: str, answer: bool) -> None:
    """false and x, true or x: whatever x is."""
    plain = FOLDS[f"stablehlo.{name}"]

    def rule(c: Call) -> Any:
        for one in c.inputs:
            if c.dtype == "bool" and isinstance(one, Known) and one.shape == () and one.array.dtype != object and bool(
                    one.array) is answer:
                return one
        return plain(c)
    FOLDS[f"stablehlo.{name}"] = rule


_absorbing("and", False)
_absorbing("or", True)


@folds("reverse")
def reverse(c: Call) -> Any:
    return Known(np.asarray(np.flip(c.inputs[0].array, c.attr("dimensions"))), c.dtype)


@folds("reduce")
def reduce(c: Call) -> Any:
    """Products and sums of sizes."""
    if len(c.inputs) != 2 or c.dtype not in WHOLE:
        return None
    body = [one.name for one in c.operation.regions[0].operations]
    what = {"stablehlo.add": lambda a, b: a + b, "stablehlo.multiply": lambda a, b: a * b,
            "stablehlo.maximum": k.largest, "stablehlo.minimum": k.smallest}.get(body[0]) if len(body) == 1 else None
    if what is None:
        return None
    count = len(c.attr("dimensions"))
    lines = np.moveaxis(objects(c.inputs[0]), c.attr("dimensions"), range(count))
    kept = lines.shape[count:]
    lines = lines.reshape(math.prod(lines.shape[:count]), math.prod(kept))
    result = np.empty(lines.shape[1], object)
    for column in range(lines.shape[1]):
        result[column] = _wrapped(functools.reduce(what, lines[:, column], c.inputs[1].items()[0]), c.dtype)
    return made(result.reshape(kept), c.dtype)


def _wrapped(number: Any, dtype: str) -> Any:
    """A number as that many bits hold it; formulas stay."""
    if not isinstance(number, int):
        return number
    limits = np.iinfo(numpy_dtype(dtype))
    return (number - int(limits.min)) % (int(limits.max) - int(limits.min) + 1) + int(limits.min)
