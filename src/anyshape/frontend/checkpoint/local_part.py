"""A rank's part of a tensor, as `torch.distributed.checkpoint` asks for it: rectangles of the whole.

    whole [8, 4], its rows dealt out over 2 ranks in 2 groups (outer 2)   -->   rank 1: rows 2..3 and rows 6..7

torch's planners find the three methods with two underscores by name; so a part is saved without a new planner, and
what is stored is a tensor of the whole's shape, which any mesh reads.
"""
from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from anyshape.dist.placement import local_count
from anyshape.runtime.collectives.parts import Numbers

Segment = tuple[int, int]  # where it begins in the whole's dim, and how long it is


def segments(shape: Sequence[int], cuts: Sequence[tuple[Numbers, int, int]]) -> list[list[Segment]]:
    """Of each dim of a whole, what a rank has of it. cuts: (how it is dealt out, over how many ranks, this one)."""
    found: list[list[Segment]] = [[(0, size)] for size in shape]
    for (dim, outer, n, inner, _), ranks, rank in cuts:
        low, high = local_count(n, ranks, rank)
        kept: list[Segment] = []
        for block in range(outer):
            kept += _between(found[dim], (block * n + low) * inner, (block * n + high) * inner)
        found[dim] = kept
    return found


def _between(given: Sequence[Segment], low: int, high: int) -> list[Segment]:
    """Of segments one after another, those of the places from low on before high; neighbours are joined."""
    found: list[Segment] = []
    at = 0
    for start, length in given:
        first, last = max(low, at), min(high, at + length)
        if first < last:
            found.append((start + first - at, last - first))
        at += length
    return found


class LocalPart:
    """What this rank has of a tensor.

    Args:
        own: the part; the segments of each dim one after another.
        shape: of the whole.
        kept: of each dim of the whole, what is there.
    """

    def __init__(self, own: Tensor, shape: torch.Size, kept: Sequence[Sequence[Segment]]) -> None:
        self.own = own
        self.shape = shape
        self.kept = kept
        self.pieces: dict[tuple[int, ...], Tensor] = {}
        for each in itertools.product(*(_placed(one) for one in kept)):
            piece = own
            for dim, (_, length, at) in enumerate(each):
                piece = piece.narrow(dim, at, length)
            self.pieces[tuple(start for start, _, _ in each)] = piece

    def copied(self) -> LocalPart:
        """One of its own, which later steps do not change."""
        return LocalPart(self.own.detach().cpu().clone(), self.shape, self.kept)

    def size(self) -> torch.Size:
        """Of the whole."""
        return self.shape

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.own)
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD,
                          tensor_data=TensorWriteData(chunk, properties, self.shape))
                for chunk in self.__create_chunk_list__()]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), piece.shape) for offsets, piece in self.pieces.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.pieces[tuple(index.offset)]


def _placed(kept: Sequence[Segment]) -> list[tuple[int, int, int]]:
    """(where in the whole, how long, where in the part) of each segment."""
    found, at = [], 0
    for start, length in kept:
        found.append((start, length, at))
        at += length
    return found
