"""Index arithmetic: linear offsets, reshapes, and the removal of divisions that the loop extents make needless."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anyshape.sym.expr import (
    Call,
    Expr,
    Size,
    coefficient_of,
    dense_strides,
    divide,
    floordiv,
    product,
    substitute,
    symbol,
    symbols_of,
)
from anyshape.sym.facts import Facts
from anyshape.sym.prover import bounds

SHARED = (2, 3, 4)  # neighbours that may share an element: with more, vectors are better off in loops of their own
Index = tuple[Size, ...]


def linear(index: Index, strides: tuple[Size, ...]) -> Size:
    """The offset in elements of `index` in a layout with `strides`."""
    total: Size = 0
    for position, stride in zip(index, strides, strict=True):
        total = total + position * stride
    return total


@dataclass(frozen=True, slots=True)
class DigitGroup:
    """Dims of the source and of the result that have the same product, so that each group is reshaped by itself."""

    source: tuple[int, ...]
    result: tuple[int, ...]


def _first_match(source: Sequence[Size], result: Sequence[Size]) -> tuple[int, int] | None:
    """The shortest non-empty heads of equal product: their lengths."""
    seen: dict[Size, int] = {}
    total: Size = 1
    for count, item in enumerate(result, 1):
        total = total * item
        seen.setdefault(total, count)
    total = 1
    for count, item in enumerate(source, 1):
        total = total * item
        if total in seen:
            return count, seen[total]
    return None


def groups(source: tuple[Size, ...], result: tuple[Size, ...]) -> list[DigitGroup]:
    """Pair up dims of equal products from the left, then from the right; what is left in the middle is one group.

    Dims of literal size 1 are in no group. The products of a group are equal as formulas, except those of the middle
    one where they are equal by a fact only (n and 4*(n//4) when 4 divides n).
    """
    left = [d for d, item in enumerate(source) if item != 1]
    right = [d for d, item in enumerate(result) if item != 1]
    head: list[DigitGroup] = []
    tail: list[DigitGroup] = []
    while match := _first_match([source[d] for d in left], [result[d] for d in right]):
        head.append(DigitGroup(tuple(left[:match[0]]), tuple(right[:match[1]])))
        left, right = left[match[0]:], right[match[1]:]
    while match := _first_match([source[d] for d in reversed(left)], [result[d] for d in reversed(right)]):
        at_left, at_right = len(left) - match[0], len(right) - match[1]
        tail.append(DigitGroup(tuple(left[at_left:]), tuple(right[at_right:])))
        left, right = left[:at_left], right[:at_right]
    if left or right:
        head.append(DigitGroup(tuple(left), tuple(right)))
    return head + tail[::-1]


def reshape_index(source: tuple[Size, ...], result: tuple[Size, ...], index: Index) -> Index:
    """The index into a dense `source` of the element at `index` of `result`. A dim that passes through, or that is
    split, gives an affine index; only dims that are merged use floor division and modulo."""
    if source == result:
        return index
    found: list[Size] = [0] * len(source)
    if 0 in source and 0 in result:
        # there is no element; what goes along the empty dim is not read before its loop
        found[source.index(0)] = index[result.index(0)]
        return tuple(found)
    if 0 in source or 0 in result:
        return tuple(found)
    for group in groups(source, result):
        strides = dense_strides(tuple(result[d] for d in group.result))
        offset: Size = 0
        for position, stride in zip(group.result, strides, strict=True):
            offset = offset + index[position] * stride
        for position in reversed(group.source[1:]):
            quotient = floordiv(offset, source[position])
            found[position] = offset - source[position] * quotient
            offset = quotient
        if group.source:
            found[group.source[0]] = offset
    return tuple(found)


def has_division(size: Size, names: Mapping[str, Size]) -> bool:
    """Does a floor division of a name in `names` remain in `size`?"""
    if isinstance(size, int):
        return False
    for mono, _ in size.terms:
        for atom, _ in mono:
            if isinstance(atom, Call) and any(symbols_of(a) & names.keys() for a in atom.args):
                return True
    return False


def simplify(size: Size, extents: Mapping[str, Size], facts: Facts) -> Size:
    """`size` with floor divisions of loop variables removed where `0 <= variable < extent` proves them needless.

    Sizes are taken to be at least 1: inside a loop that runs, every extent is.
    """
    if not has_division(size, extents):
        return size
    assert isinstance(size, Expr)
    result: Size = 0
    for mono, coefficient in size.terms:
        term: Size = coefficient
        for atom, power in mono:
            value: Size
            if isinstance(atom, str):
                value = symbol(atom)
            elif atom.op == "floordiv":
                value = _simplify_division(simplify(atom.args[0], extents, facts), atom.args[1], extents, facts)
            else:
                value = Expr(((((atom, 1),), 1),))
            for _ in range(power):
                term = term * value
        result = result + term
    return result


def _simplify_division(a: Size, b: Size, extents: Mapping[str, Size], facts: Facts) -> Size:
    value = floordiv(a, b)
    if isinstance(value, int):
        return value
    q: Size = 0
    r: Size = a
    if isinstance(b, int) or len(b.terms) == 1:
        q, r = divide(a, b)
    if isinstance(r, int) and isinstance(b, int):
        return q + r // b
    if in_range(r, b, extents, facts):
        return q
    if in_range(r + b, b, extents, facts):  # what goes down from the end of a block, as flip does: n - 1 - i
        return q - 1
    return value


def in_range(r: Size, b: Size, extents: Mapping[str, Size], facts: Facts) -> bool:
    """Is `0 <= r < b` proved, for all loop variables in their extents?"""
    low: dict[str, Size] = {}
    high: dict[str, Size] = {}
    if isinstance(r, Expr):
        for mono, coefficient in r.terms:
            for atom, power in mono:
                if isinstance(atom, Call):
                    return False
                if atom in extents:
                    if power != 1:
                        return False
                    ascending = coefficient > 0
                    last = extents[atom] - 1
                    if atom in low and (low[atom] == 0) != ascending:
                        return False
                    low[atom], high[atom] = (0, last) if ascending else (last, 0)
    least, most = substitute(r, low), substitute(r, high)
    return at_least_zero(least, facts) and at_least_zero(b - 1 - most, facts)


def at_least_zero(size: Size, facts: Facts) -> bool:
    """Is `size >= 0` proved when every size symbol is at least 1?"""
    if isinstance(size, int):
        return size >= 0
    shifted = substitute(size, {n: symbol(n) + 1 for n in symbols_of(size)})
    if isinstance(shifted, int):
        return shifted >= 0
    if all(c > 0 and all(isinstance(a, str) for a, _ in m) for m, c in shifted.terms):
        return True
    low, _ = bounds(facts, size)
    return low is not None and low >= 0


def split_request(size: Size, extents: Mapping[str, Size], innermost: str = "") -> tuple[str, Size] | None:
    """A loop variable and a divisor of its extent by which it should be split so that a division in `size` goes; not
    the innermost one where neighbours share elements, which are then read once for all lanes of a vector."""
    if isinstance(size, int):
        return None
    if innermost and repeats(size, innermost)[0] in SHARED:
        extents = {name: extent for name, extent in extents.items() if name != innermost}
    for mono, _ in size.terms:
        for atom, _ in mono:
            if not isinstance(atom, Call):
                continue
            for argument in atom.args:
                inner = split_request(argument, extents)
                if inner is not None:
                    return inner
            if atom.op != "floordiv":
                continue
            found = _split_for(atom.args[0], atom.args[1], extents)
            if found is not None:
                return found
    return None


def _split_for(a: Size, b: Size, extents: Mapping[str, Size]) -> tuple[str, Size] | None:
    if isinstance(a, int):
        return None
    for mono, coefficient in a.terms:
        for atom, power in mono:
            if not isinstance(atom, str) or atom not in extents or power != 1:
                continue
            # a = k*i + ... or -k*i + ...: i must be split where k*i crosses a multiple of b
            stride = product([abs(coefficient), *(symbol(x) for x, p in mono if x != atom and isinstance(x, str)
                                             for _ in range(p))])
            inner, rest = divide(b, stride)
            if rest != 0 or inner == 1 or inner == extents[atom]:
                continue
            outer, rest = divide(extents[atom], inner)
            if (rest == 0 and not isinstance(inner, int)) or (rest == 0 and isinstance(inner, int) and inner > 1):
                if outer != 1:
                    return atom, inner
    return None


def repeats(size: Size, name: str) -> tuple[int, Size]:
    """k and a, where all that the size says of a variable is 1 * ((name + ...) // k) with the dividend a: as it counts
    up, k after each other have the same. (0, 0) where it says something else."""
    terms = [term for term in size.terms if name in symbols_of(Expr((term,)))] if isinstance(size, Expr) else []
    if len(terms) != 1 or terms[0][1] != 1 or len(terms[0][0]) != 1:
        return 0, 0
    (atom, power), = terms[0][0]
    if power != 1 or not isinstance(atom, Call) or atom.op != "floordiv":
        return 0, 0
    inside, times = atom.args
    affine = coefficient_of(inside, name)
    if affine is None or affine[0] != 1 or name in symbols_of(affine[1]) or not isinstance(times, int):
        return 0, 0
    return times, inside


def most(size: Size) -> int:
    """A number that the size never exceeds, as its formula shows; -1 where it does not."""
    if isinstance(size, int):
        return size
    total = 0
    for mono, coefficient in size.terms:
        atoms = [atom for atom, power in mono if power == 1 and isinstance(atom, Call) and atom.op == "min"]
        numbers = [number for atom in atoms for number in atom.args if isinstance(number, int)]
        if mono and (len(mono) != 1 or not numbers or coefficient < 0):
            return -1
        total += coefficient * (min(numbers) if mono else 1)
    return total
