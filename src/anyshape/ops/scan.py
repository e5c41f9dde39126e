"""Scan rows: element k along `dim` is `combine` over the elements up to k. f32 is summed up in f64, as PyTorch does."""
from __future__ import annotations

from anyshape.ir.types import TensorType, kind_of
from anyshape.ops.reduce import NUMBER
from anyshape.ops.type_rules import Attrs, Inputs, Types, add_row, dims_in, fail, native, tensor

ROWS = (("cumsum", "add"), ("cumprod", "mul"))


def _infer(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    source = tensor(name, inputs, 0)
    native(name, source.dtype)
    if kind_of(source.dtype) not in NUMBER:
        fail(name, f"it is defined on {', '.join(NUMBER)}, and the operand is {source.dtype}", "insert a cast")
    dims_in(name, (attrs["dim"],), source.rank)
    return (TensorType(source.dtype, source.shape, None, source.device),)


for _name, _combine in ROWS:
    add_row(_name, "scan", "x | dim", _infer, combine=_combine)
