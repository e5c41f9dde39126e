"""The matrix product, done by the target's library: [*B, M, K] @ [*B, K, N] -> [*B, M, N].

    matmul_add(a, b, c | alpha, beta)    alpha * (a @ b) + beta * c, rounded once; beta 0: c is not read
    matmul_bytes(a, b)                   u8 by i8 in i32, exact but that sums wrap around

With `columns`, b [K, N], of so many columns, is prepacked, as a constant may be: it lies in panels, [N/32, K, 32, 1] of
f32 and [N/32, K/4, 32, 4] of i8, rounded up and filled up with zeros (ir/panels.py).

    grouped(x, weights, ends)            [S, K], [E, K, N], [E] -> [S, N]: rows ends[e-1]:ends[e] of x @ weights[e]
    grouped_inner(x, y, ends)            [M, S], [S, N], [E] -> [E, M, N]: columns of x @ rows of y, of each group

Behind the ends of `grouped` may stand the order of a route, order [S] i64 (ops/routing.py):

    gathered     row i of x is x[order[i]]: x may have another number of rows
    scattered    row i of the result is written to place order[i]: the order is a permutation (of convolutions)

With `rounded`, bf16 or f16, operands in f32 are rounded to that first, and so is the result, whatever `dtype` it has.

The ends of groups (i32 or i64) are what Python's slices take: a negative one counts from S, what is beyond S is S, and
where they decrease a group is empty and the next one begins there; groups are done in order. Rows past the last end,
and products over nothing, are zero.
"""
from __future__ import annotations

from anyshape.ir.panels import panels_of
from anyshape.ir.types import TensorType
from anyshape.ops.type_rules import (
    ORDERED,
    Attrs,
    Inputs,
    Types,
    add_row,
    fail,
    native,
    ordered_rows,
    same_device,
    tensor,
)

HALF = ("bf16", "f16")


def _infer(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    a, b = tensor(name, inputs, 0), tensor(name, inputs, 1)
    rounded = attrs.get("rounded", a.dtype)
    dtype = attrs.get("dtype", rounded)
    if "rounded" not in attrs and ("dtype" in attrs or a.dtype != b.dtype):
        fail(name, f"operands have dtypes {a.dtype} and {b.dtype}, the result {dtype}", "insert a cast")
    if "rounded" in attrs and (rounded not in HALF or not {a.dtype, b.dtype, dtype} <= {rounded, "f32"}):
        fail(name, f"{a.dtype}, {b.dtype} and {dtype} are not rounded to {rounded}", "insert a cast")
    native(name, a.dtype)
    if a.dtype == "bool":
        fail(name, "bool has no products")
    if "columns" in attrs:
        return _prepacked(name, a, b, attrs)
    if a.rank != b.rank or a.rank < 2:
        fail(name, f"{a} and {b} need one rank of at least 2", "reshape and broadcast first")
    if a.shape[:-2] != b.shape[:-2]:
        fail(name, f"{a} and {b} differ in their batch dims", "broadcast first")
    if a.shape[-1] != b.shape[-2]:
        fail(name, f"{a} has {a.shape[-1]} columns, {b} has {b.shape[-2]} rows")
    return (TensorType(str(dtype), a.shape[:-1] + b.shape[-1:], None, same_device(name, (a, b))),)


def _prepacked(name: str, a: TensorType, b: TensorType, attrs: Attrs) -> Types:
    """The result of a product whose right operand lies in panels."""
    columns, inner = attrs["columns"], a.shape[-1] if a.rank > 1 else None
    result = {("f32", "f32"): "f32", ("u8", "i8"): "i32"}.get((a.dtype, b.dtype))
    if "rounded" in attrs or result is None or not (isinstance(columns, int) and columns >= 0
                                                    and isinstance(inner, int)
                                                    and b.shape == panels_of(inner, columns, b.dtype)):
        fail(name, f"{b} are no panels of {columns} columns, as {a} wants them")
    return (TensorType(str(result), (*a.shape[:-1], columns), None, same_device(name, (a, b))),)


def _infer_add(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    (result,), c = _infer(name, inputs[:2], attrs), tensor(name, inputs, 2)
    if c.dtype != attrs.get("rounded", result.dtype) or c.shape != result.shape:
        fail(name, f"{c} is added to {result}", "cast and broadcast it first")
    same_device(name, (c, result))
    for key in ("alpha", "beta"):
        if not isinstance(attrs[key], (int, float)):
            fail(name, f"{key} is {attrs[key]!r}, not a number")
    return (result,)


def _infer_bytes(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    a, b = tensor(name, inputs, 0), tensor(name, inputs, 1)
    if (a.dtype, b.dtype) != ("u8", "i8"):
        fail(name, f"operands have dtypes {a.dtype} and {b.dtype}", "give u8 and i8")
    if "columns" in attrs:
        return _prepacked(name, a, b, attrs)
    if a.rank != b.rank or a.rank < 2 or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        fail(name, f"{a} and {b} are no matrices that can be multiplied")
    return (TensorType("i32", a.shape[:-1] + b.shape[-1:], None, same_device(name, (a, b))),)


def _infer_groups(name: str, inputs: Inputs, attrs: Attrs, inner: bool) -> Types:
    x, y, ends, *behind = (tensor(name, inputs, position) for position in range(len(inputs)))
    native(name, x.dtype)
    if x.dtype != y.dtype or x.dtype not in ("f32", "f64", *HALF):
        fail(name, f"operands have dtypes {x.dtype} and {y.dtype}", "cast both to one float dtype")
    if ends.dtype not in ("i32", "i64") or ends.rank != 1:
        fail(name, f"{ends} are no ends of groups", "give i32 or i64 of rank 1")
    if x.rank != 2 or y.rank != (2 if inner else 3):
        fail(name, f"{x} and {y} are no matrix and {'matrix' if inner else 'matrices'}")
    if x.shape[-1] != y.shape[-2]:
        fail(name, f"{x} has {x.shape[-1]} columns, {y} has {y.shape[-2]} rows")
    if not inner and ends.shape[0] != y.shape[0]:
        fail(name, f"{ends} for {y.shape[0]} groups")
    rows, more = ordered_rows(name, attrs, x, behind)
    if more:
        fail(name, f"{len(inputs)} operands were given")
    shape = (*ends.shape, x.shape[0], y.shape[1]) if inner else (rows, y.shape[2])
    return (TensorType(x.dtype, shape, None, same_device(name, (x, y, ends, *behind))),)


def _infer_grouped(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    return _infer_groups(name, inputs, attrs, False)


def _infer_grouped_inner(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    return _infer_groups(name, inputs, attrs, True)


OPTIONAL = ("rounded", "dtype", "columns")
add_row("matmul", "library", "a, b", _infer, optional=OPTIONAL)
add_row("matmul_add", "library", "a, b, c | alpha, beta", _infer_add, optional=OPTIONAL)
add_row("matmul_bytes", "library", "a, b", _infer_bytes, optional=("columns",))
PRODUCTS = ("matmul", "matmul_add", "matmul_bytes")
GROUPED = ("grouped", "grouped_inner")  # products of groups of rows
add_row("grouped", "library", "x, weights, ends, ...", _infer_grouped, optional=ORDERED[:1])
add_row("grouped_inner", "library", "x, y, ends", _infer_grouped_inner)
