"""What a step does with its gradients, in plain PyTorch: which tensors get which new values.

    weight, states = rule(weight, gradient, states, numbers)      for each weight
    --> [(weight, its new value), (state, its new value), ...], norm, finite

Nothing is changed before all is computed. Run as it is, the values are copied; traced, they end a program.
"""
from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anyshape.frontend.aten.materialize_op import stored
from anyshape.frontend.train_step.optimizer_rules import Choices
from anyshape.frontend.train_step.update_op import updated


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A weight and what its update needs.

    Args:
        weight: the parameter, which the optimiser owns.
        group: the position of its parameter group.
        choices: what chooses the formulas of its rule.
        states: by name; the optimiser's tensors, changed in place.
        numbers: float64, what changes from step to step; filled in on the host through `memory`.
        gathered: the sum of the gradients of earlier batches of this step; None without accumulation.
        average: the running average of the weight; None where there is none.
        step: the steps made, as the optimiser keeps them; None where it does not.
    """
    weight: Tensor
    group: int
    choices: Choices
    states: dict[str, Tensor]
    numbers: Tensor
    memory: Any
    gathered: Tensor | None = None
    average: Tensor | None = None
    step: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """What is to change, as (tensor, its new value), the gradients' norm (None unless it is limited), and whether all
    gradients are numbers (None unless the loss is scaled)."""

    values: list[tuple[Tensor, Tensor]]
    norm: Tensor | None = None
    finite: Tensor | None = None

    def make(self) -> None:
        """Changes the tensors."""
        for target, value in self.values:
            target.copy_(value)


@dataclass(frozen=True, slots=True, eq=False)
class StepUpdate:
    """The update of all weights.

    Args:
        rule: its place in RULES.
        steps, uses: per weight, the steps it has made, and the batches of this one that had a gradient for it.
        most: float64, the largest norm of the gradients. part: float64, what is new of an average.
        scale: what the loss is multiplied with (torch.amp); None without.
        parts: batches whose gradients make one step.
        is_clipped: the gradients' norm is limited.
        waiting: what gradients are rounded to that wait until all have been seen; None: nothing.
        norm, finite: as in `Changes`, where they are known before there are gradients (frontend/train_step/program.py).
    """
    rule: int
    weights: tuple[Weight, ...]
    steps: Tensor
    uses: Tensor
    most: Tensor
    part: Tensor
    scale: Tensor | None = None
    parts: int = 1
    is_clipped: bool = False
    waiting: torch.dtype | None = None
    norm: Tensor | None = None
    finite: Tensor | None = None

    def knowing(self) -> StepUpdate:
        """The same update behind what it needs to know of all gradients, which is to be filled in."""
        dtype = functools.reduce(torch.promote_types, (one.weight.dtype for one in self.weights), torch.float32)
        return replace(self, norm=self.steps.new_zeros((), dtype=dtype) if self.is_clipped else None,
                       finite=None if self.scale is None else self.steps.new_zeros((), dtype=torch.bool))

    def version(self) -> object:
        """Changes with `steps` and `uses`, where somebody else than a program writes them."""
        return id(self.steps), self.steps._version, self.uses._version

    # ---- as data, for a trace

    def tensors(self) -> list[Tensor]:
        """All that it reads or changes, in an order that depends on its kind alone."""
        found: list[Tensor | None] = [self.steps, self.uses, self.most, self.part, self.scale, self.norm, self.finite]
        for one in self.weights:
            found += [one.weight, *one.states.values(), one.numbers, one.gathered, one.average]
        return [tensor for tensor in found if tensor is not None]

    def roles(self) -> list[str]:
        """What each of `tensors` is: weight, or state, each with the number of its weight; "" for others."""
        beside = (self.steps, self.uses, self.most, self.part, self.scale, self.norm, self.finite)
        found = [""] * sum(one is not None for one in beside)
        for number, one in enumerate(self.weights):
            state = f"state {number}"
            found += [f"weight {number}", *[state] * len(one.states), "", *[state] * (one.gathered is not None),
                      *[state] * (one.average is not None)]
        return found

    def on(self, tensors: Iterable[Tensor]) -> StepUpdate:
        """The same update of other tensors, in the order of `tensors`."""
        given: Iterator[Tensor] = iter(tensors)
        steps, uses, most, part = (next(given) for _ in range(4))
        scale, norm, finite = (None if one is None else next(given) for one in (self.scale, self.norm, self.finite))
        weights = tuple(replace(
            one, weight=next(given), states={name: next(given) for name in one.states}, numbers=next(given),
            gathered=None if one.gathered is None else next(given),
            average=None if one.average is None else next(given)) for one in self.weights)
        return replace(self, steps=steps, uses=uses, most=most, part=part, scale=scale, norm=norm, finite=finite,
                       weights=weights)

    def kind(self, is_last: bool) -> Any:
        """What a program of it depends on, or, unless `is_last`, one that gathers; it can be compared and hashed."""
        weights = tuple((repr(one.choices) if is_last else "", tuple(one.states), one.gathered is None,
                         one.average is None) for one in self.weights)
        kinds = tuple((one.dtype, one.shape, one.stride()) for one in self.tensors())
        known = self.norm is None, self.finite is None
        return self.rule, self.parts, self.is_clipped, self.waiting, self.scale is None, known, weights, kinds

    # ---- what it does

    def gathers(self, gradients: Sequence[Tensor | None]) -> Changes:
        """Gradients are added to those of earlier batches of the step."""
        found = [(one.gathered, (one.gathered + gradient).to(one.gathered.dtype))
                 for one, gradient in zip(self.weights, gradients, strict=True)
                 if gradient is not None and one.gathered is not None]
        return Changes([*found, (self.uses, self._uses(gradients))])

    def updates(self, gradients: Sequence[Tensor | None]) -> Changes:
        """Weights and states change by `gradients` and those gathered."""
        total = self._totals(gradients, wait=not self.is_known)
        norm, finite = (self.norm, self.finite) if self.is_known else self._seen(total)
        factor = None if norm is None else (self.most.to(norm.dtype) / (norm + 1e-6)).clamp(max=1.0)
        used = self._uses(gradients) > 0
        found: list[tuple[Tensor, Tensor]] = []
        for number, (one, own, gradient) in enumerate(zip(self.weights, gradients, total, strict=True)):
            if gradient is None:
                found += self._average(one, one.weight, finite)
                continue
            when = finite
            if own is None:  # a weight that no batch had a gradient for stays as it is
                when = used[number] if when is None else when & used[number]
            clipped = gradient if factor is None else gradient * factor.to(gradient.dtype)
            found += self._update_one(one, clipped, when, finite)
        steps = self.steps + (used if finite is None else used & finite)
        found += [(self.steps, steps), (self.uses, torch.zeros_like(self.uses))]
        return Changes(found) if self.is_known else Changes(found, norm, finite)

    def measures(self, gradients: Sequence[Tensor | None]) -> Changes:
        """Nothing changes: what an update needs to know of all `gradients` and those gathered."""
        return Changes([], *self._seen(self._totals(gradients)))

    @property
    def waits(self) -> bool:
        """No weight is updated before all gradients have been seen."""
        return self.is_clipped or self.scale is not None

    @property
    def is_known(self) -> bool:
        """What an update needs to know of all gradients is there before them."""
        return self.norm is not None or self.finite is not None

    def _seen(self, total: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
        """The norm of gradients, if it is limited, and whether all are numbers, if the loss is scaled."""
        there = [gradient for gradient in total if gradient is not None]
        return (_norm(there) if self.is_clipped else None,
                None if self.scale is None else _largest(there, self.scale).isfinite())

    def _uses(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Per weight, the batches of this step that had a gradient for it."""
        runs = [(there, len(list(run))) for there, run in itertools.groupby(one is not None for one in gradients)]
        return self.uses + torch.cat([self.uses.new_full((count,), float(there)) for there, count in runs])

    def _totals(self, gradients: Sequence[Tensor | None], wait: bool = False) -> list[Tensor | None]:
        return [self._total(one, gradient, wait) for one, gradient in zip(self.weights, gradients, strict=True)]

    def _total(self, one: Weight, gradient: Tensor | None, wait: bool) -> Tensor | None:
        """The gradient of the whole step, in the dtype that the rule computes in; `wait`: until all are there."""
        work = torch.promote_types(one.weight.dtype, torch.float32)
        total = None if gradient is None else gradient.to(work)
        if one.gathered is not None:
            gathered = one.gathered.to(work)
            total = (gathered if total is None else gathered + total) * (1 / self.parts)
        if total is not None and self.scale is not None:
            total = total / self.scale.to(work)
        if total is None or self.waiting is None or not self.waits:
            return total
        return (stored(total, self.waiting) if wait else total.to(self.waiting)).to(work)

    def _update_one(self, one: Weight, gradient: Tensor, when: Tensor | None,
                    finite: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """The changes of one weight and its states, where `when` is true, and of its average, where `finite` is."""
        weight, states = updated(self.rule, one.choices, one.weight, gradient, one.states, one.numbers)
        changes = [(one.weight, weight), *((one.states[name], state) for name, state in states.items())]
        changes = [(target, value.to(target.dtype)) for target, value in changes]
        if when is not None:
            changes = [(target, torch.where(when, value, target)) for target, value in changes]
        if when is not finite:
            weight = torch.where(when, weight, one.weight.to(weight.dtype))
        changes += self._average(one, weight, finite)
        return changes if one.gathered is None else [*changes, (one.gathered, torch.zeros_like(one.gathered))]

    def _average(self, one: Weight, weight: Tensor, finite: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """The change of a weight's average, if it has one, by its value after the step."""
        if one.average is None:
            return []
        work = torch.promote_types(weight.dtype, torch.float32)
        average = one.average.to(work)
        value = (average + self.part.to(work) * (weight.to(work) - average)).to(one.average.dtype)
        return [(one.average, value if finite is None else torch.where(finite, value, one.average))]


def _largest(gradients: Sequence[Tensor], scale: Tensor) -> Tensor:
    found = [gradient.abs().amax().to(torch.float32) for gradient in gradients if gradient.numel()]
    return torch.stack(found).amax() if found else torch.zeros_like(scale, dtype=torch.float32)


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    return torch.stack([(gradient * gradient).sum() for gradient in gradients]).sum().sqrt()
