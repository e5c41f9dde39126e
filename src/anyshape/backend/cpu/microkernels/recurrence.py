"""One time step of a recurrent cell for some rows of a batch, printed as LLVM; see ops/recurrence.py.

    cell   (weights, bias, before, before_step, gates, gates_step, cells, after, after_step, rows, blocks, hidden)
           after [rows, hidden] from before [rows, hidden]; cells [rows, hidden]: an LSTM's c, which goes on in place
           weights [blocks, hidden, gates, 16], bias [blocks, gates, 16]; steps: bytes from row to row, cells' those of
           hidden; rows: a multiple of those that the routine does at a time. A GRU that resets before the product has
           two: `reset` leaves the update gate in cells and the reset state in after; `new` takes that as before, and
           goes on in after, where the state is

    bytes  (weights, sums, scales, before, before_step, gates, gates_step, cells, after, after_step, rows, blocks,
            hidden, words, scale, zero)
           an LSTM from a quantised state, before u8 [rows, words, 4]; weights i8 [blocks, words, 4, 16, 4], sums i32
           and scales f32 [blocks, 4, 16]; scale: the bits of the state's, zero: its zero point

    quantize  (state, rows, hidden, bytes, bytes_step, found)
           u8 rows of bytes from state [rows, hidden]; at found its scale, as bits, and its zero point, 8 bytes each

The sums of all gates of a vector of units stay in registers over the product with the state, and go through the
activations there: no gate is written to memory. A block's weights are read once for all rows. All take i64.
"""
from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from anyshape.backend.cpu.llvm import vector_math
from anyshape.backend.cpu.llvm.half_precision import multiply_add
from anyshape.backend.cpu.llvm.ir_builder import Code, Value, constant
from anyshape.backend.cpu.machine.low_precision import BYTES
from anyshape.backend.cpu.machine.target import Machine
from anyshape.backend.cpu.microkernels.routine import Routine, number
from anyshape.backend.cpu.microkernels.tables.recurrence import BYTES_FAMILY, FAMILY, height, routines
from anyshape.ops.recurrence import BLOCK, WORD

ARGUMENTS = ("weights", "bias", "before", "before_step", "gates", "gates_step", "cells", "after", "after_step", "rows",
             "blocks", "hidden")
BYTES_ARGUMENTS = ("weights", "sums", "scales", "before", "before_step", "gates", "gates_step", "cells", "after",
                   "after_step", "rows", "blocks", "hidden", "words", "scale", "zero")
QUANTIZE_ARGUMENTS = ("state", "rows", "hidden", "bytes", "bytes_step", "found")


def emit_recurrence(target: Machine, wanted: Collection[str] = (FAMILY,)) -> str:
    """LLVM text of the routines, where they are wanted."""
    parts: list[str] = []
    declarations: dict[str, str] = {}
    for name in routines():
        _, cell, rows = name.split("_") if name != "quantize" else ("", "", "")
        if (FAMILY if cell in _CELLS else BYTES_FAMILY) not in wanted:
            continue
        if not cell:
            body: Routine = _Quantize(target, QUANTIZE_ARGUMENTS).emitted()
        elif cell in _CELLS:
            body = _Cell(target, ARGUMENTS).emitted(cell, height(target) if rows == "many" else 1)
        else:
            body = _ByteCell(target, BYTES_ARGUMENTS).emitted("lstm", height(target) if rows == "many" else 1)
        declarations |= body.code.declarations
        parts.append(body.text(name))
    if not parts:
        return ""
    return "\n\n".join([*parts, *declarations.values()]) + "\n"


# ---- cells: sums of a row's gates, their inputs, the state and c before -> the state, and c


def _lstm(code: Code, sums: list[Value], inputs: list[Value], state: Value, cell: Value | None) -> list[Value]:
    assert cell is not None
    i, f, g, o = (code.binary("fadd", *pair) for pair in zip(sums, inputs, strict=True))
    new = code.binary("fmul", vector_math.sigmoid(code, i), vector_math.tanh(code, g))
    cell = code.fma(vector_math.sigmoid(code, f), cell, new)
    return [code.binary("fmul", vector_math.sigmoid(code, o), vector_math.tanh(code, cell)), cell]


def _gru(code: Code, sums: list[Value], inputs: list[Value], state: Value, cell: Value | None) -> list[Value]:
    reset, update = (vector_math.sigmoid(code, code.binary("fadd", sums[g], inputs[g])) for g in range(2))
    new = vector_math.tanh(code, code.fma(reset, sums[2], inputs[2]))
    return [code.fma(update, code.binary("fsub", state, new), new)]


def _reset(code: Code, sums: list[Value], inputs: list[Value], state: Value, cell: Value | None) -> list[Value]:
    reset, update = (vector_math.sigmoid(code, code.binary("fadd", sums[g], inputs[g])) for g in range(2))
    return [code.binary("fmul", reset, state), update]


def _new(code: Code, sums: list[Value], inputs: list[Value], state: Value, cell: Value | None) -> list[Value]:
    assert cell is not None
    new = vector_math.tanh(code, code.binary("fadd", sums[0], inputs[0]))
    return [code.fma(cell, code.binary("fsub", state, new), new)]


def _tanh(code: Code, sums: list[Value], inputs: list[Value], state: Value, cell: Value | None) -> list[Value]:
    return [vector_math.tanh(code, code.binary("fadd", sums[0], inputs[0]))]


def _relu(code: Code, sums: list[Value], inputs: list[Value], state: Value, cell: Value | None) -> list[Value]:
    found, zero = code.binary("fadd", sums[0], inputs[0]), constant("f32", 0, state.lanes)
    return [code.select(code.compare("olt", found, zero), zero, found)]  # a NaN stays one


@dataclass(frozen=True, slots=True)
class _Body:
    """What a routine does with its products."""

    compute: Callable[[Code, list[Value], list[Value], Value, Value | None], list[Value]]
    of: int  # gates of a unit
    gates: tuple[int, ...]  # those that it computes
    state: str = ""  # where the state is that it goes on from, beside the product
    reads_cells: bool = False
    writes_cells: bool = False


_CELLS = {
    "lstm": _Body(_lstm, 4, (0, 1, 2, 3), reads_cells=True, writes_cells=True),
    "gru": _Body(_gru, 3, (0, 1, 2), "before"), "tanh": _Body(_tanh, 1, (0,)), "relu": _Body(_relu, 1, (0,)),
    "reset": _Body(_reset, 3, (0, 1), "before", writes_cells=True),
    "new": _Body(_new, 3, (2,), "after", reads_cells=True)}


class _Cell(Routine):
    """One routine."""

    terms = "hidden"  # how many terms a product has

    def emitted(self, cell: str, height: int) -> _Cell:
        """Itself, written."""
        code, body = self.code, _CELLS[cell]
        weights, rows, blocks, hidden, terms = self.given("weights", "rows", "blocks", "hidden", self.terms)
        block = self.loop(blocks)
        own = self.plus(weights, self.times(self.times(block, terms), 4 * BLOCK * body.of))
        units = self.times(block, 4 * BLOCK * body.of)  # bytes before a block's, of one number for each unit
        first = self.times(block, BLOCK)
        row = code.open_loop(number(0), rows, height)
        for start in range(0, BLOCK, self.lanes):
            unit = self.plus(first, start)
            code.open_if(code.compare("slt", unit, hidden))
            self.units(body, [self.plus(row, i) for i in range(height)], self.plus(own, 4 * start),
                       self.plus(units, 4 * start), unit)
            code.close_section()
        code.close_section()
        code.close_section()
        return self

    def units(self, body: _Body, rows: list[Value], weights: Value, offset: Value, unit: Value) -> None:
        """A vector of units of some rows. offset: of its numbers, one for each unit."""
        code, hidden = self.code, self.arguments["hidden"]
        found = self.products(body, rows, weights, offset)
        mask = code.first_lanes(code.binary("sub", hidden, unit), self.lanes)
        place = self.times(unit, 4)
        for row, own in zip(rows, found, strict=True):
            inputs = [self.load_vector(self.plus(self.at("gates", row), self.plus(place, self.times(hidden, 4 * g))),
                                       mask) for g in body.gates]
            kept = self.plus(self.plus(self.arguments["cells"], self.times(row, self.times(hidden, 4))), place)
            old = self.load_vector(kept, mask) if body.reads_cells else None
            state = self.load_vector(self.plus(self.at(body.state, row), place), mask) if body.state else own[0]
            results = body.compute(code, own, inputs, state, old)
            self.store_vector(results[0], self.plus(self.at("after", row), place), mask)
            if body.writes_cells:
                self.store_vector(results[1], kept, mask)

    def products(self, body: _Body, rows: list[Value], weights: Value, offset: Value) -> list[list[Value]]:
        """The products of each row's state with each gate's weights."""
        code, lanes = self.code, self.lanes
        sums = [[code.slot(f"sum {i} {g}", "f32", lanes) for g in body.gates] for i in range(len(rows))]
        for i, g in enumerate(body.gates):
            start = self.load_vector(self.plus(self.plus(self.arguments["bias"], offset), 4 * BLOCK * g), None)
            for own in sums:
                self.set(own[i], start)
        before = [self.at("before", row) for row in rows]
        term = self.loop(self.arguments["hidden"])
        place = self.plus(weights, self.times(term, 4 * BLOCK * body.of))
        factors = [self.load_vector(self.plus(place, 4 * BLOCK * g), None) for g in body.gates]
        for own, state in zip(sums, before, strict=True):
            value = code.spread(self.load("f32", 0, self.plus(state, self.times(term, 4)), 4), lanes)
            for slot, factor in zip(own, factors, strict=True):
                self.set(slot, code.fma(value, factor, self.get(slot)))
        code.close_section()
        return [[self.get(slot) for slot in own] for own in sums]

    def at(self, name: str, row: Value) -> Value:
        """The address of a row of an operand."""
        return self.plus(self.arguments[name], self.times(row, self.arguments[f"{name}_step"]))


class _ByteCell(_Cell):
    """The routine of a quantised state."""

    terms = "words"

    def products(self, body: _Body, rows: list[Value], weights: Value, offset: Value) -> list[list[Value]]:
        code, lanes, gates = self.code, self.lanes, body.of
        sums = [[code.slot(f"sum {i} {g}", "i32", lanes) for g in range(gates)] for i in range(len(rows))]
        less = code.spread(code.binary("sub", constant("i32", 0), code.convert("trunc", self.arguments["zero"], "i32")),
                           lanes)
        for g in range(gates):
            place = self.plus(self.plus(self.arguments["sums"], offset), 4 * BLOCK * g)
            start = code.binary("mul", less, self.load("i32", lanes, place, 4))
            for own in sums:
                self.set(own[g], start)
        before = [self.at("before", row) for row in rows]
        word = self.loop(self.arguments["words"])
        place = self.plus(weights, self.times(word, WORD * BLOCK * gates))
        factors = [self.load("i32", lanes, self.plus(place, WORD * BLOCK * g), 4) for g in range(gates)]
        for own, state in zip(sums, before, strict=True):
            value = code.spread(self.load("i32", 0, self.plus(state, self.times(word, WORD)), 1), lanes)
            for g in range(gates):
                self.set(own[g], multiply_add(code, BYTES, value, factors[g], self.get(own[g], "i32")))
        code.close_section()
        scale = code.spread(code.bits(code.convert("trunc", self.arguments["scale"], "i32"), "f32"), lanes)
        by = [code.binary("fmul", scale, self.load_vector(
            self.plus(self.plus(self.arguments["scales"], offset), 4 * BLOCK * g), None)) for g in range(gates)]
        return [[code.binary("fmul", code.convert("sitofp", self.get(slot, "i32"), "f32"), by[g])
                 for g, slot in enumerate(own)] for own in sums]


class _Quantize(Routine):
    """The routine that quantises a state."""

    def emitted(self) -> _Quantize:
        """Itself, written."""
        code, lanes = self.code, self.lanes
        ends = {name: code.slot(name, "f32", lanes) for name in ("minimum", "maximum")}
        for slot in ends.values():  # 0 is always within the range
            self.set(slot, constant("f32", 0, lanes))

        def within(x: Value, mask: Value, place: Value) -> None:
            for name, slot in ends.items():
                self.set(slot, code.intrinsic(name, self.get(slot), x))

        self.over(within)
        low, high = (self.folded(name, self.get(slot)) for name, slot in ends.items())
        scale = code.binary("fdiv", code.binary("fsub", high, low), constant("f32", 255))
        scale = code.select(code.compare("oeq", scale, constant("f32", 0)), constant("f32", 1), scale)
        zero = self.limited(code.intrinsic("rint", self.limited(code.binary("fdiv", code.negate(low), scale))))
        by, away = code.spread(scale, lanes), code.spread(zero, lanes)

        def quantized(x: Value, mask: Value, place: Value) -> None:
            whole = code.binary("fadd", code.intrinsic("rint", code.binary("fdiv", x, by)), away)
            found = code.convert("trunc", code.convert("fptosi", self.limited(whole), "i32"), "i8")
            code.masked("store", found, self.pointer(place), mask, 1, code.top, False)

        self.over(quantized)
        found, = self.given("found")
        self.store(code.convert("zext", code.bits(scale, "i32"), "i64"), found, 8)
        self.store(code.convert("fptosi", zero, "i64"), self.plus(found, 8), 8)
        return self

    def over(self, body: Callable[[Value, Value, Value], None]) -> None:
        """`body(vector, mask, where its bytes go)` for each vector of the state; lanes that are not there are 0."""
        code, lanes = self.code, self.lanes
        state, rows, hidden, target, step = self.given("state", "rows", "hidden", "bytes", "bytes_step")
        row = self.loop(rows)
        line = self.plus(state, self.times(row, self.times(hidden, 4)))
        column = code.open_loop(number(0), hidden, lanes)
        mask = code.first_lanes(code.binary("sub", hidden, column), lanes)
        body(self.load_vector(self.plus(line, self.times(column, 4)), mask), mask,
             self.plus(self.plus(target, self.times(row, step)), column))
        code.close_section()
        code.close_section()

    def folded(self, name: str, x: Value) -> Value:
        """All lanes as one."""
        lanes = x.lanes
        while lanes > 1:
            lanes //= 2
            x = self.code.intrinsic(name, self.code.shuffle(x, range(lanes)),
                                    self.code.shuffle(x, range(lanes, 2 * lanes)))
        return self.code.element(x, 0)

    def limited(self, x: Value) -> Value:
        """Between 0 and 255; a NaN is 0: its scale is none, and all results are."""
        code = self.code
        x = code.select(code.compare("ogt", x, constant(x.dtype, 0, x.lanes)), x, constant(x.dtype, 0, x.lanes))
        return code.select(code.compare("olt", x, constant(x.dtype, 255, x.lanes)), x,
                           constant(x.dtype, 255, x.lanes))
