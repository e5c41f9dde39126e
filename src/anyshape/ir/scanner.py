"""The scanner of text forms: characters, words, sizes, types, attributes and facts, read from left to right.

The parsers of graphs (ir/parse.py) and of plans (plan/ir/parse.py) are made of it; ir/show.py prints the same pieces.
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NoReturn

from anyshape.base.errors import ParseError
from anyshape.ir.graph import Attr, Literal
from anyshape.ir.types import DTYPES, TensorType
from anyshape.sym import parse as size_text
from anyshape.sym.expr import Expr, Size
from anyshape.sym.facts import Facts

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
INTEGER = re.compile(r"-?\d{1,19}(?!\d)")
MOST_DEPTH = 64  # of brackets
STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
COMMENT = re.compile(r"#[ \t]?([^\n]*)")
_SPACE = re.compile(r"[ \t]*")
_COMMA = re.compile(r"[ \t]*,[ \t]*")
_BLANK = re.compile(r"(?:\s+|#[^\n]*)*")
_NUMBER = re.compile(r"-?(?:inf|nan|\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+)(?![A-Za-z0-9_.])")
# a whole number or a name that is all of an attribute: most are
_SIMPLE = re.compile(r"(?:(\d{1,18})|([A-Za-z_]\w*))(?=[,\])}\n#])")
_WORDS = frozenset(("True", "False", "None", "inf", "nan"))
_ASSIGNED = re.compile(r"[ \t]*[=,(]")
# what may end a text, or is a parenthesis or bracket; and a text without any: one pattern each for all that may end
# one, for a pattern takes longer to compile than a plan does to read
_END = re.compile(r"->|[()\[\],;:|{}\n#]")
_PLAIN = re.compile(r"[\w *+/]*")
_LITERAL = tuple("TF-in0123456789")  # what a literal begins with
_DEVICE = re.compile(r"[a-z]+(?::\d+)?")
# a whole type on one line, which is the same wherever its text stands
_TYPE = re.compile(r"\w+\[[^\[\]\n#]*\](?:[ \t]*strides[ \t]*\[[^\[\]\n#]*\])?(?:[ \t]+on[ \t]+[a-z]+(?::\d+)?(?!\w))?"
                   r"(?![ \t]*(?:strides|on)\b)")
# a type whose sizes are numbers, as of weights
_FIXED = re.compile(r"(\w+)\[((?:\d{1,18}(?:, ?\d{1,18})*)?)\](?: strides \[((?:\d{1,18}(?:, ?\d{1,18})*)?)\])?")
_RANGE = re.compile(r"(-?\d{1,19})[ \t]*<=[ \t]*([A-Za-z_]\w*)(?:[ \t]*<=[ \t]*(-?\d{1,19})(?!\d))?")
_HINT = re.compile(r"([A-Za-z_]\w*)[ \t]+near[ \t]+(-?\d{1,18})(?!\d)")
_DIVIDES = re.compile(r"(\d{1,18})[ \t]+divides[ \t]+")


class Scanner:
    """Reads from left to right; `at` is the position of the next character. `what`: what the text is of, and
    its `item`s, for messages."""

    what, item = "text", "line"

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.counted = (0, 1)  # a position, and the number of its line
        self.known_types: dict[str, TensorType] = {}  # by their text: layers repeat

    # ---- facts

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

    # ---- numbers and attributes

    def literal(self) -> Literal | None:
        if not self.text.startswith(_LITERAL, self.at):
            return None
        for word, value in (("True", True), ("False", False)):
            if self.on_word(word):
                self.word(word)
                return value
        match = self.match(_NUMBER)
        return None if match is None else float(match[0])

    def named_attribute(self) -> tuple[str, Attr]:
        """`name=value`, or the name of a flag that is set."""
        name = self.take(NAME, "an attribute's name")
        self.skip_space()
        if not self.on("="):
            return name, True
        self.expect("=")
        return name, self.attribute()

    def attribute(self) -> Attr:
        self.skip_blank()
        simple = _SIMPLE.match(self.text, self.at)
        if simple is not None and simple[0] not in _WORDS:
            self.at = simple.end()
            return int(simple[1]) if simple[1] else self.size(simple[0])
        if self.on("["):
            self.expect("[")
            items: list[Attr] = []
            self.depth += 1
            if self.depth > MOST_DEPTH:
                self.fail(f"brackets are nested more than {MOST_DEPTH} deep", "write fewer brackets")
            self.skip_blank()
            while not self.on("]"):
                items.append(self.attribute())
                self.skip_blank()
                if not self.on("]"):
                    self.expect(",")
                    self.skip_blank()
            self.expect("]")
            self.depth -= 1
            return tuple(items)
        if match := self.match(STRING):
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
        return self.size(self.until(",])}\n#"), start)

    # ---- types

    def tensor_type(self) -> TensorType:
        self.skip_space()
        start = self.at
        whole = self.peek(_TYPE)
        if whole is None:
            return self.new_type()
        known = self.known_types.get(whole[0])
        if known is None and (fixed := _FIXED.fullmatch(whole[0])) is not None and fixed[1] in DTYPES:
            known = self.known_types[whole[0]] = TensorType(
                fixed[1], _numbers(fixed[2]), None if fixed[3] is None else _numbers(fixed[3]))
        if known is not None:
            self.at = whole.end()
            self.skip_space()
            return known
        found = self.new_type()
        if self.text[start:self.at].rstrip(" \t") == whole[0]:
            self.known_types[whole[0]] = found
        return found

    def new_type(self) -> TensorType:
        start = self.at
        dtype = self.take(NAME, "a type such as f32[b, n]")
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

    def list_items(self) -> Iterator[None]:
        """Once per item of a list with commas; the caller reads the item."""
        self.skip_space()
        while True:
            yield
            match = _COMMA.match(self.text, self.at)
            if match is None:
                self.skip_space()
                return
            self.at = match.end()

    # ---- characters

    def line_number(self) -> int:
        """The number of the line that is read, from 1; lines are counted once, however often it is asked."""
        position, number = self.counted
        if position > self.at:
            position, number = 0, 1
        self.counted = (self.at, number + self.text.count("\n", position, self.at))
        return self.counted[1]

    def statement(self, word: str) -> bool:
        """Takes `word` when it starts a line of its own kind, not an equation of a value of that name."""
        end = self.at + len(word)
        if not self.on_word(word) or _ASSIGNED.match(self.text, end, end + 80):
            return False
        self.at = end
        return True

    def skip_space(self) -> bool:
        if self.text.startswith((" ", "\t"), self.at):
            match = _SPACE.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
        return True

    def skip_blank(self) -> None:
        letter = self.text[self.at:self.at + 1]
        if not (letter == "#" or letter.isspace()):
            return
        match = _BLANK.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def end_of_line(self) -> None:
        self.skip_space()
        if self.at < len(self.text) and not self.on("\n"):
            self.fail("more text than the line needs", f"put every {self.item} on its own line")

    def on(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def on_word(self, word: str) -> bool:
        if not self.text.startswith(word, self.at):
            return False
        end = self.at + len(word)
        return not (end < len(self.text) and (self.text[end].isalnum() or self.text[end] == "_"))

    # each of these looks where it is first: most often there is no space to skip

    def word(self, word: str) -> None:
        if not self.on_word(word) and self.skip_space() and not self.on_word(word):
            self.fail(f"expected {word!r}", f"see the text form of {self.what}s")
        self.at += len(word)

    def expect(self, text: str) -> None:
        if not self.text.startswith(text, self.at) and self.skip_space() and not self.on(text):
            self.fail(f"expected {text!r}", f"see the text form of {self.what}s")
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
        match = pattern.match(self.text, self.at)
        if match is None:
            self.fail(f"expected {what}", f"see the text form of {self.what}s")
        self.at = match.end()
        return match[0]

    def until(self, stops: str) -> str:
        """The text up to an arrow or one of `stops` (of those in `_END`), none of which a parenthesis or bracket
        encloses."""
        plain = _PLAIN.match(self.text, self.at)
        if plain is not None and self.text.startswith((*stops,), plain.end()):
            self.at = plain.end()
            return plain[0].rstrip()
        depth = 0
        start, self.at = self.at, len(self.text)
        for match in _END.finditer(self.text, start):
            letter = match[0]
            if depth == 0 and (letter in stops or letter == "->"):
                self.at = match.start()
                break
            depth += (letter in "([") - (letter in ")]")
        return self.text[start:self.at].rstrip()

    def fail(self, why: str, do: str, at: int | None = None) -> NoReturn:
        position = min(self.at if at is None else at, len(self.text))
        start = self.text.rfind("\n", 0, position) + 1
        end = self.text.find("\n", position)
        line = self.text[start:] if end < 0 else self.text[start:end]
        number = self.text.count("\n", 0, position) + 1
        label = f"line {number}: "
        caret = " " * (len("  where: ") + len(label) + position - start) + "^"
        raise ParseError(f"cannot read the {self.what}", where=f"{label}{line}\n{caret}", why=why, do=do)


def _numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them."""
    return tuple(map(int, text.split(","))) if text else ()
