"""Sharding rule of reshape: where the factor of a dim that is dealt out lies after dims are split and merged.

    [b, s, 32] -> [b*s, 32],  S(0) of b      -->  S(0, 1, b): b * s is 1 * b * s, and the b are dealt out
    [b*s, 32] -> [b*s, 4, 8], S(1, 1, 2)     -->  S(1, 1, 2): of 32 = 2 * 16 two parts are two heads each
"""
from __future__ import annotations

from anyshape.dist.placement import Shard, exact
from anyshape.sym.expr import Size, product
from anyshape.sym.index_arithmetic import groups


def reshaped(source: tuple[Size, ...], result: tuple[Size, ...], placed: Shard) -> Shard | None:
    """The placement of the result of a reshape of `source`, placed like `placed`; None where no dim has the factor."""
    if 0 in source or 0 in result:
        return None
    for group in groups(source, result):
        if placed.dim not in group.source:
            continue
        before = placed.outer * product(source[e] for e in group.source if e < placed.dim)
        for dim in group.result:
            outer = exact(before, product(result[e] for e in group.result if e < dim))
            if outer is not None and outer != 0 and exact(result[dim], outer * placed.count) is not None:
                return Shard(dim, outer, placed.count)
    return None
