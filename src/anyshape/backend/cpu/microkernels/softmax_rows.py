"""Softmax of rows of attention's scores, and its derivative, printed as LLVM.

    weigh     (scores, step, rows, columns, limit, grow, scale, mask, mask_step, sums, sums_step, factors)
              scores = softmax(scale * scores + mask); sums = log of the sum of each row's exponentials
              With factors, an address: scores are the exponentials, less the row's largest score, and what makes them
              weights is put there, 8 bytes from row to row. (Rounded so, a row's largest is exact.)
    unweigh   (scores, step, rows, columns, limit, grow, scale, mask, mask_step, sums, sums_step, gradients, products,
              products_step)
              scores = exp(scale * scores + mask - sums); gradients = scale * scores * (gradients - products)
              Where sums is large, digits of what was summed are lost beside the largest score (all of them where a mask
              is -1e9 in the whole row): there the exponentials are divided by their sum.

Row i sees its first limit + i * grow columns, at most all; the others become zero. Steps are bytes from row to row,
those of gradients are those of scores; elements of a row are next to each other. scale: the bits of a number. mask and
sums may be 0: none. A row
that sees nothing but minus infinity becomes zero, and its logarithm too. All take i64.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Collection

from anyshape.backend.cpu.llvm import vector_math
from anyshape.backend.cpu.llvm.ir_builder import BITS, SUFFIX, Code, Value, constant, llvm_type
from anyshape.backend.cpu.machine.target import Machine
from anyshape.backend.cpu.microkernels.tables.softmax_rows import ARGUMENTS, DTYPES, routines
from anyshape.ops.attention import FAR


def emit_attention(target: Machine, wanted: Collection[str] = DTYPES) -> str:
    """LLVM text of the routines of the dtypes in `wanted`."""
    parts: list[str] = []
    declarations: dict[str, str] = {}
    for name in routines():
        way, dtype = name.split("_")
        if dtype not in wanted:
            continue
        body = _Rows(target, dtype, ARGUMENTS[way])
        body.weigh() if way == "weigh" else body.unweigh()
        declarations |= body.code.declarations
        arguments = ", ".join(f"i64 %{argument}" for argument in ARGUMENTS[way])
        parts.append("\n".join([f"define void @{name}({arguments}) {{", *body.code.function_body(), "}"]))
    return "\n\n".join([*parts, *declarations.values()]) + "\n"


class _Rows:
    """One routine."""

    def __init__(self, target: Machine, dtype: str, arguments: tuple[str, ...]) -> None:
        self.code = Code(target)
        self.dtype = dtype
        self.item = BITS[dtype] // 8
        self.lanes = target.vector_bytes // self.item
        self.given = {name: Value(f"%{name}", "i64") for name in arguments}

    # small helpers

    def pointer(self, address: Value) -> Value:
        return self.code.convert("inttoptr", address, "ptr")

    def at(self, name: str, row: Value, step: str = "") -> Value:
        """The address of a row of an operand."""
        code = self.code
        return code.binary("add", self.given[name], code.binary("mul", row, self.given[step or f"{name}_step"]))

    def plus(self, row: Value, column: Value) -> Value:
        return self.code.binary("add", row, self.code.binary("mul", column, constant("i64", self.item)))

    def load(self, address: Value, mask: Value | None = None, other: float = 0.0) -> Value:
        code = self.code
        if mask is None:
            return code.load(self.dtype, self.lanes, self.pointer(address), code.top, False, self.item)
        found = code.masked("load", constant(self.dtype, other, self.lanes), self.pointer(address), mask, self.item,
                            code.top, False)
        assert found is not None
        return found

    def store(self, value: Value, address: Value, mask: Value | None = None) -> None:
        if mask is None:
            self.code.do(f"store {value.typed}, ptr {self.pointer(address).text}, align {self.item}")
        else:
            self.code.masked("store", value, self.pointer(address), mask, self.item, self.code.top, False)

    def scalar(self, address: Value) -> Value:
        return self.code.load(self.dtype, 0, self.pointer(address), self.code.top, False, self.item)

    def get(self, slot: Value) -> Value:
        return self.code.load(self.dtype, self.lanes, slot, self.code.top, False)

    def set(self, slot: Value, value: Value) -> None:
        self.code.do(f"store {value.typed}, ptr {slot.text}")

    def scalar_of(self, slot: Value) -> Value:
        return self.code.load(self.dtype, 0, slot, self.code.top, False)

    def slot(self, name: str, value: float) -> Value:
        slot = self.code.slot(name, self.dtype, self.lanes)
        self.set(slot, constant(self.dtype, value, self.lanes))
        return slot

    def reduced(self, operation: str, value: Value, start: float | None = None) -> Value:
        """All lanes as one: the largest, or, from `start`, the sum."""
        kind = llvm_type(self.dtype, 0)
        name = f"llvm.vector.reduce.{operation}.v{self.lanes}{SUFFIX[self.dtype]}"
        first = [] if start is None else [constant(self.dtype, start)]
        self.code.declare(kind, name, [*(x.type for x in first), value.type])
        arguments = ", ".join(x.typed for x in (*first, value))
        return self.code.put(f"call reassoc {kind} @{name}({arguments})", self.dtype, 0, value.level)

    def over(self, count: Value, body: Callable[[Value, Value | None], None]) -> None:
        """`body(column, mask or None)` for each vector of the first `count` columns."""
        code = self.code
        whole = code.binary("and", count, constant("i64", -self.lanes))
        column = code.open_loop(constant("i64", 0), whole, self.lanes)
        body(column, None)
        code.close_section()
        code.open_if(code.compare("slt", whole, count))
        body(whole, code.first_lanes(code.binary("sub", count, whole), self.lanes))
        code.close_section()

    # rows

    def open_row(self) -> tuple[Value, Value, Value]:
        """A loop over rows; its counter, the row's address, the columns that it sees."""
        code, given = self.code, self.given
        row = code.open_loop(constant("i64", 0), given["rows"], 1)
        seen = code.binary("add", given["limit"], code.binary("mul", row, given["grow"]))
        return row, self.at("scores", row, "step"), code.intrinsic("smin", seen, given["columns"])

    def over_scores(self, row: Value, seen: Value, body: Callable[[Value, Value | None, Value], None]) -> None:
        """`body(column, mask of lanes or None, scores)` for the first `seen` columns; of scores scaled and masked."""
        code, scores, masks = self.code, self.at("scores", row, "step"), self.at("mask", row)
        scale = self.scale()
        for test in ("ne", "eq"):
            code.open_if(code.compare(test, self.given["mask"], constant("i64", 0)))

            def scaled(column: Value, mask: Value | None, adds: bool) -> None:
                found = self.load(self.plus(scores, column), mask)
                body(column, mask, code.fma(scale, found, self.load(self.plus(masks, column), mask)) if adds
                     else code.binary("fmul", scale, found))

            self.over(seen, functools.partial(scaled, adds=test == "ne"))
            code.close_section()

    def scale(self) -> Value:
        """The scale, in all lanes."""
        code, bits = self.code, self.given["scale"]
        number = code.bits(code.convert("trunc", bits, "i32") if self.dtype == "f32" else bits, self.dtype)
        return code.spread(number, self.lanes)

    def clear(self, row: Value, seen: Value) -> None:
        """Zeros from column `seen` on."""
        code = self.code
        column = code.open_loop(seen, self.given["columns"], self.lanes)
        left = code.binary("sub", self.given["columns"], column)
        left = code.intrinsic("smin", left, constant("i64", self.lanes))
        self.store(constant(self.dtype, 0, self.lanes), self.plus(row, column), code.first_lanes(left, self.lanes))
        code.close_section()

    def weigh(self) -> None:
        code = self.code
        row, scores, seen = self.open_row()
        zero, infinity = constant(self.dtype, 0), float("inf")
        best, total = self.slot("best", -infinity), self.slot("total", 0)

        def largest(column: Value, mask: Value | None, found: Value) -> None:
            self.store(found, self.plus(scores, column), mask)
            if mask is not None:
                found = code.select(mask, found, constant(self.dtype, -infinity, self.lanes))
            before = self.get(best)
            self.set(best, code.select(code.compare("ogt", found, before), found, before))

        self.over_scores(row, seen, largest)
        top = self.reduced("fmax", self.get(best))
        top = code.select(code.compare("oeq", top, constant(self.dtype, -infinity)), zero, top)

        def exponential(column: Value, mask: Value | None) -> None:
            place = self.plus(scores, column)
            found = vector_math.exp(code, code.binary("fsub", self.load(place, mask, -infinity), top))
            self.set(total, code.binary("fadd", self.get(total), found))
            self.store(found, place, mask)

        self.over(seen, exponential)
        amount = self.reduced("fadd", self.get(total), -0.0)
        amount = code.select(code.compare("oeq", amount, zero), constant(self.dtype, 1), amount)
        factor = code.binary("fdiv", constant(self.dtype, 1), amount)

        def scale(column: Value, mask: Value | None) -> None:
            place = self.plus(scores, column)
            self.store(code.binary("fmul", self.load(place, mask), factor), place, mask)

        code.open_if(code.compare("ne", self.given["factors"], constant("i64", 0)))
        place = code.binary("add", self.given["factors"], code.binary("mul", row, constant("i64", 8)))
        code.do(f"store {factor.typed}, ptr {self.pointer(place).text}, align {self.item}")
        code.close_section()
        code.open_if(code.compare("eq", self.given["factors"], constant("i64", 0)))
        self.over(seen, scale)
        code.close_section()
        self.clear(scores, seen)
        code.open_if(code.compare("ne", self.given["sums"], constant("i64", 0)))
        logarithm = code.binary("fadd", top, vector_math.log(code, amount))
        code.do(f"store {logarithm.typed}, ptr {self.pointer(self.at('sums', row)).text}, align {self.item}")
        code.close_section()
        code.close_section()

    def unweigh(self) -> None:
        code = self.code
        row, scores, seen = self.open_row()
        gradients = self.at("gradients", row, "step")
        logarithm, product = self.scalar(self.at("sums", row)), self.scalar(self.at("products", row))
        factor = code.slot("factor", self.dtype, 0)
        self.set(factor, constant(self.dtype, 1))

        def add(column: Value, mask: Value | None, found: Value) -> None:
            weight = vector_math.exp(code, code.binary("fsub", found, logarithm))
            if mask is not None:
                weight = code.select(mask, weight, constant(self.dtype, 0, self.lanes))
            self.set(total, code.binary("fadd", self.get(total), weight))

        code.open_if(code.compare("ogt", code.intrinsic("fabs", logarithm), constant(self.dtype, FAR)))
        total = self.slot("total", 0)
        self.over_scores(row, seen, add)
        amount = self.reduced("fadd", self.get(total), -0.0)
        self.set(factor, code.binary("fdiv", constant(self.dtype, 1), amount))
        code.close_section()
        share, scale = self.scalar_of(factor), self.scale()

        def derive(column: Value, mask: Value | None, found: Value) -> None:
            other = self.plus(gradients, column)
            weight = code.binary("fmul", vector_math.exp(code, code.binary("fsub", found, logarithm)), share)
            self.store(weight, self.plus(scores, column), mask)
            change = code.binary("fsub", self.load(other, mask), product)
            self.store(code.binary("fmul", code.binary("fmul", scale, weight), change), other, mask)

        self.over_scores(row, seen, derive)
        self.clear(scores, seen)
        self.clear(gradients, seen)
        code.close_section()
