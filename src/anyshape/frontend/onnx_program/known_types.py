"""Shape inference and constant propagation over stages: what one knows of its inputs from the one before, types over
the same symbols, and elements that are formulas.

    x: f32[b, t] | y = x.transpose, n = Shape(y) | a loop |  y: f32[t, b], n = [t, b] for what follows, and in the loop

A stage that knew only dtypes and ranks would have a symbol for each dim, and a program more where one of them is 1.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from anyshape.frontend.importer_onnx.model import clean
from anyshape.frontend.importer_onnx.walk import Imported
from anyshape.frontend.symbols.known import Comparison, Known, Ratio
from anyshape.ir.types import TensorType
from anyshape.sym.expr import Size, symbol, symbols_of

Kinds = Mapping[str, TensorType | Known]


def carried(made: Imported, before: Kinds, bound: frozenset[str]) -> dict[str, TensorType | Known]:
    """Of what the stage before had and made. bound: symbols that dims of inputs are, here as there."""
    found = dict(before)
    for name, kind in made.kinds.items():
        if isinstance(kind, TensorType):
            found[name] = TensorType(kind.dtype, tuple(_named(size, bound) for size in kind.shape))
        elif all(_is_formula(item, bound) for item in kind.items()):
            found[name] = kind
    return found


def captured_types(kinds: Kinds, names: Iterable[str]) -> dict[str, TensorType | Known]:
    """Of what a body takes from around it: each dim that is no number is a symbol of its own name."""
    found: dict[str, TensorType | Known] = {}
    for name in names:
        kind = kinds.get(name)
        if isinstance(kind, Known):
            kind = TensorType(kind.dtype, kind.shape)
        if kind is not None:
            found[name] = TensorType(kind.dtype, tuple(_named(size, frozenset()) for size in kind.shape))
    return found


def _named(size: Size, bound: frozenset[str]) -> Size:
    """The size where its symbols are bound, else a symbol that is the same wherever the formula is."""
    plain = isinstance(size, int) or size in [symbol(one) for one in symbols_of(size)]
    return size if plain or symbols_of(size) <= bound else symbol(clean(f"size_{size}"))


def _is_formula(item: Any, bound: frozenset[str]) -> bool:
    return isinstance(item, (int, float)) or (not isinstance(item, (Comparison, Ratio)) and symbols_of(item) <= bound)
