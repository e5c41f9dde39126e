"""Serialisation of a compiled program: writes it to a file to deploy: text, weights, and native code as a cache.

    format.json            versions, the digests of the other members, the signature, where weights belong
    graph.txt              the traced graph: the source of truth, always enough to compile again
    kernels.txt, plan.txt  what the compiler made of it; a cache, as the native code is
    weights.safetensors    parameters, buffers and constants
    native/                objects for the machine that saved it
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import anyshape
from anyshape.artifact import native_code, safetensors
from anyshape.artifact.container import WEIGHTS, write
from anyshape.artifact.requirements import FORMAT, VERSION, check
from anyshape.artifact.signature import Signature
from anyshape.backend.cpu.native_routines import FAMILIES
from anyshape.backend.cpu.target import CpuTarget
from anyshape.base.errors import ArtifactError, OutputError
from anyshape.compiler.compiled import PlannedGraph
from anyshape.ir.graph import Graph
from anyshape.ir.show import show
from anyshape.kernel.loop_ir.show import show as show_kernel
from anyshape.plan.ir.show import show as show_plan


@dataclass(frozen=True, slots=True)
class Deployable:
    """What is saved. graph: as it was traced, before the first pass. planned: what the compiler made of it. weights:
    position among the plan's inputs -> (name, our name of the dtype, array); of bf16 the bits."""

    graph: Graph
    planned: PlannedGraph
    weights: Mapping[int, tuple[str, str, np.ndarray[Any, Any]]]
    signature: Signature


def save(program: Deployable, path: str | Path, native: bool = True) -> Path:
    """Writes a program to `path`. native: with the machine code of this machine.

    Raises:
        Unsupported: something of it cannot run without what made it; nothing is written.
        OutputError: the file cannot be written.
    """
    path = Path(path)
    check(program.planned.plan, program.planned.name)
    plan = program.planned.plan
    members = {"graph.txt": show(program.graph).encode(),
               "kernels.txt": "\n\n".join(map(show_kernel, program.planned.programs.values())).encode(),
               "plan.txt": show_plan(plan).encode()}
    tensors, positions = _weights(program)
    members[WEIGHTS] = safetensors.encode(tensors)
    if native:
        members |= native_code.encode(*_modules(program.planned))
    head = {
        "format": FORMAT, "version": VERSION, "made_with": {"anyshape": anyshape.__version__},
        "signature": program.signature.encode(), "weights": positions,
        "needed": [str(size) for size in plan.nonnegative],
        "digests": {name: hashlib.sha256(data).hexdigest() for name, data in members.items()},
    }
    text = json.dumps(head, indent=1).encode()
    try:
        write(path, {"format.json": text, **members})
    except OSError as error:
        raise OutputError(f"{path} cannot be written", why=str(error), do="name another path") from error
    return path


def _weights(program: Deployable) -> tuple[dict[str, tuple[str, np.ndarray[Any, Any]]], list[list[Any]]]:
    """The tensors by name, tied ones once, and the name of each position."""
    tensors: dict[str, tuple[str, np.ndarray[Any, Any]]] = {}
    known: dict[tuple[Any, ...], str] = {}
    positions: list[list[Any]] = []
    for position, (name, dtype, array) in sorted(program.weights.items()):
        key = (array.__array_interface__["data"][0], array.shape, array.strides, dtype)
        if key not in known or array.size == 0:
            while name in tensors:
                name += "_"
            known[key] = name
            tensors[name] = (dtype, array)
        positions.append([position, known[key]])
    return tensors, positions


def _modules(planned: PlannedGraph) -> tuple[Any, dict[str, bytes]]:
    """The machine, and the objects of a program: its kernels, what runs plans, and the products that it has."""
    from anyshape.backend.cpu.interpreter import emit_host
    from anyshape.backend.cpu.llvm import jit
    target = planned.target
    if not isinstance(target, CpuTarget):
        raise ArtifactError("native code is kept for CPUs only", why=f"the program is for {target.device}",
                            do="save it with native=False")
    machine, cache = target.machine, target.native.cache

    def code(text: str) -> bytes:
        found = None if cache is None else cache.get(jit.object_key(text, machine))
        return jit.object_code(text, machine) if found is None else found

    modules = {"host": code(emit_host())}
    for dtype in products(planned):
        for number, (emit, names) in enumerate(FAMILIES):
            text = emit(machine, (dtype,))
            if any(f"@{name}(" in text for name in names):
                modules[f"products {number} {dtype}"] = code(text)
    for name, one in planned.programs.items():
        modules[f"kernel {name}"] = code(target.emit(one))
    return machine, modules


def products(planned: PlannedGraph) -> tuple[str, ...]:
    """The dtypes of a plan's products."""
    from anyshape.backend.cpu.bytecode import format as host
    from anyshape.backend.cpu.bytecode.encode_plan import encode
    target = planned.target
    assert isinstance(target, CpuTarget)
    entries = {kernel.name: host.KERNELS + 4 * i for i, kernel in enumerate(planned.kernels)}
    return encode(planned.plan, entries, target.autotune)[1]
