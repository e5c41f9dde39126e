"""Messages of collectives: what torch.distributed sends of the operands, asynchronously, and what comes of it.

    all_reduce(g1, g2)      m = [g1 | g2], reduced where it lies
    all_gather(w1, w2)      m = a line [w1 | w2] for each rank, padded to the longest; own line is there, others come
    reduce_scatter(g1, g2)  m = a line for each rank of what it is to have, then this rank's line of sums
    all_to_all(x)           m = a line for each rank of what it gets, then a line from each

Several operands are one message, so its latency is paid once. Ranks that have less than others pad. A message is one
tensor of its caller's, which nobody may touch while it is under way; the operands are free at once. torch's own work
(`async_op`), on gloo a thread, on NCCL a stream, sends it. A message without elements is not sent, on no rank.

gloo gathers by a copy of the whole, and scatters sums by adding all of them up in a copy (16.8 MB beside a message of
16.8 MB, and 2.8 and 3.8 times the processor time of sending what each rank needs, torch 2.13). So there lines go from
rank to rank, and are added up by `finish`; among more than two ranks all lines are added up where they lie.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anyshape.dist.placement import local_count
from anyshape.runtime.collectives.parts import Numbers, between, ceil_counts

REDUCE = {"add": "SUM", "mul": "PRODUCT", "maximum": "MAX", "minimum": "MIN", "or": "MAX", "and": "MIN"}
OLD = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}  # until 2.12


@dataclass(frozen=True, slots=True)
class Line:
    """The processes along an axis: their group, how many they are, and which one this is.

    by_gloo: gloo sends the messages. tag: of the next one, if it goes from rank to rank.
    """

    group: Any
    ranks: int
    rank: int
    by_gloo: bool = False
    tag: int = 0

    def peer(self, step: int) -> int:
        """The process that is so many places on along the axis, which is a ring, by its number among all."""
        return dist.get_global_rank(self.group, (self.rank + step) % self.ranks)


@dataclass(frozen=True, slots=True)
class PointToPoint:
    """The work of a message that goes from rank to rank."""

    works: tuple[Any, ...]

    def wait(self) -> None:
        """Returns when all of it has gone, and come."""
        for work in self.works:
            work.wait()


def by_torch(name: str) -> Callable[..., Any]:
    """A collective of torch.distributed, by the name that this version does not warn of."""
    return getattr(dist, name, None) or getattr(dist, OLD[name])  # type: ignore[no-any-return]


def begin(line: Line, op: str, message: Tensor, pieces: Sequence[Tensor], combine: str,
          parts: Sequence[Numbers]) -> Any:
    """Sends a collective of `pieces` in `message`, which has one dim: the work to wait for before `finish`; None where
    nothing has to come."""
    if op == "all_reduce":
        _fill(message, pieces, [piece.numel() for piece in pieces])
        reduce = getattr(dist.ReduceOp, REDUCE[combine])
        return _work(line, message, lambda: dist.all_reduce(
            _bytes(message), reduce, group=line.group, async_op=True))
    if op == "all_gather":
        most = [most_elements(piece.shape, one, line.ranks) for piece, one in zip(pieces, parts, strict=True)]
        own = message.view(line.ranks, -1)[line.rank] if message.numel() else message
        _fill(own, pieces, most)
        if line.by_gloo:
            return _work(line, message, lambda: _exchange(
                line, [(own, message.view(line.ranks, -1)[_place(line, step)], step) for step in range(1, line.ranks)]))
        return _work(line, message, lambda: by_torch("all_gather_single")(
            _bytes(message), _bytes(own), group=line.group, async_op=True))
    if op == "reduce_scatter":
        most = [most_elements(whole.shape, one, line.ranks) for whole, one in zip(pieces, parts, strict=True)]
        _fill_lines(line, message, pieces, parts, most, line.ranks + 1)
        sent, own = _scattered(message, most)
        if line.ranks == 1:
            own.copy_(sent)
        if line.by_gloo and line.ranks == 2:
            return _work(line, message, lambda: _exchange(line, [(sent.view(2, -1)[1 - line.rank], own, 1)]))
        if line.by_gloo:
            return _work(line, message, lambda: dist.all_reduce(
                sent, dist.ReduceOp.SUM, group=line.group, async_op=True))
        return _work(line, message, lambda: by_torch("reduce_scatter_single")(
            own, sent, group=line.group, async_op=True))
    assert op == "all_to_all", op
    (piece,), (_, into) = pieces, parts
    _fill_lines(line, message, pieces, [into], [_exchanged(line, piece.shape, parts)], 2 * line.ranks)
    sent, come = message.chunk(2) if message.numel() else (message, message)
    if line.ranks == 1:
        come.copy_(sent)
    return _work(line, message, lambda: dist.all_to_all_single(
        _bytes(come), _bytes(sent), group=line.group, async_op=True))


def finish(line: Line, op: str, message: Tensor, results: Sequence[Tensor], parts: Sequence[Numbers]) -> None:
    """Writes what this rank gets of a message that is there, for each operand."""
    if op == "all_reduce":
        for result, come in zip(results, message.split([one.numel() for one in results]), strict=True):
            result.copy_(come.view(result.shape))
    elif op == "all_gather":
        most = [most_elements(result.shape, one, line.ranks) for result, one in zip(results, parts, strict=True)]
        every = message.view(line.ranks, sum(most))
        for result, one, lines in zip(results, parts, every.split(most, 1), strict=True):
            _join(lines, one, result)
    elif op == "reduce_scatter":
        most = [most_elements(result.shape, one, line.ranks) for result, one in zip(results, parts, strict=True)]
        sent, own = _scattered(message, most)
        summed = line.by_gloo and line.ranks > 2
        if summed:
            own = sent.view(line.ranks, -1)[line.rank] if message.numel() else sent
        for result, come in zip(results, own.split(most), strict=True):
            result.copy_(come[:result.numel()].view(result.shape))
        if line.by_gloo and line.ranks == 2:
            kept = sent.view(2, -1)[line.rank] if message.numel() else sent
            for result, here in zip(results, kept.split(most), strict=True):
                result.add_(here[:result.numel()].view(result.shape))
    else:
        assert op == "all_to_all", op
        (result,) = results
        lines = message[message.numel() // 2:].view(line.ranks, message.numel() // (2 * line.ranks))
        _join(lines, parts[0], result)


def _place(line: Line, step: int) -> int:
    """The rank that is so many places on along the axis."""
    return (line.rank + step) % line.ranks


def _exchange(line: Line, parts: Sequence[tuple[Tensor, Tensor, int]]) -> PointToPoint:
    """Sends to ranks, and receives of them. parts: what goes, where what comes is to be, and how many places on."""
    works = []
    for sent, come, step in parts:
        works.append(dist.isend(_bytes(sent), line.peer(step), group=line.group, tag=line.tag))
        works.append(dist.irecv(_bytes(come), line.peer(step), group=line.group, tag=line.tag))
    return PointToPoint(tuple(works))


def _scattered(message: Tensor, most: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What is sent, and the sums that come."""
    border = message.numel() - sum(most)
    return message[:border], message[border:]


def _work(line: Line, message: Tensor, send: Any) -> Any:
    return send() if line.ranks > 1 and message.numel() else None


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8) if flat.dtype == torch.bool else flat


def most_elements(shape: Sequence[int], parts: Numbers, ranks: int) -> int:
    """Elements of the longest part of a whole; `shape`: of the whole, or of a part."""
    dim, outer, n, inner, _ = parts
    return outer * -(-n // ranks) * inner * math.prod(size for d, size in enumerate(shape) if d != dim)


def _exchanged(line: Line, shape: Sequence[int], parts: Sequence[Numbers]) -> int:
    """Elements that each rank sends each other one, of its part of `shape`."""
    (dim, outer, n, inner, _), into = parts
    own = [outer * -(-n // line.ranks) * inner if d == dim else size for d, size in enumerate(shape)]
    return most_elements(own, into, line.ranks)


def _fill(target: Tensor, pieces: Sequence[Tensor], most: Sequence[int]) -> None:
    """Writes pieces one after another, each padded with zeros."""
    at = 0
    for piece, length in zip(pieces, most, strict=True):
        target[at:at + piece.numel()].view(piece.shape).copy_(piece)
        target[at + piece.numel():at + length] = 0
        at += length


def _fill_lines(line: Line, message: Tensor, wholes: Sequence[Tensor], parts: Sequence[Numbers], most: Sequence[int],
                count: int) -> None:
    """Of `count` lines the first ones get, for each rank, the parts of all wholes that it is to have."""
    for rank, one in enumerate(message.view(count, -1)[:line.ranks] if message.numel() else ()):
        _fill(one, [between(whole, cut, *local_count(cut[2], line.ranks, rank))
                    for whole, cut in zip(wholes, parts, strict=True)], most)


def _join(lines: Tensor, parts: Numbers, result: Tensor) -> None:
    """Writes the whole that was dealt out, of the line of each rank."""
    dim, outer, n, inner, _ = parts
    before, after = math.prod(result.shape[:dim]), math.prod(result.shape[dim + 1:])
    apart = result.view(before, outer, n, inner * after)
    low = 0
    for line, count in zip(lines, ceil_counts(n, len(lines)), strict=True):
        own = line[:before * outer * count * inner * after]
        apart[:, :, low:low + count].copy_(own.view(before, outer, count, inner * after))
        low += count
