"""Epilogue fusion into GEMMs: a product whose result a pointwise kernel reads first becomes a part of that kernel,
which computes it in tiles, and stores it only where somebody else reads it, too: a later step, a backward, the caller.

before:
    0  matmul(x, w) -> h                                    k0: rows (i0: n0), columns (i1: 512)
    1  kernel k0(h, bias, &y; n)                                  r0: f32 = load p0[512*i0 + i1] ...
after fuse_epilogues:
    0  kernel k1(x, bias, &y, w; n)                         k1: product t0: bf16 = p0[64; 1] @ p3[1; 64] over 64
                                                                  r0: f32 = load t0[512*i0 + i1] ...

Where h is saved for a backward, k1 has one more output, `store p4[512*i0 + i1] r0`: the value as it is rounded.

An addend (`matmul_add`) becomes a part of the kernel, too, before the sum is rounded.

What is saved: a pass that reads the result, and one that writes it, where nobody else reads it. What it costs: the
target's own product in place of a library's, which knows the machine better. With bytes and operations a second, of an
element of the result

    saved   passes * (bytes of an element) / bandwidth   only where the result does not stay in a cache
    lost    2 * (terms of its sum) / (operations a second) * (1 / share - 1)

where `share` is the speed of own products, of the library's. So it pays for short sums and large results. A target for
which no share was measured keeps to its library. The result is rounded as it would be in memory: the numbers that
kernels see are the same but for the order of sums.

It is done before kernels are printed, for it makes new ones; so it is no pass of `PLAN_ROAD`.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from anyshape.ir.graph import Attr
from anyshape.ir.types import size_of
from anyshape.kernel.loop_ir.directives import SPANNING, Product, Vectorize
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram, Param, Stage
from anyshape.kernel.loop_ir.show import content_name
from anyshape.kernel.schedule.hardware_params import HardwareParams
from anyshape.plan.ir.program import KernelStep, LibraryStep, Plan, Regime, step_writes, touched
from anyshape.plan.memory.mutation_copy_elision import permuted, without
from anyshape.sym.expr import Size, product, substitute, symbol, symbols_of

PLAIN = (("alpha", 1.0), ("beta", 1.0))  # attributes of a product with an addend that is not scaled
DTYPES = ("bf16", "f16")  # that tensor cores multiply without further rounding
RESULT = "t0"  # the product in the kernel that computes it

Programs = Mapping[str, LoopProgram]


def fuse_epilogues(plan: Plan, programs: Programs, hardware: HardwareParams) -> tuple[Plan, dict[str, LoopProgram]]:
    """`plan` (as assembled) with such pairs as one kernel, where the kernel stands; and the kernels that are new.
    programs: of the plan's kernels, by name."""
    if not hardware.product_share:
        return plan, {}
    makers = {window.buffer: k for k, step in enumerate(plan.steps) for window in step_writes(step)}
    readers: dict[str, list[int]] = {}
    for k, step in enumerate(plan.steps):
        for name in {window.buffer for window in touched(step)}:
            readers.setdefault(name, []).append(k)
    inside = {b.name for b in plan.buffers if b.is_temp}
    stored = {b.name for b in plan.buffers if b.is_saved or b.is_output}
    steps = [*plan.steps]
    left_out: set[int] = set()
    gone: set[str] = set()
    found: dict[str, LoopProgram] = {}
    for k, kernel in enumerate(plan.steps):
        if not isinstance(kernel, KernelStep):
            continue
        for place in sorted(range(len(kernel.params)), key=lambda one: -makers.get(kernel.params[one].buffer, -1)):
            name = kernel.params[place].buffer
            first = makers.get(name, k)
            made = plan.steps[first]
            alone = name in inside and readers[name] == [first, k]
            if (name not in inside | stored or readers[name][:2] != [first, k] or not isinstance(made, LibraryStep)
                    or sum(window.buffer == name for window in kernel.params) > 1
                    or not _pays(made, plan, hardware, 2 if alone else 1)):
                continue
            written = {window.buffer for step in plan.steps[first + 1:k + 1] for window in step_writes(step)}
            if written & {window.buffer for window in made.inputs}:
                continue
            pair = _fused(kernel, place, made, programs, alone)
            if pair is not None:
                steps[k], program = pair
                found[program.name] = program
                left_out.add(first)
                gone |= {name} if alone else set()
                break
    if not left_out:
        return plan, {}
    plan = dataclasses.replace(plan, steps=tuple(steps), buffers=tuple(b for b in plan.buffers if b.name not in gone))
    plan = without(plan, left_out)
    return permuted(plan, range(len(plan.steps))), found


def _pays(step: LibraryStep, plan: Plan, hardware: HardwareParams, passes: int) -> bool:
    """Whether computing the product in tiles, within the kernel, takes less time; sizes are those of the first call.
    passes: over the result, that are saved."""
    windows = (*step.inputs, *step.outputs)
    known: dict[str, tuple[tuple[tuple[str, Attr], ...], ...]] = {
        "matmul": ((), (("rounded", step.dtype),)), "matmul_add": ((), PLAIN)}
    if (step.attrs not in known.get(step.op, ()) or step.dtype not in DTYPES
            or any(window.type.dtype != step.dtype or len(window.type.shape) != 2 for window in windows)):
        return False
    made = step.outputs[0].type
    bytes_, inner = size_of(made.dtype), plan.facts.hint(step.inputs[0].type.shape[1])
    large = plan.facts.hint(made.count) * bytes_ > hardware.core_cache_bytes
    saved = passes * bytes_ / hardware.speeds.bytes if large else 0.0
    return saved >= 2 * inner / hardware.speeds.products[made.dtype] * (1 / hardware.product_share - 1)


def _fused(kernel: KernelStep, place: int, made: LibraryStep, programs: Programs, alone: bool
           ) -> tuple[KernelStep, LoopProgram] | None:
    """The kernel with the product in place of its param `place`; None where it is not pointwise on it. alone: nobody
    else reads the product."""
    regime = kernel.regimes[-1]  # the one for all sizes
    result, window = made.outputs[0].type, kernel.params[place]
    if regime.kernel not in programs or regime.then or kernel.handed or kernel.checks or place in kernel.outputs:
        return None
    if any(one.offset != 0 or one.type.layout() != one.type.dense().layout() for one in (window, made.outputs[0])):
        return None
    left, right, *addends = made.inputs
    if any(addend.type.shape != result.shape for addend in addends):
        return None
    sizes = _Sizes(programs[regime.kernel], regime.sizes)
    epilogue = _pointwise(programs[regime.kernel], sizes, result.shape)
    if epilogue is None:
        return None
    first, second = epilogue.params[place].name, f"p{len(epilogue.params)}"
    added = [f"p{len(epilogue.params) + 1 + k}" for k in range(len(addends))]
    body = [dataclasses.replace(one, buffer=RESULT) if one.buffer == first else one
            for one in epilogue.stages[0].instructions]
    row, column, point = (_number(loops) for loops in (
        epilogue.rows, epilogue.columns, (*epilogue.rows, *epilogue.columns)))
    if any(one.buffer == RESULT and (one.op != "load" or one.args or one.offset != point) for one in body) or any(
            param.name in (RESULT, second, *added) for param in epilogue.params):
        return None
    results = [] if alone else [Param(f"p{len(epilogue.params) + 1 + len(added)}", result.dtype, "out")]
    for param in results:
        body = _with_result(body, param.name, point)
    for name, addend in zip(added, addends, strict=True):
        steps = [sizes.inside(size) for size in addend.type.layout()]
        body = _with_addend(body, name, row * steps[0] + column * steps[1], result.dtype)
    down, along, under, beside = (sizes.inside(size) for size in (*left.type.layout(), *right.type.layout()))
    multiplied = Product(RESULT, "f32" if added else result.dtype, first, second, sizes.inside(left.type.shape[1]),
                         (down, along, under, beside))
    params = [dataclasses.replace(param, role="in") if param.name == first else param for param in epilogue.params]
    program = dataclasses.replace(
        epilogue, params=(*params, *(Param(name, result.dtype, "in") for name in (second, *added)), *results),
        stages=(Stage("column", tuple(body)),),
        schedule=(*epilogue.schedule, multiplied), sizes=sizes.names)
    program = dataclasses.replace(program, name=content_name(program))
    operands = {window.buffer for window in made.inputs}
    windows = [left if k == place else one for k, one in enumerate(kernel.params)]
    windows += [right, *addends, *(made.outputs if results else ())]
    outputs = (*kernel.outputs, len(windows) - 1) if results else kernel.outputs
    where = "; ".join(filter(None, dict.fromkeys((made.where, kernel.where))))
    return dataclasses.replace(
        kernel, regimes=(Regime(program.name, (), sizes.stand_for),), params=tuple(windows), outputs=outputs,
        where=where, along=(),
        # operands are read to the end
        reuse=tuple(pair for pair in kernel.reuse if windows[pair[0]].buffer not in operands)), program


def _number(loops: tuple[tuple[str, Size], ...]) -> Size:
    """The number of a point of loops, in row-major order."""
    found: Size = 0
    for variable, extent in loops:
        found = found * extent + symbol(variable)
    return found


def _with_addend(body: list[Instruction], name: str, offset: Size, dtype: str) -> list[Instruction]:
    """The instructions with an addend on the product, before it is rounded."""
    found: list[Instruction] = []
    free = 1 + max(one.result for one in body)
    for one in body:
        if one.buffer == RESULT:
            found += [dataclasses.replace(one, result=free),
                      Instruction(free + 1, "load", buffer=name, offset=offset),
                      Instruction(free + 2, "add", (free, free + 1)),
                      Instruction(one.result, f"to_{dtype}", (free + 2,))]
            free += 3
        else:
            found.append(one)
    return found


def _with_result(body: list[Instruction], name: str, offset: Size) -> list[Instruction]:
    """The instructions, which store the product, too, as soon as it is there."""
    at = next(k for k, one in enumerate(body) if one.buffer == RESULT)
    store = Instruction(-1, "store", (body[at].result,), body[at].dtype, name, offset)
    return [*body[:at + 1], store, *body[at + 1:]]


class _Sizes:
    """The sizes of a kernel, and what they stand for in the plan; more are added where a size of the plan is wanted."""

    def __init__(self, program: LoopProgram, stand_for: tuple[Size, ...]) -> None:
        self.names: tuple[str, ...] = program.sizes
        self.stand_for = stand_for

    def outside(self, size: Size) -> Size:
        """A size of the kernel in symbols of the plan."""
        return substitute(size, dict(zip(self.names, self.stand_for, strict=True)))

    def inside(self, size: Size) -> Size:
        """A size of the plan as one of the kernel."""
        if isinstance(size, int):
            return size
        for name, other in zip(self.names, self.stand_for, strict=True):
            if other == size:
                return symbol(name)
        name = next(one for k in range(len(self.names) + 1) if (one := f"n{k}") not in self.names)
        self.names, self.stand_for = (*self.names, name), (*self.stand_for, size)
        return symbol(name)


def _pointwise(program: LoopProgram, sizes: _Sizes, shape: tuple[Size, ...]) -> LoopProgram | None:
    """The program over the rows and columns of a matrix, in one column stage; None where it is not pointwise, or goes
    through other points, or in another order."""
    body = [one for stage in program.stages for one in stage.instructions]
    stored = {one.buffer for one in body if one.op == "store"}
    if program.scratch or any(one.op in SPANNING or (one.op == "load" and one.buffer in stored) for one in body):
        return None
    if any(not isinstance(one, Vectorize) for one in program.schedule) or (program.columns and any(
            stage.level == "row" and one.op == "store" for stage in program.stages for one in stage.instructions)):
        return None
    loops = (*program.rows, *program.columns)
    extents = [sizes.outside(extent) for _, extent in loops]
    split = next((k for k in range(1, len(loops)) if (product(extents[:k]), product(extents[k:])) == shape), 0)
    if split:
        rows, columns = loops[:split], loops[split:]
    elif len(loops) == 1 and extents[0] == shape[0] * shape[1]:
        point, across = loops[0][0], f"{loops[0][0]}c"
        rows, columns = ((point, sizes.inside(shape[0])),), ((across, sizes.inside(shape[1])),)
        flat = {point: symbol(point) * columns[0][1] + symbol(across)}
        body = [dataclasses.replace(one, offset=substitute(one.offset, flat)) for one in body]
    else:
        return None
    if any(symbols_of(extent) - {*sizes.names} for _, extent in (*rows, *columns)):
        return None  # rows of different lengths
    return dataclasses.replace(program, rows=rows, columns=columns, schedule=(Vectorize(columns[-1][0]),),
                               stages=(Stage("column", tuple(body)),))
