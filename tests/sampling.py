"""Pairwise sampling of test parameters: what runs by default, and the rest, which runs with `-m full`.

A kind of fault shows at some value of one parameter, or at a pair of values; all of a large product says little more,
and each of its tests traces a program.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

whole = False  # conftest.py says so where tests marked `full` run too

def some(values: Iterable[Any], every: int, first: int = 0) -> list[Any]:
    """The values, of which each `every`-th from `first` on runs by default."""
    return [value if i % every == first else pytest.param(value, marks=pytest.mark.full)
            for i, value in enumerate(values)]


def rest(values: Iterable[Any], *always: Any, several: bool = False) -> list[Any]:
    """The values, of which those named run by default; `several`: each is a tuple of a test's arguments."""
    return [value if value in always else pytest.param(*(value if several else (value,)), marks=pytest.mark.full)
            for value in values]


def crossed(*axes: Iterable[Any], one_in: int = 0) -> list[Any]:
    """All combinations of the axes' values. By default one in `one_in` of them runs (the length of the last axis where
    that is not said), so that each value of an axis meets some of each other's."""
    found = [list(axis) for axis in axes]
    share = one_in or len(found[-1])
    return [pytest.param(*(axis[i] for axis, i in zip(found, places, strict=True)),
                         marks=pytest.mark.full if sum(places) % share else ())
            for places in itertools.product(*(range(len(axis)) for axis in found))]


def examples(count: int) -> int:
    """How many random examples a property is tried on: a third of `count`; all by `-m "full or not full"`."""
    return count if whole else -(-count // 3)
