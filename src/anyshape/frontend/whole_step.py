"""A train step as one module: loss, gradients and update in its `forward`, in plain PyTorch.

    forward(batch):  loss = loss_fn(model, batch);  gradients = autograd.grad(loss, weights)
                     weight, states = rule(weight, gradient, states, numbers)      for each weight
                     weight.copy_(...), states.copy_(...)

Traced, it is one graph without tapes between its parts, in which a gradient dies where it is used. Run as it is, it
does the same. It changes weights, states and its own buffers, nothing else, and only when it has all that it needs.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from anyshape.frontend.held import Held
from anyshape.frontend.update_op import updated
from anyshape.frontend.updates import RULES, Choices, Rule


@dataclass(eq=False)  # without slots, for Dynamo
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
        is_new: the optimiser does not have the states yet.
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
    is_new: bool = False
    step: Tensor | None = None


class WholeStep(torch.nn.Module):
    """One step of training on one batch.

    Args:
        model: shared with the caller, as are its parameters.
        loss_fn: (model, *arguments) -> the loss, or a tuple that begins with it.
        rule: of the optimiser.

    Attributes:
        parts: batches whose gradients make one step; `is_last`: the batch in hand ends it.
        is_clipped: the gradients' norm is limited, to `most`.
        scale: what the loss is multiplied with (torch.amp); None without.
        has_ended: the last call has changed all that it changes; set by whoever runs it, and not read here.
        steps, uses: per weight, the steps it has made, and the batches of this one that had a gradient for it.
    """

    steps: Tensor
    uses: Tensor
    most: Tensor
    part: Tensor

    def __init__(self, model: torch.nn.Module, loss_fn: Callable[..., Any], rule: Rule) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.rule = RULES.index(rule)
        self.weights: tuple[Weight, ...] = ()
        self.parts = 1
        self.is_last = True
        self.is_clipped = False
        self.scale: Tensor | None = None
        self.has_ended = False
        self.register_buffer("steps", torch.zeros(0), persistent=False)
        self.register_buffer("uses", torch.zeros(0), persistent=False)
        self.register_buffer("most", torch.zeros((), dtype=torch.float64), persistent=False)
        self.register_buffer("part", torch.zeros((), dtype=torch.float64), persistent=False)  # new of an average

    def forward(self, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        """The loss, the gradients' norm (None unless it is limited), whether all gradients are numbers (None unless the
        loss is scaled), and what `loss_fn` gave beside."""
        found = self.loss_fn(self.model, *arguments, **keywords)
        loss, rest = (found[0], tuple(found[1:])) if isinstance(found, (tuple, list)) else (found, ())
        scaled = loss if self.scale is None else loss * self.scale.to(loss.dtype)
        gradients = torch.autograd.grad(scaled, [one.weight for one in self.weights], allow_unused=True)
        if torch.compiler.is_compiling():
            norm, finite = self._change(gradients)
        else:
            with Held():
                norm, finite = self._change(gradients)
                self.has_ended = True
        return loss.detach(), norm, finite, *tree_map_only(Tensor, Tensor.detach, rest)

    @torch.no_grad()
    def _change(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
        if self.is_last:
            return self.update(gradients)
        self.gather(gradients)
        return None, None

    def gather(self, gradients: Sequence[Tensor | None]) -> None:
        """Adds gradients to those of earlier batches of the step."""
        for one, gradient in zip(self.weights, gradients, strict=True):
            if gradient is not None and one.gathered is not None:
                one.gathered.copy_(one.gathered + gradient)
        self.uses.copy_(self._uses(gradients))

    def update(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
        """Changes weights and states by `gradients` and those gathered; the norm of all, and whether they are numbers,
        as `forward` gives them."""
        total = [self._total(one, gradient) for one, gradient in zip(self.weights, gradients, strict=True)]
        there = [gradient for gradient in total if gradient is not None]
        finite = None if self.scale is None else _largest(there).isfinite()
        norm = _norm(there) if self.is_clipped else None
        factor = None if norm is None else (self.most.to(norm.dtype) / (norm + 1e-6)).clamp(max=1.0)
        used = self._uses(gradients) > 0
        for number, (one, own, gradient) in enumerate(zip(self.weights, gradients, total, strict=True)):
            if gradient is None:
                continue
            when = finite
            if own is None:  # a weight that no batch had a gradient for stays as it is
                when = used[number] if when is None else when & used[number]
            self._update_one(one, gradient if factor is None else gradient * factor.to(gradient.dtype), when)
        self.steps.copy_(self.steps + (used if finite is None else used & finite))
        self.uses.zero_()
        return norm, finite

    def _uses(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Per weight, the batches of this step that had a gradient for it."""
        return self.uses + torch.tensor([float(gradient is not None) for gradient in gradients])

    def _total(self, one: Weight, gradient: Tensor | None) -> Tensor | None:
        """The gradient of the whole step, in the dtype that the rule computes in."""
        work = torch.promote_types(one.weight.dtype, torch.float32)
        total = None if gradient is None else gradient.to(work)
        if one.gathered is not None:
            gathered = one.gathered.to(work)
            total = (gathered if total is None else gathered + total) * (1 / self.parts)
        return total if total is None or self.scale is None else total / self.scale.to(work)

    def _update_one(self, one: Weight, gradient: Tensor, when: Tensor | None) -> None:
        """Changes one weight and its states, where `when` is true."""
        weight, states = updated(self.rule, one.choices, one.weight, gradient, one.states, one.numbers)
        changes = [(one.weight, weight), *((one.states[name], state) for name, state in states.items())]
        if one.average is not None:
            changes.append((one.average, one.average + self.part.to(weight.dtype) * (weight - one.average)))
        for target, value in changes:
            target.copy_(value if when is None else torch.where(when, value.to(target.dtype), target))
        if one.gathered is not None:
            one.gathered.zero_()


def _largest(gradients: Sequence[Tensor]) -> Tensor:
    found = [gradient.abs().amax().to(torch.float32) for gradient in gradients if gradient.numel()]
    return torch.stack(found).amax() if found else torch.zeros(())


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    return torch.stack([(gradient * gradient).sum() for gradient in gradients]).sum().sqrt()
