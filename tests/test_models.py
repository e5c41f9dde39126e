"""The zoo of tiny models, compiled against eager: values, gradients, running statistics, train steps, bfloat16."""
from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from comparing import differs, no_worse
from models import ZOO, Case
from roads import compilation_of, compiled

QUICK = 4  # shapes per model in the quick run
FULL = 24
DEFAULTS = {"defer": True, "calibrate": True}  # what users have; conftest.py sets others for the rest of the tests
TRAINED_QUICK = ("autoencoder", "conformer", "clicks")
HALF_QUICK = ("mixer", "conformer")
DRAWS = 4


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def build(case: Case, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return case.build()


def outputs_of(value: Any) -> list[Tensor]:
    return [item for item in pytree.tree_leaves(value) if isinstance(item, Tensor)]


def loss_of(outputs: list[Tensor]) -> Tensor:
    """A scalar in which every element counts differently."""
    parts = []
    for value in outputs:
        weights = (torch.arange(value.numel(), device=value.device) % 11 - 4).reshape(value.shape).to(value.dtype) / 8
        parts.append((value * weights).sum() / max(value.numel(), 1) ** 0.5)
    return sum(parts[1:], parts[0])


def call(model: nn.Module, target: Any, inputs: tuple[Tensor, ...]) -> dict[str, Tensor | None]:
    """Outputs, gradients of parameters and float inputs, and buffers after the call, by name."""
    leaves = [x.detach().clone().requires_grad_() if x.dtype.is_floating_point else x for x in inputs]
    outputs = outputs_of(target(*leaves))
    named = {f"parameter {name}": p for name, p in model.named_parameters()}
    named |= {f"input {i}": x for i, x in enumerate(leaves) if x.requires_grad}
    gradients = torch.autograd.grad(loss_of(outputs), list(named.values()), allow_unused=True)
    found: dict[str, Tensor | None] = {f"output {i}": value.detach() for i, value in enumerate(outputs)}
    found |= {f"gradient of {name}": value for name, value in zip(named, gradients, strict=True)}
    found |= {f"buffer {name}": value.clone() for name, value in model.named_buffers()}
    return found


def check_equal(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None], where: str,
                exact: Any = None) -> None:
    """Raises AssertionError unless equal; `exact` makes the float64 results, asked for only when they differ."""
    assert list(found) == list(wanted)
    reference = None
    for name, value in wanted.items():
        why = differs(found[name], value)
        if not why:
            continue
        if reference is None and exact is not None:
            reference = exact()
        assert reference is not None and no_worse(found[name], value, reference[name]), f"{where}, {name}: {why}"


def exact_call(case: Case, state: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> dict[str, Tensor | None]:
    model = build(case)
    model.load_state_dict(state)
    model.double()
    return call(model, model, tuple(x.double() if x.dtype.is_floating_point else x for x in inputs))


def check_shapes(case: Case, shapes: list[tuple[int, ...]], **settings: Any) -> None:
    """One compiled model at these shapes equals eager, with a bounded number of captured graphs."""
    own = build(case)
    eager = copy.deepcopy(own)
    fast = compiled(own, **settings)
    for shape in shapes:
        inputs = case.make_inputs(shape)
        state = {name: value.clone() for name, value in eager.state_dict().items()}
        wanted = call(eager, eager, inputs)
        found = call(own, fast, inputs)
        check_equal(found, wanted, f"{case.name} at {shape}", lambda s=state, x=inputs: exact_call(case, s, x))
    record = compilation_of(fast)
    assert record.graphs <= case.programs, f"{record.graphs} graphs: {fast.explain()}"
    assert len(record.programs) >= 2
    assert not record.fallbacks, record.fallbacks


@pytest.mark.parametrize("name", ZOO)
def test_equals_eager(name):
    """With the settings that users have, sizes of 1 among the shapes."""
    shapes = ZOO[name].shapes(QUICK)
    check_shapes(ZOO[name], shapes, **DEFAULTS)


@pytest.mark.full
@pytest.mark.parametrize("name", ZOO)
def test_equals_eager_at_many_shapes(name):
    check_shapes(ZOO[name], ZOO[name].shapes(FULL), strict=True)


@pytest.mark.parametrize("name", TRAINED_QUICK)
def test_train_steps(name):
    check_train_steps(ZOO[name])


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in ZOO if name not in TRAINED_QUICK])
def test_train_steps_of_all(name):
    check_train_steps(ZOO[name])


def check_train_steps(case: Case) -> None:
    """Three steps at three shapes leave the same parameters and buffers; backward goes into `.grad`."""
    own = build(case)
    eager = copy.deepcopy(own)
    fast = compiled(own, strict=True)
    pairs = [(own, fast, torch.optim.SGD(own.parameters(), lr=0.05, momentum=0.9)),
             (eager, eager, torch.optim.SGD(eager.parameters(), lr=0.05, momentum=0.9))]
    for shape in [s for s in case.shapes(8) if 0 not in s][:3]:
        inputs = case.make_inputs(shape)
        for _, target, optimizer in pairs:
            loss_of(outputs_of(target(*inputs))).backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, found), wanted in zip(own.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("name", HALF_QUICK)
def test_bfloat16(name):
    check_half(ZOO[name], 2)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, case in ZOO.items() if case.half])
def test_bfloat16_at_more_shapes(name):
    check_half(ZOO[name], 6)


def check_half(case: Case, count: int) -> None:
    """The errors against the float64 model are no worse than eager's own, tensor by tensor: in the mean over shapes and
    `DRAWS` drawings of the weights within a factor of 1.5, and at every shape, in some drawing, within 2.

    The mean is geometric: gradients that are 0 in exact arithmetic (of a bias before a norm) are all rounding, which is
    a thousand times larger in a batch of two than in others, and one such drawing would decide. So would one number
    next to 0 that rounds to the other side of a ReLU than the exact one, which happens to either of the two.
    """
    own = build(case).bfloat16()
    eager = copy.deepcopy(own)
    exact = copy.deepcopy(own).double()
    fast = compiled(own, strict=True)
    errors: dict[str, dict[tuple[int, ...], list[tuple[float, float, float]]]] = {}
    shapes = [s for s in case.shapes(count + 1) if 0 not in s][:count]
    for seed, shape in itertools.product(range(1, 1 + DRAWS), shapes):
        drawn = build(case, seed).bfloat16().state_dict()
        for model in (own, eager, exact):
            model.load_state_dict(drawn)
        inputs = tuple(x.bfloat16() if x.dtype.is_floating_point else x for x in case.make_inputs(shape))
        wanted = call(eager, eager, inputs)
        found = call(own, fast, inputs)
        reference = call(exact, exact, tuple(x.double() if x.dtype.is_floating_point else x for x in inputs))
        for name, value in reference.items():
            if value is None or not value.dtype.is_floating_point or not value.numel():
                continue
            assert found[name].dtype == wanted[name].dtype
            assert found[name].shape == wanted[name].shape
            ours, theirs = (float((tensor.double() - value).norm()) for tensor in (found[name], wanted[name]))
            unit = 2.0**-9 * float(value.norm()) + 1e-9
            errors.setdefault(name, {}).setdefault(shape, []).append((ours, theirs, unit))
    for name, of_shapes in errors.items():
        draws = [draw for group in of_shapes.values() for draw in group]
        mean = math.exp(sum(math.log((ours + unit) / (theirs + unit)) for ours, theirs, unit in draws) / len(draws))
        assert mean <= 1.5, f"{name}: {mean:.2f} times eager's error"
        for shape, group in of_shapes.items():
            best = min((ours + unit) / (theirs + unit) for ours, theirs, unit in group)
            assert best <= 2, f"{name} at {shape}: at least {best:.2f} times eager's error"
