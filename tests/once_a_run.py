"""What is made once in a run of the tests, though pytest-xdist may give the tests that need it to several processes: a
process that runs out of tests takes half of another's, and so half of a file."""
from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from typing import Any

import pytest


def made(factory: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """What `make` returns, as JSON has it: called by the first process of the run that asks for `name`; others wait."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return make()
    path = factory.getbasetemp().parent / f"{name}.json"  # the folder of the run, in which each process has its own
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(json.dumps(make()), encoding="utf-8")
    return json.loads(path.read_text("utf-8"))
