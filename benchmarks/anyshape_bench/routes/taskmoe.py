"""Benchmark case of a task-level mixture of experts (Kudugunta et al., 2021), as in Brainstorm: 16 tasks and experts.

A cell is a sample, a whole sentence; the two experts of each block that it takes follow from its task by a hash.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyshape import route
from anyshape_bench.routes.case import Case, Forms
from anyshape_bench.routes.loads import counts
from anyshape_bench.routes.weights import stack_weights

TASKS = EXPERTS = 16
WIDTH, HIDDEN, HEADS, BLOCKS = 64, 256, 4, 4
SIZES = ((16, 16), (12, 20), (16, 24), (24, 12), (16, 9), (20, 16))  # (sentences, length); the first two warm up


class Hash(nn.Module):
    """Two different experts for each task, i64[sentences, 2]; both weigh the same."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        table = torch.stack([torch.randperm(EXPERTS, generator=draw)[:2] for _ in range(TASKS)])
        self.register_buffer("table", table)

    def forward(self, cells: Tensor, tasks: Tensor) -> Tensor:
        return self.table[tasks]


class Plain(nn.Module):
    """Feed-forward layer of experts, as a loop."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.choose = Hash(seed)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(EXPERTS))

    def forward(self, x: Tensor, tasks: Tensor) -> Tensor:
        ids = self.choose(x, tasks)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = (ids == number).any(1).nonzero()[:, 0]
            out.index_add_(0, chosen, expert(x[chosen]) / 2)
        return out


class Routed(nn.Module):
    """Feed-forward layer of experts, as a router."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.choose = Hash(seed)
        self.moe = route.Router(self.choose, route.Experts(EXPERTS, WIDTH, HIDDEN), combine="mean")

    def forward(self, x: Tensor, tasks: Tensor) -> Tensor:
        return self.moe(x, tasks)


class Padded(nn.Module):
    """Baseline: as many sentences for every expert as the busiest has, in batched products."""

    def __init__(self, routed: Routed) -> None:
        super().__init__()
        self.choose, self.experts = routed.choose, routed.moe.branches

    def forward(self, x: Tensor, tasks: Tensor) -> Tensor:
        ids = self.choose(x, tasks).reshape(-1)
        mine = F.one_hot(ids, EXPERTS)
        place = (mine.cumsum(0) - 1).gather(1, ids[:, None])[:, 0]
        most = int(mine.sum(0).max())
        rows = x.new_zeros(EXPERTS, most, *x.shape[1:])
        rows[ids, place] = x.repeat_interleave(2, 0)
        own = self.experts
        hidden = torch.relu(torch.baddbmm(own.bias_in[:, None], rows.flatten(1, 2), own.weight_in))
        found = torch.baddbmm(own.bias_out[:, None], hidden, own.weight_out).reshape(EXPERTS, most, *x.shape[1:])
        return found[ids, place].reshape(x.shape[0], 2, *x.shape[1:]).mean(1)


class GroupedMM(nn.Module):
    """Baseline: sentences sorted by expert, products by `grouped_mm`, biases looked up by row."""

    def __init__(self, routed: Routed) -> None:
        super().__init__()
        self.choose, self.experts = routed.choose, routed.moe.branches

    def forward(self, x: Tensor, tasks: Tensor) -> Tensor:
        ids = self.choose(x, tasks).reshape(-1)
        order, length, own = ids.argsort(stable=True), x.shape[1], self.experts
        ends = (torch.bincount(ids, minlength=EXPERTS).cumsum(0) * length).int()
        of_row = ids[order].repeat_interleave(length)
        rows = x[order // 2].reshape(-1, WIDTH)
        hidden = torch.relu(F.grouped_mm(rows, own.weight_in, offs=ends) + own.bias_in[of_row])
        found = (F.grouped_mm(hidden, own.weight_out, offs=ends) + own.bias_out[of_row]).reshape(-1, *x.shape[1:])
        return torch.empty_like(found).index_copy_(0, order, found).reshape(x.shape[0], 2, *x.shape[1:]).mean(1)


class Encoder(nn.Module):
    """Blocks of attention and a layer of experts. x f32 [sentences, length, width], tasks i64 [sentences]."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * len(layers) + 1))
        self.project = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in layers)
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in layers)

    def forward(self, x: Tensor, tasks: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x + self.attention(self.norms[2 * number](x), number)
            x = x + layer(self.norms[2 * number + 1](x), tasks)
        return self.norms[-1](x)

    def attention(self, x: Tensor, number: int) -> Tensor:
        sentences, length, _ = x.shape
        heads = self.project[number](x).reshape(sentences, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        return self.out[number](found.transpose(1, 2).reshape(x.shape))


def forms() -> Forms:
    """The encoder; how often a task occurs is in proportion to 1/rank."""
    plain = Encoder([Plain(number) for number in range(BLOCKS)])
    layers = [Routed(number) for number in range(BLOCKS)]
    for one, other in zip(plain.layers, layers, strict=True):
        stack_weights(one.experts, other.moe.branches)
    routed, padded, grouped = (Encoder([kind(one) for one in layers]) for kind in (nn.Identity, Padded, GroupedMM))
    routed.layers = nn.ModuleList(layers)
    same = {name: value for name, value in plain.state_dict().items() if not name.startswith("layers")}
    for form in (routed, padded, grouped):
        form.load_state_dict(same, strict=False)
    draw = torch.Generator().manual_seed(0)
    batches = []
    for sentences, length in SIZES:
        tasks = torch.repeat_interleave(torch.randperm(TASKS, generator=draw),
                                        torch.tensor(counts("zipf", sentences, TASKS)))
        batches.append((torch.randn(sentences, length, WIDTH, generator=draw),
                        tasks[torch.randperm(sentences, generator=draw)]))
    return Forms(plain, routed, batches, padded=padded, grouped_mm=grouped)


def cases() -> list[Case]:
    """One."""
    return [Case("taskmoe", "taskmoe", forms, quick=True)]
