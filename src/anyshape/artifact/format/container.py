"""The container of a deployed program: a zip file whose members are stored, not deflated, and begin at multiples of 64
bytes, so that the file is mapped and its weights are read where they lie.

The reader takes nothing on trust: no member is extracted, names are a fixed set, sizes agree in both places where zip
files say them, and no two members share a byte (PKWARE APPNOTE 6.3.9; the Python module `zipfile` is more lenient).
"""
from __future__ import annotations

import itertools
import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from anyshape.base.errors import ArtifactError
from anyshape.base.files import replacing

ALIGNMENT = 64
TEXT = re.compile(r"format\.json|(graph|kernels|plan)(\.\d{1,2})?\.txt")
WEIGHTS, VECTORS = "weights.safetensors", "tests.safetensors"
NATIVE = re.compile(r"native/[0-9a-f]{16}\.(o|json)")
MOST_MEMBERS = 4096
MOST_TEXT = 64 << 20  # bytes of a text
MOST_DIRECTORY = 1 << 20
_END, _END64, _LOCATOR = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
_ENTRY, _LOCAL = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
_PADDING = 0xD935  # extra field of a member that is aligned (Android's zipalign has the same)
_ALL = 0xFFFFFFFF


def member(text: str, number: int) -> str:
    """The name of a text, such as "graph.txt", of a program of the file: "graph.1.txt" of that with the number 1."""
    kind, _, suffix = text.partition(".")
    return f"{kind}.{number}.{suffix}" if number else text


def refused(where: str, why: str, do: str = "use the file as anyshape.save wrote it") -> ArtifactError:
    """The error for a file that is not as it should be."""
    return ArtifactError("the file is no deployed program", where=where, why=why, do=do)


def _at_once(path: str, flags: int) -> int:
    """Opens a file; of a pipe nobody writes to it does not wait for one who does."""
    return os.open(path, flags | os.O_NONBLOCK)


def write(path: Path, members: Mapping[str, bytes]) -> None:
    """Writes the members, in their order; the file is there whole, or not at all."""
    import zipfile  # for writing only
    with replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as container:
        for name, data in members.items():
            assert container.fp is not None
            info = zipfile.ZipInfo(name)  # the date stays what it is: equal programs are equal files
            info.external_attr = 0o644 << 16
            large = 20 if len(data) > 1 << 30 else 0  # zipfile writes a field of its own there
            begin = container.fp.tell() + 30 + len(name.encode()) + large + 4
            room = -begin % ALIGNMENT
            info.extra = struct.pack("<2H", _PADDING, room) + bytes(room)
            with container.open(info, "w", force_zip64=bool(large)) as member:
                member.write(data)


class Container:
    """A mapped file and where its members are. The mapping is private to the reader: nothing writes to it.

    Raises:
        ArtifactError: it is no file that `write` could have written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb", opener=_at_once) as file:
                self.view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ArtifactError(f"{path} cannot be read", why=why, do="name a file that anyshape.save wrote") from error
        try:
            self.places = self._members()
        except ArtifactError:
            self.close()
            raise

    def text(self, name: str) -> str:
        """A member as text."""
        try:
            return self.data(name).decode()
        except UnicodeDecodeError as error:
            raise refused(f"{self.path}: {name}", f"it is no UTF-8: {error.reason}") from None

    def data(self, name: str) -> bytes:
        """A member's bytes."""
        return bytes(self.part(name))

    def part(self, name: str) -> memoryview:
        """A member, where it lies in the mapping."""
        if name not in self.places:
            raise refused(str(self.path), f"{name} is missing")
        begin, size = self.places[name]
        return self.view[begin:begin + size]

    def close(self) -> None:
        """Lets the mapping go: it ends with the last array over it."""
        self.places = {}
        self.view.release()

    def _members(self) -> dict[str, tuple[int, int]]:
        begin, size, count = self._directory()
        if count > MOST_MEMBERS or size > MOST_DIRECTORY:
            self._refuse("", f"it has {count} members, in a directory of {size} bytes")
        found: dict[str, tuple[int, int]] = {}
        taken = [(begin, len(self.view))]
        at, end = begin, begin + size
        for _ in range(count):
            at, name, place, whole = self._entry(at, end)
            if name in found:
                self._refuse(name, "it is there twice")
            if TEXT.fullmatch(name) and place[1] > MOST_TEXT:
                self._refuse(name, f"a text of {place[1]} bytes is more than {MOST_TEXT}")
            found[name] = place
            taken.append(whole)
        if at != end:
            self._refuse("", "the directory has more bytes than entries")
        taken.sort()
        for (_, stop), (start, _) in itertools.pairwise(taken):
            if start < stop:
                self._refuse("", f"members share bytes at {start}")
        return found

    def _directory(self) -> tuple[int, int, int]:
        """Where the directory begins, its bytes, and how many members there are."""
        total = len(self.view)
        at = total - _END.size
        if at < 0 or bytes(self.view[at:at + 4]) != b"PK\x05\x06":
            self._refuse("", "it does not end as a zip file without a comment does")
        _, disk, first, here, count, size, begin, _ = _END.unpack_from(self.view, at)
        end = at
        if _ALL in (size, begin) or count == 0xFFFF:
            locator = at - _LOCATOR.size
            if locator < 0 or bytes(self.view[locator:locator + 4]) != b"PK\x06\x07":
                self._refuse("", "the end of a large zip file is missing")
            _, _, end, _ = _LOCATOR.unpack_from(self.view, locator)
            if end + _END64.size != locator or bytes(self.view[end:end + 4]) != b"PK\x06\x06":
                self._refuse("", "the end of a large zip file is elsewhere")
            _, _, _, _, disk, first, here, count, size, begin = _END64.unpack_from(self.view, end)
        if disk or first or here != count or begin + size != end:
            self._refuse("", "its directory does not end where the end of the file says")
        return begin, size, count

    def _entry(self, at: int, end: int) -> tuple[int, str, tuple[int, int], tuple[int, int]]:
        """(where the next entry is, name, (begin, bytes) of the data, (begin, end) of all) of an entry of the
        directory."""
        if at + _ENTRY.size > end:
            self._refuse("", "the directory is shorter than its entries")
        (mark, _, _, flags, method, _, _, crc, packed, size, name_bytes, more, comment, disk, _, _,
         begin) = _ENTRY.unpack_from(self.view, at)
        rest = at + _ENTRY.size
        stop = rest + name_bytes + more + comment
        if mark != b"PK\x01\x02" or stop > end or disk:
            self._refuse("", "an entry of the directory is broken")
        name = bytes(self.view[rest:rest + name_bytes]).decode("ascii", "replace")
        if name not in (WEIGHTS, VECTORS) and not TEXT.fullmatch(name) and not NATIVE.fullmatch(name):
            self._refuse(name[:80], "such a name does not belong into the file")
        if method or flags & ~0x0808:
            self._refuse(name, "it is compressed or encrypted")
        wide = self._wide(name, bytes(self.view[rest + name_bytes:rest + name_bytes + more]))
        size, packed, begin = (next(wide, 0) if one == _ALL else one for one in (size, packed, begin))
        local = begin + _LOCAL.size
        if local > len(self.view) or bytes(self.view[begin:begin + 4]) != b"PK\x03\x04":
            self._refuse(name, "its header is not where the directory says")
        _, _, its_flags, its_method, _, _, its_crc, its_packed, its_size, its_name, its_more = _LOCAL.unpack_from(
            self.view, begin)
        data = local + its_name + its_more
        same = bytes(self.view[local:local + its_name]) == bytes(self.view[rest:rest + name_bytes])
        sizes = (its_packed, its_size) in ((packed, size), (_ALL, _ALL))
        if not same or its_method or its_flags != flags or its_crc != crc or not sizes or packed != size:
            self._refuse(name, "its header and the directory do not agree")
        if data + size > len(self.view):
            self._refuse(name, f"its {size} bytes end behind the file")
        return stop, name, (data, size), (begin, data + size)

    def _wide(self, name: str, extra: bytes) -> Iterator[int]:
        """The sizes of 64 bits in an entry's extra fields."""
        at = 0
        while at + 4 <= len(extra):
            kind, size = struct.unpack_from("<2H", extra, at)
            at += 4
            if at + size > len(extra):
                self._refuse(name, "its extra fields are broken")
            if kind == 1 and size % 8 == 0:
                yield from struct.unpack_from(f"<{size // 8}Q", extra, at)
            at += size

    def _refuse(self, name: str, why: str) -> None:
        raise refused(f"{self.path}: {name}" if name else str(self.path), why)
