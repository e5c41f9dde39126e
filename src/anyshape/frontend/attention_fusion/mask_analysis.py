"""Mask analysis: which masks leave every row a key, whatever the sizes, by the way the program makes them.

    ~torch.ones(t, t).bool().tril()       true only right of the diagonal: key 0 stays, in every row
    torch.triu(torch.full((t, t), -inf), 1)                the same, as numbers to add

A row without a key is where hand-written attention and the fused operator part: softmax over nothing but -inf is NaN,
the operator gives 0. A mask that is data may have such rows; so may any that is not shown here to have none.
"""
from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from anyshape.frontend.attention_fusion.patterns import number, read, traced
from anyshape.torch_compat.tracing import settings

# a comparison of positions: what it is with its sides exchanged, and what where it does not hold
_EXCHANGED = {"less": "more", "more": "less", "at most": "at least", "at least": "at most"}


def leaves_keys(mask: Any, where_false: bool) -> bool:
    """Whether masking where `mask` is true (or, `where_false`, where it is false) leaves every row its first key."""
    return _covers_left(mask) if where_false else only_right(mask)


def only_right(node: Any) -> bool:
    """True (or not 0) only where the key comes after the query: key > query."""
    step = read(node)
    if step is None:
        return False
    x = step.operands[0]
    if step.kind == "upper":
        return isinstance(step.operands[1], int) and step.operands[1] >= 1
    if step.kind == "not" or (step.kind == "equal" and number(step.operands[1]) == 0):
        return _covers_left(x) and _is_truth(step.kind, x)
    if step.kind == "and":
        return only_right(x) or only_right(step.operands[1])
    if step.kind == "or":
        return only_right(x) and only_right(step.operands[1])
    if step.kind in _EXCHANGED:
        return _compares(step.kind, x, step.operands[1], "more")
    return _passes_on(step.kind, node) and only_right(x)


def _covers_left(node: Any) -> bool:
    """True (or not 0) wherever the key does not come after the query: key <= query."""
    step = read(node)
    if step is None:
        return False
    x = step.operands[0]
    if step.kind == "lower":
        return isinstance(step.operands[1], int) and step.operands[1] >= 0 and _is_full(x)
    if step.kind == "not" or (step.kind == "equal" and number(step.operands[1]) == 0):
        return only_right(x) and _is_truth(step.kind, x)
    if step.kind == "equal" and number(step.operands[1]) == 1:
        return _covers_left(x) and _holds_ones(x)
    if step.kind == "and":
        return all(_covers_left(side) and _is_truth("and", side) for side in step.operands)
    if step.kind == "or":
        return _covers_left(x) or _covers_left(step.operands[1])
    if step.kind in _EXCHANGED:
        return _compares(step.kind, x, step.operands[1], "at most")
    return _passes_on(step.kind, node) and _covers_left(x)


def adds_only_right(node: Any) -> bool:
    """Numbers to add that are 0 wherever the key does not come after the query."""
    step = read(node)
    if step is None:
        return False
    if step.kind == "upper":
        return only_right(node)
    if step.kind == "fill":
        return only_right(step.operands[1]) and _is_zero(step.operands[0])
    if step.kind == "where":
        condition, chosen, other = step.operands
        return (only_right(condition) and _is_zero(other)) or (_covers_left(condition) and _is_zero(chosen))
    return _passes_on(step.kind, node) and adds_only_right(step.operands[0])


def _is_truth(kind: str, x: Any) -> bool:
    """`not` of a bool is its opposite; `~1` of an int is not 0."""
    tensor = traced(x)
    return kind == "equal" or (tensor is not None and tensor.dtype is torch.bool)


def _holds_ones(node: Any) -> bool:
    step = read(node)
    if step is None:
        return False
    if step.kind == "lower":
        return _holds_ones(step.operands[0])
    return step.kind == "ones" or (_passes_on(step.kind, node) and _holds_ones(step.operands[0]))


def _is_full(node: Any) -> bool:
    """1 everywhere."""
    step = read(node)
    if step is None:
        return False
    if step.kind == "full":
        return number(step.operands[1]) == 1
    return step.kind == "ones" or (step.kind in ("cast", "same", "placed") and _is_full(step.operands[0]))


def _is_zero(node: Any) -> bool:
    if number(node) == 0:
        return True
    step = read(node)
    if step is not None and step.kind == "full":
        return number(step.operands[1]) == 0
    if step is not None and step.kind in ("cast", "same", "placed"):
        return _is_zero(step.operands[0])
    return isinstance(node, Node) and node.target in (torch.zeros, torch.zeros_like, "new_zeros")


def _passes_on(kind: str, node: Node) -> bool:
    """Whether the call leaves the last two dims where they are, cut at their ends at most."""
    step = read(node)
    assert step is not None
    before, after = traced(step.operands[0]), traced(node)
    if before is None or after is None:
        return False
    if kind in ("cast", "same"):
        return True
    if kind == "shape":  # (t, s) to (1, 1, t, s)
        front = after.shape[:after.dim() - before.dim()]
        return after.dim() >= before.dim() and all(isinstance(size, int) and size == 1 for size in front) and all(
            settings.same_size(a, b) for a, b in zip(before.shape, after.shape[len(front):], strict=True))
    if kind == "placed":
        if node.target in ("bool", "cpu"):
            return True
        place = step.operands[1] if len(step.operands) > 1 else node.kwargs.get("dim")
        return node.target in ("unsqueeze", torch.unsqueeze) and isinstance(place, int) and (
            0 <= place <= before.dim() - 2 or place < -2)
    return kind == "item" and _cuts_ends(step.operands[1], before.dim())


def _cuts_ends(index: Any, rank: int) -> bool:
    """[None, :, :t, :s]: new dims in front, and slices that start at the start."""
    entries = index if isinstance(index, tuple) else (index,)
    if Ellipsis in entries:
        return False
    kept = [entry for entry in entries if entry is not None]
    front = entries[:len(entries) - 2] if len(kept) == rank else ()
    last = entries[len(front):]
    whole = all(isinstance(e, slice) and e.start in (None, 0) and e.step in (None, 1) and not _below_zero(e.stop)
                for e in kept)
    if len(kept) < rank:  # trailing dims that the index does not name stay
        return whole and all(entry is None or isinstance(entry, slice) for entry in entries) and rank - len(kept) >= 2
    return whole and None not in last


def _below_zero(stop: Any) -> bool:
    return isinstance(stop, int) and stop <= 0


def _compares(kind: str, a: Any, b: Any, wanted: str) -> bool:
    """Whether `a kind b` says `key wanted query` of positions that count from 0."""
    if _positions(a) == "key" and _positions(b) == "query":
        return kind == wanted
    return _positions(a) == "query" and _positions(b) == "key" and _EXCHANGED[kind] == wanted


def _positions(node: Any) -> str:
    """"key" for 0, 1, 2 ... along the last dim, "query" for such along the one before it; else empty."""
    tensor, source = traced(node), node
    if tensor is None or tensor.dim() == 0:
        return ""
    while (step := read(source)) is not None and step.kind in ("placed", "item", "shape", "cast"):
        if source.target in ("expand", "bool"):
            return ""
        if step.kind == "item" and not _only_new_dims(step.operands[1]):
            return ""
        source = step.operands[0]
    if not isinstance(source, Node) or source.target is not torch.arange or not _from_zero(source):
        return ""
    ones = [isinstance(size, int) and size == 1 for size in tensor.shape]
    if ones.count(False) != 1:
        return ""
    if not ones[-1]:
        return "key"
    return "query" if len(ones) > 1 and not ones[-2] else ""


def _only_new_dims(index: Any) -> bool:
    entries = index if isinstance(index, tuple) else (index,)
    return all(entry is None or entry == slice(None) for entry in entries)


def _from_zero(node: Node) -> bool:
    """torch.arange(n), or torch.arange(0, n)."""
    if "step" in node.kwargs or "start" in node.kwargs or len(node.args) not in (1, 2):
        return False
    return len(node.args) == 1 or (isinstance(node.args[0], int) and node.args[0] == 0)
