"""Executables of plans written by hand: matrix products, copies, PyTorch operators, kernels, tapes, many threads."""
from __future__ import annotations

import dataclasses
import gc
import re
import resource
import sys
import threading

import pytest
import torch

from anyshape.backend.cpu.codegen.kernel import emit
from anyshape.backend.cpu.llvm import jit
from anyshape.backend.cpu.machine.target import host
from anyshape.base import counters
from anyshape.base.align import LARGE_PAGE
from anyshape.base.errors import AnyShapeError, InputError
from anyshape.ir.types import TensorType
from anyshape.kernel.loop_ir.directives import Vectorize
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram, Param, Stage
from anyshape.plan.ir.context import PlanContext
from anyshape.plan.ir.home import External, Input, Output, Restored, Saved, Temp
from anyshape.plan.ir.program import Buffer, CopyStep, ExternStep, KernelStep, LibraryStep, Plan, Regime, Window
from anyshape.plan.memory.symbolic_allocator import allocate
from anyshape.plan.verify import judge
from anyshape.runtime.call.executable import Executable
from anyshape.runtime.context.process_context import Context, shared_context
from anyshape.runtime.driver.numpy_driver import NumpyDriver
from anyshape.runtime.inspect.touched_bytes import counted_peak
from anyshape.runtime.inspect.watermark import watched
from anyshape.runtime.memory import huge_pages
from anyshape.runtime.memory.pools import Pool
from anyshape.runtime.memory.tape import Tape
from anyshape.sym.expr import symbol
from anyshape.sym.facts import Facts
from anyshape.torch_compat.dtypes import TORCH_DTYPES
from anyshape.torch_compat.versions import api

b, m, k, n = (symbol(name) for name in "bmkn")


def tensor(*shape, strides=None, dtype="f32"):
    return TensorType(dtype, shape, strides)


def plan_of(name, inputs, outputs, buffers, steps, saved=(), restored=(), facts=None):
    """A plan whose buffers are (name, type, home); lifetimes are read off the steps."""
    first, last = {}, {}
    for number, step in enumerate(steps):
        for window in windows_of(step):
            first.setdefault(window.buffer, number)
            last[window.buffer] = number
    for window in (*outputs, *saved):
        if isinstance(window, Window):
            last[window.buffer] = len(steps)
    made = tuple(Buffer(label, kind.bytes, home, first.get(label, 0), last.get(label, 0))
                 for label, kind, home in buffers)
    return Plan(name, inputs, outputs, saved, made, tuple(steps), (), 0, facts or Facts(), restored)


def windows_of(step):
    if isinstance(step, KernelStep):
        return step.params
    if isinstance(step, CopyStep):
        return step.source, step.target
    return [w for w in (*step.inputs, *step.outputs) if isinstance(w, Window)]


def matmul_plan(left, right, out, bias=None, attrs=(), dtype="f32"):
    inputs = [left, right] + ([bias] if bias else [])
    windows = tuple(Window(f"in{i}", kind) for i, kind in enumerate(inputs))
    step = LibraryStep("matmul", windows, (Window("out", out),), attrs)
    buffers = [(f"in{i}", kind, Input(i)) for i, kind in enumerate(inputs)] + [("out", out, Output(0))]
    return allocate(plan_of("product", tuple(inputs), (Window("out", out),), buffers, [step]))


def test_inputs_of_fixed_sizes_are_looked_at_at_every_call():
    """After the first call in one question to torch; what is not as it was gets the answers of the first call."""
    run = Executable(matmul_plan(tensor(n, 8), tensor(8, 4), tensor(n, 4)))
    x, w = torch.randn(3, 8), torch.randn(8, 4)
    fits = (w, w, torch.randn(8, 4), torch.randn(4, 8).t(), torch.randn(16, 8)[::2, ::2],
            torch.nn.Parameter(torch.randn(8, 4)))
    misfits = (torch.randn(4, 8), torch.randn(8, 5), torch.randn(32), torch.randn(8, 4).double(),
               torch.randn(8, 4, device="meta"), 3, None)
    for _ in range(2):
        for fit in fits:
            torch.testing.assert_close(run([x, fit])[0], (x @ fit).detach())
            with torch.inference_mode():
                torch.testing.assert_close(run([x.clone(), fit.clone()])[0], (x @ fit).detach())
        for wrong in misfits:
            with pytest.raises(InputError):
                run([x, wrong])


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16", "i64"])
@pytest.mark.parametrize("sizes", [(2, 3, 4, 5), (1, 1, 1, 1), (0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0),
                                   (7, 64, 96, 33), (1, 5, 1, 1), (70, 3, 8, 5), (3, 1, 9, 6),
                                   (66, 6, 9, 1)])
@pytest.mark.parametrize("kind", ["plain", "vector", "rows", "transposed", "result", "bias", "broadcast"])
def test_matmul(dtype, sizes, kind):
    batch, rows, inner, columns = sizes
    torch_dtype = TORCH_DTYPES[dtype]

    def random(*shape):
        return torch.randint(-4, 5, shape).to(torch_dtype)

    x, y, bias, attrs = random(batch, rows, inner), random(batch, inner, columns), None, ()
    left, right, out = (tensor(b, m, k, dtype=dtype), tensor(b, k, n, dtype=dtype), tensor(b, m, n, dtype=dtype))
    addend = None
    if kind == "vector":
        y, right, out = random(inner), tensor(k, dtype=dtype), tensor(b, m, dtype=dtype)
    elif kind == "rows":
        y, right = random(inner, columns), tensor(k, n, dtype=dtype)
    elif kind == "transposed":
        x, y = random(batch, inner, rows).transpose(1, 2), random(batch, columns, inner).transpose(1, 2)
        left = tensor(b, m, k, strides=(m * k, 1, m), dtype=dtype)
        right = tensor(b, k, n, strides=(n * k, 1, k), dtype=dtype)
    elif kind == "result":
        out = tensor(b, m, n, strides=(m * n, 1, m), dtype=dtype)
    elif kind == "bias":
        bias, addend, attrs = random(columns), tensor(n, dtype=dtype), (("beta", 2), ("alpha", 3))
    elif kind == "broadcast":
        x, left = random(rows, inner), tensor(m, k, dtype=dtype)
    wanted = torch.matmul(x.double(), y.double())  # exact
    if addend is not None:
        wanted = 3 * wanted + 2 * bias
    wanted = wanted.to(torch_dtype)  # rounded once
    run = Executable(matmul_plan(left, right, out, addend, attrs, dtype))
    (found,) = run([x, y] + ([bias] if addend else []))
    assert torch.equal(found, wanted)
    if kind == "result" and found.numel() and rows > 1 and columns > 1:
        assert found.stride() == (rows * columns, 1, rows)


def test_matmul_uses_the_library_in_place():
    """Float products never come back into Python."""
    run = Executable(matmul_plan(tensor(b, m, k), tensor(k, n), tensor(b, m, n)))
    x, y = torch.randn(4, 16, 32), torch.randn(32, 8)
    for threads in (1, 2):
        run.threads = threads
        torch.testing.assert_close(run([x, y])[0], x @ y)
    assert not run.record(x, y).payload.calls
    batch = Executable(matmul_plan(tensor(b, m, k), tensor(b, k, n), tensor(b, m, n)))
    x, y = torch.randn(9, 64, 32), torch.randn(9, 32, 48)
    batch.threads = 2
    torch.testing.assert_close(batch([x, y])[0], x @ y)


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16"])
@pytest.mark.parametrize("few", [1, 2, 3, 4, 5, 8, 9])
def test_matrix_with_few_vectors(few, dtype):
    """Either operand is the matrix, stored either way, its rows shared out among threads; with and without addend."""
    torch_dtype = TORCH_DTYPES[dtype]
    for inner, many in ((300, 2100), (1, 70), (17, 5000)):
        for left, right in (((few, inner), (inner, many)), ((many, inner), (inner, few))):
            for turned in (False, True):
                x = torch.randint(-4, 5, left).to(torch_dtype)
                y = torch.randint(-4, 5, right[::-1] if turned else right).to(torch_dtype)
                bias = torch.randint(-4, 5, right[1:]).to(torch_dtype)
                strides = (1, k) if turned else None
                for addend, attrs in ((None, ()), (tensor(n, dtype=dtype), (("beta", 2), ("alpha", 3)))):
                    run = Executable(matmul_plan(tensor(m, k, dtype=dtype), tensor(k, n, strides=strides, dtype=dtype),
                                                 tensor(m, n, dtype=dtype), addend, attrs, dtype), threads=3)
                    y_seen = y.T if turned else y
                    exact = x.double() @ y_seen.double()
                    wanted = (exact if addend is None else 3 * exact + 2 * bias).to(torch_dtype)
                    assert torch.equal(run([x, y_seen] + ([bias] if addend else []))[0], wanted)


# ---- kernels


def built(*programs):
    return jit.build([emit(program, host()) for program in programs], host())


def add_program(name="add_rows"):
    """out[i, j] = x[i, j] + y[j]"""
    i, j, columns = symbol("i"), symbol("j"), symbol("columns")
    body = (Instruction(0, "load", buffer="x", offset=i * columns + j), Instruction(1, "load", buffer="y", offset=j),
            Instruction(2, "add", (0, 1)), Instruction(3, "store", (2,), buffer="out", offset=i * columns + j))
    params = (Param("x", "f32", "in"), Param("y", "f32", "in"), Param("out", "f32", "out"))
    return LoopProgram(name, params, ("rows", "columns"), (("i", symbol("rows")),), (("j", columns),),
                       (Vectorize("j"),), (Stage("column", body),))


def add_step(kernel, x, y, out, rows, columns):
    return KernelStep((Regime(kernel, (), (rows, columns)),), (x, y, out), (2,), "model.py:1")


def chain_plan(length, saved=False):
    """x + y, `length` times, each step into a new buffer; the last is the output, every second one is saved."""
    x, y = Window("x", tensor(m, n)), Window("y", tensor(n))
    steps, buffers, kept = [], [("x", x.type, Input(0)), ("y", y.type, Input(1))], []
    before = x
    for number in range(length):
        label = f"t{number}"
        home = Output(0) if number == length - 1 else Saved(len(kept)) if saved and number % 2 else Temp()
        window = Window(label, tensor(m, n))
        buffers.append((label, window.type, home))
        if isinstance(home, Saved):
            kept.append(window)
        steps.append(add_step("add_rows", before, y, window, m, n))
        before = window
    entries = (*kept, x, m) if saved else ()
    return plan_of("chain", (x.type, y.type), (before,), buffers, steps, entries)


@pytest.mark.parametrize("shape", [(3, 5), (0, 5), (5, 0), (1, 1), (300, 257)])
@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_in_the_arena(shape, threads):
    plan = allocate(chain_plan(5))
    run = Executable(plan, built(add_program()), threads=threads)
    x, y = torch.randn(shape), torch.randn(shape[1])
    args = [x, y]
    (found,) = run(args)
    assert args == []
    torch.testing.assert_close(found, x + y + y + y + y + y)
    record = run.record(x, y)
    judge(plan, record.values, record.offsets, record.arena, record.kept)
    assert counted_peak(run.ran(record).plan, record) == record.arena
    assert record.arena == 2 * (-(-x.numel() * 4 // 64) * 64)  # two buffers, turn by turn


def test_what_is_written_of_the_arena_is_counted_in_memory():
    for plan in (allocate(chain_plan(5)), allocate(chain_plan(5, saved=True))):
        run = Executable(plan, built(add_program()))
        x, y = torch.randn(33, 17), torch.randn(17)
        before = run.context
        with watched(run) as seen:
            found = run([x, y])
            run([x[:1], y])
        torch.testing.assert_close(found[0], x + y + y + y + y + y)
        assert [one.counted for one in seen] == [one.record.arena for one in seen]
        assert [one.counted for one in seen] == [run.specializer.arena(one.record.values) for one in seen]
        assert seen[0].counted > seen[1].counted > 0
        assert run.context is before and before.profiler.runs is None


def test_counting_in_memory_does_not_believe_the_plan():
    plan = allocate(chain_plan(5))
    run = Executable(dataclasses.replace(plan, arena=plan.arena + 64), built(add_program()))
    with watched(run) as seen:
        run([torch.randn(100, 100), torch.randn(100)])
    assert seen[0].counted == seen[0].record.arena - 64


def test_other_strides_are_copied():
    run = Executable(allocate(chain_plan(2)), built(add_program()))
    x, y = torch.randn(5, 3).t(), torch.randn(10)[::2]
    torch.testing.assert_close(run([x, y])[0], x + y + y)


def test_regimes():
    few = Regime("small", (8 - n,), (m, n))
    many = Regime("large", (), (m, n))
    small, large = add_program("small"), add_program("large")
    doubled = tuple(Instruction(1, "load", buffer="x", offset=one.offset + 0) if one.buffer == "y" else one
                    for one in large.stages[0].instructions)
    offset = small.stages[0].instructions[0].offset
    doubled = tuple(Instruction(1, "load", buffer="x", offset=offset) if one.result == 1 else one for one in doubled)
    large = LoopProgram("large", large.params, large.sizes, large.rows, large.columns, (Vectorize("j"),),
                        (Stage("column", doubled),))
    windows = (Window("x", tensor(m, n)), Window("y", tensor(n)), Window("out", tensor(m, n)))
    step = KernelStep((few, many), windows, (2,))
    buffers = [("x", tensor(m, n), Input(0)), ("y", tensor(n), Input(1)), ("out", tensor(m, n), Output(0))]
    plan = allocate(plan_of("choice", (tensor(m, n), tensor(n)), (windows[2],), buffers, [step]))
    run = Executable(plan, built(small, large))
    for size, wanted in ((8, lambda x, y: x + y), (9, lambda x, y: x + x)):
        x, y = torch.randn(3, size), torch.randn(size)
        torch.testing.assert_close(run([x, y])[0], wanted(x, y))


def test_a_failed_check_raises_index_error():
    i = symbol("i")
    body = (Instruction(0, "load", dtype="i64", buffer="index", offset=i),
            Instruction(1, "constant", dtype="i64", value=10), Instruction(2, "lt", (0, 1), "bool"),
            Instruction(3, "check", (2,), buffer="status", value=1), Instruction(4, "store", (0,), "i64", "out", i))
    params = (Param("index", "i64", "in"), Param("status", "i64", "out"), Param("out", "i64", "out"))
    program = LoopProgram("checked", params, ("rows",), (("i", symbol("rows")),), (), (Vectorize("i"),),
                          (Stage("row", body),))
    kind = tensor(n, dtype="i64")
    step = KernelStep((Regime("checked", (), (n,)),),
                      (Window("index", kind), Window("status", tensor(dtype="i64")), Window("out", kind)), (1, 2),
                      "model.py:7")
    plan = plan_of("lookup", (kind,), (Window("out", kind),),
                   [("index", kind, Input(0)), ("out", kind, Output(0))], [step])
    run = Executable(allocate(plan), built(program))
    index = torch.arange(10)
    assert torch.equal(run([index])[0], index)
    with pytest.raises(IndexError, match=r"model\.py:7"):
        run([index + 1])
    assert torch.equal(run([index])[0], index)


# ---- PyTorch's operators, copies


def extern_plan(target="aten.cumsum.default", result=None):
    """out = op(x + y) copied through a transposed buffer into the input `into`."""
    x, y = Window("x", tensor(m, n)), Window("y", tensor(n))
    h, c = Window("h", tensor(m, n)), Window("c", tensor(m, n, strides=result))
    into = Window("into", tensor(n, m))
    turned = Window("into", tensor(m, n, strides=(1, m)))
    template = (("args", ("operand", 0), ("int", 1)), ("kwargs",))
    steps = [add_step("add_rows", x, y, h, m, n), ExternStep(target, (h,), template, (c,), "model.py:3"),
             add_step("add_rows", Window("c", tensor(m, n, strides=result)), y, Window("out", tensor(m, n)), m, n),
             CopyStep(h, turned)]
    buffers = [("x", x.type, Input(0)), ("y", y.type, Input(1)), ("into", into.type, Input(2)),
               ("h", h.type, Temp()), ("c", c.type, External()), ("out", x.type, Output(0))]
    return allocate(plan_of("mixed", (x.type, y.type, into.type), (Window("out", x.type), c, n), buffers, steps))


@pytest.mark.parametrize("shape", [(3, 5), (0, 5), (5, 0), (200, 300)])
def test_operators_of_torch_and_copies(shape):
    run = Executable(extern_plan(), built(add_program()))
    x, y = torch.randn(shape, requires_grad=True), torch.randn(shape[1])
    into = torch.zeros(shape[::-1])
    out, middle, size = run([x, y, into])
    wanted = torch.cumsum(x + y, 1).detach()
    torch.testing.assert_close(middle, wanted)
    torch.testing.assert_close(out, wanted + y)
    torch.testing.assert_close(into, (x + y).t().detach())
    assert size == shape[1] and not out.requires_grad and torch.is_grad_enabled()


def test_a_copy_goes_back_into_an_input_of_other_strides():
    run = Executable(extern_plan(), built(add_program()))
    x, y, into = torch.randn(3, 4), torch.randn(4), torch.zeros(8, 6)[::2, ::2]
    run([x, y, into])
    torch.testing.assert_close(into, (x + y).t())


def test_an_operator_that_returns_its_operand_does_not_leak_the_arena():
    plan = extern_plan("aten.narrow.default")
    steps = list(plan.steps)
    template = (("args", ("operand", 0), ("int", 0), ("int", 0), ("int", 3)), ("kwargs",))
    steps[1] = ExternStep("aten.narrow.default", steps[1].inputs, template, steps[1].outputs)
    run = Executable(Plan(*[getattr(plan, f) if f != "steps" else tuple(steps) for f in plan.__slots__]),
                     built(add_program()))
    x, y, into = torch.randn(3, 4), torch.randn(4), torch.zeros(4, 3)
    _, middle, _ = run([x, y, into])
    wanted = (x + y).clone()
    run([x + 1, y, into])
    torch.testing.assert_close(middle, wanted)


def test_an_error_in_an_operator_comes_out_and_nothing_is_lost():
    context = Context()
    plan = extern_plan()
    steps = list(plan.steps)
    template = (("args", ("operand", 0), ("int", 7)), ("kwargs",))
    steps[1] = ExternStep("aten.cumsum.default", steps[1].inputs, template, steps[1].outputs, "model.py:3")
    run = Executable(Plan(*[getattr(plan, f) if f != "steps" else tuple(steps) for f in plan.__slots__]),
                     built(add_program()), context)
    with pytest.raises(IndexError):
        run([torch.randn(3, 4), torch.randn(4), torch.zeros(4, 3)])
    assert len(context.temporary.free) == 1 and not context.host.running


# ---- what does not fit


@pytest.mark.parametrize("args, words", [
    (lambda: [torch.randn(3, 4)], "takes 2 arguments"),
    (lambda: [torch.randn(3, 4), torch.randn(5)], "input 1 .*sizes are"),
    (lambda: [torch.randn(3, 4), torch.randn(4, 1)], "input 1 .*dims"),
    (lambda: [torch.randn(3, 4), torch.randn(4).double()], "input 1 .*dtype is f64"),
    (lambda: [torch.randn(3, 4), 7], "input 1 .*got int"),
    (lambda: [torch.randn(3, 4).to("meta"), torch.randn(4)], "on meta"),
])
def test_what_does_not_fit_is_refused_in_words(args, words):
    run = Executable(allocate(chain_plan(2)), built(add_program()))
    run([torch.randn(3, 4), torch.randn(4)])
    with pytest.raises(InputError) as caught:
        run(args())
    assert re.search(words, str(caught.value), re.DOTALL), caught.value


def test_ranges_are_checked():
    plan = chain_plan(2)
    plan = allocate(Plan(*[getattr(plan, f) if f != "facts" else Facts((("m", 2, 8),)) for f in plan.__slots__]))
    run = Executable(plan, built(add_program()))
    run([torch.randn(2, 4), torch.randn(4)])
    with pytest.raises(InputError, match="m is 9"):
        run([torch.randn(9, 4), torch.randn(4)])


# ---- tapes


def pair(length=6):
    forward = allocate(chain_plan(length, saved=True))
    kept = [w for w in forward.saved if isinstance(w, Window)]
    # backward: adds up its tape and the gradient, into buffers that may lie where dead tape entries were
    y, grad = Window("y", tensor(n)), Window("g", tensor(m, n))
    buffers = [(f"s{i}", w.type, Restored(i)) for i, w in enumerate(kept)]
    buffers += [("g", grad.type, Input(len(kept) + 1)), ("y", y.type, Input(len(kept) + 2))]
    steps, before = [], grad
    for i in range(len(kept)):
        home = Output(0) if i == len(kept) - 1 else Temp()
        window = Window(f"r{i}", tensor(m, n))
        buffers.append((window.buffer, window.type, home))
        params = (before, Window(f"s{i}", tensor(m, n)), window)
        steps.append(KernelStep((Regime("add_all", (), (m, n)),), params, (2,)))
        before = window
    inputs = (*[w.type for w in kept], "m", grad.type, y.type)
    plan = plan_of("back", inputs, (before,), buffers, steps, (), tuple(range(len(kept) + 1)))
    return forward, allocate(plan, PlanContext(forward=forward))


def add_all_program():
    program = add_program("add_all")
    offset = program.stages[0].instructions[0].offset
    body = tuple(Instruction(1, "load", buffer="y", offset=offset) if one.result == 1 else one
                 for one in program.stages[0].instructions)
    return LoopProgram("add_all", program.params, program.sizes, program.rows, program.columns, (Vectorize("j"),),
                       (Stage("column", body),))


def expected(x, y, grad, length=6):
    values, now = [], x
    for number in range(length - 1):
        now = now + y
        if number % 2:
            values.append(now)
    return sum(values, grad + x)


def test_forward_and_backward_share_the_kept_block():
    context = Context()
    forward, backward = pair()
    kernels = built(add_program(), add_all_program())
    run, back = Executable(forward, kernels, context), Executable(backward, kernels, context, forward)
    tapes = []
    shapes = [(4, 7), (0, 7), (33, 65), (4, 7)]
    for shape in shapes:
        x, y = torch.randn(shape), torch.randn(shape[1])
        out, tape = run([x, y])
        torch.testing.assert_close(out, x + 6 * y)
        assert isinstance(tape, Tape) and tape.values[-1] == shape[0]
        tapes.append((tape, x, y))
    assert len({t.owner.block.address for t, x, _ in tapes if x.numel()}) == 3  # each forward waits in its own block
    for tape, x, y in reversed(tapes):
        grad = torch.randn_like(x)
        record = back.record(tape, grad, y)
        judge(backward, record.values, record.offsets, record.arena, record.kept)
        # r1 lies in the place of a tape entry that is not needed any more
        assert record.overwrites == (record.offsets["r1"] < record.kept) == (x.numel() > 0)
        for _ in range(2):  # outside autograd the tape stays
            (found,) = back([tape, grad, y])
            torch.testing.assert_close(found, expected(x, y, grad))
        tape.release()
    assert len(context.kept.free) >= 3
    with pytest.raises(RuntimeError, match="second time"):
        back([tapes[0][0], tapes[0][1], tapes[0][2]])


def test_a_backward_takes_a_tape_of_plain_tensors():
    forward, backward = pair()
    back = Executable(backward, built(add_program(), add_all_program()), forward=forward)
    x, y = torch.randn(5, 6), torch.randn(6)
    values, now = [], x
    for number in range(5):
        now = now + y
        if number % 2:
            values.append(now)
    tape = Tape([*values, x, 5])
    torch.testing.assert_close(back([tape, x, y])[0], expected(x, y, x))


def test_the_tape_notices_changes_of_inputs():
    forward, backward = pair()
    kernels = built(add_program(), add_all_program())
    run, back = Executable(forward, kernels), Executable(backward, kernels, forward=forward)
    x, y = torch.randn(4, 4), torch.randn(4)
    _, tape = run([x, y])
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        back([tape, torch.randn(4, 4), y])


# ---- the arena, threads


def test_the_arena_does_not_grow_with_the_number_of_shapes():
    context = Context()
    run = Executable(allocate(chain_plan(4)), built(add_program()), context)
    generator = torch.Generator().manual_seed(1)
    for _ in range(700):
        rows, columns = torch.randint(0, 40, (2,), generator=generator).tolist()
        run([torch.zeros(rows, columns), torch.zeros(columns)])
    largest = max(record.arena for record in run.specializations.values())
    assert len(context.temporary.free) == 1
    assert context.temporary.held <= -(-max(largest, 2 * 39 * 39 * 4 + 128) // 4096) * 4096
    assert len(run.specializations) <= 512


@pytest.mark.unguarded
def test_idle_memory_is_given_back():
    pool = Pool()
    before = counters.stats()["arena_bytes"]
    pool.give(pool.take(1 << 24))
    assert counters.stats()["arena_bytes"] - before == 1 << 24
    for _ in range(600):
        pool.give(pool.take(1 << 12))
    assert pool.held < 1 << 24 and counters.stats()["arena_bytes"] - before == pool.held
    pool.release_idle()
    assert pool.held == 0 and counters.stats()["arena_bytes"] == before


@pytest.mark.unguarded
def test_a_block_goes_before_its_successor_comes():
    pool = Pool()
    for size in (1 << 20, 1 << 21, (1 << 21) + 4096, 1 << 24):
        pool.give(pool.take(size))
        assert pool.peak == pool.held == size


@pytest.mark.unguarded
@pytest.mark.skipif(sys.platform != "linux", reason="pages are moved by mremap")
def test_a_larger_block_takes_over_the_pages_of_the_one_before():
    """What a shape greater than all before touches for the first time is bounded by what it needs more; torch's
    allocator sees one block go and another one come."""
    pool = Pool()
    with api.allocations() as counted:
        block = pool.take(48 << 20)
        block.tensor.fill_(7)
        pool.give(block)
        del block
        block = pool.take((49 << 20) + 4096)
    assert [bytes_ for bytes_ in counted if bytes_] == [48 << 20, -(48 << 20), (49 << 20) + 4096]
    assert pool.peak == pool.held == (49 << 20) + 4096
    handed = int((block.tensor == 7).sum())
    # all but the ends, where the block does not have whole large pages
    assert handed >= (48 << 20) - 2 * LARGE_PAGE
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block.tensor.fill_(8)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults <= (block.bytes - handed) // 4096 + 64
    assert int((block.tensor == 8).sum()) == block.bytes


@pytest.mark.unguarded
def test_an_arena_of_numpy_is_of_whole_large_pages():
    """From half of one on, so that a size a little greater needs no other, and one page is touched instead of 512."""
    pool = Pool(NumpyDriver(1))
    small = pool.take(LARGE_PAGE // 2 - 4096)
    assert small.bytes == LARGE_PAGE // 2 - 4096
    for bytes_, pages in ((LARGE_PAGE // 2, 1), (LARGE_PAGE, 1), (LARGE_PAGE + 1, 2)):
        block = pool.take(bytes_)
        assert block.bytes == len(block.tensor) == pages * LARGE_PAGE and block.address % LARGE_PAGE == 0
        pool.give(block)
        assert pool.held == small.bytes + block.bytes and pool.take(block.bytes) is block
        pool.give(block)
        del block


@pytest.mark.unguarded
@pytest.mark.skipif(sys.platform != "linux", reason="pages are moved by mremap")
def test_pages_of_a_block_whose_successor_does_not_come_go_back():
    pool = Pool()
    block = pool.take(48 << 20)
    block.tensor.fill_(7)
    pool.give(block)
    del block
    before = huge_pages.resident()
    with pytest.raises(AnyShapeError, match="no memory") as error:
        pool.take(1 << 60)
    assert error.value.__traceback__ is not None  # whoever holds the error holds no memory
    assert pool.held == 0 and huge_pages.resident() <= before - (44 << 20)


def test_calls_from_many_threads():
    run = Executable(extern_plan(), built(add_program()))
    wrong = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(60):
            rows, columns = torch.randint(1, 30, (2,), generator=generator).tolist()
            x, y = torch.randn(rows, columns, generator=generator), torch.randn(columns, generator=generator)
            out, _, _ = run([x, y, torch.zeros(columns, rows)])
            if not torch.allclose(out, torch.cumsum(x + y, 1) + y, atol=1e-4):
                wrong.append((seed, rows, columns))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


def test_a_program_without_steps():
    x = Window("x", tensor(n))
    run = Executable(allocate(plan_of("nothing", (x.type,), (x, n, None, 3), [("x", x.type, Input(0))], [])))
    given = torch.randn(4)
    found = run([given])
    assert found[0] is given and found[1:] == [4, None, 3]


# ---- the context


def test_the_context_is_shared_and_memory_is_counted():
    assert shared_context() is shared_context()
    gc.collect()
    counters.reset()
    run = Executable(allocate(chain_plan(3)), built(add_program()))
    run([torch.zeros(3, 4), torch.zeros(4)])
    counted = counters.stats()
    assert (counted["programs"], counted["runs"], counted["plans"], counted["kernels"]) == (1, 1, 1, 1)
    assert counted["arena_peak_bytes"] >= counted["arena_bytes"] >= 0
