"""The programs of a traced train step: its gradients, and behind them the update that is due.

    step(w, x) -> loss, gradients([g], [w])
    -->  step(w, x, m, n) -> loss;  new_w, new_m = update(w, g, n, [m]);  copy_(w, new_w);  copy_(m, new_m)

A trace ends with the gradients. What is done with them is added to a copy of its graph when it is first needed: one
trace serves a batch that gathers gradients and one that ends a step, and other choices of the optimiser. An update's
own tensors are not arguments of the traced function; the program fetches them.

Where the norm of all gradients is limited, or the loss is scaled, no weight can be updated before all gradients have
been seen, and until then they live. A batch that a limit in bytes refuses for that runs twice: once only to see the
gradients, each of which dies at once, and then with what was seen as numbers that are there.

    step(w, x, m, n)         -> loss, norm of the gradients
    step(w, x, m, n, norm)   -> loss;  new_w, new_m = update(w, g * factor(norm), n, [m]);  copy_ ...
"""
from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from anyshape.base.errors import InputError, LimitError
from anyshape.frontend.aten import decompositions
from anyshape.frontend.programs.session import Boxed
from anyshape.frontend.train_step.defer_interrupts import DeferInterrupts
from anyshape.frontend.train_step.partition import SEED, VIEWS, refusal_of
from anyshape.frontend.train_step.step_module import StepState
from anyshape.frontend.train_step.update import StepUpdate
from anyshape.torch_compat.tracing import settings
from anyshape.torch_compat.versions import api
from anyshape.torch_compat.versions.random_state import RandomState
from anyshape.torch_compat.versions.side_effects import OWN, has_effect

GRADIENTS = torch.ops.anyshape.gradients.default

Part = Literal["gathers", "measures", "updates"]  # the method of StepUpdate that says what is done with gradients
PARTS = {"gathers": StepUpdate.gathers, "measures": StepUpdate.measures, "updates": StepUpdate.updates}
ROLE = "anyshape_role"  # of an input that the update reads: see StepUpdate.roles
ANOTHER = "another update behind the same trace"
TWICE = "the limit refuses the batch in one run: it runs twice, {} (docs/train-step.md)"


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A program with its update. outputs: per output of the trace, its place among those of the program; -1 for
    gradients. norm, finite: their places, or -1. there: per weight, whether it has a gradient."""

    program: Boxed
    outputs: tuple[int, ...]
    norm: int
    finite: int
    there: tuple[bool, ...]

    def seen(self, found: Sequence[Any]) -> tuple[Any, Any]:
        """Norm and finite, or None, of what the program gave."""
        return (found[self.norm] if self.norm >= 0 else None), (found[self.finite] if self.finite >= 0 else None)


@dataclass(frozen=True, slots=True)
class BoundTensors:
    """A program for `update`, made of `source`; `given` are the tensors that it takes after the inputs of the trace."""

    source: StepUpdate
    update: StepUpdate
    given: tuple[torch.Tensor, ...]
    ended: StepGraph


class StepProgram:
    """Runs a traced step with the update that is due. Called with one list of inputs, which it empties.

    Args:
        graph: of AOTAutograd, functional but for `copy_` nodes onto placeholders.
        compile: a graph with its update, the places of its inputs that stay at one address, and in words why there is
            one more behind the same trace -> its program.
        static: places of inputs of `graph` that stay at one address.
    """

    _boxed_call = True

    def __init__(self, graph: GraphModule, state: StepState,
                 compile: Callable[[GraphModule, tuple[int, ...], str], Boxed], static: Sequence[int]) -> None:
        self.graph = graph
        self.state = state
        self.compiled = settings.in_trace_of_now(self._compiled)
        self.compile = compile
        self.static = tuple(static)
        self.bound: dict[tuple[Part, bool], BoundTensors] = {}
        self.known: dict[Any, StepGraph] = {}
        nodes = graph.graph.nodes
        self.draws = any(has_effect(node.target) for node in nodes)
        # random numbers can be drawn again; what other operators do beside their results may not be done twice
        self.may_repeat = all(getattr(node.target, "namespace", "aten") in OWN for node in nodes)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """The outputs of the trace, with an empty tensor for each gradient: AOTAutograd marks tensors among them.

        Raises:
            InputError: the step cannot be one program; nothing has run.
            LimitError: it takes too much, also if it runs twice; nothing has changed.
        """
        state = self.state
        assert state.update is not None
        bound = self._bound("updates" if state.is_last else "gathers", state.update, inputs)
        begun = _StepBuilder(inputs, self.draws) if state.is_last and state.update.waits and self.may_repeat else None
        inputs.extend(bound.given)
        with DeferInterrupts():
            found = _within_limit(bound.ended.program, inputs, begun is not None)
            if found is None:
                assert begun is not None
                bound, found, state.norm, state.finite = self._twice(state.update, begun)
            else:
                state.norm, state.finite = bound.ended.seen(found)
            state.there, state.has_ended = bound.ended.there, True
        return [found[place] if place >= 0 else state.nothing for place in bound.ended.outputs]

    def _twice(self, update: StepUpdate, begun: _StepBuilder) -> tuple[BoundTensors, list[Any], Any, Any]:
        """A batch in two runs: what the second one is and gives, and what the first one saw of the gradients."""
        first = self._bound("measures", update, begun.inputs)
        second = self._bound("updates", update, begun.inputs, known=True)
        begun.again()
        refused = [error for one in (first, second)
                   for error in (refusal_of(one.ended.program, [*begun.inputs, *one.given]),) if error is not None]
        if refused:
            raise max(refused, key=lambda error: error.least)
        seen = first.ended.seen(first.ended.program([*begun.inputs, *first.given]))
        begun.again()
        for target, value in zip((second.update.norm, second.update.finite), seen, strict=True):
            if target is not None:
                target.copy_(value)
        return second, second.ended.program([*begun.inputs, *second.given]), *seen

    def _bound(self, part: Part, update: StepUpdate, inputs: Sequence[Any], known: bool = False) -> BoundTensors:
        """The program that does `part` with the gradients of a batch; `known`: behind what was seen of them."""
        found = self.bound.get((part, known))
        if found is None or found.source is not update:
            found = self.bound[part, known] = self._newly_bound(part, update, inputs, known)
        return found

    def _newly_bound(self, part: Part, source: StepUpdate, inputs: Sequence[Any], known: bool) -> BoundTensors:
        update = source.knowing() if known else source
        place_of = {id(value): place for place, value in enumerate(inputs)}
        tensors = update.tensors()
        places = tuple(place_of.get(id(one), -1) for one in tensors)
        given = tuple(one for one, place in zip(tensors, places, strict=True) if place < 0)
        shared = {api.storage_key(one) for one in given}
        if any(isinstance(one, torch.Tensor) and api.storage_key(one) in shared for one in inputs):
            raise InputError("the loss reads what the update of the step writes, as another tensor",
                             why="both would be one buffer of the program", do="give it a copy")
        key = part, places, update.kind(part == "updates")
        if key not in self.known:
            self.known[key] = self.compiled(update, part, places, len(inputs))
        return BoundTensors(source, update, given, self.known[key])

    def _compiled(self, update: StepUpdate, part: Part, places: tuple[int, ...], count: int) -> StepGraph:
        """The program for an update of this kind; `count` inputs of the trace come first."""
        with settings.text_when_run():
            graph, outputs, norm, finite = with_update(self.graph, update, part, places)
            static = (*self.static, *range(count, count + sum(place < 0 for place in places)))
            reason = ANOTHER if part != "measures" and not update.is_known else TWICE.format(
                "to see its gradients" if part == "measures" else "then to update")
            return StepGraph(self.compile(graph, static, reason), outputs, norm, finite, gradients_there(self.graph))


class _StepBuilder:
    """What a batch begins with, to begin it again: inputs, and where random numbers are."""

    def __init__(self, inputs: Sequence[Any], draws: bool) -> None:
        self.inputs = list(inputs)
        self.random = RandomState.now(inputs) if draws else None

    def again(self) -> None:
        """Random numbers will be those that they were."""
        if self.random is not None:
            self.random.restore()


def _within_limit(program: Boxed, inputs: list[Any], or_none: bool) -> list[Any] | None:
    """What the program gives; None where a limit refuses it and `or_none`. Nothing of the call is held then."""
    try:
        return program(inputs)
    except LimitError:
        if not or_none:
            raise
        return None


def with_update(step: GraphModule, update: StepUpdate, part: Part,
                places: Sequence[int]) -> tuple[GraphModule, tuple[int, ...], int, int]:
    """A copy of a step's graph with its update behind the gradients; see `StepGraph` for the rest.

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
    for place, tensor, role in zip(places, update.tensors(), update.roles(), strict=True):
        with mode, torch.no_grad():
            value = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        if place < 0:
            with graph.inserting_after(last):
                last = graph.placeholder(f"update_{len(targets)}")
            last.meta = {"val": value}
        targets.append(last if place < 0 else inputs[place])
        targets[-1].meta[ROLE] = role
        values.append(value)
    gradients = [one for one in node.args[0] if one is not None]
    formulas, written, norm, finite = _formulas(update, part, values, node)
    found = _put(graph, formulas, [*targets, *gradients])
    output = graph.output_node()
    kept = [one for one in output.args[0] if not (isinstance(one, Node) and node in one.all_input_nodes)]
    outputs, place = [], 0
    for one in output.args[0]:
        is_gradient = isinstance(one, Node) and node in one.all_input_nodes
        outputs.append(-1 if is_gradient else place)
        place += not is_gradient
    if part == "measures":  # it changes nothing, and the other run gives the results
        kept = kept[:1]
        for one in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
            graph.erase_node(one)
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
    return settings.graph_module(step, graph), tuple(outputs), end if norm else -1, end + norm if finite else -1


def _formulas(update: StepUpdate, part: Part, values: Sequence[torch.Tensor],
              node: Node) -> tuple[GraphModule, list[int], bool, bool]:
    """The graph from the update's tensors and the gradients to their new values, and the norm and whether gradients are
    finite, if there are these two; which tensors the values are for, and whether there are these two."""
    written: list[int] = []
    beside: list[bool] = []

    def traced(*given: torch.Tensor) -> list[torch.Tensor]:
        tensors = given[:len(values)]
        gradients = iter(given[len(values):])
        one = update.on(tensors)
        changes = PARTS[part](one, [None if given is None else next(gradients) for given in node.args[0]])
        place_of = {id(tensor): place for place, tensor in enumerate(tensors)}
        written.extend(place_of[id(target)] for target, _ in changes.values)
        beside.extend((changes.norm is not None, changes.finite is not None))
        return [*(value for _, value in changes.values),
                *(value for value in (changes.norm, changes.finite) if value is not None)]

    gradients = [one.meta["val"] for one in node.args[0] if one is not None]
    with values[0].fake_mode:  # type: ignore[attr-defined]
        graph = api.trace_formulas(traced, [*values, *gradients], decompositions.table())
    return graph, written, *beside


def gradients_there(graph: GraphModule) -> tuple[bool, ...]:
    """Per weight, whether the loss of a traced step has a gradient for it."""
    node = graph.graph.find_nodes(op="call_function", target=GRADIENTS)[0]
    return tuple(one is not None for one in node.args[0])


def _put(graph: Any, formulas: GraphModule, given: Sequence[Node]) -> list[Any]:
    """`formulas` in `graph`, each right behind what it is made of and behind the other readers of what it reads of
    inputs, which it may be about to replace. So a gradient can die early. Their results."""
    operands = iter(given)
    made: dict[Node, Any] = {}
    nodes = list(graph.nodes)
    places = {one: place for place, one in enumerate(nodes)}
    first = max(places[one] for one in graph.find_nodes(op="placeholder"))
    for one in graph.find_nodes(op="placeholder"):
        places[one] = max((places[user] for user in _readers(one)), default=first)
    # by node of the graph as it was, the last one of those that stand right behind it
    ends = dict(enumerate(nodes))
    for one in formulas.graph.nodes:
        if one.op == "placeholder":
            made[one] = next(operands)
        elif one.op == "output":
            return [made[result] for result in one.args[0]]
        else:
            assert one.op == "call_function", one.format_node()
            place = max((places[made[operand]] for operand in one.all_input_nodes), default=first)
            with graph.inserting_after(ends[place]):
                made[one] = ends[place] = graph.node_copy(one, made.__getitem__)
            places[made[one]] = place
    raise AssertionError("a graph ends with its output")


def _readers(value: Node) -> set[Node]:
    """The nodes that compute with a value, through views."""
    found: set[Node] = set()
    waiting = [value]
    while waiting:
        for user in waiting.pop().users:
            if user not in found and user.op != "output" and user.target is not GRADIENTS:
                found.add(user)
                if getattr(user.target, "_opname", "") in VIEWS:
                    waiting.append(user)
    return found
