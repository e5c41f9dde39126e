"""Sharding rules of equations: a column of the op table, derived from the loop bodies of its rows.

    broadcast [m, 8] of x [8]     factors: x None, result 0;  x 0, result 1
    matmul [m, k] @ [k, n]        factors: m (0, None -> 0), n (None, 1 -> 1), k (1, 0 -> a partial sum)

A factor is a loop that may be dealt out: the dim of each operand that runs with it (None: the operand is whole), and of
each result the dim, or how partial results combine. A body is run on loop variables i0, i1, ...: an operand dim that is
read at i_d alone, and has its size, runs with dim d of the result. A position that is data (iota, a concatenation
along its dim) or a computed index gives none. The same run says through which operands partial sums may pass, as the
result is linear in them. Rows without a body have their rule in TABLE, by letters as in einsum. An equation without a
factor is right too: all its operands are whole.

Source of the idea: Xu et al., "GSPMD" (2021), section 3; Rink et al., "PartIR" (2024), whose rules are by factors.
"""
from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import anyshape.ops.table  # noqa: F401  fills the table of ops
from anyshape.ir.graph import Node, Value
from anyshape.ir.op import OPS, row
from anyshape.ir.types import kind_of, size_of
from anyshape.ops.collective import COLLECTIVES, RINGS, parts_of
from anyshape.ops.matmul import PRODUCTS
from anyshape.sym.expr import Expr, Size, evaluate, symbol, symbols_of

Index = tuple[Size, ...]
MOVING = ("reshape", "permute", "slice", "broadcast")  # elements go elsewhere as they are


@dataclass(frozen=True, slots=True)
class Factor:
    """A loop that may be dealt out.

    ins: per operand the dim that runs with it, or None. outs: per result the dim, or the word that partial results are
    combined by.
    """

    ins: tuple[int | None, ...]
    outs: tuple[int | str, ...]


def factors(node: Node) -> tuple[Factor, ...]:
    """The factors of an equation; none for reshape, whose dims are split and merged (dist/reshape.py)."""
    if node.op in RINGS:
        return tuple(_of_ring(node))
    if node.op in COLLECTIVES:
        return tuple(_of_collective(node))
    one = row(node)
    if node.op in TABLE:
        return tuple(TABLE[node.op](node))
    if one.kind == "reduce":
        return tuple(_of_reduction(node))
    if one.kind == "scan":
        return tuple(Factor((d,) * len(node.inputs), (d,)) for d, size in enumerate(_shape(node.inputs[0]))
                     if d != node.attr("dim") and size != 1)
    if one.into is not None:
        return tuple(_of_scatter(node))
    if node.op == "reshape" or one.body is None or one.random or len(node.outputs) != 1:
        return ()
    return tuple(_of_body(node))


def passes_partial(node: Node, partial: Container[str], combine: str, zeros: Container[str]) -> bool:
    """Are the results partial, combined by the same word, where the operands called `partial` are?

    zeros: names of operands that are zero everywhere.
    """
    names = [value.name for value in node.values() if value.name in partial]
    if node.op in RINGS:
        return False
    if node.op in COLLECTIVES:
        return combine == (node.attr("combine") if node.op == "all_reduce" else "add")
    one = OPS[node.op]
    if combine != "add":
        return node.op in MOVING
    if node.op in ("sum", "reshape"):
        return True
    if node.op in ("matmul", "convolution"):
        return names == [node.inputs[0].name] or names == [node.inputs[1].name]  # type: ignore[union-attr]
    if one.into is not None:
        base, source = node.inputs[0], node.inputs[1]
        assert isinstance(base, Value) and isinstance(source, Value)
        return one.combine in ("", "add") and source.name in partial and (base.name in partial or base.name in zeros)
    if one.body is None or one.random or len(node.outputs) != 1:
        return False
    if node.op in ("cast", "store") and not _keeps_sums(node):
        return False
    probe = _Probe(partial, zeros)
    index = tuple(symbol(f"i{d}") for d in range(node.output.tensor.rank))
    return one.body(probe, node, index) == "P"  # type: ignore[arg-type]


def _keeps_sums(node: Node) -> bool:
    """Is the cast of a sum the sum of casts, but for rounding that a wider dtype does not do?"""
    old, new = node.inputs[0].tensor.dtype, node.output.tensor.dtype  # type: ignore[union-attr]
    kinds = kind_of(old), kind_of(new)
    return size_of(new) >= size_of(old) and kinds in (("float", "float"), ("int", "int"), ("int", "float"))


class _Probe:
    """Runs a body on loop variables: which operand is read where, and what becomes of partial sums.

    A register is "P" (a term of the sum over ranks), "0" (zero), "R" (the same on all ranks) or "X" (none of these).
    """

    def __init__(self, partial: Container[str] = (), zeros: Container[str] = ()) -> None:
        self.partial = partial
        self.zeros = zeros
        self.reads: list[tuple[Value, Index]] = []
        self.positions: set[str] = set()
        self.count = 0

    def read(self, operand: Any, index: Index) -> str:
        """See Body.read."""
        if not isinstance(operand, Value):
            return "0" if not isinstance(operand, Expr) and operand == 0 else "R"
        self.reads.append((operand, index))
        return "P" if operand.name in self.partial else "0" if operand.name in self.zeros else "R"

    def read_where(self, mask: str, operand: Any, index: Index, other: float | int | bool) -> str:
        """See Body.read_where."""
        own = self.read(operand, index)
        return "X" if mask == "P" or (own == "P" and other != 0) else own if own == "P" or other == 0 else "R"

    def apply(self, op: str, *args: str, dtype: str) -> str:
        """See Arithmetic.apply."""
        if "X" in args:
            return "X"
        if "P" not in args:
            return "0" if op == "mul" and "0" in args else "R"
        linear = {
            "neg": True, "cast": True,  # of which casts: _keeps_sums
            "add": all(arg in "P0" for arg in args), "sub": all(arg in "P0" for arg in args),
            "mul": args.count("P") == 1,
            "div": args[0] == "P" and args.count("P") == 1,
            "where": args[0] in "R0" and all(arg in "P0" for arg in args[1:]),
        }
        return "P" if linear.get(op, False) else "X"

    def constant(self, value: float | int | bool, dtype: str) -> str:
        """See Arithmetic.constant."""
        return "0" if value == 0 else "R"

    def index(self, size: Size) -> str:
        """See Body.index."""
        if isinstance(size, Expr):
            self.positions |= symbols_of(size)
        return "R"

    def as_index(self, register: str) -> Size:
        """See Body.as_index."""
        self.count += 1
        return symbol(f"data{self.count}")

    def checked_index(self, register: str, size: Size, wrap: bool) -> Size:
        """See Body.checked_index."""
        return self.as_index(register)

    def check(self, holds: str, code: int) -> None:
        """See Body.check."""


def _shape(operand: Any) -> tuple[Size, ...]:
    assert isinstance(operand, Value), operand
    return operand.tensor.shape


def _of_body(node: Node) -> Iterator[Factor]:
    shape = node.output.tensor.shape
    probe = _Probe()
    row(node).body(probe, node, tuple(symbol(f"i{d}") for d in range(len(shape))))  # type: ignore[misc, arg-type]
    for d, size in enumerate(shape):
        if f"i{d}" in probe.positions or size == 1:
            continue
        found = _reads_of(f"i{d}", size, probe.reads)
        if found is not None:
            yield Factor(tuple(found.get(v.name) if isinstance(v, Value) else None for v in node.inputs), (d,))


def _reads_of(name: str, size: Size, reads: list[tuple[Value, Index]]) -> dict[str, int | None] | None:
    """By operand, the dim that is read at the loop variable alone; None where one is read in another way."""
    me, found = symbol(name), {}  # type: ignore[var-annotated]
    for operand, index in reads:
        at = None
        for e, one in enumerate(index):
            if one == me and at is None and operand.tensor.shape[e] == size:
                at = e
            elif isinstance(one, Expr) and name in symbols_of(one):
                return None
        if found.setdefault(operand.name, at) != at:
            return None
    return found


def _of_reduction(node: Node) -> Iterator[Factor]:
    dims, keep = node.attr("dims"), node.attr("keep")
    assert isinstance(dims, tuple)
    place = 0
    for d, size in enumerate(_shape(node.inputs[0])):
        if size != 1:
            yield Factor((d,), (row(node).combine if d in dims else place,))
        place += d not in dims or bool(keep)


def _of_scatter(node: Node) -> Iterator[Factor]:
    """Dims of the second operand that go where they are, and, where elements are added to zeros, those that meet."""
    one = row(node)
    target, source = _shape(node.inputs[0]), _shape(node.inputs[1])
    probe = _Probe()
    assert one.into is not None and one.meeting is not None
    index, _ = one.into(probe, node, tuple(symbol(f"i{e}") for e in range(len(source))))  # type: ignore[arg-type]
    meeting = one.meeting(node)
    for e, size in enumerate(source):
        if size == 1 or f"i{e}" in probe.positions:
            continue
        read = _reads_of(f"i{e}", size, probe.reads)
        if read is None:
            continue
        rest = tuple(read.get(v.name) if isinstance(v, Value) else None for v in node.inputs[2:])
        own = [d for d, position in enumerate(index) if position == symbol(f"i{e}")]
        others = [d for d, position in enumerate(index) if isinstance(position, Expr) and d not in own
                  and f"i{e}" in symbols_of(position)]
        if own and not others and e not in meeting and target[own[0]] == size:
            yield Factor((own[0], e, *rest), (own[0],))
        elif one.combine == "add" and not own and not others:
            yield Factor((None, e, *rest), ("add",))


def _by_letters(node: Node, *words: str) -> Iterator[Factor]:
    """Factors by letters, a word for each operand and result; letters of no result are summed, small ones are whole."""
    shapes = [_shape(v) for v in (*(x for x in node.inputs if isinstance(x, Value)), *node.outputs)]
    operands = len(words) - len(node.outputs)
    for letter in dict.fromkeys("".join(words)):
        if letter.islower():
            continue
        at = [word.find(letter) if letter in word and shape[word.find(letter)] != 1 else None
              for word, shape in zip(words, shapes, strict=True)]
        if any(one is not None for one in at[:operands]):
            yield Factor(tuple(at[:operands]), tuple("add" if one is None else one for one in at[operands:]))


def _matmul(node: Node) -> Iterator[Factor]:
    batch = "UVWXYZ"[:len(_shape(node.inputs[0])) - 2]
    if "columns" in dict(node.attrs):  # panels of b are in nobody's parts
        more = (f"{batch}Mc",) if len(node.inputs) > 2 else ()
        return _by_letters(node, f"{batch}Mk", "nwpf", *more, f"{batch}Mc")
    more = (f"{batch}MN",) if len(node.inputs) > 2 else ()
    inner = "k" if more else "K"  # what is added to the product would be added on each rank
    return _by_letters(node, f"{batch}M{inner}", f"{batch}{inner}N", *more, f"{batch}MN")


def _grouped(node: Node) -> Iterator[Factor]:
    return _by_letters(node, "sK", "eKN", "e", "sN")


def _grouped_inner(node: Node) -> Iterator[Factor]:
    return _by_letters(node, "Ms", "sN", "e", "eMN")


def _attention(node: Node) -> Iterator[Factor]:
    rows = "m" if node.attr("causal") else "M"
    mask = (f"BH{rows}n",) if len(node.inputs) > 3 else ()
    return _by_letters(node, f"BH{rows}d", "BHnd", "BHnd", *mask, f"B{rows}Hd", f"BH{rows}")


def _attention_backward(node: Node) -> Iterator[Factor]:
    rows = "m" if node.attr("causal") else "M"
    mask = (f"BH{rows}n",) if len(node.inputs) > 6 else ()
    return _by_letters(node, f"BH{rows}d", f"BH{rows}d", "BHnd", "BHnd", f"BH{rows}", f"BH{rows}", *mask,
                       f"B{rows}Hd", "BnHd", "BnHd")


def _convolution(node: Node) -> Iterator[Factor]:
    """Channels last; with several groups channels stay together, and a bias would be added on each rank."""
    rank = len(_shape(node.inputs[0]))
    space, kernel, result = "efghij"[:rank - 2], "klmpqr"[:rank - 2], "stuvwx"[:rank - 2]
    grouped, biased = node.attr("groups") != 1, len(node.inputs) > 2
    c, o = "c" if grouped or biased else "C", "o" if grouped else "O"
    if grouped:  # the words of x and w have different channels then
        return _by_letters(node, f"N{space}c", f"o{'y'}{kernel}", *(("o",) if biased else ()), f"N{result}o")
    return _by_letters(node, f"N{space}{c}", f"{o}{c}{kernel}", *((o,) if biased else ()), f"N{result}{o}")


def _topk(node: Node) -> Iterator[Factor]:
    for d, size in enumerate(_shape(node.inputs[0])[:-1]):
        if size != 1:
            yield Factor((d,), (d, d))


def _of_ring(node: Node) -> Iterator[Factor]:
    """Of another axis: batch and heads."""
    if node.op == "ring_attention":
        return _by_letters(node, "BHmd", "BHnd", "BHnd", "BmHd", "BHm")
    return _by_letters(node, "BHmd", "BHmd", "BHnd", "BHnd", "BHm", "BHm", "BmHd", "BnHd", "BnHd")


def _of_collective(node: Node) -> Iterator[Factor]:
    """Of another axis: dims that it does not touch pass, and what stands before the part of a dim that it deals out, as
    the rows of a batch whose positions it gathers."""
    touched = {one.dim: one.outer for name in ("parts", "into") if name in dict(node.attrs)
               for one in parts_of(node, name)}
    if len(node.inputs) == 1:
        for d, size in enumerate(node.output.tensor.shape):
            if touched.get(d, size) != 1:
                yield Factor((d,), (d,))


# calls of PyTorch's operators whose rows are rows of a batch: the places of arguments that have them, and per result
ROWS: dict[str, tuple[tuple[int, ...], tuple[int | str, ...]]] = {
    "aten.convolution.default": ((0,), (0,)),
    "aten.convolution_backward.default": ((0, 1), (0, "add", "add")),
}


def _extern(node: Node) -> Iterator[Factor]:
    """Rows of the batch. Of the gradients of a convolution those of weight and bias are sums over them; which are asked
    for is the last argument."""
    known = ROWS.get(str(node.attr("target")))
    if known is None or not all(map(_is_dense, node.outputs)):
        return
    template = {name: rest for name, *rest in node.attr("template")}  # type: ignore[misc,union-attr,str-unpack]
    arguments: Any = template["args"]
    outs = known[1]
    if len(outs) > 1:
        outs = tuple(one for one, (_, asked) in zip(outs, arguments[-1][1:], strict=True) if asked)
    having = {arguments[place][1] for place in known[0] if arguments[place][0] == "operand"}
    yield Factor(tuple(0 if i in having else None for i in range(len(node.inputs))), outs)


def _is_dense(value: Value) -> bool:
    """Do the last dims run fastest? PyTorch's formulas of strides have a maximum for sizes of 0, so numbers tell."""
    kind = value.tensor
    sizes = dict.fromkeys((name for one in (*kind.shape, *(kind.strides or ())) if isinstance(one, Expr)
                           for name in symbols_of(one)), 7)
    shape = [evaluate(one, sizes) for one in kind.shape]
    dense = [prod(shape[d + 1:]) for d in range(kind.rank)]
    return kind.strides is None or [evaluate(one, sizes) for one in kind.strides] == dense


TABLE: dict[str, Callable[[Node], Iterator[Factor]]] = {
    **dict.fromkeys(PRODUCTS, _matmul), "grouped": _grouped, "grouped_inner": _grouped_inner,
    "attention": _attention, "attention_backward": _attention_backward, "convolution": _convolution, "topk": _topk,
    "extern": _extern,
}
