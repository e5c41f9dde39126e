"""Replay of a profile: routers take recorded or synthetic routes, for tuning and for tests of every load."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anyshape.base.errors import InputError
from anyshape.route.core.routes import Routes
from anyshape.route.profile.profile import Profile, ProfileView
from anyshape.route.profile.routers import routers_of

Ids = NDArray[np.integer[Any]]


class _Buffers(nn.Module):
    """What a program reads of a replay: a module's buffers, which it takes as they are in each call."""

    stream: Tensor
    start: Tensor
    length: Tensor

    def __init__(self, calls: list[Ids], device: torch.device) -> None:
        super().__init__()
        whole: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self.register_buffer("stream", torch.tensor(np.concatenate(calls).astype(np.int64), **whole))
        self.register_buffer("start", torch.zeros(1, **whole))
        self.register_buffer("length", torch.full((1,), len(calls[0]), **whole))


class Forced:
    """The routes that one router takes: rows start:start + length of a stream of recorded ids, again from their
    beginning where there are more cells. A call changes nothing of it, so that one that runs again in a backward takes
    the same routes. A copy or a pickle of it is None: copies of a model choose themselves."""

    def __init__(self, name: str, calls: list[Ids], device: torch.device) -> None:
        self.name, self.sizes, self.choices = name, [len(ids) for ids in calls], calls[0].shape[1]
        self.buffers = _Buffers(calls, device)

    def __reduce__(self) -> Any:
        return type(None), ()

    def instead_of(self, routes: Routes) -> Routes:
        """Routes with the weights that the router function gave, in the order of its choices.

        Raises:
            InputError: it makes another number of choices.
        """
        cells, choices = routes.ids.shape
        if choices != self.choices:
            raise InputError(f"routes of {self.choices} choices cannot replace those of router {self.name!r}",
                             why=f"its router function makes {choices}", do="replay a profile of this model")
        own = self.buffers
        place = torch.arange(cells, device=own.stream.device) % own.length + own.start
        return Routes(own.stream.index_select(0, place), routes.weights, routes.logits)

    def select(self, number: int) -> None:
        call = number % len(self.sizes)
        self.buffers.start.fill_(sum(self.sizes[:call]))
        self.buffers.length.fill_(self.sizes[call])


class CallReplay:
    """Recorded calls, of which one is in force: the first, until another is selected. Iterating selects each.

    cells: how many cells each call had, by router.
    """

    def __init__(self, forced: dict[str, Forced]) -> None:
        self.forced = forced
        self.calls = max(len(one.sizes) for one in forced.values())
        self.cells = {name: tuple(one.sizes) for name, one in forced.items()}

    def select(self, number: int) -> None:
        """Routers that have fewer calls begin again."""
        for one in self.forced.values():
            one.select(number)

    def __iter__(self) -> Iterator[int]:
        for number in range(self.calls):
            self.select(number)
            yield number


@contextmanager
def replay(model: nn.Module, profile: ProfileView) -> Iterator[CallReplay]:
    """Routers take the decisions of a profile while the block runs, whatever their router functions say.

        with route.replay(model, profile) as calls:
            for number in calls:
                model(batch)

    Router functions run, and their weights are used. A router without sampled decisions takes routes that have its
    sampled loads; one that was never called chooses itself. A model may be compiled.

    Raises:
        InputError: a profile of another model, or one without any calls.
    """
    taken = profile.taken()
    taken.check(model)
    routers = routers_of(model)
    streams = _streams(taken)
    if not streams:
        raise InputError("the profile has no calls to replay", why="no router was called while it was recorded",
                         do="run the model inside of route.profile")
    forced = {}
    for name, calls in streams.items():
        tensor = next((one for owner in (routers[name], model) for one in owner.parameters()), torch.zeros(0))
        forced[name] = Forced(name, calls, tensor.device)
    before = {name: routers[name].forced for name in forced}
    try:
        for name, one in forced.items():
            routers[name].forced = one
        yield CallReplay(forced)
    finally:
        for name, old in before.items():
            routers[name].forced = old


def _streams(profile: Profile) -> dict[str, list[Ids]]:
    """Per router the ids of each call to replay: calls that all routers' samples have, where there are some."""
    decided = {name: dict(record.decided) for name, record in profile.records.items() if record.decided}
    shared = set.intersection(*map(set, decided.values())) if decided else set()
    found: dict[str, list[Ids]] = {}
    for name, record in profile.records.items():
        if name in decided:
            numbers = sorted(shared) or list(decided[name])
            found[name] = [ids for ids in (decided[name][number] for number in numbers) if len(ids)]
        else:
            found[name] = [ids_of_loads(loads, record.choices, number)
                           for number, loads in zip(record.numbers.tolist(), record.loads, strict=True) if loads.any()]
    return {name: calls for name, calls in found.items() if calls}


def ids_of_loads(loads: NDArray[np.integer[Any]], choices: int, seed: int) -> Ids:
    """ids [cells, choices] that have these loads [branches], in a random order of cells; a cell takes no branch twice
    as long as no load exceeds the number of cells. Missing choices are -1."""
    total = int(loads.sum())
    cells = -(-total // choices)
    flat = np.full(cells * choices, -1, np.int64)
    flat[:total] = np.repeat(np.arange(len(loads)), loads)
    ids = flat.reshape(choices, cells).T
    return np.random.default_rng(seed).permutation(ids)

