"""Adaptive re-optimisation: a module that runs a plan, watches its loads, re-plans in the background, swaps, reverts.

    windows of calls --noise gate--> drift --regret--> a new plan, built off the path --trial--> the fastest way

A *way* is a module and the plan that it runs: the present plan, a new one, or the general path, which has no plan.
Calls read one reference to the way in force; it is replaced in one step, so that each call runs one way from beginning
to end. The thread times nothing: the new plan follows from times that the old one holds (drift.adapted). What is kept
is measured on calls that are served: in a trial the ways take turns at them, and the fastest by the median stays. So a
new plan that is slower is given up, and a plan that has become slower than the general path is left for it; while a
plan is built, by its expected cost already.
"""
from __future__ import annotations

import itertools
import statistics
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from anyshape.base.errors import AnyShapeError
from anyshape.route.optimize.drift import DriftPolicy, Gate, cost, regret, together
from anyshape.route.profile.profile import Profile
from anyshape.route.profile.tally import Tally
from anyshape.route.profile.watch import Watch

WARM = 1  # calls of each way in a trial that are not timed
LONGEST_WAIT = 10.0  # seconds for a thread that is building when the interpreter ends
TICK = 0.02  # seconds between two looks
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
    """Ways that take turns, the present one first; the loads they are tried for, and why. times: seconds of calls, by
    way."""

    ways: tuple[Way, ...]
    loads: Profile
    why: str
    turns: itertools.count[int] = field(default_factory=itertools.count)
    times: tuple[list[float], ...] = ()

    def call(self, arguments: tuple[Any, ...], keywords: dict[str, Any], settle: Callable[[], None]) -> Any:
        turn = next(self.turns)
        number = turn % len(self.ways)
        settle()
        began = clock()
        found = self.ways[number].module(*arguments, **keywords)
        settle()
        if turn >= WARM * len(self.ways):
            self.times[number].append(clock() - began)
        return found


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
        self.gate, self.window_began = Gate(plan.profile, policy.quantile), self.began
        self.windows: list[Profile] = []
        self.example: Any = None
        self.last_plan = plan
        self.look_lock, self.stopped = threading.Lock(), threading.Event()
        tensor = next(iter(model.parameters()), None)
        device = torch.device("cpu") if tensor is None else tensor.device
        self.settle: Callable[[], None] = _nothing if device.type == "cpu" else torch.accelerator.synchronize
        self.ways: list[Way] = []
        self.state = _State(self._way("plan", plan))
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
                if min(map(len, trial.times)) >= self.policy.rounds:
                    self._conclude(trial)
                return
            for way in self.ways:
                way.watch.drain()
            if clock() - self.window_began < self.policy.seconds:
                return
            window = self._window()
            if max((one.calls for one in window.records.values()), default=0) >= self.policy.least_calls:
                self._judge(window)

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
        self._run(self.state.way, example_wanted=bool(why))

    def _run(self, way: Way, example_wanted: bool = False) -> None:
        """A way serves calls from now."""
        self.state = _State(way, example_wanted=example_wanted)
        if not example_wanted:
            self.example = None

    def _replan(self, loads: Profile, why: str) -> None:
        """The best plan for the loads, where the present way loses against it, is built and tried."""
        present = self.state.way
        general, best = self.last_plan.refused(), self.last_plan.for_loads(loads)
        lost = regret(present.plan or general, best, loads)
        why = f"{why}; regret {lost:.1%}"
        if lost <= self.policy.regret:
            self._settle_for(present, loads, "loads have changed, the plan stays", why)
            return
        try:
            ways = self._built(present, best, loads, why)
        except (AnyShapeError, RuntimeError) as error:
            self._settle_for(present, loads, "no new plan", f"{why}; {error}")
            return
        self.windows, self.example = [], None
        self.state = _State(self.state.way, Trial(ways, loads, why, times=tuple([] for _ in ways)))

    def _built(self, present: Way, best: Any, loads: Profile, why: str) -> tuple[Way, ...]:
        """The ways to try, warm. Where the present one is expected to be slower than the general path, that one serves
        while the new plan is built."""
        ways = [present, self._general()]
        if present is ways[1]:
            del ways[1]
        else:
            self._warm(ways[1])
            costs = [cost(one, loads) for one in (present.plan, best.refused())]
            if costs[0] > costs[1]:
                self.state = _State(ways[1])
                self._note("the general path is in force", f"{why}; a plan is built meanwhile; {costs[1] * 1e3:.3g} ms "
                                                           f"are expected for {costs[0] * 1e3:.3g}")
        if best.applied:
            ways.append(self._way("plan", best))
            self._warm(ways[-1])
        return tuple(ways)

    def _settle_for(self, way: Way, loads: Profile, what: str, why: str) -> None:
        """This way is in force, and these loads are the ones to watch from now."""
        self._adopt(way)
        self.gate, self.windows, self.example = Gate(loads, self.policy.quantile), [], None
        self._begin_window()
        self._note(what, why)

    def _conclude(self, trial: Trial) -> None:
        """The fastest way of the trial is in force; the one before it where that is nearly as fast."""
        medians = [statistics.median(list(times)) for times in trial.times]
        best = medians.index(min(medians))
        if medians[best] >= (1 - self.policy.margin) * medians[0]:
            best = 0
        names = ["the way before" if place == 0 else "the general path" if _is_general(way) else "the new plan"
                 for place, way in enumerate(trial.ways)]
        measured = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in zip(names, medians, strict=True))
        self._settle_for(trial.ways[best], trial.loads, f"{names[best]} is in force",
                         f"{trial.why}; medians: {measured}")


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
