"""The programs that XLA calls by its FFI: found by a digest, run on XLA's buffers, without a copy.

    call of XLA: digest, addresses, dims  -->  the program's record at these sizes  -->  its native code

Where every step of a program is native its code reads and writes XLA's buffers; the arena is ours. Other programs, and
those under a limit in bytes, run as they do elsewhere, on tensors over these buffers, and their results are copied.
"""
from __future__ import annotations

import ctypes
import hashlib
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyshape.base.errors import AnyShapeError, IndexRangeError, InputError, LimitError
from anyshape.frontend.importer_stablehlo.callable import CompiledPart, StablehloCallable
from anyshape.frontend.importer_stablehlo.table import HELD
from anyshape.frontend.jax_jit import ffi_handler
from anyshape.plan.ir.program import Window
from anyshape.runtime.call.executable import Executable
from anyshape.runtime.specialize.specialization import Specialization
from anyshape.torch_compat.dtypes import TORCH_DTYPES

MOST_RECORDS = 512  # of a program, at so many sizes
# codes of XLA's errors
INVALID_ARGUMENT, NOT_FOUND, EXHAUSTED, OUT_OF_RANGE, INTERNAL = 3, 5, 8, 11, 13
CODES = ((LimitError, EXHAUSTED), (IndexRangeError, OUT_OF_RANGE), (InputError, INVALID_ARGUMENT),
         (MemoryError, EXHAUSTED))

_programs: dict[int, FfiProgram] = {}  # XLA may call one as long as the process runs
_messages = threading.local()  # that of the last error, which XLA copies


@dataclass(frozen=True, slots=True, eq=False)
class Quick:
    """How a program runs on XLA's buffers. parameters: of each parameter of the plan, the buffer that it is, or its
    address where it is below 0, negated. first: the buffer of the first result."""

    executable: Executable
    parameters: tuple[int, ...]
    first: int


class FfiProgram:
    """A module that XLA may call. number: the digest by which its calls name it."""

    def __init__(self, program: StablehloCallable, number: int) -> None:
        self.program = program
        self.number = number
        self.quick = {executable: quick for executable in _executables(program)
                      if (quick := _quick(program, executable)) is not None}
        self.records: dict[bytes, tuple[Quick, Specialization] | None] = {}

    def run(self, addresses: Sequence[int], dims: bytes) -> None:
        """One call. dims: rank and sizes of each buffer, as words.

        Raises:
            AnyShapeError: as calls of programs do.
        """
        known = self.records.get(dims) or self._new(addresses, dims)
        if known is None:
            return
        quick, record = known
        quick.executable.run_at(record, [addresses[k] if k >= 0 else -k for k in quick.parameters],
                                addresses[quick.first:])

    def _new(self, addresses: Sequence[int], dims: bytes) -> tuple[Quick, Specialization] | None:
        """The record at sizes that are new; None: the call has been done."""
        shapes = _shapes(dims)
        takes = [kind for _, kind in self.program.arguments]
        kinds = [*takes, *self.program.results]
        tensors = [_tensor(address, shape, TORCH_DTYPES[kind.dtype])
                   for address, shape, kind in zip(addresses, shapes, kinds, strict=True)]
        given, results = tensors[:len(takes)], tensors[len(takes):]
        known = self._record(given, results) if dims not in self.records else None
        if len(self.records) >= MOST_RECORDS:
            self.records.clear()
        self.records[dims] = known
        if known is None:
            found = self.program.tensors(given)
            for into, value in zip(results, found, strict=True):
                if into.shape != value.shape:
                    raise _other_sizes(into.shape, value.shape)
                into.copy_(value)
        return known

    def _record(self, given: Sequence[torch.Tensor],
                results: Sequence[torch.Tensor]) -> tuple[Quick, Specialization] | None:
        """None: at these sizes a step is not native."""
        part = self.program.run
        if not self.quick or not isinstance(part, CompiledPart):
            return None
        part.check(given)
        executable = part.program.executable
        record = executable.specialization([*given, *part.program.constants])
        quick = self.quick.get(executable.ran(record))
        if quick is None or not record.native:
            return None
        for (sizes, strides), into in zip(record.allocations, results, strict=True):
            if into.shape != sizes:
                raise _other_sizes(into.shape, sizes)
            if strides != into.stride() and 0 not in sizes:
                return None
        dense = all(view is None or 0 in view[0] or all(
            n == 1 or a == b for n, a, b in zip(view[0], view[1], tensor.stride(), strict=True))
            for view, tensor in zip(record.inputs, given, strict=False))
        return (quick, record) if dense else None


def _other_sizes(have: Sequence[int], sizes: Sequence[int]) -> InputError:
    return InputError(f"a result is {tuple(sizes)}", where="a call from XLA", why=f"XLA takes {tuple(have)}",
                      do="report this as a bug")


def _executables(program: StablehloCallable) -> tuple[Executable, ...]:
    """Of a module that is one program for tensors as they are: itself, and the same in another order of steps."""
    part = program.run
    kinds = [kind for _, kind in program.arguments] + list(program.results)
    if not isinstance(part, CompiledPart) or any(one.sizes is None for one in part.arguments) or any(
            kind.dtype in HELD for kind in kinds):
        return ()
    executable = part.program.executable
    return (executable,) if executable.other is None else (executable, executable.other)


def _quick(program: StablehloCallable, executable: Executable) -> Quick | None:
    """None: some step is PyTorch's, results are something else than what is allocated, or there is a limit."""
    part = program.run
    assert isinstance(part, CompiledPart)
    plan = executable.plan
    if executable.keeps or not (executable.straight and executable.plain) or executable.streams is not None \
            or executable.written or any(not isinstance(one, Window) for one in plan.outputs):
        return None
    takes, constants = len(program.arguments), [one.data_ptr() for one in part.program.constants]
    placed, slots = dict(plan.offsets), executable.layout.slots
    parameters = [plan.parameter_number(b) for b in sorted(plan.buffers, key=lambda b: slots[b.name])
                  if b.is_parameter and b.name not in placed]
    return Quick(executable, tuple(k if k < takes else -constants[k - takes] for k in parameters),
                 takes)


def _shapes(dims: bytes) -> list[tuple[int, ...]]:
    words = memoryview(dims).cast("q")
    shapes, at = [], 0
    while at < len(words):
        rank = words[at]
        shapes.append(tuple(words[at + 1:at + 1 + rank]))
        at += 1 + rank
    return shapes


def _tensor(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over a buffer of XLA."""
    bytes_ = dtype.itemsize
    for size in shape:
        bytes_ *= size
    if not bytes_:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_char * bytes_).from_address(address)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it could be read-only memory
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


# ---- what XLA calls


def number_of(text: bytes, config: Any) -> int:
    """The digest of a module and the settings that it is compiled with: 63 bits."""
    digest = hashlib.sha256(repr(config).encode() + b"\n" + text).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def offered(program: StablehloCallable, number: int) -> FfiProgram:
    """The program as XLA may call it from now on, by its number."""
    ffi_handler.register(called)
    return _programs.get(number) or _programs.setdefault(number, FfiProgram(program, number))


def called(line: int) -> int:
    """A call of XLA: the address of its words (backend/cpu/xla_handler.py). 0, or the code of an error."""
    head = (ctypes.c_int64 * ffi_handler.HEAD).from_address(line)
    number, buffers, dims, _ = head
    try:
        program = _programs.get(number)
        if program is None:
            raise InputError("XLA calls a program that this process has not compiled", where=f"program {number:x}",
                             why="the function comes from another process", do="call anyshape.jax.jit's function first")
        first = line + 8 * ffi_handler.HEAD
        program.run((ctypes.c_int64 * buffers).from_address(first)[:],
                    ctypes.string_at(first + 8 * buffers, 8 * dims))
        return 0
    except BaseException as error:  # XLA raises it again, where the result is asked for
        text = str(error) if isinstance(error, AnyShapeError) else f"{type(error).__name__}: {error}"
        _messages.text = ctypes.create_string_buffer(text.encode())
        head[ffi_handler.MESSAGE] = ctypes.addressof(_messages.text)
        return next((code for kind, code in CODES if isinstance(error, kind)), INTERNAL)
