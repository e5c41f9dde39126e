"""Routes: what a router function decides: for each cell the branches that it takes, and their weights."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from anyshape.base.errors import InputError


class Routes(NamedTuple):
    """The decision for N cells.

    ids: whole numbers [N] or [N, k]: branches of each cell in the order of the combine; -1 drops (a cell, or one of
        its k choices). weights: floats of the shape of `ids`; gradients go through them. Left out, all are one.
    logits: [N, branches], for losses; nothing else reads them.
    """

    ids: Tensor
    weights: Tensor | None = None
    logits: Tensor | None = None


def checked(found: object, cells: int, where: str) -> Routes:
    """What a router function returned, as Routes with ids and weights of rank 2; reads no values.

    Raises:
        InputError: another type, dtype or number of cells.
    """
    routes = Routes(found) if isinstance(found, Tensor) else found
    if not isinstance(routes, Routes):
        if isinstance(routes, tuple) and 1 <= len(routes) <= 3 and isinstance(routes[0], Tensor):
            routes = Routes(*routes)
        else:
            raise InputError(f"the router function of {where} returned {type(found).__name__}", why="routes are needed",
                             do="return route.Routes(ids, weights)")
    ids, weights = routes.ids, routes.weights
    if ids.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8) or ids.dim() not in (1, 2):
        raise InputError(f"the routes of {where} have dtype {ids.dtype} and shape {tuple(ids.shape)}",
                         why="ids are whole numbers of shape [cells] or [cells, k]", do="return indices, not a mask")
    if ids.shape[0] != cells:
        raise InputError(f"the routes of {where} are for {ids.shape[0]} cells", why=f"{cells} cells came in",
                         do="return one row for each cell")
    if weights is not None and weights.shape != ids.shape:
        raise InputError(f"the routes of {where} have weights of shape {tuple(weights.shape)}",
                         why=f"their ids have shape {tuple(ids.shape)}", do="give one weight for each choice")
    if ids.dim() == 1:
        return Routes(ids[:, None], None if weights is None else weights[:, None], routes.logits)
    return routes


def wide(logits: Tensor) -> torch.dtype:
    """The dtype in which scores become probabilities: f32, or f64 where they are f64."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
