"""What a report shows, as plain data: formulas, lives, and at some sizes what the compiler would do there.

    {"name": .., "limit": .., "programs": [{"symbols": .., "formulas": .., "steps": .., "lives": .., "points": ..}]}

Formulas are lists of terms, [coefficient, [[symbol or call, power], ..]], so that a page can evaluate them. Everything
that is decided (which values are dropped or moved out, what a layout needs) comes from
`runtime/budget/memory_budget.py`.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from anyshape.base.errors import InputError
from anyshape.frontend.diagnostics.explain import given_values
from anyshape.frontend.diagnostics.explain_data import MemoryCurve, plain
from anyshape.frontend.diagnostics.memory import CalledProgram, called_program, copying, pairs
from anyshape.frontend.diagnostics.report.spans import POINTS, Span, points, taken_apart
from anyshape.frontend.programs.compile_program import NativeProgram
from anyshape.frontend.programs.session import Capture, Compilation, Fallback
from anyshape.ir.graph import UNUSED
from anyshape.plan.ir.program import Plan
from anyshape.runtime.budget.memory_budget import UNLIMITED, MemoryBudget
from anyshape.runtime.budget.tradeoff_curve import TradeoffPoint
from anyshape.runtime.inspect.memory_timeline import TimelineRange, state, work_again
from anyshape.sym.expr import Call, Expr, Size, evaluate, substitute, symbol, symbols_of
from anyshape.sym.floats import float_of

FORMAT = "anyshape-report-1"
NO_LIMIT = UNLIMITED
TWO = ("calls take the one of two orders of steps that needs less at their sizes; this shows the one at the sizes "
       "where the sliders stand first")
Json = dict[str, Any]


def collect(name: str, compilation: Compilation, given: Mapping[str, Any], most: int = POINTS) -> Json:
    """The data of a report.

    Args:
        given: sizes as for `memory`; a `range` in place of a number is what a slider goes over.
        most: sets of sizes for which the compiler's choice is computed.

    Raises:
        InputError: nothing is compiled yet, or a size has a name that no program has.
    """
    sizes, ranges = taken_apart(given)
    values = given_values(compilation, sizes)
    found = pairs(compilation)
    if not found:
        raise InputError(f"there is nothing to report of {name}", why="nothing is compiled yet, or all of it runs as "
                         "PyTorch", do="call the program once (and its backward, if it is trained), and see explain()")
    programs = [_program(one, limit, compilation, values, ranges, most) for one, limit in found]
    notes = [*compilation.fallbacks, *(Fallback(one.name, "order", TWO) for one, _ in found
                                       if one.executable.other is not None)]
    limit = compilation.config.memory_limit
    return {"format": FORMAT, "name": name, "limit": limit if limit < NO_LIMIT else 0, "programs": programs,
            "notes": plain(notes)}


def _program(program: NativeProgram, limit: MemoryBudget, compilation: Compilation, values: Mapping[str, int],
             ranges: Mapping[str, tuple[int, int]], most: int) -> Json:
    capture = compilation.capture_of(program.name)
    spans = _spans(limit, capture, values, ranges)
    symbols = limit.program.layout.symbols
    called = called_program(program, compilation, limit, dict(zip(symbols, (one.start for one in spans), strict=True)))
    formulas = _Formulas({old: symbol(name) for old, name in called.names.items()})
    lives = [plain(dataclasses.replace(one, bytes=formulas.number(one.bytes))) for one in called.line.lives]
    undecided = [formulas.number(one) for one in _undecided(called.limit)]
    needs = [formulas.number(one) for one in program.executable.plan.nonnegative]
    found: list[Json] = []
    for point in points(spans, most):
        at = dict(zip(symbols, point, strict=True))
        curve = called.at(at)
        if curve is not None:
            found.append(_point(called, at, curve))
            if len(found) == 1:
                found[0]["curves"] = {"before": list(curve.kept), "after": list(curve.chosen)}
    matters = set().union(*(symbols_of(size) for size in formulas.sizes))
    return {
        "name": program.name.partition(".")[0], "parts": list(called.parts), "where": capture.where,
        "symbols": [_symbol(one, found, matters) for one in sorted(spans, key=lambda one: one.name)
                    if not one.name.startswith(UNUSED)],
        "formulas": [{"text": str(size), "terms": terms(size)} for size in formulas.sizes],
        "steps": plain(called.positions), "border": called.line.border, "lives": lives, "undecided": undecided,
        "nonnegative": needs, "limited": called.room if called.room < NO_LIMIT else 0,
        "again": _chooses(called.limit), "moves": called.limit.store is not None, "points": found}


def _spans(limit: MemoryBudget, capture: Capture, values: Mapping[str, int], ranges: Mapping[str, tuple[int, int]]
           ) -> list[Span]:
    """The sizes of a program, in the order of its layout's symbols."""
    facts = limit.program.plan.facts
    seen = [record.values for record in list(limit.program.specializations.values())]
    places = {old: (name, words) for old, words, name in capture.sizes}
    spans = []
    for old in limit.program.layout.symbols:
        name, words = places.get(old, (old, "found while it runs"))
        met = [one[old] for one in seen if old in one]
        low, high = facts.range_of(old)
        start = values.get(name, max(met, default=facts.hint(symbol(old))))
        least, greatest = ranges.get(name, (max(low, 1), high or max([2 * start, *met])))
        least, greatest = min(least, start), max(greatest, start)
        spans.append(Span(name, words, least, greatest, start))
    return spans


def _symbol(span: Span, found: Sequence[Json], matters: set[str]) -> Json:
    marks = sorted({one["values"][span.name] for one in found})
    return {**plain(span), "marks": marks, "matters": span.name in matters}


def _point(called: CalledProgram, values: dict[str, int], curve: MemoryCurve) -> Json:
    """What the compiler does at these sizes, with the whole curve; none of a program that was compiled without a
    limit, or has no backward. chosen: the number of the choice, -1 for everything kept, or why there is none."""
    tradeoff = list(called.limit.tradeoff(values) or ()) if _chooses(called.limit) else []
    before = [TradeoffPoint(frozenset(), 0, 0.0), *tradeoff]
    said = {called.names.get(old, old): value for old, value in values.items() if not old.startswith(UNUSED)}
    return {"values": dict(sorted(said.items())), "scratch": list(curve.scratch), "needed": curve.needed,
            "choices": [_choice(called, values, curve.scratch, *two) for two in zip(before, tradeoff, strict=False)],
            "chosen": plain(curve.refusal) or (-1 if curve.choice is None else curve.choice.number)}


def _choice(called: CalledProgram, values: dict[str, int], scratches: tuple[int, int], before: TradeoffPoint,
          choice: TradeoffPoint) -> Json:
    """A choice, as what is other than on the one before."""
    limit, line = called.limit, called.line
    problem = limit.problem
    assert problem is not None
    can = {one.name: i for i, one in enumerate(line.lives) if one.gap is not None}
    saved = {one.name: i for i, one in enumerate(line.lives) if one.kind == "saved"}
    only = {one.name: i for i, one in enumerate(line.lives) if one.only}
    what = state(problem, choice.policy)
    (dropped, now, gone), (_, there, home) = what, state(problem, before.policy)
    new = dropped - before.dropped
    again = work_again(limit, values, dropped) if new else {}
    return {
        "drop": [[can[name], *again[name]] for name in sorted(new) if name in can],
        "keep": sorted(can[name] for name in before.dropped - dropped if name in can),
        "move": [[saved[name], *span, *_copies(limit, line.lives[saved[name]], values)]
                 for name, span in sorted(gone.items()) if home.get(name) != span],
        "stay": sorted(saved[name] for name in home.keys() - gone.keys()),
        "more": sorted(only[name] for name in now - there), "less": sorted(only[name] for name in there - now),
        "peak": int(line.curve(values, scratches, *what).max()), "live": choice.live,
        "seconds": limit.seconds(choice), "needed": limit.needed(values, choice.policy),
        "steps": len(problem.keeps.runs(choice.policy)),
        "dropped": len(dropped), "moved": len(choice.moved), "away": choice.away}


def _copies(limit: MemoryBudget, life: TimelineRange, values: dict[str, int]) -> tuple[float, float | None]:
    """Seconds that copying a value out and back takes, and that computing it alone again would take, if it can be."""
    again = None if life.gap is None else work_again(limit, values, frozenset([life.name]))[life.name][1]
    return copying(limit, evaluate(life.bytes, values)), again


def _chooses(limit: MemoryBudget) -> bool:
    """Whether something can be computed again, or moved out."""
    return limit.backward is not None and bool(limit.backward.plan.again or limit.store is not None)


class _Formulas:
    """Sizes in the user's names, each kept once."""

    def __init__(self, names: Mapping[str, Size]) -> None:
        self.names = names
        self.sizes: list[Size] = []
        self.numbers: dict[Size, int] = {}

    def number(self, size: Size) -> int:
        """The place of a size among all."""
        size = substitute(size, self.names)
        if size not in self.numbers:
            self.numbers[size] = len(self.sizes)
            self.sizes.append(size)
        return self.numbers[size]


def terms(size: Size) -> list[Any]:
    """A size as data: terms, [coefficient, [[symbol or call, power], ..]]. A call is {"op": .., "args": [terms, ..]},
    of "scaled" with a "factor"."""
    if isinstance(size, int):
        return [[size, []]]
    return [[coefficient, [[_atom(atom), power] for atom, power in mono]] for mono, coefficient in size.terms]


def _atom(atom: str | Call) -> Any:
    if isinstance(atom, str):
        return atom
    if atom.op == "scaled":
        return {"op": atom.op, "args": [terms(atom.args[0])], "factor": float_of(atom.args[1])}
    return {"op": atom.op, "args": [terms(argument) for argument in atom.args]}


def _undecided(limit: MemoryBudget) -> list[Size]:
    """The maxima in the layouts' formulas: sizes of which the facts do not say which is the larger."""
    plans: list[Plan] = [limit.program.plan, *([limit.backward.plan] if limit.backward is not None else [])]
    found: dict[Size, None] = {}
    for plan in plans:
        for size in (plan.arena, plan.kept, *(offset for _, offset in plan.offsets)):
            for atom in _calls(size):
                if atom.op == "max":
                    found[Expr(((((atom, 1),), 1),))] = None
    return list(found)


def _calls(size: Size) -> list[Call]:
    if isinstance(size, int):
        return []
    calls = [atom for mono, _ in size.terms for atom, _ in mono if isinstance(atom, Call)]
    return [*calls, *(inner for call in calls for argument in call.args for inner in _calls(argument))]
