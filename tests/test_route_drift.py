"""Drift: noise changes nothing, loads with regret bring a new plan that must be faster, results stay the same."""
from __future__ import annotations

import gc
import threading
import time
import weakref
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from anyshape import route
from anyshape.route.optimize import plan as plans
from anyshape.route.optimize import watched
from anyshape.route.optimize.drift import DriftPolicy, NoiseGate, divergence, regret
from anyshape.route.profile.tally import profile_of_loads

pytestmark = pytest.mark.usefixtures("quick_collections")

PIECE = 2e-5  # seconds that a cell of a padded branch takes
MANUAL = DriftPolicy(seconds=0, least_calls=8, rounds=4, thread=False)


class Clock:
    """Time that passes where work says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


CLOCK = Clock()


class Model(nn.Module):
    """Two branches of a patch network: which patches go where is said with the call."""

    def __init__(self) -> None:
        super().__init__()
        self.router = route.Router(lambda cells, ids: ids, [nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x, ids):
        return self.router(x, ids)


class Padded(nn.Module):
    """A branch that takes the time of its capacity, or twice that of its load beyond all capacities."""

    def __init__(self, branch, capacities, slower=1.0):
        super().__init__()
        self.branch, self.capacities, self.slower = branch, capacities, slower

    def forward(self, rows):
        CLOCK.now += seconds(len(rows), self.capacities) * self.slower
        return self.branch(rows)


def seconds(load, capacities):
    return PIECE * min([one for one in capacities if one >= load], default=2 * load)


@dataclass(frozen=True)
class Capacities:
    """Branches padded to the two loads that are most frequent; the general path takes twice a load's time."""

    NAME: str = "capacities"
    slower: float = 1.0

    def propose(self, context):
        return [self.adapt(None, context.profile)]

    def adapt(self, decision, profile):
        found, counts = np.unique(profile.loads("router"), return_counts=True)
        chosen = sorted(found[np.argsort(-counts)][:2].tolist())
        return route.Decision("router", self.NAME, True, f"capacities {chosen}", options={"capacities": chosen})

    def apply(self, model, decision, compile):
        capacities = decision.options["capacities"]
        slower = self.slower if 4 not in capacities else 1.0
        model.router.branches = nn.ModuleList([Padded(one.branch, capacities, slower) for one in model.router.branches])
        return model

    def cost(self, decision, profile):
        capacities = decision.options["capacities"] if decision.applied else ()
        loads = profile.loads("router")
        return float(np.mean([sum(seconds(one, capacities) for one in call) for call in loads]))


def general(model):
    model.router.branches = nn.ModuleList([Padded(one, ()) for one in model.router.branches])
    return model


def ids(*loads):
    return torch.repeat_interleave(torch.arange(len(loads)), torch.tensor(loads))


def make(monkeypatch, policy=MANUAL, slower=1.0):
    monkeypatch.setattr(plans, "PASSES", (Capacities(slower=slower),))
    monkeypatch.setattr(watched, "clock", CLOCK)
    torch.manual_seed(0)
    model = general(Model())
    profile = profile_of_loads(model, decisions={"router": [ids(4, 27).numpy(), ids(27, 4).numpy()] * 20})
    plan = route.optimize(model, profile)
    assert plan.decisions[0].options["capacities"] == [4, 27]
    return model, plan, plan.apply(model, policy)


@torch.no_grad()
def serve(model, fast, loads, calls, look=True):
    """Calls, each of which must have the results of the model; their seconds."""
    taken = []
    for number in range(calls):
        own = ids(*(loads if number % 2 else loads[::-1]))
        x = torch.randn(len(own), 4)
        began = CLOCK()
        found = fast(x, own)
        taken.append(CLOCK() - began)
        expected = torch.where((own == 0)[:, None], *(one.branch(x) for one in model.router.branches))
        torch.testing.assert_close(found, expected)
        if look:
            fast.look()
    return np.median(taken)


def test_drift_brings_a_new_plan(monkeypatch):
    model, _, fast = make(monkeypatch)
    serve(model, fast, (4, 27), 40)
    assert fast.history == ()
    before = serve(model, fast, (8, 8), 8)
    serve(model, fast, (8, 8), 60)
    assert [one.what for one in fast.history] == ["the general path is in force", "the new plan is in force"]
    assert "expected" in fast.history[0].why and "regret" in fast.history[1].why and "ms" in fast.history[1].why
    assert 8 in fast.plan.decisions[0].options["capacities"] and fast.path == "plan"
    assert before >= serve(model, fast, (8, 8), 20) * 2
    count = len(fast.history)
    serve(model, fast, (8, 8), 40)
    assert len(fast.history) == count  # the new loads are what is expected now


def test_a_new_plan_that_is_slower_is_given_up(monkeypatch):
    model, plan, fast = make(monkeypatch, slower=8.0)
    serve(model, fast, (8, 8), 100)
    assert [one.what for one in fast.history][:2] == ["the general path is in force"] * 2
    assert fast.path == "general"
    serve(model, fast, (4, 27), 100)  # and the old loads bring the old plan back
    assert fast.path == "plan" and fast.plan.decisions == plan.decisions


def test_drift_is_met_by_a_thread_within_a_second_of_calls(monkeypatch):
    model, _, fast = make(monkeypatch, DriftPolicy())
    serve(model, fast, (4, 27), 40, look=False)
    began, deadline = CLOCK(), time.time() + 20
    while fast.plan is None or 8 not in fast.plan.decisions[0].options["capacities"]:
        assert time.time() < deadline, fast.history
        assert serve(model, fast, (8, 8), 1, look=False) < seconds(27, (27,)) * 2.001  # as before, or better
        time.sleep(0.001)
    fast.close()
    assert fast.path == "plan" and CLOCK() - began < 1
    best = serve(model, fast, (8, 8), 20, look=False)
    assert best == pytest.approx(seconds(8, (8,)) * 2)


def test_a_plan_that_does_not_beat_the_general_path_is_given_up_in_the_first_calls(monkeypatch):
    """Its expected cost says that it does: the calls decide."""
    model, plan, _ = make(monkeypatch)
    monkeypatch.setattr(Capacities, "apply", lambda self, own, decision, compile: slow(own))
    fast = plan.apply(model, MANUAL)
    serve(model, fast, (4, 27), 4)
    assert not fast.state.example_wanted and fast.history == ()  # in training nothing is tried
    fast.eval()
    serve(model, fast, (4, 27), 40)
    assert fast.path == "general" and [one.what for one in fast.history] == ["the general path is in force"]
    assert "the first calls; medians" in fast.history[0].why
    kept = plan.apply(model, replace(MANUAL, opening=False))
    serve(model, kept, (4, 27), 40)
    assert kept.path == "plan" and kept.history == ()


def slow(model):
    model.router.branches = nn.ModuleList([Padded(one.branch, (), 1.01) for one in model.router.branches])
    return model


def test_a_trial_keeps_a_plan_only_for_more_than_noise():
    def trial(plan, general):
        ways = (watched.Way("plan", SimpleNamespace(applied=(1,)), None, None),
                watched.Way("general", None, None, None))
        return watched.Trial(ways, None, "", times=(plan, general)).fastest(0.02, 8)

    noise = [0.1, -0.1, 0.2, -0.2, 0.05, -0.05, 0.15, -0.15]
    steady, loud = [1.0] * 8, [1 + one for one in noise]
    assert trial([0.9] * 8, steady) == 0 and trial([0.99] * 8, steady) == 1 and trial([1.1] * 8, steady) == 1
    assert trial([0.9] * 7, steady) is None  # too few
    assert trial([one - 0.05 for one in loud], loud) is None  # not to be told, so that it goes on
    assert trial(loud * 4, loud * 4) == 1
    assert trial([one - 0.5 for one in loud], loud) == 0


def test_turns_are_shared_whatever_the_period_of_the_loads():
    calls = []
    ways = tuple(watched.Way(name, None, lambda number, name=name: calls.append((name, number % 2)), None)
                 for name in ("one", "other"))
    trial = watched.Trial(ways, None, "", times=([], []))
    for number in range(64):
        trial.call((number,), {}, lambda: None)
    assert len(trial.times[0]) == len(trial.times[1]) == 31
    assert all(8 <= calls.count((name, odd)) <= 24 for name in ("one", "other") for odd in (0, 1))


def test_the_general_path_serves_from_the_first_window_in_which_it_is_expected_to_be_faster(monkeypatch):
    model, plan, fast = make(monkeypatch, replace(MANUAL, patience=3))
    serve(model, fast, (4, 27), 40)
    serve(model, fast, (8, 8), 10)
    assert fast.path == "general" and len(fast.history) == 1
    serve(model, fast, (4, 27), 20)  # it was noise
    assert fast.plan is plan and fast.history[-1].why == "loads are as expected again"


def test_a_plan_that_cannot_be_built_is_reported_and_calls_go_on(monkeypatch):
    _, _, fast = make(monkeypatch)
    present = fast.present

    def refuse(*_):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(Capacities, "apply", refuse)
    model = fast.model
    serve(model, fast, (4, 27), 20)
    serve(model, fast, (8, 8), 60)
    assert fast.history[-1].what == "no new plan" and "no such thing" in fast.history[-1].why
    assert fast.path == "general" and fast.present is not present  # which is expected to be faster than the plan
    assert fast.example is None and len(fast.ways) <= 2


def test_an_error_in_the_thread_is_told_and_ends_the_watch(monkeypatch):
    _, _, fast = make(monkeypatch, DriftPolicy())
    told = []
    monkeypatch.setattr(threading, "excepthook", told.append)

    def refuse(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(NoiseGate, "passed", refuse)
    deadline = time.time() + 10
    while not fast.history and time.time() < deadline:
        serve(fast.model, fast, (8, 8), 1, look=False)
        CLOCK.now += 0.01
        time.sleep(0.001)
    assert [one.what for one in fast.history] == ["nothing is watched any more"]
    while not told and time.time() < deadline:
        time.sleep(0.01)
    assert told[0].exc_type is ZeroDivisionError and fast.stopped.is_set()
    serve(fast.model, fast, (8, 8), 4)


def test_what_others_decided_stays_when_loads_change(monkeypatch):
    model, plan, _ = make(monkeypatch)
    other = route.Decision("router", "sink", True, "another has the router")
    refused = replace(plan.decisions[0], applied=False)
    present = profile_of_loads(model, {"router": [[8, 8]]})
    assert replace(plan, decisions=(refused, other)).for_loads(present).decisions == (refused, other)
    new, same = replace(plan, decisions=(plan.decisions[0], other)).for_loads(present).decisions
    assert same is other and new.options["capacities"] == [8]


def test_a_gate_of_few_calls_learns_from_windows_that_are_noise():
    model = Model()
    few = profile_of_loads(model, {"router": [[4, 27], [27, 4]] * 4})
    gate = NoiseGate(few, 0.999)
    window = profile_of_loads(model, {"router": [[4, 27], [27, 4]] * 8})
    for _ in range(100):
        gate = gate.learned(window)
    assert 512 <= gate.profile.of("router").calls < 512 + 16
    assert not gate.passed(profile_of_loads(model, {"router": [[4, 27]] + [[27, 4], [4, 27]] * 4}))  # an odd number


def test_fallback_is_the_general_path(monkeypatch):
    model, _, fast = make(monkeypatch)
    fast.fallback()
    assert fast.path == "general" and fast.plan is None
    serve(model, fast, (8, 8), 40)
    assert fast.path == "general" and fast.history[-1].why == "fallback() was called"


def test_noise_changes_nothing(monkeypatch):
    model, _, fast = make(monkeypatch)
    random = np.random.default_rng(0)
    noisy = [ids(*(random.permutation([4, 27]) + random.integers(0, 3, 2))).numpy() for _ in range(200)]
    fast = replace(fast.plan, profile=profile_of_loads(model, decisions={"router": noisy})).apply(model, MANUAL)
    for _ in range(100):
        serve(model, fast, tuple((random.permutation([4, 27]) + random.integers(0, 3, 2)).tolist()), 1)
    assert fast.history == ()


def test_loads_that_change_without_regret_change_nothing(monkeypatch):
    model, plan, fast = make(monkeypatch)
    serve(model, fast, (27, 27), 60)
    assert {one.what for one in fast.history} == {"loads have changed, the plan stays"}
    assert fast.plan is plan


def test_the_gate_is_calibrated_on_the_profile():
    model = Model()
    random = np.random.default_rng(1)

    def drawn(calls, rate):
        first = random.binomial(32, rate, calls)
        return profile_of_loads(model, {"router": np.stack([first, 32 - first], 1)})

    gate = NoiseGate(drawn(1000, 0.3), 0.999)
    alarms = [bool(gate.passed(drawn(32, 0.3))) for _ in range(300)]
    assert sum(alarms) <= 6
    assert all(gate.passed(drawn(32, 0.4)) for _ in range(20))
    assert gate.limits("router", 16).divergence > gate.limits("router", 256).divergence


def test_divergence_is_that_of_jensen_and_shannon():
    assert divergence(np.array([1.0, 0]), np.array([0, 1.0])) == 1
    assert divergence(np.array([0.25, 0.75]), np.array([0.25, 0.75])) == 0
    one, other = np.array([0.5, 0.5, 0]), np.array([0.25, 0.25, 0.5])
    middle = (one + other) / 2
    expected = sum(0.5 * (p[p > 0] * np.log2(p[p > 0] / middle[p > 0])).sum() for p in (one, other))
    assert divergence(one, other) == pytest.approx(expected)


def test_regret_is_the_cost_over_that_of_the_best_plan(monkeypatch):
    model, plan, _ = make(monkeypatch)
    present = profile_of_loads(model, {"router": [[8, 8]]})
    best = plan.for_loads(present)
    assert regret(plan, best, present) == pytest.approx(27 / 8 - 1)
    assert regret(plan.refused(), best, present) == pytest.approx(2 - 1)
    assert regret(best, best, present) == 0


def test_training_runs_every_way_in_its_mode(monkeypatch):
    _, _, fast = make(monkeypatch)
    fast.eval()
    assert not any(module.training for way in fast.ways for module in way.module.modules())
    fast.train()
    assert all(module.training for way in fast.ways for module in way.module.modules())


def test_a_watched_plan_is_its_model_to_others(monkeypatch):
    model, _, fast = make(monkeypatch)
    assert list(fast.state_dict()) == list(model.state_dict())
    assert fast.router is fast.present.router and isinstance(fast.router.branches[0], Padded)
    changed = {name: value + 1 for name, value in model.state_dict().items()}
    fast.load_state_dict(changed)
    serve(model, fast, (4, 27), 2)
    with pytest.raises(AttributeError):
        _ = fast.nothing


def test_a_watched_plan_that_nobody_has_ends(monkeypatch):
    _, _, fast = make(monkeypatch, DriftPolicy())
    gone = weakref.ref(fast)
    del fast
    deadline = time.time() + 5
    while (gone() is not None or any(one.name == "anyshape-drift" for one in threading.enumerate())) \
            and time.time() < deadline:
        gc.collect()
        time.sleep(0.02)
    assert gone() is None and not any(one.name == "anyshape-drift" for one in threading.enumerate())
