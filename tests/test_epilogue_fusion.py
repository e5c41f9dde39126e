"""Kernels that read a product run with it as one step of the host (plan/schedule/launch_grouping.py,
backend/cpu/routines/parallel_region.py)."""
from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import anyshape
from anyshape.backend.cpu.bytecode import format, products
from anyshape.backend.cpu.machine.target import host
from anyshape.base.errors import IndexRangeError
from anyshape.plan.ir.program import KernelStep, LibraryStep
from anyshape_bench.measure import launch_count
from reference_words import ours_do
from sampling import crossed

# rows, inner dim, columns: nothing, one, primes, few rows, several blocks of rows, and of the inner dim
SIZES = [(0, 8, 8), (5, 0, 8), (1, 1, 1), (1, 512, 512), (7, 64, 130), (11, 13, 17), (13, 300, 127), (64, 600, 96),
         (1031, 257, 131), (96, 1700, 70)]


@pytest.fixture(params=["panels", "library"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Products of f32 from panels or by the library, whatever the processor."""
    monkeypatch.setenv("ANYSHAPE_PRODUCTS", "own" if request.param == "panels" else "library")
    return str(request.param)


def gelu(x, w, b):
    return functional.gelu(x @ w + b)


def gated(x, w, b):
    """Products side by side, then a kernel that reads both, cast to another dtype."""
    return (functional.silu(x @ w) * (x @ (w + b))).to(torch.float64)


def normed(x, w, b):
    """A sum along the rows, and, in a second kernel, one over them."""
    y = (x @ w + b).softmax(-1)
    return y - y.sum(0)


def turned(x, w, b):
    """The kernel reads the product in another order."""
    return torch.tanh((x @ w).t() * 2 + b[:, None])


KERNELS = ((gelu, torch.float32), (gated, torch.float32), (normed, torch.float32), (turned, torch.float32),
           (gated, torch.bfloat16))


@pytest.mark.parametrize(("kernel", "counts"), crossed(KERNELS, ((3,), (1, 3)), one_in=4))
def test_to_the_bit_as_one_after_the_other(by, kernel, counts):
    function, dtype = kernel
    if by == "library" and dtype is torch.bfloat16:
        pytest.skip("the library has none")
    fast = anyshape.compile(function, strict=True)
    apart = anyshape.compile(function, strict=True, disable="epilogues")
    before = torch.get_num_threads()
    try:
        for rows, inner, columns in SIZES:
            x, w, b = (torch.randn(*shape).to(dtype) for shape in ((rows, inner), (inner, columns), (columns,)))
            for threads in counts:  # torch's tracer makes new programs for each
                torch.set_num_threads(threads)
                one, other = fast(x, w, b), apart(x, w, b)
                ours = dtype is torch.bfloat16 or (by == "panels" and ours_do(
                    products.Fixed(host(), True), rows, columns, inner, 1))
                if ours or threads == 1:
                    assert torch.equal(one, other), (rows, inner, columns, threads)
                else:  # the library's bits may change from call to call
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        if dtype is torch.float32:
            torch.testing.assert_close(fast(x, w, b), function(x, w, b), rtol=1e-3, atol=1e-3)
    finally:
        torch.set_num_threads(before)


def ops_of(fast, *arguments):
    """The host's steps of the last call, those of a series one by one after its head."""
    fast(*arguments)
    *_, record = fast.programs[-1].compiled.executable.specializations.values()
    found, at = [], record.payload.words[format.HEAD_FIRST]
    while record.payload.words[at] != format.END:
        found.append(record.payload.words[at])
        at += record.payload.words[at + 1]
    return found


@pytest.mark.parametrize("rows", [96, 3])
def test_one_step_and_one_launch(by, rows):
    fast = anyshape.compile(gelu, strict=True)
    arguments = torch.randn(rows, 256), torch.randn(256, 128), torch.randn(128)
    way = format.PRODUCT if by == "panels" and rows == 96 else format.MATMUL
    assert ops_of(fast, *arguments) == [format.SERIES, way, format.KERNEL]
    step = lambda: fast(*arguments)  # noqa: E731
    assert launch_count.of_step("anyshape", fast, step) == {"kernels": 0, "products": 1, "calls": 0, "copies": 0}
    assert launch_count.of_step("anyshape", fast, step, apart=True) == {"kernels": 1, "products": 1, "calls": 0,
                                                                    "copies": 0}
    apart = anyshape.compile(gelu, strict=True, disable="epilogues")
    assert ops_of(apart, *arguments) == [way, format.KERNEL]


def test_a_product_without_elements_leaves_the_kernel_alone():
    fast = anyshape.compile(lambda x, w: (x @ w).sum(0) + 1, strict=True)
    assert ops_of(fast, torch.randn(6, 5), torch.randn(5, 4))[:2] == [format.SERIES, format.MATMUL]
    assert torch.equal(fast(torch.randn(0, 5), torch.randn(5, 4)), torch.ones(4))


def test_only_kernels_that_read_the_product_join_it():
    def function(x, w, y):
        return x @ w, y.exp()

    fast = anyshape.compile(function, strict=True)
    fast(torch.randn(6, 5), torch.randn(5, 4), torch.randn(7))
    plan = fast.programs[0].compiled.plan
    assert {type(step) for step in plan.steps} == {LibraryStep, KernelStep} and not plan.together


@pytest.mark.parametrize("threads", [1, 3])
def test_a_check_behind_a_product(threads):
    """The kernel that checks reads the product; the one behind it does not run after a failure."""
    def function(x, w, places, table):
        return ((x @ w)[places].cumsum(0) * table).cumsum(0)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fast = anyshape.compile(function, strict=True)
        for rows in (600, 20):
            x, w, table = torch.randn(rows, 64), torch.randn(64, 300), torch.randn(300)
            places = torch.randperm(rows)
            torch.testing.assert_close(fast(x, w, places, table), function(x, w, places, table), rtol=1e-3, atol=1e-2)
            places[rows // 2] = rows
            with pytest.raises(IndexRangeError, match="out of range"):
                fast(x, w, places, table)
    finally:
        torch.set_num_threads(before)


def test_training_steps_are_the_same_to_the_bit():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(48, 96), torch.nn.GELU(), torch.nn.LayerNorm(96),
                                 torch.nn.Linear(96, 33), torch.nn.Tanh())
    found = []
    for disable in ("", "epilogues"):
        fast = anyshape.compile(module, strict=True, disable=disable)
        for rows in (70, 1, 129):
            x = torch.linspace(-2, 2, rows * 48).reshape(rows, 48).requires_grad_()
            fast(x).square().sum().backward()
            found.append([x.grad, *(parameter.grad for parameter in module.parameters())])
            module.zero_grad()
    for one, other in zip(found[:3], found[3:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
