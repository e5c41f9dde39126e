"""Winograd convolution microkernel, F(2x2, 3x3): four neighbouring results of a window of 3x3 by 16 products instead of
36 (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2016, section 4.1), printed as LLVM.

    results 2x2 = A^T ((G weights G^T) * (B^T inputs B)) A        summed over channels in front of A

A tile is two lines of two results; the lanes of a vector are neighbouring tiles. All factors of the transforms are 1
and 1/2. A result depends on the inputs of its own window alone, but sums of them are rounded: its error is
bounded by the largest input of the window and the sum of the weights, not by each product. Where an input is not
finite, or a sum overflows, a result may be NaN that is a number or an infinity by definition: that is said in `flag`.

    winograd_weights   (weight, channels, target, step, far)   weight: [channels, 3, 3] of one channel of the result;
                       step: bytes of the channels of a block; target: [channels, 4, block] (channel, point across
                       lines), at this channel of the block; far: bytes from there to the next point along a line
    winograd_input     (x, line, plane, channels, target)   x: of the first tile's first input; line, plane: bytes from
                       line to line and channel to channel; target: [4, channels, 4, lanes] (point along the line,
                       channel, point across lines)
    winograd_H         (inputs, channels, weights, sums, far)   a block of H channels at one point along the line:
                       inputs [channels, 4, lanes], weights [channels, 4, H]; sums: [H, lanes] of the first line of
                       results, and those of the second, `far` bytes after them
    winograd_write     (sums, outs, biases, result, step, line, positions, lines, addend, least, flag)   sums:
                       [4, 2, outs, lanes] (point along the line, line of results); step, line: bytes from channel to
                       channel and line to line of the result; positions, lines: how many are written; addend, least:
                       as in backend/cpu/microkernels/direct_conv.py; flag: of an i64, which is set to 1

All take i64, and elements are f32. Up to a line and three vectors of inputs are read that no result is made of.
"""
from __future__ import annotations

from collections.abc import Callable, Collection

from anyshape.backend.cpu.llvm.ir_builder import Value, constant
from anyshape.backend.cpu.machine.target import Machine
from anyshape.backend.cpu.microkernels.routine import Routine, number
from anyshape.backend.cpu.microkernels.tables.winograd_conv import ARGUMENTS, most

DTYPES = ("f32",)
POINTS = 4  # of a tile along a line, and across lines


def emit_winograd(target: Machine, wanted: Collection[str] = DTYPES) -> str:
    """LLVM text of the routines, where f32 is in `wanted`."""
    if "f32" not in wanted:
        return ""
    parts: list[str] = []
    declarations: dict[str, str] = {}
    for name, arguments in ARGUMENTS.items():
        emit: dict[str, Callable[[_Winograd], None]] = {
            "winograd_weights": _Winograd.weights, "winograd_input": _Winograd.inputs,
            "winograd_write": _Winograd.write}
        routine = _Winograd(target, arguments)
        if name in emit:
            emit[name](routine)
        elif int(name.split("_")[1]) <= most(target):
            routine.block(int(name.split("_")[1]))
        else:
            continue
        declarations |= routine.code.declarations
        parts.append(routine.text(name))
    return "\n\n".join([*parts, *declarations.values()]) + "\n"


class _Winograd(Routine):
    """One routine."""

    def add(self, a: Value, b: Value) -> Value:
        return self.code.binary("fadd", a, b)

    def less(self, a: Value, b: Value) -> Value:
        return self.code.binary("fsub", a, b)

    # G g G^T

    def weights(self) -> None:
        """`winograd_weights`: G g G^T of one channel of the result, for each channel of the inputs."""
        weight, channels, target, step, far = self.arguments.values()
        channel = self.loop(channels)
        here = self.plus(weight, self.times(channel, 36))
        lines = [[self.load("f32", 0, self.plus(here, 4 * (3 * y + x)), 4) for x in range(3)] for y in range(3)]
        across = [self.points(*(line[x] for line in lines)) for x in range(3)]
        for i in range(POINTS):
            for j, value in enumerate(self.points(*(across[x][i] for x in range(3)))):
                place = self.times(self.plus(self.times(channel, POINTS), i), step)
                self.store(value, self.plus(target, self.plus(self.times(far, j), place)))
        self.code.close_section()

    def points(self, a: Value, b: Value, c: Value) -> list[Value]:
        half = constant("f32", 0.5)
        ends = self.add(a, c)
        return [a, self.code.binary("fmul", self.add(ends, b), half),
                self.code.binary("fmul", self.less(ends, b), half), c]

    # B^T d B

    def inputs(self) -> None:
        """`winograd_input`: B^T d B of so many tiles as a vector has lanes, for each channel."""
        x, line, plane, channels, target = self.arguments.values()
        code, lanes = self.code, self.lanes
        channel = self.loop(channels)
        here = self.plus(x, self.times(channel, plane))
        lines = [[self.load_vector(self.plus(self.plus(here, self.times(line, y)), 4 * lanes * part), None)
                  for part in range(3)] for y in range(POINTS)]
        across = [self.differences(*(one[part] for one in lines)) for part in range(3)]
        for i in range(POINTS):
            first, second, third = (across[part][i] for part in range(3))
            even, odd = (code.merge(first, second, range(start, 2 * lanes, 2)) for start in (0, 1))
            later = [code.merge(one, third, [*range(1, lanes), lanes + k]) for k, one in enumerate((even, odd))]
            for j, value in enumerate(self.differences(even, odd, *later)):
                place = self.plus(self.times(self.plus(self.times(channels, j), channel), POINTS), i)
                self.store(value, self.plus(target, self.times(place, 4 * lanes)))
        code.close_section()

    def differences(self, a: Value, b: Value, c: Value, d: Value) -> list[Value]:
        return [self.less(a, c), self.add(b, c), self.less(c, b), self.less(b, d)]

    # A^T (u * v) A

    def block(self, height: int) -> None:
        """`winograd_H`: sums over channels of products of both, of `height` channels of the result."""
        given, code, lanes = self.arguments, self.code, self.lanes
        sums = [[code.slot(f"sum {i} {k}", "f32", lanes) for k in range(height)] for i in range(POINTS)]
        for row in sums:
            for slot in row:
                self.set(slot, constant("f32", 0, lanes))
        channel = self.loop(given["channels"])
        place = self.times(channel, POINTS)
        own, line = (self.plus(given[name], self.times(place, size))
                     for name, size in (("weights", 4 * height), ("inputs", 4 * lanes)))
        for i in range(POINTS):
            value = self.load_vector(self.plus(line, 4 * lanes * i), None)
            for k in range(height):
                factor = code.spread(self.load("f32", 0, self.plus(own, 4 * (height * i + k)), 4), lanes)
                self.set(sums[i][k], code.fma(factor, value, self.get(sums[i][k])))
        code.close_section()
        for k in range(height):
            for turn, value in enumerate(self.results(*(self.get(sums[i][k]) for i in range(POINTS)))):
                self.store(value, self.plus(self.plus(given["sums"], self.times(given["far"], turn)), 4 * lanes * k))

    def results(self, a: Value, b: Value, c: Value, d: Value) -> tuple[Value, Value]:
        return self.add(self.add(a, b), c), self.less(self.less(b, c), d)

    def write(self) -> None:
        """`winograd_write`: A^T m A, the results of a line of tiles, and the flag."""
        given, code, lanes = self.arguments, self.code, self.lanes
        wrong = code.slot("wrong", "f32", lanes)
        self.set(wrong, constant("f32", 0, lanes))
        whole = code.compare("sge", given["positions"], number(2 * lanes))
        for masked in (False, True):
            code.open_if(code.binary("xor", whole, constant("bool", masked)))
            self.write_channels(masked, wrong)
            code.close_section()
        found = self.get(wrong)
        code.open_if(code.any_of(code.compare("uno", found, found)))
        code.do(f"store i64 1, ptr {self.pointer(given['flag']).text}")
        code.close_section()

    def write_channels(self, masked: bool, wrong: Value) -> None:
        given, code, lanes = self.arguments, self.code, self.lanes
        k = self.loop(given["outs"])
        bias = code.spread(self.load("f32", 0, self.plus(given["biases"], self.times(k, 4)), 4), lanes)
        row = self.plus(given["result"], self.times(k, given["step"]))
        line = self.loop(given["lines"])
        each = self.times(given["outs"], 4 * lanes)
        at = self.plus(self.plus(given["sums"], self.times(each, line)), self.times(k, 4 * lanes))
        parts = self.results(*(self.load_vector(self.plus(at, self.times(each, 2 * j)), None) for j in range(POINTS)))
        for part in parts:  # a product of something that is not finite with 0 is NaN
            self.set(wrong, code.fma(part, constant("f32", 0, lanes), self.get(wrong)))
        both = [self.add(part, bias) for part in parts]
        place = self.plus(row, self.times(line, given["line"]))
        for half in range(2):
            picks = [start + k // 2 + k % 2 * lanes for start in (half * lanes // 2,) for k in range(lanes)]
            self.write_vector(code.merge(both[0], both[1], picks), self.plus(place, 4 * lanes * half),
                              self.plus(given["positions"], -lanes * half) if masked else None)
        code.close_section()
        code.close_section()

    def write_vector(self, value: Value, place: Value, positions: Value | None) -> None:
        """A vector of neighbouring results, of which `positions` are written, or all."""
        slot = self.code.slot("written", "f32", self.lanes)
        self.set(slot, value)
        self.epilogue([slot], [place], None if positions is None else [self.code.first_lanes(positions, self.lanes)])
