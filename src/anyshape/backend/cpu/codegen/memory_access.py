"""Loads and stores of buffers (contiguous, strided, gathered, masked, scattered), and sizes as i64 values."""
from __future__ import annotations

from dataclasses import dataclass, field

from anyshape.backend.cpu.codegen.interleaved_access import apart, interleaved
from anyshape.backend.cpu.codegen.reduction import combine
from anyshape.backend.cpu.codegen.strided_loads import NEAR, load_apart, load_repeated
from anyshape.backend.cpu.llvm.ir_builder import ELEMENT, Code, Value, constant
from anyshape.backend.cpu.llvm.scalar_ops import IN_MEMORY, convert, from_memory, to_memory
from anyshape.ir.types import size_of
from anyshape.kernel.loop_ir.program import Instruction
from anyshape.sym.expr import Call, Size, coefficient_of, symbols_of
from anyshape.sym.floats import float_of
from anyshape.sym.index_arithmetic import SHARED, repeats


@dataclass(frozen=True, slots=True)
class BufferAccess:
    """A param or row buffer. `per_lane`: every vector lane has its own copy, element k of lane j at k*lanes + j."""

    name: str
    dtype: str
    pointer: Value
    role: str
    per_lane: bool = False

    @property
    def stored(self) -> str:
        """The type in which an element's bits are moved."""
        return IN_MEMORY.get(self.dtype, self.dtype)


@dataclass(slots=True)
class Space:
    """Where the emission stands: the values of size names and loop variables, the registers, and the lanes.

    vector: the variable taken several values at a time; its value in `names` is that of lane 0.
    lanes: how many, 0 for scalar code. mask: the lanes that exist, None for all; left: how many these are, where
    that is known. lanes_from: the section behind
    whose test all lanes exist, or only those of the mask: loads of vectors must not leave it.
    apart: the lanes are rows, which never scatter to one element.
    streamed: buffers whose whole vectors are written past the caches where `streams` (a scalar bool) holds.
    """

    code: Code
    vector: str = ""
    lanes: int = 0
    mask: Value | None = None
    left: Value | None = None
    lanes_from: int = 0
    apart: bool = False
    names: dict[str, Value] = field(default_factory=dict)
    registers: dict[int, Value] = field(default_factory=dict)
    streamed: frozenset[str] = frozenset()
    streams: Value | None = None

    # sizes

    def is_wide(self, size: Size) -> bool:
        """The size differs from lane to lane."""
        if not self.lanes:
            return False
        return any(s == self.vector or (s[0] == "%" and self.registers[int(s[1:])].lanes) for s in symbols_of(size))

    def size(self, size: Size, wide: bool = False) -> Value:
        """The size as i64; with `wide` the vector variable stands for its lanes, else for lane 0."""
        if isinstance(size, int):
            return constant("i64", size)
        total: Value | None = None
        terms = [self._term(mono, coefficient, wide) for mono, coefficient in size.terms]
        for term in sorted(terms, key=_outermost):
            total = term if total is None else self.code.binary("add", total, term)
        assert total is not None
        return total

    def _term(self, mono: tuple, coefficient: int, wide: bool) -> Value:
        factors = []
        for atom, power in mono:
            factors += [self._atom(atom, wide)] * power
        factors.sort(key=_outermost)
        if not factors:
            return constant("i64", coefficient)
        result = factors[0]
        if coefficient != 1:
            result = self.code.binary("mul", result, constant("i64", coefficient, result.lanes))
        for factor in factors[1:]:
            result = self.code.binary("mul", result, factor)
        return result

    def _atom(self, atom: str | Call, wide: bool) -> Value:
        if isinstance(atom, Call):
            if atom.op == "scaled":
                number = self.code.convert("sitofp", self.size(atom.args[0], wide), "f64")
                factor = constant("f64", float_of(atom.args[1]), number.lanes)
                return self.code.convert("fptosi", self.code.binary("fmul", number, factor), "i64")
            if atom.op == "root":
                number = self.code.convert("sitofp", self.size(atom.args[0], wide), "f64")
                return self.code.convert("fptosi", self.code.intrinsic("sqrt", number), "i64")
            a, b = (self.size(argument, wide) for argument in atom.args)
            if atom.op == "floordiv":
                return self._floor(a, b)
            return self.code.intrinsic("smax" if atom.op == "max" else "smin", a, b)
        if atom[0] == "%":
            return convert(self.code, self.registers[int(atom[1:])], "i64")
        value = self.names[atom]
        if wide and atom == self.vector:
            return self.code.binary("add", self.code.spread(value, self.lanes), self.code.iota(self.lanes))
        return value

    def _floor(self, a: Value, b: Value) -> Value:
        """a // b for positive b; never traps."""
        code = self.code
        if b.text.isdigit() and int(b.text) & (int(b.text) - 1) == 0 and int(b.text):
            return code.binary("ashr", a, constant("i64", int(b.text).bit_length() - 1, a.lanes))
        if a.lanes or b.lanes:
            # exact below 2^51: the quotient of two such whole numbers never rounds up to the next one
            quotient = code.binary("fdiv", code.convert("sitofp", a, "f64"), code.convert("sitofp", b, "f64"))
            return code.freeze(code.convert("fptosi", code.intrinsic("floor", quotient), "i64"))
        if not b.text.isdigit():
            b = code.intrinsic("smax", b, constant("i64", 1))
        quotient = code.binary("sdiv", a, b)
        rest = code.binary("sub", a, code.binary("mul", quotient, b))
        return code.binary("add", quotient, code.binary("ashr", rest, constant("i64", 63)))

    # access

    def active(self, mask: Value | None) -> Value | None:
        """`mask` and the lanes that exist; None when nothing is masked."""
        if mask is None or self.mask is None:
            return self.mask if mask is None else mask
        return self.code.binary("and", mask, self.mask)

    def locate(self, buffer: BufferAccess, offset: Size) -> tuple[str, Value]:
        """How the access lies in memory, and its address.

        "one": a single element; "row": consecutive elements from the address on; "many": an address per lane.
        """
        code, stored = self.code, buffer.stored
        wide = self.is_wide(offset)
        if buffer.per_lane:
            if not wide:
                return "row", code.address(buffer.pointer, stored, self.size(offset * self.lanes))
            spaced = self.size(offset * self.lanes, wide=True)
            return "many", code.address(buffer.pointer, stored, code.binary("add", spaced, code.iota(self.lanes)))
        if not wide:
            return "one", code.address(buffer.pointer, stored, self.size(offset))
        affine = coefficient_of(offset, self.vector)
        if affine is None or self.is_wide(affine[1]) or self.is_wide(affine[0]):
            return "many", code.address(buffer.pointer, stored, self.size(offset, wide=True))
        first = code.address(buffer.pointer, stored, self.size(offset))
        if affine[0] == 1:
            return "row", first
        steps = code.binary("mul", code.iota(self.lanes), code.spread(self.size(affine[0]), self.lanes))
        return "many", code.address(first, stored, steps)

    def _near(self, buffer: BufferAccess, offset: Size) -> int:
        """The elements from lane to lane where they are so few that vectors are read and picked from; else 0."""
        affine = coefficient_of(offset, self.vector)
        if affine is None or buffer.per_lane or self.is_wide(affine[1]):
            return 0
        if self.mask is not None and self.left is None:
            return 0
        return affine[0] if isinstance(affine[0], int) and affine[0] in NEAR else 0

    def _repeated(self, buffer: BufferAccess, offset: Size) -> tuple[int, Size]:
        """How many lanes after each other have one element, and the next ones the next, with what is divided by that
        number; (0, 0) where it is not so."""
        times, inside = repeats(offset, self.vector)
        if times not in SHARED or buffer.per_lane or (self.mask is not None and self.left is None):
            return 0, 0
        # registers may differ from lane to lane as well
        plain = not any(name[0] == "%" and self.registers[int(name[1:])].lanes for name in symbols_of(offset))
        return (times, inside) if plain else (0, 0)

    def load(self, buffer: BufferAccess, instruction: Instruction, mask: Value | None, level: int, pure: bool) -> Value:
        """The register of a load instruction."""
        code = self.code
        stored, align = buffer.stored, size_of(buffer.dtype)
        how, pointer = self.locate(buffer, instruction.offset)
        if how == "one" and mask is not None and mask.lanes:
            how, pointer = "many", code.spread(pointer, self.lanes)
        if how == "one":
            if mask is not None:
                pointer = self._guarded(pointer, mask)
            raw = code.load(stored, 0, pointer, level, pure, align)
        else:
            level = max(level, self.lanes_from)
            active = self.active(mask)
            nothing = constant(stored, 0, self.lanes)
            step = self._near(buffer, instruction.offset) if how == "many" and mask is None else 0
            times, inside = self._repeated(buffer, instruction.offset) if how == "many" and mask is None else (0, 0)
            if how == "row" and active is None:
                raw = code.load(stored, self.lanes, pointer, level, pure, align)
            elif times:
                first = code.address(buffer.pointer, stored, self.size(instruction.offset))
                raw = load_repeated(code, stored, self.lanes, first, times, self.size(inside), self.left,
                                    (level, pure, align))
            elif step:
                first = code.address(buffer.pointer, stored, self.size(instruction.offset))
                raw = load_apart(code, stored, self.lanes, first, step, self.left, (level, pure, align))
            else:
                every = constant("bool", True, self.lanes) if active is None else active
                op = "load" if how == "row" else "gather"
                found = code.masked(op, nothing, pointer, every, align, level, pure)
                assert found is not None
                raw = found
        value = from_memory(code, raw, buffer.dtype, instruction.dtype)
        if mask is None or (how != "one" and instruction.value == 0):
            return value
        return code.select(mask, value, constant(instruction.dtype, instruction.value, value.lanes))

    def _guarded(self, pointer: Value, mask: Value) -> Value:
        """The pointer, or that of a spare stack slot when the scalar `mask` is off."""
        return self.code.select(mask, pointer, self.code.slot("spare", "i64", 0))

    def store(self, buffer: BufferAccess, offset: Size, value: Value, mask: Value | None) -> None:
        """buffer[offset] = value in the lanes of `mask`; of lanes that meet in one element the last one wins."""
        code, align = self.code, size_of(buffer.dtype)
        if mask is not None and not mask.lanes:
            code.open_if(mask)
            self.store(buffer, offset, value, None)
            code.close_section()
            return
        how, pointer = self.locate(buffer, offset)
        raw = to_memory(code, value, buffer.dtype)
        if how == "one" and (raw.lanes or mask is not None):
            how, pointer = "many", code.spread(pointer, self.lanes)
        if how == "one":
            code.do(f"store {raw.typed}, ptr {pointer.text}, align {align}")
            return
        raw = code.spread(raw, self.lanes)
        active = self.active(mask)
        if how == "row" and active is None:
            if self.streams is not None and buffer.name in self.streamed:
                self._stream(raw, pointer, self.streams, align)
            else:
                code.do(f"store {raw.typed}, ptr {pointer.text}, align {align}")
            return
        every = constant("bool", True, self.lanes) if active is None else active
        code.masked("store" if how == "row" else "scatter", raw, pointer, every, align, code.top, pure=False)

    def load_interleaved(self, buffer: BufferAccess, one: Instruction, mask: Value | None, level: int, pure: bool
                         ) -> list[Value]:
        """The registers of an instruction "loads": lane k of number j is element k*value + j from the offset on. mask:
        one for all lanes, None for all of them."""
        code, stored, align, count = self.code, buffer.stored, size_of(buffer.dtype), int(one.value)
        level = max(level, self.lanes_from)
        first = code.address(buffer.pointer, stored, self.size(one.offset))
        found = []
        for turn in range(count):
            at = code.address(first, stored, constant("i64", turn * self.lanes))
            some = self._some(turn, count)
            if mask is not None:
                some = mask if some is None else code.binary("and", code.spread(mask, self.lanes), some)
            raw: Value | None
            if some is None:
                raw = code.load(stored, self.lanes, at, level, pure, align)
            else:
                raw = code.masked("load", constant(stored, 0, self.lanes), at, some, align, level, pure)
            assert raw is not None
            found.append(raw)
        return [from_memory(code, raw, buffer.dtype, one.dtype) for raw in apart(code, found)]

    def store_interleaved(self, buffer: BufferAccess, offset: Size, values: list[Value]) -> None:
        """An instruction "stores": lane k of number j becomes element k*len(values) + j from the offset on."""
        code, align, stored = self.code, size_of(buffer.dtype), buffer.stored
        first = code.address(buffer.pointer, stored, self.size(offset))
        raws = [code.spread(to_memory(code, value, buffer.dtype), self.lanes) for value in values]
        for turn, raw in enumerate(interleaved(code, raws)):
            at = code.address(first, stored, constant("i64", turn * self.lanes))
            mask = self._some(turn, len(values))
            if mask is not None:
                code.masked("store", raw, at, mask, align, code.top, pure=False)
            elif self.streams is not None and buffer.name in self.streamed:
                self._stream(raw, at, self.streams, align)
            else:
                code.do(f"store {raw.typed}, ptr {at.text}, align {align}")

    def _some(self, turn: int, count: int) -> Value | None:
        """The elements that exist in the `turn`th of `count` vectors of interleaved ones; None for all."""
        if self.mask is None:
            return None
        assert self.left is not None
        every = self.code.binary("mul", self.left, constant("i64", count))
        return self.code.first_lanes(self.code.binary("sub", every, constant("i64", turn * self.lanes)), self.lanes)

    def _stream(self, raw: Value, pointer: Value, streams: Value, align: int) -> None:
        """A store past the caches where `streams` holds and the address is aligned."""
        code = self.code
        bytes_ = raw.lanes * align
        whole = min(code.target.vector_bytes, bytes_)
        rest = code.binary("and", code.convert("ptrtoint", pointer, "i64"), constant("i64", whole - 1))
        past = code.binary("and", streams, code.compare("eq", rest, constant("i64", 0)))
        code.open_if(past)
        # as another type: LLVM makes one ordinary store of two that are alike
        part = min(32 if raw.dtype in ("i64", "f64") else 64, 8 * bytes_)
        kind = f"<{8 * bytes_ // part} x i{part}>"
        bits = code.put(f"bitcast {raw.typed} to {kind}", "i64", 0, code.top)
        code.do(f"store {kind} {bits.text}, ptr {pointer.text}, align {whole}, !nontemporal !0")
        code.close_section()
        code.open_if(code.binary("xor", past, constant("bool", True)))
        code.do(f"store {raw.typed}, ptr {pointer.text}, align {align}")
        code.close_section()

    def scatter(self, buffer: BufferAccess, offset: Size, value: Value, mask: Value | None, op: str) -> None:
        """`op` combines value into buffer[offset]; lanes that meet in one element all count."""
        code, align = self.code, size_of(buffer.dtype)
        if mask is not None and not mask.lanes:
            code.open_if(mask)
            self.scatter(buffer, offset, value, None, op)
            code.close_section()
            return
        how, pointer = self.locate(buffer, offset)
        if how == "many" and self.apart:
            every = self.active(mask) or constant("bool", True, self.lanes)
            nothing = constant(buffer.stored, 0, self.lanes)
            found = code.masked("gather", nothing, pointer, every, align, code.top, False)
            assert found is not None
            total = self._combined(op, buffer, found, code.spread(value, self.lanes))
            code.masked("scatter", total, pointer, every, align, code.top, pure=False)
        elif how == "row":
            active = self.active(mask)
            value = code.spread(value, self.lanes)
            if active is None:
                raw = code.load(buffer.stored, self.lanes, pointer, code.top, False, align)
            else:
                found = code.masked("load", constant(buffer.stored, 0, self.lanes), pointer, active, align, code.top,
                                    False)
                assert found is not None
                raw = found
            total = self._combined(op, buffer, raw, value)
            if active is None:
                code.do(f"store {total.typed}, ptr {pointer.text}, align {align}")
            else:
                code.masked("store", total, pointer, active, align, code.top, pure=False)
        elif not self.lanes:
            raw = code.load(buffer.stored, 0, pointer, code.top, False, align)
            code.do(f"store {self._combined(op, buffer, raw, value).typed}, ptr {pointer.text}, align {align}")
        else:
            self._scatter_lanes(op, buffer, code.spread(pointer, self.lanes), code.spread(value, self.lanes),
                                self.active(mask))

    def _combined(self, op: str, buffer: BufferAccess, raw: Value, value: Value) -> Value:
        old = from_memory(self.code, raw, buffer.dtype, value.dtype)
        # a sum is rounded as eager PyTorch's is, product and sum one by one
        plain = op == "add" and value.dtype in ("f32", "f64")
        total = self.code.binary("fadd", old, value) if plain else combine(self.code, op, old, value)
        return to_memory(self.code, total, buffer.dtype)

    def _scatter_lanes(self, op: str, buffer: BufferAccess, pointers: Value, values: Value, mask: Value | None) -> None:
        """One lane after the other; those of the mask that are off go to a spare stack slot."""
        code, align = self.code, size_of(buffer.dtype)
        if mask is not None:
            pointers = code.select(mask, pointers, code.slot("spare", "i64", 0))
        for lane in range(self.lanes):
            pointer, value = code.element(pointers, lane), code.element(values, lane)
            raw = code.load(buffer.stored, 0, pointer, code.top, False, align)
            total = self._combined(op, buffer, raw, value)
            code.do(f"store {ELEMENT[total.dtype]} {total.text}, ptr {pointer.text}, align {align}")


def _outermost(value: Value) -> tuple[bool, int]:
    return (value.lanes > 0, value.level)

