"""Helpers of profile-guided optimisation: dead branches, constant routers, operators sunk behind a router."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from anyshape import route
from anyshape.route.optimize import constant_routes, dead_branches
from anyshape.route.optimize.decision import Decision, shared_copy

WIDTH = 8


class Count(nn.Linear):
    """A linear layer that notes how many rows it got in each call."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.rows = []

    def forward(self, rows):
        if not torch.compiler.is_compiling():
            self.rows.append(len(rows))
        return super().forward(rows)


def by_first(cells):
    """The branch that the first number of a cell says."""
    return cells[:, 0].long()


def cells(*branches):
    found = torch.randn(len(branches), WIDTH)
    found[:, 0] = torch.tensor(branches)
    return found


# ---- dead branches


def test_dead_branches_run_only_where_they_have_cells():
    model = route.Router(by_first, [Count() for _ in range(4)])
    decision = dead_branches._decided("router", False, np.array([[3, 0, 2, 0], [1, 0, 4, 0]]))
    assert decision.applied and decision.options["live"] == [0, 2] and "2 of 4" in decision.why
    fast = dead_branches.apply(shared_copy(model), decision)
    for branch in fast.branches:
        branch.rows.clear()
    x = cells(0, 2, 2, 0, 2)
    assert torch.equal(fast(x), model(x)) and fast.branches.misses == 0
    assert [branch.rows for branch in fast.branches] == [[2], [], [3], []]
    x = cells(0, 3, 2, 1, -1)
    assert torch.equal(fast(x), model(x)) and fast.branches.misses == 1
    assert torch.equal(fast(x[:0]), model(x[:0]))
    assert [name for name, _ in fast.named_parameters()] == [name for name, _ in model.named_parameters()]
    x = cells(0, 2).requires_grad_()
    fast(x).sum().backward()
    assert model.branches[0].weight.grad is not None  # shared with the model


@pytest.mark.parametrize(("grouped", "loads", "why"), [
    (True, [[1, 0]], "one module"), (False, [[1, 2]], "every branch"), (False, np.zeros((0, 2)), "no cell")])
def test_dead_branches_are_refused(grouped, loads, why):
    decision = dead_branches._decided("router", grouped, np.array(loads))
    assert not decision.applied and why in decision.why


# ---- constant routers


class Fixed(nn.Module):
    """Every cell to the branches `ids`, with weights if there are any."""

    def __init__(self, ids, weights=None):
        super().__init__()
        self.first, self.second, self.weighted = ids[0], ids[-1], weights is not None

    def forward(self, cells):
        ids = torch.tensor([self.first, self.second]).expand(cells.shape[0], 2)
        return route.Routes(ids, torch.softmax(cells[:, :2], 1) if self.weighted else None)


@pytest.mark.parametrize("combine", ["sum", "mean", "first"])
@pytest.mark.parametrize("weights", [None, True])
@pytest.mark.parametrize("ids", [(1, 2), (-1, 0)])
def test_constant_routers_are_folded(combine, weights, ids):
    experts = route.Experts(3, WIDTH, 12)
    for branches in ([nn.Linear(WIDTH, 4) for _ in range(3)], experts):
        model = route.Router(Fixed(ids, weights), branches, combine=combine)
        decision = constant_routes._decided("router", model, (torch.randn(5, WIDTH),))
        assert decision.applied, decision.why
        fast = constant_routes.apply(shared_copy(model), decision)
        for count in (5, 1, 0):
            x = torch.randn(count, WIDTH)
            torch.testing.assert_close(fast(x), model(x))
        model.router_fn.first = fast.router_fn.first = 2  # what the decision reads has changed
        torch.testing.assert_close(fast(x), model(x))
        x = torch.randn(4, WIDTH)
        other = route.Routes(torch.tensor([[0, 1]] * 4))
        torch.testing.assert_close(fast(x, routes=other), model(x, routes=other))


class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("task", torch.tensor(1))
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, cells):
        return self.task.expand(cells.shape[0])


class Learned(Held):
    def forward(self, cells):
        return self.weight.argmax().expand(cells.shape[0])


TASKS = [1, 2]


@pytest.mark.parametrize(("decide", "why"), [
    (by_first, "depends on the cells"), (Held(), "buffer"), (Learned(), "parameters"),
    (lambda cells: torch.arange(cells.shape[0]) % 3, "place of a cell"),
    (lambda cells: torch.full((cells.shape[0],), TASKS[0]), "may change"),
    (lambda cells: torch.randint(0, 3, (cells.shape[0],)), "random"),
    (lambda cells: torch.full((cells.shape[0],), -1), "dropped")])
def test_routers_that_are_not_constant_stay(decide, why):
    model = route.Router(decide, [nn.Linear(WIDTH, 4) for _ in range(3)])
    decision = constant_routes._decided("router", model, (torch.randn(5, WIDTH),))
    assert not decision.applied and why in decision.why, decision.why


def test_folding_changes_only_its_router_in_a_model():
    model = nn.Sequential(route.Router(lambda cells: torch.ones(cells.shape[0]).long(), [nn.Identity(), nn.Tanh()]),
                          route.Router(by_first, [nn.Identity(), nn.Tanh()]))
    x = torch.rand(4, WIDTH)
    names = constant_routes.cells_of(model, (x,))
    assert set(names) == {"0", "1"}
    decision = constant_routes._decided("0", model[0], names["0"])
    fast = constant_routes.apply(shared_copy(model), Decision("0", "constant_routes", True, "", options=decision.options))
    assert isinstance(fast[0], constant_routes.FoldedRouter) and type(fast[1]) is route.Router
    assert torch.equal(fast(x), model(x)) and type(model[0]) is route.Router
