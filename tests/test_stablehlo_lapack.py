"""Linear algebra of JAX: LAPACK's routines, which it calls on the CPU, against JAX."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.lax import linalg

import anyshape
from anyshape.base.errors import Unsupported


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def positive(*shape: int) -> np.ndarray:
    a = drawn(*shape)
    return a @ np.swapaxes(a, -1, -2) + 5 * np.eye(shape[-1], dtype=np.float32)


def solved(x: Any) -> Any:
    return linalg.triangular_solve(x, x[..., :2], left_side=True, lower=True), linalg.triangular_solve(
        x, x, left_side=False, lower=False, transpose_a=True, unit_diagonal=True)


CASES: dict[str, tuple[Callable[..., Any], Callable[..., np.ndarray]]] = {
    "cholesky": (linalg.cholesky, positive),  # with the other triangle, which JAX leaves as it was
    "upper": (lambda x: jnp.linalg.cholesky(x, upper=True), positive),
    "triangular_solve": (solved, positive),
    "qr": (jnp.linalg.qr, drawn),
    "eigh": (jnp.linalg.eigh, positive),
    "svd": (lambda x: jnp.linalg.svd(x, full_matrices=False), drawn),
    "lu": (linalg.lu, drawn),
    "solve": (lambda x: jnp.linalg.solve(x, x[..., :1]), positive),
}


@pytest.mark.parametrize("name", CASES)
def test_as_jax(name: str) -> None:
    """One program for all sizes, but where pivots become a permutation: JAX does that by a loop over the rows."""
    function, make = CASES[name]
    fast = anyshape.jax.jit(function, strict=True)
    before = anyshape.stats()["programs"]
    for shape in ((2, 5, 5), (3, 7, 7), (1, 4, 4)):
        x = make(*shape)
        for found, wanted in zip(jax.tree.leaves(fast(x)), jax.tree.leaves(function(x)), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    if name not in ("lu", "solve"):
        assert anyshape.stats()["programs"] == before + 1


def test_a_matrix_that_fails_is_nan_as_in_jax() -> None:
    fast = anyshape.jax.jit(jnp.linalg.cholesky, strict=True)
    x = np.stack([positive(3, 3), -np.eye(3, dtype=np.float32)])
    found = fast(x)
    np.testing.assert_allclose(found, jnp.linalg.cholesky(x), rtol=1e-5)
    assert np.isnan(found[1]).any() and not np.isnan(found[0]).any()


@pytest.mark.parametrize("full", [False, True])
def test_matrices_of_unequal_sides(full: bool) -> None:
    for shape in ((2, 7), (7, 2)):
        x = drawn(*shape)
        for function in (lambda x: jnp.linalg.svd(x, full_matrices=full), lambda x: jnp.linalg.qr(
                x, mode="complete" if full else "reduced")):
            exported = jax.export.export(jax.jit(function))(x)
            for found, wanted in zip(anyshape.compile_jax(exported)(x), function(x), strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_of_nothing_and_what_a_step_refuses() -> None:
    def convolved(x: Any, kernel: Any) -> Any:
        return lax.conv_general_dilated(x, kernel, (1, 1), "VALID")

    fast = anyshape.jax.jit(convolved, strict=True)
    fast(drawn(1, 3, 12, 12), drawn(2, 3, 5, 5))
    with pytest.raises(Unsupported) as error:
        fast(drawn(2, 3, 9, 10), drawn(3, 3, 10, 5))
    assert all((error.value.what, error.value.why, error.value.do))
    x = np.zeros((4, 0, 6), np.float32)
    for kind in (jnp.fft.fft2, jnp.fft.rfft2):
        exported = jax.export.export(jax.jit(lambda x, kind=kind: lax.fft(
            lax.complex(x, x), "FFT", x.shape[-2:]) if kind is jnp.fft.fft2 else lax.fft(x, "RFFT", x.shape[-2:])))(x)
        found = anyshape.compile_jax(exported)(x)
        assert found.shape == exported.out_avals[0].shape and found.dtype == np.complex64
