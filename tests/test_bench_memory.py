"""`anyshape bench memory`: what a worker measures, what is shown of it, and what the command refuses."""
from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from anyshape.plan.schedule.beam_search import Problem
from anyshape.tools import cli
from anyshape_bench import add_arguments
from anyshape_bench.experiments.memory_budget import report as limits_report
from anyshape_bench.experiments.memory_budget import results as limits
from anyshape_bench.experiments.memory_budget import worker as limits_worker
from anyshape_bench.experiments.memory_budget.experiment import MemoryBudget
from anyshape_bench.experiments.memory_budget.results import Call, Choice, Epoch, Laid, Limits, Order, Ours, Row
from anyshape_bench.experiments.planning import order_search
from anyshape_bench.harness import runner
from anyshape_bench.harness import worker as process

pytestmark = [pytest.mark.unguarded, pytest.mark.usefixtures("quick_collections")]
MODEL = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)).sin())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

def net():
    return Net(), lambda rows: (torch.randn(rows, 32),), {"rows": (400, 2000)}, "train"
"""


@pytest.fixture
def job(tmp_path: Path):
    (tmp_path / "net.py").write_text(MODEL)
    return {"model": f"{tmp_path / 'net.py'}:net", "shapes": 1, "rounds": 2, "calls": 2, "epochs": 1, "planning": 2,
            "layouts": 3, "orders": 0.1, "threads": 0, "autocast": "", "backend": limits.OURS}


def test_a_way_of_pytorch_is_measured(job) -> None:
    way = "eager, layers checkpointed"
    [row] = process.run(limits_worker, job | {"way": way, "settings": asdict(limits.WAYS[way])})["rows"]
    assert row["way"] == way and row["shapes"] == [[2000]]
    assert len(row["peaks"]) == len(row["seconds"]) == 1 and row["seconds"][0] > 0


@pytest.mark.parametrize("program", limits.PROGRAMS)
def test_ours_keep_to_every_limit(job, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_worker, "COST_SECONDS", 0.0)
    job = job | {"way": limits.LIMITED, "peaks": {"eager": [1 << 40], "nothing": [1 << 10]}, "backend": program}
    found = process.run(limits_worker, job)
    taken = Limits()
    taken.take(job, found)
    rows = {row.way: row for row in taken.rows}
    assert set(rows) == {"no limit", "60% of that", "40% of that", "as eager", "as nothing", "least limit"}
    assert {row.program for row in taken.rows} == {program} == {one.program for one in taken.ours}
    assert rows["least limit"].limits == taken.ours[0].least and not rows["least limit"].error
    assert rows["as nothing"].error.startswith("set memory_limit") and not rows["as nothing"].seconds
    row = rows["60% of that"]
    assert not row.error and row.again[0] > 0 and row.predicted[0] <= row.limits[0] < rows["no limit"].predicted[0]
    [ours] = taken.ours
    assert ours.least[0] <= row.limits[0] and len(ours.unlimited) == 1 and not ours.calls


@pytest.mark.parametrize("program", limits.PROGRAMS)
def test_calls_keep_to_every_limit(job, program: str) -> None:
    found = process.run(limits_worker, job | {"way": "calls", "backend": program})["ours"]
    calls = [Call(**call) for call in found["calls"]]
    assert len(calls) == 2 * len(limits.CALL_SHARES) and len({tuple(call.shape) for call in calls}) == 2
    assert all(call.refused or (call.need <= call.limit and call.arena) for call in calls)
    assert any(not call.refused and call.limit < 0.7 * max(one.limit for one in calls) for call in calls)
    assert any(call.refused for call in calls)
    if program == limits.OURS:  # a whole step is fullest where something is computed again
        assert all(call.bound > call.limit for call in calls if call.refused and call.limit < 0.5 * calls[0].limit)


def test_what_is_decided_before_a_call(job, tmp_path: Path) -> None:
    """Every part but the ways and epochs, in one process each; what was known on the way is in its file."""
    answer = tmp_path / "answer.record"
    parts = {part: process.run(limits_worker, job | {"way": part}, answer)["ours"]
             for part in ("planning", "layouts", "orders")}
    assert json.loads(answer.read_text())["finished"] is True
    choices = [Choice(**one) for one in parts["planning"]["planning"]]
    assert len(choices) == 2 * len(limits.PLANNED_SHARES) and all(one.seconds > 0 for one in choices)
    assert not any(one.refused for one in choices if one.share == 1)
    laid = [Laid(**one) for one in parts["layouts"]["layouts"]]
    assert len(laid) == 6 and len({one.program for one in laid}) == 2
    assert all(one.alive <= one.arena < 1.1 * one.alive for one in laid)
    orders = [Order(**one) for one in parts["orders"]["orders"]]
    assert len(orders) == 2 and all(0 < one.best <= one.ours for one in orders)


def test_searches_find_a_better_order() -> None:
    """Three wide values, each made and then summed: the order of the model has them all at once."""
    wide, sums = [0, 1, 2], [3, 4, 5]
    users = [1 << k | 1 << k + 3 for k in wide] + [1 << k for k in sums]
    problem = Problem([0, 0, 0, 1, 2, 4], [[3], [4], [5], [], [], []], [[0], [1], [2], [0, 3], [1, 4], [2, 5]], users,
                      [100] * 3 + [1] * 3, [0] * 6, set(), {3, 4, 5}, [[] for _ in range(6)], 0, [False] * 6)
    assert problem.peak(wide + sums) == 301
    for name, search in order_search.SEARCHES.items():
        order = search(problem, order_search.Clock(time.process_time(), 5.0, 103), random.Random(name))
        assert sorted(order) == wide + sums and problem.peak(order) == 103, name


def test_what_is_named_is_measured() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    def options(text: str) -> dict[str, object]:
        return MemoryBudget().options(parser.parse_args(["memory", "demo-llama", *text.split()]))

    def chosen(text: str) -> dict[str, object]:
        found = options(text)
        return {name: found[name] for name in ("ways", *limits.PARTS) if found[name]}

    usual = {"ways": True} | {part: number for part, number in limits.PARTS.items() if part != "orders"}
    assert chosen("") == usual
    assert chosen("--calls 0") == {name: value for name, value in usual.items() if name != "calls"}
    assert chosen("--planning") == {"planning": limits.PARTS["planning"]}
    assert chosen("--ways --epochs 3 --orders") == {"ways": True, "epochs": 3, "orders": limits.PARTS["orders"]}
    jobs = list(MemoryBudget().jobs(options("--calls --layouts 7 --backends eager,anyshape-step"), Limits(), Path()))
    assert [(job["way"], job[job["way"]]) for job in jobs] == [("calls", 200), ("layouts", 7)]
    assert {job["backend"] for job in jobs} == {"anyshape-step"}


def some() -> Limits:
    rows = [Row("net", "eager", [[8]], [1000], [0.1]), Row("net", "eager, layers checkpointed", [[8]], [500], [0.15]),
            Row("net", "inductor", [[8]], [900], [0.08]), Row("net", "inductor, budget 0.5", error="it died"),
            Row("net", "no limit", [[8]], [600], [0.05], [0], [590], [0]),
            Row("net", "60% of that", [[8]], [350], [0.0525], [354], [340], [3]),
            Row("net", "as eager, layers checkpointed", [[8]], [500], [0.051], [500], [450], [1]),
            Row("net", "as inductor", error="set memory_limit to 7 or more")]
    calls = [Call([8], 600, 590, 600), Call([8], 300, 310, 600 + limits_report.SLACK, arena=False),
             Call([8], 100, refused=True, bound=120)]
    epochs = [Epoch("no limit", 2, 900, 100, True, 1.0, 800), Epoch("padded", 2, 900, 100, True, 2.0, 900),
              Epoch("limit", 2, 900, 100, True, 1.0, 800), Epoch("no limit", 4, 900, 200, False, 2.0, 1600),
              Epoch("padded", 4, 900, 200, True, 4.0, 1000), Epoch("limit", 4, 900, 200, True, 3.2, 900)]
    choices = [Choice([8], 1.0, 0.0005), Choice([8], 0.6, 0.002), Choice([8], 0.4, 0.003, True)]
    laid = [Laid("forward", [8], 102, 100), Laid("backward", [8], 100, 100)]
    orders = [Order("forward", [8], 100, 100, "the bound", 0.0), Order("backward", [8], 101, 100, "moves", 1.0)]
    ours = Ours("net", [200], [[0.101, 0.1]], calls, epochs, choices, laid, orders)
    return Limits({}, {"rounds": 5, "unfinished": []}, rows, [ours])


def test_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = some()
    aims = {name: value for name, _, value in limits_report.aims(found, "net")}
    assert aims["peak without a limit, of Inductor's"] == "0.67x"
    assert aims["throughput at 60% of the peak"] == "0.95x"
    assert aims["smallest limit, of the peak with layers checkpointed"] == "0.40x"
    assert aims["time at the peak of eager, layers checkpointed"] == "0.34x"
    assert aims["cost of a limit that is not reached"] == "+1.0 %"
    assert aims["arena: predicted and counted"] == "1 of 2 calls"
    assert aims["steps over the limit, by the records"] == "1 of 2 at 1 shapes"
    assert aims["refused before they began"] == "1, 1 of them impossible by a bound"
    assert aims["words a second in batches of 2, of what is done without a limit"] == "1.00x"
    assert aims["words a second in batches of 4, of padded ones"] == "1.25x"
    assert aims["peak in batches of 4, of padded ones"] == "0.90x"
    assert aims["planning of a shape never seen, median"] == "1.25 ms"
    assert aims["the same, worst"] == "2 ms; a refusal 3 ms at most"
    assert aims["layouts above the bytes alive, mean over 1 shapes"] == "1.00 %"
    assert aims["layouts above the bytes alive, worst"] == "2.00 %"
    assert aims["bytes alive in our order, of the best of four searches"] == "1.010x (backward, moves)"
    assert aims["steps over the limit, by the C library's blocks"] == "1 of 2"
    wrong = limits_report.problems(found)
    assert [text.split(":")[0] for text in wrong] == ["FAILED", "OVER", "WRONG"]
    found.save(tmp_path)
    assert Limits.load(tmp_path) == found
    found.take({"model": "net", "way": "layouts", "backend": limits.OURS},
               {"ours": asdict(Ours("net")), "finished": False})
    assert found.options["unfinished"] == ["net: anyshape, layouts"]
    assert not found.ours[0].layouts and found.ours[0].orders
    assert cli.main(["bench", "memory", "--show", str(tmp_path), "--write-document", str(tmp_path / "m.md")]) == 1
    text = (tmp_path / "m.md").read_text()
    assert "anyshape, 60% of that" in text and "What went wrong" in text and "it died" in capsys.readouterr().out
    assert not limits_report.report(Limits()).tables


def test_the_command_refuses_what_it_cannot_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "memory"]) == 2
    assert "no model to measure under limits" in capsys.readouterr().err
    assert cli.main(["bench", "memory", "no-such-model"]) == 2
    assert cli.main(["bench", "memory", "--show", str(tmp_path)]) == 2


def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what the process that was ended had found, and what an earlier run left in the folder."""
    done = []

    def run(self: runner.Runner, one: dict, tell: object) -> dict:
        row = asdict(Row("mlp", one["way"], [[1]], [1], [1.0]))
        if done:
            self.answer(one).write_text(json.dumps({"rows": [row], "ours": None, "finished": False}))
            raise KeyboardInterrupt
        done.append(one["way"])
        return {"rows": [row], "ours": None}

    out = tmp_path / "out"
    Limits(rows=[Row("llama", "eager"), Row("mlp", "eager", error="it died")]).save(out)
    monkeypatch.setattr(runner.Runner, "run", run)
    assert cli.main(["bench", "memory", "mlp", "--out", str(out)]) == 130
    found = Limits.load(out)
    second = list(limits.WAYS)[1]
    assert [(row.model, row.way) for row in found.rows] == [("llama", "eager"), ("mlp", "eager"), ("mlp", second)]
    assert found.options["interrupted"] and found.options["unfinished"] == [f"mlp: {second}"]
    assert not found.rows[1].error
