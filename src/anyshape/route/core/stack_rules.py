"""Which ATen operators keep rows apart, and their grouped forms where they read a branch's own parameters.

Every value of a branch's body is of one kind:

    rows      dim 0 counts cells, or `inner` positions of each cell in its order; rows of branch e lie side by side
    stacked   a parameter or buffer, or what is computed from those alone: dim 0 counts branches
    size      a number that depends on how many rows there are; it may only say how long dim 0 is
    plain     the same for all branches: constants

An operator of rows alone runs as it is if it is known to keep the rows of dim 0 apart. What is in no table here is
refused: nothing is taken for independent because it looks so.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.operator_schemas import get_signature_for_torch_op
from torch.nn import functional as F

from anyshape.route.core import operators as ops
from anyshape.route.core.branches import grouped_linear

ROWS, STACKED, SIZE, PLAIN = "rows", "stacked", "size", "plain"


class RowKind(NamedTuple):
    """What a value is; `inner`: positions of a cell that dim 0 of rows counts."""

    what: str
    inner: int = 1


class NotStacked(Exception):
    """A body has no grouped form; the message says why."""


# names of operators (without overloads) whose argument `dim`, `dims` or `dim0` and `dim1` says along what they work
ALONG_DIMS = frozenset("""
sum mean amax amin prod var std logsumexp softmax log_softmax _softmax _log_softmax safe_softmax _safe_softmax cumsum
cumprod glu argmax argmin max min topk sort argsort linalg_vector_norm norm all any median var_mean
select slice narrow split split_with_sizes chunk unbind unsqueeze squeeze cat concat stack flip roll index_select gather
scatter scatter_add select_scatter slice_scatter transpose swapaxes repeat_interleave
""".split())
# whose result is made element by element of one operand
ELEMENTWISE = frozenset("""
clone contiguous alias detach _to_copy to type_as dropout native_dropout alpha_dropout bernoulli zeros_like ones_like
full_like empty_like rand_like randn_like fill zero masked_fill lift_fresh_copy nan_to_num
""".split())
# whose result has the elements of the operand in their order
VIEWS = frozenset("view reshape _unsafe_view flatten unflatten view_as_real view_as_complex".split())
# whose first operand is a batch where it has this rank
BATCHED = {name + rest: rank for name, rest, rank in (
    *((name, f"{dims}d", dims + 2) for dims in (1, 2, 3) for name in (
        "max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "upsample_nearest", "reflection_pad",
        "replication_pad", "_adaptive_avg_pool")),
    *((f"max_pool{dims}d", "_with_indices", dims + 2) for dims in (2, 3)),
    ("upsample_linear", "1d", 3), ("upsample_bilinear", "2d", 4), ("upsample_bicubic", "2d", 4),
    ("upsample_trilinear", "3d", 5), ("_upsample_bilinear2d", "_aa", 4), ("_upsample_nearest_exact", "2d", 4),
    ("pixel_shuffle", "", 4), ("pixel_unshuffle", "", 4), ("channel_shuffle", "", 4), ("im2col", "", 3))}
CONVOLUTIONS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
NORMS = ("layer_norm", "group_norm", "rms_norm")
PRODUCTS = ("linear", "matmul", "mm", "addmm", "bmm")


def name_of(target: Any) -> str:
    """The name of an operator without its overload; of a function, its name."""
    packet = getattr(target, "overloadpacket", None)
    return str(packet).removeprefix("aten.") if packet is not None else getattr(target, "__name__", str(target))


def bound(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a call by their names in the operator's schema, defaults included; `self` is called `input`."""
    (signature,) = get_signature_for_torch_op(node.target)  # type: ignore[arg-type,misc]
    found = signature.bind(*node.args, **{"input" if key == "self" else key: one for key, one in node.kwargs.items()})
    found.apply_defaults()
    return dict(found.arguments)


def shape_of(value: Any) -> tuple[Any, ...]:
    """The shape that was traced; () of a number."""
    traced = value.meta.get("val") if isinstance(value, torch.fx.Node) else value
    return tuple(traced.shape) if isinstance(traced, Tensor) else ()


# ---- rows alone


def keeps_rows(node: torch.fx.Node, rows: list[torch.fx.Node], others: list[torch.fx.Node]) -> None:
    """Returns where an operator of rows (all of one `inner`), and of what is plain, keeps the rows of dim 0 apart.

    Raises:
        Refused: it may not.
    """
    name = name_of(node.target)
    if torch.Tag.pointwise in node.target.tags or name in ELEMENTWISE:  # type: ignore[union-attr]
        rank = max(len(shape_of(value)) for value in (*rows, *others))
        _aligned(node, rows, others, rank)
    elif name in ALONG_DIMS:
        _other_dims(node, name, rows)
    elif name in VIEWS:
        pass  # by the shape of the result, as of all
    elif name in BATCHED:
        if len(shape_of(rows[0])) < BATCHED[name] or len(rows) > 1:
            raise NotStacked(f"{name} of an operand of rank {len(shape_of(rows[0]))}")
    elif name in ("permute", "movedim", "expand", "expand_as", "repeat", "pad", "constant_pad_nd"):
        _leading(node, name, rows)
    elif name in PRODUCTS or name in CONVOLUTIONS or name in NORMS or name == "scaled_dot_product_attention":
        _products(node, name, rows, others)
    else:
        raise NotStacked(f"{name} may mix cells")


def _aligned(node: torch.fx.Node, rows: list[torch.fx.Node], others: list[torch.fx.Node], rank: int) -> None:
    """Dim 0 of the result is dim 0 of all operands of rows, and stretches over what is plain."""
    for value in rows:
        if len(shape_of(value)) != rank:
            raise NotStacked(f"{name_of(node.target)} aligns dim 0 of one operand with another dim of the other")
    for value in others:
        shape = shape_of(value)
        if len(shape) == rank and shape[0] != 1:
            raise NotStacked(f"{name_of(node.target)} has a constant for every cell")


def _other_dims(node: torch.fx.Node, name: str, rows: list[torch.fx.Node]) -> None:
    given = bound(node)
    dims = [given[word] for word in ("dim", "dims", "dim0", "dim1") if word in given]
    if not dims or any(found is None or found == [] for found in dims):
        raise NotStacked(f"{name} works over all dims")
    flat = [dim for found in dims for dim in (found if isinstance(found, (list, tuple)) else [found])]
    rank = len(shape_of(rows[0])) + (name in ("unsqueeze", "stack"))
    everything = name in ("slice", "slice_scatter") and not given.get("start") and given.get("step", 1) == 1 and (
        given.get("end") is None or given["end"] == 2**63 - 1)
    if any(dim % rank == 0 for dim in flat) and not everything:
        raise NotStacked(f"{name} works along dim 0, which counts cells")
    if name in ("cat", "concat", "stack", "gather", "scatter", "scatter_add", "select_scatter", "slice_scatter"):
        if len(rows) != len(node.all_input_nodes):
            raise NotStacked(f"{name} of rows and of something else")
    elif name == "index_select" and len(rows) > 1:
        raise NotStacked("index_select by an index of rows")


def _leading(node: torch.fx.Node, name: str, rows: list[torch.fx.Node]) -> None:
    given, rank = bound(node), len(shape_of(rows[0]))
    if name == "permute" and given["dims"][0] % rank != 0:
        raise NotStacked("permute moves dim 0, which counts cells")
    if name == "movedim":
        raise NotStacked("movedim may move dim 0")
    if name == "expand" and len(given["size"]) != rank:
        raise NotStacked("expand adds a dim before dim 0")
    if name == "expand_as" and len(shape_of(given["other"])) != rank:
        raise NotStacked("expand_as adds a dim before dim 0")
    if name == "repeat" and (len(given["repeats"]) != rank or given["repeats"][0] != 1):
        raise NotStacked("repeat repeats cells")
    if name in ("pad", "constant_pad_nd") and len(given["pad"]) >= 2 * rank:
        raise NotStacked(f"{name} pads dim 0, which counts cells")


def _products(node: torch.fx.Node, name: str, rows: list[torch.fx.Node], others: list[torch.fx.Node]) -> None:
    given = bound(node)
    first = next(iter(given.values()))
    ranks = [len(shape_of(value)) for value in rows]
    if name in NORMS:
        if name != "group_norm" and len(given["normalized_shape"]) >= ranks[0]:
            raise NotStacked(f"{name} normalises over dim 0, which counts cells")
    elif name in CONVOLUTIONS:
        if rows != [first] or ranks[0] != CONVOLUTIONS[name] + 2:
            raise NotStacked(f"{name} of one cell, or with weights of cells")
    elif name == "scaled_dot_product_attention":
        mask = given["attn_mask"]
        if min(ranks) < 3 or len(set(ranks)) != 1 or not all(given[word] in rows for word in ("query", "key", "value")):
            raise NotStacked("attention over cells")
        if mask in others and len(shape_of(mask)) == ranks[0] and shape_of(mask)[0] != 1:
            raise NotStacked("attention with a mask for every cell")
    elif name in ("linear", "mm", "addmm"):
        left = given["mat1"] if name == "addmm" else first
        if rows != [left] or ranks[0] < 2 or (name == "addmm" and len(shape_of(given["input"])) > 1):
            raise NotStacked(f"{name} multiplies over cells")
    elif len(rows) == 2:
        if len(set(ranks)) != 1 or ranks[0] < 3:
            raise NotStacked(f"{name} of cells with cells")
    elif rows != [first] or ranks[0] < 2 or len(shape_of(others[0])) > 2:
        raise NotStacked(f"{name} multiplies over cells")


# ---- rows and stacked parameters: what runs in their place


def aligned(parameter: Tensor, ends: Tensor, rows: Tensor, rank: int) -> Tensor:
    """The parameter [E, *s] of each row's branch, as [S, 1, ..., *s] of this rank."""
    own = parameter.shape[1:]
    if len(own) == rank:  # a leading dim of size 1, which stretches over cells
        own = own[1:]
    return ops.grouped_take(parameter.reshape(parameter.shape[0], *own), ends, rows.shape[0]).reshape(
        rows.shape[0], *(1,) * (rank - 1 - len(own)), *own)


def on_channels(parameter: Tensor, ends: Tensor, rows: Tensor) -> Tensor:
    """The parameter [E, C] of each row's branch, as [S, C, 1, ...] beside rows [S, C, ...]; [E, 1] is for all."""
    return ops.grouped_take(parameter, ends, rows.shape[0]).reshape(
        rows.shape[0], parameter.shape[1], *(1,) * (rows.dim() - 2))


def linear(rows: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear by weights [E, M, K]."""
    return grouped_linear(rows, weight.transpose(1, 2), ends, bias)


def layer_norm(rows: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float,
               ends: Tensor) -> Tensor:
    """F.layer_norm by weights and biases [E, *shape]."""
    found = F.layer_norm(rows, shape, None, None, eps)
    if weight is not None:
        found = found * aligned(weight, ends, rows, rows.dim())
    return found if bias is None else found + aligned(bias, ends, rows, rows.dim())


def rms_norm(rows: Tensor, shape: list[int], weight: Tensor, eps: float | None, ends: Tensor) -> Tensor:
    """F.rms_norm by weights [E, *shape]."""
    return F.rms_norm(rows, shape, None, eps) * aligned(weight, ends, rows, rows.dim())


def group_norm(rows: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float,
               ends: Tensor) -> Tensor:
    """F.group_norm by weights and biases [E, C]."""
    found = F.group_norm(rows, groups, None, None, eps)
    if weight is not None:
        found = found * on_channels(weight, ends, rows)
    return found if bias is None else found + on_channels(bias, ends, rows)


def batch_norm(rows: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float,
               ends: Tensor) -> Tensor:
    """F.batch_norm in evaluation, by statistics, weights and biases [E, C]: a scale and a shift of channels."""
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    if bias is not None:
        shift = shift + bias
    return rows * on_channels(scale, ends, rows) + on_channels(shift, ends, rows)


def prelu(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """F.prelu by weights [E, C] or [E, 1]."""
    return torch.where(rows > 0, rows, rows * on_channels(weight, ends, rows))


def embedding(weight: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """F.embedding of ids [S, ...] by tables [E, V, D]."""
    table = torch.arange(weight.shape[0], device=rows.device) * weight.shape[1]
    first = ops.grouped_take(table, ends, rows.shape[0]).reshape(-1, *(1,) * (rows.dim() - 1))
    return F.embedding(rows + first, weight.flatten(0, 1))


def mapped(function: Callable[..., Any], dims: tuple[Any, ...], arguments: tuple[Any, ...],
           keywords: dict[str, Any]) -> Any:
    """An operator of stacked operands alone, of each branch apart. dims: of each argument 0 where it is stacked."""
    places = [place for place, dim in enumerate(dims) if dim == 0]

    def one(*own: Tensor) -> Any:
        given = list(arguments)
        for place, value in zip(places, own, strict=True):
            given[place] = value
        return function(*given, **keywords)

    return torch.vmap(one)(*(arguments[place] for place in places))


