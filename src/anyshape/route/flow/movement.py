"""Transfer rules of data movement: the operator itself is run on the owner arrays, so that the result is exact.

Gathers and scatters by an index that is known are movements too; where the index is data, a gather joins along the dim
that it indexes, and the index's own owners are added.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from anyshape.route.flow.call import NoRule, OperatorCall, TensorValue, values_in, wide
from anyshape.route.flow.owners import NONE, uniform

# ---- movements of the first argument (a tensor, or a list of them); zeros that they fill in are of no cell
ONE = """view _unsafe_view reshape _reshape_alias view_as permute transpose t numpy_T slice select squeeze
unsqueeze expand expand_as broadcast_to flip roll rot90 cat stack split split_with_sizes chunk tensor_split unbind
clone contiguous alias detach detach_ lift_fresh_copy lift_fresh lift unfold pixel_shuffle pixel_unshuffle
channel_shuffle native_channel_shuffle im2col repeat tile diagonal diagonal_copy reflection_pad1d reflection_pad2d
reflection_pad3d replication_pad1d replication_pad2d replication_pad3d upsample_nearest1d upsample_nearest2d
upsample_nearest3d tril triu narrow movedim flatten unflatten view_copy slice_copy select_copy permute_copy
expand_copy unbind_copy split_copy unsqueeze_copy squeeze_copy transpose_copy t_copy atleast_1d atleast_2d
atleast_3d swapaxes block_diag constant_pad_nd pad repeat_interleave meshgrid diag_embed""".split()
TWO = "slice_scatter select_scatter diagonal_scatter".split()  # the second argument moves as well


def run_on_owners(call: OperatorCall) -> list[Tensor]:
    if any(isinstance(one, torch.dtype) for one in call.args):  # view(dtype) may cut numbers in pieces
        raise NoRule("another dtype's view")
    return call.rerun(1)


def run_on_both(call: OperatorCall) -> list[Tensor]:
    return call.rerun(2)


def padded(call: OperatorCall) -> list[Tensor]:
    value = call.value()
    if call.named.get("mode", "constant") != "constant":
        return call.rerun(1)
    whole = (value.owners + 1).expand(value.shape)
    return [torch.constant_pad_nd(whole, call.named["pad"], 0) - 1]


# ---- gathers


def _known(*values: TensorValue) -> bool:
    return all(one.known is not None and one.constant for one in values)


def gathered(call: OperatorCall) -> list[Tensor]:
    value, index = call.value(), call.value("index")
    if _known(index):
        return call.rerun(1)
    if value.rank == 0:
        return [call.joined(index.rank, "input", "index")]
    dim = int(call.named["dim"]) % value.rank
    taken = call.sets.reduce(value.owners, (dim,))
    taken = taken.expand(*(1 if place == dim else size for place, size in enumerate(value.shape)))
    taken = taken[tuple(slice(0, size) if place != dim else slice(None) for place, size in enumerate(index.shape))]
    return [call.sets.join(taken, index.owners)]


def index_selected(call: OperatorCall) -> list[Tensor]:
    value, index = call.value(), call.value("index")
    if _known(index):
        return call.rerun(1)
    dim = int(call.named["dim"]) % max(value.rank, 1)
    taken = call.sets.reduce(value.owners, (dim,))
    own = index.owners.reshape(-1, *(1,) * (value.rank - 1 - dim))
    return [call.sets.join(taken, wide(own, value.rank))]


def indexed(call: OperatorCall) -> list[Tensor]:
    """x[i, :, j]: with known indices a movement; else a join along the indexed dims, and the indices' owners."""
    value = call.value()
    given = list(call.named["indices"])
    used = [dim for dim, one in enumerate(given) if one is not None]
    indices = [given[dim] for dim in used]
    if _known(*indices):
        return call.rerun(1)
    if any(one.dtype in (torch.bool, torch.uint8) for one in indices):
        raise NoRule("a mask that is data")
    shape = torch.broadcast_shapes(*(one.shape for one in indices))
    taken = call.sets.reduce(value.owners, used)
    rest = [dim for dim in range(value.rank) if dim not in used]
    together = used == list(range(used[0], used[-1] + 1))
    before = [dim for dim in rest if together and dim < used[0]]
    after = [dim for dim in rest if dim not in before]
    kept = [taken.shape[dim] for dim in before], [taken.shape[dim] for dim in after]
    taken = taken.reshape(*kept[0], *(1,) * len(shape), *kept[1])
    own = call.sets.join(*(wide(one.owners, len(shape)) for one in indices))
    own = own.reshape(*own.shape, *(1,) * len(after))
    return [call.sets.join(taken, wide(own, taken.dim()))]


def embedded(call: OperatorCall) -> list[Tensor]:
    """weight [V, W] by indices [*]: [*, W]."""
    weight, indices = call.value("weight"), call.value("indices")
    taken = call.sets.reduce(weight.owners, (0,)).reshape(-1)
    return [call.sets.join(wide(taken, indices.rank + 1), indices.owners[..., None])]


# ---- writes


def scattered(call: OperatorCall) -> list[Tensor]:
    """scatter, scatter_add, scatter_reduce along a dim: a written place may hold any source along that dim."""
    value, index = call.value(), call.value("index")
    source = call.named.get("src", call.named.get("value"))
    own = [index.owners] + ([source.owners] if isinstance(source, TensorValue) else [])
    if value.rank != index.rank or value.rank == 0:
        raise NoRule("ranks differ")
    dim = int(call.named["dim"]) % value.rank
    written = call.sets.reduce(call.sets.join(*own), (dim,))
    grown = []
    for place, (small, size) in enumerate(zip(index.shape, value.shape, strict=True)):
        grown.append(0 if place == dim else size - small)
    full = [1 if place == dim else size for place, size in enumerate(index.shape)]
    whole = torch.constant_pad_nd(written.expand(full) + 1, [n for extra in reversed(grown) for n in (0, extra)], 0)
    return [call.sets.join(value.owners, whole - 1)]


def index_written(call: OperatorCall) -> list[Tensor]:
    """index_put: exact where the indices are known and replace; else every written place may hold any source."""
    value, source = call.value(), call.value("values")
    indices = [one for one in call.named["indices"] if one is not None]
    if _known(*indices) and not call.named.get("accumulate"):
        whole = (value.owners + 1).expand(value.shape).clone()
        fresh = (source.owners + 1).expand(source.shape)
        places = [None if one is None else one.known for one in call.named["indices"]]
        return [torch.ops.aten.index_put(whole, places, fresh) - 1]
    raise NoRule("a write by data")


def where(call: OperatorCall) -> list[Tensor]:
    """where(condition, a, b): with a known condition each place takes one of the two."""
    condition, rank = call.value("condition"), len(call.shapes[0])
    sides = [one.owners if isinstance(one := call.named.get(name), TensorValue) else uniform(NONE, 0)
             for name in ("input", "other")]
    sides = [wide(one, rank) for one in sides]
    if _known(condition):
        return [torch.where(wide(condition.known, rank), *torch.broadcast_tensors(*sides))]
    return [call.sets.join(wide(condition.owners, rank), *sides)]


def mask_filled(call: OperatorCall) -> list[Tensor]:
    rank, mask = len(call.shapes[0]), call.value("mask")
    value, fill = call.value(), call.named.get("value")
    fresh = wide(fill.owners, rank) if isinstance(fill, TensorValue) else uniform(NONE, rank)
    if _known(mask):
        return [torch.where(wide(mask.known, rank), fresh, wide(value.owners, rank))]
    return [call.sets.join(wide(value.owners, rank), wide(mask.owners, rank), fresh)]


def fresh_numbers(call: OperatorCall) -> list[Tensor]:
    """zeros_like and its kind: no operand's numbers are read, only those of a fill."""
    own = [one for name, one in call.named.items() if name in ("fill_value", "value") and values_in(one)]
    owner = call.sets.all_of(own[0].owners) if own else NONE
    return [uniform(owner, len(shape)) for shape in call.shapes]


RULES: dict[str, Callable[[OperatorCall], list[Tensor]]] = {
    **dict.fromkeys(ONE, run_on_owners), **dict.fromkeys(TWO, run_on_both), "constant_pad_nd": padded, "pad": padded,
    "gather": gathered, "index_select": index_selected, "index": indexed, "_unsafe_index": indexed,
    "embedding": embedded, "scatter": scattered, "scatter_add": scattered, "scatter_reduce": scattered,
    "index_put": index_written, "_unsafe_index_put": index_written, "where": where, "masked_fill": mask_filled,
    **dict.fromkeys("""zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones
    new_empty new_full new_empty_strided empty_strided fill zero""".split(), fresh_numbers)}
