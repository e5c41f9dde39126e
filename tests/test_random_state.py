"""The states of generators: what begins again draws the same numbers, on the host and on the devices of its inputs."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from anyshape.frontend.programs.differential_check import CheckedProgram
from anyshape.frontend.programs.double_backward import DoubleBackward
from anyshape.torch_compat.versions.random_state import RandomState


class Generators:
    """A device's module with a number as the state of each device's generator."""

    def __init__(self) -> None:
        self.states: dict[torch.device, int] = {}

    def is_available(self) -> bool:  # torch 2.12 asks when a trace makes a tensor on it
        return False

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return torch.tensor([self.states.get(device, 0)], dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.states[device] = int(state[0])


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> Generators:
    module = Generators()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def on_device() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(2, device="cuda:0")


def test_restores_host_and_device(generators: Generators) -> None:
    x = on_device()
    host, state = torch.get_rng_state(), RandomState.now([x, 3, None, torch.ones(1)])
    generators.states[x.device] = 9
    torch.rand(3)
    state.restore()
    assert generators.states == {x.device: 0} and torch.equal(torch.get_rng_state(), host)


def test_device_without_states(monkeypatch: pytest.MonkeyPatch) -> None:
    x = on_device()
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    assert RandomState.now([x]).devices == ()


def test_double_backward_draws_as_then(generators: Generators) -> None:
    x = on_device()
    again = DoubleBackward.__new__(DoubleBackward)
    again.limited, again.keeps, again.old, again.checked, again.draws = False, True, (), (), True
    again.casts = ()
    generators.states[x.device] = 4
    kept = again.keep((x,))
    generators.states[x.device] = 7
    with again.as_then(kept):
        assert generators.states[x.device] == 4
        generators.states[x.device] = 5
    assert generators.states[x.device] == 7


def test_check_draws_the_same_twice(generators: Generators, monkeypatch: pytest.MonkeyPatch) -> None:
    x = on_device()
    seen: list[int] = []

    def draw(*given: Any) -> Any:
        seen.append(generators.states.get(x.device, 0))
        generators.states[x.device] = seen[-1] + 1
        return [], [], {}

    graph: Any = SimpleNamespace(restored=[], inputs=[SimpleNamespace(name="x")], writes=[])
    checked = CheckedProgram(lambda given: draw()[0], graph, [], SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setattr(checked, "_reference", draw)
    checked([x])
    assert seen == [0, 0] and generators.states[x.device] == 1
