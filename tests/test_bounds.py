"""Native code stays within its memory: programs run on fenced memory (fences.py) in a process that dies where it does
not, and what a thread's scratch has to hold is counted anew."""
from __future__ import annotations

import math
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forked
import reference_words
from anyshape.backend.cpu.bytecode import format as host
from anyshape.backend.cpu.bytecode import products
from anyshape.backend.cpu.machine import low_precision
from anyshape.backend.cpu.machine import target as limits
from anyshape.backend.cpu.machine.blas import BlasRoutines
from anyshape.backend.cpu.microkernels.tables import gemm
from sampling import examples

HERE = Path(__file__).parent
WIDTHS = {"whole tiles": (64, ("avx512bf16", "amx-bf16", "amx-tile", "f16c")),
          "pairs of bf16": (64, ("avx512bf16", "f16c")), "64 bytes": (64, ("f16c",)), "32 bytes": (32, ("f16c",)),
          "16 bytes": (16, ("f16c",))}


def worker(*arguments: object, threads: int = 1, code: str = "") -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        script = HERE / "bounding.py"
        if code:
            script = Path(folder) / "script.py"
            script.write_text(code)
        return forked.Run(script, [*map(str, arguments)], dict(os.environ, OMP_NUM_THREADS=str(threads)),
                          Path(folder)).done(3000)


def check(done: subprocess.CompletedProcess[str]) -> None:
    lines = done.stdout.splitlines()
    wrong = [line for line in lines if line.startswith("WRONG")]
    assert not wrong, "\n".join(wrong)
    assert lines and lines[-1] == "DONE", f"ended with {done.returncode} in {lines[-1:]}\n{done.stderr[-2000:]}"


def test_programs_stay_in_their_memory():
    check(worker(0, 0, 64, threads=3))


@pytest.mark.full
@pytest.mark.parametrize("threads", (1, 3))
@pytest.mark.parametrize("width", (64, 48, 32, 16))
def test_many_programs_stay_in_their_memory(width, threads):
    check(worker(100 + width + threads, 12, width, threads=threads))


SHORT = """
import bounding
from anyshape.backend.cpu.bytecode import format
from anyshape.backend.cpu.bytecode.plan_template import PlanTemplate
whole = PlanTemplate.__call__
def short(*arguments):
    found, at = whole(*arguments), 0
    while found[at] != format.END:
        if found[at] == format.PRODUCT:
            found[at + format.PackedProduct.index("scratch")] -= 8 << 10
        at += found[at + 1]
    return found
PlanTemplate.__call__ = short
bounding.main()
"""


@pytest.mark.skipif(not products.native("bf16", limits.host()), reason="this processor's products are PyTorch's")
def test_a_worker_that_leaves_its_scratch_dies():
    done = worker(0, 8, 64, "products", code=SHORT)
    assert done.returncode < 0 and "DONE" not in done.stdout


# ---- scratch, counted anew from what the routines of packed_gemm.py and attention_packed.py write


def up(size: int, part: int) -> int:
    return math.ceil(size / part) * part


def packed_end(size: int, count: int, top: int, least: int, lanes: int) -> int:
    """One past the last byte that is written where `size` lanes by `count` words are packed into panels of `top`
    lanes: whole vectors of lanes, and of words."""
    end = at = first = 0
    room = up(count, lanes)
    while first < size:
        width = min(top, up(size - first, least))
        for lane in range(0, min(width, size - first), lanes):
            if room:
                end = max(end, at + 4 * width * (room - 1) + 4 * lane + 4 * lanes)
        at += 4 * width * room + host.PACKED_PAD
        first += width
    return end


@pytest.fixture(params=WIDTHS.values(), ids=WIDTHS)
def target(request):
    width, features = request.param
    vectors = {64: ("avx512f", "avx512bw", "avx512vl", "avx2"), 32: ("avx2",), 16: ()}[width]
    return limits.target_of("x86_64-unknown-linux-gnu", "znver4", frozenset((*features, *vectors, "fma")))


sizes = st.one_of(st.integers(1, 40), st.integers(1, 5000), st.integers(1, 200_000))


@pytest.mark.parametrize("dtype", ("bf16", "f16", "f32"))
def test_scratch_of_products(target, dtype):
    item = 4 if dtype == "f32" else 2
    lanes, grain, per_word = target.lanes, gemm.grain(target, dtype), low_precision.per_word(target, dtype)
    high, wide = 3 * grain, 2 * lanes

    @settings(max_examples=examples(150), deadline=None, database=None, derandomize=True)
    @given(rows=sizes, inner=st.one_of(st.just(0), sizes), columns=sizes)
    def holds(rows, inner, columns):
        a = reference_words.Matrix(0, 0, item, rows, inner, inner, 1, ())
        b = reference_words.Matrix(1, 0, item, inner, columns, columns, 1, ())
        c = reference_words.Matrix(2, 0, item, rows, columns, columns, 1, ())
        step = reference_words.by_panels(target, 0, dtype, a, b, c, columns, 1.0, 0.0, {
            "a": (1, 0), "b": (0, 0), "c": (2, 0), "bias": (-1, 0), "bias_row": 0, "bias_column": 0, "batches": 1,
            "rank": 0})
        assert len(step) == host.MATMUL_DIMS
        most, deep, across = (step[host.PackedProduct.index(name)] for name in ("rows", "deep", "columns"))
        terms = min(math.ceil(inner / per_word), deep)
        blocks = max(math.ceil(inner / (deep * per_word)), 1)
        # blocks of rows are as high as all of them allow, to whole panels
        height = up(math.ceil(rows / math.ceil(rows / most)), high)
        assert height <= most
        columns_at = 4 * most * deep + host.PACKED_PAD * math.ceil(most / high)
        assert packed_end(min(height, rows), terms, high, grain, lanes) <= columns_at
        group = host.PACKED_GROUP if grain == lanes else 1
        sums_at = columns_at + group * (4 * wide * deep + host.PACKED_PAD)
        assert columns_at + packed_end(group * wide, terms, wide, lanes, lanes) <= sums_at
        if dtype != "f32" and blocks > 1:  # sums of all rows wait, `across` columns at most
            end = 4 * across * (up(min(height, rows), grain) - 1) + 4 * up(min(columns, across), lanes)
            assert up(min(columns, across), lanes) <= across
        else:
            end = 4 * high * wide
        assert sums_at + end <= step[host.PackedProduct.index("scratch")]

    holds()


@pytest.mark.parametrize("backward", (False, True))
@pytest.mark.parametrize("dtype", ("bf16", "f16", "f32"))
def test_scratch_of_attention(target, dtype, backward):
    lanes, grain, per_word = target.lanes, gemm.grain(target, dtype), low_precision.per_word(target, dtype)
    high, wide = 3 * grain, 2 * lanes

    def ends(size: int, count: int, top: int, least: int) -> int:
        return packed_end(size, math.ceil(count / per_word), top, least, lanes)

    @settings(max_examples=examples(150), deadline=None, database=None, derandomize=True)
    @given(rows=st.integers(1, 3000), columns=st.integers(1, 5000), depth=st.integers(1, 300), causal=st.booleans())
    def holds(rows, columns, depth, causal):
        rows = max(rows, products.OUR_ROWS) if dtype == "f32" else rows

        def dense(*shape):
            return shape, tuple(math.prod(shape[i + 1:]) for i in range(len(shape)))
        q, k, sums = dense(1, 2, rows, depth), dense(1, 2, columns, depth), dense(1, 2, rows)
        result, keys = dense(1, rows, 2, depth), dense(1, columns, 2, depth)
        types = (q, q, k, k, sums, sums, result, keys, keys) if backward else (q, k, k, result, sums)
        step = reference_words.attention_step(
            target, True, BlasRoutines(), "attention_backward" if backward else "attention", dtype, causal, None, types)
        assert step is not None
        of = {name: step[field.at] for name, field in host.AttentionStep.fields.items()}
        tile, row = of["tile"], of["step"]
        assert 1 <= tile <= rows and row >= 4 * up(columns, lanes)
        deep = 4 * up(depth, lanes)  # bytes of a row of sums
        scores = (up(tile, grain) - 1) * row + 4 * up(columns, lanes)
        of_rows = [ends(tile, depth, high, grain), ends(tile, columns, high, grain)]
        places = [(0, scores), (of["keys"], ends(columns, depth, wide, lanes))]
        if backward:
            places += [(of["gradients"], scores),
                       (of["values"], ends(columns, depth, wide, lanes)),
                       (of["keys_again"], ends(depth, columns, wide, lanes)),
                       (of["column_panels"], ends(depth, tile, wide, lanes)),
                       (of["dkeys"], up(columns, grain) * deep),
                       (of["dvalues"], up(columns, grain) * deep),
                       (of["sums"], 4 * high * wide)]
            of_rows.append(ends(columns, tile, high, grain))
        else:
            places += [(of["values"], ends(depth, columns, wide, lanes)),
                       (of["sums"], up(tile, grain) * deep),
                       (of["factors"], 8 * tile + 8)]
        places.append((of["row_panels"], max(of_rows)))
        places.sort()
        ends_at = [begin + length for begin, length in places]
        begins = [begin for begin, _ in places[1:]] + [of["scratch"]]
        assert all(end <= begin for end, begin in zip(ends_at, begins, strict=True))

    holds()
