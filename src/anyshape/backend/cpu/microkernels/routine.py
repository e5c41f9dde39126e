"""IR builder of a microkernel routine: addresses are i64 and computed, elements f32 unless something else is said."""
from __future__ import annotations

from collections.abc import Sequence

from anyshape.backend.cpu.llvm.ir_builder import Code, Value, constant
from anyshape.backend.cpu.machine.target import Machine


def number(value: int) -> Value:
    """An i64 literal."""
    return constant("i64", value)


class Routine:
    """One routine under construction; `arguments` are i64."""

    def __init__(self, target: Machine, arguments: Sequence[str]) -> None:
        self.code = Code(target)
        self.lanes = target.lanes
        self.arguments = {name: Value(f"%{name}", "i64") for name in arguments}

    def given(self, *names: str) -> list[Value]:
        return [self.arguments[name] for name in names]

    # addresses

    def plus(self, a: Value, b: Value | int) -> Value:
        return self.code.binary("add", a, b if isinstance(b, Value) else number(b))

    def times(self, a: Value, b: Value | int) -> Value:
        return self.code.binary("mul", a, b if isinstance(b, Value) else number(b))

    def pointer(self, address: Value) -> Value:
        return self.code.convert("inttoptr", address, "ptr")

    # memory

    def load(self, dtype: str, lanes: int, address: Value, alignment: int) -> Value:
        return self.code.load(dtype, lanes, self.pointer(address), self.code.top, False, alignment)

    def store(self, value: Value, address: Value, alignment: int = 4) -> None:
        self.code.do(f"store {value.typed}, ptr {self.pointer(address).text}, align {alignment}")

    def load_vector(self, address: Value, mask: Value | None) -> Value:
        """A vector of f32; with a mask, its other lanes are 0 and not read."""
        if mask is None:
            return self.load("f32", self.lanes, address, 4)
        found = self.code.masked("load", constant("f32", 0, self.lanes), self.pointer(address), mask, 4, self.code.top,
                                 False)
        assert found is not None
        return found

    def store_vector(self, value: Value, address: Value, mask: Value | None) -> None:
        """A vector of f32; with a mask, its other lanes are not written."""
        if mask is None:
            self.store(value, address)
        else:
            self.code.masked("store", value, self.pointer(address), mask, 4, self.code.top, False)

    # slots, which stay in registers

    def get(self, slot: Value, dtype: str = "f32", lanes: int | None = None) -> Value:
        return self.code.load(dtype, self.lanes if lanes is None else lanes, slot, self.code.top, False)

    def set(self, slot: Value, value: Value) -> None:
        self.code.do(f"store {value.typed}, ptr {slot.text}")

    # loops and results

    def loop(self, stop: Value | int) -> Value:
        """Opens a loop from 0; its counter."""
        return self.code.open_loop(number(0), stop if isinstance(stop, Value) else number(stop), 1)

    def epilogue(self, sums: Sequence[Value], places: Sequence[Value], masks: Sequence[Value] | None) -> None:
        """The epilogue of a convolution: writes slots to places, of which `masks` say the lanes. Arguments of the
        routine are `addend`: 0, or bytes from where a number is written to what is added to it; and `least`: bits of
        what the result is at least."""
        code, (addend, least) = self.code, self.given("addend", "least")
        lanes: Sequence[Value | None] = masks or [None] * len(sums)
        code.open_if(code.compare("ne", addend, number(0)))
        for slot, place, mask in zip(sums, places, lanes, strict=True):
            self.set(slot, code.binary("fadd", self.get(slot), self.load_vector(self.plus(place, addend), mask)))
        code.close_section()
        floor = code.spread(code.bits(code.convert("trunc", least, "i32"), "f32"), self.lanes)
        for slot, place, mask in zip(sums, places, lanes, strict=True):
            found = self.get(slot)
            found = code.select(code.compare("olt", found, floor), floor, found)  # a NaN stays one
            self.store_vector(found, place, mask)

    def text(self, name: str) -> str:
        """The routine as LLVM text, without what `code.declarations` declares."""
        given = ", ".join(f"i64 %{argument}" for argument in self.arguments)
        return "\n".join([f"define void @{name}({given}) {{", *self.code.function_body(), "}"])
