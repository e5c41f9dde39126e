"""The native encoder of a plan's words: bit by bit those of the Python encoders, at random sizes and strides."""
from __future__ import annotations

import itertools
import math
import random
from array import array

import pytest

from anyshape.backend.cpu.bytecode import format as host
from anyshape.backend.cpu.bytecode import template
from anyshape.backend.cpu.bytecode.conv_spec import ConvSpec, least
from anyshape.backend.cpu.bytecode.plan_template import PlanTemplate, kind_words
from anyshape.backend.cpu.bytecode.plan_template import attention_words as attention_head
from anyshape.backend.cpu.bytecode.plan_template import product_words as product_head
from anyshape.backend.cpu.bytecode.products import (
    PACKED,
    Fixed,
    bits,
    does,
    has,
    native,
)
from anyshape.backend.cpu.machine import target as limits
from anyshape.backend.cpu.machine.blas import BlasRoutines
from anyshape.backend.cpu.microkernels.tables import direct_conv
from anyshape.backend.cpu.native.records import words_of
from anyshape.backend.cpu.native_routines import routines_of
from anyshape.base.errors import VerifyError
from anyshape.base.int64_array import int64_array
from anyshape.ir.types import size_of
from anyshape.ops.attention import roles, wide
from reference_words import (
    Area,
    AttentionSpec,
    GroupedSpec,
    attention_words,
    band_words,
    copy_words,
    direct_conv_words,
    finished,
    grouped_words,
    joined,
    matmul_words,
    series,
)

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


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1:]) for dim in range(len(shape)))


def filled(kind: int, body: list[int | str], windows: list[Area], patched: bool, products: Fixed,
           kinds: dict[str, array[int]]) -> list[int]:
    """The words of one step and the end. body: of its piece, without the windows."""
    names = template.Names()
    values: list[int] = []
    for one in windows:
        body = [*body, *window(names, values, one, patched)]
    words = int64_array(template.piece(names, kind, body))
    return PlanTemplate(words, 1, template.most_words(kind, body) + 1, kinds, products,
                        routines_of(None).fill)(values).tolist()


@pytest.mark.parametrize("dtype", ("f32", "f64", "bf16", "f16"))
def test_products_have_the_words_of_the_python_encoder(dtype: str) -> None:
    draw, seen = random.Random(dtype), set()
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
        body = product_head(kind.buffer_info()[0], 11, dtype, alpha, beta, addend)
        found = filled(template.PRODUCT, body, areas if addend else areas[:3], case % 3 > 0, products, {dtype: kind})
        assert found == [*expected, host.END], (products, areas, alpha, beta)
        seen.add(found[0])
    wanted = {"f64": {host.CALL, host.END, host.MATMUL}, "f32": {host.CALL, host.END, host.MATMUL, host.PRODUCT}}
    assert not settings or seen == wanted.get(dtype, {host.CALL, host.END, host.MATMUL, host.PRODUCT})


def test_copies_have_the_words_of_the_python_encoder() -> None:
    draw, products = random.Random(1), Fixed(MACHINES[0], True)
    for case in range(1500):
        item, shape = draw.choice((1, 2, 4, 8)), tuple(draw.choice((1, 2, 3, 8, 0)) if draw.random() < 0.1 else
                                                      draw.choice((1, 2, 5, 64)) for _ in range(draw.randint(0, 5)))
        source, target = (area(draw, slot, item, shape) for slot in (5, 8))
        if case % 5 == 0:
            target = target._replace(strides=tuple(-step for step in target.strides))
        expected = copy_words(3, source, target)
        assert filled(template.COPY, [3], [source, target], case % 2 > 0, products, {}) == [*expected, host.END]


@pytest.mark.parametrize("dtype", ("f32", "f64", "bf16"))
def test_attention_has_the_words_of_the_python_encoder(dtype: str) -> None:
    draw, ends = random.Random(dtype), set()
    settings = [(fixed, {dtype: kind_words(0, dtype, fixed)}) for machine in MACHINES for own in (False, True)
                for blas in BLAS[1:] for fixed in (Fixed(machine, own, blas),) if native(dtype, machine, blas)]
    for case in range(1200):
        products, kinds = settings[case % len(settings)]
        batch, groups, share = (draw.choice((1, 2, 3)) for _ in range(3))
        rows, columns, depth = (draw.choice((0, 1, 2, 3, 4, 5, 16, 31, 64, 100, 197, 512, 3000)) for _ in range(3))
        heads, op = groups * share, draw.choice(("attention", "attention_backward"))
        causal, scale = draw.random() < 0.3, draw.choice((None, 0.125))
        flat = {"q": (batch, heads, rows, depth), "k": (batch, groups, columns, depth), "mask": draw.choice((
            (batch, 1, rows, columns), (1, 1, 1, columns), (batch, heads, rows, 1))), "sums": (batch, heads, rows),
            "result": (batch, rows, heads, depth), "dk": (batch, columns, groups, depth)}
        same = {"v": "k", "gradient": "q", "products": "sums", "dq": "result", "dv": "dk"}
        flat |= {role: flat[other] for role, other in same.items()}
        count = {"attention": 5, "attention_backward": 9}[op] + (draw.random() < 0.4)
        item, broad = size_of(dtype), size_of(wide(dtype))
        windows = {}
        for place, role in enumerate(roles(op, count)):
            strides = list(dense(flat[role]))
            if draw.random() < 0.1:
                strides[draw.randrange(len(strides))] += draw.choice((-1, 1, 16))
            size = broad if role in ("mask", "sums", "products") else item
            windows[role] = Area(20 + place, size * draw.choice((0, 3)), size, flat[role], tuple(strides))
        spec = AttentionSpec(6, op, dtype, causal, scale, tuple((one.slot, one.item) for one in windows.values()))
        expected = attention_words(products, spec, tuple(
            (one.shape, one.strides, one.bytes // one.item) for one in windows.values()))
        factor = scale if scale is not None else depth**-0.5 if depth else 0.0
        body = attention_head(kinds[dtype].buffer_info()[0], 6, op, dtype, causal,
                              bits(factor, "d" if dtype == "f64" else "f"), windows)
        ordered = [windows[role] for role in host.OPERANDS if role in windows]
        found = filled(template.ATTENTION, body, ordered, case % 2 > 0, products, kinds)
        assert found == [*expected, host.END], (products, spec, windows)
        ends.add(found[0])
    assert ends == {host.CALL, host.ATTENTION}


def test_direct_convolutions_have_the_words_of_the_python_encoder() -> None:
    draw, ends = random.Random(3), set()
    for case in range(1200):
        products = Fixed(MACHINES[case % 3], True)
        images, height, width, channels = (draw.choice((1, 2, 3, 5, 14, 56, 0 if draw.random() < 0.1 else 224))
                                           for _ in range(4))
        outs, kernel_y, kernel_x = draw.choice((1, 7, 64, 100)), draw.choice((1, 2, 3, 7)), draw.choice((1, 3, 16))
        pair = [tuple(draw.choice(of) for _ in range(2)) for of in ((1, 2, 16), (0, 0, 1, 3), (1, 1, 2))]
        (stride_y, stride_x), (padding_y, padding_x), (dilation_y, dilation_x) = pair
        out_y = max((height + 2 * padding_y - (kernel_y - 1) * dilation_y - 1) // stride_y + 1, 0)
        out_x = max((width + 2 * padding_x - (kernel_x - 1) * dilation_x - 1) // stride_x + 1, 0)
        scaled, shifted, added, bias, relu = (draw.random() < 0.5 for _ in range(5))
        shifted = shifted and scaled
        result = (images, out_y, out_x, outs)
        shapes = [(images, height, width, channels), (outs, channels, kernel_y, kernel_x), *[(outs,)] * (
            bias + scaled + shifted), *[result] * added, result]
        areas = []
        for place, shape in enumerate(shapes):
            strides = list(dense(shape))
            if place == 1 and draw.random() < 0.5:
                strides = [channels * kernel_y * kernel_x, 1, kernel_x * channels, channels]
            if draw.random() < 0.05:
                strides[draw.randrange(len(strides))] += 1
            areas.append(Area(place + 3, 4 * draw.choice((0, 7)), 4, shape, tuple(strides)))
        spec = ConvSpec(2, "f32", tuple((one.slot, 4) for one in areas), tuple(pair), added, relu, scaled, shifted)
        expected = direct_conv_words(products.machine, spec, tuple(
            (one.shape, one.strides, one.bytes // 4) for one in areas))
        body: list[int | str] = [2, len(areas), int(bias), int(scaled), int(shifted), int(added), least(relu),
                                 *(number for two in pair for number in two), products.machine.lanes,
                                 direct_conv.grain(products.machine), PACKED["f32"] + host.PACKED_TURN]
        found = filled(template.DIRECT_CONV, body, areas, case % 2 > 0, products, {})
        assert found == [*expected, host.END], (spec, areas)
        ends.add(found[0])
    assert ends == {host.CALL, host.DIRECT_CONV, host.END}


def test_products_and_kernels_in_one_step_have_the_words_of_the_python_encoder() -> None:
    draw, seen = random.Random(4), set()
    products = Fixed(MACHINES[0], True)
    kind = kind_words(0, "f32", products)
    for case in range(400):
        names, capacity, parts, expected = template.Names(), 1, [], []
        rows, inner = draw.choice((0, 1, 64, 200, 200, 200)), draw.choice((16, 128, 512))
        a = Area(3, 0, 4, (rows, inner), (inner, 1))
        for number in range(draw.randint(0, 3)):
            columns = draw.choice((1, 64, 512))
            b, c = Area(4 + number, 0, 4, (inner, columns), (columns, 1)), Area(9, 0, 4, (rows, columns), (columns, 1))
            body: list[int | str] = [kind.buffer_info()[0], number, bits(1.0, "f"), 0, 0, 1, 0, 0]
            for one in (a, b, c):
                body += window(names, [], one, False)
            capacity += template.most_words(template.PRODUCT, body)
            parts.append(template.piece(names, template.PRODUCT, body))
            expected.append(matmul_words(number, "f32", a, b, c, None, 1.0, 0.0, products) or [])
        kernels = [[host.KERNEL, 12, 20 + k, *range(9)] for k in range(draw.randint(1, 3))]
        no_regime = draw.random() < 0.1
        pieces = [template.piece(names, template.WORDS, kernel) for kernel in kernels]
        if no_regime:
            kernels.append([host.NO_REGIME, 30])
            names.of("v0")
            pieces.append(template.piece(names, template.REGIMES, [30, 1, 1, 0, *template.piece(
                names, template.WORDS, [host.KERNEL, 3, 30])]))
        words = [word for kernel in kernels for word in kernel]
        first = joined(expected) if len(expected) > 1 else [*itertools.chain(*expected)]
        wanted = finished(first, 20, words) if parts else series(20, words)
        if len(parts) > 1:
            parts = [template.piece(names, template.JOINED, [len(parts), *itertools.chain(*parts)])]
        whole = int64_array(template.piece(names, template.FINISHED, [
            20, len(parts), len(pieces), *itertools.chain(*parts), *itertools.chain(*pieces)]))
        found = PlanTemplate(whole, 1, capacity + len(words) + 4, {"f32": kind}, products, routines_of(None).fill)([-1])
        assert found.tolist() == [*wanted, host.END], case
        seen.add((found[0], len(expected)))
    assert {(host.SERIES, count) for count in range(4)} <= seen


@pytest.mark.parametrize("dtype", ("f32", "f64", "bf16", "f16"))
def test_grouped_products_have_the_words_of_the_python_encoder(dtype: str) -> None:
    draw, ends = random.Random(dtype), set()
    settings = [(fixed, {dtype: kind_words(0, dtype, fixed)}) for machine in MACHINES for own in (False, True)
                for blas in BLAS for fixed in (Fixed(machine, own, blas),) if native(dtype, machine, blas)]
    item = size_of(dtype)
    for case in range(1200 if settings else 0):
        products, kinds = settings[case % len(settings)]
        rows, depth, columns = (draw.choice((0, 1, 2, 3, 7, 12, 16, 63, 64, 65, 128, 130, 512, 900)) for _ in range(3))
        groups, of_terms, ordered = draw.choice((1, 3, 8)), draw.random() < 0.4, draw.random() < 0.4
        cells = draw.choice((5, 400)) if ordered else rows
        shapes = [(rows, depth), (depth, columns), (groups,), (groups, rows, columns)] if of_terms else [
            (cells, depth), (groups, depth, columns), (groups,), (rows, columns)]
        if ordered and not of_terms:
            shapes.insert(3, (rows,))
        areas = []
        for place, shape in enumerate(shapes):
            one = draw.choice((4, 8)) if place == 2 else 8 if place == 3 and len(shapes) > 4 else item
            is_last = place == len(shapes) - 1
            kind = "dense" if is_last or draw.random() < 0.5 else draw.choice(("turned", "part", "any"))
            areas.append(Area(3 + place, one * draw.choice((0, 5)), one, shape, strides_of(draw, shape, kind)))
        op = "grouped_inner" if of_terms else "grouped"
        spec = GroupedSpec(9, op, dtype, tuple((one.slot, one.item) for one in areas))
        words = grouped_words(products, spec, tuple(
            (one.shape, one.strides, one.bytes // one.item) for one in areas))
        body: list[int | str] = [kinds[dtype].buffer_info()[0], 9, int(of_terms), int(len(shapes) > 4)]
        found = filled(template.GROUPED, body, areas, case % 2 > 0, products, kinds)
        assert found == [*words, host.END], (products, op, areas)
        ends.add(found[0])
    assert not settings or {host.GROUPED, host.END} <= ends


@pytest.mark.parametrize("dtype", ("f32", "bf16"))
def test_bands_have_the_words_of_the_python_encoder(dtype: str) -> None:
    draw = random.Random(dtype)
    settings = [(fixed, {dtype: kind_words(0, dtype, fixed)}) for machine in MACHINES for own in (False, True)
                for fixed in (Fixed(machine, own, BLAS[0]),) if has(dtype, fixed) and does(dtype, fixed)]
    item = size_of(dtype)
    for case in range(300):
        products, kinds = settings[case % len(settings)]
        rows, inner, columns = (draw.choice((0, 1, 5, 64, 65, 200, 700)) for _ in range(3))
        columns, high = columns or 3, draw.choice((1, 16, 64))
        shapes = (rows, inner), (inner, columns), (rows, columns)
        areas = [Area(4 + place, item * draw.choice((0, 7)), item, shape, strides_of(
            draw, shape, "dense" if place == 2 else draw.choice(("dense", "turned", "part"))))
            for place, shape in enumerate(shapes)]
        params = [(6, 0, 0), (8, 4 * draw.choice((0, 3)), 4 * columns), (9, 0, 2 * columns)]
        size = words_of(host.KernelStepWords) + 2 * len(params) + 1
        kernel = [host.KERNEL, size, 12, 77, 0, 0, 0, len(params), 1, *(word for one in params for word in one[:2]),
                  rows * columns]
        expected = band_words(products, high, dtype, areas, 12, kernel, tuple(one[2] for one in params))
        names, values = template.Names(), []
        body = product_head(kinds[dtype].buffer_info()[0], 12, dtype, 1.0, 0.0, False)
        for one in areas:
            body += window(names, values, one, case % 2 > 0)
        words = int64_array(template.piece(names, template.BANDS, [
            12, high, columns, len(params), *(one[2] for one in params), *template.piece(names, template.PRODUCT, body),
            *template.piece(names, template.WORDS, kernel)]))
        found = PlanTemplate(words, 1, len(expected) + 1, kinds, products, routines_of(None).fill)(values)
        assert found.tolist() == [*expected, host.END], (products, areas)


def test_a_product_in_bands_that_the_host_has_not_is_said() -> None:
    """BLAS does not take strides of 2, and there are no panels of f64: in place of wrong words there is an error."""
    products = Fixed(MACHINES[0], True, BLAS[0])
    kinds = {"f64": kind_words(0, "f64", products)}
    body = product_head(kinds["f64"].buffer_info()[0], 0, "f64", 1.0, 0.0, False)
    for slot, (shape, strides) in enumerate((((30, 20), (80, 2)), ((20, 40), (80, 2)), ((30, 40), (40, 1))), 1):
        body += template.window_words(slot, 8, 0, shape, strides)
    names, kernel = template.Names(), [host.KERNEL, 10, 0, *range(7)]
    words = int64_array(template.piece(names, template.BANDS, [
        0, 16, 40, 0, *template.piece(names, template.PRODUCT, body), *template.piece(names, template.WORDS, kernel)]))
    with pytest.raises(VerifyError, match="product in bands"):
        PlanTemplate(words, 1, 1000, kinds, products, routines_of(None).fill)([])
