"""Kernels that go along the rows and add up over them: numbers against float64, at awkward sizes, on any threads."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import anyshape
from anyshape.backend.cpu.codegen.nontemporal_stores import LARGE
from sampling import crossed

Function = Callable[..., torch.Tensor]
FUNCTIONS: dict[str, Function] = {
    "layer norm": lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b),
    "rms norm": lambda x, w, b: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w + b,
    "gelu and bias": lambda x, w, b: F.gelu(x + b) * w,
    "softmax and bias": lambda x, w, b: torch.softmax(x * w + b, -1),
}
FIRST = (64, 160)  # rows, columns of the first call: long enough for every function's sums to join
BOUND = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def arguments(rows: int, columns: int, dtype: torch.dtype, strided: bool = False) -> list[torch.Tensor]:
    x = torch.randn(columns, rows).t() if strided else torch.randn(rows, columns)
    return [one.to(dtype).requires_grad_() for one in (x, torch.randn(columns), torch.randn(columns))]


def gradients(function: Function, inputs: list[torch.Tensor], up: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(function(*inputs), inputs, up))


def exact(function: Function, inputs: list[torch.Tensor], up: torch.Tensor) -> list[torch.Tensor]:
    return gradients(function, [one.detach().double().requires_grad_() for one in inputs], up.double())


def parts_of(compiled) -> list[str]:
    """The backward's kernels that store sums of parts."""
    return [step.what for program in compiled.explain().programs for step in program.steps if " parts" in step.what]


def close(found: torch.Tensor, wanted: torch.Tensor, bound: float, terms: int) -> None:
    """As near as `bound` says for results of about 1; sums of `terms` are about as large as its root."""
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted, rtol=bound, atol=bound * max(terms, 1) ** 0.5)


@pytest.mark.parametrize(("name", "dtype"), crossed(FUNCTIONS, BOUND, one_in=2), ids=str)
def test_gradients_are_those_of_float64(name: str, dtype: torch.dtype) -> None:
    """One program for all sizes, whatever its first call has seen."""
    function = FUNCTIONS[name]
    compiled = anyshape.compile(function, strict=True)
    sizes = [FIRST, (1, 160), (0, 160), (31, 17), (97, 1), (1009, 127), (2, 3), (33, 640)]
    for rows, columns in sizes:
        for strided in (False, True) if dtype == torch.float32 else (False,):
            inputs = arguments(rows, columns, dtype, strided)
            up = torch.randn(rows, columns).to(dtype)
            for found, wanted in zip(gradients(compiled, inputs, up), exact(function, inputs, up), strict=True):
                # a norm of one column is 0/0 but for its epsilon
                bound = BOUND[dtype] * (1 if columns > 3 else 300)
                close(found, wanted, bound, rows if found.dim() == 1 else 1)
    assert parts_of(compiled), compiled.explain()


@pytest.mark.parametrize("name", ["layer norm", "gelu and bias"])
def test_what_is_streamed_beside_the_sums_is_right(name: str) -> None:
    """Gradients of more than 16 MB, whose rows begin anywhere in a line."""
    function = FUNCTIONS[name]
    compiled = anyshape.compile(function, strict=True)
    gradients(compiled, arguments(*FIRST, torch.float32), torch.randn(*FIRST))
    rows, columns = LARGE // (4 * 1003) + 5, 1003
    inputs, up = arguments(rows, columns, torch.float32), torch.randn(rows, columns)
    for found, wanted in zip(gradients(compiled, inputs, up), exact(function, inputs, up), strict=True):
        close(found, wanted, BOUND[torch.float32], rows if found.dim() == 1 else 1)
    assert parts_of(compiled)


def test_long_sums_are_as_exact_as_eagers() -> None:
    """Sums of sums: the error does not grow with the number of rows."""
    function = FUNCTIONS["layer norm"]
    compiled = anyshape.compile(function, strict=True)
    for rows in (4096, 100003):
        inputs, up = arguments(rows, 64, torch.float32), torch.randn(rows, 64)
        wanted = exact(function, inputs, up)
        ours, eager = ([float((found - right).norm() / right.norm()) for found, right in zip(each, wanted, strict=True)]
                       for each in (gradients(compiled, inputs, up), gradients(function, inputs, up)))
        assert all(own <= other + 5e-8 for own, other in zip(ours, eager, strict=True)), (ours, eager)
    assert parts_of(compiled)


def test_threads_do_not_change_the_numbers() -> None:
    """Parts are a matter of sizes; there may be more threads than parts, and more than rows."""
    compiled = anyshape.compile(FUNCTIONS["layer norm"], strict=True)
    for rows in (3, 100, 3000):
        inputs, up = arguments(rows, 512, torch.float32), torch.randn(rows, 512)
        several = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            several.append(gradients(compiled, inputs, up))
        for other in several[1:]:
            assert all(map(torch.equal, several[0], other))
    assert parts_of(compiled)


def test_other_reductions_over_the_rows() -> None:
    """Extremes, products, whole numbers, bools, with what comes after them."""
    def several(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = x * 2 + y
        return (z, z.amax(0), z.amin(0, keepdim=True) - 1, (z > 0).all(0), (z > 0).any(0), (x + 1).prod(0),
                x.to(torch.int32).sum(0), x.mean(0).to(torch.float16))

    compiled = anyshape.compile(several, strict=True)
    for rows, columns in (FIRST, (1, 130), (77, 513)):
        x, y = torch.randn(rows, columns) / 8, torch.randn(columns)
        for found, wanted in zip(compiled(x, y), several(x, y), strict=True):
            torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
    assert parts_of(compiled)


def test_a_sum_that_a_kernel_needs_does_not_join_it() -> None:
    """Batch norm: rows are read again with what is reduced over them; and a sum of what a sum over rows gives."""
    def batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        mean = x.mean(0)
        return (x - mean) * torch.rsqrt(((x - mean) ** 2).mean(0) + 1e-5) * w + b

    compiled = anyshape.compile(batch_norm, strict=True)
    for rows, columns in (FIRST, (31, 17), (1009, 127)):
        inputs, up = arguments(rows, columns, torch.float32), torch.randn(rows, columns)
        for found, wanted in zip(gradients(compiled, inputs, up), exact(batch_norm, inputs, up), strict=True):
            close(found, wanted, 1e-5, rows)
    reasons = {refusal.reason for program in compiled.explain().programs for refusal in program.refusals}
    assert any("rows" in reason for reason in reasons), reasons


def test_explain_counts_the_bytes_of_the_parts() -> None:
    """The sums read nothing of their own: x and the gradient once."""
    compiled = anyshape.compile(FUNCTIONS["layer norm"], strict=True)
    inputs, up = arguments(*FIRST, torch.float32), torch.randn(*FIRST)
    gradients(compiled, inputs, up)
    explanation = compiled.explain(x_0=1024, x_1=512)
    (_, backward) = explanation.programs
    first, totals = backward.kernels
    assert first.ops.count("sum") == 4 and totals.ops == ("sum", "sum")
    moved = [explanation.number(size) for size in (first.read, first.written, totals.read, totals.written)]
    sums = 2 * 32 * 512 * 4
    assert moved == [2 * 1024 * 512 * 4 + 2 * 1024 * 4 + 512 * 4, 1024 * 512 * 4 + sums, sums, 2 * 512 * 4]
