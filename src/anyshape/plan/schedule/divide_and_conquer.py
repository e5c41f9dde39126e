"""Divide and conquer over the order of a whole train step: the problem is cut where the order inside the parts does not
matter to the others.

    1  steps that only free memory come as soon as they can, those that only take it as late as they can
    2  cuts: steps that every other one comes before or behind, but for branches that end soon (updates) or begin there
    3  each part between two cuts is searched alone (plan/schedule/beam_search.py); equal parts (repeated layers) once
    4  so are windows about the fullest step, as long as that helps

What is alive across a cut is the same whatever the order within the parts, so parts cannot harm each other. (Shu et
al., ROAM, 2023: memory-insensitive operators, and update branches taken off first.)
"""
from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from anyshape.plan.schedule.beam_search import Problem, search

BRANCH = 32  # steps at most in a branch that does not keep its root from being a cut
CAPS = 5  # how many bytes a step that comes early may need are tried
NEAR = 24  # steps to either side of a cut that have to be before or behind it
LEAST_PART, MOST_PART = 16, 160  # steps in a part
WINDOWS, MOST_WINDOWS = (24, 60, 150), 40  # steps to either side of the fullest one; windows that are searched
LOOKS_EACH = 1500  # steps that a search may look at, for each of its part's
WHOLE, WHOLE_LOOKS = 300, 60000  # steps of a problem that is also searched uncut, and what that may look at
Key = tuple[object, ...]


@dataclass(slots=True)
class Cuts:
    """What an order was made of: the parts, how many of them were different, how many searches there were, and how many
    steps these may still look at. trail: (seconds of processor time, peak) of each better order in turn."""

    order: list[int]
    parts: int = 0
    different: int = 0
    searched: int = 0
    looks: int = sys.maxsize
    begun: float = field(default_factory=time.process_time)
    trail: list[tuple[float, int]] = field(default_factory=list)

    def note(self, peak: int) -> None:
        """There is an order with this peak now."""
        if not self.trail or peak < self.trail[-1][1]:
            self.trail.append((time.process_time() - self.begun, peak))

    def search(self, problem: Problem, most: int, looks: int) -> list[int] | None:
        """As plan/schedule/beam_search.py, within what may still be looked at."""
        if self.looks <= 0:
            return None
        self.searched += 1
        found = search(problem, most, problem.looks + min(looks, self.looks))
        self.looks -= problem.looks
        return found


def order_by_parts(problem: Problem, looks: int = sys.maxsize) -> Cuts:
    """The best order found: the one of the program, or another with a lower peak. `looks`: steps that all searches may
    look at."""
    program = list(range(len(problem.before)))
    found = Cuts(program, looks=looks)
    least = problem.least(program)
    peak = problem.peak(program)
    room = peak - least
    found.note(peak)
    for is_late in (False, True):
        order = late(problem, program, least) if is_late else program
        for part in range(CAPS + 1):
            other = early(problem, order, least + room * part // CAPS)
            if problem.peak(other) < peak:
                found.order, peak = other, problem.peak(other)
                found.note(peak)
    if peak > least:
        _parted(problem, found, least)
        _windowed(problem, found, least)
    if len(program) <= WHOLE and problem.peak(found.order) > least:
        problem.looks = 0
        found.order = found.search(problem, problem.peak(found.order) - 1, WHOLE_LOOKS) or found.order
        found.note(problem.peak(found.order))
    return found


def early(problem: Problem, order: Sequence[int], cap: int) -> list[int]:
    """`order`, with every step that leaves no more alive than there was as soon as it can be, where no more than `cap`,
    or what the peak is by then, is alive while it runs."""
    place = {step: k for k, step in enumerate(order)}
    found: list[int] = []
    done, now = 0, problem.start()
    peak = max(sum(now), cap)
    for step in order:
        if done >> step & 1:
            continue
        stack = [step]
        forced = True
        while stack:
            one = stack.pop()
            if done >> one & 1 or problem.before[one] & ~done:
                continue
            during, after = problem.step(one, done, now)
            if not forced and (sum(after) > sum(now) or sum(during) > peak):
                continue
            forced = False
            found.append(one)
            done |= 1 << one
            now, peak = after, max(peak, sum(during))
            opened = set(problem.after[one]) | {user for value in problem.touches[one]
                                                for user in bits(problem.users[value] & ~done)}
            stack += sorted(opened, key=lambda other: -place[other])
    return found


def late(problem: Problem, order: Sequence[int], cap: int) -> list[int]:
    """`order`, with every step that frees nothing as late as it can be: `early`, seen from the end."""
    return early(reversed_problem(problem), order[::-1], cap)[::-1]


def reversed_problem(problem: Problem) -> Problem:
    """The problem whose orders are those of `problem`, back to front, with the same bytes alive."""
    return Problem([sum(1 << other for other in after) for after in problem.after],
                   [list(bits(before)) for before in problem.before], problem.touches, problem.users, problem.sizes,
                   problem.kinds, problem.late, problem.early, [[(b, a) for a, b in over] for over in problem.over],
                   problem.floor, problem.rows)


def bits(number: int) -> list[int]:
    """The members of a set that is a whole number, a bit each."""
    found = []
    while number:
        low = number & -number
        found.append(low.bit_length() - 1)
        number ^= low
    return found


def cuts(problem: Problem, order: Sequence[int]) -> list[int]:
    """Positions in `order` behind which it may be cut: each step there is before or behind every one near it, but for
    small branches. What is far away, such as what computes a value of this layer again, has its place there."""
    count = len(order)
    behind = [0] * count
    ahead = [0] * count
    for step in range(count):
        for other in bits(problem.before[step]):
            behind[step] |= behind[other] | 1 << other
    for step in reversed(range(count)):
        for other in problem.after[step]:
            ahead[step] |= ahead[other] | 1 << other
    trunk = {step for step in range(count) if min(behind[step].bit_count(), ahead[step].bit_count()) > BRANCH}
    found = []
    for k, step in enumerate(order):
        if step in trunk:
            near = sum(1 << other for other in order[max(k - NEAR, 0):k + NEAR + 1] if other in trunk)
            if not near & ~(behind[step] | ahead[step] | 1 << step):
                found.append(k)
    return found


def _parted(problem: Problem, found: Cuts, least: int) -> None:
    """Puts each part into a better order, if there is one. Parts where no more than `least` is alive stay."""
    order, found.order = found.order, []
    known: dict[Key, list[int] | None] = {}
    curve = problem.curve(order)
    start = 0
    seen = 0
    for stop in (*_borders(cuts(problem, order), len(order)), len(order)):
        part = order[start:stop]
        if not part:
            continue
        small = part_of(problem, part, seen)
        key = _key(small)
        found.parts += 1
        if key not in known:
            known[key] = None
            found.different += 1
        fullest = max(sum(one) for one in curve[start:stop])
        if known[key] is None and fullest > least:
            best = found.search(small, small.peak(range(len(part))) - 1, LOOKS_EACH * len(part))
            known[key] = list(range(len(part))) if best is None else best
        found.order += [part[k] for k in known[key] or range(len(part))]
        seen |= sum(1 << step for step in part)
        start = stop


def _windowed(problem: Problem, found: Cuts, least: int) -> None:
    """Puts windows about the fullest step into a better order, again and again."""
    for _ in range(MOST_WINDOWS):
        order = found.order
        curve = [sum(one) for one in problem.curve(order)]
        peak = max(curve)
        found.note(problem.peak(order))
        place = curve.index(peak)
        for reach in WINDOWS:
            start = max(place - reach, 0)
            part = order[start:place + reach]
            if peak <= least or found.looks <= 0:
                return
            small = part_of(problem, part, sum(1 << step for step in order[:start]))
            best = found.search(small, small.peak(range(len(part))) - 1, LOOKS_EACH * len(part) // 2)
            if best is not None:
                found.order = [*order[:start], *(part[k] for k in best), *order[start + len(part):]]
                break
        else:
            return


def _borders(places: Sequence[int], count: int) -> list[int]:
    """Where parts end: at cuts, so that none is very small, and elsewhere only where a part would be too large."""
    found: list[int] = []
    start = 0
    for place in (*places, count - 1):
        while place + 1 - start > MOST_PART:
            start += MOST_PART
            found.append(start)
        if place + 1 - start >= LEAST_PART:
            start = place + 1
            found.append(start)
    return found


def part_of(problem: Problem, part: Sequence[int], seen: int) -> Problem:
    """The problem of ordering the steps `part`, which follow those `seen`: what others need stays."""
    place = {step: k for k, step in enumerate(part)}
    inside = sum(1 << step for step in part)
    number: dict[int, int] = {}
    touches = [[number.setdefault(value, len(number)) for value in problem.touches[step]] for step in part]
    early_, late_ = set(), set()
    users = [0] * len(number)
    for value, k in number.items():
        users[k] = sum(1 << place[step] for step in bits(problem.users[value] & inside))
        if value in problem.early or problem.users[value] & seen:
            early_.add(k)
        if value in problem.late or problem.users[value] & ~(seen | inside):
            late_.add(k)
    before = [sum(1 << place[other] for other in bits(problem.before[step] & inside)) for step in part]
    after = [[place[other] for other in problem.after[step] if inside >> other & 1] for step in part]
    over = [[(number[a], number[b]) for a, b in problem.over[step]] for step in part]
    return Problem(before, after, touches, users, [problem.sizes[value] for value in number],
                   [problem.kinds[value] for value in number], early_, late_, over, 0,
                   [problem.rows[step] for step in part])


def _key(problem: Problem) -> Key:
    """What makes two parts the same problem."""
    return (tuple(problem.before), tuple(map(tuple, problem.touches)), tuple(problem.sizes), tuple(problem.kinds),
            tuple(sorted(problem.early)), tuple(sorted(problem.late)), tuple(map(tuple, problem.over)))
