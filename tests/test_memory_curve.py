"""What `memory()` shows at given sizes: the curve that the limit decides by, who is alive, what is not kept."""
from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

import anyshape
from anyshape.frontend.diagnostics.explain_data import AliveNote, MemoryCurve
from anyshape.frontend.diagnostics.memory_text import BLOCKS, HEIGHT, PLAIN, plot
from anyshape.runtime.specialize.saved_policy import SAVE_ALL
from limits import NO_LIMIT, limit_of, net, sizes, step

ROWS = 900


@pytest.fixture(scope="module")
def model():
    return net(count=3)


@pytest.fixture(scope="module")
def free(model):
    run = anyshape.compile(model, memory_limit=NO_LIMIT, strict=True)
    step(run, model, torch.randn(ROWS, 32))
    return run


def curve_of(run, rows=ROWS):
    found, = run.memory(x=(rows, 32)).curves
    return found


def test_under_a_limit_the_curve_is_that_of_the_choice(model, free, tmp_path) -> None:
    x = torch.randn(ROWS, 32)
    wide = limit_of(free)
    values = sizes(free, x)
    below = wide.least(values) - 4096  # values have to be moved out
    for bytes_, settings in ((wide.needed(values, SAVE_ALL) * 3 // 4, {}), (below, {"memory_store": str(tmp_path)})):
        run = anyshape.compile(model, memory_limit=bytes_, strict=True, **settings)
        step(run, model, x)
        limit, curve = limit_of(run), curve_of(run)
        policy = limit.choose(values)
        tradeoff = limit.tradeoff(values)
        assert list(curve.chosen) == tradeoff.curve(policy).tolist()
        assert list(curve.kept) == tradeoff.curve(SAVE_ALL).tolist()
        assert curve.limit == bytes_ and curve.needed > bytes_ >= curve.needs == limit.needed(values, policy)
        assert curve.peak == max(range(len(curve.chosen)), key=curve.chosen.__getitem__)
        assert sum(one.bytes for one in curve.alive) == max(curve.chosen)
        assert {one.name for one in curve.back} == policy.away
        assert {one.name for one in curve.back if one.way == "moved out"} == {move.saved for move in policy.moved}
        assert bool(policy.moved) == bool(settings)
        assert curve.seconds > 0 and all(one.seconds > 0 and one.first <= one.last + 1 for one in curve.back)
        if not settings:
            assert sum(one.seconds for one in curve.back) == pytest.approx(curve.seconds)
            assert any("torch.sin(torch.tanh(up(norm(x))))" in one.where for one in curve.back)
        text = str(run.memory(x=(ROWS, 32)))
        assert "- limit: " in text and "alive at the peak" in text and "test" not in text.splitlines()[0]
        assert all(f"{way}: " in text for way in {one.way for one in curve.back})
        assert text.isascii() and max(map(len, text.splitlines()[-60:])) < 400
    assert repr(run.memory(x=(ROWS, 32))) == text


def test_a_limit_that_is_too_low_says_so(model, free) -> None:
    run = anyshape.compile(model, memory_limit=limit_of(free).least(sizes(free, torch.randn(ROWS, 32))), strict=True)
    step(run, model, torch.randn(ROWS // 2, 32))
    curve = curve_of(run, 2 * ROWS)
    assert "set memory_limit to" in curve.refused and curve.needs > curve.limit
    assert "no choice stays within it" in str(run.memory(x=(2 * ROWS, 32)))


def test_without_a_limit_and_without_a_backward(model) -> None:
    plain = anyshape.compile(model, strict=True)
    with torch.no_grad():
        plain(torch.randn(6, 32))
    curve = curve_of(plain)
    assert curve.border == len(curve.kept) and curve.kept == curve.chosen and not curve.back and curve.limit == 0
    assert sum(one.bytes for one in curve.alive) == max(curve.kept) <= curve.needs == curve.needed
    assert "forward" not in "".join(plot(curve, PLAIN))
    assert not plain.memory().curves  # no sizes, no numbers
    both = anyshape.compile(model, strict=True)
    step(both, model, torch.randn(6, 32))
    curve = curve_of(both)
    assert curve.border < len(curve.kept) and curve.kept == curve.chosen and max(curve.kept) <= curve.needed
    assert "forward" in str(both.memory(x=(ROWS, 32))) and "limit:" not in str(both.memory(x=(ROWS, 32)))


def test_the_plot() -> None:
    curve = MemoryCurve("both", (10, 80, 80, 40) * 10, (10, 40, 60, 40) * 10, 20, 60, 90, 70, 2, "forward 2: here",
                        (AliveNote("a", 60, "saved", "net.py:3"),))
    rows = plot(curve, PLAIN)
    assert len(rows) == HEIGHT + 2 and rows[0] == "      80 B |" + "  ".join([" .."] + [".."] * 9)
    assert sum("-" in row for row in rows) == 2 and rows[-2][12 + 20] == "|" and rows[-1].split() == [
        "forward", "backward"]
    limit = next(row for row in rows if row.strip().startswith("60 B"))
    assert limit.split("|")[1].startswith("----")
    blocks = "\n".join(plot(curve, BLOCKS))
    assert "█" in blocks and "░" in blocks and "─" in blocks


def test_rich_shows_it_in_colours(free) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard", legacy_windows=False)
    console.print(free.memory(x=(ROWS, 32)))
    shown = console.file.getvalue()
    assert "█" in shown and "\x1b[34m" in shown
