"""Code for interleaved access: a short loop is unrolled inside of a long one, which is the vector; what lies evenly
along both is whole vectors, interleaved in registers or taken apart.

    for i5 < 4:  p1[4*i4 + i5] = p0[i5*n + i4]      -->   r0..r3 = lanes i4 of p0[0], p0[n], p0[2*n], p0[3*n]
                                                          p1[4*i4 ...] = r0 r1 r2 r3 r0 r1 r2 r3 ...

(An interleaved access group of LLVM's loop vectoriser.) The long loop is cut into blocks, which are rows.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set

from anyshape.backend.cpu.llvm.ir_builder import Code, Value
from anyshape.kernel.loop_ir.def_use import used, varying
from anyshape.kernel.loop_ir.directives import Interleave, Vectorize
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram, Stage
from anyshape.sym.expr import Size, ceildiv, coefficient_of, minimum, substitute, symbol, symbols_of

BLOCK = 1024  # points of the long loop in a row block


def lower_interleave(program: LoopProgram) -> LoopProgram:
    """The program with its short loop unrolled, and the long one as its only column loop; itself where no loops are
    interleaved.

    It has two instructions more: "loads", whose `value` registers from `result` on are elements that lie one after
    another, and "stores", whose `args` are stored so.
    """
    interleave = program.directive(Interleave)
    if interleave is None:
        return program
    loops = dict((*program.rows, *program.columns))
    count, extent = loops[interleave.short], loops[interleave.long]
    assert isinstance(count, int)
    rows = tuple(row for row in program.rows if row[0] not in (interleave.short, interleave.long))
    body = _unrolled(program, interleave, count)
    if not isinstance(extent, int) or extent > BLOCK:
        block = f"{interleave.long} block"
        first = symbol(block) * BLOCK
        body = tuple(dataclasses.replace(one, offset=substitute(one.offset, {
            interleave.long: first + symbol(interleave.long)})) for one in body)
        rows = (*rows, (block, ceildiv(extent, BLOCK)))
        extent = minimum(BLOCK, extent - first)
    schedule = (Vectorize(interleave.long), interleave)
    return dataclasses.replace(program, rows=rows, columns=((interleave.long, extent),), schedule=schedule,
                               stages=(Stage("column", body, " ".join(stage.where for stage in program.stages)),))


def _unrolled(program: LoopProgram, interleave: Interleave, count: int) -> tuple[Instruction, ...]:
    """Every instruction, once for each point of the short loop if it depends on that."""
    every = [one for stage in program.stages for one in stage.instructions]
    free = 1 + max(one.result for one in every)
    body: list[Instruction] = []
    copies: dict[int, tuple[int, ...]] = {}
    uneven = varying(every, {interleave.short, interleave.long})
    for one in every:
        if interleave.short not in symbols_of(one.offset) and not any(name in copies for name in used(one)):
            body.append(one)
            continue
        results = tuple(range(free, free + count)) if one.result >= 0 else (-1,) * count
        if one.result >= 0:
            copies[one.result] = results
            free += count
        first = substitute(one.offset, {interleave.short: 0})
        if is_interleaved(one, interleave, count, uneven):
            if one.op == "load":
                body.append(dataclasses.replace(one, result=results[0], op="loads", offset=first, value=count))
            else:
                args = copies.get(one.args[0], (one.args[0],) * count)
                body.append(dataclasses.replace(one, op="stores", args=args, offset=first))
            continue
        for k, result in enumerate(results):
            names: dict[str, Size] = {f"%{name}": symbol(f"%{made[k]}") for name, made in copies.items()}
            names[interleave.short] = k
            args = tuple(copies[arg][k] if arg in copies else arg for arg in one.args)
            body.append(dataclasses.replace(one, result=result, args=args, offset=substitute(one.offset, names)))
    return tuple(body)


def is_interleaved(one: Instruction, interleave: Interleave, count: int, uneven: Set[int]) -> bool:
    """Does it load or store elements that lie one after another along the short loop, and then the long one?
    uneven: registers that differ from element to element."""
    if one.op not in ("load", "store") or (one.op == "store" and len(one.args) > 1):
        return False
    if one.op == "load" and one.args and one.value != 0:
        return False
    read = used(one) if one.op == "load" else used(one)[1:]
    if not uneven.isdisjoint(read):
        return False
    along = coefficient_of(one.offset, interleave.long)
    across = coefficient_of(one.offset, interleave.short)
    return along is not None and across is not None and along[0] == count and across[0] == 1


def interleaved(code: Code, vectors: Sequence[Value]) -> list[Value]:
    """The lanes 0 of all vectors, then the lanes 1, and so on: as many vectors as were given."""
    count, lanes = len(vectors), vectors[0].lanes
    factor = _factor(count)
    if factor == count:
        return [_picked(code, vectors, [(k % count, k // count) for k in range(start * lanes, (start + 1) * lanes)])
                for start in range(count)] if count > 1 else list(vectors)
    # every factor-th one by themselves, then those with each other
    inner = [interleaved(code, vectors[k::factor]) for k in range(factor)]
    return [one for group in zip(*inner, strict=True) for one in interleaved(code, group)]


def apart(code: Code, vectors: Sequence[Value]) -> list[Value]:
    """What `interleaved` makes these vectors of."""
    count, lanes = len(vectors), vectors[0].lanes
    factor = _factor(count)
    if factor == count:
        return [_picked(code, vectors, [divmod(k * count + start, lanes) for k in range(lanes)])
                for start in range(count)] if count > 1 else list(vectors)
    groups = [apart(code, vectors[k:k + factor]) for k in range(0, count, factor)]
    inner = [apart(code, [group[k] for group in groups]) for k in range(factor)]
    return [inner[k % factor][k // factor] for k in range(count)]


def _factor(count: int) -> int:
    """The smallest prime that divides count; 1 of 1."""
    return next((k for k in range(2, count) if count % k == 0), count)


def _picked(code: Code, vectors: Sequence[Value], wanted: Sequence[tuple[int, int]]) -> Value:
    """A vector of the wanted (number of a vector, lane)."""
    numbers = sorted({number for number, _ in wanted})
    if len(numbers) == 1:
        return code.shuffle(vectors[numbers[0]], [lane for _, lane in wanted])
    lanes, taken = vectors[0].lanes, vectors[numbers[0]]
    for turn, new in enumerate(numbers[1:]):
        # the first turn puts the lanes of two vectors into their places; later ones add those of another vector
        picks = [lanes + lane if number == new else k if turn or number != numbers[0] else lane
                 for k, (number, lane) in enumerate(wanted)]
        taken = code.merge(taken, vectors[new], picks)
    return taken
