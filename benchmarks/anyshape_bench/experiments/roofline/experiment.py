"""`anyshape bench --roofline`: the functions bound by memory, under a progress bar; Ctrl-C keeps what is finished."""
from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from anyshape.base.errors import AnyShapeError
from anyshape_bench.experiments.roofline import report as roofline_report
from anyshape_bench.experiments.roofline import worker as roofline
from anyshape_bench.experiments.roofline.functions import FUNCTIONS
from anyshape_bench.experiments.roofline.results import Roofline, failed, load

ROUNDS, QUICK_ROUNDS = 25, 5
INTERRUPTED = 130


def main(arguments: argparse.Namespace, console: Console) -> int:
    """Runs the command, or shows what one has stored.

    Returns:
        0; 1 when a function failed or a result differs from eager's; 2 for wrong arguments; 130 after Ctrl-C.
    """
    if arguments.list:
        console.print(listing())
        return 0
    try:
        if arguments.show is not None:
            found, finished = load(arguments.show), True
        else:
            found, finished = measure(arguments, console)
    except AnyShapeError as error:
        print(error, file=sys.stderr)
        return 2
    roofline_report.show(found, console)
    if arguments.markdown:
        print(roofline_report.markdown(found))
    if arguments.write_document is not None:
        roofline_report.write_document(found, arguments.write_document)
        console.print(f"Wrote {arguments.write_document}", markup=False)
    return INTERRUPTED if not finished else 1 if failed(found) else 0


def listing() -> Table:
    """The functions of the roofline, for `--roofline --list`."""
    shown = Table(title="functions of anyshape bench --roofline")
    for name in ("name", "compiled at", "measured at", "backward too"):
        shown.add_column(name)
    for one in FUNCTIONS.values():
        shown.add_row(one.name, *(" x ".join(map(str, sizes)) for sizes in (one.small, one.large)),
                      "yes" if one.backward else "no")
    return shown


def measure(arguments: argparse.Namespace, console: Console) -> tuple[Roofline, bool]:
    """Runs the functions that are asked for; False: Ctrl-C came first.

    Raises:
        ConfigError: a function that is named does not exist.
    """
    names = [*arguments.names, *filter(None, arguments.models.split(","))]
    functions = roofline.chosen(names)
    out = arguments.out or Path(time.strftime("roofline-%Y%m%d-%H%M%S"))
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                  console=console) as bars:
        whole = bars.add_task("functions", total=len(functions))
        inner = bars.add_task("", total=1)
        done: dict[str, None] = {}

        def tell(name: str, number: int, total: int) -> None:
            done[name] = None
            bars.update(whole, completed=len(done) - (number < total))
            bars.update(inner, description=name, completed=number, total=total)

        # asked to end by another program is the same as Ctrl-C
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        found, finished = roofline.run(functions, rounds, arguments.threads, out, tell)
        if finished:
            bars.update(whole, completed=len(functions))
    console.print(f"Results are in {out}", markup=False)
    return found, finished
