"""The loader of relocatable objects (ELF64, x86-64): machine code of a deployed file, in memory that is first written
and then executed, never both (W^X).

    objects -> one mapping, read and write -> sections copied, addresses filled in -> read and execute

LLVM's objects of our kernels need five kinds of relocation, and of outside functions three of memory and those of the
C library's mathematics that a kernel may call lane by lane (backend/cpu/llvm/libm.py) or that LLVM makes of them.
Everything else is refused, and every number of an object is checked before it is used: System V ABI, AMD64 supplement,
chapter 4.
"""
from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from anyshape.artifact.format.container import refused

_HEADER, _SECTION = struct.Struct("<16s2HI3QI6H"), struct.Struct("<2I4Q2I2Q")
_SYMBOL, _RELOCATION = struct.Struct("<I2BH2Q"), struct.Struct("<2Qq")
_PROGBITS, _SYMTAB, _RELA, _NOBITS, _REL = 1, 2, 4, 8, 9
_WRITE, _ALLOC = 1, 2
_ABSOLUTE, _RELATIVE, _BY_WORD = 1, (2, 4), (9, 41, 42)  # R_X86_64_64; PC32, PLT32; GOTPCREL and its relaxed forms
_KINDS = frozenset((_ABSOLUTE, *_RELATIVE, *_BY_WORD))
_MATHEMATICS = ("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "erf", "erfc", "exp",
                "exp10", "exp2", "expm1", "fmod", "hypot", "ldexp", "lgamma", "log", "log10", "log1p", "log2",
                "nextafter", "pow", "sin", "sincos", "sinh", "tan", "tanh", "tgamma")
OUTSIDE = frozenset(("memcpy", "memset", "memmove", *_MATHEMATICS, *(f"{name}f" for name in _MATHEMATICS)))
MOST_BYTES = 256 << 20
MOST_SECTIONS, MOST_SYMBOLS = 4096, 65536
_STUB = 16  # bytes of a jump to an outside function, or of a word that holds an address


class _Section(NamedTuple):
    kind: int
    flags: int
    begin: int
    size: int
    link: int
    info: int
    align: int
    entry: int


class _Symbol(NamedTuple):
    name: str  # "" of one that nobody outside of its object asks for
    section: int
    value: int
    is_global: bool


class LoadedObjects:
    """Objects in executable memory. address: global symbol -> address, by the name of its object. The code is there as
    long as this is.

    Raises:
        ArtifactError: an object is broken, or asks for more than our own objects do.
    """

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        images = [_Image(name, data) for name, data in objects.items()]
        total = 0
        for image in images:
            total = image.place(total)
        stubs = total
        total += _STUB * (len(OUTSIDE) + sum(len(image.symbols) for image in images)) + mmap.PAGESIZE
        if total > MOST_BYTES:
            raise refused("native code", f"it takes {total} bytes")
        self.map = mmap.mmap(-1, -(-total // mmap.PAGESIZE) * mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.stubs = stubs
        self.known: dict[tuple[str, int], int] = {}
        self.address: dict[str, dict[str, int]] = {}
        for image in images:
            self._load(image)
        library = ctypes.CDLL(None, use_errno=True)
        size = ctypes.c_size_t(len(self.map))
        if library.mprotect(ctypes.c_void_p(self.base), size, mmap.PROT_READ | mmap.PROT_EXEC):
            raise refused("native code", "the system does not let memory be executed",
                          "load the file with trust_native=False where llvmlite is installed")

    def _load(self, image: _Image) -> None:
        for number, at in image.places.items():
            section = image.sections[number]
            if section.kind == _PROGBITS:
                self.map[at:at + section.size] = image.data[section.begin:section.begin + section.size]
        self.address[image.name] = {
            symbol.name: self.base + image.places[symbol.section] + symbol.value for symbol in image.symbols
            if symbol.is_global and symbol.section in image.places}
        for section in image.sections:
            if section.kind == _RELA and section.info in image.places:
                self._relocate(image, section)

    def _relocate(self, image: _Image, table: _Section) -> None:
        size, begin, symbols = image.sections[table.info].size, image.places[table.info], image.symbols
        rows = image.data[table.begin:table.begin + table.size // _RELOCATION.size * _RELOCATION.size]
        for number, (offset, info, addend) in enumerate(_RELOCATION.iter_unpack(rows)):
            index, kind = info >> 32, info & 0xFFFFFFFF
            if index >= len(symbols):
                image.refuse(f"relocation {number} names symbol {index}")
            if kind not in _KINDS:
                image.refuse(f"relocation of kind {kind}")
            if offset + (8 if kind == _ABSOLUTE else 4) > size:
                image.refuse(f"relocation {number} is outside of its section")
            at = begin + offset
            wanted = self._place(image, symbols[index])
            if kind == _ABSOLUTE:
                value = self.base + wanted + addend
                if not 0 <= value < 2**64:
                    image.refuse(f"relocation {number} leaves memory")
                struct.pack_into("<Q", self.map, at, value)
                continue
            if kind in _BY_WORD:
                wanted = self._word(wanted)
            distance = wanted + addend - at
            if not -2**31 <= distance < 2**31:
                image.refuse(f"relocation {number} goes too far")
            struct.pack_into("<i", self.map, at, distance)

    def _place(self, image: _Image, symbol: _Symbol) -> int:
        """Where a symbol is in the mapping: in a section of the object, or a jump to an outside function."""
        if symbol.section in image.places:
            return image.places[symbol.section] + symbol.value
        if symbol.section or symbol.name not in OUTSIDE:
            image.refuse(f"the symbol {symbol.name!r:.80} is not there")
        found = self.known.get((symbol.name, 0))
        if found is None:
            function = getattr(ctypes.CDLL(None), symbol.name, None)
            if function is None:
                image.refuse(f"the C library of this process has no function {symbol.name!r}")
            address = ctypes.cast(function, ctypes.c_void_p).value
            # jmp *[rip + 0], and the address
            found = self.known[symbol.name, 0] = self._stub(b"\xff\x25\0\0\0\0" + struct.pack("<Q", address))
        return found

    def _word(self, place: int) -> int:
        """Where a word is that holds the address of a place."""
        key = "", place
        if key not in self.known:
            self.known[key] = self._stub(struct.pack("<Q", self.base + place))
        return self.known[key]

    def _stub(self, code: bytes) -> int:
        at, self.stubs = self.stubs, self.stubs + _STUB
        self.map[at:at + len(code)] = code
        return at


class _Image:
    """One object, checked. places: section -> its place in the mapping."""

    def __init__(self, name: str, data: bytes) -> None:
        self.name, self.data = name, data
        if len(data) < _HEADER.size:
            self.refuse("it is too short")
        (ident, kind, machine, _, _, _, begin, _, _, _, _, entry, count, _) = _HEADER.unpack_from(data)
        if ident[:7] != b"\x7fELF\x02\x01\x01" or (kind, machine, entry) != (1, 62, _SECTION.size):
            self.refuse("it is no relocatable object of x86-64")
        if not 0 < count <= MOST_SECTIONS or begin + count * entry > len(data):
            self.refuse("its table of sections is outside of it")
        self.sections = [self._section(begin + number * entry) for number in range(count)]
        self.places: dict[int, int] = {}
        tables = [one for one in self.sections if one.kind == _SYMTAB]
        if len(tables) > 1:
            self.refuse("it has two tables of symbols")
        self.symbols = self._symbols(tables[0]) if tables else []
        for section in self.sections:
            if section.kind in (_RELA, _REL):
                is_loaded = section.info < count and self.sections[section.info].flags & _ALLOC
                if section.kind == _REL or section.info >= count or section.entry != _RELOCATION.size or (
                        is_loaded and (section.link >= count or self.sections[section.link].kind != _SYMTAB)):
                    self.refuse("a table of relocations is broken")

    def place(self, at: int) -> int:
        """Gives every loaded section its place from `at` on; returns where the next object may begin."""
        for number, section in enumerate(self.sections):
            if section.flags & _ALLOC and section.kind in (_PROGBITS, _NOBITS):
                if section.flags & _WRITE:
                    self.refuse("a section can be written to")
                at = -(-at // section.align) * section.align
                self.places[number] = at
                at += section.size
                if at > MOST_BYTES:
                    self.refuse("its sections are too large")
            elif section.flags & _ALLOC and section.kind != 0x70000001:  # tables of unwinding, which nobody reads
                self.refuse(f"a loaded section of kind {section.kind}")
        for symbol in self.symbols:
            if symbol.section in self.places and symbol.value > self.sections[symbol.section].size:
                self.refuse(f"the symbol {symbol.name!r:.80} is outside of its section")
        return -(-at // 64) * 64

    def _section(self, at: int) -> _Section:
        _, kind, flags, _, begin, size, link, info, align, entry = _SECTION.unpack_from(self.data, at)
        align = max(align, 1)
        if align > mmap.PAGESIZE or align & (align - 1) or size > MOST_BYTES:
            self.refuse("a section has an impossible size or alignment")
        if kind not in (0, _NOBITS) and begin + size > len(self.data):
            self.refuse("a section is outside of it")
        return _Section(kind, flags, begin, size, link, info, align, entry)

    def _symbols(self, table: _Section) -> list[_Symbol]:
        if table.entry != _SYMBOL.size or table.size // _SYMBOL.size > MOST_SYMBOLS or table.link >= len(self.sections):
            self.refuse("its table of symbols is broken")
        names = self.sections[table.link]
        if names.kind == _NOBITS:
            self.refuse("its names have no bytes")
        texts = self.data[names.begin:names.begin + names.size]
        last = texts.rfind(b"\0")  # where the last name ends
        found = []
        rows = self.data[table.begin:table.begin + table.size // _SYMBOL.size * _SYMBOL.size]
        for name, info, _, section, value, _ in _SYMBOL.iter_unpack(rows):
            if name > last:
                self.refuse("the name of a symbol is outside of its names")
            is_global = info >> 4 == 1
            # nobody asks for the names of others
            text = texts[name:texts.index(b"\0", name)].decode("ascii", "replace") if is_global or not section else ""
            found.append(_Symbol(text, section, value, is_global))
        return found

    def refuse(self, why: str) -> NoReturn:
        """Raises the error for this object."""
        raise refused(f"native code, {self.name}", why)


def check_object(name: str, data: bytes) -> None:
    """Raises ArtifactError where an object is broken, or asks for more than our own do. Nothing is loaded."""
    _Image(name, data).place(0)
