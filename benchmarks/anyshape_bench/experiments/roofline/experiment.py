"""The roofline, `anyshape bench --roofline`: memory-bound functions against a copy, all in one process."""
from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anyshape.base.errors import ConfigError
from anyshape_bench.experiments.roofline.functions import FUNCTIONS
from anyshape_bench.experiments.roofline.report import report
from anyshape_bench.experiments.roofline.results import Line, Roofline
from anyshape_bench.harness.experiment import Experiment, Job, Report, named
from anyshape_bench.harness.result_files import made
from anyshape_bench.harness.tables import Table

ROUNDS, QUICK_ROUNDS = 25, 5


class MemoryBound(Experiment[Roofline]):
    """One process, which measures one function after another."""

    name = "roofline"
    worker = "anyshape_bench.experiments.roofline.worker"
    results = Roofline

    def options(self, arguments: argparse.Namespace) -> dict[str, Any]:
        names = named(arguments)
        unknown = [name for name in names if name not in FUNCTIONS]
        if unknown:
            raise ConfigError(f"the roofline has no function {', '.join(unknown)}",
                              why=f"it has {', '.join(FUNCTIONS)}", do="name one of these")
        return {"functions": list(names or FUNCTIONS), "threads": arguments.threads,
                "rounds": arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)}

    def jobs(self, options: dict[str, Any], found: Roofline, out: Path) -> Iterator[Job]:
        yield options | {"model": "roofline", "backend": "anyshape", "mode": "time"}

    def total(self, options: dict[str, Any]) -> int:
        return 1

    def take(self, found: Roofline, job: Job, answer: dict[str, Any]) -> None:
        found.lines = made(list[Line], answer.get("lines", []))
        found.options |= {key: answer[key] for key in ("threads", "kept") if key in answer}
        if answer.get("error"):
            found.lines.append(Line("roofline", "forward", [], [], error=answer["error"]))

    def report(self, found: Roofline, folder: Path) -> Report:
        return report(found)

    def listing(self) -> Table:
        """The functions of the roofline."""
        sizes = [[" x ".join(map(str, some)) for some in (one.small, one.large)] for one in FUNCTIONS.values()]
        return Table("functions of anyshape bench --roofline", ("name", "compiled at", "measured at", "backward too"),
                     [(one.name, *some, "yes" if one.backward else "no")
                      for one, some in zip(FUNCTIONS.values(), sizes, strict=True)], words=range(4))
