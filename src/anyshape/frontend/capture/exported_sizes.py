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
from anyshape.frontend.symbols.exported_guards import limits, value_at
from anyshape.frontend.symbols.guard_facts import is_of_several
from anyshape.torch_compat.formulas import functions as ops
from anyshape.torch_compat.tracing import settings

MOST_JUDGED = 24  # combinations of small sizes that are judged for one more size
MOST_EMPTY = 2  # sizes that may be 0


def is_open(size: int | torch.SymInt) -> bool:
    """Whether a size is no number, nor a symbol that guards have made one."""
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def symbols(exported: torch.export.ExportedProgram) -> dict[tuple[int, int], Any]:
    """The symbol of each size of a user's tensor that is one, by the number of the tensor and the dim."""
    shapes = [value.shape for value in given(exported) if isinstance(value, torch.Tensor)]
    return {(number, dim): size.node.expr for number, shape in enumerate(shapes) for dim, size in enumerate(shape)
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol}


def least_sizes(exported: torch.export.ExportedProgram, layouts: bool = True) -> dict[Any, int]:
    """The least value of each symbol of the user's tensors: where its range begins, but above sizes of 0 and 1 at which
    a guard or a shape of the graph would be another one, alone or together with small sizes of others; layouts: or the
    layout of a result, which is contiguous in PyTorch."""
    ranges = exported.range_constraints
    least = {symbol: int(ranges[symbol].lower) for symbol in symbols(exported).values()}
    if min(least.values(), default=LEAST) >= LEAST:
        return least
    gm = exported.graph_module
    asked = guards(exported)
    for node in gm.graph.nodes:
        node.meta["example_value"] = node.meta.get("val")  # as Dynamo's graphs have it
    predicted = PredictedShapes(gm)
    hints = settings.hints(predicted.placeholders)
    served: dict[Any, list[int]] = {}
    places = sorted(symbols(exported).items(), key=lambda one: one[0][::-1])  # batches first
    for symbol in dict.fromkeys(symbol for _, symbol in places if least[symbol] < LEAST):
        own: list[int] = []
        rest = [dict(zip(served, sizes, strict=True))
                for sizes in itertools.product(*([hints[one], *small] for one, small in served.items()))]
        for size in range(LEAST - 1, least[symbol] - 1, -1):
            patterns = [values for chosen in rest for values in [{**hints, **chosen, symbol: size}]
                        if not _is_refused(asked, values)]
            empty = sum(0 in small for small in served.values())
            if len(patterns) > MOST_JUDGED or (size == 0 and empty >= MOST_EMPTY) or not all(
                    _holds(asked, values) and not predicted.differs_at(values, layouts) for values in patterns):
                break
            own.append(size)
        least[symbol] = min(own, default=LEAST)
        if own:
            served[symbol] = own
    for node in gm.graph.nodes:
        del node.meta["example_value"]
    return least


def made_numbers(exported: torch.export.ExportedProgram) -> set[Any]:
    """Symbols of which something is a number by a guard, as by `int(size / 2)`; not remainders, which layouts ask."""
    return {symbol for guard in guards(exported) if isinstance(guard, sympy.Eq) and len(guard.free_symbols) == 1
            and any(side.is_number for side in guard.args) and not isinstance(guard.args[0], (ops.Mod, ops.PythonMod))
            for symbol in guard.free_symbols}


def takes(exported: torch.export.ExportedProgram, sizes: Sequence[Sequence[int]]) -> bool:
    """Whether the program takes tensors of these sizes, as far as ranges and guards tell."""
    shapes = [value.shape for value in given(exported) if isinstance(value, torch.Tensor)]
    values = {symbol: sizes[number][dim] for (number, dim), symbol in symbols(exported).items()}
    ranges = exported.range_constraints
    return all(type(size) is not int or size == own for shape, numbers in zip(shapes, sizes, strict=True)
               for size, own in zip(shape, numbers, strict=True)) and all(
        int(ranges[symbol].lower) <= number for symbol, number in values.items() if symbol in ranges) and not any(
        value_at(guard, values) == False for guard in guards(exported))  # noqa: E712 of sympy


def limited(exported: torch.export.ExportedProgram) -> dict[Any, tuple[int, int | None]]:
    """Symbols of the user's tensors, and the range in which guards hold that no size says: torch.export makes a
    constant of a tensor of 0.1 * s, and a guard that this number is the one of the trace."""
    asked = guards(exported)
    return limits(asked, _env(exported), settings.hints(given(exported))) if asked else {}


@contextlib.contextmanager
def ranges_known(exported: torch.export.ExportedProgram, layouts: bool = True
                 ) -> Iterator[Mapping[Any, tuple[int, Any]]]:
    """While the program is compiled, what is known of its sizes begins where their ranges do, which torch.export has
    begin at LEAST, for all of which that is as good; and they are no wider than its guards. Gives the range of each
    symbol of the user's tensors. layouts: see `least_sizes`."""
    ranges = exported.range_constraints
    own = limited(exported)
    known: dict[Any, tuple[int, Any]] = {}
    for symbol, least in least_sizes(exported, layouts).items():
        low, high = own.get(symbol, (0, None))
        most = ranges[symbol].upper
        known[symbol] = max(least, low), most if high is None else min(most, sympy.Integer(high))
    news = {symbol: one for symbol, one in known.items() if one[0] < LEAST or symbol in own}
    with settings.ranges_from(_env(exported), news) if news else contextlib.nullcontext():
        yield known


def _env(exported: torch.export.ExportedProgram) -> Any:
    return next(size.node.shape_env for value in given(exported) if isinstance(value, torch.Tensor)
                for size in value.shape if isinstance(size, torch.SymInt))


def guards(exported: torch.export.ExportedProgram) -> list[Any]:
    """What torch.export took for granted of sizes, as formulas of symbols."""
    if not any(symbols(exported)):
        return []
    env = _env(exported)
    return list(dict.fromkeys(env.replace(guard.expr) for guard in env.guards))


def _holds(asked: Sequence[Any], values: Mapping[Any, int]) -> bool:
    return all(value_at(guard, values) == True for guard in asked)  # noqa: E712 of sympy


def _is_refused(asked: Sequence[Any], values: Mapping[Any, int]) -> bool:
    """Whether a call is refused by a guard of several sizes, such as that two tensors have as many elements, which the
    compiled program asks. Where guards of one size hold, its range says."""
    return any(is_of_several(guard) and value_at(guard, values) == False for guard in asked)  # noqa: E712 of sympy


def given(exported: torch.export.ExportedProgram) -> list[Any]:
    """The traced values of the user's inputs."""
    inputs = {node.name: node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"}
    return [inputs[name] for name in exported.graph_signature.user_inputs if name in inputs]
