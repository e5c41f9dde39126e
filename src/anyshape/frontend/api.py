"""`anyshape.compile` for modules and functions: two ways of tracing behind one callable.

The first way (`oblivious`) makes one program for all sizes, 0 and 1 included (with dynamic=False: for fixed
sizes, and as one graph, also where sizes are found in the data). It is given up, for this object,
when a trace fails, and for a single call when the call's sizes do not fit its programs; then the ordinary way serves:
PyTorch's usual symbolic tracing, which makes extra programs for sizes 0 and 1.

A call for which no program is there may also run as PyTorch does, for now: see `capture/lazy_recompile.py` and
`capture/background_compile.py`.
"""
from __future__ import annotations

import contextlib
import copy
import functools
import sys
import time
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from anyshape import torch_compat as compat
from anyshape.base import counters
from anyshape.base.config import Config
from anyshape.base.errors import AnyShapeError, ConfigError, InputError, Unsupported
from anyshape.frontend.capture import export
from anyshape.frontend.capture.background_compile import Beside
from anyshape.frontend.capture.data_parallel import calling
from anyshape.frontend.capture.dynamo_backend import NOT_WITH_THIS, WITH, compile_fx
from anyshape.frontend.capture.fast_dispatch import MISS, FastDispatch, has_nested
from anyshape.frontend.capture.frame_callback import NESTED, MadeMeanwhile, Tracing, check_nested
from anyshape.frontend.capture.lazy_recompile import Deferral, Deferred
from anyshape.frontend.capture.small_size_guard import checked_program
from anyshape.frontend.capture.traced_calls import traced_call
from anyshape.frontend.diagnostics.explain import explain
from anyshape.frontend.diagnostics.explain_text import Explanation
from anyshape.frontend.diagnostics.memory import memory
from anyshape.frontend.diagnostics.memory_text import MemoryNote
from anyshape.frontend.messages.argument_errors import refusal
from anyshape.frontend.programs.compile_program import check_stages, compile_program
from anyshape.frontend.programs.eager_fallback import Call, Underway, counted, note, refuse, warn, watchers
from anyshape.frontend.programs.session import LIVE, Compilation, NotCovered
from anyshape.frontend.warm_start.warm_cache import warm_start_of
from anyshape.passes.driver.pipeline import FAST_DISPATCH
from anyshape.torch_compat.dynamo import eager_frames, internals
from anyshape.torch_compat.dynamo.copied_target import CopiedTarget
from anyshape.torch_compat.tracing import settings
from anyshape.torch_compat.user_lines import is_users_check
from anyshape.torch_compat.versions import api

PAUSE = 0.001  # seconds between two looks for a program that another thread may have made


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


class TracingMode:
    """One way of tracing a target: what torch.compile returned for it, and the fast dispatch past that."""

    __slots__ = ("__weakref__", "call", "copied", "dispatch", "own", "seen", "tracing", "turn", "underway")

    def __init__(self, target: Callable[..., Any], compilation: Compilation, oblivious: bool,
                 deferral: Deferral) -> None:
        self.own = own = list[Callable[..., Any]]()
        self.dispatch: FastDispatch | None = None
        self.seen = 0
        self.underway = underway = Underway()
        tracing: Tracing
        warm = warm_start_of(compilation, own, underway)

        # torch holds this function, so it must not lead to this object, with which all goes
        def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
            part = tracing.part(gm)
            program = compile_fx(gm, example_inputs, compilation=compilation)
            compilation.fixed.update(settings.fixed_sizes())
            if oblivious:
                program = checked_program(gm, program, compilation)
            elif part is not None:
                program = part.program(program)
            if warm is not None and part is None:
                warm.compiled(gm, program)
            piece = tracing.piece()
            if piece and tracing.sharded and compilation.config.strict:
                refuse(compilation.config, piece)
            program = counted(program, underway, piece)
            own.append(program)
            return program

        def around(inner: api.FrameCallback) -> api.FrameCallback:
            nonlocal tracing
            beside = Beside(target) if compilation.config.beside else None
            tracing = Tracing(compilation, inner, oblivious, deferral, beside, underway, warm)
            callback = internals.Callback(tracing)
            weakref.finalize(self, internals.forget, callback, tracing.codes, backend).atexit = False
            return callback

        sharded = eager_frames.sharded_parts(target)
        fullgraph = compilation.config.fullgraph or (compilation.config.strict and not sharded) or oblivious
        self.copied = CopiedTarget(target, api.dynamo_compile(backend, fullgraph=fullgraph, around=around))
        self.call = self.copied.call
        self.tracing = tracing
        # no Python of the user's runs in one graph that could wait for another thread
        self.turn = tracing.turn if oblivious and not compilation.config.beside else None
        tracing.sharded = sharded

    def run(self, arguments: tuple[Any, ...], keywords: dict[str, Any], call: Call) -> Any:
        """A call through torch.compile. After a trace the fast dispatch is made anew, if one frame was all there was.
        Threads whose first calls come at once wait for one program, instead of making one each."""
        outer, self.underway.call = self.underway.call, call
        try:
            with contextlib.nullcontext() if self.seen or self.turn is None else self.turn:
                result = self._called(arguments, keywords, call)
        finally:
            self.underway.call = outer
        codes = self.tracing.codes
        if len(codes) != self.seen:
            self.seen = len(codes)
            self.tracing.compilation.called(traced_call(arguments, keywords))
            self.dispatch = None
            if all(code is codes[0]
                   for code in codes) and FAST_DISPATCH not in self.tracing.compilation.config.disabled():
                dispatch = FastDispatch(self.copied, self.own)
                dispatch.take(codes[0])
                self.dispatch = dispatch if dispatch.programs else None
        return result

    def _called(self, arguments: tuple[Any, ...], keywords: dict[str, Any], call: Call) -> Any:
        """A call through torch.compile, which looks for a program once more where another thread made one meanwhile."""
        while True:
            call.seen = len(self.tracing.codes)
            try:
                return self.call(*arguments, **keywords)
            except MadeMeanwhile:
                time.sleep(call.looks * PAUSE)  # other threads go on


class CompiledCallable:
    """A callable with its two ways of tracing and their record."""

    __slots__ = ("compilation", "ddp", "deferral", "oblivious", "ordinary", "target", "uncompiled")
    compilation: Compilation
    deferral: Deferral
    uncompiled: tuple[str, str]

    def __init__(self, target: Callable[..., Any], config: Config) -> None:
        self.target = target
        self.ddp: torch.nn.Module | None = None  # the wrapper around the module that is compiled
        if isinstance(target, torch.nn.parallel.DistributedDataParallel):
            module = target.module if hasattr(target.module, "_anyshape") else compiled_module(target.module, config)
            inner: CompiledCallable = module._anyshape
            self.compilation, self.deferral, self.uncompiled = inner.compilation, inner.deferral, ("", "")
            self.ddp = calling(target, module)
            return
        self.compilation = Compilation(config, compile_program)
        self.deferral = Deferral()
        # why no call is compiled, and what to do
        self.uncompiled = (f"{NOT_WITH_THIS}: {compat.lack()}", WITH) if compat.lack() else \
            eager_frames.uncompiled_words(target)
        if self.uncompiled[0]:
            return
        self.oblivious = TracingMode(target, self.compilation, True, self.deferral)
        self.ordinary = TracingMode(target, self.compilation, False, self.deferral)
        if self.ordinary.tracing.sharded:
            self.oblivious.tracing.failure, self.oblivious.tracing.broken = eager_frames.SHARDED, True

    def call(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The result of the target for these arguments.

        Raises:
            Unsupported, LimitError: it would run as PyTorch, and may not.
        """
        if torch.compiler.is_compiling() and (torch.compiler.is_dynamo_compiling() or settings.captured_here()):
            return self.target(*arguments, **keywords)  # part of another program
        if self.ddp is not None:
            return self.ddp(*arguments, **keywords)
        if self.uncompiled[0]:
            return self._as_pytorch(*self.uncompiled, arguments, keywords)
        if internals.watched():
            return self._as_pytorch(*watchers(), arguments, keywords)
        # Dynamo's guards ask nested tensors for strides, which ends the process
        if has_nested(arguments) or (keywords and has_nested(keywords.values())):
            check_nested(self.compilation.config)
            return self._as_pytorch(NESTED, "use padded tensors", arguments, keywords)
        oblivious, ordinary, missed = self.oblivious, self.ordinary, ""
        try:
            failed_before = bool(oblivious.tracing.failure)
            try:
                if oblivious.dispatch is not None:
                    result = oblivious.dispatch(arguments, keywords)
                    if result is not MISS:
                        return result
                if self.deferral.patterns and oblivious.dispatch is not None:
                    known = self.deferral.known(arguments, keywords)
                    if known is not None:
                        raise Deferred(known, self.deferral.waiting[known].reason)
                if not failed_before or (ordinary.dispatch is None and oblivious.own):
                    return self._run(oblivious, arguments, keywords)
            except NotCovered as error:
                missed = str(error)
            if ordinary.dispatch is not None:
                result = ordinary.dispatch(arguments, keywords)
                if result is not MISS:
                    return result
            if failed_before and ordinary.dispatch is not None and oblivious.own:
                try:
                    return self._run(oblivious, arguments, keywords)
                except NotCovered as error:
                    missed = str(error)
            return self._ordinary_call(failed_before, missed, arguments, keywords)
        except Deferred as deferred:
            pattern, reason = deferred.pattern, deferred.reason
            if pattern is not None:
                self.deferral.remember(arguments, keywords, pattern)
        except Exception as error:  # the border to torch's tracer: what it says of the arguments, in the user's words
            refused = refusal(error, self.target, arguments, keywords) or self._not_one_program(error)
            if refused is None:
                raise
            raise refused from None
        started = time.perf_counter()
        result = self.target(*arguments, **keywords)
        self._ran(pattern, result, time.perf_counter() - started)
        note(self.compilation, reason, chosen=True)
        return result

    def _as_pytorch(self, reason: str, do: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """A call that runs as PyTorch from the beginning. reason: empty where there is nothing to compute."""
        if reason:
            refuse(self.compilation.config, reason, do)
            note(self.compilation, reason, do)
        return self.target(*arguments, **keywords)

    def _not_one_program(self, error: Exception) -> AnyShapeError | None:
        """The error to raise instead of Dynamo's, where `strict` refuses a call that is not one program."""
        config = self.compilation.config
        if not config.strict or config.fullgraph or not isinstance(error, eager_frames.tracer_words()):
            return None
        return Unsupported("this call would run as PyTorch in part, which strict=True refuses",
                           where=eager_frames.line_of(error), why=eager_frames.error_words(error),
                           do="change that line, or set strict=False to let PyTorch run it")

    def _run(self, way: TracingMode, arguments: tuple[Any, ...], keywords: dict[str, Any],
             call: Call | None = None) -> Any:
        """A call through Dynamo. It is counted if some of it, or all, has run as PyTorch."""
        off, do = eager_frames.switched_off()
        if off:
            return self._as_pytorch(off, do, arguments, keywords)
        call = call or Call()
        result = way.run(arguments, keywords, call)
        parts = call.runs > 1 and not way.tracing.is_whole()
        if call.reason or parts or not (call.runs or way.tracing.empty):
            note(self.compilation, call.reason or way.tracing.said(), chosen=call.chosen)
        return result

    def _ran(self, pattern: Any, result: Any, seconds: float) -> None:
        """Counts a call that has run as PyTorch until that pays, and says once what keeps coming."""
        self.deferral.ran(pattern, result, seconds)
        why = self.deferral.warning(pattern)
        if why:
            warn("calls that no program takes keep coming, for one cause; they run as PyTorch would.", why,
                 f"{ANY_STRIDE if 'stride' in why else ONE_NUMBER}; defer=False traces at once; see explain()")

    def _ordinary_call(self, failed_before: bool, missed: str, arguments: tuple[Any, ...],
                       keywords: dict[str, Any]) -> Any:
        """The ordinary way. When it fails too, the fault is the call's, and the oblivious way stays open. missed: why
        the oblivious way does not take the call."""
        done = False
        call = Call()
        plain, tracing = call.plain, self.oblivious.tracing
        self.ordinary.tracing.general = not failed_before and not (tracing.failure and not tracing.codes)
        where = f" ({tracing.where})" if tracing.where else ""
        self.ordinary.tracing.broken = tracing.broken and internals.can_add_guards()
        self.ordinary.tracing.forced = f"{tracing.failure}{where}" if tracing.failure else ""
        self.ordinary.tracing.missed = missed
        started = time.perf_counter()
        try:
            result = self._run(self.ordinary, arguments, keywords, call)
            done = True
            for pattern in call.deferred:
                self._ran(pattern, result, time.perf_counter() - started)
            return result
        except Exception as error:
            if plain and not is_users_check(error) \
                    and refusal(plain[0][1], self.target, arguments, keywords) is not None:
                raise plain[0][1] from error  # what eager PyTorch refuses too, the tracer names better
            raise
        finally:
            for code, _ in plain if done else ():
                self.ordinary.tracing.refusals[code] = self.ordinary.tracing.refusals.get(code, 0) + 1
            if not failed_before and tracing.failure:
                if done and not plain:
                    stage = "all sizes in one program" if tracing.way == "all sizes" else tracing.way
                    self.compilation.record("trace", stage, tracing.failure)
                else:
                    tracing.failure = ""

    def explain(self, **sizes: Any) -> Explanation:
        """What was decided, and why; see `anyshape.frontend.diagnostics.explain`."""
        name = getattr(self.target, "__name__", type(self.target).__name__)
        return explain(name, self.compilation, sizes, self.deferral.told(), self.target)

    def memory(self, **sizes: Any) -> MemoryNote:
        """What each program needs, as formulas and in bytes at `sizes`."""
        return memory(self.compilation, sizes)

    def report(self, *paths: str | Path, **sizes: Any) -> None:
        """Writes what is alive at every step as a page, a picture or data; see
        `anyshape.frontend.diagnostics.report`."""
        from anyshape.frontend.diagnostics.report import report
        name = getattr(self.target, "__name__", type(self.target).__name__)
        report([Path(path) for path in paths], name, self.compilation, sizes)


# what to do about calls that wait for a program
ANY_STRIDE = "pass a copy by .contiguous(), or let them come: the program that is compiled then takes any stride"
ONE_NUMBER = ("keep what it names the same from call to call, compute with it as a tensor, or take that line out of "
              "what is compiled")
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
    object.__setattr__(wrapper, "_anyshape", CompiledCallable(module, config))
    return wrapper


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
