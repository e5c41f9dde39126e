"""Sizes from text (the inverse of `str(size)`, and a little more), and sizes as Python source."""
from __future__ import annotations

import re

from anyshape.base.errors import ParseError
from anyshape.sym.expr import Size, floordiv, maximum, minimum, mod, product, root, scaled, symbol

_TOKEN = re.compile(r"\s*(//|\*\*|[-+*(),]|\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+|\d+|[%A-Za-z_][A-Za-z0-9_]*)")


def parse(text: str) -> Size:
    """The size written as `text`: numbers, names, + - * ** // max(a, b), min(a, b), mod(a, b), scaled(a, 0.5)
    and root(a)."""
    tokens: list[str] = []
    position = 0
    stripped = text.rstrip()
    while position < len(stripped):
        match = _TOKEN.match(stripped, position)
        if match is None:
            raise ParseError(f"cannot read the size {text!r}", where=f"at column {position + 1}",
                             why=f"unexpected {stripped[position]!r}", do="write a polynomial such as 4*b*n + 8")
        tokens.append(match.group(1))
        position = match.end()
    reader = _Reader(tokens, text)
    size = reader.sum()
    reader.end()
    return size


class _Reader:
    def __init__(self, tokens: list[str], text: str) -> None:
        self.tokens = tokens
        self.text = text
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

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
                result = result * self.factor()
            else:
                divisor = self.factor()
                if isinstance(divisor, int) and divisor == 0:
                    raise ParseError(f"cannot read the size {self.text!r}", why="it divides by 0",
                                     do="write a positive divisor")
                result = floordiv(result, divisor)
        return result

    def factor(self) -> Size:
        if self.peek() == "-":
            self.take()
            return -self.factor()
        base = self.primary()
        if self.peek() == "**":
            self.take()
            power = self.take()
            if not power.isdigit() or int(power) > 64:
                raise ParseError(f"cannot read the size {self.text!r}", why=f"{power!r} is no exponent from 0 to 64",
                                 do="write a small number after **")
            return product([base] * int(power))
        return base

    def primary(self) -> Size:
        token = self.take()
        if token == "(":
            inner = self.sum()
            self.take(")")
            return inner
        if token.isdigit():
            return int(token)
        if token in ("max", "min", "mod") and self.peek() == "(":
            self.take("(")
            a = self.sum()
            self.take(",")
            b = self.sum()
            self.take(")")
            return {"max": maximum, "min": minimum, "mod": mod}[token](a, b)
        if token == "root" and self.peek() == "(":
            self.take("(")
            a = self.sum()
            self.take(")")
            return root(a)
        if token == "scaled" and self.peek() == "(":
            self.take("(")
            a = self.sum()
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
