"""Ready router functions, capacity, losses and the loop router: their meaning by hand, derivatives, and compiled."""
from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import anyshape
from anyshape import route

WIDTH, BRANCHES, VOCABULARY = 6, 4, 40
SIZES = (9, 1, 0, 17)


def gate(out=BRANCHES):
    torch.manual_seed(3)
    return nn.Linear(WIDTH, out)


FUNCTIONS = {
    "top_k": lambda: route.top_k(gate(), k=2),
    "capacity": lambda: route.top_k(gate(), k=2, capacity_factor=0.5, normalize=False),
    "priority": lambda: route.switch(gate(), capacity_factor=1.0, batch_prioritised=True),
    "threshold of two": lambda: route.threshold(gate(), 0.1, weighted=True, most=2, residual=3),
    "residual": lambda: route.residual_threshold(gate(BRANCHES - 1), 0.2, weighted=True),
    "exit": lambda: route.confidence_exit(gate(), 0.4),
    "hash": lambda: route.hash_route(BRANCHES, k=3),
    "hash table": lambda: route.hash_route(BRANCHES, vocabulary=VOCABULARY),
    "task": lambda: route.task_route([[0, 1], [2, 3], [1, 3]]),
    "expert choice": lambda: route.expert_choice(gate(), 1.5, most=2),
}
NUMBERED = {"hash": VOCABULARY, "hash table": VOCABULARY, "task": 3}


def arguments(kind, count, seed=0):
    draw = torch.Generator().manual_seed(seed + count)
    cells = torch.randn(count, WIDTH, generator=draw)
    if kind not in NUMBERED:
        return (cells,)
    return cells, torch.randint(0, NUMBERED[kind], (count,), generator=draw)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_decisions_are_one_program(kind):
    """The same routes and derivatives compiled, for all numbers of cells, with no graph break."""
    decide = FUNCTIONS[kind]()
    run = anyshape.compile(decide, strict=True)
    for count in SIZES:
        given = arguments(kind, count)
        given[0].requires_grad_()
        ours, expected = run(*given), decide(*given)
        assert torch.equal(ours.ids, expected.ids)
        assert ((expected.ids >= -1) & (expected.ids < BRANCHES)).all() and len(expected.ids) == count
        if expected.weights is None:
            assert ours.weights is None
            continue
        torch.testing.assert_close(ours.weights, expected.weights)
        wanted = [given[0], *decide.parameters()]
        for mine, its in zip(*(torch.autograd.grad(found.weights.square().sum(), wanted)
                               for found in (ours, expected)), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-6)
    assert run.explain().graphs == 1 and not run.explain().fallbacks


@pytest.mark.parametrize("kind", ["top_k", "priority", "threshold of two", "residual", "expert choice"])
def test_weights_are_differentiated_exactly(kind):
    decide = FUNCTIONS[kind]().double()
    cells = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: decide(x).weights, (cells,))


def test_top_k_is_shazeer_s():
    decide, (cells,) = FUNCTIONS["top_k"](), arguments("top_k", 7)
    scores = decide.gate(cells)
    for row, ids, weights in zip(scores, *decide(cells)[:2], strict=True):
        best = sorted(range(BRANCHES), key=lambda place: -row[place])[:2]
        assert ids.tolist() == best
        torch.testing.assert_close(weights, torch.softmax(row[best], 0))


def test_equal_scores_do_not_depend_on_the_batch():
    for decide in (route.top_k(lambda x: x, k=2), route.switch(lambda x: x), route.threshold(lambda x: x, most=2)):
        row = torch.tensor([[1.0, 3.0, 3.0, 3.0]])
        alone = decide(row).ids
        many = decide(torch.cat([torch.randn(50, 4), row, torch.randn(3, 4), row])).ids
        assert torch.equal(many[50], alone[0]) and torch.equal(many[54], alone[0])
    assert route.switch(lambda x: x)(row).ids.tolist() == [1]


def drop_by_hand(ids, order, room):
    """First choices of all cells, in `order`, then second ones."""
    kept, loads = ids.clone(), [0] * BRANCHES
    for choice in range(ids.shape[1]):
        for cell in order:
            branch = int(ids[cell, choice])
            if branch < 0:
                continue
            if loads[branch] == room:
                kept[cell, choice] = -1
            else:
                loads[branch] += 1
    return kept


@pytest.mark.parametrize("priority", [False, True])
@pytest.mark.parametrize("factor", [0.3, 1.0, 1.25, 50.0])
def test_capacity_drops_what_comes_last(priority, factor):
    torch.manual_seed(0)
    for count in (0, 1, 6, 23):
        ids, weights = torch.randint(-1, BRANCHES, (count, 2)), torch.rand(count, 2)
        found = route.limited(route.Routes(ids, weights), BRANCHES, factor, batch_prioritised=priority)
        order = sorted(range(count), key=lambda cell: -float(weights[cell].max())) if priority else range(count)
        room = math.ceil(factor * count * 2 / BRANCHES - 1e-9)
        assert torch.equal(found.ids, drop_by_hand(ids, order, room))
        assert found.weights is weights


def test_noise_and_jitter_are_for_training():
    cells = torch.randn(400, WIDTH)
    noisy = nn.Linear(WIDTH, BRANCHES)
    for decide in (route.top_k(gate(), k=2, noise=1.0), route.top_k(gate(), k=2, noise=noisy),
                   route.switch(gate(), jitter=0.3)):
        plain = decide.gate(cells)
        assert not torch.equal(decide(cells).logits, plain)
        torch.manual_seed(1)
        first = anyshape.compile(decide, strict=True)(cells)
        torch.manual_seed(1)
        assert torch.equal(first.ids, decide(cells).ids)
        assert torch.equal(decide.eval()(cells).logits, plain)


def test_thresholds():
    scores = torch.tensor([[0.5, -1.0, 0.2], [-1.0, -2.0, -3.0], [0.1, 0.2, 0.3]])
    assert route.threshold(lambda x: x)(scores).ids.tolist() == [[0, -1, 2], [-1, -1, -1], [0, 1, 2]]
    assert route.threshold(lambda x: x, residual=1)(scores).ids.tolist() == [[0, -1, 2], [1, -1, -1], [0, 1, 2]]
    assert route.threshold(lambda x: x, most=1)(scores).ids.tolist() == [[0], [-1], [2]]
    found = route.residual_threshold(lambda x: x, 0.15, weighted=True)(scores)
    assert found.ids.tolist() == [[0, -1, 2], [3, -1, -1], [-1, 1, 2]]
    assert found.weights[1, 0] == 1 and found.weights[0, 2] == 0.2


def test_who_is_sure_leaves():
    logits = torch.tensor([[5.0, 0.0], [0.1, 0.0], [0.0, 9.0]])
    assert route.confidence_exit(lambda x: x, 0.9)(logits).ids.tolist() == [0, 1, 0]


def test_hashes_are_balanced_and_different():
    table = route.hash_route(BRANCHES, vocabulary=VOCABULARY, seed=5)
    tokens = torch.arange(VOCABULARY)
    loads = table(tokens, tokens).ids.bincount(minlength=BRANCHES)
    assert loads.tolist() == [VOCABULARY // BRANCHES] * BRANCHES
    several = route.hash_route(7, k=7)(tokens, tokens).ids
    assert torch.equal(several.sort(1).values, torch.arange(7).expand(VOCABULARY, 7))
    spread = route.hash_route(8)(tokens, torch.arange(8000)).ids.bincount(minlength=8)
    assert int(spread.min()) > 800 and int(spread.max()) < 1200


def test_tasks_of_cells_or_of_all():
    decide = route.task_route([2, 0])
    assert decide(torch.zeros(3, 1), torch.tensor([1, 0, 1])).ids[:, 0].tolist() == [0, 2, 0]
    assert decide(torch.zeros(3, 1), torch.tensor(0)).ids[:, 0].tolist() == [2, 2, 2]


def test_branches_choose_as_many_cells_each():
    torch.manual_seed(0)
    scores = torch.randn(10, BRANCHES)
    found = route.expert_choice(lambda x: x, 1.2)(scores)
    likely = torch.softmax(scores, -1)
    for branch in range(BRANCHES):
        chosen = (found.ids[:, branch] == branch).nonzero()[:, 0]
        best = likely[:, branch].argsort(descending=True)[:3]
        assert sorted(chosen.tolist()) == sorted(best.tolist())
        assert torch.equal(found.weights[:, branch], likely[:, branch])
    one = route.expert_choice(lambda x: x, 1.2, most=1)(scores).ids
    assert one.shape == (10, 1)


@pytest.mark.parametrize("make", [
    lambda: route.top_k(gate(), k=0), lambda: route.top_k(gate(), capacity_factor=0.0),
    lambda: route.switch(gate(), jitter=2.0), lambda: route.hash_route(2, k=3), lambda: route.task_route([0.5]),
    lambda: route.limited(route.Routes(torch.zeros(3, dtype=torch.long)), 2, 1.0, batch_prioritised=True),
    lambda: route.load_balance(route.Routes(torch.zeros(3, dtype=torch.long))),
    lambda: route.loop(route.Router(gate(), [nn.Identity()]), 2),
    lambda: route.top_k(lambda x: x, k=3)(torch.zeros(5, 2)),
], ids=["k", "capacity", "jitter", "hash", "task", "priority", "loss", "loop", "branches"])
def test_what_does_not_fit_is_refused(make):
    with pytest.raises(anyshape.AnyShapeError) as error:
        make()
    assert error.value.why and error.value.do


def test_losses():
    even = route.Routes(torch.arange(8) % 4, None, torch.eye(4).repeat(2, 1))
    torch.testing.assert_close(route.load_balance(even), torch.tensor(1.0))
    one = route.Routes(torch.zeros(8, dtype=torch.long), None, torch.tensor([50.0, 0, 0, 0]).expand(8, 4))
    torch.testing.assert_close(route.load_balance(one), torch.tensor(4.0))
    scores = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(route.z_loss(route.Routes(even.ids, None, scores)),
                               torch.log(scores.exp().sum(1)).square().mean())
    half = route.Routes(torch.tensor([[0, 1], [0, -1], [-1, -1]]), None, torch.zeros(3, 2))
    torch.testing.assert_close(route.load_balance(half, all_choices=True), torch.tensor(1.0))
    for loss in (route.load_balance, route.z_loss):
        torch.autograd.gradcheck(lambda x, loss=loss: loss(route.Routes(even.ids, None, x)), (scores,))
        assert loss(route.Routes(even.ids[:0], None, torch.zeros(0, 4))) == 0


def test_a_layer_with_losses_is_one_program():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = route.Router(route.top_k(gate(), capacity_factor=1.0), route.Experts(BRANCHES, WIDTH, 8))

        def forward(self, x):
            routes = self.moe.router_fn(x)
            return self.moe(x, routes=routes).square().mean() + route.load_balance(routes) + route.z_loss(routes)

    layer = Layer()
    run = anyshape.compile(layer, strict=True)
    for count in (9, 1, 4):
        x = torch.randn(count, WIDTH)
        ours, expected = run(x), layer(x)
        torch.testing.assert_close(ours, expected)
        for mine, its in zip(*(torch.autograd.grad(y, list(layer.parameters())) for y in (ours, expected)),
                             strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-6)
    assert run.explain().graphs == 1


def test_cells_leave_a_loop_for_good():
    """A counter: a cell leaves when it reaches its bound, and then the router function would send it in again."""
    class Count(nn.Module):
        def forward(self, cells):
            return route.Routes(torch.where(cells[:, 0] == cells[:, 1], -1, 0))

    router = route.Router(Count(), [lambda rows: rows + torch.tensor([1.0, 0.0])], drop="identity")
    again = route.Router(lambda cells: torch.where(cells[:, 0] % 2 == 0, 0, -1), [lambda rows: rows + 3],
                         drop="identity")
    cells = torch.tensor([[0.0, 2.0], [1.0, 1.0], [0.0, 9.0]])
    run = anyshape.compile(route.loop(router, 4), strict=True)
    for found in (route.loop(router, 4)(cells), run(cells)):
        assert found[:, 0].tolist() == [2, 1, 4]
    assert route.loop(again, 3)(cells)[:, 0].tolist() == [3, 1, 3]
