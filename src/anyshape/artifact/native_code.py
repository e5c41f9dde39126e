"""The native cache of a deployed file: objects of a machine and what they are, written with a program and loaded where
someone trusts it.

    native/<key>.json    {"machine": {...}, "code": digest of the generator, "modules": {"host": "<key>.o", ...}}
    native/<key>.o       an object

`code` says by which generator it was made: a program's words and the routines that read them belong together.
"""
from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import anyshape
from anyshape.artifact.container import NATIVE, Container, refused
from anyshape.artifact.elf import LoadedObjects
from anyshape.artifact.safetensors import parse_json
from anyshape.backend.cpu.llvm.loaded_code import ENTRIES, LoadedKernel, Routines
from anyshape.backend.cpu.machine.target import Machine, may_use_tiles
from anyshape.base.errors import ArtifactError

# what makes the words of a plan, and what reads them
GENERATOR = ("backend/cpu/bytecode", "backend/cpu/routines", "backend/cpu/interpreter.py", "plan/ir")
# LLVM's names of features that code may use -> those of Linux, where they differ
LINUX = {"avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16", "avx512fp16": "avx512_fp16", "sse4.1": "sse4_1",
         "sse4.2": "sse4_2", "avx512vbmi2": "avx512_vbmi2", "avx512bitalg": "avx512_bitalg", "sse3": "pni",
         "avx512vpopcntdq": "avx512_vpopcntdq", "avx512vp2intersect": "avx512_vp2intersect", "avxvnni": "avx_vnni",
         "amx-tile": "amx_tile", "amx-bf16": "amx_bf16", "amx-int8": "amx_int8", "amx-fp16": "amx_fp16",
         "lzcnt": "abm", "bmi": "bmi1"}
VECTOR = ("sse", "avx", "fma", "f16c", "bmi", "amx", "lzcnt", "popcnt", "adx", "movbe")
_FIELDS: dict[str, type] = {"triple": str, "cpu": str, "features": str, "vector_bytes": int, "fma": bool,
                            "wide_int": bool}


@lru_cache(maxsize=1)
def generator() -> str:
    """A digest of everything that turns a plan into words, and of what reads them."""
    root = Path(anyshape.__file__).parent
    digest = hashlib.sha256(anyshape.__version__.encode())
    for place in GENERATOR:
        files = [root / place] if place.endswith(".py") else sorted((root / place).rglob("*.py"))
        for file in files:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def encode(machine: Machine, modules: Mapping[str, bytes]) -> dict[str, bytes]:
    """The members of a file for modules of machine code."""
    found: dict[str, bytes] = {}
    names = {}
    for module, code in modules.items():
        member = f"native/{hashlib.sha256(code).hexdigest()[:16]}.o"
        found[member] = code
        names[module] = member
    text = json.dumps({"machine": asdict(machine), "code": generator(), "modules": names}, indent=1).encode()
    return {f"native/{hashlib.sha256(text).hexdigest()[:16]}.json": text, **found}


class NativeCode:
    """The modules of a file for this machine: the code source of a loader (backend/cpu/llvm/loaded_code.py).

    Raises:
        ArtifactError: they are not for this machine, or were made by another version; or they are broken.
    """

    def __init__(self, container: Container) -> None:
        reasons = []
        for _, machine, code, modules in _entries(container):
            reason = _lack(machine, code)
            if not reason:
                self.machine = machine
                self.loaded = LoadedObjects({module: container.data(one) for module, one in modules.items()})
                return
            reasons.append(reason)
        raise ArtifactError("the file has no native code for this process", where=str(container.path),
                            why="; ".join(dict.fromkeys(reasons)) or "it was saved without",
                            do="install llvmlite and load it with trust_native=False, or save it again on such a "
                               "machine, with this version")

    def routines(self, module: str, names: Sequence[str]) -> Routines:
        """See `CodeSource`."""
        known = self.loaded.address.get(module)
        if known is None and module.startswith("products "):
            return Routines({}, self.loaded)  # of a family that has none of this dtype
        if known is None:
            raise refused("native code", f"the module {module} is missing",
                          "install llvmlite, or save the program again")
        return Routines({name: known[name] for name in names if name in known}, self.loaded)

    def kernels(self, names: Iterable[str]) -> list[LoadedKernel]:
        """The kernels of these names."""
        found = []
        for name in names:
            known = self.loaded.address.get(f"kernel {name}", {})
            entries = [known.get(name + entry, 0) for entry in ENTRIES]
            if 0 in entries:
                raise refused("native code", f"the kernel {name} is missing", "save the program again")
            run, blocks, scratch, work = entries
            found.append(LoadedKernel(name, run, blocks, scratch, work, self.loaded))
        return found


def reason_against(container: Container) -> str:
    """Why the machine code of a file is not for this process; "" where it is."""
    reasons = [_lack(machine, code) for _, machine, code, _ in _entries(container)]
    return "" if "" in reasons else "; ".join(dict.fromkeys(reasons)) or "none"


def _entries(container: Container) -> Iterator[tuple[str, Machine, Any, dict[str, str]]]:
    """Place, machine, digest of the generator, and modules of the caches in a file."""
    for name in [one for one in container.places if one.startswith("native/") and one.endswith(".json")]:
        where = f"{container.path}: {name}"
        entry = parse_json(container.data(name), where)
        modules = entry.get("modules")
        if not isinstance(modules, dict) or not all(
                isinstance(one, str) and NATIVE.fullmatch(one) and one.endswith(".o") for one in modules.values()):
            raise refused(where, "it does not say which object is what")
        yield where, _machine(entry.get("machine"), where), entry.get("code"), modules


def _machine(found: Any, where: str) -> Machine:
    fits = isinstance(found, dict) and found.keys() == _FIELDS.keys() and all(
        type(found[name]) is kind for name, kind in _FIELDS.items())
    if not fits or found["vector_bytes"] not in (16, 32, 64):
        raise refused(where, "it does not say for which machine its code is")
    return Machine(**found)


def _lack(machine: Machine, code: Any) -> str:
    """What this process lacks of what machine code needs; "" where it lacks nothing. code: digest of its generator."""
    if code != generator():
        return "its native code was made by another version of AnyShape"
    if platform.machine() not in ("x86_64", "AMD64") or not machine.triple.startswith("x86_64"):
        return f"its code is for {machine.triple.split('-')[0]}, this is {platform.machine()}"
    wanted = {name.strip("+") for name in machine.features.split(",")}
    used = {LINUX.get(name, name) for name in wanted if name.startswith(VECTOR)}
    have = _flags()
    missing = sorted(used - have - {"avx10.1-512", "avx10.1"})
    if missing:
        return f"its code uses {', '.join(missing)}, which this processor has not"
    tiles = frozenset(name for name in wanted if name.startswith("amx"))
    return "" if may_use_tiles(tiles) or not tiles else "its code uses tiles, which this process may not use"


@lru_cache(maxsize=1)
def _flags() -> frozenset[str]:
    """The processor's features, in Linux's words."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(found.partition(":")[2].split())
