"""One stream of counters: what was compiled, run and held. Thread-safe; `stats()` reads, `reset()` starts over."""
from __future__ import annotations

import itertools
import threading

COUNTERS = ("programs", "runs", "plans", "kernels", "extern_calls", "compile_seconds", "cache_hits", "cache_misses",
            "fusion_retries", "arena_bytes", "arena_peak_bytes")
# what is held now is a level, not a count: a reset must not forget it
LEVELS = ("arena_bytes",)

_lock = threading.RLock()  # memory may be let go, and counted, while the thread is in here
_runs = itertools.count()  # advances in one step of the interpreter
_runs_before = 0
_values: dict[str, int | float] = dict.fromkeys(COUNTERS, 0)


def count(name: str, amount: int | float = 1) -> None:
    """Adds `amount` to the counter `name` (one of COUNTERS)."""
    with _lock:
        _values[name] += amount


def count_run() -> None:
    """Counts one run of a program: the same as count("runs"), without a lock, for it is on the way of every call."""
    next(_runs)


def arena_changed(amount: int) -> None:
    """Records that `amount` more bytes of arena memory are held (less, if negative), and the peak."""
    with _lock:
        _values["arena_bytes"] += amount
        _values["arena_peak_bytes"] = max(_values["arena_peak_bytes"], _values["arena_bytes"])


def stats() -> dict[str, int | float]:
    """A copy of all counters. Bytes and seconds are totals over the process; `arena_bytes` is what is held now."""
    with _lock:
        return {**_values, "runs": _values["runs"] + _runs_so_far() - _runs_before}


def _runs_so_far() -> int:
    return int(repr(_runs)[len("count("):-1])  # reading it otherwise would advance it


def reset() -> None:
    """Sets every counter to 0; the peak of the arena starts from what is held now."""
    global _runs_before
    with _lock:
        _runs_before = _runs_so_far()
        for name in COUNTERS:
            if name not in LEVELS:
                _values[name] = 0
        _values["arena_peak_bytes"] = _values["arena_bytes"]
