"""Hardware parameters: what the choice of fusions and schedules knows of a target; numbers only, supplied by it."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Speeds(NamedTuple):
    """What each thread that runs does in a second: operations of products by dtype, and bytes read and written.

    out, back: bytes that are moved out of memory, and back, where no store says how fast it is.
    """

    products: Mapping[str, float]
    bytes: float
    out: float = 2e9
    back: float = 4e9


@dataclass(frozen=True, slots=True)
class HardwareParams:
    """The parameters of a target (as TVM's `HardwareParams`, and some costs). They are estimates, and decide about
    speed; and about the last bits of long sums, which are added up in another order: targets whose results are to be
    equal have equal parameters.

    vector_lanes: f32 elements of a vector register.
    max_load_stride: elements; a load with a stride up to this reads whole vectors and picks from them.
    min_vector_row: elements of a row, up to which vectors over neighbouring rows are faster than vectors along it.
    cache_line_bytes: bytes that memory is read and written by.
    row_buffer_bytes: of a thread's row buffer that stays in the nearest cache while rows are gone through.
    near_cache_bytes: that one thread reads in one stage and still finds in a near cache in the next one.
    core_cache_bytes: that stay in the caches of one core from kernel to kernel.
    parallelism: independent pieces of work that keep all threads busy.
    thread_elements: elements from which on another piece of work is worth a thread.
    write_streams: results that one kernel writes at once.
    bytes_per_operation: bytes of memory traffic that take as long as a vector operation takes on one element.
    free_operations: operations on an element that are repeated rather than thought about.
    row_buffer_operations: operations that take as long as storing an element in a row buffer and loading it again.
    launch_bytes: bytes that may be held longer for the sake of one kernel launch less.
    band_bytes: of a product's result, in a band of rows that its consumer still finds in the caches.
    speeds: where nothing is measured.
    product_share: the speed of the target's own products with an epilogue, of its library's products (plan/schedule/
        gemm_epilogue.py); 0: it has none, or they were not measured.
    """

    vector_lanes: int
    max_load_stride: int
    min_vector_row: int
    cache_line_bytes: int
    row_buffer_bytes: int
    near_cache_bytes: int
    core_cache_bytes: int
    parallelism: int
    thread_elements: int
    write_streams: int
    bytes_per_operation: float
    free_operations: int
    row_buffer_operations: int
    launch_bytes: int
    band_bytes: int
    speeds: Speeds
    product_share: float = 0.0
