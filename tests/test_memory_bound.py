"""How kernels go through memory: in tiles, in steps, past the caches, ahead of themselves; and scans."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

import anyshape
from anyshape.backend.cpu.codegen.kernel import emit
from anyshape.backend.cpu.codegen.nontemporal_stores import LARGE
from anyshape.backend.cpu.codegen.transpose_tiles import transposed
from anyshape.backend.cpu.llvm.ir_builder import Code, Value
from anyshape.backend.cpu.llvm.jit import object_code
from anyshape.backend.cpu.machine.target import HARDWARE, target_of
from anyshape.kernel.loop_ir.directives import Interchange, Tile, Vectorize
from anyshape.kernel.loop_ir.parse import parse
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram, Param, Stage
from anyshape.kernel.loop_ir.show import show
from anyshape.kernel.schedule.interchange import interchanged
from anyshape.kernel.schedule.multiversion import thresholds, versions
from anyshape.kernel.schedule.tile_scan import WIDEST, tiled_scan
from anyshape.kernel.schedule.tile_transpose import tiled_transpose
from anyshape.sym.expr import symbol
from sampling import rest

RUN, MANY_ROWS = HARDWARE.row_buffer_bytes // WIDEST, thresholds(HARDWARE).many_rows
N, M = symbol("n0"), symbol("n1")
ROW, COLUMN = symbol("i0"), symbol("i1")
# one of each size of elements; the others with -m full
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8,
          *(pytest.param(dtype, marks=pytest.mark.full) for dtype in (torch.float16, torch.float64, torch.int16))]
NARROW_OR_WIDE = (torch.bfloat16, torch.int64, torch.uint8, torch.float16, torch.float64, torch.int16)
SHAPES = [(7, 50), (1, 1), (0, 5), (5, 0), (1, 70), (70, 1), (16, 16), (17, 31), (64, 128), (127, 255), (301, 1003)]

ACROSS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "copied": lambda x: x.t().contiguous(),
    "beside what lies along": lambda x: x.t() + torch.ones_like(x).reshape(x.shape[1], x.shape[0]) * 2,
    "outer row": lambda x: x.reshape(x.shape[0], 1, x.shape[1]).expand(-1, 3, -1).permute(2, 1, 0).contiguous(),
    "rows exchanged": lambda x: x.expand(3, -1, -1).transpose(0, 1).contiguous(),
    "backwards": lambda x: x.flip(-1) + 0,
    "every second": lambda x: x[:, 1::2] * 2,
    "every third": lambda x: x[:, 2::3] * 2,
    "every fourth": lambda x: x[:, ::4] * 2,
    "every fifth": lambda x: x[:, ::5] * 2,
}


def all_of(functions: dict[str, Callable[[torch.Tensor], torch.Tensor]]
           ) -> Callable[[torch.Tensor], dict[str, torch.Tensor]]:
    return lambda x: {name: function(x) for name, function in functions.items()}


@pytest.mark.parametrize("dtype", rest([torch.float32, *NARROW_OR_WIDE], torch.float32, torch.uint8), ids=str)
def test_reads_across_and_in_steps_are_as_eager(dtype: torch.dtype) -> None:
    """At any size; also from an input whose lines begin anywhere."""
    function = all_of(ACROSS)
    compiled = anyshape.compile(function, strict=True)
    generator = torch.Generator().manual_seed(0)
    for rows, columns in SHAPES:
        whole = (torch.randn(rows, columns + 3, generator=generator) * 20).to(dtype)
        for x in (whole[:, 3:].contiguous(), whole[:, 3:]):
            torch.testing.assert_close(compiled(x), function(x), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(2049, 2050), (4096, 1100)])
def test_large_results_are_as_eager(shape: tuple[int, int]) -> None:
    """Streamed results, in lines that begin anywhere; several of them; beside a sum of each row."""
    assert shape[0] * shape[1] * 4 >= LARGE
    def every(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.t().contiguous(), x + 1, (x * 2).to(torch.bfloat16), torch.softmax(x, -1), x.flip(-1) - 1, \
            x.unflatten(1, (2, -1)).transpose(0, 1).contiguous()
    compiled = anyshape.compile(every, strict=True)
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # results of a second call lie where those of the first were
        for found, wanted in zip(compiled(x), every(x), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype, wider", [(torch.bfloat16, torch.float32), (torch.int8, torch.float64),
                                          (torch.float32, torch.bfloat16)], ids=str)
def test_large_results_of_another_dtype_are_as_eager(dtype: torch.dtype, wider: torch.dtype) -> None:
    """Tiles of what lies across have whole blocks of it, however many columns end a line of the result."""
    x = (torch.randn(2051, 4100, generator=torch.Generator().manual_seed(0)) * 20).to(dtype)
    assert x.numel() * wider.itemsize >= LARGE
    found = anyshape.compile(lambda x: x.t().contiguous().to(wider), strict=True)(x)
    torch.testing.assert_close(found, x.t().contiguous().to(wider), rtol=0, atol=0)


SCANS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "last": lambda x: x.cumsum(-1), "first": lambda x: x.cumsum(0), "middle": lambda x: x.cumsum(1),
    "between others": lambda x: (x * 2).cumsum(-1) + 1, "product": lambda x: x.cumprod(-1),
    "from the end": lambda x: x.flip(-1).cumsum(-1).flip(-1), "turned": lambda x: x.transpose(0, 2).cumsum(2),
    "of ones": lambda x: torch.ones_like(x).cumsum(1), "in f64": lambda x: x.cumsum(0, dtype=torch.float64),
}  # fmt: skip


@pytest.mark.parametrize("dtype", rest([torch.float32, *NARROW_OR_WIDE, torch.bool], torch.bfloat16, torch.int64),
                         ids=str)
def test_scans_are_as_eager(dtype: torch.dtype) -> None:
    function = all_of(SCANS)
    compiled = anyshape.compile(function, strict=True)
    generator = torch.Generator().manual_seed(0)
    bound = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 1e-12)
    for shape in ((2, 7, 50), (1, 1, 1), (0, 5, 3), (5, 0, 2), (5, 3, 0), (1, 70, 1), (70, 1, 3), (2, 17, 31),
                  (3, 65, 129), (2, 300, 103)):
        x = (torch.rand(*shape, generator=generator) + 0.5).to(dtype)
        torch.testing.assert_close(compiled(x), function(x), rtol=bound, atol=bound, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scans_are_no_less_exact_than_eager(dtype: torch.dtype) -> None:
    """Long ones, along either dim: lines of a large matrix go in tiles."""
    for dim, shape in ((1, (3, 30011)), (0, (997, RUN + 77)), (0, (30011, 3))):
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        exact = x.double().cumsum(dim)
        errors = [(y.double() - exact).abs().max().item() for y in (
            anyshape.compile(lambda x, d=dim: x.cumsum(d), strict=True)(x), x.cumsum(dim))]
        assert errors[0] <= 1.01 * errors[1], (dim, shape, errors)


def across(stride: object = N) -> LoopProgram:
    """Rows i0 and columns i1 of what lies with its columns `stride` apart."""
    load = Instruction(0, "load", (), "f32", "p0", COLUMN * stride + ROW)
    return LoopProgram("k", (Param("p0", "f32", "in"), Param("p1", "f32", "out")), ("n0", "n1"), (("i0", N),),
                       (("i1", M),), (Vectorize("i1"),),
                       (Stage("column", (load, Instruction(-1, "store", (0,), "f32", "p1", ROW * M + COLUMN))),))


def scan() -> LoopProgram:
    """Sums down the columns of a matrix."""
    body = (Instruction(0, "load", (), "f32", "p0", COLUMN * N + ROW),
            Instruction(1, "scan", (0,), "f32", combine="add"),
            Instruction(-1, "store", (1,), "f32", "p1", COLUMN * N + ROW))
    return LoopProgram("k", (Param("p0", "f32", "in"), Param("p1", "f32", "out")), ("n0", "n1"), (("i0", N),),
                       (("i1", M),), (Vectorize("i0"),), (Stage("column", body),))


def largest(stride: object = N) -> LoopProgram:
    """The largest element of each column of a matrix, in a quarter of a scale."""
    body = (Instruction(0, "load", (), "f32", "p0", COLUMN * stride + ROW),
            Instruction(1, "reduce", (0,), "f32", combine="maximum"))
    after = (Instruction(2, "constant", (), "f32", value=0.25), Instruction(3, "mul", (1, 2), "f32"),
             Instruction(-1, "store", (3,), "f32", "p1", ROW))
    return LoopProgram("k", (Param("p0", "f32", "in"), Param("p1", "f32", "out")), ("n0", "n1"), (("i0", N),),
                       (("i1", M),), (Vectorize("i0"),), (Stage("column", body), Stage("row", after)))


def heavy() -> LoopProgram:
    """Results of a byte of more work than several vectors at once are worth."""
    work = (Instruction(k + 1, "lgamma", (k,), "f32") for k in range(3))
    body = (Instruction(0, "load", (), "f32", "p0", ROW * M + COLUMN), *work, Instruction(4, "lt", (3, 0), "bool"),
            Instruction(-1, "store", (4,), "bool", "p1", ROW * M + COLUMN))
    return LoopProgram("k", (Param("p0", "f32", "in"), Param("p1", "bool", "out")), ("n0", "n1"), (("i0", N),),
                       (("i1", M),), (Vectorize("i1"),), (Stage("column", body),))


def test_what_lies_across_goes_in_tiles_where_there_are_rows_and_columns_for_them() -> None:
    first, plain = versions(across(), HARDWARE)
    assert first.programs[0].directive(Tile) == Tile(("i0", "i1"), (128, 128), (0,))
    assert plain.programs[0].directive(Tile) is None
    assert set(first.conditions) == {N - MANY_ROWS, M - MANY_ROWS}
    assert tiled_transpose(across(2), HARDWARE) is None  # within the lines that a vector reads
    wide = dataclasses.replace(HARDWARE, max_load_stride=1, cache_line_bytes=128, near_cache_bytes=64 << 10)
    (found,) = (one.directive(Tile) for one in (tiled_transpose(across(2), wide),) if one is not None)
    assert found == Tile(("i0", "i1"), (64, 32), (0,))  # rows of 1024 bytes, but no more than twice the columns


def test_the_text_says_what_is_tiled_scanned_and_interchanged() -> None:
    for program in (versions(across(), HARDWARE)[0].programs[0], scan(), tiled_scan(scan(), HARDWARE),
                    interchanged(largest(), HARDWARE)):
        assert program is not None
        ((_, again),) = parse(show(program))
        assert again == program


def test_a_scan_of_a_large_matrix_goes_in_tiles() -> None:
    first, plain = versions(scan(), HARDWARE)
    assert first.programs[0].scratch and first.programs[0].columns[-1][0] == first.programs[0].vector == "i0"
    assert plain.programs[0] == scan()


def test_rows_go_inside_of_columns_where_they_lie_side_by_side() -> None:
    found = interchanged(largest(), HARDWARE)
    assert found is not None and found.directive(Interchange) is not None
    gathered = dataclasses.replace(largest(), stages=tuple(
        Stage(stage.level, tuple(dataclasses.replace(one, offset=2 * one.offset) for one in stage.instructions))
        for stage in largest().stages))
    for other in (gathered, scan(), across(), largest().scheduled(Vectorize("i1"))):
        assert interchanged(other, HARDWARE) is None


@pytest.mark.parametrize("features", [(), ("avx2", "fma"), ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma")],
                         ids=["sse", "avx2", "avx512"])
def test_every_target_has_code_for_it(features: tuple[str, ...]) -> None:
    target = target_of("x86_64-unknown-linux-gnu", "x86-64", frozenset(features))
    for program in (versions(across(), HARDWARE)[0].programs[0], scan(), tiled_scan(scan(), HARDWARE), across(3),
                    across(-1), heavy(), interchanged(largest(), HARDWARE)):
        assert program is not None
        assert object_code(emit(program, target), target)


@pytest.mark.parametrize("side", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_blocks_are_turned(side: int, size: int) -> None:
    """The shuffles, followed on pairs (line, place)."""
    class Followed(Code):
        def __init__(self) -> None:
            self.of: dict[str, list[tuple[int, int]]] = {}

        def merge(self, a: Value, b: Value, order: object) -> Value:
            both = self.of[a.text] + self.of[b.text]
            result = Value(f"%{len(self.of)}", a.dtype, a.lanes)
            self.of[result.text] = [both[k] for k in order]  # type: ignore[attr-defined]
            return result

    code = Followed()
    lines = [Value(f"%{k}", "i8", side) for k in range(side)]
    code.of = {line.text: [(k, place) for place in range(side)] for k, line in enumerate(lines)}
    assert [code.of[line.text] for line in transposed(code, lines, size)] == [
        [(line, place) for line in range(side)] for place in range(side)]
