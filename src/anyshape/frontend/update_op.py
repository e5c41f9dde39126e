"""The update of one weight as one operator while a step is traced, and its formulas after that.

    anyshape.update(w, g, numbers, [m, v], "adamw", ...)  -->  mul(w, decay), sub(g, m), ...

A trace costs milliseconds an operator, and a step has some thirty for each weight. So Dynamo and AOTAutograd see one,
and the formulas are traced once for each kind of weight (rule, choices, dtypes, shapes), and put in its place.
"""
from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from anyshape.frontend import decompositions
from anyshape.frontend.fx_trace import SOURCE
from anyshape.frontend.updates import RULES, Choices
from anyshape.run import torch_api


def updated(rule: int, choices: Choices, weight: Tensor, gradient: Tensor, states: dict[str, Tensor],
            numbers: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The new weight and states, by one operator. rule: its place in RULES. numbers: float64, in one tensor. The rest
    is as in `Rule.update`, in any dtype; results are in that of the gradient."""
    results = torch.ops.anyshape.update(weight, gradient, numbers, list(states.values()), rule,
                                        repr((dict(choices), tuple(states))))
    return results[0], dict(zip(states, results[1:], strict=True))


def _formulas(weight: Tensor, gradient: Tensor, numbers: Tensor, states: Sequence[Tensor], rule: int,
              more: str) -> list[Tensor]:
    choices, names = ast.literal_eval(more)
    work = gradient.dtype
    new, found = RULES[rule].update(
        choices, weight.to(work), gradient, {name: state.to(work) for name, state in zip(names, states, strict=True)},
        numbers.to(work).unbind())
    return [new, *(found[name] for name in names)]


@torch.library.custom_op("anyshape::update", mutates_args=())
def _update(weight: Tensor, gradient: Tensor, numbers: Tensor, states: Sequence[Tensor], rule: int,
            more: str) -> list[Tensor]:
    return _formulas(weight, gradient, numbers, states, rule, more)


@_update.register_fake
def _(weight: Tensor, gradient: Tensor, numbers: Tensor, states: Sequence[Tensor], rule: int,
      more: str) -> list[Tensor]:
    return [torch.empty_like(one, dtype=gradient.dtype) for one in (weight, *states)]


def expanded(step: GraphModule) -> None:
    """Puts formulas in place of the operator, in the graph of a step, in place."""
    traced: dict[Any, GraphModule] = {}
    table = None
    for node in [node for node in step.graph.nodes if node.target is torch.ops.anyshape.update.default]:
        weight, gradient, numbers, states, *last = torch.fx.node.map_arg(node.args, lambda one: one.meta["val"])
        key = (gradient.dtype, *((one.dtype, *one.shape) for one in (weight, numbers, *states)), *last)
        if key not in traced:
            table = decompositions.table() if table is None else table
            like = torch.empty_like(weight, dtype=gradient.dtype)  # its sizes are the gradient's, and numbers
            traced[key] = torch_api.trace_formulas(
                lambda weight, gradient, numbers, *states, last=tuple(last): _formulas(
                    weight, gradient, numbers, states, *last), (weight, like, numbers, *states), table)
        _put(step, node, traced[key])
    if traced:
        step.graph.lint()
        step.recompile()


def _put(step: GraphModule, node: Node, formulas: GraphModule) -> None:
    """`formulas` in place of `node`, whose results are taken apart by getitem."""
    given = iter([*node.args[:3], *node.args[3]])
    made: dict[Node, Any] = {}
    results: list[Any] = []
    source = f"the optimiser's update of a weight {list(node.args[0].meta['val'].shape)}"
    with step.graph.inserting_before(node):
        for one in formulas.graph.nodes:
            if one.op == "placeholder":
                made[one] = next(given)
            elif one.op == "output":
                results = [made[result] for result in one.args[0]]
            else:
                made[one] = step.graph.node_copy(one, made.__getitem__)
                made[one].meta[SOURCE] = source
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        step.graph.erase_node(user)
    step.graph.erase_node(node)
