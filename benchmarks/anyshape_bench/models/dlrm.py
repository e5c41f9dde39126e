"""DLRM, a ranking model (Naumov and others, 2019): tables of embeddings, their products, perceptrons."""
from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

DENSE, TABLES, ROWS = 13, 26, 5000


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """A click probability per example."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.bottom = perceptron(DENSE, 512, 256, width)
        self.tables = nn.ModuleList(nn.EmbeddingBag(ROWS, width, mode="sum") for _ in range(TABLES))
        vectors = TABLES + 1
        self.top = perceptron(width + vectors * (vectors - 1) // 2, 1024, 512, 256, 1)
        rows, columns = torch.tril_indices(vectors, vectors, -1)
        self.register_buffer("pairs", rows * vectors + columns)
        self.pairs: Tensor

    def forward(self, dense: Tensor, chosen: Tensor) -> Tensor:
        """dense float32[batch, DENSE], chosen int64[TABLES, batch, bag] to float32[batch]."""
        x = self.bottom(dense)
        found = [table(chosen[i]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([x, *found], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return torch.sigmoid(self.top(torch.cat([x, products[:, self.pairs]], dim=1))).squeeze(1)
