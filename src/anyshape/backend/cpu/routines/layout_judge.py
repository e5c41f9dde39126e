"""The judge of a layout's numbers, in the native subset: see plan/layout_judge.py. It shares nothing with what assigns
offsets."""
from __future__ import annotations

from anyshape.backend.cpu.native.records import Array, i64, maximum, minimum


def apart(count: int, starts: Array[i64], sizes: Array[i64], which: Array[i64], alive: int, pairs: Array[i64],
          kept: int) -> int:
    """1 where `count` buffers lie apart, else 0: each at a multiple of 64 from 0 on and below 2^62, across no border at
    `kept`, and no two that are alive together share a byte. Buffer i begins at `starts[i]` and has `sizes[which[i]]`
    bytes, below 2^62; `pairs`: `alive` buffers, then for each one the other that is alive with it."""
    for i in range(count):
        start = starts[i]
        if start < 0 or start >= 4611686018427387904:
            return 0
        if start != (start & -64):
            return 0
        if start < kept and kept < start + sizes[which[i]]:
            return 0
    for k in range(alive):
        one = pairs[k]
        other = pairs[alive + k]
        end = minimum(starts[one] + sizes[which[one]], starts[other] + sizes[which[other]])
        if maximum(starts[one], starts[other]) < end:
            return 0
    return 1
