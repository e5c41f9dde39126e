"""The disk cache of machine code: whole or absent, the user's own, bounded, and obedient to its settings."""
from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

import anyshape
from anyshape.backend.cpu.native_routines import routines_of
from anyshape.backend.cpu.target import target_of
from anyshape.backend.targets import host_routines
from anyshape.base.disk_cache import DiskCache
from anyshape.runtime.context.process_context import shared_context
from anyshape.tools import cli

SOURCE = Path(__file__).parents[1] / "src"
KEY = "ab" * 32


def keys(count: int) -> list[str]:
    return [f"{number:02x}" * 32 for number in range(count)]


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


# ---- whole or absent


def test_an_entry_is_kept_and_a_damaged_one_replaced(folder):
    cache = DiskCache(str(folder))
    assert cache.get(KEY) is None
    cache.put(KEY, b"code")
    assert cache.get(KEY) == b"code"
    path = Path(cache.path(KEY))
    whole = path.read_bytes()
    for broken in (b"", whole[:-1], whole[:20], whole[:-1] + b"X", b"other" + whole):
        path.write_bytes(broken)
        assert cache.get(KEY) is None
        cache.put(KEY, b"code")
        assert cache.get(KEY) == b"code"
    assert entries(folder) == [path]


def test_an_entry_under_the_name_of_another_is_none(folder):
    cache = DiskCache(str(folder))
    one, two = keys(2)
    cache.put(one, b"code of one")
    os.makedirs(os.path.dirname(cache.path(two)), mode=0o700)
    os.rename(cache.path(one), cache.path(two))
    assert cache.get(two) is None


def test_a_folder_that_cannot_be_written_warns_once(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    cache = DiskCache(str(blocked))
    with pytest.warns(RuntimeWarning, match="cannot keep compiled code"):
        cache.put(KEY, b"code")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put(KEY, b"code")
    assert cache.get(KEY) is None


def test_a_full_disk_warns_once_and_leaves_nothing(folder, monkeypatch):
    cache = DiskCache(str(folder))

    def full(handle: int, *_: object) -> object:
        os.close(handle)
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fdopen", full)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            cache.put(KEY, b"code")
    assert len(said) == 1 and "No space left" in str(said[0].message)
    assert entries(folder) == [] and cache.get(KEY) is None


def test_many_threads_write_one_entry(folder):
    cache = DiskCache(str(folder))
    data = [bytes([i]) * 100_000 for i in range(10)]
    seen = []

    def write(i: int) -> None:
        for _ in range(5):
            cache.put(KEY, data[i])
            seen.append(cache.get(KEY))

    workers = [threading.Thread(target=write, args=(i,)) for i in range(10)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(seen) == 50 and all(found in data for found in seen)


PROGRAM = """
import ctypes, resource, sys, warnings
from anyshape.backend.cpu.llvm import jit
from anyshape.backend.cpu.machine import target
from anyshape.base import counters
from anyshape.base.disk_cache import DiskCache
warnings.simplefilter("always")
if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
cache = DiskCache(sys.argv[1])
for n in range(12):
    text = f"define i64 @f(i64 %x) {{ %y = add i64 %x, {n}\\n ret i64 %y }}"
    made = jit.load(text, ("f",), target.host(), cache)
    assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(made.address["f"])(30) == 30 + n
stats = counters.stats()
print(stats["cache_hits"], stats["cache_misses"])
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), *arguments], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env=environment)


def told(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return out.strip(), errors


def test_ten_processes_compile_into_one_folder(folder):
    for process in [start(folder) for _ in range(10)]:
        assert told(process)[1] == ""
    assert len(entries(folder)) == 12 and not [path for path in entries(folder) if path.name.startswith("new-")]
    assert told(start(folder)) == ("12 0", "")
    for number, path in enumerate(sorted(entries(folder))):  # emptied, cut, changed, and not an entry at all
        data = path.read_bytes()
        path.write_bytes((b"", data[:len(data) // 2], data[:-9] + b"\0" * 9, b"something else")[number % 4])
    assert told(start(folder)) == ("0 12", "")
    assert told(start(folder)) == ("12 0", "")


def test_a_full_disk_in_another_process(folder):
    """No file may grow beyond 100 bytes: one warning, right numbers, nothing half-written left behind."""
    out, errors = told(start(folder, "100"))
    assert out == "0 12" and errors.count("cannot keep compiled code") == 1
    assert entries(folder) == []


# ---- the user's own


def test_folders_and_files_are_the_users_alone(folder):
    before = os.umask(0)
    try:
        DiskCache(str(folder)).put(KEY, b"code")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    assert modes == {0o700, 0o600}


@pytest.mark.parametrize("opened", ["folder", "inner", "file"])
def test_what_others_can_write_is_not_read(folder, opened):
    cache = DiskCache(str(folder))
    cache.put(KEY, b"code")
    file = Path(cache.path(KEY))
    path = {"folder": folder, "inner": file.parent, "file": file}[opened]
    path.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="somebody else may have written it"):
        assert cache.get(KEY) is None
    if opened != "file":
        cache.put("cd" * 32 if opened == "folder" else KEY, b"new")
        assert entries(folder) == [file]
    path.chmod(0o700)
    assert cache.get(KEY) == b"code"


@pytest.mark.parametrize("owned", ["folder", "inner", "file"])
def test_what_another_user_wrote_is_not_read(folder, owned, monkeypatch):
    cache = DiskCache(str(folder))
    cache.put(KEY, b"code")
    file = Path(cache.path(KEY))
    inode = {"folder": folder, "inner": file.parent, "file": file}[owned].stat().st_ino
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    real_stat, real_fstat = os.stat, os.fstat

    def seen(found: os.stat_result) -> os.stat_result:
        owner = 23456 if found.st_ino == inode else 12345
        return os.stat_result((*found[:4], owner, *found[5:]), {"st_atime": found.st_atime, "st_mtime": found.st_mtime})
    monkeypatch.setattr(os, "stat", lambda *a, **k: seen(real_stat(*a, **k)))
    monkeypatch.setattr(os, "fstat", lambda *a, **k: seen(real_fstat(*a, **k)))
    with pytest.warns(RuntimeWarning, match="belongs to another user"):
        assert cache.get(KEY) is None


# ---- bounded


def test_what_was_used_longest_ago_goes_first(folder):
    cache = DiskCache(str(folder), limit=10_000)
    names = keys(8)
    for age, key in enumerate(names):
        cache.put(key, bytes(1000))
        os.utime(cache.path(key), (time.time() - 90_000 + age, time.time() - 90_000 + age))
    assert cache.get(names[0]) is not None  # the oldest one is used now
    for n in range(4):
        cache.put(f"f{n}" * 32, bytes(1000))
    assert sum(path.stat().st_size for path in entries(folder)) <= 10_000
    assert cache.get(names[0]) is not None and cache.get("f3" * 32) is not None
    assert cache.get(names[1]) is None and cache.get(names[2]) is None


def test_half_written_files_that_were_abandoned_go_too(folder):
    cache = DiskCache(str(folder))
    cache.put(KEY, b"code")
    old, new = (Path(cache.path(KEY)).parent / name for name in ("new-old", "new-now"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert {entry.path for entry in cache.entries()} == {cache.path(KEY), str(old)}


def test_the_command_shows_prunes_and_clears(folder, capsys):
    cache = DiskCache(str(folder))
    for key in keys(5):
        cache.put(key, bytes(1 << 20))
    (folder / "notes.txt").write_text("mine")
    assert cli.main(["cache", "--dir", str(folder), "--limit", "4MiB"]) == 0
    assert "5 entries, 5.24 MB of at most 4.19 MB" in capsys.readouterr().out
    assert cli.main(["cache", "prune", "--dir", str(folder), "--limit", "4MiB"]) == 0
    assert "removed 2 entries" in capsys.readouterr().out
    assert cli.main(["cache", "clear", "--dir", str(folder)]) == 0
    assert "removed 3 entries" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt"]


# ---- obedient


def test_the_setting_holds_for_the_hosts_own_routines(folder, monkeypatch):
    """The native host, its products and its measurements are kept where the first program says, or nowhere."""
    monkeypatch.setattr("anyshape.runtime.context.process_context._shared", [])
    monkeypatch.setattr("anyshape.backend.cpu.native_routines._shared", {})
    target_of.cache_clear()
    monkeypatch.setenv("ANYSHAPE_CACHE_DIR", str(folder / "environment"))
    monkeypatch.setenv("ANYSHAPE_CALIBRATE", "1")
    left, right = torch.randn(3, 5), torch.randn(5, 4)
    for settings in ({"cache": False}, {"cache_dir": str(folder / "given")}):
        fast = anyshape.compile(lambda a, b: torch.relu(a @ b), strict=True, **settings)
        torch.testing.assert_close(fast(left, right), torch.relu(left @ right))
        assert not (folder / "environment").exists()
        assert (folder / "given").exists() == ("cache_dir" in settings)


def test_programs_of_several_caches_share_memory(folder):
    one = host_routines()
    other = routines_of(DiskCache(str(folder)))
    assert other is not one and other.running is one.running and other.lock is one.lock
    assert other is routines_of(other.cache) and one is host_routines() and one is shared_context().host
