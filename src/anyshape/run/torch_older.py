"""Rules for shapes that torch 2.11 lacks; the third room, after `torch_api` and `torch_quick`, for torch's versions.

A trace for all sizes at once (`backed_size_oblivious`) should not ask whether a size is 1. Where a rule of torch asks,
the trace gets a guard, and sizes of 1 a second program; where it gives up, the result has a size that nothing can
compute. Torch 2.12 mended two such rules: the bounds of slices, and which library a convolution takes.
"""
from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def newer_rules() -> Iterator[None]:
    """Inside, a trace for all sizes follows the newer rules. Without effect where torch has them, and when nested."""
    import torch._subclasses.fake_impls as rules
    index_of, select = rules._compute_slice_index, torch._C._select_conv_backend
    if "sym_min" in index_of.__code__.co_names or hasattr(index_of, "anyshape"):
        yield
        return
    table, slices = rules.op_implementations_dict, torch.ops.aten.slice.Tensor
    slice_of = table[slices]
    rules._compute_slice_index = _bounded(index_of)
    table[slices] = _sliced(slice_of, rules._compute_slice_index)
    torch._C._select_conv_backend = _for_two(select)
    try:
        yield
    finally:
        rules._compute_slice_index = index_of
        table[slices] = slice_of
        torch._C._select_conv_backend = select


def _bounded(index_of: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Where the bound of a slice lies in a dimension: clipped by a minimum or maximum where `index_of` gives up."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    def bounded(size: Any, index: Any) -> Any:
        found = index_of(size, index)
        if found is None and guard_or_false(index >= 0):
            return torch.sym_min(index, size)
        if found is None and guard_or_false(index < 0):
            return torch.sym_max(index + size, 0)
        return found

    bounded.anyshape = True  # type: ignore[attr-defined]
    return bounded


def _sliced(slice_of: Callable[..., Any], index_of: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A slice; where `slice_of` gives up, not knowing whether it ends before it begins: a maximum of that and zero."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    def sliced(mode: Any, op: Any, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
        if not x.dim() or step <= 0:
            return slice_of(mode, op, x, dim, start, end, step)
        sizes, strides = list(x.shape), list(x.stride())
        to_end = end is None or (isinstance(end, int) and end == sys.maxsize)
        first = 0 if start is None else index_of(sizes[dim], start)
        last = sizes[dim] if to_end else index_of(sizes[dim], end)
        if first is None or last is None or guard_or_false(last >= first) or guard_or_false(first >= last):
            return slice_of(mode, op, x, dim, start, end, step)
        offset = x.storage_offset() + first * strides[dim]
        sizes[dim] = (torch.sym_max(last - first, 0) + step - 1) // step
        strides[dim] = strides[dim] * step
        return x.as_strided(sizes, strides, offset)

    return sliced


def _for_two(select: Callable[..., Any]) -> Callable[..., Any]:
    """The library for a batch of two, whatever the batch is. A trace learns from it only the layout of the result,
    which is row-major with every library if the operands are; others are left alone. A real call chooses anew."""
    from torch._prims_common import is_contiguous_or_false

    def selected(input: Any, weight: Any, *more: Any, **named: Any) -> Any:
        plain = input.device.type == "cpu" and is_contiguous_or_false(input) and is_contiguous_or_false(weight)
        if plain and isinstance(input.shape[0], torch.SymInt):
            input = input.new_empty((2, *input.shape[1:]))
        return select(input, weight, *more, **named)

    return selected
