"""Direct convolution with channels last, compiled: the native routine, its epilogues, and what PyTorch does instead."""
from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import anyshape
from anyshape.plan.ir.program import ExternStep, LibraryStep
from sampling import crossed


class Net(nn.Module):
    """Two convolutions with ReLUs, and a residual: channels -> outs -> outs."""

    def __init__(self, channels: int, outs: int, kernel, stride=1, padding=0, dilation=1, bias=True, groups=1) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, outs, kernel, stride, padding, dilation, bias=bias, groups=groups)
        self.second = nn.Conv2d(outs, outs, 3, 1, 1, bias=not bias, groups=groups)

    def forward(self, x):
        y = self.first(x).relu()
        return (y + self.second(y)).relu()


def steps(fast) -> list[str]:
    """The convolutions of a program: ops of our own, or operators of PyTorch."""
    plan = fast.programs[0].executable.plan
    return [step.op if isinstance(step, LibraryStep) else step.target for step in plan.steps
            if isinstance(step, (LibraryStep, ExternStep))]


CASES = [(3, 16, 3, 1, 1, 1), (3, 20, (7, 5), 2, 3, 1), (5, 48, (1, 3), (1, 2), (0, 1), 1), (16, 33, 3, 2, 0, 2),
         (8, 64, 5, 1, (2, 1), (1, 3)), (1, 96, (3, 1), 1, (1, 0), 1)]
SPACES = [(11, 13), (32, 17), (47, 64)]


@pytest.mark.parametrize("made", CASES, ids=str)
def test_a_routine_does_it_at_all_sizes(made) -> None:
    torch.manual_seed(0)
    net = Net(*made, bias=made[1] % 2 == 0)
    fast = anyshape.compile(net, strict=True)
    with torch.no_grad():
        for count, space in itertools.product((2, 1, 0), SPACES):
            x = torch.randn(count, made[0], *space)
            torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-4)
    assert steps(fast) == ["direct_conv"] * 2 and len(fast.programs) == 1


def test_bands_of_lines_end_with_the_image() -> None:
    """Without padding tiles read the image itself, in several bands; the last positions are of no whole tile."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(17, 5, 3), nn.Conv2d(5, 34, 3), nn.ReLU())
    fast = anyshape.compile(net, strict=True)
    with torch.no_grad():
        for space in ((97, 101), (5, 5), (6, 211), (211, 6), (5, 2000)):
            x = torch.randn(2, 17, *space)
            torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-4)


def test_images_of_other_strides() -> None:
    torch.manual_seed(0)
    net = Net(3, 20, 3, 1, 1)
    fast = anyshape.compile(net, strict=True)
    x = torch.randn(2, 3, 12, 11)
    with torch.no_grad():
        for given in (x.to(memory_format=torch.channels_last), x.mT.contiguous().mT, x[:, :, ::2]):
            torch.testing.assert_close(fast(given), net(given), rtol=1e-4, atol=1e-4)


def test_numbers_that_are_none() -> None:
    torch.manual_seed(0)
    net = Net(3, 18, 3, 1, 1)
    fast = anyshape.compile(net, strict=True)
    x = torch.randn(2, 3, 12, 12)
    x[0, 1, 3, 4], x[1, 0, 11, 11] = torch.nan, torch.inf
    with torch.no_grad():
        torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_weights_of_other_strides_and_values() -> None:
    torch.manual_seed(0)
    net = Net(6, 24, 3, 1, 1)
    fast = anyshape.compile(net, strict=True)
    x = torch.randn(2, 6, 10, 9)
    with torch.no_grad():
        for change in (lambda w: w, lambda w: w * 2, lambda w: w.to(memory_format=torch.channels_last),
                       lambda w: w.flip(0), lambda w: w.mT.contiguous().mT,
                       lambda w: w.repeat(2, 1, 1, 1)[::2]):
            net.first.weight.data = change(net.first.weight.data)
            torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-4)


def test_what_pytorch_does() -> None:
    """Other dtypes, groups of channels, and a program that trains."""
    torch.manual_seed(0)
    for net, x in ((Net(4, 8, 3, groups=4), torch.randn(2, 4, 9, 9)),
                   (Net(4, 8, 3).double(), torch.randn(2, 4, 9, 9).double()),
                   (Net(4, 8, 3).bfloat16(), torch.randn(2, 4, 9, 9).bfloat16())):
        fast = anyshape.compile(net, strict=True)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), net(x), rtol=2e-2, atol=2e-2)
        assert "direct_conv" not in steps(fast)
    net, x = Net(4, 8, 3), torch.randn(2, 4, 9, 9)
    gradients = [torch.autograd.grad(way(x).square().sum(), list(net.parameters()))
                 for way in (anyshape.compile(net, strict=True), net)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def test_the_library_does_it_where_that_is_asked() -> None:
    torch.manual_seed(0)
    net, x = Net(4, 8, 3, 1, 1), torch.randn(2, 4, 9, 9)
    fast = anyshape.compile(net, strict=True, products="library")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-4)
    assert "direct_conv" not in steps(fast)


class Normed(nn.Module):
    """Two convolutions; behind the second batch norm, perhaps a residual, and ReLU."""

    def __init__(self, outs: int, bias: bool, affine: bool, residual: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(outs, outs, 3, padding=1)
        self.conv = nn.Conv2d(outs, outs, 3, padding=1, bias=bias)
        self.norm = nn.BatchNorm2d(outs, affine=affine).eval()
        self.residual = residual
        new_numbers(self.norm)

    def forward(self, x):
        x = self.first(x)
        y = self.norm(self.conv(x))
        return (y + x if self.residual else y).relu()


def new_numbers(norm: nn.BatchNorm2d) -> None:
    with torch.no_grad():
        norm.running_mean.normal_(0, 2)
        norm.running_var.uniform_(0.2, 3)
        for parameter in norm.parameters():
            parameter.normal_()


@pytest.mark.parametrize(("form", "outs"), crossed(itertools.product((False, True), repeat=3), [20, 70]), ids=str)
def test_batch_norm_is_part_of_the_convolution(outs, form) -> None:
    """Also after its numbers have changed."""
    torch.manual_seed(0)
    net = Normed(outs, *form).eval()
    fast = anyshape.compile(net, strict=True)
    with torch.no_grad():
        for count, space in ((2, (9, 11)), (1, (17, 6)), (0, (5, 5))):
            x = torch.randn(count, outs, *space)
            torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-4)
            new_numbers(net.norm)
            torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-4)
    assert steps(fast) == ["direct_conv"] * 2 and len(fast.programs) == 1
    _, conv = (step for step in fast.programs[0].executable.plan.steps if isinstance(step, LibraryStep))
    assert {"scaled", "relu"} <= dict(conv.attrs).keys() and ("added" in dict(conv.attrs)) == form[2]


class Chain(nn.Module):
    """Two convolutions and numbers of channels, one after another, by `kinds`; `twice`: what they begin with is read
    again behind them."""

    def __init__(self, kinds: str, twice: bool = False) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 20, 3))
        self.kinds, self.twice = kinds, twice
        self.numbers = nn.ParameterList(torch.randn(20, 1, 1) for _ in kinds)

    def forward(self, x):
        first = y = self.conv(x)
        for kind, number in zip(self.kinds, self.numbers, strict=True):
            y = {"+": y + number, "-": y - number, "*": y * number, "~": number - y}[kind]
        return y + first if self.twice else y.relu()


@pytest.mark.parametrize(("kinds", "twice"), crossed(["*", "-", "~", "*-+", "-**+", "*+*+", "*~"], [False, True]))
def test_chains_of_numbers_of_channels(kinds, twice) -> None:
    torch.manual_seed(0)
    net, x = Chain(kinds, twice), torch.randn(2, 3, 12, 9)
    fast = anyshape.compile(net, strict=True)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-4)
    assert steps(fast) == ["direct_conv"] * 2


def test_numbers_that_are_none_with_batch_norm() -> None:
    torch.manual_seed(0)
    net = Normed(18, False, True, False).eval()
    fast = anyshape.compile(net, strict=True)
    x = torch.randn(2, 18, 12, 12)
    x[0, 1, 3, 4], x[1, 0, 11, 11] = torch.nan, torch.inf
    with torch.no_grad():
        torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_pytorch_runs_a_step_with_factors_where_the_host_does_not() -> None:
    """Weights whose strides the host does not take."""
    torch.manual_seed(0)
    net = Normed(8, True, True, True).eval()
    fast = anyshape.compile(net, strict=True)
    x = torch.randn(2, 8, 7, 6)
    with torch.no_grad():
        for change in (lambda w: w, lambda w: w.mT.contiguous().mT, lambda w: w.repeat(2, 1, 1, 1)[::2]):
            net.conv.weight.data = change(net.conv.weight.data)
            torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-4)
