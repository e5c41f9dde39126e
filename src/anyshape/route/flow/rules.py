"""Transfer rules by operator: the tables of data movement, of joins and of contractions together."""
from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from anyshape.route.flow import contraction, elementwise, movement
from anyshape.route.flow.call import Call

RULES = {**elementwise.RULES, **movement.RULES, **contraction.RULES}
# no result, or numbers alone
SILENT = """_assert_scalar _assert_tensor_metadata sym_constrain_range sym_constrain_range_for_size _assert_async sym_size
sym_numel""".split()


def word_of(target: Any) -> str:
    """The name of an ATen operator without its overload; empty for others."""
    space, _, name = str(target.name()).partition("::") if hasattr(target, "name") else ("", "", "")
    return name.split(".")[0] if space == "aten" else ""


def rule_of(target: Any) -> Callable[[Call], list[Tensor]] | None:
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
    if any(isinstance(one, str) for one in node.args) or (word.endswith("_") and word != "detach_"):
        return False
    return word in SILENT or rule_of(node.target) is not None or word in FACTORIES


FACTORIES = "full zeros ones empty arange scalar_tensor eye linspace zeros_like ones_like".split()
