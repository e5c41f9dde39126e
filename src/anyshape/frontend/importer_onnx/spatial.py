"""Translations of ONNX operators on images and signals: convolutions, pools, resizing, sampling.

    Conv(x, w, pads=[1, 1, 1, 1])  -->  extern(x, w | target="aten.convolution.default"), which channels_last takes on
"""
from __future__ import annotations

import math
from typing import Any

from anyshape.frontend.aten.table import Decline, Mismatch, is_float
from anyshape.frontend.importer_onnx.pointwise import activated
from anyshape.frontend.importer_onnx.table import MICROSOFT, Call, translates
from anyshape.frontend.symbols.known import divided
from anyshape.ir.graph import Value
from anyshape.ir.types import TensorType
from anyshape.ops.convolution import extent
from anyshape.sym.expr import Expr, Size, floordiv, maximum, minimum, scaled
from anyshape.sym.prover import prove_nonnegative
from anyshape.torch_compat import aten


def window(c: Call, spatial: tuple[Size, ...], kernel: tuple[int, ...]) -> tuple[Any, Any, Any, Any]:
    """Strides, dilations, and padding before and after, of a window over `spatial` dims."""
    count = len(kernel)
    strides = tuple(c.attr("strides", (1,) * count))
    dilations = tuple(c.attr("dilations", (1,) * count))
    auto = c.attr("auto_pad", "NOTSET")
    low: list[Size] = [0] * count
    high: list[Size] = [0] * count
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        for d, (size, k, s, a) in enumerate(zip(spatial, kernel, strides, dilations, strict=True)):
            steps = floordiv(size + s - 1, s)
            total = (steps - 1) * s + a * (k - 1) + 1 - size
            total = maximum(total, 0) if isinstance(total, Expr) else max(total, 0)
            less = floordiv(total, 2)
            low[d], high[d] = (less, total - less) if auto == "SAME_UPPER" else (total - less, less)
    elif auto != "VALID":
        pads = c.attr("pads", (0,) * (2 * count))
        low, high = list(pads[:count]), list(pads[count:])
    return strides, dilations, low, high


def around(c: Call, x: Value, low: list[Size], high: list[Size], value: Any = 0.0) -> Value:
    """The tensor with padding around its last dims."""
    first = x.tensor.rank - len(low)
    if all(n == 0 for n in (*low, *high)):
        return x
    return c.op("pad", x, low=(0,) * first + tuple(low), high=(0,) * first + tuple(high), value=value)


@translates("Conv")
def conv(c: Call) -> Any:
    return convolved(c, c.value(0), c.value(1), c.value(2) if c.has(2) else None)


@translates("FusedConv", domain=MICROSOFT)
def fused_conv(c: Call) -> Any:
    found = conv(c)
    return activated(c, c.op("add", found, c.value(3)) if c.has(3) else found)


@translates("NhwcConv", domain=MICROSOFT)
def conv_of_channels_last(c: Call) -> Any:
    rank = c.rank(0)
    x, w = (c.t.permute(c.value(place), (0, rank - 1, *range(1, rank - 1))) for place in (0, 1))
    return c.t.permute(convolved(c, x, w, c.value(2) if c.has(2) else None), (0, *range(2, rank), 1))


def convolved(c: Call, x: Value, w: Value, bias: Value | None) -> Value:
    """The convolution of the call's attributes."""
    if x.tensor.shape[1] != w.tensor.shape[1] * c.attr("group", 1):
        raise Mismatch(x.tensor.shape[1], w.tensor.shape[1] * c.attr("group", 1))
    if bias is not None and bias.tensor.shape != w.tensor.shape[:1]:
        raise Mismatch(bias.tensor.shape[0], w.tensor.shape[0])
    kernel = c.fixed(w.tensor.shape[2:])
    strides, dilations, low, high = window(c, x.tensor.shape[2:], kernel)
    for n, k, a, p, q in zip(x.tensor.shape[2:], kernel, dilations, low, high, strict=True):
        if _may_be_smaller(n, p, q, a * (k - 1)):
            c.assume(n + p + q - a * (k - 1) - 1)
    padding = low
    if low != high or any(isinstance(n, Expr) for n in low):
        x, padding = around(c, x, low, high), [0] * len(low)
    if len(kernel) == 1 and c.attr("group", 1) == 1 and x.tensor.dtype == "f32":
        # over one row of an image, for which there is a routine of our own
        x, w = (c.t.reshape(v, (*v.tensor.shape[:2], 1, v.tensor.shape[2])) for v in (x, w))
        found = _conv(c, x, w, bias, (1, *kernel), (1, *strides), [0, *padding], (1, *dilations))
        return c.t.reshape(found, (*found.tensor.shape[:2], found.tensor.shape[3]))  # type: ignore[no-any-return]
    return _conv(c, x, w, bias, kernel, strides, padding, dilations)


def _may_be_smaller(n: Size, low: Size, high: Size, reach: int) -> bool:
    """Whether a tensor of some elements may, with its padding, be shorter than a window of `reach` + 1."""
    return isinstance(n, Expr) and isinstance(low, int) and isinstance(high, int) and low + high < reach


def _conv(c: Call, x: Value, w: Value, bias: Value | None, kernel: Any, strides: Any, padding: Any,
          dilations: Any) -> Value:
    spatial = [extent(n, k, s, int(p), a)
               for n, k, s, p, a in zip(x.tensor.shape[2:], kernel, strides, padding, dilations, strict=True)]
    groups = c.attr("group", 1)
    kind = TensorType(x.tensor.dtype, (x.tensor.shape[0], w.tensor.shape[0], *spatial))
    # as a trace of PyTorch has it, so that the passes take it on
    return c.extern(  # type: ignore[no-any-return]
        "aten.convolution.default", x, w, bias, list(strides), list(padding), list(dilations), False,
        [0] * len(kernel), groups, types=kind)


@translates("ConvTranspose")
def conv_transpose(c: Call) -> Any:
    x, w = c.value(0), c.value(1)
    kernel = c.fixed(w.tensor.shape[2:])
    count, groups = len(kernel), c.attr("group", 1)
    strides, dilations = c.attr("strides", (1,) * count), c.attr("dilations", (1,) * count)
    extra = list(c.attr("output_padding", (0,) * count))
    sizes, auto = x.tensor.shape[2:], c.attr("auto_pad", "NOTSET")
    full = [(n - 1) * s + a * (k - 1) + 1 for n, s, a, k in zip(sizes, strides, dilations, kernel, strict=True)]
    low: list[Any] = [0] * count
    high: list[Any] = [0] * count
    wanted = c.attr("output_shape")
    if wanted is not None:
        c.fixed(sizes)
    if wanted is not None or auto in ("SAME_UPPER", "SAME_LOWER"):
        wanted = list(wanted[-count:]) if wanted is not None else [n * s for n, s in zip(sizes, strides, strict=True)]
        for d in range(count):
            total = full[d] + extra[d] - wanted[d]
            if isinstance(total, int) and total < 0:
                extra[d] -= total
                total = 0
            if isinstance(total, Expr):
                total = maximum(total, 0)
            less = floordiv(total, 2)
            upper = auto != "SAME_UPPER"
            low[d], high[d] = (total - less, less) if upper else (less, total - less)
    elif auto == "NOTSET":
        pads = c.attr("pads", (0,) * (2 * count))
        low, high = list(pads[:count]), list(pads[count:])
    whole = [f + e for f, e in zip(full, extra, strict=True)]
    same = all(a == b and isinstance(a, int) for a, b in zip(low, high, strict=True))
    padding = low if same else [0] * count
    kind = TensorType(x.tensor.dtype, (
        x.tensor.shape[0], w.tensor.shape[1] * groups, *(n - 2 * p for n, p in zip(whole, padding, strict=True))))
    y = c.extern("aten.convolution.default", x, w, c.value(2) if c.has(2) else None, list(strides), padding,
                 list(dilations), True, extra, groups, types=kind, why="a transposed convolution")
    if not same:
        for d in range(count):
            y = c.t.window(y, 2 + d, low[d], whole[d] - low[d] - high[d])
    return y


# ---- pools


def _pooled(c: Call, x: Value, kernel: tuple[int, ...], strides: Any, dilations: Any, low: list[Size],
            high: list[Size]) -> list[Size]:
    """How many windows there are in each dim. Rounded up, a window that begins behind the tensor does not count.
    Else the division rounds toward zero, as onnxruntime has it: a tensor shorter than the window, by less than a
    stride, has one window, of what there is. Such calls are a program of their own."""
    up = c.attr("ceil_mode", 0)
    found = []
    for n, k, s, a, p, q in zip(x.tensor.shape[2:], kernel, strides, dilations, low, high, strict=True):
        room = n + p + q - a * (k - 1) - 1
        if not up:
            if isinstance(room, int) or _may_be_smaller(n, p, q, a * (k - 1)):
                c.presume(room)
                found.append(divided(c.t.sizes.facts(), room, s) + 1)
            else:
                found.append(floordiv(room, s) + 1)
            continue
        count = floordiv(room + s - 1, s) + 1
        last = (count - 1) * s - (n + p)
        if isinstance(last, int):
            found.append(count - 1 if last >= 0 else count)
        else:  # the largest count with (count - 1)*s < n + p
            found.append(minimum(count, floordiv(n + p + s - 1, s)))
    return found


@translates("MaxPool")
def max_pool(c: Call) -> Any:
    x, kernel = c.value(0), tuple(c.attr("kernel_shape"))
    strides, dilations, low, high = window(c, x.tensor.shape[2:], kernel)
    shape = (*x.tensor.shape[:2], *_pooled(c, x, kernel, strides, dilations, low, high))
    if c.wants(1):
        return c.extern("onnx.max_pool_positions", x, list(kernel), list(strides), list(dilations), low, high,
                        list(shape[2:]), c.attr("storage_order", 0),
                        types=(TensorType(x.tensor.dtype, shape), TensorType("i64", shape)))
    least: Any = -math.inf if is_float(x.tensor.dtype) else 0 if x.tensor.dtype.startswith("u") else -(
        1 << 8 * int(x.tensor.dtype[1:]) // 8 - 1)
    return _windows(c, x, shape, kernel, strides, dilations, low, "maximum", least)


def _windows(c: Call, x: Value, shape: tuple[Size, ...], kernel: tuple[int, ...], strides: Any, dilations: Any,
             low: list[Size], row: str, outside: Any) -> Value:
    """The elements of each window combined: by slices of the padded tensor."""
    if math.prod(kernel) > 169:
        raise Decline(f"a window of {math.prod(kernel)} elements")
    more = []
    for d, (k, s, a) in enumerate(zip(kernel, strides, dilations, strict=True)):
        need = (shape[2 + d] - 1) * s + a * (k - 1) + 1 - x.tensor.shape[2 + d] - low[d]
        more.append(need if isinstance(need, int) else maximum(need, 0))
    more = [max(n, 0) if isinstance(n, int) else n for n in more]
    whole = around(c, x, low, more, outside)
    result = None
    # separable: one dim after the other
    for d, (k, s, a) in enumerate(zip(kernel, strides, dilations, strict=True)):
        found = None
        for place in range(k):
            part = c.t.window(whole, 2 + d, place * a, shape[2 + d], s)
            found = part if found is None else c.op(row, found, part)
        assert found is not None
        whole = result = found
    assert result is not None
    return result


@translates("AveragePool", "LpPool")
def average_pool(c: Call) -> Any:
    x, kernel = c.value(0), tuple(c.attr("kernel_shape"))
    dtype = x.tensor.dtype
    strides, dilations, low, high = window(c, x.tensor.shape[2:], kernel)
    counts = _pooled(c, x, kernel, strides, dilations, low, high)
    shape = (*x.tensor.shape[:2], *counts)
    y = c.t.cast(x, "f32" if dtype in ("f16", "bf16") else dtype)
    if c.name == "LpPool":
        p = c.attr("p", 2)
        raised = c.op("mul", y, y) if p == 2 else c.op("pow", c.op("abs", y), float(p))
        total = _windows(c, raised, shape, kernel, strides, dilations, low, "add", 0.0)
        return c.t.cast(c.op("sqrt", total) if p == 2 else c.op("pow", total, 1.0 / p), dtype)
    total = _windows(c, y, shape, kernel, strides, dilations, low, "add", 0.0)
    by: Any = float(math.prod(kernel))
    include = bool(c.attr("count_include_pad", 0))
    # onnxruntime divides by all of the window before opset 19, where padding counts
    reaches_out = (c.version >= 19 or not include) and any(
        prove_nonnegative(c.t.sizes.facts(), a * (k - 1) - n - p - q)
        for n, k, a, p, q in zip(x.tensor.shape[2:], kernel, dilations, low, high, strict=True))
    if c.attr("ceil_mode", 0) or reaches_out or (not include and any(n != 0 for n in (*low, *high))):
        by = None
        for d, (k, s, a) in enumerate(zip(kernel, strides, dilations, strict=True)):
            # places a*j from the window's start that are inside
            begin = c.t.iota(counts[d], -low[d], s)
            number = None
            first, last = (-low[d], x.tensor.shape[2 + d] + high[d]) if include else (0, x.tensor.shape[2 + d])
            for j in range(k):
                at = c.op("add", begin, j * a)
                here = c.t.cast(c.op("bit_and", c.op("ge", at, first), c.op("lt", at, last)), y.tensor.dtype)
                number = here if number is None else c.op("add", number, here)
            assert number is not None
            number = c.t.reshape(number, (counts[d],) + (1,) * (len(kernel) - 1 - d))
            by = number if by is None else c.op("mul", by, number)
    return c.t.cast(c.op("div", total, by), dtype)


@translates("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(c: Call) -> Any:
    x = c.value(0)
    dims = tuple(range(2, x.tensor.rank))
    if c.name == "GlobalMaxPool":
        return c.t.reduce("amax", x, dims, True)
    if c.name == "GlobalLpPool":
        p = float(c.attr("p", 2))
        return c.op("pow", c.t.reduce("sum", c.op("pow", c.op("abs", x), p), dims, True), 1.0 / p)
    kept = tuple(1 if d in dims else n for d, n in enumerate(x.tensor.shape))
    return c.aten(aten.mean.dim, x, list(dims), True, types=TensorType(x.tensor.dtype, kept))


@translates("MaxUnpool")
def max_unpool(c: Call) -> Any:
    x, at, kernel = c.value(0), c.value(1), tuple(c.attr("kernel_shape"))
    count = len(kernel)
    strides, pads = c.attr("strides", (1,) * count), c.attr("pads", (0,) * (2 * count))
    inferred = [(n - 1) * s + k - pads[d] - pads[count + d]
                for d, (n, s, k) in enumerate(zip(x.tensor.shape[2:], strides, kernel, strict=True))]
    shape = (*x.tensor.shape[:2], *inferred)
    wanted = c.sizes(2) if c.has(2) else shape
    return c.extern("onnx.max_unpool", x, at, list(wanted), list(shape), types=TensorType(x.tensor.dtype, wanted))


# ---- resizing


@translates("Resize", "Upsample")
def resize(c: Call) -> Any:
    x = c.value(0)
    rank = x.tensor.rank
    old = c.name == "Upsample" or c.version < 11
    axes = [c.dim(axis, rank) for axis in c.attr("axes", tuple(range(rank)))]
    place = 1 if old else 2
    scales: list[float | None] = [1.0] * rank
    shape = list(x.tensor.shape)
    if not old and c.has(3) and not _is_empty(c.at(3)):
        _to_sizes(c, x, axes, list(c.sizes(3)), shape, scales)
    else:
        given = c.numbers(place) if c.has(place) else list(c.attr("scales"))
        for axis, scale in zip(axes, given, strict=True):
            scales[axis] = float(scale)
            size = x.tensor.shape[axis]
            if float(scale).is_integer():
                shape[axis] = size * int(scale)
            elif (1.0 / scale).is_integer():
                shape[axis] = floordiv(size, round(1.0 / scale))
            else:
                shape[axis] = math.floor(size * scale) if isinstance(size, int) else scaled(size, float(scale))
    mode, coordinates = c.attr("mode", "nearest"), c.attr("coordinate_transformation_mode",
                                                         "asymmetric" if old else "half_pixel")
    roi = [float(n) for n in c.numbers(1)] if coordinates == "tf_crop_and_resize" else []
    kind = TensorType(x.tensor.dtype, tuple(shape))
    if mode == "nearest" and coordinates == "asymmetric" and all(s is not None and s.is_integer() for s in scales) and (
            c.attr("nearest_mode", "floor" if old else "round_prefer_floor") == "floor"):
        for axis, scale in enumerate(scales):
            assert scale is not None
            x = c.op("repeat", x, dim=axis, times=int(scale)) if scale != 1.0 else x
        return x
    nearest = c.attr("nearest_mode", "floor" if old else "round_prefer_floor")
    return c.extern(
        "onnx.resize", x, list(shape), [-1.0 if s is None else s for s in scales], mode, coordinates, nearest,
        float(c.attr("cubic_coeff_a", -0.75)), bool(c.attr("exclude_outside", 0)),
        float(c.attr("extrapolation_value", 0.0)), bool(c.attr("antialias", 0)), roi, axes, types=kind)


def _is_empty(operand: Any) -> bool:
    shape = operand.shape if not isinstance(operand, Value) else operand.tensor.shape
    return shape == (0,)


def _to_sizes(c: Call, x: Value, axes: list[int], wanted: list[Size], shape: list[Size],
              scales: list[float | None]) -> None:
    policy = c.attr("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        have = [x.tensor.shape[axis] for axis in axes]
        c.fixed((*have, *wanted))
        ratios = [m / n for m, n in zip(wanted, have, strict=True)]  # type: ignore[operator]
        scale = min(ratios) if policy == "not_larger" else max(ratios)
        wanted = [math.floor(scale * n + 0.5) for n in have]  # type: ignore[operator]
        for axis, size in zip(axes, wanted, strict=True):
            shape[axis], scales[axis] = size, scale
        return
    for axis, size in zip(axes, wanted, strict=True):
        shape[axis] = size
        scales[axis] = None if size != x.tensor.shape[axis] else 1.0


@translates("GridSample")
def grid_sample(c: Call) -> Any:
    x, grid = c.value(0), c.value(1)
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(c.attr("mode", "bilinear"), c.attr("mode", "bilinear"))
    kind = TensorType(x.tensor.dtype, (*x.tensor.shape[:2], *grid.tensor.shape[1:-1]))
    return c.extern("onnx.grid_sample", x, grid, mode, c.attr("padding_mode", "zeros"),
                    bool(c.attr("align_corners", 0)), types=kind)


@translates("AffineGrid")
def affine_grid(c: Call) -> Any:
    theta, wanted = c.value(0), c.sizes(1)
    shape = (theta.tensor.shape[0], *wanted[2:], len(wanted) - 2)
    return c.extern("onnx.affine_grid", theta, list(wanted), bool(c.attr("align_corners", 0)),
                    types=TensorType(theta.tensor.dtype, shape))


@translates("RoiAlign")
def roi_align(c: Call) -> Any:
    x, rois, batch = c.value(0), c.value(1), c.t.cast(c.value(2), "i64")
    height, width = c.attr("output_height", 1), c.attr("output_width", 1)
    kind = TensorType(x.tensor.dtype, (rois.tensor.shape[0], x.tensor.shape[1], height, width))
    half = c.attr("coordinate_transformation_mode", "half_pixel" if c.version >= 16 else "output_half_pixel")
    return c.extern("onnx.roi_align", x, rois, batch, height, width, c.attr("sampling_ratio", 0),
                    float(c.attr("spatial_scale", 1.0)), c.attr("mode", "avg"), half == "half_pixel", types=kind)


@translates("CropAndResize", domain=MICROSOFT)
def crop_and_resize(c: Call) -> Any:
    """Images [N, C, H, W] cut to boxes [R, 4] of (top, left, bottom, right), in shares of an image, and resized."""
    x, boxes, count = c.t.permute(c.value(0), (0, 2, 3, 1)), c.value(1), c.kind(1).shape[0]
    kind, linear = x.tensor.dtype, c.attr("mode", "bilinear") == "bilinear"
    batch = c.t.reshape(c.t.cast(c.value(2), "i64"), (count, 1, 1))
    places, shares, inside = [], [], []
    for d, steps in enumerate(c.ints(3)):
        shape = (count, steps, 1) if d == 0 else (count, 1, steps)
        last = c.t.cast(c.t.full(x.tensor.shape[1 + d] - 1, (), "i64"), kind)
        low, high = (c.op("mul", c.t.window(boxes, 1, place, 1), last) for place in (d, d + 2))
        if steps > 1:
            step = c.op("div", c.op("sub", high, low), float(steps - 1))
            at = c.op("add", low, c.op("mul", step, c.t.cast(c.t.iota(steps), kind)))
        else:
            at = c.op("mul", c.op("add", low, high), 0.5)
        fits = c.op("bit_and", c.op("ge", at, 0.0), c.op("le", at, last))
        at = c.op("where", fits, at, 0.0)  # what is outside is no place of the image
        first = c.op("floor", at if linear else c.op("add", at, 0.5))
        ends = (first, c.op("ceil", at)) if linear else (first,)
        places.append([c.t.reshape(c.t.cast(one, "i64"), shape) for one in ends])
        shares.append(c.t.reshape(c.op("sub", at, first), (*shape, 1)))
        inside.append(c.t.reshape(fits, (*shape, 1)))

    def between(a: Value, b: Value, share: Value) -> Value:
        return c.op("add", a, c.op("mul", c.op("sub", b, a), share))

    lines = [[c.op("index", x, batch, row, column, dims=(0, 1, 2)) for column in places[1]] for row in places[0]]
    if linear:
        above, below = (between(left, right, shares[1]) for left, right in lines)
        found = between(above, below, shares[0])
    else:
        found = lines[0][0]
    found = c.op("where", c.op("bit_and", *inside), found, float(c.attr("extrapolation_value", 0.0)))
    return c.t.permute(found, (0, 3, 1, 2))


@translates("DeformConv")
def deform_conv(c: Call) -> Any:
    x, w, offset = c.value(0), c.value(1), c.value(2)
    kernel = c.fixed(w.tensor.shape[2:])
    strides, dilations, low, _ = window(c, x.tensor.shape[2:], kernel)
    shape = (x.tensor.shape[0], w.tensor.shape[0], *offset.tensor.shape[2:])
    return c.extern("onnx.deform_conv", x, w, offset, c.value(3) if c.has(3) else None,
                    c.value(4) if c.has(4) else None, list(strides), list(dilations), low, c.attr("group", 1),
                    c.attr("offset_group", 1), types=TensorType(x.tensor.dtype, shape))
