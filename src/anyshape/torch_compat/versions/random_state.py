"""The state of random number generators: PyTorch's own of the host, and those of the devices that tensors are on."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, eq=False)
class RandomState:
    """Where generators are. states: the host's, and by device those of others, each as uint8."""

    host: torch.Tensor
    devices: tuple[tuple[torch.device, torch.Tensor], ...]

    @classmethod
    def now(cls, values: Iterable[Any]) -> RandomState:
        """Of the host, and of the devices of those `values` that are tensors; a device whose module has no
        get_rng_state keeps no state that could be restored."""
        devices = dict.fromkeys(one.device for one in values if isinstance(one, torch.Tensor)
                                and one.device.type not in ("cpu", "meta"))
        return cls(torch.random.get_rng_state(), tuple(
            (one, module.get_rng_state(one)) for one in devices
            if hasattr(module := torch.get_device_module(one), "get_rng_state")))

    def restore(self) -> None:
        """Random numbers will be those that they were."""
        torch.random.set_rng_state(self.host)
        for device, state in self.devices:
            torch.get_device_module(device).set_rng_state(state, device)
