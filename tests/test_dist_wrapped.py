"""Models under DistributedDataParallel, fully_shard and tensor parallel DTensors compile, on two processes."""
from __future__ import annotations

from typing import Any

import pytest

from test_dist_processes import ranks

ONE_PROGRAM = 2  # a forward and a backward


def check(found: list[dict[str, Any]], **programs: int) -> None:
    for rank in found:
        for name, count in programs.items():
            one = rank[name]
            assert one["worst"] < 1e-5, (name, found)
            assert one["programs"] == count and one.get("eager_calls", 0) == 0, (name, found)


def test_wrapped_models_compile() -> None:
    found = ranks(2, "wrapped")
    check(found, ddp=ONE_PROGRAM, tensor=ONE_PROGRAM, steps=ONE_PROGRAM)
    for rank in found:
        for name in ("loop", "sequence"):  # between hooks; of lengths that the ranks divide, and others
            one = rank[name]
            assert one["worst"] < 1e-5 and one["eager_calls"] == 0, (name, found)
            assert one["runs"] == (4 * one["programs"] if name == "loop" else 8), (name, found)
        lines = [text.splitlines() for text in rank["steps"]["refused"]]
        assert [len(one) for one in lines] == [3, 3, 3]
        for words, one in zip(("sharded already", "DTensors", "more than add up"), lines, strict=True):
            assert words in one[0] and "strategy=" in one[2]


@pytest.mark.full
def test_what_wrappers_can_be_told() -> None:
    found = ranks(2, "wrapped_more")
    check(found, **dict.fromkeys(("view", "static", "buffers", "unused", "quiet", "inside", "hook", "backend"),
                                 ONE_PROGRAM), collectives=1 + ONE_PROGRAM)
    for rank in found:
        one = rank["buckets"]  # a forward and a backward for each part that torch makes
        assert one["worst"] < 1e-5 and one["programs"] > ONE_PROGRAM and one["programs"] % ONE_PROGRAM == 0, found
        assert one["eager_calls"] == 0 and one["runs"] == 4 * one["programs"], found
        for name in ("fsdp", "blocks", "kept", "loops", "usual", "mixed"):
            one = rank[name]
            assert one["worst"] < (1e-2 if name == "mixed" else 1e-5), (name, found)
            assert one["eager_calls"] == 0 and one["runs"] >= 16, (name, found)
