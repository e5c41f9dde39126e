"""Benchmark pages show stored results: docs/results has the JSON of each, and the page is what it renders to."""
from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import versions
from anyshape_bench.experiments import (
    deployed,
    exchange,
    gpu_offline,
    jax_ffi,
    onnx_models,
    package_models,
    processes,
    serving,
    stablehlo_cases,
    strategies,
    warm_start,
)
from anyshape_bench.experiments.ablation.experiment import Ablation
from anyshape_bench.experiments.memory_budget.experiment import MemoryBudget
from anyshape_bench.experiments.planning.experiment import Planning
from anyshape_bench.experiments.routes.experiment import RoutingNetworks
from anyshape_bench.experiments.speed.experiment import Speed
from anyshape_bench.experiments.train_step.experiment import TrainSteps
from anyshape_bench.harness.experiment import Experiment

DOCS = Path(__file__).parents[1] / "docs"
STORED = DOCS / "results"


def of(experiment: Experiment[Any]) -> Callable[[Path], str]:
    return lambda folder: experiment.report(experiment.results.load(folder), folder).page


# the pages that may be there, each with what renders its folder of results
PAGES: dict[str, Callable[[Path], str]] = {
    "benchmarks": of(Speed()), "benchmarks-zen4": of(Speed()), "benchmarks-intel": of(Speed()),
    "benchmarks-bfloat16": of(Speed()), "benchmarks-padded": of(Speed()),
    "benchmarks-memory": of(MemoryBudget()), "benchmarks-plan": of(Planning()), "benchmarks-step": of(TrainSteps()),
    "benchmarks-routes": of(RoutingNetworks()), "techniques": of(Ablation()),
    "benchmarks-processes": lambda folder: processes.page(json.loads((folder / "processes.json").read_text())),
    "benchmarks-strategies": lambda folder: strategies.page(json.loads((folder / "strategies.json").read_text())),
    "models": lambda folder: package_models.page(json.loads((folder / "models.json").read_text())),
    "versions": versions.page}


# tables inside other pages: the page, and what renders the one file of the folder
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "serve": ("deploy.md", serving.table), "deployed": ("deploy.md", deployed.table),
    "exchange": ("distributed.md", exchange.table),
    "gpu": ("gpu.md", gpu_offline.table), "gpu-device": ("gpu.md", gpu_offline.device_tables),
    "warm-start": ("using.md", warm_start.table), "jax-ffi": ("jax.md", jax_ffi.table),
    "onnx-models": ("onnx.md", onnx_models.table), "stablehlo": ("jax.md", stablehlo_cases.table)}

KEPT = sorted(path.name for path in STORED.iterdir() if path.name not in TABLES)


@pytest.mark.parametrize("folder", TABLES)
def test_a_table_inside_a_page_shows_its_stored_results(folder):
    page, table = TABLES[folder]
    file, = (STORED / folder).iterdir()
    assert table(json.loads(file.read_text())) in (DOCS / page).read_text()


def test_every_page_of_figures_has_stored_results():
    pages = {path.stem for path in DOCS.glob("*.md")}
    assert {page for page in pages if page.startswith("benchmarks")} | (PAGES.keys() & pages) == set(KEPT)
    assert set(KEPT) <= PAGES.keys()


@pytest.mark.parametrize("page", KEPT)
def test_a_page_shows_its_stored_results(page):
    same = (DOCS / f"{page}.md").read_text() == PAGES[page](STORED / page)
    assert same, "run python tests/versions.py --show" if page == "versions" else \
        f"run anyshape bench --show docs/results/{page} --write-document docs/{page}.md"


def test_the_tables_of_the_readme_are_those_of_the_pages():
    part = (DOCS.parent / "README.md").read_text().split("<!-- bench:begin -->")[1].split("<!-- bench:end -->")[0]
    rows = [line for line in part.splitlines() if line.startswith("|")]
    shown = "".join((DOCS / f"{page}.md").read_text() for page in KEPT)
    assert rows and not [row for row in rows if row not in shown]
    assert re.search(r"\[docs/benchmarks\.md\]", part)


def test_aims_of_many_devices_stand_beside_stored_results() -> None:
    """The table of docs/distributed.md: a row for each measure, with the numbers of the pages that are made of them."""
    text = (DOCS / "distributed.md").read_text()
    table = text.partition("## Aims, and what was found")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) == 12 and {row[3].strip().split()[0].strip(",") for row in rows} == {"real", "simulated"}
    page = (DOCS / "benchmarks-processes.md").read_text()
    found = dict(re.findall(r"^\| (.+?) \| [\d.]* \| ([\d.]+) \|$", page, re.MULTILINE))
    measured = {name.partition(" against")[0]: value for name, value in found.items()}
    for wanted in ("throughput on new shapes", "peak of a rank", "exposed communication"):
        values = re.findall(r"\d\.\d\d", next(row[2] for row in rows if wanted in row[0]))
        assert values == [measured[f"{kind}: {wanted}"] for kind in ("ddp", "fsdp")], wanted
    simulated = (DOCS / "benchmarks-strategies.md").read_text()
    for wanted, said in (("published", r"error is ([\d.]+%) in the median and ([\d.]+%)"),
                         ("by hand", r"plan by hand fits: (\d\.\d+); least (\d\.\d+)"),
                         ("search time", r"in (\d+ s) of one processor.* at most ([\d.]+%)"),
                         ("scaling", r"FSDP, merged, early \| ([\d.]+)(?s:.*)FSDP, neither \| ([\d.]+)")):
        cell = next(row[2] for row in rows if wanted in row[0])
        numbers = re.search(said, simulated)
        assert numbers is not None and all(one in cell for one in numbers.groups()), (wanted, cell)
