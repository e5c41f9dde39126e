"""`anyshape bench memory`: train steps under limits, each way in a process, under a progress bar; Ctrl-C keeps what is
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

from anyshape.base.errors import AnyShapeError, ConfigError
from anyshape_bench.experiments.memory_budget import options as limits_options
from anyshape_bench.experiments.memory_budget import report as limits_report
from anyshape_bench.experiments.memory_budget import results as limits
from anyshape_bench.experiments.speed.results import machine
from anyshape_bench.harness.runner import Runner
from anyshape_bench.models.suite import SUITE, check_name

INTERRUPTED = 130


def main(arguments: argparse.Namespace, console: Console) -> int:
    """Runs the command, or shows what one has stored.

    Returns:
        0; 1 when a process failed or a limit was not held; 2 for wrong arguments; 130 after Ctrl-C.
    """
    try:
        if arguments.show is not None:
            found, finished = limits.load(arguments.show), True
        else:
            found, finished = measure(arguments, console)
    except AnyShapeError as error:
        print(error, file=sys.stderr)
        return 2
    limits_report.show(found, console)
    if arguments.markdown:
        print(limits_report.markdown(found))
    if arguments.write_document is not None:
        limits_report.write_document(found, arguments.write_document)
        console.print(f"Wrote {arguments.write_document}", markup=False)
    return INTERRUPTED if not finished else 1 if limits_report.problems(found) else 0


def measure(arguments: argparse.Namespace, console: Console) -> tuple[limits.Limits, bool]:
    """Measures the models that are named; False: Ctrl-C came first. What the folder has of others, and of other parts,
    stays.

    Raises:
        ConfigError: no model is named, or one that is not there.
    """
    names = [name for name in (*arguments.names, *filter(None, arguments.models.split(","))) if name != "memory"]
    chosen = limits_options.options(arguments)
    if not names and limits_options.hardly_run(chosen):
        names = list(SUITE)
    if not names:
        raise ConfigError("no model to measure under limits", why="each takes minutes",
                          do="name some that train: demo-llama llama-small llama llama-12 llama-32 llama-1b-like "
                             "t5-train unet, or your own")
    for name in names:
        check_name(name)
    out = arguments.out or Path(time.strftime("memory-%Y%m%d-%H%M%S"))
    found = limits.load(out) if (out / limits.FILE).exists() else limits.Limits()
    found.machine = machine()
    found.options |= chosen | {"interrupted": False}
    total = sum(limits.processes(name, chosen) for name in names)
    with (Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   console=console) as bars, tempfile.TemporaryDirectory(prefix="anyshape-bench-",
                                                                         ignore_cleanup_errors=True) as folder):
        whole, inner = bars.add_task("processes", total=total), bars.add_task("", total=1)
        runner = Runner(Path(folder), out, arguments.limit, arguments.threads, limits.MODULE)
        found.options["memory_note"] = runner.why_no_counter
        # asked to end by another program is the same as Ctrl-C
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        job: dict[str, Any] = {}
        try:
            for job in limits.jobs(names, chosen, found):
                name = limits.name_of(job)

                def tell(event: str, done: int, total: int, name: str = name) -> None:
                    bars.update(inner, description=f"{name}: {event}", completed=done, total=total)

                bars.reset(inner, description=name, total=1)
                runner.limit = limits.seconds_of(chosen, job, arguments.limit)
                found.take(job, runner.run(job, tell))
                found.save(out)
                bars.advance(whole)
        except KeyboardInterrupt:
            if job:
                found.take(job, {"finished": False} | runner.found(job))
            found.options["interrupted"] = True
            found.save(out)
            return found, False
    console.print(f"Results are in {out}", markup=False)
    return found, True
