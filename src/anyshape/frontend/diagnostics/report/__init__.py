"""The memory of a compiled object as a page, a picture, or data, in one file each that is whole or not there.

    fast.report("memory.html", x=(range(1, 65), 512))

contents.py gathers what is shown, page.py and picture.py show it. Nothing is imported before a report is asked for.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anyshape.base.errors import ConfigError, OutputError
from anyshape.base.files import write_atomically
from anyshape.base.optional_packages import check_picture
from anyshape.frontend.diagnostics.report.contents import collect
from anyshape.frontend.diagnostics.report.page import page
from anyshape.frontend.diagnostics.report.picture import picture
from anyshape.frontend.diagnostics.report.spans import POINTS
from anyshape.frontend.programs.session import Compilation

SUFFIXES = (".html", ".png", ".json")


def check_path(path: Path) -> None:
    """Raises what writing there would raise, as far as that can be known before.

    Raises:
        ConfigError: the name has another suffix, or matplotlib is not installed. OutputError: there is no such folder.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"a report is not written to {path.name}",
                          why=f"its name ends with {path.suffix or 'nothing'}",
                          do=f"end it with {', '.join(SUFFIXES)}: a page, a picture, or data")
    if path.suffix == ".png":
        check_picture()
    if not path.parent.is_dir():
        raise OutputError(f"the report cannot be written to {path}", why=f"there is no folder {path.parent}",
                          do="make the folder, or give another one")


def report(paths: list[Path], name: str, compilation: Compilation, sizes: Mapping[str, Any],
           most: int = POINTS) -> None:
    """Writes the report of a compilation to `paths`, each by its suffix. `sizes`, `most`: as for `collect`.

    Raises:
        InputError: there is nothing to report, or a size has a name that no program has.
        ConfigError, OutputError: as `check_path`, and for what the disk does not take.
    """
    if not paths:
        raise ConfigError("a report has no file to be written to", do='name one or more: report("memory.html")',
                          why="its arguments are paths")
    for path in paths:
        check_path(path)
    data = collect(name, compilation, sizes, most)
    for path in paths:
        try:
            write_atomically(path, _content(data, path.suffix))
        except OSError as error:
            raise OutputError(f"the report could not be written to {path}", why=f"{error.strerror or error}; what was "
                              "there before is as it was", do="free some space, or give another folder") from error


def _content(data: dict[str, Any], suffix: str) -> bytes:
    if suffix == ".png":
        return picture(data)
    return (page(data) if suffix == ".html" else json.dumps(data, indent=1) + "\n").encode()
