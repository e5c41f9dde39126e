"""Discrete-event simulation of a step: tasks on streams of ranks, over links that collectives share.

    stream (0, "compute")   [f0][f1][b1][b0]           each stream runs its tasks in order, one at a time, each when
    stream (0, "data")      [gather1]   [reduce1]      those that it waits for have ended

Collectives that run over one link of a rank at the same time share it evenly, and a computation runs slower beside one.
Memory is counted where tasks begin and end. Ranks that do the same need to be simulated once.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from anyshape.base.errors import VerifyError

Stream = tuple[int, str]  # a rank, and the name of a stream
NOTHING = 1e-15


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work. seconds: alone. after: numbers of tasks that must have ended. link: what it sends over; "": it
    computes. takes, gives: bytes of the rank's memory when it begins and when it ends. layer: what it is part of."""

    name: str
    stream: Stream
    seconds: float
    after: tuple[int, ...] = ()
    link: str = ""
    takes: float = 0.0
    gives: float = 0.0
    layer: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """What came out. begins, ends: seconds, per task. peaks: bytes, per rank, over what was there before."""

    tasks: tuple[Task, ...]
    begins: tuple[float, ...]
    ends: tuple[float, ...]
    peaks: dict[int, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """When the last task has ended."""
        return max(self.ends, default=0.0)

    def busy(self, rank: int = 0, stream: str = "compute") -> float:
        """Seconds in which a stream of a rank runs something."""
        return sum(end - begin for task, begin, end in zip(self.tasks, self.begins, self.ends, strict=True)
                   if task.stream == (rank, stream))

    def exposed(self, rank: int = 0) -> float:
        """Seconds in which a rank sends or receives and computes nothing."""
        computing = self.spans(rank, False)
        return _length(self.spans(rank, True)) - _length(_both(self.spans(rank, True), computing))

    def sending(self, rank: int = 0) -> float:
        """Seconds in which a rank sends or receives."""
        return _length(self.spans(rank, True))

    def spans(self, rank: int, links: bool) -> list[tuple[float, float]]:
        """When a rank communicates (or computes), as intervals that do not touch."""
        found = sorted((begin, end) for task, begin, end in zip(self.tasks, self.begins, self.ends, strict=True)
                       if task.stream[0] == rank and bool(task.link) is links and end > begin)
        merged: list[tuple[float, float]] = []
        for begin, end in found:
            if merged and begin <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((begin, end))
        return merged


def _length(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)


def _both(one: Sequence[tuple[float, float]], two: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Where intervals of both lists are."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(two):
        begin, end = max(one[i][0], two[j][0]), min(one[i][1], two[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < two[j][1]:
            i += 1
        else:
            j += 1
    return found


class _Run:
    """The state of a simulation."""

    def __init__(self, tasks: Sequence[Task], busy: float) -> None:
        self.tasks, self.slower = tasks, 1.0 / (1.0 + busy)
        self.queues: dict[Stream, deque[int]] = {}
        self.waits = [len(set(task.after)) for task in tasks]
        self.users: list[list[int]] = [[] for _ in tasks]
        for number, task in enumerate(tasks):
            self.queues.setdefault(task.stream, deque()).append(number)
            for other in set(task.after):
                self.users[other].append(number)
        self.left: dict[int, float] = {}
        self.begins, self.ends = [0.0] * len(tasks), [0.0] * len(tasks)
        self.held: dict[int, float] = {}
        self.peaks: dict[int, float] = {}
        self.now = 0.0

    def start(self, stream: Stream) -> None:
        """Begins the first task of a stream, if nothing runs there and it waits for nothing."""
        queue = self.queues[stream]
        if not queue or queue[0] in self.left or self.waits[queue[0]]:
            return
        task = self.tasks[queue[0]]
        self.left[queue[0]] = task.seconds
        self.begins[queue[0]] = self.now
        self._hold(task.stream[0], task.takes)

    def _hold(self, rank: int, change: float) -> None:
        self.held[rank] = self.held.get(rank, 0.0) + change
        self.peaks[rank] = max(self.peaks.get(rank, 0.0), self.held[rank])

    def rates(self) -> dict[int, float]:
        """How fast each running task is."""
        shared: dict[tuple[int, str], int] = {}
        sending = set()
        for number in self.left:
            task = self.tasks[number]
            if task.link:
                key = task.stream[0], task.link
                shared[key] = shared.get(key, 0) + 1
                sending.add(task.stream[0])
        return {number: 1.0 / shared[task.stream[0], task.link] if (task := self.tasks[number]).link else
                self.slower if task.stream[0] in sending else 1.0 for number in self.left}

    def advance(self) -> None:
        """To the next end of a task."""
        rates = self.rates()
        step = min(self.left[number] / rate for number, rate in rates.items())
        self.now += step
        done = [number for number, rate in rates.items() if self.left[number] <= step * rate + NOTHING]
        for number, rate in rates.items():
            self.left[number] -= step * rate
        for number in done:
            task = self.tasks[number]
            del self.left[number]
            self.ends[number] = self.now
            self.queues[task.stream].popleft()
            self._hold(task.stream[0], -task.gives)
        for number in done:
            self.start(self.tasks[number].stream)
            for user in self.users[number]:
                self.waits[user] -= 1
                self.start(self.tasks[user].stream)


def simulate(tasks: Sequence[Task], busy: float = 0.0) -> Timeline:
    """Runs tasks. busy: how much slower a computation is beside a collective of its rank.

    Raises:
        VerifyError: tasks wait for each other.
    """
    run = _Run(tasks, busy)
    for stream in run.queues:
        run.start(stream)
    while run.left:
        run.advance()
    stuck = [task.name for number, task in enumerate(tasks) if run.waits[number]]
    stuck += [tasks[queue[0]].name for queue in run.queues.values() if queue]
    if stuck:
        raise VerifyError(f"tasks wait for each other: {', '.join(stuck[:4])}", why="in the order of their streams "
                          "they can never begin", do="report it: a bug of the schedule")
    return Timeline(tuple(tasks), tuple(run.begins), tuple(run.ends), run.peaks)
