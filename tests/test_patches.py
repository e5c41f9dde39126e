"""Torch while a program is traced: what is changed is listed, undone after any end, and no other thread sees it."""
from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import anyshape
import patched
from anyshape import torch_compat
from anyshape.torch_compat.tracing.fx_threads import USUAL, fx_in_this_thread
from anyshape.torch_compat.tracing.monkey_patches import BY_TORCH, WHILE_TRACING, WHILE_TRACING_BESIDE
from sampling import rest


def traced(during: Callable[[], None], **settings: Any) -> Any:
    """A compiled module whose first program calls `during` before it is made."""
    fast = anyshape.compile(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)), **settings)
    compiler = fast._anyshape.compilation.compiler

    def compile_program(request: Any) -> Any:
        during()
        return compiler(request)

    fast._anyshape.compilation.compiler = compile_program
    return fast


def finished() -> None:
    for thread in threading.enumerate():
        if thread.name == "anyshape trace":
            thread.join()


@pytest.fixture(scope="module", autouse=True)
def modules_are_there() -> None:
    traced(lambda: None)(torch.randn(3, 8))


@pytest.fixture(scope="module")
def before() -> patched.Found:
    """To look through torch takes a second."""
    traced(lambda: None, background=True)(torch.randn(3, 8))
    finished()
    return patched.functions_of_torch()


@pytest.mark.parametrize(("background", "end"), rest(
    [*itertools.product([False, True], [None, ValueError, KeyboardInterrupt])],
    (False, None), (False, KeyboardInterrupt), (True, None), several=True))
@pytest.mark.filterwarnings("ignore")
def test_what_a_trace_changes_is_listed_and_undone(before: patched.Found, background: bool,
                                                   end: type[BaseException] | None) -> None:
    seen: set[str] = set()

    def during() -> None:
        seen.update(patched.changed(before, patched.functions_of_torch()))
        if end is not None:
            raise end("in the middle of a trace")

    fast = traced(during, background=background, strict=end is ValueError)
    try:
        fast(torch.randn(3, 8))
        finished()
        fast(torch.randn(3, 8))
        assert end is None
    except (anyshape.AnyShapeError, KeyboardInterrupt, torch._dynamo.exc.BackendCompilerFailed):
        assert end is not None
    finished()
    listed = WHILE_TRACING.keys() | BY_TORCH.keys() | (WHILE_TRACING_BESIDE.keys() if background else set())
    assert seen
    assert seen - listed == set()
    assert patched.changed(before, patched.functions_of_torch()) == set()


def test_other_threads_draw_and_seed_while_one_traces() -> None:
    underway, go_on = threading.Event(), threading.Event()

    def during() -> None:
        if not underway.is_set():
            underway.set()
            go_on.wait(60)

    fast = traced(during, background=True)
    fast(torch.randn(3, 8))
    assert underway.wait(60)
    try:
        torch.manual_seed(5)
        expected = torch.randn(4)
        state = torch.random.get_rng_state()
        torch.manual_seed(5)
        assert torch.equal(torch.randn(4, generator=torch.random.default_generator), expected)
        following = torch.randn(4)
        torch.random.set_rng_state(state)
        assert torch.equal(torch.randn(4), following)
        with torch.random.fork_rng():
            torch.randn(7)
        torch.random.set_rng_state(state)
        go_on.set()
        finished()
        assert torch.equal(torch.randn(4), following)  # what the trace saved is not put back
    finally:
        go_on.set()
        finished()


def test_calls_of_compiled_functions_do_not_wait_for_a_trace_beside() -> None:
    underway, go_on = threading.Event(), threading.Event()

    def during() -> None:
        underway.set()
        go_on.wait(60)

    other = torch.compile(lambda x: x * 2, backend="eager")
    other(torch.randn(3))
    fast = traced(during, background=True)
    fast(torch.randn(3, 8))
    try:
        assert underway.wait(60)
        started = time.monotonic()
        other(torch.randn(3))
        fast(torch.randn(3, 8))
        assert time.monotonic() - started < 30
    finally:
        go_on.set()
        finished()


def test_what_is_compiled_while_torch_fx_traces_elsewhere_is_traced_as_ever() -> None:
    """torch.fx stands in for the calls of all modules then, and Dynamo keeps the call of a module that it is given; a
    later thread may have the number of the one that traced."""
    inside, go_on = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: Any) -> Any:
            inside.set()
            go_on.wait(60)
            return x + 1

    def trace() -> None:
        with torch_compat.compile_lock(), fx_in_this_thread():
            torch.fx.symbolic_trace(Waits())

    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(super().forward(x))

    module = Own(8, 8)
    other = threading.Thread(target=trace)
    other.start()
    inside.wait(60)
    assert hasattr(nn.Module.__call__, USUAL)
    threading.Timer(0.2, go_on.set).start()
    fast = anyshape.compile(module, strict=True)
    other.join()
    assert not hasattr(nn.Module.__call__, USUAL)
    way = fast._anyshape.oblivious
    assert not hasattr(way.copied._shared.forward._torchdynamo_orig_callable, USUAL)
    anyshape.reset_stats()
    x = torch.randn(3, 8)
    torch.testing.assert_close(fast(x), module(x))
    assert anyshape.stats()["eager_calls"] == 0


def test_threads_capture_at_once() -> None:
    """Each its own program: three of inference, three whole train steps."""
    torch.manual_seed(0)
    failures: list[BaseException] = []
    together = threading.Barrier(6)

    def work(trains: bool) -> None:
        try:
            ours = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
            theirs = copy.deepcopy(ours)
            rates = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
            step = anyshape.train_step(ours, lambda model, x: model(x).square().mean(), rates[0], strict=True)
            fast = anyshape.compile(ours, strict=True)
            together.wait()
            for rows in (3, 5, 1):
                x = torch.randn(rows, 8)
                if trains:
                    step(x)
                    rates[1].zero_grad()
                    theirs(x).square().mean().backward()
                    rates[1].step()
                    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()))
                else:
                    torch.testing.assert_close(fast(x), theirs(x))
        except BaseException as error:
            failures.append(error)

    anyshape.reset_stats()
    threads = [threading.Thread(target=work, args=(number % 2 == 1,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert anyshape.stats()["eager_calls"] == 0
