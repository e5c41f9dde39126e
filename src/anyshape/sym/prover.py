"""Proofs over what is assumed of symbols (sym/facts.py): bounds, comparisons and divisibility of sizes.

A proof looks for the least value of a size. Symbols are moved so that each starts at 0 (n >= 1 becomes n = n' + 1);
then every term with a positive coefficient is least at 0. Where that does not settle it, one thing at a time is taken
apart: a bounded symbol in which the size is linear (its least value is at an end), a maximum or minimum (it is one of
its sides), a floor division q = a//b (b*q lies between a - b + 1 and a). What is left is looked at as a polynomial
(sym/positive.py), and where sizes are rounded term by term and by cases (sym/cases.py). Depths are limited, so answers
come in bounded time; what is not settled is None, never a guess.
"""
from __future__ import annotations

from collections.abc import Iterator

from anyshape.sym.apart import Interval, call_of, factor_of, only_symbol, replaced, tighter
from anyshape.sym.cases import above_root, by_cases, by_terms, limits_of, weight
from anyshape.sym.expr import (
    NUMBERS,
    Call,
    Expr,
    Monomial,
    Size,
    coefficient_of,
    mod,
    substitute,
    symbol,
    symbols_of,
)
from anyshape.sym.facts import Facts
from anyshape.sym.points import allowed_points, signs
from anyshape.sym.positive import nonnegative, poly_of

_DEPTH = 2
_WEIGHTY = 8  # calls in a size beyond which it is not taken apart term by term
_HEAVY = 40  # and beyond which it is not taken apart at all
_POINTS = 96  # at which a size is looked at before a proof, fewer where many facts say what is allowed


def prove_at_most(facts: Facts, a: Size, b: Size) -> bool | None:
    """Is `a <= b` for every value in range? True, False (never), or None when it cannot be told."""
    return prove_nonnegative(facts, b - a)


def prove_nonnegative(facts: Facts, size: Size) -> bool | None:
    """Is `size >= 0` for every value in range? True, False (never), or None when it cannot be told."""
    return size >= 0 if isinstance(size, int) else Prover(facts).nonnegative(size, _DEPTH)


def prove_equal(facts: Facts, a: Size, b: Size) -> bool | None:
    """Is `a == b` for every value in range? True, False (never), or None when it cannot be told."""
    difference = a - b
    if isinstance(difference, int):
        return difference == 0
    prover = Prover(facts)
    difference = prover.normal(difference)
    if isinstance(difference, int):
        return difference == 0
    low, high = prover.bounds(difference)
    if low is not None and low == high:
        return low == 0
    if (low is not None and low > 0) or (high is not None and high < 0):
        return False
    return True if prove_nonnegative(facts, difference) and prove_nonnegative(facts, -difference) else None


def divides(facts: Facts, size: Size, k: int) -> bool | None:
    """Does `k` (positive) divide `size` for every value in range? True, False (never), or None."""
    rest = mod(size, k)
    if isinstance(rest, int):
        return rest == 0
    prover = Prover(facts)
    rest = mod(prover.normal(size), k)
    if isinstance(rest, int):
        return rest == 0
    low, high = prover.bounds(rest)
    if low is not None and low == high:
        return low == 0
    for multiple, divisor in facts.divisible:
        if divisor % k == 0 and isinstance(multiple, Expr) and not isinstance(mod(size - multiple, k), Expr):
            return mod(size - multiple, k) == 0
    return None


def bounds(facts: Facts, size: Size) -> Interval:
    """An interval that holds `size`, None for an open end."""
    return Prover(facts).bounds(size)


class Prover:
    """Proofs over some facts; what it finds is remembered with them."""

    __slots__ = ("facts", "proofs")

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        if facts.memo.proofs is None:
            facts.memo.proofs = _Proofs()
        self.proofs: _Proofs = facts.memo.proofs

    def under(self, facts: Facts) -> Prover:
        """The prover of other facts."""
        return Prover(facts)

    def nonnegative(self, size: Size, depth: int) -> bool | None:
        """Is `size >= 0`? `depth`: how many proofs may stand on each other."""
        if isinstance(size, int):
            return size >= 0
        answers = self.proofs.answers
        if (size, depth) not in answers:
            answers[size, depth] = self._prove(size, depth)
        return answers[size, depth]

    def bounds(self, size: Size) -> Interval:
        """An interval that holds `size`, None for an open end."""
        if isinstance(size, int):
            return size, size
        found = self.proofs.bounds.get(size)
        if found is None:
            other = -size
            low, high = self._low(size, _DEPTH), self._low(other, _DEPTH)
            found = self.proofs.bounds[size] = (low, None if high is None else -high)
        return found

    def normal(self, size: Size) -> Size:
        """`size` with what is known put in: a symbol with one possible value is that number, a symbol that 8 divides
        is 8 times another symbol. Two sizes that are equal under the facts often have the same one."""
        table = self.proofs.normal
        if table is None:
            table = self.proofs.normal = self._substitutions()
        return substitute(size, table) if table else size

    def _substitutions(self) -> dict[str, Size]:
        table: dict[str, Size] = {}
        for name, low, high in self.facts.ranges:
            if low == high:
                table[name] = low
        for multiple, divisor in self.facts.divisible:
            whole = only_symbol(multiple)
            if whole is not None and whole not in table and divisor > 1:
                table[whole] = divisor * symbol(_quotient_name(whole, divisor))
        return table

    def _symbol_range(self, name: str) -> tuple[int, int | None]:
        """As range_of, for the quotient symbols that `normal` puts in too."""
        if "/" not in name:
            return self.facts.range_of(name)
        whole, divisor = name.rsplit("/", 1)
        low, high = self.facts.range_of(whole)
        return -(-low // int(divisor)), None if high is None else high // int(divisor)

    def _prove(self, size: Expr, depth: int) -> bool | None:
        quick = self._shifted_interval(size)
        if quick[0] is not None and quick[0] >= 0:
            return True
        if quick[1] is not None and quick[1] < 0:
            return False
        # what a point says needs no proof, and the proof of the contrary is not looked for
        above, below = signs(size, self._points(size))
        if not (above and below) and (answer := self._by_bounds(size, above, below)) is not None:
            return answer
        if below:
            return None
        if self._positive(self.normal(size)):
            return True
        if depth and 0 < weight(size) <= _WEIGHTY:
            return by_terms(size, self, depth - 1) or by_cases(size, self, depth - 1) or None
        return None

    def _by_bounds(self, size: Expr, above: bool, below: bool) -> bool | None:
        """By bounds of the size, and of its distance from what is known; `above`, `below`: where it is not below 0
        (at least 0) at every value."""
        other = self.normal(size)
        for form in (size, other) if other != size else (size,):
            if not below and self._at_least_0(form):
                return True
            if not above and self._below_0(form):
                return False
        for fact in self.facts.known:
            if not below and self._at_least_0(size - fact):
                return True
            if not above and self._below_0(size + fact):
                return False
        return None

    def _at_least_0(self, size: Size) -> bool:
        low = self._low(size, _DEPTH)
        return low is not None and low >= 0

    def _below_0(self, size: Size) -> bool:
        low = self._low(-size, _DEPTH)
        return low is not None and low > 0

    def _points(self, size: Expr) -> list[dict[str, int]]:
        """Allowed values of the symbols in `size`; none where a symbol is a quotient that `normal` put in."""
        names = symbols_of(size)
        points = self.proofs.points.get(names)
        if points is None:
            most = min(_POINTS, 10 * _POINTS // (1 + len(self.facts.known) + len(self.facts.divisible)))
            plain = not any("/" in name for name in names)
            points = self.proofs.points[names] = allowed_points(self.facts, names, most) if plain else []
        return points

    def _positive(self, size: Size) -> bool:
        """Is the size shown to be at least 0, with calls as variables of their own?"""
        if isinstance(size, int):
            return size >= 0
        found = dict.fromkeys(atom for mono, _ in size.terms for atom, _ in mono)
        atoms = {atom: number for number, atom in enumerate(found)}
        box = []
        for atom in atoms:
            low, high = self._atom_interval(atom)
            if low is None:
                return False
            box.append((low, high))
        return nonnegative(poly_of(size.terms, atoms), tuple(box))

    def _low(self, size: Size, depth: int) -> int | None:
        """The best lower bound found."""
        if isinstance(size, int):
            return size
        key = (size, depth)
        if key in self.proofs.lows:
            return self.proofs.lows[key]
        best = self._shifted_interval(size)[0]
        if depth > 0 and weight(size) <= _HEAVY and not (best is None and self._hopeless(size)):
            for candidate in self._split(size, depth - 1):
                if candidate is not None and (best is None or candidate > best):
                    best = candidate
        self.proofs.lows[key] = best
        return best

    def _hopeless(self, size: Expr) -> bool:
        """Does a symbol without an upper end stand in negative terms only? Then there is no lower bound to find."""
        helped: set[str] = set()
        hurt: list[Monomial] = []
        for mono, coefficient in size.terms:
            plain = all(isinstance(atom, str) for atom, _ in mono)
            if plain and coefficient < 0:
                hurt.append(mono)
                continue
            for atom, _ in mono:
                helped |= {atom} if isinstance(atom, str) else symbols_of(call_of(atom))
        for mono in hurt:
            for atom, _ in mono:
                if isinstance(atom, str) and atom not in helped and self._symbol_range(atom)[1] is None:
                    return True
        return False

    def _split(self, size: Expr, depth: int) -> Iterator[int | None]:
        """Lower bounds found by taking one symbol or call apart. Each one holds by itself."""
        seen: dict[str, int] = {}
        calls: dict[Call, None] = {}
        for mono, _ in size.terms:
            for atom, _ in mono:
                if isinstance(atom, str):
                    # in one term alone an interval says all there is to say
                    seen[atom] = seen.get(atom, 0) + len(mono)
                else:
                    calls[atom] = None
        for call in calls:
            if call.op == "scaled":
                continue
            if call.op == "root":
                yield self._low(above_root(size, call, self), depth)
                continue
            if call.op == "floordiv":
                yield self._split_floordiv(size, call, depth)
            else:
                sides = [self._low(replaced(size, call, side), depth) for side in call.args]
                known = [side for side in sides if side is not None]
                if len(known) == 2:
                    yield min(known)
                # a larger maximum can only raise a size in which it has a positive factor (minimum: a negative one)
                factor = self._sign(factor_of(size, call))
                if known and factor and (factor > 0) == (call.op == "max"):
                    yield max(known)
        for name, times in sorted(seen.items(), key=lambda item: (-item[1], item[0])):
            low, high = self._symbol_range(name)
            if times < 2 or high is None:
                continue
            if coefficient_of(size, name) is not None:
                # one is enough: the others follow at the next depth, in any order the same corners are reached
                ends = [self._low(substitute(size, {name: end}), depth) for end in (low, high)]
                if ends[0] is not None and ends[1] is not None:
                    yield min(ends[0], ends[1])
                return

    def _split_floordiv(self, size: Expr, call: Call, depth: int) -> int | None:
        # with b >= 1 and q = a//b:  a - b + 1 <= b*q <= a
        factor = factor_of(size, call)
        sign = self._sign(factor)
        a, b = call.args
        if not sign:
            return None
        if isinstance(b, Expr):
            least = self._shifted_interval(b)[0]
            if least is None or least < 0:  # it is not 0: nothing is divided by 0
                return None
        rest = size - factor * call_of(call)
        scaled = rest * b + factor * (a if sign < 0 else a - b + 1)
        if isinstance(b, int):
            low = self._low(scaled, depth)
            return None if low is None else -(-low // b)
        # b*size >= scaled > -b means size > -1
        low = self._low(scaled + b - 1, depth)
        return 0 if low is not None and low >= 0 else None

    def _sign(self, factor: Size) -> int:
        """1 when `factor` is at least 0, -1 when it is at most 0, 0 when neither is known (or it is 0)."""
        if isinstance(factor, int):
            return (factor > 0) - (factor < 0)
        low, high = self._shifted_interval(factor)
        return 1 if low is not None and low >= 0 else -1 if high is not None and high <= 0 else 0

    def _shifted_interval(self, size: Expr) -> Interval:
        found = self.proofs.intervals.get(size)
        if found is None:
            found = self._interval(size)
            if (found[0] is None or found[1] is None or found[0] < 0) and len(size.terms) > 1:
                moved: Size = 0
                for mono, coefficient in size.terms:
                    moved = moved + coefficient * self._moved(mono)
                if moved != size:
                    found = tighter(found, self._interval(moved))
            self.proofs.intervals[size] = found
        return found

    def _moved(self, mono: Monomial) -> Size:
        """The product with symbols that start at 0."""
        moved = self.proofs.moved.get(mono)
        if moved is None:
            whole = Expr(((mono, 1),)) if mono else 1
            moves = {name: symbol(name + "'") + start
                     for name in sorted(symbols_of(whole)) if (start := self._symbol_range(name)[0])}
            moved = self.proofs.moved[mono] = substitute(whole, moves)
        return moved

    def _interval(self, size: Size) -> Interval:
        """Sums and products of the intervals of the atoms."""
        if isinstance(size, int):
            return size, size
        low: int | None = 0
        high: int | None = 0
        for mono, coefficient in size.terms:
            least, most = self._mono_interval(mono)
            if coefficient < 0:
                least, most = most, least
            low = None if low is None or least is None else low + coefficient * least
            high = None if high is None or most is None else high + coefficient * most
            if low is None and high is None:
                break
        return low, high

    def _mono_interval(self, mono: Monomial) -> Interval:
        least: int | None = 1
        most: int | None = 1
        if len(mono) == 1 and mono[0][1] == 1:
            return self._atom_interval(mono[0][0])
        for atom, power in mono:
            a, b = self._atom_interval(atom)
            if a is None or a < 0:
                return None, None
            least = least * a**power
            most = None if most is None or b is None else most * b**power
        return least, most

    def _atom_interval(self, atom: str | Call) -> Interval:
        if isinstance(atom, str):
            if atom.endswith("'"):
                start, end = self._symbol_range(atom[:-1])
                return 0, None if end is None else end - start
            return self._symbol_range(atom)
        if self.proofs.limits is None:
            self.proofs.limits = limits_of(self.facts.known)
        found = self._call_interval(atom)
        return tighter(found, self.proofs.limits[atom]) if atom in self.proofs.limits else found

    def _call_interval(self, atom: Call) -> Interval:
        found = self.proofs.calls.get(atom)
        if found is None:
            found = self.proofs.calls[atom] = self._find_call_interval(atom)
        return found

    def _find_call_interval(self, atom: Call) -> Interval:
        if atom.op == "root":
            al, ah = self._interval(atom.args[0])
            return NUMBERS["root"](al or 0), None if ah is None else NUMBERS["root"](ah)
        (al, ah), (bl, bh) = (self._interval(x) for x in atom.args)
        if atom.op == "scaled":
            assert bl is not None
            return (None if al is None else NUMBERS["scaled"](al, bl)), (
                None if ah is None else NUMBERS["scaled"](ah, bl))
        if atom.op == "floordiv":
            if bl is None or bl < 0:
                return None, None
            bl = max(bl, 1)  # nothing is divided by 0
            low = None if al is None else al // bl if al < 0 else 0 if bh is None else al // bh
            high = None if ah is None else ah // bl if ah >= 0 else -1 if bh is None else ah // bh
            return low, high
        lows = [x for x in (al, bl) if x is not None]
        highs = [x for x in (ah, bh) if x is not None]
        if atom.op == "max":
            return (max(lows) if lows else None), (max(highs) if len(highs) == 2 else None)
        return (min(lows) if len(lows) == 2 else None), (min(highs) if highs else None)


class _Proofs:
    """Answers already found."""

    __slots__ = ("answers", "bounds", "calls", "intervals", "limits", "lows", "moved", "normal", "points")

    def __init__(self) -> None:
        self.normal: dict[str, Size] | None = None
        self.limits: dict[Call, Interval] | None = None
        self.answers: dict[tuple[Expr, int], bool | None] = {}
        self.bounds: dict[Expr, Interval] = {}
        self.intervals: dict[Expr, Interval] = {}
        self.lows: dict[tuple[Expr, int], int | None] = {}
        self.calls: dict[Call, Interval] = {}
        self.moved: dict[Monomial, Size] = {}
        self.points: dict[frozenset[str], list[dict[str, int]]] = {}


def _quotient_name(name: str, divisor: int) -> str:
    return f"{name}/{divisor}"
