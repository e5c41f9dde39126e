"""A partitioned program at run time: compiled parts, calls that PyTorch runs, and the cuts at the branches of a router.

Values stand in numbered slots, and each goes as soon as nothing needs it. `split_rows` gives views of rows that the
program has made, for nothing writes into what parts are given. A part on the rows of a branch that has none is not run
where all that it gives is as empty.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Union

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from anyshape.base.errors import DataError, InputError, Unsupported
from anyshape.frontend.programs.session import Boxed, NotCovered, ProgramRequest
from anyshape.frontend.symbols.symint import SymIntImporter
from anyshape.runtime.memory.tape import tape_get
from anyshape.sym.expr import Size, evaluate
from anyshape.torch_compat import OpOverload, aten, gives_view
from anyshape.torch_compat import tree as pytree
from anyshape.torch_compat.tracing import settings
from anyshape.torch_compat.versions import api
from anyshape.torch_compat.versions.random_state import RandomState
from anyshape.torch_compat.versions.side_effects import has_effect

MOST = 4096  # patterns of small sizes that are remembered
SMALL = 2  # sizes below have rules of their own in eager PyTorch; a general trace does not follow them
FOUND = "anyshape.assert_found.default"  # frontend.programs.found_numbers.py
ASSERTS = ("aten._assert_scalar.default", "aten.sym_constrain_range_for_size.default",
           "aten.sym_constrain_range.default", FOUND)
OF_THE_TRACER = "Runtime assertion failed for expression"  # how messages begin that the user has not written
SPLITS = ("anyshape_route.split_rows.default", "anyshape_route.split_like.default")
MERGE = "anyshape_route.merge_rows.default"


@dataclass(eq=False)
class GraphPart:
    """Nodes that are compiled together.

    gm: the nodes as a graph of its own. inputs, outputs: nodes of the whole graph. origin: node of gm -> of the whole.
    """

    nodes: list[Node]
    gm: GraphModule
    inputs: list[Node]
    outputs: list[Node]
    origin: dict[Node, Node]
    program: Boxed | None = field(default=None)


Step = Union[GraphPart, Node]


# ---- what nodes say


def is_number(value: Any) -> bool:
    """Whether a traced value is a number, known or not."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, bool, int, float))


def decides_by_data(node: Node) -> bool:
    """Whether a call is of an operator that reads a number, or whose data decide the sizes of its result."""
    tags = node.target.tags if isinstance(node.target, OpOverload) else ()
    return torch.Tag.dynamic_output_shape in tags or node.target is aten._local_scalar_dense.default


def symbols_written(node: Node) -> set[str]:
    """The symbols of what such a call gives, those too that the trace has taken for numbers since."""
    found: set[str] = set()
    for value in pytree.tree_leaves(node.meta.get("val")):
        for one in value.shape if isinstance(value, torch.Tensor) else (value,):
            if hasattr(one, "node"):
                found |= settings.symbols_as_written(one)
    return found


def note_symbol(node: Node, symbols: dict[str, Node]) -> None:
    """Puts a node that is one symbol into the table."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
        symbols.setdefault(str(value.node.expr), node)


def symbols_of(nodes: list[Node]) -> set[str]:
    """The symbols in the sizes, strides and numbers of nodes."""
    found: set[str] = set()

    def visit(value: Any) -> None:
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            found.update(str(symbol) for symbol in value.node.expr.free_symbols)
        elif isinstance(value, torch.Tensor) and value.layout == torch.strided:
            for size in (*value.shape, *value.stride()):
                visit(size)
        elif isinstance(value, (tuple, list)):
            for item in value:
                visit(item)

    for node in nodes:
        visit(node.meta.get("val"))
    return found


def _data_sizes(traced: Any, real: Any) -> Iterator[tuple[str, int]]:
    """(symbol, size) wherever a traced result has a symbol without a value."""
    if isinstance(traced, torch.SymInt):
        if api.is_unbacked(str(traced.node.expr)):
            yield str(traced.node.expr), int(real)
    elif isinstance(traced, torch.Tensor):
        for size, number in zip(traced.shape, real.shape, strict=True):
            yield from _data_sizes(size, number)
    elif isinstance(traced, (tuple, list)):
        for one, other in zip(traced, real, strict=True):
            yield from _data_sizes(one, other)


def _dims_differ(traced: Any, real: Any) -> bool:
    if isinstance(traced, (tuple, list)):
        return any(map(_dims_differ, traced, real))
    return isinstance(traced, torch.Tensor) and traced.dim() != real.dim()


def _formula(formulas: SymIntImporter, dim: torch.SymInt) -> Size | torch.SymInt:
    """Our form of a size, or the size itself where it has none."""
    try:
        return formulas.size(dim)
    except Unsupported:
        return dim


def _number(size: Size | torch.SymInt, numbers: Mapping[str, Any]) -> int:
    return api.number_of(size, numbers) if isinstance(size, torch.SymInt) else evaluate(size, numbers)


Small = tuple[list[str], list[Union[Size, torch.SymInt]]]


def _sizes_from_data(nodes: list[Node], calls: list[Node]) -> dict[Node, Small]:
    """The sizes of tensors that can be told after each call whose results the data decide: symbols, and formulas that
    may be small where no symbol is. A general trace takes them to be 2 or more."""
    origin = {name: node for node in reversed(calls) for name in symbols_of([node]) if api.is_unbacked(name)}
    order = {node: place for place, node in enumerate(calls)}
    formulas = SymIntImporter()
    found: dict[Node, Small] = {}
    seen: set[Any] = set()
    for node in nodes:
        for dim in _dims(node.meta.get("val")):
            expression = dim.node.expr
            names = {str(symbol) for symbol in expression.free_symbols} & origin.keys()
            if not names or expression in seen:
                continue
            seen.add(expression)
            last = max((origin[name] for name in names), key=order.__getitem__)
            symbols, others = found.setdefault(last, ([], []))
            if expression.is_Symbol:
                symbols.append(str(expression))
            elif api.may_be_small(dim):
                others.append(_formula(formulas, dim))
    return found


def _dims(value: Any) -> Iterator[torch.SymInt]:
    for tensor in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(tensor, torch.Tensor):
            yield from (size for size in tensor.shape if isinstance(size, torch.SymInt))


# ---- steps of a run


class _RunPart:
    """A compiled part. load: the slot of the size that, being 0, makes all results empty; -1 where none does."""

    __slots__ = ("inputs", "load", "outputs", "program", "shapes")

    def __init__(self, part: GraphPart, slots: dict[Node, int], symbols: Mapping[str, Node]) -> None:
        assert part.program is not None
        self.program = part.program
        self.inputs = [slots[node] for node in part.inputs]
        self.outputs = [slots[node] for node in part.outputs]
        self.load, self.shapes = -1, list[tuple[tuple[int, ...], torch.dtype, torch.device]]()
        name = _load_of(part)
        if name in symbols and symbols[name] in slots:
            self.load = slots[symbols[name]]
            self.shapes = [((0, *one.meta["val"].shape[1:]), one.meta["val"].dtype, one.meta["val"].device)
                           for one in part.outputs]

    def __call__(self, values: list[Any]) -> None:
        if self.load >= 0 and values[self.load] == 0:
            for slot, (shape, dtype, device) in zip(self.outputs, self.shapes, strict=True):
                values[slot] = torch.empty(shape, dtype=dtype, device=device)
            return
        found = self.program([values[slot] for slot in self.inputs])
        if len(found) == 1:
            values[self.outputs[0]] = found[0]
            return
        for slot, value in zip(self.outputs, found, strict=True):
            values[slot] = value


def _load_of(part: GraphPart) -> str:
    """The symbol that is dim 0 of all that a part without effects gives, whose other sizes are numbers; or empty."""
    loads = set()
    for node in part.outputs:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.dim() or not isinstance(value.shape[0], torch.SymInt) \
                or not all(type(size) is int for size in (*value.shape[1:], *value.stride())) \
                or list(value.stride()) != [math.prod(value.shape[dim + 1:]) for dim in range(value.dim())]:
            return ""
        loads.add(str(value.shape[0].node.expr))
    if len(loads) != 1 or any(has_effect(node.target) for node in part.nodes):
        return ""
    return loads.pop()


class _RunSplit:
    """The rows of each branch, as views, with the sizes that the trace reads off them. own: branches whose rows leave
    the program, and get memory of their own."""

    __slots__ = ("count", "ends", "own", "parts", "rows", "sizes")

    def __init__(self, rows: int, ends: int, count: int) -> None:
        self.rows, self.ends, self.count = rows, ends, count
        self.parts: list[tuple[int, int]] = []  # branch, slot
        self.sizes: list[tuple[int, int]] = []
        self.own: set[int] = set()

    def __call__(self, values: list[Any]) -> None:
        rows, begin = values[self.rows], 0
        sizes = []
        for end in values[self.ends].tolist():
            sizes.append(end - begin)
            begin = end
        parts = rows.split_with_sizes([*sizes, rows.shape[0] - begin])
        for branch, slot in self.parts:
            values[slot] = parts[branch].clone() if branch in self.own else parts[branch]
        for branch, slot in self.sizes:
            values[slot] = sizes[branch]


class _RunMerge:
    """The rows of all branches as one tensor: those of one branch as they are where they are all, for nothing writes
    into what steps are given. may_share: no result of the program lies in this memory."""

    __slots__ = ("ends", "may_share", "parts", "rows", "slot", "target")

    def __init__(self, node: Node, slots: dict[Node, int], may_share: bool) -> None:
        self.target, self.slot, self.may_share = node.target, slots[node], may_share
        parts, ends, rows = node.args
        self.parts = [slots[one] for one in parts]  # type: ignore[index,union-attr]
        self.ends = slots[ends]  # type: ignore[index]
        self.rows = (slots[rows], 0) if isinstance(rows, Node) else (-1, rows)

    def __call__(self, values: list[Any]) -> None:
        parts, (slot, rows) = [values[one] for one in self.parts], self.rows
        rows = values[slot] if slot >= 0 else rows
        if self.may_share:
            filled = [part for part in parts if part.shape[0]]
            if len(filled) == 1 and filled[0].shape[0] == rows and filled[0].is_contiguous():
                values[self.slot] = filled[0]
                return
        values[self.slot] = self.target(parts, values[self.ends], rows)  # type: ignore[operator]


class _RunCall:
    """A call that PyTorch runs, or Python."""

    __slots__ = ("arguments", "node", "slot", "slots", "target")

    def __init__(self, node: Node, slots: dict[Node, int]) -> None:
        self.node, self.target, self.slot, self.slots = node, node.target, slots[node], slots
        # places of operands where they stand one by one, which is nearly always
        self.arguments = None if node.kwargs or any(isinstance(one, (tuple, list, dict, slice)) for one in node.args) \
            else [(slots[one], None) if isinstance(one, Node) else (-1, one) for one in node.args]

    def __call__(self, values: list[Any]) -> None:
        if self.arguments is not None:
            values[self.slot] = self.target(*[values[slot] if slot >= 0 else constant  # type: ignore[operator]
                                              for slot, constant in self.arguments])
            return
        at, slots, node = values.__getitem__, self.slots, self.node
        values[self.slot] = self.target(*map_arg(node.args, lambda one: at(slots[one])),  # type: ignore[operator]
                                        **map_arg(node.kwargs, lambda one: at(slots[one])))


Run = Callable[[list[Any]], None]


# ---- the program


class SplitProgram:
    """Runs the steps in order. Called with one list of inputs, which it empties; returns the list of outputs.

    Raises (when called): NotCovered: a program for all sizes met a size 0 or 1 in the data for which eager PyTorch
    would go another way, or data that its trace does not take; nothing that the caller can see has changed.
    """

    _boxed_call = True

    def __init__(self, request: ProgramRequest, steps: list[Step], found: list[Node]) -> None:
        """found: the calls whose results have sizes that only the data tell."""
        nodes = list(request.gm.graph.nodes)
        self.name = request.name
        self.compilation = request.compilation
        self.refused = False
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        self.results = request.gm.graph.output_node().args[0]
        self.saves = request.role != "inference"  # what the caller may change before the backward is saved apart
        self.takes_tape = request.role == "backward" and request.tape is not None
        self.general = request.compilation.tracing[2] in ("all sizes", "one graph") and request.role != "backward"
        self.judge = request.compilation.data_sizes.get(request.name.partition(".")[0]) if self.general else None
        symbols: dict[str, Node] = {}
        for node in (*self.placeholders, *(step for step in steps if isinstance(step, Node))):
            note_symbol(node, symbols)
        self.steps = _needed(steps, self._returned(), symbols if self.general else {}, _sizes_of(found))
        self.slots = {node: slot for slot, node in enumerate(nodes)}
        self.symbols = {name: self.slots[node] for name, node in symbols.items()
                        if node.op == "placeholder" or node in self.steps}
        # floats that are read from tensors, of which sizes may be made
        self.floats = {str(node.meta["val"].node.expr): self.slots[node] for node in found
                       if isinstance(node.meta.get("val"), torch.SymFloat)}
        self.fixed = {self.slots[node]: api.attribute_of(request.gm, str(node.target)) for node in nodes
                      if node.op == "get_attr"}
        self.small: dict[Any, Small] = _sizes_from_data(nodes, found) if self.general else {}
        self.sized = {step: [self.symbols[name] for name in symbols] for step, (symbols, formulas) in self.small.items()
                      if not formulas and all(name in self.symbols for name in symbols)}
        self.given = [self.slots[node] for node in self.placeholders if self._is_symbol(node)]
        self.patterns: dict[Any, int] = {}
        self.draws = any(has_effect(node.target) for node in nodes)
        self.runs = self._runs(symbols)

    @property
    def calls(self) -> tuple[str, ...]:
        """The operators that run as PyTorch."""
        return tuple(str(step.target) for step in self.steps
                     if isinstance(step, Node) and isinstance(step.target, OpOverload)
                     and not is_number(step.meta.get("val"))
                     and str(step.target) not in (*ASSERTS, *SPLITS, MERGE))

    def _returned(self) -> list[Node]:
        found: list[Node] = []
        map_arg(self.results, found.append)
        return found

    def _runs(self, symbols: Mapping[str, Node]) -> list[tuple[Run, list[int], Step, bool]]:
        """Each step with what runs it, the slots that nothing needs after it, and whether it finds sizes to check."""
        slots, returned = self.slots, set(self._returned())
        apart = None if self.saves else _merges_returned(returned)
        splits: dict[Node, _RunSplit] = {}
        branch: dict[Node, tuple[Node, int]] = {}
        runs: list[tuple[Run, Step, list[Node]]] = []
        for step in self.steps:
            if isinstance(step, GraphPart):
                runs.append((_RunPart(step, slots, symbols), step, [*step.inputs, *step.outputs]))
                continue
            known = all(name in self.symbols for name in self.small.get(step, ((), ()))[0])
            if str(step.target) in SPLITS and step not in returned and known \
                    and all(user.target is operator.getitem for user in step.users):
                splits[step] = run = _RunSplit(slots[step.args[0]], slots[step.args[1]],  # type: ignore[index]
                                               len(step.meta["val"]))
                runs.append((run, step, [*step.all_input_nodes, *step.users, *_lengths(step)]))
                continue
            if str(step.target) == MERGE:
                run_merge = _RunMerge(step, slots, apart is not None and step not in apart and not _is_kept(step))
                runs.append((run_merge, step, [*step.all_input_nodes, step]))
                continue
            source = step.args[0] if step.args else None
            if source in splits and step.target is operator.getitem:
                branch[step] = source, step.args[1]  # type: ignore[assignment]
                splits[source].parts.append((step.args[1], slots[step]))  # type: ignore[arg-type,index]
                if step in returned or _is_kept(step) or not _is_fresh(source.args[0]):  # type: ignore[union-attr]
                    splits[source].own.add(step.args[1])  # type: ignore[arg-type,index]
            elif source in branch and str(step.target) == "aten.sym_size.int" and step.args[1] == 0:
                split, place = branch[source]  # type: ignore[index]
                splits[split].sizes.append((place, slots[step]))
            else:
                runs.append((_RunCall(step, slots), step, [*step.all_input_nodes, step]))
        return self._with_last_uses(runs, returned)

    def _with_last_uses(self, runs: list[tuple[Run, Step, list[Node]]],
                        returned: set[Node]) -> list[tuple[Run, list[int], Step, bool]]:
        seen = set(returned)
        found: list[tuple[Run, list[int], Step, bool]] = []
        for run, step, used in reversed(runs):
            last = [self.slots[node] for node in dict.fromkeys(used)
                    if node not in seen and node.op != "get_attr" and not self._is_symbol(node)]
            found.append((run, last, step, step in self.small))
            seen.update(used)
        return found[::-1]

    def _is_symbol(self, node: Node) -> bool:
        slot = self.slots[node]
        return is_number(node.meta.get("val")) and (slot in self.symbols.values() or slot in self.floats.values())

    def __call__(self, inputs: list[Any]) -> list[Any]:
        values: list[Any] = [None] * len(self.slots)
        for node, value in zip(self.placeholders, inputs, strict=True):
            values[self.slots[node]] = value
        for slot, value in self.fixed.items():
            values[slot] = value
        tape = inputs[0] if self.takes_tape else None
        inputs.clear()
        saved: list[Any] = [] if tape is None else tape.open()
        state = RandomState.now([*values, *saved]) if self.general and self.draws else None
        del saved  # values go as soon as nothing needs them
        with torch.no_grad():
            try:
                pattern = self._after(0, self.given, values)
                for place, (run, last, step, is_checked) in enumerate(self.runs):
                    try:
                        run(values)
                    except (InputError, RuntimeError) as error:
                        failure = self._failed(place, error, values)
                        if failure is error:
                            raise
                        raise failure from error
                    if is_checked:
                        pattern = self._checked(step, values, pattern)  # type: ignore[arg-type]
                    for slot in last:
                        values[slot] = None
                outputs = list(map_arg(self.results, lambda node: values[self.slots[node]]))
            except NotCovered:
                if state is not None:
                    state.restore()
                raise
        if tape is not None:
            tape.close()
        return outputs

    def _failed(self, place: int, error: Exception, values: list[Any]) -> Exception:
        """What is raised where a step raised `error`: data that the trace does not take are refused."""
        step = self.runs[place][2]
        if isinstance(error, NotCovered):
            return error
        if isinstance(step, GraphPart):
            return self._refusal(error.why) if isinstance(error, InputError) else error
        if str(step.target) not in ASSERTS:
            return error
        message = self._users_message(place, values)
        return self._refusal(str(error)) if message is None else DataError(message)

    def _users_message(self, place: int, values: list[Any]) -> str | None:
        """What the user's own assertion says, of those that begin with one that does not hold: the tracer puts its form
        of a condition before that of the user. None: no such one fails."""
        for run, _, step, _ in self.runs[place:]:
            if isinstance(step, GraphPart) or not (str(step.target) in ASSERTS or is_number(step.meta.get("val"))):
                break
            try:
                run(values)
            except RuntimeError as error:
                if not str(error).startswith(OF_THE_TRACER):
                    return str(error)
            except ArithmeticError:  # of what the assertion should have kept away
                break
        return None

    def _checked(self, step: Node, values: list[Any], pattern: int) -> int:
        """Checks what `step` has found, unless a call with the same small sizes up to here has passed. pattern: the
        number of that of the steps before, -1 where it has none; returns that up to here."""
        slots = self.sized.get(step)
        if pattern < 0 or slots is None or values[self.slots[step]] is not None:
            self._check(step, values)
            return -1
        known = self.patterns.get((pattern, *[min(values[slot], SMALL) for slot in slots]))
        if known is not None:
            return known
        self._check(step, values)
        return self._after(pattern, slots, values)

    def _after(self, pattern: int, slots: list[int], values: list[Any]) -> int:
        """The number of a pattern of small sizes that goes on with those of `slots`; -1 where there is none."""
        if not self.general or (self.judge is not None and not self.judge.plain):
            return -1
        key = (pattern, *[min(values[slot], SMALL) for slot in slots])
        found = self.patterns.get(key)
        if found is None and len(self.patterns) < MOST:
            found = self.patterns[key] = len(self.patterns) + 1
        return -1 if found is None else found

    def _check(self, step: Node, values: list[Any]) -> None:
        """Refuses the call where eager PyTorch goes another way at sizes that `step` has found."""
        found = values[self.slots[step]]
        if found is not None and _dims_differ(step.meta["val"], found):
            raise self._refusal(f"{step.target} gave another number of dims")
        symbols, formulas = self.small[step]
        numbers: dict[str, int] = {}
        floats = {name: float(values[slot]) for name, slot in self.floats.items() if values[slot] is not None}
        if formulas or found is not None or any(values[self.symbols[name]] < SMALL for name in symbols):
            numbers = {name: int(values[slot]) for name, slot in self.symbols.items() if values[slot] is not None}
        if found is not None:
            numbers |= dict(_data_sizes(step.meta["val"], found))
        small = [name for name in symbols if numbers.get(name, SMALL) < SMALL]
        small += [str(size) for size in formulas if _number(size, {**numbers, **floats}) < SMALL]
        if not small:
            return
        why = (f"a size found in the data, {small[0]}, is below {SMALL}" if self.judge is None
               else self.judge.refusal(numbers))
        if why:
            raise self._refusal(why)

    def _refusal(self, why: str) -> Exception:
        if self.general:
            if not self.refused:
                self.compilation.record("trace", "sizes in the data", f"{why}: such calls take the ordinary way")
            self.refused = True
            return NotCovered(why)
        return InputError(f"{self.name} does not take these data", why=why,
                          do="call the function without fullgraph=True")


def _lengths(split: Node) -> list[Node]:
    """The sizes that the trace reads off the parts of a split."""
    return [user for part in split.users for user in part.users
            if str(user.target) == "aten.sym_size.int" and user.args[1] == 0]


def _is_fresh(rows: Any) -> bool:
    """Whether a value lies in memory that the program itself has made: what is saved of others, the user may change
    before the backward."""
    while isinstance(rows, Node) and isinstance(rows.target, OpOverload) and gives_view(rows.target):
        rows = rows.args[0]
    return isinstance(rows, Node) and rows.op == "call_function" and rows.target is not tape_get


def _merges_returned(returned: Iterable[Node]) -> set[Node]:
    """The merges in whose memory something lies that is returned."""
    found: set[Node] = set()
    for node in returned:
        one: Any = node
        while isinstance(one, Node) and one.op == "call_function" and (
                one.target is operator.getitem or str(one.target) in SPLITS
                or (isinstance(one.target, OpOverload) and gives_view(one.target))):
            one = one.args[0]
        if isinstance(one, Node) and str(one.target) == MERGE:
            found.add(one)
    return found


def _is_kept(node: Node) -> bool:
    """Whether it is written into an input at the end."""
    return any(user.target is torch.ops.aten.copy_.default for user in node.users)


def _sizes_of(calls: list[Node]) -> set[str]:
    """The symbols that are sizes of tensors which the data decide, not numbers that are read from them."""
    values = [one for node in calls for one in pytree.tree_leaves(node.meta.get("val"))]
    return {str(dim.node.expr) for value in values for dim in _dims(value)}


def _needed(steps: list[Step], returned: list[Node], symbols: Mapping[str, Node], sizes: set[str]) -> list[Step]:
    """The steps without numbers that nobody reads (parts compute theirs from the symbols) and without asserts that hold
    whatever the data are. `symbols` are kept. sizes: those that are sizes, and so not negative."""
    read = {*returned, *(node for name, node in symbols.items() if api.is_unbacked(name))}
    kept: list[Step] = []
    for step in reversed(steps):
        if isinstance(step, GraphPart):
            read.update(step.inputs)
        elif str(step.target) in ASSERTS and _always(step, sizes):
            continue
        elif is_number(step.meta.get("val")) and step not in read:
            continue
        else:
            read.update(step.all_input_nodes)
        kept.append(step)
    return kept[::-1]


def _is_of_data(value: Any) -> bool:
    """Whether a number is computed from one, or a size, that the data decide, whatever the trace takes it to be."""
    if not isinstance(value, Node) or value.op != "call_function":
        return False
    return decides_by_data(value) or (is_number(value.meta.get("val")) and any(map(_is_of_data, value.all_input_nodes)))


def _always(step: Node, sizes: set[str]) -> bool:
    """Whether an assertion holds whatever the data are. From it on the trace knows that it does, so what the trace
    knows of numbers from the data proves nothing: only that sizes are not negative."""
    condition = step.args[0].meta.get("val") if isinstance(step.args[0], Node) else step.args[0]
    is_formula = isinstance(condition, torch.SymBool)
    if is_formula and any(map(api.is_unbacked, settings.symbols_as_written(condition))):
        return settings.holds_of_sizes(condition, sizes)
    known = settings.is_known_true(condition) if is_formula else condition is True
    return known and not _is_of_data(step.args[0])
