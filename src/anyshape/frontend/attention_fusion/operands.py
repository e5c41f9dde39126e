"""How the operands of written-out attention lie: as (leading dims, rows, head size), whatever the program's order.

    einsum("bqhd,bkhd->bhqk", q, k)   -->   q by (0, 2, 1, 3), k by (0, 2, 1, 3): both (b, h, length, d)
    matmul(q, k.transpose(-2, -1))    -->   q as it is, the second operand with its last two dims exchanged

`Laid` is a tensor while the new calls are written: its node, its sizes and strides in normal form. No call of torch is
needed to know them, so no size is asked for its value.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from anyshape.frontend.attention_fusion.patterns import PatternStep, traced
from anyshape.frontend.symbols.symint import SymIntImporter
from anyshape.sym.expr import Size, dense_strides, product


class MatchFailure(Exception):
    """Attention that stays as it was written; the reason in words."""


class NoAttention(Exception):
    """Something else."""


@dataclass(frozen=True, slots=True)
class Arranged:
    """A node whose dims, in this order (None: a new one of size 1), are leading dims, rows, head size."""

    node: Node
    order: tuple[int | None, ...]


@dataclass(slots=True)
class ScoreStep:
    """A step from the product to the softmax: kind is times, factor, add, fill or split.

    number: what scores are multiplied with (times, add: the addend too), or what a fill puts. node: the addend, the
    mask, or the factor. where_false: the mask's false places are filled; for a factor: it divides. sizes: of a split.
    """

    kind: str
    number: float = 1.0
    node: Any = None
    where_false: bool = False
    sizes: tuple[Any, ...] = ()


@dataclass(slots=True)
class AttentionMatch:
    """What was found: nodes from the first product to the second, in order, and how they are made of q, k and v."""

    nodes: list[Node]
    query: Arranged
    key: Arranged
    changes: list[ScoreStep] = field(default_factory=list)
    value: Arranged | None = None
    order: tuple[int, ...] = ()  # of the result's dims among (leading dims, queries, head size)
    merged: bool = False  # leading dims that a split took apart were put together again
    # decided by `legality.check`; `rewrite.py` says what they are
    poisoned: bool = False  # rows without keys are to be NaN
    rows: bool = False  # and the gradients of their scores 0
    stopped: bool = False  # rows that are filled everywhere: no gradient through scores

    @property
    def split(self) -> ScoreStep | None:
        return next((change for change in self.changes if change.kind == "split"), None)


def contraction(step: PatternStep) -> tuple[Arranged, Arranged]:
    """Queries and keys of the first product.

    Raises:
        NoAttention: it is a product with a matrix, or of another kind.
    """
    if step.kind == "einsum":
        a, b, letters_a, letters_b, out = _letters(step)
        if out[-1] in letters_a:
            a, b, letters_a, letters_b = b, a, letters_b, letters_a
        inner = [letter for letter in letters_a if letter in letters_b and letter not in out]
        rows, columns = out[-2:]
        if len(inner) != 1 or columns in letters_a or rows in letters_b or rows not in letters_a:
            raise NoAttention
        return (_by_letters(a, letters_a, [*out[:-2], rows, *inner]),
                _by_letters(b, letters_b, [*out[:-2], columns, *inner]))
    a, b, rank = _of_one_rank(step)
    return Arranged(a, tuple(range(rank))), Arranged(b, (*range(rank - 2), rank - 1, rank - 2))


def application(step: PatternStep, probabilities: Node) -> tuple[Arranged, tuple[int, ...]]:
    """The values of the second product, and its result's dims among (leading dims, rows, head size).

    Raises:
        Refused: the product is not one of probabilities with values.
    """
    if step.kind == "einsum":
        a, b, letters, others, out = _letters(step)
        if b is probabilities:
            a, b, letters, others = b, a, others, letters
        lead, (rows, columns) = letters[:-2], letters[-2:]
        size = [letter for letter in others if letter not in letters]
        if a is not probabilities or b is a or len(size) != 1 or columns in out or rows in others \
                or sorted(out) != sorted([*lead, rows, *size]):
            raise MatchFailure("its probabilities are multiplied in another way than with values")
        return _by_letters(b, others, [*lead, columns, *size]), tuple([*lead, rows, *size].index(one) for one in out)
    try:
        a, b, rank = _of_one_rank(step)
    except NoAttention:
        raise MatchFailure("probabilities and values have different numbers of dims") from None
    if a is not probabilities or b is probabilities:
        raise MatchFailure("its probabilities are multiplied in another way than with values")
    return Arranged(b, tuple(range(rank))), tuple(range(rank))


def _of_one_rank(step: PatternStep) -> tuple[Node, Node, int]:
    a, b = step.operands[:2]
    one, other = traced(a), traced(b)
    if one is None or other is None or one.dim() != other.dim() or one.dim() < 2:
        raise NoAttention
    return a, b, one.dim()


def _letters(step: PatternStep) -> tuple[Node, Node, list[str], list[str], list[str]]:
    """Operands of an einsum of two, and the letters of both and of the result; "..." as letters of its own."""
    equation = step.operands[0]
    tensors = [traced(one) for one in step.operands[1:]]
    if not isinstance(equation, str) or "->" not in equation or len(tensors) != 2 or None in tensors:
        raise NoAttention
    given, out = equation.replace(" ", "").split("->")
    parts = given.split(",")
    ranks = [tensor.dim() - len(part.replace("...", "")) for tensor, part in zip(tensors, parts, strict=True)
             if tensor is not None and "..." in part]
    rest = "".join(chr(0x3b1 + place) for place in range(max(ranks, default=0)))
    if len(set(ranks)) > 1 or (ranks and "..." not in out):
        raise NoAttention
    words = [list(part.replace("...", rest)) for part in (*parts, out)]
    if any(len(set(word)) != len(word) or len(word) < 2 for word in words):
        raise NoAttention
    return step.operands[1], step.operands[2], words[0], words[1], words[2]


def _by_letters(node: Node, have: list[str], wanted: list[str]) -> Arranged:
    if not set(have) <= set(wanted):
        raise NoAttention
    return Arranged(node, tuple(have.index(one) if one in have else None for one in wanted))


@dataclass(frozen=True, slots=True)
class Laid:
    """A tensor in the graph that is written: its node, sizes and strides."""

    node: Node
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]


class Writer:
    """Appends calls to a graph, at its place of insertion."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.sizes = SymIntImporter()

    def given(self, node: Node) -> Laid:
        """A node of the program."""
        tensor = traced(node)
        assert tensor is not None
        return Laid(node, self.sizes.shape(tensor.shape), self.sizes.strides(tensor.stride()))

    def arranged(self, operand: Arranged) -> Laid:
        """The operand as (leading dims, rows, head size)."""
        x = self.given(operand.node)
        x = self.permuted(x, [dim for dim in operand.order if dim is not None])
        for place, dim in enumerate(operand.order):
            if dim is None:
                x = self.wider(x, place)
        return x

    def method(self, name: str, *arguments: Any) -> Node:
        """A call of a method."""
        return self.graph.call_method(name, arguments)

    def fresh(self, node: Node, shape: Sequence[Size]) -> Laid:
        """The result of a call that is dense."""
        return Laid(node, tuple(shape), dense_strides(tuple(shape)))

    def permuted(self, x: Laid, dims: Sequence[int]) -> Laid:
        """The dims in this order."""
        if list(dims) == list(range(len(x.shape))):
            return x
        return Laid(self.method("permute", x.node, *dims), tuple(x.shape[d] for d in dims),
                    tuple(x.strides[d] for d in dims))

    def wider(self, x: Laid, place: int) -> Laid:
        """With a new dim of size 1 at `place`."""
        return Laid(self.method("unsqueeze", x.node, place), (*x.shape[:place], 1, *x.shape[place:]),
                    (*x.strides[:place], 0, *x.strides[place:]))

    def converted(self, x: Laid, dtype: torch.dtype, before: torch.dtype) -> Laid:
        """In this dtype."""
        return x if dtype == before else self.fresh(self.method("to", x.node, dtype), x.shape)

    def size(self, x: Laid, dim: int) -> Any:
        """A size as an argument of a call."""
        size = x.shape[dim]
        return size if isinstance(size, int) else self.method("size", x.node, dim)

    def stretched(self, x: Laid, like: Sequence[Laid | None]) -> Laid:
        """Each dim as large as that of `like` at its place (None: as it is); the trace says that it may be."""
        wanted = [x.shape[dim] if one is None else one.shape[dim] for dim, one in enumerate(like)]
        if tuple(wanted) == x.shape:
            return x
        sizes = [-1 if one is None or wanted[dim] == x.shape[dim] else self.size(one, dim)
                 for dim, one in enumerate(like)]
        strides = tuple(0 if n != m else stride for n, m, stride in zip(x.shape, wanted, x.strides, strict=True))
        return Laid(self.method("expand", x.node, *sizes), tuple(wanted), strides)

    def taken_apart(self, x: Laid, sizes: tuple[Any, ...], shape: tuple[Size, ...]) -> Laid:
        """The first dim as two, of these sizes."""
        if x.shape[0] == 1:
            return self.wider(x, 0)
        if product(shape) != x.shape[0]:
            raise MatchFailure("a mask does not have the first dim of its scores")
        return Laid(self.method("unflatten", x.node, 0, sizes), (*shape, *x.shape[1:]),
                    (shape[1] * x.strides[0], *x.strides))

    def folded(self, x: Laid, at: int, lead: tuple[Size, ...]) -> Laid | None:
        """Leading dims before and from `at` as one each, without a copy; None where that is no view. `lead`: the sizes
        that all operands are stretched to; dims of size 1 may stay."""
        rank = len(x.shape) - 2
        groups = (range(at), range(at, rank))
        whole = []
        for group in groups:
            ones = all(x.shape[dim] == 1 for dim in group)
            if len(group) > 1 and not ones and (
                    any(x.shape[dim] != lead[dim] for dim in group)
                    or any(x.strides[dim] != x.strides[dim + 1] * x.shape[dim + 1] for dim in group[:-1])):
                return None
            whole.append((1, 0) if ones else (product(x.shape[dim] for dim in group), x.strides[group[-1]]))
        node = x.node
        for group in reversed(groups):
            if len(group) > 1:
                node = self.method("flatten", node, group[0], group[-1])
        return Laid(node, (whole[0][0], whole[1][0], *x.shape[rank:]), (whole[0][1], whole[1][1], *x.strides[rank:]))

    def unit(self, x: Laid) -> Laid:
        """Its last dim lies densely, as the operator takes for granted."""
        return x if x.strides[-1] == 1 else self.fresh(self.method("contiguous", x.node), x.shape)
