"""A Keras model, by its JAX backend: one program for all batches and lengths, saved to a file that numpy alone runs.

    pip install 'anyshape[jax]' keras
    python examples/keras_model.py
"""
from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from jax import export
from jax import numpy as jnp

import anyshape

WORDS, WIDTH = 100, 32


def encoder() -> Any:
    """A transformer block over token ids i32[batch, length], and a class for each sequence."""
    ids = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(WORDS, WIDTH)(ids)
    y = keras.layers.LayerNormalization()(x)
    x = x + keras.layers.MultiHeadAttention(4, WIDTH // 4)(y, y)
    y = keras.layers.Dense(4 * WIDTH, activation="gelu")(keras.layers.LayerNormalization()(x))
    x = x + keras.layers.Dense(WIDTH)(y)
    return keras.Model(ids, keras.layers.Dense(5, activation="softmax")(keras.layers.GlobalAveragePooling1D()(x)))


def compiled(model: Any) -> Any:
    """The model's inference as one program, its weights inside."""
    trained, fixed = ([variable.value for variable in found]
                      for found in (model.trainable_variables, model.non_trainable_variables))

    def call(ids: Any) -> Any:
        return model.stateless_call(trained, fixed, ids, training=False)[0]

    batch, length = export.symbolic_shape("batch, length")
    return anyshape.compile_jax(export.export(jax.jit(call))(jax.ShapeDtypeStruct((batch, length), jnp.int32)))


def main() -> int:
    """Compiles, saves, loads, and compares with Keras; 0: the same at all sizes."""
    keras.utils.set_random_seed(0)
    model = encoder()
    fast = compiled(model)
    with tempfile.TemporaryDirectory() as folder:
        file = anyshape.save(fast, Path(folder) / "encoder.any")
        with anyshape.load(file, trust_native=True) as loaded:
            for shape in ((1, 1), (3, 17), (2, 120)):
                ids = np.random.default_rng(0).integers(0, WORDS, shape).astype(np.int32)
                difference = float(np.abs(loaded(ids) - np.asarray(model(ids))).max())
                print(f"{shape[0]}x{shape[1]}: differs from Keras by {difference:.1e} at most")
                if not difference < 1e-5:
                    return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
