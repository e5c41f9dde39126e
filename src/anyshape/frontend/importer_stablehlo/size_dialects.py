"""Constant folding of the dialects shape, tensor and arith, in which TensorFlow's converter computes sizes.

    shape.shape_of -> shape.broadcast -> dynamic_broadcast_in_dim  -->  Known([n, 4]), which is the result's shape

Shapes and numbers alone are small tensors of whole numbers. That two shapes can be broadcast is what the module is
right for: two sizes that meet are one, where none of them is the number 1.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from anyshape.frontend.aten.table import Decline
from anyshape.frontend.importer_stablehlo.fold import FOLDS, each, folds, made, objects
from anyshape.frontend.importer_stablehlo.shapes import reshaped, spread
from anyshape.frontend.importer_stablehlo.table import ROWS, Call, Equal, translates
from anyshape.frontend.symbols import known as k
from anyshape.frontend.symbols.known import Known, Unknown, sizes
from anyshape.ir.graph import Value
from anyshape.sym.expr import Size, floordiv, product
from anyshape.sym.prover import prove_equal, prove_nonnegative

WITNESS = Known(np.array(True), "bool")


def _number(size: Size, dtype: str) -> Known:
    array = np.empty((), object)
    array[()] = size
    return made(array, dtype)


def _index(c: Call, place: int) -> int:
    """An operand that says which one, a number."""
    found = c.sizes(place)[0]
    if not isinstance(found, int):
        raise Decline("a place that is a size")
    return found


# ---- shapes


@folds("shape.shape_of", free=True)
def shape_of(c: Call) -> Any:
    return sizes(c.sizes_of(0))


@folds("tensor.dim", "shape.dim", free=True)
def dim(c: Call) -> Any:
    return _number(c.sizes_of(0)[_index(c, 1)], "i64")


@folds("tensor.rank", "shape.rank", free=True)
def rank(c: Call) -> Any:
    is_shape = c.operation.name == "shape.rank"
    return _number(c.sizes_of(0)[0] if is_shape else len(c.sizes_of(0)), "i64")


@folds("shape.const_shape", free=True)
def const_shape(c: Call) -> Any:
    return sizes([int(n) for n in np.asarray(c.attr("shape")).reshape(-1)])


@folds("arith.constant", "shape.const_size", "shape.const_witness", free=True)
def constant(c: Call) -> Any:
    value = c.attr("value", c.attr("passing", True))
    return made(np.asarray(value), c.dtype)


@folds("shape.to_extent_tensor", "shape.from_extent_tensor", "shape.size_to_index", "shape.index_to_size",
       "shape.value_as_shape", "shape.value_of", "tensor.cast", free=True)
def same(c: Call) -> Any:
    return c.inputs[0]


@folds("shape.from_extents", "tensor.from_elements")
def from_elements(c: Call) -> Any:
    line = np.empty(len(c.inputs), object)
    line[:] = [one.items()[0] for one in c.inputs]
    shape = c.operation.gives[0].static if c.operation.name == "tensor.from_elements" else None
    return made(line if shape is None else line.reshape(shape), c.dtype)


@folds("shape.split_at")
def split_at(c: Call) -> Any:
    values, index = list(c.sizes(0)), _index(c, 1)
    index += len(values) if index < 0 else 0
    return sizes(values[:index]), sizes(values[index:])


@folds("shape.concat")
def concat(c: Call) -> Any:
    return sizes([*c.sizes(0), *c.sizes(1)])


@folds("shape.get_extent")
def get_extent(c: Call) -> Any:
    return _number(c.sizes(0)[_index(c, 1)], "i64")


@folds("tensor.extract")
def extract(c: Call) -> Any:
    return _number(objects(c.inputs[0])[tuple(_index(c, place) for place in range(1, len(c.inputs)))], c.dtype)


@folds("tensor.splat")
def splat(c: Call) -> Any:
    return _filled(c.inputs[0].items()[0], c.shape, c.dtype)


def _filled(item: Any, shape: Sequence[int], dtype: str) -> Known:
    array = np.empty(shape, object)
    array.fill(item)
    return made(array, dtype)


@folds("shape.num_elements")
def num_elements(c: Call) -> Any:
    return _number(product(c.sizes(0)), "i64")


@folds("shape.broadcast")
def broadcast(c: Call) -> Any:
    shapes = [list(c.sizes(place)) for place in range(len(c.inputs))]
    length = max(len(one) for one in shapes)
    found: list[Size] = [1] * length
    for shape in shapes:
        for place, size in enumerate(shape, length - len(shape)):
            found[place] = _met(c, found[place], size)
    return sizes(found)


def _met(c: Call, a: Size, b: Size) -> Size:
    """The size where two are broadcast.

    Raises:
        Equal: nothing shows that they are one.
    """
    if a == 1 or b == 1:
        return b if a == 1 else a
    if isinstance(a, int) and isinstance(b, int) and a != b:
        raise Decline(f"sizes {a} and {b} meet")
    if prove_equal(c.walk.facts, a, b) is not True:
        raise Equal(a, b)
    return a if isinstance(a, int) else b


@folds("shape.cstr_broadcastable", "shape.assuming_all", "shape.cstr_require", free=True)
def witness(c: Call) -> Any:
    """What is asked for shows where it is used: see `broadcast`."""
    return WITNESS


@folds("shape.cstr_eq")
def cstr_eq(c: Call) -> Any:
    first = c.sizes(0)
    for place in range(1, len(c.inputs)):
        for a, b in zip(first, c.sizes(place), strict=True):
            if a != b and prove_equal(c.walk.facts, a, b) is not True:
                raise Equal(a, b)
    return WITNESS


@folds("shape.shape_eq")
def shape_eq(c: Call) -> Any:
    answers = [k.compared(c.walk.facts, "eq", a, b) for a, b in zip(c.sizes(0), c.sizes(1), strict=False)]
    return made(np.asarray(len(c.sizes(0)) == len(c.sizes(1)) and all(answers)), "bool")


@folds("shape.is_broadcastable")
def is_broadcastable(c: Call) -> Any:
    pairs = list(zip(reversed(c.sizes(0)), reversed(c.sizes(1)), strict=False))
    return made(np.asarray(all(1 in (a, b) or k.compared(c.walk.facts, "eq", a, b) for a, b in pairs)), "bool")


@translates("shape.assuming")
def assuming(c: Call) -> Any:
    return c.walk.run(c.operation.regions[0], ())


# ---- arithmetic of numbers, which is that of tensors of rank 0

_SAME = {"addi": "add", "subi": "subtract", "muli": "multiply", "divsi": "divide", "divui": "divide",
         "remsi": "remainder", "remui": "remainder", "maxsi": "maximum", "minsi": "minimum", "maxui": "maximum",
         "minui": "minimum", "andi": "and", "ori": "or", "xori": "xor", "select": "select", "index_cast": "convert",
         "index_castui": "convert", "extsi": "convert", "trunci": "convert", "sitofp": "convert", "fptosi": "convert",
         "addf": "add", "subf": "subtract", "mulf": "multiply", "divf": "divide", "negf": "negate",
         "maximumf": "maximum", "minimumf": "minimum"}


def _called(target: str) -> Callable[[Call], Any]:
    """The row of another operation, which may read its name."""
    return lambda c: ROWS[target](Call(replace(c.operation, name=target), c.inputs, c.walk))


def _as_stablehlo(name: str) -> None:
    target = f"stablehlo.{name}"
    for arith, other in _SAME.items():
        if other == name:
            if target in FOLDS:
                FOLDS[f"arith.{arith}"] = FOLDS[target]
            if target in ROWS:
                ROWS[f"arith.{arith}"] = _called(target)


for _name in sorted(set(_SAME.values())):
    _as_stablehlo(_name)
FOLDS["shape.add"], FOLDS["shape.mul"] = FOLDS["stablehlo.add"], FOLDS["stablehlo.multiply"]
FOLDS["shape.max"], FOLDS["shape.min"] = FOLDS["stablehlo.maximum"], FOLDS["stablehlo.minimum"]


@folds("arith.extui")
def extui(c: Call) -> Any:
    if c.given(0) != "bool":
        raise Unknown
    return made(c.inputs[0].array.astype(np.int64), c.dtype)


def _whole_division(up: bool) -> Callable[[Call], Any]:
    def rule(c: Call) -> Any:
        def one(a: Any, b: Any) -> Any:
            if not prove_nonnegative(c.walk.facts, b - 1):
                raise Unknown
            return floordiv(a + b - 1, b) if up else floordiv(a, b)
        return each(one, c.inputs[0], c.inputs[1], dtype=c.dtype)
    return rule


folds("arith.floordivsi", "shape.div")(_whole_division(up=False))
folds("arith.ceildivsi", "arith.ceildivui")(_whole_division(up=True))

_PREDICATES = ("EQ", "NE", "LT", "LE", "GT", "GE", "LT", "LE", "GT", "GE")  # arith's, unsigned ones last


@folds("arith.cmpi")
def cmpi(c: Call) -> Any:
    way = _PREDICATES[c.attr("predicate")]

    def one(a: Any, b: Any) -> Any:
        if way == "NE":
            return not k.compared(c.walk.facts, "eq", a, b)
        return k.compared(c.walk.facts, way.lower(), a, b)

    return each(one, c.inputs[0], c.inputs[1], dtype="bool")


# ---- where a number is an element of a tensor


@translates("tensor.from_elements")
def elements(c: Call) -> Any:
    parts = [c.t.reshape(one, (1,)) for one in c.values()]
    return c.t.reshape(parts[0] if len(parts) == 1 else c.op("concat", *parts, dim=0), c.shape)


@translates("tensor.extract")
def element(c: Call) -> Any:
    x: Value = c.value(0)
    for place in range(1, len(c.inputs)):
        x = c.t.window(x, place - 1, _index(c, place), 1)
    return c.t.reshape(x, ())


@translates("tf.Reshape")
def tf_reshape(c: Call) -> Any:
    """What the converter leaves: one size of -1 is what the others leave over."""
    shape, count = list(c.sizes(1)), product(c.sizes_of(0))
    if -1 in shape:
        place = shape.index(-1)
        shape[place] = floordiv(count, product(n for d, n in enumerate(shape) if d != place))
    return reshaped(c, c.value(0), shape)


@translates("tf.BroadcastTo")
def tf_broadcast_to(c: Call) -> Any:
    shape = c.sizes(1)
    return spread(c, shape, range(len(shape) - len(c.sizes_of(0)), len(shape)))


