"""Calls that run as PyTorch for now: sizes of 1 that need one more program, and `background=True`."""
from __future__ import annotations

import copy
import random
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anyshape
from anyshape import torch_compat as compat
from anyshape.base.errors import AnyShapeError, ConfigError
from anyshape.frontend.capture import lazy_recompile
from anyshape.frontend.capture.dynamo_backend import FallbackWarning
from anyshape.frontend.capture.lazy_recompile import MOST
from anyshape.torch_compat import access


class Asks(nn.Module):
    """Python code that asks whether the batch is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if x.shape[0] == 1:
            y = y * 2
        return nn.functional.dropout(y.relu(), 0.5, self.training)


def compiled(module: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    return anyshape.compile(module, **settings)


def wait(model: Any) -> None:
    """Until nothing is traced beside."""
    for way in (model._anyshape.oblivious, model._anyshape.ordinary):
        for job in way.tracing.beside.jobs:
            job.thread.join(60)
            assert not job.thread.is_alive()


def agrees(model: Any, module: Any, n: int) -> None:
    x = torch.randn(n, 8)
    torch.testing.assert_close(model(x), module(x))


def test_a_size_of_1_waits_until_it_is_worth_a_trace() -> None:
    module = Asks().eval()
    model = compiled(module, defer=True)
    for n in (3, 4, 1, 5, 1):
        agrees(model, module, n)
    assert len(model.programs) == 1
    said = str(model.explain())
    assert "not compiled yet" in said and "2 calls ran as PyTorch" in " ".join(said.split())
    model._anyshape.deferral.cost = 1e-9
    agrees(model, module, 1)
    assert len(model.programs) == 2
    assert "not compiled yet" not in str(model.explain())
    agrees(model, module, 1)


class AsksForNone(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.shape[0] == 0 else x * 2


@pytest.mark.parametrize("inside", [False, True])
def test_a_size_of_0_that_the_program_asks_for_waits_and_says_why(inside: bool) -> None:
    module = nn.Sequential(nn.Linear(8, 8), AsksForNone()) if inside else AsksForNone()
    model = anyshape.compile(module, defer=True)
    with torch.no_grad():
        for n in (3, 0, 5, 0):
            agrees(model, module, n)
    assert len(model.programs) == 1
    (waiting,) = model._anyshape.deferral.waiting.values()
    assert waiting.calls == 2 and waiting.reason


def test_sizes_that_the_program_takes_do_not_wait() -> None:
    module = nn.Linear(8, 8)
    model = compiled(module, defer=True)
    for n in (3, 1, 0, 5):
        agrees(model, module, n)
    assert len(model.programs) == 1 and not model._anyshape.deferral.waiting


def test_another_dtype_or_rank_does_not_wait() -> None:
    model = anyshape.compile(lambda x: x * 2 + 1, defer=True)
    for x in (torch.ones(3, 1), torch.ones(3, 1, dtype=torch.float64), torch.ones(2, 3, 1)):
        torch.testing.assert_close(model(x), x * 2 + 1)
    assert len(model.programs) == 3


def test_without_deferral_each_size_of_1_is_traced_at_once() -> None:
    module = Asks().eval()
    model = compiled(module, defer=False)
    for n in (3, 1):
        agrees(model, module, n)
    assert len(model.programs) == 2


def test_a_first_call_of_size_1_is_traced_at_once() -> None:
    module = Asks().eval()
    model = compiled(module, defer=True)
    agrees(model, module, 1)
    agrees(model, module, 4)
    assert len(model.programs) == 2


def test_another_mode_of_the_call_is_another_pattern() -> None:
    """What is known of a call beforehand must not hold back one that differs in more than sizes of 1."""
    def f(x: Tensor, twice: bool) -> Tensor:
        return x * 2 if twice or x.shape[0] == 1 else x + 1

    model = anyshape.compile(f, defer=True)
    for n, twice in ((3, False), (1, False), (1, True), (1, False), (3, True)):
        x = torch.randn(n, 8)
        torch.testing.assert_close(model(x, twice), f(x, twice))


def test_deferred_training_gives_gradients() -> None:
    module = Asks()
    model = compiled(module, defer=True)
    module.train(False)
    for n in (3, 1, 1):
        x = torch.randn(n, 8, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        model(x).sum().backward()
        module(y).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)


def test_background_runs_as_pytorch_until_the_program_is_there() -> None:
    module = Asks().eval()
    model = compiled(module, background=True)
    agrees(model, module, 3)
    wait(model)
    agrees(model, module, 5)
    assert len(model.programs) == 1 and model._anyshape.oblivious.dispatch is not None
    agrees(model, module, 2)
    model._anyshape.deferral.cost = 0.0  # sizes of 1 go into the background too
    agrees(model, module, 1)
    wait(model)
    agrees(model, module, 1)
    assert len(model.programs) == 2
    for n in (0, 1, 2, 7):
        agrees(model, module, n)


def test_background_by_the_rule_for_frames_of_torch_2_11(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked about code alone."""
    rule = compat.get("torch._dynamo.trace_rules.check")
    monkeypatch.setitem(access._found, "torch._dynamo.trace_rules.check",
                        lambda obj, is_inlined_call=False: rule(obj, is_inlined_call))
    module = Asks().eval()
    model = compiled(module, background=True)
    agrees(model, module, 3)
    wait(model)
    agrees(model, module, 5)
    assert len(model.programs) == 1


def test_background_leaves_random_numbers_and_flags_alone() -> None:
    """The same numbers as eager's, drawn while a thread traces: torch's and Python's."""
    module = Asks().train()
    flags: list[bool] = []

    def draws(model: Any, steps: int) -> list[Tensor]:
        torch.manual_seed(7)
        random.seed(7)
        found = []
        for _ in range(steps):
            flags.append(torch.compiler.is_compiling())
            found += [torch.rand(3), torch.tensor(random.random()), model(torch.ones(4, 8)).detach()]
        return found

    model = compiled(module, background=True)
    torch.ones(1).sum()
    beside = draws(model, 40)
    for one, other in zip(beside, draws(module, 40), strict=True):
        torch.testing.assert_close(one, other)
    assert not any(flags)
    wait(model)


def test_background_trains() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    model = compiled(module, background=True)
    for n in (3, 4, 5, 2):
        x = torch.randn(n, 8)
        model(x).square().sum().backward()
        found = [one.grad.clone() for one in module.parameters() if one.grad is not None]
        module.zero_grad()
        module(x).square().sum().backward()
        for one, parameter in zip(found, module.parameters(), strict=True):
            torch.testing.assert_close(one, parameter.grad)
        module.zero_grad()
        wait(model)
    assert len(model.programs) == 2  # a forward and a backward


def test_what_changes_under_a_trace_drops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Asks().eval()
    model = compiled(module, background=True)
    tracing = model._anyshape.oblivious.tracing
    begun, go_on = threading.Event(), threading.Event()
    inner = tracing.inner

    def slow(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert go_on.wait(60)
        return inner(*arguments)

    monkeypatch.setattr(tracing, "inner", slow)
    agrees(model, module, 3)
    assert begun.wait(60)
    module.train()
    model(torch.ones(3, 8))  # seen here
    module.eval()
    go_on.set()
    wait(model)
    agrees(model, module, 3)  # dropped, and begun again
    assert not model._anyshape.oblivious.tracing.codes
    wait(model)
    agrees(model, module, 3)
    assert model._anyshape.oblivious.tracing.codes
    module.train()
    torch.manual_seed(3)
    ours = model(torch.ones(3, 8))
    torch.manual_seed(3)
    torch.testing.assert_close(ours, module(torch.ones(3, 8)))


def test_a_module_that_always_changes_is_traced_while_the_caller_waits() -> None:
    class Counts(Asks):
        last: Any = None

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.last = y
            return y

    module = Counts().eval()
    model = compiled(module, background=True)
    for n in (3, 4, 5, 6, 7, 8, 9):
        agrees(model, module, n)
        wait(model)
    assert model.programs


def test_background_with_a_graph_break() -> None:
    noted: list[int] = []

    def f(x: Tensor) -> Tensor:
        y = x.relu()
        noted.append(len(noted))
        torch._dynamo.graph_break()
        return y * 3

    model = anyshape.compile(f, background=True)
    for n in (3, 4, 5, 6, 7, 8):
        x = torch.randn(n, 8)
        torch.testing.assert_close(model(x), f(x))
        wait(model)
    assert model.programs and noted == list(range(12))


class Nearest(nn.Module):
    """Asks the data once, with a dim of size 1 on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ready", torch.tensor([True]))
        self.register_buffer("book", torch.randn(1, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(1, -1, 8)
        if not self.ready:
            flat = flat + 1
        return (flat @ self.book.transpose(1, 2)).softmax(-1)


def test_a_part_with_a_size_of_1_is_compiled_in_the_first_call() -> None:
    module = Nearest()
    model = anyshape.compile(module, defer=True)
    for sizes in ((2, 5), (3, 7), (1, 4)):
        x = torch.randn(*sizes, 8)
        torch.testing.assert_close(model(x), module(x))
        assert len(model.programs) == 2 and "not compiled yet" not in str(model.explain())


def test_background_from_several_threads() -> None:
    module = Asks().eval()
    model = compiled(module, background=True)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for n in range(2, 60):
                agrees(model, module, n)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(120)
    wait(model)
    agrees(model, module, 4)
    assert not errors and model.programs


def test_other_compiled_functions_run_while_a_thread_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    one = compiled(Asks().eval(), background=True)
    other = anyshape.compile(lambda x: x + 1)
    inner = one._anyshape.oblivious.tracing.inner
    begun = threading.Event()

    def noted(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
        return inner(*arguments)

    monkeypatch.setattr(one._anyshape.oblivious.tracing, "inner", noted)
    one(torch.ones(3, 8))
    assert begun.wait(60)
    for x in (torch.ones(3), torch.ones(2, 3), torch.ones(4, dtype=torch.int64)):
        torch.testing.assert_close(other(x), x + 1)
    assert len(other.programs) == 3
    wait(one)


def test_what_the_thread_raises_comes_to_the_caller() -> None:
    def f(x: Tensor) -> Tensor:
        return x @ torch.ones(3, 4)

    model = anyshape.compile(f, background=True)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 5))
        wait(model)
    torch.testing.assert_close(model(torch.ones(2, 3)), f(torch.ones(2, 3)))


def test_the_settings_are_switches() -> None:
    with pytest.raises(ConfigError):
        anyshape.compile(torch.relu, background="yes")
    with pytest.raises(ConfigError):
        anyshape.compile(torch.relu, defer=2.0)


# ---- a program for each number


def rows(x: Tensor, y: Tensor) -> Tensor:
    total = x * 2
    for row in y:  # as many operators as there are rows
        total = total + row
    return total


def test_a_program_for_each_number_waits_and_is_warned_of_once() -> None:
    model = anyshape.compile(rows, defer=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", FallbackWarning)
        for n in range(2, 12):
            x, y = torch.randn(3, 4), torch.randn(n, 4)
            torch.testing.assert_close(model(x, y), rows(x, y))
    assert len(model.programs) == 1
    (warning,) = said
    assert "dim 0 of y" in str(warning.message) and "for row in y" in str(warning.message)
    assert "9 calls ran as PyTorch" in " ".join(str(model.explain()).split())


def test_a_stride_that_changes_is_not_called_a_number_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_recompile, "KINDS", 1)

    def scaled(x: Tensor) -> Tensor:
        for _ in range(x.stride(0)):
            x = x + 1
        return x

    model = anyshape.compile(scaled, defer=True)
    with pytest.warns(FallbackWarning, match="stride 0 of x") as said:
        for n in range(3, 10):
            x = torch.randn(4, n)[:, :2]
            torch.testing.assert_close(model(x), scaled(x))
    assert "for one cause" in str(said[0].message) and "each number" not in str(said[0].message)


def test_slices_of_wider_tensors_take_one_more_program_whatever_their_stride() -> None:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    waiting = anyshape.compile(doubled, defer=True)
    at_once = anyshape.compile(doubled, defer=False)
    with pytest.warns(FallbackWarning, match="contiguous") as said:
        for width in (8, 12, 16, 31, 9, 40, 23):
            x = torch.randn(5, width)[:, :8]
            for model in (waiting, at_once):
                torch.testing.assert_close(model(x), doubled(x))
    assert len(at_once.programs) == 2
    assert len(said) == 1 and "any stride" in str(said[0].message)


def test_hooks_that_fill_a_list_take_few_programs() -> None:
    """The list is longer at every call, and a trace takes its length for a constant."""
    def trained(model: nn.Module, compiling: Any) -> list[float]:
        seen: list[float] = []
        model.register_forward_hook(lambda module, inputs, output: seen.append(float(output.detach().mean())))
        ours = compiling(model)
        for n in range(2, 10):
            ours(torch.ones(n, 4)).sum().backward()
        if ours is not model:
            assert ours._anyshape.compilation.graphs <= 2
        return seen

    model = nn.Linear(4, 4)
    wanted = trained(copy.deepcopy(model), lambda one: one)
    with pytest.warns(FallbackWarning, match=r"cell_contents\) == 1"):
        assert trained(model, lambda one: anyshape.compile(one, defer=True)) == pytest.approx(wanted)


def test_programs_for_each_number_are_few_though_each_pays() -> None:
    model = anyshape.compile(rows, defer=True)
    for n in range(2, 30):
        x, y = torch.randn(3, 4), torch.randn(n, 4)
        torch.testing.assert_close(model(x, y), rows(x, y))
        model._anyshape.deferral.cost = 1e-9
    assert len(model.programs) == 1 + MOST
    assert "no more will be" in " ".join(str(model.explain()).split())


def test_a_train_step_does_not_compile_in_every_step() -> None:
    """A loss that goes over the objects of each image."""
    def loss(model: Any, x: Tensor, targets: list[Tensor]) -> Any:
        found = model(x)
        total = found.sum() * 0
        for segment, masks in zip(found, targets, strict=True):
            for mask in masks:
                total = total + (segment[..., :mask.shape[0]] - mask).square().mean()
        return total

    torch.manual_seed(0)
    modules = [nn.Linear(8, 8)]
    modules.append(copy.deepcopy(modules[0]))
    step, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in modules)
    step = anyshape.train_step(modules[0], loss, step, defer=True)
    for first, second in ((3, 2), (2, 4), (5, 2), (4, 3), (2, 2), (6, 5)):
        x, targets = torch.randn(2, 8), [torch.randn(first, 5), torch.randn(second, 7)]
        wanted = loss(modules[1], x, targets)
        wanted.backward()
        other.step()
        other.zero_grad()
        torch.testing.assert_close(step(x, targets), wanted.detach())
    torch.testing.assert_close(modules[0].weight, modules[1].weight)
    assert step.compilation.graphs == 1


def test_a_number_that_a_module_counts_takes_one_more_program() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x * 2 + self.count

    module = Counter()
    model = compiled(module)
    for count in range(1, 9):
        x = torch.randn(count, 3)
        torch.testing.assert_close(model(x), x * 2 + count)
        assert module.count == count
    assert len(model.programs) == 2


# ---- what only a first call does

LOCK = threading.Lock()


class SetUp(nn.Module):
    """Puts a hook in place when it is first called, as transformers does for models that return hidden states."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.always = always
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        if self.always or not self.ready:
            with LOCK:
                if not self.ready:
                    self.inner.register_forward_hook(lambda module, inputs, output: output * 2)
                    self.ready = True
        return self.inner(x).relu()


@pytest.mark.parametrize("settings", [{}, {"strict": True}, {"memory_limit": "1GB"}])
def test_a_lock_that_only_a_first_call_takes_leaves_one_program_for_all_sizes(settings: dict[str, Any]) -> None:
    module = SetUp(always=False)
    model = compiled(module, **settings)
    if settings:
        with pytest.raises(AnyShapeError, match="call the model itself once"):
            model(torch.randn(3, 8))
        assert not module.ready
        module(torch.randn(3, 8))
    for batch in (3, 5, 1, 2):
        x, other = (torch.linspace(-1, 1, batch * 8).reshape(batch, 8).requires_grad_() for _ in range(2))
        y = model(x)
        y.sum().backward()
        module(other).sum().backward()
        torch.testing.assert_close(y, module(other))
        torch.testing.assert_close(x.grad, other.grad)
    assert [program.name for program in model.programs] == ["0.forward", "0.backward"]
    assert bool(settings) or "first call" in str(model.explain())


def test_a_lock_that_every_call_takes_ends_its_graphs() -> None:
    module = SetUp(always=True)
    model = compiled(module)
    for batch in (3, 5, 1):
        x = torch.randn(batch, 8)
        torch.testing.assert_close(model(x), module(x))
    assert model.programs and not model._anyshape.oblivious.own
    assert LOCK.acquire(timeout=5)
    LOCK.release()


@pytest.mark.parametrize("settings", [{}, {"strict": True}, {"accumulate": 2, "clip_norm": 0.05}])
def test_a_train_step_whose_first_batch_takes_a_lock_is_one_program_after_it(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = SetUp(always=False)
    other = copy.deepcopy(module)
    optimizer = torch.optim.AdamW(other.parameters(), lr=3e-3)
    step = anyshape.train_step(module, lambda net, x: net(x).square().mean(),
                               torch.optim.AdamW(module.parameters(), lr=3e-3), **settings)
    parts = settings.get("accumulate", 1)
    if "strict" in settings:
        with pytest.raises(AnyShapeError, match="call the model itself once"):
            step(torch.randn(3, 8))
        module(torch.randn(3, 8))
    for number, batch in enumerate((3, 5, 1, 2)):
        x = torch.randn(batch, 8)
        loss = other(x).square().mean()
        (loss / parts).backward()
        if number % parts == parts - 1:
            if "clip_norm" in settings:
                norm = torch.nn.utils.clip_grad_norm_(other.parameters(), settings["clip_norm"])
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(step(x), loss.detach())
        for found, wanted in zip(module.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(found, wanted)
    if "clip_norm" in settings:
        torch.testing.assert_close(step.norm, norm)
    assert step._apart is None and step.compilation.graphs == parts
    assert "strict" in settings or "first call" in str(step.explain())


def test_a_train_step_that_always_takes_a_lock_goes_on_apart() -> None:
    module = SetUp(always=True)
    step = anyshape.train_step(module, lambda net, x: net(x).square().mean(),
                               torch.optim.SGD(module.parameters(), lr=0.1))
    step(torch.randn(3, 8))
    with pytest.warns(FallbackWarning, match="context manager"):
        step(torch.randn(3, 8))
    assert step._apart is not None
