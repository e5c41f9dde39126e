"""Scan rows: element k along `dim` is `combine` over the elements up to k. f32 is combined in f64, as PyTorch does.

    linear_scan(a, b | dim)   h[k] = a[k] * h[k - 1] + b[k], h[0] = b[0]: a first-order linear recurrence, as
        state-space models have it (Blelloch, Prefix sums and their applications, 1990, section 1.4)
"""
from __future__ import annotations

from anyshape.ir.types import TensorType, kind_of
from anyshape.ops.reduce import NUMBER
from anyshape.ops.type_rules import Attrs, Inputs, Types, add_row, dims_in, fail, native, same_device, tensor

ROWS = (("cumsum", "add"), ("cumprod", "mul"))


def _infer(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    source = tensor(name, inputs, 0)
    native(name, source.dtype)
    if kind_of(source.dtype) not in NUMBER:
        fail(name, f"it is defined on {', '.join(NUMBER)}, and the operand is {source.dtype}", "insert a cast")
    dims_in(name, (attrs["dim"],), source.rank)
    return (TensorType(source.dtype, source.shape, None, source.device),)


def _infer_linear(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    factors, terms = tensor(name, inputs, 0), tensor(name, inputs, 1)
    native(name, terms.dtype)
    if kind_of(terms.dtype) != "float" or factors.dtype != terms.dtype:
        fail(name, f"the operands are {factors.dtype} and {terms.dtype}", "give floats of one dtype; insert a cast")
    if factors.shape != terms.shape:
        fail(name, f"the operands are {factors} and {terms}", "give both one shape; insert a broadcast")
    dims_in(name, (attrs["dim"],), terms.rank)
    return (TensorType(terms.dtype, terms.shape, None, same_device(name, (factors, terms))),)


add_row("linear_scan", "scan", "a, b | dim", _infer_linear, combine="linear")
for _name, _combine in ROWS:
    add_row(_name, "scan", "x | dim", _infer, combine=_combine)
