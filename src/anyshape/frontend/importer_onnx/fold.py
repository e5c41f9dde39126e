"""Rules of constant folding, one per ONNX operator: they apply where every operand is known when compiling.

    Gather(Known([n, 4]), 0)  -->  Known(n)

A rule returns None, or raises Unknown, where the program has to compute the tensor.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from anyshape.frontend.aten.table import is_float
from anyshape.frontend.importer_onnx.model import ELEMENTS
from anyshape.frontend.importer_onnx.table import Call, Condition
from anyshape.frontend.symbols import known as k
from anyshape.frontend.symbols.known import MOST, Known, Ratio, Unknown, known
from anyshape.frontend.symbols.numpy_arrays import numpy_dtype
from anyshape.sym.expr import Expr, floordiv, product
from anyshape.sym.prover import prove_nonnegative

Fold = Callable[[Call], Any]
FOLDS: dict[str, Fold] = {}


def folds(*names: str, free: bool = False, large: bool = False) -> Callable[[Fold], Fold]:
    """Makes the function the rule of these operators. free: operands need not be known. large: nor be small; what cuts
    weights to pieces and joins them costs time and memory in each call."""
    def add(function: Fold) -> Fold:
        def rule(c: Call) -> Any:
            if not free and not all(one is None or (isinstance(one, Known) and (
                    one.array.size <= MOST or (large and not one.symbolic))) for one in c.inputs):
                return None
            return function(c)
        for name in names:
            FOLDS[name] = rule
        return function
    return add


def _array(c: Call, place: int) -> np.ndarray:
    return c.at(place).array  # type: ignore[no-any-return]


@folds("Constant", free=True)
def constant(c: Call) -> Any:
    for name, dtype in (("value_float", "f32"), ("value_floats", "f32"), ("value_int", "i64"), ("value_ints", "i64")):
        found = c.attr(name)
        if found is not None:
            return known(np.asarray(found, numpy_dtype(dtype)))
    for name in ("value_string", "value_strings"):
        if c.attr(name) is not None:
            return known(np.asarray(c.attr(name), object), "string")
    found = c.attr("value")
    return None if found is None else known(found)


@folds("Shape", free=True)
def shape(c: Call) -> Any:
    if not c.has(0):
        return None
    dims = c.kind(0).shape
    start, end = c.attr("start", 0), c.attr("end", len(dims))
    start, end = (max(0, min(n + len(dims) if n < 0 else n, len(dims))) for n in (start, end))
    return k.sizes(dims[start:max(start, end)])


@folds("Size", free=True)
def size(c: Call) -> Any:
    return known(np.array(product(c.kind(0).shape), object), "i64") if c.has(0) else None


@folds("Identity", free=True)
def identity(c: Call) -> Any:
    return c.at(0)


def _whole(*operands: Known) -> bool:
    return all(one.dtype in ("i64", "i32", "bool", "i8", "i16", "u8") for one in operands)


def _arithmetic(function: Callable[..., Any]) -> Fold:
    def rule(c: Call) -> Any:
        operands = [c.at(place) for place in range(len(c.inputs))]
        if is_float(operands[0].dtype) and any(one.symbolic for one in operands):
            return _floats(c.name, operands)
        if not _whole(*operands) or operands[0].dtype == "bool":
            return None
        result = operands[0]
        for other in operands[1:]:
            if c.name in ("Div", "Mod"):
                for divisor in other.items():  # a model that divides by a size takes it not to be 0
                    if isinstance(divisor, Expr):
                        (c.assume if prove_nonnegative(c.t.sizes.facts(), divisor) else c.presume)(divisor - 1)
            if c.name == "Div":  # rounds toward zero: a formula for each sign
                for divided in result.items():
                    if isinstance(divided, Expr):
                        c.presume(divided)
            result = k.each(lambda a, b: function(c.t.sizes.facts(), a, b), result, other, dtype=result.dtype)
        return result
    return rule


def _floats(name: str, operands: Sequence[Known]) -> Any:
    """Arithmetic of floats that are made of sizes; exact where these are below 2^24."""
    if name not in ("Add", "Sub", "Mul", "Div"):
        return None
    result = operands[0]
    for other in operands[1:]:
        result = k.each(lambda a, b: k.rational_arithmetic(name, a, b), result, other, dtype=result.dtype)
    return result


folds("Add", "Sum")(_arithmetic(lambda facts, a, b: a + b))
folds("Sub")(_arithmetic(lambda facts, a, b: a - b))
folds("Mul")(_arithmetic(lambda facts, a, b: a * b))
folds("Div")(_arithmetic(k.divided))
folds("Max")(_arithmetic(lambda facts, a, b: k.largest(a, b)))
folds("Min")(_arithmetic(lambda facts, a, b: k.smallest(a, b)))
folds("Pow")(_arithmetic(lambda facts, a, b: k.power(a, b)))


@folds("Mod")
def modulo(c: Call) -> Any:
    if c.attr("fmod", 0):
        return None
    return _arithmetic(k.remainder)(c)


@folds("Neg")
def negative(c: Call) -> Any:
    return k.each(lambda a: -a, c.at(0), dtype=c.at(0).dtype) if _whole(c.at(0)) else None


@folds("Abs")
def absolute(c: Call) -> Any:
    def one(a: Any) -> Any:
        if isinstance(a, Expr):
            if k.compared(c.t.sizes.facts(), "ge", a, 0):
                return a
            return -a
        return abs(a)
    return k.each(one, c.at(0), dtype=c.at(0).dtype) if _whole(c.at(0)) else None


@folds("Floor", "Ceil")
def floor(c: Call) -> Any:
    one = c.at(0)
    if not one.symbolic:
        return None

    def rounded(item: Any) -> Any:
        if not isinstance(item, Ratio):
            return item if isinstance(item, Expr) else float(math.floor(item) if c.name == "Floor" else math.ceil(item))
        return floordiv(item.over, item.under) if c.name == "Floor" else -floordiv(-item.over, item.under)
    return k.each(rounded, one, dtype=one.dtype)


def _comparison(name: str) -> Fold:
    def rule(c: Call) -> Any:
        a, b = (_integral(c.at(place)) for place in range(2))
        if a is None or b is None:
            return None
        if not (a.symbolic or b.symbolic) and not _whole(a, b):
            return None
        try:
            return k.each(lambda x, y: k.compared(c.t.sizes.facts(), name, x, y), a, b, dtype="bool")
        except Unknown:
            if a.array.size == b.array.size == 1:
                c.ask(Condition(name, a.items()[0], b.items()[0]))
            raise
    return rule


def _integral(one: Known) -> Known | None:
    """An operand of a comparison with sizes: whole floats as whole numbers; None where there is a fraction in it."""
    if not one.symbolic and not (is_float(one.dtype) and one.array.size == 1 and float(one.items()[0]).is_integer()):
        return one
    items = one.items()
    if any(isinstance(item, Ratio) or (isinstance(item, float) and not item.is_integer()) for item in items):
        return None
    array = np.empty(len(items), object)
    array[:] = [item if isinstance(item, Expr) else int(item) for item in items]
    return Known(array.reshape(one.shape), one.dtype)


for _operator, _name in (("Equal", "eq"), ("Less", "lt"), ("LessOrEqual", "le"), ("Greater", "gt"),
                         ("GreaterOrEqual", "ge")):
    folds(_operator)(_comparison(_name))


def _logic(function: Callable[..., Any]) -> Fold:
    def rule(c: Call) -> Any:
        operands = [c.at(place) for place in range(len(c.inputs))]
        return k.each(function, *operands, dtype="bool") if all(one.dtype == "bool" for one in operands) else None
    return rule


folds("And")(_logic(lambda a, b: bool(a and b)))
folds("Or")(_logic(lambda a, b: bool(a or b)))
folds("Xor")(_logic(lambda a, b: bool(a != b)))
folds("Not")(_logic(lambda a: not a))


@folds("Where")
def where(c: Call) -> Any:
    return k.each(lambda condition, a, b: a if condition else b, c.at(0), c.at(1), c.at(2), dtype=c.at(1).dtype)


def _truncated(c: Call, item: Any) -> Any:
    if not isinstance(item, Ratio):
        return item if isinstance(item, Expr) else int(item)
    c.presume(item.over)  # rounds toward zero: a formula for each sign
    return k.divided(c.t.sizes.facts(), item.over, item.under)


SIZED = ("i64", "i32", "f32", "f64")  # a formula of sizes may have: models cast lengths to floats, for `Range` mostly


@folds("Cast", "CastLike")
def cast(c: Call) -> Any:
    one = c.at(0)
    dtype = c.at(1).dtype if c.name == "CastLike" else ELEMENTS.get(c.attr("to"), "")
    if one.symbolic:
        if dtype not in SIZED or one.dtype not in SIZED:
            return None
        if is_float(one.dtype) and not is_float(dtype):
            return k.each(lambda item: _truncated(c, item), one, dtype=dtype)
        return Known(one.array, dtype)
    if not _whole(one) and one.dtype not in ("f32", "f64", "f16"):
        return None
    if dtype not in ("i64", "i32", "f32", "f64", "f16", "bool", "i8", "i16", "u8", "bf16"):
        return None
    if one.dtype.startswith("f") and not np.all(np.isfinite(one.array)):
        return None
    return known(one.array.astype(numpy_dtype(dtype)), dtype)


# ---- shapes


@folds("Reshape", large=True)
def reshape(c: Call) -> Any:
    wanted = [int(n) for n in c.at(1).items() if not isinstance(n, Expr)] if len(c.inputs) > 1 else list(
        c.attr("shape", ()))
    array = _array(c, 0)
    if len(c.inputs) > 1 and len(wanted) != c.at(1).array.size:
        return None
    if not c.attr("allowzero", 0):
        wanted = [array.shape[d] if n == 0 else n for d, n in enumerate(wanted)]
    return Known(array.reshape(wanted), c.at(0).dtype)


@folds("Squeeze", large=True)
def squeeze(c: Call) -> Any:
    axes = c.ints(1, "axes")
    array = _array(c, 0)
    chosen = None if axes is None else tuple(c.dim(axis, array.ndim) for axis in axes)
    return Known(np.squeeze(array, chosen), c.at(0).dtype)


@folds("Unsqueeze", large=True)
def unsqueeze(c: Call) -> Any:
    return Known(np.expand_dims(_array(c, 0), tuple(c.ints(1, "axes"))), c.at(0).dtype)


@folds("Flatten", large=True)
def flatten(c: Call) -> Any:
    array, axis = _array(c, 0), c.attr("axis", 1)
    axis = axis + array.ndim if axis < 0 else axis
    return Known(array.reshape(math.prod(array.shape[:axis]), -1), c.at(0).dtype)


@folds("Transpose")
def transpose(c: Call) -> Any:
    return Known(np.transpose(_array(c, 0), c.attr("perm")), c.at(0).dtype)


@folds("Concat", large=True)
def concat(c: Call) -> Any:
    parts = [k.objects(one) if any(other.symbolic for other in c.inputs) else one.array for one in c.inputs]
    if c.at(0).dtype == "string":
        return None
    return known(np.concatenate(parts, c.attr("axis", 1)), c.at(0).dtype)


@folds("Gather")
def gather(c: Call) -> Any:
    if c.at(1).symbolic or c.at(0).array.ndim == 0:
        return None
    return known(np.take(_array(c, 0), _array(c, 1), c.attr("axis", 0)), c.at(0).dtype)


@folds("Slice", large=True)
def slice_(c: Call) -> Any:
    array = _array(c, 0)
    if len(c.inputs) > 1:
        starts, ends = c.at(1).items(), c.at(2).items()
        axes = c.at(3).items() if c.has(3) else range(len(starts))
        steps = c.at(4).items() if c.has(4) else [1] * len(starts)
    else:
        starts, ends = c.attr("starts"), c.attr("ends")
        axes, steps = c.attr("axes", range(len(starts))), [1] * len(starts)
    index = [slice(None)] * array.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if any(isinstance(n, Expr) for n in (start, end, axis, step)):
            return None
        end = None if step < 0 and end < -array.shape[axis] else end
        index[axis] = slice(int(start), None if end is None else int(end), int(step))
    return known(array[tuple(index)], c.at(0).dtype)


@folds("Split", large=True)
def split(c: Call) -> Any:
    array, axis = _array(c, 0), c.attr("axis", 0)
    parts = c.ints(1, "split")
    if parts is None:
        count = c.attr("num_outputs", len(c.node.outputs))
        each = -(-array.shape[axis] // count)
        parts = [each] * (count - 1) + [array.shape[axis] - each * (count - 1)]
    found = np.split(array, np.cumsum(parts)[:-1], axis)
    return tuple(known(part, c.at(0).dtype) for part in found)


@folds("Expand")
def expand(c: Call) -> Any:
    if c.at(1).symbolic:
        return None
    shape = np.broadcast_shapes(_array(c, 0).shape, tuple(int(n) for n in c.at(1).items()))
    if math.prod(shape) > MOST:
        return None
    return Known(np.broadcast_to(_array(c, 0), shape), c.at(0).dtype)


@folds("Tile")
def tile(c: Call) -> Any:
    if c.at(1).symbolic or math.prod(c.at(1).items()) * _array(c, 0).size > MOST:
        return None
    return Known(np.tile(_array(c, 0), [int(n) for n in c.at(1).items()]), c.at(0).dtype)


@folds("ConstantOfShape")
def constant_of_shape(c: Call) -> Any:
    value = c.attr("value")
    if c.at(0).symbolic or math.prod(c.at(0).items()) > MOST:
        return None
    value = np.zeros(1, np.float32) if value is None else value
    return known(np.full([int(n) for n in c.at(0).items()], value.reshape(-1)[0], value.dtype))


@folds("Range")
def range_(c: Call) -> Any:
    if any(one.symbolic for one in c.inputs) or not _whole(*c.inputs):
        return None
    start, limit, step = (one.items()[0] for one in c.inputs)
    if step == 0 or abs(limit - start) / abs(step) > MOST:
        return None
    return known(np.arange(start, limit, step).astype(numpy_dtype(c.at(0).dtype)))


def _reduced(function: Callable[[Any, Any], Any], first: Any) -> Fold:
    def rule(c: Call) -> Any:
        one = c.at(0)
        if not _whole(one):
            return None
        axes = c.ints(1, "axes")
        if not axes:
            if c.attr("noop_with_empty_axes", 0):
                return one
            axes = tuple(range(one.array.ndim))
        axes = tuple(c.dim(axis, one.array.ndim) for axis in axes)
        return k.product_of(one, axes, bool(c.attr("keepdims", 1)), function, first)
    return rule


folds("ReduceProd")(_reduced(lambda a, b: a * b, 1))
folds("ReduceSum")(_reduced(lambda a, b: a + b, 0))
folds("ReduceMax")(_reduced(k.largest, None))
folds("ReduceMin")(_reduced(k.smallest, None))


@folds("ScatterND")
def scatter_nd(c: Call) -> Any:
    if c.attr("reduction", "none") != "none" or c.at(1).symbolic:
        return None
    array = k.objects(c.at(0)).copy()
    places, updates = _array(c, 1), k.objects(c.at(2))
    for index in np.ndindex(*places.shape[:-1]):
        array[tuple(int(n) for n in places[index])] = updates[index]
    return known(array, c.at(0).dtype)


@folds("NonZero")
def nonzero(c: Call) -> Any:
    if c.at(0).symbolic:
        raise Unknown
    return known(np.array(np.nonzero(np.atleast_1d(_array(c, 0))), np.int64))
