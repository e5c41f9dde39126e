"""Saved-tensor policies (save, recompute, offload) and the memory layouts that follow from them.

    kept block, whole         a  b  c  d
    b, d dropped, in chunks   a | c            the backward gives back the chunk of c, then that of a

Saved buffers that are dropped lie in the forward's upper block as long as it needs them, and in the backward's from the
step on that computes them again. Those that are moved out lie there until they are copied, and from the step on that
begins to bring them back.

The top of a backward's upper block is one piece of memory after another where that makes the fullest step less full:

    bytes     _____
             |     |_____gradients__________       the loss and its gradient, as wide as a vocabulary
             |_____|__________________|    |       then layer after layer, then what is large on its own
             |_____________________________|       what is alive at a border, and what has room beside it
"""
from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from anyshape.backend.interface import HostRoutines
from anyshape.base.align import align
from anyshape.ir.types import size_of
from anyshape.plan.ir.home import External, Recomputed
from anyshape.plan.ir.liveness import KeptRegion, LiveRanges, first_writes, saved_external, tape_entry
from anyshape.plan.ir.program import ExternStep, MemoryStep, Plan, step_writes, touched
from anyshape.plan.ir.size_function import SizeFunction
from anyshape.plan.memory.offset_problem import OffsetProblem
from anyshape.runtime.memory.offset_assignment import ArenaLayout, assign_offsets
from anyshape.runtime.memory.pools import PAGE
from anyshape.runtime.memory.size_vectors import SizeTable
from anyshape.sym.expr import Size, evaluate
from anyshape.sym.python_codegen import SizesFunction


@dataclass(frozen=True, slots=True)
class OffloadMove:
    """A saved buffer that is moved out to a store. `gone`: the forward's last step during which it is still in memory;
    `back`: the backward's first step during which it is there again."""

    saved: str
    gone: int
    back: int


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """What a call keeps for its backward. dropped: saved buffers of the forward that are not kept, for the backward
    computes them again. moved: those that are moved out meanwhile (runtime/specialize/offload_schedule.py). apart: the
    kept block is in chunks, which the backward gives back one after another."""

    dropped: frozenset[str] = frozenset()
    apart: bool = False
    moved: tuple[OffloadMove, ...] = ()

    @property
    def away(self) -> frozenset[str]:
        """What is not in the kept block."""
        return self.dropped.union(move.saved for move in self.moved)


SAVE_ALL = SavePolicy()
WORTH = 0.99  # of the fullest step, what it has to come to for one more phase
PHASES = 4  # of an upper block, at most
REMEMBERED = 64  # sets of dropped values of which it is known what computes them again


def _best_turn(rest: np.ndarray, live: np.ndarray, across: np.ndarray, turns: np.ndarray, first: int, end: int) -> int:
    """The step of `turns` that best divides a phase in two; 0: none is worth it. rest, live: bytes at each step outside
    the upper block and in it; across: of what is alive at both sides."""
    inner = turns[(turns > first) & (turns < end)]
    if not len(inner):
        return 0
    before = np.maximum.accumulate(rest[first:end]) + np.maximum.accumulate(live[first:end])
    after = (np.maximum.accumulate(rest[first:end][::-1]) + np.maximum.accumulate(live[first:end][::-1]))[::-1]
    peaks = np.maximum(before[inner - first - 1], after[inner - first])
    turn = int(inner[(peaks + across[inner]).argmin()])
    most = rest[first:end].max() + live[first:end].max()
    return turn if max(before[turn - first - 1], after[turn - first]) < WORTH * most else 0


@dataclass(frozen=True, slots=True)
class _Again:
    """What computes one dropped value: the optional steps, and what they touch; the same as bits, of the steps, and of
    the places in the arena that they touch; and the bit of the value among the saved buffers."""

    runs: frozenset[int]
    used: frozenset[str]
    steps: int
    places: int
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class _Numbers:
    """Of a `SavePolicy`, positions in order: of the saved buffers that are not in the kept block, of the optional steps
    that compute what is dropped, and of what has a place in the arena then."""

    away: np.ndarray
    steps: np.ndarray
    places: np.ndarray


def _positions(bits: int) -> np.ndarray:
    """The positions of the bits that are set, in order."""
    if not bits:
        return np.zeros(0, np.int64)
    data = bits.to_bytes(-(-bits.bit_length() // 8), "little")
    return np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little"))


def _made_again(plan: Plan) -> frozenset[str]:
    """What only optional steps make: in the arena, or by PyTorch."""
    buffers = {b.name: b for b in plan.buffers}
    return frozenset(window.buffer for number in plan.optional for window in step_writes(plan.steps[number])
                     if isinstance(buffers[window.buffer].home, (Recomputed, External)))


def _begins(plan: Plan) -> dict[str, int]:
    """Of a backward: by value that lies outside the arena, the first optional step that makes it again."""
    buffers = {b.name: b for b in plan.buffers}
    return {one.saved: min(number for number in plan.optional
                           if one.buffer in {window.buffer for window in step_writes(plan.steps[number])})
            for one in plan.again if buffers[one.buffer].is_restored}


def _externs(plan: Plan, made: frozenset[str]) -> list[tuple[int, str, Size]]:
    """By optional step, what PyTorch makes that does not only serve others, and its bytes."""
    sizes = {b.name: b.bytes for b in plan.buffers}
    return [(number, window.buffer, sizes[window.buffer]) for number in sorted(plan.optional)
            for step in (plan.steps[number],) if isinstance(step, ExternStep)
            for window in step.outputs if window is not None and window.buffer not in made]


def _repeats(plan: Plan) -> list[tuple[int, frozenset[str] | None, frozenset[str]]]:
    """The optional steps from the last on, with what they write and touch; none: a memory step."""
    return [(number, None if isinstance(step, MemoryStep) else frozenset(w.buffer for w in step_writes(step)),
             frozenset(w.buffer for w in touched(step)))
            for number in sorted(plan.optional, reverse=True) for step in (plan.steps[number],)]


class SavedLayout:
    """The layouts of one plan, a forward's or a backward's, under any `SavePolicy`.

    Args:
        lives: first and last step of each buffer that has a place; moving, saved: which of them are free to move, and
            which are saved.
        regions: of a backward, the forward's saved buffers.
        chunks: of a forward, those of its backward's plan.

    outside: of a forward, what its tape keeps outside the arena. begins: of a backward, which step makes that again.
    """

    def __init__(self, plan: Plan, forward: Plan | None, layout: SizeFunction, host: HostRoutines,
                 lives: Sequence[tuple[int, int]], moving: Sequence[int], saved: Sequence[int],
                 regions: Sequence[KeptRegion], chunks: Sequence[tuple[str, ...]] = ()) -> None:
        self.plan = plan
        self.forward = forward
        self.layout = layout
        self.host = host
        self.lives = lives
        self.moving = moving
        self.saved = saved
        self.regions = regions
        # their bytes and offsets, in turn
        self.region_sizes = SizesFunction([size for region in regions for size in (region.bytes, region.offset)],
                                        f"saved by the forward of {plan.name}")
        self.region_bytes = SizeTable([region.bytes for region in regions],
                                      f"bytes saved by the forward of {plan.name}")
        self.region_lasts = np.array([region.last for region in regions], np.int64)
        by_name = {b.name: b for b in plan.buffers}
        self.homes = homes = {name: by_name[name] for name in layout.placed}
        self.kept_buffers = [b for b in (forward or plan).buffers if b.is_saved]
        self.chunks = chunks or plan.chunks
        self.optional = frozenset(plan.optional)
        self.made = _made_again(plan)
        self.outside = saved_external(plan)
        self.begins = _begins(plan)
        self.shown = self._shown()
        self.life_table = np.array(lives, np.int64).reshape(-1, 2)
        self.places_of = {name: i for i, name in enumerate(layout.placed)}
        self.numbers = {b.name: i for i, b in enumerate(self.kept_buffers)}
        # what lies in the arena where optional steps touch it: all that is recomputed, and of the bases what is dropped
        self.brought = {b.name: (i, "" if b.is_recomputed else self.shown.get(i, ("-", 0))[0])
                        for i, b in enumerate(homes.values()) if b.is_optional}
        # by place, which of the saved buffers it shows; -1: none, -2: one that is not dropped
        self.brought_of = np.full(len(lives), -1, np.int64)
        for i, shown in self.brought.values():
            if shown:
                self.brought_of[i] = self.numbers.get(shown, -2)
        # where Python has something to do anyway: there a phase of the upper block may end
        self.turns = [k for k, step in enumerate(plan.steps) if k > 0 and isinstance(step, MemoryStep)]
        self.others: tuple[SizeTable, LiveRanges] | None = None
        # by saved buffer the chunk that it lies in, one more for those in none, and how many chunks there are
        self.chunk_of: tuple[Sequence[Sequence[str]], np.ndarray, int] | None = None
        self.reads = self._reads()
        self.repeats = _repeats(plan)
        self.externs = _externs(plan, self.made)
        self.known: dict[tuple[frozenset[str], bool], tuple[frozenset[int], frozenset[str]]] = {}
        self.single: dict[str, _Again] = {}  # by value that is dropped
        self.latest: tuple[SavePolicy, _Numbers] | None = None
        self.freeing = frozenset(number for number, writes, _ in self.repeats if writes is None)
        last = {window.buffer: number for number, step in enumerate(plan.steps) for window in touched(step)}
        self.ends = {b.name: last.get(b.name, 0)
                     for b in (*(b for b in plan.buffers if b.is_saved), *self.outside)}
        # of a forward, by saved buffer: where it is among what has a place, and the last step that touches it
        own = [] if forward is not None else self.kept_buffers
        self.saved_places = np.array([self.places_of[b.name] for b in own], np.int64)
        self.saved_ends = np.array([self.ends[b.name] for b in own], np.int64)

    def _shown(self) -> dict[int, tuple[str, Size]]:
        """Where saved buffers, and what shows them in a backward, lie: index -> (the forward's buffer, first byte
        there)."""
        shown: dict[int, tuple[str, Size]] = {i: (self.layout.placed[i], 0) for i in self.saved}
        for i, buffer in enumerate(self.homes.values()):
            entry = tape_entry(self.forward, buffer.index) if self.forward and buffer.has_tape_entry else None
            if entry is not None:
                home, window = entry
                before = window.offset * size_of(window.type.dtype) if buffer.is_restored else 0
                shown[i] = home.name, before
        return shown

    def _reads(self) -> dict[str, list[int]]:
        """The steps of a backward that touch each of the forward's saved buffers, in order."""
        names = list(self.homes)
        of = {names[i]: name for i, (name, _) in self.shown.items()}
        found: dict[str, list[int]] = {b.name: [] for b in self.kept_buffers}
        for number, step in enumerate(self.plan.steps):
            for name in {of[window.buffer] for window in touched(step) if window.buffer in of}:
                found[name].append(number)
        return found

    def runs(self, policy: SavePolicy) -> frozenset[int]:
        """The optional steps that compute what was dropped, from what was not, and that give chunks back."""
        return self._repeated(policy)[0]

    def used(self, policy: SavePolicy) -> frozenset[str]:
        """What the optional steps that run touch."""
        return self._repeated(policy)[1]

    def _repeated(self, policy: SavePolicy) -> tuple[frozenset[int], frozenset[str]]:
        """Both; those of the last ones are at hand. What several values take is what each of them takes."""
        key = policy.dropped, policy.apart
        known = self.known.get(key)
        if known is not None:
            return known
        every = [self._single(name) for name in policy.dropped]
        runs = frozenset[int]().union(self.freeing if policy.apart else (), *[one.runs for one in every])
        if len(self.known) >= REMEMBERED:
            self.known.clear()
        result = self.known[key] = runs, frozenset[str]().union(*[one.used for one in every])
        return result

    def _single(self, name: str) -> _Again:
        """What computes one value, if nothing else is dropped."""
        known = self.single.get(name)
        if known is not None:
            return known
        wanted = {one.buffer for one in self.plan.again if one.saved == name}
        found: list[int] = []
        used: set[str] = set()
        for number, writes, touches in self.repeats:
            if writes is not None and not writes.isdisjoint(wanted):
                found.append(number)
                used |= touches
                wanted |= touches & self.made
        result = self.single[name] = _Again(
            frozenset(found), frozenset(used), sum(1 << number for number in found),
            sum(1 << self.brought[other][0] for other in used if other in self.brought),
            1 << self.numbers[name] if name in self.numbers else 0)
        return result

    def numbers_of(self, policy: SavePolicy) -> _Numbers:
        """What is not in the kept block, and what computes it again. That of the last one is at hand."""
        known = self.latest
        if known is not None and known[0] is policy:
            return known[1]
        steps = places = away = 0
        for name in policy.dropped:
            one = self.single.get(name) or self._single(name)
            steps |= one.steps
            places |= one.places
            away |= one.number
        for move in policy.moved:
            away |= 1 << self.numbers[move.saved]
        gone = np.zeros(len(self.numbers) + 2, bool)
        gone[_positions(away)] = True
        for move in policy.moved:
            gone[self.numbers[move.saved]] = move.saved in policy.dropped
        gone[-1] = True
        found = _positions(places)
        result = _Numbers(_positions(away), _positions(steps), found[gone[self.brought_of[found]]])
        self.latest = policy, result
        return result

    def spilled(self, policy: SavePolicy) -> list[tuple[Size, int]]:
        """What PyTorch makes beside what is wanted of it, or to be copied into its place: (bytes, step)."""
        if not self.externs:
            return []
        runs = self.runs(policy)
        wanted = {one.buffer for one in self.plan.again if one.saved in policy.dropped and one.saved in self.begins}
        return [(size, number) for number, name, size in self.externs if number in runs and name not in wanted]

    def kept(self, sizes: Sequence[int], policy: SavePolicy) -> tuple[dict[str, int], list[int]]:
        """Where saved buffers lie in the kept block, and where its chunks begin and end. sizes: of the buffers in the
        forward's order, padded."""
        places: dict[str, int] = {}
        starts = [0]
        away = policy.away
        padded = dict(zip((b.name for b in self.kept_buffers), sizes, strict=True))
        for chunk in (self.chunks if policy.apart else ()) or [tuple(padded)]:
            border = starts[-1]
            for name in chunk:
                if name not in away:
                    places[name] = border
                    border += padded[name]
            starts.append(align(border, PAGE) if policy.apart else border)
        return places, starts

    def starts(self, sizes: np.ndarray, away: np.ndarray) -> list[int]:
        """Where chunks of the kept block begin, and its end, as `kept` has them, without the saved buffers `away`."""
        if self.chunk_of is None or self.chunk_of[0] is not self.chunks:
            chunks = self.chunks or [tuple(self.numbers)]
            found = np.full(len(self.numbers), len(chunks), np.int64)
            for chunk, names in enumerate(chunks):
                found[[self.numbers[name] for name in names]] = chunk
            self.chunk_of = self.chunks, found, len(chunks)
        _, chunk_of, count = self.chunk_of
        there = sizes.copy()
        there[away] = 0
        totals = np.zeros(count + 1, np.int64)
        np.add.at(totals, chunk_of, there)
        return [0, *np.cumsum(align(totals[:count], PAGE)).tolist()]

    def places(self, sizes: np.ndarray, values: Mapping[str, int], policy: SavePolicy) -> ArenaLayout:
        """The layout of a forward that does not keep everything, or not in one piece, or of its backward, but for the
        offsets (`complete`). sizes: of the buffers that have a place."""
        padded = align(sizes)
        lives = self.life_table.copy()
        numbers = self.numbers_of(policy)
        moving = [*self.moving]
        if self.forward is None:
            bytes_ = padded[self.saved]
            away = self.saved_places[numbers.away]
            lives[away, 1] = self.saved_ends[numbers.away]
            for one in policy.moved:
                lives[self.saved_places[self.numbers[one.saved]], 1] = one.gone
            moving += np.sort(away).tolist()
            firsts, lasts = lives[self.saved].T
        else:
            bytes_ = align(self.region_bytes(values))
            moving += numbers.places.tolist()
            firsts, lasts = np.zeros(len(bytes_), np.int64), self.region_lasts
        back = policy.moved if self.forward is not None else ()
        if policy.apart:  # nothing else lies in the chunks
            starts = self.starts(bytes_, numbers.away)
            fixed = np.array([[starts[-1], 0, len(self.plan.steps), 0]], np.int64)
        else:
            places, starts = self.kept(bytes_.tolist(), policy)
            at = [self.numbers[name] for name in places]
            fixed = np.stack([bytes_[at], firsts[at], lasts[at], np.array([*places.values()], np.int64)], axis=1)
        border = starts[-1]
        returned = [self.numbers[one.saved] for one in back]
        free = np.zeros((len(moving) + len(back), 4), np.int64)
        free[:len(moving), 0] = padded[moving]
        free[:len(moving), 1:3] = lives[moving]
        free[len(moving):, 0] = bytes_[returned]
        free[len(moving):, 1] = [one.back for one in back]
        free[len(moving):, 2] = lasts[returned]
        items = np.concatenate((fixed, free))
        problem = OffsetProblem(items, len(fixed), border)
        bound = problem.bound(len(self.plan.steps))
        top, placed = assign_offsets(self.host, problem, bound)
        layout = ArenaLayout([], border, max(top, border), bound, starts=starts if policy.apart else [], moving=moving,
                        placed=placed)
        if policy.apart and self.forward is not None:
            self._in_phases(layout, items, len(back), values)
        return layout

    def _in_phases(self, found: ArenaLayout, items: np.ndarray, back: int, values: Mapping[str, int]) -> None:
        """Puts a backward's upper block in phases where its fullest step is less full then. items: the chunks, then
        what moves, the last `back` of it brought back."""
        end = len(self.plan.steps)
        rest = self._rest(found.starts, values)
        size, first, last = items[1:, 0], items[1:, 1], items[1:, 2]
        live = found.border + LiveRanges(items[1:, 1:3], end).live_bytes(size)
        across = LiveRanges(np.stack((first + 1, last), axis=1), end).live_bytes(size)
        turns = np.array(self.turns, np.int64)
        least = WORTH * (int(rest.max()) + found.top)
        phases = [0, end + 1]
        while len(phases) <= PHASES:
            fullest = max(itertools.pairwise(phases), key=lambda one: rest[slice(*one)].max() + live[slice(*one)].max())
            turn = _best_turn(rest, live, across, turns, *fullest)
            if not turn:
                return
            phases = sorted([*phases, turn])
            middle, sizes, placed = self._laid_out(items, back, phases, found.border)
            most = middle + max(int(rest[a:b].max()) + size for (a, b), size in zip(
                itertools.pairwise(phases), sizes, strict=True))
            if most < least:
                least = WORTH * most
                found.phases, found.middle = tuple(zip(phases, sizes, strict=False)), middle
                found.top, found.placed = middle + sum(sizes), placed

    def _laid_out(self, items: np.ndarray, back: int, phases: Sequence[int],
                  border: int) -> tuple[int, list[int], list[int]]:
        """Where the pieces of some phases begin, their bytes, and offsets: what is alive at both sides of a border lies
        below, and the last `back` items do, for copies know one place only."""
        end = len(self.plan.steps)
        items = items.copy()
        number = np.searchsorted(phases, items[:, 1], "right")
        below = number != np.searchsorted(phases, items[:, 2], "right")
        below[len(items) - back:] = True
        below[0] = True  # the chunks
        fixed = items[below]
        problem = OffsetProblem(fixed, 1, border)
        middle, placed = assign_offsets(self.host, problem, problem.bound(end))
        middle = max(middle, border)
        fixed[1:, 3] = placed
        items[below] = fixed
        sizes: list[int] = []
        for phase in range(1, len(phases)):
            own = ~below & (number == phase)
            problem = OffsetProblem(np.concatenate((fixed, items[own])), len(fixed), middle)
            top, placed = assign_offsets(self.host, problem, problem.bound(end))
            offsets = np.array(placed, np.int64)
            items[own, 3] = np.where(offsets >= middle, offsets + sum(sizes), offsets)
            sizes.append(max(top - middle, 0))
        return middle, sizes, items[1:, 3].tolist()

    def _rest(self, starts: Sequence[int], values: Mapping[str, int]) -> np.ndarray:
        """What a backward has at each step beside its upper block: chunks, less all of them, and results."""
        end = len(self.plan.steps)
        if self.others is None:
            there = first_writes(self.plan)
            some = [b for b in self.plan.buffers if b.is_allocated_tensor and b.name not in self.made]
            gone = {step.chunk: number for number, step in enumerate(self.plan.steps) if isinstance(step, MemoryStep)}
            steps = [(0, gone.get(chunk, end + 1) - 1) for chunk in range(len(starts) - 1)]
            steps += [(there.get(b.name, b.first), end if b.is_output else b.last) for b in some]
            self.others = SizeTable([b.bytes for b in some], f"results of {self.plan.name}"), LiveRanges(steps, end)
        sizes, lives = self.others
        return lives.live_bytes(np.concatenate((np.diff(starts), sizes(values)))) - starts[-1]

    def complete(self, found: ArenaLayout, sizes: np.ndarray, values: Mapping[str, int], policy: SavePolicy) -> None:
        """Fills in the offsets of a layout. What no step touches lies where the upper block begins."""
        bytes_ = sizes[self.saved] if self.forward is None else self.region_bytes(values)
        padded = align(bytes_).tolist()
        places, _ = self.kept(padded, policy)
        if self.forward is not None:
            places |= zip([one.saved for one in policy.moved], found.placed[len(found.moving):], strict=True)
        offsets = [found.border] * len(sizes)
        for i, offset in zip(found.moving, found.placed, strict=False):
            offsets[i] = offset
            if i in self.shown:
                places[self.shown[i][0]] = offset
        for i, (name, before) in self.shown.items():
            if name in places:
                offsets[i] = places[name] + evaluate(before, values)
        found.moved = [(places[one.saved], padded[self.numbers[one.saved]]) for one in policy.moved]
        found.offsets = offsets
