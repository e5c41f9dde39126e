"""Indexing by 0-dimensional tensors (data-dependent `select`), and their maximum with a size, as operators that need
no number from the data.

    x[:, k]       -->  take(x, (:, k)), which is x[:, :].index_select(1, k).squeeze(1)
    x[:, k] = v   -->  x[:, :].index_copy_(1, k, v.unsqueeze(1))
    max(k, n)     -->  clamp(k, min=n), of a whole number k and a size n

Eager PyTorch reads the number and gives a view of that place. Dynamo takes the number of an input as a constant, so
each has a program of its own, and ends the trace at one that was computed. `take` gives a copy: whether that is seen,
the graph tells as a whole (frontend/capture/copied_parts.py).
"""
from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch

from anyshape import torch_compat as compat

WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)  # uint8 and bool are masks


@contextlib.contextmanager
def positions_traced() -> Iterator[None]:
    """Inside, Dynamo traces these subscripts as `take` and `put_`. Without effect where torch's internals are not as
    expected."""
    names = [f"torch._dynamo.variables.{name}" for name in (
        "builtin.BuiltinVariable.call_function", "TensorVariable.method___setitem__", "TensorVariable",
        "builder.wrap_fx_proxy", "VariableTracker", "builtin.BuiltinVariable", "SymNodeVariable")]
    if not compat.has(*names):
        yield
        return
    call, write, TensorVariable, wrap, VariableTracker, BuiltinVariable, SymNodeVariable = map(compat.need, names)

    def positions(tensor: Any, key: Any) -> int:
        """How many parts of a key are such tensors; 0 where there are parts beside them that are left to torch."""
        parts = [_opened(part) for part in (key.items if type(key).__name__ == "TupleVariable" else [key])]
        tensors = [part for part in parts if type(part) is TensorVariable]
        plain = all(type(part).__name__ in ("ConstantVariable", "SliceVariable") for part in parts
                    if type(part) is not TensorVariable)
        fit = plain and tensor.class_type is torch.Tensor \
            and all(part.ndim == 0 and part.dtype in WHOLE for part in tensors)
        return len(tensors) if fit else 0

    def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn is operator.getitem and len(args) == 2 and not kwargs:
            x, key = map(_opened, args)
            if type(x) is TensorVariable and positions(x, key):
                return wrap(tx, tx.output.create_proxy("call_function", take, (x.as_proxy(), key.as_proxy()), {}))
        if self.fn in (max, min) and len(args) == 2 and not kwargs:  # Dynamo would compare them in Python
            tensors = [one for one in map(_opened, args) if type(one) is TensorVariable]
            sizes = [one for one in args if type(one) is SymNodeVariable]
            if len(tensors) == len(sizes) == 1 and tensors[0].ndim == 0 and tensors[0].dtype in WHOLE:
                bound = {"min" if self.fn is max else "max": sizes[0].as_proxy()}
                return wrap(tx, tx.output.create_proxy("call_function", torch.clamp, (tensors[0].as_proxy(),), bound))
        return call(self, tx, args, kwargs)

    def put(self: Any, tx: Any, key: Any, value: Any) -> Any:
        if positions(self, _opened(key)) != 1:
            return write(self, tx, key, value)
        return tx.inline_user_function_return(VariableTracker.build(tx, put_), [self, key, value], {})

    BuiltinVariable.call_function, TensorVariable.method___setitem__ = called, put
    try:
        yield
    finally:
        BuiltinVariable.call_function, TensorVariable.method___setitem__ = call, write


def _opened(value: Any) -> Any:
    """What a value that Dynamo has not looked at stands for, where that is a tensor or a tuple: a look at a number
    would be a guard."""
    kind = value.peek_type() if hasattr(value, "peek_type") and not value.is_realized() else torch.Tensor
    return value.realize() if issubclass(kind, (torch.Tensor, tuple)) else value


def take(x: torch.Tensor, index: Any) -> torch.Tensor:
    """`x[index]`, not as a view."""
    others, positions = _apart(x, index)
    part = x[others]
    for dim, position in reversed(positions):
        part = part.index_select(dim, _place(position, part.shape[dim])).squeeze(dim)
    return part


def put_(x: torch.Tensor, index: Any, value: Any) -> None:
    """`x[index] = value`, of one position."""
    others, positions = _apart(x, index)
    dim, position = positions[0]
    part = x[others]
    place = _place(position, part.shape[dim])
    if isinstance(value, torch.Tensor):
        sizes = [*part.shape[:dim], *part.shape[dim + 1:]]
        if value.dim() > len(sizes):  # dims of size 1 in front are left out
            value = value.reshape(value.shape[value.dim() - len(sizes):])
        part.index_copy_(dim, place, value.to(x.dtype).expand(sizes).unsqueeze(dim))
    else:
        part.index_fill_(dim, place, value)


def _apart(x: torch.Tensor, index: Any) -> tuple[Any, list[tuple[int, Any]]]:
    """An index with all of a dim in place of each tensor, and these with the dims that they select from there."""
    parts = index if isinstance(index, tuple) else (index,)
    count = 0
    for part in parts:
        if part is not None and part is not Ellipsis:
            count += 1
    dim = 0
    others: list[Any] = []
    positions: list[tuple[int, Any]] = []
    for part in parts:
        if isinstance(part, torch.Tensor):
            positions.append((dim, part))
            others.append(slice(None))
        else:
            others.append(part)
        if part is Ellipsis:
            dim += x.dim() - count
        elif part is None or isinstance(part, (slice, torch.Tensor)):
            dim += 1
    return tuple(others), positions


def _place(position: torch.Tensor, size: int) -> torch.Tensor:
    position = position.long()
    return torch.where(position < 0, position + size, position).reshape(1)
