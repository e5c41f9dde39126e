"""Products that become a part of the kernel that reads them (compiler/gemm_epilogue.py): what is made, and when it
is not."""
from __future__ import annotations

import dataclasses
import re

import pytest

from anyshape.backend.triton.gpu import hardware_of
from anyshape.backend.triton.schedule import emit
from anyshape.backend.triton.target import HARDWARE
from anyshape.compiler.gemm_epilogue import fuse_epilogues
from anyshape.kernel.loop_ir.parse import parse as parse_kernels
from anyshape.kernel.loop_ir.show import show as show_kernel
from anyshape.plan.ir.parse import parse
from anyshape.plan.ir.program import KernelStep, LibraryStep, Plan
from anyshape.plan.verify import verify
from anyshape.sym.expr import symbol

PLAN = """plan layer  arena 0
  where 1 <= n, n near 65536
  in      x: bf16[n, 64]  128*n bytes  steps 0-0
  in      w: bf16[512, 64]  65536 bytes  steps 0-0
  in      b: bf16[512]  1024 bytes  steps 0-1
  in      g: bf16[n, 512]  1024*n bytes  steps 0-1
  buffer  h: bf16[n, 512]  1024*n bytes  steps 0-1  arena
  buffer  y: bf16[n, 512]  1024*n bytes  steps 1-2  output 0
  0  matmul(x, w: bf16[64, 512] strides [1, 64]) -> h
  1  kernel k(h, b, g, &y; n)
       {reuse=[[0, 3], [2, 3]]}
  out     y
"""
KERNEL = """kernel k(p0: in bf16, p1: in bf16, p2: in bf16, p3: out bf16; n0)
  rows (i0: n0)
    columns (i1: 512) vector i1
      r0: f32 = load p0[512*i0 + i1]
      r1: f32 = load p1[i1]
      r2: f32 = load p2[512*i0 + i1]
      r3: f32 = add r0, r1
      r4: f32 = mul r3, r2
      store p3[512*i0 + i1] r4
"""
FLAT = """kernel k(p0: in bf16, p1: in bf16, p2: in bf16, p3: out bf16; n0)
  rows (i0: n0) vector i0
    row
      r0: f32 = load p0[i0]
      r1: f32 = load p2[i0]
      r2: f32 = mul r0, r1
      store p3[i0] r2
"""
OWN = hardware_of("", own_products=True)


def changed(text: str, parts: dict[str, str]) -> str:
    """The text with other parts, each of which it has."""
    for old, new in parts.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def fused(plan: str = PLAN, kernel: str = KERNEL, share: float = 1.0) -> tuple[Plan, str]:
    """The plan, and the text of the kernel that is new; "" where there is none."""
    given = parse(plan)
    verify(given)
    made, programs = fuse_epilogues(given, {"k": parse_kernels(kernel)[0][1]},
                                    dataclasses.replace(OWN, product_share=share))
    verify(made)
    assert len(programs) <= 1 and (programs or made == given)
    for program in programs.values():
        assert show_kernel(parse_kernels(show_kernel(program))[0][1]) == show_kernel(program)
        emit(program)
    return made, "".join(map(show_kernel, programs.values()))


def test_rows_and_columns() -> None:
    plan, text = fused()
    (step,) = plan.steps
    assert isinstance(step, KernelStep)
    assert [window.buffer for window in step.params] == ["x", "b", "g", "y", "w"] and step.outputs == (3,)
    assert step.reuse == ((2, 3),)
    assert "h" not in [b.name for b in plan.buffers] and (plan.buffers[1].first, plan.buffers[1].last) == (0, 0)
    assert "product t0: bf16 = p0[64; 1] @ p4[1; 64] over 64" in text and "r0: f32 = load t0[512*i0 + i1]" in text


def test_a_flat_kernel_goes_over_the_matrix() -> None:
    plan, text = fused(PLAN.replace("; n)", "; 512*n)"), FLAT)
    (step,) = plan.steps
    assert isinstance(step, KernelStep) and step.regimes[0].sizes == (512 * symbol("n"), symbol("n"))
    assert "rows (i0: n1)" in text and "columns (i0c: 512)" in text and "load t0[512*i0 + i0c]" in text


def test_sizes_of_a_product_become_those_of_the_kernel() -> None:
    """The inner dim and a stride, which the kernel alone does not know."""
    _, text = fused(changed(PLAN, {
        "1 <= n,": "1 <= k, 1 <= n,", "near 65536": "near 65536, k near 64",
        "x: bf16[n, 64]  128*n": "x: bf16[n, k]  2*k*n",
        "w: bf16[512, 64]  65536": "w: bf16[512, k]  1024*k",
        "bf16[64, 512] strides [1, 64]": "bf16[k, 512] strides [1, k]"}))
    assert "p0[n1; 1] @ p4[1; n1] over n1" in text and "; n0, n1)" in text


def test_an_addend_comes_before_the_rounding() -> None:
    plan, text = fused(changed(PLAN, {
        "matmul(x, w: bf16[64, 512] strides [1, 64])":
        "matmul_add(x, w: bf16[64, 512] strides [1, 64], b: bf16[n, 512] strides [0, 1] | alpha=1.0, beta=1.0)"}))
    (step,) = plan.steps
    assert isinstance(step, KernelStep) and [window.buffer for window in step.params] == ["x", "b", "g", "y", "w", "b"]
    assert "product t0: f32 = p0[64; 1] @ p4[1; 64] over 64" in text
    assert re.search(
        r"r5: f32 = load t0.*\n.*r6: f32 = load p5\[i1\]\n.*r7: f32 = add r5, r6\n.*r0: f32 = to_bf16 r7\n", text)


def test_what_pays() -> None:
    """Without a measured share, or where the result stays in a cache, or its sums are long, the library does it."""
    assert not HARDWARE.product_share and not hardware_of("gfx942", own_products=False).product_share
    assert hardware_of("sm_90", own_products=False).product_share == 0.84
    assert not fused(share=0.0)[1]
    assert fused(share=0.8)[1]
    assert not fused(PLAN.replace("near 65536", "near 1024"), share=0.8)[1]
    assert fused(PLAN.replace("near 65536", "near 1024"))[1]
    long = changed(PLAN, {
        "x: bf16[n, 64]  128*n": "x: bf16[n, 8192]  16384*n", "w: bf16[512, 64]  65536": "w: bf16[512, 8192]  8388608",
        "bf16[64, 512] strides [1, 64]": "bf16[8192, 512] strides [1, 8192]"})
    assert not fused(long, share=0.8)[1] and fused(long)[1]


READ_ELSEWHERE = {
    "it is returned": changed(PLAN, {"steps 0-1  arena": "steps 0-2  output 1", "out     y": "out     y, h"}),
    "a backward reads it": changed(PLAN, {
        "steps 0-1  arena": "steps 0-2  saved 0", "out     y": "out     y\n  saved   h"}),
    "another step reads it": changed(PLAN, {
        "steps 0-1  arena": "steps 0-2  arena", "steps 1-2  output 0": "steps 1-3  output 0",
        "b: bf16[512]  1024 bytes  steps 0-1": "b: bf16[512]  1024 bytes  steps 0-2",
        "g: bf16[n, 512]  1024*n bytes  steps 0-1": "g: bf16[n, 512]  1024*n bytes  steps 0-2",
        "  0  matmul": "  buffer  z: bf16[n, 512]  1024*n bytes  steps 2-3  output 1\n  0  matmul",
        "  out     y": "  2  kernel k(h, b, g, &z; n)\n  out     y, z"})}


@pytest.mark.parametrize("name", READ_ELSEWHERE)
def test_a_product_that_others_read_is_stored_too(name: str) -> None:
    """A pass that reads it is saved, which is worth half of what two are."""
    plan, text = fused(READ_ELSEWHERE[name])
    step = plan.steps[0]
    assert isinstance(step, KernelStep) and not any(isinstance(one, LibraryStep) for one in plan.steps)
    assert [window.buffer for window in step.params] == ["x", "b", "g", "y", "w", "h"] and step.outputs == (3, 5)
    assert "h" in [b.name for b in plan.buffers]
    assert "r0: f32 = load t0[512*i0 + i1]\n      store p5[512*i0 + i1] r0\n" in text
    assert fused(share=0.15)[1] and not fused(READ_ELSEWHERE[name], share=0.15)[1]


def test_a_sum_that_others_read_is_stored_as_it_is_rounded() -> None:
    _, text = fused(changed(READ_ELSEWHERE["it is returned"], {
        "matmul(x, w: bf16[64, 512] strides [1, 64])":
        "matmul_add(x, w: bf16[64, 512] strides [1, 64], b: bf16[n, 512] strides [0, 1] | alpha=1.0, beta=1.0)"}))
    assert re.search(r"r0: f32 = to_bf16 r7\n +store p6\[512\*i0 \+ i1\] r0\n", text)


OTHERS = {
    "it is read at other places": (PLAN, KERNEL.replace("load p0[512*i0 + i1]", "load p0[511 - i1 + 512*i0]")),
    "another step reads it before": (changed(READ_ELSEWHERE["another step reads it"], {
        "matmul(x, w: bf16[64, 512] strides [1, 64]) -> h\n": "matmul(x, w: bf16[64, 512] strides [1, 64]) -> h\n"
        "  1  aten.relu.default(h) -> z\n", "  1  kernel": "  2  kernel", "       {reuse=[[0, 3], [2, 3]]}\n": "",
        "  2  kernel k(h, b, g, &z; n)\n": "", "steps 1-3  output 0": "steps 2-3  output 0",
        "steps 2-3  output 1": "steps 1-3  output 1"}), KERNEL),
    "it is read twice, by two names": (changed(PLAN, {
        "(h, b, g, &y": "(h, b, h, &y", "g: bf16[n, 512]  1024*n bytes  steps 0-1":
        "g: bf16[n, 512]  1024*n bytes  steps 0-0"}), KERNEL),
    "columns are scanned": (PLAN, KERNEL.replace("r4: f32 = mul r3, r2", "r4: f32 = scan add r3")),
    "the kernel writes an operand": (changed(PLAN, {
        "(h, b, g, &y": "(h, b, g, &x", "x: bf16[n, 64]  128*n bytes  steps 0-0":
        "x: bf16[n, 64]  128*n bytes  steps 0-1", "steps 1-2  output 0": "steps 1-1  arena", "out     y": "out",
        "       {reuse=[[0, 3], [2, 3]]}\n": ""}), KERNEL),
    "f32 is exact in the library": (PLAN.replace("bf16", "f32"), KERNEL.replace("bf16", "f32")),
    "it is scaled": (PLAN.replace("-> h\n", "-> h\n       {attrs=[[\"alpha\", 2.0]]}\n"), KERNEL),
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_what_stays(name: str) -> None:
    plan, text = fused(*OTHERS[name])
    assert not text and any(isinstance(step, LibraryStep) for step in plan.steps)


def test_an_operand_is_not_written_over() -> None:
    """What the kernel reads beside the product is an operand of it: the result may not take its place."""
    square = changed(PLAN.replace("512", "64").replace("1024*n", "128*n"), {
        "near 65536": "near 1048576", "(h, b, g, &y": "(h, b, x, &y", "w: bf16[64, 64]  65536": "w: bf16[64, 64]  8192",
        "b: bf16[64]  1024": "b: bf16[64]  128",
        "x: bf16[n, 64]  128*n bytes  steps 0-0": "x: bf16[n, 64]  128*n bytes  steps 0-1",
        "g: bf16[n, 64]  128*n bytes  steps 0-1": "g: bf16[n, 64]  128*n bytes  steps 0-0"})
    plan, text = fused(square, KERNEL.replace("512", "64"))
    (step,) = plan.steps
    assert text and isinstance(step, KernelStep) and step.reuse == ()
