"""PyTorch's own road to a device: modules, gradients, both entrances and byte counts on a test accelerator that is
built here (tests/torch_device.cpp), behind the fake driver. Run by test_torch_device.py."""
from __future__ import annotations

import copy
import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import anyshape
import torch_device
from anyshape.backend import targets
from anyshape.plan.ir.program import ExternStep
from device_cases import FUNCTIONS
from fake_driver import FakeDriver
from limits import limit_of, net, sizes
from models import ZOO
from sampling import rest

NAME = torch_device.NAME


@pytest.fixture(scope="module")
def autocast(extension: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Operators' rules under autocast: half a minute, as all of PyTorch's headers are read."""
    ctypes.CDLL(str(torch_device.built("torch_device_autocast.cpp", tmp_path_factory.mktemp("autocast"))))


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    found, fake = torch_device.loaded(tmp_path_factory.mktemp("accelerator")), FakeDriver("last stream first")
    fake.reads = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(targets.TARGETS, NAME, torch_device.__name__)
        patch.setattr(torch_device, "DEVICE", [(fake, found)])
        yield found
    assert not fake.alarms


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8), nn.Softmax(-1))


ENTRANCES: dict[str, Callable[[nn.Module], Any]] = {
    "anyshape.compile": lambda one: anyshape.compile(one, strict=True),
    "torch.compile": lambda one: torch.compile(one, backend="anyshape", dynamic=True)}


@pytest.mark.parametrize("name", ENTRANCES)
def test_forward_and_backward(extension: Any, name: str) -> None:
    torch._dynamo.reset()
    own = model()
    there = copy.deepcopy(own).to(NAME)
    run = ENTRANCES[name](there)
    anyshape.reset_stats()
    for rows in (5, 7, 0, 1, 30):
        x = torch.randn(rows, 16)
        own.zero_grad()
        there.zero_grad()
        found, wanted = run(x.to(NAME)), own(x)
        assert found.device == torch.device(NAME, 0)
        torch.testing.assert_close(found.cpu(), wanted)
        found.square().sum().backward()
        wanted.square().sum().backward()
        for one, other in zip(there.parameters(), own.parameters(), strict=True):
            torch.testing.assert_close(one.grad.cpu(), other.grad)
    assert anyshape.stats()["eager_calls"] == 0


@pytest.mark.full
@pytest.mark.parametrize("name", ENTRANCES)
def test_autocast(extension: Any, autocast: None, name: str) -> None:
    torch._dynamo.reset()
    own = model()
    there = copy.deepcopy(own).to(NAME)
    run = ENTRANCES[name](there)
    anyshape.reset_stats()
    for rows in (5, 7, 0, 1):
        x = torch.randn(rows, 16)
        with torch.autocast("cpu", torch.bfloat16):
            wanted = own(x)
        with torch.autocast(NAME, torch.bfloat16):
            found = run(x.to(NAME))
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found.cpu(), wanted, atol=1e-2, rtol=1e-2)
        found.float().square().sum().backward()
    assert anyshape.stats()["eager_calls"] == 0


@pytest.mark.full
def test_export(extension: Any) -> None:
    own = model()
    there = copy.deepcopy(own).to(NAME)
    rows = torch.export.Dim("rows", min=1, max=100)
    exported = torch.export.export(there, (torch.randn(5, 16).to(NAME),), dynamic_shapes=({0: rows},))
    run = anyshape.compile(exported, strict=True)
    for number in (2, 7):
        x = torch.randn(number, 16)
        torch.testing.assert_close(run(x.to(NAME)).cpu(), own(x))


# ---- whole train steps

def adam(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=1e-2)


def momentum(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=1e-2, momentum=0.9)


def scaler(device: str) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(device, init_scale=2.0**124, growth_interval=2)  # some steps are skipped


STEPS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Callable[[str], dict[str, Any]]]] = {
    "Adam": (adam, lambda device: {}), "momentum": (momentum, lambda device: {}),
    "a norm": (adam, lambda device: {"clip_norm": 0.5}), "several batches": (adam, lambda device: {"accumulate": 2}),
    "averages": (adam, lambda device: {"ema": 0.9}),
    "a scaler": (adam, lambda device: {"scaler": scaler(device), "clip_norm": 0.5}),
    "bfloat16": (adam, lambda device: {"gradient_dtype": torch.bfloat16, "clip_norm": 0.5})}


@pytest.mark.parametrize("name", rest(STEPS, "a norm"))
def test_whole_train_steps(extension: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program on the device, which does what the CPU's does; nothing waits for the device to count steps."""
    optimizer, settings = STEPS[name]
    torch._dynamo.reset()
    own = model()
    there = copy.deepcopy(own).to(NAME)
    steps = [anyshape.train_step(one, lambda net, x: net(x).square().mean() * 1e3, optimizer(one.parameters()),
                                 strict=True, **settings(device))
             for one, device in ((own, "cpu"), (there, NAME))]
    for turn, rows in enumerate((5, 7, 9, 4, 6, 1)):
        if turn == 2 and name != "a scaler":
            monkeypatch.setattr(torch.Tensor, "tolist", None)
        x = torch.randn(rows, 16)
        wanted, found = steps[0](x), steps[1](x.to(NAME))
        torch.testing.assert_close(found.cpu(), wanted)
    monkeypatch.undo()
    # gradients that are rounded to bfloat16 may be a rounding apart
    within = {"atol": 1e-5, "rtol": 1e-4} if name != "bfloat16" else {"atol": 1e-4, "rtol": 2.0**-8}
    for one, other in zip(there.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach(), **within)
    states = [one.settings.optimizer.state_dict()["state"] for one in steps]
    for place, values in states[0].items():
        for word, value in values.items():
            torch.testing.assert_close(states[1][place][word].cpu(), value, **within)
    assert [len(one.programs) for one in steps] == [len(steps[0].programs)] * 2
    if name == "a norm":
        torch.testing.assert_close(steps[1].norm.cpu(), steps[0].norm)


@pytest.mark.full
def test_a_train_step_goes_on_as_the_optimisers_own(extension: Any) -> None:
    """What somebody else writes in the optimiser's counts is seen; its own step goes on where ours stopped."""
    torch._dynamo.reset()
    own = model()
    there = copy.deepcopy(own).to(NAME)
    optimizers = [adam(one.parameters()) for one in (own, there)]
    runs = [anyshape.train_step(one, lambda net, x: net(x).square().mean(), optimizer, strict=True)
            for one, optimizer in zip((own, there), optimizers, strict=True)]
    for rows in (5, 7):
        x = torch.randn(rows, 16)
        runs[0](x), runs[1](x.to(NAME))
    for optimizer in optimizers:
        for state in optimizer.state.values():
            state["step"].fill_(9.0)
    x = torch.randn(3, 16)
    runs[0](x), runs[1](x.to(NAME))
    for one, optimizer, given in ((own, optimizers[0], x), (there, optimizers[1], x.to(NAME))):
        one(given).square().mean().backward()
        optimizer.step()
    for one, other in zip(there.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach(), atol=1e-5, rtol=1e-4)
    assert [float(state["step"]) for state in optimizers[1].state.values()] == [11.0] * len(optimizers[1].state)


def test_memory_is_counted_and_given_back(extension: Any) -> None:
    torch._dynamo.reset()
    there = net(count=3).to(NAME)
    run = anyshape.compile(there, memory_limit=1 << 40, strict=True)

    def step(x: torch.Tensor) -> None:
        there.zero_grad(set_to_none=True)
        run(x).square().mean().backward()

    x = torch.randn(40, 32).to(NAME)
    step(x)
    limit = limit_of(run)
    values = sizes(run, x)
    points = list(limit.tradeoff(values))
    for point in (points[0], points[len(points) // 2], points[-1]):
        bytes_ = limit.needed(values, point.policy)
        limit.move(bytes_)
        there.zero_grad(set_to_none=True)
        limit.program.context.release()
        gc.collect()
        extension.reset()
        before = extension.bytes()[0]
        step(x)
        assert extension.bytes()[1] - before <= bytes_ + 3 * x.nbytes  # what PyTorch makes between them
    there.zero_grad(set_to_none=True)
    limit.program.context.release()
    gc.collect()
    assert extension.bytes()[0] <= before


def test_a_tensor_on_the_cpu_is_told(extension: Any) -> None:
    torch._dynamo.reset()
    fast = anyshape.compile(lambda x, y: torch.softmax(x, 1) + y)
    x, y = torch.randn(3, 4), torch.randn(())
    with pytest.warns(UserWarning, match="several devices: cpu, testdev"):
        found = fast(x.to(NAME), y)
    torch.testing.assert_close(found.cpu(), torch.softmax(x, 1) + y)


def externs(function: Callable[..., Any], *inputs: torch.Tensor) -> list[str]:
    """The operators that PyTorch does in a function's program."""
    torch._dynamo.reset()
    fast = anyshape.compile(function, strict=True)
    fast(*inputs)
    return [step.target for one in fast.programs for step in one.executable.plan.steps if isinstance(step, ExternStep)]


@pytest.mark.parametrize("name", rest([name for name in FUNCTIONS if name != "draw"], "gather", "concatenate"))
def test_pytorch_does_what_it_does_on_the_cpu(extension: Any, name: str) -> None:
    """What a graph makes from numbers is on the device: no operator is PyTorch's for want of that."""
    x = torch.randn(17, 40)
    assert externs(FUNCTIONS[name], x.to(NAME)) == externs(FUNCTIONS[name], x)


@pytest.mark.full
@pytest.mark.parametrize("name", ["mixer", "graph_attention", "variational", "clicks"])
def test_models_too(extension: Any, name: str) -> None:
    case = ZOO[name]
    model, inputs = case.build(), case.make_inputs(case.shapes(1)[0])
    with torch.no_grad():
        found = externs(copy.deepcopy(model).to(NAME), *(one.to(NAME) for one in inputs))
        assert found == externs(model, *inputs)
