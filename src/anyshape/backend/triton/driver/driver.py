"""A GPU driver as an object: its functions by address, called with checked results; modules of machine code, events.

The library is looked for when somebody asks for a device (`open_driver`), so that the package needs none. Tests give
the addresses of functions of their own.
"""
from __future__ import annotations

import contextlib
import ctypes
import hashlib
import threading
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from anyshape.backend.triton.driver.functions import (
    ATTRIBUTES,
    LEAST_VERSION,
    LIBRARIES,
    NO_BLOCKING,
    NO_DEVICE,
    NO_TIMING,
    NOT_READY,
    OK,
    OUT_OF_MEMORY,
    SHARED_BYTES,
    SHARED_USUAL,
    SIGNATURES,
    VENDORS,
)
from anyshape.base.config import visible_devices
from anyshape.base.errors import DeviceError


class DeviceDriver:
    """CUDA's or HIP's driver as an object: its functions, called with checked results. Thread-safe.

    Args:
        kind: "cuda" or "hip". addresses: of its functions, by the names of `SIGNATURES`; those that it lacks are
            missing. keep: what holds them.

    Raises:
        DeviceError: the driver is too old, or there is no device.
    """

    def __init__(self, kind: str, addresses: Mapping[str, int], keep: object = None) -> None:
        self.kind = kind
        self.address = dict(addresses)
        self.keep = keep
        self._functions = {name: ctypes.CFUNCTYPE(ctypes.c_int, *SIGNATURES[name].arguments)(address)
                           for name, address in self.address.items()}
        self._lock = threading.Lock()
        self._loaded: dict[tuple[int, bytes, str], int] = {}
        self._contexts: dict[int, int] = {}
        self._check()

    def _check(self) -> None:
        """Whether it is new enough and has a device."""
        vendor = VENDORS[self.kind]
        code = self._functions["init"](0) if "init" in self._functions else OK
        found = ctypes.c_int()
        if code == OK and "version" in self._functions:
            self.call("version", ctypes.addressof(found))
        missing = [getattr(row, self.kind) for name, row in SIGNATURES.items()
                   if getattr(row, self.kind) and name not in self._functions]
        least = LEAST_VERSION[self.kind]
        if missing or (code == OK and found.value < least):
            why = f"it has no {missing[0]}" if missing else f"it has version {found.value}, the least is {least}"
            raise DeviceError(f"the driver of {vendor} is too old", why=why, do="install a newer driver")
        count = ctypes.c_int()
        if code == OK:
            code = self._functions["device_count"](ctypes.addressof(count))
        if code not in (OK, NO_DEVICE):
            raise DeviceError(f"the driver of {vendor} does not start", why=self.text(code),
                              do="look whether the vendor's tool (nvidia-smi, rocm-smi) sees the card")
        if code == NO_DEVICE or count.value == 0:
            name, value = visible_devices(self.kind)
            hidden = value is not None
            raise DeviceError(f"the driver of {vendor} shows no device",
                              why=f"the variable {name} of the environment is {value!r}" if hidden else
                              "the machine has none, or this process may not see it",
                              do=f"unset {name}, or name a device there" if hidden else "run on a machine with a card")
        self.count = count.value

    # --- calls

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function.

        Raises:
            DeviceError: its result is an error.
        """
        code = self._functions[name](*arguments)
        if code != OK:
            raise self.error(code, getattr(SIGNATURES[name], self.kind))

    def text(self, code: int) -> str:
        """What the driver says of an error."""
        found = ctypes.c_char_p()
        if "error_text" in self._functions and not self._functions["error_text"](code, ctypes.addressof(found)):
            return f"{(found.value or b'').decode(errors='replace')} (error {code})"
        return f"error {code}"

    def error(self, code: int, doing: str) -> DeviceError:
        """The error for a result that is not 0."""
        if code == OUT_OF_MEMORY:
            found = DeviceError.no_memory(self._memory(), doing)
        else:
            found = DeviceError("a call of the driver failed", where=doing, why=self.text(code),
                                do="after an invalid access the process has to end; see what ran before")
        found.code = code
        return found

    def _memory(self) -> str:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        if self._functions["memory_info"](ctypes.addressof(free), ctypes.addressof(total)):
            return "the driver does not say how much is free"
        return f"{free.value} of {total.value} bytes are free, counting what other processes hold"

    def _new(self, name: str, *arguments: Any) -> int:
        """What a function returns by its first argument."""
        found = ctypes.c_uint64()
        self.call(name, ctypes.addressof(found), *arguments)
        return found.value

    # --- devices

    def attribute(self, name: str, device: int = 0) -> int:
        """A number of a device, by a name of `ATTRIBUTES`."""
        found = ctypes.c_int()
        self.call("device_attribute", ctypes.addressof(found), ATTRIBUTES[self.kind][name], device)
        return found.value

    def name(self, device: int = 0) -> str:
        """What the vendor calls it."""
        found = ctypes.create_string_buffer(256)
        self.call("device_name", ctypes.addressof(found), len(found), device)
        return found.value.decode(errors="replace")

    def memory(self, device: int = 0) -> int:
        """Its bytes of memory."""
        return self._new("device_memory", device)

    def context(self, device: int) -> int:
        """The primary context of a device, which PyTorch uses too."""
        with self._lock:
            if device not in self._contexts:
                self._contexts[device] = self._new("retain_context", device)
            return self._contexts[device]

    @contextlib.contextmanager
    def current(self, device: int) -> Iterator[None]:
        """Inside, the calling thread's current context is that of a device."""
        self.call("push_context", self.context(device))
        try:
            yield
        finally:
            self._new("pop_context")

    # --- machine code

    def function(self, image: bytes, entry: str, shared: int, device: int = 0) -> int:
        """The handle of a kernel in an image of machine code, loaded once. shared: bytes of dynamic shared memory."""
        key = device, hashlib.sha256(image).digest(), entry
        with self._lock:
            found = self._loaded.get(key)
        if found is None:
            with self.current(device):
                data = ctypes.create_string_buffer(image, len(image))
                found = self._new("get_function", self._new("load_module", ctypes.addressof(data)), entry.encode())
                if shared > SHARED_USUAL and "set_function_attribute" in self._functions:
                    self.call("set_function_attribute", found, SHARED_BYTES, shared)
            with self._lock:
                found = self._loaded.setdefault(key, found)
        return found

    # --- memory of the host, streams, events

    def pinned(self, bytes_: int) -> int:
        """The address of so many bytes of the host's memory that every device can read and write.

        Raises:
            DeviceError: there is none.
        """
        return self._new("allocate_host", bytes_, 1)

    def stream(self, device: int) -> int:
        """A new stream."""
        with self.current(device):
            return self._new("create_stream", NO_BLOCKING)

    def event(self) -> int:
        """A new event, in the current context."""
        return self._new("create_event", NO_TIMING)

    def passed(self, event: int) -> bool:
        """Whether everything before an event is done."""
        code = self._functions["query_event"](event)
        if code not in (OK, NOT_READY):
            raise self.error(code, getattr(SIGNATURES["query_event"], self.kind))
        return code == OK

    def end_capture(self, stream: int) -> int:
        """The graph of what was put on a stream since its capture began."""
        found = ctypes.c_uint64()
        self.call("end_capture", stream, ctypes.addressof(found))
        return found.value

    def graph(self, graph: int) -> int:
        """An executable graph."""
        return self._new("instantiate_graph", graph, 0)

    def free(self, name: str, handle: int) -> None:
        """Gives something back with function `name`; errors at the end of a process are nobody's."""
        self._functions[name](handle)


@lru_cache(maxsize=2)
def open_driver(kind: str) -> DeviceDriver:
    """The vendor's driver of this machine; kind: "cuda" or "hip".

    Raises:
        DeviceError: there is none, it is too old, or it shows no device.
    """
    tried = []
    for name in LIBRARIES[kind]:
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            tried.append(str(error))
            continue
        return DeviceDriver(kind, addresses_of(kind, library), library)
    raise DeviceError(f"there is no driver of {VENDORS[kind]} on this machine", why=tried[0],
                      do="install the vendor's driver, or run on the CPU")


def addresses_of(kind: str, library: ctypes.CDLL) -> dict[str, int]:
    """The addresses of those functions that a library has."""
    found = {}
    for name, row in SIGNATURES.items():
        symbol = getattr(row, kind)
        if symbol and hasattr(library, symbol):
            found[name] = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value or 0
    return found
