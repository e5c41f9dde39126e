"""Extern calls of graphs that were not traced: a step by PyTorch whose arguments an importer gives."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from anyshape.frontend.aten.table import Decline
from anyshape.ir.build import Builder
from anyshape.ir.graph import Attr, Value
from anyshape.sym.expr import Expr
from anyshape.torch_compat.dtypes import DTYPE_NAMES

_LEAVES = ((bool, "bool"), (int, "int"), (float, "float"), (str, "str"))


def extern_call(builder: Builder, target: str, arguments: Sequence[Any], keywords: Mapping[str, Any], types: Any,
                resolved: Callable[[Any], Any]) -> Any:
    """Appends a call; see ops/extern.py.

    Args:
        target: of an overload, such as "aten.sort.stable". types: of the results, one or a tuple.
        resolved: makes an operand of what an importer has for one, and leaves all else.

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
                            template=(("args", *given), ("kwargs", *named)), effect=False)
    return results if isinstance(types, tuple) else results[0]
