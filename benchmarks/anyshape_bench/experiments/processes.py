"""Study of train steps over processes (gloo): throughput on new shapes, memory of a rank, exposed communication.

    python -m anyshape_bench.experiments.processes docs/results/benchmarks-processes/processes.json    (minutes)

It starts `torchrun` with two processes for each way to train, twice: once for times, once with the counter of memory
loaded. Every shape is new to the process that is timed. The same command with `--page PAGE.md` writes the page, too.
"""
from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyshape
from anyshape_bench.harness.runner import Runner
from anyshape_bench.measure.memory_counter import meter, settled
from anyshape_bench.models.bench_models import TrainStep
from anyshape_bench.models.custom_model import load_by_name
from anyshape_bench.models.suite import WARM_UP_CALLS, pick

TORCH = ("torch DDP, Inductor", "torch FSDP2", "torch FSDP2, Inductor")
OURS: dict[str, dict[str, Any]] = {f"anyshape {name}": {"strategy": name} for name in ("ddp", "fsdp")}
APART = "overlap_collectives"  # the pass without which messages are waited for where they are sent
WAITING = {f"{name}, waiting": {**settings, "disable": APART} for name, settings in OURS.items()}
MODULE = "anyshape_bench.experiments.processes"
SECONDS = 1500  # a hang ends here
LENGTH_STEPS = 1000
Step = Callable[[Tensor], Tensor]


def by_anyshape(module: nn.Module, loss: Callable[..., Tensor], settings: dict[str, Any]) -> Step:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    return anyshape.train_step(module, loss, optimizer, strict=True, threads=torch.get_num_threads(), **settings)


def by_torch(name: str, module: nn.Module, loss: Callable[..., Tensor]) -> Step:
    """DDP around the module, compiled as a whole; or FSDP2 of each layer and of the rest, layers compiled or not."""
    call: Callable[..., Any] = module
    if "DDP" in name:
        call = torch.compile(DistributedDataParallel(module), dynamic=True)
    else:
        for layer in module.model.layers:  # type: ignore[union-attr]
            if "Inductor" in name:
                layer.compile(dynamic=True)
            fully_shard(layer)
        fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused="DDP" in name)

    def step(tokens: Tensor) -> Tensor:
        found = loss(call, tokens)
        found.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return found.detach()

    return step


def made(way: str, model: str) -> tuple[Any, Step, nn.Module]:
    """The model of the suite, its step, and its module."""
    entry = load_by_name(model)
    apart = entry.make(lambda module: module)
    assert isinstance(apart, TrainStep)
    module, loss = apart.module, type(apart).loss
    apart.optimizer.state.clear()
    del apart
    ours = {**OURS, **WAITING}
    step = by_anyshape(module, loss, ours[way]) if way in ours else by_torch(way, module, loss)
    return entry, step, module


def mean_over_ranks(loss: Tensor) -> float:
    """torch's losses are those of a rank's own rows; all ranks have equally many tokens."""
    found = loss.detach().clone()
    dist.all_reduce(found)
    return float(found) / dist.get_world_size()


def tokens_of(entry: Any, shape: tuple[int, ...]) -> Tensor:
    """A rank's own tokens."""
    (tokens,) = entry.inputs(shape)
    return (tokens + 17 * dist.get_rank()) % int(tokens.max() + 1)


def measure_times(way: str, model: str, shapes: int) -> dict[str, Any]:
    """Seconds of steps of shapes that are new, from a barrier before to one after, and what was counted."""
    entry, step, module = made(way, model)
    tensors = len(list(module.parameters()))
    chosen = pick(entry.shapes, shapes)
    losses, seconds, tokens, waited, sent = [], [], [], [], []
    for number, shape in enumerate(chosen):
        batch = tokens_of(entry, shape)
        before = anyshape.stats()
        dist.barrier()
        begun = time.perf_counter()
        loss = step(batch)
        dist.barrier()
        if number >= WARM_UP_CALLS:
            seconds.append(time.perf_counter() - begun)
            tokens.append(batch.numel() * dist.get_world_size())
            after = anyshape.stats()
            waited.append(after["collective_wait_seconds"] - before["collective_wait_seconds"])
            sent.append(after["collectives"] - before["collectives"])
        losses.append(mean_over_ranks(loss))
    return {"tokens": sum(tokens), "seconds": sum(seconds), "waited": waited, "shapes": len(seconds),
            "collectives": max(sent), "tensors": tensors, "losses": losses}


def measure_memory(way: str, model: str, shapes: int) -> dict[str, Any]:
    """The most bytes that a rank holds in a step, above what it held before there was a model."""
    counter = meter()
    entry = load_by_name(model)
    before = settled(counter)[0]
    del entry
    entry, step, _ = made(way, model)
    chosen = pick(entry.shapes, shapes)
    greatest = max(chosen, key=lambda shape: shape[0] * shape[1])
    for shape in (*chosen[:WARM_UP_CALLS], greatest):
        step(tokens_of(entry, shape))
    settled(counter)
    counter.reset()
    step(tokens_of(entry, greatest))
    return {"peak": counter.peak() - before, "shape": list(greatest), "method": counter.method}


def measure_lengths(model: str, steps: int) -> dict[str, Any]:
    """Steps with another length on each rank."""
    entry, step, _ = made("anyshape ddp", model)
    draw = torch.Generator().manual_seed(dist.get_rank())
    longest = max(length for _, length in entry.shapes)
    lengths, first, loss = set(), 0.0, torch.zeros(())
    for number in range(steps):
        length = int(torch.randint(4, longest + 1, (), generator=draw))
        rows = 2 + number % 4  # as many on each rank: masks of transformers are made for whole batches
        lengths.add((rows, length))
        loss = step(torch.randint(0, 64, (rows, length), generator=draw))
        if number == 1:
            first = anyshape.stats()["programs"]
    return {"steps": steps, "shapes": len(lengths), "recompilations": anyshape.stats()["programs"] - first,
            "finite": bool(loss.isfinite())}


def rank(arguments: argparse.Namespace) -> None:
    """What a process that torchrun started does."""
    dist.init_process_group("gloo")
    if arguments.measure == "lengths":
        found = measure_lengths(arguments.model, arguments.steps)
    else:
        measure = measure_memory if arguments.measure == "memory" else measure_times
        found = measure(arguments.way, arguments.model, arguments.shapes)
    os.write(1, (json.dumps({"rank": dist.get_rank(), **found}) + "\n").encode())
    dist.barrier()
    dist.destroy_process_group()


def ranks(arguments: argparse.Namespace, measure: str, way: str) -> list[dict[str, Any]]:
    """What each rank found, in order; caches of compilers are new.

    Raises:
        RuntimeError: a rank failed.
        TimeoutExpired: they took too long.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    model = arguments.small if measure == "lengths" else arguments.model
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={arguments.world}",
               f"--master_port={port}", "-m", MODULE, "-", "--measure", measure, "--way", way, "--model", model,
               "--shapes", str(arguments.shapes), "--steps", str(arguments.steps)]
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder), Path(folder), SECONDS, threads_of(arguments.world), MODULE)
        environment = runner.environment({"model": model, "backend": "processes", "mode": measure})
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(found) != arguments.world:
        raise RuntimeError(f"{way}, {measure}: {done.stderr[-3000:]}")
    return sorted(found, key=lambda one: one["rank"])


def threads_of(world: int) -> int:
    """Threads of a rank."""
    return max(1, (os.cpu_count() or 1) // world)


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """All ways to train, one after another; the file is written after each."""
    results: dict[str, Any] = {
        "world": arguments.world, "cores": os.cpu_count(), "model": arguments.model, "torch": torch.__version__,
        "threads": threads_of(arguments.world), "ways": {}}
    for way in (*OURS, *WAITING, *TORCH):
        times = [ranks(arguments, "times", way) for _ in range(arguments.rounds)]
        row = min(times, key=lambda one: max(each["seconds"] for each in one))
        results["ways"][way] = {
            "tokens_a_second": round(row[0]["tokens"] / max(one["seconds"] for one in row), 1),
            "waited": round(statistics.mean(sum(one["waited"]) for one in row) / row[0]["shapes"], 5),
            "waited_by_the_slower": round(sum(map(min, zip(*(one["waited"] for one in row), strict=True)))
                                          / row[0]["shapes"], 5),
            "collectives": row[0]["collectives"], "tensors": row[0]["tensors"], "shapes": row[0]["shapes"],
            "losses": row[0]["losses"]}
        if way not in WAITING:
            memory = ranks(arguments, "memory", way)
            results["ways"][way] |= {"peak": max(one["peak"] for one in memory), "shape": memory[0]["shape"],
                                     "counted": memory[0]["method"]}
        print(way, {key: value for key, value in results["ways"][way].items() if key != "losses"}, flush=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    found = ranks(arguments, "lengths", "anyshape ddp")
    results["lengths"] = {key: max(one[key] for one in found) for key in ("steps", "shapes", "recompilations")}
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    return results


def page(results: dict[str, Any]) -> str:
    """docs/benchmarks-processes.md, from the stored results."""
    ways = results["ways"]
    best = max(ways[name]["tokens_a_second"] for name in TORCH)
    lines = [
        "# Train steps over processes, measured", "",
        "Made from docs/results/benchmarks-processes/processes.json by "
        "`benchmarks/anyshape_bench/experiments/processes.py`.", "",
        f"`{results['model']}` of the suite in float32 with AdamW, {results['world']} processes on one machine of "
        f"{results['cores']} cores, {results['threads']} thread(s) each, gloo, torch {results['torch']}. Every timed "
        f"step has a shape that its process has not seen, after {WARM_UP_CALLS} others; tokens are those of all ranks. "
        "The peak is the most bytes that a rank's heap holds in a step of the greatest shape, weights and optimiser "
        "state included. Waited: what a rank stands still for messages, a step.", "",
        "| | tokens a second | against the best of torch | peak a rank, MB | waited, ms | messages a step |",
        "|---|---|---|---|---|---|"]
    for name, row in ways.items():
        ours = name not in TORCH
        lines.append(
            f"| {name} | {row['tokens_a_second']:.0f} | {row['tokens_a_second'] / best:.2f} | "
            f"{'%.0f' % (row['peak'] / 1e6) if 'peak' in row else ''} | "
            f"{'%.1f' % (row['waited'] * 1e3) if ours else ''} | {row['collectives'] if ours else ''} |")
    lines += ["", "| measure | reach | found |", "|---|---|---|"]
    peaks = {"ddp": TORCH[0], "fsdp": min(TORCH[1:], key=lambda name: ways[name]["peak"])}
    for kind, other in peaks.items():
        own = ways[f"anyshape {kind}"]
        rivals = TORCH[:1] if kind == "ddp" else TORCH[1:]
        ratio = own["tokens_a_second"] / max(ways[name]["tokens_a_second"] for name in rivals)
        exposed = own["waited"] / ways[f"anyshape {kind}, waiting"]["waited"]
        lines += [f"| {kind}: throughput on new shapes against torch's | 1.3 | {ratio:.2f} |",
                  f"| {kind}: peak of a rank against {other} | 0.7 | {own['peak'] / ways[other]['peak']:.2f} |",
                  f"| {kind}: exposed communication against all of it | 0.3 | {exposed:.2f} |"]
        if "waited_by_the_slower" in own:
            apart = own["waited_by_the_slower"] / ways[f"anyshape {kind}, waiting"]["waited_by_the_slower"]
            lines.append(f"| {kind}: the same of the rank that waits less, step by step | | {apart:.2f} |")
    own, lengths = ways["anyshape ddp"], results["lengths"]
    lines += [
        f"| ddp: messages a step, of {own['tensors']} parameters | {own['tensors'] // 10} | {own['collectives']} |",
        f"| recompilations in {lengths['steps']} steps with another length on each rank | 0 | "
        f"{lengths['recompilations']} |", "",
        "All of the communication is what ranks wait when messages are waited for where they are sent (the pass "
        f"`{APART}` left out): sending, and standing still for the slower rank."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command, or one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("out", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--measure", default="", help=argparse.SUPPRESS)
    parser.add_argument("--way", default="", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="llama")
    parser.add_argument("--small", default="demo-llama", help="the model of the steps with other lengths")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--shapes", type=int, default=16)
    parser.add_argument("--steps", type=int, default=LENGTH_STEPS)
    parser.add_argument("--rounds", type=int, default=2, help="runs of which the faster one counts")
    arguments = parser.parse_args()
    if arguments.measure:
        rank(arguments)
        return
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results = measured(arguments)
    if arguments.page:
        arguments.page.write_text(page(results))


if __name__ == "__main__":
    main()
