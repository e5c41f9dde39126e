"""The memory footprint of a call: the bytes of its blocks at given sizes, as its record says them, without the words of
its steps.

A limit tries several layouts before a call begins, and only one of them becomes a record. Layouts are the record's own
(`Specializer.places`). The scratch of a step depends on its kernel or product and on sizes, not on where windows lie:
the steps of layers that repeat are asked once.
"""
from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from anyshape.backend.interface import PlacedPlan
from anyshape.base.align import align
from anyshape.base.errors import VerifyError
from anyshape.plan.ir.liveness import LiveRange, arena_ranges, first_writes
from anyshape.plan.ir.program import KernelStep, LibraryStep, Plan, Step, TiledGemmStep, parts_of
from anyshape.runtime.cost.library_workspace import taken_by
from anyshape.runtime.memory.offset_assignment import GOOD_ENOUGH
from anyshape.runtime.memory.size_vectors import LiveBytes, SizeTable
from anyshape.runtime.specialize.saved_policy import SAVE_ALL, SavePolicy
from anyshape.runtime.specialize.specialization import Specialization

if TYPE_CHECKING:
    from anyshape.runtime.call.executable import Executable

NATIVE = KernelStep | LibraryStep | TiledGemmStep  # steps that may take scratch


@dataclass(frozen=True, slots=True)
class Blocks:
    """Bytes of the lower and the upper block, of a thread's scratch, and of each chunk of the kept block.
    `reused_output`, `phases` and `turns`: see `Specialization`."""

    kept: int
    temporary: int
    scratch: int
    chunks: tuple[int, ...] = ()
    reused_output: int = -1
    phases: tuple[int, ...] = ()
    turns: tuple[int, ...] = ()


class FootprintEstimator:
    """Finds the blocks of one program's calls. May be used from several threads."""

    def __init__(self, program: Executable) -> None:
        self.specializer = specializer = program.specializer
        plan = program.plan
        self.sizes = SizeTable([plan.kept, plan.arena, *plan.nonnegative], f"blocks of {plan.name}")
        # with everything kept: what lies in the arena
        saved = specializer.keeps
        self.inside = LiveBytes(arena_ranges(plan, saved.forward), len(plan.steps), f"values of {plan.name}")
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
        self.always = sorted({kind for number, kind in enumerate(self.kinds) if number not in saved.optional})
        self.count = len(steps)
        self.runner = program.target.runner(dataclasses.replace(
            plan, steps=tuple(step for step in steps if isinstance(step, NATIVE)), together=(),
            inputs=(), outputs=(), saved=(), offsets=(), kept=0, arena=0, nonnegative=(), optional=()), program.kernels)
        self.numbers = [i for i, step in enumerate(steps) if isinstance(step, NATIVE)]
        self.latest: tuple[tuple[int, ...], np.ndarray] | None = None
        self.held = ExternalBytes(plan)

    def at(self, values: dict[str, int], policy: SavePolicy) -> Blocks | Specialization:
        """The blocks at the symbols' `values`; the record where it takes one. Errors as of `Specializer.make`."""
        specializer = self.specializer
        if specializer.reused_output is not None or not values.keys() >= set(specializer.layout.symbols):
            return specializer.made(values, policy)
        kept, arena, *differences = self.sizes(values).tolist()
        scratch = self.scratch(values)
        if min(differences, default=0) < 0 or scratch is None:
            return specializer.made(values, policy)
        most = max(int(scratch[self.always].max(initial=0)),
                   int(scratch[self.kind_of[specializer.keeps.numbers_of(policy).steps]].max(initial=0)))
        most = align(most)
        if policy == SAVE_ALL and (specializer.joined is None or specializer.joined.of(specializer, values) is None):
            bound = max(self.inside.peak(values), kept)
            if arena <= GOOD_ENOUGH * bound or not specializer.moving:
                return Blocks(kept, arena - kept, most)
        place = specializer.places(values, policy)
        chunks = tuple(b - a for a, b in itertools.pairwise(place.starts))
        top = place.middle if place.phases else place.top
        return Blocks(place.border, top - place.border, most, chunks, phases=tuple(size for _, size in place.phases),
                      turns=tuple(first for first, _ in place.phases[1:]))

    def scratch(self, values: dict[str, int]) -> np.ndarray | None:
        """Bytes that a thread takes for each kind of step; None: no version of a kernel fits. Those of the last sizes
        are at hand."""
        sizes = tuple([values[name] for name in self.runner.sizes.symbols])
        latest = self.latest
        if latest is not None and latest[0] == sizes:
            return latest[1]
        try:
            payload = self.runner.specialize(PlacedPlan(self.runner.sizes.shape(*sizes)[0], values, (), 0))
        except VerifyError:
            return None
        found = [0] * self.count
        for number, bytes_ in self.runner.scratch_of_steps(payload).items():
            found[self.numbers[number]] = bytes_
        result = np.array(found, np.int64)
        self.latest = sizes, result
        return result


class ExternalBytes:
    """Results, tensors made by PyTorch, and what its library takes, of one program: see `held_bytes`
    (runtime/call/extern_table.py)."""

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
    if isinstance(step, TiledGemmStep):
        return step.rows, *map(_kind, parts_of(step))
    if isinstance(step, LibraryStep):
        return step.op, step.attrs, *((w.type.dtype, w.type.shape, w.type.layout()) for w in (
            *step.inputs, *step.outputs))
    return None
