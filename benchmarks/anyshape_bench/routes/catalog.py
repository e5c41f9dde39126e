"""The catalogue of routing cases: which files have some, and those that are asked for by name."""
from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache

from anyshape.base.errors import ConfigError
from anyshape_bench.routes.case import Case, Study

# modules of this folder with `cases()`
FILES: tuple[str, ...] = ("switch", "livesr", "branches", "taskmoe", "swinv2moe", "adopted", "msdnet",
                          "dynamic_routing", "studies.preload", "studies.placement", "studies.profiling",
                          "studies.misprediction", "studies.drift")


@cache
def catalog() -> dict[str, Case | Study]:
    """All cases by name, in the order of the files."""
    found: dict[str, Case | Study] = {}
    for file in FILES:
        for one in importlib.import_module(f"anyshape_bench.routes.{file}").cases():
            assert one.name not in found, f"two cases are called {one.name}"
            found[one.name] = one
    return found


def chosen(words: Sequence[str], quick: bool) -> list[str]:
    """The names of the cases that are asked for: by name, by its first parts ("switch-8"), or by row; all where no word
    is given, and with `quick` those marked so.

    Raises:
        ConfigError: nothing is called so.
    """
    every = catalog()
    if not words:
        return [name for name, one in every.items() if one.quick or not quick]
    found: dict[str, None] = {}
    for word in words:
        some = [name for name, one in every.items() if word in (name, one.row) or name.startswith(f"{word}-")]
        if not some:
            raise ConfigError(f"no case of `anyshape bench routes` is called {word!r}",
                              why=f"there are {', '.join(dict.fromkeys(one.row for one in every.values()))}",
                              do="see `anyshape bench routes --list`")
        found |= dict.fromkeys(some)
    return list(found)
