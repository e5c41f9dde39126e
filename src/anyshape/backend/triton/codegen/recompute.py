"""Recomputation of row buffers: a value that a later stage reads is computed again there, from what it was made of.

    columns (i1: n1)                      columns (i1: n1)
      r4: f32 = exp r3                      r4: f32 = exp r3
      r5: f32 = reduce add r4               r5: f32 = reduce add r4
      store t0[i1] r4               -->   columns (i1: n1)
    columns (i1: n1)                        r10: f32 = load p0[i0*n1 + i1]
      r6: f32 = load t0[i1]                 r11: f32 = sub r10, r1
      r7: f32 = div r6, r5                  r12: f32 = exp r11
                                            r7: f32 = div r12, r5

Columns in steps have no registers for a whole row, and memory for it costs as much as reading the inputs again, which
the device's caches may still have.
"""
from __future__ import annotations

import dataclasses

from anyshape.kernel.loop_ir.aliasing import overwritable
from anyshape.kernel.loop_ir.def_use import used
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram, Stage
from anyshape.sym.expr import substitute, symbol


def without_row_buffers(program: LoopProgram) -> LoopProgram | None:
    """The program without row buffers; None where one is no value of another column stage, or what it was made of may
    be overwritten meanwhile."""
    if not program.scratch:
        return program
    work = _Recompute(program)
    stages = [work.stage(number) for number in range(len(program.stages))]
    if work.failed:
        return None
    return dataclasses.replace(program, stages=tuple(one for one in stages if one.instructions), scratch=())


class _Recompute:
    """The work on one program."""

    def __init__(self, program: LoopProgram) -> None:
        self.program = program
        self.free = 1 + max(one.result for stage in program.stages for one in stage.instructions)
        self.buffers = {one.name for one in program.scratch}
        self.stores: dict[str, tuple[int, Instruction]] = {}  # the one store of a row buffer, and its stage
        self.written: list[set[str]] = []  # params that are written before the end of a stage
        self.failed = False
        names = [param.name for param in program.params]
        self.over = {(names[source], names[out]) for source, out in overwritable(program)}
        self.made: dict[tuple[int, int], int] = {}  # of the stage at work: (its first stage, register) -> register
        self.body: list[Instruction] = []
        self.renamed: dict[int, int] = {}
        so_far: set[str] = set()
        for number, stage in enumerate(program.stages):
            for one in stage.instructions:
                if one.op == "store" and one.buffer in self.buffers:
                    self.failed |= one.buffer in self.stores or len(one.args) > 1 or stage.level != "column"
                    self.stores[one.buffer] = number, one
                elif one.op in ("store", "scatter", "fold"):
                    so_far.add(one.buffer)
            self.written.append(set(so_far))

    def stage(self, number: int) -> Stage:
        """The stage, with what it read from row buffers computed in it."""
        stage = self.program.stages[number]
        self.made, self.body, self.renamed = {}, [], {}
        for one in stage.instructions:
            if one.buffer in self.buffers and one.op == "store":
                continue
            if one.buffer in self.buffers and one.op == "load":
                self.renamed[one.result] = self._stored(one, number)
            else:
                self.body.append(_with(one, one.result, self.renamed))
        return Stage(stage.level, tuple(self.body), stage.where)

    def _stored(self, load: Instruction, number: int) -> int:
        """The register of stage `number` that has what a load of a row buffer gives."""
        place, store = self.stores.get(load.buffer, (number, load))
        if place >= number or store.offset != load.offset or load.args:
            self.failed = True
            return load.result
        return self._value(place, store.args[0], number)

    def _value(self, place: int, register: int, number: int) -> int:
        """The register of stage `number` with the value that `register` of the earlier stage `place` has."""
        if (place, register) in self.made:
            return self.made[place, register]
        one = next((one for one in self.program.stages[place].instructions if one.result == register), None)
        if one is None:
            return register  # of a row stage: it is still there
        if one.op in ("reduce", "scan"):
            self.failed = True
            return register
        if one.buffer in self.buffers:
            return self._stored(one, place)
        if one.op == "load" and number and self.written[number - 1] & {
                one.buffer, *(out for source, out in self.over if source == one.buffer)}:
            self.failed = True
        renamed = {other: self._value(place, other, number) for other in used(one)}
        self.made[place, register] = self.free
        self.free += 1
        self.body.append(_with(one, self.made[place, register], renamed))
        return self.made[place, register]


def _with(one: Instruction, result: int, renamed: dict[int, int]) -> Instruction:
    """The instruction over other registers."""
    if not renamed:
        return dataclasses.replace(one, result=result)
    names = {f"%{old}": symbol(f"%{new}") for old, new in renamed.items()}
    return dataclasses.replace(one, result=result, args=tuple(renamed.get(arg, arg) for arg in one.args),
                               offset=substitute(one.offset, names))
