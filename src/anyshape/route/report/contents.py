"""The report model of routers: loads, joint distributions, decisions, and what a running plan has done, as plain data.

    {"format": .., "routers": [{"name": .., "heat": [rows, branches], "percentiles": ..}], "joint": [..],
     "decisions": [..], "observed": [..], "events": [..], "overhead": ..}

Everything that is shown is here, of dicts, lists, numbers and texts; page.py and picture.py show it.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from anyshape.route.profile.profile import Profile

FORMAT = "anyshape-route-report-1"
ROWS = 48  # of a heat map: calls are averaged in their order
PERCENTS = (50, 90, 99, 100)
PAIRS = 24  # joint matrices, of neighbours in the order of the model
Json = dict[str, Any]


def collect(profile: Profile, decisions: Sequence[Any] = (), running: nn.Module | None = None) -> Json:
    """The data of a report.

    Args:
        decisions: of a plan. running: a module that a plan was applied to: what its parts have counted is shown, and
            what has happened to the plan.
    """
    names = profile.routers
    joint = [found for pair in pairwise(names) if (found := _joint(profile, *pair))]
    return {"format": FORMAT, "overhead": profile.overhead, "routers": [_router(profile, name) for name in names],
            "joint": joint[:PAIRS],
            "decisions": [plain(one) for one in decisions], "observed": observed(running),
            "events": [plain(one) for one in getattr(running, "history", ())]}


def _router(profile: Profile, name: str) -> Json:
    own = profile.of(name)
    rates = profile.rates(name)
    shown = rates[rates > 0]
    return {
        "name": name, "branches": own.branches, "choices": own.choices, "calls": own.calls, "lost": own.lost,
        "cells": [int(own.cells.min()), float(own.cells.mean()), int(own.cells.max())] if len(own.cells) else [0, 0, 0],
        "rates": [round(float(one), 6) for one in rates], "sampled": len(own.decided),
        "percents": list(PERCENTS), "percentiles": own.percentiles(PERCENTS).tolist() if own.calls else [],
        # 1 where all branches have the same, 0 where one has all
        "balance": float(-(shown * np.log(shown)).sum() / math.log(own.branches)) if own.branches > 1 else 1.0,
        "heat": _heat(own.loads), "largest": int(own.loads.max(initial=0))}


def _heat(loads: NDArray[np.int64]) -> list[list[float]]:
    """Loads [calls, branches] averaged over runs of calls: at most ROWS rows."""
    return [[round(float(one), 3) for one in part.mean(0)] for part in
            np.array_split(loads, min(ROWS, len(loads)))] if len(loads) else []


def _joint(profile: Profile, first: str, second: str) -> Json | None:
    counts = profile.joint(first, second)
    total = counts.sum()
    if not total:
        return None
    share = counts / total
    apart = np.outer(share.sum(1), share.sum(0))
    some = share > 0
    information = float((share[some] * np.log2(share[some] / apart[some])).sum())
    return {"first": first, "second": second, "counts": counts.astype(int).tolist(), "information": max(information, 0)}


def observed(running: nn.Module | None) -> list[Json]:
    """What the parts of a running module have counted: those that have a `summary()`; equal ones, which count
    together, once."""
    if running is None:
        return []
    found: list[Json] = []
    inner = getattr(running, "present", running)  # what a watched plan runs now
    for path, module in inner.named_modules():
        summary = getattr(module, "summary", None)
        if callable(summary):
            counted = {"what": type(module).__name__, "where": path, **plain(summary())}
            if not any({**one, "where": ""} == {**counted, "where": ""} for one in found):
                found.append(counted)
    return found


def plain(value: Any) -> Any:
    """A value as dicts, lists, numbers and texts."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return [plain(one) for one in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
