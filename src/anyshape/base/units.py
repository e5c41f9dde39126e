"""Bytes as people read and write them: decimal units in what is said, decimal and binary ones in what is given.

    12_345_678  -->  12.3 MB          "1.5GiB"  -->  1_610_612_736          "800 MB"  -->  800_000_000

What is said can be given: a peak of 12.3 MB is a limit of "12.3MB". (The page of `report` says the same by a function
of its own, `bytesText` in `frontend/diagnostics/report/page.js`.)
"""
from __future__ import annotations

import numbers
import re

from anyshape.base.errors import ConfigError

SAID = ("B", "kB", "MB", "GB", "TB")
READ = {"": 1, "B": 1, "KB": 1000, "KiB": 1024, **{f"{letter}{unit}": base**power
                                                   for power, letter in enumerate("kMGT", 1)
                                                   for unit, base in (("B", 1000), ("iB", 1024))}}
WRITE = 'write it like 12GiB, as text, or as a whole number: "1.5GB" or 1.5e9'


def bytes_text(count: float) -> str:
    """A number of bytes with a decimal unit, in three digits: "512 B", "1.23 GB"."""
    value = float(count)
    for unit in SAID:
        places = 0 if unit == "B" or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
        shown = f"{value:.{places}f}"
        if abs(float(shown)) < 1000 or unit == SAID[-1]:
            return f"{shown} {unit}"
        value /= 1000
    raise AssertionError


def bytes_of(what: str, value: object) -> int:
    """The bytes that a text such as "12GiB", "1.5 GB" or "4096" means, or a number that is whole, such as 1.5e9.

    Raises:
        ConfigError: it means none; `what` was to be read.
    """
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if found is None or found[2] not in READ:
            raise ConfigError(f"{what} is {value!r}", why="it is a number of bytes, with a unit or without",
                              do=f"write it like 12GiB or 800MB; the units are {', '.join(filter(None, READ))}")
        from fractions import Fraction  # which brings `decimal` along, and most processes read no text
        return int(Fraction(found[1]) * READ[found[2]])
    whole = isinstance(value, numbers.Integral) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, float)) or not whole:
        raise ConfigError(f"{what} is {value!r}", why="it is a number of bytes", do=WRITE)
    if value < 0:
        raise ConfigError(f"{what} is {value}", why="it is at least 0", do=WRITE)
    return int(value)
