"""Which inputs of a kernel an output may overwrite: every element is read before, and only where, it is written.

    y[i] = exp(x[i])      -->      (x, y): y may live where x lived
"""
from __future__ import annotations

from anyshape.ir.types import size_of
from anyshape.kernel.loop_ir.program import LoopProgram
from anyshape.sym.expr import Size, symbols_of


def overwritable(*programs: LoopProgram) -> tuple[tuple[int, int], ...]:
    """All (input parameter, output parameter) pairs by position: same element size, the one offset at which the output
    is stored is the only one at which the input is loaded, and no load comes after the store, also in the same stage.

    programs: that run one after another, with the params of the first or more.
    """
    loads: dict[str, set[Size]] = {}
    last_load: dict[str, tuple[int, int, int]] = {}
    stores: dict[str, list[tuple[Size, bool, tuple[int, int, int]]]] = {}
    for which, program in enumerate(programs):
        for number, stage in enumerate(program.stages):
            loops = (*program.rows, *program.columns) if stage.level == "column" else program.rows
            varying = {v for v, e in loops if e != 1}
            for line, i in enumerate(stage.instructions):
                position = which, number, line
                if i.op == "load":
                    loads.setdefault(i.buffer, set()).add(i.offset)
                    last_load[i.buffer] = position
                elif i.op in ("store", "scatter", "fold"):
                    plain = i.op == "store" and len(i.args) == 1 and varying <= symbols_of(i.offset)
                    stores.setdefault(i.buffer, []).append((i.offset, plain, position))
    pairs: list[tuple[int, int]] = []
    for o, out in enumerate(programs[0].params):
        places = stores.get(out.name, [])
        if out.role != "out" or len(places) != 1 or not places[0][1]:
            continue
        offset, _, written = places[0]
        for k, source in enumerate(programs[0].params):
            if source.role != "in" or size_of(source.dtype) != size_of(out.dtype):
                continue
            if loads.get(source.name) == {offset} and last_load[source.name] < written:
                pairs.append((k, o))
    return tuple(pairs)
