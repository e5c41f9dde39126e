"""The three ways the demo can run its model: AnyShape, torch's own compiler, and eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

import anyshape
from anyshape.tools.demo.watch import Watch


class Forward(Protocol):
    """The model as the demo calls it."""

    def __call__(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor: ...


class Backend:
    """A way to run the model; `counters` gives what it compiled and holds so far. `limit`: bytes that a step may take,
    0 for no limit; `watch` then predicts what it takes."""

    def __init__(self, name: str, forward: Forward, counters: Callable[[], Mapping[str, float]], limit: int = 0,
                 watch: Watch | None = None) -> None:
        self.name = name
        self.forward = forward
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


def make(name: str, model: nn.Module, limit: int = 0) -> Backend:
    """The backend called `name`, "anyshape", "inductor" or "eager", on `model`, whose weights it shares. `limit`: see
    `Backend`; of "anyshape" only."""
    if name == "anyshape":
        return _anyshape(model, limit)
    if name == "inductor":
        return _inductor(model)
    return Backend("eager", model, dict)


def _anyshape(model: nn.Module, limit: int) -> Backend:
    before = anyshape.stats()["programs"]

    def counters() -> Mapping[str, float]:
        now = dict(anyshape.stats())
        now["programs"] -= before
        return now

    if not limit:
        return Backend("anyshape", anyshape.compile(model), counters)
    fast = anyshape.compile(model, memory_limit=limit)
    return Backend("anyshape", fast, counters, limit, Watch(fast))


def _inductor(model: nn.Module) -> Backend:
    compiled = 0
    lower = torch._dynamo.lookup_backend("inductor")

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        nonlocal compiled
        code = lower(graph, inputs)
        compiled += 1  # only now: torch may drop a trace half way and begin again
        return code

    return Backend("inductor", torch.compile(model, backend=counting, dynamic=True), lambda: {"programs": compiled})
