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
    (False, None), (False, ValueError), (False, KeyboardInterrupt), (True, None), several=True))
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
