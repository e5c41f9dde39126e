"""Transfer rules of contractions and windows: products, convolutions, pooling, attention.

A result is the join over what is contracted, less the places where a constant operand is zero: a product with a
permutation matrix is a permutation. (A zero times an infinity is a NaN; values are taken to be finite.)
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from anyshape.route.flow.call import NoRule, OperatorCall, TensorValue, wide
from anyshape.route.flow.owners import NONE, CellSets, compressed, uniform

LARGEST_PATTERN = 1 << 22  # elements of a constant whose zeros are looked at
LARGEST_BATCH = 64  # constants of a batched product


# ---- products


def _zeros(value: TensorValue) -> Tensor | None:
    """Where a constant is not zero, if it is known and has zeros."""
    if value.known is None or not value.constant or value.known.numel() > LARGEST_PATTERN:
        return None
    pattern = value.known != 0
    return None if bool(pattern.all()) else pattern


def _matrix(sets: CellSets, left: TensorValue, right: TensorValue) -> Tensor:
    """[.., m, k] @ [.., k, n] with equal ranks of at least 2."""
    for own, other, turned in ((right, left, False), (left, right, True)):
        pattern = _zeros(own)
        if pattern is None:
            continue
        if pattern.dim() > 2:
            pattern = pattern.reshape(-1, *pattern.shape[-2:])
            if not bool((pattern == pattern[:1]).all()):
                return _batched(sets, pattern, other, turned)
            pattern = pattern[0]
        if turned:  # P @ X
            return sets.pick(other.owners.transpose(-1, -2), pattern).transpose(-1, -2)
        return sets.pick(other.owners, pattern.t())
    return sets.join(sets.reduce(left.owners, (-1,)), sets.reduce(right.owners, (-2,)))


def _batched(sets: CellSets, pattern: Tensor, other: TensorValue, turned: bool) -> Tensor:
    """A constant [b, ., .] that differs over its batch, with its zeros."""
    if pattern.shape[0] > LARGEST_BATCH or other.rank != 3:
        raise NoRule("a large batch of constants")
    owners = other.owners.expand(pattern.shape[0], *other.owners.shape[1:])
    found = []
    for one, own in zip(pattern, owners, strict=True):
        found.append(sets.pick(own.t(), one).t() if turned else sets.pick(own, one.t()))
    shape = torch.broadcast_shapes(*(one.shape for one in found))
    return torch.stack([one.expand(shape) for one in found])


def _with(sets: CellSets, call: OperatorCall, product: Tensor, *names: str) -> list[Tensor]:
    rank = len(call.shapes[0])
    return [sets.join(product, call.joined(rank, *names))]


def mm(call: OperatorCall) -> list[Tensor]:
    names = ("input", "mat2") if "mat2" in call.named and "mat1" not in call.named else ("mat1", "mat2")
    product = _matrix(call.sets, call.value(names[0]), call.value(names[1]))
    return _with(call.sets, call, product, *(() if names[0] == "input" else ("input",)))


def matmul(call: OperatorCall) -> list[Tensor]:
    """Of any ranks: a vector is a matrix of one row on the left, of one column on the right."""
    left, right = call.value(), call.value("other")
    single = left.rank == 1, right.rank == 1
    rank = max(left.rank, right.rank, 2)
    if single[0]:
        left = TensorValue(left.owners[None], (1, *left.shape), left.dtype, left.known)
    if single[1]:
        right = TensorValue(right.owners[:, None], (*right.shape, 1), right.dtype,
                      None if right.known is None else right.known[:, None])
    left, right = (TensorValue(wide(one.owners, rank), one.shape, one.dtype, one.known) for one in (left, right))
    found = _matrix(call.sets, left, right)
    found = found[..., 0, :] if single[0] else found
    return [found[..., 0] if single[1] else found]


def baddbmm(call: OperatorCall) -> list[Tensor]:
    product = _matrix(call.sets, call.value("batch1"), call.value("batch2"))
    return _with(call.sets, call, product, "input")


def linear(call: OperatorCall) -> list[Tensor]:
    value, weight = call.value(), call.value("weight")
    known = None if weight.known is None else weight.known.t()
    turned = TensorValue(weight.owners.t(), weight.shape[::-1], weight.dtype, known)
    rank = value.rank
    turned = TensorValue(wide(turned.owners, rank), turned.shape, turned.dtype, turned.known)
    return _with(call.sets, call, _matrix(call.sets, value, turned), "bias")


def dot(call: OperatorCall) -> list[Tensor]:
    """Vectors, and a matrix by a vector."""
    names = [name for name in ("input", "mat", "tensor", "vec", "other")
             if isinstance(call.named.get(name), TensorValue)]
    left, right = call.value(names[-2]), call.value(names[-1])
    pattern = _zeros(right)
    if pattern is not None and left.rank == 2:
        product = call.sets.pick(left.owners, pattern[None])[..., 0]
    else:
        product = call.sets.reduce(call.sets.join(left.owners, right.owners), (-1,))[..., 0]
    return _with(call.sets, call, product, *names[:-2])


# ---- windows


def _ranges(out: int, kernel: int, stride: int, padding: int, dilation: int) -> list[tuple[int, int, int]]:
    return [(place * stride - padding, place * stride - padding + (kernel - 1) * dilation + 1, dilation)
            for place in range(out)]


def _numbers(given: object, count: int) -> list[int]:
    found = [int(given)] if isinstance(given, int) else [int(one) for one in given]  # type: ignore[attr-defined]
    return found * count if len(found) == 1 else found


def _windowed(sets: CellSets, value: TensorValue, out: Sequence[int],
              ranges: Sequence[list[tuple[int, int, int]]]) -> Tensor:
    """The join over a box for each place of the last len(out) dims."""
    owners, first = value.owners, value.rank - len(out)
    for place, own in enumerate(ranges):
        dim = first + place
        if owners.shape[dim] > 1:
            owners = sets.windows(owners, dim, own)
    return owners


def pooled(call: OperatorCall) -> list[Tensor]:
    value = call.value()
    kernel_given = call.named["kernel_size"]
    count = int(call.op.name().split("pool")[1][0])
    kernel = _numbers(kernel_given, count)
    stride = _numbers(call.named.get("stride") or kernel, count)
    padding = _numbers(call.named.get("padding", 0), count)
    dilation = _numbers(call.named.get("dilation", 1), count)
    out = call.shapes[0][-count:]
    ranges = [_ranges(*one) for one in zip(out, kernel, stride, padding, dilation, strict=True)]
    return [_windowed(call.sets, value, out, ranges)] * len(call.shapes)


def adaptive_pooled(call: OperatorCall) -> list[Tensor]:
    value = call.value()
    count = int(call.op.name().split("pool")[1][0])
    out, sizes = call.shapes[0][-count:], value.shape[-count:]
    ranges = [[(place * size // many, math.ceil((place + 1) * size / many), 1) for place in range(many)]
              for many, size in zip(out, sizes, strict=True)]
    return [_windowed(call.sets, value, out, ranges)] * len(call.shapes)


def convolved(call: OperatorCall) -> list[Tensor]:
    """x [n, c, *s]: the join over the channels of a group and the window of each place."""
    value, weight, sets = call.value(), call.value("weight"), call.sets
    shape = call.shapes[0]
    count = weight.rank - 2
    if value.rank != weight.rank:
        raise NoRule("a convolution without a batch")
    groups = int(call.named.get("groups", 1))
    numbers = [_numbers(call.named.get(name, default), count)
               for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))]
    kernel = weight.shape[2:]
    owners = value.owners
    if owners.shape[1] > 1:
        split = owners.reshape(owners.shape[0], groups, -1, *owners.shape[2:])
        owners = sets.reduce(split, (2,)).squeeze(2)
        owners = owners.repeat_interleave(shape[1] // groups, 1) if groups > 1 else owners
    for place in range(count):
        dim = 2 + place
        if owners.shape[dim] == 1:
            continue
        stride, padding, dilation = (one[place] for one in numbers)
        if call.named.get("transposed") or "transpose" in call.op.name():
            owners = _spread(owners, dim, stride)
            padding, stride = dilation * (kernel[place] - 1) - padding, 1
        owners = sets.windows(owners, dim, _ranges(shape[dim], kernel[place], stride, padding, dilation))
    if not weight.constant:
        owners = sets.join(owners, uniform(sets.all_of(weight.owners), value.rank))
    bias = call.named.get("bias")
    if isinstance(bias, TensorValue) and not bias.constant:
        owners = sets.join(owners, uniform(sets.all_of(bias.owners), value.rank))
    return [owners]


def _spread(owners: Tensor, dim: int, stride: int) -> Tensor:
    """Owners with stride - 1 places of no cell between them."""
    shape = list(owners.shape)
    shape[dim] = (shape[dim] - 1) * stride + 1
    found = owners.new_full(shape, NONE)
    found[tuple(slice(None) if place != dim else slice(None, None, stride) for place in range(len(shape)))] = owners
    return found


# ---- attention


def attended(call: OperatorCall) -> list[Tensor]:
    """query [.., l, e], key [.., s, e], value [.., s, v]: each query joins what its mask lets in."""
    query, key, value, sets = call.value("query"), call.value("key"), call.value("value"), call.sets
    if not query.rank == key.rank == value.rank >= 2:
        raise NoRule("ranks differ")
    mask = call.named.get("attn_mask")
    places, positions = query.shape[-2], key.shape[-2]
    seen = sets.join(sets.reduce(key.owners, (-1,)), sets.reduce(value.owners, (-1,)))[..., 0]
    own = sets.reduce(query.owners, (-1,))
    if query.shape[:-2] != key.shape[:-2]:  # grouped queries: heads share keys
        seen, own = (one if one.dim() < 3 else sets.reduce(one, (1,)) for one in (seen, own))
    extra = None
    if call.named.get("is_causal"):
        pattern = torch.ones(places, positions, dtype=torch.bool).tril()
    else:
        pattern = torch.ones(places, positions, dtype=torch.bool)
        if isinstance(mask, TensorValue) and mask.known is not None and mask.constant:
            lets = mask.known if mask.known.dtype == torch.bool else mask.known != -math.inf
            lets = lets.expand(*lets.shape[:-2], places, positions)
            pattern = lets.reshape(-1, places, positions).any(0)
            # a row that no key may enter is a NaN or zero, of no key
        elif isinstance(mask, TensorValue):
            extra = sets.reduce(wide(mask.owners, query.rank), (-1,))
    found = sets.join(own, sets.pick(seen, pattern)[..., None])
    if extra is not None:
        if call.named.get("enable_gqa"):
            extra = uniform(sets.all_of(extra), query.rank)
        found = sets.join(found, extra)
    joined = compressed(found)
    return [joined] + [uniform(sets.all_of(joined), len(shape)) for shape in call.shapes[1:]]


RULES: dict[str, Callable[[OperatorCall], list[Tensor]]] = {
    **dict.fromkeys("mm bmm addmm".split(), mm), "baddbmm": baddbmm, "linear": linear, "matmul": matmul,
    **dict.fromkeys("dot vdot mv addmv".split(), dot),
    **dict.fromkeys("""max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices avg_pool1d
    avg_pool2d avg_pool3d""".split(), pooled),
    **dict.fromkeys("""_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d""".split(), adaptive_pooled),
    **dict.fromkeys("""convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d""".split(),
                    convolved),
    **dict.fromkeys("""scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention""".split(), attended)}
