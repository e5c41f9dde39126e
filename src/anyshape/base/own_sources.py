"""A digest of the package's own source files, for cache keys: what this process's code makes of equal input, a process
with equal files makes too.

Files are told by their contents, not by their times: installed again, or in another container, they are the same.
"""
from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

PACKAGE = str(Path(__file__).parents[1])
_IMPORTED = time.time()


@lru_cache(maxsize=1)
def own_sources() -> str:
    """The digest; "" where a file was changed since this process began, which may run what it contained before."""
    import hashlib  # with OpenSSL, which is faster over so much
    whole = hashlib.sha256()
    try:
        for path in sources_in(PACKAGE):
            with open(path, "rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_mtime >= process_start():
                    return ""
                text = file.read()
            whole.update(f"{path[len(PACKAGE):]} {len(text)}\n".encode("utf-8", "surrogateescape"))
            whole.update(text)
    except OSError:  # no source files, or the package is being installed
        return ""
    return whole.hexdigest()


def sources_in(folder: str) -> Iterator[str]:
    """The source files below a folder, in order."""
    with os.scandir(folder) as listed:
        entries = sorted(listed, key=lambda entry: entry.name)
    for entry in entries:
        if entry.name.endswith(".py"):
            yield entry.path
        elif entry.name != "__pycache__" and entry.is_dir():
            yield from sources_in(entry.path)


@lru_cache(maxsize=1)
def process_start() -> float:
    """When this process began, in seconds of the files' clock; a tick later, for no interpreter has read a
    file by then."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + (ticks + 1) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return _IMPORTED
