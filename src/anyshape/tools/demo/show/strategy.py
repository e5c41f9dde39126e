"""The chosen strategy as tables: per group of layers its placement, collectives, bytes and seconds, and what else was
tried and why it lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from anyshape.base.units import bytes_text
from anyshape.dist.search.explain import rows
from anyshape.dist.search.judge import Verdict
from anyshape.dist.search.problem import Plan, Search
from anyshape.dist.search.solver import Candidate
from anyshape.dist.strategies import Strategy

TRIED = 6  # other plans that are shown


def run_text(strategy: Strategy) -> str:
    """In a line, what processes run: `mesh(data=2), along data ddp`."""
    along = [f"along {axis.name} {kind}" for axis, kind in zip(strategy.mesh.axes, strategy.kinds, strict=True)]
    return ", ".join([str(strategy.mesh), *along, *([str(strategy.pipeline)] if strategy.pipe else [])])


def print_plan(console: Console, search: Search, plan: Plan, verdict: Verdict, told: str) -> None:
    """A plan by the simulator. told: how it came about."""
    shape, strategy, report = search.shapes[-1], plan.strategies[-1], verdict.reports[-1]
    hidden = report.sending - report.exposed
    console.print(
        f"strategy {strategy.summary}, {told}\n"
        f"predicted for {shape.batch} x {shape.length} on {search.world} ranks: a step of {_ms(report.seconds)} ms, "
        f"communication of {_ms(report.sending)} ms, {_ms(hidden)} ms of it hidden, {_ms(report.exposed)} ms exposed",
        highlight=False, markup=False, soft_wrap=True)
    console.print(_table(
        ("layers", "count", "placement", "collectives", "bytes", "compute ms", "sent ms", "hidden ms", "exposed ms"),
        ((row.name, str(row.count), row.placement, row.collectives, bytes_text(row.sent * row.count), _ms(row.seconds),
          _ms(row.sending), _ms(row.sending - row.exposed), _ms(row.exposed))
         for row in rows(search, shape, strategy))))


def print_tried(console: Console, best: Verdict, tried: Sequence[Candidate], summary: str) -> None:
    """Other plans, the fastest first, and why each lost against one of `summary` that takes as long as `best` says."""
    lines: dict[str, tuple[str, ...]] = {}
    for one in tried:
        text = one.plan.strategies[-1].summary
        if text != summary and text not in lines and len(lines) < TRIED:
            lines[text] = (text, *_numbers(one.verdict), _why(one, best))
    if lines:
        console.print(_table(("also tried", "step ms", "a rank", "exposed ms", "why not"), lines.values()))


def _numbers(verdict: Verdict | None) -> tuple[str, str, str]:
    if verdict is None:
        return "-", "-", "-"
    return f"{verdict.seconds * 1e3:.4g}", bytes_text(verdict.memory), _ms(verdict.exposed)


def _why(one: Candidate, best: Verdict) -> str:
    if one.why:
        return one.why
    assert one.verdict is not None
    ratio = one.verdict.seconds / best.seconds
    if ratio < 1.0005:
        return "as fast" if ratio > 0.9995 else f"faster ({ratio:.2f}x), and another strategy was asked for"
    return f"takes {ratio:.3f} times as long"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"


def _table(names: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in names:
        right = name.endswith("ms") or name in ("count", "bytes", "a rank")
        table.add_column(name, justify="right" if right else "left")
    for line in lines:
        table.add_row(*line)
    return table
