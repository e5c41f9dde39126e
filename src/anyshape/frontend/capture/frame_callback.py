"""The frame callback, which Dynamo calls when it has no program for a frame: it traces under our settings, now, later,
or beside the caller."""
from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from anyshape import torch_compat as compat
from anyshape.base.config import Config
from anyshape.base.errors import AnyShapeError
from anyshape.frontend.capture.background_compile import Beside
from anyshape.frontend.capture.copied_parts import SeenCopy
from anyshape.frontend.capture.lazy_recompile import Deferral, Deferred, small_sizes
from anyshape.frontend.capture.meta_kernels import tracing_settings
from anyshape.frontend.capture.small_size_guard import PartCoverage
from anyshape.frontend.messages.recompile_reasons import UNCOVERED, counters, fixed_at, miss_words, singled_out, varying
from anyshape.frontend.programs.eager_fallback import NO_OTHER, UNKNOWN, DynamoCall, Underway, refuse
from anyshape.frontend.programs.session import Compilation, NotCovered
from anyshape.frontend.recurrent.scans import UnknownScan
from anyshape.frontend.train_step.defer_interrupts import DeferInterrupts
from anyshape.runtime.context.process_context import context_underway
from anyshape.torch_compat import tree as pytree
from anyshape.torch_compat.dynamo import eager_frames, internals
from anyshape.torch_compat.dynamo.cut_loops import loops_cut_at_hooks
from anyshape.torch_compat.tracing import settings
from anyshape.torch_compat.versions import api

NO_REASON = "a size of 0, from which nothing can be told about others"
NESTED = "a nested tensor is among the arguments, whose sizes are no ordinary numbers"
BESIDE = "the program is traced in a thread of its own meanwhile (background=True)"
PARTS = "the program is cut in parts: what lies between them runs as PyTorch"
LOOKS = 3  # before a thread traces among others
PATIENCE = 8  # traces of one frame that torch's tracer may refuse; each takes as long as one that it does not refuse


@dataclass(frozen=True, slots=True)
class RecompileReason:
    """Of one trace: `where` it is, the `reason` that forces it, the `way` it goes (see Capture), and the sizes of 1
    that the programs do not take and that it takes as `numbers`. changing: places of buffers whose sizes change from
    trace to trace. cause: what of the call is another number than programs took it for; None without a program. piece:
    why the frame is not all of what the user has called; empty where it is. uncovered: a program for all sizes refuses
    the call's sizes."""
    where: str
    reason: str
    way: str
    numbers: frozenset[str]
    changing: frozenset[str]
    cause: str | None
    piece: str
    uncovered: bool


class MadeMeanwhile(Exception):
    """While a thread waited for its turn to trace, another one has made a program, which may serve its call."""


class ProgramStore(Protocol):
    """Programs in the disk cache: frontend/warm_start/warm_cache.py."""

    made: Callable[..., Any] | None

    def answer(self, frame: Any, way: str) -> Any: ...

    def recording(self, frame: Any, way: str) -> Any: ...


class Tracing:
    """What runs on a cache miss of Dynamo.

    way: what `Capture` calls it.
    failure, where: what a trace ended in, by which this way is given up, and the user's line; empty before.
    forced: that of the other way, with the line, where it is why this one is taken; set by the caller.
    missed: why the other way does not take the call in hand; set by the caller.
    buffers: per code object, the sizes of the buffers that its frames saw when they were traced last, by their places.
    changing: per code object, the places of those that had other sizes than the time before, and of numbers that did:
        programs then take any.
    general: a general program serves other calls than the one in hand; set by the caller, for the ordinary way.
    underway: the call in hand, in each thread.
    pieces: per code object of a frame that is a part of what users call, why it is one.
    skipped: per code object, why Dynamo made no program of its frames.
    left: per code object, Dynamo's answer that it makes no program of its frames, where Dynamo does not keep that.
    empty: some frame that is all of what the user has called has nothing to compute.
    refusals: per code object, how many calls that PyTorch takes it has refused.
    set_up: a call has run as PyTorch does for what only a first call does.
    broken: the failure is a graph break; set by the caller, for the ordinary way, which then traces each part of the
        program for all sizes.
    as_torch: by code object, forms of ours that do not fit its frame (`UnknownScan`, `SeenCopy`): traced as torch does.
    single: code objects of parts that cannot be traced so.
    all_sizes: the trace that is going on is one for all sizes.
    turn: held by the thread that traces.
    warm: takes programs from the disk cache, and puts them there.
    sharded: around how many parts of the module FSDP2 has its hooks; what is between them is a program each, and that
        is all there is to compile.
    """

    def __init__(self, compilation: Compilation, inner: api.FrameCallback, oblivious: bool,
                 deferral: Deferral, beside: Beside | None, underway: Underway,
                 warm: ProgramStore | None = None) -> None:
        self.compilation = compilation
        self.inner = inner
        self.oblivious = oblivious
        self.deferral = deferral
        self.beside = beside
        self.way = "ordinary" if not oblivious else "all sizes" if compilation.config.dynamic else "one graph"
        self.failure = "" if not oblivious or compat.has(*compat.ALL_SIZES) else "this version of torch cannot trace so"
        self.where = ""
        self.forced = ""
        self.missed = ""
        self.buffers: dict[Any, dict[str, tuple[int, ...]]] = {}
        self.changing: dict[Any, set[str]] = {}
        self.general = False
        self.codes: list[Any] = []
        self.underway = underway
        self.warm = warm
        self.pieces: dict[Any, str] = {}
        self.skipped: dict[Any, str] = {}
        self.left: dict[Any, Any] = {}
        self.empty = False
        self.refusals: dict[Any, int] = {}
        self.set_up = False
        self.broken = False
        self.as_torch: dict[Any, frozenset[type]] = {}
        self.single: set[Any] = set()
        self.turn = threading.RLock()
        self.all_sizes = oblivious
        self.sharded = 0
        # of the trace that is going on, of which there is one at a time
        self._piece, self._breaks = "", 0
        self._frame: Any = None
        self._part: PartCoverage | None = None

    def __call__(self, frame: Any, *others: Any) -> Any:
        """Traces one frame.

        Raises:
            Unsupported: there is a nested tensor, and no call may run as plain PyTorch.
            NotCovered: the oblivious way failed, now or before, or a size is 0, from which nothing can be told about
                others; nothing of the user's program has run.
            Deferred: the call shall run as PyTorch, this time, or until a thread has traced it.
            MadeMeanwhile: another thread has made a program; nothing of the user's program has run.
            KeyboardInterrupt: it came while guards were checked.
        """
        call, code = self.underway.call or DynamoCall(), frame.f_code
        if self.codes and internals.lost_interrupt(code, frame.f_locals, self.inner):
            raise KeyboardInterrupt("while guards were checked")
        if code in self.left:
            return self.left[code]
        piece = self._place(code, call)
        tensors = _tensors(frame.f_locals)
        if any(value.is_nested for value in tensors):
            return self._nested(call)
        if self.oblivious:
            if self.failure:
                raise NotCovered(self.failure)
            if any(0 in value.shape for value in tensors):
                raise NotCovered("a size of 0")
        elif self.refusals.get(code, 0) == PATIENCE:
            call.reason = call.reason or self.skipped.get(code, UNKNOWN)
            return api.plain_frame()
        told = self._told(frame, piece)
        pattern = small_sizes(tensors)
        config = self.compilation.config
        if pattern is None or not (told.numbers or told.uncovered or self.general):
            pattern = None if told.cause is None or not config.dynamic else \
                self.deferral.pattern_of(frame.f_code, told.cause)
        if pattern is not None and config.waits and not call.looks \
                and self.deferral.holds_back(pattern, told.reason or NO_REASON):
            return self._later(pattern, self.deferral.waiting[pattern].reason, call)

        in_part = self.broken and config.dynamic and code not in self.single and not told.uncovered \
            and not any(0 in value.shape for value in tensors)

        def trace(kept: Any) -> Any:
            answer = self._trace_part((kept, *others), told) if in_part else None
            return answer or self._trace((kept, *others), told)

        with contextlib.nullcontext() if self.beside is not None else self.turn:
            if self.beside is None and not (call.frames or call.runs) and self._looks_again(call):
                raise MadeMeanwhile
            try:
                if eager_frames.is_never_traced(code):
                    answer = self.inner(frame, *others)
                else:
                    answer = self._from_cache(frame, told) or (
                        trace(frame) if self.beside is None else self.beside.answer(frame, trace))
            except Exception as error:  # the border to torch's tracer
                return self._refused(code, error, call)
            if answer is None:
                return self._later(None, BESIDE, call)
            self._noted(code, answer, bool(tensors), call)
        return self._kept(code, answer)

    def _looks_again(self, call: DynamoCall) -> bool:
        """Whether Dynamo may have a program by now that it did not find for this call: another thread has made one, or
        hands one to it, or had it move the programs that it was looking through."""
        if len(self.codes) > call.seen:
            return True
        if not self.codes or call.looks == LOOKS or threading.active_count() == 1:
            return False
        call.looks += 1
        return True

    def _noted(self, code: Any, answer: Any, has_tensors: bool, call: DynamoCall) -> None:
        """Counts a frame with the call: it has a program, or runs as PyTorch."""
        if api.made_program(answer):
            self.codes.append(code)
        elif self.compilation.left_alone is not None:
            self._leaves(code, *self.compilation.left_alone, call)
        elif has_tensors and eager_frames.is_left(code, answer):
            self._skips(code, call)
        else:
            return
        call.frames += 1

    def _from_cache(self, frame: Any, told: RecompileReason) -> Any:
        """Dynamo's answer with a program of an earlier process; None where there is none that fits."""
        if self.warm is None or told.piece or self.broken or self.sharded:
            return None
        config = self.compilation.config
        with context_underway(config), settings.guard_settings():
            self.compilation.tracing = told.where, told.reason, told.way
            return self.warm.answer(frame, told.way)

    def _kept(self, code: Any, answer: Any) -> Any:
        """Dynamo's answer for a frame. That there is no program of it holds for what is compiled here, no others."""
        apart = api.keeps_apart(answer)
        if apart is None:
            return answer
        self.left[code] = apart
        return apart

    def piece(self) -> str:
        """Why the program of the trace that is going on is not all of what the user has called; empty where it is."""
        breaks = eager_frames.graph_breaks()[self._breaks:]
        if self.sharded:
            breaks = [one for one in breaks if not eager_frames.is_at_sharding(one)]
        return eager_frames.break_words(breaks[-1]) if breaks else self._piece

    def is_whole(self) -> bool:
        """Whether several programs are all that there is to compile."""
        return bool(self.sharded) and not self.skipped

    def _place(self, code: Any, call: DynamoCall) -> str:
        """Why a frame is a part of what the user has called: another came before it; empty where it is all of it."""
        if code not in self.pieces and not self.sharded and (call.frames or eager_frames.is_resumed(code)):
            self.pieces[code] = self.said()
        return self.pieces.get(code, "")

    def said(self) -> str:
        """Why this way of tracing leaves something to PyTorch, as far as it is known."""
        return next(reversed(self.skipped.values()), "") or self.forced or PARTS

    def _skips(self, code: Any, call: DynamoCall) -> None:
        """Dynamo makes no program of a frame with tensors: it runs as PyTorch.

        Raises:
            Unsupported, LimitError: it may not.
        """
        reason = self.forced or (f"{NO_OTHER}: {self.missed}" if self.missed else UNKNOWN)
        refuse(self.compilation.config, reason, eager_frames.COMPILE_PARTS if self.sharded else "")
        self.skipped[code] = reason
        call.reason = call.reason or reason

    def _leaves(self, code: Any, reason: str, where: str, call: DynamoCall) -> None:
        """A frame was captured, and left to PyTorch (frontend/capture/caught_errors.py).

        Raises:
            Unsupported, LimitError: it may not be.
            NotCovered: the ordinary way comes next, which traces what the frame calls.
        """
        self.compilation.left_alone = None
        refuse(self.compilation.config, reason, "take what the handler is for out of the compiled function", where)
        if self.oblivious:
            self.failure, self.where, self.broken = reason, where, True
            raise NotCovered(reason)
        self.skipped[code] = f"{reason} ({where})"
        call.reason = call.reason or self.skipped[code]

    def _later(self, pattern: Any, reason: str, call: DynamoCall) -> Any:
        if self.oblivious or self.compilation.config.fullgraph:  # one frame is all there is
            raise Deferred(pattern, reason)
        if pattern is not None:
            call.deferred.append(pattern)
        call.reason, call.chosen = call.reason or reason, True
        return api.plain_frame()  # frames before this one may have run

    def _nested(self, call: DynamoCall) -> Any:
        """For a frame with a nested tensor: the ordinary way comes next, and there it runs as plain PyTorch."""
        if self.oblivious and not self.compilation.config.fullgraph:
            raise NotCovered(NESTED)
        check_nested(self.compilation.config)
        call.reason = call.reason or NESTED
        return api.plain_frame()

    def _refused(self, code: Any, error: Exception, call: DynamoCall) -> Any:
        """After a trace that failed: the ordinary way comes next, or, after that, plain PyTorch, this one time. (Eager
        PyTorch takes more: a loss over no elements, statistics over one. What it refuses too, it reports itself.)"""
        ours = isinstance(getattr(error, "inner_exception", None), AnyShapeError)
        config = self.compilation.config
        failure = eager_frames.error_words(error)
        if self.oblivious:
            if ours:
                raise error
            whole = config.fullgraph and self.compilation.step is None  # a step asks for it itself
            if not (self.set_up or whole) and settings.met_a_lock(error):
                # what is done under a lock is most often done once (hooks, tables): the next call may not come here
                refuse(config, f"the first call does something under a lock: {failure}",
                       do="call the model itself once, as PyTorch, before the compiled one",
                       where=eager_frames.line_of(error))
                self.set_up = True
                self.compilation.record("trace", "first call", f"it ran as PyTorch does: {failure}")
                raise Deferred(None, f"the first call does something under a lock: {failure}") from error
            self.failure, self.where = failure, eager_frames.line_of(error)
            self.broken = isinstance(error, api.graph_breaks())
            raise NotCovered(self.failure) from error
        failures = (*api.tracer_failures(), AssertionError)  # torch's own, of what it traced; a user's is traced
        refused = isinstance(error, failures) or api.trace_failure(error) is not None
        if not refused or config.strict or config.fullgraph or ours:
            raise error
        if config.limited and api.trace_failure(error) is None:
            refuse(config, f"PyTorch's tracer refuses it: {failure}", where=eager_frames.line_of(error))
        if config.limited:
            raise error  # what PyTorch says of the operands
        call.plain.append((code, error))
        self.skipped[code] = f"PyTorch's tracer refuses a call with these sizes: {failure}"
        call.reason = call.reason or self.skipped[code]
        return api.plain_frame()

    def _trace_part(self, arguments: tuple[Any, ...], told: RecompileReason) -> Any:
        """Dynamo's answer for a part of a program, traced for all sizes; None where it has to be traced the ordinary
        way, for its program would not serve the call in hand, or cannot be made.

        Raises:
            AnyShapeError: the program could not be compiled, and has to be.
        """
        code = arguments[0].f_code
        try:
            return self._trace(arguments, replace(told, way="parts"), all_sizes=True)
        except Exception as error:  # the border to torch's tracer
            inner = getattr(error, "inner_exception", error)
            if isinstance(inner, AnyShapeError):
                raise
            if not isinstance(inner, NotCovered):
                self.single.add(code)
                self.compilation.record("trace", "a part for all sizes", eager_frames.error_words(error))
            return None

    def part(self, gm: torch.fx.GraphModule) -> PartCoverage | None:
        """Asked in the trace that is going on, before its graph is compiled: what says which sizes the program of a
        part serves; None for whole programs, and for the ordinary way.

        Raises:
            NotCovered: not those of the call in hand.
        """
        if self.oblivious or not self.all_sizes:
            return None
        self._part = part = PartCoverage(gm, self.compilation, self._frame.f_globals)
        if part.guard is not None and not part.guard(self._frame.f_locals):
            raise NotCovered("sizes 0 or 1 need another program")
        return part

    def _trace(self, arguments: tuple[Any, ...], told: RecompileReason, all_sizes: bool | None = None) -> Any:
        config, code = self.compilation.config, arguments[0].f_code
        all_sizes = self.oblivious if all_sizes is None else all_sizes
        as_torch = self.as_torch.get(code, frozenset())
        # a loop over parts takes a program for each
        programs = api.programs_of_others(code, self.inner) + self.sharded
        started = time.perf_counter()
        with context_underway(config), tracing_settings(config.dynamic, all_sizes, programs, told.numbers,
                                                  told.changing, as_torch), \
                loops_cut_at_hooks() if self.sharded else contextlib.nullcontext(), \
                settings.nothing_left_behind(arguments[0].f_globals), self._recorded(arguments[0], told) as keep:
            self.compilation.tracing = told.where, told.reason, told.way
            self._piece, self._breaks = told.piece, len(eager_frames.graph_breaks())
            self.all_sizes, self._frame, self._part = all_sizes, arguments[0], None
            try:
                # where Ctrl-C cuts off the end of a `with`, a mode stays set, and torch's C++ ends the process
                with DeferInterrupts(once=True):
                    answer = self.inner(*arguments)
                if self._part is not None and self._part.guard is not None and api.made_program(answer):
                    internals.add_guard(answer.guarded_code.guard_manager, self._part.guard, UNCOVERED)
            except Exception as error:
                if eager_frames.dropped_interrupt(error):
                    raise KeyboardInterrupt from error
                kind = type(getattr(error, "inner_exception", error))
                if kind not in (UnknownScan, SeenCopy) or kind in as_torch:
                    raise
                answer = None
                self.as_torch[code] = as_torch | {kind}
            finally:
                self.all_sizes, self._frame, self._part = self.oblivious, None, None
            if api.made_program(answer):
                keep(answer, not self.piece())
            if api.made_program(answer) and eager_frames.has_no_graph(answer) and not self.piece():
                self.empty = True
        if answer is None and self.as_torch.get(code, as_torch) != as_torch:
            return self._trace(arguments, told, all_sizes)
        age_trace_garbage()
        self.deferral.cost = max(self.deferral.cost, time.perf_counter() - started)
        return answer

    def _recorded(self, frame: Any, told: RecompileReason) -> Any:
        """A context in which a trace is recorded for the disk cache."""
        if self.warm is None or told.piece or told.way == "parts" or self.sharded:
            return contextlib.nullcontext(lambda _answer, _whole: None)
        return self.warm.recording(frame, told.way)

    def _changing(self, frame: Any) -> frozenset[str]:
        """The places of buffers whose sizes change from trace to trace, as those of a cache that grows."""
        known = self.buffers.setdefault(frame.f_code, {})
        found = self.changing.setdefault(frame.f_code, set())
        for place, sizes in _buffer_sizes(frame.f_locals):
            if known.setdefault(place, sizes) != sizes:
                known[place] = sizes
                found.add(place)
        return frozenset(found)

    def _told(self, frame: Any, piece: str) -> RecompileReason:
        code = frame.f_code
        where = f"{code.co_name}, {code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"
        if isinstance(frame.f_locals.get("fn"), torch.nn.Module):  # a frame that torch put around a module of its own
            where = type(frame.f_locals["fn"]).__name__
        misses = internals.failed_guards(code, frame.f_locals, self.inner) if self.compilation.graphs else []
        uncovered = any(UNCOVERED in parts for parts in misses)
        misses.sort(key=lambda parts: UNCOVERED in parts)
        reason = miss_words(misses[0], frame.f_locals) if misses else ""
        reason += fixed_at(misses[0], self.compilation.fixed) if misses else ""
        if not self.oblivious and self.compilation.config.dynamic and not reason:
            reason = self.compilation.fallbacks[-1].reason if self.compilation.fallbacks else ""
        changing = self._changing(frame)
        counted = counters(misses, frame.f_locals) - changing
        self.changing[code] |= counted  # the next program takes any number there
        cause = varying(misses, frame.f_locals) if misses and not counted else None
        return RecompileReason(where, reason, self.way, singled_out(misses, frame.f_locals), changing | counted, cause,
                               piece,
                    uncovered)


def check_nested(config: Config) -> None:
    """Refuses a nested tensor where no call may run as plain PyTorch.

    Raises:
        Unsupported: under `strict` and `fullgraph`.
        LimitError: under a limit in bytes.
    """
    refuse(config.replace(strict=config.strict or config.fullgraph), NESTED, do="use padded tensors")


def _tensors(values: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the locals of a frame, in order."""
    found: list[Any] = []
    for value in values.values():
        try:
            found += pytree.tree_leaves(value)
        except (AttributeError, KeyError):  # an object that is being made has not yet what its flattening reads
            continue
    return [one for one in found if isinstance(one, Tensor)]


def _buffer_sizes(values: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The place, in Dynamo's words, and the sizes of each buffer of the modules among the locals of a frame."""
    for name, module in values.items():
        if not isinstance(module, torch.nn.Module) or not hasattr(module, "_buffers"):  # one that is being made
            continue
        for path, buffer in module.named_buffers(remove_duplicate=False):
            if buffer.is_nested or torch.nn.parameter.is_lazy(buffer):
                continue
            *parents, last = path.split(".")
            inner = "".join(f"._modules['{parent}']" for parent in parents)
            yield f"L['{name}']{inner}._buffers['{last}']", tuple(buffer.shape)


def age_trace_garbage() -> None:
    """Lets Python take what a trace has left for old. Else one of the next calls would go through all objects of the
    process to see what is garbage: some 300 ms, where a call takes 20. It does so some thousands of calls later."""
    if gc.isenabled() and not gc.get_freeze_count():  # frozen objects are the user's affair
        gc.freeze()
        gc.unfreeze()
