"""Weights of experts: those of a list of feed-forward modules, in the stacks of `route.Experts`."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def stack_weights(modules: Iterable[nn.Module], experts: Any) -> None:
    """Gives `experts` (a route.Experts) the weights of modules `Sequential(Linear, activation, Linear)`."""
    pairs = [(one[0], one[2]) for one in modules]  # type: ignore[index]
    with torch.no_grad():
        for place, name in enumerate(("in", "out")):
            getattr(experts, f"weight_{name}").copy_(torch.stack([pair[place].weight.t() for pair in pairs]))
            bias = getattr(experts, f"bias_{name}")
            if bias is not None:
                bias.copy_(torch.stack([pair[place].bias for pair in pairs]))
