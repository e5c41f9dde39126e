"""Traceable replacements: functions of torch that its tracer takes into no graph, for they look at their data, or takes
wrongly, each written so that it is traced.

    if any(var < 0): raise ValueError("...")  -->  _assert_async(~any(var < 0), "...")

What must hold of the data is checked when the program runs, which raises then as eager PyTorch does (DataError).
"""
from __future__ import annotations

import math
import operator
import warnings
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch.nn import functional

from anyshape.frontend.recurrent import scans
from anyshape.torch_compat import get, need

aten = torch.ops.aten
_legacy_reduction, _reduction_number, _check, _assert, _assert_async, _script_isinstance = map(need, (
    "torch.nn._reduction.legacy_get_string", "torch.nn._reduction.get_enum", "torch._check", "torch._assert",
    "torch._assert_async", "torch._jit_internal._isinstance"))
_is_number, _verify_batch_size = map(get, ("torch.fx.experimental.symbolic_shapes.has_static_value",
                                           "torch.nn.functional._verify_batch_size"))
_KL_RULES = get("torch.distributions.kl._KL_REGISTRY") or {}  # the dict itself, to which users add
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
EXACT = 2**52  # whole numbers below have a root of double precision that rounds down as theirs
NEGATIVE = "var has negative entry/entries"
NO_FREEDOM = ("cov(): degrees of freedom is <= 0. Correction should be strictly less than the number of observations.")


def equal(input: torch.Tensor, other: torch.Tensor) -> Any:
    """torch.equal, of parts that the tracer takes apart."""
    return input.shape == other.shape and (input == other).all().item()


def as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    """torch.as_tensor; the tracer takes sizes in its `data` as numbers, and in that of torch.tensor as sizes."""
    if isinstance(data, torch.Tensor):
        return data.to(device=data.device if device is None else device, dtype=data.dtype if dtype is None else dtype)
    if isinstance(data, np.ndarray):  # shares its memory
        return as_tensor(torch.from_numpy(data), dtype, device)
    return torch.tensor(data, dtype=dtype, device=device)


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


def batch_norm(input: torch.Tensor, running_mean: torch.Tensor | None, running_var: torch.Tensor | None,
               weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, training: bool = False,
               momentum: Any = 0.1, eps: float = 1e-5) -> torch.Tensor:
    """The function of torch.nn.functional; the operator takes the momentum as a number, which a module without one
    (`momentum=None`) computes from a tensor that counts its batches. Then the statistics of the batch are taken
    alone, and averaged here.

    Args:
        input: [n, channels, ...]; all others: [channels].
    """
    if not training or running_mean is None or running_var is None or _is_number(momentum):
        if training:
            _verify_batch_size(input.size())
        return torch.batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, True)
    mean, var = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    result = functional.batch_norm(input, mean, var, weight, bias, True, 1.0, eps)
    with torch.no_grad():
        for running, now in ((running_mean, mean), (running_var, var)):
            running.copy_(now * momentum + running * (1 - momentum))
    return result


def one_hot(tensor: torch.Tensor, num_classes: int | torch.Tensor = -1) -> torch.Tensor:
    """The function of torch.nn.functional, in order; the tracer's own form lies as `tensor` does, takes the number of
    classes as a constant, and lets any value pass.

    Args:
        tensor: of any shape, i64.
        num_classes: may be an integer tensor without dims, as in `one_hot(x, x.max() + 1)`.

    Returns:
        i64, of one more dim.
    """
    _check(tensor.dtype is torch.int64, lambda: "one_hot is only applicable to index tensor of type LongTensor.")
    if isinstance(num_classes, torch.Tensor):
        if num_classes.dim() or num_classes.dtype not in WHOLE or tensor.numel() == 0:
            return aten.one_hot(tensor, num_classes)  # it says what is wrong
        num_classes = torch.where(num_classes == -1, tensor.max() + 1, num_classes).clamp(min=0).item()
        _check(num_classes >= 0)  # so that no test below asks for its value
    if num_classes < -1:
        return aten.one_hot(tensor, num_classes)  # it says what is wrong
    if tensor.numel() == 0 and num_classes <= 0:
        raise RuntimeError("Can not infer total number of classes from empty tensor.")
    _assert_async((tensor >= 0).all(), "Class values must be non-negative.")
    if num_classes == -1:
        most = tensor.max().item()
        _check(most >= 0)
        num_classes = most + 1
    else:
        _assert_async((tensor < num_classes).all(), "Class values must be smaller than num_classes.")
    classes = torch.arange(num_classes, device=tensor.device)
    return (tensor.contiguous().unsqueeze(-1) == classes).to(torch.int64)


def select(input: torch.Tensor, dim: Any, index: Any) -> torch.Tensor:
    """torch.select. The position may be a tensor without dims, as in `x[k]`: the tracer's form asks for its sign."""
    if isinstance(index, torch.Tensor) and isinstance(dim, int) and -input.dim() <= dim < input.dim():
        return input[(slice(None),) * (dim % input.dim()) + (index,)]
    return aten.select(input, dim, index)


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
        return (torch.mm(centered, centered.t().conj()) / max(count - correction, 0)).squeeze()
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


def asserted_now(condition: Any, message: Any) -> None:
    """torch._assert, of a condition that only the data show too."""
    if isinstance(condition, torch.Tensor) and isinstance(message, str):
        aten._assert_async.msg(condition, message)
    else:
        assert condition, message


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


def take_along_dim(input: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """torch.take_along_dim; the operator takes the sizes that it broadcasts as numbers.

    Args:
        input, indices: of as many dims, and of sizes that can be broadcast but in `dim`; indices: i64.
    """
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    if input.dim() != indices.dim() or indices.dtype is not torch.int64 or not -input.dim() <= dim < input.dim():
        return aten.take_along_dim(input, indices, dim)  # it says what is wrong
    dim %= input.dim()
    sizes = list(torch.broadcast_shapes((*input.shape[:dim], 1, *input.shape[dim + 1:]),
                                        (*indices.shape[:dim], 1, *indices.shape[dim + 1:])))
    wide = [x.expand([*sizes[:dim], x.shape[dim], *sizes[dim + 1:]]) for x in (input, indices)]
    return wide[0].gather(dim, wide[1])


def kron(input: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """torch.kron; the operator takes sizes as numbers."""
    if out is not None:
        return aten.kron.out(input, other, out=out)
    rank = max(input.dim(), other.dim())
    mine, theirs = [[1] * (rank - x.dim()) + list(x.shape) for x in (input, other)]
    rows, columns = [], []
    for m, n in zip(mine, theirs, strict=True):
        rows += [m, 1]
        columns += [1, n]
    blocks = input.reshape(rows) * other.reshape(columns)
    return blocks.reshape([m * n for m, n in zip(mine, theirs, strict=True)])


def multi_dot(tensors: Any, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """torch.linalg.multi_dot, in the order of products that the operator chooses, which takes sizes as numbers; here
    the comparisons of costs are the guards.

    Args:
        tensors: two or more matrices; the first and the last may be vectors.
    """
    count = len(tensors)
    ranks = [x.dim() for x in tensors]
    if out is not None or count < 2 or ranks[1:-1] != [2] * (count - 2) or not {ranks[0], ranks[-1]} <= {1, 2}:
        return aten.linalg_multi_dot(tensors) if out is None else aten.linalg_multi_dot.out(tensors, out=out)
    matrices = list(tensors)
    if ranks[0] == 1:
        matrices[0] = matrices[0].unsqueeze(0)
    if ranks[-1] == 1:
        matrices[-1] = matrices[-1].unsqueeze(1)
    result = _product(matrices, _splits([matrices[0].shape[0], *(x.shape[1] for x in matrices)]), 0, count - 1)
    if ranks[-1] == 1:
        result = result.squeeze(1)
    return result.squeeze(0) if ranks[0] == 1 else result


def _splits(sizes: list[Any]) -> dict[tuple[int, int], int]:
    """(first, last) of a chain of matrices -> the last one of its left half (matrix chain order, Cormen et al.,
    Introduction to Algorithms, 14.2). sizes: of the rows of the first, and of the columns of each."""
    count = len(sizes) - 1
    splits, costs = {}, {(i, i): 0 for i in range(count)}
    for length in range(1, count):
        for i in range(count - length):
            j = i + length
            for k in range(i, j):
                cost = costs[i, k] + costs[k + 1, j] + sizes[i] * sizes[k + 1] * sizes[j + 1]
                # of three, the operator compares the other way round, and takes the first two where costs are equal
                if k == i or (cost <= costs[i, j] if count == 3 and length == 2 else cost < costs[i, j]):
                    costs[i, j], splits[i, j] = cost, k
    return splits


def _product(matrices: list[torch.Tensor], splits: dict[tuple[int, int], int], first: int, last: int) -> torch.Tensor:
    if first == last:
        return matrices[first]
    middle = splits[first, last]
    return torch.mm(_product(matrices, splits, first, middle), _product(matrices, splits, middle + 1, last))


def chain_matmul(*matrices: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    """torch.chain_matmul; as for multi_dot."""
    given = matrices[0] if len(matrices) == 1 and isinstance(matrices[0], (list, tuple)) else matrices
    return given[0] if len(given) == 1 else multi_dot(given, out=out)


def pad_sequence(sequences: Any, batch_first: bool = False, padding_value: float = 0.0,
                 padding_side: str = "right") -> torch.Tensor:
    """What torch.nn.utils.rnn.pad_sequence calls; the operator compares the lengths.

    Args:
        sequences: tensors [length, ...] of any lengths.

    Returns:
        [number, longest, ...], or [longest, number, ...] without `batch_first`; of the first one's dtype.
    """
    first = sequences[0]
    if padding_side not in ("left", "right") or any(one.dim() != first.dim() for one in sequences):
        return aten.pad_sequence(sequences, batch_first, padding_value, padding_side)  # it says what is wrong
    longest = first.shape[0]
    for one in sequences[1:]:
        longest = torch.sym_max(longest, one.shape[0])
    padded = []
    for one in sequences:
        more = longest - one.shape[0]
        ends = (more, 0) if padding_side == "left" else (0, more)
        padded.append(functional.pad(one.to(first.dtype), (0, 0) * (one.dim() - 1) + ends, value=padding_value))
    return torch.stack(padded, 0 if batch_first else 1)


def kl_rule(type_p: type, type_q: type) -> Any:
    """The function that computes a divergence of two distributions (torch.distributions.kl); torch's looks for it with
    `min` over objects, which the tracer does not know."""
    matches = [kinds for kinds in _KL_RULES if issubclass(type_p, kinds[0]) and issubclass(type_q, kinds[1])]
    if not matches:
        return NotImplemented
    left, right = _closest(matches), _closest([(of_q, of_p) for of_p, of_q in matches])
    found = _KL_RULES[left]
    if found is not _KL_RULES[right[1], right[0]]:
        warnings.warn(f"Ambiguous kl_divergence({type_p.__name__}, {type_q.__name__}). Please register_kl("
                      f"{left[0].__name__}, {right[0].__name__})", RuntimeWarning, stacklevel=2)
    return found


def _closest(matches: list[tuple[type, type]]) -> tuple[type, type]:
    """The least in lexicographic order, a subclass before its base."""
    closest = matches[0]
    for kinds in matches[1:]:
        mine, theirs = (kinds[0], closest[0]) if kinds[0] is not closest[0] else (kinds[1], closest[1])
        if mine is not theirs and issubclass(mine, theirs):
            closest = kinds
    return closest


def checkpoint_sequential(functions: Any, segments: int, input: Any, use_reentrant: bool | None = None,
                          **more: Any) -> Any:
    """torch.utils.checkpoint.checkpoint_sequential, which the tracer skips; all but the last segment are computed again
    in the backward.

    Args:
        functions: modules or functions, each of the result of the one before, or a Sequential of them.
    """
    if use_reentrant is None:
        warnings.warn("torch.utils.checkpoint.checkpoint_sequential: the use_reentrant parameter should be passed "
                      "explicitly.", stacklevel=2)
        use_reentrant = True
    preserve = more.pop("preserve_rng_state", True)
    if more:
        raise ValueError("Unexpected keyword arguments: " + ",".join(more))
    parts = list(functions.children()) if isinstance(functions, torch.nn.Sequential) else list(functions)
    length = len(parts) // segments
    for start in range(0, length * (segments - 1), length):
        def segment(x: Any, own: Any = tuple(parts[start:start + length])) -> Any:
            for part in own:
                x = part(x)
            return x

        input = torch.utils.checkpoint.checkpoint(segment, input, use_reentrant=use_reentrant,
                                                  preserve_rng_state=preserve)
    for part in parts[length * (segments - 1):]:
        input = part(input)
    return input


def masked_select(input: torch.Tensor, mask: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """torch.masked_select; the operator's backward takes sizes as numbers."""
    if out is not None:
        return aten.masked_select.out(input, mask, out=out)
    if mask.dtype is not torch.bool:
        return aten.masked_select(input, mask)  # it says what is wrong
    every, chosen = torch.broadcast_tensors(input, mask)
    if every.dim() == 0:  # of one element the tracer asks whether it is selected; of two it does not
        every, chosen = every.expand(2), torch.stack((chosen, torch.zeros_like(chosen)))
    return every[chosen]


def cross_entropy(input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None,
                  size_average: bool | None = None, ignore_index: int = -100, reduce: bool | None = None,
                  reduction: str = "mean", label_smoothing: float = 0.0) -> torch.Tensor:
    """torch.nn.functional.cross_entropy; with weights and smoothing, or probabilities as target, the operator takes the
    number of classes as a number.

    Args:
        input: [classes], [n, classes] or [n, classes, ...]. target: class numbers without the dim of classes, i64, or
            probabilities of `input`'s shape. weight: [classes].
    """
    if size_average is not None or reduce is not None:
        reduction = _legacy_reduction(size_average, reduce)
    number, probabilities = _reduction_number(reduction), target.is_floating_point()
    if (weight is None or not (probabilities or label_smoothing > 0) or label_smoothing > 1
            or (ignore_index >= 0 if probabilities else weight.dtype != input.dtype) or input.dim() == 0
            or target.dim() != input.dim() - (not probabilities)):
        return aten.cross_entropy_loss(input, target, weight, number, ignore_index, label_smoothing)
    dim = min(input.dim() - 1, 1)
    classes = input.shape[dim]
    if weight.dim() != 1 or weight.shape[0] != classes:
        return aten.cross_entropy_loss(input, target, weight, number, ignore_index, label_smoothing)  # it says so
    logarithms = input.log_softmax(dim)
    across = weight.reshape([-1 if at == dim else 1 for at in range(input.dim())])
    if probabilities:
        if label_smoothing > 0:
            target = target * (1 - label_smoothing) + label_smoothing / classes
        losses = -(logarithms * target * across)
        if number == 0:
            return losses.sum(dim)
        return losses.sum() / (losses.numel() / classes) if number == 1 else losses.sum()
    smooth = -(logarithms * across).sum(dim)
    ignored = target == ignore_index
    smooth = smooth.masked_fill(ignored, 0)
    if number == 1:
        counted = weight.index_select(0, torch.where(ignored, 0, target).reshape(-1))
        smooth = smooth.sum() / counted.masked_fill(ignored.reshape(-1), 0).sum()
    elif number == 2:
        smooth = smooth.sum()
    exact = aten.nll_loss_nd(logarithms, target, weight, number, ignore_index)
    return (1 - label_smoothing) * exact + smooth * (label_smoothing / classes)


class _FakeQuantizeChannels(torch.autograd.Function):
    """The operator with its own gradient: torch's asks how many elements the mask has, of which it takes numbers
    only."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, axis: int,
                quant_min: int, quant_max: int) -> Any:
        rounded, inside = aten.fake_quantize_per_channel_affine_cachemask(
            input, scale, zero_point, axis, quant_min, quant_max)
        ctx.save_for_backward(inside)
        return rounded

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        inside, = ctx.saved_tensors
        return gradient * inside, None, None, None, None, None


def fake_quantize_per_channel_affine(input: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, axis: int,
                                     quant_min: int, quant_max: int) -> torch.Tensor:
    """The function of torch, for any number of elements."""
    return _FakeQuantizeChannels.apply(input, scale, zero_point, axis, quant_min, quant_max)


def isqrt(number: Any) -> Any:
    """math.isqrt of a size, or of a number, which may be larger than what a float says exactly."""
    if not isinstance(number, int):
        number = operator.index(number)
    if number < 0:
        raise ValueError("isqrt() argument must be nonnegative")
    if number < EXACT:
        return int(number ** 0.5)
    root = 1 << (number.bit_length() + 1) // 2  # Newton's method, from above
    while root > number // root:
        root = (root + number // root) // 2
    return root


def script_isinstance(obj: Any, target_type: Any) -> Any:
    """torch.jit.isinstance of a class; types of containers, which look at the elements, are left to it."""
    if isinstance(target_type, type) and target_type not in (list, dict, tuple):
        return isinstance(obj, target_type)
    return _script_isinstance(obj, target_type)


# function -> what is traced in its place, also where it is called as a method
IN_PYTHON: dict[Any, Any] = {
    math.isqrt: isqrt,
    _assert: asserted_now,
    torch._assert_async: asserted,
    torch.addcdiv: addcdiv,
    torch.allclose: allclose,
    torch.as_tensor: as_tensor,
    torch.chain_matmul: chain_matmul,
    torch.corrcoef: corrcoef,
    torch.cov: cov,
    torch.cumprod: scans.cumprod,
    torch.equal: equal,
    torch.jit.isinstance: script_isinstance,
    torch.fake_quantize_per_channel_affine: fake_quantize_per_channel_affine,
    torch.kron: kron,
    torch.linalg.multi_dot: multi_dot,
    torch.masked_select: masked_select,
    torch.nanquantile: nanquantile,
    torch.quantile: quantile,
    torch.select: select,
    torch.select_scatter: select_scatter,
    torch.take_along_dim: take_along_dim,
    functional.binary_cross_entropy: binary_cross_entropy,
    functional.cross_entropy: cross_entropy,
    functional.gaussian_nll_loss: gaussian_nll_loss,
    functional.multi_margin_loss: multi_margin_loss,
    functional.multilabel_margin_loss: multilabel_margin_loss,
    functional.one_hot: one_hot,
    torch.utils.checkpoint.checkpoint_sequential: checkpoint_sequential,
    **({functional.batch_norm: batch_norm} if _is_number and _verify_batch_size else {}),
    **{function: ours for function, ours in (
        (get("torch._C._nn.pad_sequence"), pad_sequence),
        (get("torch.distributions.kl._dispatch_kl"), kl_rule))
       if function is not None},
}
