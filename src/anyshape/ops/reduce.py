"""Reduction rows: `combine` over some dims. bf16 and f16 accumulate in f32, other dtypes in themselves."""
from __future__ import annotations

from functools import partial

from anyshape.ir.types import TensorType, kind_of
from anyshape.ops.type_rules import Attrs, Inputs, Types, add_row, dims_in, fail, native, tensor

NUMBER = ("float", "int", "uint")
BOOL = ("bool",)

# name, combine, dtype kinds
ROWS = (
    ("sum", "add", NUMBER),
    ("prod", "mul", NUMBER),
    ("amax", "maximum", NUMBER),
    ("amin", "minimum", NUMBER),
    ("any", "or", BOOL),
    ("all", "and", BOOL),
)


def _infer(kinds: tuple[str, ...], name: str, inputs: Inputs, attrs: Attrs) -> Types:
    source = tensor(name, inputs, 0)
    native(name, source.dtype)
    if kind_of(source.dtype) not in kinds:
        fail(name, f"it is defined on {', '.join(kinds)}, and the operand is {source.dtype}", "insert a cast")
    dims = dims_in(name, attrs["dims"], source.rank)
    if not dims or dims != tuple(sorted(dims)):
        fail(name, f"dims {dims} are not a sorted tuple of at least one dim")
    keep = attrs["keep"]
    if not isinstance(keep, bool):
        fail(name, f"keep is {keep!r}, not a bool")
    if keep:
        shape = tuple(1 if d in dims else item for d, item in enumerate(source.shape))
    else:
        shape = tuple(item for d, item in enumerate(source.shape) if d not in dims)
    return (TensorType(source.dtype, shape, None, source.device),)


for _name, _combine, _kinds in ROWS:
    add_row(_name, "reduce", "x | dims, keep", partial(_infer, _kinds), combine=_combine)
