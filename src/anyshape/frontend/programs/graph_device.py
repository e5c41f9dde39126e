"""The device of a captured graph: the target that its program is compiled for is chosen by where its tensors are."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule

from anyshape.backend.interface import Target
from anyshape.backend.targets import target_of
from anyshape.base.config import Config
from anyshape.base.errors import DeviceError, Unsupported


def target_for(gm: GraphModule, config: Config) -> Target:
    """The target of a graph, every node of which has `meta["val"]`.

    Raises:
        Unsupported: its tensors are on several devices, or on one that cannot be used; PyTorch runs it.
    """
    devices = sorted({str(one.device) for node in gm.graph.nodes for one in _tensors(node.meta.get("val"))})
    if len(devices) > 1:
        raise Unsupported(f"the graph is on several devices: {', '.join(devices)}",
                          why="a program runs on one device, with numbers and sizes on the host",
                          do="move its tensors to one of them")
    try:
        return target_of(config, devices[0] if devices else "")
    except DeviceError as error:
        raise Unsupported(error.what, why=error.why, do=error.do) from error


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)
