"""Direct convolution microkernel, channels last: some positions of the result by some of its channels, printed as LLVM.

    result [positions, channels] = biases + the sum over taps k of x[offsets[k] + places[positions]]
                                                                   * weights [k, channels]

The input lies with its padding written out, so a tap (input channel, place in the window) is an offset in bytes, and so
is a position: the indirect convolution of Dukhan (2019), with channels of the result as lanes, as in the tiles of
backend/cpu/microkernels/gemm.py. The sums stay in registers over all taps; input is never copied for a window (im2col).
There they are scaled and shifted by channel, too, which is batch norm in inference.

    conv_last   (x, offsets, taps, places, weights, scales, result, step, positions, channels, addend, least)   offsets,
            places: of i64, one a tap, and one a position of the tile; weights: a panel: biases, then of each tap one
            per channel, f32 all; scales: 0, or the factors of the channels and behind them their shifts; step: bytes
            from position to position of the result; positions, channels: how many are written; addend: 0, or bytes
            from where a number is written to what is added to it; least: bits of what the result is at least

`places` has as many entries as the tile has positions, also where fewer are written. All take i64.
"""
from __future__ import annotations

from collections.abc import Collection, Sequence

from anyshape.backend.cpu.llvm.ir_builder import Value, constant
from anyshape.backend.cpu.machine.target import Machine
from anyshape.backend.cpu.microkernels.routine import Routine, number
from anyshape.backend.cpu.microkernels.tables.direct_conv import DTYPES, HEIGHTS, grain
from anyshape.backend.cpu.microkernels.tables.direct_conv_last import HIGHEST, routines

ARGUMENTS = ("x", "offsets", "taps", "places", "weights", "scales", "result", "step", "positions", "channels",
             "addend", "least")


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
        body = _Tile(target, ARGUMENTS)
        body.emit(grain(target) * (HEIGHTS - height), vectors)
        declarations |= body.code.declarations
        parts.append(body.text(name))
    return "\n\n".join([*parts, *declarations.values()]) + "\n"


class _Tile(Routine):
    """One routine."""

    def emit(self, height: int, vectors: int) -> None:
        code, lanes = self.code, self.lanes
        x, offsets, taps, places, weights, scales, result, step, positions, channels, *_ = self.given(*ARGUMENTS)
        sums = [[code.slot(f"sum {i} {j}", "f32", lanes) for j in range(vectors)] for i in range(height)]
        for j in range(vectors):
            bias = self.load_vector(self.plus(weights, 4 * lanes * j), None)
            for i in range(height):
                self.set(sums[i][j], bias)
        starts = [self.plus(x, self.load("i64", 0, self.plus(places, 8 * i), 8)) for i in range(height)]
        tap = self.loop(taps)
        offset = self.load("i64", 0, self.plus(offsets, self.times(tap, 8)), 8)
        own = self.plus(weights, self.times(self.plus(tap, 1), 4 * lanes * vectors))
        factors = [self.load_vector(self.plus(own, 4 * lanes * j), None) for j in range(vectors)]
        for i in range(height):
            value = code.spread(self.load("f32", 0, self.plus(starts[i], offset), 4), lanes)
            for j in range(vectors):
                self.set(sums[i][j], code.fma(value, factors[j], self.get(sums[i][j])))
        code.close_section()
        self.scale(sums, scales)
        written = [[self.plus(self.plus(result, self.times(step, i)), 4 * lanes * j) for j in range(vectors)]
                   for i in range(height)]
        masks = [code.first_lanes(self.plus(channels, -lanes * j), lanes) for j in range(vectors)]
        whole = code.compare("sge", channels, number(lanes * vectors))
        for own_masks, test in ((None, whole), (masks, code.binary("xor", whole, constant("bool", True)))):
            code.open_if(test)
            for i in range(height):
                code.open_if(code.compare("slt", number(i), positions))
                self.epilogue(sums[i], written[i], own_masks)
                code.close_section()
            code.close_section()

    def scale(self, sums: Sequence[Sequence[Value]], scales: Value) -> None:
        """Multiplies the sums of each channel by its factor, and adds its shift."""
        code, vectors = self.code, len(sums[0])
        code.open_if(code.compare("ne", scales, number(0)))
        for j in range(vectors):
            factor = self.load_vector(self.plus(scales, 4 * self.lanes * j), None)
            shift = self.load_vector(self.plus(scales, 4 * self.lanes * (vectors + j)), None)
            for row in sums:
                self.set(row[j], code.fma(self.get(row[j]), factor, shift))
        code.close_section()
