"""Runs an experiment: its jobs in worker processes under a progress bar, its results stored after each, then shown."""
from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from anyshape.base.errors import AnyShapeError
from anyshape_bench.harness.experiment import Experiment, Found, Report
from anyshape_bench.harness.machine import machine
from anyshape_bench.harness.runner import Runner

INTERRUPTED = 130


def main(experiment: Experiment[Any], arguments: argparse.Namespace, console: Console) -> int:
    """Runs the command, or shows what one has stored.

    Returns:
        0; 1 when a process failed or a result is wrong; 2 for wrong arguments; 130 after Ctrl-C.
    """
    if arguments.list:
        console.print(experiment.listing().terminal())
        return 0
    try:
        if arguments.chart is not None:
            experiment.check_chart()
        if arguments.show is not None:
            found, finished = experiment.results.load(arguments.show), True
            out = arguments.show if arguments.show.is_dir() else arguments.show.parent
        else:
            options = experiment.options(arguments)
            out = arguments.out or Path(time.strftime(f"{experiment.name}-%Y%m%d-%H%M%S"))
            found, finished = measure(experiment, options, out, arguments.limit, console)
        report = experiment.report(found, out)
        show(report, console)
        for text in experiment.draw(found, arguments.chart, out, arguments.show is None):
            console.print(text, markup=False)
    except AnyShapeError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.markdown:
        print(report.markdown)
    if arguments.write_document is not None:
        arguments.write_document.parent.mkdir(parents=True, exist_ok=True)
        arguments.write_document.write_text(report.page)
        console.print(f"Wrote {arguments.write_document}", markup=False)
    return INTERRUPTED if not finished else 1 if report.problems else 0


def measure(experiment: Experiment[Found], options: dict[str, Any], out: Path, limit: float,
            console: Console) -> tuple[Found, bool]:
    """Runs the jobs and stores what each found. False: Ctrl-C came first, and what had finished is kept."""
    there = experiment.adds_up and (out / experiment.results.FILE).exists()
    found = experiment.results.load(out) if there else experiment.results()
    found.machine = machine()
    found.options |= options | {"interrupted": False}
    with (Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   console=console) as bars,
          tempfile.TemporaryDirectory(prefix="anyshape-bench-", ignore_cleanup_errors=True) as folder):
        whole, inner = bars.add_task("processes", total=experiment.total(options)), bars.add_task("", total=1)
        runner = Runner(Path(folder), out, limit, options.get("threads", 0), experiment.worker)
        found.options["memory_note"] = runner.why_no_counter
        # asked to end by another program is the same as Ctrl-C: the child is ended, what is finished is kept
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        job: dict[str, Any] = {}
        try:
            for job in experiment.jobs(options, found, out):
                label = experiment.label(job)

                def tell(event: str, done: int, total: int, label: str = label) -> None:
                    bars.update(inner, description=f"{label}: {event}", completed=done, total=total)

                bars.reset(inner, description=label, total=1)
                runner.limit = experiment.seconds(job, limit)
                experiment.take(found, job, runner.run(job, tell))
                found.save(out)
                bars.advance(whole)
        except KeyboardInterrupt:
            if job:
                experiment.take(found, job, {"finished": False} | runner.found(job))
            found.options["interrupted"] = True
            found.save(out)
            return found, False
    console.print(f"Results are in {out}", markup=False)
    return found, True


def show(report: Report, console: Console) -> None:
    """Prints tables, notes and problems."""
    for table in report.tables:
        console.print(table.terminal())
    for text in report.said:
        console.print(text, markup=False, highlight=False)
    for text in report.notes:
        console.print(text, style="yellow", markup=False)
    for text in report.problems:
        console.print(text, style="bold red", markup=False, highlight=False)
