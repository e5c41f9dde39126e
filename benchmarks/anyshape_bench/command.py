"""The command line of the benchmarks: its arguments, and the experiment that they ask for."""
from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from anyshape_bench.experiments.memory_budget.results import PARTS
from anyshape_bench.harness import driver
from anyshape_bench.harness.experiment import Experiment
from anyshape_bench.models.suite import AUTOCAST, BACKENDS, QUICK_SHAPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `main` reads."""
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help="models of the suite, or your own: module:function or path.py:function, which returns the "
                             "model, a function that makes its inputs, and ranges of sizes (docs/how-to-benchmark.md)")
    parser.add_argument("--models", default="", metavar="A,B", help="the same as a comma-separated list")
    parser.add_argument("--only", default="", metavar="A,B",
                        help="cases or rows of `anyshape bench routes` (default: all)")
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
    _add_memory_arguments(parser)
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


def experiment_of(arguments: argparse.Namespace) -> Experiment[Any]:
    """The experiment that is asked for. Modules are imported when they are: some need torch, which takes seconds."""
    word = next(iter(arguments.names), "")
    if arguments.roofline:
        from anyshape_bench.experiments.roofline.experiment import MemoryBound
        return MemoryBound()
    if arguments.techniques:
        from anyshape_bench.experiments.ablation.experiment import Ablation
        return Ablation()
    if arguments.memory or word == "memory":
        from anyshape_bench.experiments.memory_budget.experiment import MemoryBudget
        return MemoryBudget()
    if arguments.step or word == "step":
        from anyshape_bench.experiments.train_step.experiment import TrainSteps
        return TrainSteps()
    if arguments.plan or word == "plan":
        from anyshape_bench.experiments.planning.experiment import Planning
        return Planning()
    if word == "routes":
        from anyshape_bench.experiments.routes.experiment import RoutingNetworks
        return RoutingNetworks()
    from anyshape_bench.experiments.speed.experiment import Speed
    return Speed()


def main(arguments: argparse.Namespace) -> int:
    """Runs the experiment that is asked for; `driver.main` says what it returns."""
    return driver.main(experiment_of(arguments), arguments, Console())


def _add_memory_arguments(parser: argparse.ArgumentParser) -> None:
    """The parts of `anyshape bench memory`."""
    group = parser.add_argument_group("parts of `anyshape bench memory`", "those that are named are measured, without "
                                      "any all but --orders; a number of 0 leaves one out")
    group.add_argument("--ways", action="store_true", help="peaks and times, of ours and of PyTorch's ways to save "
                                                          "memory")
    group.add_argument("--calls", type=_number, nargs="?", default=None, const=PARTS["calls"], metavar="N",
                       help="random shapes that are run under six limits each (default: 200 of a small model, 6 of "
                            "most)")
    group.add_argument("--epochs", type=_number, nargs="?", default=None, const=PARTS["epochs"], metavar="N",
                       help="batches of each of three counts of sentences (default: %(const)s)")
    group.add_argument("--planning", type=_number, nargs="?", default=None, const=PARTS["planning"], metavar="N",
                       help="shapes never seen for which it is chosen what to keep (default: %(const)s)")
    group.add_argument("--layouts", type=_number, nargs="?", default=None, const=PARTS["layouts"], metavar="N",
                       help="random shapes at which arenas are compared with the bytes alive, for inference too "
                            "(default: %(const)s)")
    group.add_argument("--orders", type=_number, nargs="?", default=None, const=PARTS["orders"], metavar="SECONDS",
                       help="of processor time for each of four searches of an order of steps, for inference too "
                            "(default: %(const)s)")


def _number(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value
