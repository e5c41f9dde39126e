"""Buffer aliasing: values of the arena move into tensors that exist anyway, such as a result before it is written, or a
tensor that PyTorch made after its last use.

before:
    plan chain  arena 0
      where 1 <= n, n near 4096
      in      x: f32[n]  4*n bytes  steps 0-0
      buffer  a: f32[n]  4*n bytes  steps 0-1  arena
      buffer  b: f32[n]  4*n bytes  steps 1-2  arena
      buffer  y: f32[n]  4*n bytes  steps 2-3  output 0
      0  kernel k0(x, &a; n)
      1  matmul(a, a) -> b
      2  kernel k2(b, &y; n)
           {reuse=[[0, 1]]}
      out     y
after alias_buffers:
    plan chain  arena 0
      where 1 <= n, n near 4096
      in      x: f32[n]  4*n bytes  steps 0-0
      buffer  b: f32[n]  4*n bytes  steps 1-2  arena
      buffer  y: f32[n]  4*n bytes  steps 0-3  output 0
      0  kernel k0(x, &y; n)
      1  matmul(y, y) -> b
      2  kernel k2(b, &y; n)
           {reuse=[[0, 1]]}
      out     y

The arena is held through the whole call, so results and what PyTorch makes come on top of it. What lies in those
instead makes the arena smaller, at no cost.
"""
from __future__ import annotations

from dataclasses import dataclass

from anyshape.plan.ir.context import DEFAULTS, PlanContext
from anyshape.plan.ir.liveness import arena_bytes_at_hints, hints, live_bytes, outside_ranges
from anyshape.plan.ir.program import Buffer, Plan
from anyshape.plan.ir.renaming import dtypes_of, merged
from anyshape.plan.memory.inplace_reuse import in_place, written_over
from anyshape.sym.prover import prove_at_most

LEAST = 4096  # bytes at the hints below which a buffer is not worth the search


def alias_buffers(plan: Plan, context: PlanContext = DEFAULTS) -> Plan:
    """`plan` (not allocated) with buffers made one: what a kernel can write in place, and values moved into rooms, if
    the whole call then needs less memory at the hints."""
    forward = context.forward
    candidates = []
    for results in (False, True):
        names = in_place(plan, results, forward)
        moves = _Search(plan, names, forward).run()
        for candidate in (names, names | moves) if moves else (names,):
            if candidate not in candidates:
                candidates.append(candidate)
    plans = [merged(plan, names) for names in candidates]
    return plans[0] if len(plans) == 1 else min(plans, key=lambda one: _total(one, forward))


def _total(plan: Plan, forward: Plan | None) -> int:
    """Bytes of the arena and of the tensors beside it, at the hints."""
    return arena_bytes_at_hints(plan, forward) + max(_beside(plan, forward), default=0)


def _beside(plan: Plan, forward: Plan | None) -> list[int]:
    """Bytes of tensors outside the arena that only the call holds, at each step."""
    return live_bytes(hints(outside_ranges(plan, forward), plan), len(plan.steps))


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
    """Moves values out of the step where most of the arena is alive, until it cannot be relieved any more.

    What is one buffer by writing in place is a chain of values, each made from the one before. A move takes a chain
    from one of its values on.
    """

    def __init__(self, plan: Plan, names: dict[str, str], forward: Plan | None) -> None:
        self.plan = plan
        self.dtypes = dtypes_of(plan)
        self.moves: dict[str, str] = {}
        self.beside = _beside(merged(plan, names), forward)
        self.cap = max(self.beside, default=0)
        chains: dict[str, list[Buffer]] = {}
        for buffer in plan.buffers:
            chains.setdefault(names.get(buffer.name, buffer.name), []).append(buffer)
        self.hints = {name: plan.facts.hint(chain[0].bytes) for name, chain in chains.items()}
        owned = written_over(plan)
        self.rooms = [_Room(b, self.hints[b.name], [(one.first, one.last) for one in chains[b.name]])
                      for b in plan.buffers if (b.is_output and b.first > 0) or b.name in owned]
        self.rooms.sort(key=lambda room: room.hint)
        self.alive = [0] * (len(plan.steps) + 1)
        self.chains = [sorted(chain, key=lambda b: b.first) for name, chain in chains.items()
                       if all(b.is_temp and b.first <= b.last for b in chain) and self.hints[name] >= LEAST]
        for chain in self.chains:
            self.change(chain[0].first, chain[-1].last, plan.facts.hint(chain[0].bytes))
        self.chains.sort(key=lambda chain: -plan.facts.hint(chain[0].bytes))

    def change(self, first: int, last: int, amount: int) -> None:
        for step in range(first, last + 1):
            self.alive[step] += amount

    def run(self) -> dict[str, str]:
        """Value -> the room it moves into."""
        while self.rooms and self.relieve(self.alive.index(max(self.alive))):
            pass
        return self.moves

    def relieve(self, step: int) -> bool:
        """Moves one value that is alive at `step`."""
        for chain in self.chains:
            if not chain or not chain[0].first <= step <= chain[-1].last:
                continue
            hint = self.plan.facts.hint(chain[0].bytes)
            for position, value in enumerate(chain):
                if value.first + (position > 0) > step:
                    break  # what is left behind would be alive at the step
                for room in self.rooms:
                    if room.hint >= hint and self.fits(chain[position:], room):
                        self.move(chain, position, room, hint)
                        return True
        return False

    def fits(self, values: list[Buffer], room: _Room) -> bool:
        """Free meanwhile, of that dtype, provably large enough, and nowhere more beside the arena than there was."""
        value, last = values[0], values[-1].last
        if any(begin <= last and value.first <= end for begin, end in room.taken):
            return False
        if room.buffer.is_external and value.first < room.buffer.first:
            return False
        if any(self.dtypes.get(one.name) != self.dtypes.get(room.buffer.name) for one in values):
            return False
        if any(self.beside[step] + room.hint > self.cap for step in self.longer(value.first, last, room)):
            return False
        return value.bytes == room.buffer.bytes or \
            prove_at_most(self.plan.facts, value.bytes, room.buffer.bytes) is True

    def longer(self, begin: int, end: int, room: _Room) -> list[int]:
        """Steps in which the room would have to exist, and does not yet."""
        first, last = room.life
        return [*range(min(first, begin), first), *range(last + 1, max(last, end) + 1)]

    def move(self, chain: list[Buffer], position: int, room: _Room, hint: int) -> None:
        """Moves a chain from the value at `position` on; the values before it keep the place."""
        first, last = chain[position].first, chain[-1].last
        for step in self.longer(first, last, room):
            self.beside[step] += room.hint
        room.taken.append((first, last))
        self.change(first + (position > 0), last, -hint)
        self.moves |= {value.name: room.buffer.name for value in chain[position:]}
        del chain[position:]
