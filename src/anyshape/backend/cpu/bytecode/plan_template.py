"""The filled template of a plan: its words at given sizes, from the template (backend/cpu/bytecode/template.py) and a
native routine, and what that routine knows of products."""
from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from anyshape.backend.cpu.bytecode import format as host
from anyshape.backend.cpu.bytecode import template
from anyshape.backend.cpu.bytecode.products import (
    ATTENTION,
    FEW,
    FULL,
    LIBRARY,
    MANY,
    MOST_VECTORS,
    OUR_COLUMNS,
    OUR_INNER,
    OUR_ROWS,
    PACKED,
    THIN,
    THIN_ONES,
    Products,
    bits,
    does,
)
from anyshape.backend.cpu.bytecode.template import NO_PRODUCT, QUESTIONS, THIN_COUNTS, Kind, Word
from anyshape.backend.cpu.machine.low_precision import BYTES, per_word, tiles
from anyshape.backend.cpu.microkernels.tables import gemm, gemv, softmax_rows
from anyshape.base.errors import VerifyError
from anyshape.base.int64_array import int64_array
from anyshape.ir.types import size_of
from anyshape.ops.attention import wide

# (template, pieces, values, out) -> words, or below 0 a question: backend/cpu/routines/encoding/fill.py
Fill = Callable[[int, int, int, int], int]
QUESTION_KINDS = (FULL, FEW, MANY, THIN_ONES, ATTENTION)  # the last question is whether there are products of the dtype
_kind = Kind.encoder()
_ANSWERS = Kind.index("answers")


def kind_words(number: int, dtype: str, products: Products) -> array[int]:
    """A `Kind`, which no question has been asked of."""
    machine, blas = products.machine, products.blas
    library, many, code = LIBRARY.get(dtype, (0, 0, "f"))
    has_many = blas.f32_batches if dtype == "f32" else blas.f64_batches
    packed = dtype in PACKED
    lanes, grain, in_word, whole = (machine.lanes, gemm.grain(machine, dtype), per_word(machine, dtype),
                                    tiles(machine, dtype)) if packed else (machine.lanes, 1, 1, False)
    in_place = dtype in ("f32", BYTES)  # sums lie in the result
    thin = [THIN.get(gemv.routine(way, dtype, count, wide), 0) if 0 < count <= max(gemv.COUNTS[way]) else 0
            for way in ("dot", "spread") for wide in (False, True) for count in range(THIN_COUNTS)]
    thin += [THIN.get(gemv.over_panels(dtype, count), 0) if 0 < count <= max(gemv.PANELS) else 0
             for count in range(THIN_COUNTS)]
    return int64_array(_kind(
        number=number, answers=[-1] * QUESTIONS, item=size_of("i32") if in_place else size_of(dtype),
        f32=int(in_place), f64=int(dtype == "f64"),
        library=int(dtype in LIBRARY and blas.products), half=int(dtype not in LIBRARY), product=library,
        many=many if has_many else 0, packed=PACKED.get(dtype, 0), one=bits(1.0, code), lanes=lanes, grain=grain,
        per_word=in_word, tiles=int(whole), our_rows=OUR_ROWS,
        our_columns=OUR_COLUMNS, our_inner=OUR_INNER, most_vectors=MOST_VECTORS, most_dot=max(gemv.COUNTS["dot"]),
        most_spread=max(gemv.COUNTS["spread"]), thin=thin))


def product_words(kind: int, number: int, dtype: str, alpha: float, beta: float, addend: bool,
                  panels: bool = False) -> list[Word]:
    """A `ProductPiece` without its windows. kind: address of the dtype's `Kind`."""
    beta, code = beta if addend else 0.0, "d" if dtype == "f64" else "f"
    return [kind, number, bits(alpha, code), bits(beta, code), int(alpha != 1), int(beta != 1), int(addend),
            int(panels)]


def attention_words(kind: int, number: int, op: str, dtype: str, causal: bool, scale: Word,
                    there: Collection[str]) -> list[Word]:
    """An `AttentionPiece` without its windows. scale: the bits of the factor; there: the roles of its operands and
    results."""
    backward = op == "attention_backward"
    weigh = softmax_rows.routines().index(f"{'unweigh' if backward else 'weigh'}_{wide(dtype)}")
    return [kind, number, int(backward), int(causal), scale, size_of(wide(dtype)), host.WEIGH + weigh,
            *(int(role in there) for role in host.OPERANDS)]


@dataclass(frozen=True, slots=True, eq=False)
class PlanTemplate:
    """What is filled at each new shape. words: `pieces` pieces. capacity: words that they become, at most. kinds: what
    pieces name by address, by dtype, in the order of their numbers."""

    words: array[int]
    pieces: int
    capacity: int
    kinds: Mapping[str, array[int]]
    products: Products
    fill: Fill

    def __call__(self, values: Sequence[int], more: int = 0) -> array[int]:
        """The words of the steps and their end, at these values. more: words of the steps that Python encoded."""
        out = array("q", bytes(8 * (self.capacity + more)))
        given = int64_array(values)
        arguments = (self.words.buffer_info()[0], self.pieces, given.buffer_info()[0], out.buffer_info()[0])
        while (count := self.fill(*arguments)) < 0:
            if count == NO_PRODUCT:
                raise VerifyError("a product in bands is one that the host does not have", why=f"sizes {[*values]}",
                                  do="report this as a bug of the compiler")
            self._answer(-1 - count)
        del out[count:]
        return out

    def _answer(self, question: int) -> None:
        """Asks the autotuner, which may measure; threads that ask at a time write the same."""
        number, which = divmod(question, QUESTIONS)
        dtype = [*self.kinds][number]
        found = self.products.ours(QUESTION_KINDS[which]) if which < len(QUESTION_KINDS) else does(dtype, self.products)
        self.kinds[dtype][_ANSWERS + which] = int(found)


def step_words(kind: int, body: Sequence[Word], kinds: Mapping[str, array[int]], products: Products,
               fill: Fill) -> array[int]:
    """The words of a single step and their end. kind, body: of its piece, see `template.piece`; all are numbers."""
    piece = int64_array(template.piece(template.Names(), kind, body))
    return PlanTemplate(piece, 1, template.most_words(kind, body) + 1, kinds, products, fill)(())
