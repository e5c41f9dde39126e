"""The report as one page that needs nothing else: data, style and scripts stand in it."""
from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def page(data: dict[str, Any]) -> str:
    """The text of the page for the data of `collect`."""
    # "</" would end the element that the data stand in
    found = {"TITLE": html.escape(f"Memory of {data['name']}"), "STYLE": _file("page.css"),
             "DATA": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
             "CURVES": _file("curves.js"), "PAGE": _file("page.js")}
    parts = _file("page.html").split("@")
    return "".join(found.get(part, part) for part in parts)


def _file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
