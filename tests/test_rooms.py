"""Values that lie in the memory of a result until it is written, decided for each size (run/record.py)."""
from __future__ import annotations

import threading

import torch

from anyshape.plan.judge import judge
from anyshape.run.watch import watched
from comparing import differs
from roads import compilation_of, compiled

W, V, OUT = (torch.randn(64, n, generator=torch.Generator().manual_seed(n)) / 8 for n in (64, 64, 1000))


def two_lengths(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A long input, a short one that the result has the length of; a call of PyTorch between."""
    for _ in range(3):
        x = torch.tanh(x @ W)
    x = torch.cumsum(x, 0) + x
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
    # the result holds everything, a part, nothing worth it
    for s, t, room in ((500, 400, True), (3000, 300, True), (600, 7, False), (2, 5, False)):
        x, y = drawn(s, t)
        assert not differs(fast(x, y), two_lengths(x, y)), (s, t)
        (program,) = compilation_of(fast).programs[-1:]
        run = program.compiled.executable
        record = list(run.records.values())[-1]
        assert (record.room >= 0) == room, (s, t)
        judge(run.plan, record.values, record.offsets, record.kept + record.temporary, record.kept)
        assert run.counted_peak(record) == record.arena == run.maker.arena(record.values)
        hosted = [b for b in run.plan.buffers if record.offsets.get(b.name, record.kept) < record.kept]
        if room:
            result = run.maker.outputs[record.room]
            assert hosted and all(b.last < result.first for b in hosted)
            assert record.arena < 2 * x.nbytes


def test_a_program_without_calls_of_pytorch() -> None:
    fast = compiled(all_native)
    for s, t in ((5, 4), (500, 400), (3000, 300), (500, 400)):  # a small result is there from the start
        x, y = drawn(s, t)
        assert not differs(fast(x, y), all_native(x, y)), (s, t)
    run = compilation_of(fast).programs[0].compiled.executable
    assert [record.room for record in run.records.values()] == [-1, 0, 0]
    assert not any(record.calls for record in run.records.values())


def test_what_is_written_of_the_arena_is_counted() -> None:
    fast = compiled(two_lengths)
    fast(*drawn(500, 400))
    run = compilation_of(fast).programs[0].compiled.executable
    with watched(run) as seen:
        for s, t in ((500, 400), (3000, 300), (600, 7)):
            fast(*drawn(s, t))
    assert [one.counted for one in seen] == [one.record.arena for one in seen]
    assert len(seen) == 3


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
    assert all(record.room < 0 for program in compilation_of(fast).programs
               for record in program.compiled.executable.records.values())
