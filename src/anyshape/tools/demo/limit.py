"""The demo under a limit in bytes: what half of its peak is.

The peak without a limit is that of the largest of the coming batches: bytes that a step takes beyond
what is alive before, as the compiler computes them for the batches' shapes before any of them runs.
"""
from __future__ import annotations

import copy

import anyshape
from anyshape.base.errors import AnyShapeError, LimitError
from anyshape.base.units import bytes_of, bytes_text
from anyshape.runtime.context.process_context import shared_context
from anyshape.tools.demo.backends import loss_of
from anyshape.tools.demo.training import Session
from anyshape.tools.demo.watch import PeakWatch

HALF = "half"
NO_LIMIT = 1 << 62
TRIED = 8  # of the coming shapes with the highest peaks, for which the limit is tried before the first step


def limit_bytes(text: str, session: Session, steps: int) -> tuple[int, str]:
    """The limit that `text` means for the coming steps, and a line that says how it was found.

    Raises:
        ConfigError: it is no number of bytes. AnyShapeError: the largest batches cannot be done within half.
    """
    if text != HALF:
        return bytes_of("--memory-limit", text), ""
    shapes = coming_shapes(session, steps)
    model, optimizer = copy.deepcopy((session.model, session.optimizer))  # the step that tells changes them
    watch = PeakWatch(anyshape.train_step(model, loss_of, optimizer, memory_limit=NO_LIMIT))
    batch, _ = session.stream.take(session.cursor)
    watch.step(batch.tokens, batch.targets)
    for pool in (shared_context().kept, shared_context().temporary):
        pool.release_idle()
    anyshape.stats(reset=True)  # as if nothing had run before
    found = sorted(((watch.peak(*shape)[0], shape) for shape in shapes), reverse=True)
    highest, (rows, length) = found[0]
    half = highest // 2
    told = f"without a limit the peak of the coming steps is {bytes_text(highest)}, at {rows} x {length}"
    for peak, shape in found[:TRIED]:
        try:
            watch.peak(*shape, half)
        except LimitError as error:
            raise AnyShapeError(f"the demo cannot run within half of its peak, {bytes_text(half)}",
                                why=f"{told}; a batch of {shape[0]} x {shape[1]} takes {bytes_text(peak)}: "
                                    f"{error.why}",
                                do=f"{error.do.split(',')[0]}, by --memory-limit") from error
    return half, f"{told}; the limit is half of it, {bytes_text(half)}"


def coming_shapes(session: Session, steps: int) -> list[tuple[int, int]]:
    """The shapes of the batches up to step `steps`, each once; one at least."""
    cursor = session.cursor
    found: dict[tuple[int, int], None] = {}
    for _ in range(max(steps - session.step, 1)):
        batch, cursor = session.stream.take(cursor)
        found[tuple(batch.tokens.shape)] = None  # type: ignore[index]
    return list(found)
