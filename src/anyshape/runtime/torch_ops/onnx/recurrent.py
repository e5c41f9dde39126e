"""Recurrent layers of ONNX (LSTM, GRU, RNN) as one step with a loop over time inside.

The usual ones, whole sequences with the usual activations, are PyTorch's own layers, whose gates lie in another order.
Gates in ONNX: LSTM i, o, f, c; GRU z, r, h (ONNX operators LSTM-22, GRU-22, RNN-22).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

Function = Callable[[torch.Tensor], torch.Tensor]
Optional: TypeAlias = "torch.Tensor | None"


def _function(name: str, alpha: float | None, beta: float | None) -> Function:
    def of(value: float | None, default: float) -> float:
        return default if value is None else value
    found: dict[str, Function] = {
        "sigmoid": torch.sigmoid, "tanh": torch.tanh, "relu": torch.relu,
        "affine": lambda x: of(alpha, 1.0) * x + of(beta, 0.0),
        "leakyrelu": lambda x: torch.nn.functional.leaky_relu(x, of(alpha, 0.01)),
        "thresholdedrelu": lambda x: torch.where(x > of(alpha, 1.0), x, torch.zeros_like(x)),
        "scaledtanh": lambda x: of(alpha, 1.0) * torch.tanh(of(beta, 1.0) * x),
        "hardsigmoid": lambda x: torch.clamp(of(alpha, 0.2) * x + of(beta, 0.5), 0, 1),
        "elu": lambda x: torch.nn.functional.elu(x, of(alpha, 1.0)),
        "softsign": torch.nn.functional.softsign, "softplus": torch.nn.functional.softplus,
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


def _turned(x: torch.Tensor, lengths: Optional) -> torch.Tensor:
    """Time backwards; each sequence within its own length."""
    if lengths is None:
        return x.flip(0)
    time = torch.arange(x.shape[0]).unsqueeze(1)
    back = lengths.long().unsqueeze(0) - 1 - time
    at = torch.where(back >= 0, back, time)
    return x.gather(0, at.unsqueeze(-1).expand_as(x))


Step = Callable[[torch.Tensor, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]


def _over_time(x: torch.Tensor, lengths: Optional, state: tuple[torch.Tensor, ...],
               step: Step) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The step at each time; behind a sequence's end its results are 0 and its state stays."""
    results = []
    for time in range(x.shape[0]):
        after = step(x[time], state)
        if lengths is None:
            state = after
            results.append(after[0])
        else:
            inside = (lengths > time).unsqueeze(1)
            state = tuple(torch.where(inside, new, old) for new, old in zip(after, state, strict=True))
            results.append(torch.where(inside, after[0], torch.zeros_like(after[0])))
    return torch.stack(results) if results else x.new_zeros(0, x.shape[1], state[0].shape[-1]), state




def _layer(x: torch.Tensor, lengths: Optional, states: list[Optional], hidden: int, direction: str, layout: int,
           cell: Callable[[int, torch.Tensor], tuple[torch.Tensor, Step]]) -> tuple[torch.Tensor, ...]:
    if layout:
        x = x.transpose(0, 1)
        states = [None if one is None else one.transpose(0, 1) for one in states]
    count = 2 if direction == "bidirectional" else 1
    outputs, ends = [], []
    for d in range(count):
        back = direction == "reverse" or d == 1
        projected, step = cell(d, _turned(x, lengths) if back else x)
        state = tuple(x.new_zeros(x.shape[1], hidden) if one is None else one[d] for one in states)
        y, state = _over_time(projected, lengths, state, step)
        outputs.append(_turned(y, lengths) if back else y)
        ends.append(state)
    found = [torch.stack(outputs, 1)] + [torch.stack([end[place] for end in ends]) for place in range(len(states))]
    if layout:
        return (found[0].permute(2, 0, 1, 3).contiguous(),
                *(one.transpose(0, 1).contiguous() for one in found[1:]))
    return tuple(one.contiguous() for one in found)


def _limited(clip: float) -> Function:
    return (lambda x: x.clamp(-clip, clip)) if clip else (lambda x: x)


def _swapped(w: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Gates in another order along the first dim."""
    parts = w.chunk(len(order))
    return torch.cat([parts[place] for place in order])


def _by_torch(kind: str, x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, bias: Optional, states: list[Optional],
              hidden: int, direction: str, layout: int, order: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """PyTorch's own layer; gates in its order."""
    weights: list[torch.Tensor] = []
    for d in range(2 if direction == "bidirectional" else 1):
        weights += [_swapped(w[d], order), _swapped(r[d], order)]
        if bias is not None:
            weights += [_swapped(part, order) for part in bias[d].chunk(2)]
    return recurrent(kind, x, weights, states, hidden, bias is not None, direction, layout)


def recurrent(kind: str, x: torch.Tensor, weights: Sequence[torch.Tensor], states: Sequence[Optional], hidden: int,
              biased: bool, direction: str, layout: int) -> tuple[torch.Tensor, ...]:
    """PyTorch's layer of that kind (lstm, gru, rnn), with weights in its order; results as ONNX has them."""
    if layout:
        x = x.transpose(0, 1)
        states = [None if one is None else one.transpose(0, 1) for one in states]
    count = 2 if direction == "bidirectional" else 1
    if not x.shape[0] or not x.shape[1]:  # which PyTorch refuses
        ends = [x.new_zeros(count, x.shape[1], hidden) if one is None else one.clone() for one in states]
        shape = (x.shape[1], 0, count, hidden) if layout else (x.shape[0], count, x.shape[1], hidden)
        return (x.new_zeros(shape), *(one.transpose(0, 1).contiguous() if layout else one for one in ends))
    x = x.flip(0) if direction == "reverse" else x
    given = [x.new_zeros(count, x.shape[1], hidden) if one is None else one.contiguous() for one in states]
    if x.shape[0] == count == 1:  # one step: the layer would reorder its weights for it
        cell = {"lstm": torch.lstm_cell, "gru": torch.gru_cell, "rnn": torch.rnn_tanh_cell}[kind]
        state = [one[0] for one in given]
        after = cell(x[0], state if kind == "lstm" else state[0], *weights)  # type: ignore[operator]
        ends = [one.unsqueeze(0) for one in (after if kind == "lstm" else (after,))]
        y = ends[0]
    else:
        rest = (list(weights), biased, 1, 0.0, False, count == 2, False)
        call = {"lstm": torch.lstm, "gru": torch.gru, "rnn": torch.rnn_tanh}[kind]
        y, *ends = call(x.contiguous(), given if kind == "lstm" else given[0], *rest)  # type: ignore[operator]
    y = y.flip(0) if direction == "reverse" else y
    y = y.unflatten(2, (count, hidden)).transpose(1, 2)
    if layout:
        return (y.permute(2, 0, 1, 3).contiguous(), *(one.transpose(0, 1).contiguous() for one in ends))
    return (y.contiguous(), *(one.contiguous() for one in ends))


def _usual(x: torch.Tensor, names: Sequence[str], usual: Sequence[str], clip: float, lengths: Optional) -> bool:
    """Whether PyTorch's own layer does it: usual activations, nothing cut off, sequences of one length."""
    if clip or x.shape[0] == 0 or x.shape[1] == 0 or x.dtype not in (torch.float32, torch.float64):
        return False
    whole = lengths is None or bool((lengths == x.shape[0]).all())
    return whole and all(one.lower() == usual[place % len(usual)] for place, one in enumerate(names))


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor as whole numbers 0..255 less their zero point, in f32, and its scale
    (ONNX DynamicQuantizeLinear-11)."""
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = (high - low) / 255
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = (-low / scale).clamp(0, 255).round()
    return (x / scale).round().add_(zero).clamp_(0, 255).sub_(zero), scale


def _times(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x times quantised weights [inputs, columns], x quantised too. Sums of whole numbers are exact in f32 below 2^24,
    beyond that in f64."""
    if not x.numel():
        return x.new_zeros(*x.shape[:-1], w.shape[-1])
    whole, own = quantized(x)
    if w.shape[0] > 514:  # 255 * 128 * 514 < 2^24
        whole, w = whole.double(), w.double()
    return (whole @ w).to(x.dtype) * (own * scale)


def lstm(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, bias: Optional, lengths: Optional, h: Optional,
         c: Optional, peephole: Optional, hidden: int, direction: str, names: Sequence[str], alphas: Sequence[float],
         betas: Sequence[float], clip: float, layout: int, forget: int, w_scale: Optional = None,
         r_scale: Optional = None) -> tuple[torch.Tensor, ...]:
    """LSTM: outputs, last h, last c. With scales the weights are whole numbers that lie transposed, and operands are
    quantised in each call (com.microsoft DynamicQuantizeLSTM-1)."""
    timed = x.transpose(0, 1) if layout else x
    plain = w_scale is None and peephole is None and not forget
    if plain and _usual(timed, names, ("sigmoid", "tanh", "tanh"), clip, lengths):
        return _by_torch("lstm", x, w, r, bias, [h, c], hidden, direction, layout, (0, 2, 3, 1))
    functions = _functions(names, alphas, betas)
    cut = _limited(clip)

    def cell(d: int, inputs: torch.Tensor) -> tuple[torch.Tensor, Step]:
        f, g, k = functions[3 * d:3 * d + 3]
        projected = inputs @ w[d].T if w_scale is None else _times(inputs, w[d], w_scale[d])
        if bias is not None:
            projected = projected + sum(bias[d].chunk(2))
        p = peephole[d].chunk(3) if peephole is not None else None

        def step(now: torch.Tensor, state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            before, memory = state
            after = before @ r[d].T if r_scale is None else _times(before, r[d], r_scale[d])
            i, o, forgets, new = (now + after).chunk(4, 1)
            if p is not None:
                i, forgets = i + p[0] * memory, forgets + p[2] * memory
            i = f(cut(i))
            keep = 1 - i if forget else f(cut(forgets))
            memory = keep * memory + i * g(cut(new))
            o = f(cut(o + p[1] * memory if p is not None else o))
            return o * k(memory), memory
        return projected, step
    return _layer(x, lengths, [h, c], hidden, direction, layout, cell)


def gru(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, bias: Optional, lengths: Optional, h: Optional, hidden: int,
        direction: str, names: Sequence[str], alphas: Sequence[float], betas: Sequence[float], clip: float, layout: int,
        before_reset: int) -> tuple[torch.Tensor, ...]:
    """GRU: outputs, last h."""
    timed = x.transpose(0, 1) if layout else x
    if before_reset and _usual(timed, names, ("sigmoid", "tanh"), clip, lengths):
        return _by_torch("gru", x, w, r, bias, [h], hidden, direction, layout, (1, 0, 2))
    functions = _functions(names, alphas, betas)
    cut = _limited(clip)

    def cell(d: int, inputs: torch.Tensor) -> tuple[torch.Tensor, Step]:
        f, g = functions[2 * d:2 * d + 2]
        own = x.new_zeros(6 * hidden) if bias is None else bias[d]
        wb, rb = own.chunk(2)
        gates, last = r[d][:2 * hidden].T, r[d][2 * hidden:].T

        def step(now: torch.Tensor, state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            before, = state
            z, reset = f(cut(now[:, :2 * hidden] + before @ gates + rb[:2 * hidden])).chunk(2, 1)
            if before_reset:
                new = now[:, 2 * hidden:] + reset * (before @ last + rb[2 * hidden:])
            else:
                new = now[:, 2 * hidden:] + (reset * before) @ last + rb[2 * hidden:]
            new = g(cut(new))
            return ((1 - z) * new + z * before,)
        return inputs @ w[d].T + wb, step
    return _layer(x, lengths, [h], hidden, direction, layout, cell)


def rnn(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, bias: Optional, lengths: Optional, h: Optional, hidden: int,
        direction: str, names: Sequence[str], alphas: Sequence[float], betas: Sequence[float], clip: float, layout: int,
        _unused: int) -> tuple[torch.Tensor, ...]:
    """A plain recurrent layer: outputs, last h."""
    timed = x.transpose(0, 1) if layout else x
    if _usual(timed, names, ("tanh",), clip, lengths):
        return _by_torch("rnn", x, w, r, bias, [h], hidden, direction, layout, (0,))
    functions = _functions(names, alphas, betas)
    cut = _limited(clip)

    def cell(d: int, inputs: torch.Tensor) -> tuple[torch.Tensor, Step]:
        projected = inputs @ w[d].T
        if bias is not None:
            projected = projected + sum(bias[d].chunk(2))

        def step(now: torch.Tensor, state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (functions[d](cut(now + state[0] @ r[d].T)),)
        return projected, step
    return _layer(x, lengths, [h], hidden, direction, layout, cell)
