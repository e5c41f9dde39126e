"""Counts the memory of a step: with `heapcount.c` loaded in front of the C library, else by resident memory."""
from __future__ import annotations

import ctypes
import gc
import resource
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "heapcount.c"
NAMES = ("live", "peak", "held", "lost")


def build_counter(folder: Path) -> tuple[Path | None, str]:
    """Compiles the counter into `folder`.

    Returns:
        the library, or None, and then the reason why memory will be measured by resident memory.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if sys.platform != "linux":
        return None, "the counter needs Linux"
    if compiler is None:
        return None, "no C compiler (cc, gcc, clang) was found"
    library = folder / "libheapcount.so"
    done = subprocess.run([compiler, "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(library), "-ldl", "-lpthread"],
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None, f"{compiler} could not build {SOURCE.name}: {done.stderr.strip()[:200]}"
    return library, ""


class HeapMeter:
    """Reads the counter of a process that was started with it in LD_PRELOAD. Bytes throughout."""

    method = "heap"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._read = {name: getattr(library, f"heapcount_{name}") for name in NAMES}
        for function in self._read.values():
            function.restype = ctypes.c_long
        self._reset = library.heapcount_reset

    def live(self) -> int:
        return self._read["live"]()

    def held(self) -> int:
        return self._read["held"]()

    def peak(self) -> int:
        return self._read["peak"]()

    def reset(self) -> None:
        self._reset()

    def note(self) -> str:
        lost = self._read["lost"]()
        return f"{lost} blocks did not fit the counter's table" if lost else ""


class ResidentMeter:
    """The same questions answered by resident memory, which also holds code and objects, and what was freed late."""

    method = "resident"

    def live(self) -> int:
        return _status("VmRSS") or _greatest_resident()

    held = live

    def peak(self) -> int:
        return _status("VmHWM") or _greatest_resident()

    def reset(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return  # the peak then stays that of the process: too high, never too low

    def note(self) -> str:
        return "resident memory, not counted blocks"


def _status(field: str) -> int:
    """A line of /proc/self/status in bytes; 0 where there is none."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _greatest_resident() -> int:
    greatest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return greatest if sys.platform == "darwin" else greatest * 1024


Meter = HeapMeter | ResidentMeter


def meter() -> Meter:
    """The counter if it is loaded in this process, else resident memory."""
    library = ctypes.CDLL(None)
    if hasattr(library, "heapcount_live"):
        return HeapMeter(library)
    return ResidentMeter()


def settled(meter: Meter) -> tuple[int, int]:
    """Live and held bytes after a garbage collection."""
    gc.collect()
    return meter.live(), meter.held()
