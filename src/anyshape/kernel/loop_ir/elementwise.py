"""Elementwise (flat) kernels: one loop, and every element that is read or written is that of the point, or the same at
every point.

    rows (i0: 720896) vector i0               rows (i0: n0) vector i0           n0 = 720896
      r0 = load p0[i0]                 -->      r0 = load p0[i0]
      r1 = load p1[3]                           r1 = load p1[3]
      store p2[i0] ...                          store p2[i0] ...

How many points there are is then a size of its own. So kernels that differ in nothing else are one (the updates of all
weights), and a step may run one over some of its points only (plan/schedule/gemm_consumer_tiling.py).
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from anyshape.kernel.loop_ir.directives import Vectorize
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram
from anyshape.sym.expr import Size, substitute, symbol, symbols_of


def along(program: LoopProgram) -> tuple[int, ...]:
    """The params that a flat kernel goes along, element k of each at point k; () where it is not flat."""
    if len(program.rows) != 1 or program.columns or program.scratch or any(
            not isinstance(one, Vectorize) for one in program.schedule) or program.rows[0][1] == 1:
        return ()
    point = program.rows[0][0]
    found: dict[str, bool] = {}
    for one in (one for stage in program.stages for one in stage.instructions):
        goes = one.offset == symbol(point)
        if one.op in ("scatter", "check", "fold", "scan", "reduce") or (one.op == "index" and goes):
            return ()
        if (not goes and _varies(one, point)) or (one.buffer and found.setdefault(one.buffer, goes) != goes):
            return ()
    return tuple(position for position, param in enumerate(program.params) if found.get(param.name, False))


def _varies(one: Instruction, point: str) -> bool:
    """May its offset differ from point to point?"""
    names = symbols_of(one.offset)
    return point in names or any(name[0] == "%" for name in names)


def counted(program: LoopProgram, names: Sequence[str]) -> tuple[LoopProgram, tuple[Size, ...]]:
    """A flat program with the number of its points as its last size, and what its sizes stand for; others as they are.
    names: the symbols that the sizes of `program` stand for."""
    sizes = tuple(symbol(name) for name in names)
    if not along(program):
        return program, sizes
    point, extent = program.rows[0]
    inside = dict(zip(program.sizes, sizes, strict=True))
    used = set().union(*(symbols_of(one.offset) for stage in program.stages for one in stage.instructions))
    left = [name for name in program.sizes if name in used]
    renamed = {name: symbol(f"n{k}") for k, name in enumerate(left)}
    count = f"n{len(left)}"
    stages = tuple(dataclasses.replace(stage, instructions=tuple(
        dataclasses.replace(one, offset=substitute(one.offset, renamed)) for one in stage.instructions))
        for stage in program.stages)
    program = dataclasses.replace(program, stages=stages, rows=((point, symbol(count)),),
                                  sizes=(*(f"n{k}" for k in range(len(left))), count))
    return program, (*(inside[name] for name in left), substitute(extent, inside))
