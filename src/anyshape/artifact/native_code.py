"""The native cache of a deployed file: objects of a machine and what they are, written with a program and loaded where
someone trusts it.

    native/<key>.json    {"machine": {...}, "code": digest of the generator, "modules": {"host": "<key>.o", ...}}
    native/<key>.o       an object

`code` says by which generator it was made: a program's words and the routines that read them belong together.
"""
from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from anyshape.artifact.format.container import NATIVE, Container, refused
from anyshape.artifact.format.elf import LoadedObjects
from anyshape.artifact.format.safetensors import parse_json
from anyshape.backend.loaded_code import ENTRIES, LoadedKernel, Routines
from anyshape.backend.targets import deployment
from anyshape.base.digests import sha256
from anyshape.base.errors import ArtifactError


def encode(machine: Any, modules: Mapping[str, bytes]) -> dict[str, bytes]:
    """The members of a file for modules of machine code, which this process can load."""
    LoadedObjects(modules)
    found: dict[str, bytes] = {}
    names = {}
    for module, code in modules.items():
        member = f"native/{sha256(code).hexdigest()[:16]}.o"
        found[member] = code
        names[module] = member
    entry = {"machine": asdict(machine), "code": deployment().generator(), "modules": names}
    text = json.dumps(entry, indent=1).encode()
    return {f"native/{sha256(text).hexdigest()[:16]}.json": text, **found}


def native_code(container: Container) -> NativeCode:
    """The modules of a file for this machine.

    Raises:
        ArtifactError: they are not for this machine, or were made by another version; or they are broken.
    """
    reasons = []
    for _, machine, code, modules in _entries(container):
        reason = deployment().lack(machine, code)
        if not reason:
            return NativeCode(machine, {module: container.data(one) for module, one in modules.items()})
        reasons.append(reason)
    raise ArtifactError("the file has no native code for this process", where=str(container.path),
                        why="; ".join(dict.fromkeys(reasons)) or "it was saved without",
                        do="install llvmlite and load it with trust_native=False, or save it again on such a "
                           "machine, with this version")


class NativeCode:
    """Modules for this machine: the code source of a loader (backend/loaded_code.py). objects: by module.

    Raises:
        ArtifactError: they are broken.
    """

    def __init__(self, machine: Any, objects: Mapping[str, bytes]) -> None:
        self.machine = machine
        self.loaded = LoadedObjects(objects)

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
    reasons = [deployment().lack(machine, code) for _, machine, code, _ in _entries(container)]
    return "" if "" in reasons else "; ".join(dict.fromkeys(reasons)) or "none"


def _entries(container: Container) -> Iterator[tuple[str, Any, Any, dict[str, str]]]:
    """Place, machine, digest of the generator, and modules of the caches in a file."""
    for name in [one for one in container.places if one.startswith("native/") and one.endswith(".json")]:
        where = f"{container.path}: {name}"
        entry = parse_json(container.data(name), where)
        modules = entry.get("modules")
        if not isinstance(modules, dict) or not all(
                isinstance(one, str) and NATIVE.fullmatch(one) and one.endswith(".o") for one in modules.values()):
            raise refused(where, "it does not say which object is what")
        machine = deployment().machine_of(entry.get("machine"))
        if machine is None:
            raise refused(where, "it does not say for which machine its code is")
        yield where, machine, entry.get("code"), modules
