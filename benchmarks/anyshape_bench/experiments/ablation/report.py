"""Shows what techniques give: a table per model for the terminal and in Markdown, and the document."""
from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from anyshape_bench.experiments.ablation.worker import AGAIN, ALL, EAGER, TECHNIQUES, Row, Techniques, slower
from anyshape_bench.experiments.speed.report import MISSING, facts, ratio, seconds, size

NAMES = {ALL: "nothing", AGAIN: "nothing, again", EAGER: "all (eager PyTorch)"}
HEAD = ("left out", "what it is", "step takes", "steps", "launches", "arena")


def lines(found: Techniques, model: str) -> list[tuple[str, ...]]:
    """The cells of a model's table, as HEAD names them; what gives most comes first, after everything and eager."""
    base = found.of(model, ALL)
    rows = [row for row in found.rows if row.model == model]
    assert base is not None
    head = [row for row in rows if row.name in NAMES]
    rest = sorted((row for row in rows if row not in head), key=lambda row: -(slower(row, base) or 0.0))
    return [_cells(row, base) for row in (*sorted(head, key=lambda row: list(NAMES).index(row.name)), *rest)]


def _cells(row: Row, base: Row) -> tuple[str, ...]:
    name = NAMES.get(row.name, f"`{row.name}`")
    what = TECHNIQUES[row.name][1] if row.name in TECHNIQUES else ""
    if row.error or not row.part:
        return name, what, "failed" if row.error else "no part in it", MISSING, MISSING, MISSING
    return (name, what, ratio(slower(row, base)), ", ".join(map(seconds, row.times)) or MISSING,
            MISSING if row.launches is None else str(row.launches), size(row.arena))


def models_of(found: Techniques) -> list[str]:
    return list(dict.fromkeys(row.model for row in found.rows))


def shapes(found: Techniques, model: str) -> str:
    row = next(row for row in found.rows if row.model == model)
    return ", ".join("x".join(map(str, shape)) for shape in row.shapes)


def problems(found: Techniques) -> list[str]:
    return [f"FAILED: {row.model} without {row.name}: {row.error}" for row in found.rows if row.error]


def show(found: Techniques, console: Console) -> None:
    """Prints a table per model, and what failed."""
    for model in models_of(found):
        shown = Table(title=f"{model} at {shapes(found, model)}", title_justify="left")
        for i, name in enumerate(HEAD):
            shown.add_column(name, justify="left" if i < 2 else "right")
        for cells in lines(found, model):
            shown.add_row(*cells)
        console.print(shown)
    if found.options.get("interrupted"):
        console.print("Interrupted: only models that had finished are shown.", style="yellow")
    for text in problems(found):
        console.print(text, style="bold red", markup=False, highlight=False)


def markdown(found: Techniques) -> str:
    """A section with a table per model."""
    parts = []
    for model in models_of(found):
        parts += [f"## `{model}`\n\nShapes {shapes(found, model)}.\n\n", "| " + " | ".join(HEAD) + " |\n",
                  "|---|---|" + "---:|" * (len(HEAD) - 2) + "\n",
                  *("| " + " | ".join(cells) + " |\n" for cells in lines(found, model)), "\n"]
    return "".join(parts)


INTRODUCTION = """\
# What the techniques give

This file is written by `anyshape bench --techniques --write-document` from stored results; it is not edited by hand.
[performance.md](performance.md) says what bounds a step.

Each line leaves one technique out (`disable="..."`, `fuse=False`). *step takes*: the time of a step relative to that
with everything, over all shapes; more than 1.00x is what the technique gives. "nothing, again" is a second program with
everything: how far it is from 1.00x is noise. *steps*: medians per shape of {rounds} rounds, in which all programs run
in turn, in one process, on one set of parameters; on one thread processor time. *launches*: at the first shape, with
every kernel counted. *arena*: of the program that needs most, at the second shape. A technique has no part in a model
whose programs are the same without it. What one technique leaves to do another may do as well, so the lines do not add
up.

"""


def document(found: Techniques) -> str:
    """The text of docs/techniques.md."""
    autocast = found.options.get("autocast")
    parts = [INTRODUCTION.format(rounds=found.options.get("rounds", MISSING)),
             facts(found.machine, str(found.options.get("threads", MISSING))), "\n",
             f"Every model runs under `torch.autocast` to {autocast}.\n\n" if autocast else "", markdown(found)]
    wrong = problems(found)
    if wrong:
        parts.append("## What went wrong\n\n" + "".join(f"- {' '.join(text.split())}\n" for text in wrong))
    return "".join(parts).rstrip() + "\n"


def write_document(found: Techniques, path: Path) -> None:
    """Writes the document, for example to docs/techniques.md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document(found))
