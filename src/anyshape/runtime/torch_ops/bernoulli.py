"""Random masks: the bools that `bernoulli_` draws from PyTorch's generator, which is left as it leaves it.

PyTorch draws them one after another. Here many come at a time (`HostRoutines.draw`), where a trial
shows that this PyTorch, on this processor, draws as the routine does.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from anyshape.backend.targets import host_routines

LEAST = 2048  # elements from which on it is quicker than to ask PyTorch
_TRIALS = ((1, 0.5), (999, 0.9), (LEAST, 1e-3), (3, 0.7), (313, 1 / 3))  # elements, probability
Routine = Callable[[int, int, int, int], None]


def bernoulli(shape: Sequence[int], probability: float) -> torch.Tensor:
    """bool[shape], dense, true with the probability (between 0 and 1), from the default generator."""
    result = torch.empty(shape, dtype=torch.bool)
    routine = _routine() if result.numel() >= LEAST else None
    if routine is None:
        return result.bernoulli_(probability)
    _draw(routine, result, probability, torch.default_generator)
    return result


def _draw(routine: Routine, result: torch.Tensor, probability: float, generator: torch.Generator) -> None:
    state = generator.get_state()
    routine(state.data_ptr(), result.data_ptr(), result.numel(), math.ceil(probability * 2.0 ** 53))
    generator.set_state(state)


@lru_cache(maxsize=1)
def _routine() -> Routine | None:
    """The routine, if it draws as PyTorch does."""
    host = host_routines()
    routine = host.draw
    ours, torchs = torch.Generator().manual_seed(17), torch.Generator().manual_seed(17)
    if ours.get_state().numel() != host.state_bytes:
        return None
    torch.empty(1, dtype=torch.int64).random_(generator=torchs)
    ours.set_state(torchs.get_state())
    for count, probability in _TRIALS:
        found = torch.empty(count, dtype=torch.bool)
        _draw(routine, found, probability, ours)
        if not torch.equal(found, torch.empty(count, dtype=torch.bool).bernoulli_(probability, generator=torchs)):
            return None
    following = [torch.rand(3, generator=each) for each in (ours, torchs)]
    return routine if torch.equal(*following) else None
