"""The gradients of a step's loss, as a trace of Dynamo and AOTAutograd takes them in once.

    gradients_of(loss, [w, v])  -->  seed = ones_like(loss);  ...;  anyshape.gradients([g, None], [w, v], seed)

AOTAutograd runs a graph twice, to see what it does and to write it down, and Dynamo has run it before, on shapes. What
gradients look like is known without their backward: they are like the weights. So it runs only to be written down.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from anyshape.base.errors import Unsupported
from anyshape.frontend.step_checks import check_loss
from anyshape.run import torch_trace


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
    if torch_trace.is_writing():  # elsewhere, such as where a graph is tried with other sizes, nothing may require one
        check_loss(loss)
        found = torch.autograd.grad(loss, list(weights), seed, allow_unused=True)
        if any(one is not None and one.layout != torch.strided for one in found):
            raise Unsupported("a gradient is sparse", why="programs compute on dense tensors")
    with torch.no_grad():
        return torch.ops.anyshape.gradients(list(found), list(weights), seed)  # type: ignore[no-any-return]


def detached(gm: GraphModule) -> GraphModule:
    """A step's graph whose results have no gradients; `gm` itself, which is not changed, where they have none. Those
    that have are what the loss left in attributes and lists; after a step, eager PyTorch has freed what they would
    need.

    Args:
        gm: a graph of Dynamo's, with fake tensors as `meta["example_value"]`.
    """
    if not any(map(_has_gradient, gm.graph.output_node().args[0])):  # type: ignore[arg-type]
        return gm
    copy = torch_trace.copy_captured(gm)
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
