"""QDQ fusion: operators between DequantizeLinear and QuantizeLinear, done on the whole numbers themselves.

    DequantizeLinear(a: u8), DequantizeLinear(b: i8) -> MatMul -> QuantizeLinear  -->  matmul_bytes, and what scales it

The floats of a DequantizeLinear are made where something asks for them. Till then its result is *deferred*: whole
numbers with a scale and a zero point, or, behind a product or a convolution, their sums with a scale. Operators that
only move elements move the whole numbers. So nothing is dequantised, constant weights above all, that nobody reads as
floats. Results of a QuantizeLinear behind sums are those of QLinearMatMul, QLinearConv and QGemm, bit by bit; where
floats go on, sums are exact, and rounded once for each factor.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anyshape.frontend.aten.table import Decline
from anyshape.frontend.importer_onnx.model import OnnxNode
from anyshape.frontend.importer_onnx.quantize import (
    LIMITS,
    aligned,
    column,
    convolution_of_bytes,
    dequantize,
    product_of_bytes,
    rounded,
)
from anyshape.frontend.importer_onnx.table import MICROSOFT, Call, translates
from anyshape.frontend.symbols.known import Known, known
from anyshape.ir.graph import Value

NUMBERS, SUMS = "numbers", "sums"
BYTES = ("u8", "i8")
MOVES = ("Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Gather", "Slice", "Expand", "Identity")


@dataclass(frozen=True, slots=True, eq=False)
class Deferred:
    """A tensor of floats that nobody has asked for yet. kind: NUMBERS, of whole numbers, inputs (x, scale, zero point
    or None), node the DequantizeLinear; or SUMS, of inputs (sums i32, scale), node what made them. rectified: negative
    ones are zero."""

    kind: str
    node: OnnxNode
    inputs: tuple[Any, ...]
    rectified: bool = False


Attempt = Callable[[Callable[[Call], Any], OnnxNode, Sequence[Any]], Any]  # a translation with these operands
Rule = Callable[[OnnxNode, Sequence[Any], Attempt], Any]


def floats(one: Deferred, attempt: Attempt) -> Any:
    """The tensor itself; small ones that are known stay so."""
    if one.kind == NUMBERS and all(part is None or (isinstance(part, Known) and not part.symbolic and
                                                    part.array.size == 1) for part in one.inputs):
        x, scale, zero = (np.float32(0) if part is None else part.array.reshape(()).astype(np.float32)
                          for part in one.inputs)
        if one.inputs[1].dtype == "f32":
            return known(np.asarray((x - zero) * scale, np.float32).reshape(one.inputs[0].shape), "f32")
    if one.kind == NUMBERS:
        return attempt(dequantize, one.node, one.inputs)  # type: ignore[no-any-return]
    return attempt(lambda c: _scaled(c, one.rectified), one.node, one.inputs)  # type: ignore[no-any-return]


def _scaled(c: Call, rectified: bool) -> Value:
    found = _floats_of(c, c.value(0), c.value(1))
    return c.op("maximum", found, 0.0) if rectified else found  # type: ignore[no-any-return]


def _floats_of(c: Call, total: Value, scale: Value) -> Value:
    return c.t.pointwise("mul", c.t.cast(total, "f32"), scale, dtype="f32")  # type: ignore[no-any-return]


def translated(node: OnnxNode, operands: Sequence[Any], attempt: Attempt, moved: Callable[[Sequence[Any]], Any]) -> Any:
    """What a node makes of operands of which some are deferred: deferred, or whole numbers; None: it takes floats.
    moved: the results of the node itself for other operands.

    Raises:
        Decline: as None.
    """
    if node.domain:
        return None
    if node.op == "DequantizeLinear":
        return Deferred(NUMBERS, node, tuple([*operands, None][:3])) if _is_plain(node, operands) else None
    first = operands[0] if operands else None
    if not isinstance(first, Deferred):
        return None
    if node.op in MOVES and first.kind == NUMBERS and not any(isinstance(one, Deferred) for one in operands[1:]):
        return _moved(node, first, operands, moved)
    rule = _RULES.get(node.op)
    return None if rule is None else rule(node, operands, attempt)


def _is_plain(node: OnnxNode, operands: Sequence[Any]) -> bool:
    """Whether these are whole numbers that PyTorch has, with one scale in f32 for all, or for each place of an axis:
    floats can be made of them at any time."""
    if len(operands) < 2 or any(isinstance(one, Deferred) or (isinstance(one, Known) and one.symbolic)
                                for one in operands):
        return False
    x, scale, zero = [*operands, None][:3]
    if _dtype(x) not in (*BYTES, "i32") or _dtype(scale) != "f32" or node.attributes.get("block_size") or (
            node.attributes.get("output_dtype")) or (zero is not None and _dtype(zero) != _dtype(x)):
        return False
    if all(one is None or _single(one) for one in (scale, zero)):
        return True
    axis, rank = node.attributes.get("axis", 1), _rank(x)
    size = _shape(x)[axis] if -rank <= axis < rank else None
    return all(one is None or _shape(one) == (size,) for one in (scale, zero))


def _shape(x: Any) -> tuple[Any, ...]:
    return tuple(x.shape if isinstance(x, Known) else x.tensor.shape)


def _moved(node: OnnxNode, first: Deferred, operands: Sequence[Any], moved: Callable[[Sequence[Any]], Any]) -> Any:
    x, scale, zero = first.inputs
    made = first.node
    if made.attributes.get("block_size"):
        return None
    dims = node.attributes.get("perm")
    rank = _rank(x)
    dims = tuple(dims) if dims is not None else tuple(reversed(range(rank)))
    if not _single(scale):
        if node.op != "Transpose":
            return None
        axis = dims.index(made.attributes.get("axis", 1) % rank)
        made = dataclasses.replace(made, attributes={**made.attributes, "axis": axis})
    if node.op == "Transpose" and isinstance(x, Known):
        x = known(np.transpose(x.array, dims), x.dtype)
    else:
        x = moved([x, *operands[1:]])
    return None if x is None else Deferred(NUMBERS, made, (x, scale, zero))


def _rank(x: Any) -> int:
    return len(x.shape) if isinstance(x, Known) else x.tensor.rank


def _dtype(x: Any) -> str:
    return str(x.dtype if isinstance(x, Known) else x.tensor.dtype)


def _single(scale: Any) -> bool:
    """Whether a scale is one number."""
    return bool(scale.array.size == 1 if isinstance(scale, Known) else scale.tensor.count == 1)


def _pair(operands: Sequence[Any], axis: int) -> tuple[Any, ...] | None:
    """The whole numbers, scales and zero points of images or rows, and of constant weights whose scales, where there
    are several, go along `axis`; None where they are something else."""
    if len(operands) < 2 or not all(isinstance(one, Deferred) and one.kind == NUMBERS for one in operands[:2]):
        return None
    (x, scale, _), (w, scales, _) = operands[0].inputs, operands[1].inputs
    if _dtype(x) not in BYTES or _dtype(w) not in BYTES or not _single(scale):
        return None
    if not _single(scales) and operands[1].node.attributes.get("axis", 1) % _rank(w) != axis % _rank(w):
        return None
    return *operands[0].inputs, *operands[1].inputs


def _bias(operands: Sequence[Any], given: tuple[Any, ...]) -> Any:
    """A bias as whole numbers of the sums' scale; None: there is none.

    Raises:
        Decline: it is something else.
    """
    if len(operands) < 3 or operands[2] is None:
        return None
    one = operands[2]
    if not isinstance(one, Deferred) or one.kind != NUMBERS or _dtype(one.inputs[0]) != "i32":
        raise Decline("a bias of floats")
    bias, scale, zero = one.inputs
    wanted = (given[1], given[4], scale)
    if not all(isinstance(size, Known) and not size.symbolic for size in wanted) or (
            zero is not None and not (isinstance(zero, Known) and not zero.array.any())):
        raise Decline("a bias that is not known")
    expected = given[1].array.reshape(()).astype(np.float64) * given[4].array.reshape(-1)
    if not np.allclose(scale.array.reshape(-1), expected, rtol=1e-4, atol=0):
        raise Decline("a bias of another scale")
    return bias


def _product(node: OnnxNode, operands: Sequence[Any], attempt: Attempt) -> Any:
    turned = node.op == "Gemm" and bool(node.attributes.get("transB", 0))
    given = _pair(operands, 0 if turned else -1)
    if given is None or (not _single(given[4]) and _rank(given[3]) != 2) or (node.op == "Gemm" and (
            node.attributes.get("transA", 0) or node.attributes.get("alpha", 1.0) != 1.0
            or node.attributes.get("beta", 1.0) != 1.0)):
        return None
    if turned and not isinstance(given[3], Known):
        return None
    if turned:
        given = (*given[:3], known(given[3].array.T, given[3].dtype), *given[4:])
    return _sums(node, attempt, (*given, _bias(operands, given)), _product_sums)


def _product_sums(c: Call) -> Any:
    total = product_of_bytes(c, c.at(0), c.at(2), c.at(3), c.at(5))
    if c.has(6):
        total = c.t.pointwise("add", total, c.value(6), dtype="i32")
    scale = c.t.reshape(c.value(1), ()), column(c, c.value(4), c.value(3), 1)
    return total, c.t.pointwise("mul", *scale, dtype="f32")


def _convolution(node: OnnxNode, operands: Sequence[Any], attempt: Attempt) -> Any:
    given = _pair(operands, 0)
    if given is None or not isinstance(given[3], Known):
        return None
    return _sums(node, attempt, (*given, _bias(operands, given)), _convolution_sums)


def _convolution_sums(c: Call) -> Any:
    total = convolution_of_bytes(c, 0, 2, 3, 5)
    rank, scale = total.tensor.rank, c.value(4)
    if c.has(6):
        total = c.t.pointwise("add", total, aligned(c, c.value(6), total, 1), dtype="i32")
    scale = c.t.reshape(scale, ()) if scale.tensor.count == 1 else c.t.reshape(
        scale, (scale.tensor.shape[0],) + (1,) * (rank - 2))
    return total, c.t.pointwise("mul", c.t.reshape(c.value(1), ()), scale, dtype="f32")


def _sums(node: OnnxNode, attempt: Attempt, given: Sequence[Any], row: Callable[[Call], Any]) -> Any:
    return Deferred(SUMS, node, tuple(attempt(row, node, given)))


def _relu(node: OnnxNode, operands: Sequence[Any], attempt: Attempt) -> Any:
    first = operands[0]
    return dataclasses.replace(first, rectified=True) if first.kind == SUMS else None


def _quantize(node: OnnxNode, operands: Sequence[Any], attempt: Attempt) -> Any:
    first = operands[0]
    scale, zero = operands[1], operands[2] if len(operands) > 2 else None
    if zero is None or not _single(scale) or _dtype(zero) not in LIMITS or node.attributes.get("block_size"):
        return None
    if first.kind == NUMBERS:  # the same numbers again
        x, own, own_zero = first.inputs
        same = all(isinstance(a, Known) and isinstance(b, Known) and a.dtype == b.dtype and np.array_equal(
            a.array.reshape(-1), b.array.reshape(-1)) for a, b in ((scale, own), (zero, own_zero)))
        return x if same and isinstance(x, Value) else None
    least = isinstance(zero, Known) and zero.items()[0] == LIMITS[zero.dtype][0]
    if first.rectified and not least:  # else what is negative is the least number in any case
        return None
    return attempt(_requantized, node, (*first.inputs, scale, zero))


def _requantized(c: Call) -> Value:
    total, scale, new = c.value(0), c.value(1), c.t.reshape(c.value(2), ())
    by = c.t.pointwise("div", scale, new, dtype="f32")
    zero = c.t.reshape(c.value(3), ())
    return rounded(c, c.t.pointwise("mul", c.t.cast(total, "f32"), by, dtype="f32"), zero, zero.tensor.dtype)


_RULES: dict[str, Rule] = {"MatMul": _product, "Gemm": _product, "Conv": _convolution, "Relu": _relu,
                           "QuantizeLinear": _quantize}


# ---- quantised operators of onnxruntime, which are what stands between DequantizeLinear and QuantizeLinear

# operator -> that of floats, its operator set, and how many operands are quantised
APART = {"QLinearAdd": ("Add", 14, 2), "QLinearMul": ("Mul", 14, 2), "QLinearSigmoid": ("Sigmoid", 13, 1),
         "QLinearLeakyRelu": ("LeakyRelu", 16, 1), "QLinearSoftmax": ("Softmax", 13, 1),
         "QLinearGlobalAveragePool": ("GlobalAveragePool", 1, 1), "QLinearAveragePool": ("AveragePool", 11, 1),
         "QLinearReduceMean": ("ReduceMean", 13, 1), "QLinearConcat": ("Concat", 13, 0),
         "QLinearWhere": ("Where", 16, 2)}


# operators of images that onnxruntime has with channels last -> the domain and set of the same with channels first
LAST = {"QLinearConv": ("", 10), "NhwcMaxPool": ("", 12), "QLinearGlobalAveragePool": (MICROSOFT, 1),
        "QLinearAveragePool": (MICROSOFT, 1)}


def apart(node: OnnxNode, prefix: str, rank: int | None) -> tuple[OnnxNode, ...] | None:
    """The nodes that one of those operators stands for; None: it is none of them. rank: of its first operand."""
    if node.domain != MICROSOFT:
        return None
    if node.op == "QEmbedLayerNormalization":
        return _embeddings(node, prefix)
    if node.op in LAST:
        last = node.op == "NhwcMaxPool" or node.attributes.get("channels_last", 0)
        if last and rank is None:
            return None
        if last or node.op not in APART:
            return _channels_first(node, prefix, rank if last else None)
    if node.op not in APART:
        return None
    op, version, count = APART[node.op]
    given = list(node.inputs)
    first = (given.pop(0),) if op == "Where" else ()
    if op == "Concat":
        end, given = given[:2], given[2:]
        count = len(given) // 3
    else:
        end = given[3 * count:]
    parts = [OnnxNode("DequantizeLinear", "", 13, tuple(given[3 * i:3 * i + 3]), (f"{prefix}{i}",))
             for i in range(count)]
    kept = {name: value for name, value in node.attributes.items() if name not in ("channels_last", "opset")}
    version = min(version, node.attributes.get("opset", version))
    operands = (*first, *(part.outputs[0] for part in parts))
    middle = OnnxNode(op, "", version, operands, (f"{prefix}y",), kept, node.name)
    if op != "AveragePool" or len(end) < 2 or not end[1]:
        return *parts, middle, OnnxNode("QuantizeLinear", "", 13, (f"{prefix}y", *end), node.outputs)
    names = [f"{prefix}{name}" for name in ("steps", "zero", "sum", "whole", "less", "one")]
    steps, zero, total, whole, less, one = names  # onnxruntime rounds here behind the zero point, not before it
    return (*parts, middle, OnnxNode("Div", "", 13, (f"{prefix}y", end[0]), (steps,)),
            OnnxNode("Cast", "", 13, (end[1],), (zero,), {"to": 1}), OnnxNode("Add", "", 13, (steps, zero), (total,)),
            OnnxNode("Round", "", 13, (total,), (whole,)), OnnxNode("Sub", "", 13, (whole, zero), (less,)),
            OnnxNode("Div", "", 13, (end[0], end[0]), (one,)),
            OnnxNode("QuantizeLinear", "", 13, (less, one, end[1]), node.outputs))


def _channels_first(node: OnnxNode, prefix: str, rank: int | None) -> tuple[OnnxNode, ...]:
    """The operator with channels first. rank: of images whose channels are last, between transposes; else None."""
    domain, version = LAST[node.op]
    kept = {name: value for name, value in node.attributes.items() if name != "channels_last"}
    op = node.op.removeprefix("Nhwc")
    if rank is None:
        return (OnnxNode(op, domain, version, node.inputs, node.outputs, kept, node.name),)
    there, back = (0, rank - 1, *range(1, rank - 1)), (0, *range(2, rank), 1)
    return (OnnxNode("Transpose", "", 13, node.inputs[:1], (f"{prefix}x",), {"perm": there}),
            OnnxNode(op, domain, version, (f"{prefix}x", *node.inputs[1:]), (f"{prefix}y",), kept, node.name),
            OnnxNode("Transpose", "", 13, (f"{prefix}y",), node.outputs[:1], {"perm": back}))


def _embeddings(node: OnnxNode, prefix: str) -> tuple[OnnxNode, ...]:
    """The norm of embeddings whose five tables and parameters are bytes, with scales and zero points behind them."""
    given = [*node.inputs, *("",) * (18 - len(node.inputs))]
    parts = [OnnxNode("DequantizeLinear", "", 13, (given[i], given[i + 6], given[i + 11]), (f"{prefix}{i}",))
             for i in range(2, 7) if given[i]]
    for part in parts:
        given[given.index(part.inputs[0], 2)] = part.outputs[0]
    return *parts, OnnxNode("EmbedLayerNormalization", MICROSOFT, 1, tuple(given[:8]), node.outputs, node.attributes)


@translates("QGemm", domain=MICROSOFT)
def quantized_gemm(c: Call) -> Any:
    weights = c.at(3)
    if c.attr("transA", 0) or c.attr("alpha", 1.0) != 1.0 or not isinstance(weights, Known):
        raise Decline("a transposed or scaled operand, or weights that a call brings")
    turned = bool(c.attr("transB", 0))
    c.inputs[3] = known(weights.array.T, weights.dtype) if turned else weights
    total, scale = _product_sums(c)
    if not c.has(7):
        return _floats_of(c, total, scale)
    c.inputs = [total, scale, c.at(7), c.at(8)]
    return _requantized(c)
