"""Native routines written in Python: a small subset with 64-bit integers and typed records, printed as LLVM text.

The run time's own routines (the host of plans, placement, strided copies) are too long for hand-written LLVM and too
hot for Python. They are written as plain Python functions, whose source this file translates:

    class Span(Struct):
        count: i64
        values: Array[i64]

    def total(span: Span) -> int:         define i64 @total(i64 %span)
        result = 0                          ... load, add, branch ...
        for i in range(span.count):
            result += span.values[i]
        return result

The same functions run as Python on memory that exists, so that a test can step through them: a record is then an
address with attributes (backend/cpu/native/records.py). Numbers are not wrapped to 64 bits there; everything else means
the same.

Every value is an i64, a record its address. A parameter's annotation says which record it is; a variable has the type
of its first value. There are: assignment to variables, fields and elements, `if`, `while`,
`for _ in range(...)`, `break`, `continue`, `return`; `+ - * // % & | << >>`, comparisons, `and or not`, `a if c else b`
as Python has them; calls of functions, which are translated with their caller; a function's name for its address;
`Span(x)` for the record at an address; `Span.values` for the byte offset of a field; module-level whole numbers; and
the functions in `_WORDS`.
"""
from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_origin, get_type_hints

from anyshape.backend.cpu.native.records import (
    Array,
    Struct,
    address_of,
    array_at,
    call,
    call_void,
    copy_bytes,
    element_of,
    fill_zero,
    kind_of,
    load8,
    load16,
    load32,
    load64,
    maximum,
    minimum,
    new,
    size_of,
    store8,
    store16,
    store32,
    store64,
    tail,
    words,
    words_of,
)

_MEMORY = (load8, load16, load32, load64, store8, store16, store32, store64)
_WORDS = (new, words, address_of, size_of, array_at, tail, copy_bytes, fill_zero, call, call_void, minimum, maximum,
          *_MEMORY)
_BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.BitAnd: "and", ast.BitOr: "or", ast.LShift: "shl",
           ast.RShift: "ashr"}
_COMPARE = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "slt", ast.LtE: "sle", ast.Gt: "sgt", ast.GtE: "sge"}


def translate(*roots: Callable[..., int]) -> str:
    """LLVM text of functions and of those that they name, from one to the next."""
    parts = ["declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)",
             "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)"]
    names: dict[str, Callable[..., int]] = {}
    waiting = list(roots)
    while waiting:
        function = waiting.pop(0)
        if names.setdefault(function.__name__, function) is not function:
            raise AssertionError(f"two routines have the name {function.__name__}")
        translated = _Function(function)
        parts.append(translated.text())
        waiting += [f for f in translated.named if f not in names.values() and f not in waiting]
    return "\n\n".join(parts) + "\n"


class LlvmOperand(NamedTuple):
    """An operand of LLVM text, and its type: int, a record, or an array."""

    text: str
    kind: Any = int


class _Function:
    """Translates one function; every variable lives in an alloca, which LLVM turns into registers."""

    def __init__(self, function: Callable[..., int]) -> None:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        assert isinstance(tree, ast.FunctionDef)
        self.tree = tree
        self.globals: dict[str, Any] = inspect.unwrap(function).__globals__
        self.hints = get_type_hints(function)
        self.named: list[Callable[..., int]] = []  # functions whose names stand in this one
        self.entry: list[str] = []
        self.lines: list[str] = []
        self.variables: dict[str, LlvmOperand] = {}
        self.counter = 0
        self.loops: list[tuple[str, str]] = []
        self.closed = False  # the current block already ends in a jump

    def text(self) -> str:
        arguments = [a.arg for a in self.tree.args.args]
        for name in arguments:
            self.variable(name, self.kind_of(name))
            self.emit(f"store i64 %{name}.in, ptr {self.variables[name].text}")
        self.block(self.tree.body)
        if not self.closed:
            self.emit("ret i64 0")
        head = ", ".join(f"i64 %{name}.in" for name in arguments)
        body = "\n".join(f"  {line}" if not line.endswith(":") else line for line in (*self.entry, *self.lines))
        return f"define i64 @{self.tree.name}({head}) {{\nentry:\n{body}\n}}"

    def kind_of(self, name: str) -> Any:
        return kind_of(self.hints.get(name, int))

    def refuse(self, node: ast.AST, why: str) -> AssertionError:
        return AssertionError(f"{self.tree.name}, line {getattr(node, 'lineno', '?')}: {why}: {ast.unparse(node)}")

    # --- small helpers

    def fresh(self) -> str:
        self.counter += 1
        return f"%t{self.counter}"

    def label(self, word: str) -> str:
        self.counter += 1
        return f"{word}{self.counter}"

    def emit(self, line: str) -> None:
        if not self.closed:
            self.lines.append(line)

    def value(self, line: str) -> str:
        name = self.fresh()
        self.emit(f"{name} = {line}")
        return name

    def jump(self, line: str) -> None:
        self.emit(line)
        self.closed = True

    def start(self, label: str) -> None:
        if not self.closed:
            self.lines.append(f"br label %{label}")
        self.lines.append(f"{label}:")
        self.closed = False

    def variable(self, name: str, kind: Any) -> str:
        if name not in self.variables:
            self.variables[name] = LlvmOperand(f"%{name}.at", kind)
            self.entry.append(f"%{name}.at = alloca i64")
        return self.variables[name].text

    def temporary(self) -> str:
        """The place of a value that several branches write."""
        at = self.fresh()
        self.entry.append(f"{at} = alloca i64")
        return at

    def pointer(self, address: str) -> str:
        return self.value(f"inttoptr i64 {address} to ptr")

    def constant(self, node: ast.expr) -> int | None:
        """A whole number that the source says."""
        try:
            found = eval(compile(ast.Expression(node), "<constant>", "eval"), self.globals) if not any(  # noqa: S307
                (isinstance(n, ast.Name) and n.id in self.variables) or isinstance(n, ast.Subscript | ast.Call)
                for n in ast.walk(node)) else None
        except (NameError, AttributeError, TypeError):
            return None
        return int(found) if isinstance(found, int) else None

    # --- statements

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            assert len(node.targets) == 1
            self.store(node.targets[0], self.expression(node.value))
        elif isinstance(node, ast.AugAssign):
            self.augment(node)
        elif isinstance(node, ast.Expr):
            if not isinstance(node.value, ast.Constant):  # a docstring
                self.expression(node.value)
        elif isinstance(node, ast.Return):
            self.give(node)
        elif isinstance(node, ast.If):
            self.branch(node)
        elif isinstance(node, ast.While):
            self.loop(node)
        elif isinstance(node, ast.For):
            self.counted(node)
        elif isinstance(node, ast.Break):
            self.jump(f"br label %{self.loops[-1][1]}")
        elif isinstance(node, ast.Continue):
            self.jump(f"br label %{self.loops[-1][0]}")
        else:
            raise self.refuse(node, "no translation")

    def store(self, target: ast.expr, value: LlvmOperand) -> None:
        """An assignment."""
        if isinstance(target, ast.Name):
            at = self.variable(target.id, value.kind)
            self.fits(target, value.kind, self.variables[target.id].kind)
            self.emit(f"store i64 {value.text}, ptr {at}")
        else:
            at, kind, inline = self.place(target)
            if inline:
                raise self.refuse(target, "what lies in a record is written by its own fields")
            self.fits(target, value.kind, kind)
            self.emit(f"store i64 {value.text}, ptr {self.pointer(at)}")

    def augment(self, node: ast.AugAssign) -> None:
        right = self.expression(node.value)
        if isinstance(node.target, ast.Name):
            kept = self.variables[node.target.id]
            self.fits(node.target, int, kept.kind)
            at = kept.text
        else:
            address, kind, inline = self.place(node.target)
            self.fits(node.target, int, kind)
            assert not inline
            at = self.pointer(address)
        left = self.value(f"load i64, ptr {at}")
        self.emit(f"store i64 {self.binary(node.op, left, right.text, self.constant(node.value))}, ptr {at}")

    def give(self, node: ast.Return) -> None:
        value = self.expression(node.value) if node.value else LlvmOperand("0")
        self.fits(node, value.kind, self.kind_of("return"))
        self.jump(f"ret i64 {value.text}")

    def fits(self, node: ast.AST, kind: Any, wanted: Any) -> None:
        """A number may be an address; what is to be a record is one."""
        derived = isinstance(kind, type) and isinstance(wanted, type) and issubclass(kind, wanted)
        if wanted is not int and kind != wanted and not derived:
            raise self.refuse(node, f"{kind} in place of {wanted}")

    def branch(self, node: ast.If) -> None:
        then, other, end = self.label("then"), self.label("else"), self.label("end")
        self.test(node.test, then, other)
        self.start(then)
        self.block(node.body)
        if not self.closed:
            self.jump(f"br label %{end}")
        self.start(other)
        self.block(node.orelse)
        self.start(end)

    def loop(self, node: ast.While) -> None:
        test, body, end = self.label("test"), self.label("body"), self.label("end")
        self.start(test)
        self.test(node.test, body, end)
        self.start(body)
        self.loops.append((test, end))
        self.block(node.body)
        self.loops.pop()
        if not self.closed:
            self.jump(f"br label %{test}")
        self.start(end)

    def counted(self, node: ast.For) -> None:
        if not (isinstance(node.target, ast.Name) and isinstance(node.iter, ast.Call)
                and isinstance(node.iter.func, ast.Name) and node.iter.func.id == "range"
                and len(node.iter.args) in (1, 2) and not node.orelse):
            raise self.refuse(node.iter, "only a range from a number to another, by one")
        bounds = [self.expression(a).text for a in node.iter.args]
        first, last = ("0", bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
        count, at = self.temporary(), self.variable(node.target.id, int)
        test, body, step, end = (self.label(word) for word in ("test", "body", "step", "end"))
        self.emit(f"store i64 {first}, ptr {count}")
        self.start(test)
        now = self.value(f"load i64, ptr {count}")
        self.jump(f"br i1 {self.value(f'icmp slt i64 {now}, {last}')}, label %{body}, label %{end}")
        self.start(body)
        self.emit(f"store i64 {now}, ptr {at}")
        self.loops.append((step, end))
        self.block(node.body)
        self.loops.pop()
        self.start(step)
        before = self.value(f"load i64, ptr {count}")
        self.emit(f"store i64 {self.value(f'add i64 {before}, 1')}, ptr {count}")
        self.jump(f"br label %{test}")
        self.start(end)

    # --- expressions

    def test(self, node: ast.expr, then: str, other: str) -> None:
        """Jumps by a condition; what `and` and `or` need not look at is not looked at."""
        if isinstance(node, ast.BoolOp):
            for part in node.values[:-1]:
                more = self.label("more")
                self.test(part, *((more, other) if isinstance(node.op, ast.And) else (then, more)))
                self.start(more)
            self.test(node.values[-1], then, other)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self.test(node.operand, other, then)
        else:
            self.jump(f"br i1 {self.condition(node)}, label %{then}, label %{other}")

    def condition(self, node: ast.expr) -> str:
        if isinstance(node, ast.Compare):
            if len(node.ops) != 1:
                raise self.refuse(node, "one comparison at a time")
            sides = [node.left, node.comparators[0]]
            left, right = (self.expression(side) for side in sides)
            ordered = not isinstance(node.ops[0], (ast.Eq, ast.NotEq))
            if ordered and any(self.constant(side) is not None for side in sides) and any(
                    isinstance(side.kind, type) and issubclass(side.kind, Struct) for side in (left, right)):
                raise self.refuse(node, "a record is an address, which is less than no number: name one of its fields")
            return self.value(f"icmp {_COMPARE[type(node.ops[0])]} i64 {left.text}, {right.text}")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self.value(f"xor i1 {self.condition(node.operand)}, true")
        return self.value(f"icmp ne i64 {self.expression(node).text}, 0")

    def expression(self, node: ast.expr) -> LlvmOperand:
        if isinstance(node, ast.Name) and node.id in self.variables:
            variable = self.variables[node.id]
            return LlvmOperand(self.value(f"load i64, ptr {variable.text}"), variable.kind)
        known = self.constant(node)
        if known is not None:
            return LlvmOperand(str(known))
        if isinstance(node, ast.Name):
            return LlvmOperand(self.value(f"ptrtoint ptr @{self.function(node)} to i64"))
        if isinstance(node, ast.BinOp):
            left, right = self.expression(node.left).text, self.expression(node.right).text
            return LlvmOperand(self.binary(node.op, left, right, self.constant(node.right)))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return LlvmOperand(self.value(f"sub i64 0, {self.expression(node.operand).text}"))
        if isinstance(node, ast.BoolOp):
            return self.either(node)
        if isinstance(node, ast.IfExp):
            return self.choice(node)
        if isinstance(node, ast.Attribute | ast.Subscript):
            at, kind, inline = self.place(node)
            return LlvmOperand(at if inline else self.value(f"load i64, ptr {self.pointer(at)}"), kind)
        if isinstance(node, ast.Call):
            return self.call(node)
        return LlvmOperand(self.value(f"zext i1 {self.condition(node)} to i64"))

    def binary(self, op: ast.operator, left: str, right: str, known: int | None) -> str:
        """An operation of arithmetic. Quotients are rounded down, and a remainder has the sign of the divisor."""
        if not isinstance(op, ast.FloorDiv | ast.Mod):
            return self.value(f"{_BINARY[type(op)]} i64 {left}, {right}")
        if known is not None and known > 0 and known & (known - 1) == 0:
            return self.value(f"ashr i64 {left}, {known.bit_length() - 1}" if isinstance(op, ast.FloorDiv)
                              else f"and i64 {left}, {known - 1}")
        rest = self.value(f"srem i64 {left}, {right}")
        signs = rest if known is not None and known > 0 else self.value(f"xor i64 {rest}, {right}")
        unlike = self.value(f"icmp slt i64 {signs}, 0")
        down = self.value(f"and i1 {unlike}, {self.value(f'icmp ne i64 {rest}, 0')}")
        if isinstance(op, ast.Mod):
            return self.value(f"add i64 {rest}, {self.value(f'select i1 {down}, i64 {right}, i64 0')}")
        return self.value(f"add i64 {self.value(f'sdiv i64 {left}, {right}')}, {self.value(f'sext i1 {down} to i64')}")

    def either(self, node: ast.BoolOp) -> LlvmOperand:
        """The value of `and`, `or`: that of the operand which decides."""
        at, end = self.temporary(), self.label("end")
        for position, part in enumerate(node.values):
            value = self.expression(part).text
            self.emit(f"store i64 {value}, ptr {at}")
            if position + 1 < len(node.values):
                more = self.label("more")
                then, other = (more, end) if isinstance(node.op, ast.And) else (end, more)
                self.jump(f"br i1 {self.value(f'icmp ne i64 {value}, 0')}, label %{then}, label %{other}")
                self.start(more)
        self.start(end)
        return LlvmOperand(self.value(f"load i64, ptr {at}"))

    def choice(self, node: ast.IfExp) -> LlvmOperand:
        """`a if c else b`: only one of both is computed."""
        at, then, other, end = self.temporary(), self.label("then"), self.label("else"), self.label("end")
        self.test(node.test, then, other)
        kinds = []
        for label, part in ((then, node.body), (other, node.orelse)):
            self.start(label)
            value = self.expression(part)
            kinds.append(value.kind)
            self.emit(f"store i64 {value.text}, ptr {at}")
            self.jump(f"br label %{end}")
        self.start(end)
        return LlvmOperand(self.value(f"load i64, ptr {at}"), kinds[0] if kinds[0] == kinds[1] else int)

    def place(self, node: ast.expr) -> tuple[str, Any, bool]:
        """The address of a field or element, its type, and whether it lies there itself."""
        if isinstance(node, ast.Attribute):
            record = self.expression(node.value)
            if not (isinstance(record.kind, type) and issubclass(record.kind, Struct)
                    and node.attr in record.kind.fields):
                raise self.refuse(node, f"{record.kind} has no such field")
            field = record.kind.fields[node.attr]
            text = self.value(f"add i64 {record.text}, {8 * field.at}") if field.at else record.text
            return text, field.kind, field.inline is not None
        assert isinstance(node, ast.Subscript)
        array = self.expression(node.value)
        if get_origin(array.kind) is not Array:
            raise self.refuse(node, f"{array.kind} is no array")
        element, known = element_of(array.kind), self.constant(node.slice)
        size = 8 * words_of(element)
        if known is not None:
            offset = str(size * known)
        else:
            index = self.expression(node.slice).text
            offset = self.value(f"shl i64 {index}, 3" if size == 8 else f"mul i64 {index}, {size}")
        return self.value(f"add i64 {array.text}, {offset}"), element, element is not int

    def function(self, node: ast.Name) -> str:
        found = self.globals.get(node.id)
        if not inspect.isfunction(found):
            raise self.refuse(node, "no variable, constant or function")
        if found not in self.named:
            self.named.append(found)
        return found.__name__

    def call(self, node: ast.Call) -> LlvmOperand:
        if not isinstance(node.func, ast.Name):
            raise self.refuse(node, "no function")
        callee = self.globals.get(node.func.id)
        if isinstance(callee, type) and issubclass(callee, Struct):
            return LlvmOperand(self.expression(node.args[0]).text, callee)
        if callee in _WORDS:
            return self.word(callee.__name__, node)
        name = self.function(node.func)
        assert callable(callee)
        hints, parameters = get_type_hints(callee), inspect.signature(callee).parameters
        values = [self.expression(n) for n in node.args]
        assert len(values) == len(parameters), name
        for parameter, value in zip(parameters, values, strict=True):
            self.fits(node, value.kind, kind_of(hints.get(parameter, int)))
        return LlvmOperand(self.value(f"call i64 @{name}({', '.join(f'i64 {v.text}' for v in values)})"),
                     kind_of(hints.get("return", int)))

    def word(self, name: str, node: ast.Call) -> LlvmOperand:
        """A call of one of the words of the subset."""
        if name in ("new", "words", "size_of"):
            kind = eval(compile(ast.Expression(node.args[0]), "<size>", "eval"), self.globals)  # noqa: S307
            count = kind if name == "words" else words_of(kind)
            if name == "size_of":
                return LlvmOperand(str(8 * count))
            at = self.fresh()
            self.entry.append(f"{at} = alloca [{count} x i64], align 64")
            self.emit(f"call void @llvm.memset.p0.i64(ptr {at}, i8 0, i64 {8 * count}, i1 false)")
            return LlvmOperand(self.value(f"ptrtoint ptr {at} to i64"), Array[int] if name == "words" else kind)
        if name == "array_at":
            element = eval(compile(ast.Expression(node.args[0]), "<type>", "eval"), self.globals)  # noqa: S307
            return LlvmOperand(self.expression(node.args[1]).text, Array[element])  # type: ignore[valid-type]
        if name == "tail":
            array = self.expression(node.args[0])
            size = 8 * words_of(element_of(array.kind))
            count = self.expression(node.args[1]).text
            offset = self.value(f"shl i64 {count}, 3" if size == 8 else f"mul i64 {count}, {size}")
            return LlvmOperand(self.value(f"add i64 {array.text}, {offset}"), array.kind)
        values = [self.expression(n).text for n in node.args]
        if name == "address_of":
            return LlvmOperand(values[0])
        if name in ("minimum", "maximum"):
            test = self.value(f"icmp {'slt' if name == 'minimum' else 'sgt'} i64 {values[0]}, {values[1]}")
            return LlvmOperand(self.value(f"select i1 {test}, i64 {values[0]}, i64 {values[1]}"))
        if name in ("call", "call_void"):
            arguments = ", ".join(f"i64 {v}" for v in values[1:])
            function = self.pointer(values[0])
            if name == "call":
                return LlvmOperand(self.value(f"call i64 {function}({arguments})"))
            self.emit(f"call void {function}({arguments})")
            return LlvmOperand("0")
        return LlvmOperand(self.memory(name, values))

    def memory(self, name: str, values: list[str]) -> str:
        if name == "copy_bytes":
            target, source = self.pointer(values[0]), self.pointer(values[1])
            self.emit(f"call void @llvm.memcpy.p0.p0.i64(ptr {target}, ptr {source}, i64 {values[2]}, i1 false)")
            return "0"
        if name == "fill_zero":
            self.emit(f"call void @llvm.memset.p0.i64(ptr {self.pointer(values[0])}, i8 0, i64 {values[1]}, i1 false)")
            return "0"
        kind, bits = (name[:4], name[4:]) if name.startswith("load") else (name[:5], name[5:])
        at = self.pointer(values[0])
        if kind == "load":
            loaded = self.value(f"load i{bits}, ptr {at}, align {int(bits) // 8}")
            return loaded if bits == "64" else self.value(f"zext i{bits} {loaded} to i64")
        narrow = values[1] if bits == "64" else self.value(f"trunc i64 {values[1]} to i{bits}")
        self.emit(f"store i{bits} {narrow}, ptr {at}, align {int(bits) // 8}")
        return "0"
