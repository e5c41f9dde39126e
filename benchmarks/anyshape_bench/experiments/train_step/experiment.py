"""`anyshape bench step`: whole train steps, each backend in fresh processes, under a progress bar; Ctrl-C keeps what is
finished."""
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
from anyshape_bench.experiments.speed import charts
from anyshape_bench.experiments.speed.results import machine
from anyshape_bench.experiments.train_step import report as step_report
from anyshape_bench.experiments.train_step import results as step
from anyshape_bench.harness.runner import Runner
from anyshape_bench.models.suite import check_name

INTERRUPTED = 130
CHART = Path("step.png")


def main(arguments: argparse.Namespace, console: Console) -> int:
    """Runs the command, or shows what one has stored.

    Returns:
        0; 1 when a process failed or losses are not eager's; 2 for wrong arguments; 130 after Ctrl-C.
    """
    try:
        if arguments.chart is not None:
            charts.check_chart()
        if arguments.show is not None:
            found, finished = step.load(arguments.show), True
            out = arguments.show if arguments.show.is_dir() else arguments.show.parent
        else:
            out = arguments.out or Path(time.strftime("step-%Y%m%d-%H%M%S"))
            found, finished = measure(options(arguments), out, arguments.limit, console)
        step_report.show(found, console)
        _draw(found, arguments, out, console)
    except AnyShapeError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.markdown:
        print(step_report.markdown(found))
    if arguments.write_document is not None:
        step_report.write_document(found, arguments.write_document)
        console.print(f"Wrote {arguments.write_document}", markup=False)
    return INTERRUPTED if not finished else 1 if step_report.problems(found) else 0


def _draw(found: step.Steps, arguments: argparse.Namespace, out: Path, console: Console) -> None:
    """The chart, beside the results unless it names a folder; after a run without being asked, where it can be."""
    path = arguments.chart
    if path is None and (arguments.show is not None or not charts.can_draw()):
        return
    path = path or CHART
    drawn = step_report.chart(found, out / path if path.parent == Path() else path)
    console.print(f"Drew {drawn}" if drawn else "Drew no chart: no model was measured on eager too", markup=False)


def options(arguments: argparse.Namespace) -> step.Options:
    """What the arguments ask for.

    Raises:
        ConfigError: a model or a backend is not there.
    """
    named = [name for name in (*arguments.names, *filter(None, arguments.models.split(","))) if name != "step"]
    for name in named:
        check_name(name)
    quick = arguments.quick
    return step.Options(
        models=tuple(dict.fromkeys(map(step.training, named))) or ((step.QUICK,) if quick else step.DEFAULT),
        backends=step.named(arguments.backends), rounds=arguments.rounds or step.ROUNDS,
        shapes=arguments.shapes or (step.QUICK_SHAPES if quick else step.SHAPES),
        memory_shapes=step.QUICK_MEMORY_SHAPES if quick else step.MEMORY_SHAPES, repeats=arguments.repeats,
        threads=arguments.threads, autocast=arguments.autocast,
        accumulate=step.ACCUMULATE if arguments.accumulate is None else arguments.accumulate,
        memory=not arguments.no_memory)


def measure(chosen: step.Options, out: Path, limit: float, console: Console) -> tuple[step.Steps, bool]:
    """Runs the processes and stores what each found; False: Ctrl-C came first. What the folder has of other models,
    backends and dtypes stays."""
    found = step.load(out) if (out / step.FILE).exists() else step.Steps()
    found.machine = machine()
    found.options = step.options_of(chosen) | {"interrupted": False}
    jobs = list(chosen.jobs())
    with (Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   console=console) as bars, tempfile.TemporaryDirectory(prefix="anyshape-bench-",
                                                                         ignore_cleanup_errors=True) as folder):
        whole, inner = bars.add_task("processes", total=len(jobs)), bars.add_task("", total=1)
        runner = Runner(Path(folder), out, limit, chosen.threads, step.MODULE)
        found.options["memory_note"] = runner.why_no_counter
        # asked to end by another program is the same as Ctrl-C
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            for job in jobs:
                name = f"{job['model']} on {job['backend']}, {_what(job)}"

                def tell(event: str, done: int, total: int, name: str = name) -> None:
                    bars.update(inner, description=f"{name}: {event}", completed=done, total=total)

                bars.reset(inner, description=name, total=1)
                found.take(job, runner.run(job, tell))
                found.save(out)
                bars.advance(whole)
        except KeyboardInterrupt:
            found.options["interrupted"] = True
            found.save(out)
            return found, False
    console.print(f"Results are in {out}", markup=False)
    return found, True


def _what(job: dict[str, Any]) -> str:
    if job["mode"] == "time":
        return f"round {job['number'] + 1}"
    return "memory and losses" if job["accumulate"] == 1 else f"memory of {job['accumulate']} batches a step"
