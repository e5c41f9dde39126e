"""Attention of the host, in the native subset: some rows of scores at a time, in a thread's scratch.

    forward, for each tile of rows of each head:
        scores = q + AttentionStep.k^T; weigh; result = scores + AttentionStep.v
    backward, for each head of keys, for each tile of rows, the last one first, which sees the most keys:
        scores = q + AttentionStep.k^T; dscores = dresult + AttentionStep.v^T; unweigh
        dq = dscores + AttentionStep.k; dk += dscores^T + AttentionStep.q; dv += scores^T + AttentionStep.dresult

Here is how a step is shared out among threads. Products are those of attention_blas.py, in half precision of
attention_packed.py; the rows' own work is backend/cpu/microkernels/softmax_rows.py, which also scales scores and their
gradients. The words are in format.py. After Dao and others, FlashAttention (2022), with whole rows of scores in place
of blocks: a tile has fewer rows where the rows are long.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import PARALLEL_FLOPS, AttentionStep, CallBlock
from anyshape.backend.cpu.native.records import minimum, new
from anyshape.backend.cpu.routines.attention_blas import attention_head, attention_tile
from anyshape.backend.cpu.routines.attention_operands import AttentionWork
from anyshape.backend.cpu.routines.attention_packed import half_head, half_tile
from anyshape.backend.cpu.routines.threads import parallel_for, share


def run_attention(block: CallBlock, step: AttentionStep) -> int:
    """All heads of a batch: tiles of rows are shared out among threads, backwards whole heads of keys."""
    tiles = (step.rows + step.tile - 1) // step.tile
    heads = step.batch * step.groups
    items = heads if step.backward != 0 else heads * step.share * tiles
    if items <= 0:
        return 0
    data = new(AttentionWork)
    data.functions = block.functions
    data.block = block
    data.step = step
    data.items = items
    data.tiles = tiles
    cost = heads * step.share * step.rows * step.columns
    threads = minimum(minimum(block.threads, items), 2 * cost * step.depth // PARALLEL_FLOPS)
    return parallel_for(block, attention_share, data, threads)


def attention_share(data: AttentionWork, number: int, team: int) -> int:
    """The share of thread `number`."""
    return attention_range(data, share(data.items, number, team), share(data.items, number + 1, team), number)


def attention_range(data: AttentionWork, begin: int, end: int, thread: int) -> int:
    """The tiles, or heads of keys, begin..end-1."""
    block = data.block
    step = data.step
    program = block.program
    scratch = block.scratch + thread * program.scratch
    tiles = data.tiles
    groups = step.groups
    heads = groups * step.share
    half = step.lanes
    packed = -1  # of which heads, counted through all batches, the panels of keys and values are in the scratch
    for index in range(begin, end):
        if step.backward != 0:
            if half != 0:
                half_head(data, index // groups, index % groups, tiles, scratch)
            else:
                attention_head(data, index // groups, index % groups, tiles, scratch)
        else:
            head = index // tiles
            if half != 0:
                keys = head // step.share
                half_tile(data, head // heads, head % heads, index % tiles, scratch, 1 if keys != packed else 0)
                packed = keys
            else:
                attention_tile(data, head // heads, head % heads, index % tiles, scratch)
    return 0
