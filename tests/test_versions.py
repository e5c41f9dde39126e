"""Runs with other versions (versions.py): what is kept of a file of tests, also where its process ends or hangs."""
from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import versions
from versions import Failure, Result

RESULT = Result("test_a", "3.13.0", {"torch": "2.13.0+cu130", "numpy": "2.4.6"}, "12345678", "2026-01-31", False, 7, 3,
                1, (Failure("test_of[a|b]", "assert `x` | y"),))


def outcome(folder: Path, text: str, limit: int = 100) -> Result:
    path = folder / "test_it.py"
    path.write_text(text, encoding="utf-8")
    return versions.run(path, False, limit)


def test_tests_are_counted_and_failures_named(tmp_path):
    found = outcome(tmp_path, """
import pytest
@pytest.fixture
def broken(): raise OSError("no /a/b.c/d.py:3, 1/2")
def test_right(): pass
@pytest.mark.parametrize("n", [1, 2])
def test_number(n): assert n == 1, "two"
def test_with(broken): pass
@pytest.mark.skip
def test_left_out(): pass
@pytest.mark.full
def test_long(): pass
""")
    assert (found.file, found.passed, found.skipped, found.ended) == ("test_it", 2, 1, "")
    assert [one.test for one in found.failed] == ["test_number[2]", "test_with"]
    assert "two" in found.failed[0].said and "no d.py:3, 1/2" in found.failed[1].said


@pytest.mark.parametrize("what, ended", [("import os; os.kill(os.getpid(), 9)", "status -9"),
                                         ("import time; time.sleep(60)", "2 s")])
def test_a_process_that_ends_or_hangs_is_said(tmp_path, what, ended):
    found = outcome(tmp_path, f"def test_it(): {what}", 2 if ended == "2 s" else 100)
    assert (found.ended, found.passed, found.failed) == (ended, 0, ())
    versions.keep(tmp_path, found)
    assert f"| test_it | ended: {ended} |" in versions.page(tmp_path)


def test_a_result_takes_the_place_of_the_former_one(tmp_path):
    again = dataclasses.replace(RESULT, passed=4, failed=())
    other = dataclasses.replace(RESULT, file="test_b")
    older = dataclasses.replace(RESULT, python="3.12.1")
    for one in (RESULT, other, older, again):
        versions.keep(tmp_path, one)
    assert versions.load(tmp_path) == [older, again, other]
    assert len(list(tmp_path.iterdir())) == 2


def test_the_page_has_every_file_and_failure(tmp_path):
    versions.keep(tmp_path, RESULT)
    versions.keep(tmp_path, dataclasses.replace(RESULT, file="test_b", python="3.12.1", failed=(), commit="abc*"))
    page = versions.page(tmp_path).replace("|  |", "| |")
    assert "| 3.13.0 | 2.13.0 | torch 2.13.0+cu130, numpy 2.4.6 | 12345678 | 1 | 3 | 1 | 1 |" in page
    assert "| test_a | | 3 of 4, 1 skipped |" in page and "| test_b | 3 of 3, 1 skipped |" in page
    assert "| 3.13.0 | 2.13.0 | 12345678 | test_a::`test_of[a\\|b]` | `assert 'x' \\| y` |" in page


def test_the_build_of_torch_is_kept():
    assert versions.packages()["torch"] == torch.__version__
