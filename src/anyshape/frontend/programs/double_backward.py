"""Double backward (`create_graph=True`): what a compiled backward gives is differentiated by PyTorch.

    first:   gradients = compiled backward(tape, tangents)
    second:  outputs = graph(inputs);  gradients = grad(outputs, inputs, tangents);  grad(gradients, ..., given)

The graph is Dynamo's, as it was captured. It runs again from the call's inputs, and only when a gradient is in fact
differentiated: until then a call keeps references to its inputs, which an ordinary backward drops.
"""
from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from anyshape.base.errors import AnyShapeError, Unsupported
from anyshape.frontend.autograd.partition import PartitionedGraphs, written_inputs
from anyshape.frontend.programs.eager_fallback import note, refuse
from anyshape.frontend.programs.session import Compilation
from anyshape.torch_compat.dynamo import internals
from anyshape.torch_compat.versions import api
from anyshape.torch_compat.versions.autocast import casting, casts
from anyshape.torch_compat.versions.random_state import RandomState
from anyshape.torch_compat.versions.side_effects import has_effect

REASON = "a gradient is differentiated again (create_graph=True), which PyTorch does, from the call's inputs on"
DO = "take the first derivative inside of the compiled function (torch.autograd.grad), which compiles both"
OLD = "its results depend on the old value of a tensor that it changes, which is too large to be copied at each call"
STATE = ("casts", "written", "old", "draws", "reason", "keeps", "checked")  # that another process may have
MOST_COPIED = 1 << 16  # bytes of old values, in each call
NODE = "CompiledFunctionBackward"


# What one call keeps, as a tuple, which is quick to make: its inputs (those that have gradients at least; all of them
# where the graph can run again), the versions of the tensors that are checked (None where it cannot), and the
# generators' states (of the host and the inputs' devices), for graphs that draw.
Kept: TypeAlias = tuple[tuple[Any, ...], tuple[int, ...] | None, RandomState | None]


@dataclass(frozen=True, slots=True)
class First:
    """One backward whose gradients have a history.

    Args:
        kept: of the call; None where torch's wrapper gives the function other inputs.
        places: of the inputs for which it has gradients.
        operands: which inputs are differentiated.
        tangents: of which outputs there are gradients.
    """
    second: DoubleBackward
    kept: Kept | None
    places: tuple[int, ...]
    operands: tuple[int, ...]
    tangents: tuple[int, ...]


class DoubleBackward:
    """Differentiates the gradients of one graph.

    Args:
        gm: the graph as Dynamo captured it; what it shows of shapes is not kept.
        halves: the forward and backward that were made of it.
        as_given: the outputs of the function of autograd are the graph's.
    """

    def __init__(self, gm: GraphModule, halves: PartitionedGraphs, as_given: bool, compilation: Compilation) -> None:
        self.compilation = compilation
        graph, held = _bare(gm)
        self.make: Callable[[], GraphModule] = functools.partial(GraphModule, held, graph)
        self.module: GraphModule | None = None
        self.casts = casts()
        self.limited = compilation.config.limited
        self.as_pytorch = False  # from the forward on
        forward, backward = halves.forward, halves.backward
        assert forward is not None
        inputs = forward.graph.find_nodes(op="placeholder")
        output = forward.graph.output_node()
        written = [node for node in written_inputs(forward, output) if node in inputs]
        self.written = frozenset(inputs.index(node) for node in written)
        self.old = tuple(inputs.index(node) for node in written if _reaches(node, output))
        self.draws = _draws(forward)
        self.reason = ""
        if not as_given or len(inputs) != len(gm.graph.find_nodes(op="placeholder")):
            self.reason = "the function changes inputs that have gradients, or returns views that share memory"
        elif backward is not None and _draws(backward):
            self.reason = "its backward draws random numbers, or has operators that do not say what they do"
        self.keeps = not (self.reason or compilation.config.strict)
        self.checked = tuple(index for index, node in enumerate(gm.graph.find_nodes(op="placeholder"))
                             if isinstance(node.meta.get("example_value"), torch.Tensor) and index not in self.written)

    def state(self) -> dict[str, Any]:
        """What another process makes the same of (`restored`); it can be pickled where the graph can."""
        return {"module": pickle.dumps(self.make()), **{name: getattr(self, name) for name in STATE}}

    @staticmethod
    def restored(state: dict[str, Any], compilation: Compilation) -> DoubleBackward:
        """What a `state` says. The graph is only read from it where it runs."""
        found = DoubleBackward.__new__(DoubleBackward)
        found.compilation, found.limited, found.as_pytorch = compilation, compilation.config.limited, False
        found.make, found.module = functools.partial(pickle.loads, state["module"]), None
        for name in STATE:
            setattr(found, name, state[name])
        return found

    def keep(self, inputs: tuple[Any, ...]) -> Kept:
        """What a call of these inputs keeps; asked before it runs."""
        if self.limited:  # what only this call holds goes when it would go
            return (tuple([one if isinstance(one, torch.Tensor) and one.is_leaf else None for one in inputs]),
                    None, None)
        if not self.keeps or (self.old and sum([inputs[index].nbytes for index in self.old]) > MOST_COPIED):
            return inputs, None, None
        try:
            versions = tuple([inputs[index]._version for index in self.checked])
        except RuntimeError:  # made under inference_mode, they do not count
            versions = self.versions(inputs)
        if self.old:
            inputs = tuple([value.detach().clone() if index in self.old else value
                            for index, value in enumerate(inputs)])
        return inputs, versions, RandomState.now(inputs) if self.draws else None

    def versions(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        return tuple([api.version_of(inputs[index]) for index in self.checked])

    def differentiable(self, kept: Kept | None, gradients: Sequence[torch.Tensor | None], places: Sequence[int],
                       tangents: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """The gradients of a backward as what can be differentiated.

        Args:
            gradients: for the inputs at `places`.
            tangents: what the backward was given, for each output of the graph; None for those without a gradient.
        """
        inputs = kept[0] if kept is not None else ()
        operands = tuple(index for index in places if inputs and isinstance(inputs[index], torch.Tensor)
                         and inputs[index].requires_grad)
        present = tuple(index for index, one in enumerate(tangents) if one is not None)
        first = First(self, kept, tuple(places), operands, present)
        given = [*(inputs[index] for index in operands), *(tangents[index] for index in present)]
        if not any(one.requires_grad for one in given):
            given.append(torch.empty(0, requires_grad=True))  # so that they have a history, which refuses
        return _Again.apply(first, tuple(gradients), *given)  # type: ignore[no-any-return]

    def hook(self, kept: Kept, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Has the function of autograd that torch's wrapper applied give such gradients."""
        before = {one.grad_fn for one in inputs if isinstance(one, torch.Tensor)}
        nodes = [one.grad_fn for one in outputs if isinstance(one, torch.Tensor) and one.grad_fn is not None
                 and one.grad_fn.name() == NODE and one.grad_fn not in before]
        if not nodes:
            return
        places = [index for index, one in enumerate(inputs) if isinstance(one, torch.Tensor)]
        held: list[Kept | None] = [kept]
        count = len(outputs)

        def differentiable(gradients: Sequence[Any], tangents: Sequence[Any]) -> Any:
            if not torch.is_grad_enabled():
                if not api.keeps_graph():
                    held[0] = None
                return None
            if len(gradients) != len(places) or len(tangents) != count:
                self.reason = self.reason or "torch's wrapper gives it other inputs than the call's"
                held[0] = None
            return self.differentiable(held[0], gradients, places, tangents)

        nodes[0].register_hook(differentiable)

    def run(self, inputs: Sequence[Any]) -> Any:
        """The graph as PyTorch."""
        if self.module is None:
            self.module = self.make()
        return self.module(*inputs)

    def plain(self, inputs: Sequence[Any]) -> Any:
        """A call that runs as PyTorch from the forward on."""
        note(self.compilation, f"it is differentiated twice, and {self.reason}", DO)
        return self.run(inputs)

    def check(self, kept: Kept | None) -> Kept:
        """What was kept, where the gradients can be differentiated.

        Raises:
            Unsupported: the graph is one of which that cannot be done, or `strict` is set.
            LimitError: under a limit in bytes.
            AnyShapeError: an input was changed since.
        """
        refuse(self.compilation.config, REASON, DO)
        if kept is None or kept[1] is None:
            self.as_pytorch, self.reason = True, self.reason or OLD
            raise Unsupported("the gradients of this compiled function cannot be differentiated (create_graph=True)",
                              why=self.reason,
                              do=f"run the step again: from now on its calls run as PyTorch; or {DO}")
        if self.versions(kept[0]) != kept[1]:
            raise AnyShapeError("a gradient cannot be differentiated again",
                                why="one of the variables needed for gradient computation has been modified by an "
                                    "inplace operation: an input of the compiled function, or a weight",
                                do="change it after the last backward, or give the function a copy")
        note(self.compilation, REASON, DO)
        return kept

    @contextlib.contextmanager
    def as_then(self, kept: Kept) -> Iterator[None]:
        """Inside, autograd records, and autocast and the generators are as they were in the call."""
        random = kept[2]
        now = None if random is None else RandomState.now(kept[0])
        if random is not None:
            random.restore()
        try:
            with torch.enable_grad(), casting(self.casts):
                yield
        finally:
            if now is not None:
                now.restore()


class _Again(torch.autograd.Function):
    """Hands on the gradients of a backward; its own backward computes them once more, as PyTorch."""

    @staticmethod
    def forward(ctx: Any, first: First, gradients: Sequence[torch.Tensor | None], *operands: torch.Tensor) -> Any:
        ctx.first = first
        ctx.save_for_backward(*operands)
        ctx.set_materialize_grads(False)
        return tuple([None if one is None else one.detach() for one in gradients])

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        operands = ctx.saved_tensors
        first: First = ctx.first
        kept = first.second.check(first.kept)
        if not api.keeps_graph():
            del ctx.first  # autograd refuses the next one
        plain = api.unhooked(_differentiated, "a second derivative runs as PyTorch")
        return None, None, *plain(first, kept, operands, given, torch.is_grad_enabled())


def _differentiated(first: First, kept: Kept, operands: Sequence[torch.Tensor], given: Sequence[Any],
                    again: bool) -> list[Any]:
    """The gradients for `operands` of what `first` gave. again: they can be differentiated too.

    Without an alias of each operand the gradient of one that is made of another would come to the other twice.
    """
    second = first.second
    count = len(first.operands)
    with second.as_then(kept):
        own = [one if not one.requires_grad else one.view_as(one) if again else one.detach().requires_grad_()
               for one in operands]
        inputs = [one.detach().clone() if index in second.written else one for index, one in enumerate(kept[0])]
        for index, one in zip(first.operands, own[:count], strict=True):
            inputs[index] = one
        outputs = second.run(inputs)
        ends = [(outputs[index], one) for index, one in zip(first.tangents, own[count:], strict=False)
                if outputs[index].requires_grad]
        gradients = dict(zip(first.operands, torch.autograd.grad(
            [end for end, _ in ends], own[:count], [one for _, one in ends], create_graph=True, allow_unused=True),
            strict=True)) if ends else {}
        pairs = [(gradients.get(index), one) for index, one in zip(first.places, given, strict=True)
                 if one is not None]
        pairs = [(end, one) for end, one in pairs if end is not None and end.requires_grad]
        wanted = [one for one in own if one.requires_grad]
        found = iter(torch.autograd.grad([end for end, _ in pairs], wanted, [one for _, one in pairs],
                                         create_graph=again, allow_unused=True) if pairs else [None] * len(wanted))
    return [next(found) if one.requires_grad else None for one in own]


def with_double_backward(wrapped: Callable[..., Any], second: DoubleBackward) -> Callable[..., Any]:
    """What torch's wrapper made of the graph, whose gradients can be differentiated."""
    usual = internals.plain_training
    limited = second.limited  # a hook would keep what the backward is given while it runs

    def run(*inputs: Any) -> Any:
        if second.as_pytorch:
            return second.plain(inputs)
        if limited or not usual():
            return wrapped(*inputs)
        kept = second.keep(inputs)
        outputs = wrapped(*inputs)
        second.hook(kept, inputs, outputs)
        return outputs

    return run


def _bare(gm: GraphModule) -> tuple[Graph, dict[str, Any]]:
    """A graph of Dynamo's without what it notes of each node (its fake tensors would stay alive), and the objects that
    the graph names."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))  # type: ignore[arg-type]
    held: dict[str, Any] = {}
    for node in graph.nodes:
        node.meta = {}
        if node.op in ("get_attr", "call_module"):
            value: Any = gm
            for name in node.target.split("."):
                value = getattr(value, name)
            held[node.target] = GraphModule(*reversed(_bare(value))) if isinstance(value, GraphModule) else value
    return graph, held


def _draws(gm: GraphModule) -> bool:
    return any(has_effect(node.target) for node in gm.graph.nodes if node.op == "call_function")


def _reaches(written: Node, output: Node) -> bool:
    """Does a result depend on this input, beside what is written to it?"""
    seen: set[Node] = set()
    rest = [written]
    while rest:
        for user in rest.pop().users:
            if user is output:
                return True
            if user not in seen:
                seen.add(user)
                if not (user.target == torch.ops.aten.copy_.default and user.args[0] is written):
                    rest.append(user)
    return False
