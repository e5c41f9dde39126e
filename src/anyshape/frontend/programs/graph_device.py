"""The device of a captured graph: the target that its program is compiled for is chosen by where its tensors are."""
from __future__ import annotations

from torch.fx import GraphModule

from anyshape.backend.interface import Target
from anyshape.backend.targets import target_of
from anyshape.base.config import Config
from anyshape.base.errors import DeviceError, Unsupported
from anyshape.frontend.symbols.node_metadata import devices_of


def target_for(gm: GraphModule, config: Config) -> Target:
    """The target of a graph, every node of which has `meta["val"]`.

    Raises:
        Unsupported: its tensors are on several devices, or on one that cannot be used; PyTorch runs it.
    """
    first = devices_of(gm)
    devices = sorted(first)
    if len(devices) > 1:
        named = ", ".join(f"{first[device].name} ({first[device].target}) on {device}" for device in devices)
        raise Unsupported(f"the graph is on several devices: {', '.join(devices)}",
                          why=f"a program runs on one device, with numbers and sizes on the host; there are {named}",
                          do="move its tensors to one of them")
    try:
        return target_of(config, devices[0] if devices else "")
    except DeviceError as error:
        raise Unsupported(error.what, why=error.why, do=error.do) from error

