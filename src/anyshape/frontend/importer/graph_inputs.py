"""The inputs of a Graph: placeholders, what comes out of the tape, constants; and the notes about them."""
from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from anyshape.backend.interface import Target
from anyshape.frontend.aten.table import Translator
from anyshape.frontend.symbols.node_metadata import NodeMetadata, devices_of
from anyshape.frontend.symbols.symint import SymIntImporter
from anyshape.ir.build import Builder
from anyshape.ir.graph import UNUSED, Operand, Value
from anyshape.ir.types import SizeType, TensorType
from anyshape.runtime.memory.tape import tape_get
from anyshape.sym.expr import Expr, Size
from anyshape.torch_compat.versions import api

BORDER = "anyshape_border"  # of the first node of the backward, where a graph has a forward and then a backward


@dataclass(slots=True)
class Notes:
    """What a Graph does not say about the fx graph it came from.

    constants: tensors for the inputs after the placeholders, in order.
    tape_output: the last output of the fx graph is the tape; it is not among the Graph's outputs.
    tape_input: the first placeholder is the tape; the inputs that come out of it (Graph.restored) stand in its place.
    float_inputs: positions of inputs that the caller gives as Python floats; they are rank-0 f64 tensors here.
    externs: (target, why it is not compiled, source line) of every extern call.
    asserts: conditions that the trace asserts, in words; they hold by the facts or by the guards of the trace.
    equalities: pairs of sizes that the trace takes as equal though their formulas differ.
    renamed: symbol -> the size that stands for it everywhere, of some of them.
    first: names of the values that come before a node that is marked as BORDER.
    """

    constants: list[torch.Tensor] = field(default_factory=list)
    tape_output: bool = False
    tape_input: bool = False
    float_inputs: tuple[int, ...] = ()
    externs: list[tuple[str, str, str]] = field(default_factory=list)
    asserts: list[str] = field(default_factory=list)
    equalities: list[tuple[Size, Size]] = field(default_factory=list)
    renamed: dict[str, Size] = field(default_factory=dict)
    first: frozenset[str] = frozenset()


class Skipped:
    """Stands for the result of a node that no value stands for; using it is Unsupported."""

    def __init__(self, what: str) -> None:
        self.what = what


class Inputs:
    """The state of a walk over an fx graph, and the declaration of the Graph's inputs."""

    def __init__(self, gm: GraphModule, name: str, sizes: SymIntImporter, target: Target,
                 unify: bool) -> None:
        self.gm = gm
        self.builder = Builder(name)
        self.sizes = sizes
        self.t = Translator(self.builder, sizes, target)
        self.t.device = next(iter(devices_of(gm)), "cpu")
        self.notes = Notes()
        self.env: dict[Node, Any] = {}
        self.trace = NodeMetadata(sizes)
        self.restored: dict[int, Value] = {}
        self.saved: tuple[Operand, ...] = ()
        self.writes: dict[Value, Value] = {}
        self.placeholders: dict[Node, Value] = {}
        self.unify = unify
        self.same: dict[Size, Size] = {}

    def declare(self, nodes: list[Node]) -> None:
        """Declares every input, in the order: placeholders (the saved values in the place of the tape), constants."""
        tape = None
        for node in nodes:
            if node.op != "placeholder":
                continue
            if _is_tape(node):
                tape = node
                self.notes.tape_input = True
                self._declare_restored(node, nodes)
            else:
                with self.trace.at(node):
                    self.env[node] = self.placeholders[node] = self._input(node)
        if tape is not None:
            self.env[tape] = Skipped("the tape")
        for node in nodes:
            if node.op == "get_attr":
                self.env[node] = self._constant(node)

    def _input(self, node: Node) -> Any:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return self.builder.input(_clean(node.name), self.trace.tensor_type(value, node))
        if isinstance(value, torch.SymInt):
            symbol = self.sizes.symbol_name(value)
            if symbol is None and isinstance(self.sizes.size(value), Expr) and not self._replaced(value):
                raise self.trace.unsupported(node, f"an input number that stands for {self.sizes.size(value)}")
            self.builder.input(self._size_name(symbol), SizeType())
            return self.sizes.size(value)
        position = len(self.builder.inputs)
        if isinstance(value, (torch.SymFloat, float)):
            self.notes.float_inputs += (position,)
            result = self.builder.input(_clean(node.name), TensorType("f64", (), None, self.t.device))
            self.t.floats.add(result.name)
            return result
        if value is None or isinstance(value, (bool, int)):
            self.builder.input(f"{UNUSED}{position}", SizeType())
            return value
        raise self.trace.unsupported(node, f"an input of type {type(value).__name__}")

    def _size_name(self, symbol: str | None) -> str:
        """The symbol's own name the first time, so that the input binds it."""
        taken = {value.name for value in self.builder.inputs}
        return symbol if symbol is not None and symbol not in taken else f"{UNUSED}{len(self.builder.inputs)}"

    def _replaced(self, value: torch.SymInt) -> bool:
        return str(getattr(value.node, "_expr", "")) in self.sizes.equal or getattr(
            getattr(value.node, "_expr", None), "is_Symbol", False)

    def _declare_restored(self, tape: Node, nodes: list[Node]) -> None:
        layout = tape.meta.get("anyshape_tape")
        borrowed = set(layout.borrowed) if layout is not None else set()
        reads = {node.args[1]: node for node in nodes if node.op == "call_function" and node.target is tape_get}
        if sorted(reads) != list(range(len(reads))):
            raise self.trace.unsupported(tape, "a tape of which only a part is read")
        for index in sorted(reads):
            node = reads[index]
            value = node.meta["val"]
            if isinstance(value, torch.Tensor):
                kind = self.trace.tensor_type(value, node)
                if index not in borrowed:
                    kind = kind.dense()
                self.env[node] = self.restored[index] = self.builder.input(_clean(node.name), kind)
            elif isinstance(value, torch.SymInt):
                symbol = self.sizes.symbol_name(value)
                self.restored[index] = self.builder.input(self._size_name(symbol), SizeType())
                self.env[node] = self.sizes.size(value)
            elif isinstance(value, torch.SymFloat):
                self.env[node] = self.restored[index] = self.builder.input(
                    _clean(node.name), TensorType("f64", (), None, self.t.device))
                self.t.floats.add(self.restored[index].name)
            else:
                raise self.trace.unsupported(node, f"a saved value of type {type(value).__name__}")

    def _constant(self, node: Node) -> Any:
        found = api.attribute_of(self.gm, str(node.target))
        if not isinstance(found, torch.Tensor):
            return Skipped(f"the attribute {node.target}")
        if api.is_fake(found):
            raise self.trace.unsupported(node, "a constant without data")
        self.notes.constants.append(found)
        return self.builder.input(_clean(node.name), self.trace.tensor_type(found, node))


def _is_tape(node: Node) -> bool:
    if "anyshape_tape" in node.meta:
        return True
    return node.target == "tape" and not isinstance(node.meta.get("val"), (torch.Tensor, torch.SymInt)) and any(
        user.target is tape_get for user in node.users)


def _clean(name: str) -> str:
    text = re.sub(r"\W", "_", name)
    return text if text[:1].isalpha() or text[:1] == "_" else f"_{text}"
