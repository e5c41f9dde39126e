"""Gradients of outputs that nobody used: a backward makes no zeros for them, and a limit in bytes holds with those that
it has to make."""
from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anyshape
from anyshape.base.errors import LimitError, Unsupported
from anyshape.compiler.undefined_gradients import specialize_to_undefined
from anyshape.passes.driver.pipeline import FAST_DISPATCH
from anyshape.runtime.context.process_context import shared_context
from anyshape.runtime.inspect.watermark import watched
from anyshape.runtime.specialize.saved_policy import SAVE_ALL
from anyshape.torch_compat.versions import api
from limits import NO_LIMIT, limit_of, same, under
from sampling import rest

pytestmark = [pytest.mark.unguarded, pytest.mark.usefixtures("quick_collections")]
WORDS = 3000
SMALL = 4096  # bytes of numbers and losses, beside what a limit counts


class Language(nn.Module):
    """Returns its loss, and what it was made of: a number per token and word."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(width, 8 * width) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(8 * width, width) for _ in range(3))
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(tokens)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, WORDS), tokens.view(-1)), logits


class Beside(nn.Module):
    """Beside the loss a result of its own, whose gradient a product reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16)) for _ in range(3)))
        self.head, self.other = nn.Linear(16, 16), nn.Linear(16, 500)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.body(x)
        return self.head(x).square().mean(), self.other(x)


class Many(nn.Module):
    """Results on the way to others: kernels of all kinds, products, and operators of PyTorch read their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.alone = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 5)
        self.flat = nn.Linear(16, 16, bias=False)
        self.norm, self.conv = nn.LayerNorm(16), nn.Conv1d(16, 16, 3, padding=1)
        self.shift = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = self.wide(x)
        b = torch.tanh(a)
        c = self.narrow(b) + x
        d = self.norm(c)
        e = d + self.shift
        f = self.flat(e)
        g = self.conv(e.transpose(1, 2))
        h = torch.softmax(f @ g, -1)
        return h.square().mean(), a, b, c, d, e, f, g, h, self.alone(x), x.sum(-1), torch.cat([c, d], 1)


def tokens_of(batch: int = 2, length: int = 40) -> torch.Tensor:
    return torch.randint(0, WORDS, (batch, length), generator=torch.Generator().manual_seed(batch * length))


def gradients(run: Callable, module: nn.Module, tokens: torch.Tensor,
              loss: Callable[..., torch.Tensor] = lambda loss, logits: loss) -> list[torch.Tensor]:
    module.zero_grad(set_to_none=True)
    outputs = run(tokens)  # which stay while the backward runs
    loss(*outputs).backward()
    return [parameter.grad for parameter in module.parameters()]


def peak(module: nn.Module, call: Callable[[], object]) -> int:
    """The most bytes that PyTorch's allocator has given at once during a step, the arena's among them."""
    module.zero_grad(set_to_none=True)
    context = shared_context()
    for pool in (context.kept, context.temporary):
        pool.release_idle()
    gc.collect()
    with api.allocations() as changes:
        call()
    now = most = 0
    for change in changes:
        now += change
        most = max(most, now)
    return most


@pytest.fixture(scope="module")
def limited() -> tuple[Language, Callable]:
    torch.manual_seed(0)
    module = Language()
    return module, anyshape.compile(module, memory_limit=NO_LIMIT, strict=True, check=1)


def test_any_gradients_may_be_absent() -> None:
    torch.manual_seed(0)
    module = Many()
    run = anyshape.compile(module, strict=True, check=1)
    x = torch.randn(3, 20, 16, requires_grad=True)
    wanted = [x, *module.parameters()]
    outputs = run(x)
    outputs[0].backward()  # from now on there is our function
    given = [torch.randn_like(one) for one in outputs]
    count = len(outputs)
    for used in ((0,), (1, 2, 6), (3, 5), (4, 7, 8), (0, 9, 10), (11,)):
        outputs = run(x)
        found = torch.autograd.grad([outputs[i] for i in used], wanted, [given[i] for i in used], retain_graph=True)
        zeros = [given[i] if i in used else torch.zeros_like(given[i]) for i in range(count)]
        assert same(found, torch.autograd.grad(list(outputs), wanted, zeros)), used
    backward = next(p for p in run.programs if "backward" in p.name)
    compiled = getattr(backward, "program", backward).compiled
    found = specialize_to_undefined(compiled.plan, compiled.programs, range(count))
    assert set(found.dtypes) == set(range(count)) - {9}  # a product reads
    # that one


@pytest.mark.parametrize("bytes_", rest((0, NO_LIMIT), 0), ids=("free", "limited"))
def test_there_are_no_zeros(bytes_: int) -> None:
    torch.manual_seed(0)
    module, tokens = Language(), tokens_of()
    run = anyshape.compile(module, memory_limit=bytes_, strict=True)
    reference = gradients(module, module, tokens)
    zeros = tokens.numel() * WORDS * 4
    for number in range(3):
        loss, _unused = run(tokens)
        module.zero_grad(set_to_none=True)
        with api.allocations() as changes:
            loss.backward()
        # without a limit the first backward is PyTorch's
        assert (zeros in changes) == (number == 0 and bytes_ == 0)
        for parameter, wanted in zip(module.parameters(), reference, strict=True):
            torch.testing.assert_close(parameter.grad, wanted)


def test_a_limit_holds_from_the_first_step_on() -> None:
    torch.manual_seed(0)
    module, tokens = Language(), tokens_of()
    run = anyshape.compile(module, memory_limit=NO_LIMIT, strict=True)
    run(tokens)
    limit = limit_of(run)
    values = next(iter(limit.program.specializations.values())).values
    with under(run, limit.least(values)):
        assert peak(module, lambda: gradients(run, module, tokens)) <= limit.bytes + SMALL


@pytest.mark.parametrize("make, given, disable", (
    (Language, tokens_of(3, 50), ""), (Beside, torch.randn(300, 16), ""), (Beside, torch.randn(300, 16),
                                                                           FAST_DISPATCH)),
    ids=("without zeros", "with zeros", "with zeros of PyTorch's"))
def test_limits_hold(make: Callable[[], nn.Module], given: torch.Tensor, disable: str) -> None:
    torch.manual_seed(0)
    module = make()
    run = anyshape.compile(module, memory_limit=NO_LIMIT, strict=True, check=1, disable=disable)
    reference = gradients(run, module, given)
    limit = limit_of(run)
    assert bool(limit.zeros) == (make is Beside)
    values = next(iter(limit.program.specializations.values())).values
    least, most = limit.least(values), limit.needed(values, SAVE_ALL)
    assert least < most
    for bytes_ in (most, (least + most) // 2, least):
        with under(run, bytes_):
            run(given)
            needed = limit.needed(values, next(iter(limit.program.specializations.values())).policy)
            found: list[torch.Tensor] = []
            taken = peak(module, lambda into=found: into.extend(gradients(run, module, given)))
            assert same(found, reference)
            assert 0.9 * needed < taken <= needed + SMALL <= bytes_ + SMALL


def _sum(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return loss + logits.square().mean()


def _logits(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return logits.square().mean()


@pytest.mark.parametrize("loss", (_sum, _logits))
def test_any_backward_runs_on_any_tape(limited: tuple[Language, Callable], loss: Callable) -> None:
    """Under the least limit, also one that needs the gradient that is usually absent, and twice on a tape."""
    module, run = limited
    tokens = tokens_of()
    usual, wanted = gradients(run, module, tokens), gradients(run, module, tokens, loss)
    limit = limit_of(run)
    with under(run, limit.least(next(iter(limit.program.specializations.values())).values)):
        assert same(gradients(run, module, tokens, loss), wanted)
        assert next(iter(limit.program.specializations.values())).policy.dropped
        assert same(gradients(run, module, tokens), usual)
        outputs = run(tokens)
        parameters = list(module.parameters())
        for _ in range(2):
            assert same(torch.autograd.grad(outputs[0], parameters, retain_graph=True), usual)
            assert same(torch.autograd.grad(loss(*outputs), parameters, retain_graph=True), wanted)
        assert same(torch.autograd.grad(outputs[0], parameters), usual)
        with pytest.raises(RuntimeError, match="second time"):
            outputs[0].backward()
    for one, other in zip(gradients(module, module, tokens, loss), wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_values_that_were_moved_out_come_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, tokens = Language(), tokens_of()
    run = anyshape.compile(module, memory_limit=NO_LIMIT, memory_store=str(tmp_path), strict=True)
    wanted = gradients(run, module, tokens)
    limit = limit_of(run)
    values = next(iter(limit.program.specializations.values())).values
    with under(run, limit.least(values)):
        assert same(gradients(run, module, tokens), wanted)
        assert same(gradients(run, module, tokens, _sum), gradients(run, module, tokens, _sum))
        assert next(iter(limit.program.specializations.values())).policy.moved


def test_who_watches_a_backward_sees_it(limited: tuple[Language, Callable]) -> None:
    module, run = limited
    tokens = tokens_of()
    gradients(run, module, tokens)
    with watched(next(p for p in run.programs if "backward" in p.name).executable) as seen:
        gradients(run, module, tokens)
    assert [one.record.arena for one in seen] == [one.counted for one in seen]
    assert len(seen) == 1


def test_gradients_have_no_gradients(limited: tuple[Language, Callable]) -> None:
    module, run = limited
    found = torch.autograd.grad(run(tokens_of())[0], list(module.parameters()), create_graph=True)
    assert same([one.detach() for one in found], gradients(run, module, tokens_of()))
    with pytest.raises((LimitError, Unsupported), match="differentiated again"):
        found[0].sum().backward()


def test_all_gradients_may_be_absent(limited: tuple[Language, Callable]) -> None:
    """A function of the user's that has no gradient for what it was given."""

    class Blind(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return None

    module, run = limited
    found = gradients(run, module, tokens_of(), lambda loss, logits: Blind.apply(loss))
    assert all(one is None or not one.any() for one in found)


def test_threads_need_it_at_once() -> None:
    torch.manual_seed(0)
    module = Language()
    run = anyshape.compile(module, memory_limit=NO_LIMIT, strict=True)
    tokens = tokens_of()
    parameters = list(module.parameters())
    losses = [run(tokens)[0] for _ in range(4)]
    found: list[tuple[torch.Tensor, ...]] = []
    threads = [threading.Thread(target=lambda one=one: found.append(torch.autograd.grad(one, parameters)))
               for one in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(same(one, gradients(run, module, tokens)) for one in found)
