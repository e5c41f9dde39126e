"""What `anyshape bench plan` compares: bytes of our order and layout of whole train steps, of PyTorch's allocator in
the order of the program, of a greedy way, and of an integer program; every way is given the same text of a problem."""
from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from anyshape.plan.cut import order_by_parts, part_of
from anyshape.plan.integer_program import WINDOW, plain, solved
from anyshape.plan.search import Problem
from anyshape.plan.solution import Solution, judge_solution, parse_problem, show_solution
from anyshape.run.context import Context
from anyshape_bench.experiments.planning.plan_solver import placed
from anyshape_bench.experiments.planning.planner_baselines import least_cost, long_lived_first, with_caching
from anyshape_bench.harness import result_files

FILE = "plan.json"
PROBLEMS = "problems"  # a folder of their texts
MODULE = "anyshape_bench.experiments.planning.train_step_problems"
DEFAULT = ("alexnet", "vgg16", "mobilenet-v2", "efficientnet-b0", "vit", "bert", "gpt2")
DEEP = "gpt2-xl"
ROUNDED = 1.0001  # how exactly a solver's numbers say what its peak is
BATCHES, QUICK_BATCHES = (1, 32), (1,)
WHOLE_PROGRAM = 64  # steps of a problem that the integer program is given whole; else WINDOW about the fullest one


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
class Plans:
    """All that a folder has. graphs: what the process that traced each network found: `nodes` of its graph, seconds of
    processor time that compiling and the first call took (`compiled`), and of that, of planning (`planned`)."""

    machine: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    graphs: dict[str, dict[str, Any]] = field(default_factory=dict)
    planned: list[dict[str, Any]] = field(default_factory=list)

    def save(self, folder: Path) -> Path:
        """Writes `plan.json`."""
        return result_files.write(self, folder, FILE)

    def take(self, one: Planned) -> None:
        """Adds a problem, in the place of what there was of it."""
        self.planned = [other for other in self.planned if (other["model"], other["batch"]) != (one.model, one.batch)]
        self.planned.append(asdict(one))


def load(path: Path) -> Plans:
    """Reads what `save` wrote, from the folder or the file.

    Raises:
        InputError: there is no such file, or it is another one.
    """
    return result_files.read(path, FILE, lambda data: Plans(data["machine"], data["options"], data["graphs"],
                                                      data["planned"]), "plans", "anyshape bench plan")


def name_of(model: str, batch: int) -> str:
    """Of a problem, and of its file."""
    return f"{model}-{batch}"


def compared(model: str, batch: int, text: str, known: dict[str, Any], seconds: float,
             context: Context) -> Planned:
    """One problem, planned in every way, and judged.

    Args:
        text: the problem.
        known: `order` of the compiler, and what a call `needed`.
        seconds: for the integer program; 0: leave it out.

    Raises:
        VerifyError: a plan is wrong.
    """
    problem = parse_problem(text)
    program = list(range(len(problem.before)))
    begun = time.process_time()
    cut = order_by_parts(problem)
    ours = placed(problem, cut.order, context)
    spent = time.process_time() - begun
    _judged(text, ours)
    begun = time.process_time()
    greedy = long_lived_first(problem, least_cost(problem))
    greedy_spent = time.process_time() - begun
    _judged(text, greedy)
    caching = with_caching(problem, program)
    apart = with_caching(plain(problem), program)
    found = Planned(
        model, batch, len(program), problem.peak(program), caching.most, caching.reserved, apart.reserved, greedy.peak,
        greedy_spent, problem.peak(known["order"]), known["needed"], ours.peak, problem.least(cut.order), spent,
        cut.parts, cut.different)
    if seconds:
        found.window = asdict(in_window(problem, cut.order, seconds))
    return found


def _judged(text: str, solution: Solution) -> None:
    judge_solution(text, show_solution(solution, "judged"))


def in_window(problem: Problem, order: list[int], seconds: float) -> Window:
    """The steps about the fullest one, in the order of the program, planned by us and by the integer program; neither
    makes a value in the place of another."""
    problem = plain(problem)
    if len(order) > WHOLE_PROGRAM:
        curve = [sum(one) for one in problem.curve(order)]
        start = min(max(curve.index(max(curve)) - WINDOW // 2, 0), len(order) - WINDOW)
        problem = part_of(problem, sorted(order[start:start + WINDOW]), sum(1 << step for step in order[:start]))
    cut = order_by_parts(problem)
    ours = problem.peak(cut.order)
    spent = next(at for at, peak in cut.trail if peak <= ours * ROUNDED)
    theirs = solved(problem, seconds)
    reached = next((at for at, peak in theirs.trail if peak <= ours * ROUNDED), None)
    if reached is None and 0 <= theirs.peak <= ours:
        reached = theirs.seconds
    return Window(len(problem.before), ours, theirs.peak, theirs.bound, spent,
                  theirs.seconds if reached is None else reached, reached is not None, theirs.variables)
