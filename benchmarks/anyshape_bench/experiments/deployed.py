"""Inference runtimes side by side: files to deploy against onnxruntime, OpenVINO, and AOTInductor's package.

    python -m anyshape_bench.experiments.deployed docs/results/deployed/deployed.json --models FOLDER

Needs the extra `onnx`, onnxruntime, openvino, and a C++ compiler for AOTInductor; FOLDER as in onnx_models.py. Measured
are loading after imports, the first call, a call at a shape that the process has not had against later ones at it,
and resident memory. Each runtime is a process of its own with all threads that it was given; while it is
timed, the others wait for their next request. They take turns at each shape, so that ratios are of calls of the same
minute; a runtime that is not installed has no column. What is stored is shown in docs/deploy.md.
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anyshape_bench.experiments.onnx_models import MODELS, found_in
from anyshape_bench.harness.machine import machine
from anyshape_bench.harness.marked_part import show_stored
from anyshape_bench.harness.runner import environment
from anyshape_bench.measure import runtime_process
from anyshape_bench.measure.statistics import geometric_mean, median_of

MARK = "deployed"
ROUNDS = 5  # turns of each runtime at a shape
SECONDS = 0.15  # of calls in a turn, about
MOST = 200  # calls in a turn
PAUSE = 0.02  # between two turns: threads that spin for work have gone to sleep
IDS = ((1, 16), (3, 77), (1, 131), (4, 128), (8, 33), (1, 300))
WORDS = 1000
OURS, TORCH = "anyshape", "aotinductor"


@dataclass(frozen=True)
class Case:
    """A model as a file for each runtime, and what it is called with.

    Attributes:
        name: of the model.
        files: runtime -> file.
        feeds: for each shape its arrays by name, in the order of the model's inputs.
    """

    name: str
    files: dict[str, Path]
    feeds: Sequence[dict[str, Any]]


def cases(models: Path | None, folder: Path) -> Iterator[Case]:
    """What is measured, with its files written into `folder`."""
    yield torch_encoder(folder)
    yield onnx_encoder(folder)
    if models is not None:
        yield from packaged(models, folder)


def ids_of(name: str) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    return [{name: draw.integers(0, WORDS, shape)} for shape in IDS]


def torch_encoder(folder: Path) -> Case:
    """BERT with random weights, exported from PyTorch: width 256, 4 layers."""
    import torch

    import anyshape
    from anyshape_bench.models.networks import bert
    torch.manual_seed(0)

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert(256, 4, 4, WORDS)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.bert(ids).last_hidden_state
            return found

    sizes = {"ids": {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("time", max=512)}}
    program = torch.export.export(Encoder().eval(), (torch.zeros(3, 17, dtype=torch.int64),), dynamic_shapes=sizes)
    files = {OURS: folder / "torch-encoder.any", TORCH: folder / "torch-encoder.pt2"}
    anyshape.save(anyshape.compile(program), files[OURS])
    torch._inductor.aoti_compile_and_package(program, package_path=str(files[TORCH]))
    # sizes of 1 are other programs for both
    return Case("BERT, PyTorch", files, [one for one in ids_of("ids") if 1 not in one["ids"].shape])


def onnx_encoder(folder: Path) -> Case:
    """An encoder written as ONNX: width 256, 4 layers."""
    import onnx

    from anyshape_bench.models.onnx_encoder import encoder
    path = folder / "onnx-encoder.onnx"
    onnx.save(encoder(words=WORDS), path)
    return Case("encoder, ONNX", onnx_files(path, folder, "onnx-encoder"), ids_of("ids"))


def onnx_files(path: Path, folder: Path, name: str) -> dict[str, Path]:
    import anyshape
    ours = folder / f"{name}.any"
    anyshape.save(anyshape.compile_onnx(path), ours)
    return {OURS: ours, **{name: path for name in ("onnxruntime", "openvino")
                           if importlib.util.find_spec(name) is not None}}


def packaged(models: Path, folder: Path) -> Iterator[Case]:
    """Models of packages that can be deployed as one file."""
    import anyshape
    for number, (package, name, feed, shapes) in enumerate(MODELS):
        path = found_in(models, package, name)
        if path is None:
            continue
        try:
            files = onnx_files(path, folder, f"packaged-{number}")
        except anyshape.AnyShapeError as error:
            print(f"{name} of {package} is no file to deploy: {error.why}", flush=True)
            continue
        yield Case(f"{name}, {package}", files, [feed(*sizes) for sizes in shapes])


class Runtime:
    """The process of one runtime with one model."""

    def __init__(self, name: str, case: Case, threads: int, feeds: Sequence[Path]) -> None:
        self.name = name
        script = Path(runtime_process.__file__)
        command = [sys.executable, "-P", str(script), name, str(case.files[name]), str(threads), *map(str, feeds)]
        # byte code of Python is kept, as where packages are installed
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment(OMP_NUM_THREADS=str(threads), PYTHONDONTWRITEBYTECODE=""))
        self.start = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ChildProcessError(f"{self.name} ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def calls(self, feed: int, count: int) -> dict[str, Any]:
        """Calls with a feed, one behind the other."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"feed": feed, "calls": count}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def measured(case: Case, threads: int, rounds: int, folder: Path) -> dict[str, Any]:
    """A row: what each runtime took, in seconds and bytes."""
    feeds = []
    for number, feed in enumerate(case.feeds):
        feeds.append(folder / f"feed-{number}.npz")
        np.savez(feeds[-1], **feed)
    running: dict[str, Runtime] = {}
    row: dict[str, Any] = {"model": case.name, "threads": threads, "runtimes": {}, "errors": {}}
    try:
        for name in case.files:
            try:
                Runtime(name, case, threads, feeds).close()  # files have been read by now, and byte code is there
                running[name] = Runtime(name, case, threads, feeds)
                row["runtimes"][name] = {**running[name].start, "new": [], "seen": [], "processor": []}
            except ChildProcessError as error:
                row["errors"][name] = str(error)
        for place in range(len(feeds)):
            for name, runtime in list(running.items()):
                try:
                    row["runtimes"][name]["new"].append(runtime.calls(place, 1)["seconds"][0])
                except ChildProcessError as error:  # it does not take this shape
                    row["errors"][name] = str(error)
                    del running[name], row["runtimes"][name]
            seconds: dict[str, list[float]] = {name: [] for name in running}
            processor: dict[str, list[float]] = {name: [] for name in running}
            for turn in range(rounds):
                order = list(running)
                for name in order[turn % len(order):] + order[:turn % len(order)]:
                    time.sleep(PAUSE)
                    last = row["runtimes"][name]["new"][-1]
                    found = running[name].calls(place, min(MOST, max(3, int(SECONDS / last))))
                    seconds[name] += found["seconds"][1:]
                    processor[name] += found["processor"][1:]
                    row["runtimes"][name].update(resident=found["resident"], peak=found["peak"])
            for name in running:
                row["runtimes"][name]["seen"].append(median_of(seconds[name]))
                row["runtimes"][name]["processor"].append(median_of(processor[name]))
    finally:
        for runtime in running.values():
            runtime.close()
    return row


def ratio(row: dict[str, Any], other: str, key: str) -> float | None:
    """Ours of another runtime's, over all shapes, of new ones over all but the first; None where it did not run."""
    ours, theirs = (row["runtimes"].get(name) for name in (OURS, other))
    if ours is None or theirs is None:
        return None
    pairs = list(zip(ours[key], theirs[key], strict=True)) if isinstance(ours[key], list) else [
        (ours[key], theirs[key])]
    return geometric_mean(one / another for one, another in (key == "new" and pairs[1:]) or pairs)


def new_of_seen(found: dict[str, Any]) -> float:
    """A call at a shape for the first time, of later ones at it: the middle over all shapes but the first."""
    pairs = list(zip(found["new"], found["seen"], strict=True))
    return median_of(new / seen for new, seen in pairs[1:] or pairs)


def started(runtime: dict[str, Any]) -> str:
    """What imports and loading took, in ms."""
    return f"{runtime['import'] * 1e3:.0f} + {runtime['load'] * 1e3:.0f}"


def table(found: dict[str, Any]) -> str:
    """The results in Markdown."""
    others = [name for name in runtime_process.RUNTIMES
              if name != OURS and any(name in row["runtimes"] for row in found["rows"])]
    lines = ["| model | threads | " + " | ".join(f"time of {name}'s" for name in others) +
             " | a new shape of a seen one | theirs | imports + load, ms | theirs | first call, ms | memory, MB"
             " | theirs |",
             "|---|---:|" + "---:|" * (len(others) + 7)]

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    for row in found["rows"]:
        ours = row["runtimes"].get(OURS)
        if ours is None:
            lines.append(f"| {row['model']} | {row['threads']} | {row['errors'].get(OURS, '')} |")
            continue
        beside = [(name, row["runtimes"][name]) for name in others if name in row["runtimes"]]
        memory = "; ".join(f"{name} {one['peak'] / 1e6:.0f}" for name, one in beside)
        starts = "; ".join(f"{name} {started(one)}" for name, one in beside)
        new = "; ".join(f"{name} {new_of_seen(one):.2f}" for name, one in beside)
        lines.append(f"| {row['model']} | {row['threads']} | " +
                     " | ".join(shown(ratio(row, name, "seen")) for name in others) +
                     f" | {new_of_seen(ours):.2f} | {new} | {started(ours)} | {starts} | {ours['new'][0] * 1e3:.1f} | "
                     f"{ours['peak'] / 1e6:.0f} | {memory} |")
    said = [f"Geometric means of our time{at}, of {name}'s: " + ", ".join(
        f"{shown(geometric_mean(ratio(row, name, key) for row in found['rows'] if row['threads'] == threads))} on "
        f"{threads} thread{'s' * (threads > 1)}" for threads in found["threads"]) + "."
        for key, at in (("seen", ""), ("new", " at a new shape")) for name in others]
    facts = found["machine"]
    said.append(f"{facts['processor']}, {facts['cores']} cores, {facts['date']}, commit {facts['commit']}; "
                + ", ".join(f"{name} {version}" for name, version in found["versions"].items()) + ".")
    return "\n".join([*lines, "", "\n".join(said), ""])


def study(models: Path | None, rounds: int, only: Sequence[str]) -> dict[str, Any]:
    """All cases, on one thread and on all cores."""
    import importlib.metadata
    threads = sorted({1, len(os.sched_getaffinity(0))})
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for case in cases(models, Path(name)):
            if only and not any(word in case.name for word in only):
                continue
            for count in threads:
                rows.append(measured(case, count, rounds, Path(name)))
                print(table({"rows": rows[-1:], "threads": [count], "machine": machine(), "versions": {}}), flush=True)
    versions = {one: importlib.metadata.version(one) for one in ("onnxruntime", "openvino", "torch")
                if importlib.util.find_spec(one) is not None}
    return {"rows": rows, "threads": threads, "rounds": rounds, "machine": machine(), "versions": versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", nargs="?", type=Path, help="where the results are written, as JSON")
    parser.add_argument("--models", type=Path, help="where the models of packages are")
    parser.add_argument("--only", nargs="*", default=(), help="parts of names of models")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="(default: %(default)s)")
    given = parser.parse_args()
    found = study(given.models, given.rounds, given.only)
    print(table(found))
    if given.path is not None:
        given.path.parent.mkdir(parents=True, exist_ok=True)
        given.path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        show_stored(given.path, "deploy.md", MARK, table(found))


if __name__ == "__main__":
    main()
