"""Elements of bf16, f16 and f32 as factors of a sum in f32, and of 8-bit numbers as those of a sum in i32: lane by
lane, or neighbours in one lane's bits.

A *word* is what one f32 lane of a register holds: an element, converted; or, where the processor multiplies pairs of
bf16 and adds both products to a lane (AVX512-BF16), two neighbours as they stand in memory. Of 8-bit numbers it is
four, which VNNI multiplies at once, and other processors as pairs of 16 bits.
"""
from __future__ import annotations

from anyshape.backend.cpu.llvm.ir_builder import Code, Value, constant, llvm_major, llvm_type
from anyshape.backend.cpu.llvm.scalar_ops import IN_MEMORY, from_memory, to_memory
from anyshape.backend.cpu.machine.low_precision import BYTES, pairs, per_word
from anyshape.backend.cpu.machine.target import Machine

SIZE = {"bf16": 2, "f16": 2, "f32": 4, BYTES: 1}  # bytes


def read(code: Code, dtype: str, lanes: int, address: Value, mask: Value | None = None) -> Value:
    """Elements at an address (i64), as f32; with a mask, zero where it does not hold. lanes: 0 for one element."""
    return from_memory(code, read_bits(code, dtype, lanes, address, mask), dtype, "f32")


def read_bits(code: Code, dtype: str, lanes: int, address: Value, mask: Value | None = None) -> Value:
    """The same as they stand in memory."""
    stored = IN_MEMORY.get(dtype, dtype)
    pointer = code.convert("inttoptr", address, "ptr")
    if mask is None:
        return code.load(stored, lanes, pointer, code.top, False, SIZE[dtype])
    found = code.masked("load", constant(stored, 0, lanes), pointer, mask, SIZE[dtype], code.top, False)
    assert found is not None
    return found


def write(code: Code, dtype: str, value: Value, address: Value, mask: Value | None = None, wide: bool = False) -> None:
    """f32 values, rounded to elements at an address (i64); `wide`: which are f32 themselves."""
    found, size = (rounded(code, dtype, value), 4) if wide else (rounded_bits(code, dtype, value), SIZE[dtype])
    pointer = code.convert("inttoptr", address, "ptr")
    if mask is None:
        code.do(f"store {found.typed}, ptr {pointer.text}, align {size}")
    else:
        code.masked("store", found, pointer, mask, size, code.top, False)


def rounded_bits(code: Code, dtype: str, value: Value) -> Value:
    """f32 values, rounded, as they stand in memory."""
    if not (pairs(code.target, dtype) and value.lanes == code.target.lanes):
        return to_memory(code, value, dtype)
    # one instruction; like that for pairs it takes numbers below the normal range for zero
    name, kind = "llvm.x86.avx512bf16.cvtneps2bf16.512", f"<{value.lanes} x bfloat>"
    code.declare(kind, name, [value.type])
    half = code.put(f"call {kind} @{name}({value.typed})", "bf16", value.lanes, value.level)
    return code.put(f"bitcast {kind} {half.text} to {llvm_type('i16', value.lanes)}", "i16", value.lanes, value.level)


def rounded(code: Code, dtype: str, value: Value) -> Value:
    """f32 values, rounded to what the dtype can hold, as f32."""
    return from_memory(code, rounded_bits(code, dtype, value), dtype, "f32")


def read_wide(code: Code, lanes: int, address: Value, mask: Value | None = None) -> Value:
    """f32 elements at an address (i64); with a mask, zero where it does not hold. lanes: 0 for one element."""
    pointer = code.convert("inttoptr", address, "ptr")
    if mask is None:
        return code.load("f32", lanes, pointer, code.top, False, 4)
    found = code.masked("load", constant("f32", 0, lanes), pointer, mask, 4, code.top, False)
    assert found is not None
    return found


def read_words(code: Code, dtype: str, address: Value, mask: Value | None = None, wide: bool = False) -> Value:
    """A vector of words from elements next to each other; `mask`: of the elements; `wide`: they are f32, and are
    rounded."""
    lanes = code.target.lanes
    if wide and pairs(code.target, dtype):
        return _read_wide_pairs(code, lanes, address, mask)
    if wide:
        return rounded(code, dtype, read_wide(code, lanes, address, mask))
    count = per_word(code.target, dtype)
    if count == 1:
        return read(code, dtype, lanes, address, mask)
    if mask is None:
        return code.load("f32", lanes, code.convert("inttoptr", address, "ptr"), code.top, False, SIZE[dtype])
    raw = read_bits(code, dtype, count * lanes, address, mask)
    return code.put(f"bitcast {raw.typed} to {llvm_type('f32', lanes)}", "f32", lanes, raw.level)


def _read_wide_pairs(code: Code, lanes: int, address: Value, mask: Value | None) -> Value:
    parts = []
    for first in (0, lanes):
        part = None if mask is None else code.shuffle(mask, range(first, first + lanes))
        parts.append(read_wide(code, lanes, code.binary("add", address, constant("i64", 4 * first)), part))
    low, high = parts
    name, kind = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", f"<{2 * lanes} x bfloat>"
    code.declare(kind, name, [low.type, low.type])
    half = code.put(f"call {kind} @{name}({high.typed}, {low.typed})", "bf16", lanes, max(low.level, high.level))
    return code.put(f"bitcast {kind} {half.text} to {llvm_type('f32', lanes)}", "f32", lanes, half.level)


def multiply_add(code: Code, dtype: str, a: Value, b: Value, c: Value) -> Value:
    """c plus the products of the words a and b, lane by lane; a of u8, b of i8 where c is i32."""
    if dtype == BYTES:
        return _multiply_add_bytes(code, code.bits(a, "i32"), code.bits(b, "i32"), c)
    if not pairs(code.target, dtype):
        return code.fma(a, b, c)
    half = f"<{2 * c.lanes} x bfloat>"
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    code.declare(c.type, name, [c.type, half, half])
    a, b = (code.put(f"bitcast {v.typed} to {half}", v.dtype, v.lanes, v.level) for v in (a, b))
    return code.put(f"call {c.type} @{name}({c.typed}, {half} {a.text}, {half} {b.text})", "f32", c.lanes,
                    max(a.level, b.level, c.level))


def vnni(target: Machine) -> bool:
    """Whether one instruction multiplies the four 8-bit numbers of each lane and adds the products to it."""
    if target.vector_bytes == 64:
        return target.has("avx512vnni")
    return target.vector_bytes == 32 and target.has("avxvnni")


def _multiply_add_bytes(code: Code, a: Value, b: Value, c: Value) -> Value:
    if vnni(code.target):
        name = f"llvm.x86.avx512.vpdpbusd.{32 * c.lanes}"
        kind = f"<{4 * c.lanes} x i8>" if llvm_major() >= 22 else c.type
        code.declare(c.type, name, [c.type, kind, kind])
        a, b = (code.put(f"bitcast {v.typed} to {kind}", v.dtype, v.lanes, v.level) for v in (a, b))
        return code.put(f"call {c.type} @{name}({c.typed}, {kind} {a.text}, {kind} {b.text})", "i32", c.lanes,
                        max(a.level, b.level, c.level))
    pairs_of = {4: "sse2.pmadd.wd", 8: "avx2.pmadd.wd", 16: "avx512.pmaddw.d.512"}
    if code.target.triple.startswith(("x86", "i")) and c.lanes in pairs_of and (
            c.lanes < 16 or code.target.has("avx512bw")):
        name, kind, half = f"llvm.x86.{pairs_of[c.lanes]}", f"<{2 * c.lanes} x i16>", 2 * c.lanes
        code.declare(c.type, name, [kind, kind])
        a, b = (code.put(f"bitcast {v.typed} to {kind}", "i16", half, v.level) for v in (a, b))
        eight = constant("i16", 8, half)
        even_b = code.binary("ashr", code.binary("shl", b, eight), eight)
        for x, y in ((code.binary("and", a, constant("i16", 255, half)), even_b),
                     (code.binary("lshr", a, eight), code.binary("ashr", b, eight))):
            found = code.put(f"call {c.type} @{name}({x.typed}, {y.typed})", "i32", c.lanes, max(x.level, y.level))
            c = code.binary("add", c, found)
        return c
    for first in (8, 0):
        factors = []
        for word, extend in ((a, "lshr"), (b, "ashr")):
            for place in (0, 16):  # the low and the high one of a pair
                up = code.binary("shl", word, constant("i32", place + first, c.lanes))
                factors.append(code.binary(extend, up, constant("i32", 24, c.lanes)))
        low_a, high_a, low_b, high_b = factors
        c = code.binary("add", c, code.binary("add", code.binary("mul", low_a, low_b),
                                              code.binary("mul", high_a, high_b)))
    return c
