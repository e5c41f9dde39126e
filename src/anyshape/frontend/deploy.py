"""Export of a compiled program for deployment: what `anyshape.save` is given, as a file has it (artifact/save.py)."""
from __future__ import annotations

import contextlib
import warnings
from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from anyshape.artifact.deployable import Deployable
from anyshape.artifact.format.signature import InputSpec, Signature
from anyshape.artifact.requirements import check
from anyshape.artifact.save import save
from anyshape.base.config import Config
from anyshape.base.errors import ConfigError, Unsupported
from anyshape.compiler.compiled import PlannedGraph
from anyshape.frontend.callables.compiled_callable import CompiledCallable
from anyshape.frontend.capture.export import ExportedCallable, compile_exported
from anyshape.frontend.capture.export_called import EXPORT, all_sizes_traced, export_called
from anyshape.frontend.programs.compile_program import native
from anyshape.frontend.programs.deployable_program import array_of
from anyshape.frontend.symbols import exported_guards
from anyshape.ir.types import TensorType
from anyshape.plan.ir.program import ExternStep, Window
from anyshape.runtime.numpy_ops import draws
from anyshape.sym import expr
from anyshape.sym.facts import Facts
from anyshape.sym.prover import prove_nonnegative
from anyshape.torch_compat.tracing import settings


def save_compiled(compiled: Any, path: str | Path, native: bool, tests: Sequence[Sequence[Any]] = ()) -> Path:
    """Writes what was compiled to a file to deploy; arguments, result and errors are those of `anyshape.save`."""
    if not isinstance(tests, (tuple, list)) or not all(isinstance(one, (tuple, list)) for one in tests):
        raise ConfigError(f"tests is a {type(tests).__name__} that holds no calls",
                          why="each call is a tuple of arguments", do="write tests=[(x,)] for one call with x")
    if isinstance(compiled, Deployable):
        return save(compiled, path, native, tests)
    own = getattr(type(compiled), "deployable", None)  # of importers, whose packages need not be installed
    if own is not None:
        return save(own(compiled), path, native, tests)
    called = getattr(compiled, "_anyshape", None)
    if isinstance(called, CompiledCallable):
        return _save_called(called, path, native, tests)
    if not isinstance(compiled, ExportedCallable):
        raise ConfigError(f"anyshape.save cannot save a {type(compiled).__name__}", do=EXPORT,
                          why="it takes what was compiled of a module, a function, an ExportedProgram, an ONNX "
                          "model, a StableHLO module or a function of JAX, which say what sizes may change")
    return save(deployable(compiled), path, native, tests)


def _save_called(called: CompiledCallable, path: str | Path, native: bool, tests: Sequence[Sequence[Any]]) -> Path:
    """Saves a module or function that was compiled as it is: exported as it was called."""
    compilation, target = called.compilation, called.target
    sizes = frozenset(words for capture in compilation.captures for _, words, _ in capture.sizes)
    config = compilation.config
    reasons = [one.reason for one in compilation.fallbacks]
    exported, *special = export_called(target, compilation.calls, sizes, config.dynamic,
                                       reasons[-1] if reasons else "")
    try:
        with all_sizes_traced() if config.dynamic else contextlib.nullcontext():
            first = deployable(compile_exported(exported, config, layouts=False))
            others = [one for one in (_special(first, program, config) for program in special) if one is not None]
        if getattr(target, "training", False) and any(
                isinstance(step, ExternStep) and draws(step.target) for step in first.planned.plan.steps):
            warnings.warn("the file draws random numbers in each call\n  why: so does the module, which is in training "
                          "mode\n  do:  model.eval() before saving, if they are for training alone", stacklevel=4)
        # the most particular first, which is the one that a call takes
        program = replace(first, special=tuple(sorted(others, key=lambda one: -len(one[0]))))
        return save(program, path, native, tests)
    except Unsupported as error:
        if not getattr(target, "training", False):
            raise
        raise Unsupported(error.what, where=error.where, why=error.why,
                          do="the module is in training mode: model.eval(), then save it") from error


def _special(first: Deployable, exported: torch.export.ExportedProgram, config: Config
             ) -> tuple[tuple[tuple[int, int, int], ...], Deployable] | None:
    """A program of which some sizes are 1, as a file has it, with these sizes; None: it cannot be deployed beside the
    first, which then refuses them in a call."""
    try:
        found = deployable(compile_exported(exported, config, layouts=False))
        check(found.planned.plan, found.planned.name, found.weights)
    except Unsupported:
        return None
    sizes = [(number, dim, size) for number, (one, other) in enumerate(
                 zip(first.signature.inputs, found.signature.inputs, strict=True)) if one.kind == "array"
             for dim, (wide, size) in enumerate(zip(first.graph.inputs[one.position].tensor.shape,
                                                    found.graph.inputs[other.position].tensor.shape, strict=True))
             if isinstance(size, int) and not isinstance(wide, int)]
    alike = found.signature.is_like(first.signature) and all(size == 1 for *_, size in sizes) and _gives(
        found) == _gives(first)
    return (tuple(sizes), found) if alike and sizes else None


def _gives(program: Deployable) -> list[str | None]:
    """The dtypes of a program's results; "" of sizes."""
    return [one.type.dtype if isinstance(one, Window) else None if one is None else ""
            for one in program.planned.plan.outputs]


def deployable(compiled: ExportedCallable) -> Deployable:
    """What a file holds of a compiled exported program.

    Raises:
        Unsupported: a part of it runs as PyTorch, or its arguments are of a class of their own.
    """
    own = native(compiled.program, compiled.compilation)
    if own is None:
        reasons = [one.reason for one in compiled.compilation.fallbacks]
        raise Unsupported("the program cannot be deployed: a part of it runs as PyTorch",
                          why=reasons[0] if reasons else "it is in several parts, or checked while it runs",
                          do="see explain(); rewrite that part, or compile without check=2")
    planned = _asking(own.compiled, compiled)
    plan = planned.plan
    tensors = [*compiled.state, *([None] * len(compiled.inputs)), *own.constants]
    names = [*_state_names(compiled), *(one.name for one in compiled.inputs),
             *(f"constant.{i}" for i in range(len(own.constants)))]
    weights = {}
    for position, tensor in enumerate(tensors):
        if tensor is not None:
            kind = plan.inputs[position]
            if not isinstance(kind, TensorType):
                raise Unsupported(f"the program cannot be deployed: {names[position]} is no tensor of the plan")
            weights[position] = (names[position], kind.dtype, array_of(tensor, names[position]))
    inputs = []
    for number, one in enumerate(compiled.inputs):
        position = len(compiled.state) + number
        is_open = isinstance(one.value, (torch.Tensor, torch.SymInt))
        kind_ = "array" if isinstance(one.value, torch.Tensor) else "size" if is_open else "fixed"
        if not is_open and not isinstance(one.value, (bool, int, float, str, type(None))):
            raise Unsupported(f"the program cannot be deployed: the argument {one.name} was fixed to {one.value!r:.80}",
                              why="only tensors, numbers, texts and None are written to a file", do="leave it out")
        inputs.append(InputSpec(one.name, kind_, position, None if is_open else one.value))
    args, keywords = _children(compiled.in_spec)
    count = iter(range(len(inputs)))
    signature = Signature(tuple(inputs), _tree(args, count, "arguments"), _tree(keywords, count, "arguments"),
                          _tree(compiled.out_spec, iter(range(len(plan.outputs))), "results"),
                          compiled.compilation.names_of(own.name))
    graph = planned.history.captured
    assert graph is not None
    return Deployable(graph, planned, compiled.compilation.config, weights, signature)


def _asking(planned: PlannedGraph, compiled: ExportedCallable) -> PlannedGraph:
    """The same with the guards of the trace among the facts that a file checks at each new set of sizes: nobody else
    asks them there, as Dynamo does of what is called, and an ExportedCallable itself."""
    kinds = planned.plan.inputs[len(compiled.state):]
    sizes = [(size, own) for one, kind in zip(compiled.inputs, kinds, strict=False)
             if isinstance(one.value, torch.Tensor) and isinstance(kind, TensorType)
             for size, own in zip(one.value.shape, kind.shape, strict=True)
             if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol]
    if not sizes or not compiled.guards:
        return planned
    equal = {str(size.node.expr): own for size, own in sizes if own != expr.symbol(str(size.node.expr))}
    traced = settings.hints([one.value for one in compiled.inputs])
    found = exported_guards.conditions(compiled.guards, sizes[0][0].node.shape_env, traced, equal)
    facts = planned.plan.facts
    more = tuple(size for size in found if size not in facts.known and not prove_nonnegative(facts, size))
    if not more:
        return planned

    def asking(facts: Facts) -> Facts:
        return replace(facts, known=(*facts.known, *more))

    history = planned.history
    assert history.captured is not None
    graph = replace(history.captured, facts=asking(history.captured.facts))
    return replace(planned, plan=replace(planned.plan, facts=asking(facts)), history=replace(history, captured=graph))


def _state_names(compiled: ExportedCallable) -> list[str]:
    """Names of parameters and buffers, in the order of the program's inputs."""
    signature = compiled.exported.graph_signature
    found = [spec.target or spec.arg.name for spec in signature.input_specs if spec.kind.name in
             ("PARAMETER", "BUFFER", "CONSTANT_TENSOR")]
    count = len(compiled.state)
    return found if len(found) == count else [f"state.{i}" for i in range(count)]


def _children(spec: Any) -> list[Any]:
    if hasattr(spec, "child"):
        return [spec.child(i) for i in range(spec.num_children)]
    return list(spec.children_specs)  # of older versions of torch


def _tree(spec: Any, leaves: Any, what: str) -> Any:
    """A nesting of torch's as that of a signature."""
    if spec.is_leaf():
        return next(leaves)
    children = _children(spec)
    named = spec.type is namedtuple or (isinstance(spec.type, type) and issubclass(spec.type, tuple))
    if named or spec.type is list:
        return ["tuple" if named else "list", [_tree(child, leaves, what) for child in children]]
    # models of transformers give mappings of their own
    mapped = isinstance(spec.type, type) and issubclass(spec.type, Mapping) and isinstance(spec.context, list)
    if mapped and len(spec.context) == len(children) and all(isinstance(key, str) for key in spec.context):
        return ["dict", [[key, _tree(child, leaves, what)] for key, child in zip(spec.context, children, strict=True)]]
    raise Unsupported(f"the program cannot be deployed: its {what} are nested in a {spec.type.__name__}",
                      why="a file knows tuples, lists and dicts with names", do="return or take one of these")

