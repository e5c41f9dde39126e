"""Transfer rules of pointwise operators, reductions, scans and normalisations: joins, along dims or not at all."""
from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from anyshape.route.flow.call import NoRule, OperatorCall, TensorValue, wide

REDUCTIONS = """sum mean amax amin prod any all argmax argmin max min var std var_mean std_mean logsumexp norm median
linalg_vector_norm nanmedian mode nansum nanmean count_nonzero aminmax kthvalue""".split()
ALONG = "_softmax softmax _log_softmax log_softmax _safe_softmax sort argsort topk".split()  # a dim is joined and stays
SCANS = "cumsum cumprod logcumsumexp cummax cummin".split()
# pointwise without the tag
POINTWISE = "_to_copy to type_as native_dropout dropout bernoulli copy copysign glu_ to_dtype frac".split()
LONGEST_SCAN = 4096


def pointwise(call: OperatorCall) -> list[Tensor]:
    found = []
    for shape in call.shapes:
        owners = [wide(value.owners, len(shape)) for value in call.values() if value.rank <= len(shape)]
        if len(owners) < len(call.values()):
            raise NoRule("an operand has more dims than the result")
        found.append(call.sets.join(*owners))
    return found


def reduced(call: OperatorCall) -> list[Tensor]:
    value = call.value()
    others = [one for one in call.values() if one is not value]
    if others:  # max(a, b)
        return pointwise(call)
    dims = call.dims(value.rank) if value.rank else ()
    owners = call.sets.reduce(value.owners, dims)
    if not call.named.get("keepdim", False):
        owners = owners.reshape([size for dim, size in enumerate(owners.shape) if dim not in dims])
    if any(len(shape) != owners.dim() for shape in call.shapes):
        raise NoRule("a result of another rank")
    return [owners] * len(call.shapes)


def along(call: OperatorCall) -> list[Tensor]:
    value = call.value()
    if value.rank == 0:
        return [value.owners] * len(call.shapes)
    dim = call.named.get("dim", -1)
    return [call.sets.reduce(value.owners, (int(dim) % value.rank,))] * len(call.shapes)


def scanned(call: OperatorCall) -> list[Tensor]:
    value = call.value()
    if value.rank == 0:
        return [value.owners] * len(call.shapes)
    dim = int(call.named["dim"]) % value.rank
    if value.owners.shape[dim] > LONGEST_SCAN:
        return along(call)
    return [call.sets.scan(value.owners, dim)] * len(call.shapes)


# ---- normalisations


def _affine(call: OperatorCall, owners: Tensor, shape: tuple[int, ...], dim: int | None) -> Tensor:
    """Owners joined with those of weight and bias: of the last dims, or of one dim."""
    for name in ("weight", "bias"):
        one = call.named.get(name)
        if isinstance(one, TensorValue):
            own = one.owners if dim is None else one.owners.reshape(-1, *(1,) * (len(shape) - dim - 1))
            owners = call.sets.join(owners, wide(own, len(shape)))
    return owners


def layer_normed(call: OperatorCall) -> list[Tensor]:
    value = call.value()
    count = len(call.named["normalized_shape"])
    joined = call.sets.reduce(value.owners, range(value.rank - count, value.rank))
    return [_affine(call, joined, value.shape, None), joined, joined][:len(call.shapes)]


def group_normed(call: OperatorCall) -> list[Tensor]:
    value = call.value()
    groups = int(call.named["group"] if "group" in call.named else call.named["num_groups"])
    batch, channels = value.shape[:2]
    whole = value.owners.expand(value.shape).reshape(batch, groups, -1)
    joined = call.sets.reduce(whole, (2,))
    spread = joined.expand(batch, groups, channels // groups).reshape(batch, channels, *(1,) * (value.rank - 2))
    return [_affine(call, spread, value.shape, 1), joined[..., 0], joined[..., 0]][:len(call.shapes)]


def batch_normed(call: OperatorCall) -> list[Tensor]:
    """With statistics of the batch each channel is joined over all else; with running ones it is pointwise."""
    value = call.value()
    running = isinstance(call.named.get("running_mean"), TensorValue)
    training = bool(call.named.get("training", call.named.get("use_input_stats", not running)))
    if "no_training" in call.op.name():
        training = False
    owners = value.owners
    if training or not running:
        owners = call.sets.reduce(owners, [dim for dim in range(value.rank) if dim != 1])
    channel = owners.reshape(-1) if training else call.sets.reduce(owners, [d for d in range(value.rank) if d != 1])
    for name in ("running_mean", "running_var"):
        one = call.named.get(name)
        if isinstance(one, TensorValue):
            owners = call.sets.join(owners, wide(one.owners.reshape(-1, *(1,) * (value.rank - 2)), value.rank))
            channel = call.sets.join(channel.reshape(-1), one.owners)
    found = [_affine(call, owners, value.shape, 1)]
    for shape in call.shapes[1:]:
        fits = len(shape) == 1 and math.prod(shape) > 0
        found.append(channel.reshape(-1) if fits else torch.full((1,) * len(shape), -1, dtype=torch.int32))
    return found


RULES: dict[str, Callable[[OperatorCall], list[Tensor]]] = {
    **dict.fromkeys(REDUCTIONS, reduced), **dict.fromkeys(ALONG, along), **dict.fromkeys(SCANS, scanned),
    **dict.fromkeys(POINTWISE, pointwise), "native_layer_norm": layer_normed, "layer_norm": layer_normed,
    "_fused_rms_norm": layer_normed, "rms_norm": layer_normed, "native_group_norm": group_normed,
    "group_norm": group_normed,
    **dict.fromkeys("""_native_batch_norm_legit_no_training _native_batch_norm_legit_functional native_batch_norm
    _native_batch_norm_legit batch_norm _batch_norm_no_update _batch_norm_with_update_functional instance_norm_
    """.split(), batch_normed)}
