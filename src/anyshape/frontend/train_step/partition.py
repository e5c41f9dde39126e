"""Cuts the graph of a whole train step where its backward begins, into two programs that share a tape.

    step(w, m, x):  loss = f(w, x); g = full([], 1) ...; copy_(w, new_w); copy_(m, new_m); return loss, norm
    -->  forward(w, x)         -> loss, make_tape(saved)
         backward(tape, w, m)  -> norm; copy_(w, new_w); copy_(m, new_m)

What is saved in between is chosen as for a forward and backward of autograd, so everything that is known of such pairs
holds here too: what is computed again, limits in bytes, values that are moved out. There are no gradients at the
border: each lives from the step that makes it to the update that reads it. Inputs are inputs of both halves, and not
saved: what is written is one buffer, and its readers come before. All writes are in the second half.
"""
from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.fx import Graph, GraphModule, Node

from anyshape.base.errors import LimitError
from anyshape.frontend.autograd.effect_order import TANGENTS, pin, put_in_order, reached
from anyshape.frontend.autograd.joint_graph_cse import remove_duplicates
from anyshape.frontend.autograd.partition import TapeLayout, put_tape
from anyshape.frontend.autograd.recompute_index_tensors import make_again
from anyshape.frontend.importer.graph_inputs import BORDER
from anyshape.frontend.programs.compile_program import NativeProgram
from anyshape.frontend.programs.session import Boxed
from anyshape.runtime.call.executable import Executable
from anyshape.runtime.memory.tape import make_tape, tape_get
from anyshape.torch_compat.tracing import settings
from anyshape.torch_compat.versions import api

SEED = "anyshape_seed"  # marks the gradient of the loss itself
VIEWS = frozenset(("view", "reshape", "_unsafe_view", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze",
                   "slice", "select", "alias", "detach", "unbind", "split", "split_with_sizes", "as_strided"))


@runtime_checkable
class Refuses(Protocol):
    """A program that knows."""

    def refusal(self, inputs: Sequence[Any]) -> LimitError | None:
        """Why a limit refuses a call with these inputs; None where that is not so."""


def refusal_of(program: Boxed, inputs: Sequence[Any]) -> LimitError | None:
    """Why a limit refuses a call, which is not made; None where that is not so, or not known."""
    if isinstance(program, Refuses):
        return program.refusal(inputs)
    if isinstance(program, NativeProgram):
        return refusal_of(program.executable, [*inputs, *program.constants])
    if isinstance(program, Executable):
        try:
            program.admit(program.record(*inputs))
        except LimitError as error:
            return error.with_traceback(None)
    return None


@dataclass(frozen=True, slots=True)
class HalvesOrder:
    """Which inputs of a step its halves take, and which outputs they give.

    Args:
        has_tape: the forward gives one last, and the backward takes it first.
        forward_inputs, backward_inputs: which inputs of the whole each takes, in order; the tape comes first.
        outputs: per output of the whole, its place among those of the forward and then the backward, or -1: it is
            the literal of that position in `literals`.
    """
    has_tape: bool
    forward_inputs: tuple[int, ...]
    backward_inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    literals: tuple[Any, ...] = ()

    def forward_given(self, inputs: Sequence[Any]) -> list[Any]:
        """Of the whole's inputs, what the forward takes."""
        return [inputs[i] for i in self.forward_inputs]


@dataclass(frozen=True, slots=True)
class StepHalves:
    """The two graphs of one train step. layout: of the tape; None when nothing is saved."""
    forward: GraphModule
    backward: GraphModule
    layout: TapeLayout | None
    order: HalvesOrder


class HalvesProgram:
    """Both programs of a step, one after the other. Called with one list of inputs, which it empties."""

    _boxed_call = True

    def __init__(self, order: HalvesOrder, forward: Boxed, backward: Boxed) -> None:
        self.order = order
        self.forward = forward
        self.backward = backward

    def refusal(self, inputs: Sequence[Any]) -> LimitError | None:
        """Why a limit refuses a call; the forward decides for both."""
        return refusal_of(self.forward, self.order.forward_given(inputs))

    def __call__(self, inputs: list[Any]) -> list[Any]:
        order = self.order
        later = [inputs[i] for i in order.backward_inputs]
        first = order.forward_given(inputs)
        inputs.clear()
        found = list(self.forward(first))
        if order.has_tape:
            tape = found.pop()
            tape.once = True
            later.insert(0, tape)
            del tape
        found += self.backward(later)
        literals = order.literals or order.outputs
        return [literal if place < 0 else found[place] for place, literal in zip(order.outputs, literals, strict=True)]


def step_halves(step: GraphModule, static: Sequence[int]) -> StepHalves | None:
    """The halves of a step's graph; None when it has not one place where one backward begins.

    Args:
        step: functional but for `copy_` nodes onto placeholders; it is left as it is.
        static: indices of inputs that stay at one address.
    """
    joint = settings.graph_module(step, copy.deepcopy(step.graph))
    seed = _seed(joint)
    if seed is None:
        return None
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    place_of = {node.name: i for i, node in enumerate(placeholders)}
    with joint.graph.inserting_after(placeholders[-1]):
        tangent = joint.graph.placeholder(f"{TANGENTS}_1")
    tangent.meta = dict(seed.meta)
    seed.replace_all_uses_with(tangent)
    joint.graph.erase_node(seed)
    remove_duplicates(joint.graph)
    writes = _take_writes(joint)
    output = joint.graph.output_node()
    returned = list(output.args[0])
    later = reached([tangent], lambda node: node.users)
    if returned[0] in later:
        return None  # the loss itself is made of gradients
    first = [node for node in returned if isinstance(node, Node) and node not in later]
    second = [node for node in returned if isinstance(node, Node) and node in later]
    outputs = tuple(-1 if not isinstance(node, Node) else first.index(node) if node in first
                    else len(first) + second.index(node) for node in returned)
    output.args = ((*first, *second, *(value for _, value in writes)),)
    output.meta.pop("desc", None)
    pin(joint.graph, len(first))
    joint.recompile()
    given = [node.meta["val"] for node in placeholders]
    forward, backward = api.partition_joint(
        joint, (given, [tangent.meta["val"]]), num_fwd_outputs=len(first),
        static_lifetime_input_indices=[i for i in static if i < len(placeholders)])
    for half in (forward, backward):
        put_in_order(half.graph)
    make_again(forward, backward, len(first))
    backward = _with_inputs(forward, backward, len(first), len(second), [target for target, _ in writes])
    layout = put_tape(forward, backward, len(first))
    return StepHalves(forward, backward, layout, HalvesOrder(
        layout is not None, _used_inputs(forward, place_of), _used_inputs(backward, place_of), outputs,
        tuple(None if isinstance(node, Node) else node for node in returned)))


def joined(step: GraphModule, halves: StepHalves) -> GraphModule:
    """The halves of `step` as one graph, one after the other, with what the backward computes again twice; the first
    node of the backward is marked as BORDER. A partitioner over ranks takes it, and a rank's part is cut in halves
    again (dist/halves.py): so what is saved is chosen as for one process."""
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


def _seed(joint: GraphModule) -> Node | None:
    """The gradient of the loss itself, where the backward begins; None unless it is one number."""
    found = [node for node in joint.graph.nodes if node.meta.get(SEED)]
    if not found or any(size != 1 for size in found[0].meta["val"].shape):
        return None
    return found[0]


def _take_writes(joint: GraphModule) -> list[tuple[Node, Node]]:
    """(input, its new value), whose `copy_` nodes are taken out."""
    found = []
    for node in list(joint.graph.nodes):
        if node.target is torch.ops.aten.copy_.default:
            target, value = node.args[0], node.args[1]
            node.replace_all_uses_with(value)
            joint.graph.erase_node(node)
            found.append((target, value))
    return found


def _with_inputs(forward: GraphModule, backward: GraphModule, kept: int, results: int,
                 targets: Sequence[Node]) -> GraphModule:
    """The backward with inputs of the whole as inputs of its own, in place of what is saved of them and of views of
    them; with the gradient of the loss as the number that it is; and with its writes. kept: outputs of the forward that
    are not saved. results: outputs of the backward that are not written to `targets`."""
    output = forward.graph.output_node()
    returned = list(output.args[0])
    chains = {saved.name: chain for saved in returned[kept:] for chain in (_chain(saved),) if chain is not None}
    output.args = ((*returned[:kept], *(saved for saved in returned[kept:] if saved.name not in chains)),)
    forward.recompile()
    graph = Graph()
    made: dict[str, Node] = {}
    old = [node for node in backward.graph.nodes if node.op == "placeholder"]
    for node in old:
        if node.name not in chains and not node.name.startswith(TANGENTS):
            made[node.name] = graph.node_copy(node)
    for source in (*(chain[0] for chain in chains.values()), *targets):
        if source.name not in made:
            made[source.name] = graph.placeholder(source.name)
            made[source.name].meta = dict(source.meta)
    for node in (node for chain in chains.values() for node in chain[1:]):
        if node.name not in made:
            made[node.name] = graph.node_copy(node, lambda one: made[one.name])
    for node in backward.graph.nodes:
        if node.name.startswith(TANGENTS) and node.op == "placeholder":
            seed = node.meta["val"]
            made[node.name] = graph.call_function(
                torch.ops.aten.full.default, (list(map(int, seed.shape)), 1.0), {"dtype": seed.dtype})
            made[node.name].meta = dict(node.meta)
        elif node.op == "output":
            found = [made[one.name] if isinstance(one, Node) else one for one in node.args[0]]
            for target, value in zip(targets, found[results:], strict=True):
                write = graph.call_function(torch.ops.aten.copy_.default, (made[target.name], value))
                write.meta = dict(made[target.name].meta)
            graph.output(tuple(found[:results]))
        elif node.op != "placeholder":
            made[node.name] = graph.node_copy(node, lambda one: made[one.name])
    return settings.graph_module(backward, graph)


def _chain(saved: Any) -> list[Node] | None:
    """From an input that is a tensor to `saved`, by views; None where it is something else."""
    found: list[Node] = []
    node = saved
    while isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor):
        found.append(node)
        if node.op == "placeholder":
            return found[::-1]
        if getattr(node.target, "_opname", "") not in VIEWS or len(node.all_input_nodes) != 1:
            return None
        node = node.all_input_nodes[0]
    return None


def _used_inputs(gm: GraphModule, place_of: dict[str, int]) -> tuple[int, ...]:
    """Takes out tensors among the inputs that nothing reads; the places of the others, without the tape."""
    found = []
    for node in [node for node in gm.graph.nodes if node.op == "placeholder"]:
        if node.name not in place_of:
            continue
        if not node.users and isinstance(node.meta.get("val"), torch.Tensor):
            gm.graph.erase_node(node)
        else:
            found.append(place_of[node.name])
    gm.graph.lint()
    gm.recompile()
    return tuple(found)
