"""Routines of LAPACK by scipy, whose library is the one that JAX calls: signs that LAPACK leaves open are as there, as
is what lies in a triangle that is not written to, and a matrix that fails says so in `info`.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch


def gesdd(x: torch.Tensor, full: bool) -> tuple[torch.Tensor, ...]:
    """Left vectors, values, right vectors, info."""
    rows, columns = x.shape[-2:]
    least = min(rows, columns)
    shapes = ((rows, rows if full else least), (least,), (columns if full else least, columns))
    return _batched("gesdd", x, shapes, 1, lambda run, a: run(a, compute_uv=1, full_matrices=int(full)))


def potrf(x: torch.Tensor, lower: bool) -> tuple[torch.Tensor, ...]:
    """The triangle, with the matrix's own numbers in the other one, and info."""
    n = x.shape[-1]
    return _batched("potrf", x, ((n, n),), -1, lambda run, a: run(a, lower=int(lower), clean=0))


def syevd(x: torch.Tensor, lower: bool) -> tuple[torch.Tensor, ...]:
    """Values, vectors, info; of complex numbers by heevd."""
    n = x.shape[-1]
    name = "heevd" if x.is_complex() else "syevd"
    return _batched(name, x, ((n,), (n, n)), 0, lambda run, a: run(a, compute_v=1, lower=int(lower)))


def _batched(name: str, x: torch.Tensor, shapes: tuple[tuple[int, ...], ...], real: int,
             call: Callable[[Any, Any], Any]) -> tuple[torch.Tensor, ...]:
    """A routine over the matrices of a batch. real: which result is of real numbers where the others are complex."""
    from scipy.linalg import get_lapack_funcs

    batch = x.shape[:-2]
    dtypes = [x.dtype.to_real() if number == real else x.dtype for number in range(len(shapes))]
    results = [torch.zeros((*batch, *shape), dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    info = torch.zeros(batch, dtype=torch.int32)
    for place in _places(batch) if x.numel() else ():
        matrix = x[place].numpy()
        found = call(get_lapack_funcs((name,), (matrix,))[0], matrix)
        for result, one in zip(results, found[:-1], strict=True):
            result[place] = torch.from_numpy(np.ascontiguousarray(one))
        info[place] = int(found[-1])
    return (*results, info)


def _places(batch: torch.Size) -> Iterator[tuple[int, ...]]:
    return iter(np.ndindex(*batch))


OPERATORS: dict[str, Callable[..., Any]] = {"lapack.gesdd": gesdd, "lapack.potrf": potrf, "lapack.syevd": syevd}
