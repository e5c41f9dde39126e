"""Native routines written in Python: a small subset, 64-bit integers only, printed as LLVM text.

The run time's own routines (the host of plans, placement, strided copies) are too long for hand-written LLVM and too
hot for Python. They are written as plain Python functions, whose source this file translates:

    def total(address, count):            define i64 @total(i64 %address, i64 %count)
        result = 0                          ... load, add, branch ...
        for i in range(count):
            result += word(address, i)
        return result

Every variable is an i64; an address is an i64. There are: assignment, `if`, `while`, `for _ in range(...)`, `break`,
`continue`, `return`; `+ - *`, `//` and `%` (of non-negative numbers), comparisons, `and or not` (both sides are
always evaluated), `a if c else b` (likewise), calls among the functions, a function's name for its address, and the
words below. Module-level whole numbers may be used as constants.
"""
from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence

NOT_HERE = "a word of the native subset, to be translated, not run"


def word(address: int, index: int) -> int:
    """The i64 at address + 8*index."""
    raise AssertionError(NOT_HERE)


def set_word(address: int, index: int, value: int) -> None:
    """Writes the i64 at address + 8*index."""
    raise AssertionError(NOT_HERE)


def words(count: int) -> int:
    """The address of `count` zeroed words on the stack; `count` is a literal."""
    raise AssertionError(NOT_HERE)


def load8(address: int) -> int:
    """The byte at an address, unsigned; likewise load16, load32, load64."""
    raise AssertionError(NOT_HERE)


def store8(address: int, value: int) -> None:
    """Writes the low byte of a value; likewise store16, store32, store64."""
    raise AssertionError(NOT_HERE)


load16 = load32 = load64 = load8
store16 = store32 = store64 = store8


def copy_bytes(target: int, source: int, count: int) -> None:
    """memcpy."""
    raise AssertionError(NOT_HERE)


def fill_zero(target: int, count: int) -> None:
    """memset to 0."""
    raise AssertionError(NOT_HERE)


def call(function: int, *arguments: int) -> int:
    """Calls the function at an address with i64 arguments; its result is an i64."""
    raise AssertionError(NOT_HERE)


def call_void(function: int | Callable[..., int], *arguments: int | Callable[..., int]) -> None:
    """Calls the function at an address with i64 arguments; it has no result."""
    raise AssertionError(NOT_HERE)


def minimum(left: int, right: int) -> int:
    """The smaller."""
    raise AssertionError(NOT_HERE)


def maximum(left: int, right: int) -> int:
    """The larger."""
    raise AssertionError(NOT_HERE)


_BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.FloorDiv: "sdiv", ast.Mod: "srem",
           ast.BitAnd: "and", ast.BitOr: "or", ast.LShift: "shl", ast.RShift: "ashr"}
_COMPARE = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "slt", ast.LtE: "sle", ast.Gt: "sgt", ast.GtE: "sge"}


def translate(functions: Sequence[Callable[..., int]], constants: Mapping[str, int]) -> str:
    """LLVM text of `functions`; they may call each other and use `constants` by name."""
    names = {f.__name__: len(inspect.signature(f).parameters) for f in functions}
    assert len(names) == len(functions), "two routines have one name"
    parts = ["declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)",
             "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)"]
    for function in functions:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        assert isinstance(tree, ast.FunctionDef)
        parts.append(_Function(tree, names, constants).text())
    return "\n\n".join(parts) + "\n"


class _Function:
    """Translates one function; every variable lives in an alloca, which LLVM turns into registers."""

    def __init__(self, tree: ast.FunctionDef, functions: Mapping[str, int], constants: Mapping[str, int]) -> None:
        self.tree = tree
        self.functions = functions
        self.constants = constants
        self.entry: list[str] = []
        self.lines: list[str] = []
        self.variables: dict[str, str] = {}
        self.counter = 0
        self.loops: list[tuple[str, str]] = []
        self.closed = False  # the current block already ends in a jump

    def text(self) -> str:
        arguments = [a.arg for a in self.tree.args.args]
        for name in arguments:
            self.emit(f"store i64 %{name}.in, ptr {self.variable(name)}")
        self.block(self.tree.body)
        if not self.closed:
            self.emit("ret i64 0")
        head = ", ".join(f"i64 %{name}.in" for name in arguments)
        body = "\n".join(f"  {line}" if not line.endswith(":") else line for line in (*self.entry, *self.lines))
        return f"define i64 @{self.tree.name}({head}) {{\nentry:\n{body}\n}}"

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

    def variable(self, name: str) -> str:
        if name not in self.variables:
            self.variables[name] = f"%{name}.at"
            self.entry.append(f"%{name}.at = alloca i64")
        return self.variables[name]

    def pointer(self, address: str) -> str:
        return self.value(f"inttoptr i64 {address} to ptr")

    # --- statements

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            assert isinstance(target, ast.Name)
            self.emit(f"store i64 {self.expression(node.value)}, ptr {self.variable(target.id)}")
        elif isinstance(node, ast.AugAssign):
            assert isinstance(node.target, ast.Name)
            at = self.variable(node.target.id)
            right = self.expression(node.value)
            left = self.value(f"load i64, ptr {at}")
            self.emit(f"store i64 {self.value(f'{_BINARY[type(node.op)]} i64 {left}, {right}')}, ptr {at}")
        elif isinstance(node, ast.Expr):
            if not isinstance(node.value, ast.Constant):  # a docstring
                self.expression(node.value)
        elif isinstance(node, ast.Return):
            self.jump(f"ret i64 {self.expression(node.value) if node.value else 0}")
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
            raise AssertionError(f"no translation of {ast.dump(node)}")

    def branch(self, node: ast.If) -> None:
        then, other, end = self.label("then"), self.label("else"), self.label("end")
        self.jump(f"br i1 {self.condition(node.test)}, label %{then}, label %{other}")
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
        self.jump(f"br i1 {self.condition(node.test)}, label %{body}, label %{end}")
        self.start(body)
        self.loops.append((test, end))
        self.block(node.body)
        self.loops.pop()
        if not self.closed:
            self.jump(f"br label %{test}")
        self.start(end)

    def counted(self, node: ast.For) -> None:
        assert isinstance(node.target, ast.Name) and isinstance(node.iter, ast.Call)
        bounds = [self.expression(a) for a in node.iter.args]
        first, last = ("0", bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
        at = self.variable(node.target.id)
        test, body, step, end = (self.label(word) for word in ("test", "body", "step", "end"))
        self.emit(f"store i64 {first}, ptr {at}")
        self.start(test)
        now = self.value(f"load i64, ptr {at}")
        self.jump(f"br i1 {self.value(f'icmp slt i64 {now}, {last}')}, label %{body}, label %{end}")
        self.start(body)
        self.loops.append((step, end))
        self.block(node.body)
        self.loops.pop()
        self.start(step)
        before = self.value(f"load i64, ptr {at}")
        self.emit(f"store i64 {self.value(f'add i64 {before}, 1')}, ptr {at}")
        self.jump(f"br label %{test}")
        self.start(end)

    # --- expressions

    def condition(self, node: ast.expr) -> str:
        if isinstance(node, ast.Compare):
            left = self.expression(node.left)
            right = self.expression(node.comparators[0])
            assert len(node.ops) == 1
            return self.value(f"icmp {_COMPARE[type(node.ops[0])]} i64 {left}, {right}")
        if isinstance(node, ast.BoolOp):
            word = "and" if isinstance(node.op, ast.And) else "or"
            result = self.condition(node.values[0])
            for part in node.values[1:]:
                result = self.value(f"{word} i1 {result}, {self.condition(part)}")
            return result
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self.value(f"xor i1 {self.condition(node.operand)}, true")
        return self.value(f"icmp ne i64 {self.expression(node)}, 0")

    def expression(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return str(int(node.value))  # type: ignore[arg-type]
        if isinstance(node, ast.Name):
            if node.id in self.variables:
                return self.value(f"load i64, ptr {self.variables[node.id]}")
            if node.id in self.functions:
                return self.value(f"ptrtoint ptr @{node.id} to i64")
            return str(self.constants[node.id])
        if isinstance(node, ast.BinOp):
            left, right = self.expression(node.left), self.expression(node.right)
            return self.value(f"{_BINARY[type(node.op)]} i64 {left}, {right}")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self.value(f"sub i64 0, {self.expression(node.operand)}")
        if isinstance(node, ast.IfExp):
            test = self.condition(node.test)
            return self.value(f"select i1 {test}, i64 {self.expression(node.body)}, i64 {self.expression(node.orelse)}")
        if isinstance(node, ast.Call):
            assert isinstance(node.func, ast.Name)
            return self.call(node.func.id, node.args)
        return self.value(f"zext i1 {self.condition(node)} to i64")

    def call(self, name: str, nodes: Sequence[ast.expr]) -> str:
        if name == "words":
            count = ast.literal_eval(nodes[0])
            at = self.fresh()
            self.entry.append(f"{at} = alloca [{count} x i64], align 64")
            self.emit(f"call void @llvm.memset.p0.i64(ptr {at}, i8 0, i64 {8 * count}, i1 false)")
            return self.value(f"ptrtoint ptr {at} to i64")
        values = [self.expression(n) for n in nodes]
        if name in self.functions:
            assert len(values) == self.functions[name], name
            return self.value(f"call i64 @{name}({', '.join(f'i64 {v}' for v in values)})")
        if name in ("word", "set_word"):
            offset = self.value(f"shl i64 {values[1]}, 3")
            at = self.pointer(self.value(f"add i64 {values[0]}, {offset}"))
            if name == "word":
                return self.value(f"load i64, ptr {at}")
            self.emit(f"store i64 {values[2]}, ptr {at}")
            return "0"
        if name in ("minimum", "maximum"):
            test = self.value(f"icmp {'slt' if name == 'minimum' else 'sgt'} i64 {values[0]}, {values[1]}")
            return self.value(f"select i1 {test}, i64 {values[0]}, i64 {values[1]}")
        if name in ("call", "call_void"):
            arguments = ", ".join(f"i64 {v}" for v in values[1:])
            function = self.pointer(values[0])
            if name == "call":
                return self.value(f"call i64 {function}({arguments})")
            self.emit(f"call void {function}({arguments})")
            return "0"
        return self.memory(name, values)

    def memory(self, name: str, values: list[str]) -> str:
        if name == "copy_bytes":
            target, source = self.pointer(values[0]), self.pointer(values[1])
            self.emit(f"call void @llvm.memcpy.p0.p0.i64(ptr {target}, ptr {source}, i64 {values[2]}, i1 false)")
            return "0"
        if name == "fill_zero":
            self.emit(f"call void @llvm.memset.p0.i64(ptr {self.pointer(values[0])}, i8 0, i64 {values[1]}, i1 false)")
            return "0"
        kind, bits = (name[:4], name[4:]) if name.startswith("load") else (name[:5], name[5:])
        assert kind in ("load", "store") and bits in ("8", "16", "32", "64"), name
        at = self.pointer(values[0])
        if kind == "load":
            loaded = self.value(f"load i{bits}, ptr {at}, align {int(bits) // 8}")
            return loaded if bits == "64" else self.value(f"zext i{bits} {loaded} to i64")
        narrow = values[1] if bits == "64" else self.value(f"trunc i64 {values[1]} to i{bits}")
        self.emit(f"store i{bits} {narrow}, ptr {at}, align {int(bits) // 8}")
        return "0"
