"""Kernels with versions for regimes of sizes: every version gives eager's numbers, and the right one runs."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

import anyshape
from anyshape.backend.cpu.machine.target import HARDWARE
from anyshape.kernel.loop_ir.directives import Interchange, Vectorize
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram, Param, Stage
from anyshape.kernel.schedule.multiversion import Version, thresholds, versions
from anyshape.sym.expr import Size, symbol
from roads import compilation_of

AT = thresholds(HARDWARE)

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "largest": lambda x: x.amax(-1) - x.amin(-1),
    "norm": lambda x: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5),
    "masked": lambda x: torch.where(x > 0, x, 0.0).sum(-1, keepdim=True) * x,
    "two dims": lambda x: x.reshape(x.shape[0] // 2, 2, x.shape[1]).sum((1, 2)),
    "all": lambda x: (x > -2).all(-1),
}
COLUMNS = (0, 1, 2, 3, AT.few_columns, AT.few_columns + 1, 16, 33)
ROWS = (0, 2, AT.many_rows - 2, AT.many_rows, 94, 1000)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_regime_is_as_eager(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    compiled = anyshape.compile(function, strict=True)
    torch.manual_seed(0)
    for columns in COLUMNS:
        for rows in ROWS:
            if columns == 0 and name == "largest":
                continue  # nothing has no extreme
            x = torch.randn(rows, columns).to(dtype)
            wanted = function(x)
            bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(compiled(x), wanted, rtol=bound, atol=bound, equal_nan=True)


LONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: (x + 1).sum(-1),
    "softmax": lambda x: torch.softmax(x, -1) * x.shape[-1],
    "largest": lambda x: x.amax(-1) - x.amin(-1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "length": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "spread": lambda x: x.var(-1),
    "norm": lambda x: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5),
    "everything": lambda x: x.square().mean(),
    "whole numbers": lambda x: (x * 8).to(torch.int64).sum(-1),
    "all": lambda x: (x < 6).all(-1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", LONG)
def test_few_long_rows_are_as_float64(name: str, dtype: torch.dtype) -> None:
    """Rows in pieces, beside rows that are whole: lengths around the border, odd ones, too many rows, other strides."""
    compiled = anyshape.compile(LONG[name], strict=True)
    bound = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float64: 1e-13}[dtype]
    torch.manual_seed(0)
    sizes = [(2, AT.long_row), (3, 99991), (1, AT.long_row - 1), (AT.few_rows + 1, AT.long_row), (2, 5)]
    for rows, columns in sizes if dtype == torch.float32 else sizes[:2]:
        for x in (torch.randn(rows, columns).to(dtype), torch.randn(columns, rows).to(dtype).t()):
            wanted = LONG[name](x.double())
            torch.testing.assert_close(compiled(x).to(wanted.dtype), wanted, rtol=bound, atol=bound)
            if dtype != torch.float32:
                break
    kernels = [kernel for program in compiled.explain().programs for kernel in program.kernels]
    assert any(regime.then for kernel in kernels for regime in kernel.regimes), compiled.explain()


def test_threads_do_not_change_long_sums() -> None:
    """The same bits on any number of threads, more than rows among them."""
    compiled = anyshape.compile(LONG["logsumexp"], strict=True)
    x = torch.randn(3, 99991)
    threads, found = torch.get_num_threads(), []
    for number in (1, 2, 5):
        torch.set_num_threads(number)
        found.append(compiled(x))
    torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_tall_sums_are_as_float64(dtype: torch.dtype) -> None:
    """Sums over many rows, as the rows lie in memory, and by strips where there is less."""
    def sums(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x.sin() * 2).sum(0) + y, x.amax(0)

    compiled = anyshape.compile(sums, strict=True)
    bound = {torch.float32: 2e-6, torch.float16: 1e-3, torch.float64: 1e-13}[dtype]
    torch.manual_seed(0)
    for rows, columns in ((8192, AT.wide), (AT.tall, AT.large // AT.tall), (9001, 131), (AT.tall - 1, 2500),
                          (30000, 7)):
        x, y = torch.randn(rows, columns).to(dtype), torch.randn(columns).to(dtype)
        for own, wanted in zip(compiled(x, y), sums(x.double(), y.double()), strict=True):
            torch.testing.assert_close(own.double(), wanted, rtol=bound, atol=bound * rows ** 0.5)
    (kernel,) = compiled.explain().programs[0].kernels
    assert [len(regime.then) for regime in kernel.regimes] == [1, 0]


DEEP: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "spread": lambda x: x.var(0),
    "shares": lambda x: (x - x.amax(0)).exp().sum(0).log() + x.mean(0),
    "length": lambda x: x.square().sum(0).sqrt() / (x.abs().amax(0) + 1),
    "of several": lambda x: x.reshape(2, x.shape[0] // 2, x.shape[1]).sum(1),
    "first": lambda x: x.argmax(0).to(x.dtype),
    "any": lambda x: ((x > 4).any(0) | (x < -4).all(0)).to(x.dtype),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("name", DEEP)
def test_interchanged_rows_are_as_float64(name: str, dtype: torch.dtype) -> None:
    """What is reduced down the columns of a large matrix, in several stages, or of several matrices; on any threads."""
    bound = {torch.float32: 2e-6, torch.float16: 1e-3, torch.float64: 1e-13}[dtype]
    torch.manual_seed(0)
    found = []
    for threads in (1, 3):
        torch.compiler.reset()
        compiled = anyshape.compile(DEEP[name], strict=True, threads=threads)
        for rows, columns in ((70, 40), (8194, AT.wide), (AT.far * 2, 515), (10002, 131), (AT.far - 2, 2500),
                              (30000, 7)):
            torch.manual_seed(rows)
            x = torch.randn(rows, columns).to(dtype)
            found.append(compiled(x))
            wanted = DEEP[name](x.double())
            torch.testing.assert_close(found[-1].double(), wanted, rtol=bound, atol=bound * rows ** 0.5)
        kernels = [kernel for program in compilation_of(compiled).programs
                   for kernel in program.compiled.programs.values()]
        assert any(kernel.directive(Interchange) for kernel in kernels)
    half = len(found) // 2
    assert all(map(torch.equal, found[:half], found[half:]))


@pytest.mark.parametrize("rows", [4096, 100003])
def test_interchanged_sums_are_as_exact_as_eagers(rows: int) -> None:
    """Compiled with few rows, so that they are not split."""
    compiled = anyshape.compile(lambda x: x.sum(0), strict=True)
    compiled(torch.randn(67, 96))
    for x in (torch.randn(rows, 300), torch.rand(rows, 300)):
        wanted = x.double().sum(0)
        own, eager = (float((found - wanted).norm()) for found in (compiled(x), x.sum(0)))
        assert own <= eager, (own, eager)


def summing(rows: Size, columns: Size) -> LoopProgram:
    """Sums of the rows of a matrix."""
    i, j = symbol("i0"), symbol("i1")
    column = Stage("column", (Instruction(0, "load", buffer="p0", offset=i * columns + j),
                              Instruction(1, "reduce", (0,), combine="add")))
    row = Stage("row", (Instruction(2, "store", (1,), buffer="p1", offset=i),))
    return LoopProgram("", (Param("p0", "f32", "in"), Param("p1", "f32", "out")), ("n0", "n1"),
                       (("i0", rows),), (("i1", columns),), (Vectorize("i1"),), (column, row))


def test_versions_are_made_where_sizes_do_not_decide() -> None:
    n, m = symbol("n0"), symbol("n1")
    few, long, many = versions(summing(n, m), HARDWARE)
    assert vectors(few) == ["i0"] and few.conditions == (AT.few_columns - m, n - AT.many_rows)
    assert vectors(long) == ["i1", "i2"] and long.conditions == (AT.few_rows - n, m - AT.long_row, m - AT.pieces)
    assert vectors(many) == ["i1"] and many.conditions == ()
    (only,) = versions(summing(100, 3), HARDWARE)
    assert vectors(only) == ["i0"] and only.conditions == ()
    assert [vectors(version) for version in versions(summing(n, 3), HARDWARE)] == [["i0"], ["i1"]]
    for rows, columns in ((n, 512), (4, 3)):
        assert [vectors(version) for version in versions(summing(rows, columns), HARDWARE)] == [["i1"]]
    assert [len(version.programs) for version in versions(summing(4, AT.long_row), HARDWARE)] == [2]
    assert [len(version.programs) for version in versions(summing(n, m), HARDWARE, {"n0": 4, "n1": 1000})] == [1, 1]


def test_versions_are_chosen_by_the_numbers_of_the_target() -> None:
    n, m = symbol("n0"), symbol("n1")
    small = dataclasses.replace(HARDWARE, vector_lanes=4, min_vector_row=2, parallelism=4, thread_elements=1024)
    few, long, _ = versions(summing(n, m), small)
    assert few.conditions == (2 - m, n - 4) and long.conditions == (2 - n, m - 1024, m - 4)
    assert long.programs[0].rows[-1][1] == 4 and long.programs[0].directive(Vectorize) == Vectorize("i1")


def vectors(version: Version) -> list[str]:
    return [program.vector for program in version.programs]


def test_explain_shows_the_regimes() -> None:
    compiled = anyshape.compile(FUNCTIONS["softmax"], strict=True)
    compiled(torch.randn(40, 5))
    (kernel,) = compiled.explain().to_dict()["programs"][0]["kernels"]
    first, second = kernel["regimes"]
    assert f" + {AT.few_columns} >= 0" in first["when"] and first["kernel"] != second["kernel"] and second["when"] == ""
    assert "when" in str(compiled.explain())
