"""The fast step against the plain one: the same weights, the same batches, one after the other.

Each sampled batch is run by both in turn, and who goes first changes from batch to batch, so that a machine that is
busy for a while slows both. A run is a whole step, update included; after it weights and optimiser state are put back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anyshape.tools.demo import data, measure
from anyshape.tools.demo.backends import Backend, Step, apart
from anyshape.tools.demo.training import Session

SAMPLE = 10  # batches
AHEAD = 80  # the sample is drawn from this many batches that come next
REPEATS = 2


@dataclass(frozen=True, slots=True)
class Comparison:
    """Throughputs in tokens per second over the sample; `ratio` is fast over eager.

    loss_difference: largest |fast - eager| / |eager| of the losses. update_difference: the same of what a step adds to
    the weights, in the 2-norm over all at once, on the sample's longest batch of shape [rows, length]. eager_rise:
    bytes by which eager's resident memory rose on that batch. arena: the fast backend's arena on it, 0 where there
    is none.
    """

    fast: float
    eager: float
    ratio: float
    slowest_ratio: float
    fastest_ratio: float
    loss_difference: float
    update_difference: float
    eager_rise: int
    arena: int
    rows: int
    length: int


def sample_batches(session: Session) -> list[data.Batch]:
    """Batches of the coming steps, spread evenly over the lengths."""
    cursor = session.cursor
    coming = []
    for _ in range(AHEAD):
        batch, cursor = session.stream.take(cursor)
        coming.append(batch)
    coming.sort(key=lambda batch: batch.tokens.shape[1])
    last = len(coming) - 1
    return [coming[round(index * last / (SAMPLE - 1))] for index in range(SAMPLE)]


class Trial:
    """Steps that leave no trace: weights and optimiser state are put back after each."""

    def __init__(self, session: Session) -> None:
        self.weights = [weight.detach() for weight in session.model.parameters()]
        states = [state for one in session.optimizer.state.values() for state in one.values()]
        self.kept = [(tensor, tensor.clone()) for tensor in (*self.weights, *states)]

    def run(self, step: Step, batch: data.Batch) -> tuple[float, float]:
        """One step; gives its seconds and its loss."""
        begin = time.perf_counter()
        loss = float(step(batch.tokens, batch.targets))
        seconds = time.perf_counter() - begin
        self.put_back()
        return seconds, loss

    def update(self, step: Step, batch: data.Batch) -> tuple[list[Tensor], float]:
        """What one step adds to each weight, and its loss."""
        loss = float(step(batch.tokens, batch.targets))
        added = [weight - before for weight, (_, before) in zip(self.weights, self.kept, strict=False)]
        self.put_back()
        return added, loss

    def put_back(self) -> None:
        """Weights and states as they were at the beginning."""
        with torch.no_grad():
            for tensor, before in self.kept:
                tensor.copy_(before)


def relative_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm of what is expected, all tensors taken together."""
    pairs = list(zip(found, expected, strict=True))
    difference = sum(float((left - right).double().pow(2).sum()) for left, right in pairs)
    size = sum(float(right.double().pow(2).sum()) for _, right in pairs)
    return (difference / max(size, 1e-300)) ** 0.5


def compare(session: Session, backend: Backend) -> Comparison:
    """Measure `backend` against eager on the batches that would come next; weights are not changed."""
    trial = Trial(session)
    plain = apart(session.model, session.optimizer)
    batches = sample_batches(session)
    longest = batches[-1]

    measure.forget_peak()
    before = measure.resident_now()
    trial.run(plain, longest)
    eager_rise = max(measure.resident_peak() - before, 0)
    expected, expected_loss = trial.update(plain, longest)
    found, found_loss = trial.update(backend.step, longest)
    arena = backend.arena_bytes()
    update_difference = relative_difference(found, expected)
    loss_difference = abs(found_loss - expected_loss) / abs(expected_loss)

    fast_total = eager_total = 0.0
    ratios = []
    for index, batch in enumerate(batches):
        fast = eager = float("inf")
        for repeat in range(REPEATS):
            for is_fast in (True, False) if (index + repeat) % 2 else (False, True):
                seconds, loss = trial.run(backend.step if is_fast else plain, batch)
                if is_fast:
                    fast, found_loss = min(fast, seconds), loss
                else:
                    eager, expected_loss = min(eager, seconds), loss
        loss_difference = max(loss_difference, abs(found_loss - expected_loss) / abs(expected_loss))
        fast_total += fast
        eager_total += eager
        ratios.append(eager / fast)
    tokens = sum(batch.real for batch in batches)
    rows, length = longest.tokens.shape
    return Comparison(
        fast=tokens / fast_total,
        eager=tokens / eager_total,
        ratio=eager_total / fast_total,
        slowest_ratio=min(ratios),
        fastest_ratio=max(ratios),
        loss_difference=loss_difference,
        update_difference=update_difference,
        eager_rise=eager_rise,
        arena=arena,
        rows=rows,
        length=length,
    )
