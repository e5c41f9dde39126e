"""Translations of quantised recurrent ONNX operators: products and a recurrence of bytes, or one step by PyTorch.

    DynamicQuantizeLSTM(x: f32[t, b, i], w, r, bias, h, c)
        -->  y, h, c = recurrence_bytes(x quantised @ w * scales + bias, r in panels, its sums, its scales, h, c)

Weights are whole numbers [directions, inputs, 4*hidden] with scales per direction, or per column of one; what they are
multiplied with is quantised in each call, the operand as a whole, the state at each time. The routine of the host does
what `recurrent.py` says, by constant weights without a zero point; all else is a step with a loop over time.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from anyshape.frontend.importer_onnx.quantize import dynamic, moved_numbers, product_of_bytes
from anyshape.frontend.importer_onnx.recurrent import ORDERS, cell_of, in_blocks, layer_of, loop, optional
from anyshape.frontend.importer_onnx.table import MICROSOFT, Call, translates
from anyshape.frontend.symbols.known import Known, known
from anyshape.ir.graph import Value
from anyshape.ops.recurrence import BLOCK, CELLS, WORD, blocks, words

W, R, BIAS, LENGTHS, H, C, PEEPHOLE, W_SCALE, W_ZERO, R_SCALE, R_ZERO = range(1, 12)  # places of operands
GATES = CELLS["lstm"]


@translates("DynamicQuantizeLSTM", domain=MICROSOFT)
def quantized_lstm(c: Call) -> Any:
    if _is_native(c):
        return _native(c)

    def weights(place: int, zero: int) -> Value:
        q, z = c.value(place), c.value(zero)
        count = z.tensor.shape[1] if z.tensor.rank == 2 else 1
        away = c.t.reshape(z, (z.tensor.shape[0], 1, count))
        return c.op("sub", c.t.cast(q, "f32"), c.t.cast(away, "f32"))

    def scales(place: int) -> Value:
        s = c.value(place)
        return c.t.reshape(s, (s.tensor.shape[0], 1, s.tensor.shape[1] if s.tensor.rank == 2 else 1))

    r = weights(R, R_ZERO)
    more = [scales(W_SCALE), scales(R_SCALE)]
    return loop(c, "LSTM", c.value(0), weights(W, W_ZERO), r, optional(c, BIAS), optional(c, LENGTHS),
                [optional(c, H), optional(c, C), optional(c, PEEPHOLE)], more)


def _is_native(c: Call) -> bool:
    """Whether the routine of the host does it."""
    constants = [c.at(place) for place in (W, R, W_SCALE, W_ZERO, R_SCALE, R_ZERO)]
    bias = c.at(BIAS)
    if not all(isinstance(one, Known) and not one.symbolic for one in (*constants, *([] if bias is None else [bias]))):
        return False
    count = len(constants[0].array)
    names = [str(one) for one in c.attr("activations", ("Sigmoid", "Tanh", "Tanh") * count)]
    zero = {"i8": 0, "u8": 128}
    return c.dtype() == "f32" and cell_of(c, "LSTM", names, count) == "lstm" and not c.has(LENGTHS) \
        and not c.has(PEEPHOLE) and constants[1].dtype in zero \
        and bool((constants[5].array == zero[constants[5].dtype]).all())


def _native(c: Call) -> Any:
    """The layer in its directions, by the routine of the host."""
    t, x = c.t, c.value(0)
    time, batch, inputs = x.tensor.shape
    hidden = c.at(R).shape[1]
    rows, scale, zero = dynamic(c, t.reshape(x, (time * batch, inputs)))

    def ordered(place: int, d: int) -> np.ndarray:
        """What a direction has of an operand, its columns in PyTorch's order of gates where it has columns."""
        own = c.at(place).array[d]
        if own.ndim == 0 or own.shape[-1] == 1:
            return np.broadcast_to(own.reshape(()), (GATES * hidden,)) if place in (W_SCALE, R_SCALE) else own
        parts = np.split(own, own.shape[-1] // hidden, -1)
        return np.concatenate([parts[gate] for gate in ORDERS["LSTM"]], -1)

    def gates(d: int) -> Value:
        """The products of all inputs, with both biases."""
        weights, away = (known(ordered(place, d), c.at(place).dtype) for place in (W, W_ZERO))
        total = t.cast(product_of_bytes(c, rows, zero, weights, away), "f32")
        by = t.pointwise("mul", scale, c.tensor(known(np.ascontiguousarray(ordered(W_SCALE, d)))), dtype="f32")
        found = t.pointwise("mul", total, by, dtype="f32")
        if c.has(BIAS):
            both = c.at(BIAS).array[d].reshape(2, GATES, hidden)[:, list(ORDERS["LSTM"])].sum(0).reshape(-1)
            found = t.pointwise("add", found, c.tensor(known(both)), dtype="f32")
        return t.reshape(found, (time, batch, GATES * hidden))  # type: ignore[no-any-return]

    def one(d: int, own: list[Value], reverse: bool) -> tuple[Value, ...]:
        numbers = moved_numbers(known(ordered(R, d), c.at(R).dtype), "i8")
        sums = in_blocks(numbers.sum(0, dtype=np.int32), GATES)
        constants = [known(_panels(numbers), "i8"), known(sums, "i32"), known(in_blocks(ordered(R_SCALE, d), GATES))]
        return t.builder.multi("recurrence_bytes", gates(d), *map(c.tensor, constants), *own, reverse=reverse)[:3]

    return layer_of(c, batch, hidden, [optional(c, H), optional(c, C)], one)


def _panels(weights: np.ndarray) -> np.ndarray:
    """[H, 4*H] --> [N, H/4, 4, 16, 4]: units in blocks, four terms of each next to each other (ops/recurrence.py)."""
    hidden = len(weights)
    terms = np.zeros((words(hidden) * WORD, weights.shape[1]), weights.dtype)
    terms[:hidden] = weights
    found = in_blocks(np.ascontiguousarray(terms.T), GATES)  # [N, terms, 4, 16]
    found = found.reshape(blocks(hidden), words(hidden), WORD, GATES, BLOCK)
    return np.ascontiguousarray(found.transpose(0, 1, 3, 4, 2))
