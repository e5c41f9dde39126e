"""What a report shows, as plain data: formulas, lives, and at some sizes what the compiler would do there.

    {"name": .., "limit": .., "programs": [{"symbols": .., "formulas": .., "steps": .., "lives": .., "points": ..}]}

Formulas are lists of terms, [coefficient, [[symbol or call, power], ..]], so that a page can evaluate them. Everything
that is decided (which values are dropped or moved out, what a layout needs) comes from
`runtime/budget/memory_budget.py`.
"""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from anyshape.base.errors import InputError, LimitError
from anyshape.frontend.diagnostics.explain import capture_of, given_values, step_text
from anyshape.frontend.diagnostics.memory import backward_name, limit_at, pairs
from anyshape.frontend.diagnostics.report.spans import POINTS, Span, points, taken_apart
from anyshape.frontend.programs.compile_program import NativeProgram
from anyshape.frontend.programs.session import Capture, Compilation
from anyshape.ir.graph import UNUSED
from anyshape.plan.ir.program import Plan
from anyshape.runtime.budget.memory_budget import UNLIMITED, MemoryBudget
from anyshape.runtime.budget.tradeoff_curve import TradeoffPoint
from anyshape.runtime.inspect.memory_timeline import (
    LiveRange,
    Timeline,
    away,
    scratch,
    seconds_again,
    steps_again,
    timeline,
    used,
)
from anyshape.runtime.specialize.saved_policy import SAVE_ALL
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
    notes = [{"name": one.name, "stage": one.stage, "reason": one.reason} for one in compilation.fallbacks]
    notes += [{"name": one.name, "stage": "order", "reason": TWO} for one, _ in found
              if one.executable.other is not None]
    limit = compilation.config.memory_limit
    return {"format": FORMAT, "name": name, "limit": limit if limit < NO_LIMIT else 0, "programs": programs,
            "notes": notes}


def _program(program: NativeProgram, limit: MemoryBudget, compilation: Compilation, values: Mapping[str, int],
             ranges: Mapping[str, tuple[int, int]], most: int) -> Json:
    capture = capture_of(program, compilation)
    names = compilation.names_of(program.name)
    spans = _spans(limit, capture, values, ranges)
    limit = limit_at(limit, dict(zip(limit.program.layout.symbols, (one.start for one in spans), strict=True)))
    line = timeline(limit)
    formulas = _Formulas({old: symbol(name) for old, name in names.items()})
    lives = [_life(one, formulas) for one in line.lives]
    undecided = [formulas.number(one) for one in _undecided(limit)]
    needs = [formulas.number(one) for one in program.executable.plan.nonnegative]
    found: list[Json] = []
    for point in points(spans, most):
        at = dict(zip(limit.program.layout.symbols, point, strict=True))
        one = _point(limit, line, at, names)
        if one is not None:
            found.append({**one, "curves": _curves(limit, line, at, one)} if not found else one)
    matters = set().union(*(symbols_of(size) for size in formulas.sizes))
    parts = [program.name, *([backward_name(program.name)] if limit.backward is not None else [])]
    return {
        "name": program.name.partition(".")[0], "parts": parts, "where": capture.where,
        "symbols": [_symbol(one, found, matters) for one in sorted(spans, key=lambda one: one.name)
                    if not one.name.startswith(UNUSED)],
        "formulas": [{"text": str(size), "terms": terms(size)} for size in formulas.sizes],
        "steps": _steps(limit), "border": line.border, "lives": lives, "undecided": undecided, "nonnegative": needs,
        "limited": limit.bytes if limit.bytes < NO_LIMIT else 0,
        "again": _chooses(limit), "moves": limit.store is not None, "points": found}


def _spans(limit: MemoryBudget, capture: Capture, values: Mapping[str, int], ranges: Mapping[str, tuple[int, int]]
           ) -> list[Span]:
    """The sizes of a program, in the order of its layout's symbols."""
    facts = limit.program.plan.facts
    seen = [record.values for record in list(limit.program.records.values())]
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
    return {"name": span.name, "place": span.place, "least": span.least, "greatest": span.greatest,
            "start": span.start, "marks": marks, "matters": span.name in matters}


def _point(limit: MemoryBudget, line: Timeline, values: dict[str, int], names: Mapping[str, str]) -> Json | None:
    """What the compiler does at these sizes; None where the program does not take them."""
    try:
        whole = limit.needed(values, SAVE_ALL)
        scratches = scratch(limit, values)
        ladder = _rungs(limit, values)
    except InputError:
        return None
    rungs: list[Json] = []
    before = TradeoffPoint(frozenset(), 0, 0.0)
    for rung in ladder:
        rungs.append(_rung(limit, line, values, scratches, before, rung))
        before = rung
    said = {names.get(old, old): value for old, value in values.items() if not old.startswith(UNUSED)}
    return {"values": dict(sorted(said.items())), "scratch": list(scratches),
            "needed": whole, "rungs": rungs, "chosen": _chosen(limit, values, names)}


def _rung(limit: MemoryBudget, line: Timeline, values: dict[str, int], scratches: tuple[int, int],
          before: TradeoffPoint, rung: TradeoffPoint
          ) -> Json:
    """A rung, as what is other than on the one before."""
    ladders = limit.ladders
    assert ladders is not None
    can = {one.name: i for i, one in enumerate(line.lives) if one.gap is not None}
    saved = {one.name: i for i, one in enumerate(line.lives) if one.kind == "saved"}
    only = {one.name: i for i, one in enumerate(line.lives) if one.only}
    there, now = used(ladders, before.dropped), used(ladders, rung.dropped)
    new = rung.dropped - before.dropped
    steps = steps_again(ladders, new)
    costs = seconds_again(limit, values, rung.dropped) if new else {}
    home, gone = away(ladders, before.moved), away(ladders, rung.moved)
    return {
        "drop": [[can[name], steps.get(name, 0), costs[name]] for name in sorted(new) if name in can],
        "keep": sorted(can[name] for name in before.dropped - rung.dropped if name in can),
        "move": [[saved[name], *span, *_copies(limit, line.lives[saved[name]], values)]
                 for name, span in sorted(gone.items()) if home.get(name) != span],
        "stay": sorted(saved[name] for name in home.keys() - gone.keys()),
        "more": sorted(only[name] for name in now - there), "less": sorted(only[name] for name in there - now),
        "peak": int(line.curve(values, scratches, rung.dropped, now, gone).max()), "live": rung.live,
        "seconds": limit.seconds(rung), "needed": limit.needed(values, rung.keeping),
        "steps": len(ladders.keeps.runs(rung.keeping)),
        "dropped": len(rung.dropped), "moved": len(rung.moved), "away": rung.away}


def _copies(limit: MemoryBudget, life: LiveRange, values: dict[str, int]) -> tuple[float, float | None]:
    """Seconds that copying a value out and back takes, and that computing it alone again would take, if it can be."""
    assert limit.store is not None
    bytes_ = evaluate(life.bytes, values)
    copies = limit.store.seconds(bytes_, out=True) + limit.store.seconds(bytes_, out=False)
    return copies, None if life.gap is None else seconds_again(limit, values, frozenset([life.name]))[life.name]


def _rungs(limit: MemoryBudget, values: dict[str, int]) -> list[TradeoffPoint]:
    """The whole ladder; none of a program that was compiled without a limit, or has no backward."""
    return list(limit.ladder(values) or ()) if _chooses(limit) else []


def _chooses(limit: MemoryBudget) -> bool:
    """Whether something can be computed again, or moved out."""
    return limit.backward is not None and bool(limit.backward.plan.again or limit.store is not None)


def _curves(limit: MemoryBudget, line: Timeline, values: dict[str, int], point: Json) -> Json:
    """Bytes alive at every position: with everything kept, and under the limit that was set."""
    chosen, around = point["chosen"], tuple(point["scratch"])
    before = line.curve(values, around)
    after = before
    if isinstance(chosen, int) and chosen > 0:
        rung = _rungs(limit, values)[chosen]
        after = line.curve(values, around, rung.dropped, used(limit.ladders, rung.dropped),
                           away(limit.ladders, rung.moved))
    return {"before": before.tolist(), "after": after.tolist()}


def _chosen(limit: MemoryBudget, values: dict[str, int], names: Mapping[str, str]) -> Any:
    """Under the limit that was set: the number of the rung, -1 for everything kept, or why there is none."""
    try:
        kept = limit.choose(values)
    except LimitError as error:
        said = {"what": error.what, "why": error.why, "do": error.do}
        return {part: re.sub(r"\b\w+\b", lambda word: names.get(word[0], word[0]), text) for part, text in said.items()}
    if kept == SAVE_ALL:
        return -1
    return next(i for i, rung in enumerate(_rungs(limit, values)) if rung.keeping == kept)


def _steps(limit: MemoryBudget) -> list[Json]:
    """A row per position of the line."""
    rows: list[Json] = []
    for part, one in (("forward" if limit.backward is not None else "", limit.program), ("backward", limit.backward)):
        if one is None:
            continue
        optional = set(one.plan.optional)
        rows += [{"part": part, "number": i, "what": step_text(step), "where": step.where, "optional": i in optional}
                 for i, step in enumerate(one.plan.steps)]
        rows.append({"part": part, "number": len(one.plan.steps), "what": "the end", "where": "", "optional": False})
    return rows


def _life(one: LiveRange, formulas: _Formulas) -> Json:
    return {"name": one.name, "kind": one.kind, "bytes": formulas.number(one.bytes), "first": one.first,
            "last": one.last, "where": one.where, "gap": None if one.gap is None else list(one.gap),
            "only": one.only}


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
    """A size as data: see the head of this file. A call is {"op": .., "args": [terms, ..]}, of "scaled" with a
    "factor"."""
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
