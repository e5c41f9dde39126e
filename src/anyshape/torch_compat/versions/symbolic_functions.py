"""Functions of torch that ask a traced size for its number, or that are one step where several would fuse, each
written so that it does not.

    x[:, n // 2]  -->  select(x, 1, n // 2)        max_pool1d(x, n)  -->  max(x, -1, keepdim=True)

A trace in which torch's own stands serves one size only, or calls PyTorch where a kernel would do.
`symint_cache.general_tracing` puts ours in its place where an argument, or the shape of the first one, is a size
without a number. Ours gives what torch's gives; what it was not written for it hands to torch's.
"""
from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.nn import functional

from anyshape import torch_compat as compat
from anyshape.torch_compat import tree as pytree

FLOATS = (torch.float32, torch.float64)


def general_form(target: Any, arguments: Sequence[Any], keywords: dict[str, Any]) -> Callable[..., Any] | None:
    """Our function for a call of `target`, a function or the name of a method; None where torch's serves."""
    by_number, by_shape = _BY_NUMBER.get(target), _BY_SHAPE.get(target)
    if by_number is not None and any(isinstance(one, torch.SymInt)
                                     for one in pytree.tree_leaves((tuple(arguments), keywords))):
        return by_number
    first = arguments[0] if arguments else keywords.get("input")
    if by_shape is not None and any(isinstance(size, torch.SymInt) for size in getattr(first, "shape", ())):
        return by_shape
    return None


def _same(a: Any, b: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true
    return bool(statically_known_true(a == b))


# ---- indices


def _parts(tensor: Any, index: Any) -> list[Any] | None:
    """An index of a tensor by numbers, slices, None and `...`; None for any other."""
    parts = list(index) if isinstance(index, tuple) else [index]
    kinds = (torch.SymInt, int, slice, type(None), type(...))
    basic = all(isinstance(one, kinds) and not isinstance(one, bool) for one in parts)
    return parts if isinstance(tensor, Tensor) and basic else None


def item_at(tensor: Any, index: Any) -> Any:
    parts = _parts(tensor, index)
    if parts is None:
        return tensor[index]
    rest: list[Any] = []
    dim = 0
    for place, entry in enumerate(parts):
        if isinstance(entry, torch.SymInt):
            bool(entry < 0)  # a guard: where the element lies depends on it
            tensor = tensor.select(dim, entry)
            continue
        rest.append(entry)
        if entry is ...:
            dim = tensor.dim() - sum(one is not None for one in parts[place + 1:])
        elif type(entry) is not int:
            dim += entry is not None
        else:
            tensor = tensor.select(dim, entry)
            rest.pop()
    return tensor[tuple(rest)] if any(entry != slice(None) for entry in rest) else tensor


def write_at(tensor: Any, index: Any, value: Any) -> None:
    parts = _parts(tensor, index)
    view = None if parts is None else item_at(tensor, index)
    if view is None or (isinstance(value, Tensor) and value.dim() > view.dim()):
        tensor[index] = value
    elif isinstance(value, Tensor):
        view.copy_(value)
    else:
        view.fill_(value)


def _fill_diagonal_(tensor: Tensor, fill_value: Any, wrap: bool = False) -> Tensor:
    if tensor.dim() != 2 or wrap:
        return tensor.fill_diagonal_(fill_value, wrap)
    tensor.diagonal().fill_(fill_value)
    return tensor


def _tril_indices(row: Any, col: Any, offset: Any = 0, **more: Any) -> Tensor:
    if not _same(row, col) or type(offset) is not int or offset > 0:
        return torch.tril_indices(row, col, offset, **more)
    rows, columns = _triangle(torch.sym_max(row + offset, 0), more.get("device"))
    return torch.stack((rows - offset, columns)).to(more.get("dtype") or torch.int64)


def _triu_indices(row: Any, col: Any, offset: Any = 0, **more: Any) -> Tensor:
    if not _same(row, col) or type(offset) is not int or offset < 0:
        return torch.triu_indices(row, col, offset, **more)
    count = torch.sym_max(row - offset, 0)
    rows, columns = (part.flip(0) for part in _triangle(count, more.get("device")))
    return torch.stack((count - 1 - rows, row - 1 - columns)).to(more.get("dtype") or torch.int64)


def _triangle(count: Any, device: Any) -> tuple[Tensor, Tensor]:
    """Rows and columns of the lower triangle of `count` rows, row by row; roots in float64 are exact enough."""
    place = torch.arange(count * (count + 1) // 2, device=device)
    rows = ((torch.sqrt(1.0 + 8.0 * place.double()) - 1.0) / 2.0).floor().long()
    return rows, place - rows * (rows + 1) // 2


# ---- numbers


def _linspace(start: Any, end: Any, steps: Any, *, dtype: Any = None, device: Any = None, **more: Any) -> Tensor:
    kind = dtype or torch.get_default_dtype()
    if kind not in FLOATS or any(isinstance(one, (Tensor, complex)) for one in (start, end)) or more:
        return torch.linspace(start, end, steps, dtype=dtype, device=device, **more)
    place = torch.arange(steps, device=device)
    step = (end - start) / torch.sym_max(steps - 1, 1)
    first = place < torch.sym_max(steps // 2, 1)  # exact at both ends
    return torch.where(first, place.to(kind) * step + start, (place - (steps - 1)).to(kind) * step + end)


def _affine_grid(theta: Tensor, size: Any, align_corners: bool | None = None) -> Tensor:
    """theta: [n, 2, 3] or [n, 3, 4]; size: [n, c, (depth,) height, width]. torch's derivative takes numbers only."""
    batch, _, *space = size
    if theta.shape[1:] != (len(space), len(space) + 1) or not theta.is_floating_point():
        return functional.affine_grid(theta, size, align_corners)
    axes = []
    for place, count in enumerate(space):
        middle = 2.0 * torch.arange(count, device=theta.device) - (count - 1)
        axis = middle / (torch.sym_max(count - 1, 1) if align_corners else count)
        axes.append(axis.reshape([-1 if k == place else 1 for k in range(len(space))]).expand(space))
    base = torch.stack([*reversed(axes), torch.ones_like(axes[0])], -1).to(theta.dtype)
    grid = torch.matmul(base.reshape(1, -1, len(space) + 1), theta.mT)
    return grid.reshape([batch, *space, len(space)])


# ---- bags


def embedding_bag(input: Tensor, weight: Tensor, offsets: Any = None, max_norm: Any = None, norm_type: float = 2,
                   scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
                   per_sample_weights: Any = None, include_last_offset: bool = False,
                   padding_idx: Any = None) -> Tensor:
    """input: [bags, places], bags of one length each, whose rows are added up where they are read."""
    if input.dim() != 2 or offsets is not None or max_norm is not None or scale_grad_by_freq or sparse \
            or include_last_offset or padding_idx is not None or mode not in ("sum", "mean") \
            or weight.dtype not in FLOATS or (per_sample_weights is not None and mode != "sum"):
        return functional.embedding_bag(input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse,
                                        per_sample_weights, include_last_offset, padding_idx)
    rows = functional.embedding(input, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    # an empty bag is zero
    return rows.sum(1) if mode == "sum" else rows.sum(1) / torch.sym_max(input.shape[1], 1)


# ---- pools


def _is_whole(x: Tensor, kernel_size: Any, padding: Any, count: int) -> bool:
    """Is one window all of the last `count` dims, without padding?"""
    sizes = pytree.tree_leaves(kernel_size)
    sizes = sizes * count if len(sizes) == 1 else sizes
    return all(_same(one, 0) for one in pytree.tree_leaves(padding)) and all(map(_same, sizes, x.shape[-count:]))


def _average(torchs: Callable[..., Tensor], count: int) -> Callable[..., Tensor]:
    def average(input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
                count_include_pad: bool = True, divisor_override: Any = None) -> Tensor:
        if divisor_override is None and _is_whole(input, kernel_size, padding, count):
            return input.mean(tuple(range(-count, 0)), keepdim=True)
        last = () if divisor_override is None else (divisor_override,)
        return torchs(input, kernel_size, stride, padding, ceil_mode, count_include_pad, *last)

    return average


def _max_pool2d(input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
                ceil_mode: bool = False, return_indices: bool = False) -> Any:
    if return_indices or not _is_whole(input, kernel_size, padding, 2):
        torchs: Any = functional.max_pool2d
        return torchs(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    # the first of the largest elements gets the gradient, as in a pool
    return input.flatten(-2).max(-1).values[..., None, None]


def _max_pool1d(input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
                ceil_mode: bool = False, return_indices: bool = False) -> Any:
    if return_indices:
        torchs: Any = functional.max_pool1d
        return torchs(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    if _is_whole(input, kernel_size, padding, 1):
        return input.max(-1, keepdim=True).values
    given = (kernel_size, stride or kernel_size, padding, dilation)
    rows = [(row, *pytree.tree_leaves(one)) for row, one in zip((1, 1, 0, 1), given, strict=True)]
    return torch.max_pool2d(input.unsqueeze(-2), *rows, ceil_mode).squeeze(-2)


def _adaptive_max(torchs: Callable[..., Any], count: int, indices: bool = False) -> Callable[..., Any]:
    def pool(input: Tensor, output_size: Any, return_indices: bool = indices) -> Any:
        """The largest element of each window; its place among the last `count` dims, taken as one dim."""
        wanted = pytree.tree_leaves(output_size)
        if len(wanted) != count or None in wanted or not input.is_floating_point():
            return torchs(input, output_size, return_indices)
        places, inside = _windows(input.shape[-count:], wanted, input.device)
        flat = input.flatten(-count)
        # the first of the largest elements, row by row
        chosen = flat.detach()[..., places].masked_fill(~inside, -math.inf).argmax(-1)
        positions = places.expand(*chosen.shape, places.shape[-1]).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        values = flat.gather(-1, positions)
        values, positions = (one.unflatten(-1, wanted) for one in (values, positions))
        return (values, positions) if return_indices else values

    return pool


def _windows(sizes: Sequence[Any], wanted: Sequence[Any], device: Any) -> tuple[Tensor, Tensor]:
    """The windows of an adaptive pool, numbered row by row: places in the input, [windows, elements], and which of them
    are in their window; windows are given as many elements as the largest may have."""
    places = torch.zeros(1, 1, dtype=torch.int64, device=device)
    inside = torch.ones(1, 1, dtype=torch.bool, device=device)
    for size, number in zip(sizes, wanted, strict=True):
        window = torch.arange(number, device=device).unsqueeze(-1)
        begin, end = window * size // number, -((-(window + 1) * size) // number)
        place = begin + torch.arange((size + number - 1) // number + 1, device=device)
        shape = (places.shape[0] * number, places.shape[1] * place.shape[1])
        places = (places[:, None, :, None] * size + place.clamp(max=size - 1)[:, None, :]).reshape(shape)
        inside = (inside[:, None, :, None] & (place < end)[:, None, :]).reshape(shape)
    return places, inside


def _adaptive_avg_pool1d(input: Tensor, output_size: Any) -> Tensor:
    return functional.adaptive_avg_pool2d(input.unsqueeze(-2), (1, *pytree.tree_leaves(output_size))).squeeze(-2)


# what a size among the arguments makes special, and what the shape of the first argument does
_BY_NUMBER: dict[Any, Callable[..., Any]] = {
    operator.getitem: item_at,
    operator.setitem: write_at,
    torch.tril_indices: _tril_indices,
    torch.triu_indices: _triu_indices,
    torch.linspace: _linspace,
    functional.affine_grid: _affine_grid,
    torch.avg_pool1d: _average(torch.avg_pool1d, 1),
    functional.avg_pool2d: _average(functional.avg_pool2d, 2),
    torch.adaptive_avg_pool1d: _adaptive_avg_pool1d,
    **{getattr(functional, f"adaptive_max_pool{count}d{more}"): _adaptive_max(
        getattr(functional, f"adaptive_max_pool{count}d"), count, bool(more))
       for count in (1, 2, 3) for more in ("", "_with_indices")},
    torch.max_pool2d: _max_pool2d,
    functional.max_pool2d: _max_pool2d,
}
_BY_SHAPE: dict[Any, Callable[..., Any]] = {
    torch.max_pool1d: _max_pool1d,
    functional.max_pool1d: _max_pool1d,
    functional.embedding_bag: embedding_bag,
    "fill_diagonal_": _fill_diagonal_,
}


def traced_values(shape_env: Any) -> Mapping[Any, Any]:
    """The numbers that symbols of a trace have in it. (The old name warns, also where there are none.)"""
    found: Mapping[Any, Any] | None = getattr(shape_env, "backed_var_to_val", None)
    return getattr(shape_env, "var_to_val", {}) if found is None else found


HINT = "torch._functorch.partitioners.optimization_hint"  # by which torch's partitioner tells how large a value is


def _likely(env: Any, name: Any, value: int) -> int:
    """`value`, as far as the range of a symbol allows."""
    limits = env.var_to_range.get(name)
    return value if limits is None else int(max(limits.lower, min(value, limits.upper)))


def likely_number(size: Any, value: int) -> int:
    """A traced size where its symbols have `value`, as far as their ranges allow: the same in every process that traces
    the program, whatever sizes its call has. `value` itself, if that gives no number."""
    node = size.node
    found = node.expr.xreplace({name: sympy.Integer(_likely(node.shape_env, name, value))
                                for name in node.expr.free_symbols})
    return int(found) if found.is_Integer else value


@contextlib.contextmanager
def likely_values(tensors: Iterable[Any], value: int) -> Iterator[None]:
    """Inside, the symbols of the trace that made these tensors have `value` in it, as far as their ranges allow, in
    place of the numbers of the call that is traced: for decisions that are to be the same in every process. No
    condition may be asked inside."""
    env = next((size.node.shape_env for one in tensors if isinstance(one, Tensor) for size in one.shape
                if isinstance(size, torch.SymInt)), None)
    found = None if env is None else traced_values(env)
    if env is None or not isinstance(found, dict):
        yield
        return
    hint, before = compat.get(HINT), dict(found)
    space = compat.need("torch._functorch.partitioners.min_cut_rematerialization_partition").__globals__

    def likely(size: Any, fallback: int | None = None) -> int:
        """A size knows the number that it had when it was made."""
        if isinstance(size, torch.SymInt):
            return int(size.node.shape_env.optimization_hint(size.node.expr, fallback=fallback))
        return int(size)

    for name in before:
        chosen = _likely(env, name, value)  # sympy's 0 and 1 have classes of their own, which take no number
        found[name] = chosen if isinstance(before[name], int) else sympy.Integer(chosen)
    with compat.compile_lock():
        if hint is not None:
            space["optimization_hint"] = likely
        try:
            yield
        finally:
            found.update(before)
            if hint is not None:
                space["optimization_hint"] = hint
