"""Operators of ATen in graphs that were not traced: by their translation, or as an extern call, a step by PyTorch."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from anyshape.base.errors import VerifyError
from anyshape.frontend.aten.table import Decline, Translator, translation_of
from anyshape.ir.build import Builder
from anyshape.ir.graph import Attr, Value
from anyshape.sym.expr import Expr
from anyshape.torch_compat.dtypes import DTYPE_NAMES

_LEAVES = ((bool, "bool"), (int, "int"), (float, "float"), (str, "str"))


def translated(t: Translator, target: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], types: Any
               ) -> tuple[Any, str]:
    """What the translation of an operator gives, and ""; or None, and why there is none.

    Args:
        types: of the results, which no trace says: one or a tuple.
    """
    t.result = types
    translation = translation_of(target)
    if translation is None:
        return None, "no translation"
    mark = len(t.builder.nodes)
    try:
        return translation(t, *arguments, **keywords), ""
    except (Decline, VerifyError, AssertionError, AttributeError) as reason:
        del t.builder.nodes[mark:]
        return None, str(reason) or "its translation does not carry this case"


def extern_call(builder: Builder, target: str, arguments: Sequence[Any], keywords: Mapping[str, Any], types: Any,
                resolved: Callable[[Any], Any], effect: bool = False) -> Any:
    """Appends a call; see ops/extern.py.

    Args:
        target: of an overload, such as "aten.sort.stable". types: of the results, one or a tuple.
        resolved: makes an operand of what an importer has for one, and leaves all else.
        effect: the call does more than give its results, as one that draws random numbers.

    Returns:
        The result, or a tuple where `types` is one.

    Raises:
        Decline: an argument has no form in a call.
    """
    operands: list[Any] = []

    def entry(value: Any) -> tuple[Attr, ...]:
        value = resolved(value)
        if isinstance(value, (Value, Expr)):
            operands.append(value)
            return ("operand", len(operands) - 1)
        if isinstance(value, (list, tuple)):
            return ("list", *(entry(one) for one in value))
        if value is None:
            return ("none",)
        if isinstance(value, torch.dtype):
            return ("dtype", DTYPE_NAMES[value])
        for kind, tag in _LEAVES:
            if isinstance(value, kind):
                return (tag, value)  # type: ignore[return-value]
        raise Decline(f"an argument of type {type(value).__name__}")

    given = tuple(entry(one) for one in arguments)
    named = tuple((key, entry(one)) for key, one in keywords.items())
    flat = types if isinstance(types, tuple) else (types,)
    results = builder.multi("extern", *operands, name=target.split(".")[1], types=flat, target=target,
                            template=(("args", *given), ("kwargs", *named)), effect=effect)
    return results if isinstance(types, tuple) else results[0]
