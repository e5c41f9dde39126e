"""Runs tests with this interpreter's Python and PyTorch, and writes the row of these versions into docs/versions.md:

    python tests/versions.py                      the quick files below
    python tests/versions.py --all                every file, what is marked `full` included
    python tests/versions.py test_data test_fx    these files

from an environment of each version that is to be tried. Every file is a process of its own, so that one that crashes or
hangs costs its own tests only.
"""
from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "versions.md"
QUICK = ("test_fast_dispatch", "test_frontend", "test_symint_cache", "test_run")
LIMIT = 1800  # seconds for a file


def outcome(name: str, marked: str) -> Counter[str]:
    """How many tests of a file passed, failed and were skipped; "not ended" counts a file that gave no such line."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", marked,
               f"tests/{name}.py"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})
    except subprocess.TimeoutExpired:
        return Counter({"not ended": 1})
    print(name, done.stdout[-2000:], flush=True)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    found = {word.rstrip("s"): int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)",
                                                                        last)}
    return Counter(found or ({} if done.returncode == 5 else {"not ended": 1}))  # 5: no test of the file was chosen


def row_of(names: list[str], marked: str) -> list[str]:
    """The cells of a row: versions, how many files and tests, and the files with failures."""
    found = {name: outcome(name, marked) for name in names}
    every = sum(found.values(), Counter[str]())
    wrong = {name: sum(each[word] for word in ("failed", "error", "not ended")) for name, each in found.items()}
    told = ", ".join(f"{name.removeprefix('test_')} {count}" for name, count in wrong.items() if count) or "none"
    return [platform.python_version(), version("torch").split("+")[0], version("llvmlite"), str(len(names)),
            "yes" if "or" in marked else "no", str(every["passed"]), str(every["skipped"]), told]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--all", action="store_true")
    chosen = parser.parse_args()
    names = sorted(path.stem for path in ROOT.glob("tests/test_*.py")) if chosen.all else \
        [Path(name).stem for name in chosen.files] or list(QUICK)
    found = row_of(names, "full or not full" if chosen.all else "not full")
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("|---")) + 1
    rows = [line for line in lines[start:] if not line.startswith(f"| {found[0]} | {found[1]} |")]
    PAGE.write_text("\n".join([*lines[:start], *sorted([*rows, f"| {' | '.join(found)} |"])]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
