"""Worker processes: a job each, in a fresh environment with caches of its own, ended when it takes too long."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import anyshape
from anyshape_bench.measure.memory_counter import build_counter

Progress = Callable[[str, int, int], None]
# where a process finds both packages
ROOTS = (str(Path(anyshape.__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2]))


def environment(**settings: str) -> dict[str, str]:
    """This process's environment with these settings."""
    return {**os.environ, **settings}


def in_turns(backends: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, backend): all backends in each round, which starts with another each time, so that a machine that slows
    down or warms up does not favour the first."""
    for number in range(rounds):
        turn = number % len(backends)
        for backend in (*backends[turn:], *backends[:turn]):
            yield number, backend


class Runner:
    """Holds the temporary folder of a run: cache folders per cell, the counter, jobs and logs. module: what a process
    runs."""

    def __init__(self, folder: Path, out: Path, limit: float, threads: int, module: str) -> None:
        self.folder = folder
        self.module = module
        self.logs = out / "logs"
        self.limit = limit
        self.threads = threads
        self.counter, self.why_no_counter = build_counter(folder)

    def environment(self, job: dict[str, Any]) -> dict[str, str]:
        """The child's environment: its own cache folders, and in memory mode the counter."""
        caches = self.folder / "caches" / f"{_file_name(job['model'])}.{job['backend']}"
        found = dict(os.environ)
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [*ROOTS, found.get("PYTHONPATH", "")]))
        found["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
        found["TRITON_CACHE_DIR"] = str(caches / "triton")
        found["ANYSHAPE_CACHE_DIR"] = str(caches / "anyshape")
        found["PYTHONWARNINGS"] = "ignore"
        found["TOKENIZERS_PARALLELISM"] = "false"
        found["HF_HUB_OFFLINE"] = "1"
        if self.threads:
            found["OMP_NUM_THREADS"] = str(self.threads)
        if job.get("mode", "memory") == "memory" and self.counter is not None:
            found["LD_PRELOAD"] = " ".join(filter(None, [str(self.counter), found.get("LD_PRELOAD", "")]))
        return found

    def run(self, job: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Runs one process to its end and returns what it wrote.

        A process that dies or takes longer than the limit gives an `error`, beside what it had written by then. On
        Ctrl-C the process is ended and the exception goes on. A job names its `model` and `backend`, and what tells it
        from others of these.
        """
        name = _name(job)
        request, answer = self.folder / f"{name}.job", self.answer(job)
        request.write_text(json.dumps(job))
        self.logs.mkdir(parents=True, exist_ok=True)
        log_path = self.logs / f"{name}.txt"
        with log_path.open("w") as log:
            late, status = self._watch(job, [str(request), str(answer)], log, progress)
        found = self.found(job)
        if found.get("finished"):
            return found
        why = f"took longer than {self.limit:g} s" if late else f"process ended with status {status}"
        tail = " | ".join(log_path.read_text().strip().splitlines()[-3:])
        return found | {"error": f"{why}; see {log_path}. {tail}"[:1000], "finished": True}

    def answer(self, job: dict[str, Any]) -> Path:
        """The file that a job's process writes."""
        return self.folder / f"{_name(job)}.record"

    def found(self, job: dict[str, Any]) -> dict[str, Any]:
        """What a job's process has written; empty if there is nothing."""
        answer = self.answer(job)
        return json.loads(answer.read_text()) if answer.exists() else {}

    def _watch(self, job: dict[str, Any], files: list[str], log: TextIO, progress: Progress) -> tuple[bool, int]:
        child = subprocess.Popen(
            [sys.executable, "-m", "anyshape_bench.harness.worker", self.module, *files],
            stdout=subprocess.PIPE, stderr=log, text=True, env=self.environment(job), start_new_session=True,
        )
        late = threading.Event()

        def stop() -> None:
            late.set()
            end(child)

        timer = threading.Timer(self.limit, stop)
        timer.start()
        try:
            for line in child.stdout or ():
                event = _event(line)
                if event is None:
                    log.write(line)
                else:
                    progress(event["event"], event["done"], event["total"])
            status = child.wait()
        finally:
            timer.cancel()
            end(child)
            if child.stdout:
                child.stdout.close()
        return late.is_set(), status


def end(child: subprocess.Popen[str]) -> None:
    """Ends a process and the helpers it started (compile workers), which share its session."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # nobody is left
    child.wait()


def _event(line: str) -> dict[str, Any] | None:
    if not line.startswith('{"event"'):
        return None
    try:
        return json.loads(line)
    except ValueError:
        return None


def _name(job: dict[str, Any]) -> str:
    keys = [key for key in ("model", "backend", "number", "mode", "way") if key in job]
    return ".".join(_file_name(str(job[key])) for key in keys)


def _file_name(model: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in model)
