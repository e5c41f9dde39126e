"""Words of copies, joined products and direct convolutions, by encoders in Python: what the native ones are compared
with. `None` instead of words means that the host cannot do it."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anyshape.backend.cpu.bytecode import format as host
from anyshape.backend.cpu.bytecode.conv_spec import ConvSpec, dense, least
from anyshape.backend.cpu.bytecode.encode_gemm import PACKED, Area, Shape, at_slots
from anyshape.backend.cpu.machine.target import Machine
from anyshape.backend.cpu.microkernels import direct_conv
from anyshape.backend.cpu.native.compiler import words_of
from anyshape.backend.cpu.routines.encoding.direct_conv import BAND, POSITIONS
from anyshape.base.align import align

_copy = host.CopyStep.encoder()
# words in which products have to agree to be joined: what is said of their rows, and how the work is cut
_SAME = tuple(map(host.PackedProduct.index, (
    "op", "function", "n", "k", "b_lane", "b_inner", "item", "b.slot", "b.bytes", "rows", "deep", "b_item")))
_SCRATCH = host.PackedProduct.index("scratch")


def joined(products: Sequence[list[int]]) -> list[int]:
    """Products that may run side by side as one step, whose length says how many there are, if all are single ones from
    panels and have the same rows; as they are otherwise."""
    result = [word for product in products for word in product]
    first = products[0]
    if all(len(one) == host.MATMUL_DIMS and one[0] == host.PRODUCT for one in products) and all(
            one[at] == first[at] for one in products for at in _SAME):
        result[1] = len(result)
        result[_SCRATCH] = max(one[_SCRATCH] for one in products)
    return result


def copy_words(number: int, source: Area, target: Area) -> list[int]:
    """A strided copy between windows of one shape and dtype; [] when there is nothing to copy."""
    if 0 in target.shape:
        return []
    item = target.item
    dims = [(size, t * item, s * item)
            for size, t, s in zip(target.shape, target.strides, source.strides, strict=True) if size != 1]
    dims.sort(key=lambda dim: (-abs(dim[1]), -abs(dim[2])))
    merged: list[tuple[int, int, int]] = []
    for size, t, s in dims:
        if merged and merged[-1][1] == size * t and merged[-1][2] == size * s:
            merged[-1] = (merged[-1][0] * size, t, s)
        else:
            merged.append((size, t, s))
    inner = merged.pop() if merged else (1, item, item)
    outer = 1
    for size, _, _ in merged:
        outer *= size
    words = _copy(op=host.COPY, length=0, number=number, item=item, target=(target.slot, target.bytes),
                  source=(source.slot, source.bytes), outer=outer, rank=len(merged), inner=inner,
                  dims=[word for dim in merged for word in dim])
    words[1] = len(words)
    return words


_words_of_step = host.DirectConvStep.encoder()
_MARKS = tuple(map(host.DirectConvStep.index, ("x", "weight", "bias", "factors", "shifts", "addend", "result")))


def direct_conv_words(machine: Machine, spec: ConvSpec, windows: tuple[Any, ...]) -> list[int]:
    """The words of a step; windows: (shape, strides, offset) of x, weight, what else there is of the operands, and the
    result."""
    types = tuple((shape, strides) for shape, strides, _ in windows)
    words = _direct_conv(machine, spec.settings, (spec.scaled, spec.shifted, spec.added), spec.relu, types)
    if words is None:
        return [host.CALL, host.STEP_WORDS, spec.number]
    return at_slots(words, _MARKS, spec.number, spec.places, windows)


def _direct_conv(machine: Machine, settings: tuple[tuple[int, ...], ...], optional: tuple[bool, bool, bool], relu: bool,
                 types: tuple[tuple[Shape, Shape], ...]) -> tuple[int, ...] | None:
    """The words with positions among the windows in place of slots; () when there is nothing to compute, None when the
    host does not take these strides or sizes."""
    (x, _), (weight, weight_strides), (result, _) = *types[:2], types[-1]
    if 0 in result:
        return ()
    if 0 in x or 0 in weight or any(not _lies(strides, dense(shape), shape)
                                    for shape, strides in (types[0], *types[2:])):
        return None
    outs, channels, kernel_y, kernel_x = weight
    taps = channels * kernel_y * kernel_x
    is_last = not _lies(weight_strides, dense(weight), weight)
    if is_last and not _lies(weight_strides, (taps, 1, kernel_x * channels, channels), weight):
        return None
    (stride_y, stride_x), (padding_y, padding_x), (dilation_y, dilation_x) = settings
    images, size_y, size_x, _ = x
    _, out_y, out_x, _ = result
    lanes, grain = machine.lanes, direct_conv.grain(machine)
    padded = padding_y > 0 or padding_x > 0
    wide = 4 * channels * size_x
    line = wide + 8 * channels * padding_x
    reach = (kernel_y - 1) * dilation_y + 1
    lines = max(1, min(out_y, (BAND // line - reach) // stride_y + 1, POSITIONS // out_x))
    bands = -(-out_y // lines)
    lines = -(-out_y // bands)  # bands of equal heights
    band_lines = (lines - 1) * stride_y + reach
    panels = -(-outs // (2 * lanes))
    scales = 4 * (align(taps, lanes) + 1) * 2 * lanes
    panel_bytes = 4 * (align(taps, lanes) + 3) * 2 * lanes
    places = align(8 * taps, 64)
    weights = align(places + 8 * (lines * out_x + 3 * grain), 64)
    at_input = weights + panels * panel_bytes
    scratch = at_input + (band_lines * line if padded else 0)
    bias, factors, shifts, addend = _positions(len(types), optional)
    words = _words_of_step(
        op=host.DIRECT_CONV, length=words_of(host.DirectConvStep), number=0, x=(0, 0), weight=(1, 0),
        bias=(bias, 0), factors=(factors, 0), shifts=(shifts, 0), addend=(addend, 0), result=(len(types) - 1, 0),
        least=least(relu), images=images, channels=channels, outs=outs, taps=taps, size_y=size_y,
        out_y=out_y, out_x=out_x, kernel_y=kernel_y, kernel_x=kernel_x, stride_y=stride_y, stride_x=stride_x,
        padding_y=padding_y, padding_x=padding_x, dilation_y=dilation_y, dilation_x=dilation_x, wide=wide, line=line,
        lines=lines, bands=bands, band_lines=band_lines, padded=int(padded), weights_last=int(is_last), lanes=lanes,
        grain=grain, function=host.CONV_LAST, turn=PACKED["f32"] + host.PACKED_TURN, panels=panels,
        panel_bytes=panel_bytes, scales=scales, places=places, weights=weights, input=at_input, scratch=scratch)
    return tuple(words)


def _positions(count: int, optional: tuple[bool, bool, bool]) -> tuple[int, int, int, int]:
    """Where bias, factors, shifts and addend are among `count` windows; -1: there is none."""
    present = (count - 3 > sum(optional), *optional)
    first, second, third, fourth = (2 + sum(present[:place]) if there else -1 for place, there in enumerate(present))
    return first, second, third, fourth


def _lies(strides: Shape, wanted: Shape, shape: Shape) -> bool:
    """Are these the strides, but for dims of size 1?"""
    return all(have == want or size == 1 for have, want, size in zip(strides, wanted, shape, strict=True))
