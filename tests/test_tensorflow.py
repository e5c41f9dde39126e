"""The door from TensorFlow, where it is installed: sources, kinds of results, graphs, files, what is refused."""
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
tf: Any = pytest.importorskip("tensorflow", reason="the extra `tensorflow` is not installed")

import anyshape  # noqa: E402
from anyshape.base.errors import InputError, Unsupported  # noqa: E402


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def module() -> Any:
    made = tf.Module()
    made.weight = tf.Variable(numbers(8, 4))
    made.call = tf.function(lambda x, y: {"p": tf.matmul(x, made.weight) + y, "q": y * 2}, input_signature=[
        tf.TensorSpec([None, 8], name="x"), tf.TensorSpec([None, 4], name="y")])
    return made


def test_a_function_gives_the_callers_kind_in_graphs_too(module: Any, tmp_path: Path) -> None:
    fast = anyshape.compile_tensorflow(module.call)
    for rows in (3, 1, 7):
        x, y = numbers(rows, 8), numbers(rows, 4)
        wanted = module.call(x, y)
        found, kept = fast(x, y), fast(tf.constant(x), tf.constant(y))
        for key in ("p", "q"):
            assert isinstance(found[key], np.ndarray) and isinstance(kept[key], tf.Tensor)
            np.testing.assert_allclose(found[key], wanted[key], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(kept[key], wanted[key], rtol=1e-5, atol=1e-5)
    around = tf.function(lambda x, y: fast(x, y)["p"] + 1, autograph=False)
    np.testing.assert_allclose(around(x, y), wanted["p"] + 1, rtol=1e-5, atol=1e-5)
    with anyshape.load(anyshape.save(fast, tmp_path / "f.any"), trust_native=True) as loaded:
        np.testing.assert_allclose(loaded(x, y)["p"], wanted["p"], rtol=1e-5, atol=1e-5)

    def gradient(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(fast(x, y)["p"])
        return tape.gradient(total, x)

    with pytest.raises(Unsupported, match="no gradient"):
        tf.function(gradient, autograph=False)(tf.constant(x), tf.constant(y))


def test_a_saved_model_is_called_by_names(module: Any, tmp_path: Path) -> None:
    tf.saved_model.save(module, str(tmp_path / "m"), signatures=module.call)
    fast = anyshape.compile_tensorflow(tmp_path / "m")
    x, y = numbers(3, 8), numbers(3, 4)
    np.testing.assert_allclose(fast(x=x, y=y)["p"], module.call(x, y)["p"], rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="no signature other"):
        anyshape.compile_tensorflow(tmp_path / "m", signature="other")


def test_a_keras_model_with_open_sizes() -> None:
    import keras
    layers = keras.layers
    model = keras.Sequential([
        keras.Input((None, None, 3)), layers.Conv2D(4, 3, strides=2, padding="same", activation="relu"),
        layers.BatchNormalization(), layers.MaxPooling2D(3, 2, padding="same"), layers.GlobalAveragePooling2D(),
        layers.Dense(3)])
    fast = anyshape.compile_tensorflow(model)
    for shape in ((1, 9, 12, 3), (2, 16, 7, 3)):
        x = numbers(*shape)
        np.testing.assert_allclose(fast(x), np.asarray(model(x)), rtol=1e-4, atol=1e-5)


def test_dilated_windows_and_volumes_with_open_sizes() -> None:
    import keras
    layers = keras.layers
    texts = keras.Sequential([keras.Input((None, 6)), layers.Conv1D(4, 3, dilation_rate=2, padding="causal"),
                              layers.Conv1D(4, 3, dilation_rate=2)])
    images = keras.Sequential([keras.Input((None, None, 3)), layers.Conv2D(4, 3, dilation_rate=(2, 3), padding="same"),
                               layers.DepthwiseConv2D(2, dilation_rate=3, padding="same")])
    volumes = keras.Sequential([keras.Input((None, None, None, 2)), layers.Conv3D(3, (2, 3, 3), padding="same"),
                                layers.MaxPooling3D(2, padding="same"), layers.Conv3D(2, 2, strides=2),
                                layers.AveragePooling3D(2, padding="same")])
    for model, shapes in ((texts, ((2, 5, 6), (1, 18, 6))), (images, ((1, 7, 8, 3), (2, 16, 5, 3))),
                          (volumes, ((1, 6, 7, 8, 2), (2, 9, 6, 11, 2)))):
        fast = anyshape.compile_tensorflow(model)
        for shape in shapes:
            x = numbers(*shape)
            np.testing.assert_allclose(fast(x), np.asarray(model(x)), rtol=1e-4, atol=1e-5)


def test_blocks_that_no_convolution_takes_are_made_or_refused() -> None:
    def function(x: Any) -> Any:
        y = tf.raw_ops.SpaceToBatchND(input=x, block_shape=[2], paddings=[[0, 0]])
        return tf.raw_ops.BatchToSpaceND(input=tf.nn.relu(y), block_shape=[2], crops=[[0, 0]])

    fixed = tf.function(function, input_signature=[tf.TensorSpec([2, 4, 3])])
    x = numbers(2, 4, 3)
    try:
        np.testing.assert_allclose(anyshape.compile_tensorflow(fixed)(x), fixed(x))
    except Unsupported as error:
        assert "SpaceToBatchND" in str(error)


def test_the_block_of_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[1] / "docs" / "tensorflow.md").read_text("utf-8")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "block"}
    (tmp_path / "block.py").write_text(text.split("```py\n")[1].split("```")[0])
    exec(compile((tmp_path / "block.py").read_text(), str(tmp_path / "block.py"), "exec"), names)
    assert (tmp_path / "model.any").is_file()


def test_recurrent_layers_in_both_directions_and_repeated_rows() -> None:
    import keras
    layers = keras.layers
    texts = keras.Sequential([keras.Input((None, 6)), layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
                              layers.GRU(3)])
    images = keras.Sequential([keras.Input((None, None, 3)), layers.UpSampling2D(2),
                               layers.Conv2D(4, 3, padding="same")])
    for model, shapes in ((texts, ((2, 5, 6), (1, 1, 6), (3, 17, 6))), (images, ((1, 4, 5, 3), (2, 7, 3, 3)))):
        fast = anyshape.compile_tensorflow(model)
        for shape in shapes:
            x = numbers(*shape)
            np.testing.assert_allclose(fast(x), np.asarray(model(x)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("source", [3, "nowhere", tf.function(lambda x: x)])
def test_what_is_no_model_is_refused(source: Any) -> None:
    with pytest.raises(InputError):
        anyshape.compile_tensorflow(source)


def test_texts_are_refused() -> None:
    with pytest.raises(Unsupported):
        anyshape.compile_tensorflow(tf.function(tf.strings.length, input_signature=[tf.TensorSpec([None], tf.string)]))


def test_transposed_volumes_and_steps_of_an_open_length() -> None:
    import keras
    layers = keras.layers
    volumes = keras.Sequential([keras.Input((None, None, None, 2)),
                                layers.Conv3DTranspose(3, 3, strides=2, padding="same"),
                                layers.Conv3DTranspose(2, (1, 2, 3))])
    images = keras.Sequential([keras.Input((None, None, 3)), layers.Conv2DTranspose(4, 3, dilation_rate=2),
                               layers.Conv2DTranspose(4, 3, strides=2, padding="same", output_padding=0)])
    steps = keras.Sequential([keras.Input((None, 4, 3)), layers.TimeDistributed(layers.Conv1D(2, 3)),
                              layers.TimeDistributed(layers.Flatten()), layers.TimeDistributed(layers.Dense(5))])
    for model, shapes in ((volumes, ((1, 2, 3, 4, 2), (2, 3, 1, 2, 2))), (images, ((2, 4, 5, 3), (1, 6, 3, 3))),
                          (steps, ((2, 5, 4, 3), (3, 1, 4, 3), (1, 6, 4, 3)))):
        before = anyshape.stats()["programs"]
        fast = anyshape.compile_tensorflow(model)
        for shape in shapes:
            x = numbers(*shape)
            np.testing.assert_allclose(fast(x), np.asarray(model(x)), rtol=1e-4, atol=1e-5)
        assert anyshape.stats()["programs"] - before == 1


def test_elements_by_position_order_and_tables_of_open_sizes() -> None:
    def positions(x: Any) -> Any:
        square = tf.matmul(x, x, transpose_b=True)
        return (tf.roll(x, [1, -2], [0, 1]), tf.pad(x, [[0, 0], [1, 2]], mode="REFLECT"),
                tf.pad(x, [[1, 0], [1, 0]], mode="SYMMETRIC"), tf.argmax(x, 1), tf.argmin(x, 1, tf.int32),
                tf.linalg.diag_part(square), tf.linalg.diag_part(x, k=1), tf.math.erf(x),
                tf.gather_nd(x, tf.stack([tf.range(tf.shape(x)[0]), tf.zeros_like(x[:, 0], tf.int32)], 1)))

    def orders(x: Any) -> Any:
        top = tf.math.top_k(x, tf.shape(x)[1])
        return top.values, top.indices, tf.argsort(x, stable=True), tf.sort(x), tf.sort(tf.cast(x, tf.int32), axis=0)

    def tables(x: Any) -> Any:
        ids = tf.cast(tf.abs(x) * 2, tf.int32)
        return (tf.one_hot(ids, 3, axis=1), tf.raw_ops.Bucketize(input=x, boundaries=[-0.5, 0.0, 0.5]),
                tf.math.bincount(ids, minlength=5, maxlength=5, axis=-1),
                tf.math.bincount(ids, minlength=5, maxlength=5, axis=-1, binary_output=True),
                tf.searchsorted(tf.sort(x), x), tf.searchsorted(tf.sort(x), x, side="right"))

    def sums(x: Any) -> Any:
        return tf.cumsum(x, 1), tf.cumsum(x, 0, exclusive=True), tf.math.cumprod(x, 1, reverse=True)

    signature = [tf.TensorSpec([None, None])]
    for function in (positions, orders, tables, sums):
        wanted = tf.function(function, input_signature=signature, autograph=False)
        fast = anyshape.compile_tensorflow(wanted)
        for shape in ((3, 5), (4, 4), (2, 17)):
            x = np.round(numbers(*shape) * 2) / 2  # some are equal
            for have, want in zip(fast(x), wanted(x), strict=True):
                assert have.dtype == want.dtype.as_numpy_dtype
                np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


def test_layers_that_write_to_variables_are_refused() -> None:
    import keras
    model = keras.Sequential([keras.Input((None, None, 3)), keras.layers.RandomGrayscale()])
    with pytest.raises(Unsupported):
        anyshape.compile_tensorflow(model)
