"""Ring attention by torch.distributed: queries stay, keys and values go around, softmax is made as blocks arrive.

    rank r, turn j:  block of rank r - j;  scores = q @ k^T;  the result and its sums are scaled to the new maximum

Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers" (2023); the softmax by Milakov and Gimelshein,
"Online normalizer calculation for softmax" (2018). While a block is computed with, it is on its way to the next rank.
In the backward the gradients of a block travel with it, and are home after the last turn. Parts may differ in length,
or be empty: each rank knows all lengths, by the rule of ceil. No rank holds more than two blocks.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anyshape.base import counters
from anyshape.dist.placement import local_count
from anyshape.runtime.collectives.messages import Line
from anyshape.runtime.collectives.parts import Numbers
from anyshape.runtime.collectives.process_group import MESHES, line_of

WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


@torch.library.custom_op("anyshape_collective::ring", mutates_args=())
def ring(pieces: Sequence[Tensor], op: str, mesh: str, axis: str, causal: bool, scale: float | None,
         numbers: Sequence[int]) -> list[Tensor]:
    """Attention of a program over a sequence that is dealt out; see ops/attention.py."""
    counters.count("collectives")
    rows, columns = (tuple(numbers[at:at + 5]) for at in (0, 5))
    q = pieces[op == "ring_attention_backward"]
    one = Ring(line_of(MESHES[mesh], axis), rows, columns, causal,  # type: ignore[arg-type]
               q.shape[3] ** -0.5 if scale is None and q.shape[3] else scale or 0.0)
    return one.forward(*pieces) if op == "ring_attention" else one.backward(*pieces)


class Ring:
    """Attention over the sequence that the ranks of a line have parts of.

    Args:
        rows, columns: how the rows of queries, and the columns (keys and values) are dealt out.
    """

    def __init__(self, line: Line, rows: Numbers, columns: Numbers, causal: bool, scale: float) -> None:
        self.line = line
        self.starts = [local_count(rows[2], line.ranks, rank)[0] * rows[3] for rank in range(line.ranks)]
        self.columns = [tuple(place * columns[3] for place in local_count(columns[2], line.ranks, rank))
                        for rank in range(line.ranks)]
        self.causal = causal
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """The result [B, M, H, D] and logarithms [B, H, M] of this rank's rows; q is [B, H, M, D], k and v are
        [B, G, N, D]."""
        dtype = q.dtype
        wide = WIDE.get(dtype, dtype)
        largest = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        sums, result = torch.zeros_like(largest), torch.zeros(q.shape, dtype=wide)
        query = q.to(wide)
        for source, (key, value) in self._blocks([k, v]):
            scores = self._scores(query, key, source)
            if scores is None:
                continue
            new = torch.maximum(largest, scores.amax(3))
            base = torch.where(new == -torch.inf, 0.0, new)
            weights = (scores - base[..., None]).exp()
            factor = (largest - base).exp()
            sums = sums * factor + weights.sum(3)
            result = result * factor[..., None] + weights @ self._heads(value, query)
            largest = new
        nothing = sums == 0
        result = torch.where(nothing[..., None], 0.0, result / sums[..., None])
        logarithms = torch.where(nothing, 0.0, largest + sums.log())
        return [result.transpose(1, 2).contiguous().to(dtype), logarithms]

    def backward(self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, logarithms: Tensor,
                 products: Tensor) -> list[Tensor]:
        """Gradients of this rank's rows [B, M, H, D] and columns [B, N, G, D]."""
        dtype = q.dtype
        wide = WIDE.get(dtype, dtype)
        query, change = q.to(wide), gradient.to(wide)
        dq = torch.zeros_like(query)
        groups = k.shape[1]
        travelling = [torch.zeros(k.shape, dtype=wide), torch.zeros(k.shape, dtype=wide)]
        for source, (key, value) in self._blocks([k, v]):
            if source != self.line.rank:  # what the rank before has added to the gradients of this block
                travelling = self._passed(travelling, source)
            scores = self._scores(query, key, source)
            if scores is None:
                continue
            weights = (scores - logarithms[..., None]).exp()
            turned = self.scale * weights * (
                change @ self._heads(value, query).transpose(2, 3) - products[..., None])
            dq += turned @ self._heads(key, query)
            for own, found in zip(travelling, (turned.transpose(2, 3) @ query, weights.transpose(2, 3) @ change),
                                  strict=True):
                own += found.unflatten(1, (groups, q.shape[1] // groups)).sum(2)
        if self.line.ranks > 1:
            travelling = self._passed(travelling, self.line.rank)
        return [one.transpose(1, 2).contiguous().to(dtype) for one in (dq, *travelling)]

    def _scores(self, query: Tensor, key: Tensor, source: int) -> Tensor | None:
        """Of a block from `source`; None where no row sees one of its columns."""
        first, start = self.columns[source][0], self.starts[self.line.rank]
        rows, columns = query.shape[2], key.shape[2]
        if not rows or not columns or not query.shape[0] * query.shape[1] or (self.causal and first >= start + rows):
            return None
        scores = self.scale * (query @ self._heads(key, query).transpose(2, 3))
        if self.causal and first + columns > start + 1:
            seen = torch.arange(first, first + columns) <= torch.arange(start, start + rows)[:, None]
            scores = scores.masked_fill(~seen, -torch.inf)
        return scores

    def _heads(self, block: Tensor, query: Tensor) -> Tensor:
        """Keys or values, repeated for the heads of queries that share them."""
        block = block.to(query.dtype)
        return block if block.shape[1] == query.shape[1] else block.repeat_interleave(
            query.shape[1] // block.shape[1], 1)

    def _blocks(self, own: list[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """(the rank it is of, keys and values) of each block, this rank's first; meanwhile the next is on its way."""
        ranks, rank = self.line.ranks, self.line.rank
        blocks = own
        for turn in range(ranks):
            source = (rank - turn) % ranks
            work: list[Any] = []
            following: list[Tensor] = []
            if turn < ranks - 1:
                work, following = self._exchange(blocks, (source - 1) % ranks)
            yield source, blocks
            for one in work:
                one.wait()
            blocks = following

    def _exchange(self, blocks: Sequence[Tensor], coming: int, first: int = 0) -> tuple[list[Any], list[Tensor]]:
        """Begins to send blocks to the next rank, and to receive those of `coming` from the one before; their tags
        count from `first`."""
        low, high = self.columns[coming]
        made = [one.new_empty(*one.shape[:2], high - low, one.shape[3]) for one in blocks]
        work: list[Any] = []
        for tag, (out, into) in enumerate(zip(blocks, made, strict=True), first):
            if out.numel():
                work.append(dist.isend(out.contiguous(), self.line.peer(1), group=self.line.group, tag=tag))
            if into.numel():
                work.append(dist.irecv(into, self.line.peer(-1), group=self.line.group, tag=tag))
        return work, made

    def _passed(self, blocks: list[Tensor], coming: int) -> list[Tensor]:
        """Gradients go on to the next rank; those of the block of `coming` arrive."""
        work, made = self._exchange(blocks, coming, len(blocks))
        for one in work:
            one.wait()
        return made
