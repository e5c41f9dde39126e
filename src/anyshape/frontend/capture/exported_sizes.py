"""Sizes of 0 and 1 of an exported program: torch.export traces as if there were none, and its programs take them where
their ranges do. Those that can be shown to do nothing else than larger ones are taken here, too.
"""
from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch

from anyshape.frontend.capture.small_size_guard import PredictedShapes
from anyshape.frontend.capture.traced_calls import LEAST
from anyshape.torch_compat.tracing import settings

MOST_OPEN = 4  # sizes that are judged, in all combinations


def symbols(exported: torch.export.ExportedProgram) -> dict[tuple[int, int], Any]:
    """The symbol of each size of a user's tensor that is one, by the number of the tensor and the dim."""
    shapes = [value.shape for value in given(exported) if isinstance(value, torch.Tensor)]
    return {(number, dim): size.node.expr for number, shape in enumerate(shapes) for dim, size in enumerate(shape)
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol}


def special_at(exported: torch.export.ExportedProgram, size: int) -> set[Any]:
    """Symbols whose range holds `size`, 0 or 1, and that may not be it: a guard or a shape of the graph would be
    another one then."""
    ranges = exported.range_constraints
    open_ = [symbol for symbol in dict.fromkeys(symbols(exported).values()) if int(ranges[symbol].lower) <= size]
    if not open_:
        return set()
    gm = exported.graph_module
    env = _env(exported)
    guards = [env.replace(guard.expr) for guard in env.guards]
    for node in gm.graph.nodes:
        node.meta["example_value"] = node.meta.get("val")  # as Dynamo's graphs have it
    predicted = PredictedShapes(gm)
    hints = settings.hints(predicted.placeholders)
    served: list[Any] = []
    for symbol in open_[:MOST_OPEN]:
        rest = [chosen for count in range(len(served) + 1) for chosen in itertools.combinations(served, count)]
        if all(_holds(guards, values) and not predicted.differs_at(values)
               for chosen in rest for values in [{**hints, **dict.fromkeys((symbol, *chosen), size)}]):
            served.append(symbol)
    for node in gm.graph.nodes:
        del node.meta["example_value"]
    return set(open_) - set(served)


def fixed_by_floats(exported: torch.export.ExportedProgram) -> dict[Any, sympy.Integer]:
    """Symbols of the user's tensors, and what they were in the trace, that a guard over floats fixes: torch.export
    makes a constant of a tensor of 3 * s / 2, and a guard that this number is the one of the trace."""
    found = dict.fromkeys(symbols(exported).values())
    guards = [guard.expr for guard in _env(exported).guards if isinstance(guard.expr, sympy.Eq)] if found else []
    open_ = {symbol for guard in guards if guard.atoms(sympy.Float) for symbol in guard.free_symbols} & found.keys()
    traced = settings.hints(given(exported)) if open_ else {}
    return {symbol: sympy.Integer(traced[symbol]) for symbol in open_}


@contextlib.contextmanager
def ranges_known(exported: torch.export.ExportedProgram) -> Iterator[Mapping[Any, tuple[int, Any]]]:
    """While the program is compiled, what is known of its sizes begins where their ranges do, which torch.export has
    begin at LEAST, for all of which that is as good; and sizes are fixed that its guards fix. Gives the range of each
    symbol of the user's tensors."""
    ranges = exported.range_constraints
    least = {symbol: int(ranges[symbol].lower) for symbol in symbols(exported).values()}
    for size in (1, 0):
        if any(low <= size for low in least.values()):
            least |= {symbol: max(size + 1, least[symbol]) for symbol in special_at(exported, size)}
    fixed = fixed_by_floats(exported)
    known = {symbol: (fixed.get(symbol, low), fixed.get(symbol, ranges[symbol].upper)) for symbol, low in least.items()}
    news = {symbol: one for symbol, one in known.items() if one[0] < LEAST or symbol in fixed}
    with settings.ranges_from(_env(exported), news) if news else contextlib.nullcontext():
        yield known


def _env(exported: torch.export.ExportedProgram) -> Any:
    return next(size.node.shape_env for value in given(exported) if isinstance(value, torch.Tensor)
                for size in value.shape if isinstance(size, torch.SymInt))


def _holds(guards: Sequence[Any], values: Mapping[Any, int]) -> bool:
    return all(guard.xreplace(values) == True for guard in guards)  # noqa: E712 of sympy


def given(exported: torch.export.ExportedProgram) -> list[Any]:
    """The traced values of the user's inputs."""
    inputs = {node.name: node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"}
    return [inputs[name] for name in exported.graph_signature.user_inputs if name in inputs]
