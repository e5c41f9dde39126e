"""Attention of our own: against PyTorch's, at every kind of size, stride and mask; masks of the future are found."""
from __future__ import annotations

import ctypes
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anyshape
from anyshape.backend.cpu.bytecode.products import native
from anyshape.backend.cpu.llvm import jit
from anyshape.backend.cpu.machine.target import host
from anyshape.backend.cpu.microkernels import softmax_rows
from anyshape.backend.cpu.microkernels.tables import softmax_rows as softmax_rows_table
from anyshape.backend.cpu.target import CpuTarget
from anyshape.base.config import Config
from anyshape.ir.graph import Graph
from anyshape.ir.parse import parse
from anyshape.ops.attention import OPERANDS
from anyshape.passes.causal_mask import causal_mask
from anyshape.plan.ir.program import ExternStep, LibraryStep
from anyshape.runtime.torch_ops.reference_interpreter import interpret
from roads import compilation_of
from sampling import crossed, rest
from test_half import targets

aten = torch.ops.aten


def attend(q, k, v, mask=None, causal=False, scale=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)


def heads(batch, count, rows, depth, dtype=torch.float32, dense=False):
    if dense:
        return torch.randn(batch, count, rows, depth, dtype=dtype, requires_grad=True)
    return torch.randn(batch, rows, count, depth, dtype=dtype).transpose(1, 2).requires_grad_()


def ops_of(fast) -> list[str]:
    return [step.op if isinstance(step, LibraryStep) else step.target for program in compilation_of(fast).programs
            for step in program.compiled.plan.steps if isinstance(step, (LibraryStep, ExternStep))]


def check(fast, function, operands, *more) -> None:
    """Values, gradients and their strides, with and without gradients."""
    wanted = function(*operands, *more)
    gradient = torch.randn_like(wanted)
    found = fast(*operands, *more)
    with torch.no_grad():
        torch.testing.assert_close(fast(*operands, *more), wanted.detach(), rtol=1e-4, atol=1e-5)
    pairs = [(found, wanted), *zip(torch.autograd.grad(found, operands, gradient),
                                   torch.autograd.grad(wanted, operands, gradient), strict=True)]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=3e-5)
        assert ours.stride() == theirs.stride() or not ours.numel()


SIZES = [(2, 3, 65, 65, 16), (1, 1, 1, 1, 8), (3, 2, 1, 77, 16), (2, 3, 5, 7, 8), (2, 3, 7, 5, 8),
         (1, 4, 300, 1, 32), (2, 2, 4, 400, 8), (1, 2, 65, 1025, 8), (0, 2, 5, 5, 8), (2, 2, 0, 5, 8),
         (2, 2, 5, 0, 8), (1, 2, 127, 131, 33)]


@pytest.mark.parametrize("future", [False, True], ids=["all", "causal"])
def test_sizes(future):
    fast = anyshape.compile(attend, strict=True)
    for batch, count, rows, columns, depth in SIZES:
        operands = [heads(batch, count, n, depth) for n in (rows, columns, columns)]
        check(fast, attend, operands, None, future)
    calls = set(ops_of(fast))
    assert {"attention", "attention_backward"} <= calls and not any("attention" in op for op in calls - set(OPERANDS))


def test_dtypes_and_layouts():
    fast = anyshape.compile(attend, strict=True)
    for dtype, dense in ((torch.float64, False), (torch.float32, True)):
        check(fast, attend, [heads(2, 3, n, 8, dtype, dense) for n in (9, 50, 50)], None, True)
    wide = [torch.randn(2, 3, 9, 16)[..., ::2].requires_grad_() for _ in range(3)]  # no library reads such rows
    check(fast, attend, wide, None, True)


# ---- half precision


def errors(found, wanted, exact) -> list[tuple[float, float]]:
    """Of each tensor: the norm of its error against the exact one, and that of eager's, both of the exact norm, or of 1
    where it is less (over one column weights do not change, and gradients are nothing but errors)."""
    norms = [max(float(right.norm()), 1.0) for right in exact]
    return [(float((ours.double() - right).norm()) / norm, float((theirs.double() - right).norm()) / norm)
            for ours, theirs, right, norm in zip(found, wanted, exact, norms, strict=True)]


def check_half(fast, function, operands, *more) -> None:
    """Values and gradients are as near to float64's as eager's are, with eager's strides."""
    exact = [x.detach().double().requires_grad_() for x in operands]
    results = []
    gradient = torch.randn(function(*operands, *more).shape)
    for run, given in ((fast, operands), (function, operands), (function, exact)):
        y = run(*given, *(x.double() if given is exact and isinstance(x, torch.Tensor) and x.is_floating_point() else x
                          for x in more))
        results.append([y, *torch.autograd.grad(y, given, gradient.to(y.dtype))])
    found, wanted, right = ([x.detach() for x in one] for one in results)
    for (ours, eagers), tensor in zip(errors(found, wanted, right), right, strict=True):
        few = 2.5 if tensor.numel() < 2000 else 1.5  # of a few errors either may have the lucky ones
        assert ours <= few * eagers + 1e-4
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.stride() == theirs.stride() or not ours.numel()


half_here = pytest.mark.skipif(not native("bf16", host()), reason="half precision is PyTorch's on this processor")


@half_here
@pytest.mark.parametrize(("dtype", "future"), crossed((torch.bfloat16, torch.float16), (False, True)), ids=str)
def test_half_precision(dtype, future):
    if not native({torch.bfloat16: "bf16", torch.float16: "f16"}[dtype], host()):
        pytest.skip("PyTorch's on this processor")
    torch.manual_seed(0)
    fast = anyshape.compile(attend, strict=True)
    for batch, count, rows, columns, depth in (*SIZES, (2, 4, 226, 226, 64), (1, 1, 250, 73, 40)):
        check_half(fast, attend, [heads(batch, count, n, depth).detach().to(dtype).requires_grad_()
                                  for n in (rows, columns, columns)], None, future)
    calls = set(ops_of(fast))
    assert {"attention", "attention_backward"} <= calls and not any("attention" in op for op in calls - set(OPERANDS))


@half_here
def test_half_precision_with_masks_groups_and_odd_layouts():
    fast = anyshape.compile(attend, strict=True)
    operands = [heads(2, 4, n, 8).detach().bfloat16().requires_grad_() for n in (50, 70, 70)]
    for shape in ((50, 70), (2, 4, 50, 70), (1, 1, 1, 70), (2, 1, 50, 1)):
        check_half(fast, attend, operands, torch.randn(shape).bfloat16(), False, 0.3)
        check_half(fast, attend, operands, torch.rand(shape) > 0.4)
    wide = [torch.randn(2, 3, 9, 16)[..., ::2].bfloat16().requires_grad_() for _ in range(3)]
    check_half(fast, attend, wide, None, True)
    gaps = [torch.randn(2, 3, 9, 16).bfloat16()[..., ::2].requires_grad_() for _ in range(3)]  # rows that nobody reads
    check_half(fast, attend, gaps, None, True)

    def grouped(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    fast = anyshape.compile(grouped, strict=True)
    for rows, columns in ((5, 9), (90, 90), (1, 1), (3, 200)):
        check_half(fast, grouped, [heads(2, count, n, 16).detach().bfloat16().requires_grad_()
                                   for count, n in ((6, rows), (2, columns), (2, columns))])


@half_here
def test_half_precision_on_several_threads_is_that_of_one():
    fast = anyshape.compile(attend, strict=True)
    operands = [heads(3, 4, n, 32).detach().bfloat16().requires_grad_() for n in (300, 211, 211)]
    gradient, before, results = torch.randn(3, 4, 300, 32).bfloat16(), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            y = fast(*operands, None, True)
            results.append([y, *torch.autograd.grad(y, operands, gradient)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


def test_half_precision_stays_pytorchs_where_its_units_are_faster(monkeypatch):
    monkeypatch.setattr(CpuTarget, "multiplies", lambda self, dtype: False)
    fast = anyshape.compile(attend, strict=True)
    operands = [heads(2, 3, 9, 8).detach().bfloat16() for _ in range(3)]
    torch.testing.assert_close(fast(*operands), attend(*operands))
    assert any("flash_attention" in op for op in ops_of(fast))


@pytest.mark.parametrize("shape", rest([(50, 70), (2, 1, 50, 70), (2, 4, 50, 70), (1, 1, 1, 70), (2, 1, 1, 70),
                                        (2, 1, 50, 1)], (50, 70), (2, 1, 1, 70)))
def test_masks(shape):
    fast = anyshape.compile(attend, strict=True)
    operands = [heads(2, 4, n, 8) for n in (50, 70, 70)]
    check(fast, attend, operands, torch.randn(shape))
    check(fast, attend, operands, torch.rand(shape) > 0.4)
    if len(shape) == 2:
        check(fast, attend, operands, torch.randn(70, 50).t(), False, 0.3)


def test_rows_that_see_nothing_and_what_is_not_finite():
    fast = anyshape.compile(attend, strict=True)
    operands = [heads(1, 2, 6, 8) for _ in range(3)]
    mask = torch.zeros(6, 6)
    mask[1] = -math.inf
    check(fast, attend, operands, mask)
    mask[2, 1], mask[3, 2] = math.nan, math.inf
    with torch.no_grad():
        torch.testing.assert_close(fast(*operands, mask), attend(*operands, mask), equal_nan=True)
        operands[0][0, 0, 4, 0] = math.inf
        torch.testing.assert_close(fast(*operands), attend(*operands), equal_nan=True)
        # PyTorch's kernel takes a row of nothing but NaN for one that is masked, and makes it zero; here it stays NaN
        operands[0][0, 0, 4] = math.nan
        assert fast(*operands)[0, 0, 4].isnan().all()


def test_grouped_heads():
    def grouped(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    class Grouped(nn.Module):
        def forward(self, x, y):
            q = x.unflatten(-1, (6, 8)).transpose(1, 2)
            k = y.unflatten(-1, (2, 8)).transpose(1, 2)
            return grouped(q, k, 2 * k)

    model, fast = Grouped(), anyshape.compile(Grouped(), strict=True)
    for rows, columns in ((5, 9), (70, 70), (1, 1), (3, 200)):
        operands = [torch.randn(2, rows, 48, requires_grad=True), torch.randn(2, columns, 16, requires_grad=True)]
        check(fast, model, operands)
    fast = anyshape.compile(grouped, strict=True)  # here the numbers of heads are sizes of inputs
    for count, groups in ((4, 4), (6, 2), (6, 1), (1, 1), (8, 4)):
        check(fast, grouped, [heads(2, count, 50, 16), heads(2, groups, 70, 16), heads(2, groups, 70, 16)])


TEXT = """
graph one(q: f32[2, 6, m, 4], k: f32[2, 2, n, 4], v: f32[2, 2, n, 4], w: f32[1, 6, m, n], g: f32[2, 6, m, 4])
  y, l = attention(q, k, v, w | causal=True, scale=None)  f32[2, m, 6, 4], f32[2, 6, m]
  r = permute(y | dims=[0, 2, 1, 3])                      f32[2, 6, m, 4]
  z = mul(r, g)                                           f32[2, 6, m, 4]
  p = sum(z | dims=[3], keep=False)                       f32[2, 6, m]
  dq, dk, dv = attention_backward(g, q, k, v, l, p, w | causal=True, scale=None)  f32[2, m, 6, 4], f32[2, n, 2, 4], f32[2, n, 2, 4]
  return y, l, dq, dk, dv
"""  # noqa: E501


@pytest.mark.parametrize(("rows", "columns"), [(5, 9), (9, 5), (1, 1), (0, 3), (40, 70)])
def test_the_interpreter_agrees_with_autograd(rows, columns):
    """The reference itself, by PyTorch's own differentiation of the plain formula."""
    q, k, v = (torch.randn(2, count, n, 4, dtype=torch.float64, requires_grad=True)
               for count, n in ((6, rows), (2, columns), (2, columns)))
    mask, g = torch.randn(1, 6, rows, columns), torch.randn(2, 6, rows, 4)
    many = [x.repeat_interleave(3, 1) for x in (k, v)]
    scores = 0.5 * q @ many[0].transpose(2, 3) + mask
    scores = scores.masked_fill(torch.ones(rows, columns).tril() == 0, -math.inf)
    result = scores.softmax(3) @ many[1]
    gradients = torch.autograd.grad(result, (q, k, v), g.double())
    found = interpret(parse(TEXT), [*(x.detach().float() for x in (q, k, v)), mask, g])[0]
    wanted = [result.transpose(1, 2), scores.logsumexp(3), *(x.transpose(1, 2) for x in gradients)]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs.detach(), rtol=1e-4, atol=1e-5)


# ---- the rows' own work, on processors other than this one


@pytest.mark.parametrize("target", targets(), ids=lambda t: str(t.vector_bytes))
@pytest.mark.parametrize("dtype", softmax_rows_table.DTYPES)
def test_routines(target, dtype):
    kind = {"f32": np.float32, "f64": np.float64}[dtype]
    routines = jit.load(softmax_rows.emit_attention(target),
                               [name for name in softmax_rows_table.routines() if dtype in name], target)

    def call(name, *arguments):
        ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(routines.address[f"{name}_{dtype}"])(*arguments)

    random = np.random.default_rng(0)
    for rows, columns, limit, grow, masked in itertools.product((1, 5), (0, 1, 7, 16, 33), (0, 1, 50), (0, 1), (0, 1)):
        wide = columns + 3
        scores, gradients, mask = (random.standard_normal((rows, wide)).astype(kind) for _ in range(3))
        given, change = scores.copy(), gradients.copy()
        sums, products = np.zeros(rows, kind), random.standard_normal(rows).astype(kind)
        seen = [max(min(columns, limit + i * grow), 0) for i in range(rows)]
        item = scores.itemsize
        scale = kind(0.7)
        more = (scores.ctypes.data, wide * item, rows, columns, limit, grow, int.from_bytes(scale.tobytes(), "little"),
                mask.ctypes.data if masked else 0, wide * item, sums.ctypes.data, item)
        call("weigh", *more, 0)
        whole, factors = scores.copy(), np.zeros(rows + 1, np.float64)
        scores[:] = given
        call("weigh", *more, factors.ctypes.data)
        parts = factors.view(kind)[:: 8 // item][:rows, None]
        np.testing.assert_allclose(parts * scores[:, :columns], whole[:, :columns], rtol=1e-6)
        assert all(1.0 in row[:count] for row, count in zip(scores, seen, strict=True) if count)
        scores[:] = whole
        for i, count in enumerate(seen):
            row = scale * given[i, :count].astype(np.float64) + (mask[i, :count] if masked else 0)
            total = np.log(np.exp(row).sum()) if count else 0.0
            np.testing.assert_allclose(sums[i], total, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(scores[i, :count], np.exp(row - total), rtol=1e-5, atol=1e-7)
            assert not scores[i, count:columns].any() and (scores[i, columns:] == given[i, columns:]).all()
        scores[:] = given
        call("unweigh", *more, gradients.ctypes.data, products.ctypes.data, item)
        for i, count in enumerate(seen):
            row = scale * given[i, :count].astype(np.float64) + (mask[i, :count] if masked else 0)
            weights = np.exp(row - sums[i])
            np.testing.assert_allclose(scores[i, :count], weights, rtol=1e-5, atol=1e-7)
            np.testing.assert_allclose(gradients[i, :count], scale * weights * (change[i, :count] - products[i]),
                                       rtol=1e-4, atol=1e-6)
            assert not gradients[i, count:columns].any() and (gradients[i, columns:] == change[i, columns:]).all()


# ---- masks of the future


def kinds(fast) -> list[tuple[bool, int]]:
    """Of every attention step: whether it is causal, and its operands beyond q, k, v and what the backward needs."""
    return [(dict(step.attrs)["causal"], len(step.inputs) - len(OPERANDS[step.op][0]))
            for program in compilation_of(fast).programs for step in program.compiled.plan.steps
            if isinstance(step, LibraryStep) and step.op in OPERANDS]


def lower(n):
    return torch.ones(n, n, dtype=torch.bool).tril()


def added(n):
    return torch.full((n, n), -math.inf).triu(1)


def least(n):
    return torch.zeros(n, n).masked_fill(~torch.ones(n, n).tril().bool(), torch.finfo(torch.float32).min)


def counted(n):
    return torch.arange(n)[:, None] >= torch.arange(n)[None, :]


def window(n):
    rows, columns = torch.arange(n)[:, None], torch.arange(n)
    return (columns <= rows) & (columns > rows - 4)


def past(n):
    return torch.arange(n)[None, :] <= torch.arange(n)[:, None] + 1


def strict(n):
    return torch.arange(n)[None, :] < torch.arange(n)[:, None]


@pytest.mark.parametrize(("mask", "wanted"), rest([
    (lower, (True, 0)), (added, (True, 0)), (least, (True, 0)), (counted, (True, 0)), (window, (True, 1)),
    (past, (False, 1)), (strict, (True, 1))], (least, (True, 0)), (counted, (True, 0)), (window, (True, 1)),
    (past, (False, 1)), several=True))
def test_a_mask_of_the_future_is_found(mask, wanted):
    def model(q, k, v):
        return attend(q, k, v, mask(q.shape[2]))

    fast = anyshape.compile(model, strict=True)
    for rows in (9, 33, 1, 2):
        operands = [heads(2, 2, rows, 8) for _ in range(3)]
        check(fast, model, operands)
    assert set(kinds(fast)) == {wanted}


def test_a_mask_that_is_data_is_kept():
    fast = anyshape.compile(attend, strict=True)
    check(fast, attend, [heads(2, 2, 9, 8) for _ in range(3)], lower(9))
    assert set(kinds(fast)) == {(False, 1)}


def test_whole_numbers_that_wrap_are_not_followed():
    """In u8, column 256 is column 0 again."""
    text = """
graph wraps(q: f32[b, 1, n, 4], k: f32[b, 1, n, 4], v: f32[b, 1, n, 4])
  i = iota(| count=n, start=0, step=1, dtype="{0}")       {0}[n]
  c = reshape(i | shape=[n, 1])                           {0}[n, 1]
  s = le(i, c)                                            bool[n, n]
  z = full(0.0 | shape=[], dtype="f32")                   f32[]
  m = where(s, z, -inf)                                   f32[n, n]
  w = reshape(m | shape=[1, 1, n, n])                     f32[1, 1, n, n]
  y, l = attention(q, k, v, w | causal=False, scale=0.5)  f32[b, n, 1, 4], f32[b, 1, n]
  return y
"""
    found = []
    for dtype in ("i64", "i32", "u8"):
        after: Graph = causal_mask(parse(text.format(dtype)), Config())
        found.append(after.nodes[-1].attr("causal"))
    assert found == [True, True, False]


def test_positions_are_not_saved():
    """What is made of sizes alone is made again in the backward, where its mask is found, too."""
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
            positions = torch.arange(x.shape[1]).expand(x.shape[0], -1)
            mask = positions[:, None, :, None] >= positions[:, None, None, :]
            return attend(q, k, v, mask).sum()

    model = Model()
    fast = anyshape.compile(model, strict=True)
    for shape in ((2, 5, 8), (3, 40, 8), (1, 1, 8)):
        x = torch.randn(shape)
        wanted = torch.autograd.grad(model(x), model.project.weight)
        torch.testing.assert_close(torch.autograd.grad(fast(x), model.project.weight), wanted, rtol=1e-4, atol=1e-5)
    assert set(kinds(fast)) == {(True, 0)}
    saved = [window.type.dtype for program in compilation_of(fast).programs for window in program.compiled.plan.saved
             if hasattr(window, "type")]
    assert saved and set(saved) == {"f32"}


def test_a_mask_that_lies_in_another_order_is_stored_for_the_host() -> None:
    """As T5 makes it: a table's rows by distance, one number per head."""
    table = torch.randn(9, 4)

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        bias = table[index].permute(2, 0, 1)[None]
        for _ in range(2):
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return q
    fast = anyshape.compile(f)
    for b, m in ((2, 5), (3, 33), (1, 1)):
        q, k, v = (torch.randn(b, 4, m, 16) for _ in range(3))
        index = torch.randint(0, 9, (m, m))
        torch.testing.assert_close(fast(q, k, v, index), f(q, k, v, index))
    records = [record for program in fast._anyshape.compilation.programs
               for record in program.compiled.executable.specializations.values()]
    assert records and not any(record.payload.calls for record in records)
