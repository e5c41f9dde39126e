"""Speculative routing of a model, with check and roll-back: predicted paths first, the general path where they end.

    call --> the tree of predicted paths --hit--> results
                   |--cells differ, and do not depend on each other--> those cells again, on the general path
                   |--no such path, an error--> the call again, on the general path

The general path is the model as it was, and always right. Speculation is off under autograd and in training, for sizes
beyond the first few, where a region is not pure, and while it does not pay (payoff.py).
"""
from __future__ import annotations

import contextlib
import itertools
import operator
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anyshape.base.errors import AnyShapeError
from anyshape.route.core.router import Router
from anyshape.route.speculate.captured import Alone, CapturedValues, Compile, Path, capture
from anyshape.route.speculate.gate import Gate
from anyshape.route.speculate.path_tree import (
    COMMIT,
    Branching,
    PathOutcome,
    PathTreeBuilder,
    Tree,
    branchings,
    follow,
    nested,
    run,
)
from anyshape.route.speculate.payoff import Payoff
from anyshape.route.speculate.predicted import Choice, DecisionWatch, PredictedRouter, Prediction, replaced, watching
from anyshape.torch_compat import tree as pytree
from anyshape.torch_compat.versions.autocast import casts

OFF = "speculation does not pay"
SIZES = 8  # kinds of inputs, by their shapes and dtypes, that have programs
# hits that also run the general path, to compare times: the first few, those whose number is a power of two, and one
# of so many
PAIRED, AGAIN = 3, 256
# while off: of so many calls one is watched for what it would have hit; while all kinds of inputs are off, of twice as
# many each time that it is as expected, up to the most, and the others are not looked at; of so many that are watched
# one compares times
WATCHED, MOST, COMPARED = 8, 128, 8
SURPRISE = 0.1  # what a watched call, hit 1 or missed 0, may differ from the hit rate and is as expected


@dataclass(frozen=True, slots=True)
class PreparedPrograms:
    """The programs for one kind of inputs; `refused`: why there are none. independent: cells may be redone alone."""

    tree: Tree | None
    payoff: Payoff
    refused: str = ""
    independent: bool = False


class Pause:
    """Calls that are not looked at, for no kind of inputs is speculated on. An object of its own: a module takes long
    to set an attribute.

    left: how many will not be. length: how many from one look to the next. calls: how many were not.
    """

    __slots__ = ("calls", "left", "length", "lock")

    def __init__(self) -> None:
        self.left, self.length, self.calls = 0, WATCHED, 0
        self.lock = threading.Lock()

    def __reduce__(self) -> Any:
        return Pause, ()

    def takes(self) -> bool:
        """Whether a call is one of them, which is counted then."""
        if self.left <= 0:
            return False
        with self.lock:
            self.left -= 1
            self.calls += 1
        return True

    def after_look(self, on: bool, surprise: bool) -> None:
        """A call was looked at: speculation is on again, its decisions were a surprise, or the next pause is longer."""
        with self.lock:
            self.length = WATCHED if on or surprise else min(2 * self.length, MOST)
            self.left = 0 if on else self.length - 1


class Speculated(nn.Module):
    """A model that takes predicted paths, and has the results of `model`.

    Args:
        model: routers as they are; the general path. It may be changed by this class, to watch its decisions.
        copy: the same modules again, with the same tensors; routers are replaced by predictions.
        names: of the routers in both: (name, router of the model, router of the copy).
        predictions: paths with their shares of calls.
        rowwise: (module, *tensors) -> whether row i of each of its results is one function of row i of the tensors:
            where it proves that of results and decisions, cells that part from the others are redone alone.
        compile: for the programs of regions; it is given ExportedPrograms.
        calls: how many calls the shares are of, 0 where they are exact. defer: whether decisions on the likeliest way
            are read together at its end, or each before what follows it; left out, measured times say which.
        clock: seconds.

    Counts (`counters`): hits; misses, of which roll_backs ran the general path again; redone_cells, cells that did;
    wasted, decisions computed ahead in vain; general_calls, by reason in `reasons`; errors in speculated regions.
    """

    is_compiled = True

    def __init__(self, model: nn.Module, copy: nn.Module, names: Mapping[str, tuple[Router, Router]],
                 predictions: Sequence[tuple[Prediction, float]], *, rowwise: Callable[..., Any] | None = None,
                 compile: Compile | None = None, calls: int = 0, defer: bool | None = None,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self.routers = {name: router for name, (router, _) in names.items()}
        for name, router in self.routers.items():
            router.watch = DecisionWatch(name)
        self.general, self.training = model, model.training
        self.predictions, self.calls, self.defer = tuple(predictions), calls, defer
        self.rowwise, self.compile, self.clock = rowwise, compile, clock
        # no submodule: its parameters are those of the general path
        predicted = replaced(copy, {name: router for name, (_, router) in names.items()}, PredictedRouter)
        object.__setattr__(self, "predicted", predicted)
        self.prepared: dict[Any, PreparedPrograms] = {}
        self.counters: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.pause = Pause()
        self.lock = threading.Lock()
        self.gate = Gate()
        self.places = [place for module in model.modules()
                       for place in (vars(module)["_parameters"], vars(module)["_buffers"])]
        self.state = list(self._held())

    # ---- a call

    def forward(self, *args: Any, **keywords: Any) -> Any:
        if torch.compiler.is_compiling():  # also, for torch asks no thread, while another one captures
            return self.general(*args, **keywords)
        begin = self.clock()
        self.gate.enter()
        try:
            if self.pause.takes():  # no kind of inputs is speculated on at present
                return self.general(*args, **keywords)
            results, key = self._call(begin, args, keywords)
        finally:
            self.gate.leave()
        if key is not None:  # the first call of its kind; the next one has programs
            with self.gate.alone():
                if key not in self.prepared and len(self.prepared) < SIZES:
                    self.prepared[key] = self._prepare(args, keywords)
        return results

    def _call(self, begin: float, args: Any, keywords: Any) -> tuple[Any, Any]:
        """The results, and the kind of the inputs where programs are to be made for it. begin: when the call did."""
        reason = self._reason()
        flat, nesting = pytree.tree_flatten((args, keywords))
        key = None if reason else _key(flat, nesting)
        if key is None:
            reason = reason or "arguments that are neither tensors nor plain values"
            return self._by_general(reason, args, keywords), None
        prepared = self.prepared.get(key)
        if prepared is None:
            wanted = key if len(self.prepared) < SIZES else None
            return self._by_general("first of its sizes" if wanted else "too many sizes", args, keywords), wanted
        if prepared.tree is None:
            return self._by_general(prepared.refused, args, keywords), None
        tensors = [one for one in flat if isinstance(one, Tensor)]
        if not prepared.payoff.on:
            return self._while_off(prepared, begin, args, keywords, tensors), None
        return self._speculate(prepared, begin, args, keywords, tensors), None

    def _reason(self) -> str:
        """Why this call is not speculated."""
        if torch.is_grad_enabled():
            return "gradients are recorded"
        if self.training:
            return "training"
        if not self._same_state():
            return "parameters or buffers were replaced"
        if any(router.forced is not None for router in self.routers.values()):
            return "routes are replayed"
        return ""

    def _by_general(self, reason: str, args: Any, keywords: Any) -> Any:
        with self.lock:
            self.reasons[reason] += 1
            self.counters["general_calls"] += 1
        return self.general(*args, **keywords)

    def _prepare(self, args: Any, keywords: Any) -> PreparedPrograms:
        payoff = Payoff(rate=min(sum(share for _, share in self.predictions), 1.0))
        try:
            tree = self.plan(args, keywords)
        except AnyShapeError as refusal:
            return PreparedPrograms(None, payoff, " ".join(str(refusal).split()))
        if tree is None:
            return PreparedPrograms(None, payoff, "no predicted path is one of this model")
        return PreparedPrograms(tree, payoff, independent=self._rows_apart(args, keywords))

    def plan(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Tree | None:
        """The tree of paths for arguments of this kind; None where no prediction is a path.

        Raises:
            ImpureRegion: see captured.capture.
        """
        values, paths = CapturedValues(), []
        for prediction, share in self.predictions:
            path = capture(self.predicted, prediction, args, keywords, values)
            if path is not None:
                paths.append((path, share))
        if not paths:
            return None
        root = branchings(paths)
        inputs = [one for one in pytree.tree_leaves((args, keywords)) if isinstance(one, Tensor)]
        seconds: Mapping[Branching, float] = {}
        if self.defer is None:
            seconds = PathTreeBuilder(values, lambda begin, way: False, self.compile).timed(root, inputs, self.clock)
        builder = PathTreeBuilder(values, lambda begin, way: self._is_deferred(begin, way, seconds), self.compile)
        return builder.tree(root)

    def _is_deferred(self, begin: Branching, way: Branching, seconds: Mapping[Branching, float]) -> bool:
        """Whether to compute what follows on `way` before the decisions since `begin` are read: as long as the commit
        that is saved outweighs the work that is in vain where one of them turns out else. A share of 1 in n calls may
        be n + 1 in n + 2 (Laplace)."""
        if self.defer is not None:
            return self.defer
        likely = way.count / begin.count
        if self.calls:
            likely = (way.count * self.calls + 1) / (begin.count * self.calls + 2)
        return likely * seconds[COMMIT] > (1 - likely) * seconds.get(way, 0.0)

    def _rows_apart(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        """Whether each row of results and decisions is one function of the same row of the arguments, on every path."""
        if self.rowwise is None or keywords or not args or not all(
                isinstance(one, Tensor) and one.dim() and 1 < one.shape[0] == args[0].shape[0] for one in args):
            return False
        return all(bool(self.rowwise(Alone(self.predicted, prediction), *args)) for prediction, _ in self.predictions)

    def _while_off(self, prepared: PreparedPrograms, begin: float, args: Any, keywords: Any,
                   tensors: list[Tensor]) -> Any:
        tree, payoff = prepared.tree, prepared.payoff
        assert tree is not None
        before = self.clock() - begin  # what a speculated call does too, before it runs
        with self.lock:
            self.counters["general_calls"] += 1
            self.reasons[OFF] += 1
            alone = not any(one.payoff.on and one.tree is not None for one in self.prepared.values())
            payoff.off_calls += 1
            is_watched = alone or payoff.off_calls % WATCHED == 0
            payoff.looks += is_watched
            is_compared = is_watched and payoff.looks % COMPARED == 0
        begin = self.clock()
        seen = None
        if is_watched:
            with watching() as decisions:
                results = self.general(*args, **keywords)
            seen = follow(tree.branching, uniform(decisions))
        else:
            results = self.general(*args, **keywords)
        seconds = self.clock() - begin
        again = None
        if seen and is_compared and payoff.balance > 0:
            with contextlib.suppress(Exception):  # a measurement
                again = before + self._timed(lambda: run(tree, tensors))
        with self.lock:
            surprise = seen is not None and payoff.may_pay and abs(seen - payoff.rate) > SURPRISE
            if seen is not None:
                payoff.saw(seen)
            if again is None:
                payoff.took_general(seconds, self.pause.length if alone else 1)
            else:
                payoff.paired(again, seconds)
            if alone:
                self.pause.after_look(payoff.on, surprise)
        return results

    def _speculate(self, prepared: PreparedPrograms, begin: float, args: Any, keywords: Any,
                   tensors: list[Tensor]) -> Any:
        tree, payoff = prepared.tree, prepared.payoff
        assert tree is not None
        try:
            outcome: PathOutcome | None = run(tree, tensors, prepared.independent)
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
            hits = self.counters["hits"]
            pair = (hits <= PAIRED or hits & (hits - 1) == 0 or hits % AGAIN == 0) \
                and all(router.recorder is None for router in self.routers.values())
            if not pair:
                payoff.took_hit(middle - begin)
        if pair:
            seconds = self._timed(lambda: self.general(*args, **keywords))
            with self.lock:
                payoff.paired(middle - begin, seconds)
        elif outcome is not None and outcome.ends is not None:
            self._record(outcome.ends)
        return results

    def _timed(self, call: Callable[[], Any]) -> float:
        """Seconds of a call that comes after its like, as calls do that run one way: the first after another way finds
        caches that are cold, and takes up to half as long again."""
        call()
        begin = self.clock()
        call()
        return self.clock() - begin

    def _record(self, ends: Path) -> None:
        """Notes the decisions of a hit where the routers, which have not run, are being profiled; those that the path
        does not meet have no cells, as on the general path."""
        recorded = {name: router for name, router in self.routers.items() if router.recorder is not None}
        for name, router in recorded.items():
            met = [place for place, own in enumerate(ends.routers) if own == name]
            noted = [(ends.decisions[place][1], ends.cells[place]) for place in met] or [((-1,), 0)]
            for choice, cells in noted:
                ids = torch.tensor(choice).expand(cells, len(choice))
                counts = torch.tensor([choice.count(branch) * cells for branch in range(router.branch_count)])
                router.recorder.note(ids, counts.cumsum(0).int())

    def _redo(self, results: Any, redo: Tensor, args: Any, keywords: Any) -> Any:
        """Results whose rows `redo` are those of the general path."""
        def rows(one: Any) -> Any:
            return one[redo] if isinstance(one, Tensor) else one
        again = self.general(*pytree.tree_map(rows, args), **pytree.tree_map(rows, keywords))

        def merged(one: Any, other: Any) -> Any:
            return one.index_put((redo,), other) if isinstance(one, Tensor) else one
        return pytree.tree_map(merged, results, again)

    def _count(self, outcome: PathOutcome | None, failed: bool, redone: int) -> None:
        self.counters["errors"] += failed
        hit = outcome is not None and outcome.ends is not None
        self.counters["hits"] += hit and not redone
        self.counters["misses"] += not hit or redone > 0
        self.counters["roll_backs"] += not hit
        self.counters["redone_cells"] += redone
        self.counters["wasted"] += 0 if outcome is None else outcome.missed

    # ---- state

    def _held(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(map(dict.values, self.places))

    def _same_state(self) -> bool:
        return sum(map(len, self.places)) == len(self.state) and all(map(operator.is_, self._held(), self.state))

    def summary(self) -> dict[str, Any]:
        """The counters, and the payoff of each kind of inputs."""
        with self.lock:
            found: dict[str, Any] = {name: self.counters[name] for name in (
                "hits", "misses", "roll_backs", "redone_cells", "wasted", "general_calls", "errors")}
            payoffs = [one.payoff for one in self.prepared.values()]
            found["switched_off"] = sum(one.switched_off for one in payoffs)
            found["switched_on"] = sum(one.switched_on for one in payoffs)
            found["on"] = sum(one.on for one in payoffs)
            found["general_calls"] += self.pause.calls
            found["reasons"] = dict(self.reasons + Counter({OFF: self.pause.calls}))
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
    found: list[Any] = [nesting, casts()]
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
