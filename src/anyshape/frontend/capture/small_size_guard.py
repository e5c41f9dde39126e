"""The guard of small sizes (0/1 specialisation): guards the program for all sizes against sizes 0 and 1, where
PyTorch's own rules change.

A trace that does not single out 0 and 1 takes the general branch everywhere: `squeeze` keeps the dimension, `expand`
and broadcasting keep the stride, `reshape` copies. Where a size really is 0 or 1, be it of an input or of something
computed, that can be another program than eager PyTorch runs. So before a new pattern of small sizes runs for the first
time, the captured graph is run on shapes alone, at the real sizes. Every intermediate shape must be the one the trace
predicted, and what the caller can see must share memory as predicted. Otherwise the ordinary trace takes the call.
The same is done for each new order of strides where an input has strides of its own: a general trace cannot compare
them, and takes results to be dense.

A whole program refuses such a call itself. Of a part between graph breaks, Dynamo's guards ask it.
"""
from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from anyshape.base.errors import InputError
from anyshape.frontend.capture.meta_kernels import rules
from anyshape.frontend.messages.recompile_reasons import size_names
from anyshape.frontend.programs.session import Compilation, NotCovered
from anyshape.runtime.specialize.shape_binding import renamed
from anyshape.torch_compat import tree as pytree
from anyshape.torch_compat.tracing import settings, shape_propagation
from anyshape.torch_compat.versions import api

SMALL = 2
BATCH_NORM = (torch.batch_norm, torch.nn.functional.batch_norm)
TRAINING = 5  # the place of its argument that says so
# operators of routers: tensors whose sizes of dim 0 need have nothing to do with each other, 0 and 1 included
TAKES_ANY = ("anyshape_route.split_rows.default", "anyshape_route.split_like.default",
             "anyshape_route.merge_rows.default")
CTC = (torch.ctc_loss, torch.nn.functional.ctc_loss)
# parts of the names of what draws random numbers, in the order of memory: there the strides of every value count
DRAW_NAMES = ("rand", "dropout", "bernoulli", "normal", "uniform", "exponential", "cauchy", "geometric", "multinomial")
FORESEEN = 6  # different sizes up to which patterns are judged before a call has them
COMBINED = 3  # sizes up to which that is done for all combinations
JUDGED = 2 ** COMBINED - 1  # patterns that are judged so at most: each runs the graph on shapes


@dataclass(frozen=True, slots=True)
class SizeQuestions:
    """What a program for all sizes asks of each call.

    Args:
        inputs: how many the program has: i0, i1, ...
        when: Python over them: whether there is a small size.
        pattern: Python over them: which ones, as a tuple.
        covered: pattern -> whether the program serves it, as far as it is known.
    """
    inputs: int
    when: str
    pattern: str
    covered: dict[tuple[int, ...], bool]


def checked_program(gm: GraphModule, program: Callable[..., Any], compilation: Compilation) -> Callable[..., Any]:
    """`program`, which refuses a call (NotCovered) whose sizes 0 and 1 would make eager PyTorch take another path."""
    coverage = Coverage(gm, compilation)
    asked = coverage.questions([f"i{index}" for index in range(coverage.inputs)])
    if asked is None:
        return program
    return asking_program(SizeQuestions(coverage.inputs, *asked, coverage.covered), program, coverage.serves,
                          coverage.close)


def asking_program(questions: SizeQuestions, program: Callable[..., Any],
                   serves: Callable[[tuple[int, ...], tuple[Any, ...]], bool],
                   close: Callable[[tuple[int, ...], InputError], None]) -> Callable[..., Any]:
    """`program`, which refuses calls (NotCovered) by these questions.

    Args:
        serves: judges a pattern that is not known yet, with the inputs that have it.
        close: is told of a pattern with which the program refuses its inputs.
    """
    names = [f"i{index}" for index in range(questions.inputs)]

    def judge(pattern: tuple[int, ...], inputs: tuple[Any, ...]) -> None:
        if not serves(pattern, inputs):
            raise NotCovered("sizes 0 or 1 need another program")

    def refuse(pattern: tuple[int, ...], error: InputError) -> None:
        close(pattern, error)
        raise NotCovered("sizes need another program") from error

    # generated, because this runs at every call: one comparison for each size, nothing else
    boxed = getattr(program, "boxed", None)  # the same over a list
    called, run = (program, "program({})") if boxed is None else (boxed, "program([{}])")
    given = ", ".join(names)
    lines = [f"def run({given}):", f"    if {questions.when}:",
             f"        pattern = {questions.pattern}", "        if not covered.get(pattern):",
             f"            judge(pattern, ({given},))",
             "        try:", f"            return {run.format(given)}",
             "        except InputError as error:", "            refuse(pattern, error)",
             f"    return {run.format(given)}"]
    space: dict[str, Any] = {"covered": questions.covered, "judge": judge, "program": called, "refuse": refuse,
                             "order": _order, "InputError": InputError}
    exec(compile("\n".join(lines), "<sizes of a program>", "exec"), space)
    space["run"].questions, space["run"].made_of = questions, getattr(program, "made_of", None)
    return space["run"]  # type: ignore[no-any-return]


class PartCoverage:
    """The same for a part of a program. What came before it has run, so a call that its program does not serve has to
    be refused by Dynamo's guards, which then ask for another program of this part.

    Args:
        gm: the part's graph.
        names: the globals of its frame.

    Raises:
        NotCovered: its guards cannot ask that.
    """

    def __init__(self, gm: GraphModule, compilation: Compilation, names: dict[str, Any]) -> None:
        self.gm = gm
        self.coverage = Coverage(gm, compilation)
        self.sources = [api.source_of(node) for node in gm.graph.nodes if node.op == "placeholder"]
        if self.coverage.predicted.asks_data():
            raise NotCovered("sizes that only the data tell, between parts of a program")
        asked = self.coverage.questions(self.sources)
        self.guard: Callable[[Mapping[str, Any]], bool] | None = None
        if asked is None:
            return
        when, pattern = asked
        if any(not self.sources[index] for index in self.coverage.read):
            raise NotCovered("an input of a part of the program has no place that a guard could ask")
        space: dict[str, Any] = {"covered": self.coverage.covered, "judge": self._judge, "order": _order, "G": names}
        lines = ["def guard(L):", f"    if {when}:", f"        pattern = {pattern}",
                 "        return covered[pattern] if pattern in covered else judge(pattern, L, G)",
                 "    return True"]
        exec(compile("\n".join(lines), "<sizes of a part>", "exec"), space)
        self.guard = space["guard"]

    def _judge(self, pattern: tuple[int, ...], local: Mapping[str, Any], names: dict[str, Any]) -> bool:
        inputs = list(self.coverage.predicted.placeholders)
        for index in self.coverage.read:
            inputs[index] = eval(self.sources[index], {"L": local, "G": names})
        return self.coverage.serves(pattern, inputs)

    def program(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """`program`, which runs as PyTorch where it took sizes as equal of which one is 1; the next such call is
        refused by the guard."""
        names = [f"i{index}" for index in range(self.coverage.inputs)]
        asked = self.coverage.questions(names)
        if asked is None:
            return program
        when, pattern = asked
        space: dict[str, Any] = {"order": _order}
        given = ", ".join(names)
        exec(compile(f"def small({given}):\n    return {pattern} if {when} else None", "<sizes of a part>", "exec"),
             space)

        def run(*inputs: Any) -> Any:
            try:
                return program(*inputs)
            except InputError as error:
                found = space["small"](*inputs)
                if found is None:
                    raise
                self.coverage.close(found, error)
                return self.gm.forward(*inputs)

        return run


class Coverage:
    """Which patterns of small sizes the program of a trace serves.

    Attributes:
        predicted: the trace.
        covered: what is known, by pattern: each size, or 2 where it is more; and orders of strides.
        inputs: how many the graph has.
        read: those of them that have symbolic sizes or strides.
    """

    def __init__(self, gm: GraphModule, compilation: Compilation) -> None:
        self.predicted = PredictedShapes(gm)
        self.compilation = compilation
        examples = self.predicted.placeholders
        self.inputs = len(examples)
        self.strided = _strided(examples)
        self.read = [index for index, value in enumerate(examples) if index in self.strided or _has_symbols(value)]
        self.covered: dict[tuple[int, ...], bool] = {}
        self.names: list[str] | None = None
        self.words = {symbol: text for symbol, text, _ in size_names(gm)}

    def questions(self, texts: Sequence[str]) -> tuple[str, str] | None:
        """What asks whether a call is to be looked at, and its pattern, as Python over the `texts` of the inputs; None
        where no size is symbolic."""
        places = _size_texts(self.predicted.placeholders, self.read, texts)
        if not places and not self.strided:
            return None
        inner = self.predicted.small_texts(places)
        if self.names is None:
            self.names = [self.words.get(str(expression), str(expression)) for expression in places]
            self.names += [renamed(str(expression), self.words) for expression in inner]
            if not self.strided:
                self.covered.update(self.predicted.foreseen([*places, *inner]))
        sizes = [*places.values(), *inner.values()]
        pattern = ", ".join([*(f"{size} if {size} < {SMALL} else {SMALL}" for size in sizes),
                             *(f"order({texts[index]}.stride())" for index in self.strided)])
        return "True" if self.strided else " or ".join(f"{size} < {SMALL}" for size in sizes), f"({pattern},)"

    def serves(self, pattern: tuple[int, ...], inputs: Sequence[Any]) -> bool:
        """Whether the program gives what eager PyTorch does for calls of this pattern, of which one is at hand."""
        answer = self.covered.get(pattern)
        if answer is None:
            reason = self.predicted.differs(inputs, bool(self.strided))
            answer = self.covered[pattern] = not reason
            if reason:
                small = [f"{name} was {size}" for name, size in zip(self.names or (), pattern, strict=False)
                         if size < SMALL]
                self.compilation.record("trace", "small sizes" if small else "strides",
                                        f"{', '.join(small)}: {reason}" if small else reason)
        return answer

    def close(self, pattern: tuple[int, ...], error: InputError) -> None:
        """The trace took two sizes as equal, in broadcasting, and here one of them is 1; nothing has run yet."""
        self.covered[pattern] = False
        self.compilation.record("trace", "sizes that the general program takes as equal", error.why)


def _may_draw(node: Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op in ("call_function", "call_method") and any(part in name for part in DRAW_NAMES)


def _size_texts(examples: Sequence[Any], symbolic: Sequence[int], texts: Sequence[str]) -> dict[Any, str]:
    """Symbolic size -> where it is read, as Python over the `texts` of the inputs; equal sizes once, whole numbers
    first. Sizes that the trace made constants are not among them."""
    found: dict[Any, str] = {}
    for index in symbolic:
        if isinstance(examples[index], torch.SymInt) and examples[index].node.expr.free_symbols:
            found.setdefault(examples[index].node.expr, texts[index])
    for index in symbolic:
        if isinstance(examples[index], torch.Tensor):
            for dim, size in enumerate(examples[index].shape):
                if isinstance(size, torch.SymInt) and size.node.expr.free_symbols:
                    found.setdefault(size.node.expr, f"{texts[index]}.shape[{dim}]")
    return found


def _strided(examples: Sequence[Any]) -> list[int]:
    """Inputs whose strides are not made of sizes."""
    tensors = [value for value in examples if isinstance(value, torch.Tensor)]
    sizes = {symbol for value in tensors for size in value.shape if isinstance(size, torch.SymInt)
             for symbol in size.node.expr.free_symbols}
    return [index for index, value in enumerate(examples) if isinstance(value, torch.Tensor)
            and any(isinstance(stride, torch.SymInt) and stride.node.expr.free_symbols - sizes
                    for stride in value.stride())]


def _order(strides: Sequence[int]) -> tuple[int, ...]:
    """Which strides are larger than which: all that decides how results are laid out."""
    ranks = {stride: rank for rank, stride in enumerate(sorted(set(strides)), start=0 if 0 in strides else 1)}
    return tuple(ranks[stride] for stride in strides)


def _has_symbols(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, torch.SymInt)


class PredictedShapes:
    """The shapes that a trace predicted for every node of a graph."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.placeholders = [node.meta.get("example_value") for node in gm.graph.nodes if node.op == "placeholder"]
        self.inner = [value for node in gm.graph.nodes if node.op not in ("placeholder", "output")
                      for value in pytree.tree_leaves(node.meta.get("example_value"))]
        targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
        self.plain = all(shape_propagation.is_plain(value) for value in (*self.placeholders, *self.inner))
        self.reverse = any(map(api.is_of_reverse_mode, targets))
        self.plain = self.plain and not self.reverse and not any(map(api.is_of_vmap, targets))
        self.switches = [target for target in targets if api.changes_mode(target)
                         and not api.is_of_vmap(target) and not api.is_of_reverse_mode(target)]

    def asks_data(self) -> bool:
        """Whether some size is only known from the data."""
        return any(settings.found_later(size) for value in (*self.placeholders, *self.inner)
                   for size in (value.shape if isinstance(value, torch.Tensor) else (value,))
                   if isinstance(size, torch.SymInt))

    def small_texts(self, places: Mapping[Any, str]) -> dict[Any, str]:
        """Sizes of intermediate values that may be 0 or 1 although those of the inputs are not, as formulas and as
        Python text over the places of the inputs' sizes."""
        sizes = [size for value in self.inner if isinstance(value, torch.Tensor) for size in value.shape]
        found: dict[Any, str] = {}
        for size in {size.node.expr: size for size in sizes if isinstance(size, torch.SymInt)}.values():
            if size.node.expr not in places and api.may_be_small(size):
                text = api.size_text(size, {str(symbol): place for symbol, place in places.items()})
                if text:
                    found[size.node.expr] = text
        return found

    def differs(self, inputs: Sequence[Any], strides: bool = False) -> str:
        """Why these inputs cannot be served, or empty: every shape comes out as predicted, and so do the strides of
        every output, with `strides` also those of what draws random numbers in the order of memory."""
        if self.switches:
            return f"{self.switches[0].__name__} cannot be run on shapes alone"
        symbols = self._bind(inputs)
        if symbols is None:
            return "the sizes contradict each other"
        return self._run(symbols, inputs, strides)

    def foreseen(self, sizes: Sequence[Any]) -> dict[tuple[int, ...], bool]:
        """Patterns with more sizes of 1 than the first call had, for which all comes out as predicted, so that the
        first call that has one need not wait for the answer: all combinations where there are few, else one size at a
        time. Where there are many sizes, those that were equal in the first call change together. After sizes of 1 of
        inputs come those inside (one window of several pixels), JUDGED patterns in all. What the trace's guards refuse
        never comes here. Other answers are left to `differs`, which says them in the words of the call.
        """
        patterns: dict[tuple[int, ...], bool] = {}
        hints = settings.hints(self.placeholders)
        alike = [[symbol] for symbol, hint in hints.items() if hint >= SMALL]
        if len(alike) > COMBINED:
            alike = [[symbol for symbol, hint in hints.items() if hint == one]
                     for one in sorted({hint for hint in hints.values() if hint >= SMALL})]
        if self.switches or len(alike) > FORESEEN or not all(size.free_symbols <= hints.keys() for size in sizes):
            return patterns
        seen = {_pattern(sizes, hints)}
        for symbols in _smaller(alike, sizes, hints):
            if len(seen) > JUDGED:
                break
            try:
                pattern = _pattern(sizes, symbols)
            except ZeroDivisionError:  # what the program itself does with such sizes is for the call to say
                continue
            if pattern not in seen and settings.admitted(self.placeholders, symbols):
                seen.add(pattern)
                if not self._run(symbols, self.placeholders, False):
                    patterns[pattern] = True
        return patterns

    def differs_at(self, symbols: dict[Any, int], layouts: bool = True) -> str:
        """As `differs`, for values of the symbols instead of inputs. layouts: whether those of results matter."""
        return f"{self.switches[0].__name__} cannot be run on shapes alone" if self.switches else \
            self._run(symbols, self.placeholders, False, layouts)

    def _run(self, symbols: dict[Any, int], inputs: Sequence[Any], strides: bool, layouts: bool = True) -> str:
        """Why the shapes differ at these values of the symbols; `inputs` are real, or the trace's placeholders."""
        if not shape_propagation.can_run():
            return "this version of torch cannot run a program on shapes alone"
        sizes = TracedSizes(symbols)
        with shape_propagation.shapes_only(rules(), sizes.number, self.plain) as shapes:
            comparison = Compare(self.gm, sizes, shapes, strides, layouts)
            try:
                with settings.transforms_left(), torch.set_grad_enabled(self.reverse):
                    comparison.run(inputs)
                comparison.compare_memory()
            except Differs as difference:
                return str(difference).split("\n")[0]
            except Exception as error:  # the border: an op that refuses these sizes is eager PyTorch's to report
                return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"
            finally:
                comparison.leave_modes()
        return ""

    def _bind(self, inputs: Sequence[Any]) -> dict[Any, int] | None:
        symbols: dict[Any, int] = {}
        for example, value in zip(self.placeholders, inputs, strict=True):
            is_tensor = isinstance(example, torch.Tensor)
            pairs = zip((*example.shape, *example.stride()), (*value.shape, *value.stride()), strict=True) \
                if is_tensor else [(example, value)]
            for expected, found in pairs:
                if not isinstance(expected, torch.SymInt):
                    continue
                expression = expected.node.expr
                if expression.is_Symbol and symbols.setdefault(expression, int(found)) != int(found):
                    return None
        return symbols


def _pattern(sizes: Sequence[Any], symbols: Mapping[Any, int]) -> tuple[int, ...]:
    return tuple(min(int(size.xreplace(symbols)), SMALL) for size in sizes)


def _smaller(alike: Sequence[Sequence[Any]], sizes: Sequence[Any], hints: Mapping[Any, int]
             ) -> Iterator[dict[Any, int]]:
    """Values of the symbols with some of the groups `alike` smaller than their `hints`: first those that are 1, then
    also those at which one of `sizes` is 1 that is computed from a symbol of the group."""
    inner = [sorted({value for size in sizes for symbol in group if size.free_symbols == {symbol}
                     if (value := _least(size, symbol, hints[symbol])) is not None} - {1}) for group in alike]
    for within in (False, any(inner)):
        for together in range(1, 1 + (len(alike) if len(alike) <= COMBINED else 1)):
            for chosen in combinations(range(len(alike)), together):
                for values in product(*([1, *inner[index]] if within else [1] for index in chosen)):
                    yield {**hints, **{symbol: value for index, value in zip(chosen, values, strict=True)
                                       for symbol in alike[index]}}


def _least(size: Any, symbol: Any, most: int) -> int | None:
    """The least value of the symbol, below `most`, at which the size is 1, if it grows with the symbol."""
    try:
        found = bisect_left(range(1, most), 1, key=lambda value: int(size.xreplace({symbol: value}))) + 1
        return found if found < most and size.xreplace({symbol: found}) == 1 else None
    except ZeroDivisionError:
        return None


def _sharing(values: Mapping[Node, Any]) -> dict[Node, frozenset[Node]]:
    """Which nodes have a tensor in the same memory as each node."""
    keys = {node: [key for one in pytree.tree_leaves(value) if (key := api.storage_key(one)) is not None]
            for node, value in values.items()}
    owners: dict[int, set[Node]] = {}
    for node, own in keys.items():
        for key in own:
            owners.setdefault(key, set()).add(node)
    return {node: frozenset().union(*(owners[key] for key in own)) for node, own in keys.items()}


def _tensors(value: Any) -> list[Any]:
    return [value] if isinstance(value, torch.Tensor) else \
        [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]


def _takes_shapes_as_they_are(target: Any, operands: Sequence[Any]) -> bool:
    """Operators of one tensor, masks, ctc_loss and a router's split do not stretch a size of 1 where nobody can see
    it."""
    return len(operands) < 2 or (target is operator.getitem and len(operands) == 2) or target in CTC \
        or str(target) in TAKES_ANY


class Differs(Exception):
    """A shape is not the predicted one."""


class TracedSizes:
    """The numbers of traced sizes at given values of the symbols."""

    def __init__(self, symbols: dict[Any, int]) -> None:
        self.symbols = symbols
        self.known: dict[Any, int] = {}

    def number(self, size: Any) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        formula = size.node.expr
        found = self.known.get(formula)
        if found is None:
            if formula.free_symbols - self.symbols.keys():
                raise Differs("a number is only known from the data")
            found = self.known[formula] = int(formula.xreplace(self.symbols))
        return found


class Compare:
    """Runs a captured graph on shapes and compares each with the prediction."""

    def __init__(self, gm: GraphModule, sizes: TracedSizes, shapes: shape_propagation.Shapes, strides: bool,
                 layouts: bool = True) -> None:
        self.gm = gm
        self.sizes = sizes
        self.shapes = shapes
        self.strides, self.layouts = strides, layouts
        self.draws = strides and any(_may_draw(node) for node in gm.graph.nodes)
        self.unknown = shape_propagation.unknown_results()
        self.returned = set(gm.graph.output_node().all_input_nodes)
        self.entered: list[Any] = []
        self.values: dict[Node, Any] = {}
        self.changed: dict[Node, int] = {}  # in place, and how many values there were then

    def leave_modes(self) -> None:
        """Leaves the autocast regions that a run, stopped in the middle, is still in."""
        while self.entered:
            api.EXIT_AUTOCAST(self.entered.pop())

    def run(self, inputs: Sequence[Any]) -> None:
        given = iter(inputs)
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self.shapes.of(next(given))
            elif node.op == "get_attr":
                self.values[node] = self.shapes.of(api.attribute_of(self.gm, node.target))
            elif node.op != "output":
                self.values[node] = self.step(node)

    def step(self, node: Node) -> Any:
        """The result of a call on shapes, which is as predicted."""
        found = self._result(node)
        self._compare(node, node.meta.get("example_value"), found)
        return found

    def _result(self, node: Node) -> Any:
        arguments, keywords = map_arg((node.args, node.kwargs), self.values.__getitem__)
        operands = [(one, value) for one in node.all_input_nodes for value in _tensors(self.values[one])]
        target: Any = self.gm.get_submodule(str(node.target)) if node.op == "call_module" else node.target
        if api.is_about_hooks(target):  # no shape depends on them, and a run that is stopped would not end it
            return arguments[0] if arguments else None  # a tensor with a hook on its gradient is that tensor
        if target is torch.autograd.grad:  # each has the shape of what it is the gradient of
            wanted = arguments[1] if isinstance(arguments[1], (list, tuple)) else (arguments[1],)
            return tuple(None if expected is None else self.shapes.empty(list(one.shape), one)
                         for one, expected in zip(wanted, node.meta["example_value"], strict=True))
        if target in BATCH_NORM and any(not value.numel() for _, value in operands[:1]) \
                and (*arguments[TRAINING:TRAINING + 1], keywords.get("training", False))[0]:
            raise Differs(f"{node.name} has statistics of nothing, which eager PyTorch does not take")
        try:
            found, changed = self.shapes.call(target, arguments, keywords)
        except self.unknown:
            if not _takes_shapes_as_they_are(target, operands):
                raise
            return self.chosen(node.meta.get("example_value"))
        self.changed.update((one, len(self.values)) for one, value in operands
                            if any(value is other for other in changed))
        if target is api.ENTER_AUTOCAST:
            self.entered.append(found)
        elif target is api.EXIT_AUTOCAST:
            self.entered.remove(arguments[0])
        return found

    def chosen(self, expected: Any) -> Any:
        """A result whose sizes the data decide: as predicted, with the least number from SMALL on that is in its range
        (calls that find a smaller one are refused where they find it). Such results are in memory of their own."""
        def made(value: Any) -> Any:
            if isinstance(value, torch.SymInt):
                later = settings.found_later(value)
                for symbol in value.node.expr.free_symbols:  # of `k.item()`, for an input k: the trace knew its value
                    self.sizes.symbols.setdefault(symbol, max(SMALL, later.get(symbol, SMALL)))
                return self.sizes.number(value)
            if isinstance(value, torch.Tensor):
                return self.shapes.empty([made(size) for size in value.shape], value)
            if value is None or type(value) is int:
                return value
            raise Differs("a number that is only known from the data")

        return pytree.tree_map(made, expected)

    def compare_memory(self) -> None:
        """What shares memory with what is changed in place later must do so as predicted, and so must inputs and
        results with each other. (That `dropout` hands on what nobody else sees is no difference.)"""
        seen = {node for node in self.values if node.op == "placeholder"} | self.returned
        made = {node: number for number, node in enumerate(self.values)}
        nodes = [node for node in self.values if self.changed or node in seen]
        expected = _sharing({node: node.meta.get("example_value") for node in nodes})
        found = _sharing({node: self.values[node] for node in nodes})
        for node in nodes:
            last = max((self.changed.get(one, -1) for one in expected[node] | found[node]), default=-1)
            if any(last > max(made[node], made[one]) or (node in seen and one in seen)
                   for one in expected[node] ^ found[node]):
                raise Differs(f"{node.name} shares memory with other values than in the general program")

    def _compare(self, node: Node, expected: Any, found: Any) -> None:
        if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
            if any(settings.found_later(size).keys() - self.sizes.symbols.keys() for size in expected.shape
                   if isinstance(size, torch.SymInt)):
                raise Differs(f"{node.name} has shape {list(found.shape)}, whatever the data")
            shape = [self.sizes.number(size) for size in expected.shape]
            if shape != list(found.shape):
                raise Differs(f"{node.name} has shape {list(found.shape)}, the general program gives {shape}")
            if self.draws or (node in self.returned and self.layouts):
                self._compare_strides(node, expected, found)
        elif isinstance(expected, (torch.SymInt, int)):
            if self.sizes.number(expected) != found:
                raise Differs(f"{node.name} is {found}, the general program gives {self.sizes.number(expected)}")
        elif isinstance(expected, (tuple, list)) and isinstance(found, (tuple, list)):
            if len(expected) != len(found):
                raise Differs(f"{node.name} has {len(found)} parts, the general program gives {len(expected)}")
            for one, other in zip(expected, found, strict=True):
                self._compare(node, one, other)

    def _compare_strides(self, node: Node, expected: torch.Tensor, found: torch.Tensor) -> None:
        if not self.strides and not found.is_contiguous():
            return  # a result that is contiguous in eager PyTorch must be, for `view`; another order changes nothing
        strides = [self.sizes.number(stride) for stride in expected.stride()]
        pairs = zip(found.shape, strides, found.stride(), strict=True)
        if found.numel() and any(a != b for size, a, b in pairs if size != 1):
            raise Differs(f"{node.name} has strides {list(found.stride())}, the general program gives {strides}")
