"""Reads a graph from its text form; see ir/show.py for the form. `parse(show(graph))` shows as `graph` does."""
from __future__ import annotations

import json
import re
from typing import NoReturn

from anyshape.base.errors import ParseError
from anyshape.ir.graph import Attr, Graph, Literal, Node, Operand, Value
from anyshape.ir.types import DTYPES, SizeType, TensorType, ValueType
from anyshape.sym import parse as size_text
from anyshape.sym.expr import Expr, Size
from anyshape.sym.facts import Facts

_SPACE = re.compile(r"[ \t]*")
_BLANK = re.compile(r"(?:\s|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_GRAPH_NAME = re.compile(r"[^\s(]+")
_INTEGER = re.compile(r"-?\d+")
_NUMBER = re.compile(r"-?(?:inf|nan|\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+)(?![A-Za-z0-9_.])")
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_DEVICE = re.compile(r"[a-z]+(?::\d+)?")
_COMMENT = re.compile(r"#[ \t]?([^\n]*)")
_RANGE = re.compile(r"(-?\d+)[ \t]*<=[ \t]*([A-Za-z_]\w*)(?:[ \t]*<=[ \t]*(-?\d+))?")
_HINT = re.compile(r"([A-Za-z_]\w*)[ \t]+near[ \t]+(-?\d+)")
_DIVIDES = re.compile(r"(\d+)[ \t]+divides[ \t]+")


def parse(text: str) -> Graph:
    """The graph written as `text`; a ParseError shows the line with a caret."""
    return _Reader(text).graph()


def parse_lines(text: str) -> tuple[Graph, tuple[int, ...]]:
    """The graph, and the number of the line (from 1) of each of its equations."""
    reader = _Reader(text)
    return reader.graph(), tuple(reader.lines)


class _Reader:
    """Reads from left to right; `at` is the position of the next character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
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
                self.lines.append(self.text.count("\n", 0, self.at) + 1)
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
            name = self.take(_NAME, "an input's name")
            self.expect(":")
            found.append(self.define(name, self.input_type()))
            self.skip_blank()
            if not self.on(")"):
                self.expect(",")
                self.skip_blank()
        self.expect(")")
        return found

    def facts(self) -> Facts:
        self.word("where")
        ranges: list[tuple[str, int, int | None]] = []
        hints: list[tuple[str, int]] = []
        divisible: list[tuple[Size, int]] = []
        known: list[Size] = []
        while True:
            self.skip_blank()
            if match := self.match(_RANGE):
                ranges.append((match[2], int(match[1]), None if match[3] is None else int(match[3])))
            elif match := self.match(_HINT):
                hints.append((match[1], int(match[2])))
            elif match := self.match(_DIVIDES):
                divisible.append((self.size(self.until(",\n")), int(match[1])))
            else:
                start = self.at
                text = self.until(",\n")
                if not text.endswith(">= 0"):
                    self.fail("no fact that is known", "write 1 <= n <= 8, n near 4, 8 divides n, or m - n >= 0", start)
                known.append(self.size(text[:-4], start))
            if not self.on(","):
                return Facts(tuple(ranges), tuple(hints), tuple(divisible), tuple(known))
            self.expect(",")

    # ---- one equation

    def node(self) -> Node:
        start = self.at
        names = [(self.take(_NAME, "an equation"), start)]
        self.skip_space()
        no_result = self.on("(")
        while self.on(","):
            self.expect(",")
            self.skip_space()
            names.append((self.take(_NAME, "a name"), self.at))
        if no_result:
            op = names.pop()[0]
        else:
            self.expect("=")
            op = self.take(_NAME, "the name of an op")
        self.expect("(")
        inputs, attrs = self.arguments()
        outputs: list[Value] = []
        for position, (name, where) in enumerate(names):
            if position:
                self.expect(",")
            outputs.append(self.define(name, self.tensor_type(), where))
        self.skip_space()
        comment = self.match(_COMMENT)
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
                name = self.take(_NAME, "an attribute's name")
                self.skip_space()
                if self.on("="):
                    self.expect("=")
                    attrs.append((name, self.attribute()))
                else:
                    attrs.append((name, True))
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

    def literal(self) -> Literal | None:
        for word, value in (("True", True), ("False", False)):
            if self.on_word(word):
                self.word(word)
                return value
        match = self.match(_NUMBER)
        return None if match is None else float(match[0])

    def attribute(self) -> Attr:
        self.skip_blank()
        if self.on("["):
            self.expect("[")
            items: list[Attr] = []
            self.skip_blank()
            while not self.on("]"):
                items.append(self.attribute())
                self.skip_blank()
                if not self.on("]"):
                    self.expect(",")
                    self.skip_blank()
            self.expect("]")
            return tuple(items)
        if match := self.match(_STRING):
            try:
                text = json.loads(match[0])
            except ValueError:
                self.fail("a text with a wrong escape", "write it as in JSON", match.start())
            assert isinstance(text, str)
            return text
        if self.on_word("None"):
            self.word("None")
            return None
        found = self.literal()
        if found is not None:
            return found
        start = self.at
        return self.size(self.until(",])"), start)

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
            match = self.peek(_NAME)
            if match and match[0] in self.values and isinstance(self.values[match[0]].type, TensorType):
                operands.append(self.value())
                strides.append(self.strides())
                self.skip_space()
                if self.on_word("in"):
                    self.word("in")
                    self.skip_space()
                    memory[-1] = self.take(_NAME, "whose memory it is")
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

    def tensor_type(self) -> TensorType:
        self.skip_space()
        start = self.at
        dtype = self.take(_NAME, "a type such as f32[b, n]")
        if dtype not in DTYPES:
            self.fail(f"{dtype} is no dtype", f"use one of {', '.join(DTYPES)}", start)
        shape = self.sizes()
        strides = self.strides()
        device = "cpu"
        self.skip_space()
        if self.on_word("on"):
            self.word("on")
            self.skip_space()
            device = self.take(_DEVICE, "a device")
        return TensorType(dtype, shape, strides, device)

    def strides(self) -> tuple[Size, ...] | None:
        self.skip_space()
        if not self.on_word("strides"):
            return None
        self.word("strides")
        return self.sizes()

    def sizes(self) -> tuple[Size, ...]:
        start = self.at
        found = self.attribute() if self.on("[") or (self.skip_space() and self.on("[")) else None
        if not isinstance(found, tuple):
            self.fail("expected sizes in brackets", "write them as [b, n]", start)
        for item in found:
            if isinstance(item, bool) or not isinstance(item, (int, Expr)):
                self.fail(f"{item!r} is no size", "write whole numbers and formulas", start)
        return found  # type: ignore[return-value]

    def size(self, text: str, start: int | None = None) -> Size:
        begin = self.at - len(text) if start is None else start
        try:
            return size_text.parse(text)
        except ParseError as error:
            self.fail(error.why or error.what, error.do, begin)

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
        name = self.take(_NAME, "a value's name")
        if name not in self.values:
            self.fail(f"{name} is not defined above", "define a value before its use", start)
        return self.values[name]

    def list_items(self) -> _Items:
        return _Items(self)

    # ---- characters

    def statement(self, word: str) -> bool:
        """Takes `word` when it starts a line of its own kind, not an equation of a value of that name."""
        end = self.at + len(word)
        if not self.on_word(word) or re.match(r"[ \t]*[=,(]", self.text[end:end + 80]):
            return False
        self.at = end
        return True

    def skip_space(self) -> bool:
        match = _SPACE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        return True

    def skip_blank(self) -> None:
        match = _BLANK.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def end_of_line(self) -> None:
        self.skip_space()
        if self.at < len(self.text) and not self.on("\n"):
            self.fail("more text than the line needs", "put every equation on its own line")

    def on(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def on_word(self, word: str) -> bool:
        end = self.at + len(word)
        return self.on(word) and not (end < len(self.text) and (self.text[end].isalnum() or self.text[end] == "_"))

    def word(self, word: str) -> None:
        self.skip_space()
        if not self.on_word(word):
            self.fail(f"expected {word!r}", "see the text form of graphs")
        self.at += len(word)

    def expect(self, text: str) -> None:
        self.skip_space()
        if not self.on(text):
            self.fail(f"expected {text!r}", "see the text form of graphs")
        self.at += len(text)

    def peek(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        return pattern.match(self.text, self.at)

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def take(self, pattern: re.Pattern[str], what: str) -> str:
        self.skip_space()
        match = self.match(pattern)
        if match is None:
            self.fail(f"expected {what}", "see the text form of graphs")
        return match[0]

    def until(self, stops: str) -> str:
        """The text up to one of `stops` that no parenthesis or bracket encloses."""
        depth = 0
        start = self.at
        while self.at < len(self.text):
            letter = self.text[self.at]
            if depth == 0 and letter in stops:
                break
            depth += (letter in "([") - (letter in ")]")
            self.at += 1
        return self.text[start:self.at].rstrip()

    def fail(self, why: str, do: str, at: int | None = None) -> NoReturn:
        position = min(self.at if at is None else at, len(self.text))
        start = self.text.rfind("\n", 0, position) + 1
        end = self.text.find("\n", position)
        line = self.text[start:] if end < 0 else self.text[start:end]
        number = self.text.count("\n", 0, position) + 1
        label = f"line {number}: "
        caret = " " * (len("  where: ") + len(label) + position - start) + "^"
        raise ParseError("cannot read the graph", where=f"{label}{line}\n{caret}", why=why, do=do)


class _Items:
    """Iterates once per item of a comma-separated list; the caller reads the item."""

    def __init__(self, reader: _Reader) -> None:
        self.reader = reader
        self.first = True

    def __iter__(self) -> _Items:
        return self

    def __next__(self) -> None:
        reader = self.reader
        reader.skip_space()
        if not self.first:
            if not reader.on(","):
                raise StopIteration
            reader.expect(",")
            reader.skip_space()
        self.first = False
