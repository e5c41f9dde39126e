"""Sharding rules: random programs and rows, dealt out in random ways, against the same on one rank."""
from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from anyshape.base.errors import VerifyError
from anyshape.dist.mesh import mesh_of
from anyshape.dist.partition import partition
from anyshape.dist.placement import Shard
from anyshape.dist.reshape import reshaped
from anyshape.dist.rules import Factor, factors
from anyshape.dist.sharding import Sharding
from anyshape.ir.build import Builder
from anyshape.ir.graph import Graph, Value
from anyshape.ir.types import SizeType, TensorType
from anyshape.ir.verify import verify
from anyshape.runtime.collectives.simulate import local_inputs, simulate
from anyshape.runtime.torch_ops.reference_interpreter import interpret
from anyshape.sym.expr import symbol
from anyshape.torch_compat.dtypes import TORCH_DTYPES
from fuzzing import in_double, make_graph, make_inputs, shapes_of


def dealt_out(graph: Graph, draw: random.Random, part: float = 0.8) -> Sharding:
    """Random placements of inputs, over 2 to 4 ranks."""
    placed = tuple((v.name, Shard(draw.randrange(v.tensor.rank))) for v in graph.inputs
                   if isinstance(v.type, TensorType) and v.tensor.rank and draw.random() < part)
    return Sharding("x", draw.choice((2, 3, 4)), placed)


def check(graph: Graph, sharding: Sharding, inputs: list[Any]) -> set[str]:
    """Runs the graph on one rank and on all; names of the ops that were dealt out."""
    local = partition(graph, sharding)
    verify(local.graph)
    wanted, _, _ = interpret(graph, [x.clone() if isinstance(x, Tensor) else x for x in inputs])
    mesh = mesh_of(x=sharding.ranks)
    every = [local_inputs([local], graph, inputs, {"x": rank}) for rank in range(sharding.ranks)]
    for outputs, _ in simulate(mesh, local.graph, every):
        for found, right in zip(outputs, wanted, strict=True):
            if isinstance(right, Tensor):
                torch.testing.assert_close(found, right, rtol=1e-7, atol=1e-7, equal_nan=True)
    layouts = dict(local.layouts)
    return {node.op for node in graph.nodes if any(str(layouts[v.name]) != "R" for v in node.outputs)}


def random_programs(first: int, count: int) -> Iterator[tuple[Graph, random.Random, list[Any]]]:
    for seed in range(first, first + count):
        graph = in_double(make_graph(seed))
        for sizes in shapes_of(graph, 1, seed):
            try:
                inputs = make_inputs(graph, sizes, seed)
                interpret(graph, [x.clone() if isinstance(x, Tensor) else x for x in inputs])
            except (IndexError, ZeroDivisionError, VerifyError):
                continue  # not this program's sizes
            yield graph, random.Random(seed), inputs


def test_random_programs_are_right_on_all_ranks() -> None:
    dealt: set[str] = set()
    for graph, draw, inputs in random_programs(0, 100):
        dealt |= check(graph, dealt_out(graph, draw), inputs)
    assert {"matmul", "sum", "amax", "take", "reshape", "concat", "put_add", "where", "cast", "pad"} <= dealt


@pytest.mark.full
@pytest.mark.parametrize("first", range(100, 2100, 200))
def test_many_random_programs_are_right_on_all_ranks(first: int) -> None:
    for graph, draw, inputs in random_programs(first, 200):
        check(graph, dealt_out(graph, draw), inputs)


# ---- rows that random programs have not


def attention(b: Builder, draw: random.Random, backward: bool) -> tuple[Value, ...]:
    batch, heads, groups, rows, columns, depth = draw.randint(1, 4), *draw.choice(((4, 2), (4, 4), (6, 1), (8, 4))), \
        draw.randint(1, 6), draw.randint(1, 6), draw.choice((4, 6))
    def queries(name: str) -> Value:
        return b.input(name, TensorType("f64", (batch, heads, rows, depth)))
    def keys(name: str) -> Value:
        return b.input(name, TensorType("f64", (batch, groups, columns, depth)))
    mask = [b.input("mask", TensorType("f64", (draw.choice((1, batch)), draw.choice((1, heads)), rows, columns)))
            for _ in range(draw.randint(0, 1))]
    attrs = {"causal": draw.random() < 0.5, "scale": None}
    operands = queries("q"), keys("k"), keys("v")
    results = b.multi("attention", *operands, *mask, **attrs)
    if not backward:
        return results
    gradient = queries("gradient")
    turned = b.op("permute", results[0], dims=(0, 2, 1, 3))
    products = b.op("sum", b.op("mul", gradient, turned), dims=(3,), keep=False)
    return b.multi("attention_backward", gradient, *operands, results[1], products, *mask, **attrs)


def convolution(b: Builder, draw: random.Random) -> tuple[Value, ...]:
    groups = draw.choice((1, 1, 2))
    x = b.input("x", TensorType("f64", (draw.randint(1, 4), draw.randint(3, 6), draw.randint(3, 5), 4)))
    w = b.input("w", TensorType("f64", (6, 4 // groups, 3, 2)))
    bias = [b.input("bias", TensorType("f64", (6,))) for _ in range(draw.randint(0, 1))]
    return (b.op("convolution", x, w, *bias, stride=(1, 2), padding=(1, 0), dilation=(1, 1), groups=groups),)


def grouped(b: Builder, draw: random.Random) -> tuple[Value, ...]:
    x = b.input("x", TensorType("f64", (6, 4)))
    ends = b.op("mul", b.op("iota", count=3, start=1, step=1, dtype="i64"), 2)
    if draw.random() < 0.5:
        return (b.op("grouped", x, b.input("w", TensorType("f64", (3, 4, 5))), ends),)
    return (b.op("grouped_inner", b.op("permute", x, dims=(1, 0)), b.input("y", TensorType("f64", (6, 5))), ends),)


def scattered(b: Builder, draw: random.Random) -> tuple[Value, ...]:
    op = draw.choice(("scatter", "scatter_add", "scatter_mul", "scatter_amax", "overwrite"))
    rows, columns = draw.randint(2, 6), draw.randint(2, 5)
    x = b.input("x", TensorType("f64", (rows, columns)))
    if draw.random() < 0.5:
        x = b.op("full", 0.0, shape=(rows, columns), dtype="f64")
    dim = draw.randrange(2)
    if op == "overwrite":
        shape = tuple(size - (d == dim) for d, size in enumerate((rows, columns)))
        return (b.op(op, x, b.input("y", TensorType("f64", shape)), dim=dim, start=1, step=1),)
    y = b.input("y", TensorType("f64", (rows, columns)))
    index = b.input("index", TensorType("i64", (rows, columns)))
    return (b.op(op, x, y, b.op("remainder", index, (rows, columns)[dim]), dim=dim),)


def lookup(b: Builder, draw: random.Random) -> tuple[Value, ...]:
    rows = draw.randint(3, 9)
    table = b.input("table", TensorType("f64", (rows, 3)))
    if draw.random() < 0.5:
        index = b.op("remainder", b.input("index", TensorType("i64", (4, 2))), rows)
        return (b.op("take", table, index, dim=0),)
    index = b.op("remainder", b.input("index", TensorType("i64", (5, 3))), rows)
    return (b.op("gather", table, index, dim=0),)


def scanned(b: Builder, draw: random.Random) -> tuple[Value, ...]:
    x = b.input("x", TensorType("f64", (4, 5, 3)))
    if draw.random() < 0.5:
        return (b.op("cumsum", x, dim=draw.randrange(3)),)
    return b.multi("topk", x, k=2)


def summed_twice(b: Builder, draw: random.Random) -> tuple[Value, ...]:
    """Partial sums through what is linear in them, and through what is not."""
    x = b.input("x", TensorType("f64", (draw.randint(1, 5), 4, 6)))
    w = b.input("w", TensorType("f64", (4, 6)))
    y = b.op("sum", x, dims=(0,), keep=False)
    steps: tuple[Callable[[Value], Value], ...] = (
        lambda v: b.op("mul", v, w), lambda v: b.op("add", v, w), lambda v: b.op("mul", v, v), lambda v: b.op("neg", v),
        lambda v: b.op("div", v, 3.0), lambda v: b.op("exp", b.op("mul", v, 0.1)), lambda v: b.op("sub", v, v),
        lambda v: b.op("where", b.op("gt", w, 0.0), v, 0.0), lambda v: b.op("maximum", v, w),
        lambda v: b.op("cast", b.op("cast", v, dtype="f32"), dtype="f64"))
    for _ in range(4):
        y = draw.choice(steps)(y)
    return (b.op("matmul", y, b.op("permute", w, dims=(1, 0))), y)


ROWS: dict[str, Callable[[Builder, random.Random], tuple[Value, ...]]] = {
    "attention": lambda b, draw: attention(b, draw, False),
    "attention_backward": lambda b, draw: attention(b, draw, True),
    "convolution": convolution, "grouped": grouped, "scatter": scattered, "lookup": lookup, "scan": scanned,
    "partial": summed_twice,
}


def cases(name: str, count: int) -> None:
    for seed in range(count):
        draw = random.Random(seed)
        builder = Builder(name)
        graph = builder.finish(ROWS[name](builder, draw))
        generator = torch.Generator().manual_seed(seed)
        inputs = [torch.randint(0, 99, v.tensor.shape, generator=generator) if v.tensor.dtype == "i64" else
                  torch.randn(v.tensor.shape, generator=generator, dtype=TORCH_DTYPES[v.tensor.dtype])
                  for v in graph.inputs if not isinstance(v.type, SizeType)]
        check(graph, dealt_out(graph, draw), inputs)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_rows_are_right_on_all_ranks(name: str) -> None:
    cases(name, 12)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(ROWS))
def test_many_cases_of_rows_are_right_on_all_ranks(name: str) -> None:
    cases(name, 250)


# ---- the rules themselves


def test_rules_come_from_bodies() -> None:
    b = Builder("g")
    m, n = symbol("m"), symbol("n")
    x, y = b.input("x", TensorType("f32", (m, n))), b.input("y", TensorType("f32", (n,)))
    b.op("add", x, y)
    assert factors(b.nodes[-1]) == (Factor((0, None), (0,)), Factor((1, 0), (1,)))
    b.op("sum", x, dims=(1,), keep=False)
    assert factors(b.nodes[-1]) == (Factor((0,), (0,)), Factor((1,), ("add",)))
    b.op("pad", x, low=(1, 0), high=(0, 0), value=0.0)
    assert factors(b.nodes[-1]) == (Factor((1,), (1,)),)
    b.op("matmul", x, b.op("permute", x, dims=(1, 0)))
    assert factors(b.nodes[-1]) == (Factor((0, None), (0,)), Factor((1, 0), ("add",)), Factor((None, 1), (1,)))
    b.op("iota", count=n, start=0, step=1, dtype="i64")
    assert factors(b.nodes[-1]) == ()


def test_a_reshape_names_the_factor() -> None:
    b, s = symbol("b"), symbol("s")
    assert reshaped((b, s, 32), (b * s, 32), Shard(0, 1, b)) == Shard(0, 1, b)
    assert reshaped((b, s, 32), (b * s, 32), Shard(1, 1, s)) == Shard(0, b, s)
    assert reshaped((b * s, 32), (b, s, 4, 8), Shard(1, 1, 2)) == Shard(2, 1, 2)
    assert reshaped((b * s, 32), (b, s, 4, 8), Shard(0, b, s)) == Shard(1, 1, s)
    assert reshaped((12,), (3, 4), Shard(0, 1, 12)) is None
