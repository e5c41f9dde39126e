"""Golden files: `golden(name, text)` compares with tests/golden/<name>; `pytest --update` writes them.

Tests marked `full` take minutes and run only when asked for: `pytest -m full`. Compiled code that tests make is kept in
a folder of the session, not in the user's cache, unless ANYSHAPE_CACHE_DIR says where.
"""
from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="write the golden files from what the code gives now")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Fails when a text differs from its golden file, or when there is none."""
    update = request.config.getoption("--update")

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"{path.name} is missing; run pytest --update and look at it"
        assert text == path.read_text(encoding="utf-8"), f"{path.name} differs; run pytest --update, look"

    return check


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: takes minutes; run with -m full")
    os.environ.setdefault("ANYSHAPE_DEFER", "0")  # tests of sizes of 1 want programs for them
    if "ANYSHAPE_CACHE_DIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="anyshape-tests-")
        os.environ["ANYSHAPE_CACHE_DIR"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "full" in config.getoption("-m"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
