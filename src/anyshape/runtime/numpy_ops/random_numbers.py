"""Random numbers by numpy: PyTorch's distributions, from a generator that whoever loads a program can seed. They are
not the numbers that PyTorch draws from the same seed.

Each takes the generator and our name of its result's dtype before the operator's arguments, which may have a `dtype`.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from anyshape.base.errors import InputError

if TYPE_CHECKING:
    Draw: TypeAlias = np.random.Generator  # whose modules, 6 MB, most programs do without

Array = np.ndarray[Any, Any]
_BITS = {"f16": 11, "bf16": 8}  # of a number in [0, 1), so that it is not rounded up to 1


def _refused(why: str) -> InputError:
    return InputError("random numbers cannot be drawn from this data", why=why, do="check what it is computed from")


def _unit(draw: Draw, dtype: str, shape: Sequence[int]) -> Array:
    """Numbers in [0, 1) that stay below 1 in the dtype."""
    if dtype == "f64":
        return draw.random(shape)
    found = draw.random(shape, np.float32)
    steps = np.float32(1 << _BITS[dtype]) if dtype in _BITS else None
    return found if steps is None else np.floor(found * steps) / steps


def _rand(draw: Draw, dtype: str, /, shape: Sequence[int], **_same: Any) -> Array:
    return _unit(draw, dtype, shape)


def _rand_like(draw: Draw, dtype: str, /, x: Array, **_same: Any) -> Array:
    return _unit(draw, dtype, x.shape)


def _uniform(draw: Draw, dtype: str, /, x: Array, low: float = 0.0, high: float = 1.0) -> Array:
    if not low <= high:
        raise _refused(f"there is no number from {low} to {high}")
    unit = _unit(draw, dtype, x.shape)
    return unit * unit.dtype.type(high - low) + unit.dtype.type(low)


def _gaussian(draw: Draw, dtype: str, /, shape: Sequence[int]) -> Array:
    return draw.standard_normal(shape, np.float64 if dtype == "f64" else np.float32)


def _randn(draw: Draw, dtype: str, /, shape: Sequence[int], **_same: Any) -> Array:
    return _gaussian(draw, dtype, shape)


def _randn_like(draw: Draw, dtype: str, /, x: Array, **_same: Any) -> Array:
    return _gaussian(draw, dtype, x.shape)


def _normal(draw: Draw, dtype: str, /, shape: Sequence[int], mean: Any, deviation: Any) -> Array:
    if np.any(np.asarray(deviation) < 0):
        raise _refused("a standard deviation is below 0")
    found = _gaussian(draw, dtype, shape)
    return found * np.asarray(deviation, found.dtype) + np.asarray(mean, found.dtype)


def _normal_like(draw: Draw, dtype: str, /, x: Array, mean: float = 0.0, deviation: float = 1.0) -> Array:
    return _normal(draw, dtype, x.shape, mean, deviation)


def _normal_of(draw: Draw, dtype: str, /, mean: Any, deviation: Any = 1.0) -> Array:
    return _normal(draw, dtype, np.broadcast_shapes(np.shape(mean), np.shape(deviation)), mean, deviation)


def _normal_sized(draw: Draw, dtype: str, /, mean: float, deviation: float, shape: Sequence[int],
                  **_same: Any) -> Array:
    return _normal(draw, dtype, shape, mean, deviation)


def _whole(draw: Draw, low: int, high: int, shape: Sequence[int]) -> Array:
    if not low < high:
        raise _refused(f"there is no whole number from {low} to below {high}")
    return draw.integers(low, high, shape)


def _randint(draw: Draw, _dtype: str, /, high: int, shape: Sequence[int], **_same: Any) -> Array:
    return _whole(draw, 0, high, shape)


def _randint_from(draw: Draw, _dtype: str, /, low: int, high: int, shape: Sequence[int], **_same: Any) -> Array:
    return _whole(draw, low, high, shape)


def _randint_like(draw: Draw, _dtype: str, /, x: Array, high: int, **_same: Any) -> Array:
    return _whole(draw, 0, high, x.shape)


def _randint_like_from(draw: Draw, _dtype: str, /, x: Array, low: int, high: int, **_same: Any) -> Array:
    return _whole(draw, low, high, x.shape)


def _randperm(draw: Draw, _dtype: str, /, count: int, **_same: Any) -> Array:
    return draw.permutation(count)


def _trials(draw: Draw, _dtype: str, /, shape: Sequence[int], probability: float) -> Array:
    return draw.random(shape) < probability


def _bernoulli(draw: Draw, _dtype: str, /, probabilities: Array) -> Array:
    if not ((probabilities >= 0) & (probabilities <= 1)).all():  # so is what is no number
        raise _refused("a probability is not within 0 and 1")
    return draw.random(probabilities.shape) < probabilities


def _multinomial(draw: Draw, _dtype: str, /, weights: Array, count: int, replacement: bool = False) -> Array:
    weights = weights.astype(np.float64)
    total = weights.sum(-1, keepdims=True)
    if not ((weights >= 0).all() and np.isfinite(weights).all() and (total > 0).all()):
        raise _refused("weights are below 0, infinite, no numbers, or all 0")
    if not replacement:
        if count > weights.shape[-1]:
            raise _refused(f"{count} of {weights.shape[-1]} categories cannot differ")
        # the least of exponential times, each at the rate of its weight
        with np.errstate(divide="ignore"):
            times = draw.standard_exponential(weights.shape) / weights
        return np.argsort(times, -1)[..., :count]
    ends = np.cumsum(weights, -1)
    ends /= ends[..., -1:]  # the last is 1, above all that are drawn
    drawn = draw.random((*weights.shape[:-1], count))
    rows = [np.searchsorted(one, own, "right") for one, own in
            zip(ends.reshape(-1, ends.shape[-1]), drawn.reshape(-1, count), strict=True)]
    return np.asarray(rows, np.int64).reshape(drawn.shape)


def _exponential(draw: Draw, dtype: str, /, x: Array, rate: float = 1.0) -> Array:
    if not rate > 0:
        raise _refused(f"the rate is {rate}")
    kind = np.float64 if dtype == "f64" else np.float32
    found = draw.standard_exponential(x.shape, kind)
    return np.maximum(found, np.finfo(kind).tiny) / kind(rate)  # logarithms are taken of them


def _cauchy(draw: Draw, _dtype: str, /, x: Array, median: float = 0.0, sigma: float = 1.0) -> Array:
    return np.asarray(draw.standard_cauchy(x.shape) * sigma + median)


def _geometric(draw: Draw, _dtype: str, /, x: Array, probability: float) -> Array:
    if not 0 < probability <= 1:
        raise _refused(f"the probability is {probability}")
    return np.asarray(draw.geometric(probability, x.shape))


def _log_normal(draw: Draw, _dtype: str, /, x: Array, mean: float = 1.0, deviation: float = 2.0) -> Array:
    if not deviation > 0:
        raise _refused(f"the standard deviation is {deviation}")
    return np.asarray(draw.lognormal(mean, deviation, x.shape))


def _poisson(draw: Draw, _dtype: str, /, rates: Array) -> Array:
    if not (rates >= 0).all():
        raise _refused("a rate is below 0 or no number")
    return np.asarray(draw.poisson(rates))


def _rrelu(draw: Draw, dtype: str, /, x: Array, low: float = 1 / 8, high: float = 1 / 3,
           training: bool = False) -> Array:
    slopes = _uniform(draw, dtype, x, low, high) if training else np.asarray((low + high) / 2, x.dtype)
    return np.where(x < 0, x * slopes, x)


OPERATORS: Mapping[str, Callable[..., Any]] = MappingProxyType({
    "draws.bernoulli": _trials,
    "aten.rand.default": _rand, "aten.rand_like.default": _rand_like, "aten.uniform.default": _uniform,
    "aten.randn.default": _randn, "aten.randn_like.default": _randn_like,
    "aten.normal_functional.default": _normal_like, "aten.normal.Tensor_Tensor": _normal_of,
    "aten.normal.Tensor_float": _normal_of, "aten.normal.float_Tensor": _normal_of,
    "aten.normal.float_float": _normal_sized,
    "aten.randint.default": _randint, "aten.randint.low": _randint_from, "aten.randint_like.default": _randint_like,
    "aten.randint_like.low_dtype": _randint_like_from, "aten.randperm.default": _randperm,
    "aten.bernoulli.default": _bernoulli, "aten.multinomial.default": _multinomial,
    "aten.exponential.default": _exponential, "aten.cauchy.default": _cauchy, "aten.geometric.default": _geometric,
    "aten.log_normal.default": _log_normal, "aten.poisson.default": _poisson, "aten.rrelu.default": _rrelu,
})
