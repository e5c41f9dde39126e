"""Background compilation: tracing in a thread of its own, while calls run as PyTorch (`background=True`).

The thread only makes Dynamo's answer for a frame: guards and code. A later call of that frame, in the caller's own
thread, hands the answer to Dynamo as if it had just been made; so the user's program never runs in the thread.

What a trace reads of modules may change under it. What it may read is looked at before, at every call meanwhile, and
after; if it differs, the answer is dropped.
"""
from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from anyshape.torch_compat.tracing import background_trace

ATTEMPTS = 3  # traces of one frame that may be dropped; then the caller waits, for there is no other way
UNTAKEN = 8  # answers for other calls of the frame that may wait to be taken; with more, the caller waits, too


@dataclass(slots=True, eq=False)
class TraceJob:
    """One frame that is being traced, or was.

    Args:
        code: the frame's.
        frame: what Dynamo reads of it; None when the trace is over, for it holds the call's tensors.
        state: what the trace may read of modules, at the beginning.
        answer: Dynamo's, when it is there.
        error: what the trace raised instead.
        changed: the state has changed meanwhile.
    """
    code: types.CodeType
    frame: Any
    state: list[Any]
    answer: Any = None
    error: BaseException | None = None
    changed: bool = False
    thread: Any = None

    @property
    def done(self) -> bool:
        return self.answer is not None or self.error is not None


class Beside:
    """The jobs of one way of tracing one compiled object.

    Args:
        target: the compiled module or function.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self.lock = threading.Lock()
        self.jobs: list[TraceJob] = []
        self.dropped: dict[Any, int] = {}

    def answer(self, frame: Any, trace: Callable[[Any], Any]) -> Any:
        """Dynamo's answer for the frame, or None while it is not there: a job is on its way then.

        Args:
            trace: makes the answer for a kept frame; the thread calls it.

        Raises:
            Whatever the trace raised.
        """
        if background_trace.passed_over(frame):
            return trace(frame)
        with self.lock:
            for job in self.jobs:
                job.changed = job.changed or (not job.done and not _same(job.state, self._state()))
            done = [job for job in self.jobs if job.done and job.code is frame.f_code]
            for job in done:
                if job.changed:
                    self.jobs.remove(job)
                    self.dropped[frame.f_code] = self.dropped.get(frame.f_code, 0) + 1
                elif job.error is not None:
                    self.jobs.remove(job)
                    raise job.error
                elif background_trace.takes(job.answer, frame.f_locals):
                    self.jobs.remove(job)
                    return job.answer
            waits = (self.dropped.get(frame.f_code, 0) >= ATTEMPTS or len(done) > UNTAKEN
                     or not background_trace.same_modes())
            if not waits and all(job.done for job in self.jobs):
                self._start(frame, trace)
        return trace(frame) if waits else None

    def _start(self, frame: Any, trace: Callable[[Any], Any]) -> None:
        job = TraceJob(frame.f_code, background_trace.frame_to_keep(frame), self._state())

        def work() -> None:
            try:
                answer = trace(job.frame)
                job.changed = job.changed or not _same(job.state, self._state())
                job.frame, job.answer = None, answer
            except BaseException as error:  # noqa: BLE001  the next call raises it, in the caller's thread
                job.frame, job.error = None, error

        self.jobs.append(job)
        job.thread = background_trace.in_a_thread(work, "anyshape trace")

    def _state(self) -> list[Any]:
        return [value for module in _modules(self.target) for value in _attributes(module)]


def _modules(target: Any) -> Iterator[torch.nn.Module]:
    """The modules that a target is or refers to: itself, its object's, those of its closure and of its globals."""
    if isinstance(target, types.MethodType):
        yield from _modules(target.__self__)
        target = target.__func__
    if isinstance(target, torch.nn.Module):
        yield from target.modules()
    elif isinstance(target, types.FunctionType):
        named = [target.__globals__.get(name) for name in target.__code__.co_names]
        for cell in target.__closure__ or ():
            try:
                named.append(cell.cell_contents)
            except ValueError:  # not bound yet
                continue
        for value in named:
            if isinstance(value, torch.nn.Module):
                yield from value.modules()


def _attributes(module: torch.nn.Module) -> Iterator[Any]:
    for name, value in list(vars(module).items()):
        yield name
        yield value
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
        for one in list(inner):
            yield f"{one.shape} {one.dtype} {one.requires_grad}" if isinstance(one, torch.Tensor) else one


def _same(before: list[Any], after: list[Any]) -> bool:
    """Whether two states are made of the same objects; numbers and texts are compared."""
    plain = (bool, int, float, str)
    return len(before) == len(after) and all(
        one is other or (type(one) is type(other) and isinstance(one, plain) and one == other)
        for one, other in zip(before, after, strict=True))
