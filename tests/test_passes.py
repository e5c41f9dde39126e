"""Every pass on every graph: its example, goldens, valid, idempotent, the same numbers; and every rule by itself."""
from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable

import pytest
import torch

import anyshape.ops.table  # noqa: F401  (fills the op table)
from anyshape.base.config import Config
from anyshape.base.errors import ConfigError, ParseError, VerifyError
from anyshape.compiler.driver import compile_graph
from anyshape.ir.build import Builder
from anyshape.ir.graph import Graph, Node, Operand, Value
from anyshape.ir.op import OPS
from anyshape.ir.parse import parse
from anyshape.ir.pass_manager import History
from anyshape.ir.rewrite_rules import Apply, Number, Pattern, Rule, Variable, build, holds, table
from anyshape.ir.show import show
from anyshape.ir.types import DTYPES, NATIVE, TensorType
from anyshape.ir.verify import verify
from anyshape.passes import (
    causal_mask,
    channels_last,
    concat_elimination,
    constant_folding,
    conv_epilogue,
    cse,
    dce,
    scatter_accumulate,
    simplify,
    views,
)
from anyshape.passes.attention import attention
from anyshape.passes.constant_folding import round_to
from anyshape.passes.driver import pipeline
from anyshape.passes.gemm import cast_into_gemm, gemm_accumulate, gemm_chain_split, prepacked_gemm
from anyshape.passes.rewriter import same_type
from anyshape.passes.routing import dispatch_fusion
from anyshape.runtime.torch_ops.reference_interpreter import interpret
from anyshape.sym.expr import symbol
from anyshape.torch_compat.dtypes import TORCH_DTYPES
from counting import calls
from text_cases import CASES

PASSES = (constant_folding, simplify, attention, channels_last, views, cse, scatter_accumulate, concat_elimination,
          causal_mask, cast_into_gemm, gemm_accumulate, gemm_chain_split, conv_epilogue, dispatch_fusion,
          prepacked_gemm, dce)
STEPS = {module.__name__.rsplit(".", 1)[-1]: getattr(module, module.__name__.rsplit(".", 1)[-1]) for module in PASSES}
CONFIG = Config()
# these run in the reference interpreter to the bit; "everything" names operators that do not exist
RUNNABLE = {name: text for name, text in CASES.items() if name not in ("everything", "shared", "convolutions")}


@pytest.mark.parametrize("name", STEPS)
def test_the_example_at_the_head_of_a_pass(name: str) -> None:
    text = sys.modules[STEPS[name].__module__].__doc__ or ""
    before, after = text.split("before:\n")[1].split("after:\n")
    lines = after.splitlines()
    after = "\n".join(lines[:next(i for i, line in enumerate(lines) if line.strip().startswith("return")) + 1])
    graph = parse(textwrap.dedent(before))
    verify(graph)
    assert show(STEPS[name](graph, CONFIG)) == show(parse(textwrap.dedent(after)))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", STEPS)
def test_a_pass_keeps_a_graph_valid_and_is_idempotent(name: str, case: str,
                                                      golden: Callable[[str, str], None]) -> None:
    graph = parse(CASES[case])
    text = show(graph)
    after = STEPS[name](graph, CONFIG)
    verify(after, name)
    assert show(graph) == text, "a pass must not change its argument"
    assert show(STEPS[name](after, CONFIG)) == show(after), "not idempotent"
    assert show(STEPS[name](parse(text), CONFIG)) == show(after), "not deterministic"
    golden(f"passes/{name}_{case}.txt", show(after))


@pytest.mark.parametrize("case", CASES)
def test_all_passes(case: str, golden: Callable[[str, str], None]) -> None:
    after = pipeline.run(pipeline.ROAD, parse(CASES[case]), Config(check=1))
    assert show(pipeline.run(pipeline.ROAD, after, CONFIG)) == show(after)
    golden(f"passes/all_{case}.txt", show(after))


def _inputs(graph: Graph, sizes: dict[str, int]) -> list[object]:
    torch.manual_seed(0)
    found: list[object] = []
    for value in graph.inputs:
        kind = value.tensor
        shape = [size if isinstance(size, int) else sizes[str(size)] for size in kind.shape]
        dtype = TORCH_DTYPES[kind.dtype]
        if kind.dtype == "bool":
            tensor = torch.rand(shape) < 0.5
        elif dtype.is_floating_point:
            tensor = torch.randn(shape).to(dtype)
            if tensor.numel() > 3:
                tensor.view(-1)[:3] = torch.tensor([-0.0, float("inf"), float("nan")]).to(dtype)
        else:
            tensor = torch.randint(-5, 50, shape).to(dtype)
        found.append(tensor)
    return found


def _bits(tensor: torch.Tensor) -> list[object]:
    """Exact values: NaN is one value, the zeros are two."""
    if not tensor.dtype.is_floating_point:
        return tensor.reshape(-1).tolist()
    return ["nan" if x != x else str(x) for x in tensor.double().reshape(-1).tolist()]


@pytest.mark.parametrize("sizes", [{"b": 1, "n": 2, "t": 1}, {"b": 3, "n": 7, "t": 5}], ids=["small", "odd"])
@pytest.mark.parametrize("case", RUNNABLE)
def test_passes_change_no_number(case: str, sizes: dict[str, int]) -> None:
    graph = parse(RUNNABLE[case])
    wanted = interpret(graph, _inputs(graph, sizes))[0]
    for name, step in {**STEPS, "all": lambda g, c: pipeline.run(pipeline.ROAD, g, c)}.items():
        if case == "attention" and name in ("attention", "all"):
            continue  # rounds in another order: tests/test_graph_attention.py
        found = interpret(step(graph, CONFIG), _inputs(graph, sizes))[0]
        for x, y in zip(wanted, found, strict=True):
            assert x.dtype == y.dtype and x.shape == y.shape and _bits(x) == _bits(y), name


def test_results_never_come_to_share_storage() -> None:
    after = pipeline.run(pipeline.ROAD, parse(CASES["shared"]), CONFIG)
    kept = [operand for operand in (*after.outputs, *after.saved, *(value for _, value in after.writes))
            if isinstance(operand, Value)]
    assert len({value.name for value in kept}) == len(kept)
    assert not {value.name for value in kept} & {value.name for value in after.inputs}


def test_effects_stay_in_order() -> None:
    after = pipeline.run(pipeline.ROAD, parse(CASES["shared"]), CONFIG)
    effects = [node for node in after.nodes if dce.has_effect(node)]
    assert [node.outputs[0].name for node in effects] == ["u", "v"]
    everything = pipeline.run(pipeline.ROAD, parse(CASES["everything"]), CONFIG)
    assert any(not node.outputs for node in everything.nodes), "a call for its effect alone stays"


def _norms(equations: int) -> Graph:
    """Norms, heads and residuals, one after the other."""
    b, t = symbol("b"), symbol("t")
    builder = Builder("large")
    x = builder.input("x", TensorType("f32", (b, t, 64)))
    while len(builder.nodes) < equations:
        mean = builder.op("div", builder.op("sum", x, dims=(2,), keep=True), 64.0)
        centred = builder.op("sub", x, mean)
        square = builder.op("mul", centred, centred)
        scale = builder.op("rsqrt", builder.op("add", builder.op("sum", square, dims=(2,), keep=True), 1e-5))
        heads = builder.op("reshape", builder.op("mul", centred, scale), shape=(b, t, 4, 16))
        heads = builder.op("permute", heads, dims=(0, 2, 1, 3))
        one = builder.op("full", 1.0, shape=(1,), dtype="f32")
        turned = builder.op("sub", heads, builder.op("neg", builder.op("mul", heads, one)))
        back = builder.op("permute", turned, dims=(0, 2, 1, 3))
        x = builder.op("add", x, builder.op("reshape", back, shape=(b, t, 64)))
    return builder.finish((x,))


def test_the_work_of_the_passes_grows_with_the_graph_and_no_faster() -> None:
    """2000 equations take a tenth of a second on a quiet machine; 300,000 calls."""
    small, large = _norms(500), _norms(2000)
    history = History()
    pipeline.run(pipeline.ROAD, small, CONFIG)  # what is made once: tables of rules, answers about sizes
    few = calls(lambda: pipeline.run(pipeline.ROAD, small, CONFIG))
    after: list[Graph] = []
    many = calls(lambda: after.append(pipeline.run(pipeline.ROAD, large, CONFIG, history)))
    assert many < 5 * few and many < 600_000, (few, many)
    assert len(after[0].nodes) < len(large.nodes)
    assert list(history.seconds()) == [step.__name__ for step in pipeline.ROAD]


# ---- rules, each by itself

SAMPLES = {
    "float": [0.0, -0.0, 1.0, -1.0, 0.1, 3.5, -2.25, 2.5, 1e-30, 60000.0, float("inf"), float("-inf"), float("nan")],
    "int": [0, 1, -1, 2, -2, 7, 100, -128, 127],
    "uint": [0, 1, 2, 7, 100, 255],
    "bool": [False, True],
}
LITERALS = {"c": 4, "d": 7}
ALL_RULES = [rule for rules in simplify.RULES.values() for rule in rules]


def _names(pattern: Pattern) -> set[str]:
    if isinstance(pattern, Apply):
        return set().union(*(_names(item) for item in pattern.args))
    return {pattern.name} if isinstance(pattern, Variable) and not pattern.literal else set()


def _sides(rule: Rule, dtypes: dict[str, str]) -> tuple[Graph, Graph] | None:
    """Both sides as graphs over inputs of these dtypes; None where the rule does not apply."""
    graphs = []
    for side in (rule.pattern, rule.replacement):
        builder = Builder("rule")
        values: dict[str, Operand] = {
            name: builder.input(name, TensorType(dtype, (symbol("n"),))) for name, dtype in dtypes.items()}
        values |= LITERALS
        if not holds(rule, values, simplify.CONDITIONS):
            return None
        try:
            result = build(side, values, builder.op, simplify.FUNCTIONS)
        except VerifyError:
            return None
        graphs.append(builder.finish((result,)))
    left, right = graphs
    assert isinstance(left.outputs[0], Value)
    found = right.outputs[0]
    return (left, right) if isinstance(found, Value) and same_type(found.type, left.outputs[0].type) else None


@pytest.mark.parametrize("rule", ALL_RULES, ids=[rule.text for rule in ALL_RULES])
def test_both_sides_of_a_rule_agree(rule: Rule) -> None:
    names = sorted(_names(rule.pattern))
    tried = 0
    choices = [dict.fromkeys(names, dtype) for dtype in sorted(NATIVE)]
    if rule.pattern.op == "where" and "x" in names:
        choices += [{**choice, "x": "bool"} for choice in choices]
    for dtypes in choices:
        sides = _sides(rule, dtypes)
        if sides is None:
            continue
        tried += 1
        columns: list[torch.Tensor] = []
        for name in names:
            samples = SAMPLES[DTYPES[dtypes[name]][1]]
            columns.append(torch.tensor(samples, dtype=torch.float64))
        grid = torch.meshgrid(*columns, indexing="ij")
        inputs = [column.reshape(-1).to(TORCH_DTYPES[dtypes[name]]) for name, column in zip(names, grid)]
        (left,), (right,) = (interpret(side, list(inputs))[0] for side in sides)
        assert left.dtype == right.dtype and _bits(left) == _bits(right), dtypes
    assert tried, "the rule fits no dtype"


@pytest.mark.parametrize("rule", ALL_RULES, ids=[rule.text for rule in ALL_RULES])
def test_a_rule_fires(rule: Rule) -> None:
    for dtype in sorted(NATIVE):
        for condition in (dtype, "bool"):
            dtypes = dict.fromkeys(sorted(_names(rule.pattern)), dtype)
            if rule.pattern.op == "where" and "x" in dtypes:
                dtypes["x"] = condition
            sides = _sides(rule, dtypes)
            if sides is None:
                continue
            wanted = simplify.simplify(sides[1], CONFIG)
            found = dce.dce(simplify.simplify(sides[0], CONFIG), CONFIG)
            if len(found.nodes) <= len(sides[0].nodes) and (not wanted.nodes or len(found.nodes) <= len(wanted.nodes)
                                                             or found.nodes[-1].op == wanted.nodes[-1].op):
                return
    pytest.fail("never")


def test_what_would_change_numbers_stays() -> None:
    graph = parse("""
    graph g(x: f32[n], i: i64[n])
      a = add(x, 0.0)                f32[n]
      c = mul(a, 0.0)                f32[n]
      d = sub(c, c)                  f32[n]
      e = div(d, 3.0)                f32[n]
      f = cast(e | dtype="bf16")     bf16[n]
      g = cast(f | dtype="f32")      f32[n]
      h = reshape(g | shape=[n, 1])  f32[n, 1]
      j = add(h, 0.0)                f32[n, 1]
      k = lt(x, 1.0)                 bool[n]
      l = bit_not(k)                 bool[n]
      m = floor_div(x, 1.0)          f32[n]
      return j, l, m
    """)
    assert show(pipeline.run(pipeline.ROAD, graph, CONFIG)) == show(graph)


def test_sum_of_one_float_each_is_no_reduction_and_makes_negative_zero_positive() -> None:
    graph = parse("graph g(x: f32[n, 1])\n  y = sum(x | dims=[1], keep=False)  f32[n]\n  return y\n")
    found = pipeline.run(pipeline.ROAD, graph, CONFIG)
    assert [node.op for node in found.nodes] == ["add", "reshape"]
    x = torch.tensor([[-0.0], [1.5]])
    one, other = interpret(graph, [x])[0][0], interpret(found, [x])[0][0]
    assert torch.equal(one.signbit(), other.signbit())
    assert torch.equal(one, other)


def test_a_table_of_rules_reads() -> None:
    rules = table("add(x, 0) -> x if integer(x)  # a comment\nwhere(x, y, y) -> y")
    assert rules["add"][0].conditions == (("integer", "x"),)
    assert rules["add"][0].pattern == Apply("add", (Variable("x", False), Number(0)))
    with pytest.raises(ParseError, match="expected"):
        table("add(x -> x")


# ---- constants


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
def test_constants_round_as_torch_does(dtype: str) -> None:
    numbers = [0.1, -0.0, 1 / 3, 65504.0, 65520.0, 1e-8, 6e-8, 3.4e38, 1e39, 1.00390625, 1.01171875, float("inf")]
    for number in numbers:
        wanted = torch.tensor(number, dtype=torch.float64).to(TORCH_DTYPES[dtype]).item()
        assert str(round_to(number, dtype)) == str(wanted), (number, dtype)
    assert str(round_to(float("nan"), dtype)) == "nan"


@pytest.mark.parametrize("dtype", ["u8", "i8", "i16", "i32", "i64"])
def test_whole_constants_wrap(dtype: str) -> None:
    for number in (-1, 0, 127, 128, 255, 256, 2**31, -2**31 - 1, 2**40 + 5):
        wanted = torch.tensor(number, dtype=torch.int64).to(TORCH_DTYPES[dtype]).item()
        assert round_to(number, dtype) == wanted


@pytest.mark.parametrize("dtype", sorted(NATIVE))
@pytest.mark.parametrize("op", [name for name, row in OPS.items()
                                if row.kind == "pointwise" and "|" not in row.signature])
def test_folded_constants_are_what_running_gives(op: str, dtype: str) -> None:
    samples = [x for x in SAMPLES[DTYPES[dtype][1]] if not (isinstance(x, float) and abs(x) == 60000.0)]
    arity = len(OPS[op].signature.split(","))
    checked = 0
    for first in samples:
        for second in samples[:6]:
            builder = Builder("g")
            x = builder.op("full", first, shape=(2,), dtype=dtype)
            y = builder.op("full", second, shape=(), dtype=dtype)
            operands: list[Operand] = [True, x, y] if op == "where" else [x, y][:arity]
            try:
                result = builder.op(op, *operands)
            except VerifyError:
                return
            if "int" in DTYPES[dtype][1] and op in ("floor_div", "trunc_div", "remainder", "fmod") and second == 0:
                continue
            if op in ("shift_left", "shift_right", "pow"):
                continue
            graph = builder.finish((result,))
            after = constant_folding.constant_folding(graph, CONFIG)
            if after.nodes[-1].op != "full":
                continue
            checked += 1
            (wanted,), (found,) = interpret(graph, [])[0], interpret(after, [])[0]
            assert _bits(wanted) == _bits(found), (first, second)
    assert checked or op not in constant_folding._COMPUTE


@pytest.mark.parametrize("source", sorted(NATIVE))
@pytest.mark.parametrize("target", sorted(NATIVE))
def test_casts_of_casts(source: str, target: str) -> None:
    for middle in sorted(NATIVE):
        builder = Builder("g")
        x = builder.input("x", TensorType(source, (symbol("n"),)))
        graph = builder.finish((builder.op("cast", builder.op("cast", x, dtype=middle), dtype=target),))
        after = dce.dce(simplify.simplify(graph, CONFIG), CONFIG)
        if len(after.nodes) == len(graph.nodes):
            continue
        samples = SAMPLES[DTYPES[source][1]]
        if DTYPES[target][1] in ("int", "uint") and DTYPES[source][1] == "float":
            samples = [v for v in samples if abs(v) < 100 and (v >= 0 or target != "u8")]
        data = torch.tensor(samples).to(TORCH_DTYPES[source])
        (wanted,), (found,) = interpret(graph, [data])[0], interpret(after, [data])[0]
        assert _bits(wanted) == _bits(found), (source, middle, target)


# ---- the pipeline


def breaks(graph: Graph, config: Config) -> Graph:
    """A pass with a bug."""
    node = graph.nodes[-1]
    return graph.replace(nodes=(*graph.nodes[:-1], Node("exp", node.inputs, (), node.outputs)))


def test_a_broken_graph_names_the_pass() -> None:
    graph = parse(CASES["softmax"])
    with pytest.raises(VerifyError, match="after breaks"):
        pipeline.run((constant_folding.constant_folding, breaks, dce.dce), graph, Config(check=1))
    pipeline.run((breaks,), graph, Config(check=0))
    assert pipeline.run((breaks,), graph, Config(check=1, disable="breaks")) is graph


def test_a_wrong_name_to_disable_is_an_error() -> None:
    with pytest.raises(ConfigError, match="foldd"):
        compile_graph(parse(CASES["softmax"]), Config(disable="foldd"))


def test_stages_are_shown_and_dumped(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    graph = parse(CASES["attention"])
    after = pipeline.run(pipeline.ROAD, graph, Config(show="constant_folding,dce", dump=str(tmp_path)))
    printed = capsys.readouterr().err
    assert "# attention: constant_folding\n" in printed and "# attention: cse" not in printed and show(after) in printed
    folder = tmp_path / "attention"  # type: ignore[operator]
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["00_capture.txt", "01_constant_folding.txt", "02_simplify.txt", "03_attention.txt",
                     "04_channels_last.txt", "05_views.txt", "06_cse.txt", "07_scatter_accumulate.txt",
                     "08_concat_elimination.txt", "09_causal_mask.txt", "10_cast_into_gemm.txt",
                     "11_gemm_accumulate.txt", "12_gemm_chain_split.txt", "13_conv_epilogue.txt",
                     "14_dispatch_fusion.txt", "15_prepacked_gemm.txt",
                     "16_dce.txt"]
    assert show(parse((folder / "16_dce.txt").read_text())) == show(after)


@pytest.mark.parametrize(("dims", "shape", "wanted"), [
    ((0, 2, 3, 1), (symbol("b") * 4, 16, symbol("n")), "permute"),  # the keys of attention: 16 stays innermost
    ((0, 2, 1, 3), (symbol("b") * 4, symbol("n"), 16), "reshape"),  # queries and values are in order as they are
    ((0, 1, 2, 3), (symbol("b") * symbol("n"), 64), "reshape"),
])
def test_a_reshape_of_a_permute_keeps_the_order_in_memory(dims: tuple[int, ...], shape: tuple[object, ...],
                                                          wanted: str) -> None:
    builder = Builder("heads")
    x = builder.input("x", TensorType("f32", (symbol("b"), symbol("n"), 4, 16)))
    result = builder.op("reshape", builder.op("permute", x, dims=dims), shape=shape)
    after = views.views(builder.finish((result,)), CONFIG)
    last = after.producers()[after.outputs[0].name]  # type: ignore[union-attr]
    assert last.op == wanted
    inputs = [torch.arange(2 * 3 * 64.0).reshape(2, 3, 4, 16)]
    assert torch.equal(interpret(after, inputs)[0][0], inputs[0].permute(dims).reshape(
        [size if isinstance(size, int) else {"4*b": 8, "n": 3, "b*n": 6}[str(size)] for size in shape]))


def test_a_reshape_that_would_put_the_batch_innermost_stays() -> None:
    """Then no library could read the matrices: neither their rows nor their columns would be contiguous."""
    builder = Builder("scan")
    b, t = symbol("b"), symbol("t")
    x = builder.input("x", TensorType("f32", (b, t, t, 8)))
    result = builder.op("reshape", builder.op("permute", x, dims=(0, 3, 1, 2)), shape=(8 * b, t, t))
    graph = builder.finish((result,))
    assert show(views.views(graph, CONFIG)) == show(graph)
