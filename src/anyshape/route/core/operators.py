"""Routing operators: the route plan (a counting sort), dispatch, combine, and grouped products, forward and backward.

    ids [N, k], branches E  -->  order, inverse [N*k] (i64), ends [E] (i32)          route_plan
    cells [N, *c]           -->  rows [N*k, *c], sorted by branch                    dispatch
    rows [N*k, *c]          -->  [N, *c], each cell's rows weighted and added        combine
    rows [S, K], weight [E, K, M], ends  -->  [S, M]                                 grouped_linear
    rows [S, *c], ends      <->  one tensor a branch, sizes found in the data        split_rows, merge_rows

Rows of branch e are ends[e-1]:ends[e], in the order of their cells; rows past the last end are of dropped choices and
are zero. All but split_rows have sizes that their operands' sizes say, so that one program serves every load.
Dispatch and combine are each other's derivatives. Sums are over choices in order: no atomics, always the same bits.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from anyshape.base.errors import IndexRangeError

_LIBRARY = torch.library.Library("anyshape_route", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)


def _define(schema: str, kernel: Any, fake: Any) -> Any:
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=_TAGS)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"anyshape_route::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.anyshape_route, name).default


def _differentiate(name: str, backward: Any, setup: Any) -> None:
    torch.library.register_autograd(f"anyshape_route::{name}", backward, setup_context=setup, lib=_LIBRARY)


# ---- the plan


def _route_plan(ids: Tensor, branches: int) -> tuple[Tensor, Tensor, Tensor]:
    flat = ids.reshape(-1).long()
    # `is_compiling` is true in all threads while one of them captures, whose tensors are of another type
    if flat.numel() and (type(flat) is Tensor or not torch.compiler.is_compiling()):
        least, most = (int(number) for number in flat.aminmax())
        if least < -1 or most >= branches:
            wrong = most if most >= branches else least
            raise IndexRangeError(f"a route goes to branch {wrong} of {branches}",
                                  why=f"branches are 0 to {branches - 1}, and -1 drops a choice",
                                  do="look at what the router function returns")
    keys = torch.where(flat < 0, branches, flat)
    order = torch.argsort(keys, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=ids.device)
    counts = keys.new_zeros(branches + 1).scatter_add_(0, keys, torch.ones_like(keys))
    return order, inverse, counts[:branches].cumsum(0).int()


def _route_plan_fake(ids: Tensor, branches: int) -> tuple[Tensor, Tensor, Tensor]:
    places = ids.new_empty(ids.numel(), dtype=torch.int64)
    return places, torch.empty_like(places), ids.new_empty(branches, dtype=torch.int32)


route_plan = _define("route_plan(Tensor ids, SymInt branches) -> (Tensor, Tensor, Tensor)", _route_plan,
                     _route_plan_fake)


# ---- dispatch and combine


def _wide(mask: Tensor, rank: int) -> Tensor:
    return mask.reshape(*mask.shape, *(1,) * (rank - mask.dim()))


def _kept(order_or_inverse: Tensor, ends: Tensor) -> Tensor:
    last = ends[-1] if ends.numel() else ends.new_zeros(())
    return order_or_inverse < last


def _dispatch(cells: Tensor, order: Tensor, ends: Tensor, choices: int, inverse: Tensor | None = None) -> Tensor:
    rows = cells.index_select(0, order // choices)
    kept = _kept(torch.arange(order.numel(), device=order.device), ends)
    return torch.where(_wide(kept, rows.dim()), rows, rows.new_zeros(()))


def _dispatch_fake(cells: Tensor, order: Tensor, ends: Tensor, choices: int, inverse: Tensor | None = None) -> Tensor:
    return cells.new_empty(order.shape[0], *cells.shape[1:])


# `inverse` of dispatch and `order` of combine are for their derivatives, which else have to find them
dispatch = _define(
    "dispatch(Tensor cells, Tensor order, Tensor ends, SymInt choices, Tensor? inverse=None) -> Tensor",
    _dispatch, _dispatch_fake)


def _combine(rows: Tensor, inverse: Tensor, ends: Tensor, weights: Tensor | None, choices: int,
             order: Tensor | None = None) -> Tensor:
    places = inverse.reshape(-1, choices)
    kept = _kept(places, ends)
    total = rows.new_zeros(places.shape[0], *rows.shape[1:])
    for choice in range(choices):
        taken = rows.index_select(0, places[:, choice])
        if weights is not None:
            taken = taken * _wide(weights[:, choice].to(rows.dtype), rows.dim())
        total = total + torch.where(_wide(kept[:, choice], rows.dim()), taken, total.new_zeros(()))
    return total


def _combine_fake(rows: Tensor, inverse: Tensor, ends: Tensor, weights: Tensor | None, choices: int,
                  order: Tensor | None = None) -> Tensor:
    return rows.new_empty(inverse.shape[0] // choices, *rows.shape[1:])


combine = _define(
    "combine(Tensor rows, Tensor inverse, Tensor ends, Tensor? weights, SymInt choices, Tensor? order=None) -> Tensor",
    _combine, _combine_fake)


def _combine_weight_grad(grad: Tensor, rows: Tensor, inverse: Tensor, ends: Tensor, choices: int,
                         order: Tensor | None = None) -> Tensor:
    places = inverse.reshape(-1, choices)
    kept = _kept(places, ends)
    found = [(grad * rows.index_select(0, places[:, choice])).flatten(1).sum(1) for choice in range(choices)]
    return torch.where(kept, torch.stack(found, 1), grad.new_zeros(()))


def _combine_weight_grad_fake(grad: Tensor, rows: Tensor, inverse: Tensor, ends: Tensor, choices: int,
                              order: Tensor | None = None) -> Tensor:
    return grad.new_empty(grad.shape[0], choices)


combine_weight_grad = _define(
    "combine_weight_grad(Tensor grad, Tensor rows, Tensor inverse, Tensor ends, SymInt choices, "
    "Tensor? order=None) -> Tensor",
    _combine_weight_grad, _combine_weight_grad_fake)


def _sorted_weights(weights: Tensor, order: Tensor) -> Tensor:
    """The weights [N, k] in the order of rows."""
    return weights.reshape(-1).index_select(0, order)


def _setup_dispatch(ctx: Any, inputs: Any, output: Any) -> None:
    _, order, ends, ctx.choices, inverse = inputs
    ctx.save_for_backward(order, ends, inverse)


def _dispatch_backward(ctx: Any, grad: Tensor) -> Any:
    order, ends, inverse = ctx.saved_tensors
    if inverse is None:
        inverse = inverse_of(order)
    return combine(grad, inverse, ends, None, ctx.choices, order), None, None, None, None


def inverse_of(order: Tensor) -> Tensor:
    """The inverse of a permutation."""
    return torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))


def _setup_combine(ctx: Any, inputs: Any, output: Any) -> None:
    rows, inverse, ends, weights, ctx.choices, order = inputs
    ctx.save_for_backward(rows if weights is not None else None, inverse, ends, weights, order)


def _combine_backward(ctx: Any, grad: Tensor) -> Any:
    rows, inverse, ends, weights, order = ctx.saved_tensors
    if order is None:
        order = inverse_of(inverse)
    to_rows = dispatch(grad, order, ends, ctx.choices, inverse)
    to_weights = None
    if weights is not None:
        if ctx.needs_input_grad[3]:
            to_weights = combine_weight_grad(grad, rows, inverse, ends, ctx.choices, order).to(weights.dtype)
        to_rows = to_rows * _wide(_sorted_weights(weights, order).to(grad.dtype), to_rows.dim())
    return to_rows, None, None, to_weights, None, None


_differentiate("dispatch", _dispatch_backward, _setup_dispatch)
_differentiate("combine", _combine_backward, _setup_combine)


def _setup_weight_grad(ctx: Any, inputs: Any, output: Any) -> None:
    grad, rows, inverse, ends, ctx.choices, order = inputs
    ctx.save_for_backward(grad, rows, inverse, ends, order)


def _weight_grad_backward(ctx: Any, grad: Tensor) -> Any:
    out, rows, inverse, ends, order = ctx.saved_tensors
    if order is None:
        order = inverse_of(inverse)
    to_out = combine(rows, inverse, ends, grad, ctx.choices, order)
    to_rows = dispatch(out, order, ends, ctx.choices, inverse) * _wide(_sorted_weights(grad, order), rows.dim())
    return to_out, to_rows, None, None, None, None


_differentiate("combine_weight_grad", _weight_grad_backward, _setup_weight_grad)


# ---- products and sums of each branch


def _groups(ends: Tensor, rows: int) -> list[tuple[int, int]]:
    begin, found = 0, []
    for end in ends.tolist():
        found.append((begin, min(end, rows)))
        begin = end
    return found


def _grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None) -> Tensor:
    out = rows.new_zeros(rows.shape[0], weight.shape[2])
    for branch, (begin, end) in enumerate(_groups(ends, rows.shape[0])):
        if begin < end:
            torch.mm(rows[begin:end], weight[branch], out=out[begin:end])
            if bias is not None:
                out[begin:end] += bias[branch]
    return out


def _grouped_linear_fake(rows: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


grouped_linear = _define("grouped_linear(Tensor rows, Tensor weight, Tensor ends, Tensor? bias) -> Tensor",
                         _grouped_linear, _grouped_linear_fake)


def _grouped_weight_grad(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    out = rows.new_zeros(ends.shape[0], rows.shape[1], grad.shape[1])
    for branch, (begin, end) in enumerate(_groups(ends, rows.shape[0])):
        if begin < end:
            torch.mm(rows[begin:end].t(), grad[begin:end], out=out[branch])
    return out


def _grouped_weight_grad_fake(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], grad.shape[1])


grouped_weight_grad = _define("grouped_weight_grad(Tensor rows, Tensor grad, Tensor ends) -> Tensor",
                              _grouped_weight_grad, _grouped_weight_grad_fake)


def _grouped_sum(rows: Tensor, ends: Tensor) -> Tensor:
    out = rows.new_zeros(ends.shape[0], *rows.shape[1:])
    for branch, (begin, end) in enumerate(_groups(ends, rows.shape[0])):
        if begin < end:
            torch.sum(rows[begin:end], 0, out=out[branch])
    return out


def _grouped_sum_fake(rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], *rows.shape[1:])


grouped_sum = _define("grouped_sum(Tensor rows, Tensor ends) -> Tensor", _grouped_sum, _grouped_sum_fake)


def _grouped_take(parameter: Tensor, ends: Tensor, rows: int) -> Tensor:
    places = torch.arange(rows, device=ends.device)
    branch = torch.bucketize(places, ends, right=True)
    kept = branch < ends.shape[0]
    found = parameter.index_select(0, branch.clamp(max=max(ends.shape[0] - 1, 0)))
    return torch.where(_wide(kept, found.dim()), found, found.new_zeros(()))


def _grouped_take_fake(parameter: Tensor, ends: Tensor, rows: int) -> Tensor:
    return parameter.new_empty(rows, *parameter.shape[1:])


grouped_take = _define("grouped_take(Tensor parameter, Tensor ends, SymInt rows) -> Tensor", _grouped_take,
                       _grouped_take_fake)


def _setup_linear(ctx: Any, inputs: Any, output: Any) -> None:
    rows, weight, ends, bias = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(rows, weight, ends)


def _linear_backward(ctx: Any, grad: Tensor) -> Any:
    rows, weight, ends = ctx.saved_tensors
    to_rows, to_weight, _, to_bias = ctx.needs_input_grad
    return (grouped_linear(grad, weight.transpose(1, 2), ends, None) if to_rows else None,
            _weight_grad(rows, weight, grad, ends) if to_weight else None, None,
            grouped_sum(grad, ends) if ctx.has_bias and to_bias else None)


def _weight_grad(rows: Tensor, weight: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """[E, K, M], laid out as the weight is: else autograd copies it for a parameter [E, M, K] that is read turned."""
    if weight.stride(1) == 1:
        return grouped_weight_grad(grad, rows, ends).transpose(1, 2)
    return grouped_weight_grad(rows, grad, ends)


_differentiate("grouped_linear", _linear_backward, _setup_linear)


def _setup_inner(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _inner_backward(ctx: Any, out: Tensor) -> Any:
    rows, grad, ends = ctx.saved_tensors
    return (grouped_linear(grad, out.transpose(1, 2), ends, None), grouped_linear(rows, out, ends, None), None)


_differentiate("grouped_weight_grad", _inner_backward, _setup_inner)


def _setup_sum(ctx: Any, inputs: Any, output: Any) -> None:
    rows, ends = inputs
    ctx.rows = rows.shape[0]
    ctx.save_for_backward(ends)


_differentiate("grouped_sum", lambda ctx, grad: (grouped_take(grad, ctx.saved_tensors[0], ctx.rows), None), _setup_sum)


def _setup_take(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[1])


_differentiate("grouped_take", lambda ctx, grad: (grouped_sum(grad, ctx.saved_tensors[0]), None, None), _setup_take)


# ---- one tensor a branch


def _split_rows(rows: Tensor, ends: Tensor) -> list[Tensor]:
    return [rows[begin:end].clone(memory_format=torch.contiguous_format)
            for begin, end in _groups(ends, rows.shape[0])]


_WHOLE_ROWS: ContextVar[bool] = ContextVar("whole_rows", default=False)


@contextmanager
def whole_rows() -> Iterator[None]:
    """While a graph is captured to be looked at: split_rows gives each branch as many rows as there are in all, so that
    no size is found in data. Such a graph is not one to run."""
    token = _WHOLE_ROWS.set(True)
    try:
        yield
    finally:
        _WHOLE_ROWS.reset(token)


def _split_rows_fake(rows: Tensor, ends: Tensor) -> list[Tensor]:
    if _WHOLE_ROWS.get():
        return [torch.empty_like(rows) for _ in range(ends.shape[0])]
    context = torch.library.get_ctx()
    return [rows.new_empty(context.new_dynamic_size(min=0), *rows.shape[1:]) for _ in range(ends.shape[0])]


split_rows = _define("split_rows(Tensor rows, Tensor ends) -> Tensor[]", _split_rows, _split_rows_fake)


def _split_like(rows: Tensor, ends: Tensor, sizes: list[int]) -> list[Tensor]:
    """split_rows where the sizes are known: the derivative of merge_rows, whose parts had them."""
    return _split_rows(rows, ends)


def _split_like_fake(rows: Tensor, ends: Tensor, sizes: list[Any]) -> list[Tensor]:
    return [rows.new_empty(size, *rows.shape[1:]) for size in sizes]


split_like = _define("split_like(Tensor rows, Tensor ends, SymInt[] sizes) -> Tensor[]", _split_like, _split_like_fake)


def _merge_rows(parts: list[Tensor], ends: Tensor, rows: int) -> Tensor:
    filled = sum(part.shape[0] for part in parts)
    found = parts[0].new_empty(rows, *parts[0].shape[1:])
    torch.cat(parts, out=found[:filled])
    found[filled:].zero_()
    return found


def _merge_rows_fake(parts: list[Tensor], ends: Tensor, rows: int) -> Tensor:
    return parts[0].new_empty(rows, *parts[0].shape[1:])


merge_rows = _define("merge_rows(Tensor[] parts, Tensor ends, SymInt rows) -> Tensor", _merge_rows, _merge_rows_fake)


def _setup_split(ctx: Any, inputs: Any, output: Any) -> None:
    rows, ends = inputs[:2]
    ctx.rows = rows.shape[0]
    ctx.save_for_backward(ends)


def _setup_merge(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.sizes = [part.shape[0] for part in inputs[0]]
    ctx.save_for_backward(inputs[1])


def _merge_backward(ctx: Any, grad: Tensor) -> Any:
    return split_like(grad, ctx.saved_tensors[0], ctx.sizes), None, None


_differentiate("split_rows", lambda ctx, grads: (merge_rows(grads, ctx.saved_tensors[0], ctx.rows), None), _setup_split)
_differentiate("split_like", lambda ctx, grads: (merge_rows(grads, ctx.saved_tensors[0], ctx.rows), None, None),
               _setup_split)
_differentiate("merge_rows", _merge_backward, _setup_merge)
