"""Partitioned train steps, run for all ranks in one process, against one rank: results, weights and states."""
from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

from anyshape.base.errors import VerifyError
from anyshape.dist.buckets import bucketed
from anyshape.dist.halves import Halves, gathered_first, halves_of
from anyshape.dist.lower import lowered
from anyshape.dist.mesh import mesh_of
from anyshape.dist.placement import Shard
from anyshape.dist.ragged import Needs, needs_of
from anyshape.dist.sharding import sharding_of
from anyshape.dist.strategies import Strategy, partitioned, strategy_of
from anyshape.frontend.train_step.batch_sizes import shared_sizes
from anyshape.frontend.train_step.distributed import halves_for_all
from anyshape.frontend.train_step.partition import step_halves
from anyshape.ir.build import Builder
from anyshape.ir.graph import Graph
from anyshape.ir.show import show
from anyshape.ir.types import SizeType, TensorType
from anyshape.ir.verify import verify
from anyshape.ops.collective import COLLECTIVES
from anyshape.runtime.collectives.simulate import simulate
from anyshape.sym.expr import symbol
from anyshape.torch_compat.tracing import einsum_path
from dist_model import Captured, Llama, capture, worst_difference

SHAPES = ((6, 12), (4, 9), (3, 31), (5, 5), (1, 8))  # the last one leaves ranks without rows


@cache
def llama(**more: Any) -> Captured:
    torch.manual_seed(0)
    tied, layers = more.pop("tied", False), more.pop("layers", 2)
    return capture(Llama(tied=tied, layers=layers).double(), in_halves=True, **more)


def counts(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes if node.op in COLLECTIVES)


def check(captured: Captured, given: Any, world: int) -> Counter[str]:
    strategy = strategy_of(given, world)
    chain = partitioned(captured.graph, strategy, captured.roles)
    verify(chain[-1].graph)
    assert all(sharding_of(str(one.sharding)) == one.sharding for one in chain)
    halves = in_halves(captured, chain[-1].graph)
    for place, (batch, length) in enumerate(SHAPES):
        assert worst_difference(captured, strategy, chain, batch, length, halves if place % 2 else None) < 1e-12
    return counts(chain[-1].graph)


def in_halves(captured: Captured, graph: Graph, limited: bool = True) -> Halves:
    found = halves_of(gathered_first(graph, captured.roles.data), captured.first, captured.roles.data, limited)
    for one in (found.forward, found.backward):
        verify(one)
    assert found.forward.saved and not found.forward.writes and found.backward.writes == graph.writes
    return found


def test_data_parallel_adds_up_each_gradient_once() -> None:
    assert check(llama(), "ddp", 2) == {"all_reduce": 21 + 2}  # and the count of tokens, and the loss


def test_zero1_scatters_gradients_and_gathers_weights() -> None:
    assert check(llama(), "zero1", 2) == {"reduce_scatter": 21, "all_gather": 21, "all_reduce": 2}


def test_fsdp_gathers_weights_where_they_are_used() -> None:
    found = check(llama(), "fsdp", 2)
    assert found["reduce_scatter"] == 21 and found["all_reduce"] == 2
    halves = in_halves(llama(), partitioned(llama().graph, strategy_of("fsdp", 2), llama().roles)[-1].graph)
    # each weight comes once in each half, whatever the order of dims in which products read it; none is saved
    weights = {v.name for v in halves.forward.inputs} & set(llama().roles.weights)
    for half in (halves.forward, halves.backward):
        gathers = [node for node in half.nodes if node.op == "all_gather"]
        assert {v.name for node in gathers for v in node.values()} <= weights and len(gathers) <= len(weights)
    assert counts(halves.forward)["all_gather"] == len(weights)
    assert counts(halves.backward)["all_reduce"] == 1  # the loss comes with the gradients


def test_nothing_is_gathered_for_the_tape() -> None:
    weights = set(llama().roles.weights)
    for given in ("ddp", "fsdp", "tp"):
        halves = in_halves(llama(), partitioned(llama().graph, strategy_of(given, 2), llama().roles)[-1].graph)
        made = halves.forward.producers()
        assert not any(made[v.name].op == "all_gather" for v in halves.forward.saved)  # type: ignore[union-attr]
        assert not weights & {v.name for v in halves.forward.saved}  # type: ignore[union-attr]


def test_the_weight_of_the_head_is_gathered_once() -> None:
    captured, strategy = llama(), strategy_of("fsdp", 2)
    chain = partitioned(captured.graph, strategy, captured.roles)
    limited, free = (in_halves(captured, chain[-1].graph, one) for one in (True, False))
    # and that of the norm before it, which the backward reads first
    assert counts(limited.backward)["all_gather"] - 2 == counts(free.backward)["all_gather"]
    made = free.forward.producers()
    norm, kept = [v for v in free.forward.saved if made[v.name].op == "all_gather"]  # type: ignore[union-attr]
    assert norm.tensor.rank == 1
    head = next(node for node in reversed(free.forward.nodes) if node.op == "matmul")
    assert kept.tensor.shape == head.inputs[1].tensor.shape[::-1]  # type: ignore[union-attr]
    assert worst_difference(captured, strategy, chain, 5, 7, free) < 1e-12


def test_tensor_parallel_deals_out_products_and_the_vocabulary() -> None:
    # of a norm's backward the sum that goes with its mean is added up beside its gradient, in one message
    assert check(llama(), "tp", 2) == {"all_reduce": 24}


def test_sequence_parallel_scatters_what_tensor_parallel_adds_up() -> None:
    found = check(llama(), "sp", 2)
    assert found["reduce_scatter"] >= 8 and found["all_reduce"] < 23


def test_ulysses_exchanges_heads_for_positions_around_attention_alone() -> None:
    captured = llama(layers=1)
    forward, backward = 3 + 1, 2 + 3  # q, k, v, and the result; gradient and products, and the gradients of q, k, v
    weights = len(captured.roles.weights)
    # and the loss, and the count of its tokens
    assert check(captured, "ulysses", 2) == {"all_to_all": forward + backward, "all_reduce": weights + 2}


def test_ring_attention_leaves_positions_where_they_are() -> None:
    captured = llama(layers=1)
    wanted = {"ring_attention": 1, "ring_attention_backward": 1, "all_reduce": len(captured.roles.weights) + 2}
    assert check(captured, "ring", 3) == wanted  # three ranks, which do not divide lengths or heads


def test_two_axes() -> None:
    check(llama(), mesh_of(fsdp=2, tensor=2), 4)


def mean_over_rows(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).mean(0).pow(2).sum()


def test_lengths_may_differ_unless_something_is_combined_that_has_them() -> None:
    strategy = strategy_of("ddp", 2)
    free = partitioned(llama().graph, strategy, llama().roles)
    assert needs_of(free[-1].graph, free, llama().graph) == Needs()
    torch.manual_seed(0)
    bound = capture(Llama(layers=1).double(), loss=mean_over_rows)
    chain = partitioned(bound.graph, strategy, bound.roles)
    assert list(needs_of(chain[-1].graph, chain, bound.graph).equal) == ["s44"]


@pytest.mark.parametrize(("kind", "pattern", "gathered"), [("ring", "*", False), ("ulysses", "state:*", True)])
def test_weights_or_states_are_dealt_out_over_ranks_that_have_other_positions(kind: str, pattern: str,
                                                                              gathered: bool) -> None:
    captured = llama(layers=1)
    strategy = Strategy(mesh_of(context=2), (kind,), ((pattern, "context", Shard(0)),))
    found = check(captured, strategy, 2)
    assert found["reduce_scatter"] == len(captured.roles.weights)
    local = partitioned(captured.graph, strategy, captured.roles)[-1]
    layouts = dict(local.layouts)
    types = {value.name: value.type for value in captured.graph.inputs}
    assert all((str(layouts[name]) == "R") == gathered for name in captured.roles.weights)
    assert not any(str(layouts[name]) == "R" for name, weight in captured.roles.states.items()
                   if types[name] == types[weight])


def test_rows_of_what_is_gathered_along_the_sequence_stay_dealt_out() -> None:
    captured, given = llama(layers=1), mesh_of(data=2, sequence=2)
    graph = partitioned(captured.graph, strategy_of(given, 4), captured.roles)[-1].graph
    assert {node.op for node in graph.nodes if ("axis", "data") in node.attrs} == {"all_reduce"}
    check(captured, given, 4)


def test_buckets_keep_results_and_send_few_messages() -> None:
    captured, strategy = llama(), strategy_of("ddp", 2)
    chain = partitioned(captured.graph, strategy, captured.roles)
    for limit in (1 << 10, 1 << 14, 1 << 25):
        merged = bucketed(chain[-1].graph, limit)
        verify(merged)
        assert worst_difference(captured, strategy, chain, 5, 7, merged) < 1e-12
    assert counts(merged)["all_reduce"] * 10 <= len(captured.roles.weights)


def test_gathers_of_weights_are_joined_in_the_order_of_their_use() -> None:
    captured, strategy = llama(), strategy_of("fsdp", 2)
    chain = partitioned(captured.graph, strategy, captured.roles)
    found = []
    for limit in (1 << 10, 1 << 14, 1 << 25):
        merged = bucketed(chain[-1].graph, limit)
        verify(merged)
        assert worst_difference(captured, strategy, chain, 5, 7, merged) < 1e-12
        found.append(counts(merged)["all_gather"])
    assert counts(chain[-1].graph)["all_gather"] >= found[0] > found[1] > found[2] == 1


def test_buckets_of_zero1_are_one_message_each_way() -> None:
    captured, strategy = llama(), strategy_of("zero1", 2)
    chain = partitioned(captured.graph, strategy, captured.roles)
    merged = bucketed(chain[-1].graph)
    verify(merged)
    assert worst_difference(captured, strategy, chain, 5, 7, merged) < 1e-12
    assert counts(merged) == {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 1}


@pytest.mark.full
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("given", [
    "ddp", "zero1", "fsdp", "tp", "sp", "ring", "ulysses", mesh_of(data=2, sequence=2), mesh_of(data=2, ring=2),
    mesh_of(ulysses=2, fsdp=2), mesh_of(tensor=2, ring=2),
    mesh_of(data=2, tensor=2), mesh_of(fsdp=2, tensor=2), mesh_of(zero1=2, tensor=2),
    mesh_of(data=2, fsdp=2), mesh_of(tensor=2, data=2)], ids=str)
def test_every_strategy(given: Any, tied: bool, clip: float | None) -> None:
    for world in (2, 3, 4) if isinstance(given, str) else (4,):
        check(llama(tied=tied, clip_norm=clip), given, world)


def batch_graph(*, compared: bool = True) -> Graph:
    """Scores of tokens [b, n], looked up at labels [c, m] and at others [d, p]; `compared`: as many as there are."""
    builder = Builder("loss")
    b, n, c, m, d, p = (symbol(builder.input(name, SizeType()).name) for name in "bncmdp")
    builder.input("tokens", TensorType("i64", (b, n)))
    scores = builder.input("scores", TensorType("f32", (b * n, 8)))
    found = []
    for name, shape in (("labels", (c, m)), ("others", (d, p))):
        value = builder.input(name, TensorType("i64", shape))
        index = builder.op("reshape", value, shape=(shape[0] * shape[1], 1))
        one = builder.op("gather", scores, index, dim=1)
        found.append(builder.op("slice", one, dim=0, start=0, count=b * n, step=1) if compared else one)
    return builder.finish(tuple(found))


class Convolved(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64)
        self.convolution = torch.nn.Conv2d(1, 4, 3, padding=1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.convolution(self.embed(tokens)[:, None]).relu().mean(1))


def test_rows_of_a_convolution_stay_dealt_out() -> None:
    """Also where it is a call of PyTorch's, as in a step: its gradients of weights are sums over the ranks' rows."""
    torch.manual_seed(0)
    captured, strategy = capture(Convolved().double()), strategy_of("ddp", 2)
    assert any("convolution_backward" in str(node.attrs) for node in captured.graph.nodes if node.op == "extern")
    chain = partitioned(captured.graph, strategy, captured.roles)
    assert not any("_all_gather" in value.name for node in chain[-1].graph.nodes if node.op == "extern"
                   for value in node.values())
    for batch, length in SHAPES:
        assert worst_difference(captured, strategy, chain, batch, length) < 1e-12


class Joint(torch.nn.Module):
    """Queries, keys and values of one product, taken apart as timm does it; their gradients are stacked before rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = torch.nn.Embedding(64, 8), torch.nn.Linear(8, 24), torch.nn.Linear(8, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        joint = self.qkv(self.embed(tokens))
        q, k, v = joint.reshape(*tokens.shape, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.head(found.transpose(1, 2).flatten(2))


def test_rows_of_gradients_that_are_stacked_stay_dealt_out() -> None:
    torch.manual_seed(0)
    captured, strategy = capture(Joint().double()), strategy_of("ddp", 2)
    chain = partitioned(captured.graph, strategy, captured.roles)
    assert not any(node.op == "all_gather" for node in chain[-1].graph.nodes)
    assert worst_difference(captured, strategy, chain, *SHAPES[0]) < 1e-12


def test_sizes_of_a_batch_that_are_compared_are_one() -> None:
    batch = ("tokens", "labels", "others")
    assert shared_sizes(batch_graph(), batch) == {"c": "b", "m": "n", "d": "b", "p": "n"}
    assert shared_sizes(batch_graph(), ("tokens", "labels")) == {"c": "b", "m": "n"}
    assert shared_sizes(batch_graph(), ("tokens",)) == {}
    assert shared_sizes(batch_graph(compared=False), batch) == {}  # it says only that labels are no more than scores


class Masked(torch.nn.Module):
    """What its backward needs is a mask of every pair of tokens, or a number of each token: whichever is smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        order = tokens.cumsum(1)
        weighed = self.weight[tokens[:, :, None] % 4] * self.weight[tokens[:, None, :] % 4]
        return torch.where(order[:, :, None] >= order[:, None, :], weighed * weighed, 0.0).sum()


def test_halves_are_the_same_at_any_length() -> None:
    """Each rank traces its own batch, and what is kept for the backward is to be the same on all."""
    def text(length: int, cut: Any) -> str:
        torch.manual_seed(0)
        found = capture(Masked(), lambda model, tokens: model(tokens), (torch.randint(0, 50, (3, length)),),
                        in_halves=True, cut=cut)
        return show(found.graph.replace(facts=type(found.graph.facts)()))

    assert text(5, step_halves) != text(70, step_halves)
    assert text(1, halves_for_all) == text(5, halves_for_all) == text(70, halves_for_all)


class Contracted(torch.nn.Module):
    """Three operands: with few tokens the first two are one product first, with many the last two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.ones(16, 16) / 16) for _ in range(2))
        self.rows = torch.nn.Parameter(torch.ones(50, 16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bnd,de,ef->bnf", self.rows[tokens], self.first, self.second).square().sum()


def test_an_einsum_is_contracted_in_one_order_at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank traces its own batch, and the order of its products is to be that of all."""
    pytest.importorskip("opt_einsum")

    def text(length: int) -> str:
        found = capture(Contracted(), lambda model, tokens: model(tokens), (torch.randint(0, 50, (2, length)),))
        return show(found.graph.replace(facts=type(found.graph.facts)()))

    assert text(2) != text(70)
    monkeypatch.setattr(einsum_path, "has_peers", lambda: True)
    assert text(2) == text(70)


@pytest.mark.parametrize("given", ["ddp", "fsdp", "ulysses", "ring"])
def test_lowered_graphs_give_what_one_rank_gives(given: str) -> None:
    """What ranks run, launches and waits of messages in buckets, gives what the step gives on one rank."""
    captured, strategy = llama(layers=1), strategy_of(given, 2)
    chain = partitioned(captured.graph, strategy, captured.roles)
    low = lowered(bucketed(chain[-1].graph), strategy.mesh)
    assert {node.op for node in low.nodes}.isdisjoint(COLLECTIVES)
    assert worst_difference(captured, strategy, chain, 5, 7, low) < 1e-12


def test_a_graph_that_waits_twice_or_too_early_is_found_by_the_interpreter() -> None:
    mesh = mesh_of(data=2)
    b = Builder("sums")
    x = b.input("x", TensorType("f64", (4,)))
    (total,) = (b.op("all_reduce", x, axis="data", combine="add", name="total"),)
    low = lowered(b.finish((total,)), mesh)
    start, wait = low.nodes
    ones = [[torch.ones(4).double()], [torch.ones(4).double()]]
    assert [out.tolist() for (out,), _ in simulate(mesh, low, ones)] == [[2.0] * 4] * 2
    early = low.replace(outputs=start.outputs, nodes=(start,))
    with pytest.raises(KeyError):  # nothing waits
        simulate(mesh, early, ones)
    with pytest.raises(VerifyError, match="is waited for, and is not under way"):
        simulate(mesh, low.replace(nodes=(start, wait, wait)), ones)
    unread = low.replace(outputs=(start.outputs[0], *low.outputs))
    assert all(found[0].isnan().all() for found, _ in simulate(mesh, unread, ones))
