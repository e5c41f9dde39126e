"""Dynamic networks: cells, routers and routes, in eager PyTorch and compiled."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import anyshape
from anyshape import route

WIDTH = 32


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 48), nn.ReLU(), nn.Linear(48, WIDTH))


class Layer(nn.Module):
    """A mixture of experts by hand, `loop`, and by a router."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(WIDTH, 4)
        experts = route.Experts(4, WIDTH, 48) if stacked else [mlp() for _ in range(4)]
        self.moe = route.Router(route.top_k(self.gate, k=2), experts)

    def forward(self, x):
        cells = route.annotate_cell(x, dims=(0, 1))
        return route.restore(self.moe(cells), like=x, dims=(0, 1))

    def expert(self, number, rows):
        if not self.moe.grouped:
            return self.moe.branches[number](rows)
        own = self.moe.branches
        hidden = torch.relu(rows @ own.weight_in[number] + own.bias_in[number])
        return hidden @ own.weight_out[number] + own.bias_out[number]

    def loop(self, x):
        cells = x.reshape(-1, WIDTH)
        routes = self.moe.router_fn(cells)
        out = torch.zeros_like(cells)
        for choice in range(2):
            for number in range(4):
                chosen = (routes.ids[:, choice] == number).nonzero()[:, 0]
                found = self.expert(number, cells[chosen]) * routes.weights[chosen, choice][:, None]
                out = out.index_put((chosen,), found, accumulate=True)
        return out.reshape(x.shape)


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "list"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_a_mixture_of_experts_is_its_loop(stacked, compiled):
    layer = Layer(stacked)
    run = anyshape.compile(layer) if compiled else layer
    for shape in ((2, 5), (3, 7), (1, 1), (0, 4), (2, 9)):
        x = torch.randn(*shape, WIDTH, requires_grad=True)
        ours, expected = run(x), layer.loop(x)
        torch.testing.assert_close(ours, expected)
        if 0 in shape:
            continue
        for mine, theirs in zip(*(torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
                                  for y in (ours, expected)), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dims", "shape", "cell"), [
    ((0, 1), None, (6, 8)), ((0,), None, (4, 6, 8)), ((1, 0), None, (6, 8)), ((0, 2, 3), None, (4,)),
    ((0, 2, 3), (1, 4, 3, 2), (1, 4, 3, 2)), ((-1,), None, (2, 4, 6)), ((3, 0), (2, 4, 6, 4), (2, 4, 6, 4)),
    ((0, 1, 2, 3), None, ()), ((2,), (2, 4, 1, 8), (2, 4, 1, 8)),
], ids=str)
def test_cells_are_restored(dims, shape, cell):
    x = torch.arange(2 * 4 * 6 * 8.0).reshape(2, 4, 6, 8)
    cells = route.annotate_cell(x, dims, shape)
    assert tuple(cells.shape[1:]) == cell
    assert torch.equal(route.restore(cells, x, dims, shape), x)


def test_a_patch_is_a_block_and_may_grow():
    x = torch.arange(2 * 1 * 4 * 6).reshape(2, 1, 4, 6)
    cells = route.annotate_cell(x, (0, 2, 3), (1, 1, 2, 3))
    assert torch.equal(cells[1], x[:1, :, :2, 3:])
    larger = cells.repeat_interleave(2, -1).repeat_interleave(2, -2)
    expected = x.repeat_interleave(2, -1).repeat_interleave(2, -2)
    assert torch.equal(route.restore(larger, x, (0, 2, 3), (1, 1, 2, 3)), expected)


@pytest.mark.parametrize(("dims", "shape"), [
    ((), None), ((0, 0), None), ((4,), None), ((0, -4), None), ((0,), (1, 4)), ((0,), (1, 2, 6, 8)),
    ((2,), (2, 4, 4, 8)), ((2,), (2, 4, 0, 8)),
], ids=str)
def test_cells_that_do_not_fit(dims, shape):
    with pytest.raises(anyshape.AnyShapeError) as error:
        route.annotate_cell(torch.zeros(2, 4, 6, 8), dims, shape)
    assert error.value.why and error.value.do


def scale(number):
    return lambda rows: rows * (number + 2)


def by_hand(x, ids, weights, combine, drop, factors):
    """What a router means, cell by cell."""
    out = []
    for cell, own, shares in zip(x, ids.tolist(), weights, strict=True):
        taken = [(factors[branch], share) for branch, share in zip(own, shares, strict=True) if branch >= 0]
        if not taken:
            out.append(cell * (drop == "identity"))
        elif combine == "first":
            out.append(cell * taken[0][0] * taken[0][1])
        else:
            total = sum(cell * factor * share for factor, share in taken)
            out.append(total / len(taken) if combine == "mean" else total)
    return torch.stack(out) if out else x


@pytest.mark.parametrize("combine", ["sum", "mean", "first"])
@pytest.mark.parametrize("drop", ["zero", "identity"])
@pytest.mark.parametrize("weighted", [True, False])
def test_combine_and_drop(combine, drop, weighted):
    torch.manual_seed(1)
    router = route.Router(lambda cells, ids, weights: route.Routes(ids, weights), [scale(n) for n in range(3)],
                          combine=combine, drop=drop)
    for count in (0, 1, 7, 40):
        x, ids = torch.randn(count, 5), torch.randint(-1, 3, (count, 2))
        weights = torch.rand(count, 2) if weighted else None
        found = router(x, ids, weights)
        expected = by_hand(x, ids, torch.ones(count, 2) if weights is None else weights, combine, drop, [2, 3, 4])
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_one_choice_of_any_integer_type(dtype):
    ids = torch.tensor([2, 0, 1, 1, 2], dtype=dtype)
    router = route.Router(lambda cells: ids, [scale(n) for n in range(3)])
    assert router(torch.ones(5, 1))[:, 0].tolist() == [4, 2, 3, 3, 4]


def test_several_tensors_by_one_decision():
    router = route.Router(lambda a, b: route.Routes((a[:, 0] > 0).long()),
                          [lambda a, b: (a + 1, b.flatten(1).sum(1)), lambda a, b: (a * 2, b[:, 0, 0])])
    a, b = torch.randn(6, 3), torch.randn(6, 2, 2)
    chosen = a[:, 0] > 0
    first, second = router((a, b))
    torch.testing.assert_close(first, torch.where(chosen[:, None], a * 2, a + 1))
    torch.testing.assert_close(second, torch.where(chosen, b[:, 0, 0], b.flatten(1).sum(1)))


def test_routes_can_be_given():
    router = route.Router(lambda cells: 1 / 0, [scale(0), scale(1)])
    found = router(torch.ones(3, 1), routes=route.Routes(torch.tensor([1, 0, -1])))
    assert found[:, 0].tolist() == [3, 2, 0]


@pytest.mark.parametrize(("decide", "words"), [
    (lambda cells: torch.full((len(cells),), 3), "branch 3 of 3"),
    (lambda cells: torch.full((len(cells),), -2), "branch -2 of 3"),
    (lambda cells: torch.zeros(len(cells) + 1, dtype=torch.long), "for 5 cells"),
    (lambda cells: cells > 0, "torch.bool"),
    (lambda cells: route.Routes(torch.zeros(len(cells), dtype=torch.long), torch.ones(1)), "weights of shape"),
    (lambda cells: None, "NoneType"),
], ids=["beyond", "below", "number", "mask", "weights", "nothing"])
def test_wrong_routes_are_refused_before_a_branch_runs(decide, words):
    ran = []
    router = route.Router(decide, [lambda rows: ran.append(1) or rows] * 3)
    with pytest.raises(anyshape.AnyShapeError, match=words) as error:
        router(torch.zeros(4, 2))
    assert error.value.why and error.value.do and not ran


def test_branches_whose_results_do_not_fit():
    router = route.Router(lambda cells: torch.tensor([0, 1]), [nn.Linear(2, 3), nn.Linear(2, 4)])
    with pytest.raises(anyshape.AnyShapeError, match="do not fit together") as error:
        router(torch.zeros(2, 2))
    assert "branch 1" in error.value.why
    one = route.Router(lambda cells: torch.tensor([0, 1]), [nn.Identity(), lambda rows: (rows, rows)])
    with pytest.raises(anyshape.AnyShapeError, match="do not fit together"):
        one(torch.zeros(2, 2))
    short = route.Router(lambda cells: torch.tensor([0, 1]), [nn.Identity(), lambda rows: rows.sum(0)])
    with pytest.raises(anyshape.AnyShapeError, match="do not fit together"):
        short(torch.zeros(2, 2))


def test_autocast_casts_products_of_stacked_branches():
    layer = Layer(stacked=True)
    run = anyshape.compile(layer)
    experts = layer.moe.branches
    x = torch.randn(2, 6, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        assert experts(x[0], torch.tensor([1, 2, 4, 6], dtype=torch.int32)).dtype == torch.bfloat16
        ours, expected = run(x), layer(x)
    assert ours.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(ours, expected, rtol=0.05, atol=0.02)
    torch.testing.assert_close(layer(x), layer.loop(x))


def test_cells_that_are_matrices_go_through_stacked_branches():
    torch.manual_seed(0)
    experts = route.Experts(3, 8, 16, 4, gated=True, activation="silu")
    rows, ends = torch.randn(6, 5, 8), torch.tensor([2, 2, 5], dtype=torch.int32)
    found = experts(rows, ends)
    flat = torch.cat([experts(rows[:, place], ends)[:, None] for place in range(5)], 1)
    torch.testing.assert_close(found[:5], flat[:5])
    assert found.shape == (6, 5, 4)
