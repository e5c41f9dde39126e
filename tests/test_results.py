"""Benchmark pages show stored results: docs/results has the JSON of each, and the page is what it renders to."""
from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from anyshape_bench.experiments.ablation import report as techniques_report
from anyshape_bench.experiments.ablation import worker as techniques
from anyshape_bench.experiments.memory_budget import report as limits_report
from anyshape_bench.experiments.memory_budget import results as limits
from anyshape_bench.experiments.planning import comparison as plan
from anyshape_bench.experiments.planning import report as plan_report
from anyshape_bench.experiments.roofline import results as roofline_results
from anyshape_bench.experiments.speed import report, results
from anyshape_bench.experiments.train_step import report as step_report
from anyshape_bench.experiments.train_step import results as step

DOCS = Path(__file__).parents[1] / "docs"
STORED = DOCS / "results"
NOT_KEPT = "its results were not kept"  # what a page without stored results says


def models(folder: Path) -> str:
    return report.document(results.load(folder), roofline_results.beside(folder))


PAGES: dict[str, Callable[[Path], str]] = {
    "benchmarks": models,
    "benchmarks-bfloat16": models,
    "benchmarks-padded": models,
    "benchmarks-memory": lambda folder: limits_report.document(limits.load(folder)),
    "benchmarks-plan": lambda folder: plan_report.document(plan.load(folder)),
    "benchmarks-step": lambda folder: step_report.document(step.load(folder)),
    "techniques": lambda folder: techniques_report.document(techniques.load(folder)),
}


def test_every_page_of_figures_is_known():
    assert {path.stem for path in DOCS.glob("benchmarks*.md")} | {"techniques"} == PAGES.keys()
    assert {path.name for path in STORED.glob("*")} <= PAGES.keys()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_its_stored_results(page):
    text = (DOCS / f"{page}.md").read_text()
    if (STORED / page).is_dir():
        assert text == PAGES[page](STORED / page), f"run anyshape bench --show docs/results/{page} --write-document"
    else:
        first = " ".join(text.split("\n\n")[1].split())
        assert NOT_KEPT in first, "a page without stored results says so in its first paragraph"


def test_the_tables_of_the_readme_are_those_of_the_pages():
    part = (DOCS.parent / "README.md").read_text().split("<!-- bench:begin -->")[1].split("<!-- bench:end -->")[0]
    rows = [line for line in part.splitlines() if line.startswith("|")]
    shown = "".join((DOCS / f"{page}.md").read_text() for page in PAGES)
    assert rows and not [row for row in rows if row not in shown]
    assert re.search(r"\[docs/benchmarks\.md\]", part)
