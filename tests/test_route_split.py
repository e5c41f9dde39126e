"""Routers whose branches are modules of their own, compiled: one program for every load, a part for each branch."""
from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch import nn

import anyshape
from anyshape import route
from anyshape.frontend.programs import split_program
from anyshape.frontend.programs.eager_fallback import FallbackWarning
from sampling import rest

WIDTH = 6
LOADS = ([3, 2, 4], [0, 5, 1], [1, 0, 0], [1, 1, 1], [0, 0, 0], [2, 0, 3])


def given(cells, ids):
    return route.Routes(ids)


def ids_of(loads, seed=0):
    ids = torch.cat([torch.full((count,), branch, dtype=torch.long) for branch, count in enumerate(loads)])
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]


def linear():
    return nn.Linear(WIDTH, WIDTH)


class Routed(nn.Module):
    def __init__(self, branches, **how):
        super().__init__()
        torch.manual_seed(0)
        self.router = route.Router(given, branches() if callable(branches) else branches, **how)

    def forward(self, x, ids):
        return self.router(x, ids)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4).eval(), nn.ReLU(),
                                    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, WIDTH))

    def forward(self, rows):
        return self.layers(rows.reshape(-1, 2, 1, 3))


class Attention(nn.Module):
    """Each row is a sequence of two."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(3, 1, batch_first=True)

    def forward(self, rows):
        x = rows.reshape(-1, 2, 3)
        return self.inner(x, x, x, need_weights=False)[0].reshape(-1, WIDTH)


class Squeeze(nn.Module):
    """Does something else where it gets one row."""

    def forward(self, rows):
        found = rows.squeeze(0)
        return (found * (3 if found.dim() == 1 else 2)).reshape(-1, WIDTH)


class Nested(nn.Module):
    """A branch that is a router."""

    def __init__(self):
        super().__init__()
        self.router = route.Router(lambda rows: (rows[:, 0] > 0).long(), [linear(), nn.Sequential(linear(), nn.ReLU())])

    def forward(self, rows):
        return self.router(rows)


class Larger(nn.Module):
    """Images with four pixels for each."""

    def forward(self, rows):
        return nn.functional.interpolate(rows.reshape(-1, 1, 2, 3), scale_factor=2.0).mean(1).flatten(1)[:, :WIDTH]


class Constant(nn.Module):
    """Reads nothing of its rows but their number."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(WIDTH))

    def forward(self, rows):
        return self.bias.expand(rows.shape[0], WIDTH)


BRANCHES = {
    "mlp": lambda: [nn.Sequential(linear(), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(2)],
    "unlike": lambda: [linear(), nn.Identity(), nn.Sequential(linear(), nn.ReLU(inplace=True), linear())],
    "functions": lambda: [lambda rows: rows * 2, torch.sin, Constant()],
    "convolution": lambda: [Convolution(), nn.Identity()],
    "attention": lambda: [Attention(), nn.Softmax(1)],
    "nested": lambda: [Nested(), linear()],
    "larger": lambda: [Larger(), linear()],
    "random": lambda: [nn.Sequential(linear(), nn.Dropout(0.5)), nn.Dropout(0.5), linear()],
}


def check(run, model, loads, train=False):
    """One call with these loads is as in eager PyTorch, with the same random numbers, and so are its derivatives."""
    loads = loads[:len(model.router.branches)]
    x, ids = torch.randn(sum(loads), WIDTH, requires_grad=train), ids_of(loads)
    torch.manual_seed(1)
    ours = run(x, ids)
    torch.manual_seed(1)
    expected = model(x, ids)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    if train:
        wanted = [x, *model.parameters()]
        for mine, its in zip(*(torch.autograd.grad(found.square().sum(), wanted, allow_unused=True,
                                                   materialize_grads=True) for found in (ours, expected)), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "train"), rest(  # training has both
    [*((kind, True) for kind in BRANCHES), ("nested", False), ("larger", False)],
    ("unlike", True), ("convolution", True), ("nested", True), ("random", True), several=True))
def test_one_program_serves_every_load(kind, train):
    """No call runs as PyTorch, and gradients of branches without cells are zero."""
    model = Routed(BRANCHES[kind])
    run = anyshape.compile(model, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        for loads in LOADS:
            check(run, model, loads, train)
    explained = run.explain()
    assert explained.graphs == 1 and not explained.fallbacks and not explained.eager
    assert "split_rows" in str(explained) and "programs in parts" in str(explained)


@pytest.mark.parametrize("first", [[1, 0, 0], [0, 3, 0], [0, 0, 0]])
def test_the_first_load_may_be_small(first):
    model = Routed([nn.Tanh(), nn.Identity(), lambda rows: rows * 2])
    run = anyshape.compile(model, strict=True)
    for loads in (first, [2, 3, 1], [1, 1, 0]):
        check(run, model, loads)
    assert run.explain().graphs == (1 if sum(first) else 2)  # of no cells nothing can be told about others


def test_what_asks_for_the_number_of_rows_stays_correct():
    """Calls where that branch gets one row, and only those, do not take the program of the others."""
    model = Routed([Squeeze(), nn.Tanh(), nn.Identity()])
    run = anyshape.compile(model)
    for loads in ([3, 2, 4], [2, 1, 0], [0, 1, 1], [5, 0, 1]):
        check(run, model, loads)
    assert not run.explain().eager
    with pytest.warns(FallbackWarning):
        check(run, model, [1, 2, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        check(run, model, [2, 1, 1])


def test_statistics_of_one_row_are_refused_as_in_eager():
    model = Routed([nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH), nn.Identity()])
    other = copy.deepcopy(model)
    run = anyshape.compile(model)
    for loads in ([3, 2, 4], [2, 5, 0]):
        x, ids = torch.randn(sum(loads), WIDTH), ids_of(loads)
        torch.testing.assert_close(run(x, ids), other(x, ids))
    for one in (run, other):
        with pytest.raises((ValueError, anyshape.AnyShapeError), match="more than 1 value"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            one(torch.randn(4, WIDTH), ids_of([1, 3, 0]))
    for mine, its in zip(model.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(mine, its)


def test_several_tensors_and_tuples():
    def first(a, b):
        return a + b, b.sum(1)

    def second(a, b):
        return a * b, a[:, 0]

    router = route.Router(lambda a, b, ids: route.Routes(ids), [first, second, first], combine="mean")
    run = anyshape.compile(router, strict=True)
    for loads in LOADS:
        a, b, ids = torch.randn(sum(loads), WIDTH), torch.randn(sum(loads), WIDTH), ids_of(loads)
        for mine, its in zip(run((a, b), ids), router((a, b), ids), strict=True):
            torch.testing.assert_close(mine, its)
    assert run.explain().graphs == 1


def test_cells_come_back():
    """Early exit: two passes over a router whose cells leave with -1; then one over branches of others' rows."""
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.router = route.Router(lambda x: torch.where(x.sum(1) > 1, -1, (x[:, 0] > 0).long()),
                                       [nn.Tanh(), linear()], drop="identity")

        def forward(self, x):
            return self.router(self.router(x))

    model = Twice()
    run = anyshape.compile(model, strict=True)
    for count in (12, 1, 0, 5, 2):
        x = torch.randn(count, WIDTH, requires_grad=True)
        ours, expected = run(x), model(x)
        torch.testing.assert_close(ours, expected)
        if count:
            torch.testing.assert_close(*(torch.autograd.grad(found.square().sum(), x)[0] for found in (ours, expected)))
    assert run.explain().graphs == 1


def test_equal_branches_are_one_program_and_know_each_other_s_loads():
    """Sixteen branches of one kind are compiled once; new loads of known sizes need no new specialisation."""
    model = Routed(lambda: [linear() for _ in range(16)])
    run = anyshape.compile(model, strict=True)
    with torch.no_grad():
        check(run, model, [2, 3] * 8)
        programs = run.explain().programs
        assert len(programs) == 3
        anyshape.stats(reset=True)
        check(run, model, [3, 2] * 8)
        check(run, model, [0, 2, 3, 3] * 4)
        assert anyshape.stats()["plans"] == 0 or anyshape.stats()["programs"] == 0


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_router_comes_back(strict):
    model = Routed([nn.Tanh(), linear(), nn.Identity()]).eval()
    count = torch.export.Dim("count")
    exported = torch.export.export(model, (torch.randn(9, WIDTH), ids_of([3, 2, 4])), strict=strict,
                                   dynamic_shapes=({0: count}, {0: count}))
    saved = io.BytesIO()
    torch.export.save(exported, saved)
    saved.seek(0)
    run = anyshape.compile(torch.export.load(saved))
    for loads in ([3, 2, 4], [0, 2, 1], [5, 0, 0]):
        check(run, model, loads)


def test_steps_and_limits():
    """A whole train step, and a limit in bytes, which every part keeps to."""
    model = Routed(lambda: [nn.Sequential(linear(), nn.GELU(), linear()), linear(), linear()])
    other = copy.deepcopy(model)
    step = anyshape.train_step(model, lambda model, x, ids: model(x, ids).square().mean(),
                               torch.optim.SGD(model.parameters(), 0.1))
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    limited = anyshape.compile(other, memory_limit="1MiB")
    for loads in LOADS[:3]:
        x, ids = torch.randn(sum(loads), WIDTH), ids_of(loads)
        optimizer.zero_grad()
        loss = limited(x, ids).square().mean()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(x, ids), loss.detach())
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its)
    with pytest.raises(anyshape.AnyShapeError, match="cannot run within"):
        anyshape.compile(other, memory_limit=64)(torch.randn(9, WIDTH), ids_of([3, 2, 4]))


def test_rows_of_a_branch_are_the_caller_s_own():
    """What a split returns to the user is not the memory of another result."""
    def halves(x, ends):
        a, b = torch.ops.anyshape_route.split_rows(x, ends)
        return a, b, a * 2

    run = anyshape.compile(halves, strict=True)
    x = torch.randn(5, 3)
    for ends in ([2, 5], [0, 4], [1, 1]):
        before = x.clone()
        a, b, double = run(x, torch.tensor(ends, dtype=torch.int32))
        a.add_(1)
        assert torch.equal(x, before)
        assert torch.equal(a, x[:ends[0]] + 1) and torch.equal(b, x[ends[0]:ends[1]])
        assert torch.equal(double, x[:ends[0]] * 2)


@torch.no_grad()
def test_a_merge_of_one_branch_s_rows_is_no_copy_but_where_it_is_returned(monkeypatch):
    shared = []
    inner = split_program._RunMerge.__call__

    def call(self, values):
        inner(self, values)
        shared.append(any(values[part].data_ptr() == values[self.slot].data_ptr() for part in self.parts))

    def within(x, ends):
        parts = torch.ops.anyshape_route.split_rows(x * 2, ends)
        return torch.ops.anyshape_route.merge_rows(parts, ends, x.shape[0]) + 1

    def outside(x, ends):
        rows = x * 2
        parts = torch.ops.anyshape_route.split_rows(rows, ends)
        return rows, torch.ops.anyshape_route.merge_rows(parts, ends, x.shape[0]).view(-1)

    monkeypatch.setattr(split_program._RunMerge, "__call__", call)
    x = torch.randn(5, 3)
    inside, returned = (anyshape.compile(function, strict=True) for function in (within, outside))
    for ends, is_shared in (([5, 5], True), ([0, 5], True), ([2, 5], False), ([0, 4], False)):
        given, kept = torch.tensor(ends, dtype=torch.int32), torch.arange(5)[:, None] < ends[1]
        shared.clear()
        assert torch.equal(inside(x, given), torch.where(kept, x * 2, torch.zeros(())) + 1) and shared == [is_shared]
        rows, merged = returned(x, given)
        rows.zero_()
        assert torch.equal(merged, torch.where(kept, x * 2, torch.zeros(())).view(-1)) and shared[1:] == [False]


def test_rows_that_the_caller_changes_are_saved_apart():
    """A change of the input after the forward does not reach the backward, as in eager PyTorch."""
    layer = linear()

    def function(x, ends):
        a, b = torch.ops.anyshape_route.split_rows(x, ends)
        return torch.ops.anyshape_route.merge_rows([layer(a), b], ends, x.shape[0])

    x, ends = torch.randn(5, WIDTH), torch.tensor([2, 5], dtype=torch.int32)
    found = []
    for run in (function, anyshape.compile(function, strict=True)):
        own = x.clone()
        result = run(own, ends)
        own.zero_()
        found.append(torch.autograd.grad(result.square().sum(), layer.weight)[0])
    torch.testing.assert_close(*found)
