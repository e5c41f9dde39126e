"""Alias analysis of `x[k]`, of a 0-dimensional tensor `k`: whether a program sees that it was traced as a copy instead
of as a view.

It does where one of the two is written to while the other is still read, or where the view would be a result with the
memory of an input. Such a program is traced once more, as torch does it: each number has a program of its own.
"""
from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from anyshape import torch_compat as compat
from anyshape.torch_compat import tree as pytree
from anyshape.torch_compat.tracing.tensor_positions import take

IN_PLACE = frozenset(getattr(operator, name) for name in (
    "iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub", "itruediv",
    "ixor", "setitem"))


class SeenCopy(NotImplementedError):
    """The program sees a copy that eager PyTorch does not make."""


def check_copied_parts(gm: GraphModule) -> None:
    """
    Raises:
        SeenCopy: the frame is to be traced as torch does.
    """
    nodes = list(gm.graph.nodes)
    for place, node in enumerate(nodes):
        if node.target is take and _is_seen(nodes, place):
            raise SeenCopy("a part x[k] of a tensor, at a position k that is a tensor, is written to or returned")


def _is_seen(nodes: list[Node], place: int) -> bool:
    node = nodes[place]
    whole, part = _storages(node.args[0]), _storages(node)
    last = max((k for k, one in enumerate(nodes) if _reads(one, part)), default=place)
    if nodes[last].op == "output":
        lent = {own for one in nodes if one.op in ("placeholder", "get_attr") for own in _storages(one)}
        returned = {own for one in pytree.tree_leaves(nodes[last].args) for own in _storages(one)}
        if part & returned and whole & (lent | returned):
            return True
    return any(_storages(one) & (whole | part) for k in range(place + 1, last + 1) for one in _written(nodes[k]))


def _reads(node: Node, storages: set[int]) -> bool:
    return any(_storages(one) & storages for one in pytree.tree_leaves((node.args, node.kwargs)))


def _storages(node: Any) -> set[int]:
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return {compat.storage_id(one) for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)}


def _written(node: Node) -> Iterator[Any]:
    """The operands that a call may write to."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if target in IN_PLACE or (node.op == "call_method" and name.endswith("_")):
        yield node.args[0]
    elif compat.is_mutable(target) if isinstance(target, compat.OpOverload) else name.endswith("_") or node.kwargs:
        yield from pytree.tree_leaves((node.args, node.kwargs)) if "out" in node.kwargs or not node.kwargs else ()
