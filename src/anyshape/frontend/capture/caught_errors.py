"""Exception handlers around operators that fail because of values: a captured graph has no `try`, so a frame in which
one is met is left to PyTorch, and what it calls is captured by itself.

    try:
        return table[ids]            # an index is out of range: found when the program runs
    except IndexError:               # which is in the frame, not in the graph
        return table[ids.clamp(max=9)]

A handler that raises in all its paths does not count: the error leaves the frame with or without it, as the operator's
own instead of the handler's.
"""
from __future__ import annotations

import ast
import linecache
import operator
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch.fx import GraphModule, Node

from anyshape.torch_compat.tracing.tensor_positions import take

LEFT = ("errors of an operator, which are found only when its values are there, are caught by an `except` of the "
        "code: the function with the `try` runs as PyTorch, what it calls is compiled")
# operators that look at values of whole numbers, or factorise, and fail where there is no answer
_FAILS = re.compile(
    r"(embedding|gather|scatter|index|take|put|cross_entropy|nll_loss|one_hot|bincount|div|mod|remainder|"
    r"repeat_interleave|cholesky|inverse|invert|linalg|solve|lu_|qr|svd|eig|multinomial|bernoulli|poisson|normal|item|"
    r"tolist|unpool)")
_SUBSCRIPTS = operator.getitem, operator.setitem, take
# what no operator raises because of values
_OTHERS = frozenset(("ImportError", "ModuleNotFoundError", "AttributeError", "KeyError", "StopIteration", "TypeError",
                     "NotImplementedError", "OSError", "FileNotFoundError", "ValueError", "AssertionError"))
# of the handlers around a line: they go on after an error of an operator; they raise one of their own; they go on after
# errors of other kinds
_CATCHES, _RAISES, _OTHER = "catches", "raises", "other"
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')


def caught(gm: GraphModule) -> str:
    """The user's line of an operator in a graph of Dynamo's that may fail because of values, where an `except` of the
    frame, or of what it calls, would see that; empty where there is none."""
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method") and _may_fail(node):
            where = _seen_at([(file, int(line)) for file, line in _FRAME.findall(node.stack_trace or "")])
            if where is not None:
                file, line = where
                return f"{file.rsplit('/', 1)[-1]}:{line}  {linecache.getline(file, line).strip()}"
    return ""


def _seen_at(frames: list[tuple[str, int]]) -> tuple[str, int] | None:
    """Of the lines of a call, the outermost first, that where an error of an operator would be seen."""
    around = [(guard, place) for place in frames for guard in _guards(*place)]  # from the outermost block inwards
    other = None
    for guard, place in around:
        if guard == _OTHER:
            other = other or place
        elif guard == _CATCHES or other is not None:
            # what a handler raises instead may be of a kind that one further out sees
            return place if guard == _CATCHES else other
    return None


def _guards(file: str, line: int) -> list[str]:
    """What the handlers of each block around a line do with an error of an operator."""
    return [guard for first, last, guard in _guarded(file, len(linecache.getlines(file))) if first <= line <= last]


def _may_fail(node: Node) -> bool:
    if node.target in _SUBSCRIPTS:
        places = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return any(isinstance(place, Node) and isinstance(place.meta.get("example_value"), torch.Tensor)
                   for place in places)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    module = getattr(node.target, "__module__", None) or ""
    return bool(_FAILS.search(f"{module}.{name}"))


@lru_cache(maxsize=256)
def _guarded(file: str, _lines: int) -> tuple[tuple[int, int, str], ...]:
    """First and last line of each block of a file that has handlers, and what they do with an error of an operator."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    return tuple((one.body[0].lineno, one.body[-1].end_lineno or one.body[-1].lineno, guard)
                 for one, guard in _blocks(tree))


def _blocks(tree: ast.AST) -> Iterator[tuple[Any, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Try, ast.TryStar)) and node.handlers:
            returning = [handler for handler in node.handlers if not _raises(handler.body)]
            if any(_sees(handler.type) for handler in returning):
                yield node, _CATCHES
            elif any(_sees(handler.type) for handler in node.handlers):
                yield node, _RAISES
            if returning:
                yield node, _OTHER
        elif isinstance(node, ast.With) and any(map(_is_suppress, node.items)):
            yield node, _CATCHES if any(map(_suppresses, node.items)) else _OTHER


def _sees(kind: ast.expr | None) -> bool:
    """Whether a handler of this kind of error sees one of an operator."""
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(one is None or _last_name(one) not in _OTHERS for one in kinds)


def _raises(body: list[ast.stmt]) -> bool:
    """Whether each path through the statements ends in a `raise`."""
    if any(isinstance(node, (ast.Return, ast.Break, ast.Continue)) for one in body for node in ast.walk(one)):
        return False
    last = body[-1]
    if isinstance(last, ast.If):
        return bool(last.orelse) and _raises(last.body) and _raises(last.orelse)
    return isinstance(last, ast.Raise)


def _is_suppress(item: ast.withitem) -> bool:
    return isinstance(item.context_expr, ast.Call) and _last_name(item.context_expr.func) == "suppress"


def _suppresses(item: ast.withitem) -> bool:
    return _is_suppress(item) and any(map(_sees, item.context_expr.args))  # type: ignore[attr-defined]


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
