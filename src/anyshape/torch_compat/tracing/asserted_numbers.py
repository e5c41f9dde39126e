"""`assert` of a number that only the data show: kept in the graph, with what the user says.

    count = int(x.sum())
    assert count == 3, "three"    -->  torch._assert_scalar(count == 3, "three")

Dynamo takes the condition for a fact of the trace and writes no check of its own. What AOTAutograd makes of the fact
is True by then, and a float made whole is no formula that torch writes into a graph.
"""
from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Iterator
from typing import Any

import torch

from anyshape import torch_compat as compat
from anyshape.torch_compat.tracing.fx_threads import put
from anyshape.torch_compat.versions import api

MODULE = "torch._dynamo.symbolic_convert"
FINDS = f"{MODULE}._detect_and_normalize_assert_statement"
NUMBERS = f"{MODULE}.SymNodeVariable"
NO_MESSAGE = "assertion error"  # of torch, where the user's statement has none
CONDITION = "value"  # the local variable of the caller of FINDS


@contextlib.contextmanager
def assertions_kept() -> Iterator[None]:
    """Inside, what Dynamo traces asserts of numbers from the data in each call. Without effect where torch's internals
    are not as expected."""
    if not compat.has(FINDS, NUMBERS):
        yield
        return
    finds, Number = compat.need(FINDS), compat.need(NUMBERS)

    def finds_and_keeps(translator: Any, truth: Any, push: bool) -> bool:
        found = bool(finds(translator, truth, push))
        condition = sys._getframe(1).f_locals.get(CONDITION)
        if found and isinstance(condition, Number) and _is_of_data(condition.sym_num):
            message = translator.stack[-1].as_python_constant()
            proxy = condition.as_proxy()
            if not isinstance(condition.sym_num, torch.SymBool):
                proxy = translator.output.create_proxy("call_function", operator.ne, (proxy, 0), {})
            translator.output.create_proxy("call_function", torch._assert_scalar,
                                           (proxy, "" if message == NO_MESSAGE else message), {})
        return found

    with put(compat.need(MODULE), FINDS.rpartition(".")[2], finds_and_keeps):
        yield


def _is_of_data(number: Any) -> bool:
    return any(api.is_unbacked(str(symbol)) for symbol in as_written(number).free_symbols)


def as_written(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """Its formula without what the trace has found out since: an assertion that u0 is 1 has it replaced by 1."""
    node: Any = number.node
    return getattr(node, "_expr", node.expr)
