"""In which order the files of tests start: where a machine is so slow that the time for tests ends before the last one
(time_budget.py), what is left out should be what fails least.

First come programs against eager PyTorch, then what stands in for a GPU, parts of the compiler, and at the end what
runs for long and says little of a fault's place: documents, examples, demos, benchmarks, several processes. What stands
in for a GPU is all that says anything of one: it is never left out, and in CI none of it may be skipped.

Several processes are dealt files by their seconds of processor time, which seconds.json has, so that they end together.
`pytest --seconds` measures the files that it runs and writes them there.
"""
from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import time_budget

FIRST = """hostile models opinfo data edges fuzz frontend train_step written_attention attention half convolution limit
undefined_gradients symint_cache bounds run backend""".split()
WITHOUT_A_GPU = """triton fake_device fake_offload fake_offload_choice torch_device device_bench gpu_graphs
gemm_epilogue""".split()
EARLY = (*FIRST, *WITHOUT_A_GPU)
LAST = "bench demo deploy_examples dist_processes dist_wrapped examples docs".split()
TABLE = Path(__file__).parent / "seconds.json"
USUAL = 0.1  # seconds of a test in a file that the table lacks


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


def dealt(counts: Mapping[str, int], processes: int, seconds: Mapping[str, float]) -> list[list[str]]:
    """The files of each process, in the order in which they start. counts: tests by file, without `test_`; seconds: by
    file, as far as they are known. Dealt from the last to the first: those that run for long are followed by many short
    ones, which make the sums alike."""
    stretches: list[list[str]] = [[] for _ in range(processes)]
    sums = [0.0] * processes
    for file in sorted(counts, key=lambda file: (rank(file), file), reverse=True):
        at = sums.index(min(sums))
        stretches[at].insert(0, file)
        sums[at] += seconds.get(file, USUAL * counts[file])
    return stretches


def table() -> dict[str, float]:
    """Seconds of processor time by file, without `test_`."""
    found: dict[str, float] = json.loads(TABLE.read_text("utf-8"))
    return found


def of(items: Sequence[pytest.Item], processes: int) -> list[pytest.Item]:
    """The tests, file by file, in the stretches of the processes, one after the other."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path.stem.removeprefix("test_"), []).append(item)
    stretches = dealt({file: len(tests) for file, tests in files.items()}, processes, table())
    return [item for stretch in stretches for file in stretch for item in files[file]]


def lengths(names: Sequence[str], processes: int) -> list[int]:
    """How many tests each stretch has of those that `of` has put in order, by the names that pytest gives them."""
    counts = Counter(Path(name.partition("::")[0]).stem.removeprefix("test_") for name in names)
    return [sum(counts[file] for file in stretch) for stretch in dealt(counts, processes, table())]


def write_table(measured: Mapping[str, float]) -> None:
    """Puts measured seconds by file, without `test_`, into the table; files that are no more go."""
    found = {file: round(seconds, 1) for file, seconds in {**table(), **measured}.items()
             if (TABLE.parent / f"test_{file}.py").exists()}
    TABLE.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n", encoding="utf-8")
