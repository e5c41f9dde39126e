"""Transfer rules by operator: the tables of data movement, of joins and of contractions together."""
from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from anyshape.route.flow import contraction, elementwise, movement
from anyshape.route.flow.call import OperatorCall

RULES = {**elementwise.RULES, **movement.RULES, **contraction.RULES}
# no result, or numbers alone
SILENT = """_assert_scalar _assert_tensor_metadata sym_constrain_range sym_constrain_range_for_size _assert_async
sym_size sym_numel""".split()


def word_of(target: Any) -> str:
    """The name of an ATen operator without its overload; empty for others."""
    space, _, name = str(target.name()).partition("::") if hasattr(target, "name") else ("", "", "")
    return name.split(".")[0] if space == "aten" else ""


def rule_of(target: Any) -> Callable[[OperatorCall], list[Tensor]] | None:
    """The rule of an ATen operator."""
    found = RULES.get(word_of(target))
    if found is None and word_of(target) and torch.Tag.pointwise in target.tags:
        return elementwise.pointwise
    return found


def is_plain(node: Node) -> bool:
    """Whether a node can be interpreted as it was captured: it has a rule, and writes nothing."""
    if node.op != "call_function" or not hasattr(node.target, "name"):
        return node.op in ("placeholder", "output") or getattr(node.target, "__module__", "") == operator.add.__module__
    word = word_of(node.target)
    if not word:
        return str(node.target.name()).startswith("anyshape_route::")
    if word in ("batch_norm", "instance_norm", "dropout", "feature_dropout", "alpha_dropout"):
        return word in ("batch_norm", "dropout") and not any(one is True for one in node.args[2:6])
    if word.endswith("_") and word != "detach_":
        return _writes_what_nobody_else_has(node)
    if any(isinstance(one, str) for one in node.args):
        return False
    return word in SILENT or rule_of(node.target) is not None or word in FACTORIES


def _writes_what_nobody_else_has(node: Node) -> bool:
    """Whether an in-place pointwise operator (relu_) writes a tensor that was just made, and that nothing else reads:
    it is as good as one that is not in place."""
    if torch.Tag.pointwise not in node.target.tags or not isinstance(node.args[0], Node):  # type: ignore[union-attr]
        return False
    made = node.args[0]
    if len(made.users) > 1 or made.op != "call_function" or not hasattr(made.target, "name"):
        return False
    word = word_of(made.target)
    return word in FRESH or (word.endswith("_") and is_plain(made))


# operators whose result is a tensor of its own
FRESH = """batch_norm layer_norm group_norm linear conv1d conv2d conv3d convolution mm bmm addmm matmul cat add sub mul
div""".split()
FACTORIES = "full zeros ones empty arange scalar_tensor eye linspace zeros_like ones_like".split()
