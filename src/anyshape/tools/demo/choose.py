"""The demo's strategy on several ranks: searched for the first batch, or named, and printed with what was predicted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rich.console import Console

from anyshape.base.errors import AnyShapeError
from anyshape.dist.cost.machine import machine_of
from anyshape.dist.cost.parallel import Degrees
from anyshape.dist.cost.strategy import uniform
from anyshape.dist.search.hand_made import best_by_name
from anyshape.dist.search.judge import Verdict, check, cost
from anyshape.dist.search.problem import Plan, Search
from anyshape.dist.search.solver import Candidate
from anyshape.dist.strategies import Strategy
from anyshape.frontend.strategy import StrategySearch
from anyshape.frontend.train_step.auto_strategy import MACHINE, search_rows, searched
from anyshape.tools.demo import backends
from anyshape.tools.demo.show.strategy import print_plan, print_tried, run_text
from anyshape.tools.demo.training import Session

ROWS = ("ddp", "zero1", "fsdp")
BY_HAND = {"tp": "TP", "sp": "TP+SP", "pp": "PP"}  # a word -> the name of a plan by hand


def chosen(console: Console, session: Session, named: Strategy | None, limit: int) -> Strategy:
    """The strategy that was named, or what a search finds; all ranks call this, and it is theirs from here on.

    Raises:
        ConfigError: the search finds none; raised on all ranks.
    """
    ranks = session.ranks
    batch, _ = session.stream.take(session.cursor)
    own = replace(ranks, part=ranks.rank, parts=ranks.world).deal(batch)
    given = session.model, backends.loss_of, session.optimizer, (own.tokens, own.targets)
    if named is None:
        found = searched(*given, limit)
        strategy = found.strategy
        if found.search is not None:
            best, problem = found.search.found.best, found.search.problem
            told = f"found by a search over strategies that deal out rows; no other is below " \
                   f"{found.search.found.bound * 1e3:.3g} ms by its bound"
            _print(console, problem, best.plan, found.search.verdict, found.search.found.tried, told)
    else:
        strategy = named
        if ranks.is_first:
            try:
                _print_named(console, strategy, search_rows(*given, ranks.world, limit))
            except AnyShapeError as error:
                console.print(f"nothing is predicted: {error.what}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"all ranks run {run_text(strategy)}", highlight=False, markup=False, soft_wrap=True)
    session.ranks = ranks.running(strategy)
    return strategy


def _print(console: Console, problem: Search, plan: Plan, verdict: Verdict, tried: Iterable[Candidate],
           told: str) -> None:
    print_plan(console, problem, plan, verdict, told)
    found = [*tried, *(one for word in ROWS for one in (_by_hand(problem, word),) if one is not None)]
    print_tried(console, verdict, sorted(found, key=_seconds), plan.strategies[-1].summary)


def _seconds(one: Candidate) -> float:
    return float("inf") if one.verdict is None or one.why else one.verdict.seconds


def _by_hand(problem: Search, word: str) -> Candidate | None:
    """A plan in which all layers do the same; None where it cannot run."""
    layers = [(layer.name, layer.count) for layer in problem.workload.layers]
    plan = Plan((uniform(Degrees(problem.world), layers, "whole", word, "none"),) * len(problem.shapes))
    verdict = cost(problem, plan)
    return None if verdict is None else Candidate(word, plan, 0.0, verdict, "; ".join(check(problem, plan, verdict)))


def _print_named(console: Console, strategy: Strategy, search: StrategySearch) -> None:
    """What the simulator says of a strategy of one axis, and of those that a search would have tried."""
    problem = search.problem
    word = strategy.kinds[0] if len(strategy.kinds) == 1 else ""
    found: tuple[Plan, Verdict] | None = None
    if word in ROWS:
        one = _by_hand(problem, word)
        found = (one.plan, one.verdict) if one is not None and one.verdict is not None else None
    elif word in BY_HAND:  # the ranks are processes of one machine, a node
        problem = problem.replace(machine=machine_of(f"{MACHINE}x{problem.world}"))
        found = best_by_name(problem).get(BY_HAND[word])
    if found is None:
        console.print("nothing is predicted: the simulator has no plan of this kind for these ranks", highlight=False)
        return
    _print(console, problem, *found, search.found.tried, "as asked for")
