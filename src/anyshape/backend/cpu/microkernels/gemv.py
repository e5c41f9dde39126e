"""GEMV microkernels, printed as LLVM: products of a matrix with a few vectors, in which the matrix is read once, in
order, at the speed of memory.

A general product packs its operands into tiles first. With one to eight rows or columns on one side that costs more
than the product itself, which then is bound by the bytes of the matrix. Two ways, by how the matrix is stored:

    dot    a row of the matrix holds the factors of one result: result[i, j] = sum over k of vector[i, k] * matrix[j, k]
    spread a row holds one factor of every result:              result[i, j] = sum over k of vector[i, k] * matrix[k, j]

Of five to eight vectors `spread` takes 0.4 to 0.6 of the time of packed panels, which pack the matrix in each call (f32
and f64, 256 to 3,072 columns, Zen 5; 0.4 to 0.8 in bf16), though every sum goes through the first cache once for ROWS
rows.

All routines take i64: (matrix, step, inner, begin, end, places, element, result_step, scalars)
    matrix: address; step: bytes from row to row of it; inner: the extent of k; begin, end: the results j to compute
    places: addresses of 8 words with the addresses of the vectors, then 8 with those of their results at j = 0; where
        there are fewer than the routine's number, the last one stands again
    element: bytes between the elements of a vector (dot: next to each other)
    result_step: bytes between the results of one vector (spread: next to each other)
    scalars: address of two words, the bits of alpha and beta: result = alpha * product + beta * result

bf16 and f16 are summed in f32 (alpha and beta are f32, too) and rounded once; `spread` keeps its sums on the stack. In
their `wide` routines the matrix is in f32 and is rounded on the way.
"""
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection

from anyshape.backend.cpu.llvm import half_precision
from anyshape.backend.cpu.llvm.ir_builder import BITS, SUFFIX, Code, Value, constant, llvm_type
from anyshape.backend.cpu.machine import low_precision
from anyshape.backend.cpu.machine.target import Machine
from anyshape.backend.cpu.microkernels import gemv_panels
from anyshape.backend.cpu.microkernels.tables.gemv import DTYPES, PLACES, routines

ARGUMENTS = ("matrix", "step", "inner", "begin", "end", "places", "element", "result_step", "scalars")
SUMS = 8  # vectors of sums at once: as many as hide the latency of a multiply-add
AHEAD = 4096  # bytes of the matrix fetched ahead where the vectors take the processor's own attention
ROWS = 4  # rows of the matrix added to the results in one go
STRIP = 2048  # results that stay in the first cache meanwhile


def emit_thin(target: Machine, wanted: Collection[str] = DTYPES) -> str:
    """LLVM text of the routines of the dtypes in `wanted`, those that the target has."""
    parts: list[str] = []
    declarations: dict[str, str] = {}
    for name in routines():
        way, dtype, count, *wide = name.split("_")
        if dtype not in wanted or (dtype in low_precision.DTYPES and dtype not in low_precision.dtypes(target)):
            continue
        if way == "panels":
            text, declared = gemv_panels.emit(target, name, dtype, ARGUMENTS, int(count), PLACES)
            declarations |= declared
            parts.append(text)
            continue
        body = _Thin(target, dtype, int(count), bool(wide))
        body.dot() if way == "dot" else body.spread()
        declarations |= body.code.declarations
        arguments = ", ".join(f"i64 %{argument}" for argument in ARGUMENTS)
        parts.append("\n".join([f"define void @{name}({arguments}) {{", *body.code.function_body(), "}"]))
    return "\n\n".join([*parts, *declarations.values()]) + "\n"


class _Thin:
    """One routine."""

    def __init__(self, target: Machine, dtype: str, count: int, wide: bool) -> None:
        self.code = Code(target)
        self.stored = dtype
        self.half = dtype in low_precision.DTYPES
        self.dtype = "f32" if self.half else dtype  # of sums
        self.count = count
        self.size = 2 if self.half else BITS[dtype] // 8
        self.wide = wide
        self.matrix_size = 4 if wide else self.size
        self.lanes = target.vector_bytes * 8 // BITS[self.dtype]
        self.taken = self.lanes * low_precision.per_word(target, dtype) if self.half else self.lanes  # elements in a
        # vector
        (self.matrix, self.step, self.inner, self.begin, self.end, places, self.element, self.result_step,
         scalars) = (Value(f"%{name}", "i64") for name in ARGUMENTS)
        self.vectors = [self.word(places, i) for i in range(count)]
        self.results = [self.word(places, PLACES + i) for i in range(count)]
        self.alpha = self.load(scalars)
        self.beta = self.load(self.plus(scalars, number(8)))
        self.adds = self.code.compare("une", self.beta, constant(self.dtype, 0))

    # small helpers

    def word(self, address: Value, index: int) -> Value:
        return self.code.load("i64", 0, self.pointer(self.plus(address, number(8 * index))), 0, pure=True)

    def pointer(self, address: Value) -> Value:
        return self.code.convert("inttoptr", address, "ptr")

    def plus(self, a: Value, b: Value) -> Value:
        return self.code.binary("add", a, b)

    def times(self, a: Value, b: Value) -> Value:
        return self.code.binary("mul", a, b)

    def load(self, address: Value, lanes: int = 0) -> Value:
        """Sums, or alpha or beta."""
        return self.code.load(self.dtype, lanes, self.pointer(address), self.code.top, False, BITS[self.dtype] // 8)

    def element_at(self, address: Value) -> Value:
        return half_precision.read(self.code, self.stored, 0, address) if self.half else self.load(address)

    def store(self, value: Value, address: Value) -> None:
        """One result."""
        if self.half:
            half_precision.write(self.code, self.stored, value, address)
        else:
            self.code.do(f"store {value.typed}, ptr {self.pointer(address).text}, align {self.size}")

    def get(self, slot: Value, lanes: int) -> Value:
        return self.code.load(self.dtype, lanes, slot, self.code.top, False)

    def set(self, slot: Value, value: Value) -> None:
        self.code.do(f"store {value.typed}, ptr {slot.text}")

    def first(self, address: Value, mask: Value) -> Value:
        """The masked first lanes at an address, zero in the others."""
        found = self.code.masked("load", constant(self.dtype, 0, self.lanes), self.pointer(address), mask, self.size,
                                 self.code.top, False)
        assert found is not None
        return found

    # dot

    def dot(self) -> None:
        """One row of the matrix at a time: a single stream is what the processor fetches ahead best (24 GB/s with one
        row, 15 with eight at once, of 25 GB/s that one core can read; Xeon 2.8 GHz, rows of 2 KB, 2026-11-21)."""
        code, lanes, taken = self.code, self.lanes, self.taken
        unroll = SUMS // self.count
        sums = [[code.slot(f"sum {i} {u}", self.dtype, lanes) for u in range(unroll)] for i in range(self.count)]
        j = code.open_loop(self.begin, self.end, 1)
        row = self.plus(self.matrix, self.times(j, self.step))
        for slot in itertools.chain(*sums):
            self.set(slot, constant(self.dtype, 0, lanes))

        def add(k: Value, mask: Value | None, u: int) -> None:
            at = self.times(k, number(self.size))
            place = self.plus(row, self.times(k, number(self.matrix_size)))
            factor = self.factors(place, mask, self.wide)
            if self.count == PLACES and mask is None:
                self.prefetch(self.plus(place, number(AHEAD)))
            for i, vector in enumerate(self.vectors):
                found = self.factors(self.plus(vector, at), mask)
                self.set(sums[i][u], self.multiply_add(found, factor, self.get(sums[i][u], lanes)))

        start = number(0)
        for step in dict.fromkeys((unroll, 1)):
            stop = self.plus(start, code.binary("and", code.binary("sub", self.inner, start), number(-taken * step)))
            k = code.open_loop(start, stop, taken * step)
            for u in range(step):
                add(self.plus(k, number(u * taken)), None, u)
            code.close_section()
            start = stop
        code.open_if(code.compare("slt", start, self.inner))
        add(start, code.first_lanes(code.binary("sub", self.inner, start), taken), 0)
        code.close_section()
        totals = [code.slot(f"total {i}", self.dtype, 0) for i in range(self.count)]
        places = [self.plus(result, self.times(j, self.result_step)) for result in self.results]
        for slots, total in zip(sums, totals, strict=True):
            parts = [self.get(slot, lanes) for slot in slots]
            while len(parts) > 1:
                parts = [code.binary("fadd", one, other) for one, other in zip(parts[::2], parts[1::2], strict=True)]
            self.set(total, code.binary("fmul", self.alpha, self.total(parts[0])))
        code.open_if(self.adds)
        for total, place in zip(totals, places, strict=True):
            self.set(total, code.fma(self.beta, self.element_at(place), self.get(total, 0)))
        code.close_section()
        for total, place in zip(totals, places, strict=True):
            self.store(self.get(total, 0), place)
        code.close_section()

    def factors(self, address: Value, mask: Value | None, wide: bool = False) -> Value:
        """A vector of factors, of pairs of them where the processor multiplies those."""
        if self.half:
            return half_precision.read_words(self.code, self.stored, address, mask, wide)
        return self.read(address, mask)

    def multiply_add(self, a: Value, b: Value, c: Value) -> Value:
        return half_precision.multiply_add(self.code, self.stored, a, b, c) if self.half else self.code.fma(a, b, c)

    def total(self, value: Value) -> Value:
        """The sum of the lanes."""
        name = f"llvm.vector.reduce.fadd.v{self.lanes}{SUFFIX[self.dtype]}"
        kind = llvm_type(self.dtype, 0)
        self.code.declare(kind, name, [kind, value.type])
        return self.code.put(f"call reassoc {kind} @{name}({constant(self.dtype, -0.0).typed}, {value.typed})",
                             self.dtype, 0, value.level)

    def prefetch(self, address: Value) -> None:
        self.code.declare("void", "llvm.prefetch.p0", ["ptr", "i32", "i32", "i32"])
        self.code.do(f"call void @llvm.prefetch.p0(ptr {self.pointer(address).text}, i32 0, i32 3, i32 1)")

    # spread

    def spread(self) -> None:
        code = self.code
        if self.half:
            code.stack_slots.append(f"  %strips = alloca [{STRIP * self.count} x float], align 64")
        strip = code.open_loop(self.begin, self.end, STRIP)
        stop = code.intrinsic("smin", self.plus(strip, number(STRIP)), self.end)
        # where the sums of each vector's results are, were there one at j = 0
        sums = [self.strip(i, strip) for i in range(self.count)] if self.half else self.results
        self.over(strip, stop, functools.partial(self.clear, sums))
        middle = code.binary("and", self.inner, number(-ROWS))
        for begin, end, rows in ((number(0), middle, ROWS), (middle, self.inner, 1)):
            k = code.open_loop(begin, end, rows)
            sources = [self.plus(self.matrix, self.times(self.plus(k, number(u)), self.step)) for u in range(rows)]
            factors = [[code.binary("fmul", self.alpha, self.element_at(self.plus(
                vector, self.times(self.plus(k, number(u)), self.element)))) for u in range(rows)]
                for vector in self.vectors]
            self.over(strip, stop, functools.partial(self.add, sums, sources, factors))
            code.close_section()
        if self.half:
            self.over(strip, stop, functools.partial(self.finish, sums))
        code.close_section()

    def strip(self, i: int, begin: Value) -> Value:
        """The address of vector i's sums, less the place of result `begin`."""
        base = self.code.convert("ptrtoint", Value("%strips", "ptr"), "i64")
        return self.plus(base, self.times(self.code.binary("sub", number(i * STRIP), begin), number(4)))

    def over(self, begin: Value, end: Value, body: Callable[[Value, Value | None], None]) -> None:
        """`body(number of the first result, mask or None)` for each vector of results begin..end-1."""
        code, lanes = self.code, self.lanes
        length = code.binary("sub", end, begin)
        whole = self.plus(begin, code.binary("and", length, number(-lanes)))
        j = code.open_loop(begin, whole, lanes)
        body(j, None)
        code.close_section()
        code.open_if(code.compare("slt", whole, end))
        body(whole, code.first_lanes(code.binary("sub", end, whole), lanes))
        code.close_section()

    def read(self, address: Value, mask: Value | None) -> Value:
        """A vector of elements."""
        if self.half:
            return half_precision.read(self.code, self.stored, self.lanes, address, mask)
        return self.load(address, self.lanes) if mask is None else self.first(address, mask)

    def read_matrix(self, address: Value, mask: Value | None) -> Value:
        """A vector of the matrix's elements."""
        if not self.wide:
            return self.read(address, mask)
        return half_precision.rounded(self.code, self.stored,
                                 half_precision.read_wide(self.code, self.lanes, address, mask))

    def sums_at(self, sums: Value, j: Value) -> Value:
        return self.plus(sums, self.times(j, number(BITS[self.dtype] // 8)))

    def read_sums(self, address: Value, mask: Value | None) -> Value:
        return self.load(address, self.lanes) if mask is None else self.first(address, mask)

    def write_sums(self, value: Value, address: Value, mask: Value | None) -> None:
        if mask is None:
            self.code.do(f"store {value.typed}, ptr {self.pointer(address).text}, align {BITS[self.dtype] // 8}")
        else:
            self.code.masked("store", value, self.pointer(address), mask, self.size, self.code.top, False)

    def clear(self, sums: list[Value], j: Value, mask: Value | None) -> None:
        """The sums before anything is added: beta times what the result is, or zero."""
        slots = [self.code.slot(f"old {i}", self.dtype, self.lanes) for i in range(self.count)]
        for slot in slots:
            self.set(slot, constant(self.dtype, 0, self.lanes))
        self.code.open_if(self.adds)
        for slot, result in zip(slots, self.results, strict=True):
            old = self.read(self.plus(result, self.times(j, number(self.size))), mask)
            self.set(slot, self.code.binary("fmul", self.beta, old))
        self.code.close_section()
        for slot, place in zip(slots, sums, strict=True):
            self.write_sums(self.get(slot, self.lanes), self.sums_at(place, j), mask)

    def add(self, sums: list[Value], sources: list[Value], factors: list[list[Value]], j: Value,
            mask: Value | None) -> None:
        """Adds some rows of the matrix to the sums."""
        places = [self.sums_at(place, j) for place in sums]
        totals = [self.read_sums(place, mask) for place in places]
        for u, source in enumerate(sources):
            row = self.read_matrix(self.plus(source, self.times(j, number(self.matrix_size))), mask)
            for i in range(self.count):
                totals[i] = self.code.fma(factors[i][u], row, totals[i])
        for total, place in zip(totals, places, strict=True):
            self.write_sums(total, place, mask)

    def finish(self, sums: list[Value], j: Value, mask: Value | None) -> None:
        """Rounds the sums into the results."""
        for place, result in zip(sums, self.results, strict=True):
            total = self.read_sums(self.sums_at(place, j), mask)
            half_precision.write(self.code, self.stored, total, self.plus(result, self.times(j, number(self.size))),
                                 mask)


def number(value: int) -> Value:
    """An i64 literal."""
    return constant("i64", value)
