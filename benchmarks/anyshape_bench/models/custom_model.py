"""A user's own benchmark: `module:function` or `path.py:function`.

    def tagger():
        def inputs(batch, length):
            return (torch.randint(0, 1000, (batch, length)),)
        return Tagger(), inputs, {"batch": (1, 16), "length": (1, 200)}

The function returns the model (a module or any function of tensors), a function that makes its arguments from sizes,
and the inclusive range of each size. A fourth word "train" asks for train steps: the model then returns its loss, or
something that has it as `loss`. Everything is made in every process anew, after torch.manual_seed(0).
"""
from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from anyshape.base.errors import ConfigError
from anyshape.tools.place import find
from anyshape_bench.models import bench_models
from anyshape_bench.models.bench_models import BenchModel, Compile, InferenceStep, Inputs, Step, TrainStep
from anyshape_bench.models.suite import SUITE, Shape, check_name, spread

CONTRACT = 'return (model, inputs, {"batch": (1, 8), ...}), and "train" as a fourth for train steps'


class _Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def load_by_name(name: str) -> BenchModel:
    """A model of the suite by its name, or a user's own.

    Raises:
        ConfigError: there is none of that name.
    """
    check_name(name)
    return bench_models.load(name) if name in SUITE else load(name)


def load(name: str) -> BenchModel:
    """The benchmark that the function of this name describes; a BenchModel is taken as it is.

    Raises:
        ConfigError: there is no such module, file or function, or it returns something else.
    """
    function = find(name)
    made = _make(function)
    if isinstance(made, BenchModel):
        return made
    _, inputs, ranges, *rest = _checked(made, name)

    def make(compile_module: Compile) -> Step:
        model = _make(function)[0]
        module = model if isinstance(model, nn.Module) else _Function(model)
        return (TrainStep if rest else InferenceStep)(module, compile_module)

    def arguments(shape: Shape) -> Inputs:
        with torch.random.fork_rng():
            torch.manual_seed(zlib.crc32(f"{name} {shape}".encode()))
            found = inputs(**dict(zip(ranges, shape, strict=True)))
        return found if isinstance(found, tuple) else (found,)

    shapes = spread(tuple(ranges.values()), name)
    return BenchModel(name, make, arguments, shapes, bool(rest), dims=tuple(ranges))


def _make(function: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return function()


def _checked(made: Any, name: str) -> tuple[Any, ...]:
    """What the function returned, if it keeps the contract.

    Raises:
        ConfigError: it does not.
    """
    if not isinstance(made, tuple) or len(made) not in (3, 4) or made[3:] not in ((), ("train",)):
        found = f"{len(made)} things" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise ConfigError(f"{name} does not return a benchmark", why=f"it returned {found}", do=CONTRACT)
    model, inputs, ranges, *rest = made
    if not callable(model) or not callable(inputs):
        raise ConfigError(f"{name} returns a {type(model).__name__} and a {type(inputs).__name__}",
                          why="the model and the function that makes its inputs are called", do=CONTRACT)
    if rest and not isinstance(model, nn.Module):
        raise ConfigError(f"{name} cannot be trained", why="its model is no nn.Module", do="return a module")
    if not isinstance(ranges, dict) or not ranges:
        raise ConfigError(f"{name} gives no ranges of sizes", why=f"the third thing is {ranges!r}", do=CONTRACT)
    for size, bounds in ranges.items():
        if not (isinstance(bounds, tuple) and len(bounds) == 2 and all(isinstance(end, int) for end in bounds)
                and 0 < bounds[0] <= bounds[1]):
            raise ConfigError(f"the range of {size} in {name} is {bounds!r}", why="it is a least and a greatest size, "
                              "two whole numbers from 1 on", do="write for example (1, 300)")
    return made
