"""Models on interpreted kernels of the Triton backend, behind the real compiler, plans and runtime, in a process with
TRITON_INTERPRET=1 (tests/test_triton.py starts it)."""
from __future__ import annotations

import pytest
import torch

import anyshape
import interpreted
from models import ZOO
from test_models import check_half, check_shapes, check_train_steps

pytestmark = pytest.mark.filterwarnings("ignore")
USUAL = ("mixer", "patches", "clicks", "recurrent")


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def test_it_runs() -> None:
    fast = anyshape.compile(lambda x, y: (torch.softmax(x @ y, -1), x.sort()[0]), strict=True)
    for rows in (5, 1, 0, 33):
        x, y = torch.randn(rows, 7), torch.randn(7, 3)
        torch.testing.assert_close(fast(x, y)[0], torch.softmax(x @ y, -1))
    assert any(interpreted.kernels.ran.values())


def test_a_failed_check_is_an_error() -> None:
    fast = anyshape.compile(lambda x, i: x[i] * 2, strict=True)
    x = torch.randn(5)
    torch.testing.assert_close(fast(x, torch.tensor([1, 2])), x[[1, 2]] * 2)
    with pytest.raises(IndexError):
        fast(x, torch.tensor([1, 7]))


def test_an_embedding_learns() -> None:
    """Rows that are read twice add up: the gradient is scattered."""
    own = torch.nn.EmbeddingBag(11, 6, mode="sum")
    fast = anyshape.compile(own, strict=True)
    for count in (1, 5):
        ids = torch.randint(0, 11, (3, count))
        own.zero_grad()
        own(ids).square().sum().backward()
        wanted = own.weight.grad.clone()
        own.zero_grad()
        fast(ids).square().sum().backward()
        torch.testing.assert_close(own.weight.grad, wanted)


@pytest.mark.parametrize("name", USUAL)
def test_models(name: str) -> None:
    check_shapes(ZOO[name], ZOO[name].shapes(1))


@pytest.mark.full
@pytest.mark.parametrize("name", ZOO)
def test_every_model(name: str) -> None:
    check_shapes(ZOO[name], ZOO[name].shapes(3))
    check_train_steps(ZOO[name])
    if ZOO[name].half:
        check_half(ZOO[name], 1)
