"""Router functions: decisions that are ready to use, each a module from cells to Routes."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from anyshape.route.core.routes import Routes


class TopK(nn.Module):
    """The k branches of the highest scores, weighted by their softmax.

    Args:
        gate: cells -> scores [N, branches]. k: choices of a cell. normalize: whether the k weights of a cell sum to 1
            (softmax over the chosen) or are those of the softmax over all branches.
    """

    def __init__(self, gate: Callable[[Tensor], Tensor], k: int = 2, *, normalize: bool = True) -> None:
        super().__init__()
        self.gate, self.k, self.normalize = gate, k, normalize

    def forward(self, cells: Tensor) -> Routes:
        logits = self.gate(cells)
        weights, ids = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), self.k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routes(ids, weights.to(cells.dtype), logits)


def top_k(gate: Callable[[Tensor], Tensor], k: int = 2, *, normalize: bool = True) -> TopK:
    """See TopK."""
    return TopK(gate, k, normalize=normalize)
