"""Where steps stand that compute saved values again: each as late as it may, unless more would wait for it."""
from __future__ import annotations

import pytest

from anyshape.ir.types import TensorType
from anyshape.plan.ir.home import Input, Temp
from anyshape.plan.ir.program import Buffer, CopyStep, Plan, Window
from anyshape.plan.remat.recompute_placement import places
from anyshape.sym.facts import Facts

QUIET = [0] * 20  # a backward that has nothing of its own


def part_of(bytes_: dict[str, int], *steps: tuple[str, str]) -> Plan:
    """A part of which each step makes one value of another: (source, target). What no step makes is an input."""
    made = {target for _, target in steps}
    buffers = tuple(Buffer(name, size, Temp() if name in made else Input(0), 0, len(steps))
                    for name, size in bytes_.items())
    window = {name: Window(name, TensorType("f32", (size // 4,))) for name, size in bytes_.items()}
    copies = tuple(CopyStep(window[source], window[target]) for source, target in steps)
    return Plan("part", (), (), (), buffers, copies, (), 0, Facts())


def placed(part: Plan, first: dict[str, int], last: dict[str, int] | None = None,
           before: dict[str, int] | None = None, alive: list[int] = QUIET) -> list[int]:
    return places(part, first, last or {}, before or {}, alive, alive, int)


@pytest.mark.parametrize(("size", "wanted"), [(64, [5, 9, 5]), (65, [5, 5, 5])])
def test_what_takes_more_than_it_is_worth_waits_for_nothing(size: int, wanted: list[int]) -> None:
    part = part_of({"x": 64, "n": size, "q": 64, "h": 64}, ("x", "n"), ("n", "q"), ("n", "h"))
    assert placed(part, {"q": 9, "h": 5}) == wanted


@pytest.mark.parametrize(("size", "wanted"), [(64, 9), (128, 7)])
def test_what_is_kept_waits_too(size: int, wanted: int) -> None:
    part = part_of({"x": size, "q": 64}, ("x", "q"))
    assert placed(part, {"q": 9}, last={"x": 7}) == [wanted]


def test_what_is_written_over_is_read_before() -> None:
    part = part_of({"w": 64, "n": 64, "q": 64}, ("w", "n"), ("n", "q"))
    assert placed(part, {"q": 9}, before={"w": 6}) == [6, 9]


def test_what_nobody_needs_comes_with_what_is_needed_last() -> None:
    part = part_of({"x": 64, "n": 64, "q": 64, "d": 64}, ("x", "n"), ("n", "q"), ("n", "d"))
    assert placed(part, {"q": 9}) == [9, 9, 9]


def test_steps_that_hold_much_run_where_the_backward_has_little() -> None:
    part = part_of({"x": 64, "n": 64, "q": 64}, ("x", "n"), ("n", "q"))
    assert placed(part, {"q": 9}) == [9, 9]
    assert placed(part, {"q": 9}, alive=[*[0] * 7, *[64] * 13]) == [6, 6]
