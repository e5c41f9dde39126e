"""Dispatch and combine as parts of grouped products and convolutions: results, dropped, empty; what is fused."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import anyshape
from anyshape import route
from anyshape.backend.cpu.bytecode.products import native
from anyshape.backend.cpu.machine.target import host
from anyshape.base.config import Config
from anyshape.base.errors import IndexRangeError
from anyshape.compiler.driver import compile_graph
from anyshape.ir.parse import parse
from anyshape.ir.show import show
from anyshape.passes.routing.dispatch_fusion import dispatch_fusion
from anyshape.plan.ir.program import LibraryStep
from anyshape.runtime.torch_ops.reference_interpreter import interpret


def steps(program):
    """(op, what is fused) of the library steps of a compiled program."""
    return [(step.op, sorted({"gathered", "scattered"} & dict(step.attrs).keys()))
            for step in program.programs[0].compiled.plan.steps if isinstance(step, LibraryStep)]


BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 8e-3, torch.float16: 1e-3}
NAMES = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16"}
DTYPES = [dtype for dtype in BOUNDS if native(NAMES[dtype], host())]


class Convolutions(nn.Module):
    """Images by a router over convolutions; `after`: what a branch does besides."""

    def __init__(self, after: str = "", stride: int = 1, choices: int = 1, weighted: bool = False) -> None:
        super().__init__()
        branches = [nn.Conv2d(3, 3, 3, stride, 1) for _ in range(4)]
        if after == "relu":
            branches = [nn.Sequential(one, nn.ReLU()) for one in branches]
        if after == "twice":
            branches = [nn.Sequential(one, nn.ReLU(), nn.Conv2d(3, 3, 3, 1, 1)) for one in branches]
        if after == "residual":
            branches = [Residual() for _ in range(4)]
        self.weighted, self.choices = weighted, choices
        self.router = route.Router(self.decide, route.stack(branches, torch.zeros(1, 3, 9, 10)))

    def decide(self, x: Tensor, ids: Tensor) -> route.Routes:
        ids = torch.stack([ids[:, choice] for choice in range(self.choices)], 1)
        weights = x.flatten(1).mean(1, keepdim=True).expand(ids.shape) if self.weighted else None
        return route.Routes(ids, weights, None)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.router(x, ids)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv(x) + x).relu()


def ids_of(count: int, choices: int, drop: bool = True) -> Tensor:
    """Choices of four branches, the third of which nobody takes; some are dropped."""
    ids = torch.randint(-1 if drop else 0, 3, (count, choices))
    return torch.where(ids == 2, 3, ids)


BOTH = ["gathered", "scattered"]


@pytest.mark.parametrize(("model", "choices", "fused"), [
    pytest.param(Convolutions(), 1, [BOTH], id="plain"),
    pytest.param(Convolutions("relu", 2), 1, [BOTH], id="relu", marks=pytest.mark.full),
    pytest.param(Convolutions("twice"), 1, [["gathered"], ["scattered"]], id="twice", marks=pytest.mark.full),
    pytest.param(Convolutions("residual"), 1, [["scattered"]], id="residual", marks=pytest.mark.full),
    pytest.param(Convolutions(weighted=True), 1, [BOTH], id="weighted", marks=pytest.mark.full),
    pytest.param(Convolutions(choices=2), 2, [["gathered"]], id="two"),
])
def test_convolutions(model: nn.Module, choices: int, fused: list[list[str]]) -> None:
    torch.manual_seed(0)
    fast = anyshape.compile(model)
    with torch.no_grad():
        for count in (7, 40, 1, 0):
            x = torch.randn(count, 3, 9, 10)
            for ids in (ids_of(count, choices), torch.full((count, choices), -1)):
                torch.testing.assert_close(fast(x, ids), model(x, ids), rtol=1e-4, atol=1e-4)
        strided = torch.randn(12, 3, 9, 10)[::2]
        ids = ids_of(6, choices)
        torch.testing.assert_close(fast(strided, ids), model(strided, ids), rtol=1e-4, atol=1e-4)
        last = torch.randn(6, 3, 9, 10).to(memory_format=torch.channels_last)
        torch.testing.assert_close(fast(last, ids), model(last, ids), rtol=1e-4, atol=1e-4)
    assert [one for op, one in steps(fast) if op == "grouped_conv"] == fused


GRAPH = """
graph products(x: {dtype}[{given}], i: i64[n, {choices}], w: {dtype}[4, {weights}]) where 0 <= n, n near 300
  order, inverse, e = route_plan(i | branches=4)  i64[{rows}], i64[{rows}], i32[4]
  p = floor_div(order, {choices})  i64[{rows}]
  c = {cells}  {dtype}[n, {inner}]
  r = take(c, p | dim=0)  {dtype}[{rows}, {inner}]
  m = permute(w | dims={turn})  {dtype}[4, {inner}, {columns}]
  y = grouped(r, m, e)  {dtype}[{rows}, {columns}]
  return y
"""
CELLS = {"dense": ("n, {inner}", "reshape(x | shape=[n, {inner}])"),
         "turned": ("{inner}, n", "permute(x | dims=[1, 0])"),
         "apart": ("n, 2*{inner}", "slice(x | dim=1, start=0, count={inner}, step=2)")}


SOME = {torch.float32: "dense", torch.bfloat16: "turned", torch.float64: "apart"}


@pytest.mark.parametrize(("dtype", "cells"), [
    pytest.param(dtype, cells, marks=[] if SOME.get(dtype) == cells else pytest.mark.full)
    for dtype in DTYPES for cells in CELLS])
def test_products(dtype: torch.dtype, cells: str) -> None:
    """Rows in panels, by the library, and few; read through the order of a route, of any strides."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    try:
        for number, (inner, columns) in enumerate([(256, 96), (67, 33), (600, 70), (1, 5)]):
            choices, turned = 1 + number % 2, number % 3 == 0
            lying, view = (text.format(inner=inner) for text in CELLS[cells])
            graph, exact = (parse(GRAPH.format(
                dtype=name, given=lying.replace(f"2*{inner}", str(2 * inner)), choices=choices, cells=view,
                inner=inner, columns=columns, rows="n" if choices == 1 else "2*n",
                weights=f"{columns}, {inner}" if turned else f"{inner}, {columns}",
                turn="[0, 2, 1]" if turned else "[0, 1, 2]")) for name in (NAMES[dtype], "f64"))
            fused = dispatch_fusion(exact, Config())
            compiled = compile_graph(graph, Config())
            run = compiled.executable
            assert [dict(step.attrs) for step in compiled.plan.steps if getattr(step, "op", "") == "grouped"] == [
                {"gathered": True}]
            for threads, count in ((1, 300), (2, 300), (2, 9), (1, 1), (1, 0)):
                torch.set_num_threads(threads)
                shape = {"dense": (count, inner), "turned": (inner, count), "apart": (count, 2 * inner)}[cells]
                x = torch.randn(shape, dtype=dtype)
                weights = torch.randn(4, *((columns, inner) if turned else (inner, columns)), dtype=dtype)
                for ids in (ids_of(count, choices), torch.full((count, choices), -1)):
                    (found,) = run([x, ids, weights])
                    given = [x.double(), ids, weights.double()]
                    (wanted,), (same,) = (interpret(one, given)[0] for one in (exact, fused))
                    assert torch.equal(wanted, same)
                    scale = 1 + float(wanted.abs().amax()) if wanted.numel() else 1
                    torch.testing.assert_close(found.double(), wanted, rtol=BOUNDS[dtype], atol=BOUNDS[dtype] * scale)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("equation", [
    "y = grouped(x, w, e, o | gathered)  f32[m, 6]",
    "c = reshape(x | shape=[n, 3, 2])  f32[n, 3, 2]\n  k = reshape(w | shape=[2, 6, 3, 2])  f32[2, 6, 3, 2]\n"
    "  y = grouped_conv(c, k, e, o | stride=[1], padding=[0], dilation=[1], gathered)  f32[m, 6, 1]"])
def test_an_order_is_checked(equation: str) -> None:
    """Only a graph that is written by hand can have a wrong one."""
    run = compile_graph(parse(f"""
graph wrong(x: f32[n, 6], w: f32[2, 6, 6], e: i32[2], o: i64[m]) where 1 <= m, 1 <= n, m near 5, n near 4
  {equation}
  return y
"""), Config()).executable
    x, w, e = torch.randn(4, 6), torch.randn(2, 6, 6), torch.tensor([2, 5], dtype=torch.int32)
    run([x, w, e, torch.tensor([3, 0, 3, 1, 2])])
    for order in ([0, 1, 2, 3, 4], [0, 1, -1, 2, 3]):
        with pytest.raises(IndexRangeError):
            run([x, w, e, torch.tensor(order)])


def test_rows_that_others_read_are_dispatched() -> None:
    """They are in memory in any case: what reads them reads them there."""
    text = """
graph shared(x: f32[n, 6], i: i64[n, 1], w: f32[4, 6, 6]) where 0 <= n, n near 4
  order, inverse, e = route_plan(i | branches=4)  i64[n], i64[n], i32[4]
  r = take(x, order | dim=0)  f32[n, 6]
  y = grouped(r, w, e)  f32[n, 6]
  z = add(y, r)  f32[n, 6]
  return z
"""
    graph = parse(text)
    assert dispatch_fusion(graph, Config()) is graph
    alone = text.replace("add(y, r)", "add(y, 1.0)")
    assert "gathered" in show(dispatch_fusion(parse(alone), Config()))
    second = "  o, v, f = route_plan(j | branches=4)  i64[n], i64[n], i32[4]\n  r = take(x, o"
    other = parse(alone.replace("w: f32", "j: i64[n, 1], w: f32").replace("  r = take(x, order", second))
    assert dispatch_fusion(other, Config()) is other  # the order is another route's
