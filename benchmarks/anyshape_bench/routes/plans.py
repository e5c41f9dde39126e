"""Plans of benchmark cases: a routed network profiled on inputs of its own, then optimised and compiled."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import anyshape
from anyshape import route


def speculated(model: nn.Module, inputs: Sequence[Tensor]) -> nn.Module:
    """The network with the plan that speculates on what its routers did on `inputs`."""
    with torch.no_grad(), route.profile(model) as profile:
        for x in inputs:
            model(x)
    plan = route.optimize(model, profile, passes=["speculate"], compile=anyshape.compile)
    return plan.apply(model, drift=None)
