"""Meta kernels: shapes of the results of operators that would end a graph, since torch's tracer has no rule for them or
a poor one.

A rule takes the operator's arguments as the tracer has them, and gives results without numbers, or NotImplemented where
torch's own rule serves. `new_size` makes a size that only the data will tell; it raises where such are not captured.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from anyshape.frontend.aten import decompositions
from anyshape.frontend.capture.copied_parts import SeenCopy
from anyshape.frontend.capture.traceable_functions import IN_PYTHON
from anyshape.frontend.recurrent import scans
from anyshape.torch_compat import aten
from anyshape.torch_compat.tracing import settings
from anyshape.torch_compat.versions import python_kernels

Unknown = Callable[[], Any]


def _geqrf(new_size: Unknown, a: torch.Tensor) -> Any:
    *batch, rows, columns = a.shape
    return torch.empty_like(a.mT, memory_format=torch.contiguous_format).mT, a.new_empty(
        (*batch, torch.sym_min(rows, columns)))


def _bin_edges(new_size: Unknown, a: torch.Tensor, bins: Any, **more: Any) -> Any:
    return [a.new_empty((number + 1,)) for number in bins]


def _bin_counts(new_size: Unknown, a: torch.Tensor, bins: Any, **more: Any) -> Any:
    return a.new_empty(bins)


def _ctc_loss(new_size: Unknown, log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any,
              target_lengths: Any, blank: int = 0, zero_infinity: bool = False) -> Any:
    steps, *batch, _ = log_probs.shape
    states = new_size() if isinstance(target_lengths, torch.Tensor) else 2 * max(target_lengths, default=0) + 1
    return log_probs.new_empty(batch), log_probs.new_empty((*batch, steps, states))


def _like_the_input(new_size: Unknown, grad: torch.Tensor, x: torch.Tensor, *rest: Any, **more: Any) -> Any:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _in_order(new_size: Unknown, x: torch.Tensor, *rest: Any, **more: Any) -> Any:
    """Laid out in order whatever the strides of the operands, where torch's own rule keeps these."""
    shapes = [one.shape for one in (x, *rest) if isinstance(one, torch.Tensor)]
    return x.new_empty(torch.broadcast_shapes(*shapes))


def _like_all(count: int, *dtypes: torch.dtype | None) -> Callable[..., Any]:
    """As many results as there are `dtypes`, laid out as the first operand is; of its dtype where none is given. With
    `count` of 1 a tensor, else a tuple."""
    def rule(new_size: Unknown, x: torch.Tensor, *rest: Any, **more: Any) -> Any:
        found = tuple(torch.empty_like(x, dtype=dtype or x.dtype) for dtype in dtypes)
        return found[0] if count == 1 else found

    return rule


def _histogram(new_size: Unknown, x: torch.Tensor, bins: Any, **more: Any) -> Any:
    """bins: how many, or their edges."""
    edges = bins.shape[0] if isinstance(bins, torch.Tensor) else bins + 1
    return x.new_empty((edges - 1,)), x.new_empty((edges,))


def _masked_softmax(new_size: Unknown, x: torch.Tensor, *rest: Any, **more: Any) -> Any:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _complex_mean(new_size: Unknown, x: torch.Tensor, dim: Any = None, keepdim: bool = False, *,
                  dtype: torch.dtype | None = None) -> Any:
    """torch's own divides a complex number by the number of elements, of which it takes numbers only."""
    if not (dtype or x.dtype).is_complex:
        return NotImplemented
    return aten.sum.dim_IntList(x, dim, keepdim, dtype=dtype)


def _complex_by_a_size(new_size: Unknown, x: Any, other: Any, *rest: Any, **more: Any) -> Any:
    """The same for operators of a complex tensor and a number made of sizes."""
    by_size = isinstance(other, (torch.SymInt, torch.SymFloat)) or any(
        isinstance(one, (torch.SymInt, torch.SymFloat)) for one in (*rest, *more.values()))
    if not isinstance(x, torch.Tensor) or not x.dtype.is_complex or not by_size or isinstance(other, torch.Tensor):
        return NotImplemented
    return torch.empty_like(x)


def _rrelu(new_size: Unknown, x: torch.Tensor, *rest: Any, **more: Any) -> Any:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _masked_select(new_size: Unknown, x: torch.Tensor, mask: torch.Tensor) -> Any:
    """torch's own makes a new size for each call; here the same mask always selects as many, as in x[mask]."""
    if not settings.same_shape(x, mask):
        return x.new_empty((new_size(),))
    return x.new_empty((aten.nonzero(mask).shape[0],))


def _nonzero(new_size: Unknown, x: torch.Tensor) -> Any:
    """Over nothing nothing is found, which no data need to tell."""
    return x.new_empty((0, x.dim()), dtype=torch.int64) if settings.has_size_0(x) else NotImplemented


def _lstsq(new_size: Unknown, a: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *,
           driver: str | None = None) -> Any:
    """Two drivers give residuals where all matrices have full rank, which only the data tell, and else a vector of
    length 0. They are taken to be there, with a first size that is only known then."""
    *batch, rows, columns = a.shape
    vectors = b.unsqueeze(-1) if a.dim() - b.dim() == 1 else b
    found = (*torch.broadcast_shapes(batch, vectors.shape[:-2]), vectors.shape[-1])
    solution = b.new_empty((*found, torch.sym_max(rows, columns))).mT.narrow(-2, 0, columns)
    by_rank = driver in ("gelss", "gelsd")
    residuals: tuple[Any, ...] = (0,)
    if (by_rank or driver == "gels") and rows > columns:
        residuals = (new_size(), *found[1:]) if by_rank else found
    values = (*batch, torch.sym_min(rows, columns)) if by_rank else (0,)
    return (solution if vectors is b else solution.squeeze(-1), a.new_empty(residuals, dtype=a.dtype.to_real()),
            a.new_empty((0,) if driver == "gels" else batch, dtype=torch.int64),
            a.new_empty(values, dtype=a.dtype.to_real()))


def _not_over_nothing(what: str) -> Callable[..., Any]:
    """The largest of nothing is refused; torch's own rule has a result for it."""
    def rule(new_size: Unknown, x: torch.Tensor, dim: Any = None, *rest: Any, **more: Any) -> Any:
        sizes = x.shape if dim is None else x.shape[dim:][:1] if x.dim() else ()
        python_kernels.refuse_size_0(sizes, IndexError, f"{what}(): Expected reduction dim "
                                                     f"{'' if dim is None else dim} to have non-zero size.")
        return NotImplemented

    return rule


def _nearest(new_size: Unknown, x: torch.Tensor, output_size: Any, *scales: Any, **more: Any) -> Any:
    """An empty batch has an empty result; torch's own rule fails over it, for it takes a product for a truth value."""
    if not settings.has_size_0(x) or x.dim() < 2:
        return NotImplemented
    python_kernels.refuse_size_0(x.shape[1:], RuntimeError,
                                 f"Non-empty {x.dim()}D data tensor expected but got one with sizes {list(x.shape)}")
    found = x.new_empty((*x.shape[:2], *output_size))
    channels, strides = x.shape[1], (x.stride(1), x.stride(-1))
    if x.dim() > 3 and all(type(one) is int for one in (channels, *strides)) and strides == (1, channels) != (1, 1):
        return found.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    return found


WHOLE_INDEX, ANY_INDEX = (torch.int64, torch.int32), (torch.int64, torch.int32, torch.uint8, torch.bool)


def _index_of(place: int, dtypes: tuple[torch.dtype, ...], error: type[Exception], said: str) -> Callable[..., Any]:
    """The argument at `place`, an index or a sequence of such, has one of these dtypes, as eager PyTorch asks; torch's
    own rules of these operators do not, and a lookup by numbers that were rounded would be made."""
    def rule(new_size: Unknown, *operands: Any, **more: Any) -> Any:
        given = operands[place] if place < len(operands) else None
        for index in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(index, torch.Tensor) and index.dtype not in dtypes:
                raise error(f"{said}, but got {index.dtype}")
        return NotImplemented

    return rule


def _index_rules() -> dict[Any, Callable[..., Any]]:
    found = {aten.embedding.default: _index_of(1, WHOLE_INDEX, RuntimeError,
                                               "Expected tensor for argument #1 'indices' to be Long or Int")}
    for name, dtypes, error, kinds in (
            ("index_select", WHOLE_INDEX, RuntimeError, ("default",)),
            ("index_add", WHOLE_INDEX, RuntimeError, ("default",)),
            ("index_copy", WHOLE_INDEX[:1], RuntimeError, ("default",)),
            ("index_fill", WHOLE_INDEX[:1], IndexError, ("int_Scalar", "int_Tensor"))):
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in reversed(dtypes))
        rule = _index_of(2, dtypes, error, f"{name}(): Expected dtype {wanted} for index")
        found.update({getattr(getattr(aten, written), kind): rule for kind in kinds
                      for written in (name, f"{name}_") if hasattr(aten, written)})
    by_list = _index_of(1, ANY_INDEX, IndexError, "tensors used as indices must be long, int, byte or bool tensors")
    return {**found, aten.index_put.default: by_list, aten.index_put_.default: by_list}


def _as(operator: Any) -> Callable[..., Any]:
    """Of two operands, laid out as `operator` lays them out; torch's own rule asks one of them only."""
    def rule(new_size: Unknown, a: Any, b: Any) -> Any:
        return operator(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else NotImplemented

    return rule


def _decomposed(operator: Any) -> Callable[..., Any]:
    """By our decomposition, where torch's lays results out otherwise."""
    def rule(new_size: Unknown, *operands: Any, **more: Any) -> Any:
        return decompositions.table()[operator](*operands, **more)

    return rule


_RULES: dict[Any, Callable[..., Any]] = {
    **{operator: _as(aten.add.Tensor) for operator in (
        aten.heaviside.default, aten.logaddexp.default, aten.logaddexp2.default)},
    **{operator: _as(aten.div.Tensor) for operator in (aten.special_xlog1py.default, aten.xlogy.Tensor)},
    **{overload: _not_over_nothing(name) for name in ("max", "min")
       for overload in (getattr(aten, name).default, getattr(aten, name).dim)},
    **{getattr(aten, f"{name}{rank}d").default: _nearest for rank in (1, 2, 3)
       for name in ("upsample_nearest", "_upsample_nearest_exact")},
    aten.mean.default: _complex_mean,
    aten.mean.dim: _complex_mean,
    **{getattr(getattr(aten, name), kind): _complex_by_a_size for name in ("add", "sub", "mul", "div", "rsub")
       for kind in ("Tensor", "Scalar")},
    aten.linalg_lstsq.default: _lstsq,
    aten.nonzero.default: _nonzero,
    aten.geqrf.default: _geqrf,
    aten._histogramdd_bin_edges.default: _bin_edges,
    aten._histogramdd_from_bin_cts.default: _bin_counts,
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.default: _like_the_input,
    aten._ctc_loss_backward.Tensor: _like_the_input,
    aten.fractional_max_pool3d_backward.default: _like_the_input,
    aten.masked_select.default: _masked_select,
    **dict.fromkeys((aten.poisson.default, aten._standard_gamma.default, aten._standard_gamma_grad.default,
                     aten._sample_dirichlet.default, aten._dirichlet_grad.default, aten.binomial.default,
                     aten.normal.Tensor_Tensor), _in_order),
    **dict.fromkeys((aten.fake_quantize_per_tensor_affine_cachemask.default,
                     aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
                     aten.fake_quantize_per_channel_affine_cachemask.default), _like_all(2, None, torch.bool)),
    **dict.fromkeys((aten._fake_quantize_learnable_per_tensor_affine.default,
                     aten._fake_quantize_learnable_per_channel_affine.default), _like_all(1, None)),
    **dict.fromkeys((aten.histogram.bin_ct, aten.histogram.bins_tensor), _histogram),
    **dict.fromkeys((aten._masked_softmax.default, aten._masked_softmax_backward.default), _masked_softmax),
    **dict.fromkeys((aten.rrelu.default, aten.rrelu_with_noise.default), _rrelu),
    **_index_rules(),
}


@functools.cache
def rules() -> dict[Any, Callable[..., Any]]:
    """Operator -> its rule. Made while torch's decompositions are there, of which some are set aside where rules are
    followed."""
    decomposed = [operator for operator in decompositions.LAYOUTS if operator in decompositions.table()]
    return {**_RULES, **{operator: _decomposed(operator) for operator in decomposed}}


def tracing_settings(dynamic: bool, oblivious: bool, others: int, numbers: frozenset[str],
                     changing: frozenset[str], as_torch: frozenset[type] = frozenset()) -> Any:
    """torch_trace.tracing_settings, with the rules above. as_torch: what is traced as torch does (`UnknownScan`: scans
    as trees; `SeenCopy`: positions that are tensors)."""
    scan, tree = (scans.FUNCTION, scans.associative_scan), (scans.GENERIC, scans.generic_associative_scan)
    torchs, ours = tree if scans.UnknownScan in as_torch or not oblivious else scan
    in_python = IN_PYTHON if torchs is None else {**IN_PYTHON, torchs: ours}
    return settings.tracing_settings(dynamic, oblivious, rules(), in_python, others, numbers, changing,
                                     SeenCopy not in as_torch)
