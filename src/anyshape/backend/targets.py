"""The target registry: devices that programs are compiled for, by name, and the native routines that the host of every
target uses. A device is a folder of this package and a line here; its code is imported when it is first asked for."""
from __future__ import annotations

import importlib
from typing import Any

from anyshape.backend.interface import HostRoutines, Target
from anyshape.base.config import Config
from anyshape.base.disk_cache import cache_of

TARGETS = {"cpu": "anyshape.backend.cpu.target"}  # name -> module with `target_of(cache, products)`
DEFAULT = "cpu"
HOST = "anyshape.backend.cpu.native_routines"


def target_of(config: Config) -> Target:
    """The target that programs of `config` are compiled for."""
    return _module(TARGETS[DEFAULT]).target_of(cache_of(config), config.products_mode)  # type: ignore[no-any-return]


def usual_target() -> Target:
    """The target of the environment's settings."""
    return target_of(Config.make())


def host_routines() -> HostRoutines:
    """The host's own native routines: one object for all of the process. Their object code is kept where that of the
    first program is, or where the environment says."""
    return _module(HOST).first_routines(lambda: cache_of(Config.make()))  # type: ignore[no-any-return]


def _module(name: str) -> Any:
    return importlib.import_module(name)
