"""A small llama of plain torch, and the graph of its whole train step: what tests of partitioning share."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anyshape
from anyshape.dist.halves import Halves
from anyshape.dist.mesh import Mesh
from anyshape.dist.partition import LocalGraph
from anyshape.dist.strategies import Roles, Strategy
from anyshape.frontend.capture import dynamo_backend
from anyshape.frontend.importer.fx_to_graph import to_graph
from anyshape.frontend.train_step.distributed import halves_for_all, roles_of
from anyshape.frontend.train_step.partition import joined
from anyshape.frontend.train_step.update_op import expanded
from anyshape.ir.graph import Graph
from anyshape.runtime.collectives.simulate import local_inputs, part_of_result, simulate
from anyshape.runtime.torch_ops.reference_interpreter import interpret


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        each = width // heads
        self.heads, self.groups = heads, groups
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.q = nn.Linear(width, heads * each, bias=False)
        self.k = nn.Linear(width, groups * each, bias=False)
        self.v = nn.Linear(width, groups * each, bias=False)
        self.o = nn.Linear(heads * each, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def split(y: Tensor, count: int) -> Tensor:
            return y.view(batch, length, count, -1).transpose(1, 2)

        def turned(y: Tensor) -> Tensor:
            first, second = y.chunk(2, -1)
            return y * cos + torch.cat((-second, first), -1) * sin

        y = self.norm1(x)
        q, k, v = turned(split(self.q(y), self.heads)), turned(split(self.k(y), self.groups)), split(
            self.v(y), self.groups)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(found.transpose(1, 2).reshape(batch, length, -1))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, layers: int = 2, width: int = 32, heads: int = 4, groups: int = 2, inner: int = 48,
                 vocabulary: int = 64, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads, groups, inner) for _ in range(layers))
        self.norm = Norm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        each = width // heads
        self.register_buffer("turns", 100.0 ** -(torch.arange(0, each, 2) / each), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        angles = torch.arange(tokens.shape[1])[:, None] * self.turns
        angles = torch.cat((angles, angles), -1).to(x.dtype)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return self.head(self.norm(x))


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class _Stop(Exception):
    pass


@dataclass
class Captured:
    """The graph of a step, what its inputs are, and those of the call that was traced. first: names of values of the
    forward, where a backward follows that has what it computes again."""

    graph: Graph
    roles: Roles
    inputs: list[Any]
    first: frozenset[str] = frozenset()


def capture(model: nn.Module, loss: Callable[..., Any] = next_token_loss, batch: Sequence[Any] = (),
            optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, in_halves: bool = False,
            cut: Callable[..., Any] = halves_for_all, **more: Any) -> Captured:
    """Traces a step, and catches its graph where it would be compiled. in_halves: as `Captured.first` says; cut: what
    makes the halves."""
    step = anyshape.train_step(model, loss, optimizer(model.parameters(), lr=1e-2), strict=True, **more)
    caught: list[Captured] = []

    def compile_step(compilation: Any, traced: int, first: Any, gm: Any, static: tuple[int, ...], reason: str) -> Any:
        halves = cut(gm, static) if in_halves else None
        gm = gm if halves is None else joined(gm, halves)
        expanded(gm)
        graph, notes = to_graph(gm, "step")
        names = {id(one): name for name, one in model.named_parameters()}

        def run(inputs: list[Any]) -> Any:
            weights = [names[id(one.weight)] for one in compilation.step.update.weights]
            caught.append(Captured(graph, roles_of(gm, graph, static, weights), list(inputs), notes.first))
            raise _Stop
        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamo_backend, "_compile_step", compile_step)
        with pytest.raises(_Stop):
            step(*(batch or (torch.randint(0, 50, (6, 12)),)))
    return caught[0]


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, by the largest element."""
    if found.shape != wanted.shape:
        return float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-9)) if wanted.numel() else 0.0


def run_halves(mesh: Mesh, halves: Halves, inputs: Sequence[list[Any]]) -> list[Any]:
    """Of each rank, the results of both halves and what is written."""
    first, count = halves.forward, len(halves.forward.outputs)
    first = first.replace(outputs=(*first.outputs, *first.saved), saved=(), output_strides=(), memory=())
    found = simulate(mesh, first, [[one[place] for place in halves.forward_inputs] for one in inputs])
    second = halves.backward.replace(restored=())
    later = simulate(mesh, second, [[*results[count:], *(one[place] for place in halves.backward_inputs)]
                                    for (results, _), one in zip(found, inputs, strict=True)])
    every = [[*results[:count], *more] for (results, _), (more, _) in zip(found, later, strict=True)]
    return [([results[place] for place in halves.outputs], written)
            for results, (_, written) in zip(every, later, strict=True)]


def worst_difference(captured: Captured, strategy: Strategy, chain: Sequence[LocalGraph], batch: int,
                     length: int, graph: Graph | Halves | None = None) -> float:
    """All ranks in one process against one rank: results and all that is written, at one shape of a batch of tokens.
    graph: what ranks run; the last one of the chain when left out."""
    torch.manual_seed(batch * 100 + length)
    sizes = {str(name): number for v in captured.graph.inputs if v.name in captured.roles.data
             for name, number in zip(v.tensor.shape, (batch, length), strict=True)}
    whole: list[Any] = []
    for value, given in zip(captured.graph.inputs, captured.inputs, strict=True):
        if value.name in sizes:
            given = sizes[value.name]
        elif value.name in captured.roles.data:
            given = torch.randint(0, 60, (batch, length))
        elif value.name in captured.roles.states:
            given = torch.rand_like(given) * 1e-3 + 1e-5  # not zero, from which a first step is g / |g|
        whole.append(given)
    mesh = strategy.mesh
    inputs = [local_inputs(chain, captured.graph, whole, mesh.coordinates(rank)) for rank in range(mesh.world)]
    outputs, _, values = interpret(captured.graph, [x.clone() if isinstance(x, Tensor) else x for x in whole])
    worst = 0.0
    run = run_halves if isinstance(graph, Halves) else simulate
    for rank, (found, written) in enumerate(run(mesh, graph or chain[-1].graph, inputs)):  # type: ignore[arg-type]
        worst = max([worst, *(difference(a, b) for a, b in zip(found, outputs, strict=True) if isinstance(b, Tensor))])
        for target, value in captured.graph.writes:
            wanted = part_of_result(chain, target.name, values[value.name], sizes, mesh.coordinates(rank))
            worst = max(worst, difference(written[target.name], wanted))
    return worst
