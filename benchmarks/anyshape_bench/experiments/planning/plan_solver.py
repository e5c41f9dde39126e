"""Solves a planning problem at one shape: the order of plan/schedule/divide_and_conquer.py, and places as records have
them (runtime/memory/offset_assignment.py).

Programs are planned for all shapes at once (plan/schedule/reorder.py, plan/memory/symbolic_allocator.py). This is the
planner for a whole train step in numbers, which benchmarks compare with others.
"""
from __future__ import annotations

from collections.abc import Sequence

from anyshape.base.align import align
from anyshape.plan.memory.offset_problem import OffsetProblem
from anyshape.plan.schedule.beam_search import Problem
from anyshape.plan.schedule.divide_and_conquer import order_by_parts
from anyshape.runtime.context.process_context import Context
from anyshape.runtime.memory.offset_assignment import assign_offsets
from anyshape_bench.experiments.planning.problem_text import ALIGNMENT, Solution


def solve(problem: Problem, context: Context) -> Solution:
    """A solution that needs few bytes."""
    return placed(problem, order_by_parts(problem).order, context)


def placed(problem: Problem, order: Sequence[int], context: Context) -> Solution:
    """The solution with that order, and the layout that is best for it."""
    items = lives(problem, order)
    offset_problem = OffsetProblem([(*one, 0) for one, _ in items])
    top, places = assign_offsets(context.host, offset_problem, offset_problem.bound(len(order)))
    offsets = [-1] * len(problem.sizes)
    for (_, values), place in zip(items, places, strict=True):
        for value in values:
            offsets[value] = place
    return Solution(tuple(order), tuple(offsets), top)


def lives(problem: Problem, order: Sequence[int],
          aligned: int = ALIGNMENT) -> list[tuple[tuple[int, int, int], list[int]]]:
    """Pieces of memory in that order: bytes (rounded up to `aligned`), first and last step, and the values that lie
    there one after another, each made over the one before."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for k, step in enumerate(order):
        for value in problem.touches[step]:
            first.setdefault(value, 0 if value in problem.early else k)
            last[value] = len(order) if value in problem.late else k
    for value in problem.early & problem.late:
        first[value], last[value] = 0, len(order)
    piece: dict[int, list[int]] = {}
    for k, step in enumerate(order):
        used: set[int] = set()
        for source, made in problem.over[step]:
            if last[source] == k == first[made] and not used & {source, made}:
                used |= {source, made}
                whole = piece.setdefault(source, [source])
                whole.append(made)
                piece[made] = whole
    pieces: dict[int, list[int]] = {}
    for value in first:
        whole = piece.get(value, [value])
        pieces.setdefault(whole[0], whole)
    return [((align(max(problem.sizes[value] for value in whole), aligned),
              min(first[value] for value in whole), max(last[value] for value in whole)), whole)
            for whole in pieces.values()]
