"""Speculative weight preload: experts in a file, under a limit; against all in memory, and against reading on demand.

A stack of mixtures of experts as in decoding: few cells a call, popular experts (Zipf, exponent 1), and a Markov chain
from layer to layer; four of five cells begin where they began in the call before. The profile is of other calls of the
same chain. All ways run interleaved, in this process, on the same routes, and have to give the same bits.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import anyshape
from anyshape import route
from anyshape.route.optimize.decision import shared_copy
from anyshape.route.optimize.plan import Plan
from anyshape.route.optimize.preload import preload
from anyshape.route.placement.traces import RoutingTrace, markov
from anyshape.route.preload import PreloadedBranches, Preloader
from anyshape.route.profile.routers import routers_of
from anyshape_bench.measure.statistics import median
from anyshape_bench.routes.case import Study

SHARE = 0.57  # of the branches' bytes may be in memory
FOLLOW, POPULAR, STAY = 0.9, 1.0, 0.8
STEPS_OF_CAP, PROFILED = 10_000, 150


@dataclass(frozen=True, slots=True)
class Sizes:
    """layers, experts of each, width of a cell, hidden width of an expert, cells of a call; calls that are measured."""

    layers: int
    experts: int
    width: int
    hidden: int
    cells: int
    calls: int


FULL = Sizes(4, 32, 384, 1536, 16, 100)
QUICK = Sizes(3, 16, 128, 256, 8, 40)
SMALL = Sizes(2, 16, 32, 64, 2, STEPS_OF_CAP)


class Given(nn.Module):
    """A router function that takes routes as they come."""

    def forward(self, cells: Tensor, ids: Tensor) -> route.Routes:
        return route.Routes(ids)


class Stack(nn.Module):
    """Layers of experts with a residual; ids [layers, cells]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.moe = nn.ModuleList(route.Router(Given(), route.Experts(sizes.experts, sizes.width, sizes.hidden))
                                 for _ in range(sizes.layers))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        for layer, moe in enumerate(self.moe):
            x = x + moe(x, ids[layer])
        return x


def trace_of(sizes: Sizes, calls: int, seed: int) -> RoutingTrace:
    return markov(sizes.experts, sizes.layers, sizes.cells, calls, FOLLOW, seed=seed, popular=POPULAR, stay=STAY)


def batches(sizes: Sizes, trace: RoutingTrace) -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    for call in trace.calls:
        ids = torch.from_numpy(np.stack([one[:, 0] for one in call]))
        yield torch.randn(sizes.cells, sizes.width, generator=draw), ids


def limit_of(model: nn.Module, share: float) -> int:
    return int(sum(one.nbytes for router in routers_of(model).values() for one in router.branches.parameters()) * share)


def planned(model: nn.Module, sizes: Sizes, share: float, compile: Any = None) -> Plan:
    """The plan from a profile of other calls."""
    with route.profile(model, budget=1.0) as profile, torch.no_grad():
        for batch in batches(sizes, trace_of(sizes, PROFILED, 0)):
            model(*batch)
    return route.optimize(model, profile.taken(), memory_limit=limit_of(model, share), passes=["preload"],
                          compile=compile)


def store_of(model: nn.Module) -> Preloader:
    """The store of a model, which may be compiled."""
    return next(module for module in model.modules() if isinstance(module, PreloadedBranches)).preloader


def measure(quick: bool) -> dict[str, float]:
    """Numbers by name: memory_saved (a share), latency (of all in memory), on_demand (how many times faster than
    reading on demand), hit_rate, bytes of a call, those that any store would read, and steps above the cap."""
    sizes = QUICK if quick else FULL
    torch.manual_seed(0)
    model = Stack(sizes).eval()
    ahead = planned(model, sizes, SHARE, anyshape.compile).apply(model)
    demand = preload(shared_copy(model), limit_of(model, SHARE), ahead=False, compile=anyshape.compile)
    ways: dict[str, Callable[..., Tensor]] = {
        "all": anyshape.compile(model), "ahead": ahead, "demand": anyshape.compile(demand)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    unequal, store, before = 0, store_of(ahead), store_of(ahead).counts
    with torch.no_grad():
        for number, batch in enumerate(batches(sizes, trace_of(sizes, 2 * sizes.calls, 1))):
            if number == sizes.calls:  # the first half warms up: programs, the file in the page cache, predictions
                before = store.counts
            found = {}
            for name, way in ways.items():
                begun = time.perf_counter()
                found[name] = way(*batch)
                if number >= sizes.calls:
                    times[name].append(time.perf_counter() - begun)
            unequal += sum(not torch.equal(found["all"], one) for one in found.values())
    counts = store.counts
    hits, misses = counts.hits - before.hits, counts.misses - before.misses
    middle = {name: median(one) or 0.0 for name, one in times.items()}
    held = counts.peak + store.layout.kept
    return {"memory_saved": 1 - held / store.layout.bytes, "latency": middle["ahead"] / middle["all"],
            "on_demand": middle["demand"] / middle["ahead"], "hit_rate": hits / max(hits + misses, 1),
            "milliseconds_all_in_memory": 1e3 * middle["all"], "other_bits": unequal,
            "bytes_read_of_a_call": (counts.loaded - before.loaded) / sizes.calls,
            "bytes_read_at_least": least_read(sizes, store),
            "bytes_wasted_of_a_call": (counts.wasted - before.wasted) / sizes.calls,
            "steps_above_cap": above_cap(STEPS_OF_CAP // 10 if quick else STEPS_OF_CAP)}


def least_read(sizes: Sizes, store: Preloader) -> float:
    """Bytes of a measured call that any store of this limit reads: of what is in memory, that goes which is used last
    (Belady 1966), as only who knows all calls can tell."""
    size = max(one.size for one in store.layout.branches)
    uses = [[layer * sizes.experts + int(one) for one in np.unique(ids[:, 0])]
            for call in trace_of(sizes, 2 * sizes.calls, 1).calls for layer, ids in enumerate(call)]
    places: dict[int, list[int]] = {}
    for at, wanted in reversed([*enumerate(uses)]):
        for one in wanted:
            places.setdefault(one, []).append(at)  # the next use is the last of the list
    room, held, read = (store.limit - store.layout.kept) // size, set[int](), 0
    for at, wanted in enumerate(uses):
        for one in wanted:
            places[one].pop()
        missing = [one for one in wanted if one not in held]
        read += len(missing) * (at >= len(uses) // 2)
        held |= {*missing}
        others = sorted(held - {*wanted}, key=lambda one: places[one][-1] if places[one] else len(uses))
        while len(held) > room and others:
            held.remove(others.pop())
    return read * size / sizes.calls


def above_cap(steps: int) -> int:
    """Of so many calls of a small model after which more was held than the limit, as the store counts in every call and
    the kernel in every hundredth."""
    torch.manual_seed(0)
    model = Stack(SMALL).eval()
    fast = planned(model, SMALL, 0.4).apply(model)
    store, above = store_of(fast), 0
    with torch.no_grad():
        for number, batch in enumerate(batches(SMALL, trace_of(SMALL, steps, 2))):
            fast(*batch)
            most = store.counts.peak + store.layout.kept
            if number % 100 == 0:
                most = max(most, resident(store) + store.layout.kept)
            above += most > store.limit
    return above


def resident(store: Preloader) -> int:
    """Bytes of the store's address space that the kernel says are in memory."""
    begin, inside, found = store.memory.bytes.data_ptr(), False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(word, 16) for word in head.split("-"))
            inside = begin <= low and high <= begin + len(store.memory.map)
        elif inside and head == "Rss:":
            found += int(line.split()[1]) * 1024
    return found


def cases() -> list[Study]:
    return [Study("preload", "preload", measure, quick=True)]
