"""The disk cache of object code: one file per entry, named by a hash of what it was made from.

An entry is a header (magic, version, length, sha256 of key and contents) and the contents. It is written to a file of
its own and renamed, so that a reader sees a whole entry or none, whatever else writes at the same time. An entry that
does not fit its header or its name is ignored and replaced. A folder that cannot be written costs one warning, no
failure.

What is read is run as machine code, so only what this user (or root) has written is read: each file must be his, and
neither it nor the folders it lies in may be writable by anybody else. A folder that others can write to is not used,
with a warning. Folders are made for the user alone.

The cache keeps to a number of bytes: beyond it the entries go that were used longest ago (their files' access times,
which a read sets), until a tenth is free.
"""
from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from anyshape.base import counters
from anyshape.base.config import Config

MAGIC = b"anyshape"
VERSION = 2
LOOKED = 16  # the folder's bytes are added up again after each 1/16 of the limit that was written
ABANDONED = 3600.0  # seconds after which a half-written file is nobody's
USED_AGAIN = 3600.0  # an access time is set again after so many seconds
_HEADER = struct.Struct("<8sIQ32s")
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the cache: its path, bytes, and when it was last used (seconds since the epoch)."""
    path: str
    size: int
    used: float


def default_folder() -> str:
    """The user's cache folder, by the rules of the XDG base directories."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "anyshape")


class DiskCache:
    """Bytes by key in a folder; safe among threads and processes. Keys are hexadecimal.

    Args:
        folder: made when first written to.
        limit: bytes that its entries may take together.
    """

    def __init__(self, folder: str, limit: int = 1 << 30) -> None:
        self.folder = folder
        self.limit = limit
        self.lock = threading.Lock()
        self.warned = False
        self.unseen: int | None = None  # bytes written since the folder was last added up; None: it never was

    def path(self, key: str) -> str:
        """The file of an entry; two letters of the key make a folder, so that no folder grows very large."""
        return os.path.join(self.folder, key[:2], key[2:])

    def get(self, key: str) -> bytes | None:
        """The bytes stored under `key`; None when there are none, they are damaged, or others could have written them.
        """
        path = self.path(key)
        data = None
        try:
            with open(path, "rb") as file:
                seen = os.fstat(file.fileno())
                foreign = _foreign(self.folder) or _foreign(os.path.dirname(path)) or _foreign(path, seen)
                if foreign:
                    self._distrust(foreign)
                else:
                    data = _opened(key, file.read())
                    if data is not None and time.time() - seen.st_atime > USED_AGAIN:
                        os.utime(file.fileno(), (time.time(), seen.st_mtime))
        except OSError:
            pass
        counters.count("cache_misses" if data is None else "cache_hits")
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
        content = _HEADER.pack(MAGIC, VERSION, len(data), _digest(key, data)) + data
        temporary = ""
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            foreign = _foreign(self.folder)
            if not foreign:
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                foreign = _foreign(os.path.dirname(path))
            if foreign:
                self._distrust(foreign)
                return
            import tempfile  # for writing only
            handle, temporary = tempfile.mkstemp(prefix="new-", dir=os.path.dirname(path))
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            move(temporary, path)
        except OSError as error:
            _remove(temporary)
            self._cannot_keep(error)
            return
        with self.lock:
            grown = self.unseen is None or self.unseen + len(content) > self.limit // LOOKED
            self.unseen = 0 if grown else (self.unseen or 0) + len(content)
        if grown:
            self.prune()

    def entries(self) -> Iterator[Entry]:
        """Every entry, and every half-written file that was abandoned; other files are not looked at."""
        for folder in _listed(self.folder):
            if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):
                continue
            for file in _listed(folder.path):
                try:
                    seen = file.stat(follow_symlinks=False)
                except OSError:
                    continue
                unfinished = file.name.startswith("new-") and time.time() - seen.st_mtime < ABANDONED
                if stat.S_ISREG(seen.st_mode) and not unfinished:
                    yield Entry(file.path, seen.st_size, max(seen.st_atime, seen.st_mtime))

    def prune(self, limit: int | None = None) -> tuple[int, int]:
        """Removes the entries used longest ago while all take more than `limit` bytes (None: the cache's own limit).

        Returns how many entries were removed, and their bytes. An entry that a process is reading stays whole for it.
        """
        limit = self.limit if limit is None else limit
        found = sorted(self.entries(), key=lambda entry: entry.used)
        total = sum(entry.size for entry in found)
        if total <= limit:
            return 0, 0
        removed = freed = 0
        for entry in found:
            if total - freed <= limit - limit // 10:
                break
            if _remove(entry.path):
                removed, freed = removed + 1, freed + entry.size
        return removed, freed

    def _distrust(self, foreign: str) -> None:
        self._warn(f"AnyShape does not use compiled code in {self.folder}: {foreign}, so somebody else may have "
                   "written it. Programs run, but are compiled anew in every process; set ANYSHAPE_CACHE_DIR to a "
                   "folder of your own (chmod 700), or ANYSHAPE_CACHE=0.")

    def _cannot_keep(self, error: OSError) -> None:
        self._warn(f"AnyShape cannot keep compiled code in {self.folder}: {error.strerror}. Programs run, but are "
                   "compiled anew in every process; set ANYSHAPE_CACHE_DIR to a folder that can be written, or "
                   "ANYSHAPE_CACHE=0.")

    def _warn(self, text: str) -> None:
        """Says once what keeps this cache from being used."""
        with self.lock:
            first, self.warned = not self.warned, True
        if first:
            warnings.warn(text, RuntimeWarning, stacklevel=4)


def _foreign(path: str, seen: os.stat_result | None = None) -> str:
    """Why others may have written a file or folder; empty where only this user and root can."""
    seen = os.stat(path) if seen is None else seen
    if seen.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to another user (number {seen.st_uid})"
    if seen.st_mode & _OTHERS:
        return f"{path} can be written by others (mode {stat.S_IMODE(seen.st_mode):o})"
    return ""


def _digest(key: str, data: bytes) -> bytes:
    return hashlib.sha256(key.encode() + data).digest()


def _opened(key: str, text: bytes) -> bytes | None:
    """The contents of an entry, or None when key, header and contents do not fit."""
    if len(text) < _HEADER.size:
        return None
    magic, version, length, digest = _HEADER.unpack_from(text)
    data = text[_HEADER.size:]
    if magic != MAGIC or version != VERSION or length != len(data) or _digest(key, data) != digest:
        return None
    return data


def _linked(source: str, path: str) -> None:
    """Gives a file its name unless something has it."""
    with contextlib.suppress(OSError):
        os.link(source, path)
    os.remove(source)


def _listed(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []


def _remove(path: str) -> bool:
    """Whether a file could be removed."""
    try:
        os.remove(path)
    except OSError:
        return False
    return True


@lru_cache(maxsize=16)
def _cache_in(folder: str, limit: int) -> DiskCache:
    return DiskCache(folder, limit)


def cache_of(config: Config) -> DiskCache | None:
    """The cache that `config` asks for, one object per folder and limit; None when it is switched off."""
    if not config.cache:
        return None
    return _cache_in(os.path.abspath(os.path.expanduser(config.cache_dir or default_folder())), config.cache_limit)
