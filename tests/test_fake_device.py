"""Plans on a device behind a driver: the real launch loop, streams, arena and status on the fake driver, whose streams
do their work in adversarial orders."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import anyshape
import fake_device
import forked
from anyshape.backend import targets
from anyshape.backend.cpu.bytecode.format import STEP_DONE
from anyshape.backend.triton.runner import STEP, StreamRunner
from anyshape.backend.triton.stream_graphs import DeviceGraph, StreamGraphs
from anyshape.backend.triton.streams import DeviceStreams
from anyshape.base.errors import DeviceError, IndexRangeError, LimitError
from anyshape.runtime.call import executable as calls
from anyshape.runtime.call.unread_status import settle
from anyshape.runtime.memory.stream_pools import DeviceBlock
from fake_device import Later
from fake_driver import ORDERS, FakeDriver
from models import ZOO
from test_models import check_shapes, check_train_steps
from test_seam import check_limits, check_train_step


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    monkeypatch.setitem(targets.TARGETS, "fake", fake_device.__name__)
    monkeypatch.setattr(targets, "DEFAULT", "fake")
    found = FakeDriver()
    monkeypatch.setattr(fake_device, "DEVICE", [found])
    yield found
    assert not found.alarms


def program(fast: Any) -> Any:
    return fast.programs[0].executable


def two(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.softmax(x, 0).t().contiguous() * 3, 0)


def test_two_kernels_run(fake: FakeDriver) -> None:
    fast = anyshape.compile(two, strict=True)
    for order in ORDERS:
        fake.set(order)
        for shape in ((5, 7), (1, 3), (0, 4), (4, 0), (33, 2)):
            x = torch.randn(shape)
            y = fast(x)
            fake.everything()
            torch.testing.assert_close(y, two(x))
    assert isinstance(program(fast).runner, StreamRunner) and fake.counts["launch"] >= 2 * len(ORDERS)


def mixed(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernels, a product, a copy and steps of PyTorch."""
    y = torch.softmax(x @ w, -1)
    return y.t().contiguous() + 1, torch.cat((y.cumsum(0), x.sort(0)[0]), 1)


def test_results_are_memory_of_the_device(fake: FakeDriver) -> None:
    """Results are given back in the order of their stream: nobody has to hold them until their runs have ended."""
    fast = anyshape.compile(mixed, strict=True)
    w = torch.randn(4, 6)
    memory = program_target(fast, torch.randn(3, 4), w).memory
    for order in ORDERS:
        fake.set(order)
        for rows in (3, 5, 1, 0):
            x = torch.randn(rows, 4)
            fast(x, w)  # dropped before it has run
            found = fast(x, w)
            assert found[0].untyped_storage().data_ptr() in memory.pieces or not rows
            fake.everything()
            torch.testing.assert_close(found, mixed(x, w))


def program_target(fast: Any, *args: torch.Tensor) -> Any:
    fast(*args)
    return program(fast).target


# ---- several streams

def turns(fake: FakeDriver, fast: Any, order: str) -> bool:
    """Whether calls that two streams take turns at are right."""
    fake.set(order)
    streams = [fake.new_stream() for _ in range(2)]
    inputs = [torch.randn(5, 7) for _ in range(6)]
    outputs = []
    for i, x in enumerate(inputs):
        with fake.on(streams[i % 2]):
            outputs.append(fast(x))
        if i == 3:
            fake.synchronize_stream(streams[0])
    fake.everything()
    return all(torch.allclose(found, two(x), atol=1e-5) for found, x in zip(outputs, inputs, strict=True))


def elsewhere(fake: FakeDriver, fast: Any, order: str) -> bool:
    """Whether a backward is right whose forward is on another stream, and has not begun to run."""
    fake.set(order)
    forward, backward = fake.new_stream(), fake.new_stream()
    x = torch.randn(6, 9, requires_grad=True)
    with fake.on(forward):
        y = fast(x)
    seed = torch.randn(6, 9)
    with fake.on(backward):
        (found,) = torch.autograd.grad(y, x, seed)
    fake.everything()
    (wanted,) = torch.autograd.grad(chain(x), x, seed)
    return torch.allclose(found, wanted, atol=1e-4)


def chain(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, 1).cumsum(0).exp()


def in_turn(fake: FakeDriver, fast: Any, order: str) -> bool:
    """Whether memory that one stream takes over from another, and gives back, is right."""
    fake.set(order)
    one, other = fake.new_stream(), fake.new_stream()
    x = [torch.randn(5, 7) for _ in range(3)]
    with fake.on(one):
        fast(x[0])
    fake.everything()
    pool = program(fast).context.temporary
    with fake.on(other):
        y = fast(x[1])  # in the block of the first stream
    pool.release_idle()
    with fake.on(one):
        z = fast(x[2])  # where that was
    fake.everything()
    return torch.allclose(y, two(x[1]), atol=1e-5) and torch.allclose(z, two(x[2]), atol=1e-5)


def between(fake: FakeDriver, fast: Any, order: str) -> bool:
    """Whether a call runs behind what makes its input, and before what reads its result, on one stream."""
    fake.set(order)
    stream, seen = fake.new_stream(), []
    x, value = torch.full((5, 7), torch.nan), torch.randn(5, 7)
    with fake.on(stream):
        fake.issue(stream, partial(x.copy_, value))
        y = fast(x)
        fake.issue(stream, lambda: seen.append(y.clone()))
    fake.everything()
    return torch.allclose(seen[0], two(value), atol=1e-5)


CASES = {"turns": (two, turns), "elsewhere": (chain, elsewhere), "in turn": (two, in_turn),
         "between": (two, between)}


@pytest.mark.parametrize("name", CASES)
def test_streams(fake: FakeDriver, name: str) -> None:
    function, case = CASES[name]
    fast = anyshape.compile(function, strict=True)
    for order in ORDERS:
        assert case(fake, fast, order), order


def any_block(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    """A stream takes a block whose work on another one is not done."""
    patch.setattr(DeviceStreams, "passed", lambda self, mark: True)


def no_record(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    """The allocator does not learn that another stream uses a block."""
    patch.setattr(DeviceBlock, "move", lambda self, stream: setattr(self, "stream", stream))


def no_follow(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    """A backward does not wait for its forward."""
    patch.setattr(calls, "follow", lambda kept, stream: None)


def not_held(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    """A block is given back to the allocator before its work is issued."""
    made = DeviceBlock.__init__

    def lost(self: DeviceBlock, *arguments: Any) -> None:
        made(self, *arguments)
        self.tensor = torch.empty(0, dtype=torch.uint8)
    patch.setattr(DeviceBlock, "__init__", lost)


def first_stream(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    """Work goes to the default stream, whatever the caller's is."""
    run = StreamRunner.run

    def elsewhere_run(self: StreamRunner, frame: Any, steps: Any = None) -> int:
        with fake.on(0), patch.context() as inner:
            inner.setattr(self.streams, "current", lambda: 0)
            return run(self, frame, steps)
    patch.setattr(StreamRunner, "run", elsewhere_run)


MUTANTS = (("turns", any_block), ("in turn", no_record), ("elsewhere", no_follow), ("turns", not_held),
           ("between", first_stream))


@pytest.mark.parametrize(("name", "mutate"), MUTANTS)
def test_a_mistake_is_found(fake: FakeDriver, name: str, mutate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    function, case = CASES[name]
    with monkeypatch.context() as patch:
        mutate(fake, patch)
        fast = anyshape.compile(function, strict=True)
        with contextlib.suppress(KeyError):  # the fake does not know a piece of memory: it is found
            assert not all(case(fake, fast, order) and not fake.alarms for order in ORDERS)
        fake.everything()
    fake.alarms.clear()


# ---- checks, and memory

def test_an_index_out_of_range_is_told_later(fake: FakeDriver) -> None:
    fast = anyshape.compile(lambda x, i, j: (x[i] * 2, torch.softmax(x, 0)[j].exp()), strict=True)
    x, good, fine, bad, wrong = torch.randn(5), *map(torch.tensor, ([1, 2], [3, 0], [1, 7], [-9, 2]))
    given = [(good, fine), (bad, fine), (good, wrong), (bad, wrong), (good, fine)]
    results = [fast(x, *pair) for pair in given]
    unread = program(fast).context.unread
    assert len(unread) == 5
    for _ in range(3):
        with pytest.raises(IndexRangeError, match="index is out of range") as error:
            settle(unread, wait=True)
        assert "test_fake_device.py" in error.value.where and "earlier call" in error.value.__notes__[0]
    settle(unread, wait=True)
    for result in (results[0], results[4]):
        torch.testing.assert_close(result, (x[good] * 2, torch.softmax(x, 0)[fine].exp()))


def test_the_step_is_named_and_nothing_is_written_behind_it(fake: FakeDriver) -> None:
    def update(x: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x, 0)
        z = y[i].cumsum(0)
        w.add_(z.sum())
        return z

    fast = anyshape.compile(update, strict=True)
    w, x, good, bad = torch.zeros(()), torch.randn(5), torch.tensor([0, 4]), torch.tensor([0, 9])
    fast(x, good, w)
    fake.everything()
    before = w.clone()
    assert before != 0
    with pytest.raises(IndexRangeError):
        fast(x, bad, w)
        settle(program(fast).context.unread, wait=True)
    fake.everything()
    assert torch.equal(w, before)


def test_a_status_that_is_read_too_early_is_found(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = anyshape.compile(lambda x, i: x[i] * 2, strict=True)
    held = torch.randn(5), torch.tensor([1, 7])
    fast(*held)
    monkeypatch.setattr(program(fast).runner.loop.driver, "passed", lambda event: True)
    settle(program(fast).context.unread)
    assert not program(fast).context.unread  # the error is lost


def test_memory_that_is_short(fake: FakeDriver) -> None:
    """As on a card that is too small, or that another process has filled meanwhile: such a call runs as PyTorch."""
    def weights(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.t(), 1).sum(0)

    fast, strict = anyshape.compile(weights), anyshape.compile(weights, strict=True)
    x, large = torch.randn(5, 7), torch.randn(300, 7)
    for one in (fast, strict):
        one(x)
    fake.everything()
    for one in (fast, strict):
        program(one).context.temporary.release_idle()
    fake.limit = fake.live + (64 << 10)  # the result fits, what is before it does not
    anyshape.reset_stats()
    with pytest.raises(DeviceError, match="the device has not enough memory") as error:
        strict(large)
    assert "for an arena of" in error.value.why and "end what else uses the card" in error.value.do
    with pytest.warns(UserWarning, match="the device has not enough memory") as told:
        torch.testing.assert_close(fast(large), weights(large))
    assert anyshape.stats()["eager_calls"] == 1 and "test_fake_device.py" in str(told[0].message)
    assert "memory_limit" in str(told[0].message)
    fake.limit = 1 << 40  # the other process has ended
    for one in (fast, strict):
        found = one(large)
        fake.everything()
        torch.testing.assert_close(found, weights(large))
    assert anyshape.stats()["eager_calls"] == 1


def test_a_launch_that_the_driver_refuses_names_its_step(fake: FakeDriver) -> None:
    fast = anyshape.compile(two, strict=True)
    x = torch.randn(5, 7)
    fast(x)
    fake.fails["launch"] = 701
    with pytest.raises(DeviceError, match="error 701") as error:
        fast(x)
    assert "test_fake_device.py" in error.value.where and "in step 0 of" in error.value.__notes__[0]
    del fake.fails["launch"]
    found = fast(x)
    fake.everything()
    torch.testing.assert_close(found, two(x))


# ---- what the device refuses

class Refusing:
    """Kernels that Triton refuses."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels

    def __call__(self, target: Any, texts: Any) -> Any:
        found = self.kernels(target, texts)
        for kernel in found:
            kernel.codes = self.codes
        return found

    @staticmethod
    def codes(sizes: Any, alignments: Any, guarded: bool) -> Any:
        raise DeviceError("Triton does not compile kernel k for fake", why="it has bad luck", do="wait for better")


def no_code(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    refusing = Refusing(fake_device.Target.build)
    patch.setattr(fake_device.Target, "build", lambda self, texts: refusing(self, texts))


def no_image(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(fake.fails, "load_module", 209)


def no_launch(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(fake.fails, "launch", 701)


def no_room(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(fake.fails, "load_module", 2)


REFUSALS = {"no code": (no_code, "Triton does not compile kernel k", "wait for better"),
            "no image": (no_image, "the driver does not load kernel", "install a driver"),
            "no launch": (no_launch, "error 701", "see what ran before"),
            "no room": (no_room, "bytes are free", "memory_limit")}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_the_device_refuses_runs_as_pytorch(fake: FakeDriver, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, with the reason, in training too; under strict it is an error, and so it is under a limit."""
    refuse, what, do = REFUSALS[name]
    fake.reads = True

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return chain(x @ w)

    with monkeypatch.context() as patch:
        refuse(fake, patch)
        fast, strict = anyshape.compile(function), anyshape.compile(function, strict=True)
        limited = anyshape.compile(function, memory_limit=1 << 40)
        anyshape.reset_stats()
        for turn, rows in enumerate((5, 9, 5)):
            x, w = torch.randn(rows, 4, requires_grad=True), torch.randn(4, 6, requires_grad=True)
            if turn == 0:
                with pytest.warns(UserWarning, match=what) as told:
                    found = fast(x, w)
                assert do in str(told[0].message) and "test_fake_device.py" in str(told[0].message)
            else:
                found = fast(x, w)
            wanted = function(x, w)
            torch.testing.assert_close(found, wanted)
            seed = torch.randn_like(wanted)
            torch.testing.assert_close(torch.autograd.grad(found, (x, w), seed),
                                       torch.autograd.grad(wanted, (x, w), seed))
        assert anyshape.stats()["eager_calls"] == 6
        assert what in str(fast.explain()) and sum(calls for _, calls in fast.explain().eager) == 6
        for other, error in ((strict, DeviceError), (limited, LimitError)):
            with pytest.raises(error, match=what):
                other(x.detach(), w.detach())
    if name == "no launch":  # it was of that moment
        anyshape.reset_stats()
        torch.testing.assert_close(fast(x, w), function(x, w))
        assert anyshape.stats()["eager_calls"] == 0


def test_a_backward_that_is_refused(fake: FakeDriver) -> None:
    """Its forward has run on the device: PyTorch reads the tape of that."""
    fake.reads = True
    fast = anyshape.compile(chain)
    for error in (None, 701):
        x = torch.randn(6, 9, requires_grad=True)
        y = fast(x)
        anyshape.reset_stats()
        seed = torch.randn(6, 9)
        if error is not None:
            fake.fails["launch"] = error
        (found,) = torch.autograd.grad(y, x, seed)
        torch.testing.assert_close(found, torch.autograd.grad(chain(x), x, seed)[0])
        assert anyshape.stats()["eager_calls"] == (error is not None)
    del fake.fails["launch"]


def test_what_a_refused_call_has_written_is_not_written_twice(fake: FakeDriver) -> None:
    def update(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        w.add_(x.sum())
        return torch.softmax(x.sort(0)[0] * w, 0).cumsum(0)

    fake.reads = True
    fast = anyshape.compile(update)
    x, w = torch.randn(5, 7), torch.zeros(())
    fast(x, w)
    launches = fake.counts["launch"]
    fast(x, w)
    launches = fake.counts["launch"] - launches
    assert launches > 1
    launch = fake.launch
    for refused in range(launches):
        left = refused

        def some(*arguments: int) -> int:
            nonlocal left
            left -= 1
            return launch(*arguments) if left >= 0 else 701

        fake.launch = some  # type: ignore[method-assign]
        before, plain = w.clone(), w.clone()
        wanted = update(x, plain)
        try:
            found = fast(x, w)
        except DeviceError:
            fake.everything()
            assert refused and any(torch.allclose(w, one) for one in (before, plain))
        else:
            torch.testing.assert_close((found, w), (wanted, plain))
    fake.launch = launch  # type: ignore[method-assign]


# ---- graphs

@pytest.fixture
def graphs(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The fake, whose programs have graphs after two calls with the same addresses."""
    monkeypatch.setattr(fake_device.Target, "graphs_after", 2)
    return fake


def again(fake: FakeDriver, fast: Any, x: torch.Tensor, calls: int) -> bool:
    """Whether calls are right whose results are dropped, so that their memory is given again."""
    good = True
    for _ in range(calls):
        x.copy_(torch.randn(x.shape))
        y = fast(x)
        fake.everything()
        good = good and torch.allclose(y, two(x), atol=1e-5)
        del y
        fake.everything()
    return good


def test_graphs_stand_for_calls_of_their_addresses(graphs: FakeDriver) -> None:
    fast = anyshape.compile(two, strict=True)
    inputs = [[torch.randn(rows, 7) for rows in (5, 5, 9)] for _ in range(3)]  # no address of one is that of another
    for order, (x, other, longer) in zip(ORDERS, inputs, strict=False):
        graphs.set(order)
        assert again(graphs, fast, x, 6)
        issued, launched = graphs.counts["launch"], graphs.counts["launch_graph"]
        assert again(graphs, fast, x, 4)
        assert graphs.counts["launch"] == issued and graphs.counts["launch_graph"] == launched + 4
        assert again(graphs, fast, other, 1) and again(graphs, fast, longer, 1)
        assert graphs.counts["launch"] > issued and graphs.counts["launch_graph"] == launched + 4
    for _ in range(9):  # graphs of addresses that do not come again are given back
        assert again(graphs, fast, torch.randn(5, 7), 4)
    assert graphs.counts["destroy_graph_exec"] > 0 and not graphs.captured
    assert graphs.counts["destroy_graph"] == graphs.counts["begin_capture"] == graphs.counts["instantiate_graph"]


def test_a_graph_of_other_addresses_is_found(graphs: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake of leaving the addresses out of what graphs are found by."""
    fast = anyshape.compile(two, strict=True)
    find = StreamGraphs.find
    with monkeypatch.context() as patch:
        patch.setattr(StreamGraphs, "find", lambda self, key, issue: find(self, b"", issue))
        held = [torch.randn(5, 7) for _ in range(6)]
        found = [fast(x) for x in held]
        graphs.everything()
        assert not all(torch.allclose(y, two(x), atol=1e-5) for x, y in zip(held, found, strict=True))
    graphs.alarms.clear()


def test_a_check_in_a_graph_is_told(graphs: FakeDriver) -> None:
    fast = anyshape.compile(lambda x, i: (x[i] * 2).cumsum(0), strict=True)
    x, i = torch.randn(5), torch.tensor([1, 2])
    unread = None
    for turn in range(8):
        i.copy_(torch.tensor([1, 9 if turn == 6 else 3]))
        y = fast(x, i)
        unread = program(fast).context.unread
        if turn == 6:
            with pytest.raises(IndexRangeError):
                settle(unread, wait=True)
        settle(unread, wait=True)
        graphs.everything()
        assert turn == 6 or torch.allclose(y, (x[i] * 2).cumsum(0))
        del y
        graphs.everything()
    assert graphs.counts["launch_graph"] > 2


def test_a_program_with_steps_of_pytorch_has_no_graph(graphs: FakeDriver) -> None:
    fast = anyshape.compile(mixed, strict=True)
    x, w = torch.randn(3, 4), torch.randn(4, 6)
    for _ in range(5):
        found = fast(x, w)
        graphs.everything()
        torch.testing.assert_close(found, mixed(x, w))
        del found
    assert not graphs.counts["begin_capture"]


@pytest.mark.parametrize("name", ("begin_capture", "end_capture", "instantiate_graph"))
def test_a_graph_that_the_driver_refuses_is_told_once(graphs: FakeDriver, name: str,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(stream: int, pointer: int) -> int:
        del graphs.captured[stream]
        return 801

    fast = anyshape.compile(two, strict=True)
    x = torch.randn(5, 7)
    assert again(graphs, fast, x, 2)
    if name == "end_capture":  # a capture that was broken has ended, too
        monkeypatch.setattr(graphs, name, ended)
    else:
        graphs.fails[name] = 801
    with pytest.warns(RuntimeWarning, match="there is no graph of 0_inference") as told:
        assert again(graphs, fast, x, 6)
    text = str(told[0].message)
    assert len(told) == graphs.counts[name] == 1 and "error 801" in text and "device_graphs" in text
    assert not graphs.counts["launch_graph"]


def layers(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.relu(x @ w).t() @ x, 0) @ v


def workspaces(fake: FakeDriver, patch: pytest.MonkeyPatch) -> None:
    """Products lay their first operand out in a workspace of the stream, as libraries do."""
    spaces: dict[int, torch.Tensor] = {}

    def step(self: Any, state: int, number: int) -> int:
        call, block = self.running[state]
        later = Later(call, number)
        left, right, target = later.known.values()
        space = spaces.setdefault(fake.stream, torch.empty(1000))[:left.numel()].view(left.shape)
        fake.issue(fake.stream, partial(space.copy_, left))
        fake.issue(fake.stream, partial(torch.mm, space, right, out=target))
        block[STEP] = STEP_DONE
        return 0
    patch.setattr(fake_device.Loop, "_step", step)


def layers_by_turns(fake: FakeDriver, fast: Any, calls: int) -> bool:
    """Whether calls are right that two streams take turns at, each with memory of its own."""
    streams = [fake.new_stream() for _ in range(2)]
    inputs = [[torch.randn(5, 7), torch.randn(7, 6), torch.randn(7, 3)] for _ in streams]
    good = True
    for _ in range(calls):
        found = []
        for stream, given in zip(streams, inputs, strict=True):
            with fake.on(stream):
                found.append(fast(*given))
        fake.everything()
        good = good and all(torch.allclose(y, layers(*given), atol=1e-5)
                            for y, given in zip(found, inputs, strict=True))
        del found
        fake.everything()
    return good


def test_products_are_captured(graphs: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph has the products between its kernels; those of two streams do not run at once."""
    workspaces(graphs, monkeypatch)
    fast = anyshape.compile(layers, strict=True)
    for order in ORDERS[:4]:
        graphs.set(order)
        assert layers_by_turns(graphs, fast, 5), order
        assert graphs.counts["launch_graph"]
    x, w, v = torch.randn(5, 7), torch.randn(7, 6), torch.randn(7, 3)
    for turn in range(6):
        x.copy_(torch.randn(5, 7))
        before = graphs.counts["launch"], graphs.counts["launch_graph"]
        y = fast(x, w, v)
        graphs.everything()
        torch.testing.assert_close(y, layers(x, w, v))
        del y
        graphs.everything()
        after = graphs.counts["launch"], graphs.counts["launch_graph"]
        assert turn < 3 or after == (before[0], before[1] + 1)


def test_graphs_that_share_a_workspace_are_found(graphs: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake of letting them run at once."""
    workspaces(graphs, monkeypatch)
    fast = anyshape.compile(layers, strict=True)
    monkeypatch.setattr(DeviceGraph, "launch", DeviceGraph._launch)
    found = []
    for order in ORDERS:
        graphs.set(order)
        found.append(layers_by_turns(graphs, fast, 6))
    assert not all(found)


# ---- models

@pytest.mark.parametrize("order", ORDERS[1:2])
@pytest.mark.parametrize("name", ("mixer",))
def test_models(fake: FakeDriver, name: str, order: str) -> None:
    fake.set(order)
    fake.reads = True
    check_shapes(ZOO[name], ZOO[name].shapes(3))


@pytest.mark.full
@pytest.mark.parametrize("name", ZOO)
def test_every_model(fake: FakeDriver, name: str) -> None:
    fake.set("last stream first")
    fake.reads = True
    check_shapes(ZOO[name], ZOO[name].shapes(6), strict=True)
    check_train_steps(ZOO[name])


@pytest.mark.full
def test_train_steps(fake: FakeDriver) -> None:
    fake.reads = True
    check_train_step()


@pytest.mark.full
def test_limits(fake: FakeDriver) -> None:
    fake.reads = True
    check_limits()


def test_interpreted_kernels() -> None:
    """A GPU's kernels, interpreted behind the driver, in a process of their own; none may be skipped."""
    done = forked.run_tests(["-o", "python_files=interpreted_*.py", "tests/interpreted_device.py"],
                            TRITON_INTERPRET="1")
    last = done.stdout.strip().split("\n")[-1]
    assert done.returncode == 0 and "passed" in last and "skipped" not in last, done.stdout[-4000:] + done.stderr[-999:]


def test_work_that_fails_is_the_last() -> None:
    """Who fails gives memory back that later work would be on."""
    fake, ran = FakeDriver(), []
    fake.issue(0, lambda: ran.append(1 // len(ran)))
    fake.issue(0, lambda: ran.append(2))
    with pytest.raises(ZeroDivisionError):
        fake.everything()
    fake.everything()
    assert not ran and not fake.issued
