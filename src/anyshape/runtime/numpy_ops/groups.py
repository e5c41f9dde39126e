"""Top-k, route plans, and products and convolutions of groups of rows by numpy (ops/routing.py, ops/matmul.py), for
sizes and strides that the host's own routines do not take."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from anyshape.base.errors import IndexRangeError
from anyshape.runtime.numpy_ops.convolution import convolve
from anyshape.runtime.numpy_ops.elements import topk

Array = np.ndarray[Any, Any]


def routing(op: str, attrs: dict[str, Any], x: Array, size: int) -> tuple[Array, ...]:
    """The results of a step of ops/routing.py. size: of its first result's first dim.

    Raises:
        IndexRangeError: a choice is no branch.
    """
    if op == "topk":
        return topk(x, attrs["k"])
    if op == "segment_ids":
        found = np.full(size, len(x), np.int64)
        for group, begin, end in _groups(x, size, back=True):
            found[begin:end] = group
        return (found,)
    branches, flat = attrs["branches"], x.reshape(-1)
    if flat.size and (int(flat.min()) < -1 or int(flat.max()) >= branches):
        raise IndexRangeError("a route is out of range", why=f"branches are 0 to {branches - 1}, and -1 drops a choice",
                              do="look at what the router function returns")
    keys = np.where(flat < 0, branches, flat)
    order = np.argsort(keys, kind="stable")
    inverse = np.empty_like(order)
    inverse[order] = np.arange(order.size)
    return order, inverse, np.bincount(keys, minlength=branches + 1)[:branches].cumsum().astype(np.int32)


def _groups(ends: Array, size: int, back: bool = False) -> Iterator[tuple[int, int, int]]:
    """Number, first row and end of each group. back: an end below 0 counts from the last row."""
    begin = 0
    for group, end in enumerate(ends.tolist()):
        end = min(max(end + size if end < 0 and back else end, 0), size)
        yield group, begin, end
        begin = end


def _in_order(attrs: dict[str, Any], operands: Sequence[Array]) -> tuple[list[Array], Array | None]:
    """The operands without the order that may stand behind the ends, the first in that order where it is gathered; and
    the order where the result is scattered."""
    x, weights, ends, *more = operands
    if not attrs.get("gathered") and not attrs.get("scattered"):
        return list(operands), None
    order = more.pop(0)
    return [x[order] if attrs.get("gathered") else x, weights, ends, *more], order if attrs.get("scattered") else None


def grouped(op: str, attrs: dict[str, Any], operands: Sequence[Array]) -> Array:
    """The result of a product of groups."""
    (x, y, ends), _ = _in_order(attrs, operands)
    if op == "grouped":
        result = np.zeros((x.shape[0], y.shape[2]), x.dtype)
        for group, begin, end in _groups(ends, x.shape[0]):
            result[begin:end] = x[begin:end] @ y[group]
        return result
    result = np.zeros((len(ends), x.shape[0], y.shape[1]), x.dtype)
    for group, begin, end in _groups(ends, x.shape[1]):
        result[group] = x[:, begin:end] @ y[begin:end]
    return result


def grouped_conv(attrs: dict[str, Any], operands: Sequence[Array], shape: Sequence[int]) -> Array:
    """The result of a convolution of groups, of that shape."""
    (rows, weight, ends, *more), order = _in_order(attrs, operands)
    bias = more[:-1] if attrs.get("added") else more
    result = np.zeros(shape, rows.dtype)
    for group, begin, end in _groups(ends, rows.shape[0]):
        if end > begin:
            result[begin:end] = convolve(rows[begin:end], weight[group], bias[0][group] if bias else None,
                                         attrs["stride"], attrs["padding"], attrs["dilation"], 1)
    if attrs.get("added"):
        result += more[-1]
    result = np.maximum(result, 0) if attrs.get("relu") else result
    if order is not None:
        turned = np.empty_like(result)
        turned[order] = result
        return turned
    return result
