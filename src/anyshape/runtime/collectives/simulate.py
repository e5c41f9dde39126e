"""Simulation of all ranks of a mesh in one process: the reference interpreter, one state a rank, equation by equation.

It is the oracle of every test of partitioning: what it gives is compared with the graph before, run on one rank. Of a
graph whose collectives are launches and waits (dist/lower.py) a launch takes operands as they are then, its messages
are NaN, and results are there from the wait on.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anyshape.base.errors import VerifyError
from anyshape.dist.lower import RING, raised
from anyshape.dist.mesh import Mesh
from anyshape.dist.partition import LocalGraph
from anyshape.dist.placement import Placement, Shard, local_count
from anyshape.ir.asynchronous import START, WAIT
from anyshape.ir.graph import Graph, Node, Value
from anyshape.ir.types import SizeType
from anyshape.ops.collective import COLLECTIVES, RINGS
from anyshape.runtime.collectives.parts import Numbers, ceil_counts, cut, joined, total
from anyshape.runtime.torch_ops.fallbacks import by_torch
from anyshape.runtime.torch_ops.reference_interpreter import Interpreter
from anyshape.sym.expr import evaluate
from anyshape.torch_compat.dtypes import TORCH_DTYPES

Chain = Sequence[LocalGraph]  # of each axis, the first one first; the last one's graph is what ranks run


def numbers_of(place: Shard, shape: Sequence[int], symbols: Mapping[str, int]) -> Numbers:
    """A placement in numbers."""
    outer, n = evaluate(place.outer, symbols), evaluate(place.count, symbols)
    return place.dim, outer, n, shape[place.dim] // (outer * n) if outer * n else 0, 0


def part_of(whole: Any, place: Placement | None, symbols: Mapping[str, int], ranks: int, rank: int) -> Any:
    """What a rank has of an input."""
    if not isinstance(whole, Tensor) or not isinstance(place, Shard):
        return whole
    return cut(whole, numbers_of(place, whole.shape, symbols), ranks, rank).clone()


def local_inputs(chain: Chain, graph: Graph, whole: Sequence[Any], coordinates: Mapping[str, int]) -> list[Any]:
    """The inputs of one rank's program, of those of `graph`, the program of one rank alone. Sizes that callers give in
    parts are dealt out by ceil."""
    symbols = {v.name: x for v, x in zip(graph.inputs, whole, strict=True) if isinstance(v.type, SizeType)}
    names = [v.name for v in graph.inputs]
    found = [x.clone() if isinstance(x, Tensor) else x for x in whole]
    for one in chain:
        ranks, rank = one.sharding.ranks, coordinates[one.sharding.axis]
        layouts = dict(one.layouts)
        found = [part_of(x, layouts.get(name), symbols, ranks, rank) for name, x in zip(names, found, strict=True)]
        sizes = {one.rank_symbol: rank}
        for name, n in one.counts:
            low, high = local_count(evaluate(n, symbols), ranks, rank)
            sizes[name] = high - low
        symbols |= sizes
        names += sizes
        found += sizes.values()
    return found


def part_of_result(chain: Chain, name: str, whole: Tensor, symbols: Mapping[str, int],
                   coordinates: Mapping[str, int]) -> Tensor:
    """What a rank has of an input that was written, whose new value is `whole`."""
    for one in chain:
        whole = part_of(whole, dict(one.layouts).get(name), symbols, one.sharding.ranks, coordinates[one.sharding.axis])
    return whole


def simulate(mesh: Mesh, graph: Graph, inputs: Sequence[Sequence[Any]]) -> list[tuple[list[Any], dict[str, Tensor]]]:
    """Runs the graph of all ranks. inputs: of each rank.

    Returns:
        For each rank the outputs, and by name the new values of inputs that are written.

    Raises:
        VerifyError: a value has another shape than declared; or a collective is waited for, and is not under way.
    """
    states = []
    under_way: dict[tuple[int, str], dict[str, Tensor]] = {}  # rank, first message -> what its wait makes
    waits = {next(node.values()).name: node.outputs for node in graph.nodes if _calls(node, WAIT)}
    with torch.no_grad():
        for given in inputs:
            states.append(Interpreter(graph))
            states[-1].bind(list(given))
        for node in graph.nodes:
            if node.op in COLLECTIVES or _calls(node, RING):
                _on_groups(mesh, node if node.op in COLLECTIVES else raised(node, node.outputs), states)
            elif _calls(node, START):
                _on_groups(mesh, raised(node, waits[node.outputs[0].name]), states)
                for rank, state in enumerate(states):
                    under_way[rank, node.outputs[0].name] = {
                        one.name: state.values.pop(one.name) for one in waits[node.outputs[0].name]}
                    state.values |= {one.name: _message(state, one) for one in node.outputs}
            elif _calls(node, WAIT):
                for rank, state in enumerate(states):
                    come = under_way.pop((rank, next(node.values()).name), None)
                    if come is None:
                        raise VerifyError(f"{node.outputs[0].name} is waited for, and is not under way",
                                          do="this is a bug of AnyShape: please report it")
                    state.values |= come
            else:
                for state in states:
                    state.run(node)
    return [([state.operand(one) for one in graph.outputs],
             {target.name: state.values[value.name] for target, value in graph.writes}) for state in states]


def _calls(node: Node, target: str) -> bool:
    return node.op == "extern" and node.attr("target") == target


def _message(state: Interpreter, value: Value) -> Tensor:
    """A message that is under way: nobody can read it."""
    (size,) = value.tensor.shape
    kind = TORCH_DTYPES[value.tensor.dtype]
    return torch.full((state.attribute(size),), float("nan") if kind.is_floating_point else 0, dtype=kind)


def _on_groups(mesh: Mesh, node: Node, states: Sequence[Interpreter]) -> None:
    for group in mesh.groups(str(node.attr("axis"))):
        _collective(node, [states[rank] for rank in group])


def _collective(node: Node, states: Sequence[Interpreter]) -> None:
    """One collective of one group, each operand by itself."""
    attrs = [{name: state.attribute(value) for name, value in node.attrs} for state in states]
    if node.op in RINGS:
        _ring(node, states, attrs)
        return
    for place, (operand, value) in enumerate(zip(node.inputs, node.outputs, strict=True)):
        pieces = [state.operand(operand) for state in states]
        for rank, state in enumerate(states):
            made = result_of(node.op, pieces, [one.get("parts", (None,) * (place + 1))[place] for one in attrs],
                             attrs[rank], rank)
            if problem := state.complaint(value.tensor, made):
                raise VerifyError(f"{value.name} = {node.op}(...) is not what was declared", why=problem,
                                  do="this is a bug of the partitioner: please report it")
            state.values[value.name] = made


def _ring(node: Node, states: Sequence[Interpreter], attrs: Sequence[Mapping[str, Any]]) -> None:
    """Attention of one group: that of the whole sequence, of which each rank gets its part."""
    op = node.op.removeprefix("ring_")
    backward = op == "attention_backward"
    whole = []
    for place, operand in enumerate(node.inputs):
        kind = place - backward in (1, 2)  # keys and values
        counts = [one["parts"][kind][4] for one in attrs]
        whole.append(joined([state.operand(operand) for state in states], (2, *attrs[0]["parts"][kind][1:]), counts))
    made = by_torch(op, dict(attrs[0]), whole)
    for rank, state in enumerate(states):
        for place, (value, one) in enumerate(zip(node.outputs, made, strict=True)):
            _, outer, n, inner, count = attrs[rank]["parts"][backward and place > 0]
            dim = 2 if not backward and place else 1
            state.values[value.name] = cut(one, (dim, outer, n, inner, count), len(states), rank)
            if problem := state.complaint(value.tensor, state.values[value.name]):
                raise VerifyError(f"{value.name} = {node.op}(...) is not what was declared", why=problem,
                                  do="this is a bug of the partitioner: please report it")


def result_of(op: str, pieces: Sequence[Tensor], parts: Sequence[Any], attrs: Mapping[str, Any], rank: int) -> Tensor:
    """What `rank` gets. pieces, parts: of all ranks of the group."""
    ranks = len(pieces)
    if op == "all_reduce":
        return total(pieces, attrs["combine"]).clone()
    if op == "reduce_scatter":
        low = sum(one[4] for one in parts[:rank])
        dim, outer, n, inner, count = parts[rank]
        apart = total(pieces, "add")
        shape = apart.shape
        apart = apart.reshape(*shape[:dim], outer, n, inner, *shape[dim + 1:]).narrow(dim + 1, low, count)
        return apart.reshape(*shape[:dim], outer * count * inner, *shape[dim + 1:])
    whole = joined(pieces, parts[rank], [one[4] for one in parts])
    if op == "all_gather":
        return whole
    into = attrs["into"][0]
    assert into[4] == ceil_counts(into[2], ranks)[rank], into
    return cut(whole, into, ranks, rank)
