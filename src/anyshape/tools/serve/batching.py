"""Dynamic batching: worker threads take requests from a queue, several at once where these may share a call.

    ids [1, 17]  [1, 40]  [2, 17]        one call on [3, 17], one on [1, 40]: no padding, no buckets

A worker that is free takes the oldest request and those of the same sizes, so requests gather while all workers are
busy, and nobody waits where they are not. A latency budget above 0 lets requests wait that long for others. An error of
a call that several share is nobody's yet: each is then called alone.
"""
from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from anyshape.base.errors import AnyShapeError, LimitError, VerifyError
from anyshape.tools.serve.memory import Budget
from anyshape.tools.serve.metrics import Metrics
from anyshape.tools.serve.protocol import Array, RequestError
from anyshape.tools.serve.served import Servable

WAITING, TAKEN, LEFT = "waiting", "taken", "left"
Outcome = list[Array] | Exception


class Job:
    """A request in the queue. done: called once, by a worker, with results or an error."""

    __slots__ = ("arrays", "arrived", "done", "key", "model", "rows", "state")

    def __init__(self, model: Servable, arrays: Sequence[Array], done: Callable[[Outcome], None]) -> None:
        self.model, self.arrays, self.done = model, arrays, done
        key, self.rows = (None, 1) if model.batch is None else model.batch.key(arrays)
        self.key: Any = None if key is None else (model, key)
        self.arrived = time.monotonic()
        self.state = WAITING


class Batcher:
    """The queue and its workers.

    Args:
        workers: calls at once. rows: of a shared call at most. wait: seconds that a request may wait for others while a
        worker is free. patience: seconds after which one that still waits is refused. memory: of calls.
    """

    def __init__(self, workers: int, rows: int, wait: float, patience: float, memory: Budget, metrics: Metrics) -> None:
        self.rows, self.wait, self.patience = rows, wait, patience
        self.memory, self.metrics = memory, metrics
        self.lock = threading.Condition()
        self.order: deque[Job] = deque()
        self.alike: dict[Any, deque[Job]] = {}
        self.gathered: dict[Any, int] = {}  # rows that wait, by key
        self.full: dict[Any, None] = {}  # what need not wait, in order: keys with a call's rows, requests without one
        self.count = 0
        self.closed = False
        self.threads = [threading.Thread(target=self._work, name=f"anyshape-serve-{i}", daemon=True)
                        for i in range(workers)]
        for thread in self.threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Puts a request into the queue.

        Raises:
            RequestError: the server is ending.
        """
        with self.lock:
            if self.closed:
                raise RequestError(503, "the server is ending", do="send the request to another server")
            self.order.append(job)
            self.count += 1
            if job.key is None:
                self.full[job] = None
            else:
                self.alike.setdefault(job.key, deque()).append(job)
                self.gathered[job.key] = self.gathered.get(job.key, 0) + job.rows
                if self.gathered[job.key] >= self.rows:
                    self.full.setdefault(job.key)
            self.lock.notify()

    def leave(self, job: Job) -> bool:
        """Takes a request out of the queue whose client has left; False: a worker has it."""
        with self.lock:
            if job.state != WAITING:
                return False
            self._out(job, LEFT)
            job.arrays = ()
            return True

    def close(self) -> None:
        """Ends when all that was submitted has been answered."""
        with self.lock:
            self.closed = True
            self.lock.notify_all()
        for thread in self.threads:
            thread.join()

    # ---- the queue, under the lock

    def _out(self, job: Job, state: str) -> None:
        job.state = state
        self.count -= 1
        if job.key is None:
            del self.full[job]
            return
        self.gathered[job.key] -= job.rows
        if self.gathered[job.key] < self.rows:
            self.full.pop(job.key, None)
        mates = self.alike[job.key]
        while mates and mates[0].state != WAITING:
            mates.popleft()
        if not mates:
            del self.gathered[job.key], self.alike[job.key]

    def _oldest(self) -> Job | None:
        while self.order and self.order[0].state != WAITING:
            self.order.popleft()
        return self.order[0] if self.order else None

    def _ready(self, now: float) -> Job | None:
        """The request whose call is next; None: none is ready."""
        oldest = self._oldest()
        if oldest is None or now >= oldest.arrived + self.wait or self.closed:
            return oldest
        # nobody has waited for long: those that need not wait go first
        head = next(iter(self.full), None)
        return head if head is None or isinstance(head, Job) else next(
            one for one in self.alike[head] if one.state == WAITING)

    def _take(self) -> list[Job]:
        """The requests of the next call; none: the server has ended."""
        with self.lock:
            while True:
                now = time.monotonic()
                first = self._ready(now)
                if first is not None:
                    break
                oldest = self._oldest()
                if oldest is None and self.closed:
                    return []
                self.lock.wait(None if oldest is None else max(0.0, oldest.arrived + self.wait - now))
            found, rows = [first], first.rows
            if first.key is not None:
                most = self.rows if first.model.batch is None else min(self.rows, first.model.batch.most or self.rows)
                for one in self.alike[first.key]:
                    if rows >= most:
                        break
                    if one.state == WAITING and one is not first and rows + one.rows <= most:
                        found.append(one)
                        rows += one.rows
            for one in found:
                self._out(one, TAKEN)
            if self.count:
                self.lock.notify()  # another worker may be free, and sleep for what this one has taken
            self.metrics.queued.set(self.count)
            return found

    # ---- calls

    def _work(self) -> None:
        while jobs := self._take():
            now = time.monotonic()
            late = [job for job in jobs if now - job.arrived > self.patience]
            for job in late:
                job.done(RequestError(503, "the request waited too long for its turn",
                                      why=f"{now - job.arrived:.1f} s in the queue, {self.patience:g} are allowed",
                                      do="send it again later, or to another server"))
            jobs = [job for job in jobs if job not in late]
            for job in jobs:
                self.metrics.waited.labels(job.model.name).observe(now - job.arrived)
            if jobs:
                self._run(jobs)
            for job in (*jobs, *late):
                job.arrays = ()  # the queue may still have the job behind older ones
            del jobs, late, job

    def _run(self, jobs: list[Job]) -> None:
        """One call for all, or, where that fails, one for each."""
        model = jobs[0].model
        try:
            if jobs[0].key is None or model.batch is None:
                outcomes: list[Outcome] = [self._call(model, jobs[0].arrays)]
            else:
                results = self._call(model, model.batch.joined([job.arrays for job in jobs]))
                outcomes = list(model.batch.split(results, [job.rows for job in jobs]))
        except Exception as error:  # whatever it is, the client is told, and the worker goes on
            if len(jobs) > 1:
                for job in jobs:
                    self._run([job])
                return
            outcomes = [error]
        self.metrics.calls.labels(model.name).observe(len(jobs))
        for job, outcome in zip(jobs, outcomes, strict=True):
            job.done(outcome)

    def _call(self, model: Servable, arrays: Sequence[Array]) -> list[Array]:
        """A call within the limit in bytes."""
        bytes_ = model.bytes_of(arrays)
        if bytes_ > self.memory.limit:
            raise LimitError(f"{model.name} does not fit these sizes into the server's limit",
                             why=f"the call takes {bytes_} bytes, {self.memory.limit} are allowed",
                             do="send smaller inputs, or start the server with a larger --limit", least=bytes_)
        self.memory.take(bytes_)
        begin = time.monotonic()
        try:
            return model.run(arrays)
        finally:
            self.metrics.computed.labels(model.name).observe(time.monotonic() - begin)
            self.memory.give(bytes_)


def status_of(error: Exception) -> int:
    """The status of HTTP for what went wrong in a call."""
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, LimitError):
        return 413
    if isinstance(error, MemoryError):
        return 503
    return 400 if isinstance(error, AnyShapeError) and not isinstance(error, VerifyError) else 500
