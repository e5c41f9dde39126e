"""Ahead-of-time compilation of device kernels: versions of Triton text become machine code, on several threads.

Machine code is kept in the cache of object code, keyed by the text, the version, the architecture and Triton's version.
Compilation is lazy: a version is compiled when a specialisation first chooses it. Triton lets go of the interpreter in
its long stages, so that threads help.
"""
from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from anyshape.backend.interface import ObjectCache
from anyshape.backend.triton import toolchain
from anyshape.backend.triton.kernel import (
    I32,
    NULL,
    POINTER,
    SCRATCH,
    STATUS,
    DeviceKernel,
    KernelSource,
    KernelVersion,
)
from anyshape.base.errors import DeviceError

POINTERS = {"f32": "*fp32", "f64": "*fp64", "i64": "*i64", "i32": "*i32", "i16": "*i16", "i8": "*i8", "u8": "*u8",
            "bool": "*i1", "bf16": "*bf16", "f16": "*fp16"}
FORMAT = 2  # of what the cache keeps: change it with `_pack` and with what is asked of Triton

Wanted = tuple[KernelSource, KernelVersion]


class Compiler:
    """Compiles for one architecture. Thread-safe; a kernel is compiled once.

    Args:
        architecture: "sm_90", "gfx942". cache: of object code, or None.
    """

    def __init__(self, architecture: str, cache: ObjectCache | None = None) -> None:
        self.architecture, self.cache = architecture, cache
        self.made: dict[tuple[str, KernelVersion], DeviceKernel] = {}
        self.refused: dict[tuple[str, KernelVersion], tuple[str, str, str]] = {}  # what, why, what to do
        self.lock = threading.Lock()

    def compile(self, wanted: Sequence[Wanted], threads: int = 0) -> list[DeviceKernel]:
        """These versions as machine code, in order. threads: at most; 0: one for each core.

        Raises:
            DeviceError: Triton refuses a text, which it is asked once, or there is no Triton.
        """
        keys = [(source.text, version) for source, version in wanted]
        with self.lock:
            missing = {key: pair for key, pair in zip(keys, wanted, strict=True) if key not in self.made}
        workers = min(threads or len(os.sched_getaffinity(0)), len(missing))
        if workers > 1:
            with ThreadPoolExecutor(max_workers=workers) as pool:
                found = list(pool.map(self._one, missing.values()))
        else:
            found = [self._one(pair) for pair in missing.values()]
        with self.lock:
            for key, kernel in zip(missing, found, strict=True):
                self.made.setdefault(key, kernel)
            return [self.made[key] for key in keys]

    def _one(self, pair: Wanted) -> DeviceKernel:
        key = pair[0].text, pair[1]
        if key in self.refused:
            what, why, do = self.refused[key]
            raise DeviceError(what, why=why, do=do)
        try:
            return self._code(*pair)
        except DeviceError as error:
            self.refused[key] = error.what, error.why, error.do
            raise

    def _code(self, source: KernelSource, version: KernelVersion) -> DeviceKernel:
        key = object_key(source, version, self.architecture)
        data = self.cache.get(key) if self.cache is not None else None
        if data is None:
            data = _pack(assembled(source, version, self.architecture))
            if self.cache is not None:
                self.cache.put(key, data)
        facts, image, assembly = _unpack(data)
        return DeviceKernel(source.name, facts["name"], version, parameters(source, version), facts["threads"],
                            facts["shared"], self.architecture, image, assembly)


def object_key(source: KernelSource, version: KernelVersion, architecture: str) -> str:
    """The cache key of a version's machine code."""
    said = (version.function, version.constants, version.warps, version.stages, version.index, version.divisor,
            version.alignment, version.guarded)
    head = f"triton {FORMAT} {toolchain.version()} {architecture} {said}"
    return hashlib.sha256(f"{head}\n{source.text}".encode()).hexdigest()


def parameters(source: KernelSource, version: KernelVersion) -> tuple[str, ...]:
    """The kinds of a compiled version's parameters, in order; see `DeviceKernel`."""
    return (*[POINTER] * len(source.params), STATUS, *[version.index] * len(source.sizes),
            *([SCRATCH] if version.scratch != 0 else []), NULL, NULL)


def assembled(source: KernelSource, version: KernelVersion, architecture: str) -> toolchain.Assembled:
    """A version through Triton."""
    space = toolchain.functions(source.text, source.name)
    try:
        constants: dict[str, Any] = dict(version.constants) | {
            "INDEX": space["tl"].int32 if version.index == I32 else space["tl"].int64, "GUARDED": version.guarded}
        signature = {name: POINTERS[dtype] for name, dtype in source.params} | {"status": "*i64"}
        signature |= {name: version.index for name in source.sizes}
        signature |= {"scratch": "*i8"} if version.scratch != 0 else {}
        signature |= {name: "constexpr" for name in constants}
        divisors = {name: version.alignment for name, _ in source.params} | {"scratch": 16}
        divisors |= {name: version.divisor for name in source.steps}
        warps = version.warps if architecture.startswith("sm_") else max(1, version.warps // 2)
        options = {"num_warps": warps, "num_stages": version.stages, "sanitize_overflow": False}
        made = toolchain.assemble(space[version.function], signature, constants,
                                  {name: number for name, number in divisors.items() if name in signature},
                                  architecture, options)
    finally:
        toolchain.forget(space)
    if made.scratch:
        raise DeviceError(f"kernel {source.name} wants memory of Triton's own", why=f"{made.scratch} bytes",
                          do="report this as a bug of the compiler")
    return made


def _pack(made: toolchain.Assembled) -> bytes:
    """Machine code with what is known of it, as the cache keeps it."""
    facts = {"name": made.name, "shared": made.shared, "threads": made.warps * made.warp_size,
             "image": len(made.image)}
    return json.dumps(facts).encode() + b"\n" + made.image + made.assembly.encode()


def _unpack(data: bytes) -> tuple[dict[str, Any], bytes, str]:
    head, _, rest = data.partition(b"\n")
    facts = json.loads(head)
    return facts, rest[:facts["image"]], rest[facts["image"]:].decode()
