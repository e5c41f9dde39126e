"""Legalization rules of operations that find elements: by their position, by their order, or of a table.

    Roll(x, 1, axis=1)  -->  GatherV2(x, FloorMod(Range(n) - 1, n), axis=1)

See replay_rules.py for what a rule is.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops.gen_xla_ops import xla_sort

from anyshape.frontend.importer_tensorflow.replay_rules import RULES, over, rule, size

__all__ = ["RULES"]  # with those of replay_rules.py

LOW = (1 << 32) - 1  # the bits of a position in a key that is sorted


def _axis(op: Any, value: Any, x: Any) -> int | None:
    """A dim that an operand says, where it is a number and x has a known rank that is open."""
    known = tf.get_static_value(value)
    if known is None or np.ndim(known) or x.shape.rank is None or x.shape.is_fully_defined():
        return None
    return int(known) % x.shape.rank


def _in_line(x: Any, values: Any, axis: int) -> Any:
    """Values of one dim so that they broadcast along that axis of x."""
    return tf.reshape(values, [-1 if d == axis else 1 for d in range(x.shape.rank)])


# ---- along a dim


@rule("Cumsum", "Cumprod")
def cumulated(op: Any, inputs: list[Any]) -> Any:
    """In turns, each of which adds what is twice as far away: as many as the logarithm of the length."""
    x, axis = inputs[0], _axis(op, inputs[1], inputs[0])
    if axis is None:
        return None
    adds = op.type == "Cumsum"
    n, back = size(x, axis), op.get_attr("reverse")
    line = tf.range(n)

    def moved(value: Any, far: Any) -> Any:
        """Each element from `far` places before it; those without one get 0, or 1 of products."""
        from_ = line + far if back else line - far
        inside = tf.logical_and(from_ >= 0, from_ < n)
        found = tf.gather(value, tf.where(inside, from_, 0), axis=axis)
        neutral = tf.zeros_like(found) if adds else tf.ones_like(found)
        return tf.where(_in_line(x, inside, axis), found, neutral)

    def turn(far: Any, value: Any) -> Any:
        other = moved(value, far)
        return 2 * far, value + other if adds else value * other

    _, found = tf.while_loop(lambda far, value: far < n, turn, [tf.constant(1), x], [tf.TensorShape([]), x.shape])
    return [moved(found, 1) if op.get_attr("exclusive") else found]


@rule("Roll")
def roll(op: Any, inputs: list[Any]) -> Any:
    """As Gather."""
    x = inputs[0]
    shifts, axes = (tf.get_static_value(one) for one in inputs[1:])
    if shifts is None or axes is None or x.shape.rank is None or x.shape.is_fully_defined():
        return None
    for shift, axis in zip(np.ravel(shifts).tolist(), np.ravel(axes).tolist(), strict=True):
        n = size(x, axis)
        x = tf.gather(x, tf.math.floormod(tf.range(n) - shift, tf.maximum(n, 1)), axis=axis)
    return [x]


@rule("MirrorPad")
def mirrored(op: Any, inputs: list[Any]) -> Any:
    """As Gather."""
    x, pairs = inputs[0], tf.get_static_value(inputs[1])
    if pairs is None or x.shape.rank is None or x.shape.is_fully_defined():
        return None
    twice = op.get_attr("mode") == b"SYMMETRIC"  # whether the elements at the ends come twice
    for axis, (low, high) in enumerate(pairs.tolist()):
        if low or high:
            n = size(x, axis)
            places = tf.range(n + (low + high)) - low
            places = tf.where(places < 0, -places - 1 if twice else -places, places)
            past = 2 * n - 1 - places if twice else 2 * n - 2 - places
            x = tf.gather(x, tf.where(places >= n, past, places), axis=axis)
    return [x]


@rule("ArgMax", "ArgMin")
def extreme(op: Any, inputs: list[Any]) -> Any:
    """The first position of the largest, or smallest, element."""
    x, axis = inputs[0], _axis(op, inputs[1], inputs[0])
    if axis is None or x.shape[axis] is not None:
        return None
    reduce = tf.reduce_max if op.type == "ArgMax" else tf.reduce_min
    line = _in_line(x, tf.range(size(x, axis)), axis)
    found = tf.where(tf.equal(x, reduce(x, axis, keepdims=True)), line, size(x, axis) - 1)
    return [tf.cast(tf.reduce_min(found, axis), op.outputs[0].dtype)]


@rule("TopKV2")
def largest(op: Any, inputs: list[Any]) -> Any:
    """Sorts numbers that hold an element and its position: what is equal stays in its order."""
    x, count = inputs
    if x.shape.rank is None or tf.get_static_value(count) is not None:
        return None
    if x.dtype in (tf.float32, tf.float16, tf.bfloat16):
        wide = tf.cast(x, tf.float32)
        bits = tf.bitcast(tf.where(tf.equal(wide, 0.0), 0.0, wide), tf.int32)  # -0 is equal to 0
        bits = tf.where(bits < 0, tf.bitwise.bitwise_xor(bits, 0x7fffffff), bits)
    elif x.dtype in (tf.int32, tf.int16, tf.int8, tf.uint16, tf.uint8):
        bits = x
    else:
        return None
    axis = x.shape.rank - 1
    order = -1 - tf.cast(bits, tf.int64)  # the largest first
    line = tf.cast(_in_line(x, tf.range(size(x, axis)), axis), tf.int64)
    places = tf.bitwise.bitwise_and(xla_sort(order * (LOW + 1) + line), LOW)
    starts, shape = [0] * (axis + 1), [*(size(x, d) for d in range(axis)), tf.reshape(count, [])]
    places = tf.cast(tf.slice(places, starts, tf.stack(shape)), tf.int32)
    values = tf.gather(x, places, axis=axis, batch_dims=axis)
    return [values, tf.cast(places, op.outputs[1].dtype)]


# ---- tables


@rule("OneHot")
def one_hot(op: Any, inputs: list[Any]) -> Any:
    """As a comparison with a range."""
    ids, depth, on, off = inputs
    axis = op.get_attr("axis")
    if ids.shape.rank is None or ids.shape.is_fully_defined():
        return None
    ids = tf.expand_dims(ids, axis)
    line = _in_line(ids, tf.cast(tf.range(depth), ids.dtype), axis % ids.shape.rank)
    return [tf.where(tf.equal(ids, line), on, off)]


@rule("Bucketize")
def bucketize(op: Any, inputs: list[Any]) -> Any:
    """The number of boundaries that are not above an element."""
    bounds = op.get_attr("boundaries")
    x = inputs[0]
    if not bounds:
        return [tf.zeros_like(x, tf.int32)]
    exact = tf.float64 if x.dtype in (tf.float64, tf.int32, tf.int64) else tf.float32
    reached = tf.cast(tf.expand_dims(x, -1), exact) >= tf.cast(tf.constant(bounds, tf.float32), exact)
    return [tf.reduce_sum(tf.cast(reached, tf.int32), -1)]


@rule("Minimum")
def limited(op: Any, inputs: list[Any]) -> Any:
    """min(a, max(b, x)) is a where a <= b: how many numbers a table has that is at least, and at most, so long."""
    for most, other in (inputs, inputs[::-1]):
        known = tf.get_static_value(most)
        if known is None or np.ndim(known) or other.op.type != "Maximum" or other.shape.rank != 0:
            continue
        least = [tf.get_static_value(one) for one in other.op.inputs]
        if any(one is not None and one >= known for one in least):
            return [most]
    return None


@rule("DenseBincount")
def bincount(op: Any, inputs: list[Any]) -> Any:
    """As a sum, or maximum, over a comparison with a range."""
    ids, count, weights = inputs
    if ids.shape.rank not in (1, 2) or weights.shape.rank is None or (
            weights.shape.num_elements() != 0 and weights.shape.rank != ids.shape.rank):
        return None
    met = tf.equal(tf.expand_dims(ids, -1), tf.cast(tf.range(count), ids.dtype))
    if op.get_attr("binary_output"):
        return [tf.cast(tf.reduce_any(met, -2), weights.dtype)]
    each: Any = tf.ones([], weights.dtype) if weights.shape.num_elements() == 0 else tf.expand_dims(weights, -1)
    return [tf.reduce_sum(tf.where(met, each, tf.zeros([], weights.dtype)), -2)]


@rule("LowerBound", "UpperBound")
def bound(op: Any, inputs: list[Any]) -> Any:
    """The number of sorted elements that are below a value, or not above it."""
    line, values = (tf.expand_dims(one, axis) for one, axis in zip(inputs, (1, 2), strict=True))
    met = line < values if op.type == "LowerBound" else line <= values
    return [tf.reduce_sum(tf.cast(met, op.outputs[0].dtype), -1)]


# ---- by several positions


@rule("GatherNd")
def gather_nd(op: Any, inputs: list[Any]) -> Any:
    """As Gather of the dims that positions are of, in a line."""
    x, places = inputs
    count = places.shape[-1] if places.shape.rank else None
    if x.shape.rank is None or not count:
        return None
    sizes = [size(x, d) for d in range(x.shape.rank)]
    at: Any = 0
    whole: Any = 1
    for d in range(count):
        inside = tf.clip_by_value(tf.gather(places, d, axis=-1), 0, tf.cast(sizes[d] - 1, places.dtype))
        at, whole = at * tf.cast(sizes[d], places.dtype) + inside, whole * sizes[d]
    return [tf.gather(tf.reshape(x, tf.stack([whole, *sizes[count:]])), at)]


@rule("MatrixDiagPartV3")
def diagonal(op: Any, inputs: list[Any]) -> Any:
    """One diagonal, as Gather."""
    x, which = inputs[0], tf.get_static_value(inputs[1])
    if which is None or np.size(which) != 1 or x.shape.rank is None or x.shape.is_fully_defined():
        return None
    shift = int(np.ravel(which)[0])
    rows, columns = size(x, -2), size(x, -1)
    below, right = max(-shift, 0), max(shift, 0)
    count = _above_zero(_smaller(rows - below, columns - right))
    outer = [size(x, d) for d in range(x.shape.rank - 2)]
    line = below * columns + right + tf.range(count) * (columns + 1)
    return [tf.gather(tf.reshape(x, tf.stack([*outer, rows * columns])), line, axis=-1)]


def _smaller(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else tf.minimum(a, b)


def _above_zero(a: Any) -> Any:
    return max(a, 0) if isinstance(a, int) else tf.maximum(a, 0)


# ---- pixels in the place of channels


@rule("SpaceToDepth", "DepthToSpace")
def blocks(op: Any, inputs: list[Any]) -> Any:
    """As Reshape and Transpose."""
    x, step = inputs[0], op.get_attr("block_size")
    if op.get_attr("data_format") != b"NHWC" or x.shape[3] is None:
        return None
    count, high, wide, channels = (size(x, d) for d in range(4))
    if op.type == "SpaceToDepth":
        parts: Sequence[Any] = [count, over(high, step), step, over(wide, step), step, channels]
        shape = [count, over(high, step), over(wide, step), channels * step * step]
    else:
        parts = [count, high, wide, step, step, channels // (step * step)]
        shape = [count, high * step, wide * step, channels // (step * step)]
    order = [0, 1, 3, 2, 4, 5]
    return [tf.reshape(tf.transpose(tf.reshape(x, tf.stack(parts)), order), tf.stack(shape))]
