"""The setting of autocast in this thread, of all kinds of devices."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeAlias

import torch

from anyshape import torch_compat as compat

KINDS = ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia", "maia", "privateuseone")
Casts: TypeAlias = tuple[tuple[str, torch.dtype], ...]


def casts() -> Casts:
    """(kind of devices, dtype) wherever autocast is on."""
    some = compat.get("torch._C._is_any_autocast_enabled")
    if some is not None and not some():
        return ()
    return tuple([(kind, torch.get_autocast_dtype(kind)) for kind in KINDS if torch.is_autocast_enabled(kind)])


@contextlib.contextmanager
def casting(wanted: Casts) -> Iterator[None]:
    """Inside, autocast is on for these kinds alone, and keeps no casts."""
    before, caching = casts(), torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    _set(before, wanted)
    try:
        yield
    finally:
        _set(wanted, before)
        torch.set_autocast_cache_enabled(caching)


def _set(now: Casts, wanted: Casts) -> None:
    for kind in {kind for kind, _ in now} - {kind for kind, _ in wanted}:
        torch.set_autocast_enabled(kind, False)
    for kind, dtype in wanted:
        torch.set_autocast_enabled(kind, True)
        torch.set_autocast_dtype(kind, dtype)
