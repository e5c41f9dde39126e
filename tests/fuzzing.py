"""Random typed graphs, run natively and by the reference interpreter; as a program, a worker that reports line by line.

    python tests/fuzzing.py 100 25 5     seeds 100 to 124, five shapes each
"""
from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import anyshape.ops.table  # noqa: F401  (fills the op table)
from anyshape.base.config import Config
from anyshape.base.errors import VerifyError
from anyshape.compiler.driver import compile_graph
from anyshape.ir.build import Builder
from anyshape.ir.graph import Graph, Node, Value
from anyshape.ir.parse import parse
from anyshape.ir.show import show
from anyshape.ir.types import SizeType, TensorType
from anyshape.passes.dce import dce
from anyshape.runtime.torch_ops.reference_interpreter import interpret
from anyshape.sym.expr import Size, evaluate, floordiv, product, symbol
from anyshape.sym.facts import Facts
from anyshape.torch_compat.dtypes import TORCH_DTYPES

SYMBOLS = ("a", "b", "c")
LARGEST = 4096  # elements of a value at the largest sizes
FLOATS = ("f32", "f64", "bf16")
SMOOTH = ("neg", "abs", "sin", "cos", "tanh", "sigmoid", "erf", "atan", "asinh", "floor_exact", "sign_exact")
BOUNDED = frozenset(("sin", "cos", "tanh", "sigmoid", "erf", "atan"))
COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")


class Maker:
    """Grows one graph from a seed.

    `exact`: names of values on which native code and the interpreter agree to the last bit, so that what is not
    continuous (comparisons, rounding, casts to integers) may be computed from them. `bounded`: values of small size.
    """

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.low = self.draw.choice((0, 1, 1))
        high = self.draw.choice((5, 9, 17))
        self.facts = Facts(ranges=tuple((name, self.low, high) for name in SYMBOLS))
        self.high = dict.fromkeys(SYMBOLS, high)
        self.builder = Builder(f"fuzz_{seed}", self.facts)
        self.pool: list[Value] = []
        self.exact: set[str] = set()
        self.bounded: set[str] = set()

    # ---- choices

    def size(self) -> Size:
        return self.draw.choice((*map(symbol, SYMBOLS), *map(symbol, SYMBOLS), 1, 2, 3, 4))

    def value(self, want: Callable[[TensorType], bool] = lambda kind: True) -> Value | None:
        known = [value for value in self.pool if want(value.tensor)]
        if not known:
            return None
        return self.draw.choice(known[-6:] if self.draw.random() < 0.6 else known)

    def like(self, other: Value) -> Value:
        """A value of the same dtype that broadcasts with `other`; often `other` itself."""
        kind = other.tensor

        def fits(own: TensorType) -> bool:
            if own.dtype != kind.dtype:
                return False
            pairs = zip(reversed(own.shape), reversed(kind.shape))
            return all(x == y or x == 1 or y == 1 for x, y in pairs)
        known = [value for value in self.pool if fits(value.tensor)]
        return self.draw.choice(known)

    # ---- growing

    def input(self) -> None:
        dtype = self.draw.choice(("f32", "f32", "f32", "f64", "bf16", "i64", "bool"))
        shape = tuple(self.size() for _ in range(self.draw.choice((0, 1, 2, 2, 3, 3))))
        strides = None
        if len(shape) == 2 and self.draw.random() < 0.3:
            strides = (1, shape[0])
        value = self.builder.input(f"x{len(self.builder.inputs)}", TensorType(dtype, shape, strides))
        self.pool.append(value)
        self.exact.add(value.name)
        self.bounded.add(value.name)

    def add(self, op: str, *inputs: Any, exact: bool = False, bounded: bool = False, **attrs: Any) -> Value:
        value = self.builder.op(op, *inputs, **attrs)
        if evaluate(value.tensor.count, self.high) > LARGEST:
            self.builder.nodes.pop()
            raise VerifyError("too large")
        self.pool.append(value)
        sources = [item.name for item in inputs if isinstance(item, Value)]
        if exact and all(name in self.exact for name in sources):
            self.exact.add(value.name)
        if bounded or op in BOUNDED:
            self.bounded.add(value.name)
        return value

    def step(self) -> None:
        kinds = (self.unary, self.unary, self.binary, self.binary, self.binary, self.choose, self.cast, self.reduce,
                 self.reduce, self.permute, self.reshape, self.slice, self.broadcast, self.concat, self.pad, self.take,
                 self.flip, self.compare, self.create, self.matmul, self.bits, self.scatter)
        mark = len(self.builder.nodes)
        try:
            self.draw.choice(kinds)()
        except VerifyError:  # the choice does not type; another one will
            del self.builder.nodes[mark:]
            made = {value.name for node in self.builder.nodes for value in node.outputs}
            made |= {value.name for value in self.builder.inputs}
            self.pool = [value for value in self.pool if value.name in made]

    def unary(self) -> None:
        x = self.value(lambda kind: kind.dtype in FLOATS)
        if x is None:
            return
        op = self.draw.choice(SMOOTH)
        if op.endswith("_exact"):
            if x.name in self.exact:
                self.add(op[:-6], x, exact=True)
            return
        if op in ("sin", "cos") and x.name not in self.bounded:
            op = "tanh"  # a large argument would magnify its rounding
        self.add(op, x, exact=op in ("neg", "abs"), bounded=op in BOUNDED or (
            op in ("neg", "abs") and x.name in self.bounded))

    def binary(self) -> None:
        x = self.value(lambda kind: kind.dtype in (*FLOATS, "i64"))
        if x is None:
            return
        if x.tensor.dtype == "i64":
            y = self.draw.choice((self.like(x), self.draw.randint(-3, 5)))
            op = self.draw.choice(("add", "sub", "mul", "maximum", "minimum", "floor_div", "remainder"))
            if op in ("floor_div", "remainder"):
                y = self.add("maximum", y, 1, exact=True) if isinstance(y, Value) else 3
            self.add(op, x, y, exact=True)
            return
        y = self.draw.choice((self.like(x), self.like(x), self.draw.choice((0.5, -2.0, 1.5))))
        op = self.draw.choice(("add", "sub", "mul", "mul", "maximum", "minimum", "div", "atan2", "copysign"))
        names = [item.name for item in (x, y) if isinstance(item, Value)]
        calm = all(name in self.bounded for name in names)
        if op == "div":
            y = self.add("add", self.add("abs", y), 1.0) if isinstance(y, Value) else y
        elif op == "copysign" and not all(name in self.exact for name in names):
            op = "add"
        elif op == "atan2":
            if isinstance(y, Value):
                y = self.add("add", self.add("abs", y), 0.5)  # away from the jump
            else:
                y = 1.5
        self.add(op, x, y, exact=op in ("maximum", "minimum", "copysign"), bounded=calm and op != "mul")

    def compare(self) -> None:
        x = self.value(lambda kind: kind.dtype != "bool")
        if x is None or x.name not in self.exact:
            return
        y = self.like(x)
        if y.name not in self.exact:
            y = x
        self.add(self.draw.choice(COMPARE), x, y, exact=True)

    def choose(self) -> None:
        condition = self.value(lambda kind: kind.dtype == "bool")
        x = self.value(lambda kind: condition is not None and kind.shape == condition.tensor.shape)
        if condition is None or x is None:
            return
        self.add("where", condition, x, self.like(x), exact=x.name in self.exact and False)

    def bits(self) -> None:
        x = self.value(lambda kind: kind.dtype in ("bool", "i64"))
        if x is not None:
            self.add(self.draw.choice(("bit_and", "bit_or", "bit_xor")), x, self.like(x), exact=True)

    def cast(self) -> None:
        x = self.value()
        if x is None:
            return
        targets = ["f32", "f64", "bf16"]
        if x.name in self.exact:
            targets += ["i64", "bool", "i32"] if x.tensor.dtype != "i32" else ["i64"]
        if x.tensor.dtype in targets:
            targets.remove(x.tensor.dtype)
        self.add("cast", x, dtype=self.draw.choice(targets), exact=True, bounded=x.name in self.bounded)

    def reduce(self) -> None:
        x = self.value(lambda kind: kind.rank > 0 and kind.dtype != "i32")
        if x is None:
            return
        dims = tuple(sorted(self.draw.sample(range(x.tensor.rank), self.draw.randint(1, x.tensor.rank))))
        ops = ("any", "all") if x.tensor.dtype == "bool" else ("sum", "sum", "amax", "amin")
        op = self.draw.choice(ops)
        keep = self.draw.random() < 0.5
        result = self.add(op, x, dims=dims, keep=keep, exact=op != "sum" or x.tensor.dtype == "i64")
        if keep and self.draw.random() < 0.7 and x.tensor.dtype in FLOATS:
            self.add("sub", x, result)

    def permute(self) -> None:
        x = self.value(lambda kind: kind.rank > 1)
        if x is not None:
            order = list(range(x.tensor.rank))
            self.draw.shuffle(order)
            self.view("permute", x, dims=tuple(order))

    def view(self, op: str, *inputs: Value, **attrs: Any) -> Value:
        return self.add(op, *inputs, exact=True, bounded=all(v.name in self.bounded for v in inputs), **attrs)

    def reshape(self) -> None:
        x = self.value(lambda kind: kind.rank > 0)
        if x is None:
            return
        shape = list(x.tensor.shape)
        at = self.draw.randrange(len(shape))
        choice = self.draw.random()
        if choice < 0.5 and at + 1 < len(shape):
            shape[at:at + 2] = [shape[at] * shape[at + 1]]
        elif choice < 0.7:
            shape.insert(at, 1)
        elif shape[at] in (4, 2) or not isinstance(shape[at], int):
            parts = [shape[at]] if not isinstance(shape[at], int) else [2, shape[at] // 2]
            shape[at:at + 1] = parts
        else:
            shape = [product(shape)]
        self.view("reshape", x, shape=tuple(shape))

    def slice(self) -> None:
        x = self.value(lambda kind: kind.rank > 0)
        if x is None:
            return
        at = self.draw.randrange(x.tensor.rank)
        size = x.tensor.shape[at]
        options = [(0, floordiv(size + 1, 2), 2)]
        if self.low and self.facts.at_least(size, 1) if hasattr(self.facts, "at_least") else self.low:
            options += [(1, size - 1, 1), (0, size - 1, 1), (0, 1, 1)]
        start, count, step = self.draw.choice(options)
        if isinstance(size, int) and start + (count - 1) * step >= size:
            return
        self.view("slice", x, dim=at, start=start, count=count, step=step)

    def broadcast(self) -> None:
        x = self.value()
        if x is None:
            return
        shape = tuple(self.size() if item == 1 and self.draw.random() < 0.7 else item for item in x.tensor.shape)
        if self.draw.random() < 0.5:
            shape = (self.size(), *shape)
        self.view("broadcast", x, shape=shape)

    def concat(self) -> None:
        x = self.value(lambda kind: kind.rank > 0)
        if x is None:
            return
        at = self.draw.randrange(x.tensor.rank)

        def beside(kind: TensorType) -> bool:
            return kind.dtype == x.tensor.dtype and kind.rank == x.tensor.rank and all(
                d == at or one == other for d, (one, other) in enumerate(zip(kind.shape, x.tensor.shape)))
        others = [self.value(beside) for _ in range(self.draw.choice((1, 1, 2)))]
        self.view("concat", x, *[value for value in others if value is not None], dim=at)

    def pad(self) -> None:
        x = self.value(lambda kind: kind.rank > 0)
        if x is None:
            return
        low = tuple(self.draw.choice((0, 0, 1, 2)) for _ in x.tensor.shape)
        high = tuple(self.draw.choice((0, 0, 1, symbol("a"))) for _ in x.tensor.shape)
        fill = {"bool": True, "i64": -7, "i32": 3}.get(x.tensor.dtype, 0.25)
        self.view("pad", x, low=low, high=high, value=fill)

    def flip(self) -> None:
        x = self.value(lambda kind: kind.rank > 0)
        if x is not None:
            self.view("flip", x, dims=(self.draw.randrange(x.tensor.rank),))

    def take(self) -> None:
        """take, gather and index with numbers that a remainder keeps inside."""
        x = self.value(lambda kind: kind.rank > 0 and all(not isinstance(s, int) or s > 0 for s in kind.shape))
        raw = self.value(lambda kind: kind.dtype == "i64" and kind.rank < 3)
        if x is None or raw is None or raw.name not in self.exact or not self.low:
            return
        at = self.draw.randrange(x.tensor.rank)
        size = x.tensor.shape[at]
        if isinstance(size, int):
            limit = self.add("full", size, shape=(), dtype="i64", exact=True)
        else:
            limit = self.add("full", size, shape=(), dtype="i64", exact=True)
            limit = self.add("maximum", limit, 1, exact=True)
        inside = self.add("remainder", raw, limit, exact=True)
        if self.draw.random() < 0.6:
            self.view("take", x, inside, dim=at)
        else:
            self.view("index", x, inside, dims=(at,))

    def scatter(self) -> None:
        """Rows of a value of the same type put, added or compared at places of which some are outside."""
        x = self.value(lambda kind: kind.rank > 0 and kind.dtype != "bf16")
        raw = self.value(lambda kind: kind.dtype == "i64" and kind.rank < 3)
        if x is None or raw is None or raw.name not in self.exact or not self.low:
            return
        other = self.draw.choice([value for value in self.pool if value.tensor.dense() == x.tensor.dense()])
        at = self.draw.randrange(x.tensor.rank)
        rows = self.view("take", other, self.add("remainder", raw, 1, exact=True), dim=at)
        ends = ("",) if x.tensor.dtype == "bool" else ("", "_add", "_add", "_amax")
        self.view(f"put{self.draw.choice(ends)}", x, rows, raw, dims=(at,))

    def create(self) -> None:
        if self.draw.random() < 0.5:
            count = self.size()
            self.add("iota", count=count, start=self.draw.randint(-2, 2), step=self.draw.choice((1, 1, 2)),
                     dtype=self.draw.choice(("i64", "f32")), exact=True)
        else:
            dtype = self.draw.choice(("f32", "i64", "bf16"))
            number: Any = self.draw.choice((2, symbol("b"))) if dtype == "i64" else 0.75
            self.add("full", number, shape=(self.size(), self.size()), dtype=dtype, exact=True, bounded=True)

    def matmul(self) -> None:
        x = self.value(lambda kind: kind.rank >= 2 and kind.dtype in ("f32", "f64"))
        if x is None:
            return
        kind = x.tensor

        def fits(own: TensorType) -> bool:
            return (own.dtype == kind.dtype and own.rank == kind.rank and own.shape[:-2] == kind.shape[:-2]
                    and own.shape[-2] == kind.shape[-1])
        y = self.value(fits)
        if y is None:
            order = (*range(kind.rank - 2), kind.rank - 1, kind.rank - 2)
            y = self.view("permute", x, dims=order)
        self.add("tanh", self.add("matmul", x, y))


def make_graph(seed: int) -> Graph:
    """The graph of a seed: two to four inputs, about thirty equations, up to five outputs."""
    maker = Maker(seed)
    for _ in range(maker.draw.randint(2, 4)):
        maker.input()
    for _ in range(maker.draw.randint(12, 45)):
        maker.step()
    used = {value.name for node in maker.builder.nodes for value in node.values()}
    made = [value for node in maker.builder.nodes for value in node.outputs]
    ends = [value for value in made if value.name not in used] or made[-1:] or list(maker.builder.inputs)
    outputs = tuple(maker.draw.sample(ends, min(5, len(ends))))
    if made and maker.draw.random() < 0.3:
        outputs += (maker.draw.choice(made),)
    for name in SYMBOLS:
        maker.builder.input(name, SizeType())
    strides = tuple(dense_transposed(value) if maker.draw.random() < 0.2 else None for value in outputs)
    graph = maker.builder.finish(outputs, output_strides=strides)
    return dce(graph, Config())


def dense_transposed(value: Value) -> tuple[Size, ...] | None:
    """Strides of a value whose two last dims lie in the other order."""
    shape = value.tensor.shape
    if len(shape) != 2:
        return None
    return (1, shape[0])


def shapes_of(graph: Graph, count: int, seed: int) -> list[dict[str, int]]:
    """Sizes for the symbols: the least, the largest, ones, then random ones."""
    draw = random.Random(seed)
    ranges = {name: graph.facts.range_of(name) for name in SYMBOLS}
    least = {name: low for name, (low, _) in ranges.items()}
    most = {name: high for name, (_, high) in ranges.items()}
    found = [most, {**most, "a": 1}, least]
    while len(found) < count:
        found.append({name: draw.randint(low, high) for name, (low, high) in ranges.items()})
    return found[:count]


def make_inputs(graph: Graph, sizes: dict[str, int], seed: int) -> list[Any]:
    """Tensors and numbers for the graph's inputs."""
    draw = torch.Generator().manual_seed(seed)
    found: list[Any] = []
    for value in graph.inputs:
        if isinstance(value.type, SizeType):
            found.append(sizes[value.name])
            continue
        shape = tuple(evaluate(size, sizes) for size in value.type.shape)
        if value.type.dtype == "bool":
            tensor = torch.rand(shape, generator=draw) < 0.5
        elif value.type.dtype in FLOATS:
            tensor = torch.randn(shape, generator=draw).to(TORCH_DTYPES[value.type.dtype])
        else:
            tensor = torch.randint(-4, 9, shape, generator=draw).to(TORCH_DTYPES[value.type.dtype])
        if value.type.strides is not None:
            strides = tuple(evaluate(stride, sizes) for stride in value.type.strides)
            tensor = torch.empty_strided(shape, strides, dtype=tensor.dtype).copy_(tensor)
        found.append(tensor)
    return found


# ---- comparing


def in_double(graph: Graph) -> Graph:
    """The same graph with every float in f64."""
    return parse(re.sub(r"\b(bf16|f16|f32)\b", "f64", show(graph)))


def differs(graph: Graph, executable: Any, exact_graph: Graph, inputs: Sequence[Any]) -> str:
    """How the native results differ from the interpreter's; empty when they agree, or when it refuses the inputs."""
    try:
        wanted, _, _ = interpret(graph, inputs)
        doubled = [x.double() if isinstance(x, torch.Tensor) and x.dtype.is_floating_point else x for x in inputs]
        doubled = [restrided(x, given) for x, given in zip(doubled, inputs, strict=True)]
        exact, _, _ = interpret(exact_graph, doubled)
    except (IndexError, RuntimeError):
        return ""  # amax of no elements, for example
    try:
        found = executable(list(inputs))
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error).splitlines()[0]}"
    unit = tolerance(graph)
    for position, (own, other, best) in enumerate(zip(found, wanted, exact, strict=True)):
        if isinstance(other, torch.Tensor):
            why = tensor_differs(own, other, best, unit)
            if why:
                return f"output {position}: {why}"
    return ""


def restrided(tensor: Any, given: Any) -> Any:
    if not isinstance(tensor, torch.Tensor) or tensor.stride() == given.stride():
        return tensor
    return torch.empty_strided(given.shape, given.stride(), dtype=tensor.dtype).copy_(tensor)


def tolerance(graph: Graph) -> float:
    """Relative to the largest element: that of the coarsest float in the graph, since casts carry its rounding on."""
    values = [value for value in graph.inputs if isinstance(value.type, TensorType)]
    values += [value for node in graph.nodes for value in node.outputs]
    units = {"f64": 1e-9, "f32": 1e-4, "bf16": 2e-2}
    return max((units.get(value.tensor.dtype, 0.0) for value in values), default=0.0)


def tensor_differs(own: torch.Tensor, other: torch.Tensor, best: torch.Tensor, unit: float) -> str:
    if own.shape != other.shape or own.dtype != other.dtype:
        return f"{own.dtype}{list(own.shape)} is not {other.dtype}{list(other.shape)}"
    if own.numel() and any(n > 1 and a != b for n, a, b in zip(own.shape, own.stride(), other.stride())):
        return f"strides {own.stride()} are not {other.stride()}"
    if not own.dtype.is_floating_point:
        return "" if torch.equal(own, other) else f"{int((own != other).sum())} of {own.numel()} elements differ"
    if not own.numel():
        return ""
    finite = other.isfinite() & best.isfinite()
    if not torch.equal(own.isnan() & ~finite, other.isnan() & ~finite):
        return "not-a-numbers differ"
    if not finite.any():
        return ""
    scale = float(best[finite].abs().max())
    error = float((own.double() - best)[finite].abs().max())
    allowed = 2 * float((other.double() - best)[finite].abs().max()) + unit * (scale + 1e-3)
    return "" if error <= allowed else f"error {error:.3g}, allowed {allowed:.3g}"


@dataclass
class Failure:
    seed: int
    kind: str  # "compile" or "run"
    reason: str
    sizes: dict[str, int]
    text: str


def attempt(graph: Graph, sizes: list[dict[str, int]], seed: int, config: Config) -> Failure | None:
    """Compiles and compares at all `sizes`; the first failure."""
    exact = in_double(graph)
    try:
        executable = compile_graph(graph, config).executable
    except Exception as error:
        return Failure(seed, "compile", f"{type(error).__name__}: {str(error)[:200]}", {}, show(graph))
    for own in sizes:
        why = differs(graph, executable, exact, make_inputs(graph, own, seed))
        if why:
            return Failure(seed, "run", why, own, show(graph))
    return None


def shrink(graph: Graph, failure: Failure, config: Config) -> Failure:
    """Drops outputs and equations as long as the graph still fails in the same way (compiling, or running)."""
    sizes = [failure.sizes] if failure.sizes else []
    best = failure
    progress = True
    while progress:
        progress = False
        for candidate in smaller(graph):
            try:
                found = attempt(candidate, sizes, failure.seed, config)
            except Exception:
                continue  # not a well-formed graph any more
            if found is not None and found.kind == failure.kind:
                graph, best, progress = candidate, found, True
                break
    return best


def smaller(graph: Graph) -> list[Graph]:
    """Graphs with one output, or one equation, less; a dropped equation's result becomes an input."""
    found = []
    if len(graph.outputs) > 1:
        for k in range(len(graph.outputs)):
            kept = [i for i in range(len(graph.outputs)) if i != k]
            found.append(dce(graph.replace(outputs=tuple(graph.outputs[i] for i in kept),
                                           output_strides=tuple(graph.output_strides[i] for i in kept)), Config()))
    for node in graph.nodes:
        if len(node.outputs) == 1 and node.output not in graph.outputs:
            found.append(without(graph, node))
    users = graph.users()
    for value in graph.inputs:
        if value.name not in users and value not in graph.outputs and isinstance(value.type, TensorType):
            found.append(graph.replace(inputs=tuple(item for item in graph.inputs if item is not value)))
    for node in reversed(graph.nodes):
        if isinstance(node.output, Value) and node.output in graph.outputs and len(graph.outputs) == 1:
            for operand in node.values():
                if operand not in graph.inputs:
                    found.append(dce(graph.replace(outputs=(operand,), output_strides=(None,)), Config()))
    return found


def without(graph: Graph, node: Node) -> Graph:
    nodes = tuple(item for item in graph.nodes if item is not node)
    return dce(graph.replace(inputs=(node.output, *graph.inputs), nodes=nodes), Config())


def main() -> None:
    """See the head of this file."""
    first, count, shapes = (int(text) for text in sys.argv[1:4])
    config = Config.make()
    for seed in range(first, first + count):
        print(json.dumps({"start": seed}), flush=True)
        graph = make_graph(seed)
        failure = attempt(graph, shapes_of(graph, shapes, seed), seed, config)
        told: dict[str, Any] = {"seed": seed, "nodes": len(graph.nodes)}
        if failure is not None:
            small = shrink(graph, failure, config)
            told |= {"reason": f"{small.kind}: {small.reason}", "sizes": small.sizes, "text": small.text}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
