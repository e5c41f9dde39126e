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

from anyshape.kernel.loop_ir.directives import SplitReduction, Vectorize
from anyshape.kernel.loop_ir.program import LoopProgram
from anyshape.kernel.schedule.hardware_params import HardwareParams
from anyshape.kernel.schedule.interchange import interchanged
from anyshape.kernel.schedule.interleave import interleaved
from anyshape.kernel.schedule.split_reduction import LEAST, Chain, split, split_interchanged
from anyshape.kernel.schedule.tile_scan import tiled_scan
from anyshape.kernel.schedule.tile_transpose import tiled_transpose
from anyshape.sym.expr import Size, evaluate, maximum, minimum, product
from anyshape.sym.index_arithmetic import most

STRIPS = 8  # vectors: several strips of rows
PARTS = 16  # several parts of the columns
LIKELY = 16  # rows that are shorter by this factor in the first call may well be long in a later one


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Sizes from which on, or up to which, another version is better; in rows, columns or elements."""

    few_columns: int
    many_rows: int  # that fill a vector
    few_rows: int  # too few for all threads
    few_kept: int  # the same of a kernel with row buffers, which all rows then have at once
    pieces: int  # of a row
    long_row: int  # a piece of it is worth a thread
    likely_row: int  # may well be long in a later call
    wide: int  # rows of several strips
    tall: int  # columns of several parts
    far: int  # columns of which a strip is no more in a near cache when the next stage reads them
    large: int  # elements that do not stay in the caches of a core


def thresholds(hardware: HardwareParams) -> Thresholds:
    """The thresholds of a target."""
    return Thresholds(
        few_columns=hardware.min_vector_row, many_rows=hardware.vector_lanes, few_rows=hardware.parallelism // 2,
        few_kept=hardware.parallelism // 8, pieces=hardware.parallelism, long_row=hardware.thread_elements,
        likely_row=hardware.thread_elements // LIKELY, wide=STRIPS * hardware.vector_lanes, tall=PARTS * LEAST,
        far=hardware.near_cache_bytes // hardware.cache_line_bytes, large=hardware.core_cache_bytes // 4)


@dataclass(frozen=True, slots=True)
class Version:
    """programs: that run one after another. conditions: sizes over the program's own that must all be at least 0 for it
    to be used. handed: dtype and number of elements of what several programs hand to each other."""

    programs: tuple[LoopProgram, ...]
    conditions: tuple[Size, ...] = ()
    handed: tuple[tuple[str, Size], ...] = ()


Versions = tuple[Version, ...]


def versions(program: LoopProgram, hardware: HardwareParams, likely: Mapping[str, int] | None = None) -> Versions:
    """In order of choice; the last one may always be used. The sizes of all are the same, and so are the parameters,
    but for what is handed on.

    hardware: of the target. likely: the program's sizes in the first call: where rows are short there, or few are
    added up, no code is made for others."""
    at = thresholds(hardware)
    plain = Version((program,))
    ops = {one.op for stage in program.stages for one in stage.instructions}
    if program.directive(SplitReduction) or not program.columns:
        return (plain,)
    if "scan" in ops:
        scan = tiled_scan(program, hardware) if program.rows and program.vector == program.rows[-1][0] else None
        if scan is None:
            return (plain,)
        count = product(extent for _, extent in (*program.rows, *program.columns))
        return _ending(_where(program.rows[-1][1] - at.wide, count - at.large, of=Version((scan,))), plain)
    across = _across(program, hardware, at, likely)
    if across:
        return _ending(across, plain)
    inside = interchanged(program, hardware)
    if "reduce" not in ops or "scatter" in ops:
        return (plain if inside is None or "reduce" in ops else Version((inside,)),)
    return _ending(_reducing(program, hardware, at, likely, inside), plain)


def _across(program: LoopProgram, hardware: HardwareParams, at: Thresholds, likely: Mapping[str, int] | None
            ) -> list[Version]:
    """Versions of a kernel that reads or writes across its columns: interleaved, and in tiles."""
    found: list[Version] = []
    inside = interleaved(program, hardware, likely)
    if inside is not None:
        found += _where(*inside[1], of=Version((inside[0],)))
    tiles = tiled_transpose(program, hardware)
    if tiles is not None:
        found += _where(tiles.rows[-1][1] - at.many_rows, tiles.columns[0][1] - at.many_rows, of=Version((tiles,)))
    return found


def _reducing(program: LoopProgram, hardware: HardwareParams, at: Thresholds, likely: Mapping[str, int] | None,
              inside: LoopProgram | None) -> list[Version]:
    """Versions of a reduction along its rows, or down its columns. inside: with its rows inside of its columns."""
    rows, columns = (product(extent for _, extent in loops) for loops in (program.rows, program.columns))
    found: list[Version] = []
    if program.vector == program.columns[-1][0]:
        if program.rows:
            name, last = program.rows[-1]
            strips = program.scheduled(Vectorize(name))
            found += _where(at.few_columns - columns, last - at.many_rows, of=Version((strips,)))
        outer = program.columns[0][1]
        few = at.few_kept if program.scratch else at.few_rows
        if likely is None or evaluate(columns, likely) >= at.likely_row:
            found += _chained((few - rows, columns - at.long_row, outer - at.pieces), program, hardware, split)
    elif program.vector and 0 <= most(columns) < at.tall:
        return []
    elif program.vector and (likely is None or evaluate(rows, likely) >= at.wide):
        found += _chained((rows - at.wide, columns - at.tall, rows * columns - at.large), program, hardware,
                          split_interchanged)
    if not found and inside is not None and program.rows:
        stages = sum(stage.level == "column" for stage in program.stages)
        tall = at.tall if stages == 1 else at.far
        found += _where(program.rows[-1][1] - at.wide, columns - tall, rows * columns - at.large,
                        of=Version((inside,)))
    return found


def _ending(found: list[Version], plain: Version) -> Versions:
    """Those found, up to the first that may always be used, which is the plain one if there is no other."""
    always = [k for k, version in enumerate(found) if not version.conditions]
    return tuple(found[:always[0] + 1]) if always else (*found, plain)


def _where(*limits: Size, of: Version) -> list[Version]:
    """The version where all limits are at least 0; nothing where one never is."""
    if any(isinstance(limit, int) and limit < 0 for limit in limits):
        return []
    return [dataclasses.replace(of, conditions=tuple(dict.fromkeys(x for x in limits if not isinstance(x, int))))]


def _chained(limits: tuple[Size, ...], program: LoopProgram, hardware: HardwareParams,
             make: Callable[[LoopProgram, HardwareParams], Chain | None]) -> list[Version]:
    """The chain where all limits are at least 0, if there is one. Elsewhere it hands on nothing."""
    found = _where(*limits, of=Version(()))
    chain = make(program, hardware) if found else None
    if chain is None:
        return []
    conditions = found[0].conditions
    handed = []
    for dtype, count in chain.handed:
        for limit in conditions:
            count = minimum(count, count * maximum(0, limit + 1))
        handed.append((dtype, count))
    return [Version(chain.programs, conditions, tuple(handed))]
