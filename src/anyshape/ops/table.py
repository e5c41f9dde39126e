"""The op table: importing this module fills `anyshape.ir.op.OPS` with one row per op, a file per kind."""
from anyshape.ops import (
    attention,
    collective,
    convolution,
    creation,
    extern,
    index,
    matmul,
    pointwise,
    recurrence,
    reduce,
    routing,
    scan,
    scatter,
    view,
)

__all__ = [
    "attention", "collective", "convolution", "creation", "extern", "index", "matmul", "pointwise",
    "recurrence", "reduce", "routing", "scan", "scatter", "view",
]
