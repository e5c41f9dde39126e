"""Triton as an assembler: its parser, passes and assemblers are called; its runtime, driver and caches never are.

The one place where triton is imported, when it is first needed. The steps of `triton.compile` are made here one by one,
since that writes each kernel into a cache of its own in the user's folder, and settings against it hold for the whole
process, where the user's own kernels run too.
"""
from __future__ import annotations

import importlib
import itertools
import linecache
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from anyshape.base.errors import DeviceError

TESTED = ((3, 6), (3, 7))  # versions that kernels were compiled and checked with
_numbers = itertools.count()
# Triton reads a kernel by `ast.parse`, which counts its depth for all threads together in some versions of Python 3.11
# and 3.12: "AST constructor recursion depth mismatch" (python/cpython issue 106905). Later stages run side by side.
_parsing = threading.Lock()


@dataclass(frozen=True, slots=True)
class Assembled:
    """A function as machine code, and Triton's own words about it."""

    image: bytes
    assembly: str
    name: str
    shared: int
    warps: int
    warp_size: int
    scratch: int


def version() -> str:
    """The version of Triton.

    Raises:
        DeviceError: it is not installed, or one that was never tried: its steps are called by names that change.
    """
    found = str(module("triton").__version__)
    if tuple(map(int, found.split(".")[:2])) not in TESTED:
        known = " and ".join(f"{major}.{minor}" for major, minor in TESTED)
        raise DeviceError(f"Triton {found} is not known", why=f"kernels were compiled and checked with {known}",
                            do="install one of these; a torch of version 2.11 to 2.13 brings it")
    return found


def functions(text: str, name: str) -> Any:
    """The Triton functions of a module's text, by name. `inspect` finds the source in `linecache`: no file is made."""
    path = f"<triton {name} {next(_numbers)}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    space: dict[str, Any] = {"__name__": path, "__file__": path}
    module("triton")
    exec(compile(text, path, "exec"), space)
    return space


def forget(space: Mapping[str, Any]) -> None:
    """The source of these functions is not asked for any more."""
    linecache.cache.pop(str(space["__file__"]), None)


def assemble(function: Any, signature: Mapping[str, str], constants: Mapping[str, Any],
             divisors: Mapping[str, int], architecture: str, options: Mapping[str, int]) -> Assembled:
    """Machine code of one Triton function.

    Args:
        signature: Triton's types of all parameters, "constexpr" for compile-time constants, by name in order.
        divisors: what divides a parameter's value, by name. architecture: "sm_90", "gfx942".

    Raises:
        DeviceError: Triton refuses it.
    """
    compiler, backends = module("triton.compiler.compiler"), module("triton.backends.compiler")
    ir = module("triton._C.libtriton").ir
    if architecture.startswith("sm_"):
        target = backends.GPUTarget("cuda", int(architecture[3:]), 32)
    else:
        target = backends.GPUTarget("hip", architecture, 64 if architecture.startswith("gfx9") else 32)
    places = {name: number for number, name in enumerate(signature)}
    source = compiler.ASTSource(function, dict(signature), constexprs=dict(constants), attrs={
        (places[name],): [["tt.divisibility", number]] for name, number in divisors.items() if number > 1})
    backend = compiler.make_backend(target)
    settings = backend.parse_options(dict(options))
    metadata: dict[str, Any] = {"target": target, **settings.__dict__}
    stages: dict[str, Any] = {}
    backend.add_stages(stages, settings, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    made: dict[str, Any] = {}
    try:
        with _parsing:
            ir_module = source.make_ir(target, settings, backend.get_codegen_implementation(settings),
                                       backend.get_module_map(), context)
        for kind, stage in stages.items():
            made[kind] = ir_module = stage(ir_module, metadata)
    except (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, LookupError, OSError,
            subprocess.SubprocessError, module("triton.errors").TritonError) as error:
        raise DeviceError(f"Triton does not compile kernel {source.name} for {architecture}",
                          why=str(_first(error)).strip()[-400:] or type(error).__name__,
                          do="report this as a bug of the compiler") from error
    image = made.get("cubin") or made["hsaco"]
    return Assembled(image, made.get("ptx") or made["amdgcn"], metadata["name"], metadata["shared"],
                     metadata.get("num_warps", settings.num_warps), target.warp_size,
                     metadata.get("global_scratch_size", 0) or 0)


def _first(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@lru_cache(maxsize=32)
def module(name: str) -> Any:
    """A module of Triton.

    Raises:
        DeviceError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DeviceError("kernels for GPUs are compiled by Triton, which is not installed", why=str(error),
                            do="pip install 'anyshape[gpu]'; a CUDA or ROCm build of torch brings it") from error
