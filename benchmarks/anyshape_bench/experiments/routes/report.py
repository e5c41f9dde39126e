"""Shows dynamic networks: what is aimed at, per row a table of cases and ways, and the page."""
from __future__ import annotations

from collections.abc import Iterator

from anyshape_bench.experiments.routes.results import CaseRecord, Routes, WayRecord
from anyshape_bench.experiments.routes.rows import ROWS, measures
from anyshape_bench.harness.experiment import Report
from anyshape_bench.harness.machine import facts
from anyshape_bench.harness.tables import MISSING, Table, bullets, ratio, seconds, size
from anyshape_bench.measure.statistics import geometric_mean, median

HEAD = ("case", "way", "seen loads", "ours is faster", "new loads", "ours is faster", "programs", "recompiled",
        "peak memory", "same results")
AIM_HEAD = ("measure", "the paper, on GPUs", "reach here", "measured", "of", "")
COMMAND = "`anyshape bench routes ... --write-document`"


def aims(found: Routes, every: bool) -> Table:
    """One line for each measure of every row, or of those that were measured."""
    lines, styles = [], []
    for paper, one in measures(found):
        if not every and one.value is None:
            continue
        name, *rest = one.cells()
        lines.append((name, paper, *rest))
        styles.append("yellow" if one.verdict() == "short" else None)
    return Table("What is aimed at", AIM_HEAD, lines, words=(0, 1, 4, 5), styles=styles)


def tables(found: Routes) -> Iterator[Table]:
    """Per row all its cases and ways; a study has a line for each value."""
    for row in ROWS:
        cases = found.rows(row)
        lines = [line for case in cases for line in _lines(found, case)]
        if lines:
            styles = ["bold red" if line[-1] in ("failed", "WRONG") else None for line in lines]
            yield Table(row, HEAD, lines, words=(0, 1, 9), styles=styles, narrow=True, grouped=True)
            yield from _summary(found, row, cases)
        values = [(case, key, f"{number:.4g}") for case in cases for record in found.of(case)
                  for key, number in record.values.items()]
        if values:
            yield Table(row, ("study", "what", "value"), values, words=(0, 1))


def _summary(found: Routes, row: str, cases: list[str]) -> Iterator[Table]:
    """The geometric means over a row of several cases."""
    if len(cases) < 2:
        return
    ways = list(dict.fromkeys(way.name for case in cases for one in found.of(case) for way in one.ways))
    lines = []
    for way in ways:
        ratios = [value for case in cases if (value := found.ratio(case, way)) is not None]
        fresh = [value for case in cases if (value := found.ratio(case, way, True)) is not None]
        lines.append((way, str(len(ratios)), ratio(geometric_mean(ratios)), ratio(min(ratios, default=None)),
                      ratio(geometric_mean(fresh))))
    yield Table(f"{row}: how many times faster ours is", ("way", "cases", "geometric mean", "least", "new loads"),
                lines)


def _lines(found: Routes, case: str) -> Iterator[tuple[str, ...]]:
    timed = found.of(case)
    for name in dict.fromkeys(way.name for record in timed for way in record.ways):
        yield _line(found, case, name, [way for record in timed if (way := record.way(name))])
    for name in dict.fromkeys(name for record in timed for name in record.left_out):
        yield (case, name, *[MISSING] * 7, "left out")


def _line(found: Routes, case: str, name: str, ways: list[WayRecord]) -> tuple[str, ...]:
    fresh = median(time for way in ways if (time := way.fresh_time()) is not None)
    seen = median(time for way in ways if (time := way.time()) is not None)
    programs = max((way.programs for way in ways if way.programs is not None), default=None)
    again = max((way.recompiled for way in ways if way.recompiled is not None), default=None)
    return (case, name, seconds(seen), ratio(found.ratio(case, name)), seconds(fresh),
            ratio(found.ratio(case, name, True)), MISSING if programs is None else str(programs),
            MISSING if again is None else str(again), size(peak_of(found.of(case, "memory"), name)), _verdict(ways))


def peak_of(records: list[CaseRecord], name: str) -> int | None:
    """The greatest over batches."""
    return max((max(way.peaks) for record in records if (way := record.way(name)) and way.peaks), default=None)


def _verdict(ways: list[WayRecord]) -> str:
    if any(way.error for way in ways):
        return "failed"
    if any(way.wrong for way in ways):
        return "WRONG"
    parts = max((way.uncompiled for way in ways), default=0)
    return f"yes, {parts} uncompiled" if parts else "yes"


def problems(found: Routes) -> list[str]:
    """Processes and ways that failed, and results that differ from the plain form's. A baseline that fails is said in
    its table, and is no problem of ours."""
    said = []
    for record in found.records:
        if record.error:
            said.append(f"FAILED: {record.case}, {record.mode}: {record.error}")
        for way in record.ways:
            ours = way.backend not in ("inductor",)
            if way.error and ours:
                said.append(f"FAILED: {record.case}, {way.name}, {record.mode}: {way.error}")
            if way.wrong:
                said.append(f"WRONG: {record.case}, {way.name}: {way.wrong}")
    return said


def notes(found: Routes) -> list[str]:
    """What a reader has to know of the numbers."""
    said = [f"{record.case}, {name}: left out: {why}" for record in found.records if record.mode == "time"
            for name, why in record.left_out.items()]
    said += [f"{record.case}, {way.name} failed: {way.error}" for record in found.records for way in record.ways
             if way.error and way.backend == "inductor"]
    if found.options.get("memory_note"):
        said.append(f"resident memory, not counted blocks: {found.options['memory_note']}")
    return list(dict.fromkeys(said))


def report(found: Routes) -> Report:
    """What is aimed at, the tables, and what failed."""
    shown = [aims(found, False), *tables(found)]
    said = ["Interrupted: what had finished is shown."] if found.options.get("interrupted") else []
    return Report(shown, markdown(found), document(found), problems(found), notes=[*notes(found), *said])


def markdown(found: Routes) -> str:
    """The tables, each under its title."""
    return "".join(f"## {table.title}\n\n{table.markdown()}\n" for table in (aims(found, True), *tables(found)))


INTRODUCTION = f"""\
# Dynamic networks

This file is written by {COMMAND} from stored results; it is not edited by hand.
[how-to-benchmark.md](how-to-benchmark.md#dynamic-networks) says how it is measured and what the columns mean.

"""


def document(found: Routes) -> str:
    """The text of the page."""
    threads = sorted({record.threads for record in found.records if not record.error})
    commits = sorted({f"{record.commit or 'not kept'} ({record.date})" for record in found.records})
    parts = [INTRODUCTION, "## Machine\n\n", facts(found.machine, ", ".join(map(str, threads)) or MISSING),
             f"- commits that were measured: {', '.join(commits)}\n\n", markdown(found)]
    if notes(found):
        parts.append("## Notes\n\n" + bullets(notes(found)))
    wrong = problems(found)
    if wrong:
        parts.append("\n## What went wrong\n\n" + bullets(wrong))
    return "".join(parts).rstrip() + "\n"
