"""Associative scans (torch's higher-order operator): those with a recurrence that kernels know become one step.

    associative_scan(lambda l, r: (l[0] * r[0], r[0] * l[1] + r[1]), (a, b), 0)
        -->  cumprod(a, 0), anyshape_recurrent::linear_scan(a, b)

PyTorch's own form for the CPU takes the scan apart in pairs, as often as its length can be halved, and each length that
is odd somewhere on the way is another program. Other functions are traced in that form without its questions: one
program for the lengths from a power of two to the next.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from anyshape.frontend.recurrent.operators import ASSOCIATIVE_SCAN, CUMPROD, LINEAR_SCAN
from anyshape.torch_compat import get
from anyshape.torch_compat import tree as pytree

_torchs = get("torch._higher_order_ops.associative_scan")  # which hides the module of this name
_space: dict[str, Any] = getattr(_torchs, "__globals__", {})
_operator, _flat = _space.get("associative_scan_op"), _space.get("wrap_combine_fn_flat")
GENERIC = _space.get("generic_associative_scan")  # what torch's function calls for the CPU
FUNCTION = None if None in (_operator, _flat) else _torchs

# names of scalar functions, as Dynamo has them in its graphs and as methods
_NAMES = {"mul": "mul", "multiply": "mul", "add": "add", "maximum": "maximum", "minimum": "minimum",
          "max": "maximum", "min": "minimum", "logaddexp": "logaddexp"}
_SCANS: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x.cumsum(0, dtype=x.dtype), "mul": lambda x: cumprod(x, 0, dtype=x.dtype),
    "maximum": lambda x: x.cummax(0).values, "minimum": lambda x: x.cummin(0).values,
    "logaddexp": lambda x: x.logcumsumexp(0)}


def cumprod(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """torch.cumprod: where a gradient is wanted an operator of ours, since that of PyTorch takes the length as a number
    and looks for zeros."""
    made = input if dtype is None else input.to(dtype)
    if made.requires_grad and made.is_floating_point() and -made.dim() <= dim < made.dim():
        return CUMPROD(made, dim % made.dim())
    return torch.ops.aten.cumprod.default(input, dim, dtype=dtype)


def associative_scan(combine_fn: Any, xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise") -> Any:
    """torch's function of this name, in traces for all sizes: a step that `recognised` reads. Its operator is traced
    beside it, on tensors of two elements that nothing computes: it has the combining function as a graph."""
    leaves, spec = pytree.tree_flatten(xs)
    modes = ("generic",) if any(leaf.device.type == "cpu" for leaf in leaves) else ("generic", "pointwise")
    if combine_mode not in modes or not -leaves[0].dim() <= dim < leaves[0].dim() or leaves[0].shape[dim] == 0:
        return pytree.tree_unflatten(ASSOCIATIVE_SCAN(leaves, []), spec)  # is traced as torch's, which refuses it
    dim = dim % leaves[0].dim()
    leaves = [leaf.movedim(dim, 0) for leaf in leaves]
    if reverse:
        leaves = [leaf.flip([0]) for leaf in leaves]
    assert _operator is not None and _flat is not None
    flat = functools.partial(_flat, combine_fn=combine_fn, spec=spec, num_leaves=len(leaves))
    with torch.no_grad():
        combined = _operator(flat, [leaf.new_empty([2] + [1] * (leaf.dim() - 1)) for leaf in leaves],
                             additional_inputs=())
    found = ASSOCIATIVE_SCAN(leaves, pytree.tree_leaves(combined))
    if reverse:
        found = [one.flip([0]) for one in found]
    return pytree.tree_unflatten([one.movedim(0, dim) for one in found], spec)


def generic_associative_scan(operator: Any, leaves: Any, dim: int = 0, additional_inputs: Any = ()) -> Any:
    """What torch's associative_scan(combine_mode="generic") calls: the same tree of combinations, without a question
    whether a length is even. The depth of the tree remains: a program for the lengths from a power of two to the next.

    Args:
        operator: of two lists of tensors, given one after the other. leaves: tensors of one size in `dim`, 1 or more.
    """
    count = leaves[0].shape[dim]
    if count < 2:
        return leaves
    pairs, others = count // 2, (count - 1) // 2

    def every_second(x: torch.Tensor, first: int, length: Any) -> torch.Tensor:
        return torch.ops.aten.slice(x, dim, first, first + 2 * length, 2)

    reduced = pytree.tree_leaves(operator(*[every_second(x, 0, pairs) for x in leaves],
                                          *[every_second(x, 1, pairs) for x in leaves], *additional_inputs))
    odd = generic_associative_scan(operator, reduced, dim, additional_inputs)
    even = pytree.tree_leaves(operator(*[x.narrow(dim, 0, others) for x in odd],
                                       *[every_second(x, 2, others) for x in leaves], *additional_inputs))
    result = []
    for x, at_odd, at_even in zip(leaves, odd, even):
        mine = torch.cat([x.narrow(dim, 0, 1), at_even], dim)
        more = [*x.shape]
        more[dim] = others + 1 - pairs  # one place where the length is odd
        theirs = torch.cat([at_odd, at_odd.new_zeros(more)], dim)
        result.append(torch.stack([mine, theirs], dim + 1).flatten(dim, dim + 1).narrow(dim, 0, count))
    return result


class UnknownScan(NotImplementedError):
    """A combining function that is no recurrence which kernels know; the frame is to be traced as torch does."""


def recognised(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with scans that kernels know in place of each associative scan.

    Raises:
        UnknownScan: the combining function is another one.
    """
    scans = [node for node in gm.graph.nodes if node.op == "call_function" and node.target is ASSOCIATIVE_SCAN]
    for node in scans:
        leaves, combined = node.args
        form = None
        if combined:  # of the operator: its function, what it scans, and what else the function reads
            body, _, more = combined[0].args[0].args
            form = None if more else _form(getattr(gm, body.target), len(leaves))
        if form is None:
            raise UnknownScan("a combining function of an associative scan that is no recurrence kernels know")
        with gm.graph.inserting_before(node):
            made = gm.graph.call_function(_scanned, (form, list(leaves)))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        gm.graph.erase_node(node)
    if scans:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return gm


def _scanned(form: Sequence[tuple[str, tuple[int, ...]]], leaves: Sequence[Tensor]) -> list[Tensor]:
    """The scans of a form: the name of each, and of which leaves it is."""
    found = []
    for name, (*factors, place) in form:
        x = leaves[place]
        if x.dtype == torch.bool or any(leaves[one].dtype != x.dtype for one in factors):
            raise NotImplementedError("an associative scan of bools, or of several dtypes")
        found.append(LINEAR_SCAN(*torch.broadcast_tensors(leaves[factors[0]], x)) if factors else _SCANS[name](x))
    return found


Term = tuple[Any, ...]  # ("left", 0), ("right", 1), or a function's name and two terms


def _form(body: fx.GraphModule, count: int) -> list[tuple[str, tuple[int, ...]]] | None:
    """What each result of a combining function is as a scan; None where one of them is none that is known."""
    terms: dict[fx.Node, Term] = {}
    for node in body.graph.nodes:
        if node.op == "placeholder":
            terms[node] = ("left", len(terms)) if len(terms) < count else ("right", len(terms) - count)
        elif node.op == "output":
            results = pytree.tree_leaves(node.args)
            forms = [_scan_of(terms.get(result), place) for place, result in enumerate(results)]
            return None if None in forms or len(forms) != count else forms  # type: ignore[return-value]
        else:
            name = _NAMES.get(getattr(node.target, "__name__", node.target).split(".")[0].strip("_"))
            operands = [terms.get(one) if isinstance(one, fx.Node) else None for one in node.args]
            if name is None or len(operands) != 2 or None in operands or node.kwargs:
                return None
            terms[node] = (name, *operands)
    return None


def _scan_of(term: Term | None, place: int) -> tuple[str, tuple[int, ...]] | None:
    left, right = ("left", place), ("right", place)
    if term is None or len(term) != 3:
        return None
    name, *parts = term
    if left in parts and right in parts:
        return name, (place,)
    if name != "add" or right not in parts:
        return None
    (grown,) = [part for part in parts if part != right] or [None]
    if grown is None or grown[0] != "mul" or left not in grown[1:]:
        return None
    factor = grown[1] if grown[2] == left else grown[2]
    return ("linear", (factor[1], place)) if factor[0] == "right" and factor != right else None
