"""The fall back of whole train steps: a compiled forward and backward, and the optimiser's own `step`."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyshape.frontend.callables.compiled_function import CompiledFunction
from anyshape.frontend.train_step.defer_interrupts import DeferInterrupts
from anyshape.frontend.train_step.validation import StepSettings, check_loss, parts_of, wants_closure
from anyshape.torch_compat.tree import tree_map_only


class StepApart:
    """Called as `TrainStep` is.

    Args:
        averages: changed in place; empty without `ema`.

    Attributes:
        position: batches of the step in hand that have run.
        norm: of the last step's gradients.
        made: steps since the caller has set it to 0.
    """

    def __init__(self, settings: StepSettings, averages: dict[str, Tensor]) -> None:
        loss_fn, model = settings.loss_fn, settings.model

        def loss(*arguments: Any, **keywords: Any) -> Any:
            return loss_fn(model, *arguments, **keywords)

        self.settings = settings
        self.averages = averages
        self.compiled = CompiledFunction(loss, settings.config.replace(fullgraph=False))
        self.searches = wants_closure(settings.optimizer)
        self.batches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []  # of the step in hand, if it searches
        self.position = 0
        self.made = 0
        self.norm: Tensor | None = None

    def __call__(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
        """One batch; the loss, and what `loss_fn` gave beside."""
        parts = self.settings.accumulate
        self.settings.begin_averages(self.averages)
        if self.position == 0:
            self.settings.optimizer.zero_grad(set_to_none=True)  # what others left there is not of this step
        if self.searches:
            is_last = self.position == parts - 1
            found = None if is_last else self.compiled(*arguments, **keywords)
            self.batches.append((arguments, keywords))
            self.position += 1
            found = self.finish() if is_last else found
        else:
            found = self.forward(arguments, keywords)
            with DeferInterrupts():  # else an interrupt would leave some gradients or weights of this batch, and not
            # all
                self.backward(found, parts)
                self.position += 1
                if self.position == parts:
                    self.finish()
        loss, rest = parts_of(found)
        return (loss.detach(), *tree_map_only(Tensor, Tensor.detach, rest))

    def forward(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """What `loss_fn` gives for a batch."""
        found = self.compiled(*arguments, **keywords)
        check_loss(parts_of(found)[0])
        return found

    def backward(self, found: Any, parts: int) -> None:
        """Adds the gradients of one of `parts` batches, for which `loss_fn` gave `found`, to those there are."""
        loss, _ = parts_of(found)
        scaled = loss if parts == 1 else loss / parts
        scaler = self.settings.scaler
        (scaled if scaler is None else scaler.scale(scaled)).backward()

    def finish(self) -> Any:
        """Updates by the batches there are; of an optimiser that searches, what `loss_fn` gave for the last one."""
        settings, optimizer = self.settings, self.settings.optimizer
        count, self.position = self.position, 0
        if count == 0:
            return None
        found: Any = None
        is_left_out = False
        if self.searches:
            batches, self.batches = self.batches, []
            first: list[Any] = []

            def closure() -> Tensor:
                optimizer.zero_grad()
                given = []
                for batch in batches:
                    given.append(self.forward(*batch))
                    self.backward(given[-1], len(batches))
                first.append(given[-1])
                self.clip()
                return torch.stack([parts_of(one)[0].detach() for one in given]).mean()

            optimizer.step(closure)  # type: ignore[arg-type]
            found = first[0]
        else:
            for weight in self.weights() if count < settings.accumulate else ():
                assert weight.grad is not None
                weight.grad.mul_(settings.accumulate / count)
            if settings.scaler is not None:
                settings.scaler.unscale_(optimizer)
            self.clip()
            if settings.scaler is None:
                optimizer.step()
            else:
                settings.scaler.step(optimizer)
                scale = settings.scaler.get_scale()
                settings.scaler.update()
                is_left_out = settings.scaler.get_scale() < scale  # what is not finite lowers it
        self.made += 1
        optimizer.zero_grad(set_to_none=True)
        if settings.ema is not None and not is_left_out:
            with torch.no_grad():
                for name, weight in settings.model.named_parameters():
                    self.averages[name].lerp_(weight, 1 - settings.ema)
        return found

    def weights(self) -> list[Tensor]:
        """Those with a gradient."""
        return [weight for group in self.settings.optimizer.param_groups for weight in group["params"]
                if weight.grad is not None]

    def clip(self) -> None:
        """Limits the gradients' norm, where one is set; rounds them where they would wait for that."""
        settings = self.settings
        if settings.gradient_dtype is not None and (settings.clip_norm, settings.scaler) != (None, None):
            for weight in self.weights():
                assert weight.grad is not None
                weight.grad.copy_(weight.grad.to(settings.gradient_dtype))
        if settings.clip_norm is not None:
            self.norm = torch.nn.utils.clip_grad_norm_(self.weights(), settings.clip_norm)
