"""Linear algebra, by numpy's LAPACK. Signs of vectors, and their basis where values are equal, are LAPACK's choice,
which another build of it makes otherwise; a matrix that fails says so in `info`, as in PyTorch."""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from anyshape.base.errors import InputError, VerifyError

Array = np.ndarray[Any, Any]
_WORDS = {  # of a matrix that an operation does not take, by a part of the operation's name
    "inv": "it is singular: the diagonal element {} of its factor is zero", "solve": "it is singular",
    "cholesky": "it is not positive-definite: its leading minor of order {} is not",
    "svd": "it is ill-conditioned or has too many repeated singular values",
    "eig": "it is ill-conditioned or has too many repeated eigenvalues",
    "lu_factor": "it is singular: the diagonal element {} of its factor is zero",
}


def _turned(x: Array) -> Array:
    return x.swapaxes(-1, -2)


def _each(x: Array, run: Callable[[Array], Array], failed: Callable[[Array], int]) -> tuple[Array, Array]:
    """`run` of the matrices x [..., N, M], and which failed: the result's elements are NaN there. failed: what `info`
    is for a matrix."""
    info = np.zeros(x.shape[:-2], np.int32)
    try:
        return run(x), info
    except np.linalg.LinAlgError:
        found = np.full(x.shape, np.nan, x.dtype)
    for place in np.ndindex(*x.shape[:-2]):
        try:
            found[place] = run(x[place])
        except np.linalg.LinAlgError:
            info[place] = failed(x[place])
    return found, info


def factors(x: Array, pivot: bool = True) -> tuple[Array, Array, Array]:
    """The factors of the matrices x [..., N, M] with partial pivoting: both in one [..., N, M], which row each row was
    exchanged with, from 1 [..., min(N, M)], and the first diagonal element that is zero, from 1; 0 for none [...]."""
    n, m = x.shape[-2:]
    lu = x.reshape(math.prod(x.shape[:-2]), n, m).copy()
    every = np.arange(len(lu))
    pivots = np.zeros((len(lu), min(n, m)), np.int32)
    info = np.zeros(len(lu), np.int32)
    for k in range(min(n, m)):
        row = k + np.abs(lu[:, k:, k]).argmax(-1) if pivot else np.full(len(lu), k)
        pivots[:, k] = row + 1
        lu[every, k], lu[every, row] = lu[every, row], lu[every, k]
        at = lu[:, k, k]
        info[(at == 0) & (info == 0)] = k + 1
        lu[:, k + 1:, k] /= np.where(at == 0, 1, at)[:, None]
        lu[:, k + 1:, k + 1:] -= lu[:, k + 1:, k, None] * lu[:, None, k, k + 1:]
    lines = x.shape[:-2]
    return lu.reshape(x.shape), pivots.reshape(*lines, min(n, m)), info.reshape(lines)


def _factors_of_pytorch() -> Array:
    """In place of factors that only gradients read. PyTorch factors some matrices and transposes others before."""
    raise VerifyError("the factors of a matrix cannot be had without PyTorch", do="use torch.linalg.lu_factor",
                      why="operators for solutions and determinants make them for gradients alone")


def _singular(x: Array) -> int:
    return int(factors(x)[2]) or x.shape[-1]  # LAPACK met a zero where other roundings did not


def inverse(x: Array, check_errors: bool = False) -> tuple[Array, Array]:
    """aten.linalg_inv_ex: the inverse, and info."""
    return _raised("linalg.inv", check_errors, *_each(x, np.linalg.inv, _singular))


def solve(a: Array, b: Array, left: bool = True, check_errors: bool = False) -> tuple[Any, ...]:
    """aten._linalg_solve_ex: the solution, what makes factors and exchanged rows, info."""
    is_vector = b.ndim == 1 or b.shape == a.shape[:-1]
    right = b[..., None] if is_vector else b
    lines = np.broadcast_shapes(a.shape[:-2], right.shape[:-2])
    of = np.broadcast_to(a if left else _turned(a), (*lines, *a.shape[-2:]))
    right = right if left else _turned(right)
    right = np.broadcast_to(right, (*lines, *right.shape[-2:]))
    try:
        found, info = np.linalg.solve(of, right), np.zeros(a.shape[:-2], np.int32)
    except np.linalg.LinAlgError:
        found, info = np.full(right.shape, np.nan, np.result_type(a, b)), factors(a)[2]
        for place in np.ndindex(*lines):
            if not np.broadcast_to(info, lines)[place]:
                found[place] = np.linalg.solve(of[place], right[place])
    found = found if left else _turned(found)
    return _raised("linalg.solve", check_errors, found[..., 0] if is_vector else found,
                   _factors_of_pytorch, _factors_of_pytorch, info)


def det(x: Array) -> tuple[Any, ...]:
    """aten._linalg_det: the determinant, what makes factors and exchanged rows."""
    return np.asarray(np.linalg.det(x)), _factors_of_pytorch, _factors_of_pytorch


def slogdet(x: Array) -> tuple[Any, ...]:
    """aten._linalg_slogdet: the determinant's sign, its logarithm, what makes factors and exchanged rows."""
    sign, log = np.linalg.slogdet(x)
    return np.asarray(sign), np.asarray(log), _factors_of_pytorch, _factors_of_pytorch


def _not_positive(x: Array) -> int:
    """The order of the first leading minor of x [N, N] that is not positive-definite."""
    good, bad = 0, x.shape[-1]
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            np.linalg.cholesky(x[:middle, :middle])
            good = middle
        except np.linalg.LinAlgError:
            bad = middle
    return bad


def cholesky(x: Array, upper: bool = False, check_errors: bool = False) -> tuple[Array, Array]:
    """aten.linalg_cholesky_ex: the factor, of the triangle that is named, and info."""
    lower = np.conj(_turned(x)) if upper else x
    found, info = _each(lower, np.linalg.cholesky, _not_positive)
    return _raised("linalg.cholesky", check_errors, np.conj(_turned(found)) if upper else found, info)


def _triangle(x: Array, upper: bool, unit: bool = False) -> Array:
    found = np.triu(x) if upper else np.tril(x)
    return np.where(np.eye(x.shape[-1], dtype=np.bool_), 1, found).astype(x.dtype) if unit else found


def solve_triangular(a: Array, b: Array, upper: bool, left: bool = True, unitriangular: bool = False) -> Array:
    """aten.linalg_solve_triangular."""
    a = _triangle(a, upper, unitriangular)
    if not left:
        return _turned(solve_triangular(_turned(a), _turned(b), not upper))
    n = a.shape[-1]
    found = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), *b.shape[-2:]), np.result_type(a, b))
    with np.errstate(divide="ignore", invalid="ignore"):
        for row in (reversed(range(n)) if upper else range(n)):  # substitution: a zero gives infinities, as in PyTorch
            found[..., row, :] = (b[..., row, :] - (a[..., row, None, :] @ found)[..., 0, :]) / a[..., row, row, None]
    return found


def cholesky_solve(b: Array, factor: Array, upper: bool = False) -> Array:
    """aten.cholesky_solve."""
    first = np.conj(_turned(factor)) if upper else factor
    return solve_triangular(np.conj(_turned(first)), solve_triangular(first, b, False), True)


def cholesky_inverse(factor: Array, upper: bool = False) -> Array:
    """aten.cholesky_inverse."""
    return cholesky_solve(np.broadcast_to(np.eye(factor.shape[-1], dtype=factor.dtype), factor.shape), factor, upper)


def qr(x: Array, mode: str = "reduced") -> tuple[Array, Array]:
    """aten.linalg_qr: with mode "r" the first result is empty."""
    if mode == "r":
        return np.zeros(0, x.dtype), np.asarray(np.linalg.qr(x, "r"))
    q, r = np.linalg.qr(x, "complete" if mode == "complete" else "reduced")
    return q, r


def svd(x: Array, full_matrices: bool = False, compute_uv: bool = True, *,
        driver: str | None = None) -> tuple[Any, ...]:
    """aten._linalg_svd: left vectors, values, right vectors; without vectors two empty results."""
    if not compute_uv:
        return np.zeros(0, x.dtype), np.linalg.svd(x, compute_uv=False), np.zeros(0, x.dtype)
    return tuple(np.linalg.svd(x, full_matrices))


def eigh(x: Array, triangle: str = "L", compute_v: bool = True) -> tuple[Array, Array]:
    """aten._linalg_eigh: values, and vectors; without them an empty result."""
    if not np.isfinite(x).all():
        raise InputError("linalg.eigh does not take this matrix", why="it holds numbers that are not finite",
                         do="check what it is computed from")
    if not compute_v:
        return np.linalg.eigvalsh(x, "U" if triangle == "U" else "L"), np.zeros(0, x.dtype)
    values, vectors = np.linalg.eigh(x, "U" if triangle == "U" else "L")
    return values, vectors


def eig(x: Array) -> tuple[Array, Array]:
    """aten.linalg_eig."""
    values, vectors = np.linalg.eig(x)
    return values, vectors


def lu_unpack(lu: Array, pivots: Array, unpack_data: bool = True, unpack_pivots: bool = True
              ) -> tuple[Array, Array, Array]:
    """aten.lu_unpack: the permutation, the lower and the upper factor; empty ones where they are not wanted."""
    n, m = lu.shape[-2:]
    k = min(n, m)
    nothing = np.zeros(0, lu.dtype)
    lower = _triangle(lu[..., :k], False, True) if unpack_data and n == k else np.where(
        np.eye(n, k, dtype=np.bool_), 1, np.tril(lu[..., :k], -1)).astype(lu.dtype) if unpack_data else nothing
    upper = np.triu(lu[..., :k, :]) if unpack_data else nothing
    if not unpack_pivots:
        return nothing, lower, upper
    return _turned(np.eye(n, dtype=lu.dtype)[_exchanged(pivots, n)]), lower, upper


def _exchanged(pivots: Array, n: int) -> Array:
    """Which row [..., N] each row of a factored matrix was."""
    rows = np.broadcast_to(np.arange(n), (*pivots.shape[:-1], n)).copy()
    for k in range(pivots.shape[-1]):
        other = pivots[..., k:k + 1].astype(np.int64) - 1
        kept = rows[..., k:k + 1].copy()
        rows[..., k:k + 1] = np.take_along_axis(rows, other, -1)
        np.put_along_axis(rows, other, kept, -1)
    return rows


def lu(x: Array, *, pivot: bool = True) -> tuple[Array, Array, Array]:
    """aten.linalg_lu: the permutation (empty without pivoting), the lower and the upper factor."""
    both, pivots, _ = factors(x, pivot)
    return lu_unpack(both, pivots, True, pivot)


def lu_solve(both: Array, pivots: Array, b: Array, *, left: bool = True, adjoint: bool = False) -> Array:
    """aten.linalg_lu_solve: X with A X = B, or X A = B, or for A's adjoint, of A's factors."""
    if not left:  # X A = B is A^H X^H = B^H
        return np.conj(_turned(lu_solve(both, pivots, np.conj(_turned(b)), adjoint=not adjoint)))
    rows = _exchanged(pivots, both.shape[-1])[..., None]
    lines = np.broadcast_shapes(both.shape[:-2], b.shape[:-2])
    rows, b = np.broadcast_to(rows, (*lines, *rows.shape[-2:])), np.broadcast_to(b, (*lines, *b.shape[-2:]))
    if not adjoint:
        first = solve_triangular(both, np.take_along_axis(b, rows, -2), False, unitriangular=True)
        return solve_triangular(both, first, True)
    turned = np.conj(_turned(both))
    first = solve_triangular(turned, b, False)
    found = np.empty_like(first)
    np.put_along_axis(found, rows, solve_triangular(turned, first, True, unitriangular=True), -2)
    return found


def pinv(x: Array, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Array:
    """aten.linalg_pinv: the pseudo-inverse; singular values up to the larger of both tolerances count as 0."""
    if hermitian:  # of the lower triangle, as PyTorch
        signed, u = np.linalg.eigh(x)
        values, v = np.abs(signed), np.where(signed < 0, -1, 1)[..., None].astype(x.dtype) * np.conj(_turned(u))
    else:
        u, values, v = np.linalg.svd(x, full_matrices=False)
    least = values.max(-1, initial=0, keepdims=True)
    absolute = np.zeros(()) if atol is None else np.asarray(atol)
    usual = 0.0 if (absolute > 0).any() else np.finfo(values.dtype).eps * max(x.shape[-2:])
    relative = np.asarray(usual if rtol is None else rtol)
    limit = np.maximum(absolute[..., None], relative[..., None] * least)
    kept = values > limit
    inverse = np.where(kept, 1 / np.where(kept, values, 1), 0).astype(values.dtype)
    return np.asarray(np.conj(_turned(v)) @ (inverse[..., None] * np.conj(_turned(u))))


def matrix_exp(x: Array) -> Array:
    """aten.linalg_matrix_exp: Taylor's series of the matrix over a power of two, which is then squared."""
    size = float(np.abs(x).sum(-2).max(initial=0))
    halvings = max(0, math.frexp(size)[1] + 2) if math.isfinite(size) else 0
    part = x.astype(np.result_type(x, np.float64)) / 2.0 ** halvings
    term = found = np.broadcast_to(np.eye(x.shape[-1], dtype=part.dtype), part.shape)
    for k in range(1, 20):
        term = term @ part / k
        found = found + term
    for _ in range(halvings):
        found = found @ found
    return found.astype(x.dtype)


def householder(x: Array, tau: Array) -> Array:
    """aten.linalg_householder_product: the first columns of the product of reflections."""
    n, m = x.shape[-2:]
    found = np.broadcast_to(np.eye(n, m, dtype=x.dtype), x.shape).copy()
    for k in range(tau.shape[-1] - 1, -1, -1):
        v = np.where((np.arange(n) > k)[:, None], x[..., k:k + 1], 0).astype(x.dtype)
        v[..., k, :] = 1
        found -= tau[..., k, None, None] * (v @ (np.conj(_turned(v)) @ found))
    return found


def old_triangular(b: Array, a: Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
                   ) -> tuple[Array, Array]:
    """aten.triangular_solve: the solution, and the matrix as often as it was used."""
    of = _turned(_triangle(a, upper)) if transpose else a
    found = solve_triangular(of, b, upper != transpose, unitriangular=unitriangular)
    return found, np.broadcast_to(a, (*found.shape[:-2], *a.shape[-2:])).copy()


def trilinear(a: Array, b: Array, c: Array, expand1: list[int], expand2: list[int], expand3: list[int],
              sumdim: list[int], unroll_dim: int = 1) -> Array:
    """aten._trilinear: the sum over dims of the product of three arrays, each with new dims of size 1."""
    rank = a.ndim + len(expand1)
    axes = [[d for d in range(rank) if d not in new] for new in (expand1, expand2, expand3)]
    return np.asarray(np.einsum(a, axes[0], b, axes[1], c, axes[2], [d for d in range(rank) if d not in sumdim],
                                optimize=True))


def check(info: Array, name: str, *, is_matrix: bool) -> tuple[()]:
    """aten._linalg_check_errors.

    Raises:
        InputError: a matrix failed.
    """
    if info.any():
        number = int(np.flatnonzero(info)[0])
        words = next((words for part, words in _WORDS.items() if part in name), "LAPACK does not take it")
        raise InputError(f"{name[:60]} does not take this matrix", do="check what it is computed from",
                         why=words.format(info.flat[number]) + ("" if is_matrix else f" (batch element {number})"))
    return ()


def _raised(name: str, wanted: bool, *results: Any) -> Any:
    if wanted:
        check(results[-1], name, is_matrix=not results[-1].ndim)
    return results


OPERATORS: dict[str, Callable[..., Any]] = {
    "aten.linalg_inv_ex.default": inverse, "aten._linalg_solve_ex.default": solve, "aten._linalg_det.default": det,
    "aten._linalg_slogdet.default": slogdet, "aten.linalg_cholesky_ex.default": cholesky,
    "aten.linalg_solve_triangular.default": solve_triangular, "aten.cholesky_solve.default": cholesky_solve,
    "aten.cholesky_inverse.default": cholesky_inverse, "aten.linalg_qr.default": qr, "aten._linalg_svd.default": svd,
    "aten._linalg_eigh.default": eigh, "aten.linalg_eig.default": eig,
    "aten.lu_unpack.default": lu_unpack, "aten.linalg_lu.default": lu, "aten.linalg_lu_solve.default": lu_solve,
    "aten.linalg_pinv.atol_rtol_tensor": pinv, "aten.linalg_matrix_exp.default": matrix_exp,
    "aten.linalg_householder_product.default": householder, "aten.triangular_solve.default": old_triangular,
    "aten._trilinear.default": trilinear,
    "aten.cholesky.default": lambda x, upper=False: cholesky(x, upper, True)[0],
    "aten.linalg_lu_factor_ex.default":
        lambda x, *, pivot=True, check_errors=False: _raised("linalg.lu_factor", check_errors, *factors(x, pivot)),
}
CHECKS: dict[str, Callable[..., Any]] = {"aten._linalg_check_errors.default": check}
