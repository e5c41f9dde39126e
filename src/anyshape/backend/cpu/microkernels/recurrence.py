"""One time step of a recurrent cell for some rows of a batch, printed as LLVM; see ops/recurrence.py.

    cell   (weights, bias, before, before_step, gates, gates_step, cells, after, after_step, rows, blocks, hidden)
           after [rows, hidden] from before [rows, hidden]; cells [rows, hidden]: an LSTM's c, which goes on in place
           weights [blocks, hidden, gates, 16], bias [blocks, gates, 16]; steps: bytes from row to row, cells' those of
           hidden; rows: a multiple of those that the routine does at a time

The sums of all gates of a vector of units stay in registers over the product with the state, and go through the
activations there: no gate is written to memory. A block's weights are read once for all rows. All take i64.
"""
from __future__ import annotations

from collections.abc import Callable, Collection

from anyshape.backend.cpu.llvm import vector_math
from anyshape.backend.cpu.llvm.ir_builder import Code, Value, constant
from anyshape.backend.cpu.machine.target import Machine
from anyshape.backend.cpu.microkernels.routine import Routine, number
from anyshape.ops.recurrence import BLOCK, CELLS

FAMILY = "recurrence"  # what stands for the dtype of its products: programs without a recurrence do not compile it
ARGUMENTS = ("weights", "bias", "before", "before_step", "gates", "gates_step", "cells", "after", "after_step", "rows",
             "blocks", "hidden")
HEIGHTS = ("many", "one")  # rows at a time


def height(target: Machine) -> int:
    """Rows at a time of the routines for many: their sums fill half of the registers."""
    return 4 if target.vector_bytes == 64 else 2


def routines() -> list[str]:
    """The names of all routines, in the order of the host's table of functions."""
    return [f"cell_{cell}_{rows}" for cell in CELLS for rows in HEIGHTS]


def emit_recurrence(target: Machine, wanted: Collection[str] = (FAMILY,)) -> str:
    """LLVM text of the routines, where they are wanted."""
    if FAMILY not in wanted:
        return ""
    parts: list[str] = []
    declarations: dict[str, str] = {}
    for name in routines():
        _, cell, rows = name.split("_")
        body = _Cell(target, ARGUMENTS)
        body.emit(cell, height(target) if rows == "many" else 1)
        declarations |= body.code.declarations
        parts.append(body.text(name))
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


def _tanh(code: Code, sums: list[Value], inputs: list[Value], state: Value, cell: Value | None) -> list[Value]:
    return [vector_math.tanh(code, code.binary("fadd", sums[0], inputs[0]))]


def _relu(code: Code, sums: list[Value], inputs: list[Value], state: Value, cell: Value | None) -> list[Value]:
    found, zero = code.binary("fadd", sums[0], inputs[0]), constant("f32", 0, state.lanes)
    return [code.select(code.compare("olt", found, zero), zero, found)]  # a NaN stays one


_CELLS: dict[str, Callable[[Code, list[Value], list[Value], Value, Value | None], list[Value]]] = {
    "lstm": _lstm, "gru": _gru, "tanh": _tanh, "relu": _relu}


class _Cell(Routine):
    """One routine."""

    def emit(self, cell: str, height: int) -> None:
        code, gates = self.code, CELLS[cell]
        weights, bias, *_, rows, blocks, hidden = self.given(*ARGUMENTS)
        size = 4 * BLOCK * gates
        block = self.loop(blocks)
        own = self.plus(weights, self.times(self.times(block, hidden), size))
        first = self.times(block, BLOCK)
        row = code.open_loop(number(0), rows, height)
        for start in range(0, BLOCK, self.lanes):
            unit = self.plus(first, start)
            code.open_if(code.compare("slt", unit, hidden))
            self.units(cell, [self.plus(row, i) for i in range(height)], self.plus(own, 4 * start),
                       self.plus(self.plus(bias, self.times(block, size)), 4 * start), unit)
            code.close_section()
        code.close_section()
        code.close_section()

    def units(self, cell: str, rows: list[Value], weights: Value, bias: Value, unit: Value) -> None:
        """A vector of units of some rows."""
        code, gates, lanes = self.code, CELLS[cell], self.lanes
        hidden = self.arguments["hidden"]
        sums = [[code.slot(f"sum {i} {g}", "f32", lanes) for g in range(gates)] for i in range(len(rows))]
        for g in range(gates):
            start = self.load_vector(self.plus(bias, 4 * BLOCK * g), None)
            for own in sums:
                self.set(own[g], start)
        before = [self.at("before", row) for row in rows]
        term = self.loop(hidden)
        place = self.plus(weights, self.times(term, 4 * BLOCK * gates))
        factors = [self.load_vector(self.plus(place, 4 * BLOCK * g), None) for g in range(gates)]
        for own, state in zip(sums, before, strict=True):
            value = code.spread(self.load("f32", 0, self.plus(state, self.times(term, 4)), 4), lanes)
            for g in range(gates):
                self.set(own[g], code.fma(value, factors[g], self.get(own[g])))
        code.close_section()
        mask = code.first_lanes(code.binary("sub", hidden, unit), lanes)
        offset = self.times(unit, 4)
        for row, own, state in zip(rows, sums, before, strict=True):
            inputs = [self.load_vector(self.plus(self.at("gates", row), self.plus(offset, self.times(hidden, 4 * g))),
                                       mask) for g in range(gates)]
            kept = self.plus(self.plus(self.arguments["cells"], self.times(row, self.times(hidden, 4))), offset)
            old = self.load_vector(kept, mask) if cell == "lstm" else None
            found = _CELLS[cell](code, [self.get(slot) for slot in own], inputs,
                                 self.load_vector(self.plus(state, offset), mask), old)
            self.store_vector(found[0], self.plus(self.at("after", row), offset), mask)
            if cell == "lstm":
                self.store_vector(found[1], kept, mask)

    def at(self, name: str, row: Value) -> Value:
        """The address of a row of an operand."""
        return self.plus(self.arguments[name], self.times(row, self.arguments[f"{name}_step"]))
