"""Kernels that follow each other run as one step of the host (backend/cpu/routines/parallel_region.py)."""
from __future__ import annotations

import gc

import pytest
import torch

import anyshape
from anyshape.backend.cpu.bytecode import format
from anyshape.base.errors import IndexRangeError
from anyshape.frontend.capture import frame_callback
from anyshape.frontend.capture.frame_callback import age_trace_garbage
from anyshape.plan.ir.program import KernelStep
from anyshape.runtime.inspect.touched_bytes import counted_peak
from anyshape_bench.measure import launch_count


def chained(x, y):
    """Sums over all rows between, so that there are several kernels, each of which needs all of the one before."""
    a = (x * 2 + y).softmax(0)
    b = (a - a.mean(0)).exp()
    return b / b.sum(0), (b.t() + x.t()).softmax(-1).amax(0)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_kernel_sees_what_the_ones_before_it_made(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fast = anyshape.compile(chained, strict=True)
        for rows, columns in ((60, 70), (700, 900), (3, 2), (1500, 40), (1, 3000), (40, 5000)):
            for _ in range(5):
                x, y = torch.randn(rows, columns), torch.randn(rows, columns)
                torch.testing.assert_close(fast(x, y), chained(x, y), rtol=2e-4, atol=2e-6)
        (first, last), = fast.programs[0].compiled.plan.together
        steps = fast.programs[0].compiled.plan.steps
        assert (first, last) == (0, len(steps) - 1) and len(steps) > 2
        assert all(isinstance(step, KernelStep) for step in steps)
    finally:
        torch.set_num_threads(before)


def test_the_host_gets_one_step():
    fast = anyshape.compile(chained, strict=True)
    x, y = torch.randn(60, 70), torch.randn(60, 70)
    fast(x, y)
    executable = fast.programs[0].compiled.executable
    (record,) = executable.specializations.values()
    at = record.payload.words[record.payload.words[format.HEAD_FIRST]:].tolist()
    length = format.SERIES_HEAD + at[format.SERIES_WORDS]
    assert at[0] == format.SERIES and at[length] == format.END
    assert counted_peak(executable.ran(record).plan, record) == record.arena
    found = launch_count.of_step("anyshape", fast, lambda: fast(x, y))
    apart = launch_count.of_step("anyshape", fast, lambda: fast(x, y), apart=True)
    kernels = sum(isinstance(step, KernelStep) for step in executable.plan.steps)
    assert found == {"kernels": 1, "products": 0, "calls": 0, "copies": 0}
    assert apart == {**found, "kernels": kernels}


@pytest.mark.parametrize("threads", [1, 3])
def test_nothing_is_written_after_a_check_that_fails(threads):
    def write(cache, table, places, x):
        found = table[places].cumsum(0)
        cache.index_put_((places,), found + x)
        return found.sum(1)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fast = anyshape.compile(write, strict=True)
        for rows in (600, 7):
            table, x = (torch.randint(-9, 9, (count, 300)).float() for count in (700, rows))
            places = torch.randperm(700)[:rows]
            caches = torch.zeros(700, 300), torch.zeros(700, 300)
            torch.testing.assert_close(fast(caches[0], table, places, x), write(caches[1], table, places, x))
            torch.testing.assert_close(*caches)
            places[rows // 2] = 700
            kept = caches[0].clone()
            with pytest.raises(IndexRangeError, match="out of range"):
                fast(caches[0], table, places, x)
            assert torch.equal(caches[0], kept)
            places[rows // 2] = 699
            fast(caches[0], table, places, x)
    finally:
        torch.set_num_threads(before)


def test_what_a_trace_leaves_is_old_for_the_garbage_collector(monkeypatch):
    """What is there when a trace ends goes to the oldest generation, from which nothing comes back."""
    old = []
    gc.unfreeze()  # what is frozen by others is left alone

    def looking():
        left = []  # as a trace leaves it
        age_trace_garbage()
        old.append(any(one is left for one in gc.get_objects(generation=2)))

    monkeypatch.setattr(frame_callback, "age_trace_garbage", looking)
    anyshape.compile(chained, strict=True)(torch.randn(3, 4), torch.randn(3, 4))
    assert old and all(old) and gc.get_freeze_count() == 0
    gc.freeze()  # as conftest.py has it
