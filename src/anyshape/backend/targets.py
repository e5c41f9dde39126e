"""The target registry: devices that programs are compiled for, by name, and the native routines that the host of every
target uses. A device is a folder of this package and a line here; its code is imported when it is first asked for."""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from anyshape.backend.interface import HostRoutines, Target
from anyshape.base.errors import DeviceError

if TYPE_CHECKING:
    from anyshape.base.config import Config

# PyTorch's word for a kind of devices -> module with `target_of(cache, products)`; of devices with numbers or drivers
# also `device_target_of(cache, products, device, graphs_after)`
TARGETS = {"cpu": "anyshape.backend.cpu.target", "cuda": "anyshape.backend.triton.gpu"}
DEFAULT = "cpu"
HOST = "anyshape.backend.cpu.native_routines"
DEPLOYMENT = "anyshape.backend.cpu.deployment"


def target_of(config: Config, device: str = "") -> Target:
    """The target that programs of `config` are compiled for. device: PyTorch's word for that of their tensors, such as
    "cuda:0"; left out, the usual one.

    Raises:
        DeviceError: there is no target for such devices, or this one cannot be used.
    """
    from anyshape.base.disk_cache import cache_of  # not needed where machine code is loaded
    kind = device.partition(":")[0]
    name = DEFAULT if kind in ("", "cpu") else kind
    if name not in TARGETS:
        raise DeviceError(f"there is no target for the device {device}", why=f"there are {', '.join(TARGETS)}",
                          do="move the tensors to one of these")
    module, given = _module(TARGETS[name]), (cache_of(config), config.products_mode)
    if name == DEFAULT:
        return module.target_of(*given)  # type: ignore[no-any-return]
    return module.device_target_of(*given, device, config.device_graphs)  # type: ignore[no-any-return]


def usual_target() -> Target:
    """The target of the environment's settings."""
    from anyshape.base.config import Config
    return target_of(Config.make())


def host_routines() -> HostRoutines:
    """The host's own native routines: one object for all of the process. Their object code is kept where that of the
    first program is, or where the environment says."""
    from anyshape.base.config import Config
    from anyshape.base.disk_cache import cache_of
    return _module(HOST).first_routines(lambda: cache_of(Config.make()))  # type: ignore[no-any-return]


def deployment() -> Any:
    """What deployed files need of the CPU: the module backend/cpu/deployment.py."""
    return _module(DEPLOYMENT)


def _module(name: str) -> Any:
    return importlib.import_module(name)
