"""Study of the warm start: the first step of a first and of later processes of one script, beyond imports and models.

    python -m anyshape_bench.experiments.warm_start docs/results/warm-start.json    (minutes)

Each case gets a disk cache of its own. The first process fills it; each later one is fresh, and its captured programs
come from the cache, which is counted. `cold` processes have the machine code of the first one, and trace.
"""
from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import anyshape
from anyshape_bench.models import networks

MODULE = "anyshape_bench.experiments.warm_start"
MODELS = {"llama": lambda: networks.llama(512, 4, 8, 1408, 8192), "bert": lambda: networks.bert(512, 6, 8, 8192)}
KINDS = ("inference", "training")  # a training step is a forward and a backward
IMPORTED = ("torch._dynamo.convert_frame", "torch._functorch.aot_autograd", "anyshape.frontend.api")  # at first use
SHAPE = (2, 37)
SECONDS = 900  # a hang ends here


def first_step(model: str, kind: str, folder: str, warm: bool) -> dict[str, Any]:
    """One process: its first step in seconds, wall and processor time, and what is counted."""
    for name in IMPORTED:
        importlib.import_module(name)
    torch.manual_seed(0)
    module = MODELS[model]().train(kind == "training")
    tokens = torch.randint(0, 8192, SHAPE)
    begun, used = time.perf_counter(), time.process_time()
    fast = anyshape.compile(module, cache_dir=folder, warm_start=warm)
    with torch.set_grad_enabled(kind == "training"):
        found = fast(tokens)[0]
        if kind == "training":
            found.square().mean().backward()
    stats = anyshape.stats()
    return {"seconds": time.perf_counter() - begun, "processor_seconds": time.process_time() - used,
            **{name: stats[name] for name in ("warm_starts", "warm_refusals", "warm_not_kept", "graphs", "fallbacks")}}


def process(model: str, kind: str, folder: str, warm: bool) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", MODULE, "--worker", model, kind, folder, str(int(warm))],
                          capture_output=True, text=True, timeout=SECONDS, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def study(repeats: int) -> list[dict[str, Any]]:
    """Every model and kind of step: a first process, and `repeats` later ones that trace, and that need not, in turns.
    """
    rows = []
    for model in MODELS:
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                first = process(model, kind, folder, True)
                both = [(process(model, kind, folder, False), process(model, kind, folder, True))
                        for _ in range(repeats)]
            rows.append({"model": model, "step": kind, "first": first, "cold": [cold for cold, _ in both],
                         "warm": [warm for _, warm in both]})
            middle = [statistics.median(one["seconds"] for one in side) for side in zip(*both, strict=True)]
            last = both[-1][1]
            print(f"{model}, {kind}: first process {first['seconds']:.2f} s, later ones that trace {middle[0]:.2f} s, "
                  f"with programs from the cache {middle[1]:.2f} s; warm starts {last['warm_starts']} "
                  f"of {last['graphs']} graphs", flush=True)
    return rows


def table(found: dict[str, Any]) -> str:
    """The results in Markdown: medians of seconds of the first step, beyond imports."""
    lines = ["| model | first step of | first process, s | later, traced, s | later, `warm_start=True`, s |",
             "|---|---|---:|---:|---:|"]
    for row in found["rows"]:
        cold, warm = (statistics.median(one["seconds"] for one in row[name]) for name in ("cold", "warm"))
        lines.append(f"| {row['model']} | {row['step']} | {row['first']['seconds']:.2f} | {cold:.2f} | {warm:.2f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", type=Path, help="where the results are written, as JSON")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        model, kind, folder, warm = arguments.worker
        print(json.dumps(first_step(model, kind, folder, warm == "1")))
        return
    rows = study(arguments.repeats)
    if arguments.path is not None:
        found = {"torch": torch.__version__, "threads": torch.get_num_threads(), "shape": SHAPE, "rows": rows}
        arguments.path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
