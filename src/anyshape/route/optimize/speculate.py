"""Speculative routing with check and roll-back, as an optimisation of a plan: which paths calls are likely to take.

    calls of the profile: (go on, exit) 60 %, (go on, go on, exit) 30 %, others 10 %
    -->  two predicted paths for 90 % of the calls; the general path for the others

Brainstorm (OSDI'23, section 4.3) has the idea; that decisions are checked, and wrong ones rolled back, is done in
`route/speculate`.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from anyshape.base.errors import AnyShapeError
from anyshape.route.flow import branch_independent
from anyshape.route.optimize.decision import Compile, Decision, DecisionContext, shared_copy
from anyshape.route.profile.profile import Profile, RouterProfile
from anyshape.route.profile.routers import routers_of
from anyshape.route.speculate import Speculated

NAME = "speculate"
PATHS = 16  # at most, the most frequent first
RARE = 0.02  # of the calls: a path that fewer take has no program
LEAST = 0.25  # of the calls: what the paths together have to cover
GUARD = "every decision is read and compared; a path without a program, or an error, runs the call on the general path"

MIXED = (-2,)  # no choice of all cells

Choices = tuple[tuple[int, ...], ...]
Key = tuple[tuple[str, Choices], ...]


def propose(context: DecisionContext) -> list[Decision]:
    """One decision for the whole model."""
    if not context.profile.routers:
        return []
    found, calls = paths(context.profile)
    kept = [(path, count / calls) for path, count in found.most_common(PATHS) if count / calls >= RARE] if calls else []
    covered = sum(share for _, share in kept)
    if covered < LEAST:
        return [_refused(f"paths that a fiftieth of the calls take cover {covered:.0%} of {calls} calls; speculation "
                         f"starts at {LEAST:.0%}")]
    options = {"paths": [{name: [list(choice) for choice in choices] for name, choices in path} for path, _ in kept],
               "shares": [share for _, share in kept], "calls": calls}
    if context.example is not None:
        refusal = _refusal(context.model, options, context.example)
        if refusal:
            return [_refused(refusal)]
    several = f"{len(kept)} paths cover" if len(kept) > 1 else "one path covers"
    why = f"{several} {covered:.0%} of {calls} calls ({', '.join(f'{share:.0%}' for _, share in kept[:4])})"
    return [Decision("", NAME, True, why, None, GUARD, options)]


def _refused(why: str) -> Decision:
    return Decision("", NAME, False, why)


def _refusal(model: nn.Module, options: Mapping[str, Any], example: tuple[Any, ...]) -> str:
    """Why the paths cannot run ahead of their decisions; "" where they can."""
    try:
        found = speculated(shared_copy(model), options, None).plan(example, {})
    except AnyShapeError as refusal:
        return "; ".join(part for part in (refusal.what, refusal.why, refusal.where) if part)
    return "" if found is not None else "no path of the profile is one that the example takes"


def apply(model: nn.Module, decision: Decision, compile: Compile | None) -> nn.Module:
    """The model as the general path of a `Speculated`."""
    return speculated(model, decision.options, compile)


def speculated(model: nn.Module, options: Mapping[str, Any], compile: Compile | None) -> Speculated:
    """A model with the paths of a decision; routers of the model are watched."""
    copy = shared_copy(model)
    ours, theirs = routers_of(model), routers_of(copy)
    predictions = [({name: [tuple(choice) for choice in choices] for name, choices in path.items()}, share)
                   for path, share in zip(options["paths"], options["shares"], strict=True)]
    return Speculated(model, copy, {name: (ours[name], theirs[name]) for name in ours}, predictions,
                      rowwise=branch_independent, compile=compile, calls=options["calls"])


def paths(profile: Profile) -> tuple[Counter[Key], int]:
    """How often calls of the profile took each path, all cells together; and how many calls were looked at.

    A path is what routers decided in a call that is sampled of all of them. Where routers were called unequally often
    (loops, exits that leave routers out), calls cannot be told from the profile; the likeliest choice of each router is
    the one path then.
    """
    records = {name: profile.of(name) for name in profile.routers}
    if len({one.calls for one in records.values()}) > 1 or any(one.lost for one in records.values()):
        return _likeliest(profile)
    chosen = {name: _chosen(one) for name, one in records.items()}
    numbers = set.intersection(*(set(one) for one in chosen.values()))
    found: Counter[Key] = Counter()
    for number in numbers:
        own = {name: by_number[number] for name, by_number in chosen.items()}
        if MIXED not in own.values():  # a router in a branch that nothing went to has no choice
            found[tuple((name, (choice,)) for name, choice in own.items() if choice)] += 1
    return found, len(numbers)


def _chosen(record: RouterProfile) -> dict[int, tuple[int, ...]]:
    """By the number of a call what all its cells chose; () where there was none, MIXED where they differ. Loads tell it
    where each cell has one choice, and more calls' loads are kept than decisions."""
    found: dict[int, tuple[int, ...]] = {}
    if record.choices == 1:
        for number, cells, loads in zip(record.numbers.tolist(), record.cells.tolist(), record.loads, strict=True):
            most = int(loads.argmax())
            dropped = cells > 0 and not loads.any()
            found[number] = () if not cells else (-1,) if dropped else (most,) if loads[most] == cells else MIXED
    for number, ids in record.decided:
        rows = {tuple(row) for row in ids.tolist()}
        found[number] = MIXED if len(rows) > 1 else rows.pop() if rows else ()
    return found


def _likeliest(profile: Profile) -> tuple[Counter[Key], int]:
    path, share, calls = [], 1.0, 0
    for name in profile.routers:
        counts = Counter(tuple(row) for ids in profile.decisions(name) for row in ids.tolist())
        if not counts:
            continue
        choice, count = counts.most_common(1)[0]
        share *= count / counts.total()
        calls = max(calls, len(profile.decisions(name)))
        path.append((name, (choice,)))
    return Counter({tuple(path): round(share * calls)}), calls
