"""Stages of an ONNX model: a compiled program, perhaps a step of the host behind it, and the stage that follows.

A stage is compiled for what its inputs are: dtypes and ranks, never sizes. Where a model takes a size or an axis from
the elements of a small tensor, those elements are symbols of the program; where it needs them as numbers, there is a
program for each value that comes. Sizes that meet in one dim are taken to be equal; a call in which one of them is 1
gets a program in which that dim is 1.
"""
from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from anyshape.backend.targets import target_of
from anyshape.base.errors import InputError, Unsupported
from anyshape.compiler.driver import compile_pair
from anyshape.frontend import importer_onnx_ml
from anyshape.frontend.importer.graph_inputs import Notes
from anyshape.frontend.importer_onnx.model import OnnxGraph, OnnxNode, OnnxValue, captured, clean
from anyshape.frontend.importer_onnx.reader import Reader
from anyshape.frontend.importer_onnx.table import (
    Condition,
    NeedsDecision,
    NeedsFixed,
    NeedsNumber,
    NeedsSize,
    Opaque,
)
from anyshape.frontend.importer_onnx.walk import Cut, Entry, Imported, imported, symbols
from anyshape.frontend.onnx_program import host
from anyshape.frontend.onnx_program.known_types import Kinds, captured_types, carried
from anyshape.frontend.programs.compile_program import NativeProgram
from anyshape.frontend.programs.session import Compilation
from anyshape.frontend.symbols.known import Known, holds, known
from anyshape.frontend.symbols.numpy_arrays import to_tensor
from anyshape.ir.types import TensorType
from anyshape.sym.expr import Size, evaluate, symbol, symbols_of
from anyshape.sym.facts import Facts
from anyshape.torch_compat.dtypes import DTYPE_NAMES

TABLES = (importer_onnx_ml,)  # importing it fills the table of translations

MOST_ELEMENTS = 64  # of a tensor whose elements are symbols
MOST_VARIANTS = 256
Values = dict[str, Any]


@dataclass(slots=True)
class Variant:
    """A stage compiled for one kind of inputs. program: None where it computes nothing. binds: what each entry binds:
    (name, dim or place, symbol). kinds: types of inputs."""

    made: Imported
    program: Any
    binds: tuple[tuple[str, int, Size], ...]
    sizes: tuple[tuple[str, int], ...]
    fixed: Values
    kinds: Mapping[str, TensorType]
    rest: Stage | None = None


@dataclass(slots=True)
class Shared:
    """What the stages of a model share. constants: of the model, those that calls do not bring."""

    reader: Reader
    compilation: Compilation
    name: str
    constants: Mapping[str, np.ndarray]
    declared: Mapping[str, OnnxValue] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)
    bodies: dict[Any, Any] = field(default_factory=dict)


class Stage:
    """Nodes of a model from one point on.

    Args:
        takes: names of values that are there. nodes, outputs, constants: of the model from here on.
        sizes, numbers: inputs whose elements are symbols, or numbers.
        kinds, equal: of inputs, and of symbols, by the stage before.
    """

    def __init__(self, shared: Shared, takes: Sequence[str], nodes: Sequence[OnnxNode], outputs: Sequence[str],
                 constants: Mapping[str, np.ndarray], kinds: Kinds = MappingProxyType({})) -> None:
        self.shared = shared
        self.takes = tuple(takes)
        self.nodes = tuple(nodes)
        self.outputs = tuple(outputs)
        self.constants = dict(constants)
        self.sizes: list[str] = []
        self.numbers: list[str] = []
        self.fixed: list[str] = []
        self.conditions: list[Condition] = []
        self.places: dict[str, tuple[str, int]] = {}  # where a symbol is read from
        self.kinds = kinds
        self.equal: dict[str, Size] = {}
        self.variants: dict[Any, Variant] = {}
        self.ones: dict[Any, list[frozenset[str]]] = {}

    def run(self, values: Values) -> Values:
        """The outputs by name.

        Raises:
            InputError: sizes, dtypes or ranks do not fit the model. Unsupported: an operator that is not there.
        """
        stage: Stage | None = self
        while stage is not None:
            values, stage = stage._run(values)
        return values

    def _run(self, values: Values) -> tuple[Values, Stage | None]:
        variant, outputs = self._call(values)
        made = variant.made
        found: Values = dict(zip(made.gives, outputs, strict=True))
        found.update({name: value.clone() if isinstance(value, torch.Tensor) else value  # the caller may write into it
                      for name, value in variant.fixed.items()})
        found.update({name: values[source] for name, source in made.renames.items()})
        cut = made.cut
        if cut is None:
            return {name: values[name] if name not in found and name in values else found[name]
                    for name in self.outputs}, None
        for name in self.takes:
            found.setdefault(name, values[name])
        if cut.host:
            bodies = host.Bodies(self.shared, self._body, self._carried(variant))
            for node, why in cut.host:
                found.update(host.run(node, found, bodies, why))
        if not cut.nodes:
            return {name: found[name] for name in self.outputs}, None
        if variant.rest is None:
            with self.shared.lock:
                if variant.rest is None:
                    variant.rest = self._rest(variant, cut, list(found))
        return found, variant.rest

    def _carried(self, variant: Variant) -> Kinds:
        """What is known of values behind a variant of this stage."""
        bound = frozenset(one for _, _, size in variant.binds if not isinstance(size, int)
                          for one in symbols_of(size) if size == symbol(one))
        return carried(variant.made, {**self.kinds, **variant.kinds}, bound)

    def _rest(self, variant: Variant, cut: Cut, found: Sequence[str]) -> Stage:
        """The stage behind a variant, which takes over what is known there."""
        made = variant.made
        rest = Stage(self.shared, [name for name in found if name not in made.left],
                     cut.nodes, self.outputs, {**self.constants, **made.left}, self._carried(variant))
        rest.equal = dict(made.equalities)
        rest.sizes, rest.numbers = list(self.sizes), list(self.numbers)
        for need in cut.wants:
            names = rest.numbers if isinstance(need, NeedsNumber) else rest.sizes
            if need.name not in names:
                names.append(need.name)
        return rest

    def _body(self, graph: OnnxGraph, kinds: Kinds) -> Stage:
        """The stage of a graph inside of a node."""
        names = [one.name for one in graph.inputs]
        around = self.shared.constants  # the same for every call, as what is captured may not be
        free = [name for name in captured(graph) if name not in names]
        constants = {name: around[name] for name in free if name in around}
        return Stage(self.shared, [*names, *(name for name in free if name not in constants)], graph.nodes,
                     [one.name for one in graph.outputs], {**constants, **graph.constants},
                     captured_types(kinds, free))

    # ---- variants

    def _key(self, values: Values) -> tuple[Any, ...]:
        key: list[Any] = []
        for name in self.takes:
            value = values[name]
            if not isinstance(value, torch.Tensor):
                key.append(type(value).__name__)
                continue
            kind: tuple[Any, ...] = (value.dtype, value.dim())
            if name in self.numbers:
                kind = (*kind, tuple(value.shape), bytes(value.contiguous().view(-1).view(torch.uint8).numpy())
                        if value.numel() else b"")
            elif name in self.sizes:
                kind = (*kind, tuple(value.shape), tuple(n if n <= 1 else "n" for n in value.view(-1).tolist()))
            key.append(kind)
        key += [self._read(name, values) for name in self.fixed]
        key += [self._holds(condition, values) for condition in self.conditions]
        return tuple(key)

    def _holds(self, condition: Condition, values: Values) -> bool:
        """Whether a comparison of sizes holds in a call."""
        names = {one for size in (condition.a, condition.b) for one in symbols_of(size)}
        numbers = {one: self._read(one, values) for one in names}
        return holds(condition.name, evaluate(condition.a, numbers), evaluate(condition.b, numbers))

    def _read(self, symbol_name: str, values: Values) -> int:
        """The number that a symbol is in a call."""
        name, place = self.places[symbol_name]
        value = values[name]
        return value.shape[place] if place >= 0 else int(value.view(-1)[-1 - place])

    def _call(self, values: Values) -> tuple[Variant, list[Any]]:
        """The variant that fits, and its results."""
        key = self._key(values)
        tried: InputError | None = None
        for ones in [frozenset[str](), *self.ones.get(key, ())]:
            variant, key = self._variant(key, ones, values)
            try:
                return variant, self._execute(variant, values)
            except InputError as error:
                tried = tried or error
        assert tried is not None
        base, key = self._variant(key, frozenset(), values)
        broken = [one for size in base.made.presumed if (one := Condition("ge", size, 0)) not in self.conditions
                  and not self._holds(one, values)]
        if broken:
            with self.shared.lock:
                self._decide(broken)
            return self._call(values)
        ones = self._differing(base, values)
        if not ones or ones in self.ones.get(key, ()):
            names = sorted(self._of_formulas_of_one(base, values) - set(self.fixed))
            if not names:
                raise tried
            with self.shared.lock:
                self.fixed += [name for name in names if name not in self.fixed]
            return self._call(values)
        variant, key = self._variant(key, ones, values)
        outputs = self._execute(variant, values)
        self.ones.setdefault(key, []).append(ones)
        return variant, outputs

    def _decide(self, broken: Sequence[Condition]) -> None:
        """Makes comparisons a part of the key; what was compiled as if they held is kept for calls in which they do."""
        broken = [one for one in broken if one not in self.conditions]
        self.conditions += broken
        added = (True,) * len(broken)
        for (key, ones), variant in list(self.variants.items()):
            if {one.a for one in broken} <= {*variant.made.presumed}:
                self.variants[(*key, *added), ones] = self.variants.pop((key, ones))
                if key in self.ones:
                    self.ones[(*key, *added)] = list(self.ones[key])

    def _differing(self, variant: Variant, values: Values) -> frozenset[str]:
        """Symbols of dims that are 1 in this call, where the variant takes them to be equal to others that are not."""
        bound: dict[str, int] = {}
        for name, place, size in variant.binds:
            value = values[name]
            number = value.shape[place] if place >= 0 else int(value.view(-1)[-1 - place])
            for one in symbols_of(size):
                if size == symbol(one):
                    bound.setdefault(one, number)
        found = set()
        for name, size in variant.made.equalities:
            try:
                if name in bound and evaluate(size, bound) != bound[name]:
                    found |= {one for one in (name, *symbols_of(size)) if bound.get(one) == 1}
            except KeyError:
                continue
        return frozenset(found)

    def _of_formulas_of_one(self, variant: Variant, values: Values) -> set[str]:
        """Symbols of formulas that are 1 in this call, where the variant takes them to be equal to others that are not:
        a program for their numbers knows the 1."""
        found: set[str] = set()
        for name, size in variant.made.equalities:
            names = symbols_of(size) if not isinstance(size, int) else frozenset()
            if names and {name, *names} <= self.places.keys():
                numbers = {one: self._read(one, values) for one in names}
                if evaluate(size, numbers) == 1 != self._read(name, values):
                    found |= names
        return found

    def _execute(self, variant: Variant, values: Values) -> list[Any]:
        if variant.program is None:
            return []
        sizes = iter(variant.sizes)
        arguments: list[Any] = []
        for name in variant.made.takes:
            if name:
                arguments.append(values[name].contiguous())
            else:
                source, place = next(sizes)
                arguments.append(int(values[source].view(-1)[place]))
        return variant.program(arguments)  # type: ignore[no-any-return]

    def _variant(self, key: Any, ones: frozenset[str], values: Values) -> tuple[Variant, Any]:
        found = self.variants.get((key, ones))
        if found is not None:
            return found, key
        with self.shared.lock:
            for _ in range(64 + len(self.takes)):
                found = self.variants.get((key, ones))
                if found is not None:
                    return found, key
                if len(self.variants) >= MOST_VARIANTS:
                    self.variants.pop(next(iter(self.variants)))
                try:
                    found = self.variants[key, ones] = self._compiled(ones, {
                        name: _kind(value) for name, value in values.items()}, values)
                    return found, key
                except NeedsSize as need:
                    self._wants(need, values)
                except NeedsFixed as need:
                    self.fixed += [name for name in need.names if name not in self.fixed]
                except NeedsDecision as need:
                    self.conditions.append(need.condition)
                key = self._key(values)
        raise Unsupported(f"{self.shared.name} cannot be compiled", where="anyshape.compile_onnx",
                          why="its inputs' elements are needed again and again", do="report this model")

    def _wants(self, need: NeedsSize, values: Values) -> None:
        value = values.get(need.name)
        if value is None:
            raise need
        small = isinstance(value, torch.Tensor) and not value.is_floating_point() and value.numel() <= MOST_ELEMENTS
        if need.name in self.sizes or isinstance(need, NeedsNumber) or not small:
            if need.name in self.sizes:
                self.sizes.remove(need.name)
            if need.name not in self.numbers:
                self.numbers.append(need.name)
        else:
            self.sizes.append(need.name)

    def prepare(self) -> Variant | None:
        """Compiles the stage by its declared types; None where they do not say enough."""
        kinds: dict[str, Any] = {}
        for name in self.takes:
            declared = self.shared.declared.get(name)
            if declared is None or declared.shape is None or declared.dtype not in DTYPE_NAMES.values():
                return None
            kinds[name] = declared.dtype, len(declared.shape)
        try:
            return self._compiled(frozenset(), kinds, {})
        except NeedsSize as need:
            (self.numbers if isinstance(need, NeedsNumber) else self.sizes).append(need.name)
        except NeedsFixed as need:
            self.fixed += need.names
        except NeedsDecision as need:
            self.conditions.append(need.condition)
        return None

    def keep(self, variant: Variant, values: Values) -> None:
        """Takes over what `prepare` made, under the key of these inputs."""
        self.variants.setdefault((self._key(values), frozenset()), variant)

    # ---- compilation

    def _compiled(self, ones: frozenset[str], kinds: Mapping[str, Any], values: Values) -> Variant:
        shared = self.shared
        places: dict[str, str] = {}
        entries: list[Entry] = []
        binds: list[tuple[str, int, Size]] = []
        sizes: list[tuple[str, int]] = []
        low: dict[str, int] = {}
        for name in self.takes:
            entry = self._entry(name, kinds[name], values, places, sizes, low, binds)
            entries.append(entry)
            if isinstance(entry.kind, TensorType):
                binds += [(name, dim, size) for dim, size in enumerate(entry.kind.shape)]
        names = sorted({one for entry in entries for one in self._symbols(entry)})
        facts = Facts(ranges=tuple((one, low.get(one, 0), None) for one in names))
        for name, place, size in binds:
            for one in symbols_of(size):
                if size == symbol(one):
                    self.places.setdefault(one, (name, place))
        equal: dict[str, Size] = self.equal | {name: self._read(name, values) for name in self.fixed}
        equal |= dict.fromkeys(ones, 1)
        target = target_of(shared.compilation.config)
        label = clean(shared.name)[:40]
        made = imported(label, shared.reader, target, entries, self.nodes, self.outputs, self.constants, equal, facts,
                        {condition: self._holds(condition, values) for condition in self.conditions})
        program = self._program(made, places) if made.gives else None
        if made.cut is not None:
            shared.compilation.cut(label, made.cut.why)
        return Variant(made, program, tuple(binds), tuple(sizes),
                       {**made.fixed, **{name: _tensor(array) for name, array in made.left.items()}},
                       {entry.name: entry.kind for entry in entries if isinstance(entry.kind, TensorType)})

    def _program(self, made: Imported, places: Mapping[str, str]) -> Any:
        compilation = self.shared.compilation
        number = compilation.next_graph(tuple((one, place, one) for one, place in places.items()))
        graph = made.graph.replace(name=f"{number}_{made.graph.name}")
        needed = [size for name, other in made.equalities
                  for size in (symbol(name) - other, other - symbol(name))] + list(made.needs)
        inputs = {value.name for value in graph.inputs} | {
            one for value in graph.inputs if isinstance(value.type, TensorType)
            for size in value.type.shape for one in symbols_of(size)}
        wanted = tuple(size for size in needed if not isinstance(size, int) and symbols_of(size) <= inputs)
        compiled = compile_pair(graph, None, compilation.config, wanted, names=dict(places)).forward
        notes = Notes(constants=made.constants, externs=made.externs)
        program = NativeProgram(f"{number}.inference", compiled, notes)
        compilation.register(program)
        return program

    def _entry(self, name: str, kind: Any, values: Values, places: dict[str, str], sizes: list[tuple[str, int]],
               low: dict[str, int], binds: list[tuple[str, int, Size]]) -> Entry:
        if not isinstance(kind, tuple):
            return Entry(name, None if kind is None else Opaque(name))
        dtype, rank = kind
        if name in self.numbers:
            return Entry(name, known(values[name].numpy() if dtype != "bf16" else values[name].float().numpy(), dtype))
        if name in self.sizes:
            return _symbolic(name, values[name], dtype, places, sizes, low, binds)
        found = self.kinds.get(name)
        if isinstance(found, Known):
            return Entry(name, found)
        if found is not None and (found.dtype, len(found.shape)) == (dtype, rank):
            for dim, size in enumerate(found.shape):
                for one in symbols_of(size):
                    places.setdefault(one, f"dim {dim} of {name}")
            return Entry(name, found)
        declared = self.shared.declared.get(name)
        if declared is None or declared.shape is None or len(declared.shape) != rank:
            declared = OnnxValue(name, dtype, (None,) * rank)
        if declared.dtype and declared.dtype != dtype:
            raise InputError(f"the input {name!r} is {dtype}", where=self.shared.name,
                             why=f"the model takes {declared.dtype}", do="convert it")
        return Entry(name, symbols(OnnxValue(name, dtype, declared.shape), places))

    @staticmethod
    def _symbols(entry: Entry) -> set[str]:
        if isinstance(entry.kind, TensorType):
            return {one for size in entry.kind.shape for one in symbols_of(size)}
        return set(entry.sizes)


def _symbolic(name: str, value: torch.Tensor, dtype: str, places: dict[str, str], sizes: list[tuple[str, int]],
              low: dict[str, int], binds: list[tuple[str, int, Size]]) -> Entry:
    """A small tensor of whole numbers: those above 1 are symbols, the others (which may mean more) numbers."""
    items = value.view(-1).tolist()
    array = np.empty(len(items), object)
    made = []
    for place, item in enumerate(items):
        if item <= 1:
            array[place] = int(item)
            continue
        label = f"{clean(name)}_at_{place}"
        places.setdefault(label, f"element {place} of {name}")
        sizes.append((name, place))
        binds.append((name, -1 - place, symbol(label)))
        low[label] = 2
        made.append(label)
        array[place] = symbol(label)
    return Entry(name, known(array.reshape(tuple(value.shape)), dtype), tuple(made))


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return DTYPE_NAMES[value.dtype], value.dim()
    return None if value is None else "opaque"


def _tensor(array: np.ndarray) -> Any:
    """A known value as it is at run time; text and narrow dtypes stay arrays of numpy."""
    try:
        return to_tensor(np.array(array))
    except TypeError:
        return array

