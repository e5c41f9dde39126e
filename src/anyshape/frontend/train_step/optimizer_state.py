"""Between an optimiser and the program of a train step: whose tensors are whose, and the numbers of the next step.

The optimiser owns its state. The program changes the tensors in `optimizer.state`, and reads `optimizer.param_groups`
at every step. A state that it does not have yet is made of zeros, and given to it when its first step has been made.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anyshape import torch_compat as compat
from anyshape.base.errors import InputError
from anyshape.frontend.train_step.optimizer_rules import RULES, Rule
from anyshape.frontend.train_step.step_module import WholeStep
from anyshape.frontend.train_step.update import StepUpdate, Weight
from anyshape.frontend.train_step.validation import StepSettings
from anyshape.torch_compat.versions import api


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Per weight, the steps made and the batches of this one that had a gradient for it: the host's copy of the tensors
    that `version` tells (`StepUpdate.version`)."""

    made: list[float]
    used: list[float]
    version: object


class DeviceNumbers:
    """The numbers of all weights, for weights on a device: written on the host, and sent by one copy a step.

    Args:
        counts: how many numbers each weight has.

    Attributes:
        tensors: float64, on the device, one per weight. memory: the host's, as arrays.
    """

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self.host = torch.zeros(sum(counts), dtype=torch.float64)
        self.sent = torch.zeros(sum(counts), dtype=torch.float64, device=device)
        self.tensors = self.sent.split(list(counts))
        self.memory = [part.numpy() for part in self.host.split(list(counts))]

    def send(self) -> None:
        """What was written goes to the device behind what its stream has to do; nobody waits."""
        self.sent.copy_(self.host.pin_memory() if self.sent.is_cuda else self.host, non_blocking=True)


class StepStates:
    """What `whole` knows of its optimiser.

    Args:
        averages: name of a parameter -> its running average; empty without.

    Attributes:
        names: of parameters, by id.
        resting: weights that no step changes, as those that are frozen, and their averages.
        update: of all weights; empty before the first step.
    """

    def __init__(self, whole: WholeStep, settings: StepSettings, rule: Rule, averages: dict[str, Tensor]) -> None:
        self.whole = whole
        self.settings = settings
        self.rule = rule
        self.averages = averages
        self.names: dict[int, str] = {}
        self.resting: list[tuple[Tensor, Tensor]] = []
        self.structure: Any = None
        self.new: list[int] = []  # places of weights whose states the optimiser does not have yet
        self.counts = StepCounts([], [], None)
        self.numbers: DeviceNumbers | None = None
        self.update = StepUpdate(RULES.index(rule), (), torch.zeros(0), torch.zeros(0),
                                 torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64))

    def prepare(self, is_last: bool) -> None:
        """Takes the optimiser's groups and states over, where they have changed, and fills in the numbers of a step.
        is_last: the batch in hand ends one."""
        structure = self._structure_now()
        if structure != self.structure or not self._holds_states():
            self._take_over()
            self.structure = structure
        settings, update = self.settings, self.update
        counts = self._counts()
        self.whole.state.is_last = is_last
        if not is_last:
            return
        groups = settings.optimizer.param_groups
        known: dict[Any, tuple[float, ...]] = {}
        for one, made in zip(update.weights, counts.made, strict=True):
            key = (one.group, one.weight.shape, made)
            if key not in known:
                known[key] = self.rule.numbers(groups[one.group], one.weight.shape, int(made) + 1, made == 0)
            one.memory[:] = known[key]
        if self.numbers is not None:
            self.numbers.send()
        if settings.clip_norm is not None:
            update.most.fill_(settings.clip_norm)
        if settings.ema is not None:
            update.part.fill_(1 - settings.ema)

    def make(self, parts: int) -> None:
        """Makes the update by the gradients gathered of `parts` batches."""
        update, self.whole.state.update = self.update, replace(self.update, parts=parts)
        try:
            self.whole.change([None] * len(update.weights))
        finally:
            self.whole.state.update = update

    def count(self, is_last: bool) -> None:
        """Follows on the host what a batch has added to the update's `steps` and `uses`, which are the device's."""
        counts, state = self.counts, self.whole.state
        used = [use + there for use, there in zip(counts.used, state.there, strict=True)]
        made = counts.made
        if is_last:
            if state.finite is None or bool(state.finite):
                made = [steps + (use > 0) for steps, use in zip(made, used, strict=True)]
            used = [0.0] * len(used)
        self.counts = StepCounts(made, used, self.update.version())

    def _counts(self) -> StepCounts:
        """Steps and uses as they are; they are read only where somebody else has written them: reading waits."""
        update = self.update
        if self.counts.version != update.version():
            self.counts = StepCounts(update.steps.tolist(), update.uses.tolist(), update.version())
        return self.counts

    def settle(self) -> None:
        """Gives the optimiser the states that were made for a first step, once that has been made."""
        if not self.new:
            return
        steps = self.counts.made
        for place in [place for place in self.new if steps[place]]:
            one = self.update.weights[place]
            self.new.remove(place)
            given = {} if one.step is None else {"step": one.step}
            if given or one.states:
                self.settings.optimizer.state[one.weight].update({**given, **one.states})

    def ended(self, finite: Tensor | None) -> None:
        """After an update: averages of weights that are not in it, the next scale of the loss, and for schedulers that
        there was a step."""
        settings = self.settings
        if self.resting and settings.ema is not None and (finite is None or bool(finite)):
            distribution = self.whole.state.distribution
            with torch.no_grad():
                for weight, average in self.resting:
                    if distribution is not None:  # they may have been dealt out before they came to rest
                        weight, average = distribution.everywhere(weight), distribution.everywhere(average)
                    average.lerp_(weight, 1 - settings.ema)
        settings.optimizer._opt_called = True  # type: ignore[attr-defined]
        scaler = settings.scaler
        if scaler is not None and finite is not None:
            compat.need("torch._amp_update_scale_")(
                scaler._scale, scaler._growth_tracker, 1.0 - finite.to(torch.float32), scaler.get_growth_factor(),
                scaler.get_backoff_factor(), scaler.get_growth_interval())

    def _structure_now(self) -> Any:
        """What the program depends on of the optimiser, apart from tensors: weights by group, and choices."""
        return [([id(weight) for weight in group["params"] if weight.requires_grad], self.rule.choices(group))
                for group in self.settings.optimizer.param_groups]

    def _holds_states(self) -> bool:
        """Are the optimiser's tensors those that the program has? Not after `load_state_dict`."""
        state = self.settings.optimizer.state
        for place, one in enumerate(self.update.weights):
            own = state.get(one.weight)
            if own is None:
                if place in self.new or (not one.states and one.step is None):
                    continue
                return False
            for name, tensor in one.states.items():
                if own.get(name) is not tensor:
                    return False
            if one.step is not None and own.get("step") is not one.step:
                return False
        return True

    def _check(self, weight: Tensor, shapes: Mapping[str, Sequence[int]], states: Mapping[str, Tensor]) -> None:
        """Raises InputError where the optimiser has states that are not those of a weight: `load_state_dict` of torch
        takes any."""
        for key, shape in shapes.items():
            if tuple(states[key].shape) != tuple(shape):
                name = self.names.get(id(weight), "a weight")
                raise InputError(f"the optimiser's {key} of {name} has the shape {list(states[key].shape)}",
                                 where=f"the state of {type(self.settings.optimizer).__name__}",
                                 why=f"{name} has the shape {list(weight.shape)}, so its {key} has {list(shape)}: "
                                 "it is of another model, or a part of a state that was dealt out",
                                 do="load the state of this model, as a whole; step.save and step.load take parts")

    def _take_over(self) -> None:
        """Weights with their states from the optimiser; zeros where it has none yet."""
        whole, settings, rule, before = self.whole, self.settings, self.rule, self.update
        settings.begin_averages(self.averages)
        self.names = {id(weight): name for name, weight in settings.model.named_parameters()}
        groups = settings.optimizer.param_groups
        listed = [(number, weight) for number, group in enumerate(groups) for weight in group["params"]
                  if weight.requires_grad]
        gathered = {id(one.weight): one.gathered for one in before.weights}
        uses = {id(one.weight): use for one, use in zip(before.weights, before.uses.tolist(), strict=True)}
        device = listed[0][1].device if listed else before.steps.device
        lengths = [len(rule.numbers(groups[number], weight.shape, 1, True)) for number, weight in listed]
        self.numbers = None if device.type == "cpu" else DeviceNumbers(lengths, device)
        made, found = [], []
        steps = torch.zeros(len(listed), device=device)
        self.new = []
        for place, (number, weight) in enumerate(listed):
            own = settings.optimizer.state.get(weight, {})
            shapes = rule.shapes(groups[number], weight.shape)
            is_new = any(own.get(name) is None for name in shapes)
            states = {name: own[name] if own.get(name) is not None else _zeros(weight, shape)
                      for name, shape in shapes.items()}
            self._check(weight, shapes, states)
            made.append(float(own.get("step", 1.0 if shapes and not is_new else 0.0)))
            sums = gathered.get(id(weight))
            if sums is None and settings.accumulate > 1:
                sums = torch.zeros_like(weight.detach())
            if self.numbers is None:  # memory of its own for each: no offsets for a program to depend on
                numbers = torch.zeros(lengths[place], dtype=torch.float64)
                memory = numbers.numpy()
            else:
                numbers, memory = self.numbers.tensors[place], self.numbers.memory[place]
            step = steps[place] if rule.counts else None
            if is_new:
                self.new.append(place)
            elif step is not None:
                settings.optimizer.state[weight]["step"] = step
            found.append(Weight(weight, number, rule.choices(groups[number]), states, numbers, memory, sums,
                                self.averages.get(self.names.get(id(weight), "")), step))
            api.fix_sizes(weight)
        steps.copy_(torch.tensor(made))
        scaler = settings.scaler
        if scaler is not None:
            if scaler._scale is None:
                scaler._lazy_init_scale_growth_tracker(device)
            whole.scale = scaler._scale
        self.update = whole.state.update = replace(
            before, weights=tuple(found), steps=steps, most=before.most.to(device), part=before.part.to(device),
            parts=settings.accumulate, scale=whole.scale,
            is_clipped=settings.clip_norm is not None, waiting=settings.gradient_dtype,
            uses=torch.tensor([uses.get(id(weight), 0.0) for _, weight in listed], device=device))
        whole.trained = tuple(one.weight for one in found)
        changed = {id(weight) for weight in whole.trained}
        self.resting = [(weight, self.averages[name]) for name, weight in settings.model.named_parameters()
                        if name in self.averages and id(weight) not in changed]


def _zeros(weight: Tensor, shape: Sequence[int]) -> Tensor:
    if tuple(shape) == tuple(weight.shape):
        return torch.zeros_like(weight.detach(), memory_format=torch.preserve_format)
    return weight.detach().new_zeros(tuple(shape))
