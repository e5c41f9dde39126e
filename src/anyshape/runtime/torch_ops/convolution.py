"""The op `convolution` by PyTorch's library, and weights in the order that the library wants them.

The library (oneDNN) reorders weights at every call that brings them in PyTorch's order, which for small images costs
more than the convolution. Reordered ones are kept from call to call, as far as memory allows that some call has needed
anyhow (`PackedWeights`). That the weights are still the same is seen by a digest of their bytes: what writes through
`.data` leaves no other trace.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from anyshape.base.onednn_bugs import right_in_half
from anyshape.runtime.memory.packed_weights import PackedWeights
from anyshape.runtime.torch_ops.onednn_workarounds import guarded_convolution, result_places
from anyshape.torch_compat.dtypes import HALVES
from anyshape.torch_compat.versions import api

Numbers = tuple[int, ...]
# the channels that there are for each place of a window, and the bytes of weights, from which a product is faster
FEW, LARGE = 16, 1 << 20
_CONVOLUTION = guarded_convolution(torch.ops.aten.convolution.default)
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class Convolution:
    """One step of a program.

    Args:
        store: where reordered weights are kept. key: (program, step).
        constant: the weights are an input of the program, and may be the same in the next call.
    """

    def __init__(self, store: PackedWeights, key: tuple[int, int], attributes: dict[str, Any], constant: bool) -> None:
        self.store = store
        self.key = key
        self.constant = constant
        self.attributes = attributes

    def __call__(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        x, weights, *rest = operands
        bias = rest[0] if rest else None
        if self.constant and few_windows(x, weights, **self.attributes) and not self.store.has_room(self.key, weights):
            return by_product(x, weights, bias, **self.attributes)
        return convolve(x, weights, bias, **self.attributes, packed=self.packed)

    def packed(self, weights: torch.Tensor, pack: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The weights as the library wants them."""
        if not self.constant or not _dense(weights):
            return pack()
        return self.store.get(self.key, weights, pack)


def few_windows(x: torch.Tensor, weights: torch.Tensor, stride: Numbers, padding: Numbers, dilation: Numbers,
                groups: int) -> bool:
    """Are there so few places of the window that its contents, side by side, take less time than the weights in another
    order?"""
    if weights.nbytes < LARGE or x.dim() != 4 or groups != 1 or 0 in x.shape or not weights.is_contiguous():
        return False
    places = result_places(x.movedim(-1, 1), weights, stride, padding, dilation, False, (0, 0))
    if min(places) < 1:
        return False
    return x.shape[0] * math.prod(places) * FEW <= weights.shape[0]


def by_product(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, stride: Numbers, padding: Numbers,
               dilation: Numbers, groups: int) -> torch.Tensor:
    """`convolve` of images [N, *S, C] with contiguous weights in one group: a product with the weights as they are."""
    assert groups == 1
    kernel = weights.shape[2:]
    contents = torch.nn.functional.unfold(x.movedim(-1, 1), list(kernel), list(dilation), list(padding), list(stride))
    shape = result_places(x.movedim(-1, 1), weights, stride, padding, dilation, False, (0,) * len(kernel))
    rows = contents.transpose(1, 2).reshape(-1, contents.shape[1])
    turned = weights.view(weights.shape[0], -1).t()
    result = torch.mm(rows, turned) if bias is None else torch.addmm(bias, rows, turned)
    return result.view(x.shape[0], *shape, weights.shape[0])


def convolve(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, stride: Numbers, padding: Numbers,
             dilation: Numbers, groups: int,
             packed: Callable[[torch.Tensor, Callable[[], torch.Tensor]], torch.Tensor] | None = None) -> torch.Tensor:
    """[N, *S, C] with [O, C/groups, *K] -> [N, *T, O]; without `packed`, as PyTorch would.

    Raises:
        RuntimeError: PyTorch's own, where a window is larger than what it slides over.
    """
    count = x.dim() - 2
    first = x.movedim(-1, 1)
    rest = stride, padding, dilation, False, (0,) * count
    places = result_places(first, weights, *rest)
    is_right = x.dtype not in HALVES or right_in_half(first.shape[2:], places, weights.shape[2:], stride, dilation)
    if (packed is None or not is_right or min(places) < 1 or 0 in x.shape or 0 in weights.shape
            or not api.has_packed_convolutions()):
        result = _CONVOLUTION(first, weights, bias, *rest, groups)
        return result.movedim(1, -1)
    line = count == 1
    if line:
        first, weights = first.unsqueeze(2), weights.unsqueeze(2)
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    first = _marked(first)
    ready = packed(weights, lambda: api.pack_convolution(weights, padding, stride, dilation, groups))
    result = api.packed_convolution(first, ready, bias, padding, stride, dilation, groups)
    return (result.squeeze(2) if line else result).movedim(1, -1)


def _marked(first: torch.Tensor) -> torch.Tensor:
    """The same tensor with the strides of channels last, which are not unique where sizes are 1."""
    form = _FORMATS[first.dim()]
    if not first.is_contiguous(memory_format=form):
        return first
    strides = torch.empty(first.shape, device="meta", memory_format=form).stride()
    return first if strides == first.stride() else first.as_strided(first.shape, strides)


def _dense(weights: torch.Tensor) -> bool:
    """Do the elements fill one stretch of memory?"""
    return weights.is_contiguous() or weights.is_contiguous(memory_format=_FORMATS[weights.dim()])
