"""What is asked of a train step before it is one: of its arguments, its loss, and whether it can be one program."""
from __future__ import annotations

import inspect
import numbers
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from anyshape import torch_compat as compat
from anyshape.backend.targets import TARGETS
from anyshape.base.config import Config
from anyshape.base.errors import ConfigError, InputError
from anyshape.frontend.messages.recompile_reasons import source_words
from anyshape.frontend.train_step.optimizer_rules import Rule, rule_of
from anyshape.torch_compat.versions import api

ACCELERATED = "accelerate.optimizer.AcceleratedOptimizer"


def unwrapped(optimizer: Any) -> Any:
    """The optimiser inside of one of `accelerate`, where that only hands on what it is asked; else `optimizer`.

    Raises:
        ConfigError: `accelerate` gathers gradients of several batches, and would leave out updates of ours.
    """
    if f"{type(optimizer).__module__}.{type(optimizer).__qualname__}" != ACCELERATED:
        return optimizer
    if optimizer.gradient_state.num_steps > 1:
        raise ConfigError("an Accelerator gathers gradients, which a train step does itself",
                          why=f"its gradient_accumulation_steps are {optimizer.gradient_state.num_steps}",
                          do=f"make it with 1, and pass accumulate={optimizer.gradient_state.num_steps} to train_step")
    is_alone = optimizer.scaler is None and str(optimizer.accelerator_state.distributed_type).endswith("NO")
    return optimizer.optimizer if is_alone else optimizer


def parts_of(found: Any) -> tuple[Any, tuple[Any, ...]]:
    """The loss, and what `loss_fn` gave beside."""
    return (found[0], tuple(found[1:])) if isinstance(found, (tuple, list)) and found else (found, ())


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What a train step is made of; see `anyshape.train_step`."""

    model: torch.nn.Module
    loss_fn: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    config: Config
    clip_norm: float | None
    accumulate: int
    scaler: torch.amp.GradScaler | None
    ema: float | None
    gradient_dtype: torch.dtype | None
    strategy: Any = None

    def check(self) -> None:
        """Raises ConfigError for what cannot be a train step."""
        for name, value, fits, words in (
                ("model", self.model, isinstance(self.model, torch.nn.Module), "an nn.Module"),
                ("loss_fn", self.loss_fn, callable(self.loss_fn), "a function of the model and a batch"),
                ("optimizer", self.optimizer, isinstance(self.optimizer, torch.optim.Optimizer),
                 "a torch.optim.Optimizer over parameters of the model")):
            if not fits:
                got = "None" if value is None else f"the class {value.__name__}" if isinstance(value, type) else \
                    f"a {type(value).__name__}"
                raise ConfigError(f"anyshape.train_step got {got} for {name}", why=f"it is {words}",
                                  do="call it as train_step(model, loss_fn, optimizer)")
        if getattr(self.loss_fn, "__module__", "") in ("torch.nn.modules.loss", "torch.nn.functional"):
            name = getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__)
            raise ConfigError(f"anyshape.train_step got {name} for loss_fn",
                              why="it compares results with targets, and does not call the model",
                              do="pass a function that does both: lambda model, x, y: criterion(model(x), y)")
        for name, found, fits, words, do in (
                ("clip_norm", self.clip_norm,
                 self.clip_norm is None or (_is_number(self.clip_norm) and self.clip_norm > 0),
                 "it is the largest norm of the gradients", "pass a number above 0, or None"),
                ("accumulate", self.accumulate, isinstance(self.accumulate, int) and self.accumulate >= 1,
                 "it is a number of batches", "pass a whole number, at least 1"),
                ("scaler", self.scaler, self.scaler is None or isinstance(self.scaler, torch.amp.GradScaler),
                 "it is a torch.amp.GradScaler", "pass one, or None"),
                ("ema", self.ema, self.ema is None or (_is_number(self.ema) and 0 <= self.ema < 1),
                 "it is the part of an average that stays", "pass a number from 0 to below 1, or None")):
            if not fits:
                raise ConfigError(f"{name} is {found!r}", why=words, do=do)
        if self.gradient_dtype not in (None, torch.bfloat16):
            raise ConfigError(f"gradient_dtype is {self.gradient_dtype!r}",
                              why="gradients wait as they are, or in torch.bfloat16, which has the range of float32",
                              do="set torch.bfloat16, or leave it out")

    def begin_averages(self, averages: dict[str, Tensor]) -> None:
        """Adds parameters that have no average yet to `averages`, as they are."""
        if self.ema is not None:
            for name, weight in self.model.named_parameters():
                if name not in averages:
                    averages[name] = weight.detach().clone()


def _is_number(value: Any) -> bool:
    return isinstance(value, (numbers.Real, Tensor)) and not isinstance(value, bool)


def check_loss(loss: Any) -> None:
    """Raises InputError where gradients cannot be taken of it."""
    if not isinstance(loss, Tensor):
        raise InputError(f"loss_fn returned a {type(loss).__name__}", why="gradients are those of a tensor",
                         do="return the loss, or a tuple that begins with it")
    if loss.numel() != 1:
        raise InputError(f"the loss has the shape {list(loss.shape)}", why="gradients are those of one number",
                         do="reduce it, for example by loss.mean()")
    if loss.is_complex():
        raise InputError("the loss is complex", why="gradients are those of a real number",
                         do="make one of it, for example by loss.abs()")
    if not loss.requires_grad:
        raise InputError("the loss depends on no weight", why="it was made of tensors without gradients",
                         do="call the model in loss_fn, outside of no_grad, and give back a loss that is not detached")


def rule_for(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Rule | None, str]:
    """The rule of the optimiser; None, and why the step cannot be one program. `why_apart` is asked at every step."""
    if isinstance(model, torch.nn.DataParallel):
        return None, "a model under DataParallel hands on its gradients while the backward runs"
    rule = rule_of(optimizer)
    if wants_closure(optimizer):
        return None, f"{type(optimizer).__name__} computes the loss several times a step, by a closure"
    if rule is None:
        return None, f"there is no update rule for {type(optimizer).__name__}"
    if rule.beyond(optimizer):
        return None, f"the update rule for {type(optimizer).__name__} does not know {rule.beyond(optimizer)}"
    why = why_apart(optimizer)
    return (None, why) if why else (rule, "")


def why_apart(optimizer: torch.optim.Optimizer) -> str:
    """Why the step cannot be one program with the hooks and weights that the optimiser has now; "" if it can."""
    if compat.lack():
        return compat.lack()
    own = [getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")]
    every = [compat.get("torch.optim.optimizer._global_optimizer_pre_hooks"),
             compat.get("torch.optim.optimizer._global_optimizer_post_hooks")]
    if None in (*own, *every) or not compat.has(*compat.TRAIN_STEP):
        return "this version of torch does not say which hooks an optimiser and its weights have"
    if any((*own, *every)):
        return "the optimiser has hooks on its step"
    if _is_replaced(optimizer):
        return "the optimiser's step was replaced by another function"
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight._backward_hooks or weight._post_accumulate_grad_hooks:
                return "a parameter has hooks, which run when its gradient is there"
            if type(weight) not in (Tensor, torch.nn.Parameter) or not weight.is_floating_point():
                return f"a weight is a {type(weight).__name__} of {weight.dtype}"
    devices = sorted({str(weight.device) for group in optimizer.param_groups for weight in group["params"]})
    if len(devices) > 1:
        return f"the weights are on several devices: {', '.join(devices)}"
    if devices and devices[0].partition(":")[0] not in TARGETS:
        return f"there is no target for the device {devices[0]}"
    return ""


def _is_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """Does the object have a `step` that is not its class's? Schedulers put one around that, which only counts."""
    own = vars(optimizer).get("step")
    if own is None:
        return False
    inner = own.__wrapped__ if getattr(own, "_wrapped_by_lr_sched", False) else own
    return getattr(inner, "__func__", inner) is not type(optimizer).step


def wants_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Does its `step` compute the loss itself, as a search along a line does?"""
    parameters = inspect.signature(type(optimizer).step).parameters
    return "closure" in parameters and parameters["closure"].default is inspect.Parameter.empty


def warn_of_inputs(gm: GraphModule) -> None:
    """Says which arguments of a step require a gradient that the step does not make. gm: a graph of Dynamo's."""
    found = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value, source = node.meta.get("example_value"), api.source_of(node)
        if isinstance(value, Tensor) and value.requires_grad and source.startswith(("L['arguments']", "L['keywords']")):
            found.append(source_words(source))
    if found:
        warnings.warn(f"gradients that a train step does not make: of {', '.join(found[:4])}\n"
                      "  why: a step makes those of the optimiser's weights, none of its arguments and what they come "
                      "from\n"
                      "  do:  detach the argument, or make it in loss_fn by a part of the model", stacklevel=2)


def warn_of_others(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Says which weights that could be trained will not be."""
    owned = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    others = [name for name, weight in model.named_parameters() if weight.requires_grad and id(weight) not in owned]
    if others:
        more = f" and {len(others) - 4} more" if len(others) > 4 else ""
        warnings.warn(f"the optimiser does not have all weights of the model: {', '.join(others[:4])}{more}\n"
                      "  why: they are in none of its parameter groups; they stay as they are, and get no gradients\n"
                      "  do:  give them to the optimiser, or freeze them with requires_grad_(False)", stacklevel=4)
