"""Operators with another derivative than torch's tracer gives them, on Dynamo's graph.

    x.prod(1)  -->  product(x, 1)

The derivative of a product is the product of the other elements. Eager PyTorch divides by the element, unless a zero is
among them; while it is traced it cannot look, and multiplies from both sides with two calls of `cumprod`. Here zeros
are counted, and the rest divides as eager does: a kernel, with eager's numbers where a product is infinite.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode

from anyshape.run import torch_api, torch_trace


def derivatives(gm: GraphModule) -> GraphModule:
    """The graph with our derivatives; `gm` itself, which is not changed, where there are none.

    Args:
        gm: a graph of Dynamo's, with fake tensors as `meta["example_value"]`.
    """
    if not any(_ours(node) for node in gm.graph.nodes) or any(
            torch_api.changes_mode(node.target) for node in gm.graph.nodes if node.op == "call_function"):
        return gm  # transforms take operators apart in their own way
    copy = torch_trace.copy_captured(gm)
    for node in copy.graph.nodes:
        ours = _ours(node)
        if ours is not None:
            node.op, node.target = "call_function", ours
    copy.graph.lint()
    copy.recompile()
    return copy


def _ours(node: Node) -> Callable[..., Any] | None:
    """Our function for a node whose first operand has a gradient."""
    operand = node.args[0] if node.args else node.kwargs.get("input")
    value = operand.meta.get("example_value") if isinstance(operand, Node) else None
    if not isinstance(value, Tensor) or not value.requires_grad or not value.dim():
        return None
    return _OURS.get((node.op, node.target))  # type: ignore[arg-type]


def product(input: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """torch.prod; input: one dim or more."""
    x = input if dtype is None else input.to(dtype)
    if not (x.is_floating_point() or x.is_complex()):
        return x.prod() if dim is None else x.prod(dim, keepdim)
    return _Product.apply(x.reshape(-1), 0, False) if dim is None else _Product.apply(x, dim, keepdim)


class _Product(torch.autograd.Function):

    @staticmethod
    def forward(x: Tensor, dim: int, keepdim: bool) -> Tensor:  # type: ignore[override]
        return x.prod(dim, keepdim)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.dim, ctx.keepdim = inputs[1:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, result = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again, which a form that counts cannot be
            return *torch.autograd.grad(x.prod(ctx.dim, ctx.keepdim), x, gradient, create_graph=True), None, None
        if not ctx.keepdim:
            gradient, result = gradient.unsqueeze(ctx.dim), result.unsqueeze(ctx.dim)
        zero = x == 0
        zeros = zero.sum(ctx.dim, keepdim=True)
        others = torch.where(zero, 1, x).prod(ctx.dim, keepdim=True)
        factor = torch.where(zero, torch.where(zeros == 1, others, 0), result / x)
        return gradient * factor.conj(), None, None


class _Products(TorchFunctionMode):
    """Inside, `x.prod(...)` is `product(x, ...)`."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        called = product if function is Tensor.prod else function
        return called(*arguments, **(keywords or {}))


def masked_product(*arguments: Any, **keywords: Any) -> Any:
    """torch.masked.prod, a function that Dynamo does not look into."""
    with _Products():
        return torch.masked.prod(*arguments, **keywords)


_OURS: dict[tuple[str, Any], Callable[..., Any]] = {
    ("call_method", "prod"): product,
    ("call_function", torch.prod): product,
    ("call_function", torch.masked.prod): masked_product,
}
