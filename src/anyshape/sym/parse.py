"""Sizes from text (the inverse of `str(size)`, and a little more), and sizes as Python source."""
from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from anyshape.base.errors import ParseError
from anyshape.sym.expr import Expr, Size, floordiv, maximum, minimum, mod, root, scaled, symbol

MOST_DEPTH = 64  # of parentheses
MOST_DIGITS = 19  # of numbers of 64 bits
MOST_WORK = 1 << 14  # terms that are multiplied in one text: a product of 24 sums would be 2^24 terms
MOST_TOKENS = 1 << 16
_TOKEN = re.compile(r"\s*(//|\*\*|[-+*(),]|\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+|\d+|[%A-Za-z_][A-Za-z0-9_]*)")


@lru_cache(maxsize=4096)  # a text form says the same few sizes again and again
def parse(text: str) -> Size:
    """The size written as `text`: numbers, names, + - * ** // max(a, b), min(a, b), mod(a, b), floordiv(a, b) as JAX
    writes a // b, scaled(a, 0.5) and root(a)."""
    tokens: list[str] = []
    position = 0
    for match in _TOKEN.finditer(text):
        token = match[1]
        if match.start() != position:
            break
        tokens.append(token)
        position = match.end()
        if len(tokens) > MOST_TOKENS or (len(token) > MOST_DIGITS and token.isdigit()):
            raise ParseError("cannot read a size", where=f"at column {position}", why="it has too many parts or digits",
                             do=f"write a number of at most {MOST_DIGITS} digits")
    if left := text[position:].strip():
        raise ParseError(f"cannot read the size {text!r}", where=f"at column {position + 1}",
                         why=f"unexpected {left[0]!r}", do="write a polynomial such as 4*b*n + 8")
    reader = _Reader(tokens, text)
    size = reader.sum()
    reader.end()
    return size


class _Reader:
    def __init__(self, tokens: list[str], text: str) -> None:
        self.tokens = [*tokens, ""]
        self.text = text if len(text) < 200 else f"{text[:200]}..."
        self.at = 0
        self.depth = 0
        self.work = 0
        self.ends: dict[int, int] = {}  # where a parenthesis that opens is closed
        opened: list[int] = []
        for at, token in enumerate(tokens):
            if token == "(":
                opened.append(at)
            elif token == ")" and opened:
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
        self.work += _terms(a) * _terms(b)
        if self.work > MOST_WORK:
            raise ParseError(f"cannot read the size {self.text!r}", why="its products have too many terms",
                             do="write shorter products")
        return a * b

    def quotient(self, operation: Callable[[Size, Size], Size], a: Size, b: Size) -> Size:
        if isinstance(b, int) and b == 0:
            raise ParseError(f"cannot read the size {self.text!r}", why="it divides by 0",
                             do="write a positive divisor")
        return operation(a, b)

    def inner(self) -> Size:
        """A sum inside of parentheses."""
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise ParseError("cannot read a size", why=f"parentheses are nested more than {MOST_DEPTH} deep",
                             do="write fewer parentheses")
        result = self.sum()
        self.depth -= 1
        return result

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
            self.depth += 1
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

    def primary(self) -> Size:
        token = self.take()
        if token == "(":
            inner = self.inner()
            self.take(")")
            return inner
        if token.isdigit():
            return int(token)
        if token in ("max", "min") and self.peek() == "(":
            return (maximum if token == "max" else minimum)(*self.operands(token))
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
