"""A train step as one module: loss, gradients and update in its `forward`, in plain PyTorch.

    forward(batch):  loss = loss_fn(model, batch);  gradients = autograd.grad(loss, weights);  the update

Traced, it ends with the gradients (`gradients_of`), and the update is put behind them (frontend/train_step/program.py):
so a trace costs what that of a forward and its backward does, and one trace serves every update. Run as it is, it
changes weights, states and the update's own tensors, nothing else, and only when it has all that it needs.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyshape.frontend.train_step.defer_interrupts import DeferInterrupts
from anyshape.frontend.train_step.traced_gradients import gradients_of
from anyshape.frontend.train_step.update import Changes, StepUpdate
from anyshape.torch_compat.tree import tree_map_only


class StepState:
    """What a step and its programs share.

    Attributes:
        update: of all weights; None before the first step.
        is_last: the batch in hand ends a step.
        has_ended: the last call has changed all that it changes.
        norm, finite: of that call, as in `Changes`. there: per weight, whether it had a gradient in it.
        nothing: an empty tensor, which stands for gradients.
        distribution: how the step is dealt out over ranks (frontend/train_step/distributed.py); None on one.
    """

    __slots__ = ("distribution", "finite", "has_ended", "is_last", "norm", "nothing", "there", "update")

    def __init__(self) -> None:
        self.update: StepUpdate | None = None
        self.is_last = True
        self.has_ended = False
        self.norm: Tensor | None = None
        self.finite: Tensor | None = None
        self.there: tuple[bool, ...] = ()
        self.nothing = torch.empty(0)
        self.distribution: Any = None


class WholeStep(torch.nn.Module):
    """One step of training on one batch.

    Args:
        model: shared with the caller, as are its parameters.
        loss_fn: (model, *arguments) -> the loss, or a tuple that begins with it.
        state: what is done with the gradients.

    Attributes:
        trained: the weights, in the order of the update.
        scale: what the loss is multiplied with (torch.amp); None without.
    """

    def __init__(self, model: torch.nn.Module, loss_fn: Callable[..., Any], state: StepState) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.state = state
        self.trained: tuple[Tensor, ...] = ()
        self.scale: Tensor | None = None

    def forward(self, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        """The loss, what `loss_fn` gave beside, and the gradients, which a compiled step does not give."""
        found = self.loss_fn(self.model, *arguments, **keywords)
        loss, rest = (found[0], tuple(found[1:])) if isinstance(found, (tuple, list)) else (found, ())
        scaled = loss if self.scale is None else loss * self.scale.to(loss.dtype)
        if torch.compiler.is_dynamo_compiling():  # `is_compiling` is true in all threads while one of them captures
            gradients = gradients_of(scaled, self.trained)
        else:
            gradients = torch.autograd.grad(scaled, self.trained, allow_unused=True)
            self.change(gradients)
        return loss.detach(), tree_map_only(Tensor, Tensor.detach, rest), gradients

    @torch.no_grad()
    def change(self, gradients: Any) -> None:
        """Makes the changes of `state.update`; an interrupt waits for their end."""
        state = self.state
        assert state.update is not None
        with DeferInterrupts():
            found: Changes = (state.update.updates if state.is_last else state.update.gathers)(gradients)
            found.make()
            state.there = tuple(one is not None for one in gradients)
            state.norm, state.finite, state.has_ended = found.norm, found.finite, True
