"""Splits a joint graph into forward and backward that share one tape instead of saved tensors.

Before:  forward  -> outputs..., t0, t1, s0        backward(s0, t0, t1, tangents...)
After:   forward  -> outputs..., make_tape(s0, t0, t1)
         backward(tape, tangents...):  s0 = tape_get(tape, 0), t0 = tape_get(tape, 1), t1 = tape_get(tape, 2)

With the tape autograd saves no tensor and no symbolic size; what is kept, and where, is decided when the forward runs.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from anyshape.frontend.autograd.effect_order import pin, put_in_order
from anyshape.frontend.autograd.joint_graph_cse import remove_duplicates
from anyshape.frontend.autograd.recompute_index_tensors import make_again
from anyshape.runtime.memory.tape import Tape, make_tape, tape_get
from anyshape.torch_compat import opaque
from anyshape.torch_compat.versions import api

TAPE_KEY = "anyshape_tape"
COPY_KEY = "anyshape_copy"  # marks a clone that must give memory of its own


@dataclass(frozen=True, slots=True)
class TapeLayout:
    """How a forward and its backward share saved values.

    Args:
        size: number of saved values, symbolic sizes included.
        checked: indices of saved tensors that users can see (inputs, outputs, views of them): their version counters
            are compared when the backward starts.
        borrowed: indices of saved values that are inputs of the forward as they came (parameters mostly): the tape
            refers to them, it does not own them.
    """
    size: int
    checked: tuple[int, ...]
    borrowed: tuple[int, ...]


@dataclass(slots=True)
class PartitionedGraphs:
    """The two graphs of one capture, as the partition left them; filled in by `partition_with_tape`."""
    forward: GraphModule | None = None
    backward: GraphModule | None = None
    layout: TapeLayout | None = None


def partition_with_tape(joint: GraphModule, joint_inputs: Any, halves: PartitionedGraphs, *, num_fwd_outputs: int,
                        **more: Any) -> tuple[GraphModule, GraphModule]:
    """The partition function for AOTAutograd; bind `halves` before handing it over.

    Args:
        joint: forward and backward in one graph.
        joint_inputs: empty for the joint graph of a subgraph inside; such a graph is split without a tape.
        halves: receives the result.
        num_fwd_outputs: number of user outputs (mutated inputs and bases of views included).
    """
    remove_duplicates(joint.graph)
    pin(joint.graph, num_fwd_outputs)
    forward, backward = api.partition_joint(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **more)
    if not joint_inputs:
        return forward, backward
    for half in (forward, backward):
        put_in_order(half.graph)
    make_again(forward, backward, num_fwd_outputs)
    if opaque.has_opaque():
        halves.layout = put_tape(forward, backward, num_fwd_outputs)
    halves.forward = forward
    halves.backward = backward
    return forward, backward


def put_tape(forward: GraphModule, backward: GraphModule, num_fwd_outputs: int) -> TapeLayout | None:
    """Rewrites both graphs in place; None (and no change) when nothing is saved."""
    output = forward.graph.output_node()
    returned = list(output.args[0])
    saved = _in_backward_order(returned[num_fwd_outputs:])
    if not saved:
        return None
    saved = _copy_overwritten(forward, output, saved)
    layout = _layout(forward, returned[:num_fwd_outputs], saved)
    with forward.graph.inserting_before(output):
        tape = forward.graph.call_function(make_tape, tuple(saved), {"checked": layout.checked}, name="tape")
    tape.meta = {"val": opaque.fake_opaque(Tape), TAPE_KEY: layout}
    output.args = ((*returned[:num_fwd_outputs], tape),)
    descriptions = output.meta.get("desc")
    if descriptions is not None:
        output.meta["desc"] = [*descriptions[:num_fwd_outputs], descriptions[num_fwd_outputs]]
    _read_tape(backward, len(saved), layout)
    for gm in (forward, backward):
        gm.graph.lint()
        gm.recompile()
    return layout


def _in_backward_order(saved: list[Any]) -> list[Any]:
    """The backward takes symbolic sizes first, then tensors and other objects in the forward's order."""
    symbols = [node for node in saved if _is_symbolic(node)]
    return symbols + [node for node in saved if not _is_symbolic(node)]


def _is_symbolic(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else node
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _copy_overwritten(forward: GraphModule, output: Node, saved: list[Any]) -> list[Any]:
    """Saves a copy of what shares memory with an input that this call overwrites: the backward needs the old value."""
    overwritten = {_storage(node) for node in written_inputs(forward, output)} - {None}
    kept = []
    for node in saved:
        if _storage(node) in overwritten:
            with forward.graph.inserting_after(_last_placeholder(forward) if node.op == "placeholder" else node):
                copy = forward.graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta = {**node.meta, "val": api.fake_clone(node.meta["val"]), COPY_KEY: True}
            node = copy
        kept.append(node)
    return kept


def _last_placeholder(forward: GraphModule) -> Node:
    return [node for node in forward.graph.nodes if node.op == "placeholder"][-1]


def written_inputs(forward: GraphModule, output: Node) -> list[Node]:
    """Inputs that the graph writes (`copy_`), or that AOTAutograd writes from an output after the call."""
    inputs = [node for node in forward.graph.nodes if node.op == "placeholder"]
    written = [node.args[0] for node in forward.graph.nodes if node.target == torch.ops.aten.copy_.default]
    named = [getattr(description, "mutated_input", None) for description in output.meta.get("desc") or ()]
    return written + [node for node in inputs if node.meta.get("desc") is not None and node.meta["desc"] in named]


def _layout(forward: GraphModule, returned: list[Any], saved: list[Any]) -> TapeLayout:
    inputs = {node for node in forward.graph.nodes if node.op == "placeholder"}
    visible = {key for node in [*inputs, *returned] if (key := _storage(node)) is not None}
    checked = tuple(
        index for index, node in enumerate(saved)
        if _storage(node) in visible and not node.meta.get("saved_tensor_with_no_vc_check", False))
    borrowed = tuple(index for index, node in enumerate(saved) if node in inputs)
    return TapeLayout(size=len(saved), checked=checked, borrowed=borrowed)


def _storage(node: Any) -> int | None:
    return api.storage_key(node.meta.get("val")) if isinstance(node, Node) else None


def _read_tape(backward: GraphModule, size: int, layout: TapeLayout) -> None:
    """Replaces the first `size` placeholders by reads of one new placeholder in front."""
    placeholders = [node for node in backward.graph.nodes if node.op == "placeholder"]
    assert len(placeholders) >= size
    with backward.graph.inserting_before(placeholders[0]):
        tape = backward.graph.placeholder("tape")
    tape.meta = {"val": opaque.fake_opaque(Tape), TAPE_KEY: layout}
    cursor = placeholders[-1]
    for index, old in enumerate(placeholders[:size]):
        with backward.graph.inserting_after(cursor):
            new = backward.graph.call_function(tape_get, (tape, index))
        new.meta = dict(old.meta)
        old.replace_all_uses_with(new)
        cursor = new
    for old in placeholders[:size]:
        backward.graph.erase_node(old)
