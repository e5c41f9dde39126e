"""Signs of polynomials: whether one is at least 0 on a box of whole numbers, where plain intervals do not see it.

    4096*b*n - b*n*n  for n <= 4096        n*n - 4*n + 5  for every n

A product that all terms share has no part in the sign, but that its factors may be taken as at least 1 (where one is 0,
so is the polynomial). Then variables without an upper end are moved so that they start at 0: it is enough that what
stands before each of their powers is at least 0 in the others. There the Bernstein coefficients, as many as the
polynomial could have terms, lie around its values. Where they have both signs, the box is cut in two, to a depth.
"""
from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import comb, prod

from anyshape.sym.expr import Atom, Monomial

Poly = dict[tuple[int, ...], int]  # exponents of the variables -> coefficient
Box = tuple[tuple[int, int | None], ...]  # least and greatest value of each variable; None: no end

_CUTS = 12  # boxes that are looked at
_COEFFICIENTS = 128  # of one Bernstein form
_FAR = 1 << 20  # a point on the way to no end


def nonnegative(poly: Poly, box: Box) -> bool:
    """Is the polynomial at least 0 everywhere in the box? False: not, or not shown."""
    boxes = [box]
    for _ in range(_CUTS):
        if not boxes:
            return True
        here = boxes.pop()
        rest, here = _without_content(poly, here)
        if any(high is not None and high < low for low, high in here):
            continue
        if _below_somewhere(rest, here):
            return False
        moved = _moved(rest, [low for low, _ in here])
        if all(c >= 0 for c in moved.values()) or _by_coefficients(moved, here):
            continue
        parts = _halves(moved, here)
        if parts is None:
            return False
        boxes.extend(parts)
    return not boxes


def _without_content(poly: Poly, box: Box) -> tuple[Poly, Box]:
    """The polynomial without the factors of all its terms that are at least 0, and the box in which they are not 0."""
    if not poly:
        return poly, box
    shared = [min(powers) if low >= 0 else 0 for powers, (low, _) in zip(zip(*poly, strict=True), box, strict=True)]
    if not any(shared):
        return poly, box
    return ({tuple(p - s for p, s in zip(powers, shared, strict=True)): c for powers, c in poly.items()},
            tuple((max(low, 1) if s else low, high) for s, (low, high) in zip(shared, box, strict=True)))


def _at(poly: Poly, point: Sequence[int]) -> int:
    return sum(c * prod(x**p for x, p in zip(point, powers, strict=True) if p) for powers, c in poly.items())


def _below_somewhere(poly: Poly, box: Box) -> bool:
    """Is it below 0 at one of a few corners?"""
    lows = [low for low, _ in box]
    highs = [low + _FAR if high is None else high for low, high in box]
    points = [lows, highs]
    for i in range(len(box)):
        points.append([*lows[:i], highs[i], *lows[i + 1:]])
        points.append([*highs[:i], lows[i], *highs[i + 1:]])
    return any(_at(poly, point) < 0 for point in points)


def _moved(poly: Poly, start: Sequence[int]) -> Poly:
    """The polynomial in variables that start at 0."""
    for i, low in enumerate(start):
        if not low:
            continue
        result: Poly = {}
        for powers, c in poly.items():
            for k in range(powers[i] + 1):
                key = (*powers[:i], k, *powers[i + 1:])
                result[key] = result.get(key, 0) + c * comb(powers[i], k) * low**(powers[i] - k)
        poly = result
    return poly


def _by_coefficients(poly: Poly, box: Box) -> bool:
    """Are all Bernstein coefficients at least 0, of what stands before each product of variables without an end?"""
    ends = [i for i, (_, high) in enumerate(box) if high is not None]
    widths = [high - low for low, high in box if high is not None]
    groups: dict[tuple[int, ...], Poly] = {}
    for powers, c in poly.items():
        outside = tuple(0 if i in ends else p for i, p in enumerate(powers))
        groups.setdefault(outside, {})[tuple(powers[i] for i in ends)] = c
    return all(all(c >= 0 for c in group.values()) or _bernstein(group, widths) for group in groups.values())


def _bernstein(poly: Poly, widths: Sequence[int]) -> bool:
    degrees = [max(powers) for powers in zip(*poly, strict=True)]
    if not degrees or prod(d + 1 for d in degrees) > _COEFFICIENTS:
        return False
    scaled = [(powers, c * prod(w**p for w, p in zip(widths, powers, strict=True))) for powers, c in poly.items()]
    # a coefficient times a number above 0, so that it is whole
    return all(sum(c * prod(comb(d - p, i - p) for d, i, p in zip(degrees, place, powers, strict=True))
                   for powers, c in scaled if all(p <= i for p, i in zip(powers, place, strict=True))) >= 0
               for place in itertools.product(*(range(d + 1) for d in degrees)))


def _halves(poly: Poly, box: Box) -> list[Box] | None:
    """The box cut where the variable that matters most lies in two; `poly` is the polynomial moved to start at 0."""
    bad = [powers for powers, c in poly.items() if c < 0]
    used = [i for i in range(len(box)) if any(powers[i] for powers in bad)]
    if not used:
        return None
    i = max(used, key=lambda k: (box[k][1] is None, (box[k][1] or 0) - box[k][0], -k))
    low, high = box[i]
    if high == low:
        return None
    # from here on the highest power counts more than the others, with one variable
    most = max(p[i] for p in poly)
    lead = min((c for p, c in poly.items() if p[i] == most and c > 0), default=1)
    middle = low + max(-c for c in poly.values()) // lead + 1
    if high is not None:
        middle = min(middle, (low + high) // 2)
    return [(*box[:i], (low, middle), *box[i + 1:]), (*box[:i], (middle + 1, high), *box[i + 1:])]


def poly_of(terms: Sequence[tuple[Monomial, int]], atoms: Mapping[Atom, int]) -> Poly:
    """The terms of an Expr over numbered atoms."""
    result: Poly = {}
    for mono, c in terms:
        powers = [0] * len(atoms)
        for atom, power in mono:
            powers[atoms[atom]] = power
        result[tuple(powers)] = c
    return result
