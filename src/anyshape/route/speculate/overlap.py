"""Overlapped speculation: a router function decides on a worker thread while the branch that is foretold runs.

    router function(cells) --------> ids ---- equal to the prediction? combine : the router, with these routes
    predicted branch(cells) ------> rows --/

For router functions that take long or that no compiler sees into. They run once in each call, and what they raise is
raised; what the predicted branch raises is not, unless its turn comes. Worth it where the two do not compete for cores.
"""
from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from anyshape.base.errors import AnyShapeError
from anyshape.route.core.router import Router
from anyshape.route.core.routes import Routes, checked
from anyshape.route.core.uniform import Choice, by_choice, combine_uniform
from anyshape.route.speculate.captured import check_pure
from anyshape.route.speculate.payoff import Payoff
from anyshape.torch_compat.versions.autocast import casts

FIRST = 2  # calls that measure the general path


class Worker:
    """A thread that router functions run on; made when it is first asked for, and anew in a copy."""

    def __init__(self) -> None:
        self.pool: ThreadPoolExecutor | None = None
        self.lock = threading.Lock()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        with self.lock:
            if self.pool is None:
                self.pool = ThreadPoolExecutor(1, thread_name_prefix="anyshape-router")
            return self.pool.submit(function, *args)

    def __reduce__(self) -> Any:
        return Worker, ()


class OverlappedRouter(nn.Module):
    """A router whose function and predicted branch run at the same time; its results are the router's.

    Args:
        router: the general path. choice: the branches that all cells are expected to take. rate: how often, at first.
        clock: seconds.

    Off where gradients are recorded, in training, under autocast, while a compiler traces, where the branch is not pure
    (`refused` says why), and while it does not pay.
    """

    def __init__(self, router: Router, choice: Choice, *, rate: float = 1.0,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self.router, self.choice, self.clock, self.training = router, choice, clock, router.training
        self.payoff, self.counters, self.worker = Payoff(rate=rate), Counter[str](), Worker()
        self.refused: str | None = None
        self.lock = threading.Lock()

    def forward(self, cells: Any, *args: Any, routes: Routes | None = None, **keywords: Any) -> Any:
        tensors = cells if isinstance(cells, tuple) else (cells,)
        if routes is not None or self.training or torch.is_grad_enabled() or torch.compiler.is_compiling() \
                or casts() or self._refusal(tensors):
            return self.router(cells, *args, routes=routes, **keywords)
        begin = self.clock()
        if not self.payoff.on or self.counters["general"] < FIRST:
            routes = self._decide(tensors, args, keywords, torch.is_inference_mode_enabled())
            results = self.router(cells, routes=routes)
            with self.lock:
                self.counters["general"] += 1
                self.payoff.saw(self._as_predicted(routes.ids))
                self.payoff.took_general(self.clock() - begin)
            return results
        return self._overlapped(cells, tensors, args, keywords, begin)

    def _overlapped(self, cells: Any, tensors: tuple[Tensor, ...], args: Any, keywords: Any, begin: float) -> Any:
        deciding = self.worker.submit(self._decide, tensors, args, keywords, torch.is_inference_mode_enabled())
        try:
            rows = by_choice(self.router, tensors, self.choice)
        except Exception:  # the true branch may not raise it
            rows = None
        routes = deciding.result()
        hit = rows is not None and self._as_predicted(routes.ids)
        general = self.payoff.general
        if hit and rows is not None:
            results = combine_uniform(self.router, rows[0], rows[1], tensors, routes, self.choice)
        else:
            results = self.router(cells, routes=routes)
        seconds = self.clock() - begin
        with self.lock:
            self.counters["hits" if hit else "misses"] += 1
            self.payoff.saw(hit)
            if hit:
                self.payoff.compared(seconds, general)
                self.payoff.took_hit(seconds)
            else:
                self.payoff.took_miss(max(seconds - general, 0.0), general)
        return results

    def _decide(self, tensors: tuple[Tensor, ...], args: Any, keywords: Any, inference: bool) -> Routes:
        with torch.inference_mode(inference), torch.no_grad():
            found = self.router.router_fn(*tensors, *args, **keywords)
        return checked(found, tensors[0].shape[0], self.router.name or "a router")

    def _as_predicted(self, ids: Tensor) -> bool:
        return ids.shape[1] == len(self.choice) and bool((ids == ids.new_tensor(self.choice)).all())

    def _refusal(self, tensors: tuple[Tensor, ...]) -> str:
        """Why the predicted branch cannot run ahead; found out once."""
        if self.refused is None:
            try:
                check_pure(_Branch(self.router, self.choice), tensors)
                self.refused = ""
            except AnyShapeError as error:
                self.refused = " ".join(str(error).split())
        return self.refused

    def summary(self) -> dict[str, Any]:
        """hits, misses, general calls, switches."""
        with self.lock:
            return {**{name: self.counters[name] for name in ("hits", "misses", "general")}, "on": self.payoff.on,
                    "switched_off": self.payoff.switched_off, "switched_on": self.payoff.switched_on}


class _Branch(nn.Module):
    """What runs while a router function decides."""

    def __init__(self, router: Router, choice: Choice) -> None:
        super().__init__()
        self.router, self.choice = router, choice

    def forward(self, *tensors: Tensor) -> Any:
        return by_choice(self.router, tensors, self.choice)[0]
