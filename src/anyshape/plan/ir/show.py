"""The text form of a plan; plan/ir/parse.py reads it back: `parse(show(plan)) == plan`.

    plan softmax  arena 64*((4*b*n + 63)//64)
      where 1 <= b, 1 <= n <= 4096, n near 512
      in      x: f32[b, n]  4*b*n bytes  steps 0-0
      in      w: f32[n, 8]  32*n bytes  steps 0-1
      buffer  e: f32[b, n]  4*b*n bytes  steps 0-1  arena @ 0
      buffer  y: f32[b, 8]  32*b bytes  steps 1-2  output 0
      0  kernel k_1f3a if n - 16 >= 0 | k_77b0(x, &e; b, n)  # model.py:12
           {reuse=[[0, 1]]}
      1  matmul(e, w) -> y
      out     y

An input stands with its buffer, where it has one: `in` also says which entry of the tape it is (`from tape 0`). A
window is written `buffer + offset: type`; the type is left out where it is the one that stands at the buffer, that of
the first window at its begin. Of a kernel, `&` marks what it writes, and the sizes after ";" are those of every version
that has none of its own in brackets. "?" behind a step's number marks an optional one.

What is not said this way stands in braces under its line, or on a line of the plan, by the names of the fields in
plan/ir/program.py, where it differs from their defaults: a field that is new needs nothing here. Fields that are no
part of a plan's value (`compare=False`) are left out.
"""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from anyshape.ir.scanner import NAME
from anyshape.ir.show import attr_text, attrs_text, fact_texts, operand_text, wrapped
from anyshape.ir.types import TensorType
from anyshape.plan.ir.home import IndexedHome
from anyshape.plan.ir.parse import PLAN_NAME, SPOKEN
from anyshape.plan.ir.program import (
    Buffer,
    CopyStep,
    ExternStep,
    KernelStep,
    LibraryStep,
    MemoryStep,
    Plan,
    RecomputeStep,
    Regime,
    Step,
    TiledGemmStep,
    Window,
)
from anyshape.sym.expr import Expr, symbols_of

WORDS = frozenset(("None", "True", "False", "inf", "nan"))  # no names of buffers, unless in quotes


def show(plan: Plan) -> str:
    """The plan as lines of text: inputs, buffers with their places, steps, what is returned and what is saved."""
    return "\n".join(_Text(plan).lines()) + "\n"


def parts_inside(item: object) -> Iterator[Window | Expr | str]:
    """The windows, formulas and texts in an item, in order; windows before what is in them."""
    if isinstance(item, (Window, Expr, str)):
        yield item
    if isinstance(item, tuple):
        for part in item:
            yield from parts_inside(part)
    elif dataclasses.is_dataclass(item):
        for field in dataclasses.fields(item):
            if field.compare:
                yield from parts_inside(getattr(item, field.name))


def in_order(positions: Sequence[int], count: int) -> bool:
    """Whether marks at some of `count` things say these positions."""
    return list(positions) == sorted(set(positions) & set(range(count)))


class _Text:
    """Writes a plan. types: buffer -> the type of a window that is written by the buffer's name alone."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.types: dict[str, TensorType] = {}
        self.symbols = {name for name, *_ in (*plan.facts.ranges, *plan.facts.hints)}
        for part in parts_inside((plan.steps, plan.outputs, plan.saved)):
            if isinstance(part, Window) and isinstance(part.offset, int) and part.offset == 0:
                self.types.setdefault(part.buffer, part.type)
        for part in parts_inside(plan):
            if isinstance(part, Expr):
                self.symbols |= symbols_of(part)
        self.symbols |= {entry for entry in plan.inputs if isinstance(entry, str)}
        known = {buffer.name for buffer in plan.buffers}
        self.types = {name: kind for name, kind in self.types.items() if name in known}
        self.places = dict(plan.offsets)
        names = [buffer.name for buffer in plan.buffers if buffer.name in self.places]
        if tuple((name, self.places[name]) for name in names) != plan.offsets:
            self.places = {}  # they stand on a line of their own

    def lines(self) -> list[str]:
        plan = self.plan
        kept = "" if isinstance(plan.kept, int) and plan.kept == 0 else f"  kept {plan.kept}"
        name = plan.name if PLAN_NAME.fullmatch(plan.name) else json.dumps(plan.name)
        lines = [f"plan {name}  arena {plan.arena}{kept}"]
        facts = fact_texts(plan.facts)
        lines += wrapped("where ", facts) if facts else []
        lines += self.memory()
        width = len(str(len(plan.steps)))
        marks = in_order(plan.optional, len(plan.steps))
        optional = set(plan.optional) if marks else set()
        for number, step in enumerate(plan.steps):
            first, *others = self.step(step)
            lines.append(f"  {number:>{width}} {'?' if number in optional else ' '}{first}")
            lines += [" " * (width + 6) + line for line in others]
        if plan.together:
            lines += wrapped("together  ", [f"{first}-{last}" for first, last in plan.together])
        lines += [f"  again   {self.again(one)}" for one in plan.again]
        lines.append(f"  out     {', '.join(map(self.entry, plan.outputs))}".rstrip())
        lines += [f"  saved   {', '.join(map(self.entry, plan.saved))}"] if plan.saved else []
        spoken = {name for name, said in (("optional", marks), ("restored", in_tape(plan)),
                                          ("offsets", len(self.places) == len(plan.offsets))) if said}
        return lines + [f"  {name} {attr_text(value)}" for name, value in _unspoken(plan, spoken)]

    # ---- inputs and buffers

    def memory(self) -> list[str]:
        """A line for each input and each buffer; of both, where the buffer is the input and stands in its order."""
        lines: list[str] = []
        number = 0
        for buffer in self.plan.buffers:
            position = position_of(self.plan, buffer)
            if position is not None and position >= number:
                lines += [self.input(k) for k in range(number, position)]
                entry = self.plan.inputs[position]
                assert isinstance(entry, TensorType)
                self.types[buffer.name] = entry
                lines += self.buffer(f"  in      {self.name(buffer.name)}: {entry}{self.tape(position)}", buffer, "")
                number = position + 1
            else:
                kind = self.types.get(buffer.name)
                index = f" {buffer.index}" if isinstance(buffer.home, IndexedHome) else ""
                lines += self.buffer(f"  buffer  {self.name(buffer.name)}{'' if kind is None else f': {kind}'}", buffer,
                                     f"  {buffer.home.word}{index}")
        return lines + [self.input(k) for k in range(number, len(self.plan.inputs))]

    def input(self, number: int) -> str:
        entry = self.plan.inputs[number]
        text = f"{_quoted(entry)}: size" if isinstance(entry, str) else f"_: {entry}"
        return f"  in      {text}{self.tape(number)}"

    def tape(self, number: int) -> str:
        restored = self.plan.restored
        return f"  from tape {restored.index(number)}" if number in restored and in_tape(self.plan) else ""

    def buffer(self, head: str, buffer: Buffer, home: str) -> list[str]:
        place = f" @ {self.places[buffer.name]}" if buffer.name in self.places else ""
        line = f"{head}  {buffer.bytes} bytes  steps {buffer.first}-{buffer.last}{home}{place}"
        return [line, *(" " * 12 + more for more in _rest(buffer))]

    def again(self, one: RecomputeStep) -> str:
        windows = ", ".join(f"{self.name(name)} @ {start}" for name, start in one.windows)
        return f"{self.name(one.buffer)} in place of {self.name(one.saved)}, segment {one.segment}: {windows}".rstrip()

    # ---- steps

    def step(self, step: Step) -> list[str]:
        if isinstance(step, TiledGemmStep):
            parts = []
            for part in (step.product, step.kernel):
                first, *others = self.step(part)
                parts += [f"  {first}", *(f"       {line}" for line in others)]
            return [f"tiles of {step.rows} rows, param {step.result}", *_rest(step), *parts]
        where = step.where
        spoken = {"where"} if where == where.strip() and "\n" not in where else set()
        comment = f"  # {where}" if where and spoken else ""
        if isinstance(step, KernelStep) and in_order(step.outputs, len(step.params)):
            spoken.add("outputs")
        return [self.call(step) + comment, *_rest(step, spoken)]

    def call(self, step: Step) -> str:
        """A step in a line, without its source line and its attributes."""
        if isinstance(step, KernelStep):
            marks = set(step.outputs) if in_order(step.outputs, len(step.params)) else set()
            params = ", ".join(("&" if i in marks else "") + self.window(w) for i, w in enumerate(step.params))
            sizes = step.regimes[0].sizes if step.regimes else ()
            after = f"; {', '.join(map(str, sizes))}" if sizes else ""
            handed = f" handed {', '.join(map(self.window, step.handed))}" if step.handed else ""
            return f"kernel {' | '.join(_regime(one, sizes) for one in step.regimes)}({params}{after}){handed}"
        if isinstance(step, CopyStep):
            return f"copy {self.window(step.source)} -> {self.window(step.target)}"
        if isinstance(step, MemoryStep):
            lists = (("take", step.take), ("drop", step.drop))
            return " ".join(["memory", "; ".join(f"{word} {', '.join(map(self.name, names))}"
                                                 for word, names in lists if names)]).rstrip()
        assert isinstance(step, (LibraryStep, ExternStep))
        inputs = ", ".join(map(self.entry, step.inputs))
        if isinstance(step, LibraryStep):
            head, inside = _quoted(step.op), inputs + (f" | {attrs_text(step.attrs)}" if step.attrs else "")
        else:
            head, inside = f"call {_quoted(step.target)}", inputs
        return f"{head}({inside}) -> {', '.join(map(self.entry, step.outputs))}".rstrip()

    def entry(self, entry: Any) -> str:
        return self.window(entry) if isinstance(entry, Window) else operand_text(entry)

    def window(self, window: Window) -> str:
        start = "" if isinstance(window.offset, int) and window.offset == 0 else f" + {window.offset}"
        kind = "" if self.types.get(window.buffer) == window.type else f": {window.type}"
        return f"{self.name(window.buffer)}{start}{kind}"

    def name(self, name: str) -> str:
        return json.dumps(name) if name in self.symbols or name in WORDS else _quoted(name)


def position_of(plan: Plan, buffer: Buffer) -> int | None:
    """The position of the input that a buffer is."""
    restored = plan.restored if in_tape(plan) else ()
    found = -1
    if buffer.is_restored and 0 <= buffer.index < len(restored):
        found = restored[buffer.index]
    elif buffer.is_input and buffer.index not in restored:
        found = buffer.index
    return found if 0 <= found < len(plan.inputs) and isinstance(plan.inputs[found], TensorType) else None


def in_tape(plan: Plan) -> bool:
    """Whether `from tape` at the inputs says what is restored."""
    return len(set(plan.restored)) == len(plan.restored) and all(0 <= k < len(plan.inputs) for k in plan.restored)


def _quoted(name: str) -> str:
    return name if NAME.fullmatch(name) and name != "_" else json.dumps(name)


def _regime(regime: Regime, sizes: tuple[Any, ...]) -> str:
    own = f"[{', '.join(map(str, regime.sizes))}]" if regime.sizes != sizes else ""
    conditions = " and ".join(f"{condition} >= 0" for condition in regime.conditions)
    return ", ".join(map(_quoted, regime.kernels)) + own + (f" if {conditions}" if conditions else "")


def _unspoken(item: Any, spoken: set[str]) -> list[tuple[str, Any]]:
    """The fields of an item that its text does not say yet, where they differ from the defaults."""
    names = {*SPOKEN[type(item)], *spoken}
    return [(field.name, value) for field in dataclasses.fields(item) if field.compare and field.name not in names
            for value in (getattr(item, field.name),)
            if field.default is dataclasses.MISSING or value != field.default]


def _rest(item: Any, spoken: set[str] | None = None) -> list[str]:
    attrs = _unspoken(item, spoken or set())
    return [f"{{{attrs_text(attrs)}}}"] if attrs else []
