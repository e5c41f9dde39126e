"""Graph partitioning around fall backs and data-dependent sizes: what the IR cannot carry runs as PyTorch, between
compiled parts of the same captured graph.

    y = x * 2; k = nonzero(y); z = k + 1   -->   part 0: y = x * 2      compiled
                                                 k = nonzero(y)         PyTorch; its size becomes known here
                                                 part 1: z = k + 1      compiled, with k as an input

A size that is only found in the data is a symbol like any other for the parts after it. Python numbers between the
parts are computed in Python, and so is what the trace asserts of such sizes. The order of the trace is kept, but for
the branches of a router: what stands on the rows of one branch is a part of its own (branch_parts.py), which is
specialised on that branch's load alone; parts that are the same but for names are one program (shared_parts.py).
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node

from anyshape.base.errors import Unsupported
from anyshape.frontend.programs.branch_parts import Grouping, cuts, groups_of
from anyshape.frontend.programs.session import Boxed, ProgramRequest
from anyshape.frontend.programs.shared_parts import SharedParts
from anyshape.frontend.programs.split_program import (
    ASSERTS,
    FOUND,
    GraphPart,
    SplitProgram,
    Step,
    decides_by_data,
    is_number,
    note_symbol,
    symbols_of,
    symbols_written,
)
from anyshape.frontend.symbols.node_metadata import UnsupportedNode
from anyshape.runtime.memory.tape import make_tape, tape_get
from anyshape.torch_compat.versions import api
from anyshape.torch_compat.versions.side_effects import has_effect

MOST = 64  # nodes that are left to PyTorch, before the whole graph is
OWN = "it belongs to a router: each branch is a part of its own"


def split_program(request: ProgramRequest, first: Node | None, why: str, translate: Callable[[GraphModule, str], Any],
                  build: Callable[[Any, str, GraphModule], Boxed]) -> Boxed:
    """The program of `request` in parts.

    Args:
        first: a node that cannot be compiled, and why; None for a backward whose forward has no plan.
        translate: a part's graph and name -> our form of it; raises UnsupportedNode.
        build: that form, the name and the part's graph -> the compiled part.

    Raises:
        Unsupported: too much of the graph is not for the IR.
    """
    _drop_tokens(request.gm)
    own = cuts(request.gm)
    outside = {node: "its result has sizes or numbers that are only known from the data"
               for node in found_in_data(request.gm) if node not in own}
    if first is not None and first not in own:
        outside.setdefault(first, why)
    groups = groups_of(request.gm, own)
    while len(outside) <= MOST:
        steps = list(_steps(request.gm, {**outside, **dict.fromkeys(own, OWN)}, groups))
        try:
            forms = [translate(step.gm, _name(request, k)) for k, step in enumerate(steps)
                     if isinstance(step, GraphPart)]
        except UnsupportedNode as error:
            part = next(step for step in steps if isinstance(step, GraphPart) and error.node in step.gm.graph.nodes)
            found = _left_out(error.node, part)
            if not set(found) - outside.keys():
                raise
            outside.update(dict.fromkeys(found, error.what))
            continue
        shared = SharedParts(build)
        numbers = [k for k, step in enumerate(steps) if isinstance(step, GraphPart)]
        for number, form in zip(numbers, forms, strict=True):
            part = steps[number]
            part.program = shared.program(form, _name(request, number), part.gm)
        _tell(request, outside, own, shared)
        program = SplitProgram(request, steps, found_in_data(request.gm))
        request.compilation.register(program)
        return program
    raise Unsupported(f"{len(outside)} calls of this graph have no form in the IR", do="see explain() for the first")


def _tell(request: ProgramRequest, outside: dict[Node, str], own: list[Node], shared: SharedParts) -> None:
    """Writes down where the program is cut, for `explain`."""
    for node, reason in outside.items():
        request.compilation.record(request.name, "split", f"{node.target} runs as PyTorch between compiled parts: "
                                                          f"{reason}")
    if own:
        names = ", ".join(sorted({str(one.target).removesuffix(".default") for one in own}))
        request.compilation.cut(request.name, f"branches of routers, cut by {len(own)} calls of {names}: "
                                              f"{shared.parts} parts, {len(shared.known)} of them different")


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
        new = {name for name in (*symbols_of([node]), *(symbols_written(node) if decides_by_data(node) else ()))
               if api.is_unbacked(name)} - known
        if new and node.op == "call_function" and node.target is not tape_get:
            found.append(node)
        known |= new
    return found


def is_in_parts(gm: GraphModule) -> bool:
    """Whether a graph has to be cut, whatever the IR takes."""
    return bool(found_in_data(gm) or cuts(gm)) or any(str(node.target) == FOUND for node in gm.graph.nodes)


def _name(request: ProgramRequest, number: int) -> str:
    return f"{request.name}.step{number}"


def _left_out(node: Node, part: GraphPart) -> list[Node]:
    """What must be left to PyTorch when `node` of a part is refused: itself, or what reads it where it is an input."""
    if node.op == "placeholder" or node.target is known_number:
        return [part.origin[user] for user in node.users if user in part.origin]
    return [part.origin[node]] if node in part.origin and node.op == "call_function" else []


# ---- cutting


def _steps(gm: GraphModule, outside: dict[Node, str], groups: dict[Node, str]) -> Iterator[Step]:
    """The graph in order: parts, and nodes that run in Python. No pending part needs another one, so that each can be
    closed at any time."""
    symbols: dict[str, Node] = {}
    alone: set[Node] = set()
    pending = Grouping()

    def closed(parts: list[list[Node]]) -> Iterator[GraphPart]:
        for nodes in parts:
            yield _part(gm, nodes, symbols)

    for node in gm.graph.nodes:
        if node.op == "placeholder":
            note_symbol(node, symbols)
        if node.op != "call_function" or str(node.target) == "aten._assert_tensor_metadata.default":
            continue
        effect = has_effect(node.target) or node.target is torch.ops.aten.copy_.default
        if not _runs_alone(node, outside, alone):
            yield from closed(pending.add(node, groups.get(node, ""), effect))
            continue
        alone.add(node)
        if node in outside and outside[node] is not OWN:
            yield from closed(pending.close())
        else:
            yield from closed(pending.close_before(node))
        note_symbol(node, symbols)
        yield node
    yield from closed(pending.close())


def _runs_alone(node: Node, outside: dict[Node, str], alone: set[Node]) -> bool:
    if node in outside or node.target in (make_tape, tape_get) or str(node.target) in ASSERTS:
        return True
    if node.target is operator.getitem and node.args[0] in alone:
        return True
    return is_number(node.meta.get("val"))


def known_number() -> None:
    """Stands in a part for a number that the trace knows by its formula; never called."""


def _part(gm: GraphModule, nodes: list[Node], symbols: dict[str, Node]) -> GraphPart:
    inside = set(nodes)
    outputs = [node for node in nodes if any(user not in inside for user in node.users)
               or node.target is torch.ops.aten.copy_.default]
    operands = list(dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes
                                  if operand not in inside))
    given = [operand for operand in operands if operand.op != "get_attr" and not _is_formula(operand)]
    numbers = [symbols[name] for name in sorted(symbols_of([*nodes, *given, *operands])) if name in symbols]
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
    return GraphPart(nodes, GraphModule(gm, graph), inputs, outputs, {copy: node for node, copy in copies.items()})


def _is_formula(node: Node) -> bool:
    """A number that the trace knows: a part needs its symbols, not its value."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool, bool, int))
