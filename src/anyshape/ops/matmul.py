"""The matrix product, done by the target's library: [*B, M, K] @ [*B, K, N] -> [*B, M, N].

    matmul_add(a, b, c | alpha, beta)    alpha * (a @ b) + beta * c, rounded once; beta 0: c is not read

With `rounded`, bf16 or f16, operands in f32 are rounded to that first, and so is the result, whatever `dtype` it has.
"""
from __future__ import annotations

from anyshape.ir.types import TensorType
from anyshape.ops.rules import Attrs, Inputs, Types, add_row, fail, native, same_device, tensor

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
    if a.rank != b.rank or a.rank < 2:
        fail(name, f"{a} and {b} need one rank of at least 2", "reshape and broadcast first")
    if a.shape[:-2] != b.shape[:-2]:
        fail(name, f"{a} and {b} differ in their batch dims", "broadcast first")
    if a.shape[-1] != b.shape[-2]:
        fail(name, f"{a} has {a.shape[-1]} columns, {b} has {b.shape[-2]} rows")
    return (TensorType(str(dtype), a.shape[:-1] + b.shape[-1:], None, same_device(name, (a, b))),)


def _infer_add(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    (result,), c = _infer(name, inputs[:2], attrs), tensor(name, inputs, 2)
    if c.dtype != attrs.get("rounded", result.dtype) or c.shape != result.shape:
        fail(name, f"{c} is added to {result}", "cast and broadcast it first")
    same_device(name, (c, result))
    for key in ("alpha", "beta"):
        if not isinstance(attrs[key], (int, float)):
            fail(name, f"{key} is {attrs[key]!r}, not a number")
    return (result,)


OPTIONAL = ("rounded", "dtype")
add_row("matmul", "library", "a, b", _infer, optional=OPTIONAL)
add_row("matmul_add", "library", "a, b, c | alpha, beta", _infer_add, optional=OPTIONAL)
