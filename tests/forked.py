"""Scripts, and runs of pytest, in processes of their own that need not import torch and the compiler: they are forked
from one process that has, of the standard library's kind "forkserver", which each process of tests starts when it first
needs it."""
from __future__ import annotations

import itertools
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

CONTEXT: Any = multiprocessing.get_context("forkserver")
PRELOAD = "forked_preload"
NUMBERS = itertools.count()  # of runs
seconds = 0.0  # of processor time that runs have taken which ended by themselves


class Run:
    """`script`, or a module of this name, with arguments as the main program, in the repository's folder;
    `environment` is all that it has. `folder` holds what it prints."""

    def __init__(self, script: Path | str, arguments: Sequence[str], environment: Mapping[str, str],
                 folder: Path) -> None:
        start()
        self.arguments = [str(script), *arguments]
        number = next(NUMBERS)
        self.out, self.err = folder / f"{number}.out", folder / f"{number}.err"
        self.process: BaseProcess = CONTEXT.Process(target=_main, args=(
            self.arguments, dict(environment), list(sys.path), str(self.out), str(self.err)), daemon=True)
        self.process.start()

    def done(self, within: float) -> subprocess.CompletedProcess[str]:
        """Waits for its end; what does not end within that time is killed, and raises TimeoutExpired."""
        self.process.join(within)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise subprocess.TimeoutExpired(self.arguments, within, self.out.read_bytes(), self.err.read_bytes())
        _count(self.out.with_suffix(".seconds"))
        return subprocess.CompletedProcess(self.arguments, self.process.exitcode, self.out.read_text(),
                                           self.err.read_text())


def run_all(runs: Sequence[Run], seconds: float) -> list[subprocess.CompletedProcess[str]]:
    """The ends of several that run side by side, within one time."""
    end = time.monotonic() + seconds
    try:
        return [run.done(max(end - time.monotonic(), 0)) for run in runs]
    finally:
        for run in runs:
            run.process.kill()


def run_tests(arguments: Sequence[str], seconds: float = 1800, **more: str) -> subprocess.CompletedProcess[str]:
    """pytest with these arguments, and these variables more in its environment."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run("pytest", ["-q", "-p", "no:cacheprovider", *arguments], os.environ | more, Path(folder))
        return run.done(seconds)


def start() -> None:
    """Starts the process that scripts are forked from, where there is none."""
    # the first is read when torch's libraries are loaded; what is loaded is found by the second before Python 3.13; the
    # third is read when torch imports Triton, of which no script that is forked wants machine code
    its = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TRITON_INTERPRET": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in its.items():
            patch.setenv(name, value)
        CONTEXT.set_forkserver_preload([PRELOAD])
        forkserver.ensure_running()


def _count(file: Path) -> None:
    global seconds
    if file.exists():
        seconds += float(file.read_text())


def _main(arguments: list[str], environment: dict[str, str], path: list[str], out: str, err: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    os.chdir(Path(__file__).parent.parent)
    is_script = arguments[0].endswith(".py")
    sys.path[:] = [str(Path(arguments[0]).parent), *path] if is_script else path
    sys.argv = arguments
    for number, name in ((1, out), (2, err)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    # pytest gives processes other streams
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    assert PRELOAD in sys.modules  # where it cannot be imported, the standard library goes on without
    try:
        if is_script:
            runpy.run_path(arguments[0], run_name="__main__")
        else:
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    finally:
        Path(out).with_suffix(".seconds").write_text(str(sum(os.times()[:4])))
