"""Checkpoints of train steps: in torch.distributed.checkpoint's format; each is whole, or not there."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim.lr_scheduler import StepLR

import anyshape
from anyshape.frontend.checkpoint.folder import checkpoints


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
