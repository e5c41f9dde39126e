"""A worker of the planning experiment: traces a train step, and has each planner plan it at each batch size.

Compared are bytes of our order and layout, of PyTorch's allocator in the order of the program, of a greedy way, and of
an integer program; every way is given the same text of a problem.
"""
from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anyshape.plan.cut import order_by_parts, part_of
from anyshape.plan.integer_program import WINDOW, plain, solved
from anyshape.plan.search import Problem
from anyshape.run.context import Context, shared_context
from anyshape_bench.experiments.planning.plan_solver import placed
from anyshape_bench.experiments.planning.planner_baselines import least_cost, long_lived_first, with_caching
from anyshape_bench.experiments.planning.problem_text import Solution, judge_solution, parse_problem, show_solution
from anyshape_bench.experiments.planning.results import Answer, Planned, Window
from anyshape_bench.experiments.planning.train_step_problems import NETWORKS, file_of, written
from anyshape_bench.harness.worker import Tell

ROUNDED = 1.0001  # how exactly a solver's numbers say what its peak is
WHOLE_PROGRAM = 64  # steps of a problem that the integer program is given whole; else WINDOW about the fullest one


def answer(job: dict[str, Any]) -> Answer:
    """What is known already, of a network whose problems are there."""
    return Answer(job["graph"])


def measure(job: dict[str, Any], found: Answer, tell: Tell) -> None:
    """Traces the network where its problems are not there, and plans them.

    Raises:
        VerifyError: a plan is wrong.
    """
    name, folder = job["model"], Path(job["folder"])
    if not found.graph:
        tell("tracing", 0, 1)
        found.graph = written(NETWORKS[name], job["batches"], folder)
    problems = found.graph["problems"]
    for place, (batch, known) in enumerate(problems.items()):
        tell(f"planning, batch {batch}", place, len(problems))
        text = file_of(folder, name, int(batch)).read_text()
        found.planned.append(compared(name, int(batch), text, known, job["seconds"], shared_context()))


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
