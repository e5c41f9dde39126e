"""Attention, whose scores are never stored: softmax(scale * q @ k^T + mask) @ v, row by row of the scores.

    attention(q, k, v, mask? | causal, scale)    q [B, H, M, D], k and v [B, G, N, D], mask broadcasts to [B, H, M, N]
        -> result [B, M, H, D], logarithms [B, H, M]: of the sums of each row's exponentials
    attention_backward(gradient, q, k, v, logarithms, products, mask? | causal, scale)
        gradient of the result [B, H, M, D], products [B, H, M]: of gradient and result, summed along D
        -> gradients of q [B, M, H, D], of k and v [B, N, G, D]

Each of the G heads of k and v serves H / G heads of q, one after another; that G divides H is the caller's to know.
`causal`: row i sees the columns up to i. The scale None is 1 / sqrt(D). A row that sees nothing, or nothing but minus
infinity, is zero, and so is its logarithm, as in PyTorch's fused attention. Results have the heads second to last: the
order in which a projection that follows reads them. In bf16 and f16, mask, logarithms and products are f32; weights and
gradients of scores are rounded where they are factors.

    ring_attention(q, k, v | axis, parts, causal, scale)
    ring_attention_backward(gradient, q, k, v, logarithms, products | axis, parts, causal, scale)

are the same of a sequence that is dealt out over the ranks along an axis of a mesh (ops/collective.py): each rank has
rows of q and of what is shaped like it, columns of k and v, and gets its rows and columns of the results. `parts` has
two entries, of the rows and of the columns.
"""
from __future__ import annotations

from anyshape.ir.types import TensorType
from anyshape.ops.type_rules import Attrs, Inputs, Types, add_row, fail, native, same_device, tensor
from anyshape.sym.expr import Size

HALF = ("bf16", "f16")
DTYPES = ("f32", "f64", *HALF)
OPERANDS = {  # the operands of each op, without the mask, and its results
    "attention": (("q", "k", "v"), ("result", "sums")),
    "attention_backward": (("gradient", "q", "k", "v", "sums", "products"), ("dq", "dk", "dv")),
}
FAR = 64.0  # a logarithm as far from 0 as that has lost digits of its sum


def roles(op: str, count: int) -> tuple[str, ...]:
    """What each of `count` operands and results of a step is."""
    operands, results = OPERANDS[op]
    return (*operands, *(("mask",) if count > len(operands) + len(results) else ()), *results)


def wide(dtype: str) -> str:
    """The dtype of scores, and of what is added to them or made of them alone."""
    return "f32" if dtype in HALF else dtype


def _operands(name: str, inputs: Inputs, attrs: Attrs, count: int) -> list[TensorType]:
    """The operands' types: `count` of them and perhaps a mask; four in the backward come first, then two wide ones."""
    if len(inputs) > count + 1:
        fail(name, f"{len(inputs)} operands were given", f"give {count}, and perhaps a mask")
    kinds = [tensor(name, inputs, position) for position in range(len(inputs))]
    same = 4 if count > 3 else 3
    wanted = [kinds[0].dtype] * same + [wide(kinds[0].dtype)] * (len(kinds) - same)
    if [kind.dtype for kind in kinds] != wanted:
        fail(name, f"operands have dtypes {', '.join(kind.dtype for kind in kinds)}", f"cast to {', '.join(wanted)}")
    native(name, kinds[0].dtype)
    same_device(name, kinds)
    if type(attrs["causal"]) is not bool or type(attrs["scale"]) not in (float, type(None)):
        fail(name, f"causal is {attrs['causal']!r}, scale is {attrs['scale']!r}", "give a bool, and a float or None")
    return kinds


def _sizes(name: str, q: TensorType, k: TensorType, v: TensorType, mask: TensorType | None) -> tuple[Size, ...]:
    """(B, H, M, N, D, G)"""
    if not q.rank == k.rank == v.rank == 4 or k.shape != v.shape or q.shape[::3] != k.shape[::3]:
        fail(name, f"{q}, {k} and {v} are no queries, keys and values of one batch and one depth")
    (batch, heads, rows, depth), (_, groups, columns, _) = q.shape, k.shape
    if heads != groups and isinstance(heads, int) and isinstance(groups, int) and (groups == 0 or heads % groups):
        fail(name, f"{heads} heads of queries do not share {groups} of keys evenly")
    if mask is not None and (mask.rank != 4 or any(
            have not in (1, wanted) for have, wanted in zip(mask.shape, (batch, heads, rows, columns), strict=True))):
        fail(name, f"the mask {mask} does not broadcast to the scores")
    return batch, heads, rows, columns, depth, groups


def _infer(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    q, k, v, *mask = _operands(name, inputs, attrs, 3)
    batch, heads, rows, _, depth, _ = _sizes(name, q, k, v, mask[0] if mask else None)
    return (TensorType(q.dtype, (batch, rows, heads, depth), None, q.device),
            TensorType(wide(q.dtype), (batch, heads, rows), None, q.device))


def _infer_backward(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    gradient, q, k, v, logarithms, products, *mask = _operands(name, inputs, attrs, 6)
    batch, heads, rows, columns, depth, groups = _sizes(name, q, k, v, mask[0] if mask else None)
    if gradient.shape != q.shape or not logarithms.shape == products.shape == q.shape[:3]:
        fail(name, f"{gradient}, {logarithms} and {products} do not belong to {q}")
    keys = TensorType(q.dtype, (batch, columns, groups, depth), None, q.device)
    return TensorType(q.dtype, (batch, rows, heads, depth), None, q.device), keys, keys


add_row("attention", "library", "q, k, v, ... | causal, scale", _infer)
add_row("attention_backward", "library", "gradient, q, k, v, logarithms, products, ... | causal, scale",
        _infer_backward)
add_row("ring_attention", "extern", "q, k, v | axis, parts, causal, scale", _infer)
add_row("ring_attention_backward", "extern", "gradient, q, k, v, logarithms, products | axis, parts, causal, scale",
        _infer_backward)
