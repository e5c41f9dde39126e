"""Steps of the host between programs: control flow that the data decide, lists, results whose size is in the data.

A function takes the node and its operands as they are in a call (tensors of torch, lists, None, arrays of numpy for
what torch has no dtype for), and returns the results.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from anyshape.base.errors import AnyShapeError, DataError, InputError, Unsupported
from anyshape.frontend.importer_onnx.model import OnnxGraph, OnnxNode, OnnxValue, captured
from anyshape.frontend.onnx_program import host_text
from anyshape.frontend.onnx_program.host_ops import HOST, back
from anyshape.frontend.onnx_program.known_types import Kinds, captured_types
from anyshape.frontend.symbols.numpy_arrays import numpy_dtype

TABLES = (host_text,)  # importing it fills the table of the host's functions

MOST_STEPS = 1 << 31  # of a loop


class Bodies:
    """Graphs inside of nodes, compiled when they are first run, once for what is known of the values around them.

    Args:
        stage: makes the stage of a graph, with the kinds of values around it. kinds: those.
    """

    def __init__(self, shared: Any, stage: Callable[[OnnxGraph, Kinds], Any], kinds: Kinds) -> None:
        self.shared = shared
        self.stage = stage
        self.kinds = kinds
        self.made: dict[int, Any] = {}  # of this step, whose kinds are the same at every turn

    def run(self, graph: OnnxGraph, given: Sequence[Any], outer: Mapping[str, Any]) -> list[Any]:
        """The graph's outputs, of these inputs and what it takes from around it."""
        found = self.made.get(id(graph))
        if found is None:
            kinds = captured_types(self.kinds, captured(graph))
            key = id(graph), str(sorted(kinds.items()))
            if key not in self.shared.bodies:
                self.shared.bodies[key] = graph, self.stage(graph, kinds)
            found = self.made[id(graph)] = self.shared.bodies[key]
        _, stage = found
        values = {one.name: value for one, value in zip(graph.inputs, given, strict=False)}
        for name in stage.takes:
            if name not in values:
                if name not in outer:
                    raise InputError(f"the value {name!r} is not there", where=graph.name, do="check the model",
                                     why="no graph around this one has it")
                values[name] = outer[name]
        results = stage.run(values)
        return [results[name] for name in stage.outputs]


def run(node: OnnxNode, values: Mapping[str, Any], bodies: Bodies, reason: str = "") -> dict[str, Any]:
    """The results of a node by name. reason: why it is no part of a program.

    Raises:
        Unsupported: an operator that is not there, or a case of it.
    """
    inputs = [values[name] if name else None for name in node.inputs]
    control = {"Loop": _loop, "Scan": _scan, "SequenceMap": _sequence_map}.get(node.op)
    key = f"{node.domain}:{node.op}" if node.domain else node.op
    try:
        if control is not None and not node.domain:
            results = control(node, inputs, values, bodies)
        elif key in HOST:
            results = HOST[key](node, *inputs)
        else:
            raise Unsupported(f"the operator {node} cannot run", where=str(node), do="export the model without it",
                              why=reason)
    except AnyShapeError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise DataError(f"the operator {node} failed", where=str(node), why=f"{type(error).__name__}: {error}",
                        do="check the inputs") from error
    results = results if isinstance(results, (tuple, list)) else (results,)
    return {name: result for name, result in zip(node.outputs, results, strict=False) if name}


def _loop(node: OnnxNode, inputs: Sequence[Any], values: Mapping[str, Any], bodies: Bodies) -> list[Any]:
    graph = node.attributes["body"]
    most = None if inputs[0] is None else int(inputs[0].reshape(()).item())
    go = inputs[1] is None or bool(inputs[1].reshape(()).item())
    state = list(inputs[2:])
    rows: list[list[Any]] = []
    count = 0
    while go and (most is None or count < most) and count < MOST_STEPS:
        results = bodies.run(graph, [torch.tensor(count), torch.tensor(go), *state], values)
        go, state = bool(results[0].reshape(()).item()), results[1:1 + len(state)]
        rows.append(results[1 + len(state):])
        count += 1
    scans = len(node.outputs) - len(state)
    stacked = [torch.stack([row[place] for row in rows]) if rows else _no_rows(graph.outputs[1 + len(state) + place])
               for place in range(scans)]
    return [*state, *stacked]


def _scan(node: OnnxNode, inputs: Sequence[Any], values: Mapping[str, Any], bodies: Bodies) -> list[Any]:
    graph, count = node.attributes["body"], node.attributes["num_scan_inputs"]
    if node.version < 9:
        return _batched_scan(node, inputs[1:], values, bodies)
    states = len(inputs) - count
    return _scanned(node, graph, list(inputs[:states]), list(inputs[states:]), values, bodies)


def _batched_scan(node: OnnxNode, inputs: Sequence[Any], values: Mapping[str, Any], bodies: Bodies) -> list[Any]:
    graph, count = node.attributes["body"], node.attributes["num_scan_inputs"]
    states = len(inputs) - count
    rows = []
    for place in range(inputs[0].shape[0]):
        own = [one[place] for one in inputs]
        rows.append(_scanned(node, graph, own[:states], own[states:], values, bodies))
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def _scanned(node: OnnxNode, graph: OnnxGraph, state: list[Any], given: list[Any], values: Mapping[str, Any],
             bodies: Bodies) -> list[Any]:
    axes = node.attributes.get("scan_input_axes", (0,) * len(given))
    back = node.attributes.get("scan_input_directions", node.attributes.get("directions", (0,) * len(given)))
    outputs = len(graph.outputs) - len(state)
    out_axes = node.attributes.get("scan_output_axes", (0,) * outputs)
    out_back = node.attributes.get("scan_output_directions", (0,) * outputs)
    steps = given[0].shape[axes[0]]
    rows = []
    for step in range(steps):
        own = [one.select(axis, steps - 1 - step if turned else step)
               for one, axis, turned in zip(given, axes, back, strict=True)]
        results = bodies.run(graph, [*state, *own], values)
        state = results[:len(state)]
        rows.append(results[len(state):])
    found = []
    for place in range(outputs):
        column = [row[place] for row in rows]
        column = column[::-1] if out_back[place] else column
        found.append(torch.stack(column, out_axes[place]) if column
                     else _no_rows(graph.outputs[len(state) + place], out_axes[place]))
    return [*state, *found]


def _no_rows(one: OnnxValue, axis: int = 0) -> Any:
    """What no turn of a body gives of an output: of its declared type, where dims without a number are 0."""
    shape = [size if isinstance(size, int) else 0 for size in one.shape or ()]
    shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, 0)
    return back(np.zeros(shape, numpy_dtype(one.dtype or "f32")))


def _sequence_map(node: OnnxNode, inputs: Sequence[Any], values: Mapping[str, Any], bodies: Bodies) -> list[Any]:
    rows = []
    for place in range(len(inputs[0])):
        own = [one[place] if isinstance(one, list) else one for one in inputs]
        rows.append(bodies.run(node.attributes["body"], own, values))
    return [[row[place] for row in rows] for place in range(len(node.outputs))]
