"""AMX microkernel: products of panels of bf16 by the processor's unit for whole tiles (AMX), printed as LLVM.

A tile is 16 rows of 64 bytes. One instruction adds to 16 x 16 sums of f32 the products of 16 rows of 16 words each, a
word being two neighbours along k, with 16 words of 16 columns each:

    sums [16, 16] += rows [16, 16 words] @ columns [16 words, 16]

Panels of columns are what backend/cpu/microkernels/gemm.py packs anyway: the words of a vector of columns lie side by
side. Those of rows have the words of a row side by side here, whole tiles of them, with zeros at the end.

The unit has eight tiles: four of sums, and one for each of the four factors. With six of sums and one for each kind of
factor it is slower (1.8 against 2.4 TFLOP/s on a core, Sapphire Rapids, 2026-11-23). It is set up before a panel of
columns is multiplied, and given back after it, for PyTorch's own products set it up otherwise. The system has to allow
it to a process first (backend/cpu/machine/target.py).
"""
from __future__ import annotations

from collections.abc import Callable

from anyshape.backend.cpu.llvm.ir_builder import Code, Value, constant
from anyshape.backend.cpu.machine.low_precision import SIDE, TILE_BYTES

UNIT = 8  # tiles that there are
CHUNK = 128  # words of all factors that are multiplied before the next ones: so many stay in the first cache
MOST = 2  # of rows at a time: with two of columns four sums, and a tile for each factor
# the first kind of set-up: bytes of a row (16 bits for each tile) from byte 16 on, rows (8 bits each) from byte 48 on
SHAPES = "".join(f"\\{byte:02x}" for byte in (
    1, *[0] * 15, *(byte for _ in range(UNIT) for byte in (TILE_BYTES, 0)), *[0] * 16, *[SIDE] * UNIT, *[0] * 8))
GLOBALS = f'@tile_shapes = private constant [64 x i8] c"{SHAPES}"'


def begin(code: Code) -> None:
    """Sets the unit up for this thread."""
    _call(code, "ldtilecfg", ["ptr @tile_shapes"])


def end(code: Code) -> None:
    """Gives it back: with tiles in use, a change of threads takes longer. What was written past the caches keeps no
    order with what is said to other threads next."""
    code.do("fence seq_cst")
    _call(code, "tilerelease", [])


def multiply(code: Code, height: int, vectors: int, given: dict[str, Value], fetch: Callable[[Value], None]) -> None:
    """The body of a routine `tile` (backend/cpu/microkernels/gemm.py) of `height` tiles of rows by `vectors` of
    columns."""
    words, step = given["words"], given["step"]
    row_step = _times(code, _and(code, _plus(code, words, SIDE - 1), -SIDE), 4)
    whole = _and(code, words, -SIDE)
    room = code.convert("ptrtoint", code.slot("columns", "f32", SIDE, SIDE * vectors), "i64")
    code.open_if(code.compare("slt", whole, words))  # behind the last words of the columns there may be anything
    for i in range(SIDE * vectors):
        _store(code, constant("f32", 0, SIDE), _plus(code, room, TILE_BYTES * i))
    source = _plus(code, given["columns"], _times(code, whole, TILE_BYTES * vectors))
    place = code.open_loop(_number(0), _times(code, code.binary("sub", words, whole), TILE_BYTES * vectors), TILE_BYTES)
    pointer = code.convert("inttoptr", _plus(code, source, place), "ptr")
    _store(code, code.load("f32", SIDE, pointer, code.top, False, 4), _plus(code, room, place))
    code.close_section()
    code.close_section()
    chunk = code.open_loop(_number(0), code.intrinsic("smax", words, _number(1)), CHUNK)  # no words: zeros
    stop = code.intrinsic("smin", _plus(code, chunk, CHUNK), whole)
    more = code.compare("ne", code.binary("or", given["add"], chunk), _number(0))
    for first in range(0, height, MOST):
        rows = [_plus(code, given["rows"], _times(code, row_step, SIDE * i))
                for i in range(first, min(first + MOST, height))]
        sums = [[_plus(code, _plus(code, given["sums"], _times(code, step, SIDE * i)), TILE_BYTES * j)
                 for j in range(vectors)] for i in range(first, min(first + MOST, height))]
        for is_more in (True, False):
            code.open_if(more if is_more else code.compare("eq", code.binary("or", given["add"], chunk), _number(0)))
            for i, places in enumerate(sums):
                for j, address in enumerate(places):
                    if is_more:
                        _move(code, "tileloadd64", i * vectors + j, address, step)
                    else:
                        _call(code, "tilezero", [f"i8 {i * vectors + j}"])
            code.close_section()
        word = code.open_loop(chunk, stop, SIDE)
        if first == 0:
            fetch(word)
        columns = _plus(code, given["columns"], _times(code, word, TILE_BYTES * vectors))
        _block(code, rows, row_step, columns, word, vectors)
        code.close_section()
        code.open_if(code.compare("slt", stop, code.intrinsic("smin", _plus(code, chunk, CHUNK), words)))
        _block(code, rows, row_step, room, whole, vectors)
        code.close_section()
        for i, places in enumerate(sums):
            for j, address in enumerate(places):
                _move(code, "tilestored64", i * vectors + j, address, step)
    code.close_section()


def _block(code: Code, rows: list[Value], row_step: Value, columns: Value, word: Value, vectors: int) -> None:
    """Adds the products of 16 words, from `word` on."""
    left, above = UNIT - len(rows) - vectors, UNIT - vectors
    for j in range(vectors):
        _move(code, "tileloadd64", above + j, _plus(code, columns, TILE_BYTES * j), _number(TILE_BYTES * vectors))
    for i, row in enumerate(rows):
        _move(code, "tileloadd64", left + i, _plus(code, row, _times(code, word, 4)), row_step)
        for j in range(vectors):
            _call(code, "tdpbf16ps", [f"i8 {tile}" for tile in (i * vectors + j, left + i, above + j)])


def _move(code: Code, name: str, tile: int, address: Value, step: Value) -> None:
    """Reads or writes a tile at an address, `step` bytes from row to row."""
    pointer = code.convert("inttoptr", address, "ptr")
    _call(code, name, [f"i8 {tile}", pointer.typed, step.typed])


def _call(code: Code, name: str, arguments: list[str]) -> None:
    code.declare("void", f"llvm.x86.{name}", [one.split()[0] for one in arguments])
    code.do(f"call void @llvm.x86.{name}({', '.join(arguments)})")


def _store(code: Code, value: Value, address: Value) -> None:
    code.do(f"store {value.typed}, ptr {code.convert('inttoptr', address, 'ptr').text}, align 4")


def _plus(code: Code, a: Value, b: Value | int) -> Value:
    return code.binary("add", a, b if isinstance(b, Value) else _number(b))


def _times(code: Code, a: Value, b: int) -> Value:
    return code.binary("mul", a, _number(b))


def _and(code: Code, a: Value, b: int) -> Value:
    return code.binary("and", a, _number(b))


def _number(value: int) -> Value:
    return constant("i64", value)
