"""The plan: the program of the host. Steps in order, buffers with byte sizes as formulas, an offset for each.

Nothing here runs; runtime/call/executable.py does. plan/ir/show.py prints a plan.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from anyshape.ir.asynchronous import START, WAIT
from anyshape.ir.graph import Attr, Literal
from anyshape.ir.types import TensorType
from anyshape.plan.ir.home import (
    External,
    Home,
    IndexedHome,
    Input,
    Output,
    Recomputed,
    Restored,
    RestoredBase,
    Saved,
    Temp,
)
from anyshape.sym.expr import Expr, Size
from anyshape.sym.facts import Facts


@dataclass(frozen=True, slots=True)
class Buffer:
    """A piece of memory of the program.

    bytes: of the dense contents, unaligned, a size over the symbols.
    home: where it lives (plan/ir/home.py).
    first, last: steps (0-based, inclusive) between which the contents must be kept.
    device: PyTorch's word for what its memory belongs to.
    """

    name: str
    bytes: Size
    home: Home
    first: int
    last: int
    device: str = "cpu"

    @property
    def index(self) -> int:
        """Its position among the inputs, the outputs or the tape's entries; 0 where the home has none."""
        return self.home.index if isinstance(self.home, IndexedHome) else 0

    @property
    def is_input(self) -> bool:
        """Whether it is a tensor of the caller."""
        return isinstance(self.home, Input)

    @property
    def is_output(self) -> bool:
        """Whether it is a tensor allocated for the caller."""
        return isinstance(self.home, Output)

    @property
    def is_temp(self) -> bool:
        """Whether it is in the arena, in every call, and free after its last step."""
        return isinstance(self.home, Temp)

    @property
    def is_saved(self) -> bool:
        """Whether it is in the forward's arena and kept for the backward."""
        return isinstance(self.home, Saved)

    @property
    def is_restored(self) -> bool:
        """Whether it is an entry of the tape."""
        return isinstance(self.home, Restored)

    @property
    def is_external(self) -> bool:
        """Whether an operator of PyTorch makes it."""
        return isinstance(self.home, External)

    @property
    def is_recomputed(self) -> bool:
        """Whether optional steps make it on the way to a saved value that they compute again."""
        return isinstance(self.home, Recomputed)

    @property
    def is_parameter(self) -> bool:
        """Whether the program is called with it: an input, or an entry of the tape."""
        return isinstance(self.home, (Input, Restored))

    @property
    def in_arena(self) -> bool:
        """Whether it has a place in the arena in every call."""
        return isinstance(self.home, (Temp, Saved))

    @property
    def is_optional(self) -> bool:
        """Whether it has a place in the arena only in calls that run the optional steps that make it."""
        return isinstance(self.home, (RestoredBase, Recomputed))

    @property
    def is_allocated_tensor(self) -> bool:
        """Whether it is a tensor of its own that PyTorch allocates during the call."""
        return isinstance(self.home, (Output, External))

    @property
    def is_allocated(self) -> bool:
        """Whether every call makes it, in the arena or as a tensor."""
        return self.in_arena or self.is_allocated_tensor

    @property
    def survives_call(self) -> bool:
        """Whether its memory is kept after the last step: for the caller, or for the backward."""
        return isinstance(self.home, (Output, Saved))

    @property
    def has_tape_entry(self) -> bool:
        """Whether the tape's entry `index` says what it is in the forward."""
        return isinstance(self.home, (Restored, RestoredBase))


@dataclass(frozen=True, slots=True)
class Window:
    """A strided view of a buffer: what a step reads or writes. `offset` and the type's strides are in elements."""

    buffer: str
    type: TensorType
    offset: Size = 0


@dataclass(frozen=True, slots=True)
class Regime:
    """One version of a kernel: it may be used when every condition (size >= 0) holds. `then`: kernels that follow it;
    where there are any, all of them get what the step hands on after its params."""

    kernel: str
    conditions: tuple[Size, ...]
    sizes: tuple[Size, ...]
    then: tuple[str, ...] = ()

    @property
    def kernels(self) -> tuple[str, ...]:
        """All of its kernels in order."""
        return (self.kernel, *self.then)


@dataclass(frozen=True, slots=True)
class KernelStep:
    """Run a fused kernel: the first regime whose conditions hold; `params` are given to it as pointers in order.
    `params[i].offset` is taken into account by the host (pointer + offset). `outputs` are the written params; `reuse`
    all (input, output) params of which the two may share memory; `handed` is what the kernels of a regime give each
    other; `along`: of a flat kernel (kernel/loop_ir/elementwise.py), the params of which it takes element k at point k;
    the number of points is its last size; `checks`: (op, operand, source line) of what may fail. `origin`: the position
    among the items of its graph's fusion that it was made of, as of the other steps (of an optional step, of those of
    its segment); -1: none."""

    regimes: tuple[Regime, ...]
    params: tuple[Window, ...]
    outputs: tuple[int, ...]
    where: str = ""
    reuse: tuple[tuple[int, int], ...] = ()
    handed: tuple[Window, ...] = ()
    along: tuple[int, ...] = ()
    checks: tuple[tuple[str, str, str], ...] = ()
    origin: int = field(default=-1, compare=False)


@dataclass(frozen=True, slots=True)
class LibraryStep:
    """A native library call, `op` "matmul" or "matmul_add": outputs[0] = alpha * inputs[0] @ inputs[1], batched over
    all leading dims (inputs may be strided windows, batch strides may be 0), plus inputs[2] * beta when there is a
    third (may be a broadcast window). alpha and beta are attributes, 1 when left out. Or a product of groups
    (ops/matmul.py), or attention (ops/attention.py)."""

    op: str
    inputs: tuple[Window, ...]
    outputs: tuple[Window, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()
    where: str = ""
    origin: int = field(default=-1, compare=False)

    @property
    def dtype(self) -> str:
        """What the terms of a product are rounded to before they are multiplied; "" where its windows differ in it."""
        attrs = dict(self.attrs)
        if "rounded" in attrs:
            return str(attrs["rounded"])
        if self.op == "matmul_bytes":
            return "u8"
        dtypes = {window.type.dtype for window in (*self.inputs, *self.outputs)}
        return dtypes.pop() if len(dtypes) == 1 else ""


@dataclass(frozen=True, slots=True)
class ExternStep:
    """A call of a PyTorch operator by name, with an argument template.

    target: e.g. "aten.convolution.default", resolved under torch.ops.
    inputs: windows (tensors) and sizes, in the order that the template refers to them.
    template: nested tuples as the attr of the node "extern" (see ops/extern.py).
    outputs: windows of the buffers the results become (home `External`, or copied into place for other homes); a size
        symbol bound by a result stands in `symbols` as (result index, name).
    effect: its place, from 1, among the calls that do more than give their results (draw random numbers): the order of
        such steps stays (but that of a wait for a collective); 0: it does no more.
    """

    target: str
    inputs: tuple[Window | Expr | Literal, ...]
    template: Attr
    outputs: tuple[Window | None, ...]
    where: str = ""
    effect: int = 0
    origin: int = field(default=-1, compare=False)


@dataclass(frozen=True, slots=True)
class TiledGemmStep:
    """A product and the flat kernel that alone reads its result, param `result`, for a band of so many rows after the
    other (plan/schedule/gemm_consumer_tiling.py). So of the result there is one band at a time; all else is there as a
    whole."""

    product: LibraryStep
    kernel: KernelStep
    result: int
    rows: int

    @property
    def band(self) -> Window:
        """The result, as much as there is of it at a time; the last band may have fewer rows."""
        made = self.product.outputs[0]
        return Window(made.buffer, TensorType(made.type.dtype, (self.rows, *made.type.shape[1:])))

    @property
    def where(self) -> str:
        """The source lines that it stems from."""
        return "; ".join(filter(None, dict.fromkeys((self.product.where, self.kernel.where))))


@dataclass(frozen=True, slots=True)
class CopyStep:
    """Copy a window into another of the same shape (a mutated input receives its value, an output its layout)."""

    source: Window
    target: Window
    where: str = ""


@dataclass(frozen=True, slots=True)
class MemoryStep:
    """Let go of some tensors (buffers `Input`, `Restored`, `External`) and allocate those of some outputs. `chunk`: of
    the kept block, where that is in chunks, to give back; or -1."""

    take: tuple[str, ...]
    drop: tuple[str, ...]
    where: str = ""
    chunk: int = -1


@dataclass(frozen=True, slots=True)
class RecomputeStep:
    """A saved value that a backward can compute again: the forward's buffer, this plan's (`RestoredBase`), and the tape
    buffers that lie in it, each with its first byte there. Values of one segment share steps."""

    saved: str
    buffer: str
    segment: int
    windows: tuple[tuple[str, Size], ...]


Step = KernelStep | LibraryStep | TiledGemmStep | ExternStep | CopyStep | MemoryStep


@dataclass(frozen=True, slots=True)
class Plan:
    """The program of the host: steps in order, and where every buffer lies. Bytes and sizes are formulas of symbols.

    inputs: one entry per graph input: a TensorType, or the name of the symbol that a whole number binds.
    outputs: one entry per graph output: a window (of an `Output`, `Input` or `External`), a size, or None.
    saved: one entry per tape entry of a forward program: a window, or a size.
    offsets: buffer name -> byte offset in the arena, for `Temp` and `Saved` (aligned to 64), and for `Restored` when
        the entry lies in the forward's kept block.
    arena: bytes of the arena, a formula.
    restored: (backward) positions among `inputs` of the tape's entries, in the tape's order. A backward program is
        called with the tape, then the other inputs.
    kept: bytes at the bottom of the arena that hold the saved values; a block of memory of its own, which lives until
        the backward program has run. The rest, [kept, arena), is free after the call. No buffer crosses the border.
    nonnegative: sizes of tensors inside that the facts do not show to be at least 0, and what a backward needs to be;
        where one is below, the program does not apply.
    selected: what is below 0 where an index selects an element of a dim that has none, and the user's line.
    together: runs of steps, first and last, that the host may do as one: products side by side, then kernels one after
        another (plan/schedule/launch_grouping.py).
    again: (backward) what can be computed again in place of being kept; optional: the steps that do
    (plan/remat/insert_recompute.py). spent: (forward) saved buffers that nothing needs after the last step of the
    backward that reads them: no second
        backward, and nothing that is computed again. It may write over them.
    chunks: (backward) the forward's saved buffers by chunk: the chunks can be given back one after another.
    whole: (forward) of a whole step: its one backward takes no gradients, and all its inputs are the caller's.
    """

    name: str
    inputs: tuple[TensorType | str, ...]
    outputs: tuple[Window | Expr | Literal | None, ...]
    saved: tuple[Window | Expr | Literal, ...]
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    offsets: tuple[tuple[str, Size], ...]
    arena: Size
    facts: Facts
    restored: tuple[int, ...] = ()
    kept: Size = 0
    nonnegative: tuple[Size, ...] = ()
    selected: tuple[tuple[Size, str], ...] = ()
    divided: tuple[tuple[Size, str], ...] = ()
    together: tuple[tuple[int, int], ...] = ()
    again: tuple[RecomputeStep, ...] = ()
    optional: tuple[int, ...] = ()
    chunks: tuple[tuple[str, ...], ...] = ()
    spent: tuple[str, ...] = ()
    whole: bool = False

    def parameter_number(self, buffer: Buffer) -> int:
        """The position among the inputs of a buffer that the program is called with."""
        return self.restored[buffer.index] if buffer.is_restored else buffer.index


def step_writes(step: object) -> list[Window]:
    """The windows that a step writes."""
    if isinstance(step, KernelStep):
        return [*(step.params[k] for k in step.outputs), *step.handed]
    if isinstance(step, TiledGemmStep):
        return [step.band, *step_writes(step.kernel)]
    if isinstance(step, CopyStep):
        return [step.target]
    if isinstance(step, MemoryStep):
        return []
    return [w for w in step.outputs if w is not None]  # type: ignore[attr-defined]


def is_launch(step: Step) -> bool:
    """Does the step launch an asynchronous collective? Its results are the messages."""
    return isinstance(step, ExternStep) and step.target == START


def is_wait(step: Step) -> bool:
    """Does the step wait for an asynchronous collective, whose messages are its first operands?"""
    return isinstance(step, ExternStep) and step.target == WAIT


def touched(step: Step) -> list[Window]:
    """The windows that a step reads or writes."""
    if isinstance(step, KernelStep):
        return [w for w in (*step.params, *step.handed) if w.buffer != "status"]
    if isinstance(step, TiledGemmStep):
        others = (w for w in touched(step.kernel) if w.buffer != step.band.buffer)
        return [*step.product.inputs, step.band, *others]
    if isinstance(step, CopyStep):
        return [step.source, step.target]
    if isinstance(step, MemoryStep):
        return []
    windows = [*step.inputs, *step.outputs]
    return [w for w in windows if isinstance(w, Window)]


def parts_of(step: Step) -> tuple[Step, ...]:
    """The steps that a step is made of: itself, or a product and a kernel."""
    return (step.product, step.kernel) if isinstance(step, TiledGemmStep) else (step,)


def origins(plan: Plan) -> list[int]:
    """The positions of fusion items, in the order in which the plan does them, optional steps left out."""
    optional = set(plan.optional)
    found = [getattr(part, "origin", -1) for number, step in enumerate(plan.steps) if number not in optional
             for part in parts_of(step)]
    return [origin for origin in found if origin >= 0]
