"""`anyshape.compile` and `anyshape.stats`: by the kind of what is compiled, to the file that compiles it."""
from __future__ import annotations

from typing import Any

import torch

from anyshape import torch_compat as compat
from anyshape.base import counters
from anyshape.base.config import Config
from anyshape.base.errors import ConfigError
from anyshape.frontend.callables.compiled_function import CompiledFunction
from anyshape.frontend.callables.compiled_module import compiled_module
from anyshape.frontend.capture import export
from anyshape.frontend.programs.compile_program import check_stages
from anyshape.frontend.programs.session import LIVE


def compile_target(target: Any, config: Config) -> Any:
    """The compiled form of a module, a function, or an ExportedProgram; see `anyshape.compile`."""
    check_stages(config)
    if isinstance(target, torch.export.ExportedProgram) and compat.lack():
        return compiled_module(target.module(), config)
    if isinstance(target, torch.export.ExportedProgram):
        return export.compile_exported(target, config)
    if isinstance(target, torch.nn.Module):
        return compiled_module(target, config)
    if isinstance(target, type):
        raise ConfigError(f"anyshape.compile cannot compile the class {target.__name__}",
                          why="it takes an nn.Module, which is an object of such a class, or a function",
                          do=f"make one first: anyshape.compile({target.__name__}(...))")
    if isinstance(target, (classmethod, staticmethod)):
        return type(target)(CompiledFunction(target.__func__, config))
    if callable(target):
        return CompiledFunction(target, config)
    raise ConfigError(f"anyshape.compile cannot compile a {type(target).__name__}",
                      why="it takes an nn.Module, a function, or a torch.export.ExportedProgram",
                      do="pass one of those")


def stats(reset: bool = False) -> dict[str, int | float]:
    """The counters of `base/counters.py`, and over all live compilations: captured graphs, fallbacks."""
    found = counters.stats()
    live = list(LIVE)
    found["compilations"] = len(live)
    found["graphs"] = sum(compilation.graphs for compilation in live)
    found["fallbacks"] = sum(len(compilation.fallbacks) for compilation in live)
    if reset:
        counters.reset()
    return found
