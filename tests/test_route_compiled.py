"""Routing, compiled: one program for every load and every number of cells, without a call of PyTorch."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import anyshape
import plan_interpreter
from anyshape import route
from anyshape.backend import targets
from anyshape.base import counters
from anyshape.plan.ir.program import ExternStep
from anyshape.route.core import operators as ops
from anyshape.runtime.torch_ops.fallbacks import routing_by_torch
from sampling import some

WIDTH, BRANCHES = 16, 5
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # the gate is f32
IDS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch.compiler.reset()


class Layer(nn.Module):
    """A mixture of experts whose gate drops choices of small weight, where `least` is above 0."""

    def __init__(self, dtype=torch.float32, k=2, least=0.0, gated=False, bias=True, combine="sum"):
        super().__init__()
        self.gate = nn.Linear(WIDTH, BRANCHES, dtype=dtype)
        self.decide, self.least = route.top_k(self.gate, k=k), least
        self.moe = route.Router(self.choose, route.Experts(BRANCHES, WIDTH, 24, gated=gated, bias=bias, dtype=dtype),
                                combine=combine)

    def choose(self, cells):
        found = self.decide(cells)
        return route.Routes(torch.where(found.weights < self.least, -1, found.ids), found.weights) if self.least \
            else found

    def forward(self, x):
        return self.moe(x)


def close(found, wanted, bound):
    scale = float(wanted.detach().abs().amax()) if wanted.numel() else 1.0
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound * max(scale, 1.0))


def calls(run):
    """The operators that PyTorch runs."""
    return [step.target for program in run.programs for step in program.compiled.plan.steps
            if isinstance(step, ExternStep)]


SOME = ({}, {"least": 0.55, "gated": True, "bias": False}, {"k": 1, "least": 9.0}, {"k": 4, "combine": "mean"})


@pytest.mark.parametrize(("dtype", "options"), [*((torch.float32, one) for one in SOME), (torch.float64, SOME[1]),
                                                (torch.bfloat16, SOME[0]), (torch.float16, SOME[3])], ids=str)
def test_one_pair_of_programs_for_every_number_of_cells(dtype, options):
    layer = Layer(dtype, **options)
    fast = anyshape.compile(layer, strict=True, defer=False)
    before = counters.stats()
    for cells in (7, 1, 0, 40):
        x = torch.randn(cells, WIDTH, dtype=dtype, requires_grad=True)
        found, wanted = fast(x), layer(x)
        close(found, wanted, BOUNDS[dtype])
        change = torch.randn_like(wanted)
        inputs = [x, *layer.parameters()]
        for mine, theirs in zip(torch.autograd.grad(found, inputs, change), torch.autograd.grad(wanted, inputs, change),
                                strict=True):
            close(mine, theirs, 3 * BOUNDS[dtype])
    after = counters.stats()
    assert len(fast.programs) == 2 and not calls(fast)
    assert after["extern_calls"] == before["extern_calls"] and after["eager_calls"] == before["eager_calls"]


def test_branches_of_their_own_with_loads_of_0_and_1():
    layer = nn.Module()
    layer.gate = nn.Linear(WIDTH, 8)
    layer.moe = route.Router(route.top_k(layer.gate, k=2), [
        nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, WIDTH)) for _ in range(8)])
    fast = anyshape.compile(layer.moe, strict=True)
    with torch.no_grad():
        fast(torch.randn(40, WIDTH))
        before = counters.stats()
        for cells in (3, 1, 0, 12):
            x = torch.randn(cells, WIDTH)
            torch.testing.assert_close(fast(x), layer.moe(x))
    after = counters.stats()
    assert after["programs"] == before["programs"] and after["eager_calls"] == before["eager_calls"]


def sent(x, ids, weights, layer):
    return layer.moe(x, routes=route.Routes(ids, weights))


@pytest.mark.parametrize("dtype", IDS, ids=str)
def test_every_load_and_every_dtype_of_ids(dtype):
    layer = Layer()
    fast = anyshape.compile(lambda x, ids, weights: sent(x, ids, weights, layer), strict=True)
    for cells in (9, 1, 0, 30):
        x, weights = torch.randn(cells, WIDTH), torch.rand(cells, 3)
        for ids in (torch.randint(0, BRANCHES, (cells, 3)), torch.full((cells, 3), 3), torch.full((cells, 3), -1),
                    torch.randint(-1, 2, (cells, 3))):
            if dtype == torch.uint8:
                ids = ids.clamp(min=0)
            torch.testing.assert_close(fast(x, ids.to(dtype), weights), sent(x, ids, weights, layer))
    assert len(fast.programs) == 1 and not calls(fast)


@pytest.mark.parametrize("second", [False, True], ids=["native", "plain Python"])
def test_a_choice_of_no_branch_is_an_error_and_nothing_is_written(second, monkeypatch):
    if second:
        monkeypatch.setitem(targets.TARGETS, "plain Python", plan_interpreter.__name__)
        monkeypatch.setattr(targets, "DEFAULT", "plain Python")
    layer = Layer()

    def count(x, ids, weights, loads):
        result = sent(x, ids, weights, layer)
        loads.add_(1)
        return result

    fast = anyshape.compile(count, strict=True)
    x, weights, loads = torch.randn(6, WIDTH), torch.rand(6, 2), torch.zeros(3)
    good = torch.randint(-1, BRANCHES, (6, 2))
    torch.testing.assert_close(fast(x, good, weights, loads), sent(x, good, weights, layer))
    for wrong in (-2, BRANCHES):
        ids = good.clone()
        ids[3, 1] = wrong
        with pytest.raises(IndexError) as error:
            fast(x, ids, weights, loads)
        assert isinstance(error.value, anyshape.AnyShapeError) and error.value.why and error.value.do
    assert torch.equal(loads, torch.ones(3))


def test_operators():
    ids = torch.randint(-1, 3, (11, 12))
    order, inverse, ends = ops.route_plan(ids, 3)
    cells, rows = torch.randn(11, 2, 5), torch.randn(132, 2, 5)
    flat, weight = rows.flatten(1), torch.randn(3, 10, 4)
    runs = {
        "dispatch": (lambda x: ops.dispatch(x, order, ends, 12), cells),
        "combine": (lambda x: ops.combine(x, inverse, ends, None, 12), rows),
        "combine_weight_grad": (lambda x: ops.combine_weight_grad(cells, x, inverse, ends, 12), rows),
        "grouped_linear": (lambda x: ops.grouped_linear(x, weight, ends, None), flat),
        "grouped_weight_grad": (lambda x: ops.grouped_weight_grad(x, flat[:, :3], ends), flat),
        "grouped_sum": (lambda x: ops.grouped_sum(x, ends), rows),
        "grouped_take": (lambda x: ops.grouped_take(x, ends, 132), cells[:3]),
        "grouped_take of numbers": (lambda x: ops.grouped_take(x, ends, 132), torch.randn(3)),
    }
    for name, (run, x) in runs.items():
        given = x.bfloat16() if name == "grouped_sum" else x
        fast = anyshape.compile(run, strict=True)
        close(fast(given), run(given), 1e-5)
        assert not calls(fast), name


LINES = (1, 2, 3, 8, 64, 131, 256)


@pytest.mark.parametrize("dtype", some([*BOUNDS, *IDS], 2), ids=str)
def test_top_k_chooses_as_pytorch_does_among_equals(dtype):
    for count in LINES if dtype == torch.float32 else (3, 131):
        for k in {1, 2, 16 if count > 16 else count}:
            if k > count:
                continue
            torch.compiler.reset()
            fast = anyshape.compile(Choice(count, k), strict=True)
            for x in (torch.randn(50, count) * 9, torch.randint(0, 3, (50, count)).float(), special(50, count)):
                given = x.to(dtype) if dtype.is_floating_point else x.nan_to_num(0, 1, 2).clamp(0, 9).to(dtype)
                values, places = fast(given)
                wanted = torch.topk(given, k)
                assert torch.equal(places, wanted[1])
                assert torch.equal(values.nan_to_num(1), wanted[0].nan_to_num(1))
            assert not calls(fast)


class Choice(nn.Module):
    def __init__(self, count, k):
        super().__init__()
        self.count, self.k = count, k

    def forward(self, x):
        return torch.topk(x.view(-1, self.count), self.k)


def special(lines, count):
    """Numbers that repeat, zeros of both signs, infinities and NaN."""
    x = torch.randint(-2, 3, (lines, count)).float()
    for value in (-0.0, float("inf"), -float("inf"), float("nan")):
        x[torch.rand(lines, count) < 0.15] = value
    return x


def test_top_k_that_no_routine_does_is_pytorchs():
    x = torch.randn(4, 300)
    for run in (lambda x: torch.topk(x, 2, dim=0), lambda x: torch.topk(x, 2, largest=False),
                lambda x: torch.topk(x.view(-1, 300), 2), lambda x: torch.topk(x.view(-1, 100), 17)):
        fast = anyshape.compile(run, strict=True)
        assert torch.equal(fast(x)[1], run(x)[1])
        assert calls(fast) == ["aten.topk.default"]


def test_groups_of_rows_end_as_slices_do():
    for ends in ([2, 5, 7], [0, 0, 0], [3, 1, 9], [-2, 6, 2], [7, 7, 7]):
        given = torch.tensor(ends)
        (groups,) = routing_by_torch("segment_ids", {"size": 7}, given)
        fast = anyshape.compile(lambda x, e: ops.grouped_take(x, e, 7), strict=True)
        lines = torch.randn(3, 2)
        wanted = torch.cat([lines, torch.zeros(1, 2)])[groups]
        assert torch.equal(fast(lines, given.int()), wanted) and torch.equal(fast(lines, given), wanted)


def test_train_steps_under_a_limit():
    def loss(model, x):
        return model(x).square().mean()

    layers = [Layer(), Layer()]
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [torch.optim.AdamW(one.parameters(), fused=True) for one in layers]
    fast = anyshape.train_step(layers[0], loss, optimizers[0], memory_limit="4MB", strict=True)
    for cells in (30, 7, 1, 64):
        x = torch.randn(cells, WIDTH)
        found = fast(x)
        wanted = loss(layers[1], x)
        wanted.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        torch.testing.assert_close(found, wanted)
    for mine, theirs in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_the_reference_agrees():
    layer = Layer(least=0.55)
    fast = anyshape.compile(layer, strict=True, check=2)
    for cells in (12, 0, 3):
        x = torch.randn(cells, WIDTH, requires_grad=True)
        found = fast(x)
        torch.testing.assert_close(found, layer(x))
        found.sum().backward()


def test_the_second_runner_agrees(monkeypatch):
    monkeypatch.setitem(targets.TARGETS, "plain Python", plan_interpreter.__name__)
    monkeypatch.setattr(targets, "DEFAULT", "plain Python")
    layer = Layer(least=0.55)
    fast = anyshape.compile(layer, strict=True)
    for cells in (12, 0, 3):
        x = torch.randn(cells, WIDTH)
        torch.testing.assert_close(fast(x), layer(x))
    assert isinstance(fast.programs[0].executable.runner, plan_interpreter.Runner)


def test_an_exported_program():
    layer = Layer()
    cells = torch.export.Dim("cells", min=2, max=4096)
    exported = torch.export.export(layer, (torch.randn(6, WIDTH),), dynamic_shapes={"x": {0: cells}})
    fast = anyshape.compile(exported)
    before = counters.stats()["extern_calls"]
    for count in (6, 2, 33):
        x = torch.randn(count, WIDTH)
        torch.testing.assert_close(fast(x), layer(x))
    assert counters.stats()["extern_calls"] == before


def test_a_layer_is_few_steps():
    """Gate, choice, plan, gather, two products and what comes after each; the backward sorts nothing."""
    layer = Layer()
    fast = anyshape.compile(layer, strict=True)
    with torch.no_grad():
        fast(torch.randn(9, WIDTH))
    steps = [line.split("(")[0].split()[0] for line in map(str, named(fast.programs[0]))]
    assert steps == ["matmul", "kernel", "topk", "kernel", "route_plan", "kernel", "grouped", "segment_ids", "kernel",
                     "grouped", "kernel"]
    torch.compiler.reset()
    fast = anyshape.compile(layer, strict=True)
    fast(torch.randn(9, WIDTH, requires_grad=True)).sum().backward()
    backward = named(next(program for program in fast.programs if "backward" in program.name))
    assert "route_plan" not in backward and "topk" not in backward and len(backward) <= 20


def test_scores_are_gone_when_experts_run():
    """The weight of a choice is taken where the choice is made, not where branches' results come together."""
    gate, moe = nn.Linear(WIDTH, 64), route.Experts(64, WIDTH, 24)

    def forward(x):
        likely = torch.softmax(gate(x), -1)
        ids = likely.argmax(-1)
        return route.Router(lambda cells: route.Routes(ids, likely.gather(1, ids[:, None])[:, 0]), moe)(x)

    fast, x = anyshape.compile(forward, strict=True), torch.randn(9, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), forward(x))
    plan = fast.programs[0].compiled.plan
    first = named(fast.programs[0]).index("grouped")
    [scores] = [one for one in plan.buffers if one.name == "matmul"]
    assert scores.last < first


def named(program):
    return [getattr(step, "op", type(step).__name__.removesuffix("Step").lower())
            for step in program.compiled.plan.steps]
