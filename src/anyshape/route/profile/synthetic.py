"""Synthetic profiles: routes drawn from uniform, Zipf, one-hot, Dirichlet or Markov distributions, or of set loads."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from anyshape.base.errors import InputError
from anyshape.route.profile.profile import Profile
from anyshape.route.profile.replay import Ids, ids_of_loads
from anyshape.route.profile.routers import routers_of
from anyshape.route.profile.tally import profile_of_loads

KINDS = ("uniform", "zipf", "one_hot", "dirichlet", "markov", "loads")
Random = np.random.Generator
Floats = NDArray[np.float64]


def synthetic(model: nn.Module, kind: str, *, calls: int = 8, cells: int = 64, choices: int | None = None,
              seed: int = 0, s: float = 1.0, alpha: float = 1.0, affinity: float = 0.8,
              loads: Mapping[str, Any] | None = None) -> Profile:
    """A profile of calls whose routes are drawn at random; the same seed draws the same.

    Args:
        kind: how probable branches are. "uniform"; "zipf": the n-th branch 1 / n ** s; "one_hot": the first branch of
            every router; "dirichlet": drawn for each call from a Dirichlet distribution of `alpha`; "markov": with
            probability `affinity` a cell takes the branch that belongs to the one it took in the router before, else
            as "zipf" (correlated routers); "loads": each call of a router has exactly `loads[name]` [branches].
        cells: of each call of each router. choices: of each cell, all different; left out, what the router function
            says (`k`), or 1.

    Raises:
        InputError: a kind or a router that there is not, or more choices than branches.
    """
    if kind not in KINDS:
        raise InputError(f"the distribution {kind!r} is unknown", why=f"there are {', '.join(KINDS)}", do="choose one")
    random = np.random.default_rng(seed)
    found: dict[str, list[Ids]] = {}
    before: list[Ids] = []
    for name, router in routers_of(model).items():
        own = choices if choices is not None else int(getattr(router.router_fn, "k", 1))
        branches = router.branch_count
        if own > branches:
            raise InputError(f"router {name!r} cannot make {own} choices of a cell", why=f"it has {branches} branches",
                             do="ask for fewer choices")
        if kind == "loads":
            if name in (loads or {}):
                found[name] = [ids_of_loads(np.asarray((loads or {})[name]), own, seed + call) for call in range(calls)]
            continue
        rates = _rates(kind, branches, s)
        ids = []
        for call in range(calls):
            chances = np.broadcast_to(random.dirichlet(np.full(branches, alpha)) if kind == "dirichlet" else rates,
                                      (cells, branches))
            if kind == "markov" and before:
                partner = random_partner(branches, seed + len(found))[before[call][:, 0] % branches]
                chances = (1 - affinity) * chances + affinity * np.eye(branches)[partner]
            ids.append(_draw(random, chances, own))
        found[name] = before = ids
    return profile_of_loads(model, decisions=found)


def random_partner(branches: int, seed: int) -> NDArray[np.int64]:
    """A permutation of branches."""
    return np.random.default_rng(seed).permutation(branches)


def _rates(kind: str, branches: int, s: float) -> Floats:
    if kind == "one_hot":
        return np.eye(branches)[0]
    exponent = s if kind in ("zipf", "markov") else 0.0
    found = 1 / np.arange(1, branches + 1) ** exponent
    return found / found.sum()


def _draw(random: Random, chances: Floats, choices: int) -> Ids:
    """ids [cells, choices] without a branch twice in a cell, by chances [cells, branches] (the Gumbel top-k trick)."""
    scores = np.log(np.maximum(chances, 1e-30)) + random.gumbel(size=chances.shape)
    return np.argsort(-scores, axis=1, kind="stable")[:, :choices]
