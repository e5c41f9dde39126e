"""Runs the quick tests with this interpreter's Python and PyTorch, and writes the row of these versions into
docs/versions.md: `python tests/versions.py`, from an environment of each version that is to be tried."""
from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "versions.md"
FILES = ("test_fast_dispatch", "test_frontend", "test_symint_cache", "test_run")


def outcome(name: str) -> str:
    """How many tests of a file passed and failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{name}.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    print(done.stdout[-2000:])
    last = (done.stdout.strip().splitlines() or [""])[-1]
    counts = {word: number for number, word in re.findall(r"(\d+) (passed|failed|error)", last)}
    return ", ".join(f"{counts[word]} {word}" for word in ("passed", "failed", "error") if word in counts) or "not run"


def main() -> None:
    torch = version("torch").split("+")[0]
    found = [platform.python_version(), torch, version("llvmlite"), *map(outcome, FILES)]
    row = f"| {' | '.join(found)} |"
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("|---")) + 1
    rows = [line for line in lines[start:] if not line.startswith(f"| {found[0]} | {torch} |")]
    PAGE.write_text("\n".join([*lines[:start], *sorted([*rows, row])]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
