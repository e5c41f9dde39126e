"""A forward and its backward are compiled as one unit: each graph is translated and planned once, and what was compiled
ahead is known again by its graph."""
from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import anyshape
from anyshape.compiler import driver
from anyshape.frontend.capture.dynamo_backend import FallbackWarning
from anyshape.frontend.programs import compile_program
from anyshape.frontend.programs.session import is_copy
from anyshape.ir.graph import Graph
from anyshape.plan.ir.program import parts_of
from roads import compilation_of

LIMITS = {"free": {}, "limited": {"memory_limit": "1GiB"}}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often graphs were translated and planned."""
    found: Counter[str] = Counter()
    translate, plan = compile_program.to_graph, driver.plan_graph

    def translated(gm: Any, name: str, *more: Any) -> Any:
        found[f"translated {name}"] += 1
        return translate(gm, name, *more)

    def planned(graph: Graph, *more: Any) -> Any:
        found[f"planned {graph.name}"] += 1
        return plan(graph, *more)

    monkeypatch.setattr(compile_program, "to_graph", translated)
    monkeypatch.setattr(driver, "plan_graph", planned)
    return found


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("disable", ["", "fast_dispatch"])  # without it, torch hands a copy of the backward on
def test_each_half_is_translated_and_planned_once(done: Counter[str], limit: str, disable: str) -> None:
    ours = net()
    fast = anyshape.compile(ours, strict=True, disable=disable, **LIMITS[limit])
    for rows in (3, 5, 1):
        x = torch.randn(rows, 8)
        fast(x).square().sum().backward()
    assert done == Counter(f"{what} 0_{half}" for what in ("translated", "planned") for half in ("forward", "backward"))
    assert not compilation_of(fast).prepared
    forward, backward = (one.executable for one in compilation_of(fast).programs)
    assert backward.limit is None and (forward.limit is not None) == bool(LIMITS[limit])
    if forward.limit is not None:
        assert forward.limit.backward is backward and backward.specializer.keeps.forward is forward.plan


@pytest.mark.parametrize("limit", LIMITS)
def test_so_is_each_half_of_a_whole_step(done: Counter[str], limit: str) -> None:
    ours = net()
    step = anyshape.train_step(ours, lambda model, x: model(x).square().mean(),
                               torch.optim.SGD(ours.parameters(), lr=0.1), strict=True, **LIMITS[limit])
    for rows in (3, 5, 1):
        step(torch.randn(rows, 8))
    assert done == Counter(f"{what} 0_{half}" for what in ("translated", "planned") for half in ("forward", "backward"))
    forward, backward = (one.executable for one in step.programs)
    assert forward.specializer.joined is not None and forward.specializer.joined is backward.specializer.joined


def test_a_half_that_fails_leaves_the_other_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = driver.plan_graph

    def failing(graph: Graph, *more: Any) -> Any:
        if "backward" in graph.name:
            raise KeyError("broken on purpose")
        return plan(graph, *more)

    monkeypatch.setattr(driver, "plan_graph", failing)
    monkeypatch.setattr("anyshape.frontend.diagnostics.repro.write", lambda request, error: "")
    ours = net()
    theirs = copy.deepcopy(ours)
    step = anyshape.train_step(ours, lambda model, x: model(x).square().mean(),
                               torch.optim.SGD(ours.parameters(), lr=0.1))
    x = torch.randn(3, 8)
    with pytest.warns(FallbackWarning, match=r"could not compile program 0\.backward"):
        step(x)
    theirs(x).square().mean().backward()
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, its)
    assert [one.name for one in step.programs] == ["0.forward"]


def test_a_copy_is_known_by_its_nodes() -> None:
    gm = torch.fx.symbolic_trace(net())
    other = copy.deepcopy(gm)
    assert is_copy(gm, gm) and is_copy(gm, other)
    node = next(node for node in other.graph.nodes if node.op == "call_module")
    with other.graph.inserting_after(node):
        other.graph.call_function(torch.relu, (node,))
    assert not is_copy(gm, other)


def test_steps_know_the_items_of_the_fusion_that_they_were_made_of() -> None:
    fast = anyshape.compile(net(), strict=True)
    with torch.no_grad():
        fast(torch.randn(3, 8))
    [program] = compilation_of(fast).programs
    steps = [part for step in program.compiled.plan.steps for part in parts_of(step)]
    made = [part.origin for part in steps if getattr(part, "origin", -1) >= 0]
    assert len(made) == len(set(made)) == len(program.compiled.fusion.items)
