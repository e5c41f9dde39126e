"""Loop-nest construction from evaluated code: joins loops, chooses columns and the vector variable, drops dead code,
names.

    rows (i0: b, i1: n), x[i0*n + i1]      -->      rows (i1: n0) vector i1, p0[i1]      with n0 = b*n

Names and numbers are given in the order of use, so that equal kernels of different graphs become equal programs.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from anyshape.kernel.loop_ir.def_use import EFFECTS, used
from anyshape.kernel.loop_ir.directives import SplitReduction, Vectorize
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram, Param, Scratch, Stage
from anyshape.sym.expr import Size, floordiv, maximum, product, substitute, symbol, symbols_of

Loops = tuple[tuple[str, Size], ...]


@dataclass(frozen=True, slots=True)
class Nest:
    """Code in terms of the graph's values and sizes.

    rows, columns: (variable, extent), outermost first; inner_row: the innermost loop of all is one over rows.
    params: value name -> dtype in memory, in the order of first use ("" is the status word); stored: those written.
    scratch: (name, dtype) of the row buffers, each as long as the columns; no value has such a name.
    updated: those of the stored ones that a scatter writes into: they hold something before.
    split: the split of reductions over rows, if there are any.
    """

    rows: Loops
    columns: Loops
    inner_row: bool
    stages: tuple[Stage, ...]
    params: Mapping[str, str]
    stored: frozenset[str]
    scratch: tuple[tuple[str, str], ...]
    updated: frozenset[str] = frozenset()
    split: SplitReduction | None = None


def program_of(nest: Nest, vector_lanes: int) -> tuple[LoopProgram, tuple[str, ...]]:
    """The loop program, without a name, and the graph's size symbol behind each of its sizes.

    vector_lanes: steps of a loop that is a vector, below which it takes its neighbour in.
    """
    rows, stages = _joined(nest.rows, nest.stages, vector_lanes if nest.inner_row or not nest.columns else 0)
    columns, stages = _joined(nest.columns, stages)
    if not columns and len(rows) >= 2:
        rows, columns = rows[:-1], rows[-1:]
        stages = _by_column(stages, columns[0][0])
    rows = rows or (() if columns else (("i0", 1),))
    # over columns with rows innermost in memory, a strip of neighbouring rows is one vector
    strip = nest.columns and nest.inner_row and rows
    vector = rows[-1][0] if strip or not columns else columns[-1][0]
    stages = _without_dead(stages)
    split = (nest.split,) if nest.split is not None else ()
    symbols = _symbols(stages, (*rows, *columns, *((one.axis, one.parts) for one in split)))
    sizes: dict[str, Size] = {name: symbol(f"n{k}") for k, name in enumerate(symbols)}
    buffers = {value: f"p{k}" for k, value in enumerate(nest.params)}
    scratch = {name: f"t{k}" for k, (name, _) in enumerate(nest.scratch)}
    params = tuple(Param(buffers[name], dtype, _role(nest, name)) for name, dtype in nest.params.items())
    count = maximum(1, substitute(product(extent for _, extent in columns), sizes))
    program = LoopProgram(
        "", params, tuple(f"n{k}" for k in range(len(symbols))),
        tuple((variable, substitute(extent, sizes)) for variable, extent in rows),
        tuple((variable, substitute(extent, sizes)) for variable, extent in columns),
        (Vectorize(vector), *(SplitReduction(one.axis, substitute(one.parts, sizes)) for one in split)),
        tuple(_renamed(stage, {**buffers, **scratch}, sizes) for stage in stages if stage.instructions),
        tuple(Scratch(scratch[name], dtype, count) for name, dtype in nest.scratch))
    return program, symbols


def _role(nest: Nest, name: str) -> str:
    if name in nest.updated:
        return "inout"
    return "out" if name in nest.stored or name == "" else "in"


def _joined(loops: Loops, stages: tuple[Stage, ...], short: int = 0) -> tuple[Loops, tuple[Stage, ...]]:
    """Make neighbouring loops one wherever every offset steps through them as through one. short: an innermost loop of
    fewer steps than that also becomes one with the next where some offsets count that one alone."""
    for position in range(len(loops) - 2, -1, -1):
        outer, (inner, inner_size) = loops[position][0], loops[position + 1]
        few = position == len(loops) - 2 and isinstance(inner_size, int) and 1 < inner_size < short
        changed = _as_one(stages, outer, inner, inner_size, few)
        if changed is not None:
            extent = loops[position][1] * inner_size
            loops = (*loops[:position], (inner, extent), *loops[position + 2:])
            stages = tuple(Stage(stage.level, tuple(
                dataclasses.replace(i, offset=changed.get(i.offset, i.offset)) for i in stage.instructions))
                for stage in stages)
    return loops, stages


def _as_one(stages: tuple[Stage, ...], outer: str, inner: str, inner_size: Size, few: bool) -> dict[Size, Size] | None:
    """Offset -> offset over one loop `inner` in place of two; None when some offset does not step evenly. few: those
    of `outer` alone may be quotients then."""
    changed: dict[Size, Size] = {}
    for stage in stages:
        for offset in (i.offset for i in stage.instructions):
            if offset in changed or not {outer, inner} & symbols_of(offset):
                continue
            # with outer = 0 the offset must give everything back when inner counts on through both loops
            alone = substitute(offset, {outer: 0})
            if substitute(alone, {inner: symbol(outer) * inner_size + symbol(inner)}) == offset:
                changed[offset] = alone
            elif few and inner not in symbols_of(offset):
                changed[offset] = substitute(offset, {outer: floordiv(symbol(inner), inner_size)})
            else:
                return None
    return changed


def _by_column(stages: tuple[Stage, ...], column: str) -> tuple[Stage, ...]:
    """Split straight-line row code in what depends on the column variable and what does not (which comes first)."""
    varying: set[int] = set()
    before: list[Instruction] = []
    inside: list[Instruction] = []
    for stage in stages:
        for i in stage.instructions:
            if i.op in ("store", "scatter") or column in symbols_of(i.offset) or varying & set(used(i)):
                inside.append(i)
                varying.add(i.result)
            else:
                before.append(i)
    return Stage("row", tuple(before)), Stage("column", tuple(inside))


def _without_dead(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    wanted: set[int] = set()
    kept: list[Stage] = []
    for stage in reversed(stages):
        instructions: list[Instruction] = []
        for i in reversed(stage.instructions):
            if i.op in EFFECTS or i.result in wanted:
                wanted.update(used(i))
                instructions.append(i)
        kept.append(Stage(stage.level, tuple(reversed(instructions)), stage.where))
    return tuple(reversed(kept))


def _symbols(stages: tuple[Stage, ...], loops: Loops) -> tuple[str, ...]:
    """The size symbols of the program, in the order of first use: equal programs get equal numbers."""
    variables = {variable for variable, _ in loops}
    found: dict[str, None] = {}
    for size in [*(extent for _, extent in loops), *(i.offset for s in stages for i in s.instructions)]:
        for name in sorted(symbols_of(size)):
            if name not in variables and not name.startswith("%"):
                found[name] = None
    return tuple(found)


def _renamed(stage: Stage, buffers: Mapping[str, str], sizes: Mapping[str, Size]) -> Stage:
    return Stage(stage.level, tuple(
        dataclasses.replace(i, buffer=buffers[i.buffer], offset=substitute(i.offset, sizes))
        if i.op in ("load", *EFFECTS) else dataclasses.replace(i, offset=substitute(i.offset, sizes))
        for i in stage.instructions), stage.where)
