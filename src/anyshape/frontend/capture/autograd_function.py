"""The autograd function: a forward and its backward as one function of autograd, without AOTAutograd's wrapper around
it.

    AOTAutograd's:  wrapper -> Function.apply -> forward of Python, saved state, epilogue -> program
    ours:           Function.apply -> program

The wrapper serves every graph there may be. Where `internals.training_runtime` says that it has little to do, and all
that is saved lies on one tape, this does just that; else the wrapper stays.
"""
from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from anyshape.compiler.driver import rebuilt
from anyshape.compiler.undefined_gradients import specialize_to_undefined
from anyshape.frontend.autograd.partition import PartitionedGraphs
from anyshape.frontend.programs.compile_program import NativeProgram, native
from anyshape.frontend.programs.double_backward import DoubleBackward
from anyshape.frontend.programs.session import Boxed, Compilation
from anyshape.passes.driver.pipeline import FAST_DISPATCH
from anyshape.runtime.call.executable import Executable
from anyshape.torch_compat import aten, is_there
from anyshape.torch_compat.dtypes import TORCH_DTYPES
from anyshape.torch_compat.dynamo import internals
from anyshape.torch_compat.versions import api


@dataclass(frozen=True, slots=True)
class NoGradProgram:
    """A backward for calls in which some gradients are absent. stand_ins: by number of the gradient, what is given in
    its place; zeros have to be made for the others. pair: the executables of the whole backward, and of this one."""

    program: Boxed
    stand_ins: Mapping[int, torch.Tensor]
    pair: tuple[Executable, Executable] | None = None


class AutogradProgram:
    """Receives the two programs of a graph of `count` flat inputs while AOTAutograd compiles them."""

    def __init__(self, halves: PartitionedGraphs, compilation: Compilation, count: int) -> None:
        self.halves = halves
        self.compilation = compilation
        self.count = count
        self.forward: Boxed | None = None
        self.backward: Boxed | None = None
        self.runtime: internals.TrainingRuntime | None = None
        self.as_given = False
        self.second: DoubleBackward | None = None
        self.without: dict[tuple[int, ...], NoGradProgram] = {}
        self.lock = threading.Lock()
        self.when_whole: Callable[[], None] | None = None  # called once there is a backward

    def flat(self, wrapped: Callable[..., Any]) -> Callable[..., Any] | None:
        """The pair over flat inputs, or None when it needs AOTAutograd's wrapper. Calls that are not plain
        training calls go to `wrapped`, and all until there is a backward: the first one has torch compile its program,
        where that was not compiled with the forward."""
        second = self.second
        if self.forward is None or self.runtime is None or second is None or not self.is_plain():
            return None
        if self.runtime.views and not is_there(aten._unsafe_view.default):
            return None
        return self.joined(wrapped)

    def joined(self, wrapped: Callable[..., Any]) -> Callable[..., Any]:
        """The pair over flat inputs, of which `flat` has found that it may be called so, or did in an earlier process.
        """
        second = self.second
        assert self.forward is not None and self.runtime is not None and second is not None
        apply = internals.plain_apply(_function(self, self.forward, self.runtime, second))
        hint, hints = internals.hint_dynamic, self.runtime.hints
        usual = internals.plain_training

        def boxed(inputs: Sequence[Any]) -> Any:
            if self.backward is None or second.as_pytorch or not usual():
                return wrapped(*inputs)
            outputs = apply(*inputs)
            for index, dims in hints:
                hint(outputs[index], dims)
            return outputs

        def run(*inputs: Any) -> Any:
            return boxed(inputs)

        run.boxed, run.made_of = boxed, self  # type: ignore[attr-defined]
        return run

    def lacking(self, absent: tuple[int, ...]) -> NoGradProgram:
        """The backward for calls that have no gradients of these numbers; compiled when it is first needed.

        Raises:
            AnyShapeError: that failed, and `config.strict` is set.
        """
        assert self.forward is not None and self.backward is not None
        with self.lock:
            found = self.without.get(absent)
            if found is None:
                try:
                    found = _without(self.forward, self.backward, absent, self.compilation)
                except Exception as error:
                    if self.compilation.config.strict:
                        raise
                    self.compilation.record("backward", "absent", f"{type(error).__name__}: {error}")
                    found = NoGradProgram(self.backward, {})
                self.without[absent] = found
        if found.pair is not None:  # whoever watches the one sees what the other does
            whole, own = found.pair
            own.context = whole.context
        return found

    def is_plain(self) -> bool:
        """Do the graphs have the inputs and outputs that the notes say, and nothing that autograd must not see?"""
        forward, backward, runtime, count = self.halves.forward, self.halves.backward, self.runtime, self.count
        if runtime is None or forward is None or backward is None or self.halves.layout is None \
                or runtime.inputs != count or FAST_DISPATCH in self.compilation.config.disabled():
            return False
        returned, gradients = (list(gm.graph.output_node().args[0]) for gm in (forward, backward))
        return len(forward.graph.find_nodes(op="placeholder")) == count \
            and len(returned) == runtime.outputs + 1 and len(gradients) == count \
            and len(backward.graph.find_nodes(op="placeholder")) == 1 + len(runtime.tangents) \
            and all(gradients[index] is not None for index in runtime.detached)


def _without(forward: Boxed, backward: Boxed, absent: tuple[int, ...],
             compilation: Compilation) -> NoGradProgram:
    """The backward for calls in which the gradients of these numbers are absent."""
    before, known = native(forward, compilation), native(backward, compilation)
    found = None if before is None or known is None else specialize_to_undefined(
        known.compiled.plan, known.compiled.programs, absent)
    if before is None or known is None or found is None or not found.dtypes:
        return NoGradProgram(backward, {})
    executable = rebuilt(known.compiled, found.plan, found.programs, compilation.config)
    sources = {source.name for one in (before.executable, executable) for source in one.binder.sources}
    if not sources.issuperset(executable.layout.symbols):
        return NoGradProgram(backward, {})  # it needs a size that only such a gradient has
    stand_ins = {number: torch.zeros((), dtype=TORCH_DTYPES[dtype]) for number, dtype in found.dtypes.items()}
    pair = known.executable, executable
    if not known.constants:
        return NoGradProgram(executable, stand_ins, pair)
    compiled = replace(known.compiled, plan=found.plan, executable=executable)
    return NoGradProgram(NativeProgram(known.name, compiled, known.notes), stand_ins, pair)


def _function(pair: AutogradProgram, forward_program: Boxed, runtime: internals.TrainingRuntime,
              second: DoubleBackward) -> type[torch.autograd.Function]:
    """The function of autograd of one pair. Its name is AOTAutograd's, for people see it in `grad_fn`."""
    constant, views, tangents = runtime.constant, runtime.views, runtime.tangents
    check, steady = internals.check_backward, runtime.steady
    keep, keeps_graph = second.keep, api.keeps_graph

    class CompiledFunction(torch.autograd.Function):
        boxed_grads_call = True  # gradients come as a list, so that each can go after its last use

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            ctx.kept = keep(inputs)
            outputs = list(forward_program(list(inputs)))
            ctx.tape = outputs.pop()
            ctx.set_materialize_grads(False)  # zeros as large as an output that nobody used
            ctx.kinds = [(outputs[index].shape, outputs[index].dtype) for index, _ in tangents]
            for index in views:
                outputs[index] = aten._unsafe_view.default(outputs[index], outputs[index].shape)
            if constant:
                ctx.mark_non_differentiable(*[outputs[i] for i in constant if isinstance(outputs[i], torch.Tensor)])
            return tuple(outputs)

        @staticmethod
        @internals.left_alone
        def backward(ctx: Any, *given: Any) -> Any:
            check(steady)
            gradients = given[0] if len(given) == 1 and type(given[0]) is list else list(given)
            given = tuple(gradients) if torch.is_grad_enabled() else ()
            if not (given or keeps_graph()):
                ctx.kept = None
            program: Any = pair.backward
            absent = tuple([number for number, (index, _) in enumerate(tangents) if gradients[index] is None])
            stand_ins: Mapping[int, torch.Tensor] = {}
            if absent:
                lacking = pair.lacking(absent)
                program, stand_ins = lacking.program, lacking.stand_ins
                for number in absent:
                    if number not in stand_ins:
                        shape, dtype = ctx.kinds[number]
                        gradients[tangents[number][0]] = torch.zeros(shape, dtype=dtype)
            inputs = [ctx.tape]
            inputs += [stand_ins[number] if number in stand_ins else
                       internals.tangent_of(gradients[index], layout, number)
                       for number, (index, layout) in enumerate(tangents)]
            gradients.clear()
            context = internals.callers_context()
            run: Any = program if context is None else functools.partial(context.run, program)
            if not given:
                return tuple(run(inputs))
            with torch.no_grad():
                found = run(inputs)
            return second.differentiable(ctx.kept, found, range(len(ctx.needs_input_grad)), given)

    return CompiledFunction
