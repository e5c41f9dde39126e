"""Translations of ATen ops that write elements into a copy, at places that the data say.

    aten.index_put(x, [i], y)  -->  put(x, y, checked(i) | dims=(0,))
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from anyshape.frontend.aten.index import is_at
from anyshape.frontend.aten.table import Decline, Mismatch, Translator, is_float, literal, translates, wide
from anyshape.ir.build import Builder
from anyshape.ir.graph import Node, Value
from anyshape.ir.op import row
from anyshape.ops.type_rules import broadcast_shapes
from anyshape.sym.expr import Size
from anyshape.torch_compat import aten

LIMITS: dict[str, tuple[int | bool, int | bool]] = {
    "i8": (-2**7, 2**7 - 1), "i16": (-2**15, 2**15 - 1), "i32": (-2**31, 2**31 - 1), "i64": (-2**63, 2**63 - 1),
    "u8": (0, 255), "bool": (False, True),
}  # fmt: skip
FEW, SHORT = 4, 256  # places that are written in a line of at most so many elements


@translates(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(t: Translator, x: Value, indices: Sequence[Value | None], values: Value,
              accumulate: bool = False) -> Value:
    dims = [d for d, own in enumerate(indices) if own is not None]
    if any(own is not None and own.tensor.dtype in ("bool", "u8") for own in indices):
        return _masked(t, x, indices, values, accumulate)
    chosen = [t.cast(indices[d], "i64") for d in dims]
    t.check_broadcast(chosen)
    order = list(range(x.tensor.rank))
    if dims != list(range(dims[0], dims[0] + len(dims))):
        # indices that are apart put their dimensions in front
        order = dims + [d for d in order if d not in dims]
        dims = list(range(len(dims)))
    turned = t.permute(_base(t, x), order)
    shape = turned.tensor.shape
    block = broadcast_shapes("index_put", [own.tensor.shape for own in chosen])
    y = t.broadcast(t.cast(values, x.tensor.dtype), shape[:dims[0]] + block + shape[dims[-1] + 1:])
    places = [_checked(t, own, shape[d], True) for own, d in zip(chosen, dims, strict=True)]
    result = t.op("put_add" if accumulate else "put", turned, y, *places, dims=tuple(dims))
    return t.permute(result, [order.index(d) for d in range(len(order))])


def _masked(t: Translator, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool) -> Value:
    """One value where a mask holds is a choice between two."""
    mask = indices[0]
    if accumulate or len(indices) != 1 or mask is None or mask.tensor.dtype != "bool" or values.tensor.count != 1:
        raise Decline("a mask picks a number of elements that depends on the data")
    rank = mask.tensor.rank
    if mask.tensor.shape != x.tensor.shape[:rank]:
        raise Mismatch(*next((a, b) for a, b in zip(mask.tensor.shape, x.tensor.shape, strict=False) if a != b))
    mask = t.reshape(mask, (*mask.tensor.shape, *(1,) * (x.tensor.rank - rank)))
    return t.where(mask, t.reshape(values, ()), x)


@translates(aten._unsafe_masked_index_put_accumulate.default)
def masked_index_put(t: Translator, x: Value, mask: Value, indices: Sequence[Value | None], values: Value) -> Value:
    if x.tensor.count == 0:
        return x
    inside: list[Value | None] = []
    for d, own in enumerate(indices):
        count = x.tensor.shape[d]
        inside.append(own if own is None else t.op("minimum", t.op("maximum", t.cast(own, "i64"), -count), count - 1))
    return index_put(t, x, inside, t.where(mask, values, 0), True)


@translates(aten.put.default)
def put(t: Translator, x: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    flat, count = t.reshape(x, (x.tensor.count,)), index.tensor.count
    at = t.reshape(index, (count,))
    y = _sized(t, t.reshape(source, (source.tensor.count,)), (count,))
    return t.reshape(index_put(t, flat, [at], y, accumulate), x.tensor.shape)


@translates(aten.index_add.default)
def index_add(t: Translator, x: Value, dim: int, index: Value, source: Value, *, alpha: Any = 1) -> Value:
    dtype = x.tensor.dtype
    y = t.cast(source, wide(dtype))
    # eager PyTorch adds half precision up in f32 and rounds at the end
    total = _rows(t, "put_add", t.cast(x, wide(dtype)), dim, index,
                  y if alpha == 1 else t.pointwise("mul", y, alpha, dtype=wide(dtype)))
    return t.cast(total, dtype)


@translates(aten.index_copy.default)
def index_copy(t: Translator, x: Value, dim: int, index: Value, source: Value) -> Value:
    return _rows(t, "put", x, dim, index, source)


def _rows(t: Translator, name: str, x: Value, dim: int, index: Value, source: Value) -> Value:
    if not x.tensor.rank:
        return t.reshape(_rows(t, name, t.reshape(x, (1,)), 0, index, t.reshape(source, (1,))), ())
    dim = dim % x.tensor.rank
    shape = x.tensor.shape
    count = index.tensor.count
    at = _checked(t, t.reshape(index, (count,)), shape[dim], False)
    y = _sized(t, source, shape[:dim] + (count,) + shape[dim + 1:])
    return t.op(name, _base(t, x), y, at, dims=(dim,))


def _sized(t: Translator, y: Value, shape: Sequence[Size]) -> Value:
    """`y` of that shape: sizes that only a guard shows to be equal are written as the wanted ones."""
    if y.tensor.count == 1 and all(n == 1 for n in shape):
        return t.reshape(y, shape)
    for d, (have, want) in enumerate(zip(y.tensor.shape, shape, strict=True)):
        if have != want:
            if want not in t.sizes.equal_to(have):  # type: ignore[arg-type]
                raise Mismatch(have, want)
            y = t.window(y, d, 0, want)
    return y


@translates(aten.scatter.value, aten.scatter.src)
def scatter(t: Translator, x: Value, dim: int, at: Value, source: Any) -> Value:
    x, at, source = _ranked(t, x, at, source)
    dim = dim % x.tensor.rank
    count = _few(t, x, dim, at, source)
    if count:
        result, size = x, x.tensor.shape[dim]
        for number in range(count):
            own = t.window(source, dim, number, 1) if isinstance(source, Value) else source
            place = _checked(t, t.window(at, dim, number, 1), size, False)
            result = t.where(is_at(t, place, dim, size), own, result)
        return result if t.out.shape else t.reshape(result, ())
    y = source if isinstance(source, Value) else t.full(source, (), x.tensor.dtype)
    result = _scattered(t, "scatter", x, dim, at, y)
    return result if t.out.shape else t.reshape(result, ())


def _few(t: Translator, x: Value, dim: int, at: Value, source: Any) -> int:
    """How many places are written in each line along `dim` where each of its elements is compared with them: one, or a
    few in a short line of one number, where the last one that is written stays. So the writing is a part of the kernel
    that reads it. 0: they are too many, or not of whole lines."""
    count, size, made = at.tensor.shape[dim], x.tensor.shape[dim], _made(t, x)
    if any(n != m for d, (n, m) in enumerate(zip(at.tensor.shape, x.tensor.shape, strict=True)) if d != dim) or (
            isinstance(source, Value) and source.tensor.shape != at.tensor.shape) or not isinstance(count, int):
        return 0
    short = isinstance(size, int) and size <= SHORT and made is not None and made.op == "full"
    return count if count <= (FEW if short else 1) else 0


@translates(aten.scatter_add.default)
def scatter_add(t: Translator, x: Value, dim: int, at: Value, source: Value) -> Value:
    x, at, source = _ranked(t, x, at, source)
    result = _scattered(t, "scatter_add", x, dim % x.tensor.rank, at, source)
    return result if t.out.shape else t.reshape(result, ())


# the rows' ending for each name of a reduction, and what combines with x to x
_REDUCTIONS = {"sum": "add", "mean": "add", "prod": "mul", "amax": "amax", "amin": "amin"}


def _neutral(how: str, dtype: str) -> bool | int | float:
    if how in ("add", "mul"):
        return literal(int(how == "mul"), dtype)
    low, high = LIMITS.get(dtype, (float("-inf"), float("inf")))
    return low if how == "amax" else high


@translates(aten.scatter_reduce.two)
def scatter_reduce(t: Translator, x: Value, dim: int, at: Value, source: Value, reduce: str, *,
                   include_self: bool = True) -> Value:
    x, at, source = _ranked(t, x, at, source)
    dim = dim % x.tensor.rank

    def write(name: str, base: Value, y: Any) -> Value:
        y = y if isinstance(y, Value) else t.full(y, (), x.tensor.dtype)
        return _scattered(t, f"scatter{name}", base, dim, at, y)

    result = _reduced(t, write, x, source, reduce, include_self)
    return result if t.out.shape else t.reshape(result, ())


@translates(aten.scatter.reduce, aten.scatter.value_reduce)
def scatter_combined(t: Translator, x: Value, dim: int, at: Value, source: Any, *, reduce: str) -> Value:
    y = source if isinstance(source, Value) else t.full(source, at.tensor.shape, x.tensor.dtype)
    return scatter_reduce(t, x, dim, at, y, {"add": "sum", "multiply": "prod"}[reduce])


@translates(aten.index_reduce.default)
def index_reduce(t: Translator, x: Value, dim: int, index: Value, source: Value, reduce: str, *,
                 include_self: bool = True) -> Value:
    def write(name: str, base: Value, y: Any) -> Value:
        y = y if isinstance(y, Value) else t.full(y, source.tensor.shape, x.tensor.dtype)
        return _rows(t, f"put{name}", base, dim, index, y)

    return _reduced(t, write, x, source, reduce, include_self)


def _reduced(t: Translator, write: Callable[[str, Value, Any], Value], x: Value, source: Value, reduce: str,
             include_self: bool) -> Value:
    """Elements combined into `x`; without those of `x` itself, the places that are written start from the neutral
    number. `write` is (ending of the row's name, base, elements or a number) -> result."""
    how, dtype = _REDUCTIONS[reduce], x.tensor.dtype
    if reduce == "mean" and (not is_float(dtype) or wide(dtype) != dtype):
        raise Decline(f"means of {dtype}")
    base = x if include_self else write("", x, _neutral(how, dtype))
    total = write(f"_{how}", base, source)
    if reduce != "mean":
        return total
    ones = t.full(1, x.tensor.shape, dtype)
    count = write("_add", ones if include_self else write("", ones, 0), 1)
    return t.op("div", total, count if include_self else t.op("maximum", count, 1.0))


def _ranked(t: Translator, x: Value, at: Value, source: Any) -> tuple[Value, Value, Any]:
    """A tensor without dims is one of a single element."""
    x, at = (t.reshape(v, v.tensor.shape or (1,)) for v in (x, at))
    return x, at, t.reshape(source, source.tensor.shape or (1,)) if isinstance(source, Value) else source


def _scattered(t: Translator, name: str, x: Value, dim: int, at: Value, source: Value) -> Value:
    """With as many elements of the source as there are indices."""
    dtype = x.tensor.dtype
    # eager PyTorch adds up and multiplies half precision in f32 and rounds at the end, as in `index_add`
    if name.endswith(("_add", "_mul")) and wide(dtype) != dtype:
        return t.cast(_scattered(t, name, t.cast(x, wide(dtype)), dim, at, t.cast(source, wide(dtype))), dtype)
    y = t.cast(source, dtype)
    shape = at.tensor.shape
    if y.tensor.rank == len(shape):
        for d, count in enumerate(shape):
            y = t.window(y, d, 0, count)
    else:
        y = t.broadcast(y, shape)
    return t.op(name, _base(t, x), y, _checked(t, at, x.tensor.shape[dim], False), dim=dim)


def _checked(t: Translator, at: Value, size: Size, wrap: bool) -> Value:
    """Indices into `size` elements; one out of range is an error before anything is written. Where they are spread
    over more dims, each is checked, and read, once."""
    made = _made(t, at)
    if made is not None and made.op == "broadcast" and isinstance(made.inputs[0], Value):
        return t.broadcast(_checked(t, made.inputs[0], size, wrap), at.tensor.shape)
    return t.op("checked", t.cast(at, "i64"), size=size, wrap=wrap)


@translates(aten.embedding_dense_backward.default)
def embedding_dense_backward(t: Translator, grad: Value, indices: Value, num_weights: Size, padding_idx: Any,
                             scale_grad_by_freq: bool) -> Value:
    if scale_grad_by_freq:
        raise Decline("a count of how often each row was looked up")
    at = t.cast(indices, "i64")
    if not isinstance(padding_idx, int) or padding_idx >= 0:
        at = t.op("where", t.op("ne", at, padding_idx), at, -1)  # that goes nowhere
    y = _sized(t, t.cast(grad, t.out.dtype), (*at.tensor.shape, t.out.shape[-1]))
    return t.op("put_add", t.full(0, t.out.shape, t.out.dtype), y, at, dims=(0,))


def _base(t: Translator, x: Value) -> Value:
    """What is written into. A constant is made anew: it then has no other reader, and is written over."""
    made = _made(t, x)
    if made is None or made.op != "full":
        return x
    return t.op("full", *made.inputs, **dict(made.attrs))


def _made(t: Translator, x: Value) -> Node | None:
    """The equation of a value."""
    return next((node for node in reversed(t.builder.nodes) if node.outputs == (x,)), None)


def overwrite_part(builder: Builder, target: Value, value: Value) -> None:
    """Where the input `target` is to receive `value`, which is the input but for a part along one dim, and nothing
    else reads it, the equation becomes one that can write this part where it lies.

        concat(x[:a], y, x[a+k:])  -->  overwrite(x, y | start=a)
    """
    made = {output: node for node in builder.nodes for output in node.outputs}
    whole = made.get(value)
    if whole is None or whole.op != "concat":
        return
    dim = whole.attr("dim")
    assert isinstance(dim, int)
    begin: Size = 0
    kept: list[Node] = []
    parts: list[tuple[Value, Size]] = []
    for part in whole.values():
        slice_ = made.get(part)
        if slice_ is not None and slice_.op == "slice" and slice_.inputs[0] is target and (
                slice_.attr("dim"), slice_.attr("start"), slice_.attr("step")) == (dim, begin, 1):
            kept.append(slice_)
        else:
            parts.append((part, begin))
        begin = begin + part.tensor.shape[dim]
    own = {target, *(node.output for node in kept)}
    used = {value}
    readers = []
    for node in reversed(builder.nodes):
        if row(node).kind != "view" or used & set(node.outputs):  # else nobody looks
            used.update(node.values())
            readers += [node] if own & set(node.values()) else []
    if len(parts) != 1 or any(node is not whole and node not in kept for node in readers):
        return
    (part, start), = parts
    builder.nodes[builder.nodes.index(whole)] = Node(
        "overwrite", (target, part), (("dim", dim), ("start", start), ("step", 1)), whole.outputs, whole.where)
