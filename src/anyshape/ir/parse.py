"""Reads a graph from its text form; see ir/show.py for the form. `parse(show(graph))` shows as `graph` does."""
from __future__ import annotations

import re

from anyshape.ir.graph import Attr, Graph, Node, Operand, Value
from anyshape.ir.scanner import COMMENT, NAME, Scanner
from anyshape.ir.types import SizeType, TensorType, ValueType
from anyshape.sym.expr import Expr
from anyshape.sym.facts import Facts

_GRAPH_NAME = re.compile(r"[^\s(]+")


def parse(text: str) -> Graph:
    """The graph written as `text`; a ParseError shows the line with a caret."""
    return _Reader(text).graph()


def parse_lines(text: str) -> tuple[Graph, tuple[int, ...]]:
    """The graph, and the number of the line (from 1) of each of its equations."""
    reader = _Reader(text)
    return reader.graph(), tuple(reader.lines)


class _Reader(Scanner):
    what, item = "graph", "equation"

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.values: dict[str, Value] = {}
        self.lines: list[int] = []

    # ---- the whole

    def graph(self) -> Graph:
        self.skip_blank()
        self.word("graph")
        name = self.take(_GRAPH_NAME, "the graph's name")
        inputs = tuple(self.inputs())
        self.skip_blank()
        facts = self.facts() if self.on_word("where") else Facts()
        restored: tuple[Value, ...] = ()
        nodes: list[Node] = []
        writes: list[tuple[Value, Value]] = []
        saved: tuple[Operand, ...] = ()
        while True:
            self.skip_blank()
            if self.statement("from"):
                self.word("tape")
                restored = tuple(self.value() for _ in self.list_items())
            elif self.statement("write"):
                target = self.value()
                self.expect("<-")
                writes.append((target, self.value()))
            elif self.statement("save"):
                saved = tuple(self.saved_operand() for _ in self.list_items())
            elif self.statement("return"):
                outputs, strides, memory = self.outputs()
                break
            else:
                self.lines.append(self.line_number())
                nodes.append(self.node())
        self.skip_blank()
        if self.at < len(self.text):
            self.fail("text after the return line", "end the graph with return")
        return Graph(name, inputs, tuple(nodes), outputs, strides, memory, tuple(writes), saved, restored, facts)

    def inputs(self) -> list[Value]:
        self.expect("(")
        found: list[Value] = []
        self.skip_blank()
        while not self.on(")"):
            name = self.take(NAME, "an input's name")
            self.expect(":")
            found.append(self.define(name, self.input_type()))
            self.skip_blank()
            if not self.on(")"):
                self.expect(",")
                self.skip_blank()
        self.expect(")")
        return found

    # ---- one equation

    def node(self) -> Node:
        start = self.at
        names = [(self.take(NAME, "an equation"), start)]
        self.skip_space()
        no_result = self.on("(")
        while self.on(","):
            self.expect(",")
            self.skip_space()
            names.append((self.take(NAME, "a name"), self.at))
        if no_result:
            op = names.pop()[0]
        else:
            self.expect("=")
            op = self.take(NAME, "the name of an op")
        self.expect("(")
        inputs, attrs = self.arguments()
        outputs: list[Value] = []
        for position, (name, where) in enumerate(names):
            if position:
                self.expect(",")
            outputs.append(self.define(name, self.tensor_type(), where))
        self.skip_space()
        comment = self.match(COMMENT)
        self.end_of_line()
        return Node(op, inputs, attrs, tuple(outputs), comment[1].rstrip() if comment else "")

    def arguments(self) -> tuple[tuple[Operand, ...], tuple[tuple[str, Attr], ...]]:
        inputs: list[Operand] = []
        attrs: list[tuple[str, Attr]] = []
        self.skip_blank()
        while not self.on(")") and not self.on("|"):
            inputs.append(self.operand())
            self.skip_blank()
            if self.on(","):
                self.expect(",")
                self.skip_blank()
            elif not self.on(")") and not self.on("|"):
                self.fail("an operand that does not end here", "part operands by commas")
        if self.on("|"):
            self.expect("|")
            while True:
                self.skip_blank()
                attrs.append(self.named_attribute())
                self.skip_blank()
                if self.on(")"):
                    break
                self.expect(",")
        self.expect(")")
        return tuple(inputs), tuple(attrs)

    def operand(self, stop: str = ",|)") -> Operand:
        start = self.at
        found = self.literal()
        if found is not None:
            return found
        text = self.until(stop)
        if text in self.values:
            value = self.values[text]
            if isinstance(value.type, TensorType):
                return value
        return self.size(text, start)

    def saved_operand(self) -> Operand:
        return self.operand(",\n#")

    # ---- the end

    def outputs(self) -> tuple[tuple[Operand | None, ...], tuple[tuple[Expr | int, ...] | None, ...], tuple[str, ...]]:
        memory: list[str] = []
        operands: list[Operand | None] = []
        strides: list[tuple[Expr | int, ...] | None] = []
        self.skip_space()
        if self.at >= len(self.text) or self.on("\n") or self.on("#"):
            return (), (), ()
        for _ in self.list_items():
            memory.append("")
            if self.on_word("None"):
                self.word("None")
                operands.append(None)
                strides.append(None)
                continue
            match = self.peek(NAME)
            if match and match[0] in self.values and isinstance(self.values[match[0]].type, TensorType):
                operands.append(self.value())
                strides.append(self.strides())
                self.skip_space()
                if self.on_word("in"):
                    self.word("in")
                    self.skip_space()
                    memory[-1] = self.take(NAME, "whose memory it is")
            else:
                operands.append(self.saved_operand())
                strides.append(None)
        return (tuple(operands), tuple(strides) if any(item is not None for item in strides) else (),
                tuple(memory) if any(memory) else ())

    # ---- types

    def input_type(self) -> ValueType:
        self.skip_space()
        if self.on_word("size"):
            self.word("size")
            return SizeType()
        return self.tensor_type()

    # ---- names

    def define(self, name: str, kind: ValueType, start: int | None = None) -> Value:
        if name in self.values:
            self.fail(f"{name} is defined twice", "give every value its own name", start)
        value = Value(name, kind)
        self.values[name] = value
        return value

    def value(self) -> Value:
        self.skip_space()
        start = self.at
        name = self.take(NAME, "a value's name")
        if name not in self.values:
            self.fail(f"{name} is not defined above", "define a value before its use", start)
        return self.values[name]
