"""The native encoder of a plan's words: bit by bit those of the Python encoders, at random sizes and strides."""
from __future__ import annotations

import random

import pytest

from anyshape.backend.cpu.bytecode import format as host
from anyshape.backend.cpu.bytecode import template
from anyshape.backend.cpu.bytecode.encode_gemm import Area, Fixed, bits, has, matmul_words
from anyshape.backend.cpu.bytecode.plan_template import PlanTemplate, kind_words
from anyshape.backend.cpu.machine import target as limits
from anyshape.backend.cpu.machine.blas import BlasRoutines
from anyshape.backend.targets import host_routines
from anyshape.base.int64_array import int64_array
from anyshape.ir.types import size_of

SIZES = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 31, 32, 33, 63, 64, 65, 100, 128, 129, 255, 256, 257, 700, 705, 1024,
         2100, 5000, 40_000)
BLAS = (BlasRoutines(products=True, f32_batches=True, f64_batches=True), BlasRoutines(products=True), BlasRoutines())
MACHINES = [limits.target_of("x86_64-unknown-linux-gnu", "znver4", frozenset(features)) for features in (
    ("avx512f", "avx512bw", "avx512vl", "avx2", "fma", "avx512bf16"), ("avx2", "fma"), (),
    ("avx512f", "avx512bw", "avx512vl", "avx2", "fma", "avx512bf16", "avx512fp16", "amx-tile", "amx-bf16"))]


def strides_of(draw: random.Random, shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """Strides of a window: dense, with its last two dims turned, of part of something larger, or any."""
    if kind == "any":
        return tuple(draw.choice((0, 1, 2, 3, 8, 64, 1000)) for _ in shape)
    order = [*range(len(shape))]
    if kind == "turned" and len(shape) > 1:
        order[-2:] = order[-1], order[-2]
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim] + (draw.choice((0, 8)) if kind == "part" else 0)
    if kind == "spread":
        strides = [0 if draw.random() < 0.3 else stride for stride in strides]
    return tuple(strides)


def area(draw: random.Random, slot: int, item: int, shape: tuple[int, ...]) -> Area:
    kind = draw.choice(("dense", "dense", "dense", "turned", "turned", "part", "spread", "any"))
    return Area(slot, item * draw.choice((0, 0, 5, 1000)), item, shape, strides_of(draw, shape, kind))


def broadcast(draw: random.Random, batch: tuple[int, ...]) -> tuple[int, ...]:
    """A batch that broadcasts to this one."""
    kept = batch[draw.randint(0, len(batch)):] if draw.random() < 0.4 else batch
    return tuple(1 if draw.random() < 0.25 else size for size in kept)


def product(draw: random.Random, dtype: str) -> tuple[list[Area], float, float]:
    """Windows of a, b, c and perhaps an addend, alpha and beta."""
    item = size_of(dtype)
    sizes = [draw.choice(SIZES) for _ in range(3)]
    if draw.random() < 0.02:
        sizes[draw.randrange(3)] = 2**31  # more than BLAS takes
    rows, inner, columns = sizes
    rank = draw.choice((0, 0, 1, 2, 3))
    batch = tuple(draw.choice((1, 2, 3, 7, 0 if draw.random() < 0.1 else 4)) for _ in range(rank))
    one_row, one_column = draw.random() < 0.1, draw.random() < 0.1
    left = (inner,) if one_row else (*broadcast(draw, batch), rows, inner)
    right = (inner,) if one_column else (*broadcast(draw, batch), inner, columns)
    if one_row and one_column:
        batch = ()
    result = (*batch, *(() if one_row else (rows,)), *(() if one_column else (columns,)))

    def wide(at: int) -> int:
        return draw.choice((2, 4)) if dtype in ("bf16", "f16") and draw.random() < 0.3 else at

    areas = [area(draw, slot, wide(item), shape) for slot, shape in ((9, left), (4, right), (7, result))]
    if draw.random() < 0.4:
        areas.append(area(draw, 2, wide(item), broadcast(draw, result)))
    return areas, draw.choice((1.0, 1.0, 0.5)), draw.choice((1.0, 1.0, 0.0, 2.0))


def window(names: template.Names, values: list[int], one: Area, patched: bool) -> list[int | str]:
    """The words of a window; what depends on sizes is a value, or is written where it is used."""
    numbers = [one.bytes // one.item, *one.shape, *one.strides]
    if patched:
        for place, number in enumerate(numbers):
            name = f"v{len(values)}"
            names.of(name)
            values.append(number)
            numbers[place] = name  # type: ignore[call-overload]
    return [one.slot, one.item, len(one.shape), *numbers]


@pytest.mark.parametrize("dtype", ("f32", "f64", "bf16", "f16"))
def test_products_have_the_words_of_the_python_encoder(dtype: str) -> None:
    draw, fill, seen = random.Random(dtype), host_routines().fill, set()
    settings = [(Fixed(machine, own, blas), kind_words(0, dtype, Fixed(machine, own, blas)))
                for machine in MACHINES for own in (False, True) for blas in BLAS
                if has(dtype, Fixed(machine, own, blas))]
    for case in range(2000 if settings else 0):
        products, kind = settings[case % len(settings)]
        areas, alpha, beta = product(draw, dtype)
        a, b, c, *rest = areas
        expected = matmul_words(11, dtype, a, b, c, rest[0] if rest else None, alpha, beta, products)
        if expected is None:
            expected = [host.CALL, host.STEP_WORDS, 11]
        addend = bool(rest) and beta != 0
        code, weight = "d" if dtype == "f64" else "f", beta if addend else 0.0
        names, values = template.Names(), []
        body = [kind.buffer_info()[0], 11, bits(alpha, code), bits(weight, code), int(alpha != 1), int(weight != 1),
                int(addend)]
        for one in areas if addend else areas[:3]:
            body += window(names, values, one, case % 3 > 0)
        words = int64_array(template.piece(names, template.PRODUCT, body))
        filled = PlanTemplate(words, 1, template.most_words(template.PRODUCT, body) + 1, {dtype: kind}, products, fill)
        found = filled(values).tolist()
        assert found == [*expected, host.END], (products, areas, alpha, beta)
        seen.add(found[0])
    wanted = {"f64": {host.CALL, host.END, host.MATMUL}, "f32": {host.CALL, host.END, host.MATMUL, host.PRODUCT}}
    assert not settings or seen == wanted.get(dtype, {host.CALL, host.END, host.MATMUL, host.PRODUCT})
