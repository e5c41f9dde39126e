"""Shows what techniques give: a table per model for the terminal and in Markdown, and the document."""
from __future__ import annotations

from anyshape_bench.experiments.ablation.results import AGAIN, ALL, EAGER, TECHNIQUES, Row, Techniques, slower
from anyshape_bench.harness.experiment import Report
from anyshape_bench.harness.machine import facts
from anyshape_bench.harness.tables import MISSING, Table, bullets, ratio, seconds, size

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


def table(found: Techniques, model: str) -> Table:
    return Table(f"{model} at {shapes(found, model)}", HEAD, lines(found, model), words=(0, 1))


def report(found: Techniques) -> Report:
    """A table per model, and what failed."""
    notes = ["Interrupted: only models that had finished are shown."] if found.options.get("interrupted") else []
    return Report([table(found, model) for model in models_of(found)], markdown(found), document(found),
                  problems(found), notes=notes)


def markdown(found: Techniques) -> str:
    """A section with a table per model."""
    return "".join(f"## `{model}`\n\nShapes {shapes(found, model)}.\n\n{table(found, model).markdown()}\n"
                   for model in models_of(found))


INTRODUCTION = """\
# What the techniques give

This file is written by `anyshape bench --techniques --write-document` from stored results; it is not edited by hand.
[how-to-benchmark.md](how-to-benchmark.md) says how it is measured and what the columns mean.

"""


def document(found: Techniques) -> str:
    """The text of the page."""
    autocast = found.options.get("autocast")
    parts = [INTRODUCTION, facts(found.machine, str(found.options.get("threads", MISSING))),
             f"- rounds: {found.options.get('rounds', MISSING)}\n\n",
             f"Every model runs under `torch.autocast` to {autocast}.\n\n" if autocast else "", markdown(found)]
    wrong = problems(found)
    if wrong:
        parts.append(f"## What went wrong\n\n{bullets(wrong)}")
    return "".join(parts).rstrip() + "\n"
