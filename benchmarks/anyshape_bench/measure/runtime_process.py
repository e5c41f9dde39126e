"""A process that holds one model in one inference runtime, and answers on standard output what is asked of it.

    python -P runtime_process.py RUNTIME MODEL THREADS FEED.npz ...

It is run as a file: importing the package of the benchmarks would import torch, whose time and memory are not this
runtime's. The first line that it writes says what importing and loading took. Each line on standard input is a request
in JSON, `{"feed": 0, "calls": 5}`; each answer has the seconds of every call, wall and processor time, and the bytes of
resident memory, now and at most so far.
"""
from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[[dict[str, Any]], Any]


def anyshape_file(path: str, threads: int) -> Callable[[], Run]:
    """A file of `anyshape.save`, its own machine code trusted."""
    import anyshape.artifact.load  # what `anyshape.load` imports when it is called first

    def load() -> Run:
        run = anyshape.load(path, trust_native=True, threads=threads)
        return lambda feed: run(*feed.values())

    return load


def onnxruntime(path: str, threads: int) -> Callable[[], Run]:
    """A session with as many threads within an operator, all else as it is by default."""
    import onnxruntime as ort

    def load() -> Run:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return lambda feed: session.run(None, feed)

    return load


def openvino(path: str, threads: int) -> Callable[[], Run]:
    """A model compiled for the lowest latency, in float32 as the others."""
    import openvino as ov

    def load() -> Run:
        model = ov.Core().compile_model(path, "CPU", {
            "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"})
        return lambda feed: model(list(feed.values()))

    return load


def aotinductor(path: str, threads: int) -> Callable[[], Run]:
    """A package of `torch._inductor.aoti_compile_and_package`."""
    import torch
    import torch._inductor  # noqa: F401
    torch.set_num_threads(threads)

    def load() -> Run:
        run = torch._inductor.aoti_load_package(path)

        def call(feed: dict[str, Any]) -> Any:
            with torch.inference_mode():
                return run(*map(torch.from_numpy, feed.values()))

        return call

    return load


RUNTIMES = {"anyshape": anyshape_file, "onnxruntime": onnxruntime, "openvino": openvino, "aotinductor": aotinductor}


def resident(word: str) -> int:
    """Bytes of memory of this process: `VmRSS` now, `VmHWM` at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(word))


def main() -> None:
    _, runtime, path, threads, *feeds = sys.argv
    begun = time.perf_counter()
    load = RUNTIMES[runtime](path, int(threads))
    imported = time.perf_counter()
    used = time.process_time()
    run = load()
    loaded, load_used = time.perf_counter() - imported, time.process_time() - used
    import numpy
    given = [dict(numpy.load(feed)) for feed in feeds]
    print(json.dumps({"import": imported - begun, "load": loaded, "load_processor": load_used}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        feed, seconds, processor = given[asked["feed"]], [], []
        for _ in range(asked["calls"]):
            begun, used = time.perf_counter(), time.process_time()
            run(feed)
            seconds.append(time.perf_counter() - begun)
            processor.append(time.process_time() - used)
        print(json.dumps({"seconds": seconds, "processor": processor, "resident": resident("VmRSS"),
                          "peak": resident("VmHWM")}), flush=True)


if __name__ == "__main__":
    main()
