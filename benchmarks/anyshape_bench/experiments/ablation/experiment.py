"""`anyshape bench --techniques`: what each technique gives, under a progress bar; Ctrl-C keeps what is finished."""
from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from anyshape.base.errors import AnyShapeError, ConfigError
from anyshape_bench.experiments.ablation import report as techniques_report
from anyshape_bench.experiments.ablation import worker as techniques
from anyshape_bench.experiments.speed.worker import under
from anyshape_bench.models.suite import check_name

INTERRUPTED = 130


def main(arguments: argparse.Namespace, console: Console) -> int:
    """Runs the command, or shows what one has stored.

    Returns:
        0; 1 when a variant failed; 2 for wrong arguments; 130 after Ctrl-C.
    """
    try:
        if arguments.show is not None:
            found, finished = techniques.load(arguments.show), True
        else:
            found, finished = measure(arguments, console)
    except AnyShapeError as error:
        print(error, file=sys.stderr)
        return 2
    techniques_report.show(found, console)
    if arguments.markdown:
        print(techniques_report.markdown(found))
    if arguments.write_document is not None:
        techniques_report.write_document(found, arguments.write_document)
        console.print(f"Wrote {arguments.write_document}", markup=False)
    return INTERRUPTED if not finished else 1 if techniques_report.problems(found) else 0


def measure(arguments: argparse.Namespace, console: Console) -> tuple[techniques.Techniques, bool]:
    """Measures the models that are named; False: Ctrl-C came first.

    Raises:
        ConfigError: no model is named, or one that is not there.
    """
    names = [*arguments.names, *filter(None, arguments.models.split(","))]
    if not names:
        raise ConfigError("no model to measure techniques on", why="each takes minutes", do="name some: llama bert")
    for name in names:
        check_name(name)
    out = arguments.out or Path(time.strftime("techniques-%Y%m%d-%H%M%S"))
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                  console=console) as bars:
        inner = bars.add_task("", total=1)

        def tell(event: str, done: int, total: int) -> None:
            bars.update(inner, description=event, completed=done, total=total)

        # asked to end by another program is the same as Ctrl-C
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        found, finished = techniques.run(
            names, arguments.rounds or techniques.ROUNDS, arguments.shapes or techniques.SHAPES, arguments.threads,
            lambda call: under(arguments.autocast, call), {"autocast": arguments.autocast}, out, tell)
    console.print(f"Results are in {out}", markup=False)
    return found, finished
