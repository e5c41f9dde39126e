"""Profiling overhead: what recording the decisions of routers adds to calls of a compiled mixture of experts."""
from __future__ import annotations

import torch
from torch import Tensor, nn

import anyshape
from anyshape import route
from anyshape.route.profile.overhead import measure_overhead
from anyshape_bench.routes.case import Study

WIDTH, HIDDEN, EXPERTS, LAYERS = 256, 1024, 16, 4
BATCH = (4, 128)


class Layer(nn.Module):
    """A mixture of experts behind a norm, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = route.Router(route.top_k(nn.Linear(WIDTH, EXPERTS), k=2), route.Experts(EXPERTS, WIDTH, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        cells = route.annotate_cell(self.norm(x), dims=(0, 1))
        return x + route.restore(self.moe(cells), like=x, dims=(0, 1))


def measure(quick: bool) -> dict[str, float]:
    """Numbers by name: overhead, the median share of time that recording adds; overhead_low and overhead_high, the ends
    of its 95 % confidence interval."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(1 if quick else LAYERS))).eval()
    fast = anyshape.compile(model)
    batch = torch.randn(*BATCH, WIDTH)
    with torch.no_grad():
        interval = measure_overhead(model, lambda: fast(batch), blocks=10 if quick else 200,
                                    seconds=0.05 if quick else 0.1).overhead
    assert interval is not None
    least, middle, most = interval
    return {"overhead": middle, "overhead_low": least, "overhead_high": most}


def cases() -> list[Study]:
    return [Study("profiling", "profiling", measure, quick=True)]
