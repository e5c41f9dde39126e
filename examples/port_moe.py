"""A mixture of experts of your own, ported to `anyshape.route` in ten lines, checked, compiled and trained.

    python examples/port_moe.py
    python examples/port_moe.py --experts 32 --tokens 2048 --steps 100

`Mixture` is plain PyTorch: each expert looks for its tokens. `Routed` is the port: the same gate, the same experts, one
program for all loads. The script compares both, trains the port on a small task at changing batch sizes, and says how
often it compiled.
"""
from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import anyshape
from anyshape import route


class Expert(nn.Module):
    """Any module will do; this one has a norm, a gate and a scale."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.norm(rows)
        return self.down(torch.tanh(self.up(rows)) * torch.sigmoid(self.gate(rows))) * self.scale


class Mixture(nn.Module):
    """Two of several experts for each token, as a loop. x f32 [batch, length, width]."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, ids = torch.softmax(self.gate(tokens), -1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            chosen, choice = (ids == number).nonzero(as_tuple=True)
            out = out.index_add(0, chosen, expert(tokens[chosen]) * weights[chosen, choice, None])
        return out.reshape(x.shape)


class Routed(nn.Module):
    """The port: it takes the gate, and copies the experts into one stack."""

    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        width = mixture.gate.in_features
        experts = route.stack(mixture.experts, example=torch.zeros(1, width))
        self.moe = route.Router(route.top_k(mixture.gate, k=2), experts)

    def forward(self, x: Tensor) -> Tensor:
        cells = route.annotate_cell(x, dims=(0, 1))  # what is routed: a token
        return route.restore(self.moe(cells), like=x, dims=(0, 1))


def seconds(call: Callable[[Tensor], Tensor], x: Tensor, times: int = 5) -> float:
    """The least of several calls."""
    found = []
    with torch.no_grad():
        for _ in range(times):
            start = time.perf_counter()
            call(x)
            found.append(time.perf_counter() - start)
    return min(found)


def main(words: list[str] | None = None) -> dict[str, float]:
    """Ports, compares, trains; returns what it printed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512, help="of the batch that is timed")
    parser.add_argument("--steps", type=int, default=30)
    chosen = parser.parse_args(words)
    torch.manual_seed(0)
    mixture = Mixture(chosen.width, 2 * chosen.width, chosen.experts)
    routed = Routed(mixture)
    fast = anyshape.compile(routed)

    x = torch.randn(4, max(1, chosen.tokens // 4), chosen.width)
    with torch.no_grad():
        difference = float((fast(x) - mixture(x)).abs().max())
    found = {"difference": difference, "loop": seconds(mixture, x), "routed": seconds(fast, x)}
    print(f"largest difference {difference:.2g}; the loop takes {found['loop'] * 1e3:.2f} ms, "
          f"the port {found['routed'] * 1e3:.2f} ms")

    optimizer = torch.optim.AdamW(routed.parameters(), lr=3e-3)
    wanted = nn.Linear(chosen.width, chosen.width).requires_grad_(False)
    draw = torch.Generator().manual_seed(0)
    for step in range(chosen.steps):
        batch, length = torch.randint(2, 24, (2,), generator=draw).tolist()
        x = torch.randn(batch, length, chosen.width, generator=draw)
        loss = (fast(x) - torch.sin(wanted(x))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            found["first loss"], before = loss.item(), anyshape.stats()["programs"]
    found["last loss"], found["recompiled"] = loss.item(), anyshape.stats()["programs"] - before
    print(f"loss {found['first loss']:.3f} -> {found['last loss']:.3f} in {chosen.steps} steps of as many sizes; "
          f"compiled again {found['recompiled']} times")
    return found


if __name__ == "__main__":
    main()
