"""What fusion decides on and what it gives: kernels and single nodes in order, and the fusions it refused."""
from __future__ import annotations

from dataclasses import dataclass

from anyshape.ir.graph import Node, Value
from anyshape.ir.op import row
from anyshape.ir.types import NATIVE
from anyshape.kernel.lowering.group import FusionGroup, Lowered, NotLowerable
from anyshape.sym.expr import Size

FUSABLE = ("pointwise", "view", "index", "reduce", "create", "scatter", "scan")


@dataclass(frozen=True, slots=True)
class RejectedFusion:
    """A fusion that was considered and not made."""

    value: str
    reason: str
    bytes: Size


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """A fused kernel of the graph: its group and its loop program."""

    group: FusionGroup
    lowered: Lowered


@dataclass(frozen=True, slots=True)
class Fusion:
    """The result: kernels and single nodes in a valid order, and the refusals."""

    items: tuple[FusedKernel | Node, ...]
    refusals: tuple[RejectedFusion, ...]


@dataclass(frozen=True, slots=True)
class FusionBlocklist:
    """What must stay out of kernels: ops that the target has no code for (by name, or by a scalar instruction of
    theirs), and values whose equation could not be lowered."""

    ops: frozenset[str] = frozenset()
    values: frozenset[str] = frozenset()


class NotFusable(NotLowerable):
    """A group could not be lowered after all; `values` are its equations."""

    values: frozenset[str] = frozenset()


def fusable(node: Node, refused: FusionBlocklist) -> bool:
    """Can the node be part of a kernel: a body, a reduction, a scatter or a scan, on dtypes that kernels compute on?"""
    op = row(node)
    if op.kind not in FUSABLE or (op.kind not in ("reduce", "scatter", "scan") and op.body is None):
        return False
    if not refused.ops.isdisjoint((node.op, *op.scalars)):
        return False
    if len(node.outputs) != 1 or node.output.name in refused.values:
        return False
    return all(value.tensor.dtype in NATIVE for value in (*node.outputs, *node.values()))


def taken_over(kernel: FusedKernel) -> list[Value]:
    """The values into which the kernel writes elements: first operands of its scatters. It does not read them."""
    found = [node.inputs[0] for node in kernel.group.nodes if row(node).kind == "scatter"]
    return [operand for operand in found if isinstance(operand, Value)]
