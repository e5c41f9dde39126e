"""Stacked branches (experts): one module whose weights have a leading dim of branches, over rows sorted by branch."""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyshape.base.errors import InputError
from anyshape.route.core import operators as ops

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu,
    "tanh": torch.tanh, "identity": lambda x: x}


class Experts(nn.Module):
    """Feed-forward experts as one module: rows -> linear -> activation -> linear, each row by its branch's weights.

    Args:
        count: number of experts. width: size of a cell's last dim. hidden: size between the products. out: size of the
            result; `width` where left out. activation: a name of ACTIVATIONS, or a function. gated: the activation of
            one product times a second one (SwiGLU). bias: of each product.
    """

    def __init__(self, count: int, width: int, hidden: int, out: int | None = None, *,
                 activation: str | Callable[[Tensor], Tensor] = "relu", gated: bool = False, bias: bool = True,
                 device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        if isinstance(activation, str) and activation not in ACTIVATIONS:
            raise InputError(f"activation {activation!r} is unknown", why=f"names are {', '.join(ACTIVATIONS)}",
                             do="choose one, or give a function")
        out = width if out is None else out
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.branch_count, self.gated = count, gated
        self.activation = ACTIVATIONS[activation] if isinstance(activation, str) else activation
        wide = 2 * hidden if gated else hidden
        self.weight_in = nn.Parameter(torch.empty(count, width, wide, **made))
        self.weight_out = nn.Parameter(torch.empty(count, hidden, out, **made))
        self.bias_in = nn.Parameter(torch.empty(count, wide, **made)) if bias else None
        self.bias_out = nn.Parameter(torch.empty(count, out, **made)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight, bias in ((self.weight_in, self.bias_in), (self.weight_out, self.bias_out)):
            bound = 1 / math.sqrt(weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        hidden = grouped_linear(rows, self.weight_in, ends, self.bias_in)
        if self.gated:
            gate, value = hidden.chunk(2, -1)
            hidden = self.activation(gate) * value
        else:
            hidden = self.activation(hidden)
        return grouped_linear(hidden, self.weight_out, ends, self.bias_out)


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows [S, *, K] by the weight [E, K, M] of their branch: [S, *, M]. Positions within a row share its branch.

    Under autocast the operands are cast as those of `torch.nn.functional.linear` are.
    """
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if rows.dim() == 2:
        return ops.grouped_linear(rows, weight, ends, bias)
    inner = math.prod(rows.shape[1:-1])
    flat = ops.grouped_linear(rows.reshape(-1, rows.shape[-1]), weight, ends * inner, bias)
    return flat.reshape(*rows.shape[:-1], weight.shape[2])
