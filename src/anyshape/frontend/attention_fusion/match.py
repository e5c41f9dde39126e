"""Attention fusion: attention that a model writes out becomes the fused operator, on Dynamo's graph, so that the
backward is fused too.

    s = (q @ k.transpose(-2, -1)) / 8.0                     m = zeros_like(mask).masked_fill(mask, -inf)
    p = softmax(s.masked_fill(mask, -inf), -1)      -->     y = flash_attention(q, k, v, attn_mask=m, scale=0.125)
    y = p @ v

Written out, it stores scores (and for the backward probabilities), length times length for each head. From a softmax
the search goes back to the product of queries and keys, and on to the product with the values; `patterns.FORMS`
has the words for the steps between. What looks like attention and is left as it was is noted with the reason.

Graphs of ours that hold gradients too are matched by passes/attention. That is too late after PyTorch's autograd, which
has by then parted forward and backward, each a graph of its own, with the probabilities saved between them.

The numbers stay those of the program. Where they could not (`legality.py`), nothing is replaced. Nothing here asks
a symbolic size for its value, so no guard comes of it.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from anyshape.base.config import Config
from anyshape.base.errors import Unsupported
from anyshape.frontend.attention_fusion import legality, rewrite
from anyshape.frontend.attention_fusion.operands import (
    AttentionMatch,
    MatchFailure,
    NoAttention,
    ScoreStep,
    application,
    contraction,
)
from anyshape.frontend.attention_fusion.patterns import CHANGES, PatternStep, in_place, number, read, traced
from anyshape.frontend.symbols.node_metadata import where_of
from anyshape.passes.driver.pipeline import ATTENTION
from anyshape.torch_compat import is_there
from anyshape.torch_compat.tracing import settings
from anyshape.torch_compat.versions import api

_DISTANCE = 12  # steps that are looked at for a product, to say why something is no attention


@dataclass(frozen=True, slots=True)
class AttentionNote:
    """Attention that a model writes out.

    Args:
        where: the line of its softmax.
        taken: whether the fused operator stands in its place.
        what: what was put there, or why it was left.
    """
    where: str
    taken: bool
    what: str


def attention(gm: GraphModule, config: Config) -> tuple[GraphModule, tuple[AttentionNote, ...]]:
    """The graph with fused attention, and what was found; `gm` itself where nothing is replaced.

    Args:
        gm: a graph of Dynamo's, with fake tensors as `meta["example_value"]`. It is not changed.
    """
    if ATTENTION in config.disabled() or not is_there(rewrite.OPERATOR):
        return gm, ()
    if not any(_is_softmax(node) for node in gm.graph.nodes) or any(
            api.changes_mode(node.target) for node in gm.graph.nodes if node.op == "call_function"):
        return gm, ()  # under vmap and the like tensors have dims that do not show
    copy = settings.copy_captured(gm)
    _settle(copy)
    notes, lines, taken = [], dict[str, str](), False
    for node in [node for node in copy.graph.nodes if _is_softmax(node)]:
        where = where_of(node, lines)
        try:
            found = _find(node)
            rewrite.replace(copy.graph, found)
            notes.append(AttentionNote(where, True, rewrite.said(found)))
            taken = True
        except NoAttention:
            continue
        except MatchFailure as error:
            notes.append(AttentionNote(where, False, str(error)))
        except Unsupported as error:  # a size without a form
            notes.append(AttentionNote(where, False, error.what))
    if not taken:
        return gm, tuple(notes)
    copy.graph.lint()
    copy.recompile()
    return copy, tuple(notes)


def _is_softmax(node: Node) -> bool:
    step = read(node)
    return step is not None and step.kind == "softmax"


def _settle(gm: GraphModule) -> None:
    """Later readers of what a step changes in place read the step: scores.masked_fill_(mask, x); softmax(scores). What
    is converted to the dtype of scores no longer reads them."""
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    for node in gm.graph.nodes:
        step, tensor = read(node), traced(node)
        if node.op == "call_method" and node.target == "type_as" and tensor is not None:
            node.target, node.args, node.kwargs = "to", (node.args[0], tensor.dtype), {}
        if step is None or step.kind not in CHANGES or not in_place(node):
            continue
        changed = step.operands[0]
        if isinstance(changed, Node) and read(changed) is not None:
            changed.replace_all_uses_with(node, delete_user_cb=lambda user, at=order[node]: order[user] > at)


def _find(softmax: Node) -> AttentionMatch:
    """The attention around a softmax.

    Raises:
        Refused: it is attention that the operator cannot do as the program does it. NoAttention: it is none.
    """
    step = read(softmax)
    tensor = traced(softmax)
    if step is None or tensor is None:
        raise NoAttention
    try:
        found = _scores(step.operands[0])
    except NoAttention:
        if _over_product(step.operands[0]) and _before_product(softmax):
            raise MatchFailure("a step between the product and the softmax is none that attention has") from None
        raise
    if not _before_product(softmax):
        raise NoAttention
    dim = step.operands[1]
    if dim not in (-1, tensor.dim() - 1):
        raise MatchFailure("the softmax is not over the last dim")
    _alone(found.nodes, softmax)
    found.nodes.append(softmax)
    _weights(found, softmax)
    legality.check(found)
    return found


# ---- back from the softmax to the first product


def _scores(node: Any) -> AttentionMatch:
    step = read(node)
    if step is None or traced(node) is None:
        raise NoAttention
    handler = _BACK.get(step.kind)
    if handler is None:
        raise NoAttention
    found = handler(node, step)
    if found.nodes and found.nodes[-1] is not node:
        _alone(found.nodes, node)
        found.nodes.append(node)
    return found


def _product(node: Node, step: PatternStep) -> AttentionMatch:
    query, key = contraction(step)
    return AttentionMatch([node], query, key)


def _added_product(node: Node, step: PatternStep) -> AttentionMatch:
    bias, a, b, beta, alpha = step.operands
    beta, alpha = number(beta), number(alpha)
    if beta is None or alpha is None:
        raise MatchFailure("the factors of a sum with a product are not numbers")
    found = _product(node, PatternStep("product", (a, b)))
    found.changes += [ScoreStep("times", alpha)] + ([ScoreStep("add", beta, bias)] if beta else [])
    return found


def _path(node: Node, sides: tuple[Any, ...]) -> tuple[AttentionMatch, Any]:
    """The side that comes from a product, and the other."""
    reasons = []
    for side, other in (sides, sides[::-1]):
        try:
            found = _scores(side)
        except NoAttention:
            continue
        except MatchFailure as error:
            reasons.append(error)
            continue
        if in_place(node) and node.args[0] is not side:
            raise MatchFailure("its scores are written into another tensor")
        return found, other
    raise reasons[0] if reasons else NoAttention


def _times(node: Node, step: PatternStep) -> AttentionMatch:
    found, other = _path(node, step.operands[:2])
    factor = number(other)
    found.changes.append(ScoreStep("factor", node=other) if factor is None else ScoreStep("times", factor))
    return found


def _over(node: Node, step: PatternStep) -> AttentionMatch:
    found = _scores(step.operands[0])
    divisor = number(step.operands[1])
    if step.operands[2] is not None or divisor == 0:
        raise MatchFailure("scores are divided and rounded, or divided by 0")
    found.changes.append(ScoreStep("factor", node=step.operands[1], where_false=True) if divisor is None
                         else ScoreStep("times", 1 / divisor))
    return found


def _plus(node: Node, step: PatternStep) -> AttentionMatch:
    found, other = _path(node, step.operands[:2])
    alpha = number(step.operands[2])
    if alpha is None or (other is not step.operands[1] and alpha != 1):
        raise MatchFailure("the factor of a sum is not a number")
    found.changes.append(ScoreStep("add", alpha, other))
    return found


def _minus(node: Node, step: PatternStep) -> AttentionMatch:
    found = _scores(step.operands[0])
    alpha = number(step.operands[2])
    if alpha is None:
        raise MatchFailure("the factor of a difference is not a number")
    found.changes.append(ScoreStep("add", -alpha, step.operands[1]))
    return found


def _fill(node: Node, step: PatternStep) -> AttentionMatch:
    found = _scores(step.operands[0])
    return _filled(found, step.operands[1], step.operands[2], where_false=False)


def _where(node: Node, step: PatternStep) -> AttentionMatch:
    condition, a, b = step.operands
    found, other = _path(node, (a, b))
    return _filled(found, condition, other, where_false=other is b)


def _filled(found: AttentionMatch, mask: Any, value: Any, where_false: bool) -> AttentionMatch:
    fill = number(value)
    if fill is None:
        raise MatchFailure("masked scores get numbers that the program does not fix")
    found.changes.append(ScoreStep("fill", fill, mask, where_false))
    return found


def _same(node: Node, step: PatternStep) -> AttentionMatch:
    return _scores(step.operands[0])


def _shape(node: Node, step: PatternStep) -> AttentionMatch:
    """(b*h, t, s) to (b, h, t, s); nothing else."""
    found = _scores(step.operands[0])
    before, after = traced(step.operands[0]), traced(node)
    assert before is not None and after is not None
    if _same_sizes(before.shape, after.shape):
        return found
    given = step.operands[1] if len(step.operands) == 2 else step.operands[1:]
    if before.dim() != 3 or after.dim() != 4 or not isinstance(given, (tuple, list)) or len(given) != 4 or not \
            _same_sizes(before.shape[1:], after.shape[2:]):
        raise MatchFailure("scores are reshaped in another way than by taking their first dim apart")
    found.changes.append(ScoreStep("split", sizes=tuple(given[:2])))
    return found


_BACK: dict[str, Callable[[Node, PatternStep], AttentionMatch]] = {
    "product": _product, "einsum": _product, "added product": _added_product, "times": _times, "over": _over,
    "plus": _plus, "minus": _minus, "fill": _fill, "where": _where, "cast": _same, "same": _same, "shape": _shape}


# ---- on from the softmax to the second product


def _weights(found: AttentionMatch, softmax: Node) -> None:
    """Follows the probabilities to the product with the values."""
    node = softmax
    while True:
        users = [user for user in node.users if user.users or user.op == "output"]
        if len(users) != 1:
            raise MatchFailure(f"its probabilities are used elsewhere too, by {_names(users, node)}")
        user = users[0]
        step = read(user)
        kind = step.kind if step is not None else ""
        if kind in ("product", "einsum"):
            assert step is not None
            found.nodes.append(user)
            found.value, found.order = application(step, node)
            return
        if kind == "dropout":
            assert step is not None
            p, training = step.operands[1], step.operands[2]
            if not (training is False or p == 0):
                raise MatchFailure("its probabilities have dropout")
        elif kind == "shape":
            before, after = traced(node), traced(user)
            assert before is not None and after is not None
            if found.split is None or found.merged or before.dim() != 4 or after.dim() != 3 or not \
                    _same_sizes(before.shape[2:], after.shape[1:]):
                if not _same_sizes(before.shape, after.shape):
                    raise MatchFailure("its probabilities are reshaped")
            else:
                found.merged = True
        elif kind not in ("cast", "same"):
            raise MatchFailure(f"its probabilities are used by {_names([user], node)}")
        found.nodes.append(user)
        node = user


def _alone(nodes: list[Node], reader: Node) -> None:
    """Raises MatchFailure where the last of `nodes` is read by others than `reader`."""
    others = [user for user in nodes[-1].users if user is not reader and (user.users or user.op == "output")]
    if others:
        raise MatchFailure(f"its scores are used elsewhere too, by {_names(others, nodes[-1])}")


def _names(users: list[Node], node: Node) -> str:
    others = [user for user in users if user is not node]
    others = [user for user in others if _kind(user) not in ("product", "einsum")] or others
    words = ["what is returned" if user.op == "output" else str(getattr(user.target, "__name__", user.target))
             for user in others]
    return ", ".join(dict.fromkeys(words)) or "nothing"


def _before_product(softmax: Node) -> bool:
    """Whether a product reads the probabilities, some steps on."""
    return any(_kind(node) in ("product", "einsum") for node in _near(softmax, lambda node: list(node.users)))


def _over_product(node: Any) -> bool:
    """Whether scores come from a product, some steps back."""
    def first(node: Node) -> list[Node]:
        return [operand for operand in node.all_input_nodes if traced(operand) is not None][:2]

    return isinstance(node, Node) and any(_kind(one) in ("product", "einsum", "added product") and _is_square(one)
                                          for one in [node, *_near(node, first)])


def _is_square(node: Node) -> bool:
    """Both operands of a product have more than two dims: it is none with a weight."""
    return all(tensor is not None and tensor.dim() > 2 for tensor in map(traced, node.all_input_nodes))


def _kind(node: Node) -> str:
    step = read(node)
    return step.kind if step is not None else ""


def _near(node: Node, following: Callable[[Node], list[Node]]) -> Iterator[Node]:
    """Nodes within reach, through those of the same number of dims."""
    pending, seen = [(one, 1) for one in following(node)], {node}
    while pending:
        one, steps = pending.pop(0)
        if one in seen or one.op not in ("call_function", "call_method"):
            continue
        seen.add(one)
        yield one
        if steps < _DISTANCE and _kind(one) not in ("product", "einsum"):
            pending += [(other, steps + 1) for other in following(one)]


def _same_sizes(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(settings.same_size(n, m) for n, m in zip(a, b, strict=True))
