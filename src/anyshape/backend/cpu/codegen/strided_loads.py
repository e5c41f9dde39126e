"""Strided loads: elements that are evenly and not far apart, backwards too, or that several lanes have, are read as
vectors, and lanes picked from them.

    lane k has a[3*k], four lanes:    a0 a1 a2 a3 | a4 a5 a6 a7 | a8 a9 -- --   -->   a0 a3 a6 a9
    lane k has a[(k + 1)//2]:         a0 a1 a2 --   -->   a0 a1 a1 a2

Nothing is read but what lies between the first element and the last.
"""
from __future__ import annotations

from anyshape.backend.cpu.llvm.ir_builder import Code, Value, constant

NEAR = (-1, 2, 3, 4)  # steps: beyond, a gather does not take longer


def load_apart(code: Code, dtype: str, lanes: int, first: Value, step: int, left: Value | None,
               place: tuple[int, bool, int]) -> Value:
    """`lanes` elements of dtype, `step` apart, from the address `first` on; only `left` of them, an i64, unless None.

    place: level, pure and alignment of the loads, see `Code.load`.
    """
    part = min(lanes, code.target.lanes)
    found = []
    for start in range(0, lanes, part):
        rest = None if left is None else code.binary("sub", left, constant("i64", start))
        at = code.address(first, dtype, constant("i64", start * step))
        found.append(_forward(code, dtype, part, at, step, rest, place) if step > 0
                     else _backward(code, dtype, part, at, rest, place))
    return code.concat(found)


def load_repeated(code: Code, dtype: str, lanes: int, first: Value, times: int, place_of_first: Value,
                  left: Value | None, place: tuple[int, bool, int]) -> Value:
    """`lanes` elements of dtype, lane k's being number (place_of_first + k) // times less that of lane 0, which is at
    the address `first`; only `left` of them, an i64, unless None. place: as for `load_apart`."""
    number = constant("i64", times)
    # of a number that is not negative
    phase = code.binary("srem", place_of_first, number)
    last = code.binary("add", phase, constant("i64", lanes - 1) if left is None else
                       code.binary("sub", left, constant("i64", 1)))
    count = code.binary("add", code.binary("sdiv", last, number), constant("i64", 1))
    vector = _vector(code, dtype, lanes, first, code.first_lanes(count, lanes), place)
    result = code.shuffle(vector, [k // times for k in range(lanes)])
    for start in range(1, times):
        other = code.shuffle(vector, [(start + k) // times for k in range(lanes)])
        result = code.select(code.compare("eq", phase, constant("i64", start)), other, result)
    return result


def _forward(code: Code, dtype: str, part: int, first: Value, step: int, left: Value | None,
             place: tuple[int, bool, int]) -> Value:
    last = step * (part - 1)
    # the last vector ends with the last element, so that no mask is needed where all lanes are
    begins = [*range(0, last + 1 - part, part), last + 1 - part]
    sources = [min(step * k // part, len(begins) - 1) for k in range(part)]
    vectors = []
    for begin in begins:
        count = None
        if left is not None:  # up to the last element that there is
            reach = code.binary("mul", code.binary("sub", left, constant("i64", 1)), constant("i64", step))
            count = code.binary("sub", reach, constant("i64", begin - 1))
        mask = None if count is None else code.first_lanes(count, part)
        vectors.append(_vector(code, dtype, part, code.address(first, dtype, constant("i64", begin)), mask, place))
    taken = vectors[0]
    for number in range(1, len(begins)):
        picks = [part + step * k - begins[number] if of == number else step * k if number == 1 and of == 0
                 else k if of < number else 0 for k, of in enumerate(sources)]
        taken = code.merge(taken, vectors[number], picks)
    return taken


def _backward(code: Code, dtype: str, part: int, first: Value, left: Value | None,
              place: tuple[int, bool, int]) -> Value:
    mask = None
    if left is not None:
        mask = code.shuffle(code.first_lanes(left, part), range(part - 1, -1, -1))
    at = code.address(first, dtype, constant("i64", 1 - part))
    return code.shuffle(_vector(code, dtype, part, at, mask, place), range(part - 1, -1, -1))


def _vector(code: Code, dtype: str, lanes: int, at: Value, mask: Value | None, place: tuple[int, bool, int]) -> Value:
    level, pure, align = place
    if mask is None:
        return code.load(dtype, lanes, at, level, pure, align)
    found = code.masked("load", constant(dtype, 0, lanes), at, mask, align, level, pure)
    assert found is not None
    return found
