"""The FMA peak: how many operations of f32 a core does in a second if nothing holds it up, which bounds every product.

A loop of independent fused multiply-adds in registers, on all cores at once, as a busy server's calls are. Processor
time is taken, so that other work on the machine does not count.
"""
from __future__ import annotations

import ctypes
import subprocess
import sys
import time

from anyshape.backend.cpu.llvm.jit import load
from anyshape.backend.cpu.machine.target import host
from anyshape_bench.measure.statistics import median_of

SUMS = 24  # independent ones: more than the latency of an addition times the units of a core
TURNS, TRIPS = 30, 2_000_000


def text(lanes: int) -> str:
    """LLVM text of the loop: f(trips, numbers) adds to SUMS vectors of `lanes` numbers, which it writes back."""
    kind = f"<{lanes} x float>"
    places = range(SUMS)
    lines = ["define void @fma_peak(i64 %trips, ptr %numbers) {", "entry:",
             f"  %a = load {kind}, ptr %numbers, align 4", "  br label %loop", "loop:",
             "  %i = phi i64 [ 0, %entry ], [ %next, %loop ]"]
    lines += [f"  %s{k} = phi {kind} [ %a, %entry ], [ %t{k}, %loop ]" for k in places]
    lines += [f"  %t{k} = call {kind} @llvm.fma.v{lanes}f32({kind} %s{k}, {kind} %a, {kind} %a)" for k in places]
    lines += ["  %next = add i64 %i, 1", "  %more = icmp slt i64 %next, %trips",
              "  br i1 %more, label %loop, label %end", "end:"]
    lines += [line for k in places for line in (
        f"  %p{k} = getelementptr i8, ptr %numbers, i64 {4 * lanes * k}", f"  store {kind} %t{k}, ptr %p{k}, align 4")]
    return "\n".join([*lines, "  ret void", "}",
                      f"declare {kind} @llvm.fma.v{lanes}f32({kind}, {kind}, {kind})", ""])


def own_rate() -> float:
    """Operations a second of this thread, the median of turns; a multiply-add is two."""
    lanes = host().lanes
    routines = load(text(lanes), ["fma_peak"], host())
    run = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p)(routines.address["fma_peak"])
    numbers = (ctypes.c_float * (SUMS * lanes))()
    seconds = []
    for _ in range(TURNS):
        begin = time.thread_time()
        run(TRIPS, ctypes.addressof(numbers))
        seconds.append(time.thread_time() - begin)
    return 2 * lanes * SUMS * TRIPS / median_of(seconds)


def fma_peak(cores: int) -> float:
    """The same with so many processes at once: the median of theirs."""
    command = [sys.executable, "-m", "anyshape_bench.measure.fma_peak"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(cores)]
    return median_of(float(process.communicate()[0]) for process in processes)


if __name__ == "__main__":
    print(own_rate())
