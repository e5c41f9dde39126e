"""The fast model against the plain one: the same weights, the same batches, one after the other.

Each sampled batch is run by both in turn, and who goes first changes from batch to batch, so that a machine that is
busy for a while slows both. A run is forward, loss and backward; the optimiser's update is the same for both and is
left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from anyshape.tools.demo import data, measure
from anyshape.tools.demo.backends import Backend, Forward
from anyshape.tools.demo.training import Session

SAMPLE = 10  # batches
AHEAD = 80  # the sample is drawn from this many batches that come next
REPEATS = 2


@dataclass(frozen=True, slots=True)
class Comparison:
    """Throughputs in tokens per second over the sample; `ratio` is fast over eager.

    loss_difference: largest |fast - eager| / |eager| of the losses. gradient_difference: the same in the 2-norm
    over all weights at once, on the sample's longest batch of shape [rows, length]. eager_rise: bytes by which
    eager's resident memory rose on that batch. arena: the fast backend's arena on it, 0 where there is none.
    """

    fast: float
    eager: float
    ratio: float
    slowest_ratio: float
    fastest_ratio: float
    loss_difference: float
    gradient_difference: float
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


def run(model: nn.Module, forward: Forward, batch: data.Batch) -> tuple[float, float]:
    """Forward, loss and backward; gives the seconds and the loss, and leaves the gradients on `model`."""
    model.zero_grad(set_to_none=True)
    begin = time.perf_counter()
    loss = forward(batch.tokens, batch.targets)
    loss.backward()
    return time.perf_counter() - begin, float(loss.detach())


def gradients(model: nn.Module) -> list[Tensor]:
    """A copy of the gradients."""
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def relative_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm of what is expected, all tensors taken together."""
    pairs = list(zip(found, expected, strict=True))
    difference = sum(float((left - right).double().pow(2).sum()) for left, right in pairs)
    size = sum(float(right.double().pow(2).sum()) for _, right in pairs)
    return (difference / max(size, 1e-300)) ** 0.5


def compare(session: Session, backend: Backend) -> Comparison:
    """Measure `backend` against eager on the batches that would come next; weights are not changed."""
    model = session.model
    batches = sample_batches(session)
    longest = batches[-1]

    measure.forget_peak()
    before = measure.resident_now()
    _, expected_loss = run(model, model, longest)
    eager_rise = max(measure.resident_peak() - before, 0)
    expected = gradients(model)
    _, found_loss = run(model, backend.forward, longest)
    arena = backend.arena_bytes()
    gradient_difference = relative_difference(gradients(model), expected)
    loss_difference = abs(found_loss - expected_loss) / abs(expected_loss)

    fast_total = eager_total = 0.0
    ratios = []
    for index, batch in enumerate(batches):
        fast = eager = float("inf")
        for repeat in range(REPEATS):
            for is_fast in (True, False) if (index + repeat) % 2 else (False, True):
                seconds, loss = run(model, backend.forward if is_fast else model, batch)
                if is_fast:
                    fast, found_loss = min(fast, seconds), loss
                else:
                    eager, expected_loss = min(eager, seconds), loss
        loss_difference = max(loss_difference, abs(found_loss - expected_loss) / abs(expected_loss))
        fast_total += fast
        eager_total += eager
        ratios.append(eager / fast)
    model.zero_grad(set_to_none=True)
    tokens = sum(batch.real for batch in batches)
    rows, length = longest.tokens.shape
    return Comparison(
        fast=tokens / fast_total,
        eager=tokens / eager_total,
        ratio=eager_total / fast_total,
        slowest_ratio=min(ratios),
        fastest_ratio=max(ratios),
        loss_difference=loss_difference,
        gradient_difference=gradient_difference,
        eager_rise=eager_rise,
        arena=arena,
        rows=rows,
        length=length,
    )
