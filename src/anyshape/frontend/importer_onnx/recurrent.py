"""Translations of recurrent ONNX operators: a loop over time inside of one step.

    LSTM(x: f32[t, b, i], w, r, bias)  -->  extern(x, w, r, bias, ... | target="onnx.lstm")
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anyshape.frontend.importer_onnx.table import MICROSOFT, Call, translates
from anyshape.frontend.symbols.known import Known, known
from anyshape.ir.graph import Value
from anyshape.ir.types import TensorType

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
    plain = name in _ORDERS and names == list(_DEFAULTS[name]) * directions and not c.attr("clip", 0.0) and not scales
    if plain and lengths is None and dtype == "f32" and (
            c.attr("linear_before_reset", 0) if name == "GRU" else not c.attr("input_forget", 0) and states[2] is None):
        weights = _in_order(c, name, directions)
        if weights is not None:
            return c.extern("onnx.recurrent", name.lower(), x, weights, states[:2], hidden, bias is not None,
                            c.attr("direction", "forward"), layout, types=tuple(kinds), why="a loop over time")
    return c.extern(
        f"onnx.{name.lower()}", x, w, r, bias, lengths, *states, hidden, c.attr("direction", "forward"), names,
        [float(n) for n in c.attr("activation_alpha", ())], [float(n) for n in c.attr("activation_beta", ())],
        float(c.attr("clip", 0.0)), layout, c.attr("linear_before_reset" if name == "GRU" else "input_forget", 0),
        *scales, types=tuple(kinds), why="a loop over time")


def _in_order(c: Call, name: str, directions: int) -> list[Known] | None:
    """Weights that are known, in PyTorch's order of gates, by direction; None where one is not known."""
    parts = [c.at(place) for place in ((1, 2, 3) if c.has(3) else (1, 2))]
    if not all(isinstance(one, Known) and not one.symbolic for one in parts):
        return None
    order = _ORDERS[name]

    def swapped(array: np.ndarray) -> Known:
        gates = np.split(array, len(order))
        return known(np.concatenate([gates[place] for place in order]))
    found = []
    for d in range(directions):
        w, r, *bias = (one.array[d] for one in parts)
        found += [swapped(one) for one in (w, r, *(half for b in bias for half in np.split(b, 2)))]
    return found


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
