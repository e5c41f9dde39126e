"""The convolution over one to three dims, with channels last: [N, *S, C] with weights [O, C/groups, *K] -> [N, *T, O];
and of groups of rows, with channels first, by the host's own routine:

    grouped_conv(rows, weight, ends, ... | stride, padding, dilation)    [N, C, *S], [E, O, C, *K], [E], perhaps a bias
        [E, O] -> [N, O, *T]: rows ends[e-1]:ends[e] by weight[e]; zero past the last end (ops/matmul.py); f32. With
        `added` the last operand is added to all that, with `relu` the result is the maximum with 0. With `gathered` or
        `scattered` the order of a route stands behind the ends (ops/matmul.py)

    direct_conv(x, w, ... | stride, padding, dilation)   `convolution` over two dims, in one group, f32, by the host's
        own routine; `added` and `relu` as above. Behind a bias stand with `scaled` factors [O] of channels, by which
        the sums and their bias are multiplied, and with `shifted` as well what is added to the products

    conv_bytes(x, w | kernel, stride, dilation, columns)    [N, H, W, C] u8 by i8 in i32 [N, *T, columns], over two
        dims, in one group; nothing is around the images. The weights are constants: the matrix [KH*KW*C, columns] in
        panels (ops/matmul.py)

    attributes, one number per dim of S: stride, padding (zeros on either side), dilation; and groups
The weights keep PyTorch's order; who runs the op may pack them. A third operand is a bias [O].
"""
from __future__ import annotations

from anyshape.ir.panels import panels_of
from anyshape.ir.types import TensorType
from anyshape.ops.type_rules import (
    ORDERED,
    Attrs,
    Inputs,
    Types,
    add_row,
    fail,
    native,
    ordered_rows,
    same_device,
    tensor,
)
from anyshape.sym.expr import Size, floordiv


def _numbers(name: str, attrs: Attrs, key: str, count: int, least: int) -> tuple[int, ...]:
    value = attrs[key]
    if not isinstance(value, tuple) or len(value) != count or not all(type(n) is int and n >= least for n in value):
        fail(name, f"{key} is {value!r}, not {count} whole numbers of at least {least}")
    return value  # type: ignore[return-value]


def _infer(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    operands = [tensor(name, inputs, position) for position in range(len(inputs))]
    x, w = operands[:2]
    if len(operands) > 3:
        fail(name, f"{len(operands)} operands were given", "give x, the weights, and perhaps a bias")
    if len({kind.dtype for kind in operands}) != 1:
        fail(name, f"operands have dtypes {', '.join(kind.dtype for kind in operands)}", "insert a cast")
    native(name, x.dtype)
    count = x.rank - 2
    if not 1 <= count <= 3 or w.rank != x.rank:
        fail(name, f"{x} and {w} are no convolution over one to three dims")
    groups = attrs["groups"]
    if type(groups) is not int or groups < 1:
        fail(name, f"groups is {groups!r}, not a whole number of at least 1")
    if x.shape[-1] != w.shape[1] * groups:
        fail(name, f"{x} has {x.shape[-1]} channels, {w} takes {w.shape[1] * groups}")
    if len(operands) == 3 and operands[2].shape != w.shape[:1]:
        fail(name, f"{operands[2]} is no bias of {w.shape[0]} channels")
    stride = _numbers(name, attrs, "stride", count, 1)
    padding = _numbers(name, attrs, "padding", count, 0)
    dilation = _numbers(name, attrs, "dilation", count, 1)
    spatial = tuple(extent(*item) for item in zip(x.shape[1:-1], w.shape[2:], stride, padding, dilation, strict=True))
    return (TensorType(x.dtype, (x.shape[0], *spatial, w.shape[0]), None, same_device(name, operands)),)


def extent(size: Size, kernel: Size, stride: int, padding: int, dilation: int) -> Size:
    """How often a window fits into one dim."""
    return floordiv(size + 2 * padding - dilation * (kernel - 1) - 1, stride) + 1


def _infer_direct(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    if attrs.get("shifted") and not attrs.get("scaled"):
        fail(name, "it is shifted and not scaled", "give a bias")
    behind = sum(bool(attrs.get(key)) for key in ("scaled", "shifted", "added"))
    types = _infer(name, inputs[:max(2, len(inputs) - behind)], {**attrs, "groups": 1})
    kinds = [tensor(name, inputs, position) for position in range(len(inputs))]
    if kinds[0].rank != 4 or {kind.dtype for kind in kinds} != {"f32"}:
        fail(name, f"operands are {', '.join(map(str, kinds))}", "give images of f32")
    wanted = [types[0].shape[-1:]] * (behind - bool(attrs.get("added"))) + [types[0].shape] * bool(attrs.get("added"))
    if len(inputs) - behind < 2 or any(kind.shape != shape for kind, shape in zip(kinds[-behind:], wanted) if behind):
        fail(name, f"{', '.join(map(str, kinds[2:]))} are no factors, shifts or addend of {types[0]}")
    return types


add_row("convolution", "extern", "x, w, ... | stride, padding, dilation, groups", _infer)


def _infer_grouped(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    operands = [tensor(name, inputs, position) for position in range(len(inputs))]
    x, w, ends, *more = operands
    count, more = ordered_rows(name, attrs, x, more)
    bias = more[:-1] if attrs.get("added") else more
    if {kind.dtype for kind in (x, w, *more)} != {"f32"} or len(bias) > 1 or len(more) < len(bias):
        fail(name, f"operands are {', '.join(map(str, operands))}", "give f32, and one bias at most")
    dims = x.rank - 2
    if not 1 <= dims <= 3 or w.rank != x.rank + 1 or x.shape[1] != w.shape[2]:
        fail(name, f"{x} and {w} are no convolution over one to three dims")
    if ends.dtype not in ("i32", "i64") or ends.shape != w.shape[:1]:
        fail(name, f"{ends} are no ends of {w.shape[0]} groups")
    if bias and bias[0].shape != w.shape[:2]:
        fail(name, f"{bias[0]} is no bias of {w.shape[0]} groups of {w.shape[1]} channels")
    stride = _numbers(name, attrs, "stride", dims, 1)
    padding = _numbers(name, attrs, "padding", dims, 0)
    dilation = _numbers(name, attrs, "dilation", dims, 1)
    spatial = tuple(extent(*item) for item in zip(x.shape[2:], w.shape[3:], stride, padding, dilation, strict=True))
    result = TensorType(x.dtype, (count, w.shape[1], *spatial), None, same_device(name, operands))
    if len(more) > len(bias) and more[-1].shape != result.shape:
        fail(name, f"{more[-1]} is added to {result}")
    return (result,)


def _infer_bytes(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    x, w = tensor(name, inputs, 0), tensor(name, inputs, 1)
    kernel, stride, dilation = (_numbers(name, attrs, key, 2, 1) for key in ("kernel", "stride", "dilation"))
    columns = attrs["columns"]
    if (x.dtype, w.dtype, x.rank) != ("u8", "i8", 4) or not isinstance(x.shape[3], int) or type(columns) is not int:
        fail(name, f"operands are {x} and {w}", "give images of u8, and panels of i8")
    if w.shape != panels_of(kernel[0] * kernel[1] * x.shape[3], columns, "i8"):
        fail(name, f"{w} are no panels of {columns} columns for {x}")
    spatial = [extent(n, k, s, 0, a) for n, k, s, a in zip(x.shape[1:3], kernel, stride, dilation, strict=True)]
    return (TensorType("i32", (x.shape[0], *spatial, columns), None, same_device(name, (x, w))),)


add_row("conv_bytes", "library", "x, w | kernel, stride, dilation, columns", _infer_bytes)
add_row("grouped_conv", "library", "rows, weight, ends, ... | stride, padding, dilation", _infer_grouped,
        optional=("added", "relu", *ORDERED))
add_row("direct_conv", "library", "x, w, ... | stride, padding, dilation", _infer_direct,
        optional=("added", "relu", "scaled", "shifted"))
CONVOLUTIONS = ("grouped_conv", "direct_conv")  # by the host's own routines
