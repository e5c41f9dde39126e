"""Collectives by torch.distributed: the rows of ops/collective.py as messages of process groups, gloo or NCCL.

    all_reduce(g1, g2)      one buffer [g1 | g2], one all_reduce
    all_gather(w1, w2)      [w1 | w2] of each rank, padded to the longest, one all_gather; then each whole is joined
    reduce_scatter(g1, g2)  a line for each rank of what it is to have, one reduce_scatter

Several operands are one message, so its latency is paid once. Ranks that have less than others pad.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anyshape.base import counters
from anyshape.dist.mesh import Mesh
from anyshape.dist.placement import local_count
from anyshape.runtime.collectives.parts import Numbers, between, ceil_counts, joined

REDUCE = {"add": "SUM", "mul": "PRODUCT", "maximum": "MAX", "minimum": "MIN", "or": "MAX", "and": "MIN"}


@dataclass(slots=True)
class ProcessMesh:
    """A mesh whose ranks are the processes of torch.distributed, one group of processes for each line along an axis.

    Args:
        mesh: its number of ranks is the number of processes.
        rank: of this process.
        groups: by axis, the group that this process is in.
        control: of all processes, for what is agreed on before a step.
    """

    mesh: Mesh
    rank: int
    groups: dict[str, Any] = field(default_factory=dict)
    control: Any = None

    @property
    def coordinates(self) -> dict[str, int]:
        """Where this process is along each axis."""
        return self.mesh.coordinates(self.rank)


MESHES: dict[str, ProcessMesh] = {}  # by text: programs name a mesh, whose groups belong to the process


def process_mesh(mesh: Mesh) -> ProcessMesh:
    """The groups of processes of a mesh, made once; every process calls this, in the same order."""
    found = MESHES.get(str(mesh))
    if found is not None and found.control is not None and dist.is_initialized():
        return found
    made = ProcessMesh(mesh, dist.get_rank(), control=dist.new_group())
    for axis in mesh.axes:
        for ranks in mesh.groups(axis.name):
            group = dist.new_group(list(ranks))
            if made.rank in ranks:
                made.groups[axis.name] = group
    MESHES[str(mesh)] = made
    return made


def forget() -> None:
    """Groups of a torch.distributed that has ended are not used again."""
    MESHES.clear()


@torch.library.custom_op("anyshape_collective::run", mutates_args=())
def collective(pieces: Sequence[Tensor], op: str, mesh: str, axis: str, combine: str,
               numbers: Sequence[int]) -> list[Tensor]:
    """One collective of a program; see ops/collective.py. numbers: five for each operand, and for `into`."""
    counters.count("collectives")
    parts = [tuple(numbers[at:at + 5]) for at in range(0, len(numbers), 5)]
    made = run(line_of(mesh, axis), op, list(pieces), combine, parts)  # type: ignore[arg-type]
    return made if len(made) == 1 else [one.clone() for one in made]  # memory of its own for each


@dataclass(frozen=True, slots=True)
class Line:
    """The processes along an axis: their group, how many they are, and which one this is."""

    group: Any
    ranks: int
    rank: int

    def peer(self, step: int) -> int:
        """The process that is so many places on along the axis, which is a ring, by its number among all."""
        return dist.get_global_rank(self.group, (self.rank + step) % self.ranks)


def line_of(mesh: str, axis: str) -> Line:
    """The line of this process along an axis of a mesh, by its text."""
    found = MESHES[mesh]
    return Line(found.groups[axis], found.mesh.axis(axis).size, found.coordinates[axis])


def run(line: Line, op: str, pieces: list[Tensor], combine: str, parts: Sequence[Numbers]) -> list[Tensor]:
    """What this rank gets of a collective, for each operand; new tensors."""
    if line.ranks == 1:
        return [piece.clone(memory_format=torch.contiguous_format) for piece in pieces]
    if op == "all_reduce":
        return _all_reduce(line, pieces, combine)
    if op == "all_gather":
        return _all_gather(line, pieces, parts)
    if op == "reduce_scatter":
        return _reduce_scatter(line, pieces, parts)
    assert op == "all_to_all", op
    return [_all_to_all(line, pieces[0], parts[0], parts[1])]


def _flat(pieces: Sequence[Tensor]) -> Tensor:
    """One buffer of all, that is no operand's."""
    flat = [piece.reshape(-1) for piece in pieces]
    return torch.cat(flat) if len(flat) > 1 else flat[0].clone()


def _all_reduce(line: Line, pieces: list[Tensor], combine: str) -> list[Tensor]:
    flat = _flat(pieces)
    message = flat.view(torch.uint8) if flat.dtype == torch.bool else flat
    dist.all_reduce(message, getattr(dist.ReduceOp, REDUCE[combine]), group=line.group)
    return _split(flat, [piece.shape for piece in pieces])


def _split(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    found, at = [], 0
    for shape in shapes:
        count = 1
        for size in shape:
            count *= size
        found.append(flat[at:at + count].view(tuple(shape)))
        at += count
    return found


def _most(shape: Sequence[int], parts: Numbers, ranks: int) -> int:
    """Elements of the largest part of a whole of which this rank has `shape`."""
    dim, outer, n, inner, _ = parts
    rest = 1
    for d, size in enumerate(shape):
        rest *= 1 if d == dim else size
    return outer * -(-n // ranks) * inner * rest


def _shape_of(shape: Sequence[int], parts: Numbers, count: int) -> list[int]:
    """The shape of a part with `count` of the n."""
    dim, outer, _, inner, _ = parts
    return [outer * count * inner if d == dim else size for d, size in enumerate(shape)]


def _size(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _all_gather(line: Line, pieces: list[Tensor], parts: Sequence[Numbers]) -> list[Tensor]:
    most = [_most(piece.shape, one, line.ranks) for piece, one in zip(pieces, parts, strict=True)]
    own = pieces[0].new_empty(sum(most))
    at = 0
    for piece, length in zip(pieces, most, strict=True):
        own[at:at + piece.numel()] = piece.reshape(-1)
        own[at + piece.numel():at + length] = 0
        at += length
    every = own.new_empty(line.ranks, sum(most))
    dist.all_gather_into_tensor(_bytes(every.view(-1)), _bytes(own), group=line.group)
    found, at = [], 0
    for piece, one, length in zip(pieces, parts, most, strict=True):
        counts = ceil_counts(one[2], line.ranks)
        shapes = [_shape_of(piece.shape, one, count) for count in counts]
        each = [every[rank, at:at + _size(shape)].view(shape) for rank, shape in enumerate(shapes)]
        found.append(joined(each, one, counts).contiguous())
        at += length
    return found


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8) if flat.dtype == torch.bool else flat


def _lines(line: Line, wholes: list[Tensor], parts: Sequence[Numbers], most: Sequence[int]) -> Tensor:
    """A row for each rank: the parts of all wholes that it is to have, padded."""
    rows = wholes[0].new_zeros(line.ranks, sum(most))
    at = 0
    for whole, one, length in zip(wholes, parts, most, strict=True):
        for rank in range(line.ranks):
            part = between(whole, one, *local_count(one[2], line.ranks, rank))
            rows[rank, at:at + part.numel()] = part.reshape(-1)
        at += length
    return rows


def _reduce_scatter(line: Line, wholes: list[Tensor], parts: Sequence[Numbers]) -> list[Tensor]:
    most = [_most(whole.shape, one, line.ranks) for whole, one in zip(wholes, parts, strict=True)]
    rows = _lines(line, wholes, parts, most)
    own = rows.new_empty(sum(most))
    dist.reduce_scatter_tensor(own, rows.view(-1), group=line.group)
    found, at = [], 0
    for whole, one, length in zip(wholes, parts, most, strict=True):
        shape = _shape_of(whole.shape, one, one[4])
        found.append(own[at:at + _size(shape)].view(shape))
        at += length
    return found


def _all_to_all(line: Line, piece: Tensor, parts: Numbers, into: Numbers) -> Tensor:
    """Of its part along one dim, each rank sends the others theirs along another."""
    counts = ceil_counts(parts[2], line.ranks)
    shape = list(piece.shape)
    shape[parts[0]] = parts[1] * -(-parts[2] // line.ranks) * parts[3]
    length = _most(shape, into, line.ranks)
    rows = _lines(line, [piece], [into], [length])
    every = torch.empty_like(rows)
    dist.all_to_all_single(_bytes(every.view(-1)), _bytes(rows.view(-1)), group=line.group)
    found = []
    for rank, count in enumerate(counts):
        shape = _shape_of(_shape_of(piece.shape, parts, count), into, into[4])
        found.append(every[rank, :_size(shape)].view(shape))
    return joined(found, parts, counts).contiguous()


def gathered(mesh: ProcessMesh, own: Tensor, cuts: Sequence[tuple[str, Numbers]]) -> Tensor:
    """The whole of which this process has `own`. cuts: (axis, how it was dealt out) each, in that order."""
    for axis, numbers in reversed(cuts):
        line = Line(mesh.groups[axis], mesh.mesh.axis(axis).size, mesh.coordinates[axis])
        (own,) = run(line, "all_gather", [own.contiguous()], "add", [numbers])
    return own
