"""The three ways the demo can run a train step: AnyShape, torch's own compiler, and eager.

AnyShape compiles loss, gradients and update as one program (`anyshape.train_step`). The other two compute the loss,
call `backward` and then the optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

import anyshape
from anyshape.dist.strategies import Strategy
from anyshape.frontend.train_step_api import TrainStep
from anyshape.tools.demo.watch import PeakWatch


class Step(Protocol):
    """A whole train step, tokens and targets int64[rows, length]: weights and optimiser state are changed in place; the
    loss, f32[], is detached."""

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor: ...


class Backend:
    """A way to run a step; `counters` gives what it compiled and holds so far. `limit`: bytes that a step may take,
    0 for no limit; `watch` then predicts what it takes. `checkpoints`: saves and loads the model and its optimiser; of
    "anyshape" it is the step, of the others one that never runs."""

    def __init__(self, name: str, step: Step, checkpoints: TrainStep, counters: Callable[[], Mapping[str, float]],
                 limit: int = 0, watch: PeakWatch | None = None) -> None:
        self.name = name
        self.step = step
        self.checkpoints = checkpoints
        self.limit = limit
        self.watch = watch
        self._counters = counters

    def programs(self) -> int:
        """Programs compiled since the backend was made."""
        return int(self._counters().get("programs", 0))

    def arena_bytes(self) -> int:
        """Bytes of the arena now; 0 where there is none."""
        return int(self._counters().get("arena_bytes", 0))

    def counters(self) -> dict[str, float]:
        """Everything the backend counts."""
        return dict(self._counters())


def make(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, limit: int = 0,
         strategy: Strategy | None = None) -> Backend:
    """The backend called `name`, "anyshape", "inductor" or "eager", that trains `model` with `optimizer`. `limit`: see
    `Backend`; `strategy`: how the step is dealt out over ranks; both of "anyshape" only."""
    if name == "anyshape":
        return _anyshape(model, optimizer, limit, strategy)
    checkpoints = anyshape.train_step(model, loss_of, optimizer)
    if name == "inductor":
        return _inductor(model, optimizer, checkpoints)
    return Backend("eager", apart(model, optimizer), checkpoints, dict)


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """What is trained: the mean loss, f32[]."""
    return model(tokens, targets)


def apart(forward: Callable[[Tensor, Tensor], Tensor], optimizer: torch.optim.Optimizer) -> Step:
    """A step in three parts: loss, gradients, update."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = forward(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _anyshape(model: nn.Module, optimizer: torch.optim.Optimizer, limit: int, strategy: Strategy | None) -> Backend:
    before = anyshape.stats()["programs"]

    def counters() -> Mapping[str, float]:
        now = dict(anyshape.stats())
        now["programs"] -= before
        return now

    step = anyshape.train_step(model, loss_of, optimizer, strategy=strategy, memory_limit=limit)
    return Backend("anyshape", step, step, counters, limit, PeakWatch(step) if limit and strategy is None else None)


def _inductor(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoints: TrainStep) -> Backend:
    compiled = 0
    lower = torch._dynamo.lookup_backend("inductor")

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        nonlocal compiled
        code = lower(graph, inputs)
        compiled += 1  # only now: torch may drop a trace half way and begin again
        return code

    fast = torch.compile(model, backend=counting, dynamic=True)
    return Backend("inductor", apart(fast, optimizer), checkpoints, lambda: {"programs": compiled})
