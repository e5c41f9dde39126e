"""The text form of a plan.

    plan softmax  arena 64*((4*b*n + 63)//64)
      in   x: f32[b, n]
      buffer  e  4*b*n bytes  arena @ 0  steps 0-1
      0  kernel k_1f3a(x, e)                # model.py:12
      1  matmul(e, w) -> y
      out  y
"""
from __future__ import annotations

from anyshape.plan.ir.launch_groups import kernels_from
from anyshape.plan.ir.program import (
    Buffer,
    CopyStep,
    ExternStep,
    KernelStep,
    LibraryStep,
    MemoryStep,
    Plan,
    Regime,
    Step,
    TiledGemmStep,
    Window,
    parts_of,
)


def show(plan: Plan) -> str:
    """The plan as lines of text: inputs, buffers with their places, steps, what is returned and what is saved."""
    head = f"plan {plan.name}  arena {plan.arena}"
    if not isinstance(plan.kept, int) or plan.kept:
        head += f"  kept {plan.kept}"
    lines = [head]
    names = {b.index: b.name for b in plan.buffers if b.is_input}
    for index, entry in enumerate(plan.inputs):
        from_tape = f"  from tape {plan.restored.index(index)}" if index in plan.restored else ""
        lines.append(f"  in      {names.get(index, f'input {index}')}: {entry}{from_tape}" if not isinstance(entry, str)
                     else f"  in      {entry}: size{from_tape}")
    offsets = dict(plan.offsets)
    lines += [f"  buffer  {_buffer(b)}" + (f" @ {offsets[b.name]}" if b.name in offsets else "")
              for b in plan.buffers if not b.is_input]
    width = len(str(len(plan.steps)))
    optional = set(plan.optional)
    for number, step in enumerate(plan.steps):
        where = f"  # {step.where}" if step.where else ""
        mark = "?" if number in optional else " "
        lines.append(f"  {number:>{width}} {mark}{_step(step)}{where}")
    for first, last in plan.together:
        middle = kernels_from(plan.steps, first, last)
        lines += [f"  side by side  {first}-{middle - 1}"] if middle > first + 1 else []
        lines += [f"  in a row  {max(first, middle - 1)}-{last}"] if middle <= last else []
    lines += [f"  again   {one.buffer} in place of {one.saved}: {', '.join(name for name, _ in one.windows)}"
              for one in plan.again]
    lines.append(f"  out     {', '.join(_entry(entry) for entry in plan.outputs)}")
    if plan.saved:
        lines.append(f"  saved   {', '.join(_entry(entry) for entry in plan.saved)}")
    return "\n".join(lines) + "\n"


def _buffer(buffer: Buffer) -> str:
    place = f"{buffer.home.word} {buffer.index}" if buffer.survives_call or buffer.is_restored else buffer.home.word
    device = "" if buffer.device == "cpu" else f"  {buffer.device}"
    return f"{buffer.name}  {buffer.bytes} bytes  steps {buffer.first}-{buffer.last}  {place}{device}"


def _entry(entry: object) -> str:
    return _window(entry) if isinstance(entry, Window) else str(entry)


def _window(window: Window) -> str:
    start = "" if isinstance(window.offset, int) and window.offset == 0 else f" + {window.offset}"
    strides = "" if window.type.strides is None else f" strides [{', '.join(str(s) for s in window.type.strides)}]"
    return f"{window.buffer}{start}{strides}"


def _regime(regime: Regime) -> str:
    conditions = " and ".join(f"{condition} >= 0" for condition in regime.conditions)
    kernels = ", ".join(regime.kernels)
    return f"{kernels} if {conditions}" if conditions else kernels


def _step(step: Step) -> str:
    if isinstance(step, KernelStep):
        params = ", ".join(("&" if i in step.outputs else "") + _window(w) for i, w in enumerate(step.params))
        handed = f" handed {', '.join(map(_window, step.handed))}" if step.handed else ""
        return f"kernel {' | '.join(_regime(regime) for regime in step.regimes)}({params}){handed}"
    if isinstance(step, TiledGemmStep):
        return f"bands of {step.rows}: {'; '.join(map(_step, parts_of(step)))}"
    if isinstance(step, CopyStep):
        return f"copy {_window(step.source)} -> {_window(step.target)}"
    if isinstance(step, MemoryStep):
        return f"memory take {', '.join(step.take) or '-'}, drop {', '.join(step.drop) or '-'}"
    inputs = ", ".join(_entry(entry) for entry in step.inputs)
    outputs = ", ".join("_" if entry is None else _entry(entry) for entry in step.outputs)
    if isinstance(step, LibraryStep):
        attrs = "".join(f", {name}={value}" for name, value in step.attrs)
        return f"{step.op}({inputs}{attrs}) -> {outputs}"
    assert isinstance(step, ExternStep)
    return f"call {step.target}({inputs}) -> {outputs}"
