"""LLVM IR as text: typed values, and nested sections that place each instruction as far out as its arguments allow.

Every open loop or branch is a section. A value knows the section it was made in (its level); an instruction without
side effects goes to the deepest level among its arguments, so what does not change in a loop is computed outside it,
and the same instruction is not written twice in one section. No LLVM pass is needed for either.
"""
from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from anyshape.backend.cpu.machine.target import Machine, llvm_major

# dtype -> LLVM type of a register; "ptr" is an address
ELEMENT = {
    "f16": "half", "f32": "float", "f64": "double", "bool": "i1", "ptr": "ptr",
    "i8": "i8", "u8": "i8", "i16": "i16", "u16": "i16", "i32": "i32", "u32": "i32", "i64": "i64", "u64": "i64",
}  # fmt: skip
SUFFIX = {**ELEMENT, "f16": "f16", "f32": "f32", "f64": "f64", "ptr": "p0"}
BITS = {"f16": 16, "f32": 32, "f64": 64, "bool": 1, "i8": 8, "u8": 8, "i16": 16, "i32": 32, "i64": 64}
FLOATS = frozenset(("f16", "f32", "f64"))


def llvm_type(dtype: str, lanes: int) -> str:
    """`float` for no lanes, else `<lanes x float>`."""
    return f"<{lanes} x {ELEMENT[dtype]}>" if lanes else ELEMENT[dtype]


@dataclass(frozen=True, slots=True)
class Value:
    """An SSA name or a literal; lanes is 0 for a scalar; level is the section where the name is defined."""

    text: str
    dtype: str
    lanes: int = 0
    level: int = 0

    @property
    def type(self) -> str:
        return llvm_type(self.dtype, self.lanes)

    @property
    def typed(self) -> str:
        return f"{self.type} {self.text}"


def literal(dtype: str, value: float | int | bool) -> str:
    """The text of a scalar constant; floats are written as the bits of a double, as LLVM wants them."""
    if dtype in FLOATS:
        number = float(value)
        if dtype == "f32" and number - number == 0:
            number = _to_f32(number)
        if number != number:
            return "0x7FF8000000000000"
        return f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"
    if dtype == "bool":
        return "true" if value else "false"
    return str(int(value))


def _to_f32(number: float) -> float:
    try:
        return struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def constant(dtype: str, value: float | int | bool, lanes: int = 0) -> Value:
    """A literal, the same in every lane."""
    text = literal(dtype, value)
    return Value(f"splat ({ELEMENT[dtype]} {text})" if lanes else text, dtype, lanes)


class Section:
    """The instructions of one loop body or branch: lines, the label of the block they end in, and a memo."""

    __slots__ = ("close", "label", "lines", "memo")

    def __init__(self, label: str) -> None:
        self.lines: list[str] = []
        self.label = label
        self.memo: dict[str, Value] = {}
        self.close: tuple[str, ...] = ()


class Code:
    """One function under construction."""

    def __init__(self, target: Machine) -> None:
        self.target = target
        self.stack: list[Section] = [Section("entry")]
        self.stack_slots: list[str] = []
        self.slots: dict[str, Value] = {}
        self.declarations: dict[str, str] = {}
        self.count = 0

    # names and places

    @property
    def top(self) -> int:
        return len(self.stack) - 1

    def fresh(self, prefix: str = "v") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def put(self, text: str, dtype: str, lanes: int, level: int, pure: bool = True) -> Value:
        """Write `%new = text` at `level`; the same text at the same level is the same value when `pure`."""
        section = self.stack[level]
        if pure:
            found = section.memo.get(text)
            if found is not None:
                return found
        value = Value("%" + self.fresh(), dtype, lanes, level)
        section.lines.append(f"  {value.text} = {text}")
        if pure:
            section.memo[text] = value
        return value

    def do(self, text: str, level: int | None = None) -> None:
        """Write an instruction without a result, at the innermost section unless told."""
        self.stack[self.top if level is None else level].lines.append(f"  {text}")

    def mark(self, label: str, level: int | None = None) -> None:
        """Begin a new basic block in a section."""
        section = self.stack[self.top if level is None else level]
        section.lines.append(f"{label}:")
        section.label = label

    def slot(self, key: str, dtype: str, lanes: int, count: int = 1) -> Value:
        """A stack slot, of `count` values one after another; the same key and type give the same slot."""
        full = f"{key} {dtype} {lanes}"
        if full not in self.slots:
            value = Value("%" + self.fresh("slot"), "ptr")
            more = f", i64 {count}" if count > 1 else ""
            self.stack_slots.append(f"  {value.text} = alloca {llvm_type(dtype, lanes)}{more}")
            self.slots[full] = value
        return self.slots[full]

    # structure

    def open_if(self, condition: Value) -> None:
        """What follows runs when `condition` (a scalar bool) holds; `close_section` ends it."""
        then, end = self.fresh("then"), self.fresh("end")
        section = Section(then)
        section.close = ("if", condition.text, then, end)
        self.stack.append(section)

    def open_loop(self, start: Value, stop: Value, step: int) -> Value:
        """A loop over i64 from `start` while less than `stop`; returns its counter. `close_section` ends it."""
        inside = self.compare("slt", start, stop)
        body, end = self.fresh("body"), self.fresh("end")
        counter = "%" + self.fresh("i")
        section = Section(body)
        section.close = ("loop", inside.text, body, end, counter, start.text, stop.text, str(step))
        self.stack.append(section)
        return Value(counter, "i64", 0, self.top)

    def close_section(self) -> None:
        """End the innermost loop or branch."""
        inner = self.stack.pop()
        outer = self.stack[-1]
        kind, condition, first, end, *rest = inner.close
        out = outer.lines
        if kind == "if":
            out.append(f"  br i1 {condition}, label %{first}, label %{end}")
            out.append(f"{first}:")
            out += inner.lines
            out.append(f"  br label %{end}")
        else:
            counter, start, stop, step = rest
            before, following = self.fresh("before"), "%" + self.fresh("next")
            again = "%" + self.fresh("again")
            out.append(f"  br i1 {condition}, label %{before}, label %{end}")
            out.append(f"{before}:")
            out.append(f"  br label %{first}")
            out.append(f"{first}:")
            out.append(f"  {counter} = phi i64 [ {start}, %{before} ], [ {following}, %{inner.label} ]")
            out += inner.lines
            out.append(f"  {following} = add nsw i64 {counter}, {step}")
            out.append(f"  {again} = icmp slt i64 {following}, {stop}")
            out.append(f"  br i1 {again}, label %{first}, label %{end}")
        out.append(f"{end}:")
        outer.label = end

    # typed instructions

    def spread(self, value: Value, lanes: int) -> Value:
        """The value in every lane."""
        if value.lanes == lanes or not lanes:
            return value
        assert value.lanes == 0, f"{value.type} where {lanes} lanes are wanted"
        if value.text[0] != "%":
            return Value(f"splat ({value.typed})", value.dtype, lanes)
        wide = llvm_type(value.dtype, lanes)
        first = self.put(f"insertelement {wide} poison, {value.typed}, i64 0", value.dtype, lanes, value.level)
        return self.put(f"shufflevector {wide} {first.text}, {wide} poison, <{lanes} x i32> zeroinitializer",
                        value.dtype, lanes, value.level)

    def align(self, *values: Value) -> tuple[list[Value], int, int]:
        """The values with one number of lanes, that number, and their level."""
        lanes = max(v.lanes for v in values)
        return [self.spread(v, lanes) for v in values], lanes, max(v.level for v in values)

    def binary(self, op: str, a: Value, b: Value) -> Value:
        """`op type a, b`; op may carry flags."""
        (a, b), lanes, level = self.align(a, b)
        return self.put(f"{op} {a.type} {a.text}, {b.text}", a.dtype, lanes, level)

    def compare(self, predicate: str, a: Value, b: Value) -> Value:
        """icmp, or fcmp for floats; gives bool."""
        (a, b), lanes, level = self.align(a, b)
        kind = "fcmp" if a.dtype in FLOATS else "icmp"
        return self.put(f"{kind} {predicate} {a.type} {a.text}, {b.text}", "bool", lanes, level)

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        (a, b), lanes, level = self.align(a, b)
        if condition.lanes and not lanes:
            lanes = condition.lanes
            a, b = self.spread(a, lanes), self.spread(b, lanes)
        return self.put(f"select {condition.typed}, {a.typed}, {b.typed}", a.dtype, lanes, max(level, condition.level))

    def convert(self, op: str, a: Value, dtype: str) -> Value:
        """zext, trunc, bitcast, sitofp and the like."""
        return self.put(f"{op} {a.typed} to {llvm_type(dtype, a.lanes)}", dtype, a.lanes, a.level)

    def bits(self, a: Value, dtype: str) -> Value:
        """The same bits as another type of the same size."""
        return self.convert("bitcast", a, dtype)

    def freeze(self, a: Value) -> Value:
        return self.put(f"freeze {a.typed}", a.dtype, a.lanes, a.level)

    def negate(self, a: Value) -> Value:
        if a.dtype in FLOATS:
            return self.put(f"fneg {a.typed}", a.dtype, a.lanes, a.level)
        return self.binary("sub", constant(a.dtype, 0, a.lanes), a)

    def intrinsic(self, name: str, *args: Value, flag: str = "") -> Value:
        """`llvm.name` on arguments of one type; `flag` is a trailing i1 literal of intrinsics such as llvm.abs."""
        values, lanes, level = self.align(*args)
        dtype = values[0].dtype
        suffix = f"v{lanes}{SUFFIX[dtype]}" if lanes else SUFFIX[dtype]
        kind = values[0].type
        types = [kind] * len(values) + (["i1"] if flag else [])
        arguments = [v.typed for v in values] + ([f"i1 {flag}"] if flag else [])
        self.declare(kind, f"llvm.{name}.{suffix}", types)
        return self.put(f"call {kind} @llvm.{name}.{suffix}({', '.join(arguments)})", dtype, lanes, level)

    def declare(self, result: str, name: str, types: Sequence[str]) -> None:
        self.declarations[name] = f"declare {result} @{name}({', '.join(types)})"

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a*b + c, rounded once where the machine can."""
        return self.intrinsic("fma" if self.target.fma else "fmuladd", a, b, c)

    def iota(self, lanes: int, dtype: str = "i64") -> Value:
        """0, 1, 2 ... in the lanes."""
        return Value("<" + ", ".join(f"{dtype} {k}" for k in range(lanes)) + ">", dtype, lanes)

    def first_lanes(self, count: Value, lanes: int) -> Value:
        """The mask of the first `count` lanes; count is an i64 below 2^31."""
        return self.compare("slt", self.iota(lanes, "i32"), self.convert("trunc", count, "i32"))

    def shuffle(self, a: Value, order: Sequence[int]) -> Value:
        """The lanes of `a` picked by `order`."""
        picks = ", ".join(f"i32 {k}" for k in order)
        return self.put(f"shufflevector {a.typed}, {a.type} poison, <{len(order)} x i32> <{picks}>",
                        a.dtype, len(order), a.level)

    def merge(self, a: Value, b: Value, order: Sequence[int]) -> Value:
        """The lanes of `a` and then of `b`, which have equally many, picked by `order`."""
        picks = ", ".join(f"i32 {k}" for k in order)
        return self.put(f"shufflevector {a.typed}, {b.typed}, <{len(order)} x i32> <{picks}>", a.dtype, len(order),
                        max(a.level, b.level))

    def concat(self, parts: Sequence[Value]) -> Value:
        """The lanes of the parts (a power of two of them, equally long) one after another."""
        values = list(parts)
        while len(values) > 1:
            picks = ", ".join(f"i32 {k}" for k in range(2 * values[0].lanes))
            lanes = 2 * values[0].lanes
            values = [self.put(f"shufflevector {a.typed}, {b.typed}, <{lanes} x i32> <{picks}>", a.dtype, lanes,
                               max(a.level, b.level)) for a, b in zip(values[::2], values[1::2], strict=True)]
        return values[0]

    def element(self, a: Value, index: int) -> Value:
        return self.put(f"extractelement {a.typed}, i64 {index}", a.dtype, 0, a.level)

    def any_of(self, a: Value) -> Value:
        """One bool: whether any lane holds."""
        if not a.lanes:
            return a
        word = self.put(f"bitcast {a.typed} to i{a.lanes}", "i64", 0, a.level)
        return self.put(f"icmp ne i{a.lanes} {word.text}, 0", "bool", 0, a.level)

    # memory

    def load(self, dtype: str, lanes: int, pointer: Value, level: int, pure: bool, alignment: int = 0) -> Value:
        align = f", align {alignment}" if alignment else ""
        return self.put(f"load {llvm_type(dtype, lanes)}, ptr {pointer.text}{align}", dtype, lanes,
                        max(level, pointer.level), pure)

    def prefetch(self, pointer: Value) -> None:
        """Ask for the line at an address, which need not exist, into the second cache."""
        self.declare("void", "llvm.prefetch.p0", ["ptr", "i32", "i32", "i32"])
        self.do(f"call void @llvm.prefetch.p0(ptr {pointer.text}, i32 0, i32 2, i32 1)")

    def address(self, base: Value, dtype: str, offset: Value) -> Value:
        """`base + offset` elements of dtype; a vector of addresses for a vector of offsets."""
        level = max(base.level, offset.level)
        return self.put(f"getelementptr {ELEMENT[dtype]}, {base.typed}, {offset.typed}", "ptr", offset.lanes, level)

    def masked(self, op: str, result: Value, pointer: Value, mask: Value, alignment: int, level: int,
               pure: bool) -> Value | None:
        """masked.load, masked.gather (`result`: what masked-off lanes give) or masked.store, masked.scatter
        (`result`: what is stored)."""
        mask = self.spread(mask, result.lanes)
        reads = op in ("load", "gather")
        vector = f"v{result.lanes}{SUFFIX[result.dtype]}"
        where = f"v{result.lanes}p0" if pointer.lanes else "p0"
        name = f"llvm.masked.{op}.{vector}.{where}"
        modern = llvm_major() >= 22  # the alignment moved from an argument to an attribute
        at = f"{pointer.type} {f'align {alignment} ' if modern else ''}{pointer.text}"
        middle = [] if modern else [f"i32 {alignment}"]
        if reads:
            arguments = [at, *middle, mask.typed, result.typed]
            types = [pointer.type, *(["i32"] if middle else []), mask.type, result.type]
            self.declare(result.type, name, types)
            level = max(level, pointer.level, mask.level)
            return self.put(f"call {result.type} @{name}({', '.join(arguments)})", result.dtype, result.lanes,
                            level, pure)
        self.declare("void", name, [result.type, pointer.type, *(["i32"] if middle else []), mask.type])
        self.do(f"call void @{name}({', '.join([result.typed, at, *middle, mask.typed])})", level)
        return None

    def function_body(self) -> list[str]:
        """The lines of the finished function, stack slots first."""
        assert len(self.stack) == 1
        return ["entry:", *self.stack_slots, *self.stack[0].lines, "  ret void"]
