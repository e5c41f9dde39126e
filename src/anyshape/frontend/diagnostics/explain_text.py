"""How an explanation looks on a terminal. Rich is imported when something is shown, not before."""
from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from anyshape.frontend.diagnostics.explain_data import AttentionUse, ProgramNote, RouterNote, plain
from anyshape.frontend.messages.size_text import arena_text, number, said
from anyshape.frontend.programs.session import Fallback
from anyshape.sym.expr import Expr, Size

WIDTH = 120
MOST_STEPS = 40  # rows of the memory curve; the longest-lived stretch is what matters
MOST_LINES = 3
MOST_PAIRS = 10


@dataclass(frozen=True, slots=True)
class Explanation:
    """Programs, fallbacks and written-out attention of one compiled object. values: the sizes given to `explain`.

    eager: (reason, number) for calls that ran as PyTorch, all or a part of them, and for runs of graphs that do.
    cuts: where programs are in parts because a router sends their rows to branches, which is no fall back.
    strategy: how a train step is dealt out over ranks, and why.
    warm: what came from the disk cache in place of a trace, and why other programs did not.
    """

    name: str
    programs: tuple[ProgramNote, ...]
    fallbacks: tuple[Fallback, ...]
    graphs: int
    values: tuple[tuple[str, int], ...] = ()
    attentions: tuple[AttentionUse, ...] = ()
    eager: tuple[tuple[str, int], ...] = ()
    routers: tuple[RouterNote, ...] = ()
    cuts: tuple[Fallback, ...] = ()
    warm: tuple[str, ...] = ()
    strategy: tuple[str, ...] = ()

    def number(self, size: Size) -> int | None:
        """`size` in numbers, where the given sizes determine it."""
        return number(size, dict(self.values))

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists, numbers and text, fit for JSON. A formula becomes its text; where the given
        sizes determine it, {"formula": text, "value": number}."""
        def formula(size: Expr) -> Any:
            value = self.number(size)
            return str(size) if value is None else {"formula": str(size), "value": value}

        return dict(plain(self, formula))

    def __str__(self) -> str:
        return text(self)

    def __rich__(self) -> Any:
        return view(self)


def text(explanation: Explanation) -> str:
    """The view without colours, `WIDTH` columns wide."""
    from rich.console import Console
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
    console.print(view(explanation))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().split("\n"))


def view(explanation: Explanation) -> Any:
    """Everything below one headline."""
    from rich.console import Group
    from rich.text import Text
    parts: list[Any] = [Text(_headline(explanation), style="bold")]
    if not explanation.programs and not explanation.graphs:
        parts.append(Text("nothing is compiled: every call ran as PyTorch" if explanation.eager else
                          "nothing is compiled yet: compiling happens at the first call"))
    parts += [Text("\nstrategy\n" + "\n".join(explanation.strategy), overflow="fold")] if explanation.strategy else []
    parts += [_program(program, explanation) for program in explanation.programs]
    parts += _filled(
        _table("\nrouters", ("router", "branches", "lowering", "decided by", "combine", "drop", "profile"), (
            (one.name, str(one.branches), one.way, one.decides, one.combine, one.drop,
             "recorded" if one.recorded else "") for one in explanation.routers), right=("branches",)),
        _table("\nattention that the model writes out", ("graph", "uses", "source", "what"), (
            (str(one.graph), str(one.uses), _source((one.where,)),
             f"{'fused' if one.taken else 'left as it is'}: {one.what}") for one in explanation.attentions),
            right=("graph", "uses")),
        _table("\nprograms in parts", ("program", "why"), ((one.name, one.reason) for one in explanation.cuts)),
        _table("\ndisk cache", ("captured programs",), ((one,) for one in explanation.warm)),
        _table("\nwhat did not go the compiled road", ("what", "stage", "why"), (
            (one.name, one.stage, one.reason) for one in explanation.fallbacks)),
        _table("\ncalls that ran as PyTorch, all or a part of them", ("calls", "why"), (
            (str(calls), reason) for reason, calls in explanation.eager), right=("calls",)))
    return Group(*parts)


def _headline(explanation: Explanation) -> str:
    kernels = sum(kernel.uses for program in explanation.programs for kernel in program.kernels)
    seconds = sum(time for program in explanation.programs for _, time in program.seconds)
    told = [_count(len(explanation.programs), "program"), f"from {_count(explanation.graphs, 'captured graph')}",
            _count(kernels, "kernel step"), f"{seconds:.2f} s of compiling"]
    if explanation.fallbacks:
        told.append(_count(len(explanation.fallbacks), "fallback"))
    if explanation.eager:
        told.append(_count(sum(calls for _, calls in explanation.eager), "eager call"))
    return f"{explanation.name}: {', '.join(told)}"


def _count(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _program(program: ProgramNote, explanation: Explanation) -> Any:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text
    lines = [f"why:    {program.why or 'the first call'}"]
    if program.where:
        ways = {"all sizes": "one program for all sizes", "parts": "one program for all sizes of this part",
                "one graph": "traced for fixed sizes",
                "ordinary": "traced for sizes of 2 and more, or fixed ones"}
        lines.append(f"traced: {program.where}" + (f"; {ways[program.way]}" if program.way in ways else ""))
    sizes = [f"{name} ({place})" for name, place in program.sizes]
    lines.append(f"sizes:  {', '.join(sizes) or 'none: every size is fixed'}")
    if program.other is not None:
        lines.append("orders: two; calls take the one that needs less at their sizes. This is the first; the arena of "
                     f"the other is {_said(program.other, program, explanation)}")
    lines += [f"edited: {path}" for path in program.edited]
    parts: list[Any] = [Text("\n".join(lines))]
    refused = ((_said(one.bytes, program, explanation), one.reason, ", ".join(one.values)) for one in program.refusals)
    parts += [*_filled(_kernels(program, explanation), _calls(program),
                       _table("versions that ran", ("kernel", "version", "at sizes such as"), (
                           (one.kernel[:9], one.version, "; ".join(one.sizes)) for one in program.versions)),
                       _table("fusions not made", ("would save", "reason", "values"), refused)),
              _memory(program, explanation), *_filled(_undecided(program)), Text(_times(program))]
    return Group(Text(f"\nprogram {program.name}", style="bold cyan"), Padding(Group(*parts), (0, 0, 0, 2)))


def _table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]], right: tuple[str, ...] = (),
           caption: str | None = None) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, title_style="bold",
                  caption=caption)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # what stands in brackets is no markup
    return table


def _filled(*tables: Any) -> list[Any]:
    return [table for table in tables if table.row_count]


def _kernels(program: ProgramNote, explanation: Explanation) -> Any:
    rows = []
    for kernel in program.kernels:
        name = kernel.name[:9] + (f" x {kernel.uses}" if kernel.uses > 1 else "")
        name += "".join(f"\n{', '.join(each[:9] for each in (one.kernel, *one.then))} when {one.when}"
                        for one in kernel.regimes if one.when)
        rows.append((name, f"{len(kernel.ops)}: {_squeezed(kernel.ops)}", f"{kernel.rows} x {kernel.columns}",
                     _said(kernel.read + kernel.written, program, explanation), _source(kernel.lines)))
    return _table(f"{_count(len(rows), 'kernel')} of our own",
                  ("kernel", "fused", "rows x columns", "bytes moved", "source"), rows)


def _squeezed(ops: tuple[str, ...]) -> str:
    counts = {op: ops.count(op) for op in dict.fromkeys(ops)}
    return " ".join(op if count == 1 else f"{op}*{count}" for op, count in counts.items())


def _source(lines: tuple[str, ...]) -> str:
    shown = "\n".join(line if len(line) <= 60 else line[:57] + "..." for line in lines[:MOST_LINES])
    return shown + (f"\nand {len(lines) - MOST_LINES} more" if len(lines) > MOST_LINES else "")


def _calls(program: ProgramNote) -> Any:
    own = [(call, f"a native routine does it, {call.why}" if call.why else "a native routine does it")
           for call in program.libraries]
    others = [(call, f"PyTorch runs it: {call.why}") for call in program.externs]
    return _table("calls", ("steps", "what", "why", "source"), (
        (str(call.uses), call.target, why, _source(call.lines)) for call, why in (*own, *others)), right=("steps",))


def _memory(program: ProgramNote, explanation: Explanation) -> Any:
    values = explanation.values
    title = (f"memory: arena {arena_text(program.arena, program.placed, values, program.likely)}, "
             f"outputs {_said(program.outputs, program, explanation)}")
    if not (isinstance(program.saved, int) and program.saved == 0):
        title += f", saved for the backward {_said(program.saved, program, explanation)}"
    likely = {**dict(program.likely), **dict(values)}
    counts = [number(step.live, likely) or 0 for step in program.steps]
    highest = max(counts, default=0) or 1
    shown = sorted(sorted(range(len(counts)), key=lambda i: -counts[i])[:MOST_STEPS])
    rows = ((str(step.number), step.what, _said(step.live, program, explanation),
             "#" * round(16 * counts[index] / highest), _source((step.where,)))
            for index in shown for step in (program.steps[index],))
    more = f"the {len(shown)} steps with the most bytes alive, of {len(counts)}" if len(counts) > len(shown) else None
    return _table(title, ("step", "what", "alive", "", "source"), rows, right=("step",), caption=more)


def _undecided(program: ProgramNote) -> Any:
    more = len(program.undecided) - MOST_PAIRS
    return _table("bytes that are not known to be ordered", ("one", "other"), (
        (str(one), str(other)) for one, other in program.undecided[:MOST_PAIRS]),
        caption=f"and {more} more" if more > 0 else None)


def _said(size: Size, program: ProgramNote, explanation: Explanation) -> str:
    return said(size, explanation.values, program.likely)


def _times(program: ProgramNote) -> str:
    stages = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in program.seconds)
    lines = [f"times:  {stages}"]
    for word, unit, passes in (("passes", "equations", program.passes), ("plan", "steps", program.plan_passes)):
        counts = ", ".join(f"{name} {before}->{after}" for name, before, after, _ in passes)
        lines += [f"{word + ':':<7} {counts} {unit}"] if passes else []
    return "\n".join(lines)
