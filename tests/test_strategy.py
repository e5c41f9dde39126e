"""Strategies for many devices: the cost model's formulas, schedules, simulation, search, and what users see."""
from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anyshape
from anyshape.base.errors import InputError, LimitError, ParseError, VerifyError
from anyshape.dist.cost.collectives import Group, seconds
from anyshape.dist.cost.machine import machine_of
from anyshape.dist.cost.parallel import DATA, RECOMPUTE, Degrees
from anyshape.dist.cost.strategy import strategy_of, uniform
from anyshape.dist.cost.workload import Attention, Layer, Product, Workload
from anyshape.dist.pipeline import Action, check, cut, in_flight, schedule
from anyshape.dist.placement import Shard
from anyshape.dist.search import integer, judge
from anyshape.dist.search.hand_made import best_by_name
from anyshape.dist.search.problem import Search, Shape, override, shapes_of
from anyshape.dist.search.solver import knapsack, lower_bound, solve
from anyshape.dist.search.tables import families, modes, table
from anyshape.dist.simulate import Task, perfetto, simulate, simulate_step
from anyshape.dist.strategies import PipelineSchedule
from anyshape.sym.expr import symbol
from anyshape.tools.cli import main
from anyshape_bench.experiments import strategies

A100 = machine_of("a100x8:800Gb")
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2), ("interleaved", 3))


def llama(layers: int = 32, h: int = 4096, i: int = 11008, heads: int = 32, vocabulary: int = 32000) -> Workload:
    """A Llama by its formulas, for tests that need no trace."""
    b, s = symbol("b"), symbol("s")
    t, parts = b * s, 4 * h * h
    embed = Layer("embed", 1, (), (), vocabulary * h, vocabulary * h, 1, 2 * t * h, 0, t * h, 0, 0, 0, 1, vocabulary)
    attention = Layer("layers.*.attention", layers, (
        *(Product(name, t, h, h, "column") for name in "qkv"), Product("o", t, h, h, "row")),
        (Attention(b, heads, heads, s, s, h // heads),), parts + h, parts, 5, 5 * t * h, 4 * t * h, t * h, 2 * t * h,
        5 * t * h, 3 * t * h, 1, heads)
    mlp = Layer("layers.*.mlp", layers, (Product("gate", t, h, i, "column"), Product("up", t, h, i, "column"),
                                         Product("down", t, i, h, "row")), (), 3 * h * i + h, 3 * h * i, 4, 5 * t * h,
                3 * t * i, t * h, 2 * t * h, 3 * t * i, 2 * t * i, 1, i)
    head = Layer("head", 1, (Product("head", t, h, vocabulary, "column"),), (), vocabulary * h, vocabulary * h, 1,
                 4 * t * h, 6 * t * vocabulary, t * h, 2 * t * h, 3 * t * vocabulary, 3 * t * vocabulary, 1, vocabulary)
    return Workload("llama", (embed, attention, mlp, head))


def layers_of(work: Workload) -> list[tuple[str, int]]:
    return [(layer.name, layer.count) for layer in work.layers]


# ---- cost


def test_a_ring_gathers_what_each_rank_lacks_and_a_tree_has_less_latency() -> None:
    inside = Group(8)
    beta = 1 / (A100.chip.fabric * A100.chip.efficiency.fabric)
    assert seconds("all_gather", 8e9, inside, A100) == pytest.approx(7 * A100.chip.alpha + 7e9 * beta)
    assert seconds("all_reduce", 8e9, inside, A100) == pytest.approx(2 * seconds("all_gather", 8e9, inside, A100))
    assert seconds("all_reduce", 8.0, Group(128), A100) < 2 * seconds("all_gather", 8.0, Group(128), A100)
    assert seconds("all_gather", 8e9, Group(1), A100) == 0.0


def test_groups_of_one_node_share_its_network() -> None:
    alone, shared = Group(16, 1), Group(16, 8)  # two nodes of 8 chips; one chip in each of 16 nodes
    assert (alone.nodes(A100), alone.per_node(A100)) == (2, 8)
    assert (shared.nodes(A100), shared.per_node(A100)) == (16, 1)
    assert seconds("reduce_scatter", 1e9, shared, A100) > 5 * seconds("reduce_scatter", 1e9, alone, A100)
    assert Group(8).link(A100) == "fabric" and alone.link(A100) == "network"


def test_a_machine_reads_back_from_its_text() -> None:
    assert str(machine_of(str(A100))) == str(A100) == "a100x8:800Gb"
    for text, word in (("a100 of 8", "no machine"), ("tpu", "no chip tpu")):
        with pytest.raises(anyshape.AnyShapeError, match=word):
            machine_of(text)


def test_a_strategy_reads_back_from_its_text() -> None:
    one = uniform(Degrees(4, 2, 2, 8), layers_of(llama()), "cut", "fsdp", "selective", micro=8, schedule="interleaved",
                  chunks=2, stages=(0, 3, 9), early=False)
    assert strategy_of(str(one)) == one
    with pytest.raises(ParseError, match="no strategy"):
        strategy_of("strategy mesh(2, 2)")
    with pytest.raises(ParseError, match="no layer"):
        strategy_of(str(one).splitlines()[0] + "\n  embed: cut everywhere recompute(1, 0, 0)")


# ---- pipeline


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_schedules_do_each_action_once_and_can_be_run(name: str, chunks: int) -> None:
    for stages, micro in ((1, 1), (2, 2), (4, 4), (4, 8), (8, 8), (3, 9), (4, 3)):
        orders = schedule(name, stages, micro, chunks)
        if orders is None:
            assert name == "interleaved" and micro % stages
        else:
            assert check(orders, stages, micro, chunks) == []
            if name in ("1f1b", "zero-bubble"):
                assert [in_flight(orders, rank) for rank in range(stages)] == [
                    min(stages - rank if name == "1f1b" else stages, micro) for rank in range(stages)]


def test_the_judge_of_schedules_sees_what_is_wrong() -> None:
    orders = schedule("1f1b", 2, 2)
    assert orders is not None
    swapped = (orders[0], orders[1][::-1])
    assert check(swapped, 2, 2, 1) == ["rank 0 waits forever with Action(kind='B', chunk=0, micro=0)",
                                       "rank 1 waits forever with Action(kind='B', chunk=0, micro=1)"]
    assert check((orders[0], orders[1][1:]), 2, 2, 1) == ["rank 1 does not do each action once"]
    assert Action("F", 0, 0) == orders[0][0]


def test_stages_are_cut_as_well_as_by_trying_all() -> None:
    times = [5.0, 1.0, 2.0, 8.0, 1.0, 1.0, 7.0]
    for stages in (1, 2, 3, 4):
        found = cut(times, stages)
        assert found is not None

        def slowest(firsts: tuple[int, ...]) -> float:
            return max(sum(times[a:b]) for a, b in itertools.pairwise((*firsts, len(times))))

        assert slowest(found) == min(slowest((0, *rest)) for rest in itertools.combinations(range(1, 7), stages - 1))
    assert cut(times, 8) is None
    assert cut(times, 2, lambda stage, first, end: end - first <= 4) == (0, 4)


# ---- simulation


def test_collectives_share_a_link_and_hide_behind_computation() -> None:
    line = simulate([Task("a", (0, "x"), 1.0, link="net"), Task("b", (0, "y"), 1.0, link="net"),
                     Task("c", (0, "compute"), 1.5)])
    assert line.ends == pytest.approx((2.0, 2.0, 1.5)) and line.exposed() == pytest.approx(0.5)
    slow = simulate([Task("a", (0, "x"), 1.0, link="net"), Task("c", (0, "compute"), 2.0)], busy=0.5)
    assert slow.ends[1] == pytest.approx(1.0 + (2.0 - 1.0 / 1.5))
    with pytest.raises(VerifyError, match="wait for each other"):
        simulate([Task("a", (0, "x"), 1.0, (1,)), Task("b", (0, "y"), 1.0, (0,))])


def test_merged_and_early_collectives_scale() -> None:
    work, rates = llama(), {}
    for world, early, merged in ((8, True, True), (128, True, True), (128, False, True), (128, False, False)):
        one = uniform(Degrees(world), layers_of(work), "whole", "fsdp", "none", early=early, merged=merged)
        report = simulate_step(work, A100, one, 2 * world, 2048)
        assert report is not None
        rates[world, early, merged] = report.rate / world
    best, base = rates[128, True, True], rates[8, True, True]
    assert best >= 0.95 * base  # TorchAcc measured 0.91
    assert rates[128, False, False] < rates[128, False, True] < 0.75 * base  # and 0.69 without


def test_a_pipeline_has_the_bubble_of_its_formula() -> None:
    work = llama(layers=31)
    took = {}
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)):
        one = uniform(Degrees(pipe=4), layers_of(work), "whole", "ddp", "none", micro=8, schedule=name, chunks=chunks)
        report = simulate_step(work, A100, one, 8, 1024)
        assert report is not None and len(report.memory) == 4
        took[name] = report
    slow = took["1f1b"]
    assert slow.bubble / slow.seconds == pytest.approx(3 / 11, rel=0.2)
    assert took["zero-bubble"].seconds < slow.seconds and took["interleaved"].seconds < slow.seconds
    assert max(took["gpipe"].memory) > max(slow.memory)
    events = json.loads(perfetto(slow.timeline))["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}


# ---- search


def small(world: int = 4, memory: float = 80e9, **more: object) -> Search:
    return Search(llama(8, 1024, 2816, 16), A100, world, (Shape(4096, 1.0, 16),), memory).replace(**more)


def test_the_bound_is_below_all_that_was_tried_and_no_plan_by_hand_is_better() -> None:
    for search in (small(), small(memory=6e9)):
        found = solve(search)
        verdict = found.best.verdict
        assert verdict is not None and judge.check(search, found.best.plan) == []
        assert all(found.bound <= one.verdict.seconds for one in found.tried if one.verdict and not one.why)
        assert all(verdict.seconds <= hand.seconds for _, hand in best_by_name(search).values())
        assert verdict.memory <= search.memory


def test_greedy_and_bound_enclose_the_integer_program() -> None:
    pytest.importorskip("highspy")
    search = small(memory=5e9)
    family = families(search)[0]
    mode = modes(search, family, search.shapes[0])[0]
    one = table(search, family, mode, search.shapes[0])
    assert one is not None
    ample = integer.solved(one, 1e12)
    for room in (3e9, 4e9, 6e9, 9e9, 1e12):
        exact = integer.solved(one, room)
        if exact is None:
            continue
        seconds, picked, counts = exact
        greedy, rows = knapsack(one, picked, room)
        assert seconds <= greedy * (1 + 1e-9) and sum(map(sum, counts)) == sum(map(sum, rows)) == 18
        assert lower_bound(one, room) <= seconds
        assert greedy <= seconds + (ample[0] if ample else 0.0) / 8  # at most one layer more than needed


def test_shapes_share_where_parameters_lie() -> None:
    search = Search(llama(), A100, 16, shapes_of({512: 0.7, 16384: 0.3}, 16), 60e9, degrees=(("pipe", 1),))
    plan = solve(search).best.plan
    short, long = plan.at(search.shapes, 100), plan.at(search.shapes, 16384)
    assert [one.choice for one in short.layers] == [one.choice for one in long.layers]
    assert ([one.recompute for one in short.layers], short.degrees, short.micro) != (
        [one.recompute for one in long.layers], long.degrees, long.micro)  # what activations do differs
    moved = short.replace(layers=tuple(uniform(short.degrees, layers_of(search.workload), "whole", "ddp",
                                               "none").layers))
    assert any("weights would move" in one for one in judge.check(search, type(plan)((moved, *plan.strategies[1:]))))


def test_lengths_fall_into_classes_with_least_padding() -> None:
    assert [shape.length for shape in shapes_of([10, 11, 12, 100, 101, 1000], 8, 3)] == [12, 101, 1000]
    assert sum(shape.weight for shape in shapes_of({10: 3, 20: 1}, 8)) == 1.0
    with pytest.raises(InputError, match="no lengths"):
        shapes_of([], 8)


def test_what_is_fixed_stays_fixed() -> None:
    search = small(overrides=(override("layers.*.mlp", placement="column", data="fsdp"),), degrees=(("tensor", 2),))
    found = solve(search)
    layer = next(one for one in found.best.plan.strategies[0].layers if one.name.endswith("mlp"))
    assert str(layer.choice) == "cut fsdp" and found.best.plan.strategies[0].degrees.tensor == 2
    with pytest.raises(InputError, match="no layer"):
        override("blocks.*", placement="cut", workload=search.workload)
    with pytest.raises(InputError, match="cannot be had"):
        override("layers.*", placement="diagonal")
    assert set(DATA) >= {"ddp", "fsdp"} and RECOMPUTE[0] == "none"


def test_of_overrides_that_differ_the_last_counts_and_what_cannot_be_had_is_said() -> None:
    more = (override("*", placement="cut"), override("layers.*", placement="whole", recompute="full"),
            override("layers.*.mlp", recompute="none"), override("*", data="zero1"))
    search = small(overrides=more, degrees=(("tensor", 2),))
    layers = solve(search).best.plan.strategies[0].layers
    assert [str(one.choice) for one in layers] == ["cut zero1", "whole zero1", "whole zero1", "cut zero1"]
    assert [one.modes()[0] for one in layers[1:3]] == ["full", "none"]
    for one, words in ((override("head", data="hsdp"), "head is to be hsdp, and may be cut ddp"),
                       (override("embed", placement="sequence"), "overrides ask for placements that no one plan has")):
        with pytest.raises(InputError, match="cannot be had on 4 ranks") as caught:
            solve(small(overrides=(override("layers.*", placement="whole"), one), degrees=(("tensor", 2),)))
        assert words in caught.value.why and "override('layers.*')" in caught.value.where and caught.value.do
    for given in ({}, {"data": "FSDP"}):
        with pytest.raises(InputError) as caught:
            override("head", **given)
        assert caught.value.where == "override('head')" and caught.value.why and caught.value.do


def test_a_limit_below_the_least_says_which_would_do() -> None:
    with pytest.raises(LimitError, match="no strategy of 4 ranks") as caught:
        solve(small(memory=1.6e9))
    assert caught.value.least > 1.6e9 and "the one that takes least" in str(caught.value)
    assert f"memory_limit to {caught.value.least} (" in caught.value.do
    found = solve(small(memory=float(caught.value.least)))
    assert found.best.verdict is not None and found.best.verdict.memory <= caught.value.least


def test_a_world_that_divides_nothing_says_which_would_do() -> None:
    with pytest.raises(InputError, match="13 ranks cannot be dealt out") as caught:
        solve(small(world=13, shapes=(Shape(512, 1.0, 8),)))
    assert "take 12 ranks, or at least 13 sequences" in str(caught.value)


# ---- stored results


def test_the_page_shows_the_stored_results_and_they_reach_what_is_promised() -> None:
    folder = Path(__file__).parent.parent / "docs"
    results = json.loads((folder / "results" / "benchmarks-strategies" / "strategies.json").read_text())
    assert (folder / "benchmarks-strategies.md").read_text() == strategies.page(results)
    assert results["validation"]["median"] <= 0.10 and results["validation"]["worst"] <= 0.20
    assert results["large"]["took"] <= 60
    assert all(row["hand_seconds"] is None or row["seconds"] <= row["hand_seconds"] for row in results["compare"]
               if row["fits"])


# ---- users


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                                 nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Net(nn.Module):
    """A small language model."""

    def __init__(self, width: int = 64, layers: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def make() -> tuple[nn.Module, object, object, torch.Tensor]:
    """What the command asks for."""
    model = Net()
    return model, loss_of, torch.optim.SGD(model.parameters()), torch.zeros(16, 128, dtype=torch.int64)


def test_any_model_is_planned_printed_changed_and_written(tmp_path: Path) -> None:
    model, loss_fn, optimizer, batch = make()
    search = anyshape.strategy(model, loss_fn, optimizer, batch, world=4, machine="a100", lengths=[64, 128],
                               memory_limit="8GiB")
    work = search.problem.workload
    assert work.parameters == sum(one.numel() for one in model.parameters()) and work.state_bytes == 0.0
    counts = {layer.name: layer.count for layer in work.layers}
    assert counts == {"embed": 1, "layers.*.qkv": 5, "layers.*.out": 5, "layers.*.mlp": 5, "head": 1}
    mlp = next(layer for layer in work.layers if layer.name == "layers.*.mlp")
    assert [one.cut for one in mlp.products] == ["column", "row"]
    words = str(search)
    assert "layers.*.mlp" in words and "no strategy is below" in words and "what else was tried" in words
    assert search.override("layers.*.mlp", data="fsdp") is search
    assert {one.choice.data for one in search.at(64).layers if one.name == "layers.*.mlp"} == {"fsdp"}
    with pytest.raises(anyshape.AnyShapeError, match=r"search.override\("):
        search.override("head", data="ddp").runnable()
    run = anyshape.strategy(model, loss_fn, optimizer, batch, world=4, mesh={"data": 4}).override("*", data="fsdp")
    assert str(run.runnable()) == "mesh(data=4)\ndata: fsdp"
    for fixed, placement, kinds in (({"context": 2}, "whole", ("fsdp", "ring")),
                                    ({"tensor": 2}, "sequence", ("fsdp", "ulysses"))):
        found = anyshape.strategy(model, loss_fn, optimizer, batch, world=4, mesh={"data": 2, **fixed}).override(
            "*", placement=placement, data="fsdp").runnable()
        (axis,) = fixed  # ranks with other positions keep parts of the weights, too
        assert found.kinds == kinds and found.overrides == (("*", axis, Shard(0)),)
    piped = anyshape.strategy(model, loss_fn, optimizer, batch, world=4, mesh={"pipe": 2, "data": 2})
    planned, found = piped.at(128), piped.override("*", data="ddp").runnable()
    assert str(found.mesh) == "mesh(pp=2, data=2)" and found.kinds == ("pp", "ddp")
    assert found.pipeline == PipelineSchedule(planned.schedule, planned.micro, planned.chunks)
    search.report(tmp_path / "page.html")
    search.trace(tmp_path / "step.json", length=64)
    page = (tmp_path / "page.html").read_text()
    assert "layers.*.mlp" in page and "<svg" in page and page.count("<script") == 0
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    with pytest.raises(InputError, match="does not divide"):
        anyshape.strategy(model, loss_fn, optimizer, batch, world=12, mesh={"tensor": 8})
    half, whole = (anyshape.strategy(model, loss_fn, optimizer, batch, world=4, mesh={"data": 4}, dtype=dtype).verdict
                   for dtype in ("bf16", "f32"))
    assert whole.memory > half.memory and whole.seconds > half.seconds  # activations take twice the bytes
    with pytest.raises(InputError, match="'float32' is no dtype"):
        anyshape.strategy(model, loss_fn, optimizer, batch, world=12, dtype="float32")


class Reader(nn.Module):
    """What it does between its embedding and its head is given."""

    def __init__(self, inner: nn.Module, head: bool) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(256, 16), inner
        self.head = nn.Linear(16, 256, bias=False) if head else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.inner(self.embed(tokens))
        x = found[0] if isinstance(found, tuple) else found
        return F.linear(x, self.embed.weight) if self.head is None else self.head(x)


class Wider(nn.Module):
    """Each position becomes two."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x.mT, scale_factor=2.0, mode="linear").mT


class Writer(nn.Module):
    """It writes in place, into a part of a tensor and a buffer, and has another way where it is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and x.sum() > 0:
            raise AssertionError
        self.calls.add_(1)
        x = x.mul(2).add_(1)
        shifted = x.new_zeros(x.shape)
        shifted[:, 1:] = x[:, :-1]
        return shifted.relu_()


@pytest.mark.parametrize(("inner", "head", "inputs", "rows"), [
    (nn.Identity(), False, "embed.weight", "s*b"),  # the demo's head: refused by PyTorch 2.12's rule in C++
    (nn.LSTM(16, 16, batch_first=True), True, "inner.weight_ih_l0", "s*b"),
    (Wider(), True, "head.weight", "2*s*b"),
    (Writer(), True, "head.weight", "s*b"),
], ids=lambda one: type(one).__name__ if isinstance(one, nn.Module) else "")
def test_products_have_sizes_for_every_batch_and_length(inner: nn.Module, head: bool, inputs: str, rows: str) -> None:
    work = anyshape.strategy(Reader(inner, head), lambda model, tokens: model(tokens).square().mean(), None,
                             torch.zeros(16, 128, dtype=torch.int64), world=2).problem.workload
    found = {f"{layer.name}.{one.name}": one.rows for layer in work.layers for one in layer.products}
    symbols = {"s": symbol(work.length), "b": symbol(work.batch)}
    assert not torch.compiler.is_compiling()
    assert found[inputs] == eval(rows, {}, symbols), found


def test_the_command_prints_a_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategy", f"{__file__}:make", "--world", "4", "--machine", "a100", "--mesh", "tensor=2",
                 "--override", "layers.*.mlp=column", "--out", str(tmp_path / "a.html")]) == 0
    assert "Wrote" in capsys.readouterr().out and (tmp_path / "a.html").exists()
    assert main(["strategy", f"{__file__}:make", "--world", "8", "--mesh", "tensor=5"]) == 1
    assert "does not divide" in capsys.readouterr().err
