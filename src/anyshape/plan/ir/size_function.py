"""Size-function codegen of a plan: everything about a plan that depends on sizes, as one generated Python function of
its symbols.

    plan with buffer m of 4*b*n bytes, ...
    -->  def shape(s_b, s_n):
             v0 = 4*s_b*s_n
             return (<what the plan's runner encodes>, (v0,), (0,), ...)

It is generated once per plan and called once per new shape: each formula is computed once, and equal windows share
what is made of them. The plan's runner (backend/interface.py) adds an expression of its own over the same formulas.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from anyshape.ir.types import TensorType
from anyshape.plan.ir.program import (
    Buffer,
    CopyStep,
    ExternStep,
    KernelStep,
    LibraryStep,
    MemoryStep,
    Plan,
    Step,
    TiledGemmStep,
    Window,
)
from anyshape.sym.expr import Expr, Size, symbols_of
from anyshape.sym.python_codegen import FUNCTIONS, Formulas, name_of

STATUS_BUFFER = "status"


@dataclass(frozen=True, slots=True)
class SizeFunction:
    """What is known of a plan before any size is.

    symbols: in the order of the arguments of `shape`.
    slots: buffer name -> number of its address in a call; those that a call brings come first: inputs, tape, outputs.
    placed: names of the buffers with a place in the arena, in the order of `sizes` and `offsets` in shape's result.
    shape: symbols -> (what the runner encodes, sizes of placed buffers, their offsets, kept, arena, types of inputs,
        of outputs, of saved, bytes of output buffers by output, the plan's `nonnegative`, and
        the sizes of its `selected` and `divided`); a type is (sizes, strides, offset in elements).
    windows: symbols -> types of the windows of each step by its number, which the host sees when it does the step.
    """

    symbols: tuple[str, ...]
    slots: Mapping[str, int]
    placed: tuple[str, ...]
    shape: Callable[..., tuple[Any, ...]]
    windows: Callable[..., StepWindows]


class Encoder(Protocol):
    """Adds what a plan's runner needs at given sizes."""

    def expression(self, formulas: PlanFormulas) -> tuple[str, Mapping[str, Any]]:
        """A Python expression over names of `formulas`, and the values of other names that it uses."""


class PlanFormulas(Formulas):
    """Prints windows and types of a plan beside its sizes."""

    def __init__(self, plan: Plan, slots: Mapping[str, int]) -> None:
        super().__init__()
        self.plan = plan
        self.slots = slots
        self.symbols |= {entry for entry in plan.inputs if isinstance(entry, str)}
        self.locals: dict[Any, str] = {}  # what layers that repeat have in common: text, or what it is made of -> name
        self.constants: dict[str, Any] = {}  # types that are numbers, as of weights: name -> what it is

    def window(self, window: Window) -> str:
        """Sizes, strides and offset of a window, as a name."""
        return self.type(window.type, window.offset)

    def type(self, type_: TensorType, offset: Size = 0) -> str:
        """Sizes, strides and offset, as a name."""
        shape, strides = type_.shape, type_.layout()
        if all(isinstance(n, int) for n in (*shape, *strides, offset)):
            known = self.locals.get((shape, strides, offset))
            if known is None:
                known = self.locals[shape, strides, offset] = f"c{len(self.constants)}"
                self.constants[known] = shape, strides, offset
            return known
        text = f"({self.tuple_of(shape)}, {self.tuple_of(strides)}, {self.number(offset)})"
        return self.local(text, text)

    def local(self, key: Any, text: str) -> str:
        """The name of a value, which is computed once."""
        if key not in self.locals:
            self.locals[key] = f"w{len(self.locals)}"
            self.lines.append(f"    {self.locals[key]} = {text}")
        return self.locals[key]

    def types(self, entries: Any) -> str:
        """A tuple of what windows, types and sizes are; None for what has no value."""
        return "(" + "".join(self._entry(entry) + ", " for entry in entries) + ")"

    def _entry(self, entry: Any) -> str:
        if isinstance(entry, Window):
            return self.window(entry)
        if isinstance(entry, TensorType):
            return self.type(entry)
        return "None" if entry is None or isinstance(entry, str) else self.number(entry)

    def windows(self, step: Step) -> str:
        """The types of the windows that PyTorch sees when it does the step."""
        if isinstance(step, KernelStep | TiledGemmStep | MemoryStep):
            return "()"
        if isinstance(step, CopyStep):
            return self.types((step.source, step.target))
        return self.types((*step.inputs, *step.outputs))


def size_function(plan: Plan, encoder: Encoder) -> SizeFunction:
    """The size function of an allocated plan."""
    offsets = dict(plan.offsets)
    slots = {STATUS_BUFFER: 0}
    for buffer in sorted(plan.buffers, key=lambda b: (_rank(b, offsets), b.index)):
        slots[buffer.name] = len(slots)
    formulas = PlanFormulas(plan, slots)
    placed = tuple(b.name for b in plan.buffers if b.name in offsets)
    sizes = {b.name: b.bytes for b in plan.buffers}
    outputs = {b.index: b.bytes for b in plan.buffers if b.is_output}
    encoded, names = encoder.expression(formulas)
    parts = [
        encoded,
        formulas.tuple_of(sizes[name] for name in placed),
        formulas.tuple_of(offsets[name] for name in placed),
        formulas.number(plan.kept),
        formulas.number(plan.arena),
        formulas.types(plan.inputs),
        formulas.types(plan.outputs),
        formulas.types(plan.saved),
        formulas.tuple_of(outputs.get(i, 0) for i in range(len(plan.outputs))),
        formulas.tuple_of(plan.nonnegative),
        formulas.tuple_of(size for size, _ in (*plan.selected, *plan.divided)),
    ]
    symbols = tuple(sorted(formulas.symbols | _symbols_of_windows(plan)))
    shape = GeneratedFunction(plan.name, symbols, formulas.lines, f"({', '.join(parts)})",
                              {**names, **formulas.constants})
    return SizeFunction(symbols, slots, placed, shape, WindowTypes(plan, slots, symbols))


class GeneratedFunction:
    """The function of the symbols' values that these lines are, compiled at the first call: a program that is only
    loaded does without."""

    def __init__(self, name: str, symbols: Sequence[str], lines: Sequence[str], result: str,
                 names: Mapping[str, Any]) -> None:
        self.name, self.symbols, self.lines, self.result, self.names = name, symbols, lines, result, names

    def __call__(self, *numbers: int) -> Any:
        return self.function(*numbers)

    @cached_property
    def function(self) -> Callable[..., Any]:
        """It, compiled."""
        text = "\n".join([f"def shape({', '.join(map(name_of, self.symbols))}):", *self.lines,
                          f"    return {self.result}"])
        space: dict[str, Any] = {**FUNCTIONS, **self.names}
        exec(compile(text, f"<sizes of {self.name}>", "exec"), space)
        return space["shape"]  # type: ignore[no-any-return]


class WindowTypes:
    """See `SizeFunction.windows`. Printed when a call first needs them: most plans have no step that the host does. Of
    those that have, operators are always the host's; other steps are at some sizes, and are printed one by one."""

    def __init__(self, plan: Plan, slots: Mapping[str, int], symbols: Sequence[str]) -> None:
        self.plan, self.slots, self.symbols = plan, slots, symbols
        self.others: dict[int, GeneratedFunction] = {}

    def __call__(self, *numbers: int) -> StepWindows:
        return StepWindows(self, numbers)

    @cached_property
    def operators(self) -> GeneratedFunction:
        """Those of the operators, by number of the step."""
        return self._function([i for i, step in enumerate(self.plan.steps) if isinstance(step, ExternStep)])

    def other(self, number: int) -> GeneratedFunction:
        """Those of another step, by its number."""
        found = self.others.get(number)
        if found is None:
            found = self.others[number] = self._function([number])
        return found

    def _function(self, numbers: Sequence[int]) -> GeneratedFunction:
        seen = PlanFormulas(self.plan, self.slots)
        result = "{" + "".join(f"{i}: {seen.windows(self.plan.steps[i])}, " for i in numbers) + "}"
        return GeneratedFunction(self.plan.name, self.symbols, seen.lines, result, seen.constants)


class StepWindows(dict[int, tuple[Any, ...]]):
    """The types of the windows of steps at given sizes, by number of the step; made when one is asked for."""

    __slots__ = ("_numbers", "_types")

    def __init__(self, types: WindowTypes, numbers: tuple[int, ...]) -> None:
        super().__init__()
        self._types, self._numbers = types, numbers

    def __missing__(self, number: int) -> tuple[Any, ...]:
        types = self._types
        function = types.operators if isinstance(types.plan.steps[number], ExternStep) else types.other(number)
        self.update(function(*self._numbers))  # two threads may make the same
        return self[number]


def _symbols_of_windows(plan: Plan) -> set[str]:
    """The symbols in what steps touch beside windows of kernels."""
    sizes: set[Size] = set()
    for step in plan.steps:
        if isinstance(step, CopyStep):
            entries: tuple[Any, ...] = (step.source, step.target)
        elif isinstance(step, LibraryStep | ExternStep):
            entries = (*step.inputs, *step.outputs)
        else:
            continue
        for entry in entries:
            if isinstance(entry, Window):
                sizes.update(entry.type.shape, entry.type.strides or (), (entry.offset,))
            elif isinstance(entry, Expr):
                sizes.add(entry)
    return {symbol for size in sizes for symbol in symbols_of(size)}


def _rank(buffer: Buffer, offsets: Mapping[str, Size]) -> int:
    """Order of slots: a call's tensors come first, so that their addresses are written in one go."""
    if buffer.name in offsets:
        return 3
    return 0 if buffer.is_input else 1 if buffer.is_restored else 2 if buffer.is_output else 3
