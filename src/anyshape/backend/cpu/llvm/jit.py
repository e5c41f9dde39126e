"""From LLVM IR text to loaded functions: a short pass pipeline, object code, a cache for it, several threads.

llvmlite guards every call into LLVM with one lock. The two long calls (the passes and the code generation) are made
without it, each thread with its own context, module and target machine, which is what LLVM asks for.
"""
from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import llvmlite.binding as llvm

from anyshape.backend.cpu.machine.target import Machine, initialise
from anyshape.backend.interface import ObjectCache
from anyshape.backend.loaded_code import ENTRIES, LoadedKernel, Routines
from anyshape.base.errors import VerifyError
from anyshape.base.own_sources import own_sources

_NAME = re.compile(r"^define void @([A-Za-z_][A-Za-z0-9_]*)\(", re.MULTILINE)
_PIPELINE = "sroa simplifycfg v1"  # enters the cache key: change it with the passes


class _Worker(threading.local):
    """What one thread compiles with."""

    def __init__(self) -> None:
        self.machines: dict[Machine, llvm.TargetMachine] = {}

    def machine(self, target: Machine) -> llvm.TargetMachine:
        if target not in self.machines:
            initialise()
            maker = llvm.Target.from_triple(target.triple)
            self.machines[target] = maker.create_target_machine(
                cpu=target.cpu, features=target.features, opt=2, reloc="pic", codemodel="small", jit=True)
        return self.machines[target]


class _Loader:
    """The process's JIT linker; made when first needed, kept until the process ends."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.linker: llvm.LLJIT | None = None
        self.numbers = itertools.count()

    def link(self, objects: Sequence[bytes], names: Sequence[str]) -> llvm.ResourceTracker:
        """A library of object files in which `names` can be looked up; unloaded with the returned object."""
        library = llvm.JITLibraryBuilder().add_current_process()
        for data in objects:
            library.add_object_img(data)
        for name in names:
            library.export_symbol(name)
        with self.lock:
            if self.linker is None:
                initialise()
                # JITLink places all sections of an object in one piece of memory. The older linker takes a piece for
                # each: code and its constants may then be more than 2 GB apart, where other things lie between, and
                # an offset that does not fit ends the process
                self.linker = llvm.create_lljit_compiler(use_jit_link=True)
            return library.link(self.linker, f"anyshape{next(self.numbers)}")


_worker = _Worker()
_loader = _Loader()
_raw = ctypes.CDLL(llvm.ffi.lib._name)  # llvmlite's own library, without its lock


def kernel_name(text: str) -> str:
    """The name of the kernel in a module's text; VerifyError when there is none."""
    found = _NAME.search(text)
    if found is None:
        raise VerifyError("a module without a kernel", why="no `define void @name(` in it", do="report this as a bug")
    return found.group(1)


def object_key(text: str, target: Machine) -> str:
    """Cache key of a module's object code: sha256 over the text, the processor and the versions."""
    return hashlib.sha256(f"{target.key}\n{_PIPELINE}\n{text}".encode()).hexdigest()


def object_code(text: str, target: Machine) -> bytes:
    """Compile one module. VerifyError when LLVM refuses the text."""
    machine = _worker.machine(target)
    context = llvm.create_context()
    try:
        module = llvm.parse_assembly(text, context)
    except RuntimeError as error:
        raise VerifyError("LLVM refuses the text of a kernel", where=text.split("\n", 1)[0], why=str(error).strip(),
                          do="report this as a bug of the compiler") from error
    with module:
        _run_passes(module, machine)
        return _emit_object(module, machine)


def _run_passes(module: llvm.ModuleRef, machine: llvm.TargetMachine) -> None:
    options = llvm.create_pipeline_tuning_options(speed_level=1)
    builder = llvm.create_pass_builder(machine, options)
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_simplify_cfg_pass()
    run = _raw.LLVMPY_RunNewModulePassManager
    run.argtypes = llvm.ffi.lib.LLVMPY_RunNewModulePassManager.argtypes
    run.restype = None
    run(passes, module, builder)
    builder.close()
    options.close()


def _emit_object(module: llvm.ModuleRef, machine: llvm.TargetMachine) -> bytes:
    locked = llvm.ffi.lib.LLVMPY_TargetMachineEmitToMemory
    emit = _raw.LLVMPY_TargetMachineEmitToMemory
    emit.argtypes, emit.restype = locked.argtypes, locked.restype
    with llvm.ffi.OutputString() as message:
        buffer = emit(machine, module, 1, message)
        if not buffer:
            raise VerifyError("LLVM cannot generate code for a kernel", why=str(message), do="report this as a bug")
    start, size = llvm.ffi.lib.LLVMPY_GetBufferStart(buffer), llvm.ffi.lib.LLVMPY_GetBufferSize(buffer)
    try:
        return ctypes.string_at(start, size)
    finally:
        llvm.ffi.lib.LLVMPY_DisposeMemoryBuffer(buffer)


def build(texts: Sequence[str], target: Machine, cache: ObjectCache | None = None,
          threads: int = 0) -> list[LoadedKernel]:
    """Compile and load modules, in the order given; the code lives as long as any of the returned kernels.

    threads: at most; 0: one for each core. Thread-safe. Kernel names must differ within one call; a name may come
    again in another call.
    """
    if not texts:
        return []
    names = [kernel_name(text) for text in texts]
    objects: list[bytes | None] = [None] * len(texts)
    keys = [object_key(text, target) for text in texts] if cache is not None else []
    for k, key in enumerate(keys):
        assert cache is not None
        objects[k] = cache.get(key)
    missing = [k for k, data in enumerate(objects) if data is None]
    workers = min(threads or len(os.sched_getaffinity(0)), len(missing))
    if workers > 1:
        with ThreadPoolExecutor(max_workers=workers) as pool:
            made = list(pool.map(lambda k: object_code(texts[k], target), missing))
    else:
        made = [object_code(texts[k], target) for k in missing]
    for k, data in zip(missing, made, strict=True):
        objects[k] = data
        if cache is not None:
            cache.put(keys[k], data)
    return _linked(names, keys or [""] * len(names), [data for data in objects if data is not None])


def kept(keys: Mapping[str, str], cache: ObjectCache | None) -> list[LoadedKernel] | None:
    """The kernels of earlier calls of `build`, of this process or another one, without their text; None where the cache
    has not all of them. keys: by name, as `LoadedKernel` has them."""
    if cache is None or not all(keys.values()):
        return None
    objects = [data for key in keys.values() if (data := cache.get(key)) is not None]
    return _linked(list(keys), list(keys.values()), objects) if len(objects) == len(keys) else None


def _linked(names: Sequence[str], keys: Sequence[str], objects: Sequence[bytes]) -> list[LoadedKernel]:
    """The kernels of some objects, in one library."""
    if not names:
        return []
    library = _loader.link(objects, [name + suffix for name in names for suffix in ENTRIES])
    return [LoadedKernel(name, library[name], library[f"{name}_blocks"], library[f"{name}_scratch"],
                         library[f"{name}_work"], library, key)
            for name, key in zip(names, keys, strict=True)]


def load_module(module: str, text: Callable[[], str], names: Sequence[str], target: Machine,
                cache: ObjectCache | None) -> Routines:
    """A module whose text follows from our own source files and the processor. Where the cache knows what these made,
    the text is not made. names: of functions that are called from outside, of which it has some or all."""
    sources = own_sources() if cache is not None else ""
    index = _index(module, target, sources)
    if cache is not None and sources:
        key, *found = (cache.get(index) or b"").decode().split("\n")
        data = cache.get(key) if found else None
        if data is not None:
            return _routines(data, found)
    written = text()
    found = [name for name in names if f"@{name}(" in written]
    if not found:
        return Routines({}, None)
    routines = load(written, found, target, cache)
    if cache is not None and sources:
        cache.put(index, "\n".join((object_key(written, target), *found)).encode())
    return routines


def module_object(module: str, target: Machine, cache: ObjectCache) -> bytes | None:
    """The object of a module that `load_module` made or found; None where the cache has it no more."""
    key = (cache.get(_index(module, target, own_sources())) or b"").decode().split("\n")[0]
    return cache.get(key) if key else None


def _index(module: str, target: Machine, sources: str) -> str:
    return hashlib.sha256(f"{module}\n{target.key}\n{_PIPELINE}\n{sources}".encode()).hexdigest()


def load(text: str, names: Sequence[str], target: Machine, cache: ObjectCache | None = None) -> Routines:
    """Compile and load a module of other functions than kernels; `names` are those to be called from outside."""
    key = object_key(text, target)
    data = cache.get(key) if cache is not None else None
    if data is None:
        data = object_code(text, target)
        if cache is not None:
            cache.put(key, data)
    return _routines(data, names)


def _routines(data: bytes, names: Sequence[str]) -> Routines:
    library = _loader.link([data], names)
    return Routines({name: library[name] for name in names}, library)
