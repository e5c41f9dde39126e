"""Weight prepacking: a file holds matrices that only products read, as right operands, in the panels that the products
read (ir/panels.py), so that no call packs them. The graph says how a matrix is made of its panels; the pass
prepacked_gemm leaves that out where products read panels, and where one does not, the weight stays as it was. Weights
of convolutions over one element at a time are such matrices, too.

before:
    graph example(x: f32[n, 64], w: f32[128, 64])
      t = permute(w | dims=[1, 0])                         f32[64, 128]
      y = matmul(x, t)                                     f32[n, 128]
      return y
after:
    graph example(x: f32[n, 64], w: f32[4, 64, 32, 1])
      permute_1 = permute(w | dims=[1, 0, 2, 3])           f32[64, 4, 32, 1]
      reshape_1 = reshape(permute_1 | shape=[64, 128])     f32[64, 128]
      permute_2 = permute(reshape_1 | dims=[1, 0])         f32[128, 64]
      t = permute(permute_2 | dims=[1, 0])                 f32[64, 128]
      y = matmul(x, t)                                     f32[n, 128]
      return y
"""
from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from math import prod
from typing import Any

import numpy as np

from anyshape.artifact.deployable import Deployable, Weight, storage_of
from anyshape.ir.graph import Graph, Value
from anyshape.ir.panels import OUT_OF_PANELS, PANEL, into_panels, panels_of
from anyshape.ir.types import TensorType
from anyshape.ops.matmul import PRODUCTS
from anyshape.passes.channels_last import is_product
from anyshape.passes.rewriter import Replay
from anyshape.plan.ir.program import LibraryStep, Plan, parts_of, touched

MOST_FILLED = 1.5  # elements of panels, which are filled up with zeros, to those of the matrix


def prepacked(program: Deployable, known: dict[tuple[object, ...], np.ndarray[Any, Any]]) -> Deployable:
    """The program with the weights in panels that its products read there; compiled again, if there are any. known:
    panels of weights that another program of the file has made, and those that this one makes."""
    from anyshape.compiler.driver import plan_graph
    turned = matrices(program.graph, program.weights)
    while turned:
        graph = with_panels(program.graph, turned)
        planned = plan_graph(graph, program.planned.target, program.config, needed=program.planned.plan.nonnegative)
        left = _read_otherwise(planned.plan, turned)
        if not left:
            weights = dict(program.weights)
            for places in _tied(program.weights):
                if places[0] in turned:
                    name, dtype, array = weights[places[0]]
                    key = *storage_of(weights[places[0]]), turned[places[0]]
                    if key not in known:
                        matrix = array.reshape(array.shape[:2])
                        known[key] = into_panels(matrix.T if turned[places[0]] else matrix)
                    weights |= dict.fromkeys(places, (name, dtype, known[key]))
            return dataclasses.replace(program, graph=graph, planned=planned, weights=weights)
        for places in _tied(program.weights):
            if left.intersection(places):
                turned = {place: way for place, way in turned.items() if place not in places}
    return program


def matrices(graph: Graph, weights: Mapping[int, Weight]) -> dict[int, bool]:
    """The positions of weights that only products read, as right operands; whether they read the transpose. Tied
    weights stay one: all of their places are among them, or none."""
    users, kept = graph.users(), {value.name for value in graph.roots()} | {*graph.memory} | {
        value.name for value, _ in graph.writes}

    def ways(name: str, turned: bool) -> set[bool | None]:
        """Whether products read the transpose, for all that read a value; None: somebody reads it in another way."""
        found: set[bool | None] = {None} if name in kept else set()
        for user in users.get(name, ()):
            places = [k for k, operand in enumerate(user.inputs) if isinstance(operand, Value) and operand.name == name]
            if user.op in ("matmul", "matmul_add") and places == [1]:
                found.add(turned)
            elif places == [1] and is_product(user):
                found.add(not turned)
            elif user.op == "permute" and user.attr("dims") == (1, 0):
                found |= ways(user.output.name, not turned)
            elif user.op == "broadcast" and user.output.tensor.shape[-2:] == next(user.values()).tensor.shape:
                found |= ways(user.output.name, turned)
            else:
                found.add(None)
        return found

    found: dict[int, bool] = {}
    for places in _tied(weights):
        _, dtype, array = weights[places[0]]
        if dtype != "f32" or array.ndim < 2 or array.size != prod(array.shape[:2]) or array.size == 0:
            continue
        together = set().union(*(ways(graph.inputs[place].name, False) for place in places))
        if len(together) == 1 and None not in together:
            (turned,) = together
            columns = array.shape[0 if turned else 1]
            if -(-columns // PANEL) * PANEL <= MOST_FILLED * columns:
                found |= dict.fromkeys(places, bool(turned))
    return found


def _tied(weights: Mapping[int, Weight]) -> list[list[int]]:
    """The places of each tensor."""
    places: dict[tuple[object, ...], list[int]] = {}
    for place, weight in weights.items():
        places.setdefault(storage_of(weight), []).append(place)
    return [*places.values()]


def with_panels(graph: Graph, turned: Mapping[int, bool]) -> Graph:
    """The graph with inputs in panels."""
    inputs = list(graph.inputs)
    for place, way in turned.items():
        kind = inputs[place].tensor
        inner, columns = kind.shape[1::-1] if way else kind.shape[:2]
        assert isinstance(inner, int) and isinstance(columns, int)
        inputs[place] = Value(inputs[place].name, TensorType(kind.dtype, panels_of(inner, columns, kind.dtype)))
    replay = Replay(graph.replace(inputs=tuple(inputs)), lambda replay, node: None)
    for place, way in turned.items():
        count, inner, _, _ = inputs[place].tensor.shape
        rows = replay.op("permute", inputs[place], dims=OUT_OF_PANELS)
        matrix = replay.op("reshape", rows, shape=(inner, count * PANEL))
        columns = graph.inputs[place].tensor.shape[0 if way else 1]
        if columns != matrix.tensor.shape[1]:
            matrix = replay.op("slice", matrix, dim=1, start=0, count=columns, step=1)
        found = replay.op("permute", matrix, dims=(1, 0)) if way else matrix
        shape = graph.inputs[place].tensor.shape
        replay.stand(graph.inputs[place], found if len(shape) == 2 else replay.op("reshape", found, shape=shape))
    return replay.run()


def _read_otherwise(plan: Plan, places: Collection[int]) -> set[int]:
    """The positions of inputs that a step reads in another way than as the panels of a product whose rows are
    contiguous, as routines write them."""
    inputs = {buffer.name: buffer.index for buffer in plan.buffers if buffer.is_input and buffer.index in places}
    return {inputs[window.buffer] for whole in plan.steps for step in parts_of(whole) for window in touched(step)
            if window.buffer in inputs and not (
                isinstance(step, LibraryStep) and step.op in PRODUCTS and "columns" in dict(step.attrs)
                and window is step.inputs[1] and step.outputs[0].type.layout()[-1] == 1)}
