"""Profiles of routers: what is recorded is what was decided, in eager and compiled, and nothing is left behind."""
from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import anyshape
from anyshape import route
from anyshape.route.profile import histogram, recorder
from anyshape.route.profile.tally import Tally, profile_of_loads
from anyshape.route.profile.watch import Watch

pytestmark = pytest.mark.usefixtures("quick_collections")

WIDTH = 8


class Model(nn.Module):
    """Two routers in a row; the second has one choice."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = route.Router(route.top_k(nn.Linear(WIDTH, 5), 2), route.Experts(5, WIDTH, 8))
        self.second = route.Router(route.top_k(nn.Linear(WIDTH, 3), 1), route.Experts(3, WIDTH, 8))
        self.recompute = recompute

    def forward(self, x):
        x = x + (checkpoint(self.first, x, use_reentrant=False) if self.recompute else self.first(x))
        return self.second(x)

    def decided(self, x):
        first = self.first.router_fn(x).ids
        return first, self.second.router_fn(x + self.first(x)).ids


def counts(ids, branches):
    return np.bincount(ids.reshape(-1).numpy(), minlength=branches)


def traces(fast):
    return len(fast._anyshape.compilation.captures)


@pytest.fixture(scope="module", params=["eager", "compiled"])
def runs(request):
    model = Model()
    return model, model if request.param == "eager" else anyshape.compile(model)


@torch.no_grad()
def test_loads_and_decisions_are_those_of_the_calls(runs):
    model, run = runs
    batches = [torch.randn(4 + 3 * n, WIDTH) for n in range(6)] + [torch.zeros(0, WIDTH), torch.randn(1, WIDTH)]
    with route.profile(run, budget=100) as seen:
        for x in batches:
            run(x)
            seen.drain()  # as the thread does: every call's decisions are kept
    profile = seen.taken()
    assert profile.routers == ("first", "second")
    expected = [model.decided(x) for x in batches]
    for name, place, branches in (("first", 0, 5), ("second", 1, 3)):
        loads = np.stack([counts(ids[place], branches) for ids in expected])
        assert np.array_equal(profile.loads(name), loads)
        assert profile.cells(name).tolist() == [len(x) for x in batches]
        assert profile.of(name).calls == len(batches) and profile.of(name).lost == 0
        assert np.array_equal(profile.of(name).totals, loads.sum(0))
        assert profile.rates(name).sum() == pytest.approx(1)
        assert np.array_equal(profile.percentiles(name, (100,))[0], loads.max(0))
    known = {tuple(map(tuple, ids[0].tolist())) for ids in expected}
    sampled = profile.decisions("first")
    assert len(sampled) == len(batches) and all(tuple(map(tuple, ids.tolist())) in known for ids in sampled)
    both = np.zeros((5, 3))
    numbers = {number for number, _ in profile.of("first").decided} & {n for n, _ in profile.of("second").decided}
    for number in numbers:
        first, second = expected[number % recorder.COMPILED]
        for i, j in zip(first.tolist(), second.tolist(), strict=True):
            for own in i:
                both[own, j[0]] += 1
    assert both.sum() > 0 and np.array_equal(profile.joint("first", "second"), both)


@torch.no_grad()
def test_results_are_as_without(runs):
    _, run = runs
    x = torch.randn(9, WIDTH)
    before = run(x)
    with route.profile(run):
        assert torch.equal(run(x), before)
    assert torch.equal(run(x), before)


@torch.no_grad()
def test_nothing_is_left_behind():
    model = Model()
    fast = anyshape.compile(model)
    keys, x = list(model.state_dict()), torch.randn(9, WIDTH)
    fast(x)
    once = traces(fast)
    for _ in range(3):  # a second profile takes the program of the first
        with route.profile(fast) as seen:
            fast(x)
            assert list(model.state_dict()) == keys
        fast(x)
    assert traces(fast) == once + 1
    assert model.first.recorder is None and model.second.recorder is None
    gone = weakref.ref(seen)
    del seen
    for _ in range(50):
        gc.collect()
        if not [one for one in threading.enumerate() if one.name == "anyshape-profile"]:
            break
        time.sleep(0.02)
    assert gone() is None and not [one for one in threading.enumerate() if one.name == "anyshape-profile"]


def test_a_watch_that_nobody_has_ends():
    model = Model()
    watch = Watch(model)
    watch.start()
    stopped = watch.stopped
    for router in (model.first, model.second):
        router.recorder = None
    gone = weakref.ref(watch)
    del watch
    deadline = time.time() + 5
    while gone() is not None and time.time() < deadline:
        gc.collect()
        time.sleep(0.02)
    assert gone() is None and not stopped.is_set()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_is_computed_again_counts_once(compiled):
    model = Model(recompute=True)
    run = anyshape.compile(model) if compiled else model
    x = torch.randn(7, WIDTH, requires_grad=True)
    plain = torch.autograd.grad(model(x).sum(), x)[0]
    with route.profile(run) as seen:
        for _ in range(3):
            again = torch.autograd.grad(run(x).sum(), x)[0]
    torch.testing.assert_close(again, plain)
    assert seen.of("first").calls == seen.of("second").calls == 3
    assert seen.of("first").totals.sum() == 3 * 7 * 2


def test_routers_that_are_called_differently_often_have_no_joint_distribution():
    model = Model()
    with torch.no_grad(), route.profile(model) as seen:
        for _ in range(5):
            model(torch.randn(4, WIDTH))
        for _ in range(5):
            model.first(torch.randn(4, WIDTH))
    assert seen.joint("first", "first").sum() > 0 and seen.joint("first", "second").sum() == 0


@torch.no_grad()
def test_threads_that_call_one_eager_model_lose_nothing():
    model, x = Model(), torch.randn(3, WIDTH)

    def work():
        with torch.no_grad():
            for _ in range(50):
                model(x)

    with route.profile(model) as seen:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert seen.of("first").calls == 150 and seen.of("first").lost == 0


@torch.no_grad()
def test_overflow_is_lost_and_counted(runs, monkeypatch):
    model, run = runs
    most = 16 if run is model else 1024
    monkeypatch.setattr(recorder, "PENDING", 16)
    watch = Watch(run)
    watch.start(thread=False)
    for _ in range(most + 24):
        run(torch.randn(3, WIDTH))
    watch.stop()
    own = watch.of("first")
    assert watch.recorders["first"].rows == 1024
    assert own.calls == most and own.lost == 24 and own.totals.sum() == most * 6


def test_a_router_is_recorded_once_at_a_time():
    model = Model()
    with route.profile(model), pytest.raises(anyshape.AnyShapeError, match="recorded already") as error, \
            route.profile(model):
        pass
    assert error.value.why and error.value.do and model.first.recorder is None


@pytest.mark.parametrize("model", [nn.Linear(2, 2), 3], ids=["no router", "no model"])
def test_a_profile_without_routers_is_refused(model):
    with pytest.raises(anyshape.AnyShapeError) as error, route.profile(model):
        pass
    assert error.value.why and error.value.do


def test_the_histogram_is_exact_below_16_and_an_eighth_above():
    numbers = np.concatenate([np.arange(5000), 2 ** np.arange(13, 31), 2 ** np.arange(13, 31) - 1])
    top = histogram.largest_of(histogram.bucket(numbers))
    assert (top >= numbers).all() and (top[:16] == numbers[:16]).all()
    assert ((top - numbers) * 8 <= np.maximum(numbers, 1)).all()
    assert (np.diff(histogram.bucket(np.arange(5000))) >= 0).all()


def test_percentiles_beyond_the_sample_are_those_of_all_calls():
    random = np.random.default_rng(0)
    loads = random.integers(0, 300, (5000, 2))
    tally = Tally(2, samples=64)
    tally.count(range(5000), loads.sum(1).tolist(), loads)
    own = tally.frozen()
    exact = np.percentile(loads, (50, 90, 100), axis=0, method="inverted_cdf")
    found = own.percentiles((50, 90, 100))
    assert len(own.loads) == 64 and (found >= exact).all() and (found <= exact * 9 / 8 + 1).all()


def test_decisions_are_bounded():
    tally = Tally(2, decisions=100)
    for number in range(50):
        tally.decide(number, np.zeros((10, 1), np.int64))
    assert [number for number, _ in tally.decided] == list(range(40, 50))


# ---- files


def made(calls=6, seed=0):
    return route.synthetic(Model(), "zipf", calls=calls, cells=7, seed=seed)


def same(one, other):
    assert one.model == other.model and one.overhead == other.overhead
    for name in one.routers:
        mine, theirs = one.of(name), other.of(name)
        for word in ("branches", "choices", "calls", "lost"):
            assert getattr(mine, word) == getattr(theirs, word)
        for word in ("totals", "histogram", "loads", "cells", "numbers"):
            assert np.array_equal(getattr(mine, word), getattr(theirs, word))
        assert [n for n, _ in mine.decided] == [n for n, _ in theirs.decided]
        assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(mine.decided, theirs.decided, strict=True))


def test_a_saved_profile_is_read_back(tmp_path):
    route.save_profile(made(), tmp_path / "a.profile")
    same(route.load_profile(tmp_path / "a.profile"), made())


def test_files_that_are_no_profiles(tmp_path):
    class Code:
        def __reduce__(self):
            return (tmp_path.joinpath("ran").write_text, ("",))

    whole = tmp_path / "whole"
    route.save_profile(made(), whole)
    content = dict(np.load(whole))
    bad = {"cut": {**content, "0.loads": content["0.loads"][:, :2]}, "few": {**content, "0.ids": content["0.ids"][:-1]},
           "far": {**content, "0.ids": content["0.ids"] + 4}, "head": {**content, "head": content["head"][:-3]},
           "code": {**content, "0.ids": np.array([Code()], dtype=object)}, "none": {}}
    for name, arrays in bad.items():
        with open(tmp_path / name, "wb") as file:
            np.savez(file, **arrays)
    (tmp_path / "text").write_text("no profile")
    for name in [*bad, "text", "nowhere"]:
        with pytest.raises(anyshape.AnyShapeError, match="is no profile") as error:
            route.load_profile(tmp_path / name)
        assert error.value.why and error.value.do
    assert not (tmp_path / "ran").exists()
    with pytest.raises(anyshape.AnyShapeError, match="could not be written"):
        route.save_profile(made(), tmp_path / "no" / "where")


def test_merged_profiles_have_the_calls_of_all():
    one, other = made(6), made(4, seed=1)
    both = one.merge(other)
    for name in both.routers:
        assert both.of(name).calls == 10 and len(both.decisions(name)) == 10
        assert np.array_equal(both.loads(name), np.concatenate([one.loads(name), other.loads(name)]))
        assert np.array_equal(both.of(name).totals, one.of(name).totals + other.of(name).totals)
    assert both.joint("first", "second").sum() == 10 * 7 * 2
    with pytest.raises(anyshape.AnyShapeError, match="do not merge"):
        one.merge(profile_of_loads(nn.Sequential()))


# ---- replay


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_replay_forces_the_routes(compiled):
    model = Model()
    run = anyshape.compile(model) if compiled else model
    wanted, x = made(), torch.randn(7, WIDTH)
    with torch.no_grad(), route.profile(run) as seen, route.replay(run, wanted) as calls:
        for _ in calls:
            run(x)
    assert calls.calls == 6 and model.first.forced is None
    for name in wanted.routers:
        assert np.array_equal(seen.loads(name), wanted.loads(name))
    if not compiled:
        plain = model(x)
        with route.replay(run, wanted):
            assert not torch.allclose(run(x), plain)
        assert torch.equal(run(x), plain)


def test_a_replay_keeps_weights_and_gradients():
    model, x = Model(), torch.randn(7, WIDTH, requires_grad=True)
    wanted = made(1)
    with route.replay(model, wanted):
        found = model.first(x)
        grads = torch.autograd.grad(found.sum(), [x, model.first.router_fn.gate.weight])
    routes = model.first.router_fn(x)
    given = route.Routes(torch.tensor(wanted.decisions("first")[0].astype(np.int64)), routes.weights)
    expected = model.first(x, routes=given)
    assert torch.equal(found, expected)
    for mine, theirs in zip(grads, torch.autograd.grad(expected.sum(), [x, model.first.router_fn.gate.weight]),
                            strict=True):
        torch.testing.assert_close(mine, theirs)


def test_loads_alone_are_replayed():
    model = Model()
    loads = np.array([[3, 1, 2, 0, 2], [0, 4, 4, 0, 0]])
    profile = route.synthetic(model, "loads", loads={"first": loads[0]}, calls=2, cells=4)
    assert np.array_equal(profile.loads("first"), loads[[0, 0]])
    with route.profile(model) as seen, route.replay(model, profile_of_loads(model, {"second": [[4, 0, 1]]})):
        model(torch.randn(5, WIDTH))
    assert seen.loads("second").tolist() == [[4, 0, 1]]


@pytest.mark.parametrize("kind", ["uniform", "zipf", "one_hot", "dirichlet", "markov"])
def test_synthetic_routes(kind):
    model = Model()
    profile = route.synthetic(model, kind, calls=20, cells=50, seed=3)
    for name, choices in (("first", 2), ("second", 1)):
        ids = np.stack(profile.decisions(name))
        assert ids.shape == (20, 50, choices)
        assert all(len(set(one)) == choices for one in ids.reshape(-1, choices).tolist())
    rates = profile.rates("second")
    assert {"uniform": rates.max() < 0.4, "zipf": (np.diff(rates) < 0).all(), "one_hot": rates[0] == 1,
            "dirichlet": np.std(profile.loads("second"), 0).max() > 5,
            "markov": profile.joint("first", "second").max(1).sum() > 0.5 * 2000}[kind]


def test_bad_replays():
    model = Model()
    for call in (lambda: route.synthetic(model, "normal"), lambda: route.synthetic(model, "zipf", choices=4),
                 lambda: route.replay(model, profile_of_loads(model)).__enter__(),
                 lambda: route.replay(nn.Sequential(), made()).__enter__(),
                 lambda: made().of("third"), lambda: profile_of_loads(model, {"first": [[1, 2]]})):
        with pytest.raises(anyshape.AnyShapeError) as error:
            call()
        assert error.value.why and error.value.do
    with route.replay(model, route.synthetic(model, "uniform", choices=1)), \
            pytest.raises(anyshape.AnyShapeError, match="of 1 choices cannot replace"):
        model(torch.randn(3, WIDTH))


@torch.no_grad()
def test_overhead_is_measured_with_an_interval():
    model, x = Model(), torch.randn(3, WIDTH)
    profile = route.measure_overhead(model, lambda: model(x), blocks=6, seconds=0.002)
    least, middle, most = profile.overhead
    assert least <= middle <= most and profile.of("first").calls > 6 and model.first.recorder is None
