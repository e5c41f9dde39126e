"""Products of groups of rows (mixture of experts): values, gradients, ends that are data, threads."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import anyshape
from anyshape.backend.cpu.bytecode.products import Fixed, native
from anyshape.backend.cpu.machine.target import host
from anyshape.frontend.aten.table import BY_SCHEMA
from anyshape.runtime.torch_ops.reference_interpreter import OWN
from reference_words import grouped_step
from sampling import crossed

BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 8e-3, torch.float16: 1e-3}
NAMES = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16"}
DTYPES = [dtype for dtype in BOUNDS if native(NAMES[dtype], host())]
# rows, inner, columns, groups
SIZES = [(64, 256, 512, 8), (131, 67, 33, 5), (1, 256, 96, 3), (500, 130, 70, 3), (40, 128, 1, 2), (40, 1, 64, 2),
         (9, 64, 5, 4), (300, 800, 70, 2), (29, 900, 300, 1), (0, 256, 512, 8), (7, 0, 64, 2)]


@pytest.fixture
def fallback() -> Any:
    """The operator that transformers defines, which loops over the groups in Python."""
    pytest.importorskip("transformers.integrations.moe")
    return torch.ops.transformers.grouped_mm_fallback


def ends_of(rows: int, groups: int) -> list[list[int]]:
    """Ends as routers give them, and such as nobody should: not to the last row, beyond it, decreasing, negative."""
    even = [rows * (i + 1) // groups for i in range(groups)]
    first = [rows] * groups
    few = [min(i + 1, rows) for i in range(groups)]
    beyond = [*even[:-1], rows + 5]
    falls = [rows - rows * i // groups for i in range(groups)]
    mixed = [(-2, rows - 1, rows // 2, -rows - 3)[i % 4] for i in range(groups)]
    return [even, first, few, [0] * groups, beyond, falls, mixed]


def close(found: torch.Tensor, exact: torch.Tensor, bound: float) -> None:
    assert found.shape == exact.shape
    torch.testing.assert_close(found.double(), exact, rtol=bound, atol=bound * (1 + float(exact.abs().amax()) if
                                                                               exact.numel() else 1))


@pytest.mark.parametrize(("dtype", "turned"), crossed(DTYPES, [False, True]), ids=str)
def test_rows_of_groups(fallback: Any, dtype: torch.dtype, turned: bool) -> None:
    def product(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return fallback(x, weights.transpose(1, 2) if turned else weights, ends)

    torch.compiler.reset()
    fast = anyshape.compile(product, defer=False)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for rows, inner, columns, groups in SIZES:
                x = torch.randn(rows, inner, dtype=dtype)
                shape = (groups, columns, inner) if turned else (groups, inner, columns)
                weights = torch.randn(shape, dtype=dtype)
                for number, ends in enumerate(ends_of(rows, groups)):
                    given = torch.tensor(ends, dtype=(torch.int32, torch.int64)[(number + threads // 2) % 2])
                    found = fast(x, weights, given)
                    assert found.stride() == product(x, weights, given).stride()
                    close(found, product(x.double(), weights.double(), given), BOUNDS[dtype])
    finally:
        torch.set_num_threads(before)
    for program in fast.programs:
        assert [step.op for step in program.compiled.plan.steps if hasattr(step, "op")] in (["grouped"], [])
        assert not program.notes.externs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_gradients(fallback: Any, dtype: torch.dtype, turned: bool) -> None:
    def product(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return fallback(x, weights.transpose(1, 2) if turned else weights, ends)

    torch.compiler.reset()
    fast = anyshape.compile(product, defer=False)
    for rows, inner, columns, groups in ((64, 128, 256, 8), (131, 64, 33, 5), (1, 64, 32, 2), (1600, 33, 65, 2)):
        x = torch.randn(rows, inner, dtype=dtype, requires_grad=True)
        weights = torch.randn((groups, columns, inner) if turned else (groups, inner, columns), dtype=dtype,
                              requires_grad=True)
        exact = [one.detach().double().requires_grad_() for one in (x, weights)]
        for ends in ends_of(rows, groups)[:4]:
            given = torch.tensor(ends, dtype=torch.int32)
            result = product(*exact, given)
            change = torch.randn(result.shape, dtype=dtype)
            wanted = torch.autograd.grad(result, exact, change.double())
            found = torch.autograd.grad(fast(x, weights, given), (x, weights), change)
            for one, other in zip(found, wanted, strict=True):
                assert one.stride() == other.stride()
                close(one, other, BOUNDS[dtype])
    for program in fast.programs:
        assert not program.notes.externs


@pytest.mark.skipif(torch.bfloat16 not in DTYPES, reason="PyTorch does it on this processor")
def test_pytorchs_own_operator() -> None:
    """Its rows past the last end hold anything; ours are zero."""
    def product(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, weights.transpose(1, 2), offs=ends)

    torch.compiler.reset()
    fast = anyshape.compile(product, defer=False)
    for rows, inner, columns, groups in ((64, 128, 256, 8), (16, 64, 40, 3), (24, 8, 8, 1)):
        x = torch.randn(rows, inner, dtype=torch.bfloat16, requires_grad=True)
        weights = torch.randn(groups, columns, inner, dtype=torch.bfloat16, requires_grad=True)
        ends = torch.tensor([rows * (i + 1) // groups for i in range(groups)], dtype=torch.int32)
        wanted, found = product(x, weights, ends), fast(x, weights, ends)
        assert found.stride() == wanted.stride()
        change = torch.randn_like(wanted)
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
        for one, other in zip(torch.autograd.grad(found, (x, weights), change),
                              torch.autograd.grad(wanted, (x, weights), change), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-1)
    assert not [note for program in fast.programs for note in program.notes.externs]


def test_an_operator_of_that_name_with_another_schema_is_called() -> None:
    pytest.importorskip("transformers.integrations.moe")
    for schema in BY_SCHEMA:
        space, name = schema.split("(")[0].split("::")
        assert str(getattr(getattr(torch.ops, space), name).default._schema) == schema


@pytest.mark.parametrize(("op", "shapes"), [("grouped", ((6, 3), (2, 3, 4))), ("grouped_inner", ((3, 6), (6, 4)))])
def test_the_reference_takes_ends_as_slices_do(op: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    x, y = (torch.randn(shape) for shape in shapes)
    cuts: Callable[[int, int], slice] = slice
    for first, second in ((2, 6), (4, 1), (9, 3), (-2, 5), (0, 0)):
        found = OWN[op]({}, x, y, torch.tensor([first, second]))
        if op == "grouped":
            wanted = torch.zeros(6, 4)
            wanted[cuts(0, first)] = x[:first] @ y[0]
            wanted[cuts(first, second)] = x[first:second] @ y[1]
        else:
            wanted = torch.stack([x[:, :first] @ y[:first], x[:, first:second] @ y[first:second]])
        assert torch.equal(found, wanted)


def test_strides_that_the_host_does_not_take_are_pytorchs(fallback: Any) -> None:
    def product(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return fallback(x[:, ::2], weights[:, ::2, ::3], ends)

    torch.compiler.reset()
    fast = anyshape.compile(product, defer=False)
    for dtype in (torch.float32, torch.float64):
        x, weights = torch.randn(30, 40, dtype=dtype), torch.randn(3, 40, 51, dtype=dtype)
        ends = torch.tensor([3, 20, 30], dtype=torch.int32)
        close(fast(x, weights, ends), product(x.double(), weights.double(), ends), BOUNDS[dtype])
    types = (((30, 20), (80, 2)), ((3, 20, 17), (2040, 102, 3)), ((3,), (1,)), ((30, 17), (17, 1)))
    assert grouped_step(Fixed(host(), True), "grouped", "f64", 4, types) is None
