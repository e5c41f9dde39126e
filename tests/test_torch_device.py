"""The test accelerator's tests (accelerator_cases.py) in a process of their own: autograd's engine counts the devices
when it is first used, and an accelerator that is built later has no thread there."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import torch_device

pytestmark = pytest.mark.skipif(
    bool(torch_device.MISSING), reason=f"the accelerator is built by {torch_device.MISSING}, which is not here")


def passes(*options: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "python_files=accelerator_*.py",
         *options, "tests/accelerator_cases.py"], cwd=Path(__file__).parent.parent, capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=1800, stdin=subprocess.DEVNULL)
    last = done.stdout.strip().split("\n")[-1]
    assert done.returncode == 0 and "passed" in last and "skipped" not in last, done.stdout[-4000:] + done.stderr[-999:]


def test_on_the_accelerator() -> None:
    passes()


@pytest.mark.full
def test_all_on_the_accelerator() -> None:
    passes("-m", "full or not full")
