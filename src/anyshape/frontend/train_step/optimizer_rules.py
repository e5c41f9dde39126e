"""How optimisers update a weight: a row of a table for each rule, as functions that a trace can take in.

    torch.optim.AdamW:  weight, gradient, exp_avg, exp_avg_sq, numbers  -->  weight, exp_avg, exp_avg_sq

What changes from step to step (learning rates, corrections for the first steps) is computed on the host, in Python's
floats as `torch.optim` does it, and handed to the program as `numbers`: a change of them is no new program. What picks
the formulas (`amsgrad`, `nesterov`, whether there is momentum) is a *choice*, and a change of it is one.

The formulas are those of `torch.optim` (PyTorch 2.13, the functions `_single_tensor_...`), in float32 at least: Adam
(Kingma, Ba 2015), AdamW (Loshchilov, Hutter 2019), SGD with momentum (Sutskever et al. 2013), Adafactor (Shazeer, Stern
2018), Muon (Jordan et al. 2024); and Lion (Chen et al. 2023), which others have classes for.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Group = Mapping[str, Any]
States = dict[str, Tensor]
Choices = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of optimiser updates a weight.

    Args:
        classes: full names of the classes of optimisers that do it.
        counts: it keeps the number of steps of each weight in its state, as "step".
        shapes: (group, shape of the weight) -> name and shape of each of its states; they are made of zeros.
        choices: group -> what chooses the formulas.
        numbers: (group, shape, number of the step from 1 on, whether states are new) -> what changes from step to step.
        update: (choices, weight, gradient, states, numbers) -> the new weight and states. Tensors are of the dtype
            that the rule computes in; `numbers` are tensors without dims.
        beyond: optimiser -> the setting of it that the rule does not know; "" without one.
    """

    classes: tuple[str, ...]
    counts: bool
    shapes: Callable[[Group, Sequence[int]], dict[str, Sequence[int]]]
    choices: Callable[[Group], dict[str, Any]]
    numbers: Callable[[Group, Sequence[int], int, bool], tuple[float, ...]]
    update: Callable[[Choices, Tensor, Tensor, States, Sequence[Tensor]], tuple[Tensor, States]]
    beyond: Callable[[torch.optim.Optimizer], str] = lambda _optimizer: ""


# ---- Adam and AdamW


def _adam_shapes(group: Group, shape: Sequence[int]) -> dict[str, Sequence[int]]:
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")
    return dict.fromkeys(names, shape)


def _adam_choices(group: Group) -> dict[str, Any]:
    return {"amsgrad": bool(group["amsgrad"]), "maximize": bool(group["maximize"]), "decoupled": _decoupled(group)}


def _decoupled(group: Group) -> bool:
    return bool(group.get("decoupled_weight_decay", False))


def _adam_numbers(group: Group, _shape: Sequence[int], step: int, _new: bool) -> tuple[float, ...]:
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    first, second = map(float, group["betas"])
    return (1 - rate * decay if _decoupled(group) else decay, 1 - first, second, 1 - second, group["eps"],
            rate / (1 - first**step), math.sqrt(1 - second**step))


def _adam(choices: Choices, weight: Tensor, gradient: Tensor, states: States,
          numbers: Sequence[Tensor]) -> tuple[Tensor, States]:
    decay, less, second, rest, eps, size, correction = numbers
    gradient = -gradient if choices["maximize"] else gradient
    if choices["decoupled"]:
        weight = weight * decay
    else:
        gradient = gradient + decay * weight
    average = states["exp_avg"] + less * (gradient - states["exp_avg"])
    square = states["exp_avg_sq"] * second + rest * (gradient * gradient)
    new = {"exp_avg": average, "exp_avg_sq": square}
    if choices["amsgrad"]:
        square = new["max_exp_avg_sq"] = torch.maximum(states["max_exp_avg_sq"], square)
    return weight - size * (average / (square.sqrt() / correction + eps)), new


# ---- SGD


def _sgd_shapes(group: Group, shape: Sequence[int]) -> dict[str, Sequence[int]]:
    return {"momentum_buffer": shape} if group["momentum"] else {}


def _sgd_choices(group: Group) -> dict[str, Any]:
    return {"momentum": bool(group["momentum"]), "nesterov": bool(group["nesterov"]),
            "maximize": bool(group["maximize"])}


def _sgd_numbers(group: Group, _shape: Sequence[int], _step: int, new: bool) -> tuple[float, ...]:
    # the first gradient becomes the buffer as it is
    return (float(group["weight_decay"]), float(group["momentum"]), 1.0 if new else 1 - float(group["dampening"]),
            float(group["lr"]))


def _sgd(choices: Choices, weight: Tensor, gradient: Tensor, states: States,
         numbers: Sequence[Tensor]) -> tuple[Tensor, States]:
    decay, momentum, part, rate = numbers
    gradient = (-gradient if choices["maximize"] else gradient) + decay * weight
    new: States = {}
    if choices["momentum"]:
        new["momentum_buffer"] = buffer = states["momentum_buffer"] * momentum + part * gradient
        gradient = gradient + momentum * buffer if choices["nesterov"] else buffer
    return weight - rate * gradient, new


# ---- Lion


def _lion_shapes(_group: Group, shape: Sequence[int]) -> dict[str, Sequence[int]]:
    return {"exp_avg": shape}


def _no_choices(_group: Group) -> dict[str, Any]:
    return {}


def _lion_numbers(group: Group, _shape: Sequence[int], _step: int, _new: bool) -> tuple[float, ...]:
    rate = float(group["lr"])
    first, second = map(float, group["betas"])
    return 1 - rate * float(group["weight_decay"]), first, 1 - first, second, 1 - second, rate


def _lion(_choices: Choices, weight: Tensor, gradient: Tensor, states: States,
          numbers: Sequence[Tensor]) -> tuple[Tensor, States]:
    decay, first, first_rest, second, second_rest, rate = numbers
    average = states["exp_avg"]
    direction = (average * first + gradient * first_rest).sign()
    return weight * decay - rate * direction, {"exp_avg": average * second + gradient * second_rest}


def _lion_beyond(optimizer: torch.optim.Optimizer) -> str:
    others = sorted(set(optimizer.defaults) - {"lr", "betas", "weight_decay"})  # versions have had others
    return "decoupled_weight_decay" if getattr(optimizer, "decoupled_wd", False) else ", ".join(others)


# ---- Adafactor


def _adafactor_shapes(_group: Group, shape: Sequence[int]) -> dict[str, Sequence[int]]:
    if len(shape) < 2:
        return {"variance": shape}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


def _adafactor_choices(group: Group) -> dict[str, Any]:
    return {"maximize": bool(group["maximize"])}


def _adafactor_numbers(group: Group, shape: Sequence[int], step: int, _new: bool) -> tuple[float, ...]:
    rate = float(group["lr"])
    small, smallest = group["eps"]
    small = torch.finfo(group["params"][0].dtype).eps if small is None else small
    root = max(math.prod(shape), 1) ** 0.5
    return (1 - rate * group["weight_decay"], step ** group["beta2_decay"], min(rate, 1 / step**0.5), small,
            small * small, smallest, 1 / root, 1 / (root * group["d"]))


def _adafactor(choices: Choices, weight: Tensor, gradient: Tensor, states: States,
               numbers: Sequence[Tensor]) -> tuple[Tensor, States]:
    decay, part, most, small, smaller, smallest, per_root, per_clip = numbers
    gradient = -gradient if choices["maximize"] else gradient
    size = torch.maximum((weight * weight).sum().sqrt() * per_root, smallest) * most
    square = gradient * gradient
    new: States = {}
    if gradient.dim() > 1:
        for name, dim in (("row_var", -1), ("col_var", -2)):
            new[name] = states[name] + part * (square.mean(dim, keepdim=True) - states[name])
        estimate = new["row_var"] * new["col_var"]
        estimate = estimate / torch.maximum(new["row_var"].mean(-2, keepdim=True), small)
    else:
        new["variance"] = estimate = states["variance"] + part * (square - states["variance"])
    change = gradient * torch.maximum(estimate, smaller).rsqrt()
    length = (change * change).sum().sqrt()
    return weight * decay - change * (size / (length * per_clip).clamp(min=1.0)), new


# ---- Muon


def _muon_shapes(_group: Group, shape: Sequence[int]) -> dict[str, Sequence[int]]:
    return {"momentum_buffer": shape}


def _muon_choices(group: Group) -> dict[str, Any]:
    return {"nesterov": bool(group["nesterov"]), "coefficients": tuple(group["ns_coefficients"]),
            "steps": int(group["ns_steps"]), "eps": float(group["eps"])}


def _muon_numbers(group: Group, shape: Sequence[int], _step: int, _new: bool) -> tuple[float, ...]:
    rate, momentum = float(group["lr"]), float(group["momentum"])
    rows, columns = shape
    ratio = {"match_rms_adamw": 0.2 * math.sqrt(max(rows, columns)), "original": math.sqrt(max(1, rows / columns)),
             None: math.sqrt(max(1, rows / columns))}[group["adjust_lr_fn"]]
    return 1 - rate * float(group["weight_decay"]), momentum, 1 - momentum, rate * ratio


def _muon(choices: Choices, weight: Tensor, gradient: Tensor, states: States,
          numbers: Sequence[Tensor]) -> tuple[Tensor, States]:
    decay, momentum, rest, rate = numbers
    buffer = states["momentum_buffer"] + rest * (gradient - states["momentum_buffer"])
    change = gradient + momentum * (buffer - gradient) if choices["nesterov"] else buffer
    return weight * decay - rate * _orthogonal(choices, change).to(weight.dtype), {"momentum_buffer": buffer}


def _orthogonal(choices: Choices, change: Tensor) -> Tensor:
    """`change` with singular values near 1, in bfloat16, by iterations of Newton and Schulz."""
    a, b, c = choices["coefficients"]
    tall = change.size(0) > change.size(1)
    found = change.bfloat16()
    found = found.T if tall else found
    found = found / found.norm().clamp(min=choices["eps"])
    for _ in range(choices["steps"]):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if tall else found


ADAM = Rule(("torch.optim.adam.Adam", "torch.optim.adamw.AdamW"), True, _adam_shapes, _adam_choices, _adam_numbers,
            _adam)
SGD = Rule(("torch.optim.sgd.SGD",), False, _sgd_shapes, _sgd_choices, _sgd_numbers, _sgd)
LION = Rule(("lion_pytorch.lion_pytorch.Lion",), False, _lion_shapes, _no_choices, _lion_numbers, _lion, _lion_beyond)
ADAFACTOR = Rule(("torch.optim.Adafactor",), True, _adafactor_shapes, _adafactor_choices,
                 _adafactor_numbers, _adafactor)
MUON = Rule(("torch.optim.Muon",), False, _muon_shapes, _muon_choices, _muon_numbers, _muon)

RULES = (ADAM, SGD, LION, ADAFACTOR, MUON)


def rule_of(optimizer: torch.optim.Optimizer) -> Rule | None:
    """The row for an optimiser; None when the table does not have its class."""
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    return next((rule for rule in RULES if name in rule.classes), None)
