"""Values of the arena move into tensors that exist anyway: a result before it is written, a tensor that PyTorch made
after its last use.

    0 k0(x) -> a        (arena)        -->      0 k0(x) -> out
    1 k1(a) -> b                                1 k1(out) -> b
    2 k2(b) -> out      (output)                2 k2(b) -> out

The arena is held through the whole call, so results and what PyTorch makes come on top of it. What lies in those
instead makes the arena smaller, at no cost.
"""
from __future__ import annotations

from dataclasses import dataclass

from anyshape.plan.alloc import allocate
from anyshape.plan.hold import owned_elsewhere
from anyshape.plan.inplace import dtypes_of, may_be_written, renamed_buffers
from anyshape.plan.plan import Buffer, ExternStep, Plan, Window

LEAST = 4096  # bytes at the hints below which a buffer is not worth the search


def use_rooms(plan: Plan, forward: Plan | None) -> Plan:
    """`plan` (not allocated) with such values moved, if the whole call then needs less memory at the hints."""
    search = _Search(plan, forward)
    search.run()
    if not search.moves:
        return plan
    moved = renamed_buffers(plan, search.moves, search.buffers())
    return moved if _total(moved, forward) < _total(plan, forward) else plan


def _total(plan: Plan, forward: Plan | None) -> int:
    """Bytes of the arena and of the tensors beside it, at the hints."""
    return plan.facts.hint(allocate(plan, forward).arena) + max(_beside(plan, forward), default=0)


def _beside(plan: Plan, forward: Plan | None) -> list[int]:
    """Bytes of tensors outside the arena that only the call holds, at each step."""
    elsewhere = owned_elsewhere(plan, forward)
    bytes_ = [0] * (len(plan.steps) + 1)
    for buffer in plan.buffers:
        if buffer.home == "output" or buffer.name in elsewhere:
            for step in range(buffer.first, min(buffer.last, len(plan.steps)) + 1):
                bytes_[step] += plan.facts.hint(buffer.bytes)
    return bytes_


@dataclass(slots=True)
class _Room:
    """A tensor and the steps in which it is in use, first and last inclusive."""

    buffer: Buffer
    hint: int
    taken: list[tuple[int, int]]

    @property
    def life(self) -> tuple[int, int]:
        return min(first for first, _ in self.taken), max(last for _, last in self.taken)


class _Search:
    """Moves values out of the step where most of the arena is alive, until it cannot be relieved any more."""

    def __init__(self, plan: Plan, forward: Plan | None) -> None:
        self.plan = plan
        self.dtypes = dtypes_of(plan)
        self.moves: dict[str, str] = {}
        self.beside = _beside(plan, forward)
        self.cap = max(self.beside, default=0)
        written = {w.buffer for step in plan.steps if isinstance(step, ExternStep) and may_be_written(step)
                   for w in step.outputs if w is not None}
        ends = {w.buffer for w in (*plan.outputs, *plan.saved) if isinstance(w, Window)}
        self.rooms = [_Room(b, plan.facts.hint(b.bytes), [(b.first, b.last)]) for b in plan.buffers
                      if (b.home == "output" and b.first > 0)
                      or (b.home == "extern" and b.name in written and b.name not in ends)]
        self.rooms.sort(key=lambda room: room.hint)
        self.alive = [0] * (len(plan.steps) + 1)
        self.inside = [b for b in plan.buffers if b.home == "arena" and b.first <= b.last]
        for buffer in self.inside:
            self.change(buffer, plan.facts.hint(buffer.bytes))
        self.inside.sort(key=lambda b: -plan.facts.hint(b.bytes))

    def change(self, buffer: Buffer, amount: int) -> None:
        for step in range(buffer.first, buffer.last + 1):
            self.alive[step] += amount

    def run(self) -> None:
        while self.rooms and self.relieve(self.alive.index(max(self.alive))):
            pass

    def relieve(self, step: int) -> bool:
        """Moves one value that is alive at `step`."""
        for buffer in self.inside:
            hint = self.plan.facts.hint(buffer.bytes)
            if hint < LEAST or buffer.name in self.moves or not buffer.first <= step <= buffer.last:
                continue
            for room in self.rooms:
                if room.hint >= hint and self.fits(buffer, room):
                    self.move(buffer, room, hint)
                    return True
        return False

    def fits(self, buffer: Buffer, room: _Room) -> bool:
        """Free meanwhile, of that dtype, provably large enough, and nowhere more beside the arena than there was."""
        if any(first <= buffer.last and buffer.first <= last for first, last in room.taken):
            return False
        if room.buffer.home == "extern" and buffer.first < room.buffer.first:
            return False
        if self.dtypes.get(buffer.name) != self.dtypes.get(room.buffer.name):
            return False
        if any(self.beside[step] + room.hint > self.cap for step in self.longer(buffer, room)):
            return False
        return buffer.bytes == room.buffer.bytes or \
            self.plan.facts.prove_at_most(buffer.bytes, room.buffer.bytes) is True

    def longer(self, buffer: Buffer, room: _Room) -> list[int]:
        """Steps in which the room would have to exist, and does not yet."""
        first, last = room.life
        return [*range(min(first, buffer.first), first), *range(last + 1, max(last, buffer.last) + 1)]

    def move(self, buffer: Buffer, room: _Room, hint: int) -> None:
        for step in self.longer(buffer, room):
            self.beside[step] += room.hint
        room.taken.append((buffer.first, buffer.last))
        self.change(buffer, -hint)
        self.moves[buffer.name] = room.buffer.name

    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers of the plan after the moves."""
        lives = {room.buffer.name: room.life for room in self.rooms}
        return tuple(Buffer(b.name, b.bytes, b.home, b.index, *lives.get(b.name, (b.first, b.last)))
                     for b in self.plan.buffers if b.name not in self.moves)
