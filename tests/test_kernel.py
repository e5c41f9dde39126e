"""Fusion and lowering: the loop programs of the usual patterns as golden text, and their numbers at awkward sizes."""
from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Callable

import pytest
import torch

import anyshape.ops.table  # noqa: F401  (fills the op table)
from anyshape.backend.cpu.machine.target import HARDWARE
from anyshape.base.config import Config
from anyshape.base.errors import IndexRangeError
from anyshape.compiler.driver import compile_graph
from anyshape.ir.graph import Graph, Value
from anyshape.ir.op import row
from anyshape.ir.parse import parse
from anyshape.ir.types import TensorType
from anyshape.kernel.fusion.result import FusedKernel, Fusion, FusionBlocklist, NotFusable, fusable
from anyshape.kernel.fusion.topological_order import ordered
from anyshape.kernel.fusion.vertical import fuse
from anyshape.kernel.loop_ir.aliasing import overwritable
from anyshape.kernel.loop_ir.directives import Vectorize
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram, Param, Stage
from anyshape.kernel.loop_ir.show import show
from anyshape.kernel.lowering.loop_nest import Nest, program_of
from anyshape.runtime.torch_ops.reference_interpreter import interpret
from anyshape.sym.expr import evaluate, symbol
from anyshape.torch_compat.dtypes import TORCH_DTYPES

SIZES = (0, 1, 3, 17, 64)
GRAPHS = {name: textwrap.dedent(text) for name, text in {
    "softmax": """
        graph softmax(x: f32[b, n]) where 0 <= b, 1 <= n
          m = amax(x | dims=[1], keep)  f32[b, 1]
          d = sub(x, m)                 f32[b, n]
          e = exp(d)                    f32[b, n]
          s = sum(e | dims=[1], keep)   f32[b, 1]
          y = div(e, s)                 f32[b, n]
          return y
        """,
    "layer_norm": """
        graph layer_norm(x: f32[b, n], w: f32[n], v: f32[n]) where 0 <= b, 1 <= n
          c = full(n | shape=[], dtype="f32")  f32[]
          s = sum(x | dims=[1], keep)          f32[b, 1]
          m = div(s, c)                        f32[b, 1]
          d = sub(x, m)                        f32[b, n]
          q = mul(d, d)                        f32[b, n]
          r = sum(q | dims=[1], keep)          f32[b, 1]
          a = div(r, c)                        f32[b, 1]
          e = add(a, 0.5)                      f32[b, 1]
          i = rsqrt(e)                         f32[b, 1]
          h = mul(d, i)                        f32[b, n]
          g = mul(h, w)                        f32[b, n]
          y = add(g, v)                        f32[b, n]
          return y, m, i
        """,
    "layer_norm_backward": """
        graph backward(g: f32[b, n], x: f32[b, n], w: f32[n], m: f32[b, 1], i: f32[b, 1]) where 0 <= b, 1 <= n
          c = full(n | shape=[], dtype="f32")  f32[]
          d = sub(x, m)                        f32[b, n]
          h = mul(d, i)                        f32[b, n]
          u = mul(g, w)                        f32[b, n]
          s = sum(u | dims=[1], keep)          f32[b, 1]
          p = mul(u, h)                        f32[b, n]
          t = sum(p | dims=[1], keep)          f32[b, 1]
          a = div(s, c)                        f32[b, 1]
          e = div(t, c)                        f32[b, 1]
          f = mul(h, e)                        f32[b, n]
          j = sub(u, a)                        f32[b, n]
          k = sub(j, f)                        f32[b, n]
          gx = mul(k, i)                       f32[b, n]
          o = mul(g, h)                        f32[b, n]
          gw = sum(o | dims=[0], keep=False)              f32[n]
          gv = sum(g | dims=[0], keep=False)              f32[n]
          return gx, gw, gv
        """,
    "rotary": """
        graph rotary(x: f32[b, t, 8], cosine: f32[t, 8], sine: f32[t, 8]) where 0 <= b, 0 <= t
          l = slice(x | dim=2, start=0, count=4, step=1)  f32[b, t, 4]
          r = slice(x | dim=2, start=4, count=4, step=1)  f32[b, t, 4]
          o = neg(r)                                      f32[b, t, 4]
          h = concat(o, l | dim=2)                        f32[b, t, 8]
          p = mul(x, cosine)                              f32[b, t, 8]
          q = mul(h, sine)                                f32[b, t, 8]
          y = add(p, q)                                   f32[b, t, 8]
          return y
        """,
    "transposes": """
        graph transposes(x: f32[b, t, n], y: f32[n, t, b]) where 0 <= b, 0 <= t, 0 <= n
          p = permute(x | dims=[2, 1, 0])  f32[n, t, b]
          s = add(p, y)                    f32[n, t, b]
          r = permute(s | dims=[1, 0, 2])  f32[t, n, b]
          z = exp(r)                       f32[t, n, b]
          return z
        """,
    "embedding": """
        graph embedding(w: f32[n, 6], i: i64[b], x: f32[b, 6]) where 0 <= b, 1 <= n
          e = index(w, i | dims=[0])  f32[b, 6]
          y = add(e, x)               f32[b, 6]
          return y
        """,
    "embedding_backward": """
        graph embedding_backward(w: f32[n, 6], g: f32[b, 6], s: f32[b, 1], i: i64[b]) where 0 <= b, 1 <= n
          c = checked(i | size=n, wrap)                    i64[b]
          z = full(0.0 | shape=[n, 6], dtype="f32")        f32[n, 6]
          m = mul(g, s)                                    f32[b, 6]
          y = put_add(z, m, c | dims=[0])                  f32[n, 6]
          r = add(y, w)                                    f32[n, 6]
          return r, y
        """,
    "scatter_rows": """
        graph scatter_rows(x: f32[b, n], y: f32[b, m], i: i64[b, m]) where 0 <= b, 1 <= n, 0 <= m
          c = checked(i | size=n, wrap)            i64[b, m]
          e = exp(y)                               f32[b, m]
          a = scatter_add(x, e, c | dim=1)         f32[b, n]
          s = scatter(a, y, c | dim=1)             f32[b, n]
          return s
        """,
    "split": """
        graph split(x: f32[b, t, 12], y: f32[b, 3, t, 4]) where 0 <= b, 0 <= t
          r = reshape(x | shape=[b, t, 3, 4])    f32[b, t, 3, 4]
          p = permute(r | dims=[0, 2, 1, 3])     f32[b, 3, t, 4]
          a = add(p, y)                          f32[b, 3, t, 4]
          q = permute(a | dims=[0, 2, 1, 3])     f32[b, t, 3, 4]
          z = reshape(q | shape=[b, t, 12])      f32[b, t, 12]
          e = exp(z)                             f32[b, t, 12]
          return e
        """,
    "column_sum": """
        graph column_sum(x: f32[b, n], y: f32[n]) where 0 <= b, 0 <= n
          q = mul(x, x)            f32[b, n]
          s = sum(q | dims=[0], keep=False)   f32[n]
          z = add(s, y)            f32[n]
          return z
        """,
    "bias_gradient": """
        graph bias_gradient(g: f32[b, 256], x: f32[b, 256]) where 0 <= b
          c = gt(x, 0.0)                           bool[b, 256]
          d = where(c, g, 0.0)                     f32[b, 256]
          s = sum(d | dims=[0], keep=False)        f32[256]
          h = cast(s | dtype="bf16")               bf16[256]
          return d, h
        """,
    "siblings": """
        graph siblings(x: f32[b, n], y: f32[n]) where 0 <= b, 0 <= n
          e = exp(x)     f32[b, n]
          m = mul(x, y)  f32[b, n]
          return e, m
        """,
    "between": """
        graph between(x: f32[n, n]) where 0 <= n
          e = exp(x)        f32[n, n]
          m = matmul(e, e)  f32[n, n]
          y = add(m, x)     f32[n, n]
          return y
        """,
    "refused": """
        graph refused(x: f32[b, n]) where 0 <= b, 1 <= n
          s = sum(x | dims=[1], keep)      f32[b, 1]
          t = tanh(s)                      f32[b, 1]
          d = mul(x, t)                    f32[b, n]
          r = sum(d | dims=[0], keep)      f32[1, n]
          y = add(d, r)                    f32[b, n]
          return y
        """,
    "row_buffer": """
        graph row_buffer(t0: f32[b, n], t1: f32[b, n]) where 0 <= b, 1 <= n
          e = tanh(t0)                     f32[b, n]
          m = amax(e | dims=[1], keep)     f32[b, 1]
          d = sub(e, m)                    f32[b, n]
          y = add(d, t1)                   f32[b, n]
          return y
        """,
}.items()}


def fused(graph: Graph, limit: int = 128, refused: FusionBlocklist | None = None, enabled: bool = True) -> Fusion:
    """The fusion of a graph, of which only the results and the operands of other nodes must be stored."""
    refused = refused or FusionBlocklist()
    outside = [value for node in graph.nodes if not fusable(node, refused) for value in node.values()]
    scatters = [node for node in graph.nodes if row(node).kind == "scatter"]
    outside += [value for node in scatters for value in (node.inputs[0], *node.inputs[2:])]
    required = {value.name: value for value in (*graph.outputs, *outside) if isinstance(value, Value)}
    return fuse(graph, required, {}, {}, hardware=HARDWARE, limit=limit, refused=refused, enabled=enabled)


def text_of(fusion: Fusion) -> str:
    """Kernels with the values behind their parameters and sizes, single nodes, refusals."""
    parts = []
    for item in fusion.items:
        if isinstance(item, FusedKernel):
            names = ", ".join(f"p{k} {name or 'status'}" for k, name in enumerate(item.lowered.values))
            parts.append(f"{show(item.lowered.program)}\n  binds {names}; {', '.join(map(str, item.lowered.sizes))}\n")
        else:
            parts.append(f"node {item.op} -> {', '.join(v.name for v in item.outputs)}\n")
    parts += [f"refused {refusal.value}: {refusal.reason}\n" for refusal in fusion.refusals]
    return "\n".join(parts)


@pytest.mark.parametrize("name", GRAPHS)
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    graph = parse(GRAPHS[name])
    text = text_of(fused(graph))
    assert text == text_of(fused(parse(GRAPHS[name])))
    golden(f"kernel/{name}.txt", text)


# ---- numbers


def inputs_of(graph: Graph, sizes: dict[str, int]) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    found = []
    for value in graph.inputs:
        assert isinstance(value.type, TensorType)
        shape = [int(evaluate(size, sizes)) for size in value.type.shape]
        if value.type.dtype == "i64":
            found.append(torch.randint(-sizes["n"], sizes["n"], shape, generator=draw))
        else:
            found.append(torch.randn(shape, generator=draw, dtype=TORCH_DTYPES[value.type.dtype]))
    return found


@pytest.mark.parametrize("enabled", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("name", GRAPHS)
def test_numbers(name: str, enabled: bool) -> None:
    """What the road makes of a graph equals the reference, each symbol at each size, the others at 3 or 17."""
    graph = parse(GRAPHS[name])
    run = compile_graph(graph, Config(check=1, fuse=enabled)).executable
    ranges = {low_name: low for low_name, low, _ in graph.facts.ranges}
    for moving in ranges:
        for size in SIZES:
            for other in (3, 17):
                sizes = {**dict.fromkeys(ranges, other), moving: size}
                if size < ranges[moving]:
                    continue
                inputs = inputs_of(graph, sizes)
                wanted = interpret(graph, inputs)[0]
                for own, reference in zip(run(list(inputs)), wanted, strict=True):
                    assert torch.allclose(own, reference, rtol=2e-5, atol=2e-5), f"{name} at {sizes}"
                    assert own.dtype == reference.dtype and own.is_contiguous()


def test_a_reduction_over_one_element_each_is_lowered() -> None:
    graph = parse(textwrap.dedent("""
        graph single(x: f32[b, n, 1], w: f32[n]) where 0 <= b, 0 <= n
          s = sum(x | dims=[2], keep=False)  f32[b, n]
          e = exp(s)                         f32[b, n]
          y = mul(e, w)                      f32[b, n]
          return y
        """).strip())
    run = compile_graph(graph, Config(check=1, disable="simplify")).executable
    for batch, length in ((3, 17), (1, 1), (0, 4), (2, 64)):
        x, w = torch.randn(batch, length, 1), torch.randn(length)
        torch.testing.assert_close(run([x, w])[0], x.exp()[..., 0] * w, rtol=1e-5, atol=1e-6)


def test_an_index_out_of_range_is_found() -> None:
    graph = parse(GRAPHS["embedding"])
    run = compile_graph(graph, Config()).executable
    w, x = torch.randn(5, 6), torch.randn(3, 6)
    run([w, torch.tensor([0, -5, 4]), x])
    for wrong in (5, -6):
        with pytest.raises(IndexRangeError):
            run([w, torch.tensor([0, wrong, 1]), x])


# ---- fusion


def kernels(fusion: Fusion) -> list[FusedKernel]:
    return [item for item in fusion.items if isinstance(item, FusedKernel)]


def operations(fusion: Fusion) -> list[list[str]]:
    """The equations of each item."""
    return [[n.op for n in item.group.nodes] if isinstance(item, FusedKernel) else [item.op] for item in fusion.items]


def test_a_kernel_is_no_larger_than_the_limit() -> None:
    """Equations beyond the limit go into another kernel, and the refusal says so."""
    lines = [f"  v{k + 1} = exp(v{k})  f32[n]\n" for k in range(10)]
    graph = parse(f"graph g(v0: f32[n]) where 0 <= n\n{''.join(lines)}  return v10\n")
    assert len(kernels(fused(graph))) == 1
    fusion = fused(graph, limit=4)
    assert [len(item.group.nodes) for item in kernels(fusion)] == [2, 4, 4]
    assert {refusal.reason for refusal in fusion.refusals} == {"the kernel already has 4 equations"}
    assert not [item for item in kernels(fused(graph, enabled=False)) if len(item.group.nodes) > 1]


def test_nothing_is_merged_around_a_library_call() -> None:
    """e and y both read x over one space, but the product stands between them."""
    assert operations(fused(parse(GRAPHS["between"]))) == [["exp"], ["matmul"], ["add"]]


def test_what_is_refused_stays_out() -> None:
    graph = parse(GRAPHS["softmax"])
    by_op = fused(graph, refused=FusionBlocklist(ops=frozenset(["exp"])))
    by_value = fused(graph, refused=FusionBlocklist(values=frozenset(["e"])))
    assert operations(by_op) == operations(by_value) == [["amax", "sub"], ["exp"], ["sum", "div"]]


def test_a_value_is_stored_where_its_readers_cannot_all_have_it() -> None:
    """Two sums over different dimensions cannot share a kernel; the refusal says which value and why."""
    fusion = fused(parse(GRAPHS["refused"]))
    assert len(kernels(fusion)) >= 2
    assert all(refusal.reason for refusal in fusion.refusals) and fusion.refusals


@pytest.mark.parametrize("terms, copies", [(1, 2), (4, 1)])
def test_what_leads_to_a_value_counts_where_it_would_be_computed_again(terms: int, copies: int) -> None:
    """A mean and what it scales (squeeze and excite) read a sum of products, such as a depthwise convolution: each sum
    alone is cheap, all of them are not."""
    inputs = ", ".join(f"w{k}: f32[n, 8]" for k in range(terms))
    sums = "  r0 = mul(x, w0)  f32[n, 8]\n" + "".join(
        f"  p{k} = mul(x, w{k})  f32[n, 8]\n  r{k} = add(r{k - 1}, p{k})  f32[n, 8]\n" for k in range(1, terms))
    graph = parse(f"graph g(x: f32[n, 8], {inputs}, v: f32[8, 8]) where 2 <= n\n{sums}"
                  f"  y = neg(r{terms - 1})  f32[n, 8]\n  s = sum(y | dims=[0], keep)  f32[1, 8]\n"
                  "  g = matmul(s, v)  f32[1, 8]\n  z = mul(y, g)  f32[n, 8]\n  return z\n")
    found = operations(fused(graph))
    assert sum("neg" in one for one in found) == copies, found
    assert sum(one.count("add") for one in found) == (terms - 1) * copies


def test_kernels_that_wait_for_each_other_are_an_error() -> None:
    first, second = (node for text in ("b = exp(a)", "a = exp(b)") for node in
                     parse(f"graph g({text[-2]}: f32[n])\n  {text}  f32[n]\n  return {text[0]}\n").nodes)
    with pytest.raises(NotFusable, match="circle"):
        ordered([first, second], [0, 1], {})


def test_nothing_runs_early_because_something_else_waits() -> None:
    """The first kernel in the program needs one that stands last; what nobody needs before it stays behind it."""
    late, first, again, reader = parse(
        "graph g(x: f32[n]) where 0 <= n\n  a = exp(x)  f32[n]\n  b = tanh(a)  f32[n]\n  c = sin(x)  f32[n]\n"
        "  d = add(c, b)  f32[n]\n  return d\n").nodes
    assert ordered([late, first, again, reader], [3, 0, 1, 2], {}) == (late, first, again, reader)
    assert ordered([reader, again, first, late], [2, 1, 0, 3], {}) == (late, first, again, reader)


# ---- the finished nest


def nest_of(instructions: list[Instruction], rows: tuple[str, ...] = ("i0", "i1"), sizes: str = "bn") -> Nest:
    loops = tuple((variable, symbol(size)) for variable, size in zip(rows, sizes, strict=True))
    return Nest(loops, (), True, (Stage("row", tuple(instructions)),), {"x": "f32", "y": "f32"}, frozenset("y"), ())


def test_loops_that_step_as_one_are_one() -> None:
    b, n, i, j = (symbol(name) for name in ("b", "n", "i0", "i1"))
    flat = i * n + j
    code = [Instruction(0, "load", (), "f32", "x", flat), Instruction(-1, "store", (0,), "f32", "y", flat)]
    program, sizes = program_of(nest_of(code), HARDWARE.vector_lanes)
    assert [(v, str(e)) for v, e in program.rows] == [("i1", "n0*n1")] and not program.columns
    assert sizes == ("b", "n")
    turned = [dataclasses.replace(code[0], offset=j * b + i), code[1]]
    program, _ = program_of(nest_of(turned), HARDWARE.vector_lanes)
    assert len(program.rows) == len(program.columns) == 1, "a transpose needs both loops"


def test_dead_code_is_dropped_and_what_an_offset_uses_is_kept() -> None:
    i, j = symbol("i0"), symbol("i1")
    code = [Instruction(0, "load", (), "i64", "x", i), Instruction(1, "load", (), "f32", "x", j),
            Instruction(2, "load", (), "f32", "x", symbol("%0")), Instruction(3, "exp", (1,), "f32"),
            Instruction(-1, "store", (2,), "f32", "y", i * symbol("n") + j)]
    program, _ = program_of(nest_of(code), HARDWARE.vector_lanes)
    assert [one.result for stage in program.stages for one in stage.instructions] == [0, 2, -1]


def test_equal_kernels_of_different_graphs_are_equal() -> None:
    """The names of values and sizes leave no trace; the size that stands for a name does not matter."""
    text = GRAPHS["softmax"]
    other = re.sub(r"\bn\b", "width", re.sub(r"\bb\b", "rows", text)).replace("e =", "f =").replace("(e", "(f")
    first, second = (kernels(fused(parse(source))) for source in (text, other))
    assert [k.lowered.program for k in first] == [k.lowered.program for k in second]
    assert first[0].lowered.sizes != second[0].lowered.sizes


def test_an_output_takes_no_place_that_is_read_later():
    """Two results in one stage: what is stored before the last load cannot lie where that loads from."""
    x, y = Instruction(0, "load", buffer="x", offset=symbol("i")), Instruction(1, "exp", (0,))
    store = Instruction(2, "store", (1,), buffer="out", offset=symbol("i"))
    params = (Param("x", "f32", "in"), Param("out", "f32", "out"), Param("more", "f32", "out"))
    again = Instruction(3, "load", buffer="x", offset=symbol("i"))
    more = Instruction(4, "store", (3,), buffer="more", offset=symbol("i"))
    for body, wanted in (((x, y, store), ((0, 1),)), ((x, y, store, again, more), ((0, 2),)),
                         ((x, y, again, store, more), ((0, 1), (0, 2)))):
        program = LoopProgram("kernel", params, ("n",), (), (("i", symbol("n")),), (Vectorize("i"),),
                              (Stage("column", body),))
        assert overwritable(program) == wanted
