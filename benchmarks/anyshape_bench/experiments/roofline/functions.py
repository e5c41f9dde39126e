"""The functions of the roofline: bound by memory, in plain PyTorch, with sizes that move more than 32 MB each.

    from anyshape_bench.experiments.roofline.functions import FUNCTIONS
    compiled = anyshape.compile(FUNCTIONS["softmax"].call)

A function is compiled at small sizes and measured at others, so that no size is a constant of its program.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from anyshape_bench.models.suite import Shape

Arguments = tuple[Tensor, ...]
Moved = Callable[[Arguments, Sequence[Tensor], Sequence[Tensor]], int]
LEAST = 32 << 20  # bytes that every function moves at least, each way that is measured


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of the elements of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def all_of_it(inputs: Arguments, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> int:
    """Every input is read once, every output written once; backward, what it is given is read once too."""
    return bytes_of((*inputs, *outputs, *given))


@dataclass(frozen=True, slots=True)
class Function:
    """One line of the roofline.

    Attributes:
        name: what the user types.
        call: the function; with `backward`, of which its gradients are taken too.
        inputs: its arguments from sizes, of normal numbers; those that require a gradient are marked.
        small, large: the sizes that it is compiled at, and those that it is measured at.
        moved: bytes that a call moves at least, from (inputs, outputs, nothing).
        moved_back: the same of its backward, from (inputs, gradients of inputs, gradients of outputs).
    """

    name: str
    call: Callable[..., Any]
    inputs: Callable[..., Arguments]
    small: Shape
    large: Shape
    backward: bool = False
    moved: Moved = all_of_it
    moved_back: Moved = all_of_it


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def free(*shape: int) -> Tensor:
    """Numbers that a gradient is asked for."""
    return torch.randn(shape, requires_grad=True)


def matrix(rows: int, columns: int) -> Arguments:
    return (normal(rows, columns),)


def free_matrix(rows: int, columns: int) -> Arguments:
    return (free(rows, columns),)


def two(rows: int, columns: int) -> Arguments:
    return normal(rows, columns), normal(rows, columns)


def two_free(rows: int, columns: int) -> Arguments:
    return free(rows, columns), free(rows, columns)


def pointwise_chain(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x * 0.5 + y).relu() * y - torch.sigmoid(x)


def residual_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, functional.layer_norm(total, (total.shape[-1],), weight, bias)


def residual_rms_norm_bfloat16(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    wide = total.float()
    return total, (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).bfloat16() * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, (x.shape[-1],), weight, bias)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """float32[batch, heads, length, head] by float32[length, head], as Llama writes it."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def angles(batch: int, heads: int, length: int, head: int) -> Arguments:
    turns = torch.arange(length)[:, None] * torch.exp(torch.arange(head // 2) * (-2 * math.log(10000.0) / head))
    turns = torch.cat((turns, turns), -1)
    return normal(batch, heads, length, head), turns.cos(), turns.sin()


def classes(rows: int, vocabulary: int) -> Arguments:
    return free(rows, vocabulary), torch.randint(0, vocabulary, (rows,))


def words(rows: int, vocabulary: int, columns: int) -> Arguments:
    return torch.randint(0, vocabulary, (rows,)), free(vocabulary, columns)


def added(rows: int, places: int, columns: int) -> Arguments:
    return normal(places, columns), torch.randint(0, places, (rows,)), normal(rows, columns)


def picked(rows: int, columns: int, of: int) -> Arguments:
    return normal(rows, of), torch.randint(0, of, (rows, columns))


def rows_met(inputs: Arguments, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> int:
    """A lookup reads the rows that are asked for, each once."""
    index, table = inputs
    return index.unique().numel() * bytes_of((table[0],)) + bytes_of((index, *outputs))


def without_table(inputs: Arguments, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> int:
    """The gradient of a lookup reads no table."""
    return bytes_of((inputs[0], *outputs, *given))


def twice_the_result(inputs: Arguments, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> int:
    """What is cut out is read once and written once."""
    return 2 * bytes_of(outputs)


def masked(inputs: Arguments, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> int:
    """The backward of a dropout reads a mask of bools in place of its input."""
    return bytes_of((*outputs, *given)) + inputs[0].numel()


SMALL = (67, 96)
ROWS = (9001, 1024)
ODD = (8999, 1003)

FUNCTIONS: dict[str, Function] = {
    one.name: one
    for one in (
        Function("pointwise-chain", pointwise_chain, two, SMALL, ROWS),
        Function("pointwise-chain-odd", pointwise_chain, two, SMALL, ODD),
        Function("to-bfloat16", Tensor.bfloat16, matrix, SMALL, ROWS),
        Function("from-bfloat16", Tensor.float, lambda r, c: (normal(r, c, dtype=torch.bfloat16),), SMALL, ROWS),
        Function("residual-layer-norm", residual_layer_norm,
                 lambda r, c: (normal(r, c), normal(r, c), normal(c), normal(c)), SMALL, ROWS),
        Function("residual-rms-norm-bfloat16", residual_rms_norm_bfloat16,
                 lambda r, c: tuple(normal(*shape, dtype=torch.bfloat16) for shape in ((r, c), (r, c), (c,))),
                 SMALL, ROWS),
        Function("layer-norm", layer_norm, lambda r, c: (free(r, c), free(c), free(c)), SMALL, ROWS, backward=True),
        Function("rms-norm", rms_norm, lambda r, c: (free(r, c), free(c)), SMALL, ROWS, backward=True),
        Function("softmax", lambda x: torch.softmax(x, -1), free_matrix, SMALL, ROWS, backward=True),
        Function("softmax-odd", lambda x: torch.softmax(x, -1), matrix, SMALL, ODD),
        Function("log-softmax", lambda x: torch.log_softmax(x, -1), matrix, SMALL, ROWS),
        Function("cross-entropy", functional.cross_entropy, classes, (33, 259), (601, 32003), backward=True),
        Function("gelu", functional.gelu, free_matrix, SMALL, ROWS, backward=True),
        Function("swiglu", swiglu, two_free, SMALL, ROWS, backward=True),
        Function("rotary", rotary, angles, (3, 5, 37, 32), (7, 16, 1153, 64)),
        Function("transpose", lambda x: x.t().contiguous(), matrix, SMALL, ODD),
        Function("permute-heads", lambda x: x.permute(0, 2, 1, 3).contiguous(), lambda *shape: (normal(*shape),),
                 (3, 37, 5, 32), (7, 1153, 16, 64)),
        Function("concat-columns", lambda x, y: torch.cat((x, y), 1), two, SMALL, ODD),
        Function("concat-rows", lambda x, y: torch.cat((x, y), 0), two, SMALL, ODD),
        Function("pad", lambda x: functional.pad(x, (3, 5, 2, 1)), matrix, SMALL, ODD),
        Function("slice", lambda x: x[:, 3:-5].clone(), matrix, SMALL, ODD, moved=twice_the_result),
        Function("slice-strided", lambda x: x[:, ::2].clone(), matrix, SMALL, (8999, 2006), moved=all_of_it),
        Function("embedding", functional.embedding, words, (67, 129, 32), (16001, 8209, 512), backward=True,
                 moved=rows_met, moved_back=without_table),
        Function("gather", lambda x, index: x.gather(1, index), picked, (67, 41, 96), (8999, 1003, 512)),
        Function("index-add", lambda base, index, rows: base.index_add(0, index, rows), added, (67, 33, 96),
                 (16001, 1021, 512)),
        Function("cumsum-columns", lambda x: x.cumsum(1), matrix, SMALL, ROWS),
        Function("cumsum-rows", lambda x: x.cumsum(0), matrix, SMALL, ROWS),
        Function("sum-over-rows", lambda x: x.sum(0), matrix, SMALL, (18001, 1024)),
        Function("sum-of-rows", lambda x: x.sum(1), matrix, SMALL, (18001, 1024)),
        Function("max-over-rows", lambda x: x.amax(0), matrix, SMALL, (18001, 1024)),
        Function("max-of-rows", lambda x: x.amax(1), matrix, SMALL, (18001, 1024)),
        Function("argmax-of-rows", lambda x: x.argmax(1), matrix, SMALL, (18001, 1024)),
        Function("dropout", lambda x: functional.dropout(x, 0.1, True), free_matrix, SMALL, ROWS, backward=True,
                 moved_back=masked),
    )
}
