"""The user's lines of a stack: those of torch, and of ours that are traced in place of torch's, are left out."""
from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from typing import Any

_LIBRARY = re.compile(r"/(site|dist)-packages/torch/|/anyshape/(frontend|runtime|torch_compat)/")
_CHECKS = re.compile(r"/torch/__init__\.py$")  # where torch._check and its like are


def is_library(path: str) -> bool:
    """Whether a file is torch's or ours."""
    return _LIBRARY.search(path) is not None


def users_frames(stack: Iterable[Any] | None) -> list[Any]:
    """The frames of a stack (traceback.FrameSummary) that are the user's; all of it where none is."""
    frames = list(stack or ())
    return [frame for frame in frames if not is_library(frame.filename)] or frames


def is_users_check(error: BaseException) -> bool:
    """Whether an error is of a check (torch._check) that the user has written, not of what torch asks of operands."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    inner = len(files)
    while files and _CHECKS.search(files[-1]):
        files.pop()
    return 0 < len(files) < inner and not is_library(files[-1])


def last_line(stack: Iterable[Any] | None) -> str:
    """The user's innermost line, as "file.py:12  code"; empty where there is none."""
    frames = users_frames(stack)
    if not frames:
        return ""
    return f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}  {frames[-1].line or ''}".strip()
