"""Bytecode encoder of recurrences over time (ops/recurrence.py) at given sizes: the words that the host reads
(backend/cpu/routines/recurrence).

    recurrence(gates [T, B, G*H], weights, bias, h, c)  -->  RECURRENCE, ..., slots and bytes, T, B, H, strides of gates
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anyshape.backend.cpu.bytecode import format as host
from anyshape.backend.cpu.machine.target import Machine
from anyshape.backend.cpu.microkernels.tables import recurrence
from anyshape.backend.cpu.native.records import words_of
from anyshape.ops.recurrence import CELLS, blocks, words

_words = host.RecurrenceStep.encoder()
_byte_words = host.ByteRecurrenceStep.encoder()


@dataclass(frozen=True, slots=True)
class RecurrenceSpec:
    """What does not depend on sizes in a step; places: (slot, bytes per element) of each window."""

    number: int
    cell: str
    reverse: bool
    places: tuple[tuple[int, int], ...]
    lengths: bool = False  # whether the last operand is those
    dtype: str = recurrence.FAMILY


def recurrence_words(machine: Machine, spec: RecurrenceSpec, windows: tuple[Any, ...]) -> list[int]:
    """The words of a step; windows: (shape, strides, offset) of the operands and of the results, all dense but the
    times and rows of the gates."""
    places = [(slot, offset * item) for (slot, item), (_, _, offset) in zip(spec.places, windows, strict=True)]
    gates, weights, bias, h, *rest = places
    nothing = (-1, 0)
    c = rest.pop(0) if spec.cell == "lstm" else nothing
    lengths = rest.pop(0) if spec.lengths else nothing
    y, last_h, *last_c = rest
    (shape, strides, _), (_, hidden) = windows[0], windows[3][0]
    if not shape[1]:
        return []
    function = host.RECURRENT + recurrence.routines().index(
        f"cell_{recurrence.FIRST.get(spec.cell, spec.cell)}_{recurrence.HEIGHTS[0]}")
    return _words(
        op=host.RECURRENCE, length=words_of(host.RecurrenceStep), number=spec.number, gates=gates, weights=weights,
        bias=bias, h=h, c=c, y=y, last_h=last_h, last_c=last_c[0] if last_c else nothing, lengths=lengths,
        time=shape[0], batch=shape[1], hidden=hidden, blocks=blocks(hidden), gates_count=CELLS[spec.cell],
        gates_time=4 * strides[0], gates_row=4 * strides[1], reverse=int(spec.reverse),
        height=recurrence.height(machine), function=function, routines=2 if spec.cell in recurrence.FIRST else 1)


@dataclass(frozen=True, slots=True)
class ByteRecurrenceSpec:
    """The same of `recurrence_bytes`."""

    number: int
    reverse: bool
    places: tuple[tuple[int, int], ...]
    dtype: str = recurrence.BYTES_FAMILY


def byte_recurrence_words(machine: Machine, spec: ByteRecurrenceSpec, windows: tuple[Any, ...]) -> list[int]:
    """The words of a step, as above."""
    places = [(slot, offset * item) for (slot, item), (_, _, offset) in zip(spec.places, windows, strict=True)]
    gates, weights, sums, scales, h, c, y, last_h, last_c, state = places
    (shape, strides, _), (_, hidden) = windows[0], windows[4][0]
    if not shape[1]:
        return []
    return _byte_words(
        op=host.BYTE_RECURRENCE, length=words_of(host.ByteRecurrenceStep), number=spec.number, gates=gates,
        weights=weights, sums=sums, scales=scales, h=h, c=c, y=y, last_h=last_h, last_c=last_c, state=state,
        time=shape[0], batch=shape[1], hidden=hidden, blocks=blocks(hidden), words=words(hidden),
        gates_time=4 * strides[0], gates_row=4 * strides[1], reverse=int(spec.reverse),
        height=recurrence.height(machine),
        function=host.RECURRENT + recurrence.routines().index(f"cell_bytes_{recurrence.HEIGHTS[0]}"))
