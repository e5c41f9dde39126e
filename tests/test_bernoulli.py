"""Random numbers: drawn many at a time they are the bits that PyTorch draws; they are drawn in PyTorch's order;
and the generator is as it leaves it."""
from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import anyshape
from anyshape.backend.cpu.llvm.jit import object_code
from anyshape.backend.cpu.machine.target import target_of
from anyshape.backend.cpu.microkernels.mt19937 import emit_twister
from anyshape.base.errors import LimitError, VerifyError
from anyshape.ir.verify import verify
from anyshape.plan.ir.program import ExternStep, Window
from anyshape.plan.memory.mutation_copy_elision import permuted
from anyshape.plan.verify import judge
from anyshape.runtime.torch_ops import bernoulli
from drawing import assert_same, deals, outcome, program
from roads import compilation_of, compiled
from sampling import crossed, rest

SIZES = ((5, 7), (3, 4), (1, 6), (64, 33))


def kept(count: int, probability: float) -> torch.Tensor:
    """What PyTorch draws."""
    return torch.empty(count, dtype=torch.bool).bernoulli_(probability)


@pytest.mark.parametrize("probability", [1e-9, 0.1, 0.5, 0.9, 1 - 1e-16])
def test_bools_are_those_of_bernoulli(probability: float) -> None:
    """After any number of words that were drawn before, odd ones too; and what comes after them is the same."""
    for before in (0, 1, 2, 311, 623, 624, 625, 1247):
        for count in (bernoulli.LEAST, bernoulli.LEAST + 1, 9999, 31 * bernoulli.LEAST + 3):
            found = []
            for draw in (lambda n: bernoulli.bernoulli((n,), probability), lambda n: kept(n, probability)):
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
    assert bernoulli._routine() is not None


def test_numbers_between_are_not_lost() -> None:
    """A normal number is kept for the next call of the generator; so it is here."""
    found = []
    for draw in (lambda n: bernoulli.bernoulli((n,), 0.5), lambda n: kept(n, 0.5)):
        torch.manual_seed(3)
        first = torch.randn(1)
        found.append((first, draw(bernoulli.LEAST), torch.randn(1), torch.randn(33)))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("features", [(), ("avx2", "fma"), ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma")],
                         ids=["sse", "avx2", "avx512"])
def test_every_target_has_code_for_it(features: tuple[str, ...]) -> None:
    target = target_of("x86_64-unknown-linux-gnu", "x86-64", frozenset(features))
    assert object_code(emit_twister(target), target)


@pytest.mark.parametrize("dtype", rest([torch.float32, torch.bfloat16, torch.float64], torch.bfloat16))
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


# ---- their order


def data(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows)
    return torch.randn(rows, columns, generator=draw), torch.randn(columns, generator=draw)


def test_a_kernel_does_not_pull_one_draw_before_another() -> None:
    """The first and the last result could be one kernel, which would have to wait for the dropout's draw."""
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return x * 2, torch.randn_like(x), functional.dropout(x, 0.4) * w

    fast = compiled(function, strict=True, check=1)
    for rows, columns in SIZES:
        assert_same(outcome(fast, *data(rows, columns), True), outcome(function, *data(rows, columns), True))


@pytest.mark.parametrize(("number", "train"), crossed(range(7), (True, False), one_in=4))
def test_random_programs_draw_as_eager(number: int, train: bool) -> None:
    """Forward alone and with its backward, at several sizes."""
    function = program(number, deals(7)[number])
    fast = compiled(function, check=1)
    for rows, columns in SIZES:
        given = data(rows, columns)
        assert_same(outcome(fast, *given, train), outcome(function, *given, train))


@pytest.mark.parametrize("kinds", [("dropout", "randn", "normal_"), ("rrelu", "uniform_")], ids="-".join)
def test_what_is_computed_again_draws_nothing_again(kinds: tuple[str, ...]) -> None:
    """Within the least bytes that it runs in."""
    steps = program(1, list(kinds))

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        x = functional.layer_norm(torch.tanh(x * w), x.shape[-1:])
        x = functional.layer_norm(torch.tanh(steps(x, w)[-1]), x.shape[-1:])
        return x.square().mean(), torch.rand(2)

    given = data(900, 64)
    wanted = outcome(function, *given, True)
    with pytest.raises(LimitError) as caught:
        outcome(compiled(function, memory_limit=1 << 16, strict=True), *given, True)
    least = int(caught.value.do.split()[3])
    fast = compiled(function, memory_limit=least, strict=True)
    assert_same(outcome(fast, *given, True), wanted, 1e-3)


class Noisy(torch.autograd.Function):
    """Draws in its forward and in its backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh() + torch.rand(x.shape)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * functional.dropout(gradient, 0.5) + torch.rand(x.shape) * torch.randn_like(gradient)


def test_a_backward_draws_when_it_runs() -> None:
    """What draws there and reads no gradient could also be drawn in the forward."""
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return Noisy.apply(functional.dropout(Noisy.apply(x * w), 0.3)), Noisy.apply(w), torch.rand(3)

    fast = compiled(function, strict=True)
    for rows, columns in SIZES:
        assert_same(outcome(fast, *data(rows, columns), True), outcome(function, *data(rows, columns), True))


def checkpointed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Draws inside and outside of what is computed again."""
    inside = checkpoint(lambda a: functional.dropout(torch.tanh(a * w), 0.3), functional.dropout(x, 0.2),
                        use_reentrant=False)
    return functional.dropout(inside, 0.1), torch.rand(3)


@pytest.mark.parametrize("train", [False, True])
def test_checkpointed_layers_draw_as_eager(train: bool) -> None:
    fast = compiled(checkpointed, strict=True)
    for rows, columns in SIZES:
        assert_same(outcome(fast, *data(rows, columns), train), outcome(checkpointed, *data(rows, columns), train))
    assert len(fast.programs) == 1 + train  # not cut where draws are kept for the second time


class Drawing(torch.nn.Module):
    """A function of a matrix and a weight as a module."""

    def __init__(self, function, columns: int) -> None:
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, columns))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.function(x, self.weight)


def square(model: torch.nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    found = model(x)
    return sum((one.square().mean() for one in found), model.weight.square().sum()), *found


@pytest.mark.parametrize("name", ["random 0", "random 1", "noisy", "checkpointed"])
def test_whole_steps_draw_as_eager(name: str) -> None:
    functions = {"random 0": program(11, ["dropout", "randn_like", "rand", "normal_", "not read"]),
                 "random 1": program(12, ["rrelu", "multinomial", "uniform_", "bernoulli", "randperm"]),
                 "noisy": lambda x, w: (Noisy.apply(functional.dropout(Noisy.apply(x * w), 0.3)), torch.rand(3)),
                 "checkpointed": checkpointed}
    ours = Drawing(functions[name], 8)
    eager = copy.deepcopy(ours)
    mine, theirs = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (ours, eager))
    step = anyshape.train_step(ours, square, mine, strict=True)
    for rows in (6, 3, 1):
        x, _ = data(rows, 8)
        seen = []
        for run in (step, lambda batch: square(eager, batch)):
            torch.manual_seed(rows)
            found = run(x)
            if run is not step:
                theirs.zero_grad()
                found[0].backward()
                theirs.step()
            model = ours if run is step else eager
            seen.append([*(one.detach() for one in found), torch.get_rng_state(), model.weight.detach().clone()])
        assert_same(*seen, bound=1e-3)


@torch.library.custom_op("anyshape_tests::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    """Draws, and says so nowhere."""
    return x + torch.rand_like(x)


noise.register_fake(torch.empty_like)


def test_operators_of_which_nothing_is_known_keep_their_place_among_draws() -> None:
    """And two calls of one are two calls."""
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return x * 2, torch.randn_like(x), noise(x), noise(x) * w, functional.dropout(x, 0.4) - 1

    with torch.no_grad():
        fast = compiled(function, strict=True)
        for rows, columns in SIZES:
            assert_same(outcome(fast, *data(rows, columns), False), outcome(function, *data(rows, columns), False))


def test_verifier_and_judge_know_the_order() -> None:
    fast = compiled(lambda x: (torch.rand(3), x * 2, torch.randn_like(x)), strict=True)
    fast(torch.randn(4, 5))
    (program,) = compilation_of(fast).programs
    graph, plan = program.compiled.graph, program.compiled.plan
    numbers = {name: 8 for name in program.compiled.executable.layout.symbols}
    judge(plan, numbers)
    with pytest.raises(VerifyError, match="effect 1 comes after effect 2"):
        verify(dataclasses.replace(graph, nodes=graph.nodes[::-1]))
    with pytest.raises(VerifyError, match="effect 1 comes after effect 2"):
        judge(permuted(plan, range(len(plan.steps))[::-1]), numbers)
