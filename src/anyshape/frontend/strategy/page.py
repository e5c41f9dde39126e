"""The HTML page of a strategy search: layers by ranks, collectives on a timeline, memory, and what else was tried.

One file that needs nothing else, in the style of the memory reports (frontend/diagnostics/report/page.css).
"""
from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from importlib.resources import files

from anyshape.base.units import bytes_text
from anyshape.dist.search.explain import rows
from anyshape.dist.search.problem import Search
from anyshape.dist.search.solver import Found
from anyshape.dist.simulate.events import Timeline

WIDTH, LANE = 1000, 22  # of the drawing of a timeline, pixels
MOST = 4000  # tasks that are drawn
OWN = """.tasks rect.compute{fill:var(--after)}.tasks rect.link{fill:var(--limit)}.tasks text{font-size:11px}
.tasks{overflow-x:auto}"""


def page(search: Search, found: Found) -> str:
    """The text of the page."""
    verdict, plan = found.best.verdict, found.best.plan
    assert verdict is not None
    title = f"{search.workload.name} on {search.world} ranks of {search.machine}"
    style = files("anyshape.frontend.diagnostics.report").joinpath("page.css").read_text("utf-8")
    head = f"step {verdict.seconds * 1e3:.4g} ms simulated; no strategy is below {found.bound * 1e3:.4g} ms (gap " \
           f"{found.gap:.1%}); {bytes_text(verdict.memory)} a rank of {bytes_text(search.memory)}"
    parts = [_table("Classes of shapes", ("length", "steps", "strategy", "step", "exposed", "a rank"), (
        (str(shape.length), f"{shape.weight:.0%}", strategy.summary, f"{report.seconds * 1e3:.4g} ms",
         f"{report.exposed * 1e3:.3g} of {report.sending * 1e3:.4g} ms", bytes_text(max(report.memory)))
        for shape, strategy, report in zip(search.shapes, plan.strategies, verdict.reports, strict=True)))]
    for shape, strategy, report in zip(search.shapes, plan.strategies, verdict.reports, strict=True):
        parts.append(_table(f"Layers at length {shape.length}", (
            "layer", "count", "placement", "recompute", "collectives", "weights", "compute", "sent", "exposed", "held",
            "kept"), ((row.name, str(row.count), row.placement, row.recompute, row.collectives, bytes_text(row.sent),
                       f"{row.seconds * 1e3:.4g} ms", f"{row.sending * 1e3:.3g} ms", f"{row.exposed * 1e3:.3g} ms",
                       bytes_text(row.held), bytes_text(row.kept)) for row in rows(search, shape, strategy))))
        parts.append(f"<section class=card><h2>Timeline at length {shape.length}</h2>{_drawn(report.timeline)}"
                     "</section>")
    last = verdict.reports[-1]
    parts.append(_table("Memory of the ranks", ("stage", "first layer", "bytes"), (
        (str(stage), str(last.stages[stage] if stage < len(last.stages) else ""), bytes_text(size))
        for stage, size in enumerate(last.memory))))
    parts.append(_table("What else was tried", ("", "step", "a rank", "strategy", "why not"), (
        (one.name, f"{one.verdict.seconds * 1e3:.4g} ms" if one.verdict else "", bytes_text(one.verdict.memory)
         if one.verdict else "", one.plan.strategies[-1].summary, one.why or "slower")
        for one in found.tried if one is not found.best)))
    return f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{html.escape(title)}</title><style>{style}" \
           f"{OWN}</style></head><body><header><h1>{html.escape(title)}</h1><p>{html.escape(head)}</p></header>" \
           f"<main>{''.join(parts)}</main></body></html>\n"


def _table(title: str, head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in row) for row in body)
    names = "".join(f"<th>{html.escape(one)}" for one in head)
    return f"<section class=card><h2>{html.escape(title)}</h2><div class=scroll><table><thead><tr>{names}</thead>" \
           f"<tbody>{lines}</tbody></table></div></section>"


def _drawn(timeline: Timeline) -> str:
    """A lane a stream of a rank, a box a task; what a pointer rests on says its name and seconds."""
    lanes = list(dict.fromkeys(task.stream for task in timeline.tasks))
    scale = WIDTH / max(timeline.seconds, 1e-12)
    boxes = []
    for task, begin, end in list(zip(timeline.tasks, timeline.begins, timeline.ends, strict=True))[:MOST]:
        kind = "link" if task.link else "compute"
        boxes.append(f"<rect class={kind} x={120 + begin * scale:.1f} y={lanes.index(task.stream) * LANE} "
                     f"width={max((end - begin) * scale, .3):.1f} height={LANE - 4}><title>{html.escape(task.name)}: "
                     f"{(end - begin) * 1e3:.3g} ms</title></rect>")
    names = "".join(f"<text x=0 y={place * LANE + 14}>rank {rank} {html.escape(name)}</text>"
                    for place, (rank, name) in enumerate(lanes))
    more = f"<p>The first {MOST} tasks of {len(timeline.tasks)}.</p>" if len(timeline.tasks) > MOST else ""
    return f"<div class='tasks chart'><svg width={WIDTH + 130} height={len(lanes) * LANE + 4}>{names}{''.join(boxes)}" \
           f"</svg></div>{more}"
