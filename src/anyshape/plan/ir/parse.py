"""Parses plans from their text form; see plan/ir/show.py for the form. `parse(show(plan)) == plan`."""
from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ForwardRef, NamedTuple, get_args, get_origin, get_type_hints

from anyshape.ir.graph import Attr, Literal
from anyshape.ir.scanner import COMMENT, INTEGER, NAME, STRING, Scanner
from anyshape.ir.types import TensorType
from anyshape.plan.ir.home import (
    External,
    Home,
    IndexedHome,
    Input,
    Output,
    Recomputed,
    Restored,
    RestoredBase,
    Saved,
    Temp,
)
from anyshape.plan.ir.program import (
    Buffer,
    CopyStep,
    ExternStep,
    KernelStep,
    LibraryStep,
    MemoryStep,
    Plan,
    RecomputeStep,
    Regime,
    Step,
    TiledGemmStep,
    Window,
)
from anyshape.sym.expr import Expr, Size
from anyshape.sym.facts import Facts

# fields that have words of their own in the text
SPOKEN: dict[type, tuple[str, ...]] = {
    Buffer: ("name", "bytes", "home", "first", "last"),
    KernelStep: ("regimes", "params", "handed"),
    LibraryStep: ("op", "inputs", "outputs", "attrs"),
    ExternStep: ("target", "inputs", "outputs"),
    TiledGemmStep: ("product", "kernel", "result", "rows"),
    CopyStep: ("source", "target"),
    MemoryStep: ("take", "drop"),
    Plan: ("name", "inputs", "outputs", "saved", "buffers", "steps", "arena", "facts", "kept", "together", "again"),
}
PLAN_NAME = re.compile(r'[^\s"#{]+')
HOMES: dict[str, Callable[..., Home]] = {
    kind.word: kind for kind in (Input, Output, Temp, Saved, Restored, External, RestoredBase, Recomputed)}
INDEXED = frozenset(kind for kind in HOMES.values() if isinstance(kind, type) and issubclass(kind, IndexedHome))
_FIELD = re.compile(r"[^ \n#{]+(?: [^ \n#{]+)*")
_BYTES = re.compile(r"(.+?) bytes\b")
_LIFE = re.compile(r"[ \t]*([^\n]+?) bytes[ \t]+steps[ \t]+(-?\d{1,19})-(-?\d{1,19})(?!\d)")
_SPAN = re.compile(r"(-?\d+)-(-?\d+)")
_ALONE = re.compile(rf"[ \t]*({NAME.pattern})(?=[ \t]*(?:[,;|){{\n#]|->))")  # a name without offset or type
_NOTHING = re.compile(r"[ \t]*(?=\n[ \t]*[^\s{#])")  # the end of a line, and a next one that does not belong to it
_NAMES = re.compile(rf"\(((?:&?{NAME.pattern}, )*&?{NAME.pattern})(?=[;)])")  # in parentheses, alone
_BRACES = re.compile(r"\{[^{}\"\n#]*\}")  # on one line, which say the same wherever they stand
_CONDITION = re.compile(r"([^\n]+?) >= 0")


class ParsedPlan(NamedTuple):
    """A plan, and the numbers of lines (from 1) of its head, its buffers by name, and its steps."""

    plan: Plan
    line: int
    buffers: dict[str, int]
    steps: tuple[int, ...]


def parse(text: str) -> Plan:
    """The plan written as `text`; a ParseError shows the line with a caret."""
    found, *others = parse_lines(text)
    if others:
        reader = _Reader(text)
        reader.at = sum(len(line) + 1 for line in text.split("\n")[:others[0].line - 1])
        reader.fail("text after the end of the plan", "write one plan")
    return found.plan


def parse_lines(text: str) -> list[ParsedPlan]:
    """The plans of a text, one or more, with their lines."""
    reader = _Reader(text)
    found = [reader.parsed()]
    while reader.on_word("plan"):
        found.append(reader.parsed())
    if reader.at < len(text):
        reader.fail("this is no line of a plan", "see the text form of plans")
    return found


class _Reader(Scanner):
    """Reads one plan after another. types: buffer -> type of a window that is written by its name alone; bare: buffers
    whose names stand without quotes."""

    what, item = "plan", "step"

    def start(self) -> None:
        self.types: dict[str, TensorType] = {}
        self.bare: set[str] = set()
        self.wholes: dict[str, Window] = {}
        self.inputs: list[TensorType | str] = []
        self.tape: dict[int, int] = {}
        self.buffers: list[Buffer] = []
        self.offsets: list[tuple[str, Size]] = []
        self.steps: list[Step] = []
        self.optional: list[int] = []
        self.lines: dict[str, int] = {}
        self.step_lines: list[int] = []
        self.braces: dict[tuple[type[Any], str], dict[str, Any]] = {}

    # ---- the whole

    def parsed(self) -> ParsedPlan:
        self.start()
        self.skip_blank()
        line = self.line()
        self.word("plan")
        given: dict[str, Any] = {"name": self.text_of(PLAN_NAME, "the plan's name")}
        self.word("arena")
        given["arena"] = self.field()
        self.skip_space()
        if self.on_word("kept"):
            self.word("kept")
            given["kept"] = self.field()
        self.end_of_line()
        self.skip_blank()
        given["facts"] = self.facts() if self.on_word("where") else Facts()
        given |= {"outputs": (), "saved": (), "together": (), "again": ()}
        readers: dict[str, Callable[[], None]] = {"in": self.input, "buffer": self.buffer}
        lists: dict[str, Callable[[], tuple[Any, ...]]] = {
            "out": self.entries, "saved": self.entries, "together": self.spans}
        fields = {field.name for field in dataclasses.fields(Plan)} - set(SPOKEN[Plan])
        while True:
            self.skip_blank()
            start, word = self.at, self.match(NAME)
            if number := self.match(INTEGER):
                self.number(int(number[0]), start)
            elif word is None or word[0] == "plan":
                self.at = start
                break
            elif word[0] in readers:
                readers[word[0]]()
            elif word[0] in lists:
                given[{"out": "outputs"}.get(word[0], word[0])] = lists[word[0]]()
            elif word[0] == "again":
                given["again"] = (*given["again"], self.again())
            elif word[0] in fields:
                given[word[0]] = self.of_field(Plan, word[0], self.attribute(), start)
            else:
                words = ", ".join((*readers, *lists, "again", *sorted(fields)))
                self.fail(f"{word[0]} is no word of a plan", f"begin with the number of a step, or {words}", start)
            self.end_of_line()
        return ParsedPlan(self.plan(given, start), line, self.lines, tuple(self.step_lines))

    def plan(self, given: dict[str, Any], at: int) -> Plan:
        if sorted(self.tape) != list(range(len(self.tape))):
            self.fail("entries of the tape are missing", "number them from 0, each one once", at)
        given.setdefault("optional", tuple(self.optional))
        given.setdefault("restored", tuple(self.tape[k] for k in sorted(self.tape)))
        given.setdefault("offsets", tuple(self.offsets))
        return Plan(inputs=tuple(self.inputs), buffers=tuple(self.buffers), steps=tuple(self.steps), **given)

    # ---- inputs and buffers

    def input(self) -> None:
        name, bare = self.name("an input")
        self.expect(":")
        self.skip_space()
        kind: TensorType | None = None
        if self.on_word("size"):
            self.word("size")
            self.inputs.append(name)
        else:
            kind = self.tensor_type()
            self.inputs.append(kind)
        position = len(self.inputs) - 1
        home: Home = Input(position)
        self.skip_space()
        start = self.at
        if self.on_word("from"):
            self.word("from")
            self.word("tape")
            index = int(self.take(INTEGER, "the number of the tape's entry"))
            home = Restored(index)
            if index in self.tape:
                self.fail(f"entry {index} of the tape is there twice", "give each one its own number", start)
            self.tape[index] = position
            self.skip_space()
        if kind is not None and not (name == "_" and bare):
            self.rest_of_buffer(name, bare, kind, home)

    def buffer(self) -> None:
        name, bare = self.name("a buffer")
        self.skip_space()
        kind = None
        if self.on(":"):
            self.expect(":")
            kind = self.tensor_type()
        self.rest_of_buffer(name, bare, kind, None)

    def rest_of_buffer(self, name: str, bare: bool, kind: TensorType | None, home: Home | None) -> None:
        if name in self.lines:
            self.fail(f"two buffers are called {name}", "give every buffer its own name")
        self.lines[name] = self.line()
        if kind is not None:
            self.types[name] = kind
        if bare:
            self.bare.add(name)
            if kind is not None:
                self.wholes[name] = Window(name, kind)
        bytes_, first, last = self.life()
        if home is None:
            home = self.home()
        self.skip_space()
        if self.on("@"):
            self.expect("@")
            self.offsets.append((name, self.field()))
        self.buffers.append(Buffer(name, bytes_, home, first, last, **self.attributes(Buffer)))

    def life(self) -> tuple[Size, int, int]:
        """The bytes of a buffer, and the first and the last step at which it is there."""
        if match := self.match(_LIFE):
            return self.size(match[1], match.start(1)), int(match[2]), int(match[3])
        self.skip_space()
        start = self.at
        match = self.match(_BYTES)
        if match is None:
            self.fail("expected the bytes of the buffer", "write: 4*n bytes  steps 0-3", start)
        bytes_ = self.size(match[1], start)
        self.word("steps")
        return bytes_, *self.span()

    def home(self) -> Home:
        self.skip_space()
        start = self.at
        word = self.take(NAME, "where it lives")
        if word not in HOMES:
            self.fail(f"{word} is no place where a buffer lives", f"use one of {', '.join(HOMES)}", start)
        kind = HOMES[word]
        return kind(int(self.take(INTEGER, "which one"))) if kind in INDEXED else kind()

    def again(self) -> RecomputeStep:
        buffer = self.known()
        for word in ("in", "place", "of"):
            self.word(word)
        saved, _ = self.name("a buffer of the forward")
        self.expect(",")
        self.word("segment")
        segment = int(self.take(INTEGER, "a number"))
        self.expect(":")
        windows = []
        self.skip_space()
        while not self.on("\n") and self.at < len(self.text):
            name = self.known()
            self.expect("@")
            windows.append((name, self.size(self.until(",\n#"))))
            if self.on(","):
                self.expect(",")
            self.skip_space()
        return RecomputeStep(saved, buffer, segment, tuple(windows))

    # ---- steps

    def number(self, number: int, start: int) -> None:
        if number != len(self.steps):
            self.fail(f"step {number} stands where step {len(self.steps)} should", "number the steps from 0, in order",
                      start)
        self.step_lines.append(self.line())
        self.skip_space()
        if self.on("?"):
            self.expect("?")
            self.optional.append(number)
        self.steps.append(self.step())

    def step(self) -> Step:
        self.skip_blank()
        if self.statement("kernel"):
            return self.kernel()
        if self.statement("call"):
            return self.call()
        if self.statement("copy"):
            source = self.window()
            self.expect("->")
            return self.finished(CopyStep, source=source, target=self.window())
        if self.statement("memory"):
            return self.memory()
        if self.statement("tiles"):
            return self.tiles()
        return self.library()

    def kernel(self) -> KernelStep:
        self.skip_space()
        regimes: list[tuple[tuple[str, ...], tuple[Size, ...], tuple[Size, ...] | None]] = []
        while not self.on("("):
            names = tuple(self.text_of(NAME, "a kernel") for _ in self.list_items())
            own = self.sizes() if self.on("[") else None
            conditions = []
            self.skip_space()
            if self.on_word("if"):
                self.word("if")
                conditions.append(self.condition())
                while self.skip_space() and self.on_word("and"):
                    self.word("and")
                    conditions.append(self.condition())
            regimes.append((names, tuple(conditions), own))
            self.skip_space()
            if not self.on("("):
                self.expect("|")
                self.skip_space()
        params, outputs = self.params()
        sizes: tuple[Size, ...] = ()
        if self.on(";"):
            self.expect(";")
            sizes = tuple(self.size(self.until(",)")) for _ in self.list_items())
        self.expect(")")
        self.skip_space()
        handed: tuple[Window, ...] = ()
        if self.on_word("handed"):
            self.word("handed")
            handed = tuple(self.window() for _ in self.list_items())
        return self.finished(
            KernelStep, params=tuple(params), outputs=tuple(outputs), handed=handed,
            regimes=tuple(Regime(names[0], conditions, sizes if own is None else own, names[1:])
                          for names, conditions, own in regimes))

    def params(self) -> tuple[list[Window], list[int]]:
        """What a kernel reads and writes, and which of it it writes."""
        names = self.peek(_NAMES)
        if names is not None:  # most are whole buffers
            marked = names[1].split(", ")
            whole = [self.wholes.get(name.lstrip("&")) for name in marked]
            if None not in whole:
                self.at = names.end()
                return whole, [i for i, name in enumerate(marked) if name[0] == "&"]  # type: ignore[return-value]
        params: list[Window] = []
        outputs: list[int] = []
        for _ in self.inside(";)"):
            if self.on("&"):
                self.expect("&")
                outputs.append(len(params))
            params.append(self.window())
        return params, outputs

    def condition(self) -> Size:
        self.skip_space()
        start = self.at
        match = self.match(_CONDITION)
        if match is None:
            self.fail("expected a condition", "write: n - 16 >= 0", start)
        return self.size(match[1], start)

    def call(self) -> ExternStep:
        target = self.text_of(NAME, "an operator")
        inputs = tuple(self.entry(",)") for _ in self.inside(")"))
        self.expect(")")
        return self.finished(ExternStep, target=target, inputs=inputs, outputs=self.results())

    def library(self) -> LibraryStep:
        op = self.text_of(NAME, "a step")
        inputs = tuple(self.window() for _ in self.inside("|)"))
        attrs = []
        if self.on("|"):
            self.expect("|")
            attrs = [self.named_attribute() for _ in self.list_items()]
        self.expect(")")
        return self.finished(LibraryStep, op=op, inputs=inputs, outputs=self.results(), attrs=tuple(attrs))

    def memory(self) -> MemoryStep:
        lists: dict[str, tuple[str, ...]] = {"take": (), "drop": ()}
        self.skip_space()
        for word in lists:
            if self.on_word(word):
                self.word(word)
                lists[word] = tuple(self.known() for _ in self.list_items())
                if self.on(";"):
                    self.expect(";")
                    self.skip_space()
        return self.finished(MemoryStep, **lists)

    def tiles(self) -> TiledGemmStep:
        self.word("of")
        rows = int(self.take(INTEGER, "a number of rows"))
        self.word("rows")
        self.expect(",")
        self.word("param")
        result = int(self.take(INTEGER, "the number of a param"))
        more = self.attributes(TiledGemmStep)
        start = self.at
        product, kernel = self.step(), self.step()
        if not isinstance(product, LibraryStep) or not isinstance(kernel, KernelStep):
            self.fail("tiles are of a product and a kernel", "write the two steps below", start)
        return TiledGemmStep(product, kernel, result, rows, **more)

    def results(self) -> tuple[Any, ...]:
        self.expect("->")
        return self.entries()

    def finished(self, cls: type[Any], **given: Any) -> Any:
        """The step, with its source line and what stands in braces below."""
        self.skip_space()
        comment = self.match(COMMENT)
        if comment and (where := comment[1].strip()):
            given["where"] = where
        start = self.at
        given |= self.attributes(cls)
        needed = _needed(cls)  # type: ignore[arg-type]  # classes are hashable
        if missing := [name for name in needed if name not in given]:
            self.fail(f"{', '.join(missing)} is missing", f"write it below: {{{missing[0]}=...}}", start)
        return cls(**given)

    def attributes(self, cls: type[Any]) -> dict[str, Any]:
        """What stands in braces, at the end of a line or below it."""
        if (match := _NOTHING.match(self.text, self.at)) is not None:
            self.at = match.end()
            return {}
        self.end_of_line()
        start = self.at
        self.skip_blank()
        if not self.on("{"):
            self.at = start
            return {}
        whole = self.peek(_BRACES)
        if whole is not None and (known := self.braces.get((cls, whole[0]))) is not None:
            self.at = whole.end()
            return known
        self.expect("{")
        found: dict[str, Any] = {}
        for _ in self.list_items():
            self.skip_blank()
            start = self.at
            name, value = self.named_attribute()
            found[name] = self.of_field(cls, name, value, start)
        self.expect("}")
        if whole is not None and self.at == whole.end():
            self.braces[cls, whole[0]] = found
        return found

    def of_field(self, cls: type[Any], name: str, value: Attr, start: int) -> Attr:
        """A value that a field of a class may have."""
        known = [field.name for field in dataclasses.fields(cls) if field.compare]
        if name not in known:
            self.fail(f"{name} is no attribute here", f"use one of {', '.join(known)}", start)
        hint = _hints(cls)[name]  # type: ignore[arg-type]  # classes are hashable
        if not _is(value, hint):
            from anyshape.ir.show import attr_text  # nothing else here prints
            self.fail(f"{name} cannot be {attr_text(value)}", f"it is a {getattr(hint, '__name__', hint)}", start)
        return value

    # ---- windows, sizes, names

    def entries(self) -> tuple[Any, ...]:
        self.skip_space()
        if self.at >= len(self.text) or self.text[self.at] in "\n#":
            return ()
        return tuple(self.entry(",\n#{") for _ in self.list_items())

    def entry(self, stops: str) -> Window | Expr | Literal | None:
        if (window := self.whole()) is not None:
            return window
        self.skip_space()
        if self.on_word("None"):
            self.word("None")
            return None
        literal = self.literal()
        if literal is not None:
            return literal
        start, name = self.at, self.peek(NAME)
        text = self.until(stops)
        if text.startswith('"') or ":" in text or (name is not None and name[0] in self.bare):
            self.at = start
            return self.window()
        return self.size(text, start)

    def whole(self) -> Window | None:
        """The whole of a buffer, where a name stands alone: most of what steps touch."""
        match = _ALONE.match(self.text, self.at)
        if match is None or match[1] not in self.bare or match[1] not in self.types:
            return None
        self.at = match.end()
        return self.wholes[match[1]]

    def window(self) -> Window:
        if (window := self.whole()) is not None:
            return window
        self.skip_space()
        start = self.at
        name, _ = self.name("a buffer")
        self.skip_space()
        offset: Size = 0
        if self.on("+"):
            self.expect("+")
            self.skip_space()
            begin = self.at
            offset = self.size(self.until(":,|;)\n#{"), begin)
            self.skip_space()
        if self.on(":"):
            self.expect(":")
            return Window(name, self.tensor_type(), offset)
        if name not in self.types:
            self.fail(f"the type of {name} is not known", "name a buffer that is defined above with its type, or write "
                      "the type behind it: x: f32[b, n]", start)
        return Window(name, self.types[name], offset)

    def known(self) -> str:
        self.skip_space()
        start = self.at
        name, _ = self.name("a buffer")
        if name not in self.lines:
            self.fail(f"{name} is no buffer", "define a buffer before its use", start)
        return name

    def name(self, what: str) -> tuple[str, bool]:
        """A name, and whether it stands without quotes."""
        self.skip_space()
        bare = not self.on('"')
        return self.text_of(NAME, what), bare

    def text_of(self, pattern: re.Pattern[str], what: str) -> str:
        """What `pattern` says, or a text in quotes."""
        self.skip_space()
        if self.on('"') and self.peek(STRING):
            text = self.attribute()
            assert isinstance(text, str)
            return text
        return self.take(pattern, what)

    def inside(self, stops: str) -> Any:
        """Once per item of what stands in parentheses up to one of `stops`."""
        self.expect("(")
        self.skip_space()
        if not (self.at < len(self.text) and self.text[self.at] in stops):
            yield from self.list_items()

    def field(self) -> Size:
        """A size that two spaces or the line's end follow."""
        self.skip_space()
        start = self.at
        match = self.match(_FIELD)
        if match is None:
            self.fail("expected a size", "write a polynomial such as 4*b*n + 8", start)
        return self.size(match[0], start)

    def spans(self) -> tuple[tuple[int, int], ...]:
        found = []
        while True:
            self.skip_blank()
            found.append(self.span())
            self.skip_space()
            if not self.on(","):
                return tuple(found)
            self.expect(",")

    def span(self) -> tuple[int, int]:
        self.skip_space()
        start = self.at
        match = self.match(_SPAN)
        if match is None:
            self.fail("expected a first and a last step", "write: 0-3", start)
        return int(match[1]), int(match[2])

    def end_of_line(self) -> None:
        if not self.on("\n"):
            self.skip_space()
            self.match(COMMENT)
            super().end_of_line()

    def line(self) -> int:
        return self.line_number()


@lru_cache(maxsize=64)
def _needed(cls: type[Any]) -> tuple[str, ...]:
    """The fields of a class that have no default."""
    return tuple(field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING)


@lru_cache(maxsize=64)
def _hints(cls: type[Any]) -> dict[str, Any]:
    """The types of a class's fields, which are texts until they are asked for."""
    return get_type_hints(cls)


def _is(value: Attr, hint: Any) -> bool:
    """Whether a value is of a type, one of those that fields of plans have."""
    parts = get_args(hint)
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return len(value) == len(kinds) and all(map(_is, value, kinds))
    if parts:
        return any(_is(value, part) for part in parts)
    if isinstance(hint, ForwardRef):  # what is in an attribute's tuple
        return True
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
