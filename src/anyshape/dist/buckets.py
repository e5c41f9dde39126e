"""Buckets of collectives: messages that may travel together become one, and what waits for them is put off.

    a = all_reduce(g1); w1 = f(a); b = all_reduce(g2); w2 = f(b)   -->   a, b = all_reduce(g1, g2); w1 = f(a); w2 = f(b)

A message costs its latency, whatever it brings; so gradients are added up in few messages (Li et al., "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2). The walk takes equations in
order. A collective opens a bucket or joins one; what depends on it waits. When a bucket is full, or all the rest waits,
it is sent, and what waited follows.

A bucket hides behind the backward of the gradients that come later, and the last one behind the weight updates of those
before, where an optimiser reads and writes several numbers for each one that is sent. So buckets are of equal size: of
larger first ones less of the backward is left, and larger last ones have fewer updates. There is one for some fifteen
tensors: of a llama of 4 layers, with 39 parameters, two.
"""
from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from anyshape.ir.graph import Attr, Graph, Node, Value, has_effect
from anyshape.ir.op import row
from anyshape.ir.types import TensorType
from anyshape.ops.collective import COLLECTIVES
from anyshape.sym.expr import Size

BUCKET_BYTES = 100 << 20  # the most of one message, which is memory while it is under way
# the same of what is dealt out: of weights that are gathered, which are held from then on, and nothing hides the first
# ones; of gradients that are scattered, each in a message longer than they are. On the loopback (dist/mesh.py) a
# message of so many bytes takes 40 times as long as it takes to begin
GATHER_BYTES = 8 << 20
TENSORS = 15  # that a bucket is for
JOINED = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(slots=True)
class _Bucket:
    key: tuple[Attr, ...]
    nodes: list[Node] = field(default_factory=list)
    bytes: Size = 0


class _MessageWalk:
    """fixed: first results of messages that stay as they are."""

    def __init__(self, graph: Graph, limit: int, fixed: Container[str]) -> None:
        self.facts = graph.facts
        self.limit = limit
        self.fixed = fixed
        self.queue = deque(graph.nodes)
        self.nodes: list[Node] = []
        self.open: dict[tuple[Attr, ...], _Bucket] = {}
        self.waiting: list[Node] = []
        self.blocked: set[str] = set()
        self.effect_waits = False  # effects keep their order
        self.left: Counter[tuple[Attr, ...]] = Counter()  # bytes, at the hints, that were not sent
        self.buckets: Counter[tuple[Attr, ...]] = Counter()  # that they are for
        for node in graph.nodes:
            if self.is_joined(node):
                self.left[_key(node)] += self.facts.hint(_bytes(node))
                self.buckets[_key(node)] += len(node.inputs)
        for key, tensors in self.buckets.items():
            self.buckets[key] = max(1, tensors // TENSORS)

    def run(self) -> tuple[Node, ...]:
        while self.queue or self.open:
            if self.queue:
                self.take(self.queue.popleft())
            else:
                self.send()
        return tuple(self.nodes)

    def is_joined(self, node: Node) -> bool:
        return node.op in JOINED and node.outputs[0].name not in self.fixed

    def take(self, node: Node) -> None:
        if any(v.name in self.blocked for v in node.values()) or (self.effect_waits and has_effect(node)):
            self.waiting.append(node)
            self.blocked.update(v.name for v in node.outputs)
            self.effect_waits = self.effect_waits or has_effect(node)
            return
        if not self.is_joined(node):
            self.nodes.append(node)
            return
        key = _key(node)
        bucket = self.open.setdefault(key, _Bucket(key))
        bucket.nodes.append(node)
        bucket.bytes = bucket.bytes + _bytes(node)
        self.blocked.update(v.name for v in node.outputs)
        count = self.buckets[key]
        most = self.limit if node.op == "all_reduce" else min(self.limit, GATHER_BYTES)
        if self.facts.hint(bucket.bytes) >= min(most, self.left[key] // count):
            self.buckets[key] = max(1, count - 1)
            self.send()

    def send(self) -> None:
        """Sends all open buckets; what waited for them is next."""
        for bucket in self.open.values():
            self.nodes.append(_merged(bucket))
            self.left[bucket.key] -= self.facts.hint(bucket.bytes)
        self.open.clear()
        self.blocked.clear()
        self.effect_waits = False
        self.queue.extendleft(reversed(self.waiting))
        self.waiting.clear()


def _bytes(node: Node) -> Size:
    return sum((v.tensor.bytes for v in node.values()), start=0)  # type: ignore[operator,return-value]


def _key(node: Node) -> tuple[Attr, ...]:
    (kind,) = {v.tensor.dtype for v in node.values()}
    return node.op, node.attr("axis"), kind, node.attr("combine") if node.op == "all_reduce" else ""


def _merged(bucket: _Bucket) -> Node:
    """One collective of all operands."""
    nodes = bucket.nodes
    if len(nodes) == 1:
        return nodes[0]
    attrs: list[tuple[str, Attr]] = []
    for name, value in nodes[0].attrs:
        if name == "parts":
            value = tuple(entry for node in nodes for entry in node.attr("parts"))  # type: ignore[union-attr]
        attrs.append((name, value))
    inputs: tuple[Value, ...] = tuple(v for node in nodes for v in node.values())
    return Node(nodes[0].op, inputs, tuple(attrs), tuple(v for node in nodes for v in node.outputs),
                f"{len(nodes)} messages in one")


def _with_gathers_joined(graph: Graph, limit: int, ahead: bool) -> tuple[Graph, frozenset[str]]:
    """Gathers of weights, which are there from the start, in buckets in the order of their first use. What they read
    are views of inputs, which go before. ahead: see `bucketed`. The graph, and the first result of each message."""
    early = {v.name for v in graph.inputs}
    views: dict[str, Node] = {}
    for node in graph.nodes:
        if row(node).kind == "view" and all(v.name in early for v in node.values()):
            early.update(v.name for v in node.outputs)
            views |= {v.name: node for v in node.outputs}
    groups: list[_Bucket] = []
    group_of: dict[int, _Bucket] = {}
    for place, node in enumerate(graph.nodes):
        if node.op == "all_gather" and all(v.name in early for v in node.values()):
            key = (_key(node)[:3])
            found = next((one for one in reversed(groups) if one.key == key), None)
            if found is None or graph.facts.hint(found.bytes) >= limit:
                found = _Bucket(key)
                groups.append(found)
            found.nodes.append(node)
            found.bytes = found.bytes + node.output.tensor.bytes
            group_of[place] = found
    places = _places(graph, groups, ahead)
    nodes: list[Node] = []
    joined: set[str] = set()
    done: set[int] = set()

    def chain(value: Value) -> None:
        view = views.get(value.name)
        if view is not None and id(view) not in done:
            for operand in view.values():
                chain(operand)
            done.add(id(view))
            nodes.append(view)

    for place, node in enumerate(graph.nodes):
        for bucket in places.get(place, ()):
            for one in bucket.nodes:
                for value in one.values():
                    chain(value)
            nodes.append(_merged(bucket))
            joined.add(nodes[-1].outputs[0].name)
        if place not in group_of and id(node) not in done:
            done.add(id(node))
            nodes.append(node)
    return graph.replace(nodes=tuple(nodes)), frozenset(joined)


def _places(graph: Graph, groups: Sequence[_Bucket], ahead: bool) -> dict[int, list[_Bucket]]:
    """Gathers by the place of the node before which they come: that of the first one of a bucket. With `ahead` it is
    before the gradients of the layer above are sent: behind the first reader of the bucket before it."""
    group_of = {id(node): bucket for bucket in groups for node in bucket.nodes}
    source: dict[str, _Bucket] = {}  # gathered weights, and views of them
    first: dict[int, int] = {}
    reader: dict[int, int] = {}
    others: list[int] = []
    for place, node in enumerate(graph.nodes):
        bucket = group_of.get(id(node))
        if bucket is not None:
            first.setdefault(id(bucket), place)
            source |= {v.name: bucket for v in node.outputs}
            continue
        read = [source[v.name] for v in node.values() if v.name in source]
        if read and row(node).kind == "view":
            source |= {v.name: read[0] for v in node.outputs}
        else:
            for one in read:
                reader.setdefault(id(one), place)
        if node.op in COLLECTIVES:
            others.append(place)
    places: dict[int, list[_Bucket]] = {}
    last: dict[tuple[Attr, ...], _Bucket] = {}
    for bucket in groups:
        place = first[id(bucket)]
        before = last.get(bucket.key)
        early = place if before is None else reader.get(id(before), place) + 1
        if ahead and any(early <= one < place for one in others):
            place = early
        last[bucket.key] = bucket
        places.setdefault(place, []).append(bucket)
    return places


def _with_last_reads_early(graph: Graph) -> Graph:
    """The graph with the last reader of a gathered weight right behind what it is made of, so that the weight goes
    before equations that do not need it make something.

        w = all_gather(p); g = matmul(x, d); y = matmul(d, w)   -->   w = all_gather(p); y = matmul(d, w); g = ...

    Of a linear layer in the backward these two are the gradients of its weight and of its operand: the whole weight and
    its gradient are then not there at once.
    """
    # views of gathered values -> these; a tape has them, too
    source = {v.name: v.name for v in graph.restored
              if isinstance(v.type, TensorType) and isinstance(v.tensor.bytes, int)}
    last: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op == "all_gather":
            source |= {v.name: v.name for v in node.outputs}
            continue
        read = {source[v.name] for v in node.values() if v.name in source}
        if row(node).kind == "view" and read:
            source |= {v.name: next(iter(read)) for v in node.outputs}
        last |= dict.fromkeys(read, node)
    early = {id(node): node for node in last.values() if not has_effect(node) and row(node).kind != "view"}
    made = graph.producers()
    waiting = list(early.values())
    while waiting:  # views that they read go with them
        for node in (made[v.name] for v in waiting.pop().values() if v.name in made):
            if row(node).kind == "view" and id(node) not in early:
                early[id(node)] = node
                waiting.append(node)
    nodes: list[Node] = []
    places = {v.name: -1 for v in graph.inputs}  # of what makes a value, among `nodes`
    for node in graph.nodes:
        at = len(nodes)
        if id(node) in early:
            at = max((places[v.name] for v in node.values()), default=-1) + 1
            places = {name: place + (place >= at) for name, place in places.items()}
        nodes.insert(at, node)
        places |= {v.name: at for v in node.outputs}
    return graph.replace(nodes=tuple(nodes))


def bucketed(graph: Graph, limit: int = BUCKET_BYTES, ahead: bool = True) -> Graph:
    """The graph with collectives in buckets of at most about `limit` bytes.

    Args:
        ahead: weights are gathered before the gradients of the layer above are scattered, whose message would let the
            layer wait: "backward prefetch" (Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.3.2). They are memory
            from then on.
    """
    graph, joined = _with_gathers_joined(graph, min(limit, GATHER_BYTES), ahead)
    return graph.replace(nodes=_MessageWalk(_with_last_reads_early(graph), limit, joined).run())


def messages_text(graphs: Sequence[Graph]) -> str:
    """The collectives of a step's graphs in words."""
    counts: dict[str, list[Size]] = {}
    for node in (node for graph in graphs for node in graph.nodes):
        if node.op in COLLECTIVES:
            values = node.outputs if node.op == "all_gather" else tuple(node.values())
            size: Size = sum((v.tensor.bytes for v in values), start=0)  # type: ignore[assignment]
            counts.setdefault(node.op, []).append(size)
    found = [f"{len(sizes)} {op} of {sum(sizes, start=0)} bytes" for op, sizes in counts.items()]
    return "a step sends " + ("; ".join(found) or "nothing")
