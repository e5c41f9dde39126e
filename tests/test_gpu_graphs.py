"""Graphs whose tensors are on a GPU, traced without one: the same operators are compiled as on the CPU."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from anyshape.frontend.aten.decompositions import table
from anyshape.frontend.importer.fx_to_graph import to_graph
from anyshape.frontend.importer.graph_inputs import Notes
from anyshape.ir.graph import Graph
from device_cases import FUNCTIONS

BEYOND = {"draw", "transpose", "gather", "concatenate", "scatter"}  # drawn by PyTorch, or not traced without a GPU


def imported(function: Callable[..., Any], device: str, *shapes: tuple[int, ...]) -> tuple[Graph, Notes]:
    """The graph of a function of float32 tensors at symbolic sizes."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    with FakeTensorMode(shape_env=ShapeEnv()), torch.no_grad():
        given = [torch.empty(shape, device=device) for shape in shapes]
        traced = make_fx(function, decomposition_table=table(), tracing_mode="symbolic", _allow_non_fake_inputs=True)
        return to_graph(traced(*given), "graph")


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in BEYOND])
def test_externs_are_those_of_the_cpu(name: str) -> None:
    found, wanted = (imported(FUNCTIONS[name], device, (17, 40)) for device in ("cuda:0", "cpu"))
    assert [(op, why) for op, why, _ in found[1].externs] == [(op, why) for op, why, _ in wanted[1].externs]
    assert {value.tensor.device for node in found[0].nodes for value in node.outputs} == {"cuda:0"}


def test_a_number_of_sizes() -> None:
    """The factor of a batch norm's variance is a Python float that sizes give."""
    graph, notes = imported(lambda x: x * (x.shape[0] / (x.shape[0] - 1)), "cuda:0", (17, 40))
    assert not notes.externs and {value.tensor.device for node in graph.nodes for value in node.outputs} == {"cuda:0"}


def test_a_dropout_is_one_operator() -> None:
    """Its kernel draws other numbers than any other operator does."""
    found = [imported(lambda x: torch.nn.functional.dropout(x, 0.3), device, (17, 40))[1].externs
             for device in ("cuda:0", "cpu")]
    assert [[name for name, _, _ in externs] for externs in found] == [["aten.native_dropout.default"], []]


def test_a_number_that_became_a_tensor() -> None:
    """Decompositions make tensors of numbers on the CPU; they meet those of the device, and are compiled there."""
    graph, notes = imported(lambda x: torch.where(x > 0, x, torch.scalar_tensor(2.0)), "cuda:0", (17, 40))
    assert not notes.externs and {value.tensor.device for node in graph.nodes for value in node.outputs} == {"cuda:0"}
