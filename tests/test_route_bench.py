"""`anyshape bench routes`: forms that are equal, ports that are short, what is measured, and what is shown of it."""
from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anyshape.base.errors import ConfigError
from anyshape.tools import cli
from anyshape_bench import add_arguments
from anyshape_bench.experiments.routes import rows, worker
from anyshape_bench.experiments.routes.experiment import RoutingNetworks
from anyshape_bench.experiments.routes.report import report
from anyshape_bench.experiments.routes.results import CaseRecord, Routes, WayRecord
from anyshape_bench.harness import worker as process
from anyshape_bench.routes import catalog, loads
from anyshape_bench.routes.case import Case, Forms, Study, Way

pytestmark = [pytest.mark.unguarded, pytest.mark.usefixtures("quick_collections")]
MOST_CHANGED = 24  # lines of a port
PORTS = [name for name in catalog.FILES
         if hasattr(importlib.import_module(f"anyshape_bench.routes.{name}"), "Routed")]
SMALL = ("taskmoe", "swinv2moe", "switch-8-zipf", "switch-16-one-hot")


@pytest.mark.parametrize("name", PORTS)
def test_a_port_changes_few_lines(name: str) -> None:
    module = importlib.import_module(f"anyshape_bench.routes.{name}")
    plain, routed = (inspect.getsource(one).splitlines() for one in (module.Plain, module.Routed))
    changed = [line for line in difflib.ndiff(plain, routed) if line.startswith("+ ") and line[2:].strip()]
    assert 0 < len(changed) <= MOST_CHANGED


@pytest.mark.parametrize("load", loads.LOADS)
def test_loads_are_as_named(load: str) -> None:
    for cells, branches in ((100, 8), (7, 16), (0, 3)):
        found = loads.counts(load, cells, branches)
        assert sum(found) == cells and len(found) == branches and found == sorted(found, reverse=True)
    ids = loads.routes(load, 100, 8, torch.Generator().manual_seed(1))
    assert sorted(torch.bincount(ids, minlength=8).tolist(), reverse=True) == loads.counts(load, 100, 8)
    scores = torch.softmax(torch.randn(100, 8), -1)
    assert torch.equal((scores + loads.steer(ids, 8)).argmax(-1), ids)


@pytest.mark.parametrize("name", SMALL)
def test_all_forms_of_a_network_are_equal(name: str) -> None:
    case = catalog.catalog()[name]
    assert isinstance(case, Case)
    forms = worker.made(case.make)
    ways = {way: one for way, one in forms.ways().items() if one.backend == "eager"}
    ways["routed"] = Way(lambda: forms.routed)
    running = [worker.start(way, one, forms.batches, False) for way, one in ways.items()]
    worker.compare(forms, running)
    assert {one.record.name: one.record.wrong or one.record.error for one in running} == dict.fromkeys(ways, "")
    assert len(ways) == 4


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu() * 2


def small() -> Forms:
    plain, routed = Doubling(), Doubling()
    routed.load_state_dict(plain.state_dict())
    return Forms(plain, routed, [(torch.randn(rows, 4),) for rows in (3, 5, 4, 6)],
                 active=lambda batch: 16 * len(batch[0]),
                 padded=routed, grouped_mm=Doubling(), others={"broken": Way(lambda: 1 // 0)},  # type: ignore[arg-type]
                 planned=lambda module, batches: module,
                 left_out={"inductor": "nothing to compare", "anyshape-loop": "none"})


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"small-8": Case("small-8", "switch", small, quick=True, memory=("routed", "planned")),
             "small-train": Case("small-train", "mixtral", small, trains=True, memory=()),
             "watched": Study("watched", "profiling", lambda quick: {"overhead": 0.004, "overhead_high": 0.02})}
    for module in (catalog, worker, importlib.import_module("anyshape_bench.experiments.routes.experiment")):
        monkeypatch.setattr(module, "catalog", lambda: found)


def options(text: str = "") -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return RoutingNetworks().options(parser.parse_args(["routes", *text.split()]))


def measured(text: str) -> Routes:
    """What the processes would find, in this one; as JSON has it."""
    found = Routes()
    for job in RoutingNetworks().jobs(options(text), found, Path()):
        RoutingNetworks().take(found, job, json.loads(json.dumps(process.run(worker, job))))
    return found


def test_what_is_asked_for(cases: None) -> None:
    assert options()["models"] == ["small-8", "small-train", "watched"] and options("--quick")["models"] == ["small-8"]
    assert options("--only profiling,small")["models"] == ["watched", "small-8", "small-train"]
    assert options("switch")["models"] == ["small-8"]
    with pytest.raises(ConfigError, match="vgg"):
        options("--only vgg")
    jobs = list(RoutingNetworks().jobs(options("--rounds 2"), Routes(), Path()))
    assert [(job["model"], job["mode"], job["number"], job.get("way")) for job in jobs] == [
        ("small-8", "time", 0, None), ("small-8", "time", 1, None), ("small-8", "memory", 0, "routed"),
        ("small-8", "memory", 1, "planned"), ("small-train", "time", 0, None),
        ("small-train", "time", 1, None), ("watched", "time", 0, None), ("watched", "time", 1, None)]


def test_all_ways_are_measured_and_compared(cases: None) -> None:
    found = measured("--repeats 2")
    [timed] = found.of("small-8")
    ways = {one.name: one for one in timed.ways}
    assert list(ways) == ["eager", "padded", "grouped_mm", "routed", "planned", "broken"]
    for one in timed.ways[:-1]:
        assert len(one.fresh) == 2 and [len(times) for times in one.seen] == [2, 2] and not one.error
    assert "ZeroDivisionError" in ways["broken"].error and not ways["broken"].fresh
    assert ways["routed"].programs and ways["routed"].recompiled == 0 and ways["eager"].programs is None
    assert {name for name, one in ways.items() if one.wrong} == {"grouped_mm"}  # with weights of its own
    assert timed.ours() is ways["planned"] and (timed.ratio("eager") or 0) > 0
    memory = found.of("small-8", "memory")
    assert [one.ways[0].name for one in memory] == ["routed", "planned"]
    assert all(len(one.ways[0].peaks) == 2 and one.active == [64, 96] for one in memory)
    [trained] = found.of("small-train")
    assert trained.trains and "gradient" not in ways["routed"].wrong
    assert not any(one.wrong for one in trained.ways if one.name in ("routed", "planned"))
    shown = report(found)
    assert any("grouped_mm" in text and "WRONG" in text for text in shown.problems)
    assert any("broken" in text and "FAILED" in text for text in shown.problems)
    assert "nothing to compare" in shown.page
    assert "| profiling overhead | < 1 % | at most 1.00 % | 0.40 % |" in shown.page
    assert "2.00 % | `profiling` | short |" in shown.page


def record(case: str, row: str, **times: float) -> CaseRecord:
    return CaseRecord(case, row, "time", 0, 2, ways=[
        WayRecord(name.replace("_loop", "-loop"), "x", seen=[[seconds]], fresh=[seconds],
                  recompiled=0 if name == "routed" else None) for name, seconds in times.items()])


def test_rows_say_what_is_reached() -> None:
    found = Routes(records=[
        record("switch-8-zipf", "switch", eager=4.0, padded=2.0, grouped_mm=0.9, routed=1.0),
        record("switch-8-one-hot", "switch", eager=9.0, padded=8.0, grouped_mm=2.5, routed=1.0),
        record("branches-16", "branches", eager=3.0, routed=1.0),
        record("branches-64", "branches", eager=9.0, routed=1.0),
        record("mixtral-train", "mixtral", inductor=2.0, routed=1.0)])
    found.records[0].ways[-1].peaks, found.records[0].active = [100], [99]
    found.take({"case": "switch-8-zipf", "row": "switch", "mode": "memory", "number": 3, "threads": 2, "active": [100],
                "ways": [{"name": "routed", "backend": "anyshape", "peaks": [104]}]})
    said = {one.name: (one.said(one.value), one.verdict()) for _, one in rows.measures(found) if one.value is not None}
    assert said == {
        "Switch encoder, against eager": ("6.00x", "reached"),
        "Switch encoder, against padded products": ("4.00x", "reached"),
        "Switch encoder, against grouped_mm": ("1.50x", "reached"),
        "Switch encoder, least of all cells and baselines": ("0.90x", "short"),
        "Switch encoder, peak memory of what is active": ("1.04x", "reached"),
        "64 small branches and more, against eager": ("9.00x", "reached"),
        "Mixtral, adopted, train, new loads, against Inductor": ("2.00x", "reached"),
        "Mixtral, adopted, train, recompilations": ("0", "reached")}
    assert all(row.key == key for key, row in rows.ROWS.items())
    assert {one.row for one in catalog.catalog().values()} <= rows.ROWS.keys()


def test_runs_into_a_folder_add_up(tmp_path: Path) -> None:
    first, again = (record("taskmoe", "taskmoe", eager=seconds, routed=1.0) for seconds in (2.0, 3.0))
    found = Routes(records=[first])
    found.save(tmp_path)
    found = Routes.load(tmp_path)
    ways = [{"name": one.name, "backend": "x", "seen": one.seen} for one in again.ways]
    found.take(json.loads(json.dumps({"case": "taskmoe", "row": "taskmoe", "mode": "time", "number": 0, "threads": 1,
                                      "ways": ways})))
    assert len(found.records) == 1 and found.ratio("taskmoe", "eager") == 3.0


def test_the_command_lists_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "routes", "--list"]) == 0 and "switch-256-one-hot" in capsys.readouterr().out
    assert cli.main(["bench", "routes", "--only", "resnet"]) == 2 and "resnet" in capsys.readouterr().err
