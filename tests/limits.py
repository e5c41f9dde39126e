"""Models, steps and counters for tests of limits in bytes."""
from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import nn

from anyshape.runtime.context.process_context import shared_context
from anyshape.runtime.memory.pools import Pool

NO_LIMIT = 1 << 40


class Layers(nn.Module):
    """Layers whose hidden values are wider than what passes between them."""

    def __init__(self, count: int = 6, width: int = 32) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(count))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(torch.sin(torch.tanh(up(norm(x)))))
        return x


def net(seed: int = 0, **sizes: int) -> Layers:
    torch.manual_seed(seed)
    return Layers(**sizes)


def step(run, module, x):
    """The loss and all gradients."""
    module.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    loss = run(x).square().mean()
    loss.backward()
    return [loss.detach(), x.grad, *[p.grad for p in module.parameters()]]


def limit_of(run):
    """The limit of the forward of what was compiled."""
    return next(p.executable.limit if hasattr(p, "executable") else p.limit for p in run.programs
                if "forward" in p.name)


def sizes(run, x):
    """The forward's symbols at an input that it has met."""
    return next(dict(record.values) for record in limit_of(run).program.specializations.values()
                if any(view and view[0] == tuple(x.shape) for view in record.inputs))


def same(found, wanted) -> bool:
    """Whether no bit differs."""
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@contextlib.contextmanager
def under(run, bytes_):
    """Another limit for what is compiled; it is not compiled again."""
    limit = limit_of(run)
    before = limit.bytes
    limit.move(bytes_)
    try:
        yield
    finally:
        limit.move(before)


@contextlib.contextmanager
def counted():
    """A list that receives the most bytes of all blocks of the arena at once."""
    context = shared_context()
    context.kept.release_idle()
    context.temporary.release_idle()
    gc.collect()
    found = [context.kept.held + context.temporary.held]
    new = Pool._new

    def counting(pool, bytes_):
        block = new(pool, bytes_)
        found[0] = max(found[0], context.kept.held + context.temporary.held)
        return block

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pool, "_new", counting)
        yield found
