"""Benchmark pages show stored results: docs/results has the JSON of each, and the page is what it renders to."""
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from anyshape_bench.experiments.ablation.experiment import Ablation
from anyshape_bench.experiments.memory_budget.experiment import MemoryBudget
from anyshape_bench.experiments.planning.experiment import Planning
from anyshape_bench.experiments.routes.experiment import RoutingNetworks
from anyshape_bench.experiments.speed.experiment import Speed
from anyshape_bench.experiments.train_step.experiment import TrainSteps
from anyshape_bench.harness.experiment import Experiment

DOCS = Path(__file__).parents[1] / "docs"
STORED = DOCS / "results"

# the pages that may be there, each with the experiment that renders it
PAGES: dict[str, Experiment[Any]] = {
    "benchmarks": Speed(), "benchmarks-bfloat16": Speed(), "benchmarks-padded": Speed(),
    "benchmarks-memory": MemoryBudget(), "benchmarks-plan": Planning(), "benchmarks-step": TrainSteps(),
    "benchmarks-routes": RoutingNetworks(),
    "techniques": Ablation()}


def page_of(experiment: Experiment[Any], folder: Path) -> str:
    return experiment.report(experiment.results.load(folder), folder).page


KEPT = sorted(path.name for path in STORED.iterdir())


def test_every_page_of_figures_has_stored_results():
    pages = {path.stem for path in DOCS.glob("*.md")}
    assert {page for page in pages if page.startswith("benchmarks")} | (PAGES.keys() & pages) == set(KEPT)
    assert set(KEPT) <= PAGES.keys()


@pytest.mark.parametrize("page", KEPT)
def test_a_page_shows_its_stored_results(page):
    same = (DOCS / f"{page}.md").read_text() == page_of(PAGES[page], STORED / page)
    assert same, f"run anyshape bench --show docs/results/{page} --write-document docs/{page}.md"


def test_the_tables_of_the_readme_are_those_of_the_pages():
    part = (DOCS.parent / "README.md").read_text().split("<!-- bench:begin -->")[1].split("<!-- bench:end -->")[0]
    rows = [line for line in part.splitlines() if line.startswith("|")]
    shown = "".join((DOCS / f"{page}.md").read_text() for page in KEPT)
    assert rows and not [row for row in rows if row not in shown]
    assert re.search(r"\[docs/benchmarks\.md\]", part)
