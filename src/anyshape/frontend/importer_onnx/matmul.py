"""Translations of ONNX matrix products, of floats, whole numbers, weights of few bits, and by Einstein's notation.

    Gemm(a, b, c, transB=1)  -->  add(matmul(a, permute(b | dims=(1, 0))), c)

Packed weights are what a program holds: their numbers are unpacked by one kernel of each call, a matrix at a time.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from anyshape.frontend.aten.matmul import matmul as product_of
from anyshape.frontend.aten.matmul import turned
from anyshape.frontend.aten.table import Decline, Mismatch, is_float, wide
from anyshape.frontend.importer_onnx.index import wrapped
from anyshape.frontend.importer_onnx.pointwise import activated
from anyshape.frontend.importer_onnx.table import MICROSOFT, Call, translates
from anyshape.ir.graph import Value
from anyshape.ir.types import kind_of
from anyshape.sym.expr import Size, floordiv, product


def matmul(c: Call, a: Value, b: Value, row: str = "") -> Value:
    """numpy's product: [*, M, K] @ [*, K, N], either may be a vector. row: of the op table, where it is not that of the
    dtype."""
    line_a, line_b = a.tensor.rank == 1, b.tensor.rank == 1
    if line_a:
        a = c.t.reshape(a, (1, *a.tensor.shape))
    if line_b:
        b = c.t.reshape(b, (*b.tensor.shape, 1))
    result = _matrices(c, a, b, row)
    shape = list(result.tensor.shape)
    if line_a:
        del shape[-2]
    if line_b:
        del shape[-1]
    return c.t.reshape(result, shape)


def _matrices(c: Call, a: Value, b: Value, row: str) -> Value:
    if b.tensor.rank == 2 and a.tensor.rank != 2:  # all rows at once
        lead = a.tensor.shape[:-1]
        rows = c.t.reshape(a, (product(lead), a.tensor.shape[-1]))
        return c.t.reshape(_multiplied(c, rows, b, row), (*lead, b.tensor.shape[-1]))
    rank = max(a.tensor.rank, b.tensor.rank)
    shapes = [(1,) * (rank - x.tensor.rank) + x.tensor.shape for x in (a, b)]
    batch: list[Size] = []
    for m, n in zip(shapes[0][:-2], shapes[1][:-2], strict=True):
        if m != n and m != 1 and n != 1:
            raise Mismatch(m, n)
        batch.append(n if m == 1 else m)
    a = c.t.broadcast(a, (*batch, *a.tensor.shape[-2:]))
    b = c.t.broadcast(b, (*batch, *b.tensor.shape[-2:]))
    return _multiplied(c, a, b, row)


def _multiplied(c: Call, a: Value, b: Value, row: str = "") -> Value:
    """A product of matrices of one dtype. Of whole numbers: by f64, exact while sums stay below 2^53, or one by one."""
    if a.tensor.shape[-1] != b.tensor.shape[-2]:
        raise Mismatch(a.tensor.shape[-1], b.tensor.shape[-2])
    if row:
        return c.op(row, a, b)
    dtype = a.tensor.dtype
    if is_float(dtype):
        return product_of(c.t, a, b)
    if kind_of(dtype) == "bool":
        raise Decline("a product of bools")
    if dtype in ("i8", "u8", "i16"):
        return c.t.cast(product_of(c.t, c.t.cast(a, "f64"), c.t.cast(b, "f64")), dtype)  # type: ignore[no-any-return]
    # whole numbers of 32 and 64 bits wrap around: elements are multiplied and added as they are
    left = c.t.reshape(a, (*a.tensor.shape, 1))
    right = c.t.reshape(b, (*b.tensor.shape[:-2], 1, *b.tensor.shape[-2:]))
    return c.t.reduce("sum", c.op("mul", left, right), (a.tensor.rank - 1,))


MOST = 255  # of a number of 8 bits less its zero point, in either direction


def exact_in_f32(terms: Size, sums: int | None) -> bool:
    """Whether f32 holds the sums of that many products of numbers of 8 bits, whatever comes first: below 2^24 it does.
    sums: of the sizes of the weights that one result is made of, at most, where they are known."""
    return (sums is not None and sums * MOST < 1 << 24) or (
        isinstance(terms, int) and terms * MOST * MOST < 1 << 24)


def whole(c: Call, total: Value) -> Value:
    """Sums of whole numbers as i32; those that it does not hold wrap around."""
    exact_sum = total if total.tensor.dtype == "f32" else c.t.cast(total, "i64")
    return c.t.cast(exact_sum, "i32")  # type: ignore[no-any-return]


@translates("MatMul")
def matmul_row(c: Call) -> Any:
    return matmul(c, c.value(0), c.value(1))


def _fused_operand(c: Call, place: int, letter: str) -> Value:
    """An operand of FusedMatMul; transBatch: its first dim stands behind the batches."""
    x = c.value(place)
    rank = x.tensor.rank
    if c.attr(f"transBatch{letter}", 0) and rank > 2:
        x = c.t.permute(x, (*range(1, rank - 1), 0, rank - 1))
    return turned(c.t, x) if c.attr(f"trans{letter}", 0) and rank > 1 else x


@translates("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def fused_matmul(c: Call) -> Any:
    a, b = (_fused_operand(c, place, letter) for place, letter in enumerate("AB"))
    found = matmul(c, a, b)
    alpha = float(c.attr("alpha", 1.0))
    return found if alpha == 1.0 else c.op("mul", found, alpha)


@translates("Gemm")
def gemm(c: Call) -> Any:
    a, b = c.value(0), c.value(1)
    a = turned(c.t, a) if c.attr("transA", 0) else a
    b = turned(c.t, b) if c.attr("transB", 0) else b
    found = _multiplied(c, a, b)
    alpha, beta = float(c.attr("alpha", 1.0)), float(c.attr("beta", 1.0))
    if not is_float(found.tensor.dtype) and (alpha != 1.0 or beta != 1.0):
        raise Decline("a scaled product of whole numbers")
    if alpha != 1.0:
        found = c.op("mul", found, alpha)
    if c.has(2) and beta != 0.0:
        more = c.value(2)
        found = c.t.pointwise("add", found, c.op("mul", more, beta) if beta != 1.0 else more, dtype=found.tensor.dtype)
    return found


@translates("FusedGemm", domain=MICROSOFT)
def fused_gemm(c: Call) -> Any:
    return activated(c, gemm(c))


@translates("Einsum")
def einsum(c: Call) -> Any:
    operands = c.values()
    left, arrow, right = c.attr("equation").replace(" ", "").partition("->")
    terms = left.split(",")
    sizes: dict[str, Size] = {}
    ranks = [x.tensor.rank - len(term.replace("...", "")) for x, term in zip(operands, terms, strict=True)]
    most = max((rank for rank, term in zip(ranks, terms, strict=True) if "..." in term), default=0)
    spare = [chr(0x100 + place) for place in range(most)]  # one letter per dim of an ellipsis

    def spelled(term: str, rank: int) -> str:
        return term.replace("...", "".join(spare[most - rank:]))
    terms = [spelled(term, rank) for term, rank in zip(terms, ranks, strict=True)]
    if arrow:
        result = spelled(right, most)
    else:
        counts = {letter: left.count(letter) for letter in "".join(terms)}
        result = "".join(spare) + "".join(sorted(x for x, n in counts.items() if n == 1 and x not in spare))
    parts = [_diagonal(c, x, term) for x, term in zip(operands, terms, strict=True)]
    for x, term in parts:
        for letter, size in zip(term, x.tensor.shape, strict=True):
            have = sizes.get(letter, 1)
            if have != 1 and size != 1 and have != size:
                raise Mismatch(have, size)
            sizes[letter] = size if have == 1 else have
    x, term = parts[0]
    for place, (y, other) in enumerate(parts[1:], 1):
        later = result + "".join(t for _, t in parts[place + 1:])
        x, term = _pair(c, x, term, y, other, later, sizes)
    x, term = _summed(c, x, term, result)
    return c.t.permute(x, [term.index(letter) for letter in result])


def _diagonal(c: Call, x: Value, term: str) -> tuple[Value, str]:
    """A letter that stands twice picks the diagonal."""
    for letter in dict.fromkeys(term):
        while term.count(letter) > 1:
            first = term.index(letter)
            second = term.index(letter, first + 1)
            rest = [d for d in range(len(term)) if d not in (first, second)]
            size = x.tensor.shape[first]
            line = c.t.iota(size)
            x = c.op("index", c.t.permute(x, [*rest, first, second]), line, line,
                     dims=(len(rest), len(rest) + 1))
            term = "".join(term[d] for d in rest) + letter
    return x, term


def _summed(c: Call, x: Value, term: str, kept: str) -> tuple[Value, str]:
    gone = tuple(d for d, letter in enumerate(term) if letter not in kept)
    return (c.t.reduce("sum", x, gone) if gone else x), "".join(letter for letter in term if letter in kept)


def _pair(c: Call, x: Value, term: str, y: Value, other: str, later: str,
          sizes: dict[str, Size]) -> tuple[Value, str]:
    """Two operands as one product of matrices: letters of both and the result are its batch, those of both alone are
    summed."""
    x, term = _summed(c, x, term, other + later)
    y, other = _summed(c, y, other, term + later)
    batch = [letter for letter in term if letter in other and letter in later]
    inner = [letter for letter in term if letter in other and letter not in later]
    rows = [letter for letter in term if letter not in other]
    columns = [letter for letter in other if letter not in term]

    def laid(v: Value, own: str, first: list[str], second: list[str]) -> Value:
        v = c.t.permute(v, [own.index(letter) for letter in (*batch, *first, *second)])
        v = c.t.broadcast(v, [sizes[letter] for letter in (*batch, *first, *second)])
        return c.t.reshape(v, [*(sizes[letter] for letter in batch), product(sizes[letter] for letter in first),
                               product(sizes[letter] for letter in second)])
    dtype = x.tensor.dtype
    kind = wide(dtype) if is_float(dtype) else dtype
    found = _multiplied(c, laid(c.t.cast(x, kind), term, rows, inner), laid(c.t.cast(y, kind), other, inner, columns))
    made = [*batch, *rows, *columns]
    return c.t.reshape(c.t.cast(found, dtype), [sizes[letter] for letter in made]), "".join(made)


# ---- weights of few bits, a scale for each block of them: language models as they are given out


def unpacked(c: Call, packed: Value, bits: int) -> Value:
    """Numbers of so many bits [..., K*8/bits] in i32, of bytes [..., K]: the lowest bits of a byte are the first."""
    if packed.tensor.dtype != "u8" or bits not in (2, 4, 8):
        raise Decline(f"numbers of {bits} bits in {packed.tensor.dtype}")
    each = 8 // bits
    numbers = c.t.cast(packed, "i32")
    if each == 1:
        return numbers  # type: ignore[no-any-return]
    shape = packed.tensor.shape
    places = c.t.cast(c.t.iota(each, 0, bits), "i32")
    apart = c.op("shift_right", c.t.reshape(numbers, (*shape, 1)), places)
    apart = c.op("bit_and", apart, (1 << bits) - 1)
    return c.t.reshape(apart, (*shape[:-1], shape[-1] * each))  # type: ignore[no-any-return]


def _zeros(c: Call, zero: Value | None, bits: int, shape: tuple[Size, ...], middle: int) -> Any:
    """Zero points of that shape in f32: given as floats, packed along the last dim, or `middle` for all."""
    if zero is None:
        return float(middle)
    if not is_float(zero.tensor.dtype):
        lead, blocks = shape[:-1], shape[-1]
        zero = unpacked(c, c.t.reshape(zero, (*lead, floordiv(blocks * bits + 7, 8))), bits)
        zero = c.t.window(zero, len(lead), 0, blocks)
    return c.t.cast(c.t.reshape(zero, shape), "f32")


def _spread(c: Call, x: Any, dim: int, block: int, size: Size) -> Any:
    """A number per block as one per element along a dim of that size."""
    if not isinstance(x, Value):
        return x
    return c.t.window(c.op("repeat", x, dim=dim, times=block), dim, 0, size)


@translates("MatMulNBits", domain=MICROSOFT)
def matmul_of_blocks(c: Call) -> Any:
    x, packed, scales = c.value(0), c.value(1), c.value(2)
    inner, columns, block, bits = c.attr("K"), c.attr("N"), c.attr("block_size"), c.attr("bits", 4)
    if c.attr("weight_prepacked", 0):
        raise Decline("weights that are packed for one processor")
    if x.tensor.shape[-1] != inner:
        raise Mismatch(x.tensor.shape[-1], inner)
    blocks = -(-inner // block)
    numbers = unpacked(c, c.t.reshape(packed, (columns, blocks * block * bits // 8)), bits)
    numbers = c.t.cast(c.t.window(numbers, 1, 0, inner), "f32")
    scales = c.t.reshape(c.t.cast(scales, "f32"), (columns, blocks))
    zero = _zeros(c, c.value(3) if c.has(3) else None, bits, (columns, blocks), 1 << (bits - 1))
    if c.has(4):
        group = wrapped(c, 4, blocks)
        zero, scales = (c.op("take", one, group, dim=1) if isinstance(one, Value) else one for one in (zero, scales))
    else:
        zero, scales = (_spread(c, one, 1, block, inner) for one in (zero, scales))
    weights = c.t.cast(c.op("mul", c.op("sub", numbers, zero), scales), x.tensor.dtype)
    found = matmul(c, x, turned(c.t, weights))
    return c.t.pointwise("add", found, c.value(5), dtype=found.tensor.dtype) if c.has(5) else found


# numbers that four bits stand for: FP4 and NF4 (Dettmers et al. 2023)
FOUR_BITS = (
    (0.0, 5.208333333e-03, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25,
     -0.0, -5.208333333e-03, -2 / 3, -1.0, -1 / 3, -0.5, -1 / 6, -0.25),
    (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0))


@translates("MatMulBnb4", domain=MICROSOFT)
def matmul_of_four_bit_floats(c: Call) -> Any:
    """Weights are places in a table, the first of two in the upper half of a byte, times the scale of their block."""
    x, packed, scales = c.value(0), c.value(1), c.value(2)
    inner, columns, block = c.attr("K"), c.attr("N"), c.attr("block_size")
    if x.tensor.shape[-1] != inner:
        raise Mismatch(x.tensor.shape[-1], inner)
    count = inner * columns
    pairs = c.t.reshape(unpacked(c, packed, 4), (packed.tensor.count, 2))
    at = c.t.cast(c.op("concat", *(c.t.window(pairs, 1, place, 1) for place in (1, 0)), dim=1), "i64")
    table = c.constant(np.asarray(FOUR_BITS[c.attr("quant_type", 1)], np.float32), "f32")
    numbers = c.t.window(c.t.reshape(c.op("take", table, at, dim=0), (2 * packed.tensor.count,)), 0, 0, count)
    weights = c.op("mul", numbers, _spread(c, c.t.cast(scales, "f32"), 0, block, count))
    weights = c.t.cast(c.t.reshape(weights, (columns, inner)), x.tensor.dtype)
    return matmul(c, x, turned(c.t, weights) if c.attr("transB", 1) else c.t.reshape(weights, (inner, columns)))


@translates("GatherBlockQuantized", domain=MICROSOFT)
def gather_of_blocks(c: Call) -> Any:
    x, scales, bits = c.numbers_of(0), c.value(2), c.attr("bits", 4)
    packed = c.dtype(0) == "u8"
    axis, block = c.axis(0, name="gather_axis"), c.attr("block_size", 128)
    along = c.axis(1, name="quantize_axis")
    zero: Any = c.numbers_of(3) if c.has(3) else None
    if axis == along or (packed and bits < 8 and along != x.tensor.rank - 1):
        raise Decline("a lookup along blocks, or bytes that are packed across them")
    at = wrapped(c, 1, x.tensor.shape[axis])
    x, scales = (c.op("take", one, at, dim=axis) for one in (x, scales))
    zero = None if zero is None else c.op("take", zero, at, dim=axis)
    along += at.tensor.rank - 1 if along > axis else 0
    numbers = c.t.cast(unpacked(c, x, bits) if packed else x, "f32")
    if packed:
        zero = _zeros(c, zero, bits, scales.tensor.shape, 1 << (bits - 1))
    else:
        zero = 0.0 if zero is None else c.t.cast(zero, "f32")
    size = numbers.tensor.shape[along]
    zero, wide = (_spread(c, one, along, block, size) for one in (zero, c.t.cast(scales, "f32")))
    return c.t.cast(c.op("mul", c.op("sub", numbers, zero), wide), scales.tensor.dtype)
