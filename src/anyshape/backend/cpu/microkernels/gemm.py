"""GEMM microkernels: products of matrices of bf16, f16, f32 and of 8-bit numbers from packed panels, printed as LLVM;
sums in f32, results rounded once; of u8 by i8 sums in i32, exact but that they wrap around.

BLAS has no such product that uses the processor's own instruction for pairs of bf16 everywhere, and none that writes
bf16. The scheme is that of every BLAS (Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008):

    C [rows, columns] = A @ B    in tiles:  columns of B in panels of 2 vectors, rows of A in panels of 12, 8, 4
    word k of a panel            its lanes' factors at k: two neighbours along k for the pair instruction, four of 8-bit
                                 numbers, else one f32

A *tile* routine multiplies one panel of rows with one of columns; its sums stay in registers over the whole block of k.

    tile    (columns, rows, words, sums, step, add, ahead)   sums [rows of the panel, columns of it], f32, step bytes
            apart; add: to what is there; ahead: seven words, what to fetch meanwhile (`fetch` below); of f32 and
            8-bit numbers an eighth one, bytes from word to word of the columns, which may be prepacked
    turn, along, any (source, lane_step, inner_step, lanes, count, target, target_step)   one vector of lanes
            of a panel. turn: elements along k are neighbours; along: the lanes are. Lanes beyond `lanes` are
            undefined, elements beyond `count` are zero up to a whole word (turn: to a whole vector of words)
    finish  (sums, step, target, target_step, rows, columns, addend, addend_step, scalars, past)
            target = alpha * sums + beta * addend, rounded; addend: 0, or an address; scalars: of two words, f32 bits;
            past: whole vectors go past the caches, and lie on lines (of whole tiles only)

All take i64; steps are in bytes.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence

from anyshape.backend.cpu.llvm.half_precision import (
    SIZE,
    multiply_add,
    read,
    read_bits,
    read_wide,
    read_words,
    rounded_bits,
    write,
)
from anyshape.backend.cpu.llvm.ir_builder import Code, Value, constant
from anyshape.backend.cpu.llvm.scalar_ops import from_memory
from anyshape.backend.cpu.machine.low_precision import BYTES, SIDE, dtypes, pairs, per_word, tiles
from anyshape.backend.cpu.machine.target import Machine
from anyshape.backend.cpu.microkernels.amx import GLOBALS, begin, end, multiply
from anyshape.backend.cpu.microkernels.routine import Routine, number
from anyshape.backend.cpu.microkernels.tables.gemm import DTYPES, HEIGHTS, LINE, grain, routines

PREPACKED = ("f32", BYTES)  # matrices of which may lie in panels (ir/panels.py)
CHAIN = 128  # terms that one sum of f32 takes before it is added to what there is: the errors of a sum grow with it
AHEAD = 16  # elements along k that are fetched before their turn
PACE = 2  # lines that a tile fetches with each word: what few rows need, and nothing against 24 products
LINES = 16  # the same with 16 words of whole tiles, whose products take a quarter of the time
PACK = ("source", "lane_step", "inner_step", "lanes", "count", "target", "target_step")
ARGUMENTS = {
    "tile": ("columns", "rows", "words", "sums", "step", "add", "ahead"), "turn": PACK, "along": PACK, "any": PACK,
    "finish": ("sums", "step", "target", "target_step", "rows", "columns", "addend", "addend_step", "scalars",
               "past"),
    "begin": (), "end": (),
}  # fmt: skip


def emit_packed(target: Machine, wanted: Collection[str] = DTYPES) -> str:
    """LLVM text of the routines of the dtypes in `wanted`, those that the target has."""
    parts: list[str] = []
    declarations: dict[str, str] = {}
    for name in routines():
        way, dtype, *sizes = name.split("_")
        if dtype not in wanted or dtype not in (*dtypes(target), "f32", BYTES) or (dtype == "f32" and "wide" in sizes):
            continue
        if dtype == BYTES and ("wide" in sizes) != (way in ("turn", "along", "any")):  # as wide as sums they never are
            continue
        whole = tiles(target, dtype)
        if not whole and ("rows" in sizes or way in ("begin", "end")):
            continue
        body = _Packed(target, dtype, ARGUMENTS[way], "wide" in sizes and dtype != BYTES)
        if way == "tile" and whole:
            body.whole_tiles(HEIGHTS - int(sizes[0]), int(sizes[1]))
        elif way == "tile":
            body.tile(grain(target, dtype) * (HEIGHTS - int(sizes[0])), int(sizes[1]))
        elif way in ("begin", "end"):
            {"begin": begin, "end": end}[way](body.code)
        elif "rows" in sizes:
            {"turn": body.keep, "along": body.cross, "any": body.each}[way]()
        else:
            {"turn": body.turn, "along": body.along, "any": body.any,
             "finish": body.finish if dtype != BYTES else body.finish_whole}[way]()
        declarations |= body.code.declarations
        parts.append(body.text(name))
    return "\n\n".join([*([GLOBALS] if any("@tile_shapes" in part for part in parts) else []), *parts,
                        *declarations.values(),
                        *(["!0 = !{i32 1}"] if any("!nontemporal" in part for part in parts) else [])]) + "\n"


class _Packed(Routine):
    """One routine."""

    def __init__(self, target: Machine, dtype: str, arguments: tuple[str, ...], wide: bool) -> None:
        super().__init__(target, arguments)
        self.dtype = dtype
        self.pairs = pairs(target, dtype)
        self.per_word = per_word(target, dtype)
        self.sum = "i32" if dtype == BYTES else "f32"
        self.wide = wide
        self.size = SIZE[dtype]
        self.item = 4 if wide else self.size  # bytes of an element of the source, or of the result

    # tiles

    def tile(self, height: int, vectors: int) -> None:
        code, lanes = self.code, self.lanes
        columns, rows, words, sums, step, add, ahead = self.given(*ARGUMENTS["tile"])
        kind, add_up = self.sum, "add" if self.sum == "i32" else "fadd"
        slots = [[code.slot(f"sum {i} {j}", kind, lanes) for j in range(vectors)] for i in range(height)]
        places = [[self.plus(self.plus(sums, self.times(step, i)), 4 * lanes * j) for j in range(vectors)]
                  for i in range(height)]
        fetch = self.fetch(ahead, height, vectors)
        apart: Value | int = 4 * lanes * vectors
        if self.dtype in PREPACKED:
            apart = self.load("i64", 0, self.plus(ahead, 56), 8)
        chunk = CHAIN if self.dtype == "f32" else 1 << 30
        first = code.open_loop(number(0), code.intrinsic("smax", words, number(1)), chunk)  # no words: zeros
        for i in range(height):
            for j in range(vectors):
                self.set(slots[i][j], constant(kind, 0, lanes))
        word = code.open_loop(first, code.intrinsic("smin", self.plus(first, chunk), words), 1)
        fetch(word)
        column = self.plus(columns, self.times(word, apart))
        row = self.plus(rows, self.times(word, 4 * height))
        factors = [self.load("f32", lanes, self.plus(column, 4 * lanes * j), 4) for j in range(vectors)]
        for i in range(height):
            other = code.spread(self.load("f32", 0, self.plus(row, 4 * i), 4), lanes)
            for j in range(vectors):
                self.set(slots[i][j], multiply_add(code, self.dtype, other, factors[j],
                                                      self.get(slots[i][j], kind, lanes)))
        code.close_section()
        code.open_if(code.compare("ne", code.binary("or", add, first), number(0)))
        for i in range(height):
            for j in range(vectors):
                self.set(slots[i][j], code.binary(add_up, self.get(slots[i][j], kind, lanes),
                                                  self.load(kind, lanes, places[i][j], 4)))
        code.close_section()
        for i in range(height):
            for j in range(vectors):
                self.store(self.get(slots[i][j], kind, lanes), places[i][j])
        code.close_section()

    def whole_tiles(self, height: int, vectors: int) -> None:
        ahead = [self.load("i64", 0, self.plus(self.arguments["ahead"], 8 * i), 8) for i in range(5)]
        multiply(self.code, height, vectors, self.arguments, self.lines(ahead, LINES))

    def fetch(self, ahead: Value, height: int, vectors: int) -> Callable[[Value], None]:
        """Fetches the lines where results will be written, and gives what fetches PACE lines of the next panel's source
        with each word: memory is then read while the processor multiplies. `ahead`: the first line of the source, bytes
        from one run of lines to the next, lines of a run (2 to that power), words that were before these, the last
        line; then the first result, and bytes from row to row of it."""
        base, run_step, power, before, last, result, result_step = (
            self.load("i64", 0, self.plus(ahead, 8 * i), 8) for i in range(7))
        for i in range(height):
            row = self.plus(result, self.times(result_step, i))
            for j in range(4 * self.lanes * vectors // LINE):
                self.prefetch(self.plus(row, LINE * (j + 1) - 1), write=True)
        return self.lines([base, run_step, power, before, last], PACE)

    def lines(self, ahead: Sequence[Value], count: int) -> Callable[[Value], None]:
        """What fetches the lines of a word, `count` of them; or of as many words as a tile has, PACE of each word's."""
        code = self.code
        base, run_step, power, before, last = ahead
        mask = self.plus(code.binary("shl", number(1), power), -1)

        def line(word: Value) -> None:
            first = self.times(self.plus(before, word), PACE)
            for more in range(count):
                i = code.intrinsic("smin", self.plus(first, more), last)
                run = self.times(code.binary("ashr", i, power), run_step)
                self.prefetch(self.plus(self.plus(base, run), self.times(code.binary("and", i, mask), LINE)))

        return line

    # packing

    def turn(self) -> None:
        """A square of lanes by words at a time, turned about its diagonal."""
        code, lanes = self.code, self.lanes
        source, lane_step, _, count_of_lanes, count, target, target_step = self.given(*PACK)
        last = self.plus(count_of_lanes, -1)
        bases = [self.plus(source, self.times(code.intrinsic("smin", number(i), last), lane_step))
                 for i in range(lanes)]
        elements = self.per_word * lanes
        whole = code.binary("and", count, number(-elements))

        def square(k: Value, mask: Value | None) -> None:
            for base in bases if mask is None else ():
                self.prefetch(self.plus(self.plus(base, self.times(lane_step, lanes)), self.times(k, self.item)))
            rows = [read_words(code, self.dtype, self.plus(base, self.times(k, self.item)), mask, self.wide)
                    for base in bases]
            word = code.binary("lshr", k, number(self.per_word.bit_length() - 1))
            first = self.plus(target, self.times(word, target_step))
            for i, row in enumerate(_turned(code, rows)):
                self.store(row, self.plus(first, self.times(target_step, i)))

        k = code.open_loop(number(0), whole, elements)
        square(k, None)
        code.close_section()
        code.open_if(code.compare("slt", whole, count))
        square(whole, code.first_lanes(code.binary("sub", count, whole), elements))
        code.close_section()

    def prefetch(self, address: Value, write: bool = False) -> None:
        """Has the second cache fetch a line that is read soon: the processor does not foresee as many streams. `write`:
        the first one, to write it."""
        self.code.declare("void", "llvm.prefetch.p0", ["ptr", "i32", "i32", "i32"])
        how = "i32 1, i32 3" if write else "i32 0, i32 2"
        self.code.do(f"call void @llvm.prefetch.p0(ptr {self.pointer(address).text}, {how}, i32 1)")

    def along(self) -> None:
        code, lanes = self.code, self.lanes
        source, _, inner_step, count_of_lanes, count, target, target_step = self.given(*PACK)
        for test, mask in (("eq", None), ("ne", code.first_lanes(count_of_lanes, lanes))):
            code.open_if(code.compare(test, count_of_lanes, number(lanes)))
            self.over_words(count, target, target_step, functools.partial(self.at, source, inner_step, lanes, mask))
            code.close_section()

    def any(self) -> None:
        code = self.code
        source, lane_step, inner_step, count_of_lanes, count, target, target_step = self.given(*PACK)
        lane = code.open_loop(number(0), count_of_lanes, 1)
        first = self.plus(source, self.times(lane, lane_step))
        self.over_words(count, self.plus(target, self.times(lane, 4)), target_step,
                        functools.partial(self.at, first, inner_step, 0, None))
        code.close_section()

    # packing rows for whole tiles: the words of a row lie side by side, with zeros up to a whole tile

    def keep(self) -> None:
        """Elements along k are neighbours, and stay so."""
        code = self.code
        source, lane_step, _, count_of_lanes, count, target, target_step = self.given(*PACK)
        elements = 2 * SIDE
        whole = code.binary("and", count, number(-elements))
        lane = code.open_loop(number(0), count_of_lanes, 1)
        first, place = self.plus(source, self.times(lane, lane_step)), self.plus(target, self.times(lane, target_step))

        def words(k: Value, mask: Value | None) -> None:
            row = read_words(code, self.dtype, self.plus(first, self.times(k, self.item)), mask, self.wide)
            self.store(row, self.plus(place, self.times(k, 2)))

        k = code.open_loop(number(0), whole, elements)
        words(k, None)
        code.close_section()
        code.open_if(code.compare("slt", whole, count))
        words(whole, code.first_lanes(code.binary("sub", count, whole), elements))
        code.close_section()
        code.close_section()

    def cross(self) -> None:
        """Lanes are neighbours: squares of words by lanes are turned about their diagonal."""
        code, lanes = self.code, self.lanes
        source, _, inner_step, count_of_lanes, count, target, target_step = self.given(*PACK)
        elements = 2 * SIDE
        k = code.open_loop(number(0), count, elements)
        rows: list[Value] = []
        for i in range(0, elements, 2):
            low, high = (self.at(source, inner_step, lanes, code.first_lanes(code.select(
                code.compare("slt", self.plus(k, i + j), count), count_of_lanes, number(0)), lanes),
                self.plus(k, i + j)) for j in (0, 1))
            pair = self.pair(low, high)
            rows.append(code.put(f"bitcast {pair.typed} to <{lanes} x float>", "f32", lanes, pair.level))
        first = self.plus(target, self.times(k, 2))
        for i, row in enumerate(_turned(code, rows)):
            self.store(row, self.plus(first, self.times(target_step, i)))
        code.close_section()

    def each(self) -> None:
        """Elements are nobody's neighbours."""
        code = self.code
        source, lane_step, inner_step, count_of_lanes, count, target, target_step = self.given(*PACK)
        lane = code.open_loop(number(0), count_of_lanes, 1)
        first, place = self.plus(source, self.times(lane, lane_step)), self.plus(target, self.times(lane, target_step))
        k = code.open_loop(number(0), count, 2 * SIDE)
        self.store(constant("f32", 0, SIDE), self.plus(place, self.times(k, 2)))
        code.close_section()
        self.over_words(count, place, number(4), functools.partial(self.at, first, inner_step, 0, None))
        code.close_section()

    def at(self, source: Value, inner_step: Value, lanes: int, mask: Value | None, k: Value) -> Value:
        """The bits of element k of some lanes, or of one."""
        if lanes:
            self.prefetch(self.plus(source, self.times(self.plus(k, AHEAD), inner_step)))
        place = self.plus(source, self.times(k, inner_step))
        if self.wide:
            return rounded_bits(self.code, self.dtype, read_wide(self.code, lanes, place, mask))
        return read_bits(self.code, self.dtype, lanes, place, mask)

    def over_words(self, count: Value, target: Value, target_step: Value, bits: Callable[[Value], Value]) -> None:
        """Writes one word after another of what `bits` finds at k: elements of one lane, or of several."""
        code = self.code
        if self.dtype == BYTES:
            self.over_fours(count, target, target_step, bits)
            return
        if not self.pairs:
            k = code.open_loop(number(0), count, 1)
            self.store(from_memory(code, bits(k), self.dtype, "f32"), self.plus(target, self.times(k, target_step)))
            code.close_section()
            return
        whole = code.binary("and", count, number(-2))
        k = code.open_loop(number(0), whole, 2)
        place = self.plus(target, self.times(code.binary("lshr", k, number(1)), target_step))
        self.store(self.pair(bits(k), bits(self.plus(k, 1))), place)
        code.close_section()
        code.open_if(code.compare("slt", whole, count))
        place = self.plus(target, self.times(code.binary("lshr", whole, number(1)), target_step))
        self.store(code.convert("zext", bits(whole), "i32"), place)
        code.close_section()

    def over_fours(self, count: Value, target: Value, target_step: Value, bits: Callable[[Value], Value]) -> None:
        """The same for words of four elements of 8 bits."""
        code = self.code

        def part(k: Value, place: int) -> Value:
            wide = code.convert("zext", bits(self.plus(k, place)), "i32")
            return code.binary("shl", wide, constant("i32", 8 * place, wide.lanes)) if place else wide

        def address(k: Value) -> Value:
            return self.plus(target, self.times(code.binary("lshr", k, number(2)), target_step))

        whole = code.binary("and", count, number(-4))
        k = code.open_loop(number(0), whole, 4)
        word = part(k, 0)
        for place in (1, 2, 3):
            word = code.binary("or", word, part(k, place))
        self.store(word, address(k))
        code.close_section()
        for place in range(3):
            code.open_if(code.compare("slt", self.plus(whole, place), count))
            word = part(whole, place)
            if place:
                word = code.binary("or", self.load("i32", word.lanes, address(whole), 4), word)
            self.store(word, address(whole))
            code.close_section()

    def pair(self, low: Value, high: Value) -> Value:
        """Words of two elements each; or one word."""
        code, lanes = self.code, low.lanes
        if not lanes:
            low, high = (code.convert("zext", value, "i32") for value in (low, high))
            return code.binary("or", low, code.binary("shl", high, constant("i32", 16)))
        order = ", ".join(f"i32 {i // 2 + lanes * (i % 2)}" for i in range(2 * lanes))
        return code.put(f"shufflevector {low.typed}, {high.typed}, <{2 * lanes} x i32> <{order}>", low.dtype,
                        2 * lanes, max(low.level, high.level))

    # results

    def finish(self) -> None:
        code, lanes = self.code, self.lanes
        sums, step, target, target_step, rows, columns, addend, addend_step, scalars, past = self.given(
            *ARGUMENTS["finish"])
        alpha, beta = (self.load("f32", 0, self.plus(scalars, 8 * i), 4) for i in (0, 1))
        adds = code.compare("ne", addend, number(0))
        is_past = code.compare("ne", past, number(0)) if tiles(code.target, self.dtype) and not self.wide else None
        whole = code.binary("and", columns, number(-lanes))
        slot = code.slot("result", "f32", lanes)
        starts = self._open_rows(rows, ((sums, step), (target, target_step), (addend, addend_step)))

        def vector(j: Value, mask: Value | None) -> None:
            source, place, old = (self.plus(start, self.times(j, size))
                                  for start, size in zip(starts, (4, self.item, self.size), strict=True))
            self.set(slot, code.binary("fmul", alpha, self.load("f32", lanes, source, 4)))
            code.open_if(adds)
            self.set(slot, code.fma(beta, read(code, self.dtype, lanes, old, mask), self.get(slot, "f32", lanes)))
            code.close_section()
            found = self.get(slot, "f32", lanes)
            if mask is None and is_past is not None:
                code.open_if(is_past)
                bits = rounded_bits(code, self.dtype, found)
                # as another type: LLVM makes one ordinary store of two that are alike
                other = code.put(f"bitcast {bits.typed} to <{lanes // 4} x i64>", "i64", 0, code.top)
                code.do(f"store <{lanes // 4} x i64> {other.text}, ptr {self.pointer(place).text}, "
                        f"align {lanes * self.size}, !nontemporal !0")
                code.close_section()
                code.open_if(code.binary("xor", is_past, constant("bool", True)))
                write(code, self.dtype, found, place)
                code.close_section()
                return
            write(code, self.dtype, found, place, mask, self.wide)

        self._close_rows(whole, columns, vector)

    def finish_whole(self) -> None:
        """Of sums of 8-bit numbers: as they are, or added to what is there."""
        code, lanes = self.code, self.lanes
        sums, step, target, target_step, rows, columns, addend, addend_step, _, _ = self.given(*ARGUMENTS["finish"])
        adds = code.compare("ne", addend, number(0))
        whole = code.binary("and", columns, number(-lanes))
        slot = code.slot("result", "i32", lanes)
        starts = self._open_rows(rows, ((sums, step), (target, target_step), (addend, addend_step)))

        def vector(j: Value, mask: Value | None) -> None:
            source, place, old = (self.plus(start, self.times(j, 4)) for start in starts)
            self.set(slot, self.load("i32", lanes, source, 4))
            code.open_if(adds)
            there = self.load("i32", lanes, old, 4) if mask is None else code.masked(
                "load", constant("i32", 0, lanes), self.pointer(old), mask, 4, code.top, False)
            assert there is not None
            self.set(slot, code.binary("add", there, self.get(slot, "i32", lanes)))
            code.close_section()
            self.store_vector(self.get(slot, "i32", lanes), place, mask)

        self._close_rows(whole, columns, vector)

    def _open_rows(self, rows: Value, places: Sequence[tuple[Value, Value]]) -> list[Value]:
        """Begins a loop over rows: the addresses of a row, of (address, bytes from row to row)."""
        i = self.code.open_loop(number(0), rows, 1)
        return [self.plus(first, self.times(i, step)) for first, step in places]

    def _close_rows(self, whole: Value, columns: Value, vector: Callable[[Value, Value | None], None]) -> None:
        """Goes through the columns of a row by vectors, the last one masked, and ends the loop. whole: columns of
        whole vectors."""
        code, lanes = self.code, self.lanes
        j = code.open_loop(number(0), whole, lanes)
        vector(j, None)
        code.close_section()
        code.open_if(code.compare("slt", whole, columns))
        vector(whole, code.first_lanes(code.binary("sub", columns, whole), lanes))
        code.close_section()
        code.close_section()


def _turned(code: Code, rows: list[Value]) -> list[Value]:
    """The transpose of a square of vectors: as many rounds of perfect shuffles as its side has bits."""
    lanes = len(rows)
    low = [i // 2 + lanes * (i % 2) for i in range(lanes)]
    orders = [", ".join(f"i32 {i + first}" for i in low) for first in (0, lanes // 2)]
    for _ in range(lanes.bit_length() - 1):
        rows = [code.put(f"shufflevector {a.typed}, {b.typed}, <{lanes} x i32> <{order}>", a.dtype, lanes,
                         max(a.level, b.level))
                for a, b in zip(rows[:lanes // 2], rows[lanes // 2:], strict=True) for order in orders]
    return rows
