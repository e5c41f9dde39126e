"""The text form of a loop program: what `explain`, dumps and the content hash see."""
from __future__ import annotations

import hashlib

from anyshape.kernel.loop_ir.directives import Vectorize
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram


def show(program: LoopProgram) -> str:
    """One line per instruction, stages indented under their loops; `Vectorize` stands at its loops, every other
    directive on a line of its own under the rows."""
    rows = ", ".join(f"{v}: {e}" for v, e in program.rows)
    lines = [f"kernel {program.name}({', '.join(f'{p.name}: {p.role} {p.dtype}' for p in program.params)}; "
             f"{', '.join(program.sizes)})"]
    lines += [f"  row buffer {s.name}: {s.dtype}[{s.count}]" for s in program.scratch]
    lines.append(f"  rows ({rows}){_vector(program, [v for v, _ in program.rows])}")
    lines += [f"  {directive}" for directive in program.schedule if not isinstance(directive, Vectorize)]
    columns = ", ".join(f"{v}: {e}" for v, e in program.columns)
    for stage in program.stages:
        if stage.level == "column":
            lines.append(f"    columns ({columns}){_vector(program, [v for v, _ in program.columns])}")
        else:
            lines.append("    row")
        lines += [f"      {_line(i)}" for i in stage.instructions]
    return "\n".join(lines)


def content_name(program: LoopProgram) -> str:
    """A name that equal programs share, whatever graph they come from."""
    return "k" + hashlib.sha256(show(program).encode()).hexdigest()[:20]


def _vector(program: LoopProgram, names: list[str]) -> str:
    directive = program.directive(Vectorize)
    return f" {directive}" if directive is not None and directive.axis in names else ""


def _line(i: Instruction) -> str:
    args = ", ".join(f"r{a}" for a in i.args)
    if i.op == "load":
        text = f"load {i.buffer}[{i.offset}]" + (f" where {args} else {i.value}" if args else "")
    elif i.op in ("store", "scatter", "fold", "check"):
        more = f" code {i.value}" if i.op == "check" else f" with {i.combine}" if i.op in ("scatter", "fold") else ""
        return f"{i.op} {i.buffer}[{i.offset}] {args}{more}"
    elif i.op == "constant":
        text = f"{i.value!r}"
    elif i.op == "index":
        text = f"index {i.offset}"
    elif i.op in ("reduce", "scan"):
        text = f"{i.op} {i.combine} {args}"
    else:
        text = f"{i.op} {args}"
    return f"r{i.result}: {i.dtype} = {text}"
