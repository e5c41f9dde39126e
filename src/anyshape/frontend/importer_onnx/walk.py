"""From nodes of an ONNX model to a Graph of our IR, as far as one program goes.

    Add(x: f32[batch, 4], b)  -->  add(x, b)

Tensors that are made of sizes are folded as formulas (known.py). Composed operators without a translation are taken
apart by the body that ONNX gives them. The walk leaves nodes that no program holds (text, lists, a loop, a result whose
size is in the data), or that need numbers which the program computes, and all that reads what they give: these are a
stage of their own, which begins when the program is done, and the host.
"""
from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from anyshape.backend.interface import Target
from anyshape.base.config import Config
from anyshape.base.errors import InputError, Unsupported, VerifyError
from anyshape.frontend.aten.table import Decline, Mismatch, Translator
from anyshape.frontend.importer.fx_to_graph import TABLES as ATEN
from anyshape.frontend.importer_onnx import (
    attention,
    fold,
    index,
    matmul,
    pointwise,
    qdq,
    quantize,
    recurrent,
    reduce,
    shape,
    signal,
    spatial,
)
from anyshape.frontend.importer_onnx.model import OnnxGraph, OnnxNode, OnnxValue, captured, clean, renamed
from anyshape.frontend.importer_onnx.qdq import Deferred, floats, translated
from anyshape.frontend.importer_onnx.reader import Reader
from anyshape.frontend.importer_onnx.table import (
    APART,
    ROWS,
    Call,
    Condition,
    NeedsDecision,
    NeedsFixed,
    NeedsNumber,
    NeedsSize,
    Opaque,
)
from anyshape.frontend.symbols.known import Known, Unknown, known
from anyshape.frontend.symbols.named_sizes import NamedSizes
from anyshape.frontend.symbols.node_metadata import check_bound
from anyshape.frontend.symbols.numpy_arrays import to_tensor
from anyshape.ir.build import Builder
from anyshape.ir.graph import Graph, Value
from anyshape.ir.types import SizeType, TensorType, kind_of
from anyshape.ops import table as ops
from anyshape.passes.dce import dce
from anyshape.sym.expr import Expr, Size, coefficient_of, divide, substitute, symbol, symbols_of
from anyshape.sym.facts import Facts
from anyshape.sym.prover import prove_nonnegative
from anyshape.torch_compat.dtypes import TORCH_DTYPES

# importing these fills the tables of rows and of translations
TABLES = (ops, *ATEN, attention, pointwise, reduce, matmul, shape, index, spatial, quantize, qdq, recurrent, signal)
FOLDS = fold.FOLDS

# operators that are no part of a program: what they do is decided when the call runs
HOST_ONLY = frozenset(("Loop", "Scan"))


MOST_BODIES = 20_000  # that are opened
MOST_NAMES = 500  # parts of a name, which grows with each body inside of another


class Equal(Exception):
    """The walk has to start again with one symbol replaced."""

    def __init__(self, name: str, size: Size) -> None:
        super().__init__(name)
        self.name = name
        self.size = size


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """An input of a walk. kind: a tensor type; a Known, where elements are numbers or symbols; or an Opaque.
    sizes: the symbols that stand for elements of a Known, which the program takes as numbers."""

    name: str
    kind: TensorType | Known | Opaque | None
    sizes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """What a walk left. host: nodes that the host can do when the program is done, with the reason why no program does
    them. wants: values whose elements are then wanted, as sizes or numbers. nodes: all others, in order. why: the first
    reason, in words."""

    host: tuple[tuple[OnnxNode, str], ...]
    wants: tuple[NeedsSize, ...]
    nodes: tuple[OnnxNode, ...]
    why: str


@dataclass(slots=True)
class Imported:
    """A graph and what it does not say.

    takes: names of inputs, in the graph's order, "" for what comes from `sizes`. gives: names of outputs. fixed, left:
    values that are known, None and arrays; renames: those that are an input that no program holds. constants: for the
    graph's last inputs. needs: sizes that must be at least 0; presumed: those of which a call in which they are not
    gets another program. externs, equalities: as in importer/graph_inputs.py.
    nodes: how many it has of the model's. kinds: of what it gives, and the host behind it, the type, or the elements
    where they are formulas.
    """

    graph: Graph
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    fixed: Mapping[str, Any]
    constants: list[torch.Tensor]
    externs: list[tuple[str, str, str]]
    equalities: list[tuple[str, Size]]
    needs: tuple[Size, ...] = ()
    presumed: tuple[Size, ...] = ()
    cut: Cut | None = None
    nodes: int = 0
    left: Mapping[str, np.ndarray] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, TensorType | Known] = field(default_factory=dict)


class Walk:
    """One pass over nodes.

    Args:
        name: of the graph. entries: its inputs. nodes, constants: of the model. outputs: names that are wanted.
        equal: symbol -> size that stands for it. facts: of the symbols. decided: comparisons of sizes, by a call.
    """

    def __init__(self, name: str, reader: Reader, target: Target, entries: Sequence[Entry],
                 nodes: Sequence[OnnxNode], outputs: Sequence[str], constants: Mapping[str, np.ndarray],
                 equal: Mapping[str, Size], facts: Facts,
                 decided: Mapping[Condition, bool] = MappingProxyType({})) -> None:
        self.reader = reader
        self.equal = dict(equal)
        self.builder = Builder(name, facts)
        self.t = Translator(self.builder, NamedSizes(facts), target)
        self.nodes = list(nodes)
        self.outputs = list(outputs)
        self.given = constants
        self.env: dict[str, Any] = {}
        self.takes: list[str] = []
        self.constants: list[torch.Tensor] = []
        self.held: dict[int, tuple[np.ndarray, Value]] = {}
        self.externs: list[tuple[str, str, str]] = []
        self.needs: list[Size] = []
        self.presumed: list[Size] = []
        self.same: dict[Size, Size] = {}
        self.decided = dict(decided)
        self.asked: dict[str, Condition] = {}  # results that are comparisons of sizes
        self.inlined = 0
        # the inputs that a value is made of; and those whose elements may be asked for in its place
        self.roots: dict[str, frozenset[str]] = {entry.name: frozenset((entry.name,)) for entry in entries}
        self.small = {entry.name for entry in entries if isinstance(entry.kind, (TensorType, Known))
                      and not entry.kind.shape and kind_of(entry.kind.dtype) in ("int", "uint", "bool")
                      and (isinstance(entry.kind, TensorType) or entry.kind.symbolic)}
        self.graph_inputs = {entry.name for entry in entries}
        self.promised: dict[str, TensorType] = {}  # what is known of what the host gives
        for entry in entries:
            self._declare(entry)

    def _declare(self, entry: Entry) -> None:
        kind = entry.kind
        if isinstance(kind, TensorType):
            resolved = TensorType(kind.dtype, tuple(self._settled(size) for size in kind.shape))
            self.env[entry.name] = self.builder.input(clean(entry.name), resolved)
            self.takes.append(entry.name)
            return
        for name in entry.sizes:
            self.builder.input(name, SizeType())
            self.takes.append("")
        if isinstance(kind, Known) and kind.symbolic:
            array = kind.array.copy()
            for place in np.ndindex(*array.shape):
                array[place] = self._settled(array[place])
            kind = known(array, kind.dtype)
        self.env[entry.name] = kind

    def _settled(self, size: Any) -> Any:
        for _ in range(16):
            if not isinstance(size, Expr) or not symbols_of(size) & self.equal.keys():
                return size
            size = substitute(size, self.equal)
        return size

    # ---- nodes

    def run(self) -> Imported:
        """The graph up to the end, or to a cut.

        Raises:
            Equal: two sizes turned out to be one. NeedsSize: of an input of the graph. InputError: the model is wrong.
        """
        host: list[tuple[OnnxNode, str]] = []
        wants: list[NeedsSize] = []
        left: list[OnnxNode] = []
        missing: set[str] = set()  # what nodes give that are left
        why = ""
        place = 0
        while place < len(self.nodes):
            node = self.nodes[place]
            self.builder.where = str(node)
            if missing and any(name in missing for name in _used((node,), ())):
                left.append(node)
                missing.update(name for name in node.outputs if name)
                place += 1
                continue
            found = self._deferred(node)
            if found is not None:
                self._set(node, (found,))
                place += 1
                continue
            for name in node.inputs:
                if isinstance(self.env.get(name), Deferred):
                    self._lookup(name, node)
            mark = len(self.builder.nodes), len(self.externs)
            try:
                self._set(node, self._call(node))
                place += 1
                continue
            except _Inline as body:
                self.nodes[place:place + 1] = body.nodes
                self.given = {**self.given, **body.constants}
                continue
            except NeedsSize as need:
                roots = self.roots.get(need.name, frozenset())
                if roots and roots <= self.small:  # as sizes first, and as numbers where these do not do
                    raise (NeedsNumber if isinstance(need, NeedsNumber) else NeedsSize)(min(roots)) from need
                if need.name in self.graph_inputs:
                    raise
                why = why or f"{node} needs the elements of {need.name}"
                wants.append(need)
                left.append(node)
            except _Host as reason:
                why = why or f"{node}: {reason}"
                host.append((node, f"{node}: {reason}"))
                self._promise(node)
            del self.builder.nodes[mark[0]:]
            del self.externs[mark[1]:]
            missing.update(name for name in node.outputs if name)
            place += 1
        cut = Cut(tuple(host), tuple(wants), tuple(left), why) if why else None
        return self._finish(cut, place)

    def _set(self, node: OnnxNode, results: tuple[Any, ...]) -> None:
        roots: frozenset[str] = frozenset().union(*(self.roots.get(name, frozenset()) for name in node.inputs))
        for name, result in zip(node.outputs, results, strict=False):
            if name:
                self.env[name] = result
                self.roots[name] = roots

    def _promise(self, node: OnnxNode) -> None:
        """Notes what is known of the results of a node that the host does."""
        kinds = [TensorType(one.dtype, one.shape) if isinstance(one, Known) else one.tensor
                 for name in node.inputs if isinstance(one := self.env.get(name), (Known, Value))]
        if not node.domain and len(kinds) == len(node.inputs):
            found = index.sized_by_data(node, kinds)
            self.promised.update({name: kind for name, kind in zip(node.outputs, found, strict=False) if name})

    def _lookup(self, name: str, node: Any) -> Any:
        if not name:
            return None
        if isinstance(self.env.get(name), Deferred):
            self.env[name] = floats(self.env[name], self._attempted)
        if name in self.env:
            return self.env[name]
        if name in self.given:
            found = self.env[name] = known(self.given[name])
            return found
        raise InputError(f"the value {name!r} is not there", where=str(node), do="check the model",
                         why="no input, constant or node before it has that name")

    def _deferred(self, node: OnnxNode) -> Any:
        """What a node gives whose floats nobody has asked for (qdq.py); None: the node takes and gives tensors."""
        if node.op != "DequantizeLinear" and not any(isinstance(self.env.get(name), Deferred) for name in node.inputs):
            return None
        mark = len(self.builder.nodes), len(self.externs)
        try:
            inputs = [self.env[name] if isinstance(self.env.get(name), Deferred) else self._lookup(name, node)
                      for name in node.inputs]
            if any(isinstance(one, Opaque) for one in inputs):
                return None
            found = translated(node, inputs, self._attempted, lambda operands: self._moved(node, operands))
        except (Decline, VerifyError, *_WRONG):  # what is wrong is told where the node is read as it stands
            found = None
        if found is None:
            del self.builder.nodes[mark[0]:]
            del self.externs[mark[1]:]
        return found

    def _moved(self, node: OnnxNode, inputs: Sequence[Any]) -> Any:
        """The result of a node with one for these operands."""
        found = self._attempted(self._folded, node, inputs) or self._attempted(self._translated, node, inputs)
        return None if found is None else found[0]

    def _call(self, node: OnnxNode) -> tuple[Any, ...]:
        inputs = [self._lookup(name, node) for name in node.inputs]
        if node.op == "If" and not node.domain:
            self._branch(node, inputs[0])
        if node.op == "Identity" and isinstance(inputs[0], Opaque):
            return (inputs[0],)
        if node.op in HOST_ONLY and not node.domain:
            raise _Host("it is decided when the call runs")
        if any(isinstance(one, Opaque) for one in inputs):
            raise _Host("an operand is text, a list, an optional value, or of a dtype that PyTorch lacks")
        why = "there is no translation of it"
        for attempt in (self._folded, self._translated):
            mark = len(self.builder.nodes), len(self.externs)
            try:
                found = self._attempted(attempt, node, inputs)
                if found is not None:
                    return found
            except (Decline, VerifyError) as reason:
                del self.builder.nodes[mark[0]:]
                del self.externs[mark[1]:]
                why = reason.what if isinstance(reason, VerifyError) else str(reason)
                if isinstance(reason, VerifyError) and reason.why:
                    why += f" ({reason.why})"
            except _WRONG as error:
                raise InputError(f"the node {node} cannot be read", where=str(node), do="check the model",
                                 why=f"{type(error).__name__}: {error}") from error
        self._inline(node, inputs)
        raise _Host(why)

    def _attempted(self, attempt: Callable[[Call], Any], node: OnnxNode, inputs: Sequence[Any]) -> Any:
        """A translation. Sizes that meet in it are one from here on: a symbol is written as the other one everywhere,
        or, where none can be isolated, tensors are cut to the other's length, which a call is checked for."""
        mark = len(self.builder.nodes), len(self.externs)
        for _ in range(16):
            settled = [self._cut(one) for one in inputs]
            try:
                return attempt(Call(node, settled, self.t, self._constant, self._note, self.assume,
                                    self.presume, lambda condition: self.asked.update({node.outputs[0]: condition})))
            except Mismatch as found:
                del self.builder.nodes[mark[0]:]
                del self.externs[mark[1]:]
                self._unify(found, node)
        raise Decline("too many sizes that differ")

    def _cut(self, operand: Any) -> Any:
        if not self.same:
            return operand
        if isinstance(operand, Value) and isinstance(operand.type, TensorType):
            for dim, size in enumerate(operand.tensor.shape):
                operand = self.t.window(operand, dim, 0, self.same.get(size, size))
        elif isinstance(operand, Known) and operand.symbolic:
            array = operand.array.copy()
            for place in np.ndindex(*array.shape):
                item: Any = array[place]
                array[place] = self.same.get(item, item)
            return known(array, operand.dtype)
        return operand

    def assume(self, size: Size) -> None:
        """Takes a size to be at least 0; a call in which it is not is refused before it runs."""
        if isinstance(size, int) or prove_nonnegative(self.builder.facts, size):
            return
        self.needs.append(size)
        facts = dataclasses.replace(self.builder.facts, known=(*self.builder.facts.known, size))
        self.builder.facts = facts
        assert isinstance(self.t.sizes, NamedSizes)
        self.t.sizes.given = facts

    def presume(self, size: Size) -> None:
        """Takes a size to be at least 0, or below, as a call said that another program refused."""
        at_least = self.decided.get(Condition("ge", size, 0), True)
        if at_least and not isinstance(size, int) and not prove_nonnegative(self.builder.facts, size):
            self.presumed.append(size)
        self.assume(size if at_least else -size - 1)

    def _folded(self, c: Call) -> tuple[Any, ...] | None:
        fold = FOLDS.get(c.name) if not c.node.domain else None
        if fold is None:
            return None
        try:
            found = fold(c)
        except Unknown:
            return None
        return found if found is None or isinstance(found, tuple) else (found,)

    def _translated(self, c: Call) -> tuple[Any, ...] | None:
        row = ROWS.get((c.node.domain, c.name))
        if row is None:
            return None
        found = row(c)
        return found if isinstance(found, tuple) else (found,)

    def _branch(self, node: OnnxNode, condition: Any) -> None:
        """Takes an If apart. Where the data decide it there is a program for each branch that is taken.

        Raises:
            _Inline: the branch. NeedsNumber: of the condition.
        """
        if not isinstance(condition, Known):
            asked = self.asked.get(node.inputs[0])
            if asked is None:
                raise NeedsNumber(node.inputs[0])
            if asked not in self.decided:
                raise NeedsDecision(asked)
            condition = known(np.array(self.decided[asked]))
        if condition.symbolic or condition.array.size != 1:
            raise InputError(f"the condition of {node} is no single bool", where=str(node), do="check the model",
                             why=f"its shape is {list(condition.shape)}")
        taken = node.attributes["then_branch" if bool(condition.items()[0]) else "else_branch"]
        assert isinstance(taken, OnnxGraph)
        prefix = self._prefix(node)
        constants = {prefix + name: array for name, array in taken.constants.items()}
        names = {name: prefix + name for name in taken.constants}
        made = {name for one in taken.nodes for name in one.outputs}
        names |= {name: prefix + name for name in made}
        body = renamed(taken.nodes, names, prefix)
        ends = tuple(OnnxNode("Identity", "", 13, (names.get(one.name, one.name),), (name,))
                     for one, name in zip(taken.outputs, node.outputs, strict=False) if name)
        raise _Inline((*body, *ends), constants)

    def _prefix(self, node: OnnxNode) -> str:
        self.inlined += 1
        prefix = f"{node.outputs[0] if node.outputs else node.op}/{self.inlined}/"
        if self.inlined > MOST_BODIES or prefix.count("/") > MOST_NAMES:
            raise InputError("the model's functions do not end", where=str(node)[:200], do="check the model",
                             why=f"{self.inlined} bodies were opened, one in the other")
        return prefix

    def _inline(self, node: OnnxNode, inputs: Sequence[Any]) -> None:
        """Takes a composed operator apart."""
        types = [self._onnx_type(one) for one in inputs]
        rank = None if not types or types[0].shape is None else len(types[0].shape)
        prefix = f"{node.outputs[0] or node.op}/{self.inlined}/"
        split = APART.get((node.domain, node.op))
        parts = split(node, prefix) if split is not None else qdq.apart(node, prefix, rank)
        if parts is not None:
            self._prefix(node)
            raise _Inline(parts, {})
        body = self.reader.body(node, types)
        if body is None:
            self._fix(node, types, inputs)
            return
        prefix = self._prefix(node)
        names: dict[str, str] = {"": ""}
        for place, formal in enumerate(body.inputs):
            names[formal] = node.inputs[place] if place < len(node.inputs) else ""
        ends = []
        for formal, name in zip(body.outputs, node.outputs, strict=False):
            if name and formal in names:  # an output that is an input
                ends.append(OnnxNode("Identity", "", 13, (names[formal],), (name,)))
            elif name:
                names[formal] = name
        raise _Inline((*renamed(body.nodes, names, prefix), *ends), {})

    def _fix(self, node: OnnxNode, types: Sequence[OnnxValue], inputs: Sequence[Any]) -> None:
        """Asks for sizes as numbers, where that gives the operator a body: of channels, or of all dims."""
        for dims in ((1,), range(16)):
            known_dims = [OnnxValue("", one.dtype, None if one.shape is None else tuple(
                8 if n is None and d in dims else n for d, n in enumerate(one.shape))) for one in types]
            symbolic = [size for one in inputs if isinstance(one, Value) and isinstance(one.type, TensorType)
                        for d, size in enumerate(one.tensor.shape) if isinstance(size, Expr) and d in dims]
            if symbolic and self.reader.body(node, known_dims) is not None:
                raise NeedsFixed(symbolic[0])

    def _onnx_type(self, operand: Any) -> OnnxValue:
        if isinstance(operand, Known):
            return OnnxValue("", operand.dtype, operand.shape)
        if isinstance(operand, Value) and isinstance(operand.type, TensorType):
            return OnnxValue("", operand.tensor.dtype, tuple(n if isinstance(n, int) else None
                                                             for n in operand.tensor.shape))
        return OnnxValue("")

    def _constant(self, array: np.ndarray, dtype: str) -> Value:
        found = self.held.get(id(array))
        if found is None:
            value = self.builder.input("constant", TensorType(dtype, array.shape))
            self.constants.append(to_tensor(array))
            found = self.held[id(array)] = (array, value)
        return found[1]

    def _note(self, target: str, why: str) -> None:
        self.externs.append((target, why, self.builder.where))

    def _unify(self, found: Mismatch, node: OnnxNode) -> None:
        for size in (found.a, found.b):  # the last of a dim, x[-1:], is none or one, which is broadcast
            if not isinstance(size, int) and prove_nonnegative(self.builder.facts, 1 - size) \
                    and self.decided.get(Condition("ge", size - 1, 0), True):
                self.presume(size - 1)
                self.same[size] = 1
                return
        difference = found.a - found.b
        for name in sorted(symbols_of(difference), reverse=True):
            parts = coefficient_of(difference, name)
            if parts is not None and isinstance(parts[0], int) and parts[0]:
                whole, rest = divide(parts[1], parts[0])
                if rest == 0:
                    raise Equal(name, -whole)
        kept, replaced = (self.same.get(size, size) for size in (found.a, found.b))
        if isinstance(replaced, int):
            kept, replaced = replaced, kept
        if isinstance(replaced, int) or kept == replaced:
            raise InputError(f"the sizes {found.a} and {found.b} do not fit together", where=str(node),
                             why="they meet in one dim, and neither is 1", do="pass inputs whose sizes agree")
        self.needs += [size for size in (replaced - kept, kept - replaced) if not isinstance(size, int)]
        self.same.update({size: kept for size, other in self.same.items() if other == replaced})
        self.same[replaced] = kept

    # ---- the end

    def _finish(self, cut: Cut | None, place: int) -> Imported:
        wanted = list(self.outputs)
        if cut is not None:
            wanted = _used((*(node for node, _ in cut.host), *cut.nodes), self.outputs)
        gives: list[str] = []
        values: list[Value] = []
        fixed: dict[str, Any] = {}
        left: dict[str, np.ndarray] = {}
        renames: dict[str, str] = {}
        kinds: dict[str, TensorType | Known] = dict(self.promised)
        # a program that gives something gives the constants too, so that a file of it is the whole model
        whole = cut is None and any(isinstance(one, Value) or (isinstance(one, Known) and one.symbolic)
                                    for one in map(self.env.get, wanted))
        for name in wanted:
            if name in self.graph_inputs and cut is not None:
                continue
            if cut is not None and name not in self.env:
                if name in self.given:
                    left[name] = self.given[name]
                continue
            found = self._lookup(name, "the outputs")
            if isinstance(found, Known) and not found.symbolic and not (whole and found.dtype in TORCH_DTYPES):
                left[name] = found.array
            elif isinstance(found, Opaque):
                if found.name != name:
                    renames[name] = found.name
            elif found is None:
                fixed[name] = found
            else:
                gives.append(name)
                values.append(self._result(found))
                kinds[name] = found if isinstance(found, Known) else values[-1].tensor
        graph = self.builder.finish(tuple(values))
        check_bound(graph)
        graph, constants = self._needed(graph)
        return Imported(graph, tuple(self.takes), tuple(gives), fixed, constants, self.externs,
                        list(self.equal.items()), tuple(self.needs), tuple(self.presumed), cut, place, left, renames,
                        kinds)

    def _needed(self, graph: Graph) -> tuple[Graph, list[torch.Tensor]]:
        """The graph without constants that nothing reads: weights in another form, and floats that nobody asked for."""
        graph = dce(graph, Config())
        read = {value.name for node in graph.nodes for value in node.values()} | {one.name for one in graph.roots()}
        first = len(graph.inputs) - len(self.constants)  # constants stand behind what a call brings
        kept = [place for place, value in enumerate(graph.inputs[first:]) if value.name in read]
        inputs = (*graph.inputs[:first], *(graph.inputs[first + place] for place in kept))
        return dataclasses.replace(graph, inputs=inputs), [self.constants[place] for place in kept]

    def _result(self, found: Any) -> Value:
        if isinstance(found, Known):
            node = OnnxNode("Identity", "", 13, (), ())
            return Call(node, (), self.t, self._constant, self._note, self.assume, self.presume,
                        lambda _: None).tensor(found)
        assert isinstance(found, Value)
        return found


# what reading a malformed node raises
_WRONG = (ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError, ArithmeticError)


class _Host(Exception):
    """The host does this node."""


class _Inline(Exception):
    """Nodes stand in place of this one."""

    def __init__(self, nodes: tuple[OnnxNode, ...], constants: Mapping[str, np.ndarray]) -> None:
        super().__init__()
        self.nodes = nodes
        self.constants = constants


def _used(nodes: Sequence[OnnxNode], outputs: Sequence[str]) -> list[str]:
    """Names that nodes and what is behind them read."""
    found: dict[str, None] = {}
    for node in nodes:
        for name in node.inputs:
            if name:
                found[name] = None
        for value in node.attributes.values():
            if isinstance(value, OnnxGraph):
                found.update(dict.fromkeys(captured(value)))
    made = {name for node in nodes for name in node.outputs}
    found.update(dict.fromkeys(name for name in outputs if name not in made))
    return [name for name in found if name not in made]


def imported(name: str, reader: Reader, target: Target, entries: Sequence[Entry], nodes: Sequence[OnnxNode],
             outputs: Sequence[str], constants: Mapping[str, np.ndarray], ones: Mapping[str, Size],
             facts: Facts, decided: Mapping[Condition, bool] = MappingProxyType({})) -> Imported:
    """The graph of nodes, with sizes that have to be equal written as one.

    Raises:
        NeedsSize: the elements of an input are wanted. InputError: the model, or these sizes, are wrong.
    """
    equal = dict(ones)
    presumed: list[Size] = []  # what is found equal may be so by that
    for _ in range(256):
        walk = Walk(name, reader, target, entries, nodes, outputs, constants, equal, facts, decided)
        try:
            made = walk.run()
            made.presumed = (*presumed, *made.presumed)
            return made
        except Equal as found:
            presumed += [one for one in walk.presumed if one not in presumed]
            size = substitute(found.size, equal)
            if found.name in symbols_of(size):
                raise InputError(f"the size {found.name} would be {size}", where=name, why="that is no number",
                                 do="check the model") from found
            equal = {key: substitute(value, {found.name: size}) for key, value in equal.items()}
            equal[found.name] = size
    raise Unsupported("too many sizes have to be equal", where=name, why="256 were found", do="name the model's dims")


def with_labels(inputs: Sequence[OnnxValue]) -> tuple[OnnxValue, ...]:
    """The inputs with an identifier for each dim that is no number: one for every name, of which two may look alike
    ("n.1", "n_1"), and one for each dim without a name."""
    labels: dict[Any, str] = {}
    for value in inputs:  # names first, which are kept as they are where that can be
        for size in value.shape or ():
            if isinstance(size, str) and size not in labels:
                labels[size] = unlike(clean(size), labels.values())
    made = []
    for value in inputs:
        shape = None if value.shape is None else tuple(
            size if isinstance(size, int) else labels[size] if size is not None
            else labels.setdefault((value.name, dim), unlike(f"{clean(value.name)}_{dim}", labels.values()))
            for dim, size in enumerate(value.shape))
        made.append(dataclasses.replace(value, shape=shape))
    return tuple(made)


def unlike(label: str, others: Collection[str]) -> str:
    """The label, or one like it that is none of the others."""
    return label if label not in others else next(
        text for text in (f"{label}_{count}" for count in itertools.count(2)) if text not in others)


def symbols(value: OnnxValue, taken: dict[str, str]) -> TensorType:
    """The declared type of an input: dims with labels are symbols of that name, others of the input's."""
    assert value.shape is not None
    shape: list[Size] = []
    for dim, size in enumerate(value.shape):
        if isinstance(size, int):
            shape.append(size)
            continue
        label = size or unlike(f"{clean(value.name)}_{dim}", taken)
        taken.setdefault(label, f"dim {dim} of {value.name}")
        shape.append(symbol(label))
    return TensorType(value.dtype, tuple(shape))
