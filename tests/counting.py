"""Work counted, not timed: a machine that is busy, or a collection of garbage, fails no test."""
from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def calls(function: Callable[[], Any]) -> int:
    """How many functions, of Python and built in, are called while `function` runs in this thread."""
    count = 0

    def on_event(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
