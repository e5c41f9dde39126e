"""Atomic files, which are whole or not there, and text files that a user named."""
from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from anyshape.base.errors import ConfigError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of what is at `path` when the block ends: flushed to the disk, then
    renamed. On an error, or an interrupt, the half file is removed and what was there stays. A device or a pipe is
    written to as it is."""
    if path.exists() and not path.is_file():  # a folder is refused by open
        with open(path, "wb") as file:
            yield file
        return
    # another process or thread may write to the same path
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.writing")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # it is there where something failed


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file, whole or not at all; see `replacing`."""
    with replacing(path) as file:
        file.write(content)


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
