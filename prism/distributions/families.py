"""Standard members of the families behind `prism.distributions.law`: plain functions on arrays.

One pair per family, `cdf(params, z)` and `ppf(params, q)`, with the location and scale that make
the formulas shortest; `prism.distributions.law.Law` shifts and scales them. scipy.special is
imported inside the functions: it costs start-up time that `prism --help` must not pay. Left out:
fitting.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = tuple[float, ...]
Function = Callable[[Params, Array], Array]

BODY_THRESHOLD = 0.9  # probability from which the bounded body follows its generalised Pareto tail


def _constant_cdf(params: Params, z: Array) -> Array:
    return np.where(z >= 0.0, 1.0, 0.0)


def _constant_ppf(params: Params, q: Array) -> Array:
    return np.zeros_like(q)


def _sigma(cv: float) -> float:
    return math.sqrt(math.log1p(cv * cv))


def _lognormal_cdf(params: Params, z: Array) -> Array:
    from scipy.special import ndtr

    sigma = _sigma(params[0])
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(z > 0.0, np.log(np.where(z > 0.0, z, 1.0)), -np.inf)
    return np.asarray(ndtr(logs / sigma + 0.5 * sigma))


def _lognormal_ppf(params: Params, q: Array) -> Array:
    from scipy.special import ndtri

    sigma = _sigma(params[0])
    return np.asarray(np.exp(sigma * ndtri(q) - 0.5 * sigma * sigma))


def _shifted_lognormal_cdf(params: Params, z: Array) -> Array:
    cv, shift = params
    return _lognormal_cdf((cv / (1.0 - shift),), (z - shift) / (1.0 - shift))


def _shifted_lognormal_ppf(params: Params, q: Array) -> Array:
    cv, shift = params
    return shift + (1.0 - shift) * _lognormal_ppf((cv / (1.0 - shift),), q)


def _normal_cdf(params: Params, z: Array) -> Array:
    from scipy.special import ndtr

    return np.asarray(ndtr(z))


def _normal_ppf(params: Params, q: Array) -> Array:
    from scipy.special import ndtri

    return np.asarray(ndtri(q))


def _gamma_cdf(params: Params, z: Array) -> Array:
    from scipy.special import gammainc

    shape = params[0] ** -2
    return np.asarray(gammainc(shape, np.maximum(z, 0.0) * shape))


def _gamma_ppf(params: Params, q: Array) -> Array:
    from scipy.special import gammaincinv

    shape = params[0] ** -2
    return np.asarray(gammaincinv(shape, q) / shape)


@lru_cache(maxsize=256)
def weibull_shape(cv: float) -> float:
    """Shape c with Gamma(1 + 2/c) / Gamma(1 + 1/c)**2 - 1 = cv**2."""
    from scipy.optimize import brentq

    def excess(log_c: float) -> float:
        first, second = (math.lgamma(1.0 + k * math.exp(-log_c)) for k in (1.0, 2.0))
        return second - 2.0 * first - math.log1p(cv * cv)

    return float(math.exp(brentq(excess, math.log(0.1), math.log(1e4), xtol=1e-14)))


def _weibull_cdf(params: Params, z: Array) -> Array:
    shape = weibull_shape(params[0])
    return np.asarray(-np.expm1(-((np.maximum(z, 0.0) * math.gamma(1.0 + 1.0 / shape)) ** shape)))


def _weibull_ppf(params: Params, q: Array) -> Array:
    shape = weibull_shape(params[0])
    with np.errstate(divide="ignore"):
        z: Array = (-np.log1p(-q)) ** (1.0 / shape) / math.gamma(1.0 + 1.0 / shape)
    return z


def _student_t_cdf(params: Params, z: Array) -> Array:
    from scipy.special import stdtr

    return np.asarray(stdtr(params[1], z))


def _student_t_ppf(params: Params, q: Array) -> Array:
    from scipy.special import stdtrit

    # the lower half mirrored: 1 - q is exact where q is close to 1
    upper = q > 0.5
    z: Array = np.asarray(stdtrit(params[1], np.where(upper, 1.0 - q, q)))
    return np.where(upper, -z, z)


def _uniform_cdf(params: Params, z: Array) -> Array:
    lo, hi = params
    if hi == lo:
        return np.where(z >= lo, 1.0, 0.0)
    return np.clip((z - lo) / (hi - lo), 0.0, 1.0)


def _uniform_ppf(params: Params, q: Array) -> Array:
    lo, hi = params
    return lo + (hi - lo) * q


def _body_tail() -> tuple[float, float]:
    """Threshold and the tail scale that makes the density continuous there."""
    from scipy.special import ndtri

    threshold = float(ndtri(BODY_THRESHOLD))
    density = math.exp(-0.5 * threshold * threshold) / math.sqrt(2.0 * math.pi)
    return threshold, (1.0 - BODY_THRESHOLD) / density


def _bounded_body_cdf(params: Params, z: Array) -> Array:
    from scipy.special import ndtr

    shape = params[1]
    threshold, scale = _body_tail()
    base = np.maximum(1.0 + shape * np.maximum(z - threshold, 0.0) / scale, 0.0)
    tail = 1.0 - (1.0 - BODY_THRESHOLD) * base ** (-1.0 / shape)
    return np.where(z <= threshold, ndtr(z), tail)


def _bounded_body_ppf(params: Params, q: Array) -> Array:
    from scipy.special import ndtri

    shape = params[1]
    threshold, scale = _body_tail()
    survival = np.minimum((1.0 - q) / (1.0 - BODY_THRESHOLD), 1.0)
    tail = threshold + scale / shape * (survival**-shape - 1.0)
    return np.where(q <= BODY_THRESHOLD, ndtri(np.minimum(q, BODY_THRESHOLD)), tail)


# family -> (cdf, ppf) of its standard member; mixtures and quantile laws live in Law itself
STANDARD: dict[str, tuple[Function, Function]] = {
    "constant": (_constant_cdf, _constant_ppf),
    "lognormal": (_lognormal_cdf, _lognormal_ppf),
    "normal": (_normal_cdf, _normal_ppf),
    "shifted_lognormal": (_shifted_lognormal_cdf, _shifted_lognormal_ppf),
    "gamma": (_gamma_cdf, _gamma_ppf),
    "weibull": (_weibull_cdf, _weibull_ppf),
    "student_t": (_student_t_cdf, _student_t_ppf),
    "uniform": (_uniform_cdf, _uniform_ppf),
    "bounded_body": (_bounded_body_cdf, _bounded_body_ppf),
}
