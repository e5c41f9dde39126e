"""What a tensor is beside dtype, sizes and strides: bits, no memory, other layouts, at every way into a program."""
from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import anyshape
from anyshape.base.errors import InputError, Unsupported
from anyshape.frontend.capture.dynamo_backend import FallbackWarning


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


class Named(Tensor):
    """A subclass that adds nothing to what a tensor does."""


def _without_memory(rows: int) -> Tensor:
    tensor = torch.randn(rows, 6)
    tensor.untyped_storage().resize_(0)
    return tensor


MATERIALISED = {
    "imaginary part of a conjugate": lambda n: torch.randn(n, 6, dtype=torch.complex64).conj().imag,
    "negative bit": lambda n: torch._neg_view(torch.randn(n, 6)),
    "transposed, negative bit": lambda n: torch._neg_view(torch.randn(6, n).t()),
    "zeros without memory": lambda n: torch._efficientzerotensor((n, 6)),
}
REFUSED = {
    "no memory": _without_memory,
    "sparse": lambda n: torch.eye(n, 6).to_sparse(),
    "sparse rows": lambda n: torch.eye(n, 6).to_sparse_csr(),
    "meta": lambda n: torch.empty(n, 6, device="meta"),
    "MKL-DNN": lambda n: torch.ones(n, 6).to_mkldnn(),
}


class Scaled(nn.Module):
    """Reads a weight, a buffer and an input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("shift", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * 2 + self.shift)


def _exported() -> object:
    rows = torch.export.Dim("rows")
    return torch.export.export(Scaled(), (torch.ones(3, 6),), dynamic_shapes=({0: rows},))


@pytest.mark.parametrize("way", ["compile", "torch.compile", "export"])
def test_bits_and_missing_memory_at_every_entrance(way):
    torch.manual_seed(1)
    exported = _exported() if way == "export" else None
    torch.manual_seed(1)
    model = exported.module() if exported is not None else Scaled()
    fast = {"compile": lambda: anyshape.compile(model, strict=True),
            "torch.compile": lambda: torch.compile(model, backend="anyshape", dynamic=True),
            "export": lambda: anyshape.compile(exported)}[way]()
    with torch.no_grad():
        fast(torch.ones(4, 6))
        for make in MATERIALISED.values():
            for rows in (3, 5):
                x = make(rows)
                torch.testing.assert_close(fast(x), model(x))
                assert x.is_neg() == make(rows).is_neg()  # the caller's own stays as it is
        with pytest.raises(InputError, match="no memory: its storage has 0 bytes"):
            fast(_without_memory(4))
        if exported is None:  # no elements, no address
            torch.testing.assert_close(fast(torch.ones(0, 6)), model(torch.ones(0, 6)))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_exported_programs_refuse_other_layouts_warm_and_cold():
    fast = anyshape.compile(_exported())
    for rows in (3, 4, 3):
        fast(torch.ones(rows, 6))
        for make in REFUSED.values():
            with pytest.raises(InputError, match=r"(?s)why: .*do: "):
                fast(make(rows))


def test_weights_and_buffers_with_bits():
    model = Scaled()
    fast = anyshape.compile(model, strict=True)
    x = torch.randn(4, 6)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(x), model(x))
        model.shift = torch._neg_view(torch.randn(6))
        model.linear.bias = nn.Parameter(torch._neg_view(torch.randn(3)))
        torch.testing.assert_close(fast(x), model(x))
        model.shift = torch._efficientzerotensor((6,))
        torch.testing.assert_close(fast(x), model(x))


def test_an_input_with_the_negative_bit_is_written():
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(2).add_(1)
        return x + 1, x.t()

    fast = anyshape.compile(step, strict=True)
    for rows in (3, 4):
        x = torch._neg_view(torch.randn(rows, 6))
        expected = x.clone()
        for found, wanted in zip(fast(x), step(expected), strict=True):
            torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(x, expected)
        assert x.is_neg()


def test_gradients_of_every_kind_that_come_in():
    fast = anyshape.compile(lambda x: x * x * 3, strict=True)
    kinds = {**MATERIALISED, "subclass": lambda n: torch.randn(n, 6).as_subclass(Named),
             "sparse": lambda n: torch.eye(n, 6).to_sparse(), "parameter": lambda n: nn.Parameter(torch.randn(n, 6))}
    for make in ({"plain": lambda n: torch.ones(n, 6)} | kinds).values():
        x = torch.randn(5, 6, requires_grad=True)
        tangent = make(5)
        fast(x).backward(tangent)
        torch.testing.assert_close(x.grad, (6 * x * tangent.to_dense().as_subclass(Tensor)).detach())
        assert type(x.grad) is Tensor
    loss = fast(x)
    with pytest.raises(InputError, match="no memory"):
        loss.backward(_without_memory(5))


def test_a_weight_that_lost_its_memory_between_forward_and_backward():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    fast = anyshape.compile(model, strict=True)
    x = torch.randn(3, 6, requires_grad=True)
    fast(x).sum().backward()
    loss = fast(x).sum()
    model[1].weight.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="no memory"):
        loss.backward()


def test_a_train_step_reads_bits():
    models = [nn.Linear(6, 1) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    loss = lambda model, x: model(x).square().mean()  # noqa: E731
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    step = anyshape.train_step(models[0], loss, optimizers[0], strict=True)
    for make in ({"plain": lambda n: torch.randn(n, 6)} | MATERIALISED).values():
        x = make(4)
        found = step(x)
        wanted = loss(models[1], x)
        optimizers[1].zero_grad()
        wanted.backward()
        optimizers[1].step()
        torch.testing.assert_close(found, wanted.detach())
    torch.testing.assert_close(models[0].weight, models[1].weight)


def test_results_of_operators_that_pytorch_runs():
    def parts(z: Tensor) -> tuple[Tensor, ...]:
        inverse = torch.linalg.inv(z)
        upper = torch.linalg.cholesky(z @ z.mH + 9 * torch.eye(4), upper=True)
        return inverse.mH.imag * 2, z.conj().imag + 1, upper.imag

    fast = anyshape.compile(parts)
    z = torch.randn(4, 4, dtype=torch.complex64) + 3 * torch.eye(4)
    for one in (z, z.conj(), z.mH):
        for found, wanted in zip(fast(one), parts(one), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_nested_tensors_run_as_pytorch_or_are_refused():
    nested = torch.nested.nested_tensor([torch.randn(4, 6), torch.randn(3, 6)], layout=torch.jagged)
    double = torch.compile(lambda x: x * 2, backend="anyshape")
    with pytest.warns(FallbackWarning, match="nested"):
        torch.testing.assert_close(double(nested).values(), nested.values() * 2)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="nested"), warnings.catch_warnings():
        torch.compile(lambda x: x * 3, backend="anyshape", options={"strict": True})(nested)
    with pytest.raises(Unsupported, match="nested"):
        anyshape.compile(lambda x: x * 3, strict=True)(nested)


@torch.library.custom_op("anyshape_tests::nothing_but_zeros", mutates_args=())
def nothing_but_zeros(x: Tensor) -> Tensor:
    return torch._efficientzerotensor(x.shape)


@nothing_but_zeros.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_zeros_without_memory_that_a_program_makes():  # as derivatives forward in mode do
    weight = torch.randn(6, 6)

    def made(x: Tensor) -> tuple[Tensor, ...]:
        return (nothing_but_zeros(x) @ weight + 1, nothing_but_zeros(x),
                torch._efficientzerotensor((x.shape[0], 6)) @ weight + x)

    fast = anyshape.compile(made, strict=True)
    for rows in (3, 5):
        x = torch.randn(rows, 6)
        for found, wanted in zip(fast(x), made(x), strict=True):
            torch.testing.assert_close(found, wanted.clone())
