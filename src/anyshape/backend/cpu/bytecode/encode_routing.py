"""Bytecode encoder of routing steps at given sizes: top-k, the route plan, the group of each row (ops/routing.py): the
words that the host reads (backend/cpu/routines/topk.py, backend/cpu/routines/route_plan.py), or PyTorch.

    route_plan(ids [N, k])    -->    ROUTE_PLAN, ..., slots and bytes of ids, order, inverse and ends, N, k, bytes from
        cell to cell and from choice to choice, branches
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from anyshape.backend.cpu.bytecode import format as host
from anyshape.backend.cpu.native.records import words_of
from anyshape.ir.types import kind_of, size_of

_topk, _plan, _segments = host.TopkStep.encoder(), host.RoutePlanStep.encoder(), host.SegmentStep.encoder()
# the bits of infinity, by dtype
_INFINITY = {"f16": 0x7C00, "bf16": 0x7F80, "f32": 0x7F800000, "f64": 0x7FF0000000000000}


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """What does not depend on sizes in a step: the dtype of its operand, (slot, bytes per element) of each window."""

    number: int
    op: str
    dtype: str
    places: tuple[tuple[int, int], ...]


def routing_words(spec: RoutingSpec, windows: tuple[Any, ...]) -> list[int]:
    """The words of a step; windows: (shape, strides, offset) of the operand and of the results."""
    if not prod(windows[0][0]) and spec.op == "topk":
        return []
    words = _ENCODERS[spec.op](spec, windows)
    return [host.CALL, host.STEP_WORDS, spec.number] if words is None else words


def _places(spec: RoutingSpec, windows: tuple[Any, ...]) -> list[tuple[int, int]]:
    return [(slot, offset * item) for (slot, item), (_, _, offset) in zip(spec.places, windows, strict=True)]


def _topk_words(spec: RoutingSpec, windows: tuple[Any, ...]) -> list[int] | None:
    x, values, indices = _places(spec, windows)
    (shape, strides, _), (chosen, *_), _ = windows
    lines, count, item = prod(shape[:-1]), shape[-1], size_of(spec.dtype)
    leading = next((stride for size, stride in reversed([*zip(shape[:-1], strides[:-1], strict=True)]) if size != 1), 0)
    if count > host.TOPK_COUNT or chosen[-1] > host.TOPK_MOST or any(
            size != 1 and stride != leading * prod(shape[d + 1:-1])
            for d, (size, stride) in enumerate(zip(shape[:-1], strides[:-1], strict=True))):
        return None
    return _topk(op=host.TOPK, length=words_of(host.TopkStep), number=spec.number, x=x, values=values,
                 indices=indices, lines=lines, line=leading * item, element=strides[-1] * item, count=count,
                 k=chosen[-1], item=item, infinity=_INFINITY.get(spec.dtype, 0),
                 unsigned=int(kind_of(spec.dtype) == "uint"))


def _plan_words(spec: RoutingSpec, windows: tuple[Any, ...]) -> list[int] | None:
    ids, order, inverse, ends = _places(spec, windows)
    (cells, choices), (cell, choice), _ = windows[0]
    return _plan(op=host.ROUTE_PLAN, length=words_of(host.RoutePlanStep), number=spec.number, ids=ids, order=order,
                 inverse=inverse, ends=ends, cells=cells, choices=choices, cell=8 * cell, choice=8 * choice,
                 branches=windows[3][0][0])


def _segment_words(spec: RoutingSpec, windows: tuple[Any, ...]) -> list[int] | None:
    ends, result = _places(spec, windows)
    (shape, strides, _), ((size,), _, _) = windows
    item = size_of(spec.dtype)
    return _segments(op=host.SEGMENTS, length=words_of(host.SegmentStep), number=spec.number, ends=ends,
                     end_item=item, end_step=item * strides[0], count=shape[0], size=size, result=result)


_ENCODERS: dict[str, Callable[[RoutingSpec, tuple[Any, ...]], list[int] | None]] = {
    "topk": _topk_words, "route_plan": _plan_words, "segment_ids": _segment_words}
