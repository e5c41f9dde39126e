"""Placement of a tensor along one axis of a mesh, in DTensor's words: replicated, sharded, or a partial sum.

    R                 every rank has all of it
    S(0)              dim 0 is dealt out in contiguous parts of ceil(size / ranks); the last ones may be shorter, or
                      empty
    S(0, 6, 4)        dim 0 is 6 * 4 * rest; of the 4 each rank has its part, of the others all: what a reshape of
                      [6, 4, rest], sharded along its dim 1, comes to
    P(add)            the ranks' tensors added up are the tensor

On a mesh a tensor has one placement an axis (`Layout`), in the mesh's order: a later axis deals out what the earlier
ones have left, as DTensor does. Rules: Xu et al., "GSPMD: General and Scalable Parallelization for ML Computation
Graphs" (2021), section 3.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Union

from anyshape.base.errors import ParseError
from anyshape.sym.expr import Size, divide
from anyshape.sym.parse import parse

COMBINES = ("add", "mul", "maximum", "minimum", "or", "and")


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank has the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Dim `dim` is outer * n * inner elements, and the n are dealt out, ceil(n / ranks) to each.

    n: None: all of the dim, whatever its size (`of` says it).
    """

    dim: int
    outer: Size = 1
    n: Size | None = None

    def of(self, shape: tuple[Size, ...]) -> Shard:
        """This placement with its n, of a tensor of that shape."""
        return self if self.n is not None else replace(self, n=shape[self.dim])

    def inner(self, shape: tuple[Size, ...]) -> Size:
        """What is left of the dim's size; asserts that it is whole as a formula."""
        found = exact(shape[self.dim], self.outer * self.of(shape).count)
        assert found is not None, (self, shape)
        return found

    @property
    def count(self) -> Size:
        """n, where it is known."""
        assert self.n is not None, self
        return self.n

    def __str__(self) -> str:
        return f"S({self.dim})" if self.n is None else f"S({self.dim}, {self.outer}, {self.n})"


@dataclass(frozen=True, slots=True)
class Partial:
    """The tensors of all ranks, combined, are the tensor. combine: a scalar op of reductions."""

    combine: str = "add"

    def __str__(self) -> str:
        return f"P({self.combine})"


Placement = Union[Replicate, Shard, Partial]
Layout = tuple[Placement, ...]  # an axis of the mesh each
REPLICATE = Replicate()


def exact(a: Size, b: Size) -> Size | None:
    """a / b where it is whole as a formula, else None."""
    if b == 0:
        return None
    quotient, rest = divide(a, b)
    return quotient if rest == 0 else None


def local_count(n: int, ranks: int, rank: int) -> tuple[int, int]:
    """(first, end) of the part of `n` things that `rank` has; parts are of ceil(n / ranks)."""
    each = -(-n // ranks)
    return min(n, rank * each), min(n, rank * each + each)


def placement_of(text: str) -> Placement:
    """The placement of a text form.

    Raises:
        ParseError: it is none.
    """
    stripped = text.strip()
    if stripped == "R":
        return REPLICATE
    if (found := re.fullmatch(r"P\((\w+)\)", stripped)) and found.group(1) in COMBINES:
        return Partial(found.group(1))
    if found := re.fullmatch(r"S\((\d+)(?:,\s*(.+?),\s*(.+))?\)", stripped):
        dim, outer, n = found.groups()
        return Shard(int(dim)) if outer is None else Shard(int(dim), parse(outer), parse(n))
    raise ParseError(f"{text!r} is no placement", why="a placement is R, S(dim), S(dim, outer, n) or P(combine)",
                     do=f"combine is one of {', '.join(COMBINES)}")


def layout_text(layout: Layout) -> str:
    """A layout's text: `S(0) R`, one placement an axis."""
    return " ".join(map(str, layout))


def layout_of(text: str) -> Layout:
    """The layout of a text; ParseError where it is none."""
    return tuple(placement_of(one) for one in re.findall(r"\w\([^()]*\)|[^\s()]+", text))
