"""Random numbers that are drawn many at a time: the same bits as PyTorch draws, and the generator as it leaves it."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from anyshape.backend.limits import target_of
from anyshape.backend.llvm_build import object_code
from anyshape.backend.llvm_twister import emit_twister
from anyshape.plan.plan import ExternStep, Window
from anyshape.run import draws
from roads import compilation_of, compiled


def kept(count: int, probability: float) -> torch.Tensor:
    """What PyTorch draws."""
    return torch.empty(count, dtype=torch.bool).bernoulli_(probability)


@pytest.mark.parametrize("probability", [1e-9, 0.1, 0.5, 0.9, 1 - 1e-16])
def test_bools_are_those_of_bernoulli(probability: float) -> None:
    """After any number of words that were drawn before, odd ones too; and what comes after them is the same."""
    for before in (0, 1, 2, 311, 623, 624, 625, 1247):
        for count in (draws.LEAST, draws.LEAST + 1, 9999, 31 * draws.LEAST + 3):
            found = []
            for draw in (lambda n: draws.bernoulli((n,), probability), lambda n: kept(n, probability)):
                torch.manual_seed(before)
                torch.empty(before, dtype=torch.int32).random_()
                found.append((draw(count), torch.rand(5), draw(count), torch.get_rng_state()))
            for own, wanted in zip(*found, strict=True):
                assert torch.equal(own, wanted), (before, count)


def test_they_are_drawn_many_at_a_time() -> None:
    """On a processor on which PyTorch draws them one after another."""
    cpu = Path("/proc/cpuinfo")
    if not cpu.exists() or "GenuineIntel" in cpu.read_text():
        pytest.skip("MKL draws them")
    assert draws._routine() is not None


def test_numbers_between_are_not_lost() -> None:
    """A normal number is kept for the next call of the generator; so it is here."""
    found = []
    for draw in (lambda n: draws.bernoulli((n,), 0.5), lambda n: kept(n, 0.5)):
        torch.manual_seed(3)
        first = torch.randn(1)
        found.append((first, draw(draws.LEAST), torch.randn(1), torch.randn(33)))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("features", [(), ("avx2", "fma"), ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma")],
                         ids=["sse", "avx2", "avx512"])
def test_every_target_has_code_for_it(features: tuple[str, ...]) -> None:
    target = target_of("x86_64-unknown-linux-gnu", "x86-64", frozenset(features))
    assert object_code(emit_twister(target), target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dropout_is_as_eager(dtype: torch.dtype) -> None:
    """Values, gradients and the generator; a transposed input is drawn as it lies in memory."""
    def function(x: torch.Tensor) -> torch.Tensor:
        return functional.dropout((x + 1).tanh(), 0.3, True) * 2 + functional.dropout(x, 0.1, True)

    fast = compiled(function, strict=True)
    for shape in ((3, 5), (67, 96), (301, 77), (1, 4096), (0, 3)):
        for turned in (False, True):
            found = []
            for run in (fast, function):
                torch.manual_seed(0)
                x = torch.randn(shape, dtype=torch.float64).to(dtype)
                x = (x.t() if turned else x).requires_grad_()
                y = run(x)
                found.append((y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y)), torch.get_rng_state()))
            *own, state = found[0]
            *wanted, state_of_eager = found[1]
            assert torch.equal(state, state_of_eager)
            bound = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float64: 1e-14}[dtype]
            for left, right in zip(own, wanted, strict=True):
                torch.testing.assert_close(left, right, rtol=bound, atol=bound)


def test_only_the_bools_are_pytorchs() -> None:
    """What is made of them is part of the kernels around."""
    fast = compiled(lambda x: functional.dropout(x * 2, 0.5, True) + 1, strict=True)
    x = torch.randn(70, 80)
    torch.manual_seed(1)
    found = fast(x)
    torch.manual_seed(1)
    torch.testing.assert_close(found, functional.dropout(x * 2, 0.5, True) + 1)
    (program,) = compilation_of(fast).programs
    calls = [step for step in program.compiled.plan.steps if isinstance(step, ExternStep)]
    assert [step.target for step in calls] == ["draws.bernoulli"]
    assert not any(isinstance(one, Window) for one in calls[0].inputs)
