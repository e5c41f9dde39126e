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
from anyshape.runtime.torch_ops import extern_calls
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


# ---- attention: PyTorch's operators, as they are on a device

def test_a_bias_is_laid_out_as_the_kernels_want_it() -> None:
    seen: list[Any] = []

    def kernel(query: Any, key: Any, value: Any, bias: Any, *rest: Any, **more: Any) -> Any:
        seen.append(bias)
        return query, torch.zeros(()), torch.tensor(3), torch.tensor(5)

    call = extern_calls._device_attention(kernel)
    x, bias = torch.randn(2, 4, 37, 8), torch.randn(2, 1, 37, 37).expand(2, 4, 37, 37)
    for drop in (0.0, 0.5):
        found = call(x, x, x, bias, True, dropout_p=drop)
        assert [one.device for one in found[2:]] == [x.device] * 2 and (int(found[2]) == 3 or not drop)
    assert seen[0].stride()[1:] == (0, 48, 1) and torch.equal(seen[0], bias)
    call(x, x, x, seen[0], True)
    call(x, x, x, None, True)
    assert seen[2] is seen[0] and seen[3] is None


def test_cudnn_does_no_backward_of_one_element() -> None:
    call = extern_calls._library_attention_backward(lambda *given: "cuDNN")
    q, k, v = (torch.randn(2, 3, 1, 8, requires_grad=True) for _ in range(3))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    gradient = torch.randn_like(out)
    wanted = torch.autograd.grad(out, (q, k, v), gradient)
    nothing = (None,) * 7
    found = call(gradient, q, k, v, out, None, *nothing, 0.0, False)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert call(gradient, q, k, v, out, None, *nothing, 0.1, False) == "cuDNN"


def test_results_that_are_no_tensors_are_no_results() -> None:
    """Flash attention returns the longest sequences among its tensors."""
    a, b = torch.zeros(1), torch.ones(1)
    assert extern_calls.results_of((a, b, None, None, 7, 7, a), 3) == (a, b, a)
