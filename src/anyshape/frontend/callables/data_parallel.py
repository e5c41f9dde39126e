"""DistributedDataParallel around a model that is compiled: it runs as PyTorch, and calls the compiled module.

    compile(DistributedDataParallel(m))(x)  -->  what DistributedDataParallel(compile(m)) does with x

Its reducer takes gradients where autograd adds them up, so all is as around the model itself: hooks, `no_sync`,
buffers, parameters that are not used. The compiled backward gives all gradients at its end, in one program.
(torch.compile cuts the graph where the reducer's buckets end, so that the first ones travel while the rest is computed;
`anyshape.train_step(strategy="ddp")` sends them out of the one program.)
"""
from __future__ import annotations

from typing import Any

import torch

from anyshape.frontend.callables.compiled_callable import CompiledCallable
from anyshape.torch_compat.tracing import settings


class ReplicatedCallable(CompiledCallable):
    """A DistributedDataParallel whose module is compiled: it runs as PyTorch, and calls that."""

    __slots__ = ("replica",)

    def __init__(self, target: torch.nn.Module, inner: CompiledCallable, replica: torch.nn.Module) -> None:
        """target: the wrapper as it was given. inner: of the module in it. replica: the wrapper around its compiled
        form."""
        self.target = target
        self.compilation, self.deferral = inner.compilation, inner.deferral
        self.replica = replica

    def call(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The result of the wrapper for these arguments; as `CompiledCallable.call`."""
        if torch.compiler.is_compiling() and (torch.compiler.is_dynamo_compiling() or settings.captured_here()):
            return self.target(*arguments, **keywords)  # part of another program
        return self.replica(*arguments, **keywords)


def calling(wrapper: torch.nn.Module, module: torch.nn.Module) -> torch.nn.Module:
    """An object that is `wrapper` in all but its attribute `module`.

    Args:
        wrapper: a DistributedDataParallel; what is set of the object is set of it.
        module: the compiled form of the one that is in it.
    """
    base = type(wrapper)

    def found(self: Any, name: str) -> Any:
        return module if name == "module" else getattr(wrapper, name)

    kind = type(base.__name__, (base,), {
        "__module__": base.__module__,
        "__new__": lambda cls: object.__new__(cls),
        "__init__": lambda self: None,  # its state is the wrapper's
        "__getattr__": found,
        "__setattr__": lambda self, name, value: setattr(wrapper, name, value),
        "__delattr__": lambda self, name: delattr(wrapper, name)})
    made: torch.nn.Module = kind()
    return made
