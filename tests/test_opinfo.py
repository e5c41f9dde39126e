"""torch's OpInfo database, forward and backward, against eager; `-m full` runs all and writes docs/coverage.md.

Ops run in worker processes (tests/opinfo_cases.py), so that a crash or a hang is a failure of one op.
"""
from __future__ import annotations

import collections
import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import forked

HERE = Path(__file__).parent
ROOT = HERE.parent
PER_OP = 150  # seconds
WANTED = 0.98  # share of ops that must pass

# one of each kind; pointwise ones have test_edges.py
SAMPLE = """
add where sum var argmax cumsum log_softmax matmul einsum nn.functional.conv2d nn.functional.layer_norm
nn.functional.embedding nn.functional.cross_entropy nn.functional.max_pool2d nn.functional.pad.constant reshape cat
gather index_put scatter_add flip sort nonzero linalg.inv
""".split()

PASS = ("kernels", "mixed", "calls")

# op -> why it does not pass: known to be wrong, or to run as PyTorch outside of a compiled program
KNOWN = {
    "resize_": "Dynamo does not trace a change of a storage's size",
    "resize_as_": "Dynamo does not trace a change of a storage's size",
    "sparse.mm.reduce": "Dynamo does not trace sparse tensors",
    "sparse.sampled_addmm": "Dynamo does not trace sparse tensors",
    "tensor_split": "how many results there are is a number in a tensor",
    "to_sparse": "Dynamo does not trace sparse tensors",
}


class Worker:
    """One worker process and the names it still has to do."""

    def __init__(self, names: list[str], mode: str, environment: dict[str, str]) -> None:
        self.names = names
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "opinfo_cases.py"), mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=environment)
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._write, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def _write(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("".join(f"{name}\n" for name in self.names))
            self.process.stdin.close()
        except BrokenPipeError:
            return

    def outcomes(self) -> Iterable[dict[str, Any]]:
        """The outcomes as they come; a crash or a hang of the op in hand ends the process and is an outcome too."""
        current = ""
        while True:
            try:
                line = self.lines.get(timeout=PER_OP)
            except queue.Empty:
                self.process.kill()
                yield failure(current, f"no answer in {PER_OP} s")
                return
            if line is None:
                code = self.process.wait()
                if current:
                    yield failure(current, f"the process ended with code {code}")
                return
            try:
                told = json.loads(line)
            except ValueError:
                continue  # something that an op printed
            current = told.get("start", "")
            if not current:
                yield told


def failure(name: str, reason: str) -> dict[str, Any]:
    return {"name": name, "verdict": "fail", "reason": reason, "calls": 0, "seconds": 0.0, "externs": []}


def run_ops(names: list[str], mode: str, workers: int, keep: Path | None = None) -> dict[str, dict[str, Any]]:
    """The outcome of every op. With `keep`, outcomes are appended to that file, and those in it are not run again."""
    found: dict[str, dict[str, Any]] = {}
    if keep is not None and keep.exists():
        found = {told["name"]: told for told in map(json.loads, keep.read_text().splitlines()) if told["name"] in names}
    lock = threading.Lock()
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join([str(ROOT / "src"), str(HERE)]))

    def work(own: list[str]) -> None:
        while own:
            for told in Worker(own, mode, environment).outcomes():
                with lock:
                    found[told["name"]] = told
                    if keep is not None:
                        with keep.open("a") as file:
                            file.write(json.dumps(told) + "\n")
            left = [name for name in own if name not in found]
            assert len(left) < len(own), "the worker does not start"
            own = left

    rest = [name for name in names if name not in found]
    threads = [threading.Thread(target=work, args=(rest[k::workers],)) for k in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def unexpected(found: dict[str, dict[str, Any]]) -> list[str]:
    return [f"{name}: {told['verdict']}: {told['reason']}" for name, told in sorted(found.items())
            if told["verdict"] not in (*PASS, "skipped") and name not in KNOWN]


def test_sample_of_ops(tmp_path: Path):
    done = forked.Run(HERE / "opinfo_cases.py", ["sample", *SAMPLE], os.environ | {"OMP_NUM_THREADS": "1"},
                      tmp_path).done(PER_OP * len(SAMPLE))
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {told["name"]: told for told in lines if "name" in told}
    assert sorted(found) == sorted(SAMPLE), done.stderr[-2000:]
    assert not unexpected(found)
    assert sum(told["calls"] for told in found.values()) > 2 * len(SAMPLE)
    counts = collections.Counter(told["verdict"] for told in found.values())
    assert sum(counts[verdict] for verdict in PASS) >= WANTED * len(SAMPLE), counts


def sources() -> str:
    """One number for the state of the package's source, so that kept outcomes are of this code."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "src" / "anyshape").rglob("*.py"), HERE / "opinfo_cases.py"]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@pytest.mark.full
def test_all_ops(request: pytest.FixtureRequest):
    from opinfo_cases import NAMED
    folder = request.config.cache.mkdir("opinfo")  # type: ignore[union-attr]
    names = list(NAMED)
    found = run_ops(names, "full", workers=int(os.environ.get("ANYSHAPE_TEST_WORKERS", "2")),
                    keep=folder / f"{sources()}.jsonl")
    (ROOT / "docs" / "coverage.md").write_text(report(found), encoding="utf-8")
    tried = [told for told in found.values() if told["verdict"] != "skipped"]
    passed = [told for told in tried if told["verdict"] in PASS]
    assert not unexpected(found)
    assert len(passed) >= WANTED * len(tried)


def short(reason: str) -> str:
    """The reason without places in source files and advice, as one line of Markdown text."""
    for mark in (" where: ", " INTERNAL ASSERT", " Set TORCHDYNAMO_VERBOSE", " Explanation: "):
        reason = reason.split(mark)[0]
    return reason[:180].replace("|", "/").replace("](", "] (")


def report(found: dict[str, dict[str, Any]]) -> str:
    """docs/coverage.md."""
    import torch
    counts = collections.Counter(told["verdict"] for told in found.values())
    tried = sum(counts.values()) - counts["skipped"]
    passed = sum(counts[verdict] for verdict in PASS)
    lines = [
        "# Coverage of PyTorch's operators", "",
        f"Written by `pytest -m full tests/test_opinfo.py` from the OpInfo database of torch "
        f"{torch.__version__.split('+')[0]}: every op's",
        "samples, forward and backward, with all sizes symbolic at the sizes given, larger ones, 1 and 0, and with",
        "constant sizes, compared with eager PyTorch.", "",
        "| outcome | ops | meaning |", "|---|---|---|",
        f"| kernels | {counts['kernels']} | compiled; no call of a PyTorch kernel |",
        f"| mixed | {counts['mixed']} | compiled; some parts are calls of PyTorch kernels inside the program |",
        f"| calls | {counts['calls']} | compiled; the program consists of calls of PyTorch kernels, in it or between "
        "its parts |",
        f"| break | {counts['break']} | right; torch's tracer takes the call into no graph, so PyTorch runs it |",
        f"| fallback | {counts['fallback']} | right, but AnyShape ran the graph as PyTorch would |",
        f"| fail | {counts['fail']} | wrong, or raises where eager does not |",
        f"| skipped | {counts['skipped']} | no sample that can be compared |", "",
        f"{passed} of {tried} ops pass: they compile and equal eager ({100 * passed / max(tried, 1):.1f} %), in "
        f"{sum(told['calls'] for told in found.values())} compared calls. An op has the worst outcome of all its "
        "samples.", ""]
    for verdict, title in (("fail", "Failures"), ("fallback", "Fallbacks"), ("break", "Breaks")):
        told = sorted((t["name"], t["reason"]) for t in found.values() if t["verdict"] == verdict)
        if told:
            lines += [f"## {title}", ""]
            lines += [f"- `{name}`: {KNOWN.get(name, 'not known')}. {short(reason)}" for name, reason in told]
            lines.append("")
    plain = sorted((t["name"], t["plain"]) for t in found.values() if t.get("plain") and t["verdict"] in PASS)
    if plain:
        words = {"sample": "a size of the sample", "larger": "a larger size", "one": "sizes of 1", "zero": "sizes of 0"}
        lines += ["## Sizes that run as plain PyTorch", "",
                  "Compiled, but for sizes that torch's own tracer refuses and eager PyTorch takes:", ""]
        lines += [f"- `{name}`: {', '.join(words[kind] for kind in kinds)}" for name, kinds in plain]
        lines.append("")
    for verdict, title in (("kernels", "Kernels"), ("mixed", "Mixed"), ("calls", "Calls")):
        names = sorted(name for name, t in found.items() if t["verdict"] == verdict)
        if names:
            lines += [f"## {title}", "", ", ".join(f"`{name}`" for name in names), ""]
    return "\n".join(lines)
