"""The handler of XLA's foreign function interface (FFI), made at run time: no C compiler is needed.

XLA calls one native function for every program and shape. It gathers what the call frame says (addresses and dims of
buffers, and the attribute `program`, a digest) in a line of words, and hands it to `called`:

    frame of XLA  -->  program, buffers, dims, message, address of each buffer..., rank and dims of each buffer...

What that answers is 0, or a code of XLA's errors with the address of a message. The layout of the frame is that of
`xla/ffi/api/c_api.h`, which jaxlib ships.
"""
from __future__ import annotations

import ctypes
import threading

from anyshape.backend.cpu.llvm import jit
from anyshape.backend.cpu.machine.target import Machine
from anyshape.backend.cpu.native.compiler import translate
from anyshape.backend.cpu.native.records import Array, Struct, call, i64, load32, new, words
from anyshape.backend.loaded_code import Routines

METADATA = 1  # XLA_FFI_Extension_Metadata: XLA asks which version of the interface the handler speaks
SMALL, LARGE = 512, 16384  # words of a call: of usual ones, and at most
HEAD = 4  # words before the addresses
TOO_LARGE = 12  # XLA's code UNIMPLEMENTED


class Attribute(Struct):
    """A scalar: XLA_FFI_Scalar."""

    dtype: i64
    value: Array[i64]


class XlaBuffer(Struct):
    """XLA_FFI_Buffer."""

    size: i64
    extension: i64
    dtype: i64
    data: i64
    rank: i64
    dims: Array[i64]


class XlaVersion(Struct):
    """XLA_FFI_Api_Version; two numbers of 32 bits in one word."""

    size: i64
    extension: i64
    major_minor: i64


class Metadata(Struct):
    """XLA_FFI_Metadata."""

    size: i64
    version_size: i64
    version_extension: i64
    major_minor: i64
    traits: i64


class Extension(Struct):
    """XLA_FFI_Extension_Base, with what follows in that of metadata."""

    size: i64
    type: i64
    next: i64
    metadata: Metadata


class ErrorArguments(Struct):
    """XLA_FFI_Error_Create_Args."""

    size: i64
    extension: i64
    message: i64
    code: i64


class Api(Struct):
    """The beginning of XLA_FFI_Api."""

    size: i64
    extension: i64
    version_size: i64
    version_extension: i64
    major_minor: i64
    internal: i64
    create_error: i64


class Attributes(Struct):
    """XLA_FFI_Attrs."""

    size: i64
    extension: i64
    count: i64
    types: i64
    names: i64
    list: Array[i64]


class XlaFrame(Struct):
    """The beginning of XLA_FFI_CallFrame."""

    size: i64
    extension: Extension
    api: Api
    context: i64
    stage: i64
    args_size: i64
    args_extension: i64
    args_count: i64
    args_types: i64
    args: Array[i64]
    rets_size: i64
    rets_extension: i64
    rets_count: i64
    rets_types: i64
    rets: Array[i64]
    attrs_size: i64
    attrs_extension: i64
    attrs_count: i64
    attrs_types: i64
    attrs_names: i64
    attrs: Array[i64]


class Words(Struct):
    """What a call is handed over as. message: where the answer is an error, its address."""

    program: i64
    buffers: i64
    dims: i64
    message: i64


_no_room = ctypes.create_string_buffer(b"a program with so many arguments cannot be called from XLA\n"
                                       b"  do:    pass some of them as one array")
NO_ROOM = ctypes.addressof(_no_room)
# what the routines below, as native code, are made for: set before they are translated
MAJOR_MINOR = 0
CALLED = 0


def anyshape_program(frame: XlaFrame) -> int:
    """The handler: what XLA calls. The address of an XLA_FFI_Error, 0 where there is none."""
    extension = frame.extension
    if extension != 0:
        if load32(extension + Extension.type) == METADATA:
            metadata = extension.metadata
            metadata.major_minor = MAJOR_MINOR
            metadata.traits = 0
            return 0
    needed = HEAD + frame.args_count + frame.rets_count + dims_of(frame.args, frame.args_count) + dims_of(
        frame.rets, frame.rets_count)
    if needed <= SMALL:
        return small_call(frame)
    if needed <= LARGE:
        return large_call(frame)
    return failed(frame, TOO_LARGE, NO_ROOM)


def dims_of(list: Array[i64], count: int) -> int:
    """The words of ranks and dims."""
    total = count
    for k in range(count):
        total += XlaBuffer(list[k]).rank
    return total


def small_call(frame: XlaFrame) -> int:
    """A call of few words."""
    return handed(frame, Words(words(SMALL)))


def large_call(frame: XlaFrame) -> int:
    """A call of many."""
    return handed(frame, Words(words(LARGE)))


def handed(frame: XlaFrame, line: Words) -> int:
    """Gathers the words of a call, and hands them over."""
    line.program = Attribute(frame.attrs[0]).value[0]
    buffers = frame.args_count + frame.rets_count
    line.buffers = buffers
    address = line + 8 * HEAD
    at = address + 8 * buffers
    end = gathered(frame.args, frame.args_count, address, at)
    end = gathered(frame.rets, frame.rets_count, address + 8 * frame.args_count, end)
    line.dims = (end - at) // 8
    code = call(CALLED, line)
    if code == 0:
        return 0
    return failed(frame, code, line.message)


def gathered(list: Array[i64], count: int, address: int, at: int) -> int:
    """Writes addresses, and ranks and dims from `at` on; where these end."""
    for k in range(count):
        buffer = XlaBuffer(list[k])
        write(address + 8 * k, buffer.data)
        rank = buffer.rank
        write(at, rank)
        for d in range(rank):
            write(at + 8 + 8 * d, buffer.dims[d])
        at += 8 + 8 * rank
    return at


def write(address: int, value: int) -> int:
    """A word."""
    line = Words(address)
    line.program = value
    return 0


def failed(frame: XlaFrame, code: int, message: int) -> int:
    """An error of XLA."""
    error = new(ErrorArguments)
    error.size = 32
    error.message = message
    error.code = code
    return call(frame.api.create_error, error)


_making = threading.Lock()


def handler(machine: Machine, called: int, version: int) -> Routines:
    """The handler's code, made anew: it is not kept, for it has the address of `called` in it.

    Args:
        called: of a C function from the address of `Words` to 0, or to the code of an error.
        version: of the interface, minor and major in the halves of a word.
    """
    global MAJOR_MINOR, CALLED
    with _making:
        MAJOR_MINOR, CALLED = version, called
        return jit.load(translate(anyshape_program), [anyshape_program.__name__], machine)
