"""Placement of recomputation: each step of a backward that computes saved values again stands as late as it may.

    part: 0 k0(x) -> n;  1 matmul(n, w) -> q;  2 matmul(n, v) -> h      the backward needs h at 5, q at 9
    places: 5, 9, 5                 n waits for step 1 until 9, if it takes no more than q would meanwhile

A step stands before the first that needs what it makes, and before any that writes what it reads. What it reads has to
be there until then: where that takes more than what would wait for it, that does not wait. Neither do steps that hold
more while they run than they leave behind, where the backward has much at that place, and less some steps before. This
is one choice for all sizes, by the hints.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from anyshape.plan.ir.program import Plan, step_writes, touched
from anyshape.sym.expr import Size

LATEST = 1 << 40  # of a step that nothing in the backward needs: it comes with the last that is needed
BACK = 24  # steps of the backward, at most, that some do not wait which hold much while they run

Touches = Sequence[tuple[frozenset[str], frozenset[str]]]  # by step, the buffers that it writes and touches


def places(part: Plan, first: Mapping[str, int], last: Mapping[str, int], before: Mapping[str, int],
           alive: Sequence[int], across: Sequence[int], hint: Callable[[Size], int]) -> list[int]:
    """By step of `part`, the step of the backward that it stands in front of.

    Args:
        first: by buffer of the part that is a result of it, the backward's first step that needs it.
        last: by buffer that the backward has from the forward's tape, or needs itself, the last step that needs it;
            other inputs are there all the time.
        before: by buffer, the backward's first step that writes it.
        alive, across: by step of the backward, bytes that its own values take there, and in front of it.
    """
    touches = [(frozenset(w.buffer for w in step_writes(step)), frozenset(w.buffer for w in touched(step)))
               for step in part.steps]
    bytes_ = {b.name: hint(b.bytes) for b in part.buffers}
    inputs = {b.name for b in part.buffers if b.is_input}
    caps = [LATEST] * len(touches)
    while True:
        found = _latest(touches, caps, first, before)
        if not _pull(found, touches, caps, bytes_, last, inputs):
            break
    for place in sorted(set(found), reverse=True):
        together = [k for k, at in enumerate(found) if at == place]
        most, left = _held([touches[k] for k in together], bytes_, set(first) | {
            name for k, at in enumerate(found) if at != place for name in touches[k][1]})
        if place < len(alive) and most > left:
            for k in together:
                caps[k] = _emptiest(place, most, left, alive, across)
            found = _latest(touches, caps, first, before)
    return found


def _held(touches: Touches, bytes_: Mapping[str, int], kept: set[str]) -> tuple[int, int]:
    """The most bytes that steps hold one after another of what they make, and what is left behind them: what is among
    `kept`."""
    made = {name for writes, _ in touches for name in writes}
    last = {name: k for k, (_, all_of_it) in enumerate(touches) for name in all_of_it & made}
    there: set[str] = set()
    most = 0
    for k, (writes, _) in enumerate(touches):
        there |= writes
        most = max(most, sum(bytes_[name] for name in there))
        there = {name for name in there if name in kept or last[name] > k}
    return most, sum(bytes_[name] for name in there)


def _emptiest(place: int, most: int, left: int, alive: Sequence[int], across: Sequence[int]) -> int:
    """The place at or before `place` where steps that hold `most` bytes and leave `left` make the backward least full;
    the last of them."""
    best, least, between = place, across[place] + most, 0
    for at in range(place - 1, max(place - BACK, 0) - 1, -1):
        between = max(between, alive[at] + left)
        full = max(across[at] + most, between)
        if full < least:
            best, least = at, full
    return best


def _latest(touches: Touches, caps: Sequence[int], first: Mapping[str, int], before: Mapping[str, int]) -> list[int]:
    """The latest places that caps and what is needed allow."""
    touched_at: dict[str, int] = {}  # the first place of a later step of the part that touches a buffer, or writes it
    written_at: dict[str, int] = {}
    found = list(caps)
    for k in range(len(touches) - 1, -1, -1):
        writes, all_of_it = touches[k]
        found[k] = min([caps[k], *(at.get(name, LATEST) for name in writes for at in (first, touched_at)),
                        *(at.get(name, LATEST) for name in all_of_it for at in (before, written_at))])
        for name in all_of_it:
            touched_at[name] = min(touched_at.get(name, LATEST), found[k])
        for name in writes:
            written_at[name] = min(written_at.get(name, LATEST), found[k])
    last = max(at for at in found if at != LATEST)
    return [min(at, last) for at in found]


def _pull(found: Sequence[int], touches: Touches, caps: list[int], bytes_: Mapping[str, int], last: Mapping[str, int],
          inputs: set[str]) -> bool:
    """Lowers the caps of steps that would have something wait for them which takes more than they make; whether there
    are any. `inputs` of the part are there whether it waits or not."""
    users: dict[str, list[int]] = {}
    for k, (_, all_of_it) in enumerate(touches):
        for name in all_of_it - (inputs - last.keys()):
            users.setdefault(name, []).append(k)
    pulled = False
    for name, some in users.items():
        there = last.get(name, -1)
        if name not in inputs or there < 0:
            there = max(there, min(found[k] for k in some))
        late = [k for k in some if found[k] > there]
        if bytes_[name] > sum(bytes_[one] for one in {one for k in late for one in touches[k][0]}):
            for k in late:
                caps[k] = there
                pulled = True
    return pulled
