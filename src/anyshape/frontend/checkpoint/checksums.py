"""Checksums of a checkpoint's data files, each beside its file: torch's reader takes changed bits as they are.

    __0_0.distcp          as torch.distributed.checkpoint writes it
    __0_0.distcp.crc32    eight hexadecimal digits
"""
from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from pathlib import Path

CHUNK = 1 << 20  # bytes that are read at once


def checksum(path: Path) -> str:
    """The CRC-32 of a file."""
    found = 0
    with path.open("rb") as file:
        while part := file.read(CHUNK):
            found = zlib.crc32(part, found)
    return f"{found:08x}"


def write_checksum(path: Path) -> None:
    """Writes that of a file beside it, to the disk."""
    with _beside(path).open("w", encoding="ascii") as file:
        file.write(checksum(path))
        file.flush()
        os.fsync(file.fileno())


def check_files(paths: Iterable[Path]) -> bool:
    """Whether all of the files have a checksum.

    Raises:
        OSError: one is not what was written.
    """
    known = True
    for path in paths:
        if not _beside(path).is_file():
            known = False
        elif (found := checksum(path)) != (wanted := _beside(path).read_text(encoding="ascii", errors="replace")):
            raise OSError(f"{path.name} is damaged: its checksum is {found}, and was {wanted[:8]}")
    return known


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.crc32")
