"""Attention that graphs of ours write out, as JAX and ONNX do, becomes one op wherever that gives the same numbers."""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import anyshape

DRAW = np.random.default_rng(0)
LEAST = float(jnp.finfo(jnp.float32).min)
INFINITE = -math.inf


def drawn(*shape: int) -> np.ndarray:
    return DRAW.normal(size=shape).astype(np.float32)


def softmax(scores: Any) -> Any:
    """Over the last dim, with words of its own."""
    lifted = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return lifted / lifted.sum(-1, keepdims=True)


def plain(q: Any, k: Any, v: Any) -> Any:
    return softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k) / 3.0) @ v


def lengths_first(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * 0.3, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def one_head(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(q @ k.T) @ v


def keys_first(q: Any, k: Any, v: Any) -> Any:
    """Scores whose rows are keys."""
    return jnp.einsum("bkq,bkd->bqd", jax.nn.softmax(k @ q.transpose(0, 2, 1), 1), v)


def triangle(q: Any, k: Any, v: Any) -> Any:
    seen = jnp.tril(jnp.ones((q.shape[2], k.shape[2]), bool))
    return jax.nn.softmax(jnp.where(seen, q @ k.transpose(0, 1, 3, 2), INFINITE)) @ v


def grouped(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def repeated(q: Any, k: Any, v: Any) -> Any:
    """Heads of keys that are repeated for the queries of each."""
    k, v = (jnp.repeat(one, 2, axis=2) for one in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q / 3.0, k) - jnp.arange(k.shape[1], dtype=jnp.float32)
    return jnp.einsum("bhqk,bkhd->bqhd", softmax(scores), v)


def one_head_of_keys(q: Any, k: Any, v: Any) -> Any:
    return jnp.einsum("bhnm,bmd->bhnd", softmax(jnp.einsum("bhnd,bmd->bhnm", q, k)), v)


def batches(q: Any, k: Any, v: Any) -> Any:
    """Three leading dims, of which the products have others first."""
    return jnp.einsum("xhbqk,bxhkd->bxqhd", jax.nn.softmax(jnp.einsum("bxhqd,bxhkd->xhbqk", q, k)), v)


def padded(q: Any, k: Any, v: Any, seen: Any) -> Any:
    scores = jnp.where(seen[:, None, None, :], q @ k.transpose(0, 1, 3, 2), LEAST)
    return jax.nn.softmax(scores * 0.5) @ v


def padded_infinite(q: Any, k: Any, v: Any, seen: Any) -> Any:
    scores = jnp.where(seen[:, None, None, :], q @ k.transpose(0, 1, 3, 2), INFINITE)
    return softmax(scores) @ v


def padded_far(q: Any, k: Any, v: Any, seen: Any) -> Any:
    return softmax(jnp.where(seen[:, None, None, :], q @ k.transpose(0, 1, 3, 2) * 0.5, -1e9)) @ v


def added(q: Any, k: Any, v: Any, seen: Any) -> Any:
    scores = 0.5 * (q @ k.transpose(0, 1, 3, 2)) + jnp.where(seen, 0.0, INFINITE)[:, None, None, :]
    return softmax(scores) @ v


def both(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """A mask of the future, and what is added."""
    places = jnp.arange(k.shape[2])
    scores = q @ k.transpose(0, 1, 3, 2) + jnp.where(seen, 0.0, -1e4)[:, None, None, :]
    return softmax(jnp.where(jnp.arange(q.shape[2])[:, None] >= places, scores, INFINITE)) @ v


FOUR, FIRST = ("b h n d", "b h m d"), ("b n h d", "b m h d")
FORMS: tuple[tuple[Callable[..., Any], tuple[str, str]], ...] = (
    (plain, FOUR), (lengths_first, FIRST), (one_head, ("n d", "m d")), (keys_first, ("b n d", "b m d")),
    (triangle, FOUR), (grouped, ("b n g d", "b n h d")), (repeated, ("b n g d", "b m h d")),
    (one_head_of_keys, ("b h n d", "b m d")), (batches, ("b x h n d", "b x h m d")),
    (padded, FOUR), (padded_infinite, FOUR), (padded_far, FOUR), (added, FOUR), (both, FOUR))
MASKED = (padded, padded_infinite, padded_far, added, both)
SIZES = ({"b": 2, "n": 5, "m": 7}, {"b": 1, "n": 2, "m": 31}, {"b": 3, "n": 1, "m": 1}, {"b": 2, "n": 67, "m": 3})
FIXED = {"h": 3, "d": 8, "g": 6, "x": 2}


def compiled(form: Callable[..., Any], words: tuple[str, str]) -> Any:
    shapes = [", ".join(str(FIXED.get(name, name)) for name in text.split()) for text in (*words, words[1])]
    return anyshape.jax.jit(form, shapes=(*shapes, *(["b, m"] if form in MASKED else [])), strict=True)


def inputs_of(form: Callable[..., Any], words: tuple[str, str], sizes: dict[str, int],
              lost: bool = False) -> list[np.ndarray]:
    """Queries, keys, values and a mask of bools; `lost`: the first of the batch has no key."""
    known = sizes | FIXED
    query, key = (tuple(known[name] for name in text.split()) for text in words)
    inputs = [drawn(*query), drawn(*key), drawn(*key)]
    if form in MASKED:
        seen = DRAW.random((sizes["b"], sizes["m"])) > 0.3
        seen[:, 0] = True
        seen[:1] &= not lost
        inputs.append(seen)
    return inputs


def attentions(fast: Any) -> list[Any]:
    return [one for one in fast.explain().attentions if one.taken]


def near(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(wanted, np.float32), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("form, words", FORMS, ids=lambda one: getattr(one, "__name__", ""))
def test_forms(form: Callable[..., Any], words: tuple[str, str]) -> None:
    before = anyshape.stats()["programs"]
    fast = compiled(form, words)
    for sizes in SIZES:
        inputs = inputs_of(form, words, sizes)
        near(fast(*inputs), form(*inputs))
    assert len(attentions(fast)) == 1 and anyshape.stats()["programs"] - before == 1
    assert form in (both, triangle) or "m*n" not in str(fast.explain().programs[0].arena)
    if form in MASKED:
        inputs = inputs_of(form, words, SIZES[0], lost=True)
        near(fast(*inputs), form(*inputs))  # NaN where it has NaN, else the mean of the values


def returned(q: Any, k: Any, v: Any) -> Any:
    weights = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2))
    return weights @ v, weights


def near_fill(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(jnp.where(jnp.arange(k.shape[2]) < 2, q @ k.transpose(0, 1, 3, 2), -3.0)) @ v


def along_rows(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(q @ k.transpose(0, 1, 3, 2), 2) @ v


def over_heads(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(q @ k.transpose(0, 1, 3, 2), 1) @ v


def narrow(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(q @ k.transpose(0, 1, 3, 2)) @ v[..., :5]


def capped(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(jnp.tanh(q @ k.transpose(0, 1, 3, 2))) @ v


def other_top(q: Any, k: Any, v: Any) -> Any:
    """What is taken off is not the largest score of the row."""
    scores = q @ k.transpose(0, 1, 3, 2)
    lifted = jnp.exp(scores - scores.max(-2, keepdims=True))
    return lifted / lifted.sum(-1, keepdims=True) @ v


def dropped(q: Any, k: Any, v: Any) -> Any:
    weights = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2))
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, weights.shape)
    return jnp.where(kept, weights / 0.5, 0.0) @ v


@pytest.mark.parametrize("form", [returned, near_fill, along_rows, over_heads, narrow, capped, other_top, dropped],
                         ids=lambda form: form.__name__)
def test_what_is_left_as_it_is(form: Callable[..., Any]) -> None:
    fast = compiled(form, FOUR)
    inputs = inputs_of(form, FOUR, SIZES[0])
    for found, wanted in zip(jax.tree.leaves(fast(*inputs)), jax.tree.leaves(form(*inputs)), strict=True):
        near(found, wanted)
    assert not attentions(fast)


def test_what_is_no_number_goes_where_it_went() -> None:
    """Queries, keys and values that are not finite; rows and keys that have none of them stay as they are."""
    fast = compiled(plain, FOUR)
    for number in (math.nan, math.inf, -math.inf):
        for at in range(3):
            inputs = inputs_of(plain, FOUR, SIZES[0])
            inputs[at][0, 1, 2, 3] = number
            near(fast(*inputs), plain(*inputs))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float64])
def test_dtypes(dtype: Any) -> None:
    with jax.enable_x64(dtype == jnp.float64):
        form, words = (grouped, ("b n g d", "b n h d")) if dtype == jnp.bfloat16 else (plain, FOUR)
        fast, given = compiled(form, words), inputs_of(form, words, SIZES[0])
        found, near_by = fast(*(jnp.asarray(one, dtype) for one in given)), 1e-5 if dtype == jnp.float64 else 0.03
        assert found.dtype == dtype and len(attentions(fast)) == 1
        np.testing.assert_allclose(np.asarray(found, np.float64), np.asarray(form(*given)), near_by, near_by)


def gradients_of(form: Callable[..., Any], given: list[Any]) -> list[np.ndarray]:
    def total(*some: Any) -> Any:
        found = form(*some, *given[3:])
        return (found * jnp.linspace(0.5, 1.5, found.size, dtype=found.dtype).reshape(found.shape)).sum()

    return [np.asarray(one, np.float64) for one in jax.grad(total, (0, 1, 2))(*given[:3])]


@pytest.mark.parametrize("form, words", [
    pytest.param(*one, id=one[0].__name__, marks=() if one[0] in (grouped, padded, padded_infinite, one_head_of_keys)
                 else pytest.mark.full) for one in FORMS])
def test_gradients(form: Callable[..., Any], words: tuple[str, str]) -> None:
    """A graph of gradients has one op forward and one backward, and no scores; rows without a key are the program's."""
    fast = compiled(form, words)
    for sizes in SIZES:
        for lost in (False, True) if form in MASKED else (False,):
            given = inputs_of(form, words, sizes, lost)
            for found, wanted in zip(gradients_of(fast, given), gradients_of(form, given), strict=True):
                near(found, wanted)
    backward = fast.explain().programs[-1]
    ops = [call.target for call in backward.libraries if "attention" in call.target]
    assert ops == ([] if form is both else ["attention", "attention_backward"]), ops  # it fills, and adds what is data
    assert form in (both, triangle) or "m*n" not in str(backward.arena)


def test_gradients_with_the_result() -> None:
    """A step that has both takes the result of the same op."""
    def step(q: Any, k: Any, v: Any) -> Any:
        return jax.value_and_grad(lambda *some: (plain(*some) ** 2).sum(), (0, 1, 2))(q, k, v)

    fast, given = compiled(step, FOUR), inputs_of(plain, FOUR, SIZES[0])
    for found, wanted in zip(jax.tree.leaves(fast(*given)), jax.tree.leaves(step(*given)), strict=True):
        near(found, wanted)
    ops = [call.target for call in fast.explain().programs[0].libraries]
    assert [op for op in ops if op != "matmul"] == ["attention", "attention_backward"], ops


@pytest.mark.parametrize("form", [near_fill, capped, other_top, dropped], ids=lambda form: form.__name__)
def test_gradients_that_are_left(form: Callable[..., Any]) -> None:
    fast, given = compiled(form, FOUR), inputs_of(form, FOUR, SIZES[0])
    for found, wanted in zip(gradients_of(fast, given), gradients_of(form, given), strict=True):
        near(found, wanted)
    assert not any("attention" in call.target for one in fast.explain().programs for call in one.libraries)


def test_gradients_in_half_precision() -> None:
    fast, given = compiled(padded, FOUR), inputs_of(padded, FOUR, SIZES[3])
    exact = gradients_of(padded, given)
    half = [jnp.asarray(one, jnp.bfloat16) for one in given[:3]] + given[3:]
    for found, wanted, best in zip(gradients_of(fast, half), gradients_of(padded, half), exact, strict=True):
        assert np.abs(found - best).max() <= 2 * np.abs(wanted - best).max() + 1e-3
    assert any("attention_backward" in call.target for call in fast.explain().programs[-1].libraries)
