"""GEMV microkernels over panels, printed as LLVM: a prepacked matrix (ir/panels.py) with a few vectors, in f32 or u8
by i8 in i32.

A panel has 32 columns; word k of it is an f32 of each, or four neighbours along K. Panels follow each other, so that
the matrix is read once, as one stream, and as many sums as hide the latency of a multiply-add stay in registers:

    for each pair of vectors of columns:  for each word:  every vector's word, in all lanes, times both

The arguments are those of backend/cpu/microkernels/gemv.py: `step` is bytes from panel to panel, `begin` a multiple of
a panel; elements of a vector are next to each other, and so are results; with 8-bit numbers, nothing is read of
`scalars`.
"""
from __future__ import annotations

import itertools
from collections.abc import Sequence

from anyshape.backend.cpu.llvm.half_precision import multiply_add
from anyshape.backend.cpu.llvm.ir_builder import Value, constant
from anyshape.backend.cpu.machine.low_precision import BYTES
from anyshape.backend.cpu.machine.target import Machine
from anyshape.backend.cpu.microkernels.routine import Routine, number
from anyshape.ir.panels import PANEL, WORD

VECTORS = 2  # of columns at a time
SUMS = 16  # vectors of sums at once



def emit(target: Machine, name: str, dtype: str, arguments: tuple[str, ...], count: int, places: int
         ) -> tuple[str, dict[str, str]]:
    """LLVM text of the routine for `count` vectors, and what it declares. places: words of `places` before those of the
    results."""
    body = _Panels(target, arguments, dtype)
    body.multiply(count, places)
    return body.text(name), body.code.declarations


class _Panels(Routine):
    """One routine. word: elements in a word; kind: dtype of sums."""

    def __init__(self, target: Machine, arguments: tuple[str, ...], dtype: str) -> None:
        super().__init__(target, arguments)
        self.dtype = dtype
        self.word, self.kind, self.sum = (WORD, "i32", "add") if dtype == BYTES else (1, "f32", "fadd")

    def multiply(self, count: int, places: int) -> None:
        code, lanes, kind = self.code, self.lanes, self.kind
        matrix, step, inner, begin, end, table = self.given("matrix", "step", "inner", "begin", "end", "places")
        vectors = [self.load("i64", 0, self.plus(table, 8 * i), 8) for i in range(count)]
        results = [self.load("i64", 0, self.plus(table, 8 * (places + i)), 8) for i in range(count)]
        unroll = max(SUMS // (count * VECTORS), 1)
        sums = [[[code.slot(f"sum {i} {v} {u}", kind, lanes) for u in range(unroll)] for v in range(VECTORS)]
                for i in range(count)]
        words = code.binary("lshr", inner, number(self.word.bit_length() - 1))
        whole = code.binary("and", words, number(-unroll))
        j = code.open_loop(begin, end, VECTORS * lanes)
        panel = code.binary("lshr", j, number(PANEL.bit_length() - 1))
        within = code.binary("and", j, number(PANEL - 1))
        base = self.plus(matrix, self.plus(self.times(panel, step), self.times(within, WORD)))
        for slot in (slot for one in sums for two in one for slot in two):
            self.set(slot, constant(kind, 0, lanes))

        def add(word: Value, u: int, last: Value | None = None) -> None:
            place = self.plus(base, self.times(word, PANEL * WORD))
            factors = [self.load(kind, lanes, self.plus(place, WORD * lanes * v), 4) for v in range(VECTORS)]
            for i, vector in enumerate(vectors):
                at = self.plus(vector, self.times(word, WORD))
                other = code.spread(self.load(kind, 0, at, 1) if last is None else self.first(at, last), lanes)
                for v in range(VECTORS):
                    slot = sums[i][v][u]
                    self.set(slot, multiply_add(code, self.dtype, other, factors[v], self.get(slot, kind)))

        word = code.open_loop(number(0), whole, unroll)
        for u in range(unroll):
            add(self.plus(word, u), u)
        code.close_section()
        word = code.open_loop(whole, words, 1)
        add(word, 0)
        code.close_section()
        if self.word > 1:
            rest = code.binary("and", inner, number(WORD - 1))
            code.open_if(code.compare("ne", rest, number(0)))
            add(words, 0, code.first_lanes(rest, WORD))
            code.close_section()
        for slots in (slots for one in sums for slots in one):
            parts = [self.get(slot, kind) for slot in slots]
            while len(parts) > 1:
                parts = [code.binary(self.sum, one, two) for one, two in zip(parts[::2], parts[1::2], strict=True)]
            self.set(slots[0], parts[0])
        for test, masked in (("sle", False), ("sgt", True)):
            code.open_if(code.compare(test, self.plus(j, VECTORS * lanes), end))
            written: list[tuple[Value, Value, Value | None]] = []  # of sums, of results, and which lanes
            for (i, result), v in itertools.product(enumerate(results), range(VECTORS)):
                first = self.plus(j, lanes * v)
                left = code.intrinsic("smax", code.binary("sub", end, first), number(0))
                mask = code.first_lanes(left, lanes) if masked else None
                written.append((sums[i][v][0], self.plus(result, self.times(first, 4)), mask))
            if self.dtype != BYTES:
                self.scale(written)
            for slot, place, mask in written:
                self.store_vector(self.get(slot, kind), place, mask)
            code.close_section()
        code.close_section()

    def scale(self, places: Sequence[tuple[Value, Value, Value | None]]) -> None:
        """Sums become alpha times what they are, and beta times the results as they are before one is written."""
        code, (scalars,) = self.code, self.given("scalars")
        alpha, beta = (self.load("f32", 0, self.plus(scalars, 8 * i), 4) for i in (0, 1))
        for slot, _, _ in places:
            self.set(slot, code.binary("fmul", code.spread(alpha, self.lanes), self.get(slot)))
        code.open_if(code.compare("une", beta, constant("f32", 0)))
        for slot, place, mask in places:
            self.set(slot, code.fma(code.spread(beta, self.lanes), self.load_vector(place, mask), self.get(slot)))
        code.close_section()

    def first(self, address: Value, mask: Value) -> Value:
        """The first elements of a word, the others 0."""
        code = self.code
        found = code.masked("load", constant("i8", 0, WORD), self.pointer(address), mask, 1, code.top, False)
        assert found is not None
        return code.put(f"bitcast {found.typed} to i32", "i32", 0, found.level)
