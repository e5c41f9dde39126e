"""Inference serving under load: requests of mixed lengths from 32 clients, ours and onnxruntime behind the same server.

    python -m anyshape_bench.experiments.serving docs/results/benchmarks-serve/serve.json

It takes some 5 minutes on two cores, and needs the extras `onnx`, `serve` and onnxruntime. `--write-document
docs/deploy.md` puts the table there.

Each round starts a fresh server process, warms it with every length once, and sends the same requests in the same
order; backends take turns. onnxruntime runs in two ways, and its better one is compared: one thread a call and as many
calls as cores, as ours, or one call at a time on all cores. All have the same batching. Every answer is checked against
onnxruntime's own. Beside it stands the bound: the products of a request at the FMA peak of a core.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anyshape.tools.serve.app import Settings
from anyshape.tools.serve.command import serve
from anyshape.tools.serve.protocol import TensorSpec
from anyshape.tools.serve.served import Hosted, Rows, Served
from anyshape_bench.harness.machine import machine
from anyshape_bench.harness.marked_part import write_part
from anyshape_bench.measure.fma_peak import fma_peak
from anyshape_bench.measure.http_load import Load, run
from anyshape_bench.measure.statistics import median_of, quantile

CLIENTS, REQUESTS, LENGTHS, ROUNDS = 32, 2500, (4, 129), 4
INPUTS = 250  # different ones
CORES = len(os.sched_getaffinity(0))
WAYS = {"anyshape": (1, CORES), "onnxruntime": (1, CORES), "onnxruntime, one call": (CORES, 1)}  # threads, workers
PORT = 3  # the part of the server's line, by colons, that begins with it
MARK = "serve"
AIMS = {"p50": 0.8, "p99": 0.8, "per_second": 1.3}


class OrtModel:
    """An ONNX model behind the server (tools/serve/served.py: `Servable`)."""

    name, platform = "encoder", "onnxruntime"

    def __init__(self, path: str, threads: int) -> None:
        import onnxruntime
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.inputs = [TensorSpec("ids", "i64", (-1, -1))]
        self.outputs = [TensorSpec("result", "f32", (-1, self.session.get_outputs()[0].shape[1]))]
        self.batch = Rows([0], [0], 1, None)

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """One call."""
        return list(self.session.run(None, {"ids": arrays[0]}))

    def bytes_of(self, arrays: Sequence[Any]) -> int:
        """Not known."""
        return 0

    def close(self) -> None:
        """Nothing is to be given back before the process ends."""


def start(folder: Path, way: str) -> tuple[subprocess.Popen[str], int]:
    """A server process and its port."""
    command = [sys.executable, "-m", "anyshape_bench.experiments.serving", "--server", way, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, int(line.split(":")[PORT].split("/")[0])


def server(folder: Path, way: str) -> None:
    """What a server process does."""
    threads, workers = WAYS[way]
    settings = Settings(workers=workers)
    if way == "anyshape":
        from anyshape.artifact.load import load
        model: Any = Served("encoder", load(folder / "encoder.any", True, threads))
    else:
        model = OrtModel(str(folder / "encoder.onnx"), threads)
    serve(Hosted({"encoder": model}), settings, "127.0.0.1", 0, 30)


def prepare(folder: Path) -> tuple[list[bytes], list[Any], float]:
    """Writes both models; requests, what onnxruntime answers to each alone, and operations of products that a request
    has on average."""
    import onnx

    import anyshape
    from anyshape_bench.models.onnx_encoder import encoder
    onnx.save(encoder(), folder / "encoder.onnx")
    anyshape.save(anyshape.compile_onnx(folder / "encoder.onnx"), folder / "encoder.any")
    draw = np.random.default_rng(0)
    lengths = np.resize(np.arange(*LENGTHS), INPUTS)
    inputs = [draw.integers(0, 1000, (1, int(length))) for length in lengths]
    own = OrtModel(str(folder / "encoder.onnx"), 1)
    with anyshape.load(folder / "encoder.any", trust_native=True) as model, anyshape.profile() as profile:
        for one in inputs:
            model(one)
        operations = sum(step.operations for step in profile.steps()) / len(inputs)
    return [request_of(one) for one in inputs], [own.run([one])[0] for one in inputs], operations


def request_of(ids: Any) -> bytes:
    """The bytes of a request over HTTP."""
    entry = {"name": "ids", "datatype": "INT64", "shape": list(ids.shape), "parameters":
             {"binary_data_size": ids.nbytes}}
    text = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    head = (f"POST /v2/models/encoder/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text) + ids.nbytes}\r\n"
            f"Inference-Header-Content-Length: {len(text)}\r\n\r\n").encode()
    return head + text + ids.tobytes()


def measure(folder: Path, way: str, requests: Sequence[bytes], wanted: Sequence[Any], count: int, seed: int) -> Load:
    """One round of one backend."""
    process, port = start(folder, way)

    def right(number: int, body: bytes) -> bool:
        found = np.frombuffer(body[-wanted[number].nbytes:], np.float32)
        return bool(np.allclose(found, wanted[number].ravel(), rtol=1e-3, atol=1e-4))

    try:
        run(port, requests, range(len(requests)), CLIENTS, right)
        order = np.random.default_rng(seed).integers(0, len(requests), count).tolist()
        before, front = busy(process.pid), busy(process.pid, process.pid)
        load = run(port, requests, order, CLIENTS, right)
        load.busy = busy(process.pid) - before
        load.front = busy(process.pid, process.pid) - front
        return load
    finally:
        process.terminate()
        process.wait(60)


def busy(process: int, thread: int = 0) -> float:
    """Seconds of processor time of a process so far, or of one thread of it."""
    place = Path(f"/proc/{process}/task/{thread}/stat" if thread else f"/proc/{process}/stat")
    words = place.read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def summary(loads: Sequence[Load]) -> dict[str, Any]:
    """Of the rounds of one backend: medians of latencies (s), of requests a second, and of the server's
    processor time for a request (s), of which the front, its main thread, reads, queues and answers; counts of all."""
    return {"p50": median_of(quantile(one.seconds, 0.5) for one in loads),
            "p99": median_of(quantile(one.seconds, 0.99) for one in loads),
            "per_second": median_of(len(one.seconds) / one.took for one in loads),
            "busy": median_of(one.busy / len(one.seconds) for one in loads),
            "front": median_of(one.front / len(one.seconds) for one in loads),
            "answered": sum(len(one.seconds) for one in loads), "wrong": sum(one.wrong for one in loads),
            "errors": [error for one in loads for error in one.errors][:20]}


def table(results: dict[str, Any]) -> str:
    """The results in Markdown, with ratios to the better way of onnxruntime beside what is aimed at."""
    ways = results["ways"]
    split = all("front" in one for one in ways.values())  # results of before say only the sum
    lines = [f"| behind the server | p50, ms | p99, ms | requests a second | processor ms of one | "
             f"{'of these HTTP and the queue | ' * split}answered | wrong or failed |", "|---|" + "---:|" * (6 + split)]
    lines += [f"| {name} | {one['p50'] * 1e3:.1f} | {one['p99'] * 1e3:.1f} | {one['per_second']:.0f} | "
              f"{one['busy'] * 1e3:.2f} | " + (f"{one['front'] * 1e3:.2f} | " if split else "") +
              f"{one['answered']} | {one['wrong'] + len(one['errors'])} |" for name, one in ways.items()]
    others = [one for name, one in ways.items() if name != "anyshape"]
    ratios = []
    for key, aim in AIMS.items():
        best = (max if aim > 1 else min)(one[key] for one in others)
        ratio = ways["anyshape"][key] / best
        word = "reached" if (ratio >= aim if aim > 1 else ratio <= aim) else "short"
        ratios.append(f"{key.replace('_', ' ')} {ratio:.2f}x ({'at least' if aim > 1 else 'at most'} {aim}x: {word})")
    facts = results["machine"]
    said = (f"Against the better of onnxruntime's: {', '.join(ratios)}. {results['clients']} clients, lengths "
            f"{LENGTHS[0]} to {LENGTHS[1] - 1}, {facts['processor']}, {facts['cores']} cores, {facts['date']}, commit "
            f"{facts['commit']}.")
    return "\n".join([*lines, "", said, *bound(results), ""])


def bound(results: dict[str, Any]) -> list[str]:
    """What the FMA peak says of a request; nothing of results of before."""
    if "fma_peak" not in results:
        return []
    own = results["ways"]["anyshape"]
    least, taken = results["operations"] / results["fma_peak"], own["busy"] - own["front"]
    return ["", f"**The bound.** A request has {results['operations'] * 1e-6:.0f} million operations of products on "
                f"average: {least * 1e3:.2f} ms at the FMA peak of a core while all are busy "
                f"({results['fma_peak'] * 1e-9:.0f} GFLOP/s), of the {taken * 1e3:.2f} ms that the program takes "
                f"({least / taken:.0%})."]


def main() -> None:
    """The whole experiment, or one server of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--server", default="", help=argparse.SUPPRESS)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="(default: %(default)s)")
    parser.add_argument("--write-document", type=Path, default=None, metavar="FILE",
                        help="put the table into FILE, between the marks serve:begin and serve:end")
    parser.add_argument("--show", action="store_true", help="run nothing: read `out`, which is there")
    given = parser.parse_args()
    if given.server:
        return server(given.out, given.server)
    if given.show:
        results = json.loads(given.out.read_text())
        print(table(results))
        return None if given.write_document is None else write_part(given.write_document, MARK, table(results))
    loads: dict[str, list[Load]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="anyshape-serving-") as name:
        folder = Path(name)
        requests, wanted, operations = prepare(folder)
        for number in range(given.rounds):
            for way in list(WAYS)[number % len(WAYS):] + list(WAYS)[:number % len(WAYS)]:
                loads[way].append(measure(folder, way, requests, wanted, given.requests, number))
                print(f"round {number}, {way}: {summary(loads[way][-1:])}", flush=True)
    results = {"machine": machine(), "clients": CLIENTS, "requests": given.requests, "rounds": given.rounds,
               "operations": operations, "fma_peak": fma_peak(CORES),
               "ways": {way: summary(found) for way, found in loads.items()}}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    if given.write_document is not None:
        write_part(given.write_document, MARK, table(results))
    return None


if __name__ == "__main__":
    main()
