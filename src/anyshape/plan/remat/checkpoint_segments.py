"""Recomputation segments (checkpointing): which saved values of a forward its backward could compute again, and from
what: the forward cut into segments.

    x0 -[layer 0: h, q, k, v ..]- x1 -[layer 1: ..]- x2         cut where few bytes cross: at x1, x2
    segment 1 gives {h, q, k, v ..} of layer 1 from {x1, weights}

A segment's saved values can be computed again together or one by one, from what crosses into it (its *anchors*, which
stay saved), from inputs of the forward, and from each other. Which of them a call really computes again is decided when
its sizes are known (runtime/budget/memory_budget.py). Effects, random numbers among them, are never run twice.

The cuts are chosen so that the anchors and the largest segment together are smallest at the hints: a call under the
lowest limit holds just these (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, for equal layers).
"""
from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from anyshape.ir.graph import Graph, Node, Value, has_effect
from anyshape.ir.op import base_of
from anyshape.ir.types import TensorType

UNSAVED = 1.25  # what a byte counts that crosses a cut and is not saved: it has to be computed from behind the cut
MOST_PLACES = 256  # where a graph may be cut
SMALL = 0.003  # of the bytes of all saved values, those of the smallest ones that are never computed again
LESS = 3  # so many times smaller is what stays for the sake of a value that is computed again
MOST_PARTS = 64  # segments of equal size, or equivalents, that are tried


Slice = tuple[dict[int, Node], dict[str, Value]]  # nodes by position, and what they read from elsewhere


@dataclass(frozen=True, slots=True)
class RecomputeSegment:
    """Nodes in order, the values that they can give again (`outputs`, stored by the forward and saved), and what they
    read from elsewhere: `anchors`, saved by the forward too, `inputs` of the forward, and what is `gathered` again."""

    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]
    anchors: tuple[Value, ...]
    inputs: tuple[Value, ...]
    gathered: tuple[Value, ...] = ()


def segments(graph: Graph, stored: Mapping[str, str], gathered: Container[str] = ()) -> tuple[RecomputeSegment, ...]:
    """The segments of a forward `graph` that can give something again, in order. stored: value -> the stored value
    that it is a window of (`Storage.base`). gathered: names of values that the backward has itself, by these names:
    weights that came from other ranks."""
    return _Search(graph, stored, gathered).run()


def again_graph(segment: RecomputeSegment, number: int, graph: Graph, types: Mapping[str, TensorType]) -> Graph | None:
    """The graph that computes a segment's outputs again, those in `types`: how the forward stores values by name."""
    outputs = tuple(value for value in segment.outputs if value.name in types)
    if not outputs or any(value.name not in types for value in segment.anchors):
        return None
    given = {value.name: Value(value.name, types.get(value.name, value.type))
             for value in (*segment.anchors, *segment.inputs, *segment.gathered)}
    # an operator that gives several values may give one that is there
    nodes = tuple(dataclasses.replace(
        node, inputs=tuple(given.get(x.name, x) if isinstance(x, Value) else x for x in node.inputs),
        outputs=tuple(Value(f"{x.name}__again", x.type) if x.name in given else x for x in node.outputs))
        for node in segment.nodes)
    return Graph(f"{graph.name}_again_{number}", tuple(given.values()), nodes, outputs,
                 tuple(types[value.name].strides for value in outputs), facts=graph.facts)


class _Search:
    def __init__(self, graph: Graph, stored: Mapping[str, str], gathered: Container[str]) -> None:
        self.graph = graph
        self.gathered = gathered
        self.stored = frozenset(stored.values())
        self.hint = graph.facts.hint
        self.producers = graph.producers()
        self.position = {value.name: i for i, node in enumerate(graph.nodes) for value in node.outputs}
        self.inputs = {value.name: value for value in graph.inputs}
        self.written = {target.name for target, _ in graph.writes}
        results = {self.base(value).name for value in graph.outputs if isinstance(value, Value)}
        results |= {self.base(value).name for _, value in graph.writes}
        # stored values that the tape keeps in the arena
        self.saved = {base.name: base for value in graph.saved if isinstance(value, Value)
                      for base in (self.base(value),) if base.name not in self.inputs and base.name not in results}

    def base(self, value: Value) -> Value:
        return base_of(value, self.producers, self.stored)

    def run(self) -> tuple[RecomputeSegment, ...]:
        cuts = self.cuts()
        segment_of = {name: sum(self.position[name] > cut for cut in cuts) for name in self.saved}
        slices = {name: self.slice(value) for name, value in self.saved.items()}
        anchors = {name for cut in cuts for name in self.crossing[cut]} | self.small()
        again: set[str] = set()
        # the largest first; what it needs stays if it is far smaller, or is computed again with it
        for name in sorted(self.saved, key=lambda one: (-self.bytes[one], self.position[one])):
            found = slices[name]
            if name in anchors or found is None:
                continue
            needs = [one for one in found[1] if one in self.saved]
            more = [one for one in needs if one not in again and one not in anchors]
            if any(one in again and segment_of[one] != segment_of[name] for one in needs) or sum(
                    self.bytes[one] for one in more if segment_of[one] != segment_of[name]) > self.bytes[name]:
                anchors.add(name)
                continue
            again.add(name)
            anchors.update(one for one in more if segment_of[one] != segment_of[name]
                           or LESS * self.bytes[one] < self.bytes[name])
        # results of one node stay in the order in which they are saved
        ordered = sorted((name for name in self.saved if name in again), key=self.position.__getitem__)
        parts = (self.segment([name for name in ordered if segment_of[name] == number], slices, again)
                 for number in sorted(set(segment_of.values())))
        return tuple(part for part in parts if part is not None)

    def small(self) -> set[str]:
        """What stays in any case: the smallest values, which together take next to nothing. A backward often needs
        them early (means and variances of all norms at once), and all that leads to them would be computed for it."""
        left = SMALL * sum(self.bytes[name] for name in self.saved)
        found: set[str] = set()
        for name in sorted(self.saved, key=lambda one: (self.bytes[one], self.position[one])):
            left -= self.bytes[name]
            if left < 0:
                break
            found.add(name)
        return found

    def cuts(self) -> list[int]:
        """The positions of nodes after which the graph is cut: of all ways, one for which what is saved at the cuts and
        in the largest segment takes the fewest bytes."""
        inside = [0]
        for node in self.graph.nodes:
            inside.append(inside[-1] + sum(self.hint(v.tensor.bytes) for v in node.outputs if v.name in self.saved))
        places = self.places()
        if not places:
            return []
        ends = [-1, *places, len(self.graph.nodes) - 1]
        total = inside[-1]
        best: tuple[int, list[int]] = (total, [])
        for part in range(2, 2 * MOST_PARTS):
            most = 2 * total // part
            found = self.cheapest(ends, inside, most)
            if found is not None:
                widest = max(inside[b + 1] - inside[a + 1] for a, b in itertools.pairwise([-1, *found, ends[-1]]))
                held = sum(self.bytes[name] for name in {name for cut in found for name in self.crossing[cut]})
                best = min(best, (held + widest, found))
        return best[1]

    def cheapest(self, ends: Sequence[int], inside: Sequence[int], most: int) -> list[int] | None:
        """The cuts that the fewest bytes cross, with at most `most` saved bytes in each segment."""
        cost: list[float] = [0.0]
        before = [0]
        start = 0
        for k in range(1, len(ends)):
            while start < k and inside[ends[k] + 1] - inside[ends[start] + 1] > most:
                start += 1
            if start == k:
                return None
            least = min(range(start, k), key=lambda j: (cost[j], j))
            before.append(least)
            cost.append(cost[least] + (self.crossed[ends[k]] if k < len(ends) - 1 else 0))
        cuts: list[int] = []
        k = before[-1]
        while k:
            cuts.append(ends[k])
            k = before[k]
        return cuts[::-1]

    def places(self) -> list[int]:
        """Where the graph may be cut: of each stretch of nodes the position that the fewest bytes cross."""
        last: dict[str, int] = {}
        for i, node in enumerate(self.graph.nodes):
            for value in node.values():
                last[self.base(value).name] = i
        dying: dict[int, list[str]] = {}
        for name, end in last.items():
            dying.setdefault(end, []).append(name)
        self.bytes: dict[str, int] = {}
        self.crossing: dict[int, tuple[str, ...]] = {}
        self.crossed: dict[int, float] = {}
        live: dict[str, int] = {}
        count = len(self.graph.nodes)
        stretch = max(-(-count // MOST_PLACES), 1)
        found: list[int] = []
        for i, node in enumerate(self.graph.nodes):
            for value in node.outputs:
                self.bytes[value.name] = self.hint(value.tensor.bytes)
                if self.base(value) is value and last.get(value.name, -1) > i:
                    live[value.name] = self.bytes[value.name]
            for name in dying.get(i, ()):
                live.pop(name, None)
            if not live:
                continue
            # what lives through most of the program, such as a mask, would be there without the cut
            now = sum(size if name in self.saved else size * UNSAVED for name, size in live.items()
                      if last[name] - self.position[name] < count // 2)
            same = found and found[-1] // stretch == i // stretch
            if not same or now < self.crossed[found[-1]]:
                if same:
                    found.pop()
                found.append(i)
                self.crossed[i] = now
                self.crossing[i] = tuple(live)
        return found

    def segment(self, names: Sequence[str], slices: Mapping[str, Slice | None],
                again: set[str]) -> RecomputeSegment | None:
        """The segment that gives the values of `names` again."""
        nodes: dict[int, Node] = {}
        stops: dict[str, Value] = {}
        for name in names:
            found = slices[name]
            assert found is not None
            nodes |= found[0]
            stops |= found[1]
        if not names:
            return None
        kept = [value for name, value in stops.items() if name not in again]
        return RecomputeSegment(
            tuple(node for _, node in sorted(nodes.items())), tuple(self.saved[name] for name in names),
            tuple(value for value in kept if value.name not in self.inputs and value.name not in self.gathered),
            tuple(value for value in kept if value.name in self.inputs),
            tuple(value for value in kept if value.name in self.gathered))

    def slice(self, value: Value) -> Slice | None:
        """The nodes that give the value from other saved values and inputs, and those; None where an effect is on the
        way, or an input that the forward writes."""
        nodes: dict[int, Node] = {}
        stops: dict[str, Value] = {}
        todo = [value]
        while todo:
            one = todo.pop()
            node = self.producers.get(one.name)
            if one.name in self.written:  # it will not be what it was
                return None
            if node is None or one.name in self.gathered or (one is not value and one.name in self.saved):
                stops[one.name] = one
                continue
            at = self.position[one.name]
            if at in nodes:
                continue
            if has_effect(node) or not _same_again(node):
                return None
            nodes[at] = node
            todo.extend(node.values())
        return nodes, stops


def _same_again(node: Node) -> bool:
    """Whether the node gives the same numbers a second time: of an operator that is not PyTorch's nothing is known."""
    return node.op != "extern" or str(node.attr("target")).startswith("aten.")
