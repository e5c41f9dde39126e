"""Speculative routing: predicted paths with check and roll-back have the results of the model, whatever is decided."""
from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
from torch import nn

import anyshape
from anyshape import route
from anyshape.base.errors import AnyShapeError
from anyshape.route.flow import branch_independent
from anyshape.route.optimize.decision import shared_copy
from anyshape.route.profile.routers import routers_of
from anyshape.route.speculate import OverlappedRouter, Payoff, Speculated
from anyshape.route.speculate.captured import ImpureRegion
from anyshape.route.speculate.path_tree import COMMIT, Branching

WIDTH = 8
NAMES = ("exit0", "exit1", "exit2")


class Exits(nn.Module):
    """A network with an exit after each block; a sample's first feature says at which it leaves."""

    def __init__(self, number: int = 0, depth: int = 3, block: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.number, self.router = number, None
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) if block is None else block
        self.head = nn.Linear(WIDTH, 3)
        if depth:
            rest = Exits(number + 1, depth - 1, block)
            self.router = route.Router(self.decide, [lambda logits, x, goal: logits, Rest(rest)], name=f"exit{number}")

    def decide(self, logits, x, goal):
        return ((goal > self.number) & (logits[:, 0] > -9)).long()

    def forward(self, x, goal):
        x = self.block(x)
        logits = self.head(x)
        return logits if self.router is None else self.router((logits, x, goal))


class Rest(nn.Module):
    def __init__(self, rest: nn.Module) -> None:
        super().__init__()
        self.rest = rest

    def forward(self, logits, x, goal):
        return self.rest(x, goal)


def path(exit_number: int) -> dict[str, list[tuple[int, ...]]]:
    return {name: [(int(number < exit_number),)] for number, name in enumerate(NAMES) if number <= exit_number}


def speculated(model: nn.Module, predictions, **options) -> Speculated:
    """Always on, unless a clock is given: nothing takes time."""
    general, copy = shared_copy(model), shared_copy(model)
    ours, theirs = routers_of(general), routers_of(copy)
    options.setdefault("clock", lambda: 0.0)
    return Speculated(general, copy, {name: (ours[name], theirs[name]) for name in ours}, predictions, **options)


def sample(*goals: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(len(goals), WIDTH), torch.tensor(goals)


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("defer", [True, False], ids=["deferred", "committed"])
@pytest.mark.parametrize("percent", [0, 25, 100])
def test_results_are_those_of_the_model_at_every_rate_of_wrong_predictions(percent, defer):
    model = Exits().eval()
    fast = speculated(model, [(path(2), 0.6), (path(1), 0.4)], defer=defer)
    fast(*sample(2))
    wrong = 0
    for number in range(40):
        miss = number * percent // 100 != (number + 1) * percent // 100
        x, goal = sample((0, 3)[number % 2] if miss else (1, 2)[number % 2])
        assert torch.equal(fast(x, goal), model(x, goal))
        wrong += miss
    found = fast.summary()
    assert wrong == 40 * percent // 100
    assert (found["hits"], found["misses"], found["roll_backs"]) == (40 - wrong, wrong, wrong)
    assert found["errors"] == found["redone_cells"] == 0


def test_a_decision_that_turns_out_else_goes_on_from_there():
    """Both paths are known: the general path is not needed, though all decisions were computed ahead."""
    model = Exits().eval()
    fast = speculated(model, [(path(3), 0.9), (path(0), 0.1)], defer=True)
    fast(*sample(3))
    [prepared] = fast.prepared.values()
    assert len(prepared.tree.root.shapes) == 3 and prepared.tree.programs == 1
    x, goal = sample(0)
    assert torch.equal(fast(x, goal), model(x, goal))
    assert fast.summary()["wasted"] == 1 and fast.summary()["roll_backs"] == 0


def test_paths_share_what_they_have_in_common():
    fast = speculated(Exits().eval(), [(path(number), 0.25) for number in range(4)], defer=False)
    tree = fast.plan(sample(1), {})
    assert tree.programs == 4  # one a block; an exit's logits are there already


def test_decisions_are_read_together_while_all_of_them_are_likely():
    """One after another is nine in ten and again; the commit that is saved takes a third of the work in vain."""
    fast = speculated(Exits().eval(), [(path(1), 1.0)])
    begin, first, second = Branching(count=1.0), Branching(count=0.9), Branching(count=0.7)
    seconds = {COMMIT: 1.0, first: 3.0, second: 3.0}
    assert fast._is_deferred(begin, first, seconds) and fast._is_deferred(first, second, seconds)
    assert not fast._is_deferred(begin, second, seconds)


def test_a_plan_times_each_step_of_the_likeliest_path():
    ticks = itertools.count()
    fast = speculated(Exits().eval(), [(path(2), 0.9), (path(0), 0.1)], clock=lambda: float(next(ticks)))
    tree = fast.plan(sample(2), {})  # a commit takes as long as each step, so that reading late pays
    assert len(tree.root.shapes) == 3


def test_cells_that_part_are_redone_alone_where_rows_are_proved_independent():
    model = Exits().eval()
    fast = speculated(model, [(path(2), 1.0)], rowwise=branch_independent)
    fast(*sample(2, 2, 2, 2))
    assert [one.independent for one in fast.prepared.values()] == [True]
    x, goal = sample(2, 0, 2, 3)
    torch.testing.assert_close(fast(x, goal), model(x, goal))
    found = fast.summary()
    assert (found["redone_cells"], found["roll_backs"], found["misses"]) == (2, 0, 1)


def test_cells_that_may_depend_on_each_other_are_redone_together():
    class Mixed(nn.Module):
        def forward(self, x):
            return torch.tanh(x - x.mean(0))
    model = Exits(block=Mixed()).eval()
    fast = speculated(model, [(path(2), 1.0)], rowwise=branch_independent)
    fast(*sample(2, 2, 2, 2))
    assert [one.independent for one in fast.prepared.values()] == [False]
    x, goal = sample(2, 0, 2, 3)
    assert torch.equal(fast(x, goal), model(x, goal))
    assert (fast.summary()["redone_cells"], fast.summary()["roll_backs"]) == (0, 1)


@pytest.mark.parametrize("ids, combine", [((0, 2), "sum"), ((1, 1), "mean"), ((2, -1), "mean"), ((-1, 1), "first"),
                                          ((-1, -1), "sum")])
@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "list"])
def test_a_predicted_branch_gives_the_bits_of_the_router(ids, grouped, combine):
    torch.manual_seed(0)
    branches = route.Experts(3, WIDTH, 16) if grouped else [nn.Linear(WIDTH, WIDTH) for _ in range(3)]

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = route.Router(lambda x, ids, weights: route.Routes(ids, weights), branches, combine=combine,
                                       drop="identity")

        def forward(self, x, ids, weights):
            return self.router(x, ids, weights)
    model = Layer()
    x, weights = torch.randn(6, WIDTH), torch.rand(6, 2)
    fast = speculated(model.eval(), [({"router": [ids]}, 1.0)])
    given = torch.tensor([ids] * 6)
    for _ in range(2):
        found = fast(x, given, weights)
        with torch.enable_grad():  # the route plan, for sure
            expected = model(x, given, weights).detach()
        assert torch.equal(found, expected)
    assert fast.summary()["hits"] == 1


class Draws(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return x * 2


class Writes(nn.Module):
    def forward(self, x):
        return x.mul_(2)


class Remembers(nn.Module):
    last = 0

    def forward(self, x):
        self.last = self.last + 1
        return x * 2


class Asserts(nn.Module):
    def forward(self, x):
        torch._assert_async(x.sum() < 1e9)
        return x * 2


class Reads(nn.Module):
    def forward(self, x):
        return x * 2 if float(x.sum()) > 0 else x


@pytest.mark.parametrize("block, word", [(Draws(), "random"), (Counts(), "buffer"), (Writes(), "input"),
                                         (Remembers(), "last"), (Asserts(), "assert"), (Reads(), "export"),
                                         (nn.BatchNorm1d(WIDTH).train(), "buffer")],
                         ids=["random", "buffer", "input", "attribute", "assertion", "host", "batch norm"])
def test_an_impure_region_is_refused_with_its_operator_and_line(block, word):
    model = Exits(block=block).eval()
    block.train()
    fast = speculated(model, [(path(1), 1.0)])
    fast.eval()
    for module in (*fast.general.modules(), *fast.predicted.modules()):
        module.training = isinstance(module, nn.BatchNorm1d)
    with pytest.raises(ImpureRegion) as refusal:
        fast.plan(sample(1, 1), {})
    assert word in str(refusal.value) and refusal.value.do
    fast(*sample(1, 1))
    fast(*sample(1, 1))
    assert any(word in reason for reason in fast.summary()["reasons"])
    assert fast.summary()["hits"] == 0


def test_it_is_off_where_gradients_are_recorded_and_in_training():
    model = Exits().eval()
    fast = speculated(model, [(path(1), 1.0)])
    fast(*sample(1))
    with torch.enable_grad():
        x, goal = sample(1)
        fast(x, goal).sum().backward()
    assert model.head.weight.grad is not None
    fast.train()
    fast(*sample(1))
    assert {"gradients are recorded", "training"} <= set(fast.summary()["reasons"])
    assert fast.summary()["hits"] == 0


def test_parameters_that_change_are_seen_and_those_that_are_replaced_end_it():
    model = Exits().eval()
    fast = speculated(model, [(path(1), 1.0)])
    x, goal = sample(1)
    fast(x, goal)
    model.head.weight.mul_(2)
    model.router.branches[1].rest.head.weight.mul_(3)
    assert torch.equal(fast(x, goal), model(x, goal)) and fast.summary()["hits"] == 1
    fast.general.head.weight = nn.Parameter(torch.zeros(3, WIDTH))
    fast(x, goal)
    assert "parameters or buffers were replaced" in fast.summary()["reasons"]


def test_an_error_of_the_wrong_path_does_not_surface_and_one_of_the_true_path_does():
    table = nn.Embedding(4, 3)

    class Looks(nn.Module):
        def forward(self, index):
            return table(index)
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = route.Router(lambda index: (index > 3).long(),
                                       [Looks(), lambda index: index[:, None] * torch.ones(3)])

        def forward(self, index):
            return self.router(index)
    two = Two().eval()
    fast = speculated(two, [({"router": [(0,)]}, 1.0)], defer=True)
    fast(torch.tensor([1]))
    assert torch.equal(fast(torch.tensor([7])), two(torch.tensor([7])))
    assert fast.summary()["errors"] == 1 and fast.summary()["roll_backs"] == 1
    with pytest.raises(IndexError):
        fast(torch.tensor([-1]))


def test_two_threads_may_call_at_once_and_an_interrupt_leaves_it_whole():
    model = Exits().eval()
    fast = speculated(model, [(path(1), 0.5), (path(2), 0.5)])
    inputs = [sample(number % 4) for number in range(60)]
    expected = [model(*one) for one in inputs]
    wrong = []

    def work():
        with torch.no_grad():
            wrong.extend(1 for one, right in zip(inputs, expected) if not torch.equal(fast(*one), right))
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    found = fast.summary()
    # calls that come while another thread captures are taken for traced ones, and run uncounted on the general path
    assert 60 < found["hits"] + found["misses"] + found["general_calls"] <= 180

    class Stops(nn.Module):
        def forward(self, *tensors):
            raise KeyboardInterrupt
    before, fast.general = fast.general, Stops()
    with pytest.raises(KeyboardInterrupt):
        fast(*sample(3))
    fast.general = before
    assert torch.equal(fast(*inputs[1]), expected[1])


def test_other_sizes_have_programs_of_their_own_up_to_a_bound():
    model = Exits().eval()
    fast = speculated(model, [(path(1), 1.0)])
    for count in range(1, 11):
        x, goal = sample(*[1] * count)
        for _ in range(2):
            assert torch.equal(fast(x, goal), model(x, goal))
    assert len(fast.prepared) == 8 and fast.summary()["hits"] == 8


def test_regions_are_compiled_as_programs():
    model = Exits().eval()
    fast = speculated(model, [(path(2), 0.9), (path(0), 0.1)], compile=anyshape.compile, defer=True)
    fast(*sample(2))
    before = anyshape.stats()
    for goal in (2, 0, 2, 1, 3):
        x, goals = sample(goal)
        torch.testing.assert_close(fast(x, goals), model(x, goals))
    after = anyshape.stats()
    assert after["programs"] == before["programs"] and after["runs"] - before["runs"] == 5
    assert after["eager_calls"] == before["eager_calls"]


# ---- whether it pays


def spend(payoff: Payoff, hits: list[bool], general: float, hit: float) -> float:
    """Seconds of calls, by a payoff that watches one call of eight while it is off."""
    total = 0.0
    for number, is_hit in enumerate(hits):
        if not payoff.on:
            if number % 8 == 0:
                payoff.saw(is_hit)
            payoff.took_general(general)
            total += general
            continue
        payoff.saw(is_hit)
        if not is_hit:
            payoff.took_miss(hit, general)
            total += hit + general
        elif payoff.hit is None:
            payoff.paired(hit, general)
            total += hit + general
        else:
            payoff.took_hit(hit)
            total += hit
    return total


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("hit", [0.2, 0.5, 0.9, 1.5])
def test_it_is_never_slower_than_the_general_path_by_a_twentieth(rate, hit):
    hits = torch.rand(400, generator=torch.Generator().manual_seed(int(rate * 10))).lt(rate).tolist()
    total = spend(Payoff(), hits, 1.0, hit)
    assert total <= 400 / 0.95
    if rate * (1 - hit) - (1 - rate) * hit > 0.2:
        assert total < 400 * 0.9


def test_it_switches_off_when_hits_end_and_on_when_they_return():
    payoff = Payoff()
    spend(payoff, [True] * 50, 1.0, 0.3)
    assert payoff.on
    spend(payoff, [False] * 50, 1.0, 0.3)
    assert not payoff.on and payoff.switched_off == 1
    spend(payoff, [True] * 300, 1.0, 0.3)
    assert payoff.on and payoff.switched_on == 1


def test_a_call_that_misses_every_time_ends_on_the_general_path():
    model, now = Exits().eval(), [0.0]

    def clock():
        now[0] += 1.0
        return now[0]
    fast = speculated(model, [(path(1), 1.0)], clock=clock)
    for _ in range(40):
        x, goal = sample(3)
        assert torch.equal(fast(x, goal), model(x, goal))
    found = fast.summary()
    assert found["misses"] <= 2 and found["on"] == 0 and found["switched_off"] == 1

    def slow(*_):
        now[0] += 20.0  # so that hits would pay

    fast.general.register_forward_pre_hook(slow)
    for _ in range(400):
        fast(*sample(1))
    assert fast.prepared and next(iter(fast.prepared.values())).payoff.rate > 0.9


# ---- overlapped


class Chooses(nn.Module):
    """A router function that no compiler sees into."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds, self.threads = seconds, set()

    def forward(self, x, goal):
        time.sleep(self.seconds)
        self.threads.add(threading.current_thread().name)
        if int(goal[0]) > 2:
            raise ValueError("no such goal")
        return goal


def overlapped(function: nn.Module, **options) -> tuple[route.Router, OverlappedRouter]:
    torch.manual_seed(0)
    branches = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)) for _ in range(3)]
    router = route.Router(function, [Own(branch) for branch in branches])
    return router.eval(), OverlappedRouter(router, (1,), **options)


class Own(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x, goal):
        return self.module(x)


def test_a_router_function_decides_on_a_thread_while_the_predicted_branch_runs():
    function = Chooses()
    router, fast = overlapped(function, clock=lambda: 0.0)
    for goals in ([1, 1], [1, 1], [1, 1], [0, 0], [2, 1], [1, 1]):
        x, goal = sample(*goals)
        assert torch.equal(fast((x, goal)), router((x, goal)))
    found = fast.summary()
    assert (found["hits"], found["misses"], found["general"]) == (2, 2, 2)
    assert any(name.startswith("anyshape-router") for name in function.threads)
    with pytest.raises(ValueError, match="no such goal"):
        fast(sample(3, 3))
    assert torch.equal(fast((x, goal)), router((x, goal)))


def test_an_overlap_is_refused_for_a_branch_that_is_not_pure():
    router = route.Router(lambda x: torch.ones(len(x), dtype=torch.int64), [nn.Identity(), Draws()]).eval()
    fast = OverlappedRouter(router, (1,), clock=lambda: 0.0)
    for _ in range(4):
        fast(torch.randn(2, WIDTH))
    assert "random" in fast.refused and fast.summary()["hits"] == 0


def test_errors_have_four_parts():
    with pytest.raises(AnyShapeError) as refusal:
        speculated(Exits(block=Draws()).eval(), [(path(1), 1.0)]).plan(sample(1), {})
    assert refusal.value.what and refusal.value.where and refusal.value.why and refusal.value.do
