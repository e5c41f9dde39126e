"""Prints a loop program as LLVM IR: row blocks, stages, column loops in vectors with a masked tail, reductions.

The text has four functions; `block` is int64*, the pointers of the params and then the sizes:

    void NAME(ptr block, i64 begin, i64 end, ptr scratch)   runs the row blocks begin to end
    i64 NAME_blocks(ptr block)                              number of row blocks
    i64 NAME_scratch(ptr block)                             bytes of scratch per thread, to be aligned to 64
    i64 NAME_work(ptr block)                                estimated scalar operations

Row schedule (`vector` is the last column variable): a row block is a row; a column stage runs a wide loop without
masks, then the rest in masked steps of the basic width. Column schedule (`vector` is the last row variable): a row
block is a strip of W values of it; the last strip is masked. With `vector` empty everything is scalar. With the
directive SplitReduction a row block is a part; with Tile, a strip of tiles (transpose_tiles.py); with Interchange, some
rows (interchange.py). Interleave makes other loops first (interleaved_access.py).

A param of role "in" may share memory with one of role "out" only if both are accessed at equal offsets at each point.
"""
from __future__ import annotations

import re
from collections.abc import Callable

from anyshape.backend.cpu.codegen.interchange import BLOCK, Interchanged, Strips, lower_interchange
from anyshape.backend.cpu.codegen.interleaved_access import lower_interleave
from anyshape.backend.cpu.codegen.memory_access import BufferAccess, Space
from anyshape.backend.cpu.codegen.nontemporal_stores import LINE, first_stored, is_large, past_line, streamed
from anyshape.backend.cpu.codegen.partial_sums import TURN, Folds, lower_split_reduction
from anyshape.backend.cpu.codegen.prefetch import ahead, ask, fetch, is_worth
from anyshape.backend.cpu.codegen.reduction import Reduction, chunk
from anyshape.backend.cpu.codegen.scan import Scan
from anyshape.backend.cpu.codegen.transpose_tiles import Strip, Tiles, lower_tile
from anyshape.backend.cpu.codegen.vector_widths import VectorLayout, work_of
from anyshape.backend.cpu.llvm.ir_builder import Code, Value, constant
from anyshape.backend.cpu.llvm.scalar_ops import scalar
from anyshape.backend.cpu.machine.target import Machine
from anyshape.base.errors import VerifyError
from anyshape.ir.types import size_of
from anyshape.kernel.loop_ir.directives import Interchange, Interleave, SplitReduction, Tile
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram, Stage
from anyshape.sym.expr import Size, ceildiv, product, symbols_of

WRITES = ("store", "stores", "scatter")


def emit(program: LoopProgram, target: Machine) -> str:
    """The LLVM IR of one kernel, the same text for the same program and target; VerifyError for a malformed one."""
    _check(program)
    folds = lower_split_reduction(lower_interleave(program))
    tiles = lower_tile(folds.program)
    strips = lower_interchange(tiles.program)
    program = strips.program
    block = tiles.rows if program.directive(Tile) else BLOCK if program.directive(Interchange) else 0
    layout = VectorLayout(program, target, block)
    kernel = _Kernel(folds, tiles, strips, target, layout)
    kernel.run()
    parts = [f"; kernel {program.name}", f'target triple = "{target.triple}"', ""]
    parts.append(f"define void @{program.name}(ptr nocapture readonly %block, i64 %begin, i64 %end, "
                 "ptr noalias nocapture %scratch) nounwind {")
    parts += kernel.code.function_body()
    parts += ["}", ""]
    outer = product(extent for _, extent in program.rows[:-1])
    rows = outer * program.rows[-1][1] if program.rows else 1
    blocks = outer * ceildiv(program.rows[-1][1], layout.block) if program.rows else 1
    split = program.directive(SplitReduction)
    if split is not None:
        blocks = split.parts
    for name, size in (("blocks", blocks), ("scratch", layout.scratch_bytes), ("work", rows * work_of(program))):
        parts += _size_function(program, target, name, size)
    parts += [kernel.code.declarations[name] for name in sorted(kernel.code.declarations)]
    if kernel.space.streamed:
        parts.append("!0 = !{i32 1}")
    return "\n".join(parts) + "\n"


def _check(program: LoopProgram) -> None:
    def fail(why: str) -> None:
        raise VerifyError(f"kernel {program.name} is malformed", why=why, do="report this as a bug of the compiler")

    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", program.name):
        fail(f"{program.name!r} is no name")
    _check_directives(program, fail)
    known = set(program.sizes)
    split = program.directive(SplitReduction)
    folds = any(one.op == "fold" for stage in program.stages for one in stage.instructions)
    by_row = program.columns and program.vector not in dict(program.rows)
    if (folds or split) and not (split and by_row):
        fail("folds need a split reduction and columns, and rows one by one")
    for extent in (*(extent for _, extent in program.rows), *((split.parts,) if split else ())):
        if not symbols_of(extent) <= known:
            fail(f"the extent {extent} is not over the kernel's sizes")
    known |= {name for name, _ in program.rows if name != program.vector and not split}
    for _, extent in program.columns:
        if not symbols_of(extent) <= known:
            fail(f"the extent {extent} is not over the kernel's sizes and rows")
    buffers = [p.name for p in program.params] + [s.name for s in program.scratch]
    if len(set(buffers)) != len(buffers):
        fail("two buffers have one name")
    for stage in program.stages:
        for one in stage.instructions:
            if one.buffer and one.buffer not in buffers:
                fail(f"%{one.result} uses the unknown buffer {one.buffer}")
            if one.op in ("reduce", "scan", "fold") and stage.level != "column":
                fail(f"%{one.result} reduces in a row stage")


def _check_directives(program: LoopProgram, fail: Callable[[str], None]) -> None:
    """Do the axes of the schedule fit the loops?"""
    lasts = [space[-1][0] if space else "" for space in (program.rows, program.columns)]
    if program.vector and program.vector not in lasts:
        fail(f"{program.vector} is not the last row or column variable")
    kinds = [type(one) for one in program.schedule]
    if len(set(kinds)) != len(kinds):
        fail("two directives of the schedule are of one kind")
    tile, interchange = program.directive(Tile), program.directive(Interchange)
    if tile is not None and (list(tile.axes) != lasts or len(program.columns) != 1 or program.vector != lasts[1]):
        fail(f"{tile}: these are not the last row variable, and the only column variable as a vector")
    if interchange is not None and not interchange.axis == program.vector == lasts[0]:
        fail(f"{interchange}: this is not the last row variable as a vector")
    inside = program.directive(Interleave)
    if inside is not None:
        loops = dict((*program.rows, *program.columns))
        if len(program.columns) != 1 or len(kinds) > 2 or program.columns[0][0] not in (inside.short, inside.long) \
                or inside.short == inside.long or not {inside.short, inside.long} <= loops.keys() \
                or not isinstance(loops[inside.short], int):
            fail(f"{inside}: these are not the only column variable and a row variable, one of them short")
    if (tile is not None and min(tile.sizes) < 1) or (interchange is not None and interchange.strip < 1):
        fail("a tile or a strip has no rows or columns")


def _size_function(program: LoopProgram, target: Machine, name: str, size: Size) -> list[str]:
    code = Code(target)
    space = Space(code)
    _bind_sizes(program, space)
    result = space.size(size)
    body = code.function_body()[:-1]
    return [f"define i64 @{program.name}_{name}(ptr nocapture readonly %block) nounwind {{", *body,
            f"  ret i64 {result.text}", "}", ""]


def _bind_sizes(program: LoopProgram, space: Space) -> None:
    block = Value("%block", "ptr")
    for k, name in enumerate(program.sizes, len(program.params)):
        at = space.code.address(block, "i64", constant("i64", k))
        space.names[name] = space.code.load("i64", 0, at, 0, True)


class _Kernel:
    """The main function under construction."""

    def __init__(self, folds: Folds, tiles: Tiles, strips: Interchanged, target: Machine, layout: VectorLayout) -> None:
        self.program = program = strips.program
        self.folds = folds
        self.tiles = tiles
        self.strips = strips
        self.asks, self.wanted = ahead(program)
        self.worth: Value | None = None
        self.columns: tuple[Value, Value] | None = None  # where a tile's columns begin and end
        self.layout = layout
        self.code = Code(target)
        self.space = Space(self.code, program.vector, apart=layout.rows_are_lanes or layout.interchanged)
        self.buffers: dict[str, BufferAccess] = {}
        self.reductions: dict[int, Reduction] = {}
        self.scans: dict[int, Scan] = {}
        self.stage_floor = 0
        self.stored: frozenset[str] = frozenset()

    # rows

    def run(self) -> None:
        """The whole body of the function."""
        code = self.code
        self._bind_buffers()
        self.space.streamed = streamed(self.program)
        if self.space.streamed:
            self.space.streams = is_large(self.program, self.space.streamed, self.space)
        self.worth = is_worth(self.program, self.wanted, self.space)
        begin, end = Value("%begin", "i64"), Value("%end", "i64")
        inside = code.compare("slt", begin, end)
        if self.space.streams is not None and self.layout.light:
            # apart, so that rows that are not streamed ask nothing about lines
            streams = self.space.streams
            code.open_if(code.binary("and", inside, code.binary("xor", streams, constant("bool", True))))
            self.space.streams = None
            self._rows(begin, end, self._row_extents())
            code.close_section()
            self.space.streams, inside = streams, code.binary("and", inside, streams)
        code.open_if(inside)
        extents = self._row_extents()
        split = self.program.directive(SplitReduction)
        if split is not None:
            self._parts(split, begin, end, extents)
        elif self.layout.interchanged:
            Strips(self.strips, self.space, self._along).run(begin, end, extents)
        else:
            self._rows(begin, end, extents)
        code.close_section()
        if self.space.streams is not None:
            code.do("fence seq_cst")  # streamed stores keep no order

    def _parts(self, split: SplitReduction, begin: Value, end: Value, extents: list[Value]) -> None:
        """The parts begin to end, each a few rows after another."""
        code, space = self.code, self.space
        number = code.intrinsic("smax", space.size(split.parts), constant("i64", 1))
        rows = constant("i64", 1)
        for extent in extents:
            rows = code.binary("mul", rows, extent)
        part = space.names[split.axis] = code.open_loop(begin, end, 1)
        first = code.binary("udiv", code.binary("mul", rows, part), number)
        stop = code.binary("udiv", code.binary("mul", rows, code.binary("add", part, constant("i64", 1))), number)
        self._beside(self.folds.start)
        turn = code.open_loop(first, stop, TURN)
        self._rows(turn, code.intrinsic("smin", stop, code.binary("add", turn, constant("i64", TURN))), extents)
        self._beside(self.folds.turn)
        code.close_section()
        code.close_section()

    def _beside(self, stage: Stage) -> None:
        """A column stage outside of rows."""
        self.space.registers = {}
        self.stored = frozenset(one.buffer for one in stage.instructions if one.op == "store")
        self._column_stage(stage, self.layout.width(stage))

    def _rows(self, begin: Value, end: Value, extents: list[Value]) -> None:
        """The row blocks begin to end."""
        code, space = self.code, self.space
        if self.layout.short_rows:
            self._short_rows(begin, end, extents)
            return
        counters = self._unflatten(begin, extents)
        code.open_loop(begin, end, 1)
        for (name, _), counter in zip(self.program.rows, counters, strict=True):
            space.names[name] = code.load("i64", 0, counter, code.top, False)
        now = [space.names[name] for name, _ in self.program.rows]
        if self.layout.rows_are_lanes:
            self._strip()
        elif self.layout.tiled:
            Strip(self.tiles, space, self.buffers).run(self._tile_row)
        else:
            self._stages()
        self._advance(counters, now, extents)
        code.close_section()

    def _short_rows(self, begin: Value, end: Value, extents: list[Value]) -> None:
        """The rows begin to end: those of the last row variable in a loop, at each value of the others, so that there
        is nothing to carry from row to row."""
        code, space = self.code, self.space
        *outer, last = extents
        last = code.intrinsic("smax", last, constant("i64", 1))
        first = code.binary("udiv", begin, last)
        after = code.binary("udiv", code.binary("add", end, code.binary("sub", last, constant("i64", 1))), last)
        counters = self._unflatten(first, outer)
        number = code.open_loop(first, after, 1)
        names = [name for name, _ in self.program.rows]
        for name, counter in zip(names[:-1], counters, strict=True):
            space.names[name] = code.load("i64", 0, counter, code.top, False)
        now = [space.names[name] for name in names[:-1]]
        before = code.binary("mul", number, last)
        start = code.intrinsic("smax", code.binary("sub", begin, before), constant("i64", 0))
        stop = code.intrinsic("smin", code.binary("sub", end, before), last)
        space.names[names[-1]] = code.open_loop(start, stop, 1)
        self._stages()
        code.close_section()
        self._advance(counters, now, outer)
        code.close_section()

    def _bind_buffers(self) -> None:
        code = self.code
        _bind_sizes(self.program, self.space)
        block = Value("%block", "ptr")
        for k, param in enumerate(self.program.params):
            at = code.address(block, "i64", constant("i64", k))
            self.buffers[param.name] = BufferAccess(param.name, param.dtype, code.load("ptr", 0, at, 0, True),
                                                    param.role)
        base = Value("%scratch", "ptr")
        for row_buffer in self.program.scratch:
            at = code.address(base, "i8", self.space.size(self.layout.scratch_offsets[row_buffer.name]))
            self.buffers[row_buffer.name] = BufferAccess(row_buffer.name, row_buffer.dtype, at, "scratch",
                                                   self.layout.rows_are_lanes)

    def _row_extents(self) -> list[Value]:
        sizes = [extent for _, extent in self.program.rows]
        if self.layout.block > 1:
            sizes[-1] = ceildiv(sizes[-1], self.layout.block)
        return [self.space.size(size) for size in sizes]

    def _unflatten(self, begin: Value, extents: list[Value]) -> list[Value]:
        """Stack slots that hold the row variables, set for row block `begin`."""
        code = self.code
        slots = [code.slot(f"row {k}", "i64", 0) for k in range(len(extents))]
        rest = begin
        for k in reversed(range(len(extents))):
            if k:
                safe = code.intrinsic("smax", extents[k], constant("i64", 1))
                value, rest = code.binary("urem", rest, safe), code.binary("udiv", rest, safe)
            else:
                value = rest
            code.do(f"store {value.typed}, ptr {slots[k].text}")
        return slots

    def _advance(self, slots: list[Value], now: list[Value], extents: list[Value]) -> None:
        """The next row block: counters with carry."""
        code = self.code
        carry: Value | None = None
        for k in reversed(range(len(slots))):
            step = constant("i64", 1) if carry is None else code.convert("zext", carry, "i64")
            following = code.binary("add", now[k], step)
            if k:
                carry = code.compare("sge", following, extents[k])
                following = code.select(carry, constant("i64", 0), following)
            code.do(f"store {following.typed}, ptr {slots[k].text}")

    def _strip(self) -> None:
        """One strip of the vector row variable: whole, or the masked rest."""
        code, space = self.code, self.space
        name, extent = self.program.rows[-1]
        space.lanes = self.layout.strip
        first = code.binary("mul", space.names[name], constant("i64", space.lanes))
        space.names[name] = first
        left = code.binary("sub", space.size(extent), first)
        whole = code.compare("sge", left, constant("i64", space.lanes))
        code.open_if(whole)
        space.lanes_from = code.top
        self._stages()
        code.close_section()
        code.open_if(code.compare("slt", left, constant("i64", space.lanes)))
        space.lanes_from = code.top
        space.mask = code.first_lanes(left, space.lanes)
        self._stages()
        code.close_section()
        space.mask = None
        space.lanes_from = 0

    def _along(self, stage: Stage, start: Value, stop: Value) -> None:
        """A stage for the rows start to stop of a strip."""
        self.stored = frozenset(one.buffer for one in stage.instructions if one.op in WRITES)
        self.stage_floor, self.space.registers = self.code.top, {}
        self._vector_loops(stage, self.program.vector, start, stop, self.layout.width(stage), ())

    def _tile_row(self, start: Value, stop: Value) -> None:
        """What a row does in the columns of a tile."""
        self.columns = start, stop
        self._stages()

    # stages

    def _stages(self) -> None:
        self.space.registers = {}
        for k, stage in enumerate(self.program.stages):
            self.stored = frozenset(one.buffer for one in stage.instructions if one.op in WRITES)
            if stage.level == "row":
                self.stage_floor = -1
                self._instructions(stage)
            else:
                self._column_stage(stage, self.layout.wide[k], self.wanted if k == self.asks else ())

    def _column_stage(self, stage: Stage, wide: int, wanted: tuple[tuple[str, Size], ...] = ()) -> None:
        """Accumulators, then the loops behind one test that no extent is 0, then the reduced registers. wanted: what to
        ask for beside."""
        code, space = self.code, self.space
        columns = self.program.columns
        lanes = (space.lanes,) if self.layout.rows_are_lanes else (wide, self.layout.basic)
        if not self.program.vector:
            lanes = (0,)
        self.reductions = {one.result: Reduction(code, one, lanes) for one in stage.instructions if one.op == "reduce"}
        self.scans = {one.result: Scan(code, one, space.lanes, self.layout.columns_are_lanes)
                      for one in stage.instructions if one.op == "scan"}
        before = dict(space.registers)
        extents = [space.size(extent) for _, extent in columns]
        if columns:
            inside = code.compare("sgt", extents[0], constant("i64", 0))
            for extent in extents[1:]:
                inside = code.binary("and", inside, code.compare("sgt", extent, constant("i64", 0)))
            code.open_if(inside)
        self.stage_floor = code.top
        inner = len(columns) - 1
        for k in range(inner):
            space.names[columns[k][0]] = code.open_loop(constant("i64", 0), extents[k], 1)
        if not columns:
            self._point(stage, 0)
            for reduction in self.reductions.values():
                reduction.flush(0)
        elif self.layout.columns_are_lanes:
            start, stop = self.columns or (constant("i64", 0), extents[inner])
            self._vector_loops(stage, columns[inner][0], start, stop, wide, wanted)
        else:
            self._chunked(stage, columns[inner][0], constant("i64", 0), extents[inner], 1, 0)
        for _ in range(inner):
            code.close_section()
        if columns:
            code.close_section()
        space.registers = before
        for register, reduction in self.reductions.items():
            space.registers[register] = reduction.finish(across=self.layout.columns_are_lanes)

    def _vector_loops(self, stage: Stage, name: str, start: Value, extent: Value, wide: int,
                      wanted: tuple[tuple[str, Size], ...]) -> None:
        """The innermost loop of the row schedule: wide steps, then masked steps of the basic width."""
        code, space = self.code, self.space
        begin = self._at_line(stage, name, start, extent)
        turns = 0 if begin is None else 1
        if begin is None:
            bulk = code.binary("and", extent, constant("i64", -wide))
        else:  # first what comes before the line, with no wide steps, then the rest
            turn = code.open_loop(code.convert("zext", code.compare("eq", begin, start), "i64"), constant("i64", 2), 1)
            first = code.compare("eq", turn, constant("i64", 0))
            extent = code.select(first, begin, extent)
            start = code.select(first, start, begin)
            steps = code.binary("and", code.binary("sub", extent, start), constant("i64", -wide))
            bulk = code.select(first, start, code.binary("add", start, steps))
        space.lanes = wide
        self._chunked(stage, name, start, bulk, wide, 0, wanted)
        space.lanes = self.layout.basic
        if self.layout.light and wide > space.lanes:  # the rest, while it fills a vector
            steps = code.binary("and", code.binary("sub", extent, bulk), constant("i64", -space.lanes))
            whole = code.binary("add", bulk, steps)
            space.names[name] = code.open_loop(bulk, whole, space.lanes)
            self._point(stage, 1)
            code.close_section()
            bulk = whole
        space.names[name] = code.open_loop(bulk, extent, space.lanes)
        space.left = code.binary("sub", extent, space.names[name])
        space.mask = code.first_lanes(space.left, space.lanes)
        self._point(stage, 1)
        for _ in range(1 + turns):
            code.close_section()
        space.lanes, space.mask, space.left = 0, None, None

    def _at_line(self, stage: Stage, name: str, start: Value, stop: Value) -> Value | None:
        """The first column from `start` on where a line begins, if results are streamed now; None where none are."""
        code, space = self.code, self.space
        one = first_stored(stage, space.streamed)
        if one is None or space.streams is None:
            return None
        buffer = self.buffers[one.buffer]
        space.names[name] = start
        ahead = code.binary("and", code.negate(past_line(code, buffer, space.size(one.offset))),
                            constant("i64", LINE // size_of(buffer.dtype) - 1))
        ahead = code.select(space.streams, ahead, constant("i64", 0))
        return code.intrinsic("smin", code.binary("add", start, ahead), stop)

    def _chunked(self, stage: Stage, name: str, start: Value, stop: Value, step: int, which: int,
                 wanted: tuple[tuple[str, Size], ...] = ()) -> None:
        """A loop; long float sums are cut into chunks whose sums are added up, so that rounding stays small."""
        code, space = self.code, self.space
        sums = [r for r in self.reductions.values() if r.is_chunked]
        if sums:
            length = chunk(step, self.program.columns[-1][1])
            start = code.open_loop(start, stop, length)
            stop = code.intrinsic("smin", stop, code.binary("add", start, constant("i64", length)))
        space.names[name] = code.open_loop(start, stop, step)
        ask(space, self.buffers, wanted, self.worth)
        self._point(stage, which)
        code.close_section()
        if sums:
            for reduction in sums:
                reduction.flush(which)
            code.close_section()

    def _point(self, stage: Stage, which: int) -> None:
        outside = dict(self.space.registers)
        for reduction in self.reductions.values():
            reduction.which = which
        self._instructions(stage)
        self.space.registers = outside

    # instructions

    def _instructions(self, stage: Stage) -> None:
        if stage.where:
            self.code.stack[self.code.top].lines.append(f"  ; {' '.join(stage.where.split())}")
        for one in stage.instructions:
            self._instruction(one)

    def _instruction(self, one: Instruction) -> None:
        code, space = self.code, self.space
        args = [space.registers[k] for k in one.args]
        if one.op == "load":
            buffer = self.buffers[one.buffer]
            level, pure = self._load_level(buffer)
            space.registers[one.result] = space.load(buffer, one, args[0] if args else None, level, pure)
        elif one.op in ("store", "scatter"):
            where = self.buffers[one.buffer], one.offset, args[0], args[1] if len(args) > 1 else None
            space.store(*where) if one.op == "store" else space.scatter(*where, one.combine)
        elif one.op == "loads":
            level, pure = self._load_level(self.buffers[one.buffer])
            found = space.load_interleaved(self.buffers[one.buffer], one, args[0] if args else None, level, pure)
            space.registers.update(enumerate(found, one.result))
        elif one.op == "stores":
            space.store_interleaved(self.buffers[one.buffer], one.offset, args)
        elif one.op == "check":
            self._check_lanes(self.buffers[one.buffer], args[0], args[1] if len(args) > 1 else None, one.value)
        elif one.op == "ask":
            fetch(space, self.buffers[one.buffer], one.offset)
        elif one.op == "constant":
            space.registers[one.result] = constant(one.dtype, one.value)
        elif one.op == "index":
            space.registers[one.result] = space.size(one.offset, wide=space.is_wide(one.offset))
        elif one.op == "scan":
            space.registers[one.result] = self.scans[one.result].next(args, space.mask, space.lanes)
        elif one.op == "reduce":
            self.reductions[one.result].add(args[0], space.mask)
        else:
            space.registers[one.result] = scalar(code, one.op, args, one.dtype)

    def _check_lanes(self, status: BufferAccess, holds: Value, mask: Value | None,
                     code_word: float | int | bool) -> None:
        """Where `holds` is false in a lane that exists, set the status word."""
        code = self.code
        failed = scalar(code, "not", [holds], "bool")
        active = self.space.active(mask)
        if active is not None and (active.lanes or not failed.lanes):
            failed = scalar(code, "and", [failed, active], "bool")
        elif active is not None:
            failed = scalar(code, "and", [failed, code.spread(active, failed.lanes)], "bool")
        code.open_if(code.any_of(failed))
        code.do(f"store i64 {int(code_word)}, ptr {status.pointer.text}, align 8")
        code.close_section()

    def _load_level(self, buffer: BufferAccess) -> tuple[int, bool]:
        """The outermost section a load may be moved to, and whether it may be shared.

        Loads of a column stage stay behind the test that there are columns; only what the kernel never writes is
        read before the row loop.
        """
        fixed = buffer.role == "in"
        if self.stage_floor < 0:
            return (1, True) if fixed else (self.code.top, False)
        if fixed or buffer.name not in self.stored:
            return self.stage_floor, fixed
        return self.code.top, False

