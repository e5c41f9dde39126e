"""Study of the all-to-all of experts: messages as long as their rows against messages padded to a capacity, on gloo.

    torchrun --nproc_per_node=2 -m anyshape_bench.experiments.exchange docs/results/benchmarks-exchange/exchange.json

Each rank has a number of rows for each expert that is uniform in 0 .. capacity, as in Brainstorm's figure 12 (OSDI
2023), so that padding doubles the bytes in the mean. `message`: both from rows in the order in which they are sent; the
sparse side begins with its message of counts, and each makes the tensor that it receives. `dispatch`: from cells and
ids to rows sorted by expert, against a gather into the padded buffer and its message. The two sides take turns, and a
ratio is of medians. Loopback, so what a network adds to each byte is not in it.
"""
from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from anyshape.dist.experts import ExpertMap
from anyshape.runtime.collectives.expert_exchange import ExpertExchange, exchanged
from anyshape.runtime.collectives.messages import Line

CASES = ((8, 256, 256), (8, 1024, 256), (8, 1024, 1024), (32, 256, 1024), (64, 256, 512))  # experts, capacity, width
QUICK = ((4, 8, 4),)
TURNS = 15


def measured(line: Line, experts: int, capacity: int, width: int, turns: int) -> dict[str, Any]:
    """One case: seconds of both sides, and the bytes that each rank sends to others."""
    place = ExpertMap.contiguous(experts, line.ranks)
    exchange = ExpertExchange(line, place)
    torch.manual_seed(1000 + line.rank)
    loads = torch.randint(0, capacity + 1, (experts,))
    ids = torch.arange(experts).repeat_interleave(loads)[torch.randperm(int(loads.sum()))][:, None]
    cells = torch.randn(len(ids), width)
    found = exchange.dispatch(cells, ids)
    rows = cells[found.order]
    counts = loads.int()
    each = experts // line.ranks
    padded = torch.randn(experts * capacity, width)
    starts = found.sent_ends.long() - loads

    def sparse() -> None:
        exchange.counts(counts)
        exchanged(rows, found.sent, found.received, line.group)

    def dense() -> None:
        dist.all_to_all_single(torch.empty_like(padded), padded, group=line.group)

    def whole_dense() -> None:
        order = torch.argsort(ids[:, 0], stable=True)
        slot = torch.arange(len(ids)) - starts.repeat_interleave(loads)
        buffer = torch.zeros_like(padded)
        buffer[ids[order, 0] * capacity + slot] = cells[order]
        dist.all_to_all_single(torch.empty_like(buffer), buffer, group=line.group)

    def whole_sparse() -> None:
        exchange.dispatch(cells, ids)

    away = sum(count for rank, count in enumerate(found.sent) if rank != line.rank)
    answer: dict[str, Any] = {"experts": experts, "capacity": capacity, "width": width, "ranks": line.ranks,
                              "sparse_bytes": away * width * 4,
                              "padded_bytes": (experts - each) * capacity * width * 4}
    for name, one, other in (("message", sparse, dense), ("dispatch", whole_sparse, whole_dense)):
        seconds = in_turns((one, other), turns, line)
        answer[name] = {"sparse": seconds[0], "padded": seconds[1],
                        "ratio": statistics.median(seconds[1]) / statistics.median(seconds[0])}
    return answer


def in_turns(sides: tuple[Callable[[], None], ...], turns: int, line: Line) -> list[list[float]]:
    """Seconds of each side in each turn, the first two of which are not counted; of the slowest rank."""
    found: list[list[float]] = [[] for _ in sides]
    for turn in range(turns + 2):
        for place, side in enumerate(sides):
            dist.barrier(group=line.group)
            begun = time.perf_counter()
            side()
            took = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX, group=line.group)
            if turn > 1:
                found[place].append(float(took))
    return found


def table(found: dict[str, Any]) -> str:
    """The results in Markdown: how many times longer the padded way takes, in medians."""
    lines = ["| experts | capacity | width | bytes, padded to sparse | message | with dispatch |",
             "|---:|---:|---:|---:|---:|---:|"]
    lines += [f"| {one['experts']} | {one['capacity']} | {one['width']} | "
              f"{one['padded_bytes'] / max(one['sparse_bytes'], 1):.2f}x | {one['message']['ratio']:.2f}x | "
              f"{one['dispatch']['ratio']:.2f}x |" for one in found["cases"]]
    mean = [statistics.geometric_mean(one[name]["ratio"] for one in found["cases"]) for name in ("message", "dispatch")]
    return "\n".join([*lines, f"| geometric mean | | | | {mean[0]:.2f}x | {mean[1]:.2f}x |", ""])


def main() -> None:
    """Measures all cases; rank 0 prints them, and writes the file that is named."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    quick = "--quick" in sys.argv
    names = [name for name in sys.argv[1:] if not name.startswith("-")]
    line = Line(dist.group.WORLD, dist.get_world_size(), dist.get_rank())
    found = []
    for experts, capacity, width in QUICK if quick else CASES:
        found.append(measured(line, experts, capacity, width, 3 if quick else TURNS))
        if line.rank == 0:
            one = found[-1]
            print(f"{experts} experts, capacity {capacity}, width {width}: padding sends "
                  f"{one['padded_bytes'] / max(one['sparse_bytes'], 1):.2f} times the bytes; message "
                  f"{one['message']['ratio']:.2f}x, dispatch {one['dispatch']['ratio']:.2f}x", flush=True)
    if line.rank == 0:
        ratios = [one["message"]["ratio"] for one in found]
        print(f"geometric mean of messages: {statistics.geometric_mean(ratios):.2f}x", flush=True)
        for name in names:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(json.dumps({"torch": torch.__version__, "cases": found}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
