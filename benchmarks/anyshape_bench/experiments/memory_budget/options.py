"""What `anyshape bench memory` is told to measure: the parts that are named, or all but those that take longest."""
from __future__ import annotations

import argparse
from typing import Any

from anyshape_bench.experiments.memory_budget.results import APART, PARTS, ROUNDS, SHAPES
from anyshape_bench.experiments.train_step.results import named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the parts of `anyshape bench memory`."""
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


def options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What is measured of every model: whether the ways are, by part its number, or None for none of it, and the
    rest.

    Raises:
        ConfigError: a backend is not there.
    """
    said = {part: getattr(arguments, part) for part in PARTS}
    some = arguments.ways or any(said.values())
    parts = said if some else {part: usual if said[part] is None and part not in APART else None
                                for part, usual in PARTS.items()}
    return {"ways": arguments.ways or not some, **{part: number or None for part, number in parts.items()},
            "backends": list(named(arguments.backends)), "shapes": arguments.shapes or SHAPES,
            "rounds": arguments.rounds or ROUNDS, "threads": arguments.threads, "autocast": arguments.autocast}


def hardly_run(chosen: dict[str, Any]) -> bool:
    """Whether nothing is asked for but what hardly runs a model, and is there for inference too."""
    return not chosen["ways"] and all(chosen[part] is None for part in ("calls", "epochs", "planning"))
