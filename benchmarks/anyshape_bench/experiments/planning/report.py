"""Shows what `anyshape bench plan` found: tables, targets, and the page."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from anyshape_bench.experiments.planning.results import DEEP, Plans
from anyshape_bench.experiments.planning.train_step_problems import NETWORKS
from anyshape_bench.harness import targets
from anyshape_bench.harness.experiment import Report
from anyshape_bench.harness.machine import facts
from anyshape_bench.harness.tables import Table, bullets, size
from anyshape_bench.harness.targets import Measure, worst

Rows = list[tuple[str, ...]]
HEAD = ("network", "batch", "steps", "program order, PyTorch's allocator", "greedy", "our plan", "bound",
        "less than PyTorch's", "less than greedy")
WINDOW_HEAD = ("network", "batch", "steps", "variables", "ours", "integer program", "its bound", "ours took",
               "to the same peak it took", "times")
MORE_HEAD = ("network", "batch", "alive in program order", "blocks", "segments", "segments, nothing in place",
             "order of the compiler", "a call takes")
TIME_HEAD = ("network", "operators", "steps", "compiling and first call", "of that, planning", "this planner", "parts",
             "different parts")
LESS_PYTORCH, LESS_GREEDY, FASTER, LONGEST = 0.36, 0.13, 50.0, 60.0
FREE = 0.01  # where the greedy way is at least so far above the bound, there is freedom
SAME = 1.001  # peaks within this factor are the same


def less(one: int, other: int) -> float:
    """By what part `one` is less than `other`."""
    return 1 - one / other if other else 0.0


def _share(part: float) -> str:
    return f"{part * 100:.1f} %"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < 10 else f"{seconds:.0f} s"


def _compared(found: Plans) -> list[dict[str, Any]]:
    """The problems of the networks that are compared, without the deep one."""
    return [one for one in found.planned if one["model"] != DEEP]


def tables(found: Plans) -> list[Table]:
    """Those that have rows."""
    return [Table(*one) for one in _tables(found) if one[-1]]


def _tables(found: Plans) -> Iterator[tuple[str, tuple[str, ...], Rows]]:
    """(title, head, rows) of each table."""
    yield "Bytes of a train step", HEAD, [
        (one["model"], str(one["batch"]), str(one["steps"]), size(one["reserved"]), size(one["greedy"]),
         size(one["ours"]), size(one["bound"]), _share(less(one["ours"], one["reserved"])),
         _share(less(one["ours"], one["greedy"]))) for one in found.planned]
    yield "Against an integer program", WINDOW_HEAD, [
        (one["model"], str(one["batch"]), str(w["steps"]), str(w["variables"]), size(w["ours"]),
         size(w["theirs"]) if w["theirs"] >= 0 else "no order found", size(w["bound"]), _seconds(w["seconds"]),
         ("" if w["reached"] else "more than ") + _seconds(w["theirs_seconds"]), f"{_times(w):.0f}")
        for one in found.planned for w in (one["window"],) if w]
    yield "What else the bytes are", MORE_HEAD, [
        (one["model"], str(one["batch"]), *(size(one[key]) for key in (
            "program", "used", "reserved", "apart", "compiled", "needed"))) for one in found.planned]
    first = {one["model"]: one for one in reversed(found.planned)}
    yield "Time to plan", TIME_HEAD, [
        (name, str(graph["nodes"]), str(first[name]["steps"]), _seconds(graph["compiled"]), _seconds(graph["planned"]),
         _seconds(max(one["seconds"] for one in found.planned if one["model"] == name)),
         str(first[name]["parts"]), str(first[name]["different"]))
        for name, graph in found.graphs.items() if name in first]


def _times(window: dict[str, Any]) -> float:
    """How many times as long the integer program took."""
    return window["theirs_seconds"] / max(window["seconds"], 1e-6)


def measures(found: Plans) -> list[Measure]:
    """What is aimed at."""
    some = _compared(found)
    windows = {f"{one['model']} {one['batch']}": one["window"] for one in some if one["window"]}
    solved = {name: w["ours"] / w["theirs"] for name, w in windows.items() if w["theirs"] > 0}
    free = [one for one in some if one["greedy"] > one["bound"] * (1 + FREE)]
    deep = found.graphs.get(DEEP, {})
    count = f"mean of {len(some)} problems"
    return [
        Measure("less than program order with PyTorch's allocator (segments)", LESS_PYTORCH, False,
                _mean(some, lambda one: less(one["ours"], one["reserved"])), count, "%"),
        Measure("the same, of its blocks alone", LESS_PYTORCH, False,
                _mean(some, lambda one: less(one["ours"], one["used"])), count, "%"),
        Measure("what a call of the compiled step takes, less than the segments", LESS_PYTORCH, False,
                _mean(some, lambda one: less(one["needed"], one["reserved"])), count, "%"),
        Measure("less than greedy, where that is 1 % above the bound", LESS_GREEDY, False,
                _mean(free, lambda one: less(one["ours"], one["greedy"])), f"mean of {len(free)} problems", "%"),
        worst("peak, of the integer program's best", SAME, True, solved, f" of {len(solved)}"),
        worst("times as fast to the same peak", FASTER, False, {name: _times(w) for name, w in windows.items()},
              f" of {len(windows)}"),
        Measure(f"seconds to plan `{DEEP}`, as part of compiling it, of {LONGEST:.0f}", 1.0, True,
                deep["planned"] / LONGEST if deep.get("planned") else None,
                f"{deep.get('nodes', 0)} operators", "%"),
    ]


def _mean(some: list[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> float | None:
    return sum(map(value, some)) / len(some) if some else None


def problems(found: Plans) -> list[str]:
    """What went wrong."""
    return [f"{name}: {graph['error']}" for name, graph in found.graphs.items() if graph.get("error")]


def report(found: Plans) -> Report:
    """The tables, and what is aimed at."""
    return Report([*tables(found), targets.table(measures(found))], markdown(found), document(found), problems(found))


def markdown(found: Plans) -> str:
    """The tables and the aims in Markdown."""
    parts = [f"## {table.title}\n\n{table.markdown()}\n" for table in tables(found)]
    return "".join(parts) + "## What is aimed at\n\n" + targets.table(measures(found)).markdown()


INTRODUCTION = """\
# Plans of train steps

This file is written by `anyshape bench plan ... --write-document` from stored results; it is not edited by hand.
[how-to-benchmark.md](how-to-benchmark.md) says how it is measured and what the columns mean.

"""


def document(found: Plans) -> str:
    """The text of the page."""
    parts = [INTRODUCTION, "## Machine\n\n",
             facts(found.machine, "1"), f"\nThe integer program had {found.options.get('seconds', 0):g} seconds; ",
             "all times are processor time.\n\n",
             markdown(found)]
    wrong = problems(found)
    if wrong:
        parts.append("\n## What went wrong\n\n" + bullets(wrong))
    if found.options.get("interrupted"):
        parts.append("\nThe last run was interrupted; only what had finished is shown.\n")
    parts.append("\n## Networks\n\n" + "".join(f"- `{name}`: {NETWORKS[name].summary}, {_classes(name)}\n"
                                                for name in found.graphs if name in NETWORKS))
    return "".join(parts)


def _classes(name: str) -> str:
    return "of transformers" if name in ("vit", "bert", "gpt2", DEEP) else "with 1000 classes"
