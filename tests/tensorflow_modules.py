"""Writes tests/converted/*.mlirbc: modules that TensorFlow's converter made, with inputs and TensorFlow's results.

    python tests/tensorflow_modules.py         # with anyshape[tensorflow]

They are what the importer is tested on where TensorFlow is not installed.
"""
from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "converted"
# name -> (function of TensorFlow, shapes and dtypes of its arguments, sizes of calls by the letter in the shapes)
Case = tuple[Callable[..., Any], tuple[tuple[str, str], ...], tuple[dict[str, int], ...]]


def cases() -> dict[str, Case]:
    """All of them."""
    import tensorflow as tf

    draw = np.random.default_rng(0)
    weights = [tf.constant(draw.normal(size=shape).astype("f4") * 0.2) for shape in (
        (3, 3, 2, 4), (3, 3, 2, 2), (3, 3, 4, 2), (20, 8), (8, 8), (8, 24))]

    def shapes(x: Any) -> Any:
        s = tf.shape(x)
        return (tf.reshape(x, [s[1], s[0]]), tf.reshape(x, [-1]), tf.range(s[0]), tf.tile(x, [2, 3]), x[:, 1:], x[::2],
                x[..., -1], x[:, tf.newaxis], tf.reshape(x, [s[0] * s[1] // 1, 1]), tf.cast(s[0], tf.float32))

    def images(x: Any) -> Any:
        y = tf.nn.relu(tf.nn.conv2d(x, weights[0], 2, "SAME"))
        batch, high, wide = (tf.shape(x)[d] for d in range(3))
        up = tf.nn.conv2d_transpose(x, weights[2], tf.stack([batch, high * 2, wide * 2, 4]), 2)
        return (y, tf.nn.depthwise_conv2d(x, weights[1], [1, 2, 2, 1], "SAME"), up, tf.nn.max_pool2d(x, 3, 2, "SAME"),
                tf.nn.avg_pool2d(x, 3, 2, "SAME"), tf.image.resize(x, [5, 7]), tf.image.resize(x, [5, 7], "nearest"))

    def encoder(ids: Any) -> Any:
        x = tf.gather(weights[3], ids)
        q, k, v = tf.split(tf.einsum("btd,de->bte", x, weights[5]), 3, -1)
        mask = tf.range(tf.shape(x)[1])[:, None] >= tf.range(tf.shape(x)[1])
        scores = tf.where(mask, tf.matmul(q, k, transpose_b=True), -1e9)
        y = tf.nn.softmax(scores) @ v
        mean, variance = tf.nn.moments(y, [-1], keepdims=True)
        return tf.nn.gelu((y - mean) * tf.math.rsqrt(variance + 1e-5) @ weights[4])

    def loop(x: Any) -> Any:
        count = tf.constant(0)
        return tf.while_loop(lambda i, y: i < 6, lambda i, y: (i + 1, y * 1.5 + tf.cast(i, tf.float32)), (count, x))[1]

    def moved(a: Any, b: Any) -> Any:
        return (tf.where(a > b, a, b), tf.stack([a, b], 1), tf.concat([a, b], 0), tf.pad(a, [[1, 2], [0, 1]]),
                tf.reverse(a, [0]), tf.clip_by_value(a, -1.0, 1.0), *tf.unstack(b, axis=1))

    def reduced(x: Any) -> Any:
        return (tf.reduce_mean(x), tf.reduce_max(x, 0), tf.math.reduce_std(x, 1), tf.reduce_any(x > 0, 1),
                tf.argmax(x, 1), tf.sort(x, 1), *tf.math.top_k(x, 2))

    return {
        "broadcast": (lambda x, y: tf.nn.relu(x + y), (("b n", "f4"), ("n", "f4")), (
            {"b": 3, "n": 4}, {"b": 1, "n": 9})),
        "shapes": (shapes, (("b n", "f4"),), ({"b": 3, "n": 4}, {"b": 6, "n": 2})),
        "images": (images, (("b h w 2", "f4"),), ({"b": 1, "h": 9, "w": 8}, {"b": 3, "h": 12, "w": 7})),
        "encoder": (encoder, (("b t", "i4"),), ({"b": 2, "t": 7}, {"b": 1, "t": 1})),
        "loop": (loop, (("b", "f4"),), ({"b": 3}, {"b": 1})),
        "branch": (lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2, lambda: x - 1), (("b", "f4"),), (
            {"b": 3}, {"b": 2})),
        "moved": (moved, (("b 4", "f4"), ("b 4", "f4")), ({"b": 3}, {"b": 5})),
        "reduced": (reduced, (("b 5", "f4"),), ({"b": 3}, {"b": 1})),
    }


def drawn(kinds: tuple[tuple[str, str], ...], sizes: dict[str, int]) -> list[np.ndarray]:
    """Arguments of a call; the same at every run."""
    draw = np.random.default_rng(7)
    found = []
    for shape, dtype in kinds:
        dims = [sizes[n] if n in sizes else int(n) for n in shape.split()]
        values = draw.normal(size=dims) if dtype == "f4" else draw.integers(0, 20, dims)
        found.append(values.astype(dtype))
    return found


def functions() -> Iterator[tuple[str, Any, Case]]:
    """Each with its sizes left open."""
    import tensorflow as tf
    for name, (function, kinds, calls) in cases().items():
        specs = [tf.TensorSpec([int(n) if n.isdigit() else None for n in shape.split()], np.dtype(dtype).name)
                 for shape, dtype in kinds]
        yield name, tf.function(function, input_signature=specs), (function, kinds, calls)


def main() -> int:
    """Writes the files."""
    import tensorflow as tf

    from anyshape.frontend.importer_tensorflow.callable import module_of
    FOLDER.mkdir(exist_ok=True)
    for name, function, (_, kinds, calls) in functions():
        with tempfile.TemporaryDirectory() as scratch:
            made, source = module_of(function, "serving_default", Path(scratch))
        (FOLDER / f"{name}.mlirbc").write_bytes(made)
        arrays = {}
        for call, sizes in enumerate(calls):
            values = drawn(kinds, sizes)
            arrays.update({f"{call}.{key}": value for key, value in zip(source.arguments, values, strict=True)})
            results = tf.nest.flatten(function(*values))
            arrays.update({f"{call}.{key}": one.numpy() for key, one in zip(source.results, results, strict=True)})
        np.savez(FOLDER / f"{name}.npz", **arrays)
        print(name, len(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
