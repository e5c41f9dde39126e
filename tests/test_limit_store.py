"""A limit in bytes with a store: values that are moved out come back as they were, whatever happens meanwhile."""
from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
import time

import pytest
import torch
from torch import nn

import anyshape
from anyshape.base.errors import ConfigError, LimitError, StoreError
from anyshape.runtime.context.process_context import shared_context
from anyshape.runtime.memory import offload_store as store_module
from anyshape.runtime.memory.offload_store import CopyRequest, HostStore
from anyshape.runtime.specialize import offload_schedule
from anyshape.runtime.specialize.saved_policy import SAVE_ALL
from limits import NO_LIMIT, Layers, counted, limit_of, net, same, sizes, step

pytestmark = [pytest.mark.unguarded, pytest.mark.usefixtures("quick_collections")]


def compiled(module, folder, limit=NO_LIMIT, **settings):
    return anyshape.compile(module, memory_limit=limit, memory_store=str(folder), strict=True, **settings)


def store_of(run) -> HostStore:
    return limit_of(run).store


def curve_of(run, x):
    limit = limit_of(run)
    return list(limit.tradeoff(sizes(run, x)))


def need(run, x, point) -> int:
    """The limit that a point needs."""
    return limit_of(run).needed(sizes(run, x), point.policy)


def at(run, bytes_):
    """The program under another limit."""
    limit_of(run).move(bytes_)
    return run


def test_the_last_rung_does_not_depend_on_measured_speeds(plain, tmp_path, monkeypatch):
    """Else the least limit of one process is too low in the next one."""
    module, x, _, _ = plain
    run = compiled(module, tmp_path)
    step(run, module, x)
    last = set()
    for speeds in ((0.4e-9, 0.7e-9), (1e-7, 1e-7)):  # back, out: seconds a byte
        monkeypatch.setattr(HostStore, "seconds", lambda self, bytes_, out, speeds=speeds: bytes_ * speeds[out])
        limit_of(run).forget()
        last.add(curve_of(run, x)[-1].policy)
    assert len(last) == 1


def begun(run, x) -> torch.Tensor:
    """The loss; its backward has not run."""
    return run(x.clone().requires_grad_()).square().mean()


@pytest.fixture(scope="module")
def plain():
    """A module, one input, its results, and a program without a store."""
    module, x = net(count=6), torch.randn(1500, 32)
    run = anyshape.compile(module, memory_limit=NO_LIMIT, strict=True)
    return module, x, step(run, module, x), run


@pytest.fixture
def priced(plain, tmp_path):
    """The same with a store, and costs as they are."""
    module, x, wanted, _ = plain
    run = compiled(module, tmp_path)
    step(run, module, x)
    return module, x, wanted, run


@pytest.fixture(scope="module")
def moving_all(plain, tmp_path_factory):
    """The same, but moving costs nothing, so that everything is moved that can be."""
    module, x, wanted, _ = plain
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostStore, "each", 0.0)
        patch.setattr(offload_schedule.Clock, "seconds", lambda self, bytes_: 0.0 * bytes_)
        run = compiled(module, tmp_path_factory.mktemp("store"))
        step(run, module, x)
        points = curve_of(run, x)  # it remembers them
    assert points[-1].moved and not points[-1].dropped
    return module, x, wanted, run


@pytest.fixture
def small(moving_all):
    """The same under the least limit that works."""
    module, x, wanted, run = moving_all
    at(run, need(run, x, curve_of(run, x)[-1]))
    assert same(step(run, module, x), wanted) and store_of(run).used == 0
    return module, x, wanted, run


@pytest.mark.parametrize("costs", ("priced", "moving_all"))
def test_every_rung_gives_the_same_numbers_and_fits(request, costs):
    module, x, wanted, run = request.getfixturevalue(costs)
    tradeoff = curve_of(run, x)
    lives = [point.live for point in tradeoff]
    assert len(tradeoff) > 3 and lives == sorted(lives, reverse=True)
    assert any(point.moved for point in tradeoff)
    all_kept = limit_of(run).needed(sizes(run, x), SAVE_ALL)
    some = *tradeoff[1:-1:len(tradeoff) // 4 + 1], tradeoff[-1]
    for bytes_ in (all_kept, all_kept - 1, *(need(run, x, point) for point in some)):
        at(run, bytes_)
        with counted() as most:
            found = step(run, module, x)
        assert same(found, wanted) and bytes_ // 2 < most[0] <= bytes_
    assert store_of(run).moved > 0 and store_of(run).used == 0


def test_less_works_than_by_computing_again(plain, priced):
    again = min(need(plain[3], plain[1], point) for point in curve_of(plain[3], plain[1]))
    module, x, wanted, run = priced
    point = curve_of(run, x)[-1]
    least = need(run, x, point)
    assert least < 0.98 * again and point.moved
    with counted() as most:
        assert same(step(at(run, least), module, x), wanted)
    assert most[0] <= least
    text = str(run.memory(x=(1500, 32)))
    assert f"{len(point.moved)} moved out (" in text
    with pytest.raises(LimitError, match="moved out or computed again") as caught:
        step(at(run, least - 4096), module, x)
    assert same(step(at(run, int(caught.value.do.split()[3])), module, x), wanted)


def test_the_least_limit_does_not_depend_on_the_disk(priced):
    _, x, _, run = priced
    last = curve_of(run, x)[-1]
    limit = limit_of(run)
    for speed in limit.store.speeds:
        speed.bytes /= 1000
    limit.known.clear()
    assert curve_of(run, x)[-1].live == last.live


def test_what_cannot_be_computed_again_is_moved(tmp_path):
    """Values behind random numbers."""
    class Noisy(Layers):
        def forward(self, x):
            for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
                x = x + torch.rand_like(x)
                x = x + down(torch.sin(torch.tanh(up(norm(x)))))
            return x

    torch.manual_seed(0)
    module, x = Noisy(count=6), torch.randn(1500, 32)

    def seeded(run):
        torch.manual_seed(3)
        return step(run, module, x)

    run = compiled(module, tmp_path)
    wanted = seeded(run)
    limit, values = limit_of(run), sizes(run, x)
    again = min(limit.needed(values, point.policy) for point in limit.tradeoff(values, moving=False))
    point = curve_of(run, x)[-1]
    known = {one.saved for one in limit.backward.plan.again}
    least = need(run, x, point)
    assert any(move.saved not in known for move in point.moved) and least < again
    with counted() as most:
        assert same(seeded(at(run, least)), wanted)
    assert most[0] <= least


def test_where_nothing_can_be_computed_again(tmp_path, monkeypatch):
    monkeypatch.setattr("anyshape.compiler.driver.segments", lambda graph, stored, gathered=(): ())
    module, x = net(count=6), torch.randn(1500, 32)
    run = compiled(module, tmp_path)
    wanted = step(run, module, x)
    limit, values = limit_of(run), sizes(run, x)
    assert not limit.backward.plan.again
    least = limit.least(values)
    assert least < 0.8 * limit.needed(values, SAVE_ALL)
    with counted() as most:
        assert same(step(at(run, least), module, x), wanted)
    assert most[0] <= least


def test_a_backward_may_run_twice(small):
    module, x, wanted, run = small
    module.zero_grad(set_to_none=True)
    loss = begun(run, x)
    loss.backward(retain_graph=True)
    assert store_of(run).used > 0
    loss.backward()
    assert store_of(run).used == 0
    for p, b in zip(module.parameters(), wanted[2:], strict=True):
        torch.testing.assert_close(p.grad, 2 * b)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_backward_on_another_thread(small, plain):
    found = []
    for module, x, _, run in (plain, small):
        module.zero_grad(set_to_none=True)
        loss = begun(run, x)
        worker = threading.Thread(target=loss.backward)
        worker.start()
        worker.join()
        found.append([p.grad for p in module.parameters()])
    assert same(*found) and store_of(run).used == 0


def test_a_tape_that_is_dropped_gives_its_place_back(small):
    module, x, wanted, run = small
    loss = begun(run, x)
    assert store_of(run).used > 0
    del loss
    gc.collect()
    assert store_of(run).used == 0 and same(step(run, module, x), wanted)


def test_an_exception_before_the_backward_leaves_nothing(small):
    module, x, wanted, run = small
    y = run(x.clone().requires_grad_())

    def fail(_):
        raise ValueError("on the way back")

    y.register_hook(fail)
    with pytest.raises(ValueError, match="on the way back"):
        y.sum().backward()
    del y
    gc.collect()
    assert store_of(run).used == 0 and same(step(run, module, x), wanted)


@pytest.mark.parametrize("number", (0, 3, 7, 12))
def test_ctrl_c_while_values_are_copied(small, monkeypatch, number):
    module, x, wanted, run = small
    wait, calls = CopyRequest.wait, []
    write = os.pwrite

    def slow(*arguments):
        time.sleep(0.002)
        return write(*arguments)

    def interrupted(ticket):
        calls.append(ticket)
        if len(calls) == number + 1:
            raise KeyboardInterrupt
        wait(ticket)

    monkeypatch.setattr(store_module.os, "pwrite", slow)
    monkeypatch.setattr(CopyRequest, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(run, module, x)
    assert all(ticket.done.is_set() for ticket in calls)  # nobody writes into memory that was given back
    monkeypatch.undo()
    gc.collect()
    assert store_of(run).used == 0 and limit_of(run).held.bytes == 0
    assert same(step(run, module, x), wanted)


def test_a_full_disk_means_computing_again(moving_all, monkeypatch):
    module, x, wanted, run = moving_all
    limit, values = limit_of(run), sizes(run, x)
    again = min(limit.needed(values, point.policy) for point in limit.tradeoff(values, moving=False))
    least = need(run, x, curve_of(run, x)[-1])
    store = store_of(run)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_module.os, "posix_fallocate", full)
    store.file = None  # another one has no blocks yet
    at(run, again)
    with counted() as most:
        assert same(step(run, module, x), wanted)
    assert most[0] <= again and store.used == 0
    with pytest.raises(LimitError, match="nothing can be moved out") as caught:
        step(at(run, least), module, x)
    assert "No space left" in caught.value.why
    monkeypatch.undo()
    assert same(step(run, module, x), wanted)


def test_a_cap_means_moving_less(plain, tmp_path):
    module, x, wanted, _ = plain
    cap = 1 << 20
    run = compiled(module, tmp_path, memory_store_limit=cap)
    step(run, module, x)
    points = curve_of(run, x)
    assert 0 < max(point.away for point in points) <= cap and points[-1].dropped and points[-1].moved
    least = need(run, x, points[-1])
    with counted() as most:
        assert same(step(at(run, least), module, x), wanted)
    assert most[0] <= least and store_of(run).file.size <= cap


def test_tapes_in_flight_share_store_and_limit(moving_all):
    module, x, wanted, run = moving_all
    limit, values = limit_of(run), sizes(run, x)
    bytes_ = limit.needed(values, SAVE_ALL) + limit.program.specializer.make(values).kept // 2
    at(run, bytes_)
    module.zero_grad(set_to_none=True)
    with counted() as most:
        first, second = (begun(run, x) for _ in range(2))
        assert store_of(run).used > 0  # of the second one
        first.backward()
        second.backward()
    assert most[0] <= bytes_ and store_of(run).used == 0
    for p, b in zip(module.parameters(), wanted[2:], strict=True):
        assert torch.equal(p.grad, 2 * b)


def test_a_file_that_is_cut_short_fails_the_backward_and_no_more(small):
    module, x, wanted, run = small
    loss = begun(run, x)
    os.ftruncate(store_of(run).file.number, 4096)
    with pytest.raises(StoreError, match="moved back") as caught:
        loss.backward()
    assert "cut it short" in caught.value.why
    del loss
    gc.collect()
    assert store_of(run).used == 0
    assert same(step(run, module, x), wanted)


def test_a_slow_disk_takes_time_only(small, monkeypatch):
    module, x, wanted, run = small
    write, read = os.pwrite, os.preadv

    def slow_write(*arguments):
        time.sleep(0.01)
        return write(*arguments)

    def slow_read(*arguments):
        time.sleep(0.01)
        return read(*arguments)

    monkeypatch.setattr(store_module.os, "pwrite", slow_write)
    monkeypatch.setattr(store_module.os, "preadv", slow_read)
    assert same(step(run, module, x), wanted)


def test_two_threads_train_with_one_store(small):
    module, x, _, run = small
    at(run, 3 * limit_of(run).bytes)
    wanted = torch.autograd.grad(begun(run, x), list(module.parameters()))
    at(run, limit_of(run).bytes * 2 // 3)
    wrong: list[object] = []
    done = []

    def train():
        for _ in range(10):
            with contextlib.suppress(LimitError):  # the other one may hold it
                found = torch.autograd.grad(begun(run, x), list(module.parameters()))
                done.append(True)
                if not same(found, wanted):
                    wrong.append(found)

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert done and not wrong and store_of(run).used == 0


def test_without_need_nothing_is_moved(tmp_path):
    module = nn.Linear(8, 8)
    run = compiled(module, tmp_path, 1 << 30)
    step(run, module, torch.randn(4, 8))
    assert store_of(run).moved == 0 and store_of(run).file is None


def test_settings_are_checked_before_anything_is_compiled(tmp_path):
    for settings in ({"memory_store": str(tmp_path / "nowhere")}, {"memory_store_limit": -5}):
        with pytest.raises(ConfigError) as caught:
            anyshape.compile(net(), memory_limit="1GB", **settings)(torch.ones(3, 32))
        assert caught.value.why and caught.value.do


def test_programs_of_one_folder_share_a_store(tmp_path):
    one, other = (compiled(net(), tmp_path, 1 << 30) for _ in range(2))
    for run in (one, other):
        step(run, net(), torch.randn(4, 32))
    assert store_of(one) is store_of(other)
    assert shared_context().stores.at(str(tmp_path), 0) is store_of(one)
