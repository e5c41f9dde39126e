"""In which order the files of tests start: where a machine is so slow that the time for tests ends before the last one
(time_budget.py), what is left out should be what fails least.

First come programs against eager PyTorch, then what stands in for a GPU, parts of the compiler, and at the end what
runs for long and says little of a fault's place: documents, examples, demos, benchmarks, several processes. What stands
in for a GPU is all that says anything of one: it is never left out, and in CI none of it may be skipped.
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest

import time_budget

FIRST = """hostile models opinfo data edges fuzz frontend train_step written_attention attention half convolution limit
undefined_gradients symint_cache bounds run backend""".split()
WITHOUT_A_GPU = """triton fake_device fake_offload fake_offload_choice torch_device device_bench gpu_graphs
gemm_epilogue""".split()
EARLY = (*FIRST, *WITHOUT_A_GPU)
LAST = "bench demo deploy_examples dist_processes dist_wrapped examples docs".split()


def rank(file: str) -> int:
    """Of a file of tests by its name without `test_`: the lower, the earlier."""
    if file.startswith("bench_"):
        file = "bench"
    if file in LAST:
        return len(EARLY) + 1 + LAST.index(file)
    return next((at for at, start in enumerate(EARLY) if file == start or file.startswith(f"{start}_")), len(EARLY))


def stands_in_for_a_gpu(item: pytest.Item) -> bool:
    """Is a test one of those files?"""
    return item.path.stem.removeprefix("test_") in WITHOUT_A_GPU


def check_not_skipped(item: pytest.Item, report: Any) -> None:
    """In CI a test of these files that is skipped, as for want of Triton or a C++ compiler, has failed."""
    if report.skipped and stands_in_for_a_gpu(item) and time_budget.is_ci():
        report.outcome = "failed"
        report.longrepr = f"in CI no test may be skipped that stands in for a GPU: {report.longrepr}"


def of(items: Sequence[pytest.Item], processes: int) -> list[pytest.Item]:
    """The tests, file by file. pytest-xdist gives each process a stretch of them, all of one length, and moves the ends
    of slow ones later: the files are dealt to as many stretches, so that each begins with the most telling ones."""
    files = [(path.stem.removeprefix("test_"), list(tests)) for path, tests in groupby(items, lambda item: item.path)]
    stretches: list[list[pytest.Item]] = [[] for _ in range(processes)]
    for _, tests in sorted(files, key=lambda file: rank(file[0])):
        min(stretches, key=len).extend(tests)
    return [item for stretch in stretches for item in stretch]
