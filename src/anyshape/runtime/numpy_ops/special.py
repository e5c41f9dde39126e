"""Special functions of single elements, by numpy in float64: psi functions, Bessel functions, inverses of the error
function, incomplete gamma functions.

Sources: M. Abramowitz, I. Stegun, Handbook of Mathematical Functions, 6.3, 6.4, 6.5, 9.2, 9.6, 9.7; S. Moshier, Cephes
(`zeta`); integrals of periodic functions by the trapezoidal rule, whose error falls exponentially.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
BERNOULLI = (12.0, -720.0, 30240.0, -1209600.0, 47900160.0, -1.8924375803183791606e9, 7.47242496e10,
             -2.950130727918164224e12, 1.1646782814350067249e14, -4.5979787224074726105e15, 1.8152105401943546773e17,
             -7.1661652561756670113e18)  # (2k)! / B(2k)
POINTS = 192  # of the trapezoidal rule over half a period
LARGE = 500.0  # from where on asymptotic series of I0 and I1 are exact
MOST_TERMS = 10_000
_erf, _erfc, _lgamma = (np.vectorize(one, otypes=[np.float64]) for one in (math.erf, math.erfc, math.lgamma))


def _elementwise(function: Callable[..., Array]) -> Callable[..., Array]:
    """The function of arrays and numbers, in float64, with a result of the arguments' float dtype."""
    def run(*given: Any) -> Array:
        kinds = [one.dtype for one in given if isinstance(one, np.ndarray)]
        shaped = [kind for one, kind in zip((x for x in given if isinstance(x, np.ndarray)), kinds, strict=True)
                  if one.ndim] or kinds
        dtype = np.result_type(*shaped) if shaped else np.dtype(np.float32)
        with np.errstate(all="ignore"):
            found = function(*(np.asarray(one, np.float64) for one in given))
            return np.asarray(found, dtype if dtype.kind == "f" else np.float32)
    return run


def digamma(x: Array) -> Array:
    """The logarithmic derivative of the gamma function; NaN at negative whole numbers, infinite at 0."""
    below = x < 0
    y = np.where(below, 1 - x, x)
    total = np.zeros_like(y)
    for _ in range(10):
        small = y < 10
        total = np.where(small, total - 1 / y, total)
        y = np.where(small, y + 1, y)
    r = 1 / (y * y)
    series = r * (1 / 12 - r * (1 / 120 - r * (1 / 252 - r * (1 / 240 - r * (1 / 132 - r * 691 / 32760)))))
    total = total + np.log(y) - 0.5 / y - series
    mirrored = total - np.pi / np.tan(np.pi * np.fmod(x, 1))
    found = np.where(below, np.where(x == np.floor(x), np.nan, mirrored), total)
    return np.where(x == 0, np.copysign(np.inf, -x), found)


def zeta(x: Array, q: Array) -> Array:
    """Hurwitz' zeta function: the sum of (k + q)**-x."""
    x, q = np.broadcast_arrays(x, q)
    a, total = q.copy(), q ** -x
    last = np.zeros_like(total)
    for step in range(MOST_TERMS):
        more = (a <= 9) if step >= 9 else np.ones(a.shape, np.bool_)
        if not more.any():
            break
        a = np.where(more, a + 1, a)
        last = np.where(more, a ** -x, last)
        total = np.where(more, total + last, total)
    total = total + last * a / (x - 1) - 0.5 * last
    factor, power = np.ones_like(total), last.copy()
    for k, of in enumerate(BERNOULLI):
        factor = factor * (x + 2 * k)
        power = power / a
        term = factor * power / of
        total = np.where(np.isfinite(term), total + term, total)
        factor = factor * (x + 2 * k + 1)
        power = power / a
    found = np.where((q <= 0) & (x != np.floor(x)), np.nan, np.where((q <= 0) & (q == np.floor(q)), np.inf, total))
    return np.where(x == 1, np.inf, np.where(x < 1, np.nan, found))


def trigamma(x: Array) -> Array:
    """The derivative of `digamma`."""
    low = x < 0.5
    y = np.where(low, 1 - x, x)
    total = np.where(low, -(np.pi / np.sin(np.pi * x)) ** 2, 0.0)
    for _ in range(12):
        total = total + 1 / (y * y)
        y = y + 1
    r = 1 / (y * y)
    total = total + (1 + 0.5 / y + r * (1 / 6 - r * (1 / 30 - r * (1 / 42 - r / 30)))) / y
    return np.where(low, -total, total)


def polygamma(n: int, x: Any) -> Array:
    """aten.polygamma: the n-th derivative of `digamma`."""
    if n == 0:
        return _elementwise(digamma)(x)
    if n == 1:
        return _elementwise(trigamma)(x)
    sign = 1.0 if n % 2 else -1.0
    return _elementwise(lambda x: sign * math.factorial(n) * zeta(np.asarray(n + 1.0), x))(x)


def _modified_bessel(order: int, scaled: bool) -> Callable[[Array], Array]:
    def run(x: Array) -> Array:
        size = np.abs(x)
        total = np.zeros_like(size)
        for k in range(POINTS + 1):
            angle = math.pi * k / POINTS
            weight = (0.5 if k in (0, POINTS) else 1.0) / POINTS * math.cos(order * angle)
            total += weight * np.exp(size * (math.cos(angle) - 1))
        r = 1 / (8 * np.maximum(size, 1))
        m = 4.0 * order * order
        series = 1 - (m - 1) * r * (1 - (m - 9) * r / 2 * (1 - (m - 25) * r / 3 * (1 - (m - 49) * r / 4)))
        total = np.where(size > LARGE, series / np.sqrt(2 * np.pi * size), total)
        total = total if not order else np.copysign(total, x)
        return total if scaled else total * np.exp(size)
    return run


def _bessel(order: int) -> Callable[[Array], Array]:
    def run(x: Array) -> Array:
        size = np.abs(x)
        near = np.minimum(size, 60.0)
        total = np.zeros_like(near)
        for k in range(POINTS + 1):
            angle = math.pi * k / POINTS
            weight = (0.5 if k in (0, POINTS) else 1.0) / POINTS
            total += weight * np.cos(order * angle - near * math.sin(angle))
        far = np.maximum(size, 60.0)
        m, r = 4.0 * order * order, 1 / (8 * far)
        p = 1 - (m - 1) * (m - 9) / 2 * r**2 * (1 - (m - 25) * (m - 49) / 12 * r**2)
        q = (m - 1) * r * (1 - (m - 9) * (m - 25) / 6 * r**2 * (1 - (m - 49) * (m - 81) / 20 * r**2))
        phase = far - (order / 2 + 0.25) * np.pi
        found = np.where(size > 60, np.sqrt(2 / (np.pi * far)) * (p * np.cos(phase) - q * np.sin(phase)), total)
        return np.where(x < 0, -found, found) if order else found
    return run


def _erfc_inverse(y: Array) -> Array:
    """z with erfc(z) == y, for 0 < y <= 1, by Newton's method on the logarithm."""
    z = np.sqrt(np.maximum(-np.log(y * np.sqrt(np.pi) * np.maximum(np.sqrt(-np.log(y)), 0.3)), 0))
    for _ in range(12):
        found = np.maximum(_erfc(z), 5e-324)
        step = (np.log(found) - np.log(y)) * found * np.sqrt(np.pi) / 2 * np.exp(z * z)
        z = np.maximum(z + step, 0)
    return z


def erfinv(x: Array) -> Array:
    """The inverse of the error function; infinite at -1 and 1, NaN outside."""
    size = np.abs(x)
    inside = np.minimum(size, 0.5)
    near = inside * np.sqrt(np.pi) / 2
    for _ in range(6):
        near = near - (_erf(near) - inside) * np.sqrt(np.pi) / 2 * np.exp(near * near)
    far = _erfc_inverse(np.clip(1 - size, 5e-324, 0.5))
    found = np.where(size <= 0.5, near, far)
    found = np.where(size == 1, np.inf, np.where(size < 1, found, np.nan))
    return np.where(x == 0, x, np.copysign(found, x))


def ndtri(p: Array) -> Array:
    """The quantiles of the normal distribution."""
    tail = np.minimum(p, 1 - p)
    found = np.where(tail > 0.25, math.sqrt(2) * erfinv(2 * p - 1),
                     np.where(p < 0.5, -1, 1) * math.sqrt(2) * _erfc_inverse(np.clip(2 * tail, 5e-324, 0.5)))
    return np.where(p == 0, -np.inf, np.where(p == 1, np.inf, np.where((p > 0) & (p < 1), found, np.nan)))


def erfcx(x: Array) -> Array:
    """exp(x**2) * erfc(x)."""
    near, far = np.minimum(x, 20.0), np.maximum(x, 20.0)
    r = 1 / (2 * far * far)
    return np.where(x < 20, np.exp(near * near) * _erfc(near),
                    (1 - r * (1 - 3 * r * (1 - 5 * r * (1 - 7 * r)))) / (far * math.sqrt(math.pi)))


def _incomplete_gamma(a: Array, x: Array) -> tuple[Array, Array]:
    """The lower and the upper regularised incomplete gamma function, for a > 0 and finite x > 0."""
    front = np.exp(a * np.log(x) - x - _lgamma(a))
    series = x < a + 1
    term = total = np.where(series, 1 / a, 0.0)
    of = a.copy()
    for _ in range(MOST_TERMS):
        of = of + 1
        term = term * np.where(series, x, 0) / of
        total = total + term
        if not (np.abs(term) > np.abs(total) * 1e-16).any():
            break
    lower = front * total
    # Lentz' way to evaluate the continued fraction
    b = np.where(series, 1.0, x + 1 - a)
    c, d = np.full_like(b, 1e300), 1 / np.where(b == 0, 1e-300, b)
    fraction = d
    for n in range(1, MOST_TERMS):
        by = -n * (n - a)
        b = b + 2
        d = by * d + b
        d = 1 / np.where(d == 0, 1e-300, d)
        c = b + by / c
        c = np.where(c == 0, 1e-300, c)
        fraction = fraction * d * c
        if not (np.abs(d * c - 1)[~series] > 1e-15).any():
            break
    upper = front * fraction
    return np.where(series, lower, 1 - upper), np.where(series, 1 - lower, upper)


def _gamma_part(upper: bool) -> Callable[[Array, Array], Array]:
    def run(a: Array, x: Array) -> Array:
        a, x = np.broadcast_arrays(a, x)
        usual = (a > 0) & (x > 0) & np.isfinite(a) & np.isfinite(x)
        found = _incomplete_gamma(np.where(usual, a, 1.0), np.where(usual, x, 1.0))[upper]
        one, nothing = (0.0, 1.0) if upper else (1.0, 0.0)
        edge = np.where((a < 0) | (x < 0) | np.isnan(a) | np.isnan(x), np.nan,
                        np.where(a == 0, np.where(x > 0, one, np.nan),
                                 np.where(x == 0, nothing, np.where(np.isinf(a), np.where(np.isinf(x), np.nan, nothing),
                                                                    one))))
        return np.where(usual, found, edge)
    return run


OWN: dict[str, Callable[..., Any]] = {"digamma": _elementwise(digamma), "erfinv": _elementwise(erfinv)}
OPERATORS: dict[str, Callable[..., Any]] = {
    "aten.digamma.default": OWN["digamma"], "aten.erfinv.default": OWN["erfinv"], "aten.polygamma.default": polygamma,
    **{f"aten.special_zeta.{kind}": _elementwise(zeta) for kind in ("default", "self_scalar", "other_scalar")},
    "aten.i0.default": _elementwise(_modified_bessel(0, False)),
    "aten.special_i0e.default": _elementwise(_modified_bessel(0, True)),
    "aten.special_i1.default": _elementwise(_modified_bessel(1, False)),
    "aten.special_i1e.default": _elementwise(_modified_bessel(1, True)),
    "aten.special_modified_bessel_i0.default": _elementwise(_modified_bessel(0, False)),
    "aten.special_modified_bessel_i1.default": _elementwise(_modified_bessel(1, False)),
    "aten.special_bessel_j0.default": _elementwise(_bessel(0)),
    "aten.special_bessel_j1.default": _elementwise(_bessel(1)),
    "aten.special_spherical_bessel_j0.default": _elementwise(
        lambda x: np.where(np.isinf(x), 0, np.sinc(x / np.pi))),
    "aten.special_ndtri.default": _elementwise(ndtri), "aten.special_erfcx.default": _elementwise(erfcx),
    "aten.igamma.default": _elementwise(_gamma_part(False)), "aten.igammac.default": _elementwise(_gamma_part(True)),
}
