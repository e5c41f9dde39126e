"""Kernel multi-versioning: versions of a kernel for regimes of sizes.

    rows (i0: n0), columns (i1: n1) vector i1   -->   where n1 <= 6 and n0 >= 16: vector i0
                                                      where n0 <= 16 and n1 >= 65536: a chain over pieces of the columns
                                                      else as it is

A row of columns fills vectors only as far as it goes, and its reductions end in a sum across lanes. With few columns
one vector over neighbouring rows, which steps through the columns one by one, does the work of many. A few long rows
keep as many threads busy as there are rows; in pieces they are many (kernel/schedule/split_reduction.py). Strips of
rows that step through many columns read memory in short runs; where there is much of it, it is read as it lies.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from anyshape.kernel.loop_ir.program import LoopProgram
from anyshape.kernel.schedule.interchange import abreast
from anyshape.kernel.schedule.split_reduction import PIECES, Chain, split, turned
from anyshape.kernel.schedule.tile_scan import swept
from anyshape.kernel.schedule.tile_transpose import tiled
from anyshape.sym.expr import Size, evaluate, maximum, minimum, product
from anyshape.sym.index_arithmetic import most

FEW_COLUMNS = 6
MANY_ROWS = 16  # lanes of a vector of f32
FEW_ROWS = 16  # for a thread each
FEW_KEPT = 4  # of a kernel with row buffers, which all rows then have at once
LONG_ROW = 65536  # elements, for a piece to be worth a thread
LIKELY_ROW = 4096  # from here on rows may well be longer in a later call
WIDE = 128  # rows of several strips
TALL = 512  # columns of several parts
FAR = 2048  # columns of which a strip is no more in a near cache when the next stage reads them
LARGE = 1048576  # elements that do not stay in a near cache


@dataclass(frozen=True, slots=True)
class Version:
    """programs: that run one after another. conditions: sizes over the program's own that must all be at least 0 for it
    to be used. handed: dtype and number of elements of what several programs hand to each other."""

    programs: tuple[LoopProgram, ...]
    conditions: tuple[Size, ...] = ()
    handed: tuple[tuple[str, Size], ...] = ()


Versions = tuple[Version, ...]


def versions(program: LoopProgram, likely: Mapping[str, int] | None = None) -> Versions:
    """In order of choice; the last one may always be used. The sizes of all are the same, and so are the parameters,
    but for what is handed on. likely: the program's sizes in the first call: where rows are short there, or few are
    added up, no code is made for others."""
    plain = Version((program,))
    ops = {one.op for stage in program.stages for one in stage.instructions}
    if program.parts or not program.columns:
        return (plain,)
    if "scan" in ops:
        sweep = swept(program) if program.rows and program.vector == program.rows[-1][0] else None
        if sweep is None:
            return (plain,)
        count = product(extent for _, extent in (*program.rows, *program.columns))
        return _ending(_where(program.rows[-1][1] - WIDE, count - LARGE, of=Version((sweep,))), plain)
    tiles = tiled(program)
    if tiles is not None:
        sides = tiles.rows[-1][1] - MANY_ROWS, tiles.columns[0][1] - MANY_ROWS
        return _ending(_where(*sides, of=Version((tiles,))), plain)
    side_by_side = abreast(program)
    if "reduce" not in ops or "scatter" in ops:
        return (plain if side_by_side is None or "reduce" in ops else Version((side_by_side,)),)
    rows, columns = (product(extent for _, extent in loops) for loops in (program.rows, program.columns))
    found: list[Version] = []
    if program.vector == program.columns[-1][0]:
        if program.rows:
            name, last = program.rows[-1]
            strips = dataclasses.replace(program, vector=name)
            found += _where(FEW_COLUMNS - columns, last - MANY_ROWS, of=Version((strips,)))
        outer = program.columns[0][1]
        few = FEW_KEPT if program.scratch else FEW_ROWS
        if likely is None or evaluate(columns, likely) >= LIKELY_ROW:
            found += _chained((few - rows, columns - LONG_ROW, outer - PIECES), program, split)
    elif program.vector and 0 <= most(columns) < TALL:
        return (plain,)
    elif program.vector and (likely is None or evaluate(rows, likely) >= WIDE):
        found += _chained((rows - WIDE, columns - TALL, rows * columns - LARGE), program, turned)
    if not found and side_by_side is not None and program.rows:
        stages = sum(stage.level == "column" for stage in program.stages)
        tall = TALL if stages == 1 else FAR
        found += _where(program.rows[-1][1] - WIDE, columns - tall, rows * columns - LARGE,
                        of=Version((side_by_side,)))
    return _ending(found, plain)


def _ending(found: list[Version], plain: Version) -> Versions:
    """Those found, up to the first that may always be used, which is the plain one if there is no other."""
    always = [k for k, version in enumerate(found) if not version.conditions]
    return tuple(found[:always[0] + 1]) if always else (*found, plain)


def _where(*limits: Size, of: Version) -> list[Version]:
    """The version where all limits are at least 0; nothing where one never is."""
    if any(isinstance(limit, int) and limit < 0 for limit in limits):
        return []
    return [dataclasses.replace(of, conditions=tuple(dict.fromkeys(x for x in limits if not isinstance(x, int))))]


def _chained(limits: tuple[Size, ...], program: LoopProgram, make: Callable[[LoopProgram], Chain | None]
             ) -> list[Version]:
    """The chain where all limits are at least 0, if there is one. Elsewhere it hands on nothing."""
    found = _where(*limits, of=Version(()))
    chain = make(program) if found else None
    if chain is None:
        return []
    conditions = found[0].conditions
    handed = []
    for dtype, count in chain.handed:
        for limit in conditions:
            count = minimum(count, count * maximum(0, limit + 1))
        handed.append((dtype, count))
    return [Version(chain.programs, conditions, tuple(handed))]
