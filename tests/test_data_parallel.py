"""Data parallelism of a graph: what is proven of its rows holds when calls are joined, and what does not hold is not
proven."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from anyshape.base.config import Config
from anyshape.base.errors import AnyShapeError
from anyshape.dist.data_parallel import ParallelSize, parallel_size
from anyshape.ir.graph import Graph, Value
from anyshape.ir.parse import parse
from anyshape.ir.types import TensorType
from anyshape.ir.verify import verify
from anyshape.passes.dce import dce
from anyshape.runtime.torch_ops.reference_interpreter import interpret
from fuzzing import SYMBOLS, in_double, make_graph, make_inputs

# lines of a graph of x f32[n, t, 4], w f32[4, 4], m f32[n, t]; its result; the dim of the result that is n
INDEPENDENT = {
    "a product with weights": ("y = matmul(x, v) f32[n, t, 4]", "y", 0),
    "a sum over other dims": ("y = sum(x | dims=[1, 2], keep=False) f32[n]", "y", 0),
    "another dim of the result": ("y = permute(x | dims=[1, 2, 0]) f32[t, 4, n]", "y", 2),
    "rows in blocks": ("y = reshape(x | shape=[n*t, 4]) f32[n*t, 4]\n  z = matmul(y, w) f32[n*t, 4]", "z", 0),
    "a mask of two inputs": ("e = reshape(m | shape=[n, t, 1]) f32[n, t, 1]\n  y = mul(x, e) f32[n, t, 4]", "y", 0),
    "positions of another dim": ('i = iota(| count=t, start=0, step=1, dtype="f32") f32[t]\n'
                                 "  y = mul(m, i) f32[n, t]", "y", 0),
    "numbers of the batch's size": ('f = full(1.0 | shape=[n, t], dtype="f32") f32[n, t]\n'
                                    "  y = add(m, f) f32[n, t]", "y", 0),
    "a result that no row makes": ("y = neg(w) f32[4, 4]", "y", None),
    "a mean over another dim": ("s = sum(m | dims=[1], keep=False) f32[n]\n  y = div(s, t) f32[n]", "y", 0),
}
DEPENDENT = {
    "a sum over the rows": ("y = sum(x | dims=[0], keep=False) f32[t, 4]", "y"),
    "a cumulative sum over the rows": ("y = cumsum(m | dim=0) f32[n, t]", "y"),
    "positions of rows": ('i = iota(| count=n, start=0, step=1, dtype="f32") f32[n]\n  e = reshape(i | shape=[n, 1]) '
                          "f32[n, 1]\n  y = mul(m, e) f32[n, t]", "y"),
    "the number of rows as a number": ("y = div(m, n) f32[n, t]", "y"),
    "the number of rows as a result": ("y = neg(m) f32[n, t]", "y, n"),
    "rows by rows": ("p = permute(m | dims=[1, 0]) f32[t, n]\n  y = matmul(m, p) f32[n, n]", "y"),
    "a slice from where rows say": ("y = slice(m | dim=1, start=n, count=2, step=1) f32[n, 2]", "y"),
    "some of the rows": ("y = slice(m | dim=0, start=1, count=n - 1, step=1) f32[n - 1, t]", "y"),
    "rows twice": ("y = concat(m, m | dim=0) f32[2*n, t]", "y"),
    "blocks that are not outermost": ("p = permute(x | dims=[1, 0, 2]) f32[t, n, 4]\n"
                                      "  y = reshape(p | shape=[t*n, 4]) f32[t*n, 4]", "y"),
}


def graph_of(lines: str, result: str) -> Graph:
    v = "  v = broadcast(w | shape=[n, 4, 4]) f32[n, 4, 4]\n" if "v)" in lines else ""
    graph = parse(f"graph g(x: f32[n, t, 4], m: f32[n, t], w: f32[4, 4]) where 1 <= n <= 64, 1 <= t\n{v}  {lines}\n"
                  f"  return {result}\n")
    verify(graph)
    return graph


def proven(graph: Graph) -> ParallelSize | None:
    """What is proven of n."""
    found = parallel_size(graph)
    return found if found is not None and found.symbol == "n" else None


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_rows_are_proven(name: str) -> None:
    lines, result, dim = INDEPENDENT[name]
    assert proven(graph_of(lines, result)) == ParallelSize("n", (0, 0, None), (dim,), 1, 64)


@pytest.mark.parametrize("name", DEPENDENT)
def test_dependent_rows_are_not(name: str) -> None:
    assert proven(graph_of(*DEPENDENT[name])) is None


def single_results(seed: int) -> Iterator[Graph]:
    """Of a random program, one for each of its values."""
    graph = in_double(make_graph(seed))
    tensors = tuple(value for value in graph.inputs if isinstance(value.type, TensorType))
    for node in graph.nodes:
        for value in node.outputs:
            if isinstance(value.type, TensorType):
                yield dce(graph.replace(inputs=tensors, outputs=(value,), output_strides=(None,)), Config())


def check_joined(graph: Graph, size: ParallelSize, seed: int) -> bool:
    """Whether calls of 2 and 3 rows could be made; then the call of all 5 has given the same."""
    low, high = graph.facts.range_of(size.symbol)
    ranges = {name: graph.facts.range_of(name) for name in SYMBOLS}
    others = {name: min(max(least, 3), 5 if most is None else most) for name, (least, most) in ranges.items()}
    calls: list[list[Any]] = [make_inputs(graph, others | {size.symbol: rows}, seed + rows) for rows in (2, 3)]
    for place, dim in enumerate(size.inputs):
        if dim is None:
            calls[1][place] = calls[0][place]
    joined = [calls[0][place] if dim is None else torch.cat([calls[0][place], calls[1][place]], dim)
              for place, dim in enumerate(size.inputs)]
    if low > 2 or (high is not None and high < 5):
        return False
    try:
        alone = [interpret(graph, [one.clone() for one in call])[0][0] for call in calls]
        together = interpret(graph, joined)[0][0]
    except (AnyShapeError, IndexError, ZeroDivisionError):
        return False  # not this program's sizes or numbers
    (dim,) = size.outputs
    wanted = alone[0] if dim is None else torch.cat(alone, dim)
    torch.testing.assert_close(together, wanted, rtol=1e-9, atol=1e-9, equal_nan=True)
    return True


def random_programs(first: int, count: int) -> set[str]:
    """The ops of programs whose rows were proven independent, and were."""
    seen: set[str] = set()
    for seed in range(first, first + count):
        for graph in single_results(seed):
            size = parallel_size(graph)
            if size is not None and any(size.inputs[place] is not None for place in range(len(size.inputs))) \
                    and isinstance(graph.outputs[0], Value) and check_joined(graph, size, seed):
                seen |= {node.op for node in graph.nodes}
    return seen


def test_what_is_proven_of_random_programs_holds() -> None:
    assert {"reshape", "broadcast", "permute", "where", "cast"} <= random_programs(0, 40)


@pytest.mark.full
@pytest.mark.parametrize("first", range(1000, 4000, 500))
def test_what_is_proven_of_many_random_programs_holds(first: int) -> None:
    assert {"matmul", "sum", "take"} <= random_programs(first, 500)
