"""Calls that run as PyTorch are counted with their reason, said once, and refused under `strict` and under a limit."""
from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import anyshape
from anyshape.base.errors import LimitError, Unsupported
from anyshape.frontend.capture.dynamo_backend import FallbackWarning
from anyshape.frontend.capture.frame_callback import Tracing
from anyshape.torch_compat.tracing import settings as torch_trace


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    anyshape.reset_stats()


class Broken(nn.Module):
    """Python in the middle that PyTorch's tracer does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        print("", end="")
        return y * 2


class InALoop(nn.Module):
    """A frame that PyTorch's tracer gives up as a whole; what it calls is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            with open("/dev/null"):
                x = self.inner(x)
        return x


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Function(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def hooks_on_all() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    try:
        yield
    finally:
        handle.remove()


def given_up(x: Tensor) -> Tensor:
    try:
        torch._dynamo.graph_break()
        return x + 1
    finally:
        pass


@torch.compiler.disable
def left_out(x: Tensor) -> Tensor:
    return x.cos()


def ends_outside(x: Tensor) -> Tensor:
    return left_out(x * 2)


def call(fast: Any, x: Tensor) -> Any:
    return fast(x)


def nested(fast: Any, x: Tensor) -> Any:
    return fast(torch.nested.nested_tensor([x, x[:2]]))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def off() -> Any:
    return torch.compiler.set_stance("force_eager")


# (what is compiled, what is on meanwhile, how it is called, a word of the reason)
PLAIN: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[..., Any], str]] = {
    "hook": (net, hooks_on_all, call, "hooks on every module"),
    "flops": (net, lambda: FlopCounterMode(display=False), call, "FlopCounterMode"),
    "dispatch": (net, Dispatch, call, "Dispatch"),
    "vmap": (net, contextlib.nullcontext, lambda fast, x: torch.vmap(fast)(x), "transform"),
    "grad": (lambda: lambda x: x.square().sum(), contextlib.nullcontext, lambda fast, x: torch.func.grad(fast)(x),
             "transform"),
    "nested": (net, contextlib.nullcontext, nested, "nested"),
    "loop": (InALoop, contextlib.nullcontext, call, "open"),
    "given up": (lambda: given_up, contextlib.nullcontext, call, "graph_break"),
    "sparse": (lambda: lambda x: x * 2, contextlib.nullcontext, lambda fast, x: fast(x.to_sparse()), "sparse"),
    "stance": (net, off, call, "force_eager"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_calls_that_run_as_pytorch_are_counted_said_once_and_refused(name: str) -> None:
    make, mode, run, word = PLAIN[name]
    target = make()
    fast = anyshape.compile(target)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rows in (4, 5, 5):
            with mode():
                found = run(fast, torch.randn(rows, 8))
    assert anyshape.stats()["eager_calls"] == 3
    told = [str(one.message) for one in said if one.category is FallbackWarning]
    assert len(told) == 1 and word in told[0] and [one.filename for one in said if one.category is FallbackWarning] \
        == [__file__]
    explained = fast.explain()
    assert sum(calls for _, calls in explained.eager) == 3 and all(word in reason for reason, _ in explained.eager)
    assert "3 eager calls" in str(explained) and "calls that ran as PyTorch" in str(explained)
    del found
    for settings, error in (({"strict": True}, Unsupported), ({"memory_limit": "1GB"}, LimitError)):
        seen: list[int] = []
        if isinstance(target, nn.Module):
            target.register_forward_pre_hook(lambda module, inputs, seen=seen: seen.append(1))
        with mode(), pytest.raises(error, match=word) as raised:
            run(anyshape.compile(target, **settings), torch.randn(4, 8))
        assert raised.value.what and raised.value.why and raised.value.do
        assert name == "loop" or not seen or settings.get("memory_limit")
    assert anyshape.stats()["eager_calls"] == 3


@pytest.mark.parametrize("target", [Broken, lambda: ends_outside])
def test_programs_in_parts_are_counted_and_refused(target: Callable[[], Any]) -> None:
    fast = anyshape.compile(target())
    with pytest.warns(FallbackWarning, match=r"cut in parts at test_eager.py:\d+"):
        fast(torch.randn(4, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        for rows in (5, 5, 1):
            fast(torch.randn(rows, 8))
    assert anyshape.stats()["eager_calls"] == 4 and fast.programs
    with pytest.raises(Unsupported, match="in part, which strict=True refuses") as raised:
        anyshape.compile(target(), strict=True)(torch.randn(4, 8))
    assert "test_eager.py" in raised.value.where
    with pytest.warns(FallbackWarning, match="keeps to no limit in bytes"):
        anyshape.compile(target(), memory_limit="1GB")(torch.randn(4, 8))


def same(x: Tensor) -> list[Tensor]:
    return [x]


@pytest.mark.parametrize("target", [net, lambda: same, lambda: lambda x: x[x > 0] * 2, lambda: nn.Linear(8, 8),
                                    lambda: lambda x: x * x.sum().item()])
def test_what_is_compiled_is_not_counted(target: Callable[[], Any]) -> None:
    fast = anyshape.compile(target(), strict=True)
    for mode in (contextlib.nullcontext, Function, lambda: torch.device("cpu")):
        for rows in (4, 5, 1):
            with mode():
                fast(torch.randn(rows, 8))
    assert anyshape.stats()["eager_calls"] == 0 and not fast.explain().eager


def asks(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] == 1 else x + 1


def test_calls_that_wait_for_a_program_are_counted_without_a_warning() -> None:
    fast = anyshape.compile(asks, defer=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        for rows in (3, 1, 1, 4):
            fast(torch.ones(rows, 8))
    assert anyshape.stats()["eager_calls"] == 2 and "dim 0 of x is 1" in fast.explain().eager[0][0]
    anyshape.reset_stats()
    for settings in ({"strict": True}, {"memory_limit": "1GB"}):
        for waits in ({"defer": True}, {"background": True}):
            fast = anyshape.compile(asks, **settings, **waits)
            for rows in (3, 1):
                fast(torch.ones(rows, 8))
            assert len(fast.programs) == 2
    assert anyshape.stats()["eager_calls"] == 0


def test_calls_while_a_thread_traces_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    may_trace, trace = threading.Event(), Tracing._trace

    def waiting(self: Tracing, *arguments: Any) -> Any:
        assert may_trace.wait(60)
        return trace(self, *arguments)

    monkeypatch.setattr(Tracing, "_trace", waiting)
    fast = anyshape.compile(net(), background=True)
    fast(torch.randn(3, 8))
    assert anyshape.stats()["eager_calls"] == 1 and "background=True" in fast.explain().eager[0][0]
    may_trace.set()
    for job in fast._anyshape.oblivious.tracing.beside.jobs:
        job.thread.join(60)
    fast(torch.randn(3, 8))
    assert anyshape.stats()["eager_calls"] == 1


def test_programs_that_pytorch_refuses_to_add_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_trace.DYNAMO_SETTINGS, "recompile_limit", 2)

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text = ""

        def forward(self, x: Tensor) -> Tensor:
            self.text += "a"  # no number: each text is a program
            return x * len(self.text)

    fast = anyshape.compile(Counts())
    with pytest.warns(FallbackWarning, match="recompile_limit"):
        for _ in range(12):
            fast(torch.ones(3))
    assert 1 <= anyshape.stats()["eager_calls"] < 12
    with pytest.raises(Unsupported, match="recompile_limit"):
        strict = anyshape.compile(Counts(), strict=True)
        for _ in range(12):
            strict(torch.ones(3))


def test_a_graph_that_could_not_be_compiled_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from anyshape.frontend.programs import compile_program

    def fail(*arguments: Any) -> Any:
        raise KeyError("broken on purpose")

    monkeypatch.setattr(compile_program, "compile_pair", fail)
    monkeypatch.setattr("anyshape.frontend.diagnostics.repro.write", lambda request, error: "")
    fast = anyshape.compile(lambda x: x * 2)
    with pytest.warns(FallbackWarning, match="broken on purpose"):
        for _ in range(3):
            fast(torch.ones(3))
    assert anyshape.stats()["eager_calls"] == 3 and "broken on purpose" in str(fast.explain())
    with pytest.raises(LimitError, match="broken on purpose"):
        anyshape.compile(lambda x: x * 3, memory_limit="1GB")(torch.ones(3))


def test_an_exported_program_is_seen_by_a_dispatch_mode() -> None:
    model = net().eval()
    exported = torch.export.export(model, (torch.randn(3, 8),))
    fast, x = anyshape.compile(exported), torch.randn(3, 8)
    with FlopCounterMode(display=False) as counter, pytest.warns(FallbackWarning, match="FlopCounterMode"):
        torch.testing.assert_close(fast(x), model(x))
    assert counter.get_total_flops() == 2 * 2 * 3 * 8 * 16 * 2 and anyshape.stats()["eager_calls"] == 1
    with FlopCounterMode(display=False), pytest.raises(Unsupported, match="FlopCounterMode"):
        anyshape.compile(exported, strict=True)(x)


def test_a_train_step_whose_update_is_pytorchs_is_counted_and_refused() -> None:
    model = net()
    optimizer = torch.optim.RMSprop(model.parameters())

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    with pytest.warns(FallbackWarning, match="not one program"):
        step = anyshape.train_step(model, loss, optimizer)
    step(torch.randn(3, 8))
    step(torch.randn(4, 8))
    assert anyshape.stats()["eager_calls"] == 2
    with pytest.raises(Unsupported, match="update"):
        anyshape.train_step(model, loss, optimizer, strict=True)


def test_an_op_with_a_literal_that_has_no_kernel_runs_by_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyshape.backend.cpu.llvm.scalar_ops.unsupported", lambda: frozenset({"maximum"}))

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.clamp_min(x * 2, 0.5) + 1

    fast = anyshape.compile(function, threads=1)
    for rows in (4, 1, 7):
        x = torch.randn(rows, 3)
        assert torch.equal(fast(x), function(x))
    assert "anyshape.maximum" in str(fast.explain())
