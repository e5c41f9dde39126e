"""Recomputation of index tensors: saved tensors that are made of sizes alone are made again in the backward, and not
saved.

    forward saves positions = arange(n)      -->  the backward has positions = arange(n) itself

Position numbers and masks cost a few operations in a kernel that reads them anyway, and what they are made of stays
visible in the backward (passes/causal_mask.py looks for it).
"""
from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from anyshape.torch_compat import OpOverload, is_mutable, operator_name

_MOST = 40  # equations that are done again for one value
# what costs next to nothing inside another kernel
_CHEAP = frozenset((
    "arange", "full", "zeros", "ones", "scalar_tensor", "iota", "view", "reshape", "_unsafe_view",
    "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "slice", "select", "alias", "clone", "index",
    "constant_pad_nd", "flip", "_to_copy", "convert_element_type", "lift_fresh_copy", "detach", "cat", "add",
    "sub", "rsub", "mul", "neg", "eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or",
    "bitwise_not", "bitwise_and", "bitwise_or", "where", "tril", "triu", "sym_size", "floor_divide",
))  # fmt: skip
_ON_SIZES = frozenset((operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg))


def make_again(forward: GraphModule, backward: GraphModule, num_fwd_outputs: int) -> None:
    """Moves such values out of what is saved; rewrites both graphs, which have no tape yet, in place."""
    output = forward.graph.output_node()
    returned = list(output.args[0])
    given = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
    sizes = {name: node for name, node in given.items() if isinstance(node.meta.get("val"), torch.SymInt)}
    kept = returned[:num_fwd_outputs]
    descriptions = output.meta.get("desc")
    described = list(descriptions[:num_fwd_outputs]) if descriptions is not None else []
    made: dict[Node, Node] = {}
    for position, saved in enumerate(returned[num_fwd_outputs:], num_fwd_outputs):
        placeholder = given.get(saved.name) if isinstance(saved, Node) else None
        wanted = None if placeholder is None or saved in kept else _closure(saved, sizes)
        if wanted is None:
            kept.append(saved)
            described += descriptions[position:position + 1] if descriptions is not None else []
            continue
        assert placeholder is not None
        _copy(wanted, backward, sizes, made)
        placeholder.replace_all_uses_with(made[saved])
        backward.graph.erase_node(placeholder)
    if not made:
        return
    output.args = (tuple(kept),)
    if descriptions is not None:
        output.meta["desc"] = described
    for gm in (forward, backward):
        gm.graph.lint()
        gm.recompile()


def _closure(saved: Node, sizes: Mapping[str, Node]) -> list[Node] | None:
    """The equations that make a tensor of sizes that the backward has, in order; None when there are others."""
    if not isinstance(saved.meta.get("val"), torch.Tensor):
        return None
    found: set[Node] = set()
    pending = [saved]
    while pending:
        node = pending.pop()
        if node in found or node.name in sizes:
            continue
        if not _cheap(node) or len(found) == _MOST:
            return None
        found.add(node)
        pending += node.all_input_nodes
    return [node for node in saved.graph.nodes if node in found]


def _cheap(node: Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target in _ON_SIZES:
        return not isinstance(node.meta.get("val"), torch.Tensor)
    target: Any = node.target
    return isinstance(target, OpOverload) and operator_name(target) in _CHEAP and not is_mutable(target)


def _copy(nodes: list[Node], backward: GraphModule, sizes: Mapping[str, Node], made: dict[Node, Node]) -> None:
    """Copies equations behind the backward's inputs; `made` says what became of which."""
    cursor = [node for node in backward.graph.nodes if node.op == "placeholder"][-1]
    last = next((made[node] for node in reversed(made)), cursor)
    for node in nodes:
        if node in made:
            continue
        with backward.graph.inserting_after(last):
            last = backward.graph.node_copy(node, lambda other: sizes.get(other.name) or made[other])
        made[node] = last
