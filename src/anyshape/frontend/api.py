"""`anyshape.compile` for modules and functions: two ways of tracing behind one callable.

The first way (`oblivious`) makes one program for all sizes, 0 and 1 included (with dynamic=False: for fixed
sizes, and as one graph, also where sizes are found in the data). It is given up, for this object,
when a trace fails, and for a single call when the call's sizes do not fit its programs; then the ordinary way serves:
PyTorch's usual symbolic tracing, which makes extra programs for sizes 0 and 1.

A call for which no program is there may also run as PyTorch does, for now: see `deferral.py` and `beside.py`.
"""
from __future__ import annotations

import copy
import functools
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from anyshape.base import events
from anyshape.base.config import Config
from anyshape.base.errors import AnyShapeError, ConfigError
from anyshape.frontend import export
from anyshape.frontend.beside import Beside
from anyshape.frontend.compilation import LIVE, Compilation, NotCovered
from anyshape.frontend.deferral import Deferral, Deferred
from anyshape.frontend.direct import MISS, Door, watched
from anyshape.frontend.dynamo import FallbackWarning, compile_fx
from anyshape.frontend.explain import explain
from anyshape.frontend.explanation import Explanation, MemoryNote
from anyshape.frontend.memory import memory
from anyshape.frontend.program import check_stages, compile_program
from anyshape.frontend.refusal import refusal
from anyshape.frontend.sizes import checked_program
from anyshape.frontend.tracing import Tracing, check_nested, first_lines, has_nested
from anyshape.passes.pipeline import DOOR
from anyshape.run import torch_api, torch_trace
from anyshape.run.context import context_underway

PLAIN = "these sizes run as plain PyTorch"


def compile_target(target: Any, config: Config) -> Any:
    """The compiled form of a module, a function, or an ExportedProgram; see `anyshape.compile`."""
    check_stages(config)
    if isinstance(target, torch.export.ExportedProgram):
        with context_underway():
            return export.compile_exported(target, Compilation(config, compile_program))
    if isinstance(target, torch.nn.Module):
        return compiled_module(target, config)
    if callable(target):
        return CompiledFunction(target, config)
    raise ConfigError(f"anyshape.compile cannot compile a {type(target).__name__}",
                      why="it takes an nn.Module, a function, or a torch.export.ExportedProgram",
                      do="pass one of those")


def stats(reset: bool = False) -> dict[str, int | float]:
    """The counters of `base/events.py`, and over all live compilations: captured graphs, fallbacks."""
    found = events.stats()
    live = list(LIVE)
    found["compilations"] = len(live)
    found["graphs"] = sum(compilation.graphs for compilation in live)
    found["fallbacks"] = sum(len(compilation.fallbacks) for compilation in live)
    if reset:
        events.reset()
    return found


class Way:
    """One way of tracing a target: what torch.compile returned for it, and the direct door past that."""

    __slots__ = ("call", "door", "opened", "own", "tracing")

    def __init__(self, target: Callable[..., Any], compilation: Compilation, oblivious: bool,
                 deferral: Deferral) -> None:
        self.own: list[Callable[..., Any]] = []
        self.door: Door | None = None
        self.opened = 0
        self.tracing: Tracing

        def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
            program = compile_fx(gm, example_inputs, compilation=compilation)
            compilation.fixed.update(torch_trace.fixed_sizes())
            if oblivious:
                program = checked_program(gm, program, compilation)
            self.own.append(program)
            return program

        def around(inner: torch_api.FrameCallback) -> torch_api.FrameCallback:
            beside = Beside(target) if compilation.config.background else None
            self.tracing = Tracing(compilation, inner, oblivious, deferral, beside)
            return self.tracing

        fullgraph = compilation.config.fullgraph or oblivious
        self.call = torch_api.dynamo_compile(target, backend, fullgraph=fullgraph, around=around)

    def run(self, target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """A call through torch.compile. After a trace the door is made anew: open, if one frame was all there was."""
        result = self.call(*arguments, **keywords)
        codes = self.tracing.codes
        if len(codes) != self.opened:
            self.opened = len(codes)
            self.door = None
            if all(code is codes[0] for code in codes) and DOOR not in self.tracing.compilation.config.disabled():
                door = Door(target, self.call, self.own)
                door.open(codes[0])
                self.door = door if door.programs else None
        return result


class Compiled:
    """A callable with its two ways of tracing and their record."""

    __slots__ = ("compilation", "deferral", "oblivious", "ordinary", "target")

    def __init__(self, target: Callable[..., Any], config: Config) -> None:
        self.target = target
        self.compilation = Compilation(config, compile_program)
        self.deferral = Deferral()
        self.oblivious = Way(target, self.compilation, True, self.deferral)
        self.ordinary = Way(target, self.compilation, False, self.deferral)

    def call(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The result of the target for these arguments."""
        oblivious, ordinary = self.oblivious, self.ordinary
        plain = not torch.compiler.is_compiling()
        if plain and watched():
            return self.target(*arguments, **keywords)  # whoever watches operators or modules wants to see them
        # Dynamo's guards ask nested tensors for strides, which ends the process
        if plain and (has_nested(arguments) or (keywords and has_nested(keywords.values()))):
            self._note_plain(check_nested(self.compilation.config).what)
            return self.target(*arguments, **keywords)
        try:
            failed_before = bool(oblivious.tracing.failure)
            try:
                if plain and oblivious.door is not None:
                    result = oblivious.door(arguments, keywords)
                    if result is not MISS:
                        return result
                if plain and self.deferral.patterns and oblivious.door is not None:
                    pattern = self.deferral.known(arguments, keywords)
                    if pattern is not None:
                        raise Deferred(pattern)
                if not (failed_before and ordinary.door is not None):
                    return oblivious.run(self.target, arguments, keywords)
            except NotCovered:
                pass
            if plain and ordinary.door is not None:
                result = ordinary.door(arguments, keywords)
                if result is not MISS:
                    return result
            if failed_before and ordinary.door is not None:
                try:
                    return oblivious.run(self.target, arguments, keywords)
                except NotCovered:
                    pass
            return self._ordinary_call(failed_before, arguments, keywords)
        except Deferred as deferred:
            pattern = deferred.pattern
            if pattern is not None:
                self.deferral.remember(arguments, keywords, pattern)
        except Exception as error:  # the border to torch's tracer: what it says of the arguments, in the user's words
            refused = refusal(error, self.target, arguments, keywords) if plain else None
            if refused is None:
                raise
            raise refused from None
        started = time.perf_counter()
        result = self.target(*arguments, **keywords)
        self._ran(pattern, result, time.perf_counter() - started)
        return result

    def _ran(self, pattern: Any, result: Any, seconds: float) -> None:
        """Counts a call that has run as PyTorch until that pays, and says once what keeps coming."""
        self.deferral.ran(pattern, result, seconds)
        why = self.deferral.warning(pattern)
        if why:
            warnings.warn("calls need a program for each number that their code asks for; they run as PyTorch would.\n"
                          f"  why: {why}\n"
                          "  do:  compute with the number as a tensor, or take that line out of what is compiled; "
                          "defer=False traces at once; see explain()", FallbackWarning, stacklevel=4)

    def _ordinary_call(self, failed_before: bool, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The ordinary way. When it fails too, the fault is the call's, and the oblivious way stays open."""
        done = False
        plain, deferred = self.ordinary.tracing.plain, self.ordinary.tracing.deferred
        plain.clear()
        deferred.clear()
        self.ordinary.tracing.general = not failed_before
        started = time.perf_counter()
        try:
            result = self.ordinary.run(self.target, arguments, keywords)
            done = True
            for pattern in deferred:
                self._ran(pattern, result, time.perf_counter() - started)
            return result
        except Exception as error:
            if plain and not isinstance(plain[0][1], AnyShapeError):
                raise plain[0][1] from error  # what eager PyTorch refuses too, the tracer names better
            raise
        finally:
            for code, refused in plain if done else ():
                if isinstance(refused, AnyShapeError):  # without a trace, which costs nothing
                    self._note_plain(refused.what)
                    continue
                self.ordinary.tracing.refusals[code] = self.ordinary.tracing.refusals.get(code, 0) + 1
                self._note_plain(f"{type(refused).__name__}: {first_lines(str(refused))}")
            if not failed_before and self.oblivious.tracing.failure:
                tracing = self.oblivious.tracing
                if done and not plain:
                    stage = "all sizes in one program" if tracing.way == "all sizes" else tracing.way
                    self.compilation.record("trace", stage, tracing.failure)
                else:
                    tracing.failure = ""

    def _note_plain(self, reason: str) -> None:
        """Records, and says once, that a call ran as plain PyTorch."""
        if any(known.stage == PLAIN and known.reason == reason for known in self.compilation.fallbacks):
            return
        self.compilation.record("trace", PLAIN, reason)
        warnings.warn(f"torch's tracer refuses a call with these sizes; it runs as PyTorch would.\n  why: {reason}\n"
                      "  do:  set strict=True to stop here, and see explain()", FallbackWarning, stacklevel=4)

    def explain(self, **sizes: Any) -> Explanation:
        """What was decided, and why; see `anyshape.frontend.explain`."""
        name = getattr(self.target, "__name__", type(self.target).__name__)
        return explain(name, self.compilation, sizes, self.deferral.told())

    def memory(self, **sizes: Any) -> MemoryNote:
        """What each program needs, as formulas and in bytes at `sizes`."""
        return memory(self.compilation, sizes)

    def report(self, *paths: str | Path, **sizes: Any) -> None:
        """Writes what is alive at every step as a page, a picture or data; see `anyshape.frontend.report`."""
        from anyshape.frontend.report import report
        name = getattr(self.target, "__name__", type(self.target).__name__)
        report([Path(path) for path in paths], name, self.compilation, sizes)


class CompiledFunction:
    """A compiled function; also works as a method of a class."""

    def __init__(self, target: Callable[..., Any], config: Config) -> None:
        functools.update_wrapper(self, target)
        self._anyshape = Compiled(target, config)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._anyshape.call(arguments, keywords)

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


def compiled_module(module: torch.nn.Module, config: Config) -> torch.nn.Module:
    """An object of a subclass of the module's class that shares all its state; only calling it is different.

    Parameters, buffers, hooks, train and eval, state_dict: everything is the module's own, under the same names. A
    copy is compiled anew; a pickle holds the plain module.
    """
    namespace = {
        "__slots__": ("_anyshape",),
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
    base = type(module)
    kind = type(f"Compiled{base.__name__}", (base,), namespace)
    wrapper: torch.nn.Module = object.__new__(kind)
    object.__setattr__(wrapper, "__dict__", vars(module))
    object.__setattr__(wrapper, "_anyshape", Compiled(module, config))
    return wrapper


def _identity(module: torch.nn.Module) -> torch.nn.Module:
    return module
