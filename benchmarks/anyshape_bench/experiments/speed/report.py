"""Report of the speed experiment: tables, targets, and the document; charts.py draws it."""
from __future__ import annotations

from collections.abc import Callable

from anyshape_bench.experiments.roofline.results import Roofline
from anyshape_bench.experiments.speed.results import Cell, Results, backends_of, cells, models_of
from anyshape_bench.experiments.speed.targets import measures
from anyshape_bench.harness import targets
from anyshape_bench.harness.experiment import Report
from anyshape_bench.harness.machine import facts
from anyshape_bench.harness.tables import MISSING, Table, bullets, ratio, seconds, size
from anyshape_bench.measure.statistics import geometric_mean
from anyshape_bench.models.suite import SUITE, said_of


def programs(cell: Cell) -> str:
    """Compiled programs and the shapes that were run; parts that a backend ran uncompiled, and calls that ran as eager,
    are said, as they are no faster than eager."""
    if cell.programs is None:
        return MISSING
    return f"{cell.programs} / {cell.shapes}" + (f", {cell.fallbacks} uncompiled" if cell.fallbacks else "") \
        + (f", {cell.eager_calls} calls as eager" if cell.eager_calls else "")


def launches(cell: Cell) -> str:
    """Launches of one step, and their ratio to Inductor's."""
    if cell.launches is None:
        return MISSING
    return f"{cell.launches}" + (f" ({ratio(cell.launch_ratio)})" if cell.launch_ratio is not None else "")


def arena(cell: Cell) -> str:
    """The greatest predicted peak of the arena, and whether each is the counted one."""
    if cell.arena_wrong:
        return cell.arena_wrong
    return MISSING if cell.arena is None else f"{size(cell.arena)} ="


def verdict(cell: Cell) -> str:
    if cell.errors:
        return "failed"
    if cell.mismatches:
        return "WRONG"
    if cell.backend == "eager":
        return "reference"
    return "yes" if cell.checked else "not compared"


Column = tuple[str, Callable[[Cell], str]]

NAMES: tuple[Column, ...] = (("model", lambda c: c.model), ("backend", lambda c: c.backend))
SPEED: tuple[Column, ...] = (
    ("cold first step", lambda c: seconds(c.cold)),
    ("warm first step", lambda c: seconds(c.warm)),
    ("new shapes", lambda c: ratio(c.fresh)),
    ("seen shapes", lambda c: ratio(c.repeated)),
    ("first 1", lambda c: seconds(c.apart)),
    ("p50", lambda c: seconds(c.p50)),
    ("p99", lambda c: seconds(c.p99)),
)
MEMORY: tuple[Column, ...] = (
    ("programs / shapes", programs),
    ("launches", launches),
    ("peak memory", lambda c: size(c.peak)),
    ("of eager's", lambda c: ratio(c.peak_ratio)),
    ("arena predicted", arena),
    ("same as eager", verdict),
)


def table(results: Results, title: str, columns: tuple[Column, ...]) -> Table:
    """A line for each model and backend."""
    found = cells(results)
    columns = NAMES + columns
    return Table(title, [name for name, _ in columns], [[read(cell) for _, read in columns] for cell in found],
                 words=(0, 1), narrow=True, grouped=True,
                 styles=["bold red" if cell.errors or cell.mismatches else None for cell in found])


def problems(results: Results) -> list[str]:
    """Everything that went wrong, one line or block each; empty when nothing did."""
    found = []
    for cell in cells(results):
        name = f"{cell.model} on {cell.backend}"
        found += [f"WRONG RESULT: {name}: {text}" for text in cell.mismatches]
        found += [f"WRONG PREDICTION: {name}: {cell.arena_wrong}"] if cell.arena_wrong else []
        found += [f"FAILED: {name}: {text}" for text in cell.errors]
    return found


def report(results: Results, roofline: Roofline | None = None) -> Report:
    """Tables, what is reached of what is aimed at, notes and problems."""
    tables = [table(results, "Time; throughput relative to eager (more is faster)", SPEED),
              table(results, "Programs, memory above parameters and optimiser state, results", MEMORY)]
    found = measures(results, roofline)
    if any(one.value is not None for one in found):
        tables.append(targets.table(found))
    autocast, note = results.options.get("autocast"), results.options.get("memory_note")
    said = [f"Every model ran under torch.autocast to {autocast}."] if autocast else []
    notes = [f"Peak memory is resident memory, which is coarse: {note}."] if note else []
    if results.options.get("interrupted"):
        notes.append("Interrupted: only what had finished is shown.")
    return Report(tables, markdown(results), document(results, roofline), problems(results), said, notes)


def markdown(results: Results) -> str:
    """The summary as a Markdown table, ready for a README."""
    return table(results, "", SPEED + MEMORY).markdown()


def averages(results: Results) -> str:
    """Geometric means over the models that every backend finished, as a Markdown table."""
    backends = [b for b in backends_of(results) if b != "eager"]
    by_name = {(c.model, c.backend): c for c in cells(results)}
    wanted: tuple[tuple[str, str], ...] = (("new shapes", "fresh"), ("seen shapes", "repeated"),
                                           ("peak memory of eager's", "peak_ratio"))
    rows = []
    for backend in backends:
        row = [backend]
        for _, field in wanted:
            common = [m for m in models_of(results)
                      if all((m, b) in by_name and getattr(by_name[m, b], field) for b in backends)]
            mean = geometric_mean(getattr(by_name[m, backend], field) for m in common)
            row.append(f"{ratio(mean)} ({len(common)} model{'s' if len(common) > 1 else ''})" if common else MISSING)
        rows.append(row)
    return Table("", ["backend", *(name for name, _ in wanted)], rows).markdown()


INTRODUCTION = """\
# Benchmarks

This file is written by `anyshape bench --write-document` from stored results; it is not edited by hand.
[how-to-benchmark.md](how-to-benchmark.md) says how it is measured and what the columns mean.

"""


def document(results: Results, roofline: Roofline | None = None) -> str:
    """The text of the page."""
    threads = sorted({r["threads"] for r in results.records if not r["error"]})
    lines = [INTRODUCTION, "## Machine\n\n", facts(results.machine, ", ".join(map(str, threads)) or MISSING)]
    autocast = results.options.get("autocast")
    if autocast:
        lines.append(f"\nEvery model runs under `torch.autocast` to {autocast}.\n")
    lines += ["\n## Results\n\n", markdown(results), "\n### Geometric means\n\n", averages(results), "\n",
              "### Targets\n\n", targets.table(measures(results, roofline)).markdown(), "\n"]
    wrong = problems(results)
    if wrong:
        lines.append(f"### What went wrong\n\n{bullets(wrong)}\n")
    if results.options.get("interrupted"):
        lines.append("The run was interrupted; only what had finished is shown.\n\n")
    lines.append("## Models\n\n" + "".join(f"- `{m}`: {describe(results, m)}\n" for m in models_of(results)) + "\n")
    note = results.options.get("memory_note")
    if note:
        lines.append(f"Peak memory is resident memory, which is coarse ({note}).\n\n")
    lines.append(f"Rounds: {results.options.get('rounds')}. Run again with `anyshape bench`.\n")
    return "".join(lines)


def describe(results: Results, model: str) -> str:
    """The model in a line, and the sizes that were really run."""
    records = [r for r in results.records if r["model"] == model and r["shapes"]]
    shapes = max(([tuple(s) for s in r["shapes"]] for r in records), key=len, default=[])
    entry = SUITE.get(model)
    text = entry.summary if entry else "a user's own"
    if not shapes:
        return text
    names = records[0].get("dims") or tuple(f"size {i}" for i in range(len(shapes[0])))
    ranges = (f"{name} {min(column)}-{max(column)}" if min(column) != max(column) else f"{name} {min(column)}"
              for name, column in zip(names, zip(*shapes, strict=True), strict=True))
    return f"{text}; {', '.join(ranges)}; {said_of(tuple(shapes))}"
