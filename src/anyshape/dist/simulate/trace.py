"""A timeline as a trace for Perfetto (the Trace Event Format of Chrome, JSON object form)."""
from __future__ import annotations

import json

from anyshape.dist.simulate.events import Timeline


def perfetto(timeline: Timeline) -> str:
    """JSON text: a process a rank, a thread a stream, a complete event ("X") a task; times in microseconds."""
    streams = {stream: place for place, stream in enumerate(dict.fromkeys(task.stream for task in timeline.tasks))}
    events: list[dict[str, object]] = []
    for rank in sorted({rank for rank, _ in streams}):
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
    for (rank, name), thread in streams.items():
        events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}})
    for task, begin, end in zip(timeline.tasks, timeline.begins, timeline.ends, strict=True):
        events.append({"name": task.name, "cat": task.link or "compute", "ph": "X", "pid": task.stream[0],
                       "tid": streams[task.stream], "ts": begin * 1e6, "dur": (end - begin) * 1e6,
                       "args": {"layer": task.layer, "link": task.link}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
