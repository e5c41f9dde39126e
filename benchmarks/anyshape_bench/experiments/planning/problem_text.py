"""Planning problems and their solutions as text: what a planner is given at one shape, and what it answers.

    problem two                        solution two
    value 0 4096                       order 0 1 2
    value 1 4096                       place 0 0
    value 2 64 late                    place 1 0
    step 0: 0                          place 2 4096
    step 1: 0 1; after 0; over 0>1     peak 4160
    step 2: 1 2; after 1

A value has bytes. It is in memory from the first step that names it (`early`: from the start) to the last one (`late`:
to the end). A step comes behind those `after` which it stands. With `over a>b` the value b may be made in the place of
a, in the step where a dies and b is born. A solution is an order of the steps and a byte offset for each value; peak is
the top of the highest one. Offsets are multiples of 64.

The judge works on the texts, and shares no code with what reads and solves them.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anyshape.base.errors import ParseError, VerifyError
from anyshape.plan.search import Problem

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Solution:
    """order: of the steps. offsets: of each value, in bytes; -1 of one that no step names. peak: bytes of memory."""

    order: tuple[int, ...]
    offsets: tuple[int, ...]
    peak: int


def show_problem(problem: Problem, name: str) -> str:
    """The text of `problem`, all of whose values lie in one memory."""
    lines = [f"problem {name}"]
    for value, size in enumerate(problem.sizes):
        ends = " early" * (value in problem.early) + " late" * (value in problem.late)
        lines.append(f"value {value} {size}{ends}")
    for step, touches in enumerate(problem.touches):
        parts = [f"step {step}: {' '.join(map(str, touches))}".rstrip()]
        before = [other for other in range(len(problem.before)) if problem.before[step] >> other & 1]
        if before:
            parts.append(f"after {' '.join(map(str, before))}")
        if problem.over[step]:
            parts.append("over " + " ".join(f"{source}>{made}" for source, made in problem.over[step]))
        lines.append("; ".join(parts))
    return "\n".join(lines) + "\n"


def parse_problem(text: str) -> Problem:
    """The problem that `show_problem` wrote.

    Raises:
        ParseError: a line is not of that form.
    """
    problem = Problem([], [], [], [], [], [], set(), set(), [], 0, [])
    for number, line in enumerate(text.splitlines(), 1):
        try:
            _read(problem, line)
        except (ValueError, IndexError) as error:
            raise ParseError(f"line {number} of a planning problem cannot be read", where=line, why=str(error),
                             do="see the head of planning/problem_text.py for the form") from None
    problem.after += [[] for _ in problem.before]
    for step, before in enumerate(problem.before):
        for other in range(step):
            if before >> other & 1:
                problem.after[other].append(step)
    return problem


def _read(problem: Problem, line: str) -> None:
    word, _, rest = line.partition(" ")
    if word == "value":
        number, size, *ends = rest.split()
        if int(number) != len(problem.sizes) or not set(ends) <= {"early", "late"}:
            raise ValueError("values are numbered in order, and early or late or both or neither")
        problem.sizes.append(int(size))
        problem.kinds.append(0)
        problem.users.append(0)
        problem.early |= {int(number)} if "early" in ends else set()
        problem.late |= {int(number)} if "late" in ends else set()
    elif word == "step":
        first, *parts = rest.split(";")
        name, _, values = first.partition(":")
        step = len(problem.before)
        if int(name) != step:
            raise ValueError("steps are numbered in order")
        named = [part.split() for part in parts]
        before = [int(other) for part in named if part[0] == "after" for other in part[1:]]
        if any(other >= step for other in before):
            raise ValueError("a step stands after earlier ones")
        problem.before.append(sum(1 << other for other in before))
        problem.touches.append([int(value) for value in values.split()])
        problem.over.append([(int(a), int(b)) for part in named if part[0] == "over"
                             for a, _, b in (pair.partition(">") for pair in part[1:])])
        problem.rows.append(True)
        for value in problem.touches[-1]:
            problem.users[value] |= 1 << step
    elif word not in ("problem", ""):
        raise ValueError("it begins with neither problem, value nor step")


def show_solution(solution: Solution, name: str) -> str:
    """The text of a solution."""
    lines = [f"solution {name}", f"order {' '.join(map(str, solution.order))}"]
    lines += [f"place {value} {offset}" for value, offset in enumerate(solution.offsets) if offset >= 0]
    return "\n".join([*lines, f"peak {solution.peak}"]) + "\n"


def parse_solution(text: str) -> Solution:
    """The solution that `show_solution` wrote."""
    order: Sequence[int] = ()
    places: dict[int, int] = {}
    peak = 0
    for number, line in enumerate(text.splitlines(), 1):
        word, *rest = line.split() or [""]
        try:
            if word == "order":
                order = [int(one) for one in rest]
            elif word == "place":
                value, offset = map(int, rest)
                places[value] = offset
            elif word == "peak":
                [peak] = map(int, rest)
            elif word not in ("solution", ""):
                raise ValueError("it begins with neither solution, order, place nor peak")
        except ValueError as error:
            raise ParseError(f"line {number} of a solution cannot be read", where=line, why=str(error),
                             do="see the head of planning/problem_text.py for the form") from None
    return Solution(tuple(order), tuple(places.get(value, -1) for value in range(max(places, default=-1) + 1)), peak)


def judge_solution(problem: str, solution: str) -> int:
    """Goes over both texts; returns the most bytes alive at one step in that order: no layout of it needs less.

    Raises:
        VerifyError: a step is missing, there twice or before one that it stands after; a value has no place, one that
            is not aligned, or one that another has, too, while both are alive; or the peak is not the highest top.
    """
    sizes: dict[str, int] = {}
    ends: dict[str, str] = {}
    steps: dict[str, tuple[list[str], list[str], list[str]]] = {}
    for line in problem.splitlines():
        words = line.split()
        if words[:1] == ["value"]:
            sizes[words[1]], ends[words[1]] = int(words[2]), line
        elif words[:1] == ["step"]:
            named, *parts = line[5:].split(";")
            step, _, values = named.partition(":")
            after = [word for part in parts if part.split()[0] == "after" for word in part.split()[1:]]
            over = [word for part in parts if part.split()[0] == "over" for word in part.split()[1:]]
            steps[step] = values.split(), after, over
    answer = [line.split() for line in solution.splitlines()]
    order = next(words[1:] for words in answer if words[:1] == ["order"])
    places = {words[1]: int(words[2]) for words in answer if words[:1] == ["place"]}
    peak = next(int(words[1]) for words in answer if words[:1] == ["peak"])
    if sorted(order) != sorted(steps):
        _fail("its steps are not those of the problem, once each")
    place = {step: k for k, step in enumerate(order)}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for k, step in enumerate(order):
        for other in steps[step][1]:
            if place[other] > k:
                _fail(f"step {step} comes before step {other}, which it needs")
        for value in steps[step][0]:
            first[value] = 0 if " early" in ends[value] else min(first.get(value, k), k)
            last[value] = len(order) if " late" in ends[value] else k
    for value in sizes:
        if " early" in ends[value] and " late" in ends[value]:
            first[value], last[value] = 0, len(order)
    one_place: set[tuple[str, str]] = set()
    saved = [0] * (len(order) + 1)
    for k, step in enumerate(order):
        used: set[str] = set()
        for pair in steps[step][2]:
            source, made = pair.split(">")
            if last[source] == k == first[made] and not used & {source, made} and sizes[source] == sizes[made]:
                if places.get(source) == places.get(made):
                    one_place |= {(source, made), (made, source)}
                saved[k] += sizes[source]
                used |= {source, made}
    top = 0
    for value in first:
        if value not in places:
            _fail(f"value {value} has no place")
        if places[value] < 0 or places[value] % ALIGNMENT:
            _fail(f"value {value} lies at {places[value]}, which is no multiple of {ALIGNMENT}")
        top = max(top, places[value] + sizes[value])
    by_place = sorted(first, key=lambda value: places[value])
    for k, one in enumerate(by_place):
        for other in by_place[k + 1:]:
            if places[other] >= places[one] + sizes[one]:
                break
            if (first[one] <= last[other] and first[other] <= last[one] and sizes[other] > 0
                    and (one, other) not in one_place):
                _fail(f"values {one} and {other} are alive together and overlap")
    if -(-top // ALIGNMENT) * ALIGNMENT != peak:
        _fail(f"its peak is {peak}, and the highest value ends at {top}")
    alive = [sum(sizes[value] for value in first if first[value] <= k <= last[value]) - saved[k]
             for k in range(len(order) + 1)]
    return max(alive, default=0)


def _fail(why: str) -> None:
    raise VerifyError("a solution of a planning problem is wrong", why=why, do="report it: a bug of the planner")
