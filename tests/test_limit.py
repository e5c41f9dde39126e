"""A limit in bytes: what is dropped and computed again gives the same numbers, and what is counted fits."""
from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import nn

import anyshape
from anyshape.base.config import Config
from anyshape.base.errors import ConfigError, LimitError
from anyshape.runtime.context.process_context import shared_context
from anyshape.runtime.memory import huge_pages
from anyshape.runtime.specialize.saved_policy import SAVE_ALL, SavePolicy
from anyshape.tools.demo.model import DemoConfig, DemoLlama
from limits import NO_LIMIT, Layers, counted, limit_of, net, sizes, step, under

pytestmark = [pytest.mark.unguarded, pytest.mark.usefixtures("quick_collections")]


@pytest.fixture(scope="module")
def without():
    module = net()
    run = anyshape.compile(module, memory_limit=NO_LIMIT, strict=True)
    step(run, module, torch.randn(50, 32))
    return module, run


@pytest.mark.parametrize("rows", (700, 3001))
def test_every_rung_gives_the_same_numbers_and_fits(without, rows):
    """Not one bit differs: the same kernels on the same values."""
    module, run = without
    x = torch.randn(rows, 32)
    wanted = step(run, module, x)
    limit = limit_of(run)
    values = sizes(run, x)
    tradeoff = list(limit.tradeoff(values))
    lives = [point.live for point in tradeoff]
    assert len(tradeoff) > 3 and lives == sorted(lives, reverse=True)
    needs = [limit.needed(values, SavePolicy(point.dropped, apart=True)) for point in tradeoff]
    all_kept = limit.needed(values, SAVE_ALL)
    assert min(needs) < 0.7 * all_kept
    for bytes_ in (all_kept, all_kept - 1, *needs[1::2], min(needs)):
        with under(run, bytes_), counted() as most:
            found = step(run, module, x)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert bytes_ // 2 < most[0] <= bytes_  # the rest: results and gradients


def test_blocks_that_a_limit_finds_are_those_of_the_record(without):
    """A limit lays out without the words of steps."""
    module, run = without
    x = torch.randn(901, 32)
    step(run, module, x)
    limit, values = limit_of(run), sizes(run, x)
    tradeoff = limit.tradeoff(values)
    for policy in (SAVE_ALL, *(point.policy for point in tradeoff)):
        for sizing, program, at in ((limit.sizing, limit.program, values),
                                    (limit.later_sizing, limit.backward, limit.later(values))):
            found = sizing.at(at, policy)
            program.specializer.laid.clear()
            record = program.specializer.make(at, policy)
            assert (found.kept, found.temporary, found.scratch, found.chunks, found.reused_output) == (
                record.kept, record.temporary, record.scratch, record.chunks, record.reused_output)
    for point in tradeoff:  # as the native loop adds it up, and again from the lives
        assert tradeoff.curve(point.policy).max() <= point.live <= limit.needed(values, point.policy)


def test_the_least_limit_is_named_and_works(without):
    module, run = without
    x = torch.randn(1000, 32)
    wanted = step(run, module, x)
    small = anyshape.compile(module, memory_limit=1 << 16, strict=True)
    with pytest.raises(LimitError, match="cannot run within") as caught:
        step(small, module, x)
    assert isinstance(caught.value, MemoryError) and "needs" in caught.value.why
    least = int(caught.value.do.split()[3])
    other = anyshape.compile(module, memory_limit=least, strict=True)
    assert all(torch.equal(a, b) for a, b in zip(step(other, module, x), wanted, strict=True))
    tight = anyshape.compile(module, memory_limit=least - 4096, strict=True)
    with pytest.raises(LimitError):
        step(tight, module, x)
    step(tight, module, torch.randn(3, 32))  # a smaller call fits


def test_a_lower_limit_never_means_a_higher_peak(without):
    module, run = without
    x = torch.randn(900, 32)
    step(run, module, x)
    limit, values = limit_of(run), sizes(run, x)
    before = limit.bytes
    peaks = []
    try:
        highest = limit.needed(values, SAVE_ALL)
        for percent in range(100, 40, -2):
            limit.bytes = highest * percent // 100
            with contextlib.suppress(LimitError):
                peaks.append(limit.needed(values, limit.choose(values)))
    finally:
        limit.bytes = before
    assert len(peaks) > 10 and peaks == sorted(peaks, reverse=True) and len(set(peaks)) > 5


def test_a_limit_with_what_is_alive():
    """Resident memory is what it is: a step that needs 100 MB is given the process and three quarters of that."""
    module = net(count=4, width=64)
    x = torch.randn(40000, 64)
    wanted = step(module, module, x)
    run = anyshape.compile(module, memory_limit_total=1 << 50, strict=True)
    found = step(run, module, x)
    limit = limit_of(run)
    need = limit.needed(sizes(run, x), SAVE_ALL)
    assert need > 100e6 and 0 <= limit.room() + huge_pages.resident() - (1 << 50) < 2 * need  # blocks that idle
    shared_context().kept.release_idle()
    shared_context().temporary.release_idle()
    huge_pages.give_back()
    total = huge_pages.resident() + need * 3 // 4  # compiling takes some of it
    other = anyshape.compile(module, memory_limit_total=total, strict=True)
    with counted() as most:
        found = step(other, module, x)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert most[0] < 0.8 * need
    ballast = torch.ones(need // 4)  # as many bytes as the step needs
    with pytest.raises(LimitError, match="taken by what is alive") as caught:
        step(other, module, x)
    assert "memory_limit_total" in caught.value.do
    del ballast
    assert "of the whole process" in str(other.memory(x=(40000, 64)))
    with pytest.raises(LimitError) as caught:  # no step fits, whatever is alive; what is named fits beside it
        step(anyshape.compile(module, memory_limit_total="1MB"), module, x)
    assert int(caught.value.do.split("memory_limit_total to ")[1].split(" ")[0]) > huge_pages.resident()


def test_what_fits_is_left_alone(without):
    module, run = without
    x = torch.randn(60, 32)
    step(run, module, x)
    record = next(iter(limit_of(run).program.specializations.values()))
    assert record.policy == SAVE_ALL and not record.chunks
    plain = anyshape.compile(net(), strict=True)
    step(plain, net(), x)
    assert all(not p.executable.plan.optional for p in plain.programs if hasattr(p, "executable"))


def test_tapes_in_flight_share_the_limit(without):
    module, run = without
    x = torch.randn(800, 32)
    step(run, module, x)
    limit, values = limit_of(run), sizes(run, x)
    wanted = step(run, module, x)
    kept = limit.program.specializer.make(values).kept
    bytes_ = limit.needed(values, SAVE_ALL) + kept // 2
    other = anyshape.compile(module, memory_limit=bytes_, strict=True)
    step(other, module, x)
    module.zero_grad(set_to_none=True)
    with counted() as most:
        first, second = (other(x.clone().requires_grad_()).square().mean() for _ in range(2))
        assert any(key[-1].dropped for key in limit_of(other).program.specializer.specializations)  # of the second one
        second.backward()
        once = [p.grad.clone() for p in module.parameters()]
        first.backward()
    assert most[0] <= bytes_
    assert all(torch.equal(a, b) for a, b in zip(once, wanted[2:], strict=True))
    assert all(torch.equal(p.grad, 2 * b) for p, b in zip(module.parameters(), wanted[2:], strict=True))


def test_a_backward_may_run_twice_and_not_without_asking(without):
    module, run = without
    x = torch.randn(500, 32)
    wanted = step(run, module, x)
    limit, values = limit_of(run), sizes(run, x)
    tradeoff = list(limit.tradeoff(values))
    other = anyshape.compile(module, memory_limit=limit.needed(values, SavePolicy(tradeoff[-1].dropped, apart=True)),
                             strict=True)
    module.zero_grad(set_to_none=True)
    loss = other(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    for p, b in zip(module.parameters(), wanted[2:], strict=True):
        torch.testing.assert_close(p.grad, 2 * b)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_language_model_trains_within_its_limit():
    torch.manual_seed(0)
    module = DemoLlama(DemoConfig(vocabulary=128, hidden=64, layers=4, heads=4))
    tokens = torch.randint(0, 128, (4, 65))

    def train(run, length):
        module.zero_grad(set_to_none=True)
        loss = run(tokens[:, :length].clone(), tokens[:, 1:length + 1].clone())
        loss.backward()
        return [loss.detach(), *[p.grad for p in module.parameters()]]

    run = anyshape.compile(module, memory_limit=NO_LIMIT, strict=True)
    wanted = {length: train(run, length) for length in (64, 1, 37)}
    limit = limit_of(run)
    record = max(limit.program.specializations.values(), key=lambda one: one.kept)
    tradeoff = list(limit.tradeoff(record.values))
    least = limit.needed(record.values, SavePolicy(tradeoff[-1].dropped, apart=True))
    assert least < 0.75 * limit.needed(record.values, SAVE_ALL)
    other = anyshape.compile(module, memory_limit=least, strict=True)
    for length, results in wanted.items():
        with counted() as most:
            found = train(other, length)
        assert most[0] <= least
        for a, b in zip(found, results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert "computed again" in str(other.memory(**record.values))


def test_random_numbers_are_drawn_once():
    module = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 64), nn.Tanh(), nn.Dropout(0.3),
                                                                  nn.Linear(64, 32), nn.Tanh())))
    x = torch.randn(400, 32)

    def seeded(run):
        torch.manual_seed(3)
        return step(run, module, x)

    run = anyshape.compile(module, memory_limit=NO_LIMIT, strict=True)
    wanted = seeded(run)
    limit, values = limit_of(run), sizes(run, x)
    tradeoff = list(limit.tradeoff(values))
    least = limit.needed(values, SavePolicy(tradeoff[-1].dropped, apart=True))
    other = anyshape.compile(module, memory_limit=least, strict=True)
    assert all(torch.equal(a, b) for a, b in zip(seeded(other), wanted, strict=True))
    assert len(limit.backward.plan.again) >= 4 and tradeoff[-1].dropped


@torch.library.custom_op("anyshape_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Says nothing of the random numbers that it draws."""
    return x + torch.rand_like(x)


@noisy.register_fake
def _(x):
    return torch.empty_like(x)


noisy.register_autograd(lambda context, gradient: gradient)


def test_a_ladder_of_which_nothing_can_be_dropped():
    """What is saved comes of an operator that runs once, and whose result is not."""
    weight = torch.randn(32, 32, requires_grad=True)
    run = anyshape.compile(lambda x: (noisy(x).tanh() @ weight).sum(), memory_limit=NO_LIMIT, strict=True)
    x = torch.randn(400, 32, requires_grad=True)
    run(x).backward()
    limit, values = limit_of(run), sizes(run, x)
    (point,) = limit.tradeoff(values)
    assert not point.dropped and limit.needed(values, SavePolicy(point.dropped, apart=True)) > 0


def test_an_operator_of_which_nothing_is_known_runs_once():
    class Noisy(Layers):
        def forward(self, x):
            for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
                wide = up(norm(x))
                x = x + down(torch.sin(torch.tanh(wide + noisy(wide))))  # the sum is saved, not what is drawn
            return x

    torch.manual_seed(0)
    module, x = Noisy(count=4), torch.randn(500, 32)

    def seeded(run):
        torch.manual_seed(5)
        return step(run, module, x)

    run = anyshape.compile(module, memory_limit=NO_LIMIT, strict=True)
    wanted = seeded(run)
    limit, values = limit_of(run), sizes(run, x)
    tradeoff = list(limit.tradeoff(values))
    other = anyshape.compile(module, strict=True, memory_limit=limit.needed(
        values, SavePolicy(tradeoff[-1].dropped, apart=True)))
    assert all(torch.equal(a, b) for a, b in zip(seeded(other), wanted, strict=True))


def test_operators_of_pytorch_run_again():
    class Sorted(Layers):
        def forward(self, x):
            for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
                wide = up(norm(x))
                x = x + down(torch.sin(torch.tanh(wide + torch.cummax(wide.detach(), -1).values)))
            return x

    torch.manual_seed(0)
    module, x = Sorted(count=4), torch.randn(500, 32)
    run = anyshape.compile(module, memory_limit=NO_LIMIT, strict=True)
    wanted = step(run, module, x)
    limit, values = limit_of(run), sizes(run, x)
    made = limit.backward.specializer.keeps.made
    assert any(b.is_external and b.name in made for b in limit.backward.plan.buffers)
    for point in limit.tradeoff(values):
        bytes_ = limit.needed(values, SavePolicy(point.dropped, apart=True))
        other = anyshape.compile(module, memory_limit=bytes_, strict=True)
        assert all(torch.equal(a, b) for a, b in zip(step(other, module, x), wanted, strict=True))


def test_an_input_that_the_forward_writes_is_read_once():
    class Counting(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(32))

        def forward(self, x):
            self.calls.add_(1)
            y = super().forward(x * self.calls.exp())
            self.calls.mul_(3)
            return y * torch.tanh(y + self.calls)

    torch.manual_seed(0)
    module, x = Counting(), torch.randn(600, 32)

    def counted_from_zero(run):
        module.calls.zero_()
        return [*step(run, module, x), *step(run, module, x), module.calls.clone()]

    run = anyshape.compile(module, memory_limit=NO_LIMIT, strict=True)
    wanted = counted_from_zero(run)
    limit, values = limit_of(run), sizes(run, x)
    tradeoff = list(limit.tradeoff(values))
    assert len(tradeoff) > 3
    least = limit.needed(values, SavePolicy(tradeoff[-1].dropped, apart=True))
    other = anyshape.compile(module, memory_limit=least, strict=True)
    assert all(torch.equal(a, b) for a, b in zip(counted_from_zero(other), wanted, strict=True))
    for a, b in zip(wanted, counted_from_zero(module), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_inference_is_refused_before_it_runs():
    module = net()
    run = anyshape.compile(module, memory_limit="100kB", strict=True)
    with torch.no_grad():
        torch.testing.assert_close(run(torch.ones(5, 32)), module(torch.ones(5, 32)))
        with pytest.raises(LimitError, match="memory_limit"):
            run(torch.ones(5000, 32))
        run(torch.ones(6, 32))


def test_two_threads_train_under_one_limit(without):
    module, run = without
    x = torch.randn(300, 32)
    step(run, module, x)
    limit, values = limit_of(run), sizes(run, x)
    bytes_ = 4 * limit.needed(values, SAVE_ALL)
    other = anyshape.compile(module, memory_limit=bytes_, strict=True)
    wanted = torch.autograd.grad(other(x).square().mean(), list(module.parameters()))
    wrong: list[object] = []

    def train():
        for _ in range(10):
            found = torch.autograd.grad(other(x).square().mean(), list(module.parameters()))
            if not all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
                wrong.append(found)

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("text, bytes_", (("12GiB", 12 << 30), ("800MB", 800_000_000), ("1.5 kB", 1500),
                                          ("4096", 4096)))
def test_limits_are_read(text, bytes_):
    assert Config.make(memory_limit=text).memory_limit == bytes_


@pytest.mark.parametrize("text", ("12 gigs", "-1GB", "", "GiB"))
def test_what_is_no_limit_is_refused(text):
    with pytest.raises(ConfigError):
        Config.make(memory_limit=text)


def test_the_interpreter_has_no_limit():
    with pytest.raises(ConfigError, match="check=2"):
        anyshape.compile(net(), memory_limit="1GB", check=2)(torch.ones(3, 32))


def test_errors_name_sizes_as_the_report_does():
    module = net()
    run = anyshape.compile(module, memory_limit=1 << 20, strict=True)
    step(run, module, torch.randn(3, 32))
    with pytest.raises(LimitError) as caught:
        step(run, module, torch.randn(40000, 32))
    (name, place), = run.explain().programs[0].sizes
    assert "dim 0 of " in place and caught.value.what.endswith(f" at {name}=40000")
