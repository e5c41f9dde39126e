"""Capture of predicted paths by torch.export, the check that they are pure, and value numbering over all of them.

    path A: conv, head, ids0 | block, head, ids1      values: conv head ids0 block head' ids1
    path B: conv, head, ids0                     -->  path A and B name the same first three

What runs ahead of its decision must be pure: no writes to inputs, parameters or buffers, no random numbers, nothing
that a value cannot tell (assertions on data). Then equal expressions are equal values, and any can be computed early,
late, or not at all.
"""
from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, GraphModule, Node

from anyshape.base.errors import AnyShapeError, InputError
from anyshape.route.speculate.predicted import Choice, ChoiceTape, Prediction, UnknownPath, current_tape, taped
from anyshape.torch_compat import tree as pytree

INPUT, STATE = "input", "state"
SCHEMA = "_schema"  # of an operator
OPERATOR: Any = type(torch.ops.aten.add.Tensor)
# what export leaves of checks that were made while it traced
CHECKED = ("aten._assert_tensor_metadata.default",)


class ImpureRegion(InputError):
    """What is to run ahead of its decision does more than compute values."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a value looks like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class CapturedValue:
    """One value: an input (by number), a parameter or constant (the tensor itself), or an operator on values.

    args, keywords: nested tuples where `Ref` stands for a value. sample: what it looks like; None where it is no tensor
    (the results of an operator that has several).
    """

    target: Any
    args: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()
    sample: Sample | None = None


@dataclass(frozen=True, slots=True)
class Ref:
    """A value by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Path:
    """One way through the region: decisions as (number of the value ids [cells, k], choice), and what is returned:
    leaves, each a Ref or a constant, and how they nest. routers: who decided; cells: of how many each time."""

    decisions: tuple[tuple[int, Choice], ...]
    leaves: tuple[Any, ...]
    nesting: Any
    routers: tuple[str, ...] = ()
    cells: tuple[int, ...] = ()


class CapturedValues:
    """The values of a region, each with a number that is greater than those of its operands."""

    def __init__(self) -> None:
        self.values: list[CapturedValue] = []
        self.operands: list[tuple[int, ...]] = []  # by value: those that it is computed from
        self.numbers: dict[Any, int] = {}
        self.constants: list[Tensor] = []

    def intern(self, key: Any, value: CapturedValue) -> int:
        """The number of a value; that of an equal one where there is one."""
        number = self.numbers.setdefault(key, len(self.values))
        if number == len(self.values):
            self.values.append(value)
            self.operands.append(_operands(value))
        return number

    def state(self, tensor: Tensor, constant: bool) -> int:
        """A parameter or buffer is itself; constants are the same where their contents are."""
        if constant:
            same = [one for one in self.constants if one.dtype == tensor.dtype and one.shape == tensor.shape
                    and torch.equal(one, tensor)]
            if not same:
                self.constants.append(tensor)
            tensor = same[0] if same else tensor
        return self.intern((STATE, id(tensor)), CapturedValue(STATE, (tensor,), sample=_sample(tensor)))

    def ancestors(self, wanted: Iterable[int], known: AbstractSet[int] = frozenset()) -> set[int]:
        """What has to be computed for values, these included, where `known` and what those stand on are there."""
        found: set[int] = set()
        waiting = list(wanted)
        while waiting:
            number = waiting.pop()
            if number not in found and number not in known:
                found.add(number)
                waiting += self.operands[number]
        return found

    def program(self, inputs: Sequence[int], computed: Iterable[int], outputs: Sequence[int]) -> GraphModule:
        """A module from values to values; `computed` are those in between, and parameters."""
        made = _Program(self, inputs)
        made.compute(set(computed) - set(inputs))
        return made.module([made.nodes[number] for number in outputs])

    def timed(self, inputs: Sequence[int], pieces: Iterable[Iterable[int]], clock: Callable[[], float]) -> GraphModule:
        """A module from values to the time before the first piece of `computed` values and after each of them."""
        made = _Program(self, inputs)
        made.root.add_module("clock", _Clock(clock))
        times = [made.graph.call_module("clock")]
        for piece in pieces:
            made.compute(piece)
            times.append(made.graph.call_module("clock"))
        return made.module(times)

    def zeros(self, number: int) -> Tensor:
        """A tensor of the shape and dtype of a value."""
        sample = self.values[number].sample
        assert sample is not None
        return torch.empty_strided(sample.shape, sample.stride, dtype=sample.dtype, device=sample.device).zero_()


def _operands(value: CapturedValue) -> tuple[int, ...]:
    if value.target in (INPUT, STATE):
        return ()
    found: list[int] = []
    pytree.tree_map_only(Ref, lambda ref: found.append(ref.number), (value.args, dict(value.keywords)))
    return tuple(dict.fromkeys(found))


class _Program:
    """A graph of values that is being made."""

    def __init__(self, values: CapturedValues, inputs: Sequence[int]) -> None:
        self.values, self.graph, self.root = values, Graph(), nn.Module()
        self.nodes = {number: self.graph.placeholder(f"v{number}") for number in inputs}

    def compute(self, numbers: Iterable[int]) -> None:
        """Adds values, and the parameters that they read, which are not there yet."""
        for number in sorted(numbers):
            if number not in self.nodes:
                for operand in self.values.operands[number]:
                    if self.values.values[operand].target == STATE:
                        self._add(operand)
                self._add(number)

    def _add(self, number: int) -> None:
        if number in self.nodes:
            return
        value = self.values.values[number]
        if value.target != STATE:
            args, keywords = pytree.tree_map_only(Ref, lambda ref: self.nodes[ref.number],
                                                  (value.args, dict(value.keywords)))
            self.nodes[number] = self.graph.call_function(value.target, args, keywords)
            return
        tensor, name = value.args[0], f"t{number}"
        if isinstance(tensor, nn.Parameter):
            self.root.register_parameter(name, tensor)
        else:
            self.root.register_buffer(name, tensor)
        self.nodes[number] = self.graph.get_attr(name)

    def module(self, outputs: Sequence[Node]) -> GraphModule:
        """The module that gives them, finished."""
        self.graph.output(tuple(outputs))
        return GraphModule(self.root, self.graph)


class _Clock(nn.Module):
    """Seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.clock = clock

    def forward(self) -> float:
        return self.clock()


class _Region(nn.Module):
    """A model that also returns the decisions of its path."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **keywords: Any) -> Any:
        tape = current_tape()
        tape.rewind()
        before = _attributes(self.model)
        found = self.model(*args, **keywords)
        _check_attributes(before, _attributes(self.model))  # here, for export puts attributes back
        return found, list(tape.ids)


class Alone(nn.Module):
    """One path of a model of predicted routers as a module: results and decisions in one list."""

    def __init__(self, model: nn.Module, prediction: Prediction) -> None:
        super().__init__()
        self.model, self.prediction = model, prediction

    def forward(self, *args: Any) -> list[Any]:
        with taped(ChoiceTape(self.prediction)) as tape:
            found = self.model(*args)
            return [*pytree.tree_leaves(found), *tape.ids]


def capture(model: nn.Module, prediction: Prediction, args: tuple[Any, ...], keywords: dict[str, Any],
            values: CapturedValues) -> Path | None:
    """The path of a model of predicted routers, its values numbered in `values`; None where the prediction has no
    choice for a router that the path meets.

    Raises:
        ImpureRegion: it writes to inputs, parameters, buffers or attributes, draws random numbers, reads data on the
            host, or asserts.
    """
    try:
        with taped(ChoiceTape(prediction)) as tape:
            exported = exported_pure(_Region(model), args, keywords)
    except UnknownPath:
        return None
    if any(_writes(node) for node in exported.graph.nodes):  # else it is functional as it is
        exported = exported.run_decompositions({})
    return _numbered(exported, tape, values)


def check_pure(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Raises ImpureRegion where a module does more than compute values."""
    exported_pure(module, args, {})


def exported_pure(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """The ExportedProgram of a module that is pure."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(module, args, keywords, strict=False)
    except (AnyShapeError, UnknownPath):
        raise
    except Exception as error:  # whatever torch.export does not capture
        line = next((one for one in str(error).splitlines() if one.strip()), "")
        raise ImpureRegion("a region cannot run ahead of its decisions: torch.export does not capture it",
                           why=f"{type(error).__name__}: {line[:200]}",
                           do="leave the speculation of this model off") from error
    _check_signature(exported)
    for node in exported.graph.nodes:  # before what is not used is left out
        _check_pure(node)
    return exported


def _numbered(exported: Any, tape: ChoiceTape, values: CapturedValues) -> Path:
    numbers: dict[Node, int] = {}
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    inputs = 0
    for node in exported.graph.nodes:
        sample = _sample(node.meta.get("val"))
        if node.op == "placeholder":
            spec = specs[node.name]
            if spec.kind == InputKind.USER_INPUT:
                numbers[node] = values.intern((INPUT, inputs), CapturedValue(INPUT, (inputs,), sample=sample))
                inputs += 1
            else:
                constant = spec.kind == InputKind.CONSTANT_TENSOR
                place = exported.constants if constant or spec.persistent is False else exported.state_dict
                numbers[node] = values.state(place[spec.target], constant)
        elif node.target is torch.ops.aten.clone.default and _sample(node.args[0].meta["val"]) == sample:
            numbers[node] = numbers[node.args[0]]  # nothing is written, so that a copy is as good as its original
        elif node.op == "call_function" and str(node.target) not in CHECKED:
            args, keywords = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda one: Ref(numbers[one]))
            frozen = _frozen(args), tuple(sorted((name, _frozen(one)) for name, one in keywords.items()))
            value = CapturedValue(node.target, *frozen, sample=sample)
            numbers[node] = values.intern((node.target, repr(frozen)), value)
        elif node.op == "output":
            flat = [Ref(numbers[one]) if isinstance(one, Node) else one for one in node.args[0]]
    leaves, nesting = flat, exported.call_spec.out_spec
    count = len(tape.ids)
    ids = [one.number for one in leaves[len(leaves) - count:]]
    own = nesting.child(0) if hasattr(nesting, "child") else nesting.children_specs[0]
    return Path(tuple(zip(ids, tape.choices, strict=True)), tuple(leaves[:len(leaves) - count]), own,
                tuple(tape.names), tuple(int(one.shape[0]) for one in tape.ids))


def _frozen(value: Any) -> Any:
    """Lists as tuples and slices as they are: what can be compared."""
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(one) for one in value)
    return value


def _sample(value: Any) -> Sample | None:
    if not isinstance(value, Tensor):
        return None
    return Sample(tuple(value.shape), tuple(value.stride()), value.dtype, value.device)


# ---- what makes a region impure


def _check_signature(exported: Any) -> None:
    for spec in exported.graph_signature.output_specs:
        if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION):
            what = "an input" if spec.kind == OutputKind.USER_INPUT_MUTATION else "a buffer"
            writer = next((node for node in exported.graph.nodes if node.name == spec.arg.name), None)
            raise _impure(f"{what} is written: {spec.target}", writer)


def _check_pure(node: Node) -> None:
    target = node.target
    if node.op != "call_function" or target is operator.getitem or str(target) in CHECKED:
        return
    if not isinstance(target, OPERATOR):
        raise _impure(f"{target} has a graph of its own, which is not looked into", node)
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise _impure(f"{target} draws random numbers", node)
    written = _written(node)
    if written is not None:
        raise _impure(f"{target} writes to an input, a parameter or a buffer: {written}", node)
    if not getattr(target, SCHEMA).returns:
        raise _impure(f"{target} asserts, or does what no value tells", node)


def _writes(node: Node) -> bool:
    """Whether an operator writes to an operand."""
    return isinstance(node.target, OPERATOR) and any(
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in getattr(node.target, SCHEMA).arguments)


def _written(node: Node) -> str | None:
    """The parameter, buffer or input that an operator writes to, directly."""
    for argument, given in zip(getattr(node.target, SCHEMA).arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, Node) \
                and given.op == "placeholder":
            return given.name
    return None


def _impure(why: str, node: Node | None) -> ImpureRegion:
    trace = [] if node is None else str(node.meta.get("stack_trace") or "").strip().splitlines()
    where = next((line.strip() for line in reversed(trace) if line.strip().startswith("File ")), "")
    return ImpureRegion("a region cannot run ahead of its decisions: it is not pure", where=where, why=why,
                        do="take the operator out of the branch, or leave the speculation of this model off")


Attributes = dict[tuple[str, str], Any]


def _attributes(model: nn.Module) -> Attributes:
    """What modules hold besides tensors and modules, as far as it can be compared."""
    plain = (int, float, str, bool, type(None))
    return {(path, name): value if isinstance(value, plain) else (id(value), _length(value))
            for path, module in model.named_modules() for name, value in vars(module).items()
            if not name.startswith("_")}


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, (list, dict, set)) else None


def _check_attributes(before: Attributes, after: Attributes) -> None:
    for (path, name), value in after.items():
        if before.get((path, name), value) != value or (path, name) not in before:
            raise _impure(f"the attribute {'.'.join(part for part in (path, name) if part)} is set while it runs", None)


Compile = Callable[..., Any]


def compiled(module: GraphModule, inputs: tuple[Tensor, ...], compile: Compile | None) -> Callable[..., Any]:
    """The program as it is, or by a compiler that takes ExportedPrograms, such as anyshape.compile."""
    if compile is None:
        return module
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile(torch.export.export(module, inputs, strict=False))  # type: ignore[no-any-return]
