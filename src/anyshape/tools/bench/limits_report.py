"""Shows train steps under limits: per model a table of ways, and what is aimed at beside what was found."""
from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .limits import CALL_SHARES, EPOCH, EPOCH_SHARE, WAYS, Limits, Ours, Row
from .report import MISSING, facts, ratio, seconds, size
from .results import geometric_mean, median

HEAD = ("way", "peak", "of eager's", "limit", "again", "step", "of eager's")
EPOCHS_HEAD = ("sentences", "how", "fits", "peak", "words a second")
WORDS = {"no limit": "dynamic, nothing computed again", "padded": "padded into buckets, under the limit",
         "limit": "dynamic, under the limit"}
AIMS = ("measure", "aim", "found")
NO_LIMIT = "no limit"
CHECKPOINTED = "eager, layers checkpointed"
BUDGETS = ("inductor, budget 0.5", "inductor, budget 0.25", "eager, products kept", CHECKPOINTED)
SLACK = 64 * 1024  # bytes of the step outside of what the compiled program takes: the loss, its gradient, autograd's


def lines(found: Limits, model: str) -> list[tuple[str, ...]]:
    """The cells of a model's table, as HEAD names them."""
    rows = [row for row in found.rows if row.model == model]
    eager = found.of(model, "eager")
    return [_cells(row, eager) for row in rows]


def _cells(row: Row, eager: Row | None) -> tuple[str, ...]:
    peaks, times = (eager.peaks, eager.seconds) if eager is not None else ([], [])
    name = row.way if row.way in WAYS else f"anyshape, {row.way}"
    if row.error:
        what = "refused" if row.error.startswith("set memory_limit") else "failed"
        return name, what, *[MISSING] * (len(HEAD) - 2)
    return (name, _all(size(one) for one in row.peaks), ratio(_times(row.peaks, peaks)),
            _all(size(one) if one else MISSING for one in row.limits), _all(map(str, row.again)),
            _all(map(seconds, row.seconds)), ratio(_times(row.seconds, times)))


def _all(texts: Iterable[str]) -> str:
    return ", ".join(texts) or MISSING


def _times(some: list[int] | list[float], base: list[int] | list[float]) -> float | None:
    """How many times `base`, in geometric mean over the shapes of both."""
    return geometric_mean(a / b for a, b in zip(some, base, strict=False) if b)


def aims(found: Limits, model: str) -> list[tuple[str, str, str]]:
    """What is aimed at, and what was found, as AIMS names them."""
    known = next((one for one in found.ours if one.model == model), None)
    free = found.of(model, NO_LIMIT)
    if known is None or free is None:
        return []
    calls = [call for call in known.calls if not call.refused]
    wrong = sum(not call.arena for call in calls)
    over = sum(call.need > call.limit for call in calls)
    counted = sum(call.peak > call.limit + SLACK for call in calls)
    refused = len(known.calls) - len(calls)
    lowest = median(least / peak for least, peak in zip(known.least, _peaks(found, model, CHECKPOINTED), strict=False))
    return [
        ("arena: predicted and counted", "equal in every call", f"{len(calls) - wrong} of {len(calls)} calls"),
        ("steps over the limit, by the records", "0", f"{over} of {len(calls)}, {refused} refused before they began"),
        ("steps over the limit, by the C library's blocks", "0", f"{counted} of {len(calls)}"),
        ("peak without a limit, of Inductor's", "at most 0.75x", ratio(_times(free.peaks, _peaks(found, model,
                                                                                                "inductor")))),
        *((f"throughput at {share} of the peak", aim, ratio(_times(free.seconds, row.seconds)))
          for share, aim in (("60%", "at least 0.92x"), ("40%", "at least 0.80x"))
          if (row := found.of(model, f"{share} of that")) is not None and row.seconds),
        ("smallest limit, of the peak with layers checkpointed", "at most 0.80x", ratio(lowest)),
        *((f"time at the peak of {way}", "below 1.00x", _beside(found, model, way)) for way in BUDGETS),
        ("cost of a limit that is not reached", "at most 1 %", _percent(known)),
        ("planning of a shape never seen, median", "at most 1 ms", seconds(median(known.planning))),
        ("the same, worst", "at most 10 ms", seconds(max(known.planning, default=None))),
    ]


def epochs(found: Limits, model: str) -> list[tuple[str, ...]]:
    """The cells of the table of batches, as EPOCHS_HEAD names them."""
    every = [epoch for known in found.ours if known.model == model for epoch in known.epochs]
    return [(str(one.batch), WORDS[one.way], "yes" if one.fits else "no", size(one.peak or None),
             f"{one.words / one.seconds:.0f}" if one.seconds else MISSING) for one in every]


def _peaks(found: Limits, model: str, way: str) -> list[int]:
    row = found.of(model, way)
    return row.peaks if row is not None else []


def _beside(found: Limits, model: str, way: str) -> str:
    ours, theirs = found.of(model, f"as {way}"), found.of(model, way)
    if ours is None or theirs is None or theirs.error:
        return MISSING
    if ours.error:
        return "refused"
    return ratio(_times(ours.seconds, theirs.seconds))


def _percent(known: Ours) -> str:
    found = geometric_mean(with_it / without for with_it, without in known.unlimited)
    return MISSING if found is None else f"{(found - 1) * 100:+.1f} %"


def models_of(found: Limits) -> list[str]:
    return list(dict.fromkeys(row.model for row in found.rows))


def shapes(found: Limits, model: str) -> str:
    every = [row.shapes for row in found.rows if row.model == model]
    return ", ".join("x".join(map(str, shape)) for shape in max(every, key=len, default=[]))


def problems(found: Limits) -> list[str]:
    """Processes that failed, and limits that were not held."""
    said = [f"FAILED: {row.model}, {row.way}: {row.error}" for row in found.rows
            if row.error and not row.error.startswith("set memory_limit")]
    for known in found.ours:
        for call in known.calls:
            if call.need > call.limit and not call.refused:
                said.append(f"OVER: {known.model} at {call.shape} needs {call.need} of {call.limit}")
            if not call.arena:
                said.append(f"WRONG: {known.model} at {call.shape} under {call.limit}: the arena is not as predicted")
    return said


def show(found: Limits, console: Console) -> None:
    """Prints two tables per model, and what failed."""
    for model in models_of(found):
        for title, head, rows in ((f"{model} at {shapes(found, model)}", HEAD, lines(found, model)),
                                  (f"{model}: aims", AIMS, aims(found, model)),
                                  (f"{model}: batches of sentences", EPOCHS_HEAD, epochs(found, model))):
            if not rows:
                continue
            shown = Table(title=title, title_justify="left")
            for i, name in enumerate(head):
                shown.add_column(name, justify="left" if i == 0 else "right")
            for cells in rows:
                shown.add_row(*cells)
            console.print(shown)
    if found.options.get("interrupted"):
        console.print("Interrupted: only what had finished is shown.", style="yellow")
    for text in problems(found):
        console.print(text, style="bold red", markup=False, highlight=False)


def markdown(found: Limits) -> str:
    """A section with two tables per model."""
    parts = []
    for model in models_of(found):
        parts.append(f"## `{model}`\n\nShapes {shapes(found, model)}.\n\n")
        for head, rows in ((HEAD, lines(found, model)), (AIMS, aims(found, model)),
                           (EPOCHS_HEAD, epochs(found, model))):
            if rows:
                parts += ["| " + " | ".join(head) + " |\n", "|---|" + "---:|" * (len(head) - 1) + "\n",
                          *("| " + " | ".join(cells) + " |\n" for cells in rows), "\n"]
    return "".join(parts)


INTRODUCTION = """\
# Train steps under a limit

This file is written by `anyshape bench memory ... --write-document` from stored results; it is not edited by hand.
[memory.md](memory.md) says how the limit works.

Every way runs in a fresh process. *peak*: blocks of the C library above parameters and optimiser state, with what
idles between steps. *step*: median of {rounds} steps, the optimiser's included. *again*: saved values that are computed
again. A line "as ..." has that way's peak as its limit. Ratios are geometric means over the shapes. Calls were counted
at {calls} random shapes under {shares} of what each takes without a limit. *Batches of sentences*: {epoch} batches
each, of three counts, with lengths from a log-normal distribution, under {share} of what the greatest possible batch
takes; words are real ones, padding is none; the better of two passes over shapes seen before. "fits" of the first way
says whether it would.

"""


def document(found: Limits) -> str:
    """The text of docs/benchmarks-memory.md."""
    parts = [INTRODUCTION.format(rounds=found.options.get("rounds", MISSING), calls=found.options.get("calls", MISSING),
                                 shares=", ".join(f"{share:.0%}" for share in CALL_SHARES), epoch=EPOCH,
                                 share=f"{EPOCH_SHARE:.0%}"),
             facts(found.machine, str(found.options.get("threads") or MISSING)), "\n", markdown(found)]
    wrong = problems(found)
    if wrong:
        parts.append("## What went wrong\n\n" + "".join(f"- {' '.join(text.split())}\n" for text in wrong))
    return "".join(parts).rstrip() + "\n"


def write_document(found: Limits, path: Path) -> None:
    """Writes the document, for example to docs/benchmarks-memory.md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document(found))
