"""One way of tracing a target through torch.compile, and the look for the program that a call runs.

    a call --> fast dispatch: the guards of one frame, and its program --> Dynamo: its guards, or a trace

Of threads that come at once one traces, and the others look again for what it has made.
"""
from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from anyshape.frontend.capture.background_compile import Beside
from anyshape.frontend.capture.dynamo_backend import compile_fx
from anyshape.frontend.capture.fast_dispatch import FastDispatch
from anyshape.frontend.capture.frame_callback import MadeMeanwhile, Tracing
from anyshape.frontend.capture.lazy_recompile import Deferral
from anyshape.frontend.capture.small_size_guard import checked_program
from anyshape.frontend.capture.traced_calls import traced_call
from anyshape.frontend.programs.eager_fallback import DynamoCall, Underway, counted, refuse
from anyshape.frontend.programs.session import Compilation
from anyshape.frontend.warm_start.warm_cache import warm_start_of
from anyshape.passes.driver.pipeline import FAST_DISPATCH
from anyshape.torch_compat.dynamo import eager_frames, internals
from anyshape.torch_compat.dynamo.copied_target import CopiedTarget
from anyshape.torch_compat.tracing import settings
from anyshape.torch_compat.versions import api

PAUSE = 0.001  # seconds between two looks for a program that another thread may have made


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

    def run(self, arguments: tuple[Any, ...], keywords: dict[str, Any], call: DynamoCall) -> Any:
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

    def _called(self, arguments: tuple[Any, ...], keywords: dict[str, Any], call: DynamoCall) -> Any:
        """A call through torch.compile, which looks for a program once more where another thread made one meanwhile."""
        while True:
            call.seen = len(self.tracing.codes)
            try:
                return self.call(*arguments, **keywords)
            except MadeMeanwhile:
                time.sleep(call.looks * PAUSE)  # other threads go on
