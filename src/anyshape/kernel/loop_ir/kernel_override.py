"""Loop programs that a person has edited, in place of the computed ones: read, and compared in what they touch.

A kernel's parameters, sizes, loops and row buffers stay, for the plan and the host rely on them; the loops may stand in
another order. It stores what it stored, where it stored it, and loads from places that the computed one loads from,
under the same masks, so that no edit reads or writes elsewhere. What it computes is the person's.
"""
from __future__ import annotations

from collections.abc import Mapping

from anyshape.base.errors import VerifyError
from anyshape.kernel.loop_ir.directives import Directive, Vectorize
from anyshape.kernel.loop_ir.parse import parse
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram
from anyshape.sym.expr import substitute, symbol, symbols_of

Origin = tuple[object, ...]


def put_back(computed: Mapping[str, LoopProgram], text: str) -> dict[str, LoopProgram]:
    """The kernels by name, those that `text` has in place of the computed ones.

    Raises:
        ParseError: a line of the text is no part of a kernel. VerifyError: a kernel does not fit the computed one.
    """
    found = dict(computed)
    lines = text.split("\n")
    for number, program in parse(text):
        name = program.name
        problems = differences(computed[name], program) if name in computed else [f"there is no kernel {name}"]
        if problems:
            raise VerifyError("an edited kernel does not fit", where=f"line {number}: {lines[number - 1]}",
                              why="; ".join(problems), do="leave what the kernels take and touch as it was, and their "
                              f"names: {', '.join(computed)}")
        found[name] = program
    return found


def differences(computed: LoopProgram, edited: LoopProgram) -> list[str]:
    """How the two programs differ in what they take and touch, in words."""
    found = []
    for what, old, new in (("parameters", computed.params, edited.params), ("sizes", computed.sizes, edited.sizes),
                           ("row buffers", computed.scratch, edited.scratch),
                           ("rows", set(computed.rows), set(edited.rows)),
                           ("directives", _directives(computed), _directives(edited)),
                           ("columns", _columns(computed), _columns(edited))):
        if old != new:
            found.append(f"the {what} of {computed.name} are others")
    if found:
        return found
    numbers: dict[Origin, int] = {}
    old_loads, old_stores = _touched(computed, numbers)
    new_loads, new_stores = _touched(edited, numbers)
    for place, one in new_loads.items():
        if place not in old_loads:
            found.append(f"r{one.result} loads {one.buffer}[{one.offset}], and the computed kernel does not, or under "
                         "another mask")
    for place, one in new_stores.items():
        if place not in old_stores:
            found.append(f"{one.op} {one.buffer}[{one.offset}] is not in the computed kernel, or under another mask")
    found += [f"{one.op} {one.buffer}[{one.offset}] of the computed kernel is missing"
              for place, one in old_stores.items() if place not in new_stores]
    return found


def _directives(program: LoopProgram) -> set[Directive]:
    """All but which loop is vectorised, which is the person's to choose."""
    return {one for one in program.schedule if not isinstance(one, Vectorize)}


def _columns(program: LoopProgram) -> set[tuple[str, object]]:
    """The loops of its column stages; without one, there are none."""
    return set(program.columns) if any(stage.level == "column" for stage in program.stages) else set()


def _touched(program: LoopProgram, numbers: dict[Origin, int]
             ) -> tuple[dict[Origin, Instruction], dict[Origin, Instruction]]:
    """Loads and stores by the place that they touch: buffer, offset, mask, and what is checked. `numbers` numbers the
    ways in which registers are computed: in an offset or a mask a register stands for its way, not for its name."""
    ways: dict[int, int] = {}
    loads: dict[Origin, Instruction] = {}
    stores: dict[Origin, Instruction] = {}
    scratch = {one.name for one in program.scratch}
    for position, stage in enumerate(program.stages):
        for one in stage.instructions:
            named = {name: symbol(f"%{ways[int(name[1:])]}") for name in symbols_of(one.offset) if name[0] == "%"}
            args = tuple(ways[arg] for arg in one.args)
            code = one.value if one.op == "check" else ""
            place: Origin = (one.op, one.buffer, str(substitute(one.offset, named)), code)
            if one.op in ("store", "scatter", "fold"):
                stores.setdefault((*place, args[1:]), one)
            elif one.op == "check":
                stores.setdefault((*place, args), one)
            else:
                if one.op == "load":
                    loads.setdefault((*place, args), one)
                # what a row buffer holds, and what is reduced, depend on the stage
                where = position if one.op == "reduce" or one.buffer in scratch else -1
                way = (*place, args, one.dtype, one.combine, repr(one.value), where)
                ways[one.result] = numbers.setdefault(way, len(numbers))
    return loads, stores
