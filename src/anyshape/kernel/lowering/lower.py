"""Lowers a group of equations to one loop program by asking for its results, element by element.

    y = softmax over columns              rows (i0: b), columns (i1: n)
      m = amax(x, dims=(1,), keep)          column stage: r0 = load x[i0*n + i1]; r1 = reduce maximum r0
      e = exp(sub(x, m))             -->    column stage: r3 = exp(sub(load x, r1)); store e; r4 = reduce add r3
      y = div(e, sum(e))                    column stage: store y[i0*n + i1] = div(load e, r4)

The value of an equation at an index is computed from its operands at mapped indices, so views, gathers, concatenations
and broadcasts cost nothing but index arithmetic. One (value, index) pair is computed once per stage. A reduction is
asked for at its row's index only; its operand is evaluated in an earlier column stage. Asking is also the legality
test: a group that needs a reduction at another index raises `NotLowerable`.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from anyshape.ir.graph import Graph, Node, Operand, Value
from anyshape.ir.op import INDEX, row
from anyshape.ir.scalar import SCALAR
from anyshape.ir.types import TensorType
from anyshape.kernel.loop_ir.def_use import EFFECTS
from anyshape.kernel.loop_ir.directives import SplitReduction
from anyshape.kernel.loop_ir.elementwise import counted
from anyshape.kernel.loop_ir.program import Instruction, Stage
from anyshape.kernel.lowering.group import FusionGroup, Lowered, NotLowerable
from anyshape.kernel.lowering.loop_nest import Nest, program_of
from anyshape.kernel.schedule.hardware_params import HardwareParams
from anyshape.sym.expr import Size, dense_strides, divide, product, symbol, symbols_of
from anyshape.sym.facts import Facts
from anyshape.sym.index_arithmetic import (
    Index,
    has_division,
    linear,
    reshape_index,
    simplify,
    split_request,
)
from anyshape.sym.prover import prove_at_most

COMPUTE = {"bf16": "f32", "f16": "f32"}
INDEX_COST = 4  # of a formula of loop variables, in additions


@dataclass(slots=True)
class _Block:
    """A stage under construction."""

    level: str
    instructions: list[Instruction] = field(default_factory=list)
    memo: dict[object, int] = field(default_factory=dict)


class _Split(Exception):
    """Loop `name` must become two, the inner one `inner` long, for an offset to be free of divisions."""

    def __init__(self, name: str, inner: Size) -> None:
        self.name = name
        self.inner = inner


def lower(graph: Graph, group: FusionGroup, layouts: Mapping[str, TensorType], hardware: HardwareParams) -> Lowered:
    """The loop program of `group`. `layouts` gives the type (with strides) of values stored in memory where it differs
    from the value's own. Raises NotLowerable."""
    dims = group.loops()
    for _ in range(12):
        try:
            return _Lowering(graph, group, dims, layouts, hardware).run()
        except _Split as split:
            position = int(split.name[1:])
            size, reduced = dims[position]
            outer, rest = divide(size, split.inner)
            assert rest == 0
            dims[position:position + 1] = [(outer, reduced), (split.inner, reduced)]
    return _Lowering(graph, group, dims, layouts, hardware, final=True).run()


class _Lowering:
    """One attempt with a fixed iteration space; implements ir.op.Body over register numbers."""

    def __init__(self, graph: Graph, group: FusionGroup, dims: list[tuple[Size, bool]],
                 layouts: Mapping[str, TensorType], hardware: HardwareParams, final: bool = False) -> None:
        self.facts: Facts = graph.facts
        self.group = group
        self.dims = dims
        self.layouts = layouts
        self.hardware = hardware
        self.final = final
        self.variables = [f"i{k}" for k in range(len(dims))]
        self.extents: dict[str, Size] = {v: d[0] for v, d in zip(self.variables, dims, strict=True)}
        self.rows = [v for v, d in zip(self.variables, dims, strict=True) if not d[1]]
        self.columns = [v for v, d in zip(self.variables, dims, strict=True) if d[1]]
        self.inside = {v.name: node for node in group.nodes for v in node.outputs}
        self.params: dict[str, str] = {}  # value name -> dtype in memory
        self.stored: set[str] = set()
        self.updated: set[str] = set()  # of those, what a scatter writes into
        self.scratch: dict[object, tuple[str, str]] = {}
        self.blocks: list[_Block] = []
        self.current: _Block | None = None  # the column stage being built
        self.row_memo: dict[object, int] = {}
        self.deps: list[frozenset[str]] = []
        self.kinds: list[str] = []
        self.costs: list[int] = []
        self.mask: int | None = None
        self.narrowed: set[int] = set()  # registers that hold what a narrow dtype can hold
        self.kept: dict[object, tuple[_Block, int]] = {}
        self.reduced: dict[str, tuple[int, Index]] = {}
        self.depths: dict[str, int] = {}
        self.asked: dict[str, set[Index]] = {}
        self.part = f"i{len(dims)}"
        self.full_index = tuple(map(symbol, self.variables))

    # the drive

    def run(self) -> Lowered:
        """Evaluate stage by stage, then finish the program."""
        roots = sorted(self.group.roots, key=lambda v: self.depth(v))
        folded = {id(node) for node, _ in self.group.sums}
        every = [n for n in self.group.nodes if row(n).kind == "reduce"]
        reductions = [n for n in every if id(n) not in folded]
        deepest = max([self.depth(r) for r in roots] + [self.depth(n.output) - 1 for n in every], default=0)
        for depth in range(deepest + 1):
            here = [n for n in reductions if self.depth(n.output) == depth + 1]
            stores = [r for r in roots if self.depth(r) == depth]
            whole = [r for r in stores if not self.is_kept(r)]
            sums = [(n, parts) for n, parts in self.group.sums if self.depth(n.output) == depth + 1]
            if here or sums or (whole and self.columns):
                self.current = _Block("column")
                for value in whole:
                    self.write(value)
                for node in here:
                    self.reduce(node)
                for node, parts in sums:
                    self.fold(node, parts)
                self.blocks.append(self.current)
                self.current = None
            elif whole:
                for value in whole:
                    self.write(value)
            for value in stores:
                if self.is_kept(value):
                    self.write(value, self.rows)
        program, sizes = counted(*program_of(self.nest(), self.hardware.vector_lanes))
        return Lowered(program, tuple(self.params), sizes,
                       {name: len(indices) for name, indices in self.asked.items()})

    def nest(self) -> Nest:
        """What was written, as loops."""
        stages = tuple(Stage(b.level, tuple(b.instructions)) for b in self.blocks)
        return Nest(tuple((v, self.extents[v]) for v in self.rows), tuple((v, self.extents[v]) for v in self.columns),
                    bool(self.variables) and self.variables[-1] in self.rows, stages, self.params,
                    frozenset(self.stored), tuple(self.scratch.values()), frozenset(self.updated),
                    next((SplitReduction(self.part, parts.tensor.shape[0]) for _, parts in self.group.sums), None))

    def depth(self, value: Value) -> int:
        """The number of reductions, one after another, before `value` can be computed."""
        known = self.depths.get(value.name)
        if known is not None:
            return known
        node = self.inside.get(value.name)
        result = 0
        if node is not None:
            result = max((self.depth(v) for v in node.values()), default=0)
            if row(node).kind == "reduce":
                result += 1
        self.depths[value.name] = result
        return result

    def is_kept(self, value: Value) -> bool:
        """Is `value` one element per row (the result of a reduction, or computed from such), not per column?"""
        made = self.inside[value.name].inputs[1] if self.scatters(value) else value
        assert isinstance(made, Value)
        return bool(self.columns) and made.tensor.count != product(self.extents.values())

    def scatters(self, value: Value) -> bool:
        """Is `value` the result of a scatter in the group?"""
        node = self.inside.get(value.name)
        return node is not None and row(node).kind == "scatter"

    def root_index(self, value: Value, names: list[str] | None = None) -> Index:
        """The index of `value` at the point of the variables `names`, of all when left out."""
        names = self.variables if names is None else names
        shape = tuple(self.extents[v] for v in names)
        if value.tensor.count != product(shape):
            return self.refuse(value)
        return self.tidy(reshape_index(value.tensor.shape, shape, tuple(symbol(v) for v in names)))

    def refuse(self, value: Value) -> Index:
        raise NotLowerable(f"{value.name} has another iteration space",
                           why=f"{value.type} against {[str(e) for e in self.extents.values()]}")

    def tidy(self, index: Index) -> Index:
        return tuple(simplify(size, self.extents, self.facts) for size in index)

    def write(self, value: Value, names: list[str] | None = None) -> None:
        """Store a root of the whole space, or of the variables `names`: each element at its place, or where a scatter
        puts it."""
        node = self.inside.get(value.name)
        if node is not None and row(node).kind == "scan":
            self.scan(value, node)
            return
        if node is None or not self.scatters(value):
            self.store(value, self.root_index(value, names))
            return
        source, into = node.inputs[1], row(node).into
        assert isinstance(source, Value) and into is not None
        kind = self.layouts.get(value.name, value.tensor)
        self.params.setdefault(value.name, kind.dtype)
        self.stored.add(value.name)
        self.updated.add(value.name)
        if 0 in source.tensor.shape:
            return  # its loops have no variables, so that nothing would keep loads from being done
        index = self.root_index(source, names)
        place, mask = into(self, node, index)  # type: ignore[arg-type]
        register = self.read(source, index)
        args = (register, mask) if isinstance(mask, int) else (register,)
        self.emit("scatter" if row(node).combine else "store", args, dtype=self.kinds[register], buffer=value.name,
                  offset=self.offset(linear(self.tidy(place), kind.layout())), combine=row(node).combine)

    def scan(self, value: Value, node: Node) -> None:
        """Store a scan over the columns; f32 is combined in f64."""
        index = self.root_index(value)
        *factors, register = (self.read(one, index) for one in node.values())
        kind = self.kinds[register]
        wide = "f64" if value.tensor.dtype == "f32" else kind
        dim = node.attr("dim")
        if factors and isinstance(dim, int):  # nothing is before the first, whatever its factor is
            first = self.apply("eq", self.index(index[dim]), self.constant(0, "i64"), dtype="bool")
            factors = [self.apply("where", first, self.constant(0.0, kind), factors[0], dtype=kind)]
        args = tuple(self.apply("cast", one, dtype=wide) for one in (register, *factors))
        so_far = self.emit("scan", args, dtype=wide, combine=row(node).combine)
        self.store(value, index, self.apply("cast", so_far, dtype=kind))

    def store(self, value: Value, index: Index, made: int | None = None) -> None:
        register = self.read(value, index) if made is None else made
        kind = self.layouts.get(value.name, value.tensor)
        self.params.setdefault(value.name, kind.dtype)
        self.stored.add(value.name)
        offset = self.offset(linear(index, kind.layout()))
        self.emit("store", (register,), dtype=self.kinds[register], buffer=value.name, offset=offset)

    def reduce(self, node: Node) -> None:
        operand, index, dims = self.reduced_index(node, self.columns, "reduces across rows")
        register = self.read(operand, index)
        result = self.emit("reduce", (register,), dtype=self.kinds[register], combine=row(node).combine,
                           deps=frozenset(self.rows))
        kept = tuple(p for d, p in enumerate(index) if d not in dims)
        self.reduced[node.output.name] = (result, kept)

    def fold(self, node: Node, parts: Value) -> None:
        """Reduce over the rows of each part, into `parts`."""
        operand, index, dims = self.reduced_index(node, self.rows, "reduces along a row")
        if not self.columns:
            raise NotLowerable(f"{node.output.name} has no columns", why=str(operand.type))
        register = self.read(operand, index)
        keep = bool(node.attr("keep"))
        kept = tuple(0 if d in dims else p for d, p in enumerate(index) if keep or d not in dims)
        self.params.setdefault(parts.name, parts.tensor.dtype)
        self.stored.add(parts.name)
        offset = linear((symbol(self.part), *kept), dense_strides(parts.tensor.shape))
        self.emit("fold", (register,), dtype=self.kinds[register], buffer=parts.name, offset=self.offset(offset),
                  combine=row(node).combine)

    def reduced_index(self, node: Node, over: list[str], wrong: str) -> tuple[Value, Index, tuple[object, ...]]:
        """The operand of a reduction, its index, and the dims that it reduces, which must be those of `over`."""
        operand = next(node.values())
        shape = tuple(self.extents.values())
        if operand.tensor.count != product(shape):
            raise NotLowerable(f"{node.output.name} reduces another space", why=str(operand.type))
        index = self.tidy(reshape_index(operand.tensor.shape, shape, self.full_index))
        dims = node.attr("dims")
        assert isinstance(dims, tuple)
        for d, position in enumerate(index):
            if any((name in over) != (d in dims) for name in symbols_of(position) & self.extents.keys()):
                raise NotLowerable(f"{node.output.name} {wrong}", why=f"dimension {d} is {position}")
        return operand, index, dims

    # Body protocol

    def read(self, operand: Operand, index: Index) -> int:
        """See Body.read."""
        assert isinstance(operand, Value), operand
        index = self.tidy(index)
        key = (operand.name, index, self.mask)
        memo = self.recall(key)
        if memo is not None:
            return memo
        node = self.inside.get(operand.name)
        if node is None:
            register = self.load(operand, index)
        elif row(node).kind == "reduce":
            register = self.reduction(node, index)
        else:
            self.asked.setdefault(operand.name, set()).add(index)
            kept = self.from_row_buffer(key)
            if kept is not None:
                register = kept
            else:
                body = row(node).body
                assert body is not None, node.op
                made = body(self, node, index)  # type: ignore[arg-type]
                assert isinstance(made, int)
                register = made
                if row(node).kind == "pointwise" and self.current is not None and self.mask is None:
                    self.kept.setdefault(key, (self.current, register))
        self.remember(key, register)
        return register

    def read_where(self, mask: int, operand: Operand, index: Index, other: float | int | bool) -> int:
        """See Body.read_where."""
        before = self.mask
        self.mask = mask if before is None else self.apply("and", before, mask, dtype="bool")
        assert isinstance(operand, Value)
        register = self.read(operand, index)
        self.mask = before
        dtype = self.kinds[register]
        return self.apply("where", mask, register, self.constant(other, dtype), dtype=dtype)

    def apply(self, op: str, *args: int, dtype: str) -> int:
        """See Body.apply."""
        wide = COMPUTE.get(dtype, dtype)
        if op == "cast":
            register = args[0] if self.kinds[args[0]] == wide else self.emit(op, args, dtype=wide)
            return register if wide == dtype else self.narrow(register, dtype)
        return self.emit(op, args, dtype=wide)

    def narrow(self, register: int, dtype: str) -> int:
        """The register rounded to bf16 or f16, as a cast in the program does."""
        if register in self.narrowed:
            return register
        result = self.emit(f"to_{dtype}", (register,), dtype="f32")
        self.narrowed.add(result)
        return result

    def constant(self, value: float | int | bool, dtype: str) -> int:
        """See Body.constant."""
        return self.emit("constant", (), dtype=COMPUTE.get(dtype, dtype), value=value)

    def index(self, size: Size) -> int:
        """See Body.index."""
        return self.emit("index", (), dtype="i64", offset=self.offset(size))

    def as_index(self, register: int) -> Size:
        """See Body.as_index."""
        return symbol(f"%{register}")

    def checked_index(self, register: int, size: Size, wrap: bool) -> Size:
        """See Body.checked_index."""
        zero, count = self.constant(0, "i64"), self.index(size)
        if wrap:
            register = self.apply("where", self.apply("lt", register, zero, dtype="bool"),
                                  self.apply("add", register, count, dtype="i64"), register, dtype="i64")
        self.check(self.apply("and", self.apply("ge", register, zero, dtype="bool"),
                              self.apply("lt", register, count, dtype="bool"), dtype="bool"), INDEX)
        last = self.apply("sub", count, self.constant(1, "i64"), dtype="i64")
        upper = self.apply("minimum", register, last, dtype="i64")
        return self.as_index(self.apply("maximum", upper, zero, dtype="i64"))

    def check(self, holds: int, code: int) -> None:
        """See Body.check."""
        self.params.setdefault("", "i64")
        self.emit("check", (holds,) if self.mask is None else (holds, self.mask), dtype="i64", buffer="", value=code)

    # registers

    def load(self, value: Value, index: Index) -> int:
        kind = self.layouts.get(value.name, value.tensor)
        if len(index) != kind.rank:
            raise NotLowerable(f"{value.name} is read with {len(index)} indices", why=str(kind))
        self.params.setdefault(value.name, kind.dtype)
        offset = self.offset(linear(index, kind.layout()))
        # an element that exists whatever the mask says is loaded plainly, once for the row where it can be
        plain = self.mask is None or all(map(self.is_inside, index, kind.shape))
        args = () if plain or self.mask is None else (self.mask,)
        return self.emit("load", args, dtype=COMPUTE.get(kind.dtype, kind.dtype), buffer=value.name, offset=offset)

    def is_inside(self, position: Size, size: Size) -> bool:
        """Is it plain that 0 <= position < size, also where sizes may be 0?"""
        if isinstance(position, int):
            return position >= 0 and bool(prove_at_most(self.facts, position + 1, size))
        return any(position == symbol(name) and extent == size for name, extent in self.extents.items())

    def reduction(self, node: Node, index: Index) -> int:
        found = self.reduced.get(node.output.name)
        if found is None:
            raise NotLowerable(f"{node.output.name} is asked for before its stage")
        register, kept = found
        dims = node.attr("dims")
        assert isinstance(dims, tuple)
        asked = tuple(p for d, p in enumerate(index) if d not in dims) if node.attr("keep") else index
        if self.tidy(asked) != self.tidy(kept):
            raise NotLowerable(f"{node.output.name} is asked for at another row", why=f"{asked} against {kept}")
        return register

    def from_row_buffer(self, key: object) -> int | None:
        """The value from an earlier column stage, when keeping it is cheaper than computing it again."""
        if self.current is None or self.mask is not None or not self.columns or self.variables[-1] in self.rows:
            return None
        found = self.kept.get(key)
        if found is None or found[0] is self.current or self.costs[found[1]] < self.hardware.row_buffer_operations:
            return None
        block, register = found
        if not self.deps[register] & set(self.columns):
            return None
        dtype = self.kinds[register]
        strides = dense_strides(tuple(self.extents[v] for v in self.columns))
        offset = linear(tuple(symbol(v) for v in self.columns), strides)
        if key not in self.scratch:
            name = f"%{len(self.scratch)}"  # no value is named so
            self.scratch[key] = (name, dtype)
            block.instructions.append(Instruction(-1, "store", (register,), dtype, name, offset))
        return self.emit("load", (), dtype=dtype, buffer=self.scratch[key][0], offset=offset)

    def offset(self, size: Size) -> Size:
        size = simplify(size, self.extents, self.facts)
        if not self.final and has_division(size, self.extents):
            request = split_request(size, self.extents, self.variables[-1])
            if request is not None:
                raise _Split(*request)
        return size

    def recall(self, key: object) -> int | None:
        found = self.row_memo.get(key)
        if found is None and self.current is not None:
            found = self.current.memo.get(key)
        return found

    def remember(self, key: object, register: int) -> None:
        if self.current is not None and self.deps[register] & set(self.columns):
            self.current.memo[key] = register
        else:
            self.row_memo[key] = register

    def emit(self, op: str, args: tuple[int, ...], *, dtype: str, buffer: str = "", offset: Size = 0,
             value: float | int | bool = 0, combine: str = "", deps: frozenset[str] | None = None) -> int:
        effect = op in (*EFFECTS, "reduce", "scan")
        key = (op, args, dtype, buffer, offset, type(value), repr(value))
        if not effect:
            found = self.recall(key)
            if found is not None:
                return found
        names: set[str] = set(self.columns) if op == "scan" else set()
        for argument in args:
            names |= self.deps[argument]
        for name in symbols_of(offset):
            if name.startswith("%"):
                names |= self.deps[int(name[1:])]
            elif name in self.extents:
                names.add(name)
        register = len(self.deps)
        own = frozenset(names)
        self.deps.append(own if deps is None else own & deps)
        self.kinds.append(dtype)
        cost = SCALAR[op].cost if op in SCALAR else INDEX_COST if op == "index" else 1
        self.costs.append(cost + sum(self.costs[a] for a in args))
        instruction = Instruction(register if op not in EFFECTS else -1, op, args, dtype, buffer,
                                  offset, value, combine)
        in_column = self.current is not None and (op in ("reduce", "scatter", "fold") or own & set(self.columns))
        if in_column:
            assert self.current is not None
            self.current.instructions.append(instruction)
        else:
            if not self.blocks or self.blocks[-1].level != "row":
                self.blocks.append(_Block("row"))
            self.blocks[-1].instructions.append(instruction)
        if not effect:
            self.remember(key, register)
        return register
