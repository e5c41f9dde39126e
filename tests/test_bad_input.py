"""Wrong arguments, Ctrl-C, threads, and cache folders that are shared, closed or full: nothing breaks, all is said."""
from __future__ import annotations

import contextlib
import gc
import itertools
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import anyshape
from anyshape.base.errors import InputError
from anyshape.runtime.context.process_context import shared_context
from sampling import some

pytestmark = pytest.mark.usefixtures("quick_collections")
SOURCE = Path(__file__).parent.parent / "src"


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


class Reader(nn.Module):
    """Counts its calls in a buffer; looks tokens up, multiplies, scales."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.linear = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(self.table(ids)) * scale


def held() -> int:
    gc.collect()
    return shared_context().temporary.held + shared_context().kept.held


# ---- arguments

IDS, SCALE = torch.arange(15).reshape(3, 5) % 11, torch.ones(5, 4)
WRONG = {
    "dtype": (IDS.float(), SCALE, r"got torch.float32.*ids: f32\[3, 5\]"),
    "size": (IDS, torch.ones(6, 4), r"dim 1 of ids = 5.*dim 0 of scale = 6"),
    "fixed size": (IDS, torch.ones(5, 3), r"\(4\).*dim 1 of scale = 3"),
    "rank": (IDS, torch.ones(2, 2, 5, 4), r"dim 0 of ids = 3.*dim 1 of scale = 2.*scale: f32\[2, 2, 5, 4\]"),
    "device": (IDS.to("meta"), SCALE, "ids is on meta"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_arguments_are_refused_before_anything_runs(kind):
    ids, scale, words = WRONG[kind]
    model = Reader()
    fast = anyshape.compile(model, strict=True)
    fast(IDS, SCALE)
    state, before = {name: value.clone() for name, value in model.state_dict().items()}, held()
    with pytest.raises(InputError) as caught:
        fast(ids, scale)
    error = caught.value
    assert re.search(words, error.why), error.why
    assert error.what == "Reader does not take these arguments" and error.do
    assert kind == "device" or "test_bad_input.py" in error.where
    assert held() == before
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    torch.testing.assert_close(fast(IDS, SCALE), model.linear(model.table(IDS)))


TABLE, ROWS = torch.arange(88.0).reshape(11, 8), torch.ones(3, 8)
LOOKUPS = {
    "embedding": lambda i: nn.functional.embedding(i, TABLE),
    "index_select": lambda i: TABLE.index_select(0, i),
    "index_add": lambda i: TABLE.index_add(0, i, ROWS),
    "index_copy": lambda i: TABLE.index_copy(0, i, ROWS),
    "index_copy_": lambda i: TABLE.clone().index_copy_(0, i, ROWS),
    "index_fill": lambda i: TABLE.index_fill(0, i, 2.0),
    "index_put": lambda i: TABLE.index_put((i,), ROWS),
    "gather": lambda i: TABLE.gather(0, i[:, None]),
    "scatter": lambda i: TABLE.scatter(0, i[:, None], 1.0),
    "[]": lambda i: TABLE[i],
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_an_index_of_another_dtype_is_refused_where_eager_refuses_it(name):
    """torch's rules for traces take some that eager PyTorch refuses, and look up what rounded numbers point at."""
    lookup = LOOKUPS[name]
    fast = anyshape.compile(lookup)
    place = torch.tensor([2, 0, 1])
    torch.testing.assert_close(fast(place), lookup(place))
    for dtype in (torch.int32, torch.float32, torch.int16):
        try:
            expected = lookup(place.to(dtype))
        except (RuntimeError, IndexError):
            with pytest.raises((InputError, RuntimeError, IndexError)):
                fast(place.to(dtype))
        else:
            torch.testing.assert_close(fast(place.to(dtype)), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_a_product_of_two_dtypes(dtype):
    fast = anyshape.compile(nn.Linear(8, 4))
    with pytest.raises(InputError, match=r"one matrix is .64, the other f32 \(input: .64\[3, 8\]\)"):
        fast(torch.ones(3, 8, dtype=dtype))


def test_a_call_that_fails_in_the_middle_leaves_all_as_it_was():
    model = Reader()
    fast = anyshape.compile(model, strict=True)
    fast(IDS, SCALE).sum().backward()
    before, calls = held(), model.calls.clone()
    for _ in range(3):
        with pytest.raises(IndexError, match="out of range"):
            fast(IDS + 11, SCALE)
    assert held() == before and torch.equal(model.calls, calls)


def test_nan_and_infinity_flow():
    def f(x):
        return torch.softmax(x, -1), x.clamp(-1, 1), x.amax(0), nn.functional.relu(x) * 0, x.exp() - x
    x = torch.tensor([[1.0, float("nan"), -2.0], [float("inf"), 3.0, -float("inf")], [0.0, -0.0, 1e38]])
    for found, wanted in zip(anyshape.compile(f, strict=True)(x), f(x), strict=True):
        torch.testing.assert_close(found, wanted, equal_nan=True)



PICKED = torch.tensor([0, 2])
SELECTING = {
    "x[i]": (lambda x: x[PICKED] * 2, 0),
    "x[:, i]": (lambda x: x[:, PICKED].exp(), 1),
    "x[i, i]": (lambda x: x[PICKED, PICKED].sin(), 0),
    "index_select": (lambda x: x.index_select(1, PICKED).sum(0), 1),
    "gather": (lambda x: x.gather(1, PICKED.expand(len(x), 2)), 1),
    "embedding": (lambda x: nn.functional.embedding(PICKED, x), 0),
    "arange": (lambda x: x[torch.arange(3)] + 1, 0),
}


@pytest.mark.parametrize("name", SELECTING)
@pytest.mark.parametrize("graded", [False, True])
def test_nothing_is_selected_from_a_dim_without_elements(name, graded):
    # there is no memory to read from: before it was refused, it ended the process
    function, dim = SELECTING[name]
    fast = anyshape.compile(function, strict=True)
    for sizes in ((8, 5), (6, 7)):
        x = torch.randn(sizes, requires_grad=graded)
        torch.testing.assert_close(fast(x), function(x))
        empty = torch.randn([0 if d == dim else size for d, size in enumerate(sizes)], requires_grad=graded)
        with pytest.raises((IndexError, RuntimeError)):
            function(empty)
        with pytest.raises(IndexError, match=r"(?s)out of range.*test_bad_input.py.*has no elements"):
            fast(empty)


def test_nothing_may_be_selected_from_a_dim_without_elements():
    fast = anyshape.compile(lambda x, i: x[i].exp(), strict=True)
    for rows, columns, count in ((8, 5, 3), (0, 5, 0), (7, 0, 4), (0, 0, 0), (3, 2, 0)):
        x, i = torch.randn(rows, columns), torch.zeros(count, dtype=torch.int64)
        torch.testing.assert_close(fast(x, i), x[i].exp())

# ---- Ctrl-C


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Ctrl-C inside; it may come too late."""
    alarm = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    # where tests run in the background, Ctrl-C is ignored
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # it may have come at the end of what is inside
        signal.signal(signal.SIGALRM, alarm)
        signal.signal(signal.SIGINT, interrupt)


class Slow(nn.Module):
    """Kernels, products, and an operator that PyTorch does in between."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.convolution(torch.softmax(self.linear(x), -1).transpose(1, 2))
        return torch.logcumsumexp(y, -1).transpose(1, 2) * x


def check_slow(model: Slow, fast: nn.Module, x: torch.Tensor) -> None:
    parameters = list(model.parameters())
    wanted, found = model(x), fast(x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for one, other in zip(torch.autograd.grad(found.sum(), parameters), torch.autograd.grad(wanted.sum(), parameters),
                          strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_ctrl_c_while_compiling():
    stopped = 0
    for seconds in (0.02, 0.1, 0.25, 0.45):
        torch._dynamo.reset()
        model = Slow()
        fast = anyshape.compile(model, strict=True)
        try:
            with interrupted_after(seconds):
                fast(torch.randn(2, 7, 16)).sum().backward()
        except KeyboardInterrupt:
            stopped += 1
        check_slow(model, fast, torch.randn(3, 5, 16))
        assert torch.is_grad_enabled()
        assert not fast._anyshape.compilation.fallbacks
    assert stopped


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_waits_for_the_end_of_a_trace_and_a_second_one_does_not(monkeypatch, times):
    """In an operator that is traced: torch leaves its modes by Python, and ends the process where one stays set."""
    given, came = [signal.SIGINT] * times, []
    usual = FakeTensorMode.dispatch

    def interrupted(*arguments, **keywords):
        while given:
            signal.raise_signal(given.pop())
            came.append(len(given))
        return usual(*arguments, **keywords)

    torch._dynamo.reset()
    fast = anyshape.compile(lambda x: (x * 2).softmax(-1), strict=True)
    x = torch.randn(5, 7)
    monkeypatch.setattr(FakeTensorMode, "dispatch", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            fast(x)
    finally:
        signal.signal(signal.SIGINT, before)
    assert came == [times - 1]
    torch.testing.assert_close(fast(x), (x * 2).softmax(-1))
    assert not fast._anyshape.compilation.fallbacks


@pytest.mark.parametrize("at", [0, 20, 400])
def test_ctrl_c_that_torch_makes_a_type_error_of(monkeypatch, at):
    calls = itertools.count()
    usual = SymNode.is_int

    def interrupted(self: SymNode) -> bool:
        if next(calls) == at:
            raise KeyboardInterrupt
        return usual(self)

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.transpose(0, 1)[2:] * 2).unfold(1, 2, 1).sum(0) @ x[:2, 1:]

    torch._dynamo.reset()
    fast = anyshape.compile(function)
    x = torch.randn(5, 7)
    monkeypatch.setattr(SymNode, "is_int", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fast(x)
    monkeypatch.setattr(SymNode, "is_int", usual)
    torch.testing.assert_close(fast(x), function(x))
    assert not fast._anyshape.compilation.fallbacks


def check_interrupted_runs(times: int) -> None:
    model = Slow()
    fast = anyshape.compile(model, strict=True)
    x = torch.randn(4, 33, 16)
    check_slow(model, fast, x)
    context, draw = shared_context(), random.Random(0)
    before, stopped = held(), 0
    usual = float("inf")  # the quickest of some runs: a slow one would have most signals come too late
    for _ in range(8):
        start = time.perf_counter()
        fast(x).sum().backward()
        usual = min(usual, time.perf_counter() - start)
    for _ in range(times):
        try:
            with interrupted_after(draw.uniform(1e-5, 1.2 * usual + 1e-4)):
                fast(x).sum().backward()
        except KeyboardInterrupt:
            stopped += 1
        assert torch.is_grad_enabled()
    check_slow(model, fast, x)
    gc.collect()  # a traceback may hold a tape in a circle
    assert stopped
    assert not context.host.running
    # no block is lost; an exception may have kept a tape until a later call had taken another block
    assert held() <= 3 * before
    assert sum(block.bytes for pool in (context.temporary, context.kept) for block in pool.free) == held()


@pytest.fixture
def _quiet(monkeypatch):
    """ctypes reports what it cannot hand on, when Ctrl-C comes at the first line of a call back; pytest would keep the
    report, and with it the frames and their memory."""
    monkeypatch.setattr(sys, "unraisablehook", lambda report: None)


@pytest.mark.usefixtures("_quiet")
def test_ctrl_c_while_running():
    check_interrupted_runs(150)


@pytest.mark.full
@pytest.mark.usefixtures("_quiet")
def test_ctrl_c_while_running_many_times():
    check_interrupted_runs(5000)


# ---- threads


@pytest.mark.parametrize("count", [2, 8])
def test_threads_share_a_program(count):
    """Each its own shapes, forward and backward; some make records, some use those of others."""
    model = Slow()
    fast = anyshape.compile(model, strict=True)
    check_slow(model, fast, torch.randn(2, 7, 16))
    wrong: list[str] = []

    def work(seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for _ in range(12):
            rows, columns = (int(n) for n in torch.randint(1, 9, (2,), generator=draw))
            try:
                check_slow(model, fast, torch.randn(rows, columns, 16, generator=draw))
            except Exception as error:
                wrong.append(f"{seed}: {rows}, {columns}: {error}")

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong, wrong[0]
    assert not shared_context().host.running and fast._anyshape.compilation.graphs == 1


def test_threads_compile_at_once():
    """The first call of a program comes from several threads at the same time: they wait for one, and make no more."""
    model = Slow()
    fast = anyshape.compile(model, strict=True)
    wrong: list[str] = []
    patched = [(SymNode, "mul"), (ShapeEnv, "produce_guards_verbose"), (FakeTensorMode, "_dispatch_impl"),
               (FakeTensorMode, "cache"), (symbolic_shapes, "_guard_or"), (torch._dynamo.config, "recompile_limit")]
    before = [getattr(owner, name) for owner, name in patched]

    def work(seed: int) -> None:
        try:
            check_slow(model, fast, torch.randn(seed + 1, 5 + seed, 16))
        except Exception as error:
            wrong.append(str(error))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong, wrong[0]
    assert [program.name for program in fast.programs] == ["0.forward", "0.backward"]
    for (owner, name), value in zip(patched, before, strict=True):
        assert getattr(owner, name) is value, f"{name} stays changed"


LARGEST = {
    "max": lambda x: x.max(), "max of a dim": lambda x: x.max(1)[0], "min of a dim": lambda x: x.min(0)[1],
    "amax": lambda x: x.amax(1), "argmax": lambda x: x.argmax(1), "argmin": lambda x: x.argmin(),
    "median": lambda x: x.median(), "median of a dim": lambda x: x.median(1)[0], "sum": lambda x: x.sum(1),
    "aminmax": lambda x: torch.stack(torch.aminmax(x)), "logsumexp": lambda x: x.logsumexp(1),
}  # fmt: skip


@pytest.mark.parametrize("name", some(LARGEST, 2))
def test_the_largest_of_nothing(name: str) -> None:
    """Refused where eager refuses it, as the first call and in an old program; nothing ends the process."""
    function = LARGEST[name]

    def outcome(run, x):
        try:
            return run(x).tolist()
        except (RuntimeError, IndexError):
            return "refused"

    for first in ([(4, 5)], []):
        torch._dynamo.reset()
        fast = anyshape.compile(function)
        for shape in [*first, (2, 0), (0, 3), (0, 0), (1, 0), (2, 3)]:
            x = torch.arange(float(shape[0] * shape[1])).reshape(shape)
            wanted, found = outcome(function, x), outcome(fast, x)
            near = wanted != "refused" and found == pytest.approx(wanted, nan_ok=True)
            assert found == wanted or near, (shape, found)


def test_sizes_are_named_by_the_input_that_has_them():
    """None of torch's symbols (s27) is in a message."""
    class Two(torch.nn.Module):
        def forward(self, x, y):
            return x + y, torch.cat([x, y], 1)

    rows = torch.export.Dim("rows", min=2, max=8)
    exported = torch.export.export(Two(), (torch.ones(3, 4), torch.ones(3, 4)), dynamic_shapes=({0: rows}, {0: rows}))
    program, traced = anyshape.compile(exported), anyshape.compile(lambda x, y: torch.cat([x, y], 1))
    for fast, sizes, words in ((program, (3, 4), "as dim 0 of x, which is 3"), (program, (9, 9), "<= dim 0 of x <= 8"),
                               (traced, (3, 5), r"dim 0 of x \(3\).* dim 0 of y \(5\)")):
        with pytest.raises(InputError, match=words):
            fast(*(torch.ones(size, 4) for size in sizes))


def test_lines_are_those_that_a_person_would_point_at():
    """Not those of our own form of a function; and an update of an optimiser, which has none, says what it is."""
    middle = anyshape.compile(lambda x: torch.quantile(x, 0.3, dim=1))
    middle(torch.randn(4, 5))
    assert "traceable_functions.py" not in str(middle.explain()) and "test_bad_input.py" in str(middle.explain())
    model = torch.nn.Linear(4, 2)
    step = anyshape.train_step(model, lambda model, x: model(x).sum(), torch.optim.AdamW(model.parameters()))
    step(torch.ones(3, 4))
    assert "the optimiser's update" in str(step.explain())


REFUSED = {
    "nothing": (TypeError, lambda x, i: x @ None, r"@: 'Tensor' and 'NoneType'"),
    "a dim that there is not": (IndexError, lambda x, i: x.gather(5, i), "but got 5"),
    "sizes": (RuntimeError, lambda x, i: x @ x[:-2], "same reduction dim"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_of_eagers_kind_and_prints_nothing(name, capfd):
    kind, function, words = REFUSED[name]
    fast = anyshape.compile(function, strict=True)
    with pytest.raises(kind, match=words) as caught:
        fast(torch.ones(5, 4), torch.zeros(5, 4, dtype=torch.int64))
    assert isinstance(caught.value, InputError)
    assert "test_bad_input.py" in caught.value.where
    assert "TORCH" not in str(caught.value)
    assert capfd.readouterr().err == ""
