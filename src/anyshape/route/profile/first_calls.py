"""Arguments of modules in a run of their model, observed by forward pre-hooks."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


def first_calls(model: nn.Module, modules: Mapping[str, nn.Module], example: tuple[Any, ...],
                keep: Callable[[tuple[Any, ...], dict[str, Any]], T | None]) -> dict[str, T]:
    """By name, what `keep(args, kwargs)` makes of each module's first call for which that is not None, in
    `model(*example)` without gradients. Modules that are not called so are left out."""
    found: dict[str, T] = {}

    def observe(name: str) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in found and (kept := keep(args, kwargs)) is not None:
                found[name] = kept
        return note

    handles = [module.register_forward_pre_hook(observe(name), with_kwargs=True) for name, module in modules.items()]
    try:
        with torch.no_grad():
            model(*example)
    finally:
        for handle in handles:
            handle.remove()
    return found


def routed_cells(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...] | None:
    """The tensors that a call of a router routes, [N, *cell] each; None where there are none."""
    if not args:
        return None
    cells = args[0] if isinstance(args[0], tuple) else (args[0],)
    return tuple(cell.detach() for cell in cells) if all(isinstance(one, Tensor) for one in cells) else None
