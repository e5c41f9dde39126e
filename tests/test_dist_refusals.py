"""What a rank says where something is wrong, in one process: the words, and who says them."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import anyshape
from anyshape.base.errors import InputError, RankError
from anyshape.dist.mesh import mesh_of
from anyshape.frontend.train_step import distributed
from anyshape.runtime.collectives import agreement, lost_rank, process_group
from anyshape.runtime.collectives.process_group import ProcessMesh


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    process_group.forget()
    lost_rank.KNOWN.clear()
    dist.destroy_process_group()


def made(loss_fn: Callable[..., Tensor], strategy: str | None = "ddp", **more: Any) -> Any:
    model = nn.Linear(2, 3)
    return anyshape.train_step(model, loss_fn, torch.optim.AdamW(model.parameters()), threads=1, strategy=strategy,
                               **more)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.usefixtures("one_process")
def test_what_the_users_own_code_raises_is_raised_as_it_is_and_others_hear_of_it(
        strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if "weights" in batch:
            raise ValueError("no weights, please")
        return model(batch["x"]).square().mean()

    step = made(loss_fn, strict=strict)
    told: list[str] = []
    exchanged = agreement.exchanged
    monkeypatch.setattr(agreement, "exchanged", lambda *given: told.append(given[3]) or exchanged(*given))
    for batch, kind, words in (({"y": torch.ones(2, 2)}, KeyError, "'x'"),
                               ({"weights": torch.ones(2)}, ValueError, "no weights, please")):
        with pytest.raises(kind, match=words):
            step(batch)
        assert told.pop() == f"failed: {kind.__name__}: {words}" and not told
        assert step.position == step.count == 0


@pytest.mark.usefixtures("one_process")
def test_weights_that_are_whole_for_a_while_or_from_here_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step inside of `whole` would be lost, a frozen weight is dealt out no more, and a rank that fails where all
    bring weights together says so at once."""
    step = made(lambda model, x: model(x).square().mean(), "fsdp", strict=True, ema=0.5)
    model, x = step.settings.model, torch.ones(2, 2)
    alone = nn.Linear(2, 3)
    alone.load_state_dict(model.state_dict())
    own = torch.optim.AdamW(alone.parameters())
    for number in range(3):
        loss = alone(x).square().mean()
        assert torch.allclose(step(x), loss, rtol=1e-5)
        own.zero_grad()
        loss.backward()
        own.step()
        if number == 0:
            assert model.bias.isnan().all()
            with step.whole(), pytest.raises(InputError, match="called inside of") as caught:
                step(x)
            assert caught.value.why and caught.value.do and step.count == 1
            model.bias.requires_grad_(False)
            alone.bias.requires_grad_(False)
    assert torch.allclose(model.bias, alone.bias, rtol=1e-5)
    assert torch.isfinite(step.averages["bias"]).all() and model.weight.isnan().all()

    def fails(*_: object) -> None:
        raise MemoryError("tried to allocate 5 GB")

    monkeypatch.setattr(distributed, "restore", fails)
    with pytest.raises(MemoryError), step.whole():
        raise AssertionError("it is not entered")
    with pytest.raises(RankError, match="has failed in a step before"):
        step(x)


@pytest.mark.usefixtures("one_process")
def test_a_state_that_is_part_of_another_is_named() -> None:
    step = made(lambda model, x: model(x).sum())
    optimizer = step.settings.optimizer
    for rows in (3, 1):
        optimizer.state[step.settings.model.weight] = {
            "step": torch.ones(()), "exp_avg": torch.zeros(rows, 2), "exp_avg_sq": torch.zeros(3, 2)}
        if rows == 3:
            step._states.prepare(True)
    with pytest.raises(InputError, match=r"exp_avg of weight has the shape \[1, 2\]") as caught:
        step(torch.ones(4, 2))
    assert caught.value.where and "[3, 2]" in caught.value.why and caught.value.do


@pytest.mark.usefixtures("one_process")
def test_versions_of_this_package_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, str]] = []
    monkeypatch.setattr(distributed, "agree", lambda mesh, own: said.append(own))
    made(lambda model, x: model(x).sum())
    assert f"anyshape {anyshape.__version__}, " in said[0]["versions"] and torch.__version__ in said[0]["versions"]


def test_programs_that_differ_are_told_where_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["graph f(\n  v0: size\n)\n  v1 = mul(v0, 1.0)\n", "graph f(\n  v0: size\n)\n  v1 = mul(v0, 2.0)\n"]
    numbers = [[agreement.digest(one), *[0] * agreement.NUMBERS] for one in words]
    monkeypatch.setattr(agreement, "_gathered", lambda mesh, own: numbers)
    monkeypatch.setattr(agreement, "said", lambda mesh, own, most: [one[:most] for one in words])
    for rank in (0, 1):
        with pytest.raises(RankError, match="other programs than rank 0: 1") as caught:
            agreement.exchanged(ProcessMesh(mesh_of(data=2), rank), numbers[rank][0], [], words[rank])
        assert ("rank 0 is about to run '  v1 = mul(v0, 1.0)', rank 1 '  v1 = mul(v0, 2.0)'" in caught.value.why) == (
            rank == 0)
    words[1], numbers[1][0] = "failed: KeyError: 'x'", 1
    with pytest.raises(RankError, match="rank 1 failed before the step") as caught:
        agreement.exchanged(ProcessMesh(mesh_of(data=2), 0), numbers[0][0], [], words[0])
    assert caught.value.why == "rank 1 said: KeyError: 'x'" and caught.value.do
    for first, second, wanted in (("a", "a\nb", ("", "b")), ("", "", ("", "")), ("save", "load", ("save", "load"))):
        assert agreement.around_difference(first, second) == wanted


def test_ranks_that_fail_alike_say_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_gathered", lambda mesh, own: [own, own])
    for rank, error in ((0, InputError("no", do="that")), (1, InputError("no", do="that")), (1, ValueError("no"))):
        mesh = ProcessMesh(mesh_of(data=2), rank)
        if rank == 0 or isinstance(error, ValueError):
            agreement.fail_together(mesh, error)
        else:
            with pytest.raises(InputError, match=r"^rank 1: no \(see rank 0\)$"):
                agreement.fail_together(mesh, error)
        assert mesh.met == 1


@pytest.mark.parametrize(("gone", "teller"), [(0, 1), (1, 0)])
def test_the_first_rank_that_is_left_tells_who_was_lost(gone: int, teller: int,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_rank, "_said", lambda rank, known: "ValueError: x" if rank == gone else "")
    monkeypatch.setattr(lost_rank, "_peers", dict)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    for rank in {0, 1, 2} - {gone}:
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        found = lost_rank.lost(RuntimeError("Connection closed by peer"))
        assert found is not None and f"rank {gone} is lost" in found.what
        assert (found.why == f"rank {gone} said: ValueError: x") == (rank == teller), (rank, found)
        assert (f"(see rank {teller})" in found.what) == (rank != teller)
