"""The text form of plans: it reads back, whatever a plan holds; what is wrong in a text is told with its line."""
from __future__ import annotations

import dataclasses
import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import anyshape
from anyshape.base.errors import ParseError
from anyshape.ir.types import TensorType
from anyshape.plan.ir.parse import HOMES, INDEXED, SPOKEN, parse, parse_lines
from anyshape.plan.ir.program import (
    Buffer,
    CopyStep,
    ExternStep,
    KernelStep,
    LibraryStep,
    MemoryStep,
    Plan,
    RecomputeStep,
    Regime,
    TiledGemmStep,
    Window,
)
from anyshape.plan.ir.show import show
from anyshape.sym.expr import floordiv, maximum, minimum, mod, root, scaled, symbol
from anyshape.sym.facts import Facts
from recorded import MODELS, plans
from roads import compilation_of
from sampling import examples
from test_order import random_plan
from test_plan import random_problem

B, N = symbol("b"), symbol("n")


@pytest.mark.parametrize("model", MODELS)
def test_recorded_plans_read_back(model):
    for plan in plans(model):
        assert parse(show(plan)) == plan


@pytest.mark.parametrize("seed", range(20))
def test_random_plans_read_back(seed):
    for plan in (random_plan(seed, writes=0.2), random_problem(seed, count=12, steps=9, saved=0.3)):
        assert parse(show(plan)) == plan


class Block(torch.nn.Module):
    """Products, kernels, an operator that PyTorch runs, an index that is checked, draws, a buffer that is written."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(11, 64)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = x + torch.nn.functional.dropout(torch.nn.functional.gelu(layer(x)), 0.1)
        self.seen.add_(x.detach().sum((0, 1)))
        values, _ = torch.sort(x, dim=-1)
        return values.square().mean(), x.shape[1] * 2


@pytest.mark.parametrize("limited", [{}, {"memory_limit": 1 << 20}, {"check": 1}], ids=str)
def test_plans_of_a_train_step_read_back(limited):
    torch._dynamo.reset()
    fast = anyshape.compile(Block(), strict=True, **limited)
    loss, _ = fast(torch.randint(0, 11, (2, 40)))
    loss.backward()
    found = [program.executable.plan for program in compilation_of(fast).programs]
    assert len(found) == 2 and (not limited.get("memory_limit") or found[1].again)
    for plan in found:
        text = show(plan)
        assert parse(text) == plan and show(parse(text)) == text
    both = parse_lines("".join(map(show, found)))
    assert [one.plan for one in both] == found


# ---- everything that a plan can hold

SIZES = (0, 7, N, 4 * B * N + 8, floordiv(B * N + 3, 4), 3 * floordiv(N, B) - 2, mod(N, 8), maximum(B, N) + 1,
         minimum(2 * B, floordiv(N, 2)), root(B * N), scaled(N, 0.6), -N + 4, B * (N - B))
NAMES = ("x", "h", "sum_1 parts", "kept h", "b", "None", "inf", "_", "kernel", "copy", 'a "quoted" \\ name', "in",
         "plan", "f32", "a.b", "status", "é", "x + 1: f32[b]")
FACTS = Facts((("b", 1, None), ("n", 0, 4096)), (("n", 512),), ((N, 8),), (N - B,))
sizes, names = st.sampled_from(SIZES), st.sampled_from(NAMES)
texts = st.text(max_size=12) | st.sampled_from(("model.py:12 y = f(x)  # why", " leads", "two\nlines", '{"a"}'))
counts = st.integers(-1, 40)
tensors = st.builds(TensorType, st.sampled_from(("f32", "bf16", "i64", "bool")), st.lists(sizes, max_size=3).map(tuple),
                    st.none() | st.lists(sizes, max_size=3).map(tuple), st.sampled_from(("cpu", "cuda:0")))
windows = st.builds(Window, names, tensors, st.just(0) | sizes)
scalars = st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | sizes
attrs = st.recursive(scalars | texts | st.none(), lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)
several = {"max_size": 3}


def tuples(items, **bounds):
    return st.lists(items, **(bounds or several)).map(tuple)


words = st.sampled_from(("alpha", "rounded", "trans_a"))
library = st.builds(LibraryStep, st.sampled_from(("matmul", "kernel", "two words")), tuples(windows), tuples(windows),
                    tuples(st.tuples(words, attrs)), texts)
regimes = st.builds(Regime, names, tuples(sizes), tuples(sizes), tuples(names))
pairs, checks = st.tuples(counts, counts), st.tuples(texts, texts, texts)
kernels = st.builds(KernelStep, tuples(regimes, min_size=1, max_size=3), tuples(windows), tuples(counts), texts,
                    tuples(pairs), tuples(windows), tuples(counts), tuples(checks))
operands = windows | scalars
steps = st.one_of(
    kernels, library, st.builds(TiledGemmStep, library, kernels, counts, counts),
    st.builds(CopyStep, windows, windows, texts),
    st.builds(ExternStep, st.sampled_from(("aten.sort.default", "custom op")), tuples(operands), attrs,
              tuples(st.none() | windows), texts, st.integers(0, 3)))


@st.composite
def any_plans(draw):
    known = draw(st.lists(names, unique=True, max_size=5))
    memory = st.builds(MemoryStep, tuples(st.sampled_from(known)), tuples(st.sampled_from(known)), texts, counts)
    homes = st.sampled_from(list(HOMES.values())).flatmap(
        lambda kind: st.builds(kind, st.integers(0, 4)) if kind in INDEXED else st.just(kind()))
    devices = st.sampled_from(("cpu", "cuda:0"))
    buffers = tuple(Buffer(name, draw(sizes), draw(homes), draw(counts), draw(counts), draw(devices))
                    for name in known)
    own = draw(tuples(steps | memory if known else steps, max_size=6))
    again = st.builds(RecomputeStep, names, st.sampled_from(known), counts,
                      tuples(st.tuples(st.sampled_from(known), sizes))) if known else st.nothing()
    facts = draw(st.sampled_from((Facts(), FACTS)))
    spans = st.tuples(st.integers(0, 9), st.integers(0, 9))
    return Plan(
        draw(st.sampled_from(("0.forward", "f", "two words", "a#b"))),
        draw(tuples(tensors | st.sampled_from(("b", "n")))),
        draw(tuples(operands | st.none())), draw(tuples(operands)), buffers, own,
        tuple((name, draw(sizes)) for name in draw(st.permutations(known))[:draw(st.integers(0, 5))]), draw(sizes),
        facts,
        draw(tuples(st.integers(0, 2))), draw(sizes), draw(tuples(sizes)), draw(tuples(st.tuples(sizes, texts))),
        draw(tuples(st.tuples(sizes, texts))), draw(tuples(spans)), draw(tuples(again)) if known else (),
        draw(tuples(st.integers(0, 5))), draw(tuples(tuples(names))), draw(tuples(names)), draw(st.booleans()))


@settings(max_examples=examples(150), deadline=None)
@given(any_plans())
def test_whatever_a_plan_holds_reads_back(plan):
    text = show(plan)
    found = parse(text)
    assert found == plan, text
    assert show(found) == text


def test_words_of_the_text_are_for_fields_there_are():
    for cls, spoken in SPOKEN.items():
        assert set(spoken) <= {field.name for field in dataclasses.fields(cls)}


# ---- what is wrong

SMALL = """plan small  arena 64*((b*n + 15)//16)
  where 1 <= b, n near 512
  in      b: size
  in      x: f32[b, n]  4*b*n bytes  steps 0-0
  buffer  h: f32[b, n]  4*b*n bytes  steps 0-1  arena @ 0
  buffer  y: f32[b, n]  4*b*n bytes  steps 1-2  output 0
  0  kernel k1 if n - 16 >= 0 | k2(x, &h; b, n)  # model.py:12
       {reuse=[[0, 1]]}
  1 ?copy h -> y
  out     y, 2*b
"""
WRONG = {
    "no plan": ("plan small", "graph small", 1, "expected 'plan'"),
    "an arena that is no size": ("arena 64*", "arena 64**", 1, "is no exponent"),
    "no dtype": ("x: f32[b, n]", "x: g32[b, n]", 4, "g32 is no dtype"),
    "a bracket": ("h: f32[b, n]", "h: f32[b, n", 5, "expected"),
    "no bytes": ("4*b*n bytes  steps 0-1", "steps 0-1", 5, "expected the bytes"),
    "no life": ("steps 0-1", "steps 0", 5, "a first and a last step"),
    "no home": ("arena @ 0", "attic @ 0", 5, "attic is no place"),
    "two of a name": ("buffer  y", "buffer  h", 6, "two buffers are called h"),
    "a step too far": ("  1 ?copy", "  3 ?copy", 9, "step 3 stands where step 1 should"),
    "no such step": ("copy h", "copies h", 9, "expected '('"),
    "a window of nothing": ("(x, &h", "(z, &h", 7, "the type of z is not known"),
    "no condition": ("n - 16 >= 0", "n - 16 > 0", 7, "expected a condition"),
    "an attribute": ("{reuse=", "{reused=", 8, "reused is no attribute"),
    "no word": ("  out     y", "  outs    y", 10, "outs is no word of a plan"),
    "more": ("2*b\n", "2*b 7\n", 10, "left over"),
    "what follows": ("2*b\n", "2*b\nplan more  arena 0\n", 11, "after the end"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_text_is_told_with_its_line(name):
    assert show(parse(SMALL)) == SMALL
    old, new, line, why = WRONG[name]
    assert SMALL.count(old) == 1
    with pytest.raises(ParseError) as caught:
        parse(SMALL.replace(old, new))
    error = caught.value
    assert why in error.why and error.do and f"line {line}: " in error.where and "^" in error.where, error


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_text_is_refused_or_read(seed):
    """Whatever a slip of the hand makes of a text: an error with its line, or a plan that prints."""
    draw = random.Random(seed)
    text = show(random_plan(seed, writes=0.2))
    for _ in range(200):
        parts = re.split(r"(\w+|[^\w\s])", text)
        place = draw.randrange(1, len(parts), 2)
        parts[place] = draw.choice(("", "x", "0", "[", "&", parts[draw.randrange(1, len(parts), 2)]))
        try:
            show(parse("".join(parts)))
        except ParseError as error:
            assert re.match(r"line \d+: ", error.where) and error.why and error.do


def test_lines_of_a_plan():
    [found] = parse_lines(f"# stage\n\n{SMALL}")
    assert (found.line, found.buffers, found.steps) == (3, {"x": 6, "h": 7, "y": 8}, (9, 11))
