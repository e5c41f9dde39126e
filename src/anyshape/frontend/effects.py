"""The order of random draws, and of other side effects, where a joint graph is partitioned into forward and backward.

    r = rand(x); y = f(x, r); ...; q = rand(g); gx = h(g, q)   -->   forward: r; backward: q

torch's partition goes by data dependencies alone: what draws in the backward and reads no gradient would be drawn in
the forward and kept, and the backward's calls come in an order of their own. In eager PyTorch a call draws when it is
reached.

Where `torch.utils.checkpoint` computes a part a second time, in the backward, its draws are kept, not made anew from a
saved state of the generator: a mask is a byte an element, and calls that save the state run between compiled parts.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from anyshape.run.torch_random import has_effect
from anyshape.torch_compat import OpOverload

PLACE = "anyshape_effect"  # of a call with an effect, its place among those of the joint graph
TANGENTS = "tangents"  # how torch's partition knows what a backward begins with
TAG = "partitioner_tag"  # what torch's partition goes by
RECOMPUTED = "recompute"  # marks calls that `torch.utils.checkpoint` does again, with the same random numbers


def pin(joint: Graph, num_fwd_outputs: int) -> None:
    """Numbers the calls with effects, and has torch's partition leave each in the half that it was traced in: from the
    first one on that needs a gradient, or that AOTAutograd has not noted as the forward's, all are the backward's."""
    effects = [node for node in joint.nodes
               if isinstance(node.target, OpOverload) and has_effect(node.target)]
    if not effects:
        return
    noted = any(node.meta.get(TAG) == "is_forward" for node in joint.nodes if node.op == "call_function")
    needed = reached([one for one in joint.output_node().args[0][:num_fwd_outputs] if isinstance(one, Node)],
                      lambda node: node.all_input_nodes)
    gradients = [node for node in joint.find_nodes(op="placeholder") if TANGENTS in str(node.target)]
    given = reached(gradients, lambda node: node.users)
    later = False
    for place, node in enumerate(effects, 1):
        node.meta[PLACE] = place
        later = later or node in given or (noted and node.meta.get(TAG) != "is_forward" and node not in needed)
        if node.meta.get(RECOMPUTED) is not None and torch.Tag.nondeterministic_seeded in node.target.tags:
            node.meta[RECOMPUTED] = CheckpointPolicy.MUST_SAVE
        elif node.meta.get(RECOMPUTED) is None and not (later and node in needed):
            node.meta[TAG] = "must_be_in_backward" if later else "must_be_in_forward"


def reached(start: Iterable[Node], further: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """The nodes of `start` and those that one comes to from them by `further`."""
    found = set(start)
    waiting = list(found)
    while waiting:
        for node in further(waiting.pop()):
            if node not in found:
                found.add(node)
                waiting.append(node)
    return found


def put_in_order(half: Graph) -> None:
    """Puts the calls of a half that have effects into the order of the joint graph, each behind what it needs; all else
    stays as near to its place as can be."""
    numbered = [node for node in half.nodes if PLACE in node.meta]
    wanted = sorted(numbered, key=lambda node: node.meta[PLACE])
    if numbered == wanted:
        return
    before = dict(zip(wanted[1:], wanted, strict=False))
    order: dict[Node, None] = {}
    for start in list(half.nodes):
        waiting = [start]
        while waiting:
            node = waiting[-1]
            needed = [*node.all_input_nodes, *([before[node]] if node in before else ())]
            missing = [one for one in needed if one not in order]
            if missing:
                waiting += missing
            else:
                order[waiting.pop()] = None
    first, *others = order
    for node in others:
        first.append(node)
        first = node
    half.lint()
