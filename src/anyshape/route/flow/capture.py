"""Graph capture for the analysis: a model's ATen graph from torch.export, functional, with each input's role and sizes.

The graph is as it was traced where every operator has a rule and writes nothing, else of core ATen operators and
scaled_dot_product_attention, functional. In it split_rows has as many rows a
branch as there are rows in all (`core.operators.whole_rows`): the graph is looked at, not run, and any load is covered.
"""
from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from anyshape.route.core.operators import whole_rows
from anyshape.route.flow.rules import is_plain

_CAUGHT = (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError, AttributeError, KeyError,
           IndexError, torch.fx.proxy.TraceError)


class CaptureFailed(Exception):
    """torch.export could not capture a model; the text says why."""


@dataclass(frozen=True)
class FlowProgram:
    """A captured graph.

    nodes: in order. inputs: the placeholders of the caller's tensors. outputs: what the caller gets.
    fixed: tensors whose values the model holds, by placeholder: buffers that nothing writes, frozen parameters, and
        literals: tensors that Python wrote. weights: placeholders of parameters that training may change, and of
        buffers that the graph writes. mutated: whether a call writes a buffer, a parameter or an input.
    ranges: for each symbol the least and the most that it may be, None where nothing limits it.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    fixed: dict[Node, Tensor]
    weights: frozenset[Node]
    outputs: tuple[Any, ...]
    mutated: bool
    ranges: dict[str, tuple[int, int | None]]
    literals: frozenset[Node]


def capture(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None = None, *,
            rows: bool = False) -> FlowProgram:
    """The program of a model on example arguments. rows: dim 0 of every tensor argument is a symbol.

    Raises:
        CaptureFailed: torch.export does not take the model, for instance because its Python reads values.
    """
    dynamic: Any = None
    frozen = frozen_weights(model)
    if rows:
        dynamic = (tuple({0: Dim.DYNAMIC} if isinstance(one, Tensor) and one.dim() else None for one in args),)
        model, frozen = _Star(model), frozenset(f"module.{name}" for name in frozen)
    try:
        with torch.no_grad(), whole_rows():
            found = export(model, tuple(args), kwargs or {}, dynamic_shapes=dynamic, strict=False)
            if not all(is_plain(node) for node in found.graph.nodes):
                table = torch.export.default_decompositions()
                table.pop(torch.ops.aten.scaled_dot_product_attention.default, None)
                found = found.run_decompositions(table)
    except _CAUGHT as fault:
        text = next((line for line in str(fault).splitlines() if line.strip()), type(fault).__name__)
        raise CaptureFailed(f"torch.export: {text[:200]}") from fault
    return _program(found, frozen)


class _Star(nn.Module):
    """A module whose arguments have no names, so that sizes are said by place."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


def frozen_weights(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that training does not change."""
    return frozenset(name for name, one in model.named_parameters() if not one.requires_grad)


def _program(found: ExportedProgram, frozen: frozenset[str]) -> FlowProgram:
    graph, signature = found.graph, found.graph_signature
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    written = {spec.target for spec in signature.output_specs if spec.kind is not OutputKind.USER_OUTPUT}
    fixed: dict[Node, Tensor] = {}
    inputs, weights, literals = [], [], []
    for spec in signature.input_specs:
        node = placeholders.get(getattr(spec.arg, "name", ""))
        if node is None:
            continue
        target = spec.target
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(node)
        elif spec.kind is InputKind.CONSTANT_TENSOR or (spec.kind is InputKind.BUFFER and target not in written) \
                or (spec.kind is InputKind.PARAMETER and target in frozen):
            held = found.constants.get(target, found.state_dict.get(target))
            if isinstance(held, Tensor):
                fixed[node] = held.detach()
                literals += [node] if spec.kind is InputKind.CONSTANT_TENSOR else []
            else:
                weights.append(node)
        else:
            weights.append(node)
    (output,) = (node for node in graph.nodes if node.op == "output")
    kinds = [spec.kind for spec in signature.output_specs]
    outputs = [one for one, kind in zip(output.args[0], kinds, strict=True) if kind is OutputKind.USER_OUTPUT]
    mutated = any(kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION, OutputKind.PARAMETER_MUTATION)
                  for kind in kinds)
    ranges = {str(symbol): (_limit(own.lower) or 0, _limit(own.upper))
              for symbol, own in found.range_constraints.items()}
    return FlowProgram(tuple(graph.nodes), tuple(inputs), fixed, frozenset(weights), tuple(outputs), mutated, ranges,
                   frozenset(literals))


def _limit(bound: Any) -> int | None:
    """The least or the most that a symbol may be; None where nothing limits it."""
    return int(bound) if getattr(bound, "is_Integer", False) and int(bound) < sys.maxsize - 1 else None


def module_of(node: Node) -> str:
    """The name of the module in whose forward a node was made; empty for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def draws(node: Node) -> bool:
    """Whether an operator draws random numbers in this call."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    name = str(node.target)
    if "scaled_dot_product_attention" in name:
        chance = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
        return chance != 0.0
    return not ("dropout" in name and len(node.args) > 2 and node.args[2] is False)


def is_sized(number: Any) -> bool:
    """Whether a size or a number is not the same at every call: it has a symbol."""
    return isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool))


def known_size(number: Any, at: dict[str, int]) -> Any:
    """A size with its symbols replaced; what is no symbol stays."""
    if not is_sized(number):
        return number
    expression = number.node.expr
    found = expression.subs({symbol: at[str(symbol)] for symbol in expression.free_symbols if str(symbol) in at})
    if found.free_symbols:
        return number  # of a symbol that is data
    if isinstance(number, torch.SymBool):
        return bool(found)
    return int(found) if isinstance(number, torch.SymInt) and found.is_integer else float(found)


def same_program(one: nn.Module, other: nn.Module, arguments: Sequence[Any]) -> str:
    """What differs between two modules' graphs over parameters and buffers of the same names; "" where nothing does."""
    texts = []
    for module in (one, other):
        try:
            texts.append(_text(capture(module, arguments)))
        except CaptureFailed as fault:
            return str(fault)
    if len(texts[0]) != len(texts[1]):
        return "the traced program has other operators than the module"
    return next((f"the traced program has {theirs}, the module {own}" for own, theirs in zip(*texts, strict=True)
                 if own != theirs), "")


def _text(program: FlowProgram) -> list[str]:
    """A line a node that a result needs, in order; placeholders by name, others by number."""
    needed: set[Node] = set()
    for node in reversed(program.nodes):
        if node.op == "output" or any(user in needed for user in node.users):
            needed.add(node)
    names: dict[Node, str] = {}
    lines: list[str] = []
    for node in program.nodes:
        if node.op == "placeholder":
            places = [place for place, one in enumerate(program.inputs) if one is node]
            names[node] = f"input{places[0]}" if places else node.name
        elif node in needed:
            names[node] = f"%{len(lines)}"
            given = torch.fx.node.map_arg((node.args, node.kwargs), lambda one: names[one])
            lines.append(f"{node.target} {given}")
    return lines
