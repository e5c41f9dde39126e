"""Plans: optimisations propose, decisions are applied to a copy, reasons are printed, other models are refused."""
from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import anyshape
from anyshape import route
from anyshape.route.optimize import plan as plans
from anyshape.route.profile.tally import profile_of_loads


class Model(nn.Module):
    """Two routers, one after the other."""

    def __init__(self, branches: int = 3) -> None:
        super().__init__()
        self.first = route.Router(route.top_k(nn.Linear(4, branches), 2), [nn.Linear(4, 4) for _ in range(branches)])
        self.second = route.Router(route.top_k(nn.Linear(4, 2), 1), [nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x):
        return self.second(self.first(x))


@dataclass(frozen=True)
class Negate:
    """Negates a router's results, to be seen; refuses the second."""

    NAME: str = "negate"

    def propose(self, context):
        return [route.Decision(name, self.NAME, name == "first", "it is the first" if name == "first" else "it is not",
                               2.0, "none") for name in context.routers]

    def apply(self, model, decision, compile):
        router = route.routers_of(model)[decision.router]
        router.branches = nn.ModuleList([nn.Sequential(one, Minus()) for one in router.branches])
        return model


class Minus(nn.Module):
    def forward(self, x):
        return -x


@pytest.fixture
def negate(monkeypatch):
    monkeypatch.setattr(plans, "PASSES", (Negate(),))


def loads(model):
    return profile_of_loads(model, {"first": np.array([[1, 2, 3], [0, 6, 0]]), "second": np.array([[3, 0], [2, 1]])})


def test_routers_have_names():
    assert list(route.routers_of(Model())) == ["first", "second"]


def test_a_plan_changes_a_copy_that_shares_parameters(negate):
    model, x = Model(), torch.randn(5, 4)
    before = model(x)
    plan = route.optimize(model, loads(model))
    fast = plan.apply(model)
    assert torch.equal(model(x), before)
    assert torch.equal(fast(x), model.second(-model.first(x)))
    assert {id(one) for one in fast.parameters()} == {id(one) for one in model.parameters()}


def test_a_plan_says_why(negate):
    model = Model()
    text = str(route.optimize(model, loads(model)))
    assert "1 of 2 optimisations are taken" in text
    assert "+ negate, 2.00x expected: it is the first" in text and "- negate: it is not" in text


def test_a_plan_compiles_with_what_it_is_given(negate):
    model, seen = Model(), []
    plan = route.optimize(model, loads(model), compile=lambda module: seen.append(module) or module)
    plan.apply(model)
    assert len(seen) == 1


def test_a_plan_is_watched_where_its_cost_is_known(monkeypatch):
    @dataclass(frozen=True)
    class Costly(Negate):
        seconds: float = 1.0

        def cost(self, decision, profile):
            return self.seconds

    model = Model()
    for one, watched in ((Costly(), True), (Negate(), False), (Costly(seconds=0.0), False)):
        monkeypatch.setattr(plans, "PASSES", (one,))
        plan = route.optimize(model, loads(model))
        fast = plan.apply(model)
        assert hasattr(fast, "fallback") is watched
        assert not hasattr(plan.apply(model, drift=None), "fallback")
        if watched:
            fast.close()


def test_a_profile_of_another_model_is_refused(negate):
    model, other = Model(), Model(branches=4)
    for call in (lambda: route.optimize(other, loads(model)),
                 lambda: route.optimize(model, loads(model)).apply(other)):
        with pytest.raises(anyshape.AnyShapeError) as error:
            call()
        assert "first (3 branches)" in str(error.value) and error.value.why and error.value.do


def test_bad_arguments(negate):
    model = Model()
    with pytest.raises(anyshape.AnyShapeError, match="optimisation 'fuze' is unknown"):
        route.optimize(model, loads(model), passes=("fuze",))
    with pytest.raises(anyshape.AnyShapeError, match="memory_limit"):
        route.optimize(model, loads(model), memory_limit="much")


# ---- files and reports


def decided(model):
    return route.synthetic(model, "markov", calls=6, cells=20)


def test_a_saved_plan_is_read_back(negate, tmp_path, monkeypatch):
    from anyshape.route.optimize import plan_files
    monkeypatch.setattr(plan_files, "PASSES", (Negate(),))
    model = Model()
    plan = route.optimize(model, decided(model), memory_limit="2MB")
    route.save_plan(plan, tmp_path / "a.plan")
    again = route.load_plan(tmp_path / "a.plan")
    assert again.decisions == plan.decisions and again.memory_limit == 2_000_000 and str(again) == str(plan)
    assert torch.equal(again.apply(model)(torch.ones(2, 4)), plan.apply(model)(torch.ones(2, 4)))
    assert route.load_profile(tmp_path / "a.plan").routers == ("first", "second")  # a plan has its profile


def test_files_that_are_no_plans(negate, tmp_path):
    model = Model()
    route.save_profile(decided(model), tmp_path / "profile")
    route.save_plan(route.optimize(model, decided(model)), tmp_path / "unknown")  # this version has no `negate`
    route.save_profile(decided(model), tmp_path / "odd", {
        "format": "anyshape-route-plan-1", "passes": [], "memory_limit": 0,
        "decisions": [{"router": 3, "optimisation": "preload", "applied": True, "why": ""}]})
    for name, why in (("profile", "without decisions"), ("unknown", "optimisation 'negate'"), ("odd", "router")):
        with pytest.raises(anyshape.AnyShapeError, match="is no plan") as error:
            route.load_plan(tmp_path / name)
        assert why in error.value.why and error.value.do


class Counting(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)

    def summary(self):
        return {"hits": 7, "hit_rate": 0.875, "reasons": {"<size>": 1}}


@pytest.mark.parametrize("suffix", ["html", "json", "png"])
def test_a_report_shows_loads_joint_distributions_and_decisions(negate, tmp_path, suffix):
    model, path = Model(), tmp_path / f"routers.{suffix}"
    plan = route.optimize(model, decided(model))
    plan.report(path, Counting(model))
    content = path.read_bytes()
    if suffix == "png":
        assert content.startswith(b"\x89PNG")
    elif suffix == "html":
        text = content.decode()
        assert text.count("data:image/png;base64,") == 3  # two routers and what they have in common
        for word in ("it is the first", "refused", "2.00x", "bits in common", "hit_rate", "0.875", "&lt;size&gt;"):
            assert word in text
    else:
        data = json.loads(content)
        first, second = data["routers"]
        assert np.allclose(np.mean(first["heat"], 0), plan.profile.loads("first").mean(0), atol=0.01)
        assert first["percentiles"] == plan.profile.percentiles("first", first["percents"]).tolist()
        assert data["joint"][0]["counts"] == plan.profile.joint("first", "second").tolist()
        assert data["joint"][0]["information"] > 0.02 and second["balance"] <= 1
        assert data["observed"] == [{"what": "Counting", "where": "", "hits": 7, "hit_rate": 0.875,
                                     "reasons": {"<size>": 1}}]


def test_a_heat_map_is_a_picture():
    from anyshape.route.report.page import png
    content = png([[0, 1, 2], [3, 4, 4]])
    assert content[16:24] == b"\0\0\0\3\0\0\0\2"
    import zlib
    begin = content.index(b"IDAT") + 4
    lines = zlib.decompressobj().decompress(content[begin:])
    assert len(lines) == 2 * (1 + 9) and lines[1:4] == b"\xff\xff\xff" and lines[-3:] == bytes((31, 99, 214))


def test_a_report_of_no_calls(tmp_path):
    model = Model()
    route.optimize(model, profile_of_loads(model), passes=()).report(tmp_path / "a.html")
    assert "never called" in (tmp_path / "a.html").read_text()
    with pytest.raises(anyshape.AnyShapeError, match="is not written to"):
        route.optimize(model, profile_of_loads(model), passes=()).report(tmp_path / "a.txt")


def test_the_command_reports_a_saved_profile(tmp_path, capsys):
    from anyshape.tools.cli import main
    model = Model()
    route.save_profile(decided(model), tmp_path / "a.profile")
    route.save_plan(route.optimize(model, decided(model)), tmp_path / "a.plan")
    for name in ("a.profile", "a.plan"):
        assert main(["report", str(tmp_path / name), "--out", str(tmp_path / f"{name}.html")]) == 0
        assert "bits in common" in (tmp_path / f"{name}.html").read_text()
    assert "plan:" in capsys.readouterr().out


def test_explain_knows_routers():
    model = Model()
    fast = anyshape.compile(model)
    notes = fast.explain().routers
    assert [(one.name, one.branches, one.way, one.decides, one.recorded) for one in notes] == [
        ("first", 3, "split", "TopK", False), ("second", 2, "split", "TopK", False)]
    with route.profile(model):
        text = str(fast.explain())
    assert "routers" in text and "recorded" in text


@torch.no_grad()
def test_explain_says_how_a_stack_ran():
    """A program that was traced before a call gave it such rows runs branch by branch, whatever came later."""
    def routed():
        return route.Router(lambda cells, ids: ids, route.stack([nn.Linear(4, 4) for _ in range(3)])).eval()

    def ways(fast):
        return [one.way for one in fast.explain().routers]

    model, x, ids = routed(), torch.randn(5, 4), torch.tensor([0, 1, 1, 2, 0])
    fast = anyshape.compile(model)
    fast(x, ids)
    assert ways(fast)[0].startswith("branch by branch")
    model(x, ids)  # captures
    assert ways(fast)[0].startswith("grouped; branch by branch where traced")
    model = routed()
    model(x, ids)
    fast = anyshape.compile(model)
    fast(x, ids)
    assert ways(fast) == ["grouped"]


@pytest.mark.parametrize("stacked", [True, False])
def test_all_optimisations_and_the_watch_by_default(stacked):
    """What the README shows: no argument left away, none added."""
    torch.manual_seed(0)
    branches = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)]
    gate = nn.Linear(8, 4)
    model = nn.Sequential(nn.Linear(8, 8), route.Router(
        route.top_k(gate, k=2), route.stack(branches, torch.zeros(1, 8)) if stacked else branches), nn.Linear(8, 8))
    with torch.no_grad(), route.profile(model) as profile:
        for cells in (3, 17, 40):
            model(torch.randn(cells, 8))
    plan = route.optimize(model, profile, memory_limit="1GiB", compile=anyshape.compile)
    fast = plan.apply(model)
    assert {one.optimisation for one in plan.decisions} >= {"place", "preload", "dead_branches"}, plan
    with torch.no_grad():
        for cells in (1, 40, 0, 97):
            x = torch.randn(cells, 8)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
