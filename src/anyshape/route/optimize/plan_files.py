"""Files of plans: the profile's file with the decisions in JSON beside it; reading a stranger's file runs no code."""
from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from anyshape.base.errors import InputError
from anyshape.route.optimize.decision import Compile, Decision
from anyshape.route.optimize.plan import PASSES, Plan
from anyshape.route.profile.files import read_profile, save_profile

FORMAT = "anyshape-route-plan-1"


def save_plan(plan: Plan, path: str | Path) -> None:
    """Writes a plan; what it compiles with and example inputs are not in the file.

    Raises:
        OutputError: the disk does not take it.
    """
    decisions = [{**dataclasses.asdict(one), "options": dict(one.options)} for one in plan.decisions]
    save_profile(plan.profile, path, {"format": FORMAT, "decisions": decisions, "memory_limit": plan.memory_limit,
                                      "passes": [one.NAME for one in plan.passes]})


def load_plan(path: str | Path, compile: Compile | None = None, example: tuple[Any, ...] | None = None) -> Plan:
    """Reads what save_plan wrote. compile, example: as for optimize.

    Raises:
        InputError: the file is not there or is no whole plan, or names an optimisation that this version does not have.
    """
    profile, head = read_profile(path)
    known = {one.NAME: one for one in PASSES}
    try:
        if not head or head["format"] != FORMAT:
            raise ValueError(f"its format is {head['format']!r:.40}" if head else "it is a profile without decisions")
        names, decisions = list(head["passes"]), [_decision(one) for one in head["decisions"]]
        limit = int(head["memory_limit"])
        unknown = [name for name in (*names, *(one.optimisation for one in decisions)) if name not in known]
        if unknown:
            raise ValueError(f"it has the optimisation {unknown[0]!r:.40}, and there are {', '.join(known)}")
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{Path(path).name} is no plan", why=f"{error}", do="give a file that route.save_plan wrote") \
            from error
    return Plan(profile, tuple(decisions), limit, compile, tuple(known[name] for name in names), example)


def _decision(one: dict[str, Any]) -> Decision:
    """Raises TypeError or ValueError where it is none."""
    found = Decision(**one)
    kinds = {"router": str, "optimisation": str, "applied": bool, "why": str, "gain": (float, int, type(None)),
             "guard": str, "options": dict}
    for name, kind in kinds.items():
        if not isinstance(getattr(found, name), kind):  # type: ignore[arg-type]
            raise ValueError(f"{name} of a decision is {getattr(found, name)!r:.40}")
    return found
