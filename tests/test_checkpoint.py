"""Checkpoints of train steps: in torch.distributed.checkpoint's format; each is whole, or not there."""
from __future__ import annotations

import io
import itertools
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim.lr_scheduler import StepLR

import anyshape
from anyshape.base.errors import ConfigError, InputError, OutputError
from anyshape.frontend.checkpoint.folder import StepWriter, checkpoints
from anyshape.frontend.checkpoint.local_part import LocalPart, segments
from anyshape.runtime.collectives.parts import cut


class Net(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, width), nn.Linear(width, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.dropout(self.up(x).tanh(), 0.3, self.training))


def made(seed: int = 0, width: int = 5, **more: Any) -> tuple[Any, StepLR]:
    torch.manual_seed(seed)
    model = Net(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = anyshape.train_step(model, lambda model, x: model(x).square().mean(), optimizer, threads=1, **more)
    return step, StepLR(optimizer, 2)


def trained(step: Any, schedule: StepLR, batches: range) -> list[Tensor]:
    for number in batches:
        step(torch.full((2 + number, 3), 0.1 * number))
        if step.position == 0:
            schedule.step()
    return [one.detach().clone() for one in step.settings.model.parameters()]


def test_a_step_goes_on_bit_by_bit(tmp_path: Path) -> None:
    step, schedule = made(accumulate=2, ema=0.5)
    trained(step, schedule, range(3))
    step.save(tmp_path, wait=False, schedule=schedule)
    wanted = trained(step, schedule, range(3, 7))
    step.wait_for_save()
    assert [one.name for one in checkpoints(tmp_path)] == ["step-000000001"]

    other, its = made(seed=1, accumulate=2, ema=0.5)
    torch.manual_seed(99)  # the checkpoint says what the random numbers are
    assert other.load(tmp_path, schedule=its) == 1 and other.position == 1 and its.last_epoch == 1
    found = trained(other, its, range(3, 7))
    assert all(map(torch.equal, found, wanted)) and other.count == step.count == 3
    assert all(torch.equal(other.averages[name], one) for name, one in step.averages.items())

    # without us: torch's own readers
    model, optimizer = Net(), step.settings.optimizer
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=checkpoints(tmp_path)[0], no_dist=True)
    dcp_to_torch_save(checkpoints(tmp_path)[0], tmp_path / "one.pt")
    one = torch.load(tmp_path / "one.pt", weights_only=True)
    assert all(torch.equal(one["model"][name], state["model"][name]) for name in model.state_dict())
    assert one["optimizer"]["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]
    assert set(one["optimizer"]["state"]["up.weight"]) == set(optimizer.state[step.settings.model.up.weight])

    from safetensors import safe_open
    from safetensors.torch import load_file

    anyshape.consolidate(tmp_path, tmp_path / "model.safetensors", rest=tmp_path / "rest.safetensors")
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(model.up.weight, one["model"]["up.weight"])
    with safe_open(tmp_path / "rest.safetensors", "pt") as rest:
        assert torch.equal(rest.get_tensor("optimizer.state.up.weight.exp_avg"),
                           one["optimizer"]["state"]["up.weight"]["exp_avg"])
        assert '"lr": 0.1' in rest.metadata()["optimizer.param_groups"]
        others = set(rest.keys())
    anyshape.consolidate(tmp_path, tmp_path / "all.safetensors", rest=tmp_path / "all.safetensors")
    assert set(load_file(tmp_path / "all.safetensors")) == {*others, *(f"model.{name}" for name in model.state_dict())}

    trained(other, its, range(7, 8))  # the step has ended: no gradients are gathered, and no weight has been used
    other.save(tmp_path, schedule=its)
    before = other.state_dict()
    assert other.load(tmp_path, schedule=its) == other.count == 4
    assert other.state_dict()["uses"] == before["uses"] == {}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint of step 0: it has no states of the optimiser, and no program was compiled."""
    folder = tmp_path_factory.mktemp("saved")
    step, schedule = made()
    step.save(folder, schedule=schedule)
    return folder


def test_a_checkpoint_of_something_else_says_what_differs(saved: Path, tmp_path: Path) -> None:
    wide, its = made(width=7)
    with pytest.raises(InputError, match=r"up\.weight is \[5, 3\] there and \[7, 3\] here") as caught:
        wide.load(saved, schedule=its)
    assert caught.value.do
    step, schedule = made()
    with pytest.raises(InputError, match=r"has no others\.loader"):
        step.load(saved, loader=schedule)
    step.settings.model.more = nn.Linear(1, 1)
    with pytest.raises(InputError, match=r"2 only here \(more\.bias, more\.weight\)"):
        step.load(saved)
    with pytest.raises(InputError, match="there is no checkpoint"):
        step.load(tmp_path)
    assert step.load(tmp_path, missing_ok=True) == 0
    with pytest.raises(ConfigError, match="keep"):
        step.save(tmp_path, keep=0)
    with pytest.raises(ConfigError, match="state_dict"):
        step.save(tmp_path, other=3)


class Evil:
    def __reduce__(self) -> Any:
        return print, ("ran",)

    def state_dict(self) -> Any:
        return {"it": self}

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize("content", [pickle.dumps(Evil()), b"", b"x"])
def test_no_code_of_a_checkpoint_runs(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    step, _ = made()
    with pytest.raises(InputError, match="is no checkpoint"):
        step.load(tmp_path)
    with pytest.raises(InputError, match=r"others\.it cannot be part of a checkpoint"):
        step.save(tmp_path / "run", it=Evil())
    assert capsys.readouterr().out == "" and not (tmp_path / "run").exists()


def test_a_full_disk_keeps_the_last_one_and_the_next_call_says_so(saved: Path, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    step, _ = made()
    for _ in range(4):
        step.save(tmp_path)
    assert [one.name for one in checkpoints(tmp_path)] == ["step-000000000.2", "step-000000000.3"]
    stale = tmp_path / ".step-000000007.part"
    stale.mkdir()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(StepWriter, "write_data", full)
        step.save(tmp_path, wait=False)
        with pytest.raises(OutputError, match=r"No space left on device; the last whole one is step-000000000\.3"):
            step.wait_for_save()
        with pytest.raises(OutputError):
            step.save(tmp_path)
    assert [one.name for one in sorted(tmp_path.iterdir())] == ["step-000000000.2", "step-000000000.3"]


class Dead(BaseException):
    """What a process does that is not there any more: nothing."""


def test_the_last_whole_one_stands_wherever_a_save_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, _ = made()
    weight = step.settings.model.up.weight

    def save(number: int, folder: Path, last: int = 1 << 62) -> bool:
        """Whether it came to its end; it may touch the disk so many times."""
        torch.nn.init.constant_(weight, number)
        step.count, done = number, iter(range(last))

        def touching(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **keywords: Any) -> Any:
                if next(done, None) is None:
                    raise Dead
                return function(*arguments, **keywords)
            return call

        with monkeypatch.context() as patch:
            for name in ("mkdir", "open", "rename", "unlink", "rmdir"):
                patch.setattr(os, name, touching(getattr(os, name)))
            patch.setattr(os, "fsync", touching(lambda _: None))  # a busy disk takes its time
            patch.setattr(io, "open", touching(io.open))
            try:
                step.save(folder, keep=1)
            except Dead:
                return False
        return True

    places = 0
    for place in itertools.count():
        folder = tmp_path / str(place)
        assert save(1, folder)
        ended = save(2, folder, place)
        found = step.load(folder)
        assert found == 2 if ended else found in (1, 2)
        assert bool((weight == found).all()) and step.count == found
        if ended:
            break
        assert save(3, folder)  # whatever was left there
        assert [one.name for one in folder.iterdir()] == ["step-000000003"]
        places += 1
    assert places > 10


def state_of(step: Any, schedule: StepLR) -> list[Any]:
    return [*(one.clone() for one in step.settings.model.state_dict().values()),
            *(one.clone() for own in step.settings.optimizer.state.values() for one in own.values()),
            torch.get_rng_state(), torch.tensor([step.count, schedule.last_epoch])]


class Stubborn:
    """Refuses what it is given."""

    def state_dict(self) -> Any:
        return {"at": 0}

    def load_state_dict(self, state: Any) -> None:
        if state["at"]:
            raise ValueError("never")


def test_a_damaged_checkpoint_changes_nothing(tmp_path: Path) -> None:
    step, schedule = made()
    step.settings.model(torch.ones(2, 3)).sum().backward()
    step.settings.optimizer.step()
    stubborn = Stubborn()
    stubborn.state_dict = lambda: {"at": 1}  # type: ignore[method-assign]
    step.save(tmp_path / "run", schedule=schedule, stubborn=stubborn)
    (whole,) = checkpoints(tmp_path / "run")
    (data,) = whole.glob("*.distcp")
    content, crc = data.read_bytes(), whole / f"{data.name}.crc32"
    for one in step.settings.model.parameters():
        torch.nn.init.constant_(one, 7.0)
    before = state_of(step, schedule)

    def damaged(content: bytes | None, words: str, with_sum: bool) -> None:
        folder = tmp_path / "damaged"
        shutil.copytree(whole, folder)
        data_there = folder / data.name
        data_there.unlink() if content is None else data_there.write_bytes(content)
        if not with_sum:  # as what torch writes alone
            (folder / crc.name).unlink()
        with pytest.raises(InputError, match=words) as caught:
            step.load(folder, schedule=schedule)
        assert caught.value.why and caught.value.do == "load an earlier one"
        assert all(map(torch.equal, state_of(step, schedule), before))
        shutil.rmtree(folder)

    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    damaged(bytes(flipped), "is damaged: its checksum is", True)
    for length in (0, len(content) // 3, len(content) - 1000):
        damaged(content[:length], "cannot be read", bool(length))
        damaged(content[:length], "cannot be read", False)
    damaged(None, "cannot be read", True)

    with pytest.raises(ValueError, match="never"):
        step.load(whole, schedule=schedule, stubborn=Stubborn())
    assert all(map(torch.equal, state_of(step, schedule), before))
    averaging, _ = made(ema=0.5)
    with pytest.raises(InputError, match="averages of the checkpoint are of other parameters"):
        averaging.load(whole)
    crc.unlink()
    step.load(whole, schedule=schedule)
    assert not bool((step.settings.model.up.weight == 7.0).any())


def test_a_folder_that_cannot_be_written_or_that_another_save_writes(tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    step, _ = made()
    for wait in (True, False):
        with pytest.raises(OutputError, match="could not be written") as caught:
            step.save(tmp_path / "file", wait=wait)
            step.wait_for_save()
        assert "Not a directory" in caught.value.why or "File exists" in caught.value.why
        assert caught.value.do.startswith("free some space, or give another folder")
    other, _ = made()
    refused: list[OutputError] = []
    write = StepWriter.write_data

    def while_another(*given: Any) -> Any:
        with monkeypatch.context() as patch, pytest.raises(OutputError) as caught:
            patch.setattr(StepWriter, "write_data", write)
            other.save(tmp_path / "run")
        refused.append(caught.value)
        return write(*given)

    with monkeypatch.context() as patch:
        patch.setattr(StepWriter, "write_data", while_another)
        step.save(tmp_path / "run", wait=False)
        step.save(tmp_path / "run")  # the one before ends first
    for error in refused:
        assert "another save is writing into this folder" in error.why and "a folder of its own" in error.do
    other.save(tmp_path / "run")
    assert len(refused) == 2 and other.load(tmp_path / "run") == 0


def test_an_interrupt_of_a_save_is_an_interrupt(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    step, _ = made()
    with monkeypatch.context() as patch:
        patch.setattr(StepWriter, "write_data", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step.save(tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())


def test_rectangles_of_all_ranks_make_the_whole() -> None:
    whole = torch.arange(7 * 12).view(7, 12)
    for ranks in (1, 2, 3, 5):
        for cuts in ([(0, 1, 7, 1, 0)], [(1, 2, 3, 2, 0)], [(0, 1, 7, 1, 0), (1, 3, 4, 1, 0)]):
            found = torch.full_like(whole, -1)
            for place in range(ranks ** len(cuts)):
                here = [place // ranks ** number % ranks for number in range(len(cuts))]
                own = whole
                for numbers, rank in zip(cuts, here, strict=True):
                    own = cut(own, numbers, ranks, rank)
                kept = segments(whole.shape, [(one, ranks, rank) for one, rank in zip(cuts, here, strict=True)])
                for offsets, piece in LocalPart(own, whole.shape, kept).pieces.items():
                    target = found[offsets[0]:offsets[0] + piece.shape[0], offsets[1]:offsets[1] + piece.shape[1]]
                    assert (target == -1).all()
                    target.copy_(piece)
            assert torch.equal(found, whole)
