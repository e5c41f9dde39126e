"""The overhead of profiling, measured: blocks of calls with and without recording, interleaved, with a confidence
interval."""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import nn

from anyshape.route.profile.profile import Profile
from anyshape.route.profile.watch import Watch


def measure_overhead(model: nn.Module, call: Callable[[], Any], *, blocks: int = 40, seconds: float = 0.05,
                     resamples: int = 2000) -> Profile:
    """The profile of calls whose `overhead` is the share of time that recording added to them: the least, the middle
    and the most of a 95 % confidence interval.

    A block of calls with and one without recording make a pair, in an order that alternates; the overhead is the median
    of the pairs' ratios less one, its interval that of a bootstrap over pairs (Efron 1979).

    Args:
        call: runs the model once. blocks: pairs. seconds: that a block is to take, about.
    """
    watch = Watch(model)
    watch.start()
    try:
        call()
        recorders = {name: router.recorder for name, router in watch.routers_by_name.items()}
        count = max(1, round(seconds / max(_time(call, 2), 1e-7)))
        ratios = []
        for number in range(blocks):
            times = {}
            for on in ((True, False), (False, True))[number % 2]:
                for name, router in watch.routers_by_name.items():
                    router.recorder = recorders[name] if on else None
                call()  # not timed: it may run another program than the call before
                times[on] = _time(call, count)
            ratios.append(times[True] / times[False] - 1)
        for name, router in watch.routers_by_name.items():
            router.recorder = recorders[name]
    finally:
        watch.stop()
    sample = np.random.default_rng(0).choice(ratios, (resamples, blocks))
    least, most = np.percentile(np.median(sample, 1), (2.5, 97.5))
    watch.overhead = (float(least), float(np.median(ratios)), float(most))
    return watch.taken()


def _time(call: Callable[[], Any], count: int) -> float:
    """Seconds of one of so many calls."""
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count
