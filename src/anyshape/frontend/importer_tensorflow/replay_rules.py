"""Legalization rules: they write operations of TensorFlow with others, where its converter to StableHLO wants sizes
that are numbers.

    Conv2D(x, k, strides=2, padding="SAME")   -->   Conv2D(Pad(x, ...), k, strides=2, padding="VALID")

A rule gets the operation and its inputs, and gives its results, or None where the operation stays as it is. What it
writes has the numbers that TensorFlow's documentation gives for the operation.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
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


def again(op: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """The operation as it is."""
    if op.type == "Const":
        return [tf.constant(tf.make_ndarray(op.get_attr("value")))]
    attributes = {name: value for name, value in op.node_def.attr.items() if not name.startswith("_")}
    made = tf.compat.v1.get_default_graph().create_op(
        op.type, list(inputs), [one.dtype for one in op.outputs], attrs=attributes)
    return made.outputs  # type: ignore[no-any-return]


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
        elif masks["shrink_axis"] & bit and not isinstance(start, int):  # a place in the data, perhaps
            gathers[dim] = tf.reshape(start, [1])
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


@rule("FloorMod")
def floor_mod(op: Any, inputs: list[Any]) -> Any:
    """By divisions, as sizes are computed: the converter would compare with 0."""
    x, y = inputs
    known = tf.get_static_value(y)
    if x.dtype not in (tf.int32, tf.int64) or known is None or (known <= 0).any():
        return None
    above = x - y * over(x, y) + y  # from 1 to 2 y - 1
    return [above - y * over(above, y)]


# ---- windows


def _spatial(op: Any) -> bool:
    return op.get_attr("data_format").decode() in ("NHWC", "NDHWC")


def _open(x: Any) -> bool:
    return x.shape.rank in (4, 5) and None in x.shape[1:-1]


def _padded(x: Any, kernel: Sequence[int], strides: Sequence[int], spread: Sequence[int], value: float = 0.0) -> Any:
    """An image, or a volume, with the zeros that padding SAME means."""
    pairs = [[0, 0]]
    for d in range(1, x.shape.rank - 1):
        n, step, reach = size(x, d), strides[d], (kernel[d - 1] - 1) * spread[d] + 1
        total = reach - 1 if step == 1 else _above((over(n + (step - 1), step) - 1) * step + reach - n)
        pairs.append([over(total, 2), total - over(total, 2)])
    return padded(x, [*pairs, [0, 0]], value)


def padded(x: Any, pairs: Sequence[Any], value: float = 0.0) -> Any:
    """More elements at the ends; the number of channels stays known."""
    shape = [size(x, d) + low + high for d, (low, high) in enumerate(pairs)]
    return tf.reshape(tf.pad(x, pairs, constant_values=value), tf.stack(shape))


def over(a: Any, b: Any) -> Any:
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
    return [tf.raw_ops.Conv2D(input=x, filter=_in_groups(kernel), strides=strides, padding="VALID", dilations=spread)]


def _in_groups(kernel: Any) -> Any:
    """The kernel of a depthwise convolution as one of a convolution in groups."""
    high, wide, channels, times = kernel.shape
    return tf.reshape(kernel, [high, wide, 1, channels * times])


@rule("Conv2DBackpropInput", "Conv3DBackpropInputV2")
def transposed(op: Any, inputs: list[Any]) -> Any:
    """As a convolution of an image, or a volume, with zeros between its elements."""
    sizes, kernel, x = inputs
    strides, spread = op.get_attr("strides"), op.get_attr("dilations")
    padding, last = op.get_attr("padding").decode(), x.shape.rank - 1 if x.shape.rank else 0
    whole = op.type == "Conv3DBackpropInputV2" or max(spread) > 1  # which the converter does not carry at all
    if not _spatial(op) or padding not in ("SAME", "VALID") or not (whole or _open(x)) or x.shape[last] is None:
        return None
    pairs, result = [[0, 0]], [size(x, 0)]
    wide, zeros, joined = [size(x, 0)], [[0, 0]], [size(x, 0)]
    for d in range(1, last):
        n, step, reach = size(x, d), strides[d], (kernel.shape[d - 1] - 1) * spread[d] + 1
        out = _above(_elements(sizes, last + 1)[d])
        before = over(_above((n - 1) * step + reach - out), 2) if padding == "SAME" else 0
        low = reach - 1 - before
        pairs.append([low, _above(out - n * step + reach - 1 - low)])
        result.append(out)
        wide, zeros, joined = [*wide, n, 1], [*zeros, [0, 0], [0, step - 1]], [*joined, n * step]
    channels = x.shape[last]
    x = tf.pad(tf.reshape(x, tf.stack([*wide, channels])), [*zeros, [0, 0]]) if max(strides) > 1 else x
    x = tf.reshape(x, tf.stack([*joined, channels]))
    dims = list(range(last - 1))
    kernel = tf.transpose(tf.reverse(kernel, dims), [*dims, last, last - 1])
    x = convolution(padded(x, [*pairs, [0, 0]]), kernel, [1] * len(dims), spread[1:last])
    return [tf.slice(x, [0] * (last + 1), tf.stack([*result, kernel.shape[last]]))]


# ---- dilated windows


class Blocks:
    """What SpaceToBatchND gives, not made, or what convolutions make of it: each of its images has every step-th
    element of an image, so that a convolution of it is a dilated one of that image.

    image: that image (batch, ..., channels) without as many elements at the ends of each dim between as is asked for.
    steps: of these dims. dense: makes what the operation gives.
    """

    def __init__(self, image: Callable[[list[list[Any]]], Any], steps: Sequence[int], dense: Callable[[], Any]) -> None:
        self.image, self.steps, self.dense = image, list(steps), dense


def cut(op: Any, inputs: list[Any]) -> Any:
    """The result of SpaceToBatchND; None: it is not known."""
    x, steps = inputs[0], tf.get_static_value(inputs[1])
    if steps is None or x.shape.rank != len(steps) + 2 or x.shape[-1] is None:
        return None
    pairs = _pairs(inputs[2], len(steps))

    def image(crops: list[list[Any]]) -> Any:
        left = [[low - less, high - fewer] for (low, high), (less, fewer) in zip(pairs, crops, strict=True)]
        return padded(x, [[0, 0], *left, [0, 0]])

    return Blocks(image, [int(one) for one in steps], lambda: again(op, inputs)[0])


def of_blocks(op: Any, inputs: list[Any]) -> Any:
    """The result of an operation on blocks; None: it needs what they are."""
    own, steps = inputs[0], inputs[0].steps
    if op.type == "BatchToSpaceND" and steps == np.ravel(tf.get_static_value(inputs[1])).tolist():
        return own.image(_pairs(inputs[2], len(steps)))

    def dense() -> Any:
        return again(op, [own.dense(), *inputs[1:]])[0]

    if op.type in ("Conv2D", "Conv3D", "DepthwiseConv2dNative"):
        once = all(max(op.get_attr(name)) == 1 for name in ("strides", "dilations"))
        kernel = inputs[1]
        if not once or op.get_attr("padding") != b"VALID" or not _spatial(op) or not kernel.shape.is_fully_defined():
            return None
        kernel = _in_groups(kernel) if op.type == "DepthwiseConv2dNative" else kernel
        return Blocks(lambda crops: convolution(own.image(crops), kernel, [1] * len(steps), steps), steps, dense)
    if op.type == "ExpandDims":
        at = int(tf.get_static_value(inputs[1])) % (len(steps) + 3) - 1
        if 0 <= at <= len(steps):
            return Blocks(lambda crops: tf.expand_dims(own.image([*crops[:at], *crops[at + 1:]]), at + 1),
                          [*steps[:at], 1, *steps[at:]], dense)
    if op.type == "Squeeze" and len(op.get_attr("squeeze_dims")) == 1:
        at = op.get_attr("squeeze_dims")[0] % (len(steps) + 2) - 1
        if 0 <= at < len(steps) and steps[at] == 1:
            return Blocks(lambda crops: tf.squeeze(own.image([*crops[:at], [0, 0], *crops[at:]]), [at + 1]),
                          [*steps[:at], *steps[at + 1:]], dense)
    return None


def _pairs(pairs: Any, count: int) -> list[list[Any]]:
    """Paddings or crops, numbers where they are known."""
    return [_elements(pairs[d], 2) for d in range(count)]


@rule("Conv3D")
def conv3d(op: Any, inputs: list[Any]) -> Any:
    """As a sum of convolutions of images."""
    x, kernel = inputs
    strides, spread = op.get_attr("strides"), op.get_attr("dilations")
    if not _spatial(op) or not kernel.shape.is_fully_defined() or x.shape[4] is None:
        return None
    if op.get_attr("padding") == b"SAME":
        x = _padded(x, kernel.shape[:3], strides, spread)
    return [convolution(x, kernel, strides[1:4], spread[1:4])]


def convolution(x: Any, kernel: Any, strides: Sequence[int], spread: Sequence[int]) -> Any:
    """A convolution without padding of x (batch, ..., channels) by a kernel (..., channels of a group, results), of
    images, or of volumes as the sum over the kernel's layers of convolutions of images."""
    if x.shape.rank == 4:
        return tf.raw_ops.Conv2D(input=x, filter=kernel, strides=[1, *strides, 1], padding="VALID",
                                 dilations=[1, *spread, 1])
    count, depth, high, wide = (size(x, d) for d in range(4))
    layers = over(_above(depth - (kernel.shape[0] - 1) * spread[0] - 1 + strides[0]), strides[0])
    total = None
    for k in range(kernel.shape[0]):
        if strides[0] == 1:
            part = tf.slice(x, [0, k * spread[0], 0, 0, 0], tf.stack([count, layers, high, wide, x.shape[4]]))
        else:
            part = tf.gather(x, k * spread[0] + strides[0] * tf.range(layers), axis=1)
        part = tf.reshape(part, tf.stack([count * layers, high, wide, x.shape[4]]))
        part = convolution(part, kernel[k], strides[1:], spread[1:])
        total = part if total is None else total + part
    return tf.reshape(total, tf.stack([count, layers, size(total, 1), size(total, 2), kernel.shape[-1]]))


def _misread(op: Any, x: Any) -> bool:
    """Whether the converter would take SAME for VALID."""
    if op.get_attr("padding") != b"SAME" or x.shape.is_fully_defined():
        return False
    if not _spatial(op) or x.shape.rank is None:
        raise NotImplementedError(f"{op.type} of open sizes with padding SAME, channels first or of no known rank")
    return True


@rule("MaxPool", "MaxPool3D")
def largest(op: Any, inputs: list[Any]) -> Any:
    """With padding of its own: the converter takes SAME for VALID where the sizes of an image are open."""
    x, strides, window = inputs[0], op.get_attr("strides"), op.get_attr("ksize")
    if not _misread(op, x):
        return None
    x = _padded(x, window[1:-1], strides, [1] * 5, float("-inf") if x.dtype.is_floating else x.dtype.min)
    pool = tf.raw_ops.MaxPool if op.type == "MaxPool" else tf.raw_ops.MaxPool3D
    return [pool(input=x, ksize=window, strides=strides, padding="VALID")]


@rule("AvgPool", "AvgPool3D")
def average(op: Any, inputs: list[Any]) -> Any:
    """The sum of a window by the number of its elements that are inside of the image."""
    x, strides, window = inputs[0], op.get_attr("strides"), op.get_attr("ksize")
    if not _misread(op, x):
        return None
    ones = tf.ones(tf.stack([1, *(size(x, d) for d in range(1, x.shape.rank - 1)), 1]), x.dtype)
    total, count = ((tf.raw_ops.AvgPool(value=one, ksize=window, strides=strides, padding="VALID")
                     if op.type == "AvgPool" else
                     tf.raw_ops.AvgPool3D(input=one, ksize=window, strides=strides, padding="VALID"))
                    for one in (_padded(each, window[1:-1], strides, [1] * 5) for each in (x, ones)))
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
