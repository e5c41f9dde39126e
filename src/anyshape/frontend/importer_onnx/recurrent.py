"""Translations of recurrent ONNX operators: a loop over time inside of one step.

    LSTM(x: f32[t, b, i], w, r, bias)  -->  extern(x, w, r, bias, ... | target="onnx.lstm")
"""
from __future__ import annotations

from typing import Any

from anyshape.frontend.importer_onnx.quantize import aligned
from anyshape.frontend.importer_onnx.table import MICROSOFT, Call, translates
from anyshape.ir.graph import Value
from anyshape.ir.types import TensorType

_DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}


def _optional(c: Call, place: int) -> Value | None:
    return c.value(place) if c.has(place) else None


@translates("LSTM", "GRU", "RNN")
def recurrent(c: Call) -> Any:
    x, w, r = c.value(0), c.value(1), c.value(2)
    states = [_optional(c, 5)] + ([_optional(c, 6), _optional(c, 7)] if c.name == "LSTM" else [])
    return _loop(c, c.name, x, w, r, _optional(c, 3), _optional(c, 4), states)


def _loop(c: Call, name: str, x: Value, w: Value, r: Value, bias: Value | None, lengths: Value | None,
          states: list[Value | None]) -> Any:
    directions = 2 if c.attr("direction", "forward") == "bidirectional" else 1
    hidden = c.attr("hidden_size")
    if hidden is None:
        hidden = r.tensor.shape[-1]
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
    return c.extern(
        f"onnx.{name.lower()}", x, w, r, bias, lengths, *states, hidden, c.attr("direction", "forward"), names,
        [float(n) for n in c.attr("activation_alpha", ())], [float(n) for n in c.attr("activation_beta", ())],
        float(c.attr("clip", 0.0)), layout, c.attr("linear_before_reset" if name == "GRU" else "input_forget", 0),
        types=tuple(kinds), why="a loop over time")


@translates("DynamicQuantizeLSTM", domain=MICROSOFT)
def quantized_lstm(c: Call) -> Any:
    """Weights are whole numbers with scales per direction, or per direction and column; they lie transposed."""
    x = c.value(0)

    def weights(place: int, scale: int, zero: int) -> Value:
        q = c.value(place)  # [directions, inputs, 4*hidden]
        s, z = c.value(scale), c.value(zero)

        def met(v: Value) -> Value:
            if v.tensor.rank == 2:
                return c.t.reshape(v, (v.tensor.shape[0], 1, v.tensor.shape[1]))  # type: ignore[no-any-return]
            return aligned(c, v, q, 0)
        y = c.op("sub", c.t.cast(q, "f32"), c.t.cast(met(z), "f32"))
        return c.t.permute(c.op("mul", y, met(s)), (0, 2, 1))  # type: ignore[no-any-return]
    w, r = weights(1, 8, 9), weights(2, 10, 11)
    return _loop(c, "LSTM", x, w, r, _optional(c, 3), _optional(c, 4),
                 [_optional(c, 5), _optional(c, 6), _optional(c, 7)])
