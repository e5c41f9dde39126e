"""Split (two-stage) reductions, for few rows that are long: a kernel's columns are cut into pieces, a chain of kernels
with many rows each.

    rows (i0: n0), columns (i1: n1)        rows (i0: n0, i2: 32), columns (i1: n1/32)   reduce x; store s0[i0, i2]
      reduce x; store p1[i0]         -->   rows (i0: n0), columns (i2: 32)              reduce s0; store p1[i0]

Every column stage becomes two kernels: what it does on a piece, and what the pieces give together, with the row stage
that follows. What a later kernel needs of a row it computes again, but for what was reduced, which is stored. The
pieces are a matter of sizes, so that a sum comes out the same on any number of threads.
"""
from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

from anyshape.kernel.loop_ir.def_use import EFFECTS, needed, used
from anyshape.kernel.loop_ir.directives import SplitReduction, Vectorize
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram, Param, Stage
from anyshape.kernel.schedule.hardware_params import HardwareParams
from anyshape.sym.expr import Size, ceildiv, maximum, minimum, product, substitute, symbol

LEAST = 32  # columns of a part, at least: what is stored of the parts is small beside the columns
WHOLE = 4  # vectors: a piece is so many, or a multiple


@dataclass(frozen=True, slots=True)
class Chain:
    """programs: in order; they have the params of the one that was split, and then what they hand to each other.
    handed: dtype and number of elements of each of that."""

    programs: tuple[LoopProgram, ...]
    handed: tuple[tuple[str, Size], ...]


def split(program: LoopProgram, hardware: HardwareParams) -> Chain | None:
    """The chain in place of a program whose rows are taken one by one, with columns as vectors; None where nothing is
    reduced. What was in a row buffer is handed on for every row."""
    ops = {one.op for stage in program.stages for one in stage.instructions}
    if "reduce" not in ops or ops & {"scatter", "fold"} or not program.columns:
        return None
    return _Split(program, hardware).chain()


def split_interchanged(program: LoopProgram, hardware: HardwareParams) -> Chain | None:
    """The chain in place of a program that takes strips of rows through columns far apart: what it does along the rows,
    as they lie in memory, folded over parts of the columns; then the parts. None where it has no such form."""
    inside = [stage for stage in program.stages if stage.level == "column"]
    ops = {one.op for stage in program.stages for one in stage.instructions}
    if len(inside) != 1 or "reduce" not in ops or ops & {"scatter", "fold"} or program.scratch:
        return None
    if len(program.rows) != 1:  # what lies between the rows in memory would be gone through again and again
        return None
    work = _Split(program, hardware)
    count = minimum(work.pieces, ceildiv(product(extent for _, extent in program.columns), LEAST))
    effects: list[Instruction] = []
    before: list[Instruction] = []
    for stage in program.stages:
        if stage.level == "row":
            effects += work.learn(stage)
        else:
            before = list(work.known)
    reduces = [one for one in inside[0].instructions if one.op == "reduce"]
    length = product(extent for _, extent in program.rows)
    place = symbol(work.piece) * length + work.row
    partial = [work.place(one.dtype, count) for one in reduces]
    names = {one.result: name for one, name in zip(reduces, partial, strict=True)}
    body = [dataclasses.replace(one, result=-1, op="fold", buffer=names[one.result], offset=place)
            if one.op == "reduce" else one for one in inside[0].instructions]
    along = dataclasses.replace(
        program, rows=program.columns, columns=program.rows,
        stages=(Stage("column", (*needed(before, body), *body)),)).scheduled(SplitReduction(work.piece, count))
    load = [Instruction(work.free + k, "load", (), one.dtype, names[one.result], place)
            for k, one in enumerate(reduces)]
    total = [dataclasses.replace(one, args=(first.result,)) for one, first in zip(reduces, load, strict=True)]
    after = (*needed(work.known, effects), *effects)
    over = dataclasses.replace(program, columns=((work.piece, count),),
                               stages=_filled((Stage("column", (*load, *total)), Stage("row", after))))
    return work.linked([along, over])


class _Split:
    """The work on one program."""

    def __init__(self, program: LoopProgram, hardware: HardwareParams) -> None:
        self.program = program
        self.pieces = hardware.parallelism
        self.whole = WHOLE * hardware.vector_lanes
        names = dict((*program.rows, *program.columns))
        self.piece = next(name for k in itertools.count() if (name := f"i{k}") not in names)
        self.handed: list[Param] = []
        self.counts: list[Size] = []
        self.row = _place(program.rows)
        self.free = 1 + max(one.result for stage in program.stages for one in stage.instructions)
        self.known: list[Instruction] = []  # of row stages, and loads of what was reduced
        self.totals: dict[int, str] = {}  # reduced register -> where it is handed on

    def chain(self) -> Chain:
        """Kernels in pieces and in whole rows, by turns."""
        links: list[LoopProgram] = []
        waiting: list[Instruction] = []  # effects of row stages
        length = product(extent for _, extent in self.program.columns)
        kept = {one.name: self.place(one.dtype, length) for one in self.program.scratch}
        stages = [Stage(stage.level, tuple(
            dataclasses.replace(one, buffer=kept[one.buffer], offset=self.row * length + one.offset)
            if one.buffer in kept else one for one in stage.instructions)) for stage in self.program.stages]
        while stages and stages[0].level == "row":
            waiting += self.learn(stages.pop(0))
        while stages:
            column = stages.pop(0)
            reduces = [one for one in column.instructions if one.op == "reduce"]
            partial = [self.place(one.dtype, self.pieces) for one in reduces]
            links.append(self.in_pieces(column, reduces, partial))
            before = len(self.known)
            while stages and stages[0].level == "row":
                waiting += self.learn(stages.pop(0))
            rest = [one for stage in stages for one in stage.instructions]
            live = {register for one in (*needed(self.known, rest), *rest) for register in used(one)}
            later = [one for one in reduces if one.result in live]
            if reduces or waiting:
                links.append(self.together(reduces, partial, later, waiting))
            self.known[before:before] = [
                dataclasses.replace(one, op="load", args=(), combine="", offset=self.row,
                                    buffer=self.totals[one.result]) for one in later]
            waiting = []
        return self.linked(links)

    def linked(self, links: list[LoopProgram]) -> Chain:
        """The links, with what they hand to each other."""
        params = (*self.program.params, *self.handed)
        return Chain(tuple(dataclasses.replace(link, params=params, scratch=()) for link in links),
                     tuple((one.dtype, count) for one, count in zip(self.handed, self.counts, strict=True)))

    def learn(self, stage: Stage) -> list[Instruction]:
        """Remember what a row stage computes; its effects are returned."""
        self.known += [one for one in stage.instructions if one.op not in EFFECTS]
        return [one for one in stage.instructions if one.op in EFFECTS]

    def place(self, dtype: str, pieces: Size) -> str:
        name = f"s{len(self.handed)}"
        self.handed.append(Param(name, dtype, "out"))
        self.counts.append(product(extent for _, extent in self.program.rows) * pieces)
        return name

    def in_pieces(self, column: Stage, reduces: list[Instruction], partial: list[str]) -> LoopProgram:
        """The column stage on every piece; what it reduces is stored."""
        (outer, extent), *inner = self.program.columns
        whole = 1 if inner else self.whole
        length = whole * ceildiv(extent, whole * self.pieces)
        first = symbol(self.piece) * length
        moved = {outer: first + symbol(outer)}
        body = tuple(dataclasses.replace(one, offset=substitute(one.offset, moved)) for one in column.instructions)
        place = self.row * self.pieces + symbol(self.piece)
        stores = tuple(Instruction(-1, "store", (one.result,), one.dtype, name, place)
                       for one, name in zip(reduces, partial, strict=True))
        stages = (Stage("row", needed(self.known, body)), Stage("column", body), Stage("row", stores))
        return dataclasses.replace(
            self.program, rows=(*self.program.rows, (self.piece, self.pieces)), stages=_filled(stages),
            columns=((outer, maximum(0, minimum(length, extent - first))), *inner))

    def together(self, reduces: list[Instruction], partial: list[str], later: list[Instruction],
                 effects: list[Instruction]) -> LoopProgram:
        """The pieces of each row reduced, and the effects of the row; later: what later kernels need is stored."""
        body: list[Instruction] = []
        for one, name in zip(reduces, partial, strict=True):
            body += [Instruction(self.free, "load", (), one.dtype, name, self.row * self.pieces + symbol(self.piece)),
                     dataclasses.replace(one, args=(self.free,))]
            self.free += 1
        after = list(effects)
        for one in later:
            self.totals[one.result] = self.place(one.dtype, 1)
            after.append(Instruction(-1, "store", (one.result,), one.dtype, self.totals[one.result], self.row))
        stages = (Stage("column", tuple(body)), Stage("row", (*needed(self.known, after), *after)))
        if not body:
            return dataclasses.replace(self.program, rows=self.program.rows or (("i0", 1),), columns=(), schedule=(),
                                       stages=_filled(stages))
        return dataclasses.replace(self.program, columns=((self.piece, self.pieces),),
                                   stages=_filled(stages)).scheduled(Vectorize(self.piece))


def _place(loops: tuple[tuple[str, Size], ...]) -> Size:
    """The number of a point of the loops."""
    place: Size = 0
    for name, extent in loops:
        place = place * extent + symbol(name)
    return place


def _filled(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    return tuple(stage for stage in stages if stage.instructions)
