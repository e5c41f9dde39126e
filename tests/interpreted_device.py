"""Interpreted kernels of the Triton backend behind the fake driver: versions, grids, params, scratch and the status as
a GPU gets them (tests/test_fake_device.py starts this in a process with TRITON_INTERPRET=1)."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import anyshape
import fake_device
from anyshape.backend import targets
from anyshape.backend.triton import target as triton_target
from anyshape.backend.triton.compile import parameters
from anyshape.backend.triton.gpu import hardware_of
from anyshape.backend.triton.interpret import InterpretedKernel
from anyshape.backend.triton.kernel import POINTER, SCRATCH, STATUS, DeviceKernel, KernelVersion
from anyshape.backend.triton.schedule import emit
from anyshape.backend.triton.text import read
from anyshape.base.errors import IndexRangeError
from anyshape.kernel.loop_ir.program import LoopProgram
from anyshape.plan.ir.program import LibraryStep
from anyshape.runtime.call.unread_status import settle
from fake_driver import ORDERS, Body, FakeDriver
from models import ZOO
from test_models import check_shapes

pytestmark = pytest.mark.filterwarnings("ignore")


OWN_PRODUCTS = {0: False}  # of targets that are made now


class Launched:
    """A kernel whose code is interpreted when the fake driver launches it."""

    def __init__(self, kernel: InterpretedKernel, fake: FakeDriver) -> None:
        self.name, self.sizes = kernel.name, kernel.source.sizes
        self.kernel, self.fake = kernel, fake
        self.made: dict[KernelVersion, DeviceKernel] = {}

    def codes(self, sizes: Sequence[int], alignments: Sequence[int], guarded: bool) -> list[DeviceKernel]:
        chosen = dict.fromkeys(self.kernel.source.choose(sizes, alignment, guarded) for alignment in alignments)
        return [self.code(version) for version in chosen]

    def code(self, version: KernelVersion) -> DeviceKernel:
        if version not in self.made:
            kinds = parameters(self.kernel.source, version)
            name = f"{self.name}.{len(self.made)}"
            image = self.fake.register(name, self.body(version, kinds), kinds)
            self.made[version] = DeviceKernel(self.name, name, version, kinds, 32 * version.warps, 0, "fake",
                                              image, "")
        return self.made[version]

    def body(self, version: KernelVersion, kinds: Sequence[str]) -> Body:
        def run(grid: tuple[int, int, int], values: list[int]) -> None:
            given: dict[str, list[int]] = {}
            for kind, value in zip(kinds, values, strict=True):
                given.setdefault(kind, []).append(value)
            for address in given.get(POINTER, ()):
                assert address % version.alignment == 0
            self.kernel.ran.append(version.title)
            self.kernel.launch(version, given.get(POINTER, []), given.get(version.index, []), given[STATUS][0],
                               *given.get(SCRATCH, []))
        return run


class Target(fake_device.Target):
    """The fake device with a GPU's kernels."""

    def __init__(self, cpu: Any, fake: FakeDriver) -> None:
        super().__init__(cpu, fake)
        self.hardware = hardware_of("", OWN_PRODUCTS[0])
        self.kernels: list[Launched] = []

    @property
    def unsupported(self) -> frozenset[str]:
        return frozenset(triton_target.unsupported())

    def emit(self, program: LoopProgram) -> str:
        return emit(program)

    def build(self, texts: Sequence[str]) -> list[Any]:
        self.kernels += (found := [Launched(InterpretedKernel(read(text)), self.fake) for text in texts])
        return found


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    monkeypatch.setitem(targets.TARGETS, "fake", fake_device.__name__)
    monkeypatch.setattr(targets, "DEFAULT", "fake")
    monkeypatch.setattr(fake_device, "Target", Target)
    found = FakeDriver()
    monkeypatch.setattr(fake_device, "DEVICE", [found])
    yield found
    assert not found.alarms


def titles(fast: Any) -> set[str]:
    """The versions that ran."""
    return {title for kernel in fast.programs[0].executable.target.kernels for title in kernel.kernel.ran}


def equal(fake: FakeDriver, fast: Any, function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    found = fast(*inputs)
    fake.everything()
    torch.testing.assert_close(found, function(*inputs))


def test_versions_by_size_and_address(fake: FakeDriver) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, 1) * 2

    fast = anyshape.compile(function, strict=True)
    for order in ORDERS[:3]:
        fake.set(order)
        for rows, columns in ((3, 7), (1, 16), (2, 64), (0, 5)):
            equal(fake, fast, function, torch.randn(rows, columns))
    base = torch.randn(3 * 16 + 1)
    equal(fake, fast, function, base[1:].view(3, 16))  # an address that is no multiple of 16
    found = titles(fast)
    assert any("unaligned" in title for title in found) and any("/16" in title for title in found), found
    told = [note for one in fast.explain().programs for note in one.versions]
    assert found <= {title for note in told for title in note.version.split(", or ")}
    assert any("/16" in note.version and "x_1 16" in note.sizes[0] for note in told), told
    assert "versions that ran" in str(fast.explain())


def test_versions_for_memory_that_is_allocated_are_for_aligned_addresses(fake: FakeDriver) -> None:
    """Of a kernel between others there is one version; of one that reads an input two, one of which runs."""
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, 1).cumsum(0).exp()

    fast = anyshape.compile(function, strict=True)
    base = torch.randn(16 * 16 + 1)
    equal(fake, fast, function, base[1:].view(16, 16))
    made = {kernel.name: sorted(version.alignment for version in kernel.made)
            for kernel in fast.programs[0].executable.target.kernels if kernel.made}
    assert [16] in made.values() and [1, 16] in made.values(), made
    assert any("unaligned" in title for title in titles(fast))


def test_a_failed_check(fake: FakeDriver) -> None:
    fast = anyshape.compile(lambda x, i: (x[i] * 2).cumsum(0), strict=True)
    x, good, bad = torch.randn(5), torch.tensor([1, 2]), torch.tensor([1, 7])
    equal(fake, fast, lambda x, i: (x[i] * 2).cumsum(0), x, good)
    held = fast(x, bad)
    with pytest.raises(IndexRangeError):
        settle(fast.programs[0].executable.context.unread, wait=True)
    fake.everything()
    assert len(held) == 2
    equal(fake, fast, lambda x, i: (x[i] * 2).cumsum(0), x, good)


def test_a_model(fake: FakeDriver) -> None:
    fake.set(ORDERS[1])
    fake.reads = True
    check_shapes(ZOO["mixer"], ZOO["mixer"].shapes(1))


class Gated(torch.nn.Module):
    """The MLP of llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(48, 88, bias=False, dtype=torch.bfloat16) for _ in range(2))
        self.down = torch.nn.Linear(88, 48, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class Linear(torch.nn.Module):
    """A product with an addend."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(24, 40, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x))


class Biased(torch.nn.Module):
    """A product, a bias along its columns, and the operand of the product again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (torch.nn.Parameter(torch.randn(n, dtype=torch.bfloat16)) for n in ((24, 24), (24,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return torch.relu(y @ self.weight + self.bias) + y


def test_a_product_that_a_backward_reads_too(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward has no product of the library's; the backward reads what it has stored."""
    monkeypatch.setitem(OWN_PRODUCTS, 0, True)
    torch.manual_seed(1)
    own = torch.nn.Linear(24, 40, bias=False, dtype=torch.bfloat16)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(own(x))

    fast = anyshape.compile(function, strict=True)
    fake.reads = True
    for rows in (5, 1, 67, 130):
        x = torch.randn(rows, 24, dtype=torch.bfloat16, requires_grad=True)
        seed = torch.randn(rows, 40, dtype=torch.bfloat16)
        found, wanted = fast(x), function(x)
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
        for one, other in zip(torch.autograd.grad(found, (x, own.weight), seed),
                              torch.autograd.grad(wanted, (x, own.weight), seed), strict=True):
            torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)
    plan = next(one.executable.plan for one in fast.programs if "forward" in one.name)
    assert not any(isinstance(step, LibraryStep) for step in plan.steps) and any(b.is_saved for b in plan.buffers)


@pytest.mark.parametrize(("make", "products"), [(Gated, 2), (Linear, 0), (Biased, 0)])
def test_products_with_an_epilogue(fake: FakeDriver, make: Callable[[], torch.nn.Module], products: int,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan has a product of the library's less, and the numbers of PyTorch at any size."""
    monkeypatch.setitem(OWN_PRODUCTS, 0, True)
    model = make()
    width = next(model.parameters()).shape[1]
    with torch.no_grad():
        fast = anyshape.compile(model, strict=True)
        for order in ORDERS[:2]:
            fake.set(order)
            for rows in (5, 1, 0, 2, 67, 130):
                x = torch.randn(rows, 3, width, dtype=torch.bfloat16)
                found = fast(x)
                fake.everything()
                torch.testing.assert_close(found, model(x), rtol=2e-2, atol=2e-2)  # a rounding of bf16
    plan = fast.programs[0].executable.plan
    assert sum(isinstance(step, LibraryStep) for step in plan.steps) == products
    assert {title.split()[0] for title in titles(fast)} >= {"product64x64", "product128x128"}
    assert "product128x128" in str(fast.explain())
