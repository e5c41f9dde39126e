"""Gather, scatter and embedding bags, by numpy: elements from and to places. Nothing is written in place."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from anyshape.base.errors import InputError

Array = np.ndarray[Any, Any]
SUM, MEAN, MAX = 0, 1, 2


def constant_pad(x: Array, pad: Sequence[int], value: Any = 0) -> Array:
    """aten.constant_pad_nd: pad has before and after of each dim, the last one first; below 0 cuts."""
    pairs = [(0, 0)] * (x.ndim - len(pad) // 2) + [(pad[i], pad[i + 1]) for i in range(len(pad) - 2, -1, -2)]
    cut = x[tuple(slice(max(-before, 0), n - max(-after, 0))
                  for n, (before, after) in zip(x.shape, pairs, strict=True))]
    return np.pad(cut, [(max(before, 0), max(after, 0)) for before, after in pairs], constant_values=value)


def masked_scatter(x: Array, mask: Array, source: Array) -> Array:
    """aten.masked_scatter: elements of `source`, in order, where the mask holds."""
    x, mask = np.broadcast_arrays(x, mask)
    count = int(mask.sum())
    if count > source.size:
        raise InputError("masked_scatter has too few elements to write", do="pass more of them",
                         why=f"the mask holds {count} times, and there are {source.size}")
    found = x.copy()
    found[mask] = source.ravel()[:count]
    return found


def index_put(x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    """aten.index_put."""
    found = x.copy()
    places: Any = tuple(slice(None) if one is None else one for one in indices)
    if accumulate:
        np.add.at(found, places, values.astype(found.dtype))
    else:
        found[places] = values
    return found


def index_add(x: Array, dim: int, index: Array, source: Array, *, alpha: Any = 1) -> Array:
    """aten.index_add."""
    found = x.copy()
    if not x.ndim:
        return (found + alpha * source.reshape(-1).sum()).astype(x.dtype)
    np.add.at(np.moveaxis(found, dim, 0), index.reshape(-1), np.moveaxis(alpha * source, dim, 0).astype(x.dtype))
    return found


def index_select(x: Array, dim: int, index: Array) -> Array:
    """aten.index_select."""
    if not x.ndim:
        return x.copy()
    return np.take(x, index.reshape(-1), dim)


def gather(x: Array, dim: int, index: Array, *, sparse_grad: bool = False) -> Array:
    """aten.gather."""
    if not x.ndim or not index.ndim:
        return np.take(x.reshape(-1), index)
    part = x[tuple(slice(None) if d == dim % x.ndim else slice(n) for d, n in enumerate(index.shape))]
    return np.take_along_axis(part, index, dim)


def slice_scatter(x: Array, source: Array, dim: int = 0, start: int | None = None, end: int | None = None,
                  step: int = 1) -> Array:
    """aten.slice_scatter."""
    found = x.copy()
    found[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)] = source
    return found


def diagonal_scatter(x: Array, source: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    """aten.diagonal_scatter."""
    found = x.copy()
    places = np.arange(source.shape[-1])
    turned = np.moveaxis(found, (dim1, dim2), (-2, -1))
    turned[..., places + max(-offset, 0), places + max(offset, 0)] = source
    return found


def narrow_copy(x: Array, dim: int, start: int, length: int) -> Array:
    """aten.narrow_copy."""
    start = start + x.shape[dim] if start < 0 else start
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, start + length),)].copy()


def nonzero_static(x: Array, *, size: int, fill_value: int = -1) -> Array:
    """aten.nonzero_static: the places of the first elements that are not 0, filled up to so many."""
    places = np.argwhere(x)[:size]
    found = np.full((size, x.ndim), fill_value, np.int64)
    found[:len(places)] = places
    return found


def extreme_along(largest: bool) -> Callable[..., tuple[Array, Array]]:
    """aten.max.dim or aten.min.dim: the extreme of each line and where it is first; a NaN is beyond all numbers."""
    def run(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
        if not x.ndim:
            return x.copy(), np.zeros((), np.int64)
        places = np.expand_dims((np.argmax if largest else np.argmin)(x, dim), dim)
        values = np.take_along_axis(x, places, dim)
        return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))
    return run


def embedding_bag(weight: Array, indices: Array, offsets: Array, scale_grad_by_freq: bool = False, mode: int = SUM,
                  sparse: bool = False, per_sample_weights: Array | None = None, include_last_offset: bool = False,
                  padding_idx: int = -1) -> tuple[Any, ...]:
    """aten._embedding_bag_forward_only: sums, means or maxima of rows; the bag of each index, the sizes of bags, and
    which index each maximum is of."""
    rows = weight.shape[0]
    if indices.size and not (indices.min() >= 0 and indices.max() < rows):
        raise InputError("embedding_bag has an index outside of its rows", why=f"there are {rows} rows",
                         do="pass indices from 0 on")
    ends = offsets if include_last_offset else np.append(offsets, indices.size)
    if offsets.size and (offsets[0] != 0 or (np.diff(ends) < 0).any() or ends[-1] > indices.size):
        raise InputError("embedding_bag has offsets that are no beginnings of bags",
                         why=f"they are to grow from 0 to at most {indices.size}", do="pass such offsets")
    sizes = np.diff(ends)
    bags = len(sizes)
    bag = np.full(indices.size, -1, np.int64)
    bag[:int(sizes.sum())] = np.repeat(np.arange(bags), sizes)
    counted = (bag >= 0) & (indices != padding_idx)
    own, at = bag[counted], indices[counted]
    values = weight[at]
    if per_sample_weights is not None:
        values = values * per_sample_weights[counted][:, None]
    count = np.bincount(own, minlength=bags)
    found = np.full((bags, weight.shape[1]), -np.inf if mode == MAX else 0, weight.dtype)
    first = np.zeros(found.shape if mode == MAX else (0,), indices.dtype)
    if mode == MAX:
        np.maximum.at(found, own, values)
        found[count == 0] = 0
        for place in range(len(at) - 1, -1, -1):
            is_it = values[place] == found[own[place]]
            first[own[place], is_it] = at[place]
    else:
        np.add.at(found, own, values)
        if mode == MEAN:
            found = (found / np.maximum(count, 1)[:, None]).astype(weight.dtype)
    kind = indices.dtype
    return found, bag.astype(kind), count.astype(kind), first


OPERATORS: dict[str, Callable[..., Any]] = {
    "aten.constant_pad_nd.default": constant_pad, "aten.masked_scatter.default": masked_scatter,
    "aten.index_put.default": index_put, "aten.index_add.default": index_add, "aten.index_select.default": index_select,
    "aten.gather.default": gather, "aten.slice_scatter.default": slice_scatter,
    "aten.diagonal_scatter.default": diagonal_scatter, "aten.narrow_copy.default": narrow_copy,
    "aten.nonzero_static.default": nonzero_static, "aten.max.dim": extreme_along(True),
    "aten.min.dim": extreme_along(False), "aten._embedding_bag_forward_only.default": embedding_bag,
    "aten._embedding_bag.default": embedding_bag,
}
