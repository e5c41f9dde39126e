"""What is for the day on which there is a GPU, on the fake driver: the measurements (benchmarks/device.py) run, and
their rows are whole; the cases (tests/device_cases.py) pass."""
from __future__ import annotations

import importlib.util
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

import forked

ROOT = Path(__file__).parent.parent


def rows(tmp_path: Path, *parts: str) -> list[dict[str, object]]:
    out = tmp_path / "device.json"
    done = forked.Run(ROOT / "benchmarks" / "device.py", [*parts, "--dry", "--out", str(out)], os.environ,
                      tmp_path).done(1800)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["dry"] and found["predictions"] and found["torch"]
    result: list[dict[str, object]] = found["rows"]
    return result


def test_a_dry_run(tmp_path: Path) -> None:
    launch, *limits = rows(tmp_path, "launch", "limits")
    assert launch["launches"] == 61 and 0 < float(str(launch["ns_a_launch"])) < 1000
    assert [row["name"] for row in limits] == ["100%", "75%", "50%", "0%"]
    assert all(int(str(row["counted"])) <= int(str(row["bytes"])) for row in limits) and limits[-1]["moved"]


@pytest.mark.full
def test_every_part(tmp_path: Path) -> None:
    parts = "bandwidth", "products", "models", "paper"
    found = rows(tmp_path, *parts)
    assert {row["part"] for row in found} == set(parts) and not any(row["name"] == "failed" for row in found)


def test_a_part_that_fails_leaves_time_to_the_others(tmp_path: Path) -> None:
    found = importlib.util.spec_from_file_location("device_bench", ROOT / "benchmarks" / "device.py")
    assert found is not None and found.loader is not None
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    assert list(script.PARTS)[:3] == ["models", "paper", "limits"]  # what no device has measured
    bench = script.Bench.__new__(script.Bench)
    bench.rows, bench.about, bench.out, bench.end = [], {}, tmp_path / "device.json", time.monotonic() + 100
    left = []

    def fails(bench: Any) -> None:
        left.append(bench.end - time.monotonic())
        raise ValueError("no such kernel")

    script.PARTS.update(models=fails, launch=fails)
    assert script.measure(bench, ["models", "launch"]) == 2
    assert left[0] == pytest.approx(50, abs=5) and left[1] == pytest.approx(100, abs=5)
    rows = json.loads(bench.out.read_text())["rows"]
    assert [(row["part"], row["name"]) for row in rows] == [("models", "failed"), ("launch", "failed")]
    assert "no such kernel" in rows[0]["error"] and "fails" in rows[0]["trace"]


def cases(device: str, *options: str) -> None:
    more = {"ANYSHAPE_TEST_DEVICE": device} | ({"TRITON_INTERPRET": "1"} if device == "interpreted" else {})
    done = forked.run_tests([*options, "tests/device_cases.py"], **more)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-999:]


def test_some_cases() -> None:
    cases("interpreted", "-k", "pad and float32")
    cases("fake", "-k", "concatenate or an_index or memory_limit or (test_train_step and False) or attention")


@pytest.mark.full
@pytest.mark.parametrize("device", ["fake", "interpreted"])
def test_all_cases(device: str) -> None:
    cases(device)
