"""Planning problems as text, their judge, the planner for whole train steps, and the ways that it is compared with."""
from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from torch import nn

import anyshape
from anyshape.base.errors import ConfigError, ParseError, VerifyError
from anyshape.plan import integer_program
from anyshape.plan import order as plan_order
from anyshape.plan.cut import Cuts, early, late, order_by_parts, reversed_problem
from anyshape.plan.integer_program import improved, plain, solved
from anyshape.plan.join import step_problem
from anyshape.plan.search import Problem
from anyshape.run.context import shared_context
from anyshape.sym.expr import evaluate
from anyshape_bench.experiments.planning.plan_solver import placed, solve
from anyshape_bench.experiments.planning.planner_baselines import (
    CachingAllocator,
    least_cost,
    long_lived_first,
    with_caching,
)
from anyshape_bench.experiments.planning.problem_text import (
    Solution,
    judge_solution,
    parse_problem,
    parse_solution,
    show_problem,
    show_solution,
)
from anyshape_bench.experiments.planning.train_step_problems import plans_of
from roads import compilation_of

FOLDER = Path(__file__).parent / "corpus" / "plan"
# bytes of our plan when the instance was added: it may only get lower
RECORDED = {"alexnet-32": 152698944, "vgg16-32": 2352021568, "vit-1-window": 103855552, "towers": 69952}
MEGABYTE = 1 << 20


def random_problem(seed: int, steps: int = 7) -> Problem:
    draw = random.Random(seed)
    lines, touches = [], [[step] for step in range(steps)]
    before: list[list[int]] = [[] for _ in range(steps)]
    sizes = [draw.choice((64, 128, 640, 4096)) for _ in range(steps)]
    for value in range(steps):
        for reader in range(value + 1, steps):
            if draw.random() < 0.35:
                touches[reader].append(value)
                before[reader].append(value)
        lines.append(f"value {value} {sizes[value]}{' late' * (draw.random() < 0.2)}")
    for step in range(steps):
        over = [f"{value}>{step}" for value in before[step] if sizes[value] == sizes[step] and draw.random() < 0.5]
        lines.append(f"step {step}: {' '.join(map(str, touches[step]))}"
                     + (f"; after {' '.join(map(str, before[step]))}" if before[step] else "")
                     + (f"; over {' '.join(over)}" if over else ""))
    return parse_problem("\n".join(lines))


def valid_orders(problem: Problem) -> list[tuple[int, ...]]:
    found = []
    for order in itertools.permutations(range(len(problem.before))):
        place = {step: k for k, step in enumerate(order)}
        if all(place[other] < place[step] for step in order for other in order if problem.before[step] >> other & 1):
            found.append(order)
    return found


# ---- the texts and their judge

@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_instances_are_solved_as_well_as_recorded(path: Path) -> None:
    text = path.read_text()
    problem = parse_problem(text)
    assert show_problem(problem, path.stem) == text
    solution = solve(problem, shared_context())
    alive = judge_solution(text, show_solution(solution, path.stem))
    assert parse_solution(show_solution(solution, path.stem)) == solution
    assert alive == problem.peak(solution.order) <= solution.peak <= RECORDED[path.stem]


@pytest.mark.parametrize("seed", range(8))
def test_the_judge_agrees_with_what_searches_count(seed: int) -> None:
    problem = random_problem(seed)
    order = random.Random(seed).choice(valid_orders(problem))
    for solution in (placed(problem, order, shared_context()), long_lived_first(problem, order)):
        assert judge_solution(show_problem(problem, "p"), show_solution(solution, "p")) == problem.peak(order)


def test_the_judge_refuses_what_is_wrong() -> None:
    text = (FOLDER / "towers.txt").read_text()
    right = solve(parse_problem(text), shared_context())
    order, offsets = list(right.order), list(right.offsets)
    judge_solution(text, show_solution(right, "towers"))
    wrong = {
        "overlap": Solution(right.order, (offsets[1], *offsets[1:]), right.peak),
        "before": Solution((order[-1], *order[:-1]), right.offsets, right.peak),
        "once each": Solution(right.order[1:], right.offsets, right.peak),
        "no place": Solution(right.order, (-1, *offsets[1:]), right.peak),
        "multiple": Solution(right.order, (offsets[0] + 8, *offsets[1:]), right.peak),
        "peak": Solution(right.order, right.offsets, right.peak + 64),
    }
    for said, solution in wrong.items():
        with pytest.raises(VerifyError, match=said):
            judge_solution(text, show_solution(solution, "towers"))


@pytest.mark.parametrize("text", ["value 1 64", "value 0 x", "step 0: 3", "step 0:; after 0", "something 0"])
def test_a_text_that_is_no_problem_is_refused(text: str) -> None:
    with pytest.raises(ParseError, match="line 1"):
        parse_problem(text)


# ---- orders

@pytest.mark.parametrize("seed", range(8))
def test_small_problems_are_solved_exactly(seed: int) -> None:
    problem = random_problem(seed)
    assert problem.peak(order_by_parts(problem).order) == min(map(problem.peak, valid_orders(problem)))


@pytest.mark.parametrize("seed", range(4))
def test_orders_stay_valid_and_are_the_same_from_the_end(seed: int) -> None:
    problem = random_problem(seed, 30)
    program = list(range(30))
    turned = reversed_problem(problem)
    assert turned.curve(program[::-1])[::-1] == problem.curve(program)
    for order in (early(problem, program, 0), late(problem, program, 0), order_by_parts(problem).order):
        place = {step: k for k, step in enumerate(order)}
        assert sorted(order) == program
        assert all(place[other] < place[step] for step in program for other in program
                   if problem.before[step] >> other & 1)
    assert problem.peak(order_by_parts(problem).order) <= problem.peak(program)


def test_repeated_layers_are_solved_once() -> None:
    lines, steps = ["value 0 64 early"], []
    values, before = 1, -1
    for _ in range(40):  # a chain of layers of three branches, each with a wide value that is made first
        first = len(steps)
        wide = [values + k for k in range(3)]
        thin = [values + 3 + k for k in range(3)]
        lines += [f"value {value} 65536" for value in wide] + [f"value {value} 128" for value in thin]
        handed, out = values - 1, values + 6
        lines.append(f"value {out} 64")
        after = f"; after {before}" if before >= 0 else ""
        steps += [f"step {first + k}: {handed} {wide[k]}{after}" for k in range(3)]
        steps += [f"step {first + 3 + k}: {wide[k]} {thin[k]}; after {first + k}" for k in range(3)]
        steps.append(f"step {first + 6}: {' '.join(map(str, (*thin, out)))}; "
                     f"after {first + 3} {first + 4} {first + 5}")
        before, values = first + 6, values + 7
    problem = parse_problem("\n".join(lines + steps))
    found = order_by_parts(problem)
    assert problem.peak(found.order) < 0.5 * problem.peak(range(len(steps)))
    assert found.different <= 4 < 10 <= found.parts


# ---- other ways

def test_the_allocator_takes_segments_and_joins_what_is_free() -> None:
    allocator = CachingAllocator()
    small = [allocator.take(600), allocator.take(512)]
    assert (allocator.reserved, allocator.used) == (2 * MEGABYTE, 1024 + 512)
    large = allocator.take(12 * MEGABYTE + 1)
    assert allocator.reserved == (2 + 14) * MEGABYTE
    middle = [allocator.take(3 * MEGABYTE), allocator.take(4 * MEGABYTE)]
    assert allocator.reserved == (2 + 14 + 20) * MEGABYTE
    for block in (*small, *middle, large):
        allocator.drop(block)
    assert allocator.used == 0
    allocator.take(19 * MEGABYTE + MEGABYTE // 2)  # the two are one again
    allocator.take(2 * MEGABYTE)  # the smallest that fits: that of 14
    assert allocator.reserved == (2 + 14 + 20) * MEGABYTE


def test_program_order_is_never_below_what_is_alive() -> None:
    for seed in range(10):
        problem = random_problem(seed)
        found = with_caching(problem, range(7))
        assert found.reserved >= found.most >= problem.peak(range(7))
        assert problem.peak(least_cost(problem)) >= min(map(problem.peak, valid_orders(problem)))


def test_the_integer_program_finds_the_least() -> None:
    pytest.importorskip("highspy")
    for seed in range(3):
        problem = plain(random_problem(seed, 6))
        found = solved(problem, 20.0)
        assert found.peak == min(map(problem.peak, valid_orders(problem)))


def test_the_integer_program_makes_an_order_better_where_there_is_one() -> None:
    pytest.importorskip("highspy")
    worse = 0
    for seed in range(6):
        problem = random_problem(seed, 7)
        orders = list(valid_orders(problem))
        peaks = [problem.peak(order) for order in orders]
        first = orders[peaks.index(max(peaks))]
        found = improved(problem, first, 20.0)
        assert found is None or (tuple(found) in orders and problem.peak(found) < max(peaks))
        worse += found is not None
        assert improved(problem, orders[peaks.index(min(peaks))], 20.0) is None
    assert worse >= 4


def test_programs_take_what_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("highspy")

    def towers(x: torch.Tensor, wide: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
        values = [x @ (wide * number) for number in range(1, 5)]
        return sum(value @ narrow for value in values)

    given = torch.randn(64, 32), torch.randn(32, 2048), torch.randn(2048, 16)
    monkeypatch.setattr(plan_order, "search", lambda *_: None)
    monkeypatch.setattr(plan_order, "order_by_parts", lambda problem, _: Cuts(list(range(len(problem.before)))))
    plain_run, run = anyshape.compile(towers), anyshape.compile(towers, planning_seconds=20)
    assert torch.equal(run(*given), plain_run(*given))
    before, after = (compilation_of(one).programs[0].executable for one in (plain_run, run))
    hints = dict(before.plan.facts.hints)
    assert before.other is None
    # of orders that are equally good here, HiGHS may find one that other sizes do not take
    plans = [one.plan for one in (after, after.other) if one is not None]
    assert min(evaluate(plan.arena, hints) for plan in plans) < 0.9 * evaluate(before.plan.arena, hints)


def test_parts_that_are_equally_full_are_solved_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two towers, one after the other: with one of them in a better order the peak is what it was."""
    pytest.importorskip("highspy")
    monkeypatch.setattr(integer_program, "WINDOW", 7)
    lines = ["value 0 64 early"]
    lines += [f"value {value} {65536 if value % 7 in (1, 3, 5) else 64}" for value in range(1, 15)]
    for first in (0, 7):
        lines += [f"step {first + i}: {first} {first + 2 * i + 1}{f'; after {first - 1}' if first else ''}"
                  for i in range(3)]
        lines += [f"step {first + 3 + i}: {first + 2 * i + 1} {first + 2 * i + 2}; after {first + i}" for i in range(3)]
        lines.append(f"step {first + 6}: {first + 2} {first + 4} {first + 6} {first + 7}; "
                     f"after {first + 3} {first + 4} {first + 5}")
    problem = parse_problem("\n".join(lines))
    order = list(range(14))
    assert problem.peak(order) > 3 * 65536
    better = integer_program.improved(problem, order, 20.0)
    assert better is not None
    assert problem.peak(better) < 1.1 * 65536


def test_without_highs_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="highspy"):
        anyshape.compile(torch.sin, planning_seconds=1)(torch.randn(3))


# ---- of a train step

def test_a_train_step_becomes_a_problem() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 8))
    step = anyshape.train_step(model, lambda net, x: net(x).square().mean(),
                               torch.optim.SGD(model.parameters(), lr=0.1), strict=True)
    step(torch.randn(16, 64))
    problem = step_problem(*plans_of(step))
    text = show_problem(problem, "step")
    solution = solve(parse_problem(text), shared_context())
    alive = judge_solution(text, show_solution(solution, "step"))
    # what is saved is there at the border: two results of tanh at least
    assert 16 * (128 + 64) * 4 <= alive <= problem.peak(range(len(problem.before)))
    assert problem.before[-1]
