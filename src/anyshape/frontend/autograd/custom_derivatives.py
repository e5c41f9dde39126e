"""Custom derivatives: operators with another derivative than torch's tracer gives them, on Dynamo's graph.

    x.prod(1)  -->  product(x, 1)        linalg.lstsq(a, b)  -->  least_squares(a, b)

The derivative of a product is the product of the other elements. Eager PyTorch divides by the element, unless a zero is
among them; while it is traced it cannot look, and multiplies from both sides with two calls of `cumprod`. Here zeros
are counted, and the rest divides as eager does: a kernel, with eager's numbers where a product is infinite. The
derivative of least squares asks how many residuals there are in a way that has no answer in a trace.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode

from anyshape.torch_compat.tracing import settings
from anyshape.torch_compat.versions import api


def derivatives(gm: GraphModule) -> GraphModule:
    """The graph with our derivatives; `gm` itself, which is not changed, where there are none.

    Args:
        gm: a graph of Dynamo's, with fake tensors as `meta["example_value"]`.
    """
    if not any(_ours(node) for node in gm.graph.nodes) or any(
            api.changes_mode(node.target) for node in gm.graph.nodes if node.op == "call_function"):
        return gm  # transforms take operators apart in their own way
    copy = settings.copy_captured(gm)
    for node in copy.graph.nodes:
        ours = _ours(node)
        if ours is not None:
            node.op, node.target = "call_function", ours
    copy.graph.lint()
    copy.recompile()
    return copy


def _ours(node: Node) -> Callable[..., Any] | None:
    """Our function for a node with operands that have gradients, and dims."""
    ours = _OURS.get((node.op, node.target))  # type: ignore[arg-type]
    values = [operand.meta.get("example_value") for operand in node.all_input_nodes] if ours is not None else []
    smooth = any(isinstance(value, Tensor) and value.requires_grad and value.dim() for value in values)
    return ours if smooth else None


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


def least_squares(input: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
    """torch.linalg.lstsq; input: [..., rows, columns], b: [..., rows, count] or [..., rows]."""
    return _LeastSquares.apply(input, b, rcond, driver)


class _LeastSquares(torch.autograd.Function):

    @staticmethod
    def forward(a: Tensor, b: Tensor, rcond: float | None, driver: str | None) -> Any:  # type: ignore[override]
        return tuple(torch.linalg.lstsq(a, b, rcond, driver=driver))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, gradient: Any, of_residuals: Any, *rest: Any) -> Any:  # type: ignore[override]
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            a, b = leaves = [one if again else one.detach().requires_grad_() for one in ctx.saved_tensors]
            if a.dim() - b.dim() == 1:
                b, gradient = b.unsqueeze(-1), None if gradient is None else gradient.unsqueeze(-1)
            x = torch.linalg.pinv(a) @ b
            pairs = [(x, gradient)]
            if of_residuals is not None and not settings.has_size_0(of_residuals):
                pairs.append(((a @ (x if again else x.detach()) - b).abs().square().sum(-2), of_residuals))
        ends = [pair for pair in pairs if pair[1] is not None]
        wanted = [one for one, needed in zip(leaves, ctx.needs_input_grad, strict=False) if needed]
        found = iter(torch.autograd.grad([end for end, _ in ends], wanted, [given for _, given in ends],
                                         create_graph=again, allow_unused=True))
        return *(next(found) if needed else None for needed in ctx.needs_input_grad[:2]), None, None


_OURS: dict[tuple[str, Any], Callable[..., Any]] = {
    ("call_method", "prod"): product,
    ("call_function", torch.prod): product,
    ("call_function", torch.masked.prod): masked_product,
    ("call_function", torch.linalg.lstsq): least_squares,
}
