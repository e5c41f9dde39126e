"""Loop programs on random memory: the arrays that a kernel is called with, with poisoned margins, and comparisons of
what two backends leave in them."""
from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from anyshape.backend.cpu.codegen.kernel import emit
from anyshape.backend.cpu.llvm.jit import build
from anyshape.backend.cpu.machine.target import host
from anyshape.ir.types import size_of
from anyshape.kernel.loop_ir.directives import Product, SplitReduction
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram
from anyshape.sym.expr import Expr, Size, evaluate, product

NUMPY = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "i64": np.int64, "i32": np.int32, "i16": np.int16,
         "i8": np.int8, "u8": np.uint8, "bool": np.bool_, "bf16": np.uint16}
MARGIN, POISON = 64, 0x7F  # bytes on each side of an array, and what is in them
INDICES = 3  # whole numbers that are loaded are below


@dataclass
class Memory:
    """The arrays of a call, each inside of its margins."""

    program: LoopProgram
    whole: list[np.ndarray]
    bytes: list[int]

    def addresses(self) -> list[int]:
        return [one.ctypes.data + MARGIN for one in self.whole]

    def arrays(self) -> list[np.ndarray]:
        return [one[MARGIN:MARGIN + count].view(NUMPY[param.dtype])
                for one, count, param in zip(self.whole, self.bytes, self.program.params, strict=True)]

    def copy(self) -> Memory:
        aligned = [aligned_bytes(len(one)) for one in self.whole]
        for new, old in zip(aligned, self.whole, strict=True):
            new[:] = old
        return Memory(self.program, aligned, self.bytes)

    def is_whole(self) -> bool:
        return all((one[:MARGIN] == POISON).all() and (one[MARGIN + count:] == POISON).all()
                   for one, count in zip(self.whole, self.bytes, strict=True))


def aligned_bytes(count: int) -> np.ndarray:
    space = np.full(count + 64, POISON, np.uint8)
    start = -space.ctypes.data % 64
    return space[start:start + count]


def memory_of(program: LoopProgram, sizes: Sequence[int], seed: int = 0) -> Memory:
    """Memory for all that the program reads and writes at these sizes; whole numbers are valid indices."""
    values = dict(zip(program.sizes, sizes, strict=True))
    counts = {param.name: 1 for param in program.params}
    loops = dict((*program.rows, *program.columns))
    split = program.directive(SplitReduction)
    if split is not None:
        loops[split.axis] = split.parts
    registers: dict[int, Size] = {}
    for one in (one for stage in program.stages for one in stage.instructions):
        registers[one.result] = most_of(one, loops, registers, values)
        if one.buffer in counts:
            counts[one.buffer] = max(counts[one.buffer], largest(one.offset, loops, registers, values) + 1)
    multiplied = program.directive(Product)
    if multiplied is not None:
        rows, columns = (evaluate(product(extent for _, extent in loop), values) - 1
                         for loop in (program.rows, program.columns))
        inner, down, along, under, beside = (evaluate(size, values) for size in (
            multiplied.inner, *multiplied.strides))
        empty = min(rows + 1, columns + 1, inner) == 0
        counts[multiplied.left] = 1 if empty else rows * down + (inner - 1) * along + 1
        counts[multiplied.right] = 1 if empty else (inner - 1) * under + columns * beside + 1
    random = np.random.default_rng(seed)
    found = Memory(program, [], [])
    for param in program.params:
        count = counts[param.name]
        found.bytes.append(count * size_of(param.dtype))
        found.whole.append(aligned_bytes(found.bytes[-1] + 2 * MARGIN))
        array = found.arrays()[-1] if len(found.whole) == len(program.params) else \
            found.whole[-1][MARGIN:MARGIN + found.bytes[-1]].view(NUMPY[param.dtype])
        if param.dtype == "bf16":
            array[:] = random.standard_normal(count).astype(np.float32).view(np.uint32) >> 16
        elif param.dtype in ("f32", "f64", "f16"):
            array[:] = random.standard_normal(count)
        elif param.role == "out":
            array[:] = 0
        else:
            array[:] = random.integers(0, 2 if param.dtype == "bool" else INDICES, count)
    return found


def largest(offset: Size, loops: Mapping[str, Size], registers: Mapping[int, Size], values: Mapping[str, int]) -> int:
    """A number that an offset does not exceed: what it adds, with each variable at its extent."""
    known = {f"%{register}": evaluate(size, values) for register, size in registers.items()} | dict(values)
    for name, extent in loops.items():
        known[name] = evaluate(extent, known)
    if isinstance(offset, int):
        return offset
    return sum(max(0, evaluate(Expr((term,)), known)) for term in offset.terms)


def most_of(one: Instruction, loops: Mapping[str, Size], registers: Mapping[int, Size],
            values: Mapping[str, int]) -> int:
    """The largest whole number that a register may have, where what is loaded is below INDICES."""
    known = [evaluate(registers[register], values) for register in one.args]
    if one.op == "index":
        return largest(one.offset, loops, registers, values)
    if one.op == "constant":
        return int(one.value) if one.dtype == "i64" else 0
    if one.op == "where":
        return max(known[1:])
    return {"load": lambda: INDICES - 1, "minimum": lambda: min(known), "add": lambda: sum(known),
            "sub": lambda: known[0] - min(known[1], 1)}.get(one.op, lambda: max(known, default=0))()


def on_cpu(program: LoopProgram) -> Callable[[Memory, Sequence[int]], None]:
    """The program by the CPU's kernel."""
    kernel = build([emit(program, host())], host())[0]
    count = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)
    main = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)(kernel.run)

    def run(memory: Memory, sizes: Sequence[int]) -> None:
        block = np.array([*memory.addresses(), *sizes], np.int64)
        scratch = aligned_bytes(count(kernel.scratch)(block.ctypes.data) + 64)
        main(block.ctypes.data, 0, count(kernel.blocks)(block.ctypes.data), scratch.ctypes.data)
    return run


def difference(found: Memory, wanted: Memory) -> float:
    """The largest difference of an array, relative to its largest number; whole numbers and bools must be equal."""
    worst = 0.0
    for one, other, param in zip(found.arrays(), wanted.arrays(), found.program.params, strict=True):
        if param.dtype == "bf16":
            one, other = ((x.astype(np.uint32) << 16).view(np.float32) for x in (one, other))
        if param.dtype in ("f32", "f64", "f16", "bf16"):
            wide, exact = one.astype(np.float64), other.astype(np.float64)
            both = (wide == exact) | (np.isnan(wide) & np.isnan(exact))
            scale = np.abs(exact[np.isfinite(exact)]).max(initial=1e-30)
            worst = max(worst, float(np.where(both, 0, np.abs(wide - exact)).max(initial=0) / scale))
            assert not np.isnan(worst)
        elif not np.array_equal(one, other):
            return float("inf")
    return worst
