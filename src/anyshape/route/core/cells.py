"""Cells, the units of routing: tokens, patches, pixels or samples of a tensor as rows of a batch, and back.

    x (batch, time, width), dims=(0, 1)              -->  (batch * time, width): a cell is a token
    x (batch, channels, h, w), dims=(0,)             -->  (batch, channels, h, w): a cell is a sample
    x (batch, channels, h, w), dims=(0, 2, 3), shape=(1, channels, 8, 8)
                                                     -->  (batch * h/8 * w/8, 1, channels, 8, 8): a patch

The definition is that of Brainstorm (OSDI'23, section 3): `dims` are the dims along which values are routed, `shape`
is the size of one cell in the tensor.
"""
from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from anyshape.base.errors import InputError


def annotate_cell(tensor: Tensor, dims: Sequence[int] = (0,), shape: Sequence[int] | None = None) -> Tensor:
    """The cells of a tensor as rows: [cells, *cell].

    Args:
        tensor: any tensor of rank 1 or more.
        dims: the dims that tell cells apart, in the order in which cells are counted.
        shape: the size of one cell along every dim of the tensor, and `cell`; dims that are not routed have their whole
            size. Left out, a cell is one position along `dims`, and `cell` the size of the other dims.

    Returns:
        A view where `dims` lead and the tensor is contiguous, else a copy.

    Raises:
        InputError: dims that are not there or named twice, a size that a block does not divide.
    """
    named = _named(tensor, dims)
    if shape is None:
        rest = [dim for dim in range(tensor.dim()) if dim not in named]
        return tensor.permute(*named, *rest).reshape(-1, *(tensor.shape[dim] for dim in rest))
    counts, blocks = _blocks(tensor, named, shape)
    split = [number for pair in zip(counts, blocks, strict=True) for number in pair]
    order = [*(2 * dim for dim in named), *(2 * dim for dim in range(tensor.dim()) if dim not in named),
             *range(1, 2 * tensor.dim(), 2)]
    return tensor.reshape(split).permute(order).reshape(-1, *blocks)


def restore(cells: Tensor, like: Tensor, dims: Sequence[int] = (0,), shape: Sequence[int] | None = None) -> Tensor:
    """The tensor whose cells are `cells`: the inverse of `annotate_cell(like, dims, shape)`.

    Args:
        cells: [cells, *cell], of the rank that annotate_cell gave; the sizes within a cell may be others than before (a
            branch that changes the width, or enlarges a patch).
        like: a tensor of the size that `annotate_cell` was given; its values are not read.

    Raises:
        InputError: another number of cells, or cells of another rank.
    """
    named, rank = _named(like, dims), like.dim()
    rest = [dim for dim in range(rank) if dim not in named]
    inner = len(rest) if shape is None else rank
    if cells.dim() != inner + 1:
        raise InputError(f"cells of shape {tuple(cells.shape)} do not restore a tensor of shape {tuple(like.shape)}",
                         why=f"a cell of dims {tuple(dims)} has rank {inner}",
                         do="give restore the dims and the shape that annotate_cell was given")
    if shape is None:
        found = cells.reshape(*(like.shape[dim] for dim in named), *cells.shape[1:])
        order = [*named, *rest]
        return found.permute([order.index(dim) for dim in range(rank)])
    counts, _ = _blocks(like, named, shape)
    order = [*named, *rest]
    found = cells.reshape(*(counts[dim] for dim in order), *cells.shape[1:])
    found = found.permute([place for dim in range(rank) for place in (order.index(dim), rank + dim)])
    return found.reshape([count * size for count, size in zip(counts, cells.shape[1:], strict=True)])


def _named(tensor: Tensor, dims: Sequence[int]) -> tuple[int, ...]:
    rank = tensor.dim()
    named = tuple(dim + rank if dim < 0 else dim for dim in dims)
    if not named or len(set(named)) != len(named) or not all(0 <= dim < rank for dim in named):
        raise InputError(f"dims {tuple(dims)} do not name cells of a tensor of shape {tuple(tensor.shape)}",
                         why="each dim must be there, and be named once", do="give at least one dim")
    return named


def _blocks(tensor: Tensor, named: tuple[int, ...], shape: Sequence[int]) -> tuple[list[int], list[int]]:
    """Per dim, how many blocks there are and the size of one."""
    if len(shape) != tensor.dim():
        raise InputError(f"a cell of shape {tuple(shape)} does not fit a tensor of shape {tuple(tensor.shape)}",
                         why="a cell has a size along every dim", do="give 1 for dims of which a cell has one position")
    counts = []
    for dim, (size, block) in enumerate(zip(tensor.shape, shape, strict=True)):
        if dim not in named and block != size:
            raise InputError(f"a cell of shape {tuple(shape)} cuts dim {dim} of size {size}",
                             why="that dim is not routed", do=f"name it in dims, or give {size}")
        if block < 1 or size % block != 0:
            raise InputError(f"blocks of {block} do not fill dim {dim} of size {size}", why="a cell is a whole block",
                             do="pad the tensor, or give a divisor")
        counts.append(size // block)
    return counts, list(shape)
