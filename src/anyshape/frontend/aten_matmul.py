"""Translations of ATen matrix products: one `matmul` row and what is added to it.

    aten.addmm(bias [n], x [m, k], w [k, n])  -->  p = matmul(x, w); add(p, bias)

In half precision a product with a sum is one row, `matmul_add`: it is rounded once, after the sum.
"""
from __future__ import annotations

from typing import Any

import torch

from anyshape.base.errors import InputError
from anyshape.frontend.aten_table import Decline, Mismatch, Translator, is_float, translates
from anyshape.ir.graph import Value
from anyshape.ir.types import size_of
from anyshape.sym.expr import product

aten = torch.ops.aten


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
