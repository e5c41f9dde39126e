"""Recurrent layers of ONNX (LSTM, GRU, RNN) as one step with a loop over time inside.

The usual ones, whole sequences with the usual activations, are PyTorch's own layers, whose gates lie in another order;
all others are those of deployed files (runtime/numpy_ops/recurrent.py), on the same memory.
Gates in ONNX: LSTM i, o, f, c; GRU z, r, h (ONNX operators LSTM-22, GRU-22, RNN-22).
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from anyshape.runtime.numpy_ops import recurrent as general
from anyshape.runtime.torch_ops.onnx.elements import on_arrays

Optional: TypeAlias = "torch.Tensor | None"


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
    return on_arrays(general.lstm, x, w, r, bias, lengths, h, c, peephole, hidden, direction, names, alphas, betas,
                     clip, layout, forget, w_scale, r_scale)


def gru(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, bias: Optional, lengths: Optional, h: Optional, hidden: int,
        direction: str, names: Sequence[str], alphas: Sequence[float], betas: Sequence[float], clip: float, layout: int,
        before_reset: int) -> tuple[torch.Tensor, ...]:
    """GRU: outputs, last h."""
    timed = x.transpose(0, 1) if layout else x
    if before_reset and _usual(timed, names, ("sigmoid", "tanh"), clip, lengths):
        return _by_torch("gru", x, w, r, bias, [h], hidden, direction, layout, (1, 0, 2))
    return on_arrays(general.gru, x, w, r, bias, lengths, h, hidden, direction, names, alphas, betas, clip, layout,
                     before_reset)


def rnn(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, bias: Optional, lengths: Optional, h: Optional, hidden: int,
        direction: str, names: Sequence[str], alphas: Sequence[float], betas: Sequence[float], clip: float, layout: int,
        _unused: int) -> tuple[torch.Tensor, ...]:
    """A plain recurrent layer: outputs, last h."""
    timed = x.transpose(0, 1) if layout else x
    if _usual(timed, names, ("tanh",), clip, lengths):
        return _by_torch("rnn", x, w, r, bias, [h], hidden, direction, layout, (0,))
    return on_arrays(general.rnn, x, w, r, bias, lengths, h, hidden, direction, names, alphas, betas, clip, layout, 0)
