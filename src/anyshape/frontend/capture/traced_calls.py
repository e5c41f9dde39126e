"""Calls of `anyshape.compile` that were traced, as shapes (abstract arguments): `torch.export` is told by them what a
deployed program takes (export_called.py).
"""
from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from anyshape.torch_compat import tree as pytree

PLAIN = (bool, int, float, str, type(None))
LEAST = 2  # sizes of 0 and 1 are other programs for torch.export


@dataclass(frozen=True, slots=True)
class Described:
    """An argument that is a tensor."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.sizes)}"


@dataclass(frozen=True, slots=True)
class Other:
    """An argument that is an object of a class that no file has."""

    kind: str

    def __str__(self) -> str:
        return f"a {self.kind}"


@dataclass(frozen=True, slots=True)
class TracedCall:
    """The arguments of a call with `Described` in place of tensors. autocast: the dtype that it ran in, if any."""

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    autocast: torch.dtype | None

    def bound(self, signature: inspect.Signature) -> TracedCall:
        """The same, with what is given by name in its place as far as it has one."""
        found = signature.bind(*self.arguments, **self.keywords)
        return TracedCall(found.args, dict(sorted(found.kwargs.items())), self.autocast)

    def kind(self) -> tuple[Any, ...]:
        """What has to be the same in two calls of one program: nesting, dtypes, ranks, values but whole numbers."""
        leaves, nesting = pytree.tree_flatten((self.arguments, dict(self.keywords)))
        return (nesting, self.autocast, *(_kind(leaf) for leaf in leaves))

    def sizes(self) -> list[tuple[int, ...]]:
        """The sizes of every tensor."""
        leaves = pytree.tree_leaves((self.arguments, dict(self.keywords)))
        return [leaf.sizes for leaf in leaves if isinstance(leaf, Described)]

    def widened(self, is_free: Callable[[int, int], bool]) -> TracedCall:
        """The same with LEAST for smaller sizes that are free. is_free: is told the tensor's number and its dim."""
        return self.resized(lambda number, dim, size: LEAST if size < LEAST and is_free(number, dim) else size)

    def resized(self, size_of: Callable[[int, int, int], int]) -> TracedCall:
        """The same with other sizes. size_of: is told the tensor's number, its dim and its size."""
        numbers = itertools.count()

        def resize(leaf: Any) -> Any:
            if not isinstance(leaf, Described):
                return leaf
            number = next(numbers)
            return Described(tuple(size_of(number, dim, size) for dim, size in enumerate(leaf.sizes)), leaf.dtype,
                             leaf.device)

        arguments, keywords = pytree.tree_map(resize, (self.arguments, dict(self.keywords)))
        return TracedCall(arguments, keywords, self.autocast)

    def __str__(self) -> str:
        def shown(value: Any) -> str:
            return str(pytree.tree_map(_Shown, value))
        return ", ".join([*map(shown, self.arguments), *(f"{key}={shown(one)}" for key, one in self.keywords.items())])


class _Shown:
    """A leaf in a printed nesting."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return str(self.value) if isinstance(self.value, (Described, Other)) else repr(self.value)


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Described):
        return leaf.dtype, leaf.device, len(leaf.sizes)
    return int if type(leaf) is int else (type(leaf), leaf)


def traced_call(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> TracedCall:
    """A call's description, which keeps none of its objects alive."""
    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Described(tuple(value.shape), value.dtype, value.device)
        return value if type(value) in PLAIN else Other(type(value).__name__)
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    arguments, keywords = pytree.tree_map(describe, (arguments, keywords))
    return TracedCall(arguments, keywords, autocast)
