"""The table of driver API functions: what this package calls of libcuda, and of libamdhip64 by other names.

    copy_to_host   cuMemcpyDtoHAsync_v2    hipMemcpyDtoHAsync    (pointer, device address, bytes, stream)

Both have the same arguments in the same order, so that one caller serves both. A native loop calls some of them by
address (backend/triton/launch_loop.py); Python calls the others.
"""
from __future__ import annotations

import ctypes
from dataclasses import dataclass

INT, UINT, LONG, SIZE, POINTER, ADDRESS, TEXT = (ctypes.c_int, ctypes.c_uint, ctypes.c_ulonglong, ctypes.c_size_t,
                                                 ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p)


@dataclass(frozen=True, slots=True)
class DriverFunction:
    """A function by its names, and the C types of its arguments; its result is an int, 0: well. hip: "" where AMD's
    driver needs no such call."""

    cuda: str
    hip: str
    arguments: tuple[type, ...]


def _row(cuda: str, hip: str, *arguments: type) -> DriverFunction:
    return DriverFunction(cuda, hip, arguments)


SIGNATURES = {
    "init": _row("cuInit", "hipInit", UINT),
    "version": _row("cuDriverGetVersion", "hipDriverGetVersion", POINTER),
    "error_text": _row("cuGetErrorString", "hipDrvGetErrorString", INT, POINTER),
    "device_count": _row("cuDeviceGetCount", "hipGetDeviceCount", POINTER),
    "device": _row("cuDeviceGet", "hipDeviceGet", POINTER, INT),
    "device_name": _row("cuDeviceGetName", "hipDeviceGetName", POINTER, INT, INT),
    "device_attribute": _row("cuDeviceGetAttribute", "hipDeviceGetAttribute", POINTER, INT, INT),
    "device_memory": _row("cuDeviceTotalMem_v2", "hipDeviceTotalMem", POINTER, INT),
    "retain_context": _row("cuDevicePrimaryCtxRetain", "hipDevicePrimaryCtxRetain", POINTER, INT),
    "push_context": _row("cuCtxPushCurrent_v2", "hipCtxPushCurrent", POINTER),
    "pop_context": _row("cuCtxPopCurrent_v2", "hipCtxPopCurrent", POINTER),
    "memory_info": _row("cuMemGetInfo_v2", "hipMemGetInfo", POINTER, POINTER),
    "allocate_host": _row("cuMemHostAlloc", "hipHostMalloc", POINTER, SIZE, UINT),
    "free_host": _row("cuMemFreeHost", "hipHostFree", POINTER),
    "load_module": _row("cuModuleLoadData", "hipModuleLoadData", POINTER, POINTER),
    "get_function": _row("cuModuleGetFunction", "hipModuleGetFunction", POINTER, POINTER, TEXT),
    "set_function_attribute": _row("cuFuncSetAttribute", "", POINTER, INT, INT),
    "launch": _row("cuLaunchKernel", "hipModuleLaunchKernel", POINTER, *[UINT] * 7, *[POINTER] * 3),
    "copy": _row("cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync", ADDRESS, ADDRESS, SIZE, POINTER),
    "copy_to_host": _row("cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync", POINTER, ADDRESS, SIZE, POINTER),
    "copy_to_device": _row("cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync", ADDRESS, POINTER, SIZE, POINTER),
    "create_stream": _row("cuStreamCreate", "hipStreamCreateWithFlags", POINTER, UINT),
    "destroy_stream": _row("cuStreamDestroy_v2", "hipStreamDestroy", POINTER),
    "synchronize_stream": _row("cuStreamSynchronize", "hipStreamSynchronize", POINTER),
    "wait_event": _row("cuStreamWaitEvent", "hipStreamWaitEvent", POINTER, POINTER, UINT),
    "begin_capture": _row("cuStreamBeginCapture_v2", "hipStreamBeginCapture", POINTER, INT),
    "end_capture": _row("cuStreamEndCapture", "hipStreamEndCapture", POINTER, POINTER),
    "instantiate_graph": _row("cuGraphInstantiateWithFlags", "hipGraphInstantiateWithFlags", POINTER, POINTER, LONG),
    "launch_graph": _row("cuGraphLaunch", "hipGraphLaunch", POINTER, POINTER),
    "destroy_graph": _row("cuGraphDestroy", "hipGraphDestroy", POINTER),
    "destroy_graph_exec": _row("cuGraphExecDestroy", "hipGraphExecDestroy", POINTER),
    "create_event": _row("cuEventCreate", "hipEventCreateWithFlags", POINTER, UINT),
    "destroy_event": _row("cuEventDestroy_v2", "hipEventDestroy", POINTER),
    "record_event": _row("cuEventRecord", "hipEventRecord", POINTER, POINTER),
    "query_event": _row("cuEventQuery", "hipEventQuery", POINTER),
    "synchronize_event": _row("cuEventSynchronize", "hipEventSynchronize", POINTER),
}

# numbers of both vendors' headers: of attributes of a device, of results, of flags
ATTRIBUTES = {
    "cuda": {"major": 75, "minor": 76, "processors": 16, "warp": 10, "shared_bytes": 97, "threads": 39,
             "registers": 12, "cache_bytes": 38},
    "hip": {"major": 23, "minor": 61, "processors": 63, "warp": 87, "shared_bytes": 74, "threads": 57,
            "registers": 71, "cache_bytes": 19},
}
OK, OUT_OF_MEMORY, NO_DEVICE, NOT_READY = 0, 2, 100, 600
SHARED_BYTES = 8  # attribute of a function: dynamic shared memory that it may have
SHARED_USUAL = 48 << 10  # bytes of it without that attribute
NO_TIMING = 2  # of an event, which is quicker then
NO_BLOCKING = 1  # of a stream, which does not wait for the default one
LIBRARIES = {"cuda": ("libcuda.so.1", "nvcuda.dll"), "hip": ("libamdhip64.so", "libamdhip64.so.6", "libamdhip64.so.7",
                                                             "amdhip64_6.dll")}
LEAST_VERSION = {"cuda": 12000, "hip": 60000000}  # as the drivers write them: CUDA 12.0, ROCm 6.0
VENDORS = {"cuda": "NVIDIA", "hip": "AMD"}
