"""From an ATen graph, as AOTAutograd or torch.export makes it, to a Graph of our IR.

    %mm = aten.mm(x, w); %relu = aten.relu(%mm)    -->  m = matmul(x, w); r = maximum(m, 0.0)

Every op has a translation (a row of `frontend/aten/table.py`) or becomes an extern call. Shapes come from the trace
(`meta["val"]`); symbolic numbers are never asked for their value.
"""
from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from anyshape.backend.interface import Target
from anyshape.backend.targets import usual_target
from anyshape.base.errors import VerifyError
from anyshape.frontend.aten import (
    activation,
    attention,
    create,
    materialize_op,
    matmul,
    norm,
    pointwise,
    pool,
    reduce,
    routing,
    scatter,
    view,
)
from anyshape.frontend.aten import (
    index as aten_index,
)
from anyshape.frontend.aten.extern_call import extern
from anyshape.frontend.aten.table import Decline, Mismatch, Translation, translation_of
from anyshape.frontend.autograd.partition import COPY_KEY
from anyshape.frontend.importer.graph_inputs import BORDER, Inputs, Notes, Skipped
from anyshape.frontend.importer.symfloat import float_value
from anyshape.frontend.recurrent import layers as recurrent
from anyshape.frontend.symbols.node_metadata import check_bound
from anyshape.frontend.symbols.symint import SymIntImporter
from anyshape.ir.graph import Graph, Operand, Value
from anyshape.ir.types import NATIVE, TensorType
from anyshape.ops import table as ops
from anyshape.runtime.memory.tape import make_tape, tape_get
from anyshape.runtime.torch_ops.extern_calls import BY_STORAGE
from anyshape.sym.expr import Expr, Size, coefficient_of, symbol, symbols_of
from anyshape.torch_compat import OpOverload, is_mutable, operator_name
from anyshape.torch_compat.versions import api

# importing these fills the tables of rows and of translations
TABLES = (ops, activation, attention, create, aten_index, matmul, norm, pointwise,
          pool, recurrent, reduce, routing, scatter, view, materialize_op)

_MOST_EQUALITIES = 16


def to_graph(gm: GraphModule, name: str, target: Target | None = None) -> tuple[Graph, Notes]:
    """The Graph of an ATen graph.

    Args:
        gm: functional but for `copy_` nodes onto placeholders; every node has `meta["val"]`.
        name: of the Graph.
        target: that it will be compiled for; that of the environment when left out.

    Raises:
        Unsupported: mutation, effects, or values that the IR does not have; names the node and its source line.
    """
    target = usual_target() if target is None else target
    equal: dict[str, Size] = {}
    notes = Notes()
    for _ in range(_MOST_EQUALITIES):
        walk = _Walk(gm, name, SymIntImporter(dict(equal)), target, unify=True)
        try:
            graph = walk.run()
        except _Equal as found:
            equal[found.name] = found.size
            notes.equalities.append((symbol(found.name), found.size))
            continue
        walk.notes.equalities[:0], walk.notes.renamed = notes.equalities, equal
        return graph, walk.notes
    walk = _Walk(gm, name, SymIntImporter(dict(equal)), target, unify=False)
    walk.notes.renamed = equal
    return walk.run(), walk.notes


class _Equal(Exception):
    """The walk has to start again with one symbol replaced."""

    def __init__(self, name: str, size: Size) -> None:
        super().__init__(name)
        self.name = name
        self.size = size


class _Walk(Inputs):
    """One pass over the nodes of an fx graph."""

    def run(self) -> Graph:
        """The finished Graph."""
        nodes = list(self.gm.graph.nodes)
        self.declare(nodes)
        self.builder.facts = self.sizes.facts()
        outputs: tuple[Operand | None, ...] = ()
        strides: tuple[Any, ...] = ()
        memory: tuple[str, ...] = ()
        for node in nodes:
            if BORDER in node.meta:
                self.notes.first = frozenset(value.name for one in self.builder.nodes for value in one.outputs)
            if node.op == "call_function":
                self.builder.where = self.trace.where(node)
                with self.trace.at(node):
                    self._call(node)
            elif node.op == "output":
                outputs, strides, memory = self._outputs(node)
            elif node.op not in ("placeholder", "get_attr"):
                raise self.trace.unsupported(node, f"a node of kind {node.op}")
        restored = tuple(self.restored[index] for index in sorted(self.restored))
        self.builder.facts = self.sizes.facts()
        graph = self.builder.finish(
            outputs, output_strides=strides, memory=memory, writes=tuple(self.writes.items()), saved=self.saved,
            restored=restored)
        check_bound(graph)
        return graph

    # ---- nodes

    def _call(self, node: Node) -> None:
        target = node.target
        value = node.meta.get("val")
        if isinstance(target, OpOverload):
            if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
                self.env[node] = self._known_size(node, value)
            else:
                self._aten(node, target)
        elif target is operator.getitem and not isinstance(value, (torch.SymInt, torch.SymFloat)):
            self.env[node] = self._resolved(node.args[0])[node.args[1]]
        elif target is make_tape:
            self.notes.tape_output = True
            self.saved = tuple(self._resolved(x) for x in node.args)
            self.env[node] = Skipped("the tape")
        elif target is tape_get:
            return
        elif target is api.WITH_EFFECTS:
            self._with_effects(node)
        elif isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
            self.env[node] = self._known_size(node, value)
        elif isinstance(value, (torch.SymBool, bool)):
            self.env[node] = Skipped(f"the condition {value}")
        elif isinstance(value, (torch.SymFloat, float)):
            self.env[node] = float_value(self.t, node, [self._resolved(x) for x in node.args])
        else:
            raise self.trace.unsupported(node, f"a call of {getattr(target, '__name__', target)}")

    def _with_effects(self, node: Node) -> None:
        """A call that AOTAutograd orders by tokens: with_effects(token, op, ...) gives (token, results...). Equations
        with effects keep their order here, so tokens stand for nothing."""
        target, given = node.args[1], node.args[2:]
        if not isinstance(target, OpOverload) or is_mutable(target):
            raise self.trace.unsupported(node, f"a call of {target} with effects")
        self.notes.externs.append((str(target), "it has effects", self.builder.where))
        types = self.trace.tensor_types(node.meta["val"][1:], node)
        results = extern(self.builder, node, target, given, self._resolved, types, self.t.floats,
                         self._traced_strides, effect=True)
        self.env[node] = (Skipped("a token"), *results)

    def _known_size(self, node: Node, value: int | torch.SymInt) -> Size:
        bound = node.meta.get("unbacked_bindings")
        if bound:
            raise self.trace.unsupported(node, "a size that is only known from the data")
        return self.sizes.size(value)

    def _aten(self, node: Node, target: OpOverload) -> None:
        name = str(target)
        if name == "aten.copy_.default" and node.args[0] in self.placeholders:
            self._write(node)
            return
        if name in api.TOKENS:
            self.env[node] = Skipped("a token")
            return
        if name in _ASSERTS:
            self.notes.asserts.append(f"{name}: {node.args}")
            return
        if is_mutable(target):
            raise self.trace.unsupported(node, f"{name}, which changes its operand")
        if operator_name(target) in BY_STORAGE:
            self._require_dense(node, name)
        self._set_result(node)
        translation = translation_of(target)
        why = "no translation" if translation is None else self._foreign(node)
        if node.meta.get(COPY_KEY):
            why = "a copy of what this call overwrites"
        if translation is not None and not why:
            mark = len(self.builder.nodes)
            try:
                self.env[node] = self._translated(node, translation)
                return
            except (Decline, Mismatch) as reason:
                why = str(reason)
            except VerifyError as error:
                why = error.what
            del self.builder.nodes[mark:]
        if node.meta.get("unbacked_bindings"):
            raise self.trace.unsupported(node, f"{name}, whose result has sizes that are only known from the data")
        self.notes.externs.append((name, why, self.builder.where))
        types = self.trace.result_types(node)
        self.env[node] = extern(self.builder, node, target, node.args, self._resolved, types, self.t.floats,
                                self._traced_strides)

    def _require_dense(self, node: Node, name: str) -> None:
        """Refuses an op that reads storage by strides, unless the traced operand lies there as our dense value does."""
        traced = node.args[0].meta["val"]
        shape = self.sizes.shape(traced.shape)
        offset = self.sizes.size(traced.storage_offset())
        if offset != 0 or self.trace.strides(traced, shape) is not None:
            raise self.trace.unsupported(node, f"{name} of a tensor that is not dense")

    def _set_result(self, node: Node) -> None:
        """The traced types of the results, dense."""
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            self.t.result = self.trace.dense(value, node)
        elif isinstance(value, (tuple, list)):
            self.t.result = tuple(self.trace.dense(v, node) if isinstance(v, torch.Tensor) else None for v in value)
        elif value is None or isinstance(value, (torch.SymFloat, torch.SymBool, bool, float)):
            self.t.result = TensorType("f64", (), None, self.t.device)
        else:
            raise self.trace.unsupported(node, f"a result of type {type(value).__name__}")

    def _foreign(self, node: Node) -> str:
        """Why a translation must not be tried: a dtype that kernels do not compute on."""
        kinds = [kind for kind in (self.t.result if isinstance(self.t.result, tuple) else (self.t.result,)) if kind]
        kinds += [own.tensor for own in map(self.env.get, node.all_input_nodes)
                  if isinstance(own, Value) and isinstance(own.type, TensorType)]
        for kind in kinds:
            if kind.dtype not in NATIVE:
                return f"dtype {kind.dtype}"
        return ""

    def _traced_strides(self, node: Node, value: Value) -> tuple[Size, ...] | None:
        """The strides that a tensor of the trace has, None where it is dense."""
        traced = node.meta.get("val")
        if not isinstance(traced, torch.Tensor) or traced.dim() != value.tensor.rank:
            return None
        return self.trace.strides(traced, value.tensor.shape)

    def _translated(self, node: Node, translation: Translation) -> Any:
        """The result of a translation, which has the traced types. Sizes that the trace takes as equal are
        made so."""
        arguments, keywords = self._resolved(node.args), self._resolved(node.kwargs)
        traced = self.t.result
        self.t.node = node
        mark = len(self.builder.nodes)
        for _ in range(_MOST_EQUALITIES):
            try:
                self.t.result = self._settled(traced)
                result = translation(self.t, *self._settled(arguments), **self._settled(keywords))
                return self._checked(result, traced)
            except Mismatch as found:
                del self.builder.nodes[mark:]
                self._equate(found)
        raise Decline("too many sizes that differ")

    def _equate(self, found: Mismatch) -> None:
        """Takes two sizes as one from here on, by the number where one is a number. They may differ in the call that is
        traced, for a general trace takes a size 1 that is broadcast to be equal to the other; such calls are refused
        before they run.

        Raises:
            Decline: they are two numbers, or taken as one already.
        """
        kept, replaced = (self.same.get(size, size) for size in (found.a, found.b))
        if isinstance(replaced, int):
            kept, replaced = replaced, kept
        if isinstance(replaced, int) or kept == replaced:
            raise Decline(f"the sizes {found}")
        self._try_unify(Mismatch(kept, replaced))
        self.same.update({size: kept for size, other in self.same.items() if other == replaced})
        self.same[replaced] = kept
        self.notes.equalities.append((replaced, kept))

    def _settled(self, argument: Any) -> Any:
        """The argument with one formula for sizes that are equal in the trace; a tensor is cut to its own length."""
        if not self.same:
            return argument
        if isinstance(argument, Value) and isinstance(argument.type, TensorType):
            for dim, size in enumerate(argument.tensor.shape):
                argument = self.t.window(argument, dim, 0, self.same.get(size, size))
            return argument
        if isinstance(argument, TensorType):
            shape = tuple(self.same.get(size, size) for size in argument.shape)
            return TensorType(argument.dtype, shape, None, argument.device)
        if isinstance(argument, (list, tuple)):
            return type(argument)([self._settled(x) for x in argument])
        if isinstance(argument, dict):
            return {key: self._settled(x) for key, x in argument.items()}
        return self.same.get(argument, argument) if isinstance(argument, Expr) else argument

    def _checked(self, result: Any, traced: Any) -> Any:
        """The result when it has the traced types."""
        if isinstance(result, tuple):
            return tuple(self._checked(x, kind) for x, kind in zip(result, traced, strict=True))
        kind = traced[0] if isinstance(traced, tuple) else traced
        if result is None or kind is None:
            return result
        if result.tensor.dtype != kind.dtype or result.tensor.rank != kind.rank:
            raise Decline(f"the translation gives {result.tensor}, the trace has {kind}")
        if result.tensor.shape == kind.shape:
            return result
        for dim, want in enumerate(kind.shape):
            have = result.tensor.shape[dim]
            if self.same.get(have, have) != self.same.get(want, want):
                raise Mismatch(have, want)
            result = self.t.window(result, dim, 0, want)
        return result

    def _try_unify(self, found: Mismatch) -> None:
        """Starts the walk again with one of two equal sizes written as the other, where a symbol can be isolated."""
        if not self.unify:
            return
        difference = found.a - found.b
        for name in sorted(symbols_of(difference), reverse=True):
            parts = coefficient_of(difference, name)
            if parts is not None and parts[0] in (1, -1):
                rest = parts[1]
                raise _Equal(name, -rest if parts[0] == 1 else rest)

    def _write(self, node: Node) -> None:
        target = self.placeholders[node.args[0]]
        source = self._resolved(node.args[1])
        kind = target.tensor
        value = self.t.broadcast(self.t.cast(source, kind.dtype), kind.shape)
        scatter.overwrite_part(self.builder, target, value)
        self.writes[target] = value
        self.env[node] = self.env[node.args[0]] = value

    def _resolved(self, argument: Any) -> Any:
        if isinstance(argument, Node):
            found = self.env.get(argument, _MISSING)
            if found is _MISSING or isinstance(found, Skipped):
                what = found.what if isinstance(found, Skipped) else f"the result of {argument.target}"
                raise self.trace.unsupported(argument, f"a use of {what}")
            return found
        if isinstance(argument, (list, tuple)):
            return [self._resolved(x) for x in argument]
        if isinstance(argument, dict):
            return {key: self._resolved(x) for key, x in argument.items()}
        if isinstance(argument, torch.SymInt):
            return self.sizes.size(argument)
        return argument

    # ---- outputs

    def _outputs(self, node: Node) -> tuple[tuple[Operand | None, ...], tuple[Any, ...], tuple[str, ...]]:
        returned = list(node.args[0]) if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
        if self.notes.tape_output:
            returned.pop()
        outputs = []
        strides = []
        for item in returned:
            value = self._resolved(item)
            if isinstance(value, Value) and value.name in self.t.floats:
                raise self.trace.unsupported(item, "a Python float as a result")
            if not (value is None or isinstance(value, (Value, bool, int, float, Expr))):
                raise self.trace.unsupported(node, f"a result of type {type(value).__name__}")
            outputs.append(value)
            traced = item.meta.get("val") if isinstance(item, Node) else None
            if isinstance(value, Value) and isinstance(traced, torch.Tensor):
                strides.append(self.trace.strides(traced, value.tensor.shape))
            else:
                strides.append(None)
        return tuple(outputs), tuple(strides), self._memory(returned)

    def _memory(self, returned: list[Any]) -> tuple[str, ...]:
        """Which outputs share storage with an input or with each other, by the storages of the trace."""
        inputs = {api.storage_key(node.meta.get("val")): value.name for node, value in self.placeholders.items()
                  if isinstance(value, Value)}
        keys = [api.storage_key(item.meta.get("val")) if isinstance(item, Node) else None for item in returned]
        labels = []
        for key in keys:
            shared = f"memory_{keys.index(key)}" if key is not None and keys.count(key) > 1 else ""
            labels.append("" if key is None else inputs.get(key, shared))
        return tuple(labels) if any(labels) else ()


_MISSING = object()
_ASSERTS = frozenset(("aten._assert_scalar.default", "aten._assert_tensor_metadata.default",
                      "aten.sym_constrain_range_for_size.default", "aten.sym_constrain_range.default"))
