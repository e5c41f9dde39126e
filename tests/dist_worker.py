"""One rank of the tests of processes: `torchrun --nproc_per_node=2 dist_worker.py MODE`. It prints one line of JSON."""
from __future__ import annotations

import argparse
import contextlib
import ctypes
import email
import gc
import io
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F

import anyshape
import dist_vision
import dist_wrapped
from anyshape.base.errors import AnyShapeError
from anyshape.dist.experts import ExpertMap
from anyshape.dist.mesh import Mesh, mesh_of
from anyshape.dist.strategies import PipelineSchedule, Strategy
from anyshape.plan.ir.program import is_launch
from anyshape.route.core.operators import grouped_linear
from anyshape.route.placement import solve
from anyshape.route.placement.problem import problem
from anyshape.runtime.collectives.expert_exchange import ExpertExchange
from anyshape.runtime.collectives.expert_weights import add_replicas, moved
from anyshape.runtime.collectives.messages import Line
from anyshape.runtime.collectives.parts import cut
from anyshape.runtime.collectives.ring_attention import Ring
from anyshape.runtime.context.process_context import shared_context
from anyshape.runtime.specialize.saved_policy import SAVE_ALL
from anyshape.runtime.torch_ops.fallbacks import by_torch
from dist_model import Llama, next_token_loss

SHAPES = [(6, 12), (4, 9), (4, 31), (6, 5), (8, 33)]
SHAPES += [(4 + number % 5, 6 + 7 * number % 29) for number in range(15)]


def strategies(world: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "pp-dp": mesh_of(data=2, pp=world // 2),
        "pp-zero1": mesh_of(pp=world // 2, zero1=2), "pp-fsdp": mesh_of(pp=world // 2, fsdp=2),
        "pp-tp": mesh_of(pp=world // 2, tensor=2),
        "ring-dp": mesh_of(data=2, ring=world // 2), "ulysses-fsdp": mesh_of(ulysses=world // 2, fsdp=2),
        "pp-ring": mesh_of(pp=world // 2, ring=2)}
    for name, chunks in (("gpipe", 1), ("interleaved", 2), ("zero-bubble", 1)):
        found[name] = Strategy(mesh_of(pp=world), ("pp",), pipeline=PipelineSchedule(name, 2 * world, chunks))
    return found


def searched(world: int, placement: str, data: str, **axes: int) -> Strategy:
    """What a search finds for the model on these axes."""
    found = anyshape.strategy(Llama(), next_token_loss, None, torch.zeros(8, 64, dtype=torch.int64), world=world,
                              machine="a100", mesh={"data": world // 2, "context": 1, "tensor": 1, "pipe": 1, **axes})
    return found.override("*", placement=placement, data=data).runnable()


SEARCHED = {"searched-context-fsdp": ("whole", "fsdp", {"context": 2}),
            "searched-context-zero1": ("whole", "zero1", {"context": 2}),
            "searched-sequence-fsdp": ("sequence", "fsdp", {"tensor": 2}),
            "searched-sequence-zero1": ("sequence", "zero1", {"tensor": 2})}


def strategy_of(mode: str, world: int) -> Any:
    """A strategy by name; `fsdp-tensor` is a mesh of two axes, of which the first one has two ranks."""
    if mode in SEARCHED:
        placement, data, axes = SEARCHED[mode]
        return searched(world, placement, data, **axes)
    first, _, second = mode.partition("-")
    return strategies(world).get(mode) or (mesh_of(**{first: 2, second: world // 2}) if second else mode)


def coordinates_of(strategy: Any, rank: int, world: int) -> tuple[int, int]:
    """(which part of the batch a rank has, of how many)"""
    if strategy in ("tp", "sp", "pp", "ring", "ulysses"):
        return 0, 1
    strategy = strategy.mesh if isinstance(strategy, Strategy) else strategy
    if isinstance(strategy, Mesh):
        here = strategy.coordinates(rank)
        place = count = 0
        for axis in strategy.axes:
            if axis.name not in ("tensor", "sequence", "context", "pp", "ring", "ulysses"):
                place = place * axis.size + here[axis.name]
                count = (count or 1) * axis.size
        return place, count or 1
    return rank, world


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max().clamp_min(1e-9))


def by_eager(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, clip_norm: float | None = None,
             accumulate: int = 1) -> Tensor:
    """A step as one process takes it with PyTorch, an update with each batch number `accumulate`; returns the loss."""
    loss = next_token_loss(model, tokens)
    (loss / accumulate).backward()
    model.gathered = getattr(model, "gathered", 0) + 1
    if model.gathered % accumulate == 0:
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def trains(mode: str, steps: int = 5, dtype: str = "float64", fails: bool = False, **more: Any) -> dict[str, Any]:
    """Trains on batches of changing shapes, each rank on its part, beside a model that PyTorch trains on all. fails: a
    step fails on the last rank in the end, after messages have been sent, and its process goes on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    strategy = strategy_of(mode, world)
    torch.manual_seed(rank)  # all take over the numbers of rank 0
    model = Llama().to(getattr(torch, dtype))
    settings: dict[str, Any] = {"strict": True, "threads": 1, **more}
    step = anyshape.train_step(model, next_token_loss, optimizer(model), strategy=strategy, **settings)
    with step.whole():
        alone = Llama().to(getattr(torch, dtype))
        alone.load_state_dict(model.state_dict())
    own = optimizer(alone)
    # in float32 the roundings of one process's program are those of the ranks', and eager's are not
    one = partial(by_eager, alone, own, **more) if dtype == "float64" else anyshape.train_step(
        alone, next_token_loss, own, **settings)
    place, count = coordinates_of(strategy, rank, world)
    worst, before = 0.0, 0
    for number, (batch, length) in enumerate(SHAPES[:steps]):
        torch.manual_seed(100 + number)
        tokens = torch.randint(0, 60, (batch, length))
        before = anyshape.stats()["collectives"]
        loss = step(tokens.tensor_split(count)[place])
        before = anyshape.stats()["collectives"] - before
        worst = max(worst, difference(loss, one(tokens)))
    sharded = sum(bool(one.isnan().any()) for one in model.parameters())
    with step.whole():
        worst = max([worst, *map(difference, model.parameters(), alone.parameters())])
    found = {"worst": worst, "programs": len(step.programs), "collectives": before, "sharded": sharded,
             "tensors": len(list(model.parameters()))}
    if fails:
        tokens = torch.full((4, 9), 1 if rank < world - 1 and count > 1 else 10 ** 6)
        found["failed"] = [refusal(one) for one in (lambda: step(tokens), lambda: step(tokens), step.whole().__enter__)]
        found["programs"] = len(step.programs)  # the same for a batch that is no view
        found["parts"] = refusal(lambda: anyshape.train_step(model, next_token_loss, optimizer(model), strategy="ddp"))
    return found


def overlapped(mode: str) -> dict[str, Any]:
    """The same steps with collectives that are waited for where they are launched: bit for bit."""
    rank, world = dist.get_rank(), dist.get_world_size()
    strategy = strategy_of(mode, world)
    place, count = coordinates_of(strategy, rank, world)
    ends, launched = [], []
    for left_out in ("", "overlap_collectives"):
        torch.manual_seed(0)
        model = Llama()
        step = anyshape.train_step(model, next_token_loss, optimizer(model), strategy=strategy, strict=True, threads=1,
                                   disable=left_out)
        losses = []
        before = anyshape.stats()["collectives"]
        for number in range(20):
            torch.manual_seed(number)
            losses.append(step(torch.randint(0, 60, (2 + number % 5, 5 + 7 * number % 31)).tensor_split(count)[place]))
        launched.append(anyshape.stats()["collectives"] - before)
        with step.whole():
            ends.append([*losses, *(one.detach().clone() for one in model.parameters())])
    assert launched[0] == launched[1]
    return {"differing": sum(not torch.equal(a, b) for a, b in zip(*ends, strict=True)),
            "waited": anyshape.stats()["collective_wait_seconds"]}


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def lengths_differ() -> dict[str, Any]:
    """Each rank has batches of other lengths, and labels to ignore: the loss is the mean over all tokens of all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, alone = Llama().double(), Llama().double()

    def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
        labels = torch.where(tokens[:, 1:] < 20, -100, tokens[:, 1:])
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), labels.flatten())

    step = anyshape.train_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), strategy="ddp", strict=True,
                               threads=1)
    alone.load_state_dict(model.state_dict())
    worst = 0.0
    for number in range(4):
        torch.manual_seed(number)
        batches = [torch.randint(0, 60, (2 + rank + number % 2, 7 + 5 * rank + 3 * number)) for rank in range(world)]
        loss = step(batches[rank])
        sums, tokens = torch.zeros((), dtype=torch.float64), 0
        for batch in batches:
            count = int((batch[:, 1:] >= 20).sum())
            sums, tokens = sums + loss_fn(alone, batch) * count, tokens + count
        wanted = sums / tokens
        alone.zero_grad()
        wanted.backward()
        with torch.no_grad():
            for one in alone.parameters():
                one -= 0.1 * one.grad
        worst = max([worst, difference(loss, wanted), *map(difference, model.parameters(), alone.parameters())])
    return {"worst": worst, "programs": len(step.programs)}


def limited(mode: str, layers: int = 2, **more: Any) -> dict[str, Any]:
    """Steps of a length of its own on each rank under a limit that the longest ones do not keep to as they are, beside
    the same without one; and a limit that is too low for one rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    place, count = coordinates_of(mode, rank, world)
    given = []
    for rows, length in ((6, 65), (2, 17)):  # the first rank has much more to do
        torch.manual_seed(length)
        given.append(torch.randint(0, 60, (rows, length // (1 + 3 * place if count > 1 else 1))))

    def made(limit: int | str) -> tuple[Any, nn.Module]:
        torch.manual_seed(0)
        model = Llama(layers)
        return anyshape.train_step(model, next_token_loss, optimizer(model), strategy=mode, strict=True, threads=1,
                                   memory_limit=limit, **more), model

    def budgets_of_programs(step: Any) -> list[list[Any]]:
        found = []
        for program in step.programs:
            orders, one = [], program.executable
            while one is not None:  # a call takes the order of a program's steps that fits
                orders += [one.limit] if one.limit is not None else []
                one = one.other
            found += [orders] if orders else []
        return found

    def budgets(step: Any) -> list[Any]:
        return [one for orders in budgets_of_programs(step) for one in orders]

    def weights(step: Any, model: nn.Module) -> list[Tensor]:
        with step.whole():
            return [one.detach().clone() for one in model.parameters()]

    free, plain = made("1GB")
    before = anyshape.stats()["collectives"]
    wanted = [free(one) for one in given]
    sent = anyshape.stats()["collectives"] - before
    limits = budgets(free)
    values = next(iter(limits[0].program.specializations.values())).values
    needs: list[Any] = [None] * world
    dist.all_gather_object(needs, (min(one.needed(values, SAVE_ALL) for one in limits),
                                   min(one.least(values) for one in limits)))
    least = max(least for _, least in needs)
    step, model = made(least // 2 if more else least - 64)
    begun = weights(step, model)
    found = refusal(lambda: step(given[0]))
    changed = sum(not torch.equal(a, b) for a, b in zip(begun, weights(step, model), strict=True))
    # of the programs tried last: a clipped step is refused in one run, and then in two, of which both must fit
    named = [min(one.least(values) for one in orders) for orders in budgets_of_programs(step)]
    leasts: list[Any] = [None] * world
    dist.all_gather_object(leasts, max(named[1:] if more else named))
    for one in budgets(step):
        one.move(sum(max(sizes) for sizes in zip(*needs, strict=True)) // 2)
    before = anyshape.stats()["collectives"]
    worst = max(difference(step(one), loss) for one, loss in zip(given, wanted, strict=True))
    sent -= anyshape.stats()["collectives"] - before
    worst = max([worst, *map(difference, weights(step, model), weights(free, plain))])
    dropped = max(len(one.policy.dropped) for limit in budgets(step) for one in limit.program.specializations.values())
    return {**found, "changed": changed, "worst": worst, "dropped": dropped, "sent": sent, "least": max(leasts)}


def heap(mode: str) -> dict[str, Any]:
    """The most bytes that a step takes of the heap, beside what is there between steps, and what its plans say."""
    counter = ctypes.CDLL(os.environ["LD_PRELOAD"])
    for name in ("live", "peak"):
        getattr(counter, f"heapcount_{name}").restype = ctypes.c_long
    torch.manual_seed(0)
    step = anyshape.train_step(model := Llama(2, 64, inner=512, vocabulary=2048), next_token_loss,
                               torch.optim.AdamW(model.parameters()), strategy=mode, strict=True, threads=1)
    batch = torch.randint(0, 2000, (4, 97))
    for one in (batch[:2, :17], batch, batch):
        step(one)
    gc.collect()
    shared_context().release()
    before = counter.heapcount_live()
    counter.heapcount_reset()
    step(batch)
    records = [max(program.executable.specializations.values(), key=lambda one: one.arena) for program in step.programs]
    return {"counted": counter.heapcount_peak() - before, "predicted": max(one.arena + one.scratch for one in records),
            "messages": sum(is_launch(one) for program in step.programs for one in program.executable.plan.steps)}


def limited_search() -> dict[str, Any]:
    """Steps of a strategy that is searched for under a limit, beside the same without one; and under one that nothing
    keeps to."""
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(0, 60, (6, 17))

    def made(strategy: str, **more: Any) -> Any:
        torch.manual_seed(0)
        model = Llama(2)
        return anyshape.train_step(model, next_token_loss, optimizer(model), strategy=strategy, strict=True, threads=1,
                                   **more)

    plain = made("ddp")
    wanted = [plain(tokens) for _ in range(3)]
    worst = 0.0
    for limit in ("100MB", "600kB"):
        step = made("auto", memory_limit=limit)
        worst = max([worst, *(difference(step(tokens), loss) for loss in wanted)])
    step = made("auto", memory_limit="10kB")
    sizes = {"arguments_0_0": 12, "arguments_0_1": 17, "local_data_0": 6, "rank_data": dist.get_rank()}
    return {"worst": worst, **refusal(lambda: step(tokens)), "programs": len(step.programs),
            "explained": str(step.explain()), "memory": str(plain.memory(**sizes))}


def ring_attention() -> dict[str, Any]:
    """Attention whose keys go around, against attention of the whole, at lengths that ranks divide and do not."""
    rank, world = dist.get_rank(), dist.get_world_size()
    line = Line(dist.group.WORLD, world, rank)
    worst, cases = 0.0, 0
    for m, n, causal in ((8, 8, True), (7, 7, True), (1, 1, True), (0, 0, True), (5, 12, False), (3, 0, False),
                         (65, 65, True)):
        for heads, groups in ((2, 2), (4, 1)):
            torch.manual_seed(m + n)
            q, gradient = (torch.randn(2, heads, m, 4, dtype=torch.float64) for _ in range(2))
            k, v = (torch.randn(2, groups, n, 4, dtype=torch.float64) for _ in range(2))
            attrs = {"causal": causal, "scale": 0.3}
            result, sums = by_torch("attention", attrs, [q, k, v])
            products = (gradient * result.transpose(1, 2)).sum(3)
            whole = by_torch("attention_backward", attrs, [gradient, q, k, v, sums, products])
            rows, columns = (2, 1, m, 1, 0), (2, 1, n, 1, 0)
            q, gradient, sums, products = (cut(one, rows, world, rank) for one in (q, gradient, sums, products))
            k, v = (cut(one, columns, world, rank) for one in (k, v))
            ring = Ring(line, rows, columns, causal, 0.3)
            found = [*ring.forward(q, k, v), *ring.backward(gradient, q, k, v, sums, products)]
            wanted = [cut(result, (1, 1, m, 1, 0), world, rank), sums,
                      *(cut(one, (1, 1, size, 1, 0), world, rank) for one, size in zip(whole, (m, n, n), strict=True))]
            cases += 1
            for a, b in zip(found, wanted, strict=True):
                assert a.shape == b.shape, (a.shape, b.shape)
                worst = max([worst, *([float((a - b).abs().max())] if b.numel() else [])])
    return {"worst": worst, "cases": cases}


def experts() -> dict[str, Any]:
    """Experts on many ranks, moved by a plan with a hot replica, against all experts on one: results and gradients."""
    rank, world = dist.get_rank(), dist.get_world_size()
    line = Line(dist.group.WORLD, world, rank)
    count, width, choices = 5, 3, 2
    torch.manual_seed(0)
    whole = torch.randn(count, width, width, dtype=torch.float64)
    here = ExpertMap.contiguous(count, world)
    weight = whole[list(here.slots(rank))].clone()
    loads = np.array([1.0, 20.0, 3.0, 2.0, 5.0])  # expert 1 is hot
    plan = solve(problem([loads], [], world, branch_bytes=8.0 * width * width, replicas=2))
    after = ExpertMap(plan.copies[0])
    worst, rows = 0.0, 0
    for place in (here, after):
        if place is after:
            weight = moved(line, [weight], here, after)[0]
            assert torch.equal(weight, whole[list(after.slots(rank))])
        exchange = ExpertExchange(line, place)
        for number in range(4):
            given = []
            for source in range(world):  # ranks have other numbers of cells; in the last turn one has none
                torch.manual_seed(10 * number + source)
                cells = 0 if number == 3 and source == 0 else 4 + 3 * source + number
                ids = torch.randint(-1, count, (cells, choices))
                given.append((torch.randn(cells, width).double(), ids, torch.rand(cells, choices).double()))
            wanted_weight = whole.clone().requires_grad_()
            own = weight.clone().requires_grad_()
            inputs = [one.clone().requires_grad_() for one in (given[rank][0], given[rank][2])]
            found = exchange.dispatch(inputs[0], given[rank][1])
            result = exchange.combine(grouped_linear(found.rows, own, found.ends, None), found, inputs[1])
            result.square().sum().backward()
            add_replicas(line, [own.grad], place)
            total = torch.zeros((), dtype=torch.float64)
            for source, (cells, ids, scale) in enumerate(given):
                cells, scale = cells.requires_grad_(), scale.requires_grad_()
                each = torch.einsum("nc,ecm->nem", cells, wanted_weight)
                taken = each.gather(1, ids.clamp(min=0)[..., None].expand(-1, -1, width)) * (ids >= 0)[..., None]
                wanted = (taken * scale[..., None]).sum(1)
                total = total + wanted.square().sum()
                if source == rank:
                    mine = wanted, cells, scale
            total.backward()
            pairs = [(result, mine[0]), (inputs[0].grad, mine[1].grad), (inputs[1].grad, mine[2].grad),
                     (own.grad, wanted_weight.grad[list(place.slots(rank))])]
            worst = max([worst, *(float((a - b).detach().abs().max()) for a, b in pairs if b.numel())])
            rows += len(found.rows)
    wrong = torch.full((2, 1), count if rank == 1 else 0)
    return {"worst": worst, "rows": rows, "copies": int(after.copies.sum()),
            **refusal(lambda: exchange.dispatch(torch.zeros(2, width, dtype=torch.float64), wrong))}


def messages() -> dict[str, Any]:
    """What has messages of its own, one after another."""
    return {"ring": ring_attention(), "experts": experts(), "refused": refused_before_a_step()}


def refused_before_a_step() -> dict[str, list[str]]:
    """What all ranks find together when they make a step: nothing is compiled for it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = nn.Linear(2, 2)

    def made(strategy: Any = "ddp", rate: float = 0.1, **more: Any) -> Callable[[], object]:
        return lambda: anyshape.train_step(model, lambda model, x: model(x).sum(), torch.optim.SGD(
            model.parameters(), lr=rate), strategy=strategy, threads=1, **more)

    found = {"strategies": refusal(made("ddp" if rank == 0 else mesh_of(fsdp=world)))["lines"],
             "processes": refusal(made(mesh_of(data=world + 1)))["lines"],
             "a strategy that is none": refusal(made("ddp" if rank else "other"))["lines"],
             "a pipeline with a limit": refusal(made("pp", memory_limit="1MB"))["lines"],
             "limits": refusal(made(**({"memory_limit": "1MB"} if rank == 0 else {})))["lines"],
             "optimisers": refusal(made(rate=0.1 * (1 + rank)))["lines"], "models": other_model()["lines"]}
    version, platform.python_version = platform.python_version, lambda: f"3.{rank}"
    found["versions"] = refusal(made())["lines"]
    platform.python_version = version
    step: Any = made()()
    found["a load of what is not there"] = refusal(partial(step.load, "nowhere"))["lines"]
    found["calls"] = refusal(partial(step.save, "nowhere") if rank == 0 else step.whole().__enter__)["lines"]
    searched: Any = made("auto")()  # it has no mesh before its first step
    saves, steps = partial(searched.save, "nowhere"), partial(searched, torch.ones(2, 2))
    found["a save before a search"] = refusal(saves if rank == 0 else steps)["lines"]
    found["a load before a search"] = refusal(steps if rank == 0 else partial(searched.load, "nowhere"))["lines"]
    found["a search that finds nothing"] = refusal(partial(searched, torch.ones(())))["lines"]
    with step.whole(), searched.whole():  # and all is well after it
        return found


def demo(strategy: str = "auto", steps: int = 3) -> dict[str, Any]:
    """The demo with a small model: what it printed, and its losses beside those of one process."""
    from anyshape.tools import demo
    from anyshape.tools.demo import backends, command, data, training
    from anyshape.tools.demo.model import DemoConfig

    config = DemoConfig(vocabulary=320, hidden=32, inner=48, layers=2, heads=2)
    recipe = training.Recipe(seed=3, tokens=320, longest=160, model=config)
    command.Recipe = lambda *_: recipe
    documents = Path(email.__file__).parent
    options = argparse.ArgumentParser()
    demo.add_arguments(options)
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = demo.main(options.parse_args(["--strategy", strategy, "--steps", str(steps), "--save-every", "2",
                                             "--documents", str(documents), "--out", folder[0]]))
        resumed = demo.main(options.parse_args(["--strategy", strategy, "--steps", str(steps + 1), "--resume",
                                                folder[0], "--documents", str(documents)])) if code == 0 else 1
    found: dict[str, Any] = {"code": code or resumed, "printed": printed.getvalue()}
    if dist.get_rank() == 0 and found["code"] == 0:
        losses = training.stored_in(Path(folder[0]))["history"]["loss"]
        alone = training.start(recipe, data.read_documents(documents))
        plain = backends.make("eager", alone.model, alone.optimizer)
        for _ in losses:
            training.train_step(alone, plain)
        found["worst"] = max(abs(a - b) / b for a, b in zip(losses, alone.history.loss, strict=True))
        found["steps"] = len(losses)
        shutil.rmtree(folder[0])
    return found


def refusal(of: Callable[[], object]) -> dict[str, Any]:
    begun = time.monotonic()
    try:
        of()
    except AnyShapeError as error:
        return {"lines": str(error).splitlines(), "seconds": time.monotonic() - begun,
                "named": getattr(error, "least", 0)}
    return {"lines": []}


def other_model() -> dict[str, Any]:
    model = Llama(layers=1 + dist.get_rank())
    return refusal(lambda: anyshape.train_step(model, next_token_loss, optimizer(model), strategy="ddp"))


def other_code() -> dict[str, Any]:
    """A loss that is another program on rank 1 is found when it is about to run."""
    model, rank = Llama(), dist.get_rank()
    step = anyshape.train_step(model, lambda model, x: next_token_loss(model, x) * (1.0 + rank), optimizer(model),
                               strategy="ddp", threads=1, strict=True)
    before = [one.clone() for one in model.parameters()]
    found = refusal(lambda: step(torch.randint(0, 60, (2, 9))))
    return {**found, "changed": sum(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))}


def other_rows() -> dict[str, Any]:
    """Ranks that share a batch, and were given two."""
    model, rank = Llama(layers=1), dist.get_rank()
    step = anyshape.train_step(model, next_token_loss, optimizer(model), strategy="tp", threads=1, strict=True)
    return refusal(lambda: step(torch.full((2, 9), rank)))


def saved(mode: str, folder: str, before: str = "") -> dict[str, Any]:
    """Three steps, a checkpoint that is written beside three more, and from it three more again, in a new step under
    each of the strategies; from `before`, a checkpoint of other processes, too."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layers = 2 if "pp" in mode else 1  # a pipeline has a layer a stage, at least

    def made(mode: str, seed: int) -> tuple[Any, nn.Module]:
        torch.manual_seed(seed)
        model = Llama(layers=layers).double()
        return anyshape.train_step(model, next_token_loss, optimizer(model), strategy=strategy_of(mode, world),
                                   strict=True, threads=1), model

    def go(step: Any, model: nn.Module, mode: str, numbers: range) -> list[Tensor]:
        place, count = coordinates_of(strategy_of(mode, world), rank, world)
        for number in numbers:
            torch.manual_seed(number)
            step(torch.randint(0, 60, (4, 6 + 5 * number)).tensor_split(count)[place])
        with step.whole():
            return [one.detach().clone() for one in model.parameters()]

    first, *others = mode.split(",")
    step, model = made(first, 0)
    if before:
        step.load(before)
    go(step, model, first, range(3))
    step.save(folder, wait=False)
    wanted = go(step, model, first, range(3, 5))
    step.wait_for_save()
    step.load(folder)  # into parts that are there
    again = go(step, model, first, range(3, 5))
    found = {"differing": sum(not torch.equal(a, b) for a, b in zip(again, wanted, strict=True)), "count": step.count,
             "parts": len(step._whole.state.distribution.parts)}
    worst = 0.0
    for other in others:
        fresh, its = made(other, 1)
        fresh.load(folder)
        ends = go(fresh, its, other, range(3, 5))
        worst = max([worst, *map(difference, ends, wanted)])
        if other == first:
            found["differing"] += sum(not torch.equal(a, b) for a, b in zip(ends, wanted, strict=True))
    return {**found, "worst": worst, "sums": [float(one.sum()) for one in wanted]}


def loses(mode: str, how: str, folder: str) -> dict[str, Any]:
    """Rank 1 is lost in its third step; where it was started again, all go on from the checkpoint."""
    rank, model = dist.get_rank(), Llama(layers=1).double()
    step = anyshape.train_step(model, next_token_loss, optimizer(model), strategy=mode, strict=True, threads=1)
    begun = step.load(folder, missing_ok=True)
    added = anyshape.compile(lambda x: functional.all_reduce(x * 2, "sum", dist.group.WORLD), strict=True)
    if how == "killed":
        assert torch.equal(added(torch.ones(3)), torch.full((3,), 2.0 * dist.get_world_size()))

    def take(number: int) -> None:
        torch.manual_seed(number)
        step(torch.randint(0, 60, (4, 9)))

    for number in range(begun, 4):
        if number == 2 and rank == 1 and not begun:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            step("no batch")
        if rank == 0 and number == 2 and not begun and how != "restarted":
            # who it was is heard of wherever ranks wait for each other
            found = [refusal(one) for one in (partial(take, number), partial(added, torch.ones(5)),
                                              partial(step.save, folder), partial(step.load, folder))]
            return {"lines": [one["lines"] for one in found]}
        take(number)
        step.save(folder)
    return {"count": step.count, "begun": begun}


def name_sizes_by(rank: int) -> None:
    """Has each rank name its symbols of sizes in another way, as where one of them met more of them before."""
    given = ShapeEnv._generate_unique_id
    ShapeEnv._generate_unique_id = lambda env, source: given(env, source) + 1000 * rank


def main() -> None:
    address = os.environ.get("DIST_FILE")  # instead of a port, for processes without torchrun
    if address:
        dist.init_process_group("gloo", init_method=f"file://{address}", rank=int(os.environ["RANK"]),
                                world_size=int(os.environ["WORLD_SIZE"]))
    else:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    name_sizes_by(dist.get_rank())
    mode, *options = sys.argv[1:]
    own = {"lengths": lengths_differ, "limited_search": limited_search, "messages": messages,
           "other_model": other_model, "other_code": other_code, "other_rows": other_rows,
           "images": dist_vision.images, "wrapped": dist_wrapped.quick, "wrapped_more": dist_wrapped.more}
    if mode == "overlapped":
        found = overlapped(*options)
    elif mode == "heap":
        found = heap(*options)
    elif mode == "limited":
        found = limited(options[0], **json.loads(options[1]))
    elif mode == "saved":
        found = saved(*options)
    elif mode == "loses":
        found = loses(*options)
    elif mode == "demo":
        found = demo(*options)
    elif mode == "fsdp-and-demo":  # processes are dear
        found = {**trains("fsdp", steps=3, fails=True, clip_norm=1.0), "limited": limited("fsdp"), "demo": demo()}
    else:
        found = own[mode]() if mode in own else trains(mode, **json.loads(options[0] if options else "{}"))
    # in one write, which others' are not mixed into
    os.write(1, (json.dumps({"rank": dist.get_rank(), **found}) + "\n").encode())
    if mode != "loses":  # a group that lost a rank is not asked to end
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
