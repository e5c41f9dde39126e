"""Operator sinking: what only a router's branches need is computed behind the router, on the cells that come there.

    y = convolution(x); router((gate, y))  -->  router((gate, x)), each branch that reads y: convolution(its rows of x)

A module is traced (torch.fx) with its routers as leaves, their router functions inline. What no decision and nothing
else reads may sink, where static cell flow proves it row-wise (route.flow.rowwise); a branch that does not read a
result does not compute it. Brainstorm calls this reordering (OSDI'23; passes/reorder.py), and does not check it.

Guard: inputs of another structure, dtype or cell size, keyword arguments, or the other of training and evaluation run
the module as it was.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from anyshape.route.core.router import Router
from anyshape.route.optimize.constant_routes import replaced
from anyshape.route.optimize.decision import Compile, Decision, DecisionContext, shared_copy
from anyshape.route.optimize.sink_graph import NotSunk, Sinking, sunk_router, traced
from anyshape.route.profile.first_calls import first_calls
from anyshape.route.profile.routers import routers_of

NAME = "sink"
GUARD = "arguments of other shapes (but for the number of cells) or dtypes, or another mode, run the module as it was"
WORTH = 0.95  # of cells that reach a branch which needs the result; above, sinking saves nothing


class SunkModule(nn.Module):
    """A module some of whose operators run behind a router. Submodules have the names that they had."""

    def __init__(self, general: nn.Module, program: fx.GraphModule, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        for name, child in program.named_children():
            self.add_module(name, child)
        for name, parameter in program.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in program.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self.training = general.training
        # tuples keep them out of the module tree: they have the same modules as this one
        self._program, self._general, self._mode = (program,), (general,), general.training
        self._described = described(arguments)

    def forward(self, *args: Any, **kw: Any) -> Any:
        if not kw and self.training == self._mode and described(args) == self._described:
            return self._program[0](*args)
        if self._general[0].training != self.training:
            self._general[0].train(self.training)
        for path, router in self.named_modules():  # a profile that is recorded or replayed stands on this module's
            if isinstance(router, Router) and isinstance(own := _at(self._general[0], path), Router):
                for name in ("recorder", "forced"):
                    setattr(own, name, getattr(router, name, None))
        return self._general[0](*args, **kw)


def _at(module: nn.Module, path: str) -> nn.Module | None:
    """The submodule at a path, if there is one."""
    for name in path.split("."):
        found = dict(module.named_children()).get(name)
        if found is None:
            return None
        module = found
    return module


def described(arguments: Any) -> Any:
    """The structure of arguments: of a tensor its dtype, device and shape without the number of rows."""
    if isinstance(arguments, Tensor):
        return (str(arguments.dtype), arguments.device.type, tuple(arguments.shape[1:]), arguments.dim())
    if isinstance(arguments, (list, tuple)):
        return (type(arguments).__name__, *map(described, arguments))
    return arguments if isinstance(arguments, (int, float, bool, str, type(None))) else id(arguments)


def propose(context: DecisionContext) -> list[Decision]:
    if context.example is None:
        return [Decision(name, NAME, False, "there are no example inputs") for name in context.routers]
    model = shared_copy(context.model)
    calls = arguments_of(model, context.example)
    found = []
    for name in sorted(routers_of(model), key=lambda one: -one.count(".")):  # the innermost first
        router = routers_of(model).get(name)
        if router is None:
            found.append(Decision(name, NAME, False, "it stands in a branch that has changed"))
            continue
        decision, model = _decided(context, model, name, router, calls)
        found.append(decision)
    return found


def _decided(context: DecisionContext, model: nn.Module, name: str, router: Router,
             calls: dict[str, tuple[Any, ...]]) -> tuple[Decision, nn.Module]:
    reason = "no module around it was called with tensors, or lists of them, alone"
    others = [one.optimisation for one in context.applied(name) if one.optimisation != "dead_branches"]
    if type(router) is not Router or others:
        return Decision(name, NAME, False, f"{', '.join(others) or 'another kind of router'} stands there"), model
    for path in roots(model, router):
        if path not in calls:
            continue
        try:
            sinking, changed = sunk(model, path, name, calls[path])
        except NotSunk as refusal:
            reason = str(refusal)
            continue
        share = _share(context.profile.loads(name), sinking.users)
        what = f"{sinking.count} operators are needed by branches {', '.join(map(str, sinking.users))} only"
        if share > WORTH:
            return Decision(name, NAME, False, f"{what}, where {share:.0%} of all cells go"), model
        return Decision(name, NAME, True, f"{what}, where {share:.0%} of all cells go", None, GUARD,
                        {"root": path, "arguments": _saved(calls[path])}), changed
    return Decision(name, NAME, False, reason), model


def _share(loads: Any, users: tuple[int, ...]) -> float:
    totals = loads.sum(0) if len(loads) else None
    return 1.0 if totals is None or not totals.sum() else float(totals[list(users)].sum() / totals.sum())


def apply(model: nn.Module, decision: Decision, compile: Compile | None = None) -> nn.Module:
    """The model with operators sunk behind a router; it is proved again, and left as it is where another optimisation
    has changed what was proved."""
    try:
        return sunk(model, str(decision.options["root"]), decision.router, _loaded(decision.options["arguments"]))[1]
    except (NotSunk, KeyError, AttributeError):
        return model


def sunk(model: nn.Module, path: str, name: str, arguments: tuple[Any, ...]) -> tuple[Sinking, nn.Module]:
    """The model with what can sink behind a router sunk; `model` is changed in place.

    Args:
        path: of the module that is traced. name: of the router in it. arguments: of a call of that module.

    Raises:
        Refused: nothing can.
    """
    root, router = model.get_submodule(path), routers_of(model)[name]
    program = traced(root, arguments)
    sinking = sunk_router(program, router, arguments)
    return sinking, replaced(model, root, SunkModule(root, sinking.program, arguments))


def roots(model: nn.Module, router: Router) -> Iterator[str]:
    """The paths of modules around a router, the outermost first, from the branch in which it stands."""
    for path, module in model.named_modules():
        if module is not router:
            continue
        parts = path.split(".") if path else []
        around = [".".join(parts[:depth]) for depth in range(len(parts))]
        routers = [depth for depth, one in enumerate(around) if isinstance(model.get_submodule(one), Router)]
        start = routers[-1] + 2 if routers else 0  # behind the router around it, and that one's list of branches
        yield from (one for one in around[start:] if not isinstance(model.get_submodule(one), (nn.ModuleList, Router)))
        return


def arguments_of(model: nn.Module, example: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """Arguments like those of the first call of each module on an example, where they are tensors, or lists of them,
    alone."""
    def plain(one: Any) -> bool:
        return isinstance(one, Tensor) or (isinstance(one, (list, tuple)) and all(isinstance(t, Tensor) for t in one))

    def keep(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        return _loaded(_saved(args)) if args and not kwargs and all(map(plain, args)) else None

    return first_calls(model, dict(model.named_modules()), example, keep)


def _saved(arguments: Any) -> Any:
    """Arguments as plain data: shapes and dtypes."""
    if isinstance(arguments, Tensor):
        return {"shape": list(arguments.shape), "dtype": str(arguments.dtype).removeprefix("torch."),
                "device": str(arguments.device)}
    return {"list": [_saved(one) for one in arguments], "tuple": isinstance(arguments, tuple)}


def _loaded(saved: Any) -> Any:
    """Tensors of ones of the saved shapes; of no rows, as a branch may have had, two."""
    if "shape" in saved:
        first, *rest = saved["shape"] or [None]
        shape = [] if first is None else [first or 2, *rest]
        return torch.ones(shape, dtype=getattr(torch, saved["dtype"]), device=saved["device"])
    found = [_loaded(one) for one in saved["list"]]
    return tuple(found) if saved["tuple"] else found
