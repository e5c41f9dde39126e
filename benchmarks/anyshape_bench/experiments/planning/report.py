"""Shows what `anyshape bench plan` found: tables, aims beside findings, and docs/benchmarks-plan.md."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from anyshape_bench.experiments.planning.results import DEEP, Plans
from anyshape_bench.experiments.planning.train_step_problems import NETWORKS, TRACED
from anyshape_bench.experiments.planning.worker import WHOLE_PROGRAM, WINDOW
from anyshape_bench.harness import targets
from anyshape_bench.harness.experiment import Report
from anyshape_bench.harness.machine import facts
from anyshape_bench.harness.tables import Table, bullets
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


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


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
        (one["model"], str(one["batch"]), str(one["steps"]), _bytes(one["reserved"]), _bytes(one["greedy"]),
         _bytes(one["ours"]), _bytes(one["bound"]), _share(less(one["ours"], one["reserved"])),
         _share(less(one["ours"], one["greedy"]))) for one in found.planned]
    yield "Against an integer program", WINDOW_HEAD, [
        (one["model"], str(one["batch"]), str(w["steps"]), str(w["variables"]), _bytes(w["ours"]),
         _bytes(w["theirs"]) if w["theirs"] >= 0 else "no order found", _bytes(w["bound"]), _seconds(w["seconds"]),
         ("" if w["reached"] else "more than ") + _seconds(w["theirs_seconds"]), f"{_times(w):.0f}")
        for one in found.planned for w in (one["window"],) if w]
    yield "What else the bytes are", MORE_HEAD, [
        (one["model"], str(one["batch"]), *(_bytes(one[key]) for key in (
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

Every way is given the same problem: the steps of a train step compiled by `anyshape.train_step` with AdamW, forward,
backward and update, fused into kernels, before any order is chosen. A step makes and reads values of given bytes; some
steps have to follow others. *Program order* is that of the list, as it was traced: all updates at the end. A network is
traced with a batch of {traced}; sizes are formulas, so a batch of 32 is never run. Weights are random.

*Counted* is what a step takes beyond what is alive before it: saved values, temporary values, gradients, results, and
what PyTorch's operators make. Weights, moments and the batch are not, nor is scratch within a step. A value that a
kernel can make in the place of another that dies there is made there in every way but the integer program's.

- *PyTorch's allocator* is a simulation of c10/cuda/CUDACachingAllocator.cpp from empty: blocks of 512 bytes, best fit
  with splitting, free neighbours joined, segments of 2 and 20 MB. What counts is the segments that it reserves.
- *Greedy*: of the steps that can run the one that raises the peak least and then leaves least alive, as LESCEA orders;
  then each value at its lowest place, the one that lives longest first.
- *Our plan* (`plan/cut.py`, `benchmarks/anyshape_bench/experiments/planning/plan_solver.py`) is made for the one batch
  size: the problem is cut into parts, which are searched one by one, equal ones once; then the layout of a call's
  record (`run/placement.py`). A judge that shares no code with it recomputes the peak from the texts
  (`benchmarks/anyshape_bench/experiments/planning/problem_text.py`).
- *The bound*: no order needs less, as far as the fullest steps show.
- *The integer program* has the form of MODeL's order, without addresses and under HiGHS on one thread; a problem of
  at most {whole} steps is given whole, of others {window} steps about the fullest one of our plan. Both plan the same
  steps. Times are until each has a peak as low as our last one; those within 0.1 % are the same.

The programs that run are planned for all shapes at once. So *a call takes* more than our plan, except where the
gradient of a large weight is never there as a whole (`plan/bands.py`), which the problem does not know. Forward and
backward are ordered apart, so the forward is done when the backward begins; of the backward there is the best order
that is proved to take no more at any size than the program's, and perhaps one that needs less at the sizes of the first
call; calls take the better of both (`plan/order.py`, `run/choice.py`). The first call has the batch that is traced.
*Order of the compiler* is the better one, where the first call has this batch.

"""


def document(found: Plans) -> str:
    """The text of docs/benchmarks-plan.md."""
    parts = [INTRODUCTION.format(traced=TRACED, whole=WHOLE_PROGRAM, window=WINDOW), "## Machine\n\n",
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
