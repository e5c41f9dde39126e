"""Forward and backward partition of one rank's graph: its halves, and the tape of what the forward saves.

    step(x, w):  h = f(x, w); l = all_reduce(loss(h)); g = reduce_scatter(backward(h, w)); w <- update(w, g); return l
    -->  forward(x, w)         saves h, loss(h)
         backward(tape, w)     l = all_reduce; g = reduce_scatter(backward(h, w)); w <- update(w, g); returns l

So a rank's step goes the road of one process's: the two share memory, and what is saved may be computed again or moved
out under a limit in bytes. What is made of weights alone by gathers, views and casts is not saved: it is gathered
again, and lives only while a layer runs (Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.2.1). The weight that the
forward reads last and the backward first, that of a language model's head, is kept in between. Results that nothing
of the forward waits for but that are combined over ranks come in the second half, where they travel with the gradients.
All writes are done there.
"""
from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from anyshape.ir.graph import Graph, Node, Operand, Value, has_effect
from anyshape.ir.op import row
from anyshape.ir.types import SizeType, TensorType
from anyshape.ops.collective import COLLECTIVES, parts_of

AGAIN = ("all_gather", "cast")  # beside views
AHEAD_BYTES = 8 << 20  # of weights that are gathered before a value that they may have to make again is read


@dataclass(frozen=True, slots=True)
class Halves:
    """Both graphs of a rank's step.

    backward: its first inputs are what the tape has. forward_inputs, backward_inputs: their places among the inputs of
    the whole; the tape is not among them. outputs: per output of the whole, its place among those of the forward and
    then those of the backward.
    """

    forward: Graph
    backward: Graph
    forward_inputs: tuple[int, ...]
    backward_inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def halves_of(graph: Graph, first: Collection[str], data: Collection[str], limited: bool) -> Halves:
    """The halves of a rank's graph.

    Args:
        first: names of values of the forward; the backward begins behind the last one of them.
        data: names of the inputs that are a batch.
        limited: values of the forward may be made again, so weights that they are made of are gathered before them, and
            none is kept.
    """
    made = [place for place, node in enumerate(graph.nodes) if any(v.name in first for v in node.outputs)]
    border = max(made, default=-1) + 1
    return _Cut(graph, border, data, AHEAD_BYTES if limited else 0).run()


class _Cut:
    def __init__(self, graph: Graph, border: int, data: Collection[str], ahead: int) -> None:
        self.graph = graph
        self.ahead = ahead
        self.inputs = {v.name for v in graph.inputs}
        self.first, self.second = list(graph.nodes[:border]), list(graph.nodes[border:])
        self.put_off()
        self.makers = {v.name: node for node in self.first for v in node.outputs}
        self.light = {v.name for v in graph.inputs if v.name not in data}
        for node in self.first:
            if (row(node).kind == "view" or node.op in AGAIN) and all(v.name in self.light for v in node.values()):
                self.light.update(v.name for v in node.outputs)
        self.kept = set() if ahead else self.read_in_a_row()

    def read_in_a_row(self) -> set[str]:
        """The gathered weight that the first half reads last, if the second half reads it before all others but small
        ones, and these, such as that of the last norm: in between hardly another one has to be there."""
        source: dict[str, str] = {}  # gathered weights, and what is made of one alone -> the weight
        read: list[list[str]] = []  # by each half, in order
        for nodes in (self.first, self.second):
            read.append([])
            for node in nodes:
                found = [source[v.name] for v in node.values() if v.name in source]
                if node.op == "all_gather" and node.output.name in self.light:
                    source[node.output.name] = node.output.name
                elif found and (row(node).kind == "view" or node.op in AGAIN):
                    source |= {v.name: found[0] for v in node.outputs}
                else:
                    read[-1] += found
        first, second = read
        if not first or first[-1] not in second:
            return set()
        size = {name: self.graph.facts.hint(self.makers[name].output.tensor.bytes) for name in {*first, *second}}
        between = {*second[:second.index(first[-1])]}
        return {first[-1], *between} if sum(size[name] for name in between) < size[first[-1]] else set()

    def put_off(self) -> None:
        """Moves what combines over ranks for results alone behind the border, and what is made of it."""
        later = {v.name for node in self.second for v in node.values()} | {value.name for _, value in self.graph.writes}
        wanted = set(later)
        for node in reversed(self.first):
            if has_effect(node) or any(v.name in wanted for v in node.outputs):
                wanted.update(v.name for v in node.values())
        put: set[str] = set()
        kept, moved = [], []
        for node in self.first:
            own = {v.name for v in node.outputs}
            if not own & wanted and (node.op in COLLECTIVES or any(v.name in put for v in node.values())):
                put |= own
                moved.append(node)
            else:
                kept.append(node)
        self.first, self.second = kept, [*moved, *self.second]

    def run(self) -> Halves:
        second = tuple(self.with_made_again())
        made = {v.name for node in second for v in node.outputs}
        crossing: dict[str, Value] = {}
        roots = [value for _, value in self.graph.writes]
        for value in [*(v for node in second for v in node.values()), *roots]:
            if value.name in self.makers and value.name not in made:
                crossing.setdefault(value.name, value)
        order = {name: place for place, name in enumerate(self.makers)}
        saved = tuple(sorted(crossing.values(), key=lambda value: order[value.name]))
        return self.finished(second, saved)

    def with_made_again(self) -> Iterator[Node]:
        """The second half, with what is made again before its first reader."""
        done: set[str] = set()
        seen: set[str] = set()
        read = self.read_again()

        def chain(value: Value) -> Iterator[Node]:
            node = self.makers.get(value.name)
            if node is not None and value.name in self.light and value.name not in done | self.kept:
                for operand in node.values():
                    yield from chain(operand)
                done.update(v.name for v in node.outputs)
                yield node

        for node in self.second:
            for value in node.values():
                for one in self.weights_of(value, seen, read):
                    yield from chain(one)
                yield from chain(value)
            yield node
        for _, value in self.graph.writes:
            yield from chain(value)

    def read_again(self) -> set[str]:
        """What the second half reads of what is made of weights alone."""
        found = {v.name for node in self.second for v in node.values()} & self.light
        for node in reversed(self.first):
            if any(v.name in found for v in node.outputs):
                found.update(v.name for v in node.values())
        return found

    def weights_of(self, value: Value, seen: set[str], read: Collection[str]) -> list[Value]:
        """Gathered weights that a value of the forward is made of, and those before them, up to `ahead` bytes: under a
        limit it may be made again. Each value is asked for once. read: what is gathered in any case."""
        waiting, found, total = [value], list[Value](), 0
        while waiting and total < self.ahead:
            one = waiting.pop(0)
            node = self.makers.get(one.name)
            if node is None or one.name in seen:
                continue
            if one.name in self.light:
                if node.op == "all_gather":
                    if one.name in read:
                        found.append(one)
                        total += self.graph.facts.hint(one.tensor.bytes)
                    continue
            else:
                seen.update(v.name for v in node.outputs)
            waiting += node.values()
        return found

    def finished(self, second: tuple[Node, ...], saved: tuple[Value, ...]) -> Halves:
        graph = self.graph
        own: tuple[list[int], list[int]] = [], []  # places of outputs
        for place, operand in enumerate(graph.outputs):
            own[isinstance(operand, Value) and operand.name not in self.makers
                and operand.name not in self.inputs].append(place)
        first = self.half(f"{graph.name}_forward", tuple(self.first), own[0], self.used(self.first, own[0], ()))
        restored = {value: Value(value.name, value.tensor.dense()) for value in saved}
        names = self.used(second, own[1], graph.writes)
        later = self.half(f"{graph.name}_backward", second, own[1], names)
        later = later.replace(inputs=(*saved, *later.inputs), writes=graph.writes, restored=saved)
        places = {v.name: place for place, v in enumerate(graph.inputs)}
        back: Mapping[int, int] = {place: at for at, place in enumerate([*own[0], *own[1]])}
        return Halves(first.replace(saved=saved), later.with_values(restored),
                      tuple(places[v.name] for v in first.inputs),
                      tuple(places[v.name] for v in later.inputs[len(saved):]),
                      tuple(back[place] for place in range(len(graph.outputs))))

    def used(self, nodes: tuple[Node, ...] | list[Node], outputs: list[int],
             writes: tuple[tuple[Value, Value], ...]) -> set[str]:
        """Inputs that are read or written."""
        operands: list[Operand | None] = [self.graph.outputs[place] for place in outputs]
        found = {one.name for one in operands if isinstance(one, Value)} | {v.name for node in nodes
                                                                           for v in node.values()}
        return (found | {one.name for pair in writes for one in pair}) & self.inputs

    def half(self, name: str, nodes: tuple[Node, ...], outputs: list[int], used: set[str]) -> Graph:
        graph = self.graph
        inputs = tuple(v for v in graph.inputs if isinstance(v.type, SizeType) or v.name in used)
        assert all(isinstance(v.type, (SizeType, TensorType)) for v in inputs)
        return graph.replace(
            name=name, inputs=inputs, nodes=nodes, outputs=tuple(graph.outputs[place] for place in outputs),
            output_strides=tuple(graph.output_strides[place] for place in outputs) if graph.output_strides else (),
            memory=tuple(graph.memory[place] for place in outputs) if graph.memory else (), writes=())


def gathered_first(graph: Graph, data: Collection[str]) -> Graph:
    """The graph with gathers of permuted weights as permuted gathers of weights: what is read in several orders of dims
    comes once. `data`: names of the inputs that are a batch.

        t = permute(w); y = all_gather(t)   -->   whole = all_gather(w); y = permute(whole)

    The partitioner deals out what it finds, equation by equation, so a product that reads a weight turned round gathers
    it turned round; forward and backward of a linear layer read it in two orders.
    """
    inputs = {v.name: v for v in graph.inputs if v.name not in data}
    made = graph.producers()
    names = {v.name for v in graph.inputs} | set(made)
    known: dict[tuple[str, object, object], Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        operand = next(node.values(), None)
        dims = tuple(range(operand.tensor.rank)) if operand is not None else ()
        while node.op == "all_gather" and operand is not None and operand.name in made and made[
                operand.name].op == "permute":
            before = made[operand.name].attr("dims")
            assert isinstance(before, tuple)
            dims = tuple(before[d] for d in dims)  # type: ignore[misc,index]
            operand = next(made[operand.name].values())
        if node.op != "all_gather" or operand is None or operand.name not in inputs:
            nodes.append(node)
            continue
        (one,) = parts_of(node)
        own = replace(one, dim=dims[one.dim])
        key = operand.name, node.attr("axis"), own.attr()
        if key not in known and dims == tuple(range(len(dims))):
            nodes.append(node)
            known[key] = node.output
            continue
        if key not in known:
            name = f"{operand.name}_whole"
            while name in names:
                name += "_"
            names.add(name)
            kind = operand.tensor
            whole = Value(name, TensorType(kind.dtype, own.whole(kind.shape), None, kind.device))
            attrs = tuple((name, (own.attr(),) if name == "parts" else value) for name, value in node.attrs)
            nodes.append(Node("all_gather", (operand,), attrs, (whole,), node.where))
            known[key] = whole
        nodes.append(Node("permute", (known[key],), (("dims", dims),), node.outputs, node.where))
    return graph.replace(nodes=tuple(nodes))
