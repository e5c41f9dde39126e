"""The command line of the benchmark: arguments, progress bars, and what is written at the end."""
from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from anyshape.base.errors import AnyShapeError
from anyshape_bench.experiments.memory_budget import options as limits_options
from anyshape_bench.experiments.roofline import results as roofline_results
from anyshape_bench.experiments.speed import charts, report
from anyshape_bench.experiments.speed.results import Results, failed, load, machine
from anyshape_bench.harness import runner
from anyshape_bench.models.suite import (
    AUTOCAST,
    BACKENDS,
    QUICK_SHAPES,
    SUITE,
    check_name,
    default_names,
    named_backends,
)

INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `main` reads."""
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help="models of the suite, or your own: module:function or path.py:function, which returns the "
                             "model, a function that makes its inputs, and ranges of sizes (docs/how-to-benchmark.md)")
    parser.add_argument("--models", default="", metavar="A,B", help="the same as a comma-separated list")
    parser.add_argument("--backends", default=None, metavar="A,B",
                        help="eager, inductor, inductor-padded (into buckets), anyshape, anyshape-single (one program "
                             "per shape, few shapes), or another backend of torch.compile (default: "
                             f"{','.join(BACKENDS)}); of a train step also anyshape-step (default: all four)")
    parser.add_argument("--quick", action="store_true",
                        help=f"{QUICK_SHAPES} shapes, one round, and without names only the two smallest models")
    parser.add_argument("--shapes", type=_positive, default=0, metavar="N", help="shapes per model (default: all)")
    parser.add_argument("--rounds", type=_positive, default=0, metavar="N",
                        help="timed processes per model and backend (default: 2; with --quick 1)")
    parser.add_argument("--repeats", type=_positive, default=0, metavar="N",
                        help="passes over seen shapes (default: the model's own)")
    parser.add_argument("--threads", type=_positive, default=0, metavar="N", help="threads of torch (default: torch's)")
    parser.add_argument("--autocast", choices=AUTOCAST, default="", metavar="DTYPE",
                        help="run every model under torch.autocast: bfloat16 or float16 (default: as it is)")
    parser.add_argument("--no-memory", action="store_true",
                        help="leave out the process that counts memory and compares results with eager")
    parser.add_argument("--limit", type=float, default=900.0, metavar="SECONDS", help="end a process after this time")
    parser.add_argument("--out", type=Path, default=None, metavar="FOLDER",
                        help="folder for results.json, charts and logs (default: bench-DATE-TIME)")
    parser.add_argument("--chart", type=Path, default=None, metavar="FILE",
                        help="draw throughput and peak memory of every model and backend into FILE (.png, .svg, .pdf), "
                             "beside results.json unless it names a folder; needs matplotlib")
    parser.add_argument("--roofline", action="store_true",
                        help="measure functions bound by memory against a copy instead of models; NAME picks some")
    parser.add_argument("--techniques", action="store_true",
                        help="measure each model with all techniques of the compiler, and with one left out")
    parser.add_argument("--memory", action="store_true",
                        help="measure train steps under limits in bytes, beside PyTorch's ways to save memory (also: "
                             "anyshape bench memory NAME ...)")
    parser.add_argument("--step", action="store_true",
                        help="measure whole train steps, beside forward and backward with torch's fused AdamW (also: "
                             "anyshape bench step NAME ...)")
    parser.add_argument("--accumulate", type=_positive, default=None, metavar="N",
                        help="batches of a train step whose memory is counted too, 1 for none (default: 8)")
    parser.add_argument("--plan", action="store_true",
                        help="compare orders and layouts of whole train steps with other ways to plan them (also: "
                             "anyshape bench plan NAME ...)")
    parser.add_argument("--program-seconds", type=float, default=20.0, metavar="SECONDS",
                        help="time of the integer program for each problem of --plan; 0: leave it out (default: 20)")
    limits_options.add_arguments(parser)
    parser.add_argument("--list", action="store_true", help="list the models and end")
    parser.add_argument("--show", type=Path, default=None, metavar="FOLDER", help="show stored results, run nothing")
    parser.add_argument("--markdown", action="store_true", help="also print the table in Markdown")
    parser.add_argument("--write-document", type=Path, default=None, metavar="FILE",
                        help="write the document, for example docs/benchmarks.md")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def main(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        0; 1 when a process failed or a result differs from eager's; 2 for wrong arguments; 130 after Ctrl-C.
    """
    console = Console()
    if arguments.roofline:
        from anyshape_bench.experiments.roofline import experiment as roofline_command  # needs torch: seconds
        return roofline_command.main(arguments, console)
    if arguments.techniques:
        from anyshape_bench.experiments.ablation import experiment as techniques_command
        return techniques_command.main(arguments, console)
    if arguments.memory or arguments.names[:1] == ["memory"]:
        from anyshape_bench.experiments.memory_budget import experiment as limits_command
        return limits_command.main(arguments, console)
    if arguments.step or arguments.names[:1] == ["step"]:
        from anyshape_bench.experiments.train_step import experiment as step_command
        return step_command.main(arguments, console)
    if arguments.plan or arguments.names[:1] == ["plan"]:
        from anyshape_bench.experiments.planning import experiment as plan_command
        return plan_command.main(arguments, console)
    try:
        if arguments.list:
            console.print(listing())
            return 0
        if arguments.chart is not None:
            charts.check_chart()
        if arguments.show is not None:
            results, finished = load(arguments.show), True
            out = arguments.show if arguments.show.is_dir() else arguments.show.parent
        else:
            plan = make_plan(arguments)
            out = arguments.out or Path(time.strftime("bench-%Y%m%d-%H%M%S"))
            results, finished = measure(plan, out, console)
        roofline = roofline_results.beside(out)
        report.show(results, console, roofline)
        if arguments.chart is not None:
            beside = arguments.chart.parent == Path()
            path = charts.chart(results, out / arguments.chart if beside else arguments.chart)
            console.print(f"Drew {path}" if path else "Drew no chart: no model was measured on eager too", markup=False)
    except AnyShapeError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.markdown:
        print(report.markdown(results))
    if arguments.write_document is not None:
        report.write_document(results, arguments.write_document, roofline)
        console.print(f"Wrote {arguments.write_document}", markup=False)
    if not finished:
        return INTERRUPTED
    return 1 if failed(results) else 0


def listing() -> Table:
    """The suite, for `--list`."""
    shown = Table(title="models of anyshape bench")
    for name in ("name", "what", "sizes", "shapes", "when no name is given"):
        shown.add_column(name)
    for entry in SUITE.values():
        ranges = ", ".join(f"{dim} {min(column)}-{max(column)}" if min(column) < max(column) else f"{dim} {min(column)}"
                           for dim, column in zip(entry.dims, zip(*entry.shapes, strict=True), strict=True))
        shown.add_row(entry.name, entry.summary, ranges, str(len(entry.shapes)), "yes" if entry.in_default else "no")
    return shown


def make_plan(arguments: argparse.Namespace) -> runner.Plan:
    """The plan of the arguments.

    Raises:
        ConfigError: a name is not in the suite, or no backend is given.
    """
    names = tuple(dict.fromkeys([*arguments.names, *filter(None, arguments.models.split(","))]))
    for name in names:
        check_name(name)
    backends = named_backends(arguments.backends, BACKENDS)
    quick = arguments.quick
    return runner.Plan(
        models=names or default_names(quick), backends=backends,
        rounds=arguments.rounds or (1 if quick else 2),
        shapes=arguments.shapes or (QUICK_SHAPES if quick else 0),
        repeats=arguments.repeats, threads=arguments.threads, autocast=arguments.autocast,
        memory=not arguments.no_memory, limit=arguments.limit,
    )


def measure(plan: runner.Plan, out: Path, console: Console) -> tuple[Results, bool]:
    """Runs the plan under a progress bar and stores results and charts in `out`. False: Ctrl-C came first."""
    results = Results(machine=machine())
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                  console=console, transient=False) as bars:
        whole = bars.add_task("processes", total=plan.total())
        inner = bars.add_task("", total=1)
        begun = 0

        def progress(job: dict[str, Any]) -> runner.Progress:
            nonlocal begun
            name = f"{job['model']} on {job['backend']}, " + (
                f"round {job['number'] + 1}" if job["mode"] == "time" else "memory and results")
            bars.update(whole, completed=begun)
            begun += 1
            bars.reset(inner, description=name, total=1)

            def tell(event: str, done: int, total: int) -> None:
                bars.update(inner, description=f"{name}: {event}", completed=done, total=total)

            return tell

        # asked to end by another program is the same as Ctrl-C: the child is ended, what is finished is kept
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        finished = runner.run(plan, results, out, progress)
        bars.update(whole, completed=len(results.records))
    pictures = charts.charts(results, out)
    console.print(f"Results and {len(pictures)} charts are in {out}", markup=False)
    return results, finished
