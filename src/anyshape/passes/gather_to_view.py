"""Strength reduction of gathers: lookups whose positions are arithmetic on sizes become views, or reads of runs of
elements. They need no checks.

    i = iota(| count=n, start=3, step=1)                a = slice(x | start=mod(3, n), count=n - mod(3, n))
    r = remainder(i, n)                           -->   b = slice(x | start=0, count=mod(3, n))
    y = index(x, r)                                     y = concat(a, b)

The positions along one dim are written as (start + step*i), its remainder, or its quotient, for i = 0, 1, ...:

    start + i, start + step*i, start - i    within the dim: a slice, turned around where they fall
    (start + i) mod n, n of them            of n elements: two slices after each other, as `roll` wants
    i // k, k*n of them                     of n elements: `repeat`, as resizing by a whole factor wants

That they lie within is proven from the facts; where it cannot be, the lookup stays, with its checks.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from anyshape.ir.graph import Node, Operand, Value
from anyshape.passes.rewriter import Replay
from anyshape.sym.expr import Expr, Size, maximum, minimum, mod
from anyshape.sym.prover import prove_at_most, prove_nonnegative

EXACT = 1 << 24  # whole numbers up to here are their own f32
_NUMBERS = ("i64", "i32")


@dataclass(frozen=True, slots=True)
class Positions:
    """(start + step*i), modulo `around` if that is not 0, divided by `times`; `count` of them."""

    start: Size
    step: Size
    count: Size
    around: Size = 0
    times: int = 1

    @property
    def plain(self) -> bool:
        return self.around == 0 and self.times == 1


def index(replay: Replay, node: Node) -> Operand | None:
    """An `index` whose every operand counts along an axis of its own, in the order of the dims."""
    source, *operands = node.inputs
    dims = node.attr("dims")
    assert isinstance(source, Value) and isinstance(dims, tuple)
    shapes = [operand.tensor.shape for operand in operands if isinstance(operand, Value)]
    rank = max(map(len, shapes))
    axes = [_axis(shape) for shape in shapes]
    places = [-1 if axis is None else rank - len(shape) + axis for shape, axis in zip(shapes, axes, strict=True)]
    if -1 in places or places != sorted(set(places)):
        return None
    return _looked_up(replay, node, source, list(zip(dims, operands, strict=True)))


def take(replay: Replay, node: Node) -> Operand | None:
    """A `take` by positions of one axis."""
    source, operand = node.inputs
    assert isinstance(source, Value) and isinstance(operand, Value)
    if _axis(operand.tensor.shape) is None:
        return None
    return _looked_up(replay, node, source, [(node.attr("dim"), operand)])


def _looked_up(replay: Replay, node: Node, source: Value, along: list[tuple[object, Operand]]) -> Operand | None:
    every = [(dim, _positions(replay, operand)) for dim, operand in along]
    found: Value | None = source
    for dim, positions in every:
        if found is None or positions is None:
            return None
        assert isinstance(dim, int)
        found = _picked(replay, found, dim, positions)
    if found is None:
        return None
    shape = node.output.tensor.shape
    return found if found.tensor.shape == shape else replay.op("reshape", found, shape=shape)


def _picked(replay: Replay, x: Value, dim: int, at: Positions) -> Value | None:
    """The elements of one dim at these positions."""
    facts, size, count = replay.graph.facts, x.tensor.shape[dim], at.count

    def part(start: Size, length: Size, step: int = 1) -> Value:
        if start == 0 and step == 1 and length == size:
            return x
        return replay.op("slice", x, dim=dim, start=start, count=length, step=step)

    def inside(lowest: Size, highest: Size) -> bool:
        return bool(prove_nonnegative(facts, lowest)) and bool(prove_at_most(facts, highest, size - 1))

    if at.plain and isinstance(at.step, int):
        last = at.start + (count - 1) * at.step
        if at.step > 0 and inside(at.start, last):
            return part(at.start, count, at.step)
        if at.step == -1 and inside(last, at.start):
            return replay.op("flip", part(last, count), dims=(dim,))
    elif at.times > 1 and at.start == 0 and at.step == 1 and count == size * at.times:
        return replay.op("repeat", x, dim=dim, times=at.times)
    elif at.times == 1 and at.around == size == count and at.step == 1 and size != 0:
        # of no elements there are none to turn around
        first = minimum(maximum(mod(at.start, size), 0), size)
        if first == 0:
            return x
        return replay.op("concat", part(first, size - first), part(0, first), dim=dim)
    return None


def _axis(shape: tuple[Size, ...]) -> int | None:
    """The only dim that is not 1."""
    found = [dim for dim, size in enumerate(shape) if size != 1]
    return found[0] if len(found) == 1 else None


def _positions(replay: Replay, operand: Operand) -> Positions | None:
    """What the elements of whole numbers are, along their only axis."""
    node = replay.producer(operand)
    if node is None or not isinstance(operand, Value) or operand.tensor.dtype not in _NUMBERS:
        return None
    facts = replay.graph.facts
    if node.op == "iota":
        start, step = node.attr("start"), node.attr("step")
        if not _whole(start) or not _whole(step):
            return None
        return Positions(start, step, operand.tensor.count)  # type: ignore[arg-type]
    if node.op in ("reshape", "cast"):
        source = node.inputs[0]
        assert isinstance(source, Value)
        if node.op == "cast" and source.tensor.dtype == "f32":
            return _scaled(replay, source)
        return _positions(replay, source) if source.tensor.count == operand.tensor.count else None
    if len(node.inputs) != 2:
        return None
    left, right = (_number(replay, one) for one in node.inputs)
    at = _positions(replay, node.inputs[1 if right is None else 0]) if (left is None) != (right is None) else None
    if at is None or not at.plain or at.count != operand.tensor.count:
        return None
    number = left if right is None else right
    assert number is not None
    if node.op == "add":
        return replace(at, start=at.start + number)
    if node.op == "mul":
        return replace(at, start=at.start * number, step=at.step * number)
    if node.op == "sub":
        return replace(at, start=at.start - number) if left is None else replace(at, start=number - at.start,
                                                                                step=0 - at.step)
    if left is not None or not (node.op in ("remainder", "floor_div") or prove_nonnegative(facts, at.start)
                                or _within(at, number)) or not prove_nonnegative(facts, at.step):
        return None
    if node.op in ("remainder", "fmod") and prove_nonnegative(facts, number):
        return replace(at, around=number)
    if node.op in ("floor_div", "trunc_div") and isinstance(number, int) and number > 0:
        return replace(at, times=number)
    return None


def _within(at: Positions, number: Size) -> bool:
    """Whether `start` is a remainder of division by `number`, if there is any position."""
    return at.count == number != 0 and mod(at.start, number) == at.start


def _scaled(replay: Replay, value: Value) -> Positions | None:
    """Positions times 1/k in f32, k a power of two, that are rounded towards zero: exact as long as the positions are
    their own f32. PyTorch's resizing to twice the size shifts whole numbers, at any size; in the trace it is these
    equations, with a factor that comes from the sizes."""
    node = replay.producer(value)
    if node is None or node.op != "mul":
        return None
    for counts, factor in (node.inputs, node.inputs[::-1]):
        at = _counts(replay, counts)
        times = _inverse(replay, factor, at.count) if at is not None else None
        if at is None or times is None or at.start != 0 or at.step != 1 or not at.plain:
            continue
        if (times == 2 and isinstance(factor, Value)) or prove_at_most(replay.graph.facts, at.count, EXACT):
            return replace(at, times=times)
    return None


def _counts(replay: Replay, operand: Operand) -> Positions | None:
    """Whole numbers as f32; 0.0 may have been added."""
    node = replay.producer(operand)
    if node is not None and node.op == "add" and node.inputs[1] == 0:
        node = replay.producer(node.inputs[0])
    return _positions(replay, node.inputs[0]) if node is not None and node.op == "cast" else None


def _inverse(replay: Replay, operand: Operand, count: Size) -> int | None:
    """k, where the operand is 1/k, a power of two: a number, or n / (k*n), for k*n positions."""
    if isinstance(operand, float):
        times = int(1 / operand) if 0 < operand <= 0.5 and 1 / operand < EXACT else 0
        return times if times and times * operand == 1 and times & (times - 1) == 0 else None
    node = replay.producer(operand)
    while node is not None and node.op == "cast":
        node = replay.producer(node.inputs[0])
    below = replay.producer(node.inputs[1]) if node is not None and node.op == "div" else None
    if node is None or below is None or below.op != "mul":
        return None
    for number, size in (below.inputs, below.inputs[::-1]):
        if isinstance(number, float) and size is node.inputs[0] and number >= 2:
            times = _inverse(replay, 1 / number, count) or 0
            return times if times and count == _size(replay, size) * times else None
    return None


def _size(replay: Replay, operand: Operand) -> Size:
    """The size that the operand is as a float; 0 where it is none."""
    node = replay.producer(operand)
    while node is not None and node.op == "cast":
        node = replay.producer(node.inputs[0])
    found = node.inputs[0] if node is not None and node.op == "full" else 0
    return found if isinstance(found, Expr) else 0


def _number(replay: Replay, operand: Operand) -> Size | None:
    """The whole number that all elements are."""
    if isinstance(operand, Value):
        node = replay.producer(operand)
        return _number(replay, node.inputs[0]) if node is not None and node.op == "full" else None
    return operand if _whole(operand) else None  # type: ignore[return-value]


def _whole(value: object) -> bool:
    return isinstance(value, int | Expr) and not isinstance(value, bool)
