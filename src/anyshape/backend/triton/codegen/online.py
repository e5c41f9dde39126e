"""Online reductions: two passes over a long row, of which the second waits for the first one's result, become one.

    columns (i1: n1)                       columns (i1: n1)
      r0: f32 = load p0[i0*n1 + i1]          r0: f32 = load p0[i0*n1 + i1]
      r1: f32 = reduce maximum r0            r5: f32 = reduce sum_exp r0, r1
    columns (i1: n1)                -->
      r2: f32 = load p0[i0*n1 + i1]
      r3: f32 = sub r2, r1
      r4: f32 = exp r3
      r5: f32 = reduce add r4

A combined reduction gives two registers, its result and its second operand. What it keeps is put right when more
columns come:

    sum_exp   the maximum, and the sum of exp(x - maximum): rescaled by exp(old - new maximum) (Milakov and Gimelshein,
              "Online normalizer calculation for softmax", 2018)
    squares   number, sum, and sum of (x - mean)**2: the pairwise update of Chan, Golub and LeVeque ("Algorithms for
              computing the sample variance", 1983), which does not cancel as the sum of x**2 would

Each keeps a value for `chunk` columns side by side, which one thread has: their own maximum, or mean, is found first,
so that a column takes one exponential, and no division.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from anyshape.backend.triton.codegen.scalars import TYPES
from anyshape.ir.types import size_of
from anyshape.kernel.loop_ir.aliasing import overwritable
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram, Stage
from anyshape.sym.expr import product, substitute, symbol

COMBINED = SUM_EXP, SQUARES = "sum_exp", "squares"
CHUNK = 16  # bytes
_INFINITE = 'float("inf")'


def one_pass(program: LoopProgram) -> LoopProgram:
    """The program with such pairs of column stages as one; the program itself where there are none."""
    stages = list(program.stages)
    first = 0
    while first < len(stages):
        between = first + 1
        while between < len(stages) and stages[between].level == "row":
            between += 1
        found = _joined(program, stages, first, between) if between < len(stages) else None
        if found is not None:
            stages[first] = found
            del stages[between]
            continue
        first += 1
    return program if len(stages) == len(program.stages) else dataclasses.replace(program, stages=tuple(stages))


def chunk_of(one: Instruction, program: LoopProgram) -> int:
    """How many columns side by side a combined reduction puts together first."""
    widths = [size_of(param.dtype) for param in program.params if param.dtype in ("bf16", "f16", "f32", "f64")]
    return max(2, CHUNK // min(widths, default=size_of(one.dtype)))


def _joined(program: LoopProgram, stages: Sequence[Stage], first: int, second: int) -> Stage | None:
    """The column stage `first` with what the column stage `second` reduces; None where that is not of these forms."""
    early, late = stages[first], stages[second]
    if early.level != "column" or late.level != "column":
        return None
    same = _same(program, stages, first, second)
    if same is None:
        return None
    own = [one for one in late.instructions if one.result not in same]
    if [one.op for one in own] not in (["sub", "exp", "reduce"], ["sub", "mul", "reduce"]) or own[2].combine != "add":
        return None
    apart, middle, total = own
    value, shift = same.get(apart.args[0], -1), apart.args[1]
    if shift in same or set(middle.args) != {apart.result} or total.args != (middle.result,):
        return None
    for place, one in enumerate(early.instructions):
        if one.op == "reduce" and one.args == (value,) and one.dtype == total.dtype and (
                (one.combine == "maximum" and middle.op == "exp" and shift == one.result)
                or (one.combine == "add" and middle.op == "mul"
                    and _is_mean(program, stages[first + 1:second], shift, one.result))):
            combined = dataclasses.replace(total, args=(value, one.result),
                                           combine=SUM_EXP if middle.op == "exp" else SQUARES)
            left = early.instructions[:place] + early.instructions[place + 1:]
            return dataclasses.replace(early, instructions=(*left, combined))
    return None


def _same(program: LoopProgram, stages: Sequence[Stage], first: int, second: int) -> dict[int, int] | None:
    """The registers of stage `second` that have the value of one of stage `first`, and which; None where what it reads
    is written meanwhile, or it does more than to compute."""
    names = [param.name for param in program.params]
    over = {(names[source], names[out]) for source, out in overwritable(program)}
    written = {one.buffer for stage in stages[:second] for one in stage.instructions if one.op in ("store", "scatter")}
    written |= {source for source, out in over if out in written}
    known = {dataclasses.replace(one, result=0): one.result for one in stages[first].instructions}
    same: dict[int, int] = {}
    for one in stages[second].instructions:
        if one.op in ("store", "scatter", "fold", "check", "scan") or one.buffer in written:
            return None
        key = dataclasses.replace(
            one, result=0, args=tuple(same.get(arg, arg) for arg in one.args),
            offset=substitute(one.offset, {f"%{old}": symbol(f"%{new}") for old, new in same.items()}))
        if key in known and one.op != "reduce":
            same[one.result] = known[key]
    return same


def _is_mean(program: LoopProgram, between: Sequence[Stage], register: int, total: int) -> bool:
    """Is the register of a row stage the sum `total` by the number of columns?"""
    made = {one.result: one for stage in between for one in stage.instructions}
    one = made.get(register)
    if one is None or len(one.args) != 2 or one.args[0] != total or one.op not in ("div", "mul"):
        return False
    by, count = made.get(one.args[1]), product(extent for _, extent in program.columns)
    while by is not None and by.op == "cast":
        by = made.get(by.args[0])
    if by is None:
        return False
    if by.op == "index":
        return one.op == "div" and by.offset == count
    if by.op != "constant" or not isinstance(count, int):
        return False
    return by.value == count if one.op == "div" else abs(float(by.value) * count - 1) < 1e-6


# ---- as text; r is the number of the result

def begin(one: Instruction, chunk: int) -> list[str]:
    """What is kept, before any column."""
    start = (f"-{_INFINITE}", "0.0") if one.combine == SUM_EXP else ("0.0", "0.0", "0.0")
    return [f"a{one.result}_{i} = tl.full([R, C // {chunk}], {number}, {TYPES[one.dtype]})"
            for i, number in enumerate(start)]


def step(one: Instruction, chunk: int, value: str, mask: str, left: str) -> list[str]:
    """A step of C columns. value, mask: of its lanes, [R, C]. left: how many of them exist in a row, the first ones."""
    r, shape = one.result, f"[R, C // {chunk}, {chunk}]"
    if one.combine == SUM_EXP:
        return [f"v{r} = tl.reshape(tl.where({mask}, {value}, -{_INFINITE}), {shape})",
                f"most{r} = _max(a{r}_0, tl.reduce(v{r}, 2, _max))",
                f"shift{r} = _finite(most{r})",
                f"a{r}_1 = a{r}_1 * tl.exp(a{r}_0 - shift{r})"
                f" + tl.reduce(tl.exp(v{r} - shift{r}[:, :, None]), 2, _add)",
                f"a{r}_0 = most{r}"]
    # a mask that is reshaped would have a layout of its own, and pass through shared memory
    return [f"c{r} = tl.minimum(tl.maximum({left} - tl.arange(0, C // {chunk})[None, :] * {chunk}, 0), {chunk})",
            f"n{r} = tl.where(rmask, c{r}, 0).to({TYPES[one.dtype]})",
            f"k{r} = tl.arange(0, {chunk})[None, None, :] < n{r}[:, :, None]",
            f"v{r} = tl.reshape(tl.where({mask}, {value}, 0.0), {shape})",
            *_deviations(one, "tl.reduce({}, 2, _add)", "[:, :, None]"),
            f"a{r}_2 = _squares(a{r}_0, a{r}_1, a{r}_2, n{r}, s{r}, q{r})",
            f"a{r}_0 = a{r}_0 + n{r}",
            f"a{r}_1 = a{r}_1 + s{r}"]


def end(one: Instruction) -> list[str]:
    """Both results, from what is kept."""
    r, first = one.result, f"r{one.args[1]}"
    if one.combine == SUM_EXP:
        return [f"{first} = {_row(f'a{r}_0', '_max')}",
                f"r{r} = {_row(f'a{r}_1 * tl.exp(a{r}_0 - _finite({first}))', '_add')}"]
    return [f"count{r} = {_row(f'a{r}_0', '_add')}",
            f"{first} = {_row(f'a{r}_1', '_add')}",
            f"apart{r} = a{r}_1 / tl.maximum(a{r}_0, 1.0) - {first} / tl.maximum(count{r}, 1.0)",
            f"r{r} = {_row(f'a{r}_2 + a{r}_0 * apart{r} * apart{r}', '_add')}"]


def more(one: Instruction, value: str, mask: str) -> list[str]:
    """Both results with the columns of another part. value, mask: of all its lanes."""
    r, first = one.result, f"r{one.args[1]}"
    if one.combine == SUM_EXP:
        return [f"v{r} = tl.where({mask}, {value}, -{_INFINITE})",
                f"most{r} = _max({first}, {_row(f'v{r}', '_max')})",
                f"shift{r} = _finite(most{r})",
                f"r{r} = r{r} * tl.exp({first} - shift{r}) + {_row(f'tl.exp(v{r} - shift{r})', '_add')}",
                f"{first} = most{r}"]
    return [f"k{r} = {mask}",
            f"n{r} = " + _row(f"k{r}.to({TYPES[one.dtype]})", "_add"),
            f"v{r} = tl.where(k{r}, {value}, 0.0)",
            *_deviations(one, _row("{}", "_add"), ""),
            f"r{r} = _squares(count{r}, {first}, r{r}, n{r}, s{r}, q{r})",
            f"count{r} = count{r} + n{r}",
            f"{first} = {first} + s{r}"]


def last(one: Instruction, columns: str) -> list[str]:
    """Behind all parts. columns: how many there are. Where all are -inf, exp(x - maximum) is NaN."""
    if one.combine != SUM_EXP:
        return []
    lost = f"(r{one.args[1]} == -{_INFINITE}) & ({columns} > 0)"
    return [f'r{one.result} = tl.where({lost}, float("nan"), r{one.result})']


def _deviations(one: Instruction, sums: str, spread: str) -> list[str]:
    """The sum of n values v, 0 where k is not, and of the squares of their distances from their mean."""
    r = one.result
    return [f"s{r} = " + sums.format(f"v{r}"),
            f"mean{r} = s{r} / tl.maximum(n{r}, 1.0)",
            f"d{r} = tl.where(k{r}, v{r} - mean{r}{spread}, 0.0)",
            f"q{r} = " + sums.format(f"d{r} * d{r}")]


def _row(text: str, function: str) -> str:
    return f"tl.reduce({text}, 1, {function}, keep_dims=True)"
