"""What is for the day on which there is a GPU, on the fake driver: the measurements (benchmarks/device.py) run, and
their rows are whole; the cases (tests/device_cases.py) pass."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def rows(tmp_path: Path, *parts: str) -> list[dict[str, object]]:
    out = tmp_path / "device.json"
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), *filter(None, sys.path)])
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "device.py"), *parts, "--dry", "--out", str(out)],
                          capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": paths})
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
    assert {row["part"] for row in rows(tmp_path, "bandwidth", "products", "models")} == {
        "bandwidth", "products", "models"}


def cases(device: str, *options: str) -> None:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), *filter(None, sys.path)])
    more = {"ANYSHAPE_TEST_DEVICE": device, "PYTHONPATH": paths} | (
        {"TRITON_INTERPRET": "1"} if device == "interpreted" else {})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options,
               str(ROOT / "tests" / "device_cases.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | more, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:]


def test_some_cases() -> None:
    cases("interpreted", "-k", "pad and float32")
    cases("fake", "-k", "concatenate or an_index or memory_limit or (test_train_step and False) or attention")


@pytest.mark.full
@pytest.mark.parametrize("device", ["fake", "interpreted"])
def test_all_cases(device: str) -> None:
    cases(device)
