"""Emitters: for each scalar instruction (ir/scalar.py) the function that emits its LLVM code, for scalars and vectors
alike, by the kind of dtype that its first operand has.

    @emits("cbrt", "float", weight=64)
    def cbrt(code: Code, x: Value) -> Value:
        return libm(code, "cbrt", [x])

An instruction without an emitter stays out of kernels: PyTorch runs what needs it.
"""
from __future__ import annotations

from collections.abc import Callable

from anyshape.backend.cpu.llvm.ir_builder import Value
from anyshape.ir.scalar import SCALAR

Emitter = Callable[..., Value]  # (code, *operands)
EMITTERS: dict[tuple[str, str], Emitter] = {}  # instruction, kind of the first operand's dtype
# instructions of the processor per point, roughly, of what is more than one; for the choice of the vector width
WEIGHTS: dict[str, int] = {"constant": 0, "index": 0, "scatter": 6}


def emits(op: str, *kinds: str, weight: int = 1) -> Callable[[Emitter], Emitter]:
    """Makes a function the emitter of `op` on operands of these kinds."""
    def add(function: Emitter) -> Emitter:
        for kind in kinds:
            assert op in SCALAR and (op, kind) not in EMITTERS, (op, kind)
            EMITTERS[op, kind] = function
        if weight != 1:
            WEIGHTS[op] = weight
        return function
    return add
