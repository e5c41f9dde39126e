"""The contraction path of an einsum of three and more while it is traced: chosen by the sizes of the first call, which
become no guard.

    einsum("btef,efd,bte->btd", x, y, z), with opt_einsum installed  -->  (x, z), then (xz, y), at every size

torch.einsum asks the package opt_einsum, where that is there, for the order with the fewest operations. It compares
sizes as Python's whole numbers, and so every size would be fixed. A path is right at all sizes; only its cost differs.
Processes of one torch.distributed are to make the same program of other first batches: there sizes that may change are
taken for likely ones.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anyshape.torch_compat.versions.symbolic_functions import likely_number

LIKELY = 64  # of a size that only the data tell, or that each process has another number for; as in sym/facts.py


class PathByHints:
    """The package opt_einsum as `torch.einsum` uses it. package: itself."""

    def __init__(self, package: Any) -> None:
        self.package = package

    def contract_path(self, equation: str, *operands: torch.Tensor, **settings: Any) -> Any:
        """opt_einsum.contract_path for the sizes that the operands have in the first call, or likely have."""
        shapes = [tuple(_number(size) for size in one.shape) for one in operands]
        return self.package.contract_path(equation, *shapes, shapes=True, **settings)


def by_hints(get_package: Callable[[], Any]) -> Callable[[], Any]:
    """`get_opt_einsum` of torch.backends.opt_einsum, whose answers do not fix sizes."""
    def get() -> Any:
        package = get_package()
        return None if package is None else PathByHints(package)
    return get


def _number(size: Any) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    if has_peers() or not size.node.has_hint():
        return likely_number(size, LIKELY)
    return int(size.node.hint)


def has_peers() -> bool:
    """Is this one of several processes of torch.distributed?"""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return there and torch.distributed.get_world_size() > 1
