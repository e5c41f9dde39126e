"""Writing the report of routers: by the suffix of the file a page, a picture or data; whole or not there."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from anyshape.base.errors import ConfigError, OutputError
from anyshape.base.files import write_atomically
from anyshape.base.optional_packages import check_picture
from anyshape.route.report.page import page
from anyshape.route.report.picture import picture

SUFFIXES = (".html", ".png", ".json")


def write_report(path: str | Path, data: dict[str, Any]) -> None:
    """Writes the data of `collect`.

    Raises:
        ConfigError: the name has another suffix, or matplotlib is not installed. OutputError: the disk does not take
            it; what was there before is as it was.
    """
    file = Path(path)
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"a report is not written to {file.name}",
                          why=f"its name ends with {file.suffix or 'nothing'}",
                          do=f"end it with {', '.join(SUFFIXES)}: a page, a picture, or data")
    if file.suffix == ".png":
        check_picture()
        content = picture(data)
    else:
        content = (page(data) if file.suffix == ".html" else json.dumps(data, indent=1) + "\n").encode()
    try:
        write_atomically(file, content)
    except OSError as error:
        raise OutputError(f"the report could not be written to {file}", why=f"{error.strerror or error}; what was "
                          "there before is as it was", do="free some space, or give another folder") from error
