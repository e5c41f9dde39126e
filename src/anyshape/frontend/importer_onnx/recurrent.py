"""Translations of recurrent ONNX operators: products of all inputs at once and a recurrence, or one step by PyTorch.

    LSTM(x: f32[t, b, i], w, r, bias)  -->  y, h, c = recurrence(add(matmul(x, w), bias), r, bias, h, c)
    LSTM(..., sequence_lens)           -->  extern(x, w, r, bias, ... | target="onnx.lstm")

The routine of the host does f32, whole sequences and the usual activations (ops/recurrence.py); gates are brought into
PyTorch's order.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anyshape.frontend.importer_onnx.table import MICROSOFT, Call, translates
from anyshape.frontend.recurrent.layers import one_direction, packed
from anyshape.frontend.symbols.known import Known, known
from anyshape.ir.graph import Value
from anyshape.ir.types import TensorType
from anyshape.ops.recurrence import BLOCK, CELLS, blocks

_ORDERS = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2)}  # of gates in PyTorch, by their places in ONNX
_DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}


def _optional(c: Call, place: int) -> Value | None:
    return c.value(place) if c.has(place) else None


@translates("LSTM", "GRU", "RNN")
def recurrent(c: Call) -> Any:
    x, w, r = c.value(0), c.value(1), c.value(2)
    states = [_optional(c, 5)] + ([_optional(c, 6), _optional(c, 7)] if c.name == "LSTM" else [])
    return _loop(c, c.name, x, w, r, _optional(c, 3), _optional(c, 4), states)


def _loop(c: Call, name: str, x: Value, w: Value, r: Value, bias: Value | None, lengths: Value | None,
          states: list[Value | None], scales: Sequence[Value] = ()) -> Any:
    """The step. scales: of quantised weights, which lie transposed."""
    directions = 2 if c.attr("direction", "forward") == "bidirectional" else 1
    hidden = c.attr("hidden_size")
    if hidden is None:
        hidden = r.tensor.shape[1] if scales else r.tensor.shape[-1]
    hidden, = c.fixed([hidden])
    layout = c.attr("layout", 0)
    time, batch = (x.tensor.shape[1], x.tensor.shape[0]) if layout else x.tensor.shape[:2]
    whole = (batch, time, directions, hidden) if layout else (time, directions, batch, hidden)
    last = (batch, directions, hidden) if layout else (directions, batch, hidden)
    dtype = x.tensor.dtype
    kinds = [TensorType(dtype, whole), TensorType(dtype, last)]
    if name == "LSTM":
        kinds.append(TensorType(dtype, last))
    names = [str(one) for one in c.attr("activations", _DEFAULTS[name] * directions)]
    cell = _cell(c, name, names, directions)
    if cell and lengths is None and dtype == "f32" and not scales and states[2:] in ([], [None]):
        return _native(c, cell, x, w, r, bias, states[:2], hidden, layout)
    return c.extern(
        f"onnx.{name.lower()}", x, w, r, bias, lengths, *states, hidden, c.attr("direction", "forward"), names,
        [float(n) for n in c.attr("activation_alpha", ())], [float(n) for n in c.attr("activation_beta", ())],
        float(c.attr("clip", 0.0)), layout, c.attr("linear_before_reset" if name == "GRU" else "input_forget", 0),
        *scales, types=tuple(kinds), why="a loop over time")


def _cell(c: Call, name: str, names: Sequence[str], directions: int) -> str:
    """The cell of ops/recurrence.py that it is; "": none of them."""
    if c.attr("clip", 0.0) or c.attr("input_forget", 0) or (name == "GRU" and not c.attr("linear_before_reset", 0)):
        return ""
    own = [one.lower() for one in names]
    usual = {"lstm": ["sigmoid", "tanh", "tanh"], "gru": ["sigmoid", "tanh"]} if name != "RNN" else {
        "tanh": ["tanh"], "relu": ["relu"]}
    return next((cell for cell, wanted in usual.items() if cell in (name.lower(), *own[:1] * (name == "RNN"))
                 and own == wanted * directions), "")


def _native(c: Call, cell: str, x: Value, w: Value, r: Value, bias: Value | None, states: list[Value | None],
            hidden: int, layout: int) -> Any:
    """One layer in its directions, by the routine of the host."""
    t, direction, count = c.t, c.attr("direction", "forward"), CELLS[cell]
    states = [one for place, one in enumerate(states) if place < 1 + (cell == "lstm")]
    states += [None] * (1 + (cell == "lstm") - len(states))
    batch = x.tensor.shape[0 if layout else 1]
    ys, lasts = [], []
    for d in range(2 if direction == "bidirectional" else 1):
        own = [t.full(0.0, (batch, hidden), "f32") if one is None else _at(c, one, 1 if layout else 0, d)
               for one in states]
        first = None if bias is None else _value(c, _ordered(c, 3, bias, d))
        start = t.full(0.0, (count * hidden,), "f32") if bias is None else _ordered(c, 3, bias, d, count * hidden)
        y, *last = one_direction(t, cell, x, _value(c, _ordered(c, 1, w, d)), first,
                                 _packed(c, _ordered(c, 2, r, d), count), _packed(c, start, count), own,
                                 reverse=direction == "reverse" or d == 1, batch_first=bool(layout))
        ys.append(t.reshape(y, (y.tensor.shape[0], 1, *y.tensor.shape[1:])))
        lasts.append([t.reshape(one, (1, *one.tensor.shape)) for one in last])
    y = ys[0] if len(ys) == 1 else t.op("concat", *ys, dim=1)
    ends = [one[0] if len(one) == 1 else t.op("concat", *one, dim=0) for one in zip(*lasts, strict=True)]
    if layout:
        return (t.permute(y, (2, 0, 1, 3)), *(t.permute(one, (1, 0, 2)) for one in ends))
    return (y, *ends)


def _at(c: Call, x: Value, dim: int, place: int) -> Value:
    """One place of a dim, without the dim."""
    return c.t.reshape(c.t.window(x, dim, place, 1), (*x.tensor.shape[:dim], *x.tensor.shape[dim + 1:]))


def _value(c: Call, x: Value | Known) -> Value:
    return c.tensor(x) if isinstance(x, Known) else x


def _packed(c: Call, x: Value | Known, count: int) -> Value:
    """What `packed` makes of weights, when compiling where they are known."""
    if not isinstance(x, Known):
        return packed(c.t, x, count)
    hidden, rest = len(x.array) // count, x.shape[1:]
    gates = np.zeros((count, blocks(hidden) * BLOCK, *rest), np.float32)
    gates[:, :hidden] = x.array.reshape(count, hidden, *rest)
    gates = gates.reshape(count, blocks(hidden), BLOCK, *rest).transpose((1, 3, 0, 2) if rest else (1, 0, 2))
    return c.tensor(known(np.ascontiguousarray(gates)))


def _ordered(c: Call, place: int, x: Value, direction: int, first: int = 0) -> Value | Known:
    """Weights of a direction, their gates in PyTorch's order; of a bias the half that begins at `first`."""
    order = _ORDERS.get(c.name, (0,))
    found = c.at(place)
    hidden, = c.fixed([c.value(2).tensor.shape[-1]])
    if isinstance(found, Known) and not found.symbolic:
        whole = found.array[direction][first:first + len(order) * hidden]
        parts = np.split(whole, len(order))
        return known(np.ascontiguousarray(np.concatenate([parts[gate] for gate in order])))
    whole = _at(c, x, 0, direction)
    gates = [c.t.window(whole, 0, first + gate * hidden, hidden) for gate in order]
    return gates[0] if len(gates) == 1 else c.t.op("concat", *gates, dim=0)


@translates("DynamicQuantizeLSTM", domain=MICROSOFT)
def quantized_lstm(c: Call) -> Any:
    """Weights are whole numbers [directions, inputs, 4*hidden] with scales per direction, or per column of one; what
    they are multiplied with is quantised in each call, the operand as a whole, the state at each step."""
    def weights(place: int, zero: int) -> Value:
        q, z = c.value(place), c.value(zero)
        count = z.tensor.shape[1] if z.tensor.rank == 2 else 1
        away = c.t.reshape(z, (z.tensor.shape[0], 1, count))
        return c.op("sub", c.t.cast(q, "f32"), c.t.cast(away, "f32"))

    def scales(place: int) -> Value:
        s = c.value(place)
        return c.t.reshape(s, (s.tensor.shape[0], 1, s.tensor.shape[1] if s.tensor.rank == 2 else 1))
    r = weights(2, 11)
    more = [scales(8), scales(10)]
    return _loop(c, "LSTM", c.value(0), weights(1, 9), r, _optional(c, 3), _optional(c, 4),
                 [_optional(c, 5), _optional(c, 6), _optional(c, 7)], more)
