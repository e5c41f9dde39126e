"""Beam search for memory-aware orders of units of work: lower bounds, and a search over sets of units that are done.

A *unit* is one step or several that stay together. Values lie in the arena (kind 0) or beside it (kind 1: results,
tensors of PyTorch). The arena is held through a call, so what counts is the peak of the one plus the peak of the other.

    state: set of done units -> bytes now, peaks so far, ready units       units run at once where that is safe:
                                                                           memory does not grow, and no peak rises

Sets are whole numbers, a bit per unit. What is alive follows from the set, so of two ways to a set the one with the
lower peak is enough (Kahn et al., SERENITY, 2020); with states without end the search would be exact.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MOST_READY = 48  # ready units that are looked at in a state, in the order of the program
MOST_TRIED = 10  # of those, the ones that are followed
WIDEST = 64
NARROW = 4
Bytes = tuple[int, int]  # in the arena, beside it


@dataclass(slots=True)
class Problem:
    """before: unit -> the set of units that must be done first; after: units that wait for it. touches: unit -> values;
    users: value -> set of units. sizes, kinds: of values. early: values alive from the start; late: to the end. over:
    unit -> (value read, value made) that can be one. floor: bytes of the arena that are always held. rows: units that
    the host runs in a row with neighbours of their kind."""

    before: list[int]
    after: list[list[int]]
    touches: list[list[int]]
    users: list[int]
    sizes: list[int]
    kinds: list[int]
    early: set[int]
    late: set[int]
    over: list[list[tuple[int, int]]]
    floor: int
    rows: list[bool]
    looks: int = field(default=0)  # units looked at so far: what the search has cost

    def step(self, unit: int, done: int, now: Bytes) -> tuple[Bytes, Bytes]:
        """Bytes alive while `unit` runs after those `done`, and after it."""
        self.looks += 1
        bit = 1 << unit
        during, freed = list(now), [0, 0]
        born: list[int] = []
        dying: list[int] = []
        for value in self.touches[unit]:
            users = self.users[value]
            if not users & done and value not in self.early:
                during[self.kinds[value]] += self.sizes[value]
                born.append(value)
            if not users & ~(done | bit) and value not in self.late:
                freed[self.kinds[value]] += self.sizes[value]
                dying.append(value)
        left = during[0] - freed[0], during[1] - freed[1]
        taken: set[int] = set()
        for source, made in self.over[unit]:
            if source in dying and made in born and source not in taken and made not in taken:
                during[self.kinds[source]] -= self.sizes[source]
                taken |= {source, made}
        return (during[0], during[1]), left

    def start(self) -> Bytes:
        """Bytes alive before the first unit."""
        held = [0, 0]
        for value in self.early:
            if self.users[value] or value in self.late:
                held[self.kinds[value]] += self.sizes[value]
        return held[0], held[1]

    def curve(self, order: Sequence[int]) -> list[Bytes]:
        """Bytes alive while each unit of `order` runs."""
        now, done, found = self.start(), 0, []
        for unit in order:
            during, now = self.step(unit, done, now)
            done |= 1 << unit
            found.append(during)
        return found

    def peak(self, order: Sequence[int]) -> int:
        """The peak in the arena and the one beside it, added."""
        start = self.start()
        points = [start, *self.curve(order)]
        return max(self.floor, *(a for a, _ in points)) + max(x for _, x in points)

    def least(self, order: Sequence[int], most: int = 6) -> int:
        """Bytes that no order needs less than, as far as the fullest units of `order` show: while a unit runs, all is
        alive that it or a unit before it made and that it or a unit after it needs."""
        curve = self.curve(order)
        start = self.start()
        found = [max(self.floor, start[0]), start[1]]
        everything = (1 << len(self.before)) - 1
        for kind in (0, 1):
            for place in sorted(range(len(order)), key=lambda i: -curve[i][kind])[:most]:
                unit = order[place]
                earlier, later = self.behind(unit), self.ahead(unit)
                bit = 1 << unit
                need = 0
                over = {made for source, made in self.over[unit] if not self.users[source] & later}
                for value, users in enumerate(self.users):
                    if self.kinds[value] != kind:
                        continue
                    begun = value in self.early or users & (earlier | bit)
                    wanted = users & (later | bit) or (value in self.late and (users or value in self.early))
                    if begun and wanted and value not in over:
                        need += self.sizes[value]
                found[kind] = max(found[kind], need)
            ends = sum(self.sizes[v] for v in self.late if self.kinds[v] == kind and (
                self.users[v] & everything or v in self.early))
            found[kind] = max(found[kind], ends)
        return found[0] + found[1]

    def behind(self, unit: int) -> int:
        """The set of units that must be done before it."""
        found, waiting = 0, self.before[unit]
        while waiting:
            low = waiting & -waiting
            waiting ^= low
            found |= low
            waiting |= self.before[low.bit_length() - 1] & ~found
        return found

    def ahead(self, unit: int) -> int:
        """The set of units that can only be done after it."""
        found, waiting = 0, list(self.after[unit])
        while waiting:
            one = waiting.pop()
            if not found >> one & 1:
                found |= 1 << one
                waiting += self.after[one]
        return found


@dataclass(slots=True)
class _State:
    done: int
    count: int
    now: Bytes
    peak: Bytes
    ready: tuple[int, ...]
    breaks: int  # rows begun, and units that an earlier ready one had to wait for
    last: int
    trail: tuple[int, object] | None

    @property
    def total(self) -> int:
        return self.peak[0] + self.peak[1]


# (peak, bytes alive, breaks) -> what is compared, least first
Key = Callable[[int, int, int], tuple[int, ...]]


def _lowest_peak(peak: int, alive: int, breaks: int) -> tuple[int, ...]:
    return peak, alive, breaks


def _least_alive(peak: int, alive: int, breaks: int) -> tuple[int, ...]:
    return alive, peak, breaks


def _as_it_was(peak: int, alive: int, breaks: int) -> tuple[int, ...]:
    return breaks, peak, alive


def search(problem: Problem, worth: int, budget: int) -> list[int] | None:
    """The best order found with a peak of at most `worth`, near to the program's; None: none found. `budget`: units
    that may be looked at; the search has the same result wherever it runs."""
    best: list[int] | None = None
    limit = worth + 1
    keys: tuple[Key, ...] = (_lowest_peak, _least_alive)
    width = 1  # a beam of one state is list scheduling
    while width <= WIDEST:
        for key in keys:
            found = _beam(problem, width, key, limit, budget)
            if found is not None:
                best, limit = found, problem.peak(found)
        width *= 4
    if best is not None:
        # as low, and with as few changes as can be
        calm = _beam(problem, NARROW, _as_it_was, limit + 1, problem.looks + budget, hurried=False)
        best = best if calm is None else calm
    return best


def _beam(problem: Problem, width: int, key: Key, limit: int, budget: int, hurried: bool = True) -> list[int] | None:
    """An order with a peak below `limit`, the lowest that comes of the `width` first states by `key` of each size; None
    if there is none, or where more than `budget` units would have been looked at by then. hurried: units run at once
    where it is safe, else in the order of the program where `key` has it so."""
    count = len(problem.before)
    start = problem.start()
    ready = tuple(unit for unit in range(count) if not problem.before[unit])
    first = _State(0, 0, start, (max(start[0], problem.floor), start[1]), ready, 0, -1, None)
    levels: list[dict[int, _State]] = [{} for _ in range(count + 1)]
    first = _close(problem, first) if hurried else first
    levels[first.count][first.done] = first
    for size in range(count):
        states = sorted(levels[size].values(), key=lambda one: key(one.total, sum(one.now), one.breaks))[:width]
        levels[size] = {}
        if problem.looks > budget:
            return None
        for state in states:
            tried = []
            for place, unit in enumerate(state.ready[:MOST_READY]):
                during, after = problem.step(unit, state.done, state.now)
                peak = max(state.peak[0], during[0]), max(state.peak[1], during[1])
                if peak[0] + peak[1] < limit:
                    tried.append((key(peak[0] + peak[1], sum(after), place > 0), place, unit, peak, after))
            tried.sort()
            for _, place, unit, peak, after in tried[:MOST_TRIED if width > 1 else 1]:
                new = _ran(problem, state, place, unit, peak, after)
                new = _close(problem, new) if hurried else new
                old = levels[new.count].get(new.done)
                if old is None or (new.total, new.breaks) < (old.total, old.breaks):
                    levels[new.count][new.done] = new
    final = levels[count].get((1 << count) - 1)
    return None if final is None or final.total >= limit else _order(final)


def _close(problem: Problem, state: _State) -> _State:
    """The state after all units that can be run without loss: memory does not grow, and no peak rises."""
    going = True
    while going:
        going = False
        for place, unit in enumerate(state.ready[:MOST_READY]):
            during, after = problem.step(unit, state.done, state.now)
            if (after[0] <= state.now[0] and after[1] <= state.now[1]
                    and during[0] <= state.peak[0] and during[1] <= state.peak[1]):
                state = _ran(problem, state, place, unit, state.peak, after)
                going = True
                break
    return state


def _ran(problem: Problem, state: _State, place: int, unit: int, peak: Bytes, after: Bytes) -> _State:
    done = state.done | 1 << unit
    opened = [one for one in problem.after[unit] if not problem.before[one] & ~done]
    rest = state.ready[:place] + state.ready[place + 1:]
    row = problem.rows[unit] and not (state.last >= 0 and problem.rows[state.last])
    return _State(done, state.count + 1, after, peak, tuple(sorted((*rest, *opened))) if opened else rest,
                  state.breaks + row + (place > 0), unit, (unit, state.trail))


def _order(state: _State) -> list[int]:
    found = []
    trail = state.trail
    while trail is not None:
        unit, trail = trail  # type: ignore[assignment]
        found.append(unit)
    return found[::-1]
