"""Translations of onnxruntime's fused operators of transformers (com.microsoft): attention in its forms, with keys and
values of calls before, rotary embeddings, embeddings with their norm.

    Attention(x, w, b, num_heads=4)  -->  q, k, v = add(matmul(x, w), b); softmax(q @ k^T * scale + mask) @ v

Numbers are those of onnxruntime's CPU kernels: what a mask hides is moved by `mask_filter_value`, not left out.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from anyshape.frontend.aten.reduce import mean
from anyshape.frontend.aten.table import Decline, Mismatch
from anyshape.frontend.importer_onnx.matmul import matmul
from anyshape.frontend.importer_onnx.quantize import column, product_of_bytes
from anyshape.frontend.importer_onnx.reduce import layer_norm_of
from anyshape.frontend.importer_onnx.table import MICROSOFT, Call, translates
from anyshape.ir.graph import Value
from anyshape.sym.expr import Size, floordiv, maximum
from anyshape.torch_compat import aten

HIDDEN = -3.4028234663852886e38  # the least f32: what comes later


def _heads(c: Call, x: Value, heads: int) -> Value:
    """[b, s, heads * d]  -->  [b, heads, s, d], where d is a number"""
    b, s, _ = x.tensor.shape
    width, = c.fixed(x.tensor.shape[2:])
    split = c.t.reshape(x, (b, s, heads, width // heads))
    return c.t.permute(split, (0, 2, 1, 3))  # type: ignore[no-any-return]


def _joined(c: Call, x: Value) -> Value:
    """[b, heads, s, d]  -->  [b, s, heads * d]"""
    b, heads, s, d = x.tensor.shape
    return c.t.reshape(c.t.permute(x, (0, 2, 1, 3)), (b, s, heads * d))  # type: ignore[no-any-return]


def _behind_past(c: Call, past: Value, new: Value) -> Value:
    """[b, heads, past + s, d]

    Raises:
        Mismatch: other dims differ.
    """
    for d in (0, 1, 3):
        if past.tensor.shape[d] != new.tensor.shape[d]:
            raise Mismatch(past.tensor.shape[d], new.tensor.shape[d])
    return c.op("concat", past, new, dim=2)


def _added(c: Call, mask: Value | None, more: Value | None) -> Value | None:
    if mask is None or more is None:
        return more if mask is None else mask
    return c.t.pointwise("add", mask, more, dtype="f32")  # type: ignore[no-any-return]


def _attended(c: Call, q: Value, k: Value, v: Value, mask: Value | None, bias: Value | None = None,
              softcap: float = 0.0, smooth: bool = False) -> Value:
    """softmax(q @ k^T * scale + mask) @ v of [b, heads, s, d]; in f32, as narrower floats' sums are. smooth: with a key
    more, whose score and value are 0."""
    kind = q.tensor.dtype
    width, = c.fixed(q.tensor.shape[-1:])
    scale = float(c.attr("scale", 0.0) or 0.0) or float(width) ** -0.5
    q, k, v = (c.t.cast(one, "f32") for one in (q, k, v))
    scores = c.op("mul", matmul(c, q, c.t.permute(k, (0, 1, 3, 2))), scale)
    if softcap:
        scores = c.op("mul", c.op("tanh", c.op("div", scores, softcap)), softcap)
    for one in (bias, mask):
        if one is not None:
            scores = c.t.pointwise("add", scores, one, dtype="f32")
    keys = scores.tensor.shape[3]
    if smooth:
        scores = c.op("pad", scores, low=(0, 0, 0, 0), high=(0, 0, 0, 1), value=0.0)
    weights = c.aten(aten._softmax.default, scores, 3, False, types=scores.tensor)
    weights = c.t.window(weights, 3, 0, keys)
    return c.t.cast(matmul(c, weights, v), kind)  # type: ignore[no-any-return]


def _hides(c: Call, seen: Value, by: float) -> Value:
    """0 where a key is seen, else a number that makes its weight vanish."""
    return c.t.where(seen, 0.0, by, "f32")  # type: ignore[no-any-return]


def _places(c: Call, count: Size, rank: int, dim: int) -> Value:
    shape = tuple(count if d == dim else 1 for d in range(rank))
    return c.t.reshape(c.t.iota(count), shape)  # type: ignore[no-any-return]


def _causal(c: Call, rows: Size, keys: Size) -> Value:
    """[1, 1, rows, keys]: the last row sees all keys, the one before it all but the last."""
    last = c.op("add", _places(c, rows, 4, 2), keys - rows)
    return _hides(c, c.op("le", _places(c, keys, 4, 3), last), HIDDEN)


def _padding(c: Call, place: int, batch: Size, keys: Size) -> Value | None:
    """The mask that an operand says: as many keys as it has, [b]; or 1 where a key is seen, [b, keys] or
    [b, rows, keys]."""
    if not c.has(place):
        return None
    given = c.value(place)
    by = float(c.attr("mask_filter_value", -10000.0))
    shape = given.tensor.shape
    if given.tensor.rank == 1:
        if isinstance(shape[0], int) and isinstance(batch, int) and shape[0] != batch:
            raise Decline("begins and ends of what is seen")
        if shape[0] != batch:
            raise Mismatch(shape[0], batch)
        counts = c.t.reshape(c.t.cast(given, "i64"), (shape[0], 1, 1, 1))
        return _hides(c, c.op("lt", _places(c, keys, 4, 3), counts), by)
    if given.tensor.rank > 3:
        raise Decline(f"a mask of rank {given.tensor.rank}")
    lined = (shape[0], 1, 1, shape[1]) if given.tensor.rank == 2 else (shape[0], 1, *shape[1:])
    return _hides(c, c.op("gt", c.t.reshape(given, lined), 0), by)


@translates("Attention", domain=MICROSOFT)
def attention(c: Call) -> Any:
    x, w = c.value(0), c.value(1)
    if c.attr("do_rotary", 0) or c.has(6):
        raise Decline("rotary embeddings inside of it, or a past of a fixed size")
    total = matmul(c, x, w)
    if c.has(2):
        total = c.t.pointwise("add", total, c.value(2), dtype=total.tensor.dtype)
    return _of_products(c, total, 3, 4, 5)


@translates("QAttention", domain=MICROSOFT)
def quantized_attention(c: Call) -> Any:
    x, w = c.at(0), c.at(1)
    if c.attr("do_rotary", 0):
        raise Decline("rotary embeddings inside of it")
    by = c.t.pointwise("mul", c.t.reshape(c.value(3), ()), column(c, c.value(4), c.tensor(w), 1), dtype="f32")
    total = c.t.pointwise("mul", c.t.cast(product_of_bytes(c, x, c.at(6), w, c.at(7)), "f32"), by, dtype="f32")
    return _of_products(c, c.t.pointwise("add", total, c.value(2), dtype="f32"), 5, 8, 9)


def _of_products(c: Call, total: Value, mask_at: int, past_at: int, bias_at: int) -> Any:
    """Attention of queries, keys and values side by side, with the operands at these places, and what is kept."""
    heads = int(c.attr("num_heads"))
    width = total.tensor.shape[-1]
    sizes = tuple(c.attr("qkv_hidden_sizes", ()) or ()) or (floordiv(width, 3),) * 3
    starts = (0, sizes[0], sizes[0] + sizes[1])
    q, k, v = (_heads(c, c.t.window(total, 2, start, size), heads) for start, size in zip(starts, sizes, strict=True))
    if c.has(past_at):
        past = c.value(past_at)
        before = [c.t.reshape(c.t.window(past, 0, place, 1), past.tensor.shape[1:]) for place in (0, 1)]
        k, v = (_behind_past(c, old, new) for old, new in zip(before, (k, v), strict=True))
    present = None
    if c.wants(1):
        present = c.op("concat", *(c.t.reshape(one, (1, *one.tensor.shape)) for one in (k, v)), dim=0)
    rows, keys = q.tensor.shape[2], k.tensor.shape[2]
    mask = _padding(c, mask_at, q.tensor.shape[0], keys)
    if c.attr("unidirectional", 0):
        mask = _added(c, mask, _causal(c, rows, keys))
    return _joined(c, _attended(c, q, k, v, mask, c.value(bias_at) if c.has(bias_at) else None)), present


def _unpacked(c: Call) -> list[Value]:
    """Queries, keys and values, [b, s, heads * d], which may lie beside each other: [b, s, heads, 3 or 2, d]."""
    found = [c.value(place) for place in range(3) if c.has(place)]
    if len(found) == 3:
        return found
    whole = found.pop()
    count = 3 - len(found)
    if whole.tensor.rank != 5 or whole.tensor.shape[3] != count:
        raise Decline("operands that are left out")
    b, s, heads, _, d = whole.tensor.shape
    return [*found, *(c.t.reshape(c.t.window(whole, 3, place, 1), (b, s, heads * d)) for place in range(count))]


@translates("RelativePositionBias", domain=MICROSOFT)
def relative_position_bias(c: Call) -> Any:
    """[1, heads, rows, keys], of a table [buckets, heads]: near keys have a bucket each, far ones share those of a
    logarithm (Raffel et al. 2020)."""
    table, rows, keys = c.value(0), c.sizes(1)[0], c.sizes(2)[0]
    buckets, = c.fixed(table.tensor.shape[:1])
    away = c.op("sub", _places(c, keys, 2, 1), _places(c, rows, 2, 0))
    if both := bool(c.attr("is_bidirectional", 0)):
        buckets //= 2
    far = c.op("abs", away) if both else c.op("neg", c.op("minimum", away, 0))
    exact = buckets // 2
    ratio = c.op("div", c.t.cast(c.op("maximum", far, exact), "f32"), float(exact))
    steps = c.op("mul", c.op("div", c.op("log", ratio), math.log(int(c.attr("max_distance")) / exact)),
                 float(buckets - exact))
    late = c.op("minimum", c.op("add", c.t.cast(steps, "i64"), exact), buckets - 1)
    at = c.t.where(c.op("lt", far, exact), far, late, "i64")
    if both:
        at = c.op("add", at, c.t.where(c.op("gt", away, 0), buckets, 0, "i64"))
    found = c.t.permute(c.op("take", table, at, dim=0), (2, 0, 1))
    return c.t.reshape(found, (1, *found.tensor.shape))


@translates("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(c: Call) -> Any:
    heads = int(c.attr("num_heads"))
    if any(c.has(place) for place in (8, 9)):
        raise Decline("a past of a fixed size")
    q, k, v = _unpacked(c)
    if c.has(3):
        bias = c.value(3)
        start: Size = 0
        moved: list[Value] = []
        for one in (q, k, v):
            size = one.tensor.shape[-1]
            moved.append(one if one.tensor.rank != 3 else c.t.pointwise(
                "add", one, c.t.window(bias, 0, start, size), dtype=one.tensor.dtype))
            start = start + size
        q, k, v = moved
    q, k, v = (_heads(c, one, heads) if one.tensor.rank == 3 else one for one in (q, k, v))
    if c.has(6):
        k, v = (_behind_past(c, c.value(place), new) for place, new in ((6, k), (7, v)))
    keys = k.tensor.shape[2]
    mask = _padding(c, 4, q.tensor.shape[0], keys)
    if c.attr("unidirectional", 0):
        mask = _added(c, mask, _causal(c, q.tensor.shape[2], keys))
    found = _joined(c, _attended(c, q, k, v, mask, c.value(5) if c.has(5) else None))
    return found, k if c.wants(1) else None, v if c.wants(2) else None


@translates("GroupQueryAttention", domain=MICROSOFT)
def group_query_attention(c: Call) -> Any:
    heads, groups = int(c.attr("num_heads")), int(c.attr("kv_num_heads"))
    if any(c.has(place) for place in range(11, len(c.inputs))) or c.has(9):
        raise Decline("given places, sinks, or a cache that is quantised")
    x = c.value(0)
    if c.has(1):
        parts = [x, c.value(1), c.value(2)]
    else:
        d = floordiv(x.tensor.shape[2], heads + 2 * groups)
        parts = [c.t.window(x, 2, start * d, count * d)
                 for start, count in ((0, heads), (heads, groups), (heads + groups, groups))]
    q, k, v = (_heads(c, one, count) for one, count in zip(parts, (heads, groups, groups), strict=True))
    b, _, s, _ = q.tensor.shape
    # seqlens_k: the keys of each line, less one; those of calls before stand in front
    ends = c.op("add", c.t.reshape(c.t.cast(c.value(5), "i64"), (b,)), 1)
    before = c.op("maximum", c.op("sub", ends, s), 0)
    if c.attr("do_rotary", 0):
        at = c.op("add", c.t.reshape(before, (b, 1)), _places(c, s, 2, 1))
        whole = bool(c.attr("rotary_interleaved", 0))
        q, k = (_rotated(c, one, at, c.value(7), c.value(8), whole) for one in (q, k))
    keys = c.sizes(6)[0]
    if c.has(3):
        past = c.value(3).tensor.shape[2]
        keys = maximum(past, keys)
        k, v = (_behind(c, c.value(place), new, before, keys) for place, new in ((3, k), (4, v)))
    else:
        keys = s
    last = c.op("add", c.t.reshape(before, (b, 1, 1, 1)), _places(c, s, 4, 2))
    key = _places(c, keys, 4, 3)
    seen = c.op("le", key, last)
    window = int(c.attr("local_window_size", -1))
    if window > 0:
        seen = c.op("bit_and", seen, c.op("gt", key, c.op("sub", last, window)))
    bias = c.value(10) if c.has(10) else None
    k_all, v_all = (_repeated(c, one, heads // groups) for one in (k, v))
    found = _attended(c, q, k_all, v_all, _hides(c, seen, HIDDEN), bias, float(c.attr("softcap", 0.0) or 0.0),
                      c.attr("smooth_softmax", 0) == 1)
    return _joined(c, found), k, v


def _repeated(c: Call, x: Value, times: int) -> Value:
    """Each head `times` times, beside each other."""
    b, groups, s, d = x.tensor.shape
    if times == 1:
        return x
    wide = c.t.broadcast(c.t.reshape(x, (b, groups, 1, s, d)), (b, groups, times, s, d))
    return c.t.reshape(wide, (b, groups * times, s, d))  # type: ignore[no-any-return]


def _behind(c: Call, past: Value, new: Value, before: Value, keys: Size) -> Value:
    """[b, heads, keys, d]: of a line's past as much as it has, and what is new behind that."""
    b, heads, s, d = new.tensor.shape
    short = keys - past.tensor.shape[2]
    c.assume(short)
    padded = c.op("pad", past, low=(0, 0, 0, 0), high=(0, 0, short, 0), value=0.0)
    place = c.op("sub", _places(c, keys, 2, 1), c.t.reshape(before, (b, 1)))
    inside = c.op("maximum", c.op("minimum", place, s - 1), 0)
    rows = c.op("index", c.t.permute(new, (0, 2, 1, 3)), c.t.reshape(c.t.iota(b), (b, 1)), inside, dims=(0, 1))
    fresh = c.t.reshape(c.op("ge", place, 0), (b, 1, keys, 1))
    there = c.t.broadcast(c.t.permute(rows, (0, 2, 1, 3)), (b, heads, keys, d))
    return c.t.where(fresh, there, padded, new.tensor.dtype)  # type: ignore[no-any-return]


def _rotated(c: Call, x: Value, at: Value, cosine: Value, sine: Value, interleaved: bool) -> Value:
    """[b, heads, s, d] turned by the angles of its places [b, s]; what is behind the angles' width stays."""
    b, heads, s, d = x.tensor.shape
    half = cosine.tensor.shape[1]
    width = 2 * half
    cos, sin = (c.t.reshape(c.op("take", one, at, dim=0), (*at.tensor.shape[:1], 1, s, half)) for one in (cosine, sine))
    if interleaved:
        pairs = c.t.reshape(c.t.window(x, 3, 0, width), (b, heads, s, half, 2))
        first, second = (c.t.reshape(c.t.window(pairs, 4, place, 1), (b, heads, s, half)) for place in (0, 1))
    else:
        first, second = c.t.window(x, 3, 0, half), c.t.window(x, 3, half, half)

    def mixed(name: str, one: Value, other: Value) -> Value:
        kind = x.tensor.dtype
        return c.t.pointwise(name, c.t.pointwise("mul", one, cos, dtype=kind),  # type: ignore[no-any-return]
                             c.t.pointwise("mul", other, sin, dtype=kind), dtype=kind)
    turned = [mixed("sub", first, second), mixed("add", second, first)]
    if interleaved:
        columns = [c.t.reshape(one, (b, heads, s, half, 1)) for one in turned]
        turned = [c.t.reshape(c.op("concat", *columns, dim=4), (b, heads, s, width))]
    if d != width:
        turned.append(c.t.window(x, 3, width, d - width))
    return c.op("concat", *turned, dim=3) if len(turned) > 1 else turned[0]


@translates("RotaryEmbedding", domain=MICROSOFT)
def rotary_embedding(c: Call) -> Any:
    x, at = c.value(0), c.t.cast(c.value(1), "i64")
    if c.attr("is_packed_batching", 0) or float(c.attr("scale", 1.0)) != 1.0:
        raise Decline("packed lines, or a scale")
    flat = x.tensor.rank == 3
    if flat:
        width = c.attr("rotary_embedding_dim", 0)
        heads: Any = c.attr("num_heads", 0) if width else floordiv(
            *c.fixed((x.tensor.shape[2], 2 * c.kind(2).shape[1])))
        if not isinstance(heads, int) or not heads:
            raise Decline("a number of heads that is not known")
        x = _heads(c, x, heads)
    b, _, s, _ = x.tensor.shape
    if at.tensor.rank != 2:  # where the first one stands
        if at.tensor.count != 1:
            raise Mismatch(at.tensor.count, 1)
        at = c.t.broadcast(c.op("add", c.t.reshape(at, (1, 1)), _places(c, s, 2, 1)), (b, s))
    found = _rotated(c, x, at, c.value(2), c.value(3), bool(c.attr("interleaved", 0)))
    return _joined(c, found) if flat else found


@translates("EmbedLayerNormalization", domain=MICROSOFT)
def embed_layer_norm(c: Call) -> Any:
    ids = c.t.cast(c.value(0), "i64")
    b, s = ids.tensor.shape
    total = c.op("take", c.value(2), ids, dim=0)
    at = c.t.cast(c.value(8), "i64") if c.has(8) else c.t.reshape(c.t.iota(s), (1, s))
    total = c.t.pointwise("add", total, c.op("take", c.value(3), at, dim=0), dtype=total.tensor.dtype)
    if c.has(1) and c.has(4):
        segments = c.op("take", c.value(4), c.t.cast(c.value(1), "i64"), dim=0)
        total = c.t.pointwise("add", total, segments, dtype=total.tensor.dtype)
    found = layer_norm_of(c, total, c.value(5), c.value(6), 2, 1e-12)[0]
    counts: Any = c.t.full(0, (b,), "i32")
    if c.has(7) and c.wants(1):
        counts = c.t.reduce("sum", c.t.cast(c.op("eq", c.value(7), 1), "i32"), (1,))  # of ones: 2 is none
    return found, counts if c.wants(1) else None, total


def _root_norm(c: Call, x: Value, scale: Value, dims: Sequence[int]) -> tuple[Value, Value]:
    y = c.t.cast(x, "f32")
    middle = mean(c.t, c.op("mul", y, y), tuple(dims), True)
    factor = c.op("rsqrt", c.op("add", middle, float(c.attr("epsilon", 1e-5))))
    return c.t.cast(c.t.pointwise("mul", c.op("mul", y, factor), scale, dtype="f32"), x.tensor.dtype), factor


@translates("SimplifiedLayerNormalization")
def simplified_layer_norm(c: Call) -> Any:
    x = c.value(0)
    return _root_norm(c, x, c.value(1), range(c.axis(-1), x.tensor.rank))


@translates("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified_layer_norm(c: Call) -> Any:
    x = c.t.pointwise("add", c.value(0), c.value(1), dtype=c.dtype())
    if c.has(3):
        x = c.t.pointwise("add", x, c.value(3), dtype=c.dtype())
    done, factor = _root_norm(c, x, c.value(2), (x.tensor.rank - 1,))
    return done, None, factor if c.wants(2) else None, x
