"""Loop router: cells go through a router again until they leave, so many times at most (Brainstorm, OSDI'23, section
3).

    decide, decide, ...: -1 leaves    -->    each cell has been in as many branches as it had decisions before its -1
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from anyshape.base.errors import InputError
from anyshape.route.core.router import Router
from anyshape.route.core.routes import Routes, checked


class Loop(nn.Module):
    """A router that cells are sent back to.

    Args:
        router: keeps the shape of cells, and passes dropped ones on (drop="identity"). A cell that it drops has left:
            it comes back as it was then, and is not routed again, whatever the router function would say.
        max_iters: how often at most. The number is fixed, so that a compiled program is one graph; branches run on the
            cells that are still there.

    Calls: loop(cells, ...) -> cells; further arguments for the router function.
    """

    def __init__(self, router: Router, max_iters: int) -> None:
        super().__init__()
        if router.drop != "identity":
            raise InputError("cells cannot leave a loop through this router", why=f"drop is {router.drop!r}",
                             do="use drop='identity', so that dropped cells pass on as they are")
        self.router, self.max_iters = router, max_iters

    def forward(self, cells: Tensor, *args: Any, **kw: Any) -> Tensor:
        inside = torch.ones(cells.shape[0], 1, dtype=torch.bool, device=cells.device)
        for _ in range(self.max_iters):
            routes = checked(self.router.router_fn(cells, *args, **kw), cells.shape[0], self.router.name or "a loop")
            ids = torch.where(inside, routes.ids, -1)
            inside = (ids >= 0).any(1, keepdim=True)
            cells = self.router(cells, routes=Routes(ids, routes.weights, routes.logits))
        return cells


def loop(router: Router, max_iters: int) -> Loop:
    """A `Loop` around a router: cells that it sends back go through it again."""
    return Loop(router, max_iters)
