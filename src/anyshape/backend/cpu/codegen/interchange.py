"""Code for interchanged loops: at every point of the columns, all rows that a thread has, a strip of them at most.

    columns (i0: n0)                  for i1 from begin to end, a strip at a time:
      r0 = load p0[i0*n1 + i1]          for i1 in the strip:  t[i1] = -inf
      r1 = reduce maximum r0      -->   for i0:  for i1 in the strip:  t[i1] = maximum(t[i1], p0[i0*n1 + i1])
    row                                 for i1 in the strip:  p1[i1] = t[i1]
      store p1[i1] r1

Row buffers are as long as a strip and stay in the cache. A sum in f32 is added up in chunks of TURN columns, and these
in f64. What a scatter writes to next is asked for meanwhile: where it is, is known some columns before.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from anyshape.backend.cpu.codegen.memory_access import Space
from anyshape.backend.cpu.codegen.reduction import identity
from anyshape.backend.cpu.llvm.ir_builder import Value, constant
from anyshape.kernel.loop_ir.def_use import EFFECTS, needed
from anyshape.kernel.loop_ir.directives import Interchange
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram, Scratch, Stage
from anyshape.sym.expr import Size, minimum, substitute, symbol, symbols_of

BLOCK = 64  # rows of a row block: several vectors
TURN = 16  # columns
AHEAD = 4  # columns
_BEGIN = "strip"  # name of the row that a strip begins with


_NOTHING = Stage("row", ())


@dataclass(frozen=True, slots=True)
class Pass:
    """What is done of a stage, each along a whole strip: `body` at every point of the columns, or once where it is at
    level "row"; `start` before it, `turn` after every TURN columns. A body may have instructions "ask", for the lines
    at an offset."""

    body: Stage
    start: Stage
    turn: Stage


@dataclass(frozen=True, slots=True)
class Interchanged:
    """program: with row buffers for what is reduced; passes: in order, none where its loops are not interchanged;
    strip: rows that are gone through at once."""

    program: LoopProgram
    passes: tuple[Pass, ...] = ()
    strip: int = 0


def lower_interchange(program: LoopProgram) -> Interchanged:
    """See `Interchanged`; what a row stage computes is computed again where it is needed."""
    interchange = program.directive(Interchange)
    if interchange is None:
        return Interchanged(program)
    work = _Work(program, interchange.strip)
    passes = [work.row(stage) if stage.level == "row" else work.column(stage) for stage in program.stages]
    passes = [one for one in passes if one.body.instructions]
    program = dataclasses.replace(program, stages=tuple(one.body for one in passes), scratch=tuple(work.scratch))
    return Interchanged(program, tuple(passes), interchange.strip)


class _Work:
    """known: what row stages compute, and loads of what was reduced."""

    def __init__(self, program: LoopProgram, strip: int) -> None:
        self.vector, self.room = program.vector, minimum(strip, program.rows[-1][1])
        self.inner, self.last = program.columns[-1][0], program.columns[-1][1] - 1
        self.scratch: list[Scratch] = []
        self.known: list[Instruction] = []
        self.free = 1 + max(one.result for stage in program.stages for one in stage.instructions)

    def row(self, stage: Stage) -> Pass:
        self.known += [one for one in stage.instructions if one.op not in EFFECTS]
        effects = [one for one in stage.instructions if one.op in EFFECTS]
        return Pass(Stage("row", (*needed(self.known, effects), *effects), stage.where), _NOTHING, _NOTHING)

    def column(self, stage: Stage) -> Pass:
        start: list[Instruction] = []
        body: list[Instruction] = []
        turn: list[Instruction] = []
        after: list[Instruction] = []
        for one in stage.instructions:
            if one.op != "reduce":
                body.append(one)
                continue
            far = one.combine == "add" and one.dtype == "f32"
            nothing = identity(one.combine, one.dtype)
            partial = self.buffer(one.dtype)
            start += self.clear(partial, nothing)
            old = self.load(partial)
            new = Instruction(self.number(), one.combine, (old.result, *one.args), one.dtype)
            body += [old, new, self.store(partial, new)]
            if not far:
                after.append(self.load(partial, one.result))
                continue
            total = self.buffer("f64")
            start += self.clear(total, 0)
            sums, more = self.load(total), self.load(partial)
            wide = Instruction(self.number(), "cast", (more.result,), "f64")
            both = Instruction(self.number(), "add", (sums.result, wide.result), "f64")
            turn += [sums, more, wide, both, self.store(total, both), *self.clear(partial, nothing)]
            whole = self.load(total)
            after += [whole, Instruction(one.result, "cast", (whole.result,), "f32")]
        whole_body = (*needed(self.known, body), *body)
        self.known += after
        return Pass(Stage("column", (*self.asked(whole_body), *whole_body), stage.where), Stage("row", tuple(start)),
                    Stage("row", tuple(turn)))

    def asked(self, body: tuple[Instruction, ...]) -> list[Instruction]:
        """Asks for where the body will store to, if the data say where: how that is found, from a later column."""
        stores = [one for one in body if one.op in ("store", "scatter")
                  and any(name[0] == "%" for name in symbols_of(one.offset))]
        found = needed(body, [Instruction(-1, "index", offset=one.offset) for one in stores])
        numbers = {one.result: self.number() for one in found}
        names: dict[str, Size] = {f"%{old}": symbol(f"%{new}") for old, new in numbers.items()}
        names[self.inner] = minimum(symbol(self.inner) + AHEAD, self.last)
        later = [dataclasses.replace(one, result=numbers[one.result], args=tuple(numbers[k] for k in one.args),
                                     offset=substitute(one.offset, names)) for one in found]
        places = dict.fromkeys((one.buffer, substitute(one.offset, names)) for one in stores)
        return [*later, *(Instruction(-1, "ask", (), "bool", name, offset) for name, offset in places)]

    def number(self) -> int:
        self.free += 1
        return self.free - 1

    def buffer(self, dtype: str) -> Scratch:
        self.scratch.append(Scratch(f"strip {len(self.scratch)}", dtype, self.room))
        return self.scratch[-1]

    def load(self, of: Scratch, result: int | None = None) -> Instruction:
        return Instruction(self.number() if result is None else result, "load", (), of.dtype, of.name, self.place)

    def store(self, to: Scratch, value: Instruction) -> Instruction:
        return Instruction(-1, "store", (value.result,), to.dtype, to.name, self.place)

    def clear(self, buffer: Scratch, value: float | int | bool) -> list[Instruction]:
        nothing = Instruction(self.number(), "constant", (), buffer.dtype, value=value)
        return [nothing, self.store(buffer, nothing)]

    @property
    def place(self) -> Size:
        return symbol(self.vector) - symbol(_BEGIN)


class Strips:
    """Emits the row blocks begin to end of a program whose loops are interchanged."""

    def __init__(self, interchanged: Interchanged, space: Space, along: Callable[[Stage, Value, Value], None]) -> None:
        """along(stage, start, stop): emits a stage for the rows of a strip."""
        self.passes, self.strip = interchanged.passes, interchanged.strip
        self.program = interchanged.program
        self.space = space
        self.code = space.code
        self.along = along

    def run(self, begin: Value, end: Value, extents: list[Value]) -> None:
        """extents: of the outer rows, and the row blocks of the last variable."""
        code, space = self.code, self.space
        blocks = code.intrinsic("smax", extents[-1], constant("i64", 1))
        last = code.binary("sub", end, constant("i64", 1))
        outer = code.open_loop(code.binary("udiv", begin, blocks), code.binary(
            "add", code.binary("udiv", last, blocks), constant("i64", 1)), 1)
        self._name(outer, extents)
        before = code.binary("mul", outer, blocks)
        first = code.intrinsic("smax", code.binary("sub", begin, before), constant("i64", 0))
        after = code.intrinsic("smin", code.binary("sub", end, before), blocks)
        size = space.size(self.program.rows[-1][1])
        stop = code.intrinsic("smin", code.binary("mul", after, constant("i64", BLOCK)), size)
        start = code.open_loop(code.binary("mul", first, constant("i64", BLOCK)), stop, self.strip)
        space.names[_BEGIN] = start
        for each in self.passes:
            whole = code.binary("add", start, constant("i64", self.strip))
            self._pass(each, start, code.intrinsic("smin", stop, whole))
        code.close_section()
        code.close_section()

    def _name(self, outer: Value, extents: list[Value]) -> None:
        """The outer rows' variables at their `outer`th point."""
        code = self.code
        for k in reversed(range(len(extents) - 1)):
            name, value = self.program.rows[k][0], outer
            if k:
                safe = code.intrinsic("smax", extents[k], constant("i64", 1))
                value, outer = code.binary("urem", outer, safe), code.binary("udiv", outer, safe)
            self.space.names[name] = value

    def _pass(self, each: Pass, start: Value, stop: Value) -> None:
        code, space = self.code, self.space
        if each.start.instructions:
            self.along(each.start, start, stop)
        if each.body.level == "row":
            self.along(each.body, start, stop)
            return
        columns = self.program.columns
        for name, extent in columns[:-1]:
            space.names[name] = code.open_loop(constant("i64", 0), space.size(extent), 1)
        name, extent = columns[-1]
        begin, end = constant("i64", 0), space.size(extent)
        if each.turn.instructions:
            begin = code.open_loop(begin, end, TURN)
            end = code.intrinsic("smin", end, code.binary("add", begin, constant("i64", TURN)))
        space.names[name] = code.open_loop(begin, end, 1)
        self.along(each.body, start, stop)
        code.close_section()
        if each.turn.instructions:
            self.along(each.turn, start, stop)
            code.close_section()
        for _ in columns[:-1]:
            code.close_section()
