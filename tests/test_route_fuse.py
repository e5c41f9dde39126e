"""Horizontal fusion: what is fused and why not, padded branches and classes, capacities by dynamic programming."""
from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

import anyshape
from anyshape import route
from anyshape.route.core.stacked_lowerings import BucketedBranches, StackedClasses
from anyshape.route.optimize import capacities, fuse
from anyshape.route.profile.tally import profile_of_loads
from sampling import rest


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def other():
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


class Model(nn.Module):
    """A router whose routes are given."""

    def __init__(self, branches) -> None:
        super().__init__()
        self.moe = route.Router(lambda cells, ids: ids, branches)

    def forward(self, x, ids):
        return self.moe(x, ids)


EXAMPLE = (torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 0]))


def planned(model, loads, example=EXAMPLE, **kw):
    profile = profile_of_loads(model, {"moe": np.array(loads)})
    return route.optimize(model, profile, passes=("fuse",), example=example, **kw)


@pytest.mark.parametrize("kinds", rest(["aaaa", "abab", "abba", "aab", "abc"], "abba", "aab"))
def test_a_plan_fuses_what_is_equal(kinds, monkeypatch):
    torch.manual_seed(0)
    makers = {"a": mlp, "b": other, "c": nn.Identity}
    model = Model([makers[kind]() for kind in kinds])
    monkeypatch.setattr(fuse, "MARGIN", 0.0)  # whatever the clock says
    plan = planned(model, [[1] * len(kinds), [3] + [0] * (len(kinds) - 1)])
    (decision,) = plan.decisions
    if kinds == "abc":
        assert not decision.applied and "no two branches are equal" in decision.why
        return
    assert decision.applied and decision.gain > 0 and "ms as a stack" in decision.why and decision.guard
    fast = plan.apply(model)
    (fused,) = route.routers_of(plan.specialized(model)).values()
    assert not model.moe.grouped and fused.grouped
    assert isinstance(fused.branches, StackedClasses) == (kinds != "aaaa")
    assert fuse.cost(decision, plan.profile) > 0
    for count in (0, 1, 9, 40):
        x, ids = torch.randn(count, 4, requires_grad=True), torch.randint(-1, len(kinds), (count, 2))
        expected, found = model(x, ids), fast(x, ids)
        torch.testing.assert_close(found, expected)
        for mine, theirs in zip(*(torch.autograd.grad(y.square().sum(), [x]) for y in (found, expected)), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_classes_are_compiled():
    torch.manual_seed(0)
    branches = [mlp(), other(), mlp(), other()]
    apart, classes = Model(branches), [[0, 2], [1, 3]]
    one = Model(fuse.build(branches, classes, EXAMPLE[:1]))
    fast = anyshape.compile(one)
    for count in (7, 12):
        x, ids = torch.randn(count, 4), torch.randint(-1, 4, (count,))
        torch.testing.assert_close(fast(x, ids), apart(x, ids), rtol=1e-4, atol=1e-5)


def test_reasons_against():
    model = Model([mlp(), mlp()])
    assert "example" in planned(model, [[1, 1]], None).decisions[0].why
    assert "no call" in planned(model, np.zeros((0, 2), np.int64)).decisions[0].why
    norms = Model([nn.BatchNorm1d(4) for _ in range(2)])
    assert "writes" in planned(norms, [[1, 1]]).decisions[0].why
    mixing = Model([nn.Softmax(0), nn.Softmax(0)])
    assert "counts cells" in planned(mixing, [[1, 1]]).decisions[0].why
    stacked = Model(route.stack([mlp(), mlp()]))
    assert not planned(stacked, [[1, 1]]).decisions
    only = Model([mlp()])
    assert "one branch" in planned(only, [[1]], (EXAMPLE[0], EXAMPLE[1] * 0)).decisions[0].why
    for refused in (norms, mixing, only):
        assert not any(one.applied for one in planned(refused, [[1] * len(refused.moe.branches)],
                                                      (EXAMPLE[0], EXAMPLE[1] * 0)).decisions)


def test_what_is_slower_is_not_taken(monkeypatch):
    times = {"split": [[2.0, 1.0]], "stacked": [[2.0, 1.2]], "padded": [], "unpadded": ""}
    monkeypatch.setattr(fuse, "measure", lambda *_: times)
    (decision,) = planned(Model([mlp(), mlp()]), [[1, 1]]).decisions
    assert not decision.applied and decision.gain < 1 and "1000.00 ms branch by branch" in decision.why


def test_a_decision_for_other_loads_is_made_of_its_times(monkeypatch):
    """Padded to c: c ms. Branch by branch: 40 ms and one for each row; the stack: 50 and one for each row."""
    times = {"split": [[1, 0.041], [100, 0.14]], "stacked": [[1, 0.051], [100, 0.15]],
             "padded": [[1, 0.001], [200, 0.2]], "unpadded": ""}
    monkeypatch.setattr(fuse, "measure", lambda *_: times)
    model = Model([mlp(), mlp()]).eval()
    plan = planned(model, [[4, 27], [27, 4]])
    assert plan.decisions[0].applied and plan.decisions[0].options["capacities"] == [27]
    monkeypatch.setattr(fuse, "measure", None)
    for loads, applied, chosen in (([8, 8], True, [8]), ([200, 0], True, [200]), ([2000, 0], False, [2000])):
        profile = profile_of_loads(model, {"moe": np.array([loads])})
        (decision,) = plan.for_loads(profile).decisions
        assert (decision.applied, decision.options["capacities"]) == (applied, chosen), loads
        (again,) = plan.for_loads(profile).for_loads(plan.profile).decisions
        assert again == plan.decisions[0]
    x, ids = torch.randn(40, 4), torch.arange(40) % 2
    torch.testing.assert_close(plan.specialized(model)(x, ids), model(x, ids))


def test_calls_of_few_rows_are_not_padded(monkeypatch):
    branches = [mlp().eval() for _ in range(3)]
    stacked = route.stack(branches, torch.randn(1, 4))
    apart, padded = Model(branches), Model(BucketedBranches(stacked, (2, 5), (0, 6)))
    batched, run = [], stacked.run_batched
    monkeypatch.setattr(stacked, "run_batched", lambda rows: batched.append(rows[0].shape[1]) or run(rows))
    for ids, capacity in (([0], [2]), ([0, 0, 0, 1, 1], []), ([0, 0, 0, 1, 1, 2], [5])):
        batched.clear()
        x, chosen = torch.randn(len(ids), 4), torch.tensor(ids)
        torch.testing.assert_close(padded(x, chosen), apart(x, chosen))
        assert batched == capacity, ids


def test_a_compiled_plan_has_no_padding():
    model = Model([mlp(), mlp()])
    (decision,) = planned(model, [[1, 1], [2, 0]], compile=anyshape.compile).decisions
    assert "padding is no candidate" in decision.why and not decision.options["capacities"]


@pytest.mark.parametrize("make", [mlp, other, lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3))])
def test_padding_drops_no_cell(make, monkeypatch):
    torch.manual_seed(0)
    branches = [make().eval() for _ in range(3)]
    apart = Model(branches)
    stacked = route.stack(branches, torch.randn(1, 4))
    padded = Model(BucketedBranches(stacked, (2, 5)))
    batched, run = [], stacked.run_batched
    monkeypatch.setattr(stacked, "run_batched", lambda rows: batched.append(rows[0].shape[1]) or run(rows))
    for ids, capacity in (([0, 1, 1, -1], [2]), ([2, 2, 2, 2, 1, -1], [5]), ([1] * 6, []), ([-1, -1], []), ([], []),
                          ([0, 0, 0, 1, 2, 2, 0, 0], [5])):
        batched.clear()
        x, chosen = torch.randn(len(ids), 4), torch.tensor(ids, dtype=torch.long)
        torch.testing.assert_close(padded(x, chosen), apart(x, chosen))
        assert batched == capacity, ids
    for wrong in ((), (0, 2), (3, 2), (2, 2)):
        with pytest.raises(anyshape.AnyShapeError, match="capacities"):
            BucketedBranches(stacked, wrong)


def test_gradients_go_through_padding():
    torch.manual_seed(0)
    branches = [mlp().eval() for _ in range(3)]
    stacked = route.stack(branches, torch.randn(1, 4))
    x, ends = torch.randn(8, 4, dtype=torch.float32, requires_grad=True), torch.tensor([3, 3, 7], dtype=torch.int32)
    wanted = [x, *stacked.parameters()]
    for mine, theirs in zip(*(torch.autograd.grad(way(x, ends).square().sum(), wanted)
                              for way in (BucketedBranches(stacked, (4,)), stacked)), strict=True):
        torch.testing.assert_close(mine, theirs)


# ---- capacities


def by_brute_force(loads, cost, price, general, most):
    values = sorted({max(load, 1) for load in loads})
    return min(capacities.expected(loads, chosen, cost, price, general)
               for count in range(most + 1) for chosen in itertools.combinations(values, count))


def test_capacities_are_optimal():
    draw = random.Random(0)
    for _ in range(60):
        loads = [draw.randint(0, 12) for _ in range(draw.randint(1, 30))]
        points = [(x, draw.uniform(0.1, 1) + draw.uniform(0, 0.3) * x) for x in (1, 4, 12)]
        cost, plain = capacities.piecewise(points), capacities.piecewise([(1, draw.random()), (12, 5 * draw.random())])
        price, most = draw.choice((0.0, 0.01, 0.3)), draw.randint(1, 4)
        chosen = capacities.choose(loads, cost, price, plain, most)
        found = capacities.expected([max(load, 1) for load in loads], chosen, cost, price, plain)
        assert len(chosen) <= most and list(chosen) == sorted(set(chosen))
        assert found == pytest.approx(by_brute_force([max(load, 1) for load in loads], cost, price, plain, most))


def test_capacities_are_never_worse_than_percentiles():
    draw = np.random.default_rng(0)
    for _ in range(20):
        loads = np.maximum(draw.zipf(1.5, 400) % 900, 1).tolist()
        cost = capacities.piecewise([(1, 1e-4), (90, 1e-3), (900, 2e-2)])
        general = capacities.piecewise([(1, 1.0)])
        fixed = sorted({int(np.percentile(loads, percent, method="inverted_cdf")) for percent in (50, 90, 100)})
        chosen = capacities.choose(loads, cost, 1e-5, general)
        assert capacities.expected(loads, chosen, cost, 1e-5, general) <= \
            capacities.expected(loads, fixed, cost, 1e-5, general) * (1 + 1e-9)


def test_capacities_that_do_not_pay():
    assert capacities.choose([3, 4], capacities.piecewise([(1, 2.0)]), 0.0, capacities.piecewise([(1, 1.0)])) == ()
    assert capacities.choose([], capacities.piecewise([(1, 1.0)]), 0.0, capacities.piecewise([(1, 1.0)])) == ()
