"""Translations of routing: top-k, and the operators of the routers (route/core/operators.py), by their schemas.

    rows = dispatch(cells, order, ends, 2)  -->  take(cells, order // 2 | dim=0), zero behind the last end
    combine(rows, inverse, ends, weights, 2)  -->  the sum over choices of weights * take(rows, inverse)
    grouped_conv_input(grad, rows, weight, ends, 1, ...)  -->  grouped_conv of grad by the weights turned about
    grouped_linear(rows, weight, ends, bias)  -->  grouped(rows, weight, ends) + take(bias, segment_ids(ends))

So gathers, weights and biases are parts of the kernels before and behind the products. Where an id is a branch that
there is not, `route_plan` fails; the places that it makes need no other check.
"""
from __future__ import annotations

from typing import Any

from anyshape.frontend.aten.matmul import groups, turned
from anyshape.frontend.aten.table import Decline, Mismatch, Translator, literal, translates, translates_schema, wide
from anyshape.ir.graph import Value
from anyshape.sym.expr import Size
from anyshape.torch_compat import aten

TOPK_COUNT, TOPK_MOST = 256, 16  # elements of a line, and how many are chosen of it, for which there is a routine
UNROLLED = 8  # choices that are added one by one


@translates(aten.topk.default)
def topk(t: Translator, x: Value, k: Any, dim: int = -1, largest: bool = True,
         sorted: bool = True) -> tuple[Value, ...]:
    count = x.tensor.shape[-1] if x.tensor.rank else 0
    if not largest or not sorted or x.tensor.dtype == "bool" or dim % max(x.tensor.rank, 1) != x.tensor.rank - 1:
        raise Decline("the smallest elements, or in any order, or along another dim than the last")
    if not isinstance(count, int) or not isinstance(k, int) or not 0 < k <= TOPK_MOST or count > TOPK_COUNT:
        raise Decline(f"{k} of {count} elements")
    return t.builder.multi("topk", x, k=k)


_ROUTE = "anyshape_route::"


@translates_schema(f"{_ROUTE}route_plan(Tensor ids, SymInt branches) -> (Tensor, Tensor, Tensor)")
def route_plan(t: Translator, ids: Value, branches: Any) -> tuple[Value, ...]:
    if not isinstance(branches, int):
        raise Decline("a number of branches that is not fixed")
    shape = ids.tensor.shape
    pairs = ids if len(shape) == 2 else t.reshape(ids, (ids.tensor.count, 1))
    return t.builder.multi("route_plan", t.cast(pairs, "i64"), branches=branches)


def _kept(t: Translator, places: Value, ends: Value) -> Value:
    """Which places are before the last end."""
    count = ends.tensor.shape[0]
    if count == 0:
        raise Decline("no branches")
    last = t.reshape(t.window(ends, 0, count - 1, 1), ())
    return t.op("lt", places, t.cast(last, "i64"))


def _wide(t: Translator, x: Value, rank: int) -> Value:
    """With dims of size 1 behind, as many as make `rank`."""
    return t.reshape(x, (*x.tensor.shape, *(1,) * (rank - x.tensor.rank)))


@translates_schema(f"{_ROUTE}dispatch(Tensor cells, Tensor order, Tensor ends, SymInt choices, Tensor? inverse=None)"
                   " -> Tensor")
def dispatch(t: Translator, cells: Value, order: Value, ends: Value, choices: Any,
             inverse: Value | None = None) -> Value:
    source = order if choices == 1 else t.op("floor_div", order, choices)
    rows = t.op("take", cells, source, dim=0)
    kept = _kept(t, t.iota(order.tensor.shape[0]), ends)
    return t.where(_wide(t, kept, rows.tensor.rank), rows, 0)


def _places(t: Translator, inverse: Value, choices: Any, cells: Size) -> Value:
    """The place of each choice of each cell."""
    return t.reshape(t.window(inverse, 0, 0, cells * choices), (cells, choices))


@translates_schema(f"{_ROUTE}combine(Tensor rows, Tensor inverse, Tensor ends, Tensor? weights, SymInt choices, "
                   "Tensor? order=None) -> Tensor")
def combine(t: Translator, rows: Value, inverse: Value, ends: Value, weights: Value | None, choices: Any,
            order: Value | None = None) -> Value:
    dtype, rank = rows.tensor.dtype, rows.tensor.rank
    places = _places(t, inverse, choices, t.out.shape[0])
    if not isinstance(choices, int) or not 0 < choices <= UNROLLED:
        found = _found(t, rows, places, ends, weights)
        return t.cast(t.reduce("sum", t.cast(found, wide(dtype)), (1,)), dtype)
    total: Value | None = None
    for choice in range(choices):
        own = None if weights is None else t.reshape(t.window(weights, 1, choice, 1), weights.tensor.shape[:1])
        column = t.reshape(t.window(places, 1, choice, 1), places.tensor.shape[:1])
        found = _found(t, rows, column, ends, own)
        total = found if total is None else t.pointwise("add", total, found)
    assert total is not None and total.tensor.rank == rank
    return total


def _found(t: Translator, rows: Value, places: Value, ends: Value, weights: Value | None) -> Value:
    """The rows at places, weighted; zero behind the last end."""
    taken = t.op("take", rows, places, dim=0)
    rank = taken.tensor.rank
    if weights is not None:
        taken = t.pointwise("mul", taken, _wide(t, weights, rank), dtype=rows.tensor.dtype)
    return t.where(_wide(t, _kept(t, places, ends), rank), taken, 0)


@translates_schema(f"{_ROUTE}combine_weight_grad(Tensor grad, Tensor rows, Tensor inverse, Tensor ends, "
                   "SymInt choices, Tensor? order=None) -> Tensor")
def combine_weight_grad(t: Translator, grad: Value, rows: Value, inverse: Value, ends: Value, choices: Any,
                        order: Value | None = None) -> Value:
    places = _places(t, inverse, choices, grad.tensor.shape[0])
    taken = t.op("take", rows, places, dim=0)
    shape = grad.tensor.shape
    terms = t.pointwise("mul", t.reshape(grad, (shape[0], 1, *shape[1:])), taken)
    found = t.reduce("sum", terms, tuple(range(2, terms.tensor.rank)))
    return t.where(_kept(t, places, ends), found, 0)


@translates_schema(f"{_ROUTE}grouped_linear(Tensor rows, Tensor weight, Tensor ends, Tensor? bias) -> Tensor")
def grouped_linear(t: Translator, rows: Value, weight: Value, ends: Value, bias: Value | None) -> Value:
    found = groups(t, "grouped", rows, weight, ends)
    return found if bias is None else t.pointwise("add", found, _taken(t, bias, ends, found.tensor.shape[0]))


@translates_schema(f"{_ROUTE}grouped_weight_grad(Tensor rows, Tensor grad, Tensor ends) -> Tensor")
def grouped_weight_grad(t: Translator, rows: Value, grad: Value, ends: Value) -> Value:
    return groups(t, "grouped_inner", turned(t, rows), grad, ends)


@translates_schema(f"{_ROUTE}grouped_sum(Tensor rows, Tensor ends) -> Tensor")
def grouped_sum(t: Translator, rows: Value, ends: Value) -> Value:
    """Rows are added in their order; those behind the last end go nowhere."""
    dtype = wide(rows.tensor.dtype)
    segments = t.op("segment_ids", ends, size=rows.tensor.shape[0])
    total = t.op("put_add", t.full(0, t.out.shape, dtype), t.cast(rows, dtype), segments, dims=(0,))
    return t.cast(total, rows.tensor.dtype)


@translates_schema(f"{_ROUTE}grouped_take(Tensor parameter, Tensor ends, SymInt rows) -> Tensor")
def grouped_take(t: Translator, parameter: Value, ends: Value, rows: Any) -> Value:
    return _taken(t, parameter, ends, rows)


def _taken(t: Translator, parameter: Value, ends: Value, rows: Size) -> Value:
    """For each row the line of its group; zero behind the last end."""
    count = ends.tensor.shape[0]
    if parameter.tensor.shape[0] != count:
        raise Mismatch(parameter.tensor.shape[0], count)
    segments, rank = t.op("segment_ids", ends, size=rows), parameter.tensor.rank
    none = (0,) * rank
    lines = t.op("pad", parameter, low=none, high=(1, *none[1:]), value=literal(0, parameter.tensor.dtype))
    return t.op("take", lines, segments, dim=0)


# convolutions of groups (route/core/grouped_conv.py)
_SETTINGS = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups"


@translates_schema(f"{_ROUTE}grouped_conv(Tensor rows, Tensor weight, Tensor ends, Tensor? bias, "
                   f"{_SETTINGS}) -> Tensor")
def grouped_conv(t: Translator, rows: Value, weight: Value, ends: Value, bias: Value | None, stride: Any, padding: Any,
                 dilation: Any, groups: Any) -> Value:
    operands = (rows, weight, *([] if bias is None else [bias]))
    if {value.tensor.dtype for value in operands} != {"f32"} or not t.target.multiplies("f32"):
        raise Decline("a convolution of groups in another dtype than f32")
    settings = [tuple(numbers) for numbers in (stride, padding, dilation)]
    if groups != 1 or not all(isinstance(number, int) for numbers in settings for number in numbers):
        raise Decline("groups of channels, or settings that are not fixed")
    if ends.tensor.dtype not in ("i32", "i64"):
        raise Decline(f"groups whose ends are {ends.tensor.dtype}")
    pairs = [(ends.tensor.shape[0], weight.tensor.shape[0]), (rows.tensor.shape[1], weight.tensor.shape[2])]
    for have, want in pairs:
        if have != want:
            raise Mismatch(have, want)
    return t.op("grouped_conv", rows, weight, ends, *operands[2:], stride=settings[0], padding=settings[1],
                dilation=settings[2])


@translates_schema(f"{_ROUTE}grouped_conv_input(Tensor grad, Tensor rows, Tensor weight, Tensor ends, "
                   f"{_SETTINGS}) -> Tensor")
def grouped_conv_input(t: Translator, grad: Value, rows: Value, weight: Value, ends: Value, stride: Any, padding: Any,
                       dilation: Any, groups: Any) -> Value:
    kernel = weight.tensor.shape[3:]
    if set(stride) != {1} or not all(isinstance(size, int) for size in kernel):
        raise Decline("windows that move by more than one position")
    margins = [step * (size - 1) - pad for size, pad, step in zip(kernel, padding, dilation, strict=True)]
    if any(margin < 0 for margin in margins):
        raise Decline("more padding than the window reaches")
    dims = weight.tensor.rank
    swapped = t.permute(weight, (0, 2, 1, *range(3, dims)))
    back = t.op("flip", swapped, dims=tuple(range(3, dims)))
    return grouped_conv(t, grad, back, ends, None, stride, margins, dilation, groups)
