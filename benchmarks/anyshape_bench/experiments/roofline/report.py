"""Shows a roofline: a table for the terminal, one in Markdown, and the page."""
from __future__ import annotations

from collections.abc import Callable

from anyshape_bench.experiments.roofline.results import LEAST_SHARE, SHARE, Line, Roofline
from anyshape_bench.harness.experiment import Report
from anyshape_bench.harness.machine import facts
from anyshape_bench.harness.tables import MISSING, Table, bullets, seconds, share
from anyshape_bench.measure.statistics import geometric_mean, median

Column = tuple[str, Callable[[Line], str]]


def rate(value: float | None) -> str:
    return MISSING if value is None else f"{value / 1e9:.1f} GB/s"


def ran(line: Line) -> str:
    """What our program was made of: 1 kernel, 2 kernels + 1 of PyTorch."""
    words = {"kernels": ("kernel", "kernels"), "products": ("product", "products"), "copies": ("copy", "copies"),
             "calls": ("of PyTorch", "of PyTorch")}
    return " + ".join(f"{number} {word[number > 1]}" for kind, word in words.items()
                      if (number := line.launches.get(kind, 0))) or MISSING


def verdict(line: Line) -> str:
    return "failed" if line.error else "WRONG" if line.wrong else "yes"


def reached(line: Line) -> str:
    """Whether the share is what the issue asks for."""
    value = line.share()
    return MISSING if value is None else "short, under the least" if value < LEAST_SHARE else \
        "short" if value < SHARE else "reached"


COLUMNS: tuple[Column, ...] = (
    ("function", lambda line: line.name),
    ("way", lambda line: line.way),
    ("sizes", lambda line: " x ".join(map(str, line.sizes))),
    ("moved", lambda line: f"{line.moved / 1e6:.0f} MB"),
    ("time", lambda line: seconds(line.ours)),
    ("rate", lambda line: rate(line.rate())),
    ("of a copy", lambda line: share(line.share())),
    ("eager", lambda line: seconds(line.eager)),
    ("eager of a copy", lambda line: share(line.eager_share())),
    ("made of", ran),
    ("reach", reached),
    ("same as eager", verdict),
)
WORDS = (0, 1, 2, 9, 10, 11)  # columns of words, which stand on the left


def table(found: Roofline) -> Table:
    """A line for each function and way."""
    styles = ["bold red" if line.error or line.wrong else "yellow" if reached(line).startswith("short") else None
              for line in found.lines]
    return Table("Functions bound by memory, against a copy measured in turn", [name for name, _ in COLUMNS],
                 [[read(line) for _, read in COLUMNS] for line in found.lines], words=WORDS, styles=styles, narrow=True)


def summary(found: Roofline) -> str:
    """In words: how many lines reach what is asked for, and the mean."""
    shares = [line.share() for line in found.lines]
    known = [one for one in shares if one is not None]
    if not known:
        return "Nothing was measured.\n"
    speed = median(line.copied / line.copy for line in found.lines if line.copy)
    under = [f"{line.name} {line.way}" for line in found.lines if (line.share() or 1.0) < LEAST_SHARE]
    return (f"The copy moved {rate(speed)} (median). {sum(one >= SHARE for one in known)} of {len(known)} lines reach "
            f"{share(SHARE)} of it; {len(under)} are under {share(LEAST_SHARE)}"
            + (f": {', '.join(under)}" if under else "") + f". Geometric mean {share(geometric_mean(known))}, eager's "
            f"{share(geometric_mean(line.eager_share() for line in found.lines))}.\n")


def problems(found: Roofline) -> list[str]:
    """What failed, or came out other than eager's."""
    return [f"FAILED: {line.name} {line.way}: {line.error}" if line.error else
            f"WRONG RESULT: {line.name} {line.way}: {line.wrong}" for line in found.lines if line.error or line.wrong]


def report(found: Roofline) -> Report:
    """Table, summary and problems."""
    notes = ["Interrupted: only what had finished is shown."] if found.options.get("interrupted") else []
    return Report([table(found)], table(found).markdown(), document(found), problems(found), [summary(found)], notes)


INTRODUCTION = """\
# Roofline

This file is written by `anyshape bench --roofline --write-document` from stored results; it is not edited by hand.
[how-to-benchmark.md](how-to-benchmark.md) says how it is measured and what the columns mean.

"""

KEPT = ("Freed memory stays with the process (`mallopt`), so that neither side pays for page faults of its results at "
        "every call; in a program of its own a result of more than 32 MB does, in eager too.")
NOT_KEPT = "The C library gives freed memory back, so each result's pages are faulted in anew; the copy's are not."


def document(found: Roofline) -> str:
    """The text of the page."""
    threads = found.options.get("threads", MISSING)
    lines = [INTRODUCTION, "## Machine\n\n", facts(found.machine, str(threads)), "\n## Results\n\n",
             table(found).markdown(), "\n", summary(found)]
    if found.options.get("interrupted"):
        lines.append("\nThe run was interrupted; only what had finished is shown.\n")
    wrong = problems(found)
    if wrong:
        lines.append("\n### What went wrong\n\n" + bullets(wrong))
    lines.append(f"\nRounds: {found.options.get('rounds', MISSING)}. ")
    lines.append(f"{KEPT if found.options.get('kept') else NOT_KEPT}\n")
    return "".join(lines)
