"""Lookups by positions that are arithmetic: as slices, concatenations and repeats, at every size, in every dtype."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import anyshape
from sampling import rest

SHAPES = [(5, 7), (6, 64), (3, 130), (1, 1), (2, 1), (1, 33), (101, 257), (4, 0), (0, 4), (7, 2), (40, 3)]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)


def data(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)


def places(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1])


# what is left of a lookup is the op that the second entry names; "index" and "take": it stays
LOOKUPS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "roll": (lambda x: torch.roll(x, 3, 1), "concat"),
    "roll back": (lambda x: torch.roll(x, -2, 0), "concat"),
    "roll both": (lambda x: torch.roll(x, (1, -1), (0, 1)), "concat"),
    "remainder": (lambda x: x[:, (places(x) + 2) % x.shape[1]] if x.shape[1] else x, "concat"),
    "twice each": (lambda x: x[:, torch.arange(2 * x.shape[1]) // 2], "repeat"),
    "three of each row": (lambda x: x.index_select(0, torch.arange(3 * x.shape[0]) // 3), "repeat"),
    "five each": (lambda x: x[:, torch.arange(5 * x.shape[1]) // 5], "repeat"),
    "all": (lambda x: x[:, places(x)] * 2, ""),
    "backwards": (lambda x: x[:, x.shape[1] - 1 - places(x)], "flip"),
    "both": (lambda x: x[(torch.arange(2 * x.shape[0]) // 2)[:, None], torch.arange(4 * x.shape[1]) // 4], "repeat"),
}


def ops(fast: Any) -> set[str]:
    return {node.op for program in fast.programs for node in program.compiled.graph.nodes}


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookup_by_arithmetic(name: str) -> None:
    function, left = LOOKUPS[name]
    torch.compiler.reset()
    fast = anyshape.compile(function, defer=False)
    for shape in SHAPES:
        x = data(shape, torch.float32)
        assert torch.equal(fast(x), function(x)), shape
    turned = data((33, 40), torch.float32).t()
    assert torch.equal(fast(turned), function(turned))
    assert not ops(fast) & {"index", "take"}
    assert not left or left in ops(fast)


RESIZES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "two": (lambda x: F.interpolate(x, scale_factor=2, mode="nearest") + 1, True),
    "three": (lambda x: F.interpolate(x, scale_factor=3, mode="nearest") + 1, False),
    "four": (lambda x: F.interpolate(x, scale_factor=4, mode="nearest") + 1, True),
    "two, exactly": (lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact") + 1, False),
    "two and a half": (lambda x: F.interpolate(x, scale_factor=2.5, mode="nearest") + 1, False),
    "to a size": (lambda x: F.interpolate(x, size=(32, 64), mode="nearest") + 1, False),
}


@pytest.mark.parametrize("name", rest(RESIZES, "two", "three", "to a size"))
def test_resizing(name: str) -> None:
    """By 2, PyTorch shifts positions; by other factors it multiplies them in f32, which may be inexact."""
    function, repeats = RESIZES[name]
    torch.compiler.reset()
    fast = anyshape.compile(function, defer=False)
    for shape in ((2, 3, 5, 7), (1, 2, 16, 33), (3, 1, 1, 64), (2, 2, 40, 1), (1, 1, 1, 1), (2, 3, 16, 32)):
        for x in (torch.randn(shape), torch.randn(shape).to(memory_format=torch.channels_last)):
            assert torch.equal(fast(x), function(x)), shape
    assert repeats == ("repeat" in ops(fast))


@pytest.mark.parametrize(("times", "dtype"), [
    *((2, dtype) for dtype in DTYPES), (3, torch.float32), (4, torch.bfloat16), (4, torch.bool), (5, torch.float32),
    (8, torch.int64)], ids=str)
def test_elements_that_lanes_share(times: int, dtype: torch.dtype) -> None:
    """Also with an element before them, so that a vector begins within a group, and in a sum along them."""
    def function(x: torch.Tensor) -> Any:
        each = x[:, torch.arange(times * x.shape[1]) // times]
        return each, each[:, 1:], each.sum(1), torch.cat([x[:, :1], each, x], 1)

    torch.compiler.reset()
    fast = anyshape.compile(function, defer=False)
    for shape in ((3, 100), (17, 1), (2, 16), (50, 7), (1, 1000), (9, 31)):
        x = data(shape, dtype)
        for one, other in zip(fast(x), function(x), strict=True):
            assert torch.equal(one, other), shape


def test_positions_that_may_lie_outside_are_checked() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x[torch.arange(y.shape[0]) + 1]

    torch.compiler.reset()
    fast = anyshape.compile(function, defer=False)
    x = torch.randn(10)
    assert torch.equal(fast(x, torch.randn(9)), x[1:])
    with pytest.raises(IndexError):
        fast(x, torch.randn(10))
    assert ops(fast) & {"index", "take"}


def test_gradients() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (torch.roll(x, 2, 1) * F.interpolate(x[None], scale_factor=2, mode="nearest")[0, :, ::2]).sin()

    torch.compiler.reset()
    fast = anyshape.compile(function, defer=False)
    for shape in ((3, 8), (5, 31), (2, 100)):
        x = torch.randn(shape, requires_grad=True)
        (wanted,), (found,) = (torch.autograd.grad(one(x).sum(), x) for one in (function, fast))
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("function", [
    lambda x: x.repeat(2, 1).flip(0), lambda x: (torch.cat([x, x], 0) * 2 + 1).repeat(2, 1).flip(0),
    lambda x: x.repeat(3, 2).flip(0, 1), lambda x: x.reshape(-1).flip(0).reshape(x.shape[1], x.shape[0]),
    lambda x: x.repeat_interleave(2, 0).flip(0), lambda x: x.repeat(2, 1).flip(0).cumsum(0)])
def test_what_is_repeated_may_be_turned_around(function):
    """An index that counts down through a division: loops of negative length wrote anywhere in memory."""
    fast = anyshape.compile(function, strict=True)
    for rows, columns in ((4, 4), (3, 5), (2, 7), (13, 1), (1, 9)):
        x = torch.randn(rows, columns)
        torch.testing.assert_close(fast(x), function(x), rtol=1e-5, atol=1e-6)
