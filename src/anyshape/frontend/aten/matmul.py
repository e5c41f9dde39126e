"""Translations of ATen matrix products: one `matmul` row and what is added to it.

    aten.addmm(bias [n], x [m, k], w [k, n])  -->  p = matmul(x, w); add(p, bias)

In half precision a product with a sum is one row, `matmul_add`: it is rounded once, after the sum. Products of groups
of rows (mixture of experts) are PyTorch's own operator, and the one that transformers defines in its place.
"""
from __future__ import annotations

from typing import Any

import torch

from anyshape.base.errors import InputError
from anyshape.frontend.aten.table import Decline, Mismatch, Translator, is_float, translates, translates_schema
from anyshape.ir.graph import Value
from anyshape.ir.types import size_of
from anyshape.sym.expr import product
from anyshape.torch_compat import aten


def matmul(t: Translator, a: Value, b: Value) -> Value:
    """[*B, M, K] @ [*B, K, N] with equal batch dims."""
    _fits(t, a, b)
    return t.op("matmul", a, b)


def _fits(t: Translator, a: Value, b: Value) -> None:
    if a.tensor.dtype != b.tensor.dtype:
        raise InputError(f"a product of {a.tensor} and {b.tensor} cannot be taken", where=t.builder.where,
                         why=f"one matrix is {a.tensor.dtype}, the other {b.tensor.dtype}", do="cast one of them")
    if not is_float(a.tensor.dtype):
        raise Decline("a product of whole numbers")
    if a.tensor.shape[-1] != b.tensor.shape[-2]:
        raise Mismatch(a.tensor.shape[-1], b.tensor.shape[-2])
    for have, want in zip(a.tensor.shape[:-2], b.tensor.shape[:-2], strict=True):
        if have != want:
            raise Mismatch(have, want)


@translates(aten.mm.default, aten.bmm.default)
def mm(t: Translator, a: Value, b: Value) -> Value:
    return matmul(t, a, b)


def of_bytes(t: Translator, a: Value, b: Value) -> Value:
    """[*B, M, K] @ [*B, K, N] of i8 or u8, in i32. The routine takes u8 by i8: what is held by the other dtype is moved
    by 128, and that is taken off the sums."""
    def moved(x: Value, dtype: str, by: int) -> Value:
        if x.tensor.dtype == dtype:
            return x
        return t.cast(t.pointwise("add", t.cast(x, "i32"), by, dtype="i32"), dtype)

    def less(total: Value, x: Value, dim: int, by: int) -> Value:
        sums = t.reduce("sum", t.cast(x, "i32"), (x.tensor.rank + dim,), keep=True)
        return t.pointwise("sub", total, t.pointwise("mul", sums, by, dtype="i32"), dtype="i32")

    left, right = moved(a, "u8", 128), moved(b, "i8", -128)
    total = t.op("matmul_bytes", left, right)
    if left is not a:  # (left - 128) @ b
        total = less(total, b, -2, 128)
    return total if right is b else less(total, left, -1, -128)


@translates(aten._int_mm.default)
def int_mm(t: Translator, a: Value, b: Value) -> Value:
    if a.tensor.dtype not in ("i8", "u8") or b.tensor.dtype not in ("i8", "u8"):
        raise Decline(f"a product of {a.tensor.dtype} and {b.tensor.dtype}")
    return of_bytes(t, a, b)


@translates(aten.addmm.default, aten.baddbmm.default)
def addmm(t: Translator, c: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    if size_of(a.tensor.dtype) < 4 and (_is_not(alpha, 1) or _is_not(beta, 0)):
        return _rounded_once(t, c, a, b, beta, alpha)
    return _plus(t, c, matmul(t, a, b), beta, alpha)


def _rounded_once(t: Translator, c: Value, a: Value, b: Value, beta: Any = 1, alpha: Any = 1) -> Value:
    if not isinstance(alpha, (int, float)) or not isinstance(beta, (int, float)):
        raise Decline("the product would be rounded before the sum")
    _fits(t, a, b)
    shape = (*a.tensor.shape[:-1], b.tensor.shape[-1])
    return t.op("matmul_add", a, b, t.broadcast(c, shape), alpha=float(alpha), beta=float(beta))


def _plus(t: Translator, c: Value, x: Value, beta: Any, alpha: Any) -> Value:
    if _is_not(alpha, 1):
        x = t.pointwise("mul", x, alpha)
    if not _is_not(beta, 0):
        return x
    return t.pointwise("add", x, t.pointwise("mul", c, beta) if _is_not(beta, 1) else c)


def _is_not(scalar: Any, number: int) -> bool:
    return not isinstance(scalar, (int, float)) or scalar != number


@translates(aten.addbmm.default)
def addbmm(t: Translator, c: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return _plus(t, c, t.reduce("sum", matmul(t, a, b), (0,)), beta, alpha)


@translates(aten.mv.default)
def mv(t: Translator, a: Value, v: Value) -> Value:
    return t.reshape(matmul(t, a, t.reshape(v, (*v.tensor.shape, 1))), t.out.shape)


@translates(aten.addmv.default)
def addmv(t: Translator, c: Value, a: Value, v: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return _plus(t, c, mv(t, a, v), beta, alpha)


@translates(aten.dot.default, aten.vdot.default)
def dot(t: Translator, a: Value, b: Value) -> Value:
    return t.reduce("sum", t.pointwise("mul", a, b), (0,))


@translates(aten.addr.default)
def addr(t: Translator, c: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    outer = t.pointwise("mul", t.reshape(a, (*a.tensor.shape, 1)), b)
    return _plus(t, c, outer, beta, alpha)


@translates(aten.linear.default)
def linear(t: Translator, x: Value, weight: Value, bias: Value | None = None) -> Value:
    if weight.tensor.rank != 2:
        raise Decline("a weight that is no matrix")
    shape = x.tensor.shape
    rows = t.reshape(x, (product(shape[:-1]), shape[-1]))
    columns = t.permute(weight, (1, 0))
    if bias is not None and size_of(x.tensor.dtype) < 4:
        return t.reshape(_rounded_once(t, bias, rows, columns), t.out.shape)
    result = t.reshape(matmul(t, rows, columns), t.out.shape)
    return result if bias is None else t.pointwise("add", result, bias)


def groups(t: Translator, name: str, x: Value, y: Value, ends: Value) -> Value:
    """An op of ops/matmul.py for groups; `name` grouped or grouped_inner."""
    if x.tensor.dtype != y.tensor.dtype or not t.target.multiplies(x.tensor.dtype):
        raise Decline(f"groups of {x.tensor.dtype} times {y.tensor.dtype} on this processor")
    if ends.tensor.dtype not in ("i32", "i64"):
        raise Decline(f"groups whose ends are {ends.tensor.dtype}")
    pairs = [(x.tensor.shape[-1], y.tensor.shape[-2])]
    if name == "grouped":
        pairs.append((ends.tensor.shape[0], y.tensor.shape[0]))
    for have, want in pairs:
        if have != want:
            raise Mismatch(have, want)
    return t.op(name, x, y, ends)


def turned(t: Translator, x: Value) -> Value:
    """The transposed matrix, or matrices."""
    return t.permute(x, (*range(x.tensor.rank - 2), x.tensor.rank - 1, x.tensor.rank - 2))


@translates(aten._grouped_mm.default)
def grouped_mm(t: Translator, x: Value, y: Value, offs: Value | None = None, bias: Value | None = None,
               out_dtype: torch.dtype | None = None) -> Value:
    if offs is None or bias is not None or t.out.dtype != x.tensor.dtype:
        raise Decline("no ends of groups, or a bias, or another dtype")
    if (x.tensor.rank, y.tensor.rank) == (2, 3):
        return groups(t, "grouped", x, y, offs)
    if (x.tensor.rank, y.tensor.rank) == (2, 2):
        return groups(t, "grouped_inner", x, y, offs)
    raise Decline("groups of columns")


@translates_schema("transformers::grouped_mm_fallback(Tensor input, Tensor weight, Tensor offs) -> Tensor")
def grouped_fallback(t: Translator, input: Value, weight: Value, offs: Value) -> Value:
    return groups(t, "grouped", input, weight, offs)


@translates_schema("transformers::grouped_mm_fallback_backward(Tensor input, Tensor weight, Tensor offs, "
                   "Tensor grad_output) -> (Tensor, Tensor)")
def grouped_fallback_backward(t: Translator, input: Value, weight: Value, offs: Value,
                              grad_output: Value) -> tuple[Value, Value]:
    to_input = groups(t, "grouped", grad_output, turned(t, weight), offs)
    assert t.node is not None
    if t.sizes.size(t.node.meta["val"][1].stride(-2)) == 1:  # as the weights lie
        return to_input, turned(t, groups(t, "grouped_inner", turned(t, grad_output), input, offs))
    return to_input, groups(t, "grouped_inner", turned(t, input), grad_output, offs)
