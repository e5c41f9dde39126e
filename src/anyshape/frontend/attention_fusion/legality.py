"""Legality of attention fusion: whether the fused operator does the same as attention that a model writes out, and what
it needs for that.

The operator has no mask with a gradient, one dtype, and 0 for rows without a key, where a program has NaN or the mean
of the values. `rewrite.py` says how such rows are kept.
"""
from __future__ import annotations

import math

import torch

from anyshape.frontend.attention_fusion.mask_analysis import adds_only_right, leaves_keys
from anyshape.frontend.attention_fusion.operands import AttentionMatch, MatchFailure, ScoreStep
from anyshape.frontend.attention_fusion.patterns import changes_by_schema, in_place, traced
from anyshape.passes.attention.match import DEEP, FAR
from anyshape.torch_compat.versions import api

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check(found: AttentionMatch) -> None:
    """Decides what rows need whose keys may all be masked; raises MatchFailure where the operator would not do the
    same."""
    _check_tensors(found)
    _check_writes(found)
    _masks(found)


def _check_tensors(found: AttentionMatch) -> None:
    """Raises MatchFailure where dtypes, devices or gradients keep the operator from doing the same."""
    first, last = traced(found.nodes[0]), traced(found.nodes[-1])
    assert found.value is not None and first is not None and last is not None
    operands = [traced(one.node) for one in (found.query, found.key, found.value)]
    tensors = [tensor for tensor in operands if tensor is not None]
    if first.dtype not in DTYPES or last.dtype != first.dtype or any(t.device.type != "cpu" for t in tensors):
        raise MatchFailure(f"its products are in {first.dtype} and {last.dtype}, on {first.device.type}")
    wider = torch.float64 if first.dtype == torch.float64 else torch.float32
    allowed = (first.dtype, wider) if first.dtype != torch.float32 else (torch.float32, torch.bfloat16, torch.float16)
    for node in found.nodes:
        tensor = traced(node)
        if tensor is None or tensor.dtype not in allowed:
            steps = "other things" if tensor is None else tensor.dtype
            raise MatchFailure(f"its products are in {first.dtype}, its steps in {steps}")
    if first.requires_grad != any(t.requires_grad for t in tensors[:2]):
        if torch.is_grad_enabled() or first.requires_grad:
            raise MatchFailure("gradients are stopped on the way")
    probabilities = traced(found.nodes[-2])
    if probabilities is None or probabilities.requires_grad < first.requires_grad:
        raise MatchFailure("gradients are stopped on the way")
    for change in found.changes:
        tensor = traced(change.node)
        if change.kind == "add" and tensor is None:
            raise MatchFailure("numbers are added to its scores")
        if change.kind == "add" and tensor is not None and tensor.requires_grad:
            raise MatchFailure("what is added to its scores needs a gradient")
        if change.kind in ("times", "add") and not math.isfinite(change.number):
            raise MatchFailure("its scores are multiplied with what is no number")
        if change.kind == "fill" and (tensor is None or tensor.dtype != torch.bool):
            raise MatchFailure("the mask is not of bools")


def _check_writes(found: AttentionMatch) -> None:
    """What the operator reads at the place of the second product is what the program read before."""
    assert found.value is not None
    read_early = [one.node for one in (found.query, found.key, found.value)] + [c.node for c in found.changes]
    keys = {api.storage_key(traced(node)) for node in read_early} - {None}
    inside, order = set(found.nodes), list(found.nodes[0].graph.nodes)
    for node in order[order.index(found.nodes[0]):order.index(found.nodes[-1])]:
        if node in inside or not (in_place(node) or changes_by_schema(node)):
            continue
        written = [*node.all_input_nodes] if changes_by_schema(node) else [*node.args[:1], node.kwargs.get("out")]
        if any(api.storage_key(traced(one)) in keys for one in written):
            raise MatchFailure("its operands are changed in place on the way")


def _masks(found: AttentionMatch) -> None:
    """Decides what rows need whose keys may all be masked.

    Hand-written, a row of -inf is NaN. Numbers that were added pass that on to the gradients of q, k and v; a fill
    passes it on to those of v alone, for the gradient of what it covers is 0. With finite numbers such a row is the
    mean of the values, and the gradients of its scores are 0 after a fill.

    Raises:
        Refused: the gradients of such rows would not be those of the program.
    """
    training = any((tensor := traced(node)) is not None and tensor.requires_grad for node in found.nodes)
    fills, adds = _fills(found), [change for change in found.changes if change.kind == "add"]
    least = torch.finfo(min((t.dtype for t in map(traced, found.nodes) if t is not None),
                            key=lambda dtype: torch.finfo(dtype).max)).min
    if any(not value <= max(FAR, least) for _, value in fills):
        raise MatchFailure("masked scores get a number that scores may reach")
    filled = all(leaves_keys(change.node, change.where_false) for change, _ in fills)
    added = all(adds_only_right(change.node) for change in adds)
    finite = [value for _, value in fills if value != -math.inf]
    deep = all(value <= DEEP for value in finite)
    if fills and adds and not (filled and added):
        if training and not (filled and not finite):
            raise MatchFailure("masks that fill and numbers that add may together mask whole rows, "
                               "whose gradients differ")
        if not deep:
            raise MatchFailure("masks that fill and numbers that add may together mask whole rows")
    found.poisoned = not (filled and added) and bool(adds or len(finite) < len(fills))
    found.rows = found.poisoned and training and not adds
    found.stopped = bool(finite) and not filled and not adds and (training or not deep)


def _fills(found: AttentionMatch) -> list[tuple[ScoreStep, float]]:
    """The fills, with what their numbers are at the softmax."""
    fills: list[tuple[ScoreStep, float]] = []
    masked = False
    for change in found.changes:
        masked = masked or change.kind in ("add", "fill")
        if change.kind == "fill":
            fills.append((change, change.number))
        elif masked and change.kind == "factor":
            raise MatchFailure("masked scores are multiplied")
        elif fills and change.kind == "times":
            if not change.number > 0:
                raise MatchFailure("masked scores are multiplied with what is not above 0")
            fills = [(fill, value * change.number) for fill, value in fills]
    return fills
