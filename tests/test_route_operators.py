"""The operators of routing in eager PyTorch: what they mean, their schemas, fakes and derivatives."""
from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from anyshape import AnyShapeError
from anyshape.route.core import operators as ops
from sampling import crossed

BRANCHES, CHOICES = 4, 2


def plan(cells, seed=0, drop=True):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1 if drop else 0, BRANCHES, (cells, CHOICES), generator=generator)
    return ids, *ops.route_plan(ids, BRANCHES)


@pytest.mark.parametrize("cells", [0, 1, 2, 17, 300])
def test_the_plan_is_a_stable_sort(cells):
    ids, order, inverse, ends = plan(cells)
    flat = ids.reshape(-1).tolist()
    expected = sorted(range(len(flat)), key=lambda slot: (BRANCHES if flat[slot] < 0 else flat[slot], slot))
    assert order.tolist() == expected
    assert inverse[order].tolist() == list(range(len(flat)))
    assert ends.tolist() == [sum(0 <= one <= branch for one in flat) for branch in range(BRANCHES)]
    assert (order.dtype, inverse.dtype, ends.dtype) == (torch.int64, torch.int64, torch.int32)


def test_a_wrong_route_is_an_error():
    for wrong in (-2, BRANCHES):
        with pytest.raises(IndexError, match=f"branch {wrong} of {BRANCHES}") as error:
            ops.route_plan(torch.tensor([[0, wrong]]), BRANCHES)
        assert isinstance(error.value, AnyShapeError) and error.value.why and error.value.do


def samples(dtype=torch.float64, cells=5):
    """(operator, arguments) of every operator that has derivatives."""
    torch.manual_seed(0)
    _, order, inverse, ends = plan(cells)
    slots = cells * CHOICES

    def new(*shape):
        return torch.randn(*shape, dtype=dtype, requires_grad=dtype.is_floating_point)

    return {
        "dispatch": (ops.dispatch, (new(cells, 3, 2), order, ends, CHOICES)),
        "combine": (ops.combine, (new(slots, 3), inverse, ends, None, CHOICES)),
        "weighted": (ops.combine, (new(slots, 3), inverse, ends, new(cells, CHOICES), CHOICES)),
        "weight_grad": (ops.combine_weight_grad, (new(cells, 3), new(slots, 3), inverse, ends, CHOICES)),
        "linear": (ops.grouped_linear, (new(slots, 3), new(BRANCHES, 3, 2), ends, None)),
        "bias": (ops.grouped_linear, (new(slots, 3), new(BRANCHES, 3, 2), ends, new(BRANCHES, 2))),
        "inner": (ops.grouped_weight_grad, (new(slots, 3), new(slots, 2), ends)),
        "sum": (ops.grouped_sum, (new(slots, 3, 2), ends)),
        "take": (ops.grouped_take, (new(BRANCHES, 3, 2), ends, slots)),
        "merge": (lambda rows, ends: ops.merge_rows(ops.split_rows(rows, ends), ends, rows.shape[0]),
                  (new(slots, 3), ends)),
    }


NAMES = list(samples())


@pytest.mark.parametrize("name", NAMES)
def test_derivatives(name):
    operator, arguments = samples()[name]
    assert gradcheck(operator, arguments)
    assert gradgradcheck(operator, arguments)


@pytest.mark.parametrize(("name", "cells"), crossed([name for name in NAMES if name != "merge"], [0, 1, 5]))
def test_schemas_and_fakes(name, cells):
    operator, arguments = samples(torch.float32, cells)[name]
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("cells", [0, 3])
def test_schemas_of_the_plan_and_of_rows_in_parts(cells):
    ids, _, _, ends = plan(cells)
    torch.library.opcheck(ops.route_plan, (ids, BRANCHES))
    rows = torch.randn(cells * CHOICES, 3, requires_grad=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.split_rows, (rows, ends), test_utils=tests)
    parts = [part.detach().requires_grad_() for part in ops.split_rows(rows, ends)]
    torch.library.opcheck(ops.merge_rows, (parts, ends, rows.shape[0]), test_utils=tests)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_dropped_choices_are_nothing(name):
    """What lies past the last end, NaN too, goes nowhere."""
    operator, arguments = samples()[name]
    _, order, _, ends = plan(5)
    tail = {"combine": 0, "weighted": 0, "weight_grad": 1, "linear": 0, "bias": 0, "inner": 0, "sum": 0, "merge": 0}
    if name not in tail:
        found = operator(*arguments)
        assert (found[ends[-1]:] == 0).all()
        return
    assert 0 < ends[-1] < len(order)
    poisoned = list(arguments)
    rows = poisoned[tail[name]].detach().clone()
    rows[ends[-1]:] = torch.nan
    poisoned[tail[name]] = rows
    torch.testing.assert_close(operator(*poisoned), operator(*arguments), rtol=0, atol=0)


@pytest.mark.parametrize("turned", [False, True])
def test_the_gradient_of_a_weight_is_laid_out_as_the_weight_lies(turned):
    """Else autograd copies it for its parameter, in every step."""
    rows, ends = torch.randn(7, 5, dtype=torch.float64), torch.tensor([3, 3, 7])
    weight = torch.randn((3, 4, 5) if turned else (3, 5, 4), dtype=torch.float64, requires_grad=True)

    def product(weight: torch.Tensor) -> torch.Tensor:
        return ops.grouped_linear(rows, weight.transpose(1, 2) if turned else weight, ends, None)

    found, = torch.autograd.grad(product(weight).square().sum(), weight)
    assert found.is_contiguous()
    assert gradcheck(product, weight) and gradgradcheck(product, weight)
