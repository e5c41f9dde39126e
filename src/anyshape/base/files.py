"""Atomic files, which are whole or not there, and text files that a user named."""
from __future__ import annotations

import os
from pathlib import Path

from anyshape.base.errors import ConfigError


def write_atomically(path: Path, content: bytes) -> None:
    """Write, flush to the disk, rename; on an OSError the half file is removed and what was there stays."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # it is there where something failed


def read_text(path: Path, do: str) -> str:
    """The text of a file that a user named. do: what to do where there is none.

    Raises:
        ConfigError: it cannot be read, or is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}", why=str(error.strerror), do=do) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}", where=f"byte {error.start}", why="it is no text in UTF-8",
                          do=do) from None
