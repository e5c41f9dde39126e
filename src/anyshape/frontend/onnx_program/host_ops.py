"""Operators of the host: what has a result whose size is in the data, lists of tensors, and optional values."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from anyshape.frontend.importer_onnx.model import ELEMENTS, OnnxNode
from anyshape.frontend.symbols.numpy_arrays import dtype_of, numpy_dtype, to_tensor

HOST: dict[str, Callable[..., Any]] = {}


def hosts(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes the function the host's of these operators."""
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            HOST[name] = function
        return function
    return add


def array(value: Any) -> np.ndarray:
    """A tensor as an array of numpy."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    if value.dtype == torch.bfloat16:
        return value.contiguous().view(torch.int16).numpy().view(numpy_dtype("bf16"))
    return value.numpy()


def back(value: np.ndarray) -> Any:
    """An array as a tensor, where torch has its dtype."""
    try:
        return to_tensor(np.array(value))
    except TypeError:
        return value


# ---- results whose size is in the data


@hosts("NonZero")
def nonzero(node: OnnxNode, x: torch.Tensor) -> Any:
    found = torch.nonzero(x if x.dim() else x.reshape(1)).T.contiguous()
    return found if x.dim() else found[:0] if not found.shape[1] else found


@hosts("Compress")
def compress(node: OnnxNode, x: torch.Tensor, mask: torch.Tensor) -> Any:
    axis = node.attributes.get("axis")
    places = torch.nonzero(mask).flatten()
    return x.flatten().index_select(0, places) if axis is None else x.index_select(axis, places)


@hosts("Unique")
def unique(node: OnnxNode, x: Any) -> Any:
    axis, ordered = node.attributes.get("axis"), node.attributes.get("sorted", 1)
    values, first, inverse, counts = np.unique(array(x), True, True, True, axis=axis)
    inverse = inverse.reshape(-1)
    if not ordered:
        order = np.argsort(first)
        values = np.take(values, order, 0 if axis is None else axis)
        first, counts = first[order], counts[order]
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        inverse = rank[inverse]
    return (back(values), *(torch.from_numpy(np.ascontiguousarray(one, np.int64))
                            for one in (first, inverse, counts)))


@hosts("NonMaxSuppression")
def non_max_suppression(node: OnnxNode, boxes: torch.Tensor, scores: torch.Tensor, most: Any = None, iou: Any = None,
                        least: Any = None) -> Any:
    """Boxes by falling score, without those that overlap with one that stays (ONNX NonMaxSuppression-11)."""
    count = 0 if most is None else int(most.reshape(-1)[0])
    limit = 0.0 if iou is None else float(iou.reshape(-1)[0])
    corners = boxes.double()
    if node.attributes.get("center_point_box", 0):
        x, y, w, h = corners.unbind(-1)
        corners = torch.stack((y - h / 2, x - w / 2, y + h / 2, x + w / 2), -1)
    low, high = torch.minimum(corners[..., :2], corners[..., 2:]), torch.maximum(corners[..., :2], corners[..., 2:])
    areas = (high - low).prod(-1)
    found = []
    for batch in range(scores.shape[0]):
        for kind in range(scores.shape[1]):
            own = scores[batch, kind]
            order = torch.argsort(own, descending=True, stable=True)
            if least is not None:
                order = order[own[order] > float(least.reshape(-1)[0])]
            kept = 0
            while len(order) and kept < count:
                best = order[0]
                found.append((batch, kind, int(best)))
                kept += 1
                order = order[1:]
                sides = (torch.minimum(high[batch, best], high[batch, order])
                         - torch.maximum(low[batch, best], low[batch, order])).clamp(min=0)
                both = sides.prod(-1)
                union = areas[batch, best] + areas[batch, order] - both
                order = order[~((union > 0) & (both / union > limit))]
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 3)


# ---- results that are no tensors


@hosts("ai.onnx.ml:ZipMap")
def zip_map(node: OnnxNode, x: torch.Tensor) -> Any:
    """Scores of classes by their labels, one dict for each sample. x: [samples, classes], or [classes]."""
    named = node.attributes.get("classlabels_int64s") or node.attributes.get("classlabels_strings") or ()
    rows = x.reshape(1, -1) if x.dim() < 2 else x
    if rows.shape[1] != len(named):
        raise ValueError(f"there are {rows.shape[1]} scores for {len(named)} labels")
    return ([dict(zip(named, row, strict=True)) for row in rows.tolist()],)


# ---- dtypes that torch lacks


def _cast(x: np.ndarray, dtype: str, saturate: bool = True, round_mode: str = "up") -> np.ndarray:
    """The array in another dtype, as ONNX rounds it (ONNX Cast-24): narrow floats saturate, whole numbers of a few bits
    keep their lowest bits."""
    kind = numpy_dtype(dtype)
    if dtype == "string":
        return np.array([_text(item) for item in x.reshape(-1)], object).reshape(x.shape)
    if x.dtype == object or x.dtype.kind in "US":
        return x.astype(str).astype(np.float64 if kind.kind not in "iu" else kind).astype(kind)
    if dtype == "float8_e8m0fnu":
        return _powers(x, kind, saturate, round_mode)
    wide = x if x.dtype.kind in "fiub" and x.dtype.itemsize > 1 else x.astype(np.float32)
    if dtype in ("int4", "uint4", "int2", "uint2"):
        bits = int(dtype[-1])
        whole = wide.astype(np.int64) & ((1 << bits) - 1)
        if dtype.startswith("int"):
            whole = np.where(whole >= 1 << (bits - 1), whole - (1 << bits), whole)
        return whole.astype(np.int8).astype(kind)
    if not dtype.startswith("float"):
        return wide.astype(kind)
    found = wide.astype(np.float32).astype(kind)
    if dtype == "float4_e2m1fn":
        return found
    largest = np.float32(_largest(kind))
    if saturate:
        clipped = np.clip(wide.astype(np.float32), -largest, largest)
        found = np.where(np.isnan(wide.astype(np.float32)), found, clipped.astype(kind))
    return found.astype(kind)


def _text(item: Any) -> str:
    """A number as text: of eight digits, as onnxruntime writes it; infinity and NaN by the names of ONNX Cast."""
    if isinstance(item, (str, np.str_, np.integer)):
        return str(item)
    if isinstance(item, np.bool_):
        return str(int(item))
    return {"nan": "NaN", "inf": "INF", "-inf": "-INF"}.get(text := f"{float(item):.8g}", text)


def _largest(kind: Any) -> float:
    """The largest finite number of a narrow dtype."""
    patterns = np.arange(256, dtype=np.uint8).view(kind).astype(np.float32)
    return float(patterns[np.isfinite(patterns)].max())


def _powers(x: np.ndarray, kind: Any, saturate: bool, mode: str) -> np.ndarray:
    """Powers of two: the exponent of a number, rounded up, down, or to the nearer one."""
    wide = np.abs(x.astype(np.float64))
    with np.errstate(all="ignore"):
        exponent = np.log2(wide)
    low = np.floor(exponent)
    if mode == "up":
        chosen = np.ceil(exponent)
    elif mode == "down":
        chosen = low
    else:
        chosen = np.where(wide >= 1.5 * 2.0 ** np.where(np.isfinite(low), low, 0), low + 1, low)
    bits = np.clip(np.nan_to_num(chosen, nan=0, neginf=-127, posinf=128), -127, 127 if saturate else 128) + 127
    bits = np.where(np.isnan(x.astype(np.float64)), 255, bits)
    return bits.astype(np.uint8).view(kind)


@hosts("Cast", "CastLike")
def cast(node: OnnxNode, x: Any, like: Any = None) -> Any:
    dtype = dtype_of(array(like)) if like is not None else ELEMENTS[node.attributes["to"]]
    return back(_cast(array(x), dtype, bool(node.attributes.get("saturate", 1)),
                      node.attributes.get("round_mode", "up")))


@hosts("BitCast")
def bit_cast(node: OnnxNode, x: Any) -> Any:
    return back(array(x).view(numpy_dtype(ELEMENTS[node.attributes["to"]])))


def _met(parameter: np.ndarray, x: np.ndarray, axis: int, block: int) -> np.ndarray:
    if parameter.size == 1 and not block:
        return parameter.reshape(())
    if block:
        return np.take(np.repeat(parameter, block, axis), np.arange(x.shape[axis]), axis)
    return parameter.reshape([-1 if d == axis else 1 for d in range(x.ndim)])


@hosts("QuantizeLinear")
def quantize(node: OnnxNode, x: Any, scale: Any, zero: Any = None) -> Any:
    own, steps = array(x), array(scale)
    axis, block = node.attributes.get("axis", 1), node.attributes.get("block_size", 0)
    axis = axis % max(own.ndim, 1) if own.ndim > 1 else 0
    dtype = dtype_of(array(zero)) if zero is not None else ELEMENTS[node.attributes.get("output_dtype", 0) or 2]
    y = own.astype(np.float32) / _met(steps, own, axis, block).astype(np.float32)
    if dtype.startswith("float"):
        return back(_cast(y, dtype, bool(node.attributes.get("saturate", 1))))
    y = np.rint(y)
    if zero is not None:
        y = y + _met(array(zero), own, axis, block).astype(np.float32)
    bits = int(dtype.removeprefix("u").removeprefix("int").removeprefix("i"))
    low, high = (0, (1 << bits) - 1) if dtype.startswith("u") else (-(1 << bits - 1), (1 << bits - 1) - 1)
    return back(np.clip(y, low, high).astype(np.int32).astype(numpy_dtype(dtype)))


@hosts("DequantizeLinear")
def dequantize(node: OnnxNode, x: Any, scale: Any, zero: Any = None) -> Any:
    own, steps = array(x), array(scale)
    axis, block = node.attributes.get("axis", 1), node.attributes.get("block_size", 0)
    axis = axis % max(own.ndim, 1) if own.ndim > 1 else 0
    y = own.astype(np.float32)
    if zero is not None:
        y = y - _met(array(zero), own, axis, block).astype(np.float32)
    wanted = ELEMENTS.get(node.attributes.get("output_dtype", 0))
    kind = numpy_dtype(wanted) if wanted else steps.dtype
    return back((y * _met(steps, own, axis, block).astype(np.float32)).astype(kind))


# ---- lists


@hosts("SequenceEmpty")
def sequence_empty(node: OnnxNode) -> Any:
    return [[]]


@hosts("SequenceConstruct")
def sequence_construct(node: OnnxNode, *values: Any) -> Any:
    return [list(values)]


@hosts("SequenceAt")
def sequence_at(node: OnnxNode, values: list[Any], place: Any) -> Any:
    return [values[int(place)]]


@hosts("SequenceLength")
def sequence_length(node: OnnxNode, values: list[Any]) -> Any:
    return torch.tensor(len(values))


@hosts("SequenceInsert")
def sequence_insert(node: OnnxNode, values: list[Any], value: Any, place: Any = None) -> Any:
    found = list(values)
    found.insert(len(found) if place is None else int(place), value)
    return [found]


@hosts("SequenceErase")
def sequence_erase(node: OnnxNode, values: list[Any], place: Any = None) -> Any:
    found = list(values)
    del found[-1 if place is None else int(place)]
    return [found]


@hosts("ConcatFromSequence")
def concat_from_sequence(node: OnnxNode, values: list[Any]) -> Any:
    axis = node.attributes["axis"]
    return torch.stack(values, axis) if node.attributes.get("new_axis", 0) else torch.cat(values, axis)


@hosts("SplitToSequence")
def split_to_sequence(node: OnnxNode, x: torch.Tensor, split: Any = None) -> Any:
    axis = node.attributes.get("axis", 0)
    if split is None:
        parts = list(x.split(1, axis))
        return [parts if node.attributes.get("keepdims", 1) else [one.squeeze(axis) for one in parts]]
    return [list(x.split(int(split) if not split.dim() else split.tolist(), axis))]


# ---- optional values


@hosts("Optional")
def optional(node: OnnxNode, value: Any = None) -> Any:
    return [value]


@hosts("OptionalHasElement")
def optional_has_element(node: OnnxNode, value: Any = None) -> Any:
    return torch.tensor(value is not None)


@hosts("OptionalGetElement")
def optional_get_element(node: OnnxNode, value: Any) -> Any:
    return [value]


@hosts("Identity")
def identity(node: OnnxNode, value: Any) -> Any:
    return [value]
