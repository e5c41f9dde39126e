"""`anyshape bench step`: what a worker measures, how losses are compared, what adds up, and what is shown of it."""
from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest

from anyshape.tools import cli
from anyshape_bench import add_arguments
from anyshape_bench.experiments.train_step import experiment as step_experiment
from anyshape_bench.experiments.train_step import report as step_report
from anyshape_bench.experiments.train_step import results as step
from anyshape_bench.experiments.train_step import worker as step_worker
from anyshape_bench.experiments.train_step.experiment import TrainSteps
from anyshape_bench.experiments.train_step.results import StepRecord, Steps
from anyshape_bench.harness import driver, runner
from anyshape_bench.harness import worker as process
from anyshape_bench.models import bench_models

pytestmark = [pytest.mark.unguarded, pytest.mark.usefixtures("quick_collections")]
MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return (x - self.down(torch.tanh(self.up(x)))).square().mean()

def net():
    return Net(), lambda rows: (torch.randn(rows, 16),), {"rows": (2, 4000)}, "train"

def forward_only():
    return Net(), lambda rows: (torch.randn(rows, 16),), {"rows": (2, 50)}
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(MODEL)
    return f"{tmp_path / 'net.py'}:net"


def options(text: str = "") -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return TrainSteps().options(parser.parse_args(["step", *text.split()]))


def jobs(chosen: dict[str, Any]) -> list[dict[str, Any]]:
    return list(TrainSteps().jobs(chosen, Steps(), Path()))


def measured(**chosen: Any) -> Steps:
    """What the processes would find, in this one; as JSON has it."""
    found = Steps()
    for job in jobs(options() | chosen):
        TrainSteps().take(found, job, json.loads(json.dumps(process.run(step_worker, job))))
    return found


def test_the_time_of_a_whole_step_is_measured(net: str) -> None:
    [timed] = measured(models=[net], backends=[step.WHOLE], shapes=4, memory=False).records
    assert not timed["error"] and timed["stats"]["uncompiled"] == 0 and timed["programs"] > 0
    assert len(timed["fresh"]) == 2 and len(timed["repeated"]) == 4 and timed["first_step"] > 0


def test_a_whole_step_has_eagers_losses(net: str) -> None:
    found = measured(models=[net], backends=[step.EAGER, step.WHOLE], rounds=0, shapes=4, memory_shapes=2,
                     autocast="bfloat16", accumulate=2)
    assert not step_report.problems(found)
    eager, whole = found.part("bfloat16").records
    for counted in (eager, whole):
        assert counted["memory_shapes"] == [[4000], [2], [4000]] and len(counted["losses"]) == 2 + 2 * 3
        assert counted["moved"] > 0 and all(map(math.isfinite, counted["losses"]))
        assert counted["losses"][3] < counted["losses"][2]  # the same batch again, after an update
    assert whole["checked"] and whole["stats"]["uncompiled"] == 0
    assert len(eager["exact"]) == 8 and eager["exact"] != eager["losses"]
    several = found.accumulated(net, "bfloat16")
    assert several is not None and several["accumulate"] == 2 and several["memory_shapes"] == [[4000]]
    assert several["gradients"] == 4 * (16 * 64 + 64 + 64 * 16 + 16)


def test_a_model_that_does_not_train_is_refused(net: str) -> None:
    job = jobs(options() | {"models": [net.replace(":net", ":forward_only")], "backends": [step.WHOLE]})[0]
    assert "does not train" in process.run(step_worker, job)["error"]


@pytest.mark.parametrize("name", ["vit-train", "bert-train"])
def test_models_of_inference_have_one_that_trains(name: str) -> None:
    assert step_experiment.training(name.removesuffix("-train")) == step_experiment.training(name) == name
    model = bench_models.load(name)
    made = model.make(lambda module: module)
    inputs = model.inputs(tuple(map(min, zip(*model.shapes, strict=True))))
    first, second, third = (float(made(inputs)) for _ in range(3))
    assert third < second < first


def test_losses_are_compared() -> None:
    def differ(losses: list[float], moved: float = 1.0, exact: tuple[float, ...] = ()) -> list[str]:
        return step.differences({"losses": losses, "moved": moved},
                                {"losses": [2.0, 1.0], "moved": 1.0, "exact": list(exact)})

    assert not differ([2.001, 1.0])
    assert differ([2.0, 1.01]) == ["the loss of step 2 is 1.01, eager's is 1"]
    assert differ([2.0, math.nan]) == ["the loss of step 2 is nan, eager's is 1"]
    assert differ([2.0]) == ["1 losses, eager has 2"]
    assert differ([2.0, 1.0], 1.2) == ["all weights moved by 1.2, eager's by 1"]
    near = (2.02, 1.02)  # eager is off by 0.02 in lower precision
    assert not differ([2.04, 1.04], exact=near)
    assert "have an error of 0.06, eager's own is 0.02" in differ([2.08, 1.08], exact=near)[0]
    assert differ([math.nan, 1.0], exact=near)


def test_what_is_asked_for() -> None:
    assert options()["models"] == list(step_experiment.DEFAULT)
    assert options("bert llama --models vit")["models"] == ["bert-train", "llama", "vit-train"]
    assert options("--quick --accumulate 1")["models"] == [step_experiment.QUICK]
    one = options("llama --backends inductor,anyshape-step --rounds 2 --autocast bfloat16")
    assert [(job["backend"], job["mode"], job["accumulate"]) for job in jobs(one)] == [
        ("inductor", "time", 1), ("anyshape-step", "time", 1), ("anyshape-step", "time", 1), ("inductor", "time", 1),
        ("inductor", "memory", 1), ("anyshape-step", "memory", 1), ("anyshape-step", "memory", 8)]
    assert len({runner._name(job) for job in jobs(one)}) == 7  # files of their own
    assert {job["mode"] for job in jobs(options("--no-memory"))} == {"time"}


def some() -> Steps:
    """Two backends of a net and ours: eager's step takes 4 s, Inductor's 2 s but 10 s where it compiles again."""
    found = Steps({"processor": "test"}, {"rounds": 1})
    for backend, fresh, memory in ((step.EAGER, [4.0, 4.0, 4.0], [100, 120]),
                                   (step.INDUCTOR, [2.0, 10.0, 2.0], [80, 110]),
                                   (step.WHOLE, [1.0, 1.0, 1.25], [40, 77])):
        for autocast in ("", "bfloat16"):
            times, bytes_, several = _jobs(backend, autocast)
            shapes = [[8], [9], [2], [3], [11]]
            found.take(times, {"shapes": shapes, "fresh": fresh, "repeated": [2.0, *fresh, 2.0], "first_step": 3.0,
                               "threads": 2, "p50": 2.0, "p99": 3.0, "stats": {"uncompiled": 0}})
            found.take(bytes_, {"shapes": shapes, "memory_shapes": [[11], [2]], "memory": memory, "losses": [2.0, 1.0],
                                "moved": 1.0, "idle": 5, "threads": 2, "stats": {}, "exact": []})
            if backend == step.WHOLE:
                found.take(several, {"shapes": shapes, "memory": [60], "gradients": 20, "idle": 5, "threads": 2})
    return found


def _jobs(backend: str, autocast: str) -> list[dict[str, Any]]:
    times, bytes_, *_ = jobs(options() | {"models": ["net"], "backends": [backend], "autocast": autocast})
    return [times, bytes_, bytes_ | {"accumulate": 8}]


def test_what_is_aimed_at_is_reached_or_short() -> None:
    verdicts = {(one.note.split(",")[1].strip(), one.name.split(",")[0]): (one.said(one.value or 0), one.verdict())
                for one in step_report.measures(some())}
    assert verdicts["float32", "throughput at new shapes"] == ("4.31x", "reached")
    assert verdicts["float32", "the same"] == ("2.00x", "reached")  # the median of 2, 10 and 1.6
    assert verdicts["bfloat16", "the same"] == ("2.00x", "short")
    assert verdicts["float32", "peak at the greatest shape"] == ("0.50x", "reached")
    assert verdicts["float32", "greatest peak at any shape"] == ("0.70x", "short")
    assert verdicts["float32", "peak of several batches a step without one set of gradients"] == ("1.00x", "reached")
    without = some()
    without.records = [r for r in without.records if r["backend"] == step.WHOLE and r["accumulate"] == 1]
    assert {one.verdict() for one in step_report.measures(without)} == {"not measured"}


def test_runs_add_up_and_the_same_again_takes_its_place() -> None:
    found = some()
    number = len(found.records)
    [times, bytes_, _] = _jobs(step.WHOLE, "bfloat16")
    found.take(times | {"number": 0}, {"fresh": []})
    found.take(bytes_, {"error": "it died"})
    assert len(found.records) == number
    found.take(times | {"number": 1}, {})
    found.take(times | {"model": "other"}, {})
    assert len(found.records) == number + 2
    found.take(times, {})
    assert len(found.records) == number + 1  # the second round was one of the run before
    assert [text for text in step_report.problems(found) if "it died" in text] == [
        "FAILED: net on anyshape-step, bfloat16: it died"]
    assert set(StepRecord.__dataclass_fields__) == set(found.records[0])


def test_stored_results_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some().save(tmp_path)
    document = tmp_path / "docs" / "benchmarks-step.md"
    assert cli.main(["bench", "step", "--show", str(tmp_path), "--markdown", "--write-document", str(document)]) == 0
    assert "net, bfloat16" in capsys.readouterr().out
    text = document.read_text()
    assert "processor: test" in text and "## net, float32" in text
    assert "| anyshape-step | 3 s | 3.69x | 4.31x | 2.00x | 2.21x | 2.48x | 2 s | 3 s |" in text
    assert "| anyshape-step, 8 batches | - | 0.0 MB | 0.75x | - | - | 0.0 MB | - |" in text
    wrong = some()
    wrong.records[-2]["losses"] = [2.0, 1.5]
    wrong.save(tmp_path)
    assert cli.main(["bench", "step", "--show", str(tmp_path)]) == 1
    assert cli.main(["bench", "step", "--show", str(tmp_path / "docs")]) == 2


def test_the_chart_has_all_dtypes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = step_report.chart(some(), tmp_path / "step.png")
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [["nothing"], ["llama", "--backends", "eager,aot_eager"],
                                       ["llama", "--backends", ""]])
def test_wrong_arguments_are_explained(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "step", *arguments]) == 2
    assert "do:" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_end_to_end_and_interrupted(net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.Runner, "run", lambda self, job, tell: process.run(step_worker, job, self.answer(job)))
    arguments = ["bench", "step", net, "--backends", "eager", "--shapes", "3", "--out",
                 str(tmp_path / "out")]
    assert cli.main([*arguments, "--no-memory"]) == 0
    [record] = Steps.load(tmp_path / "out").records
    assert not record["error"] and len(record["fresh"]) == 1

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner.Runner, "run", interrupted)
    assert cli.main(arguments) == driver.INTERRUPTED
    stored = Steps.load(tmp_path / "out")
    assert stored.options["interrupted"] and stored.records == [record]
