"""Sizes in normal form: an `int` when it is one, else a sorted sum of products over symbols.

An `Expr` is a polynomial with integer coefficients. Its factors (atoms) are symbol names, or `Call`s: floor division,
maximum and minimum of expressions, whole square roots, and an expression times a float as float64 arithmetic gives it.
There is no modulo atom: `mod(x, m)` is `x - m*(x//m)`, so that `m*(x//m) + mod(x, m)` is `x` by construction.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import gcd
from typing import Union

from anyshape.sym.floats import bits_of, root_number, scaled_number
from anyshape.sym.show import call_text, text_of


class Call:
    """A factor that is no polynomial; immutable, equal by value, hashable: `op` is one of "floordiv", "max", "min",
    "scaled", "root"; `args` are two sizes (one under a root).

    Of "scaled" the second one is the bits of a float64 as a whole number (see `scaled`).
    """

    __slots__ = ("_hash", "args", "op")
    op: str
    args: tuple[Size, ...]

    def __init__(self, op: str, args: tuple[Size, ...]) -> None:
        self.op, self.args = op, args
        self._hash = hash((op, args))  # kept: products of sizes look their factors up again and again

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Call) and self._hash == other._hash and self.op == other.op
                                 and self.args == other.args)

    def __reduce__(self) -> tuple[type[Call], tuple[str, tuple[Size, ...]]]:
        # the kept hash is that of one process only
        return Call, (self.op, self.args)

    def __str__(self) -> str:
        return call_text(self.op, self.args)

    def __repr__(self) -> str:
        return f"Call({self})"


Atom = Union[str, Call]
Monomial = tuple[tuple[Atom, int], ...]


class Expr:
    """A polynomial with at least one symbol; immutable, equal by value, hashable."""

    __slots__ = ("_hash", "_symbols", "_text", "terms")
    terms: tuple[tuple[Monomial, int], ...]

    def __init__(self, terms: tuple[tuple[Monomial, int], ...]) -> None:
        self.terms = terms
        self._hash = hash(terms)
        self._symbols: frozenset[str] | None = None
        self._text: str | None = None  # kept: sizes are sorted by it, and hold others again and again

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Expr) and self._hash == other._hash and self.terms == other.terms)

    def __add__(self, other: Size) -> Size:
        return _add(self, other)

    def __neg__(self) -> Size:
        return _make({m: -c for m, c in self.terms})

    def __sub__(self, other: Size) -> Size:
        return _add(self, -other)

    def __rsub__(self, other: Size) -> Size:
        return _add(-self, other)

    def __mul__(self, other: Size) -> Size:
        return _multiply(self, other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __floordiv__(self, other: Size) -> Size:
        return floordiv(self, other)

    def __rfloordiv__(self, other: int) -> Size:
        return floordiv(other, self)

    def __mod__(self, other: Size) -> Size:
        return mod(self, other)

    def __reduce__(self) -> tuple[type[Expr], tuple[tuple[tuple[Monomial, int], ...]]]:
        # the kept hash is that of one process only
        return Expr, (self.terms,)

    def __bool__(self) -> bool:
        raise TypeError(f"a symbolic size has no truth value: {self}; ask Facts.prove")

    def __str__(self) -> str:
        if self._text is None:
            self._text = text_of(self.terms)
        return self._text

    def __repr__(self) -> str:
        return f"Expr({self})"


Size = Union[int, Expr]


def symbol(name: str) -> Expr:
    """The size named `name` (a letter or underscore, then letters, digits, underscores; or `%` and a number)."""
    return Expr(((((name, 1),), 1),))


@lru_cache(maxsize=1 << 16)
def _atom_key(atom: Atom) -> tuple[int, str]:
    return (0, atom) if isinstance(atom, str) else (1, str(atom))


@lru_cache(maxsize=1 << 16)
def _mono_key(mono: Monomial) -> tuple:
    return (-sum(p for _, p in mono), tuple((_atom_key(a), -p) for a, p in mono))


def _terms(size: Size) -> tuple[tuple[Monomial, int], ...]:
    if isinstance(size, Expr):
        return size.terms
    return (((), size),) if size else ()


def _make(terms: Mapping[Monomial, int]) -> Size:
    kept = [(m, c) for m, c in terms.items() if c]
    if len(kept) <= 1 and not (kept and kept[0][0]):
        return kept[0][1] if kept else 0
    if len(kept) > 1:
        kept.sort(key=lambda t: _mono_key(t[0]))
    return Expr(tuple(kept))


@lru_cache(maxsize=1 << 16)
def _add(a: Size, b: Size) -> Size:
    terms = dict(_terms(a))
    for mono, coefficient in _terms(b):
        terms[mono] = terms.get(mono, 0) + coefficient
    return _make(terms)


def _times(a: Monomial, b: Monomial) -> Monomial:
    if not a or not b:
        return a or b
    powers: dict[Atom, int] = dict(a)
    for atom, power in b:
        powers[atom] = powers.get(atom, 0) + power
    return tuple(sorted(powers.items(), key=lambda item: _atom_key(item[0])))


@lru_cache(maxsize=1 << 16)
def _multiply(a: Size, b: Size) -> Size:
    terms: dict[Monomial, int] = {}
    for ma, ca in _terms(a):
        for mb, cb in _terms(b):
            mono = _times(ma, mb)
            terms[mono] = terms.get(mono, 0) + ca * cb
    return _make(terms)


def _mono_divide(a: Monomial, b: Monomial) -> Monomial | None:
    powers = dict(a)
    for atom, power in b:
        left = powers.get(atom, 0) - power
        if left < 0:
            return None
        if left:
            powers[atom] = left
        else:
            del powers[atom]
    return tuple(sorted(powers.items(), key=lambda item: _atom_key(item[0])))


@lru_cache(maxsize=1 << 16)
def divide(a: Size, b: Size) -> tuple[Size, Size]:
    """Quotient and remainder of polynomial division, `a == q*b + r`: every term of `a` that the leading term of `b`
    divides is taken out. Says nothing about the sign or size of the remainder."""
    if isinstance(b, int) and b == 0:
        return 0, a
    lead, lead_coefficient = _terms(b)[0]
    if len(_terms(b)) == 1:
        whole: dict[Monomial, int] = {}
        left: dict[Monomial, int] = {}
        for mono, coefficient in _terms(a):
            part = _mono_divide(mono, lead) if coefficient % lead_coefficient == 0 else None
            if part is None:
                left[mono] = coefficient
            else:
                whole[part] = coefficient // lead_coefficient
        return _make(whole), _make(left)
    q: Size = 0
    r: Size = a
    for _ in range(16):
        for mono, coefficient in _terms(r):
            part = _mono_divide(mono, lead) if coefficient % lead_coefficient == 0 else None
            if part is not None:
                step = _make({part: coefficient // lead_coefficient})
                q = q + step
                r = r - step * b
                break
        else:
            break
    return q, r


@lru_cache(maxsize=1 << 16)
def floordiv(a: Size, b: Size) -> Size:
    """`a // b` rounded down; `b` is taken to be positive. Whole multiples of `b` leave the quotient at once, common
    factors are cancelled and nested quotients merged."""
    if isinstance(b, int):
        return _floordiv_number(a, b)
    q, r = divide(a, b)
    if isinstance(r, int) and r == 0:
        return q
    if len(b.terms) > 1:
        # a sum as divisor: only an exact quotient is taken out, half of a sum helps nobody
        q, r = 0, a
    (shared, common), (shared_b, common_b) = _content(r), _content(b)
    both = gcd(shared, shared_b)
    factor = tuple((x, min(p, dict(common_b)[x])) for x, p in common if x in dict(common_b))
    if both > 1 or factor:
        return q + floordiv(_cancel(r, both, factor), _cancel(b, both, factor))
    inner = _only_call(r, "floordiv")
    if inner is not None:
        return q + floordiv(inner.args[0], inner.args[1] * b)
    return q + _call("floordiv", r, b)


def _floordiv_number(a: Size, b: int) -> Size:
    if b == 0:
        raise ZeroDivisionError(f"({a})//0")
    if isinstance(a, int):
        return a // b
    if b < 0:
        return _floordiv_number(-a, -b)
    if b == 1:
        return a
    # whole multiples go out; every coefficient that stays inside is in 0..b-1, so that 5*n//4 is n + n//4
    whole = {m: c // b for m, c in a.terms}
    inside = {m: c % b for m, c in a.terms if c % b}
    varying = [m for m in inside if m]
    if not varying:
        return _make(whole)
    if all(c < 0 for m, c in a.terms if m in inside and m):
        # -n//4 is -((n + 3)//4): rounded up instead of rounded down
        constant = dict(a.terms).get((), 0)
        return -floordiv(_make({m: -c for m, c in a.terms if m}) - constant + (b - 1), b)
    q = _make(whole)
    constant = inside.pop((), 0)
    # (g*x + c)//(g*b) is (x + c//g)//b
    shared = b
    for coefficient in inside.values():
        shared = gcd(shared, coefficient)
    constant = constant // shared
    r = _make({m: c // shared for m, c in inside.items()}) + constant
    b = b // shared
    if shared > 1:
        return q + floordiv(r, b)
    # (x//m + c)//n is (x + c*m)//(m*n)
    inner = _only_call(r - constant, "floordiv")
    if inner is not None:
        return q + floordiv(inner.args[0] + constant * inner.args[1], inner.args[1] * b)
    return q + _call("floordiv", r, b)


def _call(op: str, *args: Size) -> Expr:
    return Expr(((((Call(op, args), 1),), 1),))


def _only_call(size: Size, op: str) -> Call | None:
    """The call of `op` that `size` is, when it is nothing else."""
    if isinstance(size, Expr) and len(size.terms) == 1:
        mono, coefficient = size.terms[0]
        if coefficient == 1 and len(mono) == 1 and mono[0][1] == 1:
            atom = mono[0][0]
            return atom if isinstance(atom, Call) and atom.op == op else None
    return None


def _content(size: Size) -> tuple[int, Monomial]:
    """The greatest number and the greatest product of atoms that divide every term."""
    number = 0
    common: dict[Atom, int] | None = None
    for mono, coefficient in _terms(size):
        number = gcd(number, coefficient)
        powers = dict(mono)
        if common is None:
            common = powers
        else:
            common = {x: min(p, powers[x]) for x, p in common.items() if x in powers}
    return number, tuple((common or {}).items())


def _cancel(size: Size, number: int, factor: Monomial) -> Size:
    terms: dict[Monomial, int] = {}
    for mono, coefficient in _terms(size):
        part = _mono_divide(mono, factor)
        assert part is not None, size
        terms[part] = coefficient // number
    return _make(terms)


def mod(a: Size, b: Size) -> Size:
    """`a` modulo `b` with the sign of `b` (positive)."""
    if isinstance(a, int) and isinstance(b, int):
        return a % b
    return a - b * floordiv(a, b)


def ceildiv(a: Size, b: Size) -> Size:
    """`a / b` rounded up, `b` positive."""
    return floordiv(a + b - 1, b)


def maximum(*sizes: Size) -> Size:
    """The largest of some sizes, at least one."""
    return _extreme("max", sizes)


def minimum(*sizes: Size) -> Size:
    """The smallest of some sizes, at least one."""
    return _extreme("min", sizes)


def _extreme(op: str, sizes: tuple[Size, ...]) -> Size:
    if len(sizes) == 2 and isinstance(d := sizes[0] - sizes[1], int):
        return sizes[(d < 0) if op == "max" else (d >= 0)]
    # nested ones are one list, in which parts that differ by a number are one part
    better = max if op == "max" else min
    parts: dict[Size, int] = {}
    for part in (part for size in sizes for part in _flat(op, size)):
        constant = dict(_terms(part)).get((), 0)
        parts[part - constant] = better(constant, parts.get(part - constant, constant))
    if len(parts) == 1:
        return sum(*parts.items())
    # what all parts share stands outside: max(n + 3, m + 1) is 1 + max(n + 2, m)
    shared = set.intersection(*(set(_terms(part)) for part in parts))
    outside = _make(dict(shared)) + min(parts.values())
    inside = [part + constant - outside for part, constant in parts.items()]
    number = gcd(*(_content(part)[0] for part in inside))
    inside = sorted((_cancel(part, number, ()) for part in inside), key=str)
    result = inside[-1]
    for part in reversed(inside[:-1]):
        result = _call(op, part, result)
    return outside + number * result


def _flat(op: str, size: Size) -> list[Size]:
    """The parts of a maximum (minimum), also where one stands in a sum: n + 2*max(a, b) has 2*a + n and 2*b + n."""
    inner = [(atom, c) for m, c in _terms(size) if (atom := _only_call(Expr(((m, 1),)), op)) is not None and c > 0]
    if len(inner) != 1:
        return [size]
    (atom, factor), = inner
    rest = size - factor * _call(op, *atom.args)
    return [part for x in atom.args for part in _flat(op, rest + factor * x)]


def scaled(size: Size, factor: float) -> Size:
    """`size * factor` rounded to float64, then toward zero; both at least 0. It has no exact polynomial form: 0.6 is no
    ratio of small numbers, and 0.6*5 is 3 all the same."""
    return _scaled(size, bits_of(factor))


def _scaled(size: Size, bits: Size) -> Size:
    return scaled_number(size, bits) if isinstance(size, int) and isinstance(bits, int) else _call("scaled", size, bits)


def root(size: Size) -> Size:
    """The whole square root, rounded down, of a size that is at least 0."""
    return root_number(size) if isinstance(size, int) else _call("root", size)


OPERATIONS: dict[str, Callable[..., Size]] = {
    "floordiv": floordiv, "max": maximum, "min": minimum, "scaled": _scaled, "root": root}


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes; 1 for none."""
    result: Size = 1
    for size in sizes:
        result = result * size
    return result


def dense_strides(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Row-major strides in elements."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


def symbols_of(size: Size) -> frozenset[str]:
    """The names that occur in `size`, inside calls too."""
    if isinstance(size, int):
        return frozenset()
    if size._symbols is None:
        found: set[str] = set()
        for mono, _ in size.terms:
            for atom, _ in mono:
                if isinstance(atom, str):
                    found.add(atom)
                else:
                    for argument in atom.args:
                        found |= symbols_of(argument)
        size._symbols = frozenset(found)
    return size._symbols


def substitute(size: Size, values: Mapping[str, Size]) -> Size:
    """`size` with symbols replaced, in normal form; an `int` when nothing symbolic is left."""
    if isinstance(size, int) or not (symbols_of(size) & values.keys()):
        return size
    result: Size = 0
    for mono, coefficient in size.terms:
        term: Size = coefficient
        for atom, power in mono:
            value: Size
            if isinstance(atom, str):
                value = values[atom] if atom in values else symbol(atom)
            else:
                value = OPERATIONS[atom.op](*(substitute(a, values) for a in atom.args))
            for _ in range(power):
                term = term * value
        result = result + term
    return result


NUMBERS: dict[str, Callable[..., int]] = {
    "floordiv": int.__floordiv__, "max": max, "min": min, "scaled": scaled_number, "root": root_number}


def evaluate(size: Size, values: Mapping[str, int], functions: Mapping[str, Callable[..., int]] = NUMBERS) -> int:
    """The number that `size` has when every symbol has the value in `values` (KeyError if one is missing)."""
    if isinstance(size, int):
        return size
    total = 0
    for mono, coefficient in size.terms:
        term = coefficient
        for atom, power in mono:
            value = values[atom] if isinstance(atom, str) else functions[atom.op](
                *[evaluate(argument, values, functions) for argument in atom.args])
            term *= value**power
        total += term
    return total


def evaluate_all(sizes: Sequence[Size], values: Mapping[str, int]) -> list[int]:
    """The numbers of sizes that hold each other, as offsets of buffers do: each part is evaluated once."""
    found: dict[Size, int] = {}

    def number(size: Size) -> int:
        if isinstance(size, int):
            return size
        known = found.get(size)
        if known is None:
            known = 0
            for mono, coefficient in size.terms:
                term = coefficient
                for atom, power in mono:
                    value = values[atom] if isinstance(atom, str) else NUMBERS[atom.op](*map(number, atom.args))
                    term *= value**power
                known += term
            found[size] = known
        return known

    return [number(size) for size in sizes]


def coefficient_of(size: Size, name: str) -> tuple[Size, Size] | None:
    """`(k, rest)` with `size == k*name + rest`, neither containing `name`; None when `size` is not affine in it."""
    k: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for mono, coefficient in _terms(size):
        powers = dict(mono)
        power = powers.pop(name, 0)
        if any(not isinstance(a, str) and name in symbols_of(_make({((a, 1),): 1})) for a in powers):
            return None
        if power == 0:
            rest[mono] = coefficient
        elif power == 1:
            k[tuple((a, p) for a, p in mono if a != name)] = coefficient
        else:
            return None
    return _make(k), _make(rest)
