"""Passes over plans: their examples, goldens, each left out, a broken one named; and the verifier that names it."""
from __future__ import annotations

import dataclasses
import importlib
import re
import textwrap

import pytest
import torch

import anyshape
from anyshape.backend.targets import target_of
from anyshape.base.config import Config
from anyshape.base.errors import ConfigError, VerifyError
from anyshape.compiler.driver import compile_graph, plan_graph
from anyshape.compiler.stages import stages_of
from anyshape.ir.parse import parse as parse_graph
from anyshape.ir.pass_manager import History
from anyshape.plan.driver import pipeline
from anyshape.plan.driver.pipeline import PLAN_ROAD, REQUIRED
from anyshape.plan.ir.context import PlanContext
from anyshape.plan.ir.parse import parse
from anyshape.plan.ir.program import MemoryStep, Window
from anyshape.plan.ir.show import show
from anyshape.plan.memory.inplace_reuse import in_place
from anyshape.plan.verify import verify
from text_cases import CASES

CONTEXT = PlanContext(Config(check=1), strided_products=frozenset(("f32",)), band_bytes=1 << 20)
PASSES = {step.__name__: step for step in PLAN_ROAD}
# what needs a forward with its backward has goldens instead
WITHOUT_EXAMPLE = {"insert_recomputation", "mark_spent"}


def examples(name):
    """(pass, plan before, plan after) of the head of a pass's file."""
    text = importlib.import_module(PASSES[name].__module__).__doc__ or ""
    parts = re.split(r"^(before|after \w+):\n", text, flags=re.MULTILINE)[1:]
    before = None
    for word, body in zip(parts[::2], parts[1::2], strict=True):
        lines = textwrap.dedent(body.split("\n\n")[0]).rstrip() + "\n"
        plan = parse(lines)
        assert show(plan) == lines
        if before is not None:
            yield word.removeprefix("after "), before, plan
        before = plan


@pytest.mark.parametrize("name", sorted(PASSES.keys() - WITHOUT_EXAMPLE))
def test_the_example_at_the_head_of_a_pass(name):
    found = {one: (before, after) for one, before, after in examples(name)}
    before, after = found[name]
    verify(before)
    assert before != after and show(pipeline.run((PASSES[name],), (before,), CONTEXT)[0]) == show(after)


def texts_of(history):
    """The plans after each pass that changed them."""
    found, last = [], ""
    for stage in history.stages:
        if stage.unit == "steps":
            text = "\n".join(map(show, stage.ir))
            found.append(f"== {stage.name}{'' if text != last else ': no change'}\n{text if text != last else ''}")
            last = text
    return "\n".join(found)


@pytest.mark.parametrize("case", ["softmax", "attention", "shared"])
def test_every_pass_on_a_graph(case, golden):
    golden(f"plan/passes_{case}.txt", texts_of(compile_graph(parse_graph(CASES[case]), Config(check=1)).history))


FORWARD = """
graph 0.forward(x: f32[n, 256], w: f32[256, 256], v: f32[256, 256]) where 1 <= n, n near 4096
  h = matmul(x, w)        f32[n, 256]
  a = tanh(h)             f32[n, 256]
  k = matmul(a, v)        f32[n, 256]
  e = exp(k)              f32[n, 256]
  y = sum(e | dims=[1], keep=False)  f32[n]
  save x, v, a, e
  return y
"""
BACKWARD = """
graph 0.backward(x: f32[n, 256], v: f32[256, 256], a: f32[n, 256], e: f32[n, 256], g: f32[n])
    where 1 <= n, n near 4096
  from tape x, v, a, e
  gr = reshape(g | shape=[n, 1])             f32[n, 1]
  gb = broadcast(gr | shape=[n, 256])        f32[n, 256]
  ge = mul(gb, e)                            f32[n, 256]
  at = permute(a | dims=[1, 0])              f32[256, n]
  gv = matmul(at, ge)                        f32[256, 256]
  vt = permute(v | dims=[1, 0])              f32[256, 256]
  ga = matmul(ge, vt)                        f32[n, 256]
  aa = mul(a, a)                             f32[n, 256]
  d = sub(1.0, aa)                           f32[n, 256]
  gh = mul(ga, d)                            f32[n, 256]
  xt = permute(x | dims=[1, 0])              f32[256, n]
  gw = matmul(xt, gh)                        f32[256, 256]
  return gw, gv
"""


@pytest.mark.parametrize("whole", [False, True], ids=["apart", "whole"])
def test_every_pass_on_a_forward_and_its_backward_under_a_limit(whole, golden):
    config = Config(check=1, memory_limit=1 << 30)
    forward = plan_graph(parse_graph(FORWARD), target_of(config), config, whole=whole)
    backward = plan_graph(parse_graph(BACKWARD), target_of(config), config, forward, whole=whole)
    assert bool(forward.plan.spent) == whole
    for one in (forward, backward):
        assert parse(show(one.plan)) == one.plan
        golden(f"plan/passes_{one.name}_{'whole' if whole else 'apart'}.txt", texts_of(one.history))


# ---- the pipeline


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        y = self.down(torch.nn.functional.gelu(self.up(x)))
        self.seen.add_(y.detach().sum(0))
        return torch.sort(y, dim=-1)[0].square().sum()


def outcome(**settings):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = Layer()
    fast = anyshape.compile(layer, strict=True, **settings) if settings else layer
    found = []
    for rows in (5, 1, 40):
        loss = fast(torch.randn(rows, 8))
        loss.backward()
        found += [loss.detach()]
    return [*found, layer.seen.clone(), *(p.grad for p in layer.parameters())], fast


@pytest.mark.parametrize("name", [*(name for name in PASSES if name not in REQUIRED), *pipeline.TECHNIQUES])
def test_a_pass_may_be_left_out(name):
    wanted, _ = outcome()
    found, fast = outcome(disable=name, check=1)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    ran = {stage for program in fast.explain().programs for stage, *_ in program.plan_passes}
    assert ran == PASSES.keys() - {pipeline.TECHNIQUES.get(name, name)}


def test_what_a_plan_cannot_do_without_is_not_left_out():
    for name in REQUIRED:
        with pytest.raises(ConfigError, match=f"disable names no pass: {name}"):
            anyshape.compile(Layer(), disable=name)


def breaks(plan, context):
    """A pass with a bug."""
    return dataclasses.replace(plan, steps=plan.steps[::-1])


def small():
    [before] = {before.name: before for _, before, _ in examples("alias_buffers")}.values()
    return before


def test_a_broken_plan_names_the_pass():
    with pytest.raises(VerifyError, match="after breaks"):
        pipeline.run((PASSES["alias_buffers"], breaks, PASSES["allocate"]), (small(),), CONTEXT)
    loose = dataclasses.replace(CONTEXT, config=Config())
    assert pipeline.run((breaks,), (small(),), loose)[0].steps == small().steps[::-1]
    left = dataclasses.replace(CONTEXT, config=Config(check=1, disable="breaks"))
    assert pipeline.run((breaks,), (small(),), left) == (small(),)


def test_a_pass_that_gives_several_plans():
    def twice(plan, context):
        return plan, dataclasses.replace(plan, name="other")

    history = History()
    found = pipeline.run((twice, PASSES["allocate"]), (small(),), CONTEXT, history)
    assert [plan.name for plan in found] == ["chain", "other"] and all(plan.offsets for plan in found)
    assert [(one.name, one.before, one.after) for one in history.stages] == [("twice", 3, 3), ("allocate", 3, 3)]
    assert "allocate" in str(history) and " steps" in str(history)


def test_plans_are_shown_and_dumped(tmp_path, capsys):
    graph = parse_graph(CASES["softmax"])
    compiled = compile_graph(graph, Config(show="allocate", dump=str(tmp_path)))
    printed = capsys.readouterr().err
    assert "# softmax: allocate\nplan softmax" in printed and "# softmax: reorder" not in printed
    names = [f"{number:02d}_{name}.txt" for number, name in stages_of(Config())]
    assert sorted(path.name for path in (tmp_path / "softmax").iterdir()) == names == sorted(names)
    assert parse((tmp_path / "softmax" / "90_plan.txt").read_text()) == compiled.plan


# ---- the verifier


def changed(plan, **buffers):
    """The plan with other lives of buffers."""
    return dataclasses.replace(plan, buffers=tuple(
        dataclasses.replace(b, first=buffers[b.name][0], last=buffers[b.name][1]) if b.name in buffers else b
        for b in plan.buffers))


def with_step(plan, number, step):
    return dataclasses.replace(plan, steps=(*plan.steps[:number], step, *plan.steps[number:]))


def test_the_verifier_sees_what_is_wrong_before_there_are_offsets():
    plan = small()
    group = next(after for name, _, after in examples("group_launches") if name == "group_launches")
    verify(plan)
    verify(group)
    wrong = {
        "step 1 touches a, which is there from step 0 to 0": changed(plan, a=(0, 0)),
        "y is handed on, and no step makes it": dataclasses.replace(plan, steps=plan.steps[:2]),
        "step 0 reads a, which is not made by then": dataclasses.replace(plan, steps=plan.steps[1:]),
        "there are no steps 2-3 to be done as one": dataclasses.replace(plan, together=((2, 3),)),
        "a kernel comes before a product": dataclasses.replace(plan, together=((0, 1),)),
        "one writes what another touches": dataclasses.replace(group, steps=(
            group.steps[0], dataclasses.replace(group.steps[1], inputs=(Window("q", group.steps[0].outputs[0].type),
                                                                        group.steps[1].inputs[1])), *group.steps[2:])),
        "k is not there in all of steps 0-1": changed(group, k=(1, 3)),
        "drops what is needed later, or takes what is there: x": with_step(
            changed(plan, a=(0, 9), b=(0, 9), y=(0, 9)), 0, MemoryStep((), ("x",))),
    }
    for why, one in wrong.items():
        with pytest.raises(VerifyError) as caught:
            verify(one, "a pass")
        assert why in caught.value.why and caught.value.where == "after a pass", (why, caught.value)


def test_a_result_takes_the_place_of_the_input_that_dies():
    """Of two that it could lie in, the first is the caller's."""
    plan = parse(textwrap.dedent("""\
        plan two  arena 0
          where 1 <= n, n near 4096
          in      x: f32[n]  4*n bytes  steps 0-1
          buffer  a: f32[n]  4*n bytes  steps 0-1  arena
          buffer  b: f32[n]  4*n bytes  steps 1-2  arena
          buffer  y: f32[n]  4*n bytes  steps 2-3  output 0
          0  kernel k0(x, &a; n)
          1  kernel k1(x, a, &b; n)
               {reuse=[[0, 2], [1, 2]]}
          2  matmul(b, b) -> y
          out     y
        """))
    verify(plan)
    assert in_place(plan) == {"b": "a"}
