"""Translations of recurrent layers (LSTM, GRU, RNN): the products of all inputs at once, and a recurrence over time.

    LSTM(x [t, b, i], ...)  -->  g = add(matmul(x, w), bias); y, h, c = recurrence(g, r, bias, h, c) per direction
"""
from __future__ import annotations

from collections.abc import Sequence

from anyshape.frontend.aten.table import Decline, Mismatch, Translator, translates
from anyshape.frontend.recurrent import operators
from anyshape.ir.graph import Value
from anyshape.ops.recurrence import BLOCK, CELLS, blocks
from anyshape.sym.expr import product


def packed(t: Translator, weight: Value, count: int) -> Value:
    """Recurrent weights [G*H, H], or biases [G*H], of `count` gates in blocks of units (ops/recurrence.py)."""
    hidden = weight.tensor.shape[0] // count  # type: ignore[operator]
    assert isinstance(hidden, int)
    rest, units = weight.tensor.shape[1:], blocks(hidden) * BLOCK
    gates = t.reshape(weight, (count, hidden, *rest))
    if units != hidden:
        gates = t.op("concat", gates, t.full(0.0, (count, units - hidden, *rest), "f32"), dim=1)
    gates = t.reshape(gates, (count, blocks(hidden), BLOCK, *rest))
    return t.permute(gates, (1, 3, 0, 2) if rest else (1, 0, 2))


def one_direction(t: Translator, cell: str, x: Value, weight: Value, bias: Value | None, recurrent: Value,
                  recurrent_bias: Value, states: Sequence[Value], lengths: Value | None = None, *, reverse: bool,
                  batch_first: bool = False) -> tuple[Value, ...]:
    """y [T, B, H] and the last states [B, H] of one layer in one direction.

    Args:
        x: [T, B, I], or [B, T, I] with `batch_first`. weight: [G*H, I]; bias: [G*H], of the inputs.
        recurrent, recurrent_bias: `packed`.
        states: [B, H], h and for an LSTM c. lengths: [B], i64; None: all have all times.

    Raises:
        Mismatch: dims that meet have different sizes.
    """
    shape = x.tensor.shape
    if shape[-1] != weight.tensor.shape[1]:
        raise Mismatch(shape[-1], weight.tensor.shape[1])
    rows = t.reshape(x, (product(shape[:-1]), shape[-1]))
    gates = t.op("matmul", rows, t.permute(weight, (1, 0)))
    if bias is not None:
        gates = t.op("add", gates, bias)
    gates = t.reshape(gates, (*shape[:-1], weight.tensor.shape[0]))
    if batch_first:
        gates = t.permute(gates, (1, 0, 2))
    rest = [*states] if lengths is None else [*states, lengths]
    for state in rest:
        if state.tensor.shape[0] != gates.tensor.shape[1]:
            raise Mismatch(state.tensor.shape[0], gates.tensor.shape[1])
    found = t.builder.multi("recurrence", gates, recurrent, recurrent_bias, *rest, cell=cell, reverse=reverse)
    return tuple(found[:1 + len(states)])


@translates(operators.LSTM)
def lstm(t: Translator, x: Value, h: Value, c: Value, w: Value, r: Value, b: Value, rb: Value,
         reverse: bool) -> tuple[Value, ...]:
    return _of_torch(t, "lstm", x, [h, c], w, r, b, rb, reverse)


@translates(operators.CELL)
def cell(t: Translator, x: Value, h: Value, w: Value, r: Value, b: Value, rb: Value, reverse: bool,
         cell: str) -> tuple[Value, ...]:
    return _of_torch(t, cell, x, [h], w, r, b, rb, reverse)


@translates(operators.LINEAR_SCAN)
def linear_scan(t: Translator, a: Value, b: Value) -> Value:
    kinds = {a.tensor.dtype, b.tensor.dtype}
    if len(kinds) != 1 or not kinds < {"f32", "f64", "bf16", "f16"}:
        raise Decline("a linear recurrence of anything but floats of one dtype")
    return b if b.tensor.shape[0] == 1 else t.op("linear_scan", a, b, dim=0)


@translates(operators.CUMPROD)
def cumprod(t: Translator, x: Value, dim: int) -> Value:
    return x if x.tensor.shape[dim] == 1 else t.op("cumprod", x, dim=dim)


def _of_torch(t: Translator, cell: str, x: Value, states: Sequence[Value], w: Value, r: Value, b: Value, rb: Value,
              reverse: bool) -> tuple[Value, ...]:
    hidden = states[0].tensor.shape[1]
    if t.target.device != "cpu" or any(one.tensor.dtype != "f32" for one in (x, *states, w, r, b, rb)):
        raise Decline("the routine for a recurrence is of f32, on the CPU")
    if not isinstance(hidden, int) or hidden < 1 or r.tensor.shape != (CELLS[cell] * hidden, hidden):
        raise Decline("a number of units that is not fixed")
    return one_direction(t, cell, x, w, b, packed(t, r, CELLS[cell]), packed(t, rb, CELLS[cell]), states,
                         reverse=reverse)
