"""Bytecode encoder of grouped convolutions at given sizes: the words that the host reads
(backend/cpu/routines/convolution/grouped_conv.py), or PyTorch.

    grouped_conv(rows [S, C, *space], weight [E, O, C, *kernel], ends [E], bias [E, O])
        -->  GROUPED_CONV, ..., slots and bytes, sizes in three dims, and where scratch is
"""
from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

from anyshape.backend.cpu.bytecode import format as host
from anyshape.backend.cpu.bytecode.conv_spec import ConvSpec, dense, least
from anyshape.backend.cpu.bytecode.products import Shape, at_slots
from anyshape.backend.cpu.machine.target import HARDWARE, Machine
from anyshape.backend.cpu.microkernels.tables import direct_conv, winograd_conv
from anyshape.backend.cpu.native.records import words_of
from anyshape.base.align import align

_words_of_step = host.GroupedConvStep.encoder()
_MARKS = tuple(map(host.GroupedConvStep.index, ("rows", "weight", "ends", "order", "bias", "addend", "result")))
# bytes of scratch beyond which a row's input does not stay in the caches between panels, and PyTorch does it
MOST = 4 << 20
INPUT, RESULT = 60, 60  # operations of vectors that a channel's transform takes: of the input, of the result
_PLACES = ("winograd", "blocks", "flag", "sums", "transformed", "factors", "biases", "scratch")


def grouped_conv_words(machine: Machine, spec: ConvSpec, windows: tuple[Any, ...]) -> list[int]:
    """The words of a step; windows: (shape, strides, offset) of rows, weight, ends, perhaps order, bias and addend,
    and the result."""
    types = tuple((shape, strides) for shape, strides, _ in windows)
    words = _words(machine, spec.settings, spec.added, spec.relu, (spec.gathered, spec.scattered), spec.places[2][1],
                   types)
    if words is None:
        return [host.CALL, host.STEP_WORDS, spec.number]
    return at_slots(words, _MARKS, spec.number, spec.places, windows)


@lru_cache(maxsize=4096)
def _words(machine: Machine, settings: tuple[tuple[int, ...], ...], added: bool, relu: bool, ordered: tuple[bool, bool],
           end_item: int, types: tuple[tuple[Shape, Shape], ...]) -> tuple[int, ...] | None:
    """The words with positions among the windows in place of slots; () when there is nothing to compute, None when the
    host does not take these strides or sizes."""
    (rows, row_strides), (weight, _), (ends, end_strides), (result, _) = *types[:3], types[-1]
    if 0 in result:
        return ()
    packed = (types[1], (rows[1:], row_strides[1:]), *types[3:])
    if 0 in rows or 0 in weight or any(strides != dense(shape) for shape, strides in packed):
        return None
    has_order = any(ordered)
    missing = 3 - (len(rows) - 2)
    size, out, kernel = (_three(shape, missing) for shape in (rows[2:], result[2:], weight[3:]))
    stride, padding, dilation = ((fill,) * missing + own for fill, own in zip((1, 0, 1), settings, strict=True))
    lanes, grain = machine.lanes, direct_conv.grain(machine)
    channels, outs, taps = rows[1], weight[1], rows[1] * prod(kernel)
    # along a line: the positions of a phase that whole vectors of results read, and those of the row
    phase = max(align(out[2], lanes) + (kernel[2] - 1) * dilation[2] // stride[2] + 1,
                (size[2] + 2 * padding[2] - 1) // stride[2] + 1)
    line, deep, high = 4 * phase * stride[2], size[0] + 2 * padding[0], size[1] + 2 * padding[1]
    panels = align(8 * taps, 64)
    at_input = align(panels + 4 * (taps + 1) * align(outs, grain), 64)
    input_bytes = channels * deep * high * line + 4 * 2 * lanes
    by_winograd = _wins(machine.lanes, kernel, stride, dilation, channels, outs, out)
    ways: dict[str, int] = dict.fromkeys(_PLACES, 0)
    if by_winograd:
        input_bytes += 2 * line + 4 * 3 * lanes
        ways = _winograd_places(machine, align(at_input + input_bytes, 64), channels, outs)
    scratch = ways.pop("scratch") or at_input + input_bytes
    if scratch > MOST:
        return None
    has_bias = len(types) == 5 + added + has_order
    words = _words_of_step(
        op=host.GROUPED_CONV, length=words_of(host.GroupedConvStep), number=0, rows=(0, 0), weight=(1, 0),
        ends=(2, 0), order=(3 if has_order else -1, 0), bias=(3 + has_order if has_bias else -1, 0),
        addend=(len(types) - 2 if added else -1, 0), result=(len(types) - 1, 0),
        gathered=int(ordered[0]), cells=rows[0], row=4 * row_strides[0],
        scattered=int(ordered[1]), least=least(relu), end_item=end_item,
        end_step=end_item * end_strides[0], count=ends[0], size=result[0], channels=channels, outs=outs, taps=taps,
        size_z=size[0], size_y=size[1], wide=size[2], volume=prod(size), out_z=out[0], out_y=out[1], out_x=out[2],
        area=prod(out), kernel_z=kernel[0], kernel_y=kernel[1], kernel_x=kernel[2], stride_z=stride[0],
        stride_y=stride[1], stride_x=stride[2], padding_z=padding[0], padding_y=padding[1], padding_x=padding[2],
        dilation_z=dilation[0], dilation_y=dilation[1], dilation_x=dilation[2], deep=deep, high=high, phase=phase,
        line=line, lanes=lanes, grain=grain, function=host.CONV, panels=panels, input=at_input,
        input_bytes=input_bytes, scratch=scratch,
        near=max(1, HARDWARE.core_cache_bytes // (32 * (rows[1] * prod(size) + outs * prod(out)))), **ways)
    return tuple(words)


def _wins(lanes: int, kernel: Shape, stride: Shape, dilation: Shape, channels: int, outs: int, out: Shape) -> bool:
    """Whether Winograd's algorithm takes this convolution, in fewer operations of vectors."""
    if kernel != (1, 3, 3) or (stride, dilation) != ((1, 1, 1), (1, 1, 1)) or out[0] != 1:
        return False
    strips = (out[1] + 1) // 2 * -(-out[2] // (2 * lanes))
    products = strips * (16 * channels * outs + INPUT * channels + RESULT * outs)
    return products < out[1] * -(-out[2] // lanes) * 9 * channels * outs


def _winograd_places(machine: Machine, first: int, channels: int, outs: int) -> dict[str, int]:
    """The words for Winograd's algorithm, whose scratch begins at `first`."""
    vector, most = 4 * machine.lanes, winograd_conv.most(machine)
    sizes = {"flag": 8, "sums": 8 * outs * vector, "transformed": 16 * channels * vector,
             "factors": 16 * channels * outs * 4, "biases": 4 * outs}
    found = {"winograd": host.WINOGRAD, "blocks": -(-outs // most)}
    for name, size in sizes.items():
        found[name] = first
        first = align(first + size, 64)
    return {**found, "scratch": first}


def _three(sizes: Shape, missing: int) -> Shape:
    return (1,) * missing + tuple(sizes)
