"""From a StableHLO module to a Graph of our IR.

    %2 = stablehlo.add %0, %1 : tensor<?x4xf32>  -->  add(v0, v1)

Sizes come as small tensors of whole numbers (get_dimension_size and what is computed of it), which are folded as
formulas (fold.py). What a module asserts about its sizes is read first, and holds in all else. Functions are inlined.
"""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anyshape.backend.interface import Target
from anyshape.base.errors import AnyShapeError, InputError, Unsupported, VerifyError
from anyshape.frontend.aten.table import Decline, Mismatch, Translator
from anyshape.frontend.importer.fx_to_graph import TABLES as ATEN
from anyshape.frontend.importer.untraced_extern import extern_call
from anyshape.frontend.importer_stablehlo import (
    contract,
    control,
    elementwise,
    fold,
    gather,
    reduce,
    shapes,
    size_dialects,
)
from anyshape.frontend.importer_stablehlo.fold import FOLDS, made
from anyshape.frontend.importer_stablehlo.module import Block, Module, Operation, Type
from anyshape.frontend.importer_stablehlo.table import COMPLEX, ROWS, Call, Equal, held
from anyshape.frontend.symbols.known import Comparison, Known, Unknown
from anyshape.frontend.symbols.named_sizes import NamedSizes
from anyshape.frontend.symbols.node_metadata import check_bound
from anyshape.frontend.symbols.numpy_arrays import to_tensor
from anyshape.ir.build import Builder
from anyshape.ir.graph import Graph, Value
from anyshape.ir.types import SizeType, TensorType
from anyshape.ops import table as ops
from anyshape.sym.expr import Expr, Size, coefficient_of, floordiv, mod, substitute, symbol, symbols_of
from anyshape.sym.facts import Facts
from anyshape.sym.prover import prove_nonnegative

# importing these fills the tables of rows and of translations
TABLES = (ops, *ATEN, contract, control, elementwise, fold, gather, reduce, shapes, size_dialects)

MOST_CALLS = 64  # functions that are open at once
MOST_EQUAL = 256


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of the module. label: for messages. type: in the module. sizes: with symbols; None where it is a
    number that sizes are made of, whose symbol is `name`."""

    label: str
    type: Type
    sizes: tuple[Size, ...] | None
    name: str = ""


@dataclass(slots=True)
class Imported:
    """A graph and what it does not say.

    arguments: of the module. results: their types in the module. constants: for the graph's last inputs. asserted: what
    must hold in a call: (size that is at least 0, in words). externs: (operator, reason, place).
    """

    graph: Graph
    arguments: tuple[Argument, ...]
    results: tuple[Type, ...]
    constants: list[torch.Tensor]
    asserted: tuple[tuple[Size, str], ...]
    externs: list[tuple[str, str, str]]


class ComplexTranslator(Translator):
    """A translator that puts complex numbers in order before their shape changes, which kernels do for other dtypes."""

    def reshape(self, x: Value, shape: Sequence[Size]) -> Value:
        """As of `Translator`."""
        if x.tensor.dtype in COMPLEX and x.tensor.shape != tuple(shape):
            node = next((node for node in reversed(self.builder.nodes) if x in node.outputs), None)
            if node is not None and node.op != "extern":
                x = extern_call(self.builder, "aten._reshape_copy.default", (x, list(x.tensor.shape)), {},
                                x.tensor.dense(), lambda one: one)
        return super().reshape(x, shape)


class Walk:
    """One pass over a module's main function.

    Args:
        arguments: of main. facts: of the symbols. probing: only what is known is looked at, for what is asserted.
    """

    def __init__(self, module: Module, arguments: Sequence[Argument], target: Target, facts: Facts,
                 probing: bool = False) -> None:
        self.module = module
        self.facts = facts
        self.builder = Builder("main", facts)
        self.t: Translator = ComplexTranslator(self.builder, NamedSizes(facts), target)
        self.arguments = arguments
        self.probing = probing
        self.asserted: list[Comparison] = []
        self.needed: list[Comparison] = []
        self.constants: list[torch.Tensor] = []
        self.externs: list[tuple[str, str, str]] = []
        self.kept: dict[int, tuple[np.ndarray, Value]] = {}
        self.depth = 0

    def main(self) -> tuple[Any, ...]:
        """What main gives.

        Raises:
            Equal: two sizes turned out to be one. Unsupported: an operation is not carried.
        """
        values: list[Any] = []
        for one in self.arguments:
            if one.sizes is None:
                self.builder.input(one.name, SizeType())
                array = np.empty((), object)
                array[()] = symbol(one.name)
                values.append(made(array, one.type.dtype))
            else:
                values.append(self.builder.input(clean(one.label), TensorType(held(one.type.dtype), one.sizes)))
        return self.run(self.module.functions["main"].body, values)

    def run(self, block: Block, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """What a block gives for its arguments. Blocks see what stands around them."""
        outer = getattr(self, "scope", {})
        self.scope: dict[str, Any] = {**outer, **dict(zip(block.arguments, arguments, strict=True))}
        try:
            for operation in block.operations:
                inputs = [self.scope[name] for name in operation.inputs]
                for name, value in zip(operation.outputs, self._results(operation, inputs), strict=True):
                    self.scope[name] = value
            return tuple(self.scope[name] for name in block.results)
        finally:
            self.scope = outer

    def _results(self, operation: Operation, inputs: list[Any]) -> Sequence[Any]:
        if self.probing:
            return self._probed(operation, inputs)
        if operation.name == "func.call":
            return self._called(operation, inputs)
        self.builder.where = operation.where or operation.name
        try:
            found = self._one(Call(operation, inputs, self))
        except Mismatch as sizes:
            raise Equal(sizes.a, sizes.b) from sizes
        except (Decline, VerifyError, Unknown) as reason:
            why = reason.what if isinstance(reason, AnyShapeError) else str(reason)
            raise Unsupported(f"{operation} is not carried", where=f"anyshape.compile_stablehlo: {operation}",
                              why=why or "there is no translation of this case",
                              do="run this part where it comes from") from reason
        return found if isinstance(found, (tuple, list)) else (found,)

    def _one(self, c: Call) -> Any:
        rule = FOLDS.get(c.operation.name)
        if rule is not None:
            try:
                found = rule(c)
            except Unknown:
                found = None
            if found is not None:
                return found
        row = ROWS.get(c.operation.name)
        if row is None:
            raise Decline("no such operation is known")
        return row(c)

    def _probed(self, operation: Operation, inputs: list[Any]) -> Sequence[Any]:
        """Of a walk that looks for what is asserted: what can be folded; None for all else."""
        nothing = (None,) * len(operation.outputs)
        sized = operation.name == "stablehlo.get_dimension_size"
        if any(one is None for one in inputs) or not (sized or all(isinstance(one, Known) for one in inputs)):
            return nothing
        if operation.name == "stablehlo.custom_call":
            found = control.asserted(inputs[0]) if inputs else None
            if found is not None and operation.attributes.get("call_target_name") == "shape_assertion":
                self.asserted.append(found)
            return nothing
        try:
            if operation.name == "func.call":
                return self._called(operation, inputs)
            rule = FOLDS.get(operation.name)
            result = None if rule is None else rule(Call(operation, inputs, self))
        except (Decline, Unknown, VerifyError, Equal, Mismatch):
            return nothing
        if result is None:
            return nothing
        return result if isinstance(result, tuple) else (result,)

    def _called(self, operation: Operation, inputs: list[Any]) -> Sequence[Any]:
        name = operation.attributes["callee"]
        known = self._divided(name, inputs)
        return self.call(name, inputs) if known is None else (known,)

    def body(self, name: str) -> Block:
        """See `Host`."""
        function = self.module.functions.get(name)
        if function is None:
            raise InputError(f"there is no function {name}", where="the module", why="a call names it",
                             do="check where the module comes from")
        return function.body

    def call(self, name: str, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """See `Host`."""
        self.depth += 1
        if self.depth > MOST_CALLS:
            raise InputError("functions call each other without end", where=name, why=f"{MOST_CALLS} were open",
                             do="check where the module comes from")
        outer, self.scope = self.scope, {}
        try:
            return self.run(self.body(name), arguments)
        finally:
            self.scope = outer
            self.depth -= 1

    def _divided(self, name: str, inputs: list[Any]) -> Any:
        """JAX's functions for // and % of sizes, of two operands of which the second is above 0, or a
        number below it, by which JAX divides where it finds the size that -1 stands for."""
        found = re.fullmatch(r"(floor_divide|remainder)(_\d+)?", name)
        if found is None or len(inputs) < 2 or not all(isinstance(one, Known) and one.shape == ()
                                                       for one in inputs[-2:]):
            return None
        a, b = (one.items()[0] for one in inputs[-2:])
        if not all(isinstance(one, (int, Expr)) for one in (a, b)) or not any(isinstance(one, Expr) for one in (a, b)):
            return None
        below = isinstance(b, int) and b < 0
        if not below and not prove_nonnegative(self.facts, b - 1):
            return None
        array = np.empty((), object)
        rest = a - b * floordiv(a, b) if below else mod(a, b)
        array[()] = floordiv(a, b) if found[1] == "floor_divide" else rest
        return made(array, inputs[-1].dtype)

    def constant(self, array: np.ndarray, dtype: str) -> Value:
        """See `Host`."""
        found = self.kept.get(id(array))
        if found is None:
            value = self.builder.input("constant", TensorType(dtype, array.shape))
            self.constants.append(to_tensor(array))
            found = self.kept[id(array)] = (array, value)
        return found[1]

    def must(self, a: Size, b: Size) -> None:
        """See `Host`."""
        if isinstance(a, int) and isinstance(b, int):
            raise Decline(f"{a} and {b} elements")
        self.needed.append(Comparison("EQ", a, b))

    def note(self, target: str, why: str) -> None:
        """See `Host`."""
        self.externs.append((target, why, self.builder.where))

    def finish(self, results: Sequence[Any], types: Sequence[Type]) -> Graph:
        """The graph, whose results lie dense."""
        values = []
        for result, kind in zip(results, types, strict=True):
            operation = Operation("stablehlo.return", (), (), (kind,), (kind,))
            values.append(Call(operation, [result], self).value(0))
        graph = self.builder.finish(tuple(values))
        check_bound(graph)
        return graph


def clean(name: str) -> str:
    """The name as an identifier."""
    text = re.sub(r"\W", "_", name).strip("_") or "argument"
    return text if text[:1].isalpha() else f"_{text}"


# ---- facts


def _in_words(one: Comparison) -> str:
    signs = {"EQ": "==", "NE": "!=", "LT": "<", "LE": "<=", "GT": ">", "GE": ">="}
    return f"{one.a} {signs[one.way]} {one.b}"


def nonnegative(one: Comparison) -> list[Size]:
    """Sizes that are all at least 0 where the comparison holds; none for one that is no such thing."""
    a, b = one.a, one.b
    return {"GE": [a - b], "GT": [a - b - 1], "LE": [b - a], "LT": [b - a - 1], "EQ": [a - b, b - a]}.get(one.way, [])


def facts_of(known: Sequence[Size], names: Sequence[str]) -> Facts:
    """Facts from sizes that are at least 0, and from what sizes are."""
    ranges: dict[str, tuple[int, int | None]] = {name: (0, None) for name in names}
    rest = []
    for size in known:
        name = next(iter(symbols_of(size)), "") if isinstance(size, Expr) and len(symbols_of(size)) == 1 else ""
        parts = coefficient_of(size, name) if name else None
        if parts is not None and parts[0] in (1, -1) and isinstance(parts[1], int):
            low, high = ranges.get(name, (0, None))
            if parts[0] == 1:
                low = max(low, -parts[1])
            else:
                high = parts[1] if high is None else min(high, parts[1])
            ranges[name] = (low, high)
        elif not isinstance(size, int):
            rest.append(size)
    return Facts(ranges=tuple((name, *pair) for name, pair in sorted(ranges.items())), known=tuple(rest))


def solved(a: Size, b: Size) -> tuple[str, Size] | None:
    """A symbol, and the size that it is where a == b."""
    difference = a - b
    for name in sorted(symbols_of(difference), key=lambda one: (not one.startswith("s_"), one)):
        parts = coefficient_of(difference, name)
        if parts is not None and parts[0] in (1, -1) and name not in symbols_of(parts[1]):
            return name, (-parts[1] if parts[0] == 1 else parts[1])
    return None


def _settled(size: Any, equal: Mapping[str, Size]) -> Any:
    for _ in range(16):
        if isinstance(size, int) or not symbols_of(size) & equal.keys():
            return size
        size = substitute(size, dict(equal))
    return size


# ---- the module


def _names(module: Module) -> dict[tuple[int, int], str]:
    """(argument, dim) -> the name that JAX gave to a size: main hands sizes on to a function that says their names."""
    main = module.functions["main"].body
    places = {name: place for place, name in enumerate(main.arguments)}
    sources: dict[str, tuple[int, int]] = {}
    found: dict[tuple[int, int], str] = {}
    for operation in main.operations:
        if operation.name == "stablehlo.get_dimension_size" and operation.inputs[0] in places:
            sources[operation.outputs[0]] = (places[operation.inputs[0]], operation.attributes["dimension"])
        elif operation.name in ("stablehlo.convert", "stablehlo.reshape") and operation.inputs[0] in sources:
            sources[operation.outputs[0]] = sources[operation.inputs[0]]
        elif operation.name == "func.call":
            callee = module.functions.get(operation.attributes["callee"])
            for name, label in zip(operation.inputs, callee.names if callee else (), strict=False):
                if label and name in sources:
                    found[sources[name]] = clean(label)
    return found


def _arguments(module: Module, as_sizes: bool) -> list[Argument]:
    main = module.functions["main"]
    named = _names(module)
    arguments = []
    for place, kind in enumerate(main.body.types):
        label = (main.labels[place] if main.labels else "") or main.names[place] or f"argument {place}"
        if kind.dtype == "token":
            raise Unsupported("the module takes a token", where=label, why="it has effects", do="export it without")
        if as_sizes and kind.shape == () and kind.dtype in ("i32", "i64"):
            name = clean(main.names[place]) if main.names[place] else f"n_{place}"
            arguments.append(Argument(label, kind, None, name))
            continue
        sizes: list[Size] = [symbol(named.get((place, d), f"s_{place}_{d}")) if n is None else n
                             for d, n in enumerate(kind.shape)]
        arguments.append(Argument(label, kind, tuple(sizes)))
    return arguments


def _symbols(arguments: Sequence[Argument]) -> list[str]:
    found: dict[str, None] = {}
    for one in arguments:
        if one.sizes is None:
            found[one.name] = None
        else:
            for size in one.sizes:
                found.update(dict.fromkeys(sorted(symbols_of(size))))
    return list(found)


def imported(module: Module, target: Target) -> Imported:
    """The graph of a module, with sizes that have to be equal written as one.

    Raises:
        Unsupported: an operation is not carried. InputError: the module is wrong.
    """
    try:
        return _imported(module, target, as_sizes=False)
    except Unsupported:
        main = module.functions["main"].body
        if not any(kind.shape == () and kind.dtype in ("i32", "i64") for kind in main.types):
            raise
        return _imported(module, target, as_sizes=True)  # older exports hand sizes in as numbers


def _imported(module: Module, target: Target, as_sizes: bool) -> Imported:
    arguments = _arguments(module, as_sizes)
    probe = Walk(module, arguments, target, facts_of([], _symbols(arguments)), probing=True)
    probe.main()
    equal: dict[str, Size] = {}
    for one in probe.asserted:
        found = solved(_settled(one.a, equal), _settled(one.b, equal)) if one.way == "EQ" else None
        if found is not None:
            _add(equal, *found)
    for _ in range(MOST_EQUAL):
        settled = [Argument(one.label, one.type, None if one.sizes is None else tuple(
            _settled(n, equal) for n in one.sizes), one.name) for one in arguments]
        known = [size for one in probe.asserted for size in nonnegative(Comparison(
            one.way, _settled(one.a, equal), _settled(one.b, equal)))]
        walk = Walk(module, settled, target, facts_of(known, _symbols(settled)))
        try:
            results = walk.main()
        except Equal as sizes:
            found = solved(_settled(sizes.a, equal), _settled(sizes.b, equal))
            if found is None:
                raise Unsupported(f"the sizes {sizes.a} and {sizes.b} have to be equal", why="nothing shows it",
                                  where="anyshape.compile_stablehlo", do="say it when exporting") from sizes
            _add(equal, *found)
            continue
        types = result_types(module)
        graph = walk.finish(results, types)
        must = [(size, _in_words(one)) for one in (*probe.asserted, *walk.needed) for size in nonnegative(one)]
        must += [(size, f"{name} == {value}") for name, value in equal.items()
                 for size in (symbol(name) - value, value - symbol(name))]
        return Imported(graph, tuple(arguments), types, walk.constants, tuple(must), walk.externs)
    raise Unsupported("too many sizes have to be equal", where="anyshape.compile_stablehlo",
                      why=f"{MOST_EQUAL} were found", do="name the sizes when exporting")


def _add(equal: dict[str, Size], name: str, size: Size) -> None:
    for key, value in equal.items():
        equal[key] = substitute(value, {name: size}) if isinstance(value, Expr) else value
    equal[name] = size


def result_types(module: Module) -> tuple[Type, ...]:
    """Of the main function."""
    body = module.functions["main"].body
    made_by = {name: kind for operation in body.operations
               for name, kind in zip(operation.outputs, operation.gives, strict=True)}
    given = dict(zip(body.arguments, body.types, strict=True))
    return tuple(made_by[name] if name in made_by else given[name] for name in body.results)
