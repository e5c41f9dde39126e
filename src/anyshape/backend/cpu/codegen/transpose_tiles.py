"""Code for tiled transposition: blocks of rows and columns of which every line of memory is read once, and transposed
in registers.

A row block is some values of the last row variable. Its columns are taken a tile at a time: what lies across them is
read along the rows, transposed block by block and put into a row buffer; then the rows go along the columns, and load
from there. Where results are streamed, what a row does in a tile ends where a line of its result does: so a tile has
some columns of the one before.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anyshape.backend.cpu.codegen.memory_access import BufferAccess, Space
from anyshape.backend.cpu.codegen.nontemporal_stores import LINE, first_stored, past_line, streamed
from anyshape.backend.cpu.llvm.ir_builder import Code, Value, constant
from anyshape.ir.types import size_of
from anyshape.kernel.loop_ir.directives import Tile
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram, Scratch, Stage
from anyshape.sym.expr import coefficient_of, symbol

LANE = 16  # bytes within which an instruction shuffles freely
_ROW, _COLUMN = "tile row", "tile column"  # names of where a tile begins


@dataclass(frozen=True, slots=True)
class Tiles:
    """program: with the loads that lie across replaced by loads from the buffers of a tile. transposed: buffer name ->
    the load that it stands for. rows, columns: of a tile. before: how many columns of the tile before a tile has.
    width: columns of the buffers."""

    program: LoopProgram
    transposed: dict[str, Instruction]
    rows: int = 1
    columns: int = 0
    before: int = 0
    width: int = 0


def lower_tile(program: LoopProgram) -> Tiles:
    """See `Tiles`; nothing is replaced where the program has no tiles."""
    tile = program.directive(Tile)
    if tile is None:
        return Tiles(program, {})
    (row, column), (rows, columns) = tile.axes, tile.sizes
    kinds = {param.name: param.dtype for param in program.params}
    # columns that end a line of what is streamed, in whole blocks of what is transposed, which may be narrower
    across = {one.buffer for stage in program.stages for one in stage.instructions if one.result in tile.transposed}
    narrow = streamed(program)
    before = LINE // min(size_of(kinds[name]) for name in narrow | across) if narrow else 0
    width = columns + before
    place = (symbol(row) - symbol(_ROW)) * width + symbol(column) - symbol(_COLUMN)
    transposed: dict[str, Instruction] = {}
    stages = []
    for stage in program.stages:
        body = []
        for one in stage.instructions:
            if one.result in tile.transposed:
                name = f"tile {len(transposed)}"
                transposed[name] = one
                one = dataclasses.replace(one, buffer=name, offset=place)
            body.append(one)
        stages.append(Stage(stage.level, tuple(body), stage.where))
    room = tuple(Scratch(name, kinds[one.buffer], rows * width) for name, one in transposed.items())
    return Tiles(dataclasses.replace(program, stages=tuple(stages), scratch=room), transposed, rows, columns,
                 before, width)


class Strip:
    """Emits one strip of tiles."""

    def __init__(self, tiles: Tiles, space: Space, buffers: dict[str, BufferAccess]) -> None:
        self.tiles = tiles
        self.space = space
        self.code: Code = space.code
        self.buffers = buffers
        self.sources = {name: buffers[one.buffer] for name, one in tiles.transposed.items()}

    def run(self, body: Callable[[Value, Value], None]) -> None:
        """The strip whose number is the last row variable's value; `body(start, stop)` emits a row's columns."""
        code, space = self.code, self.space
        name, extent = self.tiles.program.rows[-1]
        column, columns = self.tiles.program.columns[-1]
        first = code.binary("mul", space.names[name], constant("i64", self.tiles.rows))
        after = code.intrinsic("smin", space.size(extent), code.binary("add", first, constant("i64", self.tiles.rows)))
        last = space.size(columns)
        start = code.open_loop(constant("i64", 0), last, self.tiles.columns)
        stop = code.intrinsic("smin", last, code.binary("add", start, constant("i64", self.tiles.columns)))
        space.names[_ROW], space.names[_COLUMN] = first, self._begin(start)
        for buffer, one in self.tiles.transposed.items():
            space.names[column] = code.open_loop(space.names[_COLUMN], stop, _side(code, self.sources[buffer]))
            space.names[name] = code.open_loop(first, after, _side(code, self.sources[buffer]))
            self._fill(self.sources[buffer], self.buffers[buffer], one, after, stop)
            code.close_section()
            code.close_section()
        space.names[name] = code.open_loop(first, after, 1)
        body(self._at_line(start), self._at_line(stop, last))
        code.close_section()
        code.close_section()

    def _begin(self, start: Value) -> Value:
        """The first column in the buffers of the tile at `start`."""
        code, streams = self.code, self.space.streams
        if streams is None:
            return start
        before = code.select(streams, constant("i64", self.tiles.before), constant("i64", 0))
        return code.intrinsic("smax", code.binary("sub", start, before), constant("i64", 0))

    def _at_line(self, column: Value, last: Value | None = None) -> Value:
        """The column where the line of the streamed result begins that `column` is in; the first and last stay."""
        code, space = self.code, self.space
        stage = next(stage for stage in self.tiles.program.stages if stage.level == "column")
        one = first_stored(stage, space.streamed)
        if one is None or space.streams is None:
            return column
        space.names[self.tiles.program.vector] = column
        back = past_line(code, self.buffers[one.buffer], space.size(one.offset))
        stays = code.compare("eq", column, constant("i64", 0) if last is None else last)
        moves = code.select(stays, constant("bool", False), space.streams)
        return code.binary("sub", column, code.select(moves, back, constant("i64", 0)))

    def _fill(self, source: BufferAccess, tile: BufferAccess, one: Instruction, after: Value, stop: Value) -> None:
        """One block at the row and column that stand in the names: read along the rows, written along the columns. At
        the last columns the very last is read again; rows that are not there are masked."""
        code, space = self.code, self.space
        row, column = self.tiles.program.rows[-1][0], self.tiles.program.vector
        side = _side(code, source)
        found = coefficient_of(one.offset, column)
        assert found is not None
        step, begin = space.size(found[0]), code.address(source.pointer, source.stored, space.size(one.offset))
        most = code.binary("sub", code.binary("sub", stop, space.names[column]), constant("i64", 1))
        steps = [code.binary("mul", step, code.intrinsic("smin", most, constant("i64", k))) for k in range(side)]
        pointers = [code.address(begin, source.stored, offset) for offset in steps]
        left = code.binary("sub", after, space.names[row])
        place = code.binary("add", code.binary("mul", code.binary("sub", space.names[row], space.names[_ROW]),
                                               constant("i64", self.tiles.width)),
                            code.binary("sub", space.names[column], space.names[_COLUMN]))
        align = size_of(source.dtype)
        for whole in (True, False):
            code.open_if(code.compare("sge" if whole else "slt", left, constant("i64", side)))
            mask = None if whole else code.first_lanes(left, side)
            lines = []
            for pointer in pointers:
                if mask is None:
                    lines.append(code.load(source.stored, side, pointer, code.top, False, align))
                else:
                    found_line = code.masked("load", constant(source.stored, 0, side), pointer, mask, align, code.top,
                                             False)
                    assert found_line is not None
                    lines.append(found_line)
            for k, line in enumerate(transposed(code, lines, size_of(source.dtype))):
                line_place = code.binary("add", place, constant("i64", k * self.tiles.width))
                at = code.address(tile.pointer, tile.stored, line_place)
                code.do(f"store {line.typed}, ptr {at.text}, align {align}")
            code.close_section()


def _side(code: Code, source: BufferAccess) -> int:
    """Rows and columns of a block: as many as fill a register, or half of one with elements of a byte."""
    return min(2 * code.target.lanes, code.target.vector_bytes // size_of(source.dtype))


def transposed(code: Code, lines: Sequence[Value], size: int) -> list[Value]:
    """The columns of a square block given by its lines, in elements of `size` bytes.

    Within every LANE bytes first, so that squares of as many elements are transposed where they are; then those squares
    change places.
    """
    side = len(lines)
    group = min(max(LANE // size, 1), side)
    found: list[Value] = []
    for start in range(0, side, group):
        square = list(lines[start:start + group])
        for _ in range(group.bit_length() - 1):
            half = len(square) // 2
            square = [new for a, b in zip(square[:half], square[half:], strict=True)
                      for new in (code.merge(a, b, _within(side, group, 0)),
                                  code.merge(a, b, _within(side, group, group // 2)))]
        found += square
    result: list[Value | None] = [None] * side
    for k in range(group):
        across = found[k::group]  # the k-th of every square
        for _ in range((side // group).bit_length() - 1):
            pairs = list(zip(across[::2], across[1::2], strict=True))
            across = [code.merge(a, b, _squares(side, group, 0)) for a, b in pairs]
            across += [code.merge(a, b, _squares(side, group, 1)) for a, b in pairs]
        for j, value in enumerate(across):
            result[j * group + k] = value
    return [value for value in result if value is not None]


def _within(side: int, group: int, first: int) -> list[int]:
    """Of every group of two lines: the elements from `first` on, by turns."""
    return [start + first + k // 2 + (k % 2) * side for start in range(0, side, group) for k in range(group)]


def _squares(side: int, group: int, odd: int) -> list[int]:
    """The even groups of one line and then of the other, or the odd ones."""
    return [start + k for start in range(odd * group, 2 * side, 2 * group) for k in range(group)]
