"""Study of the GPUs' back end on a machine without one: how long the kernels of a train step take to compile, and
whether steps keep to limits in bytes on the fake driver of the tests.

    python -m anyshape_bench.experiments.gpu_offline docs/results/gpu/gpu.json    (minutes; `compile` wants idle cores)

The Llama of the benchmarks is captured once, forward and backward. Each process plans its graphs for a GPU, and
compiles the versions that a step runs at the captured sizes: first with an empty cache, then from it. `--part` measures
one part anew and keeps the other; the table in docs/gpu.md is written with the file.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import anyshape
from anyshape.backend.triton import toolchain
from anyshape.backend.triton.compile import Compiler, Wanted
from anyshape.backend.triton.launch import VersionedKernel, alignments_of
from anyshape.backend.triton.plan_encoder import aligned
from anyshape.backend.triton.schedule import emit
from anyshape.backend.triton.target import HARDWARE, unsupported
from anyshape.backend.triton.text import read
from anyshape.base.config import Config
from anyshape.base.disk_cache import cache_of
from anyshape.compiler.driver import plan_graph
from anyshape.ir.parse import parse
from anyshape.ir.types import size_of
from anyshape.kernel.loop_ir.program import LoopProgram
from anyshape.plan.ir.program import KernelStep, Plan
from anyshape.plan.ir.size_function import STATUS_BUFFER
from anyshape_bench.models import bench_models

MODULE = "anyshape_bench.experiments.gpu_offline"
ROOT = Path(__file__).parents[3]
ARCHITECTURES = ("sm_90", "gfx942")
MODEL, REPEATS, SECONDS = "llama", 3, 900
SHAPES, LIMITS = 200, 6


# ---- compiling

class Offline:
    """A GPU that is not there: what plans for it are made by. See `Target`."""

    hardware = dataclasses.replace(HARDWARE, band_bytes=0)
    unsupported = frozenset(unsupported())
    own_ops: frozenset[str] = frozenset()
    streams, machine_key, device = None, "", "cuda:0"

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler

    def emit(self, program: LoopProgram) -> str:
        """See `Target`."""
        return emit(program)

    def build(self, texts: Sequence[str]) -> list[VersionedKernel]:
        """See `Target`."""
        return [VersionedKernel(read(text), self.compiler) for text in texts]

    def multiplies(self, dtype: str) -> bool:
        """See `Target`."""
        return dtype in ("f32", "f64", "bf16", "f16")

    multiplies_any_strides = multiplies


def wanted(plan: Plan, kernels: Sequence[VersionedKernel]) -> Iterator[Wanted]:
    """The versions that a plan's steps run at the sizes it was captured with."""
    known, allocated, hint = {kernel.name: kernel for kernel in kernels}, aligned(plan), plan.facts.hint
    guarded = any(window.buffer == STATUS_BUFFER for step in plan.steps if isinstance(step, KernelStep)
                  for window in step.params)
    for step in plan.steps:
        if isinstance(step, KernelStep):
            regime = next(one for one in step.regimes if all(hint(size) >= 0 for size in one.conditions))
            alignments = alignments_of([window.buffer in allocated for window in step.params],
                                       [hint(window.offset) * size_of(window.type.dtype) for window in step.params])
            for name in regime.kernels:
                yield from known[name].wanted([hint(size) for size in regime.sizes], alignments, guarded)


def compiling(folder: str, architecture: str, cache: str) -> dict[str, Any]:
    """One process: seconds to plan the graphs of a folder and to compile their kernels, wall and processor time."""
    graphs = [parse(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("*.txt"), reverse=True)]
    compiler = Compiler(architecture, cache_of(Config.make(cache_dir=cache)))
    begun, used = time.perf_counter(), _used()
    before, pairs = None, []
    for graph in graphs:
        before = plan_graph(graph, Offline(compiler), Config(), before)  # type: ignore[arg-type]
        pairs += list(wanted(before.plan, before.kernels))  # type: ignore[arg-type]
    planned = time.perf_counter() - begun
    made = compiler.compile(pairs)
    return {"plan_seconds": planned, "seconds": time.perf_counter() - begun, "processor_seconds": _used() - used,
            "kernels": len({kernel.name for kernel in made}), "versions": len(set(made))}


def _used() -> float:
    """Seconds of processor time, of the assemblers that were started too."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def capture(folder: str) -> dict[str, Any]:
    """The graphs of a forward and its backward, as text, and how long the first step took on the CPU."""
    model = bench_models.load(MODEL)
    begun = time.perf_counter()
    model.make(lambda module: anyshape.compile(module, dump=f"{folder}/dump"))(model.inputs(model.shapes[0]))
    seconds = time.perf_counter() - begun
    for path in Path(folder).glob("dump/*/00_capture.txt"):
        kind = "backward" if "backward" in path.parent.name else "forward"  # which sorts first, in reverse
        lines = path.read_text(encoding="utf-8").split("\n")
        Path(folder, f"{kind}.txt").write_text("\n".join(one for one in lines if not one.startswith("# stage")))
    return {"model": MODEL, "shape": list(model.shapes[0]), "capture_seconds": seconds}


def study_compiling(repeats: int) -> dict[str, Any]:
    """Every architecture: first processes, each with an empty cache, and later ones."""
    rows, load = [], os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as graphs:
        about = capture(graphs)
        for architecture in ARCHITECTURES:
            first, later = [], []
            for _ in range(repeats):
                with tempfile.TemporaryDirectory() as cache:
                    first.append(_process(graphs, architecture, cache))
                    later.append(_process(graphs, architecture, cache))
            rows.append({"architecture": architecture, "first": first, "later": later})
            print(f"{architecture}: {rows[-1]}", flush=True)
    return {**about, "triton": toolchain.version(), "torch": torch.__version__, "date": _today(),
            "cores": len(os.sched_getaffinity(0)), "load": load, "rows": rows}


def _process(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", MODULE, "--worker", *arguments], capture_output=True, text=True,
                          timeout=SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


# ---- limits

def study_limits(shapes: int) -> dict[str, Any]:
    """Steps at so many shapes, under 6 limits each, on the fake driver: how many take more than their limit, and how
    many just what was predicted."""
    sys.path.insert(0, str(ROOT / "tests"))
    import fake_limits
    with fake_limits.moving_device() as moved:
        found = fake_limits.under_limits(moved, 0, shapes)
    return {"shapes": shapes, "limits": LIMITS, "date": _today(), **dataclasses.asdict(found)}


# ---- the table

def table(found: dict[str, Any]) -> str:
    """The results in Markdown; seconds are medians of processes."""
    compiled, limits = found["compile"], found["limits"]
    beside = "" if compiled["load"] < compiled["cores"] else f", at a load of {compiled['load']:.0f} beside it"
    lines = ["| measured without a device | aim | here |", "|---|---|---|"]
    for row in compiled["rows"]:
        first, later = ({name: statistics.median(one[name] for one in row[which]) for name in row[which][0]}
                        for which in ("first", "later"))
        lines += [f"| train step of {compiled['model']} for {row['architecture']}: {first['kernels']:.0f} kernels in "
                  f"{first['versions']:.0f} versions planned and compiled, {compiled['cores']} cores, Triton "
                  f"{compiled['triton']} ({compiled['date']}{beside}) | 6 s more than capture | "
                  f"{first['seconds']:.1f} s, of which planning {first['plan_seconds']:.1f} s; "
                  f"{first['processor_seconds']:.1f} s of processor time "
                  f"(capture and first step on the CPU: {compiled['capture_seconds']:.1f} s) |",
                  f"| the same in a later process, kernels from the disk cache | 0.3 s | "
                  f"{later['seconds'] - later['plan_seconds']:.2f} s, and planning {later['plan_seconds']:.1f} s; "
                  f"{later['processor_seconds']:.2f} s of processor time |"]
    lines.append(f"| steps on the fake device, {limits['shapes']} shapes under {limits['limits']} limits "
                 f"({limits['date']}) | 0 over, predicted is counted | {limits['over']} of {limits['steps']} over, "
                 f"{limits['exact']} take just what was predicted; below the least limit {limits['refused']} of "
                 f"{limits['shapes']} refused |")
    return "\n".join([*lines, ""])


def device_tables(found: dict[str, Any]) -> str:
    """What benchmarks/device.py gave on a GPU: parts of a copy's bytes a second, and products."""
    by_part: dict[str, list[dict[str, Any]]] = {}
    for run in found["runs"]:
        for row in run["rows"]:
            by_part.setdefault(row["part"], []).append(row)
    kernels = by_part["bandwidth"][1:]  # behind the copy's own row
    ways = [way for way in kernels[0] if way not in ("part", "name", "error")]
    products = by_part["products"]
    lines = [f"| part of a copy's bytes a second | {' | '.join(ways)} |", "|---|" + "---|" * len(ways),
             *(f"| {row['name']} | " + " | ".join(
                 f"{row[way]:.2f}" if way in row else "" for way in ways) + " |" for row in kernels), "",
             f"| TFLOP/s of relu(x @ w + b) | {' | '.join(products[0]['tflops'])} |",
             "|---|" + "---|" * len(products[0]["tflops"]),
             *(f"| {row['name']} | " + " | ".join(f"{one:.0f}" for one in row["tflops"].values()) + " |"
               for row in products), ""]
    return "\n".join(lines)


def write(path: Path, found: dict[str, Any]) -> None:
    """The file, and the table in the page once both parts are there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if set(found) == {"compile", "limits"}:
        _replace(table(found))


def _replace(tables: str) -> None:
    """Puts each table in the place of that of docs/gpu.md with the same first cell."""
    page = ROOT / "docs" / "gpu.md"
    lines = page.read_text(encoding="utf-8").split("\n")
    for new in tables.strip("\n").split("\n\n"):
        cell = new[:new.index(" |", 1)]
        begin = next((number for number, line in enumerate(lines) if line.startswith(cell)), len(lines))
        end = next((number for number in range(begin, len(lines)) if not lines[number].startswith("|")), len(lines))
        lines[begin:end] = new.split("\n") if begin < end else []
    page.write_text("\n".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, help="where the results are, as JSON")
    parser.add_argument("--part", choices=("compile", "limits"), help="this one alone; the other stays as it is stored")
    parser.add_argument("--device", type=Path, help="puts what benchmarks/device.py gave into the page, and ends")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--shapes", type=int, default=SHAPES)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(compiling(*arguments.worker)))
        return
    if arguments.device:
        _replace(device_tables(json.loads(arguments.device.read_text(encoding="utf-8"))))
        return
    path = arguments.path
    found = json.loads(path.read_text()) if path is not None and path.exists() else {}
    if arguments.part != "limits":
        found["compile"] = study_compiling(arguments.repeats)
    if arguments.part != "compile":
        found["limits"] = study_limits(arguments.shapes)
    if path is not None:
        write(path, found)
    print(json.dumps(found, indent=1) if set(found) != {"compile", "limits"} else table(found))


if __name__ == "__main__":
    main()
