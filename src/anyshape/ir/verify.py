"""The rules every graph keeps. A broken one is a bug of the compiler: the error shows the equation with a caret."""
from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NoReturn

from anyshape.base.errors import AnyShapeError, VerifyError
from anyshape.ir.graph import Attr, Graph, Node, Operand, Value, effect_of
from anyshape.ir.op import OPS
from anyshape.ir.show import header_lines, node_line, symbols_in_order
from anyshape.ir.types import DTYPES, SizeType, TensorType
from anyshape.sym.expr import Expr
from anyshape.sym.facts import Facts
from anyshape.sym.prover import prove_equal

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*\Z")
_WORDS = frozenset(("True", "False", "None", "inf", "nan", "strides", "on"))
_CONTEXT = 3


def verify(graph: Graph, stage: str = "", lines: Sequence[int] = ()) -> None:
    """Raise VerifyError where `graph` breaks a rule; `stage` names what made the graph. `lines`: the numbers of the
    equations' lines in the text of a person, whose mistake it is then.

    The rules: every value has its own name and is defined before its use; ops are known, and an equation's types are
    those its row infers; strides have the rank of their tensor; outputs, writes, saved and restored values exist; a
    whole number stands as a size, not as a value, in equations; symbols of sizes are not named like tensors; equations
    with effects stand in the order that they are numbered in.
    """
    _Verifier(graph, stage, lines).run()


class _Verifier:
    def __init__(self, graph: Graph, stage: str, lines: Sequence[int]) -> None:
        self.graph = graph
        self.stage = stage
        self.lines = lines
        self.known: dict[str, Value] = {}
        self.effect = 0

    def run(self) -> None:
        for value in self.graph.inputs:
            self.define(value, None)
        inputs = dict(self.known)
        for position, node in enumerate(self.graph.nodes):
            self.node(position, node)
        self.check_symbols()
        for operand in self.graph.outputs:
            self.check_result(operand, "output")
        for operand in self.graph.saved:
            self.check_result(operand, "saved value")
        self.check_strides()
        for target, value in self.graph.writes:
            self.check_result(value, "written value")
            if inputs.get(target.name) is not target:
                self.fail(None, f"{target.name} is written, but is no input")
            if not isinstance(target.type, TensorType) or not isinstance(value.type, TensorType) \
                    or not _same(target.type, value.type, self.graph.facts):
                self.fail(None, f"{target.name}: {target.type} is written with {value.name}: {value.type}")
        for value in self.graph.restored:
            if inputs.get(value.name) is not value:
                self.fail(None, f"{value.name} comes from the tape, but is no input")

    def define(self, value: Value, position: int | None) -> None:
        if not _NAME.match(value.name) or value.name in _WORDS:
            self.fail(position, f"{value.name!r} cannot name a value in the text form")
        if value.name in self.known:
            self.fail(position, f"{value.name} is defined twice")
        kind = value.type
        if isinstance(kind, TensorType):
            if kind.dtype not in DTYPES:
                self.fail(position, f"{value.name} has the unknown dtype {kind.dtype!r}")
            if kind.strides is not None and len(kind.strides) != kind.rank:
                self.fail(position, f"{value.name} has {len(kind.strides)} strides and {kind.rank} dims")
            for size in kind.shape:
                if isinstance(size, int) and size < 0:
                    self.fail(position, f"{value.name} has the negative size {size}")
        self.known[value.name] = value

    def node(self, position: int, node: Node) -> None:
        row = OPS.get(node.op)
        if row is None:
            self.fail(position, f"there is no op {node.op}", node.op)
        for operand in node.inputs:
            self.operand(position, operand)
        names = [name for name, _ in node.attrs]
        if len(set(names)) != len(names):
            self.fail(position, "an attribute is given twice")
        for name, value in node.attrs:
            if not _is_attr(value):
                self.fail(position, f"attribute {name} holds {value!r}, which the text form cannot carry", name)
        for output in node.outputs:
            self.define(output, position)
        effect = effect_of(node)
        if effect and effect <= self.effect:
            self.fail(position, f"effect {effect} comes after effect {self.effect}", "effect")
        self.effect = max(effect, self.effect)
        if node.op == "extern":
            return
        try:
            wanted = row.infer(node.inputs, dict(node.attrs))
        except AnyShapeError as error:
            self.fail(position, error.why or error.what, node.op, error.do)
        found = tuple(value.type for value in node.outputs)
        if len(found) != len(wanted):
            self.fail(position, f"{node.op} has {len(wanted)} results, not {len(found)}", node.op)
        for output, have, want in zip(node.outputs, found, wanted, strict=True):
            if not isinstance(have, TensorType) or not _same(have, want, self.graph.facts):
                self.fail(position, f"{output.name} is {have}, and {node.op} gives {want}", output.name)
            if have.strides is not None:
                self.fail(position, f"{output.name} has strides, and only inputs and extern results may", output.name)

    def operand(self, position: int, operand: Operand) -> None:
        if not isinstance(operand, Value):
            if not isinstance(operand, (bool, int, float, Expr)):
                self.fail(position, f"the operand {operand!r} is no value, number or size")
            return
        if self.known.get(operand.name) is not operand:
            why = "defined later or nowhere" if operand.name not in self.known else "another value of that name"
            self.fail(position, f"the operand {operand.name} is {why}", operand.name)
        if isinstance(operand.type, SizeType):
            self.fail(position, f"the operand {operand.name} is a whole number", operand.name,
                      f"use the size symbol({operand.name!r}) in its place")

    def check_symbols(self) -> None:
        tensors = {name for name, value in self.known.items() if isinstance(value.type, TensorType)}
        for name in symbols_in_order(self.graph):
            if name in tensors:
                self.fail(None, f"{name} names a tensor and a size")
        for name, low, high in self.graph.facts.ranges:
            if high is not None and low > high:
                self.fail(None, f"the range of {name} is empty")

    def check_result(self, operand: Operand | None, what: str) -> None:
        if isinstance(operand, Value):
            if self.known.get(operand.name) is not operand:
                self.fail(None, f"the {what} {operand.name} is not defined")
        elif operand is not None and not isinstance(operand, (bool, int, float, Expr)):
            self.fail(None, f"the {what} {operand!r} is no value, number or size")

    def check_strides(self) -> None:
        strides = self.graph.output_strides
        if not strides:
            return
        if len(strides) != len(self.graph.outputs):
            self.fail(None, f"there are {len(self.graph.outputs)} outputs and {len(strides)} entries of strides")
        for operand, wanted in zip(self.graph.outputs, strides, strict=True):
            if wanted is None:
                continue
            if not isinstance(operand, Value) or not isinstance(operand.type, TensorType) \
                    or len(wanted) != operand.type.rank:
                texts = ", ".join(str(size) for size in wanted)
                self.fail(None, f"the strides [{texts}] do not fit the output {operand}")

    def fail(self, position: int | None, why: str, word: str = "", do: str = "") -> NoReturn:
        made = f" after {self.stage}" if self.stage else ""
        where = self.place(position, word)
        if self.lines and position is not None:
            where = f"line {self.lines[position]}: {where}"
        if not do:
            do = "correct the text" if self.lines else "this is a bug of the compiler: please report it with this text"
        raise VerifyError(f"the graph {self.graph.name} is not valid{made}", where=where, why=why, do=do)

    def place(self, position: int | None, word: str) -> str:
        """The graph text around an equation, with a caret below `word` in it."""
        if position is None:
            return "\n".join((self.graph.name, *(f"    {line}" for line in header_lines(self.graph))))
        first = max(0, position - _CONTEXT)
        source = self.graph.nodes[position].where
        lines = header_lines(self.graph)[:1]
        if first:
            lines.append("  ...")
        lines.extend(node_line(node) for node in self.graph.nodes[first:position + 1])
        match = re.search(rf"(?<![\w.]){re.escape(word)}(?![\w.])", lines[-1]) if word else None
        lines.append(" " * (match.start() if match else 2) + "^")
        return "\n".join((source or self.graph.name, *(f"    {line}" for line in lines)))


def _is_attr(value: Attr) -> bool:
    if isinstance(value, tuple):
        return all(_is_attr(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str, Expr))


def _same(a: TensorType, b: TensorType, facts: Facts) -> bool:
    """Equal but for strides; sizes may be equal by a fact."""
    if a.dtype != b.dtype or a.rank != b.rank or a.device != b.device:
        return False
    return all(x == y or prove_equal(facts, x, y) is True for x, y in zip(a.shape, b.shape, strict=True))
