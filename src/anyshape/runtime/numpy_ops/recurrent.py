"""Recurrent layers of ONNX (LSTM, GRU, RNN) by numpy, as one step with a loop over time inside.

All of them: any activations, sequences of several lengths, peepholes, weights that are quantised. The usual ones of f32
have a routine of the host (ops/recurrence.py). Gates in ONNX: LSTM i, o, f, c; GRU z, r, h (ONNX operators LSTM-22,
GRU-22, RNN-22).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

Array = np.ndarray[Any, Any]
Function = Callable[[Array], Array]
Optional: TypeAlias = "Array | None"
Step = Callable[[Array, tuple[Array, ...]], tuple[Array, ...]]


def _sigmoid(x: Array) -> Array:
    return 0.5 * np.tanh(0.5 * x) + x.dtype.type(0.5)


def _function(name: str, alpha: float | None, beta: float | None) -> Function:
    def of(value: float | None, default: float) -> float:
        return default if value is None else value
    found: dict[str, Function] = {
        "sigmoid": _sigmoid, "tanh": np.tanh, "relu": lambda x: np.maximum(x, 0),
        "affine": lambda x: of(alpha, 1.0) * x + of(beta, 0.0),
        "leakyrelu": lambda x: np.where(x >= 0, x, of(alpha, 0.01) * x),
        "thresholdedrelu": lambda x: np.where(x > of(alpha, 1.0), x, 0).astype(x.dtype),
        "scaledtanh": lambda x: of(alpha, 1.0) * np.tanh(of(beta, 1.0) * x),
        "hardsigmoid": lambda x: np.clip(of(alpha, 0.2) * x + of(beta, 0.5), 0, 1),
        "elu": lambda x: np.where(x > 0, x, of(alpha, 1.0) * np.expm1(np.minimum(x, 0))),
        "softsign": lambda x: x / (1 + np.abs(x)), "softplus": lambda x: np.logaddexp(x, 0).astype(x.dtype),
    }
    return found[name.lower()]


_WITH = {"affine": 2, "leakyrelu": 1, "thresholdedrelu": 1, "scaledtanh": 2, "hardsigmoid": 2, "elu": 1}


def _functions(names: Sequence[str], alphas: Sequence[float], betas: Sequence[float]) -> list[Function]:
    """The activations; alphas and betas are given to those that take them, in order."""
    first, second = list(alphas), list(betas)
    found = []
    for name in names:
        count = _WITH.get(name.lower(), 0)
        alpha = first.pop(0) if count and first else None
        beta = second.pop(0) if count > 1 and second else None
        found.append(_function(name, alpha, beta))
    return found


def _turned(x: Array, lengths: Optional) -> Array:
    """Time backwards; each sequence within its own length."""
    if lengths is None:
        return np.flip(x, 0)
    time = np.arange(x.shape[0])[:, None]
    back = lengths.astype(np.int64)[None] - 1 - time
    return np.take_along_axis(x, np.where(back >= 0, back, time)[:, :, None], 0)


def _over_time(x: Array, lengths: Optional, state: tuple[Array, ...], step: Step) -> tuple[Array, tuple[Array, ...]]:
    """The step at each time; behind a sequence's end its results are 0 and its state stays."""
    results = np.zeros((*x.shape[:2], state[0].shape[-1]), x.dtype)
    for time in range(x.shape[0]):
        after = step(x[time], state)
        if lengths is None:
            state = after
            results[time] = after[0]
        else:
            inside = (lengths > time)[:, None]
            state = tuple(np.where(inside, new, old) for new, old in zip(after, state, strict=True))
            np.copyto(results[time], after[0], where=inside)
    return results, state


def _layer(x: Array, lengths: Optional, states: list[Optional], hidden: int, direction: str, layout: int,
           cell: Callable[[int, Array], tuple[Array, Step]]) -> tuple[Array, ...]:
    if layout:
        x = x.swapaxes(0, 1)
        states = [None if one is None else one.swapaxes(0, 1) for one in states]
    outputs, ends = [], []
    for d in range(2 if direction == "bidirectional" else 1):
        back = direction == "reverse" or d == 1
        projected, step = cell(d, _turned(x, lengths) if back else x)
        state = tuple(np.zeros((x.shape[1], hidden), x.dtype) if one is None else one[d] for one in states)
        y, state = _over_time(projected, lengths, state, step)
        outputs.append(_turned(y, lengths) if back else y)
        ends.append(state)
    found = [np.stack(outputs, 1)] + [np.stack([end[place] for end in ends]) for place in range(len(states))]
    return (found[0].transpose(2, 0, 1, 3), *(one.swapaxes(0, 1) for one in found[1:])) if layout else tuple(found)


def _limited(clip: float) -> Function:
    return (lambda x: np.clip(x, -clip, clip)) if clip else (lambda x: x)


def quantized(x: Array) -> tuple[Array, Any]:
    """The tensor as whole numbers 0..255 less their zero point, in f32, and its scale
    (ONNX DynamicQuantizeLinear-11)."""
    low, high = np.minimum(x.min(), 0), np.maximum(x.max(), 0)
    scale = (high - low) / x.dtype.type(255)
    scale = scale if scale != 0 else x.dtype.type(1)
    zero = np.rint(min(max(-low / scale, 0), 255)).astype(x.dtype)
    found = np.rint(x / scale)
    found += zero
    np.clip(found, 0, 255, out=found)
    found -= zero
    return found, scale


def _times(x: Array, w: Array, scale: Array) -> Array:
    """x times quantised weights [inputs, columns], x quantised too. Sums of whole numbers are exact in f32 below 2^24,
    beyond that in f64."""
    if not x.size:
        return np.zeros((*x.shape[:-1], w.shape[-1]), x.dtype)
    whole, own = quantized(x)
    return np.matmul(whole.astype(w.dtype, copy=False), w).astype(x.dtype, copy=False) * (own * scale)


def _exact(w: Array) -> Array:
    return w.astype(np.float64) if w.shape[-2] > 514 else w  # 255 * 128 * 514 < 2^24


def lstm(x: Array, w: Array, r: Array, bias: Optional, lengths: Optional, h: Optional, c: Optional,
         peephole: Optional, hidden: int, direction: str, names: Sequence[str], alphas: Sequence[float],
         betas: Sequence[float], clip: float, layout: int, forget: int, w_scale: Optional = None,
         r_scale: Optional = None) -> tuple[Array, ...]:
    """LSTM: outputs, last h, last c. With scales the weights are whole numbers that lie transposed, and operands are
    quantised in each call (com.microsoft DynamicQuantizeLSTM-1)."""
    functions = _functions(names, alphas, betas)
    cut = _limited(clip)

    def cell(d: int, inputs: Array) -> tuple[Array, Step]:
        f, g, k = functions[3 * d:3 * d + 3]
        projected = inputs @ w[d].T if w_scale is None else _times(inputs, _exact(w[d]), w_scale[d])
        if bias is not None:
            projected = projected + (bias[d][:4 * hidden] + bias[d][4 * hidden:])
        p = np.split(peephole[d], 3) if peephole is not None else None
        weights = r[d].T if r_scale is None else _exact(r[d])

        def step(now: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            before, memory = state
            after = before @ weights if r_scale is None else _times(before, weights, r_scale[d])
            i, o, forgets, new = np.split(now + after, 4, 1)
            if p is not None:
                i, forgets = i + p[0] * memory, forgets + p[2] * memory
            i = f(cut(i))
            keep = 1 - i if forget else f(cut(forgets))
            memory = keep * memory + i * g(cut(new))
            o = f(cut(o + p[1] * memory if p is not None else o))
            return o * k(memory), memory
        return projected, step
    return _layer(x, lengths, [h, c], hidden, direction, layout, cell)


def gru(x: Array, w: Array, r: Array, bias: Optional, lengths: Optional, h: Optional, hidden: int, direction: str,
        names: Sequence[str], alphas: Sequence[float], betas: Sequence[float], clip: float, layout: int,
        before_reset: int) -> tuple[Array, ...]:
    """GRU: outputs, last h."""
    functions = _functions(names, alphas, betas)
    cut = _limited(clip)

    def cell(d: int, inputs: Array) -> tuple[Array, Step]:
        f, g = functions[2 * d:2 * d + 2]
        own = np.zeros(6 * hidden, x.dtype) if bias is None else bias[d]
        wb, rb = np.split(own, 2)
        gates, last = np.ascontiguousarray(r[d][:2 * hidden].T), np.ascontiguousarray(r[d][2 * hidden:].T)

        def step(now: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            before, = state
            z, reset = np.split(f(cut(now[:, :2 * hidden] + before @ gates + rb[:2 * hidden])), 2, 1)
            if before_reset:
                new = now[:, 2 * hidden:] + reset * (before @ last + rb[2 * hidden:])
            else:
                new = now[:, 2 * hidden:] + (reset * before) @ last + rb[2 * hidden:]
            new = g(cut(new))
            return ((1 - z) * new + z * before,)
        return inputs @ w[d].T + wb, step
    return _layer(x, lengths, [h], hidden, direction, layout, cell)


def rnn(x: Array, w: Array, r: Array, bias: Optional, lengths: Optional, h: Optional, hidden: int, direction: str,
        names: Sequence[str], alphas: Sequence[float], betas: Sequence[float], clip: float, layout: int, _forget: int
        ) -> tuple[Array, ...]:
    """RNN: outputs, last h."""
    functions = _functions(names, alphas, betas)
    cut = _limited(clip)

    def cell(d: int, inputs: Array) -> tuple[Array, Step]:
        projected = inputs @ w[d].T
        if bias is not None:
            projected = projected + (bias[d][:hidden] + bias[d][hidden:])
        return projected, lambda now, state: (functions[d](cut(now + state[0] @ r[d].T)),)
    return _layer(x, lengths, [h], hidden, direction, layout, cell)


OPERATORS: dict[str, Callable[..., Any]] = {"onnx.lstm": lstm, "onnx.gru": gru, "onnx.rnn": rnn}
