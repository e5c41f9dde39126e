"""Symbolic numbers of a trace (sympy expressions of a ShapeEnv) as our sizes, and what is known of their symbols.

    FloorDiv(s0 + 1, 2)*s1  -->  s1*((s0 + 1)//(2))

Nothing here asks a SymInt for its value: that would add guards. Only `.node` is read.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch

from anyshape.base.errors import Unsupported
from anyshape.frontend.symbols import guard_facts
from anyshape.frontend.symbols.float_sizes import cannot, from_float, ratio_of
from anyshape.sym import expr
from anyshape.sym.expr import Expr, Size
from anyshape.sym.facts import Facts
from anyshape.sym.prover import bounds, prove_at_most
from anyshape.torch_compat.formulas import functions as ops
from anyshape.torch_compat.formulas import is_infinite
from anyshape.torch_compat.versions.symbolic_functions import traced_values

_LARGE = 2**62


class SymIntImporter:
    """Converts the symbolic numbers of one graph; remembers each conversion and which symbols were met.

    Args:
        equal: symbol -> size that stands for it wherever it occurs (equalities found by the walk over the graph).
    """

    def __init__(self, equal: dict[str, Size] | None = None) -> None:
        self.equal = equal or {}
        self.shape_env: Any = None
        self._by_source: dict[Any, Size] = {}
        self._by_sympy: dict[sympy.Basic, Size] = {}
        self._symbols: dict[str, sympy.Symbol] = {}
        self._divisible: dict[tuple[Size, int], None] = {}
        self._facts: tuple[int, Facts] | None = None
        self._gathering = False
        self._ends: dict[sympy.Symbol, tuple[int, int | None]] | None = None
        self._numbers: dict[sympy.Basic, int] | None = None
        self._divisors: dict[Size, None] | None = None

    def size(self, value: int | torch.SymInt) -> Size:
        """A size from a number of the trace.

        Raises:
            Unsupported: a construct that sizes do not have (a nested int, a float that is rounded).
        """
        if type(value) is int:
            return value
        if not isinstance(value, torch.SymInt):
            return int(value)
        node = value.node
        source = getattr(node, "_expr", None)
        if source is None:  # a nested int, or another version of torch
            source = getattr(node, "expr", None)
        if source is None:
            constant = node.maybe_as_int() if hasattr(node, "maybe_as_int") else None
            if constant is not None:
                return int(constant)
            raise Unsupported(f"the size {value} is no ordinary number", why="nested tensors have such sizes",
                              do="use padded tensors")
        known = self._by_source.get(source)
        if known is not None:
            return known
        self.shape_env = self.shape_env or node.shape_env
        size = self.from_sympy(node.expr)
        self._by_source[source] = size
        return size

    def shape(self, values: Iterable[int | torch.SymInt]) -> tuple[Size, ...]:
        """Sizes from numbers of the trace."""
        return tuple([value if type(value) is int else self.size(value) for value in values])

    def strides(self, values: Iterable[int | torch.SymInt]) -> tuple[Size, ...]:
        """Strides from numbers of the trace; a factor max(1, size), which torch writes so that an empty tensor has
        nonzero strides, becomes the size."""
        return tuple([value if type(value) is int else _without_floor(self.size(value)) for value in values])

    def symbol_name(self, value: torch.SymInt) -> str | None:
        """The name when the number is one plain symbol, else None."""
        size = self.size(value)
        if isinstance(size, Expr) and len(size.terms) == 1:
            mono, coefficient = size.terms[0]
            if coefficient == 1 and len(mono) == 1 and mono[0][1] == 1 and isinstance(mono[0][0], str):
                return mono[0][0]
        return None

    def from_sympy(self, value: Any) -> Size:
        """A size from a sympy expression; cached by expression."""
        if isinstance(value, int):
            return value
        known = self._by_sympy.get(value)
        if known is None:
            if self._numbers is None and self.shape_env is not None:
                self._numbers = guard_facts.fixed(self.shape_env)
            known = (self._numbers or {}).get(value)
            if known is None:
                known = self._convert(value)
            if not self._gathering:
                self._by_sympy[value] = known
        return known

    def _convert(self, value: sympy.Basic) -> Size:
        if isinstance(value, sympy.Symbol):
            return self._symbol(value)
        if isinstance(value, sympy.Integer):
            return int(value)
        handler = _HANDLERS.get(type(value))
        if handler is None:
            raise cannot(value)
        return handler(self, value)

    def _symbol(self, value: sympy.Symbol) -> Size:
        name = str(value)
        if not name.isidentifier():
            raise cannot(value)
        if name in self.equal:
            return expr.substitute(self.equal[name], self.equal)
        self._symbols[name] = value
        return expr.symbol(name)

    def range_of(self, size: Size) -> tuple[int | None, int | None]:
        """An interval that holds the size, from the ranges of its symbols alone."""
        ranges = []
        for name in sorted(expr.symbols_of(size)):
            ends = self._range(self._symbols.get(name)) if self.shape_env is not None else None
            if ends is not None:
                ranges.append((name, *ends))
        return bounds(Facts(tuple(ranges)), size)

    def is_at_most(self, a: Size, b: Size) -> bool:
        """Do ranges and guards show that a <= b? Ranges alone while the guards are being read."""
        if self._gathering or self.shape_env is None:
            low, _ = self.range_of(b - a)
            return low is not None and low >= 0
        return bool(prove_at_most(self.facts(), a, b))

    def is_divisor(self, size: Size) -> bool:
        """May one divide by a size? Where it is shown to be at least 0; in `conditions` that becomes one of them."""
        if self.is_at_most(0, size):
            return True
        if self._divisors is None:
            return False
        self._divisors[size - 1] = None
        return True

    def _range(self, symbol: sympy.Symbol | None) -> tuple[int, int | None] | None:
        """Smallest and largest value of a symbol, by its range and by guards such as Eq(Min(512, s), s)."""
        if self._ends is None:
            self._ends = {}
            for smaller, larger in guard_facts.ordered(self.shape_env):
                for one, other, at in ((smaller, larger, 1), (larger, smaller, 0)):
                    if isinstance(one, sympy.Symbol) and isinstance(other, sympy.Integer):
                        low, high = self._ends.get(one, (-_LARGE, None))
                        number = int(other)
                        self._ends[one] = (max(low, number), high) if at == 0 else (
                            low, number if high is None else min(high, number))
        bounds = self.shape_env.var_to_range.get(symbol)
        least, most = self._ends.get(symbol, (-_LARGE, None))
        if bounds is None:
            return (max(least, 0), most) if symbol in self._ends else None
        lows = [number for number in (_bound(bounds.lower), least) if number is not None]
        highs = [number for number in (_bound(bounds.upper), most) if number is not None]
        return max(lows), min(highs, default=None)

    def facts(self) -> Facts:
        """What the ShapeEnv knows of the symbols met so far: ranges, likely values, divisibility, inequalities."""
        if self._facts is None or self._facts[0] != len(self._symbols):
            # sizes in guards are converted on the way, by ranges alone
            self._gathering = True
            self._facts = (len(self._symbols), self._gather_facts())
            self._gathering = False
        return self._facts[1]

    def _gather_facts(self) -> Facts:
        env = self.shape_env
        if env is None:
            return Facts()
        ranges = []
        hints = []
        values = traced_values(env)
        for name, symbol in sorted(self._symbols.items()):
            ends = self._range(symbol)
            if ends is not None:
                ranges.append((name, *ends))
            hint = values.get(symbol)
            if isinstance(hint, (int, sympy.Integer)):
                hints.append((name, int(hint)))
        return Facts(tuple(ranges), tuple(hints), tuple(self._all_divisible()), tuple(self._inequalities()))

    def conditions(self, guards: Iterable[sympy.Basic]) -> tuple[list[Size], list[sympy.Basic]]:
        """Guards of a program that nobody else asks, as sizes that are at least 0 where all of them hold; and those
        that no size says, such as a comparison of s**0.3. What the ranges of symbols show is left out."""
        sizes: dict[Size, None] = {}
        others = []
        numbers, self._numbers, gathering, self._gathering = self._numbers, {}, self._gathering, True
        for guard in guards:
            self._divisors = {}
            try:
                found = self._condition(guard)
            except Unsupported:
                others.append(guard)
            else:
                sizes |= self._divisors | dict.fromkeys(found)
        self._numbers, self._gathering, self._divisors = numbers, gathering, None
        open_ = [(size, self.range_of(size)[0]) for size in sizes if isinstance(size, Expr)]
        return [size for size, low in open_ if low is None or low < 0], others

    def _condition(self, guard: sympy.Basic) -> tuple[Size, ...]:
        if not isinstance(guard, sympy.core.relational.Relational) or not all(
                isinstance(side, sympy.Expr) for side in guard.args):
            raise cannot(guard)
        ratios = [ratio_of(side) for side in guard.args]
        if ratios[0] is None or ratios[1] is None:
            raise cannot(guard)
        (top, bottom), (other_top, other_bottom) = [(self.from_sympy(a), self.from_sympy(b)) for a, b in
                                                    (ratios[0], ratios[1])]
        if any((self.range_of(one)[0] or 0) < 1 for one in (bottom, other_bottom)):
            raise cannot(guard)  # of a divisor that may be 0 or less
        more = top * other_bottom - other_top * bottom
        if isinstance(guard, sympy.Eq):
            return more, -more
        if isinstance(guard, sympy.Ne):
            return (more * more - 1,)
        more = -more if isinstance(guard, (sympy.Le, sympy.Lt)) else more
        return (more - 1 if isinstance(guard, (sympy.Lt, sympy.Gt)) else more,)

    def equal_to(self, size: Size) -> list[Size]:
        """Other formulas that guards of the trace show to be the same number."""
        found: dict[Size, None] = {}
        for guard in getattr(self.shape_env, "guards", ()):
            if isinstance(guard.expr, sympy.Eq):
                a, b = (self._known_size(side) for side in guard.expr.args)
                if a is not None and b is not None and size in (a, b):
                    found[b if a == size else a] = None
        return [other for other in found if other != size]

    def _known_size(self, value: sympy.Basic) -> Size | None:
        """The size when all its symbols were met before; else None, for nothing needs it."""
        replaced = self.shape_env.replace(value)
        if not {str(symbol) for symbol in replaced.free_symbols} <= self._symbols.keys() | self.equal.keys():
            return None
        try:
            return self.from_sympy(replaced)
        except Unsupported:
            return None

    def _all_divisible(self) -> list[tuple[Size, int]]:
        found = dict(self._divisible)
        for item in getattr(self.shape_env, "divisible", ()):
            if isinstance(item, (ops.Mod, ops.PythonMod)) and isinstance(item.args[1], sympy.Integer):
                size = self._known_size(item.args[0])
                if size is not None:
                    found[size, int(item.args[1])] = None
        return sorted(found, key=str)

    def _inequalities(self) -> list[Size]:
        """Sizes that guards of the trace show to be at least 0."""
        found: dict[Size, None] = {}
        pairs = [(smaller, larger, False) for smaller, larger in guard_facts.ordered(self.shape_env)]
        for guard in getattr(self.shape_env, "guards", ()):
            relation = guard.expr
            if isinstance(relation, (sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt)):
                strict = isinstance(relation, (sympy.Gt, sympy.Lt))
                a, b = relation.args
                pairs.append((a, b, strict) if isinstance(relation, (sympy.Le, sympy.Lt)) else (b, a, strict))
        for smaller, larger, strict in pairs:
            a, b = self._known_size(smaller), self._known_size(larger)
            if a is None or b is None:
                continue
            known = b - a - int(strict)
            low, _ = self.range_of(known)
            if isinstance(known, Expr) and (low is None or low < 0):
                found[known] = None
        for one, other, is_equal in guard_facts.compared(self.shape_env):
            a, b = self._known_size(one), self._known_size(other)
            if a is not None and b is not None and isinstance(a - b, Expr):
                found |= dict.fromkeys((a - b, b - a) if is_equal else ((a - b) * (a - b) - 1,))
        return list(found)


def _bound(value: Any) -> int | None:
    if is_infinite(value):
        return None
    number = int(value)
    return number if abs(number) < _LARGE else None


def _without_floor(size: Size) -> Size:
    if isinstance(size, int):
        return size
    result: Size = 0
    for mono, coefficient in size.terms:
        term: Size = coefficient
        for atom, power in mono:
            factor: Size = expr.symbol(atom) if isinstance(atom, str) else Expr(((((atom, 1),), 1),))
            if isinstance(atom, expr.Call) and atom.op == "max" and 1 in atom.args:
                factor = atom.args[0] if atom.args[1] == 1 else atom.args[1]
            for _ in range(power):
                term = term * factor
        result = result + term
    return result


def _add(sizes: SymIntImporter, value: sympy.Basic) -> Size:
    if any(not part.is_integer for part in value.args if part.is_Mul or part.is_Number):
        return _fraction(sizes, value)
    total: Size = 0
    for part in value.args:
        total = total + sizes.from_sympy(part)
    return total


def _mul(sizes: SymIntImporter, value: sympy.Basic) -> Size:
    if any((isinstance(part, sympy.Rational) and not part.is_integer) or (isinstance(part, sympy.Pow) and not
           (part.exp.is_Integer and part.exp >= 0)) for part in value.args):
        return _fraction(sizes, value)
    return expr.product(sizes.from_sympy(part) for part in value.args)


def _fraction(sizes: SymIntImporter, value: sympy.Basic) -> Size:
    # s0**2/2 + s0/2 = (s0**2 + s0)//2: whole as a whole, though its terms are not
    top, bottom = sympy.fraction(sympy.together(value))
    if bottom == 1:
        raise cannot(value)
    return _divide(sizes, top, bottom)


def _pow(sizes: SymIntImporter, value: sympy.Basic) -> Size:
    base, exponent = value.args
    if not exponent.is_Integer or not 0 <= int(exponent) <= 16:
        raise cannot(value)
    return expr.product([sizes.from_sympy(base)] * int(exponent))


def _divide(sizes: SymIntImporter, top: sympy.Basic, bottom: sympy.Basic) -> Size:
    a, b = sizes.from_sympy(top), sizes.from_sympy(bottom)
    if isinstance(b, int):
        if b == 0:
            raise cannot(top / bottom)
        return expr.floordiv(a, b) if b > 0 else expr.floordiv(-a, -b)
    if not sizes.is_divisor(b):
        raise cannot(top / bottom)
    return expr.floordiv(a, b)


def _floor_div(sizes: SymIntImporter, value: sympy.Basic) -> Size:
    return _divide(sizes, *value.args)


def _clean_div(sizes: SymIntImporter, value: sympy.Basic) -> Size:
    if isinstance(value.args[1], sympy.Integer) and int(value.args[1]) > 1:
        dividend = sizes.from_sympy(value.args[0])
        if isinstance(dividend, Expr):
            sizes._divisible[dividend, int(value.args[1])] = None
    return _divide(sizes, *value.args)


def _mod(sizes: SymIntImporter, value: sympy.Basic) -> Size:
    a, b = value.args
    if isinstance(b, sympy.Integer) and int(b) < 0:
        raise cannot(value)
    return sizes.from_sympy(a) - sizes.from_sympy(b) * _divide(sizes, a, b)


def _modular_indexing(sizes: SymIntImporter, value: sympy.Basic) -> Size:
    a, divisor, modulus = value.args
    quotient = _divide(sizes, a, divisor)
    return expr.mod(quotient, sizes.from_sympy(modulus))


def _extreme(pick: Callable[[Size, Size], Size], larger: bool) -> Callable[[SymIntImporter, sympy.Basic], Size]:
    def convert(sizes: SymIntImporter, value: sympy.Basic) -> Size:
        parts = sorted((sizes.from_sympy(part) for part in value.args), key=str)
        result = parts[0]
        for part in parts[1:]:
            if sizes.is_at_most(result, part):
                result = part if larger else result
            elif sizes.is_at_most(part, result):
                result = result if larger else part
            else:
                result = pick(result, part)
        return result
    return convert


def _rounded(up: bool, nearest: bool = False) -> Callable[[SymIntImporter, sympy.Basic], Size]:
    def convert(sizes: SymIntImporter, value: sympy.Basic) -> Size:
        ratio = ratio_of(value.args[0])
        if ratio is None:
            return from_float(sizes, value)
        top, bottom = ratio
        if bottom == 1:
            return sizes.from_sympy(top)
        if nearest:
            return _nearest(sizes, top, bottom)
        if up:
            return -_divide(sizes, -top, bottom)
        return _divide(sizes, top, bottom)
    return convert


def _nearest(sizes: SymIntImporter, top: sympy.Basic, bottom: sympy.Basic) -> Size:
    """The whole number nearest to a quotient, of two the even one, as Python's round gives it."""
    a, b = sizes.from_sympy(top), sizes.from_sympy(bottom)
    if not isinstance(b, int) or b <= 0:
        raise cannot(top / bottom)
    if b % 2:
        return expr.floordiv(a + b // 2, b)  # no quotient is in the middle of two
    return expr.floordiv(a + b // 2 - 1 + expr.mod(expr.floordiv(a, b), 2), b)


def _trunc(sizes: SymIntImporter, value: sympy.Basic) -> Size:
    ratio = ratio_of(value.args[0])
    if ratio is None:
        return from_float(sizes, value)
    top = sizes.from_sympy(ratio[0])
    low, _ = sizes.range_of(top)
    if ratio[1] != 1 and (low is None or low < 0):
        raise cannot(value)
    return _divide(sizes, *ratio)


_HANDLERS: dict[type, Callable[[SymIntImporter, Any], Size]] = {
    sympy.Add: _add,
    sympy.Mul: _mul,
    sympy.Pow: _pow,
    ops.PowByNatural: _pow,
    ops.FloorDiv: _floor_div,
    ops.CleanDiv: _clean_div,
    ops.Mod: _mod,
    ops.PythonMod: _mod,
    ops.ModularIndexing: _modular_indexing,
    ops.Max: _extreme(expr.maximum, larger=True),
    ops.Min: _extreme(expr.minimum, larger=False),
    sympy.Max: _extreme(expr.maximum, larger=True),
    sympy.Min: _extreme(expr.minimum, larger=False),
    sympy.Abs: lambda sizes, value: expr.maximum(sizes.from_sympy(value.args[0]), -sizes.from_sympy(value.args[0])),
    ops.Identity: lambda sizes, value: sizes.from_sympy(value.args[0]),
    ops.FloorToInt: _rounded(up=False),
    ops.CeilToInt: _rounded(up=True),
    ops.RoundToInt: _rounded(up=False, nearest=True),
    ops.TruncToInt: _trunc,
}
