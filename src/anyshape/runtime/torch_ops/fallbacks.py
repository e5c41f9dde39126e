"""PyTorch in place of the host's own routines, for operands that those do not take: attention, grouped products and
convolutions, routing."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from anyshape.base.errors import IndexRangeError
from anyshape.ops.attention import FAR, OPERANDS, roles
from anyshape.runtime.torch_ops.convolution import convolve


def by_torch(op: str, attrs: dict[str, Any], operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The results of a step by PyTorch's operators, [B, M, H, D] as ours."""
    given = dict(zip(roles(op, len(operands) + len(OPERANDS[op][1])), operands, strict=False))
    q, k, v, mask = given["q"], given["k"], given["v"], given.get("mask")
    dtype = q.dtype
    q, k, v = (x if dtype == torch.float64 else x.float() for x in (q, k, v))
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scale = q.shape[3] ** -0.5 if attrs["scale"] is None else attrs["scale"]
    scores = scale * (q @ k.transpose(2, 3))
    if mask is not None:
        scores = scores + mask
    if attrs["causal"]:
        scores = scores.masked_fill(~torch.ones_like(scores[0, 0], dtype=torch.bool).tril(), -torch.inf) \
            if scores.numel() else scores
    if op == "attention":
        sums = scores.logsumexp(3) if scores.shape[3] else scores.new_zeros(scores.shape[:3])
        nothing = sums == -torch.inf
        weights = torch.where(nothing[..., None], 0.0, scores.softmax(3))
        return (weights @ v).transpose(1, 2).to(dtype), torch.where(nothing, 0.0, sums)
    change, sums, products = given["gradient"].to(q.dtype), given["sums"], given["products"]
    weights = (scores - sums[..., None]).exp()
    if scores.shape[3]:  # see backend/cpu/microkernels/softmax_rows.py
        far = sums[..., None].abs() > FAR
        weights = torch.where(far, weights / weights.sum(3, keepdim=True), weights)
    turned = scale * weights * (change @ v.transpose(2, 3) - products[..., None])
    dq, dk, dv = turned @ k, turned.transpose(2, 3) @ q, weights.transpose(2, 3) @ change
    groups = given["k"].shape[1]
    if groups != q.shape[1]:
        dk, dv = (x.unflatten(1, (groups, q.shape[1] // groups)).sum(2) for x in (dk, dv))
    return dq.transpose(1, 2).to(dtype), dk.transpose(1, 2).to(dtype), dv.transpose(1, 2).to(dtype)


def grouped_by_torch(op: str, attrs: dict[str, Any], operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result of a step, by one product a group."""
    (x, y, ends), _ = _in_order(attrs, operands)
    begin = 0
    if op == "grouped":
        result = x.new_zeros(x.shape[0], y.shape[2])
        for group, end in enumerate(ends.tolist()):
            result[begin:end] = x[begin:end] @ y[group]
            begin = end
        return result
    result = x.new_zeros(ends.shape[0], x.shape[0], y.shape[1])
    for group, end in enumerate(ends.tolist()):
        result[group] = x[:, begin:end] @ y[begin:end]
        begin = end
    return result


def _in_order(attrs: dict[str, Any], operands: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor],
                                                                                 torch.Tensor | None]:
    """The operands without the order that may stand behind the ends, the first in that order where it is gathered; and
    the order where the result is scattered (ops/matmul.py)."""
    x, weights, ends, *more = operands
    if not attrs.get("gathered") and not attrs.get("scattered"):
        return list(operands), None
    order = more.pop(0)
    rows = x.index_select(0, order) if attrs.get("gathered") else x
    return [rows, weights, ends, *more], order if attrs.get("scattered") else None


def grouped_conv_by_torch(attrs: dict[str, Any], operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result of a step, by one convolution a group."""
    (rows, weight, ends, *more), order = _in_order(attrs, operands)
    bias = more[:-1] if attrs.get("added") else more
    convolve = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[rows.dim() - 3]
    parts, begin, reached = [], 0, 0
    for group, end in enumerate(ends.tolist()):
        end = min(max(end, 0), rows.shape[0])
        own = convolve(rows[begin:end], weight[group], bias[0][group] if bias else None, attrs["stride"],
                       attrs["padding"], attrs["dilation"])
        parts.append((begin, end, own))
        begin, reached = end, max(reached, end)
    result = rows.new_zeros(rows.shape[0], *parts[0][2].shape[1:]) if parts else rows.new_zeros(0)
    for begin, end, own in parts:
        result[begin:end] = own
    if attrs.get("added"):
        result = result + more[-1]
    result = result.relu() if attrs.get("relu") else result
    return result if order is None else torch.empty_like(result).index_copy_(0, order, result)


def direct_conv_by_torch(attrs: dict[str, Any], operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result of a step, by one convolution."""
    x, weight, *more = operands
    behind = [more.pop() for key in ("added", "shifted", "scaled") if attrs.get(key)]
    result = convolve(x, weight, more[0] if more else None, attrs["stride"], attrs["padding"], attrs["dilation"], 1)
    if attrs.get("scaled"):
        result = result * behind.pop()
    for other in reversed(behind):  # shifts, and what is added
        result = result + other
    return result.relu() if attrs.get("relu") else result


def recurrence_by_torch(attrs: dict[str, Any], operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The results of ops/recurrence.py, time by time."""
    gates, weights, bias, state, *cell = operands
    hidden, count = state.shape[1], gates.shape[0]
    lengths = cell.pop() if cell and cell[-1].dtype == torch.int64 else gates.new_full((gates.shape[1],), count)
    turned = weights.permute(1, 2, 0, 3).reshape(hidden, weights.shape[2], -1)[..., :hidden].reshape(hidden, -1)
    start = bias.permute(1, 0, 2).reshape(bias.shape[1], -1)[:, :hidden].reshape(-1)
    if lengths.numel() and (int(lengths.min()) < 0 or int(lengths.max()) > count):
        raise IndexRangeError("a sequence is longer than there are times", why=f"lengths are from 0 to {count}",
                              do="check the lengths of the sequences")
    results: list[torch.Tensor] = [state] * count
    more: tuple[torch.Tensor, ...] = ()
    if attrs["cell"] == "gru_before":
        more = (state.new_zeros(2, *state.shape),)
    for turn in range(count):
        time = count - 1 - turn if attrs["reverse"] else turn
        inside, old = (lengths > time)[:, None], (state, *cell)
        own, sums = gates[time].split(hidden, -1), (state @ turned + start).split(hidden, -1)
        if attrs["cell"] == "lstm":
            i, f, g, o = (a + b for a, b in zip(own, sums, strict=True))
            cell = [f.sigmoid() * cell[0] + i.sigmoid() * g.tanh()]
            state = o.sigmoid() * cell[0].tanh()
        elif attrs["cell"] == "gru":
            reset, update = ((own[g] + sums[g]).sigmoid() for g in range(2))
            new = torch.tanh(own[2] + reset * sums[2])
            state = new + update * (state - new)
        elif attrs["cell"] == "gru_before":
            reset, update = ((own[g] + sums[g]).sigmoid() for g in range(2))
            more = (torch.stack([update, reset * state]),)
            new = torch.tanh(own[2] + (more[0][1] @ turned + start).split(hidden, -1)[2])
            state = new + update * (state - new)
        else:
            state = (own[0] + sums[0]).tanh() if attrs["cell"] == "tanh" else (own[0] + sums[0]).relu()
        results[time] = state.where(inside, 0.0)
        state, *cell = (a.where(inside, b) for a, b in zip((state, *cell), old, strict=True))
    return (torch.stack(results) if results else gates.new_zeros(0, *state.shape), state, *cell, *more)


def byte_recurrence_by_torch(attrs: dict[str, Any], operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The results of `recurrence_bytes` of ops/recurrence.py, time by time."""
    gates, weights, sums, scales, state, cell = operands
    (batch, hidden), room = state.shape, weights.shape[1] * weights.shape[-1]
    turned = weights.permute(1, 4, 2, 0, 3).reshape(room, weights.shape[2], -1)[..., :hidden].reshape(room, -1)
    sums, scales = (one.permute(1, 0, 2).reshape(one.shape[1], -1)[:, :hidden].reshape(-1) for one in (sums, scales))
    results: list[torch.Tensor] = [state] * gates.shape[0]
    whole = state.new_zeros((batch, room), dtype=torch.uint8)
    for turn in range(gates.shape[0] if batch else 0):
        time = gates.shape[0] - 1 - turn if attrs["reverse"] else turn
        low, high = state.min().clamp(max=0), state.max().clamp(min=0)
        scale = (high - low) / 255
        scale = torch.where(scale == 0, 1.0, scale)
        zero = (-low / scale).clamp(0, 255).round()
        whole[:, :hidden] = ((state / scale).round() + zero).clamp(0, 255).to(torch.uint8)
        found = (whole.double() @ turned.double() - zero.double() * sums.double()).float() * (scale * scales)
        i, f, g, o = (a + b for a, b in zip(gates[time].split(hidden, -1), found.split(hidden, -1), strict=True))
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        state = results[time] = o.sigmoid() * cell.tanh()
    return (torch.stack(results) if results else gates.new_zeros(0, *state.shape), state, cell, whole)


def routing_by_torch(op: str, attrs: dict[str, Any], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The results of a step of ops/routing.py."""
    if op == "topk":
        return tuple(torch.topk(x, attrs["k"], -1))
    if op == "segment_ids":
        return (_segments(x, attrs["size"]),)
    branches, flat = attrs["branches"], x.reshape(-1)
    if flat.numel() and (int(flat.min()) < -1 or int(flat.max()) >= branches):
        raise IndexRangeError("a route is out of range", why=f"branches are 0 to {branches - 1}, and -1 drops a choice",
                              do="look at what the router function returns")
    keys = torch.where(flat < 0, branches, flat)
    order = torch.argsort(keys, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    counts = keys.new_zeros(branches + 1).scatter_add_(0, keys, torch.ones_like(keys))
    return order, inverse, counts[:branches].cumsum(0).int()


def _segments(ends: torch.Tensor, size: int) -> torch.Tensor:
    result = torch.full((size,), ends.numel(), dtype=torch.int64)
    begin = 0
    for group, end in enumerate(ends.tolist()):
        end = min(max(end + size if end < 0 else end, 0), size)
        result[begin:end] = group
        begin = end
    return result
