"""Standard members of the families of `prism.distributions.distribution`: (cdf, ppf) of each.

Their location and scale make the formulas shortest; `Distribution` shifts and scales them, and
imports this module (and scipy.special, slow to start) only where one is evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import gammainc, gammaincinv, ndtr, ndtri

from prism.common.arrays import Array

Params = tuple[float, ...]
Function = Callable[[Params, Array], Any]

BODY_THRESHOLD = 0.9  # probability from which the bounded body follows its generalised Pareto tail
_TAIL_START = float(ndtri(BODY_THRESHOLD))
# the scale that makes the density continuous at the threshold
_TAIL_SCALE = (1.0 - BODY_THRESHOLD) / (
    math.exp(-0.5 * _TAIL_START * _TAIL_START) / math.sqrt(2.0 * math.pi)
)


def _sigma(params: Params) -> float:
    return math.sqrt(math.log1p(params[0] * params[0]))


def _lognormal_cdf(params: Params, z: Array) -> Any:
    sigma = _sigma(params)
    with np.errstate(divide="ignore"):
        return ndtr(np.log(np.maximum(z, 0.0)) / sigma + 0.5 * sigma)


def _lognormal_ppf(params: Params, q: Array) -> Any:
    sigma = _sigma(params)
    return np.exp(sigma * ndtri(q) - 0.5 * sigma * sigma)


def _gamma_cdf(params: Params, z: Array) -> Any:
    shape = params[0] ** -2
    return gammainc(shape, np.maximum(z, 0.0) * shape)


def _gamma_ppf(params: Params, q: Array) -> Any:
    shape = params[0] ** -2
    return gammaincinv(shape, q) / shape


def _uniform_cdf(params: Params, z: Array) -> Any:
    lo, hi = params
    if hi == lo:
        return np.where(z >= lo, 1.0, 0.0)
    return np.clip((z - lo) / (hi - lo), 0.0, 1.0)


def _uniform_ppf(params: Params, q: Array) -> Any:
    lo, hi = params
    return lo + (hi - lo) * q


def _bounded_body_cdf(params: Params, z: Array) -> Any:
    shape = params[1]
    base = np.maximum(1.0 + shape * np.maximum(z - _TAIL_START, 0.0) / _TAIL_SCALE, 0.0)
    tail = 1.0 - (1.0 - BODY_THRESHOLD) * base ** (-1.0 / shape)
    return np.where(z <= _TAIL_START, ndtr(z), tail)


def _bounded_body_ppf(params: Params, q: Array) -> Any:
    shape = params[1]
    survival = np.minimum((1.0 - q) / (1.0 - BODY_THRESHOLD), 1.0)
    tail = _TAIL_START + _TAIL_SCALE / shape * (survival**-shape - 1.0)
    return np.where(q <= BODY_THRESHOLD, ndtri(np.minimum(q, BODY_THRESHOLD)), tail)


STANDARD: dict[str, tuple[Function, Function]] = {
    "constant": (lambda _, z: np.where(z >= 0.0, 1.0, 0.0), lambda _, q: np.zeros_like(q)),
    "lognormal": (_lognormal_cdf, _lognormal_ppf),
    "normal": (lambda _, z: ndtr(z), lambda _, q: ndtri(q)),
    "gamma": (_gamma_cdf, _gamma_ppf),
    "uniform": (_uniform_cdf, _uniform_ppf),
    "bounded_body": (_bounded_body_cdf, _bounded_body_ppf),
}
