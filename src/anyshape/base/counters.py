"""One stream of counters: what was compiled, run and held. Thread-safe; `stats()` reads, `reset()` starts over."""
from __future__ import annotations

import functools
import itertools
import threading

COUNTERS = ("programs", "runs", "plans", "kernels", "extern_calls", "eager_calls", "compile_seconds", "cache_hits",
            "cache_misses", "fusion_retries", "collectives", "collective_wait_seconds", "arena_bytes",
            "arena_peak_bytes")
# what is held now is a level, not a count: a reset must not forget it
LEVELS = ("arena_bytes",)

_lock = threading.RLock()  # memory may be let go, and counted, while the thread is in here
# those that are counted at every call: they advance in one step of the interpreter, without a lock
_quick = {name: itertools.count() for name in ("runs", "extern_calls")}
_quick_before = dict.fromkeys(_quick, 0)
_values: dict[str, int | float] = dict.fromkeys(COUNTERS, 0)


def count(name: str, amount: int | float = 1) -> None:
    """Adds `amount` to the counter `name` (one of COUNTERS)."""
    with _lock:
        _values[name] += amount


count_run = functools.partial(next, _quick["runs"])  # one run of a program
count_extern_call = functools.partial(next, _quick["extern_calls"])


def arena_changed(amount: int) -> None:
    """Records that `amount` more bytes of arena memory are held (less, if negative), and the peak."""
    with _lock:
        _values["arena_bytes"] += amount
        _values["arena_peak_bytes"] = max(_values["arena_peak_bytes"], _values["arena_bytes"])


def stats() -> dict[str, int | float]:
    """A copy of all counters. Bytes and seconds are totals over the process; `arena_bytes` is what is held now."""
    with _lock:
        return {**_values, **{name: _values[name] + _so_far(name) - _quick_before[name] for name in _quick}}


def _so_far(name: str) -> int:
    return int(repr(_quick[name])[len("count("):-1])  # reading it otherwise would advance it


def reset() -> None:
    """Sets every counter to 0; the peak of the arena starts from what is held now."""
    with _lock:
        for name in _quick:
            _quick_before[name] = _so_far(name)
        for name in COUNTERS:
            if name not in LEVELS:
                _values[name] = 0
        _values["arena_peak_bytes"] = _values["arena_bytes"]
