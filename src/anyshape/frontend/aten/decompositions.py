"""Which ATen ops are taken apart at capture, and which stay whole because a library or our own op does them better."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from anyshape.frontend.aten.table import is_composed
from anyshape.passes.constant_folding import round_to
from anyshape.torch_compat import OpOverload, aten, is_there
from anyshape.torch_compat.dtypes import DTYPE_NAMES
from anyshape.torch_compat.tracing import settings
from anyshape.torch_compat.versions import api
from anyshape.torch_compat.versions.memory_order import channels_last_format, drawn_in_memory_order

# Taken apart although torch.export keeps them: pointwise work and reductions that fuse with their neighbours.
ALSO = (
    aten._adaptive_avg_pool2d_backward,
    aten._batch_norm_no_update,
    aten._batch_norm_with_update,
    aten._batch_norm_with_update_functional,
    aten._log_softmax,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten._softmax,
    aten._to_copy,
    aten.addmv,
    aten.batch_norm_backward,
    aten.clamp_min_,
    aten.dist,
    aten.elu,
    aten.flip,
    aten.gelu,
    aten.hardtanh,
    aten.leaky_relu,
    aten.linalg_vector_norm,
    aten.native_batch_norm,
    aten.native_group_norm,
    aten.native_layer_norm,
    aten.permute_copy,
    aten.rrelu_with_noise_backward,
    aten.tril_indices,
    aten.triu_indices,
    aten.unbind_copy,
)

# Kept whole although the core table takes them apart.
WHOLE = (
    # The library's flash attention needs memory linear in the length.
    aten._scaled_dot_product_flash_attention_for_cpu,
    # The decompositions are not what eager computes: in value * (a / b) the product is last, whole numbers go through
    # f32, a gradient has the dtype of the result's whatever the input's is, and what is given as a number is not
    # rounded to half precision.
    aten.addcdiv,
    aten.addcmul,
    aten.threshold,
    aten.threshold_backward,
    aten.logit,
    aten.logit_backward,
    aten.frac,  # before 2.13: of -0.0 it is -0.0
    aten.clamp_min,  # before 2.12: `clamp` by a number that is NaN is another function
    aten.clamp_max,
    # The decompositions take the root of a variance, which may be infinite in f32 where the deviation is not.
    aten.std,
    aten.std_mean,
    # Scatter-adds: each has a translation of its own, or is slower as index_put with accumulate.
    aten.embedding_dense_backward,
    aten.index_add,
    aten._unsafe_masked_index_put_accumulate,
    # The decomposition computes in float32 and rounds: slower, and no closer to eager.
    aten.baddbmm,
    # Random ops draw from torch's generator in the same order as eager, so that seeds give the same numbers.
    aten.bernoulli,
    aten.rrelu,
    # Recurrent cells and image resizing have library kernels; their decompositions unroll or gather.
    aten.lstm,
    aten.gru,
    aten.rnn_tanh,
    aten.rnn_relu,
    aten.grid_sampler_2d,
    aten.upsample_bicubic2d,
    aten.upsample_bilinear2d,
    aten.upsample_linear1d,
    aten.upsample_nearest1d,
    aten.upsample_nearest2d,
    aten.upsample_nearest3d,
    aten.upsample_trilinear3d,
)


def _embedding_bag(weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, scale_grad_by_freq: bool = False,
                   mode: int = 0, sparse: bool = False, per_sample_weights: torch.Tensor | None = None,
                   include_last_offset: bool = False, padding_idx: int = -1) -> Any:
    """Sums of bfloat16 rows. torch's trace says that the second result names each index's bag, but the operator leaves
    it empty and has its backward find the bags, as for float32; so they are found here."""
    if weight.dtype is not torch.bfloat16 or mode != 0 or weight.device.type != "cpu":
        return NotImplemented
    result = aten._embedding_bag_forward_only(weight, indices, offsets, scale_grad_by_freq, mode, sparse,
                                              per_sample_weights, include_last_offset, padding_idx)[0]
    starts = offsets[:-1] if include_last_offset else offsets
    places = torch.arange(indices.shape[0], dtype=offsets.dtype, device=offsets.device)
    bags = torch.searchsorted(starts, places, right=True) - 1
    nothing = torch.zeros_like(starts)
    return result, bags.to(offsets.dtype), nothing, nothing.clone()


def stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """torch's own joins along a dim that is there, of rows perhaps, and splits it: rows that are dealt out over ranks
    would have to be gathered for that. Where all have channels last, torch's result lies so, too."""
    rank = tensors[0].dim()
    place = dim % (rank + 1)
    formats = {channels_last_format(one) for one in tensors}
    if place == rank or None in formats or len(formats) > 1:
        return torch.cat([one.unsqueeze(dim) for one in tensors], dim)
    order = [0, *range(2, rank), 1]
    at = order.index(place)
    joined = torch.cat([one.permute(order).unsqueeze(at) for one in tensors], at)
    dims = [*order[:at], rank, *order[at:]]  # of the result, as they lie; `rank` is the new one
    return joined.permute([dims.index(one) for one in (*range(place), rank, *range(place, rank))])


def take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Elements of the flattened `x`. torch's own indexes as Python does, which asks an index without dims for its
    value."""
    return aten.index.Tensor(x.reshape(-1), [index])  # type: ignore[no-any-return]


def native_dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    """The operator draws a mask, and multiplies twice. The mask is drawn as it draws it; the products fuse, and what
    they give is computed again from the mask, of a byte an element, where that is cheaper than keeping it. A GPU's
    operator draws other numbers than any other operator does, so there it stays one."""
    if not x.dtype.is_floating_point or train is False or x.device.type != "cpu":
        return NotImplemented
    kept = 1.0 - p
    mask = drawn_in_memory_order(aten.empty_like(x, dtype=torch.bool), kept)
    if mask is None:
        return NotImplemented
    scale = round_to(1.0 / kept if kept else 0.0, DTYPE_NAMES[x.dtype])  # of that dtype, as the operator has it
    return aten.mul.Tensor(aten.mul.Tensor(x, mask), scale), mask


def cdist_backward(grad: torch.Tensor, x1: torch.Tensor, x2: torch.Tensor, p: float, distance: torch.Tensor) -> Any:
    """With both sides as large as the batch, which the operator's own shape rule takes them to be."""
    wide = [x.expand(*grad.shape[:-2], *x.shape[-2:]) for x in (x1, x2)]
    if settings.same_shape(wide[0], x1) and settings.same_shape(wide[1], x2):
        return NotImplemented
    return aten._cdist_backward.default(grad, *wide, p, distance)


def _loss_backward(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """torch's own divides by the number of elements in Python, which 0 ends."""
    def backward(grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if settings.has_size_0(x) or settings.has_size_0(target):
            return x - target
        return torchs(grad, x, target, *rest, **more)

    return backward


def _smooth_l1_backward(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """torch's own gives 0, the sign of NaN, where the operator's gradient is NaN."""
    def backward(grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, *rest: Any) -> Any:
        difference = x - target
        return torch.where(difference.isnan(), difference, torchs(grad, x, target, *rest))

    return _loss_backward(backward)


def _group_norm_backward(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """torch's own divides by the number of elements of a group."""
    def backward(grad: torch.Tensor, x: torch.Tensor, *more: Any) -> Any:
        if not settings.has_size_0(x):
            return torchs(grad, x, *more)
        *rest, mask = more
        _, *others = torchs(grad, x, *rest, [False, *mask[1:]])
        return torch.zeros_like(x) if mask[0] else None, *others

    return backward


def threshold_backward(grad: torch.Tensor, x: torch.Tensor, threshold: Any) -> Any:
    """With a result of the dtype that both have together, as the operator has it; torch's, and its rule for shapes, say
    the gradient's."""
    kind = torch.result_type(grad, x)
    return NotImplemented if kind == grad.dtype else aten.threshold_backward.default(grad.to(kind), x, threshold)


def _like_the_input(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient has the input's dtype, whatever the dtype of what comes from behind."""
    def backward(grad: torch.Tensor, x: torch.Tensor, *rest: Any, **more: Any) -> Any:
        return torchs(grad, x, *rest, **more).to(x.dtype)

    return backward


def _laid_out_in_order(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """The first result is in order whatever the strides of `x`, where torch's has these."""
    def forward(x: torch.Tensor, *rest: Any, **more: Any) -> Any:
        first, *others = torchs(x, *rest, **more)
        return first.contiguous(), *others

    return forward


def _laid_out_as_images(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """The first result is in order, or with channels last where `x` is so; torch's lies as `x` does, whatever its
    strides, or is in order with channels last, too."""
    def forward(x: torch.Tensor, *rest: Any, **more: Any) -> Any:
        found = torchs(x, *rest, **more)
        first, *others = found if isinstance(found, tuple) else (found,)
        last = channels_last_format(x)
        first = first.contiguous() if last is None else first.contiguous(memory_format=last)
        return (first, *others) if isinstance(found, tuple) else first

    return forward


def _rolled(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """Over no dims the elements roll in order, and lie so."""
    as_images = _laid_out_as_images(torchs)

    def roll(x: torch.Tensor, shifts: Any, dims: Any = ()) -> Any:
        return as_images(x, shifts, dims) if dims else torchs(x, shifts, dims).contiguous()

    return roll


_BATCH_NORMS = (
    "_batch_norm_no_update", "_batch_norm_with_update", "_batch_norm_with_update_functional",
    "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training",
    "native_batch_norm",
)

# operator -> torch's decomposition of it -> ours, which lays the result out as the operator does
LAYOUTS: dict[Any, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    **{getattr(packet, overload): _laid_out_as_images
       for packet in filter(is_there, (getattr(aten, name) for name in _BATCH_NORMS))
       for overload in packet.overloads() if overload in ("default", "no_stats")},
    aten.channel_shuffle.default: _laid_out_as_images,
    aten.log_sigmoid_forward.default: _laid_out_in_order,
    aten.max_unpool2d.default: _laid_out_as_images,
    aten.roll.default: _rolled,
    **{getattr(aten, name).default: _laid_out_as_images for name in (
        "native_group_norm", "pixel_shuffle", "pixel_unshuffle", "reflection_pad2d", "reflection_pad3d",
        "replication_pad2d", "replication_pad3d")},
}

# operator -> torch's decomposition of it -> ours
AROUND: dict[Any, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    **LAYOUTS,
    aten.huber_loss_backward.default: _loss_backward,
    aten.mish_backward.default: _like_the_input,
    aten.mse_loss_backward.default: lambda torchs: _like_the_input(_loss_backward(torchs)),
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.smooth_l1_loss_backward.default: lambda torchs: _like_the_input(_smooth_l1_backward(torchs)),
    aten.soft_margin_loss_backward.default: _like_the_input,
}

# Decompositions of our own, each with the operator.
OWN: dict[Any, Callable[..., Any]] = {
    aten._cdist_backward.default: cdist_backward,
    aten._embedding_bag.default: _embedding_bag,
    aten.native_dropout.default: native_dropout,
    aten.stack.default: stack,
    aten.take.default: take,
    aten.threshold_backward.default: threshold_backward,
}


@functools.cache
def table() -> dict[Any, Callable[..., Any]]:
    """Overload -> decomposition, for AOTAutograd and for `ExportedProgram.run_decompositions`."""
    chosen = api.core_decompositions()
    chosen.update(api.decompositions_of(ALSO))
    for packet in filter(is_there, WHOLE):
        for overload in packet.overloads():
            chosen.pop(getattr(packet, overload), None)
    # what a pointwise row composes; the decompositions lay results out as one operand lies, where operators ask both
    for op in [op for op in chosen if isinstance(op, OpOverload) and is_composed(op)]:
        del chosen[op]
    chosen.update({op: around(chosen[op]) for op, around in AROUND.items() if op in chosen})
    chosen.update({op: own for op, own in OWN.items() if is_there(op)})
    return chosen
