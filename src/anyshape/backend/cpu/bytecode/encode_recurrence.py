"""Bytecode encoder of recurrences over time (ops/recurrence.py): the words that the host reads
(backend/cpu/routines/recurrence), but for sizes.

    recurrence(gates [T, B, G*H], weights, bias, h, c)  -->  RECURRENCE, ..., slots and bytes, T, B, H, strides of gates
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anyshape.backend.cpu.bytecode import format as host
from anyshape.backend.cpu.bytecode.template import Word
from anyshape.backend.cpu.machine.target import Machine
from anyshape.backend.cpu.microkernels.tables import recurrence
from anyshape.backend.cpu.native.records import words_of
from anyshape.ir.types import size_of
from anyshape.ops.recurrence import CELLS, blocks, words
from anyshape.plan.ir.program import LibraryStep, Window
from anyshape.sym.expr import Size

_words = host.RecurrenceStep.encoder()
_byte_words = host.ByteRecurrenceStep.encoder()
FAMILIES = {"recurrence": recurrence.FAMILY, "recurrence_bytes": recurrence.BYTES_FAMILY}  # what their routines are of


def recurrence_words(machine: Machine, number: int, step: LibraryStep, slots: Mapping[str, int],
                     word: Callable[[Size], Word]) -> Sequence[Word]:
    """The words of a step of at least one row, whose windows are dense but for the times and rows of the gates. slots:
    of buffers; word: what stands for a size."""
    places = [_place(window, slots, word) for window in (*step.inputs, *step.outputs)]
    attrs: dict[str, Any] = dict(step.attrs)
    if step.op == "recurrence_bytes":
        return _of_bytes(machine, number, step, places, word)
    cell = attrs["cell"]
    gates, weights, bias, h, *rest = places
    nothing = (-1, 0)
    c = rest.pop(0) if cell == "lstm" else nothing
    lengths = rest.pop(0) if step.inputs[-1].type.dtype == "i64" else nothing
    y, last_h, *last_c = rest
    type_, hidden = step.inputs[0].type, step.inputs[3].type.shape[1]
    assert isinstance(hidden, int)
    function = host.RECURRENT + recurrence.routines().index(
        f"cell_{recurrence.FIRST.get(cell, cell)}_{recurrence.HEIGHTS[0]}")
    return _words(
        op=host.RECURRENCE, length=words_of(host.RecurrenceStep), number=number, gates=gates, weights=weights,
        bias=bias, h=h, c=c, y=y, last_h=last_h, last_c=last_c[0] if last_c else nothing, lengths=lengths,
        time=word(type_.shape[0]), batch=word(type_.shape[1]), hidden=hidden, blocks=blocks(hidden),
        gates_count=CELLS[cell], gates_time=word(4 * type_.layout()[0]), gates_row=word(4 * type_.layout()[1]),
        reverse=int(attrs["reverse"]), height=recurrence.height(machine), function=function,
        routines=2 if cell in recurrence.FIRST else 1)


def _of_bytes(machine: Machine, number: int, step: LibraryStep, places: list[tuple[int, Word]],
              word: Callable[[Size], Word]) -> Sequence[Word]:
    """The same of `recurrence_bytes`."""
    gates, weights, sums, scales, h, c, y, last_h, last_c, state = places
    type_, hidden = step.inputs[0].type, step.inputs[4].type.shape[1]
    assert isinstance(hidden, int)
    return _byte_words(
        op=host.BYTE_RECURRENCE, length=words_of(host.ByteRecurrenceStep), number=number, gates=gates,
        weights=weights, sums=sums, scales=scales, h=h, c=c, y=y, last_h=last_h, last_c=last_c, state=state,
        time=word(type_.shape[0]), batch=word(type_.shape[1]), hidden=hidden, blocks=blocks(hidden),
        words=words(hidden), gates_time=word(4 * type_.layout()[0]), gates_row=word(4 * type_.layout()[1]),
        reverse=int(bool(dict(step.attrs)["reverse"])), height=recurrence.height(machine),
        function=host.RECURRENT + recurrence.routines().index(f"cell_bytes_{recurrence.HEIGHTS[0]}"))


def _place(window: Window, slots: Mapping[str, int], word: Callable[[Size], Word]) -> tuple[int, Word]:
    """Slot and byte of a window."""
    return slots[window.buffer], word(window.offset * size_of(window.type.dtype))
