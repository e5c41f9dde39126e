"""Models under DistributedDataParallel, fully_shard and tensor parallel DTensors compile, on two processes."""
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import anyshape
from test_dist_processes import ranks

ONE_PROGRAM = 2  # a forward and a backward


def check(found: list[dict[str, Any]], **programs: int) -> None:
    for rank in found:
        for name, count in programs.items():
            one = rank[name]
            assert one["worst"] < 1e-5, (name, found)
            assert one["programs"] == count and one.get("eager_calls", 0) == 0, (name, found)


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("make", [
    lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
    pytest.param(lambda: nn.Linear(4, 4), marks=pytest.mark.full),
    pytest.param(lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), marks=pytest.mark.full)])
def test_modules_of_torchs_own_are_programs_between_the_hooks_that_gather_their_weights(
        make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(make(), make())
    model: Any = copy.deepcopy(plain)
    for number, block in enumerate(model):
        model[number] = fully_shard(anyshape.compile(block, strict=True), mesh=init_device_mesh("cpu", (1,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    before = anyshape.stats()
    for rows in (3, 5):
        x = torch.randn(2, rows, 4)
        torch.testing.assert_close(model(x), plain(x))
        for one in (model, plain):
            one(x).square().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)
    after = anyshape.stats()
    assert after["eager_calls"] == before["eager_calls"] and after["runs"] - before["runs"] == 2 * 2 * 3


def test_wrapped_models_compile() -> None:
    found = ranks(2, "wrapped")
    check(found, ddp=ONE_PROGRAM, tensor=ONE_PROGRAM, steps=ONE_PROGRAM)
    for rank in found:
        for name in ("loop", "sequence"):  # between hooks; of lengths that the ranks divide, and others
            one = rank[name]
            assert one["worst"] < 1e-5 and one["eager_calls"] == 0, (name, found)
            assert one["runs"] == (4 * one["programs"] if name == "loop" else 8), (name, found)
        lines = [text.splitlines() for text in rank["steps"]["refused"]]
        assert [len(one) for one in lines] == [3, 3, 3]
        for words, one in zip(("sharded already", "DTensors", "more than add up"), lines, strict=True):
            assert words in one[0] and "strategy=" in one[2]


@pytest.mark.full
def test_what_wrappers_can_be_told() -> None:
    found = ranks(2, "wrapped_more")
    check(found, **dict.fromkeys(("view", "static", "buffers", "unused", "quiet", "inside", "hook", "backend",
                                  "translator", "mixture"), ONE_PROGRAM), collectives=1 + ONE_PROGRAM)
    for rank in found:
        one = rank["buckets"]  # a forward and a backward for each part that torch makes
        assert one["worst"] < 1e-5 and one["programs"] > ONE_PROGRAM and one["programs"] % ONE_PROGRAM == 0, found
        assert one["eager_calls"] == 0 and one["runs"] == 4 * one["programs"], found
        for name in ("translator blocks", "mixture blocks"):  # a forward and a backward for each block
            assert rank[name]["worst"] < 1e-5 and rank[name]["eager_calls"] == 0, (name, found)
            assert rank[name]["programs"] == ONE_PROGRAM * (4 if name.startswith("t") else 2), (name, found)
        for name in ("fsdp", "blocks", "kept", "loops", "usual", "mixed"):
            one = rank[name]
            assert one["worst"] < (1e-2 if name == "mixed" else 1e-5), (name, found)
            assert one["eager_calls"] == 0 and one["runs"] >= 16, (name, found)
