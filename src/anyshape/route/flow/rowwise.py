"""Proof that a module is row-wise: row i of its results is one function of row i of its arguments, for any row count.

That is what makes it legal to pad a branch's rows, to run it on some of them, or to run one row again. It is more than
independence: a module that adds a table by position keeps rows apart, and is not row-wise. The module is captured with
a symbol for the number of rows, and interpreted at two numbers; a constant that varies along the rows, or a number made
from how many there are, counts as of any row. Python that tells few rows apart is found by recording what it calls.
"""
from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from anyshape.route.flow.call import TensorValue, values_in
from anyshape.route.flow.capture import CaptureFailed, FlowProgram, capture, draws, is_sized
from anyshape.route.flow.interpret import (
    SIZES,
    InterpretedProgram,
    Unsized,
    interpret,
    is_apart,
    prepare,
    prove_apart,
    sized_wrongly,
)
from anyshape.route.flow.owners import rows

COUNTS = (5, 8)  # numbers of rows at which the graph is interpreted; no multiple of one another
FEW = (1, 2, 3)  # numbers of rows at which Python must call the same


@dataclass(frozen=True)
class Verdict:
    """answer: "yes" is proved, "no" is refuted, "unknown" is neither. reason: why it is not proved."""

    answer: str
    reason: str = ""

    def __bool__(self) -> bool:
        return self.answer == "yes"


def branch_independent(module: nn.Module, *example: Tensor) -> Verdict:
    """Whether a module is row-wise: row i (dim 0) of each result is one function of row i of the arguments.

    Args:
        module: one branch, in the mode (training or not) in which it is to be used.
        example: arguments, tensors with the same number of rows; only their shapes and dtypes are read.

    Returns:
        "yes" only where it is proved: from finite values, exact arithmetic (kernels may round otherwise at another
        number of rows), Python that is the same at any number of rows from 1 on.
    """
    if not example or not all(isinstance(one, Tensor) and one.dim() for one in example):
        return Verdict("unknown", "its arguments are not all tensors with rows")
    like = _like(example)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = capture(module, like, rows=True)
    except CaptureFailed as fault:
        return Verdict("unknown", str(fault))
    if program.mutated:
        return Verdict("unknown", "it writes a buffer or an argument")
    symbols, reason = _rows_symbols(program, program.inputs)
    if reason:
        return Verdict("unknown", reason)
    drawn = next((str(node.target) for node in program.nodes if draws(node)), None)
    if drawn is not None:
        return Verdict("unknown", f"{drawn} draws random numbers")
    try:
        verdict = _at_counts(program, symbols)
    except Unsized as fault:
        return Verdict("unknown", str(fault))
    return _same_python(module, like) if verdict else verdict


def _like(example: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros((COUNTS[0], *one.shape[1:]), dtype=one.dtype, device=one.device) for one in example]


def _rows_symbols(program: FlowProgram, inputs: Sequence[Node]) -> tuple[tuple[str, ...], str]:
    """The names of the symbols that stand for the number of rows of inputs, and "", or why a number is not possible."""
    found: set[str] = set()
    for node in inputs:
        size = node.meta["val"].shape[0]
        if not is_sized(size):
            return (), f"it holds for {size} rows only"
        if any(is_sized(one) for one in node.meta["val"].shape[1:]):
            return (), "sizes within a row are symbols"
        expression = size.node.expr
        least, most = program.ranges.get(str(expression), (None, None))
        if not expression.is_Symbol or least is None:
            return (), f"the number of rows must be {expression}"
        if least > 2 or most is not None:
            return (), f"the number of rows is limited to {least} .. {'' if most is None else most}"
        found.add(str(expression))
    return tuple(found), ""


def _at_counts(program: FlowProgram, symbols: tuple[str, ...]) -> Verdict:
    shares = [prepare(program, dict.fromkeys(symbols, count)) for count in COUNTS]
    tainted = _tainted(shares)
    for count, plain in zip(COUNTS, shares, strict=True):
        shared = InterpretedProgram(program, plain.sets, plain.at, plain.constants, plain.live, plain.regions, tainted)
        prove_apart(shared)
        seeds = {node: rows(count, node.meta["val"].dim()) for node in program.inputs}
        found = interpret(shared, seeds)
        found.update({node: one for node, one in _seeded(program, count).items() if node in program.outputs})
        for output in program.outputs:
            verdict = _output(shared, found, output, tainted, count)
            if not verdict:
                return verdict
    return Verdict("yes")


def _seeded(program: FlowProgram, count: int) -> dict[Node, TensorValue]:
    metas = {node: node.meta["val"] for node in program.inputs}
    return {node: TensorValue(rows(count, meta.dim()), (count, *meta.shape[1:]), meta.dtype)
            for node, meta in metas.items()}


def _output(shared: InterpretedProgram, found: dict[Node, Any], output: Any, tainted: frozenset[Node],
            count: int) -> Verdict:
    value = found.get(output) if isinstance(output, Node) else None
    if value is None and isinstance(output, Node) and output not in tainted:
        value = shared.constants.get(output)
    if any(output in region.body for region in shared.regions):
        return Verdict("unknown", "a result is in the order of a router's branches")
    if not isinstance(value, TensorValue) or not value.rank or value.shape[0] != count:
        return Verdict("unknown", "a result does not have a row for each row")
    if is_apart(shared.sets, value):
        return Verdict("yes")
    unknown = "; ".join(f"{name}: {why}" for name, why in shared.unknown.items())
    if unknown:
        return Verdict("unknown", unknown)
    sure = not any(one is None for one in map(shared.sets.mask, torch.unique(value.owners).tolist()))
    where = first_mixed(shared, found)
    return Verdict("no" if sure and not tainted else "unknown", f"{where} joins rows, or depends on which row it is")


def first_mixed(shared: InterpretedProgram, found: dict[Node, Any]) -> str:
    """The first operator whose result is not of one row alone."""
    for node in shared.live:
        value = found.get(node)
        if isinstance(value, TensorValue) and value.rank and int(value.owners.min()) < -1:
            return str(node.target)
    return "an operator that moves rows"


def _tainted(shares: list[InterpretedProgram]) -> frozenset[Node]:
    """Constants that are not the same for each row and for any number of rows."""
    found: set[Node] = set()
    for node, one in shares[0].constants.items():
        values, others = (values_in(given) for given in (one, shares[1].constants[node]))
        if node.op != "call_function" or not values:
            continue
        if all(value.known is not None for value in (*values, *others)):
            if not all(_same(value.known, other.known) for value, other in zip(values, others, strict=True)
                       if value.known is not None and other.known is not None):
                found.add(node)
        elif any(given in found for given in node.all_input_nodes) or _from_sizes(node):
            found.add(node)
    return frozenset(found)


def _from_sizes(node: Node) -> bool:
    word = str(node.target.name() if hasattr(node.target, "name") else node.target)  # type: ignore[union-attr]
    word = word.partition("::")[2].split(".")[0]
    return word not in SIZES and sized_wrongly(node, "aten::" + word, [], ())


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dim() != other.dim():
        return False
    for dim in range(one.dim()):
        if one.shape[dim] != other.shape[dim]:
            if not all(bool((side == side.narrow(dim, 0, 1)).all()) for side in (one, other)):
                return False
            one, other = one.narrow(dim, 0, 1), other.narrow(dim, 0, 1)
    return bool(torch.equal(one, other))


# ---- Python that tells few rows apart


class _Record(TorchFunctionMode):
    """The names of the functions that a call of Python makes."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def _same_python(module: nn.Module, like: list[Tensor]) -> Verdict:
    found = []
    for count in FEW:
        record = _Record()
        try:
            with torch.no_grad(), record:
                module(*(one[:1].expand(count, *one.shape[1:]).clone() for one in like))
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as fault:
            return Verdict("unknown", f"it fails with {count} rows: {str(fault).splitlines()[0][:80]}")
        found.append(record.called)
    if any(one != found[0] for one in found):
        return Verdict("unknown", "its Python does something else with one row than with two")
    return Verdict("yes")


# ---- arguments that are not read


def unread_arguments(module: nn.Module, *example: Tensor) -> frozenset[int]:
    """The places of arguments that a module's results are proved not to depend on, for any number of rows. Arguments as
    in branch_independent."""
    like = _like(example)
    try:
        program = capture(module, like, rows=True)
    except CaptureFailed:
        return frozenset()
    needed: set[Node] = set()
    stack = [node for node in program.nodes if node.op == "output"]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    _, reason = _rows_symbols(program, [node for node in program.inputs if node in needed])
    if reason or len(program.inputs) != len(like) or not _same_python(module, like):
        return frozenset()
    return frozenset(place for place, node in enumerate(program.inputs) if node not in needed)


# ---- results that are the same for each row


def constant_rows(module: nn.Module, *example: Tensor) -> tuple[tuple[tuple[int, ...], int] | None, str]:
    """Whether a module's first result is proved the same for each row, whatever the rows are: ((the numbers of its row,
    how many results there are), ""), or (None, why it is not proved). Arguments as in branch_independent.
    """
    like = _like(example)
    try:
        program = capture(module, like, rows=True)
        symbols, reason = _rows_symbols(program, program.inputs)
        if reason or program.mutated:
            return None, reason or "it writes a buffer or an argument"
        shares = [prepare(program, dict.fromkeys(symbols, count)) for count in COUNTS]
    except (CaptureFailed, Unsized) as fault:
        return None, str(fault)
    if any(draws(node) for node in program.nodes):
        return None, "it draws random numbers"
    output = program.outputs[0]
    found = [shared.constants.get(output) if isinstance(output, Node) else None for shared in shares]
    known = [value.known for value in found if isinstance(value, TensorValue) and value.known is not None]
    if len(known) < 2:
        return None, "the decision depends on the cells, or on parameters"
    if _reads_held(program, output):
        return None, "the decision depends on a buffer"
    if not _same(*known) or output in _tainted(shares):
        return None, "the decision depends on the place of a cell"
    python = _same_python(module, like)
    if not python:
        return None, python.reason
    return (tuple(int(one) for one in known[0][0].reshape(-1)), len(program.outputs)), ""


def _reads_held(program: FlowProgram, output: Node) -> bool:
    """Whether a result is computed from a tensor that the module holds, which may change."""
    stack, seen = [output], set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder" and node not in program.literals and node not in program.inputs:
            return True
        stack.extend(node.all_input_nodes)
    return False
