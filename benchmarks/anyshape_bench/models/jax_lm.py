"""A small language model in plain JAX: embedding, two layers of causal attention and gelu, logits."""
from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

VOCABULARY, WIDTH, HEADS, LAYERS, LONGEST = 1000, 128, 4, 2, 512


def parameters(seed: int = 0) -> dict[str, Any]:
    """Random weights, arrays of numpy."""
    draw = np.random.default_rng(seed)

    def weight(*shape: int) -> Any:
        return (draw.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

    layer = lambda: {"norm": np.ones(WIDTH, np.float32), "qkv": weight(WIDTH, 3 * WIDTH),  # noqa: E731
                     "out": weight(WIDTH, WIDTH), "up": weight(WIDTH, 4 * WIDTH), "down": weight(4 * WIDTH, WIDTH)}
    return {"tokens": weight(VOCABULARY, WIDTH), "places": weight(LONGEST, WIDTH),
            "layers": [layer() for _ in range(LAYERS)], "logits": weight(WIDTH, VOCABULARY)}


def normed(x: Any, scale: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * scale


def logits(weights: dict[str, Any], tokens: Any) -> Any:
    """Of each token i32[batch, time]: f32[batch, time, VOCABULARY]."""
    batch, time = tokens.shape
    x = weights["tokens"][tokens] + weights["places"][:time]
    for layer in weights["layers"]:
        q, k, v = jnp.split(normed(x, layer["norm"]) @ layer["qkv"], 3, -1)
        q, k, v = (part.reshape(batch, time, HEADS, WIDTH // HEADS) for part in (q, k, v))
        found = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + found.reshape(batch, time, WIDTH) @ layer["out"]
        x = x + jax.nn.gelu(normed(x, layer["norm"]) @ layer["up"]) @ layer["down"]
    return normed(x, jnp.ones(WIDTH)) @ weights["logits"]
