"""Shows a roofline: a table for the terminal, one in Markdown, and the document docs/roofline.md."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from anyshape_bench.experiments.roofline.results import LEAST_SHARE, SHARE, Line, Roofline
from anyshape_bench.experiments.speed.report import MISSING, facts, seconds
from anyshape_bench.experiments.speed.results import geometric_mean, median

Column = tuple[str, Callable[[Line], str]]


def share(value: float | None) -> str:
    return MISSING if value is None else f"{value * 100:.0f} %"


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
    """The lines for a terminal; headers break at their spaces, to leave room for the numbers."""
    shown = Table(title="Functions bound by memory, against a copy measured in turn", title_justify="left")
    for i, (name, _) in enumerate(COLUMNS):
        shown.add_column(name.replace(" ", "\n"), justify="left" if i in WORDS else "right")
    for line in found.lines:
        style = "bold red" if line.error or line.wrong else "yellow" if reached(line).startswith("short") else None
        shown.add_row(*(read(line) for _, read in COLUMNS), style=style)
    return shown


def markdown(found: Roofline) -> str:
    """The lines as a Markdown table."""
    head = "| " + " | ".join(name for name, _ in COLUMNS) + " |"
    rule = "|" + "|".join("---" if i in WORDS else "---:" for i in range(len(COLUMNS))) + "|"
    rows = ["| " + " | ".join(read(line) for _, read in COLUMNS) + " |" for line in found.lines]
    return "\n".join([head, rule, *rows]) + "\n"


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


def show(found: Roofline, console: Console) -> None:
    """Prints table, summary and problems."""
    console.print(table(found))
    console.print(summary(found), markup=False, highlight=False)
    if found.options.get("interrupted"):
        console.print("Interrupted: only what had finished is shown.", style="yellow")
    for text in problems(found):
        console.print(text, style="bold red", markup=False, highlight=False)


INTRODUCTION = """\
# Roofline

This file is written by `anyshape bench --roofline --write-document` from stored results; it is not edited by hand.

"""

METHOD = """\
## How it is measured

- The functions are plain PyTorch (`benchmarks/anyshape_bench/experiments/roofline/functions.py`). Each is compiled
  once, at small sizes, with every size dynamic, and measured at the sizes shown, in one process with {threads}
  thread(s).
- *moved*: bytes that have to be moved at least: inputs read once, results written once; of a lookup, the rows that are
  asked for. Backward, the inputs that it depends on, the gradients that it is given, and those that it makes. What a
  program saves for its backward, or stores in between, is not counted, and so lowers its rate.
- *of a copy*: the rate against that of `target.copy_(source)` of two tensors of 64 MiB, on the same threads, read and
  written bytes counted. Each round runs the copy, our program and eager PyTorch in turn; times are medians of up to
  {rounds} rounds. That an ordinary store first reads the line that it writes is counted on neither side. More than
  100 % is possible where little is written.
- {kept}
- *reach*: {most} of a copy, and none under {least}; "short" where it is not.
- *made of*: what our program launched in one call; "of PyTorch" are operators that it calls rather than compiles.
- *same as eager*: results and gradients within 1e-3, or two units in the last place of a shorter dtype.
"""
KEPT = ("Freed memory stays with the process (`mallopt`), so that neither side pays for page faults of its results at "
        "every call; in a program of its own a result of more than 32 MB does, in eager too.")
NOT_KEPT = "The C library gives freed memory back, so each result's pages are faulted in anew; the copy's are not."


def document(found: Roofline) -> str:
    """The text of docs/roofline.md."""
    threads = found.options.get("threads", MISSING)
    lines = [INTRODUCTION, "## Machine\n\n", facts(found.machine, str(threads)), "\n## Results\n\n", markdown(found),
             "\n", summary(found)]
    if found.options.get("interrupted"):
        lines.append("\nThe run was interrupted; only what had finished is shown.\n")
    wrong = problems(found)
    if wrong:
        lines.append("\n### What went wrong\n\n" + "".join(f"- {' '.join(text.split())}\n" for text in wrong))
    lines += ["\n", METHOD.format(threads=threads, rounds=found.options.get("rounds", MISSING),
                                  most=share(SHARE), least=share(LEAST_SHARE),
                                  kept=KEPT if found.options.get("kept") else NOT_KEPT)]
    return "".join(lines)


def write_document(found: Roofline, path: Path) -> None:
    """Writes the document, for example to docs/roofline.md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document(found))
