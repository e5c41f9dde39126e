"""Plans: optimisations propose, decisions are applied to a copy, reasons are printed, other models are refused."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import anyshape
from anyshape import route
from anyshape.route.optimize import plan as plans
from anyshape.route.profile.tally import profile_of_loads


class Model(nn.Module):
    """Two routers, one after the other."""

    def __init__(self, branches: int = 3) -> None:
        super().__init__()
        self.first = route.Router(route.top_k(nn.Linear(4, branches), 2), [nn.Linear(4, 4) for _ in range(branches)])
        self.second = route.Router(route.top_k(nn.Linear(4, 2), 1), [nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x):
        return self.second(self.first(x))


@dataclass(frozen=True)
class Negate:
    """Negates a router's results, to be seen; refuses the second."""

    NAME: str = "negate"

    def propose(self, context):
        return [route.Decision(name, self.NAME, name == "first", "it is the first" if name == "first" else "it is not",
                               2.0, "none") for name in context.routers]

    def apply(self, model, decision, compile):
        router = route.routers_of(model)[decision.router]
        router.branches = nn.ModuleList([nn.Sequential(one, Minus()) for one in router.branches])
        return model


class Minus(nn.Module):
    def forward(self, x):
        return -x


@pytest.fixture
def negate(monkeypatch):
    monkeypatch.setattr(plans, "PASSES", (Negate(),))


def loads(model):
    return profile_of_loads(model, {"first": np.array([[1, 2, 3], [0, 6, 0]]), "second": np.array([[3, 0], [2, 1]])})


def test_routers_have_names():
    assert list(route.routers_of(Model())) == ["first", "second"]


def test_a_plan_changes_a_copy_that_shares_parameters(negate):
    model, x = Model(), torch.randn(5, 4)
    before = model(x)
    plan = route.optimize(model, loads(model))
    fast = plan.apply(model)
    assert torch.equal(model(x), before)
    assert torch.equal(fast(x), model.second(-model.first(x)))
    assert {id(one) for one in fast.parameters()} == {id(one) for one in model.parameters()}


def test_a_plan_says_why(negate):
    model = Model()
    text = str(route.optimize(model, loads(model)))
    assert "1 of 2 optimisations are taken" in text
    assert "+ negate, 2.00x expected: it is the first" in text and "- negate: it is not" in text


def test_a_plan_compiles_with_what_it_is_given(negate):
    model, seen = Model(), []
    plan = route.optimize(model, loads(model), compile=lambda module: seen.append(module) or module)
    plan.apply(model)
    assert len(seen) == 1


def test_a_profile_of_another_model_is_refused(negate):
    model, other = Model(), Model(branches=4)
    for call in (lambda: route.optimize(other, loads(model)),
                 lambda: route.optimize(model, loads(model)).apply(other)):
        with pytest.raises(anyshape.AnyShapeError) as error:
            call()
        assert "first (3 branches)" in str(error.value) and error.value.why and error.value.do


def test_bad_arguments(negate):
    model = Model()
    with pytest.raises(anyshape.AnyShapeError, match="optimisation 'fuze' is unknown"):
        route.optimize(model, loads(model), passes=("fuze",))
    with pytest.raises(anyshape.AnyShapeError, match="memory_limit"):
        route.optimize(model, loads(model), memory_limit="much")
