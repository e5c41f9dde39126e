"""Compilation cache of loaded files: what this user compiled of a graph before, its plan and machine code, in the
user's own disk cache, which is only read where nobody else could have written it (base/disk_cache.py). A file that
nobody trusts is then loaded as if its machine code were trusted, and nothing of it becomes code all the same.

    entry:  {"machine": {...}, "sizes": {"plan": bytes, "host": bytes, ...}} as a line, the plan's text, the objects
"""
from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from anyshape.artifact.native_code import NativeCode
from anyshape.backend.interface import ObjectCache
from anyshape.backend.loaded_code import LoadedKernel
from anyshape.backend.targets import deployment
from anyshape.base.config import Config
from anyshape.base.errors import AnyShapeError
from anyshape.base.own_sources import own_sources
from anyshape.plan.ir.program import Plan

FORMAT = 1
PLAN = "plan"
NOT_IN_KEY = ("cache", "warm_start", "cache_dir", "cache_limit", "background", "defer", "strict", "fullgraph")


def key_of(graph: bytes, needed: Sequence[str], config: Config, threads: int) -> str:
    """The key of what a graph's text is compiled to; "" where that is not kept: a setting asks for what is seen while
    it is compiled, or the package's files have changed since the process began."""
    sources = own_sources()
    if not sources or config.show or config.dump or config.edit or config.check >= 2:
        return ""
    settings = [(name, getattr(config, name)) for name in config.__dataclass_fields__ if name not in NOT_IN_KEY]
    parts = ("deployed", FORMAT, sources, deployment().processor(threads), settings, [*needed])
    return hashlib.sha256(repr(parts).encode() + graph).hexdigest()


def kept(key: str, cache: ObjectCache) -> tuple[str, NativeCode] | None:
    """The text of the plan and the machine code that are kept; None where there are none for this process."""
    data = cache.get(key)
    if data is None:
        return None
    line, _, rest = data.partition(b"\n")
    entry = json.loads(line)
    machine = deployment().machine_of(entry["machine"])
    if machine is None or deployment().unfit(machine):
        return None
    pieces, at = {}, 0
    for name, size in entry["sizes"].items():
        pieces[name] = rest[at:at + size]
        at += size
    return pieces.pop(PLAN).decode(), NativeCode(machine, pieces)


def keep(key: str, target: Any, plan: Plan, kernels: Sequence[LoadedKernel]) -> None:
    """Keeps what was compiled, where all of it can be loaded again."""
    from anyshape.plan.ir.show import show
    objects = deployment().kept_modules(target, kernels)
    if objects is None:
        return
    machine = target.machine
    try:
        NativeCode(machine, objects)
    except AnyShapeError:  # not for such processors
        return
    pieces = {PLAN: show(plan).encode(), **objects}
    entry = {"machine": dataclasses.asdict(machine), "sizes": {name: len(data) for name, data in pieces.items()}}
    target.native.cache.put(key, b"\n".join((json.dumps(entry).encode(), b"".join(pieces.values()))))
