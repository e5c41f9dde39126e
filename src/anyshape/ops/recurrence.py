"""The recurrence of a recurrent layer (LSTM, GRU, RNN) over time, in one direction, by a routine of the host.

    recurrence(gates, weights, bias, h, ... | cell, reverse)   [T, B, G*H], [N, H, G, 16], [N, G, 16], [B, H], of an
        LSTM c [B, H], and maybe lengths i64 [B] -> y [T, B, H], the last h [B, H], for an LSTM also the last c; f32

    cell        gates, in PyTorch's order             what a step does with p = weights . h + bias
    lstm        input, forget, cell, output (G = 4)   c' = s(gf+pf) c + s(gi+pi) tanh(gg+pg); h' = s(go+po) tanh(c')
    gru         reset, update, new (G = 3)            n = tanh(gn + s(gr+pr) pn); h' = n + s(gu+pu) (h - n)
    gru_before  the same; resets before the product   n = tanh(gn + weights_n . (s(gr+pr) h) + bias_n); h' as above
    tanh        one (G = 1)                           h' = tanh(g + p)
    relu        one (G = 1)                           h' = max(g + p, 0)

A row's sequence ends with its length, 0 to T: behind it y is 0, and the last states are those of its end; `reverse`
begins there. The last result of gru_before is [2, B, H]: the update gate and the reset state that the last time had.

    recurrence_bytes(gates, weights, sums, scales, h, c | reverse)   [T, B, 4*H] f32, [N, H/4, 4, 16, 4] i8,
        [N, 4, 16] i32 and f32, [B, H] f32 -> y, the last h, the last c, and [B, H/4*4] u8: the last state that a time
        began with

is an LSTM without recurrent bias, whose state is quantised for each time, all rows together, as DynamicQuantizeLinear
of ONNX does it (u8, state = scale * (q - zero)), and whose weights are whole numbers, four terms next to each other:

    p = (weights . q - zero * sums) * (scale * scales)        sums: of a unit's weights

`gates` are the products of the inputs, all times at once, with their bias. The units of the hidden state lie in blocks
of 16, N of them, the last one filled up with zeros: what a thread reads at a time then lies in one piece, for vectors
of any width. `reverse`: the last time comes first. Without a time the last state is the first one.
"""
from __future__ import annotations

from collections.abc import Sequence

from anyshape.ir.types import TensorType
from anyshape.ops.type_rules import Attrs, Inputs, Types, add_row, fail, same_device, tensor
from anyshape.sym.expr import Size

RECURRENCES = ("recurrence", "recurrence_bytes")
BLOCK = 16  # units of the hidden state that lie side by side
WORD = 4  # terms of 8 bits that lie side by side
CELLS = {"lstm": 4, "gru": 3, "gru_before": 3, "tanh": 1, "relu": 1}  # how many gates a cell has


def blocks(hidden: int) -> int:
    """Of how many blocks the units of a hidden state are."""
    return -(-hidden // BLOCK)


def words(hidden: int) -> int:
    """Of how many words of quantised numbers a state is."""
    return -(-hidden // WORD)


def _infer(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    cell = attrs["cell"]
    if not isinstance(cell, str) or cell not in CELLS:
        fail(name, f"the cell is {cell!r}", f"give one of {', '.join(CELLS)}")
    if not isinstance(attrs["reverse"], bool):
        fail(name, f"reverse is {attrs['reverse']!r}", "give True or False")
    kinds = [tensor(name, inputs, place) for place in range(len(inputs))]
    states = 1 + (cell == "lstm")
    count = 3 + states
    if [kind.dtype for kind in kinds] not in (["f32"] * count, [*["f32"] * count, "i64"]):
        fail(name, f"operands are {', '.join(map(str, kinds))}", "give f32, c for an LSTM alone, and lengths as i64")
    gates, state = kinds[0], kinds[3]
    batch, hidden = _state(name, gates, state)
    of = CELLS[cell]
    shapes = ((gates.shape[0], batch, of * hidden), (blocks(hidden), hidden, of, BLOCK), (blocks(hidden), of, BLOCK),
              *[(batch, hidden)] * states, (batch,))
    _check_shapes(name, kinds, shapes)
    found = _results(name, kinds, state, states)
    return found if cell != "gru_before" else (*found, TensorType("f32", (2, batch, hidden), None, gates.device))


def _infer_bytes(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    if not isinstance(attrs["reverse"], bool):
        fail(name, f"reverse is {attrs['reverse']!r}", "give True or False")
    kinds = [tensor(name, inputs, place) for place in range(len(inputs))]
    if [kind.dtype for kind in kinds] != ["f32", "i8", "i32", "f32", "f32", "f32"]:
        fail(name, f"operands are {', '.join(map(str, kinds))}", "give weights of i8, sums of i32, all else of f32")
    gates, state = kinds[0], kinds[4]
    batch, hidden = _state(name, gates, state)
    units = (blocks(hidden), CELLS["lstm"], BLOCK)
    _check_shapes(name, kinds, ((gates.shape[0], batch, CELLS["lstm"] * hidden),
                                (units[0], words(hidden), *units[1:], WORD), units, units, (batch, hidden),
                                (batch, hidden)))
    return (*_results(name, kinds, state, 2), TensorType("u8", (batch, words(hidden) * WORD), None, gates.device))


def _state(name: str, gates: TensorType, state: TensorType) -> tuple[Size, int]:
    """Rows and units of the state."""
    if state.rank != 2 or gates.rank != 3:
        fail(name, f"{state} is no state, or {gates} no gates of times and rows")
    batch, hidden = state.shape
    if not isinstance(hidden, int) or hidden < 1:
        fail(name, f"the state has {hidden} units", "give a number of units that is known")
    return batch, hidden


def _check_shapes(name: str, kinds: Sequence[TensorType], wanted: Sequence[tuple[Size, ...]]) -> None:
    for kind, shape in zip(kinds, wanted):
        if kind.shape != shape:
            fail(name, f"an operand is {kind}, not of the sizes {', '.join(map(str, shape))}")


def _results(name: str, kinds: Sequence[TensorType], state: TensorType, count: int) -> Types:
    """All states, and `count` last ones."""
    device = same_device(name, kinds)
    last = TensorType("f32", state.shape, None, device)
    return (TensorType("f32", (kinds[0].shape[0], *state.shape), None, device), *[last] * count)


add_row("recurrence", "library", "gates, weights, bias, h, ... | cell, reverse", _infer)
add_row("recurrence_bytes", "library", "gates, weights, sums, scales, h, c | reverse", _infer_bytes)
