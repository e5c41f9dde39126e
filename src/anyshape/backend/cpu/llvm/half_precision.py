"""Elements of bf16, f16 and f32 as factors of a sum in f32: lane by lane, or two neighbours in one lane's bits.

A *word* is what one f32 lane of a register holds: an element, converted; or, where the processor multiplies pairs of
bf16 and adds both products to a lane (AVX512-BF16), two neighbours as they stand in memory.
"""
from __future__ import annotations

from anyshape.backend.cpu.llvm.ir_builder import Code, Value, constant, llvm_type
from anyshape.backend.cpu.llvm.scalar_ops import IN_MEMORY, from_memory, to_memory
from anyshape.backend.cpu.machine.target import Machine

DTYPES = ("bf16", "f16")
SIZE = {"bf16": 2, "f16": 2, "f32": 4}  # bytes


def dtypes(target: Machine) -> tuple[str, ...]:
    """Those that the processor can convert."""
    return DTYPES if not target.triple.startswith(("x86", "i")) or target.has("f16c") else ("bf16",)


def pairs(target: Machine, dtype: str) -> bool:
    """Whether a word is a pair."""
    return dtype == "bf16" and target.vector_bytes == 64 and target.has("avx512bf16")


def per_word(target: Machine, dtype: str) -> int:
    """Elements in a word."""
    return 2 if pairs(target, dtype) else 1


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
    if not pairs(code.target, dtype):
        return read(code, dtype, lanes, address, mask)
    if mask is None:
        return code.load("f32", lanes, code.convert("inttoptr", address, "ptr"), code.top, False, 2)
    raw = read_bits(code, dtype, 2 * lanes, address, mask)
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
    """c plus the products of the words a and b, lane by lane."""
    if not pairs(code.target, dtype):
        return code.fma(a, b, c)
    half = f"<{2 * c.lanes} x bfloat>"
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    code.declare(c.type, name, [c.type, half, half])
    a, b = (code.put(f"bitcast {v.typed} to {half}", v.dtype, v.lanes, v.level) for v in (a, b))
    return code.put(f"call {c.type} @{name}({c.typed}, {half} {a.text}, {half} {b.text})", "f32", c.lanes,
                    max(a.level, b.level, c.level))
