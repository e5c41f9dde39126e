"""Graph partitioning around fall backs: programs in parts: what the IR cannot carry runs as PyTorch, between compiled
parts of the same captured graph.

    y = x * 2; k = nonzero(y); z = k + 1   -->   part 0: y = x * 2      compiled
                                                 k = nonzero(y)         PyTorch; its size becomes known here
                                                 part 1: z = k + 1      compiled, with k as an input

A size that is only found in the data is a symbol like any other for the parts after it. Python numbers between the
parts are computed in Python, and so is what the trace asserts of such sizes. The order of the trace is kept.
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Union

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from anyshape.base.errors import InputError, Unsupported
from anyshape.frontend.programs.session import Boxed, NotCovered, ProgramRequest
from anyshape.frontend.symbols.node_metadata import UnsupportedNode
from anyshape.frontend.symbols.symint import SymIntImporter
from anyshape.runtime.memory.tape import make_tape, tape_get
from anyshape.sym.expr import Size, evaluate
from anyshape.torch_compat import OpOverload
from anyshape.torch_compat.versions import api
from anyshape.torch_compat.versions.side_effects import has_effect

MOST = 64  # nodes that are left to PyTorch, before the whole graph is
SMALL = 2  # sizes below have rules of their own in eager PyTorch; a general trace does not follow them
_ASSERTS = ("aten._assert_scalar.default", "aten.sym_constrain_range_for_size.default",
            "aten.sym_constrain_range.default")


@dataclass(eq=False)
class Part:
    """Nodes that follow each other and are compiled together.

    gm: the nodes as a graph of its own. inputs, outputs: nodes of the whole graph. origin: node of gm -> of the whole.
    """

    nodes: list[Node]
    gm: GraphModule
    inputs: list[Node]
    outputs: list[Node]
    origin: dict[Node, Node]
    program: Boxed | None = field(default=None)


Step = Union[Part, Node]


def split_program(request: ProgramRequest, first: Node | None, why: str, translate: Callable[[GraphModule, str], Any],
                  build: Callable[[Any, str], Boxed]) -> Boxed:
    """The program of `request` in parts.

    Args:
        first: a node that cannot be compiled, and why; None for a backward whose forward has no plan.
        translate: a part's graph and name -> our form of it; raises UnsupportedNode.
        build: that form and the name -> the compiled part.

    Raises:
        Unsupported: too much of the graph is not for the IR.
    """
    _drop_tokens(request.gm)
    outside = {node: "its result has sizes or numbers that are only known from the data"
               for node in found_in_data(request.gm)}
    if first is not None:
        outside.setdefault(first, why)
    while len(outside) <= MOST:
        steps = list(_steps(request.gm, outside))
        try:
            forms = [translate(step.gm, _name(request, k)) for k, step in enumerate(steps) if isinstance(step, Part)]
        except UnsupportedNode as error:
            part = next(step for step in steps if isinstance(step, Part) and error.node in step.gm.graph.nodes)
            found = _left_out(error.node, part)
            if not set(found) - outside.keys():
                raise
            outside.update(dict.fromkeys(found, error.what))
            continue
        parts = [step for step in steps if isinstance(step, Part)]
        numbers = [k for k, step in enumerate(steps) if isinstance(step, Part)]
        for number, part, form in zip(numbers, parts, forms, strict=True):
            part.program = build(form, _name(request, number))
        for node, reason in outside.items():
            request.compilation.record(request.name, "split", f"{node.target} runs as PyTorch between compiled parts: "
                                                              f"{reason}")
        program = SplitProgram(request, steps)
        request.compilation.register(program)
        return program
    raise Unsupported(f"{len(outside)} calls of this graph have no form in the IR", do="see explain() for the first")


def _drop_tokens(gm: GraphModule) -> None:
    """Steps keep the order of the trace, so calls with effects need no tokens, which no part could hand to another."""
    for node in reversed(gm.graph.nodes):
        first = node.args[0] if node.args else None
        if node.target is api.WITH_EFFECTS:
            node.args = (None, *node.args[1:])
        elif str(node.target) in api.TOKENS or (
                node.target is operator.getitem and isinstance(first, Node) and node.args[1] == 0
                and first.target is api.WITH_EFFECTS and not node.users):
            gm.graph.erase_node(node)


def found_in_data(gm: GraphModule) -> list[Node]:
    """The calls whose results have sizes that no size before them says."""
    known: set[str] = set()
    found = []
    for node in gm.graph.nodes:
        new = {name for name in _symbols_of([node]) if api.is_unbacked(name)} - known
        if new and node.op == "call_function" and node.target is not tape_get:
            found.append(node)
        known |= new
    return found


def _name(request: ProgramRequest, number: int) -> str:
    return f"{request.name}.step{number}"


def _left_out(node: Node, part: Part) -> list[Node]:
    """What must be left to PyTorch when `node` of a part is refused: itself, or what reads it where it is an input."""
    if node.op == "placeholder" or node.target is known_number:
        return [part.origin[user] for user in node.users if user in part.origin]
    return [part.origin[node]] if node in part.origin and node.op == "call_function" else []


# ---- cutting


def _steps(gm: GraphModule, outside: dict[Node, str]) -> Iterator[Step]:
    """The graph in order: parts, and nodes that run in Python."""
    symbols: dict[str, Node] = {}
    alone: set[Node] = set()
    pending: list[Node] = []

    def part() -> Iterator[Part]:
        if pending:
            yield _part(gm, list(pending), symbols)
            pending.clear()

    for node in gm.graph.nodes:
        if node.op == "placeholder":
            _note_symbol(node, symbols)
        if node.op != "call_function" or str(node.target) == "aten._assert_tensor_metadata.default":
            continue
        if not _runs_alone(node, outside, alone):
            pending.append(node)
            continue
        alone.add(node)
        if node in outside or any(operand in pending for operand in node.all_input_nodes):
            yield from part()
        _note_symbol(node, symbols)
        yield node
    yield from part()


def _runs_alone(node: Node, outside: dict[Node, str], alone: set[Node]) -> bool:
    if node in outside or node.target in (make_tape, tape_get) or str(node.target) in _ASSERTS:
        return True
    if node.target is operator.getitem and node.args[0] in alone:
        return True
    return _is_number(node.meta.get("val"))


def _is_number(value: Any) -> bool:
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, bool, int, float))


def _note_symbol(node: Node, symbols: dict[str, Node]) -> None:
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
        symbols.setdefault(str(value.node.expr), node)


def known_number() -> None:
    """Stands in a part for a number that the trace knows by its formula; never called."""


def _part(gm: GraphModule, nodes: list[Node], symbols: dict[str, Node]) -> Part:
    inside = set(nodes)
    outputs = [node for node in nodes if any(user not in inside for user in node.users)
               or node.target is torch.ops.aten.copy_.default]
    operands = list(dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes
                                  if operand not in inside))
    given = [operand for operand in operands if operand.op != "get_attr" and not _is_formula(operand)]
    numbers = [symbols[name] for name in sorted(_symbols_of([*nodes, *given, *operands])) if name in symbols]
    inputs = list(dict.fromkeys([*numbers, *given]))
    graph = FxGraph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {"val": node.meta.get("val")}
    for node in operands:
        if node in copies:
            continue
        if node.op == "get_attr":
            copies[node] = graph.node_copy(node)
        else:
            copies[node] = graph.call_function(known_number)
            copies[node].meta = {"val": node.meta["val"]}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return Part(nodes, GraphModule(gm, graph), inputs, outputs, {copy: node for node, copy in copies.items()})


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


def _sizes_from_data(gm: GraphModule) -> dict[Node, list[Size | torch.SymInt]]:
    """The sizes of tensors that can be told after each call whose results the data decide. A general trace takes
    them to be 2 or more."""
    calls = found_in_data(gm)
    origin = {name: node for node in reversed(calls) for name in _symbols_of([node]) if api.is_unbacked(name)}
    order = {node: place for place, node in enumerate(calls)}
    formulas = SymIntImporter()
    found: dict[Node, dict[Size | torch.SymInt, None]] = {}
    for node in gm.graph.nodes:
        for dim in _dims(node.meta.get("val")):
            names = {str(symbol) for symbol in dim.node.expr.free_symbols} & origin.keys()
            if names:
                last = max((origin[name] for name in names), key=order.__getitem__)
                found.setdefault(last, {})[_formula(formulas, dim)] = None
    return {node: list(sizes) for node, sizes in found.items()}


def _dims(value: Any) -> Iterator[torch.SymInt]:
    for tensor in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(tensor, torch.Tensor):
            yield from (size for size in tensor.shape if isinstance(size, torch.SymInt))


def _is_formula(node: Node) -> bool:
    """A number that the trace knows: a part needs its symbols, not its value."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool, bool, int))


def _symbols_of(nodes: list[Node]) -> set[str]:
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


# ---- running


class SplitProgram:
    """Runs the steps in order. Called with one list of inputs, which it empties; returns the list of outputs.

    Raises (when called): NotCovered: a program for all sizes met a size 0 or 1 in the data, or data that its trace
    does not take; nothing that the caller can see has changed.
    """

    _boxed_call = True

    def __init__(self, request: ProgramRequest, steps: list[Step]) -> None:
        nodes = list(request.gm.graph.nodes)
        self.name = request.name
        self.steps = steps
        self.compilation = request.compilation
        self.refused = False
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        self.attributes = {node: api.attribute_of(request.gm, str(node.target)) for node in nodes
                           if node.op == "get_attr"}
        self.results = request.gm.graph.output_node().args[0]
        self.takes_tape = request.role == "backward" and request.tape is not None
        self.general = request.compilation.tracing[2] in ("all sizes", "one graph") and request.role != "backward"
        self.symbols: dict[str, Node] = {}
        for node in (*self.placeholders, *(step for step in steps if isinstance(step, Node))):
            _note_symbol(node, self.symbols)
        self.small = _sizes_from_data(request.gm) if self.general else {}
        self.draws = any(has_effect(node.target) for node in nodes)
        self.last = self._last_uses()

    @property
    def calls(self) -> tuple[str, ...]:
        """The operators that run as PyTorch."""
        return tuple(str(step.target) for step in self.steps
                     if isinstance(step, Node) and isinstance(step.target, OpOverload)
                     and not _is_number(step.meta.get("val")) and str(step.target) not in _ASSERTS)

    def _last_uses(self) -> list[list[Node]]:
        """Per step, the values that nothing needs after it."""
        returned = set(self.results_nodes())
        seen = set(returned)
        last: list[list[Node]] = []
        for step in reversed(self.steps):
            used = [*step.inputs, *step.outputs] if isinstance(step, Part) else [*step.all_input_nodes, step]
            last.append([node for node in dict.fromkeys(used) if node not in seen and node.op != "get_attr"])
            seen.update(used)
        return last[::-1]

    def results_nodes(self) -> list[Node]:
        """The nodes that are returned."""
        found: list[Node] = []
        map_arg(self.results, lambda node: found.append(node))
        return found

    def __call__(self, inputs: list[Any]) -> list[Any]:
        values: dict[Node, Any] = dict(zip(self.placeholders, inputs, strict=True))
        values.update(self.attributes)
        tape = inputs[0] if self.takes_tape else None
        inputs.clear()
        if tape is not None:
            tape.open()
        state = torch.random.get_rng_state() if self.general and self.draws else None
        with torch.no_grad():
            try:
                for step, last in zip(self.steps, self.last, strict=True):
                    self._run(step, values)
                    for node in last:
                        del values[node]
                outputs = list(map_arg(self.results, values.__getitem__))
            except NotCovered:
                if state is not None:
                    torch.random.set_rng_state(state)
                raise
        if tape is not None:
            tape.close()
        return outputs

    def _run(self, step: Step, values: dict[Node, Any]) -> None:
        if isinstance(step, Part):
            assert step.program is not None
            try:
                results = step.program([values[node] for node in step.inputs])
            except InputError as error:
                raise self._refusal(error.why) from error
            values.update(zip(step.outputs, results, strict=True))
            return
        try:
            value = step.target(*map_arg(step.args, values.__getitem__), **map_arg(step.kwargs, values.__getitem__))
        except RuntimeError as error:
            if str(step.target) not in _ASSERTS:
                raise
            raise self._refusal(str(error)) from error
        values[step] = value
        if step in self.small:
            if _dims_differ(step.meta["val"], value):
                raise self._refusal(f"{step.target} gave another number of dims")
            numbers = {name: int(values[node]) for name, node in self.symbols.items() if node in values}
            self._check_small(self.small[step], numbers | dict(_data_sizes(step.meta["val"], value)))

    def _check_small(self, sizes: list[Size | torch.SymInt], numbers: dict[str, int]) -> None:
        for size in sizes:
            number = api.number_of(size, numbers) if isinstance(size, torch.SymInt) else evaluate(size, numbers)
            if number < SMALL:
                raise self._refusal(f"the size {size} was {number}")

    def _refusal(self, why: str) -> Exception:
        if self.general:
            if not self.refused:
                self.compilation.record("trace", "sizes in the data", f"{why}: such calls take the ordinary way")
            self.refused = True
            return NotCovered(why)
        return InputError(f"{self.name} does not take these data", why=why,
                          do="call the function without fullgraph=True")
