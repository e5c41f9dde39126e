"""Backports: what torch 2.11 and 2.12 lack, made up for.

Each part looks for what is lacking, not for a version, and does nothing where torch has it.
"""
from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from anyshape import torch_compat as compat

DIVISION = "div_rtn"


@contextlib.contextmanager
def newer_rules() -> Iterator[None]:
    """Inside, slices and pools in a trace for all sizes have the sizes that newer versions give them. Without effect
    when nested."""
    with _newer_slices(), _newer_pools():
        yield


@contextlib.contextmanager
def _newer_pools() -> Iterator[None]:
    """Sizes of pooled results are quotients rounded down. Before 2.13 torch asks for the remainder beside Python's own
    division, which guards it: a program for even sizes, and one for odd ones, at each pool of steps of 2."""
    rules = compat.get("torch._meta_registrations")
    division = getattr(rules, DIVISION, None)
    if division is None or "bool" not in division.__code__.co_names:
        yield
        return
    setattr(rules, DIVISION, _rounded_down)
    try:
        yield
    finally:
        setattr(rules, DIVISION, division)


def _rounded_down(x: Any, y: Any) -> Any:
    return x // y


@contextlib.contextmanager
def _newer_slices() -> Iterator[None]:
    """Slices have the sizes that torch 2.12 gives them: 2.11 gives up where it cannot decide without a guard, and makes
    up a size that nothing can compute."""
    rules = compat.need("torch._subclasses.fake_impls")
    index_of = rules._compute_slice_index
    if "sym_min" in index_of.__code__.co_names:
        yield
        return
    table, slices = rules.op_implementations_dict, torch.ops.aten.slice.Tensor
    slice_of = table[slices]
    rules._compute_slice_index = _bounded(index_of)
    table[slices] = _sliced(slice_of, rules)
    try:
        yield
    finally:
        rules._compute_slice_index = index_of
        table[slices] = slice_of


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

    return bounded


def _sliced(slice_of: Callable[..., Any], rules: Any) -> Callable[..., Any]:
    """A slice; where `slice_of` gives up, not knowing whether it ends before it begins: a maximum of that and zero. Its
    bounds are what the rule for them says by then: a trace for all sizes has its own (`tracing/symint_cache.py`)."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    def sliced(mode: Any, op: Any, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
        if not x.dim() or step <= 0:
            return slice_of(mode, op, x, dim, start, end, step)
        sizes, strides = list(x.shape), list(x.stride())
        to_end = end is None or (isinstance(end, int) and end == sys.maxsize)
        index_of = rules._compute_slice_index
        first = 0 if start is None else index_of(sizes[dim], start)
        last = sizes[dim] if to_end else index_of(sizes[dim], end)
        if first is None or last is None or guard_or_false(last >= first) or guard_or_false(first >= last):
            return slice_of(mode, op, x, dim, start, end, step)
        offset = x.storage_offset() + first * strides[dim]
        sizes[dim] = (torch.sym_max(last - first, 0) + step - 1) // step
        strides[dim] = strides[dim] * step
        return x.as_strided(sizes, strides, offset)

    return sliced


@contextlib.contextmanager
def guards_refused(shape_env: Any) -> Iterator[None]:
    """Inside, a new guard raises RuntimeError; for torch before 2.13, which can only ignore guards after a trace."""
    if "_check_frozen" in vars(shape_env):  # inside another of these
        yield
        return

    def refuse(formula: Any, value: Any) -> None:
        raise RuntimeError(f"Guard attempted after tracing: {formula} == {value}")

    shape_env._check_frozen = refuse  # torch calls it before it adds a guard
    try:
        yield
    finally:
        del shape_env._check_frozen
