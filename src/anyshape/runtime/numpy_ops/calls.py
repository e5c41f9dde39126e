"""The list of operators that numpy does, and calls of them by a step's template (ops/extern.py).

A template's entries become numbers, texts and arrays, and nothing else: a file may name what is on the list, with any
arguments; what does not fit is an error, and no result that is none of the declared size is taken.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from anyshape.base.errors import AnyShapeError, VerifyError
from anyshape.ir.graph import Attr
from anyshape.ops.extern import check_template
from anyshape.runtime.numpy_ops import (
    complex_numbers,
    convolution,
    elements,
    linear_algebra,
    pairwise,
    placing,
    pooling,
    random_numbers,
    recurrent,
    resize,
    sampling,
    searching,
    special,
    statistics,
)

OWN = "anyshape."  # targets that are our own ops, whose attributes stand in place of a template
_CHECKS: Mapping[str, Callable[..., Any]] = MappingProxyType({**linear_algebra.CHECKS, **searching.CHECKS})
_OPERATORS: Mapping[str, Callable[..., Any]] = MappingProxyType({
    "aten.convolution.default": convolution.aten_convolution,
    **complex_numbers.OPERATORS, **elements.OPERATORS, **linear_algebra.OPERATORS, **pairwise.OPERATORS,
    **placing.OPERATORS, **pooling.OPERATORS, **recurrent.OPERATORS, **resize.OPERATORS, **sampling.OPERATORS,
    **searching.OPERATORS, **special.OPERATORS, **statistics.OPERATORS, **_CHECKS,
})
_OWN: Mapping[str, Callable[..., Any]] = MappingProxyType({"convolution": convolution.convolve, **special.OWN})
_KINDS = ("operand", "list", "none", "int", "float", "bool", "str", "dtype", "permuted", "memory_format", "layout",
          "device")


def reason_against(target: str, template: Attr, operands: int, effect: int = 0) -> str:
    """Why numpy does not do such a call; "" where it does."""
    if target.startswith(OWN):
        return "" if target.removeprefix(OWN) in _OWN else f"there is no native routine for {target}"
    if target not in (random_numbers.OPERATORS if effect and target not in _CHECKS else _OPERATORS):
        return f"there is no native routine for {target}"
    try:
        check_template(template, operands)
    except VerifyError as error:
        return error.what
    return ""


def draws(target: str) -> bool:
    """Whether an operator draws random numbers."""
    return target in random_numbers.OPERATORS


def call(target: str, template: Attr, operands: Sequence[Any], where: str = "", effect: int = 0,
         drawn: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    """The results of an operator on the list, for arrays (half precision as f32) and numbers; in place of a result that
    few programs read stands a function that makes it.

    Args:
        effect: of the step. drawn: what an operator that draws random numbers takes before its arguments
            (random_numbers.py).

    Raises:
        VerifyError: it is not on the list, or its arguments do not fit.
    """
    reason = reason_against(target, template, len(operands), effect)
    if reason:
        raise VerifyError(f"{target} cannot run without PyTorch", where=where, why=reason,
                          do="run the program with PyTorch")
    try:
        if target.startswith(OWN):
            attrs: Any = template
            found = _own(target.removeprefix(OWN), dict(attrs), operands)
        else:
            parts: Any = template
            arguments, keywords = parts
            operator = _OPERATORS.get(target) or random_numbers.OPERATORS[target]
            found = operator(*drawn, *(_value(entry, operands) for entry in arguments[1:]),
                             **{name: _value(entry, operands) for name, entry in keywords[1:]})
    except AnyShapeError:
        raise
    except (ArithmeticError, AttributeError, IndexError, KeyError, MemoryError, TypeError, ValueError) as error:
        raise VerifyError(f"{target} cannot run with these arguments", where=where, why=str(error)[:300],
                          do="look at what it is called with, and save the program again") from error
    return found if isinstance(found, tuple) else (found,)


def _own(op: str, attrs: Mapping[str, Any], operands: Sequence[Any]) -> Any:
    if op in special.OWN:
        return special.OWN[op](*operands)
    x, w, *bias = operands
    return _OWN[op](x, w, bias[0] if bias else None, attrs["stride"], attrs["padding"], attrs["dilation"],
                    attrs["groups"], last=True)


def _value(entry: Any, operands: Sequence[Any]) -> Any:
    """What an entry of a template stands for."""
    tag = entry[0]
    if tag == "operand":
        return operands[entry[1]]
    if tag == "list":
        return [_value(item, operands) for item in entry[1:]]
    if tag == "permuted":
        return operands[entry[1]].transpose(entry[2:])
    if tag == "none":
        return None
    if tag == "complex":
        return complex(entry[1], entry[2])
    if tag not in _KINDS:
        raise ValueError(f"{entry!r} is nothing that numpy knows")
    return entry[1]
