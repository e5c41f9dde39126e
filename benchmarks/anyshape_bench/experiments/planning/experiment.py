"""`anyshape bench plan`: plans of whole train steps against other ways, under a progress bar; Ctrl-C keeps what is
finished."""
from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from anyshape.base.errors import AnyShapeError, ConfigError
from anyshape.run.context import shared_context
from anyshape_bench.experiments.planning import comparison as plan
from anyshape_bench.experiments.planning import report as plan_report
from anyshape_bench.experiments.planning import train_step_problems as plan_graphs
from anyshape_bench.experiments.speed.results import machine
from anyshape_bench.harness.runner import Runner

INTERRUPTED = 130


def main(arguments: argparse.Namespace, console: Console) -> int:
    """Runs the command, or shows what one has stored.

    Returns:
        0; 1 when a process failed; 2 for wrong arguments; 130 after Ctrl-C.
    """
    try:
        if arguments.show is not None:
            found, finished = plan.load(arguments.show), True
        else:
            names = chosen([*arguments.names, *filter(None, arguments.models.split(","))], arguments.quick)
            out = arguments.out or Path(time.strftime("plan-%Y%m%d-%H%M%S"))
            found, finished = measure(names, arguments, out, console)
    except AnyShapeError as error:
        print(error, file=sys.stderr)
        return 2
    plan_report.show(found, console)
    if arguments.markdown:
        print(plan_report.markdown(found))
    if arguments.write_document is not None:
        plan_report.write_document(found, arguments.write_document)
        console.print(f"Wrote {arguments.write_document}", markup=False)
    return INTERRUPTED if not finished else 1 if plan_report.problems(found) else 0


def chosen(names: Iterable[str], quick: bool) -> tuple[str, ...]:
    """The networks to plan.

    Raises:
        ConfigError: one is not there.
    """
    found = tuple(dict.fromkeys(name for name in names if name != "plan"))
    for name in found:
        if name not in plan_graphs.NETWORKS:
            raise ConfigError(f"no train step of {name!r} is planned", why="there is no network of that name",
                              do=f"choose from {', '.join(plan_graphs.NETWORKS)}")
    return found or (plan.DEFAULT[:1] if quick else (*plan.DEFAULT, plan.DEEP))


def measure(names: tuple[str, ...], arguments: argparse.Namespace, out: Path,
            console: Console) -> tuple[plan.Plans, bool]:
    """Traces each network in a process of its own, where the folder does not have its problems yet, and plans them in
    every way; False: Ctrl-C came first."""
    found = plan.load(out) if (out / plan.FILE).exists() else plan.Plans()
    found.machine = machine()
    batches = plan.QUICK_BATCHES if arguments.quick else plan.BATCHES
    found.options = {"seconds": arguments.program_seconds, "batches": list(batches), "interrupted": False}
    folder = out / plan.PROBLEMS
    folder.mkdir(parents=True, exist_ok=True)
    with (Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   console=console) as bars, tempfile.TemporaryDirectory(prefix="anyshape-bench-",
                                                                         ignore_cleanup_errors=True) as temporary):
        task = bars.add_task("networks", total=len(names))
        runner = Runner(Path(temporary), out, arguments.limit, arguments.threads, plan.MODULE)
        # asked to end by another program is the same as Ctrl-C
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            for name in names:
                def tell(what: str, name: str = name) -> None:
                    bars.update(task, description=f"{name}: {what}")

                if not _is_there(found, name, folder, batches):
                    tell("tracing")
                    found.graphs[name] = runner.run(_job(name, batches, folder, arguments.threads), lambda *_: None)
                _plan(found, name, folder, arguments.program_seconds, tell)
                found.save(out)
                bars.advance(task)
        except KeyboardInterrupt:
            found.options["interrupted"] = True
            found.save(out)
            return found, False
    console.print(f"Results are in {out}", markup=False)
    return found, True


def _job(name: str, batches: tuple[int, ...], folder: Path, threads: int) -> dict[str, Any]:
    return {"model": name, "backend": "anyshape", "mode": "plan", "batches": list(batches),
            "folder": str(folder.resolve()), "threads": threads}


def _is_there(found: plan.Plans, name: str, folder: Path, batches: tuple[int, ...]) -> bool:
    return all(str(batch) in found.graphs.get(name, {}).get("problems", {})
               and (folder / f"{plan.name_of(name, batch)}.txt").exists() for batch in batches)


def _plan(found: plan.Plans, name: str, folder: Path, seconds: float, tell: Callable[[str], None]) -> None:
    for batch, known in found.graphs[name].get("problems", {}).items():
        tell(f"planning, batch {batch}")
        text = (folder / f"{plan.name_of(name, int(batch))}.txt").read_text()
        found.take(plan.compared(name, int(batch), text, known, 0.0 if name == plan.DEEP else seconds,
                                 shared_context()))
