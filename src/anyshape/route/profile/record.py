"""Profiling of a dynamic network while it runs."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from anyshape.base.errors import InputError
from anyshape.route.profile.routers import routers_of
from anyshape.route.profile.watch import Watch


@contextmanager
def profile(model: nn.Module, *, budget: float = 0.01) -> Iterator[Watch]:
    """Records what the routers of a model decide while the block runs.

    The model may be compiled, before or after; one that is compiled before is compiled once more for the block, and
    runs as before behind it. Memory is bounded, and nothing waits: what the counting thread cannot follow is lost and
    counted (RouterProfile.lost). The result can be asked at any time, in the block and behind it, and has everything
    that a Profile has; `taken()` is the Profile of that time.

    Args:
        budget: share of time that the counting thread may take; beyond it, fewer decisions are sampled.

    Raises:
        InputError: the model has no routers, or one is being recorded already.
    """
    if not routers_of(model):
        raise InputError(f"{type(model).__name__} has no routers", why="a profile counts what routers decide",
                         do="build the model with route.Router, or let route.adopt replace its experts")
    watch = Watch(model, budget)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()
