"""Study of strategies for many devices: simulated steps against published runs, and the search against plans by hand.

    python -m anyshape_bench.experiments.strategies docs/results/benchmarks-strategies/strategies.json    (minutes)

Every row is simulated, and says so; the published numbers are of torchtitan's tables (benchmarks/ of its repository,
December 2024 and June 2025) and of TorchAcc's talk of 2024. `fitted` marks the rows whose numbers the table of
H100 was fitted to (by coordinate descent on squared logarithms); all others are held out.
"""
from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from anyshape.dist.cost.machine import machine_of
from anyshape.dist.cost.parallel import Degrees, Precision
from anyshape.dist.cost.strategy import LayerStrategy, uniform
from anyshape.dist.cost.workload import Workload
from anyshape.dist.search.hand_made import best_by_name
from anyshape.dist.search.problem import Search, Shape, shapes_of
from anyshape.dist.search.solver import solve
from anyshape.dist.simulate.step import simulate_step
from anyshape.frontend.strategy.capture import capture
from anyshape.tools.strategy import LLAMAS, llama, loss_of_tokens

TITAN = "h100hbm2ex8:3200Gb"
ASYNC = 0.7  # of the collectives of tensor parallelism, hidden by asynchronous tensor parallelism: an assumption


@dataclass(frozen=True)
class Published:
    """One row of a published table. tokens: a second and GPU. batch: sequences of a data rank. memory: GiB, reserved.
    """

    name: str
    model: str
    machine: str
    degrees: Degrees
    data: str
    recompute: str
    batch: int
    length: int
    tokens: float
    memory: float = 0.0
    micro: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    precision: Precision = field(default_factory=Precision)
    fitted: bool = False


def published() -> list[Published]:
    """All rows."""
    low, found = Precision("fp8"), []
    for world, memories, tokens in ((8, (82.4, 77.0, 76.8), (5762, 6667, 8532)),
                                    (128, (67.0, 62.0, 61.8), (5605, 6514, 8380))):
        titles = ("FSDP", "FSDP + compile", "FSDP + compile + float8")
        precisions = (Precision(eager=True), Precision(), low)
        for title, precision, memory, rate in zip(titles, precisions, memories, tokens, strict=True):
            found.append(Published(f"8B, {world} GPUs, {title}", "llama-8b", TITAN, Degrees(world), "fsdp",
                                   "selective", 2, 8192, rate, memory, precision=precision, fitted=world == 8))
    for context, rate, memory in ((1, 3890, 83.9), (2, 2540, 84.2), (4, 1071, 84.0), (8, 548, 84.5)):
        found.append(Published(f"8B, 8 GPUs, FSDP + CP {context}, {32768 * context} positions", "llama-8b", TITAN,
                               Degrees(8 // context, 1, context), "fsdp", "full", 1, 32768 * context, rate, memory,
                               precision=low, fitted=context in (1, 8)))
    hidden = Precision("fp8", overlap_tensor=ASYNC)
    for title, rated, memory, precision in (
            ("float8", 829.0, 71.9, low), ("float8 + AsyncTP", 876.0, 67.6, hidden),
            ("bf16, 2025", 597.3, 0.0, Precision()),
            ("bf16 + AsyncTP, 2025", 652.4, 0.0, Precision(overlap_tensor=ASYNC))):
        found.append(Published(f"70B, 256 GPUs, FSDP 32 + TP 8, {title}", "llama-70b", TITAN, Degrees(32, 8), "fsdp",
                               "full", 16, 8192, rated, memory, precision=precision, fitted=title == "float8"))
    for title, chunks, rate, memory in (("1f1b", 1, 100, 82.5), ("interleaved", 2, 128, 72.7)):
        found.append(Published(f"405B, 512 GPUs, FSDP 8 + TP 8 + PP 8, {title}", "llama-405b", TITAN,
                               Degrees(8, 8, 1, 8), "zero2", "full", 32, 8192, rate, memory, 8, title, chunks, hidden,
                               title == "1f1b"))
    for context, rate, memory in ((1, 76, 75.3), (2, 47, 75.9), (4, 31, 77.1), (8, 16, 84.9)):
        found.append(Published(f"405B, 512 GPUs, 4D, CP {context}, {32768 * context} positions", "llama-405b", TITAN,
                               Degrees(8 // context, 8, context, 8), "zero2", "full", 8, 32768 * context, rate, memory,
                               8, precision=hidden))
    for world, rate, memory in ((32, 10938, 47.96), (64, 10753, 46.97)):
        found.append(Published(f"8B, {world} H200, FSDP + compile + float8", "llama-8b", "h200x8:3200Gb",
                               Degrees(world), "fsdp", "selective", 2, 8192, rate, memory,
                               precision=Precision("fp8", gather=1.0)))
    return found


def traced(name: str) -> Workload:
    """A model of LLAMAS, or of `OTHERS`."""
    tokens = torch.empty(8, 1024, dtype=torch.int64, device="meta")
    model = llama(*LLAMAS[name]) if name in LLAMAS else _other(name)
    return capture(model, loss_of_tokens if name != "bert-large" else _masked, None, (tokens, tokens), name, "bf16")


OTHERS = ("gpt2-xl", "qwen2-7b", "bert-large")


def _other(name: str) -> torch.nn.Module:
    import transformers as hf
    long = 1 << 15
    with torch.device("meta"):
        if name == "gpt2-xl":
            return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=1600, n_layer=48, n_head=25, n_positions=long))
        if name == "qwen2-7b":
            return hf.Qwen2ForCausalLM(hf.Qwen2Config(
                vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
                num_attention_heads=28, num_key_value_heads=4, use_cache=False))
        return hf.BertForMaskedLM(hf.BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
                                                intermediate_size=4096, max_position_embeddings=long))


def _masked(model: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).logits.flatten(0, 1).float(), labels.flatten())


def _layers(work: Workload) -> list[tuple[str, int]]:
    return [(layer.name, layer.count) for layer in work.layers]


def validate(models: dict[str, Workload]) -> dict[str, Any]:
    """Every published row beside its simulation."""
    rows: list[dict[str, Any]] = []
    for one in published():
        work = models[one.model]
        strategy = uniform(one.degrees, _layers(work), "cut" if one.degrees.tensor > 1 else "whole", one.data,
                           one.recompute, micro=one.micro, schedule=one.schedule, chunks=one.chunks)
        report = simulate_step(work, machine_of(one.machine), strategy, one.batch * one.degrees.data, one.length,
                               one.precision)
        assert report is not None
        rate = report.rate / one.degrees.world
        rows.append({"name": one.name, "fitted": one.fitted, "published": one.tokens, "simulated": round(rate, 1),
                     "error": round(rate / one.tokens - 1, 4), "memory": one.memory,
                     "simulated_memory": round(max(report.memory) / 2**30, 1)})
    held = [abs(row["error"]) for row in rows if not row["fitted"]]
    return {"rows": rows, "held_out": len(held), "median": statistics.median(held), "worst": max(held)}


def torchacc(work: Workload) -> list[dict[str, Any]]:
    """Llama2-7B on 128 A100 against one node of 8 (a GPU), FSDP with gradients in bf16: what merging and early launch
    give. TorchAcc does not say how many positions a GPU has; 4,096 are assumed (two sequences of 2,048)."""
    rows, precision = [], Precision(reduce=2.0)
    machine = machine_of("a100x8:800Gb")
    base = _rate(work, machine, uniform(Degrees(8), _layers(work), "whole", "fsdp", "none"), 16, precision) / 8
    for title, early, merged in (("merged, early", True, True), ("merged", False, True), ("early", True, False),
                                 ("neither", False, False)):
        strategy = uniform(Degrees(128), _layers(work), "whole", "fsdp", "none", early=early, merged=merged)
        rate = _rate(work, machine, strategy, 256, precision)
        rows.append({"name": f"FSDP, {title}", "scaling": round(rate / 128 / base, 4)})
    found = solve(Search(work, machine, 128, (Shape(2048, 1.0, 256),), machine.chip.memory, precision=precision))
    assert found.best.verdict is not None
    rate = 256 * 2048 / found.best.verdict.seconds
    rows.append({"name": f"searched: {found.best.plan.strategies[0].summary}", "scaling": round(rate / 128 / base, 4)})
    return rows


def _rate(work: Workload, machine: Any, strategy: LayerStrategy, batch: int, precision: Precision) -> float:
    report = simulate_step(work, machine, strategy, batch, 2048, precision)
    assert report is not None
    return report.rate


LENGTHS = {512: 0.3, 1024: 0.25, 2048: 0.2, 4096: 0.15, 8192: 0.07, 16384: 0.03}


def compare(models: dict[str, Workload], worlds: tuple[int, ...]) -> list[dict[str, Any]]:
    """The search against the best plan by hand, at lengths that vary."""
    rows = []
    machine = machine_of("h100x8:3200Gb")
    for name, work in models.items():
        for world in worlds:
            search = Search(work, machine, world, shapes_of(LENGTHS, world), machine.chip.memory)
            try:
                found = solve(search)
            except MemoryError as error:
                rows.append({"model": name, "world": world, "fits": False, "why": str(error).splitlines()[0]})
                continue
            hand = best_by_name(search)
            assert found.best.verdict is not None
            best = min(((verdict.seconds, title) for title, (_, verdict) in hand.items()), default=None)
            summary = found.best.plan.strategies[-1].summary
            rows.append({"model": name, "world": world, "fits": True, "strategy": summary,
                         "seconds": found.best.verdict.seconds, "bound": found.bound, "took": round(found.took, 1),
                         "hand": best[1] if best else "none fits", "hand_seconds": best[0] if best else None})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def page(results: dict[str, Any]) -> str:
    """docs/benchmarks-strategies.md, from the stored results."""
    valid = results["validation"]
    lines = [
        "# Strategies for many devices, simulated", "",
        "Made from docs/results/benchmarks-strategies/strategies.json by "
        "`benchmarks/anyshape_bench/experiments/strategies.py`. All numbers "
        "of ours are simulated; those called published are of runs by others.", "",
        "## Published runs", "",
        f"torchtitan's tables for Llama 3 (tokens a second and GPU; memory is what was reserved, in GiB). The table of "
        f"H100 was fitted to the rows marked so. Of the {valid['held_out']} other rows the error is "
        f"{valid['median']:.1%} in the median and {valid['worst']:.1%} in the worst. That asynchronous tensor "
        f"parallelism hides {ASYNC:.0%} of its collectives is an assumption.", "",
        "| row | | published | simulated | error | GiB | simulated |", "|---|---|---|---|---|---|---|"]
    for row in valid["rows"]:
        memory = f"{row['memory']:g}" if row["memory"] else ""
        lines.append(f"| {row['name']} | {'fitted' if row['fitted'] else ''} | {row['published']:g} | "
                     f"{row['simulated']:g} | {row['error']:+.1%} | {memory} | {row['simulated_memory']:g} |")
    lines += ["", "## Llama2-7B on 128 A100, 800 Gb a node", "",
              "A GPU's rate against one node of 8, with 4,096 positions a GPU (an assumption). TorchAcc measured 0.91 "
              "of linear, and 0.69 without merged collectives, a stream of their own and early launch.", "",
              "| strategy | scaling |", "|---|---|"]
    lines += [f"| {row['name']} | {row['scaling']:.2f} |" for row in results["torchacc"]]
    large = results["large"]
    lines += ["", "## Search", "",
              f"{large['model']} on {large['world']} H100: {large['families']} families in {large['took']:.0f} s of "
              f"one processor; {large['seconds']:.2f} s a step, at most {large['gap']:.1%} above what is possible in "
              f"the space of the search: {large['strategy']}.", "", "## Against the best plan by hand", "",
              f"Lengths vary: {', '.join(f'{length} ({weight:.0%})' for length, weight in LENGTHS.items())}; one "
              "sequence a GPU and step, H100 with 3,200 Gb a node. By hand: the best of DDP, FSDP, TP, TP+SP, FSDP+TP "
              "and PP with no, selective or full recomputation, fixed for all lengths.", "",
              "| model | GPUs | found | ms | bound | by hand | ms | times |", "|---|---|---|---|---|---|---|---|"]
    ratios = []
    for row in results["compare"]:
        if not row["fits"]:
            lines.append(f"| {row['model']} | {row['world']} | {row['why']} | | | | | |")
            continue
        ratio = row["hand_seconds"] / row["seconds"] if row["hand_seconds"] else None
        ratios += [ratio] if ratio else []
        lines.append(f"| {row['model']} | {row['world']} | {row['strategy']} | {row['seconds'] * 1e3:.1f} | "
                     f"{row['bound'] * 1e3:.1f} | {row['hand']} | "
                     + (f"{row['hand_seconds'] * 1e3:.1f} | {ratio:.2f} |" if ratio else "| |"))
    lines += ["", f"Geometric mean over the {len(ratios)} rows where a plan by hand fits: "
              f"{statistics.geometric_mean(ratios):.2f}; least {min(ratios):.2f}."]
    return "\n".join(lines) + "\n"


def main(out: Path) -> None:
    """Runs all, and writes the results after each part."""
    names = ("llama-1b", "llama-7b", "llama-8b", "llama-13b", "llama-70b", *OTHERS)
    models = {name: traced(name) for name in (*names, "llama-405b")}
    results: dict[str, Any] = {"kind": "simulated", "validation": validate(models),
                               "torchacc": torchacc(models["llama-7b"])}
    out.write_text(json.dumps(results, indent=1) + "\n")
    big = machine_of("h100x8:3200Gb")
    found = solve(Search(models["llama-70b"], big, 512, (Shape(8192, 1.0, 1024),), big.chip.memory))
    assert found.best.verdict is not None
    results["large"] = {"model": "llama-70b", "world": 512, "took": round(found.took, 1), "gap": round(found.gap, 4),
                        "seconds": found.best.verdict.seconds, "bound": found.bound,
                        "strategy": found.best.plan.strategies[0].summary, "families": found.families}
    out.write_text(json.dumps(results, indent=1) + "\n")
    results["compare"] = []
    for world in (8, 64, 128, 512):
        results["compare"] += compare({name: models[name] for name in names}, (world,))
        out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
