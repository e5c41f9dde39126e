"""Runs files of tests with this interpreter's Python and PyTorch, keeps what came out of each in docs/results/versions,
and writes docs/versions.md from all that is kept:

    python tests/versions.py                      every file that has no result with these versions yet
    python tests/versions.py test_data test_fx    these files, also once more
    python tests/versions.py --full ...           what is marked `full` as well
    python tests/versions.py --show               only writes the page

from an environment of each version that is to be tried; a run that is ended leaves the results of the files before.
Every file is a process of its own, so that one that crashes or hangs costs its own tests only. A result is that of a
whole file at one commit: nothing is added up of several runs.
"""
from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import platform
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "versions.md"
KEPT = ROOT / "docs" / "results" / "versions"
PACKAGES = ("torch", "llvmlite", "numpy", "triton", "transformers", "onnx", "jax")
LIMIT = 1800  # seconds for a file
_FOLDERS = re.compile(r"(?<![\w.])/\S*/(?=\w)")  # of a path of this machine
INTRODUCTION = """# Versions that the tests were run with

Written by `python tests/versions.py` from `docs/results/versions`, which has a result for each file of tests and pair
of versions: the last run of the whole file, in a process of its own, with one thread. `*` at a commit: with changes
that were not committed. The whole suite runs with Python 3.11 and PyTorch 2.13 in `.ci/run`; a file was not run with
versions whose cell is empty. Tests marked `full` were left out, unless it says `full`. `torch` among the packages names
the build, such as `+cu130` for CUDA, run on a machine without a GPU.
"""


@dataclass(frozen=True, slots=True)
class Failure:
    """A test that failed, and the first line of what was said."""
    test: str
    said: str


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one file of tests.

    Args:
        commit: what was checked out; with `*` behind it where files were changed.
        packages: versions, by name; without those that are not installed.
        full: whether tests marked `full` ran too.
        ended: how the process ended where it wrote no report: "1800 s", or "status -11"; else empty.
    """
    file: str
    python: str
    packages: dict[str, str]
    commit: str
    date: str
    full: bool
    seconds: int
    passed: int
    skipped: int
    failed: tuple[Failure, ...]
    ended: str = ""

    @property
    def versions(self) -> tuple[str, str]:
        return self.python, self.packages["torch"].split("+")[0]


def load(folder: Path) -> list[Result]:
    """All results that are kept, by versions and file."""
    found = [Result(**{**one, "failed": tuple(Failure(**each) for each in one["failed"])})
             for path in folder.glob("*.json") for one in json.loads(path.read_text(encoding="utf-8"))]
    return sorted(found, key=lambda one: (one.versions, one.file))


def keep(folder: Path, new: Result) -> None:
    """Puts a result in the place of the former one of its file and versions."""
    others = [one for one in load(folder) if one.versions == new.versions and one.file != new.file]
    rows = sorted([*others, new], key=lambda one: one.file)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"python-{new.versions[0]}-torch-{new.versions[1]}.json"
    path.write_text(json.dumps([dataclasses.asdict(one) for one in rows], indent=1) + "\n", encoding="utf-8")


def run(file: Path, full: bool, limit: int) -> Result:
    """Runs one file in a process of its own; after `limit` seconds that process and those that it started are ended."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider",
                   "-m", "full or not full" if full else "not full", f"--junitxml={report}", str(file)]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                 env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
        try:
            said, _ = child.communicate(timeout=limit)
            ended = "" if report.exists() else f"status {child.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            said, _ = child.communicate()
            ended = f"{limit} s"
        print(file.stem, said[-8000:], flush=True)
        passed, skipped, failed = (0, 0, ()) if ended else counted(report.read_text(encoding="utf-8"))
    return Result(file.stem, platform.python_version(), packages(), commit(), datetime.date.today().isoformat(), full,
                  round(time.monotonic() - begun), passed, skipped, failed, ended)


def counted(report: str) -> tuple[int, int, tuple[Failure, ...]]:
    """How many tests of a report of pytest's (JUnit's XML) passed and were skipped, and those that failed."""
    passed = skipped = 0
    failed = []
    for case in ElementTree.fromstring(report).iter("testcase"):
        wrong = [one for kind in ("failure", "error") for one in case.findall(kind)]
        if wrong:
            said = (wrong[0].get("message") or "").strip().partition("\n")[0]
            failed.append(Failure(case.get("name", ""), _FOLDERS.sub("", said)[:200]))
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return passed, skipped, tuple(failed)


def packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass
    # what is installed does not say which build it is, torch itself does; it is not imported for that
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        said = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
        found["torch"] = str(said["__version__"])
    return found


def commit() -> str:
    """The commit that is checked out; `*` behind it: files that tests can see were changed since."""
    name = _git("rev-parse", "--short=8", "HEAD")
    changed = _git("status", "--porcelain", "--", ".", ":!docs/results/versions", f":!{PAGE.relative_to(ROOT)}")
    return f"{name}*" if changed else name


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def page(folder: Path) -> str:
    """docs/versions.md of the results in a folder."""
    results = load(folder)
    pairs = {pair: list(rows) for pair, rows in groupby(results, key=lambda one: one.versions)}
    lines = [INTRODUCTION, "| Python | PyTorch | packages | commits | files | passed | skipped | failed |",
             "|---|---|---|---|---:|---:|---:|---:|"]
    lines += [_row(rows) for rows in pairs.values()]
    wrong = [one for one in results if one.failed or one.ended]
    if wrong:
        lines += ["", "## What failed", "", "| Python | PyTorch | commit | test | what it said |",
                  "|---|---|---|---|---|"]
    for one in wrong:
        start = f"| {' | '.join(one.versions)} | {one.commit} | {one.file}"
        lines += [f"{start} | ended: {one.ended} |"] if one.ended else []
        lines += [f"{start}::{_cell(each.test)} | {_cell(each.said)} |" for each in one.failed]
    heads = [f"{python}, {torch}" for python, torch in pairs]
    lines += ["", "## Files", "", "Tests that passed, of those that ran; Python and PyTorch above.", "",
              "| file | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    found = {(one.file, one.versions): one for one in results}
    lines += [f"| {file} | " + " | ".join(_outcome(found.get((file, pair))) for pair in pairs) + " |"
              for file in sorted({one.file for one in results})]
    return "\n".join([*lines, ""])


def _row(rows: Sequence[Result]) -> str:
    """The row of a pair of versions."""
    failed = sum(len(one.failed) + bool(one.ended) for one in rows)
    cells = (*rows[0].versions, _each(f"{name} {number}" for one in rows for name, number in one.packages.items()
                                      if name != "torch" or "+" in number), _each(one.commit for one in rows),
             len(rows), sum(one.passed for one in rows), sum(one.skipped for one in rows), failed)
    return f"| {' | '.join(map(str, cells))} |"


def _each(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _outcome(one: Result | None) -> str:
    """The cell of a file and a pair of versions."""
    if one is None:
        return ""
    told = f"{one.passed} of {one.passed + len(one.failed)}" if not one.ended else f"ended: {one.ended}"
    return told + (f", {one.skipped} skipped" if one.skipped else "") + (", full" if one.full else "")


def _cell(text: str) -> str:
    """A text within a table."""
    return "`" + text.replace("|", "\\|").replace("`", "'") + "`" if text else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds for a file")
    parser.add_argument("--folder", type=Path, default=KEPT, help="where results are kept")
    chosen = parser.parse_args()
    names = [Path(name).stem for name in chosen.files]
    if not names and not chosen.show:
        here = platform.python_version(), version("torch").split("+")[0]
        there = {one.file for one in load(chosen.folder) if one.versions == here and one.full >= chosen.full}
        names = sorted({path.stem for path in ROOT.glob("tests/test_*.py")} - there)
    for name in names:
        keep(chosen.folder, run(ROOT / "tests" / f"{name}.py", chosen.full, chosen.limit))
    if chosen.folder == KEPT:
        PAGE.write_text(page(KEPT), encoding="utf-8")


if __name__ == "__main__":
    main()
