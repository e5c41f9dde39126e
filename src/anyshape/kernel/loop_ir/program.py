"""The loop IR: one fused kernel over an iteration space rows x columns, in stages. Knows no target.

A kernel is a function of pointers (`params`), sizes (`sizes`, int64) and a range of row blocks. Rows are the product of
`rows`; every row is independent of the others, and so rows are run in parallel. Inside a row the stages run in order.

- A stage at level "row" runs its instructions once per row.
- A stage at level "column" runs them for every point of `columns` (a loop nest, first variable outermost). Their
  extents may depend on the row variables, but not on the vector, nor where a reduction over rows is split.

How the loops are run (vectorised, tiled, interchanged, split) is the `schedule`: directives, described in
kernel/loop_ir/directives.py. The variable of `Vectorize` is called the vector: the last column variable (row schedule)
or the last row variable (column schedule).

Registers are numbered through the whole kernel; a register made at a row stage, or by `reduce` at a column stage
(valid after that stage), may be used by all later stages. Registers made at a column stage otherwise end with it.

Offsets are in elements: sizes (sym.Expr) over size names, loop variables, and registers written as symbols `%12`.
"""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

from anyshape.kernel.loop_ir.directives import Directive, Vectorize
from anyshape.sym.expr import Size

_Kind = TypeVar("_Kind", bound=Directive)

@dataclass(frozen=True, slots=True)
class Param:
    """A pointer of the kernel: dtype of the elements in memory; role: in, out, inout."""

    name: str
    dtype: str
    role: str


@dataclass(frozen=True, slots=True)
class Scratch:
    """A row buffer private to one thread, `count` elements (a size over size names), indexed like a param."""

    name: str
    dtype: str
    count: Size


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation.

    op: a scalar instruction (a name of ir/scalar.py), or
        load     buffer[offset], where `args` is () or (mask,); masked-off lanes read nothing and give `value`
        store    buffer[offset] = args[0], masked by args[1] when there is one; of lanes, and of columns, that meet in
                 one element the last one stays
        scatter  combine args[0] into buffer[offset] with `combine`, masked likewise; those that meet are combined in
                 order. Different rows never store or scatter to one element: rows are run in parallel
        constant `value`
        index    the size `offset` as an i64
        fold     (column stages, with SplitReduction) buffer[offset], an element for each part and column, becomes
                 args[0] combined over the rows of the part; nothing else reads or writes the buffer
        check    where args[0] (bool, vector or uniform; args[1] is an optional mask of active lanes) is false, set
                 buffer[0] (i64, role out) to `value`; nothing else happens
        scan     (column stages) combine args[0] over the columns up to this one, in row-major order; `linear`: what
                 there is before, times args[1], plus args[0]
        reduce   combine args[0] over all columns of the stage with `combine`; the result is a row register
    dtype: of the result in the register: bf16 and f16 are computed as f32, so registers are never bf16 or f16;
        a load converts from the buffer's dtype, a store to it (round to nearest even).
    """

    result: int
    op: str
    args: tuple[int, ...] = ()
    dtype: str = "f32"
    buffer: str = ""
    offset: Size = 0
    value: float | int | bool = 0
    combine: str = ""  # add, mul, maximum, minimum, and, or; of a scan also linear


@dataclass(frozen=True, slots=True)
class Stage:
    """level: row or column; instructions in order; `where`: the source lines it stems from (a comment)."""

    level: str
    instructions: tuple[Instruction, ...]
    where: str = ""


@dataclass(frozen=True, slots=True)
class LoopProgram:
    """One kernel: stages in order over a space of rows by columns. `rows` and `columns` are (variable, extent) pairs,
    outermost first; `schedule` has at most one directive of a kind."""

    name: str
    params: tuple[Param, ...]
    sizes: tuple[str, ...]
    rows: tuple[tuple[str, Size], ...]
    columns: tuple[tuple[str, Size], ...]
    schedule: tuple[Directive, ...]
    stages: tuple[Stage, ...]
    scratch: tuple[Scratch, ...] = ()

    def directive(self, kind: type[_Kind]) -> _Kind | None:
        """The directive of a kind in the schedule, if there is one."""
        return next((one for one in self.schedule if isinstance(one, kind)), None)

    def scheduled(self, *directives: Directive) -> LoopProgram:
        """The program with these directives, in place of those of the same kind."""
        kinds = {type(one): one for one in (*self.schedule, *directives)}
        return dataclasses.replace(self, schedule=tuple(kinds.values()))

    @property
    def vector(self) -> str:
        """The variable that is vectorised, "" without one."""
        found = self.directive(Vectorize)
        return found.axis if found is not None else ""
