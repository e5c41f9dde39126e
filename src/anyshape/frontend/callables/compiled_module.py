"""What `anyshape.compile` returns for a module: an object of a subclass of its class, with its state.

    Compiled<class of m>: m's parameters, hooks and attributes; only `__call__` is another, and `explain`, `memory`,
    `report` and `programs` are there
"""
from __future__ import annotations

import copy
from typing import Any

import torch

from anyshape.base.config import Config
from anyshape.frontend.callables.compiled_callable import CompiledCallable
from anyshape.frontend.callables.data_parallel import ReplicatedCallable, calling


def compiled_module(module: torch.nn.Module, config: Config) -> torch.nn.Module:
    """An object of a subclass of the module's class that shares all its state; only calling it is different.

    Parameters, buffers, hooks, train and eval, state_dict: everything is the module's own, under the same names. A
    copy is compiled anew; a pickle holds the plain module. What the module's own class makes of itself, as a slice of a
    Sequential, is a plain one. Attributes, `__class__` too, are read and set as the module's: a parametrisation gives
    it another class, with properties for its weights.
    """
    base = type(module)

    def make(cls: type, *arguments: Any, **keywords: Any) -> Any:
        return base(*arguments, **keywords)  # so Python does not call __init__ of the subclass

    def missing(self: Any, name: str) -> Any:
        if name == "_anyshape":
            raise AttributeError(name)
        return getattr(self._anyshape.target, name)

    def set_class(self: Any, kind: type) -> None:
        self._anyshape.target.__class__ = kind

    namespace = {
        "__slots__": ("_anyshape",),
        "__new__": make,
        "__class__": property(lambda self: type(self._anyshape.target), set_class),
        "__getattr__": missing,
        "__setattr__": lambda self, name, value: setattr(self._anyshape.target, name, value),
        "__delattr__": lambda self, name: delattr(self._anyshape.target, name),
        "__copy__": lambda self: compiled_module(
            copy.copy(self._anyshape.target), self._anyshape.compilation.config),
        "__module__": type(module).__module__,
        "__call__": lambda self, *arguments, **keywords: self._anyshape.call(arguments, keywords),
        "__deepcopy__": lambda self, memo: compiled_module(
            copy.deepcopy(self._anyshape.target, memo), self._anyshape.compilation.config),
        "__reduce__": lambda self: (_identity, (self._anyshape.target,)),
        "programs": property(lambda self: self._anyshape.compilation.programs),
        "explain": lambda self, **sizes: self._anyshape.explain(**sizes),
        "memory": lambda self, **sizes: self._anyshape.memory(**sizes),
        "report": lambda self, *paths, **sizes: self._anyshape.report(*paths, **sizes),
    }
    kind = _subclass(f"Compiled{base.__name__}", base, namespace)
    wrapper: torch.nn.Module = object.__new__(kind)
    object.__setattr__(wrapper, "__dict__", vars(module))
    object.__setattr__(wrapper, "_anyshape", _callable_of(module, config))
    return wrapper


def _callable_of(module: torch.nn.Module, config: Config) -> CompiledCallable:
    """What a call of the compiled module runs. Within DistributedDataParallel it is the module inside that is
    compiled."""
    if not isinstance(module, torch.nn.parallel.DistributedDataParallel):
        return CompiledCallable(module, config)
    inside = module.module if hasattr(module.module, "_anyshape") else compiled_module(module.module, config)
    return ReplicatedCallable(module, inside._anyshape, calling(module, inside))


def _subclass(name: str, base: type, namespace: dict[str, Any]) -> type:
    """A subclass of `base`, whose `__init_subclass__` is not asked: it may want arguments that only the author knows,
    and register what is no class of his."""
    class Quiet:
        __slots__ = ()

        def __init_subclass__(cls, **keywords: Any) -> None:
            pass

    kind: type = type(base)(name, (Quiet, base), namespace)
    return kind


def _identity(module: torch.nn.Module) -> torch.nn.Module:
    return module
