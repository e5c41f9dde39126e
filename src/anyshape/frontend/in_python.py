"""Functions of torch that its tracer takes into no graph, for they look at their data, or takes wrongly, each written
so that it is traced.

    if any(var < 0): raise ValueError("...")  -->  _assert_async(~any(var < 0), "...")

What must hold of the data is checked when the program runs, which raises then as eager PyTorch does (DataError).
"""
from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch.nn import functional

from anyshape.torch_compat import need

aten = torch.ops.aten
_legacy_reduction, _reduction_number, _check, _assert_async = map(need, (
    "torch.nn._reduction.legacy_get_string", "torch.nn._reduction.get_enum", "torch._check", "torch._assert_async"))
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
NEGATIVE = "var has negative entry/entries"
NO_FREEDOM = ("cov(): degrees of freedom is <= 0. Correction should be strictly less than the number of observations.")


def equal(input: torch.Tensor, other: torch.Tensor) -> Any:
    """torch.equal, of parts that the tracer takes apart."""
    return input.shape == other.shape and (input == other).all().item()


def allclose(input: torch.Tensor, other: torch.Tensor, rtol: float = 1e-5, atol: float = 1e-8,
             equal_nan: bool = False) -> Any:
    """torch.allclose, of parts that the tracer takes apart."""
    return torch.isclose(input, other, rtol, atol, equal_nan).all().item()


def multilabel_margin_loss(input: torch.Tensor, target: torch.Tensor, size_average: bool | None = None,
                           reduce: bool | None = None, reduction: str = "mean") -> torch.Tensor:
    """The function of torch.nn.functional; the tracer's own form counts what is behind the -1 that ends the targets.

    Args:
        input: [n, classes] or [classes]; target: as many class numbers, i64.
    """
    if size_average is not None or reduce is not None:
        reduction = _legacy_reduction(size_average, reduce)
    _check(input.dim() in (1, 2) and input.shape[-1] != 0,
                 lambda: "Expected non-empty vector or matrix with optional 0-dim batch size")
    _check(input.shape == target.shape, lambda: "inconsistent target size")
    places = torch.arange(input.shape[-1], device=input.device)
    given = places < torch.where(target == -1, places, input.shape[-1]).amin(-1, keepdim=True)
    aimed = input.gather(-1, torch.where(given, target, 0))
    other = ~((places == target.unsqueeze(-1)) & given.unsqueeze(-1)).any(-2)
    margins = 1 - aimed.unsqueeze(-1) + input.unsqueeze(-2)
    counted = given.unsqueeze(-1) & other.unsqueeze(-2) & (margins > 0)  # not what is NaN
    losses = torch.where(counted, margins, 0).sum((-2, -1)) / input.shape[-1]
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


def multi_margin_loss(input: torch.Tensor, target: torch.Tensor, p: int = 1, margin: float = 1.0,
                      weight: torch.Tensor | None = None, size_average: bool | None = None, reduce: bool | None = None,
                      reduction: str = "mean") -> torch.Tensor:
    """The function of torch.nn.functional; the tracer's own form is NaN where one score is, which the operator leaves
    out.

    Args:
        input: [n, classes] or [classes]; target: [n] or [], i64; weight: [classes].
    """
    if size_average is not None or reduce is not None:
        reduction = _legacy_reduction(size_average, reduce)
    if p not in (1, 2):
        raise ValueError("only p == 1 and p == 2 supported")
    if weight is not None and weight.dim() != 1:
        raise ValueError("weight must be one-dimensional")
    scores, aims = torch.atleast_2d(input), torch.atleast_1d(target)
    number, classes = scores.shape
    _check(input.dim() in (1, 2) and classes != 0,
           lambda: "Expected non-empty vector or matrix with optional 0-dim batch size")
    _check(aims.dim() == 1 and aims.shape[0] == number, lambda: "inconsistent target size")
    _check(weight is None or weight.shape[0] == classes, lambda: "inconsistent weight size")
    aims = aims.unsqueeze(1)
    short = margin - scores.gather(1, aims) + scores
    short = torch.where((short > 0) & (torch.arange(classes, device=input.device) != aims), short, 0)
    losses = short if p == 1 else short * short
    losses = (losses if weight is None else losses * weight[aims]).sum(1) / classes
    if reduction == "none":
        return losses if input.dim() == 2 else losses.squeeze(0)
    return losses.sum() if reduction == "sum" else losses.mean()


def binary_cross_entropy(input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None,
                         size_average: bool | None = None, reduce: bool | None = None,
                         reduction: str = "mean") -> torch.Tensor:
    """The function of torch.nn.functional, which refuses what is no probability; input, target: of one shape."""
    if size_average is not None or reduce is not None:
        reduction = _legacy_reduction(size_average, reduce)
    if target.size() != input.size():
        raise ValueError(f"Using a target size ({target.size()}) that is different to the input size ({input.size()}) "
                         "is deprecated. Please ensure they have the same size.")
    _assert_async(((input >= 0) & (input <= 1)).all(), "all elements of input should be between 0 and 1")
    if weight is not None:
        weight = weight.expand(torch.broadcast_shapes(target.size(), weight.size()))
    return aten.binary_cross_entropy(input, target, weight, _reduction_number(reduction))


def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """The function of torch.nn.functional, in order; the tracer's own form lies as `tensor` does."""
    return aten.one_hot(tensor, num_classes).contiguous()


def select_scatter(input: torch.Tensor, src: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """torch.select_scatter; the tracer's own form changes nothing where the index is out of range."""
    if input.dim() and not -input.shape[dim] <= index < input.shape[dim]:
        raise IndexError(f"select(): index {index} out of range for tensor of size {list(input.shape)} at dimension "
                         f"{dim}")
    return aten.select_scatter(input, src, dim, index)


def cov(input: torch.Tensor, *, correction: int = 1, fweights: torch.Tensor | None = None,
        aweights: torch.Tensor | None = None) -> torch.Tensor:
    """torch.cov. That there are no degrees of freedom is warned of where the sizes say it, not where weights do.

    Args:
        input: [variables, observations], or fewer dims; fweights, aweights: [observations], whole numbers and floats.
    """
    if input.dim() > 2 or input.dtype is torch.bool:
        return aten.cov(input, correction=correction, fweights=fweights, aweights=aweights)  # it says what is wrong
    rows = input if input.dim() == 2 else input.reshape(1, -1)
    count = rows.shape[1]
    weights = None
    for given, name in ((fweights, "fweights"), (aweights, "aweights")):
        if given is None:
            continue
        fits = given.is_floating_point() if name == "aweights" else given.dtype in WHOLE
        if given.dim() > 1 or not fits:
            return aten.cov(input, correction=correction, fweights=fweights, aweights=aweights)
        _check(given.numel() == count, lambda: "cov(): the weights must have the same numel as there are "
                                                     "observations in the input")
        _assert_async((given >= 0).all(), f"cov(): {name} cannot be negative")
        weights = given if weights is None else weights * given
    if weights is None:
        if count <= correction:
            warnings.warn(NO_FREEDOM, stacklevel=2)
        centered = rows - (rows.sum(1) / count).unsqueeze(1)
        return (torch.mm(centered, centered.t().conj()) / torch.sym_max(count - correction, 0)).squeeze()
    total = weights.sum()
    _assert_async(total != 0, "cov(): weights sum to zero, can't be normalized")
    lost = correction
    if aweights is not None and correction != 0:
        lost = correction * (weights * aweights).sum() / total
    centered = rows - ((rows * weights).sum(1) / total).unsqueeze(1)
    products = torch.mm(centered, (centered * weights).t().conj())
    return (products / (total - lost).clamp(min=0)).squeeze()


def corrcoef(input: torch.Tensor) -> torch.Tensor:
    """torch.corrcoef; input: as for cov."""
    if input.dim() > 2 or input.dtype is torch.bool:
        return aten.corrcoef(input)
    found = cov(input)
    if found.dim() == 0:
        return found / found
    scale = found.diagonal().real.sqrt() if found.is_complex() else found.diagonal().sqrt()
    found = found / scale.unsqueeze(1) / scale.unsqueeze(0)
    if found.is_complex():
        return torch.complex(found.real.clip(-1, 1), found.imag.clip(-1, 1))
    return found.clip(-1, 1)


def gaussian_nll_loss(input: torch.Tensor, target: torch.Tensor, var: Any, full: bool = False, eps: float = 1e-6,
                      reduction: str = "mean") -> torch.Tensor:
    """The function of torch.nn.functional; input, target, var: of one shape, or var with one size of 1, or without the
    last dim, or a float."""
    if isinstance(var, float):
        if var < 0:
            raise ValueError(NEGATIVE)
        var = var * torch.ones_like(input)
    else:
        _assert_async(~(var < 0).any(), NEGATIVE)
    if var.shape != input.shape:
        if input.shape[:-1] == var.shape:
            var = var.unsqueeze(-1)
        elif input.dim() != var.dim() or sum(n for m, n in zip(input.shape, var.shape) if m != n) != 1:
            raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(reduction + " is not valid")
    var = var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss += 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def asserted(input: torch.Tensor, message: str = "Expected Tensor with single nonzero value, but got zero") -> None:
    """torch._assert_async, whose form without a message the tracer drops."""
    aten._assert_async.msg(input, message)


def _in_range(q: float | torch.Tensor) -> None:
    if isinstance(q, torch.Tensor):
        torch._assert_async(((q >= 0) & (q <= 1)).all(), "quantile() q values must be in the range [0, 1]")


def quantile(input: torch.Tensor, q: Any, dim: int | None = None, keepdim: bool = False, *,
             interpolation: str = "linear") -> torch.Tensor:
    """torch.quantile; a tensor `q` is looked at when the program runs."""
    _in_range(q)
    return aten.quantile(input, q, dim, keepdim, interpolation=interpolation)


def nanquantile(input: torch.Tensor, q: Any, dim: int | None = None, keepdim: bool = False, *,
                interpolation: str = "linear") -> torch.Tensor:
    """torch.nanquantile; as for quantile."""
    _in_range(q)
    return aten.nanquantile(input, q, dim, keepdim, interpolation=interpolation)


def addcdiv(input: torch.Tensor, tensor1: torch.Tensor, tensor2: torch.Tensor, *, value: Any = 1) -> torch.Tensor:
    """torch.addcdiv; the tracer's own form multiplies the quotient, where the operator multiplies `tensor1`."""
    if isinstance(value, torch.Tensor):
        return input + value * tensor1 / tensor2
    return aten.addcdiv.default(input, tensor1, tensor2, value=value)


# function -> what is traced in its place, also where it is called as a method
IN_PYTHON: dict[Any, Any] = {
    torch._assert_async: asserted,
    torch.addcdiv: addcdiv,
    torch.allclose: allclose,
    torch.corrcoef: corrcoef,
    torch.cov: cov,
    torch.equal: equal,
    torch.nanquantile: nanquantile,
    torch.quantile: quantile,
    torch.select_scatter: select_scatter,
    functional.binary_cross_entropy: binary_cross_entropy,
    functional.gaussian_nll_loss: gaussian_nll_loss,
    functional.multi_margin_loss: multi_margin_loss,
    functional.multilabel_margin_loss: multilabel_margin_loss,
    functional.one_hot: one_hot,
}
