"""Triton code generation of a kernel: a loop program becomes a Triton function over tiles of R rows by C columns.

    rows (i0: n0)                              pid = tl.program_id(0).to(INDEX)
      columns (i1: n1) vector i1               row = pid * R + tl.arange(0, R)[:, None]
        r0: f32 = load p0[i0*n1 + i1]    -->   column = tl.arange(0, C)[None, :]
        r1: f32 = reduce maximum r0            r0 = tl.load(p0 + row*n1 + column, mask=rmask & cmask, other=0.0)
                                               r1 = tl.reduce(tl.where(..., r0, -inf), 1, _max, keep_dims=True)

A value varies along the rows of a tile, along its columns, along both, or not at all: [R, 1], [1, C], [R, C] or a
scalar (a kernel without columns has [R]). Masks come from the rows and columns that there are and from the program.
All directives of the schedule but `Vectorize` and `SplitReduction` are left unread: how a tile is laid out over
threads, and what is transposed in shared memory, is Triton's work.
"""
from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from anyshape.backend.triton.codegen import online
from anyshape.backend.triton.codegen.form import GRID, LOOP, Form
from anyshape.backend.triton.codegen.parts import Part, peeled
from anyshape.backend.triton.codegen.scalars import TYPES, cast, combine, constant, identity, reducer, scalar
from anyshape.backend.triton.codegen.sizes import divisor_of, linear, text_of
from anyshape.base.errors import VerifyError
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram, Stage
from anyshape.sym.expr import Size, product, symbols_of

Axes = frozenset[str]
NONE: Axes = frozenset()
ROW, COLUMN, BOTH = frozenset("r"), frozenset("c"), frozenset("rc")


class Printer:
    """The work on one function: `text` gives it, or raises VerifyError where the form does not fit the program."""

    def __init__(self, program: LoopProgram, form: Form) -> None:
        self.program, self.form = program, form
        self.constants: tuple[str, ...] = ("R", "C", "D") if form.two else ("R", "C")  # that versions differ in
        self.parts = [Part("", "C", program, whole=form.two and not form.window)]
        if form.two:
            self.parts.append(Part("_d", "D", peeled(program, "_d", 1)))
        self.part = self.parts[0]
        # sums along the columns: eager adds in another order, so that no quotient by one is eager's to the last bit
        self.added = {one.result for stage in program.stages for one in stage.instructions
                      if one.op == "reduce" and one.combine in ("add", *online.COMBINED)}
        self.flat = not any(stage.level == "column" for stage in program.stages)
        self.lines: list[str] = []
        self.depth = 1
        self.axes: dict[str, Axes] = {name: NONE for name in program.sizes}
        self.dtypes: dict[int, str] = {}
        self.stored = {param.name: param.dtype for param in program.params}
        self.buffers = {one.name: one for part in self.parts for one in part.program.scratch}
        self.kept: dict[str, tuple[Size, str]] = {}  # a row buffer in registers: where it was stored, and what
        self.loaded: dict[Instruction, str] = {}  # what is in a register already; its level as the result
        self.total = product(extent for _, extent in program.columns)
        self.columns: Axes = COLUMN  # of what varies along the columns in this stage
        self.in_column = False
        self.stepped = False  # columns in steps of C

    # text

    def put(self, line: str) -> None:
        """A line at the present depth."""
        self.lines.append("    " * self.depth + line)

    def put_all(self, lines: Sequence[str]) -> None:
        """Lines at the present depth."""
        for line in lines:
            self.put(line)

    def size(self, size: Size) -> str:
        """A size or an offset as text."""
        return text_of(size, self._symbol)

    def divisor(self, size: Size) -> str:
        """A size as text behind `//` or `%`."""
        return divisor_of(size, self._symbol)

    def offset(self, size: Size) -> Size:
        """An offset over the numbers of rows and columns, where it is linear in them."""
        if not self.form.strip:
            size = linear(size, self.program.rows, "row")
        return linear(size, self.part.program.columns, self.part.column) if self.in_column else size

    def _symbol(self, name: str) -> str:
        return f"r{name[1:]}.to(INDEX)" if name[0] == "%" else name

    def axes_of(self, size: Size) -> Axes:
        """Along what a size varies."""
        found = NONE
        for name in symbols_of(size):
            found |= self.axes[f"r{name[1:]}" if name[0] == "%" else name]
        return found

    def along(self, registers: Sequence[int]) -> Axes:
        """Along what any of the registers varies."""
        return frozenset().union(*(self.axes[f"r{register}"] for register in registers))

    def shape(self, axes: Axes) -> str:
        """The shape of a value."""
        if self.flat:
            return "[R]" if axes else "()"
        width = self.part.width
        return {NONE: "()", ROW: "[R, 1]", COLUMN: f"[1, {width}]", BOTH: f"[R, {width}]"}[axes]

    def mask(self, axes: Axes, more: Sequence[str] = ()) -> str:
        """The lanes of `axes` that exist; in a column stage also whether there are columns at all."""
        parts = ["rmask"] if "r" in axes else []
        if "c" in axes:
            parts += [] if self.part.whole else [self.part.mask]
        elif self._is_guarded():
            parts.append("some")
        return " & ".join([*parts, *more])

    def _is_guarded(self) -> bool:
        return self.in_column and not self.stepped and not self._has_columns()

    def guard(self) -> Axes:
        """Along what the mask varies that says whether there are columns."""
        return self.axes_of(self.total) if self._is_guarded() else NONE

    def _has_columns(self) -> bool:
        return all(isinstance(extent, int) and extent > 0 for _, extent in self.program.columns)

    def text(self, name: str) -> str:
        """The whole function."""
        program, form = self.program, self.form
        words = [*(param.name for param in program.params), "status", *program.sizes]
        words += ["scratch"] if form.scratch else []
        words += [f"{word}: tl.constexpr" for word in (*self.constants, "INDEX", "GUARDED")]
        self.lines += ["@triton.jit", f"def {name}({', '.join(words)}):"]
        self.put("if GUARDED:")
        self.put("    if tl.load(status) != 0:")
        self.put("        return")
        self.put("pid = tl.program_id(0).to(INDEX)")
        self.body()
        return "\n".join(_live(self.lines)) + "\n"

    def body(self) -> None:
        """The block of rows of this program; or all of its blocks, where row buffers lie in memory."""
        form, total = self.form, product(extent for _, extent in self.program.rows)
        if not form.scratch:
            self.tile_rows("pid")
            self.whole_columns()
            self.stages()
            return
        if form.strip:
            blocks = self.size(product(extent for _, extent in self.program.rows[:-1])) + " * tl.cdiv(" \
                f"{self.size(self.program.rows[-1][1])}, R)"
        else:
            blocks = f"tl.cdiv({self.size(total)}, R)"
        at = "scratch + pid * " + self.size(sum((one.count * 8 for one in self.program.scratch), 0)) + " * R"
        for one in self.program.scratch:
            self.put(f"{one.name} = ({at}).to(tl.pointer_type({TYPES[one.dtype]}))")
            at += f" + {self.size(one.count * 8)} * R"
        self.put(f"for block in range(pid, {blocks}, {form.scratch}):")
        self.depth += 1
        self.put("tl.debug_barrier()")
        self.tile_rows("block")
        self.whole_columns()
        self.stages()
        self.depth -= 1

    def tile_rows(self, block: str) -> None:
        """The rows of a block, and the columns where they are not gone through."""
        if self.form.columns == GRID:
            self.put(f"tiles = tl.cdiv({self.size(self.end())}, C)")
            self.put(f"first = {block} % tiles * C")
            self.put(f"strip = {block} // tiles")
            block = "strip"
        if self.form.strip:
            last, extent = self.program.rows[-1]
            self.put(f"strips = tl.cdiv({self.size(extent)}, R)")
            self.put(f"{last} = {block} % strips * R + {self.lanes('R')}")
            self.put(f"rmask = ({last} < {self.size(extent)}) | (R == 1)")
            self.axes[last] = ROW
            self.split("outer", f"{block} // strips", self.program.rows[:-1], NONE)
        else:
            self.put(f"row = {block} * R + {self.lanes('R')}")
            self.put(f"rmask = (row < {self.size(product(extent for _, extent in self.program.rows))}) | (R == 1)")
            self.axes["row"] = ROW
            self.split("row", "", self.program.rows, ROW)

    def lanes(self, count: str) -> str:
        """The numbers of the rows, or columns, of a tile."""
        if self.flat:
            return f"tl.arange(0, {count})"
        return f"tl.arange(0, {count})[{':, None' if count == 'R' else 'None, :'}]"

    def split(self, name: str, text: str, loops: Sequence[tuple[str, Size]], axes: Axes) -> None:
        """The variables of a loop nest at point `text`, or the variable `name`."""
        if text:
            self.put(f"{name} = {text}")
        left = name
        self.axes[name] = axes
        for number, (variable, extent) in enumerate(reversed(loops)):
            if number == len(loops) - 1:
                self.put(f"{variable} = {left}")
            else:
                self.put(f"{variable} = {left} % {self.divisor(extent)}")
                self.put(f"{name}{number} = {left} // {self.divisor(extent)}")
                left = f"{name}{number}"
            self.axes[variable] = axes

    def tile_columns(self, first: str) -> None:
        """The columns of a part's tile from `first` on."""
        part = self.part
        self.put(f"{part.column} = " + (f"{first} + " if first else "") + f"{self.lanes(part.width)}.to(INDEX)")
        self.put(f"{part.mask} = {part.column} < {self.size(self.total)}")
        self.columns = COLUMN | self.axes_of(self.total)  # rows of different lengths: a mask of each
        self.split(part.column, "", part.program.columns, self.columns)

    def whole_columns(self) -> None:
        """The columns of a tile that all column stages share."""
        if self.form.columns != LOOP and not self.flat:
            self.tile_columns("first" if self.form.columns == GRID else "")
            self.put(f"some = {self.size(self.total)} > 0")
        for part in self.parts[1:]:
            self.part = part
            self.tile_columns("C")
        self.part = self.parts[0]

    # stages

    def stages(self) -> None:
        """All stages of a block of rows."""
        written: set[str] = set()
        for number, stage in enumerate(self.program.stages):
            if written & {one.buffer for one in stage.instructions if one.op in ("load", "scatter")}:
                self.put("tl.debug_barrier()")
                written = set()
            self.stage(number, stage)
            written |= {one.buffer for one in stage.instructions if one.op in ("store", "scatter")
                        and (one.buffer in self.stored or self.form.scratch)}

    def stage(self, number: int, stage: Stage) -> None:
        """One stage."""
        self.in_column = stage.level == "column"
        looped = self.in_column and (number in self.form.points or self.form.columns == LOOP)
        if looped:
            self._in_steps(number, stage)
        parts = self.parts[looped:] if self.in_column else self.parts[:1]
        for self.part in parts:
            self.instructions(self.part.program.stages[number])
        for self.part in parts:  # behind all loads, which so are under way at the same time
            for one in (one for one in self.part.program.stages[number].instructions if one.op == "reduce"):
                self._reduced(one, self._masked(one), False)
        for one in (one for one in stage.instructions if one.combine in online.COMBINED):
            self.put_all(online.last(one, self.size(self.total)))
        self.part, self.in_column = self.parts[0], False

    def _in_steps(self, number: int, stage: Stage) -> None:
        """The columns of a stage's first part, step by step."""
        points, self.stepped = number in self.form.points, True
        shape = self.shape(ROW if points else BOTH)
        reduces = [one for one in stage.instructions if one.op == "reduce"]
        for one in reduces:
            if one.combine in online.COMBINED:
                self.put_all(online.begin(one, online.chunk_of(one, self.program)))
                continue
            self.put(f"a{one.result} = tl.full({shape}, {identity(one.combine, one.dtype)}, {TYPES[one.dtype]})")
        for one in (one for one in stage.instructions if one.op == "scan"):
            self.put(f"carry{one.result} = tl.full({self.shape(ROW)}, {identity(one.combine, one.dtype)}, "
                     f"{TYPES[one.dtype]})")
        self._enter_loop(number, points)
        self.instructions(stage)
        self._leave_loop(stage, points)
        for one in reduces:
            self._reduced(one, f"a{one.result}", points)
        self.stepped = False
        if points:
            self.whole_columns()

    def instructions(self, stage: Stage) -> None:
        """The instructions of a stage, in order."""
        for one in stage.instructions:
            self.one(one)
            if one.op in ("store", "scatter", "fold"):
                self.loaded = {load: name for load, name in self.loaded.items() if load.buffer != one.buffer}

    def end(self) -> Size:
        """How far the lanes of a row go."""
        return self.total

    def lanes_of_a_row(self) -> str:
        """How many lanes of a row exist, the first ones, in the part whose columns are gone through in steps."""
        return self.size(self.total)

    def _enter_loop(self, number: int, points: bool) -> None:
        end = self.size(self.end())
        if self.axes_of(self.total):
            end = f"tl.max(tl.where(rmask, {end}, 0))"
        if points and self.form.buckets:
            self.columns_of(number)
        elif points:
            self.put(f"for column in range({end}):")
            self.depth += 1
            self.columns = NONE
            # the columns of rows of different lengths are gone through a row at a time
            self.split("column", "", self.program.columns, self.axes_of(self.total))
        else:
            self.put(f"for start in range(0, {end}, C):")
            self.depth += 1
            self.tile_columns("start")

    def _leave_loop(self, stage: Stage, points: bool) -> None:
        """The end of an iteration; what was written may be read in the next one, by other threads."""
        read = {one.buffer for one in stage.instructions if one.op in ("load", "scatter")}
        if read & {one.buffer for one in stage.instructions if one.op in ("store", "scatter")} and points:
            self.put("tl.debug_barrier()")
        self.depth -= 2 if points and self.form.buckets else 1

    def columns_of(self, number: int) -> None:
        """The loop over the columns that this program has of a stage; see codegen/scatter.py."""
        raise VerifyError("columns are not shared out", do="report this as a bug of the compiler")

    # instructions

    def one(self, one: Instruction) -> None:
        """One instruction."""
        if one.result >= 0:
            self.dtypes[one.result] = one.dtype
        special = getattr(self, f"_{one.op}", None) if one.op in (
            "constant", "index", "load", "store", "scatter", "check", "reduce", "scan", "fold") else None
        if special is not None:
            special(one)
            return
        operands = [f"r{register}" for register in one.args]
        source = self.dtypes[one.args[-1]] if one.args else one.dtype
        text = scalar(one.op, operands, one.dtype, source)
        if one.op == "div" and one.args[1] in self.added and source == "f32":
            text = f"{operands[0]} / {operands[1]}"  # within 2 ulp, in a third of the instructions; see `added`
        self.let(one, text, self.along(one.args))

    def let(self, one: Instruction, text: str, axes: Axes) -> None:
        """A register becomes a value."""
        self.put(f"r{one.result} = {text}")
        self.axes[f"r{one.result}"] = axes

    def _constant(self, one: Instruction) -> None:
        self.let(one, f"tl.full((), {constant(one.value, one.dtype)}, {TYPES[one.dtype]})", NONE)

    def _index(self, one: Instruction) -> None:
        offset = self.offset(one.offset)
        if isinstance(offset, int):
            self.let(one, f"tl.full((), {offset}, tl.int64)", NONE)
        else:
            self.let(one, f"({self.size(offset)}).to(tl.int64)", self.axes_of(offset))

    def place(self, buffer: str, offset: Size, axes: Axes, spread: Axes) -> str:
        """The addresses of an access; spread: along what they are wanted."""
        text = f"{buffer} + {self.size(offset)}"
        if buffer in self.buffers and self.form.scratch:
            local = "tl.arange(0, R)[:, None]" if not self.flat else "tl.arange(0, R)"
            text = f"{buffer} + {local} * {self.size(self.buffers[buffer].count)} + {self.size(offset)}"
            axes = axes | ROW
        return text if spread <= axes else f"tl.broadcast_to({text}, {self.shape(spread | axes)})"

    def _load(self, one: Instruction) -> None:
        if one.buffer in self.buffers and not self.form.scratch:
            if self.kept.get(one.buffer, (None, ""))[0] != one.offset or one.args:
                raise VerifyError(f"row buffer {one.buffer} is read where it was not stored",
                                  do="report this as a bug of the compiler")
            register = self.kept[one.buffer][1]
            self.let(one, register, self.axes[register])
            return
        if self.is_loaded(one):
            same = self.loaded[self._key(one)]
            self.let(one, same, self.axes[same])
            return
        offset = self.offset(one.offset)
        scratch = one.buffer in self.buffers
        axes = self.axes_of(offset) | self.along(one.args) | self.guard() | (ROW if scratch else NONE)
        stored = self.buffers[one.buffer].dtype if scratch else self.stored[one.buffer]
        mask = self.mask(axes, [f"r{register}" for register in one.args])
        text = f"tl.load({self.place(one.buffer, offset, self.axes_of(offset), axes)}"
        text += f", mask={mask}, other={constant(one.value, stored)})" if mask else ")"
        self.let(one, cast(text, stored, one.dtype), axes)
        self.remember(one)

    def is_loaded(self, one: Instruction) -> bool:
        """Is what a load gives in a register already? A row that is in registers is not read again."""
        return self._key(one) in self.loaded and not self.stepped

    def remember(self, one: Instruction) -> None:
        """What a load gave stays in its register until its buffer is written, or its step of columns ends."""
        if not self.stepped:
            self.loaded[self._key(one)] = f"r{one.result}"

    def _key(self, one: Instruction) -> Instruction:
        return dataclasses.replace(one, result=int(self.in_column))

    def _store(self, one: Instruction) -> None:
        if one.buffer in self.buffers and not self.form.scratch:
            if len(one.args) > 1 or one.buffer in self.kept:
                raise VerifyError(f"row buffer {one.buffer} is no value", do="report this as a bug of the compiler")
            self.kept[one.buffer] = one.offset, f"r{one.args[0]}"
            return
        offset = self.offset(one.offset)
        axes = self.axes_of(offset) | self.along(one.args) | self.guard() | (
            ROW if one.buffer in self.buffers else NONE)
        self.store(one.buffer, offset, f"r{one.args[0]}", axes, [f"r{register}" for register in one.args[1:]])

    def store(self, buffer: str, offset: Size, value: str, axes: Axes, masks: Sequence[str] = ()) -> None:
        """A store of lanes along `axes`."""
        mask = self.mask(axes, masks)
        self.put(f"tl.store({self.place(buffer, offset, self.axes_of(offset), axes)}, {value}"
                 + (f", mask={mask})" if mask else ")"))

    def _scatter(self, one: Instruction) -> None:
        offset = self.offset(one.offset)
        axes = self.axes_of(offset) | self.along(one.args)
        if "c" in axes:
            raise VerifyError("columns are scattered one by one", do="report this as a bug of the compiler")
        mask = self.mask(axes, [f"r{register}" for register in one.args[1:]])
        place = self.place(one.buffer, offset, self.axes_of(offset), axes)
        stored = self.stored[one.buffer]
        text = f"tl.load({place}" + (f", mask={mask}, other={constant(0, stored)})" if mask else ")")
        self.put(f"before = {cast(text, stored, one.dtype)}")
        self.put(f"tl.store({place}, {combine(one.combine, 'before', f'r{one.args[0]}', one.dtype)}"
                 + (f", mask={mask})" if mask else ")"))

    def _check(self, one: Instruction) -> None:
        axes = self.along(one.args) | self.guard()
        mask = self.mask(axes, [f"(r{one.args[0]} == 0)", *(f"r{register}" for register in one.args[1:])])
        place = self.place(one.buffer, one.offset, NONE, axes)
        self.put(f"tl.store({place}, {one.value}, mask={mask})")

    def _reduce(self, one: Instruction) -> None:
        if not self.stepped:  # see `stage`
            return
        if one.combine in online.COMBINED:
            self.put_all(online.step(one, online.chunk_of(one, self.program), *self._lanes(one),
                                     f"{self.lanes_of_a_row()} - start"))
        else:
            self.put(f"a{one.result} = {combine(one.combine, f'a{one.result}', self._masked(one), one.dtype)}")

    def _masked(self, one: Instruction) -> str:
        """What a reduction reads, and what changes nothing in lanes that do not exist."""
        if one.combine in online.COMBINED:
            return ""
        value, mask = self._lanes(one)
        return f"tl.where({mask}, {value}, {identity(one.combine, one.dtype)})"

    def _lanes(self, one: Instruction) -> tuple[str, str]:
        """What a reduction reads in all lanes, and which of them exist."""
        axes = ROW | self.columns
        return f"tl.broadcast_to(r{one.args[0]}, {self.shape(axes)})", self.mask(axes)

    def _reduced(self, one: Instruction, text: str, points: bool) -> None:
        if one.combine in online.COMBINED:
            self.put_all(online.end(one) if self.part is self.parts[0] else online.more(one, *self._lanes(one)))
            self.axes |= {f"r{register}": ROW for register in (one.result, one.args[1])}
            self.dtypes[one.args[1]] = one.dtype
            return
        if not points:
            text = f"tl.reduce({text}, 1, {reducer(one.combine, one.dtype)}, keep_dims=True)"
        self.let(one, text if self.part is self.parts[0] else
                 combine(one.combine, f"r{one.result}", text, one.dtype), ROW)

    def _scan(self, one: Instruction) -> None:
        if one.combine == "linear":
            self._recurrence(one)
            return
        name, function = f"r{one.result}", reducer(one.combine, one.dtype)
        value = f"tl.broadcast_to(r{one.args[0]}, {self.shape(ROW | self.columns)})"
        carry = f"carry{one.result}"
        if not self.columns:
            self.put(f"{carry} = {combine(one.combine, carry, value, one.dtype)}")
            self.let(one, carry, ROW)
            return
        self.let(one, f"tl.associative_scan({value}, 1, {function})", BOTH)
        if self.stepped:
            whole = f"tl.where({self.mask(BOTH)}, {value}, {identity(one.combine, one.dtype)})"
            self.put(f"{name} = {combine(one.combine, carry, name, one.dtype)}")
            total = f"tl.reduce({whole}, 1, {function}, keep_dims=True)"
            self.put(f"{carry} = {combine(one.combine, carry, total, one.dtype)}")

    def _recurrence(self, one: Instruction) -> None:
        """A scan of pairs: factors and terms of what came before a step of columns."""
        space = self.shape(ROW | self.columns)
        term, factor = (f"tl.broadcast_to(r{place}, {space})" for place in one.args)
        name, carry = f"r{one.result}", f"carry{one.result}"
        if not self.columns:
            self.put(f"{carry} = {factor} * {carry} + {term}")
            self.let(one, carry, ROW)
            return
        if self.stepped:
            mask = self.mask(BOTH)
            factor, term = f"tl.where({mask}, {factor}, 1.0)", f"tl.where({mask}, {term}, 0.0)"
        self.put(f"factor{one.result}, {name} = tl.associative_scan(({factor}, {term}), 1, _linear)")
        self.let(one, f"factor{one.result} * {carry} + {name}" if self.stepped else name, BOTH)
        if self.stepped:
            last = "tl.arange(0, C)[None, :] == C - 1"
            self.put(f"{carry} = tl.reduce(tl.where({last}, {name}, 0.0), 1, _add, keep_dims=True)")

    def _fold(self, one: Instruction) -> None:
        raise VerifyError("a fold without a split reduction", do="report this as a bug of the compiler")


_PLAIN = re.compile(r"\s*(\w+) = ")


def _live(lines: Sequence[str]) -> list[str]:
    """The lines without those that define what no later line reads. Loops go back: what any line of the function reads
    is kept, where it is made more than once."""
    found = list(lines)
    while True:
        kept: list[str] = []
        count: dict[str, int] = {}
        for line in found:
            for word in re.findall(r"\b[A-Za-z_]\w*\b", line):
                count[word] = count.get(word, 0) + 1
        for line in found:
            match = _PLAIN.match(line)
            if match is None or match[1].startswith("carry") or count[match[1]] > 1:
                kept.append(line)
        if len(kept) == len(found):
            return kept
        found = kept
