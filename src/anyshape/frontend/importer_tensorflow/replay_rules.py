"""Legalization rules: they write operations of TensorFlow with others, where its converter to StableHLO wants sizes
that are numbers.

    Conv2D(x, k, strides=2, padding="SAME")   -->   Conv2D(Pad(x, ...), k, strides=2, padding="VALID")

A rule gets the operation and its inputs, and gives its results, or None where the operation stays as it is. What it
writes has the numbers that TensorFlow's documentation gives for the operation.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Rule = Callable[[Any, list[Any]], Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Makes the function the rule of these operations."""
    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function
    return add


def size(x: Any, dim: int) -> Any:
    """A number, or a tensor of rank 0."""
    return x.shape[dim] if x.shape[dim] is not None else tf.shape(x)[dim]


# ---- slices


@rule("StridedSlice")
def strided_slice(op: Any, inputs: list[Any]) -> Any:
    """As Slice, and as Gather where a step is not 1."""
    x, begin, end, _ = inputs
    steps = tf.get_static_value(inputs[3])
    if x.shape.rank is None or x.shape.is_fully_defined() or steps is None or begin.shape.rank is None:
        return None
    masks = {name: op.get_attr(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    firsts, lasts = (_elements(one, len(steps)) for one in (begin, end))
    new = sum(bool(masks["new_axis"] >> k & 1) for k in range(len(steps)) if not masks["ellipsis"] >> k & 1)
    dim = 0
    starts: list[Any] = []
    counts: list[Any] = []
    gathers: dict[int, Any] = {}
    squeezed: list[int] = []
    added: list[int] = []
    for k, step in enumerate(int(one) for one in steps):
        bit = 1 << k
        if masks["ellipsis"] & bit:
            for _ in range(x.shape.rank - (len(steps) - 1 - new)):
                starts, counts, dim = [*starts, 0], [*counts, size(x, dim)], dim + 1
            continue
        if masks["new_axis"] & bit:
            added.append(dim + len(added) - len(squeezed))
            continue
        n = size(x, dim)
        if masks["shrink_axis"] & bit:
            start, count = _counted(firsts[k], n), 1
            squeezed.append(dim)
        elif step > 0:
            start = 0 if masks["begin"] & bit else _limited(firsts[k], n, 0, n)
            stop = n if masks["end"] & bit else _limited(lasts[k], n, 0, n)
            count = _above(_minus(stop, start))
        else:
            start = _minus(n, 1) if masks["begin"] & bit else _limited(firsts[k], n, -1, _minus(n, 1))
            stop = -1 if masks["end"] & bit else _limited(lasts[k], n, -1, _minus(n, 1))
            count = _above(_minus(start, stop))
        if step not in (1,) and not masks["shrink_axis"] & bit:
            gathers[dim] = start + step * tf.range(over(count + (abs(step) - 1), abs(step)))
            start, count = 0, n
        starts, counts, dim = [*starts, start], [*counts, count], dim + 1
    while dim < x.shape.rank:
        starts, counts, dim = [*starts, 0], [*counts, size(x, dim)], dim + 1
    x = tf.slice(x, tf.stack(starts), tf.stack(counts))
    for axis, places in gathers.items():
        x = tf.gather(x, places, axis=axis)
    x = tf.squeeze(x, squeezed) if squeezed else x
    for axis in added:
        x = tf.expand_dims(x, axis)
    return [x]


def _elements(vector: Any, count: int) -> list[Any]:
    known = tf.get_static_value(vector, partial=True)
    if known is None:
        return [tf.cast(vector[k], tf.int32) for k in range(count)]
    return [int(known[k]) if known[k] is not None else tf.cast(vector[k], tf.int32) for k in range(count)]


def _minus(a: Any, b: Any) -> Any:
    return a - b


def _above(value: Any) -> Any:
    return max(value, 0) if isinstance(value, int) else tf.maximum(value, 0)


def _counted(place: Any, n: Any) -> Any:
    """A place, from the end where it is below 0."""
    if isinstance(place, int):
        return place if place >= 0 else n + place
    return tf.where(place < 0, n + place, place)


def _limited(place: Any, n: Any, low: int, high: Any) -> Any:
    place = _counted(place, n)
    if isinstance(place, int) and isinstance(high, int):
        return min(max(place, low), high)
    place = place if isinstance(place, int) and place >= low else tf.maximum(place, low)
    return place if isinstance(place, int) and place == low == 0 else tf.minimum(place, high)


@rule("Unpack")
def unpack(op: Any, inputs: list[Any]) -> Any:
    """As Gather."""
    x, axis = inputs[0], op.get_attr("axis")
    return None if x.shape.is_fully_defined() else [tf.gather(x, k, axis=axis) for k in range(op.get_attr("num"))]


@rule("Split", "SplitV")
def split(op: Any, inputs: list[Any]) -> Any:
    """As slices."""
    axis, x = (inputs[0], inputs[1]) if op.type == "Split" else (inputs[2], inputs[0])
    axis, parts = tf.get_static_value(axis), op.get_attr("num_split")
    counts = None if op.type == "Split" else tf.get_static_value(inputs[1])
    if axis is None or x.shape.rank is None or x.shape.is_fully_defined() or (op.type == "SplitV" and counts is None):
        return None
    axis = int(axis) % x.shape.rank
    whole, found = size(x, axis), []
    start: Any = 0
    for k in range(parts):
        count = over(whole, parts) if counts is None else int(counts[k])
        if counts is not None and counts[k] < 0:
            count = whole - (int(counts.sum()) + 1)
        starts = [start if d == axis else 0 for d in range(x.shape.rank)]
        shape = [count if d == axis else size(x, d) for d in range(x.shape.rank)]
        found.append(tf.slice(x, tf.stack(starts), tf.stack(shape)))
        start = start + count
    return found


@rule("Tile")
def tile(op: Any, inputs: list[Any]) -> Any:
    """As a broadcast to one dim more for each."""
    x = inputs[0]
    if x.shape.rank is None or not x.shape.rank:
        return None
    times = _elements(inputs[1], x.shape.rank)
    inner: list[Any] = []
    wide: list[Any] = []
    shape: list[Any] = []
    for d, many in enumerate(times):
        n = size(x, d)
        inner, wide, shape = [*inner, 1, n], [*wide, many, n], [*shape, many * n]
    x = tf.broadcast_to(tf.reshape(x, tf.stack(inner)), tf.stack(wide))
    return [tf.reshape(x, tf.stack(shape))]


@rule("Reshape")
def reshape(op: Any, inputs: list[Any]) -> Any:
    """With sizes as numbers where TensorFlow's inference of shapes knows them and the converter does not."""
    x, wanted = inputs
    known = tf.reshape(x, wanted).shape
    if known.rank is None or known.is_fully_defined() or not any(known) or tf.get_static_value(wanted) is not None:
        return None
    sizes = _elements(wanted, known.rank)
    return [tf.reshape(x, tf.stack([known[d] if known[d] is not None else one for d, one in enumerate(sizes)]))]


# ---- windows


def _spatial(op: Any) -> bool:
    return op.get_attr("data_format").decode() == "NHWC"


def _open(x: Any) -> bool:
    return x.shape.rank == 4 and None in (x.shape[1], x.shape[2])


def _padded(x: Any, kernel: Sequence[int], strides: Sequence[int], spread: Sequence[int], value: float = 0.0) -> Any:
    """An image with the zeros that padding SAME means."""
    pairs = [[0, 0]]
    for d in (1, 2):
        n, step, reach = size(x, d), strides[d], (kernel[d - 1] - 1) * spread[d] + 1
        total = reach - 1 if step == 1 else _above((over(n + (step - 1), step) - 1) * step + reach - n)
        pairs.append([over(total, 2), total - over(total, 2)])
    return padded(x, [*pairs, [0, 0]], value)


def padded(x: Any, pairs: Sequence[Any], value: float = 0.0) -> Any:
    """More elements at the ends; the number of channels stays known."""
    shape = [size(x, d) + low + high for d, (low, high) in enumerate(pairs)]
    return tf.reshape(tf.pad(x, pairs, constant_values=value), tf.stack(shape))


def over(a: Any, b: int) -> Any:
    """a // b, of what is not below 0."""
    return a // b if isinstance(a, int) else tf.raw_ops.TruncateDiv(x=a, y=b)


@rule("Conv2D")
def conv2d(op: Any, inputs: list[Any]) -> Any:
    """With padding of its own where the sizes of an image are open."""
    x, kernel = inputs
    strides, spread = op.get_attr("strides"), op.get_attr("dilations")
    if op.get_attr("padding") != b"SAME" or not _spatial(op) or not _open(x) or max(strides) == 1:
        return None
    x = _padded(x, kernel.shape[:2], strides, spread)
    return [tf.raw_ops.Conv2D(input=x, filter=kernel, strides=strides, padding="VALID", dilations=spread)]


@rule("DepthwiseConv2dNative")
def depthwise(op: Any, inputs: list[Any]) -> Any:
    """As a convolution in groups."""
    x, kernel = inputs
    strides, spread = op.get_attr("strides"), op.get_attr("dilations")
    padding = op.get_attr("padding").decode()
    if not _spatial(op) or padding not in ("SAME", "VALID") or not kernel.shape.is_fully_defined():
        return None
    if padding == "SAME":
        x = _padded(x, kernel.shape[:2], strides, spread)
    high, wide, channels, times = kernel.shape
    kernel = tf.reshape(kernel, [high, wide, 1, channels * times])
    return [tf.raw_ops.Conv2D(input=x, filter=kernel, strides=strides, padding="VALID", dilations=spread)]


@rule("Conv2DBackpropInput")
def transposed(op: Any, inputs: list[Any]) -> Any:
    """As a convolution of an image with zeros between its elements."""
    sizes, kernel, x = inputs
    strides, padding = op.get_attr("strides"), op.get_attr("padding").decode()
    if not _spatial(op) or padding not in ("SAME", "VALID") or not _open(x) or max(op.get_attr("dilations")) > 1:
        return None
    pairs, result = [[0, 0]], [size(x, 0)]
    for d in (1, 2):
        n, step, reach = size(x, d), strides[d], kernel.shape[d - 1]
        out = _elements(sizes, 4)[d]
        before = over(_above((n - 1) * step + reach - out), 2) if padding == "SAME" else 0
        low = reach - 1 - before
        pairs.append([low, _above(out - n * step + reach - 1 - low)])
        result.append(out)
    count, high, wide, channels = (size(x, d) for d in range(4))
    x = tf.reshape(x, tf.stack([count, high, 1, wide, 1, channels]))
    x = tf.pad(x, [[0, 0], [0, 0], [0, strides[1] - 1], [0, 0], [0, strides[2] - 1], [0, 0]])
    x = tf.reshape(x, tf.stack([count, high * strides[1], wide * strides[2], channels]))
    kernel = tf.transpose(tf.reverse(kernel, [0, 1]), [0, 1, 3, 2])
    x = tf.nn.conv2d(padded(x, [*pairs, [0, 0]]), kernel, 1, "VALID")
    return [tf.slice(x, [0, 0, 0, 0], tf.stack([*result, kernel.shape[3]]))]


@rule("MaxPool")
def largest(op: Any, inputs: list[Any]) -> Any:
    """With padding of its own: the converter takes SAME for VALID where the sizes of an image are open."""
    x, strides, window = inputs[0], op.get_attr("strides"), op.get_attr("ksize")
    if op.get_attr("padding") != b"SAME" or not _spatial(op) or not _open(x):
        return None
    x = _padded(x, window[1:3], strides, (1, 1, 1, 1), float("-inf") if x.dtype.is_floating else x.dtype.min)
    return [tf.raw_ops.MaxPool(input=x, ksize=window, strides=strides, padding="VALID")]


@rule("AvgPool")
def average(op: Any, inputs: list[Any]) -> Any:
    """The sum of a window by the number of its elements that are inside of the image."""
    x, strides, window = inputs[0], op.get_attr("strides"), op.get_attr("ksize")
    if op.get_attr("padding") != b"SAME" or not _spatial(op) or x.shape.is_fully_defined():
        return None
    ones = tf.ones(tf.stack([1, size(x, 1), size(x, 2), 1]), x.dtype)
    total, count = (tf.raw_ops.AvgPool(value=_padded(one, window[1:3], strides, (1, 1, 1, 1)), ksize=window,
                                       strides=strides, padding="VALID") for one in (x, ones))
    return [total / count]


# ---- images of another size


def _places(op: Any, x: Any, wanted: Any, dim: int) -> tuple[Any, Any]:
    """The row of x, as a real number, for each of the result; and how many x has."""
    n = tf.cast(size(x, dim), tf.float32)
    line = tf.cast(tf.range(wanted), tf.float32)
    scale = n / tf.cast(wanted, tf.float32)
    if op.get_attr("half_pixel_centers"):
        return (line + 0.5) * scale, n
    return line * scale, n


@rule("ResizeBilinear")
def bilinear(op: Any, inputs: list[Any]) -> Any:
    """Two rows of each image, weighted, and two columns of these."""
    if op.get_attr("align_corners"):
        return None
    x = tf.cast(inputs[0], tf.float32)
    for dim, wanted in zip((1, 2), _elements(inputs[1], 2), strict=True):
        place, n = _places(op, x, wanted, dim)
        place = place - 0.5 if op.get_attr("half_pixel_centers") else place
        low = tf.floor(place)
        part = tf.reshape(place - low, [1, -1, 1, 1] if dim == 1 else [1, 1, -1, 1])
        first, second = (tf.gather(x, tf.cast(tf.clip_by_value(one, 0.0, n - 1), tf.int32), axis=dim)
                         for one in (low, low + 1))
        x = first + (second - first) * part
    return [x]


@rule("ResizeNearestNeighbor")
def nearest(op: Any, inputs: list[Any]) -> Any:
    """A row of each image for each of the result."""
    if op.get_attr("align_corners"):
        return None
    x = inputs[0]
    for dim, wanted in zip((1, 2), _elements(inputs[1], 2), strict=True):
        place, n = _places(op, x, wanted, dim)
        x = tf.gather(x, tf.cast(tf.minimum(tf.floor(place), n - 1), tf.int32), axis=dim)
    return [x]
