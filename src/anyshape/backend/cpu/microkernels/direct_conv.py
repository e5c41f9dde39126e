"""Direct convolution microkernel: some channels of the result over some neighbouring positions of a line, printed as
LLVM.

    result [channels, positions] = biases + the sum over taps k of weights [k, channels] * x[offsets[k] + positions]

The input lies with its padding written out, so a tap (input channel, place in the window) is an offset in bytes and no
position needs a test: the indirect convolution of Dukhan (2019), with positions as lanes. The sums stay in registers
over all taps, as in the tiles of backend/cpu/microkernels/gemm.py, and input is never copied for a window (im2col).

    conv    (x, offsets, taps, weights, result, step, channels, positions, addend, least)   x: of the first position;
            offsets: of i64, one a tap; weights: a panel: biases, then of each tap one per channel, f32 all; step: bytes
            from channel to channel of the result; channels, positions: how many are written; addend: 0, or bytes
            from where a number is written to what is added to it; least: bits of what the result is at least

    conv_place  (source, target, lines, count, step)   copies lines of `count` elements, one after another, to lines
            that begin `step` bytes apart

Up to a whole vector of positions is read that are not written. All take i64.
"""
from __future__ import annotations

from collections.abc import Collection

from anyshape.backend.cpu.llvm.ir_builder import Code, Value, constant
from anyshape.backend.cpu.machine.target import Machine

HEIGHTS = 3  # numbers of channels that a panel may have: 3, 2, 1 times `grain`
VECTORS = (1, 2)  # vectors of positions
ARGUMENTS = ("x", "offsets", "taps", "weights", "result", "step", "channels", "positions", "addend",
             "least")
PLACE_ARGUMENTS = ("source", "target", "lines", "count", "step")
DTYPES = ("f32",)
PLACE = "conv_place"
_TILES = [f"conv_f32_{height}_{vectors}" for height in range(HEIGHTS) for vectors in VECTORS]


def grain(target: Machine) -> int:
    """Channels of the smallest panel. The largest, of three times as many, fills the registers with sums."""
    return {64: 4, 32: 2}.get(target.vector_bytes, 1)


def routines() -> list[str]:
    """The names of all routines, in the order of the host's table of functions."""
    return [*_TILES, PLACE]


def emit_conv(target: Machine, wanted: Collection[str] = DTYPES) -> str:
    """LLVM text of the routines, where f32 is in `wanted`."""
    if "f32" not in wanted:
        return ""
    parts: list[str] = []
    declarations: dict[str, str] = {}
    for name in _TILES:
        height, vectors = map(int, name.split("_")[2:])
        body = _Tile(target)
        body.emit(grain(target) * (HEIGHTS - height), vectors)
        declarations |= body.code.declarations
        arguments = ", ".join(f"i64 %{argument}" for argument in ARGUMENTS)
        parts.append("\n".join([f"define void @{name}({arguments}) {{", *body.code.function_body(), "}"]))
    place = _Tile(target)
    place.place()
    declarations |= place.code.declarations
    arguments = ", ".join(f"i64 %{argument}" for argument in PLACE_ARGUMENTS)
    parts.append("\n".join([f"define void @{PLACE}({arguments}) {{", *place.code.function_body(), "}"]))
    return "\n\n".join([*parts, *declarations.values()]) + "\n"


class _Tile:
    """One routine."""

    def __init__(self, target: Machine) -> None:
        self.code = Code(target)
        self.lanes = target.lanes

    def plus(self, a: Value, b: Value | int) -> Value:
        return self.code.binary("add", a, b if isinstance(b, Value) else Value(str(b), "i64"))

    def times(self, a: Value, b: int) -> Value:
        return self.code.binary("mul", a, Value(str(b), "i64"))

    def load(self, dtype: str, lanes: int, address: Value, alignment: int) -> Value:
        return self.code.load(dtype, lanes, self.pointer(address), self.code.top, False, alignment)

    def pointer(self, address: Value) -> Value:
        return self.code.convert("inttoptr", address, "ptr")

    def place(self) -> None:
        """The routine that copies lines."""
        code, lanes = self.code, self.lanes
        source, target, lines, count, step = (Value(f"%{name}", "i64") for name in PLACE_ARGUMENTS)
        line = code.open_loop(Value("0", "i64"), lines, 1)
        here = self.plus(source, code.binary("mul", line, self.times(count, 4)))
        there = self.plus(target, code.binary("mul", line, step))
        bulk = code.binary("and", count, Value(str(-lanes), "i64"))
        at = self.times(code.open_loop(Value("0", "i64"), bulk, lanes), 4)
        value = self.load("f32", lanes, self.plus(here, at), 4)
        code.do(f"store {value.typed}, ptr {self.pointer(self.plus(there, at)).text}, align 4")
        code.close_section()
        left = code.binary("sub", count, bulk)
        code.open_if(code.compare("sgt", left, Value("0", "i64")))
        mask, at = code.first_lanes(left, lanes), self.times(bulk, 4)
        rest = code.masked("load", constant("f32", 0, lanes), self.pointer(self.plus(here, at)), mask, 4, code.top,
                           False)
        assert rest is not None
        code.masked("store", rest, self.pointer(self.plus(there, at)), mask, 4, code.top, False)
        code.close_section()
        code.close_section()

    def emit(self, height: int, vectors: int) -> None:
        code, lanes = self.code, self.lanes
        x, offsets, taps, weights, result, step, channels, positions, addend, least = (
            Value(f"%{name}", "i64") for name in ARGUMENTS)
        sums = [[code.slot(f"sum {i} {j}", "f32", lanes) for j in range(vectors)] for i in range(height)]

        def get(slot: Value) -> Value:
            return code.load("f32", lanes, slot, code.top, False)

        def put(slot: Value, value: Value) -> None:
            code.do(f"store {value.typed}, ptr {slot.text}")

        for i in range(height):
            bias = code.spread(self.load("f32", 0, self.plus(weights, 4 * i), 4), lanes)
            for j in range(vectors):
                put(sums[i][j], bias)
        tap = code.open_loop(Value("0", "i64"), taps, 1)
        here = self.plus(x, self.load("i64", 0, self.plus(offsets, self.times(tap, 8)), 8))
        line = [self.load("f32", lanes, self.plus(here, 4 * lanes * j), 4) for j in range(vectors)]
        own = self.plus(weights, self.times(self.plus(tap, 1), 4 * height))
        for i in range(height):
            factor = code.spread(self.load("f32", 0, self.plus(own, 4 * i), 4), lanes)
            for j in range(vectors):
                put(sums[i][j], code.fma(factor, line[j], get(sums[i][j])))
        code.close_section()
        rows = [self.plus(result, code.binary("mul", step, Value(str(i), "i64"))) for i in range(height)]
        whole = code.binary("and", code.compare("sge", channels, Value(str(height), "i64")),
                            code.compare("sge", positions, Value(str(lanes * vectors), "i64")))
        adds = code.compare("ne", addend, Value("0", "i64"))
        floor = code.spread(code.bits(code.convert("trunc", least, "i32"), "f32"), lanes)
        masks = [code.first_lanes(self.plus(positions, -lanes * j), lanes) for j in range(vectors)]

        def write(i: int, masked: bool) -> None:
            places = [self.plus(rows[i], 4 * lanes * j) for j in range(vectors)]
            code.open_if(adds)
            for j in range(vectors):
                pointer = self.pointer(self.plus(places[j], addend))
                other = code.masked("load", constant("f32", 0, lanes), pointer, masks[j], 4, code.top, False) \
                    if masked else code.load("f32", lanes, pointer, code.top, False, 4)
                assert other is not None
                put(sums[i][j], code.binary("fadd", get(sums[i][j]), other))
            code.close_section()
            for j in range(vectors):
                found = get(sums[i][j])
                found = code.select(code.compare("olt", found, floor), floor, found)  # a NaN stays one
                if masked:
                    code.masked("store", found, self.pointer(places[j]), masks[j], 4, code.top, False)
                else:
                    code.do(f"store {found.typed}, ptr {self.pointer(places[j]).text}, align 4")

        code.open_if(whole)
        for i in range(height):
            write(i, False)
        code.close_section()
        code.open_if(code.compare("eq", code.convert("zext", whole, "i64"), Value("0", "i64")))
        for i in range(height):
            code.open_if(code.compare("slt", Value(str(i), "i64"), channels))
            write(i, True)
            code.close_section()
        code.close_section()
