"""Static cell flow: against the sparsity of Jacobians on random programs, relations of routers, row-wise branches."""
from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anyshape import route
from anyshape.route.flow import unread_arguments
from anyshape.route.flow.capture import capture
from anyshape.route.flow.interpret import interpret, prepare

WIDTH = 8
SHAPE = (4, 4, 6)


class Program(nn.Module):
    """A random chain of operators over one tensor [4, 4, 6]; each keeps it small."""

    def __init__(self, seed: int, kinds: str) -> None:
        super().__init__()
        self.draw = random.Random(seed)
        table = {"move": MOVES, "all": {**MOVES, **MIXES}}[kinds]
        self.steps = [(name, self.draw.randrange(1 << 20)) for name in self.draw.choices(sorted(table), k=7)]
        self.table = table

    def forward(self, x):
        for name, seed in self.steps:
            x = self.table[name](x, random.Random(seed))
        return x


def permuted(x, draw):
    return x.permute(draw.sample(range(x.dim()), x.dim()))


def reshaped(x, draw):
    sizes = [size for size in (2, 3, 4, 6, 8) if x.numel() % size == 0] or [1]
    return x.reshape(draw.choice(sizes), -1)


def sliced(x, draw):
    dim = draw.randrange(x.dim())
    return x.narrow(dim, 0, x.shape[dim] - 1) if x.shape[dim] > 2 else x


def indexed(x, draw):
    dim = draw.randrange(x.dim())
    return x.index_select(dim, torch.tensor([draw.randrange(x.shape[dim]) for _ in range(min(x.shape[dim], 6))]))


def numbers(draw, *shape):
    """A constant that the capture lifts."""
    return torch.tensor([draw.uniform(0.1, 1) for _ in range(math.prod(shape))]).reshape(shape)


def places(draw, most, shape):
    return torch.tensor([draw.randrange(most) for _ in range(math.prod(shape))]).reshape(shape)


def selection(x, draw):
    """A product with a constant permutation."""
    matrix = torch.eye(x.shape[-1])[draw.sample(range(x.shape[-1]), x.shape[-1])]
    return x @ matrix


def shuffled(x, draw):
    x = x.reshape(-1)
    return F.pixel_shuffle(x[:len(x) // 8 * 8].reshape(1, 4, 2, -1), 2) if len(x) >= 8 else x


MOVES = {
    "permute": permuted, "reshape": reshaped, "slice": sliced, "index": indexed, "product": selection,
    "shuffle": shuffled, "flip": lambda x, draw: x.flip(draw.randrange(x.dim())),
    "roll": lambda x, draw: x.roll(1 + draw.randrange(3), draw.randrange(x.dim())),
    "pad": lambda x, draw: F.pad(x, (1, 0)) if x.numel() < 100 else x,
    "cat": lambda x, draw: torch.cat([x, x.flip(0)], draw.randrange(x.dim())) if x.numel() < 60 else x,
    "stack": lambda x, draw: torch.stack([x, x.roll(1, 0)], -1)[..., draw.randrange(2)],
    "windows": lambda x, draw: x.reshape(-1).unfold(0, 4, 3) if x.numel() > 16 else x,
    "tril": lambda x, draw: x.tril() if x.dim() > 1 else x,
    "gather": lambda x, draw: x.gather(0, places(draw, x.shape[0], x.shape)),
    "where": lambda x, draw: torch.where(numbers(draw, *x.shape) < 0.5, x, x.flip(0)),
}
MIXES = {
    "sin": lambda x, draw: x.sin() + 0.3, "sum": lambda x, draw: x - 0.5 * x.sum(draw.randrange(x.dim()), keepdim=True),
    "softmax": lambda x, draw: x.softmax(draw.randrange(x.dim())),
    "cumsum": lambda x, draw: x.cumsum(draw.randrange(x.dim())),
    "norm": lambda x, draw: F.layer_norm(x, x.shape[-1:]),
    "linear": lambda x, draw: F.linear(x, numbers(draw, 5, x.shape[-1])),
    "sparse": lambda x, draw: x @ numbers(draw, x.shape[-1], 4).tril(),
    "conv": lambda x, draw: F.conv1d(x.reshape(1, 2, -1), torch.ones(4, 1, 3), stride=2, padding=1, groups=2)
    if x.numel() % 2 == 0 else x,
    "transposed": lambda x, draw: F.conv_transpose1d(x.reshape(1, 1, -1), torch.ones(1, 1, 3), stride=2, padding=1)
    if x.numel() < 40 else x,
    "attention": lambda x, draw: F.scaled_dot_product_attention(*[x.reshape(1, x.shape[0], -1)] * 3, is_causal=True),
    "max": lambda x, draw: F.max_pool1d(x.reshape(1, 1, -1), 3, 2, 1),
    "adaptive": lambda x, draw: F.adaptive_avg_pool1d(x.reshape(1, 1, -1), 5),
    "square": lambda x, draw: (y := x.reshape(x.shape[0], -1)) @ y.transpose(0, 1),
    "topk": lambda x, draw: x.topk(min(2, x.shape[-1]), -1)[0],
    "resize": lambda x, draw: F.interpolate(x.reshape(1, 1, -1), scale_factor=2) if x.numel() < 50 else x,
    "both": lambda x, draw: x * x.flip(0),
}


def dependences(model: nn.Module, x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per result (what the analysis allows, what the Jacobian shows): [results, elements of x], each element a cell."""
    shared = prepare(capture(model, (x,)))
    (node,) = shared.program.inputs
    found = interpret(shared, {node: torch.arange(x.numel(), dtype=torch.int32).reshape(x.shape)})
    jacobians = torch.autograd.functional.jacobian(model, x)
    pairs = []
    for output, jacobian in zip(shared.program.outputs, jacobians, strict=True):
        owners = found[output].owners.expand(found[output].shape).reshape(-1).tolist()
        allowed = torch.zeros(len(owners), x.numel(), dtype=torch.bool)
        for place, owner in enumerate(owners):
            cells = shared.sets.cells(owner)
            allowed[place, range(x.numel()) if cells is None else sorted(cells)] = True
        pairs.append((allowed, jacobian.reshape(len(owners), -1) != 0))
    return pairs


class Programs(nn.Module):
    """Several programs of one input, so that one capture serves them all."""

    def __init__(self, programs):
        super().__init__()
        self.programs = programs

    def forward(self, x):
        return tuple(program(x) for program in self.programs)


def test_data_movement_is_exact():
    programs = [Program(seed, "move") for seed in range(12)]
    for program, (allowed, shown) in zip(programs, dependences(Programs(programs), torch.randn(SHAPE)), strict=True):
        assert torch.equal(allowed, shown), program.steps


def test_no_dependence_is_missed():
    programs = [Program(seed, "all") for seed in range(16)]
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    for program, (allowed, shown) in zip(programs, dependences(Programs(programs), x), strict=True):
        assert not bool((shown & ~allowed).any()), program.steps


def test_each_rule_misses_nothing_and_is_not_top():
    programs = [lambda x, step=MIXES[name]: step(x, random.Random(3)) for name in MIXES]
    for name, (allowed, shown) in zip(MIXES, dependences(Programs(programs), torch.randn(4, 6)), strict=True):
        assert not bool((shown & ~allowed).any()), name
        if name not in ("square", "topk", "max", "attention"):  # what they choose, and a softmax of one, have no slope
            assert torch.equal(allowed, shown), name


# ---- routers


def mlp(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 12), nn.ReLU(), nn.Linear(12, width))


def layer(experts: bool = False, k: int = 1, branches: list[nn.Module] | None = None,
          gate: nn.Module | None = None) -> route.Router:
    own = route.Experts(3, WIDTH, 12) if experts else branches or [mlp() for _ in range(3)]
    return route.Router(route.top_k(gate or nn.Linear(WIDTH, 3), k=k), own)


class Two(nn.Module):
    """Two routers of tokens [6, 8] with something between them."""

    def __init__(self, between, first=None, second=None):
        super().__init__()
        self.a, self.b = first or layer(), second or layer(experts=True, k=2)
        self.between = between

    def forward(self, x):
        return self.b(self.between(self.a(x)))


def relation(between, **own) -> route.Relation:
    return route.analyze(Two(between, **own).eval(), torch.randn(6, WIDTH)).between("a", "b")


PERMUTATION = torch.eye(6)[[2, 0, 1, 5, 3, 4]]


def test_relations_of_two_routers():
    assert relation(lambda x: x * 2).kind == "identity"
    assert relation(nn.LayerNorm(WIDTH)).kind == "identity"
    moved = relation(lambda x: x.reshape(2, 3, WIDTH).roll(1, 1).reshape(6, WIDTH))
    assert moved.kind == "permutation" and moved.map.tolist() == [2, 0, 1, 5, 3, 4]
    product = relation(lambda x: torch.tensor(PERMUTATION.tolist()) @ x)
    assert product.kind == "permutation" and product.map.tolist() == [2, 0, 1, 5, 3, 4]
    part = relation(lambda x: torch.cat([x[2:4], torch.zeros(1, WIDTH)]))
    assert part.kind == "subset" and part.map.tolist() == [2, 3, -1]
    pairs = relation(lambda x: (y := x.reshape(3, 2, WIDTH)).sum(1) + y[:, 0])
    assert pairs.kind == "mixed" and pairs.sets == ({0, 1}, {2, 3}, {4, 5})
    assert relation(lambda x: torch.randn(6, WIDTH)).kind == "none"


def test_branches_that_join_rows_make_what_follows_of_any_cell():
    norm = nn.BatchNorm1d(WIDTH)
    seen = relation(nn.Identity(), first=layer(branches=[mlp(), norm, mlp()]))
    assert seen.kind == "identity"  # the sources are what comes out of a
    gate = nn.Linear(WIDTH, 3)
    with torch.no_grad():
        gate.bias.copy_(torch.tensor([0.0, 99.0, 0.0]))  # while it trains, the norm refuses a single row
    model = Two(nn.Identity(), first=layer(branches=[mlp(), norm, mlp()], gate=gate))
    assert route.analyze(model.eval(), torch.randn(6, WIDTH)).between("input", "b").kind == "identity"
    mixed = route.analyze(model.train(), torch.randn(6, WIDTH)).between("input", "b")
    assert mixed.kind == "mixed" and mixed.sets == (None,) * 6


class Rolled(nn.Module):
    def forward(self, rows):
        return rows.roll(1, 0)


def test_a_branch_that_moves_rows_is_not_trusted():
    flow = route.analyze(Two(nn.Identity(), first=layer(branches=[Rolled(), mlp(), mlp()])), torch.randn(6, WIDTH))
    assert not flow.keeps_rows_apart("a") and flow.keeps_rows_apart("b")
    assert flow.between("input", "b").sets == (None,) * 6


class Nested(nn.Module):
    """A router in a branch of another, as in an early exit."""

    def __init__(self, before):
        super().__init__()
        self.inner, self.before = layer(), before

    def forward(self, rows):
        return self.inner(self.before(rows))


def test_routers_within_branches():
    def flow(before):
        model = Two(nn.Identity(), second=layer(branches=[Nested(before), mlp(), mlp()]))
        return route.analyze(model, torch.randn(6, WIDTH))

    plain = flow(mlp())
    inner = "b.branches.0.inner"
    assert set(plain.routers) == {"a", "b", inner}
    within = plain.between("a", inner)
    assert within.kind == "subset" and within.sets == tuple({place} for place in range(6))
    assert not within.apart and within.inside == ("b",)
    own = plain.between("b", inner)
    assert own.kind == "subset" and own.sets == tuple({place} for place in range(6)) and own.inside == ("b",)
    assert plain.between(inner, "output").inside == ("b",)
    assert plain.between("input", "output").kind == "identity"
    rolled = flow(lambda rows: rows.roll(1, 0))
    assert rolled.between("a", inner).kind == "mixed" and not rolled.keeps_rows_apart("b")
    first = flow(lambda rows: rows + rows[:1])
    assert first.between("a", inner).sets == (None,) * 6


def test_a_decision_over_all_cells_is_a_dependence():
    def choose(cells):
        return route.Routes((cells.sum(1) > cells.sum(1).mean()).long())

    model = Two(nn.Identity(), second=route.Router(choose, [mlp(), mlp()]))
    flow = route.analyze(model, torch.randn(6, WIDTH))
    assert flow.between("a", "b", decisions=False).kind == "identity"
    assert flow.between("a", "b").kind == "mixed"
    assert flow.between("a", "output").kind == "mixed"


@torch.library.custom_op("anyshape_test::opaque_double", mutates_args=())
def opaque_double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@opaque_double.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("anyshape_test::opaque_sum", mutates_args=())
def opaque_sum(x: torch.Tensor) -> torch.Tensor:
    return x + x.sum(0)


@opaque_sum.register_fake
def _(x):
    return torch.empty_like(x)


def test_unknown_operators_are_probed_and_not_believed():
    flow = route.analyze(Two(opaque_double), torch.randn(6, WIDTH))
    strict = flow.between("a", "b")
    assert strict.kind == "mixed" and "does not refute" in strict.reason and not strict.apart
    assumed = flow.between("a", "b", probes=True)
    assert assumed.kind == "identity" and assumed.assumed and not assumed.apart
    flow = route.analyze(Two(opaque_sum), torch.randn(6, WIDTH))
    assert flow.between("a", "b", probes=True).kind == "mixed"
    assert "refutes" in flow.between("a", "b").reason
    assert route.branch_independent(Function(opaque_double), torch.randn(4, WIDTH)).answer == "unknown"


def test_what_cannot_be_captured_is_mixed_with_its_reason():
    flow = route.analyze(Two(lambda x: x if x.sum() > 0 else -x), torch.randn(6, WIDTH))
    assert flow.between("a", "b").kind == "mixed" and "torch.export" in flow.reason
    flow = route.analyze(Two(lambda x: x * x.sum().item()), torch.randn(6, WIDTH))
    assert flow.between("a", "b").kind == "mixed" and "is data" in flow.reason


def test_a_router_that_is_not_there_is_named():
    flow = route.analyze(Two(nn.Identity()), torch.randn(6, WIDTH))
    with pytest.raises(route.core.cells.InputError, match="is no router"):
        flow.between("a", "c")


# ---- row-wise


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("table", torch.randn(64, WIDTH))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        return self.function(x)


class Table(Function):
    def forward(self, x):
        return x + self.table[:x.shape[0]]


class Parts(Function):
    def __init__(self, function):
        super().__init__(function)
        self.weight = nn.Parameter(torch.randn(64, 2, WIDTH))

    def forward(self, x):
        return x + self.weight[:x.shape[0]].unbind(1)[1]


class Writes(Function):
    def forward(self, x):
        self.seen.add_(1)
        return x


ROWWISE = {
    "mlp": (mlp(), "yes"), "router": (layer(), "yes"), "experts": (layer(experts=True, k=2), "yes"),
    "batch norm": (nn.BatchNorm1d(WIDTH).eval(), "yes"), "dropout": (nn.Dropout(0.5).eval(), "yes"),
    "ones": (Function(lambda x: x + torch.ones_like(x)), "yes"),
    "zeros": (Function(lambda x: torch.cat([x, x.new_zeros(x.shape[0], 3)], 1)), "yes"),
    "batch norm in training": (nn.BatchNorm1d(WIDTH), "unknown"),
    "dropout in training": (nn.Dropout(0.5), "unknown"),
    "mean": (Function(lambda x: x - x.mean(0)), "no"),
    "first": (Function(lambda x: x + x[:1]), "no"),
    "roll": (Function(lambda x: x.roll(1, 0)), "no"),
    "flip": (Function(lambda x: x.flip(0)), "no"),
    "count": (Function(lambda x: x / x.shape[0]), "unknown"),
    "position": (Function(lambda x: x + torch.arange(x.shape[0])[:, None]), "unknown"),
    "far row": (Function(lambda x: x + x[6:7].sum(0) if x.shape[0] > 6 else x), "unknown"),
    "parts of a table": (Parts(None), "unknown"),
    "table": (Table(None), "unknown"), "writes": (Writes(None), "unknown"),
    "one row": (Function(lambda x: x.sin() if x.shape[0] == 1 else x.cos()), "unknown"),
    "reads values": (Function(lambda x: x if float(x.sum()) > 0 else -x), "unknown"),
    "drops rows": (Function(lambda x: x[1:]), "unknown"),
}


@pytest.mark.parametrize("name", ROWWISE)
def test_row_wise_is_proved_or_refused(name):
    module, answer = ROWWISE[name]
    verdict = route.branch_independent(module, torch.randn(4, WIDTH))
    assert verdict.answer == answer, verdict
    assert bool(verdict) is (answer == "yes") and bool(verdict.reason) is (answer != "yes")


class Few(nn.Module):
    """Reads its second argument where there are many rows."""

    def forward(self, x, y, z):
        return x + z if x.shape[0] <= 6 else x + y


def test_arguments_that_are_not_read_are_proved_so_for_any_number_of_rows():
    rows = [torch.randn(2, WIDTH)] * 3
    assert unread_arguments(Few(), *rows) == frozenset()
    second = nn.Module()
    second.forward = lambda x, y, z: x * z
    assert unread_arguments(second, *rows) == {1}


def test_convolutions_of_samples_are_row_wise_and_modules_of_a_flow_are_asked_by_name():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
                          nn.Flatten(), nn.Linear(16, 3)).eval()
    flow = route.analyze(model, torch.randn(2, 3, 6, 6))
    stacked = Two(nn.Identity(), second=route.Router(lambda x: (x.sum(1) > 0).long(), route.stack([mlp(), mlp()])))
    assert route.analyze(stacked, torch.randn(6, WIDTH)).between("a", "output").kind == "identity"
    assert flow.independent("") and flow.independent(model[0]) and flow.independent("4")
    assert all(apart for *_, apart in flow.operators())
