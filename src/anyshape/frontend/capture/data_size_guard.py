"""The guard of small sizes that are found in the data (0/1 specialisation of unbacked symbols).

    a, b = split_rows(rows, ends)     a: [u0, 8], b: [u1, 8]
    y = a.squeeze(0)                  the trace: [u0, 8]; eager PyTorch where u0 is 1: [8]
    z = b * 2                         the same for all sizes

The captured graph is run on shapes alone at the sizes that were found, as `small_size_guard.py` does for the sizes of
inputs. Symbols that meet in no call, such as the loads of a router's branches, are judged apart: what was learned of
one branch that got no cell, or one, holds whatever the others get. So a few runs answer for all loads.
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from anyshape.frontend.capture.meta_kernels import rules
from anyshape.frontend.capture.small_size_guard import SMALL, TAKES_ANY, Compare, Differs, PredictedShapes, TracedSizes
from anyshape.frontend.programs.split_program import ASSERTS
from anyshape.torch_compat import tree as pytree
from anyshape.torch_compat.tracing import settings, shape_propagation
from anyshape.torch_compat.versions import api

MOST = 4096  # patterns of all sizes together that are remembered


class DataSizeGuard:
    """Judges sizes of one captured graph.

    Attributes:
        predicted: the trace.
        groups: symbols of the data that meet somewhere, by symbol: the first of them stands for all.
        plain: no formula is small where no symbol is.
        answers: (group, pattern of its sizes, pattern of the inputs' sizes) -> why not, or empty.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.predicted = PredictedShapes(gm)
        self.symbols = {str(symbol): symbol for value in (*self.predicted.placeholders, *self.predicted.inner)
                        for size in _sizes(value) for symbol in size.node.expr.free_symbols}
        self.groups = _groups(gm)
        sizes_of = self._sizes_of_groups()
        self.patterns = {group: self._pattern(sizes) for group, sizes in sizes_of.items()}
        self.plain = all(size.node.expr.is_Symbol for sizes in sizes_of.values() for size in sizes)
        self.answers: dict[Any, str] = {}
        self.seen: set[Any] = set()

    def _sizes_of_groups(self) -> dict[str, list[torch.SymInt]]:
        """The sizes whose being small matters: the symbols, and formulas that may be small where no symbol is."""
        found: dict[str, dict[Any, torch.SymInt]] = {group: {} for group in self.groups.values()}
        for value in self.predicted.inner:
            for size in _sizes(value):
                names = settings.found_later(size)
                if names and (size.node.expr.is_Symbol or api.may_be_small(size)):
                    found[self.groups[str(next(iter(names)))]].setdefault(size.node.expr, size)
        return {group: list(sizes.values()) for group, sizes in found.items()}

    def _pattern(self, sizes: list[torch.SymInt]) -> Callable[[Mapping[str, int]], tuple[Any, ...]]:
        """What tells patterns of these sizes apart: each, or 2 where it is more, or None where it is not yet known."""
        plain = [str(size.node.expr) for size in sizes if size.node.expr.is_Symbol]
        formulas = [size for size in sizes if not size.node.expr.is_Symbol]
        needed = [{str(symbol) for symbol in size.node.expr.free_symbols} for size in formulas]

        def pattern(numbers: Mapping[str, int]) -> tuple[Any, ...]:
            found = [None if name not in numbers else min(numbers[name], SMALL) for name in plain]
            found += [min(api.number_of(size, dict(numbers)), SMALL) if names <= numbers.keys() else None
                      for size, names in zip(formulas, needed, strict=True)]
            return tuple(found)

        return pattern

    def refusal(self, numbers: Mapping[str, int]) -> str:
        """See session.DataSizes."""
        together = tuple([number if number < SMALL else SMALL for number in numbers.values()])
        if together in self.seen:
            return ""
        keys = self._keys(numbers)
        if keys and not self.answers:  # the same small size everywhere answers for most loads to come
            for number in range(SMALL):
                alike = {name: number if name in self.groups else known for name, known in numbers.items()}
                self._judge(alike, self._keys(alike))
        if any(key not in self.answers for key in keys.values()):
            self._judge(numbers, keys)
        for key in keys.values():
            if self.answers[key]:
                return self.answers[key]
        if self.plain and len(self.seen) < MOST:
            self.seen.add(together)
        return ""

    def _keys(self, numbers: Mapping[str, int]) -> dict[str, Any]:
        """What tells the answer for each group that has a small size."""
        of_inputs = tuple(min(number, SMALL) for name, number in numbers.items() if name not in self.groups)
        patterns = {group: pattern(numbers) for group, pattern in self.patterns.items()}
        return {group: (group, pattern, of_inputs) for group, pattern in patterns.items()
                if any(size is not None and size < SMALL for size in pattern)}

    def _judge(self, numbers: Mapping[str, int], keys: Mapping[str, Any]) -> None:
        """Runs the graph on shapes, and writes down what was found of every group with a small size."""
        predicted = self.predicted
        if predicted.switches or not shape_propagation.can_run():
            self.answers.update(dict.fromkeys(keys.values(), "it cannot be run on shapes alone"))
            return
        sizes = TracedSizes({self.symbols[name]: number for name, number in numbers.items() if name in self.symbols})
        with shape_propagation.shapes_only(rules(), sizes.number, predicted.plain) as shapes:
            comparison = _CompareEach(predicted.gm, sizes, shapes, False, self.groups)
            try:
                comparison.run(predicted.placeholders)
                reason = "" if comparison.failed else comparison.memory()
            finally:
                comparison.leave_modes()
        for group, key in keys.items():
            why = comparison.failed.get(group, "") or comparison.failed.get("", "") or reason
            if why or not comparison.failed:
                self.answers[key] = why
            else:
                self.answers.setdefault(key, "")


def asks_data(gm: GraphModule) -> bool:
    """Whether some size of a captured graph is only known from the data."""
    return any(True for node in gm.graph.nodes for _ in _names(node))


def _groups(gm: GraphModule) -> dict[str, str]:
    """By symbol of the data, the first of those that it meets in a call; calls that take parts of any sizes aside."""
    first: dict[str, str] = {}

    def of(name: str) -> str:
        while first.setdefault(name, name) != name:
            name = first[name]
        return name

    for node in gm.graph.nodes:
        for name in _names(node):
            of(name)
        names = _meeting(node)
        for name in names[1:]:
            first[of(name)] = of(names[0])
    return {name: of(name) for name in list(first)}


def _meeting(node: Node) -> list[str]:
    """The symbols that meet in a call."""
    if node.op == "output" or str(node.target) in TAKES_ANY:
        return []
    values = [node, *(one for one in node.all_input_nodes if str(one.target) not in TAKES_ANY)]
    return [name for value in values for name in _names(value)]


def _names(node: Node) -> Iterator[str]:
    for value in pytree.tree_leaves(node.meta.get("example_value")):
        for size in _sizes(value):
            yield from map(str, settings.found_later(size))


def _sizes(value: Any) -> Iterator[torch.SymInt]:
    for size in value.shape if isinstance(value, torch.Tensor) else (value,):
        if isinstance(size, torch.SymInt):
            yield size


def _bounds(part: slice) -> list[Node]:
    return [one for one in (part.start, part.stop) if isinstance(one, Node)]


class _CompareEach(Compare):
    """Compares all nodes, whatever came before: after a difference the prediction stands.

    failed: group -> what differs; "" for nodes of none.
    """

    def __init__(self, gm: GraphModule, sizes: TracedSizes, shapes: shape_propagation.Shapes, strides: bool,
                 groups: Mapping[str, str]) -> None:
        super().__init__(gm, sizes, shapes, strides)
        self.groups = groups
        self.failed: dict[str, str] = {}

    def step(self, node: Node) -> Any:
        if str(node.target) in ASSERTS:
            return None  # the program itself checks them
        if node.target is torch.ops.aten.sym_size.int:
            operand, dim = node.args
            return self.values[operand].shape[dim]  # type: ignore[index]
        try:
            found = self._slice_of_data(node)
            return super().step(node) if found is None else found
        except Differs as difference:
            why = str(difference)
        except Exception as error:  # the border: an op that refuses these sizes is eager PyTorch's to report
            why = f"{type(error).__name__}: {error}"
        for group in {self.groups[name] for name in _meeting(node)} or {""}:
            self.failed.setdefault(group, why.strip().split("\n")[0])
        return self.chosen(node.meta.get("example_value"))

    def _slice_of_data(self, node: Node) -> Any:
        """The result of `x[k:k + 2]` whose bounds the data decide: as many rows as are asked about, of the same memory,
        wherever they begin. None: it is no such slice."""
        expected = node.meta.get("example_value")
        if node.target is not operator.getitem or not isinstance(expected, torch.Tensor):
            return None
        key = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        if not all(isinstance(part, slice) and part.step in (None, 1) for part in key):
            return None
        of_data = [isinstance(size, torch.SymInt) and bool(settings.found_later(size)) and bool(_bounds(part))
                   for part, size in zip(key, expected.shape)]
        if not any(of_data):
            return None
        numbers = map_arg(key, self.values.__getitem__)
        parts = [slice(0, self.sizes.number(size)) if own else part
                 for own, part, size in zip(of_data, numbers, expected.shape)]
        found = self.values[node.args[0]][tuple(parts)]  # type: ignore[index]
        self._compare(node, expected, found)
        return found

    def memory(self) -> str:
        """Why the memory is not as predicted, or empty."""
        try:
            self.compare_memory()
        except Differs as difference:
            return str(difference).split("\n")[0]
        return ""
