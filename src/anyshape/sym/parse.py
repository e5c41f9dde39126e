"""Sizes from text (the inverse of `str(size)`, and a little more), and sizes as Python source."""
from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from anyshape.base.errors import ParseError
from anyshape.sym.expr import Expr, Size, floordiv, maximum, minimum, mod, root, scaled, symbol

MOST_DEPTH = 64  # of parentheses
MOST_DIGITS = 19  # of numbers of 64 bits
MOST_WORK = 1 << 14  # terms that are multiplied in one text: a product of 24 sums would be 2^24 terms
MOST_TOKENS = 1 << 16
MOST_TEXT = 1 << 20  # characters
MOST_PARTS = 4096  # that are remembered
_TOKEN = re.compile(r"\s*(//|\*\*|[-+*(),]|\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+|\d+|[%A-Za-z_][A-Za-z0-9_]*)")
_PARENTHESES = frozenset("()")


class _Part(NamedTuple):
    """What stands in parentheses, with the `depth` of those in it and the `work` of its products: texts of one plan
    have most of their parts in common, and a text is refused whether or not its parts were read before."""

    size: Size
    depth: int
    work: int


_parts: dict[str, _Part] = {}  # by their texts


@lru_cache(maxsize=4096)  # a text form says the same few sizes again and again
def parse(text: str) -> Size:
    """The size written as `text`: numbers, names, + - * ** // max(a, b), min(a, b), mod(a, b), floordiv(a, b) as JAX
    writes a // b, scaled(a, 0.5) and root(a)."""
    tokens = _TOKEN.findall(text) if len(text) <= MOST_TEXT else []
    if len(text) > MOST_TEXT or len(tokens) > MOST_TOKENS or any(
            len(token) > MOST_DIGITS and token.isdigit() for token in set(tokens)):
        raise ParseError("cannot read a size", why="it has too many parts or digits",
                         do=f"write a number of at most {MOST_DIGITS} digits")
    if "".join(tokens) != "".join(text.split()):
        position = 0
        for match in _TOKEN.finditer(text):
            if match.start() != position:
                break
            position = match.end()
        raise ParseError(f"cannot read the size {_short(text)!r}", where=f"at column {position + 1}",
                         why=f"unexpected {text[position:].strip()[0]!r}", do="write a polynomial such as 4*b*n + 8")
    reader = _Reader(tokens, text)
    size = reader.sum()
    reader.end()
    return size


class _Reader:
    def __init__(self, tokens: list[str], text: str) -> None:
        self.tokens = [*tokens, ""]
        self.text = _short(text)
        self.at = 0
        self.depth = self.deepest = 0
        self.work = 0
        self.ends: dict[int, int] = {}  # where a parenthesis that opens is closed
        if "(" not in tokens:
            return
        self.spaced = " ".join(tokens)
        self.before = [0, *accumulate(map(len, tokens))]  # of each token, characters of those in front
        opened: list[int] = []
        for at in [at for at, token in enumerate(tokens) if token in _PARENTHESES]:
            if tokens[at] == "(":
                opened.append(at)
            elif opened:
                self.ends[opened.pop()] = at

    def peek(self) -> str:
        return self.tokens[self.at]

    def take(self, wanted: str = "") -> str:
        token = self.peek()
        if not token or (wanted and token != wanted):
            raise ParseError(f"cannot read the size {self.text!r}", why=f"expected {wanted or 'more'}, found "
                             f"{token or 'the end'}", do="write a polynomial such as 4*b*n + 8")
        self.at += 1
        return token

    def end(self) -> None:
        if self.peek():
            raise ParseError(f"cannot read the size {self.text!r}", why=f"left over: {self.peek()!r}",
                             do="write one polynomial")

    def times(self, a: Size, b: Size) -> Size:
        """A product, while that is no expansion without end."""
        self.worked(_terms(a) * _terms(b))
        return a * b

    def worked(self, terms: int) -> None:
        self.work += terms
        if self.work > MOST_WORK:
            raise ParseError(f"cannot read the size {self.text!r}", why="its products have too many terms",
                             do="write shorter products")

    def quotient(self, operation: Callable[[Size, Size], Size], a: Size, b: Size) -> Size:
        if isinstance(b, int) and b == 0:
            raise ParseError(f"cannot read the size {self.text!r}", why="it divides by 0",
                             do="write a positive divisor")
        return operation(a, b)

    def inner(self) -> Size:
        """A sum inside of parentheses."""
        self.opened(1)
        result = self.sum()
        self.depth -= 1
        return result

    def opened(self, levels: int) -> None:
        self.depth += levels
        self.deepest = max(self.deepest, self.depth)
        if self.depth > MOST_DEPTH:
            raise ParseError("cannot read a size", why=f"parentheses are nested more than {MOST_DEPTH} deep",
                             do="write fewer parentheses")

    def operands(self, op: str) -> list[Size]:
        """Those of a maximum or minimum, and of another one that is its second operand: one list, so that a chain of
        them is brought into normal form once."""
        found, nested = [], 0
        while True:
            self.take("(")
            found.append(self.inner())
            self.take(",")
            end = self.ends.get(self.at + 1, self.at)
            if self.tokens[self.at:self.at + 2] != [op, "("] or self.tokens[end + 1:end + 2] != [")"]:
                break
            self.take(op)
            nested += 1
            self.opened(1)
        found.append(self.inner())
        for _ in range(1 + nested):
            self.take(")")
        self.depth -= nested
        return found

    def sum(self) -> Size:
        result = self.term()
        while self.peek() in ("+", "-"):
            sign = self.take()
            right = self.term()
            result = result + right if sign == "+" else result - right
        return result

    def term(self) -> Size:
        result = self.factor()
        while self.peek() in ("*", "//"):
            if self.take() == "*":
                result = self.times(result, self.factor())
            else:
                result = self.quotient(floordiv, result, self.factor())
        return result

    def factor(self) -> Size:
        negative = False
        while self.peek() == "-":
            self.take()
            negative = not negative
        if negative:
            return -self.factor()
        base = self.primary()
        if self.peek() == "**":
            self.take()
            power = self.take()
            if not power.isdigit() or int(power) > 64:
                raise ParseError(f"cannot read the size {self.text!r}", why=f"{power!r} is no exponent from 0 to 64",
                                 do="write a small number after **")
            result: Size = 1
            for _ in range(int(power)):
                result = self.times(result, base)
            return result
        return base

    def part(self, read: Callable[[], Size], opening: int) -> Size:
        """What `read` reads up to the parenthesis that closes the one at `opening`, from memory where it has been read
        before."""
        end = self.ends.get(opening)
        if end is None:
            return read()
        text = self.spaced[self.before[self.at] + self.at:self.before[end] + end]
        known = _parts.get(text)
        if known is None:
            depth, deepest, work = self.depth, self.deepest, self.work
            self.deepest = depth
            size = read()
            if len(_parts) >= MOST_PARTS:
                _parts.clear()
            _parts[text] = _Part(size, self.deepest - depth, self.work - work)
            self.deepest = max(self.deepest, deepest)
            return size
        self.worked(known.work)
        self.opened(known.depth)
        self.depth -= known.depth
        self.at = end + 1
        return known.size

    def parenthesis(self) -> Size:
        self.take("(")
        inner = self.inner()
        self.take(")")
        return inner

    def extreme(self) -> Size:
        op = self.take()
        return (maximum if op == "max" else minimum)(*self.operands(op))

    def primary(self) -> Size:
        token = self.peek()
        if token == "(":
            return self.part(self.parenthesis, self.at)
        if token in ("max", "min") and self.tokens[self.at + 1] == "(":
            return self.part(self.extreme, self.at + 1)
        token = self.take()
        if token.isdigit():
            return int(token)
        if token in ("mod", "floordiv") and self.peek() == "(":
            self.take("(")
            a = self.inner()
            self.take(",")
            b = self.inner()
            self.take(")")
            return self.quotient(mod if token == "mod" else floordiv, a, b)
        if token == "root" and self.peek() == "(":
            self.take("(")
            a = self.inner()
            self.take(")")
            return root(a)
        if token == "scaled" and self.peek() == "(":
            self.take("(")
            a = self.inner()
            self.take(",")
            factor = self.take()
            self.take(")")
            if not factor[0].isdigit():
                raise ParseError(f"cannot read the size {self.text!r}", why=f"{factor!r} is no number",
                                 do="write a decimal number as the second argument of scaled")
            return scaled(a, float(factor))
        if not (token[0].isalpha() or token[0] in "_%"):
            raise ParseError(f"cannot read the size {self.text!r}", why=f"expected a name or number, found {token!r}",
                             do="write a polynomial such as 4*b*n + 8")
        return symbol(token)


def _terms(size: Size) -> int:
    return len(size.terms) if isinstance(size, Expr) else 1


def _short(text: str) -> str:
    return text if len(text) < 200 else f"{text[:200]}..."
