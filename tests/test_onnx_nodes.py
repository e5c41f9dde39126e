"""The ONNX node tests with every dim symbolic: a sample by default, all with `-m full`, which writes their table."""
from __future__ import annotations

import json
import random
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")

import onnx_nodes  # noqa: E402

DOCS = Path(__file__).parents[1] / "docs"
STORED = DOCS / "onnx-nodes.json"
BEGIN, END = "<!-- nodes:begin -->", "<!-- nodes:end -->"
SAMPLE, SEED = 60, 24


def stored() -> dict[str, Any]:
    return json.loads(STORED.read_text())  # type: ignore[no-any-return]


def table(found: dict[str, Any]) -> str:
    """The part of docs/onnx.md that is made from stored results."""
    rows, scope = found["cases"].values(), [one for one in found["cases"].values() if one["in_scope"]]
    right = sum(not one["wrong"] for one in rows)
    inside = sum(not one["wrong"] for one in scope)
    lines = ["", f"onnx {found['onnx']}: {right} of {len(rows)} node tests pass; of those in scope (tensors of dtypes "
             f"that PyTorch has, no text, no lists, no training, no classical machine learning) {inside} of "
             f"{len(scope)}, {100 * inside / len(scope):.1f} %.", "", "| operator | pass | of |", "|---|---:|---:|"]
    kinds: dict[str, list[bool]] = defaultdict(list)
    for one in rows:
        for name in one["operators"]:
            kinds[name].append(not one["wrong"])
    lines += [f"| {name} | {sum(kinds[name])} | {len(kinds[name])} |" for name in sorted(kinds)]
    lines += ["", "What fails:", ""]
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, one in found["cases"].items():
        if one["wrong"]:
            reasons[one["wrong"]].append(name.removeprefix("test_"))
    lines += [f"- {why}: {', '.join(f'`{name}`' for name in names)}" for why, names in sorted(reasons.items())]
    return "\n".join([*lines, ""])


def outcome(name: str) -> str:
    """What is wrong with a case, in a short sentence; empty where nothing is."""
    def late(*_: Any) -> None:
        raise TimeoutError("it takes more than 120 s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    try:
        return onnx_nodes.run_case(onnx_nodes.cases()[name])
    except Exception as error:  # whatever a case raises is its outcome
        return " ".join(str(error).split("\n")[0].split())[:100]
    finally:
        signal.alarm(0)


def sample() -> list[str]:
    passing = sorted(name for name, one in stored()["cases"].items() if one["in_scope"] and not one["wrong"])
    return random.Random(SEED).sample(passing, SAMPLE)


@pytest.mark.parametrize("name", sample() if STORED.exists() else [])
def test_a_case_passes_with_symbolic_dims(name):
    assert outcome(name) == ""


def test_whole_numbers_that_pytorch_has_not_are_left_to_the_host() -> None:
    """Their floats cannot be made in a program: such a node is no part of it, and nothing is deferred."""
    for name in ("test_dequantizelinear_uint4", "test_dequantizelinear_e4m3fn", "test_dequantizelinear_axis",
                 "test_dequantizelinear_blocked", "test_dequantizelinear_uint16"):
        assert not onnx_nodes.run_case(onnx_nodes.cases()[name]), name


def test_the_page_shows_the_stored_results():
    text = (DOCS / "onnx.md").read_text()
    assert text.split(BEGIN)[1].split(END)[0] == "\n" + table(stored()) + "\n", f"run pytest -m full {__file__}"


@pytest.mark.full
def test_all_cases():
    import onnx
    found = {}
    for name, case in sorted(onnx_nodes.cases().items()):
        found[name] = {"in_scope": onnx_nodes.in_scope(case), "wrong": outcome(name),
                       "operators": sorted({node.op_type for node in case.model.graph.node})}
    STORED.write_text(json.dumps({"onnx": onnx.__version__, "cases": found}, indent=0, sort_keys=True) + "\n")
    page = DOCS / "onnx.md"
    before, rest = page.read_text().split(BEGIN)
    page.write_text(before + BEGIN + "\n" + table(stored()) + "\n" + END + rest.split(END)[1])
    scope = [one for one in found.values() if one["in_scope"]]
    assert sum(not one["wrong"] for one in scope) >= 0.95 * len(scope)
    assert sum(not one["wrong"] for one in found.values()) >= 1640
