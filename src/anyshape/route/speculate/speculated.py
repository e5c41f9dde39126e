"""Speculative routing of a model, with check and roll-back: predicted paths first, the general path where they end.

    call --> the tree of predicted paths --hit--> results
                   |--cells differ, and do not depend on each other--> those cells again, on the general path
                   |--no such path, an error--> the call again, on the general path

The general path is the model as it was, and always right. Speculation is off under autograd and in training, for sizes
beyond the first few, where a region is not pure, and while it does not pay (payoff.py).
"""
from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from anyshape.base.errors import AnyShapeError
from anyshape.route.core.router import Router
from anyshape.route.speculate.captured import Compile, Values, capture
from anyshape.route.speculate.path_tree import Branching, Builder, Outcome, Tree, branchings, follow, nested, run
from anyshape.route.speculate.payoff import Payoff
from anyshape.route.speculate.predicted import (
    Choice, Prediction, PredictedRouter, WatchedFunction, replaced, watching)

SIZES = 8  # kinds of inputs, by their shapes and dtypes, that have programs
PAIRED, AGAIN = 3, 256  # hits that also run the general path, to compare times: the first few, then one of so many
WATCHED = 8  # while off, one of so many calls is watched for what it would have hit


@dataclass(frozen=True, slots=True)
class Prepared:
    """The programs for one kind of inputs; `refused`: why there are none."""

    tree: Tree | None
    payoff: Payoff
    refused: str = ""


class Speculated(nn.Module):
    """A model that takes predicted paths, and has the results of `model`.

    Args:
        model: routers as they are; the general path. It may be changed by this class, to watch its decisions.
        copy: the same modules again, with the same tensors; routers are replaced by predictions.
        names: of the routers in both: (name, router of the model, router of the copy).
        predictions: paths with their shares of calls.
        independent: the cells of all routers are the rows of all inputs and results, and do not depend on each other.
        compile: for the programs of regions; it is given ExportedPrograms.
        clock: seconds.

    Counts (`counters`): hits; misses, of which roll_backs ran the general path again and redone_cells are cells that did;
    wasted, decisions computed ahead in vain; general_calls, by reason in `reasons`; errors in speculated regions.
    """

    is_compiled = True

    def __init__(self, model: nn.Module, copy: nn.Module, names: Mapping[str, tuple[Router, Router]],
                 predictions: Sequence[tuple[Prediction, float]], *, independent: bool = False,
                 compile: Compile | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        for name, (router, _) in names.items():
            router.router_fn = WatchedFunction(router.router_fn, name)
        self.general, self.training = model, model.training
        self.predictions, self.independent, self.compile, self.clock = tuple(predictions), independent, compile, clock
        # no submodule: its parameters are those of the general path
        predicted = replaced(copy, {name: router for name, (_, router) in names.items()}, PredictedRouter)
        object.__setattr__(self, "predicted", predicted)
        self.prepared: dict[Any, Prepared] = {}
        self.counters: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.building = threading.Lock()
        self.held = [(module._parameters, module._buffers) for module in model.modules()]
        self.state = self._state()

    # ---- a call

    def forward(self, *args: Any, **keywords: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.general(*args, **keywords)
        reason = self._reason()
        flat, nesting = pytree.tree_flatten((args, keywords))
        key = None if reason else _key(flat, nesting)
        if key is None:
            return self._by_general(reason or "arguments that are neither tensors nor plain values", args, keywords)
        prepared = self.prepared.get(key)
        if prepared is None:
            return self._first(key, args, keywords, flat)
        if prepared.tree is None:
            return self._by_general(prepared.refused, args, keywords)
        if not prepared.payoff.on:
            return self._while_off(prepared, args, keywords)
        return self._speculate(prepared, args, keywords, [one for one in flat if isinstance(one, Tensor)])

    def _reason(self) -> str:
        """Why this call is not speculated."""
        if torch.is_grad_enabled():
            return "gradients are recorded"
        if self.training:
            return "training"
        if not self._same_state():
            return "parameters or buffers were replaced"
        return ""

    def _by_general(self, reason: str, args: Any, keywords: Any) -> Any:
        with self.lock:
            self.reasons[reason] += 1
            self.counters["general_calls"] += 1
        return self.general(*args, **keywords)

    def _first(self, key: Any, args: Any, keywords: Any, flat: list[Any]) -> Any:
        """The first call of a kind: the general path gives its results, and its programs are made."""
        results = self._by_general("first of its sizes", args, keywords)
        if len(self.prepared) < SIZES and self.building.acquire(blocking=False):
            try:
                if key not in self.prepared:
                    self.prepared[key] = self._prepare(args, keywords, flat)
            finally:
                self.building.release()
        return results

    def _prepare(self, args: Any, keywords: Any, flat: list[Any]) -> Prepared:
        payoff = Payoff(rate=min(sum(share for _, share in self.predictions), 1.0))
        try:
            tree = self.plan(args, keywords, payoff.rate)
        except AnyShapeError as refusal:
            return Prepared(None, payoff, " ".join(str(refusal).split()))
        if tree is None:
            return Prepared(None, payoff, "no path is known")
        tensors = [one for one in flat if isinstance(one, Tensor)]
        try:
            run(tree, tensors)  # compilers are late
        except Exception:  # the general path says what is wrong, if anything is
            self.counters["errors"] += 1
        return Prepared(tree, payoff)

    def plan(self, args: tuple[Any, ...], keywords: dict[str, Any], rate: float = 1.0) -> Tree | None:
        """The tree of paths for arguments of this kind; None where no prediction is a path.

        Raises:
            ImpureRegion: see captured.capture.
        """
        values, paths = Values(), []
        for prediction, share in self.predictions:
            path = capture(self.predicted, prediction, args, keywords, values)
            if path is not None:
                paths.append((path, share))
        if not paths:
            return None
        return Builder(values, lambda way: way.share == 1.0, self.compile).tree(branchings(paths))

    def _while_off(self, prepared: Prepared, args: Any, keywords: Any) -> Any:
        with self.lock:
            self.counters["general_calls"] += 1
            self.reasons["speculation does not pay"] += 1
            is_watched = self.reasons["speculation does not pay"] % WATCHED == 0
        begin = self.clock()
        if not is_watched:
            results = self.general(*args, **keywords)
            seen = None
        else:
            with watching() as decisions:
                results = self.general(*args, **keywords)
            seen = follow(prepared.tree.branching, uniform(decisions))  # type: ignore[union-attr]
        seconds = self.clock() - begin
        with self.lock:
            if seen is not None:
                prepared.payoff.saw(seen)
            prepared.payoff.took_general(seconds)
        return results

    def _speculate(self, prepared: Prepared, args: Any, keywords: Any, tensors: list[Tensor]) -> Any:
        tree, payoff = prepared.tree, prepared.payoff
        assert tree is not None
        begin = self.clock()
        try:
            outcome: Outcome | None = run(tree, tensors, self.independent)
            failed = False
        except Exception:  # the true path may not meet it; if it does, the general path raises it
            outcome, failed = None, True
        middle = self.clock()
        redone = 0
        if outcome is not None and outcome.ends is not None:
            results = nested(outcome)
            if outcome.redo is not None:
                redone = int(outcome.redo.sum())
                results = self._redo(results, outcome.redo, args, keywords)
        else:
            results = self.general(*args, **keywords)
        end = self.clock()
        hit = outcome is not None and outcome.ends is not None
        with self.lock:
            self._count(outcome, failed, redone)
            payoff.saw(hit and not redone)
            if not hit or redone:
                payoff.took_miss(middle - begin, end - middle)
                return results
            pair = self.counters["hits"] <= PAIRED or self.counters["hits"] % AGAIN == 0
            if not pair:
                payoff.took_hit(middle - begin)
        if pair:
            results = self.general(*args, **keywords)
            with self.lock:
                payoff.paired(middle - begin, self.clock() - end)
        return results

    def _redo(self, results: Any, redo: Tensor, args: Any, keywords: Any) -> Any:
        """Results whose rows `redo` are those of the general path."""
        def rows(one: Any) -> Any:
            return one[redo] if isinstance(one, Tensor) else one
        again = self.general(*pytree.tree_map(rows, args), **pytree.tree_map(rows, keywords))

        def merged(one: Any, other: Any) -> Any:
            return one.index_put((redo,), other) if isinstance(one, Tensor) else one
        return pytree.tree_map(merged, results, again)

    def _count(self, outcome: Outcome | None, failed: bool, redone: int) -> None:
        self.counters["errors"] += failed
        hit = outcome is not None and outcome.ends is not None
        self.counters["hits"] += hit and not redone
        self.counters["misses"] += not hit or redone > 0
        self.counters["roll_backs"] += not hit
        self.counters["redone_cells"] += redone
        self.counters["wasted"] += 0 if outcome is None else outcome.missed

    # ---- state

    def _state(self) -> list[tuple[dict[str, Any], str, Any]]:
        return [(place, name, tensor) for places in self.held for place in places for name, tensor in place.items()]

    def _same_state(self) -> bool:
        return all(place.get(name) is tensor for place, name, tensor in self.state)

    def summary(self) -> dict[str, Any]:
        """The counters, and the payoff of each kind of inputs."""
        with self.lock:
            found: dict[str, Any] = {name: self.counters[name] for name in (
                "hits", "misses", "roll_backs", "redone_cells", "wasted", "general_calls", "errors")}
            payoffs = [one.payoff for one in self.prepared.values()]
            found["switched_off"] = sum(one.switched_off for one in payoffs)
            found["switched_on"] = sum(one.switched_on for one in payoffs)
            found["on"] = sum(one.on for one in payoffs)
            found["reasons"] = dict(self.reasons)
        return found

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.summary().items() if name != "reasons")



def uniform(decisions: Sequence[tuple[str, Tensor]]) -> list[Choice]:
    """What all cells decided, in order, up to the first decision in which they differ."""
    found: list[Choice] = []
    for _, ids in decisions:
        rows = ids.tolist()
        if not rows or any(row != rows[0] for row in rows):
            return [*found, (-2,)]
        found.append(tuple(rows[0]))
    return found


def _key(flat: list[Any], nesting: Any) -> Any:
    """What programs are made for: shapes, dtypes and devices of tensors, and other arguments by value."""
    found: list[Any] = [nesting, torch.is_autocast_enabled("cpu")]
    for one in flat:
        if isinstance(one, Tensor):
            if type(one) not in (Tensor, nn.Parameter):
                return None
            found.append((one.shape, one.dtype, one.device))
        elif isinstance(one, (bool, int, float, str, type(None))):
            found.append((type(one), one))
        else:
            return None
    return tuple(found)
