"""Concatenations of many parts: written part by part, equal to eager's at every size."""
from __future__ import annotations

import pytest
import torch

import anyshape
from anyshape.passes.pieces import MOST
from anyshape.plan.plan import KernelStep
from roads import compilation_of

MANY = MOST + 4


def stacked(*parts):
    return torch.stack(parts, 1)


def rounded(*parts):
    return torch.cat(parts, -1).relu().to(torch.bfloat16) * 2


def read_twice(*parts):
    whole = torch.cat(parts, 0)
    return whole.exp(), whole.sum(0)


def made(*parts):
    return torch.cat([part * k for k, part in enumerate(parts)], 1).softmax(-1)


def with_others(*parts):
    whole = torch.cat(parts, 1)
    return (whole + 1) @ whole.t()


FUNCTIONS = (stacked, rounded, read_twice, made, with_others)


def equal(found, wanted) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(*(one if isinstance(one, tuple) else (one,) for one in (found, wanted)), strict=True):
        assert ours.stride() == theirs.stride() or not ours.numel()


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("count", [MOST, MANY])
def test_many_parts(function, count):
    fast = anyshape.compile(function, strict=True)
    for rows, columns in ((50, 33), (7, 1), (1, 130), (0, 5), (5, 0), (211, 64)):
        parts = [torch.randn(rows, columns, requires_grad=True) for _ in range(count)]
        found, wanted = fast(*parts), function(*parts)
        equal(found, wanted)
        pairs = [(one if isinstance(one, tuple) else (one,)) for one in (found, wanted)]
        gradients = [torch.autograd.grad([y.sum() for y in ys], parts) for ys in pairs]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            equal(fast(*parts), wanted)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float16, torch.float64])
def test_dtypes(dtype):
    fast = anyshape.compile(stacked, strict=True)
    for rows in (90, 3):
        parts = [(torch.randn(rows, 40) * 3).to(dtype) for _ in range(MANY)]
        assert torch.equal(fast(*parts), stacked(*parts))


def test_parts_of_all_sizes_and_layouts():
    def function(*parts):
        return torch.cat(parts, 1).abs()

    fast = anyshape.compile(function, strict=True)
    for widths in (range(1, MANY + 1), range(MANY), [5] * MANY):
        parts = [torch.randn(width, 60).t() if k % 2 else torch.randn(60, 2 * width)[:, ::2]
                 for k, width in enumerate(widths)]
        equal(fast(*parts), function(*parts))


def test_a_part_costs_what_it_moves():
    fast = anyshape.compile(stacked, strict=True)
    fast(*[torch.randn(50, 33) for _ in range(MANY)])
    steps = [step for program in compilation_of(fast).programs for step in program.compiled.plan.steps]
    kernels = [step for step in steps if isinstance(step, KernelStep)]
    assert all(len(step.params) <= 3 for step in kernels), "no kernel reads all parts"


def test_what_autocast_rounds_twice_is_rounded_once():
    def products(x):
        y = x + 1
        return y @ y.transpose(1, 2)

    fast = anyshape.compile(products, strict=True)
    x = torch.randn(3, 40, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(fast(x), products(x), rtol=2e-2, atol=2e-1)
    [program] = compilation_of(fast).programs
    casts = [node for node in program.compiled.graph.nodes if node.op == "cast"]
    assert len(casts) <= 1
