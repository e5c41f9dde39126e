"""Texts of symbolic sizes, which torch makes of the names of their symbols: `str(n)` is "s77", and "4" in eager."""
from __future__ import annotations

import contextlib
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

import torch

from anyshape.torch_compat.user_lines import is_library

_PYTHON = sysconfig.get_paths()["stdlib"]


@contextlib.contextmanager
def size_texts(numbers: bool) -> Iterator[list[str]]:
    """Gives the files whose own code makes texts of sizes meanwhile. numbers: these are of the numbers of the trace,
    without a guard, instead of names. What torch and Python's library make of sizes, for messages, is left as it is."""
    kinds = torch.SymInt, torch.SymFloat
    texts = [kind.__repr__ for kind in kinds]
    files: list[str] = []

    def text_by(usual: Any) -> Any:
        def text(self: Any) -> str:
            file = sys._getframe(1).f_code.co_filename
            is_users = not is_library(file) and (not file.startswith(_PYTHON) or "site-packages" in file)
            if is_users:
                files.append(file)
            return str(self.node.hint) if is_users and numbers and self.node.has_hint() else usual(self)
        return text

    for kind, usual in zip(kinds, texts, strict=True):
        kind.__repr__ = text_by(usual)  # type: ignore[method-assign]
    try:
        yield files
    finally:
        for kind, usual in zip(kinds, texts, strict=True):
            kind.__repr__ = usual  # type: ignore[method-assign]
