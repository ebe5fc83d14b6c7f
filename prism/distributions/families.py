"""Standard members of the families behind `prism.distributions.law`: plain functions on arrays.

One pair per family, `cdf(params, z)` and `ppf(params, q)`, with the location and scale that make
the formulas shortest; `prism.distributions.law.Law` shifts and scales them. scipy.special is
imported inside the functions: it costs start-up time that `prism --help` must not pay. Left out:
fitting.
"""

from __future__ import annotations

import math
from collections.abc import Callable

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
    "gamma": (_gamma_cdf, _gamma_ppf),
    "uniform": (_uniform_cdf, _uniform_ppf),
    "bounded_body": (_bounded_body_cdf, _bounded_body_ppf),
}
