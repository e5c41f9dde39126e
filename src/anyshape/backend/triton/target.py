"""Device targets: what the compiler's choices know of a GPU, and its kernels."""
from __future__ import annotations

from anyshape.backend.triton.codegen.scalars import unsupported
from anyshape.kernel.schedule.hardware_params import HardwareParams, Speeds

__all__ = ["HARDWARE", "PRODUCT_SHARES", "unsupported"]

# Rows shorter than a vector are several to a tile (schedule.py), and tiles are transposed by Triton: what the schedules
# for short rows and far columns give on a CPU is not asked for. An H100's caches, and 132 multiprocessors, twice as
# many parts as keep them busy
HARDWARE = HardwareParams(
    vector_lanes=32, max_load_stride=1 << 30, min_vector_row=0, cache_line_bytes=128, row_buffer_bytes=0,
    near_cache_bytes=128 << 10, core_cache_bytes=32 << 20, parallelism=256, thread_elements=16384, write_streams=12,
    bytes_per_operation=0.05, free_operations=16, row_buffer_operations=32, launch_bytes=4 << 20,
    band_bytes=1 << 20, speeds=Speeds({"f32": 400e12, "f64": 60e12, "bf16": 700e12, "f16": 700e12}, 3e12, 50e9, 50e9))

# The speed of our own products, of the library's without what follows them, by architecture: the least of those that
# were measured, at 16384 x 2048 x 8192 on an H200 (docs/gpu.md), with the pass behind the library's taken off at the
# bandwidth above. Where none was measured the library does them.
PRODUCT_SHARES = {"sm_90": 0.84}
