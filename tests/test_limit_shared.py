"""Programs that share a limit, and forwards in flight: what a tape keeps becomes less when a later call needs room."""
from __future__ import annotations

import contextlib
import gc
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anyshape
from anyshape.base.errors import LimitError
from anyshape.runtime.budget import arbitration
from anyshape.runtime.context.process_context import shared_context
from anyshape.runtime.memory.pools import Pool, SegmentedBlock
from anyshape.runtime.specialize.saved_policy import SAVE_ALL, SavePolicy
from limits import NO_LIMIT, counted, net, same, step

pytestmark = [pytest.mark.unguarded, pytest.mark.usefixtures("quick_collections")]


class Broken(nn.Module):
    """Two programs, for between them is what cannot be traced."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.first, self.second = net(count=count), net(1, count=count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


class Mixed(nn.Module):
    """Tensors of PyTorch, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cut = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for cut in self.cut:
            x = x + F.dropout(torch.tanh(cut(x)) * torch.sin(x), 0.2)
        return x


def limits(run) -> list[Any]:
    """Of the forwards, in the order of their calls."""
    found = [getattr(p, "executable", p) for p in run.programs if "forward" in p.name]
    return [program.limit for program in found]


def move(run, bytes_: int) -> None:
    """Another limit for all of them, as if they had never run."""
    for limit in limits(run):
        limit.move(bytes_)
        limit.alone = None


def met(run, x: torch.Tensor) -> list[tuple[Any, dict[str, int]]]:
    """The limits of the forwards that have met an input, and its sizes; before somebody moves them."""
    return [(limit, dict(record.values)) for limit in limits(run) for record in limit.program.specializations.values()
            if any(view and view[0] == tuple(x.shape) for view in record.inputs)]


def least_kept(limit, values: dict[str, int]) -> int:
    policy = limit.program.limit.lowest(values, False)
    record = limit.program.specializer.made(values, policy)
    return record.kept + record.outside


@contextlib.contextmanager
def moves():
    """A list that receives the moves of tapes."""
    found: list[Any] = []
    run = arbitration._Move.run

    def noted(one):
        found.append(one)
        run(one)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arbitration._Move, "run", noted)
        yield found


@pytest.fixture(scope="module")
def broken():
    module = Broken()
    run = anyshape.compile(module, memory_limit=NO_LIMIT)
    wanted = {}
    for rows in (701, 1, 0, 350):
        x = torch.randn(rows, 32)
        wanted[rows] = x, step(run, module, x)
    return module, run, wanted, met(run, wanted[701][0])


@pytest.fixture(scope="module")
def single():
    module = net(count=4)
    run = anyshape.compile(module, memory_limit=NO_LIMIT, strict=True)
    xs = [torch.randn(rows, 32, requires_grad=True) for rows in (701, 1, 353, 0, 7, 600)]
    for x in xs:
        run(x).square().sum().backward()
    return list(module.parameters()), run, xs, [met(run, x)[0] for x in xs]


def needs(programs) -> tuple[int, int]:
    """What both programs of `broken` take with everything kept, and at least."""
    (first, values), (second, more) = programs
    kept = first.program.specializer.made(values).kept
    return kept + second.needed(more, SAVE_ALL), least_kept(first, values) + second.least(more)


def test_a_graph_break_trains_under_a_limit(broken, monkeypatch):
    """Not one bit differs, and what is counted fits; without it the second program would be refused."""
    module, run, wanted, programs = broken
    x, results = wanted[701]
    most_needed, least = needs(programs)
    assert least < 0.5 * most_needed
    moved = 0
    for bytes_ in (*range(most_needed, least, (least - most_needed) // 5), least):
        move(run, bytes_)
        with counted() as most, moves() as made:
            assert same(step(run, module, x), results)
            assert most[0] <= bytes_
            first = len(made)
            assert same(step(run, module, x), results)
            assert len(made) == first, "the next step keeps no more than what fits"
        assert most[0] <= bytes_ and not programs[0][0].held.bytes
        moved += bool(first)
        for rows in (1, 0, 350):
            found = step(run, module, wanted[rows][0])
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, wanted[rows][1], strict=True))
    assert moved >= 3
    monkeypatch.setattr("anyshape.runtime.budget.arbitration.make_room", lambda limit, values,
                        room: limit.choose(values, room))
    move(run, (most_needed + least) // 2)
    with pytest.raises(LimitError):
        step(run, module, x)


def test_the_least_limit_is_named_and_works(broken):
    module, run, wanted, programs = broken
    x, results = wanted[701]
    move(run, needs(programs)[1] - 1)
    with pytest.raises(LimitError, match="cannot run within") as caught:
        step(run, module, x)
    assert "kept for backwards that have not run" in caught.value.why
    named = int(caught.value.do.split()[3])
    del caught  # it holds what was in flight
    move(run, named)
    with counted() as most:
        assert same(step(run, module, x), results)
    assert most[0] <= named
    move(run, named - 4096)
    with pytest.raises(LimitError):
        step(run, module, x)


@pytest.mark.parametrize("order", ("sum", "last first", "first first"))
def test_micro_batches_in_flight(single, order):
    parameters, run, xs, programs = single
    move(run, NO_LIMIT)

    def train(fast):
        losses = [fast(x).square().sum() for x in xs]
        if order == "sum":
            return torch.autograd.grad(sum(losses), parameters)
        ordered = losses[::-1] if order == "last first" else losses
        del losses
        return [g for loss in ordered for g in torch.autograd.grad(loss, parameters)]

    wanted = train(run)
    limit = programs[0][0]
    kept = [limit.program.specializer.made(values).kept for limit, values in programs]
    low = [least_kept(*one) for one in programs]
    full = max(sum(kept[:i]) + limit.needed(values, SAVE_ALL) for i, (limit, values) in enumerate(programs))
    least = max(sum(low[:i]) + limit.least(values) for i, (limit, values) in enumerate(programs))
    if order == "first first":  # the others wait in each backward
        least = max(least, max(sum(low) - low[i] + limit.least(values) for i, (limit, values) in enumerate(programs)))
    assert least < 0.65 * full
    for bytes_ in (full * 3 // 4, (full + least) // 2, least + 8192 * len(xs)):
        move(run, bytes_)
        limit.alone = False
        for _ in range(2):
            with counted() as most, moves() as made:
                assert same(train(run), wanted)
            assert most[0] <= bytes_ and limit.held.bytes == 0
        assert any(one.new.policy.dropped for one in made) or limit.learnt


def test_a_backward_that_would_not_fit_is_refused_before_it_runs(single):
    """Not the tape of the last forward first, while that waits."""
    parameters, run, xs, programs = single
    limit, values = programs[0]
    move(run, NO_LIMIT)
    wanted = torch.autograd.grad(run(xs[0]).square().sum(), parameters)
    move(run, limit.least(values) + least_kept(limit, values) // 2)
    first = run(xs[0]).square().sum()
    second = run(xs[4]).square().sum()  # small
    third = torch.autograd.grad(second, parameters, retain_graph=True)
    limit.bytes = limit.needed(values, SAVE_ALL) // 4
    with pytest.raises(LimitError, match="the backward of") as caught:
        torch.autograd.grad(first, parameters, retain_graph=True)
    limit.bytes = int(caught.value.do.split()[3])
    del caught
    with counted() as most:
        assert same(torch.autograd.grad(first, parameters), wanted)
        assert same(torch.autograd.grad(second, parameters), third)
    assert most[0] <= limit.bytes


def test_what_is_held_is_what_is_counted(single):
    _, run, xs, programs = single
    (limit, values), x = programs[0], xs[0]
    kept = limit.program.specializer.made(values).kept
    move(run, limit.needed(values, SAVE_ALL) + kept)
    limit.alone = False
    pool = shared_context().kept
    with counted(), moves() as made:
        losses = []
        for _ in range(4):
            losses.append(run(x).square().sum())
            assert limit.held.bytes == pool.held - pool.idle_after(0)
        assert made and limit.held.bytes <= 2.2 * kept
        assert any(isinstance(tape_memory.block, SegmentedBlock) for tape_memory in limit.held.tapes)
        made.clear()
        del losses[1]
        gc.collect()
        assert len(limit.held.tapes) == 3
        sum(losses).backward()
    assert limit.held.bytes == 0 and pool.held == pool.idle_after(0)


@pytest.mark.parametrize("when", ("before", "between"))
def test_a_tape_may_go_while_it_drops_more(single, monkeypatch, when):
    """Another thread, or the collector of garbage, may release it at any time: its block is given back once."""
    parameters, run, xs, programs = single
    (limit, values), x = programs[0], xs[0]
    move(run, NO_LIMIT)
    wanted = torch.autograd.grad(run(x).square().sum(), parameters)
    move(run, limit.needed(values, SAVE_ALL) + least_kept(limit, values))
    limit.alone = False
    pool, done = shared_context().kept, arbitration._Move.run

    def going(one):
        fresh = Pool.fresh

        def released(*arguments):
            one.tape.release()
            return fresh(*arguments)

        if when == "before":
            one.tape.release()
        with pytest.MonkeyPatch.context() as patch:
            if when == "between":
                patch.setattr(Pool, "fresh", released)
            done(one)

    with moves() as made:
        monkeypatch.setattr(arbitration._Move, "run", lambda one: (made.append(one), going(one)))
        first = run(x).square().sum()
        second = run(x).square().sum()
        monkeypatch.undo()
    assert made and all(one.tape.released and not one.tape_memory.block.bytes for one in made)
    assert len({id(block) for block in pool.free}) == len(pool.free)
    assert same(torch.autograd.grad(second, parameters), wanted)
    del first
    made.clear()
    gc.collect()
    assert limit.held.bytes == 0 and pool.held == pool.idle_after(0)


def test_it_forgets_what_nobody_needs(single):
    _, run, xs, programs = single
    limit, values = programs[0]
    move(run, limit.needed(values, SAVE_ALL) + limit.program.specializer.made(values).kept // 2)
    sum(run(xs[0]).square().sum() for _ in range(3)).backward()
    assert limit.learnt
    run(xs[0]).square().sum().backward()
    assert (0, arbitration.key_of(values)) not in limit.learnt
    loss = run(xs[0]).square().sum()
    assert limit.held.tapes[0].record.policy.dropped == frozenset()
    loss.backward()


def test_a_tape_that_is_kept_for_another_backward_stays(single):
    parameters, run, xs, programs = single
    (limit, values), x = programs[0], xs[0]
    move(run, NO_LIMIT)
    wanted = torch.autograd.grad(run(x).square().sum(), parameters)
    move(run, limit.needed(values, SAVE_ALL) + least_kept(limit, values))
    loss = run(x).square().sum()
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    tape_memory, = limit.held.tapes
    record = tape_memory.record
    with contextlib.suppress(LimitError):
        for _ in range(3):
            other = run(x).square().sum()
            assert tape_memory.record is record
        del other
    second = torch.autograd.grad(loss, parameters)
    assert same(first, wanted) and same(second, wanted)


@pytest.mark.parametrize("number", (1, 3))
def test_chunks_of_nothing_and_of_one_row_are_kept_for_another_backward(single, number):
    parameters, run, xs, programs = single
    limit, values = programs[number]
    move(run, NO_LIMIT)
    wanted = torch.autograd.grad(run(xs[number]).square().sum(), parameters)
    limit.learnt[0, arbitration.key_of(values)] = SavePolicy(frozenset(limit.problem.names), apart=True)
    loss = run(xs[number]).square().sum()
    assert isinstance(limit.held.tapes[0].block, SegmentedBlock)
    for again in (True, False):
        assert same(torch.autograd.grad(loss, parameters, retain_graph=again), wanted)


def test_tensors_of_pytorch_go_too():
    module = Mixed()
    parameters = list(module.parameters())
    run = anyshape.compile(module, memory_limit=NO_LIMIT, strict=True)
    xs = [torch.randn(2, 4, 23, 17 + i) for i in range(3)]

    def train():
        torch.manual_seed(7)
        return torch.autograd.grad(sum(run(x).square().sum() for x in xs), parameters)

    wanted = train()
    assert same(train(), wanted)
    programs = [met(run, x)[0] for x in xs]
    limit = programs[0][0]
    records = [limit.program.specializer.made(values) for limit, values in programs]
    assert all(record.outside for record in records)
    move(run, sum(record.kept + record.outside for record in records[:2]) * 3 // 4
         + limit.needed(programs[2][1], SAVE_ALL))
    outside = {b.name for b in limit.program.specializer.keeps.outside}
    with moves() as made:
        assert same(train(), wanted) and same(train(), wanted)
    assert any(outside & one.new.policy.dropped for one in made) and limit.held.bytes == 0


def test_ctrl_c_while_a_tape_changes(broken, monkeypatch):
    """It waits until the tape is the new one; what was in flight can go on."""
    module, run, wanted, programs = broken
    x, results = wanted[701]
    most_needed, least = needs(programs)
    join, move_on, seen, waited = threading.Thread.join, arbitration._Move.run, [], threading.Event()

    def interrupted(thread, timeout=None):
        if not seen and thread.name == "anyshape tape":
            seen.append(thread)
            waited.set()
            raise KeyboardInterrupt
        join(thread, timeout)

    def when_waited_for(one):
        waited.wait(60)  # else it may be done before anybody waits, and there is nothing to interrupt
        move_on(one)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    monkeypatch.setattr(arbitration._Move, "run", when_waited_for)
    for bytes_ in range(least, most_needed, (most_needed - least) // 8):
        move(run, bytes_)
        with contextlib.suppress(KeyboardInterrupt):
            run(x.clone().requires_grad_())
            continue
        break
    assert seen and not seen[0].is_alive()
    monkeypatch.undo()
    gc.collect()
    assert programs[0][0].held.bytes == 0
    with counted() as most:
        assert same(step(run, module, x), results)
    assert most[0] <= bytes_


def test_threads_share_a_limit(single):
    """Tapes of one wait while the other's calls make them drop more."""
    parameters, run, xs, programs = single
    limit, values = programs[0]
    move(run, NO_LIMIT)
    wanted = torch.autograd.grad(sum(run(x).square().sum() for x in xs[:3]), parameters)
    move(run, 2 * limit.needed(values, SAVE_ALL))
    limit.alone = False
    wrong: list[object] = []
    done: list[int] = []

    def train():
        for _ in range(12):
            with contextlib.suppress(LimitError):  # the other one's backward may hold it
                found = torch.autograd.grad(sum(run(x).square().sum() for x in xs[:3]), parameters)
                done.append(1)
                if not same(found, wanted):
                    wrong.append(found)

    with moves() as made:
        threads = [threading.Thread(target=train) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    moved = len(made)
    made.clear()  # they hold tapes, of steps that were refused too
    gc.collect()
    assert not wrong and len(done) > 6 and moved and limit.held.bytes == 0
