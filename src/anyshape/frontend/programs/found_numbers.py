"""Numbers and sizes from the data that a trace takes for others are checked in each call.

    k = x.max().item()             # u0
    return torch.zeros(k) + x      # u0 == s77: from here on the trace says s77 where it said u0
                                   --> torch._assert_async(x.max() == s77, "...")

Dynamo writes such conditions into its graph, as `k == s77`. Where AOTAutograd traces that, k is s77 itself, and no more
is left of the condition than True. So here it is about the tensor.
"""
from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from anyshape.base.errors import DataError
from anyshape.frontend.programs.split_program import ASSERTS, OF_THE_TRACER
from anyshape.torch_compat import aten
from anyshape.torch_compat.tracing import settings


@torch.library.custom_op("anyshape::assert_found", mutates_args=())
def _assert_found(value: torch.Tensor, dim: int | None, expected: int, message: str) -> None:
    """Raises DataError unless the size of `value` at `dim`, or the number in it where that is None, is `expected`."""
    if (value.item() if dim is None else value.shape[dim]) != expected:
        raise DataError(message)


@_assert_found.register_fake
def _(value: torch.Tensor, dim: int | None, expected: int, message: str) -> None:
    pass


torch.fx.node.has_side_effect(torch.ops.anyshape.assert_found.default)


def with_found_checked(gm: GraphModule) -> GraphModule:
    """A graph of Dynamo's with these checks, each as soon as there is what it compares with; itself, if it needs none.
    """
    if not any(settings.taken_for(number) for node in gm.graph.nodes for number, _ in _numbers(node)):
        return gm
    gm = settings.copy_captured(gm)
    messages = _messages(gm)
    known: dict[Any, Callable[[], Node]] = {}  # symbol -> what gives its node
    waiting: dict[str, tuple[Node, int | None, Any]] = {}
    seen: set[str] = set()
    after = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node in [*gm.graph.nodes][:-1]:
        for number, dim in _numbers(node):
            taken = settings.taken_for(number)
            if taken is not None and taken[0] not in seen:
                seen.add(taken[0])
                waiting[taken[0]] = node, dim, taken[1]
            elif taken is None and number.node.expr.is_Symbol:
                known.setdefault(number.node.expr, _reader(gm, node, dim))
        place = after[-1] if node.op == "placeholder" else node
        for symbol, (source, dim, formula) in list(waiting.items()):
            if formula.free_symbols <= known.keys():
                with gm.graph.inserting_before(place.next):
                    nodes = {one: known[one]() for one in sorted(formula.free_symbols, key=str)}
                    expected = settings.nodes_of_formula(gm.graph, formula, nodes)
                    _check(gm, source, dim, expected, messages.get(symbol) or _words(source, formula))
                del waiting[symbol]
    gm.recompile()
    return gm


def _numbers(node: Node) -> list[tuple[Any, int | None]]:
    """The symbolic numbers of a node: the one that it is, or its sizes with their dims."""
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested:
        return [(size, dim) for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt)]
    return [(value, None)] if isinstance(value, (torch.SymInt, torch.SymFloat)) else []


def _reader(gm: GraphModule, node: Node, dim: int | None) -> Callable[[], Node]:
    return lambda: node if dim is None else gm.graph.call_function(aten.sym_size.int, (node, dim))


def _check(gm: GraphModule, source: Node, dim: int | None, expected: Any, message: str) -> None:
    """A number of which the user says something is checked in the program. What only the trace says asks for another
    program where it does not hold: eager PyTorch may go another way there."""
    value: Any = source if dim is not None else source.args[0]
    number = source.meta["example_value"]
    if dim is None and isinstance(number, torch.SymInt) and not message.startswith(OF_THE_TRACER):
        same = gm.graph.call_function(operator.eq, (value, expected))
        gm.graph.call_function(aten._assert_async.msg, (gm.graph.call_method("all", (same,)), message))
    else:
        gm.graph.call_function(torch.ops.anyshape.assert_found.default, (value, dim, expected, message))


def _messages(gm: GraphModule) -> dict[str, str]:
    """What the user says where a symbol's number is not as it should be."""
    found: dict[str, str] = {}
    for node in gm.graph.nodes:
        condition = node.args[0] if str(node.target) in ASSERTS and len(node.args) > 1 else None
        value = condition.meta.get("example_value") if isinstance(condition, Node) else None
        if isinstance(value, torch.SymBool) and not node.args[1].startswith(OF_THE_TRACER):
            for symbol in settings.symbols_as_written(value):
                found.setdefault(symbol, node.args[1])
    return found


def _words(source: Node, formula: Any) -> str:
    lines = [line.strip() for line in (source.meta.get("stack_trace") or "").split("\n") if line.strip(" ^~")]
    return f"{OF_THE_TRACER} {lines[-1] if lines else source.name}, which must be {formula}"
