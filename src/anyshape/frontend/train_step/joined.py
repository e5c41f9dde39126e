"""One graph of a whole step in which the forward comes first, and then a backward that has what it computes again.

A partitioner over ranks takes a graph as a whole, and a rank's part of it is cut into halves again (dist/halves.py).
What is saved between them was chosen before, as for one process (frontend/train_step/partition.py): so the graph has
twice what the backward makes again.
"""
from __future__ import annotations

from torch.fx import Graph, GraphModule, Node

from anyshape.frontend.importer.graph_inputs import BORDER
from anyshape.frontend.train_step.partition import StepHalves
from anyshape.runtime.memory.tape import make_tape, tape_get
from anyshape.torch_compat.tracing import settings


def joined(step: GraphModule, halves: StepHalves) -> GraphModule:
    """The halves of `step`, one after the other; the first node of the backward is marked as BORDER."""
    graph = Graph()
    made: dict[str, Node] = {}
    for node in step.graph.nodes:
        if node.op == "placeholder":
            made[node.name] = graph.node_copy(node)
    saved: tuple[Node, ...] = ()
    results: list[Node] = []
    names: dict[str, Node] = dict(made)

    def of(node: Node) -> Node:
        return names[node.name]

    for node in halves.forward.graph.nodes:
        if node.target is make_tape:
            saved = tuple(names[one.name] for one in node.args)
        elif node.op == "output":
            results += [names[one.name] for one in node.args[0] if one.target is not make_tape]
        elif node.op != "placeholder":
            names[node.name] = graph.node_copy(node, of)
    names = dict(made)
    is_first = True
    for node in halves.backward.graph.nodes:
        if node.target is tape_get:
            names[node.name] = saved[node.args[1]]
        elif node.op == "output":
            results += [names[one.name] for one in node.args[0]]
        elif node.op != "placeholder":
            names[node.name] = graph.node_copy(node, of)
            if is_first:
                names[node.name].meta[BORDER] = True
                is_first = False
    outputs = [literal if place < 0 else results[place]
               for place, literal in zip(halves.order.outputs, halves.order.literals, strict=True)]
    graph.output(tuple(outputs))
    graph.lint()
    return settings.graph_module(step, graph)
