"""The programs of a traced train step: its gradients, and behind them the update that is due.

    step(w, x) -> loss, gradients([g], [w])
    -->  step(w, x, m, n) -> loss;  new_w, new_m = update(w, g, n, [m]);  copy_(w, new_w);  copy_(m, new_m)

A trace ends with the gradients. What is done with them is added to a copy of its graph when it is first needed: one
trace serves a batch that gathers gradients and one that ends a step, and other choices of the optimiser. An update's
own tensors are not arguments of the traced function; the program fetches them.
"""
from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from anyshape.base.errors import InputError
from anyshape.frontend import decompositions
from anyshape.frontend.compilation import Boxed
from anyshape.frontend.held import Held
from anyshape.frontend.step_halves import SEED
from anyshape.frontend.step_update import StepUpdate
from anyshape.frontend.whole_step import StepState
from anyshape.run import torch_api, torch_trace

GRADIENTS = torch.ops.anyshape.gradients.default


@dataclass(frozen=True, slots=True)
class Ended:
    """A program with its update. outputs: per output of the trace, its place among those of the program; -1 for
    gradients. norm, finite: their places, or -1."""

    program: Boxed
    outputs: tuple[int, ...]
    norm: int
    finite: int


@dataclass(frozen=True, slots=True)
class Bound:
    """A program for `update`; `given` are the tensors that it takes after the inputs of the trace."""

    update: StepUpdate
    given: tuple[torch.Tensor, ...]
    ended: Ended


class StepProgram:
    """Runs a traced step with the update that is due. Called with one list of inputs, which it empties.

    Args:
        graph: of AOTAutograd, functional but for `copy_` nodes onto placeholders.
        compile: a graph with its update, and the places of its inputs that stay at one address -> its program.
        static: places of inputs of `graph` that stay at one address.
    """

    _boxed_call = True

    def __init__(self, graph: GraphModule, state: StepState,
                 compile: Callable[[GraphModule, tuple[int, ...]], Boxed], static: Sequence[int]) -> None:
        self.graph = graph
        self.state = state
        self.compiled = torch_trace.in_trace_of_now(self._compiled)
        self.compile = compile
        self.static = tuple(static)
        self.bound: dict[bool, Bound] = {}
        self.known: dict[Any, Ended] = {}

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """The outputs of the trace, with an empty tensor for each gradient: AOTAutograd marks tensors among them.

        Raises:
            InputError: the step cannot be one program; nothing has run.
        """
        state = self.state
        bound = self.bound.get(state.is_last)
        if bound is None or bound.update is not state.update:
            bound = self.bound[state.is_last] = self._bound(inputs)
        inputs.extend(bound.given)
        ended = bound.ended
        with Held():
            found = ended.program(inputs)
            state.norm = found[ended.norm] if ended.norm >= 0 else None
            state.finite = found[ended.finite] if ended.finite >= 0 else None
            state.has_ended = True
        return [found[place] if place >= 0 else state.nothing for place in ended.outputs]

    def _bound(self, inputs: Sequence[Any]) -> Bound:
        update, is_last = self.state.update, self.state.is_last
        assert update is not None
        place_of = {id(value): place for place, value in enumerate(inputs)}
        tensors = update.tensors()
        places = tuple(place_of.get(id(one), -1) for one in tensors)
        given = tuple(one for one, place in zip(tensors, places, strict=True) if place < 0)
        shared = {torch_api.storage_key(one) for one in given}
        if any(isinstance(one, torch.Tensor) and torch_api.storage_key(one) in shared for one in inputs):
            raise InputError("the loss reads what the update of the step writes, as another tensor",
                             why="both would be one buffer of the program", do="give it a copy")
        key = is_last, places, update.kind(is_last)
        if key not in self.known:
            self.known[key] = self.compiled(update, is_last, places, len(inputs))
        return Bound(update, given, self.known[key])

    def _compiled(self, update: StepUpdate, is_last: bool, places: tuple[int, ...], count: int) -> Ended:
        """The program for an update of this kind; `count` inputs of the trace come first."""
        with torch_trace.text_when_run():
            graph, outputs, norm, finite = with_update(self.graph, update, is_last, places)
            static = (*self.static, *range(count, count + sum(place < 0 for place in places)))
            return Ended(self.compile(graph, static), outputs, norm, finite)


def with_update(step: GraphModule, update: StepUpdate, is_last: bool,
                places: Sequence[int]) -> tuple[GraphModule, tuple[int, ...], int, int]:
    """A copy of a step's graph with its update behind the gradients; see `Ended` for the rest.

    Args:
        places: per tensor of the update, its place among the inputs; -1 where it is a new one.
    """
    graph = copy.deepcopy(step.graph)
    node = graph.find_nodes(op="call_function", target=GRADIENTS)[0]
    inputs = list(graph.find_nodes(op="placeholder"))
    mode = node.args[1][0].meta["val"].fake_mode
    last = inputs[-1]
    targets: list[Node] = []
    values = []
    for place, tensor in zip(places, update.tensors(), strict=True):
        with mode, torch.no_grad():
            value = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype)
        if place < 0:
            with graph.inserting_after(last):
                last = graph.placeholder(f"update_{len(targets)}")
            last.meta = {"val": value}
        targets.append(last if place < 0 else inputs[place])
        values.append(value)
    gradients = [one for one in node.args[0] if one is not None]
    formulas, written, norm, finite = _formulas(update, is_last, values, node)
    found = _put(graph, formulas, [*targets, *gradients])
    output = graph.output_node()
    kept = [one for one in output.args[0] if not (isinstance(one, Node) and node in one.all_input_nodes)]
    outputs, place = [], 0
    for one in output.args[0]:
        is_gradient = isinstance(one, Node) and node in one.all_input_nodes
        outputs.append(-1 if is_gradient else place)
        place += not is_gradient
    beside = found[len(written):]
    output.args = ((*kept, *beside),)
    output.meta.pop("desc", None)
    with graph.inserting_before(output):
        for place, value in zip(written, found, strict=False):
            write = graph.call_function(torch.ops.aten.copy_.default, (targets[place], value))
            write.meta = {"val": targets[place].meta["val"]}
    node.args[2].meta[SEED] = True
    for user in list(node.users):
        graph.erase_node(user)
    graph.erase_node(node)
    graph.lint()
    end = len(kept)
    return torch_trace.graph_module(step, graph), tuple(outputs), end if norm else -1, end + norm if finite else -1


def _formulas(update: StepUpdate, is_last: bool, values: Sequence[torch.Tensor],
              node: Node) -> tuple[GraphModule, list[int], bool, bool]:
    """The graph from the update's tensors and the gradients to their new values, and the norm and whether gradients are
    finite, if there are these two; which tensors the values are for, and whether there are these two."""
    there = [one is not None for one in node.args[0]]
    written: list[int] = []
    beside: list[bool] = []

    def traced(*given: torch.Tensor) -> list[torch.Tensor]:
        tensors = given[:len(values)]
        gradients = iter(given[len(values):])
        one = update.on(tensors)
        changes = (one.updates if is_last else one.gathers)([next(gradients) if here else None for here in there])
        place_of = {id(tensor): place for place, tensor in enumerate(tensors)}
        written.extend(place_of[id(target)] for target, _ in changes.values)
        beside.extend((changes.norm is not None, changes.finite is not None))
        return [*(value for _, value in changes.values),
                *(value for value in (changes.norm, changes.finite) if value is not None)]

    gradients = [one.meta["val"] for one in node.args[0] if one is not None]
    with values[0].fake_mode:  # type: ignore[attr-defined]
        graph = torch_api.trace_formulas(traced, [*values, *gradients], decompositions.table())
    return graph, written, *beside


def _put(graph: Any, formulas: GraphModule, given: Sequence[Node]) -> list[Any]:
    """`formulas` at the end of `graph`; their results."""
    operands = iter(given)
    made: dict[Node, Any] = {}
    with graph.inserting_before(graph.output_node()):
        for one in formulas.graph.nodes:
            if one.op == "placeholder":
                made[one] = next(operands)
            elif one.op == "output":
                return [made[result] for result in one.args[0]]
            else:
                assert one.op == "call_function", one.format_node()
                made[one] = graph.node_copy(one, made.__getitem__)
    raise AssertionError("a graph ends with its output")
