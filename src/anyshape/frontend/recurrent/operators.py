"""Operators of recurrent layers for captures: one layer in one direction, with its gradient, of any length.

    nn.LSTM(6, 8)(x)  --Dynamo-->  aten.lstm.input  --trace-->  anyshape_recurrent::lstm(x, h, c, w, r, b, rb, False)

PyTorch's own operators are taken apart over time in a trace, a number of steps for each length; in place of that, the
trace calls these (torch_compat/versions/python_kernels.py), of which frontend/recurrent/layers.py makes equations. What
it leaves is done here, by PyTorch. Gradients come from gates that are computed again from the result, all times at
once, so only inputs and results are kept (backpropagation through time, Werbos, 1990).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_LIBRARY = torch.library.Library("anyshape_recurrent", "FRAGMENT")
_WEIGHTS = "Tensor w, Tensor r, Tensor b, Tensor rb, bool reverse"


def _forward(cell: str, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor],
             reverse: bool) -> tuple[Tensor, ...]:
    """y [T, B, H] and the last states [B, H], by PyTorch's layer; it refuses sizes of 0."""
    if not x.shape[0] or not x.shape[1]:
        return (x.new_zeros(*x.shape[:2], states[0].shape[1]), *(one.clone() for one in states))
    call: Any = {"lstm": torch.lstm, "gru": torch.gru, "tanh": torch.rnn_tanh, "relu": torch.rnn_relu}[cell]
    first = [one.unsqueeze(0) for one in states]
    timed = (x.flip(0) if reverse else x).contiguous()
    y, *last = call(timed, first if cell == "lstm" else first[0], list(weights), True, 1, 0.0, False, False, False)
    return ((y.flip(0) if reverse else y).contiguous(), *(one[0].contiguous() for one in last))


# ---- gradients: of one time, from what comes from behind; own: of the gates' inputs, other: of products with the state


def _lstm_times(own: Tensor, other: Tensor, states: Sequence[Tensor], y: Tensor, grads: Sequence[Tensor],
                r: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    i, f, g, o = (own + other).chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cells = [states[1]]
    for time in range(len(own)):
        cells.append(f[time] * cells[-1] + i[time] * g[time])
    dy, dh, dc = grads
    parts = torch.empty_like(own)
    for time in reversed(range(len(own))):
        grown = cells[time + 1].tanh()
        dh = dh + dy[time]
        dc = dc + dh * o[time] * (1 - grown * grown)
        parts[time] = torch.cat([
            dc * g[time] * i[time] * (1 - i[time]), dc * cells[time] * f[time] * (1 - f[time]),
            dc * i[time] * (1 - g[time] * g[time]), dh * grown * o[time] * (1 - o[time])], -1)
        dh, dc = parts[time] @ r, dc * f[time]
    return parts, parts, [dh, dc]


def _gru_times(own: Tensor, other: Tensor, states: Sequence[Tensor], y: Tensor, grads: Sequence[Tensor],
               r: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    (a, b, c), (p, q, s) = own.chunk(3, -1), other.chunk(3, -1)
    reset, update = (a + p).sigmoid(), (b + q).sigmoid()
    new = (c + reset * s).tanh()
    dy, dh = grads
    inner, outer = torch.empty_like(own), torch.empty_like(own)
    for time in reversed(range(len(own))):
        dh = dh + dy[time]
        before = states[0] if time == 0 else y[time - 1]
        d_new = dh * (1 - update[time]) * (1 - new[time] * new[time])
        d_reset = d_new * s[time] * reset[time] * (1 - reset[time])
        d_update = dh * (before - new[time]) * update[time] * (1 - update[time])
        inner[time] = torch.cat([d_reset, d_update, d_new], -1)
        outer[time] = torch.cat([d_reset, d_update, d_new * reset[time]], -1)
        dh = dh * update[time] + outer[time] @ r
    return inner, outer, [dh]


def _plain_times(slope: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor, list[Tensor]]]:
    def times(own: Tensor, other: Tensor, states: Sequence[Tensor], y: Tensor, grads: Sequence[Tensor],
              r: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        slopes = slope(y)
        dy, dh = grads
        parts = torch.empty_like(own)
        for time in reversed(range(len(own))):
            parts[time] = (dh + dy[time]) * slopes[time]
            dh = parts[time] @ r
        return parts, parts, [dh]

    return times


_TIMES = {"lstm": _lstm_times, "gru": _gru_times, "tanh": _plain_times(lambda y: 1 - y * y),
          "relu": _plain_times(lambda y: (y > 0).to(y.dtype))}


def _gradients(cell: str, grads: Sequence[Tensor], x: Tensor, states: Sequence[Tensor], y: Tensor,
               weights: Sequence[Tensor], reverse: bool) -> tuple[Tensor, ...]:
    """Of x, of the states, of w, r, b and rb."""
    w, r, b, rb = weights
    dy, *rest = grads
    if reverse:
        x, y, dy = x.flip(0), y.flip(0), dy.flip(0)
    before = torch.cat([states[0].unsqueeze(0), y[:-1]]) if len(y) else y
    inner, outer, last = _TIMES[cell](x @ w.T + b, before @ r.T + rb, states, y, [dy, *rest], r)
    dx = inner @ w
    flat, flat_outer = inner.flatten(0, 1), outer.flatten(0, 1)
    found = (dx.flip(0) if reverse else dx, *last, flat.T @ x.flatten(0, 1), flat_outer.T @ before.flatten(0, 1),
             flat.sum(0), flat_outer.sum(0))
    return tuple(one.contiguous().clone() if any(one is grad for grad in grads) else one.contiguous() for one in found)


def _define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"anyshape_recurrent::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.anyshape_recurrent, name).default


def _fake_of(states: int) -> Callable[..., tuple[Tensor, ...]]:
    def fake(x: Tensor, *operands: Any) -> tuple[Tensor, ...]:
        hidden = operands[0].shape[1]
        return (x.new_empty(*x.shape[:2], hidden),
                *(x.new_empty(x.shape[1], hidden) for _ in range(states)))

    return fake


def _fake_backward(states: int) -> Callable[..., tuple[Tensor, ...]]:
    def fake(*operands: Any) -> tuple[Tensor, ...]:
        x, *rest = operands[1 + states:]
        del rest[states]  # y has no gradient of its own
        return tuple(one.new_empty(one.shape) for one in (x, *rest[:states + 4]))

    return fake


LSTM = _define(f"lstm(Tensor x, Tensor h, Tensor c, {_WEIGHTS}) -> (Tensor, Tensor, Tensor)",
               lambda x, h, c, w, r, b, rb, reverse: _forward("lstm", x, [h, c], [w, r, b, rb], reverse), _fake_of(2))
CELL = _define(f"cell(Tensor x, Tensor h, {_WEIGHTS}, str cell) -> (Tensor, Tensor)",
               lambda x, h, w, r, b, rb, reverse, cell: _forward(cell, x, [h], [w, r, b, rb], reverse), _fake_of(1))
LSTM_BACKWARD = _define(
    f"lstm_backward(Tensor dy, Tensor dh, Tensor dc, Tensor x, Tensor h, Tensor c, Tensor y, {_WEIGHTS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda dy, dh, dc, x, h, c, y, w, r, b, rb, reverse:
        _gradients("lstm", [dy, dh, dc], x, [h, c], y, [w, r, b, rb], reverse), _fake_backward(2))
CELL_BACKWARD = _define(
    f"cell_backward(Tensor dy, Tensor dh, Tensor x, Tensor h, Tensor y, {_WEIGHTS}, str cell) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda dy, dh, x, h, y, w, r, b, rb, reverse, cell:
        _gradients(cell, [dy, dh], x, [h], y, [w, r, b, rb], reverse), _fake_backward(1))


# ---- linear recurrences: h[k] = a[k] h[k - 1] + b[k], h[0] = b[0], along dim 0


def _linear_scan(a: Tensor, b: Tensor) -> Tensor:
    """By doubling (Hillis and Steele, 1986): after each step a place knows twice as many before it."""
    found, step = b.clone(memory_format=torch.contiguous_format), 1
    while step < len(b):
        found = torch.cat([found[:step], a[step:] * found[:-step] + found[step:]])
        a, step = torch.cat([a[:step], a[step:] * a[:-step]]), 2 * step
    return found


LINEAR_SCAN = _define("linear_scan(Tensor a, Tensor b) -> Tensor", _linear_scan, lambda a, b: b.new_empty(b.shape))


def _not_run(xs: Sequence[Tensor], combined: Sequence[Tensor]) -> list[Tensor]:
    raise NotImplementedError("an associative scan whose combining function has not been read: report this as a bug")


# what stands for an associative scan in a captured graph until its combining function is known (scans.py)
ASSOCIATIVE_SCAN = _define("associative_scan(Tensor[] xs, Tensor[] combined) -> Tensor[]", _not_run,
                           lambda xs, combined: [x.clone() for x in xs])


CUMPROD = _define("cumprod(Tensor x, int dim) -> Tensor", lambda x, dim: x.cumprod(dim).contiguous(),
                  lambda x, dim: x.new_empty(x.shape))


def _of_scan(a: Tensor, h: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of a and b. What comes to h[k] is grad[k], and a[k + 1] of what comes to h[k + 1]: the same recurrence,
    from the end."""
    later = functional.pad(a[1:].conj(), [0, 0] * (a.dim() - 1) + [0, 1])
    found = LINEAR_SCAN(later.flip(0), grad.flip(0)).flip(0)
    return found * functional.pad(h[:-1].conj(), [0, 0] * (h.dim() - 1) + [1, 0]), found


def _of_linear_scan(context: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    a, h = context.saved_tensors
    return _of_scan(a, h, grad)


def _of_cumprod(context: Any, grad: Tensor) -> tuple[Tensor, None]:
    """Of h[k] = x[k] h[k - 1]: exact where x is 0, too."""
    x, h = context.saved_tensors
    x, h, grad = (one.movedim(context.dim, 0) for one in (x, h, grad))
    own, first = _of_scan(x, h, grad)
    return torch.cat([first[:1], own[1:]]).movedim(0, context.dim), None


def _keep_cumprod(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)
    ctx.dim = inputs[1]


def _keep(states: int) -> Callable[..., None]:
    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # names are torch's
        x, *rest = inputs
        ctx.save_for_backward(x, *rest[:states], output[0], *rest[states:states + 4])
        ctx.settings = rest[states + 4:]

    return keep


def _lstm_backward(context: Any, *grads: Tensor) -> tuple[Any, ...]:
    return (*LSTM_BACKWARD(*grads, *context.saved_tensors, *context.settings), None)


def _cell_backward(context: Any, *grads: Tensor) -> tuple[Any, ...]:
    return (*CELL_BACKWARD(*grads, *context.saved_tensors, *context.settings), None, None)


torch.library.register_autograd("anyshape_recurrent::lstm", _lstm_backward, setup_context=_keep(2), lib=_LIBRARY)
torch.library.register_autograd("anyshape_recurrent::cell", _cell_backward, setup_context=_keep(1), lib=_LIBRARY)
torch.library.register_autograd(
    "anyshape_recurrent::linear_scan", _of_linear_scan, lib=_LIBRARY,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output))
torch.library.register_autograd(
    "anyshape_recurrent::associative_scan", lambda ctx, grads: (grads, [None] * ctx.count), lib=_LIBRARY,
    setup_context=lambda ctx, inputs, output: setattr(ctx, "count", len(inputs[1])))
torch.library.register_autograd("anyshape_recurrent::cumprod", _of_cumprod, setup_context=_keep_cumprod, lib=_LIBRARY)
