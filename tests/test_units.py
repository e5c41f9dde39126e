"""Numbers of bytes as people read and write them: what is said can be given, and there is one way to say it."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from anyshape.base.errors import ConfigError
from anyshape.base.units import bytes_of, bytes_text

SOURCE = Path(__file__).parent.parent / "src" / "anyshape"


@pytest.mark.parametrize("count, text", (
    (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (1536, "1.54 kB"), (9_994, "9.99 kB"), (9_996, "10.0 kB"),
    (99_960, "100 kB"), (999_600, "1.00 MB"), (21_400_000, "21.4 MB"), (1_234_567_890, "1.23 GB"),
    (80e9, "80.0 GB"), (3_000_000_000_000, "3.00 TB"), (5 * 10**15, "5000 TB")))
def test_bytes_are_said_in_three_digits(count: float, text: str) -> None:
    assert bytes_text(count) == text
    assert abs(bytes_of("it", text) - count) <= 0.005 * count


@pytest.mark.parametrize("given, count", (
    ("1.5GiB", 3 << 29), ("4096", 4096), (" 800 MB ", 800_000_000), ("2KB", 2000), ("2KiB", 2048), ("0.1kB", 100),
    ("9007199254740993", 9007199254740993), (1.5e9, 1_500_000_000), (7, 7)))
def test_bytes_are_read(given: object, count: int) -> None:
    assert bytes_of("it", given) == count


@pytest.mark.parametrize("given", ("12 gigs", "-1GB", "", "GiB", "1e9", True, 0.5, float("nan"), float("inf"), -1, [1]))
def test_what_is_no_number_of_bytes_is_refused(given: object) -> None:
    with pytest.raises(ConfigError) as caught:
        bytes_of("setting memory_limit", given)
    assert caught.value.what.startswith("setting memory_limit is ") and caught.value.why and caught.value.do


def test_bytes_are_said_in_one_place() -> None:
    own = re.compile(r"\{[^{}]*:[^{}]*\} ?(?:[kKMGT]i?B)\b")
    found = [f"{path.relative_to(SOURCE)}:{number}" for path in SOURCE.rglob("*.py")
             for number, line in enumerate(path.read_text("utf-8").splitlines(), 1) if own.search(line)]
    # the axis of a picture is in MB, and so are the names of its curves
    assert [one for one in found if not one.startswith("frontend/diagnostics/report/picture.py")] == []
