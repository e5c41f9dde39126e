"""Translations of the routines of LAPACK and BLAS that JAX calls on the CPU: a row each, done by PyTorch, or by
scipy, which JAX brings along, where LAPACK leaves signs or a triangle open.

    custom_call @lapack_spotrf_ffi(x) {uplo = 76}   -->   lapack.potrf(x, True)

Options are the letters of LAPACK, as numbers. Layouts say how memory lies in XLA, which no value here depends on, and
operands after those of the routine are the sizes of its results.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from anyshape.frontend.aten.table import Decline
from anyshape.frontend.importer_stablehlo.table import COMPLEX, Call
from anyshape.ir.graph import Value
from anyshape.ir.types import TensorType
from anyshape.sym.expr import Size

Options = Mapping[str, int]
LIBRARY = re.compile(r"lapack_[sdcz](?P<routine>\w+)_ffi$")
REAL = {"c64": "f32", "c128": "f64"}


def _letter(options: Options, name: str) -> str:
    return chr(options[name])


def _least(x: Value) -> Size:
    """The smaller side of a matrix."""
    rows, columns = x.tensor.shape[-2:]
    if rows == columns:
        return rows
    if not isinstance(rows, int) or not isinstance(columns, int):
        raise Decline("the smaller side of a matrix with free sizes")
    return min(rows, columns)


def _of(x: Value, *sizes: Size, dtype: str = "") -> TensorType:
    """A matrix or vector for each of a batch."""
    return TensorType(dtype or x.tensor.dtype, (*x.tensor.shape[:-2], *sizes))


def cholesky(c: Call, options: Options) -> Any:
    x = c.value(0)
    return c.extern("lapack.potrf", x, _letter(options, "uplo") == "L",
                    types=(x.tensor.dense(), _of(x, dtype="i32")))


def triangular_solve(c: Call, options: Options) -> Any:
    a, b = c.value(0), c.value(1)
    upper, way = _letter(options, "uplo") == "U", _letter(options, "trans_x")
    if way != "N":
        order = [*range(a.tensor.rank - 2), a.tensor.rank - 1, a.tensor.rank - 2]
        if way == "C" and c.dtype in COMPLEX:
            a = c.extern("aten.conj_physical.default", a, types=a.tensor.dense())
        a, upper = c.t.permute(a, order), not upper
    return c.extern("aten.linalg_solve_triangular.default", a, b, upper=upper, left=_letter(options, "side") == "L",
                    unitriangular=_letter(options, "diag") == "U", types=b.tensor.dense())


def qr(c: Call, options: Options) -> Any:
    x = c.value(0)
    return c.extern("aten.geqrf.default", x, types=(x.tensor.dense(), _of(x, _least(x))))


def householder_product(c: Call, options: Options) -> Any:
    x = c.value(0)
    return c.extern("aten.linalg_householder_product.default", x, c.value(1), types=x.tensor.dense())


def eigh(c: Call, options: Options) -> Any:
    x = c.value(0)
    values = _of(x, x.tensor.shape[-1], dtype=REAL.get(c.dtype, x.tensor.dtype))
    found, vectors, info = c.extern("lapack.syevd", x, _letter(options, "uplo") == "L", types=(
        values, x.tensor.dense(), _of(x, dtype="i32")))
    return vectors, found, info


def svd(c: Call, options: Options) -> Any:
    x, full = c.value(0), _letter(options, "mode") == "A"
    rows, columns = x.tensor.shape[-2:]
    least = _least(x)
    left, found, right, info = c.extern("lapack.gesdd", x, full, types=(
        _of(x, rows, rows if full else least), _of(x, least, dtype=REAL.get(c.dtype, x.tensor.dtype)),
        _of(x, columns if full else least, columns), _of(x, dtype="i32")))
    return x, found, left, right, info


def lu(c: Call, options: Options) -> Any:
    x = c.value(0)
    return c.extern("aten.linalg_lu_factor_ex.default", x,
                    types=(x.tensor.dense(), _of(x, _least(x), dtype="i32"), _of(x, dtype="i32")))


ROUTINES: dict[str, Callable[[Call, Options], Any]] = {
    "potrf": cholesky, "trsm": triangular_solve, "geqrf": qr, "orgqr": householder_product,
    "ungqr": householder_product, "syevd": eigh, "heevd": eigh, "gesdd": svd, "getrf": lu}
