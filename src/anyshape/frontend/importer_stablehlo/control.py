"""Translations of StableHLO's control flow, where what it depends on is known when compiling, of custom calls, and of
rng_bit_generator: the bits that XLA's generators give, Philox where it may choose.

    while (i < 4) { x = f(x); i = i + 1 }   -->   f(f(f(f(x))))

Counters start at the state and go up by one for each block of bits; the key and a counter are scrambled to a block
(Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011). Words of 32 bits are held in i64, those of 64 by
their bits.

    state = [key, counter]             ThreeFry2x32: a block is 2 words
    state = [key, counter]             Philox4x32: a block is 4 words; the counter is the higher half of 128 bits
    state = [key, low, high]           the same, with a counter of 128 bits
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anyshape.frontend.aten.table import Decline
from anyshape.frontend.importer_stablehlo.elementwise import chosen
from anyshape.frontend.importer_stablehlo.lapack import LIBRARY, ROUTINES
from anyshape.frontend.importer_stablehlo.reduce import largest, nearly_largest, sizes_of_window, windows
from anyshape.frontend.importer_stablehlo.table import ROWS, Call, held, translates
from anyshape.frontend.symbols.known import Comparison, Known
from anyshape.ir.graph import Value
from anyshape.sym.expr import Size, ceildiv, mod, product

MOST_UNROLLED = 512  # operations of a loop that is unrolled
WORD = 0xFFFFFFFF
LOWEST = -(1 << 63)
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
PASSED_ON = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement", "MoveToHost",
             "MoveToDevice", "LayoutConstraint")


class RunTimeLoop(Exception):
    """A loop that is not unrolled: how often it runs is known at run time only, or it is too long."""


@translates("while")
def while_(c: Call) -> Any:
    condition, body = c.operation.regions
    now = tuple(c.inputs)
    for _ in range(max(MOST_UNROLLED // max(len(body.operations), 1), 2)):
        found = c.walk.run(condition, now)[0]
        if not isinstance(found, Known) or found.array.dtype == object:
            raise RunTimeLoop
        if not bool(found.array):
            return now
        now = c.walk.run(body, now)
    raise RunTimeLoop


@translates("case", "if")
def case(c: Call) -> Any:
    index, regions = c.inputs[0], c.operation.regions
    if not isinstance(index, Known) or index.array.dtype == object:
        return _selected(c)
    number = int(index.array)
    if c.name == "if":
        number = 0 if number else 1
    elif not 0 <= number < len(regions):
        number = len(regions) - 1
    return c.walk.run(regions[number], ())


def _selected(c: Call) -> Any:
    """All branches, and of their results those of the one that is taken: a program has no effects."""
    index = c.value(0)
    every = [[c.tensor(one) for one in c.walk.run(region, ())] for region in c.operation.regions]
    result = every[-1]
    for number in reversed(range(len(every) - 1)):
        taken = index if c.name == "if" else c.op("eq", index, number)
        taken_ones = []
        for a, b in zip(every[number], result, strict=True):
            a, b = c.same([a, b])
            wide = c.t.broadcast(c.t.reshape(taken, (1,) * a.tensor.rank), a.tensor.shape)
            taken_ones.append(chosen(c, wide, a, b))
        result = taken_ones
    return tuple(result)


@translates("custom_call")
def custom_call(c: Call) -> Any:
    name = c.attr("call_target_name")
    if name == "shape_assertion":
        return ()
    if name == "stablehlo.dynamic_reduce_window":
        return windows(c, c.walk.body(c.attr("called_computations")[0]), len(c.operation.outputs), sizes_of_window(c))
    if name == "stablehlo.dynamic_rng_bit_generator":
        return generated(c, c.sizes(1))
    if name == "mhlo.topk" and c.attr("mhlo.attributes", {}).get("largest"):
        return largest(c, c.attr("mhlo.attributes")["k"])
    plain = name.replace("mhlo.", "chlo.", 1)
    if plain != name and plain in ROWS and not c.attr("mhlo.attributes"):  # as TensorFlow's converter writes it
        return ROWS[plain](Call(replace(c.operation, name=plain), c.inputs, c.walk))
    settings = c.attr("mhlo.backend_config") or {}
    if name == "ApproxTopK" and settings.get("aggregate_to_topk") and len(c.operation.outputs) == 2:
        return nearly_largest(c, c.walk.body(c.attr("called_computations")[0]), settings["reduction_dim"],
                              settings["top_k"])
    if name in PASSED_ON:
        return tuple(c.inputs)
    library = LIBRARY.match(name)
    if library is not None and library["routine"] in ROUTINES:
        return ROUTINES[library["routine"]](c, settings)
    raise Decline(f"a call of {name}")


@translates("composite")
def composite(c: Call) -> Any:
    return c.walk.call(c.attr("decomposition"), c.inputs)


@translates("get_tuple_element")
def get_tuple_element(c: Call) -> Any:
    return c.inputs[c.attr("index")]


@translates("tuple")
def tuple_(c: Call) -> Any:
    raise Decline("tuples of tensors")


def asserted(one: Any) -> Comparison | None:
    """The comparison of sizes that an assertion is about."""
    if isinstance(one, Known) and one.array.dtype == object and isinstance(one.items()[0], Comparison):
        return one.items()[0]  # type: ignore[no-any-return]
    return None


# ---- random bits


@translates("rng_bit_generator")
def rng_bit_generator(c: Call) -> tuple[Value, Value]:
    shape = c.operation.gives[1].static
    if shape is None:
        raise Decline("the shape of its result is not given")
    return generated(c, shape)


def generated(c: Call, shape: Sequence[Size]) -> tuple[Value, Value]:
    """The state after, and the bits of this shape."""
    algorithm = c.attr("rng_algorithm")
    dtype = c.operation.gives[1].dtype
    count = c.sizes_of(0)[0]
    if dtype[0] not in "iu" or c.given(0) != "u64":
        raise Decline(f"bits of {dtype} from a state of {c.given(0)}")
    if count not in ((2,) if algorithm == "THREE_FRY" else (2, 3)):
        raise Decline(f"a state of {count} numbers")
    state, bits = c.value(0), int(dtype[1:])
    words = _threefry if algorithm == "THREE_FRY" else _philox
    after, found = words(c, state, shape, bits == 64)
    if bits < 32:
        found = c.op("bit_and", found, (1 << bits) - 1)
    return after, c.op("cast", found, dtype=held(dtype)) if held(dtype) != "i64" else found


def _part(c: Call, state: Value, place: int) -> Value:
    return c.t.window(state, 0, place, 1)


def _halves(c: Call, value: Value) -> tuple[Value, Value]:
    """The low and the high word of 64 bits."""
    return c.op("bit_and", value, WORD), c.op("bit_and", c.op("shift_right", value, 32), WORD)


def _whole(c: Call, low: Value, high: Value) -> Value:
    return c.op("bit_or", low, c.op("shift_left", high, 32))


def _sum(c: Call, a: Value, b: Value | int) -> Value:
    return c.op("bit_and", c.op("add", a, b), WORD)


def _wide(c: Call, value: Value, count: Size) -> Value:
    return c.t.broadcast(value, (count,))


def _counters(c: Call, start: Value, count: Size) -> Value:
    return c.op("add", _wide(c, start, count), c.t.iota(count))


# ---- ThreeFry


def _threefry(c: Call, state: Value, shape: Sequence[Size], wide: bool) -> tuple[Value, Value]:
    """Of two words of a block, the first is an even element of a dim and the second the odd one after it."""
    dim = 0 if wide or not shape else _halved_dim(shape)
    blocks = list(shape)
    if not wide:
        blocks = [ceildiv(n, 2) if d == dim else n for d, n in enumerate(shape)] or [1]
    count = product(blocks)
    key, start = _part(c, state, 0), _part(c, state, 1)
    words = _threefry_blocks(c, _halves(c, key), _halves(c, _counters(c, start, count)), count)
    after = c.op("concat", key, c.op("add", start, c.t.full(count, (1,), "i64")), dim=0)
    if wide:
        return after, c.t.reshape(_whole(c, *words), shape)
    if not shape:
        return after, c.t.reshape(words[0], ())
    apart = [*blocks[:dim + 1], 1, *blocks[dim + 1:]]
    found = c.op("concat", *(c.t.reshape(one, apart) for one in words), dim=dim + 1)
    found = c.t.reshape(found, [2 * n if d == dim else n for d, n in enumerate(blocks)])
    return after, c.t.window(found, dim, 0, shape[dim])


def _halved_dim(shape: Sequence[Size]) -> int:
    """The first dim of an even size; the first one of the largest where there is none."""
    rests = [mod(n, 2) for n in shape]
    for dim, rest in enumerate(rests):
        if not isinstance(rest, int):
            raise Decline("a size of which nothing shows whether it is even")
        if not rest:
            return dim
    sizes = [n for n in shape if isinstance(n, int)]
    if len(sizes) != len(shape):
        raise Decline("sizes of which nothing shows which one is the largest")
    return sizes.index(max(sizes))


def _threefry_blocks(c: Call, key: tuple[Value, Value], counters: tuple[Value, Value], count: Size
                     ) -> tuple[Value, Value]:
    """20 rounds."""
    last = c.op("bit_xor", c.op("bit_xor", *key), PARITY)
    keys = [_wide(c, one, count) for one in (*key, last)]
    x, y = (_sum(c, a, b) for a, b in zip(counters, keys, strict=False))
    for group in range(5):
        for far in ROTATIONS[group % 2]:
            x = _sum(c, x, y)
            turned = c.op("bit_or", c.op("shift_left", y, far), c.op("shift_right", y, 32 - far))
            y = c.op("bit_xor", x, c.op("bit_and", turned, WORD))
        x = _sum(c, x, keys[(group + 1) % 3])
        y = _sum(c, _sum(c, y, keys[(group + 2) % 3]), group + 1)
    return x, y


# ---- Philox


def _philox(c: Call, state: Value, shape: Sequence[Size], wide: bool) -> tuple[Value, Value]:
    """The words of a block are elements one after another."""
    count, size = product(shape), 2 if wide else 4
    blocks = ceildiv(count, size)
    key = _part(c, state, 0)
    whole = state.tensor.shape[0] == 3
    # a state of two numbers is read from its end: the key is the higher half of the counter as well
    low, high = (_part(c, state, 1), _part(c, state, 2)) if whole else (_part(c, state, 1), key)
    counters = _counters(c, low, blocks)
    carried = _less(c, counters, _wide(c, low, blocks))
    above = _wide(c, high, blocks)
    above = c.op("add", above, c.op("cast", carried, dtype="i64"))
    words = _philox_blocks(c, _halves(c, key), (*_halves(c, counters), *_halves(c, above)), blocks)
    if wide:
        words = [_whole(c, *words[:2]), _whole(c, *words[2:])]
    found = c.op("concat", *(c.t.reshape(one, (blocks, 1)) for one in words), dim=1)
    found = c.t.window(c.t.reshape(found, (blocks * size,)), 0, 0, count)
    end = c.op("add", low, c.t.full(blocks, (1,), "i64"))
    parts = [key, end]
    if whole:
        parts.append(c.op("add", high, c.op("cast", _less(c, end, low), dtype="i64")))
    return c.op("concat", *parts, dim=0), c.t.reshape(found, shape)


def _less(c: Call, a: Value, b: Value) -> Value:
    """Of whole numbers without sign."""
    return c.op("lt", c.op("bit_xor", a, LOWEST), c.op("bit_xor", b, LOWEST))


def _philox_blocks(c: Call, key: tuple[Value, Value], counters: Sequence[Value], count: Size) -> list[Value]:
    """10 rounds."""
    words = list(counters)
    for number in range(10):
        first, second = (_wide(c, _sum(c, one, number * step & WORD), count)
                         for one, step in zip(key, WEYL, strict=True))
        (low, high), (low_other, high_other) = (
            _halves(c, c.op("mul", words[place], factor)) for place, factor in zip((0, 2), MULTIPLIERS, strict=True))
        words = [c.op("bit_xor", c.op("bit_xor", high_other, words[1]), first), low_other,
                 c.op("bit_xor", c.op("bit_xor", high, words[3]), second), low]
    return words
