"""Size-expression codegen: prints sizes as lines of Python source, each formula once, as one generated function where
many are needed at each new shape.

    4*b*(n // 2), 64 + (n // 2)  -->  v0 = s_n // 2
                                      v1 = 4*s_b*v0
                                      v2 = 64 + v0
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import isqrt
from typing import Any

from anyshape.sym.expr import Call, Expr, Size, symbols_of
from anyshape.sym.floats import float_of

FUNCTIONS = {"isqrt": isqrt}  # what the lines call; their namespace has to have it


def name_of(symbol: str) -> str:
    """The Python name that holds a symbol's value."""
    return f"s_{symbol}"


class Formulas:
    """lines: what has been printed, indented by four; symbols: those that occur in it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.known: dict[Size | Call, str] = {}
        self.symbols: set[str] = set()
        self.count = 0

    def number(self, size: Size | float) -> str:
        """The name or literal that stands for `size`."""
        if not isinstance(size, Expr):
            return repr(size)
        if size not in self.known:
            self.symbols |= symbols_of(size)
            self.known[size] = self._name(self._source(size))
        return self.known[size]

    def tuple_of(self, sizes: Iterable[Size]) -> str:
        """A tuple of them."""
        return "(" + "".join(self.number(size) + ", " for size in sizes) + ")"

    def _name(self, source: str) -> str:
        """The name of what a text is; of a name it is that."""
        if source.isidentifier():
            return source
        name = f"v{self.count}"
        self.count += 1
        self.lines.append(f"    {name} = {source}")
        return name

    def _source(self, size: Expr) -> str:
        terms = []
        for mono, coefficient in size.terms:
            factors = [str(coefficient)] if coefficient != 1 or not mono else []
            for atom, power in mono:
                factors += [name_of(atom) if isinstance(atom, str) else self._atom(atom)] * power
            terms.append("*".join(factors))
        return " + ".join(terms)

    def _atom(self, atom: Call) -> str:
        """The name of a call's value: sums share what they divide."""
        if atom not in self.known:
            self.known[atom] = self._name(self._call(atom))
        return self.known[atom]

    def _call(self, atom: Call) -> str:
        if atom.op == "root":
            return f"isqrt(max({self.number(atom.args[0])}, 0))"
        a, b = (self.number(argument) for argument in atom.args)
        if atom.op == "scaled":
            return f"int({a} * {float_of(atom.args[1])!r})"
        if atom.op == "floordiv":
            # a divisor of 0 occurs only in sizes that a zero-sized program never uses
            return f"{a} // {b if isinstance(atom.args[1], int) and atom.args[1] else f'({b} or 1)'}"
        return f"{a} if {a} {'>' if atom.op == 'max' else '<'} {b} else {b}"


class SizesFunction:
    """What `sizes` are when every symbol has the value in its argument (KeyError if one is missing). `title` is what a
    traceback calls the source, which is generated at the first call: a program that is only loaded does without, and
    some questions nobody asks."""

    __slots__ = ("_function", "_sizes", "_title")

    def __init__(self, sizes: Iterable[Size], title: str) -> None:
        self._sizes = tuple(sizes)
        self._title = title
        self._function: Callable[[Mapping[str, int]], tuple[int, ...]] | None = None

    def __call__(self, values: Mapping[str, int]) -> tuple[int, ...]:
        if self._function is None:  # two threads may generate the same
            self._function = self._generated()
        return self._function(values)

    def _generated(self) -> Callable[[Mapping[str, int]], tuple[int, ...]]:
        formulas = Formulas()
        result = formulas.tuple_of(self._sizes)
        given = [f"{name_of(symbol)} = values[{symbol!r}]" for symbol in sorted(formulas.symbols)]
        text = ["def sizes(values):", *(f"    {line}" for line in given), *formulas.lines, f"    return {result}"]
        names: dict[str, Any] = dict(FUNCTIONS)
        exec(compile("\n".join(text), f"<{self._title}>", "exec"), names)
        return names["sizes"]  # type: ignore[no-any-return]
