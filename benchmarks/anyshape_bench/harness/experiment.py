"""The spec of an experiment: its jobs, what a worker process does for one, and the report of what was found."""
from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from anyshape_bench.harness.result_files import StoredRun
from anyshape_bench.harness.tables import Table
from anyshape_bench.models.suite import SUITE, check_name

Found = TypeVar("Found", bound=StoredRun)
Job = dict[str, Any]  # `model`, `backend`, `threads`, and what tells it from others and says what is to be done


@dataclass(frozen=True, slots=True)
class Report:
    """What is shown of a run.

    Attributes:
        tables: for the terminal; said: what is printed behind them; notes: the same, as a warning.
        problems: what went wrong, one text each: any makes the command fail.
        markdown: the tables in Markdown; page: the document.
    """

    tables: Sequence[Table]
    markdown: str
    page: str
    problems: Sequence[str] = ()
    said: Sequence[str] = ()
    notes: Sequence[str] = ()


class Experiment(Generic[Found]):
    """An experiment, as `driver.main` runs it. Options are what is stored of how it ran.

    Attributes:
        name: `anyshape bench NAME`, and what its folders begin with.
        worker: the module whose `answer(job)` and `measure(job, found, tell)` a process calls (harness/worker.py).
        results: what is stored.
        adds_up: runs into one folder add up; else each begins anew.
    """

    name: str
    worker: str
    results: type[Found]
    adds_up = False

    def options(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """What is asked for, with the names of what is measured as `models`.

        Raises:
            ConfigError: something that is named is not there.
        """
        raise NotImplementedError

    def jobs(self, options: dict[str, Any], found: Found, out: Path) -> Iterator[Job]:
        """The processes in order; `found` has what those before found."""
        raise NotImplementedError

    def total(self, options: dict[str, Any]) -> int:
        """How many there are."""
        raise NotImplementedError

    def label(self, job: Job) -> str:
        """What a job is called where it is shown."""
        return f"{job['model']} on {job['backend']}"

    def seconds(self, job: Job, limit: float) -> float:
        """After which time its process is ended."""
        return limit

    def take(self, found: Found, job: Job, answer: dict[str, Any]) -> None:
        """Adds what a process found. `error` says that it failed; `finished` is False where it was ended by Ctrl-C:
        the answer is then what it had by that time, perhaps nothing."""
        raise NotImplementedError

    def report(self, found: Found, folder: Path) -> Report:
        """What is shown of a run that is stored in `folder`."""
        raise NotImplementedError

    def listing(self) -> Table:
        """What can be measured, for `--list`."""
        rows = []
        for entry in SUITE.values():
            ranges = ", ".join(f"{dim} {min(column)}-{max(column)}" if min(column) < max(column)
                               else f"{dim} {min(column)}"
                               for dim, column in zip(entry.dims, zip(*entry.shapes, strict=True), strict=True))
            rows.append((entry.name, entry.summary, ranges, str(len(entry.shapes)),
                         "yes" if entry.in_default else "no"))
        return Table("models of anyshape bench", ("name", "what", "sizes", "shapes", "when no name is given"), rows,
                     words=range(5))

    def check_chart(self) -> None:
        """Raises ConfigError where a chart could not be drawn, so that it is known before hours of measuring."""

    def draw(self, found: Found, path: Path | None, out: Path, measured: bool) -> list[str]:
        """Draws charts, into `path` if it is given, and says which. measured: the run has just ended."""
        return []


def named(arguments: argparse.Namespace, word: str = "") -> tuple[str, ...]:
    """All that is named, each once, but for the experiment's own word."""
    names = (*arguments.names, *filter(None, arguments.models.split(",")))
    return tuple(dict.fromkeys(name for name in names if name != word))


def named_models(arguments: argparse.Namespace, word: str = "") -> tuple[str, ...]:
    """The same, of models.

    Raises:
        ConfigError: one is not there.
    """
    names = named(arguments, word)
    for name in names:
        check_name(name)
    return names
