"""The end of the demo: the summary on the console and in JSON, and a picture of shapes, memory and throughput."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table

from anyshape.base.files import write_atomically
from anyshape.base.units import bytes_text
from anyshape.tools.demo.compare import Comparison
from anyshape.tools.demo.training import History


@dataclass(frozen=True, slots=True)
class Summary:
    """All that the last page says. Losses are mean nats per token; `sample` is text the model wrote.

    limit: bytes, 0 for none; counted_peak: most bytes of a step under it; limited_steps: those that
    computed something again. strategy: how steps were dealt out, "" on one rank; messages, waited: of a step
    of the first rank, collectives, and seconds in which it stood still for them.
    """

    backend: str
    steps: int
    seconds: float
    shapes: int
    counters: dict[str, float]
    held_out_before: float
    held_out_after: float
    speed: float
    resident_peak: int
    arena_peak: int
    comparison: Comparison | None
    sample: str
    limit: int = 0
    counted_peak: int = 0
    limited_steps: int = 0
    strategy: str = ""
    messages: float = 0.0
    waited: float = 0.0


def shapes_of(history: History) -> int:
    """How many different batch shapes were trained on."""
    return len(set(zip(history.rows, history.length, strict=True)))


def print_summary(console: Console, summary: Summary) -> None:
    """The last page of the demo."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    programs = int(summary.counters.get("programs", 0))
    table.add_row("shapes", f"{summary.shapes} different shapes in {summary.steps} steps, "
                            f"{programs} program{'' if programs == 1 else 's'} compiled")
    if summary.counters.get("fallbacks"):
        table.add_row("not compiled", f"{int(summary.counters['fallbacks'])} programs ran as PyTorch would; "
                                      "the warnings above say why")
    if "compile_seconds" in summary.counters:
        table.add_row("compiling", f"{summary.counters['compile_seconds']:.1f} s in all")
    table.add_row("held-out loss", f"{summary.held_out_before:.3f} before, {summary.held_out_after:.3f} after")
    table.add_row("training", f"{summary.speed:,.0f} tokens/s over the run, optimiser and first step included")
    memory = f"resident at most {bytes_text(summary.resident_peak)}"
    if summary.arena_peak:
        memory += f", arena at most {bytes_text(summary.arena_peak)}"
    table.add_row("memory", memory)
    if summary.strategy:
        table.add_row("strategy", summary.strategy)
        table.add_row("communication", f"{summary.messages:.3g} messages a step, {summary.waited * 1e3:.3g} ms of it "
                                       "exposed: this rank stood still")
    if summary.limit:
        table.add_row("limit", f"{bytes_text(summary.limit)}; a step took at most "
                               f"{bytes_text(summary.counted_peak)} by count, {summary.limited_steps} of "
                               f"{summary.steps} steps computed values again")
    if summary.comparison:
        for name, text in comparison_rows(summary.backend, summary.comparison):
            table.add_row(name, text)
    console.print(Panel(table, title=f"anyshape demo, backend {summary.backend}", title_align="left"))
    console.print(Panel(Syntax(summary.sample, "python", background_color="default", word_wrap=True),
                        title="written by the model", title_align="left"))


def comparison_rows(backend: str, comparison: Comparison) -> list[tuple[str, str]]:
    """Name and text of the summary's lines about eager."""
    shape = f"{comparison.rows} x {comparison.length}"
    speed = (
        f"{comparison.ratio:.2f} times the tokens/s ({comparison.fast:,.0f} against {comparison.eager:,.0f}; "
        f"{comparison.slowest_ratio:.2f} to {comparison.fastest_ratio:.2f} per shape), whole steps"
    )
    numbers = (
        f"loss differs by {comparison.loss_difference:.1e}, what a step changes by "
        f"{comparison.update_difference:.1e}, relative"
    )
    memory = f"eager's resident memory rises by {bytes_text(comparison.eager_rise)} at {shape}"
    if comparison.arena:
        memory += f"; the arena of {backend} is {bytes_text(comparison.arena)}"
    return [("against eager", speed), ("same numbers", numbers), ("memory of a step", memory)]


def write_summary(folder: Path, summary: Summary) -> None:
    """`summary.json`; an OSError is the caller's."""
    write_atomically(folder / "summary.json", (json.dumps(asdict(summary), indent=2) + "\n").encode())


def draw(path: Path, history: History, backend: str, limit: int = 0) -> None:
    """Three panels over the steps: the shapes, the memory, the throughput. Raises OSError when it cannot be written."""
    steps = range(1, len(history.loss) + 1)
    figure = Figure(figsize=(9, 8.5), layout="constrained")  # no pyplot: there may be no screen
    shape, memory, speed = figure.subplots(3, 1, sharex=True)
    figure.suptitle(f"anyshape demo, backend {backend}: {shapes_of(history)} shapes in {len(history.loss)} steps, "
                    f"programs compiled: {history.programs[-1]}")
    shape.plot(steps, history.length, ".", color="tab:blue", label="length")
    shape.plot(steps, history.rows, ".", color="tab:orange", label="rows")
    shape.set_yscale("log")
    shape.set_ylabel("size of the batch")
    shape.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    resident = [value / 1e6 for value in history.resident]
    if not limit:  # it is several times the limit, and would press the other lines together
        memory.plot(steps, resident, color="tab:gray", label="resident, peak of the step")
    if any(history.arena):
        memory.plot(steps, [value / 1e6 for value in history.arena], color="tab:green", label="arena")
    if limit:
        memory.plot(steps, [value / 1e6 for value in history.predicted], ".", color="tab:cyan", label="peak predicted")
        memory.plot(steps, [value / 1e6 for value in history.counted], "x", color="tab:green", label="peak counted")
        memory.axhline(limit / 1e6, color="tab:red", label="limit")
    memory.set_ylim(bottom=0)
    memory.set_ylabel("memory, MB")
    memory.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, frameon=False)
    each = [tokens / seconds for tokens, seconds in zip(history.tokens, history.seconds, strict=True)]
    speed.plot(steps, each, ".", color="tab:red", alpha=0.5, label="tokens/s")
    speed.set_ylim(bottom=0)
    speed.set_ylabel("tokens per second")
    speed.set_xlabel("step")
    loss = speed.twinx()
    loss.plot(steps, history.loss, color="tab:purple", linewidth=1, label="loss")
    loss.set_ylabel("training loss")
    handles = speed.get_lines() + loss.get_lines()
    speed.legend(handles, [str(handle.get_label()) for handle in handles], loc="lower left", bbox_to_anchor=(0, 1),
                 ncols=2, frameon=False)
    temporary = path.with_name(f".{path.name}.writing.png")
    try:
        figure.savefig(temporary, dpi=110)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
