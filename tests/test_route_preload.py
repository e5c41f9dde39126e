"""Speculative weight preload: the same bits under a limit that holds, prediction, errors of the disk, threads."""
from __future__ import annotations

import gc
import os
import random
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import anyshape
import forked
from anyshape import route
from anyshape.base.errors import InputError, LimitError, StoreError
from anyshape.route.optimize import preload as optimisation
from anyshape.route.optimize.decision import shared_copy
from anyshape.route.preload import BranchPredictor
from anyshape.route.preload.layout import lay_out
from anyshape.route.preload.prefetch_trial import PrefetchTrial
from anyshape.route.profile.routers import routers_of
from anyshape.route.store import BranchBytes, BranchCache, BranchFile, BranchMemory
from anyshape.route.store.host_memory import PAGE

pytestmark = pytest.mark.usefixtures("quick_collections")

WIDTH, HIDDEN, BRANCHES = 32, 64, 6


class Layer(nn.Module):
    def __init__(self, stacked: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, BRANCHES)
        experts = route.Experts(BRANCHES, WIDTH, HIDDEN) if stacked else [
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(BRANCHES)]
        self.moe = route.Router(route.top_k(self.gate, k=2), experts)

    def forward(self, x):
        return x + self.moe(x)


def network(stacked: bool = True, layers: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(stacked) for _ in range(layers)]).eval()


def bytes_of(model: nn.Module) -> int:
    return sum(tensor.numel() * 4 for router in routers_of(model).values() for tensor in router.branches.parameters())


def preloaded(model: nn.Module, share: float, **more):
    return optimisation.preload(shared_copy(model), int(bytes_of(model) * share), **more)


def store_of(model: nn.Module):
    return next(iter(routers_of(model).values())).branches.preloader


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "list"])
@pytest.mark.parametrize("share", [0.6, 0.08], ids=["most", "rounds"])
def test_results_are_those_of_the_model_in_memory(stacked, share):
    """0.08: the branches of one call do not fit together. Rows of any number, none among them."""
    model = network(stacked)
    fast = preloaded(model, share)
    store = store_of(fast)
    for count in (1, 3, 0, 1, 2, 40, 1, 5):
        x = torch.randn(count, WIDTH)
        with torch.no_grad():
            assert torch.equal(fast(x), model(x))
        assert store.held <= store.limit
    assert store.counts.peak + store.layout.kept <= store.limit
    if share > 0.5:
        assert store.counts.hits > 0


def test_a_compiled_program_is_made_once_and_has_the_same_bits():
    model = network(layers=2)
    expected = anyshape.compile(model)
    fast = anyshape.compile(preloaded(model, 0.4, compile=anyshape.compile))
    with torch.no_grad():
        for count in (4, 9, 2, 30, 3):
            x = torch.randn(count, WIDTH)
            assert torch.equal(fast(x), expected(x))
    assert "1 program" in str(fast.explain()).splitlines()[0]


def resident(store) -> int:
    """Bytes that the kernel says are in memory of a store's address space."""
    begin = store.memory.bytes.data_ptr()
    end, inside, found = begin + len(store.memory.map), False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(word, 16) for word in head.split("-"))
            inside = low >= begin and high <= end
        elif inside and head == "Rss:":
            found += int(line.split()[1]) * 1024
    return found


def made_store(count: int, pages: int, limit: int, ahead: bool = True, folder=None):
    """A cache of branches, each of so many pages, filled with its number."""
    branches = [BranchBytes(f"branch {one}", ((one * pages * PAGE, pages * PAGE),)) for one in range(count)]
    memory, file = BranchMemory(count * pages * PAGE, branches), BranchFile(branches, folder)
    for one in range(count):
        file.write(one, [memoryview(bytes([one + 1]) * (pages * PAGE))])
    return BranchCache(branches, memory, file, limit * pages * PAGE, ahead=ahead)


@pytest.mark.parametrize("steps", [1500, pytest.param(10_000, marks=pytest.mark.full)])
def test_the_limit_holds_in_every_step(steps):
    """A cache of 40 branches of which 10 fit, checked by what it counts and by what the kernel counts."""
    cache = made_store(40, 2, 10)
    draw = np.random.default_rng(0)
    for step in range(steps):
        wanted = draw.choice(40, draw.integers(1, 6), replace=False, p=np.arange(1, 41) / 820)
        values = draw.random(40)
        with cache.use([int(one) for one in wanted]):
            cache.advise(values, [int(one) for one in np.argsort(-values)[:4]])
            for one in wanted:
                assert cache.upper.views(int(one))[0][-1] == one + 1
            assert cache.upper.held <= cache.limit
            if step % 100 == 0:
                assert resident_of(cache) <= cache.limit
    counts = cache.counts
    assert counts.peak <= cache.limit and min(counts.hits, counts.misses) > steps // 4
    assert resident_of(cache) <= cache.limit


def resident_of(cache) -> int:
    class Of:
        memory = cache.upper

    return resident(Of)


def test_weights_leave_memory_and_what_does_not_fit_is_not_there():
    model = network(layers=2)
    store = store_of(preloaded(model, 0.5))
    assert resident(store) == 0
    with store.cache.use([0, 1]):
        assert 0 < resident(store) <= store.limit


def test_pages_that_two_branches_share_are_counted_once_and_kept():
    size = PAGE + 100  # three branches in four pages
    branches = [BranchBytes(f"branch {one}", ((one * size, size),)) for one in range(3)]
    memory, file = BranchMemory(3 * size, branches), BranchFile(branches)
    for one in range(3):
        file.write(one, [memoryview(bytes([one + 1]) * size)])
    cache = BranchCache(branches, memory, file, 4 * PAGE)
    for wanted in ([0, 1], [2], [0], [1, 2], [0, 1, 2], [1]):
        with cache.use(wanted):
            assert memory.held == int((memory.holders > 0).sum()) * PAGE <= 4 * PAGE
            for one in wanted:
                data = memory.views(one)[0]
                assert data[0] == data[size - 1] == one + 1 and data.tobytes() == bytes([one + 1]) * size


@pytest.mark.parametrize("size", [1, PAGE - 1, PAGE, PAGE + 100, 3 * PAGE + 7])
def test_what_a_change_would_hold_is_counted_before_it_is_made(size):
    count, rest = 9, 9 * size + 50  # two tensors, sliced by branch; the second begins inside a page
    branches = [BranchBytes(f"branch {one}", ((one * size, size), (rest + one * 40, 40))) for one in range(count)]
    memory, draw = BranchMemory(rest + 40 * count, branches), random.Random(size)
    held = set[int]()
    for _ in range(60):
        leave = [one for one in held if draw.random() < 0.4]
        enter = [one for one in range(count) if one not in held and draw.random() < 0.4]
        told = memory.excess(leave, enter, 10_000)
        memory.replace(leave, enter)
        held = held - {*leave} | {*enter}
        assert memory.held == told + 10_000 == memory.least(sorted(held))


def test_what_is_likely_next_is_read_ahead_and_then_hit():
    cache = made_store(12, 1, 4)
    for step in range(30):
        one = step % 12
        values = np.zeros(12)
        values[(one + 1) % 12] = 1.0
        with cache.use([one]):
            cache.advise(values, [(one + 1) % 12])
            deadline = time.monotonic() + 5
            while cache.state[(one + 1) % 12] != 2 and time.monotonic() < deadline:
                time.sleep(0.0005)
    assert cache.counts.misses == 1 and cache.counts.wasted == 0


def test_prefetch_switches_itself_off_where_it_is_wasted():
    cache = made_store(40, 1, 4)
    before = 0
    for step in range(200):
        values = np.zeros(40)
        values[20 + step % 20] = 1.0
        with cache.use([step % 20]):
            cache.advise(values, [20 + step % 20])  # never used
            time.sleep(0.0005)
        if cache.counts.pauses == 1 and not before:
            before = cache.counts.prefetched
    assert cache.counts.pauses >= 1
    assert cache.counts.prefetched < 140 * PAGE, "it went on as before"


def test_prediction_follows_the_joint_profile_and_leaves_it_when_it_is_stale():
    joint = np.zeros((4, 4))
    joint[np.arange(4), (np.arange(4) + 1) % 4] = 100
    predictor = BranchPredictor([np.full(4, 0.25)] * 2, {(0, 1): joint})
    now = np.array([0, 3, 0, 0])
    assert predictor.predict(0, now, 1).round(1).tolist() == [0, 0, 1, 0]
    for _ in range(40):  # the world has changed: branch 3 is always taken
        predictor.predict(0, now, 1)
        predictor.observe(1, np.array([0, 0, 0, 3]))
    assert predictor.predict(0, now, 1)[3] > 0.5 > predictor.predict(0, now, 1)[2]


# ---- plans


def planned(model: nn.Module, limit: int | str):
    with route.profile(model) as profile, torch.no_grad():
        for seed in range(12):
            torch.manual_seed(seed)
            model(torch.randn(2, WIDTH))
    return route.optimize(model, profile, memory_limit=limit, passes=["preload"])


def test_a_plan_says_what_it_does_and_does_it():
    model = network()
    whole = bytes_of(model)
    plan = planned(model, whole // 2)
    decision, = plan.decisions
    assert decision.applied and decision.guard and "50%" in decision.why
    pairs = [tuple(pair[:2]) for pair in decision.options["joint"]]
    assert pairs == [("0.moe", "1.moe"), ("0.moe", "2.moe"), ("1.moe", "2.moe")]
    fast = plan.apply(model)
    x = torch.randn(4, WIDTH)
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
    assert store_of(fast).held <= whole // 2
    assert not any(one.applied for limit in (0, 2 * whole, "1GiB") for one in planned(model, limit).decisions)
    assert isinstance(model[0].moe.branches, route.Experts)  # the model is as it was


def test_a_limit_below_one_branch_is_refused_and_nothing_has_run():
    model = network()
    for attempt in (lambda: planned(model, 1000), lambda: optimisation.preload(model, 1000)):
        with pytest.raises(LimitError) as raised:
            attempt()
        error = raised.value
        assert all((error.what, error.where, error.why, error.do)) and error.least > 1000
    assert isinstance(model[0].moe.branches, route.Experts)
    optimisation.preload(model, error.least)  # what it names is enough
    with torch.no_grad():
        model(torch.randn(3, WIDTH))


def test_tensors_that_others_use_stay_in_memory():
    model = network(stacked=False, layers=2)
    shared = nn.Linear(WIDTH, WIDTH)
    for layer in model:
        for branch in layer.moe.branches:
            branch[2] = nn.Linear(HIDDEN, WIDTH)
            branch.append(shared)
    model[0].moe.branches[1][0].weight = model[0].moe.branches[0][0].weight  # tied
    fast = preloaded(model, 0.9)
    layout = store_of(fast).layout
    assert layout.kept >= shared.weight.nbytes + model[0].moe.branches[0][0].weight.nbytes
    with torch.no_grad():
        x = torch.randn(7, WIDTH)
        assert torch.equal(fast(x), model(x))
    moved = {place.key for router in layout.routers for place in router.places}
    assert id(shared.weight) not in moved and id(model[0].moe.branches[0][0].weight) not in moved


def test_a_router_inside_a_branch_is_part_of_it():
    inner = route.Router(route.top_k(nn.Linear(WIDTH, 2), k=1), [nn.Linear(WIDTH, WIDTH) for _ in range(2)])
    model = nn.Sequential(route.Router(route.top_k(nn.Linear(WIDTH, 3), k=1),
                                       [inner, nn.Linear(WIDTH, WIDTH), nn.Identity()])).eval()
    fast = preloaded(model, 0.8)
    assert len(store_of(fast).layout.routers) == 1
    with torch.no_grad():
        for count in (9, 1, 1, 4):
            x = torch.randn(count, WIDTH)
            assert torch.equal(fast(x), model(x))


def test_a_grouped_module_that_does_not_say_what_is_stacked_is_left_alone():
    class Own(nn.Module):
        branch_count = BRANCHES

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(BRANCHES, WIDTH * WIDTH))

        def forward(self, rows, ends):
            return rows

    model = network(layers=1)
    model[0].moe.branches = Own()
    decision, = planned(model, 12000).decisions
    assert not decision.applied and "stacked" in decision.why


# ---- as a module


def test_state_is_read_from_the_file_and_gradients_are_refused():
    for stacked in (True, False):
        model = network(stacked)
        fast = preloaded(model, 0.5)
        ours, theirs = fast.state_dict(), model.state_dict()
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    x = torch.randn(3, WIDTH, requires_grad=True)
    for attempt in (lambda: fast(x).sum().backward(), lambda: fast.load_state_dict(theirs),
                    lambda: torch.save(fast, os.devnull), lambda: fast.train()(x), lambda: fast.double()):
        with pytest.raises(InputError) as raised:
            attempt()
        assert raised.value.why and raised.value.do


def test_memory_file_and_thread_go_with_the_model():
    model = network()
    fast = preloaded(model, 0.5)
    with torch.no_grad():
        for _ in range(3):
            fast(torch.randn(2, WIDTH))
    store = store_of(fast)
    gone = [weakref.ref(one) for one in (store, store.cache, store.memory, store.file)]
    number, worker = store.file.number, store.cache.worker
    assert worker is not None and worker.is_alive()
    del fast, store
    gc.collect()
    worker.join(5)
    assert not worker.is_alive() and all(one() is None for one in gone)
    with pytest.raises(OSError):
        os.fstat(number)


# ---- errors of the disk


def test_a_full_disk_changes_nothing(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    model = network()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError) as raised:
        optimisation.preload(model, bytes_of(model) // 2)
    assert raised.value.why and raised.value.do
    assert isinstance(model[0].moe.branches, route.Experts)


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_file_is_said_and_what_is_in_memory_goes_on(damage):
    cache = made_store(6, 1, 3, ahead=False)
    with cache.use([0, 1]):
        pass
    if damage == "cut":
        os.ftruncate(cache.lower.number, 2 * 4096)
    else:
        os.pwrite(cache.lower.number, b"\0", cache.lower.starts[3] + 77)
    with pytest.raises(StoreError) as raised, cache.use([0, 3]):
        pytest.fail("it ran without its weights")
    assert "branch 3" in raised.value.what and raised.value.why and raised.value.do
    with cache.use([0, 1]):
        assert cache.upper.views(1)[0][5] == 2
    assert not cache.pins.any() and cache.upper.held <= cache.limit and cache.counts.failed == 1


def test_a_prefetch_that_fails_is_no_error_of_the_call():
    cache = made_store(6, 1, 3)
    os.ftruncate(cache.lower.number, 0)
    cache.advise(np.ones(6), [4])
    deadline = time.monotonic() + 5
    while not cache.counts.failed and time.monotonic() < deadline:
        time.sleep(0.001)
    assert cache.counts.failed == 1 and cache.upper.held == 0


# ---- threads and processes


def test_threads_share_a_store():
    model = network(stacked=False, layers=2)
    fast = preloaded(model, 0.35)
    inputs = [torch.randn(count, WIDTH) for count in (1, 2, 5, 3, 1, 2, 1, 4) * 3]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    wrong: list[int] = []

    def work(order):
        with torch.no_grad():
            for one in order:
                if not torch.equal(fast(inputs[one]), expected[one]):
                    wrong.append(one)

    threads = [threading.Thread(target=work, args=(np.random.default_rng(seed).permutation(24),)) for seed in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    store = store_of(fast)
    assert not any(one.is_alive() for one in threads) and not wrong
    assert store.counts.peak + store.layout.kept <= store.limit and not store.cache.pins.any()


def forks() -> None:
    """Ends well where the child of a fork has the results of its parent."""
    model = network(layers=2)
    fast = preloaded(model, 0.6)
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        expected = fast(x)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(fast(x), expected) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(fast(x), expected)


def test_a_forked_process_goes_on(tmp_path):
    # in a process of its own with one thread: PyTorch's thread pool does not outlive a fork
    (tmp_path / "forks.py").write_text("import test_route_preload\ntest_route_preload.forks()\n")
    done = forked.Run(tmp_path / "forks.py", [], {**os.environ, "OMP_NUM_THREADS": "1"}, tmp_path).done(120)
    assert done.returncode == 0, done.stderr


def test_the_layout_changes_nothing():
    model = network()
    before = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    layout = lay_out(model, routers_of(model))
    assert layout.bytes == bytes_of(model)
    assert before == {name: tensor.data_ptr() for name, tensor in model.named_parameters()}


def test_prefetch_is_kept_only_where_calls_are_faster_with_it():
    for with_it, without in ((1.0, 3.0), (3.0, 1.0)):
        trial = PrefetchTrial(2)
        seen = []
        for turn in range(20_000):
            trial.took(turn % 2, with_it if trial.on else without)
            seen.append(trial.on)
        assert trial.outcome is (with_it < without)
        assert 0.9 < np.mean([one is trial.outcome for one in seen]) < 1.0, "the other way is tried, and seldom"
