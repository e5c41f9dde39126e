"""The backend interface: what a device gives to the compiler and to the runtime. The one seam between both and devices.

    Target       a device as a value: what it supports, which library it has for an operation
    its compile  loop programs -> kernels, which nobody else looks into
    PlanRunner   runs one plan: specialise it to sizes (an opaque payload), make the frame of a call, run it
    Streams      a device's queues of work, where a call returns before its work is done

A compilation carries a target (backend/targets.py); nothing outside of `backend` asks what it is.
"""
from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from anyshape.plan.ir.program import Plan
from anyshape.plan.ir.size_function import SizeFunction

if TYPE_CHECKING:
    from anyshape.kernel.loop_ir.program import LoopProgram
    from anyshape.kernel.schedule.hardware_params import HardwareParams

# how the run of a plan ends: well; a step's check failed; Python failed at a step; an input with elements has no
# address; or it is on its stream, and how it ends is not known yet
DONE, CHECK_FAILED, CALLBACK_FAILED, NO_MEMORY, ISSUED = range(5)


class ObjectCache(Protocol):
    """Stores object code by key; both methods may be called from several threads."""

    def get(self, key: str) -> bytes | None:
        """The bytes stored under `key`, or None."""

    def put(self, key: str, data: bytes) -> None:
        """Keep `data` under `key`."""

    def put_first(self, key: str, data: bytes) -> bytes:
        """Keep `data` under `key` unless something is there; what is there then."""


class Kernel(Protocol):
    """A compiled kernel; everything but its name is its target's own."""

    @property
    def name(self) -> str:
        """By which the regimes of a plan's steps know it."""


@dataclass(frozen=True, slots=True)
class PlacedPlan:
    """A plan at given sizes, with everything laid out: what a runner makes a payload of.

    encoded: the runner's own part of what the plan's size function returned. values: symbol -> value. offsets: (slot,
    byte) of what lies in the two blocks of memory of a call, one after the other: up to `kept` bytes in the lower one,
    the rest in the upper one. skipped: optional steps that do not run. actions: before which step Python does
    something, in order; they are numbered from the number of the plan's steps on. given: how many slots a call brings,
    which are the first ones; empty: how many of these have no elements, and so no address. reused_until: the lower
    block is there only up to this step; -1: as long as the call.
    """

    encoded: Any
    values: Mapping[str, int]
    offsets: Sequence[int]
    kept: int
    skipped: frozenset[int] = frozenset()
    actions: tuple[int, ...] = ()
    given: int = 0
    empty: int = 0
    reused_until: int = -1


class Payload(Protocol):
    """A plan specialised to sizes. It is immutable, and several calls may use it at once."""

    @property
    def scratch(self) -> int:
        """Bytes of scratch that each thread needs."""

    @property
    def calls(self) -> bool:
        """Whether Python does some step."""

    @property
    def scratch_below(self) -> bool:
        """Whether scratch may lie in the lower block, where that is there up to a step only: none is used later."""


class PythonSteps(Protocol):
    """A running call that does steps for its runner: by PyTorch, or moving values out of memory."""

    error: BaseException | None

    def step(self, number: int) -> None:
        """Does step `number`."""


class PlanRunner(Protocol):
    """Runs one plan on one target. Threads may share it. on_host: results are memory of the host, with its pages."""

    sizes: SizeFunction
    on_host: bool

    def specialize(self, placement: PlacedPlan) -> Payload:
        """The plan at given sizes.

        Raises:
            VerifyError: no version of a kernel fits these sizes: a bug of the compiler.
        """

    def scratch_of_steps(self, payload: Any) -> Mapping[int, int]:
        """Bytes of scratch that each thread needs, by step; those that need none may be missing."""

    def versions(self, payload: Any) -> Mapping[int, tuple[str, ...]]:
        """In words, which versions of its kernels a step runs at these sizes, by step: of several the first one whose
        alignment all addresses have. Empty where the plan says it all."""

    def frame(self, payload: Any, addresses: Sequence[int], lower: int, upper: int, scratch: int, threads: int) -> Any:
        """The frame of one call, which belongs to it alone.

        Args:
            addresses: of what the call brings, by slot from 1 on: inputs, saved tensors, results; 0: not there yet.
            lower, upper, scratch: addresses of the two blocks, and of the scratch of all threads.
        """

    def bind(self, frame: Any, slot: int, address: int) -> None:
        """Tells where a buffer is, before the first step that touches it."""

    def run(self, frame: Any, steps: PythonSteps | None = None) -> int:
        """Runs a frame, once, on the calling thread's current stream. `steps`: does what Python does.

        Returns DONE, CHECK_FAILED, CALLBACK_FAILED or NO_MEMORY; of a device with streams also ISSUED: the work is on
        the stream, and of how it ends only DONE and CHECK_FAILED are open. The frame is kept until `ended` says which.
        Kernels behind a check that failed write nothing, in either case.
        """

    def ended(self, frame: Any, wait: bool) -> int:
        """How an ISSUED run ended: DONE or CHECK_FAILED; ISSUED while that is open. `wait`: until it is known. May be
        asked more than once, from any thread."""

    def timed(self, payload: Any, frame: Any, steps: PythonSteps | None = None) -> tuple[int, list[tuple[int, float]]]:
        """`run` of a frame of `payload`, and (step, seconds) of what ran; a group of steps is one."""

    def failure(self, frame: Any) -> tuple[int, int]:
        """After a run that did not end well: its step, and the position in `checks` from 1 on of what failed there."""


class HostMemory(Protocol):
    """A piece of the host's memory, there as long as somebody has it."""

    address: int


class Streams(Protocol):
    """The streams of one device: queues of work, each in order, several side by side. Marks are points of a queue
    (CUDA's events). All methods but `synchronize` return at once, and may be called from any thread."""

    def current(self) -> int:
        """The stream that the calling thread's work goes to."""

    def allocate(self, bytes_: int, stream: int) -> Any:
        """A tensor of bytes for work on a stream, aligned as the target wants it. When nobody has it any more, its
        memory is used anew only behind the work so far of this stream and of those that `uses` named, as torch's
        caching allocators do.

        Raises:
            RuntimeError: there is not enough memory.
        """

    def uses(self, memory: Any, stream: int) -> None:
        """Another stream works on what `allocate` returned (torch's `Tensor.record_stream`)."""

    def mark(self, stream: int) -> Any:
        """A mark behind everything that is on the stream now."""

    def passed(self, mark: Any) -> bool:
        """Whether everything before the mark is done."""

    def wait(self, stream: int, mark: Any) -> None:
        """What comes to the stream from now on runs behind the mark. The host does not wait."""

    def synchronize(self, stream: int) -> None:
        """Returns when everything on the stream is done."""

    def side(self, name: str) -> int:
        """A stream for copies beside the calls, which is made when it is first asked for: "out" or "back"."""

    def pinned(self, bytes_: int) -> HostMemory:
        """Memory of the host that the device copies to and from while other work runs.

        Raises:
            RuntimeError: there is not enough memory.
        """

    def copy(self, target: int, source: int, bytes_: int, stream: int, to_host: bool | None = None) -> None:
        """Copies on a stream, by address: inside the device (None), to the host, or to the device."""

    def resident(self) -> int:
        """Bytes that the process has on the device."""


class HostRoutines(Protocol):
    """Native routines of the host that every target's runtime uses: searches on numbers, bytes and bits."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the state that `draw` takes."""

    def search(self, columns: array[int], count: int, fixed: int, wall: int, bound: int, good: int, top: int,
               room: array[int], starts: array[int], near: array[int] | None, repairs: bool) -> int:
        """The lowest top of some ways to place items (backend/cpu/routines/offset_assignment.py): of the greedy ones,
        or of those that repair what these left."""

    def neighbours(self, columns: array[int], count: int, fixed: int, order: array[int], starts: array[int],
                   near: array[int] | None) -> int:
        """Which items are alive with which, and how many pairs there are."""

    def live_peak(self, columns: array[int], count: int, steps: int) -> int:
        """The largest sum of bytes that are live at one of the points 0 .. steps. columns: int64, bytes, first and last
        steps of `count` items side by side."""

    def apart(self, starts: array[int], sizes: array[int], which: array[int], pairs: array[int], kept: int) -> bool:
        """Whether buffers lie apart: see `Apart` of plan/layout_judge.py."""

    @property
    def budget_search(self) -> Any:
        """The search for what to recompute or to offload: see runtime/budget/greedy_search.py."""

    def digest(self, address: int, bytes_: int) -> int:
        """A digest of a piece of memory."""

    def draw(self, state: int, result: int, count: int, limit: int) -> None:
        """Bools drawn from the state of a random generator: see runtime/torch_ops/bernoulli.py."""

    def xla_handler(self, called: int, version: int) -> int:
        """The address of a handler of XLA's foreign function interface, which lives as long as these routines: see
        frontend/jax_jit/ffi_handler.py."""


class Target(Protocol):
    """A device that programs are compiled for, as a value.

    device: torch's word for it, and for that of its tensors. machine_key: everything that its speed depends on.
    hardware: what fusions and schedules are chosen by. streams: None where a run has ended when it returns.
    """

    device: str
    streams: Streams | None
    hardware: HardwareParams

    @property
    def machine_key(self) -> str: ...

    @property
    def unsupported(self) -> frozenset[str]:
        """The scalar instructions that its kernels lack."""

    def emit(self, program: LoopProgram) -> str:
        """The text of a kernel: the same for the same program, always."""

    def build(self, texts: Sequence[str]) -> Sequence[Kernel]:
        """Compiles and loads kernels. Code lives as long as its kernels."""

    @property
    def own_ops(self) -> frozenset[str]:
        """Of "attention" and "bernoulli", what it does itself, as an op of its own; PyTorch's operators do the others.
        """

    def multiplies(self, dtype: str) -> bool:
        """Whether it has products and attention of this dtype, by the device's features."""

    def multiplies_any_strides(self, dtype: str) -> bool:
        """Whether it does products of this dtype itself, whatever the strides of the operands."""

    def products_in_words(self, dtype: str) -> str:
        """Which library does products of a dtype, where that was measured; "" where it was not."""

    def warm(self) -> None:
        """Loads what most programs need. May run in another thread, beside a trace."""

    def allocator(self) -> Callable[[tuple[int, ...], tuple[int, ...], Any], Any]:
        """What allocates a tensor of PyTorch's on the device, for work on the calling thread's current stream: of its
        sizes, strides in elements, and PyTorch's dtype."""

    def runner(self, plan: Plan, kernels: Sequence[Any]) -> PlanRunner:
        """What runs an allocated plan; kernels: those that it names, in any order."""
