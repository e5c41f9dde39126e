"""The store that values are moved out to: what is put there comes back, whatever happens to the disk meanwhile."""
from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anyshape.base.config import Config
from anyshape.base.errors import AnyShapeError, ConfigError, StoreError
from anyshape.runtime.memory import offload_store as module
from anyshape.runtime.memory.offload_store import PAGE, HostStore, StoreReservation, Stores, check_folder, cut
from sampling import examples

pytestmark = pytest.mark.usefixtures("quick_collections")

SOURCE = Path(__file__).parent.parent / "src"


class Bytes:
    """Memory with an address."""

    def __init__(self, content: bytes) -> None:
        self.memory = ctypes.create_string_buffer(content, max(len(content), 1))
        self.size = len(content)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.memory)

    @property
    def content(self) -> bytes:
        return self.memory.raw[:self.size]


def put(space: StoreReservation, at: int, content: bytes) -> None:
    memory = Bytes(content)
    space.put(at, memory.address, memory.size, memory).wait()


def got(space: StoreReservation, at: int, size: int) -> bytes:
    memory = Bytes(bytes(size))
    space.get(at, memory.address, size, memory).wait()
    return memory.content


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "anyshape store"}


@pytest.fixture
def store(tmp_path):
    one = HostStore(str(tmp_path))
    yield one
    one.close()


def test_what_is_put_comes_back(store):
    space = store.reserve(20_000)
    a, b = noise(5000), noise(9001, seed=1)
    put(space, 0, a)
    put(space, 5056, b)
    assert got(space, 5056, len(b)) == b and got(space, 0, len(a)) == a
    assert got(space, 4000, 2000) == a[4000:] + bytes(56) + b[:944]
    assert got(space, 0, len(a)) == a  # a second time, as for a second backward
    assert store.used == 20_480
    space.release()
    space.release()
    assert store.used == 0


def test_the_file_has_no_name(store, tmp_path):
    put(store.reserve(100), 0, noise(100))
    assert list(tmp_path.iterdir()) == [] and store.file is not None
    assert os.fstat(store.file.number).st_blocks * 512 >= PAGE


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_of_calls_is_like_a_dict(tmp_path, data):
    limit = 64 * PAGE
    store = HostStore(str(tmp_path), limit)
    spaces: dict[int, tuple[StoreReservation, int]] = {}
    wanted: dict[int, bytearray] = {}
    waiting = []
    for number in range(data.draw(st.integers(1, 30))):
        kind = data.draw(st.sampled_from(("reserve", "reserve", "put", "put", "get", "release", "drop")))
        if kind == "reserve":
            size = data.draw(st.integers(1, 20 * PAGE))
            taken = sum(-(-n // PAGE) * PAGE for _, n in spaces.values())
            if taken + -(-size // PAGE) * PAGE > limit:
                with pytest.raises(StoreError, match="no room"):
                    store.reserve(size)
            else:
                spaces[number] = store.reserve(size), size
                wanted[number] = bytearray(noise(size, number))
                put(spaces[number][0], 0, bytes(wanted[number]))
            continue
        if not spaces:
            continue
        key = data.draw(st.sampled_from(sorted(spaces)))
        space, size = spaces[key]
        begin = data.draw(st.integers(0, size - 1))
        end = data.draw(st.integers(begin + 1, size))
        if kind == "put":
            content = noise(end - begin, number + 1000)
            memory = Bytes(content)
            waiting.append(space.put(begin, memory.address, memory.size, memory))
            wanted[key][begin:end] = content
        elif kind == "get":  # copies are done one after another
            assert got(space, begin, end - begin) == wanted[key][begin:end]
        else:
            for ticket in waiting:
                ticket.wait()
            if kind == "release":
                space.release()
            del spaces[key], wanted[key], space
        assert store.used == sum(-(-n // PAGE) * PAGE for _, n in spaces.values())
    for key, (space, size) in spaces.items():
        assert got(space, 0, size) == wanted[key]
    assert store.file is None or store.file.size <= limit
    store.close()


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 50)), max_size=6), st.integers(0, 200),
       st.integers(0, 200))
def test_cut_is_a_slice(pieces, at, size):
    every = [byte for start, length in pieces for byte in range(start, start + length)]
    assert [byte for start, length in cut(pieces, at, size) for byte in range(start, start + length)] \
        == every[at:at + size]


def test_copies_run_beside(store, monkeypatch):
    go = threading.Event()
    write = os.pwrite

    def waiting(*arguments):
        go.wait()
        return write(*arguments)

    space = store.reserve(1000)
    content = Bytes(noise(1000))
    monkeypatch.setattr(module.os, "pwrite", waiting)
    ticket = space.put(0, content.address, 1000, content)  # comes back, though nothing is written
    assert not ticket.done.is_set()
    go.set()
    ticket.wait()
    assert got(space, 0, 1000) == content.content


def test_memory_stays_until_it_is_copied(store, monkeypatch):
    """Also if whoever asked is gone, as after Ctrl-C."""
    go = threading.Event()
    write = os.pwrite

    def waiting(*arguments):
        go.wait()
        return write(*arguments)

    class Owner(Bytes):
        gone = threading.Event()

        def __del__(self):
            self.gone.set()

    monkeypatch.setattr(module.os, "pwrite", waiting)
    space = store.reserve(100)
    owner = Owner(noise(100))
    ticket = space.put(0, owner.address, 100, owner)
    del owner
    gc.collect()
    assert not Owner.gone.is_set()
    go.set()
    ticket.wait()
    assert Owner.gone.wait(60) and got(space, 0, 100) == noise(100)


def test_what_nobody_wants_ends_early(store, monkeypatch):
    begun = threading.Event()
    write = os.pwrite
    written = []

    def slow(number, part, at):
        begun.set()
        time.sleep(0.05)
        written.append(len(part))
        return write(number, part, at)

    monkeypatch.setattr(module.os, "pwrite", slow)
    monkeypatch.setattr(module, "PIECE", PAGE)
    space = store.reserve(200 * PAGE)
    memory = Bytes(noise(100 * PAGE))
    first = space.put(0, memory.address, memory.size, memory)
    second = space.put(100 * PAGE, memory.address, memory.size, memory)
    begun.wait()
    second.unwanted = True
    first.end()
    second.end()
    assert 1 <= len(written) < 50


def test_limits_are_kept(tmp_path):
    store = HostStore(str(tmp_path), 3 * PAGE)
    a = store.reserve(PAGE)
    b = store.reserve(2 * PAGE)
    with pytest.raises(StoreError, match="no room for 4096 bytes") as caught:
        store.reserve(1)
    assert "memory_store_limit" in caught.value.do
    put(b, 0, noise(2 * PAGE))
    a.release()
    c = store.reserve(17)
    put(c, 0, noise(17, seed=3))
    assert got(b, 0, 2 * PAGE) == noise(2 * PAGE) and got(c, 0, 17) == noise(17, seed=3)
    store.close()


def test_room_in_pieces_is_room(tmp_path):
    store = HostStore(str(tmp_path), 8 * PAGE)
    spaces = [store.reserve(PAGE) for _ in range(8)]
    for space in spaces[::2]:
        space.release()
    scattered = store.reserve(4 * PAGE)
    assert len(scattered.pieces) == 4
    content = noise(3 * PAGE + 77)
    put(scattered, 100, content)
    assert got(scattered, 100, len(content)) == content
    store.close()


def test_a_full_disk_is_known_before_anything_is_copied(store, monkeypatch):
    kept = store.reserve(10 * PAGE)
    put(kept, 0, noise(10 * PAGE))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "posix_fallocate", full)
    with pytest.raises(StoreError, match="no room for") as caught:
        store.reserve(PAGE)
    assert "No space left" in caught.value.why and "memory_store" in caught.value.do
    assert got(kept, 0, 10 * PAGE) == noise(10 * PAGE)
    kept.release()
    again = store.reserve(10 * PAGE)  # what is there can be used again
    assert store.used == 10 * PAGE and len(again.pieces) == 1


def test_a_disk_that_fails_is_named_and_left_alone(store, monkeypatch):
    space = store.reserve(PAGE)

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module.os, "pwrite", broken)
    with pytest.raises(StoreError, match="moved out") as caught:
        put(space, 0, noise(100))
    assert "Input/output error" in caught.value.why
    monkeypatch.undo()
    with pytest.raises(StoreError, match="not used any more"):
        store.reserve(PAGE)
    assert not store.works()


def test_a_file_that_was_cut_short_is_an_error_and_a_new_one_begun(store):
    """A mapped file would have ended the process."""
    old = store.reserve(3 * PAGE)
    put(old, 0, noise(3 * PAGE))
    os.ftruncate(store.file.number, PAGE)
    assert got(old, 0, PAGE) == noise(3 * PAGE)[:PAGE]
    with pytest.raises(StoreError, match="moved back") as caught:
        got(old, PAGE, PAGE)
    assert "cut it short" in caught.value.why
    new = store.reserve(5 * PAGE)
    put(new, 0, noise(5 * PAGE, seed=5))
    with pytest.raises(StoreError):
        got(old, 2 * PAGE, PAGE)  # not what is new
    assert got(new, 0, 5 * PAGE) == noise(5 * PAGE, seed=5)


def test_a_folder_that_is_gone(tmp_path):
    folder = tmp_path / "there"
    folder.mkdir()
    store = HostStore(str(folder))
    space = store.reserve(PAGE)
    folder.rmdir()  # the file has no name in it
    put(space, 0, noise(PAGE))
    assert got(space, 0, PAGE) == noise(PAGE)
    store.close()
    other = HostStore(str(folder))
    with pytest.raises(StoreError, match="no file in"):
        other.reserve(PAGE)
    assert not other.works()


def test_two_threads_share_a_store(store):
    before, wrong = threads(), []

    def work(seed):
        for number in range(40):
            content = noise(1 + 977 * number, seed * 1000 + number)
            space = store.reserve(len(content))
            put(space, 0, content)
            if got(space, 0, len(content)) != content:
                wrong.append(number)
            if number % 2:
                space.release()  # else it is dropped
            del space

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    gc.collect()
    assert not wrong and store.used == 0 and len(threads() - before) == 1


def test_a_forked_process_has_a_store_of_its_own(store):
    space = store.reserve(PAGE)
    put(space, 0, noise(PAGE))
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                got(space, 0, PAGE)
            except StoreError:
                mine = store.reserve(PAGE)
                put(mine, 0, noise(PAGE, seed=7))
                space.release()
                code = 0 if got(mine, 0, PAGE) == noise(PAGE, seed=7) and store.used == PAGE else 2
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert got(space, 0, PAGE) == noise(PAGE) and store.used == PAGE


def test_stores_are_shared_and_end(tmp_path):
    stores, before = Stores(), threads()
    one = stores.at(str(tmp_path), 0)
    assert stores.at(str(tmp_path / "." ), 0) is one and stores.at(str(tmp_path), PAGE) is not one
    put(one.reserve(PAGE), 0, noise(PAGE))
    number = one.file.number
    assert len(threads() - before) == 1
    del one
    gc.collect()
    assert not threads() - before and not stores.known
    with pytest.raises(OSError):
        os.fstat(number)


def test_nothing_is_left_at_exit(tmp_path):
    program = f"""
import ctypes, sys
from anyshape.runtime.memory.offload_store import HostStore
store = HostStore({str(tmp_path)!r})
space = store.reserve(64 << 20)
memory = ctypes.create_string_buffer(64 << 20)
space.put(0, ctypes.addressof(memory), 64 << 20, memory)
print("done")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": str(SOURCE)})
    assert done.returncode == 0 and done.stdout == "done\n" and done.stderr == "" and not list(tmp_path.iterdir())


def test_how_long_copies_take_is_learnt(store):
    assert store.works()
    assert all(0 < store.seconds(1 << 20, out) < 10 for out in (True, False))
    assert store.used == 0
    before = store.speeds[True].bytes
    space = store.reserve(1 << 20)
    put(space, 0, noise(1 << 20))
    assert store.speeds[True].bytes != before


def test_a_folder_is_checked(tmp_path):
    check_folder("")
    check_folder(str(tmp_path))
    with pytest.raises(ConfigError, match="no folder") as caught:
        check_folder(str(tmp_path / "nowhere"))
    assert caught.value.why and caught.value.do
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="no folder"):
        check_folder(str(tmp_path / "file"))
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    if not os.access(folder, os.W_OK):  # root may write anywhere
        with pytest.raises(ConfigError, match="cannot be written"):
            check_folder(str(folder))


def test_settings_are_read(monkeypatch):
    assert Config.make(memory_store="/tmp", memory_store_limit="2GiB").memory_store_limit == 2 << 30
    monkeypatch.setenv("ANYSHAPE_MEMORY_STORE", "/tmp")
    monkeypatch.setenv("ANYSHAPE_MEMORY_STORE_LIMIT", "1GB")
    found = Config.make()
    assert found.memory_store == "/tmp" and found.memory_store_limit == 10**9
    with pytest.raises(ConfigError):
        Config.make(memory_store_limit=-1)
    with pytest.raises(AnyShapeError):
        Config.make(memory_store=3)
