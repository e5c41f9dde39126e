"""Two orders of steps, each better at some sizes (runtime/budget/order_selection.py): calls take the one that needs
less."""
from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anyshape
from anyshape.base.errors import LimitError
from anyshape.runtime.call.executable import Executable
from anyshape.runtime.inspect.watermark import watched
from anyshape.runtime.specialize.saved_policy import SAVE_ALL
from limits import NO_LIMIT, counted
from roads import compilation_of
from sampling import rest

pytestmark = pytest.mark.usefixtures("quick_collections")
LITTLE, MUCH = 16, 600  # images: the gradient of the wide layer is made late, or early


class Wide(nn.Module):
    """Convolutions before a layer whose weight is larger than what it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 96, 16, 16, 16, 16)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(sizes))
        self.wide, self.last = nn.Linear(256, 2048), nn.Linear(2048, 2)

    def forward(self, x: Tensor) -> Tensor:
        for one in self.layers:
            x = torch.relu(one(x))
        x = nn.functional.adaptive_avg_pool2d(x, 4).flatten(1)
        return self.last(torch.relu(self.wide(x)))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def step_of(disable: str = "", **settings: Any) -> tuple[nn.Module, Any]:
    """Without bands: the gradient of the wide layer is there as a whole."""
    torch.manual_seed(0)
    model = Wide()
    return model, anyshape.train_step(model, loss_of, torch.optim.AdamW(model.parameters()), strict=True,
                                      disable=f"epilogues,{disable}".rstrip(","), **settings)


def images(count: int) -> Tensor:
    return torch.randn(count, 3, 12, 12)


def last(program: Executable) -> Any:
    return list(program.specializations.values())[-1]


@pytest.mark.unguarded
def test_a_train_step_takes_the_order_that_needs_less_at_its_sizes() -> None:
    model, step = step_of(check=1)
    other, plain = step_of(disable="order")
    for count in (LITTLE, MUCH, 5, 2 * MUCH, LITTLE, MUCH):
        x = images(count)
        assert torch.equal(step(x), plain(x))
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, its)
    forward, backward = (one.executable for one in step.programs)
    assert forward.other is not None and backward.other is not None
    assert [record.is_other for record in forward.specializations.values()] == [True, False, True, False]
    for program, is_other in ((backward, False), (backward.other, True)):
        assert [record.is_other for record in program.specializations.values()] == [is_other, is_other]
    assert len({record.kept for record in forward.specializations.values()}) == 4
    for count in (LITTLE, MUCH):
        [needs], [before] = ([curve.needed for curve in one.memory(arguments_0=(count, 3, 12, 12)).curves]
                             for one in (step, plain))
        assert needs < 0.75 * before if count == LITTLE else needs <= before
    text = str(step.explain())
    assert text.count("orders: two") == 1 and "orders: two" in text.partition("0.backward")[2]


@pytest.mark.unguarded
@pytest.mark.parametrize("count", rest([LITTLE, MUCH], MUCH))
def test_what_is_written_of_the_arena_is_what_the_order_that_runs_needs(count: int) -> None:
    _, step = step_of()
    step(images(3))
    for part in (0, 1):
        executable = step.programs[part].executable
        with watched(executable) as seen:
            step(images(count))
        [run] = seen
        assert run.record.is_other is (count == LITTLE)
        joined = not run.record.temporary  # both halves lie in one block, which one of them fills
        assert run.counted <= run.record.arena if joined else run.counted == run.record.arena
        assert executable.ran(run.record).specializer.arena(run.record.values) == run.record.arena


@pytest.mark.unguarded
@pytest.mark.parametrize("count", rest([LITTLE, MUCH], LITTLE))
def test_a_limit_counts_what_the_order_that_runs_needs(count: int) -> None:
    model, step = step_of(memory_limit=NO_LIMIT)
    other, plain = step_of(disable="order")
    x = images(count)
    for one in (images(LITTLE), x):
        assert torch.equal(step(one), plain(one))
    program = step.programs[0].executable
    assert program.other is not None
    limit = program.ran(last(program)).limit
    assert limit is not None and (limit is program.limit) == (count == MUCH)
    values = last(program).values
    needed, least = limit.needed(values, SAVE_ALL), limit.least(values)
    for bytes_ in (needed, max(least, needed * 3 // 4)):
        limit.move(bytes_)
        wanted = plain(x)
        with counted() as most:
            assert torch.equal(step(x), wanted)
        assert most[0] <= bytes_
        assert limit.needed(values, limit.choose(values)) <= bytes_
    before = [p.clone() for p in model.parameters()]
    limit.move(least - 1)
    with pytest.raises(LimitError):
        step(x)
    for mine, its in zip(model.parameters(), before, strict=True):
        assert torch.equal(mine, its)
    limit.move(least)
    assert torch.equal(step(x), plain(x))
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)


def branches(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> Tensor:
    """The left factor takes more the more rows there are, the right one always the same."""
    return ((x @ d) @ e @ ((a @ b) @ c)).sum(1)


def test_so_does_a_program_without_a_backward_also_in_threads() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(size) for size in ((512, 64), (64, 1024), (1024, 512), (16, 1024), (1024, 512))]
    run, plain = anyshape.compile(branches), anyshape.compile(branches, disable="order")
    rows = (256, 64, 1024, 4096, 300, 1, 2000, 256)
    given = {count: torch.randn(count, 16) for count in rows}
    wanted = {count: plain(x, *weights) for count, x in given.items()}
    with torch.no_grad():
        assert torch.equal(run(given[256], *weights), wanted[256])
        failures = []

        def work() -> None:
            with torch.no_grad():
                for count in rows * 3:
                    if not torch.equal(run(given[count], *weights), wanted[count]):
                        failures.append(count)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    program = compilation_of(run).programs[0].executable
    taken = {view[0][0]: record.is_other for record in program.specializations.values() for view in record.inputs
             if view is not None and view[0][1:] == (16,)}
    assert taken[256] and taken[64] and not taken[1024] and not taken[4096]
