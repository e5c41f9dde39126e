"""Interleaved access: copies across a short loop give eager's results at every size, and where they are chosen."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import anyshape
from anyshape.backend.cpu.codegen.interleaved_access import BLOCK
from anyshape.backend.cpu.codegen.kernel import emit
from anyshape.backend.cpu.llvm.jit import object_code
from anyshape.backend.cpu.machine.target import HARDWARE, host, target_of
from anyshape.base.errors import VerifyError
from anyshape.kernel.loop_ir.directives import Interleave, Vectorize
from anyshape.kernel.loop_ir.parse import parse
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram, Param, Stage
from anyshape.kernel.loop_ir.show import show
from anyshape.kernel.schedule.interleave import interleaved
from anyshape.kernel.schedule.multiversion import versions
from anyshape.sym.expr import Size, symbol
from roads import compilation_of
from sampling import rest

DTYPES = rest([torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float16, torch.float64, torch.int16],
              torch.bfloat16)
SIZES = ((7, 33), (1, 1), (0, 5), (5, 0), (17, 1), (2, BLOCK + 37), (3, 4))


def _shuffled(x: torch.Tensor, times: int) -> torch.Tensor:
    """Depth to space of [a, times * times, b, c]."""
    a, _, b, c = x.shape
    return x.reshape(a, times, times, b, c).permute(0, 3, 1, 4, 2).reshape(a, b * times, c * times)


def _unshuffled(x: torch.Tensor, times: int) -> torch.Tensor:
    """Space to depth of [a, b * times, c * times]."""
    a, b, c = x.shape[0], x.shape[1] // times, x.shape[2] // times
    return x.reshape(a, b, times, c, times).permute(0, 2, 4, 1, 3).contiguous()


# of x [a, b, c] with a and b of SIZES and a few c
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "last two dims exchanged": lambda x: x.transpose(1, 2).contiguous(),
    "last dim first": lambda x: x.permute(2, 0, 1).contiguous(),
    "work in between": lambda x: x.transpose(1, 2) * 2 + x.permute(0, 2, 1).flip(1),
    "depth to space, 2": lambda x: _shuffled(torch.stack([x, x + 1, x * 2, x - 3], 1).transpose(2, 3), 2),
    "depth to space, 3": lambda x: _shuffled(torch.stack([x] * 5 + [x + 1] * 4, 1), 3),
    "space to depth, 4": lambda x: _unshuffled(x.repeat(1, 4, 4), 4),
    "stacked": lambda x: torch.stack([x.flatten(), x.flatten() * 2], -1),
    "of one chosen row": lambda x: x.transpose(1, 2)[torch.arange(x.shape[0] - 1, -1, -1)].contiguous(),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("last", [3, *(pytest.param(k, marks=pytest.mark.full) for k in (1, 4, 6, 12))])
def test_copies_across_a_short_loop_are_as_eager(last: int, dtype: torch.dtype) -> None:
    """At sizes that no call had before, too, in one program."""
    def every(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: function(x) for name, function in FUNCTIONS.items()}

    compiled = anyshape.compile(every, strict=True)
    for sizes in SIZES:
        for more in (0, 1):  # the version for one size, and what there is for others
            whole = (torch.randn(*sizes, last + more, generator=torch.Generator().manual_seed(0)) * 20).to(dtype)
            torch.testing.assert_close(compiled(whole), every(whole), rtol=0, atol=0, equal_nan=True)


def copy(count: Size = 4, *, store: bool = True) -> LoopProgram:
    """p1[i0, i1] = p0[i1, i0], where i1 is short; or with the short loop outside."""
    (row, rows), (column, columns) = ("i0", symbol("n0")), ("i1", count)
    across, along = symbol(column) * rows + symbol(row), symbol(row) * columns + symbol(column)
    body = (Instruction(0, "load", (), "f32", "p0", across if store else along),
            Instruction(-1, "store", (0,), "f32", "p1", along if store else across))
    loops = ((row, rows),), ((column, columns),)
    first, last = loops if store else loops[::-1]
    return LoopProgram("k", (Param("p0", "f32", "in"), Param("p1", "f32", "out")), ("n0", "n1"), first, last,
                       (Vectorize(last[0][0]),), (Stage("column", body),))


def test_a_short_loop_is_interleaved() -> None:
    first, plain = versions(copy(), HARDWARE)
    assert first.programs[0].directive(Interleave) == Interleave("i1", "i0")
    assert first.conditions == (symbol("n0") - HARDWARE.vector_lanes // 4,)
    assert plain.programs[0] == copy()
    found = interleaved(copy(8, store=False), HARDWARE, None)
    assert found is not None and found[0].directive(Interleave) == Interleave("i1", "i0")
    assert interleaved(copy(3, store=False), HARDWARE, None) is None  # near loads take whole vectors as they are
    for count in (1, HARDWARE.vector_lanes + 1, symbol("n1")):
        assert interleaved(copy(count), HARDWARE, None) is None


def test_a_size_of_the_first_call_has_a_version() -> None:
    found = interleaved(copy(symbol("n1")), HARDWARE, {"n0": 50, "n1": 3})
    assert found is not None and dict(found[0].columns) == {"i1": 3}
    assert {symbol("n1") - 3, 3 - symbol("n1")} <= set(found[1])
    assert interleaved(copy(symbol("n1")), HARDWARE, {"n0": 50, "n1": 300}) is None


def test_a_program_chooses_it() -> None:
    compiled = anyshape.compile(lambda x: F.pixel_shuffle(x, 4), strict=True)
    compiled(torch.randn(2, 32, 6, 20))
    kernels = [kernel for program in compilation_of(compiled).programs
               for kernel in program.compiled.programs.values()]
    assert any(kernel.directive(Interleave) for kernel in kernels)


@pytest.mark.parametrize("features", [(), ("avx2", "fma"), ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma")],
                         ids=["sse", "avx2", "avx512"])
def test_every_target_has_code_for_it_and_its_text_reads_back(features: tuple[str, ...]) -> None:
    target = target_of("x86_64-unknown-linux-gnu", "x86-64", frozenset(features))
    for count in (2, 3, 4, 6, 7, 12, 16):
        for program in (copy(count), copy(count, store=False)):
            program = program.scheduled(Interleave("i1", "i0"))
            ((_, again),) = parse(show(program))
            assert again == program
            assert object_code(emit(program, target), target)


def test_what_does_not_fit_its_loops_is_refused() -> None:
    for directive in (Interleave("i0", "i1"), Interleave("i1", "i1"), Interleave("i1", "i7")):
        with pytest.raises(VerifyError, match="not the only column variable"):
            emit(copy().scheduled(directive), host())
    with pytest.raises(VerifyError, match="not the only column variable"):
        emit(dataclasses.replace(copy(), columns=(("i2", 2), ("i1", 4))).scheduled(Interleave("i1", "i0")), host())
