"""`anyshape bench memory`: what a worker measures, what is shown of it, and what the command refuses."""
from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from anyshape.tools import cli
from anyshape.tools.bench import limits, limits_report, limits_worker, runner
from anyshape.tools.bench.limits import Call, Limits, Ours, Row

pytestmark = pytest.mark.unguarded
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
        self.layers = nn.ModuleList(Layer() for _ in range(8))

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
    return {"model": f"{tmp_path / 'net.py'}:net", "shapes": 1, "rounds": 2, "calls": 1, "threads": 0, "autocast": ""}


def test_a_way_of_pytorch_is_measured(job) -> None:
    way = "eager, layers checkpointed"
    [row] = limits_worker.run(job | {"way": way, "settings": asdict(limits.WAYS[way])})["rows"]
    assert row["way"] == way and row["shapes"] == [[2000]]
    assert len(row["peaks"]) == len(row["seconds"]) == 1 and row["seconds"][0] > 0


def test_ours_keep_to_every_limit(job) -> None:
    found = limits_worker.run(job | {"way": limits.OURS, "peaks": {"eager": [1 << 40], "nothing": [1 << 10]}})
    taken = Limits()
    taken.take(job, found)
    rows = {row.way: row for row in taken.rows}
    assert set(rows) == {"no limit", "60% of that", "40% of that", "as eager", "as nothing"}
    assert rows["as nothing"].error.startswith("set memory_limit") and not rows["as nothing"].seconds
    row = rows["60% of that"]
    assert not row.error and row.again[0] > 0 and row.predicted[0] <= row.limits[0] < rows["no limit"].predicted[0]
    [ours] = taken.ours
    assert len(ours.calls) == len(limits.CALL_SHARES) and len(ours.planning) >= 1 and min(ours.planning) > 0
    assert all(call.refused or (call.need <= call.limit and call.arena) for call in ours.calls)
    assert any(not call.refused and call.limit < 0.7 * max(one.limit for one in ours.calls) for call in ours.calls)
    assert ours.least[0] <= row.limits[0]


def some() -> Limits:
    rows = [Row("net", "eager", [[8]], [1000], [0.1]), Row("net", "eager, layers checkpointed", [[8]], [500], [0.15]),
            Row("net", "inductor", [[8]], [900], [0.08]), Row("net", "inductor, budget 0.5", error="it died"),
            Row("net", "no limit", [[8]], [600], [0.05], [0], [590], [0]),
            Row("net", "60% of that", [[8]], [350], [0.0525], [354], [340], [3]),
            Row("net", "as eager, layers checkpointed", [[8]], [500], [0.051], [500], [450], [1]),
            Row("net", "as inductor", error="set memory_limit to 7 or more")]
    calls = [Call([8], 600, 590, 600), Call([8], 300, 310, 600 + limits_report.SLACK, arena=False),
             Call([8], 100, refused=True)]
    return Limits({}, {"rounds": 5, "calls": 1}, rows, [Ours("net", [200], [[0.101, 0.1]], calls, [0.0005, 0.002])])


def test_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = some()
    aims = {name: value for name, _, value in limits_report.aims(found, "net")}
    assert aims["peak without a limit, of Inductor's"] == "0.67x"
    assert aims["throughput at 60% of the peak"] == "0.95x"
    assert aims["smallest limit, of the peak with layers checkpointed"] == "0.40x"
    assert aims["time at the peak of eager, layers checkpointed"] == "0.34x"
    assert aims["cost of a limit that is not reached"] == "+1.0 %"
    assert aims["arena: predicted and counted"] == "1 of 2 calls"
    assert aims["steps over the limit, by the records"] == "1 of 2, 1 refused before they began"
    assert aims["steps over the limit, by the C library's blocks"] == "1 of 2"
    wrong = limits_report.problems(found)
    assert [text.split(":")[0] for text in wrong] == ["FAILED", "OVER", "WRONG"]
    found.save(tmp_path)
    assert limits.load(tmp_path) == found
    assert cli.main(["bench", "memory", "--show", str(tmp_path), "--write-document", str(tmp_path / "m.md")]) == 1
    text = (tmp_path / "m.md").read_text()
    assert "anyshape, 60% of that" in text and "What went wrong" in text and "it died" in capsys.readouterr().out
    limits_report.show(Limits(), Console(quiet=True))


def test_the_command_refuses_what_it_cannot_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "memory"]) == 2
    assert "no model to measure under limits" in capsys.readouterr().err
    assert cli.main(["bench", "memory", "no-such-model"]) == 2
    assert cli.main(["bench", "memory", "--show", str(tmp_path)]) == 2


def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def run(self: runner.Runner, one: dict, tell: object) -> dict:
        if done:
            raise KeyboardInterrupt
        done.append(one["way"])
        return {"rows": [asdict(Row("mlp", one["way"], [[1]], [1], [1.0]))], "ours": None}

    monkeypatch.setattr(runner.Runner, "run", run)
    assert cli.main(["bench", "memory", "mlp", "--out", str(tmp_path / "out")]) == 130
    found = limits.load(tmp_path / "out")
    assert [row.way for row in found.rows] == ["eager"] and found.options["interrupted"]
