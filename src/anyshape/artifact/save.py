"""Serialisation of a compiled program into one file to deploy: text, weights, and native code as a cache.

    format.json            versions, the digests of the other members, the signature, where weights belong
    graph.txt              the traced graph: the source of truth, always enough to compile again
    kernels.txt, plan.txt  what the compiler made of it; a cache, as the native code is
    weights.safetensors    parameters, buffers and constants
    native/                objects for the machine that saved it
    tests.safetensors      calls and their results, where somebody wanted them

Programs for special sizes, which format.json names, have texts of their own (graph.1.txt and so on) and share weights
and machine code with the first.
"""
from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anyshape.artifact import native_code
from anyshape.artifact.deployable import Deployable, storage_of
from anyshape.artifact.format import safetensors
from anyshape.artifact.format.container import VECTORS, WEIGHTS, member, write
from anyshape.artifact.prepack import prepacked
from anyshape.artifact.requirements import FORMAT, VERSION, WITH_NAMES, WITH_SPECIAL, WITH_VECTORS, check
from anyshape.backend.targets import deployment
from anyshape.base.errors import OutputError
from anyshape.base.version import __version__
from anyshape.ir.show import show
from anyshape.kernel.loop_ir.show import show as show_kernel
from anyshape.plan.ir.show import show as show_plan


def save(program: Deployable, path: str | Path, native: bool = True, tests: Sequence[Sequence[Any]] = ()) -> Path:
    """Writes a program to `path`. native: with the machine code of this machine. tests: arguments of calls, which are
    stored with what the saved program gives for them.

    Raises:
        InputError: the arguments of a test do not fit.
        Unsupported: something of it cannot run without what made it; nothing is written.
        OutputError: the file cannot be written.
    """
    path = Path(path)
    given = [program, *(one for _, one in program.special)]
    for one in given:
        check(one.planned.plan, one.planned.name, one.weights)
    panels: dict[tuple[object, ...], np.ndarray[Any, Any]] = {}
    programs = [prepacked(one, panels) for one in given]
    members: dict[str, bytes] = {}
    for number, one in enumerate(programs):
        texts = {"graph.txt": show(one.graph), "plan.txt": show_plan(one.planned.plan),
                 "kernels.txt": "\n\n".join(map(show_kernel, one.planned.programs.values()))}
        members |= {member(name, number): text.encode() for name, text in texts.items()}
    tensors, positions = _weights(programs)
    members[WEIGHTS] = safetensors.encode(tensors)
    if native:
        modules: dict[str, bytes] = {}
        for one in programs:
            machine, more = deployment().modules(one.planned.target, one.planned.plan, one.planned.programs)
            modules |= more
        members |= native_code.encode(machine, modules)
    first, *others = [{"signature": one.signature.encode(), "weights": places,
                       "needed": [str(size) for size in one.planned.plan.nonnegative]}
                      for one, places in zip(programs, positions, strict=True)]
    version = WITH_SPECIAL if others else WITH_NAMES if program.signature.gives else WITH_VECTORS if tests else VERSION
    head: dict[str, Any] = {"format": FORMAT, "version": version, "made_with": {"anyshape": __version__}, **first}
    if others:
        head["special"] = [{"sizes": sizes, **one} for (sizes, _), one in zip(program.special, others, strict=True)]
    if tests:
        from anyshape.artifact.test_vectors import recorded  # by way of the loader, which others do without
        with _folder_beside(path) as folder:
            untested = Path(folder) / path.name
            _write(untested, head, members)
            members[VECTORS] = recorded(untested, native, tests)
    _write(path, head, members)
    return path


def _folder_beside(path: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder on the disk of `path`, until a block ends: several may save to one path at once."""
    try:
        return tempfile.TemporaryDirectory(prefix=".anyshape-", dir=path.absolute().parent)
    except OSError as error:
        raise _unwritable(path, error) from error


def _write(path: Path, head: Mapping[str, Any], members: Mapping[str, bytes]) -> None:
    """Writes a file of these members."""
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in members.items()}
    try:
        write(path, {"format.json": json.dumps({**head, "digests": digests}, indent=1).encode(), **members})
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> OutputError:
    return OutputError(f"{path} cannot be written", why=error.strerror or str(error), do="name another path")


def _weights(programs: Sequence[Deployable]) -> tuple[dict[str, tuple[str, np.ndarray[Any, Any]]],
                                                      list[list[list[Any]]]]:
    """The tensors by name, tied ones once, and for each program the name of each position."""
    tensors: dict[str, tuple[str, np.ndarray[Any, Any]]] = {}
    known: dict[tuple[Any, ...], str] = {}
    positions: list[list[list[Any]]] = []
    for program in programs:
        positions.append([])
        for position, (name, dtype, array) in sorted(program.weights.items()):
            key = storage_of((name, dtype, array))
            if key not in known or array.size == 0:
                while name in tensors:
                    name += "_"
                known[key] = name
                tensors[name] = (dtype, array)
            positions[-1].append([position, known[key]])
    return tensors, positions
