"""What the blocks of a call come to at given sizes: what its record says of that, without the words of its steps.

A limit tries several layouts before a call begins, and only one of them becomes a record. Layouts are the record's own
(`Records.places`). The scratch of a step depends on its kernel or product and on sizes, not on where windows lie: the
steps of layers that repeat are asked once.
"""
from __future__ import annotations

import ctypes
import dataclasses
import itertools
from array import array
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from anyshape.backend import host_words as host
from anyshape.base.align import align
from anyshape.plan.liveness import LiveRange, arena_ranges, first_writes
from anyshape.plan.plan import BandStep, KernelStep, LibraryStep, Plan, Step, parts_of
from anyshape.run.keeping import EVERYTHING, Keeping
from anyshape.run.layout import NO_REGIME, layout_of
from anyshape.run.library import taken_by
from anyshape.run.placement import GOOD_ENOUGH, WORD
from anyshape.run.record import Record
from anyshape.run.sizes import LiveBytes, Sizes

if TYPE_CHECKING:
    from anyshape.run.executable import Executable

NATIVE = KernelStep | LibraryStep | BandStep  # steps that may take scratch


@dataclass(frozen=True, slots=True)
class Blocks:
    """Bytes of the lower and the upper block, of a thread's scratch, and of each chunk of the kept block; `room`,
    `phases` and `turns`: see `Record`."""

    kept: int
    temporary: int
    scratch: int
    chunks: tuple[int, ...] = ()
    room: int = -1
    phases: tuple[int, ...] = ()
    turns: tuple[int, ...] = ()


class Sizing:
    """Finds the blocks of one program's calls. May be used from several threads."""

    def __init__(self, program: Executable) -> None:
        self.maker = maker = program.maker
        self.context, self.functions = program.context, program.functions
        plan = program.plan
        self.sizes = Sizes([plan.kept, plan.arena, *plan.nonnegative], f"blocks of {plan.name}")
        # with everything kept: what lies in the arena
        self.inside = LiveBytes(arena_ranges(plan, maker.keeps.forward), len(plan.steps), f"values of {plan.name}")
        entries = {kernel.name: host.KERNELS + 4 * i for i, kernel in enumerate(program.kernels)}
        kinds: dict[Hashable, int] = {}
        steps: list[Step] = []
        self.kinds: list[int] = []  # by step
        for step in plan.steps:
            kind = _kind(step)
            if kind not in kinds:
                kinds[kind] = len(steps)
                steps.append(step)
            self.kinds.append(kinds[kind])
        self.kind_of = np.array(self.kinds, np.int64)
        self.always = sorted({kind for number, kind in enumerate(self.kinds) if number not in maker.keeps.optional})
        self.count = len(steps)
        self.layout = layout_of(dataclasses.replace(
            plan, steps=tuple(step for step in steps if isinstance(step, NATIVE)), together=(),
            inputs=(), outputs=(), saved=(), offsets=(), kept=0, arena=0, nonnegative=(), optional=()), entries,
            program.autotune.ours)
        self.numbers = [i for i, step in enumerate(steps) if isinstance(step, NATIVE)]
        self.latest: tuple[tuple[int, ...], np.ndarray] | None = None
        self.held = Held(plan)

    def at(self, values: dict[str, int], keeping: Keeping) -> Blocks | Record:
        """The blocks at the symbols' `values`; the record where it takes one. Errors as of `Records.make`."""
        maker = self.maker
        if maker.room is not None or not values.keys() >= set(maker.layout.symbols):
            return maker.made(values, keeping)
        kept, arena, *differences = self.sizes(values).tolist()
        scratch = self.scratch(values)
        if min(differences, default=0) < 0 or scratch is None:
            return maker.made(values, keeping)
        most = max(int(scratch[self.always].max(initial=0)),
                   int(scratch[self.kind_of[maker.keeps.numbers_of(keeping).steps]].max(initial=0)))
        most = align(most)
        if keeping == EVERYTHING and (maker.joined is None or maker.joined.of(maker, values) is None):
            bound = max(self.inside.peak(values), kept)
            if arena <= GOOD_ENOUGH * bound or not maker.moving:
                return Blocks(kept, arena - kept, most)
        place = maker.places(values, keeping)
        chunks = tuple(b - a for a, b in itertools.pairwise(place.starts))
        top = place.middle if place.phases else place.top
        return Blocks(place.border, top - place.border, most, chunks, phases=tuple(size for _, size in place.phases),
                      turns=tuple(first for first, _ in place.phases[1:]))

    def scratch(self, values: dict[str, int]) -> np.ndarray | None:
        """Bytes that a thread takes for each kind of step; None: no version of a kernel fits. Those of the last sizes
        are at hand."""
        sizes = tuple([values[name] for name in self.layout.symbols])
        latest = self.latest
        if latest is not None and latest[0] == sizes:
            return latest[1]
        steps = self.layout.shape(*sizes)[0]
        at = 0
        while at < len(steps):
            if steps[at] == NO_REGIME:
                return None
            at += steps[at + 1]
        head = host.HEAD(kept=0, scratch=0, first=host.HEAD_WORDS, workspace=self.maker.workspace, given=0, empty=0,
                         placed=0, pairs=())
        words = array("q", [*head, *steps, host.END])
        room = (WORD * max(self.maker.workspace_words, 1))()
        self.context.measure(words.buffer_info()[0], ctypes.addressof(self.functions), ctypes.addressof(room))
        found = [0] * self.count
        at = host.HEAD_WORDS
        while words[at] != host.END:
            place = host.THREADS_SCRATCH.get(words[at])
            if place is not None:
                kind = self.numbers[words[at + 2]]
                found[kind] = max(found[kind], words[at + place])
            at += words[at + 1]
        result = np.array(found, np.int64)
        self.latest = sizes, result
        return result


class Held:
    """Results, tensors made by PyTorch, and what its library takes, of one program: see `held_bytes` (run/calls.py)."""

    def __init__(self, plan: Plan) -> None:
        first = first_writes(plan)
        buffers = [b for b in plan.buffers if b.name in first]
        self.names = {b.name: i for i, b in enumerate(buffers)}
        taken = [(number, bytes_) for number, step in enumerate(plan.steps) if (bytes_ := taken_by(step)) != 0]
        self.live = LiveBytes([*(LiveRange(b.bytes, first[b.name], b.last) for b in buffers),
                               *(LiveRange(bytes_, number, number) for number, bytes_ in taken)],
                              len(plan.steps), f"results of {plan.name}")

    def most(self, values: dict[str, int], dropped: frozenset[str], ends: dict[str, int]) -> int:
        """The most bytes that a call holds of them at once; `ends`: steps with which those go that are dropped."""
        ranges = self.live.ranges
        some = {i: ends[name] for name, i in self.names.items() if name in dropped}
        if some:
            ranges = ranges.ending(some)
        return ranges.peak(self.live.sizes(values))


def _kind(step: Step) -> Hashable:
    """What the scratch of a step depends on."""
    if isinstance(step, KernelStep):
        return tuple((one.kernels, one.sizes, one.conditions, bool(one.then)) for one in step.regimes), len(
            step.params), len(step.handed)
    if isinstance(step, BandStep):
        return step.rows, *map(_kind, parts_of(step))
    if isinstance(step, LibraryStep):
        return step.op, step.attrs, *((w.type.dtype, w.type.shape, w.type.layout()) for w in (
            *step.inputs, *step.outputs))
    return None
