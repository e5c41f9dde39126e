"""Functions of the C library, lane by lane: the rare ones, and arguments out of the range of a fast one."""
from __future__ import annotations

from collections.abc import Sequence

from anyshape.backend.cpu.llvm.emitters import emits
from anyshape.backend.cpu.llvm.ir_builder import Code, Value, llvm_type


def libm(code: Code, name: str, args: Sequence[Value], instead_of: Value | None = None,
         when: Value | None = None) -> Value:
    """The C function `name`, lane by lane. With `instead_of`: only when the scalar bool `when` holds."""
    args, lanes, level = code.align(*args)
    if when is not None:
        level = max(level, when.level, instead_of.level if instead_of else 0)
    dtype = args[0].dtype
    element = llvm_type(dtype, 0)
    symbol = name + ("f" if dtype == "f32" else "")
    code.declare(element, symbol, [element] * len(args))
    if not lanes and when is None:
        listed = ", ".join(a.typed for a in args)
        return code.put(f"call {element} @{symbol}({listed})", dtype, 0, level)
    section = code.stack[level]
    key = f"libm {symbol} {' '.join(a.text for a in args)}"
    if key in section.memo:
        return section.memo[key]
    before, slow, loop, end = section.label, code.fresh("slow"), code.fresh("lane"), code.fresh("joined")
    code.do(f"br i1 {when.text}, label %{slow}, label %{end}" if when else f"br label %{slow}", level)
    code.mark(slow, level)
    result = _lane_loop(code, symbol, args, loop, level) if lanes else code.put(
        f"call {element} @{symbol}({args[0].typed})", dtype, 0, level, pure=False)
    code.do(f"br label %{end}", level)
    last = section.label
    code.mark(end, level)
    if instead_of is not None:
        text = f"phi {result.type} [ {instead_of.text}, %{before} ], [ {result.text}, %{last} ]"
        result = code.put(text, dtype, lanes, level, pure=False)
    section.memo[key] = result
    return result


def _call(name: str) -> None:
    """Makes one libm call per lane the emitter of the instruction that C calls so, too."""
    @emits(name, "float", weight=64)
    def call(code: Code, *args: Value) -> Value:
        return libm(code, name, args)


for _name in ("atan2", "fmod", "hypot", "nextafter", "erfc", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh",
              "atanh", "lgamma"):
    _call(_name)


def _lane_loop(code: Code, symbol: str, args: Sequence[Value], loop: str, level: int) -> Value:
    """Vectors through stack slots, one call per lane."""
    section = code.stack[level]
    dtype, lanes = args[0].dtype, args[0].lanes
    element = llvm_type(dtype, 0)
    slots = [code.slot(f"lanes {k}", dtype, lanes) for k in range(len(args))]
    for value, slot in zip(args, slots, strict=True):
        code.do(f"store {value.typed}, ptr {slot.text}", level)
    index, following, again = ("%" + code.fresh(p) for p in ("k", "next", "again"))
    code.do(f"br label %{loop}", level)
    start = section.label
    code.mark(loop, level)
    code.do(f"{index} = phi i64 [ 0, %{start} ], [ {following}, %{loop} ]", level)
    parts = []
    for slot in slots:
        at = code.put(f"getelementptr {element}, ptr {slot.text}, i64 {index}", "ptr", 0, level, pure=False)
        parts.append(code.put(f"load {element}, ptr {at.text}", dtype, 0, level, pure=False))
    listed = ", ".join(p.typed for p in parts)
    called = code.put(f"call {element} @{symbol}({listed})", dtype, 0, level, pure=False)
    at = code.put(f"getelementptr {element}, ptr {slots[0].text}, i64 {index}", "ptr", 0, level, pure=False)
    code.do(f"store {called.typed}, ptr {at.text}", level)
    code.do(f"{following} = add nuw nsw i64 {index}, 1", level)
    code.do(f"{again} = icmp ult i64 {following}, {lanes}", level)
    done = code.fresh("done")
    code.do(f"br i1 {again}, label %{loop}, label %{done}", level)
    code.mark(done, level)
    return code.put(f"load {llvm_type(dtype, lanes)}, ptr {slots[0].text}", dtype, lanes, level, pure=False)
