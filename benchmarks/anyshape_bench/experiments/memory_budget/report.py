"""Shows train steps under limits: per model a table of ways, and what is aimed at beside what was found."""
from __future__ import annotations

from collections.abc import Iterable

from anyshape_bench.experiments.memory_budget.results import (
    PROGRAMS,
    WAYS,
    Epoch,
    Limits,
    Ours,
    Row,
)
from anyshape_bench.harness.experiment import Report
from anyshape_bench.harness.machine import facts
from anyshape_bench.harness.tables import MISSING, Table, bullets, ratio, seconds, size
from anyshape_bench.measure.statistics import geometric_mean, median

HEAD = ("way", "peak", "of eager's", "limit", "again", "step", "of eager's")
EPOCHS_HEAD = ("program", "sentences", "how", "fits", "peak", "words a second")
WORDS = {"no limit": "dynamic, nothing computed again", "padded": "lengths padded into buckets, under the limit",
         "limit": "dynamic, under the limit"}
AIMS = ("measure", "aim")  # then a column for each of our programs
NO_LIMIT = "no limit"
REFUSED = "refused"
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
    name = _name(row)
    if row.error:
        what = REFUSED if _is_refused(row) else "failed"
        return name, what, *[MISSING] * (len(HEAD) - 2)
    return (name, _all(size(one) for one in row.peaks), ratio(_times(row.peaks, peaks)),
            _all(size(one) if one else MISSING for one in row.limits), _all(map(str, row.again)),
            _all(map(seconds, row.seconds)), ratio(_times(row.seconds, times)))


def _name(row: Row) -> str:
    return row.way if row.way in WAYS else f"{row.program}, {row.way}"


def _is_refused(row: Row) -> bool:
    return row.error.startswith("set memory_limit")


def _all(texts: Iterable[str]) -> str:
    return ", ".join(texts) or MISSING


def _times(some: list[int] | list[float], base: list[int] | list[float]) -> float | None:
    """How many times `base`, in geometric mean over the shapes of both."""
    return geometric_mean(a / b for a, b in zip(some, base, strict=False) if b)


def aims(found: Limits, model: str) -> list[tuple[str, ...]]:
    """What is aimed at, and what was found of each of our programs, as `aims_head` names them; only what was
    measured."""
    columns = [{row[:2]: row[2] for row in _aims(found, known)} for known in _known(found, model)]
    measures = dict.fromkeys(measure for column in columns for measure in column)
    return [(*measure, *(column.get(measure, MISSING) for column in columns)) for measure in measures]


def aims_head(found: Limits, model: str) -> tuple[str, ...]:
    return (*AIMS, *(known.program for known in _known(found, model)))


def _known(found: Limits, model: str) -> list[Ours]:
    """Of the programs of which something is known."""
    every = [found.known(model, program) for program in PROGRAMS]
    return [known for known in every if known is not None and _aims(found, known)]


def _aims(found: Limits, known: Ours) -> list[tuple[str, str, str]]:
    """The same of one program."""
    free = found.of(known.model, NO_LIMIT, known.program)
    rows = [] if free is None else _ways(found, known, free)
    return [*_calls(known), *rows, *_figure(known), *_decided(known)]


def _calls(known: Ours) -> list[tuple[str, str, str]]:
    calls = [call for call in known.calls if not call.refused]
    if not known.calls:
        return []
    wrong = sum(not call.arena for call in calls)
    over = sum(call.need > call.limit for call in calls)
    counted = sum(call.peak > call.limit + SLACK for call in calls)
    shapes = len({tuple(call.shape) for call in known.calls})
    refused = [call for call in known.calls if call.refused]
    proved = sum(call.bound > call.limit for call in refused)
    return [
        ("arena: predicted and counted", "equal in every call", f"{len(calls) - wrong} of {len(calls)} calls"),
        ("steps over the limit, by the records", "0",
         f"{over} of {len(calls)} at {shapes} shapes"),
        ("refused before they began", "only what is impossible",
         f"{len(refused)}, {proved} of them impossible by a bound"),
        ("steps over the limit, by the C library's blocks", "0", f"{counted} of {len(calls)}"),
        ("such blocks, of what was predicted, at most", "1.00x",
         ratio(max((call.peak / call.need for call in calls if call.need), default=None))),
    ]


def _ways(found: Limits, known: Ours, free: Row) -> list[tuple[str, str, str]]:
    lowest = _middle(known.least, _peaks(found, CHECKPOINTED, known))
    return [
        ("peak without a limit, of Inductor's", "at most 0.75x",
         ratio(_times(free.peaks, _peaks(found, "inductor", known)))),
        *((f"throughput at {share} of the peak", aim,
           REFUSED if _is_refused(row) else ratio(_times(free.seconds, row.seconds)))
          for share, aim in (("60%", "at least 0.92x"), ("40%", "at least 0.80x"))
          if (row := found.of(known.model, f"{share} of that", known.program)) is not None),
        ("smallest limit, of what it takes without one", MISSING, ratio(_middle(known.least, free.predicted))),
        ("smallest limit, of the peak with layers checkpointed", "at most 0.80x", ratio(lowest)),
        *((f"time at the peak of {way}", "below 1.00x", _beside(found, known, way)) for way in BUDGETS),
        ("cost of a limit that is not reached", "at most 1 %", _percent(known)),
    ]


def _middle(some: list[int], base: list[int]) -> float | None:
    """How many times `base`, at the median shape."""
    return median(a / b for a, b in zip(some, base, strict=False) if b)


def _figure(known: Ours) -> list[tuple[str, str, str]]:
    """By count of sentences, ours beside what fits without a limit, or else beside what is padded."""
    rows = []
    for batch in dict.fromkeys(epoch.batch for epoch in known.epochs):
        ways = {epoch.way: epoch for epoch in known.epochs if epoch.batch == batch}
        ours, padded, free = ways.get("limit"), ways.get("padded"), ways.get(NO_LIMIT)
        if ours is None or padded is None or free is None:
            continue  # interrupted
        if free.fits:
            rows.append((f"words a second in batches of {batch}, of what is done without a limit", "at least 1.00x",
                         _faster(ours, free)))
        else:
            rows += [(f"words a second in batches of {batch}, of padded ones", "at least 1.20x", _faster(ours, padded)),
                     (f"peak in batches of {batch}, of padded ones", "at most 1.00x",
                      ratio(ours.peak / padded.peak if padded.peak and ours.peak else None))]
    return rows


def _faster(one: Epoch, other: Epoch) -> str:
    if not one.seconds or not other.seconds:
        return "; ".join(f"{WORDS[epoch.way]}: {REFUSED}" for epoch in (one, other) if not epoch.seconds)
    return ratio(one.words / one.seconds / (other.words / other.seconds))


def _decided(known: Ours) -> list[tuple[str, str, str]]:
    """What programs decide before they run."""
    rows = []
    if known.planning:
        done = [choice.seconds for choice in known.planning if not choice.refused]
        refused = [choice.seconds for choice in known.planning if choice.refused]
        most = f"; a refusal {seconds(max(refused))} at most" if refused else ""
        rows += [("planning of a shape never seen, median", "at most 1 ms", seconds(median(done))),
                 ("the same, worst", "at most 10 ms", f"{seconds(max(done, default=None))}{most}")]
    above = [laid.arena / laid.alive - 1 for laid in known.layouts if laid.alive]
    if above:
        count = len({tuple(laid.shape) for laid in known.layouts})
        rows += [(f"layouts above the bytes alive, mean over {count} shapes", "at most 1 %",
                  f"{sum(above) / len(above) * 100:.2f} %"),
                 ("layouts above the bytes alive, worst", "at most 3 %", f"{max(above) * 100:.2f} %")]
    if known.orders:
        worst = max(known.orders, key=lambda order: order.ours / max(order.best, 1))
        rows.append(("bytes alive in our order, of the best of four searches", "at most 1.02x",
                     f"{worst.ours / max(worst.best, 1):.3f}x ({worst.program}, {worst.by})"))
    return rows


def epochs(found: Limits, model: str) -> list[tuple[str, ...]]:
    """The cells of the table of batches, as EPOCHS_HEAD names them."""
    every = [(known.program, epoch) for known in found.ours if known.model == model for epoch in known.epochs]
    return [(program, str(one.batch), WORDS[one.way], "yes" if one.fits else "no", size(one.peak or None),
             f"{one.words / one.seconds:.0f}" if one.seconds else MISSING) for program, one in every]


def _peaks(found: Limits, way: str, known: Ours) -> list[int]:
    row = found.of(known.model, way)
    return row.peaks if row is not None else []


def _beside(found: Limits, known: Ours, way: str) -> str:
    ours, theirs = found.of(known.model, f"as {way}", known.program), found.of(known.model, way)
    if ours is None or theirs is None or theirs.error:
        return MISSING
    if ours.error:
        return REFUSED
    return ratio(_times(ours.seconds, theirs.seconds))


def _percent(known: Ours) -> str:
    found = geometric_mean(with_it / without for with_it, without in known.unlimited)
    return MISSING if found is None else f"{(found - 1) * 100:+.1f} %"


def models_of(found: Limits) -> list[str]:
    return list(dict.fromkeys([*(row.model for row in found.rows), *(known.model for known in found.ours)]))


def shapes(found: Limits, model: str) -> str:
    every = [row.shapes for row in found.rows if row.model == model]
    return ", ".join("x".join(map(str, shape)) for shape in max(every, key=len, default=[]))


def problems(found: Limits) -> list[str]:
    """Processes that failed, and limits that were not held."""
    said = [f"FAILED: {row.model}, {_name(row)}: {row.error}" for row in found.rows
            if row.error and not _is_refused(row)]
    for known in found.ours:
        for laid in known.layouts:
            if laid.arena < laid.alive:
                said.append(f"WRONG: {laid.program} at {laid.shape} has {laid.arena} bytes for {laid.alive}")
        for call in known.calls:
            if call.need > call.limit and not call.refused:
                said.append(f"OVER: {known.model} at {call.shape} needs {call.need} of {call.limit}")
            if not call.arena:
                said.append(f"WRONG: {known.model} at {call.shape} under {call.limit}: the arena is not as predicted")
    return said


def tables(found: Limits, model: str) -> list[Table]:
    """Ways, aims and batches of sentences of a model; only those that have a line."""
    at = shapes(found, model)
    every = (Table(f"{model} at {at}" if at else model, HEAD, lines(found, model)),
             Table(f"{model}: aims", aims_head(found, model), aims(found, model)),
             Table(f"{model}: batches of sentences", EPOCHS_HEAD, epochs(found, model)))
    return [one for one in every if one.rows]


def report(found: Limits) -> Report:
    """The tables of each model, and what failed."""
    notes = []
    if found.options.get("interrupted"):
        part = ", ".join(found.options["unfinished"])
        notes.append(f"Interrupted: what was known by then is shown (a part of {part}).")
    shown = [table for model in models_of(found) for table in tables(found, model)]
    return Report(shown, markdown(found), document(found), problems(found), notes=notes)


def markdown(found: Limits) -> str:
    """A section with the tables of each model."""
    parts = []
    for model in models_of(found):
        at = shapes(found, model)
        parts += [f"## `{model}`\n\n" + (f"Shapes {at}.\n\n" if at else ""),
                  *(f"{table.markdown()}\n" for table in tables(found, model))]
    return "".join(parts)


INTRODUCTION = """\
# Train steps under a limit

This file is written by `anyshape bench memory ... --write-document` from stored results; it is not edited by hand.
[how-to-benchmark.md](how-to-benchmark.md) says how it is measured and what the columns mean.

"""


def document(found: Limits) -> str:
    """The text of the page."""
    parts = [INTRODUCTION, facts(found.machine, str(found.options.get("threads") or MISSING)),
             f"- rounds: {found.options.get('rounds', MISSING)}\n\n", markdown(found)]
    wrong = problems(found)
    if wrong:
        parts.append(f"## What went wrong\n\n{bullets(wrong)}")
    return "".join(parts).rstrip() + "\n"
