"""Ragged batches: which sizes all ranks must have alike, proved on the local graph.

A batch that is dealt out by rows may have another length on each rank, if no message has that length in its shape and
nothing that all ranks are to have alike depends on it. So the walk marks what is replicated in form and differs from
rank to rank: a table of positions, say. Rows of a batch may use it; a collective, a result or a written weight may not.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from anyshape.dist.partition import LocalGraph
from anyshape.dist.placement import Shard
from anyshape.ir.graph import Graph, Node, Operand, Value
from anyshape.ir.types import SizeType
from anyshape.ops.collective import COLLECTIVES, parts_of
from anyshape.sym.expr import Expr, coefficient_of, symbols_of


@dataclass(frozen=True, slots=True)
class Needs:
    """What must hold of the ranks' batches.

    equal: symbols that all ranks must have alike, with what is combined over ranks and depends on them.
    even: what takes parts of equal size, dealt out by ceil; "" where ranks may have any number of rows.
    """

    equal: dict[str, str] = field(default_factory=dict)
    even: str = ""


def needs_of(local: Graph, chain: Sequence[LocalGraph], graph: Graph) -> Needs:
    """The needs of a local graph. graph: of one rank alone, whose sizes are its inputs."""
    data = [one for one in chain if one.sharding.given]
    given = {name for one in data for name in one.sharding.given}
    free = {v.name for v in graph.inputs if isinstance(v.type, SizeType)} - given
    equal: dict[str, str] = {}
    if data:
        sharded = _sharded(data)
        own = [name for one in data for name, n in one.counts if str(n) in one.sharding.given]
        varies: dict[str, frozenset[str]] = {}
        for node in local.nodes:
            found = _varying(node, varies, free, sharded, own)
            for value in node.outputs:
                varies[value.name] = found
            if node.op in COLLECTIVES:
                for name in sorted(found):
                    equal.setdefault(name, f"{node.outputs[0].name} = {node.op}(...), {node.where}")
        for operand in (*local.outputs, *(value for _, value in local.writes)):
            for name in sorted(_of(operand, varies)):
                equal.setdefault(name, f"the result {operand}")
    return Needs(equal, _even(local, given))


def _sharded(data: Sequence[LocalGraph]) -> frozenset[str]:
    """Values that are rows of a batch: along every data axis, parts of what callers give."""
    every = [{name for name, place in one.layouts if isinstance(place, Shard) and isinstance(place.n, Expr)
              and symbols_of(place.n) <= set(one.sharding.given)} for one in data]
    return frozenset(set.intersection(*every))


def _of(operand: Operand | None, varies: dict[str, frozenset[str]]) -> frozenset[str]:
    return varies.get(operand.name, frozenset()) if isinstance(operand, Value) else frozenset()


def _varying(node: Node, varies: dict[str, frozenset[str]], free: set[str], sharded: frozenset[str],
             own: Sequence[str]) -> frozenset[str]:
    """The free symbols on which a value depends that all ranks have in form; rows of a batch depend on their own, and
    so does what is counted over them. own: symbols of the numbers of rows that a rank has."""
    if all(value.name in sharded for value in node.outputs):
        return frozenset()
    if node.op == "full" and isinstance(node.inputs[0], Expr) and not node.output.tensor.rank:
        for name in own:
            parts = coefficient_of(node.inputs[0], name) if name in symbols_of(node.inputs[0]) else None
            if parts is not None and parts[1] == 0:
                return frozenset()
    found = {name for value in node.outputs for size in value.tensor.shape for name in _symbols(size)} & free
    if any(value.name in sharded for value in node.values()):  # a sum over rows, of what each row makes of its own
        return frozenset(found)
    for operand in node.inputs:
        found |= _of(operand, varies)
        if isinstance(operand, Expr):
            found |= symbols_of(operand) & free
    for name, attr in node.attrs:
        if name not in ("shape", "parts", "into"):
            found |= _symbols(attr) & free
    return frozenset(found)


def _symbols(attr: object) -> set[str]:
    if isinstance(attr, Expr):
        return set(symbols_of(attr))
    return {name for one in attr for name in _symbols(one)} if isinstance(attr, tuple) else set()


def _even(local: Graph, given: set[str]) -> str:
    """The first equation that reads a number of rows which is not this rank's own."""
    for node in local.nodes:
        sizes = [operand for operand in node.inputs if isinstance(operand, Expr)]
        used = {name for size in sizes for name in symbols_of(size)} | {
            name for _, attr in node.attrs for name in _symbols(attr)}
        if node.op in ("all_gather", "reduce_scatter", "all_to_all"):
            used |= {name for one in parts_of(node) for size in (one.outer, one.n) if isinstance(size, Expr)
                     for name in symbols_of(size)}
        if used & given:
            return f"{node.outputs[0].name} = {node.op}(...), {node.where},"
    return ""
