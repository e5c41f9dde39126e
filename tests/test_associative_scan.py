"""torch.associative_scan compiled: one program for every length where kernels know the recurrence, else as PyTorch."""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import anyshape
from anyshape.torch_compat import need

associative_scan = need("torch._higher_order_ops.associative_scan")
Combine = Callable[[Any, Any], Any]
SHAPES = ((3, 7, 5), (2, 33, 16), (4, 64, 1), (2, 1, 3), (1, 5, 40), (5, 300, 2))


def linear(left: Any, right: Any) -> Any:
    return left[0] * right[0], right[0] * left[1] + right[1]


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    return [torch.rand(shape, generator=draws).to(dtype).requires_grad_(),
            torch.randn(shape, generator=draws).to(dtype).requires_grad_()]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_linear_recurrence_is_one_program(dim: int, reverse: bool) -> None:
    def states(a: torch.Tensor, b: torch.Tensor) -> Any:
        return associative_scan(linear, (a, b), dim, reverse=reverse, combine_mode="generic")

    fast = anyshape.compile(states, strict=True)
    for shape in SHAPES:
        found, wanted = drawn(shape), drawn(shape)
        for x, y in zip(fast(*found), states(*wanted), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        sum((x * x).sum() for x in fast(*found)).backward()  # type: ignore[attr-defined]
        sum((x * x).sum() for x in states(*wanted)).backward()  # type: ignore[attr-defined]
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)
    assert len(fast.explain().programs) == 2  # a forward and its backward


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_linear_recurrence_is_no_less_exact_than_eager(dtype: torch.dtype) -> None:
    for dim, shape in ((1, (3, 3001)), (0, (257, 2300)), (0, (3001, 3))):
        with torch.no_grad():
            given = drawn(shape, dtype)
            exact = associative_scan(linear, [one.double() for one in given], dim, combine_mode="generic")[1]
            errors = [(h[1].double() - exact).abs().max().item() for h in (
                anyshape.compile(lambda *x, d=dim: associative_scan(linear, x, d, combine_mode="generic"),
                                 strict=True)(*given), associative_scan(linear, given, dim, combine_mode="generic"))]
        assert errors[0] <= errors[1] + (1e-12 if dtype == torch.float64 else 0), (dim, shape, errors)


@pytest.mark.parametrize("combine", [
    torch.add, torch.mul, lambda a, b: b * a, torch.maximum, torch.minimum, torch.logaddexp])
def test_one_tensor(combine: Combine) -> None:
    fast = anyshape.compile(lambda x: associative_scan(combine, x, 1, combine_mode="generic"), strict=True)
    for shape in SHAPES:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(fast(x), associative_scan(combine, x, 1, combine_mode="generic"),
                                   rtol=1e-5, atol=1e-5)
    assert len(fast.explain().programs) == 1


def other(left: Any, right: Any) -> Any:
    """Rotations: the product of complex numbers."""
    return {"re": left["re"] * right["re"] - left["im"] * right["im"],
            "im": left["re"] * right["im"] + left["im"] * right["re"]}


def test_another_function_has_a_program_from_a_power_of_two_to_the_next() -> None:
    """Whether a length is even, at each level of the tree of combinations, is no question."""
    fast = anyshape.compile(lambda x: associative_scan(other, {"re": x, "im": x * 0.5}, 1, combine_mode="generic"),
                            strict=True)
    for shape in ((2, 5, 3), (2, 4, 3), (3, 7, 3)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        wanted = associative_scan(other, {"re": x, "im": x * 0.5}, 1, combine_mode="generic")
        torch.testing.assert_close(fast(x), wanted, rtol=1e-4, atol=1e-5)
    assert len(fast.explain().programs) == 1


def test_the_first_factor_is_not_read() -> None:
    a, b = torch.full((1, 4, 300), math.inf), torch.ones(1, 4, 300)
    a[:, 1:] = 0.5
    b[:, 0] = -0.0
    fast = anyshape.compile(lambda a, b: associative_scan(linear, (a, b), 1, combine_mode="generic")[1], strict=True)
    for first, second in ((a, b), (a[:, :2, :3], b[:, :2, :3]), (a[..., :1], b[..., :1])):
        found = fast(first, second)
        wanted = associative_scan(linear, (first, second), 1, combine_mode="generic")[1]
        assert torch.equal(found, wanted) and torch.equal(found.signbit(), wanted.signbit())


def test_the_gradient_of_a_product_of_zeros_is_exact_and_one_program() -> None:
    fast = anyshape.compile(lambda x: x.cumprod(1), strict=True)
    for shape in ((2, 7, 3), (3, 40, 2), (1, 5, 1), (2, 2, 9)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        x[:, ::3] = 0
        found, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
        (fast(found) ** 2).sum().backward()
        (wanted.cumprod(1) ** 2).sum().backward()
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-5)
    assert len(fast.explain().programs) == 2


def test_complex_numbers_have_eagers_gradients() -> None:
    fast = anyshape.compile(lambda a, b: associative_scan(linear, (a, b), 1, combine_mode="generic")[1])
    draws = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 5, 3, dtype=torch.complex128, generator=draws) for _ in range(2)]
    pairs = []
    for function in (fast, lambda a, b: associative_scan(linear, (a, b), 1, combine_mode="generic")[1]):
        a, b = (one.clone().requires_grad_() for one in given)
        h = function(a, b)
        (h * h.conj()).real.sum().backward()
        pairs.append((h, a.grad, b.grad))
    for found, wanted in zip(*pairs, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(("function", "words"), [
    (lambda x: associative_scan(torch.add, x, 7, combine_mode="generic"), "Dimension out of range"),
    (lambda x: associative_scan(torch.add, x, 1), "need to be on CUDA"),
    (lambda x: associative_scan(torch.add, x[:, :0], 1, combine_mode="generic"), "scan dimension > 0"),
    (lambda x: x.cumprod(7), "Dimension out of range")])
def test_what_eager_refuses(function: Callable[[torch.Tensor], torch.Tensor], words: str) -> None:
    x = torch.rand(3, 5, 4, requires_grad=True)
    for one in (function, anyshape.compile(function)):
        with pytest.raises((ValueError, IndexError), match=words):
            one(x)
