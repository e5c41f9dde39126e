"""GEMM codegen with a fused epilogue (`tl.dot`): a tile of a product is summed in registers, where what reads it goes
on.

    product t0: bf16 = p0[64; 1] @ p1[n1; 1]      total = tl.zeros([R, C], tl.float32)
      over 64                                     for start in range(0, 64, K):
      columns (i1: n1)                                left = tl.load(p0 + 64*row + inner, mask=...)
        r0: f32 = load t0[i0*n1 + i1]      -->        right = tl.load(p1 + n1*inner + column, mask=...)
        r1: f32 = maximum r0, ...                     total = tl.dot(left, right, total, ...)
        store p2[i0*n1 + i1] r1                   r0 = total.to(tl.bfloat16).to(tl.float32)
                                                  r1 = ...

Tiles that run at the same time lie in groups of a few rows of tiles, so that they share operands in the L2 cache
(Triton's tutorial of matrix multiplication). f32 is multiplied as IEEE 754 has it, never as TF32.
"""
from __future__ import annotations

from anyshape.backend.triton.codegen.form import Form
from anyshape.backend.triton.codegen.kernel import BOTH, COLUMN, ROW, Printer
from anyshape.backend.triton.codegen.scalars import TYPES
from anyshape.backend.triton.codegen.sizes import linear
from anyshape.base.errors import VerifyError
from anyshape.kernel.loop_ir.directives import SPANNING, Product
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram
from anyshape.sym.expr import product, symbol

GROUP = 8  # rows of tiles


class ProductPrinter(Printer):
    """The work on a function of a program with a product."""

    def __init__(self, program: LoopProgram, form: Form, multiplied: Product) -> None:
        super().__init__(program, form)
        self.constants = ("R", "C", "K")
        self.product = multiplied
        if program.scratch or any(stage.level != "column" or one.op in SPANNING
                                  for stage in program.stages for one in stage.instructions):
            raise VerifyError("what reads a product in registers is pointwise",
                              do="report this as a bug of the compiler")

    def body(self) -> None:
        """A tile of the product, and the stages on it."""
        rows, columns = product(extent for _, extent in self.program.rows), self.total
        self.put(f"down = tl.cdiv({self.size(rows)}, R)")
        self.put(f"group = tl.cdiv({self.size(columns)}, C) * {GROUP}")
        self.put(f"above = pid // group * {GROUP}")
        self.put(f"height = tl.minimum(down - above, {GROUP})")
        self.put(f"row = (above + pid % group % height) * R + {self.lanes('R')}")
        self.put(f"rmask = row < {self.size(rows)}")
        self.axes["row"] = ROW
        self.put("first = pid % group // height * C")
        self.put(f"column = first + {self.lanes('C')}")
        self.put(f"cmask = column < {self.size(columns)}")
        self.axes["column"] = COLUMN
        self._sum()
        self.split("row", "", self.program.rows, ROW)
        self.split("column", "", self.program.columns, COLUMN)
        self.put(f"some = {self.size(columns)} > 0")
        self.stages()

    def _sum(self) -> None:
        """The tile of the product, in `total`."""
        multiplied, inner = self.product, self.size(self.product.inner)
        down, along, under, beside = multiplied.strides
        row, column, left, right = (symbol(name) for name in ("row", "column", "left", "right"))
        self.put("total = tl.zeros([R, C], tl.float32)")
        self.put(f"for start in range(0, {inner}, K):")
        self.depth += 1
        self.put("left = start + tl.arange(0, K)[None, :].to(INDEX)")
        self.put("right = start + tl.arange(0, K)[:, None].to(INDEX)")
        self.put(f"a = tl.load({multiplied.left} + {self.size(row * down + left * along)}, "
                 f"mask=rmask & (left < {inner}), other=0.0)")
        self.put(f"b = tl.load({multiplied.right} + {self.size(right * under + column * beside)}, "
                 f"mask=(right < {inner}) & cmask, other=0.0)")
        self.put('total = tl.dot(a, b, total, input_precision="ieee")')
        self.depth -= 1
        if multiplied.dtype != "f32":
            self.put(f"total = total.to({TYPES[multiplied.dtype]}).to(tl.float32)")

    def _load(self, one: Instruction) -> None:
        if one.buffer != self.product.name:
            super()._load(one)
            return
        loops = (*self.program.rows, *self.program.columns)
        if one.args or linear(one.offset, loops, "point") != symbol("point"):
            raise VerifyError(f"product {one.buffer} is read elsewhere than it is made",
                              do="report this as a bug of the compiler")
        self.let(one, "total", BOTH)
