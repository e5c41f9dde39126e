"""The text form of graphs: it reads back, goldens of graphs and of error messages."""
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import anyshape.ops.table  # noqa: F401  (fills the op table)
from anyshape.base.errors import ParseError, VerifyError
from anyshape.ir.build import Builder
from anyshape.ir.graph import Graph, Node, Value
from anyshape.ir.parse import parse
from anyshape.ir.show import show
from anyshape.ir.types import SizeType, TensorType
from anyshape.ir.verify import verify
from anyshape.sym.expr import symbol
from anyshape.sym.facts import Facts
from sampling import examples
from text_cases import CASES, SOFTMAX

B, N = symbol("b"), symbol("n")


@pytest.mark.parametrize("name", CASES)
def test_graphs_read_back(name: str, golden: Callable[[str, str], None]) -> None:
    graph = parse(CASES[name])
    verify(graph)
    text = show(graph)
    assert show(parse(text)) == text
    golden(f"text/{name}.txt", text)


def test_every_part_of_a_graph_is_read() -> None:
    graph = parse(CASES["everything"])
    x, y, k, _, w = graph.inputs
    assert graph.name == "0.forward"
    assert y.type == TensorType("bf16", (4, 2 * B + 1), (1, 4)) and isinstance(k.type, SizeType)
    assert graph.facts == Facts((("b", 1, None), ("n", 1, 4096)), (("n", 512), ("k", 3)), ((N, 8),), (N - B,))
    assert graph.restored == (x, k)
    names = {value.name: value for node in graph.nodes for value in node.outputs}
    assert graph.writes == ((w, names["o"]), (x, names["a"]))
    assert graph.saved == (names["m"], B * N, 3, symbol("k"))
    assert graph.outputs == (names["z"], None, B + 1, names["m"], 1.5, symbol("k"), True)
    assert graph.output_strides == ((1, N), None, None, None, None, None, None)
    by_name = {node.outputs[0].name: node for node in graph.nodes if node.outputs}
    assert by_name["a"].inputs == (x, -math.inf)
    assert math.copysign(1, by_name["c"].inputs[1]) == -1  # type: ignore[arg-type]
    assert math.isnan(by_name["d"].inputs[1])  # type: ignore[arg-type]
    assert by_name["h"].inputs[1] == symbol("k")
    assert by_name["p"].inputs[1] is True
    assert by_name["z"].where == "src/model.py:40 in forward"
    template = by_name["q"].attr("template")
    assert template == (("args", ("operand", 0), ("none",), ()), ("kwargs", ("v", ("float", math.inf))))
    assert by_name["q"].attr("target") == 'aten.x#"y' and by_name["q"].attr("effect") is False


@settings(max_examples=examples(300), deadline=None)
@given(st.one_of(st.floats(), st.integers(-2**63, 2**63), st.booleans()))
def test_numbers_read_back_exactly(number: float | int | bool) -> None:
    x = Value("x", TensorType("f64", (N,)))
    y = Value("y", TensorType("f64", (N,)))
    node = Node("add", (x, number), (("value", number), ("nested", (number, (number,)))), (y,))
    graph = parse(show(Graph("g", (x,), (node,), (y, number))))
    read = [graph.nodes[0].inputs[1], graph.nodes[0].attr("value"), graph.nodes[0].attr("nested"), graph.outputs[1]]
    for found in (read[0], read[1], read[2][0], read[2][1][0], read[3]):  # type: ignore[index]
        assert type(found) is type(number) and repr(found) == repr(number)


@settings(max_examples=examples(200), deadline=None)
@given(st.text(max_size=20))
def test_texts_read_back_exactly(text: str) -> None:
    x = Value("x", TensorType("f32", ()))
    graph = parse(show(Graph("g", (x,), (Node("neg", (x,), (("note", text),), (Value("y", x.type),)),), ())))
    assert graph.nodes[0].attr("note") == text


def test_a_graph_without_anything() -> None:
    graph = Graph("empty", (), (), ())
    assert show(graph) == "graph empty()\n  return\n"
    assert show(parse(show(graph))) == show(graph)


def test_many_inputs_stand_on_their_own_lines() -> None:
    inputs = tuple(Value(f"weight_{i}", TensorType("f32", (B, N))) for i in range(20))
    facts = Facts(tuple((f"s{i}", 1, None) for i in range(30)))
    text = show(Graph("wide", inputs, (), (inputs[0],), facts=facts))
    assert max(len(line) for line in text.splitlines()) <= 100
    assert show(parse(text)) == text


WRONG_TEXT = {
    "missing bracket": "graph f(x: f32[b, n)\n  return x\n",
    "unknown dtype": "graph f(x: g32[b])\n  return x\n",
    "bad size": "graph f(x: f32[b])\n  y = add(x, 1*+)  f32[b]\n  return y\n",
    "defined twice": "graph f(x: f32[b])\n  x = add(x, 1)  f32[b]\n  return x\n",
    "unknown value": "graph f(x: f32[b])\n  write x <- z\n  return x\n",
    "no return": "graph f(x: f32[b])\n  y = neg(x)  f32[b]\n",
    "no type": "graph f(x: f32[b])\n  y = neg(x)\n  return y\n",
    "two equations on a line": "graph f(x: f32[b])\n  y = neg(x)  f32[b] z = neg(x)  f32[b]\n  return y\n",
    "unknown fact": "graph f(x: f32[b]) where b is even\n  return x\n",
    "text after the end": "graph f(x: f32[b])\n  return x\n  y = neg(x)  f32[b]\n",
    "no graph": "module f()\n",
    "size that is no size": "graph f(x: f32[1.5])\n  return x\n",
}


def test_messages_of_the_parser(golden: Callable[[str, str], None]) -> None:
    messages = []
    for name, text in WRONG_TEXT.items():
        with pytest.raises(ParseError) as caught:
            parse(text)
        assert "^" in caught.value.where and caught.value.why and caught.value.do
        messages.append(f"== {name}\n{caught.value}\n")
    golden("text/parser_messages.txt", "\n".join(messages))


BROKEN = {
    "wrong type": ("f32[b, n]  # model.py:12\n  return", "f32[b, 1]  # model.py:12\n  return"),
    "unknown op": ("exp(d)", "exponential(d)"),
    "no such dim": ("amax(x | dims=[1]", "amax(x | dims=[2]"),
    "missing attribute": ("sum(e | dims=[1], keep)", "sum(e | dims=[1])"),
    "tensor named like a size": ("d = sub", "n = sub"),
    "strides of another rank": ("strides [n, 1]", "strides [n]"),
    "shapes that do not broadcast": ("sub(x, m)", "sub(x, s)"),
    "empty range": ("1 <= n <= 4096", "9 <= n <= 8"),
}


def test_messages_of_the_verifier(golden: Callable[[str, str], None]) -> None:
    messages = []
    for name, (old, new) in BROKEN.items():
        text = show(parse(SOFTMAX))
        old = old if old in text else " ".join(old.split())
        assert old in text, (name, text)
        broken = text.replace(old, new)
        if name == "tensor named like a size":
            broken = broken.replace("exp(d)", "exp(n)")
        if name == "shapes that do not broadcast":
            broken = broken.replace("s = sum(e", "r = sum(e").replace("div(e, s)", "div(e, r)") \
                .replace("  d = ", "  s = slice(x | dim=1, start=0, count=2, step=1)  f32[b, 2]\n  d = ")
        with pytest.raises(VerifyError) as caught:
            verify(parse(broken), "fold")
        assert caught.value.where and caught.value.why and caught.value.do
        messages.append(f"== {name}\n{caught.value}\n")
    golden("text/verifier_messages.txt", "\n".join(messages))


def _graph() -> tuple[Graph, Value, Value]:
    builder = Builder("g")
    x = builder.input("x", TensorType("f32", (N,)))
    y = builder.op("exp", x)
    return builder.finish((y,)), x, y


def test_values_are_known_by_identity_not_by_name() -> None:
    graph, x, y = _graph()
    verify(graph)
    twin = Value("x", x.type)
    with pytest.raises(VerifyError, match="another value of that name"):
        verify(graph.replace(nodes=(Node("exp", (twin,), (), (y,)),)))
    with pytest.raises(VerifyError, match="defined later or nowhere"):
        verify(graph.replace(nodes=(Node("exp", (y,), (), (y,)),)))
    with pytest.raises(VerifyError, match="not defined"):
        verify(graph.replace(outputs=(Value("y", x.type),)))
    with pytest.raises(VerifyError, match="is written, but is no input"):
        verify(graph.replace(writes=((y, y),)))
    with pytest.raises(VerifyError, match="defined twice"):
        verify(graph.replace(nodes=graph.nodes * 2))
    with pytest.raises(VerifyError, match="cannot carry"):
        verify(graph.replace(nodes=(Node("exp", (x,), (("note", [1]),), (y,)),)))  # type: ignore[arg-type]
    with pytest.raises(VerifyError, match="cannot name a value"):
        verify(graph.replace(inputs=(x, Value("two words", x.type))))


def test_sizes_equal_by_a_fact_are_equal() -> None:
    text = """
    graph g(x: f32[n]) where {fact}
      y = reshape(x | shape=[4, n//4])   f32[4, n//4]
      z = reshape(y | shape=[4*(n//4)])  f32[{size}]
      return z
    """
    verify(parse(text.format(fact="4 divides n", size="n")))
    with pytest.raises(VerifyError, match="reshape gives"):
        verify(parse(text.format(fact="1 <= n", size="n")))
