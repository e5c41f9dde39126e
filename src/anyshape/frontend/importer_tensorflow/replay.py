"""Rewriting of a function of TensorFlow's: its operations are traced again, by rules where the converter lacks them.

    TensorListReserve -> While(TensorListSetItem) -> TensorListStack   -->   Fill -> while_loop(XlaDynamicUpdateSlice)

The converter carries some operations only where their sizes are numbers, and no lists of tensors. A rule writes such an
operation with others (replay_rules.py); calls of functions are inlined, and lists become tensors with one dim more.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops.gen_xla_ops import xla_dynamic_update_slice
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph

from anyshape.base.errors import Unsupported
from anyshape.frontend.importer_tensorflow import element_rules
from anyshape.frontend.importer_tensorflow.convert import WHERE
from anyshape.frontend.importer_tensorflow.replay_rules import Blocks, again, cut, of_blocks

PASSED_ON = ("Identity", "IdentityN", "StopGradient", "PreventGradient", "EnsureShape", "CheckNumerics")
CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def rewritten(concrete: Any) -> tuple[Callable[..., Any], list[Any]]:
    """A function of the tensors that the concrete function takes, in a line, which gives its results in a line, to be
    called while a `tf.function` is traced; and these tensors. What it captured is constant.

    Raises:
        Unsupported: it writes to what it captured.
    """
    try:
        frozen = convert_variables_to_constants_v2(concrete, lower_control_flow=False)
    except ValueError as error:
        raise Unsupported("the weights of the function cannot be made constants", where=WHERE,
                          why=str(error).strip().splitlines()[0][:200],
                          do="leave out what writes to variables, as layers with random numbers do") from error
    replay = Replay(frozen.graph)
    return lambda *values: _made(replay.run(frozen.graph, values)), list(frozen.inputs)


def _made(values: Sequence[Any]) -> list[Any]:
    """Tensors in the place of blocks."""
    return [one.dense() if isinstance(one, Blocks) else one for one in values]


class Reserved:
    """A list of tensors whose elements have not been seen. count: how many. item: one that was put into it."""

    def __init__(self, count: Any, dtype: Any, shape: Any, item: Any = None) -> None:
        self.count, self.dtype, self.shape, self.item = count, dtype, shape, item

    def dense(self) -> Any:
        """As one tensor, of zeros."""
        if self.item is not None:
            shape = tf.shape(self.item)
        elif self.shape is not None and tf.TensorShape(self.shape).is_fully_defined():
            shape = tf.constant(list(self.shape), tf.int32)
        else:
            raise NotImplementedError("a list whose elements have sizes that nothing says")
        return tf.zeros(tf.concat([tf.reshape(self.count, [1]), shape], 0), self.dtype)


class Replay:
    """Traces operations again. graph: where functions are known by name."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.functions = {one.signature.name: one for one in graph.as_graph_def().library.function}
        self.graphs: dict[str, Any] = {}

    def run(self, graph: Any, values: Sequence[Any]) -> list[Any]:
        """What a graph gives for its inputs."""
        known = {one.ref(): value for one, value in zip(graph.inputs, values, strict=True)}
        needed = _needed(graph)
        for op in graph.get_operations():
            if op not in needed or (op.outputs and op.outputs[0].ref() in known):
                continue
            found = self.operation(op, [known[one.ref()] for one in op.inputs])
            for output, value in zip(op.outputs, found, strict=True):
                known[output.ref()] = value
        return [known[one.ref()] for one in graph.outputs]

    def operation(self, op: Any, inputs: list[Any]) -> Sequence[Any]:
        """The results of one operation."""
        if op.type in PASSED_ON:
            return inputs
        if op.type == "SpaceToBatchND":
            blocks = cut(op, inputs)
            return again(op, inputs) if blocks is None else [blocks]
        if inputs and isinstance(inputs[0], Blocks):
            found = of_blocks(op, inputs)
            if found is not None:
                return [found]
        if op.type in CALLS:
            return self.run(self.body(op, "f"), inputs)
        inputs = _made(inputs)
        if op.type in ("While", "StatelessWhile"):
            return self._while(op, inputs)
        if op.type in ("If", "StatelessIf"):
            branches = [self.body(op, name) for name in ("then_branch", "else_branch")]
            found = tf.cond(tf.cast(inputs[0], tf.bool), *(lambda one=one: self.run(one, inputs[1:])
                                                           for one in branches))
            return list(found) if isinstance(found, (list, tuple)) else [found]
        if op.type.startswith("TensorList") or op.type == "EmptyTensorList":
            return [self._list(op, inputs)]
        inputs = [one.dense() if isinstance(one, Reserved) else one for one in inputs]
        rule = element_rules.RULES.get(op.type)
        found = rule(op, inputs) if rule is not None else None
        return again(op, inputs) if found is None else found

    def body(self, op: Any, attribute: str) -> Any:
        """The graph of a function that an operation names."""
        name = op.get_attr(attribute).name
        if name not in self.graphs:
            with self.graph.as_default():
                self.graphs[name] = function_def_to_graph(self.functions[name])
        return self.graphs[name]

    def _while(self, op: Any, inputs: list[Any]) -> list[Any]:
        condition, body = self.body(op, "cond"), self.body(op, "body")
        if any(isinstance(one, Reserved) for one in inputs):
            once = self.run(body, inputs)  # its tensors say their sizes, and are not used
            inputs = [Reserved(a.count, a.dtype, a.shape, getattr(b, "item", None)).dense()
                      if isinstance(a, Reserved) else a for a, b in zip(inputs, once, strict=True)]
        kept = _passed_on(body)  # constants among them stay known inside
        shapes = [one.shape if output.dtype == tf.variant else output.shape if output.shape.rank is not None
                  else one.shape for one, output in zip(inputs, op.outputs, strict=True)]
        carried = [place for place in range(len(inputs)) if place not in kept]

        def filled(values: Sequence[Any]) -> list[Any]:
            found = list(inputs)
            for place, value in zip(carried, values, strict=True):
                found[place] = value
            return found

        def step(*values: Any) -> list[Any]:
            found = self.run(body, filled(values))
            return [found[place] for place in carried]

        found = tf.while_loop(lambda *values: self.run(condition, filled(values))[0], step,
                              [inputs[place] for place in carried], [shapes[place] for place in carried])
        return filled(found if isinstance(found, (list, tuple)) else [found])

    def _list(self, op: Any, inputs: list[Any]) -> Any:
        if op.type == "TensorListReserve":
            shape = tf.get_static_value(inputs[0])
            known = shape is not None and shape.ndim == 1 and (shape >= 0).all()
            return Reserved(inputs[1], op.get_attr("element_dtype"), shape.tolist() if known else None)
        if op.type == "TensorListFromTensor":
            return inputs[0]
        one = inputs[0]
        if op.type == "TensorListSetItem":
            if isinstance(one, Reserved):
                return Reserved(one.count, one.dtype, one.shape, inputs[2])
            place = tf.concat([tf.reshape(inputs[1], [1]), tf.zeros([one.shape.rank - 1], tf.int32)], 0)
            return xla_dynamic_update_slice(one, tf.expand_dims(inputs[2], 0), place)
        if isinstance(one, Reserved):
            one = one.dense()
        if op.type == "TensorListGetItem":
            return tf.gather(one, inputs[1])
        if op.type == "TensorListStack":
            return one
        if op.type == "TensorListLength":
            return tf.shape(one)[0]
        raise NotImplementedError(f"{op.type}, a list of tensors that grows")


def _passed_on(body: Any) -> set[int]:
    """The places of a loop's values that no turn changes."""
    found: set[int] = set()
    for place, (taken, given) in enumerate(zip(body.inputs, body.outputs, strict=True)):
        while given is not taken and given.op.type == "Identity":
            given = given.op.inputs[0]
        if given is taken:
            found.add(place)
    return found


def _needed(graph: Any) -> set[Any]:
    """The operations that results are made of."""
    found: set[Any] = set()
    waiting = [one.op for one in graph.outputs]
    while waiting:
        op = waiting.pop()
        if op not in found:
            found.add(op)
            waiting.extend(one.op for one in op.inputs)
    return found
