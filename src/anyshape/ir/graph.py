"""The tensor IR: a typed, ordered list of equations over named values."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Union

from anyshape.ir.types import TensorType, ValueType
from anyshape.sym.expr import Expr
from anyshape.sym.facts import Facts

UNUSED = "_unused_"  # how names of inputs begin that are sizes on which nothing depends


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One named value of a graph. Names are unique in their graph; a value is compared by identity."""

    name: str
    type: ValueType

    @property
    def tensor(self) -> TensorType:
        """The tensor type; asserts that the value is a tensor."""
        assert isinstance(self.type, TensorType), self
        return self.type

    def __str__(self) -> str:
        return self.name


Literal = Union[bool, int, float]
Operand = Union[Value, Literal, Expr]
Attr = Union[bool, int, float, str, None, Expr, tuple["Attr", ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One equation: `outputs = op(inputs, attrs)  # where`. Scalars and sizes may stand as operands."""

    op: str
    inputs: tuple[Operand, ...]
    attrs: tuple[tuple[str, Attr], ...]
    outputs: tuple[Value, ...]
    where: str = ""

    def attr(self, name: str) -> Attr:
        """The attribute `name`; KeyError if there is none."""
        for key, value in self.attrs:
            if key == name:
                return value
        raise KeyError(f"{self.op} has no attribute {name}")

    @property
    def output(self) -> Value:
        """The only result."""
        assert len(self.outputs) == 1, self.op
        return self.outputs[0]

    def values(self) -> Iterator[Value]:
        """The operands that are values, in order."""
        for operand in self.inputs:
            if isinstance(operand, Value):
                yield operand


def effect_of(node: Node) -> int:
    """The place of the equation among those that do more than give their results (calls that draw random numbers, or of
    which that is not known), counted from 1; 0: it does no more. The verifier holds their order."""
    return next((int(value) for name, value in node.attrs  # type: ignore[arg-type]
                 if name == "effect"), 0)


def has_effect(node: Node) -> bool:
    """Does the equation do more than give its results?"""
    return effect_of(node) > 0


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A program.

    inputs: tensors and sizes, in the order of the call.
    nodes: equations, each operand defined before its use.
    outputs: what the caller receives: values, whole numbers, or None (no gradient).
    output_strides: the strides each tensor output must have, in elements; None: dense.
    memory: whose storage each output lies in: "" its own, the name of an input, or a label that several outputs share.
    writes: (input, value) pairs, done after everything else: the input's storage receives the value.
    saved: values kept for the backward program, by tape index.
    restored: inputs that come from the tape, by tape index (of a backward program).
    facts: what is known of the symbols.
    """

    name: str
    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Operand | None, ...]
    output_strides: tuple[tuple[Expr | int, ...] | None, ...] = ()
    memory: tuple[str, ...] = ()
    writes: tuple[tuple[Value, Value], ...] = ()
    saved: tuple[Operand, ...] = ()
    restored: tuple[Value, ...] = ()
    facts: Facts = field(default_factory=Facts)

    def replace(self, **changes: object) -> Graph:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def with_values(self, other: Mapping[Value, Value]) -> Graph:
        """A copy with other values in the place of some inputs."""
        def of(operand: Operand | None) -> Operand | None:
            return other.get(operand, operand) if isinstance(operand, Value) else operand

        def each(operands: Iterable[Operand | None]) -> tuple[Any, ...]:
            return tuple([of(operand) for operand in operands])

        nodes = tuple(Node(node.op, each(node.inputs), node.attrs, node.outputs, node.where) for node in self.nodes)
        return self.replace(
            inputs=each(self.inputs), nodes=nodes, outputs=each(self.outputs), saved=each(self.saved),
            restored=each(self.restored), writes=tuple(each(pair) for pair in self.writes))

    def roots(self) -> Iterator[Value]:
        """Every value that must exist at the end: outputs, saved values and written values."""
        for operand in (*self.outputs, *self.saved):
            if isinstance(operand, Value):
                yield operand
        for _, value in self.writes:
            yield value

    def producers(self) -> dict[str, Node]:
        """Value name -> the node that defines it."""
        return {value.name: node for node in self.nodes for value in node.outputs}

    def users(self) -> dict[str, list[Node]]:
        """Value name -> the nodes that read it, each once, in order."""
        table: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(v.name for v in node.values()):
                table.setdefault(name, []).append(node)
        return table
