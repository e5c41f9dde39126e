"""The user's lines of a stack: those of torch, and of ours that are traced in place of torch's, are left out."""
from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_LIBRARY = re.compile(r"/(site|dist)-packages/torch/|/anyshape/(frontend|runtime|torch_compat)/")


def is_library(path: str) -> bool:
    """Whether a file is torch's or ours."""
    return _LIBRARY.search(path) is not None


def users_frames(stack: Iterable[Any] | None) -> list[Any]:
    """The frames of a stack (traceback.FrameSummary) that are the user's; all of it where none is."""
    frames = list(stack or ())
    return [frame for frame in frames if not is_library(frame.filename)] or frames


def last_line(stack: Iterable[Any] | None) -> str:
    """The user's innermost line, as "file.py:12  code"; empty where there is none."""
    frames = users_frames(stack)
    if not frames:
        return ""
    return f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}  {frames[-1].line or ''}".strip()
