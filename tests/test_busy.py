"""Several threads on a machine whose cores others use: one thread goes on by itself, with the same numbers."""
from __future__ import annotations

import ctypes
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import anyshape
from anyshape.backend.cpu.bytecode import format as host
from anyshape.runtime.context.process_context import shared_context

THREADS = 4  # more than most machines have idle


@pytest.fixture(autouse=True)
def threads():
    before, load = torch.get_num_threads(), shared_context().host.load
    torch.set_num_threads(THREADS)
    for i in range(len(load)):
        load[i] = 0
    yield
    for i in range(len(load)):
        load[i] = 0
    torch.set_num_threads(before)


class Net(nn.Module):
    def __init__(self, width: int = 128, count: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2 * count))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = self.norm(x + second(torch.relu(first(x)))).cumsum(0).tanh()
        return x


def now() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def test_while_the_machine_is_busy_calls_use_one_thread_and_give_the_same() -> None:
    net, x = Net(), torch.randn(300, 128)
    fast = anyshape.compile(net, strict=True, products="own")
    load = shared_context().host.load
    with torch.no_grad():
        torch.set_num_threads(1)
        wanted = fast(x)
        torch.set_num_threads(THREADS)
        assert torch.equal(fast(x), wanted)
        load[0] = now() + 10**12
        context = shared_context()
        seen = []
        parallel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(lambda *_: seen.append(1))
        run = fast.programs[0].executable
        entry = host.Functions.index("gomp_parallel")
        kept = run.runner.functions[entry]
        run.runner.functions[entry] = ctypes.cast(parallel, ctypes.c_void_p).value or 0
        try:
            assert torch.equal(fast(x), wanted) and not seen  # no region is begun
        finally:
            run.runner.functions[entry] = kept
        load[0] = now() - 1
        assert torch.equal(fast(x), wanted)
        assert load[0] == 0 or load[0] > now() - 10**9  # all threads again, until waiting is in vain again
        assert context.host.load is load


def test_numbers_do_not_depend_on_where_the_others_are_left_behind() -> None:
    """Beside processes that want every core: whatever region a call goes on alone from."""
    net, x = Net(count=4), torch.randn(200, 128)
    fast = anyshape.compile(net, strict=True, products="own")
    with torch.no_grad():
        torch.set_num_threads(1)
        wanted = fast(x)
        torch.set_num_threads(THREADS)
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
        try:
            for _ in range(20):
                shared_context().host.load[0] = 0
                assert torch.equal(fast(x), wanted)
        finally:
            for one in others:
                one.kill()
                one.wait()


@pytest.mark.full
@pytest.mark.parametrize("neighbours", [1, 2])
def test_a_call_beside_busy_neighbours_takes_not_much_longer(neighbours: int) -> None:
    """Processor shares alone allow a factor of 3 with two neighbours on two cores; it was 300."""
    net, x = Net(), torch.randn(64, 128)
    fast = anyshape.compile(net, strict=True)

    def median() -> float:
        times = []
        for _ in range(61):
            begin = now()
            fast(x)
            times.append(now() - begin)
        return sorted(times)[30]

    with torch.no_grad():
        for _ in range(5):
            fast(x)
        torch.set_num_threads(2)
        quiet = median()
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(neighbours)]
        try:
            time.sleep(0.5)
            assert median() < 2.5 * quiet + 1e6
        finally:
            for one in others:
                one.kill()
                one.wait()
