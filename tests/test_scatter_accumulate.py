"""Sums of something and a scatter into zeros: the scatter starts from the something."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import anyshape
from anyshape.plan.ir.program import ExternStep, KernelStep
from roads import compilation_of

ROWS, WIDE = 50, 24


class Tied(nn.Module):
    """A table that is read at both ends, `times` at the first."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.tables = nn.Embedding(ROWS, WIDE)
        self.inside = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(times))

    def forward(self, *places: torch.Tensor) -> torch.Tensor:
        x = sum(torch.tanh(layer(self.tables(i))).mean(1) for layer, i in zip(self.inside, places, strict=True))
        return x @ self.tables.weight.T


def backward_of(run):
    return next(p.compiled for p in compilation_of(run).programs if "backward" in p.name)


@pytest.mark.parametrize("times", [1, 2])
def test_tied_tables_have_no_second_table(times: int) -> None:
    torch.manual_seed(0)
    model = Tied(times)
    run = anyshape.compile(model, strict=True)
    for batch, length in ((3, 7), (1, 40), (5, 1), (2, 0), (0, 3)):
        places = [torch.randint(0, ROWS, (batch, length)) for _ in range(times)]
        found = []
        for function in (run, model):
            model.zero_grad()
            function(*places).square().sum().backward()
            found.append([parameter.grad for parameter in model.parameters()])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4, equal_nan=True)
    backward = backward_of(run)
    wide = [b.name for b in backward.plan.buffers if b.bytes == 4 * ROWS * WIDE and b.is_temp]
    assert wide == []
    assert not any(node.op == "full" for node in backward.graph.nodes)


def test_a_sum_of_two_scatters_is_one_after_the_other() -> None:
    def two(x, i, j, v):
        return torch.zeros(ROWS).index_add(0, i, v).add(torch.zeros(ROWS).scatter_add(0, j, v)) + x

    run = anyshape.compile(two, strict=True)
    for count in (5, 1, 300, 0):
        x, v = torch.randn(ROWS), torch.randn(count)
        i, j = (torch.randint(0, ROWS, (count,)) for _ in range(2))
        before = x.clone()
        torch.testing.assert_close(run(x, i, j, v), two(x, i, j, v), rtol=1e-5, atol=1e-5)
        assert torch.equal(x, before)  # an input is not written over


def test_what_is_read_later_stays_as_it_is() -> None:
    def later(a, b, i, v):
        start = a @ b
        return start + torch.zeros_like(start).index_add(0, i, v), start.sum(0)

    run = anyshape.compile(later, strict=True)
    for n in (4, 1, 33):
        a, b, v = torch.randn(n, 8), torch.randn(8, 8), torch.randn(6, 8)
        i = torch.randint(0, n, (6,))
        torch.testing.assert_close(run(a, b, i, v), later(a, b, i, v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [
    lambda x, i, v: x + torch.zeros(4, 8).index_add(0, i, v)[:, :1],
    lambda x, i, v: x[:1] + torch.zeros(4, 8).index_add(0, i, v),
    lambda x, i, v: (x + (s := torch.zeros(4, 8).index_add(0, i, v)), s * 2),
    lambda x, i, v: x + torch.ones(4, 8).index_add(0, i, v),
    lambda x, i, v: x.bfloat16() + torch.zeros(4, 8, dtype=torch.bfloat16).index_add(0, i, v.bfloat16()),
    lambda x, i, v: x.double() + torch.zeros(4, 8).index_add(0, i, v),
    lambda x, i, v: x + torch.zeros(4, 8).index_copy(0, i[:4], v[:4]),
    lambda x, i, v: torch.add(x, torch.zeros(4, 8).index_add(0, i, v), alpha=2),
], ids=["parts", "spread", "read twice", "not of zeros", "half", "wider", "no sum", "times two"])
def test_other_sums_are_what_they_were(function) -> None:
    run = anyshape.compile(function, strict=True)
    for _ in range(3):
        x, i, v = torch.randn(4, 8), torch.randperm(4).repeat(2), torch.randn(8, 8)
        torch.testing.assert_close(run(x, i, v), function(x, i, v), rtol=1e-5, atol=1e-5)


def test_a_place_outside_is_an_error_and_nothing_is_written() -> None:
    def put(x, i, v):
        return x + torch.zeros(ROWS).index_add(0, i, v)

    run = anyshape.compile(put, strict=True)
    x = torch.randn(ROWS)
    before = x.clone()
    with pytest.raises((IndexError, RuntimeError)):
        run(x, torch.tensor([0, ROWS]), torch.randn(2))
    assert torch.equal(x, before)
    assert all(isinstance(step, KernelStep) or not isinstance(step, ExternStep)
               for p in compilation_of(run).programs for step in p.compiled.plan.steps)
