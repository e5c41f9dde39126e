"""Reads loop programs from their text form, as kernel/loop_ir/show.py writes it, and checks what a single kernel can be
asked.

    kernel double(p0: in f32, p1: out f32; n0)
      rows (i0: n0) vector i0
        row
          r0: f32 = load p0[i0]
          r1: f32 = add r0, r0
          store p1[i0] r1

`show(parse(show(program)))` is `show(program)`. Every register is defined before its use and still known there, has
the dtype that its op gives, and every name is one of the kernel's. What the kernel computes is not checked, nor where
it reads and writes: kernel/loop_ir/kernel_override.py compares that with another program.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NoReturn

from anyshape.base.errors import ParseError
from anyshape.ir.scalar import SCALAR
from anyshape.ir.types import NATIVE
from anyshape.kernel.loop_ir.directives import LINES, Directive, Product, SplitReduction, Vectorize
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram, Param, Scratch, Stage
from anyshape.sym import parse as size_text
from anyshape.sym.expr import Size, symbols_of

ROLES = ("in", "out", "inout")
COMBINES = ("add", "mul", "maximum", "minimum", "and", "or")
_FORM = "write it as dump= does; kernel/loop_ir/program.py and ir/scalar.py have the instructions"
_HEAD = re.compile(r"kernel (\w+)\((.*); ?(.*)\)$")
_SCRATCH = re.compile(r"  row buffer (\w+): (\w+)\[(.*)\]$")
_ROWS = re.compile(r"  rows \((.*)\)(?: vector (\w+))?$")
_COLUMNS = re.compile(r"    columns \((.*)\)(?: vector (\w+))?$")
_RESULT = re.compile(r"      r(\d+): (\w+) = (.*)$")
_LOAD = re.compile(r"load (\w+)\[(.*)\](?: where r(\d+) else (\S+))?$")
_STORE = re.compile(r"      (store|scatter|fold|check) (\w+)\[(.*)\] r(\d+)(?:, r(\d+))?"
                    r"(?: code (-?\d+)| with (\w+))?$")
_REDUCE = re.compile(r"(reduce|scan) (\w+) r(\d+)$")
_LINEAR = re.compile(r"scan linear r(\d+), r(\d+)$")
_INDEX = re.compile(r"index (.+)$")
_SCALAR = re.compile(r"(\w+) (r\d+(?:, r\d+)*)$")
_NUMBER = re.compile(r"True|False|-?\d+|-?(?:inf|nan|\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+)")

Loops = tuple[tuple[str, Size], ...]


def parse(text: str) -> list[tuple[int, LoopProgram]]:
    """The kernels of a text, each with the number of its first line (from 1); lines that begin with # are left out.

    Raises:
        ParseError: with the line's number and text.
    """
    found: list[tuple[int, LoopProgram]] = []
    lines = [(number, line.rstrip()) for number, line in enumerate(text.split("\n"), 1)]
    lines = [(number, line) for number, line in lines if line and not line.startswith("#")]
    starts = [i for i, (_, line) in enumerate(lines) if line.startswith("kernel ")]
    if not starts or starts[0] != 0:
        number, line = lines[0] if lines else (1, "")
        _fail(number, line, "this is no kernel", "begin with: kernel NAME(PARAMS; SIZES)")
    for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
        found.append((lines[start][0], _Reader(lines[start:stop]).program()))
    return found


def _fail(number: int, line: str, why: str, do: str = _FORM) -> NoReturn:
    raise ParseError("cannot read the kernel", where=f"line {number}: {line}", why=why, do=do)


class _Reader:
    """Reads one kernel. `registers`: dtype of every register that is known now."""

    def __init__(self, lines: Sequence[tuple[int, str]]) -> None:
        self.lines = lines
        self.number, self.line = lines[0]
        self.buffers: dict[str, tuple[str, str]] = {}
        self.sizes: tuple[str, ...] = ()
        self.loops: dict[str, Size] = {}
        self.registers: dict[int, str] = {}
        self.reduced: dict[int, str] = {}
        self.made: set[int] = set()
        self.schedule: list[Directive] = []

    def fail(self, why: str, do: str = _FORM) -> NoReturn:
        _fail(self.number, self.line, why, do)

    def program(self) -> LoopProgram:
        head = _HEAD.match(self.line)
        if head is None:
            self.fail("this is no kernel", "begin with: kernel NAME(PARAMS; SIZES)")
        params = tuple(self.param(text) for text in filter(None, head[2].split(", ")))
        self.sizes = tuple(filter(None, head[3].split(", ")))
        scratch: list[Scratch] = []
        rows: Loops | None = None
        columns: Loops | None = None
        vector = ""
        stages: list[tuple[str, list[Instruction]]] = []
        for number, line in self.lines[1:]:
            self.number, self.line = number, line
            if match := _SCRATCH.match(self.line):
                self.buffer(match[1], match[2], "scratch")
                scratch.append(Scratch(match[1], match[2], self.size(match[3], self.sizes)))
            elif match := _ROWS.match(self.line):
                rows = self.variables(match[1])
                vector = self.vector(rows, match[2])
            elif rows is None:
                self.fail("the rows come first", "write: rows (VARIABLE: EXTENT)")
            elif not stages and (directive := self.directive()) is not None:
                if type(directive) in map(type, self.schedule):
                    self.fail("there is such a directive already")
                self.schedule.append(directive)
                if isinstance(directive, Product):
                    self.product(directive)
            elif match := _COLUMNS.match(self.line):
                again = self.variables(match[1], columns or (), tuple(name for name, _ in rows))
                inner = self.vector(again, match[2])
                if vector and inner and columns is None:
                    self.fail("rows and columns cannot both be vectors")
                if columns is not None and (again, inner or vector) != (columns, vector):
                    self.fail("all columns of a kernel are the same loops, with the same vector")
                columns, vector = again, inner or vector
                self.close(stages)
                stages.append(("column", []))
            elif self.line == "    row":
                self.close(stages)
                stages.append(("row", []))
            elif not stages:
                self.fail("an instruction is in a stage", "write a line row or columns (...) before it")
            else:
                stages[-1][1].append(self.instruction(stages[-1][0]))
        if rows is None:
            self.fail("the kernel has no rows", "write: rows (VARIABLE: EXTENT)")
        return LoopProgram(head[1], params, self.sizes, rows, columns or (),
                           (*((Vectorize(vector),) if vector else ()), *self.schedule),
                           tuple(Stage(level, tuple(body)) for level, body in stages), tuple(scratch))

    def directive(self) -> Directive | None:
        """The directive in a line of its own; None where it is something else."""
        if self.line.startswith("  "):
            for kind in LINES:
                if match := kind.FORM.match(self.line[2:]):
                    return kind.read(match, self.variable)
        return None

    def product(self, product: Product) -> None:
        """A product's result is a buffer, its operands are params of one dtype, which is that of the result, or the
        result is not rounded."""
        for name in (product.left, product.right):
            dtype, role = self.buffers.get(name, ("", ""))
            if role != "in" or product.dtype not in (dtype, "f32") or dtype != self.buffers[product.left][0]:
                self.fail(f"{name} is no operand", "multiply params of one dtype that are read only")
        for size in (product.inner, *product.strides):
            self.size(str(size), self.sizes, offset=False)
        self.buffer(product.name, product.dtype, "in")

    # ---- names

    def param(self, text: str) -> Param:
        match = re.fullmatch(r"(\w+): (\w+) (\w+)", text)
        if match is None or match[2] not in ROLES:
            self.fail(f"{text!r} is no parameter", f"write NAME: ROLE DTYPE, with a role of {', '.join(ROLES)}")
        self.buffer(match[1], match[3], match[2])
        return Param(match[1], match[3], match[2])

    def buffer(self, name: str, dtype: str, role: str) -> None:
        if name in self.buffers:
            self.fail(f"two buffers are called {name}")
        self.buffers[name] = self.dtype(dtype), role

    def dtype(self, name: str) -> str:
        if name not in NATIVE:
            self.fail(f"{name} is no dtype that kernels compute on", f"use one of {', '.join(sorted(NATIVE))}")
        return name

    def variables(self, text: str, again: Loops = (), outer: tuple[str, ...] = ()) -> Loops:
        """Loop variables with their extents. `again`: loops whose variables are defined already; outer: variables that
        the extents may depend on."""
        found = []
        for part in filter(None, _parted(text)):
            name, colon, extent = part.partition(": ")
            taken = name in self.sizes or (name in self.loops and name not in dict(again))
            if not colon or not name.isidentifier() or taken:
                self.fail(f"{part!r} is no new loop", "write VARIABLE: EXTENT")
            found.append((name, self.size(extent, (*self.sizes, *outer), offset=False)))
        self.loops.update(found)
        return tuple(found)

    def variable(self, text: str) -> tuple[str, Size]:
        """One new loop variable with its extent."""
        found = self.variables(text)
        if len(found) != 1:
            self.fail(f"{text!r} is not one loop", "write VARIABLE: EXTENT")
        return found[0]

    def vector(self, loops: Loops, name: str | None) -> str:
        if name and name != (loops[-1][0] if loops else ""):
            self.fail(f"{name} is taken as a vector, and is not the last variable here")
        return name or ""

    def size(self, text: str, known: Sequence[str], offset: bool = True) -> Size:
        try:
            size = size_text.parse(text)
        except ParseError as error:
            self.fail(error.why or error.what, error.do)
        for name in sorted(symbols_of(size)):
            if name.startswith("%") and name[1:].isdigit():
                if not offset or known is self.sizes or self.register(name[1:]) != "i64":
                    self.fail(f"{name} is no i64 register that can stand here")
            elif name not in known:
                self.fail(f"{name} stands for nothing here", f"there are {', '.join(known) or 'no sizes'}")
        return size

    # ---- instructions

    def close(self, stages: list[tuple[str, list[Instruction]]]) -> None:
        """Ends a stage: what columns made is gone but for what they reduced."""
        if stages and stages[-1][0] == "column":
            for one in stages[-1][1]:
                self.registers.pop(one.result, None)
            self.registers |= self.reduced
            self.reduced = {}

    def register(self, text: str) -> str:
        """The dtype of a register."""
        dtype = self.registers.get(int(text))
        if dtype is None:
            self.fail(f"r{text} is not known here" + (": it ended with its stage" if int(text) in self.made else ""),
                      "define a register before its use; of a column stage only what reduce makes lives on")
        return dtype

    def place(self, level: str) -> Sequence[str]:
        """Names that an offset may use; column variables only in column stages."""
        rows = _ROWS.match(next(line for _, line in self.lines if _ROWS.match(line)))
        assert rows is not None
        inside = [part.partition(": ")[0] for part in _parted(rows[1])]
        return [*self.sizes, *(self.loops if level == "column" else inside)]

    def instruction(self, level: str) -> Instruction:
        if match := _STORE.match(self.line):
            return self.store(match, level)
        match = _RESULT.match(self.line)
        if match is None:
            self.fail("this is no instruction")
        result, dtype, text = int(match[1]), self.dtype(match[2]), match[3]
        if result in self.made:
            self.fail(f"r{result} is made twice", "give every register its own number")
        if dtype in ("bf16", "f16"):
            self.fail(f"a register cannot be {dtype}", "registers hold f32; loads and stores convert")
        one = self.value(result, dtype, text, level)
        self.made.add(result)
        (self.reduced if one.op == "reduce" else self.registers)[result] = dtype
        return one

    def value(self, result: int, dtype: str, text: str, level: str) -> Instruction:
        if match := _LOAD.match(text):
            kind, _ = self.known_buffer(match[1])
            self.wants(dtype, "f32" if kind in ("bf16", "f16") else kind, f"a load of {match[1]}")
            args = (self.mask(match[3]),) if match[3] else ()
            return Instruction(result, "load", args, dtype, match[1], self.size(match[2], self.place(level)),
                               self.number_of(match[4]) if match[4] else 0)
        if match := _REDUCE.match(text):
            if level != "column" or match[2] not in COMBINES:
                self.fail(f"{text!r} does not stand here", f"in a column stage, combine with {', '.join(COMBINES)}")
            self.wants(dtype, self.register(match[3]), match[1])
            return Instruction(result, match[1], (int(match[3]),), dtype, combine=match[2])
        if match := _LINEAR.match(text):
            if level != "column":
                self.fail(f"{text!r} does not stand here", "in a column stage")
            for word in match.groups():
                self.wants(dtype, self.register(word), "scan")
            return Instruction(result, "scan", (int(match[1]), int(match[2])), dtype, combine="linear")
        if match := _INDEX.match(text):
            self.wants(dtype, "i64", "index")
            return Instruction(result, "index", (), dtype, offset=self.size(match[1], self.place(level)))
        if match := _SCALAR.match(text):
            return self.scalar(result, dtype, match[1], [word[1:] for word in match[2].split(", ")])
        return Instruction(result, "constant", (), dtype, value=self.number_of(text))

    def scalar(self, result: int, dtype: str, op: str, words: list[str]) -> Instruction:
        row = SCALAR.get(op)
        if row is None or row.arity != len(words):
            self.fail(f"there is no operation {op}" if row is None else f"{op} takes {row.arity} registers")
        kinds = [self.register(word) for word in words]
        if op == "where":
            self.wants(kinds.pop(0), "bool", "the condition of where")
        if row.test:
            self.wants(dtype, "bool", op)
            kinds = [kind for kind in kinds if kind != kinds[0]]
        elif op == "random":
            kinds = [kind for kind in kinds if kind != "i64"]
        elif op == "cast":
            kinds = []
        for kind in kinds:
            self.wants(kind, dtype, f"an operand of {op}")
        return Instruction(result, op, tuple(map(int, words)), dtype)

    def store(self, match: re.Match[str], level: str) -> Instruction:
        op, name = match[1], match[2]
        _, role = self.known_buffer(name)
        if role == "in":
            self.fail(f"{name} is only read", "store to a parameter of role out")
        if (op == "check") != (match[6] is not None):
            self.fail(f"{op} {'has no' if op == 'check' else 'has a'} code", "write: check BUFFER[0] rN code 1")
        if (op in ("scatter", "fold")) != (match[7] in COMBINES):
            self.fail(f"{op} with {match[7] or 'nothing'}", f"scatter and fold with {', '.join(COMBINES)}")
        if op == "fold" and (level != "column" or SplitReduction not in map(type, self.schedule)):
            self.fail("fold does not stand here", "fold in a column stage of a kernel with split_reduction")
        kind = self.register(match[4])
        if op == "check":
            self.wants(kind, "bool", "what is checked")
        args = (int(match[4]), *((self.mask(match[5]),) if match[5] else ()))
        return Instruction(-1, op, args, kind, name, self.size(match[3], self.place(level)), int(match[6] or 0),
                           match[7] or "")

    def known_buffer(self, name: str) -> tuple[str, str]:
        if name not in self.buffers:
            self.fail(f"there is no buffer {name}", f"the kernel has {', '.join(self.buffers)}")
        return self.buffers[name]

    def mask(self, word: str) -> int:
        self.wants(self.register(word), "bool", "a mask")
        return int(word)

    def wants(self, found: str, wanted: str, what: str) -> None:
        if found != wanted:
            self.fail(f"{what} is {wanted}, not {found}", "cast it, or correct the dtype")

    def number_of(self, text: str) -> float | int | bool:
        if not _NUMBER.fullmatch(text):
            self.fail(f"{text!r} is neither a number nor an operation")
        return text == "True" if text in ("True", "False") else int(text) if text.lstrip("-").isdigit() else float(text)


def _parted(text: str) -> list[str]:
    """The parts between commas that no parenthesis encloses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]
