"""Bytecode encoder of attention steps: attention steps at given sizes: the words that the host reads
(backend/cpu/routines/attention.py), or a call of PyTorch."""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from anyshape.backend.cpu.bytecode import format as host
from anyshape.backend.cpu.bytecode.encode_gemm import (
    ATTENTION,
    LIBRARY,
    OUR_ROWS,
    PACKED,
    THIN,
    Products,
    Shape,
    at_slots,
    bits,
    native,
)
from anyshape.backend.cpu.llvm import half_precision
from anyshape.backend.cpu.machine.blas import BlasRoutines
from anyshape.backend.cpu.machine.target import Machine
from anyshape.backend.cpu.microkernels import gemm, gemv, softmax_rows
from anyshape.backend.cpu.native.compiler import words_of
from anyshape.base.align import align
from anyshape.ir.types import size_of
from anyshape.ops.attention import roles, wide

WIDE = frozenset(("mask", "sums", "products"))
HEADS_FIRST = frozenset(("q", "k", "v", "mask", "gradient"))  # [B, H, M, D]; results are [B, M, H, D]
ROWS = 64  # of a tile of scores: with more, products gain little
HALF_ROWS = 72  # the same where products are made of panels of 12 rows, or 6
FEWEST = 32
SCORES = 1 << 20  # bytes of a tile of scores, which then has fewer rows: about what the second cache holds
CAUSAL_TILES = 8  # at least so many tiles of a causal square: what lies beyond the diagonal in a tile is in vain
FEW = max(gemv.COUNTS["spread"])  # rows that are multiplied as vectors


_attention, _OPERANDS = host.AttentionStep.encoder(), host.AttentionStep.index("operands")
# fields of products by packed panels: of their vectors, and where in a thread's scratch what is
_VECTORS = ("lanes", "grain", "per_word")
_PARTS = ("gradients", "keys", "values", "keys_again", "row_panels", "column_panels", "dkeys", "dvalues", "sums",
          "factors")


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What does not depend on sizes in a step: the op, and per window (slot, bytes per element)."""

    number: int
    op: str
    dtype: str
    causal: bool
    scale: float | None
    places: tuple[tuple[int, int], ...]


def attention_words(products: Products, spec: AttentionSpec, windows: tuple[Any, ...]) -> list[int]:
    """The words of a step; windows: (shape, strides, offset) of operands and results, in the order of the plan."""
    return placed(unplaced(products, spec, windows), spec, windows)


def unplaced(products: Products, spec: AttentionSpec, windows: tuple[Any, ...]) -> tuple[int, ...] | None:
    """What the words of a step have in common with those of others that have equal windows, in other slots."""
    return _words(products.machine, products.ours(ATTENTION), products.blas, spec.op, spec.dtype, spec.causal,
                  spec.scale, tuple([(shape, strides) for shape, strides, _ in windows]))


def placed(words: tuple[int, ...] | None, spec: AttentionSpec, windows: tuple[Any, ...]) -> list[int]:
    """The words of a step; words: what it has in common with others."""
    if words is None:
        return [host.CALL, host.STEP_WORDS, spec.number]
    return at_slots(words, range(_OPERANDS, len(words), words_of(host.Operand)), spec.number, spec.places, windows)


@lru_cache(maxsize=4096)
def _words(machine: Machine, by_panels: bool, blas: BlasRoutines, op: str, dtype: str, causal: bool,
           scale: float | None, types: tuple[tuple[Shape, Shape], ...]) -> tuple[int, ...] | None:
    """The words with positions among the windows in place of slots; None when the host cannot take these strides.
    by_panels: products of f32 are made from packed panels, not by the library."""
    if not native(dtype, machine, blas):
        return None
    windows = dict(zip(roles(op, len(types)), enumerate(types), strict=True))
    batch, heads, rows, depth = windows["q"][1][0]
    groups, columns = windows["k"][1][0][1:3]
    half = dtype not in LIBRARY or (
        dtype == "f32" and (not blas.products or (by_panels and rows >= OUR_ROWS)))
    product, code = (PACKED[dtype], "f") if half else LIBRARY[dtype][::2]
    if 0 in (heads, groups, depth) or max(rows, columns, depth) >= 2**30:
        return None
    operands: list[int] = []
    for role in host.OPERANDS:
        position, kind = windows.get(role, (-1, ((), ())))
        steps = _steps(role, *kind, (batch, heads, rows, columns)) if position >= 0 else (0, 0, 0)
        if steps is None:
            return None
        operands += [position, 0, *(step * size_of(wide(dtype) if role in WIDE else dtype) for step in steps)]
    backward = op == "attention_backward"
    item = size_of(wide(dtype))
    most = HALF_ROWS if half else ROWS
    tile = min(most, SCORES // (item * max(columns, 1)), columns // CAUSAL_TILES if causal else most)
    tile = max(tile, FEWEST)
    if half:  # whole panels
        tile = align(tile, 3 * gemm.grain(machine, dtype))
    tile = max(min(tile, rows), 1)
    # rows of scores begin at different places of the cache's lines
    step = align(columns * item, 64)
    step += 64 if step % 1024 == 0 else 0
    few = 0 < rows <= FEW and not backward and not half
    dot, spread = (THIN[gemv.routine(way, dtype, rows)] if few else 0 for way in ("dot", "spread"))
    factor = depth**-0.5 if scale is None else scale
    weigh = host.WEIGH + softmax_rows.routines().index(f"{'unweigh' if backward else 'weigh'}_{wide(dtype)}")
    scratch, panels = _panels(machine, dtype, backward, tile, step, columns, depth) if half \
        else (tile * step * (1 + backward), dict.fromkeys((*_VECTORS, *_PARTS), 0))
    return tuple(_attention(
        op=host.ATTENTION, length=words_of(host.AttentionStep), number=0, product=product, weigh=weigh,
        backward=int(backward), batch=batch, groups=groups, share=heads // groups, rows=rows, columns=columns,
        depth=depth, causal=int(causal), item=size_of(dtype), scale=bits(factor, code), one=bits(1.0, code), zero=0,
        tile=tile, step=step, scratch=scratch, dot=dot, spread=spread, **panels, operands=operands))


def _panels(machine: Machine, dtype: str, backward: bool, tile: int, step: int, columns: int,
            depth: int) -> tuple[int, dict[str, int]]:
    """What half precision needs: bytes of scratch per thread, and the fields that only it has."""
    lanes, grain, per_word = machine.lanes, gemm.grain(machine, dtype), half_precision.per_word(machine, dtype)

    def panels(size: int, count: int, top: int, least: int) -> int:
        """Bytes of panels of `size` lanes by `count` elements."""
        return 4 * align(size, least) * align(-(-count // per_word), lanes) + host.PACKED_PAD * -(-size // top)

    def of_columns(size: int, count: int) -> int:
        return panels(size, count, 2 * lanes, lanes)

    def of_rows(size: int, count: int) -> int:
        return panels(size, count, 3 * grain, grain)

    scores = align(tile, grain) * step
    keys = 4 * align(columns, grain) * align(depth, lanes) * backward  # sums of the gradients of keys, or of values
    sums = 4 * (3 * grain * 2 * lanes if backward else align(tile, grain) * align(depth, lanes))
    parts = {"gradients": scores * backward, "keys": of_columns(columns, depth),
             "values": of_columns(columns, depth) if backward else of_columns(depth, columns),
             "keys_again": of_columns(depth, columns) * backward,
             "row_panels": max(of_rows(tile, depth), of_rows(tile, columns), of_rows(columns, tile) * backward),
             "column_panels": of_columns(depth, tile) * backward, "dkeys": keys, "dvalues": keys, "sums": sums,
             "factors": 0 if backward else 8 * (tile + 1)}
    places = {}
    at = align(scores, 64)
    for name in _PARTS:
        places[name] = at
        at = align(at + parts[name], 64)
    return at, dict(zip(_VECTORS, (lanes, grain, per_word), strict=True)) | places


def _steps(role: str, shape: Shape, strides: Shape, scores: Shape) -> tuple[int, int, int] | None:
    """Elements from batch to batch, from head to head and from row to row; None when the elements of a row are not
    next to each other, or rows lie in each other."""
    if role in ("sums", "products"):
        return strides[0], strides[1], strides[2]
    if role == "mask":
        if shape[3] != scores[3] or (strides[3] != 1 and shape[3] > 1):
            return None
        batch, head, row = (0 if have == 1 else step for have, step in zip(shape[:3], strides[:3], strict=True))
        return batch, head, row
    batch, head, row = strides[:3] if role in HEADS_FIRST else (strides[0], strides[2], strides[1])
    count = shape[2] if role in HEADS_FIRST else shape[1]
    if shape[3] > 1 and strides[3] != 1:
        return None
    if count <= 1:
        row = shape[3]
    return None if row < shape[3] else (batch, head, row)


