"""Row tiling: a chain of equations whose rows are independent, from a product to products, runs band by band of rows
(of a language model: chunked, or fused, linear cross entropy).

    l = h @ w;  p = softmax(l);  g = p - y;  dh = g @ w^T;  dw = g^T @ h       l, p, g: [rows, many columns]
    -->  for each band of rows:  l = h[band] @ w;  ...;  dh[band] = g @ w^T;  dw += g^T @ h[band]

Of what is wide in between, the logits of a language model and their gradient, there is one band at a time, and what
leaves the chain is narrow, or a sum over rows. It takes forward and backward in one graph, as a whole train step has
them: all of the chain runs in the forward, where a band's logits are, and nothing is computed twice. A loss in which
wide values need what was summed over all rows (the gradient of exp(mean(...))) is no such chain, nor is one whose
logits are a result.

Bands are so many at every size, of at least LEAST_ROWS rows; where there are fewer, the last ones are empty, and cost
nothing. What may be dealt out by rows is what dist/rules.py says of ranks.

Source of the idea: Hsu et al., "Liger Kernel" (2024), section 3.2; Wijmans et al., "Cut Your Losses in Large-Vocabulary
Language Models" (2024).
"""
from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from anyshape.dist.placement import Shard
from anyshape.dist.reshape import reshaped
from anyshape.dist.rules import Factor, factors
from anyshape.ir.graph import Attr, Graph, Node, Operand, Value, has_effect
from anyshape.ir.op import OPS, row
from anyshape.ir.types import SizeType, TensorType
from anyshape.ops.collective import COLLECTIVES
from anyshape.sym.expr import Size, ceildiv, maximum, minimum

BANDS, LEAST_ROWS = 8, 64
LEAST_BYTES = 16 << 20  # of the product at the likely sizes: less is not worth the code of the bands
LEAST_GAIN = 4  # a band and the sums over bands take at least this part of the product's bytes less than the product


@dataclass(slots=True)
class _Chain:
    """Equations that run by bands. dims: of values made in it, the dim of the rows; sums: those that are partial sums;
    members: position of an equation -> its loop over rows; copied: those of them that need nothing of the product, and
    stay where they are, too."""

    rows: Size
    dims: dict[str, int] = field(default_factory=dict)
    sums: set[str] = field(default_factory=set)
    members: dict[int, Factor] = field(default_factory=dict)
    copied: set[int] = field(default_factory=set)


def tile_rows(graph: Graph, first: Collection[str],
              equal: Sequence[tuple[Size, Size]] = ()) -> tuple[Graph, frozenset[str]] | None:
    """The graph with its widest chain in bands, and the names of what the forward computes then; None where no chain is
    worth it.

    Args:
        graph: a forward and then a backward.
        first: names of values of the forward.
        equal: pairs of sizes that are one number in every call, such as the rows of a batch and of its labels.
    """
    for seed in _seeds(graph, first):
        chain = _Tiling(_with_one_size(graph, graph.nodes[seed].output.tensor.shape[0], equal), seed).chain()
        if chain is not None:
            return _banded(graph, chain, first)
    return None


def _seeds(graph: Graph, first: Collection[str]) -> list[int]:
    """Positions of products in the forward that are large, the largest first."""
    found = []
    for place, node in enumerate(graph.nodes):
        if node.op == "matmul" and node.output.name in first and node.output.tensor.rank == 2:
            size = graph.facts.hint(node.output.tensor.bytes)
            if size >= LEAST_BYTES and graph.facts.hint(node.output.tensor.shape[0]) >= 2 * LEAST_ROWS:
                found.append((-size, place))
    return [place for _, place in sorted(found)]


def _with_one_size(graph: Graph, rows: Size, equal: Sequence[tuple[Size, Size]]) -> Graph:
    """The graph with `rows` in place of all sizes that are equal to it, in types: what rules compare."""
    same = {b if a == rows else a for a, b in equal if rows in (a, b)}
    if not same:
        return graph
    found = {v: Value(v.name, replace(v.type, shape=tuple(rows if size in same else size for size in v.type.shape)))
             for v in [*graph.inputs, *(one for node in graph.nodes for one in node.outputs)]
             if isinstance(v.type, TensorType) and same.intersection(v.type.shape)}
    graph = graph.with_values(found)
    return graph.replace(nodes=tuple(replace(node, outputs=tuple(found.get(v, v) for v in node.outputs))
                                     for node in graph.nodes))


class _Tiling:
    """The search for the chain that begins with one product."""

    def __init__(self, graph: Graph, seed: int) -> None:
        self.graph = graph
        self.seed = seed
        self.product = graph.nodes[seed].output
        self.found = _Chain(self.product.tensor.shape[0])
        self.makers = {v.name: place for place, node in enumerate(graph.nodes) for v in node.outputs}
        self.later: set[str] = set()  # made of all rows of what the chain makes
        self.least = graph.facts.hint(self.product.tensor.count) // 2

    def chain(self) -> _Chain | None:
        """The chain; None where something wide is needed outside of it, or it gains too little."""
        self.grow()
        self.prune()
        chain = self.found
        if not self.pull_in() or any(self.is_wide(v) for v in leaving(self.graph, chain)):
            return None
        hint = self.graph.facts.hint
        wide = hint(self.product.tensor.bytes)
        sums = sum(hint(v.tensor.bytes) for v in leaving(self.graph, chain) if v.name in chain.sums)
        return chain if wide - wide // BANDS - sums >= wide // LEAST_GAIN else None

    def is_wide(self, value: Value) -> bool:
        return isinstance(value.type, TensorType) and self.graph.facts.hint(value.tensor.count) > self.least

    def grow(self) -> None:
        """All equations that can run by rows on what comes of the product."""
        chain = self.found
        for place in range(self.seed, len(self.graph.nodes)):
            node = self.graph.nodes[place]
            names = {v.name for v in node.values()}
            if place != self.seed and not names & (chain.dims.keys() | self.later):
                continue
            # of a message for all ranks there is one, not one a band
            stays = has_effect(node) or row(node).random or node.op in COLLECTIVES
            one = None if names & self.later or stays else self.loop(node)
            if one is None or place != self.seed and not names & chain.dims.keys():
                self.later.update(v.name for v in node.outputs)
                continue
            chain.members[place] = one
            for value, dim in zip(node.outputs, one.outs, strict=True):
                if isinstance(dim, int):
                    chain.dims[value.name] = dim
                else:
                    chain.sums.add(value.name)
                    self.later.add(value.name)

    def loop(self, node: Node) -> Factor | None:
        """The loop of an equation over the rows of its operands in the chain."""
        dims = self.found.dims
        wanted = [dims.get(v.name) if isinstance(v, Value) else None for v in node.inputs]
        if node is self.graph.nodes[self.seed]:
            return next((one for one in factors(node) if one.outs == (0,)), None)
        for one in self.loops(node, wanted):
            mine = [None if want is None else dim for want, dim in zip(wanted, one.ins, strict=True)]
            if mine == wanted and all(dim == "add" or isinstance(dim, int) for dim in one.outs):
                return one
        return None

    def loops(self, node: Node, wanted: list[int | None]) -> Iterator[Factor]:
        if node.op != "reshape":
            yield from factors(node)
            return
        source, result = next(node.values()).tensor.shape, node.output.tensor.shape
        for dim, size in enumerate(source):
            if dim == wanted[0] and size == self.found.rows:
                after = reshaped(source, result, Shard(dim).of(source))
                if after is not None and after.outer == 1 and result[after.dim] == size:
                    yield Factor((dim,), (after.dim,))

    def prune(self) -> None:
        """Leaves out what follows the chain without leading to anything wide."""
        chain, wanted = self.found, set[str]()
        for place in sorted(chain.members, reverse=True):
            node = self.graph.nodes[place]
            mine = [v for v in node.values() if v.name in chain.dims]
            if any(self.is_wide(v) for v in (*mine, *node.outputs)) or any(v.name in wanted for v in node.outputs):
                wanted.update(v.name for v in mine)
            else:
                del chain.members[place]
        made = {v.name for place in chain.members for v in self.graph.nodes[place].outputs}
        chain.dims = {name: dim for name, dim in chain.dims.items() if name in made}
        chain.sums &= made

    def pull_in(self) -> bool:
        """Takes in what makes wide operands by rows; whether all operands of the chain are there before it."""
        chain = self.found
        waiting = list(chain.members)
        while waiting:
            place = waiting.pop()
            for value, dim in zip(self.graph.nodes[place].inputs, chain.members[place].ins, strict=True):
                if not isinstance(value, Value) or value.name in chain.dims:
                    if isinstance(value, Value) and chain.dims[value.name] != dim:
                        return False
                    continue
                if value.name in self.later:
                    return False
                maker = self.makers.get(value.name)
                if dim is None or maker is None:
                    continue
                node = self.graph.nodes[maker]
                if not any(map(self.is_wide, (value, *node.values()))):
                    continue
                one = next((one for one in factors(node) if one.outs == (dim,)), None)
                if one is None or has_effect(node) or row(node).random or node.op in COLLECTIVES:
                    return False
                chain.members[maker] = one
                chain.copied.add(maker)
                chain.dims[value.name] = dim
                waiting.append(maker)
        return True


def leaving(graph: Graph, chain: _Chain) -> list[Value]:
    """What the chain makes and others read, in order."""
    read = {v.name for v in graph.roots()}
    own = sorted(chain.members.keys() - chain.copied)
    for place, node in enumerate(graph.nodes):
        if place not in chain.members:
            read.update(v.name for v in node.values())
    return [v for place in own for v in graph.nodes[place].outputs if v.name in read]


def _banded(graph: Graph, chain: _Chain, first: Collection[str]) -> tuple[Graph, frozenset[str]]:
    """The bands at the end of the forward, behind all that they read."""
    inside = chain.members.keys() - chain.copied
    out = leaving(graph, chain)
    after = {v.name for v in out}
    before = {v.name for place in chain.members for v in graph.nodes[place].values()}
    behind: set[int] = set()
    for place, node in enumerate(graph.nodes):
        if place not in inside and any(v.name in after for v in node.values()):
            behind.add(place)
            after.update(v.name for v in node.outputs)
    ahead: set[int] = set()
    for place in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[place]
        if place not in inside and any(v.name in before for v in node.outputs):
            ahead.add(place)
            before.update(v.name for v in node.values())
    parts: tuple[list[Node], ...] = ([], [], [], [])
    for place, node in enumerate(graph.nodes):
        is_first = any(v.name in first for v in node.outputs)
        if place not in inside:
            parts[2 if is_first and place in behind else 0 if is_first else 1 if place in ahead else 3].append(node)
    writer = _Bands(graph, chain, out)
    own = writer.run()
    nodes = (*parts[0], *parts[1], *own, *parts[2], *parts[3])
    names = {v.name for node in (*parts[0], *parts[1], *own, *parts[2]) for v in node.outputs}
    facts = replace(graph.facts, known=(*graph.facts.known, *writer.known))
    return graph.replace(nodes=nodes, facts=facts), frozenset(names)


class _Bands:
    """Writes the equations of a chain once for each band."""

    def __init__(self, graph: Graph, chain: _Chain, out: list[Value]) -> None:
        self.graph = graph
        self.chain = chain
        self.out = out
        self.nodes: list[Node] = []
        self.names = {v.name for v in graph.inputs} | {v.name for node in graph.nodes for v in node.outputs}
        self.known: list[Size] = []
        self.done: dict[str, Value] = {}
        self.local: dict[tuple[str, int | None], Value] = {}
        self.made: dict[str, Node] = {}  # of this band
        self.where = ""

    def run(self) -> list[Node]:
        rows = self.chain.rows
        each = maximum(ceildiv(rows, BANDS), LEAST_ROWS)
        starts: list[Size] = [0, *(minimum(k * each, rows) for k in range(1, BANDS)), rows]
        for k, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
            self.known.append(end - start)
            self.band(start, end - start, k)
        return self.nodes

    def band(self, start: Size, count: Size, k: int) -> None:
        self.local, self.made = {}, {}
        for place in sorted(self.chain.members):
            node, one = self.graph.nodes[place], self.chain.members[place]
            self.where = node.where
            given = tuple(self.operand(v, dim, start, count) for v, dim in zip(node.inputs, one.ins, strict=True))
            made = tuple(Value(self.fresh(v.name), self.part(v.tensor, dim, count))
                         for v, dim in zip(node.outputs, one.outs, strict=True))
            attrs = dict(node.attrs)
            if "shape" in attrs:
                attrs["shape"] = made[0].tensor.shape
            if node.op == "slice" and attrs["dim"] == one.outs[0]:
                attrs["count"] = count
            source = node.inputs[0] if node.op == "gather" else None
            if isinstance(source, Value) and source.name in self.chain.dims:
                local, index, dim = given[0], given[1], attrs["dim"]
                assert isinstance(local, Value) and isinstance(index, Value) and isinstance(dim, int)
                made = (self.picked(local, index, dim),)
            else:
                self.nodes.append(Node(node.op, given, tuple(attrs.items()), made, node.where))
                self.made |= {own.name: self.nodes[-1] for own in made}
            for value, own in zip(node.outputs, made, strict=True):
                self.local[value.name, None] = own
        for value in self.out:
            self.where = self.graph.nodes[0].where
            self.gather(value, self.local[value.name, None], start, k)

    def picked(self, source: Value, index: Value, dim: int) -> Value:
        """`gather(source, index)`, of one element a row: from what is there before anything is written over it.

            l = h @ w;  p = sub(l, m);  y = gather(p, i)   -->   s = store(gather(l, i));  y = sub(s, m)

        So the loss, which is read off a band's logits, does not keep them while their gradient is made.
        """
        node, shape = self.made.get(source.name), source.tensor.shape
        if index.tensor.shape != (*shape[:dim], 1, *shape[dim + 1:]):
            return self.emit("gather", source, index, dim=dim)
        if node is None or row(node).kind != "pointwise" or not all(
                v.tensor.rank == len(shape) and v.tensor.shape[dim] in (1, shape[dim]) for v in node.values()):
            return self.picked_first(source, index, dim)
        given = [self.picked(v, index, dim) if isinstance(v, Value) and v.tensor.shape[dim] == shape[dim] else v
                 for v in node.inputs]
        attrs: dict[str, Any] = dict(node.attrs)
        return self.emit(node.op, *given, **attrs)

    def picked_first(self, source: Value, index: Value, dim: int) -> Value:
        """`store(gather(source, index))`, right behind what makes `source` where the index is there by then."""
        start = len(self.nodes)
        found = self.emit("store", self.emit("gather", source, index, dim=dim), dtype=source.tensor.dtype)
        rows = next((node for node in self.nodes if node.op == "slice" and node.output is index), None)
        maker = self.made.get(source.name)
        if maker is not None and rows is not None and index.name not in self.made:
            own = self.nodes[start:]
            self.nodes = [node for node in self.nodes[:start] if node is not rows]
            at = self.nodes.index(maker) + 1
            self.nodes[at:at] = [rows, *own]
        return found

    def part(self, kind: TensorType, dim: int | str, count: Size) -> TensorType:
        if isinstance(dim, str):
            return kind
        return TensorType(kind.dtype, (*kind.shape[:dim], count, *kind.shape[dim + 1:]), None, kind.device)

    def operand(self, operand: Operand, dim: int | None, start: Size, count: Size) -> Operand:
        """What stands for an operand: a value of this band, rows of one that is there, or all of it."""
        if not isinstance(operand, Value) or isinstance(operand.type, SizeType):
            return operand
        if operand.name in self.chain.dims:
            return self.local[operand.name, None]
        if dim is None:
            return operand
        if (operand.name, dim) not in self.local:
            self.local[operand.name, dim] = self.emit("slice", operand, dim=dim, start=start, count=count, step=1)
        return self.local[operand.name, dim]

    def gather(self, value: Value, own: Value, start: Size, k: int) -> None:
        """Adds a band's part to what leaves the chain; the last band's makes the value itself."""
        last = value if k == BANDS - 1 else None
        if value.name in self.chain.sums:
            half = value.tensor.dtype in ("f16", "bf16")  # a sum over bands that is rounded once
            own = self.emit("cast", own, dtype="f32") if half else own
            total = own if k == 0 else self.emit("add", self.done[value.name], own, made=None if half else last)
            ends = half and last is not None
            self.done[value.name] = self.emit("cast", total, dtype=value.tensor.dtype, made=last) if ends else total
            return
        if k == 0:
            kind = value.tensor
            self.done[value.name] = self.emit("full", False if kind.dtype == "bool" else 0, shape=kind.shape,
                                              dtype=kind.dtype)
        self.done[value.name] = self.emit("overwrite", self.done[value.name], own, made=last,
                                          dim=self.chain.dims[value.name], start=start, step=1)

    def emit(self, op: str, *inputs: Operand, made: Value | None = None, **attrs: Attr) -> Value:
        (kind,) = OPS[op].infer(inputs, attrs)
        out = Value(self.fresh(op), kind) if made is None else made
        self.nodes.append(Node(op, inputs, tuple(attrs.items()), (out,), self.where))
        return out

    def fresh(self, name: str) -> str:
        k = 1
        while f"{name}_{k}" in self.names:
            k += 1
        self.names.add(f"{name}_{k}")
        return f"{name}_{k}"
