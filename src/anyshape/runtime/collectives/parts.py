"""Parts of tensors that are dealt out over ranks: cutting, joining, and what each collective computes of all of them.

This is the meaning of the rows of ops/collective.py, in plain torch; process groups are tested against it.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anyshape.dist.placement import local_count

Numbers = tuple[int, int, int, int, int]  # dim, outer, n, inner, count: ops/collective.py, evaluated

COMBINE = {"add": torch.add, "mul": torch.mul, "maximum": torch.maximum, "minimum": torch.minimum,
           "or": torch.logical_or, "and": torch.logical_and}


def cut(whole: Tensor, parts: Numbers, ranks: int, rank: int) -> Tensor:
    """What `rank` has of a whole, by the rule of ceil."""
    low, high = local_count(parts[2], ranks, rank)
    return between(whole, parts, low, high)


def between(whole: Tensor, parts: Numbers, low: int, high: int) -> Tensor:
    """Of the n things that are dealt out, those from low on before high."""
    dim, outer, n, inner, _ = parts
    shape = whole.shape
    apart = whole.reshape(*shape[:dim], outer, n, inner, *shape[dim + 1:]).narrow(dim + 1, low, high - low)
    return apart.reshape(*shape[:dim], outer * (high - low) * inner, *shape[dim + 1:])


def joined(pieces: Sequence[Tensor], parts: Numbers, counts: Sequence[int]) -> Tensor:
    """The whole of the pieces, of which each has its count of the n."""
    dim, outer, _, inner, _ = parts
    apart = [piece.reshape(*piece.shape[:dim], outer, count, inner, *piece.shape[dim + 1:])
             for piece, count in zip(pieces, counts, strict=True)]
    together = torch.cat(apart, dim + 1)
    shape = pieces[0].shape
    return together.reshape(*shape[:dim], outer * sum(counts) * inner, *shape[dim + 1:])


def total(pieces: Sequence[Tensor], combine: str) -> Tensor:
    """The pieces combined, in the order of ranks."""
    found = pieces[0]
    for piece in pieces[1:]:
        found = COMBINE[combine](found, piece)
    return found


def ceil_counts(n: int, ranks: int) -> list[int]:
    """How many of n each rank has."""
    return [high - low for low, high in (local_count(n, ranks, rank) for rank in range(ranks))]
