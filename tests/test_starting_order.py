"""The order in which files of tests start (starting_order.py)."""
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import starting_order

NAMES = ("cache", "docs", "hostile", "bench", "sym", "train_step_limit", "bench_memory", "models")


def test_each_process_begins_with_the_most_telling_files_and_ends_with_the_least(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting_order, "table", lambda: {"docs": 9.0, "bench": 2.0, "sym": 1.0, "models": 3.0})
    items: Any = [SimpleNamespace(path=Path(f"test_{name}.py"), number=number) for name in NAMES for number in range(3)]
    alone = starting_order.of(items, 1)
    assert [one.path.stem[5:] for one in alone[::3]] == [
        "hostile", "models", "train_step_limit", "cache", "sym", "bench", "bench_memory", "docs"]
    assert [one.number for one in alone] == [0, 1, 2] * len(NAMES)
    shared = starting_order.of(items, 2)
    assert [one.path.stem[5:] for one in shared[::3]] == [
        "docs", "hostile", "models", "train_step_limit", "cache", "sym", "bench", "bench_memory"]
    assert starting_order.lengths([f"tests/{one.path}::test_{one.number}" for one in shared], 2) == [3, 21]
    assert starting_order.lengths([f"tests/{one.path}::test_{one.number}" for one in alone], 1) == [24]


def test_measured_seconds_go_into_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seconds.json").write_text('{"old": 1.0, "gone": 2.0}')
    for name in ("old", "new"):
        (tmp_path / f"test_{name}.py").touch()
    monkeypatch.setattr(starting_order, "TABLE", tmp_path / "seconds.json")
    starting_order.write_table({"new": 1.23})
    assert starting_order.table() == {"new": 1.2, "old": 1.0}


def test_the_files_that_are_named_exist() -> None:
    here = Path(__file__).parent
    for name in (*starting_order.EARLY, *starting_order.LAST):
        assert (here / f"test_{name}.py").exists() or any(here.glob(f"test_{name}_*.py")), name


@pytest.mark.parametrize(("file", "ci", "outcome"), [
    ("triton", "true", "failed"), ("torch_device", "true", "failed"), ("triton", "", "skipped"),
    ("tensorflow", "true", "skipped")])
def test_what_stands_in_for_a_gpu_is_not_skipped_in_ci(file: str, ci: str, outcome: str,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", ci)
    item: Any = SimpleNamespace(path=Path(f"test_{file}.py"))
    report = SimpleNamespace(outcome="skipped", skipped=True, longrepr="no compiler is here")
    starting_order.check_not_skipped(item, report)
    assert report.outcome == outcome and "no compiler is here" in report.longrepr
