"""Direct convolution microkernel, channels last: some positions of the result by some of its channels, printed as LLVM.

    result [positions, channels] = biases + the sum over taps k of x[offsets[k] + places[positions]]
                                                                   * weights [k, channels]

The input lies with its padding written out, so a tap (input channel, place in the window) is an offset in bytes, and so
is a position: the indirect convolution of Dukhan (2019), with channels of the result as lanes, as in the tiles of
backend/cpu/microkernels/gemm.py. The sums stay in registers over all taps; input is never copied for a window (im2col).

    conv_last   (x, offsets, taps, places, weights, result, step, positions, channels, addend, least)   offsets, places:
            of i64, one a tap, and one a position of the tile; weights: a panel: biases, then of each tap one per
            channel, f32 all; step: bytes from position to position of the result; positions, channels: how many are
            written; addend: 0, or bytes from where a number is written to what is added to it; least: bits of what the
            result is at least

`places` has as many entries as the tile has positions, also where fewer are written. All take i64.
"""
from __future__ import annotations

from collections.abc import Collection

from anyshape.backend.cpu.llvm.ir_builder import Code, Value, constant
from anyshape.backend.cpu.machine.target import Machine
from anyshape.backend.cpu.microkernels.direct_conv import DTYPES, HEIGHTS, VECTORS, grain

ARGUMENTS = ("x", "offsets", "taps", "places", "weights", "result", "step", "positions", "channels", "addend", "least")
# times `grain` positions at most, by vectors: registers hold the sums and a number of each position, for LLVM loads all
# of these first
HIGHEST = {1: 3, 2: 2}


def routines() -> list[str]:
    """The names of all routines, in the order of the host's table of functions."""
    return [f"conv_last_f32_{height}_{vectors}" for height in range(HEIGHTS) for vectors in VECTORS]


def emit_conv_last(target: Machine, wanted: Collection[str] = DTYPES) -> str:
    """LLVM text of the routines, where f32 is in `wanted`."""
    if "f32" not in wanted:
        return ""
    parts: list[str] = []
    declarations: dict[str, str] = {}
    for name in routines():
        height, vectors = map(int, name.split("_")[3:])
        if HEIGHTS - height > HIGHEST[vectors]:
            continue
        body = _Tile(target)
        body.emit(grain(target) * (HEIGHTS - height), vectors)
        declarations |= body.code.declarations
        arguments = ", ".join(f"i64 %{argument}" for argument in ARGUMENTS)
        parts.append("\n".join([f"define void @{name}({arguments}) {{", *body.code.function_body(), "}"]))
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

    def get(self, slot: Value) -> Value:
        return self.code.load("f32", self.lanes, slot, self.code.top, False)

    def put(self, slot: Value, value: Value) -> None:
        self.code.do(f"store {value.typed}, ptr {slot.text}")

    def emit(self, height: int, vectors: int) -> None:
        code, lanes = self.code, self.lanes
        x, offsets, taps, places, weights, result, step, positions, channels, addend, least = (
            Value(f"%{name}", "i64") for name in ARGUMENTS)
        sums = [[code.slot(f"sum {i} {j}", "f32", lanes) for j in range(vectors)] for i in range(height)]
        for j in range(vectors):
            bias = self.load("f32", lanes, self.plus(weights, 4 * lanes * j), 4)
            for i in range(height):
                self.put(sums[i][j], bias)
        starts = [self.plus(x, self.load("i64", 0, self.plus(places, 8 * i), 8)) for i in range(height)]
        tap = code.open_loop(Value("0", "i64"), taps, 1)
        offset = self.load("i64", 0, self.plus(offsets, self.times(tap, 8)), 8)
        own = self.plus(weights, self.times(self.plus(tap, 1), 4 * lanes * vectors))
        factors = [self.load("f32", lanes, self.plus(own, 4 * lanes * j), 4) for j in range(vectors)]
        for i in range(height):
            number = code.spread(self.load("f32", 0, self.plus(starts[i], offset), 4), lanes)
            for j in range(vectors):
                self.put(sums[i][j], code.fma(number, factors[j], self.get(sums[i][j])))
        code.close_section()
        adds = code.compare("ne", addend, Value("0", "i64"))
        floor = code.spread(code.bits(code.convert("trunc", least, "i32"), "f32"), lanes)
        masks = [code.first_lanes(self.plus(channels, -lanes * j), lanes) for j in range(vectors)]
        whole = code.compare("sge", channels, Value(str(lanes * vectors), "i64"))

        def write(i: int, masked: bool) -> None:
            row = self.plus(result, code.binary("mul", step, Value(str(i), "i64")))
            for j in range(vectors):
                place = self.plus(row, 4 * lanes * j)
                code.open_if(adds)
                pointer = self.pointer(self.plus(place, addend))
                other = code.masked("load", constant("f32", 0, lanes), pointer, masks[j], 4, code.top, False) \
                    if masked else code.load("f32", lanes, pointer, code.top, False, 4)
                assert other is not None
                self.put(sums[i][j], code.binary("fadd", self.get(sums[i][j]), other))
                code.close_section()
                found = self.get(sums[i][j])
                found = code.select(code.compare("olt", found, floor), floor, found)  # a NaN stays one
                if masked:
                    code.masked("store", found, self.pointer(place), masks[j], 4, code.top, False)
                else:
                    code.do(f"store {found.typed}, ptr {self.pointer(place).text}, align 4")

        for masked, test in ((False, whole), (True, code.binary("xor", whole, constant("bool", True)))):
            code.open_if(test)
            for i in range(height):
                code.open_if(code.compare("slt", Value(str(i), "i64"), positions))
                write(i, masked)
                code.close_section()
            code.close_section()
