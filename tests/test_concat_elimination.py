"""Concatenations of many parts: written part by part, equal to eager's at every size."""
from __future__ import annotations

import pytest
import torch

import anyshape
from anyshape.ir.parse import parse
from anyshape.kernel.fusion.dead_init import covered
from anyshape.passes.concat_elimination import MOST
from anyshape.plan.ir.program import KernelStep
from roads import compilation_of
from sampling import rest

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


def beside_what_nobody_reads(*parts):
    return torch.cat(parts, 1) * torch.tril_indices(4, 4, -1)[0].sum()  # one of two rows is left over


FUNCTIONS = (stacked, rounded, read_twice, made, with_others, beside_what_nobody_reads)


def equal(found, wanted) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(*(one if isinstance(one, tuple) else (one,) for one in (found, wanted)), strict=True):
        assert ours.stride() == theirs.stride() or not ours.numel()


@pytest.mark.parametrize(("function", "count"), rest(
    [(function, count) for count in (MANY, MOST) for function in FUNCTIONS],
    (FUNCTIONS[0], MOST), *((function, MANY) for function in FUNCTIONS[2::2]), several=True),
                         ids=lambda one: getattr(one, "__name__", str(one)))
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


def test_bags_are_summed_where_they_belong():
    """One kernel for each part, which reads, sums and stores it in its place; nothing fills the memory before."""
    tables = [torch.randn(40, 8) for _ in range(MANY)]

    def bags(chosen):
        return torch.stack([table[chosen[i]].sum(1) for i, table in enumerate(tables)], 1)

    fast = anyshape.compile(bags, strict=True)
    for rows, count in ((50, 6), (1, 3), (0, 2), (7, 0), (33, 1)):
        chosen = torch.randint(0, 40, (MANY, rows, count))
        torch.testing.assert_close(fast(chosen), bags(chosen))
    executable = fast.programs[0].executable
    assert [type(step) for step in executable.plan.steps] == [KernelStep] * MANY
    assert not any(buffer.is_temp for buffer in executable.plan.buffers)
    assert {record.arena for record in executable.specializations.values()} == {0}


def graph(*lines: str) -> str:
    return "\n".join(["graph example(x: f32[n, 2], y: f32[n, m])", *(f"  {line}" for line in lines)]) + "\n"


@pytest.mark.parametrize("starts, found", [
    ((0, 2), {"a"}),
    ((0, 1), set()),  # overlaps, and leaves the last column
    ((1, 2), set()),  # leaves the first
], ids=str)
def test_what_is_written_whole_needs_no_fill(starts, found):
    text = graph('a = full(0 | shape=[n, m + 2], dtype="f32")  f32[n, m + 2]',
                 f"b = overwrite(a, x | dim=1, start={starts[0]}, step=1)  f32[n, m + 2]",
                 f"c = overwrite(b, y | dim=1, start={starts[1]}, step=1)  f32[n, m + 2]", "return c")
    assert covered(parse(text)) == found


def test_what_is_read_in_between_is_filled():
    text = graph('a = full(0 | shape=[n, m + 2], dtype="f32")  f32[n, m + 2]',
                 "b = overwrite(a, x | dim=1, start=0, step=1)  f32[n, m + 2]",
                 "c = overwrite(b, y | dim=1, start=2, step=1)  f32[n, m + 2]",
                 "d = exp(b)  f32[n, m + 2]", "return c, d")
    assert covered(parse(text)) == frozenset()
