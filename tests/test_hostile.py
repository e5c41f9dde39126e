"""Promises to users, tried with hostile use: nothing is wrong, nothing is silent, nothing is left behind."""
from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.device_mesh
import torch.distributed.fsdp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anyshape
from anyshape.base.errors import AnyShapeError


@pytest.fixture
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_user_can_assert_that_nothing_ran_eagerly() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    fast = anyshape.compile(model)
    anyshape.reset_stats()
    for rows in (3, 5, 1):
        fast(torch.randn(rows, 8)).sum().backward()
    assert anyshape.stats()["eager_calls"] == 0


def test_what_works_with_other_processes_says_that_it_is_not_compiled(one_process: None) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def sharded() -> nn.Module:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        return torch.distributed.fsdp.fully_shard(net(), mesh=mesh)

    for model in (DistributedDataParallel(net()), sharded()):
        for settings in ({"strict": True}, {"memory_limit": "1GB"}):
            with pytest.raises(AnyShapeError, match="not compiled yet"):
                anyshape.compile(model, **settings)(torch.randn(3, 8))
        fast = anyshape.compile(model)
        anyshape.reset_stats()
        with pytest.warns(UserWarning, match="not compiled yet"):
            fast(torch.randn(3, 8)).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fast(torch.randn(5, 8))
        assert anyshape.stats()["eager_calls"] == 2 and "not compiled yet" in str(fast.explain())
    inside = DistributedDataParallel(anyshape.compile(net(), strict=True))
    anyshape.reset_stats()
    inside(torch.randn(3, 8)).sum().backward()
    assert anyshape.stats()["eager_calls"] == 0 and all(one.grad is not None for one in inside.parameters())


class Tagged:
    def __init_subclass__(cls, *, tag: str) -> None:
        cls.tag = tag


class Model(nn.Linear, Tagged, tag="of its author"):
    pass


@anyshape.compile
def decorated(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def plain(x: torch.Tensor) -> torch.Tensor:
    return x * 3


MISUSE: dict[str, Callable[[], Any]] = {
    r"compile\(Linear\(\.\.\.\)\)": lambda: anyshape.compile(nn.Linear),
    "it is torch.compile's": lambda: anyshape.compile(plain, mode="max-autotune"),
    "perhaps memory_limit": lambda: anyshape.compile(plain, memory_limt=1),
    "memory_limit is nan": lambda: anyshape.compile(plain, memory_limit=float("nan")),
    "memory_limit is True": lambda: anyshape.compile(plain, memory_limit=True),
    "memory_limit is 0.5": lambda: anyshape.compile(plain, memory_limit=0.5),
    "no name leads to it": lambda: pickle.dumps(anyshape.compile(lambda x: x)),
    "lambda model, x, y": lambda: anyshape.train_step(
        Model(2, 2), nn.CrossEntropyLoss(), torch.optim.SGD(Model(2, 2).parameters())),
}


@pytest.mark.parametrize("words", MISUSE)
def test_misuse_is_refused_with_what_to_do(words: str) -> None:
    with pytest.raises(AnyShapeError, match=words) as raised:
        MISUSE[words]()
    assert raised.value.what and raised.value.why and raised.value.do


def test_a_misspelt_variable_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYSHAPE_MEMORY_LIMT", "12GiB")
    with pytest.warns(UserWarning, match="perhaps ANYSHAPE_MEMORY_LIMIT is meant"):
        anyshape.compile(plain)


def test_compiled_objects_are_sliced_copied_and_pickled_as_what_they_are() -> None:
    x = torch.randn(3, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    fast = anyshape.compile(model, memory_limit=1.5e9)
    torch.testing.assert_close(fast(x), model(x))
    torch.testing.assert_close(fast[:2](x), model[:2](x))
    for again in (copy.copy(fast), copy.deepcopy(fast)):
        torch.testing.assert_close(again(x), model(x))
        assert again.programs and again._anyshape is not fast._anyshape
    assert copy.copy(fast)[0] is model[0]
    torch.testing.assert_close(pickle.loads(pickle.dumps(fast))(x), model(x))
    tagged = Model(8, 4)
    torch.testing.assert_close(anyshape.compile(tagged)(x), tagged(x))
    once = anyshape.compile(plain, strict=True)
    for function in (decorated, once):
        wanted = function(x)
        for again in (copy.copy(function), copy.deepcopy(function), pickle.loads(pickle.dumps(function))):
            torch.testing.assert_close(again(x), wanted)
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert pickle.loads(pickle.dumps(once))._anyshape.compilation.config.strict
