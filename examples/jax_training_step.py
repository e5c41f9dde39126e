"""A training step of JAX, compiled once for all batch sizes and lengths.

    python examples/jax_training_step.py --steps 30

`jax.jit` compiles again at each new shape; here the step is exported with symbolic sizes, and one program serves all of
them. Loss, gradients and the update by momentum are all in it.
"""
from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import jax
import numpy as np
from jax import export
from jax import numpy as jnp

import anyshape

WORDS, WIDTH = 50, 32


def parameters(seed: int = 0) -> dict[str, Any]:
    """Weights of a small language model."""
    draw = np.random.default_rng(seed)
    shapes = {"embed": (WORDS, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH), "out": (WIDTH, WORDS)}
    return {name: (draw.normal(size=shape) * shape[0] ** -0.5).astype(np.float32) for name, shape in shapes.items()}


def loss(weights: dict[str, Any], tokens: Any) -> Any:
    """The mean cross entropy of the next token. tokens i32[batch, length]."""
    x = weights["embed"][tokens[:, :-1]]
    x = x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]
    x = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    scores = jax.nn.log_softmax(x @ weights["out"], -1)
    return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], -1))


def step(weights: dict[str, Any], momentum: dict[str, Any], tokens: Any) -> tuple[Any, Any, Any]:
    """One step: new weights, new momentum, the loss before it."""
    value, gradients = jax.value_and_grad(loss)(weights, tokens)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum, value


def compiled_step(weights: dict[str, Any]) -> Any:
    """The step for batches of every size."""
    batch, length = export.symbolic_shape("batch, length", constraints=["length >= 2"])
    like = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), weights)
    return anyshape.compile_jax(export.export(jax.jit(step))(
        like, like, jax.ShapeDtypeStruct((batch, length), jnp.int32)))


def main(words: list[str] | None = None) -> int:
    """Trains on sequences that count up, at another shape in each step; 0: it has learned, as JAX does."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="default: %(default)s")
    steps = parser.parse_args(words).steps
    draw = np.random.default_rng(1)
    weights = parameters()
    momentum = {name: np.zeros_like(weight) for name, weight in weights.items()}
    begin = time.perf_counter()
    fast = compiled_step(weights)
    print(f"compiled once in {time.perf_counter() - begin:.1f} s")
    own = weights, momentum
    losses = []
    for number in range(steps):
        shape = int(draw.integers(2, 9)), int(draw.integers(3, 40))
        tokens = ((draw.integers(0, WORDS, (shape[0], 1)) + np.arange(shape[1])) % WORDS).astype(np.int32)
        before = own
        *own, value = fast(*own, tokens)
        losses.append(float(value))
        if number == 1:  # the second one, whose momentum is not zero
            wanted, _, its_loss = jax.jit(step)(*before, tokens)
            same = np.isclose(losses[-1], float(its_loss), rtol=1e-4)
            if not same or any(not np.allclose(own[0][name], wanted[name], rtol=1e-3, atol=1e-5) for name in wanted):
                print(f"step {number}: loss {losses[-1]}, JAX has {float(its_loss)}")
                return 1
        if number % 10 == 0:
            print(f"step {number}, batch {shape}: loss {losses[-1]:.3f}")
    print(f"loss {losses[0]:.3f} --> {losses[-1]:.3f}, programs: {anyshape.stats()['programs']}")
    return 0 if losses[-1] < 0.7 * losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
