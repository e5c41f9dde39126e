"""Programs of torch.export whose ranges hold sizes of 0 and 1."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import anyshape
from anyshape.base.errors import InputError


class Pooled(nn.Module):
    """Attention, and what has other shapes where a size is 1."""

    def __init__(self, squeezes: bool = False) -> None:
        super().__init__()
        self.into = nn.Linear(8, 24)
        self.squeezes = squeezes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(x).chunk(3, -1)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.squeeze(0) if self.squeezes else y


def test_sizes_of_0_and_1_that_ranges_hold():
    for squeezes, least in ((False, 0), (False, 1), (True, 1)):
        model = Pooled(squeezes).eval()
        free = {0: torch.export.Dim("b", min=least, max=64), 1: torch.export.Dim("t", min=1, max=64)}
        exported = torch.export.export(model, (torch.randn(3, 5, 8),), dynamic_shapes=(free,))
        fast = anyshape.compile(exported)
        for shape in ((3, 5), (3, 1), (1, 5), (1, 1), (0, 5)):
            x = torch.randn(*shape, 8)
            if shape[0] < (2 if squeezes else least):
                with pytest.raises(InputError, match="dim 0 of x"):
                    fast(x)
            else:
                torch.testing.assert_close(fast(x), model(x))
        for symbol in exported.range_constraints:  # the user's program is as it was
            env = exported.graph_module.graph.find_nodes(op="placeholder")[-1].meta["val"].shape[0].node.shape_env
            assert env.var_to_range[symbol].lower == 2
