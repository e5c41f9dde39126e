"""Rewrite rules as text: a table of "pattern -> replacement" lines, read once into data.

    add(x, neg(y))  -> sub(x, y)
    mul(x, 1)       -> x
    div(x, c)       -> mul(x, inverse(c))   if has_inverse(c)

In a pattern x, y, z stand for any operand, c and d for a literal number; a name that stands twice must match the same
operand. A number matches a literal of that value, with the same sign of zero; True and False match only themselves.
The operands of a commutative op match in either order. Conditions and functions of literals are named in the tables
that the caller gives; the result must have the type of what it replaces, which the caller checks.
"""
from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn, Union

from anyshape.base.errors import ParseError
from anyshape.ir.graph import Literal, Node, Operand, Value
from anyshape.ir.op import row

_LITERAL_NAMES = frozenset("cd")
_TOKEN = re.compile(r"\s*(->|[(),]|-?\d+(?:\.\d+)?|[A-Za-z_]\w*)")

Bindings = dict[str, Operand]
Condition = Callable[[Operand], bool]
Function = Callable[..., Literal]


@dataclass(frozen=True, slots=True)
class Variable:
    """Stands for an operand; `literal`: for a number only."""

    name: str
    literal: bool


@dataclass(frozen=True, slots=True)
class Number:
    """A literal of one value."""

    value: Literal


@dataclass(frozen=True, slots=True)
class Apply:
    """An op, or in a replacement a function of literals, applied to patterns."""

    op: str
    args: tuple[Pattern, ...]


Pattern = Union[Variable, Number, Apply]


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a table; `conditions` are (name, variable) pairs, all of which must hold."""

    text: str
    pattern: Apply
    replacement: Pattern
    conditions: tuple[tuple[str, str], ...]


def table(text: str) -> dict[str, tuple[Rule, ...]]:
    """The rules of `text`, one per line, by the op that their pattern starts with. "#" starts a comment."""
    found: dict[str, list[Rule]] = {}
    for line in text.splitlines():
        source = line.partition("#")[0].strip()
        if source:
            rule = _Reader(source).rule()
            found.setdefault(rule.pattern.op, []).append(rule)
    return {op: tuple(rules) for op, rules in found.items()}


@functools.cache
def pattern_of(text: str) -> Pattern:
    """One pattern, as a rule has it at its left."""
    reader = _Reader(text)
    found = reader.pattern()
    if reader.at < len(reader.tokens):
        reader.fail("something follows the pattern")
    return found


def subterms(pattern: Pattern) -> tuple[Pattern, ...]:
    """The pattern and all patterns in it, each once, inner ones first."""
    inner = (term for part in pattern.args for term in subterms(part)) if isinstance(pattern, Apply) else ()
    return tuple(dict.fromkeys((*inner, pattern)))


def match(rule: Rule, node: Node, producer: Callable[[Operand], Node | None]) -> Bindings | None:
    """What the names of the rule stand for when `node` matches its pattern; None when it does not."""
    return _match_node(rule.pattern, node, producer, {})


def holds(rule: Rule, bindings: Bindings, conditions: Mapping[str, Condition]) -> bool:
    """Do all conditions of the rule hold?"""
    return all(conditions[name](bindings[variable]) for name, variable in rule.conditions)


def build(pattern: Pattern, bindings: Bindings, make: Callable[..., Operand],
          functions: Mapping[str, Function]) -> Operand:
    """The replacement: `make(op, *operands)` is called for its ops, inner ones first."""
    if isinstance(pattern, Number):
        return pattern.value
    if isinstance(pattern, Variable):
        return bindings[pattern.name]
    args = [build(item, bindings, make, functions) for item in pattern.args]
    if pattern.op in functions:
        return functions[pattern.op](*args)
    return make(pattern.op, *args)


def same(a: Operand, b: Operand) -> bool:
    """The same value, or the same number of the same kind."""
    if isinstance(a, Value) or isinstance(b, Value):
        return a is b
    return type(a) is type(b) and a == b and _sign(a) == _sign(b)


def _sign(value: Operand) -> float:
    return math.copysign(1.0, value) if isinstance(value, float) else 0.0


def _match_node(pattern: Apply, node: Node, producer: Callable[[Operand], Node | None],
                bindings: Bindings) -> Bindings | None:
    if node.op != pattern.op or len(node.inputs) != len(pattern.args) or node.attrs:
        return None
    orders = [node.inputs]
    if row(node).commutes and pattern.args[0] != pattern.args[1]:
        orders.append(node.inputs[::-1])
    for inputs in orders:
        found: Bindings | None = bindings
        for item, operand in zip(pattern.args, inputs, strict=True):
            if found is not None:
                found = _match(item, operand, producer, found)
        if found is not None:
            return found
    return None


def _match(pattern: Pattern, operand: Operand, producer: Callable[[Operand], Node | None],
           bindings: Bindings) -> Bindings | None:
    if isinstance(pattern, Number):
        value = pattern.value
        if isinstance(operand, Value) or not isinstance(operand, (bool, int, float)):
            return None
        if isinstance(value, bool) or isinstance(operand, bool):
            return bindings if value is operand else None
        return bindings if value == operand and math.copysign(1, value) == math.copysign(1, operand) else None
    if isinstance(pattern, Apply):
        node = producer(operand)
        return None if node is None or node.op != pattern.op else _match_node(pattern, node, producer, bindings)
    if pattern.literal and (isinstance(operand, bool) or not isinstance(operand, (int, float))):
        return None
    if pattern.name in bindings:
        return bindings if same(bindings[pattern.name], operand) else None
    return {**bindings, pattern.name: operand}


class _Reader:
    """Reads one rule."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[str] = []
        position = 0
        while position < len(text):
            found = _TOKEN.match(text, position)
            if found is None:
                self.fail(f"unexpected {text[position:]!r}")
            self.tokens.append(found[1])
            position = found.end()
        self.at = 0

    def rule(self) -> Rule:
        pattern = self.pattern()
        if not isinstance(pattern, Apply):
            self.fail("the pattern is no op")
        self.take("->")
        replacement = self.pattern()
        conditions: list[tuple[str, str]] = []
        if self.at < len(self.tokens):
            self.take("if")
            while True:
                name = self.take()
                self.take("(")
                conditions.append((name, self.take()))
                self.take(")")
                if self.at == len(self.tokens):
                    break
                self.take("and")
        return Rule(self.text, pattern, replacement, tuple(conditions))

    def pattern(self) -> Pattern:
        word = self.take()
        if word in ("True", "False"):
            return Number(word == "True")
        if word[0].isdigit() or word[0] == "-":
            return Number(float(word) if "." in word else int(word))
        if self.at >= len(self.tokens) or self.tokens[self.at] != "(":
            return Variable(word, word in _LITERAL_NAMES)
        self.take("(")
        args = [self.pattern()]
        while self.tokens[self.at] == ",":
            self.take(",")
            args.append(self.pattern())
        self.take(")")
        return Apply(word, tuple(args))

    def take(self, wanted: str = "") -> str:
        if self.at >= len(self.tokens) or (wanted and self.tokens[self.at] != wanted):
            self.fail(f"expected {wanted or 'more'}")
        self.at += 1
        return self.tokens[self.at - 1]

    def fail(self, why: str) -> NoReturn:
        raise ParseError("cannot read a rewrite rule", where=self.text, why=why, do="write pattern -> replacement")
