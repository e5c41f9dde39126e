"""Asynchronous collectives in plans: launches and waits apart, messages as memory, the verifier that judges them."""
from __future__ import annotations

import dataclasses
import importlib
import re
import textwrap
from functools import cache

import pytest

from anyshape.base.config import Config
from anyshape.base.errors import VerifyError
from anyshape.dist.lower import lowered, message_elements
from anyshape.dist.mesh import mesh_of
from anyshape.ir.asynchronous import START, WAIT
from anyshape.ir.parse import parse as parse_graph
from anyshape.ir.verify import verify as verify_graph
from anyshape.plan.ir.context import PlanContext
from anyshape.plan.ir.parse import parse
from anyshape.plan.ir.program import ExternStep, KernelStep, Plan, Window, is_launch, is_wait
from anyshape.plan.memory.mutation_copy_elision import without
from anyshape.plan.schedule.overlap import overlap_collectives
from anyshape.plan.verify import verify


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
    assert " ".join(words) == ("h g start h g start h g wait start update h g wait start update "
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
