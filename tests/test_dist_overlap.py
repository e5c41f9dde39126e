"""Asynchronous collectives in plans: launches and waits apart, messages as memory, the verifier that judges them."""
from __future__ import annotations

import dataclasses
import importlib
import re
import textwrap
from functools import cache

import pytest
import torch

from anyshape.backend.targets import target_of
from anyshape.base.config import Config
from anyshape.base.errors import VerifyError
from anyshape.compiler.compiled import BackwardGraph
from anyshape.compiler.driver import plan_graph
from anyshape.dist.buckets import bucketed
from anyshape.dist.halves import gathered_first, halves_of
from anyshape.dist.lower import lowered, message_elements
from anyshape.dist.mesh import mesh_of
from anyshape.dist.strategies import partitioned, strategy_of
from anyshape.ir.asynchronous import START, WAIT
from anyshape.ir.graph import Graph
from anyshape.ir.parse import parse as parse_graph
from anyshape.ir.types import SizeType
from anyshape.ir.verify import verify as verify_graph
from anyshape.ops.collective import COLLECTIVES
from anyshape.plan.ir.context import PlanContext
from anyshape.plan.ir.parse import parse
from anyshape.plan.ir.program import ExternStep, KernelStep, Plan, Window, is_launch, is_wait, touched
from anyshape.plan.memory.mutation_copy_elision import without
from anyshape.plan.schedule.overlap import overlap_collectives
from anyshape.plan.schedule.reorder import bytes_at_hints, dependencies
from anyshape.plan.verify import verify
from anyshape.runtime.call.extern_table import held_bytes
from anyshape.sym.expr import evaluate
from dist_model import Llama, capture


@cache
def examples() -> tuple[Plan, Plan]:
    """The plans at the head of the pass, before and after."""
    text = importlib.import_module(overlap_collectives.__module__).__doc__ or ""
    found = re.split(r"^(?:before|after \w+):\n", text, flags=re.MULTILINE)[1:]
    before, after = (parse(textwrap.dedent(one.split("\n\n")[0])) for one in found)
    return before, after


def changed(plan: Plan, number: int, **fields: object) -> Plan:
    steps = list(plan.steps)
    steps[number] = dataclasses.replace(steps[number], **fields)  # type: ignore[arg-type]
    return dataclasses.replace(plan, steps=tuple(steps))


def test_a_wait_that_is_missing_is_found() -> None:
    _, plan = examples()
    verify(plan)
    wait = next(number for number, step in enumerate(plan.steps) if is_wait(step))
    launch = next(number for number, step in enumerate(plan.steps) if is_launch(step))
    # its results are read from the message, as if it had come
    reader = plan.steps[wait + 1]
    assert isinstance(reader, KernelStep)
    message = plan.steps[launch].outputs[0]  # type: ignore[union-attr]
    assert isinstance(message, Window)
    early = changed(plan, wait + 1, params=(message, *reader.params[1:]))
    gone = dataclasses.replace(without(early, {wait}), buffers=tuple(
        dataclasses.replace(b, last=3) if b.name == message.buffer else b for b in without(early, {wait}).buffers
        if b.name != "s"))
    with pytest.raises(VerifyError) as caught:
        verify(gone)
    assert caught.value.why == f"step {launch} launches a collective, and it is not waited for once"
    with pytest.raises(VerifyError, match="which is under way"):
        verify(early)
    with pytest.raises(VerifyError, match="that no step before it launches"):
        verify(changed(plan, launch, target="aten.clone.default"))
    with pytest.raises(VerifyError, match="is not waited for once"):
        verify(changed(plan, wait, target="aten.clone.default"))


def chain(count: int) -> Plan:
    """A backward of `count` layers, each with a gradient that is sent, and then the updates of the weights."""
    lines = ["plan backward  arena 0", "  where 1 <= n", "  in      x: f32[n]  4*n bytes  steps 0-1"]
    steps, last = [], "x"
    for k in range(count):
        lines += [f"  in      w{k}: f32[n]  4*n bytes  steps 0-{6 * count}"]
        at = len(steps)
        steps += [f"kernel h(x, {last}, &h{k}; n)", f"kernel g(h{k}, &g{k}; n)", f"call {START}(g{k}) -> m{k}",
                  f"call {WAIT}(m{k}) -> s{k}", f"kernel update(w{k}, s{k}, &w{k}; n)"]
        steps[at + 2] += f"\n       {{template=[], effect={2 * k + 1}}}"
        steps[at + 3] += f"\n       {{template=[], effect={2 * k + 2}}}"
        if last == "x":
            steps[at] = f"kernel h(x, &h{k}; n)"
        last = f"h{k}"
        for name, home, first, end in (("h", "arena", 0, 5), ("g", "arena", 1, 2), ("m", "extern", 2, 3),
                                       ("s", "extern", 3, 4)):
            end = min(end, 1) if name == "h" and k + 1 == count else end
            lines += [f"  buffer  {name}{k}: f32[n]  4*n bytes  steps {at + first}-{at + end}  {home}"]
    lines[2] = f"  in      x: f32[n]  4*n bytes  steps 0-{len(steps)}"
    return parse("\n".join([*lines, *(f"  {k}  {step}" for k, step in enumerate(steps))]) + "\n")


def test_a_message_travels_behind_the_layers_below_and_the_last_one_behind_updates() -> None:
    plan = chain(4)
    verify(plan)
    moved = overlap_collectives(plan)
    verify(moved)
    words = []
    for step in moved.steps:
        name = step.regimes[0].kernel if isinstance(step, KernelStep) else "start" if is_launch(step) else "wait"
        words.append(name)
    # updates come where a launch waits for room among the messages, behind the layer that is ready
    assert " ".join(words) == ("h g start h g start h g wait start h g update wait start update "
                               "wait update wait update")
    launched = [step.effect for step in moved.steps if isinstance(step, ExternStep) and is_launch(step)]
    assert launched == sorted(launched)  # ranks whose plans differ send the same messages in the same order


def test_under_a_limit_plans_need_no_more_memory() -> None:
    plan = chain(4)
    limited = overlap_collectives(plan, PlanContext(Config(memory_limit=1 << 20)))
    verify(limited)
    free = overlap_collectives(plan)

    def most(one: Plan) -> int:  # the arena and what is beside it, buffers of one size
        curves = [[sum(b.first <= k <= b.last for b in one.buffers if b.is_external is beside and not b.is_input)
                   for k in range(len(one.steps))] for beside in (False, True)]
        return sum(map(max, curves))

    assert most(limited) <= most(plan) < most(free)
    assert [is_wait(step) for step in limited.steps] != [is_wait(step) for step in plan.steps]


def ahead(words: int, later: int = 1) -> Plan:
    """A message, what is made of it, and behind that a step that could hide it and makes `words` numbers a row; then
    one that makes `later` numbers a row."""
    return parse(f"""plan step  arena 0
  where 1 <= n, n near 1048576
  in      x: f32[n]  4*n bytes  steps 0-5
  buffer  g: f32[n]  4*n bytes  steps 0-1  arena
  buffer  m: f32[16, n]  64*n bytes  steps 1-2  arena
  buffer  s: f32[n]  4*n bytes  steps 2-4  arena
  buffer  h: f32[{words}, n]  {4 * words}*n bytes  steps 3-4  arena
  buffer  y: f32[n]  4*n bytes  steps 4-7  output 0
  buffer  z: f32[{later}, n]  {4 * later}*n bytes  steps 5-6  arena
  buffer  v: f32[n]  4*n bytes  steps 6-7  output 1
  0  kernel k0(x, &g; n)
  1  call {START}(g) -> m
       {{template=[], effect=1}}
  2  call {WAIT}(m) -> s
       {{template=[], effect=2}}
  3  kernel k2(x, &h; n)
  4  kernel k3(s, h, &y; n)
  5  kernel k4(x, &z; n)
  6  kernel k5(z, &v; n)
  out     y, v
""")


@pytest.mark.parametrize(("words", "later", "hides"), [(0, 1, True), (8, 1, False), (64, 1, False), (64, 128, True)])
def test_a_step_hides_a_message_where_the_plan_needs_hardly_more_for_it(words: int, later: int, hides: bool) -> None:
    plan = ahead(words, later)  # which is no fuller for it where a later step makes more
    verify(plan)
    moved = overlap_collectives(plan)
    verify(moved)
    waits = [is_wait(step) for step in moved.steps]
    assert waits.index(True) == (3 if hides else 2)


def test_only_around_the_fullest_step_a_message_is_waited_for_at_once() -> None:
    """What comes early where there is room does not add to what the fullest step has alive, also if that is later."""
    lines, steps = [], []
    for name, rows, others in (("a", 16, 0), ("b", 16, 128), ("c", 16, 0)):  # the second one has much more alive
        at = len(steps)
        for part, home, count, first, last in (
                ("g", "arena", 1, 0, 1), ("m", "arena", 16, 1, 2), ("s", "arena", 1, 2, 4), ("h", "arena", rows, 3, 4),
                ("z", "arena", others, 3, 4), ("y", f"output {'abc'.index(name)}", 1, 4, 15 - at)):
            if count:
                lines.append(f"  buffer  {part}{name}: f32[{count}, n]  {4 * count}*n bytes  "
                             f"steps {at + first}-{at + last}  {home}")
        full = f", &z{name}" * bool(others), f", z{name}" * bool(others)
        steps += [f"kernel k0(x, &g{name}; n)",
                  f"call {START}(g{name}) -> m{name}\n       {{template=[], effect={2 * at + 1}}}",
                  f"call {WAIT}(m{name}) -> s{name}\n       {{template=[], effect={2 * at + 2}}}",
                  f"kernel h{name}(x, &h{name}{full[0]}; n)", f"kernel k3(s{name}, h{name}{full[1]}, &y{name}; n)"]
    plan = parse("\n".join(["plan step  arena 0", "  where 1 <= n, n near 1048576",
                            "  in      x: f32[n]  4*n bytes  steps 0-13", *lines,
                            *(f"  {k}  {step}" for k, step in enumerate(steps)), "  out     ya, yb, yc"]) + "\n")
    verify(plan)
    moved = overlap_collectives(plan)
    verify(moved)
    order = [step.regimes[0].kernel if isinstance(step, KernelStep) else touched(step)[0].buffer
             for step in moved.steps if not is_launch(step)]
    assert order.index("ha") < order.index("ma") and order.index("hc") < order.index("mc"), order
    assert order.index("mb") < order.index("hb"), order
    assert bytes_at_hints(moved, PlanContext()) <= bytes_at_hints(plan, PlanContext())


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_messages_and_what_they_bring_lie_in_the_arena(mode: str) -> None:
    torch.manual_seed(0)
    captured = capture(Llama(layers=2), in_halves=True)
    strategy = strategy_of(mode, 2)
    local = gathered_first(partitioned(captured.graph, strategy, captured.roles)[-1].graph, captured.roles.data)
    halves = halves_of(local, captured.first, captured.roles.data, False)
    forward, backward = (lowered(bucketed(one), strategy.mesh) for one in (halves.forward, halves.backward))
    config = Config()
    first = plan_graph(forward, target_of(config), config, None, (), True)
    second = plan_graph(BackwardGraph(backward, {}, ()).reading(first.plan), target_of(config), config, first, (), True)
    values = {name: 8 for graph in (forward, backward) for name in symbols(graph)}
    for plan in (first.plan, second.plan):
        # all that a call has beside its arena are its results: sums of few numbers
        assert held_bytes(plan, values) <= 64 < sum(evaluate(b.bytes, values) for b in plan.buffers if b.is_temp)
        assert any(map(is_launch, plan.steps)) or mode == "ddp"


def symbols(graph: Graph) -> list[str]:
    """The sizes among the inputs of a graph."""
    return [v.name for v in graph.inputs if isinstance(v.type, SizeType)]


def test_a_gathered_weight_goes_before_its_gradient_comes() -> None:
    graph = parse_graph("""
graph step(n: size, x: f32[n, 6], d: f32[n, 8], w: f32[4, 6])
  whole = all_gather(w | axis="data", parts=[[0, 1, 8, 1, 4]])  f32[8, 6]
  t = permute(d | dims=[1, 0])  f32[8, n]
  g = matmul(t, x)  f32[8, 6]
  own = reduce_scatter(g | axis="data", parts=[[0, 1, 8, 1, 4]])  f32[4, 6]
  y = matmul(d, whole)  f32[n, 6]
  return own, y
""")
    found = [node.outputs[0].name for node in bucketed(graph).nodes]
    assert found.index("y") < found.index("g") < found.index("own")


def test_a_weight_is_gathered_before_the_gradients_of_the_layer_above_are_sent() -> None:
    """So that layer's message does not stand between the next layer and its weight; under a limit each comes late."""
    lines = ["graph step(n: size, d: f32[n, 8], a: f32[4, 8], b: f32[4, 8], c: f32[4, 8])"]
    last = "d"
    for one in "abc":
        whole = f'all_gather({one} | axis="data", parts=[[0, 1, 8, 1, 4]])  f32[8, 8]'
        lines += [f"  whole_{one} = {whole}", f"  y_{one} = matmul({last}, whole_{one})  f32[n, 8]",
                  f"  t_{one} = permute({last} | dims=[1, 0])  f32[8, n]",
                  f"  g_{one} = matmul(t_{one}, y_{one})  f32[8, 8]",
                  f'  own_{one} = reduce_scatter(g_{one} | axis="data", parts=[[0, 1, 8, 1, 4]])  f32[4, 8]']
        last = f"y_{one}"
    graph = parse_graph("\n".join(["", *lines, "  return own_a, own_b, own_c, y_c", ""]))
    for ahead, wanted in ((True, "whole_a whole_b own_a whole_c own_b own_c"),
                          (False, "whole_a own_a whole_b own_b whole_c own_c")):
        found = bucketed(graph, 1, ahead)
        verify_graph(found)
        assert " ".join(node.outputs[0].name for node in found.nodes if node.op in COLLECTIVES) == wanted


def test_gradients_travel_in_buckets_of_equal_size() -> None:
    """Larger first ones would leave less of the backward behind which they travel."""
    lines = ["graph step(n: size, x: f32[n, 8])"]
    for k in range(30):
        lines += [f"  g{k} = sum(x | dims=[0], keep=false)  f32[8]",
                  f'  s{k} = all_reduce(g{k} | axis="data", combine="add")  f32[8]']
    graph = parse_graph("\n".join(["", *lines, f"  return {', '.join(f's{k}' for k in range(30))}", ""]))
    assert [len(node.inputs) for node in bucketed(graph).nodes if node.op == "all_reduce"] == [15, 15]


def test_a_launch_waits_for_no_check_before_it() -> None:
    """A gather goes on while an index is checked, in its place among launches."""
    plan = parse(f"""plan step  arena 0
  where 1 <= n
  in      x: f32[n]  4*n bytes  steps 0-2
  buffer  h: f32[n]  4*n bytes  steps 0-3  output 0
  buffer  m: f32[n]  4*n bytes  steps 1-2  arena
  buffer  s: f32[n]  4*n bytes  steps 2-3  output 1
  0  kernel k0(x, status: i64[], &h; n)
  1  call {START}(x) -> m
       {{template=[], effect=1}}
  2  call {WAIT}(m) -> s
       {{template=[], effect=2}}
  out     h, s
""")
    assert 0 not in dependencies(plan)[1]


def test_the_length_of_a_message_is_a_formula() -> None:
    graph = parse_graph("""
graph step(n: size, c: size, x: f32[c, 6], y: f32[n, 4])
  s, t = all_reduce(y, y | axis="data", combine="add")  f32[n, 4], f32[n, 4]
  g = all_gather(x | axis="data", parts=[[0, 1, n, 1, c]])  f32[n, 6]
  r = reduce_scatter(y | axis="data", parts=[[0, 1, n, 1, c]])  f32[c, 4]
  e = all_to_all(x | axis="data", parts=[[0, 1, n, 1, c]], into=[[1, 1, 6, 1, 2]])  f32[n, 2]
  return s, t, g, r, e
""")
    found = [str(message_elements(node, 3)) for node in graph.nodes]
    assert found == ["8*n", "18*((n + 2)//3)", "16*((n + 2)//3)", "12*((n + 2)//3)"]
    low = lowered(graph, mesh_of(data=3))
    verify_graph(low)
    targets = [node.attr("target") for node in low.nodes]
    assert targets == [START, WAIT] * 4
    assert [value.name for node in low.nodes for value in node.outputs][-1] == "e"
