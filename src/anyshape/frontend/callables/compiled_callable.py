"""What a compiled module and a compiled function are inside: the target, its two ways of tracing, and their record.

The first way (`oblivious`) makes one program for all sizes, 0 and 1 included (with dynamic=False: for fixed
sizes, and as one graph, also where sizes are found in the data). It is given up, for this object,
when a trace fails, and for a single call when the call's sizes do not fit its programs; then the ordinary way serves:
PyTorch's usual symbolic tracing, which makes extra programs for sizes 0 and 1.

A call for which no program is there may also run as PyTorch does, for now: see `capture/lazy_recompile.py` and
`capture/background_compile.py`.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from anyshape import torch_compat as compat
from anyshape.base.config import Config
from anyshape.base.errors import AnyShapeError, Unsupported
from anyshape.frontend.callables.tracing_mode import TracingMode
from anyshape.frontend.capture.dynamo_backend import NOT_WITH_THIS, WITH
from anyshape.frontend.capture.fast_dispatch import MISS, has_nested
from anyshape.frontend.capture.frame_callback import NESTED, check_nested
from anyshape.frontend.capture.lazy_recompile import Deferral, Deferred
from anyshape.frontend.diagnostics.explain import explain
from anyshape.frontend.diagnostics.explain_text import Explanation
from anyshape.frontend.diagnostics.memory import memory
from anyshape.frontend.diagnostics.memory_text import MemoryNote
from anyshape.frontend.messages.argument_errors import refusal
from anyshape.frontend.programs.compile_program import compile_program
from anyshape.frontend.programs.eager_fallback import DynamoCall, note, refuse, warn, watchers
from anyshape.frontend.programs.session import Compilation, NotCovered
from anyshape.torch_compat.dynamo import eager_frames, internals
from anyshape.torch_compat.tracing import settings
from anyshape.torch_compat.user_lines import is_users_check

# what to do about calls that wait for a program
ANY_STRIDE = "pass a copy by .contiguous(), or let them come: the program that is compiled then takes any stride"
ONE_NUMBER = ("keep what it names the same from call to call, compute with it as a tensor, or take that line out of "
              "what is compiled")


class CompiledCallable:
    """A callable with its two ways of tracing and their record."""

    __slots__ = ("compilation", "deferral", "oblivious", "ordinary", "target", "uncompiled")

    def __init__(self, target: Callable[..., Any], config: Config) -> None:
        self.target = target
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
             call: DynamoCall | None = None) -> Any:
        """A call through Dynamo. It is counted if some of it, or all, has run as PyTorch."""
        off, do = eager_frames.switched_off()
        if off:
            return self._as_pytorch(off, do, arguments, keywords)
        call = call or DynamoCall()
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
        call = DynamoCall()
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
