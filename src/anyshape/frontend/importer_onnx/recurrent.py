"""Translations of recurrent ONNX operators: products of all inputs at once and a recurrence, or one step by PyTorch.

    LSTM(x: f32[t, b, i], w, r, bias)  -->  y, h, c = recurrence(add(matmul(x, w), bias), r, bias, h, c)
    LSTM(..., clip=1.0)                -->  extern(x, w, r, bias, ... | target="onnx.lstm")

The routine of the host does f32 and the usual activations (ops/recurrence.py); gates are brought into PyTorch's order.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from anyshape.frontend.importer_onnx.quantize import dynamic, moved_numbers, product_of_bytes
from anyshape.frontend.importer_onnx.table import MICROSOFT, Call, translates
from anyshape.frontend.recurrent.layers import one_direction, packed
from anyshape.frontend.symbols.known import Known, known
from anyshape.ir.graph import Value
from anyshape.ir.types import TensorType
from anyshape.ops.recurrence import BLOCK, CELLS, WORD, blocks, words
from anyshape.sym.expr import Size

ORDERS = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2)}  # of gates in PyTorch, by their places in ONNX
_DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}


def optional(c: Call, place: int) -> Value | None:
    return c.value(place) if c.has(place) else None


@translates("LSTM", "GRU", "RNN")
def recurrent(c: Call) -> Any:
    x, w, r = c.value(0), c.value(1), c.value(2)
    states = [optional(c, 5)] + ([optional(c, 6), optional(c, 7)] if c.name == "LSTM" else [])
    return loop(c, c.name, x, w, r, optional(c, 3), optional(c, 4), states)


def loop(c: Call, name: str, x: Value, w: Value, r: Value, bias: Value | None, lengths: Value | None,
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
    cell = cell_of(c, name, names, directions)
    if cell and dtype == "f32" and not scales and states[2:] in ([], [None]):
        return _native(c, cell, x, w, r, bias, lengths, states[:2], hidden, layout)
    return c.extern(
        f"onnx.{name.lower()}", x, w, r, bias, lengths, *states, hidden, c.attr("direction", "forward"), names,
        [float(n) for n in c.attr("activation_alpha", ())], [float(n) for n in c.attr("activation_beta", ())],
        float(c.attr("clip", 0.0)), layout, c.attr("linear_before_reset" if name == "GRU" else "input_forget", 0),
        *scales, types=tuple(kinds), why="a loop over time")


def cell_of(c: Call, name: str, names: Sequence[str], directions: int) -> str:
    """The cell of ops/recurrence.py that it is; "": none of them."""
    if c.attr("clip", 0.0) or c.attr("input_forget", 0):
        return ""
    own = [one.lower() for one in names]
    usual = {"lstm": ["sigmoid", "tanh", "tanh"], "gru": ["sigmoid", "tanh"]} if name != "RNN" else {
        "tanh": ["tanh"], "relu": ["relu"]}
    cell = next((cell for cell, wanted in usual.items() if cell in (name.lower(), *own[:1] * (name == "RNN"))
                 and own == wanted * directions), "")
    return "gru_before" if cell == "gru" and not c.attr("linear_before_reset", 0) else cell


def _native(c: Call, cell: str, x: Value, w: Value, r: Value, bias: Value | None,
            lengths: Value | None, states: list[Value | None], hidden: int, layout: int) -> Any:
    """One layer in its directions, by the routine of the host."""
    t, count = c.t, CELLS[cell]
    ends = None if lengths is None else t.cast(lengths, "i64")

    def one(d: int, own: list[Value], reverse: bool) -> tuple[Value, ...]:
        first = None if bias is None else _value(c, _ordered(c, 3, bias, d))
        start = t.full(0.0, (count * hidden,), "f32") if bias is None else _ordered(c, 3, bias, d, count * hidden)
        return one_direction(t, cell, x, _value(c, _ordered(c, 1, w, d)), first,
                             _packed(c, _ordered(c, 2, r, d), count), _packed(c, start, count), own, ends,
                             reverse=reverse, batch_first=bool(layout))

    return layer_of(c, x.tensor.shape[0 if layout else 1], hidden, states[:1 + (cell == "lstm")], one, layout)


def layer_of(c: Call, batch: Size, hidden: int, states: Sequence[Value | None],
               one: Callable[[int, list[Value], bool], tuple[Value, ...]], layout: int = 0) -> Any:
    """The results of a layer: those of its directions side by side. `one(number, states, reverse)`: y [t, b, h] and the
    last states [b, h] of a direction. states: the operator's."""
    t, direction = c.t, c.attr("direction", "forward")
    ys, lasts = [], []
    for d in range(2 if direction == "bidirectional" else 1):
        own = [t.full(0.0, (batch, hidden), "f32") if state is None else _at(c, state, 1 if layout else 0, d)
               for state in states]
        y, *last = one(d, own, direction == "reverse" or d == 1)
        ys.append(t.reshape(y, (y.tensor.shape[0], 1, *y.tensor.shape[1:])))
        lasts.append([t.reshape(state, (1, *state.tensor.shape)) for state in last])
    y = ys[0] if len(ys) == 1 else t.op("concat", *ys, dim=1)
    ends = [pair[0] if len(pair) == 1 else t.op("concat", *pair, dim=0) for pair in zip(*lasts, strict=True)]
    if layout:
        return (t.permute(y, (2, 0, 1, 3)), *(t.permute(end, (1, 0, 2)) for end in ends))
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
    return c.tensor(known(in_blocks(x.array, count)))


def in_blocks(x: np.ndarray, count: int) -> np.ndarray:
    """[G*H] or [G*H, K] of `count` gates --> [N, G, 16] or [N, K, G, 16]: units in blocks (ops/recurrence.py)."""
    hidden, rest = len(x) // count, x.shape[1:]
    gates = np.zeros((count, blocks(hidden) * BLOCK, *rest), x.dtype)
    gates[:, :hidden] = x.reshape(count, hidden, *rest)
    gates = gates.reshape(count, blocks(hidden), BLOCK, *rest).transpose((1, 3, 0, 2) if rest else (1, 0, 2))
    return np.ascontiguousarray(gates)


def _ordered(c: Call, place: int, x: Value, direction: int, first: int = 0) -> Value | Known:
    """Weights of a direction, their gates in PyTorch's order; of a bias the half that begins at `first`."""
    order = ORDERS.get(c.name, (0,))
    found = c.at(place)
    hidden, = c.fixed([c.value(2).tensor.shape[-1]])
    if isinstance(found, Known) and not found.symbolic:
        whole = found.array[direction][first:first + len(order) * hidden]
        parts = np.split(whole, len(order))
        return known(np.ascontiguousarray(np.concatenate([parts[gate] for gate in order])))
    whole = _at(c, x, 0, direction)
    gates = [c.t.window(whole, 0, first + gate * hidden, hidden) for gate in order]
    return gates[0] if len(gates) == 1 else c.t.op("concat", *gates, dim=0)


# ---- onnxruntime's quantised LSTM: weights are whole numbers [directions, inputs, 4*hidden] with scales per direction,
# or per column of one; what they are multiplied with is quantised in each call, the operand as a whole, the state at
# each time. The routine does constant weights without a zero point; all else is a step with a loop over time

W, R, BIAS, LENGTHS, H, C, PEEPHOLE, W_SCALE, W_ZERO, R_SCALE, R_ZERO = range(1, 12)  # places of operands
GATES = CELLS["lstm"]


@translates("DynamicQuantizeLSTM", domain=MICROSOFT)
def quantized_lstm(c: Call) -> Any:
    if _is_native_bytes(c):
        return _native_bytes(c)

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


def _is_native_bytes(c: Call) -> bool:
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


def _native_bytes(c: Call) -> Any:
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
