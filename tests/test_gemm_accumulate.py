"""Products that take in what is added to them: right everywhere, written over what they add where that may be."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from anyshape.plan.ir.program import LibraryStep
from comparing import differs
from roads import compilation_of, compiled

Build = Callable[[torch.dtype], Callable[..., torch.Tensor]]


def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape))) / shape[-1] ** 0.5


def residual(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    w, v, b = drawn(dtype, 160, 160), drawn(dtype, 160, 320), drawn(dtype, 160)

    def f(x: torch.Tensor) -> torch.Tensor:
        h = x @ w
        return torch.tanh(F.linear(torch.tanh(F.linear(h, v.t())), v, b) + h)
    return f


def stream(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Sums that a network hands on, with norms between."""
    w = drawn(dtype, 160, 160)

    def f(x: torch.Tensor) -> torch.Tensor:
        x = x + torch.relu(x)
        for _ in range(3):
            x = x + F.layer_norm(x, (160,)) @ w
        return x.sin()
    return f


def itself(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """What is added is an operand as well: it must not be written over."""
    w = drawn(dtype, 160, 160)

    def f(x: torch.Tensor) -> torch.Tensor:
        h = x @ w
        return (h @ w + h).cos()
    return f


def still_needed(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    w = drawn(dtype, 160, 160)

    def f(x: torch.Tensor) -> torch.Tensor:
        h = x @ w
        y = torch.tanh(h) @ w + h
        return y.relu() @ h.t()
    return f


def two_products(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    w, v = drawn(dtype, 160, 160), drawn(dtype, 160, 160)
    return lambda x: (x @ w + x.sin() @ v + (x * 2) @ w).exp()


def bias(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    w, b = drawn(dtype, 160, 160), drawn(dtype, 160)
    return lambda x: F.linear(F.linear(x, w, b).transpose(0, 1)[:, :1].t(), w, b)


def turned(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """What is added lies in memory in another order."""
    w = drawn(dtype, 160, 160)

    def f(x: torch.Tensor) -> torch.Tensor:
        h = (w @ x.t()).t()
        return torch.tanh(x.cos() @ w + h)
    return f


def batched(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    w = drawn(dtype, 3, 160, 160)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = torch.stack([x, x + 1, x * 2]) @ w
        return (torch.tanh(y) @ w + y).sum(0)
    return f


CASES: dict[str, Build] = {
    f.__name__: f for f in (residual, stream, itself, still_needed, two_products, bias, turned, batched)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_as_eager_at_every_size(name: str, dtype: torch.dtype) -> None:
    f = CASES[name](dtype)
    fast = compiled(f, check=1)
    for n in (5, 1, 64, 2, 131, 0):
        x = drawn(dtype, n, 160)
        assert not differs(fast(x), f(x)), n


@pytest.mark.parametrize(("name", "taken", "over"), [
    ("residual", 1, 1), ("stream", 3, 3), ("itself", 1, 0), ("still_needed", 0, 0), ("two_products", 2, 2),
    ("bias", 1, 0), ("turned", 0, 0), ("batched", 1, 1)])
def test_written_over_what_is_added(name: str, taken: int, over: int) -> None:
    fast = compiled(CASES[name](torch.float32))
    fast(drawn(torch.float32, 64, 160))
    steps = [step for program in compilation_of(fast).programs for step in program.compiled.plan.steps
             if isinstance(step, LibraryStep) and step.op == "matmul_add"]
    assert len(steps) == taken
    assert sum(step.inputs[2].buffer == step.outputs[0].buffer for step in steps) == over


def test_gradients_of_one_operand_are_added_up() -> None:
    w, v, u = (drawn(torch.float32, 160, 160).requires_grad_() for _ in range(3))

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x @ w).sin() * (x @ v).cos() + (x @ u).tanh()
    fast = compiled(f)
    for n in (33, 7):
        x, y = (drawn(torch.float32, n, 160).requires_grad_() for _ in range(2))
        found = torch.autograd.grad(fast(x).sum(), (x, w, v, u))
        wanted = torch.autograd.grad(f(y).sum(), (y, w, v, u))
        assert not any(map(differs, found, wanted))
    assert sum(isinstance(step, LibraryStep) and step.op == "matmul_add" for program in compilation_of(fast).programs
               for step in program.compiled.plan.steps) == 2


def test_products_are_as_exact_as_eagers() -> None:
    """Long sums are made in parts; see CHAIN in backend/cpu/microkernels/gemm.py."""
    fast = compiled(torch.matmul)
    for inner in (128, 256, 300, 512, 1024, 2048):
        x, y = drawn(torch.float32, 64, inner), drawn(torch.float32, inner, 64)
        exact = x.double() @ y.double()
        ours, eagers = ((result.double() - exact).square().mean().sqrt() for result in (fast(x, y), x @ y))
        assert ours <= 1.1 * eagers, inner
