"""Products from packed panels and beside few vectors, in the host: of bf16, f16 and f32, with sums in f32."""
from __future__ import annotations

import copy
import ctypes
import itertools
import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import anyshape
import anyshape.ops.table  # noqa: F401  (fills the op table)
import reference_words
from anyshape.backend.cpu.bytecode import format, plan_template, products
from anyshape.backend.cpu.llvm import jit
from anyshape.backend.cpu.machine import low_precision
from anyshape.backend.cpu.machine.low_precision import tiles
from anyshape.backend.cpu.machine.target import Machine, host, target_of
from anyshape.backend.cpu.microkernels import gemm, gemv
from anyshape.backend.cpu.microkernels.tables import gemm as gemm_table
from anyshape.backend.cpu.microkernels.tables import gemv as gemv_table
from anyshape.base.config import Config
from anyshape.compiler.driver import compile_graph
from anyshape.ir.parse import parse
from anyshape.ir.verify import verify
from anyshape.plan.ir.program import KernelStep, LibraryStep
from anyshape.runtime.call.call_frame import CallFrame
from anyshape.runtime.torch_ops.reference_interpreter import interpret
from sampling import rest

HALF = {"bf16": torch.bfloat16, "f16": torch.float16}
EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of one rounding
dtypes = pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)


def in_pairs(**quick: tuple[int, ...]) -> pytest.MarkDecorator:
    """A dtype and a number of threads: the threads given for a dtype's name, and the other pairs by `-m full`. The
    dtype chooses the routine, the threads share out what it is called for."""
    every = sorted({threads for some in quick.values() for threads in some})
    return pytest.mark.parametrize(("dtype", "threads"), [
        pytest.param(HALF[name], threads, id=f"{threads}-{name}",
                     marks=() if threads in some else pytest.mark.full)
        for name, some in quick.items() for threads in every])


def native() -> bool:
    """Whether this machine's products are the host's own."""
    return all(products.native(dtype, host()) for dtype in HALF)


only_native = pytest.mark.skipif(not native(), reason="this processor's products are PyTorch's")


def bound(x: torch.Tensor, y: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """What one rounding, and sums in f32, may be off; below the normal range of f16 steps are equal."""
    inner = x.shape[-1]
    return EPSILON[x.dtype] * exact.abs() + (inner + 2) * 2.0**-23 * (x.double().abs() @ y.double().abs()) + 2.0**-25


def check(found: torch.Tensor, x: torch.Tensor, y: torch.Tensor, exact: torch.Tensor) -> None:
    assert found.dtype == x.dtype and found.shape == exact.shape
    assert ((found.double() - exact).abs() <= bound(x, y, exact)).all()


def laid(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> torch.Tensor:
    """A random tensor: dense; its matrices transposed; every other row and column of a larger one."""
    if kind == "transposed":
        return torch.randn(*shape[:-2], shape[-1], shape[-2]).to(dtype).transpose(-1, -2)
    if kind == "strided":
        return torch.randn(*shape[:-2], 2 * shape[-2], 2 * shape[-1]).to(dtype)[..., ::2, ::2]
    return torch.randn(shape).to(dtype)


def inside(fast) -> list[str]:
    """What the programs of a compiled function leave to PyTorch."""
    return [step.target for program in fast.programs for step in program.compiled.plan.steps
            if type(step).__name__ == "ExternStep"]


SIZES = [(1, 1, 1), (2, 3, 5), (13, 7, 17), (9, 64, 31), (12, 1, 32), (97, 101, 103), (16, 1500, 24), (200, 33, 300),
         (33, 600, 40), (193, 517, 257), (0, 5, 7), (5, 0, 7), (5, 7, 0), (1, 700, 65), (70, 129, 1), (9, 40, 9)]


@dtypes
@pytest.mark.parametrize("left, right", list(itertools.product(("dense", "transposed", "strided"), repeat=2)))
def test_products_of_every_layout(dtype, left, right):
    fast = anyshape.compile(torch.matmul)
    for m, k, n in SIZES:
        x, y = laid((m, k), left, dtype), laid((k, n), right, dtype)
        check(fast(x, y), x, y, x.double() @ y.double())
    assert inside(fast) == []


@in_pairs(bf16=(1, 5), f16=(2,))
def test_threads_share_out_panels(dtype, threads):
    before = torch.get_num_threads()
    fast = anyshape.compile(torch.matmul)
    try:
        torch.set_num_threads(threads)
        for shape in ((500, 70, 600), (30, 2000, 1000), (1000, 40, 30), (3, 900, 2000), (2000, 900, 2),
                      (700, 1700, 300), (1201, 1300, 65)):  # the last two: several blocks of rows
            m, k, n = shape
            x, y = laid((m, k), "dense", dtype), laid((k, n), "transposed", dtype)
            check(fast(x, y), x, y, x.double() @ y.double())
    finally:
        torch.set_num_threads(before)


@in_pairs(bf16=(3,), f16=(1,))
def test_large_results(dtype, threads):
    """Which whole tiles write past the caches: with rows that begin at lines, and not; over what is added."""
    before = torch.get_num_threads()
    fast = anyshape.compile(lambda x, y, c: (x @ y, torch.addmm(c, x, y)))
    try:
        torch.set_num_threads(threads)
        for m, k, n in ((600, 40, 8192), (521, 700, 8224), (530, 33, 8200), (1031, 5, 4112)):
            x, y, c = laid((m, k), "dense", dtype), laid((k, n), "transposed", dtype), torch.randn(m, n).to(dtype)
            exact = x.double() @ y.double()
            found, added = fast(x, y, c)
            check(found, x, y, exact)
            assert ((added.double() - exact - c.double()).abs() <= bound(x, y, exact + c.double()) + 1e-5).all()
    finally:
        torch.set_num_threads(before)


@dtypes
def test_batches(dtype):
    """Of matrices, with one side the same for all, in a permuted result."""
    fast = anyshape.compile(lambda x, y: (x @ y).transpose(-1, -2))
    for left, right in (((3, 4, 20, 30), (3, 4, 30, 50)), ((2, 20, 30), (30, 50)), ((4, 1, 9, 17), (5, 17, 40)),
                        ((40, 16, 64), (40, 64, 16)), ((6, 1, 64), (6, 64, 33)), ((2, 0, 5), (2, 5, 3))):
        x, y = laid(left, "dense", dtype), laid(right, "dense", dtype)
        exact = x.double() @ y.double()
        check(fast(x, y).transpose(-1, -2), x, y, exact)


@dtypes
def test_an_addend_is_added_before_rounding(dtype):
    fast = anyshape.compile(lambda x, w, c: torch.addmm(c, x, w, beta=-0.5, alpha=2.0))
    for (m, k, n), shape in itertools.product(((9, 300, 70), (1, 1, 1), (3, 40, 300), (130, 600, 40), (5, 0, 3)),
                                              ("row", "matrix", "column", "number")):
        x, w = laid((m, k), "dense", dtype), laid((k, n), "transposed", dtype)
        c = torch.randn({"row": (n,), "matrix": (m, n), "column": (m, 1), "number": ()}[shape]).to(dtype) * 30
        exact = -0.5 * c.double() + 2 * (x.double() @ w.double())
        found = fast(x, w, c)
        assert ((found.double() - exact).abs() <= 2 * bound(x, w, exact) - EPSILON[dtype] * exact.abs()
                + 2.0**-22 * c.double().abs()).all()
    assert inside(fast) == []
    linear = anyshape.compile(F.linear)
    for shape in ((2, 3, 64), (64,), (0, 64), (40, 64)):
        x, w, c = laid(shape, "dense", dtype), laid((70, 64), "dense", dtype), torch.randn(70).to(dtype)
        exact = F.linear(x.double(), w.double(), c.double())
        found = linear(x, w, c)
        assert found.shape == exact.shape
        assert ((found.double() - exact).abs() <= EPSILON[dtype] * exact.abs() + 1e-4).all()
    assert inside(linear) == []
    batched = anyshape.compile(lambda c, x, y: torch.baddbmm(c, x, y, beta=0, alpha=0.125))
    x, y = laid((5, 20, 64), "dense", dtype), laid((5, 64, 20), "transposed", dtype)
    c = torch.full((5, 20, 20), math.nan, dtype=dtype)
    exact = 0.125 * (x.double() @ y.double())
    check(batched(c, x, y), x, y, exact)
    assert inside(batched) == []


@only_native
@dtypes
@pytest.mark.parametrize("columns", (1, 3, 16, 17, 32, 33, 256, 257))
def test_sums_that_wait_for_the_next_block_have_room(columns, dtype):
    """Many rows, few columns, and more terms than one block has: what a thread writes stays in its scratch."""
    rows, inner = 100, 3001
    x, y = laid((rows, inner), "dense", dtype), laid((inner, columns), "dense", dtype)
    size = x.element_size()
    a = reference_words.Area(0, 0, size, (rows, inner), (inner, 1))
    b = reference_words.Area(1, 0, size, (inner, columns), (columns, 1))
    c = reference_words.Area(2, 0, size, (rows, columns), (columns, 1))
    program = reference_words.matmul_words(0, "bf16" if dtype is torch.bfloat16 else "f16", a, b, c, None, 1.0, 0.0,
                                       products.Fixed(host(), True))
    if program[0] == format.PRODUCT:
        of = {name: program[format.PackedProduct.index(name)] for name in ("lanes", "deep", "rows", "scratch")}
        lanes = 2 * of["lanes"]
        panels = 4 * of["deep"] * (of["rows"] + lanes)
        sums = 4 * min(rows, of["rows"]) * columns
        assert of["scratch"] >= panels + sums
    for _ in range(3):
        check(anyshape.compile(torch.matmul)(x, y), x, y, x.double() @ y.double())


@dtypes
def test_infinities_and_nans_stay_where_they_are(dtype):
    fast = anyshape.compile(torch.matmul)
    for m, k, n in ((20, 33, 40), (1, 37, 50), (50, 37, 2), (30, 1031, 30)):
        x, y = laid((m, k), "dense", dtype), laid((k, n), "dense", dtype)
        x[m // 2, k // 3] = math.inf
        x[m // 3, k // 2] = math.nan
        y[k - 1, n // 2] = -math.inf
        found, exact = fast(x, y), x.double() @ y.double()
        if not native():
            exact = (x @ y).double()  # oneDNN may spread NaNs of a row where it multiplies whole tiles
        assert torch.equal(found.isnan(), exact.isnan())
        assert torch.equal(found.isinf() & (found > 0), exact == math.inf)
        assert torch.equal(found.isinf() & (found < 0), exact == -math.inf)


def test_results_out_of_the_range_of_f16_are_infinite():
    fast = anyshape.compile(torch.matmul)
    for m in (1, 20):
        x, y = torch.full((m, 64), 200.0).half(), torch.full((64, 40), 200.0).half()
        assert (fast(x, y) == math.inf).all() and (fast(-x, y) == -math.inf).all()


@dtypes
def test_training(dtype):
    """Forward and backward of two layers, at sizes not seen before: no further from float64 than eager PyTorch."""
    torch.manual_seed(0)
    w1, w2, b1 = (torch.randn(shape).to(dtype) * 0.2 for shape in ((96, 40), (17, 96), (96,)))

    def step(x, *weights):
        leaves = [w.clone().requires_grad_() for w in weights]
        loss = run(x, *leaves).float().square().mean()
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    def net(x, w1, w2, b1):
        return F.linear(torch.tanh(F.linear(x, w1, b1)), w2)

    fast = anyshape.compile(net)
    for rows in (5, 33, 1, 70):
        x = torch.randn(rows, 40).to(dtype)
        run = net
        exact = step(x.double(), w1.double(), w2.double(), b1.double())
        eager = step(x, w1, w2, b1)
        run = fast
        for one, other, wanted in zip(step(x, w1, w2, b1), eager, exact, strict=True):
            worst = (other.double() - wanted).abs().max()
            assert (one.double() - wanted).abs().max() <= 1.5 * worst + EPSILON[dtype] * wanted.abs().max()
    assert inside(fast) == []


@dtypes
def test_casts_are_part_of_products(dtype):
    """Under autocast: weights in f32 and their gradients exist once, and come out as eager's do."""
    torch.manual_seed(0)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.ParameterList([torch.randn(s) for s in ((96, 40), (17, 96), (40, 96))])

        def forward(self, x):
            w1, w2, w3 = self.weights
            h = torch.tanh(F.linear(x, w1))
            return F.linear(torch.tanh(F.linear(h, w3)), w1).sum() + F.linear(h, w2).sum()

    net = Net()
    fast = anyshape.compile(net)

    def grads(run, x):
        with torch.autocast("cpu", dtype=dtype):
            loss = run(x)
        return torch.autograd.grad(loss, list(net.parameters()))

    for rows in (20, 1, 7, 33, 300):
        x = torch.randn(rows, 40)
        twin = copy.deepcopy(net).double()
        exact = torch.autograd.grad(twin(x.double()), list(twin.parameters()))
        for one, other, wanted in zip(grads(fast, x), grads(net, x), exact, strict=True):
            assert one.dtype == torch.float32
            worst = (other - wanted).abs().max()
            assert (one - wanted).abs().max() <= 1.5 * worst + EPSILON[dtype] * wanted.abs().max()
            # rounded as eager's are; w1's is the sum of two such
            assert one.shape == (96, 40) or torch.equal(one, one.to(dtype).float())
    steps = [step for program in fast.programs for step in program.compiled.plan.steps]
    read = {(w.type.dtype, w.type.shape) for step in steps if isinstance(step, LibraryStep) for w in step.inputs}
    made = {(w.type.dtype, w.type.shape) for step in steps if isinstance(step, LibraryStep) for w in step.outputs}
    assert {("f32", (96, 17)), ("f32", (96, 40))} <= read and {("f32", (17, 96)), ("f32", (40, 96))} <= made
    in_kernels = [w.type.shape for step in steps if isinstance(step, KernelStep) for w in step.params]
    assert (17, 96) not in in_kernels and (40, 96) not in in_kernels


@dtypes
def test_operands_and_results_in_f32(dtype):
    """Of every layout, as panels; beside few vectors, too."""
    name = next(key for key, value in HALF.items() if value == dtype)
    graph = parse(f"""
    graph g(x: {name}[m, k], y: f32[k, n], z: f32[n, k], u: f32[k, m], v: {name}[n, m], w: {name}[m, n])
      zt = permute(z | dims=[1, 0])                                       f32[k, n]
      ut = permute(u | dims=[1, 0])                                       f32[m, k]
      a = matmul(x, y | rounded="{name}")                                 {name}[m, n]
      b = matmul(x, zt | rounded="{name}", dtype="f32")                   f32[m, n]
      c = matmul(ut, zt | rounded="{name}")                               {name}[m, n]
      d = matmul(u, w | rounded="{name}", dtype="f32")                    f32[k, n]
      e = matmul(v, ut | rounded="{name}", dtype="f32")                   f32[n, k]
      f = matmul_add(ut, y, w | alpha=0.5, beta=2.0, rounded="{name}")    {name}[m, n]
      return a, b, c, d, e, f
    """)
    verify(graph)
    compiled = compile_graph(graph, Config(check=1))
    for m, k, n in ((20, 33, 40), (1, 1, 1), (3, 70, 100), (250, 600, 300), (13, 0, 5), (0, 3, 4)):
        x, y, z, u, v, w = (torch.randn(shape) for shape in ((m, k), (k, n), (n, k), (k, m), (n, m), (m, n)))
        inputs = [x.to(dtype), y, z, u, v.to(dtype), w.to(dtype)]
        wanted = interpret(graph, inputs)[0]
        for one, other in zip(compiled.executable(list(inputs)), wanted, strict=True):
            assert one.dtype == other.dtype
            close = 2 * EPSILON[dtype]
            torch.testing.assert_close(one, other, rtol=close, atol=close * (1 + k) ** 0.5)
            assert torch.equal(one, one.to(dtype).to(one.dtype))
    if native():
        assert not any(record.payload.calls for record in compiled.executable.specializations.values())


@only_native
def test_products_stay_in_the_host():
    """No call of PyTorch between kernels, and a new length costs no more than a record."""
    fast = anyshape.compile(lambda x, w, b: F.linear(torch.relu(x), w, b).sum(0))
    w, c = torch.randn(300, 64).bfloat16(), torch.randn(300).bfloat16()
    fast(torch.randn(20, 64).bfloat16(), w, c)
    (program,) = fast.programs
    for rows in (2, 9, 100, 700):
        x = torch.randn(rows, 64).bfloat16()
        fast(x, w, c)
    run = program.executable
    assert all(not record.payload.calls for record in run.specializations.values())

    # the thread's scratch does not grow with the matrices
    fast = anyshape.compile(torch.matmul)
    for m, k, n in ((1000, 300, 1000), (1000, 1400, 1000), (1000, 5000, 1000)):
        x, y = laid((m, k), "dense", torch.bfloat16), laid((k, n), "dense", torch.bfloat16)
        check(fast(x, y), x, y, x.double() @ y.double())
    scratch = [record.scratch for program in fast.programs for record in program.executable.specializations.values()]
    assert 0 < max(scratch) < (2e6 if tiles(host(), "bf16") else 1.2e6)


@dtypes
def test_without_products_of_its_own_the_host_calls_pytorch(dtype):
    """As where PyTorch's are the faster ones: the same programs, the same roundings."""
    fast = anyshape.compile(lambda x, w, c: (torch.addmm(c, x, w, alpha=0.5), torch.baddbmm(c, x[None], w[None])),
                            products="library")
    for m, k, n in ((20, 33, 40), (1, 8, 5), (0, 3, 4), (4, 0, 3)):
        x, w, c = laid((m, k), "dense", dtype), laid((k, n), "dense", dtype), laid((m, n), "dense", dtype)
        for found, alpha in zip(fast(x, w, c), (0.5, 1.0), strict=True):
            exact = (c.double() + alpha * (x.double() @ w.double())).reshape(found.shape)
            assert ((found.double() - exact).abs() <= bound(x, w, exact) + 2.0**-22 * c.double().abs()).all()
    linear = anyshape.compile(F.linear, products="library")
    x, w = torch.randn(9, 16), torch.randn(8, 16)
    with torch.autocast("cpu", dtype=dtype):
        found = linear(x, w)
    check(found, x.to(dtype), w.T.to(dtype), x.to(dtype).double() @ w.T.to(dtype).double())
    records = [record for p in (*fast.programs, *linear.programs) for record in p.executable.specializations.values()]
    assert any(record.payload.calls for record in records)


# ---- f32


@pytest.mark.parametrize("threads", rest([1, 2], 2))
def test_products_of_f32(threads, monkeypatch):
    """From panels wherever their sizes allow, whatever the processor."""
    for name in ("OUR_ROWS", "OUR_COLUMNS", "OUR_INNER"):
        monkeypatch.setattr(plan_template, name, 1)
    monkeypatch.setattr(CallFrame, "step", None)  # no step is left to PyTorch
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fast = anyshape.compile(torch.matmul, strict=True, products="own")
        for rows, inner, columns in ((9, 17, 33), (65, 513, 100), (13, 705, 300), (300, 1500, 500), (97, 48, 1024),
                                     (10, 1, 40), (12, 512, 32), (100, 32, 12), (1700, 300, 67)):
            for batch, one, other in itertools.product(((), (3,)), ("dense", "transposed", "strided"),
                                                       ("dense", "transposed", "strided")):
                if rows * inner > 50_000 and (batch or "strided" in (one, other)):
                    continue
                x, y = laid((*batch, rows, inner), one, torch.float32), laid((*batch, inner, columns), other,
                                                                           torch.float32)
                exact = x.double() @ y.double()
                off = (fast(x, y).double() - exact).abs()
                assert (off <= (inner + 2) * 2.0**-23 * (x.double().abs() @ y.double().abs())).all()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("inner", [7, 129, 700])
def test_sums_of_f32_with_addends(threads, inner, monkeypatch):
    """A bias, one with gaps between its elements, a whole matrix that is kept, and one that the product is written
    over; panels that are whole, and edges; one block along k, and several."""
    for name in ("OUR_ROWS", "OUR_COLUMNS", "OUR_INNER"):
        monkeypatch.setattr(plan_template, name, 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)

    def several(x, w, bias, gaps, other):
        return (torch.addmm(bias, x[0], w), torch.addmm(gaps[:, 0], x[1], w), torch.addmm(other, x[2], w),
                torch.addmm(x[3] @ w, x[4], w))

    try:
        fast = anyshape.compile(several, strict=True, products="own")
        for rows, columns in ((24, 64), (29, 101), (900, 33)):
            x, w, bias, gaps, other = (torch.randn(*shape) for shape in (
                (5, rows, inner), (inner, columns), (columns,), (columns, 3), (rows, columns)))
            products, sizes = x.double() @ w.double(), x.double().abs() @ w.double().abs()
            sizes[3] += sizes[4]
            for i, (found, addend) in enumerate(zip(fast(x, w, bias, gaps, other), (bias, gaps[:, 0], other,
                                                                                    products[4]), strict=True)):
                bound = 2 * (inner + 3) * 2.0**-23 * (sizes[i] + addend.abs())
                assert ((found - (products[i] + addend)).abs() <= bound).all()
    finally:
        torch.set_num_threads(before)


# ---- routines on processors other than this one


def targets() -> list[Machine]:
    """This machine; without whole tiles; without pairs of bf16; with half and a quarter of the width."""
    names = sorted(name[1:] for name in host().features.split(",") if name.startswith("+"))
    cut = [(), ("amx",), ("avx512bf16", "amx"), ("avx512", "avx10", "evex", "amx"),
           ("avx512", "avx10", "evex", "amx", "avx2", "fma", "f16c", "avx", "vaes", "vpcl")]
    result = []
    for late, cpu in zip(cut, (*[host().cpu] * 3, "haswell", "nehalem"), strict=True):
        kept = frozenset(n for n in names if not (late and n.startswith(late)))
        target = target_of(host().triple, cpu, kept)
        off = ",".join(f"-{n}" for n in names if n not in kept)
        result.append(Machine(target.triple, target.cpu, f"{target.features},{off}" if off else target.features,
                             target.vector_bytes, target.fma, target.wide_int))
    return list(dict.fromkeys(result))


def name_of(target: Machine) -> str:
    return f"{target.vector_bytes}{'-pairs' * low_precision.pairs(target, 'bf16')}{'-tiles' * tiles(target, 'bf16')}"


@pytest.mark.skipif(not host().triple.startswith("x86_64"), reason="older x86 processors")
@pytest.mark.parametrize("target", targets(), ids=name_of)
@pytest.mark.parametrize("dtype", [*HALF, "f32"])
def test_every_routine_of_panels(target, dtype):
    if dtype not in (*low_precision.dtypes(target), "f32"):
        pytest.skip("no conversion of f16")
    kind = HALF.get(dtype, torch.float32)
    size, wider, one = kind.itemsize, "_wide" if dtype in HALF else "", EPSILON.get(kind, 2.0**-23)
    text = gemm.emit_packed(target)
    names = [name for name in gemm_table.routines() if f"_{dtype}" in name and f"@{name}(" in text]
    routines = jit.load(text, names, target)
    whole = tiles(target, dtype)

    def call(name, *arguments):
        ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(routines.address[name])(*arguments)

    lanes, grain, per_word = target.lanes, gemm_table.grain(target, dtype), low_precision.per_word(target, dtype)
    for inner, thirds, vectors, ways in itertools.product((0, 1, 7, 37, 64, 300), (1, 2, 3), (1, 2),
                                                          (("turn", "along"), ("along", "turn"), ("any", "any"))):
        rows, columns = thirds * grain, vectors * lanes
        x, y = torch.randn(rows, inner).to(kind), torch.randn(inner, columns).to(kind)
        y = y.float() * 1.001
        left = x if ways[0] != "along" else x.T.contiguous().T
        right = y if ways[1] != "turn" else y.T.contiguous().T
        count = -(-inner // per_word)
        room = -(-count // lanes) * lanes
        first, second = (np.full(size * room + lanes, math.nan, np.float32) for size in (rows, columns))
        for i in range(0, rows, lanes):  # rows as they are, columns from f32
            place, step = (4 * i * room, 4 * room) if whole else (4 * i, 4 * rows)
            call(f"{ways[0]}_{dtype}{'_rows' * whole}", left.data_ptr() + size * i * left.stride(0),
                 size * left.stride(0), size * left.stride(1), min(lanes, rows - i), inner,
                 first.ctypes.data + place, step)
        for i in range(0, columns, lanes):
            call(f"{ways[1]}_{dtype}{wider}", right.data_ptr() + 4 * i * right.stride(1), 4 * right.stride(1),
                 4 * right.stride(0), lanes, inner, second.ctypes.data + 4 * i, 4 * columns)
        sums = np.ones((rows, columns), np.float32)
        ahead = (ctypes.c_int64 * 8)(right.data_ptr(), 0, 1, 0, 3, sums.ctypes.data, 4 * columns, 4 * columns)
        if whole:
            call(f"begin_{dtype}")
        call(f"tile_{dtype}_{3 - thirds}_{vectors}", second.ctypes.data, first.ctypes.data, count, sums.ctypes.data,
             4 * columns, 1, ctypes.addressof(ahead))
        if whole:
            call(f"end_{dtype}")
        exact = x.double() @ y.to(kind).double()
        np.testing.assert_allclose(sums, 1 + exact.numpy(), rtol=1e-5, atol=1e-4)
        result, addend = torch.zeros(rows, columns + 3).to(kind), torch.randn(rows, columns).to(kind)
        scalars = np.zeros(4, np.float32)
        scalars[0], scalars[2] = 2, 0.5
        call(f"finish_{dtype}", sums.ctypes.data, 4 * columns, result.data_ptr(), size * (columns + 3), rows,
             columns - 1, addend.data_ptr(), size * columns, scalars.ctypes.data, 0)
        wanted = (2 * torch.from_numpy(sums).double() + 0.5 * addend.double())[:, :-1]
        found = result[:, :columns - 1].double()
        assert ((found - wanted).abs() <= 1.01 * one * wanted.abs() + 1e-6).all()
        assert not result[:, columns - 1:].any()
        past = torch.zeros(rows, 64).to(kind)  # rows begin at lines
        call(f"finish_{dtype}", sums.ctypes.data, 4 * columns, past.data_ptr(), size * 64, rows, columns - 1,
             addend.data_ptr(), size * columns, scalars.ctypes.data, 1)
        assert torch.equal(past[:, :columns - 1], result[:, :columns - 1]) and not past[:, columns - 1:].any()
        if dtype not in HALF:
            continue
        wide = torch.zeros(rows, columns)
        call(f"finish_{dtype}_wide", sums.ctypes.data, 4 * columns, wide.data_ptr(), 4 * columns, rows, columns - 1,
             addend.data_ptr(), size * columns, scalars.ctypes.data, 0)
        assert torch.equal(wide[:, :-1], result[:, :columns - 1].float()) and not wide[:, -1].any()


@pytest.mark.skipif(not host().triple.startswith("x86_64"), reason="older x86 processors")
@pytest.mark.parametrize("target", targets(), ids=name_of)
@pytest.mark.parametrize("dtype", HALF)
def test_every_routine_beside_few_vectors(target, dtype):
    if dtype not in low_precision.dtypes(target):
        pytest.skip("no conversion of f16")
    names = [name for name in gemv_table.routines() if f"_{dtype}" in name]
    routines = jit.load(gemv.emit_thin(target), names, target)
    for way, wide in itertools.product(gemv_table.COUNTS, (False, True)):
        for count in range(1, max(gemv_table.COUNTS[way]) + 1):
            call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 9)(
                routines.address[gemv_table.routine(way, dtype, count, wide)])
            for inner, results, beta in ((37, 2100, 0.0), (300, 9, 0.5), (1, 1, 0.5), (0, 5, 0.0), (64, 4200, 0.5)):
                shape = (results, inner) if way == "dot" else (inner, results)
                matrix, vectors, found = (torch.randn(*s).to(HALF[dtype]) for s in (shape, (count, inner),
                                                                                  (count, results)))
                matrix = matrix.float() * 1.001 if wide else matrix
                turned = (matrix.T if way == "dot" else matrix).to(HALF[dtype])
                wanted = 2 * vectors.double() @ turned.double() + beta * found.double()
                wanted[:, :results // 3] = found[:, :results // 3].double()
                rows = [min(i, count - 1) for i in range(gemv_table.PLACES)]
                places = np.array([*(vectors[i].data_ptr() for i in rows), *(found[i].data_ptr() for i in rows)])
                scalars = np.zeros(4, np.float32)
                scalars[0], scalars[2] = 2, beta
                call(matrix.data_ptr(), matrix.itemsize * matrix.stride(0), inner, results // 3, results,
                     places.ctypes.data, 2, 2, scalars.ctypes.data)
                close = EPSILON[HALF[dtype]] * wanted.abs() + 1e-4
                assert ((found.double() - wanted).abs() <= close).all()


@pytest.mark.parametrize("inside", [False, True])
def test_the_fast_path_of_an_encoder_layer_under_autocast(inside: bool) -> None:
    """Eager PyTorch returns bfloat16 there, and float32 with gradients."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True).eval()

    def under_autocast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)  # type: ignore[no-any-return]

    fast = anyshape.compile(under_autocast if inside else layer)
    with warnings.catch_warnings(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        warnings.simplefilter("ignore")
        for length in (7, 5, 9):
            x = torch.randn(2, length, 16)
            found, wanted = fast(x), (under_autocast if inside else layer)(x)
            assert found.dtype == wanted.dtype == torch.bfloat16
            torch.testing.assert_close(found, wanted)
    assert fast(torch.randn(2, 4, 16)).requires_grad
