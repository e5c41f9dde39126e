"""What is left behind: of compiled objects that are gone, nothing; of memory that idles, what `release` finds."""
from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import anyshape
from anyshape.frontend.diagnostics import repro
from anyshape.frontend.programs.session import LIVE
from anyshape.runtime.context.process_context import shared_context
from anyshape.runtime.memory import idle_release, pools

pytestmark = pytest.mark.usefixtures("quick_collections")
PREFIXES = ("__compiled_fn", "__anyshape", "__resume_at", "__builtins_dict")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.last = nn.Linear(64, 8)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(x)


def train(fast: Callable[..., Any]) -> None:
    for rows in (3, 5):
        fast(torch.randn(rows, 64)).sum().backward()


def as_module(model: Model) -> Any:
    fast = anyshape.compile(model)
    train(fast)
    fast(torch.randn(1, 64))
    return fast


def as_closure(model: Model) -> Any:
    fast = anyshape.compile(lambda x: model(x) * 2)
    train(fast)
    return fast


def as_method(model: Model) -> Any:
    fast = anyshape.compile(model.score)
    train(fast)
    model.fast = fast  # a circle through the model itself
    return fast


def as_pieces(model: Model) -> Any:
    def pieces(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        print(end="")  # the graph ends here
        return y * 2

    fast = anyshape.compile(pieces)
    train(fast)
    return fast


def as_backend(model: Model) -> Any:
    fast = torch.compile(model, backend="anyshape", dynamic=True)
    train(fast)
    return fast


def as_step(model: Model) -> Any:
    step = anyshape.train_step(model, lambda model, x: model(x).square().mean(), torch.optim.AdamW(model.parameters()))
    for rows in (3, 5):
        step(torch.randn(rows, 64))
    return step


def as_export(model: Model) -> Any:
    exported = torch.export.export(model, (torch.randn(3, 64),), dynamic_shapes=({0: torch.export.Dim("rows")},))
    fast = anyshape.compile(exported)
    fast(torch.randn(5, 64))
    return fast


def beside(model: Model) -> Any:
    fast = anyshape.compile(model, background=True)
    end = time.monotonic() + 60
    while not fast.programs and time.monotonic() < end:
        fast(torch.randn(3, 64)).sum().backward()
        time.sleep(0.05)
    for thread in threading.enumerate():
        if thread.name == "anyshape trace":
            thread.join()
    train(fast)
    return fast


def refused(model: Model) -> Any:
    """A call fails, and one's backward does not come."""
    fast = anyshape.compile(model)
    train(fast)
    with contextlib.suppress(RuntimeError):
        fast(torch.randn(3, 63))
    fast(torch.randn(4, 64))
    return fast


def interrupted(model: Model) -> Any:
    """Ctrl-C while it is traced."""
    class Stops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

    fast = anyshape.compile(Stops())
    compiler = fast._anyshape.compilation.compiler

    def stop(request: Any) -> Any:
        raise KeyboardInterrupt

    fast._anyshape.compilation.compiler = stop
    with pytest.raises(KeyboardInterrupt):
        fast(torch.randn(3, 64))
    fast._anyshape.compilation.compiler = compiler
    train(fast)
    return fast


def collect() -> None:
    """What is in a circle with its model goes first, and then what torch held of it."""
    gc.collect()
    gc.collect()


def names() -> set[tuple[str, str]]:
    """Names that compiled code has among the globals of modules."""
    return {(module, name) for module, one in list(sys.modules.items()) for name in list(getattr(one, "__dict__", ()))
            if name.startswith(PREFIXES)}


def engines() -> int:
    """Pieces of machine code that are loaded."""
    return sum(isinstance(one, llvm.ResourceTracker) for one in gc.get_objects())


@pytest.mark.parametrize("entrance", [as_module, as_closure, as_method, as_pieces, as_backend, as_step, as_export,
                                      beside, refused, interrupted])
@pytest.mark.filterwarnings("ignore")
def test_nothing_of_a_compiled_object_is_left_when_it_is_gone(entrance: Callable[[Model], Any]) -> None:
    def one() -> list[weakref.ref[Any]]:
        model = Model()
        fast = entrance(model)
        found = [weakref.ref(model), weakref.ref(model.first.weight), weakref.ref(fast)]
        if model.first.weight.grad is not None:
            found.append(weakref.ref(model.first.weight.grad))
        compilation = fast._anyshape.compilation if hasattr(fast, "_anyshape") else getattr(fast, "compilation", None)
        if compilation is not None:
            found += [weakref.ref(compilation), *map(weakref.ref, compilation.programs)]
        return found

    one()  # what is made once in a process
    collect()
    before = names(), engines(), len(LIVE)
    left = one()
    collect()
    assert [ref() for ref in left] == [None] * len(left)
    assert (names() - before[0], engines(), len(LIVE)) == (set(), before[1], before[2])


def test_no_trace_outlives_its_program() -> None:
    """Traced inputs and their environment of sizes hold each other through C++, where no collector looks."""
    counts = []
    for _ in range(3):
        train(anyshape.compile(Model()))
        collect()
        counts.append(sum(isinstance(one, ShapeEnv) for one in gc.get_objects()))
    assert counts[0] == counts[1] == counts[2]  # torch's state of random numbers knows the last trace


def test_what_shares_code_with_a_compiled_object_that_is_gone_goes_on() -> None:
    """Two objects of one class have their programs at one code object; a third one's backward waits meanwhile."""
    kept, gone, waiting = (anyshape.compile(Model()) for _ in range(3))
    x = torch.randn(4, 64)
    for one in (kept, gone, waiting):
        train(one)
    expected = kept._anyshape.target(x)
    model = waiting._anyshape.target
    model.zero_grad()
    loss = waiting(x).sum()
    del gone, waiting
    collect()
    before = anyshape.stats()["programs"]
    torch.testing.assert_close(kept(x), expected)
    assert anyshape.stats()["programs"] == before
    loss.backward()
    found = model.first.weight.grad
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(found, model.first.weight.grad)


def test_release_gives_back_what_idles_and_calls_go_on() -> None:
    fast = anyshape.compile(lambda x: (x @ x.t()).cos() @ x)
    x = torch.randn(1500, 64)
    expected = fast(x)
    held = anyshape.stats()["arena_bytes"]
    assert held > 1500 * 1500 * 4
    assert anyshape.release() >= 1500 * 1500 * 4
    assert anyshape.stats()["arena_bytes"] < held - 1500 * 1500 * 4 + 1
    assert anyshape.release() == 0
    assert torch.equal(fast(x), expected)


def test_release_is_safe_while_other_threads_run() -> None:
    """Forwards whose backward waits, and products in the arena, beside a thread that gives back all the time."""
    model = Model()
    fast = anyshape.compile(model)
    inputs = [torch.randn(rows, 64) for rows in (3, 40, 700)]
    expected = [model(x) for x in inputs]
    failed: list[str] = []
    end = threading.Event()

    def calls() -> None:
        for k in range(60):
            x = inputs[k % 3].clone().requires_grad_()
            result = fast(x)
            if not torch.allclose(result, expected[k % 3], atol=1e-5):
                failed.append(f"forward {k}")
            gradient, = torch.autograd.grad(result.sum(), x)
            if not torch.allclose(gradient, gradient[:1].expand_as(gradient)) and (model.first(x) > 0).all():
                failed.append(f"backward {k}")

    def gives_back() -> None:
        while not end.is_set():
            anyshape.release()

    fast(inputs[0]).sum().backward()
    threads = [threading.Thread(target=calls) for _ in range(3)]
    other = threading.Thread(target=gives_back)
    for one in (*threads, other):
        one.start()
    for one in threads:
        one.join()
    end.set()
    other.join()
    assert not failed


def test_memory_that_nobody_asks_for_goes_back_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    anyshape.release()
    monkeypatch.setattr(idle_release, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(shared_context().idle, "thread", None)  # one that began before waits for longer
    deadline = time.monotonic() + 60
    fast = anyshape.compile(lambda x: (x @ x.t()).cos() @ x)
    x = torch.randn(2500, 64)
    expected = fast(x)
    assert anyshape.stats()["arena_bytes"] > 2500 * 2500 * 4
    while anyshape.stats()["arena_bytes"] > 2500 * 2500 * 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert anyshape.stats()["arena_bytes"] < 2500 * 2500 * 4
    assert torch.equal(fast(x), expected)


def test_a_child_of_a_fork_waits_for_no_lock_of_the_thread_that_gives_back() -> None:
    for _ in range(20):
        worker = threading.Thread(target=lambda: [shared_context().idle.look() for _ in range(50)])
        worker.start()
        child = os.fork()
        if child == 0:
            os._exit(0 if idle_release._looking.acquire(timeout=10) else 1)
        worker.join()
        assert os.waitpid(child, 0)[1] == 0


def test_ctrl_c_is_not_lost_while_python_collects_garbage() -> None:
    """What Python calls from its collector swallows it, so nothing of ours is called there."""
    shared_context()
    assert not [one for one in gc.callbacks if "anyshape" in getattr(one, "__module__", "")]


def test_a_large_block_goes_back_though_small_calls_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pools.Pool()
    pool.give(pool.take(64 << 20))
    later = time.monotonic() + pools.IDLE_SECONDS + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    pool.need = 4096
    pool.give(pool.take(4096))
    assert pool.held < 1 << 20


def test_files_of_errors_have_a_bound_in_number_and_age(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for k in range(repro.MOST_FILES + 5):
        (tmp_path / f"anyshape-{k}-x.repro").write_text("x")
        os.utime(tmp_path / f"anyshape-{k}-x.repro", (time.time() - 100 + k, time.time() - 100 + k))
    old = tmp_path / "anyshape-old-x.repro"
    old.write_text("x")
    os.utime(old, (0, 0))
    other = tmp_path / "notes.repro"
    other.write_text("x")
    fast = anyshape.compile(lambda x: x * 2)

    def fails(request: Any) -> Any:
        raise ValueError("an error inside the compiler")

    fast._anyshape.compilation.compiler = fails
    with pytest.warns(UserWarning, match="repro"):
        fast(torch.randn(3))
    found = list(tmp_path.glob("anyshape-*.repro"))
    assert len(found) == repro.MOST_FILES
    assert not old.exists()
    assert other.exists()
    assert (tmp_path / f"anyshape-{repro.MOST_FILES + 4}-x.repro").exists()


def test_a_block_that_was_released_is_not_given_to_others() -> None:
    pool = pools.Pool()
    block = pool.take(1 << 16)
    message = block.window(torch.float32, 0, (8,), (1,))  # somebody still writes here: a message that is under way
    block.release()
    pool.give(block)
    other = pool.take(1 << 16)
    assert other is not block and other.address != message.data_ptr() and pool.held == other.bytes
