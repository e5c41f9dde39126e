"""The way into a program: a Python function generated per plan that costs as little as Python can.

    inputs f32[b, n], f32[n]  -->
        def enter(args, records, slow, fit):
            try:
                (a0, a1) = args
                record = records[(a0.shape, a1.shape)]
            except (KeyError, ValueError, AttributeError, TypeError):
                record, (a0, a1) = slow(args)
            undo = ()
            s = record.input_strides
            if a0.dtype is not t0 or a0.stride() != s[0] or not a0.is_cpu or a1.dtype ...:
                (a0, a1), undo = fit(record, (a0, a1))
            return record, (a0, a1), (a0.data_ptr(), a1.data_ptr()), undo

A backward program's first argument is the tape; `values` are its entries and `origin` the forward's record.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from anyshape.ir.types import TensorType
from anyshape.plan.plan import Plan
from anyshape.run.dtypes import TORCH_DTYPES


def make_enter(plan: Plan, slots: Mapping[str, int], strided: frozenset[int]) -> Callable[..., Any]:
    """`enter` for a plan. `strided`: inputs whose strides bind symbols."""
    count = len(plan.inputs)
    restored = {position: index for index, position in enumerate(plan.restored)}
    called = [i for i in range(count) if i not in restored]
    placed = dict(plan.offsets)
    names: dict[str, Any] = {}
    keys, checks = [], []
    for i in called:
        kind = plan.inputs[i]
        if isinstance(kind, TensorType):
            names[f"t{i}"] = TORCH_DTYPES[kind.dtype]
            keys.append(f"a{i}.shape")
            checks.append(f"a{i}.dtype is not t{i} or a{i}.stride() != s[{i}] or not a{i}.is_cpu")
            if i in strided:
                keys.append(f"a{i}.stride()")
        else:
            keys.append(f"a{i}")
    if restored:
        keys.append("origin")
        # tensors of a tape that is not the forward's own come as they are
        checks.append("origin.__class__ is tuple")
    pointers = [_pointer(plan, b.home, b.index, restored) for b in sorted(plan.buffers, key=lambda b: slots[b.name])
                if b.home in ("input", "tape") and b.name not in placed]
    every = _tuple(f"a{i}" for i in range(count))
    head = "args, records, slow, fit" + (", values, origin" if restored else "")
    lines = [
        f"def enter({head}):",
        "    try:",
        f"        {_tuple(f'a{i}' for i in called)} = args",
        *(f"        a{position} = values[{index}]" for position, index in restored.items()),
        f"        record = records[{_tuple(keys)}]",
        "    except (KeyError, ValueError, AttributeError, TypeError):",
        f"        record, {every} = slow(args{', values, origin' if restored else ''})",
        "    undo = ()",
        "    s = record.input_strides",
        f"    if {' or '.join(checks) or 'False'}:",
        f"        {every}, undo = fit(record, {every})",
        f"    return record, {every}, {_tuple(pointers)}, undo",
    ]
    if not called:
        lines[2] = "        () = args"
    exec(compile("\n".join(lines), f"<entry of {plan.name}>", "exec"), names)
    key = ["def key(args" + (", values, origin" if restored else "") + "):",
           f"    {_tuple(f'a{i}' for i in called)} = args", f"    return {_tuple(keys)}"]
    exec(compile("\n".join(key), f"<key of {plan.name}>", "exec"), names)
    enter: Callable[..., Any] = names["enter"]
    enter.key = names["key"]  # type: ignore[attr-defined]
    return enter


def _pointer(plan: Plan, home: str, index: int, restored: Mapping[int, int]) -> str:
    position = plan.restored[index] if home == "tape" else index
    return f"a{position}.data_ptr()"


def _tuple(parts: Any) -> str:
    return "(" + "".join(f"{part}, " for part in parts) + ")"
