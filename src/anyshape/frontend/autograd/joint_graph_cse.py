"""CSE on the joint graph: removes repeated computations from a joint graph before it is partitioned, so that no value
is saved twice.

    a = view(x, [n, 64]);  b = view(x, [n, 64]);  f(a, b)   -->   a = view(x, [n, 64]);  f(a, a)

torch's own pass does the same but loads the whole of Inductor for it.
"""
from __future__ import annotations

import math
import operator
from typing import Any

from torch.fx import Graph, Node

from anyshape.torch_compat import OpOverload, is_mutable
from anyshape.torch_compat.versions import api
from anyshape.torch_compat.versions.side_effects import has_effect

_KEPT = frozenset(("aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided"))


def remove_duplicates(graph: Graph) -> int:
    """Replaces calls of the same function with the same arguments by the first of them; returns how many were removed.

    Calls with effects stay (random ones among them), calls after the first that writes memory, and those that share
    memory with an output: two outputs that are different tensors in eager mode stay different tensors.
    """
    visible = {_storage(node) for node in graph.output_node().all_input_nodes} - {None}
    seen: dict[Any, Node] = {}
    removed = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if _writes(node.target):
            break
        if not _repeatable(node.target) or _storage(node) in visible or node.meta.get("unbacked_bindings"):
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        try:
            first = seen.setdefault(key, node)
        except TypeError:  # an argument that cannot be compared
            continue
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            removed += 1
    return removed


def _storage(node: Node) -> int | None:
    return api.storage_key(node.meta.get("val"))


def _writes(target: Any) -> bool:
    return isinstance(target, OpOverload) and is_mutable(target)


def _repeatable(target: Any) -> bool:
    if isinstance(target, OpOverload):
        return not has_effect(target) and str(target.overloadpacket) not in _KEPT
    return target is operator.getitem or getattr(target, "__module__", "") == "_operator"


def _frozen(argument: Any) -> Any:
    """The argument as a key: 1, 1.0 and True differ, 0.0 and -0.0, and so do lists and tuples."""
    if isinstance(argument, (list, tuple)):
        return type(argument), tuple([_frozen(x) for x in argument])
    if isinstance(argument, dict):
        return tuple([(name, _frozen(x)) for name, x in argument.items()])
    if isinstance(argument, float):
        return float, argument, math.copysign(1.0, argument)
    return argument if isinstance(argument, Node) else (type(argument), argument)
