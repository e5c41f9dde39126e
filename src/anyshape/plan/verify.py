"""The verifier of plans: the judge of a plan's order, and of its layout at given sizes; knows nothing of how
plan/memory/symbolic_allocator.py works."""
from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from anyshape.base.errors import VerifyError
from anyshape.plan.ir.program import Buffer, ExternStep, Plan, step_writes, touched
from anyshape.sym.expr import evaluate


def judge(plan: Plan, values: Mapping[str, int], offsets: Mapping[str, int] | None = None, arena: int | None = None,
          kept: int | None = None) -> int:
    """Checks that the layout is right at the symbols' `values`, and returns the least bytes that any layout needs.

    Args:
        plan: an allocated plan.
        values: symbol name -> value.
        offsets: buffer name -> byte offset; the plan's own formulas when left out.
        arena, kept: bytes of the arena and of the block at its bottom; the plan's own formulas when left out.

    Raises:
        VerifyError: a step reads a value that no step before it makes; calls with effects are not in the order of the
            program; two buffers overlap while both are alive; one is misaligned, outside the arena, or crosses the
            border of the kept block; or the arena is not the top of the highest buffer.
    """
    _check_order(plan)
    if offsets is None:
        offsets = {name: evaluate(offset, values) for name, offset in plan.offsets}
    arena = evaluate(plan.arena, values) if arena is None else arena
    kept = evaluate(plan.kept, values) if kept is None else kept
    placed: list[tuple[int, int, Buffer]] = []
    top = kept
    for buffer in plan.buffers:
        if buffer.in_arena and buffer.name not in offsets:
            _fail(plan, f"buffer {buffer.name} has no offset")
        if buffer.name not in offsets or buffer.is_optional:
            continue
        start = offsets[buffer.name]
        stop = start + evaluate(buffer.bytes, values)
        if start < 0 or stop > arena:
            _fail(plan, f"buffer {buffer.name} at {start}..{stop} lies outside the arena of {arena} bytes")
        if not buffer.is_restored and start % 64:
            _fail(plan, f"buffer {buffer.name} at {start} is not aligned to 64 bytes")
        if start < kept < stop or ((buffer.is_saved or buffer.is_restored) and stop > kept):
            _fail(plan, f"buffer {buffer.name} at {start}..{stop} crosses the kept block of {kept} bytes")
        top = max(top, stop)
        placed.append((start, stop, buffer))
    if (top + 63) // 64 * 64 != arena:
        _fail(plan, f"the arena is {arena} bytes, the highest buffer ends at {top}")
    for i, (start, stop, one) in enumerate(placed):
        for other_start, other_stop, other in placed[:i]:
            shared = min(stop, other_stop) - max(start, other_start)
            if shared > 0 and _together(plan, one, other) and not (one.is_restored and other.is_restored):
                _fail(plan, f"buffers {one.name} and {other.name} are alive together and share {shared} bytes")
    return lower_bound(plan, values)


def _check_order(plan: Plan) -> None:
    made = {buffer.name for buffer in plan.buffers if not buffer.is_allocated}
    for number, step in enumerate(plan.steps):
        makes = {window.buffer for window in step_writes(step)}
        early = {window.buffer for window in touched(step)} - makes - made
        if early:
            _fail(plan, f"step {number} reads {', '.join(sorted(early))}, which is not made by then")
        made |= makes
    effects = [step.effect for step in plan.steps if isinstance(step, ExternStep) and step.effect]
    for one, other in pairwise(effects):
        if one >= other:
            _fail(plan, f"effect {other} comes after effect {one}")


def lower_bound(plan: Plan, values: Mapping[str, int]) -> int:
    """The largest number of bytes of arena buffers alive at one step."""
    places = dict(plan.offsets)
    inside = [b for b in plan.buffers if b.in_arena or (b.is_restored and b.name in places)]
    best = 0
    for step in range(len(plan.steps) + 1):
        alive = [evaluate(b.bytes, values) for b in inside if _life(plan, b)[0] <= step <= _life(plan, b)[1]]
        best = max(best, sum(alive))
    return best


def _life(plan: Plan, buffer: Buffer) -> tuple[int, int]:
    first = 0 if buffer.is_restored else buffer.first
    last = len(plan.steps) if buffer.is_saved else buffer.last
    return first, last


def _together(plan: Plan, a: Buffer, b: Buffer) -> bool:
    (a_first, a_last), (b_first, b_last) = _life(plan, a), _life(plan, b)
    return a_first <= b_last and b_first <= a_last


def _fail(plan: Plan, why: str) -> None:
    raise VerifyError(f"the plan of {plan.name} is wrong", why=why, do="report this plan: a bug of AnyShape")
