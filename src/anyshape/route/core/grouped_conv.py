"""Grouped convolution of rows sorted by branch: each row by the weights of its branch, forward and backward.

    rows [S, C, *space], weight [E, O, C/groups, *kernel], ends [E], bias [E, O]  -->  [S, O, *out]     grouped_conv
    grad [S, O, *out], ...  -->  gradients of the rows and of the weights             grouped_conv_input, _conv_weight

Rows of branch e are ends[e-1]:ends[e] (operators.py); those past the last end are zero. `stride`, `padding`, `dilation`
and `groups` are those of torch's convolutions over one to three dims, the same for all branches. A convolution is
linear in its rows and in its weights, so the three operators are each other's derivatives, of any order.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyshape.route.core import operators as ops

_SETTINGS = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups"
_conv = torch.ops.aten.convolution.default
_backward = torch.ops.aten.convolution_backward.default


def _settings(stride: list[int], padding: list[int], dilation: list[int], groups: int) -> tuple[Any, ...]:
    return stride, padding, dilation, False, [0] * len(stride), groups


def _out_shape(rows: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]) -> list[int]:
    space = [(size + 2 * pad - step * (width - 1) - 1) // by + 1 for size, width, by, pad, step
             in zip(rows.shape[2:], weight.shape[3:], stride, padding, dilation, strict=True)]
    return [rows.shape[0], weight.shape[1], *space]


def _grouped_conv(rows: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None, stride: list[int],
                  padding: list[int], dilation: list[int], groups: int) -> Tensor:
    out = rows.new_zeros(_out_shape(rows, weight, stride, padding, dilation))
    for branch, (begin, end) in enumerate(ops._groups(ends, rows.shape[0])):
        if begin < end:
            own = None if bias is None else bias[branch]
            out[begin:end] = _conv(rows[begin:end], weight[branch], own, *_settings(stride, padding, dilation, groups))
    return out


def _grouped_conv_fake(rows: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None, stride: list[int],
                       padding: list[int], dilation: list[int], groups: int) -> Tensor:
    return rows.new_empty(_out_shape(rows, weight, stride, padding, dilation))


grouped_conv = ops._define(
    f"grouped_conv(Tensor rows, Tensor weight, Tensor ends, Tensor? bias, {_SETTINGS}) -> Tensor", _grouped_conv,
    _grouped_conv_fake)


def _grouped_conv_input(grad: Tensor, rows: Tensor, weight: Tensor, ends: Tensor, stride: list[int],
                        padding: list[int], dilation: list[int], groups: int) -> Tensor:
    out = torch.zeros_like(rows, memory_format=torch.contiguous_format)
    for branch, (begin, end) in enumerate(ops._groups(ends, rows.shape[0])):
        if begin < end:
            out[begin:end] = _backward(grad[begin:end], rows[begin:end], weight[branch], None,
                                       *_settings(stride, padding, dilation, groups), [True, False, False])[0]
    return out


def _grouped_conv_input_fake(grad: Tensor, rows: Tensor, *_: Any) -> Tensor:
    return rows.new_empty(rows.shape)


grouped_conv_input = ops._define(
    f"grouped_conv_input(Tensor grad, Tensor rows, Tensor weight, Tensor ends, {_SETTINGS}) -> Tensor",
    _grouped_conv_input, _grouped_conv_input_fake)


def _grouped_conv_weight(grad: Tensor, rows: Tensor, weight: Tensor, ends: Tensor, stride: list[int],
                         padding: list[int], dilation: list[int], groups: int) -> Tensor:
    out = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    for branch, (begin, end) in enumerate(ops._groups(ends, rows.shape[0])):
        if begin < end:
            out[branch] = _backward(grad[begin:end], rows[begin:end], weight[branch], None,
                                    *_settings(stride, padding, dilation, groups), [False, True, False])[1]
    return out


def _grouped_conv_weight_fake(grad: Tensor, rows: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return weight.new_empty(weight.shape)


grouped_conv_weight = ops._define(
    f"grouped_conv_weight(Tensor grad, Tensor rows, Tensor weight, Tensor ends, {_SETTINGS}) -> Tensor",
    _grouped_conv_weight, _grouped_conv_weight_fake)


# ---- derivatives: `grad` is of the result, `rows` and `weight` are the other operands of a bilinear form


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    rows, weight, ends, bias, *ctx.settings = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(rows, weight, ends)


def _to_operands(ctx: Any, grad: Tensor) -> Any:
    rows, weight, ends = ctx.saved_tensors
    to_rows, to_weight, _, to_bias = ctx.needs_input_grad[:4]
    bias = None
    if ctx.has_bias and to_bias:
        bias = ops.grouped_sum(grad.flatten(2).sum(2) if grad.dim() > 2 else grad, ends)
    return (grouped_conv_input(grad, rows, weight, ends, *ctx.settings) if to_rows else None,
            grouped_conv_weight(grad, rows, weight, ends, *ctx.settings) if to_weight else None, None, bias,
            *(None,) * 4)


def _setup_gradient(ctx: Any, inputs: Any, output: Any) -> None:
    grad, rows, weight, ends, *ctx.settings = inputs
    ctx.save_for_backward(grad, rows, weight, ends)


def _input_backward(ctx: Any, out: Tensor) -> Any:
    grad, _, weight, ends = ctx.saved_tensors
    return (grouped_conv(out, weight, ends, None, *ctx.settings), None,
            grouped_conv_weight(grad, out, weight, ends, *ctx.settings), *(None,) * 5)


def _weight_backward(ctx: Any, out: Tensor) -> Any:
    grad, rows, _, ends = ctx.saved_tensors
    return (grouped_conv(rows, out, ends, None, *ctx.settings),
            grouped_conv_input(grad, rows, out, ends, *ctx.settings), *(None,) * 6)


ops._differentiate("grouped_conv", _to_operands, _setup)
ops._differentiate("grouped_conv_input", _input_backward, _setup_gradient)
ops._differentiate("grouped_conv_weight", _weight_backward, _setup_gradient)


def convolved(rows: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any,
              groups: int) -> Tensor:
    """A convolution of torch (conv1d, conv2d, conv3d) by the weights [E, O, C/groups, *kernel] of each row's branch.

    Numbers may be one for all dims. `padding` may be "valid" or "same", as torch takes it: where the zeros of "same"
    are of odd number, one more stands at the end.
    """
    rank = weight.dim() - 3
    stride, dilation = _each(stride, rank), _each(dilation, rank)
    if padding == "valid":
        padding = 0
    elif padding == "same":
        totals = [step * (width - 1) for step, width in zip(dilation, weight.shape[3:], strict=True)]
        extra = [total % 2 for total in totals]
        if any(extra):
            rows = torch.nn.functional.pad(rows, [number for more in reversed(extra) for number in (0, more)])
        padding = [total // 2 for total in totals]
    return grouped_conv(rows, weight, ends, bias, stride, _each(padding, rank), dilation, groups)


def _each(numbers: Any, rank: int) -> list[int]:
    if isinstance(numbers, int):
        return [numbers] * rank
    found = list(numbers)
    return found * rank if len(found) == 1 and rank > 1 else found
