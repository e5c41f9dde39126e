"""`CompiledFunction`: what `anyshape.compile` returns for a function, a method, or an object that can be called."""
from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from anyshape.base.config import Config
from anyshape.base.errors import InputError
from anyshape.frontend.callables.compiled_callable import CompiledCallable
from anyshape.frontend.diagnostics.explain_text import Explanation
from anyshape.frontend.diagnostics.memory_text import MemoryNote

ROUTINES = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodDescriptorType,
            functools.partial)

P = ParamSpec("P")
R = TypeVar("R")


class CompiledFunction(Generic[P, R]):
    """A compiled function; also works as a method of a class. Of an object that is called, it has the attributes."""

    def __init__(self, target: Callable[P, R], config: Config) -> None:
        own = functools.WRAPPER_UPDATES if isinstance(target, ROUTINES) else ()
        functools.update_wrapper(self, target, updated=own)
        self._anyshape = CompiledCallable(target, config)

    def __getattr__(self, name: str) -> Any:
        if name == "_anyshape" or isinstance(self._anyshape.target, ROUTINES):
            raise AttributeError(f"a compiled function has no attribute {name!r}", name=name, obj=self)
        return getattr(self._anyshape.target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        made = self.__dict__.get("_anyshape")
        if made is None or isinstance(made.target, ROUTINES):
            object.__setattr__(self, name, value)
        else:
            setattr(made.target, name, value)

    def __call__(self, *arguments: P.args, **keywords: P.kwargs) -> R:
        result: R = self._anyshape.call(arguments, keywords)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction[P, R]:
        """Compiled anew, of a copy of the function's object where it is a method."""
        return CompiledFunction(copy.deepcopy(self._anyshape.target, memo), self._anyshape.compilation.config)

    def __copy__(self) -> CompiledFunction[P, R]:
        return CompiledFunction(self._anyshape.target, self._anyshape.compilation.config)

    def __reduce__(self) -> Any:
        """The function's name, where that leads to this object, as with a decorator; else the function, which is
        compiled anew where it is loaded."""
        target = self._anyshape.target
        module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
        found: Any = sys.modules.get(module or "")
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is self:
            return name
        if isinstance(target, types.FunctionType) and found is not target:
            raise InputError(f"the compiled function {name} cannot be pickled",
                             why="it is a lambda, or was made in another function, so that no name leads to it",
                             do="define it at the top of a module")
        return CompiledFunction, (target, self._anyshape.compilation.config)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self.__call__, instance)

    @property
    def programs(self) -> list[Any]:
        """The programs compiled so far."""
        return self._anyshape.compilation.programs

    def explain(self, **sizes: Any) -> Explanation:
        """What was decided, and why: programs, kernels, calls, refused fusions, memory, times, fallbacks.

        Args:
            sizes: to have formulas in numbers too: symbol=number, such as x_0=8, or input=shape, such as x=(8, 128).
        """
        return self._anyshape.explain(**sizes)

    def memory(self, **sizes: Any) -> MemoryNote:
        """What each program needs, as formulas; `.bytes` is the predicted peak at `sizes` (as for `explain`)."""
        return self._anyshape.memory(**sizes)

    def report(self, *paths: str | Path, **sizes: Any) -> None:
        """Writes a page (.html), a picture (.png) or data (.json): what is alive at every step, and under a limit.

        Args:
            sizes: as for `explain`; a range in place of a number, such as x=(range(1, 65), 512), is what the page's
                slider goes over.
        """
        self._anyshape.report(*paths, **sizes)
