"""Auxiliary losses of routers: load balance and router z-loss, from the scores and routes of one decision."""
from __future__ import annotations

import torch
from torch import Tensor

from anyshape.base.errors import InputError
from anyshape.route.core.routes import Routes, wide


def load_balance(routes: Routes, *, all_choices: bool = False) -> Tensor:
    """branches * sum(f_i P_i): 1 where loads are even, `branches` where one branch takes all (Switch Transformer,
    Fedus et al., 2021, equations 4 to 6; GShard, Lepikhin et al., 2020, section 2.2).

    f_i is the share of cells whose highest score is branch i; with `all_choices` the share of choices that were not
    dropped that go there. P_i is the mean of the softmax of scores. Gradients go through P_i. No cells: 0.

    Args:
        routes: with logits [N, branches].

    Returns:
        A scalar, f32 or f64.

    Raises:
        InputError: no logits.
    """
    logits = _logits(routes, "load_balance")
    count, branches = logits.shape
    chosen = routes.ids if all_choices else logits.argmax(-1)
    places = torch.arange(branches, device=logits.device)
    hits = (chosen.reshape(-1, 1) == places).to(wide(logits)).sum(0)
    share = hits / hits.sum().clamp(min=1)
    likely = torch.softmax(logits, -1, dtype=wide(logits)).sum(0) / max(count, 1)
    return branches * (share * likely).sum()


def z_loss(routes: Routes) -> Tensor:
    """The mean of logsumexp(scores) ** 2, which keeps scores small (ST-MoE, Zoph et al., 2022, equation 5). No cells:
    0.

    Args:
        routes: with logits [N, branches].

    Returns:
        A scalar, f32 or f64.

    Raises:
        InputError: no logits.
    """
    logits = _logits(routes, "z_loss")
    return logits.to(wide(logits)).logsumexp(-1).square().sum() / max(logits.shape[0], 1)


def _logits(routes: Routes, name: str) -> Tensor:
    if routes.logits is None:
        raise InputError(f"{name} needs scores", why="these routes have no logits",
                         do="give route.Routes(ids, weights, logits) in the router function")
    return routes.logits
