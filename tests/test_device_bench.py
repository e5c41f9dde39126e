"""The script of the day on which there is a GPU (benchmarks/device.py), on the fake driver: it runs, and its rows are
whole."""
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
