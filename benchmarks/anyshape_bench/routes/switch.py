"""Benchmark cases of a Switch Transformer encoder (Fedus et al., 2021): top-1 of 8 to 256 experts in each block.

Sizes are those of Switch-base, d_model 768 and d_ff 3072, divided by 12 for two cores.
"""
from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyshape import route
from anyshape_bench.routes.case import Case, Forms, Inputs
from anyshape_bench.routes.loads import LOADS, routes, steer
from anyshape_bench.routes.names import EAGER, GROUPED, PADDED, ROUTED
from anyshape_bench.routes.weights import stack_weights

EXPERTS, QUICK = (8, 16, 32, 64, 128, 256), ("switch-8-uniform", "switch-32-zipf")
WIDTH, HIDDEN, HEADS, BLOCKS = 64, 256, 4, 2
COMPARED, LARGE = 64, 16  # experts whose memory is compared with other ways'; batches for memory
SIZES = ((4, 128), (4, 120), (4, 128), (3, 100), (2, 128))  # (batch, length); the first two warm up


class Gate(nn.Module):
    """Top-1 with its probability; `steer` [cells, experts] is added where the route is forced."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, experts, bias=False)

    def forward(self, cells: Tensor, steer: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = torch.softmax(self.scores(cells), -1)
        ids = (probabilities + steer).argmax(-1)
        return ids, probabilities.gather(1, ids[:, None])[:, 0]


class Plain(nn.Module):
    """Feed-forward layer of experts, as a loop."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = Gate(experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, WIDTH, bias=False))
            for _ in range(experts))

    def forward(self, x: Tensor, steer: Tensor) -> Tensor:
        cells = x.reshape(-1, WIDTH)
        ids, weights = self.gate(cells, steer)
        out = torch.zeros_like(cells)
        for number, expert in enumerate(self.experts):
            chosen = (ids == number).nonzero()[:, 0]
            out.index_add_(0, chosen, expert(cells[chosen]) * weights[chosen, None])
        return out.reshape(x.shape)


class Routed(nn.Module):
    """Feed-forward layer of experts, as a router."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = Gate(experts)
        self.moe = route.Router(self.gate, route.Experts(experts, WIDTH, HIDDEN, bias=False))

    def forward(self, x: Tensor, steer: Tensor) -> Tensor:
        cells = route.annotate_cell(x, dims=(0, 1))
        return route.restore(self.moe(cells, steer), like=x, dims=(0, 1))


class Padded(nn.Module):
    """Baseline: every expert computes as many rows as the busiest has, in batched products (Tutel, GShard)."""

    def __init__(self, routed: Routed) -> None:
        super().__init__()
        self.gate, self.experts = routed.gate, routed.moe.branches

    def forward(self, x: Tensor, steer: Tensor) -> Tensor:
        cells = x.reshape(-1, WIDTH)
        ids, weights = self.gate(cells, steer)
        mine = F.one_hot(ids, self.experts.branch_count)
        place = (mine.cumsum(0) - 1).gather(1, ids[:, None])[:, 0]
        most = int(mine.sum(0).max())
        rows = cells.new_zeros(self.experts.branch_count, most, WIDTH)
        rows[ids, place] = cells
        hidden = torch.relu(torch.bmm(rows, self.experts.weight_in))
        found = torch.bmm(hidden, self.experts.weight_out)[ids, place]
        return (found * weights[:, None]).reshape(x.shape)


class GroupedMM(nn.Module):
    """Baseline: rows sorted by expert, products by `grouped_mm`."""

    def __init__(self, routed: Routed) -> None:
        super().__init__()
        self.gate, self.experts = routed.gate, routed.moe.branches

    def forward(self, x: Tensor, steer: Tensor) -> Tensor:
        cells = x.reshape(-1, WIDTH)
        ids, weights = self.gate(cells, steer)
        order = ids.argsort(stable=True)
        ends = torch.bincount(ids, minlength=self.experts.branch_count).cumsum(0).int()
        hidden = torch.relu(F.grouped_mm(cells[order], self.experts.weight_in, offs=ends))
        found = F.grouped_mm(hidden, self.experts.weight_out, offs=ends) * weights[order, None]
        return torch.empty_like(found).index_copy_(0, order, found).reshape(x.shape)


class Encoder(nn.Module):
    """Blocks of attention and a layer of experts. x f32 [batch, length, width], steer f32 [blocks, cells, experts]."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2 * len(layers) + 1))
        self.project = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in layers)
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in layers)

    def forward(self, x: Tensor, steer: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x + self.attention(self.norms[2 * number](x), number)
            x = x + layer(self.norms[2 * number + 1](x), steer[number])
        return self.norms[-1](x)

    def attention(self, x: Tensor, number: int) -> Tensor:
        batch, length, _ = x.shape
        heads = self.project[number](x).reshape(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        return self.out[number](found.transpose(1, 2).reshape(x.shape))


def copy_weights(plain: Plain, routed: Routed) -> None:
    """Gives the routed layer the plain one's weights."""
    routed.gate.load_state_dict(plain.gate.state_dict())
    stack_weights(plain.experts, routed.moe.branches)


def forms(experts: int, load: str, times: int = 1) -> Forms:
    """The encoder of this many experts, with routes of a load, batches so many times as large."""
    plain = Encoder([Plain(experts) for _ in range(BLOCKS)])
    layers = [Routed(experts) for _ in range(BLOCKS)]
    routed = Encoder([*layers])
    for one, other in zip(plain.layers, layers, strict=True):
        copy_weights(one, other)  # type: ignore[arg-type]
    same = {name: value for name, value in plain.state_dict().items() if not name.startswith("layers")}
    others = [routed, Encoder([Padded(one) for one in layers]), Encoder([GroupedMM(one) for one in layers])]
    for form in others:
        form.load_state_dict(same, strict=False)
    draw = torch.Generator().manual_seed(experts)
    batches: list[Inputs] = []
    for batch, length in ((times * one, other) for one, other in SIZES):
        ids = torch.stack([routes(load, batch * length, experts, draw) for _ in range(BLOCKS)])
        batches.append((torch.randn(batch, length, WIDTH, generator=draw), steer(ids, experts)))
    return Forms(plain, routed, batches, padded=others[1], grouped_mm=others[2], active=active)


def active(batch: Inputs) -> int:
    """Bytes of a block's activations that no padding adds to: the residual, the rows that go in, and the greater of
    what lies between the products and the gate's probabilities, each once; and five numbers of a route plan a cell."""
    x, steer = batch
    cells, experts = x.shape[0] * x.shape[1], steer.shape[2]
    return cells * (4 * (2 * WIDTH + max(HIDDEN, experts)) + 20)


def cases() -> list[Case]:
    """Every number of experts with every load."""
    return [Case(name, "switch", functools.partial(forms, experts, load), quick=name in QUICK,
                 memory=(EAGER, PADDED, GROUPED, ROUTED) if experts == COMPARED else (ROUTED,),
                 large=functools.partial(forms, experts, load, LARGE))
            for experts in EXPERTS for load in LOADS for name in [f"switch-{experts}-{load}"]]
