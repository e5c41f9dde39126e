"""Products and the update that reads them, a band of rows after the other: numbers, memory, and when it may not be."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anyshape
from anyshape.backend.cpu.bytecode import products
from anyshape.backend.cpu.machine.target import host
from anyshape.plan.ir.program import TiledGemmStep

SIZES = (300, 1, 7, 0, 64, 129)


class Wide(nn.Module):
    """Weights of 4 and 8 MB and a small one: bands of many rows, of few, and none."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(260, 4001, dtype=dtype)
        self.second = nn.Linear(4001, 520, dtype=dtype)
        self.third = nn.Linear(520, 8, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum() / 100


def bands_of(step: Any) -> list[TiledGemmStep]:
    return [one for program in step.programs for one in program.executable.plan.steps if isinstance(one, TiledGemmStep)]


def trained(make: Callable[[], nn.Module], loss: Callable[..., Tensor], batches: list[Tensor], **settings: Any) -> Any:
    """A step after some batches, and what PyTorch makes of the weights."""
    ours, theirs = make(), make()
    step = anyshape.train_step(ours, loss, torch.optim.AdamW(ours.parameters(), lr=1e-3), strict=True, **settings)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    parts = settings.get("accumulate", 1)
    for number, batch in enumerate(batches):
        found = step(batch)
        wanted = loss(theirs, batch)
        (wanted / parts).backward()
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=1e-5)
        if (number + 1) % parts == 0:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        # Adam divides what is nearly nothing by itself: a weight may move by the rate either way
        assert (one - other).abs().mean() < 2e-6
        assert (one - other).abs().max() < 1e-3 * len(batches)
    return step


@pytest.mark.parametrize("accumulate", [1, 2])
def test_numbers(accumulate: int) -> None:
    """Any number of rows that are added up, none and one too."""
    step = trained(Wide, squared, [torch.randn(n, 260) for n in SIZES], accumulate=accumulate)
    assert len(bands_of(step)) == 2 * accumulate


def test_bits_are_those_of_one_piece() -> None:
    """Bands are a matter of memory only."""
    found = []
    for disable in ("", "epilogues"):
        model = Wide()
        step = anyshape.train_step(model, squared, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
                                   disable=disable)
        for n in SIZES:
            torch.manual_seed(n)
            step(torch.randn(n, 260))
        assert bool(bands_of(step)) == (not disable)
        found.append([one.detach() for one in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_operands_without_strides() -> None:
    """A gradient of ones is one element, everywhere; and no rows at all have strides of 0 as well."""
    def summed(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum() / 100

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(640, 1201, bias=False)

    assert bands_of(trained(make, summed, [torch.randn(n, 640) for n in SIZES]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operands_with_strides_that_blas_does_not_take(dtype: torch.dtype) -> None:
    """In f32 our panels take them; in f64 PyTorch does such products, and there are no bands."""
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(1024, 768, dtype=dtype) / 30)

        def forward(self, x: Tensor) -> Tensor:
            return (x[:, :2048:2] @ self.weight) * x[:, ::3]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum() / 100

    step = trained(Strided, loss, [torch.randn(n, 2304, dtype=dtype) for n in (5, 300, 1, 65)])
    assert bool(bands_of(step)) == (dtype == torch.float32)


def test_half_precision() -> None:
    """Under autocast the product of rounded operands goes in bands, too; with the error of PyTorch's, or less."""
    batches = [torch.randn(n, 260) for n in (300, 1, 65)]

    def lower(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return squared(model, x)

    weights = []
    for dtype, loss in ((torch.float32, lower), (torch.float32, lower), (torch.float64, squared)):
        model = Wide(dtype)
        if dtype == torch.float64:
            model.load_state_dict(Wide().state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        step = anyshape.train_step(model, loss, optimizer) if not weights else None
        for batch in batches:
            if step is not None:
                step(batch)
            else:
                loss(model, batch.to(dtype)).backward()
                optimizer.step()
                optimizer.zero_grad()
        if step is not None:
            assert bands_of(step) or not products.native("bf16", host())
        weights.append([one.detach().double() for one in model.parameters()])
    for ours, theirs, exact in zip(*weights, strict=True):
        assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm() + 1e-6 * exact.norm()


def test_weight_that_its_own_gradient_reads() -> None:
    """The product would read rows that the update of an earlier band has written: so it is done as a whole."""
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(1024, 1024) / 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * (x @ self.weight.detach())

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum() / 100

    step = trained(Own, loss, [torch.randn(1024, 1024) / 32 for _ in range(3)])
    assert not bands_of(step)


def test_memory() -> None:
    """A call holds a band of the gradient of the largest weight in place of all of it."""
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 2048), nn.ReLU(), nn.Linear(2048, 4))

    needed = []
    for disable in ("", "epilogues"):
        model = make()
        step = anyshape.train_step(model, squared, torch.optim.SGD(model.parameters(), lr=1e-3), disable=disable)
        step(torch.randn(3, 16))
        needed.append(step.memory(arguments_0_0=3).curves[0].needs)
    whole = 4096 * 2048 * 4
    assert needed[0] < whole / 4 < whole < needed[1]


def test_updates_of_all_shapes_are_one_kernel() -> None:
    """How many elements a flat kernel has is a size of it."""
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 80), nn.Linear(80, 5))
    step = anyshape.train_step(model, squared, torch.optim.AdamW(model.parameters()))
    step(torch.randn(3, 64))
    plan = step.programs[1].executable.plan
    updates = [part for part in plan.steps for name in (f"arg{k}_1" for k in range(9))
               if any(window.buffer == name and window.type.rank == 2 for window in getattr(part, "params", ()))]
    assert len({one.regimes[0].kernel for one in updates if one.along}) == 1
    assert len(updates) >= 3


def test_explain_names_them() -> None:
    model = Wide()
    step = anyshape.train_step(model, squared, torch.optim.AdamW(model.parameters()))
    step(torch.randn(3, 260))
    said = [note.what for program in step.explain().programs for note in program.steps]
    assert sum("bands of" in what for what in said) == 2
