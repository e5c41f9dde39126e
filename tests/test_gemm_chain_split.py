"""Wide values between two products, done in halves, and attention over its queries: right, and with less memory."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anyshape
from anyshape.backend.cpu.bytecode.products import native
from anyshape.backend.cpu.machine.target import host
from anyshape.plan.ir.program import LibraryStep
from comparing import differs
from roads import compilation_of, compiled

SIZES = (97, 2, 0, 1, 7, 16, 257)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape))) / shape[-1] ** 0.5


class Weights(nn.Module):
    """A function of a tensor and of weights, whose sizes are numbers because a module has them."""

    def __init__(self, function: Callable[..., Any], dtype: torch.dtype, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(drawn(*shape, dtype=dtype), requires_grad=False)
                                         for shape in shapes])

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *list(self.weights))  # torch 2.12 takes no ParameterList after a star


def plain(dtype: torch.dtype) -> nn.Module:
    return Weights(lambda x, up, down, bias, last: F.linear(F.gelu(F.linear(x, up, bias)), down, last), dtype,
                   (768, 96), (96, 768), (768,), (96,))


def residual(dtype: torch.dtype) -> nn.Module:
    return Weights(lambda x, up, down, bias, scale: x.sin() + torch.relu(
        F.layer_norm(x.sin(), (96,), scale) @ up + bias) @ down, dtype, (96, 768), (768, 96), (768,), (96,))


def gated(dtype: torch.dtype) -> nn.Module:
    return Weights(lambda x, gate, up, down: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down), dtype,
                   (512, 96), (512, 96), (96, 512))


def layers(dtype: torch.dtype) -> nn.Module:
    def f(x: Tensor, *weights: Tensor) -> Tensor:
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            x = x + torch.tanh(x @ up) @ down
        return x
    return Weights(f, dtype, *[shape for i in range(3) for shape in ((96, 768 + 64 * i), (768 + 64 * i, 96))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("build", [plain, residual, gated, layers])
def test_halves_are_as_the_whole(build: Callable[[torch.dtype], nn.Module], dtype: torch.dtype) -> None:
    f = build(dtype)
    whole, halves = compiled(f, disable="gemm_chain_split"), compiled(f)
    for n in SIZES:
        x = drawn(n, 3, 96, dtype=dtype)
        exact = f(x) if dtype == torch.float64 else build(torch.float64)(x.double())
        assert not differs(halves(x), f(x)) and not differs(whole(x), f(x))
        if n and dtype == torch.float32:
            ours, without = (float((g(x) - exact).norm() / exact.norm()) for g in (halves, whole))
            assert ours < 1.3 * without + 1e-8
    arenas = []
    for g in (halves, whole):
        program = compilation_of(g).programs[0].executable
        arenas.append(program.specializer.arena(dict.fromkeys((name for name, _ in program.plan.facts.hints), 257)))
    assert arenas[0] < 0.75 * arenas[1]


UP, DOWN = (96, 768), (768, 96)


def products(f: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32,
             rows: int = 80) -> int:
    module = Weights(f, dtype, *shapes)
    fast = compiled(module)
    x = drawn(rows, 96, dtype=dtype)
    assert not differs(fast(x), module(x))
    return sum(isinstance(step, LibraryStep) for step in compilation_of(fast).programs[0].executable.plan.steps)


def test_a_wide_value_that_is_needed_stays_whole() -> None:
    def kept(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        h = (x @ up).tanh()
        return h @ down, h

    def summed(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        h = (x @ up).tanh()
        return h @ down + h.sum()

    assert products(lambda x, up, down: x @ up @ down, UP, DOWN) == 4
    assert products(lambda x, up, down: x @ up @ down, UP, DOWN, rows=8) == 2  # weights are read at memory's speed
    assert products(kept, UP, DOWN) == 2
    assert products(summed, UP, DOWN) == 2
    assert products(lambda x, up, down: F.layer_norm(x @ up, (768,)) @ down, UP, DOWN) == 2
    assert products(lambda x, up, down: x @ up @ down, UP, (768, 512)) == 2  # hardly wider than its result
    assert products(lambda x, up, down: x @ up @ down, (96, 448), (448, 32)) == 2  # the halves would be narrow
    # another value as wide is there
    assert products(lambda x, up, down: (x @ up * torch.cat([x] * 8, 1).sin()) @ down, UP, DOWN) == 2


def test_half_precision_is_rounded_once() -> None:
    assert products(lambda x, up, down: (x @ up).tanh() @ down, UP, DOWN, dtype=torch.bfloat16) == 2


def test_training_keeps_the_wide_value_and_gives_gradients() -> None:
    module = nn.Sequential(nn.Linear(96, 768), nn.GELU(), nn.Linear(768, 96))
    model = anyshape.compile(module)
    for n in (3, 1, 17):
        x = drawn(n, 96)
        model(x).square().sum().backward()
        found = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
        module.zero_grad()
        module(x).square().sum().backward()
        for one, parameter in zip(found, module.parameters(), strict=True):
            torch.testing.assert_close(one, parameter.grad)
        module.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.skipif(
    not native("bf16", host()), reason="half precision is PyTorch's on this processor"))], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_writes_over_its_queries(dtype: torch.dtype, causal: bool) -> None:
    weights = [drawn(64, 64, dtype=dtype) for _ in range(4)]

    def f(x: Tensor) -> Tensor:
        q, k, v = ((x @ w).view(x.shape[0], x.shape[1], 4, 16).transpose(1, 2) for w in weights[:3])
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return mixed.transpose(1, 2).reshape(x.shape) @ weights[3]

    g = compiled(f)
    for batch, length in ((2, 7), (1, 1), (3, 257), (2, 0), (0, 5), (5, 64), (1, 130)):
        x = drawn(batch, length, 64, dtype=dtype)
        assert not differs(g(x), f(x))
    program = compilation_of(g).programs[0]
    attention = next(step for step in program.executable.plan.steps
                     if isinstance(step, LibraryStep) and step.op == "attention")
    assert attention.inputs[0].buffer == attention.outputs[0].buffer


def test_queries_that_are_needed_are_not_written_over() -> None:
    w = drawn(64, 64)

    def heads(x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], 4, 16).transpose(1, 2)

    def later(x: Tensor) -> Tensor:
        q = x @ w
        mixed = F.scaled_dot_product_attention(heads(q), heads(x), heads(x))
        return mixed.transpose(1, 2).reshape(x.shape) + q

    def also_keys(x: Tensor) -> Tensor:
        q = x @ w
        mixed = F.scaled_dot_product_attention(heads(q), heads(q), heads(x))
        return mixed.transpose(1, 2).reshape(x.shape).sin()

    def turned(x: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(heads(x @ w).transpose(2, 3).contiguous().transpose(2, 3), heads(x),
                                               heads(x))
        return mixed.transpose(1, 2).reshape(x.shape).sin()

    for f in (later, also_keys, turned):
        g = compiled(f)
        for batch, length in ((2, 7), (1, 64), (3, 130)):
            x = drawn(batch, length, 64)
            assert not differs(g(x), f(x))
