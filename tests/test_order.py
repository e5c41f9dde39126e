"""Steps in another order (plan/schedule/reorder.py): the same results, never more bytes, and as few as an exact search
finds."""
from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import anyshape
from anyshape.base.errors import VerifyError
from anyshape.ir.types import TensorType
from anyshape.kernel.fusion.result import FusedKernel
from anyshape.plan.ir.home import External, Input, Output, Temp
from anyshape.plan.ir.liveness import caller_owned
from anyshape.plan.ir.program import (
    Buffer,
    CopyStep,
    ExternStep,
    KernelStep,
    LibraryStep,
    Plan,
    Window,
    step_writes,
    touched,
)
from anyshape.plan.memory.mutation_copy_elision import hoist_mutations
from anyshape.plan.memory.output_as_scratch import alias_buffers
from anyshape.plan.memory.symbolic_allocator import allocate
from anyshape.plan.schedule.beam_search import Problem, search
from anyshape.plan.schedule.launch_grouping import group_launches
from anyshape.plan.schedule.reorder import WORTH, dependencies, no_more, permuted, reorder
from anyshape.plan.verify import judge, lower_bound
from anyshape.sym.expr import evaluate, symbol
from anyshape.sym.facts import Facts
from roads import compilation_of
from sampling import examples

b, s = symbol("b"), symbol("s")
FACTS = Facts(ranges=(("b", 1, None), ("s", 1, 4096)), hints=(("b", 8), ("s", 512)))
SIZES = [256 * b * s, 1024 * b * s, 4 * b * s * s, 2 * b * s, 1 << 20, 4096 * s, 64]
SHAPES = [{"b": 1, "s": 1}, {"b": 3, "s": 17}, {"b": 8, "s": 512}, {"b": 64, "s": 33}, {"b": 1, "s": 4096}]


# ---- the search

def random_problem(seed, units=7):
    generator = random.Random(seed)
    before, users, sizes = [0] * units, [], []
    for maker in range(units):
        readers = [k for k in range(maker + 1, units) if generator.random() < 0.3]
        for k in readers:
            before[k] |= 1 << maker
        users.append(1 << maker | sum(1 << k for k in readers))
        sizes.append(generator.choice((1, 2, 5, 10, 40)))
    touches = [[v for v, who in enumerate(users) if who >> unit & 1] for unit in range(units)]
    kinds = [int(generator.random() < 0.3) for _ in users]
    over = [[(v, unit) for v in touches[unit] if v != unit and sizes[v] == sizes[unit] and kinds[v] == kinds[unit]]
            for unit in range(units)]
    late = {v for v in range(units) if generator.random() < 0.2}
    after = [[k for k in range(units) if before[k] >> unit & 1] for unit in range(units)]
    return Problem(before, after, touches, users, sizes, kinds, set(), late, over, generator.choice((0, 0, 30)),
                   [generator.random() < 0.5 for _ in range(units)])


def valid_orders(problem):
    for order in itertools.permutations(range(len(problem.before))):
        done = 0
        for unit in order:
            if problem.before[unit] & ~done:
                break
            done |= 1 << unit
        else:
            yield order


@pytest.mark.parametrize("seed", range(30))
def test_the_search_is_exact_where_it_can_hold_all_states(seed):
    problem = random_problem(seed)
    peaks = {order: problem.peak(order) for order in valid_orders(problem)}
    program = tuple(range(len(problem.before)))
    least = problem.least(program)
    assert least <= min(peaks.values())
    found = search(problem, peaks[program], 1 << 20)
    assert found is not None and peaks[tuple(found)] == min(peaks.values())
    assert search(problem, min(peaks.values()) - 1, 1 << 20) is None


def test_the_search_costs_what_it_may():
    problem = random_problem(1, 400)
    search(problem, problem.peak(range(400)), 100_000)
    assert problem.looks < 400_000


# ---- plans

def random_plan(seed, count=12, writes=0.0):
    """Steps that read and make values at random; some draw numbers, some write an input, `writes` of them nothing else.
    """
    generator = random.Random(seed)
    buffers = {name: Buffer(name, 64, Input(k), 0, 0) for k, name in enumerate(("x", "y"))}
    steps, made, read = [], {}, set()
    for k in range(count):
        names = generator.sample(list(buffers), min(len(buffers), generator.choice((1, 2, 2))))
        reads = tuple(Window(name, TensorType("u8", (buffers[name].bytes,))) for name in names)
        kind = generator.random()
        if kind < 0.08:
            steps.append(CopyStep(reads[0], Window(generator.choice("xy"), TensorType("u8", (64,)))))
        elif kind >= 1 - writes:
            steps.append(LibraryStep("op", reads, (Window(generator.choice("xy"), TensorType("u8", (64,))),),
                                     (("number", k),)))
        else:
            size = generator.choice(SIZES)
            result = Window(f"v{k}", TensorType("u8", (size,)))
            home = External() if kind < 0.3 else Temp()
            buffers[f"v{k}"] = Buffer(f"v{k}", size, home, k, k)
            made[f"v{k}"] = k
            steps.append(ExternStep("aten.op.default", reads, ("op", k), (result,), effect=k + 1 if kind < 0.2 else 0)
                         if isinstance(home, External) else LibraryStep("op", reads, (result,), (("number", k),)))
        read.update(names)
    outputs = tuple(Window(name, TensorType("u8", (buffers[name].bytes,))) for name in made if name not in read)
    for index, window in enumerate(outputs):
        name = window.buffer
        if buffers[name].is_temp:
            buffers[name] = Buffer(name, buffers[name].bytes, Output(index), made[name], count)
    last = {window.buffer: k for k, step in enumerate(steps) for window in touched(step)}
    last |= {window.buffer: count for window in outputs}
    finished = tuple(Buffer(one.name, one.bytes, one.home, one.first, last.get(one.name, 0))
                     for one in buffers.values())
    return Plan("random", (TensorType("u8", (64,)), TensorType("u8", (64,))), outputs, (), finished, tuple(steps), (),
                0, FACTS)


def outcome(plan):
    """What a run gives: results, what inputs hold, and what was drawn, with where each comes from."""
    state, drawn = {"x": "x", "y": "y"}, []
    for step in plan.steps:
        results = {window.buffer for window in step_writes(step)}
        seen = tuple(state[window.buffer] for window in touched(step) if window.buffer not in results)
        value = (getattr(step, "attrs", ()), getattr(step, "template", ()), seen)
        if isinstance(step, ExternStep) and step.effect:
            value = (len(drawn), value)
            drawn.append(value)
        state |= dict.fromkeys(results, value)
    return [state[window.buffer] for window in plan.outputs], state["x"], state["y"], drawn


def beside(plan, values):
    """Bytes of results and tensors of PyTorch at the fullest step."""
    return max(sum(evaluate(one.bytes, values) for one in plan.buffers
                   if one.is_allocated_tensor and one.first <= step <= one.last)
               for step in range(len(plan.steps) + 1))


@pytest.mark.parametrize("seed", range(60))
def test_another_order_gives_the_same_and_takes_no_more(seed):
    plan = random_plan(seed)
    other, *_ = reorder(plan)
    assert outcome(other) == outcome(plan)
    # steps that only write inputs come first as early as they can; what is found then is no worse in either kind
    ahead = permuted(plan, hoist_mutations(plan, dependencies(plan)))
    was, old, new = (allocate(group_launches(alias_buffers(one))) for one in (plan, ahead, other))
    generator = random.Random(seed)
    for values in (*SHAPES, *({"b": generator.randint(1, 300), "s": generator.randint(1, 4096)} for _ in range(8))):
        judge(new, values)
        assert lower_bound(new, values) <= lower_bound(old, values)
        assert beside(new, values) <= beside(old, values)
        # a value may have found room in a result, which is then there sooner
        assert lower_bound(old, values) + beside(old, values) <= lower_bound(was, values) + beside(was, values)


def test_what_only_writes_inputs_waits_for_all_that_it_needs():
    moved = 0
    for seed in range(300):
        plan = random_plan(seed, writes=0.4)
        order = hoist_mutations(plan, dependencies(plan))
        moved += order != sorted(order)
        assert outcome(permuted(plan, order)) == outcome(plan)
    assert moved > 100


def test_the_judge_sees_what_is_read_before_it_is_made():
    plan = allocate(random_plan(3))
    judge(plan, SHAPES[1])
    with pytest.raises(VerifyError, match=r"step \d+ reads .*, which is not made by then"):
        judge(dataclasses.replace(plan, steps=plan.steps[::-1]), SHAPES[1])


def test_an_order_beside_gives_the_same_and_takes_less_where_it_was_looked_for():
    count = 0
    for seed in range(60):
        plan = random_plan(seed)
        best, *others = reorder(plan)
        for other in others:
            count += 1
            assert outcome(other) == outcome(plan)
            old, new = (allocate(group_launches(alias_buffers(one))) for one in (best, other))
            hints = dict(plan.facts.hints)
            judge(new, hints)
            needs = [lower_bound(one, hints) + beside(one, hints) for one in (old, new)]
            assert needs[1] <= WORTH * needs[0]
    assert count > 3


def test_random_plans_gain_something():
    changed = [seed for seed in range(60) if (plan := random_plan(seed)) is not reorder(plan)[0]]
    assert len(changed) > 15


polynomials = st.lists(st.tuples(st.integers(-3, 4), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=4).map(
    lambda terms: sum((k * _power(b, i) * _power(s, j) for k, i, j in terms), start=0))


def _power(one, times):
    return one * _power(one, times - 1) if times else 1


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(polynomials, min_size=1, max_size=4), st.lists(polynomials, min_size=1, max_size=4))
def test_a_peak_that_is_proved_to_be_no_higher_is_none(new, old):
    facts = Facts(ranges=(("b", 1, 6), ("s", 0, 9)))
    if no_more(new, old, facts):
        for x, y in itertools.product(range(1, 7), range(10)):
            values = {"b": x, "s": y}
            assert max(evaluate(one, values) for one in new) <= max(evaluate(one, values) for one in old)


# ---- programs

def towers(x, *weights):
    """All wide values are made before the first of them is used."""
    wide = [torch.softmax(x @ w, -1) for w in weights[::2]]
    return sum(torch.tanh(h @ v) for h, v in zip(wide, weights[1::2], strict=True))


def of_towers(count=4, width=256):
    torch.manual_seed(0)
    return [torch.randn(*shape) for _ in range(count) for shape in ((32, width), (width, 16))]


def arena(fast, rows):
    """Bytes of the arena of a call with so many rows; the first one had 300."""
    program = fast.programs[0].compiled
    return program.executable.specializer.arena({name: rows if likely == 300 else likely
                                           for name, likely in program.plan.facts.hints})


def test_towers_run_one_after_another():
    weights = of_towers()
    with torch.no_grad():
        fast, plain = (anyshape.compile(towers, strict=True, check=1, disable=name) for name in ("", "order"))
        for rows in (300, 7, 1, 0, 1000):
            one = torch.randn(rows, 32)
            torch.testing.assert_close(fast(one, *weights), towers(one, *weights), rtol=1e-4, atol=1e-3)
            assert torch.equal(fast(one, *weights), plain(one, *weights))
        wide = 4 * 300 * 256
        assert arena(plain, 300) >= 4 * wide
        assert arena(fast, 300) <= 2 * wide
        compiled = fast.programs[0].compiled
        kernels = [item for item in compiled.fusion.items if isinstance(item, FusedKernel)]
        steps = [step for step in compiled.plan.steps if isinstance(step, KernelStep)]
        assert [step.where for step in steps] == ["; ".join(dict.fromkeys(
            node.where for node in one.group.nodes if node.where)) for one in kernels]
        assert str(fast.explain())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000))
def test_towers_take_no_more_at_any_size(rows):
    fast, plain = _both()
    assert arena(fast, rows) <= arena(plain, rows)


_compiled = []


def _both():
    if not _compiled:
        weights = of_towers()
        for name in ("", "order"):
            with torch.no_grad():
                one = anyshape.compile(towers, strict=True, disable=name)
                one(torch.randn(300, 32), *weights)
            _compiled.append(one)
    return _compiled


def test_draws_keep_their_order():
    def noisy(x, *weights):
        wide = [functional.dropout(torch.relu(x @ w), 0.3, True) for w in weights[::2]]
        return sum(torch.tanh(h @ v) for h, v in zip(wide, weights[1::2], strict=True))

    weights, x = of_towers(), torch.randn(300, 32)
    fast = anyshape.compile(noisy, strict=True)
    for seed in range(3):
        torch.manual_seed(seed)
        wanted = noisy(x, *weights)
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        torch.testing.assert_close(fast(x, *weights), wanted, rtol=1e-4, atol=1e-3)
        assert torch.equal(torch.get_rng_state(), after)


def test_written_inputs_are_read_before_and_after():
    def writes(x, total, *weights):
        wide = [torch.softmax(x @ w, -1) for w in weights[::2]]
        first = (total * 2).sum()
        total.add_(wide[0].sum(0))
        second = (total * 3).sum()
        total.mul_(wide[-1].mean(0))
        return sum(torch.tanh(h @ v) for h, v in zip(wide, weights[1::2], strict=True)), first, second

    weights, x = of_towers(), torch.randn(300, 32)
    fast = anyshape.compile(writes, strict=True)
    ours, theirs = torch.zeros(256), torch.zeros(256)
    with torch.no_grad():
        for _ in range(3):
            for found, wanted in zip(fast(x, ours, *weights), writes(x, theirs, *weights), strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-2)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-2)


def test_a_train_step_gives_the_same_gradients():
    weights = [one.requires_grad_() for one in of_towers()]

    def gradients(run, x):
        for one in weights:
            one.grad = None
        run(x, *weights).square().sum().backward()
        return [one.grad for one in weights]

    fast, plain = (anyshape.compile(towers, strict=True, disable=name) for name in ("", "order"))
    for rows in (300, 40):
        x = torch.randn(rows, 32)
        for found, same, wanted in zip(gradients(fast, x), gradients(plain, x), gradients(towers, x), strict=True):
            assert torch.equal(found, same)
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-2 * wanted.abs().max())


def test_inputs_of_a_whole_step_are_not_the_calls_to_free():
    """What an order needs is what the call takes: parameters and optimiser state, which a step reads last in their
    update, are there before and after it; the gradient that comes into a backward is the call's alone."""
    model = torch.nn.Linear(32, 64)
    step = anyshape.train_step(model, lambda model, x: model(x).square().sum(), torch.optim.AdamW(model.parameters()))
    step(torch.randn(300, 32))
    forward, backward = (program.compiled.plan for program in step.programs)
    assert all(b.is_external for b in backward.buffers if b.name in caller_owned(backward, forward))

    fast = anyshape.compile(model)
    fast(torch.randn(300, 32)).square().sum().backward()
    forward, backward = (program.compiled.plan for program in compilation_of(fast).programs)
    assert any(b.is_input for b in backward.buffers if b.name in caller_owned(backward, forward))
