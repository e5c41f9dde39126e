"""Writes at places that the data say: values against eager PyTorch, indices out of range, memory, threads."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import anyshape
from anyshape.backend.cpu.codegen.interchange import BLOCK
from anyshape.backend.cpu.machine.target import HARDWARE
from anyshape.kernel.loop_ir.directives import Interchange
from anyshape.kernel.schedule.interchange import PER_ROW
from anyshape.plan.ir.program import CopyStep, ExternStep, KernelStep, Plan
from roads import compilation_of, compiled
from sampling import crossed

DTYPES = (torch.float32, torch.bfloat16, torch.bool)
MORE_DTYPES = (torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8)
# length of what is written into, number of rows written, columns
SHAPES = ((5, 3, 4), (1, 7, 1), (3, 1, 17), (13, 29, 31), (4, 0, 3), (6, 5, 0), (2, 300, 67), (97, 64, 16))


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Small whole numbers: sums are exact in every dtype."""
    return torch.randint(0, 2, shape).to(dtype) if dtype in (torch.bool, torch.uint8) \
        else torch.randint(-3, 4, shape).to(dtype)


def plans(fast: Any) -> list[Plan]:
    return [program.compiled.plan for program in compilation_of(fast).programs]


def steps(fast: Any, kind: type) -> int:
    return sum(isinstance(step, kind) for plan in plans(fast) for step in plan.steps)


Case = tuple[Callable[..., Any], Callable[[torch.dtype, int, int, int], tuple[torch.Tensor, ...]]]


def rows(dtype: torch.dtype, n: int, m: int, k: int) -> tuple[torch.Tensor, ...]:
    return numbers(dtype, n, k), torch.randint(0, n, (m,)), numbers(dtype, m, k)


def wrapped(dtype: torch.dtype, n: int, m: int, k: int) -> tuple[torch.Tensor, ...]:
    return numbers(dtype, n, k), torch.randint(-n, n, (m,)), numbers(dtype, m, k)


def columns(dtype: torch.dtype, n: int, m: int, k: int) -> tuple[torch.Tensor, ...]:
    return numbers(dtype, k, n), torch.randint(0, n, (m,)), numbers(dtype, k, m)


def each_row(dtype: torch.dtype, n: int, m: int, k: int) -> tuple[torch.Tensor, ...]:
    return numbers(dtype, k + 1, n), torch.randint(0, n, (k, m)), numbers(dtype, k + 2, m + 1)


def each_column(dtype: torch.dtype, n: int, m: int, k: int) -> tuple[torch.Tensor, ...]:
    return numbers(dtype, n, k), torch.randint(0, n, (m, k)), numbers(dtype, m, k)


def pairs(dtype: torch.dtype, n: int, m: int, k: int) -> tuple[torch.Tensor, ...]:
    return (numbers(dtype, n, 3, k + 1), torch.randint(-n, n, (m, 1)), torch.randint(-k - 1, k + 1, (2,)),
            numbers(dtype, m, 2, 3))


def first_two(dtype: torch.dtype, n: int, m: int, k: int) -> tuple[torch.Tensor, ...]:
    return (numbers(dtype, n, 3, k), torch.randint(-n, n, (m, 2)), torch.randint(-3, 3, (2,)), numbers(dtype, m, 2, k))


def apart(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[i, :, j] = y
    return x


def inner(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, i] += y
    return x


def reduced(how: str, own: bool, x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.scatter_reduce(1, i, y, how, include_self=own)


def reduced_rows(how: str, own: bool, x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.index_reduce(0, i, y.clamp(-1, 1), how, include_self=own)


CASES: dict[str, Case] = {
    "index_put": (lambda x, i, y: x.index_put((i,), y), wrapped),
    "index_put add": (lambda x, i, y: x.index_put((i,), y, accumulate=True), wrapped),
    "index_put broadcast": (lambda x, i, y: x.index_put((i,), y[:1, :1].sum().to(x.dtype), accumulate=True), wrapped),
    "index_put last": (lambda x, i, y: x.clone().transpose(0, 1).index_put((i,), y.transpose(0, 1)), columns),
    "index_put two": (lambda x, i, j, y: x.index_put((i, j), y, accumulate=True), first_two),
    "index_put two, assigned": (lambda x, i, j, y: x.index_put((i, j), y), first_two),
    "index_put apart": (apart, pairs),
    "index_put None": (inner, columns),
    "index_add": (lambda x, i, y: x.index_add(0, i, y), rows),
    "index_add last": (lambda x, i, y: x.index_add(-1, i.int(), y), columns),
    "index_copy": (lambda x, i, y: x.index_copy(0, i, y), rows),
    "index_copy last": (lambda x, i, y: x.index_copy(1, i, y), columns),
    "index_fill": (lambda x, i, y: x.index_fill(0, i, 1), rows),
    "scatter": (lambda x, i, y: x.scatter(1, i, y), each_row),
    "scatter value": (lambda x, i, y: x.scatter(0, i, 1), each_column),
    "scatter columns": (lambda x, i, y: x.scatter(0, i, y), each_column),
    "scatter_add": (lambda x, i, y: x.scatter_add(1, i, y), each_row),
    "scatter_add columns": (lambda x, i, y: x.scatter_add(0, i, y), each_column),
    **{f"scatter_reduce {how} {own}": (functools.partial(reduced, how, own), each_row)
       for how in ("sum", "prod", "amax", "amin") for own in (True, False)},
    "scatter with reduce": (lambda x, i, y: x.scatter(1, i, y, reduce="multiply"), each_row),
    "scatter value with reduce": (lambda x, i, y: x.scatter(1, i, 2, reduce="add"), each_row),
    "put": (lambda x, i, y: x.put(i, y[:, 0], accumulate=True), wrapped),
    **{f"index_reduce {how}": (functools.partial(reduced_rows, how, how != "prod"), rows)
       for how in ("prod", "amax", "amin")},
    "scatter_add spread": (lambda x, i, y: x.scatter_add(0, i[:, None].expand(y.shape), y), rows),
}


def alone(function, *given):
    """Eager's result on one thread: on more, which of several elements for one place stays is left to chance."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function(*given)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("name", "dtype"), crossed(CASES, DTYPES) + crossed(
    ("index_put add", "scatter", "scatter_add"), MORE_DTYPES, one_in=2), ids=str)
def test_values(name: str, dtype: torch.dtype) -> None:
    """Every shape by one program a dtype (two where a size is 0 or 1), with repeated indices; exact in every dtype."""
    torch.manual_seed(0)
    function, make = CASES[name]
    torch.compiler.reset()
    fast = compiled(function, strict=True)
    for shape in SHAPES:
        given = make(dtype, *shape)
        try:
            wanted = alone(function, *given)
        except (IndexError, RuntimeError):
            continue  # eager PyTorch has no such shape
        found = fast(*given)
        assert found.stride() == wanted.stride() or 0 in shape
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not steps(fast, ExternStep)


def test_tensors_without_dims() -> None:
    x, i, y = torch.tensor(1.5), torch.tensor([0]), torch.tensor(2.0)
    for function in (lambda x, i, y: x.index_add(0, i, y), lambda x, i, y: x.index_copy(0, i, y),
                     lambda x, i, y: x.scatter_add(0, i[0], y), lambda x, i, y: x.scatter(0, i[0], y)):
        torch.compiler.reset()
        fast = compiled(function, strict=True)
        assert torch.equal(fast(x, i, y), function(x, i, y))
        assert not steps(fast, ExternStep)


def test_a_mask_with_one_value_is_a_choice() -> None:
    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x * 2
        x[mask] = -1.0
        return x

    fast = compiled(function, strict=True)
    for shape in ((3, 4), (1, 1), (0, 5), (17, 31)):
        x = torch.randn(shape)
        for mask in (x > 0, (x > 0).any(1)):
            assert torch.equal(fast(x, mask), function(x, mask))
    assert not steps(fast, ExternStep)


WRONG = {
    "index_put": (lambda x, i, y: x.index_put((i,), y), (4, -5)),
    "index_put add": (lambda x, i, y: x.index_put((i,), y, accumulate=True), (4, -5)),
    "index_add": (lambda x, i, y: x.index_add(0, i, y), (4, -1)),
    "index_copy": (lambda x, i, y: x.index_copy(0, i, y), (4, 2**40)),
    "scatter": (lambda x, i, y: x.scatter(0, i[:, None].expand(y.shape), y), (4, -1)),
    "scatter one": (lambda x, i, y: x.scatter(0, i[1:2, None].expand(1, 33), 1.0), (4, -1)),
    "scatter_add": (lambda x, i, y: x.scatter_add(0, i[:, None].expand(y.shape), y), (4, -2**40)),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_index_out_of_range_is_an_error(name: str) -> None:
    function, wrong = WRONG[name]
    fast = compiled(function, strict=True)
    x, y = torch.randn(4, 33), torch.randn(3, 33)
    torch.testing.assert_close(fast(x, torch.tensor([0, 3, 0]), y), function(x, torch.tensor([0, 3, 0]), y))
    for number in wrong:
        at = torch.tensor([0, number, 1])
        with pytest.raises((IndexError, RuntimeError)):
            function(x, at, y)
        with pytest.raises(IndexError):
            fast(x, at, y)


def test_nothing_is_written_into_an_input_by_a_call_that_fails() -> None:
    def function(cache: torch.Tensor, at: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        cache[at] = y
        return cache.sum()

    def looked_up(cache: torch.Tensor, at: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        cache[:2] = y[at].tanh()
        return cache.sum()

    for own in (function, looked_up):
        torch.compiler.reset()
        fast = compiled(own, strict=True)
        cache = torch.zeros(4, 300)
        fast(cache, torch.tensor([1, 0]), torch.ones(2, 300))
        assert not steps(fast, CopyStep)
        before = cache.clone()
        with pytest.raises(IndexError):
            fast(cache, torch.tensor([0, 4]), torch.full((2, 300), 7.0))
        assert torch.equal(cache, before)


# ---- memory


class Cache(nn.Module):
    """Keys and values of earlier tokens, written in place, as transformers' StaticCache."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 3, 40, 8))
        self.register_buffer("values", torch.zeros(2, 3, 40, 8))

    def forward(self, position: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.keys.index_copy_(2, position, k * 2)
        self.values[:, :, position] = v + 1
        return (self.keys * self.values).sum((1, 3))


def test_a_cache_is_written_where_it_lies() -> None:
    torch.manual_seed(0)
    plain, model = Cache(), Cache()
    fast = compiled(model, strict=True)
    start = 0
    for length in (5, 1, 1, 7):
        given = (torch.arange(start, start + length), torch.randn(2, 3, length, 8), torch.randn(2, 3, length, 8))
        start += length
        torch.testing.assert_close(fast(*given), plain(*given))
        assert torch.equal(model.keys, plain.keys) and torch.equal(model.values, plain.values)
    assert not steps(fast, ExternStep) and not steps(fast, CopyStep)


class Window(nn.Module):
    """A cache whose slices are written: at the end of what it holds, with a step, one row."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 3, 40, 8))
        self.register_buffer("every", torch.zeros(2, 40))

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        held, n = x.shape[0], k.shape[2]
        self.keys[:, :, held:held + n] = k * 2
        self.every[:, 1:2 * n:2] = k.sum((1, 3))
        return self.keys[:, :, :held + n].sum((0, 2)) + self.every.sum()


def test_slices_are_written_where_they_lie() -> None:
    torch.manual_seed(0)
    plain, model = Window(), Window()
    fast = compiled(model, strict=True)
    for held, n in ((2, 5), (7, 1), (8, 3), (20, 20)):
        given = torch.ones(held), torch.randn(2, 3, n, 8)
        torch.testing.assert_close(fast(*given), plain(*given))
        torch.testing.assert_close((model.keys, model.every), (plain.keys, plain.every))
    assert not steps(fast, ExternStep) and not steps(fast, CopyStep)


def test_slices_with_steps() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x * 2
        x[1::3] = y
        x[:, 2:4] = 7
        return x

    fast = compiled(function, strict=True)
    for n, k in ((7, 5), (30, 64), (2, 4)):
        x, y = torch.randn(n, k), torch.randn((n + 1) // 3, k)
        torch.testing.assert_close(fast(x, y), function(x, y))
    assert not steps(fast, ExternStep)


def test_what_is_still_needed_is_copied_first() -> None:
    """The input as it was is read, returned, or written to another input, or the new one is returned: no writing in
    place."""
    def read(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> Any:
        old = x * 3
        x.index_add_(0, i, y)
        return old + x

    def itself(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> Any:
        x.index_add_(0, i, x[:2] + y[:2])
        return x.sum()

    def returned(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> Any:
        old = x.clone()
        x.index_copy_(0, i, y)
        return old, x

    def twice(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> Any:
        x.index_add_(0, i, y)
        x.index_add_(0, i, y * 2)
        return x[0] + 1

    def crossed(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> Any:
        new = x.index_add(0, i, y)
        y.copy_(x[:2])
        x.copy_(new)
        return new * 2

    def sliced(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> Any:
        x[:, 1:2] = x[:, :1] * 2
        x[1:2] += 1
        return x[:, 1:].sum()

    for function in (read, itself, returned, twice, crossed, sliced):
        torch.compiler.reset()
        fast = compiled(function, strict=True)
        for n, k in ((5, 3), (2, 70)):
            x, i, y = torch.randn(n, k), torch.randint(0, n, (2,)), torch.randn(2, k)
            own = [x.clone(), i, y.clone()]
            torch.testing.assert_close(fast(*own), function(x, i, y))
            torch.testing.assert_close(own, [x, i, y])


def test_a_constant_is_written_over() -> None:
    """Zeros are made once for each scatter, and not copied, also where two scatters start from the same ones."""
    def function(i: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        zeros = torch.zeros(50, y.shape[1])
        return zeros.index_add(0, i, y), zeros.index_add(0, i, y * 2)

    fast = compiled(function, strict=True)
    i, y = torch.randint(0, 50, (200,)), torch.randn(200, 40)
    torch.testing.assert_close(fast(i, y), function(i, y))
    assert not steps(fast, CopyStep) and steps(fast, KernelStep) <= 5


def test_a_chain_of_scatters_is_one_buffer() -> None:
    def function(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * 2).index_add(0, i, y).index_copy(0, i[:2], y[:2]).index_put((i,), y, accumulate=True)

    fast = compiled(function, strict=True)
    for n, k in ((9, 5), (30, 64)):
        x, i, y = torch.randn(n, k), torch.randint(0, n, (20,)), torch.randn(20, k)
        torch.testing.assert_close(fast(x, i, y), function(x, i, y))
    assert not steps(fast, CopyStep)
    (plan,) = plans(fast)
    assert sum(buffer.bytes == plan.buffers[-1].bytes for buffer in plan.buffers) == 1


# ---- gradients


@pytest.mark.parametrize(("count", "width", "padding", "dtype"), crossed(
    (1, 500), (1, 24), (None, 0), (torch.float32, torch.bfloat16)), ids=str)
def test_an_embedding_learns_in_kernels(count: int, width: int, padding: int | None, dtype: torch.dtype) -> None:
    """The sum of a row's gradients has eager's order, bit for bit; padding gets none."""
    torch.manual_seed(0)
    torch.compiler.reset()
    table = nn.Embedding(count, width, padding_idx=padding).to(dtype)

    def function(tokens: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (table(tokens) * scale).sum()

    fast = compiled(function, strict=True)
    for shape in ((2, 9), (4, 31), (3, 0), (1, 1)):
        tokens, scale = torch.randint(0, count, shape), torch.randn(*shape, 1).to(dtype)
        grads = []
        for run in (fast, function):
            table.weight.grad = None
            run(tokens, scale).backward()
            grads.append(table.weight.grad)
        assert torch.equal(*grads), shape
    assert not steps(fast, ExternStep)


@pytest.mark.parametrize("function", [
    lambda x, i: torch.gather(x, 1, i), lambda x, i: x[i[0] % 5], lambda x, i: x.index_select(1, i[0]),
    lambda x, i: torch.take_along_dim(x, i, 1), lambda x, i: x[:, i]])
def test_gradients_of_lookups(function: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    fast = compiled(function, strict=True)
    for n, m in ((7, 9), (40, 3), (33, 200)):
        x, i = torch.randn(5, n, requires_grad=True), torch.randint(0, n, (5, m))
        (found,), (wanted,) = (torch.autograd.grad(run(x, i).sin().sum(), x) for run in (fast, function))
        torch.testing.assert_close(found, wanted)
    assert not steps(fast, ExternStep)


def test_threads_agree() -> None:
    """Rows are split among threads; the sums are the same ones."""
    def function(i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(97, 515).index_add(0, i, y * 2), torch.zeros(2000, 515).scatter_add(1, j, y)

    i, j, y = torch.randint(0, 97, (2000,)), torch.randint(0, 515, (2000, 515)), torch.randn(2000, 515)
    found = []
    for threads in (1, 2, 3):
        torch.compiler.reset()
        found.append(compiled(function, strict=True, threads=threads)(i, j, y))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    torch.testing.assert_close(found[0], function(i, j, y))


def test_explain_shows_kernels() -> None:
    fast = anyshape.compile(lambda x, i, y: x.index_add(0, i, y * 2) + 1, strict=True)
    fast(torch.randn(5, 6), torch.tensor([1, 1]), torch.randn(2, 6))
    text = str(fast.explain())
    assert "PyTorch runs it" not in text and "aten.index_add" not in text


@pytest.mark.parametrize("name", ["index_add", "index_put", "index_put two", "index_put add", "scatter_add spread"])
def test_interchanged_rows(name: str) -> None:
    """Columns of several strips, of whole row blocks and not, on threads whose part begins in the middle of a row."""
    function, make = CASES[name]
    strip = HARDWARE.near_cache_bytes // PER_ROW
    torch.manual_seed(0)
    for threads in (1, 3):
        torch.compiler.reset()
        fast = compiled(function, strict=True, threads=threads)
        for shape in ((5, 3, 40), (3, 40, 2 * strip + 77), (7, 300, BLOCK), (2, 9, strip + BLOCK - 1),
                      (9, 200, 5 * BLOCK)):
            given = make(torch.float32, *shape)
            torch.testing.assert_close(fast(*given), alone(function, *given), rtol=0, atol=0)
        assert any(kernel.directive(Interchange) for program in compilation_of(fast).programs
                   for kernel in program.compiled.programs.values())
