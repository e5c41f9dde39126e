"""Routers of a model by name, and the signature by which a profile knows its model."""
from __future__ import annotations

from torch import nn

from anyshape.base.errors import InputError
from anyshape.route.core.router import Router

COMPILED = "_orig_mod."  # how torch.compile's modules name what they compile

Signature = tuple[tuple[str, int], ...]


def routers_of(model: nn.Module) -> dict[str, Router]:
    """The routers of a model, itself and nested ones included, in the order of its modules.

    Their names are their own where no other router or place has the same, else those of the modules in the model. A
    router that stands in several places is there once. A compiled model has the names of the model.

    Raises:
        InputError: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"{type(model).__name__} is no model", why="routers are found in the modules of an nn.Module",
                         do="give the module that holds the routers")
    found = {path.removeprefix(COMPILED) or "router": module for path, module in model.named_modules()
             if isinstance(module, Router)}
    own = [router.name for router in found.values()]
    return {router.name if own.count(router.name) == 1 and router.name not in ("", *found) else path: router
            for path, router in found.items()}


def signature(model: nn.Module) -> Signature:
    """(name, number of branches) of each router: models with the same have profiles that fit each other."""
    return tuple((name, router.branch_count) for name, router in routers_of(model).items())
