"""Products of one left operand run as one step of the host (plan/schedule/launch_grouping.py)."""
from __future__ import annotations

import pytest
import torch

import anyshape
from anyshape.backend.cpu.bytecode import format, products
from anyshape.backend.cpu.machine.target import host
from anyshape.ir.types import TensorType
from anyshape.plan.ir.home import Input, Temp
from anyshape.plan.ir.program import Buffer, LibraryStep, Plan, Window
from anyshape.plan.schedule.launch_grouping import MOST, group_launches
from anyshape.plan.verify import judge
from anyshape.runtime.inspect.touched_bytes import counted_peak
from anyshape.sym.facts import Facts

SIZES = [(96, 512, (512, 128, 100)), (20, 300, (64, 65, 700)), (700, 1700, (300, 70, 64)), (1, 40, (64, 64, 64)),
         (900, 130, (64, 33, 200)), (0, 5, (3, 4, 5)), (33, 150, (64, 0, 70)), (37, 0, (8, 9, 10)), (13, 1, (1, 2, 3))]


def several(x, a, b, c):
    return x @ a, x @ b.T, torch.relu(x @ c)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_side_by_side(dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    one = 2.0**-23 if dtype is torch.float32 else torch.finfo(dtype).eps / 2
    try:
        fast = anyshape.compile(several, strict=True, products="own")
        for rows, inner, columns in SIZES:
            x = torch.randn(rows, inner).to(dtype)
            a, b, c = (torch.randn(*shape).to(dtype) for shape in ((inner, columns[0]), (columns[1], inner),
                                                                   (inner, columns[2])))
            for found, weights in zip(fast(x, a, b, c), (a, b.T, c), strict=True):
                exact = x.double() @ weights.double()
                size = x.double().abs() @ weights.double().abs()
                exact = exact if weights is not c else exact.relu()
                assert found.shape == exact.shape
                assert ((found.double() - exact).abs() <= one * exact.abs() + (inner + 2) * 2.0**-23 * size
                        + 2.0**-25).all()
        assert fast.programs[0].compiled.plan.together == ((0, 3),)  # and the kernel behind them
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.skipif(
    not products.native("bf16", host()), reason="this processor's products are PyTorch's"))])
def test_the_host_gets_one_step(dtype):
    fast = anyshape.compile(several, strict=True, products="own")
    x, a, b, c = (torch.randn(*shape).to(dtype) for shape in ((96, 512), (512, 128), (64, 512), (512, 100)))
    fast(x, a, b, c)
    executable = fast.programs[0].compiled.executable
    (record,) = executable.specializations.values()
    ops, at = [], record.payload.words[format.HEAD_FIRST]
    while record.payload.words[at] != format.END:  # the head of a series, then what is in it
        ops.append((record.payload.words[at], record.payload.words[at + 1] // format.MATMUL_DIMS))
        at += record.payload.words[at + 1]
    assert ops == [(format.SERIES, 0), (format.PRODUCT, 3), (format.KERNEL, 0)]
    assert counted_peak(executable.ran(record).plan, record) == record.arena


def plan_of(*steps: tuple[str, ...]) -> Plan:
    """Products (left, right, result) of 8 by 8."""
    kind = TensorType("bf16", (8, 8))
    names = dict.fromkeys(name for step in steps for name in step)
    made = {step[-1]: position for position, step in enumerate(steps)}
    buffers = tuple(Buffer(name, 256, Temp() if name in made else Input(i),
                           made.get(name, 0), max(i for i, step in enumerate(steps) if name in step))
                    for i, name in enumerate(names))
    return Plan("test", (), (), (), buffers,
                tuple(LibraryStep("matmul_add" if len(step) > 3 else "matmul",
                                  tuple(Window(name, kind) for name in step[:-1]), (Window(step[-1], kind),))
                      for step in steps), (), 0, Facts())


@pytest.mark.parametrize("steps, runs", [
    ([("x", "a", "p"), ("x", "b", "q"), ("x", "c", "r")], ((0, 2),)),
    ([("x", "a", "p"), ("y", "b", "q"), ("y", "c", "r")], ((1, 2),)),
    ([("x", "a", "p"), ("x", "p", "q"), ("x", "c", "r")], ((1, 2),)),  # the second reads the first
    ([("x", "a", "p"), ("x", "b", "p", "q")], ()),  # adds it
    ([("x", "a", "p"), ("x", "b", "a")], ()),  # writes where the first reads
    ([("x", "a", "p"), ("x", "b", "q", "q")], ((0, 1),)),  # written over its own addend
    ([("x", chr(97 + i), chr(65 + i)) for i in range(MOST + 1)], ((0, MOST - 1),)),
], ids=str)  # fmt: skip
def test_what_runs_together(steps, runs):
    plan = group_launches(plan_of(*steps))
    assert plan.together == runs
    for first, last in runs:
        touched = {name for step in steps[first:last + 1] for name in step}
        for buffer in plan.buffers:
            if buffer.name in touched:
                assert buffer.first <= first and buffer.last >= last


def test_what_dies_between_is_not_written_over():
    """Without the longer lives, q would lie where the weights of the first product were."""
    plan = plan_of(("x", "w", "a"), ("x", "a", "p"), ("x", "b", "q"), ("p", "q", "r"))
    longer = group_launches(plan)
    lives = {b.name: (b.first, b.last) for b in longer.buffers}
    assert longer.together == ((1, 2),) and lives["a"] == (0, 2) and lives["q"] == (1, 3)
    assert judge(longer, {}, {"a": 0, "p": 256, "q": 512, "r": 0}, 768, 0) == 768
