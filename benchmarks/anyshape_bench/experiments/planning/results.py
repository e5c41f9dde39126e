"""Results of the planning experiment: plans of whole train steps by each planner, in bytes and seconds."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from anyshape_bench.harness.result_files import StoredRun

DEEP = "gpt2-xl"


@dataclass(slots=True)
class Window:
    """Some steps of a problem, planned by us and by an integer program. Bytes alive at the fullest step; ours, theirs;
    bound: of the integer program, no order needs less. seconds: until ours was found; theirs_seconds: until it was as
    good, or all its time where it never was (`reached`). variables: of the program."""

    steps: int
    ours: int
    theirs: int
    bound: int
    seconds: float
    theirs_seconds: float
    reached: bool
    variables: int


@dataclass(slots=True)
class Planned:
    """One problem. Bytes: program: alive at the fullest step in the order of the program; used, reserved: of PyTorch's
    allocator in that order, blocks and segments; apart: segments where nothing is made in the place of another value;
    greedy: of the greedy way; compiled: alive in the order that the compiler takes where the first call has this batch;
    needed: what a call of the compiled step takes; ours: our plan; bound: no order needs less. seconds: our plan's, and
    greedy_seconds: processor time. parts, different: of our order, and how many of them were not alike."""

    model: str
    batch: int
    steps: int
    program: int
    used: int
    reserved: int
    apart: int
    greedy: int
    greedy_seconds: float
    compiled: int
    needed: int
    ours: int
    bound: int
    seconds: float
    parts: int
    different: int
    window: dict[str, Any] | None = None


@dataclass(slots=True)
class Plans(StoredRun):
    """All that a folder has. graphs: what the process that traced each network found: `nodes` of its graph, seconds of
    processor time that compiling and the first call took (`compiled`), and of that, of planning (`planned`)."""

    FILE = "plan.json"
    WHAT = "plans"
    COMMAND = "anyshape bench plan"
    graphs: dict[str, dict[str, Any]] = field(default_factory=dict)
    planned: list[dict[str, Any]] = field(default_factory=list)

    def take(self, one: dict[str, Any]) -> None:
        """Adds a problem, in the place of what there was of it."""
        self.planned = [other for other in self.planned
                        if (other["model"], other["batch"]) != (one["model"], one["batch"])]
        self.planned.append(one)


@dataclass(slots=True)
class Answer:
    """What a worker found of a network: what is known of its programs, and its problems, planned."""

    graph: dict[str, Any] = field(default_factory=dict)
    planned: list[Planned] = field(default_factory=list)
    error: str = ""
