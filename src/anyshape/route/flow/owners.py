"""Abstract domain of the dependence analysis: for each element of a tensor, the set of cells that it is computed from.

    owner  -1          of no cell: a constant, or a parameter
    owner  c >= 0      of exactly cell c
    owner  -2          of any cell (top)
    owner  -3 - s      of the cells of set s, interned in a `CellSets`

An owner array is an int32 tensor that broadcasts to its value: a dim along which the owners are all the same has size
1. Joins are exact up to `limit` different sets; what would be one more is top.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

NONE = -1  # of no cell
TOP = -2  # of any cell
_FIRST = -3  # the owner of the first interned set


class CellSets:
    """Interned sets of cells, each a whole number whose bit c stands for cell c.

    Args:
        limit: how many different sets with more than one cell are told apart.
    """

    def __init__(self, limit: int = 1 << 15) -> None:
        self.limit = limit
        self._masks: list[int] = []
        self._number: dict[int, int] = {}
        self._joined: dict[tuple[int, int], int] = {}

    def mask(self, owner: int) -> int | None:
        """The set of an owner as bits; None for top."""
        if owner >= 0:
            return 1 << owner
        if owner == NONE:
            return 0
        return None if owner == TOP else self._masks[_FIRST - owner]

    def cells(self, owner: int) -> frozenset[int] | None:
        """The cells of an owner; None for top, which is any cell."""
        bits = self.mask(owner)
        if bits is None:
            return None
        return frozenset(place for place in range(bits.bit_length()) if bits >> place & 1)

    def of_mask(self, bits: int) -> int:
        """The owner of a set given as bits."""
        if bits == 0:
            return NONE
        if bits & (bits - 1) == 0:
            return bits.bit_length() - 1
        if bits not in self._number:
            if len(self._masks) >= self.limit:
                return TOP
            self._number[bits] = len(self._masks)
            self._masks.append(bits)
        return _FIRST - self._number[bits]

    def _join_two(self, one: int, other: int) -> int:
        key = (one, other)
        if key not in self._joined:
            left, right = self.mask(one), self.mask(other)
            self._joined[key] = TOP if left is None or right is None else self.of_mask(left | right)
        return self._joined[key]

    def join(self, *owners: Tensor) -> Tensor:
        """Element by element the union of owner arrays, which broadcast."""
        found = owners[0]
        for other in owners[1:]:
            found = self._join_arrays(found, other)
        return found

    def _join_arrays(self, one: Tensor, other: Tensor) -> Tensor:
        one, other = torch.broadcast_tensors(one, other)
        found = torch.where(other == NONE, one, torch.where((one == TOP) & (other != NONE), one, other))
        hard = (one != other) & (one != NONE) & (other != NONE) & (one != TOP) & (other != TOP)
        if bool(hard.any()):
            pairs = torch.stack([one[hard], other[hard]], 1)
            pairs, place = torch.unique(pairs.sort(1).values, dim=0, return_inverse=True)
            unions = torch.tensor([self._join_two(left, right) for left, right in pairs.tolist()], dtype=torch.int32)
            found[hard] = unions[place]
        return found

    def reduce(self, owners: Tensor, dims: Sequence[int]) -> Tensor:
        """The union along dims, which stay with size 1; of an empty dim: none."""
        for dim in dims:
            if owners.shape[dim] == 0:
                owners = owners.new_full([1 if place == dim % owners.dim() else size
                                          for place, size in enumerate(owners.shape)], NONE)
            while (size := owners.shape[dim]) > 1:
                half = size // 2
                low, high = owners.narrow(dim, 0, half), owners.narrow(dim, half, half)
                rest = owners.narrow(dim, 2 * half, size - 2 * half)
                owners = torch.cat([self.join(low, high), rest], dim)
        return owners

    def all_of(self, owners: Tensor) -> int:
        """The union of all elements."""
        found = NONE
        for owner in torch.unique(owners).tolist():
            found = self._join_two(min(found, owner), max(found, owner))
        return found

    def pick(self, owners: Tensor, pattern: Tensor) -> Tensor:
        """The union along the last dim where a pattern says so: owners [..., k], pattern [m, k] --> [..., m]."""
        if owners.shape[-1] == 1:
            some = pattern.any(1)
            return torch.where(some, owners, owners.new_full((), NONE))
        count = pattern.sum(1)
        if bool((count <= 1).all()):  # a selection: rows move, nothing is joined
            place = pattern.int().argmax(1)
            return torch.where(count == 1, owners.index_select(-1, place), owners.new_full((), NONE))
        kinds, place = torch.unique(pattern, dim=0, return_inverse=True)
        found = [self.reduce(owners[..., kind], (-1,)) for kind in kinds]
        return torch.cat(found, -1).index_select(-1, place)

    def scan(self, owners: Tensor, dim: int) -> Tensor:
        """The union of each element with those before it along a dim."""
        parts: list[Tensor] = []
        for one in owners.split(1, dim):
            parts.append(self.join(parts[-1], one) if parts else one)
        return torch.cat(parts, dim) if parts else owners

    def windows(self, owners: Tensor, dim: int, ranges: Sequence[tuple[int, int, int]]) -> Tensor:
        """The union over one range (begin, end, step) a result along a dim; places outside are of no cell."""
        if owners.shape[dim] == 1 and all(begin < 1 for begin, _, _ in ranges) and len(ranges) == 1:
            return owners
        parts = []
        for begin, end, step in ranges:
            inside = [place for place in range(begin, end, step) if 0 <= place < owners.shape[dim]]
            taken = owners.index_select(dim, torch.tensor(inside, dtype=torch.int64))
            parts.append(self.reduce(taken, (dim,)))
        return torch.cat(parts, dim)


def compressed(owners: Tensor) -> Tensor:
    """The owners with size 1 along each dim where they are all the same."""
    for dim, size in enumerate(owners.shape):
        if size > 1:
            first = owners.narrow(dim, 0, 1)
            if owners.stride(dim) == 0 or bool((owners == first).all()):
                owners = first
    return owners


def uniform(owner: int, rank: int) -> Tensor:
    """The owner array of a value of that rank, all of whose elements have one owner."""
    return torch.full((1,) * rank, owner, dtype=torch.int32)


def rows(count: int, rank: int) -> Tensor:
    """The owner array of a value whose position i along dim 0 is cell i."""
    return torch.arange(count, dtype=torch.int32).reshape(count, *(1,) * (rank - 1))


def moved(owners: Tensor, shape: Sequence[int], move: Callable[[Tensor], Tensor]) -> Tensor:
    """What a data movement makes of owners: the movement itself, of the owners expanded to the value's shape.

    New elements that a movement fills with zeros come out as of no cell: owners are moved with one added. Movements
    that do not take whole numbers get float64, in which every owner is exact.
    """
    whole = (owners + 1).expand(*shape)
    try:
        found = move(whole)
    except (RuntimeError, NotImplementedError):
        found = move(whole.double()).to(torch.int32)
    return found - 1
