"""Adoption of mixture-of-experts models: layers of transformers run as routers, with their own parameters, in place.

    MixtralExperts(hidden, ids, weights), a loop  -->  the same module, run as a Router over its stacked weights

What is adopted is the module of a layer's experts, which gets cells and routes; the gate before it stays as it is. The
module gets a class that is both its own and a `Router`: its place in the model, its parameters and the names in the
state dict do not change, and `release` gives the class back. Modules are recognised by their structure:

- *stacked experts*: weights `gate_up_proj` (or `up_proj`) and `down_proj` with a leading dim of experts, a forward of
  hidden states, indices and weights, and the layout flags of transformers' `use_experts_implementation`, which promises
  that the module computes what they say (Mixtral, Qwen3-MoE, DeepSeek-V3 and some sixty others);
- *a dict of experts*: modules `expert_0`, `expert_1`, ..., `forward(hidden_states, selected_experts, routing_weights)`
  with a one-hot mask whose rows are zero where a capacity drops a cell (Switch Transformers).
"""
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from anyshape.base.errors import InputError
from anyshape.route.core.branches import grouped_linear
from anyshape.route.core.router import Router, run_split
from anyshape.route.core.routes import Routes
from anyshape.route.core.stack import StackedBranches, difference
from anyshape.route.core.stack_body import GroupedBody
from anyshape.route.core.stack_rules import NotStacked

Model = TypeVar("Model", bound=nn.Module)

DICT = ("hidden_states", "selected_experts", "routing_weights")
FLAGS = ("has_gate", "has_bias", "is_transposed")
GATE = "_apply_gate"  # what splits the first product, and applies the activation to its gate
PARALLEL = "_is_expert_parallel"
OWN = "adopted_names"  # of the attributes that make a module a Router
OF_MODULES = frozenset(vars(nn.Module()))


def adopt(model: Model) -> Model:
    """Runs the mixtures of experts of a model as routers, from now on; returns the model.

    Results are the same, gradients arrive in the same parameters, the state dict is unchanged. Experts without a cell
    get a gradient of zeros, where some loops give none. Layers that are adopted already stay so.

    Raises:
        InputError: the model has no mixture of experts, or one of a structure that is not known; nothing has changed.
    """
    found, unknown = [], []
    for name, module in model.named_modules():
        kind = _kind(module)
        if kind is not None:
            found.append((module, kind))
        elif _looks_like_experts(name, module) and not isinstance(module, Router):
            unknown.append((name, module))
    if unknown:
        name, module = unknown[0]
        raise InputError(f"{type(module).__name__} is no mixture of experts that can be adopted", where=name,
                         why=_why_not(module), do="write the layer with route.Router (docs/routing.md), or run the "
                         "model as it is")
    if not found and not any(isinstance(module, AdoptedExperts) for module in model.modules()):
        raise InputError(f"{type(model).__name__} has no mixture of experts to adopt",
                         why="no module of it is recognised as stacked experts or a dict of experts",
                         do="run the model as it is, or write its layer with route.Router")
    for module, kind in found:
        _become_router(module, kind)
    return model


def release(model: Model) -> Model:
    """Gives the layers that `adopt` changed their own classes back; returns the model."""
    for module in model.modules():
        if isinstance(module, AdoptedExperts):
            for name in module.__dict__[OWN]:
                del module.__dict__[name]
            module.__class__ = module.original
    return model


class AdoptedExperts(Router):
    """A router over the experts of a module that keeps its parameters. Each has a subclass of this one and of its own
    class, whose methods and isinstance stay."""

    original: type[nn.Module]
    router_fn: Callable[..., Any]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles by the original class: the joined one has no name in a module. What makes it a router is
        made anew."""
        state = {name: value for name, value in self.__dict__.items() if name not in self.__dict__[OWN]}
        return _blank, (self.original, type(self).__mro__[1]), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _set_up(self)


class AdoptedStack(AdoptedExperts):
    """Stacked experts: cells f[N, D], ids i64[N, k], weights f[N, k] -> f[N, D]."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor | None = None,  # type: ignore[override]
                top_k_weights: Tensor | None = None, *, routes: Routes | None = None) -> Tensor:
        found = super().forward(hidden_states, top_k_index, top_k_weights, routes=routes)
        return found.to(hidden_states.dtype)


class AdoptedDict(AdoptedExperts):
    """A dict of experts: cells f[N, D], a one-hot mask [N, 1, E], weights f[N, 1] -> f[N, D]."""

    def forward(self, hidden_states: Tensor, selected_experts: Tensor | None = None,  # type: ignore[override]
                routing_weights: Tensor | None = None, *, routes: Routes | None = None) -> Tensor:
        found = super().forward(hidden_states, selected_experts, routing_weights, routes=routes)
        return found.to(hidden_states.dtype)


class StackedWeights(nn.Module):
    """The stacked weights of a module, as branches of a router: rows sorted by expert through its two products. Reads
    them where they are, so that nothing is copied or registered twice."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.__dict__["owner"] = owner  # no child: its parameters are named once
        self.branch_count = owner.down_proj.shape[0]

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        own: Any = self.owner
        first = own.gate_up_proj if own.has_gate else own.up_proj
        names = ("gate_up_proj_bias" if own.has_gate else "up_proj_bias", "down_proj_bias")
        biases = [getattr(own, name) if own.has_bias else None for name in names]
        hidden = grouped_linear(rows, first if own.is_transposed else first.transpose(1, 2), ends, biases[0])
        hidden = getattr(own, GATE)(hidden) if own.has_gate else own.act_fn(hidden)
        last = own.down_proj if own.is_transposed else own.down_proj.transpose(1, 2)
        found = grouped_linear(hidden, last, ends, biases[1])
        return own.post_expert_norm(found) if getattr(own, "has_post_expert_norm", False) else found


class SharedBranches(nn.Module):
    """Equal branches that stay modules of their own, in grouped form: their tensors are stacked in each call, which
    copies them, so that each keeps its parameters. Where the form was not captured for such rows, they run apart."""

    def __init__(self, modules: list[nn.Module], bodies: list[GroupedBody]) -> None:
        super().__init__()
        self.__dict__["modules_apart"] = modules  # no children: their parameters are named once
        self.branch_count, self.bodies = len(modules), bodies

    def forward(self, rows: Tensor, ends: Tensor) -> Any:
        modules: list[nn.Module] = self.modules_apart
        for body in self.bodies:
            if body.fits((rows,), modules[0].training):
                stacked = [torch.stack([_tensor(module, name) for module in modules]) for name in body.tensors]
                return body.graph(rows, ends, *stacked)
        return run_split(modules, [rows], ends)


def _tensor(module: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by its name."""
    holder, _, last = name.rpartition(".")
    return getattr(module.get_submodule(holder), last)


def shared(modules: list[nn.Module]) -> SharedBranches | None:
    """The grouped form of branches that take rows as wide as their first weight; None where there is none."""
    weight = next(iter(modules[0].parameters()), None) if modules else None
    if weight is None or difference(modules):
        return None
    stacked, bodies = StackedBranches(modules), []
    rows = (weight.new_zeros(1, weight.shape[-1]),)
    for mode in (False, True):
        try:
            bodies.append(stacked.train(mode).prepare(rows, stacked.run_branch))
        except NotStacked:
            return None
    return SharedBranches(modules, bodies)


def _given(cells: Tensor, ids: Tensor, weights: Tensor) -> Routes:
    """Routes that the gate before the experts has decided."""
    return Routes(ids, weights)


def _one_hot(cells: Tensor, selected: Tensor, weights: Tensor) -> Routes:
    """The same from a one-hot mask; a row of zeros drops its cell."""
    mask = selected.reshape(cells.shape[0], -1)
    ids = torch.where(mask.sum(-1) > 0, mask.argmax(-1), -1)
    return Routes(ids, weights.reshape(-1))


def _kind(module: nn.Module) -> type[AdoptedExperts] | None:
    """How a module is adopted; None where it is not recognised."""
    if isinstance(module, AdoptedExperts):
        return None
    if not _why_not(module):
        return AdoptedStack
    if _parameters_of(module) == DICT and isinstance(module, nn.ModuleDict) \
            and list(module) == [f"expert_{number}" for number in range(len(module))]:
        return AdoptedDict
    return None


def _parameters_of(module: nn.Module) -> tuple[str, ...]:
    forward = type(module).forward
    return tuple(inspect.signature(forward).parameters)[1:]


def _looks_like_experts(name: str, module: nn.Module) -> bool:
    """Whether a module may be the experts of a layer: by its place, its class, or a stack of weights with its gate."""
    parts = name.split(".")
    word = type(module).__name__.lower()
    inner = any(part == "experts" or part.startswith("expert_") for part in parts[:-1])
    shared = "shared" in parts[-1] or "shared" in word
    return not inner and not shared and (parts[-1] == "experts" or word.endswith("experts"))


def _why_not(module: nn.Module) -> str:
    """Why a module does not count as stacked experts, in words; empty where it does."""
    takes = _parameters_of(module)
    if len(takes) != 3:
        return f"its forward takes ({', '.join(takes)}), not hidden states, indices and weights"
    if not all(hasattr(module, flag) for flag in FLAGS):
        return f"it does not say its layout ({', '.join(FLAGS)}), so its experts may compute anything"
    if getattr(module, PARALLEL, False):
        return "its experts are spread over machines"
    first = getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None)
    down = getattr(module, "down_proj", None)
    if not (isinstance(first, Tensor) and isinstance(down, Tensor) and first.dim() == down.dim() == 3
            and first.shape[0] == down.shape[0]):
        return "its weights are no two stacks [experts, ., .]"
    return ""


@functools.cache
def _joined(original: type[nn.Module], kind: type[AdoptedExperts]) -> type[AdoptedExperts]:
    """The class of adopted modules of a class, one for each."""
    return type(f"Adopted{original.__name__}", (kind, original), {"original": original, "__doc__": kind.__doc__})


def _blank(original: type[nn.Module], kind: type[AdoptedExperts]) -> nn.Module:
    """An adopted module without attributes, for copies."""
    joined = _joined(original, kind)  # type: ignore[arg-type]
    return joined.__new__(joined)


def _become_router(module: nn.Module, kind: type[AdoptedExperts]) -> None:
    module.__class__ = _joined(type(module), kind)  # type: ignore[arg-type]
    _set_up(module)


def _set_up(module: nn.Module) -> None:
    """Gives an adopted module what a Router has."""
    branches = StackedWeights(module) if isinstance(module, AdoptedStack) else shared(list(module.children()))
    router_fn = _given if isinstance(module, AdoptedStack) else _one_hot
    router = Router(router_fn, branches if branches is not None else module.children())
    own = {name: value for name, value in vars(router).items() if name not in OF_MODULES}
    own |= dict(router.named_children())  # here no children: parameters are named once
    module.__dict__.update(own | {OWN: (*own, OWN)})
