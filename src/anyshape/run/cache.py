"""The disk cache of object code: one file per entry, named by the sha256 of what it was made from.

An entry is a header (magic, version, length, sha256 of the contents) and the contents. It is written to a file of its
own and renamed, so that a reader sees a whole entry or none, whatever else writes at the same time. An entry that
does not fit its header is ignored and replaced. A folder that cannot be written costs one warning, no failure.
"""
from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import tempfile
import threading
import warnings
from collections.abc import Callable
from functools import lru_cache

from anyshape.base import events
from anyshape.base.config import Config

MAGIC = b"anyshape"
VERSION = 1
_HEADER = struct.Struct("<8sIQ32s")


def default_folder() -> str:
    """The user's cache folder, by the rules of the XDG base directories."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "anyshape")


class DiskCache:
    """Bytes by key in a folder; safe among threads and processes. Keys are hexadecimal."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.lock = threading.Lock()
        self.warned = False

    def path(self, key: str) -> str:
        """The file of an entry; two letters of the key make a folder, so that no folder grows very large."""
        return os.path.join(self.folder, key[:2], key[2:])

    def get(self, key: str) -> bytes | None:
        """The bytes stored under `key`; None when there are none or they are damaged."""
        try:
            with open(self.path(key), "rb") as file:
                text = file.read()
        except OSError:
            events.count("cache_misses")
            return None
        data = _opened(text)
        events.count("cache_misses" if data is None else "cache_hits")
        return data

    def put_first(self, key: str, data: bytes) -> bytes:
        """Keeps `data` under `key` unless something whole is there; returns what is there then."""
        found = self.get(key)
        if found is None:
            self._write(key, data, _linked)
            found = self.get(key)
        if found is None:  # damaged, or a file system without links
            self.put(key, data)
        return data if found is None else found

    def put(self, key: str, data: bytes) -> None:
        """Keeps `data` under `key`, in place of what is there."""
        self._write(key, data, os.replace)

    def _write(self, key: str, data: bytes, move: Callable[[str, str], None]) -> None:
        """Writes an entry to a file of its own, which `move` then gives its name."""
        path = self.path(key)
        header = _HEADER.pack(MAGIC, VERSION, len(data), hashlib.sha256(data).digest())
        temporary = ""
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix="new-", dir=os.path.dirname(path))
            with os.fdopen(handle, "wb") as file:
                file.write(header + data)
            move(temporary, path)
        except OSError as error:
            _remove(temporary)
            self.warn(error)

    def warn(self, error: OSError) -> None:
        """Says once that nothing can be kept."""
        with self.lock:
            first, self.warned = not self.warned, True
        if first:
            warnings.warn(f"AnyShape cannot keep compiled code in {self.folder}: {error.strerror}. Programs run, but "
                          "are compiled anew in every process; set ANYSHAPE_CACHE_DIR to a folder that can be written, "
                          "or ANYSHAPE_CACHE=0.", RuntimeWarning, stacklevel=3)


def _opened(text: bytes) -> bytes | None:
    """The contents of an entry, or None when header and contents do not fit."""
    if len(text) < _HEADER.size:
        return None
    magic, version, length, digest = _HEADER.unpack_from(text)
    data = text[_HEADER.size:]
    if magic != MAGIC or version != VERSION or length != len(data) or hashlib.sha256(data).digest() != digest:
        return None
    return data


def _linked(source: str, path: str) -> None:
    """Gives a file its name unless something has it."""
    with contextlib.suppress(OSError):
        os.link(source, path)
    os.remove(source)


def _remove(path: str) -> None:
    try:
        if path:
            os.remove(path)
    except OSError:
        return


@lru_cache(maxsize=16)
def _cache_in(folder: str) -> DiskCache:
    return DiskCache(folder)


def cache_of(config: Config) -> DiskCache | None:
    """The cache that `config` asks for, one object per folder; None when it is switched off."""
    if not config.cache:
        return None
    return _cache_in(os.path.abspath(os.path.expanduser(config.cache_dir or default_folder())))
