"""Adaptive re-optimisation: a module that runs a plan, watches its loads, re-plans in the background, swaps, reverts.

    windows of calls --noise gate--> drift --regret--> a new plan, built off the path --trial--> the fastest way

A *way* is a module and the plan that it runs: the present plan, a new one, or the general path, which has no plan.
Calls read one reference to the way in force; it is replaced in one step, so that each call runs one way from beginning
to end. The thread times nothing: the new plan follows from times that the old one holds (drift.adapted). What is kept
is measured on calls that are served: in a trial the ways take turns at them, and the fastest by the median stays, where
it beats the general path by more than the noise of these medians. The first calls are a trial, too: the times of a plan
are of branches alone, and what is gained by them can be lost around them. So a plan that does not pay is given up, and
one that has become slower than the general path is left for it, by its expected cost already: from the first window
with other loads on, and until it is clear what they are.
"""
from __future__ import annotations

import itertools
import math
import random
import statistics
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from anyshape.base.errors import AnyShapeError
from anyshape.route.optimize.drift import DriftPolicy, NoiseGate, cost, regret, together
from anyshape.route.profile.profile import Profile
from anyshape.route.profile.tally import Tally
from anyshape.route.profile.watch import Watch

WARM = 1  # calls of each way in a trial that are not timed
LONGEST_WAIT = 10.0  # seconds for a thread that is building when the interpreter ends
TICK = 0.02  # seconds between two looks
MOST_ROUNDS = 4  # times the rounds of the policy, for a trial in which noise hides what is faster
SURE = 2.0  # standard errors by which a plan must beat the general path
clock = time.perf_counter


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One way to run the model. plan: None for the general path."""

    name: str
    plan: Any
    module: nn.Module
    watch: Watch


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """Ways that take turns, in another order in each round, so that loads that come in turns, too, are shared; the
    present one first, and the loads they are tried for, and why. opening: of the first calls. times: seconds of calls,
    by way."""

    ways: tuple[Way, ...]
    loads: Profile
    why: str
    opening: bool = False
    turns: itertools.count[int] = field(default_factory=itertools.count)
    times: tuple[list[float], ...] = ()

    def call(self, arguments: tuple[Any, ...], keywords: dict[str, Any], settle: Callable[[], None]) -> Any:
        turn = next(self.turns)
        count = len(self.ways)
        number = random.Random(turn // count).sample(range(count), count)[turn % count]
        settle()
        began = clock()
        found = self.ways[number].module(*arguments, **keywords)
        settle()
        if turn >= WARM * len(self.ways):
            self.times[number].append(clock() - began)
        return found

    def fastest(self, margin: float, rounds: int) -> int | None:
        """The place of the way to keep; None where more rounds are needed to tell.

        The general path, unless a plan saves more than `margin` of it and more than noise; the present plan where no
        other saves `margin` of it.
        """
        done = min(map(len, self.times))
        if done < rounds:
            return None
        found = [median_and_error(list(times)) for times in self.times]
        general = next(place for place, way in enumerate(self.ways) if _is_general(way))
        plans = [place for place in range(len(found)) if place != general]
        if not plans:
            return general
        best = min(plans, key=lambda place: found[place][0])
        if 0 in plans and found[best][0] >= (1 - margin) * found[0][0]:
            best = 0
        saved, noise = found[general][0] - found[best][0], SURE * math.hypot(found[general][1], found[best][1])
        if noise > abs(saved) and done < MOST_ROUNDS * rounds:
            return None
        return best if saved > max(noise, margin * found[general][0]) else general


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to a watched plan, `seconds` after it was applied."""

    seconds: float
    what: str
    why: str


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    way: Way
    trial: Trial | None = None
    example_wanted: bool = False


class Watched(nn.Module):
    """A model by a plan, with the results of the model.

    model: as it was given; its parameters are those of all ways, and state_dict is its own. plan: the one in force.
    history: events so far. Other attributes are those of the module that runs now.
    """

    def __init__(self, model: nn.Module, plan: Any, policy: DriftPolicy) -> None:
        super().__init__()
        self.model, self.policy, self.began = model, policy, clock()
        self.history: tuple[Event, ...] = ()
        self.gate, self.window_began = NoiseGate(plan.profile, policy.quantile), self.began
        self.windows: list[Profile] = []
        self.example: Any = None
        self.last_plan = plan
        self.left: Way | None = None  # the plan that was in force until loads changed, while it is not clear how
        self.unproven = policy.opening and bool(plan.applied)
        self.look_lock, self.stopped = threading.Lock(), threading.Event()
        tensor = next(iter(model.parameters()), None)
        device = torch.device("cpu") if tensor is None else tensor.device
        self.settle: Callable[[], None] = _nothing if device.type == "cpu" else torch.accelerator.synchronize
        self.ways: list[Way] = []
        self.state = _State(self._way("plan", plan), example_wanted=self._opens())
        if policy.thread:
            thread = threading.Thread(target=_loop, args=(weakref.ref(self), self.stopped), name="anyshape-drift",
                                      daemon=True)
            weakref.finalize(self, _end, thread, self.stopped)  # when nobody has it any more, or the interpreter ends
            thread.start()

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        state: _State = self.state
        if state.example_wanted:
            self.example = (arguments, keywords, torch.is_grad_enabled())
        if state.trial is not None:
            return state.trial.call(arguments, keywords, self.settle)
        return state.way.module(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "state" not in self.__dict__:
                raise
            return getattr(self.present, name)

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        return self.model.state_dict(*arguments, **keywords)

    def load_state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        return self.model.load_state_dict(*arguments, **keywords)

    @property
    def plan(self) -> Any:
        return self.state.way.plan

    @property
    def path(self) -> str:
        """What runs now: the `plan`, or the `general` path."""
        return self.state.way.name

    @property
    def present(self) -> nn.Module:
        """The module that runs now."""
        return self.state.way.module

    def fallback(self) -> None:
        """Calls run on the general path from now, and nothing is watched."""
        self.close()
        with self.look_lock:
            self._adopt(self._general())
            self._note("the general path is in force", "fallback() was called")

    def close(self) -> None:
        """Nothing is watched from now; the way in force stays."""
        self.stopped.set()
        with self.look_lock:
            self.state = _State(self.state.way)
            for way in self.ways:
                way.watch.stop()

    def train(self, mode: bool = True) -> Watched:
        super().train(mode)
        for way in self.ways if hasattr(self, "ways") else ():
            way.module.train(mode)
        if hasattr(self, "ways"):
            with self.look_lock:
                self.state = replace(self.state, example_wanted=self.state.example_wanted or self._opens())
        return self

    # ---- ways

    def _way(self, name: str, plan: Any) -> Way:
        """Builds a way; raises what optimisations and the compiler raise."""
        module = self.last_plan.general(self.model) if plan is None else plan.specialized(self.model)
        module.train(self.model.training)
        way = Way(name, plan, module, Watch(module))
        way.watch.start(thread=False)
        self.ways.append(way)
        return way

    def _general(self) -> Way:
        return next((way for way in self.ways if _is_general(way)), None) or self._way("general", None)

    def _warm(self, way: Way) -> None:
        """Runs a way once, off the path, so that what it compiles is compiled; not in training, where calls have
        effects."""
        if self.example is not None and not self.model.training:
            arguments, keywords, gradients = self.example
            with torch.set_grad_enabled(gradients):
                way.module(*arguments, **keywords)

    def _adopt(self, chosen: Way) -> None:
        """One way is in force; other plans' are let go."""
        self.state = _State(chosen)
        self.last_plan = chosen.plan or self.last_plan
        for way in self.ways:
            if way is not chosen and not _is_general(way):
                way.watch.stop()
        self.ways = [way for way in self.ways if way is chosen or _is_general(way)]

    def _note(self, what: str, why: str) -> None:
        self.history = (*self.history, Event(clock() - self.began, what, why))

    # ---- what the thread does

    def look(self) -> None:
        """One look: counts loads; where a window is over, judges it; where a trial is over, keeps the fastest."""
        with self.look_lock:
            if self.stopped.is_set():
                return
            trial = self.state.trial
            if trial is not None:
                place = trial.fastest(self.policy.margin, self.policy.rounds)
                if place is not None:
                    self._conclude(trial, place)
                return
            if self.example is not None and self._opens():
                self._open()
                return
            for way in self.ways:
                way.watch.drain()
            if clock() - self.window_began < self.policy.seconds:
                return
            window = self._window()
            if max((one.calls for one in window.records.values()), default=0) >= self.policy.least_calls:
                self._judge(window)

    def _opens(self) -> bool:
        """Whether the first calls are still to be a trial; not in training, where calls have effects."""
        return self.unproven and not self.model.training

    def _open(self) -> None:
        """The plan that was applied is tried against the general path."""
        self.unproven = False
        present = self.state.way
        try:
            general = self._general()
            self._warm(general)
        except (AnyShapeError, RuntimeError) as error:
            self._note("the plan is in force untried", f"the general path cannot be built: {error}")
            self._run(present)
            return
        self.example = None
        self.state = _State(present, Trial((present, general), self.gate.profile, "the first calls", opening=True,
                                           times=([], [])))

    def _window(self) -> Profile:
        """What was counted since the last window that had enough calls."""
        watch = self.state.way.watch
        found = watch.taken()
        if max((one.calls for one in found.records.values()), default=0) >= self.policy.least_calls:
            self._begin_window()
        model = self.gate.profile.model  # routers that an optimisation took away were never called
        return Profile(model, {name: found.records.get(name) or Tally(branches).frozen() for name, branches in model})

    def _begin_window(self) -> None:
        for way in self.ways:
            way.watch.window()
        self.window_began = clock()

    def _judge(self, window: Profile) -> None:
        why = self.gate.passed(window)
        self.windows = [*self.windows, window][-self.policy.patience:] if why else []
        if len(self.windows) >= self.policy.patience:
            self._replan(together(self.windows[1:] or self.windows), why)  # loads changed within the first one
            return
        if not why:
            self.gate = self.gate.learned(window)
            if self.left is not None:
                self._note("the way before is in force", "loads are as expected again")
                self._run(self.left, example_wanted=self._opens())
                self.left = None
                return
        self._run(self.state.way, example_wanted=bool(why) or self._opens())
        if why and (self.last_plan.compile is None or any(map(_is_general, self.ways))):  # else it must be compiled
            self._leave(window, why)

    def _costlier(self, way: Way, loads: Profile) -> str:
        """What is expected of a plan that takes longer than the general path, in words; "" of others."""
        if _is_general(way):
            return ""
        own, other = cost(way.plan, loads), cost(way.plan.refused(), loads)
        return f"{other * 1e3:.3g} ms are expected for {own * 1e3:.3g}" if own > other else ""

    def _leave(self, loads: Profile, why: str) -> None:
        """The general path serves for now, where the plan in force is expected to be slower."""
        present, words = self.state.way, self._costlier(self.state.way, loads)
        if words:
            general = self._general()
            self._warm(general)
            self.left, self.state = present, _State(general, example_wanted=True)
            self._note("the general path is in force", f"{why}; until a plan is built; {words}")

    def _run(self, way: Way, example_wanted: bool = False) -> None:
        """A way serves calls from now."""
        self.state = _State(way, example_wanted=example_wanted)
        if not example_wanted:
            self.example = None

    def _replan(self, loads: Profile, why: str) -> None:
        """The best plan for the loads, where the present way loses against it, is built and tried."""
        present, self.left = self.left or self.state.way, None
        general, best = self.last_plan.refused(), self.last_plan.for_loads(loads)
        lost = regret(present.plan or general, best, loads)
        why = f"{why}; regret {lost:.1%}"
        if lost <= self.policy.regret and not self._costlier(present, loads):
            self._settle_for(present, loads, "loads have changed, the plan stays", why)
            return
        try:
            ways = self._built(present, best, loads, why)
        except (AnyShapeError, RuntimeError) as error:
            stays = self._general() if self._costlier(present, loads) else present
            self._settle_for(stays, loads, "no new plan", f"{why}; {error}")
            return
        self.windows, self.example, self.unproven = [], None, False
        self.state = _State(self.state.way, Trial(ways, loads, why, times=tuple([] for _ in ways)))

    def _built(self, present: Way, best: Any, loads: Profile, why: str) -> tuple[Way, ...]:
        """The ways to try, warm. Where the present one is expected to be slower than the general path, that one serves
        while the new plan is built."""
        ways = [present, self._general()]
        if present is ways[1]:
            del ways[1]
        elif self.state.way is present:
            self._leave(loads, why)
            self.left = None
        if len(ways) > 1:
            self._warm(ways[1])
        if best.applied:
            ways.append(self._way("plan", best))
            self._warm(ways[-1])
        return tuple(ways)

    def _settle_for(self, way: Way, loads: Profile, what: str, why: str) -> None:
        """This way is in force, and these loads are the ones to watch from now."""
        self._adopt(way)
        self.gate, self.windows, self.example = NoiseGate(loads, self.policy.quantile), [], None
        self._begin_window()
        self._note(what, why)

    def _conclude(self, trial: Trial, place: int) -> None:
        """The way that a trial has shown to be the fastest is in force."""
        chosen = trial.ways[place]
        if trial.opening and not _is_general(chosen):
            self._adopt(chosen)
            self._begin_window()
            return
        names = ["the general path" if _is_general(way) else "the new plan" if number else "the way before"
                 for number, way in enumerate(trial.ways)]
        measured = ", ".join(f"{name} {middle * 1e3:.3g} ms (error {error * 1e3:.2g})" for name, (middle, error)
                             in zip(names, (median_and_error(list(own)) for own in trial.times), strict=True))
        self._settle_for(chosen, trial.loads, f"{names[place]} is in force", f"{trial.why}; medians: {measured}")


def median_and_error(times: list[float]) -> tuple[float, float]:
    """The median of times, and its standard error, from the median absolute deviation; as of a normal distribution."""
    middle = statistics.median(times)
    spread = 1.4826 * statistics.median(abs(one - middle) for one in times)
    return middle, math.sqrt(math.pi / 2 / len(times)) * spread


def _is_general(way: Way) -> bool:
    return way.plan is None or not way.plan.applied


def _nothing() -> None:
    """The processor has settled when a call returns."""


def _loop(watched: weakref.ref[Watched], stopped: threading.Event) -> None:
    """The thread: it ends with `close`, or when nobody has the module any more. What it does not foresee ends the
    watch, and is reported by threading.excepthook and in the history."""
    while not stopped.wait(TICK):
        own = watched()
        if own is None:
            return
        looked = False
        try:
            own.look()
            looked = True
        finally:
            if not looked:
                own.close()
                own._note("nothing is watched any more", "the thread has met an error, which threading.excepthook told")
        del own


def _end(thread: threading.Thread, stopped: threading.Event) -> None:
    """The thread has ended: none is inside PyTorch while the interpreter ends."""
    stopped.set()
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(LONGEST_WAIT)
