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

from anyshape.backend.cpu.llvm.ir_builder import constant
from anyshape.backend.cpu.machine.target import Machine
from anyshape.backend.cpu.microkernels.routine import Routine, number
from anyshape.backend.cpu.microkernels.tables.direct_conv import DTYPES, HEIGHTS, PLACE, TILES, grain

ARGUMENTS = ("x", "offsets", "taps", "weights", "result", "step", "channels", "positions", "addend",
             "least")
PLACE_ARGUMENTS = ("source", "target", "lines", "count", "step")


def emit_conv(target: Machine, wanted: Collection[str] = DTYPES) -> str:
    """LLVM text of the routines, where f32 is in `wanted`."""
    if "f32" not in wanted:
        return ""
    parts: list[str] = []
    declarations: dict[str, str] = {}
    for name in TILES:
        height, vectors = map(int, name.split("_")[2:])
        body = _Tile(target, ARGUMENTS)
        body.emit(grain(target) * (HEIGHTS - height), vectors)
        declarations |= body.code.declarations
        parts.append(body.text(name))
    place = _Tile(target, PLACE_ARGUMENTS)
    place.place()
    declarations |= place.code.declarations
    parts.append(place.text(PLACE))
    return "\n\n".join([*parts, *declarations.values()]) + "\n"


class _Tile(Routine):
    """One routine."""

    def place(self) -> None:
        """The routine that copies lines."""
        code, lanes = self.code, self.lanes
        source, target, lines, count, step = self.given(*PLACE_ARGUMENTS)
        line = self.loop(lines)
        here = self.plus(source, self.times(line, self.times(count, 4)))
        there = self.plus(target, self.times(line, step))
        bulk = code.binary("and", count, number(-lanes))
        at = self.times(code.open_loop(number(0), bulk, lanes), 4)
        self.store_vector(self.load_vector(self.plus(here, at), None), self.plus(there, at), None)
        code.close_section()
        left = code.binary("sub", count, bulk)
        code.open_if(code.compare("sgt", left, number(0)))
        mask, at = code.first_lanes(left, lanes), self.times(bulk, 4)
        self.store_vector(self.load_vector(self.plus(here, at), mask), self.plus(there, at), mask)
        code.close_section()
        code.close_section()

    def emit(self, height: int, vectors: int) -> None:
        code, lanes = self.code, self.lanes
        x, offsets, taps, weights, result, step, channels, positions, _addend, _least = self.given(*ARGUMENTS)
        sums = [[code.slot(f"sum {i} {j}", "f32", lanes) for j in range(vectors)] for i in range(height)]
        for i in range(height):
            bias = code.spread(self.load("f32", 0, self.plus(weights, 4 * i), 4), lanes)
            for j in range(vectors):
                self.set(sums[i][j], bias)
        tap = self.loop(taps)
        here = self.plus(x, self.load("i64", 0, self.plus(offsets, self.times(tap, 8)), 8))
        line = [self.load_vector(self.plus(here, 4 * lanes * j), None) for j in range(vectors)]
        own = self.plus(weights, self.times(self.plus(tap, 1), 4 * height))
        for i in range(height):
            factor = code.spread(self.load("f32", 0, self.plus(own, 4 * i), 4), lanes)
            for j in range(vectors):
                self.set(sums[i][j], code.fma(factor, line[j], self.get(sums[i][j])))
        code.close_section()
        places = [[self.plus(self.plus(result, self.times(step, i)), 4 * lanes * j) for j in range(vectors)]
                  for i in range(height)]
        whole = code.binary("and", code.compare("sge", channels, number(height)),
                            code.compare("sge", positions, number(lanes * vectors)))
        masks = [code.first_lanes(self.plus(positions, -lanes * j), lanes) for j in range(vectors)]
        code.open_if(whole)
        for i in range(height):
            self.epilogue(sums[i], places[i], None)
        code.close_section()
        code.open_if(code.binary("xor", whole, constant("bool", True)))
        for i in range(height):
            code.open_if(code.compare("slt", number(i), channels))
            self.epilogue(sums[i], places[i], masks)
            code.close_section()
        code.close_section()
