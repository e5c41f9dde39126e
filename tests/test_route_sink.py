"""Helpers of profile-guided optimisation: dead branches, constant routers, operators sunk behind a router."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from anyshape import route
from anyshape.route.optimize import constant_routes, dead_branches, sink
from anyshape.route.optimize.decision import Decision, DecisionContext, FlowSource, shared_copy
from anyshape.route.optimize.sink_graph import NotSunk
from anyshape.route.profile.first_calls import first_calls, routed_cells
from anyshape.route.profile.routers import routers_of
from anyshape.route.profile.tally import profile_of_loads

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
    names = first_calls(model, routers_of(model), (x,), routed_cells)
    assert set(names) == {"0", "1"}
    decision = constant_routes._decided("0", model[0], names["0"])
    taken = Decision("0", "constant_routes", True, "", options=decision.options)
    fast = constant_routes.apply(shared_copy(model), taken)
    assert isinstance(fast[0], constant_routes.FoldedRouter) and type(fast[1]) is route.Router
    assert torch.equal(fast(x), model(x)) and type(model[0]) is route.Router


# ---- sinking

ROWS: list[int] = []  # of each call of a layer that `noted` made


def noted() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_pre_hook(lambda module, args: ROWS.append(args[0].shape[0]))
    return layer


class Exit(nn.Module):
    """Sends sure samples to their exit and others to the rest, for which alone `wide` is computed."""

    def __init__(self, norm=None, rest=None, decide=None, leave=None, **own):
        super().__init__()
        self.stem, self.gate, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), noted()
        self.norm = norm or nn.LayerNorm(WIDTH)
        self.router = route.Router(decide or self.decide, [leave or Leave(), rest or Rest()], **own)

    def decide(self, logits, *features):
        return (logits[:, 0] > 0).long()

    def forward(self, x):
        x = self.stem(x)
        return self.router((self.gate(x), self.norm(self.wide(x)).relu(), x))


class Leave(nn.Module):
    def forward(self, logits, wide, x):
        return logits


class Both(nn.Module):
    def forward(self, logits, wide, x):
        return logits + wide[:, :2]


class Rest(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, logits, wide, x):
        return self.head(wide + x)


def attempt(model, x, name="router", path=""):
    calls = sink.arguments_of(model, (x,))
    return sink.sunk(shared_copy(model), path, name, calls[path])


def test_operators_of_one_branch_run_on_its_cells_only():
    model = Exit().eval()
    x = torch.randn(6, WIDTH)
    found, fast = attempt(model, x)
    assert found.users == (1,) and found.count == 3
    for count in (6, 1, 9, 0):
        x = torch.randn(count, WIDTH)
        ROWS.clear()
        expected = model(x)
        assert [count] == ROWS
        ROWS.clear()
        torch.testing.assert_close(fast(x), expected)
        going = int((model.gate(model.stem(x))[:, 0] > 0).sum())
        assert [going] == ROWS
    x = torch.randn(6, WIDTH)
    for run in (model, fast):
        run(x).square().sum().backward()
    doubled = model.stem.weight.grad.clone()
    model.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close(doubled, 2 * model.stem.weight.grad)
    names = dict(model.named_parameters())
    assert all(any(one is own for own in names.values()) for one in fast.parameters())


def test_other_arguments_run_the_module_as_it_was():
    model = Exit().eval()
    fast = attempt(model, torch.randn(6, WIDTH))[1]
    ROWS.clear()
    x = torch.randn(4, WIDTH)
    assert torch.equal(fast(x=x), model(x))
    assert torch.equal(fast.train()(x), model.train()(x))
    assert ROWS == [4] * 4 and model.wide.training


@pytest.mark.parametrize(("own", "why"), [
    ({"norm": nn.BatchNorm1d(WIDTH)}, "writes a buffer"), ({"norm": nn.Dropout(0.5)}, "random"),
    ({"drop": "identity"}, "dropped cells"),
    ({"decide": lambda logits, wide, x: (logits[:, 0] + wide[:, 0] > 0).long()}, "its decision"),
    ({"norm": nn.Sequential(nn.Unflatten(0, (2, 3)), nn.LayerNorm(WIDTH), nn.Flatten(0, 1))}, "torch.export"),
    ({"rest": Both(), "leave": Both()}, "every branch")])
def test_what_may_not_sink_stays(own, why):
    model = Exit(**own)
    with pytest.raises(NotSunk, match=why):
        attempt(model, torch.randn(6, WIDTH))


def test_dead_branches_stay_behind_their_guard_when_operators_sink():
    model = Exit().eval()
    x = torch.randn(6, WIDTH)
    guarded = shared_copy(model)
    dead_branches.apply(guarded, Decision("router", "dead_branches", True, "", options={"live": [1]}))
    _, fast = sink.sunk(guarded, "", "router", (x,))
    assert isinstance(fast.router.branches, dead_branches.GuardedBranches) and fast.router.branches.live == (1,)
    torch.testing.assert_close(fast(x), model(x))


class Reads(Exit):
    """Python that symbolic tracing takes another way."""

    def forward(self, x):
        found = super().forward(x)
        return found if isinstance(found, torch.Tensor) else -found


def test_a_trace_that_is_another_program_is_refused():
    with pytest.raises(NotSunk, match="the traced program has other operators"):
        attempt(Reads().eval(), torch.randn(6, WIDTH))


class Deep(nn.Module):
    """An exit in the rest of an exit."""

    def __init__(self):
        super().__init__()
        self.inner = Exit()

    def forward(self, logits, wide, x):
        return self.inner(wide + x)


def test_proposals_name_what_sinks_and_plans_apply_them():
    torch.manual_seed(0)
    model = Exit(rest=Deep()).eval()
    x = torch.randn(32, WIDTH)
    inner = "router.branches.1.inner.router"
    some = profile_of_loads(model, {"router": np.array([[20, 12]]), inner: np.array([[0, 12]])})
    decisions = {one.router: one for one in sink.propose(DecisionContext(model, some, FlowSource(model, (x,))))}
    assert decisions["router"].applied and "branches 1 only, where 38% of" in decisions["router"].why
    assert not decisions[inner].applied and "100% of all cells go" in decisions[inner].why
    fast = sink.apply(shared_copy(model), decisions["router"])
    ROWS.clear()
    found = fast(x)
    assert len(ROWS) == 2 and ROWS[0] < 32
    torch.testing.assert_close(found, model(x))
    assert set(route.routers_of(fast)) == {"router", "router.branches.1.branch.inner.router"}
    left = sink.propose(DecisionContext(model, some, FlowSource(model, None)))
    assert not any(one.applied for one in left) and "example" in left[0].why
