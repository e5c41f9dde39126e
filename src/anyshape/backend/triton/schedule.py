"""Kernel schedules of a device: the tiles that a loop program is run by, with versions by regime of sizes.

    columns of the vector      R x C                        a program
      up to 16384              1024/C rows, C >= columns    persistent: a row's columns are in registers
      1/4 or 1/2 above 2^k     1 row, 2^k and 2^k/4 or /2   the same in two tiles, so that few lanes have no column
      more                     1 row                        looped: its columns in steps of 8192
      nothing spans them       1024 elements                a tile of the rows and columns
    rows of the vector         128 x 16                     a strip of rows that lie side by side
    a product                  128 x 128, 64 x 64           a tile of its result, by turns in groups of 8 rows of tiles

A persistent row has 32 elements a thread, with which an H200 came nearest to its copy (softmax and layer norm of
bfloat16, rows of 1000 and 4096, against 4, 8 and 16 elements). A looped row is read several times, and all but the
first ought to find it in the L2 cache: so a row has 32 warps, and few rows are begun at a time. Rows that begin
anywhere are read in aligned windows (codegen/window.py) by the same tiles.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from anyshape.backend.triton.codegen.form import GRID, LOOP, TILE, Form
from anyshape.backend.triton.codegen.online import one_pass
from anyshape.backend.triton.codegen.recompute import without_row_buffers
from anyshape.backend.triton.codegen.scatter import destination
from anyshape.backend.triton.codegen.sizes import bounds, is_injective
from anyshape.backend.triton.codegen.window import row_start
from anyshape.backend.triton.kernel import KernelVersion
from anyshape.backend.triton.text import function_text, module_text
from anyshape.kernel.loop_ir.directives import Product, SplitReduction
from anyshape.kernel.loop_ir.program import LoopProgram
from anyshape.sym.expr import Size, ceildiv, coefficient_of, minimum, product, symbols_of

ELEMENTS = 1024  # of a tile
WIDEST = 16384  # columns of a row in registers
STEP = 8192  # columns of a step of a long row
DOUBLED = 1024  # columns of a row in registers from which on it may have two tiles
FOLDED = 4096  # columns whose sums over rows are in registers
STRIP = 128  # rows of a strip's tile
WINDOWED = 64  # columns from which on rows that begin anywhere are read in windows
BUCKETS = 128  # that columns are shared out to by where they scatter
BUCKETED = 256  # columns whose destinations are looked at together
SPILLING = 1056  # programs whose row buffers lie in memory
PER_WARP, PER_PERSISTENT_WARP = 256, 1024  # elements
PRODUCTS = ((64, 64, 4, True), (128, 128, 8, False))  # rows, columns and warps of a tile; for few rows only
INNER = {"f32": 32, "bf16": 64, "f16": 64}  # terms of a product's step


@dataclass(frozen=True, slots=True)
class _Tile:
    """A form at its numbers of rows and columns."""

    name: str
    form: Form
    rows: int
    columns: int
    conditions: tuple[Size, ...] = ()
    more: int = 0  # columns of the second tile


def emit(program: LoopProgram) -> str:
    """The Triton text of a kernel: the same for the same program, always."""
    multiplied = program.directive(Product)
    if multiplied is not None:
        return _product(program, multiplied)
    plain = without_row_buffers(program)
    tiles = _tiles(program, plain)
    tiles = [*(one for tile in tiles for one in _windows(program, tile)), *tiles]
    texts: dict[Form, tuple[str, str]] = {}
    versions = []
    for tile in tiles:
        source = plain if plain is not None and tile.form.columns != TILE else program
        if _is_long(tile):
            source = one_pass(source)
        if tile.form not in texts:
            kind = "_window" if tile.form.window else "_buckets" if tile.form.buckets else ""
            kind = f"2{kind}" if tile.form.two else kind
            name = f"{program.name}_{tile.form.columns}{kind}"
            texts[tile.form] = name, function_text(source, tile.form, name)
        versions.append(_version(source, tile, texts[tile.form][0]))
    return module_text(program, [text for _, text in texts.values()], versions, bounds(program), _steps(program))


def _is_long(tile: _Tile) -> bool:
    """Are the columns of a row gone through in steps, as each reads them again?"""
    form = tile.form
    return form.columns == LOOP and tile.columns >= STEP // 2 and not form.points and not form.scratch


def _product(program: LoopProgram, multiplied: Product) -> str:
    """The text of a kernel that computes a product and reads it."""
    rows, columns = (product(extent for _, extent in loops) for loops in (program.rows, program.columns))
    name = f"{program.name}_product"
    terms = INNER[next(param.dtype for param in program.params if param.name == multiplied.left)]
    versions = [KernelVersion(f"product{down}x{across}", name, (down - rows,) if few else (),
                              (("R", down), ("C", across), ("K", terms)),
                              ceildiv(rows, down) * ceildiv(columns, across), warps)
                for down, across, warps, few in PRODUCTS]
    versions = [one for one in versions if not any(isinstance(size, int) and size < 0 for size in one.conditions)]
    named = (multiplied.inner, columns, *multiplied.strides)
    steps = sorted(frozenset().union(*map(_without_divisor, named)) & set(program.sizes))
    return module_text(program, [function_text(program, Form(GRID), name)], versions, bounds(program), steps)


def _tiles(program: LoopProgram, plain: LoopProgram | None) -> list[_Tile]:
    """The versions of a program, in order of choice. plain: the program without row buffers."""
    columns = product(extent for _, extent in program.columns)
    inside = [stage for stage in program.stages if stage.level == "column"]
    spans = {one.op for stage in inside for one in stage.instructions} & {"reduce", "scan"}
    points = _points(program)
    if program.directive(SplitReduction) is not None:
        return _folding(columns, bool(spans))
    strip = bool(program.rows) and program.vector == program.rows[-1][0]
    if not inside:
        rows = _up_to(program.rows[-1][1] if strip else product(extent for _, extent in program.rows), ELEMENTS)
        return [_Tile("flat", Form(LOOP, strip and len(program.rows) > 1), rows, 1)]
    general = plain if plain is not None else program
    form = Form(LOOP, strip, _points(general), SPILLING if general.scratch else 0)
    uneven = bool(symbols_of(columns) & {name for name, _ in program.rows})  # rows of different lengths
    if strip:
        some = 1 if points and uneven else _up_to(program.rows[-1][1], STRIP)
        across = 1 if len(form.points) == len([s for s in general.stages if s.level == "column"]) else _up_to(
            columns, ELEMENTS * 2 // some)
        return [*_buckets(program, form, some), _Tile("strips", form, some, across)]
    if points:
        width = _up_to(columns, ELEMENTS)
        rows = ELEMENTS // width if isinstance(columns, int) and not uneven else 1
        return [*_buckets(program, form, rows), _Tile("points", form, rows, width)]
    if len(inside) == 1 and not uneven and not spans and not program.scratch and _is_idempotent(program):
        return _pointwise(columns)
    found = _persistent(columns, _widest(program), "scan" not in spans) if _is_one_value(program) and not uneven else []
    # sums of 8 bytes take two registers each, of which AMD's threads have few where there are 1024
    wide = any(one.op == "reduce" and one.dtype in ("i64", "f64") for stage in inside for one in stage.instructions)
    step = STEP // 2 if wide else STEP
    return found if isinstance(columns, int) and found else [*found, _Tile("looped", form, 1, step)]


def _windows(program: LoopProgram, tile: _Tile) -> list[_Tile]:
    """The tile over aligned windows of its rows, where these begin anywhere and are not short."""
    form, start = tile.form, row_start(program)
    if start is None or form.strip or form.points or form.scratch or program.directive(SplitReduction) is not None \
            or tile.columns < 4 * WINDOWED or not _steps(program):
        return []
    columns = product(extent for _, extent in program.columns)
    fit = start[1] - 1 if form.columns == TILE else 0  # what is left of whole chunks is no part of the tiles
    least = tile.columns if form.two else WINDOWED
    conditions = (columns - least, *(one + fit for one in tile.conditions[form.two:]))
    if any(isinstance(size, int) and size < 0 for size in conditions):
        return []
    return [dataclasses.replace(tile, name=f"{tile.name}_window", form=dataclasses.replace(form, window=True),
                                conditions=tuple(size for size in conditions if not isinstance(size, int)))]


def _buckets(program: LoopProgram, form: Form, rows: int) -> list[_Tile]:
    """Scatters of many columns: programs share them out by where they go."""
    columns = product(extent for _, extent in program.columns)
    if destination(program) is None or (isinstance(columns, int) and columns < BUCKETED):
        return []
    return [_Tile("buckets", dataclasses.replace(form, buckets=BUCKETS), rows, BUCKETED,
                  () if isinstance(columns, int) else (columns - BUCKETED,))]


def _pointwise(columns: Size) -> list[_Tile]:
    """Tiles of rows and columns, side by side."""
    if isinstance(columns, int):
        width = _up_to(columns, ELEMENTS)
        return [_Tile(f"tiles{width}", Form(GRID), ELEMENTS // width, width)]
    return [*(_Tile(f"tiles{width}", Form(GRID), ELEMENTS // width, width, (width - columns,))
              for width in (16, 128)), _Tile("tiles", Form(GRID), 1, ELEMENTS)]


def _widest(program: LoopProgram) -> int:
    """The columns of a persistent row: fewer where more than 3 values of 4 bytes of each stay in registers."""
    inside = [one for stage in program.stages if stage.level == "column" for one in stage.instructions]
    last = program.columns[-1][0]
    kept = {(one.buffer, one.offset): 2 if one.dtype in ("i64", "f64") else 1 for one in inside
            if one.op == "load" and last in symbols_of(one.offset)}
    return WIDEST if sum(kept.values()) <= 3 else WIDEST // 2


def _persistent(columns: Size, widest: int, doubled: bool) -> list[_Tile]:
    """Tiles of whole rows. doubled: a row may have two, so that fewer lanes have no column."""
    found = []
    for width in [4, 16] + [1 << power for power in range(6, widest.bit_length())]:
        found.append(_Tile(f"rows{width}", Form(TILE), max(1, ELEMENTS // width), width, (width - columns,)))
        for more in (width // 4, width // 2) if DOUBLED <= width < widest and doubled else ():
            fits = columns - width, width + more - columns
            found.append(_Tile(f"rows{width + more}", Form(TILE, two=True), 1, width, fits, more))
    if not isinstance(columns, int):
        return found
    fitting = [one for one in found if all(size >= 0 for size in one.conditions if isinstance(size, int))]
    return [dataclasses.replace(one, conditions=()) for one in fitting[:1]]


def _folding(columns: Size, spans: bool) -> list[_Tile]:
    """Tiles of split reductions over rows."""
    if isinstance(columns, int) and (columns <= FOLDED or not spans):
        width = _up_to(columns, FOLDED if spans else 128)
        return [_Tile(f"parts{width}", Form(TILE if spans else GRID), max(1, 2 * ELEMENTS // width), width)]
    if not spans:
        return [_Tile("parts", Form(GRID), 16, 128)]
    return [*([] if isinstance(columns, int) else [
        _Tile(f"parts{width}", Form(TILE), max(1, 2 * ELEMENTS // width), width, (width - columns,))
        for width in (128, 512, 1024, 2048, 4096)]), _Tile("parts", Form(LOOP), 1, ELEMENTS)]


def _version(program: LoopProgram, tile: _Tile, function: str) -> KernelVersion:
    """The version of a tile."""
    form, rows = tile.form, product(extent for _, extent in program.rows)
    columns = product(extent for _, extent in program.columns)
    split = program.directive(SplitReduction)
    if split is not None:
        grid = split.parts
    elif form.strip:
        grid = product(extent for _, extent in program.rows[:-1]) * ceildiv(program.rows[-1][1], tile.rows)
    else:
        grid = ceildiv(rows, tile.rows)
    start = row_start(program) if form.window else None
    if form.columns == GRID:
        grid = grid * ceildiv(columns, tile.columns)
    grid = grid * max(form.buckets, 1)
    scratch: Size = 0
    if form.scratch:
        grid = minimum(grid, form.scratch)
        scratch = grid * tile.rows * sum((one.count * 8 for one in program.scratch), 0)
    elements = tile.rows * (1 if form.buckets else tile.columns + tile.more)
    most = 32 if tile.columns >= STEP // 2 and form.columns == LOOP else 8 if form.columns == LOOP else 16
    share = PER_PERSISTENT_WARP if form.columns == TILE and split is None else PER_WARP
    warps = max(1, min(most, 1 << (max(elements // share, 1).bit_length() - 1)))
    warps = 4 if form.columns == GRID else warps
    constants = (("R", tile.rows), ("C", tile.columns), *((("D", tile.more),) if form.two else ()))
    return KernelVersion(tile.name, function, tile.conditions, constants, grid, warps, scratch=scratch,
                         window=0 if start is None else start[1])


def _points(program: LoopProgram) -> frozenset[int]:
    """The column stages whose columns must be gone through in order: what they scatter, or store, may meet."""
    found = set()
    for number, stage in enumerate(program.stages):
        if stage.level == "column" and any(
                one.op == "scatter" or (one.op == "store" and not is_injective(one.offset, program.columns))
                or (one.op == "load" and one.buffer in {s.name for s in program.scratch}
                    and not is_injective(one.offset, program.columns)) for one in stage.instructions):
            found.add(number)
    return frozenset(found)


def _is_idempotent(program: LoopProgram) -> bool:
    """May several programs do the row stages of the same rows? Not if they store: what is read may be overwritten."""
    return not any(one.op in ("store", "scatter") for stage in program.stages if stage.level == "row"
                   for one in stage.instructions)


def _is_one_value(program: LoopProgram) -> bool:
    """Is each row buffer stored once, without a mask, and read behind that at the same place only?"""
    names = {one.name for one in program.scratch}
    stored: dict[str, Size] = {}
    for stage in program.stages:
        for one in stage.instructions:
            if one.buffer in names:
                if one.op == "store" and (len(one.args) > 1 or one.buffer in stored or stage.level == "row"):
                    return False
                if one.op == "store":
                    stored[one.buffer] = one.offset
                elif one.args or stored.get(one.buffer) != one.offset:
                    return False
    return True


def _steps(program: LoopProgram) -> Sequence[str]:
    """The sizes that strides of rows, and the number of columns, are made of."""
    found: set[str] = set()
    inner = program.vector
    for one in (one for stage in program.stages for one in stage.instructions):
        if one.op in ("load", "store", "scatter", "fold"):
            for name in (name for name, _ in (*program.rows, *program.columns) if name != inner):
                step = coefficient_of(one.offset, name)
                if step is not None and name in symbols_of(one.offset):
                    found |= _without_divisor(step[0])
    extent = dict((*program.rows, *program.columns)).get(inner, 1)
    return sorted((found | _without_divisor(extent)) & set(program.sizes))


def _without_divisor(step: Size) -> frozenset[str]:
    """The sizes of a step that is not a multiple of 16 bytes anyway."""
    if isinstance(step, int):
        return frozenset()
    return frozenset() if all(factor % 16 == 0 for _, factor in step.terms) else symbols_of(step)


def _up_to(count: Size, most: int) -> int:
    """The least power of two that is at least `count`, at most `most`."""
    return most if not isinstance(count, int) else min(most, 1 << max(count - 1, 0).bit_length())
