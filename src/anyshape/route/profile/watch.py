"""Watching a model's routers: recorders in its routers, and a daemon thread that counts what they write."""
from __future__ import annotations

import threading
import time
import weakref

import torch
from torch import nn

from anyshape.base.errors import InputError
from anyshape.route.profile.profile import SAMPLES, Profile, ProfileView, RouterProfile
from anyshape.route.profile.recorder import SLOTS, Recorder, Stride
from anyshape.route.profile.routers import routers_of, signature
from anyshape.route.profile.tally import DECISIONS, Tally

LONGEST_STRIDE = 1 << 20
LEAST_WAIT, MOST_WAIT = 0.01, 0.3  # seconds between two looks of the thread


class Watch(ProfileView):
    """Records a model's routers from `start` to `stop`; is a profile of what was counted so far.

    Args:
        model: compiled or not. budget: share of time that the thread may take; beyond it, the thread looks and samples
            half as often. samples, decisions: bounds of what is kept of a router (profile/tally.py).
    """

    def __init__(self, model: nn.Module, budget: float = 0.01, samples: int = SAMPLES,
                 decisions: int = DECISIONS) -> None:
        self.routers_by_name, self.budget, self.bounds = routers_of(model), budget, (samples, decisions)
        self.model, self.stride = signature(model), Stride()
        self.lock, self.stopped = threading.Lock(), threading.Event()
        self.overhead: tuple[float, float, float] | None = None
        self.share = 0.0  # of time that the thread took
        self.recorders = {name: Recorder(router.branch_count, _device(router, model), self.stride)
                          for name, router in self.routers_by_name.items()}
        self._clear()

    def _clear(self) -> None:
        self.tallies = {name: Tally(one.branches, *self.bounds) for name, one in self.recorders.items()}

    @property
    def records(self) -> dict[str, RouterProfile]:  # type: ignore[override]  # as it is when it is asked for
        with self.lock:
            self._drain(False)
            return {name: tally.frozen() for name, tally in self.tallies.items()}

    def start(self, thread: bool = True) -> None:
        """thread: counts by itself; without, `drain` must be called.

        Raises:
            InputError: a router is recorded already.
        """
        for name, router in self.routers_by_name.items():
            if router.recorder is not None:
                raise InputError(f"router {name!r} is recorded already", why="a router has one profile at a time",
                                 do="leave the other route.profile first, or profile another part of the model")
        for name, router in self.routers_by_name.items():
            router.recorder = self.recorders[name]
        if thread:
            threading.Thread(target=_loop, args=(weakref.ref(self), self.stopped), name="anyshape-profile",
                             daemon=True).start()

    def stop(self) -> None:
        """The routers are as before; what they wrote is counted."""
        self.stopped.set()
        for name, router in self.routers_by_name.items():
            if router.recorder is self.recorders[name]:
                router.recorder = None
        self.drain(final=True)

    def drain(self, final: bool = False) -> bool:
        """Counts what the routers have written; whether a ring was more than half full."""
        with self.lock:
            return self._drain(final)

    def _drain(self, final: bool) -> bool:
        ahead = {name: one.drain(self.tallies[name], final) for name, one in self.recorders.items()}
        if max(ahead.values(), default=0) > self.stride.calls * (SLOTS - 2) and not final:
            self.sample_half()
        for one in self.recorders.values():
            one.follow()
        return any(2 * ahead[name] > one.rows for name, one in self.recorders.items())

    def window(self) -> Profile:
        """What was counted since the last window, or since the start; counting begins anew."""
        with self.lock:
            self._drain(False)
            found = Profile(self.model, {name: tally.frozen() for name, tally in self.tallies.items()})
            self._clear()
        return found

    def sample_half(self) -> None:
        """Decisions of half as many calls are kept from now."""
        self.stride.calls = min(self.stride.calls * 2, LONGEST_STRIDE)


def _loop(watch: weakref.ref[Watch], stopped: threading.Event) -> None:
    """The thread: it ends with `stop`, or when nobody has the watch any more."""
    wait, began, spent = LEAST_WAIT, time.perf_counter(), time.thread_time()
    while not stopped.wait(wait):
        own = watch()
        if own is None:
            return
        full = own.drain()
        now, used = time.perf_counter(), time.thread_time()
        own.share = (used - spent) / max(now - began, 1e-9)
        began, spent = now, used
        if own.share > own.budget / 4:  # what it takes of a core, all threads of a parallel step wait for
            if wait >= MOST_WAIT:
                own.sample_half()
            wait = min(wait * 2, MOST_WAIT)
        elif full or own.share < own.budget / 16:
            wait = max(wait / 2, LEAST_WAIT)
        del own


def _device(router: nn.Module, model: nn.Module) -> torch.device:
    """Where a router runs: where its parameters are, else where the model's are."""
    for module in (router, model):
        for tensor in (*module.parameters(), *module.buffers()):
            return tensor.device
    return torch.device("cpu")
