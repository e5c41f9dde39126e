"""What the numbers of a benchmark depend on: processor, memory, versions, the tree that is measured, the date."""
from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """What the numbers depend on: processor, cores, memory, versions, the tree, date, and what ran beside."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "anyshape": _version("anyshape"),
        "commit": commit(),
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def commit() -> str:
    """The commit of the tree that is measured, with "+" where files differ from it; empty outside of a checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return ""
        return done.stdout.strip()

    if not git("ls-files", __file__):  # the package is installed inside of somebody else's checkout
        return ""
    changed = git("status", "--porcelain", "--", ":(top)src", ":(top)benchmarks")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"


def facts(machine: dict[str, Any], threads: str) -> str:
    """What the numbers depend on, as a list in Markdown."""
    memory = machine.get("memory_bytes")
    known: list[tuple[str, Any]] = [
        ("processor", machine.get("processor")), ("cores", machine.get("cores")),
        ("memory", f"{memory / 1e9:.0f} GB" if memory else "unknown"), ("threads of torch", threads),
        ("system", machine.get("system")), ("torch", machine.get("torch")),
        ("transformers", machine.get("transformers")), ("python", machine.get("python")), ("date", machine.get("date")),
        ("commit", machine.get("commit") or "not kept"), ("load before the run", machine.get("load", "not kept")),
    ]
    return "".join(f"- {name}: {value}\n" for name, value in known)
