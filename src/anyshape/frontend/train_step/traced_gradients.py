"""The gradients of a step's loss, as a trace of Dynamo and AOTAutograd takes them in once.

    gradients_of(loss, [w, v])  -->  seed = ones_like(loss);  ...;  anyshape.gradients([g, None], [w, v], seed)

AOTAutograd runs a graph twice, to see what it does and to write it down, and Dynamo has run it before, on shapes. What
gradients look like is known without their backward: they are like the weights. So it runs only to be written down.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from anyshape.base.errors import Unsupported
from anyshape.frontend.train_step.validation import check_loss
from anyshape.torch_compat.objects import sequence_number
from anyshape.torch_compat.tracing import settings


def gradients_of(loss: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of `loss` for each weight, while a graph is traced. Dynamo does not look into this function
    (`torch_trace.one_node`). In the graph, the first operand of the operator has None for a weight without a gradient,
    and the last is where the backward begins: the gradient of the loss itself.

    Raises:
        InputError: it is not one number that depends on a weight.
        Unsupported: a gradient is sparse.
    """
    if loss.numel() != 1 or loss.is_complex():
        check_loss(loss)
    found: Sequence[Tensor | None] = [None] * len(weights)
    seed = torch.ones_like(loss, requires_grad=False)
    if settings.is_writing():  # elsewhere, such as where a graph is tried with other sizes, nothing may require one
        check_loss(loss)
        _number_gradients(loss)
        found = torch.autograd.grad(loss, list(weights), seed, allow_unused=True)
        if any(one is not None and one.layout != torch.strided for one in found):
            raise Unsupported("a gradient is sparse", why="programs compute on dense tensors")
    with torch.no_grad():
        return torch.ops.anyshape.gradients(list(found), list(weights), seed)  # type: ignore[no-any-return]


def _number_gradients(loss: Tensor) -> None:
    """Lets the nodes that a backward of `loss` writes bear the number of the forward node whose gradient they are, as
    AOTAutograd does where it differentiates a graph itself."""
    set_number = getattr(torch.fx.traceback, "set_grad_fn_seq_nr", None)
    reset = getattr(torch.fx.traceback, "reset_grad_fn_seq_nr", None)
    if set_number is None or reset is None:
        return  # the lines of gradients are then that of the step
    open_nodes, seen = [loss.grad_fn], {loss.grad_fn, None}
    while open_nodes:
        node: Any = open_nodes.pop()
        number = None if node is None else sequence_number(node)
        if number is None:
            continue
        node.register_prehook(functools.partial(lambda number, _: set_number(number), number))
        node.register_hook(lambda _inputs, _outputs: reset())
        new = {one for one, _ in node.next_functions} - seen
        seen |= new
        open_nodes += new


def point_at_forward(gm: GraphModule) -> None:
    """Gives the nodes of a step's backward the source line of the forward node whose gradient they are."""
    lines: dict[int, str] = {}
    for node in gm.graph.nodes:
        number, line = node.meta.get("seq_nr"), node.meta.get("stack_trace")
        if number is None or not line or not isinstance(node.meta.get("val"), (Tensor, tuple, list)):
            continue
        if "gradients_of(" in line:
            node.meta["stack_trace"] = lines.get(number, line)
        else:
            lines.setdefault(number, line)


def detached(gm: GraphModule) -> GraphModule:
    """A step's graph whose results have no gradients; `gm` itself, which is not changed, where they have none. Those
    that have are what the loss left in attributes and lists; after a step, eager PyTorch has freed what they would
    need.

    Args:
        gm: a graph of Dynamo's, with fake tensors as `meta["example_value"]`.
    """
    if not any(map(_has_gradient, gm.graph.output_node().args[0])):  # type: ignore[arg-type]
        return gm
    copy = settings.copy_captured(gm)
    output = copy.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    with copy.graph.inserting_before(output):
        for place, one in enumerate(results):
            if _has_gradient(one):
                results[place] = copy.graph.call_method("detach", (one,))
                results[place].meta = {"example_value": one.meta["example_value"].detach()}
    output.args = (tuple(results),)
    copy.graph.lint()
    copy.recompile()
    return copy


def _has_gradient(result: Any) -> bool:
    value = result.meta.get("example_value") if isinstance(result, Node) else None
    return isinstance(value, Tensor) and value.requires_grad


@torch.library.custom_op("anyshape::gradients", mutates_args=())
def _gradients(found: Sequence[Tensor | None], weights: Sequence[Tensor], _seed: Tensor) -> list[Tensor]:
    return [torch.zeros_like(weight) if one is None else one.clone()
            for one, weight in zip(found, weights, strict=True)]


@_gradients.register_fake
def _(_found: Sequence[Tensor | None], weights: Sequence[Tensor], _seed: Tensor) -> list[Tensor]:
    return [torch.empty_like(weight) for weight in weights]
