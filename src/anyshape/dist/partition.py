"""SPMD partitioner: a graph and its placements along one axis become the graph of every rank, with collectives.

    y = matmul(x, w)   x S(0), w R       -->  the same, of fewer rows
    y = matmul(x, w)   x S(1), w S(0)    -->  p = matmul(x, w);  y = all_reduce(p | axis=tensor, combine=add)

Equations are taken in order. Each has a few strategies, by its factors and by where its operands lie, and the one that
moves and computes the least is taken; a result that is a partial sum is charged with the collective that adds it up.
The local graph is one for all ranks: `rank_tensor` (of the axis `tensor`), and the local number of each size that does
not divide evenly, are inputs that are sizes. Other axes are done by partitioning the local graph again, whose
collectives pass dims that they do not touch. Xu et al., "GSPMD" (2021), section 4, for partitioning by operators;
greedy choice in place of its fixed priorities.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from anyshape.dist.placement import REPLICATE, Partial, Placement, Replicate, Shard, exact
from anyshape.dist.reshape import reshaped
from anyshape.dist.rules import Factor, factors, passes_partial
from anyshape.dist.sharding import Sharding
from anyshape.ir.graph import Attr, Graph, Node, Operand, Value
from anyshape.ir.op import OPS, row
from anyshape.ir.types import SizeType, TensorType, kind_of, size_of
from anyshape.ops.collective import COLLECTIVES, RINGS, Parts, parts_of
from anyshape.sym.expr import Expr, Size, ceildiv, coefficient_of, minimum, product, symbol, symbols_of

FAR = 1000.0  # what a byte costs that is not to move, in bytes
DEBT = 0.99  # of the cost of adding up a partial result, which is charged where it is made
TOUCH = 0.02  # bytes sent in the time in which one byte of a result is computed
EXTREMES = ("amax", "amin")
ATTENTION = {"attention": 0, "attention_backward": 1}  # by op, the place of its queries
Choice = tuple[tuple[Placement | None, ...], tuple[Placement, ...]]  # of operands, of results


@dataclass(frozen=True, slots=True)
class LocalGraph:
    """What a partition gives.

    graph: of every rank.
    sharding: what it was made by.
    counts: (symbol, n): the local number of n, where it is no formula; as size inputs behind those of the graph.
    layouts: (name of a value of the graph before, its placement) each.
    """

    graph: Graph
    sharding: Sharding
    counts: tuple[tuple[str, Size], ...]
    layouts: tuple[tuple[str, Placement], ...]

    @property
    def rank_symbol(self) -> str:
        """The size input that says where a rank is along the axis."""
        return rank_symbol(self.sharding.axis)


def rank_symbol(axis: str) -> str:
    """The name of the size input that says where a rank is along `axis`."""
    return f"rank_{axis}"


def partition(graph: Graph, sharding: Sharding, flops_per_byte: float = 500.0) -> LocalGraph:
    """One rank's graph.

    Args:
        graph: with a value for every tensor of `sharding`.
        flops_per_byte: multiply-adds done in the time in which one byte is sent.
    """
    return _Partitioner(graph, sharding, flops_per_byte).run()


class _Partitioner:
    def __init__(self, graph: Graph, sharding: Sharding, flops_per_byte: float) -> None:
        self.graph = graph
        self.sharding = sharding
        self.k = sharding.ranks
        self.flops_per_byte = flops_per_byte
        self.made = graph.producers()
        self.names = {v.name for v in graph.inputs} | set(self.made)
        self.local: dict[str, Value] = {}
        self.place: dict[str, Placement] = {}
        self.first: dict[str, Placement] = {}  # where a value lay when it was made
        self.copies: dict[str, dict[Placement, Value]] = {}
        self.nodes: list[Node] = []
        self.counts: dict[Size, str] = {}
        self.zeros: set[str] = set()
        self.totals: dict[Size, Value] = {}
        shapes = {v.name: v.tensor.shape for v in [*graph.inputs, *(o for n in graph.nodes for o in n.outputs)]
                  if isinstance(v.type, TensorType)}
        self.pins = {name: self.canonical(one, shapes[name]) for name, one in sharding.pins if name in shapes}
        self.placed = {name: self.canonical(one, shapes[name]) for name, one in sharding.placements}
        self.data = reached(graph, sharding.data)

    # ---- sizes

    def canonical(self, placed: Placement, shape: tuple[Size, ...]) -> Placement:
        """With its n; of an n that the ranks divide, k parts are dealt out, which fits more dims."""
        if not isinstance(placed, Shard):
            return placed
        placed = placed.of(shape)
        n = placed.count
        return Shard(placed.dim, placed.outer, self.k) if isinstance(n, int) and n and n % self.k == 0 else placed

    def count(self, n: Size) -> Size:
        """How many of n this rank has."""
        if isinstance(n, int) and n % self.k == 0:
            return n // self.k
        if n not in self.counts:
            self.counts[n] = self.fresh(f"local_{self.sharding.axis}_{len(self.counts)}")
        return symbol(self.counts[n])

    def parts(self, shape: tuple[Size, ...], placed: Shard) -> Parts:
        return Parts(placed.dim, placed.outer, placed.count, placed.inner(shape), self.count(placed.count))

    def shape(self, shape: tuple[Size, ...], placed: Placement) -> tuple[Size, ...]:
        return self.parts(shape, placed).local(shape) if isinstance(placed, Shard) else shape

    def bytes(self, kind: TensorType) -> float:
        return float(self.graph.facts.hint(kind.bytes))

    # ---- moving a value

    def move_cost(self, value: Value, wanted: Placement) -> float:
        """Bytes that a rank sends to bring a value to `wanted`."""
        have = self.place[value.name]
        if have == wanted or wanted in self.copies.get(value.name, {}):
            return 0.0
        part = self.bytes(value.tensor) * (self.k - 1) / self.k
        if isinstance(have, Replicate):
            return 0.0 if isinstance(wanted, Shard) else float("inf")
        if isinstance(have, Partial):
            if isinstance(wanted, Replicate):
                return 2 * part + 1
            return part + 1 if isinstance(wanted, Shard) and have.combine == "add" else float("inf")
        if isinstance(wanted, Partial):
            return float("inf")
        keep = self.sharding.keep
        stays = keep != "" and (keep == "data") == (value.name in self.data)
        return (part + 1 if isinstance(wanted, Replicate) else part / self.k + 1) * (FAR if stays else 1.0)

    def moved(self, value: Value, wanted: Placement) -> Value:
        """The local value of `value` at `wanted`, by a collective where it has to move."""
        have, local = self.place[value.name], self.local[value.name]
        if have == wanted:
            return local
        copies = self.copies.setdefault(value.name, {})
        if wanted not in copies:
            copies[wanted] = self.collective(value, local, have, wanted)
        if isinstance(have, Partial) and isinstance(wanted, Replicate):  # what has been added up stays so
            self.place[value.name], self.local[value.name] = wanted, copies[wanted]
        return copies[wanted]

    def collective(self, value: Value, local: Value, have: Placement, wanted: Placement) -> Value:
        shape, axis = value.tensor.shape, self.sharding.axis
        if isinstance(have, Replicate):
            assert isinstance(wanted, Shard), wanted
            return self.own_part(value, local, wanted)
        if isinstance(have, Partial) and isinstance(wanted, Replicate):
            return self.emit("all_reduce", local, axis=axis, combine=have.combine)
        if isinstance(have, Partial):
            assert isinstance(wanted, Shard) and have.combine == "add", (have, wanted)
            return self.emit("reduce_scatter", local, axis=axis, parts=(self.parts(shape, wanted).attr(),))
        parts = (self.parts(shape, have).attr(),)
        if isinstance(wanted, Replicate):
            return self.emit("all_gather", local, axis=axis, parts=parts)
        assert isinstance(wanted, Shard), wanted
        return self.emit("all_to_all", local, axis=axis, parts=parts, into=(self.parts(shape, wanted).attr(),))

    def own_part(self, value: Value, local: Value, wanted: Shard) -> Value:
        """This rank's part of what it has whole."""
        node = self.made.get(value.name)
        shape = self.shape(value.tensor.shape, wanted)
        if node is not None and node.op == "full" and not isinstance(node.inputs[0], Value):
            return self.emit("full", node.inputs[0], shape=shape, dtype=value.tensor.dtype, **_device(node))
        one = self.parts(value.tensor.shape, wanted)
        each = one.n // self.k if isinstance(one.n, int) and one.n % self.k == 0 else ceildiv(one.n, self.k)
        start = symbol(rank_symbol(self.sharding.axis)) * each
        if not (isinstance(one.n, int) and one.n % self.k == 0):
            start = minimum(start, one.n)
        dim, whole = one.dim, value.tensor.shape
        if one.outer == 1:
            return self.emit("slice", local, dim=dim, start=start * one.inner, count=one.count * one.inner, step=1)
        apart = self.emit("reshape", local, shape=(*whole[:dim], one.outer, one.n, one.inner, *whole[dim + 1:]))
        cut = self.emit("slice", apart, dim=dim + 1, start=start, count=one.count, step=1)
        return self.emit("reshape", cut, shape=shape)

    def emit(self, op: str, *inputs: Operand, **attrs: Attr) -> Value:
        """Append an equation of the partitioner's own."""
        first = next((v for v in inputs if isinstance(v, Value)), None)
        types = OPS[op].infer(inputs, attrs)
        out = Value(self.fresh(f"{first.name}_{op}" if first is not None else op), types[0])
        where = f"placement along {self.sharding.axis}"
        self.nodes.append(Node(op, inputs, tuple(attrs.items()), (out,), where))
        return out

    def fresh(self, hint: str) -> str:
        name, number = hint, 1
        while name in self.names:
            name, number = f"{hint}_{number}", number + 1
        self.names.add(name)
        return name

    # ---- sizes that callers give in parts

    def total(self, size: Size) -> Size | Value:
        """A size as an operand: where it is a multiple of a number that callers give in parts, the sum of what
        ranks have, so that they need not agree on it; else as it is."""
        given = [name for name in self.sharding.given if isinstance(size, Expr) and name in symbols_of(size)]
        parts = coefficient_of(size, given[0]) if len(given) == 1 and isinstance(size, Expr) else None
        if parts is None or parts[1] != 0:
            return size
        if size not in self.totals:
            own = self.emit("full", self.count(symbol(given[0])) * parts[0], shape=(), dtype="i64")
            self.totals[size] = self.emit("all_reduce", own, axis=self.sharding.axis, combine="add")
        return self.totals[size]

    # ---- strategies

    def strategies(self, node: Node) -> Iterator[Choice]:
        """Ways to do an equation; the first one, with everything whole, is always there."""
        tensors = [v for v in node.inputs if isinstance(v, Value)]
        whole = tuple(REPLICATE if isinstance(v, Value) else None for v in node.inputs)
        yield whole, (REPLICATE,) * len(node.outputs)
        yield from self.partials(node, tensors, whole)
        seeds = [(i, one) for i, v in enumerate(node.inputs) if isinstance(v, Value)
                 for one in (self.place[v.name], *self.copies.get(v.name, {})) if isinstance(one, Shard)]
        pins = [(j, one) for j, v in enumerate(node.outputs)
                for one in (self.pins.get(v.name),) if isinstance(one, Shard)]
        pins += self.rows(node)
        if node.op == "reshape":
            source, result = tensors[0].tensor.shape, node.output.tensor.shape
            for _, one in seeds:
                if (found := reshaped(source, result, one)) is not None:
                    yield (one,), (found,)
            for _, one in pins:
                if (found := reshaped(result, source, one)) is not None:
                    yield (found,), (one,)
            return
        yield from self.by_factors(node, [*seeds, *self.heads(node, seeds)], pins)
        yield from self.ring(node)
        yield from self.lookups(node, pins)

    def rows(self, node: Node) -> Iterator[tuple[int, Shard]]:
        """Of what is made of numbers alone, dims that have as many elements as a batch has rows: each rank makes its
        own, and needs not know how many the others have."""
        if any(v.tensor.rank for v in node.values()) or row(node).kind == "pointwise":
            return
        for name in self.sharding.given:
            for place, value in enumerate(node.outputs):
                for dim, size in enumerate(value.tensor.shape):
                    if isinstance(size, Expr) and exact(size, symbol(name)) is not None:
                        yield place, Shard(dim, 1, symbol(name))

    def partials(self, node: Node, tensors: list[Value], whole: tuple[Placement | None, ...]) -> Iterator[Choice]:
        """Partial sums that pass through."""
        places = [self.place[v.name] for v in tensors]
        for one in dict.fromkeys(place for place in places if isinstance(place, Partial)):
            mine = {v.name for v, place in zip(tensors, places, strict=True) if place == one}
            if passes_partial(node, mine, one.combine, self.zeros):
                yield (tuple(one if isinstance(v, Value) and v.name in mine else p
                             for v, p in zip(node.inputs, whole, strict=True)), (one,) * len(node.outputs))

    def by_factors(self, node: Node, seeds: list[tuple[int, Shard]], pins: list[tuple[int, Shard]]) -> Iterator[Choice]:
        found: dict[Choice, None] = {}
        for factor in factors(node):
            if row(node).into is not None and factor.outs == ("add",) and not self.is_zero(node.inputs[0]):
                continue
            for dim, one in [*((factor.ins[i], one) for i, one in seeds), *((factor.outs[j], one) for j, one in pins)]:
                if dim == one.dim and self.divides(node, factor, one):
                    found[_choice(node, factor, one)] = None
        yield from found

    def divides(self, node: Node, factor: Factor, one: Shard) -> bool:
        """Has every dim that runs with the loop the factor that is dealt out?"""
        if node.op == "convolution" and factor.ins[0] != 0 and not self.has_all(one):
            return False  # PyTorch has none without channels
        if any(exact(part.outer, one.outer * one.count) is None for part in _parts_along(node, one.dim)):
            return False
        pairs = [*zip(node.inputs, factor.ins, strict=True), *zip(node.outputs, factor.outs, strict=True)]
        return all(exact(v.tensor.shape[d], one.outer * one.count) is not None
                   for v, d in pairs if isinstance(v, Value) and isinstance(d, int))

    def heads(self, node: Node, seeds: list[tuple[int, Shard]]) -> Iterator[tuple[int, Shard]]:
        """Of attention over a sequence that is dealt out, heads in its place (Ulysses: Jacobs et al., 2023)."""
        if self.sharding.attention == "ulysses" and node.op in ATTENTION and any(one.dim == 2 for _, one in seeds):
            for i, value in enumerate(node.inputs[:ATTENTION[node.op] + 3]):
                assert isinstance(value, Value)
                yield i, self.canonical(Shard(1), value.tensor.shape)  # type: ignore[misc]

    def ring(self, node: Node) -> Iterator[Choice]:
        """Attention over a sequence that is dealt out, keys and values going around (Liu et al., "Ring Attention",
        2023); none with a mask, whose columns each rank would need."""
        if self.sharding.attention != "ring" or node.op not in ATTENTION:
            return
        before = ATTENTION[node.op]
        tensors = list(node.values())
        if len(tensors) != (6 if before else 3):
            return
        q, k = tensors[before], tensors[before + 1]
        rows = self.canonical(Shard(2), q.tensor.shape)
        columns = self.canonical(Shard(2), k.tensor.shape)
        if self.place[q.name] != rows or not isinstance(rows, Shard) or not isinstance(columns, Shard):
            return
        first, other = replace(rows, dim=1), replace(columns, dim=1)
        if before:
            yield (rows, rows, columns, columns, rows, rows), (first, other, other)
        else:
            yield (rows, columns, columns), (first, rows)

    def lookups(self, node: Node, pins: list[tuple[int, Shard]]) -> Iterator[Choice]:
        """Of a table whose rows are dealt out: zero where another rank has the row; and writes into own rows only."""
        if node.op in ("take", "gather"):
            table = node.inputs[0]
            assert isinstance(table, Value)
            one = self.place[table.name]
            if isinstance(one, Shard) and one.dim == node.attr("dim") and self.is_a_range(one, table):
                yield (one, REPLICATE), (Partial("add"),)
        elif node.op == "put_add" and node.attr("dims") in ((0,),) and self.is_zero(node.inputs[0]):
            for _, one in pins:
                if one.dim == 0 and self.is_a_range(one, node.output):
                    yield (one, REPLICATE, REPLICATE), (one,)

    def is_a_range(self, one: Shard, table: Value) -> bool:
        """Has each rank one range of rows, and at least one row?"""
        return one.outer == 1 and isinstance(table.tensor.shape[one.dim], int) and self.has_all(one)

    def has_all(self, one: Shard) -> bool:
        """Has every rank a part, whatever the sizes are?"""
        n = one.count
        return isinstance(n, int) and n > -(-n // self.k) * (self.k - 1)

    def is_zero(self, operand: Operand) -> bool:
        return isinstance(operand, Value) and operand.name in self.zeros

    # ---- the choice

    def cost(self, node: Node, choice: Choice) -> float:
        ins, outs = choice
        total = sum(self.move_cost(v, p) for v, p in zip(node.inputs, ins, strict=True)
                    if isinstance(v, Value) and p is not None)
        total += self.work(node) / (1 if all(isinstance(p, Replicate) for p in outs) else self.k)
        for value, place in zip(node.outputs, outs, strict=True):
            bytes, pin = self.bytes(value.tensor), self.pins.get(value.name)
            if pin is None:  # a debt: it will be added up somewhere
                total += DEBT * 2 * bytes * (self.k - 1) / self.k if isinstance(place, Partial) else 0.0
            elif place != pin:  # what it takes to bring it there
                reduces = 1.0 if isinstance(pin, Shard) else 2.0
                total += {Replicate: 0.0, Shard: 1.0, Partial: reduces}[type(place)] * bytes
                total += bytes if isinstance(pin, Replicate) and isinstance(place, Shard) else 0.0
        return total

    def work(self, node: Node) -> float:
        total = sum(self.bytes(v.tensor) for v in node.outputs) * TOUCH
        if node.op == "matmul":
            a, b = (v.tensor.shape for v in node.values())
            total += 2.0 * self.graph.facts.hint(product(a)) * self.graph.facts.hint(b[-1]) / self.flops_per_byte
        return total

    # ---- the local graph

    def run(self) -> LocalGraph:
        self.inputs()
        for node in self.graph.nodes:
            best, least = None, float("inf")
            for choice in self.strategies(node):
                cost = self.cost(node, choice)
                if cost < least:
                    best, least = choice, cost
            assert best is not None, node
            self.write(node, *best)
            for value in node.outputs:
                pin = self.pins.get(value.name)
                if pin is not None and pin != self.place[value.name] and self.move_cost(value, pin) < float("inf"):
                    moved = self.moved(value, pin)
                    self.place[value.name], self.local[value.name] = pin, moved
        return self.finished()

    def inputs(self) -> None:
        for value in self.graph.inputs:
            if isinstance(value.type, SizeType):
                self.local[value.name] = value
                continue
            place = self.place[value.name] = self.placed.get(value.name, REPLICATE)
            kind = value.type if isinstance(place, Replicate) else TensorType(
                value.tensor.dtype, self.shape(value.tensor.shape, place), None, value.tensor.device)
            self.local[value.name] = Value(value.name, kind)
        self.first = dict(self.place)

    def finished(self) -> LocalGraph:
        given = {symbol(name) for name in self.sharding.given}

        def result(operand: Operand | None) -> Operand | None:
            if not isinstance(operand, Value) or isinstance(operand.type, SizeType):
                return operand
            place = self.place[operand.name]
            stays = isinstance(place, Shard) and place.count in given  # callers get rows for the rows that they gave
            return self.local[operand.name] if stays else self.moved(operand, REPLICATE)

        outputs = tuple(result(one) for one in self.graph.outputs)
        writes = tuple((self.local[target.name], self.moved(value, self.first[target.name]))
                       for target, value in self.graph.writes)
        sizes = [Value(rank_symbol(self.sharding.axis), SizeType()),
                 *(Value(name, SizeType()) for name in self.counts.values())]
        inputs = (*(self.local[v.name] for v in self.graph.inputs), *sizes)
        graph = self.graph.replace(inputs=inputs, nodes=tuple(self.nodes), outputs=outputs, writes=writes,
                                   output_strides=(), memory=())
        return LocalGraph(graph, self.sharding, tuple((name, n) for n, name in self.counts.items()),
                          tuple(self.first.items()))

    def write(self, node: Node, ins: tuple[Placement | None, ...], outs: tuple[Placement, ...]) -> None:
        """The equation on local values."""
        given: list[Operand] = [v if p is None or not isinstance(v, Value) else self.moved(v, p)
                                for v, p in zip(node.inputs, ins, strict=True)]
        if row(node).kind == "pointwise":
            given = [self.as_operand(one, node) for one in given]
        kinds = [TensorType(v.tensor.dtype, self.shape(v.tensor.shape, p),
                            None if isinstance(p, Shard) else v.tensor.strides, v.tensor.device)
                 for v, p in zip(node.outputs, outs, strict=True)]
        made = tuple(Value(v.name, kind) for v, kind in zip(node.outputs, kinds, strict=True))
        for value, own, place in zip(node.outputs, made, outs, strict=True):
            self.local[value.name] = own
            self.place[value.name] = self.first[value.name] = place
        attrs = dict(node.attrs)
        if "shape" in attrs:
            attrs["shape"] = kinds[0].shape
        if node.op == "slice" and isinstance(outs[0], Shard) and attrs["dim"] == outs[0].dim:
            attrs["count"] = kinds[0].shape[outs[0].dim]
        op = node.op
        if op in ATTENTION and all(isinstance(one, Shard) and one.dim == 2 for one in ins):
            op, at = f"ring_{op}", ATTENTION[op]
            attrs |= {"axis": self.sharding.axis, "parts": tuple(
                self.parts(node.inputs[i].tensor.shape, ins[i]).attr() for i in (at, at + 1))}  # type: ignore
        if isinstance(outs[0], Shard) and _parts_along(node, outs[0].dim):
            attrs |= {name: tuple(self.within(part, outs[0]).attr() for part in parts_of(node, name))
                      for name in ("parts", "into") if name in attrs}
        if node.op in EXTREMES and isinstance(outs[0], Partial) and isinstance(ins[0], Shard):
            given[0] = self.never_empty(given[0], ins[0], node.op)
        counted = self.total(node.inputs[0]) if node.op == "full" and isinstance(node.inputs[0], Expr) else None
        if isinstance(counted, Value):
            cast = counted if made[0].tensor.dtype == "i64" else self.emit("cast", counted, dtype=made[0].tensor.dtype)
            self.nodes.append(Node("broadcast", (cast,), (("shape", made[0].tensor.shape),), made, node.where))
        elif self.is_lookup(node, ins):
            self.lookup(node, given, attrs, made[0], ins[0])
        else:
            self.nodes.append(Node(op, tuple(given), tuple(attrs.items()), made, node.where))
        if _is_zero(node, self.zeros):
            self.zeros.add(node.output.name)

    def within(self, part: Parts, place: Shard) -> Parts:
        """The parts along another axis, of what this rank has of the elements before them."""
        if part.dim != place.dim:
            return part
        inner = exact(part.outer, place.outer * place.count)
        assert inner is not None, (part, place)
        return replace(part, outer=place.outer * self.count(place.count) * inner)

    def never_empty(self, operand: Operand, place: Shard, op: str) -> Operand:
        """A rank may have no part, and there is no maximum of nothing: one more element that changes none."""
        assert isinstance(operand, Value)
        if self.has_all(place):
            return operand
        kind = operand.tensor
        if kind_of(kind.dtype) == "float":
            least: float | int = float("-inf") if op == "amax" else float("inf")
        else:
            bits, low = 8 * size_of(kind.dtype), kind_of(kind.dtype) == "int"
            least = (-(1 << bits - 1) if low else 0) if op == "amax" else (1 << bits - low) - 1
        high = tuple(int(d == place.dim) for d in range(kind.rank))
        return self.emit("pad", operand, low=(0,) * kind.rank, high=high, value=least)

    def as_operand(self, operand: Operand, node: Node) -> Operand:
        """A size that callers give in parts as a tensor of the dtype that a pointwise equation takes it in."""
        if not isinstance(operand, Expr):
            return operand
        total = self.total(operand)
        if not isinstance(total, Value):
            return operand
        values = [v for v in (node.inputs[1:] if node.op == "where" else node.inputs) if isinstance(v, Value)]
        dtype = values[0].tensor.dtype
        return total if dtype == "i64" else self.emit("cast", total, dtype=dtype)

    def is_lookup(self, node: Node, ins: tuple[Placement | None, ...]) -> bool:
        if node.op in ("take", "gather"):
            return isinstance(ins[0], Shard) and ins[0].dim == node.attr("dim")
        return node.op == "put_add" and isinstance(ins[0], Shard) and ins[0].dim == 0 and node.attr("dims") == (0,)

    def lookup(self, node: Node, given: list[Operand], attrs: Mapping[str, Attr], made: Value,
               place: Placement | None) -> None:
        """Rows of a table of which this rank has a range: indices count from its first row; zero elsewhere."""
        assert isinstance(place, Shard)
        whole = node.inputs[0].tensor.shape[place.dim]  # type: ignore[union-attr]
        one = self.parts(node.inputs[0].tensor.shape, place)  # type: ignore[union-attr]
        each = ceildiv(one.n, self.k) * one.inner
        own = one.count * one.inner
        start = symbol(rank_symbol(self.sharding.axis)) * each
        if node.op == "put_add":  # elements whose place is outside go nowhere
            here = self.emit("sub", given[2], start)
            self.nodes.append(Node(node.op, (given[0], given[1], here), tuple(attrs.items()), (made,), node.where))
            return
        index = self.emit("checked", given[1], size=whole, wrap=False)
        here = self.emit("sub", index, start)
        inside = self.emit("bit_and", self.emit("ge", here, 0), self.emit("lt", here, own))
        found = self.emit(node.op, given[0], self.emit("where", inside, here, 0), **attrs)
        rank, after = inside.tensor.rank, made.tensor.rank - place.dim - inside.tensor.rank
        if node.op == "take" and after:
            inside = self.emit("reshape", inside, shape=(*inside.tensor.shape, *[1] * after))
        assert rank <= made.tensor.rank
        self.nodes.append(Node("where", (inside, found, False if made.tensor.dtype == "bool" else 0), (), (made,),
                               node.where))


def _choice(node: Node, factor: Factor, one: Shard) -> Choice:
    ins = tuple(None if not isinstance(v, Value) else REPLICATE if d is None else Shard(d, one.outer, one.count)
                for v, d in zip(node.inputs, factor.ins, strict=True))
    return ins, tuple(Partial(d) if isinstance(d, str) else Shard(d, one.outer, one.count) for d in factor.outs)


def reached(graph: Graph, names: Iterable[str]) -> frozenset[str]:
    """The values that are computed from these inputs."""
    found = set(names)
    for node in graph.nodes:
        if any(v.name in found for v in node.values()):
            found.update(v.name for v in node.outputs)
    return frozenset(found)


def _parts_along(node: Node, dim: int) -> list[Parts]:
    """How a collective of another axis deals out a dim."""
    if node.op not in COLLECTIVES or node.op in RINGS:
        return []
    return [one for name in ("parts", "into") if name in dict(node.attrs) for one in parts_of(node, name)
            if one.dim == dim]


def _is_zero(node: Node, zeros: set[str]) -> bool:
    if node.op == "full":
        return not isinstance(node.inputs[0], (Value, Expr)) and node.inputs[0] == 0
    return node.op in ("broadcast", "reshape", "cast") and any(v.name in zeros for v in node.values())


def _device(node: Node) -> dict[str, Attr]:
    return {name: value for name, value in node.attrs if name == "device"}
