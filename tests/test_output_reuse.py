"""Values that lie in the memory of a result until it is written, decided for each size
(runtime/specialize/specialization.py)."""
from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from anyshape.backend.cpu.bytecode import format as host
from anyshape.plan.verify import judge
from anyshape.runtime.call.executable import Executable
from anyshape.runtime.inspect.touched_bytes import counted_peak
from anyshape.runtime.inspect.watermark import watched
from anyshape.runtime.memory.pools import PAGE, Block
from anyshape.runtime.specialize.specialization import Specialization
from comparing import differs
from roads import compilation_of, compiled

W, V, OUT = (torch.randn(64, n, generator=torch.Generator().manual_seed(n)) / 8 for n in (64, 64, 1000))


def two_lengths(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A long input, a short one that the result has the length of; a call of PyTorch between."""
    for _ in range(3):
        x = torch.tanh(x @ W)
    x = torch.logcumsumexp(x, 0) + x
    y = torch.sin(y @ V) * (x @ V).amax(0)
    return y @ OUT


def all_native(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = torch.tanh(x @ W)
    return torch.sin(y @ V) * (x @ V).amax(0) @ OUT


def drawn(s: int, t: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(s * 1000 + t)
    return torch.randn(s, 64, generator=generator), torch.randn(t, 64, generator=generator)


def test_the_arena_is_in_the_result_where_it_fits() -> None:
    fast = compiled(two_lengths, check=1)
    # the result holds everything; it is better taken late, beside what PyTorch made; nothing is worth it
    for s, t, room, given in ((250, 400, True, False), (500, 400, False, True), (3000, 300, False, True),
                              (600, 7, False, False), (2, 5, False, False)):
        x, y = drawn(s, t)
        assert not differs(fast(x, y), two_lengths(x, y)), (s, t)
        (program,) = compilation_of(fast).programs[-1:]
        run = program.compiled.executable
        record = list(run.specializations.values())[-1]
        assert (record.reused_output >= 0, record.given >= 0) == (room, given), (s, t)
        judge(run.plan, record.values, record.offsets, record.kept + record.temporary, record.kept)
        assert counted_peak(run.ran(record).plan, record) == record.arena == run.specializer.arena(record.values)
        hosted = [b for b in run.plan.buffers if record.offsets.get(b.name, record.kept) < record.kept]
        if room:
            result = run.specializer.outputs[record.reused_output]
            assert hosted and all(b.last < result.first for b in hosted)
            assert record.arena < 2 * x.nbytes
        if given:
            assert hosted and all(b.last < record.given for b in hosted)


def test_the_lower_block_is_gone_when_the_result_is_taken() -> None:
    fast = compiled(two_lengths)
    x, y = drawn(3000, 300)
    wanted = two_lengths(x, y)
    assert not differs(fast(x, y), wanted)
    run = compilation_of(fast).programs[-1].compiled.executable
    (record,) = run.specializations.values()
    assert record.given >= 0
    pool, allocate, held = run.context.kept, run.calls.allocate, []

    def allocated(*args: object) -> torch.Tensor:
        held.append(pool.held)
        return allocate(*args)
    idle, run.calls.allocate = pool.held, allocated
    before, fresh = pool.takes, pool.fresh

    def taken(bytes_: int) -> Block:
        block = fresh(bytes_)
        held.append(pool.held)
        return block
    try:
        pool.fresh = taken
        assert not differs(fast(x, y), wanted)
    finally:
        run.calls.allocate = allocate
        del pool.fresh
    assert held == [idle + -(-record.kept // PAGE) * PAGE, idle] and pool.held == idle and pool.takes == before


def test_an_arena_without_all_sizes_is_not_known() -> None:
    """Also where a size is only that of a tensor of PyTorch, beside which the arena has to lie."""
    def step(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return two_lengths(x, y) + torch.logcumsumexp(z, 0).amax()
    fast = compiled(step)
    given = (*drawn(500, 400), torch.randn(3001))
    assert not differs(fast(*given), step(*given))
    run = compilation_of(fast).programs[0].compiled.executable
    (record,) = run.specializations.values()
    assert run.specializer.arena(record.values) == record.arena
    assert 3001 in record.values.values()
    for name, value in record.values.items():
        found = run.specializer.arena({known: size for known, size in record.values.items() if known != name})
        assert found is None if value in (500, 400, 3001) else found in (None, record.arena)


def test_a_program_without_calls_of_pytorch() -> None:
    fast = compiled(all_native)
    for s, t in ((5, 4), (500, 400), (3000, 300), (500, 400)):  # a small result is there from the start
        x, y = drawn(s, t)
        assert not differs(fast(x, y), all_native(x, y)), (s, t)
    run = compilation_of(fast).programs[0].compiled.executable
    assert [record.reused_output for record in run.specializations.values()] == [-1, 0, 0]
    assert not any(record.payload.calls for record in run.specializations.values())


def test_what_is_written_of_the_arena_is_counted() -> None:
    fast = compiled(two_lengths)
    fast(*drawn(500, 400))
    run = compilation_of(fast).programs[0].compiled.executable
    with watched(run) as seen:
        for s, t in ((250, 400), (500, 400), (3000, 300), (600, 7)):
            fast(*drawn(s, t))
    assert [one.counted for one in seen] == [one.record.arena for one in seen]
    assert [(one.record.reused_output >= 0, one.record.given >= 0) for one in seen] == [
        (True, False), (False, True), (False, True), (False, False)]


def test_results_of_several_calls_and_threads_are_apart() -> None:
    fast = compiled(two_lengths)
    calls = [drawn(400 + i, 300 + i) for i in range(6)]
    fast(*calls[0])
    found: dict[int, list[torch.Tensor]] = {}

    def run(which: int) -> None:
        found[which] = [fast(*given) for given in calls]
    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = [two_lengths(*given) for given in calls]
    assert len(found) == 3
    assert not any(differs(*pair) for results in found.values() for pair in zip(results, wanted, strict=True))


def test_training_keeps_its_blocks() -> None:
    fast = compiled(two_lengths)
    x, y = (z.requires_grad_() for z in drawn(500, 400))
    p, q = (z.detach().clone().requires_grad_() for z in (x, y))
    fast(x, y).sin().mean().backward()
    two_lengths(p, q).sin().mean().backward()
    assert not differs(x.grad, p.grad) and not differs(y.grad, q.grad)
    assert all(record.reused_output < 0 for program in compilation_of(fast).programs
               for record in program.compiled.executable.specializations.values())


# --- scratch, and products that pack their rows over themselves


def ops_of(record: Specialization) -> list[int]:
    found, at = [], record.payload.words[host.HEAD_FIRST]
    while record.payload.words[at] != host.END:
        found.append(record.payload.words[at])
        at += record.payload.words[at + 1]
    return found


def blocks_of(run: Executable, call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """The result of a call, and the bytes of all blocks that it asked for."""
    with watched(run) as seen:
        context, asked = run.context, []
        for pool in (context.kept, context.temporary):
            for name in ("take", "fresh"):
                def taken(bytes_: int, way: Callable[[int], Block] = getattr(pool, name)) -> Block:
                    asked.append(bytes_)
                    return way(bytes_)
                setattr(pool, name, taken)
        result = call()
    assert [one.counted for one in seen] == [one.record.arena for one in seen]
    return result, asked


@pytest.mark.parametrize("calls", [False, True])
def test_products_pack_their_rows_over_themselves(calls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last product needs no scratch, so that the others' may go with the lower block; any number of rows and
    columns, of blocks of k, and of threads."""
    generator = torch.Generator().manual_seed(5)

    def step(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ v) @ v
        if calls:
            h = torch.tanh(torch.logcumsumexp(h, 0)) @ v
        return torch.sin(h @ v) @ w.t()
    threads = torch.get_num_threads()
    try:
        for many in (1, 3):
            torch.set_num_threads(many)
            fast = compiled(step, products="own")
            for rows, inner, columns in ((300, 160, 1000), (301, 144, 1023), (418, 1024, 2100), (303, 272, 4097)):
                x, v, w = (torch.randn(*size, generator=generator) / inner**0.5
                           for size in ((rows, inner), (inner, inner), (columns, inner)))
                wanted = step(x, v, w)
                assert not differs(fast(x, v, w), wanted), (rows, inner, columns)
                run = compilation_of(fast).programs[-1].compiled.executable
                record = list(run.specializations.values())[-1]
                assert record.scratch > 0 and (record.reused_output >= 0 or (calls and record.given >= 0))
                if host.PRODUCT not in ops_of(record)[:-1]:
                    continue  # by PyTorch on this processor
                assert ops_of(record)[-1] == host.OVER and ops_of(record).count(host.OVER) == 1
                assert record.spare > 0
                found, asked = blocks_of(run, lambda: fast(x, v, w))  # noqa: B023
                assert not differs(found, wanted)
                scratch = record.scratch * many
                if record.given >= 0:
                    assert asked == [record.kept + scratch, record.temporary]
                else:
                    assert asked == ([record.temporary] if scratch <= record.spare else [scratch, record.temporary])
    finally:
        torch.set_num_threads(threads)


def test_rows_that_are_read_again_are_not_packed_over(monkeypatch: pytest.MonkeyPatch) -> None:

    def step(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.sin(torch.tanh(torch.tanh(x @ v) @ v) @ v)
        return h @ w.t(), (h @ v[:, :1]).amax(0)
    fast = compiled(step, products="own")
    x, v, w = torch.randn(300, 160), torch.randn(160, 160) / 8, torch.randn(1000, 160) / 8
    for one, other in zip(fast(x, v, w), step(x, v, w), strict=True):
        assert not differs(one, other)
    run = compilation_of(fast).programs[-1].compiled.executable
    (record,) = run.specializations.values()
    assert record.reused_output >= 0 and record.spare == 0 and host.OVER not in ops_of(record)
