"""The rewrite of attention fusion: writes the fused operator in place of attention that was found (`attention.py`).

    y = flash_attention(q, k, v, attn_mask=bias, scale=0.125)

The operator is the one that `scaled_dot_product_attention` calls on a CPU, called by its name: torch's choice among
several asks for sizes. Its mask is a sum: what the program adds or fills, done to zeros in the program's order, no
larger than the masks together. Where every key of a row may be masked, these keep the program's results and gradients:

- *poisoned*: `bias + 0 * sum(softmax(bias))`, NaN in rows of nothing but -inf;
- *rows*: such rows get `NaN * mean(v)` in place of the operator's 0, so that no gradient comes to queries and keys;
- *stopped*: queries of rows that are filled everywhere become 0, which stops their gradient; scores stay as filled.
"""
from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from anyshape.frontend.attention_fusion.operands import AttentionMatch, Laid, MatchFailure, ScoreStep, Writer
from anyshape.frontend.attention_fusion.patterns import traced
from anyshape.sym.expr import Size, dense_strides, symbols_of
from anyshape.torch_compat import aten
from anyshape.torch_compat.versions import api

OPERATOR = aten._scaled_dot_product_flash_attention_for_cpu.default


def replace(graph: Graph, found: AttentionMatch) -> None:
    """Puts the operator in the place of the second product, and removes what nothing reads any more.

    Raises:
        Refused: sizes or layouts that the operator does not take; the graph computes what it did.
    """
    last = found.nodes[-1]
    before = set(graph.nodes)
    try:
        with graph.inserting_before(last):
            result = _Replacement(graph, found).run()
    except Exception:
        for node in reversed([node for node in graph.nodes if node not in before]):
            graph.erase_node(node)
        raise
    for node in graph.nodes:
        if node not in before:
            node.meta = {key: value for key, value in last.meta.items() if key != "example_value"}
    result.meta["example_value"] = last.meta["example_value"]
    last.replace_all_uses_with(result)
    for node in reversed([node for node in graph.nodes if node not in before]):
        if not node.users:  # sizes that were not needed
            graph.erase_node(node)
    for node in reversed(found.nodes):
        for reader in [user for user in node.users if not user.users and user.op != "output"]:
            graph.erase_node(reader)
        graph.erase_node(node)


def said(found: AttentionMatch) -> str:
    """What was replaced, for `explain`."""
    kinds = [change.kind for change in found.changes]
    parts = [f"{kinds.count(kind)} {word if kinds.count(kind) == 1 else words}" for kind, word, words in (
        ("fill", "mask that fills", "masks that fill"), ("add", "mask that is added", "masks that are added"))
        if kind in kinds]
    text = f"one call, with {' and '.join(parts)}" if parts else "one call, without a mask"
    kept = [word for on, word in ((found.poisoned, "NaN"), (found.stopped, "gradients of 0")) if on]
    return text + (f"; rows without a key keep their {' and '.join(kept)}" if kept else "")


class _Replacement(Writer):
    """One attention that is written anew."""

    def __init__(self, graph: Graph, found: AttentionMatch) -> None:
        super().__init__(graph)
        self.found = found
        self.dtype: torch.dtype = found.nodes[0].meta["example_value"].dtype
        self.wide = torch.float64 if self.dtype == torch.float64 else torch.float32

    def run(self) -> Node:
        found = self.found
        assert found.value is not None
        q, k, v = (self.operand(one) for one in (found.query, found.key, found.value))
        scale = 1.0
        for change in found.changes:
            if change.kind == "times":
                scale *= change.number
            elif change.kind == "factor":
                q = self.scaled(q, change)
        together = [None, None]
        split = found.split
        shape: tuple[Size, ...] = ()
        if split is not None:
            tensor = traced(self.after_split())
            assert tensor is not None
            shape = self.sizes.shape(tensor.shape[:2])
            q, k = (self.taken_apart(one, split.sizes, shape) for one in (q, k))
            v = self.taken_apart(v, split.sizes, shape) if found.merged else v
        q, k, v = (self.stretched(one, [*self.largest((q, k, v)), *together]) for one in (q, k, v))
        self.check(q, k, v)
        bias = self.bias(q, k, shape)
        dead = self.dead(shape, len(q.shape)) if found.stopped else None
        if dead is not None:
            q = self.fresh(self.method("masked_fill", q.node, dead.node, 0.0), q.shape)
        lead = q
        q, k, v, bias = self.four(q, k, v, bias)
        if bias is not None:
            bias = self.stretched(bias, [None if size == 1 else like for size, like in zip(
                bias.shape, (q, q, q, self.turned(k)), strict=True)])
        q, k, v = self.unit(q), self.unit(k), self.unit(v)
        factor = self.rows(bias) if found.poisoned else None
        if factor is not None and not found.rows:
            assert bias is not None
            bias = self.fresh(self.method("add", bias.node, factor), bias.shape)
        call = self.graph.call_function(OPERATOR, (q.node, k.node, v.node), {
            "attn_mask": None if bias is None else bias.node, "scale": scale})
        y = self.graph.call_function(operator.getitem, (call, 0))
        if factor is not None and found.rows:
            nothing = self.method("to", self.method("mul", factor, self.method("mean", v.node, -2, True)), self.dtype)
            y = self.graph.call_function(torch.where, (self.method("isnan", factor), nothing, y))
        return self.laid_out(self.unfolded(y, lead), (*lead.shape[:-1], v.shape[-1]))

    # ---- operands

    def operand(self, one: Any) -> Laid:
        tensor = traced(one.node)
        assert tensor is not None
        return self.arranged_in(one, tensor.dtype)

    def arranged_in(self, one: Any, dtype: torch.dtype) -> Laid:
        return self.converted(self.arranged(one), self.dtype, dtype)

    def after_split(self) -> Node:
        """The node that took the first dim of the scores apart."""
        return next(node for node in self.found.nodes if (t := traced(node)) is not None and t.dim() == 4)

    def turned(self, x: Laid) -> Laid:
        """With the last two dims exchanged, as far as sizes go."""
        return Laid(self.method("transpose", x.node, -2, -1), (*x.shape[:-2], x.shape[-1], x.shape[-2]),
                    (*x.strides[:-2], x.strides[-1], x.strides[-2]))

    def scaled(self, q: Laid, change: ScoreStep) -> Laid:
        """Queries times a factor that is the same for all keys."""
        if change.where_false:
            function: Any = operator.truediv
        else:
            function = operator.mul
        tensor = traced(change.node)
        if tensor is not None:
            factor = self.given(change.node)
            rank = len(factor.shape)
            if rank > len(q.shape) or (rank and factor.shape[-1] != 1) or any(
                    size not in (1, q.shape[dim - rank]) for dim, size in enumerate(factor.shape)):
                raise MatchFailure("scores are multiplied with a tensor that has a number for every key")
            if rank and torch.promote_types(tensor.dtype, self.dtype) != self.dtype:
                raise MatchFailure("scores are multiplied with a tensor of another dtype")
        elif not isinstance(change.node, Node):
            raise MatchFailure("scores are multiplied with what is no number")
        return self.fresh(self.graph.call_function(function, (q.node, change.node)), q.shape)

    def largest(self, all_of: Sequence[Laid]) -> list[Laid]:
        """For each leading dim, an operand that is not of size 1 there."""
        return [next((one for one in all_of if one.shape[dim] != 1), all_of[0])
                for dim in range(len(all_of[0].shape) - 2)]

    def check(self, q: Laid, k: Laid, v: Laid) -> None:
        sizes = [size for one in (q, k, v) for size in one.shape]
        if any(api.is_unbacked(name) for size in sizes for name in symbols_of(size)):
            raise MatchFailure("its sizes are found in the data")
        if len({len(one.shape) for one in (q, k, v)}) != 1:
            raise MatchFailure("queries, keys and values have different numbers of dims")
        if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
            raise MatchFailure(f"head sizes are {q.shape[-1]} and {v.shape[-1]}, and the operator needs one")
        if k.shape[-2] != v.shape[-2]:
            raise MatchFailure(f"keys and values have lengths {k.shape[-2]} and {v.shape[-2]}")
        if q.shape[-2] == 1:
            raise MatchFailure("there is one query: its scores are as short as its keys")

    def four(self, q: Laid, k: Laid, v: Laid, bias: Laid | None) -> tuple[Laid, Laid, Laid, Laid | None]:
        """The operands with two leading dims."""
        rank = len(q.shape) - 2
        if rank < 2:
            for _ in range(2 - rank):
                q, k, v = (self.wider(one, rank) for one in (q, k, v))
                bias = None if bias is None else self.wider(bias, rank)
            return q, k, v, bias
        lead = q.shape[:rank]
        for at in range(1, rank):
            folded = [self.folded(one, at, lead) for one in (q, k, v)]
            mask = None if bias is None else self.folded(bias, at, lead)
            if None not in folded and (bias is None or mask is not None):
                a, b, c = folded
                assert a is not None and b is not None and c is not None
                return a, b, c, mask
        raise MatchFailure("its leading dims do not fold into two without a copy")

    # ---- masks

    def term(self, change: ScoreStep, shape: tuple[Size, ...], rank: int, node: Node | None = None) -> Laid:
        """A mask, with as many dims as the scores have in the end."""
        x = self.given(change.node)
        if node is not None:
            x = self.fresh(node, x.shape)
        later = self.found.split is not None and self.found.changes.index(change) < self.found.changes.index(
            self.found.split)
        now = rank - 1 if later else rank
        if len(x.shape) > now:
            raise MatchFailure("a mask has more dims than its scores")
        while len(x.shape) < now:
            x = self.wider(x, 0)
        split = self.found.split
        return self.taken_apart(x, split.sizes, shape) if later and split is not None else x

    def filled_places(self, change: ScoreStep) -> Node:
        """The mask, true where scores are filled."""
        return self.method("logical_not", change.node) if change.where_false else change.node

    def dead(self, shape: tuple[Size, ...], rank: int) -> Laid:
        """Rows that are filled at every key."""
        masks = [self.term(change, shape, rank, self.filled_places(change)) for change in self.found.changes
                 if change.kind == "fill"]
        union = functools.reduce(self.either, masks)
        return self.fresh(self.method("all", union.node, -1, True), (*union.shape[:-1], 1))

    def either(self, a: Laid, b: Laid) -> Laid:
        return self.fresh(self.method("logical_or", a.node, b.node), self.joint(a, b))

    def joint(self, a: Laid, b: Laid) -> tuple[Size, ...]:
        return tuple(m if n == 1 else n for n, m in zip(a.shape, b.shape, strict=True))

    def bias(self, q: Laid, k: Laid, shape: tuple[Size, ...]) -> Laid | None:
        """All that the program does to scores but multiply queries with keys, done to zeros."""
        bias: Laid | None = None
        rank = len(q.shape)
        for change in self.found.changes:
            if change.kind == "times" and bias is not None and change.number != 1:
                bias = self.fresh(self.method("mul", bias.node, change.number), bias.shape)
            elif change.kind == "add":
                bias = self.added(bias, change, shape, rank)
            elif change.kind == "fill":
                mask = self.term(change, shape, rank, self.filled_places(change))
                if bias is None:
                    zeros = self.graph.call_function(torch.zeros_like, (mask.node,), {"dtype": self.wide})
                    bias = self.fresh(self.method("masked_fill", zeros, mask.node, change.number), mask.shape)
                else:
                    number = self.graph.call_function(torch.where, (mask.node, change.number, bias.node))
                    bias = self.fresh(number, self.joint(mask, bias))
        if bias is not None:
            whole = (*q.shape[:-1], k.shape[-2])
            if any(size == 1 and have != 1 for size, have in zip(whole, bias.shape, strict=True)):
                raise MatchFailure("a mask makes its scores larger")
        return bias

    def added(self, bias: Laid | None, change: ScoreStep, shape: tuple[Size, ...], rank: int) -> Laid:
        term = self.term(change, shape, rank)
        tensor = traced(change.node)
        assert tensor is not None
        if tensor.dtype not in (self.dtype, self.wide):
            term = self.fresh(self.method("to", term.node, self.wide), term.shape)
        if change.number != 1:
            term = self.fresh(self.method("mul", term.node, change.number), term.shape)
        return term if bias is None else self.fresh(self.method("add", bias.node, term.node), self.joint(bias, term))

    def rows(self, bias: Laid | None) -> Node:
        """0 for every row of the mask, NaN where all its keys are masked with -inf."""
        assert bias is not None
        weights = self.method("softmax", bias.node, -1)
        return self.method("mul", self.method("sum", weights, -1, True), 0.0)

    # ---- the result

    def unfolded(self, y: Node, lead: Laid) -> Node:
        """The operator's result with the leading dims of the program."""
        rank = len(lead.shape) - 2
        if rank == 2:
            return y
        if rank < 2:
            for _ in range(2 - rank):
                y = self.method("squeeze", y, rank)
            return y
        return self.method("reshape", y, *(self.size(lead, dim) for dim in range(rank + 1)), -1)

    def laid_out(self, y: Node, shape: tuple[Size, ...]) -> Node:
        """The result with dims and strides as the second product's."""
        wanted = self.given(self.found.nodes[-1])
        if self.found.merged:
            y = self.method("flatten", self.method("contiguous", y), 0, 1)
            shape = (shape[0] * shape[1], *shape[2:])
        order = self.found.order
        back = [order.index(dim) for dim in range(len(order))]
        whole = Laid(y, shape, dense_strides(shape))
        wanted_shape = tuple(wanted.shape[dim] for dim in back)
        if _dense(wanted_shape, tuple(wanted.strides[dim] for dim in back)):
            return self.permuted(Laid(self.method("contiguous", y), shape, whole.strides), order).node
        if _dense(wanted.shape, wanted.strides):
            return self.method("contiguous", self.permuted(whole, order).node)
        raise MatchFailure("its result lies in an order of its own")


def _dense(shape: tuple[Size, ...], strides: tuple[Size, ...]) -> bool:
    pairs = zip(shape, strides, dense_strides(shape), strict=True)
    return 0 in shape or all(a == b for size, a, b in pairs if size != 1)
