"""Study of `anyshape.jax.jit` inside of `jax.jit`: a small language model, at shapes new and seen, against XLA.

    python -m anyshape_bench.experiments.jax_ffi docs/results/jax-ffi/jax-ffi.json

One process with one thread for XLA and for us; the two run in turns at every shape, and what counts is processor time:
of the first call at a shape, and of the middle of many calls at it. It takes half a minute. What is
stored in docs/results is shown in docs/jax.md.
"""
from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from anyshape_bench.harness.machine import machine
from anyshape_bench.harness.marked_part import show_stored

MODULE = "anyshape_bench.experiments.jax_ffi"
SHAPES = ((3, 17), (1, 1), (2, 512), (7, 33), (2, 100), (2, 101))
FIRST = (5, 23)  # compiles, and is not counted
ONE_THREAD = ("env", "XLA_FLAGS=--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1", "OMP_NUM_THREADS=1",
              "JAX_PLATFORMS=cpu")
SECONDS = 900  # a hang ends here
MOST_NEW, MOST_SEEN = 0.020, 1.0  # what is aimed at: seconds at a new shape; of XLA's time at a seen one
MARK = "ffi"


def measured(calls: int) -> dict[str, Any]:
    """One process: seconds of processor time at every shape."""
    import jax
    import numpy as np
    from jax import numpy as jnp

    import anyshape
    from anyshape_bench.models import jax_lm

    weights = jax.tree.map(jnp.asarray, jax_lm.parameters())
    fast = anyshape.jax.jit(jax_lm.logits, shapes=(None, "batch, time"), constraints=(f"time <= {jax_lm.LONGEST}",),
                            strict=True, threads=1)
    sides = {"xla": jax.jit(jax_lm.logits), "ffi": jax.jit(lambda weights, tokens: fast(weights, tokens))}
    draw = np.random.default_rng(0)

    def timed(side: str, tokens: Any) -> tuple[float, Any]:
        begun = time.process_time()
        found = sides[side](weights, tokens).block_until_ready()
        return time.process_time() - begun, found

    rows = []
    for shape in (FIRST, *SHAPES):
        tokens = jnp.asarray(draw.integers(0, jax_lm.VOCABULARY, shape).astype(np.int32))
        new = {side: timed(side, tokens) for side in sides}
        wrong = float(jnp.abs(new["xla"][1] - new["ffi"][1]).max())
        seen: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(calls):
            for side, times in seen.items():
                times.append(timed(side, tokens)[0])
        rows.append({"shape": shape, "difference": wrong, "new": {side: one[0] for side, one in new.items()},
                     "seen": {side: statistics.median(times) for side, times in seen.items()}})
    return {"jax": jax.__version__, "machine": machine(), "programs": anyshape.stats()["programs"], "first": rows[0],
            "rows": rows[1:]}


def table(found: dict[str, Any]) -> str:
    """The results in Markdown: milliseconds of processor time."""
    lines = ["| shape | XLA, new, ms | `anyshape.jax.jit` in `jax.jit`, new, ms | XLA, seen, ms | ours, seen, ms | of "
             "XLA's |", "|---|---:|---:|---:|---:|---:|"]
    for row in found["rows"]:
        (xla, ours), (old, now) = ((row[name]["xla"] * 1e3, row[name]["ffi"] * 1e3) for name in ("new", "seen"))
        shape = " x ".join(map(str, row["shape"]))
        lines.append(f"| {shape} | {xla:.0f} | {ours:.1f} | {old:.3f} | {now:.3f} | {now / old:.2f} |")
    new = max(row["new"]["ffi"] for row in found["rows"])
    ratio = statistics.geometric_mean(row["seen"]["ffi"] / row["seen"]["xla"] for row in found["rows"])
    facts, wrong = found["machine"], max(row["difference"] for row in found["rows"])
    reached = ["reached" if one else "short" for one in (new <= MOST_NEW, ratio <= MOST_SEEN)]
    said = (f"Processor time, one thread each. At a new shape ours takes at most {new * 1e3:.1f} ms (at most "
            f"{MOST_NEW * 1e3:.0f} ms: {reached[0]}); at seen shapes {ratio:.2f} of XLA's time, geometric mean (at "
            f"most {MOST_SEEN:.1f}: {reached[1]}). Results differ by at most {wrong:.0e}; programs: "
            f"{found['programs']}. jax {found['jax']}, {facts['processor']}, {facts['date']}, load "
            f"{facts['load']}, commit {facts['commit']}.")
    return "\n".join([*lines, "", said, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", type=Path, help="where the results are written, as JSON")
    parser.add_argument("--calls", type=int, default=50, help="at each shape, of each")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measured(arguments.calls)))
        return
    done = subprocess.run([*ONE_THREAD, sys.executable, "-m", MODULE, "--worker", "--calls", str(arguments.calls)],
                          stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(table(found))
    if arguments.path is not None:
        arguments.path.parent.mkdir(parents=True, exist_ok=True)
        arguments.path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        show_stored(arguments.path, "jax.md", MARK, table(found))


if __name__ == "__main__":
    main()
