"""Grouped convolution, compiled: the native routine, its epilogues, its gradient by rows, and what PyTorch does."""
from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import anyshape
from anyshape.route.core.grouped_conv import convolved

ENDS = ((7, (2, 2, 5)), (1, (0, 0, 1)), (3, (0, 0, 0)), (4, (1, 2, 4)), (0, (0, 0, 0)))  # rows, ends


class Net(nn.Module):
    """One grouped convolution of three groups, and what is done with it."""

    def __init__(self, channels, outs, kernel, settings, bias, after, groups=1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, outs, channels // groups, *kernel))
        self.bias = nn.Parameter(torch.randn(3, outs)) if bias else None
        self.settings, self.after = (*settings, groups), after

    def forward(self, x, other, ends):
        found = convolved(x, self.weight, ends, self.bias, *self.settings)
        if "added" in self.after:
            found = other + found
        return found.relu() if "relu" in self.after else found


def case(space, kernel, settings, channels, outs, bias=True, after=(), groups=1):
    return pytest.param(space, (channels, outs, kernel, settings, bias, after, groups),
                        id=f"{space}{kernel}{settings}{after}{channels}-{outs}")


CASES = [
    case((32, 32), (3, 3), (1, 1, 1), 8, 8), case((11,), (3,), (2, 1, 2), 4, 5, False),
    case((33, 40), (5, 5), (2, 2, 1), 3, 20), case((9, 50), (3, 3), (3, 0, 2), 3, 13, after=("added", "relu")),
    case((5, 6, 7), (2, 3, 2), (1, 1, 1), 2, 4, False, ("relu",)), case((4, 4, 36), (2, 3, 3), (2, 1, 1), 2, 4),
    case((6, 6), (1, 1), (1, 0, 1), 7, 48, after=("added",)),
    case((7, 19), (3, 2), (1, 2, 1), 3, 10, False, ("added",)),
]


@pytest.mark.parametrize(("space", "made"), CASES)
def test_a_routine_does_it(space, made):
    torch.manual_seed(0)
    net = Net(*made)
    fast = anyshape.compile(net)
    for count, ends in ENDS:
        x, marks = torch.randn(count, made[0], *space), torch.tensor(ends, dtype=torch.int32)
        other = torch.randn_like(convolved(x, net.weight, marks, None, *net.settings))
        if count and "added" in net.after:
            other[0, 0].fill_(torch.nan)
            other[-1, -1].view(-1)[-1] = torch.nan
        with torch.no_grad():
            found, expected = fast(x, other, marks), net(x, other, marks)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    text = str(fast.explain())
    assert "a native routine does it" in text and "PyTorch runs it" not in text
    assert "kernels of our own" not in text  # what comes behind is a part of it


def test_gradients():
    torch.manual_seed(0)
    for made, space in (((8, 8, (3, 3), (1, 1, 1), True, ("added", "relu")), (9, 20)),
                        ((3, 5, (3,), (2, 1, 1), True, ()), (11,)), ((4, 4, (3,), (1, 1, 1), False, (), 2), (8,))):
        net = Net(*made)
        fast = anyshape.compile(net)
        for count, ends in ENDS[:3]:
            x, marks = torch.randn(count, made[0], *space, requires_grad=True), torch.tensor(ends, dtype=torch.int32)
            other = torch.randn_like(net(x, 0, marks), requires_grad=True)
            wanted = [x, *net.parameters(), *([other] if net.after else [])]
            for mine, theirs in zip(*(torch.autograd.grad(way(x, other, marks).square().sum(), wanted)
                                      for way in (fast, net)), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def test_strides_and_sizes_that_the_routine_does_not_take():
    """A row that fits no cache, and operands that do not lie densely, go to PyTorch: the same results."""
    torch.manual_seed(0)
    net = Net(2, 3, (3, 3), (1, 1, 1), True, ("relu",))
    fast = anyshape.compile(net)
    ends = torch.tensor([1, 1, 2], dtype=torch.int32)
    with torch.no_grad():
        for x in (torch.randn(2, 2, 900, 700), torch.randn(2, 8, 9, 2).transpose(1, 3),
                  torch.randn(2, 4, 6, 6)[:, ::2]):
            torch.testing.assert_close(fast(x, x, ends), net(x, x, ends), rtol=1e-4, atol=1e-4)


def test_a_result_that_others_read_keeps_its_value():
    """No epilogue where the value before it is needed."""
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 4, 4, 3))

        def forward(self, x, ends):
            found = convolved(x, self.weight, ends, None, 1, 1, 1, 1)
            return found, found.relu(), found + x

    net = Both()
    x, ends = torch.randn(5, 4, 8), torch.tensor([3, 5], dtype=torch.int32)
    with torch.no_grad():
        for mine, theirs in zip(anyshape.compile(net)(x, ends), net(x, ends), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def convolution(channels: int, outs: int, weight: torch.Tensor | None = None) -> Net:
    net = Net(channels, outs, (3, 3), (1, 1, 1), True, ("added", "relu"))
    if weight is not None:
        net.weight.data = weight
    return net


@pytest.mark.parametrize("channels,outs", [(3, 12), (12, 7), (16, 48)])
def test_winograds_algorithm_is_no_less_exact(channels, outs):
    """Compared with the results in float64: in the mean no worse than eager PyTorch."""
    torch.manual_seed(0)
    net = convolution(channels, outs)
    fast = anyshape.compile(net)
    for space in ((32, 32), (33, 63), (1, 40), (2, 31), (5, 129)):
        x, other = torch.randn(4, channels, *space), torch.randn(4, outs, *space)
        ends = torch.tensor((1, 2, 4), dtype=torch.int32)
        with torch.no_grad():
            found, eager = fast(x, other, ends), net(x, other, ends)
            exact = net.double()(x.double(), other.double(), ends)
            net.float()
        mine, theirs = ((one.double() - exact).abs() for one in (found, eager))
        assert mine.mean() <= 1.5 * theirs.mean() and mine.max() <= 3 * theirs.max() + 1e-6


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, 3e38])
def test_what_is_not_finite_is_as_by_definition(bad):
    """Differences of infinities would be NaN; sums of large numbers would be infinite."""
    torch.manual_seed(0)
    net = convolution(4, 5, torch.randn(3, 5, 4, 3, 3).abs() / 50)
    fast = anyshape.compile(net)
    x, other = torch.randn(3, 4, 12, 40), torch.randn(3, 5, 12, 40)
    x[1, 2, 5, 7] = x[1, 2, 6, 7] = x[2, 0, 0, 0] = bad
    other[0, 1, 3, 3] = bad
    ends = torch.tensor((1, 2, 3), dtype=torch.int32)
    with torch.no_grad():
        torch.testing.assert_close(fast(x, other, ends), net(x, other, ends), rtol=1e-4, atol=1e-4, equal_nan=True)


class Chain(nn.Module):
    """Convolutions one after another over the same groups, with values that are read later, and other widths."""

    def __init__(self) -> None:
        super().__init__()
        widths = (4, 4, 4, 8, 4, 4, 6)
        self.weights = nn.ParameterList(torch.randn(3, outs, ins, 3, 3) / 6 for ins, outs in pairwise(widths))

    def forward(self, x, ends):
        kept = []
        for number, weight in enumerate(self.weights):
            found = convolved(x, weight, ends, None, (1, 1), (1, 1), (1, 1), 1)
            kept.append(x)
            x = found + kept[number - 1] if number and kept[number - 1].shape == found.shape else found.relu()
        return x


@pytest.mark.parametrize("threads", [1, 2])
def test_a_chain_of_convolutions_goes_through_rows_together(threads):
    """More rows than are done at a time; groups that end inside of those; rows of no group."""
    torch.manual_seed(0)
    net = Chain()
    fast = anyshape.compile(net, threads=threads)
    for count, ends in ((37, (5, 23, 36)), (64, (0, 64, 64)), (1, (0, 1, 1)), (3, (0, 0, 0)), (0, (0, 0, 0))):
        x, marks = torch.randn(count, 4, 40, 40), torch.tensor(ends, dtype=torch.int32)
        with torch.no_grad():
            torch.testing.assert_close(fast(x, marks), net(x, marks), rtol=1e-4, atol=1e-4)
    assert "a native routine does it" in str(fast.explain())
